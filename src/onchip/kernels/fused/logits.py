"""Sampling: one token a row, without sorting the vocabulary and without waiting for the host.

    token = argmax over the kept entries of  x / temperature + gumbel(seed, step, index)

Top-k, top-p and min-p each keep the entries from some logit up, so together they are one threshold. Those of top-k and
top-p are found by narrowing an interval of the float's integer image (monotone, so the result is exact), four marks a
pass. Typical sampling keeps an interval of logits around their mean, found by narrowing its half width.

Two launches. The survey (`vocabulary.py`) reads the row once from memory, and is all that greedy rows and rows without
filters need. Then one program a row chooses the groups of 16 entries that can hold a kept one, narrows over those, and draws. Up to 256 such groups are in
registers, where a pass of narrowing is a sum over the program (`_few`); more are read again in each pass.
Bytes: rows x vocab logits, and 1/16 of them written and read again. Measured on an H200 (bf16, vocabulary 128,256, top-k 50 with top-p and min-p): 64 rows
27 us, one 13.6, of which the survey 3.0: sampling.md says where the rest goes. Of a distribution so flat that the maxima prove nothing one program reads the
whole row. With top-p alone (0.9 of normal logits) it checks what the survey drew from all entries: a token is kept if what is larger weighs less than p, and
is then the argmax over the kept ones, too; if it is not, the next one is drawn from what is larger. So two passes with probability 1 - p more, where narrowing
takes 7 in bf16 and 14 in float32: that is left for k beyond 2,004 and typical alone.
The noise is described in `reference_sampling.gumbel`, with which it agrees.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rows
from onchip.kernels.fused import vocabulary
from onchip.kernels.fused.vocabulary import (
    after,
    bound_of_count,
    bound_of_mass,
    end_of,
    entries,
    gumbel,
    image,
    less,
    list_groups,
    listed,
    mark,
    maxima_of,
    narrowed,
    nth,
    ordered,
    step_of,
    told,
    weight,
    within,
)

FEW = tl.constexpr(64)  # groups, as of a top-k of 50: a quarter of what fits in registers takes a quarter of the time
SPARE = tl.constexpr(56)  # maxima of 4 groups that may reach the bound of top-k
MOST_NOISE = tl.constexpr(17.0)  # -log(-log(1 - 2^-24)) is 16.64

# ---- device


@triton.jit
def _distance(x, middle):
    return tl.where(x == middle, 0.0, tl.abs(x - middle))


@triton.jit
def _mass(row_ptr, list_ptr, count, vocab, floor, largest, inverse, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Over the listed entries from `floor` up: the weight, and the weighted sum of logits."""
    mass, moment = tl.zeros([1, TILE // GROUP, GROUP], tl.float32), tl.zeros([1, TILE // GROUP, GROUP], tl.float32)
    for first in range(0, count, TILE // GROUP):
        _, index = listed(list_ptr, first, count, vocab, GROUP, TILE)
        x = entries(row_ptr, index, vocab)
        w = tl.where((x >= floor) & (index < vocab), weight(x, largest, inverse), 0.0)
        mass += w
        moment += tl.where(w > 0, w * tl.where(x >= largest, 0.0, x - largest), 0.0)
    total = tl.sum(mass)
    return total, largest + tl.sum(moment) / total


@triton.jit
def _threshold(
    row_ptr, list_ptr, count, vocab, floor, low, high, need, middle, largest, inverse,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest number from `low` to `high` such that the listed entries from it up number or weigh at least `need`; of nearness, minus a distance, those
    from `floor` up as near to `middle`."""
    low, high = image(low).to(tl.int64) >> BITS, image(high).to(tl.int64) >> BITS
    while low < high:
        step = (high - low + 5) // 5
        a, b = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)  # exact for counts: a vocabulary has less than 2^24 entries
        c, d = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        for first in range(0, count, TILE // GROUP):
            _, index = listed(list_ptr, first, count, vocab, GROUP, TILE)
            x = tl.reshape(entries(row_ptr, index, vocab), [TILE])
            w = tl.full([TILE], 1.0, tl.float32) if KIND == "count" else weight(x, largest, inverse)
            if KIND == "near":
                w = tl.where(x >= floor, w, 0.0)
                x = -_distance(x, middle)
            a += tl.where(x >= mark(low, step, 1, BITS), w, 0.0)
            b += tl.where(x >= mark(low, step, 2, BITS), w, 0.0)
            c += tl.where(x >= mark(low, step, 3, BITS), w, 0.0)
            d += tl.where(x >= mark(low, step, 4, BITS), w, 0.0)
        low, high, _ = narrowed(low, high, step, a, b, c, d, need)
    return end_of(low, BITS)


@triton.jit
def _argmax(row_ptr, list_ptr, count, vocab, largest, inverse, floor, middle, reach, seed, step, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The first index of the largest x / temperature + noise among the listed entries that are kept."""
    best, token = tl.full([1, TILE // GROUP, GROUP], float("-inf"), tl.float32), tl.full([1, TILE // GROUP, GROUP], 1 << 30, tl.int32)
    for first in range(0, count, TILE // GROUP):
        group, index = listed(list_ptr, first, count, vocab, GROUP, TILE)
        x = entries(row_ptr, index, vocab)
        score = tl.where((x >= floor) & (_distance(x, middle) <= reach), less(x, largest, inverse), float("-inf"))
        if tl.max(score) + MOST_NOISE > tl.max(best):  # Philox costs ten times the read: not where it cannot matter
            score += gumbel(seed, step, group * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, None, :], 0)
        better = score > best
        best, token = tl.where(better, score, best), tl.where(better, index, token)
    token = tl.min(tl.where(best == tl.max(best), token, 1 << 30))
    return tl.where(token < vocab, token, 0)  # nothing but -inf


@triton.jit
def _few(
    row_ptr, list_ptr, count, vocab, bound, least, mass, largest, temperature, top_k, top_p, typical, seed, step, by_count,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(token, floor, middle, reach, weight of what is kept) where all listed entries fit in registers: read once, then each narrowing pass is a sum."""
    inverse = tl.div_rn(1.0, temperature)
    group, index = listed(list_ptr, 0, count, vocab, GROUP, TILE)
    x = entries(row_ptr, index, vocab)
    values = tl.reshape(x, [TILE])
    weights = tl.where(tl.reshape(index, [TILE]) < vocab, weight(values, largest, inverse), 0.0)
    floor, middle, reach = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.full([], float("inf"), tl.float32)
    if by_count:
        floor = nth(values, tl.full(values.shape, 1.0, tl.float32), bound, largest, top_k, 0.0, BITS)
        mass = tl.sum(tl.where(values >= floor, weights, 0.0))
        bound = floor
    if top_p < 1:
        floor = nth(values, weights, bound, largest, top_p * mass, 0.0, BITS)
    floor = tl.maximum(floor, least)
    weights = tl.where(values >= floor, weights, 0.0)
    mass = tl.sum(weights)
    if typical < 1:
        middle = largest + tl.sum(tl.where(weights > 0, weights * tl.where(values >= largest, 0.0, values - largest), 0.0)) / mass
        most = -tl.maximum(_distance(largest, middle), _distance(tl.maximum(floor, -3e38), middle))
        reach = -nth(-_distance(values, middle), weights, most, tl.full([], 0.0, tl.float32), typical * mass, 0.0, 0)
        mass = tl.sum(tl.where(_distance(values, middle) <= reach, weights, 0.0))
    score = less(x, largest, inverse) + gumbel(seed, step, group * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, None, :], 0)
    best, token = told(tl.max(ordered(tl.where((x >= floor) & (_distance(x, middle) <= reach), score, float("-inf")), index)))
    return tl.where(best > float("-inf"), token, 0), floor, middle, reach, mass


@triton.jit
def _first(slices_ptr, row, slices, tops, largest, inverse, hot, SLICES: tl.constexpr):
    """The token that the survey drew; scores of a temperature above 0 are less the slice's largest logit."""
    part = tl.arange(0, SLICES)
    slice_ptr, there = slices_ptr + (row * slices + part) * 4, part < slices
    best = tl.load(slice_ptr + 2, mask=there, other=float("-inf"))
    best += tl.where(hot, less(tops, largest, inverse), 0.0)
    return tl.min(tl.load(slice_ptr + 3, mask=there & (best == tl.max(best)), other=1 << 30)).to(tl.int32)


@triton.jit
def _draw(
    logits_ptr,
    maxima_ptr,
    slices_ptr,
    list_ptr,
    tokens_ptr,
    limits_ptr,
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
    groups,
    places,
    step_places,
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
    who = row // places
    temperature, top_k, top_p, min_p = tl.load(temperature_ptr + who), tl.load(top_k_ptr + who), tl.load(top_p_ptr + who), tl.load(min_p_ptr + who)
    typical = tl.load(typical_ptr + who) if typical_ptr is not None else tl.full([], 1.0, tl.float32)
    hot = temperature > 0
    part = tl.arange(0, SLICES)
    slice_ptr, there = slices_ptr + (row * slices + part) * 4, part < slices
    tops = tl.load(slice_ptr, mask=there, other=float("-inf"))
    largest = tl.max(tops)
    temperature = within(temperature)
    inverse = tl.div_rn(1.0, tl.where(hot, temperature, 1.0))
    mass = tl.sum(tl.where(there, tl.load(slice_ptr + 1, mask=there, other=0.0) * weight(tops, largest, inverse), 0.0))  # of no use to a greedy row
    floor, middle, reach = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.full([], float("inf"), tl.float32)
    maxima = maxima_of(maxima_ptr, row, groups, GROUPS)  # on its way while it is found out whether they are of use
    by_count = (top_k > 0) & (top_k < vocab)
    if hot & (by_count | (top_p < 1) | (min_p > 0) | (typical < 1)):
        least = tl.where(min_p > 0, largest + temperature * tl.log(min_p), float("-inf"))
        bound = tl.full([], float("-inf"), tl.float32)
        if by_count:  # before min-p: top-p is of what top-k keeps
            bound = bound_of_count(maxima, top_k, SPARE, BITS)
        elif top_p < 1:
            bound = tl.maximum(least, bound_of_mass(maxima, largest, inverse, top_p * mass, BITS))
        else:
            bound = least
        count = list_groups(list_ptr, maxima, bound, groups)
        seed, step = tl.load(seed_ptr + who), step_of(step_ptr, row, step_places)
        if count <= FEW:
            token, floor, middle, reach, mass = _few(
                row_ptr, list_ptr, count, vocab, bound, least, mass, largest, temperature, top_k, top_p, typical, seed, step, by_count, BITS, GROUP, FEW * GROUP
            )  # fmt: skip
        elif count <= TILE // GROUP:
            token, floor, middle, reach, mass = _few(
                row_ptr, list_ptr, count, vocab, bound, least, mass, largest, temperature, top_k, top_p, typical, seed, step, by_count, BITS, GROUP, TILE
            )  # fmt: skip
        elif (top_p < 1) & (typical >= 1) & (by_count == 0) & (limits_ptr is None):
            # most of what is drawn is kept: draw from all, and from what is larger if it is not
            token = _first(slices_ptr, row, slices, tops, largest, inverse, hot, SLICES)
            drawn = tl.load(row_ptr + token).to(tl.float32)
            drawn = tl.where(drawn == drawn, drawn, float("-inf"))
            above = _kept(row_ptr, list_ptr, count, vocab, after(drawn), middle, reach, largest, inverse, GROUP, TILE)
            while (drawn < largest) & ((drawn < least) | (above >= top_p * mass)):
                floor = tl.minimum(tl.maximum(after(drawn), least), largest)  # ends, whatever top-p and min-p are
                token = _argmax(row_ptr, list_ptr, count, vocab, largest, inverse, floor, middle, reach, seed, step, GROUP, TILE)
                drawn = tl.load(row_ptr + token).to(tl.float32)
                above = _kept(row_ptr, list_ptr, count, vocab, after(drawn), middle, reach, largest, inverse, GROUP, TILE)
        else:
            if by_count:
                floor = _threshold(row_ptr, list_ptr, count, vocab, floor, bound, largest, top_k, middle, largest, inverse, "count", BITS, GROUP, TILE)
                if top_p < 1:
                    mass, _ = _mass(row_ptr, list_ptr, count, vocab, floor, largest, inverse, GROUP, TILE)
                    bound = floor
            if top_p < 1:
                need = top_p * mass
                floor = _threshold(row_ptr, list_ptr, count, vocab, floor, bound, largest, need, middle, largest, inverse, "weight", BITS, GROUP, TILE)
            floor = tl.maximum(floor, least)
            if typical < 1:
                mass, middle = _mass(row_ptr, list_ptr, count, vocab, floor, largest, inverse, GROUP, TILE)
                most = -tl.maximum(_distance(largest, middle), _distance(tl.maximum(floor, -3e38), middle))
                need, nearest = typical * mass, tl.full([], 0.0, tl.float32)
                reach = -_threshold(row_ptr, list_ptr, count, vocab, floor, most, nearest, need, middle, largest, inverse, "near", 0, GROUP, TILE)
            token = _argmax(row_ptr, list_ptr, count, vocab, largest, inverse, floor, middle, reach, seed, step, GROUP, TILE)
            if limits_ptr is not None:
                mass = _kept(row_ptr, list_ptr, count, vocab, floor, middle, reach, largest, inverse, GROUP, TILE)
    else:
        token = _first(slices_ptr, row, slices, tops, largest, inverse, hot, SLICES)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    if limits_ptr is not None:
        tl.store(limits_ptr + row * 5, floor)
        tl.store(limits_ptr + row * 5 + 1, middle)
        tl.store(limits_ptr + row * 5 + 2, reach)
        tl.store(limits_ptr + row * 5 + 3, largest)
        tl.store(limits_ptr + row * 5 + 4, mass)


@triton.jit
def _kept(row_ptr, list_ptr, count, vocab, floor, middle, reach, largest, inverse, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The weight of the kept entries."""
    mass = tl.zeros([1, TILE // GROUP, GROUP], tl.float32)
    for first in range(0, count, TILE // GROUP):
        _, index = listed(list_ptr, first, count, vocab, GROUP, TILE)
        x = entries(row_ptr, index, vocab)
        mass += tl.where((x >= floor) & (_distance(x, middle) <= reach) & (index < vocab), weight(x, largest, inverse), 0.0)
    return tl.sum(mass)


# ---- host


class Tiles(NamedTuple):
    """How many warps the program of a row has."""

    warps: int

    def __str__(self):
        return f"{vocabulary.SLICE} entries a program, then {self.warps} warps a row"


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """8 warps take 2 us less of 12 for a few groups and half as much more for all of a row: each sum waits for all of them. 16 of 64 lanes spill (gfx942)."""
    return [Tiles(8 if device.kind == "hip" else 16)]


def launch(problem: Rows, config: Tiles, logits: torch.Tensor, how):  # logits: [rows, vocab]; how: Sampling
    """Tokens int64 [rows]; of the variant "limits" also what is kept, float32 [rows, 5]: see `reference_sampling.sample`, also for fewer settings than rows."""
    rows, vocab, device = problem.rows, problem.width, logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    limits = torch.empty(rows, 5, dtype=torch.float32, device=device) if problem.variant == "limits" else None
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        how = vocabulary.in_order(how)
        maxima, slices, groups, tiles = vocabulary.survey(logits, how)
        sizes = (logits.stride(0), vocab, slices.shape[1], maxima.shape[1], *vocabulary.places_of(rows, how))
        _draw[(rows,)](logits, maxima, slices, groups, tokens, limits, *how, *sizes, **tiles, num_warps=config.warps)
    return tokens if limits is None else (tokens, limits)
