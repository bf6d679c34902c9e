"""RMSNorm and LayerNorm of rows of 256k columns, by clusters that stay.

    y = (x - mean) rstd (weight + offset) + bias          of RMSNorm without the mean and the bias

Parameters of a wide row are as many bytes as the row: read again for each row from L2 they make more traffic than x and y. A program of a cluster therefore
has the same columns of one row after another, and its weight and bias stay in registers, as they are stored. The next rows are on their way to shared memory.
What a program knows of its piece is told to the others at once, and heard one turn later (`cluster.py`): meanwhile the row before it is finished.
Rows are as wide as CTAS programs of PARTS x BLOCK columns. Bytes moved: the floor, rows width (x + y), and the parameters once a cluster.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.norms import Norm
from onchip.core.problem import Rows
from onchip.kernels.cluster import LATE, begin, heard_moments, heard_total, tell
from onchip.kernels.fused.norm_tile import columns, weighed, widened

WIDTH, CTAS = 1 << 18, 16  # columns, of numbers of 16 bits: programs of 32 KB
FIT = 0.85  # of the multiprocessors of a GPU, those that clusters of 16 find: one cluster more would wait for another's end
EACH = tl.constexpr(8)  # neighbours of a row that a thread loads at once
TURNS = 4  # rows of a cluster from which on its beginning is hidden


class Stay(NamedTuple):
    """`clusters` of `ctas` programs, each of `parts` times `block` columns of a row; `stages`: rows on their way to shared memory, and the one in hand."""

    clusters: int
    ctas: int
    parts: int
    block: int
    warps: int
    stages: int

    def __str__(self):
        return f"1x{self.parts * self.block} tiles, {self.warps} warps a program, {self.clusters} clusters of {self.ctas} that stay, {self.stages} stages"


# ---- device


@triton.jit
def _again(x, CLUSTER: tl.constexpr):
    """x as it is stored, such that float32 is made of it here: what was made for an earlier pass would stay in twice the registers."""
    if CLUSTER and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return widened(x, CLUSTER).to(tl.float32)


@triton.jit
def _squares(x, CLUSTER: tl.constexpr, PARTS: tl.constexpr):
    """The sum of squares of each program's piece, [CTAS]."""
    for n in tl.static_range(PARTS):
        of_part = _again(x[n], CLUSTER)
        if n == 0:
            squares = of_part * of_part
        else:
            squares += of_part * of_part
    return tl.sum(squares, 1)


@triton.jit
def _pair(mean, square, count, other_mean, other_square, other_count):
    """Mean, sum of square deviations and count of two sets together (Chan, Golub and LeVeque, 1983)."""
    off = other_mean - mean
    share = off * (other_count / (count + other_count))
    return mean + share, square + other_square + off * share * count, count + other_count


@triton.jit
def _even_pair(mean, square, count, other_mean, other_square, other_count):
    """The same of sets of one size, as a GPU's threads have: no quotient."""
    half = (other_mean - mean) * 0.5
    return mean + half, square + other_square + half * half * (count + other_count), count + other_count


