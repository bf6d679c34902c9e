"""Exact attention over dense, packed and paged keys, forward and backward."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.core.arguments import kind_of, truth
from onchip.core.formats import Codes
from onchip.core.masks import Causal, Full, Mask
from onchip.core.parts import is_whole
from onchip.core.problem import Dropout, Operands
from onchip.core.scales import SHARES, Quantised
from onchip.core.scores import chain
from onchip.ops import attend, checks, e4m3, graph, kinds, registered
from onchip.ops.attend import How, PagedKV
from onchip.ops.differentiable import autocast


def attention(
    q: Tensor | Quantised,  # [batch, len_q, heads, dim]
    k: Tensor | Quantised,  # [batch, len_k, kv_heads, dim]
    v: Tensor | Quantised,  # [batch, len_k, kv_heads, dim_v]
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
    exponentials, float32 `[batch, heads, len_q]` (float64 of float64). Both have gradients. A row that sees no key gives 0 and LSE -inf.

    mask      a Mask (`Full`, `Causal`, `Window`, `Document`, ... and `&`, `|` of them), a bool tensor (True: seen), or `mask_mod(b, h, i, j)`.
              Causal and Window align to the bottom right: the last query sees the last key. A GPU remembers which tiles a mask's tensors, and offsets,
              show, by torch's count of writes: after one that torch does not see (a CUDA graph replayed, a kernel of yours) call
              `torch.autograd.graph.increment_version(tensor)`.
    scale     `dim ** -0.5` when None.      bias   a float tensor that broadcasts over [batch, heads, len_q, len_k]; it may have a gradient.
    score     `score_mod(s, b, h, i, j)`, a Score (`ALiBi`, `RelativeBias`, ...) or a list of them, applied in order after the bias.
    softcap   `softcap tanh(s / softcap)`, after the score; None or 0: none.      sinks   [heads]: a logit more in each row's sum; LSE includes it.
    dropout   a probability, or `Dropout(p, seed, offset)`; drawn again in the backward pass, never stored.
    deterministic   the same gradients, bit by bit, in every run.      batch_invariant   a row's bits do not depend on other sequences.
    kernel    one by name: it runs or raises, and so do its gradients. Those of "triton_prefill" are by `triton_backward`, of "bf16_of_e4m3" by
              `bf16_of_e4m3_backward`, of "hopper_prefill" and "hopper_fp8" by the menu's first that is not plain torch (one for Hopper, or one for any
              GPU where that is faster, as of few queries and keys, or alone takes them), of "blocked" and "reference" by these.

    q, k and v may be `Quantised`, all three (see `quantise`): the output is bfloat16, and gradients go to their sources. Products are in 8 bits on a
    Hopper GPU, for head dimension 64, 128 or (forward) 256, Full, Causal and Window, and nothing else asked for, the backward pass for scales of heads
    and blocks; elsewhere a GPU multiplies the bfloat16 numbers that they stand for, and a CPU those of float32.
    `heads` is a multiple of `kv_heads` (grouped-query attention). Inputs may be strided or expanded; the last dimension should be
    contiguous (else it is copied). Under autocast q, k and v are cast. Gradients of gradients: kernel="reference" only.
    torch.compile, torch.export and torch.func see one operator, `onchip::attention`; masks and functions may be made inside or outside.

    Raises ValueError or TypeError for arguments that disagree, `Unsupported` when `kernel` names one that refuses.
    """
    scales = sources = kind = None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or torch._C._is_any_autocast_enabled():
        q, k, v, scales, sources = checks.taken_apart(q, k, v)
    if score is sinks is dropout is scales is None and not torch.compiler.is_dynamo_compiling():
        kind, decision, x = kinds.known(q, k, v, mask, scale, bias, softcap, (deterministic, batch_invariant, kernel))
        if decision is not None:
            return attend.launched(decision, kernel, x, q, k, v, return_lse)
    watched = kind is None and graph.in_graph(kernel, q, k, v)
    checks.check("attention", q, k, v, rank=4, scaled=scales is not None)
    if scales is not None:
        checks.check_scales(q, k, v, scales)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"attention: k has batch {k.shape[0]}, q has {q.shape[0]}; they must be equal")
    if dropout is not None:
        checks.check_dropout("attention", dropout)
    asked = truth("attention", "deterministic", deterministic), truth("attention", "batch_invariant", batch_invariant)
    how = How(mask, chain(bias, score, softcap), sinks, dropout, *asked, kernel)
    sizes, x = attend.dense_sizes(q, k, v), Operands(checks.scale_of(scale, q), scales=scales, sources=sources)
    return graph.attend(how, sizes, q, k, v, x, return_lse) if watched else attend.attend(how, sizes, q, k, v, x, return_lse, kind)


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
    scores count queries and keys from the start of their sequence. Tokens before the first offset and from the last one on are not computed: without `used`
    they, and their gradients, may come back as anything.

    longest   the most queries and keys of a sequence, one number or two; an upper bound will do, which tensors of masks and scores then
              have to reach. None: read from the offsets, which waits for the device.
    used      int32 [batch]: how many of its own tokens each sequence uses, for queries and keys alike or (queries, keys); the rest may hold
              anything, NaN included, and gives 0 and LSE -inf. More keys than its own: those of the tokens behind them, which the next sequence may
              use too, forward alone. Of keys that two use the gradients are a ValueError on a CPU, and anything on a GPU; kernel="reference" has them.
    """
    checks.plain("attention_packed", q, k, v)
    q, k, v = autocast(q, k, v)
    checks.check("attention_packed", q, k, v, rank=3)
    if k_offsets is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"attention_packed: k has {k.shape[0]} tokens, q has {q.shape[0]}; they must be equal, or give k_offsets")
    k_offsets = q_offsets if k_offsets is None else k_offsets
    (q_used, k_used), (longest_q, longest_k) = checks.pair_of("used", used), checks.pair_of("longest", longest)
    checks.check_longest("attention_packed", longest_q, longest_k)
    checks.check_offsets(q, q_offsets, k_offsets, q_used, k_used)
    checks.check_dropout("attention_packed", dropout)
    asked = truth("attention_packed", "deterministic", deterministic), truth("attention_packed", "batch_invariant", batch_invariant)
    how = How(mask, chain(bias, score, softcap), sinks, dropout, *asked, kernel)
    x = Operands(checks.scale_of(scale, q), q_offsets, k_offsets, q_used, k_used)
    run = graph.attend
    if not graph.in_graph(kernel, q, k, v):
        run = attend.attend
        longest_q, longest_k = attend.longest_of(q_offsets, longest_q, q_used), attend.longest_of(k_offsets, longest_k, k_used)
    return run(how, attend.packed_sizes(q, k, v, q_offsets.shape[0] - 1, longest_q, longest_k), q, k, v, x, return_lse)


def paged_attention(
    q: Tensor,  # [batch, len_q, heads, dim], or with q_offsets [tokens, heads, dim]
    cache: PagedKV,
    *,
    q_offsets: Tensor | None = None,  # [batch + 1] int32
    longest: int | None = None,
    mask: Mask | Tensor | Callable = Causal(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the last `len_q` tokens of each sequence over its keys in a paged cache: a step of decoding, or a chunk of a prefill.

    Of up to 16 queries the keys of one sequence are read by several blocks at once and merged by their LSE (Flash-Decoding, Dao et al.,
    2023); the heads of a group, and the queries, share each key that is read. More go in tiles: on a Hopper GPU by a kernel for bf16 and fp16, head
    dimensions 8 to 256 by 8; on any other by one for all GPUs. Pages may have any size; pools whose rows Hopper's copy engine does not take (not whole, or not
    at multiples of 16 bytes) are copied in each call, with a warning. Lengths are read on the device, so the call can be captured in a CUDA graph.
    (Not of a quantised cache with more than 16 queries, unless there is one scale a head, of 64, 128 or 256 columns, a band for a mask and no score:
    plain torch reads it, and waits for the device.) Returns as `attention` does; arguments and errors as there, but
    gradients are those of the formula in plain torch, by whatever kernel the output came.

    q_offsets   for sequences with different numbers of queries, laid end to end (chunks of prefills and decodes in one call): those of sequence
                `i` are the tokens `q_offsets[i]` to `q_offsets[i + 1]`, none at all included, and still its last ones. Returns
                `[tokens, heads, dim_v]`, and LSE `[heads, tokens]`; tokens from the last offset on are not computed and may come back as anything.
    longest     the most queries of a sequence; an upper bound will do. None: read from the offsets, which waits for the device.

    Multi-head latent attention (DeepSeek-V2, 2024): the cache's values are the first 512 columns of its keys, in the same memory, which is then read
    once. The heads' own projections of keys are absorbed by the queries, those of values by the output (w_uk [heads, 128, 512], w_uv [heads, 512, 128]):

        q = torch.cat([torch.einsum("bqhn,hnc->bqhc", q_nope, w_uk), q_rope], -1)  # [batch, len_q, heads, 512 + 64]
        o = paged_attention(q, PagedKV(latent, latent[..., :512], page_table, lengths), scale=(128 + 64) ** -0.5)
        o = torch.einsum("bqhc,hcv->bqhv", o, w_uv)
    """
    kind = None
    if bias is score is sinks is None and cache.__class__ is PagedKV and not torch.compiler.is_dynamo_compiling():
        kind, decision, x = kinds.known_paged(q, cache, q_offsets, longest, (mask, scale, softcap, batch_invariant, kernel))
        if decision is not None:
            return decision.run(q, cache, x, return_lse)
    checks.plain("paged_attention", q)
    invariant = truth("paged_attention", "batch_invariant", batch_invariant)
    how = How(mask, chain(bias, score, softcap), sinks, None, False, invariant, kernel)
    return paged(q, cache, how, Operands(checks.scale_of(scale, q), q_offsets), longest, return_lse, kind)


