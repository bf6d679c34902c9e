"""FlashAttention-4 (`flash_attn.cute`): what of it is not written in CuTe, by its names, arguments, defaults, shapes and results.

Functions return (out, LSE or None), LSE natural, -inf for a row that sees no key, or with a sink the sink; LSE has a gradient.

window_size     None is no limit and a number counts from the query's own key, so that a negative one starts beyond it: (None, -3) sees the
                keys at least 3 before the query. As in the original a window of which nothing remains, left + right < 0, is no window at
                all: (-1, 0), flash-attn 2's causal mask, is here full attention. That warns.
score_mod, mask_mod, score_mod_bwd, aux_tensors, aux_scalars, block_sparse_tensors, gather_kv_indices   are refused: they are made of, or for,
                CuTe functions. onchip has them as plain Python: `onchip.attention(q, k, v, score=..., mask=...)`.
num_splits, pack_gqa, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata, min_seqlen_k   steer the original's kernels and have no effect.

Wider than the original: any head dimension; gradients of `qv` and of every mask; a CPU.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.kernel import Unsupported
from onchip.integrations.flash_attn.call import Call, Lengths, band, run, score_of
from onchip.integrations.flash_attn.kvcache import Cache, attend, cache_of
from onchip.integrations.flash_attn.kvcache_checks import check_pages
from onchip.ops.attention import merge


def flash_attn_func(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim_v]
    qv: Tensor | None = None,  # [batch, len_q, heads, dim_v]
    gather_kv_indices=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,  # [heads]
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(`[batch, len_q, heads, dim_v]`, LSE float32 `[batch, heads, len_q]`; with qv `[batch, len_q, heads]`)."""
    _refuse("flash_attn_func", gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
            aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
            block_sparse_tensors_bwd=block_sparse_tensors_bwd)  # fmt: skip
    q, k, scale = _joined(q, k, v, qv, softmax_scale)
    call = _call(q.shape[1], k.shape[1], scale, causal, window_size, learnable_sink, softcap, deterministic)
    out, lse = run(call, q, k, v, None, return_lse)
    return out, lse if lse is None or qv is None else lse.transpose(-1, -2)


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, dim], or [batch, len_q, heads, dim] without cu_seqlens_q
    k: Tensor,  # [tokens_k, kv_heads, dim], [batch, len_k, kv_heads, dim] without cu_seqlens_k, or [pages, page, kv_heads, dim] with page_table
    v: Tensor,  # [..., kv_heads, dim_v]
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,  # [batch + 1] int32
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,  # [batch] int32
    seqused_k: Tensor | None = None,
    gather_kv_indices=None,
    page_table: Tensor | None = None,  # [batch, most pages] int32
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse: bool = False,
    scheduler_metadata=None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(output laid out as q, LSE float32 `[heads, tokens]` or `[batch, heads, len_q]`; with qv heads last).

    Without `max_seqlen_q` or `max_seqlen_k` they are read from the offsets, which waits for the device.
    """
    name = "flash_attn_varlen_func"
    _refuse(name, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
            aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)  # fmt: skip
    q, k, scale = _joined(q, k, v, qv, softmax_scale)
    batch = next(len(t) - n for t, n in ((cu_seqlens_q, 1), (seqused_q, 0), (q if q.ndim == 4 else None, 0), (cu_seqlens_k, 1)) if t is not None)
    longest_q = q.shape[1] if cu_seqlens_q is None else None if max_seqlen_q is None else int(max_seqlen_q)
    if page_table is not None:
        if seqused_q is not None or cu_seqlens_k is not None:
            raise Unsupported(f"{name}: seqused_q or cu_seqlens_k with page_table; give the queries' lengths as cu_seqlens_q, the keys' as seqused_k")
        cache = cache_of(Cache(k, v, seqused_k, page_table), batch)
        check_pages(name, "page_table", cache)
        call = _call(longest_q, cache.capacity, scale, causal, window_size, learnable_sink, softcap, deterministic)
        out, lse = attend(call, q, cache, return_lse, cu_seqlens_q, longest_q)
        return out, lse if lse is None or qv is None else lse.transpose(-1, -2)
    offsets_q, offsets_k = (_offsets(x, given) for x, given in ((q, cu_seqlens_q), (k, cu_seqlens_k)))
    longest_k = k.shape[1] if cu_seqlens_k is None else None if max_seqlen_k is None else int(max_seqlen_k)
    longest = tuple(int(o.diff().max()) if n is None else n for o, n in ((offsets_q, longest_q), (offsets_k, longest_k)))
    call = _call(*longest, scale, causal, window_size, learnable_sink, softcap, deterministic)
    tokens = [x.flatten(0, 1) if given is None else x for x, given in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))]
    out, lse = run(call, *tokens, Lengths(offsets_q, offsets_k, longest, (seqused_q, seqused_k)), return_lse)
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, q.shape[:2]), None if lse is None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out, lse if lse is None or qv is None else lse.transpose(-1, -2)


def flash_attn_combine(
    out_partial: Tensor,  # [parts, batch, len, heads, dim] or [parts, tokens, heads, dim]
    lse_partial: Tensor,  # [parts, batch, len, heads] or [parts, tokens, heads]
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(output, LSE) of partial ones over disjoint keys, each shaped as a part.

    All tokens are combined: `cu_seqlens`, `seqused` and `virtual_batch_idx` only say which of them the original may leave out.
    """
    merged, lse = merge(list(zip(out_partial, lse_partial.transpose(-1, -2), strict=True)))
    merged = merged.to(out_dtype or out_partial.dtype)
    return merged if out is None else out.copy_(merged), lse.transpose(-1, -2) if return_lse else None


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What the original's kernels plan with; only `cu_total_m_blocks` is filled, and nothing reads it."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def get_scheduler_metadata(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, causal=False,
                           window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
                           seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None):  # fmt: skip
    """A placeholder: onchip plans without it."""
    lengths = next((t for t in (None if cu_seqlens_q is None else cu_seqlens_q.diff(), seqused_q, seqused_k) if t is not None), None)
    blocks = None if lengths is None else torch.nn.functional.pad(((lengths + 127) // 128).cumsum(0, dtype=torch.int32), (1, 0))
    return SchedulerMetadataTensorsTorch(cu_total_m_blocks=blocks)


# ---- from arguments to a call


def _refuse(name: str, **arguments: Any) -> None:
    given = ", ".join(argument for argument, value in arguments.items() if value is not None and value != [] and value != ())
    if given:
        raise Unsupported(
            f"{name}: {given} is of FlashAttention-4's CuTe interface, which onchip does not read; write the function in plain Python and call "
            "onchip.attention(q, k, v, score=score_mod(s, b, h, i, j), mask=mask_mod(b, h, i, j)), or Blocks(...) and Dense(...) for sparse masks"
        )


def _call(len_q, len_k, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic) -> Call:
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None and right is not None and left + right < 0:
        if left != -1 or not (causal or right == -1):  # else what flash-attn 2's -1 means comes out
            warnings.warn(
                f"flash_attn.cute: window_size {tuple(window_size)} leaves no key, and FlashAttention-4 takes that for no window at all; "
                "no limit is None here, -1 only in flash-attn 2 and 3",
                stacklevel=3,
            )
        left, right = None, 0 if causal else None
    return Call(band(left, right, len_q, len_k), softmax_scale, score_of("flash_attn.cute", softcap), learnable_sink, None, deterministic)


def _joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor, float | None]:
    """q beside qv and k beside v: `q k^T + qv v^T` is one product."""
    if qv is None:
        return q, k, scale
    both = torch.cat((q, qv), -1)
    return both, torch.cat((k, v), -1), both.shape[-1] ** -0.5 if scale is None else scale


def _offsets(x: Tensor, given: Tensor | None) -> Tensor:
    """Given, or those of a dense batch."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1] if given is None else given
