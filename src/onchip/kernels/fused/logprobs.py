"""Log-probabilities of a token and of the largest few: x - log sum exp x, in float32.

The survey (`vocabulary.py`) reads the row once and sums; one program a row then takes the largest from the groups that can hold them, some n groups of
16, in order of logit and index: each of the few entries that reach the groups' bound goes behind as many as come before it. Where they are not few, one a pass.
Bytes: the logits once, and 1/16 of them written and read again.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows
from onchip.kernels.fused import vocabulary
from onchip.kernels.fused.vocabulary import bound_of_count, entries, list_groups, listed, maxima_of, ordered, told, weight

WARPS = 8  # of 16 ptxas spills 64 bytes
FEW = tl.constexpr(64)  # groups whose entries are kept in registers
RANKED = tl.constexpr(64)  # entries that are put in order at once: some 30 for the largest 20
NONE = tl.constexpr(-(1 << 63))  # before all keys

# ---- device


@triton.jit
def _next(row_ptr, list_ptr, count, vocab, before, before_at, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The largest listed entry after (before, before_at) in order, and its index, the lowest of equal ones."""
    best, at = tl.full([1, TILE // GROUP, GROUP], float("-inf"), tl.float32), tl.full([1, TILE // GROUP, GROUP], 1 << 30, tl.int32)
    for first in range(0, count, TILE // GROUP):
        _, index = listed(list_ptr, first, count, vocab, GROUP, TILE)
        x = entries(row_ptr, index, vocab)
        after = (index < vocab) & ((x < before) | ((x == before) & (index > before_at)))
        better = after & ((x > best) | (at == (1 << 30)))
        best, at = tl.where(better, x, best), tl.where(better, index, at)
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, at, 1 << 30))


@triton.jit
def _log_probs(
    logits_ptr,
    maxima_ptr,
    slices_ptr,
    list_ptr,
    tokens_ptr,
    chosen_ptr,
    top_ptr,
    ids_ptr,
    row_stride,
    vocab,
    slices,
    groups,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    row_ptr, list_ptr = logits_ptr + row * row_stride, list_ptr + row * groups
    part = tl.arange(0, SLICES)
    slice_ptr, there = slices_ptr + (row * slices + part) * 4, part < slices
    tops = tl.load(slice_ptr, mask=there, other=float("-inf"))
    largest = tl.max(tops)
    total = tl.log(tl.sum(tl.where(there, tl.load(slice_ptr + 1, mask=there, other=0.0) * weight(tops, largest, 1.0), 0.0)))
    token = tl.load(tokens_ptr + row)
    x = tl.load(row_ptr + token, mask=(token >= 0) & (token < vocab), other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    tl.store(chosen_ptr + row, tl.where(x > float("-inf"), (x - largest) - total, float("-inf")))
    if TOP > 0:
        top_ptr += row * TOP
        ids_ptr += row * TOP
        maxima = maxima_of(maxima_ptr, row, groups, GROUPS)
        bound = bound_of_count(maxima, TOP, FEW // 2, BITS)
        count = list_groups(list_ptr, maxima, bound, groups)
        _, index = listed(list_ptr, 0, tl.minimum(count, FEW), vocab, GROUP, FEW * GROUP)
        x = entries(row_ptr, index, vocab)
        reach = (x >= bound) & (index < vocab)
        num = tl.where(count <= FEW, tl.sum(reach.to(tl.int32)), 0)
        ranked = (num >= TOP) & (num <= RANKED) & (GROUPS > FEW + RANKED)  # there is room behind the list
        if ranked:
            found = tl.reshape(reach, [FEW * GROUP])
            tl.store(list_ptr + FEW + tl.cumsum(found.to(tl.int32), 0) - 1, tl.reshape(index, [FEW * GROUP]), mask=found)
            tl.debug_barrier()  # other threads read it
            n = tl.arange(0, RANKED)
            of = tl.load(list_ptr + FEW + n, mask=n < num, other=1 << 30)
            z = entries(row_ptr, of, vocab)
            keys = ordered(z, of)
            rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
            first = (of < vocab) & (rank < TOP)
            tl.store(top_ptr + rank, (z - largest) - total, mask=first)
            tl.store(ids_ptr + rank, of.to(tl.int64), mask=first)
        if ranked == 0:  # not as `else`: 8 bytes of scalars would be spilled (gfx942)
            few = tl.where(index < vocab, ordered(x, index), NONE)  # in registers
            before, at = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
            for place in range(TOP):
                if count <= FEW:
                    key = tl.max(few)
                    few = tl.where(few == key, NONE, few)
                    before, at = told(key)
                else:
                    before, at = _next(row_ptr, list_ptr, count, vocab, before, at, GROUP, TILE)
                tl.store(top_ptr + place, tl.where(before > float("-inf"), (before - largest) - total, float("-inf")))
                tl.store(ids_ptr + place, at.to(tl.int64))


# ---- host


def launch(problem: Rows, config: None, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 [rows] and [rows, top], and int64 [rows, top]; logits [rows, vocab], tokens [rows]."""
    (rows, vocab), device, most = logits.shape, logits.device, int(problem.variant.split()[1])
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    top = torch.empty(rows, most, dtype=torch.float32, device=device)
    ids = torch.empty(rows, most, dtype=torch.int64, device=device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        maxima, slices, groups, tiles = vocabulary.survey(logits)
        sizes = (logits.stride(0), vocab, slices.shape[1], maxima.shape[1])
        out = (chosen, top, ids)
        _log_probs[(rows,)](logits, maxima, slices, groups, tokens.contiguous(), *out, *sizes, TOP=most, **tiles, num_warps=WARPS)
    return chosen, top, ids
