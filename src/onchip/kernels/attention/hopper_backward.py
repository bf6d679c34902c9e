"""Gradients of attention on Hopper: a tile of keys stays, past which all queries stream; five products, warp-specialised.

    S^T = K Q^T    P^T = exp(S^T - LSE)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dK += dS^T Q    dQ += dS K

One warp copies (TMA): K and V once, Q with LSE and dO with delta round two rings. Two warpgroups compute, 64 keys each, in turns, so that
one has products while the other has exponentials. Scores are held transposed, so that P^T and dS^T are left operands in registers. dS goes
through shared memory as well, and of the tile before, which nobody waits for, each warpgroup makes half of dQ; the copy engine adds it to
a float32 tensor: in any order, so its last bits differ from run to run. Problems that forbid it, and wider heads, go to `hopper_backward_ordered`.
LSE and delta are what the sums S and dP start from, negated, so that neither is subtracted again. Of 64 queries that see none of a warpgroup's
keys it makes no product but that half of dQ. A bias for each query and key is there as well: each warpgroup has a buffer for its keys' part of a tile,
filled again as soon as it was read, a whole step before it is needed. What is looked up by
distance each thread reads itself, and adds its gradients to sums in memory (`pairs`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced, hides_keys
from onchip.kernels.attention import hopper_backward_ordered, mods, texts
from onchip.kernels.attention.hopper_backward_tiles import (
    LATE,
    LOG2E,
    PHASES,
    READERS,
    clear,
    clear_unseen,
    d_scores,
    send,
    signed,
    start,
    step_tile,
    steps_of,
    unseen,
    weights,
)
from onchip.kernels.attention.hopper_dropout import dropout_of, drops_of, growth, kept_bits
from onchip.kernels.attention.hopper_tiles import key_heads_together, locate, order_of_keys, programs_and_counter, programs_of
from onchip.kernels.attention.pairs import add_by_distance, ask_for, by_distance, distances_of, empty_sums, laid_out, pair_tiles, slopes_of
from onchip.kernels.attention.statistics import finish, sink_gradient, statistics
from onchip.kernels.attention.tile import ends, fast, for_tma, mask_map
from onchip.kernels.attention.tile_lists import sequence_tiles
from onchip.kernels.hopper import (
    advance,
    arrive_and_wait,
    as_halves,
    as_pairs,
    block,
    describe,
    draw,
    fence_async_shared,
    fill,
    fill_both,
    first_turn,
    forget,
    gl,
    gluon,
    hear,
    mbarrier,
    message,
    release,
    ring,
    take_turn,
    tell,
    tma,
    tma_add,
    tma_load,
    turn_over,
    warpgroup_mma,
    warpgroup_mma_wait,
    widened,
)

# Hardware barriers: that a warpgroup's dS lies in shared memory, two each; that K and V are done with; for both to meet; of the two rings, one a stage.
WRITTEN, KEYS_LET_GO, MEETING, QUERIES_LET_GO, OUTPUTS_LET_GO = gl.constexpr(4), gl.constexpr(10), gl.constexpr(11), gl.constexpr(12), gl.constexpr(14)
BUFFERS = gl.constexpr(3)  # of dS: one is written while the other warpgroup, up to a tile behind or ahead, reads its neighbour
NOWHERE = gl.constexpr(1 << 30)  # the row of the tile before the first, of which there is nothing to add


class Tiles(NamedTuple):
    """Queries and keys a tile, query tiles in flight, programs at most (`programs_and_counter`), and the launches, a share of the heads each.

    The more launches, the fewer float32 copies of dQ there are at once.
    """

    m: int
    n: int
    stages: int
    shares: int
    programs: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, 2 warpgroups, {self.stages} stages, at most {self.programs} programs, {self.shares} launches"

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call."""
        return order_of_keys(p, self.n, self.programs, launches=self.shares)


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for, beside mask and score."""

    m: int
    n: int
    stages: int
    left: int
    right: int
    top_left: bool
    packed: bool
    mapped: bool
    dim: int
    dim_v: int
    steps: tuple[int, int, int] | None  # of a bias that a score adds, which the copy engine brings: how far a sequence, a head and a query
    # are in it; as a kernel's arguments they would take registers of all it does (52 bytes of spills)
    far: bool  # whether what a score adds lies in memory by distance (`pairs`)
    summed: bool  # whether that has a gradient
    drops: bool  # whether weights are dropped
    padded: bool  # whether the mask may hide padding, which holds anything
    of_keys = True

    @property
    def adds(self):
        """Whether scores begin with a bias."""
        return self.steps is not None

    @property
    def blind(self):
        """Whether a band hides all of a warpgroup's keys from some tiles of queries that see the other's: where these are not longer than its keys."""
        return self.m == 64 and not self.mapped

    @property
    def partners(self):
        """Warpgroups that take turns at their products. (Those of a packed batch meet at the end of each sequence anyway; without turns they are faster.)"""
        return 1 if self.packed else 2


# ---- device: the copying warp


@gluon.jit
def _copy(descs, still, rings, message, counter, sizes, lengths, map_ptr, map_strides, C: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, t_desc = descs
    q_ring, do_ring, t_rings = rings
    heads, group = sizes[3] * sizes[4], sizes[4]
    q_at, do_at, t_at, t_next, tiles = (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), 0
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, True, C)
        b, kv_head, tile_n, start_q, _, start_k, _, _ = place
        if there:
            batch = b
            if C.packed:
                batch = b * 0
            keys = [batch, kv_head, start_k + tile_n * C.n, 0]
            copied = 0
            for member in range(group):
                head = kv_head * group + member
                steps = steps_of(place, head, map_ptr, map_strides, C)
                masked, bare, _before, _first, _row = steps  # `_` is of another type already
                for x in range(masked + bare):
                    m = start_q + step_tile(x, steps, map_strides, C) * C.m
                    if C.far:
                        ask_for(t_desc, b, head, tile_n * C.n, sizes[6], m, C.n, C.m)
                    if C.adds:
                        OF_BATCH: gl.constexpr = C.steps[0]
                        OF_HEAD: gl.constexpr = C.steps[1]
                        OF_QUERY: gl.constexpr = C.steps[2]
                        for warpgroup in gl.static_range(2):
                            pair = [b * OF_BATCH, head * OF_HEAD, (m - start_q) * OF_QUERY, tile_n * C.n + warpgroup * 64]
                            t_next = fill(t_rings[warpgroup], t_at, t_desc, pair, 1, 0, 0)
                        t_at = t_next
                    row = batch * heads + head
                    late = m * 0
                    if C.packed:
                        late = m % PHASES
                        row = late * heads + head
                    q_at = fill_both(q_ring, q_at, q_desc, [batch, head, m, 0], lse_desc, [row, m - late], C.stages, QUERIES_LET_GO, READERS)
                    if copied == 0:  # the tile before is still in use, but its rings are not
                        _copy_keys(still, k_desc, v_desc, keys, tiles)
                        copied = 1
                    do_at = fill_both(do_ring, do_at, do_desc, [batch, head, m, 0], delta_desc, [row, m - late], C.stages, OUTPUTS_LET_GO, READERS)
            if copied == 0:
                _copy_keys(still, k_desc, v_desc, keys, tiles)
            tiles += 1
        number = draw(counter, sizes[0])
        tell(message, turn, (number,))
        turn += 1


@gluon.jit
def _copy_keys(still, k_desc, v_desc, at, tiles):
    """K and V of this program's tile number `tiles`, once those before it are done with."""
    k_tile, v_tile, full = still
    if tiles > 0:
        arrive_and_wait(0, KEYS_LET_GO, READERS)
    mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, at, full, k_tile)
    tma_load(v_desc, at, full, v_tile)


