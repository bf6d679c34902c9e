"""Losses over logits that are there: cross-entropy, its gradient in the backward pass or in place of the logits."""

import torch
from torch import Tensor

from onchip.core.arguments import check_tensors, truth
from onchip.core.losses import ENTROPY, WEIGHT, LossTerms
from onchip.core.problem import exact_of
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, differentiable
from onchip.ops.vocabulary import (
    Call,
    call_of,
    check_reduction,
    check_targets,
    factor_of,
    figures,
    gradient,
    held,
    losses_of,
    reduced,
    row_loss,
    weights_of,
)


def cross_entropy(
    logits: Tensor,  # [..., vocab]
    targets: Tensor,  # [...] int64
    terms: LossTerms = LossTerms(),
    *,
    reduction: str = "mean",
    in_place: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """The cross-entropy of logits and targets, with what `terms` adds to it: float32 (float64 of float64), one number or [...] of reduction "none".

    reduction   "mean" divides the sum by that of the targets' class weights, as torch does; NaN where every target is ignored.
    in_place    the gradient of logits that require one is written over them in this call, so that there is never a second tensor of that size; nothing
                else may need their values. For "mean" and "sum", and logits that are no leaf and no float16; the gradient goes backward once.
    A target that is neither a class nor `terms.ignore_index` makes the loss, and the gradient of its row, NaN; nothing waits for the host to say so.
    Raises ValueError for shapes and terms that are out of range.
    """
    check_tensors("cross_entropy", logits=logits, targets=targets)
    check_reduction("cross_entropy", reduction)
    if logits.ndim == 0:
        raise ValueError("cross_entropy: logits are []; give [..., vocab]")
    check_targets("cross_entropy", targets, logits.shape[:-1])
    call = call_of("cross_entropy", logits, logits.shape[-1], terms, False, kernel)
    weights = weights_of(call, terms.class_weights, logits.dtype)
    if truth("cross_entropy", "in_place", in_place) and logits.requires_grad and torch.is_grad_enabled():
        return _in_place(logits, targets, *weights, call, reduction)
    loss, stats = _rows(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), *weights, *call)
    return loss.view(targets.shape) if reduction == "none" else reduced(loss, stats[WEIGHT], reduction)


def _in_place(logits: Tensor, targets: Tensor, class_weights: Tensor | None, total: Tensor | None, call: Call, reduction: str) -> Tensor:
    if reduction == "none":
        raise ValueError("cross_entropy: in_place=True needs the gradient of the result, which reduction='none' does not know; use 'mean' or 'sum'")
    if torch.compiler.is_compiling():
        raise NotImplementedError("cross_entropy: in_place=True in a compiled graph is not implemented; use torch.compiler.disable around it")
    if logits.dtype == torch.float16:
        raise ValueError(
            "cross_entropy: in_place=True on float16 would lose gradients, which are made before a loss is scaled; use bfloat16 or float32, or in_place=False"
        )
    width = logits.shape[-1]
    if logits.is_leaf or not logits.is_contiguous():
        what = "a leaf" if logits.is_leaf else f"not contiguous (strides {logits.stride()})"
        raise ValueError(f"cross_entropy: in_place=True overwrites logits, which is {what}; leave in_place=False")
    rows, targets = logits.detach().view(-1, width), targets.reshape(-1)
    x = row_loss(call, class_weights, total)
    factor = factor_of(call, targets, class_weights, reduction, logits.dtype)

    def run():
        loss = written_over(call, rows, targets, factor.expand(len(rows)), x)[0]
        torch.autograd.graph.increment_version(logits)
        return loss.sum() * factor, (), (logits.detach(),)

    return held("cross_entropy with in_place=True", run, logits)[0]


def written_over(call: Call, rows: Tensor, targets: Tensor, g: Tensor, x) -> tuple[Tensor, Tensor]:
    """The losses of rows [rows] and their figures; the logits become the gradient of `sum g loss`."""
    if call.ranks is None:
        stats = select(call.problem("cross_entropy_in_place", rows), rows.device, call.kernel).launch(rows, targets, g, x)
    else:
        stats = figures(call, rows, targets, x)
        gradient(call, rows, targets, stats, (g, None), x, rows)
    return losses_of(stats, x), stats


# ---- the loss of each row, and its gradient


def _forward(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None, total: Tensor | None,
    floats: list[float], ints: list[int], group: str, entropy: bool, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(floats, ints, group, entropy, kernel)
    x = row_loss(call, class_weights, total)
    stats = figures(call, logits, targets, x)
    return losses_of(stats, x), stats


def _backward(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None, total: Tensor | None,
    floats: list[float], ints: list[int], group: str, entropy: bool, kernel: str,
    stats: Tensor, g: Tensor, g_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    call = Call(floats, ints, group, entropy, kernel)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return gradient(call, logits, targets, stats, (g, g_entropy), row_loss(call, class_weights, total), out)


def _keep(ctx, inputs, output):
    logits, targets, class_weights, total, *ctx.call = inputs
    ctx.save_for_backward(logits, targets, class_weights, total, output[1])
    ctx.set_materialize_grads(False)


def wanted(call: Call, stats: Tensor, g: Tensor | None, g_stats: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of the losses and of the entropies of rows; only the entropies of the figures are given outside."""
    g_entropy = g_stats[ENTROPY].contiguous() if call.entropy and g_stats is not None else None
    return (stats.new_zeros(stats.shape[1]) if g is None else g.contiguous()), g_entropy


def _back(ctx, backward, g, g_stats):
    logits, targets, class_weights, total, stats = ctx.saved_tensors
    grads = wanted(Call(*ctx.call), stats, g, g_stats)
    return backward(logits, targets, class_weights, total, *ctx.call, stats, *grads), *(None for _ in range(8))


def row_shapes(rows: int, logits_dtype: torch.dtype, like: Tensor) -> tuple[Tensor, Tensor]:
    """The losses and figures of rows, empty."""
    exact = exact_of(logits_dtype)
    return like.new_empty(rows, dtype=exact), like.new_empty(6, rows, dtype=exact)


_rows = differentiable(
    "cross_entropy",
    _forward,
    _backward,
    Rule(_keep, _back, (lambda logits, *_: row_shapes(len(logits), logits.dtype, logits), lambda logits, *_: logits.new_empty(logits.shape))),
)
