"""Hadamard rotation of many rows of 32,768 columns of 16 bits on Hopper, `hadamard.py`'s formula by products of matrices.

Of a row's columns 4,096 that lie side by side are a matrix X [64, 64], and H X H, with the Walsh-Hadamard matrix of 64, adds along all of their bits. Programs
stay; one warp copies (TMA) the next rows to shared memory, and two warpgroups make four such matrices each. The first product is of x as it was copied, which
is exact: its other operand is 1 and -1. Between the four a thread adds along two bits; the last bit is that the product of the row's other half is added or
taken away. The second product's first operand are these sums as two numbers of bfloat16 each, 16 bits together. So nothing goes between threads.
Traffic is the floor: x read and y written, once, by copies of whole stretches of memory (boxes of 256 columns of each of 64 rows: 80 us, not these).
"""

from typing import NamedTuple

import torch

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.hopper import (
    advance,
    describe,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WIDTH = 2 * 4 * 64 * 64  # columns; a copy is of half of them, what a warpgroup makes
LEAST = 4  # rows of a program from which on its beginning, 3 us more than another kernel's, is hidden (128 rows: 10.8 us, by `gluon_hadamard` 9.3)
STAGES = 2


class Tiles(NamedTuple):
    programs: int

    def __str__(self):
        return f"2 warpgroups, {STAGES} stages, {self.programs} programs that stay"


# ---- device


@gluon.jit
def _signs(dtype: gl.constexpr):
    """The Walsh-Hadamard matrix of 64: -1 where row and column have an odd number of bits in common."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    common = k & n
    common ^= common >> 4
    common ^= common >> 2
    return (1 - 2 * ((common ^ (common >> 1)) & 1)).to(gl.float32).to(dtype)


@gluon.jit
def _product(x, signs):
    """x [64, 64] times the signs, to 2^-17 of each number, on its way; and its operands."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    high = x.to(gl.bfloat16)
    low = gl.convert_layout((x - high.to(gl.float32)).to(gl.bfloat16), operand)
    high = gl.convert_layout(high, operand)
    y = warpgroup_mma(low, signs, gl.zeros([64, 64], gl.float32, layout), use_acc=False, is_async=True)
    return warpgroup_mma(high, signs, y, is_async=True), high, low


@gluon.jit
def _matrix(buffers, index, n: gl.constexpr):
    return buffers.index(index).reshape([256, 64]).slice(n * 64, 64, 0)


@gluon.jit
def _make(y_desc, ring, signs, first_signs, out, rows, SCALE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup's half of one row after the other."""
    buffers, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    stage, phase = 0, 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        mbarrier.wait(full.index(stage), phase)
        x = ()
        for n in gl.static_range(4):
            y = gl.zeros([64, 64], gl.float32, layout)
            y = warpgroup_mma(first_signs.index(0), _matrix(buffers, 2 * stage, n), y, use_acc=False, is_async=True)
            x += (warpgroup_mma(first_signs.index(GROUP), _matrix(buffers, 2 * stage + 1, n), y, is_async=True),)
        a, b, c, d = warpgroup_mma_wait(0, deps=[x[0], x[1], x[2], x[3]])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        a, b, c, d = a + b, a - b, c + d, c - d
        x = (a + c, b + d, a - c, b - d)
        product = _product(x[0], signs)
        for n in gl.static_range(4):
            y, high, low = product
            y, _high, _low = warpgroup_mma_wait(0, deps=[y, high, low])
            if n < 3:
                product = _product(x[n + 1], signs)
            tma.store_wait(3)  # what has lain here has left
            buffer = out.index(4 * GROUP + n)
            buffer.reshape([64, 64]).store((y * SCALE).to(y_desc.dtype))
            fence_async_shared()
            tma_store(y_desc, [row, GROUP * 256 + n * 64, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _copy(x_desc, ring, rows, STAGES: gl.constexpr):
    buffers, full, empty = ring
    stage, phase = 0, 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), 2 * x_desc.block_type.nbytes)
        for n in gl.static_range(2):
            tma_load(x_desc, [row, n * 256, 0], full.index(stage), buffers.index(2 * stage + n))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["rows"])
def _hadamard(x_desc, y_desc, rows, SCALE: gl.constexpr, STAGES: gl.constexpr):
    """x_desc [rows, 512, 64] half a row at a time, y_desc a matrix at a time."""
    buffers = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005 (device code)
    out = gl.allocate_shared_memory(y_desc.dtype, [8] + y_desc.block_type.shape, y_desc.layout)  # noqa: RUF005
    SIGNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    signs = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SIGNS)
    first_signs = gl.allocate_shared_memory(x_desc.dtype, [2, 64, 64], SIGNS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    signs.index(0).store(_signs(gl.bfloat16))
    first_signs.index(0).store(_signs(x_desc.dtype))
    first_signs.index(1).store(-_signs(x_desc.dtype))
    fence_async_shared()
    ring = (buffers, full, empty)
    gl.warp_specialize(
        [
            (_make, (y_desc, ring, signs.index(0), first_signs, out, rows, SCALE, 0, STAGES)),
            (_make, (y_desc, ring, signs.index(0), first_signs, out, rows, SCALE, 1, STAGES)),
            (_copy, (x_desc, ring, rows, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    many = problem.width == WIDTH and problem.dtype.itemsize == 2 and problem.rows >= LEAST * device.sms
    return [Tiles(device.sms)] if many else []


def launch(problem: Rows, config: Tiles, x: torch.Tensor, y: torch.Tensor) -> None:
    """y, contiguous, of x [..., width]."""
    rows = x.reshape(problem.rows, problem.width)
    if rows.stride(1) != 1 or rows.stride(0) < 8 or rows.stride(0) % 8 or rows.data_ptr() % 16:  # as the copies want it
        rows = rows.clone(memory_format=torch.contiguous_format)
    rows, out = (t.view(problem.rows, problem.width).unflatten(1, (-1, 64)) for t in (rows, y))
    _hadamard[(config.programs,)](describe(rows, 256, 64), describe(out, 64, 64), problem.rows, SCALE=problem.width**-0.5, STAGES=STAGES, num_warps=4)
