"""Attention of many queries in e4m3 on Hopper: o = softmax(scale q k^T + mask) v, 8 bits in and bf16 out, warp-specialised as `hopper_prefill.py`.

What differs, after FlashAttention-3 (Shah et al., 2024):
- wgmma takes 8-bit operands only where the summed dimension is contiguous. So a launch before copies V, in tiles turned round (`fp8_operands.turned`), its
  keys in the order in which a thread holds the weights: the accumulator of the scores becomes the operand of the second product without a shuffle.
  Warps that turned tiles in shared memory instead took registers and instructions from those that compute.
- Weights are 2^8 exp(score - maximum), and the maximum is raised only once it grew by more than 2^0.8: they stay below 448, the largest of e4m3, and
  weights down to 2^-14 of the largest keep all of their digits (with V's scales of blocks or tokens, times what is left of the largest). Sums are
  of weights before rounding.
- Of long sequences at d128 a step takes 256 keys, and 64 keys' weights go to the output's product while the next ones' exponentials are made (`_by_pieces`):
  what a step costs whatever its size (barriers, the first and last cycles of products, maxima of four threads) comes half as often.
- Of such tiles without a causal mask those that are left when all programs have done as many are dealt out in parts of their keys (`hopper_parts`).
- Scales of a head are part of the softmax's factor and of the output's; of 128 keys, of a tile's factor; of a token, columns of scores and weights.

Reads q, k, v once a tile of queries, and V once more before. Exponentials take as long as both products: 128 x 128 of them 1,024 cycles, and the products at
d128 1,024.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Attention, Operands
from onchip.core.scales import SMALLEST_TAKEN, Scales
from onchip.kernels.attention.fp8_operands import turned
from onchip.kernels.attention.hopper_parts import join, part_of, part_steps, parts_of
from onchip.kernels.attention.hopper_tiles import anew, hand, hide, locate, next_sequence, place_of, programs_of, query_tiles, rounds
from onchip.kernels.attention.tile import ends, for_tma, order, together
from onchip.kernels.hopper import (
    advance,
    any_below,
    as_bytes,
    as_words,
    describe,
    draw,
    fence_async_shared,
    fill,
    first_turn,
    gl,
    gluon,
    hear,
    here,
    in_order,
    largest,
    logarithm,
    mbarrier,
    message,
    release,
    release_after,
    ring,
    scale_rows,
    start_next,
    take_turn,
    tell,
    tma,
    tma_store,
    turn_over,
    wait_for_last,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onchip.kernels.launch import starts_early

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RAISED = gl.constexpr(8.0)  # log2 of what weights are multiplied by
LEAST_FACTOR = gl.constexpr(1e-36)  # of a score's factor: 0 times the -inf of a key that is hidden is NaN
LEAST_V = gl.constexpr(SMALLEST_TAKEN)
GROWTH = gl.constexpr(0.8)  # of a maximum that is not followed: 2^8.8 = 446


class Tiles(NamedTuple):
    """Warpgroups of 64 queries, keys a tile, tiles of values in flight (of keys that go in pieces there is room for one more), programs at most
    (`programs_and_counter`), keys whose weights go to the output's product as soon as they are made (0: those of a tile go there together, behind the next
    tile's scores), and in how many parts the keys of those tiles of queries are dealt out that are left when all programs have done as many."""

    groups: int
    n: int
    stages: int
    programs: int
    piece: int = 0
    parts: int = 1

    @property
    def k_stages(self):
        return self.stages + (self.piece > 0)

    def __str__(self):
        pieces = f" in pieces of {self.piece} keys, of scales of heads" if self.piece else ""
        return f"{64 * self.groups}x{self.n} tiles{pieces}, {self.groups} warpgroups, {self.stages} stages, at most {self.programs} programs"

    def together(self, p: Attention) -> int:
        """Heads side by side: of long sequences half as many as L2 has room for, so that programs end at more nearly the same time."""
        return together(p, 2 * p.len_k) if self.piece and p.len_q >= LONG else together(p)

    def count(self, p: Attention) -> int:
        """Tiles of queries, of all heads and sequences."""
        return query_tiles(p, 64 * self.groups) * p.heads

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call."""
        count = self.count(p)
        parts = f", the keys of the last {count % self.programs} in {self.parts} parts, joined by a launch behind" * (self.parts > 1)
        return order(p, count, self.programs, self.together(p)) + parts


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for."""

    groups: int
    n: int  # keys a tile
    piece: int  # as in `Tiles`
    stages: int
    k_stages: int
    parts: int  # of the keys of some tiles of queries (`hopper_parts`)
    left: int
    right: int
    top_left: bool
    each_k: int  # keys that share a scale; 0: all
    each_v: int
    lazily: int  # values that are scaled together, or not; 0: always all
    rounds: int  # tiles of queries that a warpgroup has space for: of two, the next one comes while this one is worked on
    maxima_below: bool  # whether scores are waited for before the product that holds the warps up, so that maxima are found meanwhile
    first: bool  # whether the launch begins before the one ahead of it has ended
    page: int = 0
    packed: bool = False
    uneven: bool = False
    mapped: bool = False

    @property
    def m(self):
        return 64 * self.groups

    @property
    def readers(self):
        """Threads at a barrier of K or V: who computes, and the warp that copies."""
        return 128 * self.groups + 32


