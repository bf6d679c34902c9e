"""A decode's bookkeeping, one launch before the model and one after the sampler, where torch takes 13 and 5 of about 1.5 us each in a graph.

    at = max(position, 0);   slot = table[at // page] * page + at % page, or -1;   length = position + 1
    token = drawn;   position += used;   counts[drawn] += used;   history[position] = drawn where used

A thread has a row. Bytes: 40 a row before the model and 40 after it, which is nothing beside a launch.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows

BLOCK, WARPS = 64, 2  # rows of a program: their loads of pages and counts are apart, so a few programs side by side

# ---- device


@triton.jit(do_not_specialize=["rows"])
def _places(positions_ptr, table_ptr, at_ptr, slots_ptr, lengths_ptr, rows, pages, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    at = tl.maximum(position, 0)
    column = tl.minimum(at // PAGE, pages - 1)
    index = tl.load(table_ptr + row.to(tl.int64) * table_stride + column, mask=inside, other=0).to(tl.int64)
    tl.store(at_ptr + row, at, mask=inside)
    tl.store(slots_ptr + row, tl.where(position >= 0, index * PAGE + at % PAGE, -1), mask=inside)
    tl.store(lengths_ptr + row, (position + 1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _advance(drawn_ptr, tokens_ptr, positions_ptr, counts_ptr, history_ptr, rows, counts_stride, history_stride, longest, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    token = tl.load(drawn_ptr + row, mask=inside, other=0)
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    used = position >= 0
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, position + 1, mask=used)
    if counts_ptr is not None:
        count_ptr = counts_ptr + row.to(tl.int64) * counts_stride + token
        tl.store(count_ptr, tl.load(count_ptr, mask=used, other=0) + 1, mask=used)
    if history_ptr is not None:
        place = tl.minimum(position + 1, longest - 1)
        tl.store(history_ptr + row.to(tl.int64) * history_stride + place, token.to(tl.int32), mask=used)


# ---- host


def launch_places(problem: Rows, config: None, positions: torch.Tensor, page_table: torch.Tensor, at: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """at and slots, int64 [rows], and lengths, int32 [rows]; `width` is the page."""
    at = torch.empty_like(positions) if at is None else at
    slots, lengths = torch.empty_like(positions), torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    if problem.rows:
        sizes = problem.rows, page_table.shape[1], page_table.stride(0)
        _places[(triton.cdiv(problem.rows, BLOCK),)](positions, page_table, at, slots, lengths, *sizes, PAGE=problem.width, BLOCK=BLOCK, num_warps=WARPS)
    return at, slots, lengths


def launch_advance(problem: Rows, config: None, drawn, tokens, positions, counts, history) -> None:
    """In place."""
    if problem.rows:
        strides = (0 if given is None else given.stride(0) for given in (counts, history))
        longest = 1 if history is None else history.shape[1]
        _advance[(triton.cdiv(problem.rows, BLOCK),)](
            drawn, tokens, positions, counts, history, problem.rows, *strides, longest, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip
