"""Rotary embedding: in place on packed queries and keys, with QK-norm before it and the cache write after it; or of q and k into new memory, and back.

    (a, b) -> (a cos - b sin, b cos + a sin)        for the pairs of the first rotary_dim elements of a head; the rest stays
    x -> codes, scale, zero                         of keys and values on their way to a quantised cache, see `core/formats.py`

A program takes some heads of one token, or of many tokens all of one, of queries, keys or values alike, and a thread both elements of a pair, so nothing is
exchanged but the sum of the norm and the ends of a group. Each byte moves once: q and k read and written, v read, k and v
written to the cache. What a quantised cache gets are the two halves of each head side by side, as int4 packs them; where pairs
are others (interleaved, or a part rotated) they are read again as they were written.

From Hopper on it is launched while the kernel before it ends (programmatic dependent launch): of 2 us for a few tokens half is the way from one kernel to the
next. That is safe on both sides. It touches no memory before that kernel is complete, whatever that one let start early, and that one, by the same rule, is
complete only after the one before it. And its own results are looked at only by kernels that are launched in the plain way, after its end, or that wait for it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core import formats
from onchip.core.device import Device
from onchip.core.formats import Codes, Format
from onchip.core.problem import Rope
from onchip.kernels.launch import starts_early

TILE = 2048  # elements of a program
THREAD = 16  # elements of a thread: two 16-byte loads of bf16
# Whole tokens a program: of up to PIECES tiles, from MANY a multiprocessor on. 4,096 tokens of 32 heads over 8, int4: 28.3 us by tiles, 26.8 so (of 96
# registers 28.1, 72 27.3, 56 30.1), bf16 29.9 and 29.5, int8 28.3 and 28.0, e4m3 28.7 and 28.3.
PIECES, MANY, REGISTERS = 3, 16, 64
TINY = tl.constexpr(formats.TINY)


class Tiles(NamedTuple):
    """What a program takes of a token."""

    heads: int
    warps: int
    pieces: int = 1  # of so many heads, one after the other
    registers: int | None = None  # of a thread at most

    def __str__(self):
        return f"{self.pieces} x {self.heads} heads a program, {self.warps} warps"


# ---- device


@triton.jit
def _neox_pairs(PAIRS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Which of PAIRS are inside a head, and the columns of both elements, [1, PAIRS]. What lies past ROTARY is paired too, but does not rotate."""
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = (DIM - ROTARY + 1) // 2
    pair = tl.arange(0, PAIRS)[None, :]
    first = tl.where(pair < HALF, pair, pair + HALF)
    return pair < HALF + REST, first, first + tl.where(pair < HALF, HALF, REST)


