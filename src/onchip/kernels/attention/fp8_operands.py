"""What the backward pass in e4m3 reads beside q, k and v: dO in e4m3, delta, LSE, and transposed copies.

wgmma sums bytes only where they lie side by side. A transposed copy holds tiles of ROWS tokens one after the other, each [dim, ROWS], its tokens
in the order of `hopper.in_order`: 16 K + 4 t + 2 i + b holds token 16 K + 8 i + 2 t + b, so that weights as a product leaves them in registers are the first
operand of the next. Tokens past the end are 0.

dO = token dO8, a scale for each token, max |dO| / 448, so that tokens of small gradients have as many digits as others. Delta is of dO as it is rounded, so
that the rows of dS sum to 0 as they should (else what all keys have in common, which changes no softmax, goes into dQ: 82% of error instead of 9); it is over
the token's scale and V's largest, as dP is, before both are multiplied back.
Every tensor is read once and written once: a program takes ROWS tokens of a head.
"""

import torch
import triton
import triton.language as tl

from onchip.core.scales import LARGEST
from onchip.kernels.launch import starts_early

MOST = tl.constexpr(LARGEST)
LEAST = tl.constexpr(2.0**-100)  # of a token's scale
LOG2E = tl.constexpr(1.4426950408889634)


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
    return y, tl.where(x == x, size | (bits >> 24 & 0x80), 0x7F).to(tl.uint8)  # NaN stays NaN


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
def _of_output(o_ptr, do_ptr, lse_ptr, dlse_ptr, most_ptr, y_ptr, t_ptr, token_ptr, lse2_ptr, delta_ptr, heads, group, length, o_strides, do_strides,
               lse_strides, dlse_strides, DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """dO8 and its transposed copy, its scales, LSE in base 2 (+inf for a row that saw nothing, so that its weights are 0), and delta."""
    batch, head, row = _place(heads, length, ROWS)
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (rows < length)[:, None]
    o_ptr += batch.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1]
    do_ptr += batch.to(tl.int64) * do_strides[0] + head.to(tl.int64) * do_strides[1]
    o = tl.load(o_ptr + rows.to(tl.int64)[:, None] * o_strides[2] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + rows.to(tl.int64)[:, None] * do_strides[2] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + rows, mask=rows < length, other=float("-inf"))
    empty = lse == float("-inf")
    most = tl.load(most_ptr + batch * (heads // group) + head // group)
    token = tl.maximum(tl.max(tl.abs(do), 1) / MOST, LEAST)
    d_lse = tl.zeros([ROWS], tl.float32)
    if dlse_ptr is not None:  # a quarter of what dP may become is room enough for it
        place = batch.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        d_lse = tl.load(dlse_ptr + place, mask=rows < length, other=0.0).to(tl.float32) / most
        d_lse = tl.where(empty, 0.0, d_lse)
        token = tl.maximum(token, tl.abs(d_lse) * (4 / (MOST * MOST * DIM)))
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


def of_output(p, out, d_out, lse, d_lse, most, rows: int):
    """dO8 [batch, heads, len, dim], its transposed copy, and of each token, [batch, heads, len in whole tiles of `rows`]: its scale, LSE, delta.

    most   V's largest scale, [batch, kv_heads].
    """
    batch, heads, length, dim = out.shape
    out, d_out = (t if t.stride(3) == 1 else t.contiguous() for t in (out, d_out))
    tiles = triton.cdiv(length, rows)
    new = {"dtype": torch.float8_e4m3fn, "device": out.device}
    y, copy = torch.empty(batch, heads, length, dim, **new), torch.empty(batch, heads, tiles * dim, rows, **new)
    lse = lse if lse.stride(2) == 1 else lse.contiguous()
    token, lse2, delta = (torch.empty(batch, heads, tiles * rows, dtype=torch.float32, device=out.device) for _ in range(3))
    _of_output[(tiles * heads * batch,)](
        out, d_out, lse, d_lse, most, y.view(torch.uint8), copy.view(torch.uint8), token, lse2, delta, heads, p.group, length,
        out.stride()[:3], d_out.stride()[:3], lse.stride()[:2], (0, 0, 0) if d_lse is None else d_lse.stride(), DIM=dim, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return y, copy, token, lse2, delta
