"""FlashAttention-3 (`flash_attn_interface`): its functions by their names, arguments, defaults, shapes and results.

As flash-attn 2, but a row that sees no key has LSE -inf, and `flash_attn_with_kvcache` returns four. Accepted and without effect,
because they only steer the original's kernels: `num_splits`, `pack_gqa`, `scheduler_metadata`. `sm_margin` is as in `onchip.sm_margin` for eager
calls; 0 is what the setting says.

float8_e4m3fn   q, k and v are widened to bfloat16, exactly, and computed in that; the output is bfloat16. `q_descale` and `k_descale`
                `[batch, kv_heads]` multiply the scores, `v_descale` the output. As in the original they count for float8 inputs only.
qv              `softmax(scale (q k^T + qv v^T)) v`: q beside qv and k beside v along the head dimension, which copies both;
                the scale is then `(dim + dim_v) ** -0.5`.
attention_chunk queries see the keys of their own chunk of so many positions; together with causal or a window what both let through.

Wider than the original: gradients of `attention_chunk`, `qv`, LSE; any head dimension; a CPU.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import dispatch
from onchip.core.masks import Chunked, Mask
from onchip.integrations.flash_attn.call import FP8, Call, Descale, Lengths, SameChunk, band, ends, run, score_of, unpacked
from onchip.integrations.flash_attn.kvcache import Cache, Rotary, append, attend, cache_of, tokens_of, turned
from onchip.integrations.flash_attn.kvcache_checks import Asked, check, check_numbers
from onchip.integrations.flash_attn.rotary import sequence_of
from onchip.ops.attention import merge


class Descales(NamedTuple):
    """float32 `[batch, kv_heads]` each, or None for 1."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


