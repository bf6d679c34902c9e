"""Which weights dropout keeps, made in the registers in which a warpgroup's scores are.

`core/philox.py` says which sixteen weights share a call of Philox. A thread of an accumulator has rows r and r + 8, and of each eight columns two side by
side: eight of the sixteen, whether rows are queries or keys. The other eight are the lane's that has the row beside it. So each of the two makes the call of
one block of 16 columns, of which there are two, and gets the other's words from its neighbour. A word is turned, compared with the bar, and the weight is
cleared: three instructions a weight, and 2.5 that make the words.

A tile [64, N] is taken apart as [4, 2, 8, N // 32, 2, 2, 4, 2]: a row's bits of value 16 and up, 8, and below 8; a column's of 32 and up, 16, 8, 2 and 4, 1.
"""

from onchip.core.philox import MULTIPLIERS, ROUNDS, WEYL, bar
from onchip.core.problem import Operands
from onchip.kernels.hopper import gl, gluon, here, uniform, wide_product


def dropout_of(x: Operands) -> tuple | None:
    """What a kernel gets of a call's dropout: seed and offset, the bar, and by how much weights grow."""
    return (x.state, bar(x.drop), 1 / (1 - x.drop)) if x.drop else None


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


ROUNDS = gl.constexpr(ROUNDS)
M0, M1 = (gl.constexpr(_signed(word)) for word in MULTIPLIERS)
W0, W1 = (gl.constexpr(_signed(word)) for word in WEYL)
ROW_8, COLUMN_32, COLUMN_16, COLUMN_8, COLUMN_1 = (gl.constexpr(dim) for dim in (1, 3, 4, 5, 7))


@gluon.jit
def drops_of(dropout, row, b_h, C: gl.constexpr):
    """What `kept` wants of rows from `row` on, a multiple of 16, of a head of all sequences': these, the bar, the seed in two words, and the offset.

    dropout   `dropout_of`.
    """
    found = (row, b_h)  # of a call without, where nobody looks
    if C.drops:
        seed, offset = gl.load(dropout[0]), gl.load(dropout[0] + 1)
        found = (row, b_h, dropout[1], uniform(seed.to(gl.int32)), uniform((seed >> 32).to(gl.int32)), uniform(offset.to(gl.int32)))
    return found


@gluon.jit
def growth(dropout, C: gl.constexpr):
    """By how much weights grow that stay."""
    found = 1.0
    if C.drops:
        found = dropout[2]
    return found


@gluon.jit
def kept(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """Of weights [64, N] those that stay, of columns from a multiple of 16 on. OF_KEYS: rows are keys."""
    numbers = _numbers(column, drops, N, OF_KEYS, layout)
    return gl.convert_layout((numbers >= drops[2]).reshape([64, N]), layout)


@gluon.jit
def kept_bits(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """The same of [64, 64], a thread's 32 bits in a word: made where this stands, before there are sums that need registers."""
    gl.static_assert(N == 64)
    stays = _numbers(column, drops, N, OF_KEYS, layout) >= drops[2]
    bits = gl.where(stays, 1 << _places(N, layout), 0)
    bits = gl.sum(gl.sum(gl.sum(gl.sum(gl.sum(bits, COLUMN_1), COLUMN_8), COLUMN_16), COLUMN_32), ROW_8)  # [4, 8, 4]: each thread's own
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_bits(bits, N: gl.constexpr, layout: gl.constexpr):
    """What `kept_bits` says of each weight."""
    places = _places(N, layout)
    own: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(7, places.type.layout)))))
    bits = gl.convert_layout(bits, own).expand_dims(1).expand_dims(3).expand_dims(4).expand_dims(5).expand_dims(7)
    return gl.convert_layout(((bits & (1 << places)) != 0).reshape([64, N]), layout)


