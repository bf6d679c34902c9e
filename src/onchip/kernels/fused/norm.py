"""RMSNorm and LayerNorm of rows, with what stands around them:

    z = residual + gate * row_scale * dropout(x)                                                    (or x alone)
    y = (((z - mean) / sqrt(var + eps) * (weight + offset) + bias) * (1 + scale) + shift) * silu(g)  (or its codes)

A program holds a few whole rows of one set in registers, or a piece of one row; x and the residual are read once, y and z written once. The programs of
a wide row meet half way (`meeting.py`): each publishes the mean and the square deviations of its piece, and merges those of all as Chan does.
The variance is of differences from the mean, in float32. Parameters come from L2, loaded before the sums, which hide their latency.
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
from onchip.kernels.fused.norm_tile import (
    arguments, columns, dropped, matrix, meeting_of, merged, modulated, parameter, parameters, scaled, sigmoid, stride, weighed,
)  # fmt: skip
from onchip.kernels.meeting import FIRST, SECOND, publish

# A thread holds 32 elements: four 16-byte loads of bf16 in flight, and registers for two blocks or more on a multiprocessor.
# More than 16 warps would leave a thread 64 registers, half of what it needs.
WARPS = ((4096, 4), (8192, 8), (32768, 16))  # (elements up to, warps)
TILE = 4096  # elements of a program that holds several rows
WIDEST = 8192  # elements of a row that is one program's
PIECE = 8192  # elements of a program of a wider row


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `parts` times `block` columns; how many programs there are at most, 0 for one a tile; how many tiles
    are in flight or in hand, and how many rows behind the last one loaded a wide row is finished.
    """

    rows: int
    parts: int
    block: int
    warps: int
    programs: int = 0
    stages: int = 1
    lag: int = 0

    def __str__(self):
        programs = f", {self.programs} programs, {self.stages} stages" * bool(self.programs)
        return f"{self.rows}x{self.parts * self.block} tiles, {self.warps} warps{programs}"


# ---- device


@triton.jit
def _joined(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
    row, there, s, col, inside, width, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
):  # fmt: skip
    """z of a tile in float32, as rounded to the stream's dtype, in which it is written."""
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        stream = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0)
        x = dropped(x, state_ptr, bar, grown, row, col, PHILOX_ROUNDS)
        row_scale = 1.0
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + row, mask=there, other=0.0).to(tl.float32)
        x = scaled(x, parameter(gate_ptr, gate_stride, row, s, col, inside, width, GATE), row_scale, gate_ptr, row_scale_ptr)
        total = (stream.to(tl.float32) + x).to(stream.dtype)
        tl.store(total_ptr + row * total_stride + col, total, mask=inside)
        x = tl.where(inside, total.to(tl.float32), 0.0)
    return x


