"""Gradients of attention on Hopper in CuTe DSL: a tile of keys stays, past which all queries stream; five products, warp-specialised.

    S^T = K Q^T    P^T = exp(S^T - LSE)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dK += dS^T Q    dQ^T += K^T dS^T
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from onchip.core.device import Device
from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.statistics import finish_pieces, sink_gradient, statistics
from onchip.kernels.attention.tile import describable, ends
from onchip.kernels.cutlass import (
    COLUMNS,
    DTYPES,
    ROWS,
    Compiled,
    as_left,
    bulk_add,
    bulk_load,
    expect,
    halved,
    let_go,
    matrix_store,
    multiply,
    operands,
    products,
    sums,
    swizzled,
    tiles_in,
    turned,
)

LOG2E = 1.4426950408889634
WRITTEN, ROOM, SENT = 1, 2, 4  # hardware barriers: dS lies in shared memory; of each warpgroup, its buffer is free; something lies in it
GROUPS = 2
COMPUTING = 128 * GROUPS


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for."""

    dtype: object
    m: int
    n: int
    dim: int
    stages: int
    left: int
    right: int
    top_left: bool
    late: bool = False

    @property
    def width(self):
        """Columns of a tile; those past the head's own are 0."""
        return 64 if self.dim <= 64 else 128


