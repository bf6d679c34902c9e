"""Gradients of attention: the weights are computed again from q, k and LSE, tile by tile (FlashAttention, Dao et al., 2022, algorithm 4).

    P = exp(S - LSE)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q,
    delta = rowsum(dO O) - dLSE

A program takes a tile of keys, all queries stream past it, and dK and dV stay in registers; the heads of a group come one
after the other, so grouped keys need no atomics. dQ is summed in memory in float32 by TMA reductions (Hopper and later: five
products), or, where bits must be the same in every run or there is no TMA, by a second kernel with a tile of queries a
program (seven products). Scores are held transposed, [keys, queries]: P^T and dS^T are then left operands in registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.kernels.attention import mods
from onchip.kernels.attention.tile import (
    LOG2E,
    bar,
    block,
    describable,
    ends,
    fast,
    has_tma,
    inner_span,
    kept,
    key_span,
    mask_map,
    query_span,
    sequence,
    tf32,
)  # fmt: skip

SCRATCH = 64 << 20  # bytes of float32 dQ above which heads go in several launches, so that it stays a small part of what is there anyway
FEWEST = 1024  # programs that such a launch still has, several for each multiprocessor


class Tiles(NamedTuple):
    """Queries and keys a tile, warps, and query tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, {self.warps} warps, {self.stages} stages"


class Plan(NamedTuple):
    """Tiles of the kernel over keys, and of the one over queries; None: dQ is summed by the first."""

    keys: Tiles
    queries: Tiles | None

    def __str__(self):
        return f"{self.keys}; dQ " + ("summed in memory" if self.queries is None else f"by a second kernel, {self.queries}")


# ---- device


