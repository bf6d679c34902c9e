"""flash-attn 2 (`flash_attn.flash_attn_interface`): its functions by their names, arguments, defaults, shapes and results.

Window ends are -1 for no limit, causal masks align to the bottom right, a row that sees no key gives 0 and LSE +inf. Wider than
the original: any head dimension and float dtype, softcap together with dropout, padding with pages, pages of any size, gradients
of LSE and through pages, a CPU. `num_splits` is a hint that nothing needs; onchip's kernels cut the keys by themselves.
"""

import torch
from torch import Tensor

from onchip.core.problem import Dropout
from onchip.integrations.flash_attn.call import Call, Lengths, band, ends, run, score_of, unpacked
from onchip.integrations.flash_attn.dropped import seeded, signed_weights
from onchip.integrations.flash_attn.kvcache import Cache, Rotary, append, attend, cache_of, tokens_of, turned
from onchip.integrations.flash_attn.kvcache_checks import Asked, check, check_numbers, check_pages

USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal) -> int:
    """Keys a block of S_dmask: all of them; see `dropped.signed_weights`."""
    return 1 << 30


def flash_attn_func(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,  # [heads] or [batch, heads] float32
    deterministic=False,
    return_attn_probs=False,
):
    """`[batch, len_q, heads, dim]`; with `return_attn_probs` also LSE float32 `[batch, heads, len_q]` and S_dmask (empty without dropout)."""
    call = _call(q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _results(call, q, k, v, None, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p=0.0, softmax_scale=None, causal=False,
                             window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """As `flash_attn_func`, keys and values together: `[batch, len_k, 2, kv_heads, dim]`."""
    k, v = unpacked("flash_attn_kvpacked_func", kv, 5, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p=0.0, softmax_scale=None, causal=False,
                              window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """As `flash_attn_func`, all three together: `[batch, len, 3, heads, dim]`."""
    q, k, v = unpacked("flash_attn_qkvpacked_func", qkv, 5, 3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [tokens_k, kv_heads, dim], or [pages, page, kv_heads, dim] with block_table
    v: Tensor,
    cu_seqlens_q: Tensor,  # [batch + 1] int32
    cu_seqlens_k: Tensor,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,  # [batch, most pages] int32
):
    """`[tokens, heads, dim]`; with `return_attn_probs` also LSE float32 `[heads, tokens]` and S_dmask (empty without dropout)."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    call = _call(*longest, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if call.dropout and return_attn_probs and torch.compiler.is_compiling():
        words = "return_attn_probs with dropout_p in a compiled graph; the lengths of packed sequences, which S_dmask goes by, are not known there"
        raise ValueError(f"flash_attn_varlen_func: {words}; leave one of the two out, or call it outside of torch.compile")
    if block_table is None:
        return _results(call, q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, longest), return_attn_probs)
    if call.dropout and return_attn_probs:
        raise ValueError("flash_attn_varlen_func: return_attn_probs with dropout_p and block_table; S_dmask is of packed keys only, leave one of the three out")
    cache = Cache(k, v, cu_seqlens_k.diff(), block_table)
    check_pages("flash_attn_varlen_func", "block_table", cache)
    pages = -(-longest[1] // k.shape[1])
    out, lse = attend(call, q, cache._replace(table=block_table[:, :pages]), return_attn_probs, cu_seqlens_q, longest[0])
    return (out, _lse(lse), q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                                    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                    return_attn_probs=False):  # fmt: skip
    """As `flash_attn_varlen_func`, keys and values together: `[tokens_k, 2, kv_heads, dim]`."""
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, *unpacked("flash_attn_varlen_kvpacked_func", kv, 4, 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *tail)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """As `flash_attn_varlen_func`, all three together: `[tokens, 3, heads, dim]`."""
    tail = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(*unpacked("flash_attn_varlen_qkvpacked_func", qkv, 4, 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *tail)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,  # [batch, len_q, heads, dim]
    k_cache: Tensor,  # [caches, capacity, kv_heads, dim], or [pages, page, kv_heads, dim] with block_table
    v_cache: Tensor,
    k=None,  # [batch, new, kv_heads, dim]
    v=None,
    rotary_cos=None,  # [positions, rotary_dim / 2]
    rotary_sin=None,
    cache_seqlens: int | Tensor | None = None,  # [batch] int32
    cache_batch_idx: Tensor | None = None,  # [batch] int32
    cache_leftpad: Tensor | None = None,  # [batch] int32
    block_table: Tensor | None = None,  # [batch, most pages] int32
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """`[batch, len_q, heads, dim]`, or (out, LSE float32 `[batch, heads, len_q]`); no gradients.

    New keys and values are written to the cache in place, from `cache_seqlens` on, the keys rotated; then the queries see the cache.
    Queries are rotated from `cache_seqlens` on, or without a causal mask or window all as at `cache_seqlens`. With `block_table` lengths
    are compared with its width, as flash-attn does, which waits for the device (not in compiled graphs, nor while a CUDA graph is captured).
    """
    name, new = "flash_attn_with_kvcache", 0 if k is None else k.shape[1]
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(f"{name}: cache_batch_idx with block_table; give the rows as block_table[cache_batch_idx]")
    asked = Asked(q, k, v, rotary_cos, rotary_sin, table="block_table")
    given = Cache(k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
    check(asked, given)
    cache = cache_of(given, asked.batch)
    first, cache = cache.used, cache._replace(used=cache.used + new if new else cache.used)
    if block_table is not None and cache_seqlens is not None:
        _fits(cache, new)
    check_numbers(asked, given, cache)
    if k is not None:
        place = tokens_of(k, None)
        if rotary_cos is not None:
            left, right = ends(name, window_size, causal)
            rotary = Rotary(rotary_cos, rotary_sin, first, rotary_interleaved)
            q, k = turned(q, tokens_of(q, None), rotary, stay=left is right is None), turned(k, place, rotary)
        append(cache, k, v, place, first)
    call = _call(q.shape[1], cache.capacity, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    out, lse = attend(call, q, cache, return_softmax_lse)
    return (out, _lse(lse)) if return_softmax_lse else out


def _fits(cache: Cache, new: int) -> None:
    if torch.compiler.is_compiling() or (cache.used.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    longest = int(cache.used.max())
    if longest > cache.capacity:  # a RuntimeError, as flash-attn's
        raise RuntimeError(
            f"flash_attn_with_kvcache: a sequence has {longest} keys, {new} new ones included; block_table has {cache.table.shape[1]} columns "
            f"of {cache.k.shape[1]} tokens, {cache.capacity} in all; give block_table more columns"
        )


# ---- from arguments to a call


def _call(len_q, len_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic) -> Call:
    mask = band(*ends("flash_attn", window_size, causal), len_q, len_k)
    dropout = Dropout(dropout_p) if dropout_p else None
    return Call(mask, softmax_scale, score_of("flash_attn", softcap, alibi_slopes), None, dropout, deterministic)


def _results(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, return_attn_probs: bool):
    call = seeded(call, q.device) if return_attn_probs else call
    out, lse = run(call, q, k, v, lengths, return_attn_probs)
    if not return_attn_probs:
        return out
    return out, _lse(lse), signed_weights(call, q, k, lengths) if call.dropout else q.new_empty(0)


def _lse(lse: Tensor) -> Tensor:
    """flash-attn 2 has +inf for a row that sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
