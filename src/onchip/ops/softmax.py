"""Softmax over the last dimension, and its logarithm."""

import torch
from torch import Tensor

from onchip.core.arguments import check_temperature, check_tensors
from onchip.core.problem import Rows
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, differentiable


def softmax(
    x: Tensor,  # [..., width]
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,  # broadcasts to x
    kernel: str = "auto",
) -> Tensor:
    """`exp(z) / sum exp(z)` of `z = x / temperature + mask`, in float32, rounded once.

    mask   bools: True for what is shown, the rest may be NaN; or floats to add, which get no gradient.
    A row with nothing left, all hidden or -inf, gives 0. Raises ValueError for a temperature or a mask that does not fit.
    """
    return _softmax(x, *_checked("softmax", x, mask, temperature), False, kernel)


def log_softmax(
    x: Tensor,  # [..., width]
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,  # broadcasts to x
    kernel: str = "auto",
) -> Tensor:
    """`z - log sum exp(z)` of `z = x / temperature + mask`, as `softmax`; -inf where nothing is shown, which no gradient goes through."""
    return _softmax(x, *_checked("log_softmax", x, mask, temperature), True, kernel)


def _checked(name: str, x: Tensor, mask: Tensor | None, temperature: float) -> tuple[Tensor | None, float]:
    check_tensors(name, optional=("mask",), x=x, mask=mask)
    check_temperature(name, temperature=temperature)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x is {list(x.shape)}; its last dimension must hold something")
    if mask is None:
        return None, float(temperature)
    sizes = list(zip(mask.shape[::-1], x.shape[::-1], strict=False))
    if mask.ndim > x.ndim or any(given != 1 and given != size for given, size in sizes):  # `in` does not know symbols
        raise ValueError(f"{name}: mask is {list(mask.shape)}; give a shape that broadcasts to {list(x.shape)}")
    if mask.dtype != torch.bool and (not mask.is_floating_point() or mask.requires_grad):
        kind = f"{mask.dtype}" + ", which requires gradients" * mask.requires_grad
        raise ValueError(f"{name}: mask is {kind}; give bools, or floats without gradients (a learnt bias is added to x)")
    return mask, float(temperature)


def _problem(op: str, x: Tensor, mask: Tensor | None, log: bool) -> Rows:
    kind = [] if mask is None else ["bool mask" if mask.dtype == torch.bool else "mask"]
    return Rows(op, x.numel() // x.shape[-1], x.shape[-1], x.dtype, " ".join(["log"] * log + kind))


def _forward(x: Tensor, mask: Tensor | None, temperature: float, log: bool, kernel: str) -> Tensor:
    return select(_problem("softmax", x, mask, log), x.device, kernel).launch(x, mask, temperature)


def _backward(y: Tensor, dy: Tensor, temperature: float, log: bool, kernel: str) -> Tensor:
    return select(_problem("softmax_backward", y, None, log), y.device, kernel).launch(y, dy, temperature)


def _keep(ctx, inputs, output):
    ctx.call = inputs[2:]
    ctx.save_for_backward(output)


def _back(ctx, backward, dy):
    (y,) = ctx.saved_tensors
    return backward(y, dy, *ctx.call), None, None, None, None


_softmax = differentiable(
    "softmax", _forward, _backward, Rule(_keep, _back, (lambda x, *_: x.new_empty(x.shape), lambda y, *_: y.new_empty(y.shape)))
)  # fmt: skip
