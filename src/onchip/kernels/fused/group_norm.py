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
from onchip.kernels.cluster import begin as exchange
from onchip.kernels.cluster import moments
from onchip.kernels.curves import activated
from onchip.kernels.fused.group_tile import Tiles, across, arguments, before, block, first, last, of_channel, quick_sigmoid, scratch, spread, tile, wide
from onchip.kernels.meeting import BOTH, FIRST, SECOND, arrive, gather, phases, publish, wait

# ---- device


@triton.jit
def _y(x, mean, w, b, y_ptr, ACT: tl.constexpr, WORDS: tl.constexpr):
    """w is weight / deviation. Of what is rounded to 16 bits the mean is taken off with the bias, which would cost float32 digits far from 0."""
    if y_ptr.dtype.element_ty.primitive_bitwidth == 32:
        y = activated((x - mean) * w + b, ACT)
    else:
        u = x * w + (b - mean * w)
        if ACT == "silu":
            y = u * quick_sigmoid(u, WORDS)
        else:
            y = activated(u, ACT, QUICK=True)
    return y.to(y_ptr.dtype.element_ty)


@triton.jit
def _forward_first(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, word_ptr, eps, pixels, units, groups, each, pieces, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr, STREAM: tl.constexpr, TEAM: tl.constexpr, STAGES: tl.constexpr, WORDS: tl.constexpr,
    CLUSTER: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A member's shares of one group after another: runs of channels that come first."""
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    SPAN: tl.constexpr = CUT[2]
    RUN: tl.constexpr = SPAN * COLS
    CTAS: tl.constexpr = CUT[4]
    member = tl.program_id(0) % team
    runs = each * pieces
    size = (tl.zeros([], tl.int64) + each) * pixels
    first = before(member * share, pieces, pixels, RUN)
    count = (before(tl.minimum(member * share + share, runs), pieces, pixels, RUN) - first).to(tl.float32)
    tiles = tl.cdiv(tl.minimum(share, runs - member * share), ROWS) * SPAN
    if CTAS > 1:
        box = exchange(3, CTAS, CLUSTER)
        begin = tl.arange(0, CTAS)[:, None] * share
        end = runs
    else:
        begin = member * share
        end = tl.minimum(begin + share, runs)
    for unit in tl.range(tl.program_id(0) // team, units, tl.num_programs(0) // team, num_stages=STAGES):
        start = unit * size + first
        held = ()
        for k in tl.static_range(HELD):
            _, _, at, inside = tile(begin, end, k, pieces, pixels, CUT)
            held += (tl.load(x_ptr + start + at, mask=inside, other=0.0),)
        if PHASE != SECOND:
            # About the mean of the first tile, which costs at most as many roundings as there are tiles.
            if CTAS > 1:
                about = (tl.sum(wide(held[0], groups >> 31, WORDS), 1) / COLS)[:, None]
            else:
                of_tile = before(tl.minimum(begin + ROWS, end), pieces, pixels, RUN) - first if SPAN == 1 else COLS
                about = tl.sum(wide(held[0], groups >> 31, WORDS)) / of_tile
            sums = tl.zeros([ROWS, COLS], tl.float32)
            squares = tl.zeros([ROWS, COLS], tl.float32)
            for k in tl.static_range(HELD):
                _, _, _, inside = tile(begin, end, k, pieces, pixels, CUT)
                off = tl.where(inside, wide(held[k], 0, WORDS) - about, 0.0)
                sums += off
                squares += off * off
            if STREAM:
                for k in tl.range(HELD, tiles, num_stages=3):
                    at_k = tile(begin, end, k, pieces, pixels, CUT)
                    off_k = tl.where(at_k[3], tl.load(x_ptr + start + at_k[2], mask=at_k[3], other=0.0).to(tl.float32) - about, 0.0)
                    sums += off_k
                    squares += off_k * off_k
            if CTAS > 1:
                own = tl.zeros([CTAS], tl.float32) + share * RUN
                off_mean = tl.sum(sums, 1) / own
                square = tl.maximum(tl.sum(squares, 1) - own * off_mean * off_mean, 0.0)
                mean, square = moments(tl.sum(about, 1) + off_mean, square, own, box, CTAS, CLUSTER)
                mean, square = mean[:, None], square[:, None]
            else:
                off_mean = tl.sum(sums) / count
                mean = about + off_mean
                square = tl.maximum(tl.sum(squares) - count * off_mean * off_mean, 0.0)
            if TEAM > 1:
                publish(word_ptr + unit * team + member, mean, square)
        if PHASE != FIRST:
            if TEAM > 1:
                t = tl.minimum(tl.arange(0, TEAM), team - 1)
                means, squares_of = gather(word_ptr + unit * team + t, PHASE)
                counts = before(tl.minimum(t * share + share, runs), pieces, pixels, RUN) - before(t * share, pieces, pixels, RUN)
                counts = tl.where(tl.arange(0, TEAM) < team, counts, 0).to(tl.float32)
                mean = tl.sum(means * counts) / size
                off_t = means - mean
                square = tl.sum(tl.where(counts > 0, squares_of + counts * off_t * off_t, 0.0))
            rstd = tl.rsqrt(square / size + eps)
            if mean_ptr is not None:
                if member == 0:
                    tl.store(mean_ptr + unit + tl.zeros_like(mean).to(tl.int32), mean)
                    tl.store(rstd_ptr + unit + tl.zeros_like(mean).to(tl.int32), rstd)
            first_c = unit % groups * each
            for turn in tl.static_range(HELD // SPAN):
                _, c, _, _ = tile(begin, end, turn * SPAN, pieces, pixels, CUT)
                w = of_channel(w_ptr, first_c + c, c < each, 1.0) * rstd
                b = of_channel(b_ptr, first_c + c, c < each, 0.0)
                for s in tl.static_range(SPAN):
                    _, _, at, inside = tile(begin, end, turn * SPAN + s, pieces, pixels, CUT)
                    y = _y(wide(held[turn * SPAN + s], pixels >> 31, WORDS), mean, w, b, y_ptr, ACT, WORDS)
                    tl.store(y_ptr + start + at, y, mask=inside)
            if STREAM:
                for n in tl.range(HELD, tiles, num_stages=3):
                    at_n = tile(begin, end, tiles + HELD - 1 - n, pieces, pixels, CUT)
                    w_n = of_channel(w_ptr, first_c + at_n[1], at_n[1] < each, 1.0) * rstd
                    b_n = of_channel(b_ptr, first_c + at_n[1], at_n[1] < each, 0.0)
                    x_n = tl.load(x_ptr + start + at_n[2], mask=at_n[3], other=0.0).to(tl.float32)
                    tl.store(y_ptr + start + at_n[2], _y(x_n, mean, w_n, b_n, y_ptr, ACT, WORDS), mask=at_n[3])


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
            about = across(x_ptr, k, channels, CUT)  # the first pixel
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
        if PHASE == BOTH:
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
        spread(table_ptr, rstd, mean, w_ptr, channels, groups, each)
        for k in tl.static_range(BLOCKS):
            w, mean_c, b = across(table_ptr, k, channels, CUT), across(table_ptr + channels, k, channels, CUT), across(b_ptr, k, channels, CUT)
            at, inside = block(0, k, own, channels, CUT)
            tl.store(y_ptr + at, _y(wide(held[k], pixels >> 31, WORDS), mean_c, w, b, y_ptr, ACT, WORDS), mask=inside)
            if STREAM:
                for p in tl.range(ROWS, own, ROWS, num_stages=3):
                    at_p, inside_p = block(p, k, own, channels, CUT)
                    x_p = tl.load(x_ptr + at_p, mask=inside_p, other=0.0).to(tl.float32)
                    tl.store(y_ptr + at_p, _y(x_p, mean_c, w, b, y_ptr, ACT, WORDS), mask=inside_p)


# ---- host


def configs(problem: Groups, device: Device) -> list[Tiles]:
    return [last(problem, device, problem.dtype.itemsize) if problem.layout == "channels_last" else first(problem, device, problem.dtype.itemsize)]


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
    given = {"x_ptr": x, "y_ptr": y, "w_ptr": weight, "b_ptr": bias, "mean_ptr": stats[0], "rstd_ptr": stats[1], "eps": eps, "ACT": p.act}
    given |= arguments(p, t, x, units)
    if is_last:
        part = scratch(x, 2, units * t.team, p.groups)
        given |= {"part_mean_ptr": part[0], "part_square_ptr": part[1]}
        given |= {"own_ptr": scratch(x, units * t.team, 2, p.channels), "table_ptr": scratch(x, units, 2, p.channels)}
    kernel = _forward_last if is_last else _forward_first
    for phase in phases(x) if t.team > 1 else (BOTH.value,):
        kernel[(t.teams(units) * t.team,)](**given, PHASE=phase)
    return y, *stats
