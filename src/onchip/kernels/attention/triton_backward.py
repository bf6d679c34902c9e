"""Gradients of attention: the weights are computed again from q, k and LSE, tile by tile (FlashAttention, Dao et al., 2022, algorithm 4).

    P = exp(S - LSE)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q,
    delta = rowsum(dO O) - dLSE

Some programs take a tile of keys, past which all queries stream; dK and dV stay in registers, and the heads of a group come one
after the other. Others take a tile of queries for dQ. Seven products instead of five, but nothing is summed in memory: no
atomics, no float32 copy of dQ, the same bits in every run. (dQ summed by TMA reductions in the first ones: five products,
and 0.65 to 0.8 times the speed on an H200.) Heads too large for two sums in registers take dK and dV in two passes: eight products.
Over keys, scores are held transposed, [keys, queries]: P^T and dS^T are then left operands in registers. LSE and delta stream by TMA as q and dO do;
as loads of each thread they were a third of the instructions of a packed batch, whose rows begin anywhere.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.philox import bar
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced, hides_keys
from onchip.kernels.attention import mods, texts
from onchip.kernels.attention.statistics import apart, sink_gradient, statistics, statistics_apart
from onchip.kernels.attention.tile import (
    LOG2E,
    adjacent,
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
from onchip.kernels.attention.tile_lists import FIELDS, sequence_tiles


class Tiles(NamedTuple):
    """Queries and keys a tile, warps, and query tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, {self.warps} warps, {self.stages} stages"


class Launch(NamedTuple):
    """What a launch sums over keys ("dK, dV", one of the two, or nothing), the tiles for that, and those for dQ, or None."""

    what: str
    keys: Tiles | None
    queries: Tiles | None

    def __str__(self):
        return " beside ".join([f"{self.what} {self.keys}"] * bool(self.what) + [f"dQ {self.queries}"] * (self.queries is not None))


class Plan(tuple):
    """Launches, one after the other."""

    def __str__(self):
        return "; ".join(map(str, self))


# ---- device


@triton.jit
def _head(ptr, strides, batch, head, row):
    """Where `row` of a head lies."""
    return ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]


