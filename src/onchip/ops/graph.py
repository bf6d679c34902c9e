"""The way to the registered operators: when a call takes it, and what it packs."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core.masks import Band, as_mask
from onchip.core.problem import Operands
from onchip.ops import transforms, wire
from onchip.ops.attend import How, PagedKV, Sizes, check_sinks, drawn, refuse_tangents
from onchip.ops.e4m3 import StandIn
from onchip.ops.kinds import PLAIN
from onchip.ops.registered import Packed, taken_apart


def in_graph(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether something watches that must see one operator: a compiler, a dispatch mode, torch.func, a subclass of Tensor."""
    if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true of all threads while one compiles; export, which need not go through dynamo, has a mode
        return True
    if torch._C._are_functorch_transforms_active():
        return kernel != "reference"
    return torch._C._len_torch_dispatch_stack() > 0 or q.is_meta or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)


def attend(how: How, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """As `attend.attend`, through the operator. `sizes` may hold symbols, and None for lengths that are read from the offsets."""
    if how.dropout:
        x = drawn(how.dropout, q, x)
    longest = (None, None) if x.q_offsets is None else sizes.dims[1:3]
    text, reads = _packed(how, sizes, q, k, v, x)
    run = transforms.attention if _transformed() else torch.ops.onchip.attention
    out, lse = run(q, k, v, reads, *longest, x.drop, x.scale, text)
    return (out, lse) if return_lse else out


def quantise(x: Tensor, share: str, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `e4m3.quantise`, through the operator."""
    return (transforms.quantise if _transformed() else torch.ops.onchip.quantise)(x, share, signs)


def _transformed() -> bool:
    """Whether torch.func wants functions of its own kind, which a compiler cannot follow, nor an export."""
    return torch._C._are_functorch_transforms_active() and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())


def attend_paged(how: How, sizes: Sizes, q: Tensor, cache: PagedKV, x: Operands, return_lse: bool):
    """As `attend.attend_paged`, through the operator."""
    (k, v), kv = taken_apart(cache)
    text, reads = _packed(how, sizes, q, k, v, x, kv)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("paged_attention: torch.func transforms are not implemented; use kernel='reference'")
    longest = None if x.q_offsets is None else sizes.dims[1]
    out, lse = torch.ops.onchip.paged_attention(q, k, v, cache.page_table, cache.lengths, reads, x.scale, text, longest)
    return (out, lse) if return_lse else out


def _packed(how: How, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, x: Operands, kv: tuple | None = None) -> tuple[str, list[Tensor]]:
    """The text of a call, and the tensors in it."""
    if how.sinks is not None:
        check_sinks(how.sinks, sizes.dims[3], q)
    mask = how.mask if isinstance(how.mask, Band) else as_mask(how.mask)
    reads: list[Tensor] = []
    operands = {"q_offsets": x.q_offsets, "k_offsets": x.k_offsets, "q_used": x.q_used, "k_used": x.k_used, "state": x.state, "scales": x.scales}
    asked = {"deterministic": how.deterministic, "batch_invariant": how.batch_invariant, "kernel": how.kernel}
    sources = x.sources and tuple(StandIn.apply(source, None) for source in x.sources)  # what is read is kept for the backward pass
    call = Packed(mask=mask, score=how.score, sinks=how.sinks, **operands, **asked, sources=sources, kv=kv)
    text = wire.pack(call, reads, q)
    if not torch.compiler.is_dynamo_compiling() and forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *reads)
    return text, reads
