"""Gradients of GroupNorm and its activation: with hat = (x - mean) rstd, u = hat weight + bias and du = dy act'(u),

    dbias = sum of du,  dweight = sum of du hat        over samples and pixels
    dx = rstd (du weight - mean(du weight) - hat mean(du weight hat))        means over the group

Cut like the forward pass (`group_norm.py`): the programs of a unit hold dy and x in registers, sum up du and du hat, meet, add the sums of all and write
dx, for which they make du again where registers have no room for it. Sums of channels over runs or members and over samples are a second launch's; all in
one order always, so the same bits in every run. Bytes moved: the floor, dy, x and dx once each, as long as a unit fits the registers of the GPU.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Groups
from onchip.kernels.curves import slope
from onchip.kernels.fused.group_tile import (
    Tiles,
    across,
    arguments,
    before,
    block,
    first,
    last,
    of_channel,
    partial,
    parts,
    quick_sigmoid,
    scratch,
    spread,
    tile,
    wide,
)
from onchip.kernels.meeting import BOTH, FIRST, SECOND, meet, phases

# ---- device


@triton.jit
def _loaded(ptr, at):
    """A tile of `tile`, float32."""
    return tl.load(ptr + at[2], mask=at[3], other=0.0).to(tl.float32)


@triton.jit
def _slope(u, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr):
    if QUICK and ACT == "silu":
        s = quick_sigmoid(u, WORDS)
        result = s * (1 + u * (1 - s))
    else:
        result = slope(u, ACT, QUICK=QUICK)
    return result


@triton.jit
def _du(dy, x, mean, w, b, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr):
    """du and x - mean; w is weight / deviation."""
    off = x - mean
    return dy * _slope(off * w + b, ACT, QUICK, WORDS), off


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
    PHASE: tl.constexpr,
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
def _backward_last(
    dy_ptr, x_ptr, dx_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, du_ptr, du_hat_ptr, own_ptr, table_ptr, part_ptr, part_hat_ptr, count_ptr,
    channels, pixels, groups, each, share, team,
    ACT: tl.constexpr, CUT: tl.constexpr, PARTS: tl.constexpr, STREAM: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, WORDS: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """A member's share of a sample: pixels with all their channels, which come last."""
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    BLOCKS: tl.constexpr = CUT[2]
    COUNT: tl.constexpr = PARTS[0]
    QUICK: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    unit = tl.program_id(0) // team
    member = tl.program_id(0) % team
    begin = member * share
    own = tl.minimum(share, pixels - begin)  # pixels
    start = (unit.to(tl.int64) * pixels + begin) * channels
    x_ptr += start
    dy_ptr += start
    dx_ptr += start
    held_x = ()
    held_dy = ()
    for k in tl.static_range(BLOCKS):
        at, inside = block(0, k, own, channels, CUT)
        held_x += (tl.load(x_ptr + at, mask=inside, other=0.0),)
        held_dy += (tl.load(dy_ptr + at, mask=inside, other=0.0),)
    g = tl.arange(0, GROUPS)
    mean = tl.load(mean_ptr + unit * groups + g, mask=g < groups, other=0.0)
    rstd = tl.load(rstd_ptr + unit * groups + g, mask=g < groups, other=0.0)
    table_ptr += unit.to(tl.int64) * channels * 4
    spread(table_ptr, rstd, mean * rstd, w_ptr, b_ptr, channels, groups, each)
    if PHASE != SECOND:
        own_ptr += tl.program_id(0).to(tl.int64) * channels * (2 * COUNT)
        part = tl.arange(0, COUNT)[:, None]
        for k in tl.static_range(BLOCKS):
            w, b = across(table_ptr, k, channels, CUT), across(table_ptr + channels, k, channels, CUT)
            x = wide(held_x[k], 0, WORDS)
            du = wide(held_dy[k], 0, WORDS) * _slope(x * w + b, ACT, QUICK, WORDS)
            if STREAM:
                sums = du
                products = du * x
                for p in tl.range(ROWS, own, ROWS, num_stages=3):
                    at_p, inside_p = block(p, k, own, channels, CUT)
                    x_p = tl.load(x_ptr + at_p, mask=inside_p, other=0.0).to(tl.float32)
                    du_p = tl.load(dy_ptr + at_p, mask=inside_p, other=0.0).to(tl.float32) * _slope(x_p * w + b, ACT, QUICK, WORDS)
                    sums += du_p
                    products += du_p * x_p
                of_du, of_x = partial(sums, PARTS), partial(products, PARTS)
            else:
                of_du, of_x = partial(du, PARTS), partial(du * x, PARTS)
            c = k * COLS + tl.arange(0, COLS)[None, :]
            tl.store(own_ptr + part * channels + c, of_du, mask=c < channels)
            tl.store(own_ptr + (COUNT + part) * channels + c, of_x, mask=c < channels)
        tl.debug_barrier()
        i = tl.arange(0, EACH)[None, :]
        inside_g = (i < each) & (g[:, None] < groups)
        of_c = g[:, None] * each + i
        sum_du = tl.zeros([GROUPS, EACH], tl.float32)
        sum_x = tl.zeros([GROUPS, EACH], tl.float32)
        for n in tl.static_range(COUNT):
            sum_du += tl.load(own_ptr + n * channels + of_c, mask=inside_g, other=0.0)
            sum_x += tl.load(own_ptr + (COUNT + n) * channels + of_c, mask=inside_g, other=0.0)
        sum_hat = (sum_x - mean[:, None] * sum_du) * rstd[:, None]
        at_c = (unit.to(tl.int64) * channels + of_c) * team + member
        tl.store(du_ptr + at_c, sum_du, mask=inside_g)
        tl.store(du_hat_ptr + at_c, sum_hat, mask=inside_g)
        weight = of_channel(w_ptr, of_c, inside_g, 1.0)
        at_g = tl.program_id(0).to(tl.int64) * groups + g
        tl.store(part_ptr + at_g, tl.sum(tl.where(inside_g, sum_du * weight, 0.0), 1), mask=g < groups)
        tl.store(part_hat_ptr + at_g, tl.sum(tl.where(inside_g, sum_hat * weight, 0.0), 1), mask=g < groups)
        meet(count_ptr + unit, team, PHASE)
    if PHASE != FIRST:
        size = pixels.to(tl.float32) * each
        part = unit.to(tl.int64) * team * groups
        one = _added(part_ptr + part, groups, team, GROUPS) / size * rstd
        two = _added(part_hat_ptr + part, groups, team, GROUPS) / size * rstd * rstd
        spread(table_ptr + 2 * channels, two, mean * two - one, None, None, channels, groups, each)
        for k in tl.static_range(BLOCKS):
            w_2, b_2 = across(table_ptr, k, channels, CUT), across(table_ptr + channels, k, channels, CUT)
            two_c, one_c = across(table_ptr + 2 * channels, k, channels, CUT), across(table_ptr + 3 * channels, k, channels, CUT)
            at_2, inside_2 = block(0, k, own, channels, CUT)
            x_2 = wide(held_x[k], groups >> 31, WORDS)
            du_2 = wide(held_dy[k], groups >> 31, WORDS) * _slope(x_2 * w_2 + b_2, ACT, QUICK, WORDS)
            tl.store(dx_ptr + at_2, (du_2 * w_2 - (x_2 * two_c + one_c)).to(dx_ptr.dtype.element_ty), mask=inside_2)
            if STREAM:
                for p in tl.range(ROWS, own, ROWS, num_stages=3):
                    at_q, inside_q = block(p, k, own, channels, CUT)
                    x_q = tl.load(x_ptr + at_q, mask=inside_q, other=0.0).to(tl.float32)
                    du_q = tl.load(dy_ptr + at_q, mask=inside_q, other=0.0).to(tl.float32) * _slope(x_q * w_2 + b_2, ACT, QUICK, WORDS)
                    tl.store(dx_ptr + at_q, (du_q * w_2 - (x_q * two_c + one_c)).to(dx_ptr.dtype.element_ty), mask=inside_q)


