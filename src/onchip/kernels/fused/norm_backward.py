"""Gradients of RMSNorm and LayerNorm of rows, and of what stands around them (`norm.py` has the formula):

    dv = dy silu(g),  dg = dy v silu'(g)        v = u (1 + scale) + shift
    dscale = dv u,  dshift = dv,  du = dv (1 + scale)
    dweight = du hat,  dbias = du,  dhat = du (weight + offset)        hat = (z - mean) rstd, or (y - bias) / (weight + offset) where x was not kept
    dz = rstd (dhat - mean(dhat) - hat mean(dhat hat)) + dtotal        (mean(dhat) for LayerNorm alone)
    dx = dz gate row_scale dropped(1),  dgate = dz row_scale dropped(x),  drow_scale = sum of dz gate dropped(x)

Programs go down the rows of one set, as many as a GPU holds at once, whole rows in registers and the next ones on their way to shared memory: dy and z are
read once, dx is written once. Of a wider row a program has one piece: it publishes the two sums of its piece, goes on, and finishes the piece
two rows later, when the sums of the others are there, from L2, which it is read from again; a cluster of programs (`cluster.py`), which 16-bit RMSNorm of more
than 32,768 columns has, holds the row until then, as it is stored, and reads it once. Plain norms of 16,384 to 262,144 columns in 16 bits, powers of two but
for RMSNorm's 65,536, are `gluon_stay.py`'s. On AMD's GPUs, and where a row has more pieces than there are multiprocessors, a piece is finished in a second
launch. What rows share is summed in a program's registers, written once a program and added up by a second launch, in one order always: no atomics, the same
bits in every run.
Bytes moved: the floor, rows width (dy + z + dx), and 8 programs width for each parameter.
"""

import math
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.norms import PARAMETERS, Norm, Normed, NormGrads, sharing
from onchip.core.problem import Rows
from onchip.kernels.cluster import begin, total, totals
from onchip.kernels.fused import gluon_stay
from onchip.kernels.fused.norm_tile import (
    arguments,
    both_sums,
    columns,
    dropped,
    kept,
    matrix,
    meeting_of,
    modulated,
    options,
    parameter,
    parameters,
    parts_of,
    publish,
    published,
    raised,
    scaled,
    sigmoid,
    stride,
    sum_partials,
    weighed,
    widened,
    zeros,
)
from onchip.kernels.launch import starts_early
from onchip.kernels.meeting import BOTH, FIRST, SECOND

WIDEST = 8192  # elements of a row that is one program's
PIECE, LAG = 2048, 2  # elements of a program of a wider row, and rows that it finishes one behind
NARROW, CTAS = 32768, 16  # elements of a row from which on it is a cluster's, and programs of one
PLAIN = {"rms", "weight", "offset", "keep", "x"}  # of a Problem's words, those of a norm that such a cluster holds
FIT = 0.85  # of the places of a GPU, those that clusters of 16 find (21 of 24, 14 of 16 on an H200): one that waited for another's end would double the time
TILE = 8192  # elements of a program that holds several rows
SHORT = 12288  # bytes of a tile in parts up to which a fourth stage pays
SUMMED, LONG = (
    4096,
    1 << 17,
)  # partial sums that a program adds up of so many columns, at most two rows of them: by 16 columns each 256k take 7 us longer, LayerNorm's 16
THREAD = 16  # elements a thread: with two sums beside dy, z and the parameters, about 110 registers


class Tiles(NamedTuple):
    """How much of the matrix a program holds, `rows` of `parts` times `block` columns; how many programs there are, how many tiles are in flight or
    in hand, and how many rows behind the last one that it has read a program finishes one of which it has a piece; of clusters of `ctas`, `programs` is
    how many clusters, and `registers` what a thread may have (0: what the compiler likes).
    """

    rows: int
    parts: int
    block: int
    warps: int
    programs: int
    stages: int
    lag: int = 0
    ctas: int = 1
    registers: int = 0

    def __str__(self):
        programs = f"{self.programs} programs" if self.ctas == 1 else f"{self.programs} clusters of {self.ctas}"
        return f"{self.rows}x{self.parts * self.block} tiles, {self.warps} warps, {programs}, {self.stages} stages"


# ---- device


@triton.jit
def _row_sums(along, level, LAYER: tl.constexpr):
    """Of each row, both at once; the second is LayerNorm's."""
    if LAYER:
        first, second = tl.split(tl.sum(tl.join(along, level), 1))
        return first[:, None], second[:, None]
    else:  # noqa: RET505  (Triton compiles what follows a branch that returns)
        return tl.sum(along, 1, keep_dims=True), 0.0


