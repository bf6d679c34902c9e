"""Activations: y = act(x), or act(gate) * up of gates and ups in one row, a bias added first; and their gradients.

    gate' = gate + b,  up' = up + c          y = act(gate') up'
    d gate = dy up' act'(gate')              d up = dy act(gate')           d bias = the sum of these over rows

A program takes a piece of one row, forward: it reads two pieces of x (of a gated activation) and writes one of y, so traffic is the floor,
3 rows width. Backward it reads x and dy and writes dx, 5 rows width; nothing of the forward pass is kept. With a bias a program takes a piece of
many rows and leaves one partial sum, so that sums have one order; the partial sums are added up after it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.curves import activated, held, slope
from onchip.kernels.fused.norm_tile import sum_partials

BLOCKS = (2048, 1024, 512)
THREAD = 16  # elements of y a thread: two 16-byte loads of bf16 for each of gate and up
FEW = 4  # warps of the smallest piece: four elements a thread, since of few rows a call is one trip to memory
SUMMED = 4  # programs a multiprocessor that share the rows of a bias's gradient, two or three rows on their way: 101 us, with 8 107, with 2 120 (H200)


class Tiles(NamedTuple):
    """How much of a row a program takes, and of how many rows; `stages`: of these, the ones on their way to shared memory, and the one in hand."""

    block: int
    warps: int
    rows: int = 1
    stages: int = 1

    def __str__(self):
        return f"tiles of {self.block}, {self.warps} warps" + f", {self.rows} rows a program" * (self.rows > 1)


# ---- device


@triton.jit
def _load(ptr, first, width, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Gates and ups of a piece of the row at `ptr`, float32 [BLOCK]; neighbours are taken apart in registers. Of a plain activation its numbers, twice."""
    if FORM == "interleaved":
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        gate, up = tl.split(tl.load(ptr + both, mask=both < 2 * width, other=0.0).reshape(BLOCK, 2))
    else:
        col = first + tl.arange(0, BLOCK)
        gate = tl.load(ptr + col, mask=col < width, other=0.0)
        up = tl.load(ptr + width + col, mask=col < width, other=0.0) if FORM == "halves" else gate
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store(ptr, gate, up, first, width, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse of `_load`."""
    col = first + tl.arange(0, BLOCK)
    if FORM == "interleaved":
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(ptr + both, tl.join(gate, up).reshape(2 * BLOCK).to(ptr.dtype.element_ty), mask=both < 2 * width)
    else:
        tl.store(ptr + col, gate.to(ptr.dtype.element_ty), mask=col < width)
        if FORM == "halves":
            tl.store(ptr + width + col, up.to(ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _biased(gate, up, bias_ptr, first, width, FORM: tl.constexpr, BLOCK: tl.constexpr):
    if bias_ptr is not None:
        b, c = _load(bias_ptr, first, width, FORM, BLOCK)
        gate, up = gate + b, up + c
    return gate, up


@triton.jit
def _activate(x_ptr, bias_ptr, y_ptr, width, x_stride, alpha, limit, ACT: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr):
    QUICK: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    pieces = tl.cdiv(width, BLOCK)
    row, first = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * BLOCK
    gate, up = _load(x_ptr + row * x_stride, first, width, FORM, BLOCK)
    gate, up = _biased(gate, up, bias_ptr, first, width, FORM, BLOCK)
    if ACT == "clipped":
        gate, up = tl.minimum(gate, limit, tl.PropagateNan.ALL), held(up, -limit, limit) + 1
    y = activated(gate, ACT, alpha, QUICK)
    if FORM != "plain":
        y *= up
    _store(y_ptr + row * width, y, y, first, width, "plain", BLOCK)


@triton.jit
def _slopes(
    x_ptr, dy_ptr, dx_ptr, b, c, bias_ptr, row, first, width, x_stride, dy_stride, alpha, limit, ACT: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes dx of a piece of a row; the gradients of its gates and ups."""
    QUICK: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    gate, up = _load(x_ptr + row * x_stride, first, width, FORM, BLOCK)
    dy, _ = _load(dy_ptr + row * dy_stride, first, width, "plain", BLOCK)
    if bias_ptr is not None:
        gate, up = gate + b, up + c
    if FORM == "plain":
        d_gate = dy * slope(gate, ACT, alpha, QUICK)
        d_up = d_gate
    elif ACT == "clipped":
        low, inside = gate <= limit, tl.abs(up) <= limit
        gate, up = tl.minimum(gate, limit, tl.PropagateNan.ALL), held(up, -limit, limit) + 1
        d_up = tl.where(inside, dy * activated(gate, ACT, alpha, QUICK), 0.0)
        d_gate = tl.where(low, dy * up * slope(gate, ACT, alpha, QUICK), 0.0)
    else:
        d_up = dy * activated(gate, ACT, alpha, QUICK)
        d_gate = dy * up * slope(gate, ACT, alpha, QUICK)
    PARTS: tl.constexpr = 1 if FORM == "plain" else 2
    _store(dx_ptr + row * width * PARTS, d_gate, d_up, first, width, FORM, BLOCK)
    return d_gate, d_up


@triton.jit
def _gradient(x_ptr, bias_ptr, dy_ptr, dx_ptr, partial_ptr, rows, width, x_stride, dy_stride, alpha, limit,
              ACT: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A row; with a bias rows group, group + groups, ..., the next ones on their way to shared memory, and a row of `partial` for the group's sum."""
    pieces = tl.cdiv(width, BLOCK)
    group, first = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * BLOCK
    if bias_ptr is None:
        _slopes(x_ptr, dy_ptr, dx_ptr, 0.0, 0.0, bias_ptr, group, first, width, x_stride, dy_stride, alpha, limit, ACT, FORM, BLOCK)
    else:
        b, c = _load(bias_ptr, first, width, FORM, BLOCK)
        d_gates, d_ups = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for row in tl.range(group, rows, tl.num_programs(0) // pieces, num_stages=STAGES):
            d_gate, d_up = _slopes(x_ptr, dy_ptr, dx_ptr, b, c, bias_ptr, row, first, width, x_stride, dy_stride, alpha, limit, ACT, FORM, BLOCK)
            d_gates += d_gate
            d_ups += d_up
        PARTS: tl.constexpr = 1 if FORM == "plain" else 2
        _store(partial_ptr + group * width * PARTS, d_gates, d_ups, first, width, FORM, BLOCK)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """The largest piece that still gives every multiprocessor two programs."""
    fits = (block for block in BLOCKS if problem.rows * triton.cdiv(problem.width, block) >= 2 * device.sms)
    block = next(fits, BLOCKS[-1])
    if problem.op.endswith("backward") and "bias" in problem.variant:
        block = min(block, 1024)  # the sums stay in registers beside what is loaded
        groups = max(1, min(problem.rows, SUMMED * device.sms // triton.cdiv(problem.width, block)))
        gated = problem.op.startswith("gated")
        stages = (3 if gated else 4) if device.kind == "cuda" else 1
        return [Tiles(block, block // (32 * (THREAD if gated else THREAD // 2)), triton.cdiv(problem.rows, groups), stages)]
    return [Tiles(block, block // (32 * THREAD) if block > BLOCKS[-1] else FEW)]


def form(problem: Rows) -> tuple[str, str]:
    """The activation, and where its numbers lie."""
    act, *words = problem.variant.split()
    return act, "plain" if problem.op.startswith("activate") else "interleaved" if "interleaved" in words else "halves"


def launch(problem: Rows, config: Tiles, x: torch.Tensor, bias: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """x [..., width], or [..., 2 width] of a gated activation."""
    act, lie = form(problem)
    y = torch.empty((*x.shape[:-1], problem.width), dtype=x.dtype, device=x.device)
    rows = _rows(x, problem.rows)
    grid = (problem.rows * triton.cdiv(problem.width, config.block),)
    bias = None if bias is None else bias.contiguous()
    if y.numel():
        _activate[grid](rows, bias, y, problem.width, rows.stride(0), alpha, limit, ACT=act, FORM=lie, BLOCK=config.block, num_warps=config.warps)
    return y


def launch_backward(
    problem: Rows, config: Tiles, x: torch.Tensor, bias: torch.Tensor | None, alpha: float, limit: float, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of x and of the bias."""
    act, lie = form(problem)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not dx.numel():
        return dx, None if bias is None else torch.zeros_like(bias)
    rows, dy = _rows(x, problem.rows), _rows(dy, problem.rows)
    groups = triton.cdiv(problem.rows, config.rows)
    partial = None if bias is None else torch.empty((groups, x.shape[-1]), dtype=torch.float32, device=x.device)
    bias = None if bias is None else bias.contiguous()
    _gradient[(groups * triton.cdiv(problem.width, config.block),)](
        rows, bias, dy, dx, partial, problem.rows, problem.width, rows.stride(0), dy.stride(0), alpha, limit,
        ACT=act, FORM=lie, BLOCK=config.block, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    if partial is None:
        return dx, None
    d_bias, block = torch.empty_like(bias), min(16, triton.next_power_of_2(len(bias)))
    count = min(128, triton.next_power_of_2(groups))
    sum_partials[(triton.cdiv(len(bias), block),)](partial, d_bias, groups, len(bias), COUNT=count, BLOCK=block, num_warps=4)
    return dx, d_bias


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x as [rows, width], the rows any stride apart; copied when a row is not contiguous."""
    x = x.reshape(rows, -1) if rows else x.reshape(0, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
