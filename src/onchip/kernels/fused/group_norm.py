"""GroupNorm and its activation: y = act((x - mean) / sqrt(var + eps) * weight + bias), mean and var of a group of channels of a sample.

The programs of a unit (`group_tile.py`) hold x in registers, take the mean and the square deviations of what they have, meet, merge those of all (Chan,
Golub and LeVeque, 1983) and write y. Where channels come last, a program's channels are summed up alone, then folded into groups.
Bytes moved: the floor, x and y once each, as long as a unit fits the registers of the GPU.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.curves import activated
from onchip.kernels.fused.group_tile import Tiles, across, arguments, before, block, first, last, of_channel, quick_sigmoid, scratch, spread, tile, wide
from onchip.kernels.meeting import BOTH, FIRST, SECOND, arrive, phases, wait

# ---- device


@triton.jit
def _off(x_ptr, mean, at):
    """x less the mean of a tile of `tile`, 0 outside."""
    return tl.where(at[3], tl.load(x_ptr + at[2], mask=at[3], other=0.0).to(tl.float32) - mean, 0.0)


@triton.jit
def _finish(x, y_ptr, w_ptr, b_ptr, mean, rstd, first_c, each, at, ACT: tl.constexpr):
    """y of a tile of `tile`."""
    c = at[1]
    w = of_channel(w_ptr, first_c + c, c < each, 1.0) * rstd
    y = activated((x - mean) * w + of_channel(b_ptr, first_c + c, c < each, 0.0), ACT, QUICK=y_ptr.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(y_ptr + at[2], y.to(y_ptr.dtype.element_ty), mask=at[3])


@triton.jit
def _forward_first(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, part_mean_ptr, part_square_ptr, count_ptr, eps, pixels, groups, each, pieces, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr, STREAM: tl.constexpr, TEAM: tl.constexpr, WORDS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A member's share of a group: runs of channels that come first."""
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    unit = tl.program_id(0) // team
    member = tl.program_id(0) % team
    runs = each * pieces
    begin = member * share
    end = tl.minimum(begin + share, runs)
    size = (tl.zeros([], tl.int64) + each) * pixels
    first = before(begin, pieces, pixels, COLS)
    x_ptr += unit * size + first
    y_ptr += unit * size + first
    held = ()
    for k in tl.static_range(HELD):
        _, _, at, inside = tile(begin, end, k, pieces, pixels, CUT)
        held += (tl.load(x_ptr + at, mask=inside, other=0.0),)
    tiles = tl.cdiv(end - begin, ROWS)
    if PHASE != SECOND:
        total = tl.zeros([ROWS, COLS], tl.float32)
        for k in tl.static_range(HELD):
            total += wide(held[k], 0, WORDS)
        mean = tl.sum(total) / (before(tl.minimum(begin + ROWS * HELD, end), pieces, pixels, COLS) - first)
        squares = tl.zeros([ROWS, COLS], tl.float32)
        for k in tl.static_range(HELD):
            _, _, _, inside = tile(begin, end, k, pieces, pixels, CUT)
            off = tl.where(inside, wide(held[k], groups >> 31, WORDS) - mean, 0.0)
            squares += off * off
        if STREAM:
            sums = tl.zeros([ROWS, COLS], tl.float32)
            for k in tl.range(HELD, tiles, num_stages=3):
                more = _off(x_ptr, mean, tile(begin, end, k, pieces, pixels, CUT))
                sums += more
                squares += more * more
            count = before(end, pieces, pixels, COLS) - first
            off_mean = tl.sum(sums) / count
            mean += off_mean
            square = tl.sum(squares) - count * off_mean * off_mean
        else:
            square = tl.sum(squares)
        if TEAM > 1:
            tl.store(part_mean_ptr + unit * team + member, mean)
            tl.store(part_square_ptr + unit * team + member, square)
            if PHASE != FIRST:
                arrive(count_ptr + unit)
                wait(count_ptr + unit, team)
    if PHASE != FIRST:
        if TEAM > 1:
            t = tl.arange(0, TEAM)
            means = tl.load(part_mean_ptr + unit * team + t, mask=t < team, other=0.0)
            squares_of = tl.load(part_square_ptr + unit * team + t, mask=t < team, other=0.0)
            a, b = tl.minimum(t * share, runs), tl.minimum(t * share + share, runs)
            counts = (before(b, pieces, pixels, COLS) - before(a, pieces, pixels, COLS)).to(tl.float32)
            mean = tl.sum(means * counts) / size
            square = tl.sum(squares_of + counts * (means - mean) * (means - mean))
        rstd = tl.rsqrt(square / size + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + unit, mean, mask=member == 0)
            tl.store(rstd_ptr + unit, rstd, mask=member == 0)
        first_c = unit % groups * each
        for k in tl.static_range(HELD):
            at = tile(begin, end, k, pieces, pixels, CUT)
            _finish(wide(held[k], pixels >> 31, WORDS), y_ptr, w_ptr, b_ptr, mean, rstd, first_c, each, at, ACT)
        if STREAM:
            for n in tl.range(HELD, tiles, num_stages=3):
                at_n = tile(begin, end, tiles + HELD - 1 - n, pieces, pixels, CUT)
                x = tl.load(x_ptr + at_n[2], mask=at_n[3], other=0.0).to(tl.float32)
                _finish(x, y_ptr, w_ptr, b_ptr, mean, rstd, first_c, each, at_n, ACT)


