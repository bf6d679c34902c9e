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
    """Items of each of BATCH sequences from `first` on, of all units together and of one."""
    b = first + tl.arange(0, BATCH)
    len_k, queries, _ = sequence_of(lengths_ptr, offsets_ptr, b, b < batch, len_q)
    items, tiles = items_of(len_k, queries, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM)
    return tl.where(b < batch, items * tiles * kv_heads, 0), tl.where((b < batch) & (tiles > 0), items, 0)


@triton.jit
def total_work(lengths_ptr, offsets_ptr, batch, len_q, kv_heads, group,
               BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Items of the whole batch, and of its longest unit."""
    total = 0
    longest = 0
    for first in range(0, batch, BATCH):
        work, each = work_of(lengths_ptr, offsets_ptr, first, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
        total += tl.sum(work, 0)
        longest = tl.maximum(longest, tl.max(each, 0))
    return total, longest


@triton.jit
def locate(lengths_ptr, offsets_ptr, item, batch, len_q, kv_heads, group,
           BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ITEM: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """The sequence that `item` of the list belongs to, and the items before that sequence's."""
    b = 0
    before = 0
    seen = 0
    for first in range(0, batch, BATCH):
        work, _ = work_of(lengths_ptr, offsets_ptr, first, batch, len_q, kv_heads, group, BAND, ROWS, BLOCK_N, ITEM, BATCH)
        passed = (seen + tl.cumsum(work, 0) <= item) & (first + tl.arange(0, BATCH) < batch)
        b += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, work, 0), 0)
        seen += tl.sum(work, 0)
    return b, before


