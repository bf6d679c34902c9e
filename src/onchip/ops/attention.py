"""Exact attention over dense, packed and paged keys, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core import philox, scores
from onchip.core.masks import Band, Causal, Full, Mask, as_mask
from onchip.core.problem import Attention, Dropout, Operands
from onchip.dispatch import select


class PagedKV(NamedTuple):
    """Keys and values of many sequences in pages of one pool (vLLM's PagedAttention, Kwon et al., 2023).

    k, v         [pages, page, kv_heads, dim]; slots that no sequence uses may hold anything, NaN included.
    page_table   [batch, most pages] int32: the pages of each sequence in order; entries past its length are not read.
    lengths      [batch] int32: keys of each sequence, those of the current queries included.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    lengths: Tensor


def attention(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim_v]
    *,
    mask: Mask | Tensor | Callable = Full(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(softcap(score(scale q k^T + bias)) + mask) v`, in O(len_q + len_k) memory (FlashAttention-2, Dao, 2023).

    Returns `[batch, len_q, heads, dim_v]` in q's dtype; with `return_lse` also the natural log of each row's sum of
    exponentials, float32 `[batch, heads, len_q]`. Both have gradients. A row that sees no key gives 0 and LSE -inf.

    mask      a Mask (`Full`, `Causal`, `Window`, `Document`, ... and `&`, `|` of them), a bool tensor (True: seen), or `mask_mod(b, h, i, j)`.
              Causal and Window align to the bottom right: the last query sees the last key.
    scale     `dim ** -0.5` when None.      bias   a float tensor that broadcasts over [batch, heads, len_q, len_k]; it may have a gradient.
    score     `score_mod(s, b, h, i, j)`, a Score (`ALiBi`, `RelativeBias`, ...) or a list of them, applied in order after the bias.
    softcap   `softcap tanh(s / softcap)`, after the score.      sinks   [heads]: a logit more in each row's sum; LSE includes it.
    dropout   a probability, or `Dropout(p, seed, offset)`; drawn again in the backward pass, never stored.
    deterministic   the same gradients, bit by bit, in every run.      batch_invariant   a row's bits do not depend on its neighbours.
    kernel    one by name: it runs or raises. Gradients then come from the same family of kernels.

    `heads` is a multiple of `kv_heads` (grouped-query attention). Inputs may be strided or expanded; the last dimension should be
    contiguous (else it is copied). Under autocast q, k and v are cast. Gradients of gradients: kernel="reference" only.

    Raises ValueError or TypeError for arguments that disagree, `Unsupported` when `kernel` names one that refuses.
    """
    q, k, v = _cast(q, k, v)
    _check("attention", q, k, v, rank=4)
    batch, len_q, heads, dim = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"attention: k has batch {k.shape[0]}, q has {batch}; they must be equal")
    how = _How(mask, scale, scores.chain(bias, score, softcap), sinks, dropout, deterministic, batch_invariant, kernel)
    sizes = (batch, len_q, k.shape[1], heads, k.shape[2], dim, q.dtype)
    return _attend(how, sizes, ("dense", 0, 0, 0, _dim_v(q, v)), q, k, v, Operands(_scale(scale, dim)), return_lse)


def attention_packed(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [tokens_k, kv_heads, dim]
    v: Tensor,  # [tokens_k, kv_heads, dim_v]
    q_offsets: Tensor,  # [batch + 1] int32
    k_offsets: Tensor | None = None,  # [batch + 1] int32
    *,
    longest: int | tuple[int, int] | None = None,
    used: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    mask: Mask | Tensor | Callable = Full(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` for sequences of different lengths laid end to end without padding.

    The queries of sequence `i` are the tokens `q_offsets[i]` to `q_offsets[i + 1]`, its keys those of `k_offsets` (None: the same).
    Returns `[tokens, heads, dim_v]`, and with `return_lse` float32 `[heads, tokens]`. All else as for `attention`; masks and
    scores count queries and keys from the start of their sequence.

    longest   the most queries and keys of a sequence, one number or two; an upper bound will do. None: read from the
              offsets, which waits for the device.
    used      int32 [batch]: how many tokens of each sequence are used, for queries and keys alike or (queries, keys); the rest may hold
              anything, NaN included, and gives 0 and LSE -inf.
    """
    q, k, v = _cast(q, k, v)
    _check("attention_packed", q, k, v, rank=3)
    k_offsets = q_offsets if k_offsets is None else k_offsets
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if offsets.dtype != torch.int32 or offsets.ndim != 1 or len(offsets) < 2:
            raise ValueError(f"attention_packed: {name} are {offsets.dtype} {list(offsets.shape)}; give int32 [batch + 1]")
    batch = len(q_offsets) - 1
    if len(k_offsets) != batch + 1:
        raise ValueError(f"attention_packed: k_offsets are of {len(k_offsets) - 1} sequences, q_offsets of {batch}; they must be as many")
    if k_offsets is q_offsets and len(k) != len(q):
        raise ValueError(f"attention_packed: k has {len(k)} tokens, q has {len(q)}; they must be equal, or give k_offsets")
    q_used, k_used = used if isinstance(used, tuple) else (used, used)
    for lengths in (q_used, k_used):
        if lengths is not None and (lengths.dtype != torch.int32 or lengths.shape != (batch,)):
            raise ValueError(f"attention_packed: used is {lengths.dtype} {list(lengths.shape)}; give int32 [{batch}]")
    if longest is None:
        longest = tuple(int(offsets.diff().max()) for offsets in (q_offsets, k_offsets))
    longest_q, longest_k = longest if isinstance(longest, tuple) else (longest, longest)
    how = _How(mask, scale, scores.chain(bias, score, softcap), sinks, dropout, deterministic, batch_invariant, kernel)
    sizes = (batch, longest_q, longest_k, q.shape[1], k.shape[1], q.shape[2], q.dtype)
    rest = ("packed", 0, len(q), 0 if len(k) == len(q) else len(k), _dim_v(q, v))
    return _attend(how, sizes, rest, q, k, v, Operands(_scale(scale, q.shape[2]), q_offsets, k_offsets, q_used, k_used), return_lse)


def paged_attention(
    q: Tensor,  # [batch, len_q, heads, dim]
    cache: PagedKV,
    *,
    mask: Mask | Tensor | Callable = Causal(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the last `len_q` tokens of each sequence (1 to 16) over its keys in a paged cache.

    The keys of one sequence are read by several blocks at once and merged by their LSE (Flash-Decoding, Dao et al.,
    2023); the heads of a group, and the queries, share each key that is read. Lengths are read on the device, so the
    call can be captured in a CUDA graph. Returns as `attention` does; arguments and errors as there.
    """
    _check("paged_attention", q, cache.k, cache.v, rank=4)
    batch, len_q, heads, dim = q.shape
    page, kv_heads = cache.k.shape[1:3]
    table = cache.page_table
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"paged_attention: page_table is {table.dtype} {list(table.shape)}; give int32 [{batch}, most pages]")
    if cache.lengths.dtype != torch.int32 or cache.lengths.shape != (batch,):
        raise ValueError(f"paged_attention: lengths are {cache.lengths.dtype} {list(cache.lengths.shape)}; give int32 [{batch}]")
    how = _How(mask, scale, scores.chain(bias, score, softcap), sinks, None, False, False, kernel)
    sizes = (batch, len_q, table.shape[1] * page, heads, kv_heads, dim, q.dtype)
    problem, x = _problem("decode", how, sizes, ("paged", page, 0, 0, _dim_v(q, cache.v)), Operands(_scale(scale, dim)), q)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, cache.k, cache.v, sinks, *x.score)):
        kernel = "reference"  # gradients through a cache: through the plain formula
    return select(problem, q.device, kernel).launch(q, cache, x, return_lse)


