"""What the decode kernel is made of: the list of key tiles and whose they are, where keys lie, and codes that become numbers in registers.

A tile of keys is [keys], or [WARPS, keys of a warp] where warps work apart; what it is multiplied with has the same first axis.
"""

import triton
import triton.language as tl

from onchip.kernels.attention.tile import key_span

ROOM = tl.constexpr(14)  # weights times scales stay below 2^15, of the 2^16 that float16 holds


# ---- the list of work


@triton.jit
def sequence_of(lengths_ptr, offsets_ptr, b, inside, len_q):
    """Keys of sequences `b`, how many queries they have, and the first of these; 0 outside."""
    len_k = tl.load(lengths_ptr + b, mask=inside, other=0)
    first = b * 0
    queries = first + len_q
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + b, mask=inside, other=0)
        queries = tl.load(offsets_ptr + b + 1, mask=inside, other=0) - first
    return len_k, queries, first


@triton.jit
def reach(len_k, queries, BAND: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that some query of a sequence sees, [lowest, end), and the start of the tile that `lowest` is in."""
    shift = len_k - queries
    if BAND[2]:
        shift = shift * 0
    lowest, end = key_span(shift, shift + queries - 1, len_k, BAND[0], BAND[1] if BAND[2] else -1)  # bottom right, the last query sees to the end
    lowest += shift * 0
    return lowest, lowest // BLOCK_N * BLOCK_N, end


@triton.jit
def items_of(len_k, queries, kv_heads, group, BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr):
    """Items of ITEM keys in a unit of a sequence, at least 1 so that somebody writes its zeros, and how many tiles its rows make."""
    _, start, end = reach(len_k, queries, BAND, BLOCK_N)
    return tl.maximum(tl.cdiv(end - start, ITEM), 1), tl.cdiv(queries * group, ROWS)


@triton.jit
def work_of(lengths_ptr, offsets_ptr, first, batch, len_q, kv_heads, group,
            BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Items of each of BATCH sequences from `first` on, all units together."""
    b = first + tl.arange(0, BATCH)
    len_k, queries, _ = sequence_of(lengths_ptr, offsets_ptr, b, b < batch, len_q)
    items, tiles = items_of(len_k, queries, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM)
    return tl.where(b < batch, items * tiles * kv_heads, 0)


@triton.jit
def total_work(lengths_ptr, offsets_ptr, batch, len_q, kv_heads, group,
               BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Items of the whole batch."""
    total = 0
    for first in range(0, batch, BATCH):
        total += tl.sum(work_of(lengths_ptr, offsets_ptr, first, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH), 0)
    return total


@triton.jit
def locate(lengths_ptr, offsets_ptr, item, batch, len_q, kv_heads, group,
           BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """The sequence that `item` of the list belongs to, and the items before that sequence's."""
    b = 0
    before = 0
    seen = 0
    for first in range(0, batch, BATCH):
        work = work_of(lengths_ptr, offsets_ptr, first, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
        passed = (seen + tl.cumsum(work, 0) <= item) & (first + tl.arange(0, BATCH) < batch)
        b += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, work, 0), 0)
        seen += tl.sum(work, 0)
    return b, before


@triton.jit
def share_of(program, total, programs):
    """Where the share of a program begins: all are of one length, or one item longer."""
    return program * (total // programs) + tl.minimum(program, total % programs)


@triton.jit
def owner_of(item, total, programs):
    """The program whose share holds `item`."""
    each, more = total // programs, total % programs
    longer = more * (each + 1)
    return tl.where(item < longer, item // (each + 1), more + (item - longer) // tl.maximum(each, 1))


# ---- tiles


@triton.jit
def keys_of(WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of a tile, those of a warp side by side."""
    if WARPS == 1:
        return tl.arange(0, BLOCK_N)
    else:
        each: tl.constexpr = BLOCK_N // WARPS
        return tl.arange(0, WARPS)[:, None] * each + tl.arange(0, each)[None, :]


@triton.jit
def of_rows(x):
    """A value of each row (or key) [.., M] beside columns: [.., M, 1]."""
    return tl.expand_dims(x, len(x.shape))


@triton.jit
def of_columns(x):
    """A value of each key [.., N] beside rows: [.., 1, N]."""
    return tl.expand_dims(x, len(x.shape) - 1)


@triton.jit
def flipped(x):
    """[.., N, D] -> [.., D, N]."""
    if len(x.shape) == 3:
        return tl.permute(x, (0, 2, 1))
    else:
        return tl.permute(x, (1, 0))


@triton.jit
def for_warps(x, WARPS: tl.constexpr):
    """[M, D] for each warp."""
    if WARPS == 1:
        return x
    else:
        return tl.broadcast_to(x[None, :, :], (WARPS, x.shape[0], x.shape[1]))


@triton.jit
def seen_by_band(scores, rows, cols, near, BAND: tl.constexpr):
    """Scores [.., M, N], with -inf where row `rows` [M] does not see key `cols` [.., N]."""
    seen = of_columns(near)
    if BAND[1] >= 0:
        seen = seen & (of_columns(cols) <= rows[:, None] + BAND[1])
    if BAND[0] >= 0:
        seen = seen & (of_columns(cols) >= rows[:, None] - BAND[0])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def parts_of_warps(top):
    """The maximum of all warps [M], and the factor by which each warp's sums shrink [WARPS, M]."""
    most = tl.max(top, 0)
    return most, tl.math.exp2(top - tl.where(most == float("-inf"), 0.0, most)[None, :])


# ---- codes


@triton.jit
def power_of_two(e):
    """2^e as float32, of -126 <= e <= 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent(x):
    """floor(log2 x) of x >= 0, between -100 and 100."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> 23) - 127, -100), 100)


@triton.jit
def centre(FORMAT: tl.constexpr):
    """What `unpacked` has taken off each code, so that numbers around 0 are multiplied."""
    return 128.0 if FORMAT == "int8" else 8.0 if FORMAT == "int4" else 0.0


@triton.jit
def unpacked(x, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """Codes, two bytes in an int16, as float16 less `centre`: the even and the odd columns; of int4 those of the low bits, then of the high.

    FAST: PTX that turns two keys or columns at once, 0.5 to 1.1 instructions a number. Bytes become the low bits of 1024, whose float16
    neighbours are 1 apart (0x64xx); of e5m2 they are the high half of a float16.
    """
    if FAST and FORMAT == "e4m3":
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (even, odd)
    elif FAST and FORMAT == "e5m2":
        even, odd = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=&r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (even, odd)
    elif FAST and FORMAT == "int8":
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 e, o, c, s; mov.b32 c, 0x64646464; mov.b32 s, 0x64806480; prmt.b32 e, $2, c, 0x4240; prmt.b32 o, $2, c, 0x4341;"
            " sub.f16x2 $0, e, s; sub.f16x2 $1, o, s; }",
            "=&r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (even, odd)
    elif FAST and FORMAT == "int4":
        even, odd, even_high, odd_high = tl.inline_asm_elementwise(
            "{ .reg .b32 y, a, b, c, d, k, s, m, z; mov.b32 k, 0x64006400; mov.b32 s, 0x64086408; mov.b32 m, 0x2C002C00; mov.b32 z, 0xD480D480;"
            " shr.u32 y, $4, 8; lop3.b32 a, $4, 0x000F000F, k, 0xEA; lop3.b32 b, y, 0x000F000F, k, 0xEA;"
            " lop3.b32 c, $4, 0x00F000F0, k, 0xEA; lop3.b32 d, y, 0x00F000F0, k, 0xEA;"
            " sub.f16x2 $0, a, s; sub.f16x2 $1, b, s; fma.rn.f16x2 $2, c, m, z; fma.rn.f16x2 $3, d, m, z; }",
            "=&r,=&r,=&r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (even, odd, even_high, odd_high)
    else:
        even, odd = x & 0xFF, (x >> 8) & 0xFF
        if FORMAT == "int8":
            return ((even - 128).to(tl.float16), (odd - 128).to(tl.float16))
        elif FORMAT == "int4":
            return (((even & 15) - 8).to(tl.float16), ((odd & 15) - 8).to(tl.float16), ((even >> 4) - 8).to(tl.float16), ((odd >> 4) - 8).to(tl.float16))
        elif FORMAT == "e5m2":
            return ((even << 8).to(tl.float16, bitcast=True), (odd << 8).to(tl.float16, bitcast=True))
        else:
            return (_of_e4m3(even), _of_e4m3(odd))


@triton.jit
def _of_e4m3(byte):
    """Sign, 4 bits of exponent and 3 of mantissa at their places in a float16, whose exponent is 8 too small: normal or not, exact."""
    return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def columns_of(piece: tl.constexpr, PIECES: tl.constexpr, PLANES: tl.constexpr, HALF: tl.constexpr, USED: tl.constexpr, UNITS: tl.constexpr):
    """The columns of a head that plane `piece % PLANES` of block `piece // PLANES` holds, [UNITS], and which of them are there.

    A block is USED int16 of a row of codes, in tiles of UNITS; HALF is where the columns of the high bits begin.
    """
    unit = tl.arange(0, UNITS)
    plane: tl.constexpr = piece % PLANES
    first: tl.constexpr = (piece // PLANES) * 2 * USED + plane % 2 + (plane // 2) * HALF
    return first + 2 * unit, unit < USED


@triton.jit
def group_of(piece: tl.constexpr, BLOCKS: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr):
    """The group of columns, with a scale of its own, that a piece belongs to."""
    return 0 if GROUPS == 1 else (piece % PLANES) // 2 * BLOCKS + piece // PLANES


@triton.jit
def beside(x, WARPS: tl.constexpr):
    """A number of each warp beside its rows or keys; one of all warps is a scalar."""
    return x if WARPS == 1 else tl.expand_dims(x, 1)


@triton.jit
def queries_of_codes(q_ptr, q_rows, there, channel_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, WARPS: tl.constexpr):
    """q for the pieces of a row of codes in float16, their sums over each group, and the power of two that a row was divided by: products are exact."""
    GROUPS: tl.constexpr = KIND[1]
    BLOCKS: tl.constexpr = KIND[2]
    PLANES: tl.constexpr = KIND[3]
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0).to(tl.float32)
    if channel_ptr is not None:
        q = q * tl.load(channel_ptr + dims, mask=dims < D, other=0.0)[None, :]
    e = exponent(tl.max(tl.abs(q), 1))
    planes = ()
    sums = ()
    for piece in tl.static_range(BLOCKS * PLANES):
        cols, used = columns_of(piece, PLANES, KIND[4], KIND[5], KIND[6])
        x = tl.load(q_ptr + q_rows[:, None] + cols[None, :], mask=there[:, None] & used[None, :], other=0.0).to(tl.float32)
        if channel_ptr is not None:
            x = x * tl.load(channel_ptr + cols, mask=used, other=0.0)[None, :]
        planes = planes + (for_warps((x * power_of_two(-e)[:, None]).to(tl.float16), WARPS),)
    for group in tl.static_range(GROUPS):
        total = tl.zeros(planes[0].shape[:-1], tl.float32)
        for piece in tl.static_range(BLOCKS * PLANES):
            if group_of(piece, BLOCKS, PLANES, GROUPS) == group:
                total += tl.sum(planes[piece].to(tl.float32), len(planes[0].shape) - 1)
        sums = sums + (total,)
    return planes, sums, power_of_two(e)


@triton.jit
def scales_of(scales, pages, slots, head, near, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Scale and zero of each key for each group in float32, two tuples; the zero is that of codes less `centre`."""
    scale = ()
    zero = ()
    rows = pages * scales[1] + slots * scales[2] + head * scales[3]
    zero_rows = rows
    if scales[4] is not None:
        zero_rows = pages * scales[5] + slots * scales[6] + head * scales[7]
    for group in tl.static_range(GROUPS):
        one = tl.load(scales[0] + rows + group, mask=near, other=0.0).to(tl.float32)
        scale = scale + (one,)
        if scales[4] is not None:
            zero = zero + (tl.load(scales[4] + zero_rows + group, mask=near, other=0.0).to(tl.float32) + one * centre(FORMAT),)
    return scale, zero


@triton.jit
def scores_of_codes(q, sums, codes_ptr, rows, near, scale, zero, KIND: tl.constexpr, FAST: tl.constexpr):
    """sum over groups of scale (q . codes) + zero sum(q), [.., M, N]."""
    GROUPS: tl.constexpr = KIND[1]
    BLOCKS: tl.constexpr = KIND[2]
    PLANES: tl.constexpr = KIND[3]
    USED: tl.constexpr = KIND[5]
    unit = tl.arange(0, KIND[6])
    scores = 0.0
    raw = 0.0
    for block in tl.static_range(BLOCKS):
        x = tl.load(codes_ptr + of_rows(rows) + (block * USED + unit), mask=of_rows(near) & (unit < USED), other=0)
        planes = unpacked(x, KIND[0], FAST)
        for half in tl.static_range(PLANES // 2):
            piece: tl.constexpr = block * PLANES + 2 * half
            if GROUPS == 1 and piece > 0:
                raw = tl.dot(q[piece], flipped(planes[2 * half]), raw)
            else:
                raw = tl.dot(q[piece], flipped(planes[2 * half]))
            raw = tl.dot(q[piece + 1], flipped(planes[2 * half + 1]), raw)
            if GROUPS > 1 or piece + 2 == BLOCKS * PLANES:
                group: tl.constexpr = group_of(piece, BLOCKS, PLANES, GROUPS)
                scores += raw * of_columns(scale[group])
                if len(zero) > 0:
                    scores += of_rows(sums[group]) * of_columns(zero[group])
    return scores


@triton.jit
def add_values_of_codes(acc, zeros, peak, weights, shrink, codes_ptr, rows, near, scale, zero, KIND: tl.constexpr, WARPS: tl.constexpr, FAST: tl.constexpr):
    """Weights times values, added to the sums of each piece, and weights times zeros to those of each group.

    Weights are multiplied by the scales before the product, and by a power of two so that float16 holds them: 2^ROOM over the largest scale
    so far, 2^peak. The sums are in that unit, and shrink where the peak grows.
    """
    GROUPS: tl.constexpr = KIND[1]
    BLOCKS: tl.constexpr = KIND[2]
    PLANES: tl.constexpr = KIND[3]
    USED: tl.constexpr = KIND[5]
    unit = tl.arange(0, KIND[6])
    most = scale[0]
    for group in tl.static_range(1, GROUPS):
        most = tl.maximum(most, scale[group])
    new_peak = tl.maximum(peak, exponent(tl.max(most, len(most.shape) - 1)))
    up = beside(power_of_two(ROOM - new_peak), WARPS)
    shrunk = shrink * beside(power_of_two(tl.maximum(peak - new_peak, -126)), WARPS)
    scaled = ()
    new_zeros = ()
    for group in tl.static_range(GROUPS):
        scaled = scaled + ((weights * of_columns(scale[group] * up)).to(tl.float16),)
        if len(zero) > 0:
            new_zeros = new_zeros + (zeros[group] * shrink + tl.sum(weights * of_columns(zero[group]), len(weights.shape) - 1),)
    new_acc = ()
    for block in tl.static_range(BLOCKS):
        x = tl.load(codes_ptr + of_rows(rows) + (block * USED + unit), mask=of_rows(near) & (unit < USED), other=0)
        planes = unpacked(x, KIND[0], FAST)
        for plane in tl.static_range(PLANES):
            piece: tl.constexpr = block * PLANES + plane
            new_acc = new_acc + (tl.dot(scaled[group_of(piece, BLOCKS, PLANES, GROUPS)], planes[plane], acc[piece] * of_rows(shrunk)),)
    return new_acc, new_zeros, new_peak
