"""Hadamard rotation of rows: y = x H / sqrt(width), H the Walsh-Hadamard matrix of a power of two (Fino and Algazi, 1976).

A program holds a few whole rows in registers. A pass adds and subtracts along the low STEP bits of the column, then turns these bits to the front, so
that after all bits the columns are in order again: log2(width) additions an element, and one exchange between threads a pass. Traffic is the floor:
x read and y written, once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Rows

TILE = 2048  # elements of a program that holds several rows; of narrow ones half as many
NARROW = 256
STEP = 4  # bits a pass
FORMS = ((2048, (1, 1, STEP)), (4096, (2, 1, 5)), (8192, (4, 1, STEP)), (16384, (4, 2, STEP)), (32768, (16, 2, STEP)))
# (elements up to, (warps, programs a row, bits a pass)). H200: exchanges between threads, by shared memory, take longer than memory from 16,384 columns on,
# where a row fills the registers of a multiprocessor and nothing runs beside them: two programs, which both read the row, 83.8 us instead of 93.2


class Tiles(NamedTuple):
    """`parts`: programs that share a row; each reads all of it and makes its part."""

    rows: int
    warps: int
    parts: int
    step: int

    def __str__(self):
        return f"{self.rows} rows a program, {self.warps} warps" + f", {self.parts} programs a row" * (self.parts > 1)


# ---- device


@triton.jit
def _pass(x, BITS: tl.constexpr, SCALE: tl.constexpr):
    """Sums and differences along each of the low BITS bits of the column, which then are the high ones; the last of them times SCALE."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    M: tl.constexpr = ROWS * WIDTH >> BITS
    N: tl.constexpr = 1 << BITS
    for n in tl.static_range(BITS):
        a, b = tl.split(x.reshape(M, N // 2, 2))
        if SCALE != 1 and n + 1 == BITS:  # a multiplication and two fused ones
            a *= SCALE
            x = tl.join(a + b * SCALE, a - b * SCALE).permute(0, 2, 1)
        else:
            x = tl.join(a + b, a - b).permute(0, 2, 1)
    return x.reshape(ROWS, WIDTH // N, N).permute(0, 2, 1).reshape(ROWS, WIDTH)


@triton.jit
def _hadamard(x_ptr, y_ptr, rows, x_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
              SCALE: tl.constexpr):  # fmt: skip
    """WIDTH columns of the row, which has PARTS times as many; 2^BITS is WIDTH."""
    row = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    part, col = tl.program_id(0) % PARTS, tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * x_stride + col, mask=row < rows, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    for n in tl.static_range(1, PARTS):
        both = part & n
        both ^= both >> 2
        more = tl.load(x_ptr + row * x_stride + n * WIDTH + col, mask=row < rows, other=0.0).to(tl.float32)
        x += more * (1 - 2 * ((both ^ (both >> 1)) & 1)).to(tl.float32)
    for first in tl.static_range(0, BITS, STEP):
        x = _pass(x, min(STEP, BITS - first), SCALE if first + STEP >= BITS else 1)
    tl.store(y_ptr + row * (PARTS * WIDTH) + part * WIDTH + col, x.to(y_ptr.dtype.element_ty), mask=row < rows)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor."""
    tile = TILE // 2 if problem.width <= NARROW else TILE
    rows = max(1, min(tile // problem.width, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, *pick(FORMS, rows * problem.width))]


def launch(problem: Rows, config: Tiles, x: torch.Tensor) -> torch.Tensor:  # x: [..., width]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    rows = x.reshape(problem.rows, problem.width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width = problem.width // config.parts
    _hadamard[(triton.cdiv(problem.rows, config.rows) * config.parts,)](
        rows, y, problem.rows, rows.stride(0), ROWS=config.rows, WIDTH=width, PARTS=config.parts, BITS=width.bit_length() - 1, STEP=config.step,
        SCALE=problem.width**-0.5, num_warps=config.warps,
    )  # fmt: skip
    return y