@triton.jit
def _delta(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, heads, len_q, o_strides, do_strides, lse_strides, dlse_strides,
           DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """delta = rowsum(dO O) - dLSE, and LSE in base 2, +inf for a row that saw nothing, so that its weights are 0: [batch, heads, len_q]."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_DV)
    inside = (rows < len_q)[:, None] & (dims < DV)[None, :]
    o_ptr += batch.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1]
    do_ptr += batch.to(tl.int64) * do_strides[0] + head.to(tl.int64) * do_strides[1]
    o = tl.load(o_ptr + rows.to(tl.int64)[:, None] * o_strides[2] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + rows.to(tl.int64)[:, None] * do_strides[2] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + rows, mask=rows < len_q, other=float("-inf"))
    if dlse_ptr is not None:
        place = batch.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        delta -= tl.load(dlse_ptr + place, mask=rows < len_q, other=0.0).to(tl.float32)
    empty = lse == float("-inf")
    at = tl.program_id(1).to(tl.int64) * len_q + rows
    tl.store(delta_ptr + at, tl.where(empty, 0.0, delta), mask=rows < len_q)
    tl.store(lse2_ptr + at, tl.where(empty, float("inf"), lse * LOG2E), mask=rows < len_q)


@triton.jit
def _rows(src, row, head, first, batch, stride, last, dim, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, ZERO: tl.constexpr):
    """ROWS queries or keys from `row + first` on, [ROWS, COLS]; ZERO: those past `last` read as 0, whatever lies there."""
    rows = first + tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    if TMA:
        tile = src.load([batch, head, row + first, 0]).reshape(ROWS, COLS)
        if ZERO:
            tile = tl.where((rows < last)[:, None], tile, 0.0)
    else:
        tile = tl.load(src + rows.to(tl.int64)[:, None] * stride + dims[None, :], mask=(rows < last)[:, None] & (dims < dim)[None, :], other=0.0)
    return tile


@triton.jit
def _visible(i, j, at, reads, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr):
    """Whether queries `i` see keys `j`, both real; the two broadcast against each other."""
    b, h, shift, len_q, len_k = at
    seen = (i < len_q) & (j < len_k)
    if MASK is not None:
        seen = seen & MASK(b, h, i, j, len_q, len_k, reads)
    else:
        if RIGHT >= 0:
            seen = seen & (j <= i + (shift + RIGHT))
        if LEFT >= 0:
            seen = seen & (j >= i + (shift - LEFT))
    return seen


@triton.jit
def _past_keys(dk, dv, k, v, q_src, do_src, dq_src, lse_ptr, delta_ptr, first, count, tiles, step, n, place, strides, scale, at, reads, grads, dropout,
               D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
               SCORE_GRAD: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """dk and dv after `count` query tiles: from query `first` on, or those numbered at `tiles`, `step` apart. EDGE: they need the mask."""
    batch, head, row, slot = place
    b, h, _, len_q, len_k = at
    state_ptr, drop_bar, keep_scale, b_h = dropout
    j = (n + tl.arange(0, k.shape[0]))[:, None]
    for t in tl.range(0, count, num_stages=STAGES):
        if tiles is not None:
            m = tl.load(tiles + t * step) * BLOCK_M
        else:
            m = first + t * BLOCK_M
        m = tl.multiple_of(m, BLOCK_M)
        rows = m + tl.arange(0, BLOCK_M)
        i = rows[None, :]
        q = _rows(q_src, row, head, m, batch, strides[0], len_q, D, BLOCK_M, k.shape[1], TMA, EDGE and PACKED)
        lse = tl.load(lse_ptr + rows, mask=rows < len_q, other=float("inf"))
        scores = tl.dot(k, q.T, input_precision=PRECISION)  # [N, M]
        if SCORE is not None:
            raw = scores * scale
            weights = tl.math.exp2(SCORE(raw, b, h, i, j, len_q, len_k, reads[1]) * LOG2E - lse[None, :])
        else:
            weights = tl.math.exp2(scores * (scale * LOG2E) - lse[None, :])
        if EDGE:
            seen = _visible(i, j, at, reads[0], LEFT, RIGHT, MASK)
            weights = tl.where(seen, weights, 0.0)
        do = _rows(do_src, row, head, m, batch, strides[1], len_q, DV, BLOCK_M, v.shape[1], TMA, EDGE and PACKED)
        d_weights = tl.dot(v, do.T, input_precision=PRECISION)
        dropped = weights
        if state_ptr is not None:
            keep = kept(state_ptr, drop_bar, b_h, i, j)
            dropped = tl.where(keep, weights * keep_scale, 0.0)
            d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + rows, mask=rows < len_q, other=0.0)
        ds = weights * (d_weights - delta[None, :])
        if EDGE and (MASK is not None or PACKED):  # 0 times what a hidden place holds may be NaN
            ds = tl.where(seen, ds, 0.0)
        if SCORE is not None:
            ds = SCORE_GRAD(raw, ds, b, h, i, j, len_q, len_k, reads[1], grads, 1)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if dq_src is not None:
            keys = k
            if EDGE and MASK is not None:
                keys = tl.where((tl.max(seen.to(tl.int32), 1) > 0)[:, None], k, 0.0)
            dq = tl.dot(ds.T, keys, input_precision=PRECISION)
            dq_src.atomic_add([batch, slot, row + m, 0], dq.reshape(1, 1, BLOCK_M, k.shape[1]))
    return dk, dv


@triton.jit(do_not_specialize=["first_head", "launched", "heads", "kv_heads", "len_q", "len_k", "drop_bar"])
def _keys(q_src, k_src, v_src, do_src, dq_src, dk_ptr, dv_ptr, lse_ptr, delta_ptr, q_offsets, k_offsets, q_used, k_used, map_ptr, state_ptr, reads, grads,
          scale, first_head, launched, heads, kv_heads, len_q, len_k, total_q, drop_bar, keep_scale, q_strides, k_strides, v_strides, do_strides, dk_strides,
          dv_strides, map_strides,
          D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
          TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dK and dV of one tile of keys of one key head, and with `dq_src` what the tile adds to dQ."""
    PACKED: tl.constexpr = q_offsets is not None
    b, kv_head = tl.program_id(1) // launched, first_head + tl.program_id(1) % launched
    start_q, len_q = sequence(q_offsets, q_used, b, len_q)
    start_k, len_k = sequence(k_offsets, k_used, b, len_k)
    n = tl.program_id(0) * BLOCK_N
    batch = b
    if PACKED:
        batch = b * 0
        if n >= len_k:
            return
    if not TMA:
        k_src += batch.to(tl.int64) * k_strides[0] + kv_head.to(tl.int64) * k_strides[1] + start_k.to(tl.int64) * k_strides[2]
        v_src += batch.to(tl.int64) * v_strides[0] + kv_head.to(tl.int64) * v_strides[1] + start_k.to(tl.int64) * v_strides[2]
    k = _rows(k_src, start_k, kv_head, n, batch, k_strides[2], len_k, D, BLOCK_N, BLOCK_D, TMA, PACKED)
    v = _rows(v_src, start_k, kv_head, n, batch, v_strides[2], len_k, DV, BLOCK_N, BLOCK_DV, TMA, PACKED)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    shift = len_k - len_q
    if TOP_LEFT:
        shift = shift * 0
    group = heads // kv_heads
    first, inner, outer, last = query_span(n, shift, len_q, len_k, LEFT, RIGHT, BLOCK_M, BLOCK_N, PACKED)
    for member in range(group):
        head = kv_head * group + member
        place = (batch, head, start_q, head - first_head * group)
        at = (b, head, shift, len_q, len_k)
        dropout = (state_ptr, drop_bar, keep_scale, b * heads + head)
        stats = (batch * heads + head).to(tl.int64) * total_q + start_q
        q_at, do_at = q_src, do_src
        if not TMA:
            q_at += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1] + start_q.to(tl.int64) * q_strides[2]
            do_at += batch.to(tl.int64) * do_strides[0] + head.to(tl.int64) * do_strides[1] + start_q.to(tl.int64) * do_strides[2]
        strides = (q_strides[2], do_strides[2])
        if MASK is not None:
            row = map_ptr + b.to(tl.int64) * map_strides[0] + head.to(tl.int64) * map_strides[1] + tl.program_id(0).to(tl.int64) * map_strides[2]
            dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, dq_src, lse_ptr + stats, delta_ptr + stats, 0, tl.load(row), row + 2, 1, n, place, strides, scale,
                                at, reads, grads, dropout, D, DV, LEFT, RIGHT, BLOCK_M, MASK, SCORE, SCORE_GRAD, TMA, True, PACKED, PRECISION,
                                STAGES)  # fmt: skip
            dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, dq_src, lse_ptr + stats, delta_ptr + stats, 0, tl.load(row + 1), row + map_strides[2] - 1, -1, n,
                                place, strides, scale, at, reads, grads, dropout, D, DV, LEFT, RIGHT, BLOCK_M, MASK, SCORE, SCORE_GRAD, TMA, False, PACKED,
                                PRECISION, STAGES)  # fmt: skip
        else:
            dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, dq_src, lse_ptr + stats, delta_ptr + stats, first, (inner - first) // BLOCK_M, None, 0, n, place,
                                strides, scale, at, reads, grads, dropout, D, DV, LEFT, RIGHT, BLOCK_M, None, SCORE, SCORE_GRAD, TMA, True, PACKED,
                                PRECISION, STAGES)  # fmt: skip
            dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, dq_src, lse_ptr + stats, delta_ptr + stats, inner, (outer - inner) // BLOCK_M, None, 0, n, place,
                                strides, scale, at, reads, grads, dropout, D, DV, LEFT, RIGHT, BLOCK_M, None, SCORE, SCORE_GRAD, TMA, False, PACKED,
                                PRECISION, STAGES)  # fmt: skip
            if LEFT >= 0 or PACKED:
                dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, dq_src, lse_ptr + stats, delta_ptr + stats, outer, tl.cdiv(last - outer, BLOCK_M), None, 0, n,
                                    place, strides, scale, at, reads, grads, dropout, D, DV, LEFT, RIGHT, BLOCK_M, None, SCORE, SCORE_GRAD, TMA, True,
                                    PACKED, PRECISION, STAGES)  # fmt: skip
    cols = n + tl.arange(0, BLOCK_N)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dk_ptr += batch.to(tl.int64) * dk_strides[0] + kv_head.to(tl.int64) * dk_strides[1]
    dv_ptr += batch.to(tl.int64) * dv_strides[0] + kv_head.to(tl.int64) * dv_strides[1]
    at_k = (start_k + cols).to(tl.int64)[:, None]
    tl.store(dk_ptr + at_k * dk_strides[2] + dims[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), mask=(cols < len_k)[:, None] & (dims < D)[None, :])
    tl.store(dv_ptr + at_k * dv_strides[2] + dims_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=(cols < len_k)[:, None] & (dims_v < DV)[None, :])


