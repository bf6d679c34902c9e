"""Decoding over a latent cache by several programs: how the keys of all sequences are cut into shares, and how the parts of a sequence that was cut become one.

Pairs of key blocks of all sequences lie end to end, and a share is as many of them for every program. Where a share ends inside a sequence, each of the
programs that meet there writes its part in float32 and the LSE of its rows in base 2, and a launch behind them adds the parts up in the order of the keys:

    o = sum_s 2^(lse_s - lse) o_s        lse = log2 sum_s 2^lse_s
"""

import torch
import triton
import triton.language as tl

from onchip.core.kernel import pick
from onchip.kernels.attention.tile import LN2

ROWS, COLUMNS = 64, 512  # of a part

# ---- device


@triton.jit
def share_of(total, most, shares):
    """Pairs of a share: as many for all; but where whole sequences, were they all as long as the longest, cost an eighth more at most, whole ones, which
    need no merging."""
    share = tl.cdiv(total, shares)
    whole = tl.cdiv(share, most) * most
    return tl.where(8 * (whole - share) <= share, whole, share)


@triton.jit
def pairs_of(length):
    """Pairs of blocks of a sequence: one at least, so that one without keys has its zeros written."""
    return tl.maximum((length + 127) // 128, 1)


@triton.jit
def _merge(part_ptr, part_lse_ptr, out_ptr, lse_ptr, lengths_ptr, batch, shares, tiles, heads, len_q,
           BATCH: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Of a sequence that was cut, HEIGHT rows and WIDTH columns after as many, PARTS parts at a time. Which was is known from the lengths before the last
    parts are written."""
    tl.extra.cuda.gdc_launch_dependents()
    rows_all = heads * len_q
    blocks = tl.cdiv(rows_all, HEIGHT) * (512 // WIDTH)
    i = tl.arange(0, BATCH)
    pairs = tl.where(i < batch, pairs_of(tl.load(lengths_ptr + i, mask=i < batch, other=0)), 0)
    share = share_of(tl.sum(pairs, 0), tl.max(pairs, 0), shares)
    each = tl.num_programs(0) // batch
    sequence, own = tl.program_id(0) // each, tl.program_id(0) % each
    begin = tl.sum(tl.where(i < sequence, pairs, 0), 0)
    first, last = begin // share, (begin + tl.sum(tl.where(i == sequence, pairs, 0), 0) - 1) // share
    tl.extra.cuda.gdc_wait()  # in every program: whoever comes after this kernel must find the first one's results
    if first < last:
        for block in range(own, blocks, each):
            row = block // (512 // WIDTH) * HEIGHT + tl.arange(0, HEIGHT)
            column = block % (512 // WIDTH) * WIDTH + tl.arange(0, WIDTH)
            there = row < rows_all
            acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
            top = tl.full([HEIGHT], float("-inf"), tl.float32)
            total = tl.zeros([HEIGHT], tl.float32)
            for part in range(first, last + 1, PARTS):
                parts = part + tl.arange(0, PARTS)
                slot = ((parts + sequence).to(tl.int64) * (tiles * 64))[:, None] + row[None, :]
                real = (parts <= last)[:, None] & there[None, :]
                lse = tl.load(part_lse_ptr + slot, mask=real, other=float("-inf"))  # [PARTS, HEIGHT]
                values = tl.load(part_ptr + slot[:, :, None] * 512 + column[None, None, :], mask=real[:, :, None], other=0.0)
                new_top = tl.maximum(top, tl.max(lse, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                weight, shrink = tl.exp2(lse - base[None, :]), tl.exp2(top - base)
                acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 0)
                total = total * shrink + tl.sum(weight, 0)
                top = new_top
            acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
            to = sequence.to(tl.int64) * rows_all + row
            tl.store(out_ptr + to[:, None] * 512 + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=there[:, None])
            if lse_ptr is not None:
                to = sequence.to(tl.int64) * rows_all + row % heads * len_q + row // heads
                tl.store(lse_ptr + to, (top + tl.log2(total)) * LN2, mask=there & (block % (512 // WIDTH) == 0))


# ---- host

# Parts of a sequence, on the average, up to: parts at a time, rows and columns of a block. 32x4k (2 parts) 71.2 us by 2 parts and 2 rows, 71.5 by 2 and 4, 75.9
# by 4 and 1; 64 sequences (1 part or 2) of 4k 118.9 by 2 rows, 121.2 by 4, of 512 to 16k 131.0 and 124.6, one of 64k among 1k 101.6 and 80.4.
MERGE = ((2, (2, 4, 512)), (3, (2, 2, 512)), (16, (4, 1, 512)), (1 << 62, (32, 1, 128)))
MERGING, ALL = 1056, 2112  # programs that merge, of four warps; a block each where there are at most so many (128x4k: 242 us, with a block each 253)


def parts_of(q: torch.Tensor, batch: int, shares: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts of all cut sequences, `[shares + batch, tiles, rows, columns]` float32, and for their LSE; of one share nothing is cut. A part of
    sequence `i` by share `s` is at `s + i`: the next part is the next program's or the next sequence's."""
    slots = shares + batch if shares > 1 else 0
    return tuple(torch.empty((slots, tiles, ROWS, *columns), dtype=torch.float32, device=q.device) for columns in ((COLUMNS,), ()))


def merge(parts: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, lengths: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Write the rows of `out` and `lse` whose sequences were cut. `sizes`: batch, shares, tiles, heads, queries."""
    batch, shares, _, heads, len_q = sizes
    at_once, height, width = pick(MERGE, triton.cdiv(shares, batch))
    blocks = triton.cdiv(heads * len_q, height) * (COLUMNS // width)
    each = blocks if batch * blocks <= ALL else max(1, min(blocks, MERGING // batch))
    _merge[(batch * each,)](
        *parts, out, lse, lengths, *sizes,
        BATCH=triton.next_power_of_2(batch), PARTS=at_once, HEIGHT=height, WIDTH=width, num_warps=4, launch_pdl=True,
    )  # fmt: skip
