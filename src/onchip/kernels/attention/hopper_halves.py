"""What a causal mask or a window hides of a tile's keys from all rows of one warpgroup, and not from another's, is left out: tiles, and halves of them.

Two warpgroups' tile of 128 queries has half a tile of 128 keys to the right of the upper one's diagonal, and under a window as much to the left of the
lower one's; of tiles of 64 keys it is a whole one, and of 192 queries both. A whole tile is waited for and let go, so that its buffers and the turns go
round. Of half a tile the product of queries and keys is half as wide, and there are half as many exponentials; the weights of the other half are zeros, so
that the output's product is that of all tiles.
"""

from onchip.kernels.attention.hopper_tiles import (
    ONE_GROUP,
    PAIRS_LET_GO,
    begin,
    hide,
    of_keys,
    read_tile,
    scored,
    top_of,
    weigh,
    weigh_kept,
)
from onchip.kernels.attention.key_bias import product
from onchip.kernels.attention.tile import key_span
from onchip.kernels.hopper import advance, gl, gluon, hear, mbarrier, release, take_turn, turn_over, warpgroup_mma_wait


@gluon.jit
def hidden_of(place, steps, C: gl.constexpr):
    """What a band hides of a tile's keys from all rows of a warpgroup, 10 bits for each: how many of the first tiles (4) and of the last (4), the right half of
    the first one that is left, and the left half of the last. The copying warp tells it: found by each warpgroup, causal 16k at d128 was 1.4% slower."""
    N: gl.constexpr = C.n
    GROUPS: gl.constexpr = C.groups
    _, _, tile_m, _, _, _, len_k, shift = place
    top, masked, bare, low, _row = steps
    last = top - masked - bare - low
    hidden = top * 0
    for group in gl.static_range(GROUPS):
        own = tile_m * C.m + group * C.own + shift
        start, end = key_span(own, own + C.own - 1, len_k, C.left, C.right)
        mine = top
        if group < GROUPS - 1 and C.right >= 0:
            mine = gl.maximum(gl.cdiv(end, N) - 1, last)
            hidden += (top - mine) << 10 * group
            hidden += gl.where(end <= mine * N + N // 2, 256 << 10 * group, 0)
        if group > 0 and C.left >= 0:
            lowest = gl.minimum(start // N, mine)
            hidden += (lowest - last) << 10 * group + 4
            hidden += gl.where((mine > lowest) & (start >= lowest * N + N // 2), 512 << 10 * group, 0)
    return hidden


@gluon.jit
def told_of(message, turn, C: gl.constexpr, WARPS: gl.constexpr = 4):
    """`hidden_of` this program's next tile, or which part of its keys it is (`hopper_parts`)."""
    hidden = 0
    if C.hides or C.split != 1:
        hidden = hear(message, turn, 7, WARPS)
    return hidden


@gluon.jit
def own_steps(steps, hidden, HALVES: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup's of a tile's `key_steps`, and what `hidden_of` says of it: how many tiles come before these, how many after, and whether the right half of
    the first is hidden, and of how many, none or one, the left half: its last."""
    top, masked, bare, low, row = steps
    early, late, right, left = 0, 0, False, 0
    if C.hides and C.groups - 1 > GROUP and C.right >= 0:
        early = hidden >> 10 * GROUP & 15
        if HALVES:
            right = (hidden >> 10 * GROUP & 256) > 0
        more = gl.maximum(early - masked, 0)  # under a window that is narrower than two tiles
        top, masked, low = top - early, masked - early + more, low - more
    if C.hides and GROUP > 0 and C.left >= 0:
        late = hidden >> 10 * GROUP + 4 & 15
        if HALVES:
            left = hidden >> 10 * GROUP + 9 & 1
        low -= late
    return (top, masked, bare, low, row), early, late, right, left


@gluon.jit
def pass_over(count, cursors, k_ring, v_ring, t_ring, C: gl.constexpr, GROUP: gl.constexpr):
    """The cursors after `count` tiles of which this warpgroup's queries see nothing, if it has any: it lets them go, which costs no product."""
    _, k_full, _ = k_ring
    _, v_full, _ = v_ring
    ki, kp, vi, vp = cursors
    for _t in range(count):
        mbarrier.wait(k_full.index(ki), kp)
        take_turn(GROUP, C.groups)
        turn_over(GROUP, C.groups)
        release(ki, 10, C.readers)
        if t_ring is not None:
            mbarrier.wait(t_ring[1].index(ki), kp)
            release(ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)
        ki, kp = advance(ki, kp, C.stages)
        mbarrier.wait(v_full.index(vi), vp)
        release(vi, 10 + C.stages, C.readers)
        vi, vp = advance(vi, vp, C.stages)
    return ki, kp, vi, vp


@gluon.jit
def among(words, RIGHT: gl.constexpr, others):
    """Words of all columns of a tile, as `others` are, or of half of them, beside zeros: no instruction."""
    COLUMNS: gl.constexpr = others.shape[1]
    if words.shape[1] < COLUMNS:
        none = words * 0
        if RIGHT:
            both = gl.join(none, words)
        else:
            both = gl.join(words, none)
        words = both.permute((0, 2, 1)).reshape([64, COLUMNS])
    return gl.convert_layout(words, others.type.layout)


@gluon.jit
def first_tile(n, ki, kp, own, DTYPE: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, KEYS: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
           s_layout: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Weights of the first tile of keys, which holds the last ones and (of) the diagonal, what they are taken over, and their sums. `layout`: of its scores,
    or of the left half's, where the mask hides the others."""
    q, k_ring, _, t_ring, _, call, _, _, drops = own
    keys, _, _ = k_ring
    N: gl.constexpr = C.n
    SEEN: gl.constexpr = layout.instr_shape[1]
    gain = call[7]
    of = of_keys(n, call, KEYS, C)
    start = begin(n, call, of, t_ring, ki, kp, SCORE, C, layout)
    take_turn(GROUP, C.groups)
    kt = keys.index(ki).reshape([N, keys.shape[-1]]).slice(0, SEEN, 0).permute((1, 0))
    scores = product(q, kt, k_ring, ki, start, "edge", C, GROUP)
    turn_over(GROUP, C.groups)
    tile = read_tile(None if C.adds else t_ring, ki, kp, C, layout)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release(ki, 10, C.readers)
    if not C.adds:
        scores = scored(scores, n, call, of, tile, SCORE, C, layout)
    scores = hide(scores, n, call, of, MASK, C, layout)
    if C.cap > 0:
        top = gl.full([64], 1.0 * C.cap, gl.float32, gl.SliceLayout(1, s_layout))
    else:
        top, _shrink = top_of(scores, gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout)), gain, C.room, 0.0)
    if t_ring is not None:
        release(ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)
    words, sums = weigh_kept(scores, top, gain, n, drops, DTYPE, C)
    like, total = weigh(gl.zeros([64, N], gl.float32, s_layout), top, gain, DTYPE, C)  # their layouts alone
    return among(words, False, like), top, gl.convert_layout(sums, total.type.layout)