@triton.jit
def _past_queries(dq, q, do, lse, delta, k_src, v_src, first, count, tiles, step, rows, place, strides, scale, at, reads, dropout,
                  D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr,
                  SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """dq after `count` key tiles: from key `first` on, or those numbered at `tiles`, `step` apart. EDGE: they need the mask."""
    batch, head, row = place
    b, h, _, len_q, len_k = at
    state_ptr, drop_bar, keep_scale, b_h = dropout
    i = rows[:, None]
    for t in tl.range(0, count, num_stages=STAGES):
        if tiles is not None:
            n = tl.load(tiles + t * step) * BLOCK_N
        else:
            n = first + t * BLOCK_N
        n = tl.multiple_of(n, BLOCK_N)
        j = (n + tl.arange(0, BLOCK_N))[None, :]
        k = _rows(k_src, row, head, n, batch, strides[0], len_k, D, BLOCK_N, q.shape[1], TMA, EDGE and PACKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        if SCORE is not None:
            raw = scores * scale
            weights = tl.math.exp2(SCORE(raw, b, h, i, j, len_q, len_k, reads[1]) * LOG2E - lse[:, None])
        else:
            weights = tl.math.exp2(scores * (scale * LOG2E) - lse[:, None])
        v = _rows(v_src, row, head, n, batch, strides[1], len_k, DV, BLOCK_N, do.shape[1], TMA, EDGE and PACKED)
        d_weights = tl.dot(do, v.T, input_precision=PRECISION)
        if state_ptr is not None:
            d_weights = tl.where(kept(state_ptr, drop_bar, b_h, i, j), d_weights * keep_scale, 0.0)
        ds = weights * (d_weights - delta[:, None])
        if EDGE:
            seen = _visible(i, j, at, reads[0], LEFT, RIGHT, MASK)
            ds = tl.where(seen, ds, 0.0)
            if MASK is not None:
                k = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], k, 0.0)
        if SCORE is not None:
            ds = SCORE_GRAD(raw, ds, b, h, i, j, len_q, len_k, reads[1], (), 0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["heads", "kv_heads", "len_q", "len_k", "drop_bar"])
