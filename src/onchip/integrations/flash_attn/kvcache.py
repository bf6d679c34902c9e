"""Attention over a cache of keys and values, dense or in pages, and the append to it: what flash-attn's `with_kvcache` functions share.

Nothing here waits for the device. A dense cache is read where it lies: a sequence's row, its left padding and how much of it
is used are an offset and a length. Few queries go to the decode kernels, which cut one sequence's keys among many blocks; a dense
cache is for them a pool whose pages lie in order. Pages are read where they lie, by any number of queries. Else the queries go as packed
ones do, over the dense cache in place, or, with gradients, dropout, padding on the left or a cache of another dtype, over pages gathered into one.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.integrations.flash_attn.call import Call, Lengths, run, wide_enough
from onchip.integrations.flash_attn.rotary import at, rotate, sequence_of
from onchip.ops.attention import PagedKV, paged_attention

DECODE, ROWS, PAGE = 16, 64, 1024  # of a dense cache the decode kernels take at most: queries a sequence, queries times heads of a group, tokens a page


class Cache(NamedTuple):
    """Keys and values of many sequences, and what of them each sequence of the batch sees.

    k, v      [caches, capacity, kv_heads, dim], or with `table` [pages, page, kv_heads, dim].
    used      int32 [batch]: keys of each sequence, its left padding included.
    table     int32 [caches, most pages].       row   int32 [batch]: the cache, or row of the table, of each sequence; None: its own number.
    leftpad   int32 [batch]: leading keys that are padding.
    """

    k: Tensor
    v: Tensor
    used: Tensor
    table: Tensor | None = None
    row: Tensor | None = None
    leftpad: Tensor | None = None

    @property
    def capacity(self) -> int:
        return self.k.shape[1] if self.table is None else self.table.shape[1] * self.k.shape[1]

    @property
    def rows(self) -> Tensor:
        """Of each sequence, int32 [batch]."""
        return torch.arange(len(self.used), dtype=torch.int32, device=self.k.device) if self.row is None else self.row

    @property
    def lengths(self) -> Tensor:
        """Keys that are no padding, int32 [batch]."""
        return self.used if self.leftpad is None else self.used - self.leftpad

    @property
    def pages(self) -> Tensor:
        """The table of this batch, int32 [batch, most pages]."""
        return self.table if self.row is None else self.table[self.row]


class Rotary(NamedTuple):
    """Tables `[positions, rotary_dim / 2]`, the position of each sequence's first new token int32 `[batch]`, and whether all queries stand there."""

    cos: Tensor
    sin: Tensor
    first: Tensor
    interleaved: bool
    stay: bool = False


def cache_of(given: Cache, batch: int) -> Cache:
    """The cache of a call with a length for each sequence, where `used` is an integer, or None for all of it."""
    if isinstance(given.used, Tensor):
        return given
    return given._replace(used=torch.full((batch,), given.capacity if given.used is None else given.used, dtype=torch.int32, device=given.k.device))


# ---- append


def tokens_of(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sequence, position among the new) of each token, int64 that broadcast over `x.shape[:-2]`."""
    if cu_seqlens is not None:
        return sequence_of(cu_seqlens, len(x))
    batch, length = x.shape[:2]
    return torch.arange(batch, device=x.device)[:, None], torch.arange(length, device=x.device)[None, :]


def turned(x: Tensor, place: tuple[Tensor, Tensor], rotary: Rotary, stay: bool = False) -> Tensor:
    """`x` `[..., heads, dim]` rotated by its position; float8 comes back as bfloat16."""
    sequence, index = place
    positions = rotary.first[sequence] + (0 if stay else index)
    positions = positions.expand(x.shape[:-2]) if x.ndim == 4 else positions
    wide = x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x
    return rotate(wide, at(rotary.cos.float(), positions, 1.0), at(rotary.sin.float(), positions, 0.0), rotary.interleaved)


def append(cache: Cache, k: Tensor, v: Tensor, place: tuple[Tensor, Tensor], first: Tensor) -> None:
    """Write new keys and values `[..., kv_heads, dim]` to the cache in place, from slot `first` `[batch]` of each sequence on."""
    sequence, index = place
    slot, row = first[sequence] + index, cache.rows[sequence].long()
    if cache.table is not None:
        page = cache.k.shape[1]
        row, slot = cache.table[row, slot // page].long(), slot % page
    for pool, new in ((cache.k, k), (cache.v, v)):
        _plain(pool)[row, slot] = _plain(new.to(pool.dtype))


def _plain(x: Tensor) -> Tensor:
    """Float8 as bytes: torch does not index it everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# ---- attention


