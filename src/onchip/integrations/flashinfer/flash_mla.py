"""FlashMLA's `get_mla_metadata` and `flash_mla_with_kvcache`: latent attention over a paged cache, all of it or keys picked for each query.

Its LSE is natural, float32 [batch, heads, len_q], and +inf for a query that sees no key. `attn_sink` takes from the output alone.
Picked keys are copied side by side, in bfloat16, and all heads of a query share them as rows of one product.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.bands import Causal, Full
from onchip.core.masks import KeyPadding
from onchip.core.trace import readable
from onchip.integrations.flashinfer.call import Call, Result, Way, check_shape, finished
from onchip.integrations.flashinfer.pages import Pages, Queries, attend
from onchip.ops.attention import attention

NAME = "flash_mla_with_kvcache"
INTEGERS = (torch.int32, torch.int64)


class FlashMLASchedMeta:
    """What FlashMLA fills in the first call; onchip plans nothing ahead."""


class Picked(NamedTuple):
    """A cache `[pages, page, 1, ...]`, the tokens of it that each query sees, int32 [batch, len_q, most], and how many of these count, [batch]; -1: no key.

    extra   how the names of its arguments begin.
    """

    cache: Tensor
    indices: Tensor
    length: Tensor | None
    extra: str = ""

    def check(self, q: Tensor) -> None:
        """Whether they go together with q; what indices name is looked at on a CPU alone."""
        batch, len_q = q.shape[:2]
        check_shape(NAME, f"{self.extra}k_cache", self.cache, "[pages, page, 1, dim]")
        pages, page, heads, dim = self.cache.shape
        if heads != 1 or not pages * page:
            given = f"{self.extra}k_cache is {list(self.cache.shape)} beside indices"
            raise ValueError(f"{NAME}: {given}; give one page or more of one head: all heads of a query share its keys")
        if self.cache.dtype.itemsize > 1 and dim != q.shape[-1]:
            raise ValueError(f"{NAME}: {self.extra}k_cache has tokens of {dim} columns, q of {q.shape[-1]}; give both the same")
        _sized(f"{self.extra}indices{'_in_kvcache' if self.extra else ''}", self.indices, (batch, len_q, "most"), q)
        if self.length is not None:
            _sized(f"{self.extra}topk_length", self.length, (batch,), q)
        if readable(self.indices) and (beyond := self.indices[self.seen & (self.indices >= pages * page)]).numel():
            given = f"{self.extra}indices name token {int(beyond[0])} of {pages} pages of {page}"
            raise ValueError(f"{NAME}: {given}; give 0 to {pages * page - 1}, or -1: no key")

    @property
    def seen(self) -> Tensor:
        """Which indices are keys, bool [batch, len_q, most]."""
        seen = self.indices >= 0
        return seen if self.length is None else seen & (torch.arange(self.indices.shape[-1], device=seen.device) < self.length[:, None, None])


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
    num_splits: Tensor | None = None,
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
    """(output `[batch, len_q, heads, head_dim_v]`, LSE): values are the first columns of keys. Causal is aligned to the bottom right.

    tile_scheduler_metadata, num_splits   what `get_mla_metadata` gives, or older versions' tensors; they change nothing.
    Raises ValueError for arguments that do not go together.
    """
    check_shape(NAME, "q", q, "[batch, len_q, heads, dim]")
    batch, _, heads, dim = q.shape
    if not 0 < head_dim_v <= dim:
        raise ValueError(f"{NAME}: head_dim_v is {head_dim_v} for q of {dim}; values are the first columns of keys, give 1 to {dim} of them")
    if tile_scheduler_metadata is not None and not isinstance(tile_scheduler_metadata, (FlashMLASchedMeta, Tensor)):
        raise ValueError(f"{NAME}: tile_scheduler_metadata is {kind_of(tile_scheduler_metadata)}; give what get_mla_metadata returns first, or None")
    if num_splits is not None:
        _sized("num_splits", num_splits, (batch + 1,), q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if indices is None:
        with_indices = {"attn_sink": attn_sink, "extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache}
        with_indices |= {"topk_length": topk_length, "extra_topk_length": extra_topk_length}
        given = [argument for argument, value in with_indices.items() if value is not None]
        if given or is_fp8_kvcache:
            raise ValueError(f"{NAME}: {', '.join(given) or 'is_fp8_kvcache'} without indices; give indices, or leave it out")
        if block_table is None or cache_seqlens is None:
            raise ValueError(f"{NAME}: block_table and cache_seqlens are needed where indices is None; give both, or indices")
        check_shape(NAME, "k_cache", k_cache, "[pages, page, kv_heads, dim]")
        _sized("block_table", block_table, (batch, "most pages"), q)
        _sized("cache_seqlens", cache_seqlens, (batch,), q)
        out, lse = _paged(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
    else:
        if causal:
            raise ValueError(f"{NAME}: causal with indices; the keys of each query are picked, so give causal=False")
        if (extra_k_cache is None) != (extra_indices_in_kvcache is None) or (extra_k_cache is None and extra_topk_length is not None):
            raise ValueError(f"{NAME}: extra_k_cache and extra_indices_in_kvcache go together, extra_topk_length with both; give both or none of them")
        if attn_sink is not None:
            _sized("attn_sink", attn_sink, (heads,), q, whole=False)
        scopes = [Picked(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            scopes.append(Picked(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, "extra_"))
        for scope in scopes:
            scope.check(q)
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
    for scope in scopes:
        cache, seen = scope.cache, scope.seen
        rows = torch.where(seen, scope.indices, 0).long().flatten(0, 1)
        keys.append(_tokens(cache, rows, dim) if quantised else cache[rows // cache.shape[1], rows % cache.shape[1], 0])
        valid.append(seen.flatten(0, 1))
    k, seen = torch.cat(keys, 1).to(q.dtype)[:, :, None], torch.cat(valid, 1)
    rows = q.reshape(batch * len_q, heads, 1, dim)  # heads as queries: one product for all of them
    out, lse = attention(rows, k, k[..., :dim_v], mask=KeyPadding(seen), scale=scale, return_lse=True)
    return out.view(batch, len_q, heads, dim_v), lse.view(batch, len_q, heads).transpose(1, 2)


def _sized(argument: str, given: Tensor, sizes: tuple[int | str, ...], q: Tensor, whole: bool = True) -> None:
    """Whether a tensor beside q, of whole numbers or of floats, has these sizes; a text stands for any."""
    fits = isinstance(given, Tensor) and given.ndim == len(sizes) and all(isinstance(n, str) or n == m for n, m in zip(sizes, given.shape, strict=True))
    if not fits or given.device != q.device or not (given.dtype in INTEGERS if whole else given.is_floating_point()):
        wanted = f"{'int32' if whole else 'float32'} [{', '.join(map(str, sizes))}] on {q.device}"
        raise ValueError(f"{NAME}: {argument} is {kind_of(given)}; give {wanted}")


def _tokens(cache: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Tokens `[queries, most]` of a cache in float8 as `[queries, most, dim]` in bfloat16."""
    page = cache.shape[1]
    known = {512 + 64: V32, 448 + 64: MODEL1}
    layout = known.get(dim)
    if layout is None or cache.shape[-1] != layout.bytes or cache.element_size() != 1:
        raise ValueError(f"{NAME}: is_fp8_kvcache with tokens of {cache.dtype} [{cache.shape[-1]}] for q of {dim}; give 656 bytes for 576, 584 for 512")
    if cache.stride(-1) != 1 or (page > 1 and cache.stride(1) != layout.bytes):
        raise ValueError(f"{NAME}: is_fp8_kvcache with strides {cache.stride()}; give pages whose {layout.bytes} bytes a token lie end to end")
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
