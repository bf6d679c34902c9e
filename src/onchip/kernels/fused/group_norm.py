"""GroupNorm and its activation: y = act((x - mean) / sqrt(var + eps) * weight + bias), mean and var of a group of channels of a sample.

A group that fits beside its neighbours in the L2 cache is one program's, which goes over it twice: statistics, then y. Larger groups, and groups
whose channels lie between those of others (channels_last), take three launches a slab of half the L2 cache: mean and square deviations of
shares of channels, their merge (Chan, Golub and LeVeque, 1983), y. Sums are float32, about the mean of a share's first tile.
Bytes moved: the floor, x and y once each; a slab's second reading comes from L2. A sample larger than that is read twice where channels come last.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.curves import activated
from onchip.kernels.fused.group_tile import Tiles, cut, of_channel, place, share_of, slabs, where

# ---- device


@triton.jit
def _group(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, eps, channels, pixels, groups, each,
    ACT: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr,
):  # fmt: skip
    """A whole group of channels that come first."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    first = group % groups * each
    i, p = tl.arange(0, CH)[:, None], tl.arange(0, PIX)[None, :]
    sums = tl.zeros([CH, PIX], tl.float32)
    squares = tl.zeros([CH, PIX], tl.float32)
    size = each * pixels
    inside = (i < each) & (p < pixels)
    x = tl.load(x_ptr + place(n, first + i, p, channels, pixels, False), mask=inside, other=0.0).to(tl.float32)
    about = tl.sum(tl.sum(x, 1, keep_dims=True), 0, keep_dims=True) / (tl.minimum(each, CH) * tl.minimum(pixels, PIX))  # [1, 1]
    for c0 in range(0, each, CH):
        for p0 in range(0, pixels, PIX):
            inside = (c0 + i < each) & (p0 + p < pixels)
            x = tl.load(x_ptr + place(n, first + c0 + i, p0 + p, channels, pixels, False), mask=inside, other=0.0).to(tl.float32)
            x = tl.where(inside, x - about, 0.0)
            sums += x
            squares += x * x
    off = tl.sum(tl.sum(sums, 1, keep_dims=True), 0, keep_dims=True) / size
    square = tl.sum(tl.sum(squares, 1, keep_dims=True), 0, keep_dims=True) / size
    mean = about + off
    rstd = tl.rsqrt(tl.maximum(square - off * off, 0.0) + eps)
    if mean_ptr is not None:
        one = group + tl.zeros([1, 1], tl.int32)
        tl.store(mean_ptr + one, mean)
        tl.store(rstd_ptr + one, rstd)
    for c0 in range(0, each, CH):
        c = first + c0 + i
        there = c0 + i < each
        w = of_channel(w_ptr, c, there, 1.0) * rstd
        b = of_channel(b_ptr, c, there, 0.0)
        for p0 in range(0, pixels, PIX):
            inside = there & (p0 + p < pixels)
            at = place(n, c, p0 + p, channels, pixels, False)
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptr + at, activated((x - mean) * w + b, ACT).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _moments(
    x_ptr, mean_ptr, square_ptr, channels, pixels, first_n, first_c, last_c, share, shares, LAST: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr
):  # fmt: skip
    """Mean and sum of square deviations of a share of the pixels of some channels, [batch, shares, channels]."""
    n, c, s = where(first_n, first_c, last_c, shares, CH)
    begin = s * share
    end = tl.minimum(begin + share, pixels)
    sums = tl.zeros([CH, PIX], tl.float32)
    squares = tl.zeros([CH, PIX], tl.float32)
    about = tl.zeros([CH, 1], tl.float32)
    for p0 in range(begin, end, PIX):
        p = p0 + tl.arange(0, PIX)[None, :]
        inside = (c < last_c) & (p < pixels)
        x = tl.load(x_ptr + place(n, c, p, channels, pixels, LAST), mask=inside, other=0.0).to(tl.float32)
        if p0 == begin:
            about = tl.sum(x, 1, keep_dims=True) / tl.minimum(end - begin, PIX)
        x = tl.where(inside, x - about, 0.0)
        sums += x
        squares += x * x
    off = tl.sum(sums, 1, keep_dims=True) / (end - begin)
    square = tl.maximum(tl.sum(squares, 1, keep_dims=True) - (end - begin) * off * off, 0.0)
    at = (n * shares + s) * channels + c
    tl.store(mean_ptr + at, about + off, mask=c < last_c)
    tl.store(square_ptr + at, square, mask=c < last_c)


