"""How far a student's distribution is from a teacher's, for rows of logits of both, and the gradient of the student's.

    q = softmax(student / T),  p = softmax(teacher / T),  m = beta p + (1 - beta) q,   D(a, b) = sum a (log a - log b)
    beta = 0: D(p, q);   beta = 1: D(q, p);   between: beta D(p, m) + (1 - beta) D(q, m)            (GKD; Agarwal et al., 2023)
    dz = q - p;          q (log q - log p - D(q, p));   (1 - beta) q (log q - log m - D(q, m));     each by g / T

Forward: one program a row, in pieces, the next ones on their way while two are worked on; each thread has maxima and sums of its own. Of one of the two,

    D(p, q) = sum p (z_p - z_q) - lse_p + lse_q,   z less the row's first

is summed up beside the sums of exponentials: each row is read once. m is not known before they are, so a divergence from it reads the rows again, from their
ends, where L2 has the last pieces. Backward: a program takes a piece of a row; two reads and one write, the floor.
Rows that do not count are not read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows

PIECE, THREAD = 4096, 16  # bytes of each row that a program takes at a time, and a thread


class Tiles(NamedTuple):
    """How much of both rows a program takes at a time."""

    block: int
    warps: int

    def __str__(self):
        return f"pieces of {self.block}, {self.warps} warps"


# ---- device


LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _middle(row_ptr):
    """What logits are taken from in sums: the first."""
    x = tl.load(row_ptr).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _power(x, grown):
    """The power of 2 that logits x are, rounded: as part of a difference it would not be."""
    return tl.fma(x, grown, 0.0)


@triton.jit
def _base(top, grown):
    return tl.where(top == float("-inf"), 0.0, _power(top, grown))


@triton.jit
def _more(x, m, s, a, apart, grown, SUMS: tl.constexpr):
    """Maxima of logits, sums of 2^(grown x - it), and of these times `apart`, of lanes with x [LANES, LANE] added; exp takes four instructions more."""
    top = tl.maximum(m, tl.max(x, 1))
    base = _base(top, grown)
    e, kept = tl.exp2(tl.fma(x, grown, -base[:, None])), tl.exp2(_power(m, grown) - base)
    if SUMS:
        a = a * kept + tl.sum(e * tl.where(e == 0, 0.0, apart), 1)
    return top, s * kept + tl.sum(e, 1), a


@triton.jit
def _whole(m, s, a, grown):
    """(maximum, log of the sum from it on, mean of what was apart) of a row, from those of lanes."""
    top = tl.max(m)
    base = _base(top, grown)
    kept = tl.exp2(_power(m, grown) - base)
    total = tl.sum(s * kept)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.log(total) - tl.fma(top, grown, -base) * LN_2, tl.sum(a * kept) / total


@triton.jit
def _log_mixture(q, p, log_q, log_p, beta, KIND: tl.constexpr):
    """log m: of q for KIND 0, of p for 1, of both for 2."""
    if KIND == 0:
        return log_q
    if KIND == 1:
        return log_p
    return tl.log(beta * p + (1 - beta) * q)


@triton.jit
def _share(p, log_p, log_m):
    """p (log p - log m); what is less than 1e-30 of a distribution is nothing, as m may not be said in float32 there."""
    return tl.where(p < 1e-30, 0.0, p * (log_p - log_m))


@triton.jit
def _forward(
    student_ptr, teacher_ptr, counts_ptr, stats_ptr, tokens, width, student_stride, teacher_stride, inverse, beta,
    KIND: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    counted = tl.full([], 1, tl.int32)
    if counts_ptr is not None:
        counted = tl.load(counts_ptr + row).to(tl.int32)
    LANES: tl.constexpr = BLOCK // LANE
    if counted == 0:
        _store_figures(stats_ptr, tokens, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    else:
        m_q, m_p = tl.full([LANES], float("-inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
        s_q, s_p, a = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        firsts, grown = _middle(teacher_ptr) - _middle(student_ptr), inverse * LOG2_E
        pieces = tl.cdiv(width, BLOCK)
        col = tl.arange(0, BLOCK)
        x = tl.load(student_ptr + col, mask=col < width, other=float("-inf"))
        y = tl.load(teacher_ptr + col, mask=col < width, other=float("-inf"))
        for piece in range(pieces):
            col = (piece + 1) * BLOCK + tl.arange(0, BLOCK)
            next_x = tl.load(student_ptr + col, mask=col < width, other=float("-inf"))
            next_y = tl.load(teacher_ptr + col, mask=col < width, other=float("-inf"))
            of_q, of_p = x.to(tl.float32).reshape(LANES, LANE), y.to(tl.float32).reshape(LANES, LANE)
            apart = (of_p - of_q) - firsts
            m_q, s_q, a = _more(of_q, m_q, s_q, a, -apart, grown, KIND == 1)
            m_p, s_p, a = _more(of_p, m_p, s_p, a, apart, grown, KIND == 0)
            x, y = next_x, next_y
        top_q, more_q, mean_q = _whole(m_q, s_q, a, grown)
        top_p, more_p, mean_p = _whole(m_p, s_p, a, grown)
        nearer = (more_q - more_p) - ((top_p - top_q) - firsts) * inverse  # lse_q - lse_p, less the rows' first
        of_q = mean_q * inverse - nearer
        loss = mean_p * inverse + nearer if KIND == 0 else of_q
        top_q, top_p = top_q * inverse, top_p * inverse
        if KIND == 2:
            sum_q, sum_p = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
            for piece in range(pieces):
                col = (pieces - 1 - piece) * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(student_ptr + col, mask=col < width, other=float("-inf"))
                y = tl.load(teacher_ptr + col, mask=col < width, other=float("-inf"))
                log_q, log_p = x.to(tl.float32) * inverse - top_q - more_q, y.to(tl.float32) * inverse - top_p - more_p
                q, p = tl.exp(log_q), tl.exp(log_p)
                log_m = _log_mixture(q, p, log_q, log_p, beta, KIND)
                sum_q += tl.sum(_share(q, log_q, log_m).reshape(LANES, LANE), 1)
                sum_p += tl.sum(_share(p, log_p, log_m).reshape(LANES, LANE), 1)
            of_q = tl.sum(sum_q)
            loss = beta * tl.sum(sum_p) + (1 - beta) * of_q
        _store_figures(stats_ptr, tokens, row, top_q, more_q, top_p, more_p, loss, of_q)


@triton.jit
def _store_figures(stats_ptr, tokens, row, top_q, more_q, top_p, more_p, loss, of_q):
    tl.store(stats_ptr + row, top_q)
    tl.store(stats_ptr + tokens + row, more_q)
    tl.store(stats_ptr + 2 * tokens + row, top_p)
    tl.store(stats_ptr + 3 * tokens + row, more_p)
    tl.store(stats_ptr + 4 * tokens + row, loss)
    tl.store(stats_ptr + 5 * tokens + row, of_q)


@triton.jit
def _backward(
    student_ptr, teacher_ptr, counts_ptr, out_ptr, stats_ptr, g_ptr, tokens, width, student_stride, teacher_stride, out_stride, inverse, beta,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    counted = tl.full([], 1, tl.int32)
    if counts_ptr is not None:
        counted = tl.load(counts_ptr + row).to(tl.int32)
    read = inside & (counted != 0)
    x = tl.load(student_ptr + row * student_stride + col, mask=read, other=0.0)
    y = tl.load(teacher_ptr + row * teacher_stride + col, mask=read, other=0.0)
    top_q, more_q = tl.load(stats_ptr + row), tl.load(stats_ptr + tokens + row)
    top_p, more_p = tl.load(stats_ptr + 2 * tokens + row), tl.load(stats_ptr + 3 * tokens + row)
    of_q = tl.load(stats_ptr + 5 * tokens + row)
    log_q, log_p = x.to(tl.float32) * inverse - top_q - more_q, y.to(tl.float32) * inverse - top_p - more_p
    q, p = tl.exp(log_q), tl.exp(log_p)
    if KIND == 0:
        d = q - p
    else:
        log_m = _log_mixture(q, p, log_q, log_p, beta, KIND)
        d = (1.0 if KIND == 1 else 1 - beta) * (_share(q, log_q, log_m) - tl.where(q < 1e-30, 0.0, q * of_q))
    d = tl.where(counted != 0, d * (tl.load(g_ptr + row) * inverse), 0.0)
    tl.store(out_ptr + row * out_stride + col, d.to(out_ptr.dtype.element_ty), mask=inside)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """A whole narrow row, or a piece of a wide one."""
    size = problem.dtype.itemsize
    block = min(PIECE // size, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block * size // (32 * THREAD)))]


def _kind(beta: float) -> int:
    return int(beta) if beta in (0, 1) else 2


def launch(
    problem: Rows,
    config: Tiles,
    student: torch.Tensor,  # [rows, width]
    teacher: torch.Tensor,  # [rows, width]
    counts: torch.Tensor | None,  # [rows] bool
    beta: float,
    temperature: float,
) -> torch.Tensor:
    """Float32 [6, rows]: of the student's logits and of the teacher's the maximum and logsumexp less that, the divergence, D(q, m)."""
    student, teacher = (t if t.stride(1) == 1 else t.contiguous() for t in (student, teacher))
    stats = torch.empty((6, problem.rows), dtype=torch.float32, device=student.device)
    _forward[(problem.rows,)](
        student,
        teacher,
        _bytes(counts),
        stats,
        problem.rows,
        problem.width,
        student.stride(0),
        teacher.stride(0),
        1 / temperature,
        float(beta),
        KIND=_kind(beta),
        LANE=16 // student.element_size(),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return stats


def launch_backward(
    problem: Rows,
    config: Tiles,
    student: torch.Tensor,  # [rows, width]
    teacher: torch.Tensor,  # [rows, width]
    counts: torch.Tensor | None,  # [rows] bool
    stats: torch.Tensor,  # [6, rows]
    g: torch.Tensor,  # [rows] float32
    beta: float,
    temperature: float,
    out: torch.Tensor,  # [rows, width], may be the student's logits
) -> torch.Tensor:
    student, teacher = (t if t.stride(1) == 1 else t.contiguous() for t in (student, teacher))
    _backward[(problem.rows * triton.cdiv(problem.width, config.block),)](
        student,
        teacher,
        _bytes(counts),
        out,
        stats,
        g.contiguous(),
        problem.rows,
        problem.width,
        student.stride(0),
        teacher.stride(0),
        out.stride(0),
        1 / temperature,
        float(beta),
        KIND=_kind(beta),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return out


def _bytes(counts: torch.Tensor | None) -> torch.Tensor | None:
    return None if counts is None else counts.contiguous().view(torch.uint8)