def _queries(q_src, k_src, v_src, do_src, dq_ptr, lse_ptr, delta_ptr, q_offsets, k_offsets, q_used, k_used, map_ptr, state_ptr, reads,
             scale, heads, kv_heads, len_q, len_k, total_q, drop_bar, keep_scale, q_strides, k_strides, v_strides, do_strides, dq_strides, map_strides,
             D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
             TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dQ of one tile of queries."""
    PACKED: tl.constexpr = q_offsets is not None
    tile_m = tl.program_id(0)
    if RIGHT >= 0:  # the longest rows first
        tile_m = tl.num_programs(0) - 1 - tile_m
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    start_q, len_q = sequence(q_offsets, q_used, b, len_q)
    start_k, len_k = sequence(k_offsets, k_used, b, len_k)
    m = tile_m * BLOCK_M
    batch = b
    if PACKED:
        batch = b * 0
        if m >= len_q:
            return
    if not TMA:
        q_src += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1] + start_q.to(tl.int64) * q_strides[2]
        do_src += batch.to(tl.int64) * do_strides[0] + head.to(tl.int64) * do_strides[1] + start_q.to(tl.int64) * do_strides[2]
        k_src += batch.to(tl.int64) * k_strides[0] + kv_head.to(tl.int64) * k_strides[1] + start_k.to(tl.int64) * k_strides[2]
        v_src += batch.to(tl.int64) * v_strides[0] + kv_head.to(tl.int64) * v_strides[1] + start_k.to(tl.int64) * v_strides[2]
    q = _rows(q_src, start_q, head, m, batch, q_strides[2], len_q, D, BLOCK_M, BLOCK_D, TMA, False)
    do = _rows(do_src, start_q, head, m, batch, do_strides[2], len_q, DV, BLOCK_M, BLOCK_DV, TMA, False)
    rows = m + tl.arange(0, BLOCK_M)
    stats = (batch * heads + head).to(tl.int64) * total_q + start_q + rows
    lse = tl.load(lse_ptr + stats, mask=rows < len_q, other=float("inf"))
    delta = tl.load(delta_ptr + stats, mask=rows < len_q, other=0.0)
    shift = len_k - len_q
    if TOP_LEFT:
        shift = shift * 0
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    place, strides, at = (batch, kv_head, start_k), (k_strides[2], v_strides[2]), (b, head, shift, len_q, len_k)
    dropout = (state_ptr, drop_bar, keep_scale, b * heads + head)
    if MASK is not None:
        row = map_ptr + b.to(tl.int64) * map_strides[0] + head.to(tl.int64) * map_strides[1] + tile_m.to(tl.int64) * map_strides[2]
        dq = _past_queries(dq, q, do, lse, delta, k_src, v_src, 0, tl.load(row), row + 2, 1, rows, place, strides, scale, at, reads, dropout,
                           D, DV, LEFT, RIGHT, BLOCK_N, MASK, SCORE, SCORE_GRAD, TMA, True, PACKED, PRECISION, STAGES)  # fmt: skip
        dq = _past_queries(dq, q, do, lse, delta, k_src, v_src, 0, tl.load(row + 1), row + map_strides[2] - 1, -1, rows, place, strides, scale, at, reads,
                           dropout, D, DV, LEFT, RIGHT, BLOCK_N, MASK, SCORE, SCORE_GRAD, TMA, False, PACKED, PRECISION, STAGES)  # fmt: skip
    else:
        row_first, row_last = m + shift, m + BLOCK_M - 1 + shift
        first, last = key_span(row_first, row_last, len_k, LEFT, RIGHT)
        first = first // BLOCK_N * BLOCK_N
        inner, outer = inner_span(row_first, row_last, len_k, LEFT, RIGHT, BLOCK_N)
        if LEFT >= 0:
            whole = inner < outer
            inner = tl.where(whole, inner, first)
            outer = tl.where(whole, outer, first)
            dq = _past_queries(dq, q, do, lse, delta, k_src, v_src, first, (inner - first) // BLOCK_N, None, 0, rows, place, strides, scale, at, reads, dropout,
                               D, DV, LEFT, RIGHT, BLOCK_N, None, SCORE, SCORE_GRAD, TMA, True, PACKED, PRECISION, STAGES)  # fmt: skip
        dq = _past_queries(dq, q, do, lse, delta, k_src, v_src, inner, (outer - inner) // BLOCK_N, None, 0, rows, place, strides, scale, at, reads, dropout,
                           D, DV, LEFT, RIGHT, BLOCK_N, None, SCORE, SCORE_GRAD, TMA, False, PACKED, PRECISION, STAGES)  # fmt: skip
        dq = _past_queries(dq, q, do, lse, delta, k_src, v_src, outer, tl.cdiv(last - outer, BLOCK_N), None, 0, rows, place, strides, scale, at, reads, dropout,
                           D, DV, LEFT, RIGHT, BLOCK_N, None, SCORE, SCORE_GRAD, TMA, True, PACKED, PRECISION, STAGES)  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    dq_ptr += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
    place = (start_q + rows).to(tl.int64)[:, None] * dq_strides[2] + dims[None, :]
    tl.store(dq_ptr + place, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(rows < len_q)[:, None] & (dims < D)[None, :])


# ---- host

SMALL = (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
IEEE = (Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
KEYS = (
    (64, (Tiles(64, 128, 8, 2), *SMALL)),
    (128, (Tiles(64, 128, 8, 2), *SMALL)),
    (256, (Tiles(64, 64, 8, 1), Tiles(32, 64, 8, 2), *SMALL)),
    (1024, SMALL[1:]),
)
QUERIES = (
    (64, (Tiles(128, 64, 8, 2), *SMALL)),
    (128, (Tiles(128, 64, 8, 2), *SMALL)),
    (256, (Tiles(64, 64, 8, 1), *SMALL)),
    (1024, SMALL[1:]),
)


def configs(p: Attention, device: Device) -> list[Plan]:
    """The fastest tiles that fit; dQ is summed in memory where the sum may come in any order."""
    size, width, width_v = p.dtype.itemsize, block(p.dim), block(p.value_dim)
    half = size == 2 or "tf32" in p.extras

    def fitting(ladder, over_keys: bool) -> list[Tiles]:
        def fits(t: Tiles) -> bool:
            still, moving = (t.n, t.m) if over_keys else (t.m, t.n)
            shared = ((still + moving * t.stages) * (width + width_v) + t.m * t.n) * size + (4 * t.m * width if over_keys else 0)
            registers = (still * (width + width_v) if over_keys else still * width) // (32 * t.warps) + 2 * t.m * t.n // (32 * t.warps)
            return shared <= device.shared_memory and registers <= 224

        tiles = pick(ladder, max(width, width_v)) if half else IEEE
        return [t for t in tiles if fits(t)] or [tiles[-1]]

    keys, queries = fitting(KEYS, True), fitting(QUERIES, False)
    alone = device.kind == "cuda" and device.arch >= 90 and "deterministic" not in p.extras and half
    return [Plan(t, None if alone else queries[0]) for t in keys]


def launch(p: Attention, plan: Plan, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `p`, `x`; as `reference.backward` returns them."""
    q, k, v, d_out = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, d_out))
    packed = x.q_offsets is not None
    reads, (g, sums) = ((), mods.captured(x.score)), ((), [])
    sees = score = score_grad = score_back = None
    if isinstance(p.mask, Traced):
        sees, reads = mods.mask_function(p.mask.text), (mods.captured(x.mask), reads[1])
    if p.score is not None:
        wanted = tuple(t.requires_grad for t in x.score)
        g, sums = mods.gradients(x.score, wanted)
        score, score_grad = mods.score_functions(p.score.text, wanted=wanted, fast=fast(q))
        _, score_back = mods.score_functions(p.score.text, wanted=(False,) * len(wanted), fast=fast(q))
    new = torch.zeros if x.q_used is not None or x.k_used is not None or 0 in (p.len_q, p.len_k) else torch.empty
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() and k.numel():
        lead = [t.transpose(0, 1)[None] if packed else t.transpose(1, 2) for t in (q, k, v, d_out, dq, dk, dv, out)]  # [batch, heads, len, dim]
        delta, lse2 = _statistics(p, lead[7], lead[3], lse, d_lse)
        common = (x, reads, sees, score)
        if plan.queries is None and has_tma(q.device) and all(describable(t) for t in lead[:4]) and p.dim % 4 == 0:
            _over_keys(p, plan.keys, lead, delta, lse2, common, score_grad, g, True)
        else:
            _over_keys(p, plan.keys, lead, delta, lse2, common, score_grad, g, False)
            _over_queries(p, plan.queries or plan.keys, lead, delta, lse2, common, score_back)
    else:
        delta = lse2 = None
    d_sinks = None
    if x.sinks is not None:  # d LSE / d sink = exp(sink - LSE), and a growing LSE shrinks every weight: delta carries both
        d_sinks = torch.zeros_like(x.sinks) if delta is None else _sink_gradient(x.sinks, lse, delta.view(lse.shape))
    d_score = tuple(s if s is None else s.to(t.dtype) for s, t in zip(sums, x.score, strict=True)) if x.score else ()
    return dq, dk, dv, d_sinks, d_score


