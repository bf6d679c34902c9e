"""From the arguments of an attention call to a Problem and a launch, with gradients: what eager calls do."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core import philox
from onchip.core.device import Device
from onchip.core.formats import Codes
from onchip.core.kernel import Unsupported
from onchip.core.masks import Band, as_mask
from onchip.core.parts import Exactly
from onchip.core.problem import Attention, Dropout, Operands, Rows
from onchip.core.scores import Score
from onchip.dispatch import Decision, recorders, select, sentences, sm_margin
from onchip.kernels.attention import reference
from onchip.ops import kinds, wire
from onchip.ops.differentiable import batched

# The kernel of the backward pass that goes with one of the forward pass asked for by name; "auto": the menu's first, which must not be plain torch.
FAMILY = {"triton_prefill": "triton_backward", "hopper_prefill": "auto", "hopper_fp8": "auto", "bf16_of_e4m3": "bf16_of_e4m3_backward"}
TWICE = "attention: gradients of gradients are not implemented; kernel='reference' has them"
UNTRAINED = "attention: values in e4m3 and their scales have no gradient; it goes to the source of a Quantised: what onchip.quantise was given, or one of yours"
FORWARD = "attention: forward-mode derivatives (jvp) are not implemented; kernel='reference' has them, or use reverse mode"


class PagedKV(NamedTuple):
    """Keys and values of many sequences in pages of one pool (vLLM's PagedAttention, Kwon et al., 2023).

    k, v         [pages, page, kv_heads, dim]; slots that no sequence uses may hold anything, NaN included. `Codes`: quantised, of one format.
    page_table   [batch, most pages] int32: the pages of each sequence in order; entries past its length are not read.
    lengths      [batch] int32: keys of each sequence, those of the current queries included.
    """

    k: Tensor | Codes
    v: Tensor | Codes
    page_table: Tensor
    lengths: Tensor


class How(NamedTuple):
    """The arguments that say what is computed. `score`: bias, score functions and softcap in one."""

    mask: Any
    score: Score | None
    sinks: Tensor | None
    dropout: float | Dropout | None
    deterministic: bool
    batch_invariant: bool
    kernel: str


class Sizes(NamedTuple):
    """What a Problem takes from the shapes: its fields from `batch` to `dtype`, from `keys` to `dim_v`, and `kv`."""

    dims: tuple  # batch, len_q, len_k, heads, kv_heads, dim, dtype
    keys: tuple  # keys, page, tokens, tokens_k, dim_v
    kv: str = ""


def dense_sizes(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    (batch, len_q, heads, dim), (_, len_k, kv_heads, columns) = q.shape, v.shape
    return Sizes((batch, len_q, len_k, heads, kv_heads, dim, q.dtype), ("dense", 0, 0, 0, 0 if columns == dim else columns))


def packed_sizes(q: Tensor, k: Tensor, v: Tensor, sequences: int, longest_q: int, longest_k: int) -> Sizes:
    tokens, heads, dim = q.shape
    return Sizes(
        (sequences, longest_q, longest_k, heads, k.shape[1], dim, q.dtype), ("packed", 0, tokens, 0 if k.shape[0] == tokens else k.shape[0], dim_v(q, v))
    )


def paged_sizes(q: Tensor, k: Tensor | Codes, v: Tensor | Codes, pages: int, packed: tuple[int, int] | None = None) -> Sizes:
    """`packed`: sequences, and the most queries of one, where q is [tokens, heads, dim]."""
    batch, len_q = packed or q.shape[:2]
    heads, dim = q.shape[-2:]
    _, page, kv_heads, _ = k.shape
    keys = ("paged", page, q.shape[0] if packed else 0, 0, dim_v(q, v))
    return Sizes((batch, len_q, pages * page, heads, kv_heads, dim, q.dtype), keys, str(k.format) if isinstance(k, Codes) else "")


def dim_v(q: Tensor, v: Tensor | Codes) -> int:
    """Of the values, where it is not q's."""
    return 0 if v.shape[-1] == q.shape[-1] else v.shape[-1]


def check_scale(scale: float, dtype: torch.dtype) -> None:
    """Raises ValueError for a scale that its kernels cannot hold."""
    if not math.isfinite(scale) or (dtype != torch.float64 and abs(scale) > torch.finfo(torch.float32).max):
        past = ", more than float32 holds" * math.isfinite(scale)
        raise ValueError(f"attention: scale is {scale}{past}; give a finite number, or None for dim ** -0.5")


def longest_of(offsets: Tensor, given: int | None = None, used: Tensor | None = None, name: str = "attention_packed") -> int:
    """Of the sequences: `given`, or read, which waits for the device. On a CPU `given` is compared: rows past it are not computed on a GPU."""
    if given is None:
        return int(offsets.diff().max())
    given = int(given)  # a tensor would make a Problem that equals no other
    if offsets.device.type == "cpu" and given < (most := int((offsets.diff() if used is None else used).max())):
        raise ValueError(f"{name}: longest is {given}, and a sequence has {most} tokens; give the most of any, or more")
    return given


def attend(how: How, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool, kind: tuple | None = None):
    """The launch of a dense or packed call, recorded for autograd where a tensor needs a gradient. `kind`: see `kinds.known`."""
    if torch._C._are_functorch_transforms_active():
        how = spelt_out(how, q)
    if how.dropout:
        x = drawn(how.dropout, q, x)
    problem, x = problem_of("prefill", how, sizes, x, q)
    if how.kernel == "reference":  # torch's own derivatives, of any order and kind
        return select(problem, q.device, "reference").launch(q, k, v, x, return_lse)
    decision = select(problem, q.device, how.kernel)
    if kind is not None:
        kinds.keep(kind, decision, x)
    return launched(decision, how.kernel, x, q, k, v, return_lse)


def launched(decision: Decision, kernel: str, x: Operands, q: Tensor, k: Tensor, v: Tensor, return_lse: bool):
    more = x.score or x.sinks is not None or x.scales is not None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or (more and needs_grad(x))):
        if decision.recorded and not return_lse and forward_ad._current_level < 0:
            out = decision.recorded(x, q, k, v, functools.partial(went_back, decision, kernel))
            if out is not None:
                return out
        out, lse = Attend.apply(decision, kernel, x, q, k, v, x.sinks, *x.score, *(x.sources or x.scales or ()))
        return (out, lse) if return_lse else out
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, x.sinks, *x.score)
    return (decision.launch if torch._C._is_any_autocast_enabled() else decision.run)(q, k, v, x, return_lse)


