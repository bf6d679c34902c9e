"""Decoding over chosen keys of a paged cache: tokens, or pages for each key head; and Quest's bounds, by which pages are chosen.

A choice of tokens is a page table of pages of one token, a choice of pages a table of those pages: the kernels are those of `paged_attention`, and read
nothing else. All of it is worked out on the device: a CUDA graph may capture it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_count, kind_of
from onchip.core.formats import Codes
from onchip.core.masks import Full
from onchip.core.once import ends
from onchip.core.problem import Rows
from onchip.dispatch import select
from onchip.ops.attend import PagedKV, first_columns
from onchip.ops.attention import paged_attention
from onchip.ops.checks import check_named, check_pages, check_shapes

ROWS = 64  # heads of a latent that `triton_decode`, which takes pages of one token, has at most
PAGE = 64  # tokens of a page of copied keys


class _Choice(NamedTuple):
    """Numbers of pages and of slots in them, [batch, (kv_heads,) top] int32, and how many keys [batch, (kv_heads)] int32 these are, from the first on."""

    at: Tensor
    slot: Tensor
    count: Tensor


def attend_tokens(
    q: Tensor,  # [batch, 1, heads, dim]
    cache: PagedKV,
    tokens: Tensor,  # int32 [batch, top] or [batch, kv_heads, top]
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` of one query a sequence over the tokens chosen for it, or for each of its key heads (DeepSeek sparse attention, DeepSeek-V3.2, 2025).

    tokens   places in the sequence, in any order, each at most once; what is below 0 or past the end is none. A sequence without any gets 0 and LSE -inf.
    Of several queries with a choice each, fold them into the batch: `q.flatten(0, 1).unsqueeze(1)` over a table and lengths that repeat.
    Raises ValueError where the choice does not fit, or k and v lie in memory in different orders.
    """
    cache = _checked("attend_tokens", q, cache, tokens)
    page, length = cache.k.shape[1], cache.lengths.view(-1, *[1] * (tokens.ndim - 1))
    tokens, count = _packed(tokens, (tokens < 0) | (tokens >= length))
    if cache.k.shape[2] == 1 and q.shape[2] > ROWS and first_columns(cache.k, cache.v):
        cache, at = _copied(cache, tokens.flatten(1), count.flatten())
        return _attend(q, cache, PAGE, at, scale, return_lse, kernel)
    return _attend(q, cache, 1, _Choice(tokens // page, tokens % page, count), scale, return_lse, kernel)


def _copied(cache: PagedKV, tokens: Tensor, count: Tensor) -> tuple[PagedKV, _Choice]:
    """The chosen tokens of a latent cache side by side, in pages of their own, and the choice of all of these.

    Of so many heads attention is bound by products, and the kernel for them takes pages of 8 tokens and more: a copy costs two bytes moved for one read.
    """
    page, batch = cache.k.shape[1], tokens.shape[0]
    slots = cache.page_table.gather(1, (tokens // page).long()).long() * page + tokens % page
    slots = torch.where(torch.arange(tokens.shape[1], device=tokens.device) < count[:, None], slots, 0)
    slots = torch.nn.functional.pad(slots, (0, -tokens.shape[1] % PAGE))
    k = cache.k[slots // page, slots % page].view(-1, PAGE, 1, cache.k.shape[-1])
    table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device).view(batch, slots.shape[1] // PAGE)
    at = torch.arange(table.shape[1], dtype=torch.int32, device=k.device).expand(batch, -1)
    return PagedKV(k, k[..., : cache.v.shape[-1]], table, count), _Choice(at, at * 0, count)


def attend_pages(
    q: Tensor,  # [batch, 1, heads, dim]
    cache: PagedKV,
    pages: Tensor,  # int32 [batch, top] or [batch, kv_heads, top]
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` of one query a sequence over the pages chosen for it, or for each of its key heads: the selected branch of native sparse attention
    (NSA, Yuan et al., 2025), and Quest (Tang et al., 2024).

    pages    numbers of pages in the sequence, in any order, each at most once: page p holds its tokens from p times the cache's page on. What is
             below 0 or past the end is none; of the last page the tokens that are there count.
    All else as for `attend_tokens`.
    """
    cache = _checked("attend_pages", q, cache, pages)
    page, length = cache.k.shape[1], cache.lengths.view(-1, *[1] * (pages.ndim - 1))
    first = pages.long() * page
    none = (pages < 0) | (first >= length)
    partly = ~none & (first + page > length)  # comes last, so that the others' tokens lie end to end
    missing = (partly * (first + page - length)).sum(-1)
    pages, count = _packed(pages, none, partly)
    return _attend(q, cache, page, _Choice(pages, pages * 0, (count * page - missing).to(torch.int32)), scale, return_lse, kernel)


def _checked(name: str, q: Tensor, cache: PagedKV, chosen: Tensor) -> PagedKV:
    """The cache, of which no sequence's row of the table is empty."""
    if not (isinstance(cache, PagedKV) and isinstance(cache.k, Tensor) and isinstance(cache.v, Tensor)):
        given = f"holds {type(cache.k).__name__}" if isinstance(cache, PagedKV) else f"is a {type(cache).__name__}"
        raise TypeError(f"{name}: the cache {given}; give PagedKV(k, v, page_table, lengths) of tensors")
    if not isinstance(q, Tensor) or q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"{name}: q is {kind_of(q)}; give one query a sequence, [batch, 1, heads, dim], and fold more into the batch")
    check_shapes(name, q, cache.k, cache.v, rank=4)
    batch, kv_heads = q.shape[0], cache.k.shape[2]
    check_pages(name, q, cache, batch)
    fits = isinstance(chosen, Tensor) and chosen.shape[:-1] in ((batch,), (batch, kv_heads)) and chosen.shape[-1] > 0
    if not fits or chosen.dtype != torch.int32 or chosen.device != q.device:
        raise ValueError(f"{name}: the choice is {kind_of(chosen)}; give int32 [{batch}, top] or [{batch}, {kv_heads}, top] on {q.device}, top at least 1")
    return cache if cache.page_table.shape[1] else cache._replace(page_table=cache.page_table.new_zeros(batch, 1))


def _packed(chosen: Tensor, none: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The choice with what is none at its end, as 0, and `last` before that; and how many there are."""
    order = none.to(torch.int8) * 2 if last is None else none.to(torch.int8) * 2 + last
    return torch.where(none, 0, chosen).gather(-1, order.argsort(dim=-1, stable=True)), (~none).sum(-1, dtype=torch.int32)


def _units(k: Tensor, v: Tensor, page: int, folded: bool) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Keys and values as overlapping pages [n, page, kv_heads, dim] of `page` tokens, `folded` of one head each; and how many such pages lie between two
    pages of the cache, two tokens (where `page` is 1) and two heads."""
    (k, steps), (v, others) = (_unit(t, page, folded) for t in (k, v))
    if steps != others:
        raise ValueError(f"attention over chosen keys: k has strides {k.stride()} and v {v.stride()}; give both in one order of pages, tokens and heads")
    return k, v, steps


def _unit(t: Tensor, page: int, folded: bool) -> tuple[Tensor, tuple[int, int, int]]:
    pages, slots, heads, dim = t.shape
    by_page, by_slot, by_head, _ = t.stride()
    steps = (by_page, by_slot if page == 1 else 0, by_head if folded else 0)
    unit = _divisor(*steps)
    if t.stride(-1) != 1 or unit == 0:
        raise ValueError(f"attention over chosen keys: k or v has strides {t.stride()}; give pages that are not expanded, their last dimension contiguous")
    steps = tuple(step // unit for step in steps)
    n = 1 + sum(step * (size - 1) for step, size in zip(steps, (pages, slots, heads), strict=True))
    return t.as_strided((n, page, 1 if folded else heads, dim), (unit, by_slot, by_head, 1)), steps


def _divisor(*numbers: int) -> int:
    """The greatest common one; by its own loop, since torch.compile follows `math.gcd` only where it knows the numbers."""
    found = 0
    for n in numbers:
        while n:
            found, n = n, found % n
    return found


def _attend(q: Tensor, cache: PagedKV, page: int, choice: _Choice, scale: float | None, return_lse: bool, kernel: str):
    """Where each key head has a choice of its own, it is a sequence of its own."""
    batch, _, heads, dim = q.shape
    folded = choice.at.ndim == 3 and cache.k.shape[2] > 1
    k, v, (by_page, by_slot, by_head) = _units(cache.k, cache.v, page, folded)
    table = cache.page_table if choice.at.ndim == 2 else cache.page_table[:, None]
    table = table.expand(*choice.at.shape[:-1], -1).gather(-1, choice.at.long())
    table = table * by_page + choice.slot * by_slot
    if folded:
        table = table + by_head * torch.arange(table.shape[1], dtype=torch.int32, device=q.device)[:, None]
        q = q.reshape(table.shape[0] * table.shape[1], 1, heads // table.shape[1], dim)
    chosen = PagedKV(k, v, table.flatten(0, -2), choice.count.flatten())
    found = paged_attention(q, chosen, mask=Full(), scale=scale, return_lse=return_lse, kernel=kernel)
    if not return_lse:
        return found.reshape(batch, 1, heads, v.shape[-1])
    return found[0].reshape(batch, 1, heads, v.shape[-1]), found[1].reshape(batch, heads, 1)


# ---- Quest


class PageBounds(NamedTuple):
    """The least and the largest number of each channel of a page's keys, [pages, kv_heads, dim] each, in the keys' dtype."""

    low: Tensor
    high: Tensor


def page_bounds(cache: PagedKV) -> PageBounds:
    """Bounds of all pages that the sequences of a cache use; of the others low is inf and high -inf, as before any key."""
    if not isinstance(cache, PagedKV):
        raise TypeError(f"page_bounds: cache is {kind_of(cache)}; give PagedKV(k, v, page_table, lengths)")
    if isinstance(cache.k, Codes):
        raise TypeError(f"page_bounds: the keys are Codes in {cache.k.format}; give a cache of numbers (Codes.dequantised makes them)")
    if not isinstance(cache.k, Tensor) or cache.k.ndim != 4:
        raise ValueError(f"page_bounds: k is {kind_of(cache.k)}; give [pages, page, kv_heads, dim]")
    pages, page, kv_heads, dim = cache.k.shape
    batch = next((len(t) for t in (cache.page_table, cache.lengths) if isinstance(t, Tensor) and t.ndim), 0)
    check_pages("page_bounds", cache.k, cache, batch)
    check_named("page_bounds", cache.page_table, cache.lengths, page, pages)
    low, high = (cache.k.new_full((pages, kv_heads, dim), at) for at in (torch.inf, -torch.inf))
    if not pages:
        return PageBounds(low, high)
    first = torch.arange(cache.page_table.shape[1], device=cache.k.device) * page
    used = (cache.lengths[:, None] - first).clamp(0, page)  # [batch, most pages]
    at = torch.where(used > 0, cache.page_table, 0).long()
    real = torch.arange(page, device=cache.k.device) < used[..., None]
    keys = cache.k[at]  # [batch, most pages, page, kv_heads, dim]
    real = real[..., None, None]
    low.index_reduce_(0, at.flatten(), torch.where(real, keys, torch.inf).amin(2).flatten(0, 1), "amin")
    high.index_reduce_(0, at.flatten(), torch.where(real, keys, -torch.inf).amax(2).flatten(0, 1), "amax")
    return PageBounds(low, high)


def _are_bounds(given) -> bool:
    return isinstance(given, PageBounds) and all(isinstance(t, Tensor) and t.ndim == 3 for t in given)


def append_bounds(
    bounds: PageBounds,
    k: Tensor,  # [tokens, kv_heads, dim]
    slots: Tensor,  # int64 [tokens]
    page: int,
) -> None:
    """Take the keys that are being written to the cache into the bounds, in place; `slots` as `PagePool.append` gives them (page index * page + offset).
    A page whose first slot is among them starts anew: it was another sequence's before. A slot of -1 is nowhere. A page that `PagePool` has copied
    (`fork`) has no bounds of its own yet: they are `page_bounds`'."""
    if not _are_bounds(bounds) or not isinstance(k, Tensor) or not isinstance(slots, Tensor):
        given = f"bounds are {kind_of(bounds)}, k {kind_of(k)}, slots {kind_of(slots)}"
        raise TypeError(f"append_bounds: {given}; give what page_bounds makes, and two tensors")
    check_count("append_bounds", 1, page=page)
    pages = len(bounds.low)
    if slots.shape != k.shape[:1] or k.shape[1:] != bounds.low.shape[1:] or slots.dtype != torch.int64:
        given = f"k is {list(k.shape)}, slots {slots.dtype} {list(slots.shape)}, bounds {list(bounds.low.shape)}"
        wanted = f"[tokens, {', '.join(map(str, bounds.low.shape[1:]))}], and an int64 slot for each token"
        raise ValueError(f"append_bounds: {given}; give {wanted}")
    if (found := ends(slots)) is not None and not -1 <= found[0] <= found[1] < pages * page:
        raise ValueError(f"append_bounds: slots are {found[0]} to {found[1]}; give 0 to {pages * page - 1}, or -1: nowhere")
    if not pages:
        return
    real = slots >= 0
    at = torch.where(real, slots // page, 0)
    begun = torch.zeros(pages + 1, dtype=torch.bool, device=k.device)
    begun[torch.where(real & (slots % page == 0), at, pages)] = True
    anew = begun[at][:, None, None]
    k = k.to(bounds.low.dtype)
    for bound, start, how in ((bounds.low, torch.inf, "amin"), (bounds.high, -torch.inf, "amax")):
        bound.index_copy_(0, at, torch.where(anew, start, bound[at]))  # tokens of one page write the same
        bound.index_reduce_(0, at, torch.where(real[:, None, None], k, start), how)


def page_scores(
    q: Tensor,  # [batch, 1, heads, dim]
    bounds: PageBounds,
    page_table: Tensor,  # int32 [batch, most pages]
    lengths: Tensor,  # int32 [batch]
    page: int,
    *,
    kernel: str = "auto",
) -> Tensor:
    """How large the product of a query and any key of a page may be: sum over channels of max(q low, q high), float32 [batch, heads, most pages]; -inf for
    pages past a sequence's end (Quest: Tang et al., 2024, section 3.3)."""
    if not _are_bounds(bounds) or not isinstance(q, Tensor) or q.ndim != 4:
        raise TypeError(f"page_scores: q is {kind_of(q)}, bounds are {kind_of(bounds)}; give q [batch, 1, heads, dim] and what page_bounds makes")
    batch, len_q, heads, dim = q.shape
    kv_heads = bounds.low.shape[1]
    for name, given, more in (("page_table", page_table, ", most pages"), ("lengths", lengths, "")):
        fits = isinstance(given, Tensor) and given.ndim == 1 + bool(more) and given.shape[0] == batch
        if not fits or given.dtype != torch.int32 or given.device != q.device:
            raise ValueError(f"page_scores: {name} is {kind_of(given)}; give int32 [{batch}{more}] on {q.device}")
    check_count("page_scores", 1, page=page)
    if len_q != 1 or heads % kv_heads or bounds.low.shape[2] != dim or bounds.low.dtype != q.dtype:
        given = f"q is {q.dtype} {list(q.shape)} and the bounds {bounds.low.dtype} {list(bounds.low.shape)}"
        raise ValueError(f"page_scores: {given}; give q [batch, 1, heads, dim] and bounds [pages, kv_heads, dim] in its dtype, heads a multiple of kv_heads")
    check_named("page_scores", page_table, lengths, page, len(bounds.low))
    run = torch.ops.onchip.page_scores if torch.compiler.is_compiling() else _page_scores
    return run(q[:, 0], *bounds, page_table, lengths, page, kernel)


def _page_scores(q: Tensor, low: Tensor, high: Tensor, page_table: Tensor, lengths: Tensor, page: int, kernel: str) -> Tensor:
    (batch, heads, dim), kv_heads = q.shape, low.shape[1]
    if not len(low):
        return q.new_full((batch, heads, page_table.shape[1]), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    problem = Rows("page_scores", batch * kv_heads * page_table.shape[1], dim, q.dtype, f"{heads // kv_heads} heads")
    return select(problem, q.device, kernel).launch(q, low, high, page_table, lengths, page)


_op = torch.library.custom_op("onchip::page_scores", _page_scores, mutates_args=())  # in compiled graphs
_op.register_fake(lambda q, low, high, table, *_: q.new_empty(*q.shape[:2], table.shape[1], dtype=torch.promote_types(q.dtype, torch.float32)))


def top_pages(scores: Tensor, top: int, kv_heads: int, lengths: Tensor, page: int, *, recent: int = 1) -> Tensor:
    """The `top` pages of each key head, int32 [batch, kv_heads, top] for `attend_pages`, -1 where a sequence has fewer: by the largest score among the heads
    that share it, the `recent` last ones in any case."""
    fits = isinstance(scores, Tensor) and scores.ndim == 3 and isinstance(lengths, Tensor) and lengths.shape == scores.shape[:1]
    if not fits or lengths.dtype != torch.int32:
        raise ValueError(f"top_pages: scores are {kind_of(scores)}, lengths {kind_of(lengths)}; give [batch, heads, most pages] and int32 [batch]")
    check_count("top_pages", 1, top=top, kv_heads=kv_heads, page=page)
    check_count("top_pages", 0, recent=recent)
    batch, heads, pages = scores.shape
    if heads % kv_heads or recent > top:
        given = f"top is {top}, recent {recent}, for {heads} heads over {kv_heads} and pages of {page} tokens"
        raise ValueError(f"top_pages: {given}; give a top of at least 1, of which recent is a part, and key heads that divide the heads")
    scores = scores.view(batch, kv_heads, heads // kv_heads, pages).amax(2)
    used = ((lengths + page - 1) // page)[:, None, None]
    at = torch.arange(pages, device=scores.device)
    scores = torch.where((at >= used - recent) & (at < used), torch.inf, scores)
    best, found = scores.topk(min(top, pages), -1)
    found = torch.where(best == -torch.inf, -1, found).to(torch.int32)
    return torch.nn.functional.pad(found, (0, top - found.shape[-1]), value=-1)
