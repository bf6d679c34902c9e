"""GroupNorm and its activation: y = act((x - mean) / sqrt(var + eps) * weight + bias), mean and var of a group of channels of a sample.

A group of up to 1 MB is held in registers, by one program or by a team that meets half way (`meeting.py`). A larger one is read twice by programs that hold
nothing: by those that sum it up, of which the last to be done merges what all have found (Chan, Golub and LeVeque, 1983) and tells the others, and a little
later, from the L2 cache, by those that write y. These wait for programs that a GPU starts before them, and the first for none, so that there may be any
number of them. L2 is told to let y and what is read again go before what has been summed up.
Bytes moved: the floor, x and y once each, as long as the L2 cache keeps what has been summed up until it is read again.
Where channels come last see `group_last.py`. On Hopper groups of more than 4 MB are `group_stay.py`'s.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.problem import Groups
from onchip.kernels.fused import group_last, group_stay
from onchip.kernels.fused.group_tile import (
    Tiles,
    act_of,
    arguments,
    before,
    first,
    hold,
    of_channel,
    role,
    scratch,
    silu_of,
    tile,
    wide,
)
from onchip.kernels.meeting import BOTH, BOTH_AMD, FIRST, MOST, SECOND, hear, phases, tell

# ---- device

TINY = tl.constexpr(1.2e-38)  # makes no difference, but of two zeros a word that says something


@triton.jit
def _moments(held, first_ptr, count, begin, end, pieces, pixels, HELD: tl.constexpr, CUT: tl.constexpr, WORDS: tl.constexpr):
    """Mean and sum of square deviations of the runs [begin, end), `count` numbers, by sums from the first number on: those of thousands would round a mean of
    1,000 by half of float32's own steps there, and more. Half precision takes one pass.
    """
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    FAR: tl.constexpr = held[0].dtype == tl.float32
    total = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    about = tl.load(first_ptr).to(tl.float32)
    for k in tl.static_range(HELD):
        _, _, _, inside = tile(begin, end, k, pieces, pixels, CUT)
        off = tl.where(inside, wide(held[k], 0, WORDS) - about, 0.0)
        total += off
        if not FAR:
            squares += off * off
    total = tl.sum(total)
    mean = about + total / count
    if FAR:
        for k in tl.static_range(HELD):
            _, _, _, inside = tile(begin, end, k, pieces, pixels, CUT)
            off = tl.where(inside, held[k] - mean, 0.0)
            squares += off * off
        square = tl.sum(squares)
    else:
        square = tl.maximum(tl.sum(squares) - total * total / count, 0.0)
    return mean, square


@triton.jit
def _counts(t, share, runs, pieces, pixels, RUN: tl.constexpr):
    """How many numbers of a group the members t have, float32; 0 of those that are none."""
    a, b = tl.minimum(t * share, runs), tl.minimum(t * share + share, runs)
    return (before(b, pieces, pixels, RUN) - before(a, pieces, pixels, RUN)).to(tl.float32)


@triton.jit
def _write(
    held, y_ptr, w_ptr, b_ptr, mean, rstd, first_c, begin, end, each, pieces, pixels,
    ACT: tl.constexpr, HELD: tl.constexpr, CUT: tl.constexpr, WORDS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """y of the runs [begin, end)."""
    SPAN: tl.constexpr = CUT[2]
    FAR: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    SILU: tl.constexpr = ACT == "silu" and WORDS and not FAR
    for turn in tl.static_range(HELD // SPAN):
        _, c, _, _ = tile(begin, end, turn * SPAN, pieces, pixels, CUT)
        w, b = of_channel(w_ptr, first_c + c, c < each, 1.0) * rstd, of_channel(b_ptr, first_c + c, c < each, 0.0)
        if not FAR:
            b -= mean * w
        if SILU:
            w, b = w * -1.4426950408889634, b * -1.4426950408889634
        for s in tl.static_range(SPAN):
            _, _, at, inside = tile(begin, end, turn * SPAN + s, pieces, pixels, CUT)
            x = wide(held[turn * SPAN + s], pixels >> 31, WORDS)
            if FAR:  # the mean goes off first: a product of thousands would be rounded before it does
                x -= mean
            y = silu_of(x * w + b) if SILU else act_of(x * w + b, ACT, not FAR, WORDS)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside, eviction_policy=KEEP)


@triton.jit
def _held(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, word_ptr, eps, pixels, groups, each, pieces, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr, TEAM: tl.constexpr, WORDS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A member's share of a group whose channels come first: runs of them, in registers."""
    RUN: tl.constexpr = CUT[2] * CUT[1]
    unit = tl.program_id(0) // team
    member = tl.program_id(0) % team
    runs = each * pieces
    begin = member * share
    end = tl.minimum(begin + share, runs)
    size = (tl.zeros([], tl.int64) + each) * pixels
    first = before(begin, pieces, pixels, RUN)
    start = unit * size + first
    held = hold(x_ptr + start, begin, end, pieces, pixels, HELD, CUT, "")
    if PHASE != SECOND:
        mean, square = _moments(held, x_ptr + start, before(end, pieces, pixels, RUN) - first, begin, end, pieces, pixels, HELD, CUT, WORDS)
        if TEAM > 1:
            tell(word_ptr + tl.program_id(0), mean, square + TINY)
    if PHASE != FIRST:
        if TEAM > 1:
            means, squares = hear(word_ptr + unit * team, team, TEAM, PHASE)
            counts = _counts(tl.arange(0, TEAM), share, runs, pieces, pixels, RUN)
            about = tl.sum(tl.where(tl.arange(0, TEAM) == 0, means, 0.0))
            mean = about + tl.sum((means - about) * counts) / size
            square = tl.sum(squares + counts * (means - mean) * (means - mean))
        rstd = tl.rsqrt(square / size + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + unit, mean, mask=member == 0)
            tl.store(rstd_ptr + unit, rstd, mask=member == 0)
        _write(held, y_ptr + start, w_ptr, b_ptr, mean, rstd, unit % groups * each, begin, end, each, pieces, pixels, ACT, HELD, CUT, WORDS, "")


