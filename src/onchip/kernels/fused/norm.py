"""RMSNorm and LayerNorm of rows, with what stands around them:

    z = residual + gate * row_scale * dropout(x)                                                    (or x alone)
    y = (((z - mean) / sqrt(var + eps) * (weight + offset) + bias) * (1 + scale) + shift) * silu(g)  (or its codes)

A program holds a few whole rows in registers, so x and the residual are read once, y and z written once; parameters come from L2. The
variance is of differences from the mean, in float32. Rows too wide for the registers that fit the L2 cache, one for each multiprocessor, are a
program's each, which goes over it twice, by pieces. Others are shared out: one launch takes the statistics of
pieces (sums about a mean of the piece, merged as Chan does), a second one normalises them, reading from L2 what the first has
read, since a slab of rows goes through both before the next. That also keeps every multiprocessor busy with a few very wide rows.
Bytes moved: the floor, rows width (x + y), with a residual (x + y + 2 z).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.kernel import pick
from onchip.core.norms import CODES, Norm, Normed
from onchip.core.problem import Rows
from onchip.kernels.curves import sigmoid
from onchip.kernels.fused.norm_tile import PIECE, affine, arguments, dropped, factor, largest, matrix, merged, modulated, shares_of, stride

# A thread holds 32 elements: four 16-byte loads of bf16 in flight, and registers for two blocks or more on a multiprocessor.
# More than 16 warps would leave a thread 64 registers, half of what it needs.
WARPS = ((4096, 4), (8192, 8), (32768, 16))  # (elements up to, warps)
TILE = 4096  # elements of a program that holds several rows
WIDEST = 1 << 16  # bytes of a row in registers; 32,768 elements of float32 would spill (ptxas, sm_80 and sm_90)
SLAB = 2  # a slab of wide rows is at most this part of the L2 cache: it is read twice while it is there
PIECE_WARPS = 8
LONG_PIECE, LONG_WARPS = 8192, 16  # of a row that is one program's
EARLY = tl.constexpr(16384)  # elements of a row beside which there is room for a weight and a bias while it is summed up


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `block` columns. `long`: it goes over a wider row piece by piece."""

    rows: int
    block: int
    warps: int
    long: bool = False

    def __str__(self):
        return f"{self.rows}x{self.block} tiles, {self.warps} warps" + ", a program a row" * self.long


# ---- device


@triton.jit
def _joined(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
    row, rows, span, sets, col, inside, width, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
):  # fmt: skip
    """z of a tile in float32, as rounded to the stream's dtype, in which it is written."""
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        stream = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0)
        x = dropped(x, state_ptr, bar, grown, row, col, PHILOX_ROUNDS)
        if gate_ptr is not None or row_scale_ptr is not None:
            x = x * factor(gate_ptr, gate_stride, row_scale_ptr, row, rows, span, sets, col, inside, width, GATE)
        total = (stream.to(tl.float32) + x).to(stream.dtype)
        tl.store(total_ptr + row * total_stride + col, total, mask=inside)
        x = tl.where(inside, total.to(tl.float32), 0.0)
    return x


@triton.jit
def _finished(
    normed, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD: tl.constexpr
):  # fmt: skip
    """y of a normalised tile, float32."""
    y = modulated(normed * w + b, scale_ptr, shift_ptr, mod_stride, row, span, sets, col, inside, width, MOD)
    if silu_ptr is not None:
        g = tl.load(silu_ptr + row * silu_stride + col, mask=inside, other=0.0).to(tl.float32)
        y = y * (g * sigmoid(g))
    return y


