"""ALiBi's lines on Hopper, s = scale q k + slope (j - place) and the like (Press et al., 2022), by the tensor cores: a query has 16 columns more, as with
`key_bias`, and so has a key.

On one side of where a query's line bends (`texts.line_of`) it is a slope, times how far a key is from an end of its tile, and a height, that of the line at
this end. How far it is, whatever the tile, is an integer of at most 128: three columns of the same shared memory for all tiles. Each query's columns there are
three numbers in bfloat16 whose sum is its slope, to 24 bits, made once for a side of a tile of queries. The height is of a row, as a maximum is, and goes
where that goes: no instruction a score, where there were three. The end is the one nearer to the bend, whose weights count most.
"""

from onchip.kernels.attention.hopper_tiles import base_of, grown, hand
from onchip.kernels.hopper import fence_async_shared, gl, gluon

WIDE = gl.constexpr(16)  # a product takes 16 columns at once
KEPT = gl.constexpr(-65536)  # float32's bits that bfloat16 has


# ---- device


@gluon.jit
def ramps(C: gl.constexpr):
    """Room for the columns of each warpgroup's queries, [groups, 64, 16], and the keys', [1 or 2, n, 16]: before the bend, from the end of a tile, -n to -1,
    and behind it, from its beginning."""
    SIDES: gl.constexpr = 1 if C.right == 0 else 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    keys = gl.allocate_shared_memory(gl.bfloat16, [SIDES, C.n, WIDE], shared)
    one = gl.arange(0, C.n, layout=gl.SliceLayout(1, layout))[:, None]
    three = gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))[None, :] < 3
    keys.index(0).store(gl.where(three, one - C.n, 0).to(gl.bfloat16))
    if SIDES > 1:
        keys.index(1).store(gl.where(three, one, 0).to(gl.bfloat16))
    return gl.allocate_shared_memory(gl.bfloat16, [C.groups, 64, WIDE], shared), keys


@gluon.jit
def _line_at(n, call, SCORE: gl.constexpr):
    """What a score function adds at key `n`, one for each row."""
    rows, _, b, h, len_q, len_k, _, _, _, reads, known = call
    nothing = (rows * 0).to(gl.float32)[:, None]
    line = SCORE(nothing, b, h, rows[:, None], n, len_q, len_k, reads, (known, ()), hand).reshape([64])
    return gl.convert_layout(line, rows.type.layout)


@gluon.jit
def draw(n, k_ring, call, SCORE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """The columns of a warpgroup's queries, whose lines a tile of keys from `n` on shows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    slope = (_line_at(n + C.n, call, SCORE) - _line_at(n, call, SCORE)) / (C.n * call[6])
    rest = gl.convert_layout(slope, gl.SliceLayout(1, layout))[:, None]
    high = (rest.to(gl.int32, bitcast=True) & KEPT).to(gl.float32, bitcast=True)
    rest -= high
    middle = (rest.to(gl.int32, bitcast=True) & KEPT).to(gl.float32, bitcast=True)
    column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))[None, :]
    each = gl.where(column == 0, high, gl.where(column == 1, middle, gl.where(column == 2, rest - middle, 0.0)))
    k_ring[2][0].index(GROUP).store(each.to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def height_of(n, call, SCORE: gl.constexpr, PART: gl.constexpr, C: gl.constexpr):
    """What a tile of keys from `n` on lacks of its lines, [64], in base 2."""
    if PART == "before":
        n += C.n
    return _line_at(n, call, SCORE) * call[7]


@gluon.jit
def below(top, height):
    """What weights are taken over, less what their scores lack."""
    return base_of(top) - height


@gluon.jit
def top_above(scores, top, factor, height, ROOM: gl.constexpr, GROWS: gl.constexpr):
    """`top_of` of them."""
    return grown(gl.max(scores, 1) * factor + height + ROOM, top, GROWS)


__all__ = ["below", "draw", "height_of", "ramps", "top_above"]