@triton.jit
def _load_pairs(ptr, rows, PAIRS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each pair of the heads at `ptr`, each [HEADS, PAIRS]; 0 where `rows` [HEADS, 1] is not set."""
    if INTERLEAVED:  # one load of neighbours, taken apart in registers
        col = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(ptr + col, mask=rows & (col < DIM), other=0.0)
        return tl.split(x.reshape(x.shape[0], PAIRS, 2))
    inside, first, second = _neox_pairs(PAIRS, DIM, ROTARY)
    a = tl.load(ptr + first, mask=rows & inside, other=0.0)
    return a, tl.load(ptr + second, mask=rows & inside & (second < DIM), other=0.0)


@triton.jit
def _store_pairs(ptr, a, b, rows, WIDTH: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The reverse of `_load_pairs`, for the first WIDTH columns."""
    PAIRS: tl.constexpr = a.shape[1]
    if INTERLEAVED:
        col = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.join(a, b).reshape(a.shape[0], 2 * PAIRS)
        tl.store(ptr + col, x.to(ptr.dtype.element_ty), mask=rows & (col < WIDTH))
    else:
        inside, first, second = _neox_pairs(PAIRS, DIM, ROTARY)
        tl.store(ptr + first, a.to(ptr.dtype.element_ty), mask=rows & inside & (first < WIDTH))
        tl.store(ptr + second, b.to(ptr.dtype.element_ty), mask=rows & inside & (second < WIDTH))


@triton.jit
def _angles(table_ptr, row, rows, table_stride, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines, [1, PAIRS], of a row of the table; NaN where it has no such row. What lies past HALF means nothing."""
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (pair < HALF) & (row >= 0) & (row < rows)
    angles_ptr = table_ptr + row * table_stride + pair
    cos = tl.load(angles_ptr, mask=inside, other=float("nan")).to(tl.float32)
    return cos, tl.load(angles_ptr + HALF, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _qk_norm(a, b, is_query, q_weight_ptr, k_weight_ptr, eps, offset, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """RMSNorm of each head by the weights of queries or of keys."""
    scale = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / DIM + eps)
    q_a, q_b = _load_pairs(q_weight_ptr, is_query, a.shape[1], DIM, ROTARY, INTERLEAVED)
    k_a, k_b = _load_pairs(k_weight_ptr, ~is_query, a.shape[1], DIM, ROTARY, INTERLEAVED)
    w_a, w_b = q_a.to(tl.float32) + k_a.to(tl.float32), q_b.to(tl.float32) + k_b.to(tl.float32)  # one of the two is 0
    return a * scale * (w_a + offset), b * scale * (w_b + offset)


@triton.jit
def _halves(ptr, kept, other, HALF: tl.constexpr, DIM: tl.constexpr):
    """Both halves of the heads at `ptr`, each [HEADS, HALF]; `other` where `kept` [HEADS, 1] is not set."""
    FIRST: tl.constexpr = (DIM + 1) // 2
    col = tl.arange(0, HALF)[None, :]
    low = tl.load(ptr + col, mask=kept & (col < FIRST), other=other)
    return low, tl.load(ptr + FIRST + col, mask=kept & (col < DIM - FIRST), other=other)


@triton.jit
def _ends(x, COLS: tl.constexpr, INTEGER: tl.constexpr):
    """The least and the greatest number of each group of x [HEADS, groups, columns], or the greatest size twice: as int32 that sort like them, so
    that NaN is an end. Columns from COLS on do not count.
    """
    bits = x.to(tl.int32, bitcast=True)
    if INTEGER:
        key = bits ^ (bits >> 31 & 0x7FFFFFFF)
        if x.shape[1] * x.shape[2] > COLS:
            inside = tl.arange(0, x.shape[1])[None, :, None] * x.shape[2] + tl.arange(0, x.shape[2])[None, None, :] < COLS
            return tl.min(tl.where(inside, key, 0x7FFFFFFF), 2, keep_dims=True), tl.max(tl.where(inside, key, -0x80000000), 2, keep_dims=True)
        return tl.min(key, 2, keep_dims=True), tl.max(key, 2, keep_dims=True)
    most = tl.max(bits & 0x7FFFFFFF, 2, keep_dims=True)
    return most, most


@triton.jit
def _scales(low, high, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """(scale, zero, what a number is multiplied by) of groups with these ends, as `core.formats.encode` has them; zero is 0 for floats."""
    span = (high ^ (high >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    zero = tl.zeros_like(span)
    if INTEGER:
        bits = low ^ (low >> 31 & 0x7FFFFFFF)
        zero = (tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)  # down
        span = span - zero
    scale = tl.div_rn(span, tl.full(span.shape, LARGEST, tl.float32))
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)  # up
    scale = tl.where(scale >= TINY, scale, 0.0)
    finite = span < float("inf")
    factor = tl.where(finite & (scale > 0), tl.div_rn(tl.full(span.shape, 1.0, tl.float32), tl.where(scale > 0, scale, 1.0)), 0.0)
    return tl.where(finite, scale, float("nan")), zero, factor


@triton.jit
def _codes(x, zero, factor, FORMAT: tl.constexpr):
    """Numbers to codes, rounded to even, as int32. What rounds past the largest code is not there: scales are rounded up."""
    if FORMAT == "int8" or FORMAT == "int4":
        return ((x - zero) * factor + 8388608.0).to(tl.int32, bitcast=True) & 255  # 2^23, whose last digit is 1
    DIGITS: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    y = x * factor * (2.0**-120 if FORMAT == "e4m3" else 2.0**-112)  # exponents begin at 7 and 15 instead of 127; subnormal numbers become such
    bits = y.to(tl.int32, bitcast=True)
    size = bits + ((1 << (22 - DIGITS)) - 1) + (bits >> (23 - DIGITS) & 1)
    return (size >> (23 - DIGITS) & 0x7F) | (bits >> 24 & 0x80)


@triton.jit
def _store(k_ptr, v_ptr, at, x, of_k, kept):
    """Rows of x to the keys' memory, and to the values'; a pointer chosen by row would be one that nothing is known of: a byte a store."""
    tl.store(k_ptr + at, x, mask=kept & of_k)
    tl.store(v_ptr + at, x, mask=kept & ~of_k)


@triton.jit
def _store_scales(k_ptr, v_ptr, at, a, b, of_k, kept, GROUPS: tl.constexpr):
    """Numbers of the groups of both halves, float32 [HEADS, groups, 1]; `at`, `of_k`, `kept`: [HEADS, 1]. One group: `a` alone."""
    a = a.reshape(a.shape[0], a.shape[1]).to(tl.bfloat16)
    if GROUPS == 1:
        _store(k_ptr, v_ptr, at, a, of_k, kept)
    else:
        group = tl.arange(0, a.shape[1])[None, :]
        some = kept & (group < GROUPS // 2)
        _store(k_ptr, v_ptr, at + group, a, of_k, some)
        _store(k_ptr, v_ptr, at + GROUPS // 2 + group, b.reshape(b.shape[0], b.shape[1]).to(tl.bfloat16), of_k, some)


@triton.jit(do_not_specialize=["table_rows", "num_slots"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_append(
    qkv_ptr,
    table_ptr,
    positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    channel_ptr,
    slots_ptr,
    num_q,
    num_kv,
    page,
    num_slots,
    table_rows,
    token_stride,
    table_stride,
    page_stride,
    slot_stride,
    head_stride,
    scale_page_stride,
    scale_slot_stride,
    scale_head_stride,
    eps,
    offset,
    NORM: tl.constexpr,
    APPEND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # waits before it reads or writes anything, in every program, so whoever comes after finds all that came before, whenever that one starts
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = ROTARY // 2
    total = num_q + (2 * num_kv if APPEND else num_kv)
    tiles = tl.cdiv(total, HEADS * PIECES)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    begin = tl.program_id(0) % tiles * (HEADS * PIECES)
    loaded = ()
    for piece in tl.static_range(PIECES):  # all on their way before the first is stored
        head = begin + piece * HEADS + tl.arange(0, HEADS)[:, None]
        x = _load_pairs(qkv_ptr + token * token_stride + head * DIM, head < total, PAIRS, DIM, ROTARY, INTERLEAVED)
        loaded = loaded + (x,)  # noqa: RUF005 (device code)
    pair = tl.arange(0, PAIRS)[None, :]
    cos, sin = _angles(table_ptr, tl.load(positions_ptr + token), table_rows, table_stride, PAIRS, HALF)
    for piece in tl.static_range(PIECES):
        x_a, x_b = loaded[piece]  # [HEADS, PAIRS]
        first = begin + piece * HEADS
        head = first + tl.arange(0, HEADS)[:, None]
        rows, turned = head < total, head < num_q + num_kv
        heads_ptr = qkv_ptr + token * token_stride + head * DIM  # [HEADS, 1]
        a, b = x_a.to(tl.float32), x_b.to(tl.float32)
        if NORM:
            a, b = _qk_norm(a, b, head < num_q, q_weight_ptr, k_weight_ptr, eps, offset, DIM, ROTARY, INTERLEAVED)
        y_a = tl.where(turned, tl.where(pair < HALF, a * cos - b * sin, a).to(x_a.dtype), x_a)
        y_b = tl.where(turned, tl.where(pair < HALF, b * cos + a * sin, b).to(x_b.dtype), x_b)
        _store_pairs(heads_ptr, y_a, y_b, rows & turned, DIM if NORM else ROTARY, DIM, ROTARY, INTERLEAVED)

        if APPEND:
            told = tl.load(slots_ptr + token)
            if first + HEADS > num_q:
                slot = told.to(tl.int32)
                at, within = (slot // page).to(tl.int64), slot % page
                kept = rows & (head >= num_q) & (told >= 0) & (told < num_slots)
                kv_head = head - tl.where(turned, num_q, num_q + num_kv)
                target = at * page_stride + within * slot_stride + kv_head * head_stride  # [HEADS, 1]
                if FORMAT == "":
                    _store_pairs(k_cache_ptr + target, y_a, y_b, kept & turned, DIM, DIM, ROTARY, INTERLEAVED)
                    _store_pairs(v_cache_ptr + target, y_a, y_b, kept & ~turned, DIM, DIM, ROTARY, INTERLEAVED)
                else:
                    low, high = y_a, y_b
                    if INTERLEAVED or ROTARY < DIM:
                        tl.debug_barrier()  # until all is written
                        low, high = _halves(heads_ptr, kept, 0.0, PAIRS, DIM)
                    low, high = low.to(tl.float32), high.to(tl.float32)
                    if channel_ptr is not None:
                        low_channel, high_channel = _halves(channel_ptr + kv_head * DIM, kept & turned, 1.0, PAIRS, DIM)
                        low, high = tl.div_rn(low, low_channel), tl.div_rn(high, high_channel)
                    INTEGER: tl.constexpr = FORMAT == "int8" or FORMAT == "int4"
                    FIRST: tl.constexpr = (DIM + 1) // 2
                    GROUP: tl.constexpr = PAIRS if GROUPS == 1 else DIM // GROUPS
                    low, high = low.reshape(HEADS, PAIRS // GROUP, GROUP), high.reshape(HEADS, PAIRS // GROUP, GROUP)
                    a_least, a_most = _ends(low, FIRST, INTEGER)
                    b_least, b_most = _ends(high, DIM - FIRST, INTEGER)
                    if GROUPS == 1:
                        a_least, a_most = tl.minimum(a_least, b_least), tl.maximum(a_most, b_most)
                        b_least, b_most = a_least, a_most
                    a_scale, a_zero, a_factor = _scales(a_least, a_most, LARGEST, INTEGER)
                    b_scale, b_zero, b_factor = _scales(b_least, b_most, LARGEST, INTEGER)
                    a_codes = _codes(low, a_zero, a_factor, FORMAT).reshape(HEADS, PAIRS)
                    b_codes = _codes(high, b_zero, b_factor, FORMAT).reshape(HEADS, PAIRS)
                    if FORMAT == "int4":
                        _store(k_cache_ptr, v_cache_ptr, target + pair, (a_codes | b_codes << 4).to(tl.uint8), turned, kept & (pair < FIRST))
                    else:
                        _store(k_cache_ptr, v_cache_ptr, target + pair, a_codes.to(tl.uint8), turned, kept & (pair < FIRST))
                        _store(k_cache_ptr, v_cache_ptr, target + FIRST + pair, b_codes.to(tl.uint8), turned, kept & (pair < DIM - FIRST))
                    places = at * scale_page_stride + within * scale_slot_stride + kv_head * scale_head_stride
                    _store_scales(k_scale_ptr, v_scale_ptr, places, a_scale, b_scale, turned, kept, GROUPS)
                    if INTEGER:
                        _store_scales(k_zero_ptr, v_zero_ptr, places, a_zero, b_zero, turned, kept, GROUPS)


@triton.jit(do_not_specialize=["table_rows"])
def _rotary(q_ptr, k_ptr, q_out_ptr, k_out_ptr, table_ptr, positions_ptr, num_q, num_kv, length, table_rows, q_strides, k_strides, table_stride,
            position_strides, BACK: tl.constexpr, INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
            ALIGNED: tl.constexpr):  # fmt: skip
    """HEADS heads of one token of q or k [batch, len, heads, DIM] to memory that is contiguous. BACK: by minus the angle. ALIGNED: q and k to 16 bytes."""
    HALF: tl.constexpr = ROTARY // 2
    of_q, tiles = tl.cdiv(num_q, HEADS), tl.cdiv(num_q, HEADS) + tl.cdiv(num_kv, HEADS)
    token, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    is_q = tile < of_q
    heads = tl.where(is_q, num_q, num_kv)
    head = (tile - tl.where(is_q, 0, of_q)) * HEADS + tl.arange(0, HEADS)[:, None]
    rows, pair = head < heads, tl.arange(0, PAIRS)[None, :]
    sample, position = token // length, token % length
    from_q = sample * q_strides[0] + position * q_strides[1] + head.to(tl.int64) * q_strides[2]
    from_k = sample * k_strides[0] + position * k_strides[1] + head.to(tl.int64) * k_strides[2]
    x_ptr = tl.where(is_q, q_ptr, k_ptr)
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    x_a, x_b = _load_pairs(x_ptr + tl.where(is_q, from_q, from_k), rows, PAIRS, DIM, ROTARY, INTERLEAVED)
    if positions_ptr is None:
        row = position
    else:
        row = tl.load(positions_ptr + sample * position_strides[0] + position * position_strides[1]).to(tl.int64)
    cos, sin = _angles(table_ptr, row, table_rows, table_stride, PAIRS, HALF)
    if BACK:
        sin = -sin
    a, b = x_a.to(tl.float32), x_b.to(tl.float32)
    y_a = tl.where(pair < HALF, (a * cos - b * sin).to(x_a.dtype), x_a)
    y_b = tl.where(pair < HALF, (b * cos + a * sin).to(x_b.dtype), x_b)
    y_ptr = tl.multiple_of(tl.where(is_q, q_out_ptr, k_out_ptr), 16)
    _store_pairs(y_ptr + (token * heads + head) * DIM, y_a, y_b, rows, DIM, DIM, ROTARY, INTERLEAVED)


# ---- host


def launch_rotary(
    problem: Rope, config: Tiles, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor | None, back: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, len, heads, dim] and k [batch, len, kv_heads, dim] rotated, contiguous; positions [batch, len], or None: 0, 1, 2, ... along len."""
    p, tiles = problem, triton.cdiv(problem.heads, config.heads) + triton.cdiv(problem.kv_heads, config.heads)
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    table = table if table.stride(1) == 1 else table.contiguous()
    turned = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    places = (0, 0) if positions is None else positions.stride()
    if p.tokens:
        _rotary[(p.tokens * tiles,)](
            q, k, *turned, table, positions, p.heads, p.kv_heads, q.shape[1], len(table), q.stride()[:3], k.stride()[:3], table.stride(0), places,
            BACK=back, INTERLEAVED=p.layout == "interleaved", ROTARY=p.rotary_dim, DIM=p.dim, PAIRS=pairs(p), HEADS=config.heads,
            ALIGNED=all(x.data_ptr() % 16 == 0 for x in (q, k)), num_warps=config.warps,
        )  # fmt: skip
    return turned


def launch_rotary_backward(problem: Rope, config: Tiles, dq: torch.Tensor, dk: torch.Tensor, table: torch.Tensor, positions: torch.Tensor | None):
    """The gradients of q and k from those of the rotated: turned back."""
    return launch_rotary(problem, config, dq, dk, table, positions, back=True)


def configs(problem: Rope, device: Device) -> list[Tiles]:
    """As many heads as fill a tile; of many tokens a whole one, so that its angles are loaded once and the programs are fewer."""
    p, block, total = problem, 2 * pairs(problem), problem.heads + (1 + problem.append) * problem.kv_heads
    heads = max(1, min(TILE // block, triton.next_power_of_2(total)))
    warps, tiles = max(1, heads * block // (32 * THREAD)), triton.cdiv(total, heads)
    plain = p.layout == "neox" and p.rotary_dim == p.dim and not p.norm and p.dtype.itemsize == 2
    timed = device.kind == "cpu" or (device.kind == "cuda" and device.arch >= 90)  # there; "cpu" is the interpreter
    if not timed or not plain or not 1 < tiles <= PIECES or p.tokens < MANY * device.sms:
        return [Tiles(heads, warps)]
    return [Tiles(heads, warps, tiles, REGISTERS)]


def pairs(problem: Rope) -> int:
    """Pairs of elements in a head, or the next power of two."""
    return triton.next_power_of_2((problem.dim + 1) // 2)


def launch(
    problem: Rope,
    config: Tiles,
    qkv: torch.Tensor,  # [tokens, (heads + 2 kv_heads) dim]
    table: torch.Tensor,  # [positions, rotary_dim]
    positions: torch.Tensor,  # [tokens]
    norm,  # QKNorm or None
    append,  # Append or None
) -> None:
    if qkv.stride(1) != 1:
        raise ValueError(f"rope_append: the rows of qkv are not contiguous (strides {qkv.stride()}), and they are rotated in place; give qkv.contiguous()")
    table = table if table.stride(1) == 1 else table.contiguous()
    q_weight, k_weight, eps, offset = (None, None, 0.0, 0.0) if norm is None else (norm.q.contiguous(), norm.k.contiguous(), norm.eps, norm.offset)
    to = Target.of(append)
    tiles = triton.cdiv(problem.heads + (1 + problem.append) * problem.kv_heads, config.heads * config.pieces)
    form = Format.of(problem.kv) if problem.kv else None
    early = starts_early(qkv)
    _rope_append[(problem.tokens * tiles,)](
        qkv,
        table,
        positions.contiguous(),
        q_weight,
        k_weight,
        *to.codes,
        *to.scales,
        *to.zeros,
        to.channel,
        to.slots,
        problem.heads,
        problem.kv_heads,
        to.page,
        to.num_slots,
        len(table),
        qkv.stride(0),
        table.stride(0),
        *to.strides,
        *to.scale_strides,
        eps,
        offset,
        NORM=problem.norm,
        APPEND=problem.append,
        INTERLEAVED=problem.layout == "interleaved",
        ROTARY=problem.rotary_dim,
        DIM=problem.dim,
        PAIRS=pairs(problem),
        HEADS=config.heads,
        PIECES=config.pieces,
        FORMAT=form.name if form else "",
        GROUPS=form.groups(problem.dim) if form else 1,
        LARGEST=form.largest if form else 1.0,
        EARLY=early,
        num_warps=config.warps,
        **({"maxnreg": config.registers} if config.registers and qkv.is_cuda else {}),
        **({"launch_pdl": True} if early else {}),
    )


class Target(NamedTuple):
    """The cache of an Append as the kernel takes it: pairs of keys and values, and their strides (page, slot, head)."""

    codes: tuple = (None, None)
    scales: tuple = (None, None)
    zeros: tuple = (None, None)
    channel: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    page: int = 1
    num_slots: int = 0
    strides: tuple[int, ...] = (0, 0, 0)
    scale_strides: tuple[int, ...] = (0, 0, 0)

    @staticmethod
    def of(append) -> "Target":
        if append is None:
            return Target()
        k, v, slots = append.k, append.v, append.slots.contiguous()
        num_slots = k.shape[0] * k.shape[1]
        if num_slots >= 1 << 31:
            raise ValueError(
                f"rope_append: append.k has {k.shape[0]} pages of {k.shape[1]} slots; give fewer than 2^31 slots, which the kernel counts in 32 bits"
            )
        if not isinstance(k, Codes):
            return Target((k, v), slots=slots, page=k.shape[1], num_slots=num_slots, strides=_strides("", k, v))
        scales = _strides(".scale and .zero", *k.tensors[1:], *v.tensors[1:])
        codes = k.codes.view(torch.uint8), v.codes.view(torch.uint8)
        channel = None if k.channel is None else k.channel.contiguous()
        return Target(codes, (k.scale, v.scale), (k.zero, v.zero), channel, slots, k.shape[1], num_slots, _strides(".codes", *codes), scales)


def _strides(what: str, *pages: torch.Tensor) -> tuple[int, ...]:
    """Of pages of k and v, which have to be the same."""
    if len({t.stride() for t in pages}) > 1 or pages[0].stride(3) != 1:
        given = " and ".join(str(t.stride()) for t in pages)
        raise ValueError(f"rope_append: pages of k{what} and v{what} have strides {given}; they must be equal, the last one 1")
    return pages[0].stride()[:3]
