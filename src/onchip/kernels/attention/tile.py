"""What every attention kernel does to a tile: which keys it needs, where they lie, the mask, the online softmax.

A mask is a band: row `i` sees keys `i - LEFT` to `i + RIGHT`, and -1 is no limit. Rows are aligned to the bottom right:
query `i` is at row `i + len_k - len_q`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_span(row_first, row_last, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The keys that some row of `[row_first, row_last]` sees: [first, last)."""
    last = len_k
    if RIGHT >= 0:
        last = tl.minimum(len_k, tl.maximum(row_last + RIGHT + 1, 0))
    first = 0
    if LEFT >= 0:
        first = tl.maximum(row_first - LEFT, 0)
    return first, last


@triton.jit
def inner_span(row_first, row_last, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The whole key tiles that every row of `[row_first, row_last]` sees, so that they need no mask: [first, last)."""
    last = len_k
    if RIGHT >= 0:
        last = tl.minimum(len_k, tl.maximum(row_first + RIGHT + 1, 0))
    last = last // BLOCK_N * BLOCK_N
    first = 0
    if LEFT >= 0:
        first = (tl.maximum(row_last - LEFT, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return first, last


@triton.jit
def band(scores, rows, cols, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Scores [M, N], with -inf where row `rows` [M] does not see key `cols` [N]."""
    seen = (cols < len_k)[None, :]
    if RIGHT >= 0:
        seen = seen & (cols[None, :] <= rows[:, None] + RIGHT)
    if LEFT >= 0:
        seen = seen & (cols[None, :] >= rows[:, None] - LEFT)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def online_softmax(scores, top, total, scale, MAY_BE_EMPTY: tl.constexpr):
    """One step of the online softmax (FlashAttention, algorithm 1), in base 2: `scale` holds log2(e).

    Returns the weights [M, N], the factor that shrinks what was summed before [M], and the new maximum and sum.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MAY_BE_EMPTY:  # a row that has seen no key yet: -inf minus -inf is NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.math.exp2(scores * scale - base[:, None])
    shrink = tl.math.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def normalise(acc, top, total):
    """The output rows and their natural-log LSE; a row that saw nothing gives 0 and -inf."""
    out = acc * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))[:, None]  # the plain quotient may be two ulps off, a float32 result's share of error
    return out, (top + tl.math.log2(total)) * LN2


@triton.jit
def page_slots(table_ptr, first, cols, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page (int64) and the slot in it of keys `cols` = first + arange(BLOCK_N); only those below `last` are looked up."""
    if PAGE % BLOCK_N == 0:  # the tile lies in one page: one look-up
        pages = tl.load(table_ptr + first // PAGE).to(tl.int64)
    else:
        pages = tl.load(table_ptr + cols // PAGE, mask=cols < last, other=0).to(tl.int64)
    return pages, cols % PAGE
