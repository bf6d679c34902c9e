"""Gradients of attention on Hopper in CuTe DSL, with tiles that Gluon cannot say: 80 queries past 128 keys that stay; five products, warp-specialised.

    S^T = K Q^T    P^T = exp(S^T - LSE)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dK += dS^T Q    dQ^T += K^T dS^T

One warp copies (TMA): K and V once, Q with LSE and dO with delta round two rings of two. Two warpgroups compute, 64 keys each; P^T and dS^T are left operands
in registers. dS goes through shared memory too, [queries, keys], and of it each warpgroup makes half of dQ^T, turned so that queries are columns, of which
there may be any multiple of 16. Two more warps send what the warpgroups leave in a buffer: dQ, added to float32 sums in any order, then dV and dK.
A step of 80 x 128 at d128 keeps the tensor cores busy for 3,200 cycles and shared memory for 2,790. Sums of dQ are in the order of the threads that make them,
so that 16 bytes a thread go in and out without bank conflicts. Nothing clears them: the first part of a tile is stored, the others are added when it is there.
What a score adds by the distance between query and key (`pairs.laid_out`: a table's, ALiBi's) its sums begin with. A bias of each query and key has no memory
of its own: a tile of it (TMA) lies where dS will, from when both warpgroups have made dQ of what was there until its threads have read it.
A kernel before makes delta, one after rounds dQ (`cutlass_backward_ends`), all in one call, and in several calls where the sums of all heads would take much
memory (`statistics.shares`).
"""

import threading
from typing import NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from onchip.core.device import Device
from onchip.core.problem import Attention, Operands
from onchip.kernels.again import refuse
from onchip.kernels.attention import texts
from onchip.kernels.attention.cutlass_backward_ends import AFTER, BEFORE, finish, prepare
from onchip.kernels.attention.cutlass_backward_ends import ROWS as ROWS_OF_A_BLOCK
from onchip.kernels.attention.cutlass_backward_steps import COMPUTING, GROUPS, ROOM, SENDING, SENT, Computing
from onchip.kernels.attention.cutlass_backward_tiles import (
    LOG2E,
    Message,
    Ring,
    Shape,
    Still,
    ask_for,
    bias_at,
    bundle_of,
    distances_at,
    hear,
    locate,
    passes_of,
    row_of,
    rows_of,
    statistics_of,
    steps_of,
    tell,
    tensor_of,
    tile_of,
)
from onchip.kernels.attention.hopper_tiles import key_heads_together, order_of_keys, programs_of
from onchip.kernels.attention.pairs import laid_out, pair_view
from onchip.kernels.attention.statistics import shares, sink_gradient, statistics
from onchip.kernels.attention.tile import ends, for_tma
from onchip.kernels.attention.tile_lists import sequence_tiles
from onchip.kernels.cutlass import (
    DTYPES,
    Compiled,
    bulk_give,
    bulk_load,
    draw,
    expect,
    glance,
    swizzled,
    tiles_in,
)

EVICT_FIRST = 0x12F0000000000000  # the policy of L2 for what is read once, as `createpolicy.fractional.L2::evict_first` encodes it