class Backward:
    def __init__(self, shape: Shape):
        self.c = shape
        self.buffers = 2

    @cute.jit
    def __call__(self, q_ptr: cute.Pointer, k_ptr: cute.Pointer, v_ptr: cute.Pointer, do_ptr: cute.Pointer, lse_ptr: cute.Pointer, delta_ptr: cute.Pointer,
                 dq_ptr: cute.Pointer, dk_ptr: cute.Pointer, dv_ptr: cute.Pointer,
                 batch: Int32, len_q: Int32, len_k: Int32, kv_heads: Int32, group: Int32, pitch: Int32,
                 q_strides: tuple[Int64, Int64, Int64], k_strides: tuple[Int64, Int64, Int64], v_strides: tuple[Int64, Int64, Int64],
                 do_strides: tuple[Int64, Int64, Int64], dk_strides: tuple[Int64, Int64, Int64], dv_strides: tuple[Int64, Int64, Int64],
                 scale: Float32, stream: driver.CUstream):  # fmt: skip
        c = self.c
        heads = kv_heads * group

        def tensor(ptr, length, heads, strides):
            b, h, s = (cute.assume(x, divby=8) for x in strides)
            return cute.make_tensor(ptr, cute.make_layout((length, c.dim, heads, batch), stride=(s, 1, h, b)))

        queries, keys = swizzled((c.m, c.width), c.dtype), swizzled((c.n, c.width), c.dtype)
        half = swizzled((c.n // GROUPS, c.width), c.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q = cpasync.make_tiled_tma_atom(load, tensor(q_ptr, len_q, heads, q_strides), queries, (c.m, c.width))
        do = cpasync.make_tiled_tma_atom(load, tensor(do_ptr, len_q, heads, do_strides), queries, (c.m, c.width))
        k = cpasync.make_tiled_tma_atom(load, tensor(k_ptr, len_k, kv_heads, k_strides), keys, (c.n, c.width))
        v = cpasync.make_tiled_tma_atom(load, tensor(v_ptr, len_k, kv_heads, v_strides), keys, (c.n, c.width))
        dk = cpasync.make_tiled_tma_atom(store, tensor(dk_ptr, len_k, kv_heads, dk_strides), half, (c.n // GROUPS, c.width))
        dv = cpasync.make_tiled_tma_atom(store, tensor(dv_ptr, len_k, kv_heads, dv_strides), half, (c.n // GROUPS, c.width))
        sizes = (len_q, len_k, kv_heads, group, pitch)
        self.kernel(*q, *do, *k, *v, *dk, *dv, lse_ptr, delta_ptr, dq_ptr, sizes, scale).launch(
            grid=[cute.ceil_div(len_k, c.n), kv_heads, batch], block=[384, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, q_atom: cute.CopyAtom, q: cute.Tensor, do_atom: cute.CopyAtom, do: cute.Tensor, k_atom: cute.CopyAtom, k: cute.Tensor,
               v_atom: cute.CopyAtom, v: cute.Tensor, dk_atom: cute.CopyAtom, dk: cute.Tensor, dv_atom: cute.CopyAtom, dv: cute.Tensor,
               lse: cute.Pointer, delta: cute.Pointer, dq: cute.Pointer, sizes: tuple[Int32, Int32, Int32, Int32, Int32], scale: Float32):  # fmt: skip
        c = self.c
        memory = cutlass.utils.SmemAllocator()

        def tile(shape):
            layout = swizzled(shape, c.dtype)
            return memory.allocate_tensor(c.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        s_q, s_do = tile((c.m, c.width, c.stages)), tile((c.m, c.width, c.stages))
        s_k, s_v = tile((c.n, c.width)), tile((c.n, c.width))
        s_ds = tile((c.m, c.n, self.buffers))
        piece = c.m * c.width // GROUPS
        s_dq = memory.allocate_tensor(Float32, cute.make_layout((piece, GROUPS)), byte_alignment=1024)
        s_lse = memory.allocate_tensor(Float32, cute.make_layout((c.m, c.stages)), byte_alignment=128)
        s_delta = memory.allocate_tensor(Float32, cute.make_layout((c.m, c.stages)), byte_alignment=128)
        bars = memory.allocate_array(Int64, 4 * c.stages + 2)
        q_full, q_empty, do_full, do_empty = (bars + i * c.stages for i in range(4))
        k_full, v_full = bars + 4 * c.stages, bars + 4 * c.stages + 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (q_atom, do_atom, k_atom, v_atom, dk_atom, dv_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(do_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, COMPUTING // 32)
                    cute.arch.mbarrier_init(do_empty + i, COMPUTING // 32)
                cute.arch.mbarrier_init(k_full, 1)
                cute.arch.mbarrier_init(v_full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        still, rings = (s_k, s_v, k_full, v_full), (s_q, s_do, s_lse, s_delta, q_full, q_empty, do_full, do_empty)
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.copy((q_atom, q, do_atom, do, k_atom, k, v_atom, v), lse, delta, still, rings, sizes)
            if warp == 1 or warp == 2:
                self.send((dk_atom, dk, dv_atom, dv), dq, s_dq, sizes, warp - 1)
        else:
            cute.arch.setmaxregister_increase(240)
            self.compute(still, rings, s_ds, s_dq, sizes, scale)

    # ---- device: what there is to do

    @cute.jit
    def place(self, sizes):
        """The key tile, key head and sequence of this program, and its query tiles: [first, last)."""
        c = self.c
        len_q, len_k, kv_heads, group, pitch = sizes
        tile, kv_head, b = cute.arch.block_idx()
        shift = self.shift(sizes)
        first = Int32(0)
        last = cute.ceil_div(len_q, c.m)
        if const_expr(c.right >= 0):
            first = cutlass.max(tile * c.n - c.right - shift, 0) // c.m
        if const_expr(c.left >= 0):
            last = cutlass.min(last, cute.ceil_div(cutlass.max(tile * c.n + c.n + c.left - shift, 0), c.m))
        return tile, kv_head, b, first, last

    def shift(self, sizes):
        """The key that query 0 is at."""
        return Int32(0) if self.c.top_left else sizes[1] - sizes[0]

    # ---- device: the copying warp

    @cute.jit
    def copy(self, tensors, lse, delta, still, rings, sizes):
        c = self.c
        q_atom, q, do_atom, do, k_atom, k, v_atom, v = tensors
        s_k, s_v, k_full, v_full = still
        s_q, s_do, s_lse, s_delta, q_full, q_empty, do_full, do_empty = rings
        len_q, len_k, kv_heads, group, pitch = sizes
        tile, kv_head, b, first, last = self.place(sizes)
        k_to, k_from = tiles_in(k_atom, s_k, cute.local_tile(k[None, None, kv_head, b], (c.n, c.width), (tile, 0)))
        v_to, v_from = tiles_in(v_atom, s_v, cute.local_tile(v[None, None, kv_head, b], (c.n, c.width), (tile, 0)))
        query_bytes, key_bytes, row_bytes = c.m * c.width * 2, c.n * c.width * 2, c.m * 4
        expect(k_full, key_bytes)
        cute.copy(k_atom, k_from, k_to, tma_bar_ptr=k_full)
        expect(v_full, key_bytes)
        cute.copy(v_atom, v_from, v_to, tma_bar_ptr=v_full)
        step = Int32(0)
        for member in cutlass.range(group, unroll=1):
            head = kv_head * group + member
            q_to, q_from = tiles_in(q_atom, s_q, cute.local_tile(q[None, None, head, b], (c.m, c.width), (None, 0)))
            do_to, do_from = tiles_in(do_atom, s_do, cute.local_tile(do[None, None, head, b], (c.m, c.width), (None, 0)))
            row = cute.assume(Int64(b * kv_heads * group + head) * pitch, divby=4)
            for m in cutlass.range(first, last, unroll=1):
                at, phase = step % c.stages, (step // c.stages) % 2
                cute.arch.mbarrier_wait(q_empty + at, phase ^ 1)
                expect(q_full + at, query_bytes + row_bytes)
                cute.copy(q_atom, q_from[None, m], q_to[None, at], tma_bar_ptr=q_full + at)
                bulk_load(s_lse[None, at].iterator, lse + row + m * c.m, row_bytes, q_full + at)
                cute.arch.mbarrier_wait(do_empty + at, phase ^ 1)
                expect(do_full + at, query_bytes + row_bytes)
                cute.copy(do_atom, do_from[None, m], do_to[None, at], tma_bar_ptr=do_full + at)
                bulk_load(s_delta[None, at].iterator, delta + row + m * c.m, row_bytes, do_full + at)
                step += 1

    # ---- device: the sending warps, one for each warpgroup

    @cute.jit
    def send(self, tensors, dq, s_dq, sizes, side):
        c = self.c
        dk_atom, dk, dv_atom, dv = tensors
        len_q, len_k, kv_heads, group, pitch = sizes
        tile, kv_head, b, first, last = self.place(sizes)
        piece = c.m * c.width // GROUPS
        mine = s_dq[None, side].iterator
        for member in cutlass.range(group, unroll=1):
            head = b * kv_heads * group + kv_head * group + member
            begin = cute.assume(self.piece_of(head, side, pitch), divby=512)
            for m in cutlass.range(first, last, unroll=1):
                self.make_room(side)
                bulk_add(dq + begin + m * self.advance, mine, piece * 4)
                cute.arch.cp_async_bulk_commit_group()
        layout = swizzled((c.n // GROUPS, c.width), c.dtype)
        out = cute.make_tensor(cute.recast_ptr(mine, layout.inner, dtype=c.dtype), layout.outer)
        for atom, there in ((dv_atom, dv), (dk_atom, dk)):
            to = cute.local_tile(there[None, None, kv_head, b], (c.n // GROUPS, c.width), (tile * GROUPS + side, 0))
            held, to = tiles_in(atom, out, to)
            self.make_room(side)
            cute.copy(atom, held, to)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def make_room(self, side):
        """Once what was in a warpgroup's buffer has left, tell it so; wait until something else is in it."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier_arrive(barrier_id=ROOM + side, number_of_threads=160)
        cute.arch.barrier(barrier_id=SENT + side, number_of_threads=160)

    @property
    def advance(self):
        """Floats from one query tile's piece of dQ to the next."""
        return self.c.m * 64

    def piece_of(self, head, side, pitch):
        """Where a warpgroup's pieces of dQ begin: half of the columns each, or, of a head of 64, half of the rows of each tile."""
        if self.c.width == 64:
            return Int64(head) * (pitch * 64) + side * (self.c.m * 32)
        return (Int64(head) * GROUPS + side) * (pitch * 64)

    # ---- device: a computing warpgroup

    @cute.jit
    def compute(self, still, rings, s_ds, s_dq, sizes, scale):
        c = self.c
        s_k, s_v, k_full, v_full = still
        s_q, s_do, s_lse, s_delta, q_full, q_empty, do_full, do_empty = rings
        len_q, len_k, kv_heads, group, pitch = sizes
        tile, kv_head, b, first, last = self.place(sizes)
        thread = cute.arch.thread_idx()[0] - 128
        side = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        lane = thread % 32
        of_scores = products(c.dtype, ROWS, ROWS, (GROUPS, 1), c.m)
        of_keys = products(c.dtype, ROWS, COLUMNS, (GROUPS, 1), c.width, registers=True)
        wide = c.width > 64
        of_queries = products(c.dtype, COLUMNS, ROWS, (GROUPS, 1) if wide else (1, GROUPS), c.m if wide else c.m // GROUPS)
        k_left, q_right = operands(of_scores, side, s_k, s_q)
        v_left, do_right = operands(of_scores, side, s_v, s_do)
        _, q_turned = operands(of_keys, side, None, turned(s_q))
        _, do_turned = operands(of_keys, side, None, turned(s_do))
        k_turned, ds_right = operands(of_queries, side, turned(s_k), s_ds)
        # a warpgroup's own 64 rows
        one_of_scores, one_of_keys = products(c.dtype, ROWS, ROWS, (1, 1), c.m), products(c.dtype, ROWS, COLUMNS, (1, 1), c.width)
        ds_mine = cute.local_tile(turned(s_ds), (64, c.m, self.buffers), (side, 0, 0))
        store_ds = matrix_store(one_of_scores, ds_mine, thread, c.dtype, transpose=True)
        mine = s_dq[None, side].iterator
        dq_mine = cute.make_tensor(mine + thread * 4, cute.make_layout((4, c.m * c.width // 1024), stride=(1, 512)))
        layout = swizzled((64, c.width), c.dtype)
        out_mine = cute.make_tensor(cute.recast_ptr(mine, layout.inner, dtype=c.dtype), layout.outer)
        store_out = matrix_store(one_of_keys, out_mine, thread, c.dtype, transpose=False)
        # a thread's places in a tile of scores: two keys, and of each eight queries two
        key = tile * c.n + side * 64 + thread // 32 * 16 + lane // 4
        query = lane % 4 * 2
        dk, dv = sums(of_keys, (c.n, c.width)), sums(of_keys, (c.n, c.width))
        dk.fill(0.0)
        dv.fill(0.0)
        cute.arch.mbarrier_wait(k_full, 0)
        cute.arch.mbarrier_wait(v_full, 0)
        step = Int32(0)
        for _ in cutlass.range(group, unroll=1):
            for m in cutlass.range(first, last, unroll=1):
                at, phase = step % c.stages, (step // c.stages) % 2
                buffer = step % self.buffers
                cute.arch.mbarrier_wait(q_full + at, phase)
                s, dp = sums(of_scores, (c.n, c.m)), sums(of_scores, (c.n, c.m))
                multiply(of_scores, s, k_left, q_right[None, None, None, at], True)
                cute.arch.mbarrier_wait(do_full + at, phase)
                multiply(of_scores, dp, v_left, do_right[None, None, None, at], True)
                warpgroup.wait_group(1)
                lse = self.of_queries(s_lse, at, query)
                for i in cutlass.range_constexpr(cute.size(s)):
                    s[i] = cute.math.exp2(s[i] * (scale * LOG2E) - lse[i // 4 * 2 + i % 2], fastmath=True)
                self.hide(s, m, tile, key, query, sizes)
                warpgroup.wait_group(0)
                delta = self.of_queries(s_delta, at, query)
                for i in cutlass.range_constexpr(cute.size(s)):
                    dp[i] = s[i] * (dp[i] - delta[i // 4 * 2 + i % 2])
                p, ds = halved(s, c.dtype), halved(dp, c.dtype)
                store_ds(ds, buffer)
                multiply(of_keys, dv, as_left(p), do_turned[None, None, None, at], False)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=WRITTEN, number_of_threads=COMPUTING)
                dq = sums(of_queries, (c.width, c.m))
                multiply(of_queries, dq, k_turned, ds_right[None, None, None, buffer], True)
                warpgroup.wait_group(1)
                let_go(do_empty + at, lane == 0)
                multiply(of_keys, dk, as_left(ds), q_turned[None, None, None, at], False)
                warpgroup.wait_group(1)
                cute.arch.barrier(barrier_id=ROOM + side, number_of_threads=160)
                cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(dq_mine.shape)), dq_mine)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier_arrive(barrier_id=SENT + side, number_of_threads=160)
                warpgroup.wait_group(0)
                let_go(q_empty + at, lane == 0)
                step += 1
        for i in cutlass.range_constexpr(cute.size(dk)):
            dk[i] = dk[i] * scale
        for grad in (dv, dk):
            cute.arch.barrier(barrier_id=ROOM + side, number_of_threads=160)
            store_out(halved(grad, c.dtype))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier_arrive(barrier_id=SENT + side, number_of_threads=160)

    @cute.jit
    def of_queries(self, values, at, query):
        """What is known of a thread's queries, in order: [2 * m / 8]."""
        there = cute.make_tensor(values[None, at].iterator + query, cute.make_layout((2, self.c.m // 8), stride=(1, 8)))
        out = cute.make_rmem_tensor((2, self.c.m // 8), Float32)
        cute.autovec_copy(there, out)
        return out

    @cute.jit
    def hide(self, p, m, tile, key, query, sizes):
        """Weights that the mask hides are 0. A tile that shows all is left alone."""
        c = self.c
        len_q, len_k, kv_heads, group, pitch = sizes
        shift = self.shift(sizes)
        n_last = tile * c.n + c.n - 1
        edge = n_last >= len_k
        if const_expr(c.right >= 0):
            edge = edge | (n_last > m * c.m + shift + c.right)
        if const_expr(c.left >= 0):
            edge = edge | (tile * c.n < m * c.m + c.m - 1 + shift - c.left)
        if edge:
            for r in cutlass.range_constexpr(2):
                j = key + 8 * r
                low, high = Int32(0), Int32(c.m)
                if const_expr(c.right >= 0):
                    low = j - shift - c.right - m * c.m - query
                if const_expr(c.left >= 0):
                    high = j - shift + c.left - m * c.m - query
                if j >= len_k:
                    high = Int32(-1)
                for i in cutlass.range_constexpr(cute.size(p) // 4):
                    for x in cutlass.range_constexpr(2):
                        here = 4 * i + 2 * r + x
                        column = 8 * i + x
                        seen = column <= high
                        if const_expr(c.right >= 0):
                            seen = seen & (column >= low)
                        p[here] = p[here] if seen else Float32(0.0)


# ---- host

POINTERS = 9


class Tiles(NamedTuple):
    """Queries and keys a tile, query tiles in flight."""

    m: int
    n: int
    stages: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, {GROUPS} warpgroups, {self.stages} stages"


def configs(p: Attention, device: Device) -> list[Tiles]:
    if p.dim <= 64:
        return [Tiles(128, 128, 2)]
    even = isinstance(p.mask, Band) and p.mask.left is None and p.mask.right is None
    return [Tiles(80, 128, 2), Tiles(64, 128, 2)][:: 1 if even else -1]


@functools.lru_cache(maxsize=None)
def compiled(shape: Shape) -> Compiled:
    half, single = ("pointer", shape.dtype, 16), ("pointer", Float32, 16)
    return Compiled(Backward(shape), (half, half, half, half, single, single, single, half, half, *(Int32,) * 6, *((Int64,) * 3,) * 6, Float32))


def launch(p: Attention, tiles: Tiles, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `p`, `x`; as `reference.backward` returns them."""
    assert x.q_offsets is None, "packed batches come later"
    new = torch.zeros if 0 in (q.numel(), k.numel()) else torch.empty
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta = None
    if q.numel():
        lead = [t.transpose(1, 2) for t in (q, k, v, d_out, out, dq, dk, dv)]  # [batch, heads, len, dim]
        lead = [t if describable(t) else t.contiguous() for t in lead[:4]] + lead[4:]
        delta, lses = statistics(p, lead[4], lead[3], lse, d_lse, LOG2E, tiles.m)
        if k.numel():
            _over(p, tiles, lead, lses, delta, x)
    d_sinks = None
    if x.sinks is not None:  # d LSE / d sink = exp(sink - LSE), and a growing LSE shrinks every weight: delta carries both
        d_sinks = torch.zeros_like(x.sinks) if delta is None else sink_gradient(x.sinks, lse, delta[:, : len(x.sinks), : lse.shape[-1]])
    return dq, dk, dv, d_sinks, (None,) * len(x.score)


def _over(p: Attention, tiles: Tiles, lead, lses, delta, x: Operands) -> None:
    q, k, v, d_out, _, dq, dk, dv = lead
    left, right, top_left = ends(p.mask)
    shape = Shape(DTYPES[q.dtype], tiles.m, tiles.n, p.dim, tiles.stages, left, right, top_left)
    pitch = lses.shape[-1]
    held = torch.zeros(p.batch * p.heads, pitch * shape.width, dtype=torch.float32, device=q.device)
    strides = [s for t in (q, k, v, d_out, dk, dv) for s in t.stride()[:3]]
    compiled(shape)(
        *(t.data_ptr() for t in (q, k, v, d_out, lses, delta, held, dk, dv)), p.batch, p.len_q, p.len_k, p.kv_heads, p.group, pitch, *strides, x.scale
    )
    finish_pieces(held, dq, x.scale)
