"""Activations, plain and gated, with an optional bias: one pass over memory forward, one backward."""

from typing import NamedTuple

from torch import Tensor

from onchip.core.arguments import check_numbers, check_tensors
from onchip.core.problem import Rows
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, as_autocast, differentiable

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "mish")
LAYOUTS = ("halves", "interleaved")


class Clipped(NamedTuple):
    """gpt-oss's gate: `gate sigmoid(alpha gate) (up + 1)`, the gate cut off above `limit` and up on both sides."""

    alpha: float = 1.702
    limit: float = 7.0


def gated_act(
    x: Tensor,  # [..., 2 width]
    act: str | Clipped = "silu",
    *,
    bias: Tensor | None = None,  # [2 width]
    layout: str = "halves",
    kernel: str = "auto",
) -> Tensor:
    """`act(gate) * up`, `[..., width]`, of x + bias, which holds gates and ups (Shazeer, 2020); computed in float32 and rounded once on a GPU.

    act      "silu" for SwiGLU, "gelu" (exact) or "gelu_tanh" for GeGLU, "relu" for ReGLU, "relu2" (squared; So et al., 2021), "mish" (Misra, 2019),
             or `Clipped()` for gpt-oss.
    layout   "halves": the gates first, then the ups; "interleaved": gate, up, gate, up, as gpt-oss stores them.
    Under autocast a bias of another dtype is cast to x's.
    Gradients go to x and to the bias; they are computed from x again, so that nothing else is kept. A sum over rows has one order.
    """
    parts = act if isinstance(act, Clipped) else None
    if parts is not None:
        check_numbers("gated_act", alpha=parts.alpha)
        check_numbers("gated_act", 0, limit=parts.limit)
        parts = Clipped(float(parts.alpha), float(parts.limit))
    elif act not in ACTIVATIONS:
        raise ValueError(f"gated_act: act={act!r} is not one of {', '.join(ACTIVATIONS)} or a Clipped")
    if layout not in LAYOUTS:
        raise ValueError(f"gated_act: layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    bias = _check_input("gated_act", x, bias)
    if x.shape[-1] % 2:
        raise ValueError(f"gated_act: width {x.shape[-1]} is odd; x holds as many gates as ups")
    words = ("clipped" if parts else act) + " interleaved" * (layout == "interleaved")
    return _run("gated_act", x, bias, words, *(parts or Clipped()), kernel)


def activate(
    x: Tensor,  # [..., width]
    act: str = "silu",
    *,
    bias: Tensor | None = None,  # [width]
    kernel: str = "auto",
) -> Tensor:
    """`act(x + bias)`, of the shape of x: "silu", "gelu" (exact), "gelu_tanh", "relu", "relu2" (squared) or "mish". Gradients as of `gated_act`."""
    if act not in ACTIVATIONS:
        raise ValueError(f"activate: act={act!r} is not one of {', '.join(ACTIVATIONS)}")
    bias = _check_input("activate", x, bias)
    return _run("activate", x, bias, act, *Clipped(), kernel)


def _check_input(name: str, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias, under autocast in x's dtype."""
    check_tensors(name, optional=("bias",), x=x, bias=bias)
    if not x.ndim:
        raise ValueError(f"{name}: x is []; give [..., width]")
    if bias is not None and bias.dtype != x.dtype and as_autocast(x, bias):
        bias = bias.to(x.dtype)
    if bias is not None and (bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(f"{name}: bias is {bias.dtype} {list(bias.shape)}; give {x.dtype} [{x.shape[-1]}], as wide as x")
    return bias


# ---- the operators


def _problem(op: str, x: Tensor, bias: Tensor | None, words: str) -> Rows:
    width = x.shape[-1]
    return Rows(op, x.numel() // max(width, 1), width // 2 if op.startswith("gated") else width, x.dtype, words if bias is None else f"{words} bias")


def _forward(op: str, x: Tensor, bias: Tensor | None, words: str, alpha: float, limit: float, kernel: str) -> Tensor:
    return select(_problem(op, x, bias, words), x.device, kernel).launch(x, bias, alpha, limit)


def _backward(op: str, x: Tensor, bias: Tensor | None, words: str, alpha: float, limit: float, kernel: str, d_out: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_bias = select(_problem(f"{op}_backward", x, bias, words), x.device, kernel).launch(x, bias, alpha, limit, d_out)
    return dx, x.new_empty(0) if d_bias is None else d_bias


def _out_shape(op, x, *_):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2 if op == "gated_act" else x.shape[-1])


def _grad_shapes(op, x, bias, *_):
    return x.new_empty(x.shape), x.new_empty(0 if bias is None else bias.shape)


def _keep(ctx, inputs, output):
    op, x, bias, *rest = inputs
    ctx.save_for_backward(x, bias)
    ctx.op, ctx.rest = op, rest


def _back(ctx, backward, d_out):
    x, bias = ctx.saved_tensors
    dx, d_bias = backward(ctx.op, x, bias, *ctx.rest, d_out)
    return None, dx, None if bias is None else d_bias, *(None for _ in ctx.rest)


_run = differentiable("activation", _forward, _backward, Rule(_keep, _back, (_out_shape, _grad_shapes)))

__all__ = ["ACTIVATIONS", "LAYOUTS", "Clipped", "activate", "gated_act"]