def attend(call: Call, q: Tensor, cache: Cache, return_lse: bool, cu_seqlens_q: Tensor | None = None, longest: int | None = None):
    """(out, LSE or None) of q `[batch, len_q, heads, dim]` over the cache, or of packed q `[tokens, heads, dim]` with offsets.

    LSE is laid out as `attention`'s and `attention_packed`'s. `longest` None: read from the offsets, which waits for the device.
    """
    wide_enough(q)
    batch, packed = len(cache.used), q.ndim == 3
    even = packed and longest is not None and len(q) == batch * longest  # then no sequence has fewer queries
    asked = q.unflatten(0, (batch, longest)) if even else q
    paged = _as_pages(call, asked, cache)
    if paged is not None:
        how = {"mask": call.mask, "scale": call.scale, "score": list(call.score) or None, "sinks": call.sinks, "return_lse": return_lse}
        how |= {"q_offsets": cu_seqlens_q, "longest": longest} if asked.ndim == 3 else {}
        out = paged_attention(asked, paged, **how)
        out, lse = out if return_lse else (out, None)
        return (out.flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1)) if even else (out, lse)
    k, v, offsets = _flat(cache, q.dtype)
    if not packed:
        longest = q.shape[1]
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * longest
    if longest is None:
        longest = int(cu_seqlens_q.diff().max())
    lengths = Lengths(cu_seqlens_q, offsets, (longest, cache.capacity), (None, cache.lengths))
    out, lse = run(call, q if packed else q.flatten(0, 1), k, v, lengths, return_lse)
    if packed:
        return out, lse
    return out.unflatten(0, (batch, longest)), None if lse is None else lse.unflatten(1, (batch, longest)).transpose(0, 1)


def _as_pages(call: Call, q: Tensor, cache: Cache) -> PagedKV | None:
    """The cache as pages, for `q` of four dimensions or packed; None where it is better, or has to be, read otherwise."""
    if not q.numel() or not cache.k.numel() or cache.k.dtype != q.dtype or call.dropout or _needs_gradient(call, q, cache):
        return None
    if cache.table is not None:
        return None if cache.leftpad is not None else PagedKV(cache.k, cache.v, cache.pages.contiguous(), cache.lengths)
    rows, same = _row(cache.k), _row(cache.v)
    if q.ndim == 3 or q.shape[1] > DECODE or q.shape[1] * q.shape[2] > ROWS * cache.k.shape[2] or rows is None or rows != same:
        return None
    both = math.gcd(rows, cache.capacity)
    page = 1 if cache.leftpad is not None else min(both & -both, PAGE)  # the largest power of two that divides both
    pool = (_line(x, rows).unflatten(0, (-1, page)) for x in (cache.k, cache.v))
    start = cache.rows * (rows // page) if cache.leftpad is None else cache.rows * rows + cache.leftpad
    table = start[:, None] + torch.arange(cache.capacity // page, dtype=torch.int32, device=q.device)
    return PagedKV(*pool, table, cache.lengths)


def _needs_gradient(call: Call, q: Tensor, cache: Cache) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, cache.k, cache.v, call.sinks))


def _row(x: Tensor) -> int | None:
    """Tokens from one sequence's keys to the next's in `[batch, len, heads, dim]`, when they are a whole number."""
    if x.shape[0] == 1:
        return x.shape[1]
    return x.stride(0) // x.stride(1) if x.stride(1) > 0 and x.stride(0) >= 0 and x.stride(0) % x.stride(1) == 0 else None


def _line(x: Tensor, rows: int) -> Tensor:
    """`[batch, len, heads, dim]` as one `[tokens, heads, dim]` in place, `rows` tokens a sequence."""
    return x.as_strided(((x.shape[0] - 1) * rows + x.shape[1], *x.shape[2:]), x.stride()[1:])


def _flat(cache: Cache, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as `[tokens, kv_heads, dim]` and where each sequence starts, int32 `[batch + 1]`."""
    k, v, row = cache.k, cache.v, cache.rows
    if cache.table is not None:
        pages = cache.pages.long()
        first = torch.arange(pages.shape[1], device=k.device) * cache.k.shape[1]
        pages = pages.where(first < cache.used[:, None], 0)  # what stands behind a sequence's last page is not read
        k, v = (_plain(x)[pages].flatten(1, 2) for x in (k, v))
        k, v = (x.view(pool.dtype) if x.dtype != pool.dtype else x for x, pool in ((k, cache.k), (v, cache.v)))  # a view of a dtype has no gradient
        row = torch.arange(len(cache.used), dtype=torch.int32, device=k.device)
    rows = _row(k)
    if rows is None or rows != _row(v) or k.requires_grad or v.requires_grad:
        rows = k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        k, v = (_line(x, rows) if x.numel() else x.flatten(0, 1) for x in (k, v))
    start = row * rows
    offsets = F.pad(start if cache.leftpad is None else start + cache.leftpad, (0, 1), value=len(k))
    return k.to(dtype), v.to(dtype), offsets
