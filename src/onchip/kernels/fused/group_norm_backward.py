"""Gradients of GroupNorm and its activation: with hat = (x - mean) rstd, u = hat weight + bias and du = dy act'(u),

    dbias = sum of du,  dweight = sum of du hat        over samples and pixels
    dx = rstd (du weight - mean(du weight) - hat mean(du weight hat))        means over the group

Cut like the forward pass (`group_norm.py`): the programs of a group hold dy and x in registers, sum up du and du hat, meet, add the sums of all and write
dx, for which they make du again where registers have no room for it. Sums of channels over runs or members and over samples are a second launch's; all in
one order always, so the same bits in every run. Bytes moved: the floor, dy, x and dx once each, as long as a group fits the registers of the GPU.
Where channels come last see `group_last.py`.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Groups
from onchip.kernels.fused import group_last
from onchip.kernels.fused.group_tile import Tiles, arguments, before, first, of_channel, scratch, slope_of, tile, wide
from onchip.kernels.launch import starts_early
from onchip.kernels.meeting import BOTH, FIRST, SECOND, meet, phases

# ---- device


@triton.jit
def _loaded(ptr, at):
    """A tile of `tile`, float32."""
    return tl.load(ptr + at[2], mask=at[3], other=0.0).to(tl.float32)


@triton.jit
def _du(dy, x, mean, w, b, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr):
    """du and x - mean; w is weight / deviation."""
    off = x - mean
    return dy * slope_of(off * w + b, ACT, QUICK, WORDS, False), off


@triton.jit
def _channels(sums, products, w, rstd, du_ptr, du_hat_ptr, run, end):
    """Sums of runs, which are stored, times their channel's weight."""
    of_du, of_hat = tl.sum(sums, 1, keep_dims=True), tl.sum(products, 1, keep_dims=True) * rstd
    tl.store(du_ptr + run, of_du, mask=run < end)
    tl.store(du_hat_ptr + run, of_hat, mask=run < end)
    return of_du * w, of_hat * w


@triton.jit
def _finish(dy, x, du, dx_ptr, w_ptr, b_ptr, mean, rstd, one, two, first_c, each, at, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr):
    """dx of a tile of `tile`; du is made of dy where it is None."""
    c = at[1]
    w = of_channel(w_ptr, first_c + c, c < each, 1.0) * rstd
    if du is None:
        du, off = _du(dy, x, mean, w, of_channel(b_ptr, first_c + c, c < each, 0.0), ACT, QUICK, WORDS)
    else:
        off = x - mean
    tl.store(dx_ptr + at[2], (du * w - one - off * two).to(dx_ptr.dtype.element_ty), mask=at[3])


