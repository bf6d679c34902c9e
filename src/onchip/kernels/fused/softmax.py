"""Softmax of rows, or its logarithm, and their gradients.

    z = x / temperature + mask,  y = exp(z - max z) / sum exp(z - max z),  or its log
    dx = y (dy - sum dy y) / temperature,  of the logarithm (dy - exp(y) sum dy) / temperature

A program holds a few whole rows in registers: each is read once and written once (backward: two reads, one write), which is the floor. A row too wide
for that is held by a cluster of programs (`cluster.py`), or, where it is too wide for one or there are none, by several that meet (`meeting.py`) to add up
their sums: once as well. Of a row of more pieces than 32 each of these has several after one another, and reads all but the last twice. A mask is read where it
lies, by up to three strides of rows; what a mask of bools hides may be NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Rows
from onchip.kernels.cluster import begin, largest, peak
from onchip.kernels.cluster import total as whole
from onchip.kernels.curves import exp
from onchip.kernels.meeting import FIRST, MOST, SECOND, hear, held, phases, tell

WARPS = ((2048, 4), (8192, 8), (32768, 16))  # (elements up to, warps): at most 64 elements a thread
TILE = 4096  # elements of a program that holds several rows
WIDEST = 1 << 15  # bytes of a row in one program's registers
OF_CTA, MOST_OF_CTA = 1 << 14, 1 << 15  # bytes of a row that a program of a cluster holds, where that makes no cluster too large, and at most
OF_THREAD = {"softmax": 128, "softmax_backward": 64}  # bytes of such a row
PART = 4096  # bytes that such a program goes through at a time: in parts 16 KB take 72 registers of a thread, all at once 95
REGISTERS = 64  # of a thread where there are MOST_OF_CTA, without a mask or a logarithm: four such programs a multiprocessor (69 us of 256 x 262,144; three 77)
# Without them, (bytes of a row that each program holds, warps): the first of which a row has no more than can meet, else the last, several after one another.
WIDE = {"softmax": ((8192, 2), (8192, 4)), "softmax_backward": ((8192, 4), (16384, 4))}  # many small programs hide each other's waiting


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `block` columns; of a row that programs share, `span` blocks one after the other, or, as one of `ctas`
    that make a cluster, `parts` blocks at once. `registers` of a thread at most; 0: no limit."""

    rows: int
    block: int
    warps: int
    span: int = 0
    ctas: int = 1
    parts: int = 1
    registers: int = 0

    def __str__(self):
        shared = f", programs that meet after {self.span}" * bool(self.span) + f", clusters of {self.ctas}" * (self.ctas > 1)
        return f"{self.rows}x{self.parts * self.block} tiles, {self.warps} warps{shared}"


class MaskRows(NamedTuple):
    """A mask that lies as rows in three dimensions: it, the sizes of the inner two, the strides of all three."""

    mask: torch.Tensor | None
    sizes: tuple[int, int] = (1, 1)
    strides: tuple[int, int, int] = (0, 0, 0)


# ---- device