@triton.jit
def _codes(y, LARGEST: tl.constexpr):
    """Numbers of at most LARGEST as codes, rounded to even, int32: int8, or the bits of e4m3 (not every GPU that runs this converts to it)."""
    if LARGEST == 127.0:
        return ((y + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23, whose last digit is 1
    bits = (y * 2.0**-120).to(tl.int32, bitcast=True)  # exponents begin at 7 instead of 127; subnormal numbers become such
    size = bits + ((1 << 19) - 1) + (bits >> 20 & 1)
    return (size >> 20 & 0x7F) | (bits >> 24 & 0x80)


@triton.jit
def _norm(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, y_ptr, codes_ptr, mean_ptr, rstd_ptr, eps,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, span, sets, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < width)
    z = _joined(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                row, rows, span, sets, col, inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
    if BLOCK <= EARLY:  # before the sums, which hide its latency
        w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
    if LAYER:
        mean = tl.sum(z, 1, keep_dims=True) / width
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        z = tl.where(inside, z - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(z * z, 1, keep_dims=True) / width + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if BLOCK > EARLY:
        w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
    y = _finished(z * rstd, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD)
    place = row * width + col
    if LARGEST == 0:
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        most = tl.max(tl.where(inside, tl.abs(y), 0.0), 1, keep_dims=True)
        most = tl.where(tl.sum(tl.where(inside & (y != y), 1, 0), 1, keep_dims=True) > 0, float("nan"), most)  # a maximum may pass over NaN
        scale = tl.math.div_rn(most, tl.full(most.shape, LARGEST, tl.float32))
        y = tl.where(scale > 0, y / tl.where(scale > 0, scale, 1.0), 0.0)
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        tl.store(y_ptr + place, _codes(y, LARGEST).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(codes_ptr + row, scale, mask=row < rows)


@triton.jit
def _share(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
    row, first, last, rows, width, span, sets, LAYER: tl.constexpr, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and sum of square deviations of columns [first, last) of a row, whole pieces or up to its end; z is written. Of "rms" 0 and the sum of squares."""
    sums = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    about = tl.zeros([1, 1], tl.float32)
    for start in range(first, last, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        inside = col < width
        z = _joined(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                    row, rows, span, sets, col, inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
        if LAYER:
            # Sums about the mean of the share's first piece: what it is off from the share's mean costs at most as many roundings as there are pieces.
            if start == first:
                about = tl.sum(z, 1, keep_dims=True) / tl.minimum(last - first, BLOCK)
            z = tl.where(inside, z - about, 0.0)
            sums += z
        squares += z * z
    square = tl.sum(squares, 1, keep_dims=True)
    if LAYER:
        off = tl.sum(sums, 1, keep_dims=True) / (last - first)
        about += off
        square = tl.maximum(square - (last - first) * off * off, 0.0)
    return about, square


@triton.jit
def _norm_long(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, z_ptr, z_stride, y_ptr, mean_ptr, rstd_ptr, eps,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, span, sets, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row too wide for the registers, piece by piece, twice."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    mean, square = _share(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                          row, 0, width, rows, width, span, sets, LAYER, GATE, PHILOX_ROUNDS, BLOCK)  # fmt: skip
    rstd = tl.rsqrt(square / width + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
        if LAYER:
            tl.store(mean_ptr + row, mean)
    tl.debug_barrier()  # the sum may be read back by another thread than wrote it
    pieces = tl.cdiv(width, BLOCK)
    for n in range(pieces):
        col = (pieces - 1 - n) * BLOCK + tl.arange(0, BLOCK)[None, :]  # the last ones are the likeliest still to be near
        inside = col < width
        z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0).to(tl.float32)
        w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
        y = _finished((z - mean) * rstd, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD)
        tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")  # nobody reads it soon: z stays in L2


@triton.jit
def _moments(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, mean_ptr, square_ptr, first_row, share, shares,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, rows, width, span, sets,
    LAYER: tl.constexpr, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of a share of a wide row, for `merged`."""
    row = (tl.program_id(0) // shares + first_row).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    first = tl.program_id(0) % shares * share
    mean, square = _share(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                          row, first, tl.minimum(first + share, width), rows, width, span, sets, LAYER, GATE, PHILOX_ROUNDS, BLOCK)  # fmt: skip
    place = row * shares + tl.program_id(0) % shares
    tl.store(square_ptr + place, square)
    if LAYER:
        tl.store(mean_ptr + place, mean)


@triton.jit
def _norm_wide(
    z_ptr, z_stride, y_ptr, mean_ptr, rstd_ptr, eps, share_mean_ptr, share_square_ptr, first_row, share, shares,
    w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, rows, width, span, sets,
    LAYER: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one piece of a wide row."""
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces + first_row).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    piece = pieces - 1 - tl.program_id(0) % pieces
    col = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = col < width
    z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0).to(tl.float32)
    mean, var = merged(share_mean_ptr, share_square_ptr, row, width, share, shares, LAYER, SHARES)
    rstd = tl.rsqrt(var + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=piece + row * 0 == 0)
        if LAYER:
            tl.store(mean_ptr + row, mean, mask=piece + row * 0 == 0)
    w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
    y = _finished((z - mean) * rstd, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD)
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")  # nobody reads it soon: z stays in L2


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor. A wide row is one program's where there is one for
    each multiprocessor and these rows fit three quarters of the L2 cache together.
    """
    row = problem.width * problem.dtype.itemsize
    if row > WIDEST and problem.rows >= device.sms and 4 * row * device.sms <= 3 * device.l2:
        return [Tiles(1, LONG_PIECE, LONG_WARPS, True)]
    if row > WIDEST:
        return [Tiles(1, PIECE, PIECE_WARPS)]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, block, pick(WARPS, rows * block))]


def launch_norm(problem: Rows, config: Tiles, x: torch.Tensor, norm: Norm) -> Normed:
    """Of x [rows, width]."""
    rows, width, x = problem.rows, problem.width, matrix(x)
    y = torch.empty((rows, width), dtype=CODES[norm.codes][0] if norm.codes else x.dtype, device=x.device)
    residual = matrix(norm.residual)
    total = None if residual is None else norm.residual if norm.in_place else torch.empty((rows, width), dtype=residual.dtype, device=x.device)
    if norm.in_place and residual is not norm.residual:
        raise ValueError("norm: in_place=True needs a residual whose rows are contiguous; call .contiguous() first, or leave in_place out")
    numbers = {"dtype": torch.float32, "device": x.device}
    mean = torch.empty(rows, **numbers) if norm.keep and norm.kind == "layer" else None
    rstd = torch.empty(rows, **numbers) if norm.keep else None
    scale = torch.empty(rows, **numbers) if norm.codes else None
    source = {"x_ptr": x, "x_stride": stride(x), "residual_ptr": residual, "residual_stride": stride(residual)}
    source |= {"total_ptr": total, "total_stride": stride(total)}
    given = arguments(norm, rows, width)
    if config.block < width:
        _launch_wide(problem, config, source, given, {"y_ptr": y, "mean_ptr": mean, "rstd_ptr": rstd, "eps": norm.eps})
    elif rows:
        target = {
            "y_ptr": y.view(torch.uint8) if norm.codes == "e4m3" else y,
            "codes_ptr": scale,
            "mean_ptr": mean,
            "rstd_ptr": rstd,
            "eps": norm.eps,
            "LARGEST": largest(norm.codes),
        }
        _norm[(triton.cdiv(rows, config.rows),)](**source, **target, **given, ROWS=config.rows, BLOCK=config.block, num_warps=config.warps)
    return Normed(y, total, mean, rstd, scale)


def _launch_wide(problem: Rows, config: Tiles, source: dict, given: dict, target: dict) -> None:
    """Statistics and then the norm of a slab of rows after another."""
    x, total = source["x_ptr"], source["total_ptr"]
    z, facts = x if total is None else total, of(x.device)
    target |= {"z_ptr": z, "z_stride": stride(z)}
    if config.long:
        _norm_long[(problem.rows,)](**source, **target, **given, BLOCK=config.block, num_warps=config.warps)
        return
    slab = min(problem.rows, max(1, facts.l2 // SLAB // (problem.width * z.element_size())))
    shares, share = shares_of(problem.width, slab, facts.sms)
    means = torch.empty((2, problem.rows, shares), dtype=torch.float32, device=x.device)
    split = {"share": share, "shares": shares, "BLOCK": config.block, "num_warps": config.warps}
    after = ("w_ptr", "b_ptr", "w_stride", "offset", "scale_ptr", "shift_ptr", "mod_stride", "silu_ptr", "silu_stride", "W", "MOD")
    before = ("gate_ptr", "gate_stride", "row_scale_ptr", "state_ptr", "bar", "grown", "GATE", "PHILOX_ROUNDS")
    first = {name: value for name, value in given.items() if name not in after}
    second = {name: value for name, value in given.items() if name not in before}
    for row in range(0, problem.rows, slab):
        rows = min(slab, problem.rows - row)
        _moments[(rows * shares,)](**source, mean_ptr=means[0], square_ptr=means[1], first_row=row, **first, **split)
        _norm_wide[(rows * triton.cdiv(problem.width, config.block),)](
            **target, share_mean_ptr=means[0], share_square_ptr=means[1], first_row=row, **second, **split,
            SHARES=triton.next_power_of_2(shares),
        )  # fmt: skip


def launch(
    problem: Rows,
    config: Tiles,
    x: torch.Tensor,  # [..., width]
    weight: torch.Tensor,  # [width]
    eps: float,
    residual: torch.Tensor | None,  # [..., width]
    offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Of `rms_norm`: a weight, and a residual in x's dtype or None."""
    shape = (problem.rows, problem.width)
    added = None if residual is None else residual.reshape(shape)
    out = launch_norm(problem, config, x.reshape(shape), Norm("rms", eps, offset, added, weight=weight.unsqueeze(0)))
    return out.y.view(x.shape) if residual is None else (out.y.view(x.shape), out.total.view(x.shape))
