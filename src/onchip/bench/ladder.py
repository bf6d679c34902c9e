"""The ladder of the suite "io": attention in the ways it was computed before onchip, each with its model of bytes.

A rung takes contiguous q, k, v `[batch, heads, n, dim]`, as many key heads as query heads, Full or Causal, and gives the
output like q. In the formulas T is the bytes of one such tensor (batch heads n dim elements) and S those of one score
matrix (batch heads n^2 elements); a cache that holds what is read again is not part of the model (docs/io-model.md).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import Full
from onchip.core.problem import Attention
from onchip.dispatch import OPS

ROWS, COLS = 128, 512  # a tile of version 1 on a CPU: 256 KiB of float32 scores a head
TILE = 1 << 13  # elements of a key tile of version 1 on a GPU: K and V take 32 KiB of shared memory in bf16; with twice that, registers spill
STATE = 4  # bytes of what version 1 keeps between key tiles: float32, as its CUDA code does


class Rung(NamedTuple):
    """One way: (problem, q, k, v) -> output; (problem, device) -> the bytes it moves, and those it holds beside its inputs."""

    attend: Callable[[Attention, Tensor, Tensor, Tensor], Tensor]
    moved: Callable[[Attention, torch.device], float]
    held: Callable[[Attention, torch.device], float]


# ---- standard attention


def standard(p: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`softmax(scale q k^T) v` as eager models write it: every step reads and writes a whole score matrix."""
    scores = q @ k.transpose(-1, -2) * p.dim**-0.5
    if not isinstance(p.mask, Full):
        scores = scores.masked_fill(_hidden(p, q.device), -torch.inf)
    return torch.softmax(scores, -1) @ v


def standard_moved(p: Attention, _device: torch.device) -> float:
    """4 T + 6 S: q, k, v read, the output written; the product writes S, scale and softmax read and write it, the last product reads it; a mask: 2 S more."""
    return 4 * _tensor(p) + (6 if isinstance(p.mask, Full) else 8) * _scores(p)


def standard_held(p: Attention, _device: torch.device) -> float:
    """2 S + T: scores and weights, and the output."""
    return 2 * _scores(p) + _tensor(p) + (0 if isinstance(p.mask, Full) else p.len_q * p.len_k)


# ---- fused, materialised


