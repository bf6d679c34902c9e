"""Attention of a few queries over a paged cache on Hopper: keys and values stream through shared memory, and the stream never stops.

The work is dealt out as in `triton_decode`: a unit is one sequence and one key head, whose rows are the queries of all heads of the group; the key tiles
of all units lie in one list, of which each program takes a share of the same length, that it finds itself from the lengths on the device.
One warp copies (TMA, a page or a piece of a page at a time) round two rings that fill shared memory. It runs ahead over the ends of units, so that
a multiprocessor has 128 to 192 KiB on their way all the time, as 1 us of latency at 34 GB/s and more asks for; and it tells the computing warpgroup through
shared memory which unit comes next. That warpgroup works on 64 rows, the least that wgmma takes; most are padding, which costs nothing: memory is the floor.

The first unit of a share is read first, the last one then: those are the ones that are cut, and nobody adds parts up when memory has been read.
A unit that lies in one share is written at once. Of one that is cut, each program writes its part in float32, of the rows that there are, and
the last to arrive adds the parts up in the order of the keys (`gluon_merge`; of a batch_invariant problem a launch does, `decode_merge`): the same bits
in every run.

Bytes moved: keys and values once, and 8 rows d_v for each of at most 2 programs parts.
"""

import operator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import mods
from onchip.kernels.attention.decode_merge import LISTED, SHARE, at_once, merge
from onchip.kernels.attention.decode_tiles import items_of, reach, sequence_of
from onchip.kernels.attention.gluon_merge import Merging, add_up, arrivals_of, merging_of, part_of
from onchip.kernels.attention.gluon_shares import fetch, my_share
from onchip.kernels.attention.hopper_tiles import ROOM, by_groups, clear, hide, next_sequence, of_keys, of_rows, programs_of, scored, shrunk, top_of, weigh
from onchip.kernels.attention.tile import device_functions, ends, for_tma, outputs
from onchip.kernels.hopper import (
    advance,
    as_halves,
    block,
    describe,
    fence_async_shared,
    fill,
    fill_pages,
    forget,
    gl,
    gluon,
    hear,
    mbarrier,
    message,
    one_more,
    ring,
    start_next,
    tell,
    uniform,
    wait_for_last,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
GROWTH = gl.constexpr(8.0)  # a row's maximum is moved where it grew by more than 2^8 (Dao, FlashAttention-4)
COPIER = gl.constexpr(56)  # registers of the copying warp


class Tiles(NamedTuple):
    """Keys a tile, tiles of keys (and of values) in flight, units whose queries are held, programs, and keys of an item that a program takes whole."""

    n: int
    stages: int
    rounds: int
    programs: int
    item: int

    def __str__(self):
        shares = "" if self.item == self.n else f" of {self.item} keys at a time"
        return f"64x{self.n} tiles, {self.stages} stages, queries of {self.rounds} units, {self.programs} shares{shares}"


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for, beside a score."""

    n: int
    stages: int
    rounds: int
    item: int
    left: int
    right: int
    top_left: bool
    packed: bool
    page: int
    dim_v: int
    rows: int  # of a part
    pack: int  # places for heads side by side in the rows of a tile, a power of two
    lazily: int  # values that are scaled together, or not; 0: always all
    listed: int  # sequences that a program looks at at once
    once: bool  # whether these are all
    merging: Merging
    second: bool  # whether it begins beside the launch in front

    @property
    def parts(self):
        """Pages that hold a tile of keys."""
        return max(1, self.n // self.page)

    @property
    def tile(self):
        """Keys."""
        return self.n

    @property
    def list(self):
        """[1, listed] numbers of sequences."""
        return gl.BlockedLayout([1, self.listed // 32], [1, 32], [1, 1], [1, 0])

    @property
    def band(self):
        """As `decode_tiles` takes it."""
        return self.left, self.right, self.top_left


# ---- device: the copying warp


@gluon.jit
def _pages(entries, n, lowest, last, C: gl.constexpr):
    """The pages of the keys from `n` on, one for each lane and piece of a tile; -1, where TMA reads 0, for those of which nobody sees anything."""
    PIECE: gl.constexpr = C.n // C.parts
    at = n + PIECE * gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(entries + at // C.page, mask=(at < last) & (at + PIECE > lowest), other=-1)


@gluon.jit
def _copy_unit(given, turn, cursors, place, last, lowest, entries, C: gl.constexpr):
    """Queries, keys and values of a unit, or of a part of one, and its place, which the others are told; the cursors after it."""
    q_desc, k_desc, v_desc, rings, message, _, _ = given
    q_ring, k_ring, v_ring = rings
    q_at, k_at, v_at = cursors
    b, kv_head, n, keys, _, _, _, token = place
    KNOWN: gl.constexpr = 32 // C.parts  # tiles whose pages are looked up at once
    pages = _pages(entries, n, lowest, last, C)
    tell(message, turn, place)
    if C.packed:
        b = b * 0
    q_at = fill(q_ring, q_at, q_desc, (b, kv_head, token, 0, 0), C.rounds, 0, 0)
    for t in range(keys):
        lane = t % KNOWN * C.parts
        if (lane == 0) & (t > 0):
            pages = _pages(entries, n, lowest, last, C)
        k_at = fill_pages(k_ring, k_at, k_desc, pages, kv_head, n, C.page, C.stages, 0, 0, lane)
        v_at = fill_pages(v_ring, v_at, v_desc, pages, kv_head, n, C.page, C.stages, 0, 0, lane)
        n += C.n
    return q_at, k_at, v_at


@gluon.jit
def _copy(given, BAND: gl.constexpr, C: gl.constexpr):
    """All units of a share: the first, the last, the others. What of a unit is cut is so written long before the end, and added up while memory is read."""
    lists, table = given[5], given[6]
    lengths, offsets, batch, len_q, kv_heads, group = lists
    N: gl.constexpr = C.n
    begin, stop, each, first_b, first_before = my_share(lists, BAND, C)
    b, before, at, until, turn = first_b, first_before, begin, stop, begin * 0
    others, last_begin = stop, stop  # where the second unit begins, and the last
    cursors = ((0, 0, 0), (0, 0, 0), (0, 0, 0))
    for which in range(3):
        while at < until:  # a sequence
            len_k, queries, token = sequence_of(lengths, offsets, b, b < batch, len_q)
            len_k = uniform(len_k)
            if C.packed:
                queries, token = uniform(queries), uniform(token)
            lowest, start, end = reach(len_k, queries, BAND, N)
            items, tiles = items_of(len_k, queries, kv_heads, group, BAND, C.rows, N, C.item)
            entries = table[0] + b.to(gl.int64) * table[1]
            behind = before + items * tiles * kv_heads
            if which == 0:
                until = gl.minimum(stop, before + ((at - before) // items + 1) * items)
                others = until
            if which == 1:  # in a sequence before the last one that is behind it
                at = gl.maximum(others, before + (stop - 1 - before) // items * items)
                last_begin = at
            while at < gl.minimum(until, behind):
                kv_head = (at - before) // items
                item = at - before - kv_head * items
                count = gl.minimum(items - item, until - at)
                part = at
                if C.item != N:
                    count = count * 0 + 1
                else:
                    part = part_of(at, begin, at - item, items, each)
                n = start + item * C.item
                last = gl.minimum(n + count * C.item, end)
                place = (b, kv_head, n, gl.maximum(gl.cdiv(last - n, N), 1), gl.where(count == items, -1, part), len_k, queries, token)
                cursors = _copy_unit(given, turn, cursors, place, last, lowest, entries, C)
                turn += 1
                at += count
            before, b = behind, b + 1
        at, until = others, last_begin
        if which == 0:
            at, until = gl.maximum(others, stop - 1), stop
        b, before = first_b, first_before
    tell(given[4], turn, (gl.to_tensor(-1),))


# ---- device: the computing warpgroup


@gluon.jit
def _rows(queries, group, C: gl.constexpr, layout: gl.constexpr):
    """Of each row its query, its place among the group's heads, and whether there is such a row: row r is of query r // pack and of head r % pack."""
    r = gl.arange(0, 64, layout=layout)
    query, member = r // C.pack, r % C.pack
    return query, gl.minimum(member, group - 1), (member < group) & (query < queries)


@gluon.jit
def _attend(place, group, cursors, q, k_ring, v_ring, sinks_ptr, out, lse, parts, scale, gain, reads,
            DTYPE: gl.constexpr, SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """A unit, or a part of one; the cursors after it."""
    N: gl.constexpr = C.n
    b, kv_head, n, count, part, len_k, queries, token = place
    keys, k_full, k_empty = k_ring
    values, v_full, v_empty = v_ring
    DV: gl.constexpr = values.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    ki, kp, vi, vp = cursors
    query, member, there = _rows(queries, group, C, row_layout)
    head = kv_head * group + member
    shift = len_k - queries
    if C.top_left:
        shift = shift * 0
    call = (query, shift, b, head[:, None], queries, len_k, scale, gain, reads[0], reads[1], of_rows(query, b, head, queries, len_k, reads, ROWS))
    first_whole, whole_end = 0, len_k  # between these no row's sight ends
    if C.left >= 0:
        first_whole = shift + queries - 1 - C.left
    if C.right >= 0:
        whole_end = gl.minimum(len_k, shift + C.right + 1)

    mbarrier.wait(k_full.index(ki), kp)
    zeros = gl.zeros([64, N], gl.float32, s_layout)
    scores = warpgroup_mma(q, keys.index(ki).reshape([N, keys.shape[-1]]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    of = of_keys(n, call, KEYS, C)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(ki), count=1)
    ki, kp = advance(ki, kp, C.stages)
    scores = hide(scored(scores, n, call, of, None, SCORE, C, s_layout), n, call, of, None, C, s_layout)
    top, _shrink = top_of(scores, gl.full([64], float("-inf"), gl.float32, row_layout), gain, 0.0, 0.0)
    words, total = weigh(scores, top, gain, DTYPE, C)
    clear(v_ring, vi, vp, n, len_k, C)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    for _ in range(1, count):
        n += N
        mbarrier.wait(k_full.index(ki), kp)
        scores = warpgroup_mma(q, keys.index(ki).reshape([N, keys.shape[-1]]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(vi), vp)
        weights = gl.convert_layout(as_halves(words, DTYPE), p_layout)
        acc = warpgroup_mma(weights, values.index(vi).reshape([N, DV]), acc, is_async=True)
        of = of_keys(n, call, KEYS, C)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(ki), count=1)
        ki, kp = advance(ki, kp, C.stages)
        scores = scored(scores, n, call, of, None, SCORE, C, s_layout)
        if (n < first_whole) | (n + N > whole_end):
            scores = hide(scores, n, call, of, None, C, s_layout)
        top, shrink = top_of(scores, top, gain, 0.0, GROWTH if C.lazily > 0 else 0.0)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(vi), count=1)
        vi, vp = advance(vi, vp, C.stages)
        clear(v_ring, vi, vp, n, len_k, C)
        words, sums = weigh(scores, top, gain, DTYPE, C)
        acc, total = shrunk(acc, total, shrink, C)
        total = total + sums

    mbarrier.wait(v_full.index(vi), vp)
    weights = gl.convert_layout(as_halves(words, DTYPE), p_layout)
    acc = warpgroup_mma(weights, values.index(vi).reshape([N, DV]), acc, is_async=True)
    total = gl.convert_layout(gl.sum(total, 1), row_layout)
    shrink = gl.full([64], 1.0, gl.float32, row_layout)
    if sinks_ptr is not None:  # one more logit, which weighs nothing; of a unit in parts the merge adds it
        logit = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        logit = gl.where(part < 0, logit, float("-inf"))
        top, total, shrink = one_more(top, total, logit)
    row_lse = top + gl.log2(total)
    inverse = gl.where(total == 0.0, 0.0, shrink / total)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_empty.index(vi), count=1)
    vi, vp = advance(vi, vp, C.stages)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]

    o_query, o_member, o_there = _rows(queries, group, C, gl.SliceLayout(1, o_layout))
    dims = gl.arange(0, DV, layout=gl.SliceLayout(0, o_layout))
    batch, o_head = b.to(gl.int64), kv_head * group + o_member
    kept = o_there[:, None] & (dims < C.dim_v)[None, :]
    if part < 0:
        to = batch * out[1] + (token + o_query).to(gl.int64) * out[2] + o_head * out[3]
        gl.store(out[0] + (to[:, None] + dims[None, :]), acc.to(DTYPE), mask=kept)
        if lse[0] is not None:
            gl.store(lse[0] + batch * lse[1] + head * lse[2] + token + query, row_lse * LN2, mask=there)
    else:
        slot = part
        if C.item == N:
            slot = 2 * gl.program_id(0) + (part & 1)
        row = slot.to(gl.int64) * C.rows
        gl.store(parts[0] + ((row + o_query * group + o_member)[:, None] * DV + dims[None, :]), acc, mask=kept)
        gl.store(parts[1] + row + query * group + member, row_lse, mask=there)
        if parts[2] is not None:
            MERGING: gl.constexpr = C.merging
            add_up(part, (b, kv_head, 0, queries, token), group, out, lse, sinks_ptr, parts, C.dim_v, C.rows, MERGING)
    return ki, kp, vi, vp


