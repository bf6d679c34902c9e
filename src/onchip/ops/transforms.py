"""Attention under torch.func: grad, vmap and what is made of them.

The mapped dimension of a vmap joins the batch, of q, k and v and of what masks and scores of ours read. Where that would mean something else,
an error says so.
"""

import re

import torch
from torch import Tensor

from onchip.core import masks, scores
from onchip.core.parts import Exactly
from onchip.core.trace import Traced
from onchip.ops import registered, wire
from onchip.ops.attend import FORWARD, TWICE, refuse_training

# Masks and scores whose tensors may begin with the batch: the dimensions that one then has, or more.
RANKS = {
    masks.KeyPadding: 1, masks.Prefix: 1, masks.Document: 2, masks.Windows: 2, masks.Tree: 3, masks.Dense: 4, masks.Blocks: 4,
    scores.ALiBi: 2, scores.Bias: 4,
}  # fmt: skip
BATCHED = "; give the mapped dimension as the batch, or use kernel='reference'"


def attention(q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], *rest) -> tuple[Tensor, Tensor]:
    """As the operator `onchip::attention`, which itself cannot be transformed."""
    return _Attention.apply(rest, q, k, v, *reads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(rest, q, k, v, *reads):
        return torch.ops.onchip.attention(q, k, v, list(reads), *rest)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rest, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        refuse_training(*registered.of_e4m3(tensors[0], wanted, ctx.rest[-1]))
        found = iter(_Backward.apply((*ctx.rest, wanted), out, lse, d_out, d_lse, *tensors))
        return None, *(next(found) if want else None for want in wanted)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(FORWARD)

    @staticmethod
    def vmap(info, dims, rest, *tensors):
        tensors = _folded(info, dims[1:], 3, tensors, *rest)
        return tuple(_unfolded(info, t) for t in _Attention.apply(rest, *tensors)), (0, 0)


def quantise(x: Tensor, share: str, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the operator `onchip::quantise`."""
    return _Quantise.apply(x, share, signs)


class _Quantise(torch.autograd.Function):
    @staticmethod
    def forward(x, share, signs):
        return torch.ops.onchip.quantise(x, share, signs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        refuse_training(any(grad is not None for grad in grads))
        return None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("quantise: forward-mode derivatives (jvp) are not implemented; use reverse mode")

    @staticmethod
    def vmap(info, dims, x, share, signs):
        if dims[2] is not None:
            raise NotImplementedError("quantise: torch.func.vmap over the signs of a rotation is not implemented; give all the same")
        return tuple(_unfolded(info, t) for t in _Quantise.apply(_fold(info, x, dims[0]), share, signs)), (0, 0)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(rest, out, lse, d_out, d_lse, q, k, v, *reads):
        *rest, wanted = rest
        return tuple(torch.ops.onchip.attention_backward(q, k, v, list(reads), *rest, out, lse, d_out, d_lse, list(wanted)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(TWICE)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(FORWARD)

    @staticmethod
    def vmap(info, dims, rest, *tensors):
        *call, wanted = rest
        _refuse_gradients(wanted)
        tensors = _folded(info, dims[1:], 7, tensors, *call)
        grads = _Backward.apply(rest, *tensors)
        return tuple(_unfolded(info, t) for t in grads), (0,) * len(grads)


# torch.compile over torch.func.vmap meets the operators themselves; over torch.func.grad it meets what torch has no way through


@registered.forward.register_vmap
def _(info, dims, q, k, v, reads, *rest):
    tensors = _folded(info, (*dims[:3], *dims[3]), 3, (q, k, v, *reads), *rest)
    return tuple(_unfolded(info, t) for t in torch.ops.onchip.attention(*tensors[:3], tensors[3:], *rest)), (0, 0)


@registered.backward.register_vmap
def _(info, dims, q, k, v, reads, longest_q, longest_k, drop, scale, how, out, lse, d_out, d_lse, wanted):
    call = (longest_q, longest_k, drop, scale, how)
    _refuse_gradients(wanted)
    out, lse, d_out, d_lse, q, k, v, *reads = _folded(info, (*dims[9:13], *dims[:3], *dims[3]), 7, (out, lse, d_out, d_lse, q, k, v, *reads), *call)
    grads = torch.ops.onchip.attention_backward(q, k, v, reads, *call, out, lse, d_out, d_lse, wanted)
    return [_unfolded(info, t) for t in grads], [0] * len(grads)


def _refuse_gradients(wanted) -> None:
    if any(wanted[3:]):
        raise NotImplementedError(f"attention: torch.func.vmap over gradients of sinks, or of what the score reads, is not implemented{BATCHED}")


def _folded(info, dims, count: int, tensors, longest_q, longest_k, drop: float, scale: float, how: str) -> list[Tensor | None]:
    """The tensors with the mapped dimension in front of the batch, as one: the first `count`, the last of which are q, k and v, and what reads the batch."""
    reads, mapped = list(tensors[count:]), dims[count:]
    ones = [t if dim is None else t.select(dim, 0) for t, dim in zip(reads, mapped, strict=True)]  # as the user sees them
    call = registered.Packed(*wire.build(how, ones))
    parts = [part for n in (registered.MASK, registered.SCORE) for part in wire.parts(how, n, ones)]
    ranks = [{RANKS.get(type(part)) for part, places in parts if n in places} for n in range(len(reads))]
    for field in range(registered.SCORE + 1, len(call)):
        for n in wire.order(how, field):
            ranks[n].add(None)
    joins = [dim is not None or any(_has_batch(t, rank) for rank in known) for t, dim, known in zip(reads, mapped, ranks, strict=True)]
    rules = (  # what dropout and packed sequences read is among the tensors
        (drop == 0, "with dropout"),
        (call.q_offsets is None, "of packed sequences"),
        (not any(_reads_batch(part) for part, _ in parts if type(part) not in RANKS), "of a mask or score function that reads the batch index"),
        (all(len(known) == 1 and None not in known for known, join in zip(ranks, joins, strict=True) if join), "over sinks, a table or what a function reads"),
    )
    why = next((why for fine, why in rules if not fine), None)
    if why:
        raise NotImplementedError(f"attention: torch.func.vmap {why} is not implemented{BATCHED}")
    q, k = (t.shape if dim is None else t.select(dim, 0).shape for t, dim in list(zip(tensors, dims, strict=True))[count - 3 : count - 1])
    for part, _ in parts:
        part.fits(q[0], q[2], Exactly(q[1]), Exactly(k[1]))
    reads = [_fold_read(info, t, dim, q[0], *known) if join else t for t, dim, known, join in zip(reads, mapped, ranks, joins, strict=True)]
    return [*(_fold(info, t, dim) for t, dim in zip(tensors[:count], dims[:count], strict=True)), *reads]


def _has_batch(t: Tensor, rank: int | None) -> bool:
    """Whether what a part of this rank reads differs from sequence to sequence; of 4 dimensions, sizes of 1 are for all alike."""
    return rank is not None and t.ndim >= rank and (rank < 4 or t.shape[0] > 1)


def _fold_read(info, t: Tensor, dim: int | None, batch: int, rank: int) -> Tensor:
    """What a mask or score reads, with the mapped dimension and the batch, of which there may be none, as one."""
    t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
    t = t[(slice(None), *(None,) * (rank + 1 - t.ndim))]
    return t.expand(info.batch_size, batch, *t.shape[2:]).flatten(0, 1)


def _reads_batch(part) -> bool:
    static = None if part is None else part.static()
    return isinstance(static, Traced) and re.search(r"\bb\b", static.text.partition("\n")[2]) is not None


def _fold(info, t: Tensor | None, dim: int | None) -> Tensor | None:
    if t is None:
        return None
    return (t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)


def _unfolded(info, t: Tensor) -> Tensor:
    return t.unflatten(0, (info.batch_size, t.shape[0] // info.batch_size))
