"""Keys of a tile of queries that are dealt out in parts: which of them a program of a Hopper kernel has, and where what it gives goes.

`hopper_prefill` deals out those of all tiles where there are fewer than programs (`key_parts`): as many parts of each, or, of keys in pages, whose number is
on the device, as a list says (`C.split` 0; `tile_lists`): what is told of a unit holds its place among all, part and parts, and a tile of one part
goes straight to the output. `hopper_fp8` does so where tiles are left when each program has
done as many as every other: of 2,048 tiles 132 programs do 15 each, and 68 are left: in five parts each they take three fifths of a tile's time instead of all
of it. Its part's output is normalised and in the result's dtype, with its LSE.
"""

import triton
import triton.language as tl

from onchip.kernels.attention.hopper_tiles import all_heads, key_steps, shift_of
from onchip.kernels.attention.tile import LN2, LOG2E, sequence
from onchip.kernels.attention.tile_lists import PART
from onchip.kernels.hopper import gl, gluon, uniform
from onchip.kernels.launch import starts_early

# ---- device


@gluon.jit
def part_of(number, whole, C: gl.constexpr):
    """The tile of a program's next work, and which part of its keys; below 0: all."""
    part = number - whole
    tile = number
    if C.parts > 1 and part >= 0:
        tile = whole + part // C.parts
        part = part % C.parts
    return tile, part


@gluon.jit
def part_steps(place, number, whole, C: gl.constexpr):
    """`key_steps` of a tile, or of a part of its keys."""
    top, masked, bare, low, row = key_steps(place, None, (0, 0, 0), C)
    if C.parts > 1:
        _tile, part = part_of(number, whole, C)
        if part >= 0:
            first, end = part * (top + 1) // C.parts, (part + 1) * (top + 1) // C.parts
            top, bare = top - first, end - first - 1
    return top, masked, bare, low, row


@gluon.jit
def keys_of_part(place, steps, part, C: gl.constexpr):
    """How many keys there are; of a part of none of the tile's steps 0, so that it sees nothing."""
    _b, _head, _tile_m, _start_q, _len_q, _start_k, len_k, _shift = place
    _top, masked, bare, low, _row = steps
    count = 1 + masked + bare + low
    return gl.where((part + 1) * count // C.split > part * count // C.split, len_k, 0)


@gluon.jit
def unit_at(number, sizes, lengths, C: gl.constexpr):
    """Unit `number` of a list, all heads of one side by side, as a place (`hopper_tiles.locate`); whether there is one; and what is told of it."""
    listed, q_offsets, k_offsets, q_used, k_used = lengths
    index = number // sizes[3]
    listed += 2 * index
    b, word = uniform(gl.load(listed)), uniform(gl.load(listed + 1))
    real = b >= 0
    b = gl.maximum(b, 0)
    start_q, len_q = sequence(q_offsets, q_used, b, sizes[5])
    start_k, len_k = sequence(k_offsets, k_used, b, sizes[6])
    place = (b, number - index * sizes[3], word % PART, start_q, len_q, start_k, len_k, shift_of(len_q, len_k, C))
    return place, real, number * 1024 + word // PART


@gluon.jit
def part_and_parts(told, C: gl.constexpr):
    """Which part of a tile's keys a unit is, and of how many."""
    part, parts = told, C.split
    if C.split == 0:
        part, parts = told % 32, told // 32 % 32 + 1
    return part, parts


@gluon.jit
def unit_rows(told, C: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Where a warpgroup's rows lie among those of all units of several parts."""
    return told // 1024 * (64 * C.groups) + GROUP * 64 + gl.arange(0, 64, layout=layout)


@gluon.jit
def steps_of_part(steps, told, C: gl.constexpr):
    """A part's of a tile's `key_steps`, one at least."""
    if C.split != 1:
        part, parts = part_and_parts(told, C)
        top, masked, bare, low, row = steps
        count = 1 + masked + bare + low
        first = part * count // parts
        end = gl.maximum((part + 1) * count // parts, first + 1)
        near = gl.maximum(gl.minimum(1 + masked, end) - (first + 1), 0)
        far = gl.maximum(end - gl.maximum(1 + masked + bare, first + 1), 0)
        steps = (top - first, near, end - first - 1 - near - far, far, row)
    return steps


@gluon.jit
def after_parts(b, head, part, sizes, C: gl.constexpr):
    """Sequence and head, as output and LSE have them: behind those of the parts before."""
    if C.split > 1:
        if C.packed:
            head += part * all_heads(sizes, C)
        else:
            b += part * (sizes[7] // sizes[3])
    return b, head


@triton.jit(do_not_specialize=["whole", "tiles_m", "heads", "len_q"])
def _join(part_ptr, lse_ptr, o_ptr, o_lse_ptr, whole, tiles_m, heads, len_q, strides, lse_strides, M: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
          ROWS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """ROWS queries of one tile, sum_s exp(lse_s - lse) o_s; each part has seen a key."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tile, row = tl.program_id(0) // (M // ROWS), tl.program_id(0) % (M // ROWS) * ROWS
    batch_head = (whole + tile) // tiles_m
    batch, head = batch_head // heads, batch_head % heads
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, DIM)
    first = tile * (PARTS * M) + rows
    top = tl.load(lse_ptr + first)
    for s in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(lse_ptr + first + s * M))
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
    for s in tl.static_range(PARTS):
        weight = tl.exp2((tl.load(lse_ptr + first + s * M) - top) * LOG2E)
        total += weight
        acc += tl.load(part_ptr + (first + s * M)[:, None] * DIM + cols[None, :]).to(tl.float32) * weight[:, None]
    query = (whole + tile) % tiles_m * M + rows
    at = o_ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + query.to(tl.int64)[:, None] * strides[2]
    tl.store(at + cols[None, :], acc / total[:, None], mask=query[:, None] < len_q)
    if o_lse_ptr is not None:
        at = o_lse_ptr + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + query
        tl.store(at, top + tl.log2(total) * LN2, mask=query < len_q)


# ---- host

MOST = 6  # parts of a tile of `hopper_fp8`
ROWS = 16  # of a tile's queries, a program
COST = 6  # steps' time that joining takes


def parts_of(count: int, programs: int, steps: int) -> int:
    """How many parts the keys of the tiles that are left are best dealt out in, each of some of a tile's `steps` and one step's time more; 1: whole tiles."""
    left = count % programs
    if count <= programs or left == 0 or steps < MOST:
        return 1
    takes = {parts: triton.cdiv(left * parts, programs) * (triton.cdiv(steps, parts) + 1) + COST for parts in range(2, MOST + 1)}
    return min(takes, key=takes.get) if min(takes.values()) < steps else 1


def join(parts, part_lse, out, lse, whole: int, count: int) -> None:
    """Into `out` [batch, heads, len, dim] and `lse` (or None) the tiles of queries from number `whole` on, of `count` parts each.

    parts   [tiles x count, queries, dim], of a tile side by side.        part_lse   [tiles x count, queries]
    """
    _, heads, len_q, dim = out.shape
    units, m, _ = parts.shape
    early = starts_early(out)
    _join[(units // count * (m // ROWS),)](
        parts, part_lse, out, lse, whole, triton.cdiv(len_q, m), heads, len_q, out.stride()[:3], (0, 0) if lse is None else lse.stride()[:2],
        M=m, DIM=dim, PARTS=count, ROWS=ROWS, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
