"""What `cutlass_backward` does about tiles: which queries a tile of keys needs, where they lie, who is told of it; the mask in registers.

`C` is the kernel's `Shape`. `sizes`: tiles, tiles of a head, heads side by side, batch, key heads, query heads that share one, len_q, len_k, and rows of LSE,
delta and dQ's sums.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from onchip.kernels.attention.pairs import BESIDE
from onchip.kernels.cutlass import let_go

LOG2E = 1.4426950408889634
FAR = 1 << 30  # rows of a packed batch's tensors as the copy engine sees them: see `tensor_of`


@dataclass(frozen=True)
class Shape:
    """What the device code is compiled for. `slopes`: LSE has a gradient. `grouped`: several heads of q share one of k. `capped`: scores are a softcap's.
    `far`: they begin with what lies in memory by distance (`pairs`). `biased`: a bias of each query and key is added to them."""

    dtype: object
    m: int
    n: int
    stages: int
    dim: int
    left: int
    right: int
    top_left: bool
    packed: bool = False
    q_used: bool = False
    k_used: bool = False
    slopes: bool = False
    grouped: bool = False
    capped: bool = False
    far: bool = False
    biased: bool = False

    @property
    def width(self):
        """Columns of a tile; those past the head's own are 0."""
        return 64 if self.dim <= 64 else 128

    @property
    def abreast(self):
        """Whether a tile of keys takes a tile of queries of all its heads before the next: see `passes_of`."""
        return self.grouped and self.left < 0

    @property
    def slots(self):
        """Buffers of a warpgroup for what is sent: two where there is room, so that what ends a tile need not wait for what was sent before."""
        return 2 if self.m * self.width <= 64 * 128 else 1

    @property
    def pad(self):
        """Rows that each sequence of a packed batch moves on, so that its tiles of LSE, delta and dQ begin at a multiple of 8 and end before the next's."""
        return self.m + 8


class Ring(NamedTuple):
    """Tiles in shared memory, a row of numbers with each, and what tells that they are filled and let go."""

    tiles: object
    rows: object
    full: object
    empty: object


class Still(NamedTuple):
    """K and V of a tile of keys."""

    k: object
    v: object
    k_full: object
    v_full: object
    empty: object


class Message(NamedTuple):
    """Two places for 8 numbers that the copying warp tells the others."""

    numbers: object
    full: object
    empty: object


# ---- device: where things lie


def tensor_of(C, ptr, length, heads, batch, strides):
    """[rows, dim, heads, batch] as the copy engine sees it.

    Packed: row r of a sequence that ends at `end` is [FAR - length + r, .., end], so that behind its last row the tensor ends too.
    """
    b, h, s = (cute.assume(x, divby=8) for x in strides)
    if C.packed:
        return cute.make_tensor(ptr - s * FAR, cute.make_layout((FAR, C.dim, heads, 2 * FAR - 1), stride=(s, 1, h, s)))
    return cute.make_tensor(ptr, cute.make_layout((length, C.dim, heads, batch), stride=(s, 1, h, b)))


def rows_of(C, tensor, head, b, start, length):
    """A sequence's rows of a head: [rows, dim]."""
    if C.packed:
        return cute.domain_offset((FAR - length, 0), tensor[None, None, head, start + length])
    return tensor[None, None, head, b]


def statistics_of(C, b, head, heads, pitch):
    """Where LSE and delta of a head begin."""
    return Int64(head if C.packed else b * heads + head) * pitch


