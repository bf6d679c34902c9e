"""What the kernels on rows of a vocabulary share: the survey that reads a row once, thresholds found by narrowing, and the noise.

The survey splits a row among many programs, also when there is one row. Of each group of 16 entries (more, where the
vocabulary is larger than 131,072) it keeps the largest, in the logits' dtype: 1/16 of the row. These maxima prove where
a kept set can begin: the k-th largest of the maxima has k entries at or above it, and the weights of the maxima from some
logit up are at most those of all entries. A second kernel, one program a row, then reads the groups that reach this bound
and no others: for k of 50 some 60 of 8,016. Where nothing is proven every group is read.

How a row is split depends on the vocabulary alone, and sums go in a fixed order: a row's result does not depend on its neighbours.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.kernels.launch import starts_early

SLICE = 4096  # entries a program of the survey has: at 128,256 32 programs a row, 8 KiB each in bf16
SLICE_WARPS = 8
TILE = 4096  # entries of a tile of listed groups: 8 a thread
MOST_GROUPS = 8192
CONSTANT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that hold nothing

# ---- device


@triton.jit
def image(x):
    """A float32 as an integer of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(bits):
    """The float32 of an image."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def after(x):
    """The next larger float32."""
    return number(image(x) + 1)


@triton.jit
def entries(row_ptr, index, vocab):
    """Logits, float32; -inf past the end and for NaN."""
    x = tl.load(row_ptr + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def weight(x, largest, inverse):
    """exp((x - largest) / temperature), also where both are infinite."""
    return tl.where(x >= largest, 1.0, tl.exp((x - largest) * inverse))


@triton.jit
def within(temperature):
    """What logits are divided by: float32 has no 1 / 1e-40, and 0 of 1 / inf times an infinite logit is no number."""
    return tl.minimum(tl.maximum(temperature, 1e-30), 1e30)


@triton.jit
def less(x, largest, inverse):
    """(x - largest) / temperature, so that noise counts however large logits are; infinite where they are."""
    return (x - tl.minimum(tl.maximum(largest, -3.4028234e38), 3.4028234e38)) * inverse


@triton.jit
def gumbel(seed, step, counter, STREAM: tl.constexpr):
    """The noise of the four entries from 4 `counter` on: the last axis of `counter` grows fourfold."""
    a, b, c, d = tl.philox(seed, counter, step.to(tl.int32), (step >> 32).to(tl.int32), STREAM)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a0 b0 c0 d0 a1 ...
    return -tl.log(-tl.log(uniform(bits)))


@triton.jit
def uniform(bits):
    """A number of [2^-24, 1 - 2^-24] from 32 random bits, exact in float32."""
    return ((bits >> 9).to(tl.float32) + 0.5) * 2**-23


@triton.jit
def nth(values, weights, low, high, need, spare, BITS: tl.constexpr):
    """The largest of the logits from `low` to `high` such that the `values` [N] from it up weigh `need`; `low` where none does. Or a smaller one from which
    on they weigh no more than `spare`: that is narrowed no further."""
    low, high = image(low).to(tl.int64) >> BITS, image(high).to(tl.int64) >> BITS
    most = tl.full([], float("inf"), tl.float32)
    while (low < high) & (most > spare):
        step = (high - low + 5) // 5
        a, b = tl.where(values >= mark(low, step, 1, BITS), weights, 0.0), tl.where(values >= mark(low, step, 2, BITS), weights, 0.0)
        c, d = tl.where(values >= mark(low, step, 3, BITS), weights, 0.0), tl.where(values >= mark(low, step, 4, BITS), weights, 0.0)
        low, high, found = narrowed(low, high, step, a, b, c, d, need)
        most = tl.minimum(most, found)
    return end_of(low, BITS)


@triton.jit
def mark(low, step, N: tl.constexpr, BITS: tl.constexpr):
    """The logit of a shortened image `low` and N steps."""
    return number(((low + N * step) << BITS).to(tl.int32))


@triton.jit
def narrowed(low, high, step, a, b, c, d, need):
    """The interval of images by what weighs more than its four marks, [N] each; and what is known to weigh `need` least. Joined: one sum, three barriers."""
    total = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0)  # [2, 2]
    enough = tl.sum(tl.sum((total >= need).to(tl.int64), 1), 0)
    high = tl.minimum(high, low + step * (enough + 1) - 1)
    return tl.minimum(high, low + step * enough), high, tl.min(tl.min(tl.where(total >= need, total, float("inf")), 1), 0)


@triton.jit
def end_of(low, BITS: tl.constexpr):
    """The logit that an interval of images has been narrowed to."""
    found = number((low << BITS).to(tl.int32))
    return tl.where(found == found, found, float("-inf"))  # the image of -inf without its low bits is a NaN's


@triton.jit
def ordered(x, index):
    """Keys, int64, in order of x, of equal ones (0 and -0 are) those of lower indices first."""
    return (image(x + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def told(key):
    """(x, index) of a key."""
    return number((key >> 32).to(tl.int32)), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def maxima_of(maxima_ptr, row, groups, GROUPS: tl.constexpr):
    """The maxima of a row's groups, float32 [GROUPS]."""
    at = tl.arange(0, GROUPS)
    return tl.load(maxima_ptr + row * groups + at, mask=at < groups, other=float("-inf")).to(tl.float32)


