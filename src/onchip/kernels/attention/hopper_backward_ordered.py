"""Gradients of attention on Hopper with nothing added up in memory, so the same bits in every run: passes of the forward kernel's shape.

    over keys       S^T = K Q^T    P^T = exp(S^T - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK += dS^T Q
    over queries    S = Q K^T      P = exp(S - LSE)        dP = dO V^T      dS = P (dP - delta)          dQ += dS K

A tile of 128 rows (keys or queries) stays, 64 to each of two warpgroups; the other side streams past, 64 or 128 at a time. Nothing goes from one
warpgroup to the other. A warpgroup holds 256 columns of sums (128 registers a thread): dK and dV together where a row of both fits, seven products in two
passes; else each in a pass of its own, eight in three. A thread spills nothing in the loops over tiles that need no mask.

Floors of 64 x 128 scores in all passes, in cycles:

    head       products    tensor cores    shared memory    exponentials    L2, at 28 bytes a cycle
    64             7           1,792           1,408            1,024           1,170
    128            7           3,584           3,072            1,024           2,340
    256            8           8,192           8,192            1,536           7,020
    192 / 128      8           5,376           5,504            1,536           4,390

A tile in shared memory is as wide as a power of two, past a head's columns TMA writes zeros; of 192 columns 128 are multiplied and then 64 (192 / 128
padded to 256: 6,656 and 6,528).

Five products up to 128 are 2,560 cycles at 128, and dQ added up in memory (`hopper_backward`). At 256 a step of 64 x 64 has these:

                                                       tensor cores   shared memory   L2
    each warpgroup all of S and dP, half of the rest       3,584          4,608           4,680
    one warpgroup S, P and dV, the other dP, dS and dK     2,560          3,650           4,680
    three passes                                           4,096          4,096           3,510

L2's of the first two are 64 KB of Q and dO, and 64 KB of dQ to be added up: of that no kernel at 128 was seen to do more than 2 TB/s, here 6,900 cycles.
The passes only read, and keep tensor cores and shared memory evenly busy.

Shared memory, 225 KB: the tiles that stay, through which the gradients leave; and a ring of four tiles (three beside the 128 KB of K and V at 256), of
which a step takes two. V (dO) is the first, done with when dP is there, half a step earlier, unless dV is made as well.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton

from onchip.core.device import Device
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.core.trace import hides_keys
from onchip.kernels.attention import mods
from onchip.kernels.attention.hopper_backward_tiles import (
    LOG2E,
    PHASES,
    READERS,
    clear,
    clear_unseen_of,
    send,
    start,
    step_tile,
    steps_of,
    weights,
)
from onchip.kernels.attention.hopper_tiles import anew, locate, programs_and_counter, programs_of
from onchip.kernels.attention.tile import ends, mask_map, order, together
from onchip.kernels.attention.tile_lists import sequence_tiles
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
    here,
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
    wide_product,
)

STAY = gl.constexpr(128)  # rows of a tile that stays
WIDTHS = {64: (64,), 128: (128,), 192: (128, 64), 256: (256,)}  # columns of a head that are multiplied: those that a product takes, powers of two
CUTS = gl.constexpr(WIDTHS)
ROOM = 225 << 10  # bytes of shared memory for tiles
# Hardware barriers: that what stays is done with, and the V (dO) that does; for both warpgroups to meet; of the ring, one a slot, four at most.
OWN_V_LET_GO, OWN_LET_GO, MEETING, SLOTS_LET_GO = gl.constexpr(7), gl.constexpr(10), gl.constexpr(11), gl.constexpr(12)


class Pass(NamedTuple):
    """A launch: the gradients that it makes, and the rows that stream past a tile at a time."""

    makes: str  # of keys "dV", "dK" or "dK, dV"; of queries "dQ"
    stream: int


class Tiles(NamedTuple):
    """The passes, one after the other, and programs at most (`programs_and_counter`)."""

    passes: tuple[Pass, ...]
    programs: int

    def __str__(self):
        passes = [f"{one.makes} {int(STAY)}x{one.stream}" for one in self.passes]
        return f"a pass each for {'; '.join(passes)} tiles, 2 warpgroups, at most {self.programs} programs"

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call, pass by pass."""
        return "; ".join(f"{makes} {_order(p, makes != 'dQ', self.programs)}" for makes, _ in self.passes)


