"""Attention of a few queries over a paged cache: the cache is read once, so memory is the floor.

Flash-Decoding (Dao et al., 2023): a program takes one sequence, one key head and one share of the keys; all queries of
the group are the rows of its tile, so that each key read from memory serves them all on tensor cores. A second kernel
merges the shares by their LSE, a sink with them. Lengths are read on the device and the grid depends on the Problem
alone: a CUDA graph may capture the call and the lengths may then change.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.kernels.attention import mods, texts
from onchip.kernels.attention.tile import LN2, LOG2E, adjacent, band, block, ends, fast, key_span, normalise, online_softmax, page_slots, tf32


class Split(NamedTuple):
    """Keys a tile, shares of a sequence's keys, warps, tiles in flight, and keys a share: 0 for as many as fill the shares alike."""

    n: int
    splits: int
    warps: int
    stages: int
    share: int = 0

    def __str__(self):
        shares = f" of {self.share} keys" if self.share else ""
        return f"{self.n} keys a tile, {self.splits} splits{shares}, {self.warps} warps, {self.stages} stages"


# ---- device


@triton.jit
def _partial(q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, o_ptr, lse_ptr, reads, scale, gain, kv_heads, group, len_q, table_row,
             q_batch, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
             D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             TILES: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
             MASK: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One share of one sequence for ROWS rows of one key head: o [splits, batch, kv_heads, TILES ROWS, BLOCK_DV] float32 and its LSE."""
    batch_head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    batch = batch_head // kv_heads
    kv_head = batch_head - batch * kv_heads
    split, splits = tl.program_id(1), tl.num_programs(1)
    len_k = tl.load(lengths_ptr + batch)
    r = tile * ROWS + tl.arange(0, ROWS)
    query, member = r // group, r % group  # the queries of all heads of the group, one after the other
    head = kv_head * group + member
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    inside = (query < len_q)[:, None] & (dims < D)[None, :]
    q_rows = batch.to(tl.int64) * q_batch + query * q_row + head * q_head
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside, other=0.0)

    shift = len_k - len_q
    h, i, queries = head[:, None], query[:, None], len_k - shift  # `len_q` itself is a constant where it is 1, which functions do not expect
    if TOP_LEFT:
        shift = shift * 0
    lowest, end = key_span(shift, shift + len_q - 1, len_k, LEFT, RIGHT if TOP_LEFT else -1)  # bottom right, the last query sees to the end
    start = lowest // BLOCK_N * BLOCK_N
    share = SHARE
    if SHARE == 0:
        share = tl.cdiv(tl.cdiv(end - start, splits), BLOCK_N) * BLOCK_N
    first = start + split * share
    last = tl.minimum(first + share, end)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table_ptr += batch.to(tl.int64) * table_row
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        cols = n + tl.arange(0, BLOCK_N)
        pages, slots = page_slots(table_ptr, n, cols, last, PAGE, BLOCK_N)
        near = cols < last
        if LEFT >= 0:  # pages before the window may be another sequence's by now
            near = near & (cols >= lowest)
        k = tl.load(k_ptr + (pages * k_page + slots * k_slot)[:, None] + dims[None, :], mask=near[:, None] & (dims < D)[None, :], other=0.0)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        factor = scale * LOG2E
        if SCORE is not None:
            scores = SCORE(scores * scale, batch, h, i, cols[None, :], queries, len_k, reads[1])
            factor = gain * LOG2E
        if MASK is not None:  # a key that no row sees is padding, and may hold anything: so may its value
            seen = MASK(batch, h, i, cols[None, :], queries, len_k, reads[0]) & near[None, :] & (i < len_q)
            shown = tl.max(seen.to(tl.int32), 0) > 0
            scores = tl.where(seen, scores, float("-inf"))
        else:
            scores = band(scores, query + shift, cols, last, LEFT, RIGHT)
        weights, shrink, top, total = online_softmax(scores, top, total, factor, True)
        v = tl.load(v_ptr + (pages * v_page + slots * v_slot)[:, None] + dims_v[None, :], mask=near[:, None] & (dims_v < DV)[None, :], other=0.0)
        if MASK is not None:
            v = tl.where(shown[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    out, lse = normalise(acc, top, total)
    slot = (split * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # tiles lie side by side
    tl.store(o_ptr + slot[:, None] * BLOCK_DV + dims_v[None, :], out)
    tl.store(lse_ptr + slot, lse)


@triton.jit
def _merge(part_ptr, part_lse_ptr, o_ptr, lse_ptr, sinks_ptr, kv_heads, group, len_q, o_batch, o_row, o_head,
           DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, ONE_BY_ONE: tl.constexpr):  # fmt: skip
    """One row: o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s), the sink one more in the sum; one program a (sequence, key head, row).

    ONE_BY_ONE: shares are added in order, so that those past a sequence's end, all zeros, leave its bits alone however many they are.
    """
    row = tl.program_id(0) % (group * len_q)
    batch_head = tl.program_id(0) // (group * len_q)
    batch = batch_head // kv_heads
    head = (batch_head - batch * kv_heads) * group + row % group
    query = row // group
    splits = tl.arange(0, triton.next_power_of_2(SPLITS))
    dims = tl.arange(0, BLOCK_DV)
    slot = (splits * (tl.num_programs(0) // (group * len_q)) + batch_head).to(tl.int64) * ROWS + row
    lse = tl.load(part_lse_ptr + slot, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    if ONE_BY_ONE:
        total = 0.0
        out = tl.zeros([BLOCK_DV], tl.float32)
        for s in range(SPLITS):
            one = (s * (tl.num_programs(0) // (group * len_q)) + batch_head).to(tl.int64) * ROWS + row
            weight = tl.exp(tl.load(part_lse_ptr + one) - base)
            total += weight
            out += tl.load(part_ptr + one * BLOCK_DV + dims, mask=weight > 0.0, other=0.0) * weight
    else:
        part = tl.load(part_ptr + slot[:, None] * BLOCK_DV + dims[None, :], mask=(splits < SPLITS)[:, None], other=0.0)
        weight = tl.exp(lse - base)
        total = tl.sum(weight, 0)
        out = tl.sum(part * weight[:, None], 0)
    if sinks_ptr is not None:
        total += tl.exp(sink - base)
    out = out * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))
    place = batch.to(tl.int64) * o_batch + query * o_row + head * o_head + dims
    tl.store(o_ptr + place, out.to(o_ptr.dtype.element_ty), mask=dims < DV)
    if lse_ptr is not None:
        tl.store(lse_ptr + (batch * kv_heads * group + head) * len_q + query, top + tl.math.log2(total) * LN2)


# ---- host


IN_FLIGHT = 64 << 10  # bytes of keys and values that a program waits for at once
QUERIES = 32 << 10  # bytes of queries that it keeps in shared memory; more rows go to other programs, which read the keys again
SHARE = 512  # keys a share where the batch must not decide: writing and merging 16 rows costs 6% of reading as many keys of d128


def row_tiles(p: Attention) -> tuple[int, int]:
    """Rows of a tile, and how many tiles hold the queries of a group; 16 is the least a product takes."""
    rows = max(16, triton.next_power_of_2(p.len_q * p.group))
    tile = max(16, min(rows, QUERIES // (block(max(p.dim, p.value_dim)) * p.dtype.itemsize)))
    return tile, rows // tile


def configs(p: Attention, device: Device) -> list[Split]:
    """As many shares as fill the device and no more: each one costs a pass through the merge (H200, 2026-11-21, page 16, bf16).

    Two programs a multiprocessor keep the memory busy with 128 keys a tile (32x4k: 4.02 TB/s). A grid that is larger
    without splitting does better on 64 (128x1k: 3.98 TB/s); so does a small one, which then has more shares (1x128k: 4.15 TB/s).
    """
    width, width_v, itemsize = block(p.dim), block(p.value_dim), p.dtype.itemsize
    size = (width + width_v) * itemsize  # of a key and its value
    rows, tiles = row_tiles(p)
    programs = max(1, p.batch * p.kv_heads * tiles)
    alone = "batch_invariant" in p.extras
    if alone or programs > 2 * device.sms:
        n, splits, stages = 64, 1, 4
    elif programs > device.sms // 8:
        n, splits, stages = 128, 2 * device.sms // programs, max(2, min(5, 1 + IN_FLIGHT // (128 * size)))
    else:
        n, splits, stages = 64, min(64, 4 * device.sms // programs), 3
    if itemsize == 4:  # multiplied on FMA units: more keys a tile spill
        n = 32 if size <= 1024 else 16
    while n > 16 and n * size * (stages - 1) > device.shared_memory // 2:  # two programs a multiprocessor
        n //= 2
    while stages > 1 and rows * (width + n) * itemsize + n * size * (stages - 1) > device.shared_memory:
        stages -= 1
    warps = 4 if max(width, width_v) <= 256 else 8
    if alone:
        return [Split(n, max(1, triton.cdiv(p.len_k, SHARE)), warps, stages, SHARE)]
    return [Split(n, max(1, min(splits, p.len_k // (2 * n))), warps, stages)]


def launch(p: Attention, how: Split, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, dim]`, cache a PagedKV, as `ops.attention.paged_attention` passes them."""
    q, k, v = adjacent(q), adjacent(cache.k, "triton_decode"), adjacent(cache.v, "triton_decode")
    out = torch.empty((*q.shape[:-1], p.value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((p.batch, p.heads, p.len_q), dtype=torch.float32, device=q.device) if return_lse else None
    (rows, tiles), width_v = row_tiles(p), block(p.value_dim)
    programs = p.batch * p.kv_heads
    part = torch.empty((how.splits, programs, tiles * rows, width_v), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((how.splits, programs, tiles * rows), dtype=torch.float32, device=q.device)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    sees = mods.mask_function(p.mask.text) if isinstance(p.mask, Traced) else None
    scale, gain, score = x.scale, 1.0, None
    if p.score is not None or scale <= 0:  # the plain kernel takes the largest score before it scales
        text, before, gain = texts.fold(p.score.text if p.score is not None else texts.IDENTITY)
        scale *= before
        score, _ = mods.score_functions(text, fast=fast(q))
    _partial[(programs * tiles, how.splits)](
        q, k, v, cache.page_table, cache.lengths, part, part_lse, (mods.captured(x.mask), mods.captured(x.score)),
        scale, gain, p.kv_heads, p.group, p.len_q, cache.page_table.stride(0), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        D=p.dim, DV=p.value_dim, ROWS=rows, BLOCK_N=how.n, BLOCK_D=block(p.dim), BLOCK_DV=width_v, TILES=tiles, PAGE=p.page, SHARE=how.share,
        LEFT=left, RIGHT=right if p.len_q > 1 or top_left else -1, TOP_LEFT=top_left, MASK=sees, SCORE=score,
        PRECISION=tf32(p), STAGES=how.stages, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    sinks = None if x.sinks is None else x.sinks.contiguous()
    _merge[(programs * p.group * p.len_q,)](
        part, part_lse, out, lse, sinks, p.kv_heads, p.group, p.len_q, *out.stride()[:3],
        DV=p.value_dim, ROWS=tiles * rows, BLOCK_DV=width_v, SPLITS=how.splits, ONE_BY_ONE=how.share > 0, num_warps=2,
    )  # fmt: skip
    return (out, lse) if return_lse else out
