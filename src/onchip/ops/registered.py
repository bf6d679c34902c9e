"""Attention as torch.library operators: what torch.compile, torch.export, torch.func and dispatch modes see of a call.

    onchip::attention, onchip::paged_attention                      -> output, LSE
    onchip::attention_backward, onchip::paged_attention_backward    -> the gradients that are wanted, of q, k, v and `reads` in order
    onchip::quantise                                                -> values in e4m3, scales

`how` is JSON (`ops/wire.py`) of all that makes a call but q, k, v and numbers; `reads` are the tensors in it. An eager call steps
round these operators, as the boundary costs about 60 us.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.formats import Codes, Format
from onchip.core.problem import E4M3, Attention, Operands, exact_of
from onchip.core.scales import BLOCK, Scales
from onchip.dispatch import select
from onchip.ops import attend, wire
from onchip.ops.attend import (
    TWICE,
    UNTRAINED,
    How,
    PagedKV,
    attention_backward,
    check_scale,
    dense_sizes,
    longest_of,
    packed_sizes,
    paged_problem,
    paged_sizes,
    problem_of,
)
from onchip.ops.e4m3 import quantise


class Packed(NamedTuple):
    """What `how` is the JSON of, in this order. A field that programs were exported without stands at the end, with a default."""

    mask: Any
    score: Any
    sinks: Tensor | None
    q_offsets: Tensor | None
    k_offsets: Tensor | None
    q_used: Tensor | None
    k_used: Tensor | None
    state: Tensor | None
    scales: tuple[Tensor, ...] | None
    deterministic: bool
    batch_invariant: bool
    kernel: str
    sources: tuple[Tensor, ...] | None = None
    kv: tuple | None = None  # of quantised pages: see `taken_apart`

    @property
    def offsets(self) -> tuple[Tensor | None, ...]:
        """And used lengths, as `Operands` has them."""
        return self[3:7]

    def how(self) -> How:
        return How(self.mask, self.score, self.sinks, None, self.deterministic, self.batch_invariant, self.kernel)


MASK, SCORE, SINKS, SCALES, SOURCES, KV = map(Packed._fields.index, ("mask", "score", "sinks", "scales", "sources", "kv"))
GRADIENTS = torch._C.DispatchKey.AutogradFunctionality

# ---- the operators


@torch.library.custom_op("onchip::attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], longest_q: int | None, longest_k: int | None, drop: float, scale: float, how: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem, x, kernel = _call(q, k, v, reads, longest_q, longest_k, drop, scale, how)
    out, lse = select(problem, q.device, kernel).launch(q, k, v, x, True)
    return out.contiguous(), lse.contiguous()  # the layout that `_shapes` promises


@torch.library.custom_op("onchip::attention_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], longest_q: int | None, longest_k: int | None, drop: float, scale: float, how: str,
    out: Tensor, lse: Tensor, d_out: Tensor | None, d_lse: Tensor | None, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    problem, x, kernel = _call(q, k, v, reads, longest_q, longest_k, drop, scale, how)
    x = x._replace(score=tuple(t.detach().requires_grad_(wanted[3 + n]) for t, n in zip(x.score, wire.order(how, SCORE), strict=True)))
    d_out = torch.zeros_like(out) if d_out is None else d_out
    with torch._C._SetExcludeDispatchKeyGuard(GRADIENTS, False):  # a score's derivatives are torch's
        *grads, d_score = attention_backward(problem, kernel, x, q, k, v, out, lse, d_out, d_lse)
    return _given((q, k, v, *reads), grads, d_score, how, wanted)


@torch.library.custom_op("onchip::paged_attention", mutates_args=())
def paged_forward(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, reads: list[Tensor], scale: float, how: str, longest: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem, x, cache, kernel = _paged_call(q, PagedKV(k, v, page_table, lengths), reads, scale, how, longest)
    out, lse = attend.launch_paged(problem, kernel, q, cache, x, True)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("onchip::paged_attention_backward", mutates_args=())
def paged_backward(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, reads: list[Tensor], scale: float, how: str,
    d_out: Tensor | None, d_lse: Tensor | None, wanted: list[bool], longest: int | None = None,
) -> list[Tensor]:  # fmt: skip
    with torch._C._SetExcludeDispatchKeyGuard(GRADIENTS, False), torch.enable_grad():  # through the plain formula
        leaves = [t.detach().requires_grad_(want) for t, want in zip((q, k, v, *reads), wanted, strict=True)]
        q, k, v, *reads = leaves
        problem, x, cache, _ = _paged_call(q, PagedKV(k, v, page_table, lengths), reads, scale, how, longest)
        results = select(problem, q.device, "reference").launch(q, cache, x, True)
        pairs = [(result, d) for result, d in zip(results, (d_out, d_lse), strict=True) if d is not None and result.requires_grad]
        leaves = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        grads = torch.autograd.grad([r for r, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True, materialize_grads=True)
    return [grad.contiguous() for grad in grads]


def _call(q, k, v, reads, longest_q, longest_k, drop, scale, how) -> tuple[Attention, Operands, str]:
    """The Problem, the operands and the kernel asked for, of a dense or packed call."""
    check_scale(scale, q.dtype)
    call = Packed(*wire.build(how, reads))
    if call.q_offsets is None:
        sizes = dense_sizes(q, k, v)
    else:
        q_offsets, k_offsets, q_used, k_used = call.offsets
        longest = longest_of(q_offsets, longest_q, q_used), longest_of(k_offsets, longest_k, k_used)
        sizes = packed_sizes(q, k, v, len(call.q_offsets) - 1, *longest)
    x = Operands(scale, *call.offsets, drop=drop, state=call.state, scales=call.scales and Scales(*call.scales))
    return *problem_of("prefill", call.how(), sizes, x, q), call.kernel


def _paged_call(q, cache, reads, scale, how, longest) -> tuple[Attention, Operands, PagedKV, str]:
    check_scale(scale, q.dtype)
    call = Packed(*wire.build(how, reads))
    cache = cache if call.kv is None else put_together(cache, call.kv)
    packed = None if call.q_offsets is None else (len(cache.page_table), longest_of(call.q_offsets) if longest is None else longest)
    sizes = paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1], packed)
    return *paged_problem(call.how(), sizes, q, cache.k, cache.v, Operands(scale, call.q_offsets)), cache, call.kernel


def taken_apart(cache: PagedKV) -> tuple[tuple[Tensor, Tensor], tuple | None]:
    """k and v as tensors, and what else there is of quantised ones: (format, scale, zero and channel of k, the same of v)."""
    if not isinstance(cache.k, Codes):
        return (cache.k, cache.v), None
    k, v = cache.k, cache.v
    return (k.codes, v.codes), (str(k.format), k.scale, k.zero, k.channel, v.scale, v.zero, v.channel)


def put_together(cache: PagedKV, kv: tuple) -> PagedKV:
    """The reverse of `taken_apart`."""
    form = Format.of(kv[0])
    k, v = (Codes(codes, scale, zero, form, channel) for codes, (scale, zero, channel) in zip(cache[:2], (kv[1:4], kv[4:]), strict=True))
    return cache._replace(k=k, v=v)


def _given(inputs, grads, d_score, how: str, wanted: list[bool]) -> list[Tensor]:
    """The gradients that are wanted, from those of q, k, v, the sinks and the score's tensors: a tensor may be read twice, and with fewer dimensions."""
    sources = wire.order(how, SOURCES)  # of q, k and v in e4m3
    found = {} if sources else dict(enumerate(grads[:3]))
    to_reads = *zip(sources, grads[:3], strict=False), *zip(wire.order(how, SINKS), grads[3:], strict=False), *zip(wire.order(how, SCORE), d_score, strict=True)
    for n, grad in to_reads:
        if grad is not None:
            grad = grad.reshape(inputs[3 + n].shape)
            found[3 + n] = found[3 + n] + grad if 3 + n in found else grad
    return [found[n].to(tensor.dtype).contiguous() for n, (tensor, want) in enumerate(zip(inputs, wanted, strict=True)) if want]