@triton.jit
def bound_of_count(maxima, count, spare, BITS: tl.constexpr):
    """A logit that at least `count` entries reach, -inf where the maxima of 4 groups each do not prove one. It is looked for until `spare` of them do."""
    coarse = tl.max(tl.reshape(maxima, [maxima.shape[0] // 4, 4]), 1)
    there = coarse > float("-inf")
    bound = tl.full([], float("-inf"), tl.float32)
    if tl.sum(there.to(tl.int32)) >= count:
        low = tl.min(tl.where(there, coarse, float("inf")))
        bound = nth(coarse, tl.full(coarse.shape, 1.0, tl.float32), low, tl.max(coarse), count, spare, BITS)
    return bound


@triton.jit
def bound_of_mass(maxima, largest, inverse, need, BITS: tl.constexpr):
    """A logit such that the entries from it up weigh at least `need`, -inf where the maxima do not prove one."""
    weights = weight(maxima, largest, inverse)
    need = need * (1 + 2**-16)  # the two sums are rounded apart
    least = tl.maximum(largest - tl.div_rn(16.0, inverse), -3e38)
    bound = tl.full([], float("-inf"), tl.float32)
    if tl.sum(tl.where(maxima >= number(image(least) >> BITS << BITS), weights, 0.0)) >= need:
        bound = nth(maxima, weights, least, largest, need, 0.0, BITS)
    return bound


@triton.jit
def list_groups(list_ptr, maxima, bound, groups):
    """Write the numbers of the groups that reach `bound`, in order, and return how many."""
    GROUPS: tl.constexpr = maxima.shape[0]
    EACH: tl.constexpr = 8 if GROUPS > 8 else GROUPS  # that a thread has: a scan of all would take 4 us, of as many as threads 1
    at = tl.arange(0, GROUPS // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    found = ((tl.reshape(maxima, [GROUPS // EACH, EACH]) >= bound) & (at < groups)).to(tl.int32)
    counts = tl.sum(found, 1)
    before = tl.cumsum(counts, 0) - counts
    tl.store(list_ptr + before[:, None] + tl.cumsum(found, 1) - 1, at, mask=found > 0)
    tl.debug_barrier()  # other threads read it
    return tl.sum(counts)


@triton.jit
def listed(list_ptr, first, count, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The listed groups from `first` on [1, TILE / GROUP, 1], and the index of their entries [.., GROUP]; past the end of the list, past the vocabulary."""
    n = first + tl.arange(0, TILE // GROUP)[None, :, None]
    group = tl.load(list_ptr + n, mask=n < count, other=(1 << 30) // GROUP)
    return group, group * GROUP + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def _survey(
    logits_ptr,
    maxima_ptr,
    slices_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_ptr,
    seed_ptr,
    step_ptr,
    row_stride,
    vocab,
    slices,
    places,
    step_places,
    GROUP: tl.constexpr,
    SLICE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # the kernel that follows waits for what is written here
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // slices).to(tl.int64)
    who = row // places  # whose settings
    part = tl.program_id(0) % slices
    index = part * SLICE + tl.arange(0, SLICE)[None, :]
    x = entries(logits_ptr + row * row_stride, index, vocab)
    temperature = tl.load(temperature_ptr + who) if temperature_ptr is not None else tl.full([], 1.0, tl.float32)
    per: tl.constexpr = SLICE // GROUP
    maxima = tl.max(tl.reshape(x, [per, GROUP]), 1)
    tl.store(maxima_ptr + (row * slices + part) * per + tl.arange(0, per), maxima.to(maxima_ptr.dtype.element_ty))
    largest, hot = tl.max(x), temperature > 0
    inverse = tl.div_rn(1.0, tl.where(hot, within(temperature), 1.0))
    out = slices_ptr + (row * slices + part) * 4
    tl.store(out, largest)
    if hot:
        tl.store(out + 1, tl.sum(tl.where(index < vocab, weight(x, largest, inverse), 0.0)))
    if temperature_ptr is not None:  # else only the maxima and the mass are wanted
        top_k, top_p = tl.load(top_k_ptr + who), tl.load(top_p_ptr + who)
        drawn = hot & ((top_k <= 0) | (top_k >= vocab)) & ((top_p < 1) | (tl.load(min_p_ptr + who) <= 0))
        if typical_ptr is not None:
            drawn = drawn & (tl.load(typical_ptr + who) >= 1)
        score = x
        if hot:
            score = less(x, largest, inverse)  # of this slice: the kernel that follows knows the row's
            if drawn:
                score += gumbel(tl.load(seed_ptr + who), step_of(step_ptr, row, step_places), _counters(part * SLICE, SLICE), 0)
        best = tl.max(score)
        tl.store(out + 2, best)
        tl.store(out + 3, tl.min(tl.where(score == best, index, vocab)).to(tl.float32))  # exact below 2^24


@triton.jit
def step_of(step_ptr, row, step_places):
    return tl.load(step_ptr + row // step_places) + row % step_places


@triton.jit
def _counters(first, SLICE: tl.constexpr):
    """Of the noise of a slice, int32 [1, SLICE / 4]."""
    return first // 4 + tl.arange(0, SLICE // 4)[None, :]


# ---- host


class Survey(NamedTuple):
    """What a survey found, room for a list of groups, and how the kernel that follows goes over them.

    maxima   [rows, groups] in the logits' dtype.        list   int32 [rows, groups].
    slices   float32 [rows, slices, 4]: the largest logit, the sum of weights (of temperatures above 0), the largest score
             (of a hot row, less its largest logit) and its index.
    tiles    its constants, and that it may begin before the survey has ended.
    """

    maxima: torch.Tensor
    slices: torch.Tensor
    list: torch.Tensor
    tiles: dict[str, int]


def survey(logits: torch.Tensor, how: tuple | None = None) -> Survey:
    """Launch the survey of logits [rows, vocab] whose last stride is 1; how: `in_order(...)`, or None for the largest and the sum alone."""
    (rows, vocab), device = logits.shape, logits.device
    size = triton.next_power_of_2(vocab)
    part, group = min(SLICE, max(64, size)), max(16, size // MOST_GROUPS)
    slices = triton.cdiv(vocab, part)
    groups = slices * (part // group)
    maxima = torch.empty(rows, groups, dtype=logits.dtype, device=device)
    found = torch.empty(rows, slices, 4, dtype=torch.float32, device=device)
    fields, places = ((None,) * 7, (1, 1)) if how is None else (how, places_of(rows, how))
    early = starts_early(logits)
    sizes = (logits.stride(0), vocab, slices, *places)
    _survey[(rows * slices,)](logits, maxima, found, *fields, *sizes, GROUP=group, SLICE=part, EARLY=early, num_warps=SLICE_WARPS)
    tiles = {
        "BITS": CONSTANT_BITS[logits.dtype],
        "GROUP": group,
        "TILE": min(TILE, triton.next_power_of_2(groups) * group),
        "SLICES": triton.next_power_of_2(slices),
        "GROUPS": triton.next_power_of_2(groups),
        "EARLY": early,
        **({"launch_pdl": True} if early else {}),
    }
    return Survey(maxima, found, torch.empty(rows, groups, dtype=torch.int32, device=device), tiles)


def places_of(rows: int, how: tuple) -> tuple[int, int]:
    """How many rows of logits, one after the other, have the settings of one sequence; and for how many its step counts on, each one more."""
    return rows // len(how[0]), rows // len(how[-1])


def in_order(how) -> tuple:
    """The fields of a Sampling as the kernels take them, each with stride 1; `typical` may be None."""
    *filters, seed, step, typical = (field if field is None else field.contiguous() for field in how)
    return (*filters, typical, seed, step)
