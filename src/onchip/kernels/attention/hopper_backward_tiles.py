"""What the Hopper backward kernels do to a tile: which others it needs, where they lie, its weights and their slopes in registers, the way out.

A tile's rows are keys (`C.of_keys`), past which queries stream, or queries, past which keys do; `C` is the kernel's `Shape`. In registers rows are first.
"""

import math

from onchip.kernels.attention.hopper_dropout import of_bits
from onchip.kernels.attention.hopper_tiles import between, map_entry, map_row
from onchip.kernels.attention.statistics import LATE
from onchip.kernels.attention.tile import inner_span, key_span, query_span
from onchip.kernels.hopper import as_other, fence_async_shared, gl, gluon, here, tma_store, wide_product

LOG2E = math.log2(math.e)
PHASES = gl.constexpr(LATE)
READERS = gl.constexpr(288)  # threads at a release: of two warpgroups and the copying warp


# ---- device: what there is to do


@gluon.jit
def steps_of(place, head, map_ptr, map_strides, C: gl.constexpr):
    """The tiles that stream past a tile, in one query head: how many need the mask, how many do not; how the steps find them; and the row of the map.

    Those that need it come first, at both ends of the others, so that there is one loop for them.
    """
    M: gl.constexpr = C.m
    b, _, tile, _, len_q, _, len_k, shift = place
    row = tile  # without a map nobody looks
    if C.mapped:
        row = map_row(map_ptr, map_strides, b, head, tile)
        masked = gl.load(row)
        bare = gl.load(row + 1)
        first = masked * 0
        before = masked
    elif C.of_keys:
        first, inner, outer, last = query_span(tile * C.n, shift, len_q, len_k, C.left, C.right, C.m, C.n, C.packed)
        before = (inner - first) // M
        bare = (outer - inner) // M
        masked = before + gl.cdiv(last - outer, M)
        first = first // M
    else:
        N: gl.constexpr = C.n
        row_first, row_last = tile * M + shift, tile * M + M - 1 + shift
        first, last = key_span(row_first, row_last, len_k, C.left, C.right)
        inner, outer = inner_span(row_first, row_last, len_k, C.left, C.right, N)
        first = first // N
        last = gl.maximum(gl.cdiv(last, N), first)
        inner = gl.minimum(gl.maximum(inner // N, first), last)
        outer = gl.minimum(gl.maximum(outer // N, inner), last)
        before = inner - first
        bare = outer - inner
        masked = before + last - outer
    return masked, bare, before, first, row


@gluon.jit
def unseen(place, steps, C: gl.constexpr, GROUP: gl.constexpr):
    """How many of the first tiles of queries see the keys of the first warpgroup alone, and how many of the last ones that need the mask those of the
    second: half a tile of 64 queries x 128 keys at the diagonal, and as much at the other end of a window."""
    _, _, tile, _, _, _, _, shift = place
    masked, bare, before, first, _ = steps
    early, late, middle = 0, 0, tile * C.n + 64 - shift
    if C.blind and GROUP == 1 and C.right >= 0:
        early = gl.minimum(gl.maximum(gl.maximum(middle - C.right, 0) // C.m - first, 0), before)
    if C.blind and GROUP == 0 and C.left >= 0:
        late = gl.minimum(gl.maximum(first + masked + bare - gl.cdiv(gl.maximum(middle + C.left, 0), C.m), 0), masked - before)
    return early, late


@gluon.jit
def step_tile(x, steps, map_strides, C: gl.constexpr):
    """The tile of step `x`."""
    masked, bare, before, first, row = steps
    if C.mapped:
        tile = map_entry(x, masked, row, map_strides)
    elif C.left >= 0 or C.packed or not C.of_keys:
        tile = first + x + gl.where(x < before, 0, gl.where(x < masked, bare, before - masked))
    else:
        tile = first + x
    return tile


# ---- device: a warpgroup


@gluon.jit
def clear(tile, count, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Rows from `count` on are 0 in a tile that both warpgroups clear: another sequence lies there, and 0 times NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _keep(tile, _half(ROWS, GROUP, layout) < count, GROUP, layout)


@gluon.jit
def clear_unseen(tile, place, group, map_ptr, map_strides, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """The same of keys that stay, where no query of the group's heads sees them, as the map says, 32 in a word: padding may hold anything."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = _half(ROWS, GROUP, layout)
    seen = key * 0
    for member in range(group):
        row = map_row(map_ptr, map_strides, place[0], place[1] * group + member, place[2])
        seen = seen | (gl.load(row + here(map_strides[3]) + key // 32) >> (key % 32))
    _keep(tile, seen & 1 != 0, GROUP, layout)


@gluon.jit
def clear_unseen_of(tile, first, steps, map_strides, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """The same of keys from `first` on that pass by, where no query of the tile that stays sees them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = first + _half(ROWS, GROUP, layout)
    _keep(tile, (gl.load(steps[4] + here(map_strides[3]) + key // 32) >> (key % 32)) & 1 != 0, GROUP, layout)


@gluon.jit
def _half(ROWS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """The rows that a warpgroup clears."""
    return GROUP * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, layout))


@gluon.jit
def _keep(tile, real, GROUP: gl.constexpr, layout: gl.constexpr):
    """Of the rows that a warpgroup clears those that are `real`, the others 0."""
    half: gl.constexpr = real.shape[0]
    mine = tile.slice(GROUP * half, half, dim=0)
    mine.store(gl.where(real[:, None], mine.load(layout), 0.0).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def start(zeros, values, col: gl.constexpr):
    """What sums over [keys, queries] begin with, so that `values` [queries] are taken off."""
    return zeros - values.reshape([zeros.shape[1]]).load(col)[None, :]


@gluon.jit
def signed(p, bits):
    """P', which is P with the weights negated that dropout does not keep."""
    M: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    return gl.where(of_bits(bits, M, layout), p, -p)


@gluon.jit
def d_scores(dp, p, sloped, delta, SCORE: gl.constexpr):
    """dS, where dropout of probability r keeps the weights whose Z is 1: with P' (`signed`) and a delta that is multiplied by 1 - r already

        dS = P (Z dP / (1 - r) - delta) = (max(P', 0) dP - |P'| (1 - r) delta) / (1 - r),

    of which the last factor is dQ's and dK's at their ends. `sloped`: P times the derivative of the score.
    """
    if SCORE is None:
        ds = gl.maximum(p, 0.0) * dp - gl.abs(p) * delta[None, :]
    else:
        ds = gl.where(p > 0.0, sloped, 0.0) * dp - sloped * delta[None, :]
    return ds


@gluon.jit
def _of_columns(other, C: gl.constexpr, layout: gl.constexpr):
    """The queries, or keys, that are the columns of a tile of scores, from `other` on."""
    return (other + gl.arange(0, C.m if C.of_keys else C.n, layout=gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def _seen(rows, other, place, h, reads, MASK: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Which scores the mask shows."""
    b, _, _, _, len_q, _, len_k, shift = place
    N: gl.constexpr = C.m if C.of_keys else C.n
    if MASK is not None:
        if C.of_keys:
            i, j = _of_columns(other, C, layout), rows[:, None]
        else:
            i, j = rows[:, None], _of_columns(other, C, layout)
        seen = (j < len_k) & MASK(b, h, i, j, len_q, len_k, reads)
        if C.of_keys:
            seen = seen & (i < len_q)
    elif C.of_keys:  # a key's queries
        end = rows * 0 + (len_q - other)
        if C.left >= 0:
            end = gl.minimum(rows - (shift - C.left - 1 + other), end)
        if C.right >= 0:
            start = gl.where(rows < len_k, rows - (shift + C.right + other), N)
            seen = between(start, end, True, C.packed or C.left >= 0, N, layout)
        else:
            seen = (rows < len_k)[:, None]
            if C.packed or C.left >= 0:
                seen = seen & between(end, end, False, True, N, layout)
    else:
        start, end = rows + (shift - C.left - other), rows * 0 + (len_k - other)
        if C.right >= 0:
            end = gl.minimum(rows + (shift + C.right + 1 - other), end)
        seen = between(start, end, C.left >= 0, True, N, layout)
    return seen


@gluon.jit
def weights(s, other, h, lses, index, call, place, MASK: gl.constexpr, SCORE: gl.constexpr, SCORE_GRAD: gl.constexpr, EDGE: gl.constexpr,
            C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """P, and P times the derivative of the score. EDGE: they need the mask. `s` is less LSE already, unless a function of the scores is in between;
    `lses` are in shared memory, buffer `index`, where rows are keys, else in registers."""
    scale, gain, reads = call[0], call[1], call[2]
    b, _, tile, _, len_q, _, len_k, _ = place
    i = _of_columns(other, C, layout)
    own = tile * (C.n if C.of_keys else C.m) + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    j = own[:, None]
    if not C.of_keys:
        i, j = j, i
    if SCORE is not None:
        s = s * scale
        scored = SCORE(s, b, h, i, j, len_q, len_k, reads[1]) * gain
        if C.of_keys:
            p = gl.exp2(scored - lses.index(index).reshape([C.m]).load(gl.SliceLayout(0, layout))[None, :])
        else:
            p = gl.exp2(scored - lses[:, None])
    else:
        p = gl.exp2(s * scale)
    if EDGE:
        seen = _seen(own, other, place, h, reads[0], MASK, C, layout)
        p = gl.where(seen, p, 0.0)
    sloped = p
    if SCORE is not None:
        sloped = SCORE_GRAD(s, p, b, h, i, j, len_q, len_k, reads[1], (), 1)
        if EDGE:
            sloped = gl.where(seen, sloped, 0.0)
    return p, sloped


@gluon.jit
def send(desc, ptr, heads, sums, factor, buffer, place, DIM: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """The gradients of a warpgroup's rows, `factor` times sums of 128 columns each or of all, by way of `buffer`, which is free. `heads`: of all rows."""
    b, head, tile, start_q, len_q, start_k, len_k, _ = place
    if C.of_keys:
        first, begin, length = tile * C.n + GROUP * 64, start_k, len_k
    else:
        first, begin, length = tile * C.m + GROUP * 64, start_q, len_q
    shared = as_other(buffer, desc.dtype, desc.block_type.shape, desc.layout)
    WIDTH: gl.constexpr = desc.block_type.shape[-1]
    flat = shared.reshape([64, WIDTH])
    for n in gl.static_range(len(sums)):
        flat.slice(128 * n, sums[n].shape[1], dim=1).store((sums[n] * factor).to(desc.dtype))
    if C.packed:  # the copy engine does not know where a sequence ends
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        at = ptr + (wide_product(begin + rows, here(heads))[:, None] + head) * DIM + dims[None, :]
        gl.store(at, flat.load(layout), mask=(rows < length)[:, None] & (dims < DIM)[None, :])
    else:
        fence_async_shared()
        tma_store(desc, [b, head, first, 0], shared)
