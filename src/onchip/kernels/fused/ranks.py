"""A sum over the ranks of one host, of few rows, with the residual addition and the RMSNorm behind it:

    total = sum over ranks of x (+ residual), y = total / sqrt(mean(total^2) + eps) * (weight + offset)

A program is a row. It writes its x into a box in each other rank's memory, and sums what it finds in its own boxes, in float32 and in the order of the
ranks, so that all of them get the same bits. There is no barrier: an empty box holds EMPTY, which no number sent is, and who has read a number makes it
EMPTY again. A row's two sets of boxes take turns: a rank that writes to a set for the next sum but one has heard the next one of every other rank, each of
which sent that after it had read this one.

Bytes: x crosses a link once for each other rank. Of few rows the time is one way over a link and a launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.linear import RowNorm
from onchip.core.problem import RankSum
from onchip.core.ranks import Ranks
from onchip.kernels.meeting import BOTH, FIRST, SECOND, held

EMPTY = tl.constexpr(-1)  # all bits: one NaN of each float, in place of which another is sent
AHEAD = tl.constexpr(4)  # ranks whose parts a thread holds at once: each takes as many registers as it has numbers, be they of 16 bits

# ---- device


@triton.jit
def _bits(x):
    return x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def _sum_ranks(
    x_ptr, x_stride, boxes, turn_ptr, room, residual_ptr, residual_stride, total_ptr, weight_ptr, y_ptr, width, eps, offset,
    RANK: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    turn = tl.load(turn_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=inside, other=0.0)
    RANKS: tl.constexpr = len(boxes)
    if PHASE != SECOND:
        bits = _bits(x)
        sent = tl.where(bits == EMPTY, bits ^ 1, bits).to(x.dtype, bitcast=True)
        for step in tl.static_range(1, RANKS):
            tl.store(boxes[(RANK + step) % RANKS] + (turn * RANKS + RANK) * room + row * width + col, sent, mask=inside)
    if PHASE != FIRST:
        tl.debug_barrier()  # all threads know the turn, and have sent
        tl.store(turn_ptr + row, (1 - turn).to(tl.int32))
        from_ptr = boxes[RANK] + turn * RANKS * room + row * width + col
        z = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(0, RANKS, AHEAD):
            heard = ()
            for rank in tl.static_range(first, first + AHEAD):  # all at once: one way to L2
                if rank < RANKS:
                    heard += (x if rank == RANK else tl.load(from_ptr + rank * room, mask=inside, other=0.0, volatile=True),)
            for rank in tl.static_range(first, first + AHEAD):
                if rank < RANKS:
                    part = heard[rank - first]
                    if rank != RANK:
                        while tl.max((_bits(part) == EMPTY).to(tl.int32)) != 0:
                            part = tl.load(from_ptr + rank * room, mask=inside, other=0.0, volatile=True)
                        tl.store(from_ptr + rank * room, tl.full([BLOCK], EMPTY, _bits(x).dtype).to(x.dtype, bitcast=True), mask=inside)
                    z = held(z + part.to(tl.float32), PHASE)  # now: else all parts live to the end
        if residual_ptr is not None:
            z += residual.to(tl.float32)
        total = z.to(x.dtype)
        if total_ptr is not None:
            tl.store(total_ptr + row * width + col, total, mask=inside)
        if weight_ptr is not None:
            z = total.to(tl.float32)
            y = z * tl.rsqrt(tl.sum(z * z) / width + eps) * (weight.to(tl.float32) + offset)
            tl.store(y_ptr + row * width + col, y.to(x.dtype), mask=inside)


# ---- host


class Tiles(NamedTuple):
    warps: int


def configs(problem: RankSum, device: Device) -> list[Tiles]:
    return [Tiles(min(16, max(1, triton.next_power_of_2(problem.width) // 512)))]


def launch(
    problem: RankSum, config: Tiles, x: torch.Tensor, ranks: Ranks, residual: torch.Tensor | None, norm: RowNorm | None, phase: int = BOTH.value
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x [rows, width] of this rank: the sum, or its norm; with both a residual and a norm the norm and the sum. PHASE: see `meeting`."""
    weight, eps, offset = norm or (None, 0.0, 0.0)
    boxes, turns, _ = ranks.boxes
    total = None if norm and residual is None else torch.empty_like(x)
    y = torch.empty_like(x) if norm else None
    shared = (boxes, turns, problem.room * problem.width)
    after = (residual, 0 if residual is None else residual.stride(0), total, weight, y)
    _sum_ranks[(problem.rows,)](
        x, x.stride(0), *shared, *after, problem.width, eps, offset,
        RANK=ranks.rank, PHASE=phase, BLOCK=triton.next_power_of_2(problem.width), num_warps=config.warps,
    )  # fmt: skip
    return total if y is None else y if total is None else (y, total)
