"""How much a query may see in a page: s[h, p] = sum over channels of max(q low, q high), from bounds of the page's keys (Quest: Tang et al., 2024).

max(q low, q high) is q high where q is positive and q low where it is not: two products of matrices, max(q, 0) high^T + min(q, 0) low^T. A program takes
up to 64 heads of a group, 16 rows at least, and BLOCK pages of a sequence; both bounds are read once, two of a page's keys in `page` that attention would read.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows
from onchip.kernels.attention.tile import block

BLOCK = 32
CHUNK = 128  # channels at a time

# ---- device


@triton.jit
def _scores(q_ptr, low_ptr, high_ptr, table_ptr, lengths_ptr, out_ptr, kv_heads, group, pages, page, q_batch, q_head, bound_page, bound_head, table_row,
            D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    batch_head = tl.program_id(0)
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    head = kv_head * group + member
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = at < tl.minimum(tl.cdiv(tl.load(lengths_ptr + batch), page), pages)
    place = tl.load(table_ptr + batch.to(tl.int64) * table_row + at, mask=used, other=0).to(tl.int64) * bound_page + kv_head.to(tl.int64) * bound_head
    q_ptr += batch.to(tl.int64) * q_batch
    scores = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, D, CHUNK):
        dims = first + tl.arange(0, CHUNK)
        there = used[:, None] & (dims < D)[None, :]
        low = tl.load(low_ptr + place[:, None] + dims[None, :], mask=there, other=0.0)
        high = tl.load(high_ptr + place[:, None] + dims[None, :], mask=there, other=0.0)
        q = tl.load(q_ptr + head[:, None] * q_head + dims[None, :], mask=(member < group)[:, None] & (dims < D)[None, :], other=0.0)
        zero = tl.zeros_like(q)
        scores = tl.dot(tl.where(q > 0, q, zero), high.T, scores, input_precision="ieee")
        scores = tl.dot(tl.where(q > 0, zero, q), low.T, scores, input_precision="ieee")
    out = ((batch * (kv_heads * group) + head).to(tl.int64) * pages)[:, None] + at[None, :]
    known = used[None, :] & (scores == scores)  # a page without bounds is no number: 0 times inf
    tl.store(out_ptr + out, tl.where(known, scores, float("-inf")), mask=(member < group)[:, None] & (at < pages)[None, :])


# ---- host


def launch(_p: Rows, _config, q, low, high, page_table, lengths, page: int) -> torch.Tensor:
    """q [batch, heads, dim], low and high [pages, kv_heads, dim] -> float32 [batch, heads, most pages], see `ops.sparse.page_scores`."""
    q, low, high = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, low, high))
    high = high if high.stride() == low.stride() else high.contiguous()
    low = low if high.stride() == low.stride() else low.contiguous()
    (batch, heads, dim), kv_heads, pages = q.shape, low.shape[1], page_table.shape[1]
    out = torch.empty(batch, heads, pages, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    rows = min(64, max(16, triton.next_power_of_2(group)))
    _scores[(batch * kv_heads, triton.cdiv(pages, BLOCK), triton.cdiv(group, rows))](
        q, low, high, page_table, lengths, out, kv_heads, group, pages, page, *q.stride()[:2], *low.stride()[:2], page_table.stride(0),
        D=dim, CHUNK=min(CHUNK, block(dim)), ROWS=rows, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