def paged(q: Tensor, cache: PagedKV, how: How, x: Operands, longest: int | None, return_lse: bool, kind: tuple | None = None):
    """`paged_attention`, for who has more to say than its arguments do. `kind`: see `kinds.known_paged`."""
    q_offsets = x.q_offsets
    batch = checks.paged_batch(q, cache, q_offsets, longest)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type) if isinstance(cache.k, Codes) else cache.k.dtype)
    if isinstance(cache.k, Codes) or isinstance(cache.v, Codes):
        checks.check_codes(q, cache)
    else:
        checks.check("paged_attention", q, cache.k, cache.v, rank=4, rank_q=q.ndim)
    (k, v), _ = registered.taken_apart(cache)
    checks.check_pages("paged_attention", q, cache, batch)
    run = graph.attend_paged
    if not graph.in_graph(how.kernel, q, k, v):
        longest = None if q_offsets is None else attend.longest_of(q_offsets, longest, name="paged_attention")
        if how.kernel == "reference" or not checks.paged_grad(how, q, cache):
            run = functools.partial(attend.attend_paged, kind=kind)
    sizes = attend.paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1], None if q_offsets is None else (batch, longest))
    return run(how, sizes, q, cache, x, return_lse)


def merge(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One result from partial ones over disjoint keys: `o = sum exp(lse_s - lse) o_s`, `lse = log sum exp(lse_s)`.

    states   (output, LSE) pairs as `attention(..., return_lse=True)` or `attention_packed` gives them, of one shape.
    Returns such a pair; both have gradients (Flash-Decoding, Dao et al., 2023). Parts with LSE -inf add nothing, whatever their output holds.
    One kernel on a GPU, as long as nobody needs gradients.
    """
    if not isinstance(states, Iterable):
        raise TypeError(f"merge: states is {states!r:.60}; give a sequence of (output, LSE) pairs")
    states = tuple(states)
    if not states:
        raise ValueError("merge: states is empty; give at least one (output, LSE) pair")
    for n, part in enumerate(states):
        if not isinstance(part, (tuple, list)) or [isinstance(t, Tensor) for t in part] != [True, True]:
            raise TypeError(f"merge: part {n} is {kind_of(part)}; give an (output, LSE) pair of tensors")
        out, lse = part
        if not all(t.is_floating_point() and t.dtype.itemsize > 1 for t in part):
            raise TypeError(f"merge: part {n} has an output of {out.dtype} and LSE of {lse.dtype}; give floats, as attention(..., return_lse=True) does")
        if not out.device == lse.device == states[0][0].device:
            raise ValueError(f"merge: part {n} has its output on {out.device}, its LSE on {lse.device}; move all parts to {states[0][0].device}")
        if out.ndim < 3 or out.shape != states[0][0].shape or lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
            raise ValueError(f"merge: part {n} has an output {list(out.shape)} and LSE {list(lse.shape)}; give [..., len, heads, dim] and [..., heads, len]")
    return attend.merge(states)


def quantise(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim_v]
    *,
    share: str = "block",
    rotation: Tensor | None = None,
) -> tuple[Quantised, Quantised, Quantised]:
    """q, k and v in e4m3 for `attention`, each with scales max |x| / 448, after FlashAttention-3 (Shah et al., 2024, section 3.3).

    share      what shares a scale of q and k: "head" (all tokens of it), "block" (128 tokens) or "token". v has one a head, as in FlashAttention-3's
               interface: one of its tokens would be part of their weights, of which the largest then would be rounded (with outliers 5 to 14% more error).
    rotation   random signs, +1 and -1, floats [dim], see `random_signs`: q and k are multiplied by diag(signs) H / sqrt(dim) with H the Walsh-Hadamard
               matrix, which changes no score, and spreads what is large in few channels over all (dim a power of two).

    Gradients come back as if nothing had been rounded, by the `source` of each (see `Quantised`). Raises ValueError for a share or signs that do not fit.
    """
    if share not in tuple(SHARES):
        raise ValueError(f"quantise: share is {share!r}; give one of {', '.join(map(repr, SHARES))}")
    checks.plain("quantise", q, k, v)
    q, k, v = autocast(q, k, v)
    checks.check("quantise", q, k, v, rank=4)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"quantise: k has batch {k.shape[0]}, q has {q.shape[0]}; they must be equal")
    dim = q.shape[-1]
    if rotation is not None:
        rotation = e4m3.signs_of(rotation, dim, q.device)
    run = graph.quantise if graph.in_graph("auto", q, k, v) else e4m3.quantise
    given = (q, share, rotation), (k, share, rotation), (v, "head", None)
    return tuple(Quantised(*run(x, each, signs), e4m3.source_of(x, signs)) for x, each, signs in given)


def random_signs(dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """+1 and -1, float32 [dim], the same for the same seed on every device: the rotation of `quantise`. Made once, outside of what is compiled.

    Raises ValueError for a dim that is no power of two, a seed that is no integer of 64 bits, and what names no device.
    """
    if not is_whole(dim) or not 1 <= dim < 1 << 62 or dim & (dim - 1):
        raise ValueError(f"random_signs: dim is {dim!r:.60}; give the head dimension of q and k, a power of two")
    if not is_whole(seed) or not -1 << 63 <= seed < 1 << 64:
        raise ValueError(f"random_signs: seed is {seed!r:.60}; give an integer of 64 bits")
    try:
        where = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"random_signs: device is {device!r:.60}; give cpu, cuda or cuda:N") from error
    drawn = torch.randint(0, 2, (dim,), generator=torch.Generator("cpu").manual_seed(int(seed)), device="cpu")
    return (2 * drawn - 1).to(where, torch.float32)


__all__ = ["Dropout", "PagedKV", "Quantised", "attention", "attention_packed", "merge", "paged_attention", "quantise", "random_signs"]
