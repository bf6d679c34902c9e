"""How far a student's distribution is from a teacher's, for rows of logits of both, and the gradient of the student's.

    q = softmax(student / T),  p = softmax(teacher / T),  m = beta p + (1 - beta) q,   D(a, b) = sum a (log a - log b)
    beta = 0: D(p, q);   beta = 1: D(q, p);   between: beta D(p, m) + (1 - beta) D(q, m)            (GKD; Agarwal et al., 2023)
    dz = q - p;          q (log q - log p - D(q, p));   (1 - beta) q (log q - log m - D(q, m));     each by g / T

Forward: one program a row. Both rows go through it in pieces twice, first for their sums of exponentials, then for the divergence, from their ends, where
L2 has the last pieces. Each thread has maxima and sums of its own. Backward: a program takes a piece of a row; two reads and one write, the floor.
Rows that do not count are not read.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows

# Bytes of each row that a program takes at a time, and a thread. 32 bytes a thread spill in the forward pass.
PIECE = {"divergence": 8192, "divergence_backward": 4096}
THREAD = 16


class Tiles(NamedTuple):
    """How much of both rows a program takes at a time."""

    block: int
    warps: int

    def __str__(self):
        return f"pieces of {self.block}, {self.warps} warps"


# ---- device


@triton.jit
def _more(x, inverse, m, s, LANES: tl.constexpr, LANE: tl.constexpr):
    """The maxima and sums of lanes with logits x [BLOCK] added."""
    z = (x.to(tl.float32) * inverse).reshape(LANES, LANE)
    top = tl.maximum(m, tl.max(z, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, s * tl.exp(m - base) + tl.sum(tl.exp(z - base[:, None]), 1)


@triton.jit
def _top_and_log_sum(m, s):
    top = tl.max(m)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base, tl.log(tl.sum(s * tl.exp(m - base)))


@triton.jit
def _mixture(log_q, log_p, log_1_beta, log_beta, KIND: tl.constexpr):
    """log m: of q for KIND 0, of p for 1, of both for 2."""
    if KIND == 0:
        return log_q
    if KIND == 1:
        return log_p
    a, b = log_q + log_1_beta, log_p + log_beta
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log(tl.exp(a - base) + tl.exp(b - base))


@triton.jit
def _forward(
    student_ptr, teacher_ptr, counts_ptr, stats_ptr, tokens, width, student_stride, teacher_stride, inverse, beta, log_1_beta, log_beta,
    KIND: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    counted = tl.full([], 1, tl.int32)
    if counts_ptr is not None:
        counted = tl.load(counts_ptr + row).to(tl.int32)
    LANES: tl.constexpr = BLOCK // LANE
    top_q, top_p = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    more_q, more_p = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    of_q, of_p = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    if counted != 0:
        m_q, m_p = tl.full([LANES], float("-inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
        s_q, s_p = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        pieces = tl.cdiv(width, BLOCK)
        for piece in range(pieces):
            col = piece * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(student_ptr + col, mask=col < width, other=float("-inf"))
            y = tl.load(teacher_ptr + col, mask=col < width, other=float("-inf"))
            m_q, s_q = _more(x, inverse, m_q, s_q, LANES, LANE)
            m_p, s_p = _more(y, inverse, m_p, s_p, LANES, LANE)
        top_q, more_q = _top_and_log_sum(m_q, s_q)
        top_p, more_p = _top_and_log_sum(m_p, s_p)
        sum_q, sum_p = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        for piece in range(pieces):
            col = (pieces - 1 - piece) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(student_ptr + col, mask=col < width, other=float("-inf"))
            y = tl.load(teacher_ptr + col, mask=col < width, other=float("-inf"))
            log_q, log_p = x.to(tl.float32) * inverse - top_q - more_q, y.to(tl.float32) * inverse - top_p - more_p
            log_m = _mixture(log_q, log_p, log_1_beta, log_beta, KIND)
            q, p = tl.exp(log_q), tl.exp(log_p)
            if KIND != 0:
                sum_q += tl.sum(tl.where(q == 0, 0.0, q * (log_q - log_m)).reshape(LANES, LANE), 1)
            if KIND != 1:
                sum_p += tl.sum(tl.where(p == 0, 0.0, p * (log_p - log_m)).reshape(LANES, LANE), 1)
        of_q, of_p = tl.sum(sum_q), tl.sum(sum_p)
    loss = of_p if KIND == 0 else of_q if KIND == 1 else beta * of_p + (1 - beta) * of_q
    tl.store(stats_ptr + row, top_q)
    tl.store(stats_ptr + tokens + row, more_q)
    tl.store(stats_ptr + 2 * tokens + row, top_p)
    tl.store(stats_ptr + 3 * tokens + row, more_p)
    tl.store(stats_ptr + 4 * tokens + row, loss)
    tl.store(stats_ptr + 5 * tokens + row, of_q)


@triton.jit
def _backward(
    student_ptr, teacher_ptr, counts_ptr, out_ptr, stats_ptr, g_ptr, tokens, width, student_stride, teacher_stride, out_stride, inverse, beta, log_1_beta,
    log_beta, KIND: tl.constexpr, BLOCK: tl.constexpr,
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
    q = tl.exp(log_q)
    if KIND == 0:
        d = q - tl.exp(log_p)
    else:
        log_m = _mixture(log_q, log_p, log_1_beta, log_beta, KIND)
        d = (1.0 if KIND == 1 else 1 - beta) * tl.where(q == 0, 0.0, q * (log_q - log_m - of_q))
    d = tl.where(counted != 0, d * (tl.load(g_ptr + row) * inverse), 0.0)
    tl.store(out_ptr + row * out_stride + col, d.to(out_ptr.dtype.element_ty), mask=inside)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """A whole narrow row, or a piece of a wide one."""
    size = problem.dtype.itemsize
    block = min(PIECE[problem.op] // size, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block * size // (32 * THREAD)))]


def _mixed(beta: float) -> tuple[tuple[float, float, float], int]:
    """(beta, log(1 - beta), log beta), and the KIND."""
    if beta in (0, 1):
        return (float(beta), 0.0, 0.0), int(beta)
    return (beta, math.log1p(-beta), math.log(beta)), 2


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
    numbers, kind = _mixed(beta)
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
        *numbers,
        KIND=kind,
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
    numbers, kind = _mixed(beta)
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
        *numbers,
        KIND=kind,
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return out


def _bytes(counts: torch.Tensor | None) -> torch.Tensor | None:
    return None if counts is None else counts.contiguous().view(torch.uint8)
