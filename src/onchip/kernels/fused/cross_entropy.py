"""Cross-entropy of rows of logits: figures of each row, and the gradient of the logits.

    z = cap tanh(x / cap) / temperature,   lse = log sum_j exp z_j,   p = exp(z - lse)
    forward    log p[t],  max z and lse - max z,  entropy H = -sum p log p,  sum_j w_j (lse - z_j),  w[t]          (core.losses.LOG_PROB ... WEIGHT)
    backward   dz = g (1 - s) w_t (p - [j = t]) + p (g [s W / V + 2 c lse] - g_H [log p + H]) - g s w_j / V
    of loss = -(1 - s) w_t log p[t] + s / V sum_j w_j (lse - z_j) + c lse^2, and of H; s is the smoothing, c the z-loss, W = sum w.

Forward: one program a row, in pieces, the next one on its way while one is worked on. Each thread has a maximum and a sum of its own, so that a
piece takes no barrier and 1 + 1/8 exponentials an element. One read of the logits. Backward: a program takes a piece of a row; one read and one
write, the floor. In place: both in one launch. The second reading goes from the row's end to its beginning, so that the last pieces come from L2:
a program a multiprocessor has 34 MB of rows of 128,256 in flight. Memory moves 2 rows instead of 3.
Ignored rows are not read. Offsets are 64 bits wide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.curves import tanh

# Bytes of a row that a program takes at a time.
PIECE = 16384  # forward, 16 warps; the next piece is on its way: 16 to 32 KiB in flight a program, of which a multiprocessor has two or three
WHOLE = 32768  # in place, 32 warps: one program a multiprocessor, as two would have more rows in flight than L2 holds
BACKWARD = 8192
THREAD = 32  # bytes a thread: two 16-byte loads


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
    return x * inverse


@triton.jit
def _slope(z, dz, inverse, temperature, cap, CAPPED: tl.constexpr):
    """The gradient of the logits from that of z."""
    if CAPPED:
        u = z * temperature / cap
        dz = dz * (1 - u * u)
    return dz * inverse


@triton.jit
def _log_or_zero(m, base):
    """m - base, 0 where there is nothing yet."""
    return tl.where(m == float("-inf"), 0.0, m - base)


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
    middle = tl.zeros([], tl.float32)
    if SMOOTH:  # what the sum of z is taken from, so that a large common part of the logits costs no digits
        middle = _logits(tl.load(row_ptr), inverse, cap, CAPPED)
        middle = tl.where(tl.abs(middle) < float("inf"), middle, 0.0)
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
def _row(
    row_ptr,
    weights_ptr,
    stats_ptr,
    row,
    tokens,
    target,
    width,
    first,
    vocab,
    inverse,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The figures of a row that counts, stored; returns (top, log_sum, weight)."""
    local = target - first
    here = (local >= 0) & (local < width)
    valid = (target >= 0) & (target < vocab)
    picked = _logits(tl.load(row_ptr + local, mask=here, other=0.0), inverse, cap, CAPPED)
    weight = here.to(tl.float32)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + local, mask=here, other=0.0)
    top, log_sum, entropy, smooth = _figures(row_ptr, weights_ptr, width, inverse, cap, CAPPED, ENTROPY, SMOOTH, LANE, BLOCK)
    missing = tl.where(valid, float("-inf"), float("nan"))  # another rank's, or nobody's
    log_prob = tl.where(here, picked - top - log_sum, missing)
    _store_figures(stats_ptr, tokens, row, log_prob, top, log_sum, entropy if ENTROPY else 0.0, smooth if SMOOTH else 0.0, weight)
    return top, log_sum, weight


@triton.jit
def _coefficients(target, vocab, g, g_entropy, lse, entropy, weight, smoothing, z_loss, total):
    """(of p, of -p log p, of p - 1 at the target, of minus the class weights) in dz; NaN where the target is no class."""
    weight = tl.where((target >= 0) & (target < vocab), weight, float("nan"))
    of_target = g * (1 - smoothing) * weight
    of_weights = g * smoothing / vocab
    return of_weights * total + 2 * z_loss * g * lse - g_entropy * entropy, g_entropy, of_target, of_weights


