"""Attention as torch.library operators: what torch.compile, torch.export, torch.func and dispatch modes see of a call.

    onchip::attention, onchip::paged_attention                      -> output, LSE
    onchip::attention_backward, onchip::paged_attention_backward    -> the gradients that are wanted, of q, k, v and `reads` in order

`how` is JSON (`ops/wire.py`) of all that makes a call but q, k, v and numbers; `reads` are the tensors in it. An eager call steps
round these operators, as the boundary costs about 60 us.
"""

import re

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core.masks import Band, as_mask
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.dispatch import select
from onchip.ops import wire
from onchip.ops.attend import (
    PLAIN,
    TWICE,
    How,
    PagedKV,
    Sizes,
    attention_backward,
    check_sinks,
    dense_sizes,
    drawn,
    longest_of,
    packed_sizes,
    paged_sizes,
    problem_of,
    refuse_tangents,
)

FIELDS = ("mask", "score", "sinks", "q_offsets", "k_offsets", "q_used", "k_used", "state", "deterministic", "batch_invariant", "kernel")  # of `how`
GRADIENTS = torch._C.DispatchKey.AutogradFunctionality


def in_graph(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether something watches that must see one operator: a compiler, a dispatch mode, torch.func, a subclass of Tensor."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._are_functorch_transforms_active():
        return kernel != "reference"
    return torch._C._len_torch_dispatch_stack() > 0 or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)


def attend(how: How, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """As `attend.attend`, through the operator. `sizes` may hold symbols, and None for lengths that are read from the offsets."""
    if how.dropout:
        x = drawn(how.dropout, q, x)
    longest = (None, None) if x.q_offsets is None else sizes.dims[1:3]
    text, reads = _packed(how, sizes, q, k, v, x)
    out, lse = torch.ops.onchip.attention(q, k, v, reads, *longest, x.drop, x.scale, text)
    return (out, lse) if return_lse else out


def attend_paged(how: How, sizes: Sizes, q: Tensor, cache: PagedKV, x: Operands, return_lse: bool):
    """As `attend.attend_paged`, through the operator."""
    text, reads = _packed(how, sizes, q, cache.k, cache.v, x)
    out, lse = torch.ops.onchip.paged_attention(q, *cache, reads, x.scale, text)
    return (out, lse) if return_lse else out


def _packed(how: How, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, x: Operands) -> tuple[str, list[Tensor]]:
    """The text of a call, and the tensors in it."""
    if how.sinks is not None:
        check_sinks(how.sinks, sizes.dims[3], q)
    mask = how.mask if isinstance(how.mask, Band) else as_mask(how.mask)
    reads: list[Tensor] = []
    offsets = (x.q_offsets, x.k_offsets, x.q_used, x.k_used, x.state)
    text = wire.pack((mask, how.score, how.sinks, *offsets, how.deterministic, how.batch_invariant, how.kernel), reads, q)
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *reads)
    return text, reads


# ---- the operators