# ---- device: the copying warp


@gluon.jit
def _copy(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, message, counter, whole, sizes, lengths, C: gl.constexpr):
    N: gl.constexpr = C.n
    ROWS: gl.constexpr = v_desc.block_type.shape[2]  # of values, turned
    GROUPS: gl.constexpr = C.groups
    if C.parts > 1:
        start_next()  # it joins what these give
    q_at, k_at, v_at = (0, 0, 0), (0, 0, 0), (0, 0, 0)
    number, turn = here(gl.program_id(0)), 0
    while number < sizes[0]:
        tile, _part = part_of(number, whole, C)
        place, there = locate(tile, anew(sizes), lengths, False, C)
        b, head, tile_m, _, _, _, _, _ = place
        if there:
            tell(message, turn, (b, head, tile_m, number))
            turn += 1
            steps = part_steps(place, number, whole, C)
            top, masked, bare, low, _row = steps  # `_` is of another type already
            kv_head = head // sizes[4]
            n = top * N
            k_at = fill(k_ring, k_at, k_desc, [b, kv_head, n, 0], C.k_stages, 10, C.readers)
            for group in gl.static_range(GROUPS):
                q_at = fill(q_ring, q_at, q_desc, [b, head, tile_m * C.m + group * 64, 0], C.groups * C.rounds, 0, 0)
            if C.first:
                wait_for_last()  # for V turned, and a counter at 0
            v_at = fill(v_ring, v_at, v_desc, [b, kv_head, n // N * ROWS, 0], C.stages, 10 + C.k_stages, C.readers)
            for _x in range(masked + bare + low):
                n -= N
                k_at = fill(k_ring, k_at, k_desc, [b, kv_head, n, 0], C.k_stages, 10, C.readers)
                v_at = fill(v_ring, v_at, v_desc, [b, kv_head, n // N * ROWS, 0], C.stages, 10 + C.k_stages, C.readers)
        number = draw(counter, sizes[0])
    tell(message, turn, (gl.to_tensor(-1),))


# ---- device: a computing warpgroup


@gluon.jit
def _scale_at(scale, n, EACH: gl.constexpr, N: gl.constexpr, len_k):
    """Of the keys from `n` on: one each [N], which `hand` brings to their columns, or one of them all. `scale`: where a head's begin, and their stride."""
    found = 1.0
    if EACH == 1:  # a thread has one of them until they are wanted: beside its columns, it would have 32
        cols = n + gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0]))
        found = gl.load(scale[0] + cols * scale[1], mask=cols < len_k, other=1.0)
    elif EACH > 1:
        found = gl.load(scale[0] + gl.minimum(n, gl.maximum(len_k - 1, 0)) // EACH * scale[1])  # a row that sees nothing may begin past the last key
    return found


@gluon.jit
def _top(scores, top, below, factor, k_scale, MAY_BE_EMPTY: gl.constexpr, C: gl.constexpr):
    """The first half of a step of the online softmax, in base 2: the new maximum, what is taken off the scores, what shrinks all before, and the factor."""
    if C.each_k > 1:
        factor = gl.maximum(factor * k_scale, LEAST_FACTOR)
    new_top = gl.maximum(top, gl.convert_layout(largest(scores, below), top.type.layout) * factor)
    new_top = gl.where(new_top - top > GROWTH, new_top, top)
    base = new_top
    if MAY_BE_EMPTY:  # a row that has seen no key yet: -inf minus -inf is NaN
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, base, gl.exp2(top - base), factor


@gluon.jit
def _weigh(scores, base, factor, v_scale, C: gl.constexpr):
    """The other half: weights times 2^RAISED and V's scale in e4m3, four to a word, and sums that stay in a thread, [64, 8]."""
    N: gl.constexpr = scores.shape[1]
    base = base - RAISED
    if C.each_v > 1:
        v_log = logarithm(v_scale)
        base = base - v_log
    weights = gl.exp2(scores * factor[:, None] - base[:, None])
    sums = gl.sum(weights.reshape([64, N // 8, 8]), 1)
    if C.each_v == 1:
        weights = weights * hand(v_scale, weights)
    elif C.each_v > 1:
        sums = sums * gl.exp2(-v_log)
    return as_words(in_order(weights)), sums


@gluon.jit
def _more(state, count, n, q, k_ring, v_ring, factor, call, EDGE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`count` further key tiles, down from key `n`. EDGE: they need the mask."""
    N: gl.constexpr = C.n
    weights, acc, top, total, ki, kp, vi, vp = state
    keys, k_full, _ = k_ring
    values, v_full, _ = v_ring
    for t in range(count):
        at = n - t * N
        below = any_below(top)
        k_scale = _scale_at(call[6], at, C.each_k, N, call[5])
        p = gl.convert_layout(as_bytes(weights), p_layout)
        mbarrier.wait(k_full.index(ki), kp)
        take_turn(GROUP, C.groups)
        zeros = gl.zeros([64, N], gl.float32, s_layout)
        scores = warpgroup_mma(q, keys.index(ki).reshape([N, keys.shape[-1]]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(vi), vp)
        if C.maxima_below:
            scores = warpgroup_mma_wait(0, deps=[scores])
        acc = warpgroup_mma(p, values.index(vi).reshape([values.shape[-2], N]).permute((1, 0)), acc, is_async=True)
        turn_over(GROUP, C.groups)
        v_scale = _scale_at(call[7], at, C.each_v, N, call[5])
        if not C.maxima_below:
            scores = warpgroup_mma_wait(1, deps=[scores])
        if C.each_k == 1:
            scores = scores * hand(k_scale, scores)
        if EDGE:
            scores = hide(scores, at, call, (), None, C, s_layout)
        top, base, shrink, each = _top(scores, top, below, factor, k_scale, EDGE, C)
        release_after(shrink, ki, 10, C.readers)
        ki, kp = advance(ki, kp, C.k_stages)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])  # all but done: its first operand is read from registers, which held the warps up
        release(vi, 10 + C.k_stages, C.readers)
        vi, vp = advance(vi, vp, C.stages)
        acc = scale_rows(acc, gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent)), C.lazily)
        weights, sums = _weigh(scores, base, each, v_scale, C)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, acc, top, total, ki, kp, vi, vp


@gluon.jit
def _pieces(x, PIECE: gl.constexpr):
    """The columns of x, left to right, as a tuple: no instruction."""
    found = (x,)
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    if N > PIECE:
        left, right = gl.split(x.reshape([ROWS, 2, N // 2]).permute((0, 2, 1)))
        found = _pieces(left, PIECE) + _pieces(right, PIECE)
    return found


@gluon.jit
def _joined(pieces):
    """The tile of which they are the columns: no instruction."""
    found = pieces[0]
    HALF: gl.constexpr = len(pieces) // 2
    if HALF > 0:
        found = gl.join(_joined(pieces[:HALF]), _joined(pieces[HALF:])).permute((0, 2, 1))
        found = found.reshape([found.shape[0], 2 * found.shape[2]])
    return found


@gluon.jit
def _hide(pieces, n, seen, call, C: gl.constexpr, layout: gl.constexpr):
    """Pieces of scores from key `n` on, with -inf where the mask hides the key. The first `seen` keys are hidden from no row, or only by a window."""
    found = ()
    for i in gl.static_range(len(pieces)):
        piece = gl.convert_layout(pieces[i], layout)
        n += piece.shape[1]
        if C.left >= 0 or n > seen:
            piece = hide(piece, n - piece.shape[1], call, (), None, C, layout)
        found += (piece,)
    return found


@gluon.jit
def _by_pieces(state, count, n, ends, q, k_ring, v_ring, factor, call, EDGE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
               s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`_more` from the first tile on, where a piece's product runs beside the next one's exponentials; of scales of heads. No weight outlives its turn of the
    loop, so there is room for the scores of 256 keys."""
    N: gl.constexpr = C.n
    PIECE: gl.constexpr = C.piece
    acc, top, total, ki, kp, vi, vp = state
    keys, k_full, _ = k_ring
    values, v_full, _ = v_ring
    DV: gl.constexpr = acc.shape[1]
    KEYS: gl.constexpr = values.shape[-1]  # of a tile of values, turned
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 32])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    for t in range(count):
        at = n - t * N
        below = any_below(top)
        mbarrier.wait(k_full.index(ki), kp)
        take_turn(GROUP, C.groups)
        zeros = gl.zeros([64, N], gl.float32, s_layout)
        scores = warpgroup_mma(q, keys.index(ki).reshape([N, keys.shape[-1]]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        turn_over(GROUP, C.groups)
        scores = warpgroup_mma_wait(0, deps=[scores])
        pieces = _pieces(scores, PIECE)
        if EDGE:
            pieces = _hide(pieces, at, ends[0], call, C, layout)
            scores = gl.convert_layout(_joined(pieces), s_layout)
        top, base, shrink, _each = _top(scores, top, below, factor, 1.0, EDGE, C)
        release(ki, 10, C.readers)
        ki, kp = advance(ki, kp, C.k_stages)
        acc = scale_rows(acc, gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent)), C.lazily)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
        each, base = gl.convert_layout(factor, rows), gl.convert_layout(base, rows)
        mbarrier.wait(v_full.index(vi), vp)
        tiles = values.index(vi).reshape([N // KEYS * DV, KEYS])
        for i in gl.static_range(N // PIECE):
            if not EDGE or at + i * PIECE < ends[1]:
                weights, sums = _weigh(gl.convert_layout(pieces[i], layout), base, each, 1.0, C)
                total = total + gl.convert_layout(sums, total.type.layout)
                piece = tiles.slice(i * PIECE // KEYS * DV, DV, 0).slice(i * PIECE % KEYS, PIECE, 1)
                acc = warpgroup_mma(gl.convert_layout(as_bytes(weights), p_layout), piece.permute((1, 0)), acc, is_async=True)
                if EDGE:
                    acc = warpgroup_mma_wait(0, deps=[acc])
            if not EDGE and i > 0 and i < N // PIECE - 1:  # else the weights of all pieces keep their registers: 128 bytes of spills
                total = warpgroup_mma_wait(1, deps=[total])
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(vi, 10 + C.k_stages, C.readers)
        vi, vp = advance(vi, vp, C.stages)
    return acc, top, total, ki, kp, vi, vp


@gluon.jit
def _attend(place, number, cursors, q, k_ring, v_ring, lse_ptr, lse_strides, scale, scales, sizes, parts, C: gl.constexpr, GROUP: gl.constexpr,
            DV: gl.constexpr):  # fmt: skip
    """The output of 64 queries, and the cursors after it; LSE is stored."""
    N: gl.constexpr = C.n
    keys, k_full, _ = k_ring
    values, v_full, _ = v_ring
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=4)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    b, head, tile_m, _, len_q, _, len_k, shift = place
    ki, kp, vi, vp = cursors
    steps = part_steps(place, number, parts[0], C)
    first, masked, bare, low, _ = steps
    rows = tile_m * C.m + GROUP * 64 + gl.arange(0, 64, layout=row_layout)

    q_scale, k_scale, v_scale, v_most, strides, each_q = scales
    q_strides, k_strides, v_strides, most_strides = strides
    kv_head = head // sizes[4]
    factor = gl.load(q_scale + b * q_strides[0] + head * q_strides[1] + rows // each_q * q_strides[2], mask=rows < len_q, other=0.0) * scale
    k_scales = (k_scale + b * k_strides[0] + kv_head * k_strides[1], k_strides[2])
    v_scales = (v_scale + b * v_strides[0] + kv_head * v_strides[1], v_strides[2])
    if C.each_k == 0:
        factor = factor * gl.load(k_scales[0])
    factor = gl.maximum(factor, LEAST_FACTOR)
    most = gl.maximum(gl.load(v_most + b * most_strides[0] + kv_head * most_strides[1]), LEAST_V)
    call = (rows, shift, b, head, len_q, len_k, k_scales, v_scales, (), (), ())

    top = gl.full([64], float("-inf"), gl.float32, row_layout)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    if C.piece > 0:
        total = gl.sum(gl.zeros([64, N], gl.float32, s_layout).reshape([64, N // 8, 8]), 1)
        state, n = (acc, top, total, ki, kp, vi, vp), first * N
        ends = (len_k, len_k)  # of what the warpgroup's first row sees, and its last
        if C.right >= 0:
            own = tile_m * C.m + GROUP * 64 + shift + C.right
            ends = (gl.minimum(own + 1, len_k), gl.minimum(own + 64, len_k))
        masked += 1  # the first tile holds the last keys and (of) the diagonal
        state = _by_pieces(state, masked, n, ends, q, k_ring, v_ring, factor, call, True, C, GROUP, s_layout, p_layout)
        n -= masked * N
        state = _by_pieces(state, bare, n, ends, q, k_ring, v_ring, factor, call, False, C, GROUP, s_layout, p_layout)
        if C.left >= 0:
            state = _by_pieces(state, low, n - bare * N, ends, q, k_ring, v_ring, factor, call, True, C, GROUP, s_layout, p_layout)
        acc, top, total, ki, kp, vi, vp = state
    else:
        k_scale = _scale_at(k_scales, first * N, C.each_k, N, len_k)
        v_scale = _scale_at(v_scales, first * N, C.each_v, N, len_k)
        mbarrier.wait(k_full.index(ki), kp)  # the first tile holds the last keys and (of) the diagonal
        take_turn(GROUP, C.groups)
        zeros = gl.zeros([64, N], gl.float32, s_layout)
        scores = warpgroup_mma(q, keys.index(ki).reshape([N, keys.shape[-1]]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        turn_over(GROUP, C.groups)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release(ki, 10, C.readers)
        ki, kp = advance(ki, kp, C.k_stages)
        if C.each_k == 1:
            scores = scores * hand(k_scale, scores)
        scores = hide(scores, first * N, call, (), None, C, s_layout)
        top, base, _shrink, each = _top(scores, top, any_below(top), factor, k_scale, True, C)
        weights, total = _weigh(scores, base, each, v_scale, C)
        state, n = (weights, acc, top, total, ki, kp, vi, vp), (first - 1) * N
        if C.right >= 0:
            state = _more(state, masked, n, q, k_ring, v_ring, factor, call, True, C, GROUP, s_layout, p_layout)
            n -= masked * N
        state = _more(state, bare, n, q, k_ring, v_ring, factor, call, False, C, GROUP, s_layout, p_layout)
        if C.left >= 0:
            state = _more(state, low, n - bare * N, q, k_ring, v_ring, factor, call, True, C, GROUP, s_layout, p_layout)
        weights, acc, top, total, ki, kp, vi, vp = state

        mbarrier.wait(v_full.index(vi), vp)
        acc = warpgroup_mma(gl.convert_layout(as_bytes(weights), p_layout), values.index(vi).reshape([DV, N]).permute((1, 0)), acc, is_async=True)

    total = gl.convert_layout(gl.sum(total, 1), row_layout)
    lse = (top + (gl.log2(total) - RAISED)) * LN2
    if C.parts > 1 and number >= parts[0]:
        gl.store(parts[2] + (number - parts[0]) * C.m + (rows - tile_m * C.m), lse)
    elif lse_ptr is not None:
        gl.store(lse_ptr + b.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1] + rows, lse, mask=rows < len_q)
    inverse = gl.where(total == 0.0, 0.0, most / total)
    if C.piece == 0:
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        release(vi, 10 + C.k_stages, C.readers)
        vi, vp = advance(vi, vp, C.stages)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None], ki, kp, vi, vp


@gluon.jit
def _compute(o_desc, o_buffers, q_ring, k_ring, v_ring, message, lse_ptr, lse_strides, scale, scales, sizes, parts, C: gl.constexpr, GROUP: gl.constexpr):
    queries, q_full, q_empty = q_ring
    DV: gl.constexpr = o_buffers.shape[-1]
    buffer = o_buffers.index(GROUP)
    ki, kp, vi, vp = 0, 0, 0, 0
    first_turn(GROUP, C.groups)
    turn = 0
    b = next_sequence(message, turn)
    while b >= 0:
        number = b
        if C.parts > 1:
            number = hear(message, turn, 3, 4)
        place = place_of(message, turn, b, anew(sizes), C)
        b, head, tile_m, _, _, _, _, _ = place
        mine = turn % C.rounds * C.groups + GROUP
        q = queries.index(mine).reshape([64, queries.shape[-1]])
        mbarrier.wait(q_full.index(mine), turn // C.rounds % 2)
        acc, ki, kp, vi, vp = _attend(place, number, (ki, kp, vi, vp), q, k_ring, v_ring, lse_ptr, lse_strides, scale, scales, sizes, parts, C, GROUP, DV)
        mbarrier.arrive(q_empty.index(mine), count=1)
        tma.store_wait(0)  # the tile before has left
        buffer.reshape([64, DV]).store(acc.to(buffer.dtype))
        fence_async_shared()
        if C.parts > 1 and number >= parts[0]:
            tma_store(parts[1], [0, number - parts[0], GROUP * 64, 0], buffer)
        else:
            tma_store(o_desc, [b, head, tile_m * C.m + GROUP * 64, 0], buffer)
        turn += 1
        b = next_sequence(message, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "tiles_m", "together", "heads", "group", "len_q", "len_k", "batch_heads", "each_q", "whole"])
def _prefill_fp8(q_desc, k_desc, v_desc, o_desc, lse_ptr, counter, q_scale, k_scale, v_scale, v_most, whole, part_desc, part_lse, scale, each_q,
                 tiles, tiles_m, together, heads, group, len_q, len_k, batch_heads, lse_strides, scale_strides, C: gl.constexpr):  # fmt: skip
    q_ring = ring(q_desc, C.groups * C.rounds, 1)
    k_ring = ring(k_desc, C.k_stages, 0)
    v_ring = ring(v_desc, C.stages, 0)
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [C.groups] + o_desc.block_type.shape, o_desc.layout)  # noqa: RUF005 (device code)
    fence_async_shared()
    told = message(C.groups)
    sizes = (tiles, tiles_m, together, heads, group, len_q, len_k, batch_heads, tiles * 0)
    lengths = (None, None, None, None, None)
    scales = (q_scale, k_scale, v_scale, v_most, scale_strides, each_q)
    scale = scale * LOG2E
    parts = (whole, part_desc, part_lse)
    if C.groups == 1:
        gl.warp_specialize(
            [
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 0)),
                (_copy, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, told, counter, whole, sizes, lengths, C)),
            ],
            [1],
            [24],
        )
    elif C.groups == 2:
        gl.warp_specialize(
            [
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 0)),
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 1)),
                (_copy, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, told, counter, whole, sizes, lengths, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 0)),
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 1)),
                (_compute, (o_desc, o_buffers, q_ring, k_ring, v_ring, told, lse_ptr, lse_strides, scale, scales, sizes, parts, C, 2)),
                (_copy, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, told, counter, whole, sizes, lengths, C)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# ---- host

# Groups, keys a tile and stages, by head dimension up to.
TILES = ((128, (2, 128, 3)), (256, (2, 128, 2)))
LAZILY = ((64, 0), (256, 64))
LONG_64 = (3, 128, 3)
LONG_128 = (2, 256, 2)
PIECE = 64
SHORT_64, SHORT_128 = 4096, 1024  # queries: of a causal problem smaller tiles are more even
LONG = 16384  # queries from which fewer heads go side by side


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The tiles of the head dimension; half of them where they are too few for the device, and parts of the last ones' keys where that is faster."""
    groups, n, stages = pick(TILES, p.dim)
    programs, one_scale = programs_of(device), "key_scales" not in p.extras  # scales of blocks spill 88 bytes beside 256 scores
    if p.dim <= 64 and p.mask.left is None and (p.len_q > SHORT_64 or p.mask.right is None):
        groups, n, stages = LONG_64
    elif p.dim == 128 and p.mask.left is None and p.len_q > SHORT_128 and one_scale and p.batch * p.heads * triton.cdiv(p.len_q, 128) >= programs:
        groups, n, stages = LONG_128
    if p.batch * p.heads * triton.cdiv(p.len_q, 64 * groups) < programs:
        groups = 1
    tiles = Tiles(groups, n, stages, programs, PIECE if n == 256 else 0)
    if tiles.piece and p.mask.right is None:
        tiles = tiles._replace(parts=parts_of(tiles.count(p), programs, triton.cdiv(p.len_k, n)))
    return [tiles]


def launch(p: Attention, tiles: Tiles, q, k, v, x: Operands, return_lse: bool):
    """q, k, v float8_e4m3fn [batch, len, heads, dim], dense, with `x.scales`; comes back in bfloat16."""
    scales = x.scales
    out = torch.empty(*q.shape[:-1], p.value_dim, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(p.batch, p.heads, p.len_q, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() == 0 or p.len_k == 0:
        out.zero_()
        return (out, lse.fill_(-torch.inf)) if return_lse else out
    first = [t.transpose(1, 2) for t in (q, k, v, out)]  # [batch, heads, len, dim]
    first = [*map(for_tma, first[:3]), first[3]]
    left, right, top_left = ends(p.mask)
    each_q, each_k, each_v = Scales.share(scales.q, p.len_q), Scales.share(scales.k, p.len_k), Scales.share(scales.v, p.len_k)
    assert not (tiles.piece and (each_k or each_v)), "pieces know scales of heads alone"
    assert all(each <= 1 or each % tiles.n == 0 for each in (each_k, each_v)), f"a tile of {tiles.n} keys has one scale"
    factors = [s.expand(p.batch, heads, -1) for s, heads in zip(scales, (p.heads, p.kv_heads, p.kv_heads), strict=True)]
    most = factors[2][..., 0]
    if each_v:  # keys whose values are 2^-40 of the largest add nothing that shows
        most = factors[2].amax(-1).clamp(min=SMALLEST_TAKEN)
        factors[2] = (factors[2] / most[..., None]).clamp(min=2**-40)
    scale = x.scale
    if scale < 0:  # the largest score is taken before it is scaled
        first[0], scale = (first[0].view(torch.uint8) ^ 0x80).view(q.dtype), -scale
    keys = min(tiles.n, 128)  # TMA's rows have 128 bytes
    count, parts = tiles.count(p), tiles.parts
    programs = min(count, tiles.programs)
    whole, part, part_lse = count, first[3], None
    if parts > 1:
        whole = count // programs * programs
        part = out.new_empty(1, (count - whole) * parts, 64 * tiles.groups, p.value_dim)
        part_lse = torch.empty(part.shape[1:3], dtype=torch.float32, device=q.device)
    counter = torch.empty(1, dtype=torch.int32, device=q.device) if count > programs else None
    first[2], early = turned(first[2], keys, counter), starts_early(q)
    shape = Shape(
        tiles.groups, tiles.n, tiles.piece, tiles.stages, tiles.k_stages, parts, left, right, top_left, each_k, each_v, pick(LAZILY, p.value_dim),
        rounds(tiles, p.dim, p.value_dim, p.value_dim, (tiles.k_stages - tiles.stages) * tiles.n * p.dim, 1), p.value_dim <= 128, early,
    )  # fmt: skip
    blocks = ((64, p.dim), (tiles.n, p.dim), (p.value_dim * (tiles.n // keys), keys), (64, p.value_dim))
    _prefill_fp8[(programs,)](
        *(describe(t, *b) for t, b in zip(first, blocks, strict=True)), lse, counter, *factors, most, whole, describe(part, *blocks[3]), part_lse, scale,
        each_q or p.len_q, whole + (count - whole) * parts, triton.cdiv(p.len_q, 64 * tiles.groups), tiles.together(p), p.heads,
        p.group, p.len_q, p.len_k, p.batch * p.heads, (0, 0) if lse is None else lse.stride()[:2],
        tuple(tuple(t.stride()) for t in (*factors, most)), C=shape, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    if parts > 1:
        join(part[0], part_lse, first[3], lse, whole, parts)
    return (out, lse) if return_lse else out