@triton.jit
def _sums_of_cluster(along, level, box, turn, LAYER: tl.constexpr, CTAS: tl.constexpr, CLUSTER: tl.constexpr):
    """Of the row whose pieces are the tile's rows: the same number in each."""
    if LAYER:
        first, second = tl.reduce((along, level), 1, both_sums)
        first, second = totals(first, second, box, turn, CTAS, CLUSTER)
        return first[:, None], second[:, None]
    else:  # noqa: RET505
        return total(tl.sum(along, 1), box, turn, CTAS, CLUSTER)[:, None], 0.0


@triton.jit
def _put(ptr, x, row, col, width, inside):
    if ptr is not None:
        tl.store(ptr + row * width + col, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _added(acc, x, ptr):
    if ptr is not None:
        acc += x
    return acc


@triton.jit
def _put_sums(ptr, acc, place, col, width, ROWS: tl.constexpr, PARTS: tl.constexpr):
    if ptr is not None:
        for n in tl.static_range(PARTS):
            x = acc[n]
            if ROWS > 1:
                x = tl.sum(x, 0, keep_dims=True)
            tl.store(ptr + place * width + col[n], x, mask=col[n] < width)


@triton.jit
def _before(
    raw, zero, w, b, mean, rstd, whole, offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr,
    LAYER: tl.constexpr, INVERSE: tl.constexpr, KEPT: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """hat, u, dv, du, dhat and the gradient of the silu gate. Outside of the matrix dy is 0, and with it each term of a sum.

    KEPT: made of `raw` anew, though the program has made it before: over an exchange it would take three times the registers.
    """
    dy, z, g, scale, shift = raw
    dy = widened(kept(dy, zero, KEPT), HOPPER).to(tl.float32)
    z = widened(kept(z, zero, KEPT), HOPPER).to(tl.float32)
    w = kept(w, zero, KEPT)
    b = kept(b, zero, KEPT)
    if INVERSE:
        hat = tl.math.div_rn(z - b.to(tl.float32), tl.where(whole, raised(w, offset), 1.0))
    elif LAYER:
        hat = (z - mean) * rstd
    else:
        hat = z * rstd
    u = weighed(hat, w, b, offset, w_ptr, b_ptr)
    dv = dy
    d_silu = dy
    if silu_ptr is not None:
        g = kept(g, zero, KEPT).to(tl.float32)
        sigma = sigmoid(g)
        d_silu = dy * modulated(u, scale, shift, scale_ptr, shift_ptr) * (sigma * (1.0 + g * (1.0 - sigma)))
        dv = dy * (g * sigma)
    du = dv
    if scale_ptr is not None:
        du = dv * (1.0 + scale.to(tl.float32))
    d_hat = du
    if w_ptr is not None:
        d_hat = du * raised(w, offset)
    return hat, u, dv, du, d_hat, d_silu


@triton.jit
def _loaded(
    dy_ptr, dy_stride, z_ptr, z_stride, mean_ptr, rstd_ptr, scale_ptr, shift_ptr, mod_stride, scale, shift, silu_ptr, silu_stride,
    row, there, s, col, width, MOD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(dy, z, silu gate, scale, shift) of each part, as they are stored, and the row's mean and rstd."""
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row, mask=there, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=there, other=0.0)
    raw = ()
    for n in tl.static_range(PARTS):
        inside = there & (col[n] < width)
        dy = tl.load(dy_ptr + row * dy_stride + col[n], mask=inside, other=0.0)
        z = tl.load(z_ptr + row * z_stride + col[n], mask=inside, other=0.0)
        g = parameter(silu_ptr, silu_stride, row, s, col[n], inside, width, "row")
        if MOD == "row":
            scale_n = parameter(scale_ptr, mod_stride, row, s, col[n], inside, width, MOD)
            shift_n = parameter(shift_ptr, mod_stride, row, s, col[n], inside, width, MOD)
        else:
            scale_n = scale[n]
            shift_n = shift[n]
        raw += ((dy, z, g, scale_n, shift_n),)
    return raw, mean, rstd


@triton.jit
def _terms(
    raw, zero, w, b, mean, rstd, col, width, offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr,
    LAYER: tl.constexpr, INVERSE: tl.constexpr, KEPT: tl.constexpr, HOPPER: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The terms of the two sums of a row."""
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    level = tl.zeros([ROWS, BLOCK], tl.float32)
    for n in tl.static_range(PARTS):
        hat, _, _, _, d_hat, _ = _before(raw[n], zero, w[n], b[n], mean, rstd, col[n] < width, offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr,
                                         LAYER, INVERSE, KEPT, HOPPER)  # fmt: skip
        along += d_hat * hat
        level += d_hat
    return along, level


@triton.jit
def _norm_backward(
    dy_ptr, dy_stride, d_total_ptr, d_total_stride, z_ptr, z_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, word_ptr,
    dx_ptr, d_residual_ptr, d_w_ptr, d_b_ptr, d_gate_ptr, d_scale_ptr, d_shift_ptr, d_row_scale_ptr, d_silu_ptr,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, sets, down, apart, per, pieces, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    INVERSE: tl.constexpr, PHASE: tl.constexpr, LAG: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    CTAS: tl.constexpr, CLUSTER: tl.constexpr, HOPPER: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if HOPPER:  # of the sums of programs, which wait
        tl.extra.cuda.gdc_launch_dependents()
    HEIGHT: tl.constexpr = ROWS * CTAS  # of a tile: a cluster's has one row, and a piece of it for each CTA
    KEPT: tl.constexpr = CLUSTER and CTAS > 1
    piece = tl.program_id(0) % pieces
    team = tl.program_id(0) // pieces
    s = team % sets
    count = rows // sets
    part = 1.0 / width
    col = columns(piece * PARTS * BLOCK, BLOCK, PARTS, CTAS)
    first = team // sets * ROWS
    step = per * ROWS
    always = s >= 0
    sum_w = zeros(HEIGHT, BLOCK, PARTS)
    sum_b = zeros(HEIGHT, BLOCK, PARTS)
    sum_gate = zeros(HEIGHT, BLOCK, PARTS)
    sum_scale = zeros(HEIGHT, BLOCK, PARTS)
    sum_shift = zeros(HEIGHT, BLOCK, PARTS)
    w = parameters(w_ptr, w_stride, s, always, s, col, width, W, PARTS)
    b = parameters(b_ptr, w_stride, s, always, s, col, width, W, PARTS)
    scale = parameters(scale_ptr, mod_stride, s, always, s, col, width, MOD, PARTS)  # of the first row of the set where each has its own: not used
    shift = parameters(shift_ptr, mod_stride, s, always, s, col, width, MOD, PARTS)
    if GATE != "row":
        gate = parameters(gate_ptr, gate_stride, s, always, s, col, width, GATE, PARTS)
    if CTAS > 1:
        box = begin(2 if LAYER else 1, CTAS, CLUSTER)
    for start in tl.range(first, count + LAG * step, step, num_stages=STAGES):
        turn = (start - first) // step
        done = tl.maximum(start - LAG * step, first)  # the first of the rows that are finished here
        k = done + tl.arange(0, ROWS)[:, None]
        row = k.to(tl.int64) * down + s * apart
        there = (k < count) & (start - LAG * step >= first)
        if GATE == "row":
            gate = parameters(gate_ptr, gate_stride, row, there, s, col, width, GATE, PARTS)
        if PHASE != SECOND:
            new_k = start + tl.arange(0, ROWS)[:, None]
            new = new_k.to(tl.int64) * down + s * apart
            raw, mean, rstd = _loaded(dy_ptr, dy_stride, z_ptr, z_stride, mean_ptr, rstd_ptr, scale_ptr, shift_ptr, mod_stride, scale, shift,
                                      silu_ptr, silu_stride, new, new_k < count, s, col, width, MOD, PARTS)  # fmt: skip
            along, level = _terms(raw, (rows + turn) >> 30, w, b, mean, rstd, col, width, offset, w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr,
                                  LAYER, INVERSE, KEPT, HOPPER, HEIGHT, PARTS, BLOCK)  # fmt: skip
            if CTAS > 1:
                along, level = _sums_of_cluster(along, level, box, turn, LAYER, CTAS, CLUSTER)
            else:
                along, level = _row_sums(along, level, LAYER)
            if word_ptr is not None:
                publish(word_ptr + new * pieces + piece, along, tl.zeros_like(along) + level, new_k < count)
        if PHASE != FIRST:
            if word_ptr is not None:
                raw, mean, rstd = _loaded(dy_ptr, dy_stride, z_ptr, z_stride, mean_ptr, rstd_ptr, scale_ptr, shift_ptr, mod_stride, scale, shift,
                                          silu_ptr, silu_stride, row, there, s, col, width, MOD, PARTS)  # fmt: skip
                only = tl.cast(done, tl.int64) * down + s * apart
                along, level = published(word_ptr, only, pieces, PHASE, PIECES)
                along = tl.sum(along)
                level = tl.sum(level)
            row_scale = 1.0
            if row_scale_ptr is not None:
                row_scale = tl.load(row_scale_ptr + row, mask=there, other=0.0).to(tl.float32)
            of_row = tl.zeros([HEIGHT, BLOCK], tl.float32)
            old_w, old_b, old_gate, old_scale, old_shift = sum_w, sum_b, sum_gate, sum_scale, sum_shift
            sum_w, sum_b, sum_gate, sum_scale, sum_shift = (), (), (), (), ()
            for n in tl.static_range(PARTS):
                inside = there & (col[n] < width)
                hat, u, dv, du, d_hat, d_silu = _before(raw[n], (rows + turn) >> 29, w[n], b[n], mean, rstd, col[n] < width, offset,
                                                        w_ptr, b_ptr, scale_ptr, shift_ptr, silu_ptr, LAYER, INVERSE, KEPT, HOPPER)  # fmt: skip
                _put(d_silu_ptr, d_silu, row, col[n], width, inside)
                dz = d_hat - hat * (along * part)
                if LAYER:
                    dz -= level * part
                dz = dz * rstd
                if d_total_ptr is not None:
                    dz += tl.load(d_total_ptr + row * d_total_stride + col[n], mask=inside, other=0.0).to(tl.float32)
                _put(d_residual_ptr, dz, row, col[n], width, inside)
                if dx_ptr is not None:
                    dx = scaled(dropped(dz, state_ptr, bar, grown, row, col[n], PHILOX_ROUNDS), gate[n], row_scale, gate_ptr, row_scale_ptr)
                    _put(dx_ptr, dx, row, col[n], width, inside)
                of_gate = dz
                if x_ptr is not None:
                    x = tl.load(x_ptr + row * x_stride + col[n], mask=inside, other=0.0).to(tl.float32)
                    branch = dz * dropped(x, state_ptr, bar, grown, row, col[n], PHILOX_ROUNDS)
                    of_gate = scaled(branch, gate[n], row_scale, None, row_scale_ptr)
                    of_row = _added(of_row, tl.where(inside, scaled(branch, gate[n], row_scale, gate_ptr, None), 0.0), d_row_scale_ptr)
                if GATE == "row":
                    _put(d_gate_ptr, of_gate, row, col[n], width, inside)
                if MOD == "row":
                    _put(d_scale_ptr, dv * u, row, col[n], width, inside)
                    _put(d_shift_ptr, dv, row, col[n], width, inside)
                sum_w += (_added(old_w[n], du * hat, d_w_ptr),)
                sum_b += (_added(old_b[n], du, d_b_ptr),)
                sum_gate += (_added(old_gate[n], of_gate, d_gate_ptr),)
                sum_scale += (_added(old_scale[n], dv * u, d_scale_ptr),)
                sum_shift += (_added(old_shift[n], dv, d_shift_ptr),)
            if d_row_scale_ptr is not None:
                of_row = tl.sum(of_row, 1, keep_dims=True)
                tl.store(d_row_scale_ptr + row * (pieces * CTAS) + piece + tl.arange(0, CTAS)[:, None], of_row.to(d_row_scale_ptr.dtype.element_ty), mask=there)
    if PHASE != FIRST:
        place = s.to(tl.int64) * per + team // sets
        _put_sums(d_w_ptr, sum_w, place, col, width, ROWS, PARTS)
        _put_sums(d_b_ptr, sum_b, place, col, width, ROWS, PARTS)
        if GATE != "row":
            _put_sums(d_gate_ptr, sum_gate, place, col, width, ROWS, PARTS)
        if MOD != "row":
            _put_sums(d_scale_ptr, sum_scale, place, col, width, ROWS, PARTS)
            _put_sums(d_shift_ptr, sum_shift, place, col, width, ROWS, PARTS)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Rows of 8,192 elements together and a program a multiprocessor; less of them where much is loaded beside dy and z, or where columns come in parts."""
    said, _, wanted = problem.variant.partition(" -> ")
    words, wanted, size = said.split(), wanted.split(), problem.dtype.itemsize
    beside = ("gate" in wanted or "row_scale" in wanted) + sum(word == "silu" or word.endswith(":row") for word in words)
    streams = 1 + ("d_total" in words)  # z, and the gradient of the sum
    load = size * (1 + beside) + (4 if "residual:fp32" in words else size) * streams  # bytes of an element
    plain = streams + beside == 1
    stays = gluon_stay.configs(problem, device)
    if problem.width > NARROW and size == 2 and PLAIN.issuperset((*words, *wanted)) and device.kind == "cuda" and device.arch >= 90:
        block = max(NARROW * 2 // CTAS, triton.next_power_of_2(triton.cdiv(problem.width, CTAS)))
        each = 3 if block == 4096 else 2
        if block <= 8192:
            return [*stays, Tiles(1, 1, block, 4, int(FIT * each * device.sms / CTAS), 3, 0, CTAS, 168 if block == 4096 else 0)]
    if problem.width > WIDEST:
        return [*stays, Tiles(1, 1, PIECE, 4, 4 * device.sms, _stages(2 * load * PIECE, 4, 3, device), LAG)]
    parts, block = parts_of(problem.width)
    if parts > 1:
        load *= parts * block
        warps = 1 << round(math.log2(parts * block / (32 * THREAD if plain else 48 * THREAD)))
        each = {1: 8, 2: 4, 4: 2, 8: 2}.get(warps, 1)
        return [Tiles(1, parts, block, warps, each * device.sms, _stages(load, each, 4 if load <= SHORT else 3, device))]
    if plain and size == 2 and "layer" in words and block == TILE // 2 and problem.rows >= 64 * device.sms:
        programs = 1 << (2 * device.sms).bit_length() - 1  # 103.0 us with 256 of one row (H200, 16,384 x 4,096), with 264 104.2, 104.7 with 132 of two rows
        return [Tiles(1, 1, block, 8, programs, _stages(load * block, 2, 3, device))]
    rows = max(1, min((TILE if plain else TILE // 2) // block, problem.rows // device.sms))
    rows = 1 << (rows.bit_length() - 1)
    warps = max(1, min(16, rows * block // (32 * THREAD if plain else 16 * THREAD)))
    each = max(1, min(8, 16 // warps))
    return [Tiles(rows, 1, block, warps, each * device.sms, _stages(load * rows * block, each, 3 if plain else 4, device))]


def _stages(size: int, programs: int, wanted: int, device: Device) -> int:
    """How many there can be up to `wanted`, with `size` bytes in flight for each but one, and `programs` a multiprocessor."""
    return max(1, min(wanted, 1 + (device.shared_memory // programs - 1024) // size))


class Sums(NamedTuple):
    """Where the parameters' gradients are written: sums of programs in float32 for what rows share, else the gradient itself."""

    names: list[str]
    partial: torch.Tensor  # [names, sets, programs of a set, width]
    done: dict[str, torch.Tensor]

    @property
    def pointers(self) -> dict:
        short = {"weight": "w", "bias": "b"}
        found = self.done | dict(zip(self.names, self.partial, strict=True))
        return {f"d_{short.get(name, name)}_ptr": found.get(name) for name in PARAMETERS}

    def total(self, norm: Norm) -> dict[str, torch.Tensor]:
        """The gradients, each summed over programs; neighbours of one shape and dtype in one launch."""
        grads, first = dict(self.done), 0
        for (sets, dtype), run in groupby(self.names, lambda name: (len(getattr(norm, name)), getattr(norm, name).dtype)):
            run = list(run)
            partial = self.partial[first : first + len(run)]
            found = torch.empty((len(run), sets, partial.shape[-1]), dtype=dtype, device=partial.device)
            add_up(partial.view(len(run) * sets, -1, partial.shape[-1]), found.view(-1, partial.shape[-1]))
            grads |= dict(zip(run, found, strict=True))
            first += len(run)
        return grads


def add_up(partial: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = the sum of partial[i], [items, count, width] float32; behind the kernel that writes them, with nothing launched between."""
    items, count, width = partial.shape
    most = min(256, triton.next_power_of_2(count))
    wide = SUMMED // most if width * min(items, 2) >= LONG else 16
    block = min(max(16, wide), triton.next_power_of_2(width))
    tile = {"COUNT": most, "BLOCK": block, "num_warps": 4}
    early = {"EARLY": True, "launch_pdl": True} if starts_early(partial) else {}
    sum_partials[(items * triton.cdiv(width, block),)](partial, out, count, width, **tile, **early)


def launch(
    problem: Rows,
    config: Tiles,
    wanted: tuple[str, ...],
    dy: torch.Tensor,
    d_total: torch.Tensor | None,
    z: torch.Tensor,
    x: torch.Tensor | None,
    normed: Normed,
    norm: Norm,
) -> NormGrads:
    """Matrices [rows, width]: z is the sum or x, or y where `norm.inverse`; x is what was dropped and scaled, where `wanted` needs it."""
    rows, width, count = problem.rows, problem.width, problem.rows // norm.sets
    if isinstance(config, gluon_stay.Tiles):
        if dy.dtype == z.dtype and gluon_stay.takes(norm, dy, z):
            return _by_clusters_that_stay(config, wanted, matrix(dy), matrix(z), normed, norm)
        config = configs(problem, of(dy.device))[-1]
    meeting = meeting_of(rows, width, config.ctas * config.parts * config.block, dy.device)
    pieces, facts = meeting["pieces"], of(dy.device)
    at_once = pieces == 1 or (facts.kind == "cuda" and dy.device.type == "cuda" and pieces <= facts.sms)  # the programs of a row
    per = max(1, min(config.programs // (norm.sets * pieces), triton.cdiv(count, config.rows)))

    def new(*shape, dtype=torch.float32):
        return (torch.empty if rows else torch.zeros)(shape, dtype=dtype, device=dy.device)

    own = [name for name in PARAMETERS if name in wanted and sharing(getattr(norm, name), rows, norm.sets) == "row"]
    shared = [name for name in PARAMETERS if name in wanted and name not in own]
    sums = Sums(shared, new(len(shared), norm.sets, per, width), {name: new(rows, width, dtype=getattr(norm, name).dtype) for name in own})
    grads = {name: new(rows, width, dtype=dy.dtype if name == "x" else getattr(norm, name).dtype) for name in ("x", "residual", "silu") if name in wanted}
    row_scale = None
    if "row_scale" in wanted:
        grads["row_scale"] = new(rows, dtype=norm.row_scale.dtype)
        row_scale = new(rows, pieces * config.ctas) if pieces * config.ctas > 1 else grads["row_scale"]
    dy, d_total, z, x = matrix(dy), matrix(d_total), matrix(z), matrix(x)
    if not rows:
        return NormGrads(**grads, **sums.total(norm))
    given = arguments(norm, rows, width) | meeting | sums.pointers
    given |= {"dy_ptr": dy, "dy_stride": stride(dy), "d_total_ptr": d_total, "d_total_stride": stride(d_total), "z_ptr": z, "z_stride": stride(z)}
    given |= {"x_ptr": x, "x_stride": stride(x), "mean_ptr": normed.mean, "rstd_ptr": normed.rstd, "per": per, "INVERSE": norm.inverse}
    given |= {"dx_ptr": grads.get("x"), "d_residual_ptr": grads.get("residual"), "d_silu_ptr": grads.get("silu"), "d_row_scale_ptr": row_scale}
    lag = config.lag if at_once and pieces > 1 else 0
    tile = {"LAG": lag, "STAGES": config.stages, "ROWS": config.rows, "PARTS": config.parts, "BLOCK": config.block, "num_warps": config.warps}
    tile |= {"CTAS": config.ctas, "CLUSTER": dy.device.type == "cuda", "HOPPER": starts_early(dy)} | options(config)
    for phase in (BOTH,) if at_once else (FIRST, SECOND):
        _norm_backward[(norm.sets * per * pieces,)](**given, PHASE=phase, **tile)
    if row_scale is not None and row_scale is not grads["row_scale"]:
        add_up(row_scale.unsqueeze(-1), grads["row_scale"].unsqueeze(-1))
    return NormGrads(**grads, **sums.total(norm))


def _by_clusters_that_stay(config: gluon_stay.Tiles, wanted: tuple[str, ...], dy: torch.Tensor, z: torch.Tensor, normed: Normed, norm: Norm) -> NormGrads:
    names, dx = list(wanted[1:]), torch.empty(z.shape, dtype=z.dtype, device=z.device)
    sums = Sums(names, torch.empty((len(names), 1, min(config.clusters, len(z)), z.shape[1]), dtype=torch.float32, device=z.device), {})
    gluon_stay.launch_backward(config, dy, z, dx, dict(zip(names, sums.partial, strict=True)), normed.mean, normed.rstd, norm)
    return NormGrads(dx, **sums.total(norm))