def merge(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One result from partial ones over disjoint keys: `o = sum exp(lse_s - lse) o_s`, `lse = log sum exp(lse_s)`.

    states   (output, LSE) pairs as `attention(..., return_lse=True)` or `attention_packed` gives them, of one shape.
    Returns such a pair; both have gradients (Flash-Decoding, Dao et al., 2023). Parts with LSE -inf add nothing.
    """
    if not states:
        raise ValueError("merge: states is empty; give at least one (output, LSE) pair")
    lse = torch.stack([part for _, part in states])
    total = torch.logsumexp(lse, 0)
    weights = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = sum(w.transpose(-1, -2).unsqueeze(-1) * o for w, (o, _) in zip(weights, states, strict=True))
    return out.to(states[0][0].dtype), total


# ---- from arguments to a Problem


class _How(NamedTuple):
    """The arguments that say what is computed."""

    mask: Any
    scale: float | None
    score: scores.Score | None
    sinks: Tensor | None
    dropout: float | Dropout | None
    deterministic: bool
    batch_invariant: bool
    kernel: str


def _attend(how: _How, sizes: tuple, rest: tuple, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    problem, x = _problem("prefill", how, sizes, rest, x, q)
    if torch.is_grad_enabled() and how.kernel != "reference" and any(t is not None and t.requires_grad for t in (q, k, v, how.sinks, *x.score)):
        out, lse = _Attend.apply(problem, how.kernel, x, q, k, v, how.sinks, *x.score)
        return (out, lse) if return_lse else out
    return select(problem, q.device, how.kernel).launch(q, k, v, x, return_lse)


def _problem(op: str, how: _How, sizes: tuple, rest: tuple, x: Operands, q: Tensor) -> tuple[Attention, Operands]:
    """The Problem and the operands of a call."""
    mask, score, extras = how.mask, None, ()
    if not isinstance(mask, Band):
        mask = as_mask(mask)
        x = x._replace(mask=mask.tensors)
        mask = mask.static()
    if how.score is not None:
        score = how.score.static()
        x = x._replace(score=how.score.tensors)
    if how.sinks is not None:
        if how.sinks.shape != (sizes[3],):
            raise ValueError(f"sinks are {list(how.sinks.shape)}; give one logit a query head, [{sizes[3]}]")
        x = x._replace(sinks=how.sinks)
        extras += ("sinks",)
    if how.dropout:
        drop = how.dropout if isinstance(how.dropout, Dropout) else Dropout(float(how.dropout))
        if not 0 <= drop.p < 1:
            raise ValueError(f"dropout {drop.p} is not a probability below 1; give 0 <= p < 1")
        if drop.p:
            x = x._replace(drop=drop.p, state=philox.draw(q.device, drop.seed, drop.offset))
            extras += ("dropout",)
    if how.deterministic or torch.are_deterministic_algorithms_enabled():
        extras += ("deterministic",)
    if how.batch_invariant:
        extras += ("batch_invariant",)
    if x.q_used is not None or x.k_used is not None:
        extras += ("used",)
    if q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        extras += ("tf32",)
    for tensor in (*x.mask, *x.score):
        if tensor.device != q.device and tensor.ndim:
            raise ValueError(f"a tensor {list(tensor.shape)} of the mask or score is on {tensor.device}, q on {q.device}; move them to one device")
    return Attention(op, *sizes, mask, *rest, score, tuple(sorted(extras))), x


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where it is on."""
    if torch.is_autocast_enabled(q.device.type) and q.is_floating_point() and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _scale(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else float(scale)


def _dim_v(q: Tensor, v: Tensor) -> int:
    return 0 if v.shape[-1] == q.shape[-1] else v.shape[-1]


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    """The ways in which q, k and v may disagree, each with the way out."""
    if q.ndim != rank or k.ndim != rank or v.ndim != rank:
        raise ValueError(f"{name}: q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions; each needs {rank}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{name}: k is {list(k.shape)} and v {list(v.shape)}; all but the last dimension must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{name}: q has head dimension {q.shape[-1]}, k has {k.shape[-1]}; they must be equal")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{name}: {q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


# ---- gradients

FAMILY = {"triton_prefill": "triton_backward"}  # the kernel of the backward pass that goes with one of the forward pass asked for by name


class _Attend(torch.autograd.Function):
    """Attention with a backward pass that computes the weights again from q, k and LSE (FlashAttention, Dao et al., 2022, algorithm 4)."""

    @staticmethod
    def forward(ctx, problem: Attention, kernel: str, x: Operands, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *score: Tensor):
        out, lse = select(problem, q.device, kernel).launch(q, k, v, x, True)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *score)
        ctx.problem, ctx.kernel, ctx.x = problem, kernel, x._replace(sinks=None, score=())
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if torch.is_grad_enabled() and any(d is not None and d.requires_grad for d in (d_out, d_lse)):
            raise NotImplementedError("attention: gradients of gradients; kernel='reference' has them")
        q, k, v, out, lse, sinks, *score = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(out)
        grads = attention_backward(ctx.problem, ctx.kernel, ctx.x._replace(sinks=sinks, score=tuple(score)), q, k, v, out, lse, d_out, d_lse)
        return None, None, None, *grads[:4], *grads[4]


def attention_backward(problem: Attention, kernel: str, x: Operands, q, k, v, out, lse, d_out, d_lse=None):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `problem`, `x`; `kernel` is the forward's, by name or "auto"."""
    extras = problem.extras + (("score_grad",) if any(t.requires_grad for t in x.score) else ())
    problem = problem._replace(op="backward", extras=tuple(sorted(extras)))
    return select(problem, q.device, FAMILY.get(kernel, kernel)).launch(q, k, v, out, lse, d_out, d_lse, x)


__all__ = ["Dropout", "PagedKV", "attention", "attention_packed", "merge", "paged_attention"]