@gluon.jit
def _compute(given, SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr):
    rings, message, group, sinks_ptr, out, lse, parts, scale, gain, reads = given
    tiles, q_full, q_empty = rings[0]
    ki, kp, vi, vp = 0, 0, 0, 0
    turn = 0
    b = next_sequence(message, turn)
    while b >= 0:
        place = (b, hear(message, turn, 1, 4), hear(message, turn, 2, 4), hear(message, turn, 3, 4), hear(message, turn, 4, 4),
                 hear(message, turn, 5, 4), hear(message, turn, 6, 4), hear(message, turn, 7, 4))  # fmt: skip
        forget(message, turn)
        mine = turn % C.rounds
        mbarrier.wait(q_full.index(mine), turn // C.rounds % 2)
        q = tiles.index(mine).reshape([64, tiles.shape[-1]])
        ki, kp, vi, vp = _attend(place, group, (ki, kp, vi, vp), q, rings[1], rings[2], sinks_ptr, out, lse, parts, scale, gain, reads,
                                 tiles.dtype, SCORE, ROWS, KEYS, C)  # fmt: skip
        mbarrier.arrive(q_empty.index(mine), count=1)
        turn += 1
        b = next_sequence(message, turn)


@gluon.jit(do_not_specialize=["batch", "len_q", "kv_heads", "group"])
def _decode(q_desc, k_desc, v_desc, out, lse, parts, sinks_ptr, table, lengths, offsets, reads, scale, gain, batch, len_q, kv_heads, group,
            SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, BAND: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """out, lse: pointer and strides of sequence, token and head (lse: sequence and head).

    parts: float32 [2 programs, or items, C.rows, width of the values] and the LSE of their rows in base 2: the first of a program's at twice its number,
    its last, if that is of another unit, behind it.
    """
    fetch(lengths, batch, table, 4)
    if not C.second:
        wait_for_last()
    start_next()  # who merges reads lengths too
    rings = (ring(q_desc, C.rounds, 1), ring(k_desc, C.stages, 1, C.parts), ring(v_desc, C.stages, 1, C.parts))
    fence_async_shared()
    told = message(1)
    lists = (lengths, offsets, batch, len_q, kv_heads, group)
    given = (rings, told, group, sinks_ptr, out, lse, parts, scale, gain * LOG2E, reads)
    copied = (q_desc, k_desc, v_desc, rings, told, lists, table)
    gl.warp_specialize([(_compute, (given, SCORE, ROWS, KEYS, C)), (_copy, (copied, BAND, C))], [1], [COPIER])
    if C.second:  # noqa: SIM102 (device code)
        if gl.program_id(0) == gl.num_programs(0) - 1:
            wait_for_last()  # whoever waits for this one, waits for both


# ---- host

KEYS = ((64, 128), (128, 64), (256, 32))  # of a tile, 32 KiB with its values, by head dimension up to
EACH = ((128, 2), (256, 1))  # programs a multiprocessor: 32x4k at d128 131.8 us (one: 137.2), d256 133.5 (two: 139.1)
# Of a unit, by the most keys: one program adds 16 up, a launch 32. (1x8k 15.7 us by 32, 14.3 by 16; 1x32k 38.5, 38.4; 1x128k 128.3, 131.1)
MOST_PARTS = ((1 << 15, 16), (1 << 30, 32))
UNEVEN = (
    7  # eighths of all places: fewer programs than that are one a multiprocessor, since a launch that begins early fills up those that are half empty first
)
LAZILY = ((64, 0), (256, 64))
AT_ONCE = 256  # lengths that a program looks at at once: eight a lane
# Of a thread, by head dimension up to. Half of all leave room for two programs, or for the merge's before this kernel's end.
REGISTERS = ((128, 128), (256, 208))
STAGES = 16  # of a ring at most


def configs(p: Attention, device: Device) -> list[Tiles]:
    """As many tiles in flight as shared memory holds, of two programs a multiprocessor up to d128: one's loads go on while the other ends a unit."""
    wide = max(block(p.dim), block(p.value_dim))
    return [tiles_of(p, device, pick(KEYS, wide), pick(EACH, wide))]


def tiles_of(p: Attention, device: Device, n: int, each: int, rounds: int = 2) -> Tiles:
    """Tiles of `n` keys for `each` programs a multiprocessor, which share its memory."""
    width, width_v = block(p.dim), block(p.value_dim)
    item = SHARE if "batch_invariant" in p.extras else n
    room = ROOM // each - (each - 1) * (1 << 10)  # of each program 1 KiB is the system's
    stages = (room - rounds * 64 * width * p.dtype.itemsize) // (n * (width + width_v) * p.dtype.itemsize)
    units = p.batch * p.kv_heads
    sms = programs_of(device)
    programs = min(each * sms, pick(MOST_PARTS, p.len_k) * units, units * max(1, triton.cdiv(p.len_k, item)))
    if sms < programs < each * sms * UNEVEN // 8:
        programs = sms
    return Tiles(n, min(STAGES, stages), rounds, programs, item)


def launch(p: Attention, tiles: Tiles, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, dim]`, or `[tokens, heads, dim]` with `x.q_offsets`; cache a PagedKV, as `ops.attention.paged_attention` passes them.

    Queries and pools that TMA does not take (rows that are not aligned to 16 bytes) are copied first, pools with a warning.
    """
    packed = x.q_offsets is not None
    out, lse = outputs(p, x, q, return_lse)
    if out.numel() == 0 or p.len_k == 0:
        return (out, lse) if return_lse else out
    pack, rows = triton.next_power_of_2(p.group), max(16, triton.next_power_of_2(p.len_q * p.group))
    width, width_v = block(p.dim), block(p.value_dim)
    left, right, top_left = ends(p.mask)
    right = right if p.len_q > 1 or top_left else -1  # one query sees to the end
    pools = [q.transpose(0, 1)[None] if packed else q.transpose(1, 2), cache.k.transpose(1, 2), cache.v.transpose(1, 2)]  # [.., heads, len, dim]
    queries, k, v = made = [for_tma(pools[0]), *(for_tma(t, "hopper_decode") for t in pools[1:])]
    if x.beside is not None:
        tiles = tiles._replace(programs=min(tiles.programs, x.beside.sms * pick(EACH, max(width, width_v))))
    arrivals, new = arrivals_of(q, tiles.programs, p.batch * p.kv_heads) if tiles.item == tiles.n else (None, False)
    second = x.beside is not None and x.beside.second and not new and all(map(operator.is_, pools, made))  # nothing is launched before it
    shape = Shape(
        tiles.n, tiles.stages, tiles.rounds, tiles.item, left, right, top_left, packed, p.page, p.value_dim, rows, pack, pick(LAZILY, width_v),
        32 if p.batch <= 32 else AT_ONCE, p.batch <= AT_ONCE, merging_of(p.len_q * p.group, width_v, 4), second,
    )  # fmt: skip
    k_rows = tiles.n // shape.parts
    most = max(1, triton.cdiv(p.len_k, tiles.item))  # items of a unit
    places = 2 * tiles.programs if tiles.item == tiles.n else p.batch * p.kv_heads * most
    parts = (*(torch.empty((places, rows, *columns), dtype=torch.float32, device=q.device) for columns in ((width_v,), ())), arrivals)
    (of_row, of_key, _, score), reads, scale, gain = device_functions(p, x, q, partial(mods.split_functions, of_row=True))
    strides = lambda t: (t, *((0,) * packed), *t.stride()[:-1])  # noqa: E731
    o, e = strides(out), (None, 0, 0) if lse is None else (lse, 0, lse.stride(0)) if packed else (lse, *lse.stride()[:2])
    table = cache.page_table
    sinks = None if x.sinks is None else x.sinks.contiguous()
    sizes = (p.batch, p.kv_heads, p.group, p.len_q)
    _decode[(tiles.programs,)](
        describe(by_groups(queries, p.kv_heads), 64 // pack, pack, width), describe(k, k_rows, width), describe(v, k_rows, width_v), o, e, parts, sinks,
        (table, table.stride(0), table.shape[1]), cache.lengths, x.q_offsets,
        reads, scale, gain, p.batch, p.len_q, p.kv_heads, p.group,
        SCORE=score, ROWS=of_row, KEYS=of_key, BAND=shape.band, C=shape, num_warps=4, maxnreg=pick(REGISTERS, max(width, width_v)), launch_pdl=True,
    )  # fmt: skip
    by_unit = tiles.item != tiles.n or p.batch * p.kv_heads <= tiles.programs
    if arrivals is None and (tiles.programs > 1 or tiles.item != tiles.n):
        height = at_once(p.batch * p.kv_heads, tiles.programs, min(rows, p.len_q * p.group), width_v, tiles.item != tiles.n)
        merge[(p.batch * p.kv_heads if by_unit else tiles.programs - 1, triton.cdiv(min(rows, p.len_q * p.group), height["HEIGHT"]))](
            o, e, sinks, *parts[:2], cache.lengths, x.q_offsets, *sizes, tiles.programs, p.kv_heads,
            DV=p.value_dim, ROWS=rows, BLOCK_N=tiles.n, BLOCK_DV=width_v, ITEM=tiles.item, BATCH=min(LISTED, triton.next_power_of_2(p.batch)),
            BAND=shape.band, EARLY=True, BY_UNIT=by_unit, **height, num_warps=2, launch_pdl=True,
        )  # fmt: skip
    return (out, lse) if return_lse else out
