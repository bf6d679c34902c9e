"""What a program of a Hopper kernel has to do: the tiles that it draws, the key tiles of a tile of queries, and the mask of scores in registers.

`C` is the kernel's `Shape`. `sizes`: tiles, tiles of a head, heads side by side, heads, heads that share K and V, len_q, len_k, batch x heads, and the
first of these. Where a tile's rows hold the heads of a group, all of its heads are key heads.
"""

import torch
import triton

from onchip.core import settings
from onchip.core.device import Device
from onchip.core.problem import Attention
from onchip.core.trace import Traced
from onchip.kernels.attention.hopper_dropout import kept
from onchip.kernels.attention.pairs import by_distance
from onchip.kernels.attention.texts import PairTile, far_of, of_heads_and_keys, pair_tile
from onchip.kernels.attention.tile import inner_span, key_span, order, reads, sequence, together
from onchip.kernels.hopper import (
    as_pairs,
    fence_async_shared,
    fill,
    forget,
    gl,
    gluon,
    hear,
    here,
    mbarrier,
    release_after,
    scale_rows,
    uniform,
    wide_product,
    widened,
)

# Arguments of which nothing is known when a kernel is compiled: Triton would compile another one for each that is 1, or a multiple of 16 (offsets of part
# of a batch begin anywhere).
ANYTHING = ["tiles", "tiles_m", "together", "heads", "group", "len_q", "len_k", "batch_heads", "lse_len"]
ANYTHING += ["q_offsets", "k_offsets", "q_used", "k_used"]

# Of the third ring: the hardware barriers at which the first warpgroup lets its buffers go, 14 and 15 (the second one's lie 8 below), and who meets there.
PAIRS_LET_GO, ONE_GROUP = gl.constexpr(14), gl.constexpr(128 + 32)


def programs_of(device: Device) -> int:
    """The multiprocessors that a kernel may use: all but those that are left to others."""
    name, left = ("sm_margin", device.margin) if device.margin is not None else (settings.SM_MARGIN.name, settings.SM_MARGIN.read())
    if not 0 <= left < device.sms:
        raise ValueError(f"{name}={left} of the {device.sms} multiprocessors of {device.name}; give 0 to {device.sms - 1}")
    return device.sms - left


def programs_and_counter(tiles: int, most: int, device: torch.device):
    """How many programs have `tiles` to do, and the counter from which each draws another when it has done one (None: each has its own alone).

    So one that has had less to do does more, and the next tile's copies run beside the end of the one before.
    """
    return min(tiles, most), None if tiles <= most else torch.zeros(1, dtype=torch.int32, device=device)


@gluon.jit
def anew(sizes):
    """`sizes`, of which nothing is made before it is wanted (`here`)."""
    return sizes[0], sizes[1], here(sizes[2]), sizes[3], sizes[4], here(sizes[5]), here(sizes[6]), sizes[7], sizes[8]


@gluon.jit
def locate(t, sizes, lengths, OF_KEYS: gl.constexpr, C: gl.constexpr):
    """Tile number `t`, as a place: sequence, head, number, first query, queries, first key, keys, how far keys are ahead; and whether there is one.

    `together` heads go side by side, so that they share what they read in L2; where tiles differ in work those with most go first. A packed
    problem's are `listed` for all sequences, in `places` places.
    """
    _, places, together, heads, _, len_q, len_k, batch_heads, first = sizes
    listed, q_offsets, k_offsets, q_used, k_used = lengths
    BLOCK: gl.constexpr = C.n if OF_KEYS else C.m
    bundle = t // (together * places)
    within = t - bundle * together * places
    width = gl.minimum(together, batch_heads - bundle * together)
    batch_head = first + bundle * together + within % width
    tile = within // width
    if C.packed:
        head = batch_head
        listed += 2 * tile
        b, tile = uniform(gl.load(listed)), uniform(gl.load(listed + 1))
        there = b >= 0
        b = gl.maximum(b, 0)
    else:
        if not OF_KEYS and (C.right >= 0 or C.mapped):
            tile = places - 1 - tile
        b = batch_head // heads
        head = batch_head - b * heads
        there = tile * BLOCK < (len_k if OF_KEYS else len_q)
    start_q, len_q = sequence(q_offsets, q_used, b, len_q)
    start_k, len_k = sequence(k_offsets, k_used, b, len_k)
    return (b, head, tile, start_q, len_q, start_k, len_k, shift_of(len_q, len_k, C)), there


