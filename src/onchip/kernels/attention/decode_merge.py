"""The end of decoding with keys split among programs: the parts of a unit are added up in the order of the keys, so that every run gives the same bits."""

import triton
import triton.language as tl

from onchip.kernels.attention.decode_tiles import items_of, locate, owner_of, sequence_of, share_length, share_of, total_work
from onchip.kernels.attention.tile import LN2, sink

SHARE = 512  # keys an item where the batch must not decide: writing and merging 16 rows costs 6% of reading as many keys of d128
FILL = 1024  # merging programs
LISTED = 1024  # sequences that a program looks at at once


@triton.jit(do_not_specialize=["batch", "kv_heads", "group", "len_q", "programs", "most_units"])
def merge(out, lse, sinks_ptr, part_ptr, part_lse_ptr, lengths_ptr, offsets_ptr, batch, kv_heads, group, len_q, programs, most_units,
          DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr, BAND: tl.constexpr,
          BY_UNIT: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr):  # fmt: skip
    """HEIGHT rows of a unit in parts: o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s), the sink one more in the sum.

    BY_UNIT: a program for each unit that there may be, else for each of `programs`, whose share may end in a unit that begins in it.
    Parts are added in order, PARTS at a time.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total, longest = total_work(lengths_ptr, offsets_ptr, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
    each = share_length(total, longest, programs)
    if BY_UNIT:
        b, unit = tl.program_id(0) // most_units, tl.program_id(0) % most_units
        before = b * 0
        for first in range(0, b, BATCH):
            others = first + tl.arange(0, BATCH)
            known_k, known_q, _ = sequence_of(lengths_ptr, offsets_ptr, others, others < b, len_q)
            known, times = items_of(known_k, known_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM)
            before += tl.sum(tl.where(others < b, known * times * kv_heads, 0), 0)
    else:
        cut = share_of(tl.program_id(0) + 1, total, each)
        b, before = locate(lengths_ptr, offsets_ptr, cut, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
    len_k, queries, token = sequence_of(lengths_ptr, offsets_ptr, b, b < batch, len_q)
    items, tiles = items_of(len_k, queries, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM)
    if not BY_UNIT:
        unit = (cut - before) // items
    begin = before + unit * items
    shared = (b < batch) & (unit < tiles * kv_heads)
    if ITEM != BLOCK_N:
        parts = items
        owner = begin
    else:
        owner = owner_of(begin, each)
        parts = owner_of(begin + items - 1, each) - owner + 1
    if not BY_UNIT:
        shared = shared & (owner == tl.program_id(0)) & (begin < cut)
    kv_head = unit // tl.maximum(tiles, 1)
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    r = (unit - kv_head * tiles) * ROWS + row
    query = r // group
    head = kv_head * group + r % group
    there = (query < queries) & (row < ROWS)
    dims = tl.arange(0, BLOCK_DV)
    used = dims < DV
    if EARLY:  # in every program: whoever comes after this kernel must find the first one's results
        tl.extra.cuda.gdc_wait()
    if shared & (parts > 1):
        top = -float("inf") + tl.zeros([HEIGHT], tl.float32)
        sums = tl.zeros([HEIGHT], tl.float32)
        acc = tl.zeros([HEIGHT, BLOCK_DV], tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            place = begin + part
            if ITEM == BLOCK_N:
                place = 2 * (owner + part) + ((part == 0) & (begin > share_of(owner, total, each))).to(tl.int32)
            place = (place.to(tl.int64) * ROWS)[:, None] + row[None, :]
            real = (part < parts)[:, None] & there[None, :]
            part_lse = tl.load(part_lse_ptr + place, mask=real, other=float("-inf"))
            values = tl.load(part_ptr + place[:, :, None] * BLOCK_DV + dims[None, None, :], mask=real[:, :, None] & used[None, None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(part_lse, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights, shrink = tl.math.exp2(part_lse - base[None, :]), tl.math.exp2(top - base)
            acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
            sums = sums * shrink + tl.sum(weights, 0)
            top = new_top
        blind = sums == 0.0
        logit = tl.full([HEIGHT], float("-inf"), tl.float32)
        if sinks_ptr is not None:
            logit = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32)
            acc, top, sums = sink(acc, top, sums, logit)
        acc = acc * tl.where(sums == 0.0, 0.0, tl.math.div_rn(1.0, sums))[:, None]
        to = out[0] + b.to(tl.int64) * out[1] + (token + query).to(tl.int64) * out[2] + head * out[3]
        tl.store(to[:, None] + dims[None, :], acc.to(out[0].dtype.element_ty), mask=there[:, None] & used[None, :])
        if lse[0] is not None:
            to_lse = lse[0] + b.to(tl.int64) * lse[1] + head * lse[2] + token + query
            tl.store(to_lse, tl.where(blind, logit, (top + tl.math.log2(sums)) * LN2), mask=there)


# ---- host


def at_once(units: int, programs: int, rows: int, columns: int, alone: bool) -> dict[str, int]:
    """Parts and rows of a merging program, 32 rows of parts at once. Rows one by one while that fills the device once: of 4 rows a unit,
    several at a time cost 1 to 3 us of 70 to 135; of 32, one at a time 12 of 159.

    alone   the batch may not choose.
    """
    height = 1 if alone else max(1, min(8, rows, min(units, programs) * rows // FILL))
    height = min(1 << (height.bit_length() - 1), max(1, 1024 // columns))  # of 4 parts each
    return {"PARTS": 32 // height, "HEIGHT": height}
