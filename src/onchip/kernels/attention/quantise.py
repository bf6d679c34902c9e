"""Queries, keys or values in e4m3: y = x R / scale, with scale = max |x R| / 448 over the tokens that share it, and R a rotation of random signs, or none.

A program takes 128 tokens of a head: x is read once and y written once, but for a scale of a whole head, whose maximum needs a pass of its own.
R is diag(signs) H / sqrt(dim); the Walsh-Hadamard matrix H is +-1, exact in half precision, so that a product on the tensor cores rounds its sums alone
(float32 goes as the two numbers of bfloat16 that it is the sum of, but for 2^-17).
"""

import torch
import triton
import triton.language as tl

from onchip.core.scales import BLOCK, LARGEST, SMALLEST

MOST, LEAST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


# ---- device


@triton.jit
def _hadamard(D: tl.constexpr, dtype: tl.constexpr):
    """H [D, D], which begins with that of any lower power of two: -1 where the numbers of row and column have an odd number of bits in common."""
    i = tl.arange(0, D)
    bits = i[:, None] & i[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = (bits ^ (bits >> 1)) & 1
    return (1.0 - 2.0 * bits.to(tl.float32)).to(dtype)


@triton.jit
def _rows(x_ptr, signs_ptr, tokens, cols, row_stride, length, DIM: tl.constexpr, H):
    """Rows of x, at `cols`, times the signs and H, and 0 past the last column; signs_ptr None: as they are."""
    x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * row_stride + cols[None, :], mask=(tokens < length)[:, None] & (cols < DIM)[None, :], other=0.0)
    if signs_ptr is not None:
        signed = x.to(tl.float32) * tl.load(signs_ptr + cols, mask=cols < DIM, other=0.0)[None, :]
        first = signed.to(H.dtype)
        turned = tl.dot(first, H)
        if x.dtype == tl.float32:
            turned = tl.dot((signed - first.to(tl.float32)).to(H.dtype), H, turned)
        x = tl.where((cols < DIM)[None, :], turned, 0.0)
    return x.to(tl.float32)


@triton.jit
def _quantise(x_ptr, y_ptr, scale_ptr, signs_ptr, length, heads, x_strides, y_strides, DIM: tl.constexpr, SHARE: tl.constexpr, MEASURE: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """SHARE: tokens that share a scale, 0: all; MEASURE: only raise the head's maximum, in scale_ptr."""
    D: tl.constexpr = min(triton.next_power_of_2(max(DIM, 16)), 128)
    tiles = tl.cdiv(length, BLOCK)
    tile, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = row // heads, row % heads
    tokens, cols = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    x_ptr += batch.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[2]
    y_ptr += batch.to(tl.int64) * y_strides[0] + head.to(tl.int64) * y_strides[2]
    H = None
    if signs_ptr is not None:
        H = _hadamard(D, tl.float16 if x_ptr.dtype.element_ty == tl.float16 else tl.bfloat16)
    low = _rows(x_ptr, signs_ptr, tokens, cols, x_strides[1], length, DIM, H)
    high = low
    if DIM > 128:  # H of 2 D is [[H, H], [H, -H]]
        high = _rows(x_ptr, signs_ptr, tokens, D + cols, x_strides[1], length, DIM, H)
        if signs_ptr is not None:
            low, high = low + high, low - high
    if signs_ptr is not None:
        low, high = low * DIM**-0.5, high * DIM**-0.5
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))  # [BLOCK]
    if MEASURE:
        tl.atomic_max(scale_ptr + row, tl.max(most, 0))  # none is negative
    else:
        if SHARE == 1:
            most = most / MOST
            most = tl.where(most < LEAST, LEAST, most)
            tl.store(scale_ptr + row.to(tl.int64) * length + tokens, most, mask=tokens < length)
            scale = most[:, None]
        elif SHARE > 1:
            scale = tl.max(most, 0) / MOST
            scale = tl.where(scale < LEAST, LEAST, scale)
            tl.store(scale_ptr + row.to(tl.int64) * tiles + tile, scale)
        else:
            scale = tl.load(scale_ptr + row) / MOST
            scale = tl.where(scale < LEAST, LEAST, scale)
        at = y_ptr + tokens.to(tl.int64)[:, None] * y_strides[1] + cols[None, :]
        tl.store(at, (low / scale).to(tl.float8e4nv), mask=(tokens < length)[:, None] & (cols < DIM)[None, :])
        if DIM > 128:
            tl.store(at + D, (high / scale).to(tl.float8e4nv), mask=(tokens < length)[:, None] & (D + cols < DIM)[None, :])


# ---- host


def launch(_p, _config, x: torch.Tensor, share: int, signs: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.quantise` on a GPU: x [batch, len, heads, dim], dim up to 256; signs float32 [dim], of a power of two."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, length, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    tiles = triton.cdiv(length, BLOCK)
    n = {0: 1, 1: length, BLOCK: tiles}[share]
    scale = torch.zeros(batch, heads, n, dtype=torch.float32, device=x.device)
    for measure in (True, False) if share == 0 else (False,):
        _quantise[(tiles * heads * batch,)](
            x, y, scale, signs, length, heads, x.stride()[:3], y.stride()[:3], DIM=dim, SHARE=share, MEASURE=measure, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return y, scale if share else torch.where(scale / LARGEST < SMALLEST, SMALLEST, scale / LARGEST)
