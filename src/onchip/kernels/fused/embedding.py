"""Embedding: y = weight[id], and the gradient of the weights, dweight[v] = the sum of dy over the tokens whose id is v.

Forward a program copies a piece of one row: traffic is 2 tokens width. Backward the ids have been sorted once, so that the tokens of an id stand
side by side. A program takes CHUNK of them and a piece of the width, adds them up in float32 in their order, and writes each sum that lies wholly
inside; what reaches over a border goes to `head` (of an id that began before) or `tail` (of one that goes on), and a second kernel adds those up.
No atomics in sums: the same bits in every run, however often an id occurs. Rows of no token are cleared beside all that, on a stream of their own: sorting
is all latency. Where tokens are many beside rows, so are rows of FEW tokens made, from a list of a row's tokens, which a program puts in order; what
needs a sort goes beside it. Traffic is dy and dweight, once.
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
FEW = tl.constexpr(4)  # tokens of a row that need no sort
SPARSE = 2  # rows a token up to which rows of few tokens go without: 16,384 tokens of 32,768 rows 123 us (139), of 128,256 370 (328)
ROWS, ROW = 4, 2048  # of a program that makes rows of few tokens: how many, and columns; 8 rows 131 us, 4,096 columns 126
LOOK = tl.constexpr(256)  # chunks looked at together for the end of an id
KNOWN = 256  # tokens of a program that counts them
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
def _known(ids_ptr, known_ptr, count_ptr, first_ptr, tokens, vocab, padding, BLOCK: tl.constexpr):
    """Ids in fewer bytes, which sort sooner; what is no row of weight is -1. How many tokens each row has a gradient of, and FEW of them, in any order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + at, mask=at < tokens, other=-1).to(tl.int64)
    id = tl.where((id >= 0) & (id < vocab), id, -1)
    tl.store(known_ptr + at, id.to(known_ptr.dtype.element_ty), mask=at < tokens)
    counted = (id >= 0) & (id != padding)
    place = tl.atomic_add(count_ptr + id, 1, mask=counted, sem="relaxed")
    if first_ptr is not None:
        tl.store(first_ptr + id * FEW + place, at.to(tl.int32), mask=counted & (place < FEW))


@triton.jit
def _token(ids_ptr, order_ptr, count_ptr, at, tokens, vocab, padding):
    """The id of a sorted token, where the token stands, and whether `_sums` makes its row, of more than FEW tokens where there is a `count_ptr`; any past the
    last."""
    id = tl.load(ids_ptr + at, mask=at < tokens, other=-1).to(tl.int64)
    mine = (id >= 0) & (id < vocab) & (id != padding)
    if count_ptr is not None:
        mine = tl.load(count_ptr + id, mask=mine, other=0) > FEW
    return id, tl.load(order_ptr + at, mask=at < tokens, other=0), mine


