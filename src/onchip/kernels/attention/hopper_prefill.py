"""Attention of many queries on Hopper: o = softmax(scale q k^T + mask) v, warp-specialised as FlashAttention-3 (Shah et al., 2024).

One warp draws tiles and copies (TMA): Q a tile ahead, K and V round two rings, and round a third what a score reads of each query and key (a bias).
Two or three warpgroups compute, 64 rows each, in step with nobody but the copies: the products of key tile j's scores and of tile j - 1's output are
started before the softmax of tile j, and waited for before its exponentials, beside the other warpgroups' products: weights are packed where the last lay.
A softmax needs no maximum, only weights that its dtype holds. So they are taken over the first tile's, with room for scores to grow; where they
outgrow it, which the sums show, a tile is done again over the largest so far. Under a mask or a score, and at 256, where it costs nothing, each tile's
maximum is found, and the output scaled anew only where it grew by more than 2^8 (Dao, FlashAttention-4). A softcap's scores have a bound, over which weights
are taken, and their tanh is a polynomial while they are small (`capped`); with a bias the product begins, or tensor cores add it (`key_bias`, `lines`).
Of keys in pages (vLLM's PagedAttention, Kwon et al., 2023) a copy is of as many as always lie in one; small ones other warps copy (`hopper_copies`).
A tile's keys come in this order: those at the diagonal's end, which need the mask; whole ones; those at the window's other end. A warpgroup leaves out what
the mask hides from all of its rows, tiles and halves (`hopper_halves`).
Of few queries the heads that share keys are folded into a tile's rows (FlashAttention-3's PackGQA): row r is query r // pack of the group's head r % pack,
so that K and V are read once for all of them. To the copy engine queries are then [batch, kv_heads, len, group, dim]. Where tiles are still few, their keys
are dealt out in parts, which leave through no buffer: float32, to be joined by a launch behind this one (`key_parts`).
"""

import functools
import operator
from dataclasses import dataclass

import torch
import triton

