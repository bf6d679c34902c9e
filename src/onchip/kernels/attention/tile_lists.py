"""The tiles of a packed batch in a list that the device makes: those of all sequences, in the order in which programs take them.

How long sequences are is on the device, so the host knows only how many tiles there may be. Each program finds sequence and tile of its number in the list,
those with most work first, so that the last ones are short; keys of long tiles in parts, where there are few.
"""

import triton
import triton.language as tl

from onchip.core.masks import Band
from onchip.kernels.again import asked
from onchip.kernels.attention.tile import ends, key_span, remembered, sequence

FIELDS = tl.constexpr(8)  # of a tile in a list by length: a sector of memory
PART, PARTS = tl.constexpr(1 << 20), tl.constexpr(1 << 25)  # in a list: tile + PART part + PARTS (parts - 1), of up to 32 parts
GRAIN = tl.constexpr(128)  # keys of which a part has so many times as many, but for a tile's last ones
MOST_PARTS, LEAST = 16, 1024  # of a tile's keys, and keys of a part
DEALT = 128  # of which the largest may be in parts
LISTED = 64  # tiles of a packed batch that a program sorts, each against as many at once


# ---- device


@triton.jit(do_not_specialize=["bound", "most", "tokens"], do_not_specialize_on_alignment=["offsets", "other_offsets", "used", "other_used"])
def _number(found_ptr, offsets, other_offsets, used, other_used, bound, most, tokens, BEFORE: tl.constexpr, AFTER: tl.constexpr, TOP_LEFT: tl.constexpr,
            LAST_FIRST: tl.constexpr, BY_LENGTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sequence, tile and work of the tiles of one sequence, at most `most`, behind those of sequences before it; int32 [3, bound].
    BY_LENGTH: behind those of longer ones, int32 [bound, 8], the first token and the length of the sequence and of the other side in place of its work.

    A tile's work is what its tokens see of the other side, queries or keys: from BEFORE the first to AFTER the last, -1 is no limit.
    """
    b = tl.program_id(0)
    token, length = sequence(offsets, used, b, 0)
    other_token, other = sequence(other_offsets, other_used, b, 0)
    tiles = tl.minimum(tl.cdiv(length, tokens), most)
    count = b
    if BY_LENGTH:
        count = tl.num_programs(0)
    start = 0
    for first in range(0, count, BLOCK):
        others = first + tl.arange(0, BLOCK)
        _starts, lengths = sequence(offsets, used, tl.minimum(others, b if not BY_LENGTH else count - 1), 0)
        theirs = tl.minimum(tl.cdiv(lengths, tokens), most)
        ahead = others < b
        if BY_LENGTH:
            ahead = (others < count) & ((theirs > tiles) | ((theirs == tiles) & ahead))
        start += tl.sum(tl.where(ahead, theirs, 0), 0)
    shift = other - length
    if TOP_LEFT:
        shift = shift * 0
    for first in range(0, tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tile = at
        if LAST_FIRST:
            tile = tiles - 1 - at
        row = tile * tokens + shift
        begin, end = key_span(row, row + tokens - 1, other, BEFORE, AFTER)
        there = (at < tiles) & (start + at < bound)
        if BY_LENGTH:  # all that a program asks for lies side by side
            to = found_ptr + (start + at) * FIELDS
            tl.store(to, at * 0 + b, mask=there)
            tl.store(to + 1, tile, mask=there)
            tl.store(to + 2, at * 0 + token, mask=there)
            tl.store(to + 3, at * 0 + length, mask=there)
            tl.store(to + 4, at * 0 + other_token, mask=there)
            tl.store(to + 5, at * 0 + other, mask=there)
        else:
            to = found_ptr + start + at
            tl.store(to, at * 0 + b, mask=there)
            tl.store(to + bound, tile, mask=there)
            tl.store(to + 2 * bound, at * 0 + tl.maximum(end - begin, 0), mask=there)


@triton.jit(do_not_specialize=["bound"])
def _rank(tiles_ptr, work_ptr, found_ptr, bound, BLOCK: tl.constexpr):
    """(sequence, tile) as found by `_number`, sorted, and if wanted their work: a tile's place is the number of those with more, or with as much before it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    work = tl.load(found_ptr + 2 * bound + at, mask=at < bound, other=-1)
    rank = at * 0
    for first in range(0, bound, BLOCK):
        others = first + tl.arange(0, BLOCK)
        works = tl.load(found_ptr + 2 * bound + others, mask=others < bound, other=-2)
        before = (works[None, :] > work[:, None]) | ((works[None, :] == work[:, None]) & (others[None, :] < at[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    b = tl.load(found_ptr + at, mask=at < bound, other=-1)
    tile = tl.load(found_ptr + bound + at, mask=at < bound, other=0)
    tl.store(tiles_ptr + 2 * rank, b, mask=at < bound)
    tl.store(tiles_ptr + 2 * rank + 1, tl.maximum(tile, 0), mask=at < bound)
    if work_ptr is not None:
        tl.store(work_ptr + rank, work, mask=at < bound)


@triton.jit(do_not_specialize=["bound", "most"])
def _deal(units_ptr, tiles_ptr, work_ptr, bound, most, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles as sorted by `_rank`, each as many times as its keys are dealt out in parts: of as few keys a part as make `most` parts of all tiles or fewer;
    where there are as many tiles, of a `most`th of all keys. A part has LEAST keys or more, and a tile up to MOST parts, which lie within the first `most`
    places; part and parts stand above the tile's number."""
    every, count = tl.zeros([], tl.int64), 0
    for first in range(0, bound, BLOCK):
        at = first + tl.arange(0, BLOCK)
        work = tl.load(work_ptr + at, mask=at < bound, other=-1)
        every += tl.sum(tl.maximum(work, 0).to(tl.int64), 0)
        count += tl.sum((work >= 0).to(tl.int32), 0)
    at = tl.arange(0, BLOCK)
    work = tl.load(work_ptr + at, mask=at < bound, other=-1)  # of the largest: others are not in parts
    low = tl.cdiv(tl.maximum(tl.cdiv(every, most).to(tl.int32), LEAST), GRAIN)  # in GRAIN keys, so that few turns find it
    high = tl.maximum(tl.cdiv(tl.max(work, 0), GRAIN), low)
    few = count < most
    size = low
    while few & (low < high):
        size = (low + high) // 2
        fits = tl.sum(tl.maximum(tl.cdiv(work, size * GRAIN), (work >= 0).to(tl.int32)), 0) + tl.maximum(count - BLOCK, 0) <= most
        low, high = tl.where(fits, low, size + 1), tl.where(fits, size, high)
    size = low * GRAIN
    behind = 0
    for first in range(0, bound, BLOCK):
        at = first + tl.arange(0, BLOCK)
        work = tl.load(work_ptr + at, mask=at < bound, other=-1)
        b, tile = tl.load(tiles_ptr + 2 * at, mask=at < bound, other=-1), tl.load(tiles_ptr + 2 * at + 1, mask=at < bound, other=0)
        parts = tl.where(few, tl.cdiv(work, size), work // size)
        parts = tl.where(at < BLOCK, tl.maximum(tl.minimum(tl.minimum(parts, work // LEAST), MOST), 1), 1)
        parts = tl.where(b >= 0, parts, 0)
        begin = behind + tl.cumsum(parts, 0) - parts
        for part in range(MOST):
            to = units_ptr + 2 * (begin + part)
            tl.store(to, b, mask=part < parts)
            tl.store(to + 1, tile + part * PART + (parts - 1) * PARTS, mask=part < parts)
        behind += tl.sum(parts, 0)


# ---- host


def sequence_tiles(p, x, block: int, of_keys: bool = False, by_work: bool = True, deal: int = 0):
    """The tiles of `block` queries (or keys) of a packed batch, int32 [bound, 2] of (sequence, tile), those with most work first.
    Not `by_work`: sequence after sequence, the longest first, their tiles in order, int32 [bound, 8]: sequence, tile, first token and length of both sides.
    `deal`: keys of long tiles in parts, of all tiles about so many, int32 [bound + deal, 2] of sequence and tile, part and parts; see `_deal`.

    The host knows `bound` from sizes alone; behind the last tile come (-1, 0). Work is counted by the band around the mask. Of tiles with as much
    the later queries (the earlier keys) go first: they see more where a mask that is no band is like a causal one. It is `remembered`.
    """
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    tokens, longest, before, after = p.tokens, p.len_q, left, right
    lengths = (x.q_offsets, x.k_offsets, x.q_used, x.k_used)
    if of_keys:  # which see queries from the other end of the band
        tokens, longest, before, after = p.tokens_k or p.tokens, p.len_k, right, left
        lengths = (x.k_offsets, x.q_offsets, x.k_used, x.q_used)
    most = triton.cdiv(longest, block)
    bound = min(tokens // block + p.batch, most * p.batch)
    how = {
        "BEFORE": before,
        "AFTER": after,
        "TOP_LEFT": top_left,
        "tokens": block,
        "LAST_FIRST": by_work and not of_keys,
        "BY_LENGTH": not by_work,
    }
    what, device, changing = ("tiles", bound, most, deal, *how.values()), x.q_offsets.device, p.page > 0
    return asked(lambda *lengths: remembered(what, lengths, device, lambda: _sequence_tiles(lengths, bound, most, deal, how), changing), *lengths)


def _sequence_tiles(lengths, bound: int, most: int, deal: int, how: dict):
    offsets = lengths[0]
    found = offsets.new_full((bound, FIELDS.value) if how["BY_LENGTH"] else (3, bound), -1)
    _number[(len(offsets) - 1,)](found, *lengths, bound, most, **how, BLOCK=LISTED)
    if how["BY_LENGTH"]:
        return found
    tiles, work = offsets.new_empty((bound, 2)), offsets.new_empty(bound) if deal else None
    _rank[(triton.cdiv(bound, LISTED),)](tiles, work, found, bound, BLOCK=LISTED)
    if not deal:
        return tiles
    units = offsets.new_full((bound + deal, 2), -1)
    _deal[(1,)](units, tiles, work, bound, deal, LEAST=LEAST, MOST=MOST_PARTS, BLOCK=DEALT)
    return units
