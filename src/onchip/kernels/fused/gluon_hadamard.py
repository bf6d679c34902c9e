"""Hadamard rotation of wide rows, `hadamard.py`'s formula: six bits of the column in registers at a time, and two exchanges between threads.

A thread holds 64 elements: those whose columns differ in six bits, along which it adds and subtracts without hearing of anybody. The first six are the low bits
that a load of 16 bytes has, and the highest; an exchange turns the next six to registers, and a second one brings what is left beside the low ones of a store.
Of 32,768 columns two programs read the row and make half of it each: three of them fit on a multiprocessor, where one with all of the row would have nothing
beside it. Traffic is the floor: x read and y written, once.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.core.device import Device
from onchip.core.problem import Rows

HELD = 6  # bits of the column in a thread's registers
WHOLE = 1 << 14  # columns that a program makes
REGISTERS = 80  # of a thread where two programs share a row of 16 bits: three of them a multiprocessor, 87 us instead of 97 (H200, 2,048 x 32,768)


class Tiles(NamedTuple):
    """`parts`: programs that share a row; each reads all of it and makes its part. `registers` of a thread at most; 0: no limit."""

    parts: int
    warps: int
    registers: int = 0

    def __str__(self):
        return f"{self.warps} warps" + f", {self.parts} programs a row" * (self.parts > 1)


# ---- device


@triton.constexpr_function
def passes(width: int, size: int) -> tuple:
    """((bits in registers, those along which is added), ...): in the order of the passes; `size` bytes an element."""
    bits, low = width.bit_length() - 1, (16 // size).bit_length() - 1
    first = (*range(low), *range(bits - HELD + low, bits))
    second = tuple(range(low, low + HELD))
    last = tuple(bit for bit in range(bits) if bit not in first and bit not in second)
    around = tuple(bit for bit in (*range(low), *range(bits - 1, low - 1, -1)) if bit not in last)
    third = (*range(low), *last, *around[low:])[:HELD]
    return (first, first), (second, tuple(bit for bit in second if bit not in first)), (third, last)


@triton.constexpr_function
def added(width: int, size: int, number: int) -> tuple:
    """The bits of a pass."""
    return passes(width, size)[number][1]


@triton.constexpr_function
def layout(width: int, size: int, number: int) -> gl.DistributedLinearLayout:
    """A pass's bits of the column in registers, the five lowest others along lanes, the rest along warps."""
    held = passes(width, size)[number][0]
    rest = [[1 << bit] for bit in range(width.bit_length() - 1) if bit not in held]
    return gl.DistributedLinearLayout(reg_bases=[[1 << bit] for bit in held], lane_bases=rest[:5], warp_bases=rest[5:], block_bases=[], shape=[width])


@gluon.jit
def _along(x, BITS: gl.constexpr, SCALE: gl.constexpr):
    """Sums and differences along these bits of the column, which are in registers; the last of them times SCALE."""
    N: gl.constexpr = x.shape[0]
    for n in gl.static_range(len(BITS)):
        a, b = gl.split(x.reshape([N >> (BITS[n] + 1), 2, 1 << BITS[n]]).permute([0, 2, 1]))
        if n + 1 == len(BITS) and SCALE != 1:  # a multiplication and two fused ones
            a *= SCALE
            y = gl.join(a + b * SCALE, a - b * SCALE)
        else:
            y = gl.join(a + b, a - b)
        x = y.permute([0, 2, 1]).reshape([N])
    return x


@gluon.jit
def _hadamard(x_ptr, y_ptr, x_stride, WIDTH: gl.constexpr, PARTS: gl.constexpr, SCALE: gl.constexpr, SIZE: gl.constexpr):
    """WIDTH columns of a row, which has PARTS (1 or 2) times as many."""
    LOADED: gl.constexpr = layout(WIDTH, SIZE, 0)
    STORED: gl.constexpr = layout(WIDTH, SIZE, 2)
    row, part = (gl.program_id(0) // PARTS).to(gl.int64), gl.program_id(0) % PARTS
    col = gl.arange(0, WIDTH, layout=LOADED)
    y_ptr += row * (PARTS * WIDTH) + part * WIDTH
    x = gl.load(x_ptr + row * x_stride + col).to(gl.float32)
    if PARTS == 2:
        x += gl.load(x_ptr + row * x_stride + WIDTH + col).to(gl.float32) * (1 - 2 * part).to(gl.float32)
    x = gl.convert_layout(_along(x, added(WIDTH, SIZE, 0), 1), layout(WIDTH, SIZE, 1))
    x = gl.convert_layout(_along(x, added(WIDTH, SIZE, 1), 1), STORED)
    x = gl.convert_layout(_along(x, added(WIDTH, SIZE, 2), SCALE), STORED)
    gl.store(y_ptr + gl.arange(0, WIDTH, layout=STORED), x.to(y_ptr.dtype.element_ty))


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """64 elements a thread."""
    parts = max(1, problem.width // WHOLE)
    warps = problem.width // parts >> 11
    return [Tiles(parts, warps, REGISTERS if parts > 1 and problem.dtype.itemsize == 2 else 0)]


def launch(problem: Rows, config: Tiles, x: torch.Tensor) -> torch.Tensor:  # x: [..., width]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    rows = x.reshape(problem.rows, problem.width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _hadamard[(problem.rows * config.parts,)](
        rows, y, rows.stride(0), WIDTH=problem.width // config.parts, PARTS=config.parts, SCALE=problem.width**-0.5, SIZE=x.element_size(),
        num_warps=config.warps, maxnreg=config.registers or None,
    )  # fmt: skip
    return y