@triton.jit
def _gradient(x, col, inside, local, weights_ptr, top, log_sum, of_p, of_plogp, of_target, of_weights, inverse, temperature, cap, CAPPED: tl.constexpr,
              ENTROPY: tl.constexpr, SMOOTH: tl.constexpr):  # fmt: skip
    """The gradient of logits x in columns col, float32."""
    z = _logits(x, inverse, cap, CAPPED)
    log_p = z - top - log_sum
    p = tl.exp(log_p)
    d = p * of_p + of_target * tl.where(col == local, p - 1, p)  # a sum of the two factors of p would cancel where p is near 1
    if ENTROPY:
        d -= tl.where(p > 0, p * log_p, 0.0) * of_plogp
    if SMOOTH:
        w = 1.0
        if weights_ptr is not None:
            w = tl.load(weights_ptr + col, mask=inside, other=0.0)
        d -= w * of_weights
    return _slope(z, d, inverse, temperature, cap, CAPPED)


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
        _row(logits_ptr + row * row_stride, weights_ptr, stats_ptr, row, tokens, target, width, first, vocab, inverse, cap, CAPPED, ENTROPY, SMOOTH,
             LANE, BLOCK)  # fmt: skip


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
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    counts = target != ignore
    inside = col < width
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside & counts, other=0.0)
    top, log_sum, weight = tl.load(stats_ptr + tokens + row), tl.load(stats_ptr + 2 * tokens + row), tl.load(stats_ptr + 5 * tokens + row)
    entropy, g_entropy = 0.0, 0.0
    if ENTROPY:
        entropy, g_entropy = tl.load(stats_ptr + 3 * tokens + row), tl.load(g_entropy_ptr + row)
    total = tl.zeros([], tl.float32) + vocab
    if total_ptr is not None:
        total = tl.load(total_ptr)
    of_p, of_plogp, of_target, of_weights = _coefficients(
        target, vocab, tl.load(g_ptr + row), g_entropy, top + log_sum, entropy, weight, smoothing, z_loss, total
    )  # fmt: skip
    d = _gradient(x, col, inside, target - first, weights_ptr, top, log_sum, of_p, of_plogp, of_target, of_weights, inverse, temperature, cap, CAPPED, ENTROPY,
                  SMOOTH)  # fmt: skip
    d = tl.where(counts, d, 0.0)
    tl.store(out_ptr + row * out_stride + col, d.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _in_place(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    total_ptr,
    stats_ptr,
    g_ptr,
    tokens,
    width,
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
    LANE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    last = tl.cdiv(width, BLOCK) - 1
    if target == ignore:
        _store_figures(stats_ptr, tokens, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        for piece in range(last + 1):
            col = piece * BLOCK + tl.arange(0, BLOCK)
            tl.store(row_ptr + col, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), mask=col < width)
    else:
        g = tl.load(g_ptr + row)
        total = tl.zeros([], tl.float32) + vocab
        if total_ptr is not None:
            total = tl.load(total_ptr)
        top, log_sum, weight = _row(
            row_ptr, weights_ptr, stats_ptr, row, tokens, target, width, first, vocab, inverse, cap, CAPPED, ENTROPY, SMOOTH, LANE, BLOCK
        )  # fmt: skip
        of_p, _, of_target, of_weights = _coefficients(target, vocab, g, 0.0, top + log_sum, 0.0, weight, smoothing, z_loss, total)
        tl.debug_barrier()  # until every thread has its target's logit
        for piece in range(last + 1):
            col = (last - piece) * BLOCK + tl.arange(0, BLOCK)
            inside = col < width
            x = tl.load(row_ptr + col, mask=inside, other=0.0)
            d = _gradient(x, col, inside, target - first, weights_ptr, top, log_sum, of_p, 0.0, of_target, of_weights, inverse, temperature, cap, CAPPED, False,
                          SMOOTH)  # fmt: skip
            tl.store(row_ptr + col, d.to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        tl.store(x_ptr + index, (x * factor).to(x_ptr.dtype.element_ty), mask=index < count)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """A whole narrow row, or the piece of a wide one that each pass takes."""
    size = problem.dtype.itemsize
    most = {"cross_entropy": PIECE, "cross_entropy_in_place": WHOLE}.get(problem.op, BACKWARD) // size
    block = min(most, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block * size // (32 * THREAD)))]


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
    stats = torch.empty((6, problem.rows), dtype=torch.float32, device=logits.device)
    _in_place[(problem.rows,)](
        logits,
        targets.contiguous(),
        _contiguous(x.class_weights),
        x.total,
        stats,
        g.contiguous(),
        problem.rows,
        problem.width,
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
        LANE=16 // logits.element_size(),
        BLOCK=config.block,
        num_warps=config.warps,
    )
    return stats


def launch_scale(problem: Rows, config: Tiles, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x *= factor, in place; x is contiguous, and neither read nor written where the factor is 1."""
    block = BACKWARD // x.element_size()
    _scale[(triton.cdiv(x.numel(), block),)](x, factor, x.numel(), BLOCK=block, num_warps=BACKWARD // (32 * THREAD))
    return x


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()
