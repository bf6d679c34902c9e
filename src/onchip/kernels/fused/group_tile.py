"""What GroupNorm's kernels share: places of channels and pixels in both layouts, and how work is cut.

A tile is [CH, PIX]: channels down, pixels across. Channels come first in memory, [batch, channels, pixels], or last, [batch, pixels, channels].
"""

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups

TILE = 8192  # elements of a program of 16 warps: two 16-byte loads of bf16 a thread
WARPS = 16
SLAB = 2  # what is read twice is at most this part of the L2 cache
SHARES = 64  # programs of one channel's pixels at most
FILL = 4  # programs a multiprocessor should have

# ---- device


@triton.jit
def place(n, c, p, channels, pixels, LAST: tl.constexpr):
    """Where channel c of pixel p of sample n is; n int64."""
    if LAST:
        return (n * pixels + p) * channels + c
    return (n * channels + c) * pixels + p


@triton.jit
def where(first_n, first_c, last_c, shares, CH: tl.constexpr):
    """(sample, channels [CH, 1], share) of a program of the grid samples x blocks of channels x shares; shares of one channel stand side by side."""
    blocks = tl.cdiv(last_c - first_c, CH)
    pid = tl.program_id(0)
    n = (pid // shares // blocks + first_n).to(tl.int64)
    return n, first_c + pid // shares % blocks * CH + tl.arange(0, CH)[:, None], pid % shares


@triton.jit
def of_channel(ptr, c, there, absent):
    """A channel's weight or bias, float32 [CH, 1]."""
    if ptr is not None:
        return tl.load(ptr + c, mask=there, other=0.0).to(tl.float32)
    return tl.zeros_like(c).to(tl.float32) + absent


# ---- host


class Tiles(NamedTuple):
    """Tiles of `ch` channels and `pix` pixels; `whole`: a program has a whole group, in one launch; else `shares` programs share out the pixels of
    `ch` channels, of a slab of `samples` samples and `channels` channels at a time.
    """

    ch: int
    pix: int
    warps: int
    whole: bool
    shares: int = 1
    samples: int = 0
    channels: int = 0

    def __str__(self):
        cut = "a program a group" if self.whole else f"{self.shares} shares of slabs of {self.samples}x{self.channels} channels"
        return f"{self.ch}x{self.pix} tiles, {self.warps} warps, {cut}"


def cut(p: Groups, device: Device, read: int, tile: int = TILE) -> list[Tiles]:
    """`read`: bytes read twice for each element.

    A group whose neighbours on all multiprocessors fit half of the L2 cache is one program's: its second reading comes from there. Larger
    ones are cut into slabs of that size, whole samples where they fit, else whole groups of one.
    """
    each, room, last = p.channels // p.groups, device.l2 // SLAB, p.layout == "channels_last"
    if last:
        ch = min(triton.next_power_of_2(p.channels), 128)
        pix = max(1, min(triton.next_power_of_2(p.pixels), tile // ch))
        whole = False
    else:
        pix = max(1, min(triton.next_power_of_2(p.pixels), tile))
        whole = each * p.pixels * read * device.sms <= room
        ch = max(1, min(triton.next_power_of_2(each if whole else p.channels), tile // pix))
    warps = max(1, min(WARPS, ch * pix // 512))
    if whole:
        return [Tiles(ch, pix, warps, True)]
    sample = p.channels * max(1, p.pixels) * read
    samples = max(1, min(p.batch, room // sample))
    channels = p.channels if last or sample <= room else min(p.channels, max(1, room // (each * max(1, p.pixels) * read)) * each)
    programs = samples * triton.cdiv(channels, ch)
    shares = max(1, min(triton.cdiv(p.pixels, pix), SHARES, triton.cdiv(FILL * device.sms, programs)))
    return [Tiles(ch, pix, warps, False, shares, samples, channels)]


def slabs(p: Groups, tiles: Tiles):
    """(grid's samples and channels, their first ones) of one slab after another."""
    for n in range(0, p.batch, tiles.samples):
        for c in range(0, p.channels, tiles.channels):
            yield min(tiles.samples, p.batch - n), n, c, min(p.channels, c + tiles.channels)


def share_of(pixels: int, tiles: Tiles) -> tuple[int, int]:
    """(programs, pixels of each), whole tiles each; none without pixels."""
    pieces = triton.cdiv(pixels, tiles.pix)
    each = triton.cdiv(pieces, tiles.shares)
    return triton.cdiv(pieces, each), each * tiles.pix
