"""The warps of `hopper_mla` that copy: which keys are a program's, and how queries and keys come to shared memory.

One warp finds the program's share, tells the others of it, and asks the copy engine (TMA) for queries and for keys in half precision. Of keys in e4m3 (656
bytes a token, see `ops/latent.py`) it is four warps, which bring the keys themselves: 16 bytes a thread from memory, a product in float32, rounded once as
`dequantise_latent` rounds it, and 16 bytes to shared memory. So 656 bytes a key are all that is read, and nothing is written on the way. What is computed of
them is told of no difference, but fences off what threads have written. Threads look pages up, so pages may have any size. (Four warps beside a copying one
would make 512 threads, of which ptxas gives none the 154 registers that a product of 256 columns asks for.)

A thread has two rows of a piece of 128 columns, of which 16 codes side by side become 32 bytes in two stores. Eight lanes store at once: four of a row, which
take every other 16 bytes of 128, and four of the next row, which shared memory's swizzling leads to those between: no bank is met twice. (Of one row, they
would meet each twice, where products leave shared memory no time to spare.) What goes through the loop are words of four codes: single bytes are taken apart
there and put together anew. A pair of blocks is 512 codes a thread and 2,486 instructions, in 7,600 cycles, where the products of a pair take 5,500: these
warps are what is waited for (docs/measured/mla.md).
"""

from onchip.kernels.attention.latent_merge import pairs_of, share_of
from onchip.kernels.hopper import (
    arrive_and_wait,
    as_halves,
    forget,
    gl,
    gluon,
    hear,
    mbarrier,
    start_next,
    tell,
    tma_load,
    wait_for_last,
    wide_product,
)

PIECE = gl.constexpr(128)  # columns of a key that come, and are waited for, together (128 x 4k: 272 us with 256, 262 with 128, 285 with 64)
# Pieces of a block in the order in which they come: four of columns, and the rope columns. Of an odd block the right warpgroup lets its half go first.
EVEN, ODD = gl.constexpr((0, 1, 2, 3, 4)), gl.constexpr((2, 3, 0, 1, 4))
ORDER = gl.constexpr((0, 1, 2, 3, 4, 2, 3, 0, 1, 4))  # of both
LEFT_GONE, RIGHT_GONE, ROPE_GONE = gl.constexpr(10), gl.constexpr(12), gl.constexpr(14)  # hardware barriers of the even block, and the odd one's behind it
AHEAD = gl.constexpr(3)  # pieces of codes that are on their way from memory while another one waits for room: 8 KB each
# Words of a piece [64, 32], four codes or two rope columns each: 16 bytes a thread, eight rows a warp.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
# Words of a token: codes, a scale for each 128 of them, and from ROPE_AT on the rope columns. What is 16 bytes is a unit.
SCALES_AT, ROPE_AT, UNIT = gl.constexpr(128), gl.constexpr(132), gl.constexpr(4)


# ---- which keys


