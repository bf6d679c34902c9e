"""What the norm kernels share: a tile's rows and parameters, the branch that joins the residual, the end of the formula; and on the host their arguments.

Tiles are PARTS tensors [ROWS, BLOCK] side by side, as tuples: rows of one set down, columns across, and widths like 1,152 or 5,120 are nearly 5 times a
power of two. The k-th row of set s is `k * down + s * apart`: a set is a sample, whose rows follow each other, or a head. A parameter has one row for "all",
one for each "set" or one for each "row"; what a set's rows share is [1, BLOCK], loaded once a tile.
"""

import math

import torch
import triton
import triton.language as tl

from onchip.core.norms import Norm, sharing
from onchip.core.philox import ROUNDS, threshold
from onchip.kernels.meeting import BOTH

# ---- device


@triton.jit
def sigmoid(x):
    """To a few ulp, as exp is; an exact quotient is a branch for each element, and twice the time of a gated norm."""
    return 1.0 / (1.0 + tl.exp(tl.where(x < -80.0, 80.0, -x)))


@triton.jit
def both_sums(a, b, c, d):
    """Of two tensors at once, by `tl.reduce`: one way through shared memory."""
    return a + c, b + d


@triton.jit
def columns(first, BLOCK: tl.constexpr, PARTS: tl.constexpr, CTAS: tl.constexpr = 1):
    """The columns of each part, [CTAS, BLOCK]."""
    col = ()
    for n in tl.static_range(PARTS):
        col += (first + tl.arange(0, CTAS)[:, None] * (PARTS * BLOCK) + n * BLOCK + tl.arange(0, BLOCK)[None, :],)
    return col


@triton.jit
def kept(x, zero, KEPT: tl.constexpr):
    """x; if KEPT, such that float32 made of it is made here: of equal conversions the compiler keeps the result in between, in twice the registers of x.

    `zero` is one that the compiler does not know for one, another for each pass over the same numbers and in each turn of a loop.
    """
    if KEPT and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def widened(x, NVIDIA: tl.constexpr):
    """x, or float32 of bfloat16 on NVIDIA's GPUs: Triton's conversion takes two instructions for each second number, and one is enough."""
    if NVIDIA and tl.bfloat16 == x.dtype:
        code: tl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }"
        x = tl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return x


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    x = ()
    for _ in tl.static_range(PARTS):
        x += (tl.zeros([ROWS, BLOCK], tl.float32),)
    return x


@triton.jit
def parameter(ptr, stride, row, s, col, inside, width, PER: tl.constexpr):
    """A parameter as it is stored: [ROWS, BLOCK] where each row has its own, else [1, BLOCK]; 0 where there is none."""
    if ptr is None:
        x = tl.zeros([1, 1], tl.float32)
    elif PER == "row":
        x = tl.load(ptr + row * stride + col, mask=inside, other=0.0)
    elif PER == "set":
        x = tl.load(ptr + s.to(tl.int64) * stride + col, mask=col < width, other=0.0)
    else:
        x = tl.load(ptr + col, mask=col < width, other=0.0)
    return x


@triton.jit
def parameters(ptr, stride, row, there, s, col, width, PER: tl.constexpr, PARTS: tl.constexpr):
    """Of each part."""
    x = ()
    for n in tl.static_range(PARTS):
        x += (parameter(ptr, stride, row, s, col[n], there & (col[n] < width), width, PER),)
    return x


@triton.jit
def dropped(x, state_ptr, bar, grown, row, col, PHILOX_ROUNDS: tl.constexpr):
    """x where dropout keeps it, grown by 1 / (1 - p): Philox of (seed, offset, row, column), as `philox.kept_rows` draws them."""
    if state_ptr is not None:
        zero = (row + col).to(tl.int32) * 0
        word, _, _, _ = tl.philox(tl.load(state_ptr), zero + col, zero + row.to(tl.int32), zero, tl.load(state_ptr + 1).to(tl.int32), PHILOX_ROUNDS)
        x = tl.where(word >= bar.to(tl.uint32), x * grown, 0.0)
    return x


@triton.jit
def scaled(x, gate, row_scale, gate_ptr, row_scale_ptr):
    """x * gate * row_scale, of those that are there."""
    if gate_ptr is not None:
        x = x * gate.to(tl.float32)
    if row_scale_ptr is not None:
        x = x * row_scale
    return x


@triton.jit
def raised(w, offset):
    """w + offset, float32; without an offset there is no addition for each element, of which a row of codes has 23 instructions."""
    w = w.to(tl.float32)
    if offset is not None:
        w += offset
    return w


@triton.jit
def weighed(hat, w, b, offset, w_ptr, b_ptr):
    """hat * (w + offset) + b, of those that are there."""
    if w_ptr is not None:
        hat = hat * raised(w, offset)
    if b_ptr is not None:
        hat = hat + b.to(tl.float32)
    return hat


@triton.jit
def modulated(u, scale, shift, scale_ptr, shift_ptr):
    """u * (1 + scale) + shift, of those that are there."""
    if scale_ptr is not None:
        u = u * (1.0 + scale.to(tl.float32))
    if shift_ptr is not None:
        u = u + shift.to(tl.float32)
    return u


@triton.jit
def publish(word_ptr, x, y, mask=None):
    """Two figures of a piece as one int64 where `gather` finds them, without a counter: the bits of x turned round, which only one NaN has as 0."""
    word = (~x.to(tl.int32, bitcast=True)).to(tl.int64) & 0xFFFFFFFF | y.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(word_ptr, tl.where(word == 0, 1, word), mask=mask)


