"""Softmax of rows, or its logarithm, and their gradients.

    z = x / temperature + mask,  y = exp(z - max z) / sum exp(z - max z),  or its log
    dx = y (dy - sum dy y) / temperature,  of the logarithm (dy - exp(y) sum dy) / temperature

A program holds a few whole rows in registers: each is read once and written once (backward: two reads, one write), which is the floor. A row too wide
for the registers goes through them in pieces, twice, the second time from its end to its beginning, where L2 has most of it. Each thread has a maximum
and a sum of its own. A mask is read where it lies, by up to three strides of rows; what a mask of bools hides may be NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Rows

WARPS = ((4096, 4), (8192, 8), (32768, 16))  # (elements up to, warps): at most 64 elements a thread
TILE = 4096  # elements of a program that holds several rows
WIDEST = {"softmax": 1 << 16, "softmax_backward": 1 << 15}  # bytes of a row in registers; of the gradient there are two rows
PIECE = 32768  # bytes of a wider row at a time, 32 warps: one program a multiprocessor, as two would have more rows in flight than L2 holds


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `block` columns."""

    rows: int
    block: int
    warps: int

    def __str__(self):
        return f"{self.rows}x{self.block} tiles, {self.warps} warps"


class MaskRows(NamedTuple):
    """A mask that lies as rows in three dimensions: it, the sizes of the inner two, the strides of all three."""

    mask: torch.Tensor | None
    sizes: tuple[int, int] = (1, 1)
    strides: tuple[int, int, int] = (0, 0, 0)


# ---- device


