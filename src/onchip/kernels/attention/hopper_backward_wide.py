"""Gradients of attention on Hopper for heads wider than 128: each gradient in a pass of its own, of the forward kernel's shape; eight products.

    dV:  S^T = K Q^T    P^T = exp(S^T - LSE)                                                          dV += P^T dO
    dK:  S^T = K Q^T    P^T = exp(S^T - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dK += dS^T Q
    dQ:  S = Q K^T      P = exp(S - LSE)        dP = dO V^T      dS = P (dP - delta)          dQ += dS K

A tile of 128 rows (keys or queries) stays, 64 to each of two warpgroups, whose sums [64, 256] take 128 registers a thread; the other side streams past,
64 at a time. Nothing goes from one warpgroup to the other, nothing is added up in memory, and the same bits come in every run.

Why not five products: a warpgroup cannot hold dV and dK of 64 keys (256 registers a thread). Of what it could hold, a step of 64 x 64 at 256 has these
floors, in cycles:

                                                       tensor cores   shared memory   L2, at 28 bytes a cycle
    each warpgroup all of S and dP, half of the rest       3,584          4,608           4,680
    one warpgroup S, P and dV, the other dP, dS and dK     2,560          3,650           4,680
    three passes                                           4,096          4,096           3,510

L2's of the first two are 64 KB of Q and dO, and 64 KB of dQ to be added up: of that no kernel at 128 was seen to do more than 2 TB/s, here 6,900 cycles.
The passes only read, and keep tensor cores and shared memory evenly busy, as the forward kernel does, which makes 780 TFLOP/s at 256: 490 here, at best.
Shared memory, 225 KB: the tiles that stay, 128 KB, through which the gradient leaves; and a ring of three tiles, of which a step takes two: the first for
dP, done with half a step earlier, so that each copy has half a step's time or more. A thread spills nothing in the loops.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton

from onchip.core.device import Device
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import mods
from onchip.kernels.attention.hopper_backward_tiles import (
    LOG2E,
    PHASES,
    READERS,
    clear,
    send,
    start,
    step_tile,
    steps_of,
    weights,
)
from onchip.kernels.attention.hopper_tiles import locate, programs_and_counter, programs_of
from onchip.kernels.attention.tile import ends, mask_map, sequence_tiles, together
from onchip.kernels.hopper import (
    advance,
    arrive_and_wait,
    as_other,
    block,
    describe,
    draw,
    fence_async_shared,
    first_turn,
    forget,
    gl,
    gluon,
    hear,
    mbarrier,
    message,
    release,
    take_turn,
    tell,
    tma,
    tma_load,
    turn_over,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAY, STREAM = gl.constexpr(128), gl.constexpr(64)  # rows of a tile that stays, and of one that streams past
WIDTH = 256  # columns of shared memory that hold a head
# Hardware barriers: that what stays is done with; for both warpgroups to meet; of the ring, one a slot, of which three leave one for the V (dO) that stays.
OWN_LET_GO, MEETING, SLOTS_LET_GO, OWN_V_LET_GO = gl.constexpr(10), gl.constexpr(11), gl.constexpr(12), gl.constexpr(15)


class Tiles(NamedTuple):
    """Programs at most (`programs_and_counter`)."""

    programs: int

    def __str__(self):
        return f"dV, dK, dQ a pass each, 128x64 tiles, 2 warpgroups, at most {self.programs} programs"


@dataclass(frozen=True)
class Shape:
    """What the device code of a pass is compiled for, beside mask and score."""

    m: int
    n: int
    of_keys: bool  # keys stay: dV and dK
    slopes: bool  # dS is multiplied: dK and dQ
    left: int
    right: int
    top_left: bool
    packed: bool
    mapped: bool
    dim: int  # of the gradient

    @property
    def slots(self):
        """Of the ring, 32 KB each: beside 128 KB of K and V (or Q and dO) three, of which two are a step's."""
        return 3 if self.slopes else 4

    @property
    def partners(self):
        """Warpgroups that take turns at their products. (Those of a packed batch meet at the end of each sequence anyway.)"""
        return 1 if self.packed else 2


# ---- device: the copying warp


