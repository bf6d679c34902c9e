"""Attention of many queries: o = softmax(scale q k^T + mask) v, one tile of queries a program, keys streamed past it.

FlashAttention-2 (Dao, 2023): scores never leave the chip, the sum of exponentials is kept per row and divided once. A
program reads its BLOCK_M queries once and every key that they see once: traffic to L2 is len_q / BLOCK_M passes over K
and V. Key tiles that every row sees skip the mask. On Hopper K and V come through TMA descriptors; elsewhere, or when a
stride is not a multiple of 16 bytes, through pointers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.tile import LOG2E, band, inner_span, key_span, normalise, online_softmax

L2_SHARE = 32 << 20  # bytes of K and V that the programs in flight may spread over and still find in L2


class Tiles(NamedTuple):
    """Queries and keys a tile, warps, and key tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, {self.warps} warps, {self.stages} stages"


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
def _attend(acc, top, total, q, k_src, v_src, first, last, rows, len_k, place, strides, scale,
            D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
            EDGE: tl.constexpr, ZERO_TAIL: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """acc, top and total after the key tiles of [first, last); EDGE: they need the mask."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, q.shape[1])
    batch, head, row = place
    k_stride, v_stride = strides
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = tl.multiple_of(n, BLOCK_N)
        k = _tile(k_src, row, head, n, batch, k_stride, cols, dims, len_k, D, TMA, EDGE)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [M, N]
        if EDGE:
            scores = band(scores, rows, n + cols, len_k, LEFT, RIGHT)
        weights, shrink, top, total = online_softmax(scores, top, total, scale, EDGE)
        acc = acc * shrink[:, None]
        v = _tile(v_src, row, head, n, batch, v_stride, cols, dims, len_k, D, TMA, EDGE)
        if ZERO_TAIL and EDGE:  # packed: past the end lies another sequence, and 0 x NaN is NaN
            v = tl.where((n + cols < len_k)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["heads", "group", "len_q", "len_k", "tiles_m", "together"])
def _prefill(q_src, k_src, v_src, o_src, lse_ptr, offsets_ptr, scale, heads, group, len_q, len_k, tiles_m, together,
             q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row, lse_batch, lse_head,
             D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
             TMA: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    # `together` heads go side by side, so that their K and V share L2; under a causal mask the longest rows go first
    index = tl.program_id(0)
    bundle = index // (together * tiles_m)
    within = index - bundle * together * tiles_m
    width = tl.minimum(together, tl.num_programs(0) // tiles_m - bundle * together)
    batch_head = bundle * together + within % width
    tile_m = within // width
    if RIGHT >= 0:
        tile_m = tiles_m - 1 - tile_m
    batch = batch_head // heads
    head = batch_head - batch * heads
    start = batch * 0
    if PACKED:
        start = tl.load(offsets_ptr + batch)
        len_q = tl.load(offsets_ptr + batch + 1) - start
        len_k = len_q
        batch = batch * 0
        if tile_m * BLOCK_M >= len_q:
            return

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # of this sequence's queries
    dims = tl.arange(0, BLOCK_D)
    if TMA:
        q = q_src.load([batch, head, start + tile_m * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        q_base = q_src + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        q = tl.load(q_base + (start + rows).to(tl.int64)[:, None] * q_row + dims[None, :], mask=(rows < len_q)[:, None] & (dims < D)[None, :], other=0.0)
    kv_head = head // group
    if not TMA:
        k_src += batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head + start.to(tl.int64) * k_row
        v_src += batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head + start.to(tl.int64) * v_row

    shift = len_k - len_q
    row_first, row_last = tile_m * BLOCK_M + shift, tile_m * BLOCK_M + BLOCK_M - 1 + shift
    first, last = key_span(row_first, row_last, len_k, LEFT, RIGHT)
    first = first // BLOCK_N * BLOCK_N
    inner, outer = inner_span(row_first, row_last, len_k, LEFT, RIGHT, BLOCK_N)
    if LEFT >= 0:  # where no tile is seen by all rows, one masked run over everything
        whole = inner < outer
        inner = tl.where(whole, inner, first)
        outer = tl.where(whole, outer, first)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    place, strides, scale = (batch, kv_head, start), (k_row, v_row), scale * LOG2E
    if LEFT >= 0:
        acc, top, total = _attend(acc, top, total, q, k_src, v_src, first, inner, rows + shift, len_k, place, strides, scale,
                                  D, LEFT, RIGHT, BLOCK_N, TMA, True, PACKED, STAGES)  # fmt: skip
    acc, top, total = _attend(acc, top, total, q, k_src, v_src, inner, outer, rows + shift, len_k, place, strides, scale,
                              D, LEFT, RIGHT, BLOCK_N, TMA, False, PACKED, STAGES)  # fmt: skip
    acc, top, total = _attend(acc, top, total, q, k_src, v_src, outer, last, rows + shift, len_k, place, strides, scale,
                              D, LEFT, RIGHT, BLOCK_N, TMA, True, PACKED, STAGES)  # fmt: skip

    out, lse = normalise(acc, top, total)
    out = out.to(q.dtype)
    if TMA and not PACKED:  # a descriptor knows where a dense sequence ends, but not where a packed one does
        o_src.store([batch, head, tile_m * BLOCK_M, 0], out.reshape(1, 1, BLOCK_M, BLOCK_D))
    else:
        o_base = o_src + batch.to(tl.int64) * o_batch + head.to(tl.int64) * o_head
        tl.store(o_base + (start + rows).to(tl.int64)[:, None] * o_row + dims[None, :], out, mask=(rows < len_q)[:, None] & (dims < D)[None, :])
    if LSE:
        tl.store(lse_ptr + batch.to(tl.int64) * lse_batch + head.to(tl.int64) * lse_head + start + rows, lse, mask=rows < len_q)


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


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The candidates that fit the device, best first; those that leave rows or multiprocessors idle go last."""
    size, width = p.dtype.itemsize, triton.next_power_of_2(p.dim)

    def fits(t: Tiles) -> bool:
        shared = (t.m + 2 * t.stages * t.n) * width * size
        registers = t.m * (width + t.n) // (32 * t.warps)  # accumulator and scores, of 255 a thread
        return shared <= device.shared_memory and registers <= 192

    def idles(t: Tiles) -> bool:
        programs = p.batch * p.heads * -(-p.len_q // t.m)
        return t.m > 16 and (t.m >= 2 * p.len_q or (t.m > 64 and programs < device.sms))

    return sorted(filter(fits, pick(CANDIDATES, width) if size == 2 else IEEE), key=idles)


def launch(p: Attention, tiles: Tiles, q, k, v, x: Operands, return_lse: bool):
    """q, k, v as `ops.attention` passes them: dense, or packed with `offsets`."""
    offsets, scale = x.q_offsets, x.scale
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    packed = offsets is not None
    lse = None
    if return_lse:
        shape = (p.heads, p.tokens) if packed else (p.batch, p.heads, p.len_q)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    if p.len_k == 0:
        out.zero_()
        return (out, lse.fill_(-torch.inf)) if return_lse else out
    heads_first = [x.transpose(0, 1)[None] if packed else x.transpose(1, 2) for x in (q, k, v, out)]  # [batch, heads, len, dim]
    width = triton.next_power_of_2(p.dim)
    tma = _has_tma(q.device) and all(_describable(x) for x in heads_first[:3])
    blocks = (tiles.m, tiles.n, tiles.n, tiles.m) if tma else (None,) * 4
    if packed:
        blocks = (*blocks[:3], None)
    sources = [
        x if rows is None else TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width]) for x, rows in zip(heads_first, blocks, strict=True)
    ]
    tiles_m = triton.cdiv(p.len_q, tiles.m)
    together = 1  # without a causal mask one head after the other: the fewest K and V in flight
    if p.mask.right is not None:
        together = max(1, min(p.batch * p.heads, L2_SHARE // (2 * p.len_k * p.dim * p.dtype.itemsize)))
    strides = [s for x in heads_first for s in x.stride()[:3]]
    lse_strides = (0, 0) if lse is None else (0, p.tokens) if packed else lse.stride()[:2]
    left, right = (-1 if side is None else side for side in (p.mask.left, p.mask.right))
    _prefill[(tiles_m * p.batch * p.heads,)](
        *sources, lse, offsets, scale, p.heads, p.group, p.len_q, p.len_k, tiles_m, together, *strides, *lse_strides,
        D=p.dim, BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_D=width, LEFT=left, RIGHT=right,
        TMA=tma, PACKED=packed, LSE=return_lse, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _has_tma(device: torch.device) -> bool:
    """Hopper and later copy tiles by descriptor; the interpreter does so too."""
    return device.type == "cpu" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def _describable(x) -> bool:
    """TMA wants a 16-byte aligned base and strides."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in x.stride()[:3]) and x.stride(3) == 1