def of_e4m3(q: Tensor, wanted: Sequence[bool], how: str) -> list[bool]:
    """What is wanted of q, k, v and their scales where they are in e4m3."""
    return [*wanted[:3], *(wanted[3 + n] for n in wire.order(how, SCALES))] if q.dtype == E4M3 else []


@torch.library.custom_op("onchip::quantise", mutates_args=())
def quantised(x: Tensor, share: str, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    values, scale = quantise(x, share, signs)
    return values.contiguous(), scale.contiguous()


# ---- what compilers have to know: shapes


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    """The output as q, but as wide as v, and bfloat16 for e4m3; LSE with the heads before the queries."""
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=exact_of(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=torch.bfloat16 if q.dtype == E4M3 else q.dtype), lse


forward.register_fake(_shapes)


@paged_forward.register_fake
def _(q, k, v, page_table, lengths, reads, scale, how, longest=None):
    kv = Packed(*wire.build(how, reads)).kv
    return _shapes(q, k, v if kv is None else put_together(PagedKV(k, v, page_table, lengths), kv).v)


@quantised.register_fake
def _(x, share, signs):
    batch, length, heads, _ = x.shape
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(batch, heads, {"head": 1, "block": -(-length // BLOCK), "token": length}[share], dtype=torch.float32)


@backward.register_fake
def _(q, k, v, reads, longest_q, longest_k, drop, scale, how, out, lse, d_out, d_lse, wanted):
    return [t.new_empty(t.shape) for t, want in zip((q, k, v, *reads), wanted, strict=True) if want]


@paged_backward.register_fake
def _(q, k, v, page_table, lengths, reads, scale, how, d_out, d_lse, wanted, longest=None):
    return [t.new_empty(t.shape) for t, want in zip((q, k, v, *reads), wanted, strict=True) if want]


# ---- derivatives


def _keep(ctx, inputs, output):
    q, k, v, reads, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *reads, *output)
    ctx.set_materialize_grads(False)


def _back(ctx, d_out, d_lse):
    q, k, v, *reads, out, lse = ctx.saved_tensors
    *qkv, wanted = ctx.needs_input_grad[:4]
    wanted = [*qkv, *wanted]
    attend.refuse_training(*of_e4m3(q, wanted, ctx.rest[-1]))
    found = iter(
        torch.ops.onchip.attention_backward(q, k, v, reads, *ctx.rest, out, lse, d_out, d_lse, wanted) if d_out is not None or d_lse is not None else ()
    )
    grads = [next(found, None) if want else None for want in wanted]
    return (*grads[:3], grads[3:], *(None for _ in ctx.rest))


def _keep_paged(ctx, inputs, output):
    q, k, v, page_table, lengths, reads, ctx.scale, ctx.how, ctx.longest = inputs
    ctx.save_for_backward(q, k, v, page_table, lengths, *reads)
    ctx.set_materialize_grads(False)


def _back_paged(ctx, d_out, d_lse):
    q, k, v, page_table, lengths, *reads = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5]]
    given = (q, k, v, page_table, lengths, reads, ctx.scale, ctx.how, d_out, d_lse, wanted, ctx.longest)
    found = iter(torch.ops.onchip.paged_attention_backward(*given))
    grads = [next(found) if want else None for want in wanted]
    return (*grads[:3], None, None, grads[3:], *(None for _ in ctx.needs_input_grad[6:]))  # `longest` is not there where it is its default


def _refuse_training(ctx, *_):
    raise NotImplementedError(UNTRAINED)


def _refuse_twice(ctx, *_):
    raise NotImplementedError(TWICE)


quantised.register_autograd(_refuse_training)
forward.register_autograd(_back, setup_context=_keep)
paged_forward.register_autograd(_back_paged, setup_context=_keep_paged)
backward.register_autograd(_refuse_twice)
paged_backward.register_autograd(_refuse_twice)
