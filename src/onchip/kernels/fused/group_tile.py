"""What GroupNorm's kernels share: numbers in registers of half precision, places of runs, and how work is cut.

A unit is what statistics need together: a group where channels come first, a sample where they come last (`group_last.py`); both are one stretch of memory.
The programs of a unit, its team, share it out. Of a group's backward they hold their shares in registers and meet half way (`meeting.py`), so that it is read
once; what registers have no room for is read again: from the L2 cache, or from memory where that has no room either. Forward see `group_norm.py`.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.curves import activated, sigmoid, slope

# ---- device


@triton.jit
def role(team, lag):
    """(unit, member, whether it writes) of a program: members of a unit sum it up, then those write that is `lag` units behind."""
    turn = tl.program_id(0) // (2 * team)
    place = tl.program_id(0) % (2 * team)
    writes = place >= team
    return tl.where(writes, turn - lag, turn), place % team, writes


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
def act_of(u, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr):
    """act(u). QUICK: as near as numbers of 16 bits ask."""
    if QUICK and ACT == "silu":
        y = u * quick_sigmoid(u, WORDS)
    else:
        y = activated(u, ACT, QUICK=QUICK)
    return y


@triton.jit
def slope_of(u, ACT: tl.constexpr, QUICK: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr):
    """Its derivative. PAIRS: two share a quotient, which takes two more registers."""
    if QUICK and ACT == "silu" and WORDS and PAIRS:
        result = silu_slope(u)
    elif QUICK and ACT == "silu":
        s = quick_sigmoid(u, WORDS)
        result = s * (1 + u * (1 - s))
    else:
        result = slope(u, ACT, QUICK=QUICK)
    return result


@triton.jit
def silu_of(v):
    """u sigmoid(u) of v = -log2(e) u, to 2^-21: the factor goes off with the quotient, of which two share one (MUFU makes 16 a cycle, and is what most of a
    program's writing waits for). Below u = -43 it is 0 to 1e-17.
    """
    code: tl.constexpr = """{ .reg .f32 a, b, c; min.f32 a, $2, 0f42780000; min.f32 b, $3, 0f42780000; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b;
        fma.rn.f32 a, a, 0fBFB8AA3B, 0fBFB8AA3B; fma.rn.f32 b, b, 0fBFB8AA3B, 0fBFB8AA3B; mul.f32 c, a, b; rcp.approx.ftz.f32 c, c;
        mul.f32 a, a, c; mul.f32 b, b, c; mul.f32 $0, $2, b; mul.f32 $1, $3, a; }"""
    return tl.inline_asm_elementwise(code, "=&f,=f,f,f", [v], tl.float32, is_pure=True, pack=2)


@triton.jit
def silu_slope(u):
    """Its derivative s + u (s - s^2), s = sigmoid(u), to 2^-20, of which two share a quotient. Below u = -43 it is 0 to 1e-17."""
    code: tl.constexpr = """{ .reg .f32 a, b, c, d; mul.f32 a, $2, 0fBFB8AA3B; mul.f32 b, $3, 0fBFB8AA3B; min.f32 a, a, 0f42780000; min.f32 b, b, 0f42780000;
        ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; mul.f32 c, a, b; rcp.approx.ftz.f32 c, c;
        mul.f32 b, b, c; mul.f32 a, a, c; neg.f32 c, b; neg.f32 d, a; fma.rn.f32 c, c, b, b; fma.rn.f32 d, d, a, a;
        fma.rn.f32 $0, $2, c, b; fma.rn.f32 $1, $3, d, a; }"""
    return tl.inline_asm_elementwise(code, "=&f,=f,f,f", [u], tl.float32, is_pure=True, pack=2)


@triton.jit
def before(run, pieces, pixels, RUN: tl.constexpr):
    """Elements of a group that stand before run number `run`; int64."""
    return (run // pieces).to(tl.int64) * pixels + run % pieces * RUN


@triton.jit
def tile(begin, end, k, pieces, pixels, CUT: tl.constexpr):
    """Tile k of a program that has the runs [begin, end) of a group: (run, channel in the group) [ROWS, 1], (place after `begin`, whether it is the
    program's) [ROWS, COLS]. ROWS runs at a time, in SPAN tiles; a channel has `pieces` runs, of which the last may be shorter.
    """
    ROWS: tl.constexpr = CUT[0]
    COLS: tl.constexpr = CUT[1]
    SPAN: tl.constexpr = CUT[2]
    run = begin + k // SPAN * ROWS + tl.arange(0, ROWS)[:, None]
    col = k % SPAN * COLS + tl.arange(0, COLS)[None, :]
    if CUT[3] == "torn":
        inside = (run < end) & (run % pieces * (SPAN * COLS) + col < pixels)
        place = (run // pieces - begin // pieces) * pixels + (run % pieces - begin % pieces) * (SPAN * COLS) + col
    else:  # all runs are whole, and of a "full" cut the program's
        inside = tl.full([ROWS, COLS], CUT[3] == "full", tl.int1) | (run < end)
        place = (run - begin) * (SPAN * COLS) + col
    return run, run // pieces, place, inside


@triton.jit
def hold(x_ptr, begin, end, pieces, pixels, HELD: tl.constexpr, CUT: tl.constexpr, KEEP: tl.constexpr):
    """The first HELD tiles of a program. KEEP is the hint of how long L2 shall keep them."""
    held = ()
    for k in tl.static_range(HELD):
        _, _, at, inside = tile(begin, end, k, pieces, pixels, CUT)
        held += (tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy=KEEP),)
    return held


@triton.jit
def of_channel(ptr, c, there, absent):
    """A channel's weight or bias, float32, shaped like c."""
    if ptr is not None:
        return tl.load(ptr + c, mask=there, other=0.0).to(tl.float32)
    return tl.zeros_like(c).to(tl.float32) + absent


# ---- host

HOLD = 1 << 16  # bytes of a share in registers: two programs of 8 warps hold half of a multiprocessor's, arithmetic takes the other half
ALONE = 80 << 10  # up to here one program's: the meeting of two costs more (16x320x64x64: 29 us beside 34)
TILE = 2048  # elements: a 16-byte load of bf16 for each thread of 8 warps
NARROW = 64  # pixels: of longer runs than this a channel's last one may waste an eighth of the channel
WARPS = 8


class Tiles(NamedTuple):
    """How much of a unit a program holds, and how many share it out.

    rows, cols   of a tile: runs of a channel's pixels.      span   tiles that make up a run.      cut   "full", "whole" or "torn": see `tile`.
    held         tiles in registers.      share   runs of a program.      team   programs of a group.      registers   of a thread at most.
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

    def __str__(self):
        return f"{self.rows}x{self.cols} tiles, {self.held} held, {self.warps} warps, {self.team} programs a group"


def first(p: Groups, device: Device, tensors: int, twice: bool = False, hold: int = HOLD, most: int = TILE, warps: int = WARPS, alone: int = ALONE) -> Tiles:
    """Channels that come first, of which a program holds `tensors`. The tiles of a channel make up longer runs, which are summed up once.

    A team has no more programs than the device has multiprocessors, so that all of it is running at once. Where shares are read `twice` it has any number
    of them, and each holds all of its share.
    """
    each, pixels = p.channels // p.groups, max(1, p.pixels)
    even = pixels & -pixels  # the largest power of two that divides them
    cols = min(most, even if even >= NARROW else 1 << pixels.bit_length() - 1)
    while pixels % cols and cols > NARROW and -pixels % cols > pixels // 8:
        cols //= 2
    if cols < NARROW and pixels % cols:
        cols *= 2
    pieces = triton.cdiv(pixels, cols)
    rows = max(1, min(most // cols, triton.next_power_of_2(each * pieces)))
    tiles = triton.cdiv(each * pieces, rows)
    size = rows * cols * tensors * p.dtype.itemsize
    room = max(1, (alone if tiles * size <= alone else hold) // size)
    most_programs = tiles if twice else device.sms
    share = triton.cdiv(tiles, min(most_programs, triton.cdiv(tiles, room)))

    def fair(n):  # for all programs, and whole channels or equal parts of one
        return tiles % n == 0 and tiles // n <= most_programs and (rows > 1 or n % pieces == 0 or pieces % n == 0)

    share = next((n for n in (*range(share, max(1, share // 2) - 1, -1), *range(share, share if twice else share + share // 4 + 1)) if fair(n)), share)
    held, team = min(share, room), triton.cdiv(tiles, share)
    span = math.gcd(pieces, share, held) if rows == 1 and not pixels % cols else 1
    cut = "torn" if pixels % cols else "full" if tiles * rows == each * pieces and tiles % share == 0 else "whole"
    registers = 128 if share > held else 64 if twice and team > 1 and cut == "full" else None  # 64: four programs of 8 warps a multiprocessor
    return Tiles(rows, cols, span, cut, held, share * rows // span, team, min(warps, max(1, rows * cols // 256)), registers)


def scratch(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """float32 that a kernel writes before it reads."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def arguments(p: Groups, t: Tiles, x: torch.Tensor) -> dict:
    """What every kernel takes of a call."""
    each, words = p.channels // p.groups, x.is_cuda and torch.version.hip is None
    given = {"pixels": p.pixels, "groups": p.groups, "each": each, "ACT": p.act, "CUT": (t.rows, t.cols, t.span, t.cut), "num_warps": t.warps, "WORDS": words}
    if t.registers and words:
        given["maxnreg"] = t.registers
    return given | {"pieces": triton.cdiv(p.pixels, t.cols * t.span), "HELD": t.held}
