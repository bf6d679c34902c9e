"""How far a student's distribution is from a teacher's, for rows of logits of both, and the gradient of the student's.

    q = softmax(student / T),  p = softmax(teacher / T),  m = beta p + (1 - beta) q,   D(a, b) = sum a (log a - log b)
    beta = 0: D(p, q);   beta = 1: D(q, p);   between: beta D(p, m) + (1 - beta) D(q, m)            (GKD; Agarwal et al., 2023)
    dz = q - p;          q (log q - log p - D(q, p));   (1 - beta) q (log q - log m - D(q, m));     each by g / T

Forward: the programs of a row hold a piece of both each, and meet to add up their sums of exponentials (`meeting.py`); the last of them adds up the
divergence. Each row is read once. Backward: a program takes a piece of a row; two reads and one write, the floor.
Rows that do not count are not read.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.meeting import FIRST, MOST, SECOND, hear, held, phases, tell

# Bytes of each row that a program has, and of a thread.
PIECE = {"divergence": (8192, 32), "divergence_backward": (4096, 16)}
WORDS = tl.constexpr(4)  # that a program tells the others of its row


class Tiles(NamedTuple):
    """How much of both rows a program takes."""

    block: int
    warps: int

    def __str__(self):
        return f"pieces of {self.block}, {self.warps} warps"


# ---- device


@triton.jit
def _tell_sums(word_ptr, x, inverse, PHASE: tl.constexpr):
    """The maximum of a piece of z, and the sum of exp(z - it)."""
    top = tl.max(x.to(tl.float32) * inverse)
    tell(word_ptr, top, tl.sum(tl.exp(held(x, PHASE).to(tl.float32) * inverse - tl.where(top == float("-inf"), 0.0, top))))


@triton.jit
def _top_and_log_sum(words_ptr, pieces, PIECES: tl.constexpr):
    """Of the row, from the sums of its pieces."""
    tops, sums = hear(words_ptr, pieces, PIECES)
    tops = tl.where(tl.arange(0, PIECES) < pieces, tops, float("-inf"))
    top = tl.max(tops)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base, tl.log(tl.sum(sums * tl.exp(tops - base)))


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
    student_ptr, teacher_ptr, counts_ptr, stats_ptr, words_ptr, tokens, width, pieces, student_stride, teacher_stride, inverse, beta,
    log_1_beta, log_beta, KIND: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    counted = tl.full([], 1, tl.int32)
    if counts_ptr is not None:
        counted = tl.load(counts_ptr + row).to(tl.int32)
    if counted == 0:
        if piece == 0:
            _store_figures(stats_ptr, tokens, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    else:
        col = piece * BLOCK + tl.arange(0, BLOCK)
        words_ptr += row * pieces * WORDS
        x = tl.load(student_ptr + row * student_stride + col, mask=col < width, other=float("-inf"))
        y = tl.load(teacher_ptr + row * teacher_stride + col, mask=col < width, other=float("-inf"))
        if PHASE != SECOND:
            _tell_sums(words_ptr + piece, x, inverse, PHASE)
            _tell_sums(words_ptr + pieces + piece, y, inverse, PHASE)
        if PHASE != FIRST:
            top_q, more_q = _top_and_log_sum(words_ptr, pieces, PIECES)
            top_p, more_p = _top_and_log_sum(words_ptr + pieces, pieces, PIECES)
            x, y = held(x, PHASE), held(y, PHASE)
            log_q, log_p = x.to(tl.float32) * inverse - top_q - more_q, y.to(tl.float32) * inverse - top_p - more_p
            log_m = _mixture(log_q, log_p, log_1_beta, log_beta, KIND)
            of_q, of_p = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
            if KIND != 0:
                q = tl.exp(log_q)
                of_q = tl.sum(tl.where(q == 0, 0.0, q * (log_q - log_m)))
            if KIND != 1:
                p = tl.exp(log_p)
                of_p = tl.sum(tl.where(p == 0, 0.0, p * (log_p - log_m)))
            loss = of_p if KIND == 0 else of_q if KIND == 1 else beta * of_p + (1 - beta) * of_q
            tell(words_ptr + 2 * pieces + piece, loss, tl.full([], 1.0, tl.float32))
            tell(words_ptr + 3 * pieces + piece, of_q, tl.full([], 1.0, tl.float32))
            if piece == pieces - 1:  # in the interpreter the last one to run
                losses, _ = hear(words_ptr + 2 * pieces, pieces, PIECES)
                of_qs, _ = hear(words_ptr + 3 * pieces, pieces, PIECES)
                _store_figures(stats_ptr, tokens, row, top_q, more_q, top_p, more_p, tl.sum(losses), tl.sum(of_qs))


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
    """A whole narrow row, or a piece of a wide one; forward, of no more programs a row than can meet."""
    size, (most, thread) = problem.dtype.itemsize, PIECE[problem.op]
    while problem.op == "divergence" and triton.cdiv(problem.width * size, most) > MOST.value:
        most *= 2
    block = min(most // size, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block * size // (32 * thread)))]


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
    device, pieces = student.device, triton.cdiv(problem.width, config.block)
    stats = torch.empty((6, problem.rows), dtype=torch.float32, device=device)
    words = torch.zeros(problem.rows * pieces * WORDS.value, dtype=torch.int64, device=device)
    numbers, kind = _mixed(beta)
    for phase in phases(student):
        _forward[(problem.rows * pieces,)](
            student,
            teacher,
            _bytes(counts),
            stats,
            words,
            problem.rows,
            problem.width,
            pieces,
            student.stride(0),
            teacher.stride(0),
            1 / temperature,
            *numbers,
            KIND=kind,
            PIECES=triton.next_power_of_2(pieces),
            BLOCK=config.block,
            PHASE=phase,
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