@triton.jit
def _kept(x, CLUSTER: tl.constexpr):
    """x, but as it was loaded: else what has been made float32 stays so over an exchange, in twice the registers."""
    if CLUSTER and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where the mask of a row begins."""
    return row // (size_1 * size_2) * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2


@triton.jit
def _shown(x, mask_ptr, mask_at, inside, temperature, DIVIDED: tl.constexpr, BOOL: tl.constexpr):
    """z of x, float32; -inf where nothing is."""
    if mask_ptr is not None:  # before the division, over whose branches no load is moved; a mask of bools as the load's own would split the load
        mask = tl.load(mask_ptr + mask_at, mask=inside, other=0)
    z = x.to(tl.float32)
    if DIVIDED:  # a product with the inverse rounds twice, which exponentials of large numbers show
        z = tl.math.div_rn(z, temperature + tl.zeros_like(z))
    if BOOL:
        z = tl.where(mask != 0, z, float("-inf"))
    elif mask_ptr is not None:
        z += mask.to(tl.float32)
    return z


@triton.jit
def _normal(z, base, total, LOG: tl.constexpr, DTYPE: tl.constexpr):
    """Of z - base, whose exponentials sum up to `total`; 0, or log 0, where that is 0."""
    if LOG:
        return tl.where(total == 0, float("-inf"), z - base - tl.log(total)).to(DTYPE)
    some = tl.where(total == 0, 1.0, total)  # then every exponential is 0
    if tl.float32 == DTYPE:
        return tl.math.div_rn(exp(z - base, True), some + tl.zeros_like(z))
    return (exp(z - base, True) * tl.math.div_rn(tl.full(some.shape, 1.0, tl.float32), some)).to(DTYPE)  # a division is ten instructions, as much as all others


@triton.jit
def _softmax(
    x_ptr, mask_ptr, y_ptr, rows, width, x_stride, size_1, size_2, stride_0, stride_1, stride_2, temperature,
    DIVIDED: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CTAS: tl.constexpr,
    CLUSTER: tl.constexpr,
):  # fmt: skip
    if CTAS > 1:
        box = begin(2, CTAS, CLUSTER)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    first = tl.arange(0, CTAS)[:, None] * (PARTS * BLOCK) + tl.arange(0, BLOCK)[None, :]
    mask_at = _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2)
    x, z = (), ()
    for n in tl.static_range(PARTS):
        col = first + n * BLOCK
        inside = (row < rows) & (col < width)
        x += (tl.load(x_ptr + row * x_stride + col, mask=inside, other=float("-inf")),)  # [ROWS or CTAS, BLOCK]
        z += (_shown(x[n], mask_ptr, mask_at + col, inside, temperature, DIVIDED, BOOL),)
        if n == 0:
            tops = z[0]
        else:
            tops = tl.maximum(tops, z[n])
    top = tl.max(tops, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    again: tl.constexpr = CTAS > 1 and mask_ptr is None and not DIVIDED  # z is made of x again, which alone is kept in registers
    for n in tl.static_range(PARTS):
        of_part = _kept(x[n], CLUSTER).to(tl.float32) if again else z[n]
        e = exp(of_part - base[:, None], True)
        if n == 0:
            sums = e
        else:
            sums += e
    total = tl.sum(sums, 1)
    if CTAS > 1:
        top, total = peak(top, total, box, 0, CTAS, CLUSTER)
        base = tl.where(top == float("-inf"), 0.0, top)
    for n in tl.static_range(PARTS):
        of_part = _kept(x[n], CLUSTER).to(tl.float32) if again else z[n]
        y = _normal(of_part, base[:, None], total[:, None], LOG, y_ptr.dtype.element_ty)
        col = first + n * BLOCK
        tl.store(y_ptr + row * width + col, y, mask=(row < rows) & (col < width))


@triton.jit
def _softmax_wide(
    x_ptr, mask_ptr, y_ptr, words_ptr, width, pieces, x_stride, size_1, size_2, stride_0, stride_1, stride_2, temperature,
    DIVIDED: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    x_ptr += row * x_stride
    mask_at = _mask_row(row, size_1, size_2, stride_0, stride_1, stride_2)
    words_ptr += row * pieces
    x, z = tl.zeros([BLOCK], x_ptr.dtype.element_ty), tl.zeros([BLOCK], tl.float32)
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    for n in range(SPAN):
        col = (piece * SPAN + n) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < width, other=float("-inf"))
        z = _shown(x, mask_ptr, mask_at + col, col < width, temperature, DIVIDED, BOOL)
        more = tl.maximum(top, tl.max(z))
        base = tl.where(more == float("-inf"), 0.0, more)
        if mask_ptr is None and not DIVIDED:
            z = held(x, PHASE).to(tl.float32)
        total = total * exp(top - base, True) + tl.sum(exp(z - base, True))
        top = more
    if PHASE != SECOND:
        tell(words_ptr + piece, top, total)
    if PHASE != FIRST:
        tops, totals = hear(words_ptr, pieces, PIECES, PHASE)
        there = tl.arange(0, PIECES) < pieces
        top = tl.max(tl.where(there, tops, float("-inf")))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.where(there, totals * exp(tops - base, True), 0.0))
        if mask_ptr is None and not DIVIDED:
            z = held(x, PHASE).to(tl.float32)
        for back in range(SPAN):
            col = (piece * SPAN + SPAN - 1 - back) * BLOCK + tl.arange(0, BLOCK)
            if back > 0:
                x = tl.load(x_ptr + col, mask=col < width, other=float("-inf"))
                z = _shown(x, mask_ptr, mask_at + col, col < width, temperature, DIVIDED, BOOL)
            tl.store(y_ptr + row * width + col, _normal(z, base, total, LOG, y_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _load_pair(y_ptr, dy_ptr, at, dy_at, inside):
    return tl.load(y_ptr + at, mask=inside, other=0.0), tl.load(dy_ptr + dy_at, mask=inside, other=0.0)


@triton.jit
def _pair(y, dy, LOG: tl.constexpr):
    """(y, dy), float32; dy is 0 where the logarithm is -inf: what is hidden has no gradient."""
    y, dy = y.to(tl.float32), dy.to(tl.float32)
    return y, tl.where(y == float("-inf"), 0.0, dy) if LOG else dy


@triton.jit
def _slope(y, dy, total, inverse, LOG: tl.constexpr):
    if LOG:
        return (dy - exp(y, True) * total) * inverse
    return y * (dy - total) * inverse


@triton.jit
def _backward(
    y_ptr, dy_ptr, dx_ptr, rows, width, y_stride, dy_stride, inverse,
    LOG: tl.constexpr, ROWS: tl.constexpr, CTAS: tl.constexpr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if CTAS > 1:
        box = begin(1, CTAS, CLUSTER)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.arange(0, CTAS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < width)
    y, dy = _load_pair(y_ptr, dy_ptr, row * y_stride + col, row * dy_stride + col, inside)
    a, b = _pair(y, dy, LOG)
    total = tl.sum(b if LOG else a * b, 1)
    if CTAS > 1:
        total = whole(total, box, 0, CTAS, CLUSTER)
        a, b = _pair(_kept(y, CLUSTER), _kept(dy, CLUSTER), LOG)
    tl.store(dx_ptr + row * width + col, _slope(a, b, total[:, None], inverse, LOG).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_wide(
    y_ptr, dy_ptr, dx_ptr, words_ptr, width, pieces, y_stride, dy_stride, inverse,
    LOG: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    y_ptr += row * y_stride
    dy_ptr += row * dy_stride
    words_ptr += row * pieces
    y, dy, total = tl.zeros([BLOCK], y_ptr.dtype.element_ty), tl.zeros([BLOCK], y_ptr.dtype.element_ty), tl.zeros([], tl.float32)
    for n in range(SPAN):
        col = (piece * SPAN + n) * BLOCK + tl.arange(0, BLOCK)
        y, dy = _load_pair(y_ptr, dy_ptr, col, col, col < width)
        a, b = _pair(y, dy, LOG)
        total += tl.sum(b if LOG else a * b)
    if PHASE != SECOND:
        tell(words_ptr + piece, total, tl.full([], 1.0, tl.float32))
    if PHASE != FIRST:
        totals, _ = hear(words_ptr, pieces, PIECES, PHASE)
        total = tl.sum(totals)
        y, dy = held(y, PHASE), held(dy, PHASE)
        for back in range(SPAN):
            col = (piece * SPAN + SPAN - 1 - back) * BLOCK + tl.arange(0, BLOCK)
            if back > 0:
                y, dy = _load_pair(y_ptr, dy_ptr, col, col, col < width)
            a, b = _pair(y, dy, LOG)
            tl.store(dx_ptr + row * width + col, _slope(a, b, total, inverse, LOG).to(dx_ptr.dtype.element_ty), mask=col < width)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor; a cluster, or programs that meet, a wide row."""
    size, forward = problem.dtype.itemsize, problem.op == "softmax"
    row = problem.width * size
    ctas = min(largest(device), triton.next_power_of_2(triton.cdiv(row, OF_CTA)))
    block = triton.next_power_of_2(triton.cdiv(problem.width, ctas))
    if ctas > 1 and block * size <= MOST_OF_CTA and (forward or row % 16 == 0):  # without loads of 16 bytes clusters are slower backward (50,257 columns)
        parts = block * size // PART if forward else 1
        registers = REGISTERS if forward and not problem.variant and block * size == MOST_OF_CTA else 0
        return [Tiles(1, block // parts, block * size // (32 * OF_THREAD[problem.op]), 0, ctas, parts, registers)]
    if row > WIDEST:
        ladder = WIDE[problem.op]
        piece, warps = next((rung for rung in ladder if row <= MOST.value * rung[0]), ladder[-1])
        return [Tiles(1, piece // size, warps, triton.cdiv(row, MOST.value * piece))]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, block, pick(WARPS, rows * block))]


def launch(problem: Rows, config: Tiles, x: torch.Tensor, mask: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """x: [..., width]; mask: bools that say what is shown, or floats to add, of a shape that broadcasts to x's."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, lies = _rows(x, problem), mask_rows(mask, x.shape)
    given = (rows.stride(0), *lies.sizes, *lies.strides, temperature)
    said = {"DIVIDED": temperature != 1, "BOOL": mask is not None and mask.dtype == torch.bool, "LOG": "log" in problem.variant}
    if config.span:
        _together(_softmax_wide, problem, config, (rows, lies.mask, y), given, said)
    else:
        grid = (triton.cdiv(problem.rows, config.rows),)
        config = config._replace(registers=0) if said["DIVIDED"] else config
        _softmax[grid](rows, lies.mask, y, problem.rows, problem.width, *given, **said, PARTS=config.parts, **_alone(x, config))
    return y


def launch_backward(problem: Rows, config: Tiles, y: torch.Tensor, dy: torch.Tensor, temperature: float) -> torch.Tensor:
    """y, dy: [..., width]."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    y, dy = _rows(y, problem), _rows(dy, problem)
    given, said = (y.stride(0), dy.stride(0), 1 / temperature), {"LOG": "log" in problem.variant}
    if config.span:
        _together(_backward_wide, problem, config, (y, dy, dx), given, said)
    else:
        grid = (triton.cdiv(problem.rows, config.rows),)
        _backward[grid](y, dy, dx, problem.rows, problem.width, *given, **said, **_alone(y, config))
    return dx


def _alone(x: torch.Tensor, config: Tiles) -> dict:
    """The constants of a kernel whose programs, or clusters, have whole rows."""
    options = {"num_ctas": config.ctas, "maxnreg": config.registers or None} if config.ctas > 1 and x.is_cuda else {}
    return {"ROWS": config.rows, "CTAS": config.ctas, "CLUSTER": x.is_cuda, "BLOCK": config.block, "num_warps": config.warps, **options}


def _together(kernel, problem: Rows, config: Tiles, tensors: tuple, given: tuple, said: dict) -> None:
    """A kernel whose programs meet."""
    x = tensors[0]
    pieces = triton.cdiv(problem.width, config.span * config.block)
    words = torch.zeros(problem.rows * pieces, dtype=torch.int64, device=x.device)
    tiles = {"SPAN": config.span, "PIECES": triton.next_power_of_2(pieces), "BLOCK": config.block, "num_warps": config.warps}
    for phase in phases(x, pieces, config.warps):
        kernel[(problem.rows * pieces,)](*tensors, words, problem.width, pieces, *given, **said, **tiles, PHASE=phase)


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
