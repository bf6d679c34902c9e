"""What `flash_attn_with_kvcache` refuses before it writes anything, each in one sentence that names the caller's argument.

Numbers (lengths, rows, pages) are looked at where they are on a CPU, outside of compiled graphs: to read them from a GPU would wait for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.integrations.flash_attn.kvcache import Cache

NAME = "flash_attn_with_kvcache"


class Asked(NamedTuple):
    """The arguments of a call that are not its cache's.

    table   what this version of flash-attn calls the table of pages.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    table: str = "page_table"

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


def check(asked: Asked, given: Cache) -> None:
    """Shapes, dtypes and devices; `given.used` is as the caller gave it, an integer or None too."""
    _companions(asked, given.used)
    _pools(asked, given)
    for argument, numbers in (("cache_seqlens", given.used), ("cache_batch_idx", given.row), ("cache_leftpad", given.leftpad)):
        if isinstance(numbers, Tensor):
            _int32(argument, numbers, (asked.batch,), "one a sequence of q", asked.q)
    if asked.k is not None:
        _new(asked, given)
    if asked.rotary_cos is not None:
        _rotary(asked, given)


def _companions(asked: Asked, cache_seqlens) -> None:
    """The arguments of an append come together."""
    _, k, v, cos, sin, *_ = asked
    for wanted, given, argument in ((k, v, "v"), (v, k, "k"), (cos, sin, "rotary_sin"), (sin, cos, "rotary_cos")):
        if wanted is not None and given is None:
            raise ValueError(f"{NAME}: {argument} is None and its companion is not; give both or none")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{NAME}: cache_seqlens is None and k is not; give the lengths before the append, where k goes")
    if k is None and cos is not None:
        raise ValueError(f"{NAME}: rotary_cos without k; give k and v too, or rotate q with flash_attn.layers.rotary.apply_rotary_emb")


def _pools(asked: Asked, given: Cache) -> None:
    """q, the pools, and which of their rows or pages are whose."""
    q, batch, k, v = asked.q, asked.batch, given.k, given.v
    packed = asked.cu_seqlens_q is not None
    if q.ndim != 4 - packed:
        way = "[tokens, heads, dim], packed as cu_seqlens_q says" if packed else "[batch, len_q, heads, dim]"
        raise ValueError(f"{NAME}: q is {list(q.shape)}; give {way}")
    if packed:
        _int32("cu_seqlens_q", asked.cu_seqlens_q, (batch + 1,), "where each sequence of q starts and the last ends", q)
    if k.ndim != 4 or k.shape[:3] != v.shape[:3] or v.ndim != 4:
        way = "[caches, capacity, kv_heads, dim]" if given.table is None else f"[pages, page, kv_heads, dim], as {asked.table} asks"
        raise ValueError(f"{NAME}: k_cache is {list(k.shape)}, v_cache {list(v.shape)}; give both as {way}")
    heads, kv_heads = q.shape[-2], k.shape[2]
    if q.shape[-1] != k.shape[-1] or not kv_heads or heads % kv_heads:
        raise ValueError(f"{NAME}: q has {heads} heads of {q.shape[-1]}, k_cache {kv_heads} of {k.shape[-1]}; give heads as wide, and a multiple of k_cache's")
    if given.table is not None:
        rows = batch if given.row is None else given.table.shape[:1].numel()
        if given.table.ndim != 2 or given.table.shape[0] != rows or given.table.dtype != torch.int32 or given.table.device != q.device:
            whose = "a row a sequence of q" if given.row is None else "rows as cache_batch_idx numbers them"
            raise ValueError(f"{NAME}: {asked.table} is {kind_of(given.table)}; give int32 [{rows}, most pages], {whose}, on {q.device}")
    elif given.row is None and k.shape[0] < batch:
        raise ValueError(f"{NAME}: q has {batch} sequences, k_cache {k.shape[0]}; give as many, or cache_batch_idx")


def _int32(argument: str, numbers: Tensor, shape: tuple[int, ...], what: str, q: Tensor) -> None:
    if numbers.dtype != torch.int32 or numbers.shape != shape or numbers.device != q.device:
        raise ValueError(f"{NAME}: {argument} is {kind_of(numbers)}; give int32 {list(shape)}, {what}, on {q.device}")