@triton.jit
def _sums(dy_ptr, ids_ptr, order_ptr, count_ptr, dw_ptr, head_ptr, tail_ptr, tokens, width, dy_stride, vocab, padding,
          CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:  # of `_borders`, which waits
        tl.extra.cuda.gdc_launch_dependents()
    pieces = tl.cdiv(width, BLOCK)
    chunk = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside, start = col < width, chunk * CHUNK
    if count_ptr is not None:
        _, _, any_mine = _token(ids_ptr, order_ptr, count_ptr, start + tl.arange(0, CHUNK), tokens, vocab, padding)
        if tl.max(any_mine.to(tl.int32), 0) == 0:
            return
    id, place, mine = _token(ids_ptr, order_ptr, count_ptr, start, tokens, vocab, padding)
    began = (start == 0) | (tl.load(ids_ptr + start - 1, mask=start > 0, other=0).to(tl.int64) != id)
    row = tl.load(dy_ptr + place * dy_stride + col, mask=inside & mine, other=0.0)
    following, place, next_mine = _token(ids_ptr, order_ptr, count_ptr, start + 1, tokens, vocab, padding)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(CHUNK):
        at = start + n
        total += row.to(tl.float32)
        more = at + 1 < tokens
        ahead = more & (n + 1 < CHUNK)  # the next row is on its way before this one is stored, and the place of the one after it
        row = tl.load(dy_ptr + place * dy_stride + col, mask=inside & ahead & next_mine, other=0.0)
        after, place, after_mine = _token(ids_ptr, order_ptr, count_ptr, at + 2, tokens, vocab, padding)
        ends = (not more) | (following != id)
        last = (n + 1 == CHUNK) | (not more)
        here = inside & mine
        tl.store(dw_ptr + id * width + col, total.to(dw_ptr.dtype.element_ty), mask=here & ends & began)
        tl.store(head_ptr + chunk * width + col, total, mask=here & (ends | last) & (not began))
        tl.store(tail_ptr + chunk * width + col, total, mask=here & last & (not ends) & began)
        began = began | ends
        total = tl.where(ends, 0.0, total)
        id, following, mine, next_mine = following, after, next_mine & more, after_mine


@triton.jit
def _few(first_ptr, count):
    """The tokens of a row, in order, where there are FEW at most."""
    a, b, c, d = tl.load(first_ptr), tl.load(first_ptr + 1), tl.load(first_ptr + 2), tl.load(first_ptr + 3)
    b, c, d = tl.where(count > 1, b, 0x7FFFFFFF), tl.where(count > 2, c, 0x7FFFFFFF), tl.where(count > 3, d, 0x7FFFFFFF)
    a, b, c, d = tl.minimum(a, b), tl.maximum(a, b), tl.minimum(c, d), tl.maximum(c, d)
    a, b, c, d = tl.minimum(a, c), tl.minimum(b, d), tl.maximum(a, c), tl.maximum(b, d)
    return a, tl.minimum(b, c), tl.maximum(b, c), d


@triton.jit
def _rows(count_ptr, first_ptr, dy_ptr, dw_ptr, vocab, width, dy_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pieces of ROWS rows of FEW tokens at most, each added up in their order; 0 of none."""
    pieces = tl.cdiv(width, BLOCK)
    first = (tl.program_id(0) // pieces).to(tl.int64) * ROWS
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    counts, places, rows = (), (), ()
    for n in tl.static_range(ROWS):
        count = tl.load(count_ptr + first + n, mask=first + n < vocab, other=FEW + 1)
        counts += (count,)
        places += (_few(first_ptr + tl.minimum(first + n, vocab - 1) * FEW, count),)
    for n in tl.static_range(ROWS):  # one of each, before any is stored
        there = (counts[n] > 0) & (counts[n] <= FEW)
        rows += (tl.load(dy_ptr + places[n][0].to(tl.int64) * dy_stride + col, mask=there & (col < width), other=0.0),)
    for n in tl.static_range(ROWS):
        total = rows[n].to(tl.float32)
        if (counts[n] > 1) & (counts[n] <= FEW):
            for m in tl.static_range(1, FEW):
                row = tl.load(dy_ptr + places[n][m].to(tl.int64) * dy_stride + col, mask=(counts[n] > m) & (col < width), other=0.0)
                total += row.to(tl.float32)
        tl.store(dw_ptr + (first + n) * width + col, total.to(dw_ptr.dtype.element_ty), mask=(counts[n] <= FEW) & (col < width))


@triton.jit
def _clear(count_ptr, dw_ptr, vocab, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """0 in the rows that have no gradient."""
    for first in range(tl.program_id(0) * ROWS, vocab, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        empty = (tl.load(count_ptr + row, mask=row < vocab, other=1) == 0)[:, None]
        rows = dw_ptr + row.to(tl.int64)[:, None] * width
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            tl.store(rows + col, tl.zeros([ROWS, BLOCK], dw_ptr.dtype.element_ty), mask=empty & (col < width))


@triton.jit
def _borders(ids_ptr, count_ptr, dw_ptr, head_ptr, tail_ptr, tokens, width, vocab, padding, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
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
    if count_ptr is not None:
        here = here & (tl.load(count_ptr + id, mask=here, other=0) > FEW)
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
def _side(device: torch.device, first: bool) -> torch.cuda.Stream:
    """What goes beside the rest; if `first`, its programs go before others, since sorting is all latency."""
    return torch.cuda.Stream(device, priority=-1 if first else 0)


def launch_backward(problem: Rows, config: Tiles, ids: torch.Tensor, dy: torch.Tensor, vocab: int, padding: int) -> torch.Tensor:
    """The gradient of weight [vocab, width]; ids [..], dy [.., width]."""
    if not dy.numel():
        return torch.zeros((vocab, problem.width), dtype=dy.dtype, device=dy.device)
    dy = dy.reshape(problem.rows, problem.width)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    narrow = torch.int16 if vocab <= 1 << 15 else torch.int32  # 16,384 ids sort in 31 us, in 47, and as int64 in 80 (H200)
    known = torch.empty(problem.rows, dtype=narrow, device=dy.device)
    count = torch.zeros(vocab, dtype=torch.int32, device=dy.device)
    few = vocab <= SPARSE * problem.rows
    first = torch.empty(vocab * FEW.value, dtype=torch.int32, device=dy.device) if few else None
    _known[(triton.cdiv(problem.rows, KNOWN),)](ids.contiguous(), known, count, first, problem.rows, vocab, padding, BLOCK=KNOWN)
    dw = torch.empty((vocab, problem.width), dtype=dy.dtype, device=dy.device)

    def by_order():
        found, order = torch.sort(known, stable=True)
        chunks, counted = triton.cdiv(problem.rows, CHUNK), count if few else None
        head, tail = torch.empty((2, chunks, problem.width), dtype=torch.float32, device=dy.device)
        grid, sizes = (chunks * triton.cdiv(problem.width, config.block),), (problem.rows, problem.width)
        early = starts_early(dy)
        tiles = {"CHUNK": CHUNK, "BLOCK": config.block, "EARLY": early, "num_warps": config.warps}
        _sums[grid](dy, found, order, counted, dw, head, tail, *sizes, dy.stride(0), vocab, padding, **tiles)
        _borders[grid](found, counted, dw, head, tail, *sizes, vocab, padding, **tiles, **({"launch_pdl": True} if early else {}))

    def directly():
        if few:
            block = min(ROW, triton.next_power_of_2(problem.width))
            grid = (triton.cdiv(vocab, ROWS) * triton.cdiv(problem.width, block),)
            _rows[grid](count, first, dy, dw, vocab, problem.width, dy.stride(0), ROWS=ROWS, BLOCK=block, num_warps=4)
        else:  # by few programs, between which the sort's find room
            programs = min(triton.cdiv(vocab, CLEARED), CLEARING * of(dy.device).sms)
            _clear[(programs,)](count, dw, vocab, problem.width, ROWS=CLEARED, BLOCK=config.block, num_warps=4)

    side = _side(dy.device, few) if dy.is_cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(dy.device))
    with torch.cuda.stream(side):
        (by_order if few else directly)()
    (directly if few else by_order)()
    if side is not None:
        torch.cuda.current_stream(dy.device).wait_stream(side)
    return dw