@triton.jit
def _backward_first(
    dy_ptr, x_ptr, dx_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, du_ptr, du_hat_ptr, part_ptr, part_hat_ptr, count_ptr, pixels, groups, each, pieces, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, HELD: tl.constexpr, STREAM: tl.constexpr, TEAM: tl.constexpr, KEEP: tl.constexpr, WORDS: tl.constexpr,
    PHASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A member's share of a group: runs of channels that come first."""
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    SPAN: tl.constexpr = CUT[2]
    RUN: tl.constexpr = SPAN * COLS
    KEPT: tl.constexpr = KEEP and PHASE == BOTH
    QUICK: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    unit = tl.program_id(0) // team
    member = tl.program_id(0) % team
    runs = each * pieces
    begin = member * share
    end = tl.minimum(begin + share, runs)
    size = (tl.zeros([], tl.int64) + each) * pixels
    start = unit * size + before(begin, pieces, pixels, RUN)
    x_ptr += start
    dy_ptr += start
    dx_ptr += start
    du_ptr += unit.to(tl.int64) * runs
    du_hat_ptr += unit.to(tl.int64) * runs
    held_x = ()
    held_dy = ()
    for k in tl.static_range(HELD):
        _, _, at, inside = tile(begin, end, k, pieces, pixels, CUT)
        held_x += (tl.load(x_ptr + at, mask=inside, other=0.0),)
        held_dy += (tl.load(dy_ptr + at, mask=inside, other=0.0),)
    mean, rstd = tl.load(mean_ptr + unit), tl.load(rstd_ptr + unit)
    first_c = unit % groups * each
    tiles = tl.cdiv(end - begin, ROWS) * SPAN
    if PHASE != SECOND:
        held_du = ()
        along = tl.zeros([ROWS, 1], tl.float32)
        along_hat = tl.zeros([ROWS, 1], tl.float32)
        for turn in tl.static_range(HELD // SPAN):
            at = tile(begin, end, turn * SPAN, pieces, pixels, CUT)
            w, b = of_channel(w_ptr, first_c + at[1], at[1] < each, 1.0), of_channel(b_ptr, first_c + at[1], at[1] < each, 0.0)
            sums = tl.zeros([ROWS, COLS], tl.float32)
            products = tl.zeros([ROWS, COLS], tl.float32)
            for s in tl.static_range(SPAN):
                dy, x = wide(held_dy[turn * SPAN + s], 0, WORDS), wide(held_x[turn * SPAN + s], 0, WORDS)
                du, off = _du(dy, x, mean, w * rstd, b, ACT, QUICK, WORDS)
                if KEPT:
                    held_du += (du,)
                sums += du
                products += du * off
            more, more_hat = _channels(sums, products, w, rstd, du_ptr, du_hat_ptr, at[0], end)
            along += more
            along_hat += more_hat
        if STREAM:
            for turn in tl.range(HELD // SPAN, tiles // SPAN):
                at_n = tile(begin, end, turn * SPAN, pieces, pixels, CUT)
                w_n, b_n = of_channel(w_ptr, first_c + at_n[1], at_n[1] < each, 1.0), of_channel(b_ptr, first_c + at_n[1], at_n[1] < each, 0.0)
                sums_n = tl.zeros([ROWS, COLS], tl.float32)
                products_n = tl.zeros([ROWS, COLS], tl.float32)
                for s in tl.static_range(SPAN):
                    at_s = tile(begin, end, turn * SPAN + s, pieces, pixels, CUT)
                    du_s, off_s = _du(_loaded(dy_ptr, at_s), _loaded(x_ptr, at_s), mean, w_n * rstd, b_n, ACT, QUICK, WORDS)
                    sums_n += du_s
                    products_n += du_s * off_s
                more_n, more_hat_n = _channels(sums_n, products_n, w_n, rstd, du_ptr, du_hat_ptr, at_n[0], end)
                along += more_n
                along_hat += more_hat_n
        one, two = tl.sum(along), tl.sum(along_hat)
        if EARLY:  # of `_totals`, which waits
            tl.extra.cuda.gdc_launch_dependents()
        if TEAM > 1:
            tl.store(part_ptr + unit * team + member, one)
            tl.store(part_hat_ptr + unit * team + member, two)
            meet(count_ptr + unit, team, PHASE)
    if PHASE != FIRST:
        if TEAM > 1:
            t = tl.arange(0, TEAM)
            one = tl.sum(tl.load(part_ptr + unit * team + t, mask=t < team, other=0.0))
            two = tl.sum(tl.load(part_hat_ptr + unit * team + t, mask=t < team, other=0.0))
        one = one / size * rstd
        two = two / size * rstd * rstd
        for k in tl.static_range(HELD):
            at = tile(begin, end, k, pieces, pixels, CUT)
            x = wide(held_x[k], groups >> 31, WORDS)
            dy = wide(held_dy[k], groups >> 31, WORDS)
            _finish(dy, x, held_du[k] if KEPT else None, dx_ptr, w_ptr, b_ptr, mean, rstd, one, two, first_c, each, at, ACT, QUICK, WORDS)
        if STREAM:
            for n in tl.range(HELD, tiles, num_stages=3):
                at_n = tile(begin, end, tiles + HELD - 1 - n, pieces, pixels, CUT)
                _finish(_loaded(dy_ptr, at_n), _loaded(x_ptr, at_n), None, dx_ptr, w_ptr, b_ptr, mean, rstd, one, two, first_c, each, at_n, ACT, QUICK, WORDS)


@triton.jit
def _totals(du_ptr, du_hat_ptr, db_ptr, dw_ptr, batch, channels, parts, PARTS: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr):
    """Sums [channels] of what channels have in samples and parts of them, [batch, channels, parts]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    db = tl.zeros([CHANNELS, PARTS], tl.float32)
    dw = tl.zeros([CHANNELS, PARTS], tl.float32)
    for start in range(0, batch * parts, PARTS):
        i = start + tl.arange(0, PARTS)[None, :]
        at = (i // parts * channels + c).to(tl.int64) * parts + i % parts
        inside = (i < batch * parts) & (c < channels)
        db += tl.load(du_ptr + at, mask=inside, other=0.0)
        dw += tl.load(du_hat_ptr + at, mask=inside, other=0.0)
    tl.store(db_ptr + c, tl.sum(db, 1, keep_dims=True).to(db_ptr.dtype.element_ty), mask=c < channels)
    tl.store(dw_ptr + c, tl.sum(dw, 1, keep_dims=True).to(dw_ptr.dtype.element_ty), mask=c < channels)


# ---- host

KEPT = ((32, 80), (64, 128))  # (numbers of a thread up to, registers), where du stays in them as float32: 16x320x64x64 53 us (61 by 98 registers)
TOTALS = 256  # numbers of a program that adds up channels


def configs(problem: Groups, device: Device) -> list[Tiles | group_last.Tiles]:
    if problem.layout == "channels_last":
        return group_last.configs(problem, device)
    tiles = first(problem, device, 2)
    if _keeps(tiles) and problem.dtype.itemsize == 2:
        tiles = tiles._replace(registers=pick(KEPT, _numbers(tiles)))
    return [tiles]


def _numbers(t: Tiles) -> int:
    """Of a tensor in a thread."""
    return t.held * t.rows * t.cols // (32 * t.warps)


def _streams(t: Tiles) -> bool:
    """Whether a share is more than registers hold."""
    return t.share > t.held // t.span * t.rows


def _keeps(t: Tiles) -> bool:
    """Whether du has room in registers."""
    return not _streams(t) and _numbers(t) <= KEPT[-1][0]


def launch(
    problem: Groups,
    config: Tiles | group_last.Tiles,
    dy: torch.Tensor,  # [batch, channels, pixels] or [batch, pixels, channels], contiguous
    x: torch.Tensor,
    mean: torch.Tensor,  # [batch, groups]
    rstd: torch.Tensor,
    weight: torch.Tensor | None,  # [channels]
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and the gradients of weight and bias in their dtype (x's where there is none)."""
    dx, p, t = torch.empty_like(x), problem, config
    given = next((v.dtype for v in (weight, bias) if v is not None), x.dtype)
    if not x.numel():
        return dx, *torch.zeros((2, p.channels), dtype=given, device=x.device)
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    is_last, early = isinstance(t, group_last.Tiles), starts_early(x)
    runs = t.ranges if is_last else triton.cdiv(p.pixels, t.cols * t.span)
    du, du_hat = scratch(x, 2, p.batch * p.channels * runs)
    if is_last:
        group_last.backward(p, t, dy, x, dx, weight, bias, mean, rstd, du, du_hat)
    else:
        units = p.batch * p.groups
        part = scratch(x, 2, units * t.team)
        call = {"dy_ptr": dy, "x_ptr": x, "dx_ptr": dx, "w_ptr": weight, "b_ptr": bias, "mean_ptr": mean, "rstd_ptr": rstd}
        call |= {"du_ptr": du, "du_hat_ptr": du_hat, "part_ptr": part[0], "part_hat_ptr": part[1], "share": t.share, "team": t.team}
        call["count_ptr"] = torch.zeros(units, dtype=torch.int32, device=x.device) if t.team > 1 else None
        call |= arguments(p, t, x) | {"STREAM": _streams(t), "TEAM": triton.next_power_of_2(t.team), "KEEP": _keeps(t), "EARLY": early}
        for phase in phases(x, t.team, t.warps) if t.team > 1 else (BOTH.value,):
            _backward_first[(units * t.team,)](**call, PHASE=phase)
    grads = torch.empty((2, p.channels), dtype=given, device=x.device)
    wide_parts = min(256, triton.next_power_of_2(p.batch * runs))
    some = min(max(1, TOTALS // wide_parts), triton.next_power_of_2(p.channels))
    _totals[(triton.cdiv(p.channels, some),)](
        du, du_hat, grads[0], grads[1], p.batch, p.channels, runs,
        PARTS=wide_parts, CHANNELS=some, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return dx, grads[1], grads[0]
