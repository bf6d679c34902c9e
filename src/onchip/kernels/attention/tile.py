"""What every attention kernel does to a tile: which keys it needs, where they lie, the mask, the online softmax.

A band: row `i` sees keys `i - LEFT` to `i + RIGHT`, and -1 is no limit. Query `i` is at row `i + shift`: `len_k - len_q` when
aligned to the bottom right. Any other mask is a function MASK(b, h, i, j, len_q, len_k, captured), made from its text by
`mods.py`, and a map of the tiles in which it shows something; so is a score, SCORE(s, b, h, i, j, len_q, len_k, captured).
"""

import re
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.masks import Band
from onchip.core.once import once, passing
from onchip.core.philox import ROUNDS
from onchip.core.trace import Traced
from onchip.kernels.again import asked, refuse
from onchip.kernels.attention import mods, texts

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
L2_SHARE = 32 << 20  # bytes of K and V that the programs in flight may spread over and still find in L2
CHUNK = 8  # tiles that one program of a mask's map looks at, a microsecond or less each


@triton.jit
def key_span(row_first, row_last, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """The keys that some row of `[row_first, row_last]` sees: [first, last)."""
    last = len_k
    if RIGHT >= 0:
        last = tl.minimum(len_k, tl.maximum(row_last + RIGHT + 1, 0))
    first = 0
    if LEFT >= 0:
        first = tl.maximum(row_first - LEFT, 0)
    return first, last


@triton.jit
def inner_span(row_first, row_last, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The whole key tiles that every row of `[row_first, row_last]` sees, so that they need no mask: [first, last)."""
    last = len_k
    if RIGHT >= 0:
        last = tl.minimum(len_k, tl.maximum(row_first + RIGHT + 1, 0))
    last = last // BLOCK_N * BLOCK_N
    first = 0
    if LEFT >= 0:
        first = (tl.maximum(row_last - LEFT, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return first, last


@triton.jit
def query_span(n, shift, len_q, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr):
    """The queries that see some key of [n, n + BLOCK_N), in tiles: [first, last), of which [inner, outer) need no mask.

    Queries past the end of a dense sequence need none either: their LSE reads as +inf. In a packed batch other sequences lie
    there, and the tile that holds them comes after `outer`.
    """
    first = 0
    inner = 0
    last = len_q
    outer = tl.cdiv(len_q, BLOCK_M) * BLOCK_M
    if PACKED:
        outer = len_q // BLOCK_M * BLOCK_M
    if RIGHT >= 0:
        first = tl.maximum(n - RIGHT - shift, 0) // BLOCK_M * BLOCK_M
        inner = tl.cdiv(tl.maximum(n + BLOCK_N - 1 - RIGHT - shift, 0), BLOCK_M) * BLOCK_M
    if LEFT >= 0:
        last = tl.minimum(len_q, tl.maximum(n + BLOCK_N + LEFT - shift, 0))
        outer = tl.minimum(outer, tl.maximum(n + LEFT + 1 - shift, 0) // BLOCK_M * BLOCK_M)
    last = tl.maximum(last, first)
    end = tl.cdiv(last, BLOCK_M) * BLOCK_M
    if PACKED:
        end = tl.maximum(first, tl.minimum(end, len_q // BLOCK_M * BLOCK_M))
    inner = tl.minimum(tl.maximum(inner, first), end)
    outer = tl.minimum(tl.maximum(outer, inner), end)
    if n + BLOCK_N > len_k:  # the last keys: every tile needs the mask
        inner = end
        outer = end
    return first, inner, outer, tl.maximum(last, outer)


@triton.jit
def band(scores, rows, cols, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Scores [M, N], with -inf where row `rows` [M] does not see key `cols` [N]."""
    seen = (cols < len_k)[None, :]
    if RIGHT >= 0:
        seen = seen & (cols[None, :] <= rows[:, None] + RIGHT)
    if LEFT >= 0:
        seen = seen & (cols[None, :] >= rows[:, None] - LEFT)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def online_softmax(scores, top, total, scale, MAY_BE_EMPTY: tl.constexpr):
    """One step of the online softmax (FlashAttention, algorithm 1), in base 2, over the last axis: `scale` holds log2(e).

    Returns the weights [M, N], the factor that shrinks what was summed before [M], and the new maximum and sum. `scale` is a number.
    """
    axis: tl.constexpr = len(scores.shape) - 1
    new_top = tl.maximum(top, tl.max(scores, axis) * scale)
    base = new_top
    if MAY_BE_EMPTY:  # a row that has seen no key yet: -inf minus -inf is NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.math.exp2(scores * scale - tl.expand_dims(base, axis))
    shrink = tl.math.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, axis)


@triton.jit
def normalise(acc, top, total):
    """The output rows and their natural-log LSE; a row that saw nothing gives 0 and -inf."""
    out = acc * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))[:, None]  # the plain quotient may be two ulps off, a float32 result's share of error
    return out, (top + tl.math.log2(total)) * LN2


@triton.jit
def sink(acc, top, total, logit):
    """One more logit in the sum of a row, which weighs nothing: top and total with it, and acc at the new maximum."""
    logit = logit * LOG2E
    new_top = tl.maximum(top, logit)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.math.exp2(top - base)
    return acc * shrink[:, None], new_top, total * shrink + tl.math.exp2(logit - base)


@triton.jit
def kept(state_ptr, bar, b_h, i, j, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr):
    """Which weights of M queries from `i` on and N keys from `j` on, all of them multiples of 16, dropout keeps: [M, N], or [N, M] if TURNED.

    Sixteen share a call of Philox, as `core/philox.py` says.
    """
    i = i + tl.arange(0, M // 4) // 4 * 16 + tl.arange(0, M // 4) % 4 * 2  # without bits 1 and 8
    j = j + tl.arange(0, N // 4) // 4 * 16 + tl.arange(0, N // 4) % 4 * 2
    w0, w1, w2, w3 = tl.philox(tl.load(state_ptr), j[None, :], i[:, None], b_h, tl.load(state_ptr + 1).to(tl.int32), PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3)).to(tl.uint32, bitcast=True)  # bit 1 of the key, then of the query
    first, second = _stays(words, bar), _stays(words << 8 | words >> 24, bar)
    third, fourth = _stays(words << 16 | words >> 16, bar), _stays(words << 24 | words >> 8, bar)
    stays = tl.join(tl.join(first, second), tl.join(third, fourth))  # bit 8 of the key, then of the query
    stays = stays.reshape(M // 16, 4, N // 16, 4, 2, 2, 2, 2)
    if TURNED:
        stays = stays.permute(2, 6, 3, 4, 0, 7, 1, 5).reshape(N, M)
    else:
        stays = stays.permute(0, 7, 1, 5, 2, 6, 3, 4).reshape(M, N)
    return stays != 0


@triton.jit
def _stays(words, bar):
    return (words.to(tl.int32, bitcast=True) >= bar).to(tl.int8)


@triton.jit
def sequence(offsets_ptr, used_ptr, batch, length):
    """The first token of sequence `batch` of a packed batch, and its length; of a dense one 0 and `length`, of a paged one 0 and what is used."""
    start = batch * 0
    if offsets_ptr is not None:
        start = tl.load(offsets_ptr + batch)
        length = tl.load(offsets_ptr + batch + 1) - start
    if used_ptr is not None:
        length = tl.load(used_ptr + batch)
    return start, length


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["bits_ptr"])
def _classify(kind_ptr, bits_ptr, q_offsets, k_offsets, q_used, k_used, captured, heads, len_q, len_k, outers, inners, length,
              MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """What a mask shows of CHUNK tiles in a row: 0 nothing, 1 a part, 2 all of each; int8 [batch, heads, outer, inner]. [LEFT, RIGHT] is its hull.
    With `bits_ptr`, into the map's first row: which keys of each tile a query of the tile sees, 32 in a word; of keys, which of its keys any query sees."""
    chunks = tl.cdiv(inners, CHUNK)
    row = tl.program_id(0) // chunks  # of the map
    outer, batch, head = row % outers, row // outers // heads, row // outers % heads
    _, len_q = sequence(q_offsets, q_used, batch, len_q)
    _, len_k = sequence(k_offsets, k_used, batch, len_k)
    shift = len_k - len_q
    if TOP_LEFT:
        shift = shift * 0
    kind_ptr += row.to(tl.int64) * inners
    start = tl.program_id(0) % chunks * CHUNK
    for inner in range(start, tl.minimum(start + CHUNK, inners)):
        tile_m = inner if OF_KEYS else outer
        tile_n = outer if OF_KEYS else inner
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        possible = (m < len_q) & (n < len_k)
        if RIGHT >= 0:
            possible = possible & (n <= m + BLOCK_M - 1 + shift + RIGHT)
        if LEFT >= 0:
            possible = possible & (n + BLOCK_N - 1 >= m + shift - LEFT)
        kind = 0
        bits = tl.zeros([BLOCK_N // 32 if bits_ptr is not None else 1], tl.int32)
        if possible:
            i = (m + tl.arange(0, BLOCK_M))[:, None]
            j = (n + tl.arange(0, BLOCK_N))[None, :]
            seen = MASK(batch, head, i, j, len_q, len_k, captured) & (i < len_q) & (j < len_k)
            count = tl.sum(tl.sum(seen.to(tl.int32), 1), 0)
            rows = BLOCK_M  # a whole tile has nothing to hide; rows past the end hide nothing where they are never stored
            if not OF_KEYS:
                rows = tl.minimum(len_q - m, BLOCK_M)
            kind = tl.where(count == rows * BLOCK_N, 2, tl.where(count > 0, 1, 0))
            if bits_ptr is not None:
                by_words = tl.max(seen.to(tl.int32), 0).reshape(BLOCK_N // 32, 32)
                bits = tl.sum(by_words << tl.arange(0, 32)[None, :], 1)
        tl.store(kind_ptr + inner, kind.to(tl.int8))
        if bits_ptr is not None:
            words = bits_ptr + row.to(tl.int64) * length + tl.arange(0, BLOCK_N // 32)
            if OF_KEYS:
                tl.atomic_or(words, bits, sem="relaxed")
            else:
                tl.store(words + inner * (BLOCK_N // 32), bits)


@triton.jit(do_not_specialize=["length"])
def _collect(map_ptr, kind_ptr, inners, length, BLOCK: tl.constexpr):
    """A row of the map: how many tiles are seen in part and in whole, then their numbers, those in part from the front, those in whole from the back."""
    row = tl.program_id(0).to(tl.int64)
    map_ptr += row * length
    kind_ptr += row * inners
    part = 0
    whole = 0
    for start in range(0, inners, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        kind = tl.load(kind_ptr + inner, mask=inner < inners, other=0)
        in_part, in_whole = (kind == 1).to(tl.int32), (kind == 2).to(tl.int32)
        tl.store(map_ptr + 2 + part + tl.cumsum(in_part, 0) - 1, inner, mask=in_part == 1)
        tl.store(map_ptr + length - whole - tl.cumsum(in_whole, 0), inner, mask=in_whole == 1)
        part += tl.sum(in_part, 0)
        whole += tl.sum(in_whole, 0)
    tl.store(map_ptr, part)
    tl.store(map_ptr + 1, whole)


@triton.jit
def page_slots(table_ptr, first, cols, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page (int64) and the slot in it of keys `cols` = first + arange(BLOCK_N); only those below `last` are looked up."""
    if PAGE % BLOCK_N == 0:  # the tile lies in one page: one look-up
        pages = tl.load(table_ptr + first // PAGE).to(tl.int64)
    else:
        pages = tl.load(table_ptr + cols // PAGE, mask=cols < last, other=0).to(tl.int64)
    return pages, cols % PAGE


# ---- host


_made: OrderedDict = OrderedDict()
_making = threading.RLock()  # of what happens to it; a tensor that goes may be let go in the middle, by the same thread
REMEMBERED = 64  # maps and lists: the layers of a model share one


def remembered(what: tuple, tensors, device, make, changing: bool = False):
    """What `make()` gives: made once for a `what` and `tensors` that live unchanged.

    torch counts what writes to a tensor, except a foreign kernel, `tensor.data` and numpy, after which `torch.autograd.graph.increment_version(tensor)` says
    so. Inside a CUDA graph, and of tensors of inference mode, which count nothing, or which are `changing` unseen, it is made anew, but for those of
    `one_pass`. It is let go with the first of the tensors.
    """
    refuse("what is remembered")  # a call that is repeated as it was would look up nothing
    tensors = [t for t in tensors if t is not None]
    if passing():
        return once(what, tensors, make)
    if changing or any(t.is_inference() for t in tensors) or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (*what, device, stream, tuple((id(t), t._version, t.data_ptr()) for t in tensors))
    with _making:
        known = _made.get(key)
    if known is None or any(ref() is not t for ref, t in zip(known[0], tensors, strict=True)):
        known = [weakref.ref(t, lambda _: _forget(key)) for t in tensors], make()
    with _making:
        _made[key] = known
        _made.move_to_end(key)
        while len(_made) > REMEMBERED:
            _made.popitem(last=False)
    return known[1]


def _forget(key: tuple) -> None:
    with _making:
        _made.pop(key, None)


class MapShape(NamedTuple):
    """Of a map: tiles of `m` queries and `n` keys; whether its rows are tiles `of_keys`; its sizes; and where in a row it is said which keys are seen, or 0."""

    m: int
    n: int
    of_keys: bool
    sizes: tuple[int, int, int, int]
    bits: int


def mask_map(p, sees, x, m: int, n: int, of_keys: bool, device, bits: bool = False):
    """The tiles of `m` queries and `n` keys that a mask which is no band shows, for each tile of queries (or of keys), int32
    [batch or 1, heads or 1, tiles, 2 + most tiles], how many rows a batch and a head are apart, and how long a row is; see `_collect`. It is `remembered`.
    With `bits`, between the tiles seen in part and those in whole: which keys of each tile a query of the tile sees (of keys: which of the row's own any
    query sees); and where in a row that begins.
    """
    tiles = triton.cdiv(p.len_q, m), triton.cdiv(p.len_k, n)
    outer, inner = tiles[::-1] if of_keys else tiles
    batch = p.batch if p.keys != "dense" or reads(p.mask.text, "b") else 1
    heads = p.heads if reads(p.mask.text, "h") else 1
    length = 2 + inner + bits * (inner + n // 32 * (1 if of_keys else inner))
    shape = MapShape(m, n, of_keys, (batch, heads, outer, length), bits * (2 + inner))
    what, reading, changing = ("map", p.mask.text, shape, p.batch, p.heads, p.len_q, p.len_k), len(x.mask), p.page > 0

    def find(*tensors):  # lengths of a cache change inside of CUDA graphs, which count no writes
        return remembered(what, tensors, device, lambda: _mask_map(p, sees, tensors[:reading], tensors[reading:], shape, device), changing)

    found = asked(find, *x.mask, x.q_offsets, x.k_offsets, x.q_used, x.k_used)
    return found, (heads * outer * (batch > 1), outer * (heads > 1), length, *[2 + inner] * bits)


def _mask_map(p, sees, captured, lengths, shape: MapShape, device):
    batch, heads, outer, length = shape.sizes
    inner = triton.cdiv(p.len_q, shape.m) if shape.of_keys else triton.cdiv(p.len_k, shape.n)
    found = (torch.zeros if shape.bits else torch.empty)(shape.sizes, dtype=torch.int32, device=device)
    kinds = torch.empty((batch, heads, outer, inner), dtype=torch.int8, device=device)
    left, right, top_left = ends(p.mask.hull)
    _classify[(triton.cdiv(inner, CHUNK) * outer * batch * heads,)](
        kinds, found.view(-1)[shape.bits :] if shape.bits else None, *lengths, mods.captured(captured), heads, p.len_q, p.len_k, outer, inner, length,
        MASK=sees, LEFT=left, RIGHT=right, TOP_LEFT=top_left, BLOCK_M=shape.m, BLOCK_N=shape.n, OF_KEYS=shape.of_keys, CHUNK=CHUNK,
    )  # fmt: skip
    _collect[(batch * heads * outer,)](found, kinds, inner, length, BLOCK=min(1024, triton.next_power_of_2(inner)))
    return found


def outputs(p, x, q, return_lse: bool):
    """Output and LSE (or None) of a forward pass, empty; where some rows have no keys or are not used, filled for those. Tokens of no sequence have an LSE
    where sinks sum over it for their gradient."""
    packed = x.q_offsets is not None
    out = torch.empty(*q.shape[:-1], p.value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty((p.heads, p.tokens) if packed else (p.batch, p.heads, p.len_q), dtype=torch.float32, device=q.device) if return_lse else None
    if p.len_k == 0 or x.q_used is not None:
        out.zero_()
    if return_lse and (p.len_k == 0 or x.q_used is not None or (p.keys == "packed" and x.sinks is not None)):
        lse.fill_(-torch.inf)
        if p.len_k == 0 and x.sinks is not None:  # a query without keys has its sink alone
            sinks = x.sinks.float().view(-1, 1).expand_as(lse)
            lse = sinks.clone() if x.q_used is None else torch.where(_used(x, p.tokens), sinks, lse)
    return out, lse


def _used(x, tokens: int):
    """Which tokens of a packed batch are queries, bool [tokens]."""
    places = torch.arange(tokens, device=x.q_offsets.device)
    batch = (torch.searchsorted(x.q_offsets, places, right=True) - 1).clamp(max=len(x.q_used) - 1)
    return places - x.q_offsets[batch] < x.q_used[batch]


def device_functions(p, x, q, make=mods.functions):
    """What `make` makes of the mask's and the score's text (or None), what these read, and the factors of a score before and after its function."""
    text, scale, gain = None, 1.0, x.scale
    if p.score is not None or x.scale <= 0:  # a plain kernel takes the largest score before it scales
        text, before, gain = texts.fold(p.score.text if p.score is not None else texts.IDENTITY)
        scale = x.scale * before
    made = make(p.mask.text if isinstance(p.mask, Traced) else None, text, fast(q))
    return made, (mods.captured(x.mask), mods.captured(x.score)), scale, gain


def together(p, keys: int = 0, heads: int = 0) -> int:
    """Heads whose programs go side by side, so that their K and V share L2; without a causal mask one: the fewest K and V in flight.

    keys   that a head has in flight, where they are not one sequence's.        heads   that there are, where they are not the queries'. All bundles
    are alike where that takes not too small ones: 256 heads by 16 instead of 21 leave no short bundle at the end (backward, 1k causal: 4% faster).
    """
    if isinstance(p.mask, Band) and p.mask.right is None:
        return 1
    heads = heads or p.batch * p.heads
    most = max(1, min(heads, L2_SHARE // (2 * max(1, keys or p.len_k) * p.dim * p.dtype.itemsize)))
    return next((n for n in range(most, most // 2, -1) if heads % n == 0), most)


def order(p, tiles: int, most: int, side_by_side: int, of_keys: bool = False) -> str:
    """How programs take the tiles of a call, as `explain` says it."""
    uneven = not isinstance(p.mask, Band) or p.mask.right is not None
    taken = f"by {most} programs, each drawing its next" if tiles > most else "by a program each"
    by_work = p.keys == "packed" or p.tokens > 0 or (of_keys and uneven)
    first = "those with most work first" * by_work or "the last queries first" * uneven
    return f"{tiles} tiles {taken}" + f", {first}" * bool(first) + f", {side_by_side} heads side by side" * (side_by_side > 1)


def fast(q) -> bool:
    """Whether the hardware's approximate tanh will do: it errs by 2^-11, like half precision; the interpreter has none."""
    return q.is_cuda and torch.version.hip is None and q.dtype != torch.float32


def reads(text: str, name: str) -> bool:
    """Whether a text uses one of its arguments."""
    return re.search(rf"\b{name}\b", text.partition("):\n")[2]) is not None


def ends(band: Band) -> tuple[int, int, bool]:
    """A band as kernels take it: LEFT, RIGHT (-1: no limit) and whether it is aligned to the top left."""
    return *(-1 if side is None else side for side in (band.left, band.right)), band.align == "top_left"


def tf32(p) -> str:
    """How float32 tiles are multiplied."""
    return "tf32" if "tf32" in p.extras else "ieee"


def block(dim: int) -> int:
    """The power of two that holds a head, from 32 on: a tile of 16 columns written from registers is read past its end by wgmma (Triton 3.6)."""
    return max(32, triton.next_power_of_2(dim))


def has_tma(device: torch.device) -> bool:
    """Hopper and later copy tiles by descriptor; the interpreter does so too."""
    return device.type == "cpu" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def describable(t) -> bool:
    """TMA wants a base and strides of whole 16 bytes, none of 0, and the last dimension's side by side."""
    unit = 16 // t.element_size()
    *outer, last = t.stride()
    return last == 1 and t.data_ptr() % 16 == 0 and all(s % unit == 0 and (s > 0 or n == 1) for s, n in zip(outer, t.shape, strict=False))


def for_tma(t, kernel: str = ""):
    """`t`, or a copy that TMA takes. (A contiguous tensor that begins anywhere is what `contiguous` gives back as it is.) `kernel`: whose pages they are."""
    return t if describable(t) else whole(t, kernel, 16) if kernel else t.clone(memory_format=torch.contiguous_format)


def adjacent(t, kernel: str = ""):
    """`t`, or a copy of which the numbers of a row lie side by side. `kernel`: whose pages they are."""
    return t if t.stride(-1) == 1 else whole(t, kernel, t.element_size()) if kernel else t.contiguous()


def whole(pool, kernel: str, unit: int):
    """A copy of all pages of a pool. A Problem has no strides, so that the launch alone can say it."""
    refuse("a warning in each call")
    warnings.warn(
        f"paged_attention: {kernel} copies all pages of a pool {list(pool.shape)} in each call, since with strides {pool.stride()} not all of its rows are "
        f"whole and begin at multiples of {unit} bytes; give one whose rows do, or a kernel of Triton's by name, which copies none whose rows are whole",
        stacklevel=2,
    )
    return pool.clone(memory_format=torch.contiguous_format)
