"""Tiles of `register_decode`: how a cache's words, 4 bytes each, come to lie in the threads that multiply them, and become numbers there."""

from dataclasses import dataclass

from onchip.kernels.attention.gluon_merge import Merging
from onchip.kernels.hopper import gl, gluon


def _bases(*sizes: tuple[int, int, int]) -> list[list[int]]:
    """What the bits of a number stand for: (axis, step, how many) for each run of bits."""
    return [[step << i if axis == at else 0 for at in range(3)] for axis, step, count in sizes for i in range(count)]


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for. Words are 4 bytes.

    kind    "bf16", "fp16", or the format of the codes.        k_steps, v_steps   from token to token: words of the pool, numbers of its scales and zeros.
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
    def band(self):
        """As `decode_tiles` takes it."""
        return self.left, self.right, self.top_left

    @property
    def whole_pages(self):
        """Whether 16 keys lie in one page."""
        return self.page % 16 == 0

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
def _bytes_and_high(words):
    """Eight codes of a word as four words of two float16 each: bytes 0 and 2, then 1 and 3, whole; then their high bits, 16 times as large, alone."""
    code: gl.constexpr = "and.b32 $0, $4, 0x00FF00FF; prmt.b32 $1, $4, 0, 0x4341; and.b32 $2, $4, 0x00F000F0; and.b32 $3, $1, 0x00F000F0;"
    return gl.inline_asm_elementwise(code, "=&r,=&r,=&r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)


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
    has number j of word q of its chunk i. The first of int4's planes has whole bytes, which take no shift; what that is too much is the second plane's sum."""
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
            x0, x1, x2, x3 = _bytes_and_high(_merged(even, odd, "0x5410"))
            y0, y1, y2, y3 = _bytes_and_high(_merged(even, odd, "0x7632"))
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
def weight_operand(weights, DTYPE: gl.constexpr, C: gl.constexpr):
    """Weights [warps, 16, rows] as the right operand: blocks of 8 x 8 change sides among a warp's threads."""
    W: gl.constexpr = C.warps
    R: gl.constexpr = C.rows
    x = _flipped_blocks(weights.to(DTYPE))
    x = x.reshape([W, 2, 8, R // 8, 8]).permute((0, 1, 4, 3, 2)).reshape([W, 16, R])
    return gl.convert_layout(x, gl.DotOperandLayout(1, C.product, 2))


@gluon.jit
def _flipped_blocks(x):
    """Each block of 8 x 8 numbers of 16 bits, transposed."""
    return gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


# ---- device: 16 keys of each warp


@gluon.jit
def begin_loads():
    """The loads above begin here. ptxas lets those that nobody wants before the loop's next turn sink to its end, where their way is waited for; past a
    barrier of a warp, which waits for no load, it does not."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_of(n, step: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """The first of a warp's keys in step `step` of the tile at `n`, [warps, 1]."""
    return n + step * 16 + C.n * gl.arange(0, C.warps, layout=gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _page(entries, at, sight, C: gl.constexpr):
    """The pages of keys `at`, or of 16 from there on; 0, which there is, for those that nobody sees: their entries may name no page."""
    REACH: gl.constexpr = 16 if C.whole_pages else 1
    return gl.load(entries + at // C.page, mask=(at < sight[1]) & (at + REACH > sight[0]), other=0)


@gluon.jit
def pages_of(entries, words, n, sight, C: gl.constexpr, OF_KEYS: gl.constexpr, OF_VALUES: gl.constexpr):
    """Of each step the pages of keys g and 8 + g, [warps, 8], and of 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, [warps, 4]; where 16 keys lie in one page,
    that of each warp, and where pages are alike the words before it, of which a page has `words`."""
    pages = ()
    for step in gl.static_range(C.n // 16):
        at = first_of(n, step, C, OF_KEYS)
        if C.whole_pages:
            page = _page(entries, at, sight, C)
            if C.alike:
                page = page.to(gl.int64) * words
            of_value = gl.convert_layout(page, OF_VALUES)
            pages = pages + ((page, page, of_value, of_value, of_value, of_value),)  # noqa: RUF005
        else:
            g = at + gl.arange(0, 8, layout=gl.SliceLayout(0, OF_KEYS))[None, :]
            t = first_of(n, step, C, OF_VALUES) + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, OF_VALUES))[None, :]
            of_keys = (_page(entries, g, sight, C), _page(entries, g + 8, sight, C))
            of_values = (_page(entries, t, sight, C), _page(entries, t + 1, sight, C), _page(entries, t + 8, sight, C), _page(entries, t + 9, sight, C))
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
def _inside(page, n, step: gl.constexpr, stride, TOKEN: gl.constexpr, OFF: gl.constexpr, EACH: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """How far keys OFF, OFF + EACH, .. lie behind what `base_of` points to."""
    KEYS: gl.constexpr = 8 // EACH
    place = page
    if not C.alike:
        place = page.to(gl.int64) * stride
    if not C.whole_pages:
        at = first_of(n, step, C, layout) + OFF + EACH * gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))[None, :]
        place += at % C.page * TOKEN
    elif C.page != 16:
        place += first_of(n, step, C, layout) % C.page * TOKEN
    return place


@gluon.jit
def _read(place, FAR: gl.constexpr, STEP: gl.constexpr, CHUNKS: gl.constexpr):
    """Words of keys at `place` + FAR and every STEP behind, [.., CHUNKS]."""
    SHAPE: gl.constexpr = [place.shape[0], place.shape[1], place.shape[2], CHUNKS]
    if CHUNKS == 1:
        x = gl.load(place + FAR)
    else:
        x = gl.join(_read(place, FAR, 2 * STEP, CHUNKS // 2), _read(place, FAR + STEP, 2 * STEP, CHUNKS // 2))
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
    low = _read(base + _inside(pages[0], n, step, pool[1], TOKEN, 0, 1, C, OF)[:, :, None], 0, 4 * Q, I)
    high = _read(base + _inside(pages[1], n, step, pool[1], TOKEN, 8, 1, C, OF)[:, :, None], 8 * FAR, 4 * Q, I)
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
    sides = ()
    for odd in gl.static_range(2):
        low = _read(base + _inside(pages[2 + odd], n, step, pool[1], TOKEN, odd, 2, C, OF)[:, :, None], odd * FAR, 8 * Q, I)
        high = _read(base + _inside(pages[4 + odd], n, step, pool[1], TOKEN, 8 + odd, 2, C, OF)[:, :, None], (8 + odd) * FAR, 8 * Q, I)
        x = gl.join(low, high).reshape([W, 4, 8, Q, I, 2])
        sides = sides + (x.permute((0, 5, 1, 4, 2, 3)).reshape([W, 8, WORDS]),)  # noqa: RUF005
    return sides


@gluon.jit
def _scale(pool, kv_head, pages, n, step: gl.constexpr, TOKEN: gl.constexpr, C: gl.constexpr, OF: gl.constexpr):
    """A number for each of 16 keys, [warps, 16]; pool: pointer and strides of page and head."""
    W: gl.constexpr = C.warps
    base = pool[0] + kv_head.to(gl.int64) * pool[2] + gl.arange(0, 8, layout=gl.SliceLayout(0, OF))[None, :] * (TOKEN if C.whole_pages else 0)
    FAR: gl.constexpr = 8 * TOKEN if C.whole_pages else 0
    NUMBERS: gl.constexpr = 2 if C.alike else 1  # of a word, or pages
    low = _widened(gl.load(base + _inside(pages[0] * NUMBERS, n, step, pool[1], TOKEN, 0, 1, C, OF)))
    high = _widened(gl.load(base + _inside(pages[1] * NUMBERS, n, step, pool[1], TOKEN, 8, 1, C, OF) + FAR))
    return gl.convert_layout(gl.join(low, high).permute((0, 2, 1)).reshape([W, 16]), gl.SliceLayout(2, C.product))


@gluon.jit
def _widened(x):
    """16 bits in a register of their own: two that share one are put together as soon as they are loaded, and that waits for them."""
    return gl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def number(x):
    """The bfloat16 of `_widened`, in float32."""
    return (x << 16).to(gl.float32, bitcast=True)


@gluon.jit
def load_scales(scales, WHICH: gl.constexpr, kv_head, pages, n, step: gl.constexpr, C: gl.constexpr, OF: gl.constexpr):
    """Scale and zero of a step's keys, or of its values."""
    both = ()
    if C.codes:
        S_TOKEN: gl.constexpr = C.v_steps[1] if WHICH else C.k_steps[1]
        scale = _scale(scales[2 * WHICH], kv_head, pages, n, step, S_TOKEN, C, OF)
        zero = scale
        if C.zeros:
            Z_TOKEN: gl.constexpr = C.v_steps[2] if WHICH else C.k_steps[2]
            zero = _scale(scales[2 * WHICH + 1], kv_head, pages, n, step, Z_TOKEN, C, OF)
        both = (scale, zero)
    return both