@triton.jit
def _merge(
    part_mean_ptr, part_square_ptr, mean_ptr, rstd_ptr, eps, channels, pixels, groups, each, first_n, first_g, slab_groups, share, shares,
    EACH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Statistics of a group from those of its channels' shares."""
    n = (tl.program_id(0) // slab_groups + first_n).to(tl.int64)
    g = tl.program_id(0) % slab_groups + first_g
    s = tl.arange(0, SHARES)[None, :]
    size = (tl.zeros([1, 1], tl.int64) + each) * pixels
    count = tl.where(s < shares, tl.minimum(pixels - s * share, share), 0).to(tl.float32)
    total = tl.zeros([EACH, SHARES], tl.float32)
    for c0 in range(0, each, EACH):
        i = c0 + tl.arange(0, EACH)[:, None]
        total += count * tl.load(part_mean_ptr + (n * shares + s) * channels + g * each + i, mask=(i < each) & (s < shares), other=0.0)
    mean = tl.sum(tl.sum(total, 1, keep_dims=True), 0, keep_dims=True) / size
    total = tl.zeros([EACH, SHARES], tl.float32)
    for c0 in range(0, each, EACH):
        i = c0 + tl.arange(0, EACH)[:, None]
        at, inside = (n * shares + s) * channels + g * each + i, (i < each) & (s < shares)
        off = tl.where(inside, tl.load(part_mean_ptr + at, mask=inside, other=0.0) - mean, 0.0)
        total += tl.load(part_square_ptr + at, mask=inside, other=0.0) + count * off * off
    var = tl.sum(tl.sum(total, 1, keep_dims=True), 0, keep_dims=True) / size
    one = n * groups + g + tl.zeros([1, 1], tl.int64)
    tl.store(mean_ptr + one, mean)
    tl.store(rstd_ptr + one, tl.rsqrt(var + eps))


@triton.jit
def _apply(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, channels, pixels, groups, each, first_n, first_c, last_c, pieces,
    ACT: tl.constexpr, LAST: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr,
):  # fmt: skip
    n, c, piece = where(first_n, first_c, last_c, pieces, CH)
    p = piece * PIX + tl.arange(0, PIX)[None, :]
    there = c < last_c
    inside = there & (p < pixels)
    at = place(n, c, p, channels, pixels, LAST)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + n * groups + c // each, mask=there, other=0.0)
    w = of_channel(w_ptr, c, there, 1.0) * tl.load(rstd_ptr + n * groups + c // each, mask=there, other=0.0)
    y = activated((x - mean) * w + of_channel(b_ptr, c, there, 0.0), ACT)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")  # nobody reads it soon: x stays in L2


# ---- host


def configs(problem: Groups, device: Device) -> list[Tiles]:
    return cut(problem, device, problem.dtype.itemsize)


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
    y, p, last = torch.empty_like(x), problem, problem.layout == "channels_last"
    kept = keep or not config.whole
    stats = tuple(torch.empty((p.batch, p.groups), dtype=torch.float32, device=x.device) if kept else None for _ in range(2))
    if not x.numel():
        return y, *stats
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    sizes = {"channels": p.channels, "pixels": p.pixels}
    of = {"groups": p.groups, "each": p.channels // p.groups}
    tile = {"CH": config.ch, "PIX": config.pix, "num_warps": config.warps}
    if config.whole:
        _group[(p.batch * p.groups,)](x, y, weight, bias, *stats, eps, **sizes, **of, ACT=p.act, **tile)
        return y, *stats
    shares, share = share_of(p.pixels, config)
    part = torch.empty((2, p.batch, shares, p.channels), dtype=torch.float32, device=x.device)
    pieces, each = triton.cdiv(p.pixels, config.pix), of["each"]
    split = {"share": share, "shares": shares}
    block = {"EACH": min(triton.next_power_of_2(each), 16), "SHARES": triton.next_power_of_2(shares), "num_warps": 4}
    for samples, n, c, last_c in slabs(p, config):
        at, blocks = {"first_n": n, "first_c": c, "last_c": last_c}, samples * triton.cdiv(last_c - c, config.ch)
        some = {"first_n": n, "first_g": c // each, "slab_groups": (last_c - c) // each}
        _moments[(blocks * shares,)](x, *part, **sizes, **at, **split, LAST=last, **tile)
        _merge[(samples * some["slab_groups"],)](*part, *stats, eps, **sizes, **of, **some, **split, **block)
        _apply[(blocks * pieces,)](x, y, weight, bias, *stats, **sizes, **of, **at, pieces=pieces, ACT=p.act, LAST=last, **tile)
    return y, *stats
