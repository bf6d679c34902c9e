"""Embeddings, dropout and the Hadamard rotation, each with its gradient."""

import torch
from torch import Tensor

from onchip.core import philox
from onchip.core.arguments import as_int, check_tensors, truth
from onchip.core.parts import is_whole
from onchip.core.problem import Dropout, Rows
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, as_autocast, differentiable

NONE = -1  # no padding id


def embedding(
    ids: Tensor,  # [...] int64 or int32
    weight: Tensor,  # [vocab, width]
    *,
    padding_idx: int | None = None,
    kernel: str = "auto",
) -> Tensor:
    """`weight[ids]`, [..., width]. An id that is no row of weight gives NaN, and no gradient: to refuse it would be to wait for the device.

    The gradient of weight is dense, summed in float32 in the order of the tokens: the same bits in every run.
    padding_idx   an id whose row gets no gradient.
    """
    check_tensors("embedding", ids=ids, weight=weight)
    if ids.dtype not in (torch.int64, torch.int32) or weight.ndim != 2 or not len(weight):
        raise ValueError(f"embedding: ids are {ids.dtype}, weight is {list(weight.shape)}; give int64 or int32 ids and weight [vocab, width], vocab at least 1")
    if padding_idx is not None and not (is_whole(padding_idx) and 0 <= padding_idx < len(weight)):
        raise ValueError(f"embedding: padding_idx={padding_idx} is no row of weight {list(weight.shape)}; give 0 to {len(weight) - 1}")
    return _embed(ids, weight, NONE if padding_idx is None else as_int(padding_idx), kernel)


def dropout_add(
    x: Tensor,  # [...]
    residual: Tensor | None,  # [...]
    dropout: Dropout,
    *,
    training: bool = True,
    kernel: str = "auto",
) -> Tensor:
    """`residual + dropout(x)`, in float32 and rounded once: each element of x is 0 with probability p, else divided by 1 - p (Srivastava et al., 2014).

    dropout    `Dropout(p, seed, offset)`: Philox of (seed, offset, place), the same on every device; drawn again in the backward pass, not kept.
               seed None: drawn from torch's generator of the device.        residual   None: dropout alone.
    x and residual are of one dtype; under autocast both are cast to the wider one, as torch's sum has it.
    """
    check_tensors("dropout_add", optional=("residual",), x=x, residual=residual)
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout_add: dropout is {dropout!r:.60}; give Dropout(p)")
    philox.check("dropout_add", *dropout)
    if residual is not None and residual.dtype != x.dtype and as_autocast(x, residual):
        wide = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wide), residual.to(wide)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"dropout_add: residual is {residual.dtype} {list(residual.shape)}, x is {x.dtype} {list(x.shape)}; they must be equal")
    if not truth("dropout_add", "training", training) or dropout.p == 0:
        return x if residual is None else x + residual
    return _drop(x, residual, float(dropout.p), philox.draw(x.device, dropout.seed, dropout.offset), kernel)


def hadamard(x: Tensor, *, kernel: str = "auto") -> Tensor:  # [..., width]
    """`x H / sqrt(width)` with H the Walsh-Hadamard matrix, width a power of two: orthonormal, its own inverse and its own gradient."""
    check_tensors("hadamard", x=x)
    width = x.shape[-1] if x.ndim else 0
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard: width {width} is no power of two; pad x to {1 << max(width - 1, 0).bit_length()} columns")
    return _hadamard(x, kernel)


# ---- the operators


def _rows(op: str, x: Tensor, width: int, words: str = "") -> Rows:
    return Rows(op, x.numel() // max(width, 1), width, x.dtype, words)


def _embed_forward(ids: Tensor, weight: Tensor, padding: int, kernel: str) -> Tensor:
    problem = Rows("embedding", ids.numel(), weight.shape[1], weight.dtype, f"of {len(weight)}")
    return select(problem, weight.device, kernel).launch(ids, weight)


def _embed_backward(ids: Tensor, d_out: Tensor, vocab: int, padding: int, kernel: str) -> Tensor:
    problem = Rows("embedding_backward", ids.numel(), d_out.shape[-1], d_out.dtype, f"of {vocab}")
    return select(problem, d_out.device, kernel).launch(ids, d_out, vocab, padding).to(d_out.dtype)


def _embed_keep(ctx, inputs, output):
    ids, weight, ctx.padding, ctx.kernel = inputs
    ctx.vocab = len(weight)
    ctx.save_for_backward(ids)


def _embed_back(ctx, backward, d_out):
    return None, backward(*ctx.saved_tensors, d_out, ctx.vocab, ctx.padding, ctx.kernel), None, None


def _drop_forward(x: Tensor, residual: Tensor | None, p: float, state: Tensor, kernel: str) -> Tensor:
    problem = _rows("dropout_add", x, x.shape[-1] if x.ndim else 1, "" if residual is None else "residual")
    return select(problem, x.device, kernel).launch(x, residual, p, state)


def _drop_backward(d_out: Tensor, p: float, state: Tensor, kernel: str) -> Tensor:
    return _drop_forward(d_out, None, p, state, kernel)


def _drop_keep(ctx, inputs, output):
    _, _, ctx.p, state, ctx.kernel = inputs
    ctx.save_for_backward(state)


def _drop_back(ctx, backward, d_out):
    dx = backward(d_out, ctx.p, *ctx.saved_tensors, ctx.kernel) if ctx.needs_input_grad[0] else None
    return dx, d_out if ctx.needs_input_grad[1] else None, None, None, None


def _rotate(x: Tensor, kernel: str) -> Tensor:
    return select(_rows("hadamard", x, x.shape[-1]), x.device, kernel).launch(x)


def _rotate_back(ctx, backward, d_out):
    return backward(d_out, ctx.kernel), None


def _rotate_keep(ctx, inputs, output):
    ctx.kernel = inputs[1]


_embed = differentiable(
    "embedding", _embed_forward, _embed_backward,
    Rule(_embed_keep, _embed_back, (lambda ids, w, *_: w.new_empty(*ids.shape, w.shape[1]), lambda ids, d, vocab, *_: d.new_empty(vocab, d.shape[-1]))),
)  # fmt: skip
_drop = differentiable(
    "dropout_add", _drop_forward, _drop_backward, Rule(_drop_keep, _drop_back, (lambda x, *_: x.new_empty(x.shape), lambda d, *_: d.new_empty(d.shape)))
)
_hadamard = differentiable(
    "hadamard", _rotate, _rotate, Rule(_rotate_keep, _rotate_back, (lambda x, *_: x.new_empty(x.shape), lambda x, *_: x.new_empty(x.shape)))
)

__all__ = ["dropout_add", "embedding", "hadamard"]
