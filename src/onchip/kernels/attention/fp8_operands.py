"""What the backward pass in e4m3 reads beside q, k and v: dO in e4m3, delta, LSE, and transposed copies.

wgmma sums bytes only where they lie side by side. A transposed copy holds tiles of ROWS tokens one after the other, each [dim, ROWS], its tokens
in the order of `hopper.in_order`: 16 K + 4 t + 2 i + b holds token 16 K + 8 i + 2 t + b, so that weights as a product leaves them in registers are the first
operand of the next. Tokens past the end are 0.

dO = token dO8, a scale for each token, max |dO| / 448, so that tokens of small gradients have as many digits as others. Delta is of dO as it is rounded, so
that the rows of dS sum to 0 as they should (else what all keys have in common, which changes no softmax, goes into dQ: 82% of error instead of 9); it is over
the token's scale and V's largest, as dP is, before both are multiplied back.
Every tensor is read once and written once: a program takes ROWS tokens of a head. What is one number for a head, or for a token, is made in two launches
more, `scales_of` and `weighed`: as torch's operations it is thirty, which took a host 2 ms where the GPU takes 1.1 for all (4 x 4k tokens, causal).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.problem import Attention
from onchip.core.scales import LARGEST, SMALLEST_TAKEN, Scales
from onchip.kernels.launch import starts_early

MOST = tl.constexpr(LARGEST)
LEAST = tl.constexpr(2.0**-100)  # of a token's scale
LOG2E = tl.constexpr(1.4426950408889634)
TAKEN = tl.constexpr(SMALLEST_TAKEN)  # of a scale
SHOWS = tl.constexpr(2.0**-40)  # of a scale beside the largest: what is less adds nothing that shows
EACH = tl.constexpr(1024)  # scales, or tokens, a program takes at once


# ---- device


@triton.jit
def _rounded(x):
    """x of at most 448, rounded to e4m3 (to even): as float32, and its byte.

    In arithmetic: where one conversion is both packed and unpacked, ptxas 12.8 unpacks a register that nothing was written to.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + (bits >> 20 & 1)) & ~0xFFFFF  # three digits of 23
    small = tl.abs(x) < 2.0**-6  # steps of 2^-9
    y = tl.where(small, (x + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))
    size = tl.where(small, (tl.abs(y) * 512).to(tl.int32), (bits >> 20 & 0x7FF) - (120 << 3))  # exponents begin at 7, not 127
    return tl.where(x == x, y, x), tl.where(x == x, size | (bits >> 24 & 0x80), 0x7F).to(tl.uint8)  # NaN stays NaN


@triton.jit
def _in_order(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM] as [DIM, ROWS]."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS // 16, 2, 4, 2, DIM]), (4, 0, 2, 1, 3)), [DIM, ROWS])


