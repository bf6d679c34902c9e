"""What GroupNorm's kernels share: numbers in registers of half precision, places of runs, and how work is cut.

A unit is what statistics need together: a group where channels come first, a sample where they come last; both are one stretch of memory. The programs
of a unit, its team, share it out, hold their shares in registers and meet half way (`meeting.py`), so that it is read once. What registers have no
room for is read again, last first: from the L2 cache, or from memory where that has no room either.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.curves import sigmoid

# ---- device


@triton.jit
def wide(x, zero, WORDS: tl.constexpr):
    """x in float32. `zero` is one that the compiler does not know for one, another for each pass over the same numbers: of two conversions that it sees
    to be equal it keeps the result in between, twice the registers of x.
    """
    if WORDS:
        if x.dtype == tl.bfloat16:
            code: tl.constexpr = "mad.lo.u32 $0, $2, 0x10000, $3; and.b32 $1, $2, 0xffff0000; xor.b32 $1, $1, $3;"
            return tl.inline_asm_elementwise(code, "=&r,=&r,r,r,r", [x, zero], tl.float32, is_pure=True, pack=2)
        if x.dtype == tl.float16:
            code: tl.constexpr = "{ .reg .b32 w; .reg .b16 a, b; xor.b32 w, $2, $3; mov.b32 {a, b}, w; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
            return tl.inline_asm_elementwise(code, "=&r,=&r,r,r,r", [x, zero], tl.float32, is_pure=True, pack=2)
    return x.to(tl.float32)


@triton.jit
def quick_sigmoid(x, WORDS: tl.constexpr):
    """To 2^-21, in four instructions."""
    if WORDS:
        code: tl.constexpr = "{ mul.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }"
        return tl.inline_asm_elementwise(code, "=&f,f", [x], tl.float32, is_pure=True, pack=1)
    return sigmoid(x, True)


@triton.jit
def before(run, pieces, pixels, RUN: tl.constexpr):
    """Elements of a group that stand before run number `run`; int64."""
    return run.to(tl.int64) // pieces * pixels + run % pieces * RUN


@triton.jit
def tile(begin, end, k, pieces, pixels, CUT: tl.constexpr):
    """Tile k of a program that has the runs [begin, end) of a group: (run, channel in the group) [ROWS, 1], (place after `begin`, whether it is the
    program's) [ROWS, COLS]. ROWS runs at a time, in SPAN tiles; a channel has `pieces` runs, of which the last may be shorter.
    A cluster has the group: `begin` is [ROWS, 1], of each CTA, and places are after the group's.
    """
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    SPAN: tl.constexpr = CUT[2]
    col = k % SPAN * COLS + tl.arange(0, COLS)[None, :]
    if CUT[4] > 1:
        run = begin + k // SPAN
        inside = tl.full([ROWS, COLS], 1, tl.int1)
        place = run * (SPAN * COLS) + col
    else:
        run = begin + k // SPAN * ROWS + tl.arange(0, ROWS)[:, None]
        if CUT[3] == "torn":
            inside = (run < end) & (run % pieces * (SPAN * COLS) + col < pixels)
            place = (run // pieces - begin // pieces) * pixels + (run % pieces - begin % pieces) * (SPAN * COLS) + col
        else:  # all runs are whole, and of a "full" cut the program's
            inside = tl.full([ROWS, COLS], CUT[3] == "full", tl.int1) | (run < end)
            place = (run - begin) * (SPAN * COLS) + col
    return run, run // pieces, place, inside


@triton.jit
def of_channel(ptr, c, there, absent):
    """A channel's weight or bias, float32, shaped like c."""
    if ptr is not None:
        return tl.load(ptr + c, mask=there, other=0.0).to(tl.float32)
    return tl.zeros_like(c).to(tl.float32) + absent


@triton.jit
def across(ptr, k, channels, CUT: tl.constexpr):
    """What the channels of block k have, float32 [1, COLS]; 0 where nothing is given."""
    c = k * CUT[1] + tl.arange(0, CUT[1])[None, :]
    return of_channel(ptr, c, c < channels, 0.0)


@triton.jit
def block(p, k, own, channels, CUT: tl.constexpr):
    """(place, whether it is the program's) of ROWS pixels from p on and block k of channels."""
    c = k * CUT[1] + tl.arange(0, CUT[1])[None, :]
    row = p + tl.arange(0, CUT[0])[:, None]
    if CUT[3] == "full":
        return row * channels + c, tl.full([CUT[0], CUT[1]], 1, tl.int1)
    else:
        return row * channels + c, (row < own) & (c < channels)


@triton.jit
def spread(table_ptr, u, v, w_ptr, channels, groups, each):
    """For each channel of a sample, [2, channels]: weight u, and v, of its group [GROUPS]. Every member writes it, for itself."""
    for first in range(0, channels, 1024):
        c = first + tl.arange(0, 1024)
        there = c < channels
        g = tl.minimum(c // each, groups - 1)
        tl.store(table_ptr + c, of_channel(w_ptr, c, there, 1.0) * tl.gather(u, g, 0), mask=there)
        tl.store(table_ptr + channels + c, tl.gather(v, g, 0), mask=there)
    tl.debug_barrier()


# ---- host

HOLD = 1 << 16  # bytes of a program's share in registers: half of a multiprocessor's hold four of them, and as much is left for arithmetic
TILE = 2048  # elements: one 16-byte load of bf16 a thread of 8 warps
NARROW = 64  # pixels: shorter runs than this are not cut further where a little of a channel's last run would be wasted


class Tiles(NamedTuple):
    """How much of a unit a program holds, and how many share it out.

    rows, cols   of a tile: runs of a channel's pixels where channels come first, else pixels and their channels.
    span         tiles that make up a run, or all channels.      cut   "full", "whole" or "torn": see `tile` and `block`.
    held         tiles in registers.      share   runs or pixels of a program.      team   programs of a unit.      registers   of a thread at most.
    """

    rows: int
    cols: int
    span: int
    cut: str
    held: int
    share: int
    team: int
    warps: int
    registers: int | None = None
    ctas: int = 1
    stages: int = 1
    most: int = 1 << 30

    def teams(self, units: int) -> int:
        """How many are at work at once, each on one unit after another."""
        return min(units, self.most)

    def __str__(self):
        return f"{self.rows}x{self.cols} tiles, {self.held} held, {self.warps} warps, teams of {self.team}"


def first(p: Groups, device: Device, size: int, hold: int = HOLD, most: int = TILE, warps: int = 8, team: int = 0, ctas: int = 1) -> Tiles:
    """Channels that come first; `size`: bytes held for each element. With `spans` tiles of one channel make up one run."""
    each, pixels = p.channels // p.groups, max(1, p.pixels)
    even = pixels & -pixels
    cols = min(most, even if even >= NARROW else 1 << pixels.bit_length() - 1)
    while pixels % cols and cols > NARROW and -pixels % cols > pixels // 8:
        cols //= 2
    if cols < NARROW and pixels % cols:
        cols *= 2
    pieces = triton.cdiv(pixels, cols)
    runs = each * pieces
    rows = max(1, min(most // cols, triton.next_power_of_2(runs)))
    tiles = triton.cdiv(runs, rows)
    room = max(1, hold // (rows * cols * size))
    team = ctas if ctas > 1 else team or min(device.sms, triton.cdiv(tiles, room))
    if rows == 1:  # whole channels, or equal parts of one
        share = triton.cdiv(tiles, team)
        share = next((n for n in range(share, min(2 * share, pieces) + 1) if pieces % n == 0), share)
    else:
        share = triton.cdiv(tiles, team)
    held = min(share, room)
    team = triton.cdiv(tiles, share)
    span = math.gcd(math.gcd(pieces, share), held) if rows == 1 and not pixels % cols else 1
    cut = "torn" if pixels % cols else "full" if team * share * rows == runs else "whole"
    if ctas > 1 and rows == 1 and cut == "full" and held == share:
        return Tiles(ctas, cols, span, cut, held, share // span, 1, warps, None, ctas)
    return Tiles(rows, cols, span, cut, held, share * rows // span, team, min(warps, max(1, rows * cols // 256)))


def last(p: Groups, device: Device, size: int, hold: int = HOLD, warps: int = 8, team: int = 0) -> Tiles:
    """Channels that come last."""
    cols = min((triton.cdiv(p.channels, n) * n, -n) for n in (64, 128, 256, 512))[1] * -1 if p.channels > 64 else triton.next_power_of_2(p.channels)
    blocks = triton.cdiv(p.channels, cols)
    rows = max(1, min(hold // (cols * blocks * size), p.pixels))
    rows = 1 << rows.bit_length() - 1
    tiles = triton.cdiv(p.pixels, rows)
    share = triton.cdiv(tiles, team or min(device.sms, tiles))
    team = triton.cdiv(tiles, share)
    cut = "full" if p.channels == cols * blocks and team * share * rows == p.pixels else "torn"
    return Tiles(rows, cols, blocks, cut, blocks, share * rows, team, max(1, min(warps, rows * cols // 256)), 128)


def scratch(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def arguments(p: Groups, t: Tiles, x: torch.Tensor, units: int) -> dict:
    """What every kernel takes of a call."""
    each = p.channels // p.groups
    given = {"pixels": p.pixels, "groups": p.groups, "each": each, "share": t.share, "team": t.team}
    given |= {"CUT": (t.rows, t.cols, t.span, t.cut, t.ctas), "num_warps": t.warps, "WORDS": x.is_cuda and torch.version.hip is None}
    if t.registers and given["WORDS"]:
        given["maxnreg"] = t.registers
    if p.layout == "channels_last":
        given |= {"channels": p.channels, "GROUPS": triton.next_power_of_2(p.groups), "EACH": triton.next_power_of_2(each)}
        return given | {"STREAM": t.share > t.rows, "count_ptr": torch.zeros(units, dtype=torch.int32, device=x.device)}
    given |= {"units": units, "pieces": triton.cdiv(p.pixels, t.cols * t.span), "HELD": t.held, "TEAM": triton.next_power_of_2(t.team)}
    given |= {"CLUSTER": x.is_cuda, "STAGES": t.stages} | ({"num_ctas": t.ctas} if t.ctas > 1 else {})
    given["STREAM"] = t.share > t.held // t.span * (t.rows if t.ctas == 1 else 1)
    given["word_ptr"] = torch.zeros(units * t.team, dtype=torch.int64, device=x.device) if t.team > 1 else None
    return given
