"""Attention of many queries: o = softmax(scale q k^T + mask) v, one tile of queries a program, keys streamed past it.

FlashAttention-2 (Dao, 2023): scores never leave the chip, the sum of exponentials is kept per row and divided once. A
program reads its BLOCK_M queries once and every key that they see once: traffic to L2 is len_q / BLOCK_M passes over K
and V. Key tiles that every row sees skip the mask. On Hopper K and V come through TMA descriptors; elsewhere, or when a
stride is not a multiple of 16 bytes, through pointers. So do keys in pages (vLLM's PagedAttention, Kwon et al., 2023), of
any size: a row of the tile looks its page up, or all of them at once where pages are whole tiles. Keys of few queries are dealt
out in parts (`key_parts`), each a program.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.philox import bar
from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced, hides_keys
from onchip.kernels.attention import texts
from onchip.kernels.attention.key_parts import apart, join, parts_allowed
from onchip.kernels.attention.tile import (
    LOG2E,
    adjacent,
    band,
    block,
    describable,
    device_functions,
    ends,
    has_tma,
    inner_span,
    kept,
    key_span,
    mask_map,
    normalise,
    online_softmax,
    outputs,
    page_slots,
    sequence,
    sink,
    tf32,
    together,
)  # fmt: skip


class Tiles(NamedTuple):
    """Queries and keys a tile, warps, and key tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int
    parts: int = 1  # that the keys of a tile of queries are dealt out in (`key_parts`)

    def __str__(self):
        return f"{self.m}x{self.n} tiles{f', their keys in {self.parts} parts' * (self.parts > 1)}, {self.warps} warps, {self.stages} stages"


# ---- device


@triton.jit
def _tile(src, row, head, first, batch, stride, cols, dims, last, dim, TMA: tl.constexpr, EDGE: tl.constexpr):
    """BLOCK_N keys or values from `row + first` on, [BLOCK_N, BLOCK_D]; EDGE: some may lie past `last` and read as 0."""
    if TMA:
        tile = src.load([batch, head, row + first, 0])
        tile = tile.reshape(tile.shape[2], tile.shape[3])
    else:
        ptrs = src + (first + cols).to(tl.int64)[:, None] * stride + dims[None, :]
        if EDGE:
            tile = tl.load(ptrs, mask=(first + cols < last)[:, None] & (dims < dim)[None, :], other=0.0)
        elif dims.shape[0] == dim:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(dims < dim)[None, :], other=0.0)
    return tile


@triton.jit
def _paged_tile(src, pages, slots, near, strides, dims, dim, EDGE: tl.constexpr):
    """The keys or values in `slots` [BLOCK_N] of `pages`, [BLOCK_N, BLOCK_D]; EDGE: those that are not `near` are not read, and 0."""
    page, row = strides
    ptrs = src + (pages * page + slots * row)[:, None] + dims[None, :]
    if EDGE:
        tile = tl.load(ptrs, mask=near[:, None] & (dims < dim)[None, :], other=0.0)
    elif dims.shape[0] == dim:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(dims < dim)[None, :], other=0.0)
    return tile


