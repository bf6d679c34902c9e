"""Attention of a few queries over a paged cache: keys and values, quantised or not, go from memory straight to the registers that multiply them.

Flash-Decoding (Dao et al., 2023), dealt out as in `triton_shares`: a unit is one sequence, one key head and one tile of rows (the queries of all heads
of the group); the key tiles of all units lie in one list, of which each program takes a share of the same length, that it finds itself from the lengths.

Each warp has keys of its own, so that the loop has no barrier, and reads them 16 bytes a thread in the order in which `mma.sync` wants them:

    S^T [keys, rows]      = K [keys, d] Q^T        K is the left operand: thread (g, t), one of 8 x 4, has key g, and 16 bytes of columns beginning at 16 t
    O^T [columns, rows]  += V^T [columns, keys] P  V^T is the left operand: thread (g, t) has keys 2 t and 2 t + 1, and 16 bytes of columns from 16 g on

A product does not mind in which order its columns or its rows come, as long as queries and results are taken in the same. Rows are the narrow side, of 8 or
16: little of a product is padding, and sums of 128 columns take 32 registers. Of 4 rows at most, where scores are much of the work, those of two steps stand
side by side in a product's columns, and what each score takes is done half as often; each step has sums of its own, as if it were another warp's, and its
values meet its own weights beside zeros for the others. Nothing goes through shared memory until a unit ends. A warp has a whole tile of 4 KiB of keys and as
much of values on their way while it works on the last one; eight such warps a multiprocessor keep memory busy. A unit's beginning and its end have nothing on
their way, and a program's warps wait for each other there: where units are many, programs are of two warps, or of one.

A code becomes a float16 on its way. Of an integer the bits are its mantissa (a float16 that is not normal, code 2^-24: exact, and nothing to subtract);
a key's scale and zero go to its scores, s = scale (q . code) + zero sum(q), a value's to its weight.

A unit that lies in one share is written at once. Of one that is cut, each program writes its part in float32, and the last to arrive adds the parts up
in the order of the keys (`gluon_merge`; of a batch_invariant problem a launch does, `decode_merge`): the same bits in every run.

Bytes moved: keys and values once for each 16 rows, and 8 rows d_v for each of at most 2 programs parts.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onchip.core.device import Device
from onchip.core.formats import Codes, Format
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.decode_merge import LISTED, SHARE, at_once, merge
from onchip.kernels.attention.decode_tiles import ROOM, exponent, items_of, power_of_two, reach, sequence_of
from onchip.kernels.attention.gluon_merge import add_up, arrivals_of, merging_of, part_of
from onchip.kernels.attention.gluon_shares import fetch, my_share
from onchip.kernels.attention.hopper_tiles import programs_of
from onchip.kernels.attention.register_tiles import (
    Shape,
    base_of,
    begin_loads,
    first_of,
    key_operands,
    load_keys,
    load_scales,
    load_values,
    number,
    pages_of,
    queries_of,
    row_of,
    value_operands,
    weight_operands,
)
from onchip.kernels.attention.tile import ends, outputs, whole
from onchip.kernels.hopper import gl, gluon, one_more, start_next, uniform, wait_for_last
from onchip.kernels.launch import starts_early

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


class Shares(NamedTuple):
    """Keys of a warp and step, warps of a program, programs, rows of a tile and such tiles, and keys of an item that a program takes whole."""

    n: int
    warps: int
    programs: int
    rows: int
    tiles: int
    item: int

    def __str__(self):
        shares = "" if self.item == self.n * self.warps else f" of {self.item} keys at a time"
        return f"{self.n} keys x {self.rows} rows a warp, {self.programs} shares{shares}, {self.warps} warp{'s' * (self.warps > 1)}"


# ---- device: rows, and who sees what


@gluon.jit
def _sums(x, C: gl.constexpr):
    """[warps, 16, abreast, rows] -> [warps, 8, abreast, rows]: what a thread adds up alone."""
    return gl.sum(x.reshape([C.warps, 2, 8, C.abreast, C.rows]), 1)


@gluon.jit
def _beside(x, total):
    """Factors of rows [warps, abreast, rows] as `total`, made by `_sums`, wants them."""
    return gl.convert_layout(x, gl.SliceLayout(1, total.type.layout))[:, None, :, :]


@gluon.jit
def _of_columns(x, C: gl.constexpr):
    """Factors of rows [warps, abreast, rows] beside sums [warps, .., columns of a product]."""
    return gl.convert_layout(x.reshape([C.warps, C.columns]), gl.SliceLayout(1, C.product))[:, None, :]


@gluon.jit
def _of_scores(x, C: gl.constexpr):
    """A product [warps, 16, columns] as [warps, 16, abreast, rows]."""
    return gl.convert_layout(x.reshape([C.warps, 16, C.abreast, C.rows]), C.scores)


@gluon.jit
def _key_of(at, C: gl.constexpr):
    """Of a step's keys, counted as a product's rows are, how far they lie behind its first."""
    return at + at // 8 * (8 * C.abreast - 8)


@gluon.jit
def _seen(n, step: gl.constexpr, sight, C: gl.constexpr):
    """The keys of the steps abreast from `step` on, [warps, 16, abreast], and whether somebody sees them."""
    OF: gl.constexpr = gl.SliceLayout(3, C.scores)
    AT: gl.constexpr = C.eight(step, 0)
    at = first_of(n, AT, C, gl.SliceLayout(2, OF)) + _key_of(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF))), C)[None, :]
    at = at[:, :, None] + 8 * gl.arange(0, C.abreast, layout=gl.SliceLayout(0, gl.SliceLayout(1, OF)))[None, None, :]
    return at, (at >= sight[0]) & (at < sight[1])


@gluon.jit
def _hidden(scores, n, step: gl.constexpr, query, shift, sight, C: gl.constexpr):
    """-inf where a row does not see a key."""
    at, seen = _seen(n, step, sight, C)
    at, seen = at[:, :, :, None], seen[:, :, :, None]
    rows = (query + shift)[None, None, :][:, None, :, :]
    if C.right >= 0:
        seen = seen & (at <= rows + C.right)
    if C.left >= 0:
        seen = seen & (at >= rows - C.left)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _cleared(words, n, step: gl.constexpr, odd: gl.constexpr, sight, C: gl.constexpr):
    """Words of values [warps, 8, words] with 0 where nobody sees the key: what lies there may be NaN, and 0 times NaN is NaN."""
    OF: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    AT: gl.constexpr = C.eight(step, 0)
    at = first_of(n, AT, C, OF) + _key_of(odd + 2 * gl.arange(0, 8, layout=gl.SliceLayout(0, OF)), C)[None, :]
    seen = (at >= sight[0]) & (at < sight[1])
    return gl.where(seen[:, :, None], words, 0)


# ---- device: a unit


@gluon.jit
def _attend(unit, q, k, v, scales, channel, out, lse, sinks, parts, entries, gain, group, C: gl.constexpr):
    """A unit, or a part of one, from its queries to its results."""
    b, kv_head, row, first, last, whole, part, len_k, queries, token, lowest = unit
    W: gl.constexpr = C.warps
    R: gl.constexpr = C.rows
    A: gl.constexpr = C.abreast
    N: gl.constexpr = C.columns
    DV: gl.constexpr = C.dim_v // C.planes
    STEPS: gl.constexpr = C.n // 16
    DTYPE: gl.constexpr = gl.float16 if C.kind != "bf16" else gl.bfloat16
    KEYS: gl.constexpr = C.keys
    VALUES: gl.constexpr = C.values
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, C.keys)
    OF_VALUES: gl.constexpr = gl.SliceLayout(2, C.values)
    product: gl.constexpr = C.product
    of_row: gl.constexpr = gl.SliceLayout(1, C.scores)
    rows_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, of_row))
    K_TOKEN: gl.constexpr = C.k_steps[0]
    V_TOKEN: gl.constexpr = C.v_steps[0]
    query = row_of(row + gl.arange(0, R, layout=rows_layout), kv_head, group)[0]
    shift = len_k - queries
    if C.top_left:
        shift = shift * 0
    first_whole, whole_end = lowest, last  # between these all rows see all keys
    if C.left >= 0:
        first_whole = shift + queries - 1 - C.left
    if C.right >= 0:
        whole_end = gl.minimum(last, shift + C.right + 1)
    sight = (lowest, last)

    k_base, v_base = base_of(k, kv_head, 1, K_TOKEN, C, KEYS), base_of(v, kv_head, 2, V_TOKEN, C, VALUES)
    pages = pages_of(entries, k[1], first, sight, C, OF_KEYS, OF_VALUES)
    keys, values, of_keys, of_values = (), (), (), ()
    for s in gl.static_range(STEPS):
        keys = keys + (load_keys(k_base, k, pages[s], first, s, C, KEYS),)  # noqa: RUF005
        values = values + (load_values(v_base, v, pages[s], first, s, C, VALUES),)  # noqa: RUF005
        if s % A == 0:
            of_keys = of_keys + (load_scales(scales, 0, kv_head, pages, first, s, C),)  # noqa: RUF005
            of_values = of_values + (load_scales(scales, 1, kv_head, pages, first, s, C),)  # noqa: RUF005
    pages = pages_of(entries, k[1], first + C.tile, sight, C, OF_KEYS, OF_VALUES)

    low, high, factor, q_sums = queries_of(q, (b, kv_head, row, queries, token), group, channel, DTYPE, C)
    gain = factor * (gain * (16777216.0 if C.zeros else 1.0))  # 2^24: an integer code is 2^-24 of itself
    q_sums = q_sums * 5.9604644775390625e-08
    top = gl.full([W, A, R], float("-inf"), gl.float32, of_row)
    nothing = gl.zeros([W, 16, N], gl.float32, product)
    total = _sums(_of_scores(nothing, C), C)
    zeros = total
    peak = gl.full([W, A], -100, gl.int32, gl.SliceLayout(1, gl.SliceLayout(3, C.scores)))
    acc = gl.zeros([W, DV, N], gl.float32, product)
    more = acc
    first_abreast = (gl.arange(0, A, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, C.scores)))) == 0)[None, None, :][:, :, :, None]
    n = first
    while n < last:
        new = n + C.tile
        raw, scores, old, keys, of_old, of_keys = (), (), keys, (), of_keys, ()
        for s in gl.static_range(STEPS):
            planes = key_operands(old[s], DTYPE, C)
            x = mma_v2(planes[0], low, nothing)
            if C.planes == 2:
                x = mma_v2(planes[1], high, x)
            raw = raw + (_of_scores(x, C),)  # noqa: RUF005
        for s in gl.static_range(STEPS // A):
            x = raw[A * s]
            if A == 2:
                x = gl.where(first_abreast, x, raw[2 * s + 1])
            if C.codes:
                x = x * number(of_old[s][0])[:, :, :, None]
                if C.zeros:
                    x += number(of_old[s][1])[:, :, :, None] * q_sums[:, None, :, :]
            scores = scores + (x,)  # noqa: RUF005
        for s in gl.static_range(STEPS):
            if s % A == 0:
                of_keys = of_keys + (load_scales(scales, 0, kv_head, pages, new, s, C),)  # noqa: RUF005
            keys = keys + (load_keys(k_base, k, pages[s], new, s, C, KEYS),)  # noqa: RUF005
        begin_loads()
        if (n < first_whole) | (new > whole_end):
            clean, cleared, of_cleared = (), (), ()
            for s in gl.static_range(STEPS):
                cleared = cleared + ((_cleared(values[s][0], n, s, 0, sight, C), _cleared(values[s][1], n, s, 1, sight, C)),)  # noqa: RUF005
            for s in gl.static_range(STEPS // A):
                clean = clean + (_hidden(scores[s], n, A * s, query, shift, sight, C),)  # noqa: RUF005
                of = of_values[s]
                if C.codes:
                    _, seen = _seen(n, A * s, sight, C)
                    of = (gl.where(seen, of[0], 0), gl.where(seen, of[1], 0))
                of_cleared = of_cleared + (of,)  # noqa: RUF005
            scores, values, of_values = clean, cleared, of_cleared
        most = scores[0]
        for s in gl.static_range(1, STEPS // A):
            most = gl.maximum(most, scores[s])
        new_top = gl.maximum(top, gl.max(most, 1) * gain)
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = gl.exp2(top - base)
        top = new_top
        weights = ()
        for s in gl.static_range(STEPS // A):
            weights = weights + (gl.exp2(scores[s] * gain[:, None, :, :] - base[:, None, :, :]),)  # noqa: RUF005
        sums = weights[0]
        for s in gl.static_range(1, STEPS // A):
            sums += weights[s]
        total = total * _beside(shrink, total) + _sums(sums, C)
        small = gl.full([W, A], 1.0, gl.float32, peak.type.layout)
        if C.codes:  # weights times scales, in a unit that float16 holds: 2^ROOM over the largest scale so far, 2^peak
            most = number(of_values[0][0])
            for s in gl.static_range(1, STEPS // A):
                most = gl.maximum(most, number(of_values[s][0]))
            new_peak = gl.maximum(peak, exponent(gl.max(most, 1)))
            if C.zeros:
                added = weights[0] * number(of_values[0][1])[:, :, :, None]
                for s in gl.static_range(1, STEPS // A):
                    added += weights[s] * number(of_values[s][1])[:, :, :, None]
                zeros = zeros * _beside(shrink, zeros) + _sums(added, C)
            small = power_of_two(-(new_peak - ROOM))
            shrink = shrink * gl.convert_layout(power_of_two(gl.maximum(peak - new_peak, -126)), gl.SliceLayout(2, of_row))[:, :, None]
            peak = new_peak
        acc = acc * _of_columns(shrink, C)
        if C.planes == 2:
            more = more * _of_columns(shrink, C)
        old, values, of_old, of_values = values, (), of_values, ()
        for s in gl.static_range(STEPS // A):
            x = weights[s]
            if C.codes:
                x = x * (number(of_old[s][0]) * small[:, None, :])[:, :, :, None]
            operands = weight_operands(x, DTYPE, C)
            for h in gl.static_range(A):
                planes = value_operands(old[A * s + h][0], old[A * s + h][1], DTYPE, C)
                acc = mma_v2(planes[0], operands[h], acc)
                if C.planes == 2:
                    more = mma_v2(planes[1], operands[h], more)
                values = values + (load_values(v_base, v, pages[A * s + h], new, A * s + h, C, VALUES),)  # noqa: RUF005
            of_values = of_values + (load_scales(scales, 1, kv_head, pages, new, A * s, C),)  # noqa: RUF005
        n = new
        pages = pages_of(entries, k[1], n + C.tile, sight, C, OF_KEYS, OF_VALUES)

    place = part
    if C.item == C.tile:
        place = 2 * gl.program_id(0) + (part & 1)
    place = (b, kv_head, row, group, queries, token, whole, place)
    _finish((top, total, zeros, peak, acc, more), place, sinks, out, lse, parts, C)


@gluon.jit
def _finish(sums_of_warps, place, sinks, out, lse, parts, C: gl.constexpr):
    """What all warps have of a unit, or of a part of one, added up and written, by threads that have a row's numbers of all warps: what else there is of
    a row goes there in one piece, since each way through shared memory is two barriers."""
    top, total, zeros, peak, acc, more = sums_of_warps
    if C.planes == 2:
        more = more - acc  # sums of whole bytes
    b, kv_head, row, group, queries, token, whole, part = place
    V: gl.constexpr = C.warps * C.abreast
    R: gl.constexpr = C.rows
    of_row: gl.constexpr = gl.SliceLayout(1, C.scores)
    layout: gl.constexpr = gl.BlockedLayout([V, 1, 4], [1, 2, 16], [1, C.warps, 1], [2, 1, 0])
    of_warps: gl.constexpr = gl.SliceLayout(2, layout)
    rows_layout: gl.constexpr = gl.SliceLayout(0, of_warps)
    sums = gl.convert_layout(gl.sum(total, 1), of_row)
    added = sums
    if C.zeros:
        added = gl.convert_layout(gl.sum(zeros, 1), of_row)
    peaks = gl.full([C.warps, C.abreast, R], 0, gl.int32, of_row) + gl.convert_layout(peak, gl.SliceLayout(2, of_row))[:, :, None]
    stats = gl.join(gl.join(top, sums), gl.join(added, peaks.to(gl.float32))).reshape([V, R, 2, 2])
    stats = gl.convert_layout(stats, gl.BlockedLayout([V, 1, 2, 2], [1, 2, 16, 1], [1, C.warps, 1, 1], [3, 2, 1, 0]))
    stats, others = gl.split(stats)
    top, sums = gl.split(stats)
    added, peaks = gl.split(others)
    top, peaks = gl.convert_layout(top, of_warps), gl.convert_layout(peaks, of_warps).to(gl.int32)
    best = gl.max(top, 0)
    share = gl.exp2(top - gl.where(best == float("-inf"), 0.0, best)[None, :])  # of each warp
    sums = gl.sum(gl.convert_layout(sums, of_warps) * share, 0)
    if C.zeros:
        added = gl.sum(gl.convert_layout(added, of_warps) * share, 0)
    else:
        added = sums * 0.0
    query, head = row_of(row + gl.arange(0, R, layout=rows_layout), kv_head, group)
    there = query < queries
    grown = gl.full([R], 1.0, gl.float32, rows_layout)
    if sinks is not None:  # one more logit, which weighs nothing; of a unit in parts the merge adds it
        logit = gl.where(whole, gl.load(sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E, float("-inf"))
        best, sums, grown = one_more(best, sums, logit)
    grown = grown * gl.where(sums == 0.0, 0.0, gl.div_rn(1.0, sums))
    row_lse = best + gl.log2(sums)
    unit = gl.full([V, R], 1.0, gl.float32, of_warps)
    if C.codes:
        unit = power_of_two(peaks - ROOM + (24 if C.zeros else 0))
    _write(acc, share, unit, added, grown, 0, place, out, parts, layout, C)
    if C.planes == 2:
        _write(more, share, power_of_two(peaks - ROOM + 20), added, grown, 1, place, out, parts, layout, C)
    if whole:
        if lse[0] is not None:
            gl.store(lse[0] + b.to(gl.int64) * lse[1] + head * lse[2] + token + query, row_lse * LN2, mask=there)
    else:
        gl.store(parts[1] + part.to(gl.int64) * R + gl.arange(0, R, layout=rows_layout), row_lse)


@gluon.jit
def _write(result, share, unit, added, grown, PLANE: gl.constexpr, place, out, parts, layout: gl.constexpr, C: gl.constexpr):
    """Results [warps, numbers of columns, rows] of a plane: added up, in the order of the columns. share, unit: [warps and steps abreast, rows], what they
    are multiplied by."""
    b, kv_head, row, group, queries, token, whole, part = place
    W: gl.constexpr = C.warps
    R: gl.constexpr = C.rows
    P: gl.constexpr = C.dim_v // C.planes
    E: gl.constexpr = C.chunk_v * C.of_word
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    x = result.reshape([W, P // (8 * E), E, 8, C.columns]).permute((0, 4, 1, 3, 2)).reshape([W * C.abreast, R, P])
    x = gl.convert_layout(x, layout) * share[:, :, None]
    if C.codes:
        x = x * unit[:, :, None]
    x = gl.sum(x, 0)  # [rows, columns]
    x = (x + gl.convert_layout(added, of_row)[:, None]) * gl.convert_layout(grown, of_row)[:, None]
    columns = PLANE * P + gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :]
    r = gl.arange(0, R, layout=of_row)
    query, head = row_of(row + r, kv_head, group)
    if whole:
        to = b.to(gl.int64) * out[1] + (token + query).to(gl.int64) * out[2] + head * out[3]
        gl.store(out[0] + (to[:, None] + columns), x.to(out[0].dtype.element_ty), mask=(query < queries)[:, None])
    else:
        to_part = part.to(gl.int64) * (R * C.dim_v) + (r[:, None] * C.dim_v + columns)
        gl.store(parts[0] + to_part, x)


@gluon.jit
def _keep(numbers, first, values, C: gl.constexpr):
    """Numbers that are the same in all threads, in shared memory."""
    for n in gl.static_range(len(values)):
        numbers.index(first + n).store(gl.full([1], values[n], gl.int32, gl.BlockedLayout([1], [32], [C.warps], [0])))


@gluon.jit
def _kept(numbers, n, C: gl.constexpr):
    return uniform(gl.max(numbers.index(n).load(gl.BlockedLayout([1], [32], [C.warps], [0])), 0))  # of one


@gluon.jit(do_not_specialize=["batch", "len_q", "kv_heads", "group"])
def _decode(q, k, v, scales, channel, out, lse, parts, sinks, table, lengths, offsets, scale, batch, len_q, kv_heads, group,
            BAND: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """A share of the list. q, out: pointer and strides; k, v: pointer and strides of page and head, in words; scales: as much
    of the keys' scales and zeros, and the values'.

    Parts go to float32 [2 programs, or items, rows, dim_v] and their LSE in base 2: the first of a program to twice its number, its last, if that is of
    another unit, behind it.
    """
    fetch(lengths, batch, table, C.warps)
    if C.early:
        wait_for_last()
        start_next()  # the merge reads lengths too
    lists = (lengths, offsets, batch, len_q, kv_heads, group)
    begin, stop, each, b, before = my_share(lists, BAND, C)
    at = begin
    cut = parts[2]
    if parts[2] is not None:  # of a part that the share begins with, and of one that it ends with: what there is to know
        cut = gl.allocate_shared_memory(gl.int32, [6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        _keep(cut, 0, (at * 0 - 1,), C)
        _keep(cut, 3, (at * 0 - 1,), C)
    while at < stop:  # a sequence
        len_k, queries, token = sequence_of(lengths, offsets, b, b < batch, len_q)
        lowest, start, end = reach(len_k, queries, BAND, C.tile)
        items, tiles = items_of(len_k, queries, kv_heads, group, BAND, C.rows, C.tile, C.item)
        entries = table[0] + b.to(gl.int64) * table[1]
        until = gl.minimum(stop, before + items * tiles * kv_heads)
        while at < until:  # a unit, or a part of one
            number = (at - before) // items
            item = at - before - number * items
            count = gl.minimum(items - item, until - at)
            if C.item != C.tile:
                count = count * 0 + 1
            kv_head = number // tiles
            first = start + item * C.item
            last = gl.minimum(first + count * C.item, end)
            part = at
            if C.item == C.tile:
                part = part_of(at, begin, before + number * items, items, each)
            of = channel
            if channel is not None:
                of = channel + kv_head * C.dim
            unit = (b, kv_head, (number - kv_head * tiles) * C.rows, first, last, count == items, part, len_k, queries, token, lowest)
            _attend(unit, q, k, v, scales, of, out, lse, sinks, parts, entries, scale * LOG2E, group, C)
            if parts[2] is not None:  # noqa: SIM102 (device code)
                if count < items:
                    _keep(cut, gl.where(at == begin, 0, 3), (part, b, number), C)
            at += count
        before += items * tiles * kv_heads
        b += 1
    if parts[2] is not None:  # at the end, for what it takes would be in registers from the beginning: int4 43.7 us to 47.1
        for side in range(2):
            part = _kept(cut, 3 * side, C)
            if part >= 0:
                b, number = _kept(cut, 3 * side + 1, C), _kept(cut, 3 * side + 2, C)
                MERGING: gl.constexpr = C.merging
                _, queries, token = sequence_of(lengths, offsets, b, b < batch, len_q)
                tiles = gl.cdiv(queries * group, C.rows)
                unit = (b, number // tiles, number % tiles * C.rows, queries, token)
                add_up(part, unit, group, out, lse, sinks, parts, C.dim_v, C.rows, MERGING)


# ---- host

AHEAD = 4 << 10  # bytes of keys, and of values, that a warp has on their way
EACH = 8  # warps of a multiprocessor: 255 registers a thread, which codes of 32 keys and what they become need
WARPS = (1, 2, 4)  # of a program, see `warps_of`. 128x1k int4 53.2 us by 4, 47.5 by 2, 45.8 by 1; 32x4k 41.6, 44.4, 48.1
REGISTERS = 255
MOST_PARTS = 32  # of a unit: as many as the merge has on their way at once
LONGEST = 1 << 14  # keys of a sequence for programs of a warp: one adds up the parts of a long one (128k among 63 of 512: 102 us by 4, 95 by 2, 114 by 1)
# Keys of a warp. What tensor cores add up errs with their number, and codes that are never negative are a large sum over a small result: at 128x8k by one
# warp int4 errs by 2.1e-3 and int8 by 2.5e-3 of a norm (by four 1.7e-3).
ADDED = 1 << 13
WHOLE = 1 << 30  # keys of an item that is never cut
AT_ONCE = 1024  # lengths that a program looks at at once


def configs(p: Attention, device: Device) -> list[Shares]:
    """Two programs a multiprocessor, of four warps."""
    wide = max(p.dim, p.value_dim)
    alone = "batch_invariant" in p.extras  # then nothing that changes a bit depends on how many queries the batch has
    rows = 8 if wide > 128 or (p.len_q * p.group <= 8 and not alone) else 16  # 16 rows of 256 columns spill 592 bytes
    size = Format.of(p.kv).columns(wide) if p.kv else wide * p.dtype.itemsize
    n = AHEAD // size
    if rows == 16 or p.page % 16:  # twice the sums, or a page for each key, in registers
        n //= 2
    n = max(16, min(64, n))
    if p.len_q * p.group <= 4 and n >= 32 and p.kv and Format.of(p.kv).has_zero and not alone:  # of e4m3 a score is less work: 32x4k 67.8 us to 68.1
        rows = 4
    return [tiles_of(p, device, n, rows)]


def warps_of(p: Attention, sms: int, units: int) -> int:
    """The fewest for a program that leave all programs but a sixteenth a unit: warps that have one of their own never wait for each other."""
    if "batch_invariant" in p.extras or units > p.batch * p.kv_heads:  # several tiles of a head find its keys in L2: not timed
        return WARPS[-1]
    most = ADDED if p.kv and Format.of(p.kv).has_zero else p.len_k
    enough = (w for w in WARPS if 16 * units > 15 * (EACH // w * sms) and p.len_k <= min(w * most, LONGEST if w == 1 else p.len_k))
    return next(enough, WARPS[-1])


def tiles_of(p: Attention, device: Device, n: int, rows: int) -> Shares:
    """Tiles of `n` keys a warp."""
    units = p.batch * p.kv_heads * triton.cdiv(p.len_q * p.group, rows)
    sms = programs_of(device)
    warps = warps_of(p, sms, units)
    item = n * warps
    if "batch_invariant" in p.extras:  # of many queries, which are work enough, whole units: 2,048 over 32k in parts would want 16 GiB of them
        item = WHOLE if p.len_q > 16 and not p.tokens else max(SHARE, item)
    programs = min(EACH // warps * sms, MOST_PARTS * units, units * max(1, triton.cdiv(p.len_k, item)))
    return Shares(n, warps, programs, rows, triton.cdiv(p.len_q * p.group, rows), item)


def kind_of(p: Attention) -> str:
    return Format.of(p.kv).name if p.kv else "bf16" if p.dtype == torch.bfloat16 else "fp16"


def launch(p: Attention, how: Shares, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, dim]`, or `[tokens, heads, dim]` with `x.q_offsets`; cache a PagedKV, as `ops.attention.paged_attention` passes them.

    Pages whose rows do not begin at a multiple of four bytes are copied first, with a warning.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    packed = x.q_offsets is not None
    out, lse = outputs(p, x, q, return_lse)
    if out.numel() == 0 or p.len_k == 0:
        return (out, lse) if return_lse else out
    left, right, top_left = ends(p.mask)
    right = right if p.len_q > 1 or top_left else -1  # one query sees to the end
    scale, pools = x.scale, [_words(t.codes if isinstance(t, Codes) else t) for t in (cache.k, cache.v)]
    if scale <= 0:  # the kernel takes the largest score before it scales
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    kind, tile = kind_of(p), how.n * how.warps
    listed = max(32, min(AT_ONCE, triton.next_power_of_2(p.batch)))
    early = starts_early(q)
    numbers = [t if t is None else t.view(torch.int16) for pool in (cache.k, cache.v) if p.kv for t in (pool.scale, pool.zero)]
    of = [(None, 0, 0) if t is None else (t, t.stride(0), t.stride(2)) for t in numbers]
    steps = [tuple(0 if t is None else t.stride(1) for t in (pools[i], *numbers[2 * i : 2 * i + 2])) for i in (0, 1)]
    alike = p.page % 16 == 0 and len({t.stride(0) * t.element_size() for t in (*pools, *numbers) if t is not None}) == 1
    shape = Shape(
        kind, bool(p.kv) and Format.of(p.kv).has_zero, how.n, how.warps, how.rows, p.dim, p.value_dim, p.page, alike, how.item, *steps,
        left, right, top_left, listed, p.batch <= listed, early, merging_of(min(how.rows, p.len_q * p.group), p.value_dim, how.warps),
    )  # fmt: skip
    units = p.kv_heads * how.tiles
    # Of packed queries a tile of rows for every `rows` tokens, and one more a sequence, is all that there may be.
    all_tiles = p.batch * how.tiles if not packed else min(p.batch * how.tiles, p.batch + p.tokens * p.group // how.rows)
    places = 2 * how.programs if how.item == tile else 1 if how.item == WHOLE else all_tiles * p.kv_heads * max(1, triton.cdiv(p.len_k, how.item))
    arrivals, _ = arrivals_of(q, how.programs, p.batch * units) if how.item == tile else (None, False)
    parts = (*(torch.empty((places, how.rows, *columns), dtype=torch.float32, device=q.device) for columns in ((p.value_dim,), ())), arrivals)
    strides = lambda t: (t, *((0,) * packed), *t.stride()[:-1])  # noqa: E731
    o, e = strides(out), (None, 0, 0) if lse is None else (lse, 0, lse.stride(0)) if packed else (lse, *lse.stride()[:2])
    sinks = None if x.sinks is None else x.sinks.contiguous()
    channel = None if getattr(cache.k, "channel", None) is None else cache.k.channel.contiguous()
    sizes = (p.batch, p.len_q, p.kv_heads, p.group)
    early_launch = {"launch_pdl": True} if early else {}
    _decode[(how.programs,)](
        strides(q), *((t, t.stride(0), t.stride(2)) for t in pools), tuple(of), channel, o, e, parts, sinks,
        (cache.page_table, cache.page_table.stride(0), cache.page_table.shape[1]), cache.lengths, x.q_offsets, scale, *sizes,
        BAND=shape.band, C=shape, num_warps=how.warps, maxnreg=REGISTERS, **early_launch,
    )  # fmt: skip
    by_unit = how.item != tile or p.batch * units <= how.programs
    if arrivals is None and how.item != WHOLE and (how.programs > 1 or how.item != tile):
        height = at_once(p.batch * units, how.programs, min(how.rows, p.len_q * p.group), p.value_dim, how.item != tile)
        merge[(p.batch * units if by_unit else how.programs - 1, triton.cdiv(min(how.rows, p.len_q * p.group), height["HEIGHT"]))](
            o, e, sinks, *parts[:2], cache.lengths, x.q_offsets, p.batch, p.kv_heads, p.group, p.len_q, how.programs, units,
            DV=p.value_dim, ROWS=how.rows, BLOCK_N=tile, BLOCK_DV=p.value_dim, ITEM=how.item, BATCH=min(LISTED, triton.next_power_of_2(p.batch)),
            BAND=shape.band, EARLY=early, BY_UNIT=by_unit, **height, num_warps=2, **early_launch,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def _words(pool):
    """Pages as they are loaded, four bytes at a time; copied where rows do not begin at a multiple of four."""
    each = 4 // pool.element_size()
    if pool.stride(-1) != 1 or pool.storage_offset() % each or any(stride % each for stride in pool.stride()[:-1]):
        pool = whole(pool, "register_decode", 4)
    return pool.view(torch.int32)
