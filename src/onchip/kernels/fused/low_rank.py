"""Low-rank additions of several adapters in one batch: y[r] += B[i] (A[i] x[r]), i the adapter of row r (LoRA: Hu et al., 2021; batched: Punica, 2023).

Rows come sorted by adapter (`order`, and where each adapter's rows start), and go in tiles of rows of one adapter, so that A and B are read once
a tile and not once a row; a program finds its tile from the starts, and there are as many programs as tiles could be. Two launches:

    _shrink   t = A x: a program has a tile, one part of the output (q, k or v have matrices A of their own) and a share of x's columns, as float32
    _expand   y += B t: a program has a tile and BLOCK_N columns of a part; it adds up the shares of t in their order: the same bits in every run

Traffic is that of x and A, of y twice, of B, and t, which stays in the L2 cache: rows x parts x rank x shares x 4 bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.low_rank import LowRank, Route
from onchip.core.problem import Rows

FEW = 256  # rows of a decode step
SHARES = 8
COLUMNS = ((64, 128), (128, 64), (256, 32))  # (rank up to, columns of x at a time, of 2 bytes): three stages in the 64 KiB of shared memory that AMD has


class Shrink(NamedTuple):
    """Tiles of `_shrink`: rows, columns of x at a time, and programs that share a row's columns."""

    rows: int
    columns: int
    shares: int
    warps: int


class Expand(NamedTuple):
    """Tiles of `_expand`: rows, columns of y, and columns of t at a time."""

    rows: int
    columns: int
    ranks: int
    warps: int


class Tiles(NamedTuple):
    shrink: Shrink
    expand: Expand

    def __str__(self):
        (m, k, shares, warps), (m2, n, r, warps2) = self.shrink, self.expand
        return f"{m} rows, x in {shares} shares by {k}, {warps} warps; {m2} rows x {n} columns by {r}, {warps2} warps"


# ---- device