def _statistics(p: Attention, out, d_out, lse, d_lse):
    """delta and LSE in base 2, float32 [batch, heads, len_q] ([heads, tokens] of a packed problem)."""
    batch, heads, len_q, _ = out.shape
    delta, lse2 = (torch.empty(batch, heads, len_q, dtype=torch.float32, device=out.device) for _ in range(2))
    lse = lse.view(batch, heads, len_q)
    d_lse = d_lse if d_lse is None else d_lse.view(batch, heads, len_q) if d_lse.is_contiguous() else d_lse.reshape(batch, heads, len_q)
    rows = 64 if p.value_dim <= 128 else 16
    _delta[(triton.cdiv(len_q, rows), batch * heads)](
        out, d_out, lse, d_lse, delta, lse2, heads, len_q, out.stride()[:3], d_out.stride()[:3], lse.stride()[:2],
        (0, 0, 0) if d_lse is None else d_lse.stride(), DV=p.value_dim, BLOCK_M=rows, BLOCK_DV=block(p.value_dim),
    )  # fmt: skip
    return delta, lse2


def _describe(tensor, rows: int, width: int):
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, width])


def _over_keys(p: Attention, t: Tiles, lead, delta, lse2, common, score_grad, g, sum_dq: bool) -> None:
    """dK and dV, and with `sum_dq` dQ: some key heads a launch, so that its float32 sums stay small."""
    x, reads, sees, score = common
    q, k, v, d_out, dq, dk, dv, _ = lead
    width, width_v, rows_q = block(p.dim), block(p.value_dim), q.shape[2]
    tma = has_tma(q.device) and all(describable(s) for s in lead[:4])
    sources = (q, k, v, d_out)
    if tma:
        shapes = ((t.m, width), (t.n, width), (t.n, width_v), (t.m, width_v))
        sources = tuple(_describe(s, *shape) for s, shape in zip(sources, shapes, strict=True))
    found, map_strides = (None, (0, 0, 0)) if sees is None else mask_map(p, sees, reads[0], x, t.m, t.n, True, q.device)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    tiles_n, each = triton.cdiv(p.len_k, t.n), p.kv_heads
    if sum_dq and 4 * q.shape[0] * p.heads * rows_q * p.dim > SCRATCH:
        each = min(each, max(1, triton.cdiv(FEWEST, tiles_n * p.batch)))
    for first in range(0, p.kv_heads, each):
        count = min(each, p.kv_heads - first)
        sums = torch.zeros(q.shape[0], count * p.group, rows_q, p.dim, dtype=torch.float32, device=q.device) if sum_dq else None
        _keys[(tiles_n, p.batch * count)](
            *sources, _describe(sums, t.m, width) if sum_dq else None, dk, dv, lse2, delta,
            x.q_offsets, x.k_offsets, x.q_used, x.k_used, found, x.state, reads, g,
            x.scale, first, count, p.heads, p.kv_heads, p.len_q, p.len_k, rows_q, bar(x.drop), 1 / (1 - x.drop),
            *(s.stride()[:3] for s in (q, k, v, d_out, dk, dv)), map_strides,
            D=p.dim, DV=p.value_dim, BLOCK_M=t.m, BLOCK_N=t.n, BLOCK_D=width, BLOCK_DV=width_v, LEFT=left, RIGHT=right, TOP_LEFT=top_left,
            MASK=sees, SCORE=score, SCORE_GRAD=score_grad, TMA=tma, PRECISION=tf32(p), STAGES=t.stages, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        if sum_dq:
            torch.mul(sums, x.scale, out=dq[:, first * p.group : (first + count) * p.group])


def _over_queries(p: Attention, t: Tiles, lead, delta, lse2, common, score_grad) -> None:
    """dQ alone."""
    x, reads, sees, score = common
    q, k, v, d_out, dq, _, _, _ = lead
    width, width_v = block(p.dim), block(p.value_dim)
    tma = has_tma(q.device) and all(describable(s) for s in lead[:4])
    sources = (q, k, v, d_out)
    if tma:
        shapes = ((t.m, width), (t.n, width), (t.n, width_v), (t.m, width_v))
        sources = tuple(_describe(s, *shape) for s, shape in zip(sources, shapes, strict=True))
    found, map_strides = (None, (0, 0, 0)) if sees is None else mask_map(p, sees, reads[0], x, t.m, t.n, False, q.device)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    _queries[(triton.cdiv(p.len_q, t.m), p.batch * p.heads)](
        *sources, dq, lse2, delta, x.q_offsets, x.k_offsets, x.q_used, x.k_used, found, x.state, reads,
        x.scale, p.heads, p.kv_heads, p.len_q, p.len_k, q.shape[2], bar(x.drop), 1 / (1 - x.drop),
        *(s.stride()[:3] for s in (q, k, v, d_out, dq)), map_strides,
        D=p.dim, DV=p.value_dim, BLOCK_M=t.m, BLOCK_N=t.n, BLOCK_D=width, BLOCK_DV=width_v, LEFT=left, RIGHT=right, TOP_LEFT=top_left,
        MASK=sees, SCORE=score, SCORE_GRAD=score_grad, TMA=tma, PRECISION=tf32(p), STAGES=t.stages, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def _sink_gradient(sinks, lse, delta):
    """-sum over rows of exp(sink - LSE) delta, in float32, in sinks' dtype."""
    lse, delta = (s.view(-1, len(sinks), s.shape[-1]) for s in (lse, delta))  # [batch or 1, heads, rows]
    weight = torch.where(lse == -torch.inf, 0.0, (sinks.float()[:, None] - lse).exp())
    return -(weight * torch.where(lse == -torch.inf, 0.0, delta)).sum((0, 2)).to(sinks.dtype)