def _order(p: Attention, of_keys: bool, programs: int) -> str:
    heads, length, tokens = (p.kv_heads, p.len_k, p.tokens_k or p.tokens) if of_keys else (p.heads, p.len_q, p.tokens)
    tiles = p.batch * triton.cdiv(length, int(STAY))
    tiles = min(tiles, tokens // int(STAY) + p.batch) if p.keys == "packed" else tiles
    return order(p, tiles * heads, programs, together(p, _streaming(p, of_keys)), of_keys)


def _streaming(p: Attention, of_keys: bool) -> int:
    """What streams past a tile that stays, in all."""
    return (p.tokens or p.len_q) * p.group if of_keys else p.tokens_k or p.tokens or p.len_k


@dataclass(frozen=True)
class Shape:
    """What the device code of a pass is compiled for, beside mask and score."""

    m: int
    n: int
    slots: int  # of the ring
    of_keys: bool  # keys stay: dV and dK
    values: bool  # P is multiplied: dV
    slopes: bool  # dS is multiplied: dK or dQ
    left: int
    right: int
    top_left: bool
    packed: bool
    mapped: bool
    dim: int
    dim_v: int
    padded: bool  # whether the mask may hide padding, which holds anything

    @property
    def stream(self):
        return self.m if self.of_keys else self.n

    @property
    def columns(self):
        return columns(self.dim)

    @property
    def columns_v(self):
        return columns(self.dim_v)

    @property
    def partners(self):
        """Warpgroups that take turns at their products. (Those of a packed batch meet at the end of each sequence anyway.)"""
        return 1 if self.packed else 2


def columns(dim: int) -> int:
    """The columns of a head that are multiplied."""
    return next(width for width in WIDTHS if dim <= width)


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
    """This program's tile number `tiles` that stays, once those before it are done with: when gradients have left through them, or before."""
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
    number, turn = here(gl.program_id(0)), 0
    while number < sizes[0]:
        place, there = locate(number, anew(sizes), lengths, C.of_keys, C)
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
                    at = others + step_tile(x, steps, map_strides, C) * C.stream
                    heads = here(sizes[3]) * group
                    stats = [batch * heads + head, at]
                    if C.packed:
                        late = at % PHASES
                        stats = [late * heads + head, at - late]
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
        if not C.packed:
            head += b * sizes[3]
        i = tile * C.m + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        at = wide_product(head, pitch) + start_q + i
        lse = gl.load(lse_ptr + at, mask=i < len_q, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=i < len_q, other=0.0)
    return lse, delta


@gluon.jit
def _less(values, index, C: gl.constexpr, layout: gl.constexpr):
    """What a tile of scores begins with, so that `values` of the queries are taken off."""
    STREAM: gl.constexpr = C.stream
    zeros = gl.zeros([64, STREAM], gl.float32, layout)
    if C.of_keys:
        zeros = start(zeros, values.index(index), gl.SliceLayout(0, layout))
    else:
        zeros = zeros - values[:, None]
    return zeros


@gluon.jit
def _across(own, far, s, FRESH: gl.constexpr, COLUMNS: gl.constexpr):
    """s + own far^T, a product a cut, started. FRESH: without s."""
    EACH: gl.constexpr = CUTS[COLUMNS]
    for n in gl.static_range(len(EACH)):
        mine, other = own.slice(128 * n, EACH[n], dim=1), far.slice(128 * n, EACH[n], dim=1)
        s = warpgroup_mma(mine, other.permute((1, 0)), s, use_acc=n > 0 or not FRESH, is_async=True)
    return s


@gluon.jit
def _scores(own, far, lses, index, SCORE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """own far^T - LSE, started; LSE is in units of the scores. Before a function of them, own far^T."""
    STREAM: gl.constexpr = C.stream
    if SCORE is None:
        s = _across(own, far, _less(lses, index, C, layout), False, C.columns)
    else:
        s = _across(own, far, gl.zeros([64, STREAM], gl.float32, layout), True, C.columns)
    return s


@gluon.jit
def _no_sum(COLS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    return gl.zeros([64, COLS], gl.float32, layout)


@gluon.jit
def _no_sums(COLUMNS: gl.constexpr):
    """The sums of a gradient, one a cut."""
    EACH: gl.constexpr = CUTS[COLUMNS]
    sums = ()
    for n in gl.static_range(len(EACH)):
        sums = sums + (_no_sum(EACH[n]),)  # noqa: RUF005 (device code)
    return sums


@gluon.jit
def _add(sums, left, far):
    """sums + left far, started."""
    out = ()
    for n in gl.static_range(len(sums)):
        out = out + (warpgroup_mma(left, far.slice(128 * n, sums[n].shape[1], dim=1), sums[n], is_async=True),)  # noqa: RUF005 (device code)
    return out


@gluon.jit
def _more(sums, index, phase, count, x, steps, map_strides, own, ring, stats, call, place, h,
          MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, EDGE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`count` further tiles of the other side from step `x` on. EDGE: they need the mask."""
    of_v, of_d = sums
    mine, mine_v, v_desc = own
    slots, rows, full = ring  # a step takes two slots: with dS those of dO (V) and Q (K), else of Q and dO
    lses, deltas = stats
    if C.of_keys:
        lses, deltas = rows, rows
    length = place[4] if C.of_keys else place[6]
    STREAM: gl.constexpr = C.stream
    D: gl.constexpr = slots.shape[-1]
    DV: gl.constexpr = v_desc.block_type.shape[-1]
    for t in range(count):
        other = step_tile(x + t, steps, map_strides, C) * STREAM
        first, first_phase = index, phase
        second, second_phase = advance(index, phase, C.slots)
        mbarrier.wait(full.index(first), first_phase)
        if C.slopes:
            far, far_v = slots.index(second).reshape([STREAM, D]), _as_tile(slots.index(first), v_desc).reshape([STREAM, DV])
        else:
            far, far_v = slots.index(first).reshape([STREAM, D]), _as_tile(slots.index(second), v_desc).reshape([STREAM, DV])
        if EDGE and C.packed:  # noqa: SIM102 (one is a constant of the compiler's)
            if other + STREAM > length:  # the end of a sequence
                mbarrier.wait(full.index(second), second_phase)
                if C.slopes:
                    clear(far, length - other, STREAM, GROUP)
                if C.values:
                    clear(far_v, length - other, STREAM, GROUP)
                arrive_and_wait(0, MEETING, 256)
        if EDGE and C.padded and not C.of_keys:
            mbarrier.wait(full.index(second), second_phase)
            clear_unseen_of(far, other, steps, map_strides, STREAM, GROUP)
            arrive_and_wait(0, MEETING, 256)
        take_turn(GROUP, C.partners)
        if C.slopes:
            dp = _across(mine_v, far_v, _less(deltas, first, C, s_layout), False, C.columns_v)
            mbarrier.wait(full.index(second), second_phase)
            s = _scores(mine, far, lses, second, SCORE, C, s_layout)
            turn_over(GROUP, C.partners)
            dp = warpgroup_mma_wait(len(CUTS[C.columns]), deps=[dp])
            if not C.values:
                release(first, SLOTS_LET_GO, READERS)
            s = warpgroup_mma_wait(0, deps=[s])
            p, sloped = weights(s, other, h, lses, second, call, place, MASK, SCORE, SCORE_GRAD, EDGE, C, GROUP, s_layout)
        else:
            s = _scores(mine, far, lses, first, SCORE, C, s_layout)
            turn_over(GROUP, C.partners)
            s = warpgroup_mma_wait(0, deps=[s])
            p, sloped = weights(s, other, h, lses, first, call, place, MASK, SCORE, SCORE_GRAD, EDGE, C, GROUP, s_layout)
            release(first, SLOTS_LET_GO, READERS)
            mbarrier.wait(full.index(second), second_phase)
        if C.values:
            left_v = gl.convert_layout(p.to(slots.dtype), p_layout)
            of_v = _add(of_v, left_v, far_v)
        if C.slopes:
            ds = sloped * dp
            if EDGE and C.packed:  # what the next sequence's rows make of it may be NaN
                there = other + gl.arange(0, STREAM, layout=gl.SliceLayout(0, s_layout)) < length
                ds = gl.where(there[None, :], ds, 0.0)
            if EDGE and C.padded:  # V dO^T may be anything where V is padding
                ds = gl.where(p == 0.0, 0.0, ds)
            left = gl.convert_layout(ds.to(slots.dtype), p_layout)
            of_d = _add(of_d, left, far)
        if C.values and C.slopes:
            of_v = warpgroup_mma_wait(len(of_d), deps=of_v + (left_v,))[: len(of_v)]  # noqa: RUF005 (device code)
            release(first, SLOTS_LET_GO, READERS)
        elif C.values:
            of_v = warpgroup_mma_wait(0, deps=of_v + (left_v,))[: len(of_v)]  # noqa: RUF005 (device code)
        if C.slopes:
            of_d = warpgroup_mma_wait(0, deps=of_d + (left,))[: len(of_d)]  # noqa: RUF005 (device code)
        release(second, SLOTS_LET_GO, READERS)
        index, phase = advance(second, second_phase, C.slots)
    return (of_v, of_d), index, phase


@gluon.jit
def _compute(outs, descs, own, ring, message, stats, call, sizes, lengths, map_ptr, map_strides,
             MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    out_desc, out_v_desc, out_ptr, out_v_ptr = outs
    firsts, seconds, own_full, own_v_full = own
    v_desc = descs[3]
    STREAM: gl.constexpr = C.stream
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, STREAM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    mine = firsts.index(GROUP).reshape([64, firsts.shape[-1]])
    mine_v = mine
    if C.slopes:
        mine_v = seconds.index(GROUP).reshape([64, seconds.shape[-1]])
    tiles_of = (mine, mine_v, v_desc)
    index, phase, tiles = 0, 0, 0
    first_turn(GROUP, C.partners)
    number, turn = here(gl.program_id(0)), 0
    while number < sizes[0]:
        place, there = locate(number, anew(sizes), lengths, C.of_keys, C)
        if there:
            rows = _statistics(stats, place, sizes, C, GROUP, s_layout)
            mbarrier.wait(own_full, tiles % 2)
            if C.slopes:
                mbarrier.wait(own_v_full, tiles % 2)
            of_v, of_d = (), ()
            if C.values:
                of_v = _no_sums(C.columns_v)
            if C.slopes:
                of_d = _no_sums(C.columns)
            sums = of_v, of_d
            for member in range(sizes[4] if C.of_keys else 1):
                h = place[1] * sizes[4] + member if C.of_keys else place[1]
                steps = steps_of(place, h, map_ptr, map_strides, C)
                masked, bare, _b, _f, _r = steps
                sums, index, phase = _more(sums, index, phase, masked, 0, steps, map_strides, tiles_of, ring, rows, call, place, h,
                                           MASK, SCORE, SCORE_GRAD, True, C, GROUP, s_layout, p_layout)  # fmt: skip
                sums, index, phase = _more(sums, index, phase, bare, masked, steps, map_strides, tiles_of, ring, rows, call, place, h,
                                           MASK, SCORE, SCORE_GRAD, False, C, GROUP, s_layout, p_layout)  # fmt: skip
            of_v, of_d = sums
            # Gradients leave through tiles of this warpgroup's own rows, which nobody else reads.
            if C.slopes and not C.values:
                release(0, OWN_V_LET_GO, READERS)
            if C.values:
                send(out_v_desc, out_v_ptr, sizes[3], of_v, 1.0, seconds.index(GROUP), place, C.dim_v, C, GROUP)
            if C.slopes:
                send(out_desc, out_ptr, sizes[3], of_d, call[3], firsts.index(GROUP), place, C.dim, C, GROUP)
            if C.packed:  # the buffer was read by threads: the next copy into it comes after
                fence_async_shared()
            tma.store_wait(0)
            release(0, OWN_LET_GO, READERS)
            if C.slopes and C.values:
                release(0, OWN_V_LET_GO, READERS)
            tiles += 1
        number = hear(message, turn, 0, 4)
        forget(message, turn)
        turn += 1


@gluon.jit(do_not_specialize=["tiles", "places", "together", "heads", "group", "len_q", "len_k", "batch_heads", "pitch"])
def _backward_pass(own_desc, own_v_desc, far_desc, far_v_desc, lse_desc, delta_desc, out_desc, out_v_desc, out_ptr, out_v_ptr,
                   lse_ptr, delta_ptr, pitch, counter, listed, q_offsets, k_offsets, q_used, k_used, map_ptr, reads, scale, gain, factor,
                   tiles, places, together, heads, group, len_q, len_k, batch_heads, map_strides,
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
    call, stats = (scale, gain, reads, factor), (lse_ptr, delta_ptr, pitch)
    outs = (out_desc, out_v_desc, out_ptr, out_v_ptr)
    gl.warp_specialize(
        [
            (_compute, (outs, descs, own, ring, told, stats, call, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 0)),
            (_compute, (outs, descs, own, ring, told, stats, call, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 1)),
            (_copy, (descs, own, ring, told, counter, sizes, lengths, map_ptr, map_strides, C)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- host


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The same tiles for every batch and length: a warpgroup's registers hold 256 columns of sums."""
    sums = columns(p.dim), columns(p.value_dim)
    passes = (Pass("dV", 64), Pass("dK", 64))
    if sum(sums) <= 256:
        plain = isinstance(p.mask, Band) and p.score is None and p.keys == "dense"  # what others compute of 64 x 128 scores spills in the loop
        passes = (Pass("dK, dV", 128 if sum(sums) <= 128 and plain else 64),)
    return [Tiles((*passes, Pass("dQ", 128 if max(sums) <= 128 else 64)), programs_of(device))]


def launches(p: Attention, tiles: Tiles, lead, lses, delta, x: Operands, sees, score, score_grad, before: float, gain: float) -> None:
    """One a pass."""
    q, k, v, d_out, _, dq, dk, dv = lead
    packed = x.q_offsets is not None
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    width_v = block(p.value_dim)
    width = max(block(p.dim), width_v)  # dV by itself leaves through K's tiles, and both sides share a ring
    reads = mods.captured(x.mask), mods.captured(x.score)
    for makes, stream in tiles.passes:
        of_keys, values, slopes = makes != "dQ", "dV" in makes, makes != "dV"
        m, n = (stream, int(STAY)) if of_keys else (int(STAY), stream)
        slots = min(4, (ROOM - 2 * int(STAY) * (width + width_v * slopes)) // (2 * stream * width))
        shape = Shape(m, n, slots, of_keys, values, slopes, left, right, top_left, packed, sees is not None, p.dim, p.value_dim, hides_keys(p.mask))
        found, map_strides = None, (0, 0, 0)
        if sees is not None:
            found, map_strides = mask_map(p, sees, x, m, n, of_keys, q.device, shape.padded and not of_keys)
        heads, length = (p.kv_heads, p.len_k) if of_keys else (p.heads, p.len_q)
        side_by_side = together(p, _streaming(p, of_keys))
        listed, places, every = None, triton.cdiv(length, int(STAY)), p.batch * heads
        if packed:  # one list for all sequences
            listed = sequence_tiles(p, x, int(STAY), of_keys=of_keys)
            places, every = len(listed), heads
        grid = places * every
        programs, counter = programs_and_counter(grid, tiles.programs, q.device)
        (own, own_v), (far, far_v), out = ((k, v), (q, d_out), dk) if of_keys else ((q, d_out), (k, v), dq)
        _backward_pass[(programs,)](
            describe(own, 64, width), describe(own_v, 64, width_v), describe(far, stream, width), describe(far_v, stream, width_v),
            *(describe(t.view(-1, t.shape[-1]), 1, stream) for t in (lses, delta)), describe(out, 64, width), describe(dv, 64, width_v), out, dv,
            lses, delta, lses.shape[-1], counter, listed, x.q_offsets, x.k_offsets, x.q_used, x.k_used, found, reads,
            before * (LOG2E if score is None else 1.0), gain * LOG2E, before * gain, grid, places, side_by_side, heads, p.group, p.len_q, p.len_k,
            every, map_strides, MASK=sees, SCORE=score, SCORE_GRAD=score_grad, C=shape, num_warps=4,
        )  # fmt: skip