@triton.jit
def _added(part_ptr, groups, team, GROUPS: tl.constexpr):
    """Sums of a sample's groups over its members, [GROUPS]."""
    TEAM: tl.constexpr = 4096 // GROUPS if GROUPS < 256 else 16
    g = tl.arange(0, GROUPS)[None, :]
    total = tl.zeros([TEAM, GROUPS], tl.float32)
    for t0 in range(0, team, TEAM):
        t = t0 + tl.arange(0, TEAM)[:, None]
        total += tl.load(part_ptr + t * groups + g, mask=(t < team) & (g < groups), other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _totals(du_ptr, du_hat_ptr, db_ptr, dw_ptr, batch, channels, parts, PARTS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums [channels] of what channels have in samples and parts of them, [batch, channels, parts]."""
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


def configs(problem: Groups, device: Device) -> list[Tiles]:
    if problem.layout == "channels_last":
        return [last(problem, device, 2)]
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
    config: Tiles,
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
    is_last = p.layout == "channels_last"
    units = p.batch if is_last else p.batch * p.groups
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    call = {"dy_ptr": dy, "x_ptr": x, "dx_ptr": dx, "w_ptr": weight, "b_ptr": bias, "mean_ptr": mean, "rstd_ptr": rstd}
    call |= arguments(p, t, x) | {"share": t.share, "team": t.team, "STREAM": t.share > t.rows if is_last else _streams(t)}
    call["count_ptr"] = torch.zeros(units, dtype=torch.int32, device=x.device) if is_last or t.team > 1 else None
    runs = t.team if is_last else call["pieces"]
    du, du_hat = scratch(x, 2, p.batch * p.channels * runs)
    part = scratch(x, 2, units * t.team, p.groups if is_last else 1)
    call |= {"du_ptr": du, "du_hat_ptr": du_hat, "part_ptr": part[0], "part_hat_ptr": part[1]}
    if is_last:
        call |= {"own_ptr": scratch(x, units * t.team, 2 * parts(p, t)[0], p.channels), "table_ptr": scratch(x, units, 4, p.channels)}
        call["PARTS"] = parts(p, t)
    else:
        call |= {"TEAM": triton.next_power_of_2(t.team), "KEEP": _keeps(t)}
    kernel = _backward_last if is_last else _backward_first
    for phase in phases(x, t.team, t.warps) if t.team > 1 else (BOTH.value,):
        kernel[(units * t.team,)](**call, PHASE=phase)
    grads = torch.empty((2, p.channels), dtype=given, device=x.device)
    wide_parts = min(256, triton.next_power_of_2(p.batch * runs))
    some = min(max(1, TOTALS // wide_parts), triton.next_power_of_2(p.channels))
    _totals[(triton.cdiv(p.channels, some),)](du, du_hat, grads[0], grads[1], p.batch, p.channels, runs, PARTS=wide_parts, CHANNELS=some, num_warps=4)
    return dx, grads[1], grads[0]