def attend_paged(how: How, sizes: Sizes, q: Tensor, cache: PagedKV, x: Operands, return_lse: bool, kind: tuple | None = None):
    """The launch of a call over a paged cache. Gradients: by the operator of `ops/registered.py`, or the reference's own. `kind`: see `kinds.known_paged`."""
    if torch._C._are_functorch_transforms_active():
        how = spelt_out(how, q)
    keys = max(cache.lengths.tolist(), default=0) if cache.lengths.device.type == "cpu" else 0
    problem, x = paged_problem(how, sizes, q, cache.k, cache.v, x, keys)
    return launch_paged(problem, how.kernel, q, cache, x, return_lse, kind)


def launch_paged(problem: Attention, kernel: str, q: Tensor, cache: PagedKV, x: Operands, return_lse: bool, kind: tuple | None = None):
    """By `kernel`; of no queries by plain torch, and of no rows not at all: there is no launch of nothing."""
    if x.q_offsets is None and not q.numel():
        out = q.new_zeros(*q.shape[:-1], problem.value_dim)
        return (out, out.new_zeros(len(q), problem.heads, problem.len_q, dtype=torch.promote_types(q.dtype, torch.float32))) if return_lse else out
    nothing = x.q_offsets is not None and not q.numel()
    table = cache.page_table
    cache = cache._replace(page_table=table if table.stride(-1) == 1 else table.contiguous(), lengths=cache.lengths.contiguous())
    if x.q_offsets is not None:
        x = x._replace(q_offsets=x.q_offsets.contiguous())
    decision = select(problem, q.device, "reference" if nothing else kernel)
    if kind is not None and not nothing:
        kinds.keep(kind, decision, x)
    return decision.launch(q, cache, x, return_lse)


