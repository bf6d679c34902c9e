"""FlashMLA's `get_mla_metadata` and `flash_mla_with_kvcache`: latent attention over a paged cache, all of it or keys picked for each query.

Its LSE is natural, float32 [batch, heads, len_q], and +inf for a query that sees no key. `attn_sink` takes from the output alone.
Picked keys are copied side by side, in bfloat16, and all heads of a query share them as rows of one product.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.bands import Causal, Full
from onchip.core.masks import KeyPadding
from onchip.integrations.flashinfer.call import Call, Result, Way, finished
from onchip.integrations.flashinfer.pages import Pages, Queries, attend
from onchip.ops.attention import attention


class FlashMLASchedMeta:
    """What FlashMLA fills in the first call; onchip plans nothing ahead."""


class Picked(NamedTuple):
    """A cache `[pages, page, 1, ...]`, the tokens of it that each query sees, int32 [batch, len_q, most], and how many of these count, [batch]; -1: no key."""

    cache: Tensor
    indices: Tensor
    length: Tensor | None


class Latent(NamedTuple):
    """How a cache in float8 lies: columns of the latent part, those that share a scale, and bytes of a page that stand for a token."""

    nope: int
    group: int
    bytes: int


V32, MODEL1 = Latent(512, 128, 656), Latent(448, 64, 584)  # DeepSeek-V3.2: scales float32 beside each token; the other: e8m0, at the end of a page


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A pair for `flash_mla_with_kvcache`; arguments, which older versions took, are not looked at."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,  # [batch, len_q, heads, dim]
    k_cache: Tensor,  # [pages, page, kv_heads, dim], or bytes of a token with is_fp8_kvcache
    block_table: Tensor | None,  # [batch, most pages] int32
    cache_seqlens: Tensor | None,  # [batch] int32
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | None = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,  # [batch, len_q, most] int32: page times page size plus slot; -1: no key
    attn_sink: Tensor | None = None,  # [heads] float32
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,  # [batch] int32
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output `[batch, len_q, heads, head_dim_v]`, LSE): values are the first columns of keys. Causal is aligned to the bottom right."""
    name = "flash_mla_with_kvcache"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if indices is None:
        with_indices = {"attn_sink": attn_sink, "extra_k_cache": extra_k_cache, "topk_length": topk_length, "extra_topk_length": extra_topk_length}
        given = [argument for argument, value in with_indices.items() if value is not None]
        if given or is_fp8_kvcache:
            raise ValueError(f"{name}: {', '.join(given) or 'is_fp8_kvcache'} without indices; give indices, or leave it out")
        if block_table is None or cache_seqlens is None:
            raise ValueError(f"{name}: block_table and cache_seqlens are needed where indices is None; give both, or indices")
        out, lse = _paged(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
    else:
        if causal:
            raise ValueError(f"{name}: causal with indices; the keys of each query are picked, so give causal=False")
        if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
            raise ValueError(f"{name}: extra_k_cache and extra_indices_in_kvcache go together; give both or none")
        scopes = [Picked(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            scopes.append(Picked(extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        out, lse = _picked(q, scopes, head_dim_v, scale, is_fp8_kvcache)
        if attn_sink is not None:
            share = torch.sigmoid(lse - attn_sink.float()[None, :, None]).where(lse > -math.inf, 0.0)
            out = (out * share.transpose(1, 2)[..., None]).to(q.dtype)
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def _paged(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, dim_v: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Over all keys of each sequence; LSE `[batch, heads, len_q]`."""
    batch, len_q = q.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * len_q
    pages = Pages(table.int(), lengths.int(), cache.shape[1], table.shape[1] * cache.shape[1])
    queries, way = Queries(q.flatten(0, 1), offsets, len_q, len_q), Way(causal)
    call = Call(Causal() if causal and len_q > 1 else Full(), scale)
    run = lambda **keywords: attend(queries, cache, cache[..., :dim_v], pages, way, q.dtype, **keywords)  # noqa: E731
    out, lse = finished(call, Result(q.dtype, True, base_e=True), run)
    return out.unflatten(0, (batch, len_q)), lse.unflatten(0, (batch, len_q)).transpose(1, 2)


def _picked(q: Tensor, scopes: list[Picked], dim_v: int, scale: float, quantised: bool) -> tuple[Tensor, Tensor]:
    """Over the keys picked for each query; LSE `[batch, heads, len_q]`."""
    batch, len_q, heads, dim = q.shape
    keys, valid = [], []
    for cache, indices, length in scopes:
        if cache.shape[2] != 1:
            raise ValueError(f"flash_mla_with_kvcache: k_cache has {cache.shape[2]} heads beside indices; give one, all heads of a query share its keys")
        seen = indices >= 0
        if length is not None:
            seen &= torch.arange(indices.shape[-1], device=q.device) < length.view(-1, 1, 1)
        rows = indices.clamp(min=0).long().flatten(0, 1)
        keys.append(_tokens(cache, rows, dim) if quantised else cache[rows // cache.shape[1], rows % cache.shape[1], 0])
        valid.append(seen.flatten(0, 1))
    k, seen = torch.cat(keys, 1).to(q.dtype)[:, :, None], torch.cat(valid, 1)
    rows = q.reshape(batch * len_q, heads, 1, dim)  # heads as queries: one product for all of them
    out, lse = attention(rows, k, k[..., :dim_v], mask=KeyPadding(seen), scale=scale, return_lse=True)
    return out.view(batch, len_q, heads, dim_v), lse.view(batch, len_q, heads).transpose(1, 2)


def _tokens(cache: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Tokens `[queries, most]` of a cache in float8 as `[queries, most, dim]` in bfloat16."""
    page = cache.shape[1]
    known = {512 + 64: V32, 448 + 64: MODEL1}
    layout = known.get(dim)
    if layout is None or cache.shape[-1] != layout.bytes or cache.element_size() != 1:
        raise ValueError(
            f"flash_mla_with_kvcache: is_fp8_kvcache with tokens of {cache.dtype} [{cache.shape[-1]}] for q of {dim}; give 656 bytes for 576, 584 for 512"
        )
    start = cache.view(torch.uint8).as_strided((len(cache), page * layout.bytes), (cache.stride(0), 1))  # a page's own bytes
    index, slot = rows // page, rows % page
    take = lambda offset, count: start[index[..., None], offset[..., None] + torch.arange(count, device=rows.device)]  # noqa: E731
    groups = layout.nope // layout.group
    if layout is V32:
        first = slot * layout.bytes
        scales, rope = take(first + 512, 16).view(torch.float32), take(first + 528, 128)
    else:
        first = slot * (448 + 128)
        scales, rope = take(page * (448 + 128) + slot * 8, 7).view(torch.float8_e8m0fnu).float(), take(first + 448, 128)
    nope = take(first, layout.nope).view(torch.float8_e4m3fn).float().unflatten(-1, (groups, layout.group)) * scales[..., None]
    return torch.cat((nope.flatten(-2).to(torch.bfloat16), rope.view(torch.bfloat16)), -1)
