"""The two kernels of the ladder that torch lacks: a softmax over scores that stay in memory, and FlashAttention's first version.

softmax     scores <- softmax(scale scores + mask), in place. One program a row, which it reads once and writes once.
one_block   softmax(scale q k^T + mask) v, one program a (batch, head). K and V are read once, a tile at a time; for each
            tile all of q, and the output, maximum and sum of every row so far, are read and written again.
Both show a step between standard attention and onchip as it was, so they share nothing with the kernels of `onchip.attention`.
"""

import torch
import triton
import triton.language as tl

from onchip.core.kernel import pick
from onchip.core.masks import Causal
from onchip.core.problem import Attention

# ---- device


@triton.jit
def _softmax_rows(scores_ptr, scale, length, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    ptrs = scores_ptr + row.to(tl.int64) * length + cols
    seen = cols < length
    if CAUSAL:
        seen = seen & (cols <= row % length)
    scores = tl.load(ptrs, mask=seen, other=float("-inf")).to(tl.float32) * scale
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    tl.store(ptrs, weights.to(scores_ptr.dtype.element_ty), mask=cols < length)


@triton.jit
def _one_block(q_ptr, k_ptr, v_ptr, o_ptr, state_ptr, top_ptr, total_ptr, scale, length,
               D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * length  # the first row of this head
    dims = tl.arange(0, BLOCK_D)
    for n in range(0, length, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        keys = (start + cols)[:, None] * D + dims[None, :]
        there = (cols < length)[:, None] & (dims < D)[None, :]
        k = tl.load(k_ptr + keys, mask=there, other=0.0)
        v = tl.load(v_ptr + keys, mask=there, other=0.0)
        for m in range(0, length, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            place = (start + rows)[:, None] * D + dims[None, :]
            inside = (rows < length)[:, None] & (dims < D)[None, :]
            q = tl.load(q_ptr + place, mask=inside, other=0.0)
            before = (rows < length) & (n > 0)  # nothing is kept before the first key tile
            top = tl.load(top_ptr + start + rows, mask=before, other=float("-inf"))
            total = tl.load(total_ptr + start + rows, mask=before, other=0.0)
            out = tl.load(state_ptr + place, mask=inside & (n > 0), other=0.0)
            scores = tl.dot(q, k.T, input_precision="ieee") * scale
            seen = (cols < length)[None, :]
            if CAUSAL:
                seen = seen & (cols[None, :] <= rows[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every row sees key 0
            weights = tl.exp(scores - new_top[:, None])
            kept = total * tl.exp(top - new_top)
            total = kept + tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, out * kept[:, None], input_precision="ieee") / total[:, None]
            if n + BLOCK_N < length:
                tl.store(state_ptr + place, out, mask=inside)
                tl.store(top_ptr + start + rows, new_top, mask=rows < length)
                tl.store(total_ptr + start + rows, total, mask=rows < length)
            else:
                tl.store(o_ptr + place, out.to(o_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the next key tile reads what other threads of the block have written


# ---- host

WARPS = ((2048, 4), (8192, 8), (1 << 16, 16))  # (row width up to, warps)
QUERIES, BLOCK_WARPS, STAGES = 64, 4, 2  # queries a tile, warps, and query tiles in flight


def softmax(p: Attention, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """`scores` [batch, heads, n, n], contiguous, which hold the weights afterwards."""
    block = triton.next_power_of_2(p.len_k)
    _softmax_rows[(p.batch * p.heads * p.len_q,)](scores, scale, p.len_k, CAUSAL=isinstance(p.mask, Causal), BLOCK=block, num_warps=pick(WARPS, block))
    return scores


def one_block(p: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, keys: int) -> torch.Tensor:
    """q, k, v [batch, heads, n, dim], contiguous; `keys` a tile."""
    out = torch.empty_like(q)
    state = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    _one_block[(p.batch * p.heads,)](
        q, k, v, out, state, top, total, scale, p.len_q, D=p.dim, BLOCK_M=QUERIES, BLOCK_N=keys, BLOCK_D=triton.next_power_of_2(p.dim),
        CAUSAL=isinstance(p.mask, Causal), num_warps=BLOCK_WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