@triton.jit
def _bits(y, inside):
    """|y| as integers, of which those of NaN are the largest; 0 outside."""
    return tl.where(inside, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def _coded(y, power, by, CODES: tl.constexpr, LARGEST: tl.constexpr):
    """y * power * by as codes, rounded to even: of at most LARGEST. "bits" are those of e4m3 where a GPU does not convert to it."""
    y = tl.minimum(tl.maximum(y * power * by, -LARGEST), LARGEST)
    if CODES == "int8":
        return ((y + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23, whose last digit is 1
    if CODES == "e4m3":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = (y * 2.0**-120).to(tl.int32, bitcast=True)  # exponents begin at 7 instead of 127; subnormal numbers become such
    size = bits + ((1 << 19) - 1) + (bits >> 20 & 1)
    return ((size >> 20 & 0x7F) | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def _norm(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, z_ptr, z_stride, y_ptr, codes_ptr, mean_ptr, rstd_ptr, word_ptr, eps,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, sets, down, apart, per, pieces, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr, PHASE: tl.constexpr, LAG: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PIECE: tl.constexpr = PARTS * BLOCK
    piece = tl.program_id(0) % pieces
    team = tl.program_id(0) // pieces
    s = team % sets
    count = rows // sets
    col = columns(piece * PIECE, BLOCK, PARTS)
    first = team // sets * ROWS
    step = per * ROWS
    always = s >= 0
    w = parameters(w_ptr, w_stride, s, always, s, col, width, W, PARTS)
    b = parameters(b_ptr, w_stride, s, always, s, col, width, W, PARTS)
    if MOD != "row":
        scale = parameters(scale_ptr, mod_stride, s, always, s, col, width, MOD, PARTS)
        shift = parameters(shift_ptr, mod_stride, s, always, s, col, width, MOD, PARTS)
    for start in tl.range(first, count + LAG * step, step, num_stages=STAGES):
        done = tl.maximum(start - LAG * step, first)  # the first of the rows that are finished here
        k = done + tl.arange(0, ROWS)[:, None]
        row = k.to(tl.int64) * down + s * apart
        there = (k < count) & (start - LAG * step >= first)
        if MOD == "row":
            scale = parameters(scale_ptr, mod_stride, row, there, s, col, width, MOD, PARTS)
            shift = parameters(shift_ptr, mod_stride, row, there, s, col, width, MOD, PARTS)
        g = parameters(silu_ptr, silu_stride, row, there, s, col, width, "row", PARTS)
        if PHASE != SECOND:
            new_k = start + tl.arange(0, ROWS)[:, None]
            new = new_k.to(tl.int64) * down + s * apart
            is_new = new_k < count
            z = ()
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for n in tl.static_range(PARTS):
                inside = is_new & (col[n] < width)
                of_part = _joined(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar,
                                  grown, new, is_new, s, col[n], inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
                z += (of_part,)
                sums += of_part
            mean = 0.0
            if LAYER:
                mean = tl.sum(sums, 1, keep_dims=True) / tl.minimum(width - piece * PIECE, PIECE)
            squares = tl.zeros([ROWS, BLOCK], tl.float32)
            for n in tl.static_range(PARTS):
                off = z[n]
                if LAYER:
                    off = tl.where(col[n] < width, off - mean, 0.0)
                squares += off * off
            square = tl.sum(squares, 1, keep_dims=True)
            var = square / width
            if word_ptr is not None:
                publish(word_ptr + new * pieces + piece, square, is_new)
                if LAYER:
                    publish(word_ptr + (rows + new) * pieces + piece, mean, is_new)
        if PHASE != FIRST:
            if word_ptr is not None:
                z = ()
                for n in tl.static_range(PARTS):
                    again = tl.load(z_ptr + row * z_stride + col[n], mask=there & (col[n] < width), other=0.0, eviction_policy="evict_first")
                    z += (again.to(tl.float32),)
                mean, var = merged(word_ptr, tl.cast(done, tl.int64) * down + s * apart, width, rows, pieces, LAYER, PHASE, PIECE, PIECES)
            rstd = tl.rsqrt(var + eps)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + row, row * 0 + rstd, mask=there & (piece == 0))
                if LAYER:
                    tl.store(mean_ptr + row, row * 0 + mean, mask=there & (piece == 0))
            ys = ()
            most = tl.zeros([ROWS, BLOCK], tl.int32)
            for n in tl.static_range(PARTS):
                inside = there & (col[n] < width)
                hat = z[n] * rstd
                if LAYER:
                    hat = (z[n] - mean) * rstd
                y = modulated(weighed(hat, w[n] + offset, b[n], w_ptr, b_ptr), scale[n], shift[n], scale_ptr, shift_ptr)
                if silu_ptr is not None:
                    y = y * (g[n] * sigmoid(g[n]))
                if CODES == "":
                    tl.store(y_ptr + row * width + col[n], y.to(y_ptr.dtype.element_ty), mask=inside)
                else:
                    most = tl.maximum(most, _bits(y, inside))
                    ys += (y,)
            if CODES != "":
                largest = tl.max(most, 1, keep_dims=True).to(tl.float32, bitcast=True)
                codes = tl.full(largest.shape, LARGEST, tl.float32)
                # Both sides of the quotient are within reach of float32 whatever the largest is: a power of two goes by y, exactly.
                power = tl.where(largest < 1.0, 2.0**64, 2.0**-64)
                by = tl.where(largest > 0, tl.math.div_rn(codes, largest * power), 0.0)
                for n in tl.static_range(PARTS):
                    tl.store(y_ptr + row * width + col[n], _coded(ys[n], power, by, CODES, LARGEST), mask=there & (col[n] < width))
                tl.store(codes_ptr + row, tl.math.div_rn(largest, codes), mask=there)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, as long as that leaves two programs for each multiprocessor; a row to be coded is one program's, however wide."""
    if problem.width > WIDEST and not any(word in CODES for word in problem.variant.split()):
        return [Tiles(1, 1, PIECE, 8, 2 * device.sms, 3, 3)]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    return [Tiles(rows, 1, block, pick(WARPS, rows * block))]


def launch_norm(problem: Rows, config: Tiles, x: torch.Tensor, norm: Norm) -> Normed:
    """Of x [rows, width]."""
    rows, width, x, facts = problem.rows, problem.width, matrix(x), of(x.device)
    coded = CODES.get(norm.codes)
    y = torch.empty((rows, width), dtype=coded[0] if coded else x.dtype, device=x.device)
    residual = matrix(norm.residual)
    total = None if residual is None else norm.residual if norm.in_place else torch.empty((rows, width), dtype=residual.dtype, device=x.device)
    if norm.in_place and residual is not norm.residual:
        raise ValueError("norm: in_place=True needs a residual whose rows are contiguous; call .contiguous() first, or leave in_place out")
    numbers = {"dtype": torch.float32, "device": x.device}
    mean = torch.empty(rows, **numbers) if norm.keep and norm.kind == "layer" else None
    rstd = torch.empty(rows, **numbers) if norm.keep else None
    scale = torch.empty(rows, **numbers) if norm.codes else None
    if rows:
        z = x if total is None else total
        converts = facts.kind == "cuda" and facts.arch >= 89
        meeting, phases = meeting_of(rows, width, config.parts * config.block, 1 + (norm.kind == "layer"), facts, x.device)
        given = arguments(norm, rows, width) | meeting
        given |= {"x_ptr": x, "x_stride": stride(x), "residual_ptr": residual, "residual_stride": stride(residual)}
        given |= {"total_ptr": total, "total_stride": stride(total), "z_ptr": z, "z_stride": stride(z)}
        given |= {"y_ptr": y.view(torch.uint8) if norm.codes == "e4m3" else y, "codes_ptr": scale, "mean_ptr": mean, "rstd_ptr": rstd, "eps": norm.eps}
        given |= {"CODES": "bits" if norm.codes == "e4m3" and not converts else norm.codes, "LARGEST": coded[1] if coded else 0.0}
        tiles = triton.cdiv(rows // norm.sets, config.rows)
        per = max(1, min(tiles, config.programs // (norm.sets * meeting["pieces"]))) if config.programs else tiles
        for phase in phases:
            _norm[(norm.sets * per * meeting["pieces"],)](
                **given, per=per, PHASE=phase, LAG=config.lag if len(phases) == 1 and meeting["pieces"] > 1 else 0, STAGES=config.stages,
                ROWS=config.rows, PARTS=config.parts, BLOCK=config.block, num_warps=config.warps,
            )  # fmt: skip
    return Normed(y, total, mean, rstd, scale)


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
