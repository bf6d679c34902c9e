"""Attention in plain torch, O(N) memory, on any device, forward and backward: what a CPU runs.

Queries go in tiles; a tile knows which keys its rows see, so a mask costs what its area costs, and keys that none of them
sees are never touched. On a CPU torch's own fused kernel does a tile wherever it means the same; else the keys go in tiles
too: forward the online softmax of FlashAttention (Dao et al., 2022, algorithm 1), backward the weights again from the LSE:

    P = exp(S - LSE)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = dS K    dK = dS^T Q    delta = rowsum(dO O) - dLSE
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import Band
from onchip.core.philox import kept
from onchip.core.problem import Attention, Operands
from onchip.core.trace import PLACE, Place, Traced

ROWS, COLS = 256, 512  # a tile of our own products
SCORES = {"cpu": 1 << 21}  # scores of a tile, all sequences and heads together: 8 MiB in float32, which a CPU's cache holds
MOST_SCORES = 1 << 25  # on a GPU, where a launch costs more than a miss
FUSED_ROWS = 256  # queries of a masked call of torch's kernel
FUSED_MASK = 1 << 21  # elements of the mask of such a call

fused_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# ---- launches


@torch.no_grad()
def prefill(p: Attention, _config, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """Dense `[batch, len, heads, dim]`, or packed `[tokens, heads, dim]` with offsets."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=_wide(q), device=q.device)
    for part in _parts(p, x, q, k, _fuses(p, q)):
        if part.batch == slice(0, p.batch) and part.rows is None:  # all in one go: nothing to put together
            out, lse = _forward(p, x, part, part.queries(q), part.keys(k), part.keys(v))
            out, lse = out.transpose(1, 2), lse.contiguous()
            break
        result = _forward(p, x, part, part.queries(q), part.keys(k), part.keys(v))
        for to, each in zip((part.queries(out), part.lse(lse)), result, strict=True):
            to.copy_(each)
    return (out, lse) if return_lse else out


