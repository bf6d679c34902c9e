"""GroupNorm with its activation, in every layout, with gradients."""

import math

import torch
from torch import Tensor

from onchip.core.arguments import as_int, check_numbers, check_tensors
from onchip.core.parts import is_whole
from onchip.core.problem import Groups, exact_of
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, differentiable

ACTS = ("", "silu", "mish")


def group_norm(
    x: Tensor,  # [batch, channels, ...]
    groups: int,
    weight: Tensor | None = None,  # [channels]
    bias: Tensor | None = None,  # [channels]
    *,
    act: str = "",
    eps: float = 1e-5,
    kernel: str = "auto",
) -> Tensor:
    """`act((x - mean) / sqrt(var + eps) * weight + bias)`, mean and var of a group of channels of a sample (Wu and He, 2018), rounded once.

    act   "", "silu" or "mish".
    x is an image [batch, channels, height, width], a video with one more dimension, or any other; one in torch's channels_last format is
    read and written as it lies, anything else is made contiguous first. Differentiable in all tensors.
    Raises ValueError for groups that do not divide the channels and for shapes that disagree.
    """
    check_tensors("group_norm", optional=("weight", "bias"), x=x, weight=weight, bias=bias)
    check_numbers("group_norm", 0, eps=eps)
    if x.ndim < 2 or not is_whole(groups) or groups < 1 or x.shape[1] % groups or not x.shape[1]:
        raise ValueError(f"group_norm: x is {list(x.shape)}, groups={groups!r}; give [batch, channels, ...] and a number that divides the channels")
    if act not in ACTS:
        raise ValueError(f"group_norm: act={act!r} is not one of {', '.join(map(repr, ACTS))}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[1:2]:
            raise ValueError(f"group_norm: {name} is {list(t.shape)}; x has {x.shape[1]} channels: give [{x.shape[1]}]")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise ValueError(f"group_norm: weight is {weight.dtype}, bias {bias.dtype}; they must be of one dtype")
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _group_norm(x, weight, bias, as_int(groups), act, float(eps), kernel, trains)[0]


def _last(x: Tensor) -> bool:
    """Whether channels come last in memory: torch's channels_last formats."""
    if x.ndim not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def _matrix(x: Tensor, last: bool) -> Tensor:
    """[batch, channels, pixels], or [batch, pixels, channels] where channels come last; copied if x lies otherwise."""
    if last:
        return x.movedim(1, -1).contiguous().view(x.shape[0], math.prod(x.shape[2:]), x.shape[1])
    return x.contiguous().view(*x.shape[:2], math.prod(x.shape[2:]))


def _image(y: Tensor, x: Tensor, last: bool) -> Tensor:
    """The reverse of `_matrix`, shaped like x."""
    return y.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1) if last else y.view(x.shape)


def _problem(op: str, x: Tensor, groups: int, act: str, last: bool) -> Groups:
    batch, channels, *size = x.shape
    return Groups(op, batch, channels, groups, math.prod(size), x.dtype, act, "channels_last" if last else "channels_first")


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, act: str, eps: float, kernel: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y as x lies; mean and rstd of each group, [batch, groups], where they are kept."""
    last = _last(x)
    y, *stats = select(_problem("group_norm", x, groups, act, last), x.device, kernel).launch(_matrix(x, last), weight, bias, eps, keep)
    return _image(y, x, last), *(stats if keep else (x.new_empty(0), x.new_empty(0)))


def _backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, act: str, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx as x lies, and the gradients of weight and bias."""
    last = _last(x)
    kernel = f"{kernel}_backward" if kernel.startswith("triton") else kernel
    decision = select(_problem("group_norm_backward", x, groups, act, last), x.device, kernel)
    dx, d_weight, d_bias = decision.launch(_matrix(dy, last), _matrix(x, last), mean, rstd, weight, bias)
    return _image(dx, x, last), d_weight, d_bias.clone()  # results of an operator share no memory


def _keep(ctx, inputs, output):
    x, weight, bias, groups, act, _, kernel, _ = inputs
    ctx.call = groups, act, kernel
    ctx.save_for_backward(x, *output[1:], weight, bias)
    ctx.set_materialize_grads(False)


def _back(ctx, backward, dy, *_):
    grads = (None,) * 3 if dy is None else backward(dy, *ctx.saved_tensors, *ctx.call)
    return *(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad[:3], strict=True)), None, None, None, None, None


def _shapes(x, weight, bias, groups, act, eps, kernel, keep):
    stats = (x.new_empty((x.shape[0], groups), dtype=exact_of(x.dtype)) if keep else x.new_empty(0) for _ in range(2))
    return _like(x), *stats


def _shapes_backward(dy, x, mean, rstd, weight, bias, *_):
    given = next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
    return _like(x), *(x.new_empty(x.shape[1], dtype=given) for _ in range(2))


def _like(x: Tensor) -> Tensor:
    """A result as `_image` makes it."""
    last = _last(x)
    return _image(x.new_empty((x.shape[0], *x.shape[2:], x.shape[1]) if last else x.shape), x, last)


_group_norm = differentiable("group_norm", _forward, _backward, Rule(_keep, _back, (_shapes, _shapes_backward)))
