"""Embedding: y = weight[id], and the gradient of the weights, dweight[v] = the sum of dy over the tokens whose id is v.

Forward a program copies a piece of one row: traffic is 2 tokens width. Backward the ids have been sorted once, so that the tokens of an id stand
side by side. A program takes CHUNK of them and a piece of the width, adds them up in float32 in their order, and writes each sum that lies wholly
inside; what reaches over a border goes to `head` (of an id that began before) or `tail` (of one that goes on), and a second kernel adds those up.
No atomics: the same bits in every run, however often an id occurs. Rows of no token are cleared beside all that, on a stream of their own: sorting is all
latency. Traffic is dy and dweight, once.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.problem import Rows
from onchip.kernels.launch import starts_early

CLEARED, CLEARING = 16, 1  # rows that a program clears at once; programs of a multiprocessor: 4 of them cost 9 us of 136, as the sort waits for room (H200)
LOOK = tl.constexpr(256)  # chunks looked at together for the end of an id
CHUNK = 16  # tokens a program adds up: enough programs for 2k tokens, and at most 1/8 more traffic where all ids are one


class Tiles(NamedTuple):
    block: int
    warps: int

    def __str__(self):
        return f"tiles of {self.block}, {self.warps} warps"


# ---- device


@triton.jit
def _look_up(ids_ptr, weight_ptr, y_ptr, width, vocab, weight_stride, BLOCK: tl.constexpr):
    pieces = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + token).to(tl.int64)
    known = (id >= 0) & (id < vocab)
    row = tl.load(weight_ptr + id * weight_stride + col, mask=known & (col < width), other=float("nan"))
    tl.store(y_ptr + token * width + col, row, mask=col < width)


@triton.jit
def _known(ids_ptr, known_ptr, used_ptr, tokens, vocab, padding, BLOCK: tl.constexpr):
    """Ids in fewer bytes, which sort sooner; what is no row of weight is -1. 1 where a row has a gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + at, mask=at < tokens, other=-1).to(tl.int64)
    id = tl.where((id >= 0) & (id < vocab), id, -1)
    tl.store(known_ptr + at, id.to(known_ptr.dtype.element_ty), mask=at < tokens)
    tl.store(used_ptr + id, 1, mask=(id >= 0) & (id != padding))


@triton.jit
def _token(ids_ptr, order_ptr, at, tokens):
    """The id of a sorted token, and where the token stands; any past the last."""
    return tl.load(ids_ptr + at, mask=at < tokens, other=0).to(tl.int64), tl.load(order_ptr + at, mask=at < tokens, other=0)