@cute.jit
def locate(C, number, sizes, lists):
    """Tile `number`: its place among its sequence's, key head, sequence, first query, queries, first key, keys; a sequence below 0: there is none.

    `together` heads go side by side, so that they share what they read in L2; the tiles with most work first.
    """
    _, places, together, batch, kv_heads, _, len_q, len_k, _ = sizes
    listed, q_offsets, k_offsets, q_used, k_used = lists
    bundle = number // (together * places)
    within = number - bundle * together * places
    heads = kv_heads if const_expr(C.packed) else batch * kv_heads
    wide = cutlass.min(together, heads - bundle * together)
    tile = within // wide
    head = bundle * together + within - tile * wide
    b, start_q, start_k = Int32(0), Int32(0), Int32(0)
    if const_expr(C.packed):
        pair = cute.make_tensor(listed + 2 * tile, cute.make_layout(2))
        b, tile = pair[0], pair[1]
        at = cutlass.max(b, 0)
        q_at, k_at = (cute.make_tensor(offsets + at, cute.make_layout(2)) for offsets in (q_offsets, k_offsets))
        start_q, start_k = q_at[0], k_at[0]
        len_q = cute.make_tensor(q_used + at, cute.make_layout(1))[0] if const_expr(C.q_used) else q_at[1] - start_q
        len_k = cute.make_tensor(k_used + at, cute.make_layout(1))[0] if const_expr(C.k_used) else k_at[1] - start_k
    else:
        b = head // kv_heads
        head = head - b * kv_heads
    return tile, head, b, start_q, len_q, start_k, len_k


def bundle_of(C, b, kv_head, sizes):
    """Which of the bundles of heads that go side by side a head is in."""
    return (kv_head if C.packed else b * sizes[4] + kv_head) // sizes[2]


