"""Which weights dropout keeps, made in the registers in which a warpgroup's scores are.

`core/philox.py` says which sixteen weights share a call of Philox. A thread of an accumulator has rows r and r + 8, and of each eight columns two side by
side: eight of the sixteen, whether rows are queries or keys, so that nothing goes from thread to thread. The other eight are made by the lanes that have the
row beside it, from the same call. An instruction turns a word, one compares it, one clears the weight.
"""

from onchip.core.philox import MULTIPLIERS, ROUNDS, WEYL, bar
from onchip.core.problem import Operands
from onchip.kernels.hopper import gl, gluon, here, uniform, wide_product


def dropout_of(x: Operands) -> tuple:
    """What a kernel gets of a call's dropout: seed and offset, the bar, and by how much weights grow."""
    return x.state, bar(x.drop), 1 / (1 - x.drop)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


ROUNDS = gl.constexpr(ROUNDS)
M0, M1 = (gl.constexpr(_signed(word)) for word in MULTIPLIERS)
W0, W1 = (gl.constexpr(_signed(word)) for word in WEYL)


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
def _numbers(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """Of weights [64, N] the numbers that decide, as [4, 2, 8, N // 16, 2, 4, 2]: bits of a row from 16, 8 and 1 on, of a column from 16, 8, 2 and 1 on."""
    row, b_h, _, k0, k1, offset = drops
    tile = gl.zeros([64, N], gl.int32, layout).reshape([4, 2, 8, N // 16, 2, 4, 2])
    call: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(6, tile.type.layout)))  # [4, 8, N // 16, 4]: a call each
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, call))))[:, None][:, :, None][:, :, :, None]
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, call))))[None, :][:, :, None][:, :, :, None]
    block = gl.arange(0, N // 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, call))))[None, :][:, None, :][:, :, :, None]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, call))))[None, :][:, None, :][:, :, None, :]
    none = gl.zeros([4, 8, N // 16, 4], gl.int32, call)
    rows, columns = row + 16 * warp + (lane & 6) + none, column + 16 * block + 2 * pair + none
    odd = (lane & 1) + none != 0
    if OF_KEYS:
        w0, w1, w2, w3 = _philox(rows, columns, b_h + none, offset + none, k0, k1)
        left, right = gl.where(odd, w1, w0), gl.where(odd, w3, w2)
    else:
        w0, w1, w2, w3 = _philox(columns, rows, b_h + none, offset + none, k0, k1)
        left, right = gl.where(odd, w2, w0), gl.where(odd, w3, w1)
    words = gl.where(_along(tile, 6) == 0, _everywhere(left), _everywhere(right))
    turns = 8 * _along(tile, 1) + 16 * _along(tile, 4) if OF_KEYS else 16 * _along(tile, 1) + 8 * _along(tile, 4)
    return gl.inline_asm_elementwise("shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [words, turns], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _everywhere(words):
    """A call's word beside each of its weights: no instruction."""
    return words[:, None, :, :, :][:, :, :, :, None, :][:, :, :, :, :, :, None]


@gluon.jit
def _along(tile, DIM: gl.constexpr):
    """0, 1, .. along one dimension of a tile of zeros of seven: of those that are all a thread's own, constants of the code."""
    layout: gl.constexpr = tile.type.layout
    others: gl.constexpr = _all_but(DIM, layout)
    return _beside(gl.arange(0, tile.shape[DIM], layout=others), DIM) + tile


@gluon.constexpr_function
def _all_but(dim: int, layout):
    """The layout of one of seven dimensions."""
    for other in reversed(range(7)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _beside(x, DIM: gl.constexpr):
    for dim in gl.static_range(7):
        if dim != DIM:
            x = x.expand_dims(dim)
    return x


@gluon.jit
def kept(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """Of weights [64, N] those that stay, of columns from a multiple of 16 on. OF_KEYS: rows are keys."""
    row, b_h, bar, k0, k1, offset = drops
    numbers = _numbers(column, (here(row), b_h, bar, k0, k1, offset), N, OF_KEYS, layout)  # a tile done again makes them again: to keep them costs more
    return gl.convert_layout((numbers >= bar).reshape([64, N]), layout)


@gluon.jit
def kept_bits(column, drops, N: gl.constexpr, OF_KEYS: gl.constexpr, layout: gl.constexpr):
    """The same, a thread's 32 bits in a word: made where this stands, before there are sums that need registers."""
    row, b_h, bar, k0, k1, offset = drops
    numbers = _numbers(column, (here(row), b_h, bar, k0, k1, offset), N, OF_KEYS, layout)
    bits = gl.where(numbers >= bar, 1 << _places(N, layout), 0).reshape([4, 2, 8, N // 64, 4, 2, 4, 2])
    bits = gl.sum(gl.sum(gl.sum(gl.sum(bits, 7), 5), 4), 1)  # [4, 8, N // 64, 4]: each thread's own
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_bits(bits, N: gl.constexpr, layout: gl.constexpr):
    """What `kept_bits` says of each weight."""
    whole = gl.zeros([64, N], gl.int32, layout).reshape([4, 2, 8, N // 64, 4, 2, 4, 2])
    bits = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(7, whole.type.layout)))))
    bits = (bits.expand_dims(1).expand_dims(4).expand_dims(5).expand_dims(7) + whole).reshape([4, 2, 8, N // 16, 2, 4, 2])
    return gl.convert_layout(((bits & (1 << _places(N, layout))) != 0).reshape([64, N]), layout)


@gluon.jit
def _places(N: gl.constexpr, layout: gl.constexpr):
    """Which bit is a weight's."""
    tile = gl.zeros([64, N], gl.int32, layout).reshape([4, 2, 8, N // 16, 2, 4, 2])
    return _along(tile, 1) + 2 * _along(tile, 6) + 4 * _along(tile, 4) + 8 * (_along(tile, 3) & 3)
