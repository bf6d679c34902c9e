"""Paged caches of FlashInfer: page lists laid end to end become onchip's page table once a plan; caches in either layout are read in place.

`attend` chooses how: over the pages as they lie wherever onchip's kernels read them (any stride, and a page that is no power of two as pages of
one token); over a gathered copy, in q's dtype, where keys have to be changed before they are used: float8 beside wider queries, rotation.
Nothing here waits for the device but `lists_of`, which plans call.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import device as devices
from onchip.core.arguments import check_count
from onchip.core.problem import Attention, Operands
from onchip.core.scores import chain
from onchip.core.trace import readable
from onchip.dispatch import OPS
from onchip.integrations.flash_attn.rotary import sequence_of
from onchip.integrations.flashinfer.call import Way, check_integers, on_host, one_of, turned, widened
from onchip.ops.attend import How, paged_sizes, problem_of
from onchip.ops.attention import PagedKV, attention_packed, paged_attention

PAGE = 1024  # tokens of a page that the kernels take at most
MOST = 4  # copies of a pool that a gathered one may be as large as; a table for CUDA graphs may name far more pages than there are
TABLE = 64 << 20  # bytes of a page table that a CUDA graph may hold


class Pages(NamedTuple):
    """The pages of a batch, on the device.

    table     int32 [batch, most pages]; what is past a sequence's pages is not read.        lengths   int32 [batch]: keys.
    page      tokens of a page.        most   the most keys of a sequence.        last   the greatest page of a sequence, where the host knows it.
    """

    table: Tensor
    lengths: Tensor
    page: int
    most: int
    last: int = -1

    def check(self, count: int) -> None:
        """Raises ValueError for a cache of fewer pages than sequences have."""
        if self.last >= count:
            raise ValueError(f"the plan has page {self.last} among those of a sequence; the cache has 0 to {count - 1}")


class Lists(NamedTuple):
    """FlashInfer's page lists on the host: where each sequence's begins, int32 [batch + 1], and its keys, int32 [batch]."""

    indptr: Tensor
    lengths: Tensor

    def most_pages(self, page: int) -> int:
        """That hold a sequence's keys; a list may have more."""
        return max(-(-int(self.lengths.max()) // page), 1) if len(self.lengths) else 1

    def last_page(self, name: str, indices: Tensor, page: int) -> int:
        """The greatest page of those that hold a sequence's keys, of `indices` on the host. Raises ValueError for one that is no page."""
        counts = -(-self.lengths // page)
        used = [indices[first : first + count] for first, count in zip(self.indptr.tolist(), counts.tolist(), strict=False) if count]
        least, greatest = torch.cat(used).aminmax() if used else (indices.new_zeros(()), indices.new_full((), -1))
        if least < 0:
            raise ValueError(f"{name}: page {int(least)} is among those of a sequence; pages count from 0")
        return int(greatest)


def lists_of(name: str, indptr: Tensor, last_page_len: Tensor | None, page: int, lengths: Tensor | None = None) -> Lists:
    """What `plan` is given, checked, and copied. `lengths`: those of the keys, where they are given instead of the last pages' own."""
    check_count(name, 1, page_size=page)
    indptr = on_host(name, "a page list's indptr", indptr)
    if lengths is not None:
        indptr = indptr[: lengths.numel() + 1]  # longer ones have no meaning
    pages = indptr.diff()
    if not len(indptr) or int(indptr[0]) < 0 or (pages < 0).any():
        raise ValueError(f"{name}: a page list's indptr is {indptr.tolist()}; give [batch + 1], of 0 or more and never falling")
    if lengths is None:
        last = on_host(name, "last_page_len", last_page_len)
        if last.shape != pages.shape:
            raise ValueError(f"{name}: last_page_len is {list(last_page_len.shape)} beside {len(pages)} page lists; give one length a list")
        if ((pages > 0) & ((last < 1) | (last > page))).any():
            raise ValueError(f"{name}: last_page_len is {last.tolist()} of page lists of {pages.tolist()} pages; give 1 to {page} where there is a page")
        lengths = torch.where(pages > 0, (pages - 1) * page + last, 0)
    lengths = on_host(name, "the keys' lengths", lengths).flatten()
    if lengths.shape != pages.shape or (lengths < 0).any() or (lengths > pages * page).any():
        raise ValueError(f"{name}: page lists of {pages.tolist()} pages of {page} tokens for {lengths.tolist()} keys; each list must hold its keys")
    return Lists(indptr, lengths)


class Table:
    """The page table of one wrapper: made anew by each plan, or kept at its address for CUDA graphs."""

    def __init__(self, device: torch.device, fixed: tuple[int, int] | None = None):
        """`fixed`: sequences, and pages of one at most, of a wrapper whose plans keep to the same memory."""
        self.device, self.pages = device, None
        if fixed is not None:
            batch, most = fixed
            most = max(1, min(most, TABLE // (4 * max(1, batch))))
            self.pages = Pages(*(torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((batch, most), (batch,))), 0, 0)
        self.fixed = fixed is not None

    def fill(self, name: str, lists: Lists, indices: Tensor, page: int) -> Pages:
        """The table of a plan; `indices` are the pages of all sequences, end to end."""
        batch, most = len(lists.lengths), lists.most_pages(page)
        check_integers(name, "the list of pages", indices)
        needed = int((lists.indptr[:-1] + -(-lists.lengths // page)).where(lists.lengths > 0, 0).max()) if batch else 0
        if needed > len(indices):
            raise ValueError(f"{name}: {len(indices)} indices of pages for lists that go on to {needed}; give the pages of all sequences, end to end")
        last = lists.last_page(name, indices, page) if readable(indices) else -1
        indices = indices.to(self.device, torch.int32)
        indptr, lengths = (t.to(self.device, non_blocking=True) for t in lists)
        slots = indptr[:-1, None] + torch.arange(most, dtype=torch.int32, device=self.device)
        inside = slots < indptr[1:, None]
        found = indices[slots.clamp(max=max(len(indices) - 1, 0))] if len(indices) else slots
        found = torch.where(inside, found, 0)
        if not self.fixed:
            width = 1 << (most - 1).bit_length()  # few widths, few Problems
            self.pages = Pages(F.pad(found, (0, width - most)), lengths, page, int(lists.lengths.max()) if batch else 0, last)
            return self.pages
        table, kept, *_ = self.pages
        if batch != len(table):
            raise ValueError(f"{name}: {batch} sequences in a wrapper for CUDA graphs of {len(table)}; the batch size cannot change")
        if most > table.shape[1]:
            limit = f"give a larger indices buffer, up to the {TABLE >> 20} MiB that a table may take, or larger pages"
            raise ValueError(f"{name}: a sequence of {most} pages in a wrapper for CUDA graphs of {batch} sequences of at most {table.shape[1]}; {limit}")
        table[:, :most].copy_(found)
        kept.copy_(lengths)
        self.pages = Pages(table, kept, page, table.shape[1] * page, last)
        return self.pages


def unpacked(name: str, cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values `[pages, page, kv_heads, dim]` of one tensor `[pages, 2, ...]` or a pair, in place. A single head may be left out."""
    one_of(name, "kv_layout", layout, ("NHD", "HND"))
    if isinstance(cache, Tensor):
        if cache.ndim not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(f"{name}: paged_kv_cache is {list(cache.shape)}; give [pages, 2, page, kv_heads, dim], or [pages, 2, kv_heads, page, dim] for HND")
        cache = cache.unbind(1)
    if not isinstance(cache, (tuple, list)) or len(cache) != 2 or any(not isinstance(t, Tensor) or t.ndim not in (3, 4) for t in cache):
        raise ValueError(f"{name}: paged_kv_cache is neither a tensor [pages, 2, ...] nor a pair of [pages, page, kv_heads, dim]; give one of these")
    heads = 1 if layout == "HND" else 2
    k, v = (t.unsqueeze(heads) if t.ndim == 3 else t for t in cache)
    return (k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


class Queries(NamedTuple):
    """Packed queries `[tokens, heads, dim]`: those of each sequence from `offsets` int32 [batch + 1] on, at most `longest`, or exactly `even` of each."""

    q: Tensor
    offsets: Tensor
    longest: int
    even: int | None = None


def attend(queries: Queries, k: Tensor, v: Tensor, pages: Pages, way: Way, dtype: torch.dtype, **keywords) -> Any:
    """Attention over k and v `[pages, page, kv_heads, dim]`, computed in `dtype`; returns as `paged_attention` and `attention_packed` do."""
    if k.shape[1] != pages.page:
        raise ValueError(f"paged_kv_cache has pages of {k.shape[1]} tokens and plan() was told page_size {pages.page}; give plan() the cache's own")
    pages.check(len(k))
    q = widened(queries.q, dtype)
    if not way.rotates and pages.table.numel() >= len(k):  # all pages are no more than those that the table may name
        k, v = widened(k, dtype), widened(v, dtype)
    if way.rotates or k.dtype != dtype or v.dtype != dtype:
        return _gathered(queries._replace(q=q), k, v, pages, way, **keywords)
    k, v, table = _readable(k, v, pages)
    cache, packed = PagedKV(k, v, table, pages.lengths), {"q_offsets": queries.offsets, "longest": queries.longest}
    if queries.even:
        q, packed = q.unflatten(0, (len(pages.lengths), queries.even)), {}
    if q.is_cuda and table.numel() <= MOST * len(k) and not _has_kernel(_problem(q, cache, packed, keywords), q.device):
        return _gathered(queries._replace(q=widened(queries.q, dtype)), k, v, pages._replace(table=table, page=k.shape[1]), way, **keywords)
    return paged_attention(q, cache, **packed, **keywords)


def _problem(q: Tensor, cache: PagedKV, packed: dict[str, Any], keywords: dict[str, Any]) -> Attention:
    """The Problem of that call of `paged_attention`."""
    how = How(keywords["mask"], chain(None, keywords["score"], None), keywords["sinks"], None, False, False, "auto")
    sizes = paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1], (len(cache.lengths), packed["longest"]) if packed else None)
    return problem_of("decode", how, sizes, Operands(keywords["scale"], packed.get("q_offsets")), q)[0]


@functools.lru_cache(maxsize=4096)
def _has_kernel(problem: Attention, device: torch.device) -> bool:
    """Whether anything but plain torch takes it there."""
    return any(not kernel.portable and not kernel.leaves(problem, devices.of(device)) for kernel in OPS["decode"].kernels)


def _readable(k: Tensor, v: Tensor, pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and a table as the kernels read them: pages of a power of two of tokens, at most 1,024; others are pages of one token each."""
    page = pages.page
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    if page & (page - 1) == 0 and page <= PAGE:
        return k, v, pages.table
    steps = [t.stride(0) // t.stride(1) if t.stride(0) % t.stride(1) == 0 else None for t in (k, v)]
    if steps[0] is None or steps[0] != steps[1]:
        k, v, steps = k.contiguous(), v.contiguous(), [page, page]
    k, v = (t.as_strided(((len(t) - 1) * steps[0] + page if len(t) else 0, 1, *t.shape[2:]), (t.stride(1), t.stride(1), *t.stride()[2:])) for t in (k, v))
    slots = torch.arange(page, dtype=torch.int32, device=k.device)
    return k, v, (pages.table[:, :, None] * steps[0] + slots).flatten(1)


def _gathered(queries: Queries, k: Tensor, v: Tensor, pages: Pages, way: Way, **keywords) -> Any:
    """Over a copy of the pages that the table names, rotated where asked; the queries are each sequence's last ones."""
    q, table = queries.q, pages.table
    batch, width = table.shape[0], table.shape[1] * pages.page
    k, v = (taken(t, table).flatten(0, 2).to(q.dtype) for t in (k, v))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * width
    if way.rotates:
        k = turned(k, torch.arange(width, device=q.device).repeat(batch), way)
        sequence, index = sequence_of(queries.offsets, len(q))
        first = pages.lengths - queries.offsets.diff()
        q = turned(q, first[sequence] + index, way)
    longest = (queries.longest, min(width, pages.most) if pages.most else width)
    return attention_packed(q, k, v, queries.offsets, starts, longest=longest, used=(None, pages.lengths), **keywords)


def taken(pool: Tensor, table: Tensor) -> Tensor:
    """The pages that a table names, `[batch, most pages, page, kv_heads, dim]`; an entry past the pool, which no length reaches, is any page."""
    pool = pool if len(pool) else pool.new_zeros(1, *pool.shape[1:])
    index = table.long().clamp(0, len(pool) - 1)
    return pool.view(torch.uint8)[index].view(pool.dtype) if pool.dtype.itemsize == 1 else pool[index]