@gluon.jit
def _pairs(lengths_ptr, i, batch):
    """Pairs of sequences `i`; of those past the last 0."""
    return gl.where(i < batch, pairs_of(gl.load(lengths_ptr + i, mask=i < batch, other=0)), 0)


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def _my_share(lengths_ptr, batch, shares, number, C: gl.constexpr):
    """Of share `number`, of all sequences' pairs end to end: the sequence where it begins, the pairs before that one, and the first and last pair. Each warp
    has all of them, so that its lanes need no barrier."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [C.fillers // 32], [0])
    i = gl.arange(0, 128, layout=layout)
    total, most = batch * 0, batch * 0
    for first in range(0, batch, 128):
        pairs = _pairs(lengths_ptr, first + i, batch)
        total += gl.sum(pairs, 0)
        most = gl.maximum(most, gl.max(pairs, 0))
    share = share_of(total, most, shares)
    begin = gl.minimum(number * share, total)
    first, sequence, before, seen = batch * 0, batch * 0, batch * 0, batch * 0
    while (first < batch) & (seen <= begin):
        pairs = _pairs(lengths_ptr, first + i, batch)
        over = (first + i < batch) & (seen + gl.associative_scan(pairs, 0, _plus) <= begin)
        sequence += gl.sum(over.to(gl.int32), 0)
        before += gl.sum(gl.where(over, pairs, 0), 0)
        seen += gl.sum(pairs, 0)
        first += 128
    return sequence, before, begin, gl.minimum(begin + share, total)


@gluon.jit
def next_work(told, turn):
    """Sequence, length, first and last pair, and slot of the next piece of work."""
    sequence = hear(told, turn, 0, 4)
    length, low, high, slot = sequence, sequence, sequence, sequence
    if sequence >= 0:
        length, low, high, slot = hear(told, turn, 1, 4), hear(told, turn, 2, 4), hear(told, turn, 3, 4), hear(told, turn, 4, 4)
        forget(told, turn)
    return sequence, length, low, high, slot


# ---- the copying warp


@gluon.jit
def _pages(table, sequence, n, length, C: gl.constexpr):
    """The pages of keys from `n` on, one in each lane; -1, where TMA reads 0, for those past the end: the table may say anything there."""
    entries, stride = table
    PARTS: gl.constexpr = C.parts
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    at = n + lane * (64 // PARTS)
    return gl.load(entries + sequence.to(gl.int64) * stride + at // C.page, mask=(lane < PARTS) & (at >= 0) & (at < length), other=-1)


@gluon.jit
def _fill(desc, buffer, full, N: gl.constexpr, pages, slot, column, used, GONE: gl.constexpr, THREADS: gl.constexpr, C: gl.constexpr):
    """A part of a block of keys, once its readers have let the last one go; `full` from N on are the mbarriers of its pieces."""
    WIDTH: gl.constexpr = desc.block_type.shape[-1]
    PIECES: gl.constexpr = buffer.shape[-1] // WIDTH
    PARTS: gl.constexpr = C.parts
    ROWS: gl.constexpr = 64 // PARTS
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    if used > 0:
        arrive_and_wait(used * 0, GONE, THREADS)
    for piece in gl.static_range(PIECES):
        mbarrier.expect(full.index(N + piece), PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        page = gl.sum(gl.where(lane == part, pages, 0), 0)  # one instruction: redux
        rows = buffer.index(0).slice(part * ROWS, ROWS, 1)
        for piece in gl.static_range(PIECES):
            tma_load(desc, [page, slot, column + piece * WIDTH], full.index(N + piece), rows.slice(piece * WIDTH, WIDTH, 2))


@gluon.jit
def _copy_pairs(descs, table, work, pages, even, odd, used, C: gl.constexpr):
    """Pairs of blocks of a sequence, from the last one on. `pages`: of the first two blocks."""
    sequence, length, low, high = work
    n = (high - 1) * 128
    pages, more = pages
    for _x in range(high - low):
        at, after = n % C.page, (n + 64) % C.page
        _fill(descs[0], even[0], even[3], 0, pages, at, 0, used, LEFT_GONE, C.one_group, C)
        _fill(descs[0], even[1], even[3], 2, pages, at, 256, used, RIGHT_GONE, C.one_group, C)
        _fill(descs[1], even[2], even[3], 4, pages, at, 512, used, ROPE_GONE, C.two_groups, C)
        _fill(descs[0], odd[1], odd[3], 2, more, after, 256, used, RIGHT_GONE + 1, C.one_group, C)
        _fill(descs[0], odd[0], odd[3], 0, more, after, 0, used, LEFT_GONE + 1, C.one_group, C)
        _fill(descs[1], odd[2], odd[3], 4, more, after, 512, used, ROPE_GONE + 1, C.two_groups, C)
        used += 1
        n -= 128
        pages, more = _pages(table, sequence, n, length, C), _pages(table, sequence, n + 64, length, C)
    return used


# ---- codes on their way to numbers


@gluon.jit
def _look(table, sequence, n, low, length, C: gl.constexpr):
    """The pages of 64 keys from `n` on; 0 for those that are before pair `low`, or past the end, of which the table may say anything."""
    entries, stride = table
    at = n + gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS))
    return gl.load(entries + sequence.to(gl.int64) * stride + at // C.page, mask=(at >= low * 128) & (at < length), other=0)


@gluon.jit
def _places(pages, n, low, length, steps, C: gl.constexpr):
    """Where these keys are, in words, and which of them are to be read."""
    of_page, of_slot = steps
    at = n + gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS))
    return (wide_product(pages, of_page) + at % C.page * of_slot) * UNIT, (at >= low * 128) & (at < length)


@gluon.jit
def _fetch(words_ptr, places, piece: gl.constexpr):
    """Words of a piece of 64 keys and their scales, as words too; of keys that are not to be read 0."""
    at, there = places
    first: gl.constexpr = ROPE_AT if piece == 4 else piece * 32
    columns = first + gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    words = gl.load(words_ptr + (at[:, None] + columns[None, :]), mask=there[:, None], other=0)
    scales = gl.full([64], 0, gl.int32, gl.SliceLayout(1, WORDS))
    if piece < 4:
        scales = gl.load(words_ptr + (at + (SCALES_AT + piece)), mask=there, other=0)
    return words, scales


@gluon.jit
def _products(words, scales):
    """Of codes, four in a word, and their scales, two words of two bfloat16 each: products in float32, rounded once."""
    code: gl.constexpr = """{ .reg .b16 a, b; .reg .b32 x, y; .reg .f32 e, f, g, h; mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b; mov.b32 {a, b}, x; cvt.f32.f16 e, a; cvt.f32.f16 f, b; mov.b32 {a, b}, y; cvt.f32.f16 g, a;
        cvt.f32.f16 h, b; mul.f32 e, e, $3; mul.f32 f, f, $3; mul.f32 g, g, $3; mul.f32 h, h, $3;
        cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }"""
    operands = [words, scales.to(gl.float32, bitcast=True)[:, None]]
    return gl.inline_asm_elementwise(code, "=&r,=r,r,f", operands, dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _numbers(fetched, piece: gl.constexpr):
    """What the words of a piece stand for, in bfloat16."""
    words, scales = fetched
    if piece < 4:
        low, high = _products(words, scales)
        words = gl.join(low, high).reshape([64, 64])
    return as_halves(words, gl.bfloat16)


@gluon.jit
def _put(numbers, block, piece: gl.constexpr):
    """A piece to shared memory, and the word that it is there. Products may read it past a fence of who waited for it: one here would wait for all that is
    on its way from memory."""
    if piece == 4:
        block[2].index(0).reshape([64, 64]).store(numbers)
    else:
        block[piece // 2].index(0).reshape([64, 256]).slice(piece % 2 * PIECE, PIECE, 1).store(numbers)
    mbarrier.arrive(block[3].index(piece), count=1)


@gluon.jit
def _wait_for_room(used, PIECE_OF: gl.constexpr, ODD_ONE: gl.constexpr, C: gl.constexpr):
    """Until the readers have let go the part of a block that begins with a piece."""
    if used > 0:
        if PIECE_OF == 0:
            arrive_and_wait(used * 0, LEFT_GONE + ODD_ONE, C.one_group)
        if PIECE_OF == 2:
            arrive_and_wait(used * 0, RIGHT_GONE + ODD_ONE, C.one_group)
        if PIECE_OF == 4:
            arrive_and_wait(used * 0, ROPE_GONE + ODD_ONE, C.two_groups)


@gluon.jit
def _first(keys, table, work, C: gl.constexpr):
    """What `_turn_pairs` begins with: the first pieces, on their way, where the others of their block are, and the pages of the next block."""
    words_ptr, steps = keys
    sequence, length, low, high = work
    n = (high - 1) * 128
    pages, more = _look(table, sequence, n, low, length, C), _look(table, sequence, n + 64, low, length, C)
    places = _places(pages, n, low, length, steps, C)
    fetched = ()
    for step in gl.static_range(AHEAD):
        fetched += (_fetch(words_ptr, places, ORDER[step]),)
    return fetched, places, more


@gluon.jit
def _turn_pairs(keys, table, work, begun, even, odd, used, C: gl.constexpr):
    """`_copy_pairs` of keys in e4m3, in the same order. Pages are looked up a block ahead, words are asked for AHEAD pieces ahead, before the wait for room."""
    words_ptr, steps = keys
    sequence, length, low, high = work
    fetched, places, more = begun
    n = (high - 1) * 128
    for _x in range(high - low):
        later = _look(table, sequence, n - 128, low, length, C)
        for step in gl.static_range(10):
            if step + AHEAD == 5:
                places = _places(more, n + 64, low, length, steps, C)
                more = _look(table, sequence, n - 64, low, length, C)
            if step + AHEAD == 10:
                places = _places(later, n - 128, low, length, steps, C)
            block = even
            if step >= 5:
                block = odd
            numbers = _numbers(fetched[0], ORDER[step])
            fetched += (_fetch(words_ptr, places, ORDER[(step + AHEAD) % 10]),)
            _wait_for_room(used, ORDER[step], step // 5, C)
            _put(numbers, block, ORDER[step])
            fetched = fetched[1:]
        used += 1
        n -= 128
    return used


# ---- the partition


@gluon.jit
def copy(given, C: gl.constexpr):
    """The partition of one warp, of codes of four, that finds the program's share and brings queries and keys."""
    q_descs, keys, queries, q_empty, even, odd, told, lists, table, tiles, first = given
    lengths_ptr, batch, shares = lists
    q_left, q_right, q_rope, q_full = queries
    q_full = q_full.index(0)
    number, tile = gl.program_id(0) // tiles, first + gl.program_id(0) % tiles
    turn, used = 0, 0
    wait_for_last()
    sequence, before, begin, end = _my_share(lengths_ptr, batch, shares, number, C)
    while before < end:
        length = gl.load(lengths_ptr + sequence)
        pairs = pairs_of(length)
        low, high = gl.maximum(begin - before, 0), gl.minimum(end - before, pairs)
        work = (sequence, length, low, high)
        if C.codes:
            begun = _first(keys, table, work, C)
        else:
            n = (high - 1) * 128
            begun = (_pages(table, sequence, n, length, C), _pages(table, sequence, n + 64, length, C))
        # Of a result that is to be merged; the next one is the next program's or the next sequence's.
        slot = gl.where((low == 0) & (high == pairs), -1, number + sequence)
        tell(told, turn, (sequence, length, low, high, slot), C.fillers // 32)
        mbarrier.wait(q_empty, turn % 2 ^ 1)
        mbarrier.expect(q_full, 2 * q_descs[0].block_type.nbytes + q_descs[1].block_type.nbytes)
        tma_load(q_descs[0], [sequence, tile * 64, 0], q_full, q_left.index(0))
        tma_load(q_descs[0], [sequence, tile * 64, 256], q_full, q_right.index(0))
        tma_load(q_descs[1], [sequence, tile * 64, 512], q_full, q_rope.index(0))
        if C.codes:
            used = _turn_pairs(keys, table, work, begun, even, odd, used, C)
        else:
            used = _copy_pairs(keys, table, work, begun, even, odd, used, C)
        before += pairs
        sequence += 1
        turn += 1
    start_next()  # who merges finds from the lengths what there is to merge
    tell(told, turn, (gl.to_tensor(-1),), C.fillers // 32)
