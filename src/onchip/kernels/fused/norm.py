"""RMSNorm and LayerNorm of rows, with what stands around them:

    z = residual + gate * row_scale * dropout(x)                                                    (or x alone)
    y = (((z - mean) / sqrt(var + eps) * (weight + offset) + bias) * (1 + scale) + shift) * silu(g)  (or its codes)

A program holds a few whole rows of one set in registers, a cluster of programs one wide row (`cluster.py`); x and the residual are read once, y and z written
once. The variance is of differences from the mean, in float32; of a cluster, from the mean of each program's piece, merged as Chan does. Parameters come from
L2, loaded before the sums, which hide their latency. A wide row is HELD as it is stored, in 32 registers a thread, and its parameters are loaded one part ahead
of the part that needs them: so many programs fit that they hide each other's latency. Where there are no clusters, or a row is wider than one holds, two
launches: one publishes the figures of pieces (FIRST, of `meeting.py`), one merges those of its row and reads x, or z, again.
Plain norms of the widest rows in 16 bits are `gluon_stay.py`'s.
Codes of a norm without a mean, and without anything added, do not depend on rstd: the largest of weight * z is found beside the sum of squares.
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
from onchip.kernels.cluster import begin, moments, total
from onchip.kernels.fused import gluon_stay
from onchip.kernels.fused.norm_tile import (
    arguments,
    columns,
    dropped,
    kept,
    matrix,
    meeting_of,
    merged,
    modulated,
    options,
    parameter,
    parts_of,
    publish,
    scaled,
    sigmoid,
    stride,
    weighed,
    widened,
)
from onchip.kernels.launch import starts_early
from onchip.kernels.meeting import BOTH, FIRST, SECOND

# A thread holds 32 elements: four 16-byte loads of bf16 in flight, and registers for two blocks or more on a multiprocessor.
# More than 16 warps would leave a thread 64 registers, half of what it needs.
WARPS = ((4096, 4), (8192, 8), (32768, 16))  # (elements up to, warps)
TILE = 4096  # elements of a program that holds several rows
WIDEST, MANY = 8192, 8  # elements of a row that is one program's; rows a multiprocessor from which on memory's speed counts, not how long a row takes
PIECE = 8192  # elements of a program of a wider row, of which two launches are made
THREAD = 128  # bytes of a row that a thread holds
OF_CTA, MOST_OF_CTA, CTAS = 1 << 14, 1 << 15, 16  # bytes of a row that four warps hold, and eight; programs of a cluster at most
MODULATED = ((1280, (4, 4)), (1536, (2, 2)), (3072, (2, 4)))  # (columns in parts up to, (rows, warps)) of rows that share scales and shifts
PLAIN = {"rms", "layer", "weight", "bias", "offset", "keep"}  # of a Problem's words, those of a norm that loads little beside x


class Tiles(NamedTuple):
    """How much of the matrix a program holds: `rows` of `parts` times `block` columns, for each of `ctas` that make a cluster. With so many `registers` a
    thread the row is held as it is stored; 0: in float32, where one program has all of it, and as many registers as the compiler likes.
    """

    rows: int
    parts: int
    block: int
    warps: int
    ctas: int = 1
    registers: int = 0

    def __str__(self):
        clusters = f" a program, clusters of {self.ctas}" * (self.ctas > 1)
        return f"{self.rows}x{self.parts * self.block} tiles, {self.warps} warps{clusters}"


# ---- device


@triton.jit
def _joined(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
    row, there, s, col, inside, width, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
):  # fmt: skip
    """z of a tile in the stream's dtype, in which it is written."""
    z = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)
    if residual_ptr is not None:
        stream = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0)
        x = dropped(z.to(tl.float32), state_ptr, bar, grown, row, col, PHILOX_ROUNDS)
        row_scale = 1.0
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + row, mask=there, other=0.0).to(tl.float32)
        x = scaled(x, parameter(gate_ptr, gate_stride, row, s, col, inside, width, GATE), row_scale, gate_ptr, row_scale_ptr)
        z = (stream.to(tl.float32) + x).to(stream.dtype)
        tl.store(total_ptr + row * total_stride + col, z, mask=inside)
    return z


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum_and_larger(a, b, c, d):
    return a + c, _larger(b, d)