@triton.jit
def _y(x, w, b, y_ptr, ACT: tl.constexpr, WORDS: tl.constexpr):
    """w is weight / deviation, b the bias less the mean times w."""
    u = x * w + b
    if y_ptr.dtype.element_ty.primitive_bitwidth == 32:
        u = activated(u, ACT)
    elif ACT == "silu":
        u = u * quick_sigmoid(u, WORDS)
    else:
        u = activated(u, ACT, QUICK=True)
    return u.to(y_ptr.dtype.element_ty)


@triton.jit
def _merged(mean_ptr, square_ptr, groups, each, pixels, share, team, GROUPS: tl.constexpr):
    """Mean and square deviations of a sample's groups from those of its members, [GROUPS]."""
    TEAM: tl.constexpr = 4096 // GROUPS if GROUPS < 256 else 16
    g = tl.arange(0, GROUPS)[None, :]
    about = tl.load(mean_ptr + g, mask=g < groups, other=0.0)
    total = tl.zeros([TEAM, GROUPS], tl.float32)
    squares = tl.zeros([TEAM, GROUPS], tl.float32)
    for t0 in range(0, team, TEAM):
        t = t0 + tl.arange(0, TEAM)[:, None]
        inside = (t < team) & (g < groups)
        count = tl.minimum(pixels - t * share, share).to(tl.float32)
        off = tl.where(inside, tl.load(mean_ptr + t * groups + g, mask=inside, other=0.0) - about, 0.0)
        total += count * off
        squares += tl.load(square_ptr + t * groups + g, mask=inside, other=0.0) + count * each * off * off
    off = tl.sum(total, 0) / pixels
    square = tl.maximum(tl.sum(squares, 0) - (pixels.to(tl.float32) * each) * off * off, 0.0)
    return tl.sum(about, 0) + off, square


@triton.jit
def _forward_last(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, own_ptr, table_ptr, part_mean_ptr, part_square_ptr, count_ptr, eps,
    channels, pixels, groups, each, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, STREAM: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, WORDS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A member's share of a sample: pixels with all their channels, which come last."""
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    BLOCKS: tl.constexpr = CUT[2]
    unit = tl.program_id(0) // team
    member = tl.program_id(0) % team
    begin = member * share
    own = tl.minimum(share, pixels - begin)  # pixels
    start = (unit.to(tl.int64) * pixels + begin) * channels
    x_ptr += start
    y_ptr += start
    held = ()
    for k in tl.static_range(BLOCKS):
        at, inside = block(0, k, own, channels, CUT)
        held += (tl.load(x_ptr + at, mask=inside, other=0.0),)
    g = tl.arange(0, GROUPS)
    if PHASE != SECOND:
        own_ptr += tl.program_id(0).to(tl.int64) * channels * 2
        for k in tl.static_range(BLOCKS):
            about = across(x_ptr, k, channels, CUT).to(tl.float32)  # the first pixel
            _, inside = block(0, k, own, channels, CUT)
            off = tl.where(inside, wide(held[k], 0, WORDS) - about, 0.0)
            if STREAM:
                sums = off
                squares = off * off
                for p in tl.range(ROWS, own, ROWS, num_stages=3):
                    at_p, inside_p = block(p, k, own, channels, CUT)
                    off_p = tl.where(inside_p, tl.load(x_ptr + at_p, mask=inside_p, other=0.0).to(tl.float32) - about, 0.0)
                    sums += off_p
                    squares += off_p * off_p
                off_c = tl.sum(sums, 0, keep_dims=True) / own
                square_c = tl.sum(squares, 0, keep_dims=True)
            else:
                off_c = tl.sum(off, 0, keep_dims=True) / own
                square_c = tl.sum(off * off, 0, keep_dims=True)
            c = k * COLS + tl.arange(0, COLS)[None, :]
            tl.store(own_ptr + c, about + off_c, mask=c < channels)
            tl.store(own_ptr + channels + c, tl.maximum(square_c - own * off_c * off_c, 0.0), mask=c < channels)
        tl.debug_barrier()
        i = tl.arange(0, EACH)[None, :]
        inside_g = (i < each) & (g[:, None] < groups)
        means = tl.load(own_ptr + g[:, None] * each + i, mask=inside_g, other=0.0)
        square = tl.load(own_ptr + channels + g[:, None] * each + i, mask=inside_g, other=0.0)
        mean = tl.sum(means, 1) / each
        off_g = tl.where(inside_g, means - mean[:, None], 0.0)
        square = tl.sum(square + own * off_g * off_g, 1)
        at_g = tl.program_id(0).to(tl.int64) * groups + g
        tl.store(part_mean_ptr + at_g, mean, mask=g < groups)
        tl.store(part_square_ptr + at_g, square, mask=g < groups)
        if PHASE != FIRST:
            arrive(count_ptr + unit)
            wait(count_ptr + unit, team)
    if PHASE != FIRST:
        first = unit.to(tl.int64) * team * groups
        mean, square = _merged(part_mean_ptr + first, part_square_ptr + first, groups, each, pixels, share, team, GROUPS)
        rstd = tl.rsqrt(square / (pixels.to(tl.float32) * each) + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + unit * groups + g, mean, mask=(g < groups) & (member == 0))
            tl.store(rstd_ptr + unit * groups + g, rstd, mask=(g < groups) & (member == 0))
        table_ptr += unit.to(tl.int64) * channels * 2
        spread(table_ptr, rstd, mean * rstd, w_ptr, b_ptr, channels, groups, each)
        for k in tl.static_range(BLOCKS):
            w, b = across(table_ptr, k, channels, CUT), across(table_ptr + channels, k, channels, CUT)
            at, inside = block(0, k, own, channels, CUT)
            tl.store(y_ptr + at, _y(wide(held[k], pixels >> 31, WORDS), w, b, y_ptr, ACT, WORDS), mask=inside)
            if STREAM:
                for p in tl.range(ROWS, own, ROWS, num_stages=3):
                    at_p, inside_p = block(p, k, own, channels, CUT)
                    x_p = tl.load(x_ptr + at_p, mask=inside_p, other=0.0).to(tl.float32)
                    tl.store(y_ptr + at_p, _y(x_p, w, b, y_ptr, ACT, WORDS), mask=inside_p)


# ---- host


def configs(problem: Groups, device: Device) -> list[Tiles]:
    return [(last if problem.layout == "channels_last" else first)(problem, device, 1)]


def launch(
    problem: Groups,
    config: Tiles,
    x: torch.Tensor,  # [batch, channels, pixels] or [batch, pixels, channels], contiguous
    weight: torch.Tensor | None,  # [channels]
    bias: torch.Tensor | None,
    eps: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """y, and the groups' mean and 1 / deviation, float32 [batch, groups], if they are to be kept."""
    y, p, t = torch.empty_like(x), problem, config
    is_last = p.layout == "channels_last"
    stats = tuple(scratch(x, p.batch, p.groups) if keep else None for _ in range(2))
    if not x.numel():
        return y, *stats
    units = p.batch if is_last else p.batch * p.groups
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    given = {"x_ptr": x, "y_ptr": y, "w_ptr": weight, "b_ptr": bias, "mean_ptr": stats[0], "rstd_ptr": stats[1], "eps": eps}
    given |= arguments(p, t, x, units)
    part = scratch(x, 2, units * t.team, p.groups if is_last else 1)
    given |= {"part_mean_ptr": part[0], "part_square_ptr": part[1]}
    if is_last:
        given |= {"own_ptr": scratch(x, units * t.team, 2, p.channels), "table_ptr": scratch(x, units, 2, p.channels)}
    kernel = _forward_last if is_last else _forward_first
    for phase in phases(x, t.team, t.warps) if t.team > 1 else (BOTH.value,):
        kernel[(units * t.team,)](**given, PHASE=phase)
    return y, *stats