class Backward(Computing):
    """The kernel for a Shape. Its arguments: `ARGUMENTS`."""

    @cute.jit
    def __call__(self, q_ptr: cute.Pointer, k_ptr: cute.Pointer, v_ptr: cute.Pointer, out_ptr: cute.Pointer, do_ptr: cute.Pointer,
                 dq_ptr: cute.Pointer, dk_ptr: cute.Pointer, dv_ptr: cute.Pointer, lse: cute.Pointer, d_lse: cute.Pointer,
                 sums: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
                 lists: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
                 q_strides: tuple[Int64, Int64, Int64], k_strides: tuple[Int64, Int64, Int64], v_strides: tuple[Int64, Int64, Int64],
                 out_strides: tuple[Int64, Int64, Int64], do_strides: tuple[Int64, Int64, Int64], dq_strides: tuple[Int64, Int64, Int64],
                 dk_strides: tuple[Int64, Int64, Int64], dv_strides: tuple[Int64, Int64, Int64],
                 sizes: tuple[Int32, Int32, Int32, Int32, Int32, Int32, Int32, Int32, Int32], rows: Int32, programs: Int32, scale: Float32, cap: Float32,
                 far: tuple[cute.Pointer, Int64, Int64], bias: tuple[cute.Pointer, Int64, Int64, Int64, Int32, Int32, Int32],
                 stream: driver.CUstream):  # fmt: skip
        c = self.c
        _, _, _, batch, kv_heads, group, len_q, len_k, pitch = sizes
        heads = kv_heads * group
        queries, keys, half = (swizzled((rows, c.width), c.dtype) for rows in (c.m, c.n, c.n // GROUPS))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q = cpasync.make_tiled_tma_atom(load, tensor_of(c, q_ptr, len_q, heads, batch, q_strides), queries, (c.m, c.width))
        do = cpasync.make_tiled_tma_atom(load, tensor_of(c, do_ptr, len_q, heads, batch, do_strides), queries, (c.m, c.width))
        k = cpasync.make_tiled_tma_atom(load, tensor_of(c, k_ptr, len_k, kv_heads, batch, k_strides), keys, (c.n, c.width))
        v = cpasync.make_tiled_tma_atom(load, tensor_of(c, v_ptr, len_k, kv_heads, batch, v_strides), keys, (c.n, c.width))
        dk = cpasync.make_tiled_tma_atom(store, tensor_of(c, dk_ptr, len_k, kv_heads, batch, dk_strides), half, (c.n // GROUPS, c.width))
        dv = cpasync.make_tiled_tma_atom(store, tensor_of(c, dv_ptr, len_k, kv_heads, batch, dv_strides), half, (c.n // GROUPS, c.width))
        _, q_offsets, _, q_used, _ = lists
        lse2, delta, dq, given, counter = sums
        ends = batch, heads, rows, pitch, len_q
        blocks = [cute.ceil_div(pitch, ROWS_OF_A_BLOCK) * heads, 1, 1 if const_expr(c.packed) else batch]
        prepare(out_ptr, out_strides, do_ptr, do_strides, lse, d_lse, lse2, delta, given, counter, q_offsets, q_used, ends, c).launch(
            grid=blocks, block=[BEFORE, 1, 1], stream=stream
        )
        factors = (scale / cap, cap * LOG2E) if const_expr(c.capped) else (scale * LOG2E, cap)  # of scores, and of a tanh
        added = q
        if const_expr(c.biased):
            ptr, of_sequence, of_head, of_row, sequences, members, rows = bias
            of_sequence, of_head, of_row = (cute.assume(x, divby=8) for x in (of_sequence, of_head, of_row))
            there = cute.make_tensor(ptr, cute.make_layout((rows, len_k, members, sequences), stride=(of_row, 1, of_head, of_sequence)))
            added = cpasync.make_tiled_tma_atom(load, there, swizzled((c.m, c.n), c.dtype), (c.m, c.n))
        self.kernel(*q, *do, *k, *v, *dk, *dv, *added, sums, lists, sizes, scale, factors, far).launch(
            grid=[programs, 1, 1], block=[128 + COMPUTING, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )
        finish(dq, given, dq_ptr, dq_strides, q_offsets, q_used, ends, scale, c).launch(grid=blocks, block=[AFTER, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, q_atom: cute.CopyAtom, q: cute.Tensor, do_atom: cute.CopyAtom, do: cute.Tensor, k_atom: cute.CopyAtom, k: cute.Tensor,
               v_atom: cute.CopyAtom, v: cute.Tensor, dk_atom: cute.CopyAtom, dk: cute.Tensor, dv_atom: cute.CopyAtom, dv: cute.Tensor,
               bias_atom: cute.CopyAtom, bias: cute.Tensor, sums: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
               lists: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
               sizes: tuple[Int32, Int32, Int32, Int32, Int32, Int32, Int32, Int32, Int32], scale: Float32, factors: tuple[Float32, Float32],
               far: tuple[cute.Pointer, Int64, Int64]):  # fmt: skip
        c = self.c
        memory = cutlass.utils.SmemAllocator()

        def tile(shape):
            layout = swizzled(shape, c.dtype)
            return memory.allocate_tensor(c.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        def numbers(*shape, dtype=Float32):
            return memory.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=128)

        q_tiles, do_tiles, k_tile, v_tile = (tile(shape) for shape in ((c.m, c.width, c.stages),) * 2 + ((c.n, c.width),) * 2)
        s_ds = tile((c.m, c.n, 2))
        s_dq = memory.allocate_tensor(Float32, cute.make_layout((self.piece, c.slots, GROUPS)), byte_alignment=1024)
        lses, deltas, told = numbers(c.m, c.stages), numbers(c.m, c.stages), numbers(8, 2, dtype=Int32)
        once, warps = [(c.stages, 1), (c.stages, 1), (1, 1), (1, 1), (2, 1), (2, 1)], COMPUTING // 32
        counts = [*once, (c.stages, warps), (c.stages, warps), (1, warps), (2, warps + GROUPS), (1, warps)]
        bars = memory.allocate_array(Int64, sum(n for n, _ in counts))
        places = [bars + sum(n for n, _ in counts[:i]) for i in range(len(counts))]
        q_full, do_full, k_full, v_full, told_full, bias_full, q_empty, do_empty, still_empty, told_empty, bias_empty = places
        q_ring, do_ring = Ring(q_tiles, lses, q_full, q_empty), Ring(do_tiles, deltas, do_full, do_empty)
        bias_ring = Ring(s_ds, None, bias_full, bias_empty)  # where dS of a step will lie, its bias lies before
        still, message = Still(k_tile, v_tile, k_full, v_full, still_empty), Message(told, told_full, told_empty)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (q_atom, do_atom, k_atom, v_atom, dk_atom, dv_atom, *((bias_atom,) if c.biased else ())):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for place, (n, count) in zip(places, counts, strict=True):
                    for i in cutlass.range_constexpr(n):
                        cute.arch.mbarrier_init(place + i, count)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.copy((q_atom, q, do_atom, do, k_atom, k, v_atom, v, bias_atom, bias), sums, lists, sizes, still, q_ring, do_ring, bias_ring, message, far)
            if (warp == 1) | (warp == 2):
                self.send((dk_atom, dk, dv_atom, dv), sums[2], sums[3], sizes, s_dq, message, warp - 1)
        else:
            cute.arch.setmaxregister_increase(240)
            self.compute(sizes, still, q_ring, do_ring, bias_ring, s_dq, message, scale, factors, far)

    # ---- device: the copying warp

    @cute.jit
    def copy(self, tensors, sums, lists, sizes, still, q_ring, do_ring, bias_ring, message, far):
        c = self.c
        q_atom, q, do_atom, do, k_atom, k, v_atom, v, bias_atom, bias = tensors
        lse, delta, _, _, counter = sums
        tiles, _, _, _, kv_heads, group, _, _, pitch = sizes
        query_bytes, key_bytes, row_bytes = c.m * c.width * 2, c.n * c.width * 2, c.m * 4
        number, turn, step, taken = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
        while number < tiles:
            tile, kv_head, b, start_q, len_q, start_k, len_k = locate(c, number, sizes, lists)
            if b >= 0:
                tell(c, message, turn, (tile, kv_head, b, start_q, len_q, start_k, len_k))
                turn += 1
                steps = steps_of(c, tile, len_q, len_k, bundle_of(c, b, kv_head, sizes))
                count = steps[2] + steps[3]
                k_to, k_from = tiles_in(k_atom, still.k, cute.local_tile(rows_of(c, k, kv_head, b, start_k, len_k), (c.n, c.width), (tile, 0)))
                v_to, v_from = tiles_in(v_atom, still.v, cute.local_tile(rows_of(c, v, kv_head, b, start_k, len_k), (c.n, c.width), (tile, 0)))
                row = row_of(c, b, start_q)
                passes, each = passes_of(c, group)
                for past in cutlass.range(passes, unroll=1):
                    for y in cutlass.range(count * each, unroll=1):
                        member, x = past, y
                        if const_expr(c.abreast):
                            member, x = y % each, y // each
                        head, m = kv_head * group + member, tile_of(c, x, steps)
                        if const_expr(c.far):
                            ask_for(c, distances_at(c, far, b, head, len_k, m * c.m - (tile + 1) * c.n))
                        if const_expr(c.biased):
                            bias_to, bias_from = tiles_in(bias_atom, bias_ring.tiles, cute.local_tile(bias_at(bias, head, b), (c.m, c.n), (None, tile)))
                            bias_from = bias_from[None, cutlass.min(m, (bias.shape[0] - 1) // c.m)]
                            with cute.arch.elect_one():  # it is made by every lane else
                                cute.prefetch(bias_atom, bias_from)
                        q_to, q_from = tiles_in(q_atom, q_ring.tiles, cute.local_tile(rows_of(c, q, head, b, start_q, len_q), (c.m, c.width), (None, 0)))
                        do_to, do_from = tiles_in(do_atom, do_ring.tiles, cute.local_tile(rows_of(c, do, head, b, start_q, len_q), (c.m, c.width), (None, 0)))
                        begin = cute.assume(statistics_of(c, b, head, kv_heads * group, pitch) + row, divby=4)
                        at, phase = step % c.stages, step // c.stages % 2
                        cute.arch.mbarrier_wait(q_ring.empty + at, phase ^ 1)
                        expect(q_ring.full + at, query_bytes + row_bytes)
                        cute.copy(q_atom, q_from[None, m], q_to[None, at], tma_bar_ptr=q_ring.full + at)
                        bulk_load(q_ring.rows[None, at].iterator, lse + begin + m * c.m, row_bytes, q_ring.full + at)
                        if (past == 0) & (y == 0):  # the tile before is still in use, but its rings are not
                            cute.arch.mbarrier_wait(still.empty, taken % 2 ^ 1)
                            expect(still.k_full, key_bytes)
                            cute.copy(k_atom, k_from, k_to, tma_bar_ptr=still.k_full)
                            expect(still.v_full, key_bytes)
                            cute.copy(v_atom, v_from, v_to, tma_bar_ptr=still.v_full)
                        cute.arch.mbarrier_wait(do_ring.empty + at, phase ^ 1)
                        expect(do_ring.full + at, query_bytes + row_bytes)
                        cute.copy(do_atom, do_from[None, m], do_to[None, at], tma_bar_ptr=do_ring.full + at)
                        bulk_load(do_ring.rows[None, at].iterator, delta + begin + m * c.m, row_bytes, do_ring.full + at)
                        if const_expr(c.biased):  # where dS of the step before the last one was, of which dQ is made in the last one
                            beat = step + taken  # (a first step has waited for `still`, and so for the beat before: two since the last wait here)
                            cute.arch.mbarrier_wait(bias_ring.empty, beat % 2 ^ 1)
                            expect(bias_ring.full + step % 2, c.m * c.n * 2)
                            cute.copy(bias_atom, bias_from, bias_to[None, beat % 2], tma_bar_ptr=bias_ring.full + step % 2, cache_policy=Int64(EVICT_FIRST))
                        step += 1
                if count > 0:
                    taken += 1
            number = draw(counter)
        tell(c, message, turn, (Int32(-1),))

    # ---- device: the sending warps, one for each warpgroup

    @cute.jit
    def send(self, tensors, dq, given, sizes, s_dq, message, side):
        """dQ of each step, then dV and dK, by way of the warpgroup's buffer."""
        c = self.c
        dk_atom, dk, dv_atom, dv = tensors
        _, _, _, _, kv_heads, group, _, _, pitch = sizes
        layout = swizzled((c.n // GROUPS, c.width), c.dtype)
        turn, count = Int32(0), Int32(0)
        tile, kv_head, b, start_q, len_q, start_k, len_k = hear(c, message, turn, sizes)
        while tile >= 0:
            steps = steps_of(c, tile, len_q, len_k, bundle_of(c, b, kv_head, sizes))
            row = row_of(c, b, start_q)
            count_of_steps, (passes, each) = steps[2] + steps[3], passes_of(c, group)
            for past in cutlass.range(passes, unroll=1):
                for y in cutlass.range(count_of_steps * each, unroll=1):
                    member, x = past, y
                    if const_expr(c.abreast):
                        member, x = y % each, y // each
                    head_at, m = statistics_of(c, b, kv_head * group + member, kv_heads * group, pitch), tile_of(c, x, steps)
                    # half of the columns each, or, of a head of 64, half of the rows of each tile
                    begin = head_at * c.width + row * 64 + (side * self.piece if const_expr(c.width == 64) else Int64(side) * pitch * 64)
                    flag = given + head_at + row + side + m * c.m
                    seen = self.take(side, count, flag)
                    there = dq + cute.assume(begin, divby=512) + m * (c.m * 64)
                    bulk_give(there, s_dq[None, count % c.slots, side].iterator, self.piece * 4, flag, seen)
                    cute.arch.cp_async_bulk_commit_group()
                    count += 1
            for atom, there in ((dv_atom, dv), (dk_atom, dk)):
                there = rows_of(c, there, kv_head, b, start_k, len_k)
                out = cute.make_tensor(cute.recast_ptr(s_dq[None, count % c.slots, side].iterator, layout.inner, dtype=c.dtype), layout.outer)
                held, to = tiles_in(atom, out, cute.local_tile(there, (c.n // GROUPS, c.width), (tile * GROUPS + side, 0)))
                self.take(side, count)
                cute.copy(atom, held, to)
                cute.arch.cp_async_bulk_commit_group()
                count += 1
            turn += 1
            tile, kv_head, b, start_q, len_q, start_k, len_k = hear(c, message, turn, sizes)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def take(self, side, count, flag=None):
        """Once what was in a warpgroup's buffer has left, tell it so; wait until something else is in it, the `count`-th thing that is sent.

        Returns what the number at `flag` is meanwhile: the look is an acquiring load, which waits, and nobody waits for this warp then.
        """
        at = 2 * side + count % self.c.slots
        cute.arch.cp_async_bulk_wait_group(self.c.slots - 1, read=True)
        cute.arch.barrier_arrive(barrier_id=ROOM + at, number_of_threads=SENDING)
        seen = None if const_expr(flag is None) else glance(flag)
        cute.arch.barrier(barrier_id=SENT + at, number_of_threads=SENDING)
        return seen


# ---- host

_HALF, _FLOATS, _FLOAT, _INTS, _STRIDES = ("pointer", None, 16), ("pointer", Float32, 16), ("pointer", Float32, 4), ("pointer", Int32, 4), (Int64,) * 3
ARGUMENTS = (
    *(_HALF,) * 8,
    _FLOAT,
    _FLOAT,
    (*(_FLOATS,) * 3, _INTS, _INTS),
    (_INTS,) * 5,
    *(_STRIDES,) * 8,
    (Int32,) * 9,
    Int32,
    Int32,
    Float32,
    Float32,
    (_FLOATS, Int64, Int64),
    (_HALF, Int64, Int64, Int64, Int32, Int32, Int32),
)


class Tiles(NamedTuple):
    """Queries and keys a tile, query tiles in flight, and programs at most."""

    m: int
    n: int
    stages: int
    programs: int

    def __str__(self):
        return f"{self.m}x{self.n} tiles, {GROUPS} warpgroups, {self.stages} stages, at most {self.programs} programs"

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call."""
        return order_of_keys(p, self.n, self.programs, _in_flight(p, self.n))


SHORT = 2048  # queries up to which a tile on the diagonal weighs more than a step that is better filled: causal 1k 64 x 128 358 TFLOP/s, 80 x 128 349


def _in_flight(p: Attention, n: int) -> int:
    """A head's keys that programs are at: tiles in a row, which see much the same queries; a window of 1k, 16 heads side by side 671 us, 8 660, 4 665."""
    keys = p.tokens_k or p.tokens or p.len_k
    return keys if p.mask.left is None else min(keys, 2 * (p.mask.left + (p.mask.right or 0) + n))


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The tiles of the head dimension: 80 queries at 128, fewer where many tiles are seen in part."""
    few = p.mask.left is not None or (p.mask.right is not None and p.len_q <= SHORT)
    m = 128 if p.dim <= 64 else 64 if few else 80
    return [Tiles(m, 128, 2, programs_of(device))]


_made: dict[tuple, tuple[Shape, Compiled]] = {}
_making = threading.Lock()  # CuTe DSL traces in one thread at a time; autograd has one for each GPU


def compiled(dtype: torch.dtype, *fields) -> tuple[Shape, Compiled]:
    """The Shape of these fields, and the kernel for it. (The key is a tuple: to make a Shape and hash it takes 2 us in every call.)"""
    found = _made.get((dtype, fields))
    if found is None:
        with _making:
            found = _made.get((dtype, fields))
            if found is None:
                shape = Shape(DTYPES[dtype], *fields)
                found = _made[dtype, fields] = shape, Compiled(Backward(shape), shape.dtype, ARGUMENTS)
    return found


def launch(p: Attention, tiles: Tiles, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """(dq, dk, dv, d_sinks, (d_score, ...)) of the forward call `p`, `x`; as `reference.backward` returns them."""
    if (axes := texts.ahead_of(p)) is not None and q.numel() and k.numel():
        plain, given, q, sign = laid_out(p, x, q, axes, of_keys=True)
        dq, dk, dv, d_sinks, _ = launch(plain, tiles, q, k, v, out, lse, d_out, d_lse, given)
        return dq if sign > 0 else dq * sign, dk, dv, d_sinks, (None,) * len(x.score)
    refuse("a launch that is not Triton's")  # where another kernel's call, which is this one in part, is written down
    some = 0 not in (q.numel(), k.numel(), p.len_q, p.len_k)
    new = torch.empty_like if some and x.q_used is None and x.k_used is None else torch.zeros_like
    grads = [new(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    d_sinks = None if x.sinks is None else torch.zeros_like(x.sinks)
    if q.numel():
        if some:
            delta = _over(p, tiles, [*map(for_tma, (q, k, v, out, d_out)), *grads], lse, d_lse, x)
        else:
            heads_first = (t.transpose(0, 1)[None] if x.q_offsets is not None else t.transpose(1, 2) for t in (out, d_out))
            delta, _ = statistics(p, *heads_first, lse, d_lse, LOG2E)
        if x.sinks is not None:  # d LSE / d sink = exp(sink - LSE), and a growing LSE shrinks every weight: delta carries both
            d_sinks = sink_gradient(x.sinks, lse, delta[:, :, : lse.shape[-1]])
    return *grads, d_sinks, (None,) * len(x.score)


OF_QUERIES = True, False, False, True, True, True, False, False  # of q, k, v, out, dO, dQ, dK, dV: those with a head for each head of q


def _over(p: Attention, tiles: Tiles, tensors, lse, d_lse, x: Operands):
    """Prologue, kernel and rounding in one call, for each share of the key heads; delta [batch, heads, rows]."""
    added = texts.bias_of(p)
    before, gain = texts.fold(p.score.text)[1:] if p.score and not added else (1.0, 1.0)
    q = tensors[0]
    packed = x.q_offsets is not None
    far = x.score[0] if p.score is None and x.score else None  # where `launch` has put what lies by distance
    asked = x.q_used is not None, x.k_used is not None, d_lse is not None, p.group > 1, p.score is not None and not added, far is not None, added is not None
    shape, run = compiled(q.dtype, *tiles[:3], p.dim, *ends(p.mask), packed, *asked)
    batch, rows = (1, len(q)) if packed else q.shape[:2]
    pitch = -(-(rows + p.batch * shape.pad) // 8) * 8 if packed else -(-rows // tiles.m) * tiles.m
    parts = shares(batch, p.kv_heads, p.group, 4 * pitch * shape.width)
    most, every = parts[0].sequences * parts[0].heads * p.group * pitch, batch * p.heads * pitch
    # dQ's sums and LSE of a share, which sums there are, what counts the tiles drawn, and delta of all
    held = torch.empty(most * (shape.width + 2) + 4 + every, dtype=torch.float32, device=q.device)
    sums = held.data_ptr()
    lses = sums + 4 * most * shape.width
    given, counter, deltas = lses + 4 * most, lses + 8 * most, lses + 8 * most + 16
    listed, places = None, -(-p.len_k // tiles.n)
    if packed:  # one list for all sequences
        listed = sequence_tiles(p, x, tiles.n, of_keys=True)
        places = len(listed)
    most_heads = parts[0].sequences * parts[0].heads
    side_by_side = key_heads_together(p, _in_flight(p, tiles.n), most_heads)
    lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.float().contiguous()
    lse_at, d_lse_at = lse.data_ptr(), 0 if d_lse is None else d_lse.data_ptr()
    others = [0 if t is None else t.data_ptr() for t in (listed, x.q_offsets, x.k_offsets, x.q_used, x.k_used)]
    # of a sequence, a head, and a row
    strides = [(0, by[1], by[0]) if packed else (by[0], by[2], by[1]) for by in (t.stride() for t in tensors)]
    far_at, of_sequence, of_head = (0, 0, 0) if far is None else (far.data_ptr(), *far.stride()[:2])
    begin_bias, bias_strides, bias_sizes = 0, (0, 0, 0), (1, 1, 1)
    if added:
        bias, _ = pair_view(x.score[added.tensor], added.axes, tiles.m)
        begin_bias, bias_strides = bias.data_ptr(), [s if n > 1 else 8 for s, n in zip(bias.stride()[:3], bias.shape[:3], strict=True)]
        bias_sizes = bias.shape[:3]
    begins, flat = [t.data_ptr() for t in tensors], [s for by in strides for s in by]
    for b, sequences, h, heads in parts:
        first, count = b * p.heads + h * p.group, places * sequences * heads
        skipped = [2 * (b * by[0] + h * by[1] * (p.group if of_queries else 1)) for by, of_queries in zip(strides, OF_QUERIES, strict=True)]
        run(
            *map(int.__add__, begins, skipped), lse_at + 4 * first * rows, d_lse_at and d_lse_at + 4 * first * rows,
            lses, deltas + 4 * first * pitch, sums, given, counter, *others, *flat,
            count, places, side_by_side, p.batch if packed else sequences, heads, p.group, p.len_q, p.len_k, pitch, rows,
            min(count, tiles.programs), x.scale * before * gain, gain,
            far_at + 4 * (b * of_sequence + h * p.group * of_head), of_sequence, of_head,
            begin_bias + 2 * (b * bias_strides[0] * (bias_sizes[0] > 1) + h * p.group * bias_strides[1] * (bias_sizes[1] > 1)), *bias_strides,
            min(bias_sizes[0], sequences), min(bias_sizes[1], heads * p.group), bias_sizes[2],
        )  # fmt: skip
    return held[-every:].view(batch, p.heads, pitch)