@triton.jit
def gather(word_ptr, PHASE: tl.constexpr):
    """The pairs at these addresses, each as soon as it has been published; words are 0 before. BOTH is PTX: each thread waits for its own words."""
    if PHASE == BOTH:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 w; again_${:uid}: ld.relaxed.gpu.global.b64 w, [$2]; setp.eq.b64 p, w, 0; @p bra again_${:uid}; "
            "mov.b64 {$0, $1}, w; bar.warp.sync -1; }",
            "=r,=r,l", [word_ptr], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        word = tl.load(word_ptr)
        low = word.to(tl.int32)
        high = (word >> 32).to(tl.int32)
    return (~low).to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def published(word_ptr, row, pieces, PHASE: tl.constexpr, PIECES: tl.constexpr):
    """The two figures of each piece of a row, [PIECES], 0 past the last. One dimension: of two, Triton would wait again in each layout that it is used in."""
    n = tl.arange(0, PIECES)
    x, y = gather(word_ptr + row * pieces + tl.minimum(n, pieces - 1), PHASE)
    return tl.where(n < pieces, x, 0.0), tl.where(n < pieces, y, 0.0)


@triton.jit
def merged(word_ptr, row, width, pieces, LAYER: tl.constexpr, PHASE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Mean and mean square deviation of a row from those of its pieces (Chan, Golub and LeVeque, 1983); of "rms" 0 and the mean square.

    Each piece of PIECE columns has published its sum of square deviations and its mean.
    """
    square, mean_of_piece = published(word_ptr, row, pieces, PHASE, PIECES)
    mean = 0.0
    if LAYER:
        n = tl.arange(0, PIECES)
        count = tl.where(n < pieces, tl.minimum(width - n * PIECE, PIECE), 0).to(tl.float32)
        first = tl.sum(tl.where(n == 0, mean_of_piece, 0.0))
        mean = first + tl.sum((mean_of_piece - first) * count) / width  # products of a large mean would each be rounded: a third more error
        square += count * (mean_of_piece - mean) * (mean_of_piece - mean)
    return mean, tl.sum(square) / width


@triton.jit
def sum_partials(partial_ptr, out_ptr, count, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out[i] = the sum of partial[i, :count], in one order always; partial [items, count, width] float32. EARLY: started before they were written."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pieces = tl.cdiv(width, BLOCK)
    item = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([COUNT, BLOCK], tl.float32)
    for first in range(0, count, COUNT):
        n = first + tl.arange(0, COUNT)[:, None]
        acc += tl.load(partial_ptr + (item * count + n) * width + col, mask=(n < count) & (col < width), other=0.0)
    total = tl.sum(acc, 0, keep_dims=True)
    tl.store(out_ptr + item * width + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


# ---- host


def parts_of(width: int) -> tuple[int, int]:
    """(parts, columns of one) that hold a row with the fewest columns too many: 5 of 256 for 1,152, 3 of 1,024 for 3,072. A warp loads 256 at a time."""
    found = ((parts, triton.next_power_of_2(triton.cdiv(width, parts))) for parts in (1, 3, 5))
    return min(((parts, block) for parts, block in found if parts == 1 or block >= 256), key=math.prod)


def meeting_of(rows: int, width: int, piece: int, where: torch.device) -> dict:
    """What a kernel takes of its rows' pieces: a word of each for `publish`."""
    pieces = triton.cdiv(width, piece)
    words = torch.zeros((rows, pieces), dtype=torch.int64, device=where) if pieces > 1 else None
    return {"word_ptr": words, "pieces": pieces, "PIECES": triton.next_power_of_2(pieces)}


def matrix(x: torch.Tensor | None) -> torch.Tensor | None:
    """x [rows, width] with contiguous rows, any stride apart; copied where a row is not contiguous."""
    return x if x is None or x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def pair(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Two parameters with one stride between rows, and that stride: both are contiguous where theirs differ."""
    a, b = matrix(a), matrix(b)
    if a is not None and b is not None and a.stride(0) != b.stride(0) and len(a) > 1:
        a, b = a.contiguous(), b.contiguous()
    return a, b, (b if a is None else a).stride(0) if a is not None or b is not None else 0


def options(tiles) -> dict:
    """What a launch is told of its clusters, and of the registers that a thread may have."""
    found = {"num_ctas": tiles.ctas if tiles.ctas > 1 else None, "maxnreg": tiles.registers or None}
    return {name: value for name, value in found.items() if value is not None}


def stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def arguments(norm: Norm, rows: int, width: int) -> dict:
    """What every norm kernel takes of a call."""
    weight, bias, w_stride = pair(norm.weight, norm.bias)
    scale, shift, mod_stride = pair(norm.scale, norm.shift)
    gate, silu = matrix(norm.gate), matrix(norm.silu)
    return {
        "gate_ptr": gate,
        "gate_stride": stride(gate),
        "row_scale_ptr": None if norm.row_scale is None else norm.row_scale.contiguous(),
        "state_ptr": norm.state,
        "bar": threshold(norm.drop),
        "grown": 1 / (1 - norm.drop) if norm.drop < 1 else 0.0,
        "w_ptr": weight,
        "b_ptr": bias,
        "w_stride": w_stride,
        "offset": norm.offset or None,
        "scale_ptr": scale,
        "shift_ptr": shift,
        "mod_stride": mod_stride,
        "silu_ptr": silu,
        "silu_stride": stride(silu),
        "rows": rows,
        "width": width,
        "sets": norm.sets,
        "down": norm.sets if norm.span == 1 else 1,
        "apart": norm.span,
        "LAYER": norm.kind == "layer",
        "GATE": sharing(norm.gate, rows, norm.sets),
        "W": sharing(weight if bias is None else bias, rows, norm.sets),
        "MOD": sharing(shift if scale is None else scale, rows, norm.sets),
        "PHILOX_ROUNDS": ROUNDS,
    }