@triton.jit
def _after(hat, given, offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr, CODES: tl.constexpr):
    """y of hat, with what `_given` has loaded."""
    w, b, scale, shift, g = given
    y = modulated(weighed(hat, widened(w, CODES == "e4m3"), b, offset, w_ptr, b_ptr), scale, shift, scale_ptr, shift_ptr)
    if silu_ptr is not None:
        gate = g.to(tl.float32)
        y = y * (gate * sigmoid(gate))
    return y


@triton.jit
def _largest(ys, PARTS: tl.constexpr):
    """|y| of all parts, the larger of each column."""
    most = tl.abs(ys[0])
    for n in tl.static_range(1, PARTS):
        most = _larger(most, tl.abs(ys[n]))
    return most


@triton.jit
def _coded(y, power, by, CODES: tl.constexpr, LARGEST: tl.constexpr):
    """y * power * by as codes, rounded to even: of at most LARGEST. "bits" are those of e4m3 where a GPU does not convert to it."""
    y = y * power * by
    if CODES == "e4m3":  # of four at once; the GPU cuts them off itself
        code: tl.constexpr = (
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        return tl.inline_asm_elementwise(code, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    if CODES == "int8":
        codes = ((y + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23, whose last digit is 1
    else:
        bits = (y * 2.0**-120).to(tl.int32, bitcast=True)  # exponents begin at 7 instead of 127; subnormal numbers become such
        size = bits + ((1 << 19) - 1) + (bits >> 20 & 1)
        codes = ((size >> 20 & 0x7F) | (bits >> 24 & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def _given(w_ptr, b_ptr, w_stride, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, there, s, col, width, W: tl.constexpr, MOD: tl.constexpr):
    """Weight, bias, scale, shift and gate of one part of a tile, as they are stored."""
    inside = there & (col < width)
    w = parameter(w_ptr, w_stride, row, s, col, inside, width, W)
    b = parameter(b_ptr, w_stride, row, s, col, inside, width, W)
    scale = parameter(scale_ptr, mod_stride, row, s, col, inside, width, MOD)
    shift = parameter(shift_ptr, mod_stride, row, s, col, inside, width, MOD)
    return w, b, scale, shift, parameter(silu_ptr, silu_stride, row, s, col, inside, width, "row")


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, z_ptr, z_stride, y_ptr, codes_ptr, mean_ptr, rstd_ptr, word_ptr, eps,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, sets, down, apart, pieces, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr, PHASE: tl.constexpr, PIECES: tl.constexpr, CTAS: tl.constexpr, CLUSTER: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:  # waits before it reads or writes anything, in every program, so whoever comes after finds all that came before, whenever that one starts
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PIECE: tl.constexpr = PARTS * BLOCK
    ALONE: tl.constexpr = CTAS == 1 and word_ptr is None and not HELD
    KEPT: tl.constexpr = CLUSTER and (HELD or CTAS > 1)
    LINEAR: tl.constexpr = CODES != "" and not LAYER and b_ptr is None and shift_ptr is None  # y is rstd times what is made of z: the same codes, and one sum
    piece = tl.program_id(0) % pieces
    tile = tl.program_id(0) // pieces
    s = tile % sets
    k = tile // sets * ROWS + tl.arange(0, ROWS)[:, None]
    row = k.to(tl.int64) * down + s * apart
    there = k < rows // sets
    col = columns(piece * PIECE, BLOCK, PARTS, CTAS)
    if CTAS > 1:
        box = begin(3 if LAYER else 1, CTAS, CLUSTER)
    z = ()
    for n in tl.static_range(PARTS):
        inside = there & (col[n] < width)
        if PHASE == SECOND:
            of_part = tl.load(z_ptr + row * z_stride + col[n], mask=inside, other=0.0)
        else:
            of_part = _joined(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, total_stride, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar,
                              grown, row, there, s, col[n], inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
        z += (of_part,)
        if n == 0:
            sums = of_part.to(tl.float32)
        else:
            sums += of_part.to(tl.float32)
    given = ()
    for n in tl.static_range(1 if HELD else PARTS):
        given += (_given(w_ptr, b_ptr, w_stride, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, there, s, col[n], width, W, MOD),)
    mean = 0.0
    if PHASE != SECOND:
        if LAYER:
            if CTAS > 1:
                of_piece = tl.minimum(tl.maximum(width - tl.arange(0, CTAS) * PIECE, 0), PIECE).to(tl.float32)  # columns
                mean_of_piece = tl.sum(sums, 1) / tl.maximum(of_piece, 1.0)
            else:
                mean_of_piece = tl.sum(sums, 1) / tl.minimum(width - piece * PIECE, PIECE)
            mean = mean_of_piece[:, None]
        squares = tl.zeros([ROWS * CTAS, BLOCK], tl.float32)
        centred = ()
        for n in tl.static_range(PARTS):
            off = kept(widened(z[n], CODES == "e4m3"), rows >> 29, KEPT and LAYER).to(tl.float32)
            if LAYER:
                off = tl.where(col[n] < width, off - mean, 0.0)
            squares += off * off
            centred += (off,)
        if ALONE:
            z = centred
        ys = ()
        if LINEAR:
            for n in tl.static_range(PARTS):
                ys += (_after(centred[n], given[n], offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr, CODES),)
            square, largest = tl.reduce((squares, _largest(ys, PARTS)), 1, _sum_and_larger)
        else:
            square = tl.sum(squares, 1)
        if CTAS > 1:
            if LAYER:
                mean_of_row, square = moments(mean_of_piece, square, of_piece, box, 0, CTAS, CLUSTER)
                mean = mean_of_row[:, None]
            else:
                square = total(square, box, 0, CTAS, CLUSTER)
        square = square[:, None]
        if word_ptr is not None:
            publish(word_ptr + row * pieces + piece, square, tl.zeros_like(square) + mean)
    if PHASE != FIRST:
        if word_ptr is None:
            var = square / width
        else:
            mean, var = merged(word_ptr, (tile // sets).to(tl.int64) * down + s * apart, width, pieces, LAYER, PHASE, PIECE, PIECES)
        rstd = tl.rsqrt(var + eps)
        if rstd_ptr is not None:
            each = row + tl.zeros([ROWS * CTAS, 1], tl.int64)
            tl.store(rstd_ptr + each, each * 0 + rstd, mask=there & (piece == 0))
            if LAYER:
                tl.store(mean_ptr + each, each * 0 + mean, mask=there & (piece == 0))
        for n in tl.static_range(0 if LINEAR else PARTS):
            inside = there & (col[n] < width)
            if HELD and n + 1 < PARTS:  # one part ahead: all of them would take as many registers as the row
                given += (_given(w_ptr, b_ptr, w_stride, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, there, s, col[n + 1], width, W, MOD),)
            hat = kept(z[n], rows >> 30, KEPT).to(tl.float32)
            if LAYER and not ALONE:
                hat -= mean
            y = _after(hat * rstd, given[n], offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr, CODES)
            if CODES == "":
                tl.store(y_ptr + row * width + col[n], y.to(y_ptr.dtype.element_ty), mask=inside)
            else:
                ys += (y,)  # 0 outside of the row
        if CODES != "":
            if LINEAR:
                largest = largest[:, None]
            else:
                largest = tl.reduce(_largest(ys, PARTS), 1, _larger, keep_dims=True)
            codes = tl.full(largest.shape, LARGEST, tl.float32)
            # Both sides of the quotient are within reach of float32 whatever the largest is: a power of two goes by y, exactly.
            power = tl.where(largest < 1.0, 2.0**64, 2.0**-64)
            by = tl.where(largest > 0, tl.math.div_rn(codes, tl.where(largest > 0, largest * power, 1.0)), 0.0)
            for n in tl.static_range(PARTS):
                tl.store(y_ptr + row * width + col[n], _coded(ys[n], power, by, CODES, LARGEST), mask=there & (col[n] < width))
            if LINEAR:
                largest *= rstd
            tl.store(codes_ptr + row, tl.math.div_rn(largest, codes), mask=there)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow or modulated rows a program, while two programs for each multiprocessor are left; a wide row as it is stored, by a cluster if it must.

    A row to be coded is one program's, however wide.
    """
    words, row = problem.variant.split(), problem.width * problem.dtype.itemsize
    if not any(word in CODES for word in words):
        plain, layer, clusters = PLAIN.issuperset(words), "layer" in words, device.kind == "cuda" and device.arch >= 90
        wide = problem.width > WIDEST or (problem.width > TILE and problem.rows > MANY * device.sms and layer and problem.dtype.itemsize == 2)
        if wide and plain and clusters and row <= CTAS * MOST_OF_CTA:
            return [*gluon_stay.configs(problem, device), _held(row, problem.dtype.itemsize, layer)]
        if problem.width > WIDEST and clusters and row <= (1 << 16 if layer else 1 << 19):
            return [_loaded(row, problem.dtype.itemsize, OF_CTA // 2 if layer else OF_CTA)]
        if problem.width > WIDEST:
            return [Tiles(1, 1, PIECE, pick(WARPS, PIECE))]
    parts, block = parts_of(problem.width)
    if parts > 1:
        rows, warps = pick(MODULATED, parts * block)
        shared = not {"scale", "shift"}.isdisjoint(words) and (PLAIN | {"scale", "shift"}).issuperset(words)
        if shared and problem.dtype.itemsize == 2 and parts * block <= MODULATED[-1][0] and problem.rows >= 2 * rows * device.sms:
            return [Tiles(rows, parts, block, warps)]
        return [Tiles(1, parts, block, block // 256)]
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    warps = pick(WARPS, rows * block)
    return [Tiles(rows, 1, block, 2 * warps if "silu" in words else warps)]


def _held(row: int, size: int, layer: bool) -> Tiles:
    """Tiles of a row of `row` bytes: 128 of them a thread, in parts of 32, LayerNorm's of 16."""
    warps = 4 if row <= OF_CTA or (row > MOST_OF_CTA and row <= CTAS * OF_CTA) else 8
    ctas = triton.next_power_of_2(triton.cdiv(row, 32 * warps * THREAD))
    block = 32 * warps * (16 if layer else 32) // size
    return Tiles(1, triton.cdiv(triton.cdiv(row // size, ctas), block), block, warps, ctas, 64 if warps == 8 and not layer else 72)


def _loaded(row: int, size: int, of_cta: int) -> Tiles:
    """Tiles of a row of which more is loaded than x, weight and bias: all before the sums, in a cluster of 8 at most."""
    ctas = min(8, triton.next_power_of_2(triton.cdiv(row, of_cta)))
    block = triton.next_power_of_2(triton.cdiv(row // size, ctas))
    return Tiles(1, 1, block, max(4, min(16, block * size // (OF_CTA // 4))), ctas)


def _even(width: int, *given: torch.Tensor | None) -> bool:
    """Whether all rows begin at multiples of 16 elements. Otherwise their layouts differ, and Triton writes the exchange of a cluster once for each."""
    return width % 16 == 0 and all(x is None or (x.data_ptr() % 16 == 0 and (len(x) < 2 or x.stride(0) % 16 == 0)) for x in given)


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
    if isinstance(config, gluon_stay.Tiles):
        if gluon_stay.takes(norm, x):
            gluon_stay.launch(config, x, y, mean, rstd, norm)
            return Normed(y, None, mean, rstd, None)
        config = _held(width * x.element_size(), x.element_size(), norm.kind == "layer")
    if config.ctas > 1 and not config.registers and not _even(width, x, residual, matrix(norm.silu), matrix(norm.gate), norm.scale, norm.shift):
        config = Tiles(1, 1, PIECE, pick(WARPS, PIECE))
    if rows:
        z = x if total is None else total
        converts = facts.kind == "cuda" and facts.arch >= 89 and x.device.type == "cuda"
        meeting = meeting_of(rows, width, config.ctas * config.parts * config.block, x.device)
        given = arguments(norm, rows, width) | meeting
        given |= {"x_ptr": x, "x_stride": stride(x), "residual_ptr": residual, "residual_stride": stride(residual)}
        given |= {"total_ptr": total, "total_stride": stride(total), "z_ptr": z, "z_stride": stride(z)}
        given |= {"y_ptr": y.view(torch.uint8) if norm.codes == "e4m3" else y, "codes_ptr": scale, "mean_ptr": mean, "rstd_ptr": rstd, "eps": norm.eps}
        given |= {"CODES": "bits" if norm.codes == "e4m3" and not converts else norm.codes, "LARGEST": coded[1] if coded else 0.0}
        grid = (norm.sets * triton.cdiv(rows // norm.sets, config.rows) * meeting["pieces"],)
        tile = {"ROWS": config.rows, "PARTS": config.parts, "BLOCK": config.block, "HELD": config.registers > 0, "num_warps": config.warps}
        early = 4 * grid[0] <= facts.sms and config.ctas == 1 and starts_early(x)  # more programs would stand in the way of the kernel before
        tile |= options(config) | {"EARLY": early} | ({"launch_pdl": True} if early else {})
        for phase in (BOTH,) if meeting["pieces"] == 1 else (FIRST, SECOND):
            _norm[grid](**given, PHASE=phase, CTAS=config.ctas, CLUSTER=x.device.type == "cuda", **tile)
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
