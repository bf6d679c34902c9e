"""A bias of keys on Hopper, s = scale q k + bias[j], by the tensor cores: a query has 16 columns more, and so has a key.

Of a tile's keys the copy engine brings the bias three times beside K, from the tensor as it is, and 0 in 13 rows that the tensor does not have. Each
query's columns there are three numbers whose sum is 1 / scale, to 24 bits; none is 0, so that a bias of -inf stays one. The product of queries and keys
begins with that one: at d128 64 cycles of the tensor cores' 1,024 a step of a warpgroup, and no instruction a score; added by the warps it is 96 of 438.
"""

from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.lines import ramps
from onchip.kernels.attention.pairs import pair_view
from onchip.kernels.attention.texts import key_tile
from onchip.kernels.hopper import describe, gl, gluon, ring, warpgroup_mma

COPIES, WIDE = 3, 16  # a product takes 16 columns at once
COLUMNS = gl.constexpr(WIDE)
LEAST = gl.constexpr(2.0**-24)  # float16's, and of 1 / scale, at least 1/2, what float32 rounds away


# ---- device


@gluon.jit
def key_ring(desc, bias_desc, scale, C: gl.constexpr):
    """K's ring; with a bias or lines what stands beside it is the third part: each row's columns, and those of keys that they are multiplied with."""
    keys = ring(desc, C.stages, 0, C.parts, 2 if C.biased else C.fillers)
    if C.biased:
        DTYPE: gl.constexpr = bias_desc.dtype
        KEPT: gl.constexpr = -65536 if DTYPE == gl.bfloat16 else -8192  # noqa: SIM300 (DTYPE varies): float32's bits that a half has
        wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
        rest = 1.0 / scale
        high = ((rest.to(gl.int32, bitcast=True) - 1) & KEPT).to(gl.float32, bitcast=True)  # below it
        rest -= high
        middle = ((rest.to(gl.int32, bitcast=True) - 1) & KEPT).to(gl.float32, bitcast=True)
        rest -= middle
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, wide))
        each = gl.maximum(gl.where(columns == 0, high, gl.where(columns == 1, middle, rest)), LEAST)
        each = gl.where(columns < 3, each, 0.0)[None, :] + gl.zeros([64, COLUMNS], gl.float32, wide)
        of_rows = gl.allocate_shared_memory(DTYPE, [64, COLUMNS], gl.NVMMASharedLayout(32, 16, 2))
        of_rows.store(each.to(DTYPE))
        buffers = gl.allocate_shared_memory(DTYPE, [C.stages] + bias_desc.block_type.shape, bias_desc.layout)  # noqa: RUF005 (device code)
        keys = (keys[0], keys[1], (of_rows, buffers))
    elif C.line != "":
        keys = (keys[0], keys[1], ramps(C))
    return keys


@gluon.jit
def product(q, kt, keys, index, start, PART: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """The product of queries and keys, on its way, behind `start`, the bias or the lines."""
    LINE: gl.constexpr = PART == "before" or PART == "behind"
    SIDE: gl.constexpr = 1 if PART == "behind" else 0
    if C.biased:
        columns, rows = keys[2]
        start = warpgroup_mma(columns, rows.index(index).reshape([COLUMNS, C.n]), start, use_acc=False, is_async=True)
    elif LINE:
        columns, rows = keys[2]
        start = warpgroup_mma(columns.index(GROUP), rows.index(SIDE).permute((1, 0)), start, use_acc=False, is_async=True)
    return warpgroup_mma(q, kt, start, use_acc=C.adds or C.biased or LINE, is_async=True)


# ---- host


def taken_out(p: Attention, x: Operands, n: int):
    """The call without a bias that the tensor cores add, its rows for tiles of `n` keys, and how far a sequence and a head are; None where there is none.

    Of a scale whose reciprocal three of float16's numbers can say. Of small pages other warps bring the keys than the one that would bring the bias: there
    it is added as any score is.
    """
    tile = key_tile(p.score.text) if p.score and not p.page % 8 and 2.0**-15 <= x.scale <= 2 else None
    if tile is None:
        return p, x, None, None
    rows, steps = pair_view(x.score[tile.tensor].unsqueeze(-2), tile.axes)
    return p._replace(score=None), x._replace(score=()), describe(rows.expand(-1, -1, COPIES, -1), WIDE, n), steps


def room_of(tiles, biased: bool, line: str, right: int) -> int:
    """Bytes of shared memory."""
    rows = 64 + tiles.n * tiles.stages if biased else (64 * tiles.groups + tiles.n * (1 + (right != 0))) if line else 0
    return 2 * WIDE * rows


__all__ = ["key_ring", "product", "room_of", "taken_out"]
