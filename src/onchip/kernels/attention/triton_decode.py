"""Attention of a few queries over a paged cache: the cache is read once, so memory is the floor.

Flash-Decoding (Dao et al., 2023): a program takes one sequence, one key head and one of SPLITS shares of the keys; all
queries of the group are the rows of its tile, so that each key read from memory serves them all on tensor cores. A
second kernel merges the shares by their LSE. Lengths are read on the device and the grid depends on the Problem alone:
a CUDA graph may capture the call and the lengths may then change.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.tile import LN2, LOG2E, band, normalise, online_softmax, page_slots


class Split(NamedTuple):
    """Keys a tile, shares of a sequence's keys, warps, and tiles in flight."""

    n: int
    splits: int
    warps: int
    stages: int

    def __str__(self):
        return f"{self.n} keys a tile, {self.splits} splits, {self.warps} warps, {self.stages} stages"


# ---- device


@triton.jit
def _partial(q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, o_ptr, lse_ptr, scale, kv_heads, group, len_q, table_row,
             q_batch, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
             D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One share of one sequence for one key head: o [splits, batch, kv_heads, ROWS, BLOCK_D] float32 and its LSE."""
    batch = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) - batch * kv_heads
    split, splits = tl.program_id(1), tl.num_programs(1)
    len_k = tl.load(lengths_ptr + batch)
    r = tl.arange(0, ROWS)
    query, member = r // group, r % group  # the queries of all heads of the group, one after the other
    dims = tl.arange(0, BLOCK_D)
    inside = (query < len_q)[:, None] & (dims < D)[None, :]
    q_rows = batch.to(tl.int64) * q_batch + query * q_row + (kv_head * group + member) * q_head
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside, other=0.0)

    start = 0
    if LEFT >= 0:  # the first key that the first query sees
        start = tl.maximum(len_k - len_q - LEFT, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(len_k - start, splits), BLOCK_N) * BLOCK_N
    first = start + split * share
    last = tl.minimum(first + share, len_k)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    rows = query + len_k - len_q
    table_ptr += batch.to(tl.int64) * table_row
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        cols = n + tl.arange(0, BLOCK_N)
        pages, slots = page_slots(table_ptr, n, cols, last, PAGE, BLOCK_N)
        seen = (cols < last)[:, None] & (dims < D)[None, :]
        k = tl.load(k_ptr + (pages * k_page + slots * k_slot)[:, None] + dims[None, :], mask=seen, other=0.0)
        scores = band(tl.dot(q, k.T, input_precision="ieee"), rows, cols, last, LEFT, RIGHT)
        weights, shrink, top, total = online_softmax(scores, top, total, scale * LOG2E, True)
        v = tl.load(v_ptr + (pages * v_page + slots * v_slot)[:, None] + dims[None, :], mask=seen, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    out, lse = normalise(acc, top, total)
    slot = (split * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(o_ptr + slot[:, None] * BLOCK_D + dims[None, :], out)
    tl.store(lse_ptr + slot, lse)


@triton.jit
def _merge(part_ptr, part_lse_ptr, o_ptr, lse_ptr, kv_heads, group, len_q, o_batch, o_row, o_head,
           D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """One row: o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s); one program a (sequence, key head, row)."""
    row = tl.program_id(0) % (group * len_q)
    batch_head = tl.program_id(0) // (group * len_q)
    batch = batch_head // kv_heads
    head = (batch_head - batch * kv_heads) * group + row % group
    query = row // group
    splits = tl.arange(0, triton.next_power_of_2(SPLITS))
    dims = tl.arange(0, BLOCK_D)
    slot = (splits * (tl.num_programs(0) // (group * len_q)) + batch_head).to(tl.int64) * ROWS + row
    lse = tl.load(part_lse_ptr + slot, mask=splits < SPLITS, other=float("-inf"))
    part = tl.load(part_ptr + slot[:, None] * BLOCK_D + dims[None, :], mask=(splits < SPLITS)[:, None], other=0.0)
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - base)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))
    place = batch.to(tl.int64) * o_batch + query * o_row + head * o_head + dims
    tl.store(o_ptr + place, out.to(o_ptr.dtype.element_ty), mask=dims < D)
    if LSE:
        tl.store(lse_ptr + (batch * kv_heads * group + head) * len_q + query, top + tl.math.log2(total) * LN2)


# ---- host


IN_FLIGHT = 64 << 10  # bytes of keys and values that a program waits for at once


def configs(p: Attention, device: Device) -> list[Split]:
    """As many shares as fill the device and no more: each one costs a pass through the merge (H200, 2026-11-21, page 16, bf16).

    Two programs a multiprocessor keep the memory busy with 128 keys a tile (32x4k: 4.02 TB/s). A grid that is larger
    without splitting does better on 64 (128x1k: 3.98 TB/s); so does a small one, which then has more shares (1x128k: 4.15 TB/s).
    """
    size = triton.next_power_of_2(p.dim) * p.dtype.itemsize  # of a key
    programs = p.batch * p.kv_heads
    if programs > 2 * device.sms:
        n, splits, stages = 64, 1, 4
    elif programs > device.sms // 8:
        n, splits, stages = 128, 2 * device.sms // programs, max(2, min(5, 1 + IN_FLIGHT // (2 * 128 * size)))
    else:
        n, splits, stages = 64, min(64, 4 * device.sms // programs), 3
    if p.dtype.itemsize == 4:  # multiplied on FMA units: more keys a tile spill
        n = 32
    while n > 16 and 2 * n * size * (stages - 1) > device.shared_memory // 2:  # two programs a multiprocessor
        n //= 2
    return [Split(n, max(1, min(splits, p.len_k // (2 * n))), 4, stages)]


def launch(p: Attention, how: Split, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, dim]`, cache a PagedKV, as `ops.attention.paged_attention` passes them."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((p.batch, p.heads, p.len_q), dtype=torch.float32, device=q.device) if return_lse else None
    rows, width = max(16, triton.next_power_of_2(p.len_q * p.group)), triton.next_power_of_2(p.dim)
    programs = p.batch * p.kv_heads
    part = torch.empty((how.splits, programs, rows, width), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((how.splits, programs, rows), dtype=torch.float32, device=q.device)
    left, right = (-1 if side is None else side for side in (p.mask.left, p.mask.right))
    k, v = cache.k, cache.v
    _partial[(programs, how.splits)](
        q, k, v, cache.page_table, cache.lengths, part, part_lse, x.scale, p.kv_heads, p.group, p.len_q, cache.page_table.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        D=p.dim, ROWS=rows, BLOCK_N=how.n, BLOCK_D=width, PAGE=p.page, LEFT=left, RIGHT=right if p.len_q > 1 else -1,
        STAGES=how.stages, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    _merge[(programs * p.group * p.len_q,)](
        part, part_lse, out, lse, p.kv_heads, p.group, p.len_q, *out.stride()[:3],
        D=p.dim, ROWS=rows, BLOCK_D=width, SPLITS=how.splits, LSE=return_lse, num_warps=2,
    )  # fmt: skip
    return (out, lse) if return_lse else out