@gluon.jit
def _places(N: gl.constexpr, layout: gl.constexpr):
    """Which bit is a weight's."""
    tile = gl.zeros([64, N], gl.int32, layout).reshape([4, 2, 8, N // 32, 2, 2, 4, 2])
    low = _along(tile, ROW_8) + 2 * _along(tile, COLUMN_1) + 4 * _along(tile, COLUMN_8)
    return low + 8 * _along(tile, COLUMN_16) + 16 * _along(tile, COLUMN_32)


@gluon.jit
def _numbers(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """The numbers that decide, int32 [4, 2, 8, N // 32, 2, 2, 4, 2]."""
    row, b_h, _, k0, k1, offset = drops
    row = here(row)  # a tile that is done again makes them again: to keep them costs more
    tile = gl.zeros([64, N], gl.int32, layout).reshape([4, 2, 8, N // 32, 2, 2, 4, 2])
    call: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(7, tile.type.layout))))
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, call))))[:, None][:, :, None][:, :, :, None]
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, call))))[None, :][:, :, None][:, :, :, None]
    block = gl.arange(0, N // 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, call))))[None, :][:, None, :][:, :, :, None]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, call))))[None, :][:, None, :][:, :, None, :]
    none = gl.zeros([4, 8, N // 32, 4], gl.int32, call)
    odd = (lane & 1) + none != 0
    rows, columns = row + 16 * warp + (lane & 6) + none, column + 32 * block + 16 * (lane & 1) + 2 * pair + none
    if OF_KEYS:
        w0, w2, w1, w3 = _philox(rows, columns, b_h + none, offset + none, k0, k1)  # of columns of an even number, and an odd one
    else:
        w0, w1, w2, w3 = _philox(columns, rows, b_h + none, offset + none, k0, k1)
    left, right = _of_both(w0, w2, odd, tile), _of_both(w1, w3, odd, tile)
    words = gl.where(_along(tile, COLUMN_1) == 0, left, right)
    turns = 8 * _along(tile, ROW_8) + 16 * _along(tile, COLUMN_8) if OF_KEYS else 16 * _along(tile, ROW_8) + 8 * _along(tile, COLUMN_8)
    return gl.inline_asm_elementwise("shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [words, turns], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _of_both(even_row, odd_row, odd, tile):
    """The word of a lane's row in its own call and in its neighbour's, beside each of its weights. An odd lane has made the second block of 16 columns."""
    mine, other = gl.where(odd, odd_row, even_row), gl.where(odd, even_row, odd_row)
    other = gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 4, 31, -1;", "=r,r", [other], dtype=gl.int32, is_pure=False, pack=1)
    first, second = gl.where(odd, other, mine), gl.where(odd, mine, other)
    return gl.where(_along(tile, COLUMN_16) == 0, _everywhere(first), _everywhere(second))


@gluon.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """The four words, int32."""
    for _ in gl.static_range(ROUNDS):
        first, second = wide_product(c0, gl.to_tensor(M0)), wide_product(c2, gl.to_tensor(M1))
        c0, c1 = (second >> 32).to(gl.int32) ^ c1 ^ k0, second.to(gl.int32)
        c2, c3 = (first >> 32).to(gl.int32) ^ c3 ^ k1, first.to(gl.int32)
        k0 = k0 + W0
        k1 = k1 + W1
    return c0, c1, c2, c3


@gluon.jit
def _everywhere(words):
    """A call's word beside each of its weights: no instruction."""
    return words.expand_dims(1).expand_dims(4).expand_dims(5).expand_dims(7)


@gluon.jit
def _along(tile, DIM: gl.constexpr):
    """0, 1, .. along one dimension of a tile of zeros of eight: of those that are all a thread's own, constants of the code."""
    layout: gl.constexpr = tile.type.layout
    alone: gl.constexpr = _all_but(DIM, layout)
    return _beside(gl.arange(0, tile.shape[DIM], layout=alone), DIM) + tile


@gluon.constexpr_function
def _all_but(dim: int, layout):
    """The layout of one of eight dimensions."""
    for other in reversed(range(8)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _beside(x, DIM: gl.constexpr):
    for dim in gl.static_range(8):
        if dim != DIM:
            x = x.expand_dims(dim)
    return x
