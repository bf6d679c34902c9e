"""GroupNorm whose channels come last, forward and backward (`group_norm.py` and `group_norm_backward.py` have the formulas).

A program walks down COLS channels of some pixels, and holds nothing of them but sums or, when it writes, what its channels are scaled by. So x (and dy) are
read twice: by programs that sum up, each the parts of groups that lie in its channels, and a little later, from the L2 cache, by those that write, each of
which merges what has been found of its own groups (Chan, Golub and LeVeque, 1983). These wait for programs that a GPU starts before them, and the first for
none, so that there may be any number of them. Forward L2 is told to let y and what is read again go before what has been summed up; backward tiles come by
copies to shared memory, for which Triton has no such hint.
Bytes moved: the floor, each tensor once, as long as the L2 cache keeps what has been summed up until it is read again.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.problem import Groups
from onchip.kernels.fused.group_tile import act_of, of_channel, role, scratch, silu_of, slope_of, wide
from onchip.kernels.fused.norm_tile import both_sums
from onchip.kernels.launch import starts_early
from onchip.kernels.meeting import arrive, wait_for

# ---- device


@triton.jit
def _place(member, channels, pixels, each, share, blocks, COLS: tl.constexpr):
    """(block of channels, first pixel, how many pixels, channels [COLS], which of these there are, the first one's group) of a member."""
    block, begin = member % blocks, member // blocks * share
    own = tl.minimum(share, pixels - begin)
    c = block * COLS + tl.arange(0, COLS)
    return block, begin, own, c, c < channels, block * COLS // each


@triton.jit
def _tile(p, own, c, channels, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """(place behind pixel p, whether it is the program's) of ROWS pixels from p on and the channels c."""
    row = tl.arange(0, ROWS)[:, None]
    if WHOLE:
        inside = tl.full([ROWS, c.shape[0]], 1, tl.int1)
    else:
        inside = (p + row < own) & (c < channels)[None, :]
    return row * channels + c[None, :], inside


@triton.jit
def _held(ptr, p, own, c, channels, ROWS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """TILES tiles of pixels from p on, at which ptr is. KEEP is the hint of how long L2 shall keep them."""
    held = ()
    for k in tl.static_range(TILES):
        at, inside = _tile(p + k * ROWS, own, c, channels, ROWS, WHOLE)
        held += (tl.load(ptr + k * ROWS * channels + at, mask=inside, other=0.0, eviction_policy=KEEP),)
    return held


@triton.jit
def _fold(v, u, c, there, first, each, G: tl.constexpr):
    """Two sums [G] of what channels have, by groups from `first` on."""
    mine = ((c // each - first)[None, :] == tl.arange(0, G)[:, None]) & there[None, :]
    return tl.reduce((tl.where(mine, v[None, :], 0.0), tl.where(mine, u[None, :], 0.0)), 1, both_sums)


@triton.jit
def _parts(first, t, ranges, groups, each, COLS: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """(place, how many channels, whether there is one) [G, S, T] of what ranges t of pixels have told of the G groups from `first` on, of each in the S blocks
    of channels that it may lie in.
    """
    g = first + tl.arange(0, G)[:, None]
    block = g * each // COLS + tl.arange(0, S)[None, :]
    count = tl.minimum(block * COLS + COLS, g * each + each) - tl.maximum(block * COLS, g * each)
    place = (block * G + g - block * COLS // each) * ranges
    inside = ((g < groups) & (count > 0))[:, :, None] & (t < ranges)[None, None, :]
    return place[:, :, None] + t[None, None, :], count[:, :, None], inside


@triton.jit
def _sums(x_ptr, own, c, there, channels, ROWS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr):
    """(the first pixel's number, sums of the others less it, of their squares) of channels; in float32 the first pixels' mean is nearer to the others."""
    if x_ptr.dtype.element_ty == tl.float32:
        at, inside = _tile(0, own, c, channels, ROWS, WHOLE)
        about = tl.sum(tl.load(x_ptr + at, mask=inside, other=0.0), 0) / tl.minimum(own, ROWS)
    else:
        about = tl.load(x_ptr + c, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, c.shape[0]], tl.float32)
    squares = tl.zeros([ROWS, c.shape[0]], tl.float32)
    for p in tl.range(0, own, ROWS * TILES, num_stages=STAGES):
        held = _held(x_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_last")
        for k in tl.static_range(TILES):
            off = wide(held[k], 0, WORDS) - about[None, :]
            if not WHOLE:
                off = tl.where((p + k * ROWS + tl.arange(0, ROWS) < own)[:, None], off, 0.0)
            total += off
            squares += off * off
        x_ptr += ROWS * TILES * channels
    total, squares = tl.reduce((total, squares), 0, both_sums)
    return about, total, squares


@triton.jit
def _merged(mean_ptr, square_ptr, eps, first, pixels, share, ranges, groups, each, COLS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Mean and 1 / deviation [G] of groups, from means and square deviations of their parts."""
    at_0, _, inside_0 = _parts(first, tl.zeros([1], tl.int32), ranges, groups, each, COLS, G, 1)
    about = tl.load(mean_ptr + at_0, mask=inside_0, other=0.0)
    total = tl.zeros([G, S, T], tl.float32)
    squares = tl.zeros([G, S, T], tl.float32)
    for t0 in range(0, ranges, T):
        t = t0 + tl.arange(0, T)
        at, count, inside = _parts(first, t, ranges, groups, each, COLS, G, S)
        n = tl.where(inside, count * tl.minimum(pixels - t * share, share)[None, None, :], 0).to(tl.float32)
        off = tl.load(mean_ptr + at, mask=inside, other=0.0) - about
        squares += tl.load(square_ptr + at, mask=inside, other=0.0) + n * off * off
        total += n * off
    size = (tl.zeros([], tl.float32) + each) * pixels
    mean, square = tl.reduce(tl.reduce((total, squares), 2, both_sums), 1, both_sums)
    mean /= size
    return tl.reshape(about, [G]) + mean, tl.rsqrt(tl.maximum(square / size - mean * mean, 0.0) + eps)


@triton.jit
def _forward_last(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, part_ptr, part_two_ptr, count_ptr, eps,
    channels, pixels, units, groups, each, share, ranges, blocks, lag,
    ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FAR: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    SILU: tl.constexpr = ACT == "silu" and WORDS and not FAR
    team = ranges * blocks
    unit, member, writes = role(team, lag)
    if (unit < 0) | (unit >= units):
        return
    block, begin, own, c, there, first = _place(member, channels, pixels, each, share, blocks, COLS)
    g = first + tl.arange(0, G)
    start = (unit.to(tl.int64) * pixels + begin) * channels
    x_ptr += start
    part_ptr += unit.to(tl.int64) * team * G
    part_two_ptr += unit.to(tl.int64) * team * G
    if writes:
        y_ptr += start
        w, b = of_channel(w_ptr, c, there, 1.0), of_channel(b_ptr, c, there, 0.0)
        wait_for(count_ptr + unit, team)
        mean_g, rstd_g = _merged(part_ptr, part_two_ptr, eps, first, pixels, share, ranges, groups, each, COLS, G, S, T)
        if mean_ptr is not None:
            mine = (begin == 0) & (g < groups) & (g * each >= block * COLS) & (g * each < block * COLS + COLS)
            tl.store(mean_ptr + unit.to(tl.int64) * groups + g, mean_g, mask=mine)
            tl.store(rstd_ptr + unit.to(tl.int64) * groups + g, rstd_g, mask=mine)
        of_c = tl.minimum(c // each - first, G - 1)
        mean = tl.gather(mean_g, of_c, 0)
        w *= tl.gather(rstd_g, of_c, 0)
        if not FAR:  # else the mean goes off first: a product of thousands would be rounded before it does
            b -= mean * w
        if SILU:
            w, b = w * -1.4426950408889634, b * -1.4426950408889634
        for p in tl.range(0, own, ROWS * TILES, num_stages=STAGES):
            held = _held(x_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_first")
            for k in tl.static_range(TILES):
                at_k, inside_k = _tile(p + k * ROWS, own, c, channels, ROWS, WHOLE)
                x = wide(held[k], 0, WORDS)
                if FAR:
                    x -= mean[None, :]
                u = x * w[None, :] + b[None, :]
                y = silu_of(u) if SILU else act_of(u, ACT, not FAR, WORDS)
                tl.store(y_ptr + k * ROWS * channels + at_k, y.to(y_ptr.dtype.element_ty), mask=inside_k, eviction_policy="evict_first")
            x_ptr += ROWS * TILES * channels
            y_ptr += ROWS * TILES * channels
    else:
        about, total, squares = _sums(x_ptr, own, c, there, channels, ROWS, TILES, WHOLE, WORDS, STAGES)
        total /= own
        part, count = _fold(about + total, tl.full([COLS], 1.0, tl.float32), c, there, first, each, G)
        part /= tl.maximum(count, 1.0)
        off = about + total - tl.gather(part, tl.minimum(c // each - first, G - 1), 0)
        square, _ = _fold(tl.maximum(squares - total * total * own, 0.0) + off * off * own, off, c, there, first, each, G)
        tl.store(part_ptr + (block * G + tl.arange(0, G)) * ranges + member // blocks, part)
        tl.store(part_two_ptr + (block * G + tl.arange(0, G)) * ranges + member // blocks, square)
        arrive(count_ptr + unit)


@triton.jit
def _slopes(dy_ptr, x_ptr, mean, w, b, own, c, channels, ACT: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
            WORDS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Sums of du and du x of channels (of du (x - mean) in float32)."""
    QUICK: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    sums = tl.zeros([ROWS, c.shape[0]], tl.float32)
    products = tl.zeros([ROWS, c.shape[0]], tl.float32)
    for p in tl.range(0, own, ROWS * TILES, num_stages=STAGES):
        held_x = _held(x_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_last")
        held_dy = _held(dy_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_last")
        for k in tl.static_range(TILES):
            x, dy = wide(held_x[k], 0, WORDS), wide(held_dy[k], 0, WORDS)
            if not QUICK:
                x -= mean[None, :]
            du = dy * slope_of(x * w[None, :] + b[None, :], ACT, QUICK, WORDS, True)
            sums += du
            products += du * x
        x_ptr += ROWS * TILES * channels
        dy_ptr += ROWS * TILES * channels
    return tl.reduce((sums, products), 0, both_sums)


@triton.jit
def _added(one_ptr, two_ptr, first, ranges, groups, each, COLS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Two sums [G] of groups, from those of their parts."""
    one = tl.zeros([G, S, T], tl.float32)
    two = tl.zeros([G, S, T], tl.float32)
    for t0 in range(0, ranges, T):
        at, _, inside = _parts(first, t0 + tl.arange(0, T), ranges, groups, each, COLS, G, S)
        one += tl.load(one_ptr + at, mask=inside, other=0.0)
        two += tl.load(two_ptr + at, mask=inside, other=0.0)
    return tl.reduce(tl.reduce((one, two), 2, both_sums), 1, both_sums)


@triton.jit
def _backward_last(
    dy_ptr, x_ptr, dx_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, du_ptr, du_hat_ptr, part_ptr, part_two_ptr, count_ptr,
    channels, pixels, units, groups, each, share, ranges, blocks, lag,
    ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    G: tl.constexpr, S: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    QUICK: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    team = ranges * blocks
    unit, member, writes = role(team, lag)
    if (unit < 0) | (unit >= units):
        return
    block, begin, own, c, there, first = _place(member, channels, pixels, each, share, blocks, COLS)
    start = (unit.to(tl.int64) * pixels + begin) * channels
    x_ptr += start
    dy_ptr += start
    part_ptr += unit.to(tl.int64) * team * G
    part_two_ptr += unit.to(tl.int64) * team * G
    at_c = unit.to(tl.int64) * groups + c // each
    mean, rstd = tl.load(mean_ptr + at_c, mask=there, other=0.0), tl.load(rstd_ptr + at_c, mask=there, other=0.0)
    weight = of_channel(w_ptr, c, there, 1.0)
    w, b = weight * rstd, of_channel(b_ptr, c, there, 0.0)
    if QUICK:  # else the mean goes off first
        b -= mean * w
    if writes:
        dx_ptr += start
        wait_for(count_ptr + unit, team)
        one_g, two_g = _added(part_ptr, part_two_ptr, first, ranges, groups, each, COLS, G, S, T)
        size = (tl.zeros([], tl.float32) + each) * pixels
        of_c = tl.minimum(c // each - first, G - 1)
        one, two = tl.gather(one_g, of_c, 0) / size * rstd, tl.gather(two_g, of_c, 0) / size * rstd * rstd
        if QUICK:
            one -= mean * two
        if EARLY:  # of the sums of channels, which wait
            tl.extra.cuda.gdc_launch_dependents()
        for p in tl.range(0, own, ROWS * TILES, num_stages=STAGES):
            held_x = _held(x_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_first")
            held_dy = _held(dy_ptr, p, own, c, channels, ROWS, TILES, WHOLE, "evict_first")
            for k in tl.static_range(TILES):
                at_k, inside_k = _tile(p + k * ROWS, own, c, channels, ROWS, WHOLE)
                x, dy = wide(held_x[k], 0, WORDS), wide(held_dy[k], 0, WORDS)
                if not QUICK:
                    x -= mean[None, :]
                du = dy * slope_of(x * w[None, :] + b[None, :], ACT, QUICK, WORDS, True)
                dx = du * w[None, :] - (x * two[None, :] + one[None, :])
                tl.store(dx_ptr + k * ROWS * channels + at_k, dx.to(dx_ptr.dtype.element_ty), mask=inside_k, eviction_policy="evict_first")
            x_ptr += ROWS * TILES * channels
            dy_ptr += ROWS * TILES * channels
            dx_ptr += ROWS * TILES * channels
    else:
        of_du, of_hat = _slopes(dy_ptr, x_ptr, mean, w, b, own, c, channels, ACT, ROWS, TILES, WHOLE, WORDS, STAGES)
        if QUICK:
            of_hat -= mean * of_du
        of_hat *= rstd
        at = (unit.to(tl.int64) * channels + c) * ranges + begin // share
        tl.store(du_ptr + at, of_du, mask=there)
        tl.store(du_hat_ptr + at, of_hat, mask=there)
        at_g = (block * G + tl.arange(0, G)) * ranges + member // blocks
        told, told_two = _fold(of_du * weight, of_hat * weight, c, there, first, each, G)
        tl.store(part_ptr + at_g, told)
        tl.store(part_two_ptr + at_g, told_two)
        arrive(count_ptr + unit)


# ---- host

COLS = 64  # channels of a program at most: 128 bytes a pixel
PROGRAMS = 10  # that sum up, for each multiprocessor (16x320x64x64: 38.9 us; 5 of twice the pixels 39.8, 20 46.3)
SHARES = (128, 8192)  # pixels of a program: sums about the first of more would cost digits where that one is far from the others
AHEAD = 32  # warps of each multiprocessor that are begun before what they have summed up is read again (backward 62 us; 16 65, 4 67)
TURNS = {"group_norm": (4, 1, 80), "group_norm_backward": (2, 3, 80)}  # tiles a turn, turns on their way, registers of a thread (3 turns 64 us, 1 75)
PARTS = 4096  # numbers that each program which writes would have to merge: from there on programs of 16 warps, a quarter of them (1x128x512x512: 62 us; 75)
FOLD = 256  # numbers that a warp merges at once


class Tiles(NamedTuple):
    """`rows` pixels by `cols` channels at once, `tiles` of them a turn and `stages` turns on their way; `share` pixels a program, `ranges` programs a block of
    channels. `registers` of a thread at most.
    """

    rows: int
    cols: int
    tiles: int
    stages: int
    share: int
    ranges: int
    whole: bool
    warps: int
    registers: int

    def __str__(self):
        return f"{self.tiles} tiles of {self.rows}x{self.cols}, {self.share} pixels a program, {self.warps} warps"


def configs(p: Groups, device: Device) -> list[Tiles]:
    """Programs of four warps, of which about as many sum up as the device holds, or where their parts were too many to merge, of 16 with longer shares."""
    cols = min(COLS, triton.next_power_of_2(p.channels))
    work = p.batch * triton.cdiv(p.channels, cols) * p.pixels
    share = min(max(triton.next_power_of_2(triton.cdiv(work, PROGRAMS * device.sms)), SHARES[0]), SHARES[1])
    many = triton.cdiv(p.pixels, share) * math.prod(_overlap(p, cols)) > PARTS
    return [cut(p, min(4 * share, SHARES[1]), 16) if many else cut(p, share, 4)]


def cut(p: Groups, share: int, warps: int) -> Tiles:
    cols = min(COLS, triton.next_power_of_2(p.channels))
    rows = max(1, warps * 32 * 16 // p.dtype.itemsize // cols)
    share = max(rows, min(share, triton.next_power_of_2(max(1, p.pixels))))
    turn, stages, registers = TURNS[p.op]
    if warps > 4:
        registers = 64
    if p.channels % 16:  # Triton reads such rows number by number
        turn, registers = 2, 168
    tiles = max(1, min(turn, share // rows))
    whole = p.channels % cols == 0 and p.pixels % share == 0 and share % (rows * tiles) == 0
    return Tiles(rows, cols, tiles, stages, share, triton.cdiv(p.pixels, share), whole, warps, registers)


def _overlap(p: Groups, cols: int) -> tuple[int, int]:
    """(how many groups a block of channels may have a part of, how many blocks a group), as powers of two."""
    each = p.channels // p.groups
    if cols >= p.channels:
        return triton.next_power_of_2(p.groups), 1
    return tuple(triton.next_power_of_2(triton.cdiv(a, b) if max(a, b) % min(a, b) == 0 else (a + b - 2) // b + 1) for a, b in ((cols, each), (each, cols)))


def constants(p: Groups, t: Tiles, nvidia: bool) -> dict:
    """What of a launch its code depends on."""
    groups, some = _overlap(p, t.cols)
    given = {"ROWS": t.rows, "COLS": t.cols, "TILES": t.tiles, "STAGES": t.stages, "WHOLE": t.whole, "ACT": p.act, "WORDS": nvidia, "num_warps": t.warps}
    given |= {"G": groups, "S": some, "T": max(1, min(triton.next_power_of_2(t.ranges), FOLD * t.warps // (groups * some)))}
    return given | ({"maxnreg": t.registers} if nvidia else {})


def _launch(kernel, p: Groups, t: Tiles, **given) -> None:
    """`kernel` on contiguous tensors [batch, pixels, channels]."""
    x = given["x_ptr"]
    blocks = triton.cdiv(p.channels, t.cols)
    team = t.ranges * blocks
    # One that writes stands (2 lag + 1) teams behind who sums up the same place, which is at least AHEAD warps a multiprocessor.
    lag = min(p.batch, triton.cdiv(max(AHEAD // t.warps * of(x.device).sms - team, 1), 2 * team))
    given |= constants(p, t, x.is_cuda and torch.version.hip is None)
    part = scratch(x, 2, p.batch * team * given["G"])  # two numbers of each part of a group
    given |= {"part_ptr": part[0], "part_two_ptr": part[1], "count_ptr": torch.zeros(p.batch, dtype=torch.int32, device=x.device)}
    given |= {"channels": p.channels, "pixels": p.pixels, "units": p.batch, "groups": p.groups, "each": p.channels // p.groups}
    kernel[(2 * team * (p.batch + lag),)](**given, share=t.share, ranges=t.ranges, blocks=blocks, lag=lag)


def forward(p: Groups, t: Tiles, x, y, weight, bias, eps: float, mean, rstd) -> None:
    """y, and mean and rstd [batch, groups] where they are kept."""
    _launch(_forward_last, p, t, x_ptr=x, y_ptr=y, w_ptr=weight, b_ptr=bias, mean_ptr=mean, rstd_ptr=rstd, eps=eps)


def backward(p: Groups, t: Tiles, dy, x, dx, weight, bias, mean, rstd, du, du_hat) -> None:
    """dx, and what each range of pixels adds to the gradients of bias and weight, [batch, channels, ranges]."""
    given = {"dy_ptr": dy, "x_ptr": x, "dx_ptr": dx, "w_ptr": weight, "b_ptr": bias, "mean_ptr": mean, "rstd_ptr": rstd, "du_ptr": du, "du_hat_ptr": du_hat}
    _launch(_backward_last, p, t, **given, EARLY=starts_early(x))
