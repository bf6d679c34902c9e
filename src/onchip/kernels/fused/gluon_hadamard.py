"""Hadamard rotation of wide rows, `hadamard.py`'s formula: six bits of the column in registers at a time, and one or two exchanges between threads.

A thread holds 64 elements: those whose columns differ in six bits, along which it adds and subtracts without hearing of anybody. The first six are the low
bits that a load of 16 bytes has, and the highest. Of 16 bits and up to 8,192 columns one product of matrices (`mma.sync`, x as it was loaded times 1 and -1,
which is exact) adds along four bits first, two of them between lanes, and one exchange turns all that are left to registers. Otherwise an exchange turns the
next six to registers, and a second one brings what is left beside the low ones of a store. Of 32,768 columns two programs read the row and make half of it
each: three of them fit on a multiprocessor, where one with all of the row would have nothing beside it. Many such rows of 16 bits are
`hopper_hadamard.py`'s. Traffic is the floor: x read and y written, once.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.fused import hopper_hadamard

HELD = 6  # bits of the column in a thread's registers
PRODUCT = (0, 1, 3, 4)  # bits of the column along which one product of matrices adds, of 16 bits: exact, as x times 1 or -1 is
HALVED = 1 << 12  # columns of which 12 programs' exchanges would leave loads little of a multiprocessor's memory: by halves 67.8 us (16,384 rows), at once 73.6
WHOLE = 1 << 14  # columns that a program makes
REGISTERS = 80  # of a thread where two programs share a row of 16 bits: three of them a multiprocessor, 87 us instead of 97 (H200, 2,048 x 32,768)


class Tiles(NamedTuple):
    """`parts`: programs that share a row; each reads all of it and makes its part. `registers` of a thread at most; 0: no limit. `halves`: an exchange takes
    half of the shared memory, twice."""

    parts: int
    warps: int
    registers: int = 0
    halves: bool = False

    def __str__(self):
        return f"{self.warps} warps" + f", {self.parts} programs a row" * (self.parts > 1)


# ---- device


@triton.constexpr_function
def multiplied(width: int, size: int) -> bool:
    """Whether bits PRODUCT are added along by a product before the passes."""
    return size == 2 and width < WHOLE


@triton.constexpr_function
def passes(width: int, size: int) -> tuple:
    """((bits in registers, those along which is added), ...): in the order of the passes; `size` bytes an element."""
    bits, low = width.bit_length() - 1, (16 // size).bit_length() - 1
    first = (*range(low), *range(bits - HELD + low, bits))
    if multiplied(width, size):
        rest = tuple(bit for bit in range(bits) if bit not in first and bit not in PRODUCT)
        last = (*range(HELD - len(rest)), *rest)
        return (first, tuple(bit for bit in first if bit not in PRODUCT)), (last, rest)
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
def count(width: int, size: int, adding: bool = False) -> int:
    """Passes; those up to the last one that adds. The third of a narrow row only brings columns together for the store."""
    return max(n + 1 for n, (_, along) in enumerate(passes(width, size)) if along or not adding)


@triton.constexpr_function
def layout(width: int, size: int, number: int) -> gl.DistributedLinearLayout:
    """A pass's bits of the column in registers, the five lowest others along lanes, the rest along warps."""
    held = passes(width, size)[number][0]
    rest = [[1 << bit] for bit in range(width.bit_length() - 1) if bit not in held]
    return gl.DistributedLinearLayout(reg_bases=[[1 << bit] for bit in held], lane_bases=rest[:5], warp_bases=rest[5:], block_bases=[], shape=[width])