@gluon.jit
def _as_tile(buffer, desc):
    """The beginning of a buffer, as a tile of `desc`."""
    return as_other(buffer, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def _fill(ring, cursor, desc, at, row_desc, row_at, C: gl.constexpr):
    """Start a copy into the next slot once it is free, where queries stream with a row of what goes with them; returns the cursor's next place."""
    slots, rows, full = ring
    index, phase, used = cursor
    if used >= C.slots:
        arrive_and_wait(index, SLOTS_LET_GO, READERS)
    if C.of_keys:
        mbarrier.expect(full.index(index), desc.block_type.nbytes + row_desc.block_type.nbytes)
        tma_load(row_desc, row_at, full.index(index), rows.index(index))
    else:
        mbarrier.expect(full.index(index), desc.block_type.nbytes)
    tma_load(desc, at, full.index(index), _as_tile(slots.index(index), desc))
    index, phase = advance(index, phase, C.slots)
    return index, phase, used + 1


@gluon.jit
def _copy_own(descs, own, batch, head, row, tiles, C: gl.constexpr):
    """This program's tile number `tiles` that stays, once those before it are done with: K (Q) when their gradient has left, V (dO) before."""
    own_desc, own_v_desc, _, _, _, _ = descs
    firsts, seconds, own_full, own_v_full = own
    if C.slopes:
        if tiles > 0:
            arrive_and_wait(0, OWN_V_LET_GO, READERS)
        mbarrier.expect(own_v_full, 2 * own_v_desc.block_type.nbytes)
        for group in gl.static_range(2):
            tma_load(own_v_desc, [batch, head, row + group * 64, 0], own_v_full, seconds.index(group))
    if tiles > 0:
        arrive_and_wait(0, OWN_LET_GO, READERS)
    mbarrier.expect(own_full, 2 * own_desc.block_type.nbytes)
    for group in gl.static_range(2):
        tma_load(own_desc, [batch, head, row + group * 64, 0], own_full, firsts.index(group))


@gluon.jit
def _copy(descs, own, ring, message, counter, sizes, lengths, map_ptr, map_strides, C: gl.constexpr):
    _own_desc, _own_v_desc, far_desc, far_v_desc, lse_desc, delta_desc = descs
    group = sizes[4]
    cursor, tiles = (0, 0, 0), 0
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, C.of_keys, C)
        b, own_head, tile, start_q, _, start_k, _, _ = place
        if there:
            batch = b
            if C.packed:
                batch = b * 0
            if C.of_keys:
                row, others, members = start_k + tile * C.n, start_q, group
            else:
                row, others, members = start_q + tile * C.m, start_k, group * 0 + 1
            copied = 0
            for member in range(members):
                if C.of_keys:
                    head = own_head * group + member
                    far_head = head
                else:
                    head = own_head
                    far_head = own_head // group
                steps = steps_of(place, head, map_ptr, map_strides, C)
                masked, bare, _before, _first, _row = steps
                for x in range(masked + bare):
                    at = others + step_tile(x, steps, map_strides, C) * STREAM
                    stats = [batch * sizes[3] * group + head, at]
                    if C.packed:
                        late = at % PHASES
                        stats = [late * sizes[3] * group + head, at - late]
                    to = [batch, far_head, at, 0]
                    if C.slopes:  # the order of use, and of release
                        cursor = _fill(ring, cursor, far_v_desc, to, delta_desc, stats, C)
                        cursor = _fill(ring, cursor, far_desc, to, lse_desc, stats, C)
                    else:
                        cursor = _fill(ring, cursor, far_desc, to, lse_desc, stats, C)
                        cursor = _fill(ring, cursor, far_v_desc, to, delta_desc, stats, C)
                    if copied == 0:  # the tile before is still in use, but the ring is not
                        _copy_own(descs, own, batch, own_head, row, tiles, C)
                        copied = 1
            if copied == 0:
                _copy_own(descs, own, batch, own_head, row, tiles, C)
            tiles += 1
        number = draw(counter, sizes[0])
        tell(message, turn, (number,))
        turn += 1


# ---- device: a computing warpgroup


