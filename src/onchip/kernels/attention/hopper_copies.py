"""The warps of `hopper_prefill` that copy: how queries, keys and values come to shared memory, out of a tensor or out of pages.

One warp asks the copy engine (TMA). Of keys in pages it asks for as many rows at a time as always lie in one page, 8 or more, since shared memory is swizzled
by eights; the page of each such piece waits in a lane. Of smaller pages (SGLang's hold a token) two or four warps more bring keys and values, 16 bytes a thread
(cp.async, as FlashAttention-3 does it): a thread looks up the page of a row or two, a tile ahead, and finds those of all rows that it copies in shared memory.
What threads copy is not seen by products, unless who waits for it fences it off (`come`).
"""

import math

from onchip.kernels.attention.hopper_halves import hidden_of, told_of
from onchip.kernels.attention.hopper_parts import keys_of_part, steps_of_part, unit_at
from onchip.kernels.attention.hopper_tiles import anew, fill_tiles, key_steps, locate, next_sequence, place_of, queries_at, tile_at
from onchip.kernels.attention.pairs import ask_for
from onchip.kernels.attention.tile import key_span
from onchip.kernels.hopper import (
    advance,
    arrive_when_copied,
    copy_async,
    draw,
    fence_async_shared,
    fill,
    fill_pages,
    gl,
    gluon,
    mbarrier,
    reclaim,
    tell,
    tma_load,
    wide_product,
)


@gluon.jit
def first_seen(place, C: gl.constexpr):
    """The first key that a tile of queries sees; what the table says of those before may be anything."""
    _, _, tile_m, _, _, _, len_k, shift = place
    first = 0
    if C.left >= 0:
        first, _ = key_span(tile_m * C.m + shift, 0, len_k, C.left, -1)
    return first


@gluon.jit
def come(full, index, phase, C: gl.constexpr):
    """Wait for a tile of keys or values, until products may read it."""
    mbarrier.wait(full.index(index), phase)
    if C.gathers > 0:
        fence_async_shared()


# ---- by the copy engine