def merge(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `attention.merge`. By the formula in torch where something watches, or parts are not alike."""
    out = states[0][0]
    plain = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0)
    alike = all(
        type(o) is type(e) is Tensor and (o.dtype, e.dtype, o.device, e.device) == (out.dtype, torch.float32, out.device, out.device) for o, e in states
    )
    recorded = forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(t.requires_grad for pair in states for t in pair))
    if not (plain and alike) or recorded or out.ndim not in (3, 4) or not out.numel() or out.is_meta:
        return reference.merge(None, None, states)
    problem = Rows("merge", out.numel() // out.shape[-1], out.shape[-1], out.dtype, f"{len(states)} parts")
    return select(problem, out.device).launch(states)


def spelt_out(how: How, q: Tensor) -> How:
    """The same call, with a user's functions written down: under torch.func, what they capture is not what a dispatch mode sees."""
    reads: list[Tensor] = []
    mask = how.mask if isinstance(how.mask, Band) else as_mask(how.mask)
    mask, score = wire.build(wire.pack((mask, how.score), reads, q), reads)
    return how._replace(mask=mask, score=score)


def problem_of(op: str, how: How, sizes: Sizes, x: Operands, q: Tensor, keys: int = 0) -> tuple[Attention, Operands]:
    """The Problem and the operands of a call; dropout is in `x` already. `keys`: the most of a sequence over pages, where that is known."""
    mask, score, extras = how.mask, None, ()
    if not isinstance(mask, Band):
        mask = as_mask(mask)
        mask.fits(*_needs(sizes, keys))
        mask, reads = mask.parts()
        x = x._replace(mask=_on(q, "mask", reads))
    if how.score is not None:
        how.score.fits(*_needs(sizes, keys))
        score, reads = how.score.parts()
        x = x._replace(score=_on(q, "score", reads))
    if how.sinks is not None:
        check_sinks(how.sinks, sizes.dims[3], q)
        x = x._replace(sinks=how.sinks)
        extras += ("sinks",)
    if x.scales is not None:
        extras += x.scales.extras(*sizes.dims[1:3])
    if x.drop:
        extras += ("dropout",)
    if how.deterministic:
        extras += ("deterministic",)
    if how.batch_invariant:
        extras += ("batch_invariant",)
    if x.q_used is not None or x.k_used is not None:
        extras += ("used",)
    if q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32":  # allow_tf32 cannot be read then
        extras += ("tf32",)
    return Attention(op, *sizes.dims, mask, *sizes.keys, score, tuple(sorted(extras)) if extras else (), sizes.kv), x


def paged_problem(how: How, sizes: Sizes, q: Tensor, k: Tensor | Codes, v: Tensor | Codes, x: Operands, keys: int = 0) -> tuple[Attention, Operands]:
    """The same of a call over a cache, which says whether its values are columns of its keys."""
    problem, x = problem_of("decode", how, sizes, x, q, keys)
    if sizes.keys[-1] and first_columns(k, v):
        problem = problem._replace(extras=tuple(sorted((*problem.extras, "latent"))))
    return problem, x


def first_columns(k: Tensor | Codes, v: Tensor | Codes) -> bool:
    """Whether `v` is `k[..., :dim_v]`, the same memory: a latent cache."""
    if isinstance(k, Codes) or v.shape[-1] > k.shape[-1] or torch._C._are_functorch_transforms_active():  # whose tensors have no address
        return False
    return v.stride() == k.stride() and v.data_ptr() == k.data_ptr()


def _needs(sizes: Sizes, keys: int) -> tuple[int, int, int, int]:
    """The least sizes of a tensor of a mask or score: (batch, heads, len_q, len_k); of a paged call a host knows `keys`, or none where lengths are on a GPU."""
    batch, len_q, len_k, heads, *_ = sizes.dims
    if sizes.keys[0] == "dense":
        return batch, heads, Exactly(len_q), Exactly(len_k)
    return batch, heads, len_q, keys if sizes.keys[0] == "paged" else len_k


def _on(q: Tensor, what: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors on q's device: single numbers are moved, others have to be there."""
    moved = ()
    for t in tensors:
        if t.device != q.device and (t.ndim or t.is_meta):
            way = "make it outside of the function, whose places are on meta" if t.is_meta else "move them to one device"
            raise ValueError(f"attention: a tensor {list(t.shape)} of the {what} is on {t.device}, q on {q.device}; {way}")
        moved += (t if t.ndim else t.to(q.device),)
    return moved


def check_sinks(sinks: Tensor, heads: int, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"attention: sinks are a {type(sinks).__name__}; give a tensor of one logit a query head, [{heads}] on {q.device}")
    if sinks.shape != (heads,) or not sinks.dtype.is_floating_point or sinks.itemsize == 1 or sinks.device != q.device or sinks.layout != torch.strided:
        given = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}" + ", sparse" * (sinks.layout != torch.strided)
        raise ValueError(f"attention: sinks are {given}; give floats, one logit a query head, [{heads}] on {q.device}")


def drawn(dropout: float | Dropout, q: Tensor, x: Operands) -> Operands:
    """`x` with the probability, and the seed of this call's random numbers."""
    p, seed, offset = dropout if isinstance(dropout, Dropout) else Dropout(dropout)
    philox.check("attention", p, seed, offset)
    return x._replace(drop=float(p), state=philox.draw(q.device, seed, offset)) if p else x


def needs_grad(x: Operands) -> bool:
    if x.sinks is not None and x.sinks.requires_grad:
        return True
    for t in x.score:  # not `any`: a generator is a frame more
        if t.requires_grad:
            return True
    return x.scales is not None and any(t.requires_grad for t in x.sources or x.scales)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises where forward-mode differentiation goes through."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(FORWARD)


def refuse_training(*wanted: bool) -> None:
    """Raises where a gradient is wanted of values in e4m3, or of their scales."""
    if any(wanted):
        raise NotImplementedError(UNTRAINED)


# ---- gradients


class Attend(torch.autograd.Function):
    """Attention with a backward pass that computes the weights again from q, k and LSE (FlashAttention, Dao et al., 2022, algorithm 4)."""

    @staticmethod
    def forward(ctx, decision: Decision, kernel: str, x: Operands, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Tensor):
        score = rest[: len(x.score)]  # the others are what the gradients of q, k and v in e4m3 go to
        out, lse = decision.launch(q, k, v, x, True)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *score)
        ctx.problem, ctx.kernel, ctx.x, ctx.sourced = decision.problem, kernel, x._replace(sinks=None, score=(), sources=None), x.sources is not None
        ctx.writes, ctx.margin = writes(x), decision.device.margin
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        refuse_passes(d_out, d_lse)
        if ctx.writes != writes(ctx.x):
            raise RuntimeError("attention: offsets, used lengths or a tensor of the mask were written to before the backward pass; give clones, or write later")
        q, k, v, out, lse, sinks, *score = ctx.saved_tensors
        quantised = ctx.x.scales is not None
        if quantised:
            refuse_training(*ctx.needs_input_grad[3:6], *(() if ctx.sourced else ctx.needs_input_grad[-3:]))
        with torch.no_grad(), sm_margin(ctx.margin):  # torch goes back in a thread of its own
            d_out = torch.zeros_like(out) if d_out is None else d_out
            grads = attention_backward(ctx.problem, ctx.kernel, ctx.x._replace(sinks=sinks, score=tuple(score)), q, k, v, out, lse, d_out, d_lse)
        grads = (*grads[:4], *grads[4]) if not quantised else (None, None, None, grads[3], *grads[4], *(grads[:3] if ctx.sourced else (None,) * 3))
        if torch.is_grad_enabled():  # create_graph: whoever goes on through these gradients shall know
            grads = _Once.apply(out, *grads)
        return None, None, None, *grads

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(FORWARD)