@triton.jit
def _rows(src, row, head, first, batch, stride, last, dim, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """ROWS queries or keys from `row + first` on, [ROWS, COLS]; without TMA `src` is a pointer to `row`, and those past `last` read as 0."""
    rows = first + tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    if TMA:
        tile = src.load([batch, head, row + first, 0]).reshape(ROWS, COLS)
    else:
        tile = tl.load(src + rows.to(tl.int64)[:, None] * stride + dims[None, :], mask=(rows < last)[:, None] & (dims < dim)[None, :], other=0.0)
    return tile


@triton.jit
def _stats(src, lies, first, ROWS: tl.constexpr, TMA: tl.constexpr):
    """LSE or delta of ROWS queries from `first` on; `lies` has the first query and the head's row, or without TMA where that begins."""
    row, head = lies
    if TMA:
        found = src.load([head, row + first]).reshape(ROWS)
    else:
        found = tl.load(src + head + row + first + tl.arange(0, ROWS))
    return found


@triton.jit
def _step(t, first, tiles, step, jump, BLOCK: tl.constexpr):
    """Where tile `t` of a run begins: it is numbered at `tiles`, `step` apart, or `first` is where tile 0 does, and behind `jump[0]` tiles the run goes on
    `jump[1]` further away."""
    if tiles is not None:
        begin = tl.load(tiles + t * step) * BLOCK
    else:
        begin = first + t * BLOCK
        if jump is not None:
            begin += tl.where(t < jump[0], 0, jump[1])
    return tl.multiple_of(begin, BLOCK)


@triton.jit
def _visible(i, j, at, reads, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr):
    """Whether queries `i` see keys `j`; the two broadcast against each other."""
    b, h, shift, len_q, len_k = at
    seen = True
    if MASK is not None:
        seen = (i < len_q) & (j < len_k) & MASK(b, h, i, j, len_q, len_k, reads)
    else:
        if RIGHT >= 0:
            seen = seen & (j <= i + (shift + RIGHT))
        if LEFT >= 0:
            seen = seen & (j >= i + (shift - LEFT))
    return seen


@triton.jit
def _past_keys(dk, dv, k, v, q_src, do_src, first, count, tiles, step, jump, call, D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, WHAT: tl.constexpr,
               TMA: tl.constexpr, EDGE: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """dk and dv after `count` query tiles, as `_step` has them.

    EDGE: they need the mask.      ZERO: past the last query anything may lie, NaN included, so that a pointer reads q and dO.
    """
    lse_src, delta_src, lies, n, place, strides, scale, gain, at, reads, grads, dropout = call
    batch, head, row = place
    b, h, _, len_q, len_k = at
    state_ptr, drop_bar, keep_scale, b_h = dropout
    j = (n + tl.arange(0, k.shape[0]))[:, None]
    for t in tl.range(0, count, num_stages=STAGES):
        m = _step(t, first, tiles, step, jump, BLOCK_M)
        i = (m + tl.arange(0, BLOCK_M))[None, :]
        q = _rows(q_src, row, head, m, batch, strides[0], len_q, D, BLOCK_M, k.shape[1], TMA and not ZERO)
        lse = _stats(lse_src, lies, m, BLOCK_M, TMA)
        scores = tl.dot(k, q.T, input_precision=PRECISION)  # [N, M]
        if SCORE is not None:
            raw = scores * scale
            weights = tl.math.exp2(SCORE(raw, b, h, i, j, len_q, len_k, reads[1]) * gain - lse[None, :])
        else:
            weights = tl.math.exp2(scores * scale - lse[None, :])
        if EDGE:
            seen = _visible(i, j, at, reads[0], LEFT, RIGHT, MASK)
            if SCORE is not None:  # it may be infinite out there, or sum up gradients; else keys there are rows that nobody stores, and q, dO and the weights 0
                seen = seen & (i < len_q) & (j < len_k)
            weights = tl.where(seen, weights, 0.0)
        do = _rows(do_src, row, head, m, batch, strides[1], len_q, DV, BLOCK_M, BLOCK_DV, TMA and not ZERO)
        keep = True
        if state_ptr is not None:
            keep = kept(state_ptr, drop_bar, b_h, m, n, BLOCK_M, k.shape[0], True)
        if WHAT != "dK":
            dropped = weights
            if state_ptr is not None:
                dropped = tl.where(keep, weights * keep_scale, 0.0)
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        if WHAT != "dV":
            d_weights = tl.dot(v, do.T, input_precision=PRECISION)
            if state_ptr is not None:
                d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
            delta = _stats(delta_src, lies, m, BLOCK_M, TMA)
            ds = weights * (d_weights - delta[None, :])
            if EDGE and (MASK is not None or (PACKED and SCORE is not None)):  # 0 times what a hidden place holds may be NaN
                ds = tl.where(seen, ds, 0.0)
            if SCORE is not None:
                ds = SCORE_GRAD(raw, ds, b, h, i, j, len_q, len_k, reads[1], grads, 1)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _keys(sources, plain, outs, stats, of_q, of_k, again, sizes, strides, map_ptr, map_strides, reads, grads, tile_n, b, kv_head,
          D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
          WHAT: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    """dK and dV (or WHAT of the two) of one tile of keys of a key head of sequence `b`; of a packed batch `again` is where its queries' number is read."""
    q_src, k_src, v_src, do_src, lse_by_k, delta_by_k = sources
    dk_ptr, dv_ptr, _ = outs
    _, _, pitch, state_ptr = stats
    start_q, len_q = of_q
    start_k, len_k = of_k
    scale, gain, heads, _, _, _, drop_bar, keep_scale = sizes
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, _ = strides
    n = tile_n * BLOCK_N
    batch, place = b, start_q
    if PACKED:
        batch, place = b * 0, apart(start_q, b, TILE)
    if n < len_k:
        if not TMA:
            k_src, v_src = _head(k_src, k_strides, batch, kv_head, start_k), _head(v_src, v_strides, batch, kv_head, start_k)
        k = _rows(k_src, start_k, kv_head, n, batch, k_strides[2], len_k, D, BLOCK_N, BLOCK_D, TMA)
        v = k  # dV does without
        dk = 0.0
        dv = 0.0
        if WHAT != "dV":
            v = _rows(v_src, start_k, kv_head, n, batch, v_strides[2], len_k, DV, BLOCK_N, BLOCK_DV, TMA)
            dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if WHAT != "dK":
            dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        factor = scale
        if SCORE is None:
            factor = scale * LOG2E
        for member in range(GROUP):
            head = kv_head * GROUP + member
            if PACKED and GROUP > 1:  # read here, as LLVM makes addresses of what it knows before the loop there, and keeps them in memory
                len_q = tl.load(again, volatile=True)
            shift = len_k - len_q
            if TOP_LEFT:
                shift = shift * 0
            first, inner, outer, last = query_span(n, shift, len_q, len_k, LEFT, RIGHT, BLOCK_M, BLOCK_N, PACKED)
            at = b, head, shift, len_q, len_k
            lies = place, batch * heads + head
            q_at, do_at = q_src, do_src
            if not TMA:
                lies = place, (batch * heads + head).to(tl.int64) * pitch
                q_at, do_at = _head(q_src, q_strides, batch, head, start_q), _head(do_src, do_strides, batch, head, start_q)
            q_end, do_end = q_at, do_at
            if TMA and PACKED:
                q_end, do_end = _head(plain[0], q_strides, batch, head, start_q), _head(plain[1], do_strides, batch, head, start_q)
            call = (lse_by_k, delta_by_k, lies, n, (batch, head, start_q), (q_strides[2], do_strides[2]), factor, gain * LOG2E, at, reads, grads,
                    (state_ptr, drop_bar, keep_scale, b * heads + head))  # fmt: skip
            if MASK is not None:
                row = map_ptr + (b * map_strides[0] + head * map_strides[1] + tile_n).to(tl.int64) * map_strides[2]
                dk, dv = _past_keys(dk, dv, k, v, q_end, do_end, 0, tl.load(row), row + 2, 1, None, call, D, DV, LEFT, RIGHT, BLOCK_M, BLOCK_DV,
                                    MASK, SCORE, SCORE_GRAD, WHAT, TMA, True, PACKED, PACKED, PRECISION, STAGES)  # fmt: skip
                dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, 0, tl.load(row + 1), row + map_strides[2] - 1, -1, None, call, D, DV, LEFT, RIGHT, BLOCK_M,
                                    BLOCK_DV, MASK, SCORE, SCORE_GRAD, WHAT, TMA, False, False, PACKED, PRECISION, STAGES)  # fmt: skip
            else:
                before, bare = (inner - first) // BLOCK_M, (outer - inner) // BLOCK_M
                edges = before
                jump = None
                if LEFT >= 0 or PACKED:  # the tiles at both ends of those that need no mask, in one run
                    edges += tl.cdiv(last - outer, BLOCK_M)
                    jump = before, outer - inner
                dk, dv = _past_keys(dk, dv, k, v, q_end, do_end, first, edges, None, 0, jump, call, D, DV, LEFT, RIGHT, BLOCK_M, BLOCK_DV,
                                    None, SCORE, SCORE_GRAD, WHAT, TMA, True, PACKED, PACKED, PRECISION, STAGES)  # fmt: skip
                dk, dv = _past_keys(dk, dv, k, v, q_at, do_at, inner, bare, None, 0, None, call, D, DV, LEFT, RIGHT, BLOCK_M, BLOCK_DV,
                                    None, SCORE, SCORE_GRAD, WHAT, TMA, False, False, PACKED, PRECISION, STAGES)  # fmt: skip
        cols = n + tl.arange(0, BLOCK_N)
        at_k = (start_k + cols).to(tl.int64)[:, None]
        if WHAT != "dV":
            dims = tl.arange(0, BLOCK_D)
            dk = (dk * (scale * gain)).to(dk_ptr.dtype.element_ty)
            dk_ptr += batch.to(tl.int64) * dk_strides[0] + kv_head.to(tl.int64) * dk_strides[1]
            tl.store(dk_ptr + at_k * dk_strides[2] + dims[None, :], dk, mask=(cols < len_k)[:, None] & (dims < D)[None, :])
        if WHAT != "dK":
            dims_v = tl.arange(0, BLOCK_DV)
            dv_ptr += batch.to(tl.int64) * dv_strides[0] + kv_head.to(tl.int64) * dv_strides[1]
            tl.store(dv_ptr + at_k * dv_strides[2] + dims_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=(cols < len_k)[:, None] & (dims_v < DV)[None, :])


@triton.jit
def _past_queries(dq, q, do, k_src, v_src, first, count, tiles, step, jump, call, D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                  BLOCK_N: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
                  TMA: tl.constexpr, EDGE: tl.constexpr, ZERO: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """dq after `count` key tiles, as `_step` has them. EDGE: they need the mask. ZERO: a pointer reads k, as in `_past_keys`."""
    lse, delta, rows, place, strides, scale, gain, at, reads, dropout = call
    batch, head, row = place
    b, h, _, len_q, len_k = at
    state_ptr, drop_bar, keep_scale, b_h, query = dropout
    i = rows[:, None]
    for t in tl.range(0, count, num_stages=STAGES):
        n = _step(t, first, tiles, step, jump, BLOCK_N)
        j = (n + tl.arange(0, BLOCK_N))[None, :]
        k = _rows(k_src, row, head, n, batch, strides[0], len_k, D, BLOCK_N, q.shape[1], TMA and not ZERO)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        if SCORE is not None:
            raw = scores * scale
            weights = tl.math.exp2(SCORE(raw, b, h, i, j, len_q, len_k, reads[1]) * gain - lse[:, None])
        else:
            weights = tl.math.exp2(scores * scale - lse[:, None])
        v = _rows(v_src, row, head, n, batch, strides[1], len_k, DV, BLOCK_N, do.shape[1], TMA)
        d_weights = tl.dot(do, v.T, input_precision=PRECISION)
        if state_ptr is not None:
            keep = kept(state_ptr, drop_bar, b_h, query, n, q.shape[0], BLOCK_N, False)
            d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
        ds = weights * (d_weights - delta[:, None])
        if EDGE:
            seen = _visible(i, j, at, reads[0], LEFT, RIGHT, MASK) & (j < len_k)
            ds = tl.where(seen, ds, 0.0)
            if PADDED:  # 0 x NaN is NaN: a hidden key may hold anything, and one that is seen has spoilt its row of `ds` already
                k = tl.where(tl.abs(k.to(tl.float32)) < float("inf"), k, 0.0)
        if SCORE is not None:
            ds = SCORE_GRAD(raw, ds, b, h, i, j, len_q, len_k, reads[1], (), 0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _queries(sources, plain, outs, stats, of_q, of_k, sizes, strides, map_ptr, map_strides, reads, tile_m, b, head,
             D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
             PADDED: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dQ of one tile of queries of a head of sequence `b`."""
    q_src, k_src, v_src, do_src = sources
    _, _, dq_ptr = outs
    lse_ptr, delta_ptr, pitch, state_ptr = stats
    start_q, len_q = of_q
    start_k, len_k = of_k
    scale, gain, heads, kv_heads, _, _, drop_bar, keep_scale = sizes
    q_strides, k_strides, v_strides, do_strides, _, _, dq_strides = strides
    kv_head = head // (heads // kv_heads)
    m = tile_m * BLOCK_M
    batch, place = b, start_q
    if PACKED:
        batch, place = b * 0, apart(start_q, b, TILE)
    if m < len_q:
        if not TMA:
            q_src, do_src = _head(q_src, q_strides, batch, head, start_q), _head(do_src, do_strides, batch, head, start_q)
            k_src, v_src = _head(k_src, k_strides, batch, kv_head, start_k), _head(v_src, v_strides, batch, kv_head, start_k)
        k_end = k_src
        if TMA and PACKED:
            k_end = _head(plain[2], k_strides, batch, kv_head, start_k)
        q = _rows(q_src, start_q, head, m, batch, q_strides[2], len_q, D, BLOCK_M, BLOCK_D, TMA)
        do = _rows(do_src, start_q, head, m, batch, do_strides[2], len_q, DV, BLOCK_M, BLOCK_DV, TMA)
        rows = m + tl.arange(0, BLOCK_M)
        at_row = (batch * heads + head).to(tl.int64) * pitch + place + rows
        lse = tl.load(lse_ptr + at_row, mask=rows < len_q, other=float("inf"))
        delta = tl.load(delta_ptr + at_row, mask=rows < len_q, other=0.0)
        shift = len_k - len_q
        if TOP_LEFT:
            shift = shift * 0
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        factor = scale
        if SCORE is None:
            factor = scale * LOG2E
        call = (lse, delta, rows, (batch, kv_head, start_k), (k_strides[2], v_strides[2]), factor, gain * LOG2E, (b, head, shift, len_q, len_k), reads,
                (state_ptr, drop_bar, keep_scale, b * heads + head, m))  # fmt: skip
        if MASK is not None:
            row = map_ptr + (b * map_strides[0] + head * map_strides[1] + tile_m).to(tl.int64) * map_strides[2]
            dq = _past_queries(dq, q, do, k_end, v_src, 0, tl.load(row), row + 2, 1, None, call, D, DV, LEFT, RIGHT, BLOCK_N,
                               MASK, SCORE, SCORE_GRAD, TMA, True, PACKED, PADDED, PACKED, PRECISION, STAGES)  # fmt: skip
            dq = _past_queries(dq, q, do, k_src, v_src, 0, tl.load(row + 1), row + map_strides[2] - 1, -1, None, call, D, DV, LEFT, RIGHT, BLOCK_N,
                               MASK, SCORE, SCORE_GRAD, TMA, False, False, PADDED, PACKED, PRECISION, STAGES)  # fmt: skip
        else:
            row_first, row_last = m + shift, m + BLOCK_M - 1 + shift
            first, last = key_span(row_first, row_last, len_k, LEFT, RIGHT)
            first = first // BLOCK_N * BLOCK_N
            inner, outer = inner_span(row_first, row_last, len_k, LEFT, RIGHT, BLOCK_N)
            before = 0
            jump = None
            if LEFT >= 0:
                whole = inner < outer
                inner = tl.where(whole, inner, first)
                outer = tl.where(whole, outer, first)
                before = (inner - first) // BLOCK_N
                jump = before, outer - inner
            else:
                first = outer
            edges = before + tl.cdiv(last - outer, BLOCK_N)
            dq = _past_queries(dq, q, do, k_src, v_src, inner, (outer - inner) // BLOCK_N, None, 0, None, call, D, DV, LEFT, RIGHT, BLOCK_N,
                               None, SCORE, SCORE_GRAD, TMA, False, False, False, PACKED, PRECISION, STAGES)  # fmt: skip
            dq = _past_queries(dq, q, do, k_end, v_src, first, edges, None, 0, jump, call, D, DV, LEFT, RIGHT, BLOCK_N,
                               None, SCORE, SCORE_GRAD, TMA, True, PACKED, False, PACKED, PRECISION, STAGES)  # fmt: skip
        dims = tl.arange(0, BLOCK_D)
        dq_ptr += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
        at_q = (start_q + rows).to(tl.int64)[:, None] * dq_strides[2] + dims[None, :]
        tl.store(dq_ptr + at_q, (dq * (scale * gain)).to(dq_ptr.dtype.element_ty), mask=(rows < len_q)[:, None] & (dims < D)[None, :])


@triton.jit
def _place(number, listed, used, lengths, tiles, heads, BLOCK: tl.constexpr):
    """Tile, the last one of its sequence, sequence (-1: none) and head of program `number`, and first token and length of its side and of the other.

    Heads of a sequence come one after the other, so that tiles side by side share L2. Of a packed batch the longest sequences come first, and few programs
    have no tile. (All tiles by work, as Hopper's kernels take them, lose more of L2 than they gain at the grid's end.)
    """
    if listed is not None:
        within = number // heads
        listed += within * FIELDS
        b, before = tl.load(listed), tl.load(listed + 1)
        own = tl.load(listed + 2), tl.load(listed + 3)
        other = tl.load(listed + 4), tl.load(listed + 5)
        number -= (within - before) * heads  # of the programs of this sequence
        tiles = tl.maximum(tl.cdiv(tl.minimum(own[1], lengths[0]), BLOCK), 1)
        head = number // tiles
    else:
        head = number // tiles
        b = head // heads
        head -= b * heads
        own = sequence(None, used[0], b, lengths[0])
        other = sequence(None, used[1], b, lengths[1])
    return number % tiles, tiles - 1, b, head, own, other


@triton.jit(do_not_specialize=["sizes", "tiles_n", "tiles_m", "over_keys"])
def _backward(q_by_k, k_by_k, v_by_k, do_by_k, lse_by_k, delta_by_k, q_by_q, k_by_q, v_by_q, do_by_q, plain, outs, stats, used, sizes, strides,
              k_map, k_map_strides, q_map, q_map_strides, k_listed, q_listed, reads, grads, tiles_n, tiles_m, over_keys,
              D: tl.constexpr, DV: tl.constexpr, KM: tl.constexpr, KN: tl.constexpr, QM: tl.constexpr, QN: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
              MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, SCORE_BACK: tl.constexpr, WHAT: tl.constexpr, PADDED: tl.constexpr,
              GROUP: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, K_STAGES: tl.constexpr,
              Q_STAGES: tl.constexpr):  # fmt: skip
    """The first `over_keys` programs take a tile of keys each, the others one of queries: neither waits for the last of the other.

    plain   q, dO and k again, as pointers, where they come by TMA and another sequence may lie behind a tile's last row.
    TILE    rows of LSE and delta that the sequences of a packed batch begin at a multiple of.
    """
    program = tl.program_id(0)
    heads, kv_heads, len_q, len_k = sizes[2], sizes[3], sizes[4], sizes[5]
    PACKED: tl.constexpr = k_listed is not None
    if WHAT != "":  # noqa: SIM102 (decided when compiled, the next when run)
        if program < over_keys:
            tile_n, _last, b, kv_head, of_k, of_q = _place(program, k_listed, (used[1], used[0]), (len_k, len_q), tiles_n, kv_heads, KN)
            again = k_listed
            if PACKED:
                again += program // kv_heads * FIELDS + 5
            if b >= 0:
                _keys((q_by_k, k_by_k, v_by_k, do_by_k, lse_by_k, delta_by_k), plain, outs, stats, of_q, of_k, again, sizes, strides, k_map, k_map_strides,
                      reads, grads, tile_n, b, kv_head, D, DV, KM, KN, BLOCK_D, BLOCK_DV, LEFT, RIGHT, TOP_LEFT,
                      MASK, SCORE, SCORE_GRAD, WHAT, GROUP, TMA, PACKED, TILE, PRECISION, K_STAGES)  # fmt: skip
    if Q_STAGES > 0:  # noqa: SIM102
        if program >= over_keys:
            tile_m, last_m, b, head, of_q, of_k = _place(program - over_keys, q_listed, used, (len_q, len_k), tiles_m, heads, QM)
            if RIGHT >= 0 or MASK is not None:  # the longest rows first
                tile_m = last_m - tile_m
            if b >= 0:
                _queries((q_by_q, k_by_q, v_by_q, do_by_q), plain, outs, stats, of_q, of_k, sizes, strides, q_map, q_map_strides, reads, tile_m, b, head,
                         D, DV, QM, QN, BLOCK_D, BLOCK_DV, LEFT, RIGHT, TOP_LEFT, MASK, SCORE, SCORE_BACK, PADDED, TMA, PACKED, TILE, PRECISION,
                         Q_STAGES)  # fmt: skip


# ---- host

# By head dimension up to, best first (H200, 2026-11-21, 4k of 16k tokens, bf16, no mask, TFLOP/s of the products done). Over keys at 64, 128x64 of
# 4 warps makes 519, 64x64 309; at 128, 64x64 makes 480, 64x128 of 8 warps 436. Over queries at 64, 64x64 makes 627, 128x64 518; at 128, 623 and 498;
# at 256, 128x32 with 3 stages makes 577, with 2 stages 436.
SMALL = (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
IEEE = (Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
KEYS = (
    (64, (Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), *SMALL)),
    (128, (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), *SMALL)),
    (1024, SMALL),
)
QUERIES = (
    (64, (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), *SMALL)),
    (128, (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), *SMALL)),
    (256, (Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2), *SMALL)),
    (1024, SMALL),
)
# At 256 dK and dV fit in registers one at a time (520 and 432, both at once 246). Passes beside each other in one launch fill each other's tail: at 128,
# 431 TFLOP/s instead of 371, at 256, 333 instead of 299. At 64 they spill together: 369 instead of 391.
DV, DK = Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 3)
DROPPED_DK = Tiles(32, 128, 8, 2)  # what dropout keeps goes through shared memory, a byte for each weight of a tile


def configs(p: Attention, device: Device) -> list[Plan]:
    """The fastest tiles that fit, the same for every batch and length."""
    width = max(block(p.dim), block(p.value_dim))
    half = p.dtype.itemsize == 2 or "tf32" in p.extras
    pairs = sum(texts.pair_bytes(part.text) for part in (p.mask, p.score) if isinstance(part, Traced))
    drops = "dropout" in p.extras
    dk = DROPPED_DK if drops else DK

    def fits(t: Tiles, what: str) -> bool:
        still, moving = (t.m, t.n) if what == "dQ" else (t.n, t.m)
        shared = (still * (1 if what == "dV" else 2) + 2 * moving * t.stages) * width * p.dtype.itemsize + (t.stages - 1) * t.m * t.n * pairs
        shared += drops * t.m * t.n
        registers = (still * width * (2 if what == "dK, dV" else 1) + 2 * t.m * t.n) // (32 * t.warps)
        return shared <= device.shared_memory and registers <= 224

    def first(tiles, what: str) -> Tiles:
        return next((t for t in tiles if fits(t, what)), tiles[-1])

    keys, queries = (first(pick(ladder, width) if half else IEEE, what) for ladder, what in ((KEYS, "dK, dV"), (QUERIES, "dQ")))
    if half and 128 < width <= 256 and fits(DV, "dV") and fits(dk, "dK") and queries.warps == dk.warps:
        return [Plan((Launch("dV", DV, None), Launch("dK", dk, queries)))]
    if half and width == 128 and keys.warps == queries.warps:
        return [Plan((Launch("dK, dV", keys, queries),))]
    return [Plan((Launch("dK, dV", keys, None), Launch("", None, queries)))]


def launch(p: Attention, plan: Plan, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `p`, `x`; as `reference.backward` returns them."""
    q, k, v, d_out = map(adjacent, (q, k, v, d_out))
    packed = x.q_offsets is not None
    new = torch.zeros if x.q_used is not None or x.k_used is not None or 0 in (q.numel(), k.numel()) else torch.empty
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    wanted = tuple(t.requires_grad for t in x.score)
    grads, sums = mods.gradients(x.score, wanted)
    delta = None
    if q.numel():
        lead = [t.transpose(0, 1)[None] if packed else t.transpose(1, 2) for t in (q, k, v, d_out, dk, dv, dq, out)]  # [batch, heads, len, dim]
        tile = max((one.keys or one.queries).m for one in plan)  # rows that fill up a tile see nothing
        how = (lead.pop(), lead[3], lse, d_lse, LOG2E.value, tile)
        delta, lse2 = statistics_apart(p, x, *how) if packed else statistics(p, *how)
    if q.numel() and k.numel():
        sees = mods.mask_function(p.mask.text) if isinstance(p.mask, Traced) else None
        reads = mods.captured(x.mask), mods.captured(x.score)
        for one in plan:  # what the score reads gets its gradient where dS is computed over keys
            wants = "dK" in one.what
            _over(p, one, lead, (lse2, delta, tile), x, sees, reads, wanted if wants else (False,) * len(wanted), grads if wants else ())
    d_sinks = None
    if x.sinks is not None:  # d LSE / d sink = exp(sink - LSE), and a growing LSE shrinks every weight: delta carries both
        d_sinks = torch.zeros_like(x.sinks) if delta is None else sink_gradient(x.sinks, lse2 / LOG2E.value, delta)
    return dq, dk, dv, d_sinks, tuple(s if s is None else s.to(t.dtype) for s, t in zip(sums, x.score, strict=True))


def _over(p: Attention, how: Launch, lead, stats, x: Operands, sees, reads, wanted, grads) -> None:
    """One launch."""
    lse2, delta, tile = stats
    keys, queries = how.keys or how.queries, how.queries or how.keys
    q = lead[0]
    width, width_v = block(p.dim), block(p.value_dim)
    tma = has_tma(q.device) and all(describable(t) for t in lead[:4])
    k_side = q_side = tuple(lead[:4])
    lses, deltas, plain = lse2, delta, None
    if tma:
        k_side = _described(lead, keys, width, width_v)
        lses, deltas = (TensorDescriptor.from_tensor(t.view(-1, t.shape[-1]), [1, keys.m]) for t in (lse2, delta))
        plain = (lead[0], lead[3], lead[1]) if x.q_offsets is not None else None
        q_side = k_side if (queries.m, queries.n) == (keys.m, keys.n) else _described(lead, queries, width, width_v)
    scale, gain, score, score_grad, score_back = x.scale, 1.0, None, None, None
    if p.score is not None:  # gradients of what the score reads are of the whole score; all others carry its factors at the end
        text, before, gain = (p.score.text, 1.0, 1.0) if any(wanted) else texts.fold(p.score.text)
        scale *= before
        score, score_grad = mods.score_functions(text, wanted=wanted, fast=fast(q))
        _, score_back = mods.score_functions(text, wanted=(False,) * len(wanted), fast=fast(q))
    k_map = q_map = None, (0, 0, 0)
    if sees is not None and how.keys:
        k_map = mask_map(p, sees, x, keys.m, keys.n, True, q.device)
    if sees is not None and how.queries:
        q_map = mask_map(p, sees, x, queries.m, queries.n, False, q.device)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    tiles_n, tiles_m, batch = triton.cdiv(p.len_k, keys.n), triton.cdiv(p.len_q, queries.m), p.batch
    k_listed = q_listed = None
    packed = x.q_offsets is not None
    if packed:
        k_listed = q_listed = sequence_tiles(p, x, keys.n, of_keys=True, by_work=False)
        if queries.m != keys.n or x.q_offsets is not x.k_offsets or x.q_used is not x.k_used or p.len_q != p.len_k:
            q_listed = sequence_tiles(p, x, queries.m, by_work=False)
        tiles_n, tiles_m, batch = len(k_listed), len(q_listed), 1
    first = tiles_n * batch * p.kv_heads if how.keys else 0
    _backward[(first + (tiles_m * batch * p.heads if how.queries else 0),)](
        *k_side, lses, deltas, *q_side, plain, tuple(lead[4:]), (lse2, delta, lse2.shape[-1], x.state), (None, None) if packed else (x.q_used, x.k_used),
        (scale, gain, p.heads, p.kv_heads, p.len_q, p.len_k, bar(x.drop), 1 / (1 - x.drop)),
        tuple(t.stride()[:3] for t in lead), *k_map, *q_map, k_listed, q_listed, reads, grads, tiles_n, tiles_m, first,
        D=p.dim, DV=p.value_dim, KM=keys.m, KN=keys.n, QM=queries.m, QN=queries.n, BLOCK_D=width, BLOCK_DV=width_v,
        LEFT=left, RIGHT=right, TOP_LEFT=top_left, MASK=sees, SCORE=score, SCORE_GRAD=score_grad, SCORE_BACK=score_back, WHAT=how.what,
        PADDED=hides_keys(p.mask), TMA=tma, PRECISION=tf32(p), TILE=tile, GROUP=p.heads // p.kv_heads, K_STAGES=keys.stages,
        Q_STAGES=queries.stages if how.queries else 0, num_warps=keys.warps, num_stages=keys.stages,
    )  # fmt: skip


def _described(lead, t: Tiles, width: int, width_v: int) -> tuple[TensorDescriptor, ...]:
    shapes = ((t.m, width), (t.n, width), (t.n, width_v), (t.m, width_v))
    return tuple(TensorDescriptor(s, list(s.shape), list(s.stride()), [1, 1, *shape]) for s, shape in zip(lead[:4], shapes, strict=True))
