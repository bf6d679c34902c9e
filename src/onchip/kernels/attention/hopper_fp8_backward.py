"""Gradients of attention in e4m3 on Hopper, of the numbers that q, k and v stand for: seven products in 8 bits, in two passes, summed in registers; bf16 out.

    dQ, queries stay:      S = Q K^T      P = exp(S - LSE)        dP = dO V^T      dS = P (dP - delta)                         dQ += dS K
    dK, dV, keys stay:     S^T = K Q^T    P^T = exp(S^T - LSE)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO   dK += dS^T Q

A tile stays, 64 rows to each of two or three warpgroups (three do not hold dK and dV); the other side streams past. Nothing goes from one warpgroup to the
other, nothing is added up in memory, and the same bits come in every run. wgmma sums bytes only where they lie side by side, so what the last column
multiplies by is a transposed copy, made once (`fp8_operands.py`), its rows in the order in which a thread holds P and dS: they become operands without a
shuffle.

Q, K, V and dO are e4m3, dO with a scale for each token; P and dS are e5m2. (P in e4m3 beside dO in e5m2 makes the same error of dV up to 16k keys, and twice
as much at 64k, where most weights are below 2^-14; dO in e5m2 costs dQ and dK a quarter more.) All scales are known before a tile is, so that nothing is
looked for in it:
- Of dV and dK the tokens' scales, over the largest, are part of P: exp2(S - LSE + log2 w) 2^15 is at most 2^15, and has all of e5m2's digits down to 2^-29.
- |dP| and |delta| are at most 448^2 dim in units of their scales (a row of O is a mean of V's): dS / 2^(3 + log2 dim) is within 57344. Of numbers drawn
  from a normal distribution dP is about 2^-8 of that bound: weights down to 2^-21 give dS of all digits, and what is less is off by 2^-33 of the bound.
- Scales of 128 keys or queries, over a head's largest, go with the exponent or with delta, where a tile has one.
Against float64, rms, normal numbers: dQ and dK 5.9%, dV 5.8%, full and causal, 300 to 64k keys (emulator, CPU): what rounding P or dS (4.9%), and dO, makes.

Floors of 128 x 128 scores at 128, in cycles:      tensor cores   exponentials   shared memory   L2, at 28 bytes a cycle
                    dQ, 192 queries stay                  1,536          1,024           1,536                     1,170
                    dQ, 128 queries, 128 keys a step      1,536          1,024           1,408                     1,755
                    dK and dV                             2,048          1,024           2,300                     2,380
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Attention, Operands
from onchip.core.scales import Scales
from onchip.kernels.attention.fp8_operands import of_output, scales_of, turned, weighed
from onchip.kernels.attention.hopper_backward_tiles import send, step_tile, steps_of, weights
from onchip.kernels.attention.hopper_tiles import locate, programs_of
from onchip.kernels.attention.tile import ends, for_tma, order, together
from onchip.kernels.hopper import (
    advance,
    arrive_and_wait,
    as_bytes,
    as_words,
    describe,
    draw,
    fence_async_shared,
    first_turn,
    forget,
    gl,
    gluon,
    hear,
    in_order,
    logarithm,
    mbarrier,
    message,
    reclaim,
    release,
    take_turn,
    tell,
    tma,
    tma_load,
    turn_over,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RAISED = 15  # log2 of what P is multiplied by where it is rounded: 2^15 of at most 57344
STEPS_LET_GO, OWN_LET_GO = gl.constexpr(10), gl.constexpr(14)  # hardware barriers: of the ring, one a stage of at most four; of what stays
E5M2 = gl.constexpr(gl.float8e5)


class Tiles(NamedTuple):
    """Warpgroups of 64 queries that stay, keys that stream past and stages of dQ's pass; queries that stream past 128 keys and stages of the other; programs
    at most, each of which draws another tile when it has done one."""

    groups: int
    keys: int
    key_stages: int
    queries: int
    query_stages: int
    programs: int

    def __str__(self):
        of_queries = f"dQ {64 * self.groups}x{self.keys} tiles, {self.groups} warpgroups, {self.key_stages} stages"
        return f"{of_queries}, dK and dV {self.queries}x128, 2 warpgroups, {self.query_stages} stages, at most {self.programs} programs"

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call, pass by pass."""
        queries = p.batch * p.heads * triton.cdiv(p.len_q, 64 * self.groups), together(p, 2 * p.len_k)
        keys = p.batch * p.kv_heads * triton.cdiv(p.len_k, 128), together(p, 2 * p.len_q * p.group)
        return f"dQ {order(p, queries[0], self.programs, queries[1])}; dK, dV {order(p, keys[0], self.programs, keys[1], True)}"