@torch.no_grad()
def backward(p: Attention, _config, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """Gradients of q, k, v, the sinks and each tensor that the score reads; None where one needs none. `d_lse` may be None."""
    wide = _wide(q)
    dq = q.new_zeros(q.shape)
    dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
    d_sinks = None if x.sinks is None else torch.zeros(p.heads, dtype=wide, device=q.device)
    d_score = [torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, wide), device=t.device) if t.requires_grad else None for t in x.score]
    fused = _fuses(p, q) and d_lse is None and all(d is None for d in d_score)
    for part in _parts(p, x, q, k, fused):
        near, far, theirs, ours, d_near = part.queries(q), part.keys(k), part.keys(v), part.queries(out), part.queries(d_out.to(q.dtype))
        row_lse, delta = part.lse(lse).to(wide), None
        blind = row_lse == -torch.inf
        if blind.any():  # their weights are 0; what they hold must not make 0 x NaN of that
            near, d_near, row_lse = near.masked_fill(blind[..., None], 0.0), d_near.masked_fill(blind[..., None], 0.0), row_lse.masked_fill(blind, 0.0)
        if not fused or x.sinks is not None:
            delta = (d_near.to(wide) * ours).sum(-1)
            if d_lse is not None:
                delta -= part.lse(d_lse).masked_fill(blind, 0.0)
        if x.sinks is not None:
            d_sinks -= ((x.sinks.to(wide)[:, None] - row_lse).exp() * delta).sum((0, 2))
        to = part.queries(dq), part.keys(dk), part.keys(dv)
        if fused:
            _fused_backward(p, x, part, near, far, theirs, ours, d_near, row_lse, to)
        else:
            _backward(p, x, part, near, far, theirs, d_near, row_lse, delta, to, d_score)
    d_sinks = None if d_sinks is None else d_sinks.to(x.sinks.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_sinks, tuple(None if d is None else d.to(t.dtype) for d, t in zip(d_score, x.score, strict=True))


@torch.no_grad()
def decode(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    """`q [batch, len_q, heads, dim]` over the pages of each sequence; no loop over tokens."""
    out = q.new_zeros(*q.shape[:-1], cache.v.shape[-1])
    lse = torch.full((p.batch, p.heads, p.len_q), -torch.inf, dtype=_wide(q), device=q.device)
    for b, length in enumerate(cache.lengths.tolist()):
        row = _hull(p).shift(p.len_q, length)
        seen = _hull(p).keys(row, row + p.len_q - 1, length)
        pages = slice(seen.start // p.page, -(-seen.stop // p.page))
        skip = pages.start * p.page
        k, v = (_gather(pool, cache.page_table[b, pages])[seen.start - skip : seen.stop - skip] for pool in (cache.k, cache.v))
        part = _Part(slice(b, b + 1), None, None, p.len_q, length, seen.start)
        k, v = (t.transpose(0, 1)[None] for t in (k, v))
        for to, each in zip((part.queries(out), part.lse(lse)), _forward(p, x, part, part.queries(q), k, v), strict=True):
            to.copy_(each)
    return (out, lse) if return_lse else out


def _gather(pool: Tensor, pages: Tensor) -> Tensor:
    """Pages of a pool as one `[keys, kv_heads, dim]`; no copy when they lie side by side, as one sequence's mostly do."""
    if pool.device.type == "cpu":
        ids = pages.tolist()
        if ids and ids[-1] - ids[0] == len(ids) - 1 and all(b - a == 1 for a, b in pairwise(ids)):
            return pool[ids[0] : ids[-1] + 1].flatten(0, 1)
    return pool.index_select(0, pages).flatten(0, 1)


# ---- sequences, and their tiles


class _Part(NamedTuple):
    """Sequences of equal lengths that go together: a few of a dense batch, or one of a packed one.

    batch    their numbers.     rows, cols   tokens of a packed batch, None of a dense one.     origin   the number of the first key at hand.
    """

    batch: slice
    rows: slice | None
    cols: slice | None
    len_q: int
    len_k: int
    origin: int = 0

    def queries(self, t: Tensor) -> Tensor:
        """What is of the queries in `t`, [batch, heads, len_q, dim]."""
        return (t[self.batch] if self.rows is None else t[self.rows][None]).transpose(1, 2)

    def keys(self, t: Tensor) -> Tensor:
        return (t[self.batch] if self.cols is None else t[self.cols][None]).transpose(1, 2)

    def lse(self, t: Tensor) -> Tensor:
        return t[self.batch] if self.rows is None else t[None, :, self.rows]


class _Tile(NamedTuple):
    """Some queries, and the keys that any of them sees.

    keys     where they lie: a slice, or their numbers when there are gaps.        at   the place of each, absolute.
    seen     bool, broadcasts over [batch, heads, rows, keys]; None: every row sees every key.
    shown    bool, broadcasts over [batch, kv_heads, keys, 1]: False where no row of this sequence and head sees a key that others see; or None.
    """

    rows: slice
    keys: slice | Tensor
    at: Place
    seen: Tensor | None
    shown: Tensor | None

    def of_keys(self, t: Tensor) -> Tensor:
        """The tile's keys of `t` [batch, kv_heads, keys, dim]. What no row sees may hold anything, so it becomes 0."""
        t = _take(t, 2, self.keys)
        return t if self.shown is None else torch.where(self.shown, t, 0.0)

    def columns(self, cols: slice) -> "_Tile | None":
        """A part of the tile's keys; None when no row sees one."""
        keys = slice(self.keys.start + cols.start, self.keys.start + cols.stop) if isinstance(self.keys, slice) else self.keys[cols]
        seen = None if self.seen is None else self.seen[..., cols]
        if seen is not None and not seen.any():
            return None
        seen = None if seen is None or seen.all() else seen
        return self._replace(keys=keys, at=self.at._replace(j=self.at.j[..., cols]), seen=seen)


def _parts(p: Attention, x: Operands, q: Tensor, k: Tensor, fused: bool) -> Iterator[_Part]:
    if x.q_offsets is not None:
        lengths = zip(_spans(x.q_offsets, x.q_used), _spans(x.k_offsets, x.k_used), strict=True)
        yield from (_Part(slice(b, b + 1), rows, cols, rows.stop - rows.start, cols.stop - cols.start) for b, (rows, cols) in enumerate(lengths))
        return
    batch, len_q, len_k = *q.shape[:2], k.shape[1]
    alone = "batch_invariant" in p.extras or _differs(p, "b")  # then each has keys of its own
    room = SCORES.get(q.device.type, MOST_SCORES) // (p.heads * max(1, min(len_q, _rows(p, q.device)) * min(len_k, COLS)))
    step = max(1, 1 if alone else batch if fused else room)
    for b in range(0, batch, step):
        yield _Part(slice(b, min(b + step, batch)), None, None, len_q, len_k)


def _spans(offsets: Tensor, used: Tensor | None) -> list[slice]:
    """The tokens of each sequence of a packed batch."""
    bounds = offsets.tolist()
    lengths = [b - a for a, b in pairwise(bounds)] if used is None else used.tolist()
    return [slice(a, a + n) for a, n in zip(bounds, lengths, strict=False)]


def _tiles(p: Attention, x: Operands, part: _Part, rows_each: int, device: torch.device) -> Iterator[_Tile]:
    """Tiles of queries that see a key."""
    band, exact = _hull(p), isinstance(p.mask, Band)
    shift = band.shift(part.len_q, part.len_k)
    count = lambda first, last, *shape: torch.arange(first, last, device=device).view(shape)  # noqa: E731
    lengths = (torch.full((1, 1, 1, 1), n, device=device) for n in (part.len_q, part.len_k))
    whole = Place(count(part.batch.start, part.batch.stop, -1, 1, 1, 1), count(0, p.heads, 1, -1, 1, 1), None, None, *lengths)
    for start in range(0, part.len_q, rows_each):
        stop = min(start + rows_each, part.len_q)
        first, last = start + shift, stop + shift - 1
        keys = band.keys(first, last, part.len_k)
        if not keys:
            continue
        at = whole._replace(i=count(start, stop, 1, 1, -1, 1), j=count(keys.start, keys.stop, 1, 1, 1, -1))
        near = slice(keys.start - part.origin, keys.stop - part.origin)
        if exact:  # any key of the range is seen by some row
            inside = (band.right is None or keys.stop - 1 <= first + band.right) and (band.left is None or keys.start >= last - band.left)
            yield _Tile(slice(start, stop), near, at, None if inside else band.seen(at), None)
            continue
        tile = _Tile(slice(start, stop), near, at, None, None)
        seen = _value(p.mask, _reads(p.mask, x.mask, at), at)
        by_head = seen.any(2)
        by_key = by_head.flatten(0, 1).any(0).expand(len(keys))
        found = by_key.nonzero()[:, 0]
        if not len(found):
            continue
        low, high = int(found[0]), int(found[-1]) + 1
        if high - low == len(found):
            tile = tile._replace(keys=slice(near.start + low, near.start + high), at=at._replace(j=at.j[..., low:high]))
            found = slice(low, high)
        else:
            tile = tile._replace(keys=found + near.start, at=at._replace(j=at.j[..., found]))
        if seen.shape[3] > 1:
            seen, by_head = _take(seen, 3, found), _take(by_head, 2, found)
        if seen.all():
            yield tile
            continue
        if by_head.shape[1] > 1:
            by_head = by_head.unflatten(1, (p.kv_heads, p.group)).any(2)
        yield tile._replace(seen=seen.expand(*seen.shape[:2], stop - start, tile.at.j.shape[3]), shown=None if by_head.all() else by_head[..., None])


def _rows(p: Attention, device: torch.device) -> int:
    """Queries of a tile of our own products."""
    return max(32, min(ROWS, SCORES.get(device.type, MOST_SCORES) // (COLS * p.heads)))


def _hull(p: Attention) -> Band:
    return p.mask if isinstance(p.mask, Band) else p.mask.hull


# ---- masks and scores on a tile


def _reads(traced: Traced, tensors: tuple[Tensor, ...], at: Place) -> list[Tensor]:
    """What the function reads at `at`: of a tensor read at the place itself, [.., i, j], only the part that lies there; others whole."""
    _, letters = _cutting(traced)
    return [_cut(t, letters[n], at) if n in letters else t for n, t in enumerate(tensors)]


def _value(traced: Traced, reads: list[Tensor], at: Place, s: Tensor | None = None) -> Tensor:
    """A mask's or score's value at `at`, of four dimensions."""
    value = torch.as_tensor(_cutting(traced)[0](s, *at, *reads), device=at.j.device)  # a function may give True
    return value[(None,) * (4 - value.ndim)]


def _cut(t: Tensor, letters: tuple[str, ...], at: Place) -> Tensor:
    """The part of `t`, a dimension a letter, that lies at `at`, as [batch, heads, rows, keys]; a view where the numbers have no gap."""
    for dim, letter in enumerate(letters):
        t = _take(t, dim, _range(getattr(at, letter)))
    return t[tuple(slice(None) if letter in letters else None for letter in PLACE[:4])]


def _add_cut(t: Tensor, letters: tuple[str, ...], at: Place, more: Tensor) -> None:
    """`_cut`'s part of `t` grows by `more`."""
    for dim, letter in enumerate(letters[:-1]):  # only keys have gaps, and they come last
        t = _take(t, dim, _range(getattr(at, letter)))
    _add(t, len(letters) - 1, _range(getattr(at, letters[-1])), more[tuple(slice(None) if letter in letters else 0 for letter in PLACE[:4])])


def _range(numbers: Tensor) -> slice | Tensor:
    numbers = numbers.flatten()
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last + 1 - first == len(numbers) else numbers


def _take(t: Tensor, dim: int, keys: slice | Tensor) -> Tensor:
    return t.narrow(dim, keys.start, keys.stop - keys.start) if isinstance(keys, slice) else t.index_select(dim, keys)


def _add(t: Tensor, dim: int, keys: slice | Tensor, more: Tensor) -> None:
    if isinstance(keys, slice):
        t.narrow(dim, keys.start, keys.stop - keys.start).add_(more)
    else:
        t.index_add_(dim, keys, more.to(t.dtype))


@functools.lru_cache(maxsize=1024)
def _cutting(traced: Traced):
    """(the function, {n: the letters that tensor n is read at}): such reads, which would look up number by number, are left to `_cut`."""
    text, letters = traced.text, {}
    for read, name, inside in re.findall(r"(aten\.index\.Tensor\((c\d+), \[([bhij, ]+)\]\))", text):
        at = tuple(inside.split(", "))
        if len(re.findall(rf"\b{name}\b", text)) == 2 and list(at) == sorted(set(at)):  # once in the head of the text, once here
            text = text.replace(read, name)
            letters[int(name[1:])] = at
    return Traced(traced.name, text).run, letters


@functools.lru_cache(maxsize=1024)
def _differs(p: Attention, letter: str) -> bool:
    """Whether the mask or the score differs along a dimension of the Place."""
    return any(re.search(rf"\b{letter}\b", part.text.partition("\n")[2]) for part in (p.mask, p.score) if isinstance(part, Traced))


@functools.lru_cache(maxsize=1024)
def _is_sum(text: str) -> bool:
    """Whether a score is `s` and terms that do not depend on it, which torch's kernel takes as a mask of floats."""
    now, gone = "s", set()
    for line in text.splitlines()[1:-1]:
        name, expression = re.match(r"    (v\d+): '\w+' = (.*)", line).groups()
        words = re.findall(r"\w+", expression)
        if gone & set(words) or words.count(now) > 1:
            return False
        if now in words:
            if not re.match(rf"aten\.(add\.(Tensor|Scalar)\(({now}, |\w+, {now}\))|sub\.(Tensor|Scalar)\({now}, )", expression):
                return False
            gone.add(now)
            now = name
    return text.splitlines()[-1] == f"    return {now}"


# ---- torch's own kernel


def _fuses(p: Attention, q: Tensor) -> bool:
    """Whether torch's CPU kernel computes this: there is one, without dropout and for scores that are sums."""
    return q.device.type == "cpu" and not p.dim_v and "dropout" not in p.extras and (p.score is None or _is_sum(p.score.text))


def _fused_rows(p: Attention, len_k: int) -> int:
    """Queries of a call with a mask, which is kept small."""
    return max(32, min(FUSED_ROWS, FUSED_MASK // (max(1, len_k) * (p.heads if _differs(p, "h") else 1))))


def _fused_mask(p: Attention, x: Operands, tile: _Tile, dtype: torch.dtype) -> Tensor | None:
    """What torch's kernel adds to the scores: 0, the terms of the score, or -inf."""
    term = None if p.score is None else _value(p.score, _reads(p.score, x.score, tile.at), tile.at, torch.zeros(1, 1, 1, 1, dtype=dtype)).to(dtype)
    if tile.seen is None:
        return term
    if term is not None:
        return torch.where(tile.seen, term, -torch.inf)
    if dtype == torch.float64:
        return torch.where(tile.seen, 0.0, torch.tensor(-torch.inf, dtype=dtype))
    return tile.seen.to(torch.int32).sub_(1).bitwise_and_(-0x800000).view(torch.float32)  # -inf's bits where False; 30 times as fast as torch.where


def _fused(p: Attention, x: Operands, tile: _Tile | None, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and LSE of q, k, v [batch, heads, .., dim] by torch's kernel. It gives a row that sees no key 0 and LSE 0."""
    mask = None if tile is None else _fused_mask(p, x, tile, _wide(q))
    batch, heads, rows, dim = q.shape
    together = rows == 1 and (mask is None or mask.shape[1] == 1)  # the heads of a group are rows of one product
    if together:
        q = q.reshape(batch, p.kv_heads, p.group, dim)
    out, lse = fused_forward(_even(q), _even(k), _even(v), 0.0, causal, attn_mask=mask, scale=x.scale)
    if together:
        out, lse = out.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)
    if mask is not None:
        blind = mask.amax(-1) == -torch.inf
        if blind.any():
            lse, out = lse.masked_fill(blind, -torch.inf), out.masked_fill(blind[..., None], 0.0)
    if x.sinks is not None:
        total = torch.logaddexp(lse, x.sinks.to(lse.dtype)[:, None])
        out = (out * (lse - total.masked_fill(total == -torch.inf, 0.0)).exp()[..., None]).to(q.dtype)
        lse = total
    return out, lse


def _even(t: Tensor) -> Tensor:
    """torch's kernel reads rows as contiguous without looking."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _causal(p: Attention, part: _Part) -> tuple[range, bool] | None:
    """(the keys that are seen, whether row i sees the first i + 1 of them and not all) where torch's kernel needs no mask; else None."""
    if not isinstance(p.mask, Band) or p.score is not None or not part.len_q or not part.len_k:
        return None
    shift = p.mask.shift(part.len_q, part.len_k)
    last = shift + part.len_q - 1
    keys = p.mask.keys(shift, last, part.len_k)
    if shift < 0 or (p.mask.left is not None and p.mask.left < last - keys.start):
        return None
    if p.mask.right is None or p.mask.right + shift >= keys.stop - 1:
        return keys, False
    return (keys, True) if p.mask.right == shift == 0 and keys.start == part.origin == 0 else None


# ---- forward


def _forward(p: Attention, x: Operands, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q `[batch, heads, len_q, dim]`, k and v `[batch, kv_heads, keys, dim]` -> the output like q, LSE `[batch, heads, len_q]`."""
    fuses = _fuses(p, q)
    if fuses and (how := _causal(p, part)):
        near = slice(how[0].start - part.origin, how[0].stop - part.origin)
        return _fused(p, x, None, q, k[:, :, near], v[:, :, near], how[1])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_wide(q), device=q.device)
    if x.sinks is not None:
        lse.copy_(x.sinks[:, None])
    rows = _fused_rows(p, part.len_k) if fuses else _rows(p, q.device)
    for tile in _tiles(p, x, part, rows, q.device):
        near, keys, values = q[:, :, tile.rows], tile.of_keys(k), tile.of_keys(v)
        out[:, :, tile.rows], lse[:, :, tile.rows] = (_fused if fuses else _online)(p, x, tile, near, keys, values)
    return out, lse


def _online(p: Attention, x: Operands, tile: _Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One tile of queries over its keys, COLS at a time."""
    batch, heads, rows, _ = q.shape
    work = _wide(q)
    q = _grouped(q.to(work) * x.scale, p)
    acc = q.new_zeros(*q.shape[:3], v.shape[-1])
    top = torch.full((batch, heads, rows, 1), -torch.inf, dtype=work, device=q.device)
    if x.sinks is not None:
        top = top.copy_(x.sinks[:, None, None])
    total = (top > -torch.inf).to(work)
    for start in range(0, k.shape[2], COLS):
        cols = slice(start, min(start + COLS, k.shape[2]))
        part = tile.columns(cols)
        if part is None:
            continue
        products = _ungrouped(q @ k[:, :, cols].to(work).transpose(2, 3), p)
        scores = _hide(_scores(p, x, part, products), part)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)  # a row that has seen nothing yet stays at zero
        weights, shrink = (scores - safe).exp_(), (top - safe).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        if x.drop:
            weights *= _keeps(p, x, part.at, work)
        acc = acc.mul_(_grouped(shrink, p)).add_(_grouped(weights, p) @ v[:, :, cols].to(work))
        top = new_top
    out = acc.view(batch, heads, rows, -1) / total.masked_fill(total == 0, 1.0)
    return out, (top + total.log())[..., 0]


def _scores(p: Attention, x: Operands, tile: _Tile, products: Tensor, reads: list[Tensor] | None = None) -> Tensor:
    """The scores [batch, heads, rows, keys] of a tile, from its products."""
    if p.score is None:
        return products
    reads = _reads(p.score, x.score, tile.at) if reads is None else reads
    return _value(p.score, reads, tile.at, products).to(products.dtype).expand(products.shape)


def _hide(scores: Tensor, tile: _Tile) -> Tensor:
    return scores if tile.seen is None else scores.masked_fill(~tile.seen, -torch.inf)


def _keeps(p: Attention, x: Operands, at: Place, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies the weights with."""
    return kept(x.drop, x.state, at.b, at.h, at.i, at.j, p.heads).to(dtype) / (1 - x.drop)


def _grouped(t: Tensor, p: Attention) -> Tensor:
    """[batch, heads, rows, ..] -> [batch, kv_heads, group x rows, ..]: the heads of a group are rows of one product."""
    return t.reshape(t.shape[0], p.kv_heads, -1, t.shape[-1])


def _ungrouped(t: Tensor, p: Attention) -> Tensor:
    return t.view(t.shape[0], p.heads, -1, t.shape[-1])


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---- backward


def _fused_backward(p: Attention, x: Operands, part: _Part, q, k, v, out, d_out, lse, to) -> None:
    """Adds to `to`, (dq, dk, dv), by torch's kernel. Its weights are exp(S - LSE), so an LSE that counts a sink is as good."""
    dq, dk, dv = to
    if how := _causal(p, part):
        near = slice(how[0].start, how[0].stop)
        found = _fused_gradients(x, None, q, k[:, :, near], v[:, :, near], out, d_out, lse, how[1])
        for each, d in zip((dq, dk[:, :, near], dv[:, :, near]), found, strict=True):
            each.copy_(d)
        return
    for tile in _tiles(p, x, part, _fused_rows(p, part.len_k), q.device):
        mine = [t[:, :, tile.rows] for t in (out, d_out, lse)]
        found = _fused_gradients(x, _fused_mask(p, x, tile, _wide(q)), q[:, :, tile.rows], tile.of_keys(k), tile.of_keys(v), *mine, False)
        dq[:, :, tile.rows] = found[0]
        for each, d in zip((dk, dv), found[1:], strict=True):
            _add(each, 2, tile.keys, d)


def _fused_gradients(x: Operands, mask: Tensor | None, q, k, v, out, d_out, lse, causal: bool):
    q, k, v, out = (_even(t) for t in (q, k, v, out))
    return fused_backward(d_out.contiguous(), q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=x.scale)


def _backward(p: Attention, x: Operands, part: _Part, q, k, v, d_out, lse, delta, to, d_score) -> None:
    """Adds to `to`, (dq, dk, dv), and to `d_score`, tile by tile."""
    dq, dk, dv = to
    work = _wide(q)
    for tile in _tiles(p, x, part, _rows(p, q.device), q.device):
        near, d_near = (_grouped(t[:, :, tile.rows].to(work), p) for t in (q, d_out))
        near = near * x.scale
        row_lse, row_delta = (t[:, :, tile.rows, None] for t in (lse, delta))
        keys, values = tile.of_keys(k), tile.of_keys(v)
        found = torch.zeros_like(near)
        for start in range(0, keys.shape[2], COLS):
            cols = slice(start, min(start + COLS, keys.shape[2]))
            small = tile.columns(cols)
            if small is None:
                continue
            key, value = (t[:, :, cols].to(work) for t in (keys, values))
            scores, pull = _with_gradient(p, x, small, _ungrouped(near @ key.transpose(2, 3), p), d_score)
            weights = (_hide(scores, small) - row_lse).exp_()
            d_weights = _ungrouped(d_near @ value.transpose(2, 3), p)
            if x.drop:
                keeps = _keeps(p, x, small.at, work)
                d_weights *= keeps
                _add(dv, 2, small.keys, _grouped(weights * keeps, p).transpose(2, 3) @ d_near)
            else:
                _add(dv, 2, small.keys, _grouped(weights, p).transpose(2, 3) @ d_near)
            d_scores = _grouped(pull(d_weights.sub_(row_delta).mul_(weights)), p)
            found += d_scores @ key
            _add(dk, 2, small.keys, d_scores.transpose(2, 3) @ near)
        dq[:, :, tile.rows] = (found * x.scale).view(q.shape[0], p.heads, -1, q.shape[-1])


def _with_gradient(p: Attention, x: Operands, tile: _Tile, products: Tensor, d_score: list[Tensor | None]):
    """(the tile's scores, a function from their gradient to the products', which adds to `d_score` what the tensors get)."""
    if p.score is None:
        return products, lambda d: d
    if all(d is None for d in d_score) and _is_sum(p.score.text):
        return _scores(p, x, tile, products), lambda d: d
    with torch.enable_grad():
        products = products.requires_grad_()
        reads = [t.detach().requires_grad_(d is not None) for t, d in zip(_reads(p.score, x.score, tile.at), d_score, strict=True)]
        scores = _scores(p, x, tile, products, reads)

    def pull(d: Tensor) -> Tensor:
        if not scores.requires_grad:
            return torch.zeros_like(d)
        wanted = {n: t for n, t in enumerate(reads) if t.requires_grad}
        with _one_order() if "deterministic" in p.extras else nullcontext():
            d_products, *found = torch.autograd.grad(scores, [products, *wanted.values()], d, allow_unused=True)
        letters = _cutting(p.score)[1]
        for n, more in zip(wanted, found, strict=True):
            if more is not None and n in letters:
                _add_cut(d_score[n], letters[n], tile.at, more)
            elif more is not None:
                d_score[n] += more
        return torch.zeros_like(d) if d_products is None else d_products

    return scores.detach(), pull


@contextmanager
def _one_order():
    """torch adds up the gradient of a look-up in any order, unless it is told not to."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
