"""Sampling: one token a row, without sorting the vocabulary and without waiting for the host.

    token = argmax over the kept entries of  x / temperature + gumbel(seed, step, index)

Top-k, top-p and min-p each keep the entries from some logit up, so together they are one threshold. Those of top-k and
top-p are found by narrowing an interval of the float's integer image (monotone, so the result is exact), four marks a
pass over the row: 14 passes at most for float32, 9 for fp16, 7 for bf16. Rows that do not ask for a filter skip its passes.

One program a row. It reads the row once from memory, when greedy or without filters; later passes find it in L2.
The noise is described in `reference.gumbel`, with which it agrees.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows

BLOCK = 8192  # 16 entries a thread: 32 KiB of float32 in flight, what one multiprocessor needs to keep L2 busy
WARPS = 16
MARKS = 4  # as many comparisons as keep up with L2 on one multiprocessor
CONSTANT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that hold nothing

MOST_NOISE = tl.constexpr(17.0)  # -log(-log(1 - 2^-24)) is 16.64

# ---- device


@triton.jit
def _image(bits):
    """The bits of a float32 as an integer of the same order, and back again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _entries(row_ptr, first, vocab, BLOCK: tl.constexpr):
    """Index and logit of a tile of the row, float32 [1, BLOCK]; -inf past the end."""
    index = first + tl.arange(0, BLOCK)[None, :]
    return index, tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(row_ptr, vocab, BLOCK: tl.constexpr):
    top = tl.full([1, BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        top = tl.maximum(top, _entries(row_ptr, first, vocab, BLOCK)[1])
    return tl.max(top)


@triton.jit
def _totals(row_ptr, vocab, marks, largest, inverse, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """For each of `marks` [M, 1]: how many entries reach it, or their weight exp((x - largest) / temperature)."""
    total = tl.zeros([marks.shape[0], BLOCK // 4], tl.float32)  # exact for counts: a vocabulary has less than 2^24 entries
    for first in range(0, vocab, BLOCK):
        x = _entries(row_ptr, first, vocab, BLOCK)[1]
        reached = tl.where(x >= marks, tl.exp((x - largest) * inverse) if WEIGHTED else 1.0, 0.0)
        total += tl.sum(reached.reshape(marks.shape[0], BLOCK // 4, 4), 2)  # within a thread: 16 bytes of float32
    return tl.sum(total, 1, keep_dims=True)


@triton.jit
def _threshold(row_ptr, vocab, floor, largest, inverse, need, WEIGHTED: tl.constexpr, BITS: tl.constexpr, MARKS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, not below `floor`, such that the entries from it up number or weigh at least `need`."""
    low = _image(floor.to(tl.int32, bitcast=True)).to(tl.int64) >> BITS
    high = _image(largest.to(tl.int32, bitcast=True)).to(tl.int64) >> BITS
    while low < high:
        step = (high - low + 1 + MARKS) // (MARKS + 1)
        marks = low + step * (1 + tl.arange(0, MARKS)[:, None])  # [MARKS, 1]
        marks = _image((marks << BITS).to(tl.int32)).to(tl.float32, bitcast=True)
        enough = tl.sum((_totals(row_ptr, vocab, marks, largest, inverse, WEIGHTED, BLOCK) >= need).to(tl.int64))
        high = tl.minimum(high, low + step * (enough + 1) - 1)
        low = tl.minimum(high, low + step * enough)
    return _image((low << BITS).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _filter(row_ptr, vocab, top_k, top_p, min_p, temperature, BITS: tl.constexpr, MARKS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest logit that top-k, top-p and min-p keep."""
    largest, inverse = _largest(row_ptr, vocab, BLOCK), tl.div_rn(1.0, temperature)
    floor = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < vocab):
        floor = _threshold(row_ptr, vocab, floor, largest, inverse, top_k, False, BITS, MARKS, BLOCK)
    if top_p < 1:
        mass = tl.sum(_totals(row_ptr, vocab, tl.full([1, 1], floor, tl.float32), largest, inverse, True, BLOCK))
        floor = _threshold(row_ptr, vocab, floor, largest, inverse, top_p * mass, True, BITS, MARKS, BLOCK)
    if min_p > 0:
        floor = tl.maximum(floor, largest + temperature * tl.log(min_p))
    return floor


@triton.jit
def _gumbel(seed, step, first, BLOCK: tl.constexpr):
    """The noise of the entries from `first` (a multiple of 4) on, float32 [1, BLOCK]."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.philox(seed, counter, step.to(tl.int32), (step >> 32).to(tl.int32), 0)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a0 b0 c0 d0 a1 ...
    u = ((bits >> 9).to(tl.float32) + 0.5) * 2**-23  # in [2^-24, 1 - 2^-24]
    return -tl.log(-tl.log(u))[None, :]


@triton.jit
def _argmax(row_ptr, vocab, temperature, floor, seed, step, BLOCK: tl.constexpr):
    """The first index of the largest x, or of the largest x / temperature + noise among the entries from `floor` up."""
    inverse = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
    best, token = tl.full([1, BLOCK], float("-inf"), tl.float32), tl.zeros([1, BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        index, score = _entries(row_ptr, first, vocab, BLOCK)
        if temperature > 0:
            score = tl.where(score >= floor, score * inverse, float("-inf"))
            if tl.max(score) + MOST_NOISE > tl.max(best):  # Philox costs ten times the read: not where it cannot matter
                score += _gumbel(seed, step, first, BLOCK)
        better = score > best
        best, token = tl.where(better, score, best), tl.where(better, index, token)
    return tl.min(tl.where(best == tl.max(best), token, vocab))


@triton.jit
def _sample(
    logits_ptr,
    tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    step_ptr,
    row_stride,
    vocab,
    BITS: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature, seed, step = tl.load(temperature_ptr + row), tl.load(seed_ptr + row), tl.load(step_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    floor = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        floor = _filter(row_ptr, vocab, top_k, top_p, min_p, temperature, BITS, MARKS, BLOCK)
    token = _argmax(row_ptr, vocab, temperature, floor, seed, step, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


# ---- host


def launch(problem: Rows, config: None, logits: torch.Tensor, how) -> torch.Tensor:  # logits: [rows, vocab]; how: Sampling
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(problem.rows, dtype=torch.int64, device=logits.device)
    _sample[(problem.rows,)](
        logits,
        tokens,
        *(field.contiguous() for field in how),
        logits.stride(0),
        problem.width,
        BITS=CONSTANT_BITS[problem.dtype],
        MARKS=MARKS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return tokens