@gluon.jit
def pages_of(table, place, n, C: gl.constexpr):
    """The pages of a tile of keys from `n` on, in order, one in each lane of a warp: -1, where TMA reads 0, for those of which the tile of queries
    sees nothing, since the table may say anything there, and where the tile has no more."""
    entries, columns = table
    b, _, _, _, _, _, len_k, _ = place
    first = first_seen(place, C)
    PARTS: gl.constexpr = C.parts
    ROWS: gl.constexpr = C.n // PARTS
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    at = n + lane * ROWS
    there = (lane < PARTS) & (at < len_k) & (at + ROWS > first)
    return gl.load(entries + (b * columns + at // C.page), mask=there, other=-1)


@gluon.jit
def fill_keys(ring, cursor, desc, table, place, at, n, BARRIER: gl.constexpr, C: gl.constexpr):
    """A tile of keys, or of values, from `n` on. Its pages are looked up before the wait for a buffer, which is the longer one."""
    after = cursor
    if C.page == 0:
        after = fill(ring, cursor, desc, [at[0], at[1], n, 0], C.stages, BARRIER, C.readers)
    elif C.gathers == 0:
        after = fill_pages(ring, cursor, desc, pages_of(table, place, n, C), at[1], n, C.page, C.stages, BARRIER, C.readers)
    return after


@gluon.jit
def fill_biased(keys, cursor, desc, bias_desc, steps, table, place, at, n, C: gl.constexpr):
    """`fill_keys` of K, and of what stands beside it."""
    after = fill_keys(keys, cursor, desc, table, place, at, n, 10, C)
    if C.biased:
        full, rows = keys[1], keys[2][1]
        b, head, _, _, _, start_k, _, _ = place
        index, _, _ = cursor
        mbarrier.expect(full.index(index), bias_desc.block_type.nbytes)
        tma_load(bias_desc, [steps[0] * b, steps[1] * head, 0, n - start_k], full.index(index), rows.index(index))
    return after


@gluon.jit
def copy(given, C: gl.constexpr):
    """The partition of one warp that draws tiles, tells the others of them, and asks the copy engine for queries, keys and values."""
    q_desc, k_desc, v_desc, t_desc, t_steps, rings, message, counter, sizes, lengths, table, map_ptr, map_strides = given
    N: gl.constexpr = C.n
    GROUPS: gl.constexpr = C.groups
    q_ring, k_ring, v_ring = rings[0], rings[1], rings[2]
    q_at, k_at, v_at, t_at = (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)
    number, turn = gl.program_id(0), 0
    while number < sizes[0]:
        told = number
        if C.split == 0:
            place, there, told = unit_at(number, anew(sizes), lengths, C)
        else:  # with a cap nothing spills, and all that `anew` changes is worse
            place, there = locate(number // C.split, sizes if C.cap > 0 else anew(sizes), lengths, False, C)
        b, head, tile_m, start_q, len_q, start_k, len_k, hidden = place  # the last is how far keys are ahead
        if there:
            steps = key_steps(place, map_ptr, map_strides, C)
            if C.hides:
                hidden = hidden_of(place, steps, C)
            elif C.split > 1:
                hidden = number % C.split
                len_k = keys_of_part(place, steps, hidden, C)
                place = (b, head, tile_m, start_q, len_q, start_k, len_k, place[7])
                steps = steps_of_part(key_steps(place, map_ptr, map_strides, C), hidden, C)
            elif C.split == 0:
                hidden = told
                steps = steps_of_part(steps, told, C)
            tell(message, turn, (b, head, tile_m, start_q, len_q, start_k, len_k, hidden))
            turn += 1
            top, masked, bare, low, _row = steps  # `_` is of another type already
            batch = b
            if C.packed:
                batch = b * 0
            q_batch = batch
            if C.alike:
                q_batch = b * 0
            kv_head = head
            if C.pack == 1:
                kv_head = head // sizes[4]
            n = start_k + top * N
            if t_desc is not None and not C.biased:  # from memory, not L2; and queries may have to wait until an output has left
                t_at = fill_tiles(rings, t_at, t_desc, t_steps, place, n - start_k, C)
            for group in gl.static_range(GROUPS):  # the first queries and keys first
                q_at = fill(q_ring, q_at, q_desc, queries_at(q_batch, head, start_q + tile_m * C.m + group * C.own, C), C.groups * C.rounds, 0, 0)
                if group == 0:
                    k_at = fill_biased(k_ring, k_at, k_desc, t_desc, t_steps, table, place, (batch, kv_head), n, C)
            for x in range(1, 1 + masked + bare + low):
                after = start_k + tile_at(x, steps, map_strides, C) * N
                if C.far:
                    ask_for(t_steps, b, head, tile_m * C.m, place[4], after, C.m, N)
                if t_desc is not None and not C.biased:
                    t_at = fill_tiles(rings, t_at, t_desc, t_steps, place, after - start_k, C)
                k_at = fill_biased(k_ring, k_at, k_desc, t_desc, t_steps, table, place, (batch, kv_head), after, C)
                v_at = fill_keys(v_ring, v_at, v_desc, table, place, (batch, kv_head), n, 10 + C.stages, C)
                n = after
            v_at = fill_keys(v_ring, v_at, v_desc, table, place, (batch, kv_head), n, 10 + C.stages, C)
        if C.first:
            number += gl.num_programs(0)
        else:
            number = sizes[0]
            more = number > gl.num_programs(0)
            if C.split == 0:  # behind the last unit there is none
                more = more & there
            if more:
                number = draw(counter, sizes[0])
    tell(message, turn, (gl.to_tensor(-1),))


# ---- by warps


@gluon.jit
def _near(n, place, C: gl.constexpr):
    """int32 [C.n], one of a thread or two: the keys of a tile from `n` on, or the nearest that the tile of queries sees, so that none is looked up that the
    table may not know; of a sequence without keys 0."""
    _, _, _, _, _, _, len_k, _ = place
    last = gl.maximum(len_k - 1, 0)
    at = n + gl.arange(0, C.n, layout=gl.BlockedLayout([1], [32], [C.gathers], [0]))
    return gl.maximum(gl.minimum(at, last), gl.minimum(first_seen(place, C), last))


@gluon.jit
def _look(table, place, n, C: gl.constexpr):
    """Their pages, int32 [C.n]; of a sequence without keys 0."""
    entries, columns = table
    b, _, _, _, _, _, len_k, _ = place
    at = _near(n, place, C)
    return gl.load(entries + b * columns + at // C.page, mask=at < len_k, other=0)


@gluon.jit
def _gather_tile(ring, cursor, pool, DIM: gl.constexpr, place, kv_head, n, pages, BARRIER: gl.constexpr, C: gl.constexpr):
    """A tile of keys, or of values, from `n` on, out of `pages`; columns behind DIM are 0."""
    buffers, full, _ = ring
    index, phase, used = cursor
    start, unit, of_head, of_page, of_slot = pool
    WIDTH: gl.constexpr = buffers.shape[-1]
    ACROSS: gl.constexpr = WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [C.gathers, 1], [1, 0])
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    rows = pages
    if C.page > 1:
        rows = pages * of_page + _near(n, place, C) % C.page * of_slot
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    reclaim(index, used, C.stages, BARRIER, C.readers)
    inside = None if DIM == WIDTH else (dims < DIM)[None, :]
    start += kv_head.to(gl.int64) * of_head * 8
    copy_async(buffers.index(index).reshape([C.n, WIDTH]), start + (wide_product(rows, unit)[:, None] * 8 + dims[None, :]), mask=inside)
    arrive_when_copied(full.index(index), increment_count=False)
    index, phase = advance(index, phase, C.stages)
    return index, phase, used + 1


@gluon.jit
def gather(given, C: gl.constexpr):
    """The partition that does this, in the order in which `copy` asks the copy engine. A tile's pages are looked up a tile ahead, once for keys and values."""
    pools, k_ring, v_ring, message, sizes, table, map_ptr, map_strides = given
    N: gl.constexpr = C.n
    k_pool, v_pool = pools
    k_at, v_at = (0, 0, 0), (0, 0, 0)
    turn = 0
    b = next_sequence(message, turn, C.gathers)
    while b >= 0:
        told = told_of(message, turn, C, C.gathers)
        place = place_of(message, turn, b, sizes, C, C.gathers)
        steps = steps_of_part(key_steps(place, map_ptr, map_strides, C), told, C)
        top, masked, bare, low, _row = steps
        kv_head = place[1]
        if C.pack == 1:
            kv_head = kv_head // sizes[4]
        n, after = top * N, tile_at(1, steps, map_strides, C) * N  # behind the last one this is any number, of which `_near` makes keys
        pages, more = _look(table, place, n, C), _look(table, place, after, C)
        k_at = _gather_tile(k_ring, k_at, k_pool, C.dim, place, kv_head, n, pages, 10, C)
        for x in range(1, 1 + masked + bare + low):
            later = tile_at(x + 1, steps, map_strides, C) * N
            most = _look(table, place, later, C)
            k_at = _gather_tile(k_ring, k_at, k_pool, C.dim, place, kv_head, after, more, 10, C)
            v_at = _gather_tile(v_ring, v_at, v_pool, C.dim_v, place, kv_head, n, pages, 10 + C.stages, C)
            n, pages, after, more = after, more, later, most
        v_at = _gather_tile(v_ring, v_at, v_pool, C.dim_v, place, kv_head, n, pages, 10 + C.stages, C)
        turn += 1
        b = next_sequence(message, turn, C.gathers)


# ---- host


def pool_of(t):
    """A pool [pages, heads, slots, dim] as threads read it: the tensor; in 16 bytes how large a unit is, and a head; in units how large a page is, and a slot.

    A row's place is an int32 of units: where a page is a whole number of slots, 2^32 slots are in reach, else at least 64 GiB. A Problem knows neither how
    many pages there are nor where, so that it is refused here.
    """
    page, head, slot = t.stride()[:3]
    unit = math.gcd(page, slot if t.shape[2] > 1 else 0) or 8  # the stride of a single page may be 0
    if len(t) * (page // unit) >= 1 << 32:
        raise ValueError(
            f"paged_attention: {len(t)} pages of {t.shape[2]} slots, {page} numbers apart, slots {slot}: too far for hopper_paged, whose places are multiples "
            f"of {unit} numbers in 32 bits; give pages a multiple of {slot} numbers apart, or kernel='triton_paged'"
        )
    return t, unit // 8, head // 8, page // unit, slot // unit
