"""A head's product and the loss over its vocabulary together: the logits `[tokens, vocab]` are never all there.

Tokens go through in chunks: their logits are made by one product, turned into losses, and, over the same memory, into their gradient, from which two
more products make those of the hidden states and of the weights. The three products are torch's (cuBLAS); the passes between them are this library's.

A loss that is one number has its gradient made in the forward pass, three products in all (as Liger's fused linear cross-entropy, arXiv:2410.10989).
Where the gradient of each token is not known then, the backward pass makes the chunk's logits again: four. So does float16, whose loss scaling must reach
the gradients before they are rounded: a probability of a vocabulary divided by a batch is below its smallest number.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.core.arguments import check_tensors, truth
from onchip.core.losses import ENTROPY, LOG_PROB, WEIGHT, LossTerms
from onchip.core.trace import readable
from onchip.ops.differentiable import Rule, autocast, differentiable
from onchip.ops.losses import row_shapes, wanted, written_over
from onchip.ops.vocabulary import (
    Call,
    call_of,
    check_reduction,
    check_targets,
    check_terms,
    factor_of,
    figures,
    gradient,
    held,
    losses_of,
    reduced,
    row_loss,
    weights_of,
)

SHARE = 0.46  # of the bytes of weights and hidden states that a chunk's logits take: with cuBLAS' workspace of 32 MiB less than half of 8,192 tokens' call
LEAST = 1 << 26  # bytes of a chunk that may be more than that share
ROUND = 128  # tokens of a chunk, by tiles of products
WAVE = 1024  # of a large one: the 8 x 16 tiles of a gradient [tokens, 4096] fill an H200, of 132 multiprocessors; 1,664 tokens left a fifth of it idle
NEARLY_TWO = 1792  # tokens whose tiles leave little of a second wave idle, and sums over chunks are read and written half as often as in chunks of WAVE
IN_WEIGHTS_DTYPE = 16  # chunks whose weight gradients are added in the weights' dtype: each sum rounds once, to half an ulp; more are added in float32


class Tokens(NamedTuple):
    """Of each token: the log-probability of its target, and the entropy of its distribution; float32 [...], 0 where the target is ignored."""

    log_prob: Tensor
    entropy: Tensor


def linear_cross_entropy(
    hidden: Tensor,  # [..., dim]
    weight: Tensor,  # [vocab, dim]
    targets: Tensor,  # [...] int64
    terms: LossTerms = LossTerms(),
    *,
    bias: Tensor | None = None,  # [vocab]
    reduction: str = "mean",
    per_token: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tokens]:
    """`cross_entropy(hidden @ weight.T + bias, targets, terms)` without the logits in memory; they are rounded to hidden's dtype, as a product of torch is.

    per_token   also the log-probability and the entropy of each token, from the same pass and without gradients (`token_log_probs` has them with).
    With `terms.shard`, weight and bias are this rank's rows, hidden is the same on every rank, and so is its gradient.
    A mean or sum has its gradients made in this call, and they go backward once; of "none", and of float16, the backward pass makes the logits again.
    Under autocast hidden, weight and bias are cast, as torch's linear casts them.
    Raises ValueError for shapes, dtypes and terms that disagree.
    """
    check_reduction("linear_cross_entropy", reduction)
    check_tensors("linear_cross_entropy", optional=("bias",), hidden=hidden, weight=weight, bias=bias, targets=targets)
    hidden, weight, bias = autocast(hidden, weight, bias)
    per_token = truth("linear_cross_entropy", "per_token", per_token)
    call = _check("linear_cross_entropy", hidden, weight, bias, targets, terms, per_token, kernel)
    operands = hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), *weights_of(call, terms.class_weights, hidden.dtype)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in operands[:3]]
    if reduction == "none" or hidden.dtype == torch.float16 or not any(needs) or torch._C._are_functorch_transforms_active():  # torch.func wants no state
        loss, stats = _tokens(*operands, *call)
        loss = loss.view(targets.shape) if reduction == "none" else reduced(loss, stats[WEIGHT], reduction)
    else:
        factor = factor_of(call, operands[3], operands[4], reduction, hidden.dtype)
        loss, stats = _reduced(operands, factor, call, needs)
    if not per_token:
        return loss
    stats = stats.detach()
    return loss, Tokens(stats[LOG_PROB].view(targets.shape), stats[ENTROPY].view(targets.shape))


def token_log_probs(
    hidden: Tensor,  # [..., dim]
    weight: Tensor,  # [vocab, dim]
    targets: Tensor,  # [...] int64
    terms: LossTerms = LossTerms(),
    *,
    bias: Tensor | None = None,  # [vocab]
    kernel: str = "auto",
) -> Tokens:
    """The log-probability of each target and the entropy of each distribution under a head, float32 [...], both with gradients; no logits in memory.

    terms   softcap, temperature, ignore_index and shard; what only a loss has raises ValueError. Otherwise as `linear_cross_entropy` of "none".
    """
    check_tensors("token_log_probs", optional=("bias",), hidden=hidden, weight=weight, bias=bias, targets=targets)
    hidden, weight, bias = autocast(hidden, weight, bias)
    call = _check("token_log_probs", hidden, weight, bias, targets, terms, True, kernel)
    if terms.smoothing or terms.z_loss or terms.class_weights is not None:
        raise ValueError("token_log_probs: terms has smoothing, z_loss or class_weights, which only a loss has; use linear_cross_entropy")
    loss, stats = _tokens(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), None, None, *call)
    return Tokens(-loss.view(targets.shape), stats[ENTROPY].view(targets.shape))


def _check(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, terms: LossTerms, entropy: bool, kernel: str) -> Call:
    if hidden.ndim == 0 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or not weight.shape[1] or hidden.dtype != weight.dtype:
        of = [f"{t.dtype} {list(t.shape)}" for t in (hidden, weight)]
        raise ValueError(f"{name}: hidden is {of[0]}, weight {of[1]}; give [..., dim] and [vocab, dim] of one dtype, dim at least 1")
    vocab = len(weight)
    if bias is not None and (bias.shape != (vocab,) or bias.dtype != weight.dtype):
        raise ValueError(f"{name}: bias is {bias.dtype} {list(bias.shape)}; give {weight.dtype} [{vocab}]")
    check_terms(name, terms)
    given = (hidden, weight, bias, targets, terms.class_weights)
    if torch._C._are_functorch_transforms_active() and any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in given):
        raise NotImplementedError(f"{name}: torch.vmap is not implemented: chunks of logits share one memory; give the batch as more tokens, or loop over it")
    check_targets(name, targets, hidden.shape[:-1])
    return call_of(name, hidden, vocab, terms, entropy, kernel)


# ---- chunks


def chunk_of(tokens: int, vocab: int, dim: int, itemsize: int, heads: int = 1) -> int:
    """Tokens whose logits are in memory at a time, for one head or more: as few chunks as fit, about equally long, or whole waves, or nearly two."""
    fit = max(LEAST, int(SHARE * itemsize * dim * (vocab + tokens))) // (heads * itemsize * vocab)
    if WAVE <= fit < tokens:
        whole = ROUND if NEARLY_TWO <= fit < 2 * WAVE else WAVE
        return fit // whole * whole
    fit = max(ROUND, fit // ROUND * ROUND)
    chunks = max(1, -(-tokens // fit))
    return min(tokens, -(-tokens // (chunks * ROUND)) * ROUND)


def _size(call: Call, hidden: Tensor, weight: Tensor) -> int:
    """By the vocabulary, not by this rank's slice: every rank has as many chunks, each with a collective."""
    return chunk_of(len(hidden), call.words, weight.shape[1], weight.element_size())


def chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, their logits) in turn, `size` tokens or the rest, all in the same memory."""
    tokens = len(hidden)
    memory = torch.empty((size, len(weight)), dtype=weight.dtype, device=weight.device)
    for first in range(0, tokens, max(size, 1)):
        of = slice(first, min(first + size, tokens))
        logits = memory[: of.stop - first]
        if bias is None:
            torch.mm(hidden[of], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[of], weight.t(), out=logits)
        yield of, logits


class Sums:
    """The gradients of hidden, weight and bias, as chunks come in; None where not wanted. `counts` [tokens]: others hold anything, or None: all do.

    0 times NaN is NaN, so the weight's product reads a copy of hidden in which rows that do not count are 0: it lies where hidden's own gradient will be.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], size: int, counts: Tensor | None):
        self.inputs = hidden, weight
        self.counts = None if counts is None or (readable(counts) and counts.all()) else counts[:, None]
        count = -(-len(hidden) // max(1, size))
        self.narrow = count <= IN_WEIGHTS_DTYPE or weight.element_size() > 2
        dtype = weight.dtype if self.narrow else torch.float32
        self.hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None
        self.weight = torch.empty(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None
        if needs[1] and (count == 0 or not self.narrow):
            self.weight.zero_()
        self.zero = hidden.new_zeros(())
        self.bias = torch.zeros(len(weight), dtype=torch.float32 if weight.element_size() < 4 else weight.dtype, device=weight.device) if needs[2] else None

    def add(self, of: slice, d_logits: Tensor) -> None:
        hidden, weight = self.inputs
        if self.weight is not None:
            hidden = hidden[of]
            if self.counts is not None:
                hidden = torch.where(self.counts[of], hidden, self.zero, out=None if self.hidden is None else self.hidden[of])
            if self.narrow:
                self.weight.addmm_(d_logits.t(), hidden, beta=float(of.start > 0))
            else:  # a chunk's part is rounded once, which is little of the whole
                for rows in range(0, len(weight), 1 << 14):
                    self.weight[rows : rows + (1 << 14)] += d_logits[:, rows : rows + (1 << 14)].t() @ hidden
        if self.hidden is not None:
            torch.mm(d_logits, weight, out=self.hidden[of])
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)

    def done(self, ranks=None) -> tuple[Tensor | None, ...]:
        """All three; that of hidden summed over the ranks that have a slice of the vocabulary each."""
        weight = self.inputs[1]
        if self.hidden is not None and ranks is not None:
            dist.all_reduce(self.hidden, group=ranks)
        return self.hidden, *(None if t is None else t.to(weight.dtype) for t in (self.weight, self.bias))


# ---- one number: gradients in the forward pass


def _with_gradients(operands, factor: Tensor, call: Call, needs: list[bool]) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The loss `factor * sum`, the figures of tokens, and the gradients that are needed."""
    hidden, weight, bias, targets, class_weights, total = operands
    size = _size(call, hidden, weight)
    x = row_loss(call, class_weights, total)
    sums = Sums(hidden, weight, bias, needs, size, targets != x.ignore_index)
    losses, figures_ = row_shapes(len(hidden), hidden.dtype, hidden)
    g = factor.to(losses.dtype).expand(len(hidden))
    for of, logits in chunks(hidden, weight, bias, size):
        losses[of], figures_[:, of] = written_over(call, logits, targets[of], g[of], x)
        sums.add(of, logits)
    return losses.sum() * factor, figures_, sums.done(call.ranks)


def _reduced(operands, factor: Tensor, call: Call, needs: list[bool]) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return torch.ops.onchip.linear_cross_entropy(*operands, factor, *call, needs)[:2]

    def run():
        loss, stats, grads = _with_gradients(operands, factor, call, needs)
        return loss, (stats,), grads

    return held("linear_cross_entropy", run, *operands[:3])


@torch.library.custom_op("onchip::linear_cross_entropy", mutates_args=())
def _compiled(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weights: Tensor | None, total: Tensor | None, factor: Tensor,
    floats: list[float], ints: list[int], group: str, entropy: bool, kernel: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = Call(floats, ints, group, entropy, kernel)
    loss, stats, grads = _with_gradients((hidden, weight, bias, targets, class_weights, total), factor, call, needs)
    return loss, stats, *(hidden.new_empty(0) if grad is None else grad for grad in grads)


@_compiled.register_fake
def _(hidden, weight, bias, targets, class_weights, total, factor, floats, ints, group, entropy, kernel, needs):
    loss, stats = row_shapes(len(hidden), hidden.dtype, hidden)
    given = zip((hidden, weight, bias), needs, strict=True)
    return loss.new_empty(()), stats, *(t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in given)


def _keep_gradients(ctx, inputs, output):
    ctx.needs = inputs[-1]
    ctx.save_for_backward(*output[2:])


def _give_gradients(ctx, g, *_):
    grads = [grad * g.to(grad.dtype) if need else None for grad, need in zip(ctx.saved_tensors, ctx.needs, strict=True)]
    return *grads, *(None for _ in range(10))


_compiled.register_autograd(_give_gradients, setup_context=_keep_gradients)


# ---- a number a token: logits made again in the backward pass


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weights: Tensor | None, total: Tensor | None,
    floats: list[float], ints: list[int], group: str, entropy: bool, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(floats, ints, group, entropy, kernel)
    x = row_loss(call, class_weights, total)
    _, stats = row_shapes(len(hidden), hidden.dtype, hidden)
    for of, logits in chunks(hidden, weight, bias, _size(call, hidden, weight)):
        stats[:, of] = figures(call, logits, targets[of], x)
    return losses_of(stats, x), stats


def _backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weights: Tensor | None, total: Tensor | None,
    floats: list[float], ints: list[int], group: str, entropy: bool, kernel: str,
    stats: Tensor, g: Tensor, g_entropy: Tensor | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    call = Call(floats, ints, group, entropy, kernel)
    size = _size(call, hidden, weight)
    x = row_loss(call, class_weights, total)
    sums = Sums(hidden, weight, bias, needs, size, targets != x.ignore_index)
    for of, logits in chunks(hidden, weight, bias, size):
        grads = g[of], None if g_entropy is None else g_entropy[of]
        sums.add(of, gradient(call, logits, targets[of], stats[:, of].contiguous(), grads, x, logits))
    return [grad for grad in sums.done(call.ranks) if grad is not None]


def _keep(ctx, inputs, output):
    *tensors, ctx.floats, ctx.ints, ctx.group, ctx.entropy, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _back(ctx, backward, g, g_stats):
    *tensors, stats = ctx.saved_tensors
    call = Call(ctx.floats, ctx.ints, ctx.group, ctx.entropy, ctx.kernel)
    needs = list(ctx.needs_input_grad[:3])
    found = iter(backward(*tensors, *call, stats, *wanted(call, stats, g, g_stats), needs))
    return *(next(found) if need else None for need in needs), *(None for _ in range(8))


def _gradient_shapes(hidden, weight, bias, *rest):
    return [t.new_empty(t.shape) for t, need in zip((hidden, weight, bias), rest[-1], strict=True) if need]


_tokens = differentiable(
    "linear_tokens", _forward, _backward, Rule(_keep, _back, (lambda hidden, *_: row_shapes(len(hidden), hidden.dtype, hidden), _gradient_shapes))
)