@gluon.jit
def shift_of(len_q, len_k, C: gl.constexpr):
    """The key that query 0 is at."""
    shift = len_k - len_q
    if C.top_left:
        shift = shift * 0
    return shift


@gluon.jit
def next_sequence(message, turn, WARPS: gl.constexpr = 4):
    """The sequence of this program's next tile, as the copying warp tells it (to find it takes four divisions); -1: there is none."""
    return hear(message, turn, 0, WARPS)


@gluon.jit
def place_of(message, turn, b, sizes, C: gl.constexpr, WARPS: gl.constexpr = 4):
    """The place of that tile."""
    start_q, len_q, start_k, len_k = b * 0, sizes[5], b * 0, sizes[6]
    head, tile = hear(message, turn, 1, WARPS), hear(message, turn, 2, WARPS)
    if C.uneven:
        start_q, len_q = hear(message, turn, 3, WARPS), hear(message, turn, 4, WARPS)
        start_k, len_k = hear(message, turn, 5, WARPS), hear(message, turn, 6, WARPS)
    forget(message, turn)
    return b, head, tile, start_q, len_q, start_k, len_k, shift_of(len_q, len_k, C)


@gluon.jit
def own_rows(place, group, C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """The queries of a warpgroup's rows, and their head or, of `C.pack` side by side, heads: row r is of query r // pack and of head r % pack of `group`.

    What is no head of the group is put behind the last query, where nothing is stored: of three, each fourth row.
    """
    _, head, tile_m, _, len_q, _, _, _ = place
    rows = gl.arange(0, 64, layout=layout)
    if C.pack > 1:
        one = rows % C.pack
        head = head * group + one
        rows = gl.where(one < group, tile_m * C.m + GROUP * C.own + rows // C.pack, len_q)
    else:
        rows = tile_m * C.m + GROUP * 64 + rows
    return rows, head


@gluon.jit
def tall(head, C: gl.constexpr):
    """The heads of rows beside a tile's columns; one head is for all."""
    if C.pack > 1:
        head = head[:, None]
    return head


@gluon.jit
def all_heads(sizes, C: gl.constexpr):
    """How many heads queries have."""
    heads = here(sizes[3])
    if C.pack > 1:
        heads = heads * sizes[4]
    return heads


@gluon.jit
def lse_at(b, head, rows, lse_len, sizes, C: gl.constexpr):
    """Where in LSE rows of a head lie, of which each has `lse_len`."""
    if C.cap > 0:  # in so many instructions, since ptxas makes of one less another kernel, 2 to 4% slower
        if C.packed:
            b = b * 0
        heads = sizes[3]
        if C.pack > 1:
            heads = heads * sizes[4]
        at = b.to(gl.int64) * (heads * lse_len) + head.to(gl.int64) * lse_len + rows
    else:
        if not C.packed:
            head += b * all_heads(sizes, C)
        at = wide_product(head, lse_len) + rows
    return at


@gluon.jit
def output_at(rows, head, sizes, C: gl.constexpr):
    """Where rows of a packed batch's output begin, beside its columns."""
    return (wide_product(rows, all_heads(sizes, C))[:, None] + tall(head, C)) * C.dim_v


@gluon.jit
def queries_at(b, head, query, C: gl.constexpr):
    """Where the copy engine finds a warpgroup's queries, and leaves its output."""
    if C.pack > 1:
        at = (b, head, query, 0, 0)
    else:
        at = (b, head, query, 0)
    return at


@gluon.jit
def fill_tiles(rings, cursor, desc, steps, place, n, C: gl.constexpr):
    """What a score reads of a tile of queries and the keys from `n` on.

    A ring for each warpgroup, so that none waits for what the other has not let go: that is half a tile's time more for memory to answer.
    """
    GROUPS: gl.constexpr = C.groups
    b, head, tile_m, _, _, _, _, _ = place
    after = cursor
    for group in gl.static_range(GROUPS):
        at = [b * steps[0], head * steps[1], (tile_m * C.m + group * 64) * steps[2], n]
        after = fill(rings[3 + group], cursor, desc, at, C.stages, PAIRS_LET_GO - 8 * group, ONE_GROUP)
    return after


@gluon.jit
def map_row(map_ptr, map_strides, b, head, tile):
    """Where the mask's map tells of a tile: how many others it sees in part and in whole, and which (`tile.mask_map`)."""
    return map_ptr + wide_product(b * here(map_strides[0]) + head * here(map_strides[1]) + tile, here(map_strides[2]))


@gluon.jit
def map_entry(x, part, row, map_strides):
    """The tile number `x` of a row of the map: those seen in `part` come first, the whole ones stand at its end."""
    return gl.load(row + gl.where(x < part, 2 + x, here(map_strides[2]) - 1 - (x - part)))


@gluon.jit
def key_steps(place, map_ptr, map_strides, C: gl.constexpr):
    """The key tiles of a tile of queries: the first; how many more need the mask, how many do not, how many do again; and the row of the map.

    One at least, so that a row that sees nothing comes to its end too.
    """
    N: gl.constexpr = C.n
    b, head, tile_m, _, _, _, len_k, shift = place
    row = tile_m  # without a map nobody looks
    if C.mapped:
        row = map_row(map_ptr, map_strides, b, head, tile_m)
        part = gl.load(row)
        whole = gl.load(row + 1)
        top = gl.where(part > 0, gl.load(row + 2), gl.where(whole > 0, gl.load(row + here(map_strides[2]) - 1), 0))
        masked = gl.maximum(part - 1, 0)
        bare = gl.where(part > 0, whole, gl.maximum(whole - 1, 0))
        low = part * 0
    else:
        row_first, row_last = tile_m * C.m + shift, tile_m * C.m + C.m - 1 + shift
        first, last = key_span(row_first, row_last, len_k, C.left, C.right)
        inner, outer = inner_span(row_first, row_last, len_k, C.left, C.right, N)
        first = first // N
        top = gl.maximum(gl.cdiv(last, N) - 1, first)
        inner = gl.minimum(gl.maximum(inner // N, first), top)
        outer = gl.minimum(gl.maximum(outer // N, inner), top)
        masked = top - outer
        bare = outer - inner
        low = inner - first
    return top, masked, bare, low, row


@gluon.jit
def tile_at(x, steps, map_strides, C: gl.constexpr):
    """The key tile of step `x`; the first step is 0."""
    top, _, _, _, row = steps
    if C.mapped:
        tile = map_entry(x, gl.load(row), row, map_strides)
    else:
        tile = top - x
    return tile


@gluon.jit
def base_of(top):
    """What is subtracted from scores. A row that has seen no key yet: -inf minus -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def outgrown(sums, top, alarms, MOST: gl.constexpr):
    """Whether weights over `top` come near what their dtype holds, or a row has no `top` of its own yet: in any of a warpgroup's four warps.

    A softmax may be taken over any number that keeps its weights within their dtype's range. So a maximum is only found where this says so, and a tile
    done again over it: for the others that is a comparison, two shuffles, and a product of the output less.
    sums     [64, 8] of weights, each of a few
    alarms   four words in shared memory
    """
    unsettled = gl.convert_layout(top, gl.SliceLayout(1, sums.type.layout)) == float("-inf")
    bad = (unsettled[:, None] | (sums > MOST)).to(gl.int32)
    bad = gl.max(bad.reshape([4, 2, 64]), 1)  # the rows of a thread, and then of a warp: one instruction
    alarms.store(gl.max(bad, 1))
    return gl.max(alarms.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > 0


@gluon.jit
def hand(x, j):
    """Values of keys [N], one in each thread, to where a tile has its columns `j` [1, N]."""
    return gl.convert_layout(x, gl.SliceLayout(0, j.type.layout))[None, :]


@gluon.jit
def of_rows(rows, b, h, len_q, len_k, reads, ROWS: gl.constexpr):
    """What mask and score make of the rows alone (`mods.split_functions`): once, instead of for each tile of keys."""
    known = ()
    if ROWS is not None:
        known = ROWS(b, h, rows, len_q, len_k, reads)
    return known


@gluon.jit
def of_keys(n, call, KEYS: gl.constexpr, C: gl.constexpr):
    """What they make of the keys alone: in the scores' layout each thread would make it for a quarter of all columns."""
    known = ()
    if KEYS is not None:
        j = n + gl.arange(0, C.n, layout=gl.BlockedLayout([1], [32], [4], [0]))
        known = KEYS(call[2], call[3], j, call[4], call[5], (call[8], call[9]))
    return known


@gluon.jit
def keys_ahead(x, steps, map_strides, call, KEYS: gl.constexpr, C: gl.constexpr):
    """`of_keys` of step `x`. There may be none: behind the last one a map may say anything."""
    tile = gl.maximum(tile_at(x, steps, map_strides, C), 0)
    if C.mapped:  # times C.n it may be any number, which is looked up where it is below 0
        tile = gl.minimum(tile, call[5] // C.n)
    return of_keys(tile * C.n, call, KEYS, C)


@gluon.jit
def columns_of(tile):
    """The columns of scores [64, n // 8, 4, 2] in a warpgroup's registers: int32 [1, n // 8, 1, 2], constants of the code, and [1, 4], those of a thread."""
    layout: gl.constexpr = tile.type.layout
    eight = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))) * 8
    one = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    two = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))) * 2
    eight, one = eight[None, :][:, :, None][:, :, :, None], one[None, :][:, None, :][:, :, None, :]
    return eight + one, two[None, :]


@gluon.jit
def between(start, end, STARTS: gl.constexpr, ENDS: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Which columns of scores [64, N] lie in [`start`, `end`) of their rows, or have no such bound. They are constants of the code: those of all 64 scores of a
    thread took registers of the whole kernel, or were spilled."""
    tile = gl.zeros([64, N], gl.float32, layout).reshape([64, N // 8, 4, 2])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout)))
    own, two = columns_of(tile)
    seen = tile == 0.0
    if ENDS:
        seen = seen & (own < (gl.convert_layout(end, of_row)[:, None] - two)[:, None, :][:, :, :, None])
    if STARTS:
        seen = seen & (own >= (gl.convert_layout(start, of_row)[:, None] - two)[:, None, :][:, :, :, None])
    return gl.convert_layout(seen.reshape([64, N]), layout)


@gluon.jit
def hide(scores, n, call, keys, MASK: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Scores with -inf where the mask hides the key. `keys`: from `of_keys`."""
    N: gl.constexpr = scores.shape[1]
    rows, shift, b, h, len_q, len_k, _, _, reads, _, known = call
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    start = rows
    end = rows * 0 + len_k
    if C.right >= 0:
        end = gl.minimum(rows + (shift + C.right + 1), len_k)
    if C.left >= 0:
        start = rows + (shift - C.left)
    if MASK is not None or C.page > 0:  # over pages constants spill 40 to 150 bytes
        cols = n + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        if MASK is not None:
            seen = MASK(b, h, rows[:, None], cols[None, :], len_q, len_k, reads, (known, keys), hand) & (cols < len_k)[None, :]
        else:
            seen = cols[None, :] < end[:, None]
            if C.left >= 0:
                seen = seen & (cols[None, :] >= start[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    else:
        scores = gl.where(between(start - n, end - n, C.left >= 0, True, N, layout), scores, float("-inf"))
    return scores


@gluon.jit
def scored(scores, n, call, keys, tile, SCORE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """What happens to a score before the mask."""
    if SCORE is not None:
        rows, _, b, h, len_q, len_k, scale, _, _, reads, known = call
        rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
        cols = n + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        if tile is not None:
            scores = SCORE(scores * scale, b, h, rows[:, None], cols[None, :], len_q, len_k, reads, (known, keys, tile), hand)
        else:
            scores = SCORE(scores * scale, b, h, rows[:, None], cols[None, :], len_q, len_k, reads, (known, keys), hand)
    return scores


@gluon.jit
def read_tile(t_ring, index, phase, C: gl.constexpr, layout: gl.constexpr):
    """What the score reads of these queries and keys, waited for, in the layout of the scores; None where it reads nothing."""
    tile = t_ring
    if t_ring is not None:
        tiles, full, _ = t_ring
        mbarrier.wait(full.index(index), phase)
        tile = widened(tiles.index(index).reshape([64, C.n]).load(layout))
    return tile


@gluon.jit
def let_go(shrink, ki, t_ring, C: gl.constexpr, GROUP: gl.constexpr):
    """A tile of keys, and of what a score reads, is done with when `shrink` is there."""
    release_after(shrink, ki, 10, C.readers)
    if t_ring is not None:
        release_after(shrink, ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)


@gluon.jit
def begin(n, call, of, t_ring, index, phase, SCORE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """What a product of queries and keys is added to: 0, or what the score adds. It is read and unpacked while the warpgroup waits for its turn."""
    N: gl.constexpr = layout.instr_shape[1]
    scores = gl.zeros([64, N], gl.float32, layout)
    if C.far:
        scores = by_distance(call[9], n, N, layout)
    elif C.adds:
        scores = added(scores, n, call, of, read_tile(t_ring, index, phase, C, layout), SCORE, C, layout)
    return scores


@gluon.jit
def added(zeros, n, call, keys, tile, SCORE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """What a score adds to the product, before the scale."""
    rows, _, b, h, len_q, len_k, scale, _, _, reads, known = call
    cols = n + gl.arange(0, C.n, layout=gl.SliceLayout(0, layout))
    nothing = zeros * -1.0  # -0: an addition that the compiler leaves out, which of 0 it may not
    if tile is not None:
        given = SCORE(nothing, b, h, rows[:, None], cols[None, :], len_q, len_k, reads, (known, keys, tile), hand)
    else:
        given = SCORE(nothing, b, h, rows[:, None], cols[None, :], len_q, len_k, reads, (known, keys), hand)
    return given * (1.0 / scale)


@gluon.jit
def sides(steps, place, C: gl.constexpr, GROUP: gl.constexpr):
    """How many of the whole key tiles lie behind where the lines of a warpgroup's queries bend (the first ones), there, and before (the last)."""
    top, masked, bare, _, _ = steps
    _, _, tile_m, _, len_q, _, len_k, _ = place
    first = tile_m * C.m + GROUP * C.own
    last, ahead = first + C.own - 1, len_k - len_q
    if C.line == "row":
        first, last = first + ahead, last + ahead
    elif C.line == "i row":
        first, last = first + gl.minimum(ahead, 0), last + gl.maximum(ahead, 0)
    high = top - 1 - masked
    behind, before = bare * 0, bare
    if C.line != "straight":
        if C.right != 0:
            behind = gl.minimum(gl.maximum(high + 1 - gl.cdiv(gl.maximum(last, 0), C.n), 0), bare)
        before = gl.minimum(gl.maximum(first // C.n - (high + 1 - bare), 0), bare - behind)
    return behind, bare - behind - before, before


@gluon.jit
def top_of(scores, top, factor, ROOM: gl.constexpr, GROWS: gl.constexpr):
    """ROOM more than the largest score so far, in base 2, or what is at most GROWS less; and what shrinks all that was summed before."""
    return grown(gl.convert_layout(gl.max(scores, 1), top.type.layout) * factor + ROOM, top, GROWS)


@gluon.jit
def grown(new_top, top, GROWS: gl.constexpr):
    """The larger of them, or what is at most GROWS less; and what shrinks all that was summed before."""
    new_top = gl.maximum(top, new_top)
    if GROWS > 0:
        new_top = gl.where(new_top - top > GROWS, new_top, top)
    return new_top, gl.exp2(top - base_of(new_top))


@gluon.jit
def weigh(scores, top, factor, DTYPE: gl.constexpr, C: gl.constexpr):
    """The weights, two to a word, and sums that stay in a thread, [64, 8]. The four threads of a row meet once, at the end."""
    weights = _weights(scores, top, factor)
    return as_pairs(weights, DTYPE), gl.sum(weights.reshape([64, scores.shape[1] // 8, 8]), 1)


@gluon.jit
def weigh_kept(scores, top, factor, n, drops, DTYPE: gl.constexpr, C: gl.constexpr):
    """`weigh` of keys from `n` on, of which dropout leaves some (`hopper_dropout`): the sums have all."""
    if C.drops:
        N: gl.constexpr = scores.shape[1]
        layout: gl.constexpr = scores.type.layout
        weights = _weights(scores, top, factor)
        sums = gl.sum(weights.reshape([64, N // 8, 8]), 1)
        words = as_pairs(gl.where(kept(n, drops, N, False, layout), weights, 0.0), DTYPE)
    else:
        words, sums = weigh(scores, top, factor, DTYPE, C)
    return words, sums


@gluon.jit
def _weights(scores, top, factor):
    return gl.exp2(scores * factor - gl.convert_layout(base_of(top), gl.SliceLayout(1, scores.type.layout))[:, None])


@gluon.jit
def shrunk(acc, total, shrink, C: gl.constexpr):
    """Output and sums over the largest score so far."""
    acc = scale_rows(acc, gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), C.lazily)
    return acc, total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def clear(v_ring, vi, vp, n, len_k, C: gl.constexpr):
    """Values of keys from `n` on, waited for, with 0 behind the last key: another sequence lies there, or what was in its page, and 0 times NaN is NaN."""
    N: gl.constexpr = C.n
    if n + N > len_k:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        _keep(n + gl.arange(0, N, layout=gl.SliceLayout(1, layout)) < len_k, v_ring, vi, vp, 0, layout)


@gluon.jit
def clear_unseen(v_ring, vi, vp, n, len_k, steps, map_strides, C: gl.constexpr):
    """The same, and for keys that no query of the tile sees, as the map says, 32 in a word: padding may hold anything."""
    if C.padded:
        words = steps[4] + here(map_strides[3]) + n // 32
        for word in gl.static_range(C.n // 32):
            seen = gl.load(words + word)
            if seen != -1:
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
                _keep((seen >> gl.arange(0, 32, layout=gl.SliceLayout(1, layout))) & 1 != 0, v_ring, vi, vp, 32 * word, layout)
    elif C.uneven:
        clear(v_ring, vi, vp, n, len_k, C)


@gluon.jit
def _keep(real, v_ring, vi, vp, FIRST: gl.constexpr, layout: gl.constexpr):
    """Of a tile's values from the key FIRST on those that are `real`, the others 0."""
    values, full, _ = v_ring
    mbarrier.wait(full.index(vi), vp)
    tile = values.index(vi).reshape([values.shape[-2], values.shape[-1]]).slice(FIRST, real.shape[0], dim=0)
    tile.store(gl.where(real[:, None], tile.load(layout), 0.0).to(values.dtype))
    fence_async_shared()


# ---- host

ROOM = 226 << 10  # bytes of shared memory, 227 KB less what barriers take


def rounds(tiles, width: int, width_v: int, own: int, taken: int, size: int = 2) -> int:
    """Tiles of queries that there is room for beside K, V, an output of `own` columns in a buffer of its own, and `taken` bytes: two or one. `size`: bytes of
    a number of Q, K and V."""
    queries, keys = 64 * tiles.groups, tiles.n * tiles.stages
    return 2 if size * (2 * queries * width + keys * (width + width_v)) + 2 * queries * own + taken <= ROOM else 1


def tile_of(p: Attention) -> PairTile | None:
    """What the third ring brings."""
    return p.score and pair_tile(p.score.text)


def pack_of(p: Attention, m: int) -> int:
    """Heads side by side in tiles of `m` rows: the group's, where that makes more than an eighth of the tiles less, or 1.

    Not where what a score reads comes as a tile of one head's queries and keys, or is one key's and head's, nor under a map of a head's tiles, nor where
    weights are dropped, which `hopper_dropout` knows by rows that are queries side by side.
    """
    pack, len_q = triton.next_power_of_2(p.group), p.len_q
    by_head = isinstance(p.mask, Traced) and reads(p.mask.text, "h")
    if pack > 64 or by_head or "dropout" in p.extras or (p.score and (tile_of(p) or far_of(p) is not None or of_heads_and_keys(p.score.text))):
        return 1
    if p.tokens:  # as if all sequences were equally long, which a result that does not depend on others must not
        if "batch_invariant" in p.extras:
            return pack if p.page and pack == p.group else 1  # no tiles more, whatever the lengths
        len_q = triton.cdiv(p.tokens, max(1, p.batch))
    return pack if 8 * triton.cdiv(len_q * pack, m) * p.kv_heads < 7 * triton.cdiv(len_q, m) * p.heads else 1


def query_tiles(p: Attention, rows: int, pack: int = 1) -> int:
    """Tiles of `rows` rows that hold a head's queries, or those of `pack` heads, of all sequences; at most so many of packed queries over pages."""
    most = p.batch * triton.cdiv(p.len_q * pack, rows)
    return min(most, p.tokens * pack // rows + p.batch) if p.page and p.tokens else most


def key_heads_together(p: Attention, keys: int, heads: int) -> int:
    """Key heads whose tiles go side by side, of `heads`: of a packed batch two at least, for the longest tiles of the last head alone would be begun late.

    keys   of a head that are in flight at once.
    """
    return max(together(p, 3 * keys, heads), min(heads, 1 + (p.keys == "packed")))


def order_of_keys(p: Attention, n: int, most: int, keys: int = 0, launches: int = 1) -> str:
    """How programs take the tiles of `n` keys, as `explain` says it; `keys` where not all of a head's are in flight."""
    heads, tiles = p.batch * p.kv_heads, triton.cdiv(p.len_k, n)
    if p.keys == "packed":  # one list for all sequences
        heads, tiles = p.kv_heads, min(p.batch * tiles, (p.tokens_k or p.tokens) // n + p.batch)
        keys = keys or p.tokens_k or p.tokens
    heads = triton.cdiv(heads, launches)
    each = order(p, tiles * heads, most, key_heads_together(p, keys or p.len_k, heads), True)
    return f"{launches} times " * (launches > 1) + each


def by_groups(t, kv_heads: int):
    """[batch, heads, len, dim] as [batch, kv_heads, len, group, dim]: rows of a tile are a query's heads, then the next one's."""
    return t.unflatten(1, (kv_heads, -1)).transpose(2, 3)