@triton.jit
def _moments(x, CTAS: tl.constexpr, CLUSTER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of square deviations of each program's piece, [CTAS]: of a thread's numbers first, then by one reduction, where two have barriers each."""
    for n in tl.static_range(PARTS):
        of_part = tl.sum(_again(x[n], CLUSTER).reshape(CTAS, BLOCK // EACH, EACH), 2)
        if n == 0:
            mean = of_part
        else:
            mean += of_part
    mean *= 1.0 / (EACH * PARTS)
    for n in tl.static_range(PARTS):
        off = _again(x[n], CLUSTER).reshape(CTAS, BLOCK // EACH, EACH) - mean[:, :, None]
        of_part = tl.sum(off * off, 2)
        if n == 0:
            square = of_part
        else:
            square += of_part
    mean, square, _ = tl.reduce((mean, square, tl.full(mean.shape, EACH * PARTS, tl.float32)), 1, _even_pair if CLUSTER else _pair)
    return mean, square


@triton.jit
def _norm_stay(
    x_ptr, x_stride, y_ptr, mean_ptr, rstd_ptr, eps, w_ptr, b_ptr, offset, rows, LAYER: tl.constexpr, CTAS: tl.constexpr, CLUSTER: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PIECE: tl.constexpr = PARTS * BLOCK
    WIDTH: tl.constexpr = CTAS * PIECE
    VALUES: tl.constexpr = 2 if LAYER else 1
    first, step = tl.program_id(0), tl.num_programs(0)
    col = columns(0, BLOCK, PARTS, CTAS)
    box = begin(VALUES, CTAS, CLUSTER, LATE)
    w, b, old = (), (), ()
    for n in tl.static_range(PARTS):
        w += (tl.load(w_ptr + col[n]),)
        b += (tl.load(b_ptr + col[n]) if b_ptr is not None else 0.0,)
        old += (tl.zeros([CTAS, BLOCK], x_ptr.dtype.element_ty),)
    level = tl.zeros([CTAS], tl.float32)
    square = tl.zeros([CTAS], tl.float32)
    turn = 0
    for start in tl.range(first, rows + step, step, num_stages=STAGES):
        live = start < rows
        new = ()
        for n in tl.static_range(PARTS):
            new += (tl.load(x_ptr + tl.cast(start, tl.int64) * x_stride + col[n], mask=live, other=0.0),)
        new_level, new_square = _moments(new, CTAS, CLUSTER, PARTS, BLOCK) if LAYER else (level, _squares(new, CLUSTER, PARTS))
        if LAYER:
            tell(new_level, new_square, box, turn, tl.cast(live, tl.int32), VALUES, CTAS, CLUSTER)
            mean, total = heard_moments(level, square, box, turn - 1, PIECE, CTAS, CLUSTER)
        else:
            tell(new_square, new_square, box, turn, tl.cast(live, tl.int32), VALUES, CTAS, CLUSTER)
            mean, total = 0.0, heard_total(square, box, turn - 1, CTAS, CLUSTER)
        rstd = tl.rsqrt(total / WIDTH + eps)
        row = tl.cast(start - step, tl.int64)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row >= 0)
            if LAYER:
                tl.store(mean_ptr + row, mean, mask=row >= 0)
        scale = tl.zeros([CTAS, BLOCK], tl.float32) + rstd
        shift = tl.zeros([CTAS, BLOCK], tl.float32) - mean * rstd
        for n in tl.static_range(PARTS):
            hat = _again(old[n], CLUSTER)
            hat = tl.fma(hat, scale, shift) if LAYER else hat * scale
            y = weighed(hat, _again(w[n], CLUSTER), _again(b[n], CLUSTER) if b_ptr is not None else 0.0, offset, w_ptr, b_ptr)
            tl.store(y_ptr + row * WIDTH + col[n], y.to(y_ptr.dtype.element_ty), mask=row >= 0)
        old, level, square = new, new_level, new_square
        turn += 1  # noqa: SIM113  (no iterator but a range is Triton's)


# ---- host


def config(problem: Rows, device: Device) -> list[Stay]:
    """How many clusters of which programs, of a plain norm that they are for; else nothing."""
    clusters, has_weight = int(FIT * device.sms / CTAS), problem.op == "rms_norm" or "weight" in problem.variant.split()
    if problem.width != WIDTH or problem.dtype.itemsize != 2 or not has_weight or problem.rows < TURNS * clusters:
        return []
    return [Stay(clusters, CTAS, 4, 4096, 16, 3 if "layer" in problem.variant else 4)] if clusters else []


def launch(config: Stay, x: torch.Tensor, y: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor | None, norm: Norm) -> None:
    """Of x [rows, width] with contiguous rows; y, mean and rstd are written."""
    on_gpu = x.device.type == "cuda"
    _norm_stay[(min(config.clusters, len(x)),)](
        x, x.stride(0), y, mean, rstd, norm.eps, norm.weight, norm.bias, norm.offset or None, len(x), LAYER=norm.kind == "layer", CTAS=config.ctas,
        CLUSTER=on_gpu, PARTS=config.parts, BLOCK=config.block, STAGES=config.stages, num_warps=config.warps, **({"num_ctas": config.ctas} if on_gpu else {}),
    )  # fmt: skip