@gluon.jit
def _statistics(stats, place, sizes, C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """LSE and delta of a warpgroup's queries; where keys stay, they come with the queries."""
    lse_ptr, delta_ptr, pitch = stats
    lse, delta = 0, 0
    if not C.of_keys:
        b, head, tile, start_q, len_q, _, _, _ = place
        batch = b.to(gl.int64)
        if C.packed:
            batch = batch * 0
        i = tile * C.m + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        at = (batch * sizes[3] + head) * pitch + start_q + i
        lse = gl.load(lse_ptr + at, mask=i < len_q, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=i < len_q, other=0.0)
    return lse, delta


@gluon.jit
def _less(values, index, C: gl.constexpr, layout: gl.constexpr):
    """What a tile of scores begins with, so that `values` of the queries are taken off."""
    zeros = gl.zeros([64, STREAM], gl.float32, layout)
    if C.of_keys:
        zeros = start(zeros, values.index(index), gl.SliceLayout(0, layout))
    else:
        zeros = zeros - values[:, None]
    return zeros


@gluon.jit
def _scores(own, far, lses, index, SCORE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """own far^T - LSE, started; LSE is in units of the scores. Before a function of them, own far^T."""
    if SCORE is None:
        s = warpgroup_mma(own, far.permute((1, 0)), _less(lses, index, C, layout), is_async=True)
    else:
        s = warpgroup_mma(own, far.permute((1, 0)), gl.zeros([64, STREAM], gl.float32, layout), use_acc=False, is_async=True)
    return s


@gluon.jit
def _more(acc, index, phase, count, x, steps, map_strides, own, ring, stats, call, place, h,
          MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, EDGE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`count` further tiles of the other side from step `x` on. EDGE: they need the mask."""
    mine, mine_v, v_desc = own
    slots, rows, full = ring  # a step takes two slots: with dS those of dO (V) and Q (K), else of Q and dO
    lses, deltas = stats
    if C.of_keys:
        lses, deltas = rows, rows
    D: gl.constexpr = slots.shape[-1]
    DV: gl.constexpr = v_desc.block_type.shape[-1]
    length = place[4] if C.of_keys else place[6]
    for t in range(count):
        other = step_tile(x + t, steps, map_strides, C) * STREAM
        first, first_phase = index, phase
        second, second_phase = advance(index, phase, C.slots)
        mbarrier.wait(full.index(first), first_phase)
        if C.slopes:
            far, far_v = slots.index(second).reshape([STREAM, D]), _as_tile(slots.index(first), v_desc).reshape([STREAM, DV])
            last = far
        else:
            far, far_v = slots.index(first).reshape([STREAM, D]), _as_tile(slots.index(second), v_desc).reshape([STREAM, DV])
            last = far_v
        if EDGE and C.packed:  # noqa: SIM102 (one is a constant of the compiler's)
            if other + STREAM > length:  # the end of a sequence
                mbarrier.wait(full.index(second), second_phase)
                clear(last, length - other, STREAM, GROUP)
                arrive_and_wait(0, MEETING, 256)
        take_turn(GROUP, C.partners)
        if C.slopes:
            dp = warpgroup_mma(mine_v, far_v.permute((1, 0)), _less(deltas, first, C, s_layout), is_async=True)
            mbarrier.wait(full.index(second), second_phase)
            s = _scores(mine, far, lses, second, SCORE, C, s_layout)
            turn_over(GROUP, C.partners)
            dp = warpgroup_mma_wait(1, deps=[dp])
            release(first, SLOTS_LET_GO, READERS)
            s = warpgroup_mma_wait(0, deps=[s])
            _p, sloped = weights(s, other, h, lses, second, call, place, MASK, SCORE, SCORE_GRAD, EDGE, C, GROUP, s_layout)
            terms = sloped * dp
            if EDGE and C.packed:  # what the next sequence's rows make of it may be NaN
                there = other + gl.arange(0, STREAM, layout=gl.SliceLayout(0, s_layout)) < length
                terms = gl.where(there[None, :], terms, 0.0)
        else:
            s = _scores(mine, far, lses, first, SCORE, C, s_layout)
            turn_over(GROUP, C.partners)
            s = warpgroup_mma_wait(0, deps=[s])
            terms, _sloped = weights(s, other, h, lses, first, call, place, MASK, SCORE, SCORE_GRAD, EDGE, C, GROUP, s_layout)
            release(first, SLOTS_LET_GO, READERS)
            mbarrier.wait(full.index(second), second_phase)
        left = gl.convert_layout(terms.to(slots.dtype), p_layout)
        acc = warpgroup_mma(left, last, acc, is_async=True)
        acc, left = warpgroup_mma_wait(0, deps=[acc, left])
        release(second, SLOTS_LET_GO, READERS)
        index, phase = advance(second, second_phase, C.slots)
    return acc, index, phase


@gluon.jit
def _compute(out, descs, own, ring, message, stats, call, sizes, lengths, map_ptr, map_strides,
             MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    out_desc, out_ptr, out_strides, factor = out
    firsts, seconds, own_full, own_v_full = own
    v_desc = descs[3]
    COLS: gl.constexpr = out_desc.block_type.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, STREAM, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    mine = firsts.index(GROUP).reshape([64, firsts.shape[-1]])
    mine_v = mine
    if C.slopes:
        mine_v = seconds.index(GROUP).reshape([64, seconds.shape[-1]])
    tiles_of = (mine, mine_v, v_desc)
    index, phase, tiles = 0, 0, 0
    first_turn(GROUP, C.partners)
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, C.of_keys, C)
        if there:
            rows = _statistics(stats, place, sizes, C, GROUP, s_layout)
            mbarrier.wait(own_full, tiles % 2)
            if C.slopes:
                mbarrier.wait(own_v_full, tiles % 2)
            acc = gl.zeros([64, COLS], gl.float32, acc_layout)
            for member in range(sizes[4] if C.of_keys else 1):
                h = place[1] * sizes[4] + member if C.of_keys else place[1]
                steps = steps_of(place, h, map_ptr, map_strides, C)
                masked, bare, _b, _f, _r = steps
                acc, index, phase = _more(acc, index, phase, masked, 0, steps, map_strides, tiles_of, ring, rows, call, place, h,
                                          MASK, SCORE, SCORE_GRAD, True, C, GROUP, s_layout, p_layout)  # fmt: skip
                acc, index, phase = _more(acc, index, phase, bare, masked, steps, map_strides, tiles_of, ring, rows, call, place, h,
                                          MASK, SCORE, SCORE_GRAD, False, C, GROUP, s_layout, p_layout)  # fmt: skip
            if C.slopes:
                release(0, OWN_V_LET_GO, READERS)
            send(out_desc, out_ptr, out_strides, acc * factor, firsts.index(GROUP), place, C.dim, C, GROUP)  # its own rows: nobody else reads them
            if C.packed:  # the buffer was read by threads: the next copy into it comes after
                fence_async_shared()
            tma.store_wait(0)
            release(0, OWN_LET_GO, READERS)
            tiles += 1
        number = hear(message, turn, 0, 4)
        forget(message, turn)
        turn += 1


@gluon.jit(do_not_specialize=["tiles", "places", "together", "heads", "group", "len_q", "len_k", "batch_heads", "pitch"])
def _backward_pass(own_desc, own_v_desc, far_desc, far_v_desc, lse_desc, delta_desc, out_desc, out_ptr, lse_ptr, delta_ptr, pitch,
                   counter, listed, q_offsets, k_offsets, q_used, k_used, map_ptr, reads, scale, gain, factor, tiles, places, together, heads, group,
                   len_q, len_k, batch_heads, out_strides, map_strides,
                   MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    wide: gl.constexpr = far_desc.block_type.shape
    slots = gl.allocate_shared_memory(far_desc.dtype, [C.slots] + wide, far_desc.layout)  # noqa: RUF005 (device code)
    rows = gl.allocate_shared_memory(lse_desc.dtype, [C.slots] + lse_desc.block_type.shape, lse_desc.layout)  # noqa: RUF005 (device code)
    full = gl.allocate_shared_memory(gl.int64, [C.slots, 1], mbarrier.MBarrierLayout())
    firsts = gl.allocate_shared_memory(own_desc.dtype, [2] + own_desc.block_type.shape, own_desc.layout)  # noqa: RUF005 (device code)
    seconds = firsts
    if C.slopes:
        seconds = gl.allocate_shared_memory(own_v_desc.dtype, [2] + own_v_desc.block_type.shape, own_v_desc.layout)  # noqa: RUF005 (device code)
    own_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full.index(0), count=1)
    mbarrier.init(own_full.index(1), count=1)
    SLOTS: gl.constexpr = C.slots
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    told = message(2)
    sizes = (tiles, places, together, heads, group, len_q, len_k, batch_heads, tiles * 0)
    lengths, ring = (listed, q_offsets, k_offsets, q_used, k_used), (slots, rows, full)
    own = (firsts, seconds, own_full.index(0), own_full.index(1))
    descs = (own_desc, own_v_desc, far_desc, far_v_desc, lse_desc, delta_desc)
    call, out, stats = (scale, gain, reads, factor), (out_desc, out_ptr, out_strides, factor), (lse_ptr, delta_ptr, pitch)
    gl.warp_specialize(
        [
            (_compute, (out, descs, own, ring, told, stats, call, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 0)),
            (_compute, (out, descs, own, ring, told, stats, call, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 1)),
            (_copy, (descs, own, ring, told, counter, sizes, lengths, map_ptr, map_strides, C)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- host


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The same tiles for all: those in which the sum, scores and dP of a warpgroup fill its registers, and two sides of 128 rows its shared memory."""
    return [Tiles(programs_of(device))]


def passes(p: Attention, tiles: Tiles, lead, lses, delta, x: Operands, sees, score, score_grad, before: float, gain: float) -> None:
    """dV, dK and dQ, a launch each."""
    q, k, v, d_out, _, dq, dk, dv = lead
    packed = x.q_offsets is not None
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    width_v = block(p.value_dim)
    wide_q, wide_k, wide_v, wide_do = describe(q, 64, WIDTH), describe(k, 64, WIDTH), describe(v, 64, width_v), describe(d_out, 64, width_v)
    stats = [describe(t.view(-1, t.shape[-1]), 1, int(STREAM)) for t in (lses, delta)]
    reads = mods.captured(x.mask), mods.captured(x.score)
    keys, queries = (wide_k, wide_v, wide_q, wide_do), (wide_q, wide_do, wide_k, wide_v)
    for of_keys, slopes, descs, out, width, dim, factor in (
        (True, False, keys, dv, width_v, p.value_dim, 1.0),
        (True, True, keys, dk, WIDTH, p.dim, before * gain),
        (False, True, queries, dq, WIDTH, p.dim, before * gain),
    ):
        m, n = (STREAM, STAY) if of_keys else (STAY, STREAM)
        shape = Shape(int(m), int(n), of_keys, slopes, left, right, top_left, packed, sees is not None, dim)
        found, map_strides = None, (0, 0, 0)
        if sees is not None:
            found, map_strides = mask_map(p, sees, reads[0], x, shape.m, shape.n, of_keys, q.device)
        heads, length = (p.kv_heads, p.len_k) if of_keys else (p.heads, p.len_q)
        streaming = (p.tokens or p.len_q) * p.group if of_keys else p.tokens_k or p.tokens or p.len_k
        listed, places, every = None, triton.cdiv(length, int(STAY)), p.batch * heads
        if packed:  # one list for all sequences
            listed = sequence_tiles(p, x, int(STAY), of_keys=of_keys)
            places, every = len(listed), heads
        grid = places * every
        programs, counter = programs_and_counter(grid, tiles.programs, q.device)
        _backward_pass[(programs,)](
            *descs, *stats, describe(out, 64, width), out, lses, delta, lses.shape[-1], counter, listed, x.q_offsets, x.k_offsets, x.q_used, x.k_used, found,
            reads, before * (LOG2E if score is None else 1.0), gain * LOG2E, factor, grid, places, together(p, streaming), heads, p.group, p.len_q, p.len_k,
            every, out.stride()[:3], map_strides, MASK=sees, SCORE=score, SCORE_GRAD=score_grad, C=shape, num_warps=4,
        )  # fmt: skip
