"""Gradients of GroupNorm and its activation: with hat = (x - mean) rstd, u = hat weight + bias and du = dy act'(u),

    dbias = sum of du,  dweight = sum of du hat        over samples and pixels
    dx = rstd (du weight - mean(du weight) - hat mean(du weight hat))        means over the group

Cut like the forward pass (`group_norm.py`): a program for a whole group, or for a slab of half the L2 cache three launches: sums of du and du hat of
shares of channels, their sum for channels and groups, dx. Sums over samples come last; all in one order always, so the same bits in every run.
Bytes moved: the floor, dy, x and dx once each; a slab's second reading comes from L2.
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.curves import slope
from onchip.kernels.fused.group_tile import Tiles, cut, of_channel, place, share_of, slabs, where
from onchip.kernels.fused.norm_tile import sum_partials

TILE = 4096  # elements of a program of 8 warps: dy and x beside two sums

# ---- device


@triton.jit
def _inner(dy_ptr, x_ptr, at, inside, mean, rstd, w, b, ACT: tl.constexpr):
    """du and hat of a tile, 0 outside."""
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    hat = tl.where(inside, (x - mean) * rstd, 0.0)
    return dy * slope(hat * w + b, ACT), hat


@triton.jit
def _group(
    dy_ptr, x_ptr, dx_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, du_ptr, du_hat_ptr, channels, pixels, groups, each,
    ACT: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr,
):  # fmt: skip
    """A whole group of channels that come first; the channels' sums are written to du and du_hat [batch, channels]."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    first = group % groups * each
    i, p = tl.arange(0, CH)[:, None], tl.arange(0, PIX)[None, :]
    mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
    first_sum = tl.zeros([CH, 1], tl.float32)
    second_sum = tl.zeros([CH, 1], tl.float32)
    for c0 in range(0, each, CH):
        c = first + c0 + i
        there = c0 + i < each
        w, b = of_channel(w_ptr, c, there, 1.0), of_channel(b_ptr, c, there, 0.0)
        sums = tl.zeros([CH, PIX], tl.float32)
        products = tl.zeros([CH, PIX], tl.float32)
        for p0 in range(0, pixels, PIX):
            at = place(n, c, p0 + p, channels, pixels, False)
            du, hat = _inner(dy_ptr, x_ptr, at, there & (p0 + p < pixels), mean, rstd, w, b, ACT)
            sums += du
            products += du * hat
        of_du, of_hat = tl.sum(sums, 1, keep_dims=True), tl.sum(products, 1, keep_dims=True)
        tl.store(du_ptr + n * channels + c, of_du, mask=there)
        tl.store(du_hat_ptr + n * channels + c, of_hat, mask=there)
        first_sum += tl.where(there, of_du * w, 0.0)
        second_sum += tl.where(there, of_hat * w, 0.0)
    along = tl.sum(first_sum, 0, keep_dims=True) / (each * pixels)
    along_hat = tl.sum(second_sum, 0, keep_dims=True) / (each * pixels)
    for c0 in range(0, each, CH):
        c = first + c0 + i
        there = c0 + i < each
        w, b = of_channel(w_ptr, c, there, 1.0), of_channel(b_ptr, c, there, 0.0)
        for p0 in range(0, pixels, PIX):
            inside = there & (p0 + p < pixels)
            at = place(n, c, p0 + p, channels, pixels, False)
            du, hat = _inner(dy_ptr, x_ptr, at, inside, mean, rstd, w, b, ACT)
            tl.store(dx_ptr + at, (rstd * (du * w - along - hat * along_hat)).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, part_du_ptr, part_hat_ptr, channels, pixels, groups, each, first_n, first_c, last_c, share, shares,
    ACT: tl.constexpr, LAST: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr,
):  # fmt: skip
    """Sums of du and du hat over a share of the pixels of some channels, [batch, shares, channels]."""
    n, c, s = where(first_n, first_c, last_c, shares, CH)
    there = c < last_c
    mean = tl.load(mean_ptr + n * groups + c // each, mask=there, other=0.0)
    rstd = tl.load(rstd_ptr + n * groups + c // each, mask=there, other=0.0)
    w, b = of_channel(w_ptr, c, there, 1.0), of_channel(b_ptr, c, there, 0.0)
    sums = tl.zeros([CH, PIX], tl.float32)
    products = tl.zeros([CH, PIX], tl.float32)
    for p0 in range(s * share, tl.minimum(s * share + share, pixels), PIX):
        p = p0 + tl.arange(0, PIX)[None, :]
        du, hat = _inner(dy_ptr, x_ptr, place(n, c, p, channels, pixels, LAST), there & (p < pixels), mean, rstd, w, b, ACT)
        sums += du
        products += du * hat
    at = (n * shares + s) * channels + c
    tl.store(part_du_ptr + at, tl.sum(sums, 1, keep_dims=True), mask=there)
    tl.store(part_hat_ptr + at, tl.sum(products, 1, keep_dims=True), mask=there)


@triton.jit
def _merge(
    part_du_ptr, part_hat_ptr, w_ptr, du_ptr, du_hat_ptr, along_ptr, along_hat_ptr, channels, pixels, groups, each, first_n, first_g, slab_groups, shares,
    EACH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Sums of shares: of channels, [batch, channels], and with the weights of groups, divided by their size, [batch, groups]."""
    n = (tl.program_id(0) // slab_groups + first_n).to(tl.int64)
    g = tl.program_id(0) % slab_groups + first_g
    s = tl.arange(0, SHARES)[None, :]
    size = (tl.zeros([1, 1], tl.int64) + each) * pixels
    first_sum = tl.zeros([EACH, 1], tl.float32)
    second_sum = tl.zeros([EACH, 1], tl.float32)
    for c0 in range(0, each, EACH):
        c = g * each + c0 + tl.arange(0, EACH)[:, None]
        there = c < g * each + each
        at, inside = (n * shares + s) * channels + c, there & (s < shares)
        du = tl.sum(tl.load(part_du_ptr + at, mask=inside, other=0.0), 1, keep_dims=True)
        du_hat = tl.sum(tl.load(part_hat_ptr + at, mask=inside, other=0.0), 1, keep_dims=True)
        tl.store(du_ptr + n * channels + c, du, mask=there)
        tl.store(du_hat_ptr + n * channels + c, du_hat, mask=there)
        w = of_channel(w_ptr, c, there, 1.0)
        first_sum += tl.where(there, du * w, 0.0)
        second_sum += tl.where(there, du_hat * w, 0.0)
    one = n * groups + g + tl.zeros([1, 1], tl.int64)
    tl.store(along_ptr + one, tl.sum(first_sum, 0, keep_dims=True) / size)
    tl.store(along_hat_ptr + one, tl.sum(second_sum, 0, keep_dims=True) / size)


@triton.jit
def _apply(
    dy_ptr, x_ptr, dx_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, along_ptr, along_hat_ptr, channels, pixels, groups, each, first_n, first_c, last_c, pieces,
    ACT: tl.constexpr, LAST: tl.constexpr, CH: tl.constexpr, PIX: tl.constexpr,
):  # fmt: skip
    n, c, piece = where(first_n, first_c, last_c, pieces, CH)
    p = piece * PIX + tl.arange(0, PIX)[None, :]
    there = c < last_c
    inside = there & (p < pixels)
    g = n * groups + c // each
    mean, rstd = tl.load(mean_ptr + g, mask=there, other=0.0), tl.load(rstd_ptr + g, mask=there, other=0.0)
    along, along_hat = tl.load(along_ptr + g, mask=there, other=0.0), tl.load(along_hat_ptr + g, mask=there, other=0.0)
    w, b = of_channel(w_ptr, c, there, 1.0), of_channel(b_ptr, c, there, 0.0)
    at = place(n, c, p, channels, pixels, LAST)
    du, hat = _inner(dy_ptr, x_ptr, at, inside, mean, rstd, w, b, ACT)
    dx = rstd * (du * w - along - hat * along_hat)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")  # nobody reads it soon: dy and x stay in L2


# ---- host


def configs(problem: Groups, device: Device) -> list[Tiles]:
    return cut(problem, device, 2 * problem.dtype.itemsize, TILE)


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
    p, last = problem, problem.layout == "channels_last"
    dx = torch.empty_like(x)
    sums = torch.empty((2, p.batch, p.channels), dtype=torch.float32, device=x.device)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    given = next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
    if not x.numel():
        return dx, *torch.zeros((2, p.channels), dtype=given, device=x.device)
    sizes = {"channels": p.channels, "pixels": p.pixels, "groups": p.groups, "each": p.channels // p.groups}
    tile = {"ACT": p.act, "CH": config.ch, "PIX": config.pix, "num_warps": config.warps}
    if config.whole:
        _group[(p.batch * p.groups,)](dy, x, dx, weight, bias, mean, rstd, *sums, **sizes, **tile)
    else:
        shares, share = share_of(p.pixels, config)
        part = torch.empty((2, p.batch, shares, p.channels), dtype=torch.float32, device=x.device)
        along = torch.empty((2, p.batch, p.groups), dtype=torch.float32, device=x.device)
        pieces, each = triton.cdiv(p.pixels, config.pix), sizes["each"]
        block = {"EACH": min(triton.next_power_of_2(each), 16), "SHARES": triton.next_power_of_2(shares), "num_warps": 4}
        for samples, n, c, last_c in slabs(p, config):
            at, blocks = {"first_n": n, "first_c": c, "last_c": last_c, "LAST": last}, samples * triton.cdiv(last_c - c, config.ch)
            some = {"first_n": n, "first_g": c // each, "slab_groups": (last_c - c) // each}
            _sums[(blocks * shares,)](dy, x, weight, bias, mean, rstd, *part, **sizes, **at, share=share, shares=shares, **tile)
            _merge[(samples * some["slab_groups"],)](*part, weight, *sums, *along, **sizes, **some, shares=shares, **block)
            _apply[(blocks * pieces,)](dy, x, dx, weight, bias, mean, rstd, *along, **sizes, **at, pieces=pieces, **tile)
    grads = torch.empty((2, p.channels), dtype=given, device=x.device)
    width = min(64, triton.next_power_of_2(p.channels))
    sum_partials[(2 * triton.cdiv(p.channels, width),)](sums, grads, p.batch, p.channels, COUNT=32, BLOCK=width, num_warps=4)
    return dx, grads[1], grads[0]