@triton.jit
def _comes_last(count_ptr, team):
    """Whether all others of a team have been here; then what they have stored before may be read."""
    tl.debug_barrier()
    behind = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return behind == team - 1


@triton.jit
def _told(word_ptr, mean_ptr, rstd_ptr, at, there, mean, square, count, eps):
    """What is found of groups goes to those that write, and to memory if it is kept."""
    rstd = tl.rsqrt(square / count + eps)
    tell(word_ptr + at, mean, rstd + TINY, there)
    if mean_ptr is not None:
        tl.store(mean_ptr + at, mean, mask=there)
        tl.store(rstd_ptr + at, rstd, mask=there)


@triton.jit
def _twice(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, part_ptr, word_ptr, count_ptr, eps, pixels, units, groups, each, pieces, share, team, lag,
    ACT: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr, WORDS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A member's share of a group whose channels come first, to be summed up or written."""
    RUN: tl.constexpr = CUT[2] * CUT[1]
    unit, member, writes = role(team, lag)
    if (unit < 0) | (unit >= units):
        return
    runs = each * pieces
    begin = member * share
    end = tl.minimum(begin + share, runs)
    size = (tl.zeros([], tl.int64) + each) * pixels
    first = before(begin, pieces, pixels, RUN)
    start = unit * size + first
    if writes:
        held = hold(x_ptr + start, begin, end, pieces, pixels, HELD, CUT, "evict_first")
        mean, rstd = hear(word_ptr + unit, 1, 1, PHASE)
        mean, rstd = tl.sum(mean), tl.sum(rstd)
        _write(held, y_ptr + start, w_ptr, b_ptr, mean, rstd, unit % groups * each, begin, end, each, pieces, pixels, ACT, HELD, CUT, WORDS, "evict_first")
    else:
        held = hold(x_ptr + start, begin, end, pieces, pixels, HELD, CUT, "evict_last")
        mean, square = _moments(held, x_ptr + start, before(end, pieces, pixels, RUN) - first, begin, end, pieces, pixels, HELD, CUT, WORDS)
        part_ptr += unit.to(tl.int64) * team * 2
        tl.store(part_ptr + member * 2, mean)
        tl.store(part_ptr + member * 2 + 1, square)
        if _comes_last(count_ptr + unit, team):
            about = tl.load(part_ptr)
            total = tl.zeros([1024], tl.float32)
            squares = tl.zeros([1024], tl.float32)
            for t0 in range(0, team, 1024):
                t = t0 + tl.arange(0, 1024)
                count = _counts(t, share, runs, pieces, pixels, RUN)
                off = tl.load(part_ptr + t * 2, mask=t < team, other=0.0) - about
                total += count * off
                squares += tl.load(part_ptr + t * 2 + 1, mask=t < team, other=0.0) + count * off * off
            off_mean = tl.sum(total) / size
            square = tl.maximum(tl.sum(squares) - size.to(tl.float32) * off_mean * off_mean, 0.0)
            _told(word_ptr, mean_ptr, rstd_ptr, unit, None, about + off_mean, square, size, eps)


# ---- host

SHARE = 32 << 10  # bytes of a program (1x128x1024x1024: 176 us; 16 KB 209, 64 KB 258)
AHEAD = 8  # programs for each multiprocessor that are begun before what they have summed up is read again (1x512x256x256: 47.1 us; 4 53.7, 16 50.7)


def configs(problem: Groups, device: Device) -> list[Tiles | group_last.Tiles | group_stay.Tiles]:
    if problem.layout == "channels_last":
        return group_last.configs(problem, device)
    return [*group_stay.configs(problem, device), _tiles(problem, device)]


def _tiles(problem: Groups, device: Device) -> Tiles:
    return first(problem, device, 1, True, SHARE)


def launch(
    problem: Groups,
    config: Tiles | group_last.Tiles | group_stay.Tiles,
    x: torch.Tensor,  # [batch, channels, pixels] or [batch, pixels, channels], contiguous
    weight: torch.Tensor | None,  # [channels]
    bias: torch.Tensor | None,
    eps: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """y, and the groups' mean and 1 / deviation, float32 [batch, groups], if they are to be kept."""
    y, p, t = torch.empty_like(x), problem, config
    mean, rstd = (scratch(x, p.batch, p.groups) if keep else None for _ in range(2))
    if not x.numel():
        return y, mean, rstd
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    if isinstance(t, group_last.Tiles):
        group_last.forward(p, t, x, y, weight, bias, eps, mean, rstd)
        return y, mean, rstd
    if isinstance(t, group_stay.Tiles):
        if x.data_ptr() % 16 == 0:  # as the copies want it
            group_stay.launch(p, t, x, y, weight, bias, eps, mean, rstd)
            return y, mean, rstd
        t = _tiles(p, of(x.device))
    units = p.batch * p.groups
    given = {"x_ptr": x, "y_ptr": y, "w_ptr": weight, "b_ptr": bias, "mean_ptr": mean, "rstd_ptr": rstd, "eps": eps} | arguments(p, t, x)
    given |= {"share": t.share, "team": t.team}
    if t.team <= MOST.value:
        words = torch.zeros(units * t.team, dtype=torch.int64, device=x.device) if t.team > 1 else None
        for phase in phases(x, t.team, t.warps) if t.team > 1 else (BOTH.value,):
            _held[(units * t.team,)](**given, word_ptr=words, TEAM=triton.next_power_of_2(t.team), PHASE=phase)
        return y, mean, rstd
    # One that writes stands (2 lag + 1) teams behind who sums up the same place, which is at least AHEAD programs a multiprocessor.
    lag = min(units, triton.cdiv(max(AHEAD * of(x.device).sms - t.team, 1), 2 * t.team))
    zeros = torch.zeros(2 * units, dtype=torch.int64, device=x.device)  # counters, and words that say nothing yet
    given |= {"units": units, "lag": lag, "count_ptr": zeros, "word_ptr": zeros[units:], "PHASE": (BOTH_AMD if torch.version.hip else BOTH).value}
    _twice[(2 * t.team * (units + lag),)](**given, part_ptr=scratch(x, units * t.team, 2))
    return y, mean, rstd