@torch.library.custom_op("onchip::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], longest_q: int | None, longest_k: int | None, drop: float, scale: float, how: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem, x, kernel = _call(q, k, v, reads, longest_q, longest_k, drop, scale, how)
    out, lse = select(problem, q.device, kernel).launch(q, k, v, x, True)
    return out.contiguous(), lse.contiguous()  # the layout that `_shapes` promises


@torch.library.custom_op("onchip::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], longest_q: int | None, longest_k: int | None, drop: float, scale: float, how: str,
    out: Tensor, lse: Tensor, d_out: Tensor | None, d_lse: Tensor | None, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    problem, x, kernel = _call(q, k, v, reads, longest_q, longest_k, drop, scale, how)
    x = x._replace(score=tuple(t.detach().requires_grad_(wanted[3 + n]) for t, n in zip(x.score, wire.order(how, 1), strict=True)))
    d_out = torch.zeros_like(out) if d_out is None else d_out
    with torch._C._SetExcludeDispatchKeyGuard(GRADIENTS, False):  # a score's derivatives are torch's
        *grads, d_score = attention_backward(problem, kernel, x, q, k, v, out, lse, d_out, d_lse)
    return _given((q, k, v, *reads), grads, d_score, how, wanted)


@torch.library.custom_op("onchip::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, reads: list[Tensor], scale: float, how: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem, x, kernel = _paged_call(q, k, v, page_table, reads, scale, how)
    out, lse = select(problem, q.device, kernel).launch(q, PagedKV(k, v, page_table, lengths), x, True)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("onchip::paged_attention_backward", mutates_args=())
def _paged_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, reads: list[Tensor], scale: float, how: str,
    d_out: Tensor | None, d_lse: Tensor | None, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    with torch._C._SetExcludeDispatchKeyGuard(GRADIENTS, False), torch.enable_grad():  # through the plain formula
        leaves = [t.detach().requires_grad_(want) for t, want in zip((q, k, v, *reads), wanted, strict=True)]
        q, k, v, *reads = leaves
        problem, x, _ = _paged_call(q, k, v, page_table, reads, scale, how)
        results = select(problem, q.device, "reference").launch(q, PagedKV(k, v, page_table, lengths), x, True)
        pairs = [(result, d) for result, d in zip(results, (d_out, d_lse), strict=True) if d is not None and result.requires_grad]
        leaves = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        grads = torch.autograd.grad([r for r, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True, materialize_grads=True)
    return [grad.contiguous() for grad in grads]


def _call(q, k, v, reads, longest_q, longest_k, drop, scale, how) -> tuple[Attention, Operands, str]:
    """The Problem, the operands and the kernel asked for, of a dense or packed call."""
    mask, score, sinks, *offsets, state, deterministic, batch_invariant, kernel = wire.build(how, reads)
    if offsets[0] is None:
        sizes = dense_sizes(q, k, v)
    else:
        longest = (longest_of(given) if known is None else known for known, given in zip((longest_q, longest_k), offsets[:2], strict=True))
        sizes = packed_sizes(q, k, v, len(offsets[0]) - 1, *longest)
    x = Operands(scale, *offsets, drop=drop, state=state)
    return *problem_of("prefill", How(mask, score, sinks, None, deterministic, batch_invariant, kernel), sizes, x, q), kernel


def _paged_call(q, k, v, page_table, reads, scale, how) -> tuple[Attention, Operands, str]:
    mask, score, sinks, *_, kernel = wire.build(how, reads)
    sizes = paged_sizes(q, k, v, page_table.shape[1])
    return *problem_of("decode", How(mask, score, sinks, None, False, False, kernel), sizes, Operands(scale), q), kernel


def _given(inputs, grads, d_score, how: str, wanted: list[bool]) -> list[Tensor]:
    """The gradients that are wanted, from those of q, k, v, the sinks and the score's tensors: a tensor may be read twice, and with fewer dimensions."""
    found = dict(enumerate(grads[:3]))
    for n, grad in [*zip(wire.order(how, 2), grads[3:], strict=False), *zip(wire.order(how, 1), d_score, strict=True)]:
        if grad is not None:
            grad = grad.reshape(inputs[3 + n].shape)
            found[3 + n] = found[3 + n] + grad if 3 + n in found else grad
    return [found[n].to(tensor.dtype).contiguous() for n, (tensor, want) in enumerate(zip(inputs, wanted, strict=True)) if want]


# ---- what compilers have to know: shapes


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    """The output as q, but as wide as v; LSE with the heads before the queries."""
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


_attention.register_fake(_shapes)
_paged_attention.register_fake(_shapes)


@_attention_backward.register_fake
def _(q, k, v, reads, longest_q, longest_k, drop, scale, how, out, lse, d_out, d_lse, wanted):
    return [t.new_empty(t.shape) for t, want in zip((q, k, v, *reads), wanted, strict=True) if want]


@_paged_attention_backward.register_fake
def _(q, k, v, page_table, lengths, reads, scale, how, d_out, d_lse, wanted):
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
    found = iter(
        torch.ops.onchip.attention_backward(q, k, v, reads, *ctx.rest, out, lse, d_out, d_lse, wanted) if d_out is not None or d_lse is not None else ()
    )
    grads = [next(found, None) if want else None for want in wanted]
    return (*grads[:3], grads[3:], *(None for _ in ctx.rest))


def _keep_paged(ctx, inputs, output):
    q, k, v, page_table, lengths, reads, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, page_table, lengths, *reads)
    ctx.set_materialize_grads(False)


def _back_paged(ctx, d_out, d_lse):
    q, k, v, page_table, lengths, *reads = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5]]
    found = iter(torch.ops.onchip.paged_attention_backward(q, k, v, page_table, lengths, reads, *ctx.rest, d_out, d_lse, wanted))
    grads = [next(found) if want else None for want in wanted]
    return (*grads[:3], None, None, grads[3:], *(None for _ in ctx.rest))


def _refuse_twice(ctx, *_):
    raise NotImplementedError(TWICE)


_attention.register_autograd(_back, setup_context=_keep)
_paged_attention.register_autograd(_back_paged, setup_context=_keep_paged)
_attention_backward.register_autograd(_refuse_twice)
_paged_attention_backward.register_autograd(_refuse_twice)


# ---- torch.func.vmap: the mapped dimension joins the batch


def _folded(info, dims, tensors: list[Tensor | None], reads_dims, drop: float, how: str, reads: list[Tensor]) -> list[Tensor | None]:
    """q, k, v and what is shaped as they are, each with the mapped dimension in front of the batch, as one. Raises where that means something else."""
    mask, score, _, offsets, *_ = wire.build(how, reads)
    why = next(
        (
            reason
            for reason, holds in (
                ("over sinks or over a tensor that the mask or score reads", any(dim is not None for dim in reads_dims)),
                ("of a mask or score that reads the batch index", any(_reads_batch(part) for part in (mask, score))),
                ("with dropout", drop > 0),
                ("of packed sequences", offsets is not None),
            )
            if holds
        ),
        None,
    )
    if why:
        raise NotImplementedError(f"attention: torch.func.vmap {why} is not implemented; give the mapped dimension as the batch, or use kernel='reference'")
    size = info.batch_size
    moved = (t if t is None else t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape) for t, dim in zip(tensors, dims, strict=True))
    return [t if t is None else t.flatten(0, 1) for t in moved]


