"""Gated activation: y = act(gate) * up, gate and up side by side in x.

A program takes a piece of one row: it reads two pieces of x and writes one of y, so traffic is the floor, 3 rows width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows

BLOCKS = (2048, 1024, 512)
THREAD = 16  # elements of y a thread: two 16-byte loads of bf16 for each of gate and up


class Tiles(NamedTuple):
    """How much of a row a program takes."""

    block: int
    warps: int

    def __str__(self):
        return f"tiles of {self.block}, {self.warps} warps"


# ---- device


@triton.jit
def _act(x, ACT: tl.constexpr):
    """silu, or gelu exact or by tanh, of float32 x."""
    if ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    # (1 + tanh(u)) / 2 is sigmoid(2 u); here 2 sqrt(2 / pi)
    z = x if ACT == "silu" else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return tl.math.div_rn(x, 1 + tl.exp(-z))  # the plain quotient may be two ulps off


@triton.jit
def _gated_act(x_ptr, y_ptr, width, x_stride, ACT: tl.constexpr, BLOCK: tl.constexpr):
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    gate = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(x_ptr + row * x_stride + width + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + col, (_act(gate, ACT) * up).to(y_ptr.dtype.element_ty), mask=inside)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """The largest piece that still gives every multiprocessor two programs."""
    fits = (block for block in BLOCKS if problem.rows * triton.cdiv(problem.width, block) >= 2 * device.sms)
    block = next(fits, BLOCKS[-1])
    return [Tiles(block, block // (32 * THREAD))]


def launch(problem: Rows, config: Tiles, x: torch.Tensor) -> torch.Tensor:  # x: [..., 2 width]
    y = torch.empty((*x.shape[:-1], problem.width), dtype=x.dtype, device=x.device)
    rows = x.reshape(problem.rows, 2 * problem.width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    grid = (problem.rows * triton.cdiv(problem.width, config.block),)
    _gated_act[grid](rows, y, problem.width, rows.stride(0), ACT=problem.variant, BLOCK=config.block, num_warps=config.warps)
    return y
