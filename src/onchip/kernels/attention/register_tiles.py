"""Tiles of `register_decode`: how a cache's words, 4 bytes each, come to lie in the threads that multiply them, and become numbers there."""

from dataclasses import dataclass

from onchip.kernels.attention.decode_tiles import exponent, power_of_two
from onchip.kernels.attention.gluon_merge import Merging
from onchip.kernels.hopper import gl, gluon


def _bases(*sizes: tuple[int, int, int]) -> list[list[int]]:
    """What the bits of a number stand for: (axis, step, how many) for each run of bits."""
    return [[step << i if axis == at else 0 for at in range(3)] for axis, step, count in sizes for i in range(count)]


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for. Words are 4 bytes.

    kind    "bf16", "fp16", or the format of the codes.        k_steps, v_steps   from token to token: words of the pool, numbers of its scales and zeros.
    rows    of a tile; four, which is half of what a product has, leave room for scores of as many other keys beside their own: see `abreast`.
    alike   whether pages of all pools lie equally far apart, and hold 16 keys whole: then a page is carried as the words before it, one product for all
            pools. (LLVM does not see across blocks that both factors have 32 bits: three multiplications for each of six pools, a tenth of int4's loop.)
    """

    kind: str
    zeros: bool
    n: int
    warps: int
    rows: int
    dim: int
    dim_v: int
    page: int
    alike: bool
    item: int
    k_steps: tuple[int, int, int]
    v_steps: tuple[int, int, int]
    left: int
    right: int
    top_left: bool
    listed: int
    once: bool
    early: bool
    merging: Merging

    @property
    def codes(self):
        return self.kind not in ("bf16", "fp16")

    @property
    def planes(self):
        """Codes of int4 are columns of the lower half in their low bits, of the upper half in their high bits."""
        return 2 if self.kind == "int4" else 1

    @property
    def of_word(self):
        """Columns that a word holds of each plane."""
        return 4 if self.codes else 2

    @property
    def key_words(self):
        return self.dim // self.planes // self.of_word

    @property
    def value_words(self):
        return self.dim_v // self.planes // self.of_word

    @property
    def chunk(self):
        """Words of a key that a thread reads at once: four threads share a key."""
        return min(4, self.key_words // 4)

    @property
    def chunk_v(self):
        """Words of a value that a thread reads at once: eight threads share a value."""
        return min(4, self.value_words // 8)

    @property
    def tile(self):
        return self.n * self.warps

    @property
    def abreast(self):
        """Steps whose scores lie side by side in a product's columns, each with sums of its own, as if other warps had made them."""
        return max(1, 8 // self.rows)

    @property
    def columns(self):
        """Of a product."""
        return self.rows * self.abreast

    def eight(self, step, side):
        """The first of eight keys, those of a step whose scores are a product's first, or last, eight rows: where two steps lie side by side, eight keys
        of one page lie beside the eight others of it."""
        return ((step // self.abreast * 2 + side) * self.abreast + step % self.abreast) * 8

    @property
    def band(self):
        """As `decode_tiles` takes it."""
        return self.left, self.right, self.top_left

    @property
    def whole_pages(self):
        """Whether 16 keys lie in one page."""
        return self.page % 16 == 0

    @property
    def hint(self):
        """Of codes that one program reads, once: their lines are the first to go (128x1k int4 44.5 us to 42.4, int8 73.0 to 71.9; past L1 they lose 1%)."""
        return "evict_first" if self.codes and self.rows < 16 else ""

    @property
    def product(self):
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[self.warps, 1, 1], instr_shape=[1, 16, 8])

    @property
    def keys(self):
        """[warps, 8 keys, words]: a chunk for each of four threads"""
        return self._linear(_bases((2, self.chunk, 2), (1, 1, 3)), [self.warps, 8, 4 * self.chunk], self.chunk)

    @property
    def values(self):
        """[warps, 4 keys, words]: a chunk for each of eight threads"""
        return self._linear(_bases((1, 1, 2), (2, self.chunk_v, 3)), [self.warps, 4, 8 * self.chunk_v], self.chunk_v)

    @property
    def scores(self):
        """[warps, 16 keys, abreast, rows], as a product of `columns` columns has them."""
        columns = self._columns
        lanes = [*columns[1:3], *([0, 1 << i, 0, 0] for i in range(3))]
        warps = [[1 << i, 0, 0, 0] for i in range(_log(self.warps))]
        return gl.DistributedLinearLayout([columns[0], [0, 8, 0, 0], *columns[3:]], lanes, warps, [], [self.warps, 16, self.abreast, self.rows])

    @property
    def numbers(self):
        """[warps, 8 keys, abreast]: a number of a key, in the threads that have its scores."""
        lanes = [*([0, 0, bits[2]] for bits in self._columns[1:3]), *([0, 1 << i, 0] for i in range(3))]
        return gl.DistributedLinearLayout([], lanes, _bases((0, 1, _log(self.warps))), [], [self.warps, 8, self.abreast])

    @property
    def _columns(self):
        return [[0, 0, 0, 1 << i] for i in range(_log(self.rows))] + [[0, 0, 1 << i, 0] for i in range(_log(self.abreast))]

    @property
    def list(self):
        """[1, listed] numbers of sequences, all of them in each warp."""
        return gl.BlockedLayout([1, self.listed // 32], [1, 32], [self.warps, 1], [1, 0])

    def _linear(self, lanes, shape, chunk):
        return gl.DistributedLinearLayout(_bases((2, 1, _log(chunk))), lanes, _bases((0, 1, _log(self.warps))), [], shape)


def _log(n: int) -> int:
    return n.bit_length() - 1


# ---- device: numbers of a word


@gluon.jit
def _nibbles(words):
    """Eight codes of a word as four words of two float16 each: of bytes 0 and 2, then of 1 and 3, the low bits; then the high bits, 16 times as large."""
    low: gl.constexpr = "{ .reg .b32 y; shr.u32 y, $4, 8; and.b32 $0, $4, 0x000F000F; and.b32 $1, y, 0x000F000F; "
    code: gl.constexpr = low + "and.b32 $2, $4, 0x00F000F0; and.b32 $3, y, 0x00F000F0; }"
    return gl.inline_asm_elementwise(code, "=&r,=&r,=&r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _low_and_whole(words):
    """Eight codes of a word as four words of two float16 each: of bytes 0 and 2, then of 1 and 3, the low bits; then the bytes whole, which take no shift."""
    code: gl.constexpr = "and.b32 $2, $4, 0x00FF00FF; prmt.b32 $3, $4, 0, 0x4341; and.b32 $0, $4, 0x000F000F; and.b32 $1, $3, 0x000F000F;"
    return gl.inline_asm_elementwise(code, "=&r,=r,=&r,=&r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _pairs(words, KIND: gl.constexpr):
    """Four codes of a word as two words of two float16 each, in order."""
    if KIND == "e4m3":
        code: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    elif KIND == "e5m2":
        code: gl.constexpr = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
    else:
        code: gl.constexpr = "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;"
    return gl.inline_asm_elementwise(code, "=&r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _merged(x, y, HALF: gl.constexpr):
    """The lower, or the upper, halves of two words; of codes bytes 0 and 1, or 2 and 3, in turns: x, y, x, y."""
    code: gl.constexpr = "prmt.b32 $0, $1, $2, " + HALF + ";"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _halves(words, DTYPE: gl.constexpr):
    """[...] words as [..., 2] numbers: no instruction."""
    even = words.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(even, odd)


@gluon.jit
def key_operands(words, DTYPE: gl.constexpr, C: gl.constexpr):
    """For each plane, words [warps, 16, words] as the left operand [warps, 16, columns]: of column number (i, q, h, t, e) thread t has word q (and h) of
    its chunk i."""
    W: gl.constexpr = C.warps
    Q: gl.constexpr = C.chunk
    I: gl.constexpr = C.key_words // (4 * Q)  # noqa: E741
    D: gl.constexpr = C.key_words * C.of_word
    KIND: gl.constexpr = C.kind
    PLANES: gl.constexpr = C.planes
    operand: gl.constexpr = gl.DotOperandLayout(0, C.product, 2)
    planes = ()
    if C.codes:
        if C.planes == 2:
            x0, x1, x2, x3 = _nibbles(words)
            pairs = ((x0, x1), (x2, x3))
        else:
            pairs = (_pairs(words, KIND),)
        for p in gl.static_range(PLANES):
            x = gl.join(_halves(pairs[p][0], DTYPE), _halves(pairs[p][1], DTYPE)).reshape([W, 16, I, 4, Q, 2, 2])  # i, t, q, e, h
            planes = planes + (gl.convert_layout(x.permute((0, 1, 2, 4, 6, 3, 5)).reshape([W, 16, D]), operand),)  # noqa: RUF005
    else:
        x = _halves(words, DTYPE).reshape([W, 16, I, 4, Q // 2, 2, 2])  # i, t, q, h, e
        planes = (gl.convert_layout(x.permute((0, 1, 2, 4, 5, 3, 6)).reshape([W, 16, D]), operand),)
    return planes


@gluon.jit
def value_operands(even, odd, DTYPE: gl.constexpr, C: gl.constexpr):
    """For each plane, words [warps, 8, words] of even keys and of odd ones as the left operand [warps, columns, 16]: of column number (i, q, j, g) thread g
    has number j of word q of its chunk i. The second of int4's planes has whole bytes; what that is too much is the first plane's sum."""
    W: gl.constexpr = C.warps
    Q: gl.constexpr = C.chunk_v
    I: gl.constexpr = C.value_words // (8 * Q)  # noqa: E741
    D: gl.constexpr = C.value_words * C.of_word
    KIND: gl.constexpr = C.kind
    PLANES: gl.constexpr = C.planes
    operand: gl.constexpr = gl.DotOperandLayout(0, C.product, 2)
    planes = ()
    if C.codes:
        if C.planes == 2:
            x0, x1, x2, x3 = _low_and_whole(_merged(even, odd, "0x5410"))
            y0, y1, y2, y3 = _low_and_whole(_merged(even, odd, "0x7632"))
            pairs = ((x0, x1, y0, y1), (x2, x3, y2, y3))
        else:
            x0, x1 = _pairs(_merged(even, odd, "0x5140"), KIND)
            y0, y1 = _pairs(_merged(even, odd, "0x7362"), KIND)
            pairs = ((x0, x1, y0, y1),)
        for p in gl.static_range(PLANES):
            of = pairs[p]
            x = gl.join(gl.join(_halves(of[0], DTYPE), _halves(of[2], DTYPE)), gl.join(_halves(of[1], DTYPE), _halves(of[3], DTYPE)))
            x = x.reshape([W, 8, I, 8, Q, 2, 2, 2])  # key, i, g, q, odd key, upper half of the word, odd byte of that
            planes = planes + (gl.convert_layout(x.permute((0, 2, 4, 6, 7, 3, 1, 5)).reshape([W, D, 16]), operand),)  # noqa: RUF005
    else:
        low, high = _merged(even, odd, "0x5410"), _merged(even, odd, "0x7632")
        x = gl.join(_halves(low, DTYPE), _halves(high, DTYPE)).reshape([W, 8, I, 8, Q, 2, 2])  # key, i, g, q, odd key, j
        planes = (gl.convert_layout(x.permute((0, 2, 4, 6, 3, 1, 5)).reshape([W, D, 16]), operand),)
    return planes


@gluon.jit
def key_columns(c, C: gl.constexpr):
    """The column of a plane of a key that number `c` of `key_operands` is."""
    E: gl.constexpr = C.chunk * C.of_word  # columns of a chunk
    block, e, h = c // 16, c % 2, c // 8 % 2
    inside = 2 * e + h if C.planes == 2 else 2 * h + e
    return block // (E // 4) * (4 * E) + c // 2 % 4 * E + block % (E // 4) * 4 + inside


@gluon.jit
def weight_operands(weights, DTYPE: gl.constexpr, C: gl.constexpr):
    """Weights [warps, 16, abreast, rows] as the right operands of the steps abreast, in each of which the others' are 0: blocks of 8 x 8 change sides among
    a warp's threads."""
    W: gl.constexpr = C.warps
    R: gl.constexpr = C.columns
    A: gl.constexpr = C.abreast
    x = gl.convert_layout(weights.reshape([W, 16, R]), C.product).to(DTYPE)
    if A == 1:
        steps = (_flipped_blocks(x),)
    else:
        steps = _flipped_halves(x, C)
    operands = ()
    for h in gl.static_range(A):
        x = steps[h].reshape([W, 2, 8, R // 8, 8]).permute((0, 1, 4, 3, 2)).reshape([W, 16, R])
        operands = operands + (gl.convert_layout(x, gl.DotOperandLayout(1, C.product, 2)),)  # noqa: RUF005
    return operands


@gluon.jit
def _flipped_blocks(x):
    """Each block of 8 x 8 numbers of 16 bits, transposed."""
    return gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _flipped_halves(x, C: gl.constexpr):
    """Each block of 8 x 8 numbers of 16 bits, transposed: the first of its rows with 0 for the others, and the others with 0 for the first."""
    code: gl.constexpr = """{ .reg .b32 x; movmatrix.sync.aligned.m8n8.trans.b16 x, $2; and.b32 $0, x, $3; lop3.b32 $1, x, $3, 0, 0x30; }"""
    first = gl.where(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, C.product))) % 8 < C.rows, -1, 0)[None, :, None]
    return gl.inline_asm_elementwise(code, "=&r,=r,r,r,r", [x, first], dtype=(x.dtype, x.dtype), is_pure=False, pack=2)


# ---- device: queries


@gluon.jit
def row_of(r, kv_head, group):
    """The query and the head of row `r` of a unit: the queries of all heads of the group, one after the other."""
    return r // group, kv_head * group + r % group


@gluon.jit
def queries_of(q, unit, group, channel, DTYPE: gl.constexpr, C: gl.constexpr):
    """Right operands [warps, columns, rows], one for each plane. Of codes in float16, a row divided by a power of two (products are exact): that, and
    the row's sum."""
    b, kv_head, row, queries, token = unit
    P: gl.constexpr = C.dim // C.planes
    operand: gl.constexpr = gl.DotOperandLayout(1, C.product, 2)
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, operand))
    query, head = row_of(row + gl.arange(0, C.columns, layout=gl.SliceLayout(0, gl.SliceLayout(1, operand))) % C.rows, kv_head, group)
    places = (b.to(gl.int64) * q[1] + (token + query).to(gl.int64) * q[2] + head * q[3])[None, None, :]
    there = (query < queries)[None, None, :]
    at = key_columns(gl.arange(0, P, layout=columns), C)[None, :, None]
    at += gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, operand)))[:, None, None] * 0
    low = gl.load(q[0] + (places + at), mask=there & (at < P), other=0.0)
    high = low
    W: gl.constexpr = C.warps
    ROWS: gl.constexpr = [W, C.abreast, C.rows]
    of_row: gl.constexpr = gl.SliceLayout(1, C.scores)
    factor = gl.full(ROWS, 1.0, gl.float32, of_row)
    sums = factor
    if C.planes == 2:
        high = gl.load(q[0] + (places + P + at), mask=there & (at < P), other=0.0)
    if C.codes:
        low, high = low.to(gl.float32), high.to(gl.float32)
        if channel is not None:
            low = low * gl.load(channel + at)
            high = high * gl.load(channel + at + (C.planes - 1) * P)
        most = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
        e = exponent(most)
        unit = power_of_two(-e)[:, None, :]
        low = (low * unit).to(DTYPE)
        high = (high * (unit * 0.0625)).to(DTYPE)  # high bits count 16 times
        total = gl.sum(low.to(gl.float32), 1)
        if C.planes == 2:
            total += gl.sum(high.to(gl.float32), 1) * 16.0
        factor = gl.convert_layout(power_of_two(e).reshape(ROWS), of_row)
        sums = gl.convert_layout(total.reshape(ROWS), of_row)
    return low, high, factor, sums


# ---- device: 16 keys of each warp


@gluon.jit
def begin_loads():
    """The loads above begin here. ptxas lets those that nobody wants before the loop's next turn sink to its end, where their way is waited for; past a
    barrier of a warp, which waits for no load, it does not."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_of(n, at: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Key `at` of each warp's in the tile at `n`, [warps, 1]."""
    return n + at + C.n * gl.arange(0, C.warps, layout=gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _page(entries, at, sight, C: gl.constexpr):
    """The pages of keys `at`, or of 16 from there on; 0, which there is, for those that nobody sees: their entries may name no page."""
    REACH: gl.constexpr = 16 if C.whole_pages else 1
    return gl.load(entries + at // C.page, mask=(at < sight[1]) & (at + REACH > sight[0]), other=0)


@gluon.jit
def pages_of(entries, words, n, sight, C: gl.constexpr, OF_KEYS: gl.constexpr, OF_VALUES: gl.constexpr):
    """Of each step the pages of its first eight keys and of its last, [warps, 8], and of keys 2 t, 2 t + 1 of the first and of the last, [warps, 4]; where
    16 keys lie in one page, that of each warp, and where pages are alike the words before it, of which a page has `words`."""
    whole, pages = (), ()
    if C.whole_pages:
        for each in gl.static_range(C.n // 16):
            page = _page(entries, first_of(n, 16 * each, C, OF_KEYS), sight, C)
            if C.alike:
                page = page.to(gl.int64) * words
            whole = whole + ((page, gl.convert_layout(page, OF_VALUES)),)  # noqa: RUF005
    for step in gl.static_range(C.n // 16):
        of_keys, of_values = (), ()
        for side in gl.static_range(2):
            if C.whole_pages:
                page, of_value = whole[C.eight(step, side) // 16]
                of_keys = of_keys + (page,)  # noqa: RUF005
                of_values = of_values + (of_value, of_value)  # noqa: RUF005
            else:
                g = first_of(n, C.eight(step, side), C, OF_KEYS) + gl.arange(0, 8, layout=gl.SliceLayout(0, OF_KEYS))[None, :]
                t = first_of(n, C.eight(step, side), C, OF_VALUES) + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, OF_VALUES))[None, :]
                of_keys = of_keys + (_page(entries, g, sight, C),)  # noqa: RUF005
                of_values = of_values + (_page(entries, t, sight, C), _page(entries, t + 1, sight, C))  # noqa: RUF005
        pages = pages + (of_keys + of_values,)  # noqa: RUF005
    return pages


@gluon.jit
def base_of(pool, kv_head, EACH: gl.constexpr, TOKEN: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to a thread's words in page 0, [1, keys, words], of the first of its keys, which are EACH apart."""
    words = gl.arange(0, LAYOUT.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    place = kv_head.to(gl.int64) * pool[2] + words
    if C.whole_pages:
        place += (EACH * TOKEN) * gl.arange(0, LAYOUT.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return pool[0] + place


@gluon.jit
def _inside(page, n, AT: gl.constexpr, stride, TOKEN: gl.constexpr, EACH: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """How far keys AT, AT + EACH, .. of a warp lie behind what `base_of` points to, but for where AT lies among 16 keys of a page."""
    KEYS: gl.constexpr = 8 // EACH
    place = page
    if not C.alike:
        place = page.to(gl.int64) * stride
    if not C.whole_pages:
        at = first_of(n, AT, C, layout) + EACH * gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))[None, :]
        place += at % C.page * TOKEN
    elif C.page != 16:
        place += first_of(n, AT // 16 * 16, C, layout) % C.page * TOKEN
    return place


@gluon.jit
def _read(place, FAR: gl.constexpr, STEP: gl.constexpr, CHUNKS: gl.constexpr, C: gl.constexpr):
    """Words of keys at `place` + FAR and every STEP behind, [.., CHUNKS]."""
    SHAPE: gl.constexpr = [place.shape[0], place.shape[1], place.shape[2], CHUNKS]
    if CHUNKS == 1:
        x = gl.load(place + FAR, eviction_policy=C.hint)
    else:
        x = gl.join(_read(place, FAR, 2 * STEP, CHUNKS // 2, C), _read(place, FAR + STEP, 2 * STEP, CHUNKS // 2, C))
    return x.reshape(SHAPE)


@gluon.jit
def load_keys(base, pool, pages, n, step: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [warps, 16, words] of a step."""
    W: gl.constexpr = C.warps
    Q: gl.constexpr = C.chunk
    I: gl.constexpr = C.key_words // (4 * Q)  # noqa: E741
    WORDS: gl.constexpr = C.key_words
    TOKEN: gl.constexpr = C.k_steps[0]
    FAR: gl.constexpr = TOKEN if C.whole_pages else 0  # from a thread's key to the next in a page
    OF: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    LOW: gl.constexpr = C.eight(step, 0)
    HIGH: gl.constexpr = C.eight(step, 1)
    low = _read(base + _inside(pages[0], n, LOW, pool[1], TOKEN, 1, C, OF)[:, :, None], LOW % 16 * FAR, 4 * Q, I, C)
    high = _read(base + _inside(pages[1], n, HIGH, pool[1], TOKEN, 1, C, OF)[:, :, None], HIGH % 16 * FAR, 4 * Q, I, C)
    x = gl.join(low, high).reshape([W, 8, 4, Q, I, 2])
    return x.permute((0, 5, 1, 4, 2, 3)).reshape([W, 16, WORDS])


@gluon.jit
def load_values(base, pool, pages, n, step: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [warps, 8, words] of a step's even keys, and of its odd ones."""
    W: gl.constexpr = C.warps
    Q: gl.constexpr = C.chunk_v
    I: gl.constexpr = C.value_words // (8 * Q)  # noqa: E741
    WORDS: gl.constexpr = C.value_words
    TOKEN: gl.constexpr = C.v_steps[0]
    FAR: gl.constexpr = TOKEN if C.whole_pages else 0
    OF: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    LOW: gl.constexpr = C.eight(step, 0)
    HIGH: gl.constexpr = C.eight(step, 1)
    sides = ()
    for odd in gl.static_range(2):
        low = _read(base + _inside(pages[2 + odd], n, LOW + odd, pool[1], TOKEN, 2, C, OF)[:, :, None], (LOW % 16 + odd) * FAR, 8 * Q, I, C)
        high = _read(base + _inside(pages[4 + odd], n, HIGH + odd, pool[1], TOKEN, 2, C, OF)[:, :, None], (HIGH % 16 + odd) * FAR, 8 * Q, I, C)
        x = gl.join(low, high).reshape([W, 4, 8, Q, I, 2])
        sides = sides + (x.permute((0, 5, 1, 4, 2, 3)).reshape([W, 8, WORDS]),)  # noqa: RUF005
    return sides


@gluon.jit
def _scale(pool, kv_head, pages, n, step: gl.constexpr, TOKEN: gl.constexpr, C: gl.constexpr):
    """A number for each key of the steps abreast from `step` on, [warps, 16, abreast]; pool: pointer and strides of page and head."""
    W: gl.constexpr = C.warps
    A: gl.constexpr = C.abreast
    LAYOUT: gl.constexpr = C.numbers
    OF: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    NEAR: gl.constexpr = TOKEN if C.whole_pages else 0
    NUMBERS: gl.constexpr = 2 if C.alike else 1  # of a word, or pages
    later = gl.arange(0, A, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    base = pool[0] + kv_head.to(gl.int64) * pool[2] + NEAR * (gl.arange(0, 8, layout=gl.SliceLayout(0, OF))[None, :, None] + 8 * later)
    sides = ()
    for side in gl.static_range(2):
        place = _inside(gl.convert_layout(pages[step][side] * NUMBERS, OF), n, C.eight(step, side), pool[1], TOKEN, 1, C, OF)[:, :, None]
        if A == 2 and not C.whole_pages:
            page = gl.convert_layout(pages[step + 1][side], OF)
            place = gl.where(later == 0, place, _inside(page, n, C.eight(step + 1, side), pool[1], TOKEN, 1, C, OF)[:, :, None])
        sides = sides + (_widened(gl.load(base + place + C.eight(step, side) % 16 * NEAR)),)  # noqa: RUF005
    return gl.convert_layout(gl.join(sides[0], sides[1]).permute((0, 3, 1, 2)).reshape([W, 16, A]), gl.SliceLayout(3, C.scores))


@gluon.jit
def _widened(x):
    """16 bits in a register of their own: two that share one are put together as soon as they are loaded, and that waits for them."""
    return gl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def number(x):
    """The bfloat16 of `_widened`, in float32."""
    return (x << 16).to(gl.float32, bitcast=True)


@gluon.jit
def load_scales(scales, WHICH: gl.constexpr, kv_head, pages, n, step: gl.constexpr, C: gl.constexpr):
    """Scale and zero of the keys, or of the values, of the steps abreast from `step` on."""
    both = ()
    if C.codes:
        S_TOKEN: gl.constexpr = C.v_steps[1] if WHICH else C.k_steps[1]
        scale = _scale(scales[2 * WHICH], kv_head, pages, n, step, S_TOKEN, C)
        zero = scale
        if C.zeros:
            Z_TOKEN: gl.constexpr = C.v_steps[2] if WHICH else C.k_steps[2]
            zero = _scale(scales[2 * WHICH + 1], kv_head, pages, n, step, Z_TOKEN, C)
        both = (scale, zero)
    return both