# ---- device: a computing warpgroup


@gluon.jit
def _begin(t_ring, phase, m, unit, M: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """What the scores of a step begin with: 0, or a bias, in units of the scores; its buffer is let go."""
    zeros = gl.zeros([64, M], gl.float32, layout)
    if C.far:
        zeros = by_distance(t_ring, m, M, layout)
    elif C.adds:
        tiles, full, empty = t_ring
        mbarrier.wait(full.index(0), phase)
        zeros = widened(tiles.index(0).reshape([M, 64]).permute((1, 0)).load(layout)) * unit
        mbarrier.arrive(empty.index(0), count=1)
    return zeros


@gluon.jit
def _scores(zeros, k, queries, lses, index, SCORE: gl.constexpr, M: gl.constexpr, layout: gl.constexpr):
    """K Q^T - LSE, started; LSE is in units of the scores. Before a function of them, K Q^T."""
    q = queries.index(index).reshape([M, queries.shape[-1]]).permute((1, 0))
    if SCORE is None:
        s = warpgroup_mma(k, q, start(zeros, lses.index(index), gl.SliceLayout(0, layout)), is_async=True)
    else:
        s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    return s


@gluon.jit
def _outputs(v, outputs, deltas, index, M: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """V dO^T - delta, started; where weights are dropped, of whom dP knows nothing, V dO^T."""
    do, zeros = outputs.index(index).reshape([M, outputs.shape[-1]]).permute((1, 0)), gl.zeros([64, M], gl.float32, layout)
    if C.drops:
        dp = warpgroup_mma(v, do, zeros, use_acc=False, is_async=True)
    else:
        dp = warpgroup_mma(v, do, start(zeros, deltas.index(index), gl.SliceLayout(0, layout)), is_async=True)
    return dp


@gluon.jit
def _queries(buffers, step, k, C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """dS K of the tile before, this warpgroup's half of it, started."""
    ds = buffers.index((step + (BUFFERS - 1)) % BUFFERS)
    D: gl.constexpr = k.shape[1]
    if C.m == 64:  # half the columns
        none = gl.zeros([64, D // 2], gl.float32, layout)
        dq = warpgroup_mma(ds.permute((1, 0)), k.slice(GROUP * (D // 2), D // 2, dim=1), none, use_acc=False, is_async=True)
    else:  # half the rows
        none = gl.zeros([64, D], gl.float32, layout)
        dq = warpgroup_mma(ds.slice(GROUP * 64, 64, dim=1).permute((1, 0)), k, none, use_acc=False, is_async=True)
    return dq


@gluon.jit
def _add(dq, desc, buffer, row, m, place, C: gl.constexpr, GROUP: gl.constexpr):
    """Half of dQ to the sums in global memory; a thread's 8 of 32 columns side by side."""
    ROWS: gl.constexpr = dq.shape[0]
    COLS: gl.constexpr = dq.shape[1]
    first = m
    if C.m != 64:
        first += GROUP * 64
    if C.packed:  # the rows of the next sequence; not even 0 times what is NaN here
        mine = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, dq.type.layout)) < place[4]
        dq = gl.where(mine[:, None], dq, 0.0)
    if m < NOWHERE:
        tma.store_wait(0)
        buffer.reshape([ROWS, COLS]).store(dq.reshape([ROWS, COLS // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLS]))
        fence_async_shared()
        tma_add(desc, [row, place[3] + first, GROUP * COLS if C.m == 64 else 0], buffer)


@gluon.jit
def _more(state, count, x, steps, map_strides, still, rings, buffers, dq_desc, call, place, h, row, drops,
          MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, PART: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr, dq_layout: gl.constexpr):  # fmt: skip
    """`count` further query tiles from step `x` on. PART: "edge", they need the mask; "whole"; "blind", they see none of this warpgroup's keys, so that it
    makes its half of the dQ before and nothing else."""
    EDGE: gl.constexpr = PART != "whole"
    dk, dv, index, phase, step, row_before, m_before = state
    q_ring, do_ring, t_ring = rings
    queries, lses, q_full = q_ring
    outputs, deltas, do_full = do_ring
    written, dq_buffer = buffers
    M: gl.constexpr = C.m
    D: gl.constexpr = queries.shape[-1]
    k = still[0].reshape([C.n, D])
    v = still[1].reshape([C.n, outputs.shape[-1]])
    for t in range(count):
        m = step_tile(x + t, steps, map_strides, C) * M
        q = queries.index(index).reshape([M, D])
        do = outputs.index(index).reshape([M, outputs.shape[-1]])
        begun = _begin(t_ring, index, m, 1.0 / call[3], M, C, s_layout)  # two stages: `index` is the other one at each step, as a phase is
        mbarrier.wait(q_full.index(index), phase)
        if EDGE and C.packed:  # noqa: SIM102 (one is a constant of the compiler's)
            if m + M > place[4]:  # the end of a sequence; what the scores begin with is hidden
                mbarrier.wait(do_full.index(index), phase)
                clear(q, place[4] - m, M, GROUP)
                clear(do, place[4] - m, M, GROUP)
                arrive_and_wait(0, MEETING, 256)
        bits = m
        if C.drops and PART != "blind":
            bits = kept_bits(m, drops, M, True, s_layout)
        take_turn(GROUP, C.partners)
        if PART == "blind":
            mbarrier.wait(do_full.index(index), phase)
            turn_over(GROUP, C.partners)
            ds = gl.zeros([64, M], queries.dtype, s_layout)
        else:
            s = _scores(begun, k.slice(GROUP * 64, 64, dim=0), queries, lses, index, SCORE, M, s_layout)
            mbarrier.wait(do_full.index(index), phase)
            dp = _outputs(v.slice(GROUP * 64, 64, dim=0), outputs, deltas, index, M, C, s_layout)
            turn_over(GROUP, C.partners)
            s = warpgroup_mma_wait(1, deps=[s])
            p, sloped = weights(s, m, h, lses, index, call, place, MASK, SCORE, SCORE_GRAD, EDGE, C, GROUP, s_layout)
            if C.drops:
                p = signed(p, bits)
                kept_p = as_halves(as_pairs(p, queries.dtype, True), queries.dtype)
            else:
                kept_p = p.to(queries.dtype)
            left_p = gl.convert_layout(kept_p, p_layout)
            dv = warpgroup_mma(left_p, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            there = m + gl.arange(0, M, layout=gl.SliceLayout(0, s_layout)) < place[4]  # else it is the delta of the next sequence
            if C.drops:
                delta = deltas.index(index).reshape([M]).load(gl.SliceLayout(0, s_layout))
                if EDGE and C.packed:
                    delta = gl.where(there, delta, 0.0)
                ds = d_scores(dp, p, sloped, delta, SCORE)
            else:
                if EDGE and C.packed:
                    dp = gl.where(there[None, :], dp, 0.0)
                ds = sloped * dp
            if C.padded and EDGE:  # V dO^T may be anything where V is padding
                ds = gl.where(p == 0.0, 0.0, ds)
            if C.summed:
                add_by_distance(call[2][1], place[0], h, place[2] * C.n + GROUP * 64, place[6], m, ds, s_layout)
            ds = ds.to(queries.dtype)
        arrive_and_wait((step + 1) % 2, WRITTEN + 2 * (1 - GROUP), 256)
        written.index(step % BUFFERS).slice(GROUP * 64, 64, dim=0).store(ds)
        fence_async_shared()
        release(step % 2, WRITTEN + 2 * GROUP, 256)
        if PART == "blind":
            dq = warpgroup_mma_wait(0, deps=[_queries(written, step, k, C, GROUP, dq_layout)])
        else:
            left = gl.convert_layout(ds, p_layout)
            dq = _queries(written, step, k, C, GROUP, dq_layout)
            dk = warpgroup_mma(left, q, dk, is_async=True)
            dv, left_p, dq = warpgroup_mma_wait(1, deps=[dv, left_p, dq])
        release(index, OUTPUTS_LET_GO, READERS)
        _add(dq, dq_desc, dq_buffer, row_before, m_before, place, C, GROUP)
        if PART != "blind":
            dk, left = warpgroup_mma_wait(0, deps=[dk, left])
        release(index, QUERIES_LET_GO, READERS)
        index, phase = advance(index, phase, C.stages)
        step, row_before, m_before = step + 1, row, m
    return dk, dv, index, phase, step, row_before, m_before


@gluon.jit
def _compute(outs, dq_desc, still, rings, message, buffers, call, dropout, sizes, lengths, map_ptr, map_strides,
             MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    dk_desc, dv_desc, dk_ptr, dv_ptr = outs
    k_tile, v_tile, full = still
    queries, outputs = rings[0][0], rings[1][0]
    group = sizes[4]
    M: gl.constexpr = C.m
    N: gl.constexpr = C.n
    D: gl.constexpr = queries.shape[-1]
    DV: gl.constexpr = outputs.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    DQ_COLS: gl.constexpr = D // 2 if M == 64 else D
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ_COLS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=k_layout, k_width=2)
    written, dq_buffer = buffers
    index, phase, step, tiles = 0, 0, 0, 0
    release(1, WRITTEN + 2 * GROUP, 256)
    first_turn(GROUP, C.partners)
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, True, C)
        b, kv_head, tile_n, _, _, _, len_k, _ = place
        if there:
            batch = b
            if C.packed:
                batch = b * 0
            rows = (batch * sizes[3] - sizes[8]) * group  # of the sums: that of head 0
            mbarrier.wait(full, tiles % 2)
            if C.padded:  # the other's half is read behind the first dS alone, when both have met
                clear_unseen(k_tile.reshape([N, D]), place, group, map_ptr, map_strides, N, GROUP)
            elif C.packed:  # noqa: SIM102 (one is a constant of the compiler's)
                if tile_n * N + N > len_k:
                    clear(k_tile.reshape([N, D]), len_k - tile_n * N, N, GROUP)
                    clear(v_tile.reshape([N, DV]), len_k - tile_n * N, N, GROUP)
                    arrive_and_wait(0, MEETING, 256)
            dk, dv = gl.zeros([64, D], gl.float32, k_layout), gl.zeros([64, DV], gl.float32, v_layout)
            state = dk, dv, index, phase, step, rows * 0, rows * 0 + NOWHERE
            for member in range(group):
                h = kv_head * group + member
                steps = steps_of(place, h, map_ptr, map_strides, C)
                masked, bare, _b, _f, _r = steps
                read = rings
                if C.far:
                    read = (rings[0], rings[1], distances_of(call[2][1], b, h, tile_n * N + GROUP * 64, len_k, M, s_layout))
                drops = drops_of(dropout, tile_n * N + GROUP * 64, b * (sizes[3] * group) + h, C)
                early, late = unseen(place, steps, C, GROUP)
                if C.blind and GROUP == 1 and C.right >= 0:
                    state = _more(state, early, 0, steps, map_strides, still, read, buffers, dq_desc, call, place, h, rows + h, drops,
                                  MASK, SCORE, SCORE_GRAD, "blind", C, GROUP, s_layout, p_layout, dq_layout)  # fmt: skip
                state = _more(state, masked - early - late, early, steps, map_strides, still, read, buffers, dq_desc, call, place, h, rows + h, drops,
                              MASK, SCORE, SCORE_GRAD, "edge", C, GROUP, s_layout, p_layout, dq_layout)  # fmt: skip
                if C.blind and GROUP == 0 and C.left >= 0:
                    state = _more(state, late, masked - late, steps, map_strides, still, read, buffers, dq_desc, call, place, h, rows + h, drops,
                                  MASK, SCORE, SCORE_GRAD, "blind", C, GROUP, s_layout, p_layout, dq_layout)  # fmt: skip
                state = _more(state, bare, masked, steps, map_strides, still, read, buffers, dq_desc, call, place, h, rows + h, drops,
                              MASK, SCORE, SCORE_GRAD, "whole", C, GROUP, s_layout, p_layout, dq_layout)  # fmt: skip
            dk, dv, index, phase, step, row, m = state
            arrive_and_wait((step + 1) % 2, WRITTEN + 2 * (1 - GROUP), 256)  # one step more, of dQ alone
            release(step % 2, WRITTEN + 2 * GROUP, 256)
            dq = warpgroup_mma_wait(0, deps=[_queries(written, step, k_tile.reshape([N, D]), C, GROUP, dq_layout)])
            step += 1
            release(0, KEYS_LET_GO, READERS)
            tiles += 1
            _add(dq, dq_desc, dq_buffer, row, m, place, C, GROUP)
            tma.store_wait(0)  # dQ has left the buffer
            send(dv_desc, dv_ptr, sizes[3], (dv,), growth(dropout, C), dq_buffer, place, C.dim_v, C, GROUP)
            tma.store_wait(0)  # so has dV
            send(dk_desc, dk_ptr, sizes[3], (dk,), call[3] * growth(dropout, C), dq_buffer, place, C.dim, C, GROUP)
        number = hear(message, turn, 0, 4)
        forget(message, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "tiles_n", "together", "kv_heads", "group", "len_q", "len_k", "batch_heads", "first"])
def _backward(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, t_desc, dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr,
              counter, listed, q_offsets, k_offsets, q_used, k_used, map_ptr, reads, dropout, scale, gain, factor, tiles, tiles_n, together, kv_heads, group,
              len_q, len_k, batch_heads, first, map_strides,
              MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    queries, q_full, _ = ring(q_desc, C.stages, 0)
    outputs, do_full, _ = ring(do_desc, C.stages, 0)
    lses = gl.allocate_shared_memory(lse_desc.dtype, [C.stages] + lse_desc.block_type.shape, lse_desc.layout)  # noqa: RUF005 (device code)
    deltas = gl.allocate_shared_memory(lse_desc.dtype, [C.stages] + lse_desc.block_type.shape, lse_desc.layout)  # noqa: RUF005 (device code)
    k_tile = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.n, C.m], q_desc.dtype)
    written = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS, C.n, C.m], ds_layout)
    dq_buffers = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)  # noqa: RUF005 (device code)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    told = message(2)
    sizes = (tiles, tiles_n, together, kv_heads, group, len_q, len_k, batch_heads, first)
    lengths, still = (listed, q_offsets, k_offsets, q_used, k_used), (k_tile, v_tile, full.index(0))
    q_ring, do_ring = (queries, lses, q_full), (outputs, deltas, do_full)
    call, outs = (scale, gain, reads, factor), (dk_desc, dv_desc, dk_ptr, dv_ptr)
    descs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, reads[1] if C.far else t_desc)
    t_rings = (None, None)
    if C.adds:
        t_rings = (ring(t_desc, 1, 1), ring(t_desc, 1, 1))
        fence_async_shared()
    mine, others = (written, dq_buffers.index(0)), (written, dq_buffers.index(1))
    my_rings, their_rings = (q_ring, do_ring, t_rings[0]), (q_ring, do_ring, t_rings[1])
    gl.warp_specialize(
        [
            (_compute, (outs, dq_desc, still, my_rings, told, mine, call, dropout, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 0)),
            (_compute, (outs, dq_desc, still, their_rings, told, others, call, dropout, sizes, lengths, map_ptr, map_strides, MASK, SCORE, SCORE_GRAD, C, 1)),
            (_copy, (descs, still, (q_ring, do_ring, t_rings), told, counter, sizes, lengths, map_ptr, map_strides, C)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- host

# Queries and keys a tile, and stages, by head dimension up to.
TILES = ((64, (128, 128, 2)), (128, (64, 128, 2)))
MOST = 1 << 19  # keys times heads whose gradients go in one launch


def configs(p: Attention, device: Device) -> list[Tiles | hopper_backward_ordered.Tiles]:
    """The tiles of the head dimension. Long problems go in several launches."""
    if _ordered(p):
        return hopper_backward_ordered.configs(p, device)
    m, n, stages = pick(TILES, 128 if "dropout" in p.extras or pairs_of(p) or texts.far_of(p) is not None else max(p.dim, p.value_dim))
    keys = p.batch * p.len_k if p.keys == "dense" else p.tokens_k or p.tokens
    shares = max(1, triton.cdiv(keys * p.kv_heads, MOST))
    return [Tiles(m, n, stages, shares, programs_of(device))]


def _ordered(p: Attention) -> bool:
    """Whether nothing may be summed in memory, or a warpgroup's registers do not hold dK and dV of its keys beside what dQ needs."""
    return max(p.dim, p.value_dim) > TILES[-1][0] or not {"batch_invariant", "deterministic"}.isdisjoint(p.extras)


def pairs_of(p: Attention) -> texts.PairTile | None:
    """What the copy engine brings of a score that is the product and a half-precision tensor at [.., i, j], and does nothing else."""
    tile = p.score and not _ordered(p) and texts.only_adds(p.score.text) and texts.pair_tile(p.score.text)
    return tile if tile and tile.dtype.itemsize == 2 else None


def launch(p: Attention, tiles: Tiles, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `p`, `x`; as `reference.backward` returns them."""
    if not _ordered(p) and texts.far_of(p) is not None and q.numel() and k.numel():
        return _by_distance(p, tiles, q, k, v, out, lse, d_out, d_lse, x)
    packed = x.q_offsets is not None
    new = torch.zeros if x.q_used is not None or x.k_used is not None or 0 in (q.numel(), k.numel()) else torch.empty
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta = None
    if q.numel():
        lead = [t.transpose(0, 1)[None] if packed else t.transpose(1, 2) for t in (q, k, v, d_out, out, dq, dk, dv)]  # [batch, heads, len, dim]
        lead = [*map(for_tma, lead[:4]), *lead[4:]]
        sees = mods.mask_function(p.mask.text) if isinstance(p.mask, Traced) else None
        score = score_grad = None
        before, gain = x.scale, 1.0
        unit = 1 / (x.scale or 1.0)  # LSE in units of the scores
        added = pairs_of(p) if x.scale > 0 else None
        if (p.score is not None and not added) or x.scale <= 0:  # LSE over a negative scale is no place to start from
            text, factor, gain = texts.fold(p.score.text if p.score is not None else texts.IDENTITY)
            score, score_grad = mods.score_functions(text, wanted=(False,) * len(x.score), fast=fast(q))
            before, unit = x.scale * factor, LOG2E
        rows = max(one.stream for one in tiles.passes) if _ordered(p) else tiles.m
        delta, lses = statistics(p, lead[4], lead[3], lse, d_lse, unit, rows, LATE if packed else 1)  # rows that fill up a tile see nothing
        if k.numel():
            over = hopper_backward_ordered.launches if _ordered(p) else _over
            deltas = delta * (1 - x.drop) if x.drop else delta  # as of weights that do not grow by what dropout leaves: all gradients do at the end
            over(p, tiles, lead, lses, deltas, x, sees, score, score_grad, before, gain)
    d_sinks = None
    if x.sinks is not None:  # d LSE / d sink = exp(sink - LSE), and a growing LSE shrinks every weight: delta carries both
        d_sinks = torch.zeros_like(x.sinks) if delta is None else sink_gradient(x.sinks, lse, delta[:, : len(x.sinks), : lse.shape[-1]])
    return dq, dk, dv, d_sinks, tuple(torch.zeros_like(t) if t.requires_grad else None for t in x.score)


def _by_distance(p: Attention, tiles: Tiles, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """`launch` where a score adds what it looks up by distance."""
    axes, tables = texts.far_of(p), x.score
    plain, x, q, sign = laid_out(p, x, q, axes, of_keys=True)
    sums = empty_sums(p, axes, q.device) if any(t.requires_grad for t in tables) else None
    if sums is not None:
        x = x._replace(score=(*x.score, sums.expand(p.batch, p.heads, -1, -1)))
    dq, dk, dv, d_sinks, _ = launch(plain, tiles, q, k, v, out, lse, d_out, d_lse, x)
    slopes = (None,) * len(tables) if sums is None else slopes_of(p, tables, axes, sums)
    return dq if sign > 0 else dq * sign, dk, dv, d_sinks, slopes


def _over(p: Attention, tiles: Tiles, lead, lses, delta, x: Operands, sees, score, score_grad, before: float, gain: float) -> None:
    """The launches: a share of the key heads each."""
    q, k, v, d_out, _, dq, dk, dv = lead
    packed = x.q_offsets is not None
    width_v = block(p.value_dim)
    width = max(block(p.dim), width_v)  # dV leaves through a buffer as wide as half of dQ
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    far = p.score is None and len(x.score) > 0  # where `_by_distance` has put them
    pairs, steps, added = None, None, p.score is not None and score is None and pairs_of(p)
    if added:
        pairs, steps = pair_tiles(x.score[added.tensor], added.axes, tiles.m, 64)
    shape = Shape(
        tiles.m, tiles.n, tiles.stages, left, right, top_left, packed, sees is not None, p.dim, p.value_dim, steps, far, far and len(x.score) > 1,
        x.drop > 0, hides_keys(p.mask),
    )  # fmt: skip
    reads = mods.captured(x.mask), mods.captured(x.score)
    found, map_strides = None, (0, 0, 0)
    if sees is not None:
        found, map_strides = mask_map(p, sees, x, tiles.m, tiles.n, True, q.device, shape.padded)
    kinds = describe(q, tiles.m, width), describe(k, tiles.n, width), describe(v, tiles.n, width_v), describe(d_out, tiles.m, width_v)
    grads = describe(dk, 64, width), describe(dv, 64, width_v)
    stats = [describe(t.view(-1, t.shape[-1]), 1, tiles.m) for t in (lses, delta)]
    listed, tiles_n, every, keys = None, triton.cdiv(p.len_k, tiles.n), p.batch * p.kv_heads, p.len_k
    if packed:  # one list for all sequences
        listed = sequence_tiles(p, x, tiles.n, of_keys=True)
        tiles_n, every, keys = len(listed), p.kv_heads, p.tokens_k or p.tokens
    at_once = triton.cdiv(every, tiles.shares)
    side_by_side = key_heads_together(p, keys, at_once)
    half = (tiles.m, width // 2) if tiles.m == 64 else (64, width)
    dropout = dropout_of(x)
    held = torch.empty(at_once * p.group, q.shape[2], width, dtype=torch.float32, device=q.device)
    for first in range(0, every, at_once):
        count = min(at_once, every - first)
        sums = held[: count * p.group].zero_()
        grid = tiles_n * count
        programs, counter = programs_and_counter(grid, tiles.programs, q.device)
        factors = before * (LOG2E if score is None else 1.0), gain * LOG2E, before * gain
        _backward[(programs,)](
            *kinds, *stats, pairs, describe(sums, *half), *grads, dk, dv, counter, listed, x.q_offsets, x.k_offsets, x.q_used, x.k_used, found, reads,
            dropout, *factors, grid, tiles_n, side_by_side, p.kv_heads, p.group, p.len_q, p.len_k, count, first, map_strides,
            MASK=sees, SCORE=score, SCORE_GRAD=score_grad, C=shape, num_warps=4,
        )  # fmt: skip
        finish(sums, dq, before * gain / (1 - x.drop), first * p.group)