@triton.jit
def _attend(acc, top, total, q, k_src, v_src, first, count, tiles, step, call, D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
            BLOCK_N: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, PADDED: tl.constexpr,
            PACKED: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """acc, top and total after `count` key tiles: from key `first` on, or those numbered at `tiles`, `step` apart. EDGE: they need the mask."""
    rows, place, strides, scale, gain, at, reads, dropout = call
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, q.shape[1])
    dims_v = tl.arange(0, acc.shape[1])
    batch, head, row, table_ptr, lowest = place
    b, h, shift, len_q, len_k = at
    k_stride, v_stride = strides
    mask_reads, score_reads = reads
    state_ptr, drop_bar, keep_scale, b_h, query = dropout
    for t in tl.range(0, count, num_stages=STAGES):
        if tiles is not None:
            n = tl.load(tiles + t * step) * BLOCK_N
        else:
            n = first + t * BLOCK_N
        n = tl.multiple_of(n, BLOCK_N)
        if PAGE > 0:
            pages, slots = page_slots(table_ptr, n, n + cols, len_k, PAGE, BLOCK_N)
            near = n + cols < len_k
            if LEFT >= 0:  # pages before the window may be another sequence's by now
                near = near & (n + cols >= lowest)
            k = _paged_tile(k_src, pages, slots, near, k_stride, dims, D, EDGE)
        else:
            k = _tile(k_src, row, head, n, batch, k_stride[1], cols, dims, len_k, D, TMA, EDGE)
        if MASK is not None and EDGE:
            seen = MASK(b, h, rows[:, None], (n + cols)[None, :], len_q, len_k, mask_reads) & (n + cols < len_k)[None, :]
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        if SCORE is not None:
            scores = SCORE(scores * scale, b, h, rows[:, None], (n + cols)[None, :], len_q, len_k, score_reads)
        if EDGE:
            if MASK is not None:
                scores = tl.where(seen, scores, float("-inf"))
            else:
                scores = band(scores, rows + shift, n + cols, len_k, LEFT, RIGHT)
        weights, shrink, top, total = online_softmax(scores, top, total, gain, EDGE or SCORE is not None)
        if state_ptr is not None:
            weights = tl.where(kept(state_ptr, drop_bar, b_h, query, n, weights.shape[0], BLOCK_N, False), weights * keep_scale, 0.0)
        acc = acc * shrink[:, None]
        if PAGE > 0:
            v = _paged_tile(v_src, pages, slots, near, v_stride, dims_v, DV, EDGE)
        else:
            v = _tile(v_src, row, head, n, batch, v_stride[1], cols, dims_v, len_k, DV, TMA, EDGE)
        if EDGE and PADDED:  # 0 x NaN is NaN: a key that no row sees may hold anything
            v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        elif EDGE and PACKED and PAGE == 0:  # and so may what lies past the end
            v = tl.where((n + cols < len_k)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _within(first, inner, outer, last, part, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile's keys from `first` to `last`, those without a mask from `inner` to `outer`, the same of a part."""
    steps = tl.maximum(tl.cdiv(last - first, BLOCK_N), 0)
    low = first + part * steps // PARTS * BLOCK_N
    high = tl.maximum(tl.minimum(first + (part + 1) * steps // PARTS * BLOCK_N, last), low)
    return low, tl.minimum(tl.maximum(inner, low), high), tl.minimum(tl.maximum(outer, low), high), high


@triton.jit(do_not_specialize=["heads", "group", "len_q", "len_k", "tiles_m", "together", "drop_bar"])
def _prefill(q_src, k_src, v_src, o_src, lse_ptr, q_offsets, k_offsets, q_used, k_used, table_ptr, map_ptr, sinks_ptr, state_ptr, reads,
             scale, gain, heads, group, len_q, len_k, tiles_m, together, drop_bar, keep_scale, table_row,
             q_strides, k_strides, v_strides, o_strides, lse_strides, map_strides,
             D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
             PADDED: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    # `together` heads go side by side, so that their K and V share L2; under a causal mask, or any that may be like one, the longest rows go first
    PACKED: tl.constexpr = q_offsets is not None
    index = tl.program_id(0)
    if PARTS > 1:
        part = index % PARTS
        index = index // PARTS
    bundle = index // (together * tiles_m)
    within = index - bundle * together * tiles_m
    programs = tl.num_programs(0) // PARTS
    width = tl.minimum(together, programs // tiles_m - bundle * together)
    batch_head = bundle * together + within % width
    tile_m = within // width
    if RIGHT >= 0 or MASK is not None:
        tile_m = tiles_m - 1 - tile_m
    b = batch_head // heads
    head = batch_head - b * heads
    start_q, len_q = sequence(q_offsets, q_used, b, len_q)
    start_k, len_k = sequence(k_offsets, k_used, b, len_k)
    batch = b
    if PACKED:
        batch = b * 0
        if tile_m * BLOCK_M >= len_q:
            return

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # of this sequence's queries
    dims = tl.arange(0, BLOCK_D)
    q_batch, q_head, q_row = q_strides
    if TMA:
        q = q_src.load([batch, head, start_q + tile_m * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        q_base = q_src + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        q = tl.load(q_base + (start_q + rows).to(tl.int64)[:, None] * q_row + dims[None, :], mask=(rows < len_q)[:, None] & (dims < D)[None, :], other=0.0)
    kv_head = head // group
    k_batch, k_head, k_row = k_strides
    v_batch, v_head, v_row = v_strides
    if PAGE > 0:
        k_src += kv_head.to(tl.int64) * k_head
        v_src += kv_head.to(tl.int64) * v_head
        table_ptr += b.to(tl.int64) * table_row
    elif not TMA:
        k_src += batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head + start_k.to(tl.int64) * k_row
        v_src += batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head + start_k.to(tl.int64) * v_row

    shift = len_k - len_q
    if TOP_LEFT:
        shift = shift * 0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_first, row_last = tile_m * BLOCK_M + shift, tile_m * BLOCK_M + BLOCK_M - 1 + shift
    first, last = key_span(row_first, row_last, len_k, LEFT, RIGHT)
    place, strides, at = (batch, kv_head, start_k, table_ptr, first), ((k_batch, k_row), (v_batch, v_row)), (b, head, shift, len_q, len_k)
    dropout = (state_ptr, drop_bar, keep_scale, batch_head, tile_m * BLOCK_M)
    call = (rows, place, strides, scale, gain * LOG2E, at, reads, dropout)
    if MASK is not None:
        map_ptr += (b * map_strides[0] + head * map_strides[1] + tile_m).to(tl.int64) * map_strides[2]
        part, whole = tl.load(map_ptr), tl.load(map_ptr + 1)
        acc, top, total = _attend(acc, top, total, q, k_src, v_src, 0, part, map_ptr + 2, 1, call, D, DV, LEFT, RIGHT, BLOCK_N,
                                  MASK, SCORE, TMA, True, PADDED, PACKED, PAGE, PRECISION, STAGES)  # fmt: skip
        acc, top, total = _attend(acc, top, total, q, k_src, v_src, 0, whole, map_ptr + map_strides[2] - 1, -1, call, D, DV, LEFT, RIGHT, BLOCK_N,
                                  MASK, SCORE, TMA, False, PADDED, PACKED, PAGE, PRECISION, STAGES)  # fmt: skip
    else:
        first = first // BLOCK_N * BLOCK_N
        inner, outer = inner_span(row_first, row_last, len_k, LEFT, RIGHT, BLOCK_N)
        if LEFT >= 0:  # where no tile is seen by all rows, one masked run over everything
            whole = inner < outer
            inner = tl.where(whole, inner, first)
            outer = tl.where(whole, outer, first)
        if PARTS > 1:
            first, inner, outer, last = _within(first, inner, outer, last, part, PARTS, BLOCK_N)
        if LEFT >= 0:
            acc, top, total = _attend(acc, top, total, q, k_src, v_src, first, (inner - first) // BLOCK_N, None, 0, call, D, DV, LEFT, RIGHT, BLOCK_N,
                                      None, SCORE, TMA, True, False, PACKED, PAGE, PRECISION, STAGES)  # fmt: skip
        acc, top, total = _attend(acc, top, total, q, k_src, v_src, inner, (outer - inner) // BLOCK_N, None, 0, call, D, DV, LEFT, RIGHT, BLOCK_N,
                                  None, SCORE, TMA, False, False, PACKED, PAGE, PRECISION, STAGES)  # fmt: skip
        acc, top, total = _attend(acc, top, total, q, k_src, v_src, outer, tl.cdiv(last - outer, BLOCK_N), None, 0, call, D, DV, LEFT, RIGHT, BLOCK_N,
                                  None, SCORE, TMA, True, False, PACKED, PAGE, PRECISION, STAGES)  # fmt: skip

    if sinks_ptr is not None:
        logit = tl.load(sinks_ptr + head).to(tl.float32)
        if PARTS > 1:  # one part's is enough
            logit = tl.where(part == 0, logit, float("-inf"))
        acc, top, total = sink(acc, top, total, logit)
    out, lse = normalise(acc, top, total)
    if PARTS == 1:
        out = out.to(q.dtype)
    dims_v = tl.arange(0, BLOCK_DV)
    if PARTS > 1:  # behind the parts before, where its LSE is
        before = part.to(tl.int64) * (heads if PACKED else programs // tiles_m) * lse_strides[1]
        lse_ptr += before
        at = before + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + start_q
        tl.store(o_src + (at + rows)[:, None] * DV + dims_v[None, :], out, mask=(rows < len_q)[:, None] & (dims_v < DV)[None, :])
    elif TMA and not PACKED:  # a descriptor knows where a dense sequence ends, but not where a packed one does
        o_src.store([batch, head, tile_m * BLOCK_M, 0], out.reshape(1, 1, BLOCK_M, BLOCK_DV))
    else:
        o_batch, o_head, o_row = o_strides
        o_base = o_src + batch.to(tl.int64) * o_batch + head.to(tl.int64) * o_head
        tl.store(o_base + (start_q + rows).to(tl.int64)[:, None] * o_row + dims_v[None, :], out, mask=(rows < len_q)[:, None] & (dims_v < DV)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + start_q + rows, lse, mask=rows < len_q)


# ---- host

# Best first, by head dimension up to (H200, 2026-11-21, 16k tokens, bf16, TFLOP/s): at 64, 64x128 makes 448 and 128x64 432; at 128,
# 128x64 of 4 warps makes 525 although ptxas spills 100 bytes, 128x128 of 8 warps 477; at 256, 128x64 makes 539, 64x64 497.
SMALL = (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 4, 1))
# float32 is multiplied on FMA units, an outer product in registers: larger tiles spill kilobytes and compile for half a minute.
IEEE = (Tiles(32, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 4, 1))
CANDIDATES = (
    (64, (Tiles(64, 128, 4, 2), Tiles(128, 64, 8, 3), *SMALL)),
    (128, (Tiles(128, 64, 4, 2), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 3), *SMALL)),
    (256, (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3), *SMALL)),
)
# Keys in pages come by pointers, of which the addresses fill registers: 128x64 with 4 warps would spill 708 bytes (sm_80) or 1,452 (sm_90) at 128.
PAGED = (
    (128, (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), *SMALL)),
    (256, (Tiles(64, 64, 8, 2), *SMALL)),
)
# A window's tiles are mostly edges: short ones waste less of them (16k tokens, Window(1024), TFLOP/s: at 64, 364 and 342; at 128, 417 and 334).
WINDOW = ((64, Tiles(64, 64, 4, 2)), (128, Tiles(64, 64, 4, 3)))
# At 128 a score that reads a value for each place needs registers (a bias [heads, 8k, 8k], ms: 128x64 with 8 warps 2.62, 64x64 3.32, 128x64 with 4
# warps 3.96, plain 2.02).
READING = Tiles(128, 64, 8, 3)
GATHERING = Tiles(64, 64, 4, 3)  # and one that looks up what it has computed (a table of distances: 3.1 ms, 128x64 with 4 warps 6.5)

# Where weights are dropped (16k tokens, p = 0.1, full and causal, ms): at 64, 64x64 takes 4.25 and 2.08, 64x128 4.6 and 2.4; at 128, 128x64 with 8 warps 3.47
# and 1.70, with 4 warps 3.9 and 2.1, 64x64 4.1 and 2.0.
DROPPING = ((64, Tiles(64, 64, 4, 3)), (128, Tiles(128, 64, 8, 3)))


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The candidates that fit the device, best first; those that leave rows or multiprocessors idle go last."""
    size, width, width_v = p.dtype.itemsize, block(p.dim), block(p.value_dim)
    pairs = sum(texts.pair_bytes(part.text) for part in (p.mask, p.score) if isinstance(part, Traced))
    drops = "dropout" in p.extras  # what it keeps goes through shared memory, a byte for each weight of a tile

    def fits(t: Tiles) -> bool:
        queries, cached, kept = t.m * widest * size, t.stages * t.n * (width + width_v) * size, drops * t.m * t.n
        if t.stages == 1:  # keys are gone when values come
            cached = t.n * widest * size
        if t.stages == 1 and device.kind == "hip":  # each is in registers when the next one comes
            shared = max(queries, cached, kept)
        else:
            shared = queries + cached + (t.stages - 1) * t.m * t.n * pairs + kept
        registers = t.m * (width_v + t.n) // (32 * t.warps)  # accumulator and scores, of 255 a thread
        return shared <= device.shared_memory and registers <= 192

    def idles(t: Tiles) -> bool:
        programs = p.batch * p.heads * -(-p.len_q // t.m)
        return t.m > 16 and (t.m >= 2 * p.len_q or (t.m > 64 and programs < device.sms))

    widest, half = max(width, width_v), size == 2 or "tf32" in p.extras
    first = ()
    if half and widest <= 128:
        text = "" if p.score is None or widest < 128 else p.score.text
        if ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)[0] >= 0:
            first = (pick(WINDOW, widest),)
        elif text and texts.pair_bytes(text):
            first = (READING, Tiles(64, 64, 4, 2))  # the second where many tables leave no room for the first
        elif text and (texts.gathers(text) or isinstance(p.mask, Traced)):
            first = (GATHERING,)
        elif drops:
            first = (pick(DROPPING, widest),)
    candidates = (*first, *(pick(PAGED if p.page else CANDIDATES, widest) if half else IEEE))
    fitting = filter(fits, candidates)
    if "batch_invariant" in p.extras:  # what is best must not depend on how much else there is to do
        return list(fitting)
    return [_in_parts(p, t, device) for t in sorted(fitting, key=idles)]


def _in_parts(p: Attention, t: Tiles, device: Device) -> Tiles:
    """The same, with keys in as many parts as leave each multiprocessor one program, as if that were all it holds."""
    programs = p.batch * p.heads * -(-p.len_q // t.m)
    return t._replace(parts=next(parts for parts in parts_allowed(p, t.m, t.n) if parts == 1 or parts * programs <= device.sms))


def launch(p: Attention, tiles: Tiles, q, k, v, x: Operands, return_lse: bool, page_table=None):
    """q, k, v as `ops.attention` passes them: dense, or packed with offsets."""
    pages = "" if page_table is None else "triton_paged"
    q, k, v = adjacent(q), adjacent(k, pages), adjacent(v, pages)
    packed = x.q_offsets is not None
    out, lse = outputs(p, x, q, return_lse)
    if out.numel() == 0 or p.len_k == 0:
        return (out, lse) if return_lse else out
    heads_first = [t.transpose(0, 1)[None] if t.ndim == 3 else t.transpose(1, 2) for t in (q, k, v, out)]  # [batch or pages, heads, len, dim]
    width, width_v = block(p.dim), block(p.value_dim)
    tma = not p.page and has_tma(q.device) and all(describable(t) for t in heads_first)
    sources = heads_first
    if tma:
        blocks = ((tiles.m, width), (tiles.n, width), (tiles.n, width_v), (tiles.m, width_v))
        sources = [TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, *b]) for t, b in zip(heads_first, blocks, strict=True)]
        if packed:
            sources[3] = heads_first[3]
    into_lse = lse
    if tiles.parts > 1:
        sources[3], into_lse = apart(p, tiles.parts, q.device)
    tiles_m = triton.cdiv(p.len_q, tiles.m)
    left, right, top_left = ends(p.mask if isinstance(p.mask, Band) else p.mask.hull)
    lse_strides = (0, 0) if into_lse is None else (0, p.tokens) if packed else into_lse.stride()[-3:-1]
    (sees, score), reads, scale, gain = device_functions(p, x, q)
    found, map_strides = None, (0, 0, 0)
    if sees is not None:
        found, map_strides = mask_map(p, sees, x, tiles.m, tiles.n, False, q.device)
    sinks = x.sinks if x.sinks is None else x.sinks.contiguous()
    _prefill[(tiles_m * p.batch * p.heads * tiles.parts,)](
        *sources, into_lse, x.q_offsets, x.k_offsets, x.q_used, x.k_used, page_table, found, sinks, x.state, reads,
        scale, gain, p.heads, p.group, p.len_q, p.len_k, tiles_m, together(p), bar(x.drop), 1 / (1 - x.drop), 0 if page_table is None else page_table.stride(0),
        *(t.stride()[:3] for t in heads_first), lse_strides, map_strides,
        D=p.dim, DV=p.value_dim, BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_D=width, BLOCK_DV=width_v,
        LEFT=left, RIGHT=right, TOP_LEFT=top_left, MASK=sees, SCORE=score, PADDED=hides_keys(p.mask),
        TMA=tma, PAGE=p.page, PRECISION=tf32(p), STAGES=tiles.stages, PARTS=tiles.parts, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.parts > 1:
        join(sources[3], into_lse, out, lse)
    return (out, lse) if return_lse else out


def launch_paged(p: Attention, tiles: Tiles, q, cache, x: Operands, return_lse: bool):
    """`launch` over a PagedKV, as `ops.attention.paged_attention` passes them. Lengths are read on the device: a CUDA graph may capture the call."""
    return launch(p, tiles, q, cache.k, cache.v, x._replace(k_used=cache.lengths), return_lse, cache.page_table)
