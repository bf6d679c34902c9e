"""What a warpgroup of `cutlass_backward` computes: steps, each a tile of queries past the keys that stay; its sums, and what it tells the others."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from onchip.kernels.attention.cutlass_backward_tiles import (
    Ring,
    Shape,
    begin_with,
    first_of,
    hear,
    hidden,
    hide,
    of_queries,
    passes_of,
    steps_of,
    tile_of,
    weigh_biased,
    weigh_capped,
)
from onchip.kernels.cutlass import (
    COLUMNS,
    ROWS,
    as_left,
    halved,
    let_go,
    matrix_load,
    matrix_store,
    multiply,
    operands,
    products,
    sums_of,
    swizzled,
    turned,
)

GROUPS = 2  # warpgroups that compute, 64 keys each
COMPUTING = 128 * GROUPS
SENDING = 160  # threads at a warpgroup's buffer: its own, and the warp that sends what is in it
# Hardware barriers, two of each warpgroup: that a buffer of its is free; that something lies in it; that it has made its part of dQ of the step before.
ROOM, SENT, READ = 2, 6, 10


class Work(NamedTuple):
    """What a warpgroup has at hand in every step: operands of its products, as descriptors; and its own sums."""

    side: object
    first_lane: object
    q_ring: Ring
    do_ring: Ring
    of_scores: object
    of_keys: object
    of_queries: object
    k_left: object
    v_left: object
    q_right: object
    do_right: object
    q_turned: object
    do_turned: object
    k_turned: object
    ds_right: object
    store_ds: object
    bias: Ring
    load_bias: object
    dq_mine: object
    dk: object
    dv: object
    factors: object


class Computing:
    """For a Shape."""

    def __init__(self, shape: Shape):
        self.c = shape
        self.piece = shape.m * shape.width // GROUPS  # floats of a step's dQ that a warpgroup makes

    @cute.jit
    def compute(self, sizes, still, q_ring, do_ring, bias_ring, s_dq, message, scale, factors, far):
        c, s_ds = self.c, bias_ring.tiles
        group = sizes[5]
        thread = cute.arch.thread_idx()[0] - 128
        side = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        lane = thread % 32
        first_lane = lane == 0
        of_scores = products(c.dtype, ROWS, ROWS, (GROUPS, 1), c.m)
        of_keys = products(c.dtype, ROWS, COLUMNS, (GROUPS, 1), c.width, registers=True)
        wide = c.width > 64
        of_queries = products(c.dtype, COLUMNS, ROWS, (GROUPS, 1) if wide else (1, GROUPS), c.m if wide else c.m // GROUPS)
        k_left, q_right = operands(of_scores, side, still.k, q_ring.tiles)
        v_left, do_right = operands(of_scores, side, still.v, do_ring.tiles)
        _, q_turned = operands(of_keys, side, None, turned(q_ring.tiles))
        _, do_turned = operands(of_keys, side, None, turned(do_ring.tiles))
        k_turned, ds_right = operands(of_queries, side, turned(still.k), s_ds)
        one_of_scores, one_of_keys = products(c.dtype, ROWS, ROWS, (1, 1), c.m), products(c.dtype, ROWS, COLUMNS, (1, 1), c.width)
        ds_mine = cute.local_tile(turned(s_ds), (64, c.m, 2), (side, 0, 0))
        store_ds = matrix_store(one_of_scores, ds_mine, thread, c.dtype, transpose=True)
        bias = bias_ring, matrix_load(one_of_scores, ds_mine, thread, c.dtype, transpose=True) if c.biased else None
        mine = s_dq[None, None, side].iterator
        dq_mine = cute.make_tensor(mine + thread * 4, cute.make_layout((4, self.piece // 512, c.slots), stride=(1, 512, self.piece)))
        layout = cute.append(swizzled((64, c.width), c.dtype).outer, cute.make_layout(c.slots, stride=self.piece * 2))
        out_mine = cute.make_tensor(cute.recast_ptr(mine, swizzled((64, c.width), c.dtype).inner, dtype=c.dtype), layout)
        store_out = matrix_store(one_of_keys, out_mine, thread, c.dtype, transpose=False)
        # a thread's places in a tile of scores: two keys, eight apart, and of each eight queries two
        own_key, own_query = side * 64 + thread // 32 * 16 + lane // 4, lane % 4 * 2
        dk, dv = sums_of(of_keys, (c.n, c.width)), sums_of(of_keys, (c.n, c.width))
        right = (q_right, do_right, q_turned, do_turned, k_turned, ds_right)
        work = Work(side, first_lane, q_ring, do_ring, of_scores, of_keys, of_queries, k_left, v_left, *right, store_ds, *bias, dq_mine, dk, dv, factors)
        turn, step, taken = Int32(0), Int32(0), Int32(0)  # messages heard; query tiles; key tiles with any, of which each takes a beat more
        self.has_read(side, 1)
        tile, kv_head, b, _, len_q, _, len_k = hear(c, message, turn, sizes)
        while tile >= 0:
            steps = steps_of(c, tile, len_q, len_k)
            _, _, masked, bare, _ = steps
            dk.fill(0.0)
            dv.fill(0.0)
            if masked + bare > 0:
                cute.arch.mbarrier_wait(still.k_full, taken % 2)
                cute.arch.mbarrier_wait(still.v_full, taken % 2)
            place = tile, own_key, own_query, len_q, len_k
            begin, (passes, each) = step, passes_of(c, group)
            for past in cutlass.range(passes, unroll=1):
                for x in cutlass.range(masked * each, unroll=1):
                    m = tile_of(c, x // each, steps)
                    if hidden(c, m, tile * c.n + side * 64, len_q, len_k):
                        self.pause(work, step, taken, begin)
                    else:
                        there = first_of(c, far, b, kv_head * group + (x % each if const_expr(c.abreast) else past), m, place)
                        self.step(work, m, step, taken, begin, place, there, True)
                    step += 1
                for x in cutlass.range(bare * each, unroll=1):
                    there = first_of(c, far, b, kv_head * group + (x % each if const_expr(c.abreast) else past), tile_of(c, masked + x // each, steps), place)
                    self.step(work, x, step, taken, begin, place, there, False)
                    step += 1
            if masked + bare > 0:
                beat = step + taken  # a step more, of dQ alone
                self.has_been_read(side, beat + 1)
                dq = sums_of(of_queries, (c.width, c.m))
                multiply(of_queries, dq, k_turned, ds_right[None, None, None, (beat + 1) % 2], True)
                warpgroup.wait_group(0)
                self.has_read(side, beat)
                if const_expr(c.biased):
                    let_go(bias_ring.empty, first_lane)
                let_go(still.empty, first_lane)
                self.give(dq, dq_mine, side, step - 1)
                taken += 1
            dk.store(dk.load() * scale)
            for i in cutlass.range_constexpr(2):
                at = self.room(side, step + i)
                store_out(halved((dv, dk)[i], c.dtype), at)
                self.filled(side, at)
            turn += 1
            tile, kv_head, b, _, len_q, _, len_k = hear(c, message, turn, sizes)

    @cute.jit
    def step(self, w, m, step, taken, begin, place, there, edge: cutlass.Constexpr[bool]):
        """A tile of queries past the keys. `there`: what its scores begin with. `edge`: it needs the mask."""
        c = self.c
        at, phase, beat = step % c.stages, step // c.stages % 2, step + taken
        s, dp = sums_of(w.of_scores, (c.n, c.m)), sums_of(w.of_scores, (c.n, c.m))
        if const_expr(c.far):
            begin_with(c, s, there)
        cute.arch.mbarrier_wait(w.q_ring.full + at, phase)
        multiply(w.of_scores, s, w.k_left, w.q_right[None, None, None, at], not c.far)
        lse, delta = None, None
        early = c.width > 64 and not (c.capped or c.far or c.biased)  # of 128 queries a thread has 32, a softcap's scores become two words: no room yet
        if const_expr(early):
            lse = of_queries(c, w.q_ring.rows, at, place[2])
        cute.arch.mbarrier_wait(w.do_ring.full + at, phase)
        multiply(w.of_scores, dp, w.v_left, w.do_right[None, None, None, at], True)
        warpgroup.wait_group(1)
        if const_expr(not early and not c.biased):
            lse = of_queries(c, w.q_ring.rows, at, place[2])
        if const_expr(c.capped):
            if const_expr(edge):
                hide(c, s, m, place, -Float32.inf)
            p, slopes = weigh_capped(c, s, lse, w.factors, edge)
            warpgroup.wait_group(0)
            delta = of_queries(c, w.do_ring.rows, at, place[2])
        else:
            if const_expr(c.biased):
                cute.arch.mbarrier_wait(w.bias.full + step % 2, step // 2 % 2)
                weigh_biased(c, s, w.load_bias, beat % 2, w.q_ring.rows[None, at].iterator + place[2], w.factors[0])
            for i in cutlass.range_constexpr(0 if c.biased else cute.size(s) // 4):
                for x in cutlass.range_constexpr(4):  # two queries of two keys
                    s[4 * i + x] = cute.math.exp2(s[4 * i + x] * w.factors[0] - lse[2 * i + x % 2], fastmath=True)
            if const_expr(edge):
                hide(c, s, m, place)
            delta = of_queries(c, w.do_ring.rows, at, place[2])
            warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            for x in cutlass.range_constexpr(4):
                slope = slopes[4 * i + x].to(Float32) if const_expr(c.capped) else s[4 * i + x]
                dp[4 * i + x] = slope * (dp[4 * i + x] - delta[2 * i + x % 2])
        if const_expr(not c.capped):
            p = halved(s, c.dtype)
        ds = halved(dp, c.dtype)
        dq = sums_of(w.of_queries, (c.width, c.m))
        self.has_been_read(w.side, beat + 1)
        w.store_ds(ds, beat % 2)
        multiply(w.of_keys, w.dv, as_left(p), w.do_turned[None, None, None, at], False)
        cute.arch.fence_proxy("async.shared", space="cta")
        multiply(w.of_queries, dq, w.k_turned, w.ds_right[None, None, None, (beat + 1) % 2], True)
        multiply(w.of_keys, w.dk, as_left(ds), w.q_turned[None, None, None, at], False)
        warpgroup.wait_group(1)
        self.has_read(w.side, beat)
        if const_expr(c.biased):
            let_go(w.bias.empty, w.first_lane)
        let_go(w.do_ring.empty + at, w.first_lane)
        if step > begin:
            self.give(dq, w.dq_mine, w.side, step - 1)
        warpgroup.wait_group(0)
        let_go(w.q_ring.empty + at, w.first_lane)

    @cute.jit
    def pause(self, w, step, taken, begin):
        """A tile of queries that sees none of this warpgroup's keys: dS is 0, and of the products that of dQ alone is made, for the tile before."""
        c = self.c
        at, phase, beat = step % c.stages, step // c.stages % 2, step + taken
        nothing = cute.make_rmem_tensor(sums_of(w.of_scores, (c.n, c.m)).layout, c.dtype)
        nothing.fill(0.0)
        dq = sums_of(w.of_queries, (c.width, c.m))
        cute.arch.mbarrier_wait(w.q_ring.full + at, phase)
        cute.arch.mbarrier_wait(w.do_ring.full + at, phase)
        if const_expr(c.biased):
            cute.arch.mbarrier_wait(w.bias.full + step % 2, step // 2 % 2)
        self.has_been_read(w.side, beat + 1)
        w.store_ds(nothing, beat % 2)
        cute.arch.fence_proxy("async.shared", space="cta")
        multiply(w.of_queries, dq, w.k_turned, w.ds_right[None, None, None, (beat + 1) % 2], True)
        warpgroup.wait_group(0)
        self.has_read(w.side, beat)
        if const_expr(c.biased):
            let_go(w.bias.empty, w.first_lane)
        let_go(w.do_ring.empty + at, w.first_lane)
        let_go(w.q_ring.empty + at, w.first_lane)
        if step > begin:
            self.give(dq, w.dq_mine, w.side, step - 1)

    @cute.jit
    def has_read(self, side, beat):
        """This warpgroup's dQ product of a beat is made: it has read the other's dS of the beat before."""
        cute.arch.barrier_arrive(barrier_id=READ + 2 * side + beat % 2, number_of_threads=COMPUTING)

    @cute.jit
    def has_been_read(self, side, beat):
        """Wait for the other's, so that its dS of that beat can be read, and that of the beat before overwritten."""
        cute.arch.barrier(barrier_id=READ + 2 * (1 - side) + beat % 2, number_of_threads=COMPUTING)

    @cute.jit
    def room(self, side, count):
        """The buffer for the `count`-th thing that is sent, once it is free. (Two things of a tile are no dQ: with two buffers, the steps are count enough.)"""
        at = count % self.c.slots
        cute.arch.barrier(barrier_id=ROOM + 2 * side + at, number_of_threads=SENDING)
        return at

    @cute.jit
    def filled(self, side, at):
        """Something lies in a buffer."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=SENT + 2 * side + at, number_of_threads=SENDING)

    @cute.jit
    def give(self, dq, dq_mine, side, step):
        """A step's part of dQ to the sending warp: the numbers of a thread as they are, 16 bytes at a time."""
        at = self.room(side, step)
        there = dq_mine[None, None, at]
        cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(there.shape)), there)
        self.filled(side, at)
