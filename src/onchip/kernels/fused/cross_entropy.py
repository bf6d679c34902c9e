"""Cross-entropy of rows of logits: figures of each row, and the gradient of the logits.

    z = cap tanh(x / cap) / temperature,   lse = log sum_j exp z_j,   p = exp(z - lse)
    forward    log p[t],  max z and lse - max z,  entropy H = -sum p log p,  sum_j w_j (lse - z_j),  w[t]          (core.losses.LOG_PROB ... WEIGHT)
    backward   dz = g (1 - s) w_t (p - [j = t]) + p (g [s W / V + 2 c lse] - g_H [log p + H]) - g s w_j / V
    of loss = -(1 - s) w_t log p[t] + s / V sum_j w_j (lse - z_j) + c lse^2, and of H; s is the smoothing, c the z-loss, W = sum w.

Forward: one program a row, in pieces, the next one on its way while one is worked on. Each thread has a maximum and a sum of its own, so that a
piece takes no barrier and 1 + 1/8 exponentials an element. One read of the logits. Backward: a program takes a piece of a row; one read and one
write, the floor. In place: both in one launch. The programs of a row hold a piece each, meet to add up their sums (`meeting.py`), and write the gradient
of what is in their registers: one read and one write as well.
Ignored rows are not read. Offsets are 64 bits wide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.curves import tanh
from onchip.kernels.meeting import FIRST, MOST, SECOND, hear, held, phases, tell

# Bytes of a row that a program takes at a time, and a thread: 16-byte loads.
PIECE = 8192, 32  # forward; the next piece is on its way: 8 to 16 KiB in flight a program, of which a multiprocessor has six
IN_PLACE = 16384, 128
BACKWARD = 8192, 64
WORDS = tl.constexpr(4)  # that a program tells the others of its row, in place
SCALING = 1 << 12  # programs at most: all of 2^18 that had nothing to scale would take as long as 100 us


class Tiles(NamedTuple):
    """How much of a row a program takes at a time."""

    block: int
    warps: int

    def __str__(self):
        return f"pieces of {self.block}, {self.warps} warps"


# ---- device


@triton.jit
def _logits(x, inverse, cap, CAPPED: tl.constexpr):
    """z of logits x, float32."""
    x = x.to(tl.float32)
    if CAPPED:
        x = cap * tanh(x / cap)
    return tl.fma(x, inverse, 0.0)  # a product would be rounded together with what is subtracted from it: z - max z has to be 0 at the maximum


@triton.jit
def _log_or_zero(m, base):
    """m - base, 0 where there is nothing yet."""
    return tl.where(m == float("-inf"), 0.0, m - base)


@triton.jit
def _middle(row_ptr, inverse, cap, CAPPED: tl.constexpr):
    """What the sum of z is taken from, so that a large common part of the logits costs no digits: the first one."""
    middle = _logits(tl.load(row_ptr), inverse, cap, CAPPED)
    return tl.where(tl.abs(middle) < float("inf"), middle, 0.0)


@triton.jit
def _figures(
    row_ptr,
    weights_ptr,
    width,
    inverse,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(maximum, log sum exp(z - maximum), entropy, sum w (lse - z)) of the row; a lane is what one thread loads at a time."""
    LANES: tl.constexpr = BLOCK // LANE
    m = tl.full([LANES], float("-inf"), tl.float32)
    s, a = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    total, mass = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    middle = _middle(row_ptr, inverse, cap, CAPPED) if SMOOTH else 0.0
    col = tl.arange(0, BLOCK)
    x = tl.load(row_ptr + col, mask=col < width, other=float("-inf"))
    for first in range(0, width, BLOCK):
        inside = first + col < width
        following = first + BLOCK + col
        coming = tl.load(row_ptr + following, mask=following < width, other=float("-inf"))
        z = _logits(x, inverse, cap, CAPPED)
        if SMOOTH:
            w = inside.to(tl.float32)
            if weights_ptr is not None:
                w = tl.load(weights_ptr + first + col, mask=inside, other=0.0)
            total += tl.sum(tl.where(inside, w * (z - middle), 0.0).reshape(LANES, LANE), 1)
            mass += tl.sum(w.reshape(LANES, LANE), 1)
        if CAPPED:
            z = tl.where(inside, z, float("-inf"))
        z = z.reshape(LANES, LANE)
        top = tl.maximum(m, tl.max(z, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(z - base[:, None])
        kept = tl.exp(m - base)
        if ENTROPY:
            a = kept * (a + s * _log_or_zero(m, base)) + tl.sum(tl.where(p > 0, p * (z - base[:, None]), 0.0), 1)
        s = s * kept + tl.sum(p, 1)
        m = top
        x = coming
    top = tl.max(m)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp(m - base)
    entropy = tl.sum(kept * (a + s * _log_or_zero(m, base)))
    sum_exp = tl.sum(s * kept)
    log_sum = tl.log(sum_exp)
    entropy = log_sum - entropy / sum_exp
    return base, log_sum, entropy, tl.sum(mass) * (base + log_sum - middle) - tl.sum(total)


@triton.jit
def _store_figures(stats_ptr, tokens, row, log_prob, top, log_sum, entropy, smooth, weight):
    tl.store(stats_ptr + row, log_prob)
    tl.store(stats_ptr + tokens + row, top)
    tl.store(stats_ptr + 2 * tokens + row, log_sum)
    tl.store(stats_ptr + 3 * tokens + row, entropy)
    tl.store(stats_ptr + 4 * tokens + row, smooth)
    tl.store(stats_ptr + 5 * tokens + row, weight)


@triton.jit
def _of_target(row_ptr, weights_ptr, target, first, vocab, width, inverse, cap, CAPPED: tl.constexpr):
    """(column or -1, logit, class weight, log-probability where the column is not here) of a row's target."""
    local = target - first
    here = (local >= 0) & (local < width)
    picked = _logits(tl.load(row_ptr + local, mask=here, other=0.0), inverse, cap, CAPPED)
    weight = here.to(tl.float32)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + local, mask=here, other=0.0)
    missing = tl.where((target >= 0) & (target < vocab), float("-inf"), float("nan"))  # another rank's, or nobody's
    return tl.where(here, local, -1).to(tl.int32), picked, weight, missing


@triton.jit
def _factors(target, vocab, g, g_entropy, lse, entropy, weight, smoothing, z_loss, total):
    """(of p, of -p log p, of p - 1 at the target, of p times the sum of class weights minus them, that sum) in dz; NaN where the target is no class."""
    weight = tl.where((target >= 0) & (target < vocab), weight, float("nan"))
    return 2 * z_loss * g * lse - g_entropy * entropy, g_entropy, g * (1 - smoothing) * weight, g * smoothing / vocab, total


@triton.jit
def _gradient(
    x, col, width, weights_ptr, lse, factors, form, TARGET: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SMOOTH: tl.constexpr
):  # fmt: skip
    """The gradient of logits x in columns col, of the target's alone or of none that is, float32.

    lse: as two summands; factors: by the temperature; form: 1 / temperature, temperature, cap.
    """
    of_p, of_plogp, of_target, of_weights, total = factors
    inverse, temperature, cap = form
    z = _logits(x, inverse, cap, CAPPED)
    log_p = z - lse[0] - lse[1]
    p = tl.exp(log_p)
    d = p * of_p + of_target * (p - 1) if TARGET else p * (of_p + of_target)  # a sum of p's factors would cancel where the target's p is near 1
    if ENTROPY:
        d -= tl.where(p > 0, p * log_p, 0.0) * of_plogp
    if SMOOTH:
        w = 1.0
        if weights_ptr is not None:
            w = tl.load(weights_ptr + col, mask=col < width, other=0.0)
        d += of_weights * (p * total - w)
    if CAPPED:
        u = z * temperature / cap
        d = d * (1 - u * u)
    return d


@triton.jit
def _store_gradient(
    x, start, local, row_ptr, out_ptr, width, weights_ptr, lse, factors, form,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """That of a row's columns from `start` on. The target's is stored over: to look for its column in every element cost a third of all instructions."""
    here = (local >= start) & (local < start + BLOCK)
    target = tl.zeros([], row_ptr.dtype.element_ty)
    if here:
        target = tl.load(row_ptr + local)
        tl.debug_barrier()  # until every thread has it: `out` may be the logits
    col = start + tl.arange(0, BLOCK)
    d = _gradient(x, col, width, weights_ptr, lse, factors, form, False, CAPPED, ENTROPY, SMOOTH)
    tl.store(out_ptr + col, d.to(out_ptr.dtype.element_ty), mask=col < width)
    if here:
        one = _gradient(target, local, width, weights_ptr, lse, factors, form, True, CAPPED, ENTROPY, SMOOTH)
        tl.debug_barrier()
        tl.store(out_ptr + local, one.to(out_ptr.dtype.element_ty))


@triton.jit
def _forward(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    stats_ptr,
    tokens,
    width,
    row_stride,
    first,
    vocab,
    ignore,
    inverse,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore:
        _store_figures(stats_ptr, tokens, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    else:
        row_ptr = logits_ptr + row * row_stride
        local, picked, weight, missing = _of_target(row_ptr, weights_ptr, target, first, vocab, width, inverse, cap, CAPPED)
        top, log_sum, entropy, smooth = _figures(row_ptr, weights_ptr, width, inverse, cap, CAPPED, ENTROPY, SMOOTH, LANE, BLOCK)
        log_prob = tl.where(local >= 0, picked - top - log_sum, missing)
        _store_figures(stats_ptr, tokens, row, log_prob, top, log_sum, entropy if ENTROPY else 0.0, smooth if SMOOTH else 0.0, weight)


@triton.jit
def _backward(
    logits_ptr,
    out_ptr,
    targets_ptr,
    weights_ptr,
    total_ptr,
    stats_ptr,
    g_ptr,
    g_entropy_ptr,
    tokens,
    width,
    row_stride,
    out_stride,
    first,
    vocab,
    ignore,
    smoothing,
    z_loss,
    temperature,
    inverse,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    start = tl.program_id(0) % pieces * BLOCK
    col = start + tl.arange(0, BLOCK)
    out_ptr += row * out_stride
    target = tl.load(targets_ptr + row)
    if target == ignore:
        tl.store(out_ptr + col, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=col < width)
    else:
        x = tl.load(logits_ptr + row * row_stride + col, mask=col < width, other=0.0)
        top, log_sum, weight = tl.load(stats_ptr + tokens + row), tl.load(stats_ptr + 2 * tokens + row), tl.load(stats_ptr + 5 * tokens + row)
        entropy, g_entropy = 0.0, 0.0
        if ENTROPY:
            entropy, g_entropy = tl.load(stats_ptr + 3 * tokens + row), tl.load(g_entropy_ptr + row) * inverse
        total = tl.zeros([], tl.float32) + vocab
        if total_ptr is not None:
            total = tl.load(total_ptr)
        g = tl.load(g_ptr + row) * inverse
        factors = _factors(target, vocab, g, g_entropy, top + log_sum, entropy, weight, smoothing, z_loss, total)
        local = target - first
        local = tl.where((local >= 0) & (local < width), local, -1).to(tl.int32)
        _store_gradient(x, start, local, logits_ptr + row * row_stride, out_ptr, width, weights_ptr, (top, log_sum), factors, (inverse, temperature, cap),
                        CAPPED, ENTROPY, SMOOTH, BLOCK)  # fmt: skip


@triton.jit
def _in_place(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    total_ptr,
    stats_ptr,
    g_ptr,
    words_ptr,
    tokens,
    width,
    pieces,
    row_stride,
    first,
    vocab,
    ignore,
    smoothing,
    z_loss,
    temperature,
    inverse,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASE: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    target = tl.load(targets_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    col = piece * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    if target == ignore:
        if piece == 0:
            _store_figures(stats_ptr, tokens, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        tl.store(row_ptr + col, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.load(row_ptr + col, mask=inside, other=float("-inf"))
        local, picked, weight, missing = _of_target(row_ptr, weights_ptr, target, first, vocab, width, inverse, cap, CAPPED)
        middle = _middle(row_ptr, inverse, cap, CAPPED) if SMOOTH else 0.0
        words_ptr += row * pieces * WORDS
        one = tl.full([], 1.0, tl.float32)
        if PHASE != SECOND:
            z = _logits(x, inverse, cap, CAPPED)
            if CAPPED:
                z = tl.where(inside, z, float("-inf"))
            top = tl.max(z)
            base = tl.where(top == float("-inf"), 0.0, top)
            z = _logits(held(x, PHASE), inverse, cap, CAPPED)
            if CAPPED:
                z = tl.where(inside, z, float("-inf"))
            p = tl.exp(z - base)
            mass = tl.sum(p)
            # Before others may write the gradient over it: what is read in vain would not be waited for.
            tl.store(stats_ptr + row, picked, mask=piece == 0)
            if SMOOTH:
                tl.store(stats_ptr + 4 * tokens + row, middle, mask=piece == 0)
            if ENTROPY:
                tell(words_ptr + pieces + piece, tl.sum(tl.where(p > 0, p * (z - base), 0.0)), one)
            if SMOOTH:
                w = inside.to(tl.float32)
                if weights_ptr is not None:
                    w = tl.load(weights_ptr + col, mask=inside, other=0.0)
                tell(words_ptr + 2 * pieces + piece, tl.sum(tl.where(inside, w * (z - middle), 0.0)), one)
                tell(words_ptr + 3 * pieces + piece, tl.sum(w), one)
            tell(words_ptr + piece, top, mass)  # the last: who has heard it of all writes
        if PHASE != FIRST:
            if PHASE == SECOND:
                picked = tl.load(stats_ptr + row)
                if SMOOTH:
                    middle = tl.load(stats_ptr + 4 * tokens + row)
            tops, sums = hear(words_ptr, pieces, PIECES, PHASE)
            there = tl.arange(0, PIECES) < pieces
            tops = tl.where(there, tops, float("-inf"))
            top = tl.max(tops)
            base = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp(tops - base)
            sum_exp = tl.sum(sums * kept)
            log_sum = tl.log(sum_exp)
            if piece == 0:
                entropy, smooth = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
                if ENTROPY:
                    spreads, _ = hear(words_ptr + pieces, pieces, PIECES, PHASE)
                    entropy = log_sum - tl.sum(kept * (spreads + sums * _log_or_zero(tops, base))) / sum_exp
                if SMOOTH:
                    totals, _ = hear(words_ptr + 2 * pieces, pieces, PIECES, PHASE)
                    masses, _ = hear(words_ptr + 3 * pieces, pieces, PIECES, PHASE)
                    smooth = tl.sum(masses) * (base + log_sum - middle) - tl.sum(totals)
                log_prob = tl.where(local >= 0, picked - base - log_sum, missing)
                _store_figures(stats_ptr, tokens, row, log_prob, base, log_sum, entropy, smooth, weight)
            x = held(x, PHASE)
            total = tl.zeros([], tl.float32) + vocab
            if total_ptr is not None:
                total = tl.load(total_ptr)
            g = tl.load(g_ptr + row) * inverse
            factors = _factors(target, vocab, g, 0.0, base + log_sum, 0.0, weight, smoothing, z_loss, total)
            _store_gradient(x, piece * BLOCK, local, row_ptr, row_ptr, width, weights_ptr, (base, log_sum), factors, (inverse, temperature, cap), CAPPED,
                            False, SMOOTH, BLOCK)  # fmt: skip


@triton.jit
def _scale(x_ptr, factor_ptr, count, pieces, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1:
        for n in range(pieces):
            index = (tl.program_id(0).to(tl.int64) * pieces + n) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < count, other=0.0).to(tl.float32)
            tl.store(x_ptr + index, (x * factor).to(x_ptr.dtype.element_ty), mask=index < count)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """A whole narrow row, or the piece of a wide one that each pass takes; in place, of no more programs a row than can meet."""
    size, in_place = problem.dtype.itemsize, problem.op == "cross_entropy_in_place"
    most, thread = {"cross_entropy": PIECE, "cross_entropy_in_place": IN_PLACE}.get(problem.op, BACKWARD)
    while in_place and triton.cdiv(problem.width * size, most) > MOST.value:
        most *= 2
    block = min(most // size, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block * size // (32 * thread)))]


def _flags(problem: Rows, x) -> dict:
    return {"CAPPED": x.softcap > 0, "ENTROPY": "entropy" in problem.variant, "SMOOTH": x.smoothing > 0}


def launch(problem: Rows, config: Tiles, logits: torch.Tensor, targets: torch.Tensor, x) -> torch.Tensor:
    """Figures float32 [6, rows] of logits [rows, width] and targets [rows]; x: RowLoss."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    stats = torch.empty((6, problem.rows), dtype=torch.float32, device=logits.device)
    _forward[(problem.rows,)](
        logits,
        targets.contiguous(),
        _contiguous(x.class_weights),
        stats,
        problem.rows,
        problem.width,
        logits.stride(0),
        x.first,
        x.vocab,
        x.ignore_index,
        1 / x.temperature,
        x.softcap,
        **_flags(problem, x),
        LANE=16 // logits.element_size(),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return stats


def launch_backward(
    problem: Rows,
    config: Tiles,
    logits: torch.Tensor,  # [rows, width]
    targets: torch.Tensor,  # [rows]
    stats: torch.Tensor,  # [6, rows]
    g: torch.Tensor,  # [rows] float32, of the loss
    g_entropy: torch.Tensor | None,  # [rows] float32
    x,  # RowLoss
    out: torch.Tensor,  # [rows, width], may be the logits
) -> torch.Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    _backward[(problem.rows * triton.cdiv(problem.width, config.block),)](
        logits,
        out,
        targets.contiguous(),
        _contiguous(x.class_weights),
        x.total,
        stats,
        g.contiguous(),
        _contiguous(g_entropy),
        problem.rows,
        problem.width,
        logits.stride(0),
        out.stride(0),
        x.first,
        x.vocab,
        x.ignore_index,
        x.smoothing,
        x.z_loss,
        x.temperature,
        1 / x.temperature,
        x.softcap,
        **_flags(problem, x),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return out


def launch_in_place(problem: Rows, config: Tiles, logits: torch.Tensor, targets: torch.Tensor, g: torch.Tensor, x) -> torch.Tensor:
    """Figures [6, rows]; the logits, whose rows are contiguous, become the gradient of `sum g loss`."""
    device, pieces = logits.device, triton.cdiv(problem.width, config.block)
    stats = torch.empty((6, problem.rows), dtype=torch.float32, device=device)
    words = torch.zeros(problem.rows * pieces * WORDS.value, dtype=torch.int64, device=device)
    for phase in phases(logits, pieces, config.warps):
        _in_place[(problem.rows * pieces,)](
            logits,
            targets.contiguous(),
            _contiguous(x.class_weights),
            x.total,
            stats,
            g.contiguous(),
            words,
            problem.rows,
            problem.width,
            pieces,
            logits.stride(0),
            x.first,
            x.vocab,
            x.ignore_index,
            x.smoothing,
            x.z_loss,
            x.temperature,
            1 / x.temperature,
            x.softcap,
            **_flags(problem, x),
            PIECES=triton.next_power_of_2(pieces),
            BLOCK=config.block,
            PHASE=phase,
            num_warps=config.warps,
        )
    return stats


def launch_scale(problem: Rows, config: Tiles, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x *= factor, in place; x is contiguous, and neither read nor written where the factor is 1: which few programs find out."""
    block = BACKWARD[0] // x.element_size()
    pieces = triton.cdiv(x.numel(), block)
    programs = max(1, min(pieces, SCALING))
    _scale[(programs,)](x, factor, x.numel(), triton.cdiv(pieces, programs), BLOCK=block, num_warps=BACKWARD[0] // (32 * BACKWARD[1]))
    return x


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()