from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.once import once
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced, hides_keys
from onchip.kernels.again import asked
from onchip.kernels.attention import mods
from onchip.kernels.attention.capped import cap_of, fold, scaled, weigh_capped
from onchip.kernels.attention.hopper_copies import come, copy, gather, pool_of
from onchip.kernels.attention.hopper_dropout import dropout_of, drops_of, growth
from onchip.kernels.attention.hopper_halves import among, first_tile, own_steps, pass_over, told_of
from onchip.kernels.attention.hopper_parts import after_parts, part_and_parts, steps_of_part, unit_rows
from onchip.kernels.attention.hopper_prefill_tiles import TILES, Tiles, configs, side_by_side  # noqa: F401  dispatch asks for `configs` here
from onchip.kernels.attention.hopper_tiles import (
    ANYTHING,
    ONE_GROUP,
    PAIRS_LET_GO,
    anew,
    begin,
    by_groups,
    clear_unseen,
    grown,
    hide,
    key_steps,
    keys_ahead,
    let_go,
    lse_at,
    next_sequence,
    of_keys,
    of_rows,
    outgrown,
    output_at,
    own_rows,
    place_of,
    programs_and_counter,
    queries_at,
    read_tile,
    rounds,
    scored,
    shrunk,
    sides,
    tall,
    tile_at,
    tile_of,
    top_of,
    weigh_kept,
)
from onchip.kernels.attention.key_bias import key_ring, product, room_of, taken_out
from onchip.kernels.attention.key_parts import apart, apart_units, join, join_units
from onchip.kernels.attention.lines import below, draw, height_of, top_above
from onchip.kernels.attention.pairs import distances_of, laid_out, pair_tiles
from onchip.kernels.attention.texts import far_of, line_of, only_adds
from onchip.kernels.attention.tile import device_functions, ends, for_tma, mask_map, outputs
from onchip.kernels.attention.tile_lists import sequence_tiles
from onchip.kernels.hopper import (
    advance,
    as_halves,
    block,
    describe,
    fence_async_shared,
    first_turn,
    gl,
    gluon,
    mbarrier,
    message,
    one_more,
    release,
    ring,
    start_next,
    take_turn,
    tma,
    tma_store,
    turn_over,
    wait_for_last,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
GROWTH = gl.constexpr(8.0)  # weights of up to 2^8 cost a half-precision product no digits, and a float32 sum none that count
MOST = gl.constexpr(2.0**14)  # of a few weights' sum: what float16 holds, and a product with values of up to 2^110 in float32
HEADROOM = 8.0  # of bfloat16's weights at first, in base 2: with MOST, later scores may be larger by 15; more would cost LSE digits


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for, beside mask and score."""

    groups: int
    n: int  # keys a tile
    stages: int
    left: int
    right: int
    top_left: bool
    packed: bool
    mapped: bool
    page: int  # keys a page; 0: no pages
    gathers: int  # warps that bring keys and values out of small pages; 0: the copy engine brings them
    dim: int
    dim_v: int
    room: float  # between the first maximum and what weights are taken over: HEADROOM, or none
    cap: int  # what weights are taken over where a softcap bounds the scores, so that nobody looks for a maximum; 0: they have no bound
    fold: int  # queries are multiplied by this power of two
    biased: bool  # whether the tensor cores add a bias of keys (`key_bias`), and nothing else is a score
    far: bool  # whether what a score adds lies in memory by distance (`pairs`)
    adds: bool  # whether a score is the product and what it reads, with which the product then begins (`hopper_tiles.begin`)
    line: str  # where the lines bend that a score function adds to a query's scores (`texts.line_of`); "": it does something else
    bold: bool  # whether weights are taken over a maximum of the tiles before, until one outgrows it: see `outgrown`
    share: bool  # whether the output leaves through the queries' buffer
    lazily: int  # values that are scaled together, or not; 0: always all
    rounds: int  # tiles of queries that a warpgroup has space for: of two, the next one comes while this one is worked on
    pack: int  # heads side by side in the rows of a tile
    alike: bool  # whether all sequences have the same queries, which are there once
    drops: bool  # whether weights are dropped
    padded: bool  # whether the mask may hide padding, which holds anything
    first: bool  # whether the launch behind this one may begin when it has begun
    split: int  # parts that the keys of a tile of queries are dealt out in (`hopper_parts`); 0: as a list says

    @property
    def own(self):
        """Queries of a warpgroup."""
        return 64 // self.pack

    @property
    def m(self):
        """Queries of a tile."""
        return self.groups * self.own

    @property
    def parts(self):
        """Copies that bring a tile of keys: each lies in one page, since a tile begins at a multiple of its keys, a power of two."""
        return self.n // min(self.n, self.page & -self.page) if self.page and not self.gathers else 1

    @property
    def fillers(self):
        """Arrivals that fill a buffer of keys or values: the copying warp's, or of each thread of those that bring small pages."""
        return max(1, 32 * self.gathers)

    @property
    def readers(self):
        """Threads that meet where a buffer of keys or values is let go."""
        return 128 * self.groups + 32 * max(1, self.gathers)

    @property
    def hides(self):
        """Whether a mask hides keys of a tile from all rows of one warpgroup and not from another's (`hopper_halves`)."""
        return self.groups > 1 and not self.mapped and (self.left >= 0 or self.right >= 0) and self.split == 1

    @property
    def uneven(self):
        """Whether sequences differ in length: behind the keys of one lies what is not 0, and may be NaN."""
        return self.packed or self.page > 0 or self.split != 1


# ---- device: a computing warpgroup


@gluon.jit
def _more(state, count, x, own, PART: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`count` further key tiles from step `x` on, and how many were done. PART: "edge", they need the mask, or lines bend there; "right", and the mask hides
    all but the right half of keys; "whole"; "before" and "behind" where a score's lines bend; "near", a softcap's scores are taken for small ones, to the
    first tile that has others."""
    N: gl.constexpr = C.n
    SEEN: gl.constexpr = s_layout.instr_shape[1]
    LEFT: gl.constexpr = N - SEEN  # keys to the left of those that are seen
    EDGE: gl.constexpr = PART == "edge" or PART == "right"
    LINE: gl.constexpr = PART == "before" or PART == "behind"
    RISES: gl.constexpr = PART == "behind" and C.bold
    words, acc, top, total, ki, kp, vi, vp = state
    q, k_ring, v_ring, t_ring, alarms, call, steps, map_strides, drops = own
    keys, k_full, _ = k_ring
    values, v_full, _ = v_ring
    t, far = count * 0, count < 0
    factor = call[7]
    if LINE:
        factor = call[6] * call[7]
        draw(tile_at(x + (count - 1 if PART == "behind" else 0), steps, map_strides, C) * N, k_ring, call, SCORE, C, GROUP)
    if RISES:  # over the line of the tile before
        crest = top - height_of(tile_at(x - 1, steps, map_strides, C) * N, call, SCORE, PART, C)
    adds = keys_ahead(x, steps, map_strides, call, KEYS if C.adds else None, C)
    while (t < count) & (not far):
        come(k_full, ki, kp, C)
        n, of = 0, adds
        if C.adds:
            n = tile_at(x + t, steps, map_strides, C) * N
        start = begin(n, call, of, t_ring, ki, kp, SCORE, C, s_layout)
        take_turn(GROUP, C.groups)
        kt = keys.index(ki).reshape([N, keys.shape[-1]]).slice(LEFT, SEEN, 0).permute((1, 0))
        scores = product(q, kt, k_ring, ki, start, PART, C, GROUP)
        come(v_full, vi, vp, C)
        weights = gl.convert_layout(as_halves(words, values.dtype), p_layout)
        acc = warpgroup_mma(weights, values.index(vi).reshape([N, values.shape[-1]]), acc, is_async=True)
        turn_over(GROUP, C.groups)
        tile = read_tile(None if C.adds else t_ring, ki, kp, C, s_layout)
        if C.adds:  # of the next tile, beside the product
            adds = keys_ahead(x + t + 1, steps, map_strides, call, KEYS, C)
        elif EDGE or SCORE is not None or C.drops:
            n = tile_at(x + t, steps, map_strides, C) * N
            of = of_keys(n, call, KEYS, C)
        if LINE:
            height = height_of(n, call, SCORE, PART, C)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if PART != "near" and not LINE and not C.adds:
            scores = scored(scores, n, call, of, tile, SCORE, C, s_layout)
        if EDGE:
            scores = hide(scores, n + LEFT, call, of, MASK, C, s_layout)
        if EDGE or not C.bold:
            shrink = top  # of a cap, which stays
            if LINE:
                top, shrink = top_above(scores, top, factor, height, 0.0, GROWTH if C.lazily > 0 else 0.0)
            elif C.cap == 0:
                top, shrink = top_of(scores, top, factor, 0.0, GROWTH if C.lazily > 0 else 0.0)
            let_go(shrink, ki, t_ring, C, GROUP)
        elif RISES:  # lines do, as far as is known before they are seen
            top, shrink = grown(crest + height, top, GROWTH)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])  # all but done: its first operand is read from registers, which held the warps up
        release(vi, 10 + C.stages, C.readers)
        vi, vp = advance(vi, vp, C.stages)
        if C.mapped and EDGE:
            clear_unseen(v_ring, vi, vp, n, call[5], steps, map_strides, C)
        if PART == "near":
            words, sums, far = weigh_capped(scores, top, n, call, of, tile, alarms, SCORE, values.dtype, C, s_layout)
        else:
            made, sums = weigh_kept(scores, below(top, height) if LINE else top, factor, n + LEFT, drops, values.dtype, C)
            words = among(made, LEFT > 0, words)
        if RISES:
            acc, total = shrunk(acc, total, shrink, C)
        if C.bold and not EDGE:
            if outgrown(sums, top, alarms, MOST):  # once more, over the largest score so far
                again = of_keys(n, call, KEYS if C.adds else None, C)  # to keep it beside the product spills 676 bytes
                start = begin(n, call, again, t_ring, ki, kp, SCORE, C, s_layout)
                scores = warpgroup_mma_wait(0, deps=[product(q, kt, k_ring, ki, start, PART, C, GROUP)])
                if LINE:
                    top, shrink = top_above(scores, top, factor, height, C.room, 0.0)
                else:
                    if not C.adds:
                        scores = scored(scores, n, call, of, None, SCORE, C, s_layout)
                    top, shrink = top_of(scores, top, factor, C.room, 0.0)
                acc, total = shrunk(acc, total, shrink, C)
                words, sums = weigh_kept(scores, below(top, height) if LINE else top, factor, n + LEFT, drops, values.dtype, C)
                if RISES:
                    crest = top - height
            release(ki, 10, C.readers)
            if t_ring is not None:
                release(ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)
        elif C.cap == 0:
            acc, total = shrunk(acc, total, shrink, C)
        ki, kp = advance(ki, kp, C.stages)
        total = total + gl.convert_layout(sums, total.type.layout)
        t += 1
    return (words, acc, top, total, ki, kp, vi, vp), t


@gluon.jit
def _attend(place, hidden, cursors, q, given, MASK: gl.constexpr, SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr,
            GROUP: gl.constexpr):  # fmt: skip
    """The output of 64 rows, and the cursors after it; LSE is stored."""
    outs, _message, rings, sizes, maps, softmax, reads, dropout = given
    map_ptr, map_strides = maps
    alarms, sinks_ptr, lse, scale, gain = softmax
    k_ring, v_ring, t_ring, alarms = rings[1], rings[2], rings[3 + GROUP], alarms.index(GROUP)
    values, v_full, _ = v_ring
    N: gl.constexpr = C.n
    DV: gl.constexpr = values.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    b, head, _, start_q, len_q, _, len_k, shift = place
    lse_ptr, lse_len = lse
    HALVES: gl.constexpr = N == 128 and (SCORE is None or C.cap > 0) and not C.biased and not C.far and C.hides
    steps = steps_of_part(key_steps(place, map_ptr, map_strides, C), hidden, C)
    steps, early, late, right, left = own_steps(steps, hidden, HALVES, C, GROUP)
    ki, kp, vi, vp = pass_over(early, cursors, k_ring, v_ring, t_ring, C, GROUP)
    first, masked, bare, low, _ = steps
    rows, head = own_rows(place, sizes[4], C, GROUP, row_layout)
    gain = scale * gain if C.adds else gain
    read = distances_of(reads[1], b, head, place[2] * C.m + GROUP * 64, len_q, N, s_layout) if C.far else reads[1]
    call = (rows, shift, b, tall(head, C), len_q, len_k, scale, gain, reads[0], read, of_rows(rows, b, head, len_q, len_k, reads, ROWS))
    drops = drops_of(dropout, place[2] * C.m + GROUP * C.own, b * sizes[3] + head, C)
    own = (q, k_ring, v_ring, t_ring, alarms, call, steps, map_strides, drops)
    come(k_ring[1], ki, kp, C)
    if right and HALVES:
        words, top, total = first_tile(first * N, ki, kp, own, values.dtype, MASK, SCORE, KEYS, C, GROUP, s_layout, half_layout)
    else:
        words, top, total = first_tile(first * N, ki, kp, own, values.dtype, MASK, SCORE, KEYS, C, GROUP, s_layout, s_layout)
    ki, kp = advance(ki, kp, C.stages)
    clear_unseen(v_ring, vi, vp, first * N, len_k, steps, map_strides, C)
    state = (words, gl.zeros([64, DV], gl.float32, o_layout), top, total, ki, kp, vi, vp)
    behind, bent, before = sides(steps, place, C, GROUP)  # where there are lines, no tile is whole that has a bend
    if C.line != "" and C.right == 0:
        state, done = _more(state, masked + bent, 1, own, "edge", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
    elif C.right >= 0 or C.mapped:
        state, done = _more(state, masked, 1, own, "edge", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
    x, whole = 1 + masked, bare
    if C.line != "" and C.right != 0:
        state, done = _more(state, behind, x, own, "behind", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
        state, done = _more(state, bent, x + behind, own, "edge", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
    if C.cap > 0:
        state, done = _more(state, whole, x, own, "near", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
        x, whole = x + done, whole - done
    if C.line != "":
        state, done = _more(state, before, x + bare - before, own, "before", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
    else:
        state, done = _more(state, whole, x, own, "whole", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
    if C.left >= 0 and not C.mapped:
        state, done = _more(state, low - left, 1 + masked + bare, own, "edge", MASK, SCORE, KEYS, C, GROUP, s_layout, p_layout)
        if HALVES and GROUP > 0:
            state, done = _more(state, left, 1 + masked + bare + low - left, own, "right", MASK, SCORE, KEYS, C, GROUP, half_layout, p_layout)
    words, acc, top, total, ki, kp, vi, vp = state

    come(v_full, vi, vp, C)
    weights = gl.convert_layout(as_halves(words, values.dtype), p_layout)
    acc = warpgroup_mma(weights, values.index(vi).reshape([N, DV]), acc, is_async=True)
    total = gl.convert_layout(gl.sum(total, 1), row_layout)
    shrink = gl.full([64], 1.0, gl.float32, row_layout)
    if sinks_ptr is not None:  # one more logit, which weighs nothing
        logit = gl.load(sinks_ptr + head, mask=None if C.pack == 1 else rows < len_q).to(gl.float32) * LOG2E
        if C.split != 1:
            part, _parts = part_and_parts(hidden, C)
            logit = gl.where(part == 0, logit, float("-inf"))
        top, total, shrink = one_more(top, total, logit)
    if C.split == 0:
        _part, parts = part_and_parts(hidden, C)
        if parts > 1:
            gl.store(outs[3][1] + unit_rows(hidden, C, GROUP, row_layout), (top - C.room + gl.log2(total * 2.0**C.room)) * LN2)
        len_q = gl.where(parts > 1, 0, len_q)
    if lse_ptr is not None:
        b, head = after_parts(b, head, hidden, sizes, C)
        at = lse_ptr + lse_at(b, head, start_q + rows, lse_len, sizes, C)
        gl.store(at, (top - C.room + gl.log2(total * 2.0**C.room)) * LN2, mask=rows < len_q)  # sums near 1 have more digits in their logarithms
    inverse = gl.where(total == 0.0, 0.0, shrink / total)
    if C.drops:
        inverse = inverse * growth(dropout, C)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    release(vi, 10 + C.stages, C.readers)
    vi, vp = advance(vi, vp, C.stages)
    ki, kp, vi, vp = pass_over(late, (ki, kp, vi, vp), k_ring, v_ring, t_ring, C, GROUP)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None], ki, kp, vi, vp


@gluon.jit
def _compute(given, MASK: gl.constexpr, SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    outs, message, rings, sizes, maps, _softmax, _reads, _dropout = given
    map_ptr, map_strides = maps
    o_desc, o_ptr, o_buffers, units = outs
    q_ring, k_ring, v_ring = rings[0], rings[1], rings[2]
    queries, q_full, q_empty = q_ring
    DV: gl.constexpr = v_ring[0].shape[-1]
    ki, kp, vi, vp, turn = 0, 0, 0, 0, 0
    first_turn(GROUP, C.groups)
    b = next_sequence(message, turn)
    while b >= 0:
        hidden = told_of(message, turn, C)
        # without `anew` windows are 1.2% slower, three warpgroups 2%, and causal lines spill; with it all others are up to 1.5% slower
        place = place_of(message, turn, b, anew(sizes) if C.left >= 0 or C.groups == 3 or (C.line != "" and C.right == 0) else sizes, C)
        b, head, tile_m, start_q, len_q, _, _, _ = place
        mine = turn % C.rounds * C.groups + GROUP
        mbarrier.wait(q_full.index(mine), turn // C.rounds % 2)
        q = fold(queries.index(mine).reshape([64, queries.shape[-1]]), C)
        busy = True
        if C.packed and GROUP > 0:  # past the end of a sequence, or of a decode in a mixed batch
            busy = tile_m * C.m + GROUP * C.own < len_q
        if busy:
            acc, ki, kp, vi, vp = _attend(place, hidden, (ki, kp, vi, vp), q, given, MASK, SCORE, ROWS, KEYS, C, GROUP)
            if not C.share:
                mbarrier.arrive(q_empty.index(mine), count=1)
                tma.store_wait(0)  # the tile before has left
            buffer = o_buffers.index(mine if C.share else GROUP)
            if C.split < 2:
                buffer.reshape([64, DV]).store(acc.to(queries.dtype))
            if C.split == 0:
                _part, parts = part_and_parts(hidden, C)
                if parts > 1:
                    rows, dims = unit_rows(hidden, C, GROUP, gl.SliceLayout(1, acc.type.layout)), gl.arange(0, DV, layout=gl.SliceLayout(0, acc.type.layout))
                    gl.store(units[0] + (rows[:, None] * C.dim_v + dims[None, :]), acc, mask=(dims < C.dim_v)[None, :])
                len_q = gl.where(parts > 1, 0, len_q)
            if C.split > 1:  # where its LSE is
                rows, heads = own_rows(place, sizes[4], C, GROUP, gl.SliceLayout(1, acc.type.layout))
                dims = gl.arange(0, DV, layout=gl.SliceLayout(0, acc.type.layout))
                b, heads = after_parts(b, heads, hidden, sizes, C)
                at = o_ptr + (lse_at(b, heads, start_q + rows, _softmax[2][1], sizes, C)[:, None] * C.dim_v + dims[None, :])
                gl.store(at, acc, mask=(rows < len_q)[:, None] & (dims < C.dim_v)[None, :])
            elif C.packed:  # the copy engine does not know where a sequence ends
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
                rows, heads = own_rows(place, sizes[4], C, GROUP, gl.SliceLayout(1, layout))
                dims = gl.arange(0, DV, layout=gl.SliceLayout(0, layout))
                at = o_ptr + output_at(start_q + rows, heads, sizes, C) + dims[None, :]
                gl.store(at, buffer.reshape([64, DV]).load(layout), mask=(rows < len_q)[:, None] & (dims < C.dim_v)[None, :])
                if C.share:  # before the copy engine fills it again
                    fence_async_shared()
            else:
                fence_async_shared()
                tma_store(o_desc, queries_at(b, head, tile_m * C.m + GROUP * C.own, C), buffer)
            if C.share:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(mine), count=1)
        else:
            _top, masked, bare, low, _row = steps_of_part(key_steps(place, map_ptr, map_strides, C), hidden, C)
            ki, kp, vi, vp = pass_over(1 + masked + bare + low, (ki, kp, vi, vp), k_ring, v_ring, rings[3 + GROUP], C, GROUP)
            mbarrier.arrive(q_empty.index(mine), count=1)
        turn += 1
        b = next_sequence(message, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=ANYTHING)
def _prefill(q_desc, k_desc, v_desc, o_desc, t_desc, pools, o_ptr, lse_ptr, units, counter, listed, q_offsets, k_offsets, q_used, k_used, table, map_ptr,
             sinks_ptr, reads, dropout, scale, gain, tiles, tiles_m, together, heads, group, len_q, len_k, batch_heads, lse_len, map_strides, t_steps,
             MASK: gl.constexpr, SCORE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    q_ring = ring(q_desc, C.groups * C.rounds, 1)
    k_ring = key_ring(k_desc, t_desc, gain, C)
    v_ring = ring(v_desc, C.stages, 0, C.parts, C.fillers)
    gl.static_assert(t_desc is None or C.biased or C.groups < 3)
    rings = (q_ring, k_ring, v_ring, None, None, None)  # and, of what a score reads, one for each warpgroup
    if t_desc is not None and not C.biased:
        rings = (q_ring, k_ring, v_ring, ring(t_desc, C.stages, 0))
        if C.groups == 2:
            rings = (q_ring, k_ring, v_ring, rings[3], ring(t_desc, C.stages, 0))
    o_buffers = q_ring[0]
    if not C.share:
        o_buffers = gl.allocate_shared_memory(o_desc.dtype, [C.groups] + o_desc.block_type.shape, o_desc.layout)  # noqa: RUF005 (device code)
    if C.first:
        wait_for_last()
        start_next()
    fence_async_shared()
    told = message(C.groups + (C.gathers > 0))
    alarms = gl.allocate_shared_memory(gl.int32, [C.groups, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sizes = (tiles, tiles_m, together, heads, group, len_q, len_k, batch_heads, tiles * 0)
    lengths = (listed, q_offsets, k_offsets, q_used, k_used)
    outs, lse, gain = (o_desc, o_ptr, o_buffers, units), (lse_ptr, lse_len), gain * LOG2E
    # Registers: many pages want more, with packed queries again (40: 36 bytes at d128, page 16).
    MANY: gl.constexpr = C.packed or C.first or C.parts > 8
    COPIER: gl.constexpr = 56 if C.gathers == 2 else 24 if C.parts == 1 else 56 if MANY and not C.mapped else 40
    GATHERER: gl.constexpr = 32 if C.gathers > 2 else COPIER  # a warpgroup's warps have as many, and two stand beside the copying one
    COMPUTER: gl.constexpr = (504 - COPIER - (GATHERER if C.gathers > 2 else 0)) // 2
    given = (outs, told, rings, sizes, (map_ptr, map_strides), (alarms, sinks_ptr, lse, scale, gain), reads, dropout)
    copied = (q_desc, k_desc, v_desc, t_desc, reads[1] if C.far else t_steps, rings, told, counter, sizes, lengths, table, map_ptr, map_strides)
    gathered = (pools, k_ring, v_ring, told, sizes, table, map_ptr, map_strides)
    if C.groups == 1 and C.gathers == 0:
        gl.warp_specialize([(_compute, (given, MASK, SCORE, ROWS, KEYS, C, 0)), (copy, (copied, C))], [1], [COPIER])
    elif C.groups == 1:
        gl.warp_specialize(
            [(_compute, (given, MASK, SCORE, ROWS, KEYS, C, 0)), (copy, (copied, C)), (gather, (gathered, C))], [1, C.gathers], [COPIER, GATHERER]
        )
    elif C.groups == 2 and C.gathers == 0:
        gl.warp_specialize([(_compute, (given, MASK, SCORE, ROWS, KEYS, C, 0)), (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 1)), (copy, (copied, C))],
                           [4, 1], [COMPUTER, COPIER])  # fmt: skip
    elif C.groups == 2:
        gl.warp_specialize(
            [
                (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 0)),
                (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 1)),
                (copy, (copied, C)),
                (gather, (gathered, C)),
            ],
            [4, 1, C.gathers],
            [COMPUTER, COPIER, GATHERER],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 0)),
                (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 1)),
                (_compute, (given, MASK, SCORE, ROWS, KEYS, C, 2)),
                (copy, (copied, C)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# ---- host

LAZILY = ((64, 0), (256, 64))
GATHERS = ((128, 4), (256, 2))  # warps that bring keys of small pages. Four leave 128 registers at first: too few for a product of 256 columns


def launch(p: Attention, tiles: Tiles, q, k, v, x: Operands, return_lse: bool, page_table=None):
    """q, k, v as `ops.attention` passes them: dense, or packed with offsets. What a score reads is copied first where `pairs` says so."""
    packed = x.q_offsets is not None
    out, lse = outputs(p, x, q, return_lse)
    if out.numel() == 0 or p.len_k == 0:
        return (out, lse) if return_lse else out
    if (far := far_of(p)) is not None:
        p, x, q, _ = laid_out(p, x, q, far)
    first = [t.transpose(0, 1)[None] if t.ndim == 3 else t.transpose(1, 2) for t in (q, k, v, out)]  # [batch or pages, heads, len, dim]
    alike = not packed and len(q) > 1 and q.stride(0) == 0
    if alike:
        first[0] = first[0][:1]
    given = first[:3]
    first = [for_tma(first[0]), *(for_tma(t, "hopper_paged" * (p.page > 0)) for t in first[1:3]), first[3]]
    beside = x.beside if not packed and all(map(operator.is_, given, first)) else None  # what is let go below, the launch behind this one may write to
    width, width_v, tile = block(p.dim), block(p.value_dim), tile_of(p)
    p, x, pairs, steps = taken_out(p, x, tiles.n)
    biased = pairs is not None
    pairs, steps = pair_tiles(x.score[tile.tensor], tile.axes, 64, tiles.n) if tile else (pairs, steps)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    make = functools.partial(mods.split_functions, tiled=tile is not None, of_row=tiles.pack > 1)
    (rows, keys, sees, score), reads, scale, gain = device_functions(p, x, q, make)
    cap, line = 0 if x.drop else cap_of(p, scale, gain), line_of(p.score.text) if p.score and keys is None and isinstance(p.mask, Band) and scale > 0 else ""
    adds = far is not None or (p.score is not None and only_adds(p.score.text) and scale > 0)
    bold = width <= 128 and (p.score is None or adds or line != "")  # at 256 finding a maximum hides behind the products
    if packed and "batch_invariant" in p.extras:  # in a sequence's last tile the next one's queries would raise alarms too, and choose a warp's tanh
        bold, cap = False, 0
    power, scale = scaled(scale, cap)
    share = tiles.parts > 1 or width == width_v >= (128 if tile or biased or line else 256)
    gathers = pick(GATHERS, max(width, width_v)) if p.page % 8 else 0
    shape = Shape(
        tiles.groups, tiles.n, tiles.stages, left, right, top_left, packed, isinstance(p.mask, Traced), p.page, gathers, p.dim, p.value_dim,
        cap or (HEADROOM if bold and p.dtype == torch.bfloat16 else 0.0), cap, power, biased, far is not None, adds, line, bold, share,
        pick(LAZILY, width_v), 1 if tile else rounds(tiles, width, width_v, 0 if share else width_v, room_of(tiles, biased, line, right)),
        tiles.pack, alike, x.drop > 0, hides_keys(p.mask), beside is not None, tiles.parts,
    )  # fmt: skip
    heads, own, k_rows = p.heads, (64,), tiles.n // shape.parts
    if tiles.pack > 1:
        heads, own = p.kv_heads, (shape.own, shape.pack)
        first[0], first[3] = by_groups(first[0], heads), by_groups(first[3], heads)
    blocks = ((*own, width), (k_rows, width), (k_rows, width_v), (*own, width_v))
    described, into, into_lse = first, first[3], lse
    if tiles.parts > 1:  # which the copy engine does not bring to memory
        described, blocks = (*first[:3], first[0]), (*blocks[:3], blocks[0])
        into, into_lse = apart(p, tiles.parts, q.device)
    listed, units, tiles_m, batch_heads = None, None, triton.cdiv(p.len_q, shape.m), p.batch * heads
    if packed:  # one list for all sequences
        deal = 0 if tiles.parts else tiles.programs // heads
        listed = sequence_tiles(p, x, shape.m, deal=deal)
        units = apart_units(p, deal * heads * 64 * tiles.groups, q.device) if deal else None
        tiles_m, batch_heads = len(listed), heads
    found, map_strides = None, (0, 0, 0)
    if shape.mapped:
        found, map_strides = mask_map(p, mods.mask_function(p.mask.text), x, shape.m, tiles.n, False, q.device, shape.padded)
    count = tiles_m * batch_heads * max(1, tiles.parts)
    if beside is None:
        programs, counter = programs_and_counter(count, tiles.programs, q.device)
        counter = torch.empty(1, dtype=torch.int32, device=q.device) if counter is None else counter  # nobody looks at it: one kernel is compiled for both
    else:
        programs, counter = min(count, tiles.programs, beside.sms), None
    _prefill[(programs,)](
        *(describe(t, *b) for t, b in zip(described, blocks, strict=True)), pairs, tuple(map(pool_of, first[1:3])) if gathers else None, into,
        into_lse, units, counter, listed, x.q_offsets, x.k_offsets, x.q_used, x.k_used,
        page_table if page_table is None else (page_table, page_table.stride(0)),
        found, x.sinks if x.sinks is None else x.sinks.contiguous(), reads, dropout_of(x), scale, gain, count, tiles_m, side_by_side(p), heads, p.group,
        p.len_q, p.len_k, batch_heads, p.tokens if packed else p.len_q, map_strides, steps,
        MASK=sees, SCORE=score, ROWS=rows, KEYS=keys, C=shape, num_warps=4, **({"launch_pdl": True} if shape.first else {}),
    )  # fmt: skip
    if tiles.parts > 1:
        join(into, into_lse, out, lse)
    elif units is not None:
        join_units(p, units, listed[: tiles.programs // heads], x, tiles.pack, out, lse)
    return (out, lse) if return_lse else out


def launch_paged(p: Attention, tiles: Tiles, q, cache, x: Operands, return_lse: bool):
    """`launch` over a PagedKV, as `ops.attention.paged_attention` passes them. Lengths are read on the device: a CUDA graph may capture the call. Pools that
    TMA does not take are copied first, with a warning. Where lengths are to say in how many parts keys are, a dense batch goes as a packed one."""
    if x.beside is not None:  # whole tiles, for a few multiprocessors beside another launch
        groups, *_ = pick(TILES, max(block(p.dim), block(p.value_dim)))
        tiles = tiles._replace(groups=min(groups, triton.cdiv(p.len_q * tiles.pack, 64)), parts=1)
    x = x._replace(k_used=cache.lengths)
    if p.tokens or tiles.parts:
        return launch(p, tiles, q, cache.k, cache.v, x, return_lse, cache.page_table)
    tokens, what = p.batch * p.len_q, ("even", p.batch, p.len_q)
    offsets = asked(lambda t: once(what, [t], lambda: torch.arange(0, tokens + 1, p.len_q, dtype=torch.int32, device=t.device)), cache.lengths)
    packed = p._replace(tokens=tokens), tiles, q.flatten(0, 1), cache.k, cache.v, x._replace(q_offsets=offsets)
    out, lse = launch(*packed, True, cache.page_table) if return_lse else (launch(*packed, False, cache.page_table), None)
    out = out.unflatten(0, (p.batch, p.len_q))
    return (out, lse.unflatten(1, (p.batch, p.len_q)).transpose(0, 1).contiguous()) if return_lse else out