def _reads_batch(part) -> bool:
    static = None if part is None else part.static()
    return isinstance(static, Traced) and re.search(r"\bb\b", static.text.partition("\n")[2]) is not None


@_attention.register_vmap
def _(info, dims, q, k, v, reads, longest_q, longest_k, drop, scale, how):
    q, k, v = _folded(info, dims[:3], [q, k, v], dims[3], drop, how, reads)
    results = torch.ops.onchip.attention(q, k, v, reads, longest_q, longest_k, drop, scale, how)
    return tuple(t.unflatten(0, (info.batch_size, t.shape[0] // info.batch_size)) for t in results), (0, 0)


@_attention_backward.register_vmap
def _(info, dims, q, k, v, reads, longest_q, longest_k, drop, scale, how, out, lse, d_out, d_lse, wanted):
    if any(wanted[3:]):
        raise NotImplementedError("attention: torch.func.vmap over gradients of sinks, or of what the score reads, is not implemented; use kernel='reference'")
    q, k, v, out, lse, d_out, d_lse = _folded(info, (*dims[:3], *dims[9:13]), [q, k, v, out, lse, d_out, d_lse], dims[3], drop, how, reads)
    grads = torch.ops.onchip.attention_backward(q, k, v, reads, longest_q, longest_k, drop, scale, how, out, lse, d_out, d_lse, wanted)
    return [t.unflatten(0, (info.batch_size, t.shape[0] // info.batch_size)) for t in grads], [0] * len(grads)


@_paged_attention.register_vmap
def _(info, dims, *args):
    raise NotImplementedError("paged_attention: torch.func.vmap is not implemented; give the mapped dimension as the batch, or use kernel='reference'")