@triton.jit
def _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where the mask of a row begins."""
    return row // (size_1 * size_2) * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2


@triton.jit
def _load(x_ptr, mask_ptr, at, mask_at, inside, temperature, DIVIDED: tl.constexpr, BOOL: tl.constexpr):
    """z, float32; -inf where nothing is."""
    z = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    if DIVIDED:  # a product with the inverse rounds twice, which exponentials of large numbers show
        z = tl.math.div_rn(z, temperature + tl.zeros_like(z))
    if BOOL:  # as the load's own mask it would split the load
        z = tl.where(tl.load(mask_ptr + mask_at, mask=inside, other=0) != 0, z, float("-inf"))
    elif mask_ptr is not None:
        z += tl.load(mask_ptr + mask_at, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def _normal(z, base, total, LOG: tl.constexpr):
    """Of z - base, whose exponentials sum up to `total`; 0, or log 0, where that is 0."""
    if LOG:
        return tl.where(total == 0, float("-inf"), z - base - tl.log(total))
    return tl.where(total == 0, 0.0, tl.math.div_rn(tl.exp(z - base), tl.where(total == 0, 1.0, total) + tl.zeros_like(z)))


@triton.jit
def _softmax(
    x_ptr, mask_ptr, y_ptr, rows, width, x_stride, size_1, size_2, stride_0, stride_1, stride_2, temperature,
    DIVIDED: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, LANE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < width)
    row = row.to(tl.int64)
    mask_at = _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2) + col
    z = _load(x_ptr, mask_ptr, row * x_stride + col, mask_at, inside, temperature, DIVIDED, BOOL)  # [ROWS, BLOCK]
    top = tl.max(z, 1, keep_dims=True)
    base = tl.where(top == float("-inf"), 0.0, top)
    y = _normal(z, base, tl.sum(tl.exp(z - base), 1, keep_dims=True), LOG)
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_wide(
    x_ptr, mask_ptr, y_ptr, rows, width, x_stride, size_1, size_2, stride_0, stride_1, stride_2, temperature,
    DIVIDED: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, LANE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    mask_at = _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2)
    LANES: tl.constexpr = BLOCK // LANE
    m, s = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    pieces = tl.cdiv(width, BLOCK)
    for piece in range(pieces):
        col = piece * BLOCK + tl.arange(0, BLOCK)
        z = _load(x_ptr, mask_ptr, col, mask_at + col, col < width, temperature, DIVIDED, BOOL).reshape(LANES, LANE)
        top = tl.maximum(m, tl.max(z, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        s = s * tl.exp(m - base) + tl.sum(tl.exp(z - base[:, None]), 1)
        m = top
    top = tl.max(m)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(s * tl.exp(m - base))
    for piece in range(pieces):
        col = (pieces - 1 - piece) * BLOCK + tl.arange(0, BLOCK)
        z = _load(x_ptr, mask_ptr, col, mask_at + col, col < width, temperature, DIVIDED, BOOL)
        tl.store(y_ptr + col, _normal(z, base, total, LOG).to(y_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _load_pair(y_ptr, dy_ptr, at, dy_at, inside, LOG: tl.constexpr):
    """(y, dy), float32; dy is 0 where the logarithm is -inf: what is hidden has no gradient."""
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
    if LOG:
        dy = tl.where(y == float("-inf"), 0.0, dy)
    return y, dy


@triton.jit
def _slope(y, dy, total, inverse, LOG: tl.constexpr):
    if LOG:
        return (dy - tl.exp(y) * total) * inverse
    return y * (dy - total) * inverse


@triton.jit
def _backward(
    y_ptr, dy_ptr, dx_ptr, rows, width, y_stride, dy_stride, inverse, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < width)
    row = row.to(tl.int64)
    y, dy = _load_pair(y_ptr, dy_ptr, row * y_stride + col, row * dy_stride + col, inside, LOG)
    total = tl.sum(dy if LOG else dy * y, 1, keep_dims=True)
    tl.store(dx_ptr + row * width + col, _slope(y, dy, total, inverse, LOG).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_wide(
    y_ptr, dy_ptr, dx_ptr, rows, width, y_stride, dy_stride, inverse, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * y_stride
    dy_ptr += row * dy_stride
    pieces = tl.cdiv(width, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for piece in range(pieces):
        col = piece * BLOCK + tl.arange(0, BLOCK)
        y, dy = _load_pair(y_ptr, dy_ptr, col, col, col < width, LOG)
        total += dy if LOG else dy * y
    total = tl.sum(total)
    for piece in range(pieces):
        col = (pieces - 1 - piece) * BLOCK + tl.arange(0, BLOCK)
        y, dy = _load_pair(y_ptr, dy_ptr, col, col, col < width, LOG)
        tl.store(dx_ptr + row * width + col, _slope(y, dy, total, inverse, LOG).to(dx_ptr.dtype.element_ty), mask=col < width)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor."""
    if problem.width * problem.dtype.itemsize > WIDEST[problem.op]:
        return [Tiles(1, PIECE // problem.dtype.itemsize, 32)]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, block, pick(WARPS, rows * block))]


def launch(problem: Rows, config: Tiles, x: torch.Tensor, mask: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """x: [..., width]; mask: bools that say what is shown, or floats to add, of a shape that broadcasts to x's."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, lies = _rows(x, problem), mask_rows(mask, x.shape)
    kernel = _softmax if config.block >= problem.width else _softmax_wide
    kernel[(triton.cdiv(problem.rows, config.rows),)](
        rows,
        lies.mask,
        y,
        problem.rows,
        problem.width,
        rows.stride(0),
        *lies.sizes,
        *lies.strides,
        temperature,
        DIVIDED=temperature != 1,
        BOOL=mask is not None and mask.dtype == torch.bool,
        LOG="log" in problem.variant,
        LANE=16 // x.element_size(),
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return y


def launch_backward(problem: Rows, config: Tiles, y: torch.Tensor, dy: torch.Tensor, temperature: float) -> torch.Tensor:
    """y, dy: [..., width]."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    y, dy = _rows(y, problem), _rows(dy, problem)
    kernel = _backward if config.block >= problem.width else _backward_wide
    kernel[(triton.cdiv(problem.rows, config.rows),)](
        y,
        dy,
        dx,
        problem.rows,
        problem.width,
        y.stride(0),
        dy.stride(0),
        1 / temperature,
        LOG="log" in problem.variant,
        ROWS=config.rows,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return dx


def mask_rows(mask: torch.Tensor | None, shape: torch.Size) -> MaskRows:
    """The mask as rows beside those of x of this shape, where it lies if it can be said with three strides, else copied."""
    if mask is None:
        return MaskRows(None)
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    if mask.ndim == 0 or mask.shape[-1] != shape[-1] or mask.stride(-1) != 1:
        mask = mask.expand(*mask.shape[:-1], shape[-1]).contiguous()
    mask = mask.expand(shape)
    dims = _merged(mask)
    if len(dims) > 3:
        mask = mask.contiguous()
        dims = _merged(mask)
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (3 - len(dims)) + dims
    return MaskRows(mask, (size_1, size_2), (stride_0, stride_1, stride_2))


def _merged(mask: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions before the last, those that lie as one merged."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return dims


def _rows(x: torch.Tensor, problem: Rows) -> torch.Tensor:
    """x as [rows, width], the rows any stride apart; copied when a row is not contiguous."""
    x = x.reshape(problem.rows, problem.width)
    return x if x.stride(1) == 1 else x.contiguous()