@triton.jit
def _sums(dy_ptr, ids_ptr, order_ptr, dw_ptr, head_ptr, tail_ptr, tokens, width, dy_stride, vocab, padding,
          CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:  # of `_borders`, which waits
        tl.extra.cuda.gdc_launch_dependents()
    pieces = tl.cdiv(width, BLOCK)
    chunk = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside, start = col < width, chunk * CHUNK
    id = tl.load(ids_ptr + start).to(tl.int64)
    began = (start == 0) | (tl.load(ids_ptr + start - 1, mask=start > 0, other=0).to(tl.int64) != id)
    row = tl.load(dy_ptr + tl.load(order_ptr + start) * dy_stride + col, mask=inside, other=0.0)
    following, place = _token(ids_ptr, order_ptr, start + 1, tokens)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(CHUNK):
        at = start + n
        total += row.to(tl.float32)
        more = at + 1 < tokens
        ahead = more & (n + 1 < CHUNK)  # the next row is on its way before this one is stored, and the place of the one after it
        row = tl.load(dy_ptr + place * dy_stride + col, mask=inside & ahead, other=0.0)
        after, place = _token(ids_ptr, order_ptr, at + 2, tokens)
        ends = (at < tokens) & ((not more) | (following != id))
        counted = (id >= 0) & (id < vocab) & (id != padding)
        last = (at < tokens) & ((n + 1 == CHUNK) | (not more))
        tl.store(dw_ptr + id * width + col, total.to(dw_ptr.dtype.element_ty), mask=inside & ends & began & counted)
        tl.store(head_ptr + chunk * width + col, total, mask=inside & (ends | last) & (not began))
        tl.store(tail_ptr + chunk * width + col, total, mask=inside & last & (not ends) & began)
        began = began | ends
        total = tl.where(ends, 0.0, total)
        id, following = following, after


@triton.jit
def _clear(used_ptr, dw_ptr, vocab, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """0 in the rows that have no gradient."""
    for first in range(tl.program_id(0) * ROWS, vocab, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        empty = (tl.load(used_ptr + row, mask=row < vocab, other=1) == 0)[:, None]
        rows = dw_ptr + row.to(tl.int64)[:, None] * width
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            tl.store(rows + col, tl.zeros([ROWS, BLOCK], dw_ptr.dtype.element_ty), mask=empty & (col < width))


@triton.jit
def _borders(ids_ptr, dw_ptr, head_ptr, tail_ptr, tokens, width, vocab, padding, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The sum of an id that begins in this chunk and goes on after it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pieces = tl.cdiv(width, BLOCK)
    chunk = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside, start, after = col < width, chunk * CHUNK, (chunk + 1) * CHUNK
    id = tl.load(ids_ptr + tl.minimum(after, tokens) - 1).to(tl.int64)
    began = (start == 0) | (tl.load(ids_ptr + start - 1, mask=start > 0, other=0).to(tl.int64) != id)
    on = (after < tokens) & (tl.load(ids_ptr + after, mask=after < tokens, other=0).to(tl.int64) == id)
    here = on & began & (id >= 0) & (id < vocab) & (id != padding)
    following, on = 0, here
    while on:  # chunks after this one that begin with the same id, LOOK at a time: ids are sorted
        at = after + (following + tl.arange(0, LOOK)).to(tl.int64) * CHUNK
        same = tl.sum((tl.load(ids_ptr + at, mask=at < tokens, other=-1).to(tl.int64) == id).to(tl.int32), 0)
        following += same
        on = same == LOOK
    total = tl.load(tail_ptr + chunk * width + col, mask=inside & here, other=0.0)
    for n in range(following):
        total += tl.load(head_ptr + (chunk + 1 + n) * width + col, mask=inside, other=0.0)
    tl.store(dw_ptr + id * width + col, total.to(dw_ptr.dtype.element_ty), mask=inside & here)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Wide pieces for few programs' sake, two loads of 16 bytes a thread (H200, bf16: 4.07 TB/s, with one 3.80)."""
    block = min(1024, max(128, triton.next_power_of_2(problem.width)))
    return [Tiles(block, max(1, block // 512))]


def launch(problem: Rows, config: Tiles, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.empty((*ids.shape, problem.width), dtype=weight.dtype, device=weight.device)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    if y.numel():
        grid = (problem.rows * triton.cdiv(problem.width, config.block),)
        _look_up[grid](ids.contiguous(), weight, y, problem.width, len(weight), weight.stride(0), BLOCK=config.block, num_warps=config.warps)
    return y


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Where rows are cleared."""
    return torch.cuda.Stream(device)


def launch_backward(problem: Rows, config: Tiles, ids: torch.Tensor, dy: torch.Tensor, vocab: int, padding: int) -> torch.Tensor:
    """The gradient of weight [vocab, width]; ids [..], dy [.., width]."""
    if not dy.numel():
        return torch.zeros((vocab, problem.width), dtype=dy.dtype, device=dy.device)
    dy = dy.reshape(problem.rows, problem.width)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    narrow = torch.int16 if vocab <= 1 << 15 else torch.int32  # 16,384 ids sort in 31 us, in 47, and as int64 in 80 (H200)
    known = torch.empty(problem.rows, dtype=narrow, device=dy.device)
    used = torch.zeros(vocab, dtype=torch.uint8, device=dy.device)
    _known[(triton.cdiv(problem.rows, 1024),)](ids.contiguous(), known, used, problem.rows, vocab, padding, BLOCK=1024)
    dw = torch.empty((vocab, problem.width), dtype=dy.dtype, device=dy.device)
    side = _side(dy.device) if dy.is_cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(dy.device))
    with torch.cuda.stream(side):  # few programs, between which the sort's find room
        programs = min(triton.cdiv(vocab, CLEARED), CLEARING * of(dy.device).sms)
        _clear[(programs,)](used, dw, vocab, problem.width, ROWS=CLEARED, BLOCK=config.block, num_warps=4)
    found, order = torch.sort(known, stable=True)
    chunks = triton.cdiv(problem.rows, CHUNK)
    head, tail = torch.empty((2, chunks, problem.width), dtype=torch.float32, device=dy.device)
    grid, sizes = (chunks * triton.cdiv(problem.width, config.block),), (problem.rows, problem.width)
    early = starts_early(dy)
    tiles = {"CHUNK": CHUNK, "BLOCK": config.block, "EARLY": early, "num_warps": config.warps}
    _sums[grid](dy, found, order, dw, head, tail, *sizes, dy.stride(0), vocab, padding, **tiles)
    _borders[grid](found, dw, head, tail, *sizes, vocab, padding, **tiles, **({"launch_pdl": True} if early else {}))
    if side is not None:
        torch.cuda.current_stream(dy.device).wait_stream(side)
    return dw