@cute.jit
def steps_of(C, tile, len_q, len_k, bundle=0):
    """The query tiles that see some key of a tile: the first, how many before those that need no mask, how many need it, how many do not, and where
    among these to begin; where heads share keys, of a tile in that bundle of heads, 0: with the last one, 1: with the first.

    Those that need it come first, at both ends of the others, so that there is one loop for them. Heads of 64 begin with another one for each
    tile of keys, so that programs side by side do not add to the same rows of dQ at once: 1% at 16k and 32k. (Of 128 it costs 1%: they share Q in L2.)
    """
    shift = ahead(C, len_q, len_k)
    first, last, n = Int32(0), cute.ceil_div(len_q, C.m), tile * C.n
    if const_expr(C.right >= 0):
        first = cutlass.min(cutlass.max(n - C.right - shift, 0) // C.m, last)
    if const_expr(C.left >= 0):
        last = cutlass.max(first, cutlass.min(last, cute.ceil_div(cutlass.max(n + C.n + C.left - shift, 0), C.m)))
    inner, outer = first, last
    if const_expr(C.right >= 0):
        inner = cutlass.min(cute.ceil_div(cutlass.max(n + C.n - 1 - C.right - shift, 0), C.m), last)
    if const_expr(C.left >= 0):
        outer = cutlass.max(inner, cutlass.min(cutlass.max(n + C.left + 1 - shift, 0) // C.m, last))
    if n + C.n > len_k:  # the last keys: every tile needs the mask
        inner, outer = last, last
    turn = bundle % 2 if const_expr(C.abreast) else tile * 7 % cutlass.max(outer - inner, 1) if const_expr(C.width == 64) else Int32(0)
    return first, inner - first, inner - first + last - outer, outer - inner, turn


@cute.jit
def tile_of(C, x, steps):
    """The query tile of step `x`."""
    first, before, masked, bare, turn = steps
    m = first + x
    if const_expr(C.left >= 0):  # noqa: SIM102 (one is a constant of the compiler's)
        if x >= before:
            m += bare if x < masked else before - masked
    if const_expr(C.abreast and C.right >= 0):
        if (x >= masked) & (turn == 0):
            m = first + masked + masked + bare - 1 - x
    elif const_expr(C.width == 64):  # noqa: SIM102
        if x >= masked:
            m += turn if x - masked + turn < bare else turn - bare
    return m


def passes_of(C, group):
    """How often a tile of keys goes over its steps, and how often it takes each before the next: together once for each head of q that shares its keys.

    Keys that see different queries take different times over a head, and would be heads apart after a few, with what L2 holds of Q, dO and dQ's sums used by
    one program each. So all heads of a tile of queries come in turn. Under a causal mask a bundle of heads whose programs begin together begins with the last
    queries, which all keys see; the next one's programs begin the later the fewer queries they see, and begin with their first. A window's tiles are alike.
    """
    if C.abreast:
        return 1, group
    return group if C.grouped else 1, 1


def ahead(C, len_q, len_k):
    """The key that query 0 is at."""
    return Int32(0) if C.top_left else len_k - len_q


def distances_at(C, far, b, head, len_k, ahead):
    """What a score begins with whose query is `ahead` of its key, with those beside it: four numbers, see `pairs.laid_out`."""
    rows, of_sequence, of_head = far
    return rows + cute.assume(b * of_sequence + head * of_head + 4 * Int64(len_k + BESIDE + ahead), divby=4)


def bias_at(tensor, head, b):
    """What is added to a head's scores, [queries, keys]; a sequence's and a head's, or that of all."""
    _, _, heads, batch = tensor.shape
    return tensor[None, None, cutlass.min(head, heads - 1), cutlass.min(b, batch - 1)]


def row_of(C, b, start_q):
    """Where a sequence's queries begin in LSE, delta and dQ's sums of a head."""
    return (start_q + b * C.pad) // 8 * 8 if C.packed else Int32(0)


@cute.jit
def hear(C, message, turn, sizes):
    """The place of this program's tile number `turn`, as the copying warp tells it; a tile below 0: there is none."""
    at = turn % 2
    cute.arch.mbarrier_wait(message.full + at, turn // 2 % 2)
    told = message.numbers
    tile, head, b = (cute.arch.make_warp_uniform(told[i, at]) for i in range(3))
    start_q, len_q, start_k, len_k = Int32(0), sizes[6], Int32(0), sizes[7]
    if const_expr(C.packed):
        start_q, len_q, start_k, len_k = (cute.arch.make_warp_uniform(told[i, at]) for i in range(3, 7))
    cute.arch.sync_warp()
    let_go(message.empty + at, cute.arch.lane_idx() == 0)
    return tile, head, b, start_q, len_q, start_k, len_k


@cute.jit
def tell(C, message, turn, values):
    at = turn % 2
    cute.arch.mbarrier_wait(message.empty + at, turn // 2 % 2 ^ 1)
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(len(values)):
            message.numbers[i, at] = values[i]
        cute.arch.mbarrier_arrive(message.full + at)


# ---- device: registers


@cute.jit
def of_queries(C, values, at, query):
    """What is known of a thread's queries, in order: [2, m / 8]."""
    there = cute.make_tensor(values[None, at].iterator + query, cute.make_layout((2, C.m // 8), stride=(1, 8)))
    out = cute.make_rmem_tensor((2, C.m // 8), Float32)
    cute.autovec_copy(there, out)
    return out


@cute.jit
def begin_with(C, s, there):
    """A thread's scores begin with what lies in memory by distance: of each eight queries two of two keys, 16 bytes at a time."""
    cute.autovec_copy(cute.make_tensor(there, cute.make_layout((4, C.m // 8), stride=(1, 32))), cute.make_tensor(s.iterator, cute.make_layout((4, C.m // 8))))


def first_of(C, far, b, head, m, place):
    """Where a thread finds what its scores of query tile `m` begin with."""
    tile, own_key, own_query, _, len_k = place
    return distances_at(C, far, b, head, len_k, m * C.m + own_query - tile * C.n - own_key) if C.far else None


@cute.jit
def weigh_biased(C, s, load, at, lse, factor):
    """Of scores and what is added to them the weights exp2(factor s + log2 e bias - LSE): eight at a time, with their LSE, since there is no room for all."""
    for i in cutlass.range_constexpr(cute.size(s) // 8):
        bias = load(i, at)
        own = cute.make_rmem_tensor((2, 2), Float32)
        cute.autovec_copy(cute.make_tensor(lse + 16 * i, cute.make_layout((2, 2), stride=(1, 8))), own)
        for x in cutlass.range_constexpr(8):
            above = bias[x].to(Float32) * LOG2E - own[x // 4 * 2 + x % 2]
            s[8 * i + x] = cute.math.exp2(s[8 * i + x] * factor + above, fastmath=True)


@cute.jit
def ask_for(C, there):
    """Let the multiprocessor's cache fetch what a tile's scores begin with, eight distances a line; by one warp, a tile ahead."""
    line = cutlass.min(cute.arch.lane_idx(), (C.m + C.n) // 8)
    cute.arch.inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[there + 32 * line])


@cute.jit
def hidden(C, m, key, len_q, len_k):
    """Whether query tile `m` sees none of the 64 keys from `key` on."""
    shift = ahead(C, len_q, len_k) + m * C.m
    found = key >= len_k
    if const_expr(C.right >= 0):
        found = found | (shift + C.m - 1 + C.right < key)
    if const_expr(C.left >= 0):
        found = found | (shift - C.left > key + 63)
    return found


@cute.jit
def hide(C, p, m, place, value=0.0):
    """Weights that the mask hides are 0, or scores `value`."""
    tile, own_key, own_query, len_q, len_k = place
    shift = ahead(C, len_q, len_k) + m * C.m  # the key that the tile's first query is at
    for r in cutlass.range_constexpr(2):
        j = tile * C.n + own_key + 8 * r
        low, high = Int32(0), Int32(C.m)
        if const_expr(C.right >= 0):
            low = j - shift - C.right - own_query
        if const_expr(C.left >= 0):
            high = j - shift + C.left - own_query
        if j >= len_k:
            high = Int32(-1)
        for i in cutlass.range_constexpr(cute.size(p) // 4):
            for x in cutlass.range_constexpr(2):
                here, column = 4 * i + 2 * r + x, 8 * i + x
                seen = column <= high
                if const_expr(C.right >= 0):
                    seen = seen & (column >= low)
                p[here] = p[here] if seen else Float32(value)


@cute.jit
def weigh_capped(C, s, lse, factors, edge: cutlass.Constexpr[bool]):
    """Of a softcap's scores the weights P = exp2(b tanh(a s) - LSE), and P times the derivative 1 - tanh^2: both rounded, since of 80 queries there is
    no room for them in float32 (and for no more than a few at a time). `edge`: a score of -inf is hidden."""
    half = "bf16x2" if const_expr(C.dtype is cutlass.BFloat16) else "f16x2"
    code = "{ .reg .pred q; .reg .f32 t, p0, p1, d0, d1;"
    for pair in (0, 1):
        for x in (0, 1):
            score = f"{{$r{2 * pair + x}}}"
            code += f"mul.f32 t, {score}, {{$r6}}; tanh.approx.f32 t, t; neg.f32 d{x}, {{$r{4 + x}}}; fma.rn.f32 p{x}, t, {{$r7}}, d{x};"
            if const_expr(edge):
                code += f"setp.gt.f32 q, {score}, 0fFF800000; selp.f32 p{x}, p{x}, 0fFF800000, q;"
            code += f"ex2.approx.ftz.f32 p{x}, p{x}; neg.f32 d{x}, t; mul.f32 d{x}, d{x}, p{x}; fma.rn.f32 d{x}, t, d{x}, p{x};"
        code += f"cvt.rn.{half}.f32 {{$w{pair}}}, p1, p0; cvt.rn.{half}.f32 {{$w{2 + pair}}}, d1, d0;"
    words = tuple(cute.make_rmem_tensor((cute.size(s) // 2,), Int32) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        given = (*(s[4 * i + x] for x in range(4)), lse[2 * i], lse[2 * i + 1], *factors)
        made = cute.arch.inline_ptx(code + "}", write_only_types=[Int32] * 4, read_only_args=given)
        words[0][2 * i], words[0][2 * i + 1], words[1][2 * i], words[1][2 * i + 1] = made
    return tuple(cute.make_tensor(cute.recast_ptr(x.iterator, dtype=C.dtype), s.layout) for x in words)