def fused(p: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scale, mask and softmax in one pass over the scores, which stay in memory: on a GPU a Triton kernel that writes over its input.

    A CPU has no such kernel here. There the scale is part of the product (baddbmm), the softmax writes over its input (`out=`),
    and a mask is a pass of its own.
    """
    scale = p.dim**-0.5
    if q.is_cuda:
        from onchip.bench.ladder_kernels import softmax

        return softmax(p, q @ k.transpose(-1, -2), scale) @ v
    scores = q.new_empty(p.batch * p.heads, p.len_q, p.len_k)
    torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale, out=scores)
    if not isinstance(p.mask, Full):
        scores.masked_fill_(_hidden(p, q.device), -torch.inf)
    return torch.bmm(torch.softmax(scores, -1, out=scores), v.flatten(0, 1)).view_as(q)


def fused_moved(p: Attention, device: torch.device) -> float:
    """4 T + 4 S: the product writes S, the softmax reads and writes it, the last product reads it; a mask on a CPU: 2 S more."""
    return 4 * _tensor(p) + (4 if device.type != "cpu" or isinstance(p.mask, Full) else 6) * _scores(p)


def fused_held(p: Attention, _device: torch.device) -> float:
    """S + T: scores, then weights in their place, and the output."""
    return _scores(p) + _tensor(p) + (0 if isinstance(p.mask, Full) else p.len_q * p.len_k)


# ---- FlashAttention, version 1


def version_1(p: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention, algorithm 1 (Dao et al., 2022): key tiles outside, query tiles inside, one block a (batch, head).

    Each key tile meets all queries, whose output (normalised so far, float32), maximum and sum are read and written back
    every time. On a GPU a Triton kernel; on a CPU the same loop in torch, all heads in one product.
    """
    if q.is_cuda:
        from onchip.bench.ladder_kernels import one_block

        return one_block(p, q, k, v, p.dim**-0.5, key_tile(p, q.device))
    out = q.new_zeros(q.shape, dtype=torch.float32)
    total = out.new_zeros(*q.shape[:3], 1)
    top = torch.full_like(total, -torch.inf)
    for start in range(0, p.len_k, COLS):
        keys, values = (x[:, :, start : start + COLS].float() for x in (k, v))
        cols = torch.arange(start, start + keys.shape[2])
        for first in range(0, p.len_q, ROWS):
            tile = slice(first, min(first + ROWS, p.len_q))
            scores = q[:, :, tile].float() @ keys.transpose(-1, -2) * p.dim**-0.5
            if not isinstance(p.mask, Full):
                scores.masked_fill_(~p.mask.dense(torch.arange(tile.start, tile.stop)[:, None], cols), -torch.inf)
            new_top = torch.maximum(top[:, :, tile], scores.amax(-1, keepdim=True))  # finite: every row sees key 0
            weights = scores.sub_(new_top).exp_()
            kept = total[:, :, tile] * (top[:, :, tile] - new_top).exp()
            new_total = kept + weights.sum(-1, keepdim=True)
            out[:, :, tile] = (kept * out[:, :, tile] + weights @ values) / new_total
            top[:, :, tile], total[:, :, tile] = new_top, new_total
    return out.to(q.dtype)


def key_tile(p: Attention, device: torch.device) -> int:
    """Keys that version 1 keeps on chip at a time; a quarter of the on-chip memory over dim, as in the paper."""
    return COLS if device.type == "cpu" else max(16, TILE // _power_of_two(p.dim))


def version_1_moved(p: Attention, device: torch.device) -> float:
    """(3 + c) T + 2 (c - 1) W with c = n / key_tile passes and W = batch heads n (4 dim + 8): k, v once; q every pass; output, maximum and sum between passes.

    With key_tile = M / 4 dim this is Theta(n^2 dim^2 / M).
    """
    passes = math.ceil(p.len_k / key_tile(p, device))
    return (3 + passes) * _tensor(p) + 2 * (passes - 1) * _state(p)


def version_1_held(p: Attention, device: torch.device) -> float:
    """W + T: the state between passes, and the output; on a CPU also a tile of scores, in two copies, and four of its output."""
    rows, cols = min(ROWS, p.len_q), min(COLS, p.len_k)
    tiles = STATE * p.batch * p.heads * (2 * rows * cols + 4 * rows * p.dim) if device.type == "cpu" else 0
    return _state(p) + _tensor(p) + tiles


# ---- onchip


def onchip_moved(p: Attention, _device: torch.device) -> float:
    """4 T, and 4 bytes a row of LSE: `Cost` counts each tensor once, for the tiles of K and V that are read again come from L2."""
    return OPS["prefill"].cost(p).bytes


RUNGS = {
    "standard attention": Rung(standard, standard_moved, standard_held),
    "fused, materialised": Rung(fused, fused_moved, fused_held),
    "FlashAttention (1)": Rung(version_1, version_1_moved, version_1_held),
}
MOVED = {**{name: rung.moved for name, rung in RUNGS.items()}, "onchip": onchip_moved}


def _tensor(p: Attention) -> int:
    """T: the bytes of q."""
    return p.batch * p.heads * p.len_q * p.dim * p.dtype.itemsize


def _scores(p: Attention) -> int:
    """S: the bytes of one score matrix of all heads."""
    return p.batch * p.heads * p.len_q * p.len_k * p.dtype.itemsize


def _state(p: Attention) -> int:
    """W: the bytes of output, maximum and sum of all rows in float32."""
    return STATE * p.batch * p.heads * p.len_q * (p.dim + 2)


def _hidden(p: Attention, device: torch.device) -> Tensor:
    """True where a query must not see a key, `[n, n]`."""
    rows = torch.arange(p.len_q, device=device)
    return ~p.mask.dense(rows[:, None], rows)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
