"""Row normalisation: y = x / sqrt(mean(x^2) + eps) * (w + offset), where x may first be added to a residual.

A program holds a few whole rows in registers, so each row is read once and written once; with a residual, the sum is
written as well. The weights come from L2. Bytes moved are the floor: (2 rows + 1) width, with a residual (4 rows + 1) width.
A row too wide for the registers goes through them in pieces, twice: its second reading comes from L2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Rows

# A thread holds 32 elements: four 16-byte loads of bf16 in flight, and registers for two blocks or more on a multiprocessor.
# More than 16 warps would leave a thread 64 registers, half of what it needs.
WARPS = ((4096, 4), (8192, 8), (32768, 16))  # (elements up to, warps)
TILE = 4096  # elements of a program that holds several rows
WIDEST = 1 << 16  # bytes of a row in registers; 32,768 elements of float32 would spill (ptxas, sm_80 and sm_90)
PIECE = 8192  # elements of a wider row that are handled at a time


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `block` columns."""

    rows: int
    block: int
    warps: int

    def __str__(self):
        return f"{self.rows}x{self.block} tiles, {self.warps} warps"


# ---- device


@triton.jit
def _add_residual(x, residual_ptr, sum_ptr, source, target, inside):
    """x + residual, rounded to the dtype of x; written to `sum`."""
    total = x.to(tl.float32) + tl.load(residual_ptr + source, mask=inside, other=0.0).to(tl.float32)
    total = total.to(x.dtype)
    tl.store(sum_ptr + target, total, mask=inside)
    return total


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    offset,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < width)
    row = row.to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)  # [ROWS, BLOCK]
    w = tl.load(w_ptr + col, mask=col < width, other=0.0).to(tl.float32)  # before the sum, which hides its latency
    if RESIDUAL:
        x = _add_residual(x, residual_ptr, sum_ptr, row * residual_stride + col, row * width + col, inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    y = x * scale * (w + offset)
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_wide(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    offset,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < width
        x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)  # [BLOCK]
        if RESIDUAL:
            x = _add_residual(x, residual_ptr, sum_ptr, row * residual_stride + col, row * width + col, inside)
        x = x.to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / width + eps)
    tl.debug_barrier()  # the sum may be read back by another thread than wrote it
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < width
        again = sum_ptr + row * width if RESIDUAL else x_ptr + row * x_stride
        x = tl.load(again + col, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + col, (x * scale * (w + offset)).to(y_ptr.dtype.element_ty), mask=inside)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor."""
    if problem.width * problem.dtype.itemsize > WIDEST:
        return [Tiles(1, PIECE, 16)]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, block, pick(WARPS, rows * block))]


def launch(
    problem: Rows,
    config: Tiles,
    x: torch.Tensor,  # [..., width]
    weight: torch.Tensor,  # [width]
    eps: float,
    residual: torch.Tensor | None,  # [..., width]
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    rows = _rows(x, problem)
    added = None if residual is None else _rows(residual, problem)
    kernel = _rms_norm if config.block >= problem.width else _rms_norm_wide
    kernel[(triton.cdiv(problem.rows, config.rows),)](
        rows,
        added,
        weight.contiguous(),
        y,
        total,
        problem.rows,
        problem.width,
        rows.stride(0),
        0 if added is None else added.stride(0),
        eps,
        offset,
        RESIDUAL=residual is not None,
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return y if total is None else (y, total)


def _rows(x: torch.Tensor, problem: Rows) -> torch.Tensor:
    """x as [rows, width], the rows any stride apart; copied when a row is not contiguous."""
    x = x.reshape(problem.rows, problem.width)
    return x if x.stride(1) == 1 else x.contiguous()
