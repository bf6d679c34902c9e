"""Attention of a few queries over a paged cache, quantised or not, packed or not, dealt out evenly: the cache is read once, so memory is the floor.

Flash-Decoding (Dao et al., 2023) with the work dealt out as in stream-K (Osama et al., 2023). A unit is one sequence, one key head and one
tile of rows: all queries of the group, so that each key read from memory serves them all on tensor cores. The key tiles of all units lie in
one list, of which each of a fixed number of programs, about two a multiprocessor, takes a share of the same length: sequences of uneven
lengths take as long as even ones. A program finds its share itself, by sums over the lengths on the device, and the grid depends on the
Problem alone: a CUDA graph may capture the call and the lengths may then change.

A unit that lies in one share is written at once. Of one that is cut, each program writes its part in float32, and `merge` adds the parts
up in the order of the keys: the same bits in every run. It starts while the first kernel runs (programmatic dependent launch) and waits for
its end. (On a Hopper GPU the last program to arrive merges: `gluon_merge`.)

Each warp has keys of its own (the first axis of a tile): maxima, sums and weights stay in its registers, and the loop waits for nothing
but keys. The warps' results are added up once a unit. Wide heads and many rows have no registers for that: there warps share a tile.

Quantised keys and values are read as codes and become float16 in registers. A key's scale and zero go to its scores,
s = scale (q . code) + zero sum(q), a value's to its weight.

Bytes moved: keys and values once, and 8 rows d_v for each of at most 2 programs parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.formats import Codes, Format
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.kernels.attention import mods, texts
from onchip.kernels.attention.decode_merge import LISTED, SHARE, at_once, merge
from onchip.kernels.attention.decode_tiles import (
    ROOM,
    add_values_of_codes,
    beside,
    columns_of,
    flipped,
    for_warps,
    items_of,
    keys_of,
    locate,
    of_columns,
    of_rows,
    parts_of_warps,
    power_of_two,
    queries_of_codes,
    reach,
    scales_of,
    scores_of_codes,
    seen_by_band,
    sequence_of,
    share_length,
    share_of,
    total_work,
)
from onchip.kernels.attention.tile import LN2, LOG2E, adjacent, block, ends, fast, online_softmax, page_slots, sink, tf32


class Shares(NamedTuple):
    """How a call is dealt out.

    n, programs, warps   keys a tile, programs, and warps of each.        tiles   of keys that a program waits for at once.
    apart     whether each warp has keys of its own.        item   keys of an item of the list that a program takes whole; n where the batch may decide.
    arch      of an NVIDIA GPU, else 0: from 90 on the merge starts early.
    """

    n: int
    programs: int
    warps: int
    tiles: int
    apart: bool
    item: int
    arch: int

    def __str__(self):
        shares = "" if self.item == self.n else f" of {self.item} keys at a time"
        return f"{self.n} keys a tile, {self.programs} shares{shares}, {self.warps} warps{' apart' * self.apart}, {self.tiles} tiles in flight"


# ---- device


@triton.jit(do_not_specialize=["batch", "kv_heads", "group", "len_q"])
def _partial(q, k, v, k_scales, v_scales, channel_ptr, out, lse, sinks_ptr, part_ptr, part_lse_ptr, table_ptr, table_row, lengths_ptr, offsets_ptr,
             reads, scale, gain, batch, kv_heads, group, len_q,
             D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             PAGE: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr, WARPS: tl.constexpr, BAND: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
             KEYS: tl.constexpr, VALUES: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """A share of the list. q, k, v, out: pointer and strides, of k and v in ALIGN numbers; KEYS, VALUES: see `kind_of`, None where there are no codes.

    Parts go to part [2 programs, or items, ROWS, BLOCK_DV] and part_lse [.., ROWS], which is in base 2: the first of a program to
    twice its number, its last, if that is another unit, behind it.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    total, longest = total_work(lengths_ptr, offsets_ptr, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
    each = share_length(total, longest, programs)
    begin, stop = share_of(program, total, each), share_of(program + 1, total, each)
    b, before = locate(lengths_ptr, offsets_ptr, begin, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
    dims, dims_v, own = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), keys_of(WARPS, BLOCK_N)
    at = begin
    while at < stop:  # a sequence
        len_k, queries, token = sequence_of(lengths_ptr, offsets_ptr, b, b < batch, len_q)
        lowest, start, end = reach(len_k, queries, BAND, BLOCK_N)
        items, tiles = items_of(len_k, queries, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM)
        shift = len_k - queries
        if BAND[2]:
            shift = shift * 0
        pages_ptr = table_ptr + b.to(tl.int64) * table_row
        until = tl.minimum(stop, before + items * tiles * kv_heads)
        while at < until:  # a unit, or a part of one
            unit = (at - before) // items
            item = at - before - unit * items
            count = tl.minimum(items - item, until - at)
            if ITEM != BLOCK_N:
                count = count * 0 + 1
            kv_head = unit // tiles
            r = (unit - kv_head * tiles) * ROWS + tl.arange(0, ROWS)
            query, member = r // group, r % group  # the queries of all heads of the group, one after the other
            head = kv_head * group + member
            there = query < queries
            q_rows = b.to(tl.int64) * q[1] + (token + query).to(tl.int64) * q[2] + head * q[3]
            top = tl.full([WARPS, ROWS] if WARPS > 1 else [ROWS], float("-inf"), tl.float32)
            sums = tl.zeros([WARPS, ROWS] if WARPS > 1 else [ROWS], tl.float32)
            acc = ()
            zeros = ()
            peak = -100 + (tl.arange(0, WARPS) * 0 if WARPS > 1 else at * 0)
            if KEYS is None:
                q_tile = for_warps(tl.load(q[0] + q_rows[:, None] + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0), WARPS)
                acc = (tl.zeros([WARPS, ROWS, BLOCK_DV] if WARPS > 1 else [ROWS, BLOCK_DV], tl.float32),)
            else:
                channel = channel_ptr
                if channel_ptr is not None:
                    channel = channel_ptr + kv_head * D
                q_tile, q_sums, q_factor = queries_of_codes(q[0], q_rows, there, channel, D, BLOCK_D, KEYS, WARPS)
                GROUPS: tl.constexpr = VALUES[1]
                UNITS: tl.constexpr = VALUES[6]
                for _ in tl.static_range(VALUES[2] * VALUES[3]):
                    acc = acc + (tl.zeros([WARPS, ROWS, UNITS] if WARPS > 1 else [ROWS, UNITS], tl.float32),)  # noqa: RUF005
                if v_scales[4] is not None:
                    for _ in tl.static_range(GROUPS):
                        zeros = zeros + (sums,)  # noqa: RUF005
            first = start + item * ITEM
            last = tl.minimum(first + count * ITEM, end)
            h, i = head[:, None], query[:, None]
            for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
                cols = n + own
                pages, slots = page_slots(pages_ptr, n, cols, last, PAGE, BLOCK_N)
                near = cols < last
                if BAND[0] >= 0:  # pages before the window may be another sequence's by now
                    near = near & (cols >= lowest)
                k_rows = (pages * k[1] + slots * k[2] + kv_head * k[3]) * ALIGN
                if KEYS is None:
                    keys = tl.load(k[0] + of_rows(k_rows) + dims, mask=of_rows(near) & (dims < D), other=0.0)
                    scores = tl.dot(q_tile, flipped(keys), input_precision=PRECISION)
                else:
                    k_scale, k_zero = scales_of(k_scales, pages, slots, kv_head, near, KEYS)
                    scores = scores_of_codes(q_tile, q_sums, k[0], k_rows, near, k_scale, k_zero, KEYS, FAST) * of_rows(q_factor)
                factor = scale * LOG2E
                if SCORE is not None:
                    scores = SCORE(scores * scale, b, h, i, of_columns(cols), queries, len_k, reads[1])
                    factor = gain * LOG2E
                if MASK is not None:  # a key that no row sees is padding, and may hold anything: so may its value
                    seen = MASK(b, h, i, of_columns(cols), queries, len_k, reads[0]) & of_columns(near) & (i < queries)
                    shown = tl.max(seen.to(tl.int32), len(seen.shape) - 2) > 0
                    scores = tl.where(seen, scores, float("-inf"))
                else:
                    scores = seen_by_band(scores, query + shift, cols, near, BAND)
                weights, shrink, top, sums = online_softmax(scores, top, sums, factor, True)
                v_rows = (pages * v[1] + slots * v[2] + kv_head * v[3]) * ALIGN
                if KEYS is None:
                    values = tl.load(v[0] + of_rows(v_rows) + dims_v, mask=of_rows(near) & (dims_v < DV), other=0.0)
                    if MASK is not None:
                        values = tl.where(of_rows(shown), values, 0.0)
                    acc = (tl.dot(weights.to(values.dtype), values, acc[0] * of_rows(shrink), input_precision=PRECISION),)
                else:
                    v_scale, v_zero = scales_of(v_scales, pages, slots, kv_head, near & shown if MASK is not None else near, VALUES)
                    acc, zeros, peak = add_values_of_codes(acc, zeros, peak, weights, shrink, v[0], v_rows, near, v_scale, v_zero, VALUES, WARPS, FAST)

            if WARPS > 1:
                top, shares = parts_of_warps(top)
                sums = tl.sum(sums * shares, 0)
            whole = count == items
            grown = tl.full([ROWS, 1], 1.0, tl.float32)
            logit = tl.full([ROWS], float("-inf"), tl.float32)
            blind = sums == 0.0
            if sinks_ptr is not None:  # of a unit in parts the merge adds it
                logit = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32)
                grown, top, sums = sink(grown, top, sums, tl.where(whole, logit, float("-inf")))
            grown = (
                grown * tl.where(sums == 0.0, 0.0, tl.math.div_rn(1.0, sums))[:, None]
            )  # the plain quotient may be two ulps off, a float32 result's share of error
            row_lse = top + tl.math.log2(sums)  # of a row that sees no key the sink itself, not rounded in another base
            place = (at if ITEM != BLOCK_N else 2 * program + (at > begin).to(tl.int32)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            o_rows = b.to(tl.int64) * out[1] + (token + query).to(tl.int64) * out[2] + head * out[3]
            for piece in tl.static_range(1 if KEYS is None else VALUES[2] * VALUES[3]):
                result = acc[piece]
                if KEYS is None:
                    columns, used = dims_v, dims_v < DV
                else:
                    columns, used = columns_of(piece, VALUES)
                    unit = power_of_two(peak - ROOM + ((20 if piece % VALUES[3] > 1 else 24) if VALUES[8] else 0))
                    result *= of_rows(beside(unit, WARPS)) if WARPS > 1 else unit
                    if v_scales[4] is not None:
                        result += of_rows(zeros[VALUES[7][piece]])
                if WARPS > 1:
                    result = tl.sum(result * of_rows(shares), 0)
                result = result * grown
                if whole:
                    to = out[0] + o_rows[:, None] + columns[None, :]
                    tl.store(to, result.to(out[0].dtype.element_ty), mask=there[:, None] & used[None, :])
                else:
                    tl.store(part_ptr + place[:, None] * BLOCK_DV + columns[None, :], result, mask=used[None, :])
            if whole:
                if lse[0] is not None:
                    tl.store(lse[0] + b.to(tl.int64) * lse[1] + head * lse[2] + token + query, tl.where(blind, logit, row_lse * LN2), mask=there)
            else:
                tl.store(part_lse_ptr + place, row_lse)
            at += count
        before += items * tiles * kv_heads
        b += 1


# ---- host


IN_FLIGHT = 96 << 10  # bytes of keys and values that a program waits for at once, of two a multiprocessor
QUERIES = 32 << 10  # bytes of queries that it keeps in shared memory; more rows go to other units, which read the keys again


def row_tiles(p: Attention) -> tuple[int, int]:
    """Rows of a tile, and how many tiles hold the queries of a group; 16 is the least a product takes."""
    rows = p.len_q * p.group
    tile = max(16, min(64, triton.next_power_of_2(rows), QUERIES // (block(max(p.dim, p.value_dim)) * p.dtype.itemsize)))
    return tile, triton.cdiv(rows, tile)


def kind_of(given: str, dim: int) -> tuple | None:
    """How a row of codes is cut: format, groups, blocks, planes of a block, the column where high bits begin, int16 of a block, and of its tile,
    the group of each piece, which is a plane of a block, and whether codes are integers. Of two codes in an int16 the even one is in plane 0, or 2 of the
    high bits, the odd one in 1 or 3."""
    if not given:
        return None
    form = Format.of(given)
    groups, planes = form.groups(dim), 4 if form.name == "int4" else 2
    blocks = max(1, groups // (planes // 2))
    used = form.columns(dim) // 2 // blocks
    group_of = tuple(0 if groups == 1 else plane // 2 * blocks + b for b in range(blocks) for plane in range(planes))
    return form.name, groups, blocks, planes, dim // 2, used, max(16, triton.next_power_of_2(used)), group_of, form.has_zero


def bytes_of(p: Attention) -> int:
    """Of a key and its value as tiles hold them."""
    if not p.kv:
        return (block(p.dim) + block(p.value_dim)) * p.dtype.itemsize
    kinds = [kind_of(p.kv, dim) for dim in (p.dim, p.value_dim)]
    return sum(2 * blocks * units for _, _, blocks, _, _, _, units, *_ in kinds)


def configs(p: Attention, device: Device) -> list[Shares]:
    """Two programs a multiprocessor, with as many tiles in flight as shared memory holds."""
    width, size = max(block(p.dim), block(p.value_dim)), bytes_of(p)
    rows, tiles = row_tiles(p)
    half = p.dtype.itemsize == 2
    apart = half and device.kind == "cuda" and rows * width <= 2048  # 64 registers a thread for a warp's own sums
    warps = 4 if width <= 256 else 8
    n = 64 if half else 32 if size <= 1024 else 16  # float32 is multiplied on FMA units: more keys a tile spill
    if apart and size <= 256:  # sums shrink once a tile: with 128 keys that and addresses cost half as many instructions a number
        n = 128
    while n > 16 and not apart and 2 * n * size > device.shared_memory // 2:
        n //= 2
    most = device.shared_memory // 2 - rows * width * p.dtype.itemsize * (not apart) - (4 << 10)  # page numbers, and what is exchanged
    flight = max(1, min(4, IN_FLIGHT // (n * size), most // (n * size)))
    alone = "batch_invariant" in p.extras
    item = SHARE if alone else n
    programs = min(2 * device.sms, p.batch * p.kv_heads * tiles * max(1, triton.cdiv(p.len_k, item)))
    return [Shares(n, programs, warps, flight, apart, item, device.arch if device.kind == "cuda" else 0)]


def launch(p: Attention, how: Shares, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, dim]`, or `[tokens, heads, dim]` with `x.q_offsets`; cache a PagedKV, as `ops.attention.paged_attention` passes them."""
    q = adjacent(q)
    packed = x.q_offsets is not None
    out = torch.empty((*q.shape[:-1], p.value_dim), dtype=q.dtype, device=q.device)
    lse = None
    if return_lse:
        lse = torch.empty((p.heads, len(q)) if packed else (p.batch, p.heads, p.len_q), dtype=torch.float32, device=q.device)
    (rows, tiles), width_v = row_tiles(p), block(p.value_dim)
    most_units = p.kv_heads * tiles
    places = 2 * how.programs if how.item == how.n else p.batch * most_units * max(1, triton.cdiv(p.len_k, how.item))
    part = torch.empty((places, rows, width_v), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((places, rows), dtype=torch.float32, device=q.device)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    sees = mods.mask_function(p.mask.text) if isinstance(p.mask, Traced) else None
    scale, gain, score = x.scale, 1.0, None
    if p.score is not None or scale <= 0:  # the plain kernel takes the largest score before it scales
        text, before, gain = texts.fold(p.score.text if p.score is not None else texts.IDENTITY)
        scale *= before
        score, _ = mods.score_functions(text, fast=fast(q))
    k, v = (_numbers(pool) for pool in (cache.k, cache.v))
    align = _alignment(k, v)
    sinks = None if x.sinks is None else x.sinks.contiguous()
    channel = None if getattr(cache.k, "channel", None) is None else cache.k.channel.contiguous()
    strides = lambda t: (t, *((0,) * packed), *t.stride()[:-1])  # noqa: E731
    o, e = strides(out), (None, 0, 0) if lse is None else (lse, 0, lse.stride(0)) if packed else (lse, *lse.stride()[:2])
    lists = (cache.lengths, x.q_offsets)
    sizes = (p.batch, p.kv_heads, p.group, p.len_q)
    shared = {
        "DV": p.value_dim, "ROWS": rows, "BLOCK_N": how.n, "BLOCK_DV": width_v, "ITEM": how.item, "BATCH": min(LISTED, triton.next_power_of_2(p.batch)),
        "BAND": (left, right if p.len_q > 1 or top_left else -1, top_left), "EARLY": how.arch >= 90 and q.device.type != "cpu",
    }  # fmt: skip
    early = {"launch_pdl": True} if shared["EARLY"] else {}
    _partial[(how.programs,)](
        strides(q), _operand(k, align), _operand(v, align), _scales(cache.k), _scales(cache.v), channel, o, e, sinks, part, part_lse,
        cache.page_table, cache.page_table.stride(0), *lists, (mods.captured(x.mask), mods.captured(x.score)), scale, gain, *sizes,
        **shared, D=p.dim, BLOCK_D=block(p.dim), PAGE=p.page, WARPS=how.warps if how.apart else 1, MASK=sees, SCORE=score,
        KEYS=kind_of(p.kv, p.dim), VALUES=kind_of(p.kv, p.value_dim), ALIGN=align, FAST=fast(q) and how.arch >= 89, PRECISION=tf32(p),
        STAGES=_stages(how), num_warps=how.warps, num_stages=_stages(how),
    )  # fmt: skip
    by_unit = how.item != how.n or p.batch * most_units <= how.programs
    if how.programs > 1 or how.item != how.n:
        height = at_once(p.batch * most_units, how.programs, min(rows, p.len_q * p.group), width_v, how.item != how.n)
        merge[(p.batch * most_units if by_unit else how.programs - 1, triton.cdiv(min(rows, p.len_q * p.group), height["HEIGHT"]))](
            o, e, sinks, part, part_lse, *lists, *sizes, how.programs, most_units, **shared, BY_UNIT=by_unit, **height, num_warps=4, **early
        )
    return (out, lse) if return_lse else out


def _stages(how: Shares) -> int:
    """Triton's number for so many tiles in flight: it gives page numbers, which come first, as many stages as keys."""
    return 1 + 2 * how.tiles


def _numbers(pool):
    """Keys or values as they are loaded: two codes in an int16."""
    return pool.codes.view(torch.int16) if isinstance(pool, Codes) else adjacent(pool, "triton_shares")


def _alignment(*pools) -> int:
    """How many numbers, up to 16 bytes, every row of all pools begins at a multiple of."""
    align = 16 // pools[0].dtype.itemsize
    while any(stride % align for pool in pools for stride in pool.stride()[:3]):
        align //= 2
    return align


def _operand(pool, align: int) -> tuple:
    return (pool, *(stride // align for stride in pool.stride()[:3]))


def _scales(pool) -> tuple | None:
    """Scale and zero of codes, each with its strides."""
    if not isinstance(pool, Codes):
        return None
    zero = (None, 0, 0, 0) if pool.zero is None else (pool.zero, *pool.zero.stride()[:3])
    return (pool.scale, *pool.scale.stride()[:3], *zero)