def _new(asked: Asked, given: Cache) -> None:
    """New keys and values are as many, of the cache's heads."""
    packed = asked.cu_seqlens_k_new is not None
    lead = asked.k.shape[:1] if packed else (asked.batch, *asked.k.shape[1:2])
    wanted = [(*lead, *pool.shape[2:]) for pool in (given.k, given.v)]
    if [tuple(x.shape) for x in (asked.k, asked.v)] != wanted:
        first = "new tokens" if packed else f"{asked.batch}, new"
        one, other = (f"[{first}, {pool.shape[2]}, {pool.shape[3]}]" for pool in (given.k, given.v))
        way = f"both as {one}" if one == other else f"{one} and {other}"
        raise ValueError(f"{NAME}: k is {list(asked.k.shape)}, v {list(asked.v.shape)}; give {way}, with the sequences of q and the heads of the cache")
    if packed:
        _int32("cu_seqlens_k_new", asked.cu_seqlens_k_new, (asked.batch + 1,), "where each sequence of k starts and the last ends", asked.q)


def _rotary(asked: Asked, given: Cache) -> None:
    cos, sin, dim = asked.rotary_cos, asked.rotary_sin, given.k.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > dim:
        words = f"give both as [positions, at most {dim // 2}], half of a head's {dim} columns"
        raise ValueError(f"{NAME}: rotary_cos is {list(cos.shape)}, rotary_sin {list(sin.shape)}; {words}")
    if asked.rotary_seqlens is not None:
        _int32("rotary_seqlens", asked.rotary_seqlens, (asked.batch,), "one a sequence of q", asked.q)


# ---- numbers


def check_numbers(asked: Asked, given: Cache, cache: Cache) -> None:
    """Lengths, rows and pages are inside of the cache, where no wait tells; `cache.used` is what there will be after the append."""
    _lengths(asked, given, cache)
    if cache.leftpad is not None and _readable(cache.leftpad):
        pads, rest = _known(cache.leftpad), _known(cache.used - cache.leftpad)
        if pads is not None and min(pads[0], rest[0]) < 0:
            raise ValueError(f"{NAME}: cache_leftpad is {_span(pads)}, negative or more than a sequence has; give 0 to the length of each, new tokens included")
    rows, caches = None if cache.row is None else _known(cache.row), len(cache.k if cache.table is None else cache.table)
    if rows is not None and not 0 <= rows[0] <= rows[1] < caches:
        of = "k_cache" if cache.table is None else asked.table
        raise ValueError(f"{NAME}: cache_batch_idx is {_span(rows)}; give 0 to {caches - 1}, the rows of {of}")
    if cache.table is not None:
        check_pages(NAME, asked.table, cache, "k_cache")


def check_pages(name: str, table: str, cache: Cache, pool: str = "k") -> None:
    """A table of int32 with a row a sequence; its pages, where no wait tells, are pages of the pool."""
    given, batch = cache.table, len(cache.used)
    if given.dtype != torch.int32 or given.ndim != 2 or (cache.row is None and len(given) != batch):
        raise ValueError(f"{name}: {table} is {kind_of(given)}; give int32 [{batch}, most pages]")
    if _readable(given):
        first = torch.arange(cache.table.shape[1], device="cpu") * cache.k.shape[1]
        pages = _known(cache.pages[first < cache.used[:, None]])  # behind a sequence's last page a table holds anything
        if pages is not None and not 0 <= pages[0] <= pages[1] < len(cache.k):
            raise ValueError(f"{name}: {table} has pages {_span(pages)} among those of a sequence; give 0 to {len(cache.k) - 1}, those of {pool}")


def _lengths(asked: Asked, given: Cache, cache: Cache) -> None:
    """An integer is compared on a GPU too."""
    before = after = _known(given.used)
    if before is None:
        return
    if asked.k is not None and isinstance(given.used, int) and asked.cu_seqlens_k_new is None:
        after = tuple(n + asked.k.shape[1] for n in before)
    elif asked.k is not None:
        after = _known(cache.used) or before
    if before[0] < 0 or max(before[1], after[1]) > cache.capacity:
        made = f", {after[1]} with the new tokens" if after[1] > before[1] else ""
        of = "the tokens of a sequence in k_cache"
        if cache.table is not None:
            of = f"{cache.table.shape[1]} columns of {asked.table} with {cache.k.shape[1]} tokens each"
        raise ValueError(f"{NAME}: cache_seqlens is {_span(before)}{made}; give 0 to {cache.capacity}, {of}")


def _readable(numbers: Tensor) -> bool:
    return type(numbers) is Tensor and numbers.device.type == "cpu" and not torch.compiler.is_compiling()


def _known(numbers) -> tuple[int, int] | None:
    """The least and the greatest, where no wait tells and there are any."""
    if isinstance(numbers, int):
        return numbers, numbers
    if not isinstance(numbers, Tensor) or not _readable(numbers) or not numbers.numel():
        return None
    return tuple(torch.stack(numbers.aminmax()).tolist())


def _span(pair: tuple[int, int]) -> str:
    return f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
