"""What every backward kernel needs before it starts and after: delta = rowsum(dO O) - dLSE of each query, dQ out of its float32 sums, the sinks' gradient."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.kernels.attention.tile import block, sequence
from onchip.kernels.attention.tile_lists import LISTED

LATE = 4  # TMA takes a row from a multiple of 16 bytes on, where a sequence need not begin: LSE and delta lie four times in memory, each a row later
MUCH = 9 << 25  # bytes of float32 sums of dQ at once: 32k tokens, 16 heads of 128; at 64k all of them make the peak 1.25 of what must exist, these 1.13


@triton.jit(do_not_specialize=["tiles"])
def _delta(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, tiles, heads, len_q, pitch, unit, o_strides, do_strides, lse_strides, dlse_strides,
           DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PHASES: tl.constexpr):  # fmt: skip
    """delta = rowsum(dO O) - dLSE, and LSE in another unit, +inf for a row that saw nothing, so that its weights are 0: [batch, heads, pitch].

    PHASES: of a single batch, how many times each is written, [PHASES, heads, pitch], every time from a row later on.
    """
    number = tl.program_id(0) // tiles
    batch, head = number // heads, number % heads
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
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
    for late in tl.static_range(PHASES):
        at = (late * (tl.num_programs(0) // tiles) + number).to(tl.int64) * pitch + rows - late
        there = (rows >= late) & (rows < pitch + late)
        tl.store(delta_ptr + at, tl.where(empty, 0.0, delta), mask=there)
        tl.store(lse2_ptr + at, tl.where(empty, float("inf"), lse * unit), mask=there)


@triton.jit
def apart(start, b, TILE: tl.constexpr):
    """Where sequence `b` of a packed batch, whose first token is `start`, lies if each begins a tile: no other one's rows are in its tiles."""
    return (start // TILE + b) * TILE


@triton.jit(do_not_specialize=["sequences", "pitch"])
def _delta_apart(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, offsets, used, sequences, heads, pitch, unit, o_strides, do_strides, lse_stride,
                 dlse_strides, DV: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    """`_delta` of a packed batch, its sequences `apart`: [heads, pitch]. Between them are rows that see nothing."""
    head = tl.program_id(0) % heads
    to = tl.program_id(0) // heads * BLOCK_M
    b = -1
    for first in range(0, sequences, LISTED):
        others = first + tl.arange(0, LISTED)
        starts = tl.load(offsets + others, mask=others < sequences, other=0)
        b += tl.sum(((others < sequences) & (apart(starts, others, TILE) <= to)).to(tl.int32), 0)
    b = tl.maximum(b, 0)
    start, length = sequence(offsets, used, b, 0)
    rows = to - apart(start, b, TILE) + tl.arange(0, BLOCK_M)
    there = (rows >= 0) & (rows < length)
    rows = (start + rows).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    inside = there[:, None] & (dims < DV)[None, :]
    o = tl.load(o_ptr + head.to(tl.int64) * o_strides[0] + rows[:, None] * o_strides[1] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + head.to(tl.int64) * do_strides[0] + rows[:, None] * do_strides[1] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head.to(tl.int64) * lse_stride + rows, mask=there, other=float("-inf"))
    delta = tl.sum(o * do, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head.to(tl.int64) * dlse_strides[0] + rows * dlse_strides[1], mask=there, other=0.0).to(tl.float32)
    empty = lse == float("-inf")
    at = head.to(tl.int64) * pitch + to + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + at, tl.where(empty, 0.0, delta))
    tl.store(lse2_ptr + at, tl.where(empty, float("inf"), lse * unit))


@triton.jit(do_not_specialize=["tiles"])
def _finish(sums_ptr, dq_ptr, factor, first, tiles, heads, len_q, sums_strides, dq_strides, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """dQ = factor times its float32 sums, whose columns lie as the tensor cores' threads hold them: see `finish`."""
    number = tl.program_id(0) // tiles
    batch, head = (first + number) // heads, (first + number) % heads
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    there = (rows < len_q)[:, None]
    sums_ptr += number.to(tl.int64) * sums_strides[0]
    dq_ptr += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
    sums = tl.load(sums_ptr + rows.to(tl.int64)[:, None] * sums_strides[1] + dims[None, :], mask=there, other=0.0) * factor
    sums = tl.reshape(tl.permute(tl.reshape(sums, [BLOCK_M, BLOCK_D // 32, 4, 4, 2]), (0, 1, 3, 2, 4)), [BLOCK_M, BLOCK_D])
    tl.store(dq_ptr + rows.to(tl.int64)[:, None] * dq_strides[2] + dims[None, :], sums.to(dq_ptr.dtype.element_ty), mask=there & (dims < D)[None, :])


def statistics(p, out, d_out, lse, d_lse, unit: float, tile: int = 1, phases: int = 1):
    """delta and LSE times `unit`, float32 [batch, heads, rows] of `out` and `d_out` [batch, heads, rows, dim]; rows are filled up to whole tiles,
    with rows that see nothing. `phases` of a batch of one: [1, phases * heads, rows], the heads once from row 0 on, once from row 1, and so on."""
    batch, heads, len_q, _ = out.shape
    pitch = triton.cdiv(len_q, tile) * tile
    delta, scaled = (torch.empty(batch, phases * heads, pitch, dtype=torch.float32, device=out.device) for _ in range(2))
    lse = lse.view(batch, heads, len_q)
    d_lse = d_lse if d_lse is None else d_lse.view(batch, heads, len_q) if d_lse.is_contiguous() else d_lse.reshape(batch, heads, len_q)
    rows = 64 if p.value_dim <= 128 else 16
    tiles = triton.cdiv(pitch + phases - 1, rows)
    _delta[(tiles * batch * heads,)](
        out, d_out, lse, d_lse, delta, scaled, tiles, heads, len_q, pitch, unit, out.stride()[:3], d_out.stride()[:3], lse.stride()[:2],
        (0, 0, 0) if d_lse is None else d_lse.stride(), DV=p.value_dim, BLOCK_M=rows, BLOCK_DV=block(p.value_dim),
        PHASES=phases,
    )  # fmt: skip
    return delta, scaled


def statistics_apart(p, x, out, d_out, lse, d_lse, unit: float, tile: int):
    """`statistics` of a packed batch whose sequences lie `apart`, in tiles of `tile` rows: [1, heads, rows]."""
    _, heads, tokens, _ = out.shape
    sequences = len(x.q_offsets) - 1
    pitch = (tokens // tile + sequences) * tile
    delta, scaled = (torch.empty(1, heads, pitch, dtype=torch.float32, device=out.device) for _ in range(2))
    lse = lse.view(heads, tokens)
    d_lse = d_lse if d_lse is None else d_lse.reshape(heads, tokens)
    rows = min(tile, 64 if p.value_dim <= 128 else 16)
    _delta_apart[(pitch // rows * heads,)](
        out, d_out, lse, d_lse, delta, scaled, x.q_offsets, x.q_used, sequences, heads, pitch, unit, out.stride()[1:3], d_out.stride()[1:3], lse.stride(0),
        (0, 0) if d_lse is None else d_lse.stride(), DV=p.value_dim, TILE=tile, BLOCK_M=rows, BLOCK_DV=block(p.value_dim), LISTED=LISTED,
    )  # fmt: skip
    return delta, scaled


def finish(sums, dq, factor: float, first: int) -> None:
    """factor times sums, float32 [heads, rows, columns], as the heads from `first` on, counted through the batch, of dq [batch, heads, rows, dim].

    Of 32 columns a thread of a tensor core's sum holds 2 in each 8; in `sums` the 8 of a thread lie side by side, so that it writes them at once.
    """
    count, rows, columns = sums.shape
    tiles = triton.cdiv(rows, 4096 // columns)
    _finish[(tiles * count,)](
        sums, dq, factor, first, tiles, dq.shape[1], rows, sums.stride()[:2], dq.stride()[:3], D=dq.shape[3], BLOCK_M=4096 // columns, BLOCK_D=columns
    )  # fmt: skip


class Share(NamedTuple):
    """`sequences` from `sequence` on, and `heads` key heads of each, from `head` on."""

    sequence: int
    sequences: int
    head: int
    heads: int


def shares(batch: int, kv_heads: int, group: int, nbytes: int) -> list[Share]:
    """All key heads in turns, as even as may be: whole sequences, or heads of one. The sums of dQ, `nbytes` of a query head, take MUCH at most,
    if those of one key head do. (Of 16 KiB or more each, so that a grid with a place for each stays far below the 65,535 that a GPU takes in y and z.)"""
    most = max(1, MUCH // (nbytes * group))
    sequences, heads = _evenly(batch, max(1, most // kv_heads)), _evenly(kv_heads, most)
    return [Share(b, min(sequences, batch - b), h, min(heads, kv_heads - h)) for b in range(0, batch, sequences) for h in range(0, kv_heads, heads)]


def _evenly(count: int, most: int) -> int:
    """The size of parts of `count`, at most `most`. (`triton.cdiv` takes 2 us.)"""
    return -(-count // -(-count // most))


def sink_gradient(sinks, lse, delta):
    """-sum over rows of exp(sink - LSE) delta, in float32, in sinks' dtype."""
    lse, delta = (s.reshape(-1, len(sinks), s.shape[-1]) for s in (lse, delta))  # [batch or 1, heads, rows]
    weight = torch.where(lse == -torch.inf, 0.0, (sinks.float()[:, None] - lse).exp())
    return -(weight * torch.where(lse == -torch.inf, 0.0, delta)).sum((0, 2)).to(sinks.dtype)