@triton.jit
def share_length(total, longest, programs):
    """Items of a program's share, and how many programs, the first, have one more. As many for all; where that costs a sixteenth at most, one, one and a
    half or two units, or a unit in equal parts: what is not cut needs no merging, and fewer ends of units lie in a share. (32x4k 130.7 to 128.2 us, MQA 146
    to 134; e4m3 48x2k, one and a half, 60.3 to 58.3; four units of 1k a share lost 1 to 3%.)
    """
    each = tl.maximum(tl.cdiv(total, programs), 1)
    longest = tl.maximum(longest, 1)
    even = tl.where(longest < each, tl.where(2 * each <= 3 * longest, tl.cdiv(3 * longest, 2), 2 * longest), tl.cdiv(longest, tl.maximum(longest // each, 1)))
    whole = (even >= each) & (16 * (even - each) <= each)
    return tl.where(whole, even, total // programs), tl.where(whole, 0, total % programs)


@triton.jit
def share_of(program, total, each):
    """Where the share of a program begins."""
    return tl.minimum(program * each[0] + tl.minimum(program, each[1]), total)


@triton.jit
def owner_of(item, each):
    """The program whose share an item is in."""
    edge = each[1] * (each[0] + 1)
    return tl.where(item < edge, item // (each[0] + 1), each[1] + (item - edge) // each[0])


# ---- tiles


@triton.jit
def keys_of(WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of a tile, those of a warp side by side."""
    each: tl.constexpr = BLOCK_N // WARPS
    own = tl.arange(0, each)
    if WARPS > 1:
        own = tl.arange(0, WARPS)[:, None] * each + own[None, :]
    return own


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
    return tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else tl.permute(x, (1, 0))


@triton.jit
def for_warps(x, WARPS: tl.constexpr):
    """[M, D] for each warp."""
    return x if WARPS == 1 else tl.broadcast_to(x[None, :, :], (WARPS, x.shape[0], x.shape[1]))


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
    """floor(log2 x) of x >= 0, between -100 and 116: sums of integer codes are multiplied by 2^10 times the largest scale at the end."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> 23) - 127, -100), 116)


@triton.jit
def unpacked(x, KIND: tl.constexpr, FAST: tl.constexpr):
    """Codes, two bytes in an int16, as float16: the even and the odd columns; of int4 those of the low bits, then of the high.

    An integer code is the mantissa of a float16 that is not normal, code 2^-24 (2^-20 in int4's high bits): exact, and nothing to subtract.
    FAST: PTX that turns two keys or columns at once, 0.5 to 0.75 instructions a number.
    """
    if FAST and KIND[0] == "e4m3":
        planes = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST and KIND[0] == "e5m2":
        planes = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=&r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST and KIND[0] == "int8":
        planes = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4240; prmt.b32 $1, $2, 0, 0x4341;",
            "=&r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST and KIND[0] == "int4":
        planes = tl.inline_asm_elementwise(
            "{ .reg .b32 y; shr.u32 y, $4, 8; and.b32 $0, $4, 0x000F000F; and.b32 $1, y, 0x000F000F; and.b32 $2, $4, 0x00F000F0; and.b32 $3, y, 0x00F000F0; }",
            "=&r,=&r,=&r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = x & 0xFF, (x >> 8) & 0xFF
        if KIND[0] == "int8":
            planes = (even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True))
        elif KIND[0] == "int4":
            planes = (
                (even & 15).to(tl.float16, bitcast=True),
                (odd & 15).to(tl.float16, bitcast=True),
                (even & 240).to(tl.float16, bitcast=True),
                (odd & 240).to(tl.float16, bitcast=True),
            )
        elif KIND[0] == "e5m2":
            planes = ((even << 8).to(tl.float16, bitcast=True), (odd << 8).to(tl.float16, bitcast=True))
        else:
            planes = (_of_e4m3(even), _of_e4m3(odd))
    return planes


@triton.jit
def _of_e4m3(byte):
    """Sign, 4 bits of exponent and 3 of mantissa at their places in a float16, whose exponent is 8 too small: normal or not, exact."""
    return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def columns_of(piece: tl.constexpr, KIND: tl.constexpr):
    """The columns of a head that a piece holds, [UNITS], and which of them are there: plane `piece % PLANES` of block `piece // PLANES`."""
    PLANES: tl.constexpr = KIND[3]
    USED: tl.constexpr = KIND[5]
    UNITS: tl.constexpr = KIND[6]
    unit = tl.arange(0, UNITS)
    first: tl.constexpr = (piece // PLANES) * 2 * USED + piece % PLANES % 2 + (piece % PLANES // 2) * KIND[4]
    return first + 2 * unit, unit < USED


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
        cols, used = columns_of(piece, KIND)
        x = tl.load(q_ptr + q_rows[:, None] + cols[None, :], mask=there[:, None] & used[None, :], other=0.0).to(tl.float32)
        if channel_ptr is not None:
            x = x * tl.load(channel_ptr + cols, mask=used, other=0.0)[None, :]
        unit = power_of_two(-e) * (0.0625 if piece % PLANES > 1 else 1.0)  # high bits count 16 times
        planes = planes + (for_warps((x * unit[:, None]).to(tl.float16), WARPS),)  # noqa: RUF005
    for group in tl.static_range(GROUPS):
        total = tl.zeros(planes[0].shape[:-1], tl.float32)
        for piece in tl.static_range(BLOCKS * PLANES):
            if KIND[7][piece] == group:
                total += tl.sum(planes[piece].to(tl.float32), len(planes[0].shape) - 1) * (16.0 if piece % PLANES > 1 else 1.0)
        sums = sums + (total,)  # noqa: RUF005
    return planes, sums, power_of_two(e)


@triton.jit
def scales_of(scales, pages, slots, head, near, KIND: tl.constexpr):
    """Scale and zero of each key for each group in float32, two tuples."""
    GROUPS: tl.constexpr = KIND[1]
    scale = ()
    zero = ()
    rows = pages * scales[1] + slots * scales[2] + head * scales[3]
    zero_rows = rows
    if scales[4] is not None:
        zero_rows = pages * scales[5] + slots * scales[6] + head * scales[7]
    for group in tl.static_range(GROUPS):
        one = tl.load(scales[0] + rows + group, mask=near, other=0.0).to(tl.float32)
        scale = scale + (one,)  # noqa: RUF005
        if scales[4] is not None:
            zero = zero + (tl.load(scales[4] + zero_rows + group, mask=near, other=0.0).to(tl.float32),)  # noqa: RUF005
    return scale, zero


@triton.jit
def scores_of_codes(q, sums, codes_ptr, rows, near, scale, zero, KIND: tl.constexpr, FAST: tl.constexpr):
    """sum over groups of scale (q . codes) + zero sum(q), [.., M, N]."""
    GROUPS: tl.constexpr = KIND[1]
    BLOCKS: tl.constexpr = KIND[2]
    PLANES: tl.constexpr = KIND[3]
    USED: tl.constexpr = KIND[5]
    UNITS: tl.constexpr = KIND[6]
    UNIT: tl.constexpr = 16777216.0 if KIND[8] else 1.0
    unit = tl.arange(0, UNITS)
    scores = 0.0
    raw = 0.0
    for block in tl.static_range(BLOCKS):
        x = tl.load(codes_ptr + of_rows(rows) + (block * USED + unit), mask=of_rows(near) & (unit < USED), other=0)
        planes = unpacked(x, KIND, FAST)
        for half in tl.static_range(PLANES // 2):
            if GROUPS == 1 and block + half > 0:
                raw = tl.dot(q[block * PLANES + 2 * half], flipped(planes[2 * half]), raw)
            else:
                raw = tl.dot(q[block * PLANES + 2 * half], flipped(planes[2 * half]))
            raw = tl.dot(q[block * PLANES + 2 * half + 1], flipped(planes[2 * half + 1]), raw)
            if GROUPS > 1 or 2 * half + 2 == PLANES:  # of one group there is one block
                scores += raw * of_columns(UNIT * scale[KIND[7][block * PLANES + 2 * half]])
                if len(zero) > 0:
                    scores += of_rows(sums[KIND[7][block * PLANES + 2 * half]]) * of_columns(zero[KIND[7][block * PLANES + 2 * half]])
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
    UNITS: tl.constexpr = KIND[6]
    unit = tl.arange(0, UNITS)
    most = scale[0]
    for group in tl.static_range(1, GROUPS):
        most = tl.maximum(most, scale[group])
    new_peak = tl.maximum(peak, exponent(tl.max(most, len(most.shape) - 1)))
    up = beside(power_of_two(-(new_peak - ROOM)), WARPS)
    shrunk = shrink * beside(power_of_two(tl.maximum(peak - new_peak, -126)), WARPS)
    scaled = ()
    new_zeros = ()
    for group in tl.static_range(GROUPS):
        scaled = scaled + ((weights * of_columns(scale[group] * up)).to(tl.float16),)  # noqa: RUF005
        if len(zero) > 0:
            new_zeros = new_zeros + (zeros[group] * shrink + tl.sum(weights * of_columns(zero[group]), len(weights.shape) - 1),)  # noqa: RUF005
    new_acc = ()
    for block in tl.static_range(BLOCKS):
        x = tl.load(codes_ptr + of_rows(rows) + (block * USED + unit), mask=of_rows(near) & (unit < USED), other=0)
        planes = unpacked(x, KIND, FAST)
        for plane in tl.static_range(PLANES):
            before = acc[block * PLANES + plane] * of_rows(shrunk)
            new_acc = new_acc + (tl.dot(scaled[KIND[7][block * PLANES + plane]], planes[plane], before),)  # noqa: RUF005
    return new_acc, new_zeros, new_peak