def room(dim: int) -> int:
    """log2 of what P (dP - delta) is divided by, so that e5m2 holds it: dP and delta are sums of `dim` products of at most 448^2."""
    return dim.bit_length() + 2


@dataclass(frozen=True)
class Shape:
    """What the device code of a pass is compiled for."""

    m: int
    n: int
    of_keys: bool  # keys stay: dK and dV
    groups: int  # warpgroups, of 64 rows that stay
    stages: int
    left: int
    right: int
    top_left: bool
    each_q: int  # queries that share a scale; 0: all
    each_k: int
    each_v: int
    dim: int
    packed: bool = False
    mapped: bool = False

    @property
    def stream(self):
        """Rows of a tile that streams past."""
        return self.m if self.of_keys else self.n

    @property
    def stay(self):
        return 64 * self.groups

    @property
    def readers(self):
        """Threads at a release: who computes, and the warp that copies."""
        return 128 * self.groups + 32

    @property
    def shrink(self):
        """Of dS, which is a product of P already raised where keys stay."""
        return 2.0 ** -(room(self.dim) + RAISED)


# ---- device: the copying warp


@gluon.jit
def _fill(ring, cursor, descs, head, tile, C: gl.constexpr):
    """Start the copies of a step into the next stage once it is free; returns the cursor's next place. `head`: sequence and head, and as one number."""
    far, far_v, turned, turned_v, lses, deltas, full = ring
    far_desc, far_v_desc, turned_desc, turned_v_desc, lse_desc, delta_desc = descs
    index, phase, used = cursor
    batch, far_head, row = head
    D: gl.constexpr = far.shape[-1]
    BYTES: gl.constexpr = 3 * far_desc.block_type.nbytes
    reclaim(index, used, C.stages, STEPS_LET_GO, C.readers)
    barrier = full.index(index)
    if C.of_keys:
        mbarrier.expect(barrier, BYTES + far_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
        tma_load(lse_desc, [row, tile * C.stream], barrier, lses.index(index))
        tma_load(delta_desc, [row, tile * C.stream], barrier, deltas.index(index))
    else:
        mbarrier.expect(barrier, BYTES)
    tma_load(far_desc, [batch, far_head, tile * C.stream, 0], barrier, far.index(index))
    tma_load(far_v_desc, [batch, far_head, tile * C.stream, 0], barrier, far_v.index(index))
    if C.of_keys:
        tma_load(turned_v_desc, [batch, far_head, tile * D, 0], barrier, turned_v.index(index))
    tma_load(turned_desc, [batch, far_head, tile * D, 0], barrier, turned.index(index))
    index, phase = advance(index, phase, C.stages)
    return index, phase, used + 1


@gluon.jit
def _copy_own(own, batch, head, row, tiles, C: gl.constexpr):
    """This program's tile number `tiles` that stays, once the one before is done with."""
    own_desc, own_v_desc, firsts, seconds, own_full = own
    if tiles > 0:
        arrive_and_wait(0, OWN_LET_GO, C.readers)
    GROUPS: gl.constexpr = C.groups
    mbarrier.expect(own_full, 2 * GROUPS * own_desc.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        tma_load(own_desc, [batch, head, row + group * 64, 0], own_full, firsts.index(group))
        tma_load(own_v_desc, [batch, head, row + group * 64, 0], own_full, seconds.index(group))


@gluon.jit
def _copy(own, descs, ring, message, counter, sizes, lengths, C: gl.constexpr):
    group = sizes[4]
    cursor, tiles = (0, 0, 0), 0
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, C.of_keys, C)
        batch, own_head, tile, _, _, _, _, _ = place
        if there:
            steps = steps_of(place, own_head, None, (0, 0, 0), C)
            masked, bare, _before, _first, _row = steps
            copied = 0
            for member in range(group if C.of_keys else 1):
                far_head = own_head * group + member if C.of_keys else own_head // group
                head = batch, far_head, batch * sizes[3] * group + far_head
                for x in range(masked + bare):
                    cursor = _fill(ring, cursor, descs, head, step_tile(x, steps, (0, 0, 0), C), C)
                    if copied == 0:  # the tile before is still in use, but the ring is not
                        _copy_own(own, batch, own_head, tile * C.stay, tiles, C)
                        copied = 1
            if copied == 0:
                _copy_own(own, batch, own_head, tile * C.stay, tiles, C)
            tiles += 1
        number = draw(counter, sizes[0])
        tell(message, turn, (number,))
        turn += 1


# ---- device: a computing warpgroup


@gluon.jit
def _scale_of(scale, b, head, first, EACH: gl.constexpr):
    """That of the tokens from `first` on. `scale`: a tensor and its strides."""
    ptr, strides = scale
    at = b * strides[0] + head * strides[1]
    if EACH > 0:
        at += first // EACH * strides[2]
    return gl.load(ptr + at)


@gluon.jit
def _of_step(call, rows, lse_row, delta_row, b, h, first, C: gl.constexpr, layout: gl.constexpr):
    """Of the rows from `first` on that stream past: the factor of S, what is taken off S and off dP, laid out beside them, and the factor of dS."""
    unit, gain, scales = call
    q_scale, k_scale, v_scale = scales
    lse, delta, rho = rows
    factor, in_terms = unit, gain
    if C.of_keys:
        each = _scale_of(q_scale, b, h, first, C.each_q)
        factor, in_terms = factor * each, in_terms * each
        lse = lse_row.reshape([C.stream]).load(gl.SliceLayout(0, layout))
        delta = delta_row.reshape([C.stream]).load(gl.SliceLayout(0, layout))
        if C.each_v > 0:
            delta = delta * rho
        lse, delta = lse[None, :], delta[None, :]
    else:
        if C.each_k > 0:
            each = _scale_of(k_scale, b, h, first, C.each_k)
            factor = factor * each
            lse = lse - logarithm(each)
        if C.each_v > 0:
            each = _scale_of(v_scale, b, h, first, C.each_v)
            lse = lse - logarithm(each)
            delta = delta / each
        lse, delta = lse[:, None], delta[:, None]
    return factor, lse, delta, in_terms


@gluon.jit
def _more(state, count, x, steps, own, ring, rows, call, place, h, EDGE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """`count` further tiles of the other side from step `x` on, of its head `h`. EDGE: they need the mask."""
    acc, acc_v, index, phase = state
    mine, mine_v = own
    far, far_v, turned, turned_v, lses, deltas, full = ring
    D: gl.constexpr = far.shape[-1]
    STREAM: gl.constexpr = C.stream
    for t in range(count):
        first = step_tile(x + t, steps, (0, 0, 0), C) * STREAM
        mbarrier.wait(full.index(index), phase)
        factor, lse, delta, in_terms = _of_step(call, rows, lses.index(index), deltas.index(index), place[0], h, first, C, s_layout)
        zeros = gl.zeros([64, STREAM], gl.float32, s_layout)
        take_turn(GROUP, C.groups)
        s = warpgroup_mma(mine, far.index(index).reshape([STREAM, D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(mine_v, far_v.index(index).reshape([STREAM, D]).permute((1, 0)), zeros - delta, is_async=True)
        turn_over(GROUP, C.groups)
        s = warpgroup_mma_wait(1, deps=[s])
        p, _same = weights(s * factor - lse, first, h, 0, 0, (1.0, 1.0, ((), ()), 0), place, None, None, None, EDGE, C, GROUP, s_layout)
        if C.of_keys:
            words_v = as_words(in_order(p), E5M2)
            left = gl.convert_layout(as_bytes(words_v, E5M2), p_layout)
            acc_v = warpgroup_mma(left, turned_v.index(index).reshape([D, STREAM]).permute((1, 0)), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            terms = p * dp * in_terms
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
            terms = p * dp
        words = as_words(in_order(terms), E5M2)
        left = gl.convert_layout(as_bytes(words, E5M2), p_layout)
        acc = warpgroup_mma(left, turned.index(index).reshape([D, STREAM]).permute((1, 0)), acc, is_async=True)
        if C.of_keys:
            acc, acc_v, words, words_v = warpgroup_mma_wait(0, deps=[acc, acc_v, words, words_v])
        else:
            acc, words = warpgroup_mma_wait(0, deps=[acc, words])
        release(index, STEPS_LET_GO, C.readers)
        index, phase = advance(index, phase, C.stages)
    return acc, acc_v, index, phase


@gluon.jit
def _of_tile(stats, gains, scales, place, sizes, C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Of the rows that stay: LSE and delta of queries and what divides V's scales, what is known of the factors of S and dS, and those of the gradients."""
    lse_ptr, delta_ptr, token_ptr, pitch = stats
    q_scale, k_scale, v_scale = scales
    b, head, tile, _, len_q, _, _, _ = place
    lse, delta, rho, in_terms = 0, 0, 1.0, 1.0
    if C.of_keys:
        gains += b * sizes[3] + head
        unit, factor, factor_v = gl.load(gains), gl.load(gains + 2 * sizes[7]), gl.load(gains + 3 * sizes[7])
        in_terms = C.shrink
        if C.each_k > 0:
            unit = unit * _scale_of(k_scale, b, head, tile * C.n, C.each_k)
        if C.each_v > 0:
            scale = _scale_of(v_scale, b, head, tile * C.n, C.each_v)
            rho, in_terms = 1.0 / scale, in_terms * scale
    else:
        gains += (b * sizes[3] + head) // sizes[4]
        first = tile * C.m + GROUP * 64
        unit = gl.load(gains) * _scale_of(q_scale, b, head, gl.minimum(first, len_q - 1), C.each_q)  # a warpgroup may begin past the last query
        i = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        at = (b * sizes[3] + head).to(gl.int64) * pitch + i
        lse = gl.load(lse_ptr + at, mask=i < len_q, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=i < len_q, other=0.0)
        factor = gl.load(token_ptr + at, mask=i < len_q, other=0.0) * gl.load(gains + sizes[7] // sizes[4])
        factor_v = 0
    return (lse, delta, rho), (unit, in_terms, scales), factor, factor_v


@gluon.jit
def _compute(outs, own, ring, message, stats, gains, scales, sizes, lengths, C: gl.constexpr, GROUP: gl.constexpr):
    out_desc, out_v_desc, buffers = outs
    _, _, firsts, seconds, own_full = own
    D: gl.constexpr = firsts.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.stream, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=4)
    mine = firsts.index(GROUP).reshape([64, D]), seconds.index(GROUP).reshape([64, D])
    index, phase, tiles = 0, 0, 0
    first_turn(GROUP, C.groups)
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        place, there = locate(number, sizes, lengths, C.of_keys, C)
        if there:
            group = sizes[4]
            steps = steps_of(place, place[1], None, (0, 0, 0), C)
            masked, bare, _b, _f, _r = steps
            rows, call, factor, factor_v = _of_tile(stats, gains, scales, place, sizes, C, GROUP, s_layout)
            mbarrier.wait(own_full, tiles % 2)
            acc, acc_v = gl.zeros([64, D], gl.float32, acc_layout), 0
            if C.of_keys:
                acc_v = gl.zeros([64, D], gl.float32, acc_layout)
            state = acc, acc_v, index, phase
            for member in range(group if C.of_keys else 1):
                h = place[1] * group + member if C.of_keys else place[1] // group
                state = _more(state, masked, 0, steps, mine, ring, rows, call, place, h, True, C, GROUP, s_layout, p_layout)
                state = _more(state, bare, masked, steps, mine, ring, rows, call, place, h, False, C, GROUP, s_layout, p_layout)
            acc, acc_v, index, phase = state
            release(0, OWN_LET_GO, C.readers)
            tma.store_wait(0)  # the tile before has left the buffer
            if C.of_keys:
                send(out_v_desc, None, None, (acc_v,), factor_v, buffers.index(GROUP), place, D, C, GROUP)
                tma.store_wait(0)  # so has dV
            else:
                factor = gl.convert_layout(factor, gl.SliceLayout(1, acc_layout))[:, None]
            send(out_desc, None, None, (acc,), factor, buffers.index(GROUP), place, D, C, GROUP)
            tiles += 1
        number = hear(message, turn, 0, 4)
        forget(message, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "places", "together", "heads", "group", "len_q", "len_k", "batch_heads", "pitch"])
def _backward_fp8(own_desc, own_v_desc, far_desc, far_v_desc, turned_desc, turned_v_desc, lse_desc, delta_desc, out_desc, out_v_desc,
                  lse_ptr, delta_ptr, token_ptr, pitch, gains, q_scale, k_scale, v_scale, scale_strides,
                  counter, tiles, places, together, heads, group, len_q, len_k, batch_heads, C: gl.constexpr):  # fmt: skip
    STAGES: gl.constexpr = C.stages
    far = gl.allocate_shared_memory(far_desc.dtype, [STAGES] + far_desc.block_type.shape, far_desc.layout)  # noqa: RUF005 (device code)
    far_v = gl.allocate_shared_memory(far_desc.dtype, [STAGES] + far_desc.block_type.shape, far_desc.layout)  # noqa: RUF005 (device code)
    turned = gl.allocate_shared_memory(far_desc.dtype, [STAGES] + turned_desc.block_type.shape, turned_desc.layout)  # noqa: RUF005 (device code)
    turned_v, lses, deltas = turned, turned, turned
    if C.of_keys:
        turned_v = gl.allocate_shared_memory(far_desc.dtype, [STAGES] + turned_desc.block_type.shape, turned_desc.layout)  # noqa: RUF005 (device code)
        lses = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)  # noqa: RUF005 (device code)
        deltas = gl.allocate_shared_memory(gl.float32, [STAGES] + lse_desc.block_type.shape, lse_desc.layout)  # noqa: RUF005 (device code)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    firsts = gl.allocate_shared_memory(own_desc.dtype, [C.groups] + own_desc.block_type.shape, own_desc.layout)  # noqa: RUF005 (device code)
    seconds = gl.allocate_shared_memory(own_desc.dtype, [C.groups] + own_desc.block_type.shape, own_desc.layout)  # noqa: RUF005 (device code)
    buffers = gl.allocate_shared_memory(out_desc.dtype, [C.groups] + out_desc.block_type.shape, out_desc.layout)  # noqa: RUF005 (device code)
    own_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    told = message(C.groups)
    sizes = (tiles, places, together, heads, group, len_q, len_k, batch_heads, tiles * 0)
    lengths = (None, None, None, None, None)
    ring = (far, far_v, turned, turned_v, lses, deltas, full)
    own = (own_desc, own_v_desc, firsts, seconds, own_full.index(0))
    descs = (far_desc, far_v_desc, turned_desc, turned_v_desc, lse_desc, delta_desc)
    stats, outs = (lse_ptr, delta_ptr, token_ptr, pitch), (out_desc, out_v_desc, buffers)
    scales = ((q_scale, scale_strides[0]), (k_scale, scale_strides[1]), (v_scale, scale_strides[2]))
    if C.groups == 2:
        gl.warp_specialize(
            [
                (_compute, (outs, own, ring, told, stats, gains, scales, sizes, lengths, C, 0)),
                (_compute, (outs, own, ring, told, stats, gains, scales, sizes, lengths, C, 1)),
                (_copy, (own, descs, ring, told, counter, sizes, lengths, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (outs, own, ring, told, stats, gains, scales, sizes, lengths, C, 0)),
                (_compute, (outs, own, ring, told, stats, gains, scales, sizes, lengths, C, 1)),
                (_compute, (outs, own, ring, told, stats, gains, scales, sizes, lengths, C, 2)),
                (_copy, (own, descs, ring, told, counter, sizes, lengths, C)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# ---- host

# Warpgroups of queries, keys that stream past and stages, queries that stream past keys and stages, by head dimension up to.
TILES = ((64, (3, 64, 4, 128, 3)), (128, (3, 64, 4, 64, 4)))


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The tiles of the head dimension."""
    return [Tiles(*pick(TILES, p.dim), programs_of(device))]


def launch(p: Attention, tiles: Tiles, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, None, ()) in bfloat16, as `reference.backward` returns them, of what q, k and v in e4m3 stand for; `out` is bfloat16."""
    new = torch.zeros if 0 in (q.numel(), k.numel()) else torch.empty
    grads = [new(t.shape, dtype=torch.bfloat16, device=t.device) for t in (q, k, v)]
    if q.numel() and k.numel():
        q, k, v, out, d_out, dq, dk, dv = (t.transpose(1, 2) for t in (q, k, v, out, d_out, *grads))  # [batch, heads, len, dim]
        q, k, v = map(for_tma, (q, k, v))
        lasts = [Scales.share(scale, t.shape[2]) for scale, t in zip(x.scales, (q, k, v), strict=True)]
        relative = scales_of(p, x.scales)
        do, do_turned, token, lses, deltas = of_output(p, out, d_out, lse, d_lse, relative, tiles.queries)
        gains, roomy, heavy = weighed(p, x.scale, relative, token, lses, room(p.dim), RAISED)  # of dO's rows the scale goes with P
        rows = [describe(t.view(-1, t.shape[-1]), 1, tiles.queries) for t in (heavy, deltas)]
        _over(p, tiles, False, lasts, (q, do, k, v), None, rows, (dq, dq), (roomy, deltas, token), gains, relative.scales)
        _over(p, tiles, True, lasts, (k, v, q, do), do_turned, rows, (dk, dv), (lses, deltas, token), gains, relative.scales)
    return *grads, None, ()


def _over(p: Attention, tiles: Tiles, of_keys: bool, lasts, tensors, second, rows, outs, stats, gains, scales) -> None:
    """One pass. `tensors`: what stays, and what streams past, of which it multiplies by the first's transposed copy, and by `second` for dV."""
    left, right, top_left = ends(p.mask)
    m, n, groups, stages = (tiles.queries, 128, 2, tiles.query_stages) if of_keys else (64 * tiles.groups, tiles.keys, tiles.groups, tiles.key_stages)
    shape = Shape(m, n, of_keys, groups, stages, left, right, top_left, *lasts, p.dim)
    heads, length, streaming = (p.kv_heads, p.len_k, 2 * p.len_q * p.group) if of_keys else (p.heads, p.len_q, 2 * p.len_k)
    places = triton.cdiv(length, shape.stay)
    grid = places * p.batch * heads
    programs = min(grid, tiles.programs)
    counter = torch.empty(1, dtype=torch.int32, device=gains.device) if grid > programs else None
    first = turned(tensors[2], shape.stream, counter)
    tensors = *tensors, first, first if second is None else second
    blocks = [(64, p.dim)] * 2 + [(shape.stream, p.dim)] * 2 + [(p.dim, shape.stream)] * 2
    _backward_fp8[(programs,)](
        *(describe(t, *b) for t, b in zip(tensors, blocks, strict=True)), *rows, *(describe(t, 64, p.dim) for t in outs), *stats, stats[0].shape[-1], gains,
        *scales, tuple(s.stride() for s in scales),
        counter, grid, places, together(p, streaming), heads, p.group, p.len_q, p.len_k, p.batch * heads, C=shape, num_warps=4,
    )  # fmt: skip
