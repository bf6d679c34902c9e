"""Decoding over a latent cache (multi-head latent attention, DeepSeek-V2, 2024) on Hopper: every head's key is the token's latent of 576, its value the
first 512 columns of that.

o = softmax(scale q c^T) c[:, :512] for 64 rows (heads, or queries times heads) at a time. With 128 heads a key is worth 2 x 128 x 1,088 flops for 1,152
bytes: tensor cores are the floor. What a program holds is what Hopper has: queries [64, 576] in shared memory, keys in two blocks of [64, 576], and the
output [64, 512] in the registers of two warpgroups, 256 columns each. After FlashMLA (Li and Liu, 2025) the warpgroups take turns ("seesaw"): the left one
multiplies the scores of the even block of a pair and weighs them while the right one multiplies those of the odd block; both then add both blocks to
their columns, so that each one's softmax runs beside the other's products:

    left    scores even | weigh even        | output += even | output += odd |
    right                 scores odd        | output += even ; weigh odd | output += odd |

Weights and the maxima they are taken over go to the other warpgroup through shared memory: weights lie where the rope columns of their own keys did,
which are done with by then. A maximum only moves where it grew by more than 2^8 (FlashAttention-4), so that outputs are scaled seldom.

A key block comes in three parts, columns 0 to 255, 256 to 511 and the rest, each of which goes when its last reader is done; and it is waited for in five
pieces, since it is the way of the next keys that takes longest: a product begins with the first 128 columns that are there. Work is cut evenly: the
pairs of all sequences, end to end, are dealt out to as many programs as there are multiprocessors, from lengths that are read on the device, so that a
CUDA graph may capture the call. A sequence that two programs share is merged by a second kernel (`latent_merge`; Flash-Decoding, Dao et al., 2023). Each
kernel begins while the one before it ends: what a program makes ready waits for nobody. Keys in e4m3, 656 bytes each, become bfloat16 on their way to shared
memory (`latent_copies`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.gluon_shares import fetch
from onchip.kernels.attention.hopper_tiles import base_of, programs_of
from onchip.kernels.attention.latent_copies import EVEN, LEFT_GONE, ODD, PIECE, RIGHT_GONE, ROPE_GONE, copy, next_work
from onchip.kernels.attention.latent_merge import merge, parts_of
from onchip.kernels.attention.tile import LN2, LOG2E, for_tma
from onchip.kernels.hopper import (
    arrive_and_wait,
    describe,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    message,
    release,
    scale_rows,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(64)  # keys of a block, and rows of a tile
PAIR = gl.constexpr(128)
FIRST, OTHERS = gl.constexpr((0,)), gl.constexpr((1, 2, 3, 4))
HALF = gl.constexpr(256)  # columns of the output of a warpgroup
ROPE = gl.constexpr(64)  # columns of a key that are not its value's
# Half of a tile's rows [64, 256] as they are written: a thread has 8 columns side by side, four threads 64 bytes of a row; a warp's own numbers still.
WRITTEN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 256]
    )
)
GROWTH = gl.constexpr(8.0)  # weights of up to 2^8 cost half precision no digits
# Hardware barriers. For all of a warpgroup: before it writes weights over keys that its other warps may be reading.
LEFT_WARPS, RIGHT_WARPS = gl.constexpr(4), gl.constexpr(5)
TOTALS, TURN, EVEN_READY, ODD_READY = gl.constexpr(6), gl.constexpr(7), gl.constexpr(8), gl.constexpr(9)
BOTH = gl.constexpr(256)  # threads that meet


class Grid(NamedTuple):
    """Shares of all key pairs, and tiles of 64 rows; a program for each of both. And tiles of a launch: fewer than all only of one share, where
    multiprocessors are left to others."""

    shares: int
    tiles: int
    at_once: int

    def __str__(self):
        launches = f", {self.at_once} a launch" * (self.at_once < self.tiles)
        return f"64 rows and 2 x 64 keys a step, {self.shares} shares of the keys x {self.tiles} tiles of rows{launches}"


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for."""

    causal: bool  # whether there are several queries, each of which sees one key more than the one before
    page: int  # keys a page, in half precision a power of two from 8 on
    codes: bool  # whether keys are in e4m3

    @property
    def parts(self):
        """Pages that hold a block of keys."""
        return max(1, 64 // self.page)

    @property
    def fillers(self):
        """Threads that bring keys."""
        return 128 if self.codes else 32

    @property
    def one_group(self):
        """Threads that meet where a part of a block goes that one warpgroup reads."""
        return 128 + self.fillers

    @property
    def two_groups(self):
        return 256 + self.fillers


# ---- device: both warpgroups


@gluon.jit
def _parts(block, zero):
    """A block's three parts as matrices. `zero`, which the compiler does not know, keeps it from making every product's descriptors before the loop over
    pairs, where 100 of them spill."""
    return block[0].index(zero).reshape([64, 256]), block[1].index(zero).reshape([64, 256]), block[2].index(zero).reshape([64, 64])


@gluon.jit
def _zero(x):
    return gl.inline_asm_elementwise("redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x * 0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _sight(length, tile, heads, len_q, C: gl.constexpr, layout: gl.constexpr):
    """How many keys each row sees, and how many all rows see."""
    limits = gl.full([64], 0, gl.int32, layout) + length
    least = length
    if C.causal:
        least = length - (len_q - 1)
        limits = gl.minimum(limits, length - (len_q - 1 - (tile * 64 + gl.arange(0, 64, layout=layout)) // heads))
    return limits, least


@gluon.jit
def _clear(buffer, n, length, C: gl.constexpr):
    """Values of keys from `n` on with 0 behind the last key: what lies there may be NaN, and 0 times NaN is NaN. Of codes it is 0."""
    if not C.codes and n + 64 > length:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for row in gl.static_range(0, 64, 16):  # all at once want 64 registers
            rows = buffer.slice(row, 16, 0)
            real = n + row + gl.arange(0, 16, layout=gl.SliceLayout(1, layout)) < length
            rows.store(gl.where(real[:, None], rows.load(layout), 0.0).to(buffer.dtype))
        fence_async_shared()


@gluon.jit
def _weigh(scores, n, sight, top, gain, layout: gl.constexpr):
    """Weights over the largest score so far, that in base 2, what shrinks all before, and sums that stay in a thread, [64, 8]."""
    limits, least = sight
    if n + 64 > least:
        cols = n + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        scores = gl.where(cols[None, :] < limits[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * gain)
    new_top = gl.where(new_top - top > GROWTH, new_top, top)
    weights = gl.exp2(scores * gain - base_of(new_top)[:, None])
    return weights, new_top, gl.exp2(top - base_of(new_top)), gl.sum(weights.reshape([64, 8, 8]), 1)


@gluon.jit
def _shrunk(acc, total, shrink):
    """Output and sums over the largest score so far."""
    acc = scale_rows(acc, gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 64)
    return acc, total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def _put(acc, out_ptr, rows, GROUP: gl.constexpr):
    """Half of the columns of `rows` rows of a tile, from `out_ptr` on, 16 bytes a thread: each warp turns its numbers round first (128x4k: 255 us to 249)."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WRITTEN))
    column = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, WRITTEN))
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WRITTEN)
    gl.store(out_ptr + row[:, None] * (2 * HALF) + column[None, :], out, mask=(row < rows)[:, None])


@gluon.jit
def _finish(acc, total, top, place, tile, outs, sums, sizes, GROUP: gl.constexpr, row_layout: gl.constexpr):
    """Half of the columns of 64 rows' results: to the output, or to be merged."""
    out_ptr, lse_ptr, part_ptr, part_lse_ptr = outs
    heads, len_q, tiles, _first = sizes
    sequence, slot = place[0], place[4]
    total = gl.convert_layout(gl.sum(total, 1), row_layout)
    sums[GROUP].store(total)
    arrive_and_wait(slot * 0, TOTALS, BOTH)
    total += sums[1 - GROUP].load(row_layout)
    acc = acc * gl.convert_layout(gl.where(total == 0.0, 0.0, 1.0 / total), gl.SliceLayout(1, acc.type.layout))[:, None]
    lse = top + gl.log2(total)  # in base 2
    rows = gl.arange(0, 64, layout=row_layout)
    if slot < 0:
        _put(acc, out_ptr + (sequence.to(gl.int64) * (heads * len_q) + tile * 64) * (2 * HALF), heads * len_q - tile * 64, GROUP)
        if lse_ptr is not None and GROUP == 0:
            rows = tile * 64 + rows
            at = sequence.to(gl.int64) * (heads * len_q) + rows % heads * len_q + rows // heads
            gl.store(lse_ptr + at, lse * LN2, mask=rows < heads * len_q)
    else:
        first = (slot.to(gl.int64) * tiles + tile) * 64
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        column = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, acc.type.layout))
        gl.store(part_ptr + (first + row)[:, None] * (2 * HALF) + column[None, :], acc)
        if GROUP == 0:
            gl.store(part_lse_ptr + first + rows, lse)


@gluon.jit
def _scores(scores, queries, block, ORDER: gl.constexpr, BEGIN: gl.constexpr, used, zero, C: gl.constexpr):
    """The products of some pieces of a block, each as soon as it is there, added to scores; or, the first of them, in their place."""
    for i in gl.static_range(len(ORDER)):
        mbarrier.wait(block[3].index(ORDER[i]), used % 2)
        if C.codes:
            fence_async_shared()  # what threads have written: for the other warpgroup too, which hears of it behind another fence
        if ORDER[i] == 4:
            q, k = queries[2].index(zero).reshape([64, 64]), block[2].index(zero).reshape([64, 64])
        else:
            q = queries[ORDER[i] // 2].index(zero).reshape([64, 256]).slice(ORDER[i] % 2 * PIECE, PIECE, 1)
            k = block[ORDER[i] // 2].index(zero).reshape([64, 256]).slice(ORDER[i] % 2 * PIECE, PIECE, 1)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=i > 0 or not BEGIN, is_async=True)
    return scores


# ---- device: the left warpgroup, of columns 0 to 255


@gluon.jit
def _left_pair(scores, acc, top, total, n, sight, length, gain, zero, even, odd, tops, C: gl.constexpr, s_layout: gl.constexpr):
    """From the even block's scores to the output that lacks the odd block's part, but is scaled as that wants it."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    left, _unused, rope = _parts(even, zero)
    weights, top, shrink, more = _weigh(scores, n, sight, top, gain, s_layout)
    _clear(left, n, length, C)
    arrive_and_wait(n * 0, LEFT_WARPS, 128)
    rope.store(weights.to(rope.dtype))
    tops[0].store(top)
    fence_async_shared()
    release(n * 0, EVEN_READY, BOTH)
    acc, total = _shrunk(acc, total, shrink)
    acc = warpgroup_mma(rope, left, acc, is_async=True)
    total += more
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(n * 0, LEFT_GONE, C.one_group)  # before the other's weights: the next keys' way is what is waited for
    release(n * 0, ROPE_GONE, C.two_groups)
    arrive_and_wait(n * 0, ODD_READY, BOTH)
    new_top = tops[1].load(row_layout)
    shrink = gl.exp2(top - base_of(new_top))
    _clear(_parts(odd, zero)[0], n + 64, length, C)
    acc, total = _shrunk(acc, total, shrink)
    return acc, new_top, total


@gluon.jit
def _left(given, C: gl.constexpr):
    queries, q_empty, even, odd, told, tops, sums, outs, sizes, gain = given
    heads, len_q, tiles, first = sizes
    q_full = queries[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = first + gl.program_id(0) % tiles
    turn, used = 0, 0
    place = next_work(told, turn)
    while place[0] >= 0:
        length, low, high = place[1], place[2], place[3]
        sight = _sight(length, tile, heads, len_q, C, row_layout)
        acc = gl.zeros([64, HALF], gl.float32, o_layout)
        top = gl.full([64], float("-inf"), gl.float32, row_layout)
        zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
        total = gl.sum(zeros.reshape([64, 8, 8]), 1)
        n = (high - 1) * PAIR

        zero = _zero(used)
        mbarrier.wait(q_full.index(0), turn % 2)
        scores = _scores(zeros, queries, even, EVEN, True, used, zero, C)
        release(used * 0, TURN, BOTH)
        scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, total = _left_pair(scores, acc, top, total, n, sight, length, gain, zero, even, odd, tops, C, s_layout)
        used += 1
        for _x in range(1, high - low):
            n -= PAIR
            zero = _zero(used)
            values, _unused, weights = _parts(odd, zero)
            acc = warpgroup_mma(weights, values, acc, is_async=True)
            zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
            scores = _scores(zeros, queries, even, FIRST, True, used, zero, C)
            acc = warpgroup_mma_wait(1, deps=[acc])
            release(used * 0, LEFT_GONE + 1, C.one_group)
            release(used * 0, ROPE_GONE + 1, C.two_groups)
            scores = _scores(scores, queries, even, OTHERS, False, used, zero, C)
            release(used * 0, TURN, BOTH)
            scores = warpgroup_mma_wait(0, deps=[scores])
            acc, top, total = _left_pair(scores, acc, top, total, n, sight, length, gain, zero, even, odd, tops, C, s_layout)
            used += 1
        mbarrier.arrive(q_empty, count=1)
        values, _unused, weights = _parts(odd, _zero(used))
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(used * 0, LEFT_GONE + 1, C.one_group)
        release(used * 0, ROPE_GONE + 1, C.two_groups)
        _finish(acc, total, top, place, tile, outs, sums, sizes, 0, row_layout)
        turn += 1
        place = next_work(told, turn)


# ---- device: the right warpgroup, of columns 256 to 511


@gluon.jit
def _right_pair(acc, top, total, n, sight, length, gain, used, queries, even, odd, tops, C: gl.constexpr, s_layout: gl.constexpr):
    """The odd block's scores, and the output that lacks the odd block's part, but is scaled as that wants it."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = _zero(used)
    _unused, right, rope = _parts(odd, zero)
    _unused, values, others = _parts(even, zero)
    arrive_and_wait(used * 0, TURN, BOTH)
    zeros = gl.zeros([64, BLOCK], gl.float32, s_layout)
    scores = _scores(zeros, queries, odd, ODD, True, used, zero, C)
    arrive_and_wait(used * 0, EVEN_READY, BOTH)
    new_top = tops[0].load(row_layout)
    acc, total = _shrunk(acc, total, gl.exp2(top - base_of(new_top)))
    _clear(values, n, length, C)
    acc = warpgroup_mma(others, values, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights, top, shrink, more = _weigh(scores, n + 64, sight, new_top, gain, s_layout)
    _clear(right, n + 64, length, C)
    arrive_and_wait(used * 0, RIGHT_WARPS, 128)
    rope.store(weights.to(rope.dtype))
    tops[1].store(top)
    fence_async_shared()
    release(used * 0, ODD_READY, BOTH)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(used * 0, RIGHT_GONE, C.one_group)
    release(used * 0, ROPE_GONE, C.two_groups)
    acc, total = _shrunk(acc, total, shrink)
    return acc, top, total + more


@gluon.jit
def _right(given, C: gl.constexpr):
    queries, q_empty, even, odd, told, tops, sums, outs, sizes, gain = given
    heads, len_q, tiles, first = sizes
    q_full = queries[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = first + gl.program_id(0) % tiles
    turn, used = 0, 0
    place = next_work(told, turn)
    while place[0] >= 0:
        length, low, high = place[1], place[2], place[3]
        sight = _sight(length, tile, heads, len_q, C, row_layout)
        acc = gl.zeros([64, HALF], gl.float32, o_layout)
        top = gl.full([64], float("-inf"), gl.float32, row_layout)
        total = gl.sum(gl.zeros([64, BLOCK], gl.float32, s_layout).reshape([64, 8, 8]), 1)
        n = (high - 1) * PAIR
        mbarrier.wait(q_full.index(0), turn % 2)
        acc, top, total = _right_pair(acc, top, total, n, sight, length, gain, used, queries, even, odd, tops, C, s_layout)
        used += 1
        for _x in range(1, high - low):
            n -= PAIR
            _unused, values, weights = _parts(odd, _zero(used))
            acc = warpgroup_mma(weights, values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            release(used * 0, RIGHT_GONE + 1, C.one_group)
            release(used * 0, ROPE_GONE + 1, C.two_groups)
            acc, top, total = _right_pair(acc, top, total, n, sight, length, gain, used, queries, even, odd, tops, C, s_layout)
            used += 1
        mbarrier.arrive(q_empty, count=1)
        _unused, values, weights = _parts(odd, _zero(used))
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(used * 0, RIGHT_GONE + 1, C.one_group)
        release(used * 0, ROPE_GONE + 1, C.two_groups)
        _finish(acc, total, top, place, tile, outs, sums, sizes, 1, row_layout)
        turn += 1
        place = next_work(told, turn)


@gluon.jit
def _block(desc, rope_desc):
    """Shared memory for 64 keys or queries, in three parts, and an mbarrier for each of five pieces."""
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for piece in gl.static_range(5):
        mbarrier.init(full.index(piece), count=1)
    left = gl.allocate_shared_memory(desc.dtype, [1, 1, 64, 256], desc.layout)
    right = gl.allocate_shared_memory(desc.dtype, [1, 1, 64, 256], desc.layout)
    return left, right, gl.allocate_shared_memory(desc.dtype, [1, 1, 64, 64], rope_desc.layout), full


@gluon.jit(do_not_specialize=["of_page", "of_slot", "batch", "shares", "tiles", "heads", "len_q", "first", "stride", "columns"])
def _decode(q_desc, q_rope_desc, k_desc, k_rope_desc, words_ptr, of_page, of_slot, lengths_ptr, table_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr,
            scale, batch, shares, tiles, heads, len_q, first, stride, columns, C: gl.constexpr):  # fmt: skip
    fetch(lengths_ptr, batch, (table_ptr, stride, columns), 4)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(q_empty, count=2)
    queries, even, odd = _block(q_desc, q_rope_desc), _block(q_desc, q_rope_desc), _block(q_desc, q_rope_desc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tops = (gl.allocate_shared_memory(gl.float32, [64], plain), gl.allocate_shared_memory(gl.float32, [64], plain))
    sums = (gl.allocate_shared_memory(gl.float32, [64], plain), gl.allocate_shared_memory(gl.float32, [64], plain))
    told = message(2)
    fence_async_shared()
    outs, sizes = (out_ptr, lse_ptr, part_ptr, part_lse_ptr), (heads, len_q, tiles, first)
    given = (queries, q_empty, even, odd, told, tops, sums, outs, sizes, scale * LOG2E)
    keys = (words_ptr, (of_page, of_slot)) if C.codes else (k_desc, k_rope_desc)
    copied = ((q_desc, q_rope_desc), keys, queries, q_empty, even, odd, told, (lengths_ptr, batch, shares), (table_ptr, stride), tiles, first)
    COPIER: gl.constexpr = 120 if C.codes else 40  # registers
    gl.warp_specialize([(_left, (given, C)), (_right, (given, C)), (copy, (copied, C))], [4, C.fillers // 32], [(504 - COPIER) // 2, COPIER])


# ---- host

LEAST = 2  # pairs of a share: a part of 64 rows is as many bytes as the keys of one pair


def configs(p: Attention, device: Device) -> list[Grid]:
    """As many shares of the keys as multiprocessors hold programs for all tiles of rows, of LEAST pairs or more. Of more tiles than multiprocessors, if some
    are left to others, a launch has no more than those that are not."""
    sms = programs_of(device)
    tiles = triton.cdiv(p.len_q * p.heads, 64)
    most = triton.cdiv(p.batch * triton.cdiv(p.len_k, 128), LEAST)
    return [Grid(max(1, min(sms // tiles, most)), tiles, tiles if sms == device.sms else min(tiles, sms))]


def _described(k, page: int) -> tuple:
    """Keys in half precision, as the copy engine takes them."""
    k, rows = for_tma(k, "hopper_mla").squeeze(2), min(64, page)
    return describe(k, rows, int(PIECE)), describe(k, rows, 64), None, 0, 0


def _words(packed) -> tuple:
    """Keys in e4m3, as threads read them: words, and in 16 bytes how far pages and slots lie apart."""
    packed = for_tma(packed, "hopper_mla_codes").squeeze(2)
    return None, None, packed.view(torch.int32), packed.stride(0) // 16, packed.stride(1) // 16


def launch(p: Attention, grid: Grid, q, cache, x: Operands, return_lse: bool):
    """q `[batch, len_q, heads, 576]` over a PagedKV whose values are the first 512 columns of its keys. Lengths are read on the device. What TMA does
    not take is copied first, pages with a warning."""
    scale = x.scale
    out = q.new_empty(p.batch, p.len_q, p.heads, 512)
    lse = q.new_empty(p.batch, p.heads, p.len_q, dtype=torch.float32) if return_lse else None
    if out.numel() == 0 or p.len_k == 0:
        out.zero_()
        return (out, lse.fill_(-torch.inf)) if return_lse else out
    if scale <= 0:  # the kernel takes the largest score before it scales
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    q = q.reshape(p.batch, p.len_q * p.heads, 576)
    if q.stride(-1) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16 or 0 in q.stride():
        q = q.clone(memory_format=torch.contiguous_format)
    codes = p.op == "latent"
    keys = _words(cache.k) if codes else _described(cache.k, p.page)
    shape = Shape(p.len_q > 1 and p.mask.right is not None, p.page, codes)
    parts, sizes = parts_of(q, p.batch, grid.shares, grid.tiles), (p.batch, grid.shares, grid.tiles, p.heads, p.len_q)
    table = cache.page_table
    for first in range(0, grid.tiles, grid.at_once):
        _decode[(grid.shares * min(grid.at_once, grid.tiles - first),)](
            describe(q, 64, 256), describe(q, 64, 64), *keys, cache.lengths, table,
            out, lse, *parts, scale, *sizes, first, table.stride(0), table.shape[1], C=shape, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    if grid.shares > 1:
        merge(parts, out, lse, cache.lengths, sizes)
    return (out, lse) if return_lse else out