@triton.jit
def _store_turned(t_ptr, x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The tile of this program."""
    places = tl.arange(0, DIM)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(t_ptr + tl.program_id(0).to(tl.int64) * (DIM * ROWS) + places, _in_order(x, ROWS, DIM))


@triton.jit
def _place(heads, length, ROWS: tl.constexpr):
    """Sequence, head and first row of this program's tile: those of a head one after the other."""
    tiles = tl.cdiv(length, ROWS)
    number = tl.program_id(0) // tiles
    return number // heads, number % heads, tl.program_id(0) % tiles * ROWS


@triton.jit
def _beside(x_ptr, y_ptr, most_ptr, batch, head, kv_heads, group, n, strides):
    """Those of the `group` heads that read key head `head`, over the largest of them, and that one. NaN stays where it is."""
    x_ptr += batch.to(tl.int64) * strides[0] + (head * group).to(tl.int64) * strides[1]
    most = tl.full([EACH], 0.0, tl.float32)
    for first in range(0, group * n, EACH):
        at = first + tl.arange(0, EACH)
        x = tl.load(x_ptr + (at // n).to(tl.int64) * strides[1] + (at % n).to(tl.int64) * strides[2], mask=at < group * n, other=0.0)
        most = tl.where(x > most, x, most)
    top = tl.maximum(tl.max(most, 0), TAKEN)
    pair = batch * kv_heads + head
    tl.store(most_ptr + pair, top)
    for first in range(0, group * n, EACH):
        at = first + tl.arange(0, EACH)
        x = tl.load(x_ptr + (at // n).to(tl.int64) * strides[1] + (at % n).to(tl.int64) * strides[2], mask=at < group * n, other=0.0)
        y = tl.div_rn(x, tl.zeros_like(x) + top)
        tl.store(y_ptr + pair.to(tl.int64) * (group * n) + at, tl.where(y < SHOWS, SHOWS, y), mask=at < group * n)


@triton.jit
def _scales_of(q_ptr, k_ptr, v_ptr, q_out, k_out, v_out, most_ptr, top_ptr, kv_heads, group, q_n, k_n, v_n, q_strides, k_strides, v_strides):
    """Of a sequence and a key head; and 0 for the largest scale of its gradients."""
    batch, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    pairs = tl.num_programs(0)
    _beside(q_ptr, q_out, most_ptr, batch, head, kv_heads, group, q_n, q_strides)
    _beside(k_ptr, k_out, most_ptr + pairs, batch, head, kv_heads, 1, k_n, k_strides)
    _beside(v_ptr, v_out, most_ptr + 2 * pairs, batch, head, kv_heads, 1, v_n, v_strides)
    tl.store(top_ptr + tl.program_id(0), 0.0)


@triton.jit
def _weighed(token_ptr, lse_ptr, most_ptr, top_ptr, gains_ptr, room_ptr, weighed_ptr, group, length, pairs, scale, ROOM: tl.constexpr, RAISED: tl.constexpr):
    """Of EACH tokens of a head LSE with room and with their weights; of the first tokens of a key head's first head its gains."""
    tiles = tl.cdiv(length, EACH)
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    pair = number // group
    i = tile * EACH + tl.arange(0, EACH)
    at, inside = number.to(tl.int64) * length + i, i < length
    top = tl.load(top_ptr + pair)
    token, lse = tl.load(token_ptr + at, mask=inside, other=1.0), tl.load(lse_ptr + at, mask=inside, other=0.0)
    tl.store(room_ptr + at, lse + ROOM, mask=inside)
    tl.store(weighed_ptr + at, lse - tl.log2(token / top) - RAISED, mask=inside)
    if (tile == 0) & (number % group == 0):
        q, k, v = tl.load(most_ptr + pair), tl.load(most_ptr + pairs + pair), tl.load(most_ptr + 2 * pairs + pair)
        shared = scale * 2.0**ROOM * v
        tl.store(gains_ptr + pair, scale * LOG2E * q * k)
        tl.store(gains_ptr + pairs + pair, shared * k)
        tl.store(gains_ptr + 2 * pairs + pair, shared * top * q)
        tl.store(gains_ptr + 3 * pairs + pair, top * 2.0**-RAISED)


@triton.jit
def _pairs(x, y):
    """Of two tokens' words of four bytes the even bytes, in turn, and the odd ones."""
    return (x & 0x00FF00FF) | ((y & 0x00FF00FF) << 8), ((x >> 8) & 0x00FF00FF) | (y & 0xFF00FF00)


@triton.jit
def _turn(x_ptr, t_ptr, counter, heads, length, strides, DIM: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):
    """Words of four bytes: those of four tokens that lie side by side in the copy become those of four columns in a thread, and words change places alone. And
    0 for what the launch behind this one counts."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if counter is not None:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)
    batch, head, first = _place(heads, length, ROWS)
    word, col = tl.arange(0, ROWS // 4), tl.arange(0, DIM // 4)
    x_ptr += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + col[None, :]
    token = first + word // 4 * 16 + word % 4 * 2  # and the one behind it, and those 8 and 9 behind
    x0, x1, x2, x3 = (), (), (), ()
    for n in tl.static_range(4):
        rows = (token + (n // 2 * 8 + n % 2))[:, None]
        x = tl.load(x_ptr + rows.to(tl.int64) * strides[2], mask=rows < length, other=0)
        x0, x1, x2, x3 = x1, x2, x3, x
    even, odd = _pairs(x0, x1)
    even_behind, odd_behind = _pairs(x2, x3)
    low = tl.join((even & 0xFFFF) | (even_behind << 16), (odd & 0xFFFF) | (odd_behind << 16))  # of columns 0 and 1
    high = tl.join((even >> 16) | (even_behind & 0xFFFF0000), (odd >> 16) | (odd_behind & 0xFFFF0000))  # 2 and 3
    turned = tl.reshape(tl.permute(tl.join(low, high), (1, 3, 2, 0)), [DIM, ROWS // 4])
    places = tl.arange(0, DIM)[:, None] * (ROWS // 4) + word[None, :]
    tl.store(t_ptr + tl.program_id(0).to(tl.int64) * (DIM * ROWS // 4) + places, turned)


@triton.jit
def _of_output(o_ptr, do_ptr, lse_ptr, dlse_ptr, most_ptr, top_ptr, y_ptr, t_ptr, token_ptr, lse2_ptr, delta_ptr, heads, group, length, o_strides, do_strides,
               lse_strides, dlse_strides, DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """dO8 and its transposed copy, its scales and the largest, LSE in base 2 (+inf for a row that saw nothing, so that its weights are 0), and delta."""
    batch, head, row = _place(heads, length, ROWS)
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (rows < length)[:, None]
    o_ptr += batch.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1]
    do_ptr += batch.to(tl.int64) * do_strides[0] + head.to(tl.int64) * do_strides[1]
    o = tl.load(o_ptr + rows.to(tl.int64)[:, None] * o_strides[2] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + rows.to(tl.int64)[:, None] * do_strides[2] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + rows, mask=rows < length, other=float("-inf"))
    empty = lse == float("-inf")
    pair = batch * (heads // group) + head // group
    most = tl.load(most_ptr + pair)
    token = tl.maximum(tl.max(tl.abs(do), 1) / MOST, LEAST)
    d_lse = tl.zeros([ROWS], tl.float32)
    if dlse_ptr is not None:  # a quarter of what dP may become is room enough for it
        place = batch.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        d_lse = tl.load(dlse_ptr + place, mask=rows < length, other=0.0).to(tl.float32) / most
        d_lse = tl.where(empty, 0.0, d_lse)
        token = tl.maximum(token, tl.abs(d_lse) * (4 / (MOST * MOST * DIM)))
    tl.atomic_max(top_ptr + pair, tl.max(token, 0), sem="relaxed")
    y, byte = _rounded(do / token[:, None])
    delta = tl.sum(y * o, 1) / most - d_lse / token
    first = (batch * heads + head).to(tl.int64)
    tl.store(y_ptr + (first * length + rows)[:, None] * DIM + cols[None, :], byte, mask=inside)
    _store_turned(t_ptr, byte, ROWS, DIM)
    at = first * (tl.cdiv(length, ROWS) * ROWS) + rows
    tl.store(token_ptr + at, token)
    tl.store(delta_ptr + at, tl.where(empty, 0.0, delta))
    tl.store(lse2_ptr + at, tl.where(empty, float("inf"), lse * LOG2E))


# ---- host


def turned(x: torch.Tensor, rows: int, counter: torch.Tensor | None = None) -> torch.Tensor:
    """The transposed copy of x [batch, heads, len, dim] in e4m3, in tiles of `rows` tokens: [batch, heads, tiles x dim, rows]; and 0 in `counter`."""
    batch, heads, length, dim = x.shape
    tiles = triton.cdiv(length, rows)
    copy = torch.empty(batch, heads, tiles * dim, rows, dtype=x.dtype, device=x.device)
    x, words = x.view(torch.uint32), copy.view(torch.uint32)
    _turn[(tiles * heads * batch,)](x, words, counter, heads, length, x.stride()[:3], DIM=dim, ROWS=rows, EARLY=starts_early(x), num_warps=4)
    return copy


class Relative(NamedTuple):
    """The scales [batch, heads, n] of q, k and v over the largest of a key head's; these, most [3, batch, kv_heads]; and top [batch, kv_heads], in which
    `of_output` leaves the largest scale of a gradient."""

    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    most: torch.Tensor
    top: torch.Tensor


def scales_of(p: Attention, scales: Scales) -> Relative:
    """What is 2^-40 of the largest, or less, adds nothing that shows, and is taken for that."""
    given = [scale.expand(p.batch, heads, -1) for scale, heads in zip(scales, (p.heads, p.kv_heads, p.kv_heads), strict=True)]
    made = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in given]
    most = torch.empty(3, p.batch, p.kv_heads, dtype=torch.float32, device=given[0].device)
    top = torch.empty(p.batch, p.kv_heads, dtype=torch.float32, device=most.device)
    _scales_of[(p.batch * p.kv_heads,)](*given, *made, most, top, p.kv_heads, p.group, *(t.shape[2] for t in given), *(t.stride() for t in given), num_warps=4)
    return Relative(tuple(made), most, top)


def weighed(p: Attention, scale: float, relative: Relative, token, lse, room: int, raised: int):
    """gains [4, batch, kv_heads], what S is multiplied by, and dQ, dK and dV; LSE with what dS is divided by, log2 of it `room`; LSE of which P comes out
    times its token's scale, over the largest, and 2^raised."""
    gains = torch.empty(4, p.batch, p.kv_heads, dtype=torch.float32, device=lse.device)
    with_room, with_weight = torch.empty_like(lse), torch.empty_like(lse)
    grid = (triton.cdiv(lse.shape[2], EACH.value) * p.batch * p.heads,)
    _weighed[grid](
        token, lse, relative.most, relative.top, gains, with_room, with_weight, p.group, lse.shape[2], p.batch * p.kv_heads, scale, ROOM=room, RAISED=raised,
        num_warps=4,
    )  # fmt: skip
    return gains, with_room, with_weight


def of_output(p: Attention, out, d_out, lse, d_lse, relative: Relative, rows: int):
    """dO8 [batch, heads, len, dim], its transposed copy, and of each token, [batch, heads, len in whole tiles of `rows`]: its scale, LSE, delta. The
    largest of these scales is in `relative.top` then."""
    batch, heads, length, dim = out.shape
    out, d_out = (t if t.stride(3) == 1 else t.contiguous() for t in (out, d_out))
    tiles = triton.cdiv(length, rows)
    new = {"dtype": torch.float8_e4m3fn, "device": out.device}
    y, copy = torch.empty(batch, heads, length, dim, **new), torch.empty(batch, heads, tiles * dim, rows, **new)
    lse = lse if lse.stride(2) == 1 else lse.contiguous()
    token, lse2, delta = (torch.empty(batch, heads, tiles * rows, dtype=torch.float32, device=out.device) for _ in range(3))
    _of_output[(tiles * heads * batch,)](
        out, d_out, lse, d_lse, relative.most[2], relative.top, y.view(torch.uint8), copy.view(torch.uint8), token, lse2, delta, heads, p.group, length,
        out.stride()[:3], d_out.stride()[:3], lse.stride()[:2], (0, 0, 0) if d_lse is None else d_lse.stride(), DIM=dim, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return y, copy, token, lse2, delta