def flash_attn_func(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim_v]
    softmax_scale=None,
    causal=False,
    qv=None,  # [batch, len_q, heads, dim_v]
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """`[batch, len_q, heads, dim_v]`; with `return_attn_probs` also LSE float32 `[batch, heads, len_q]`."""
    call = _call(q.shape[1], k.shape[1], softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    return _results(call, q, k, v, qv, Descales(q_descale, k_descale, v_descale), None, return_attn_probs, sm_margin)


def flash_attn_qkvpacked_func(
    qkv: Tensor,  # [batch, len, 3, heads, dim], or [batch, len, heads + 2 kv_heads, dim] with num_heads_q
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """As `flash_attn_func`, all three together."""
    if qkv.ndim == 4 and num_heads_q is None:
        raise ValueError("flash_attn_qkvpacked_func: qkv has 4 dimensions and num_heads_q is None; give the number of query heads")
    heads = num_heads_q if qkv.ndim == 4 else 0
    if qkv.ndim == 4 and (qkv.shape[2] <= heads or (qkv.shape[2] - heads) % 2):
        raise ValueError(f"flash_attn_qkvpacked_func: qkv is {list(qkv.shape)}, num_heads_q {heads}; give [batch, len, num_heads_q + 2 kv_heads, dim]")
    q, k, v = unpacked("flash_attn_qkvpacked_func", qkv, 5, 3) if qkv.ndim != 4 else qkv.split((heads, *[(qkv.shape[2] - heads) // 2] * 2), 2)
    call = _call(q.shape[1], k.shape[1], softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    return _results(call, q, k, v, None, Descales(q_descale, k_descale, v_descale), None, return_attn_probs, sm_margin)


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [tokens_k, kv_heads, dim]
    v: Tensor,  # [tokens_k, kv_heads, dim_v]
    cu_seqlens_q: Tensor,  # [batch + 1] int32
    cu_seqlens_k: Tensor,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,  # [batch] int32
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,  # [tokens, heads, dim_v]
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """`[tokens, heads, dim_v]`; with `return_attn_probs` also LSE float32 `[heads, tokens]`. Tokens past `seqused_q` give 0 and -inf."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    call = _call(*longest, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, longest, (seqused_q, seqused_k))
    return _results(call, q, k, v, qv, Descales(q_descale, k_descale, v_descale), lengths, return_attn_probs, sm_margin)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,  # [batch, len_q, heads, dim], or [tokens, heads, dim] with cu_seqlens_q
    k_cache: Tensor,  # [caches, capacity, kv_heads, dim], or [pages, page, kv_heads, dim] with page_table
    v_cache: Tensor,  # [..., kv_heads, dim_v]
    k=None,  # [batch, new, kv_heads, dim], or [new tokens, kv_heads, dim] with cu_seqlens_k_new
    v=None,
    qv=None,
    rotary_cos=None,  # [positions, rotary_dim / 2]
    rotary_sin=None,
    cache_seqlens: int | Tensor | None = None,  # [batch] int32
    cache_batch_idx: Tensor | None = None,  # [batch] int32
    cache_leftpad: Tensor | None = None,  # [batch] int32
    page_table: Tensor | None = None,  # [caches, most pages] int32
    cu_seqlens_q: Tensor | None = None,  # [batch + 1] int32
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,  # [batch] int32
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """The output laid out as q, or (output, LSE `[batch, heads, len_q]` or `[heads, tokens]`, and twice an empty tensor); no gradients.

    New keys and values are written to the cache in place, from `cache_seqlens` on, the keys rotated from `rotary_seqlens` (None: the
    same) on; then the queries see the cache. Queries are rotated likewise, or without a causal mask, window or chunk all as at the
    first of these positions. A float8 cache is widened whole in each call.
    """
    name, asked = "flash_attn_with_kvcache", Asked(q, k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_q, cu_seqlens_k_new)
    given = Cache(k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, cache_leftpad)
    check(asked, given)
    descales = _of_float8(name, k_cache, Descales(q_descale, k_descale, v_descale), asked.batch, k_cache.shape[2])
    cache = cache_of(given, asked.batch)
    first, new = cache.used, 0 if k is None else k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    cache = cache._replace(used=cache.used if k is None else (first + new).int())
    check_numbers(asked, given, cache)
    if k is not None:
        place = tokens_of(k, cu_seqlens_k_new)
        if rotary_cos is not None:
            free = attention_chunk == 0 and ends(name, window_size, causal) == (None, None)
            rotary = Rotary(rotary_cos, rotary_sin, first if rotary_seqlens is None else rotary_seqlens, rotary_interleaved)
            q, k = turned(q, tokens_of(q, cu_seqlens_q), rotary, stay=free), turned(k, place, rotary)
        append(cache, k, v, place, first)
    len_q = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    call = _call(len_q, cache.capacity, softmax_scale, causal, window_size, attention_chunk, softcap, False)
    q, beside_k, call = _joined(name, call, q, k_cache, v_cache, qv, descales)
    call = _descaled(call, q, k_cache, descales)
    q = q.to(torch.bfloat16) if q.dtype == FP8 else q
    with leaving(sm_margin):
        out, lse = attend(call, q, cache._replace(k=beside_k), return_softmax_lse, cu_seqlens_q, max_seqlen_q)
    out = _rescaled(out, descales, cu_seqlens_q)
    return (out, lse, *(out.new_empty(0, dtype=torch.float32) for _ in range(2))) if return_softmax_lse else out


def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype=None):
    """(output `[batch, len, heads, dim]`, LSE `[batch, len, heads]`) of partial ones over disjoint keys: the same with the parts first."""
    merged, lse = merge(list(zip(out_partial, lse_partial.transpose(-1, -2), strict=True)))
    merged = merged.to(out_dtype or out_partial.dtype)
    return merged if out is None else out.copy_(merged), lse.transpose(-1, -2)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: Tensor, qkv_dtype=torch.bfloat16,
                           headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
                           causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None,
                           sm_margin=0):  # fmt: skip
    """An empty int32 tensor: onchip plans without it."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


# ---- from arguments to a call


def _call(len_q, len_k, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic) -> Call:
    if attention_chunk < 0:
        raise ValueError(f"flash_attn: attention_chunk {attention_chunk} is negative; give the positions of a chunk, or 0 for none")
    mask: Mask = band(*ends("flash_attn", window_size, causal), len_q, len_k)
    if attention_chunk:
        mask = Chunked(attention_chunk) & mask if causal else SameChunk(attention_chunk) & mask
    return Call(mask, softmax_scale, score_of("flash_attn", softcap), deterministic=deterministic)


def leaving(sm_margin: int) -> contextlib.AbstractContextManager:
    """Multiprocessors that an eager call leaves to others; a compiled graph leaves what the setting says."""
    return dispatch.sm_margin(sm_margin) if sm_margin and not torch.compiler.is_compiling() else contextlib.nullcontext()


def _results(call: Call, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, descales: Descales, lengths: Lengths | None, return_lse: bool, sm_margin: int):
    descales = _of_float8("flash_attn", q, descales, len(q) if lengths is None else len(lengths.q) - 1, k.shape[-2])
    q, k, call = _joined("flash_attn", call, q, k, v, qv, descales)
    call = _descaled(call, q, k, descales)
    q, k, v = (t.to(torch.bfloat16) if t.dtype == FP8 else t for t in (q, k, v))
    with leaving(sm_margin):
        out, lse = run(call, q, k, v, lengths, return_lse)
    out = _rescaled(out, descales, None if lengths is None else lengths.q)
    return (out, lse) if return_lse else out


def _joined(name: str, call: Call, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, descales: Descales) -> tuple[Tensor, Tensor, Call]:
    """q beside qv and k beside v."""
    if qv is None:
        return q, k, call
    if any(d is not None for d in descales):
        raise ValueError(f"{name}: qv with descale arguments; widen the inputs to bfloat16 and scale them before the call")
    both = torch.cat((q, qv), -1)
    return both, torch.cat((k, v), -1), call._replace(scale=both.shape[-1] ** -0.5 if call.scale is None else call.scale)


def _of_float8(name: str, x: Tensor, descales: Descales, batch: int, kv_heads: int) -> Descales:
    """The scales where they count: `x` is float8."""
    if x.dtype != FP8:
        return Descales()
    for argument, factors in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if factors is not None and factors.shape != (batch, kv_heads):
            raise ValueError(f"{name}: {argument} is {list(factors.shape)}; give [{batch}, {kv_heads}], one a sequence and head of k")
    return descales


def _descaled(call: Call, q: Tensor, k: Tensor, descales: Descales) -> Call:
    """The scales of queries and keys, as the first thing that happens to a score."""
    given = [d for d in (descales.q, descales.k) if d is not None]
    if not given:
        return call
    factors = given[0] * given[1] if len(given) == 2 else given[0]
    return call._replace(score=(Descale(factors.repeat_interleave(q.shape[-2] // k.shape[-2], 1).contiguous()), *call.score))


def _rescaled(out: Tensor, descales: Descales, cu_seqlens: Tensor | None) -> Tensor:
    """The output by the scale of the values."""
    if descales.v is None:
        return out
    factors = descales.v.repeat_interleave(out.shape[-2] // descales.v.shape[1], 1)[..., None]  # [batch, heads, 1]
    factors = factors[:, None] if cu_seqlens is None else factors[sequence_of(cu_seqlens, len(out))[0]]
    return (out * factors).to(out.dtype)