def writes(x: Operands) -> list[int]:
    """How often what says where to look was written to, in torch's count; q, k, v and what a score reads are counted by autograd."""
    return [t._version for t in (*x.mask, *x[1:5], *(x.scales or ())) if t is not None and not t.is_inference()]


def refuse_passes(*grads: Tensor | None) -> None:
    """Raises where many backward passes are asked for at once, which the reference has."""
    if torch._C._are_functorch_transforms_active() or batched(*grads):
        raise NotImplementedError("attention: a batch of backward passes at once (is_grads_batched) is not implemented; kernel='reference' has it")


def went_back(decision: Decision, kernel: str, found: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """What `Attend.backward` does beside the gradients, for a node of torch's that `found` them: refuses, and counts the kernel where somebody records."""
    refuse_passes(given[0])
    if recorders:
        backward_decision(backward_problem(decision.problem, torch.are_deterministic_algorithms_enabled()), decision.device, kernel)
    if not torch.is_grad_enabled():
        return None
    anchors = [d for d in found if d is not None]
    return _Once.apply(anchors[0], *found) if anchors else None


class _Once(torch.autograd.Function):
    """Gradients that have none themselves."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *grads: Tensor | None):
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(TWICE)


def attention_backward(problem: Attention, kernel: str, x: Operands, q, k, v, out, lse, d_out, d_lse=None):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `problem`, `x`; `kernel` is the forward's, by name or "auto"."""
    problem = backward_problem(problem, torch.are_deterministic_algorithms_enabled(), any(t.requires_grad for t in x.score))
    return backward_decision(problem, q.device, kernel).launch(q, k, v, out, lse, d_out, d_lse, x)


def backward_decision(problem: Attention, device: torch.device | Device, kernel: str) -> Decision:
    """What runs the gradients of a forward pass by `kernel`, a name or "auto". Raises `Unsupported` where only plain torch would, of a name that is not."""
    decision = select(problem, device, FAMILY.get(kernel, kernel))
    if kernel in FAMILY and decision.kernel.portable:
        raise Unsupported(
            f"backward: kernel={kernel!r} has its gradients by a kernel that is not plain torch, and none takes {problem} on {decision.device.name}: "
            f"{sentences(decision.refused)}. Leave kernel='auto' ({decision.kernel.name} accepts this)"
        )
    return decision


@functools.lru_cache(maxsize=1 << 14)
def backward_problem(problem: Attention, deterministic: bool, score_grad: bool = False) -> Attention:
    asked = {"deterministic": deterministic, "score_grad": score_grad}
    return problem._replace(op="backward", extras=tuple(sorted({*problem.extras, *(name for name, wanted in asked.items() if wanted)})))