@triton.constexpr_function
def products(warps: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def _signs(dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The Walsh-Hadamard matrix of 16: -1 where k and n have an odd number of bits in common."""
    k = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    common = k & n
    common ^= common >> 2
    return (1 - 2 * ((common ^ (common >> 1)) & 1)).to(gl.float32).to(dtype)


@gluon.jit
def _by_products(x, signs, acc, WARPS: gl.constexpr):
    """acc + x [high, 16] times the signs, where the 16 are the columns' bits 0, 3, 4 and 1: an operand as threads have loaded it, 16 bytes each."""
    N: gl.constexpr = x.shape[0]
    x = x.reshape([N >> 8, 8, 4, 2, 2, 2]).permute([0, 3, 1, 4, 2, 5]).reshape([N >> 4, 16])
    return mma_v2(gl.convert_layout(x, gl.DotOperandLayout(0, products(WARPS), 2)), signs, acc)


@gluon.jit
def _in_order(x, LAYOUT: gl.constexpr):
    N: gl.constexpr = x.shape[0] * 16
    x = x.reshape([N >> 8, 2, 8, 2, 4, 2]).permute([0, 2, 4, 1, 3, 5]).reshape([N])
    return gl.convert_layout(x, LAYOUT)


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


@triton.constexpr_function
def halved(width: int, size: int, number: int) -> gl.DistributedLinearLayout:
    """A pass's layout of every second column, of which a thread has both."""
    held = passes(width, size)[number][0]
    rest = [[1 << bit - 1] for bit in range(1, width.bit_length() - 1) if bit not in held]
    return gl.DistributedLinearLayout([[1 << bit - 1] for bit in held if bit > 0], rest[:5], rest[5:], [], [width // 2])


@gluon.jit
def _turned(x, SIZE: gl.constexpr, NUMBER: gl.constexpr, HALVES: gl.constexpr):
    """x in the layout of a pass; if HALVES, by two exchanges in half of the shared memory."""
    WIDTH: gl.constexpr = x.shape[0]
    if HALVES:
        a, b = gl.split(x.reshape([WIDTH // 2, 2]))
        x = gl.join(gl.convert_layout(a, halved(WIDTH, SIZE, NUMBER)), gl.convert_layout(b, halved(WIDTH, SIZE, NUMBER))).reshape([WIDTH])
    return gl.convert_layout(x, layout(WIDTH, SIZE, NUMBER))


@gluon.jit
def _hadamard(
    x_ptr, y_ptr, x_stride, WIDTH: gl.constexpr, PARTS: gl.constexpr, SCALE: gl.constexpr, SIZE: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr
):
    """WIDTH columns of a row, which has PARTS (1 or 2) times as many."""
    LOADED: gl.constexpr = layout(WIDTH, SIZE, 0)
    PASSES: gl.constexpr = count(WIDTH, SIZE)
    STORED: gl.constexpr = layout(WIDTH, SIZE, PASSES - 1)
    row, part = (gl.program_id(0) // PARTS).to(gl.int64), gl.program_id(0) % PARTS
    col = gl.arange(0, WIDTH, layout=LOADED)
    y_ptr += row * (PARTS * WIDTH) + part * WIDTH
    x = gl.load(x_ptr + row * x_stride + col)
    if multiplied(WIDTH, SIZE):
        signs = _signs(x.dtype, gl.DotOperandLayout(1, products(WARPS), 2))
        x = _by_products(x, signs, gl.zeros([WIDTH // 16, 16], gl.float32, layout=products(WARPS)), WARPS)
        x = _in_order(x, LOADED)
    else:
        x = x.to(gl.float32)
        if PARTS == 2:
            x += gl.load(x_ptr + row * x_stride + WIDTH + col).to(gl.float32) * (1 - 2 * part).to(gl.float32)
    for n in gl.static_range(PASSES):
        if n > 0:
            x = _turned(x, SIZE, n, HALVES)
        x = _along(x, added(WIDTH, SIZE, n), SCALE if n + 1 == count(WIDTH, SIZE, True) else 1)
    x = gl.convert_layout(x, STORED)
    gl.store(y_ptr + gl.arange(0, WIDTH, layout=STORED), x.to(y_ptr.dtype.element_ty))


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles | hopper_hadamard.Tiles]:
    """64 elements a thread."""
    parts = max(1, problem.width // WHOLE)
    half = problem.dtype.itemsize == 2
    return [
        *hopper_hadamard.configs(problem, device),
        Tiles(parts, problem.width // parts >> 11, REGISTERS if parts > 1 and half else 0, half and problem.width == HALVED),
    ]


def launch(problem: Rows, config: Tiles | hopper_hadamard.Tiles, x: torch.Tensor) -> torch.Tensor:  # x: [..., width]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    if isinstance(config, hopper_hadamard.Tiles):
        hopper_hadamard.launch(problem, config, x, y)
        return y
    rows = x.reshape(problem.rows, problem.width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _hadamard[(problem.rows * config.parts,)](
        rows, y, rows.stride(0), WIDTH=problem.width // config.parts, PARTS=config.parts, SCALE=problem.width**-0.5, SIZE=x.element_size(),
        WARPS=config.warps, HALVES=config.halves, num_warps=config.warps, maxnreg=config.registers or None,
    )  # fmt: skip
    return y