@triton.jit
def _tile(starts_ptr, tile, adapters, ADAPTERS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The adapter of a tile, its first row in the order, and how many rows there are from that on; `adapters` for a tile that there is not."""
    i = tl.arange(0, ADAPTERS)
    first = tl.load(starts_ptr + i, mask=i < adapters, other=0)
    count = tl.load(starts_ptr + i + 1, mask=i < adapters, other=0) - first
    tiles = tl.cdiv(count, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    mine = (ends - tiles <= tile) & (tile < ends)
    adapter = tl.where(tl.sum(mine.to(tl.int32), 0) > 0, tl.sum(tl.where(mine, i, 0), 0), adapters)
    skip = tl.sum(tl.where(mine, tile - (ends - tiles), 0), 0) * BLOCK_M
    return adapter, tl.sum(tl.where(mine, first, 0), 0) + skip, tl.sum(tl.where(mine, count, 0), 0) - skip


@triton.jit(do_not_specialize=["rows", "adapters", "parts"])
def _shrink(x_ptr, a_ptr, t_ptr, order_ptr, starts_ptr, rows, width, rank, x_stride, adapters, parts, each,
            ADAPTERS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """t [shares, rows, parts, rank]; a share is `each` columns of x."""
    adapter, first, left = _tile(starts_ptr, tl.program_id(0), adapters, ADAPTERS, BLOCK_M)
    part, share = tl.program_id(1) % parts, tl.program_id(1) // parts
    if adapter < adapters:
        m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, RANK), tl.arange(0, BLOCK_K)
        row = tl.load(order_ptr + first + m, mask=m < left, other=0).to(tl.int64)
        a_at = a_ptr + (adapter.to(tl.int64) * parts + part) * rank * width
        sums = tl.zeros([BLOCK_M, RANK], tl.float32)
        for start in range(share * each, tl.minimum(share * each + each, width), BLOCK_K):
            col = start + k
            x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=(m < left)[:, None] & (col < width)[None, :], other=0.0)
            a = tl.load(a_at + n[:, None] * width + col[None, :], mask=(n < rank)[:, None] & (col < width)[None, :], other=0.0)
            sums = tl.dot(x, a.T, sums, input_precision="ieee")
        at = ((share * rows + first + m).to(tl.int64) * parts + part) * rank
        tl.store(t_ptr + at[:, None] + n[None, :], sums, mask=(m < left)[:, None] & (n < rank)[None, :])


@triton.jit(do_not_specialize=["rows", "adapters", "parts"])
def _expand(t_ptr, b_ptr, y_ptr, order_ptr, starts_ptr, ends_ptr, rows, width, rank, y_stride, adapters, parts,
            ADAPTERS: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    adapter, first, left = _tile(starts_ptr, tl.program_id(0), adapters, ADAPTERS, BLOCK_M)
    if adapter < adapters:
        part, begin, block = 0, 0, tl.program_id(1)  # a part's columns begin a block of their own
        end = tl.load(ends_ptr)
        while block * BLOCK_N >= end - begin:
            block -= tl.cdiv(end - begin, BLOCK_N)
            part += 1
            begin = end
            end = tl.load(ends_ptr + part)
        m, n, r = tl.arange(0, BLOCK_M), begin + block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        row = tl.load(order_ptr + first + m, mask=m < left, other=0).to(tl.int64)
        here = (m < left)[:, None] & (n < end)[None, :]
        y_at = y_ptr + row[:, None] * y_stride + n[None, :]
        b_at = b_ptr + (adapter.to(tl.int64) * width + n)[:, None] * rank + r[None, :]
        t_at = t_ptr + ((first + m).to(tl.int64) * parts + part)[:, None] * rank + r[None, :]
        size = tl.cast(rows, tl.int64) * parts * rank
        sums = tl.load(y_at, mask=here, other=0.0).to(tl.float32)
        for start in range(0, rank, BLOCK_R):  # t and B of a whole rank of 128 would not stay in registers
            inside = (r < rank - start)[None, :]
            b = tl.load(b_at + start, mask=(n < end)[:, None] & inside, other=0.0)
            t = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for share in tl.static_range(SHARES):
                t += tl.load(t_at + share * size + start, mask=(m < left)[:, None] & inside, other=0.0)
            sums = tl.dot(t.to(b.dtype), b.T, sums, input_precision="ieee")
        tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=here)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Of few rows 16 go together, of many 32; x in as many shares as still give each multiprocessor a program of its own.

    On an H200, rank 16, bf16: 256 columns of y and 8 shares in 12.7 us where 128 and 16 took 17.7 (16 rows of 16 adapters); 32 rows in 88 us where 64 took
    120 (4,096 rows of 4), whose registers leave a multiprocessor one program.
    """
    words, wide = problem.variant.split(), problem.dtype.itemsize // 2
    width, rank, parts = int(words[1]), int(words[3]), len(words[5].split("+"))
    rows = 16 if problem.rows <= FEW else 32
    columns = pick(COLUMNS, rank) // wide
    tiles, shares = triton.cdiv(problem.rows, rows) * parts, 1
    while 2 * tiles * shares <= device.sms and shares < SHARES and width >= 2 * shares * columns:
        shares *= 2
    return [Tiles(Shrink(rows, columns, shares, 4), Expand(rows, (256 if rows == 16 else 128) // wide, min(32, _padded(rank)), 4))]


def _padded(rank: int) -> int:
    """As products on tensor cores have it."""
    return max(16, triton.next_power_of_2(rank))


def launch(problem: Rows, config: Tiles, y: torch.Tensor, x: torch.Tensor, low: LowRank, route: Route) -> torch.Tensor:
    """y [rows, out], in place; x [rows, in]."""
    (adapters, outer, width), (_, out, rank), parts, rows = low.a.shape, low.b.shape, len(low.parts), len(x)
    if not rows:
        return y
    (shrink_m, columns, shares, shrink_warps), (expand_m, block_n, block_r, expand_warps) = config
    t = torch.empty((shares, rows, outer), dtype=torch.float32, device=x.device)
    each = triton.cdiv(triton.cdiv(width, shares), columns) * columns
    lists, most = (route.order, route.starts), triton.next_power_of_2(adapters)
    _shrink[(_most(rows, shrink_m, adapters), parts * shares)](
        x, low.a, t, *lists, rows, width, rank, x.stride(0), adapters, parts, each,
        ADAPTERS=most, RANK=_padded(rank), BLOCK_M=shrink_m, BLOCK_K=columns, num_warps=shrink_warps,
    )  # fmt: skip
    blocks = sum(triton.cdiv(size, block_n) for size in low.parts)
    _expand[(_most(rows, expand_m, adapters), blocks)](
        t, low.b, y, *lists, low.ends, rows, out, rank, y.stride(0), adapters, parts,
        ADAPTERS=most, SHARES=shares, BLOCK_M=expand_m, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=expand_warps,
    )  # fmt: skip
    return y


def _most(rows: int, block_m: int, adapters: int) -> int:
    """Tiles that there may be: each adapter may have one that is not full."""
    return min(rows, triton.cdiv(rows, block_m) + adapters - 1)
