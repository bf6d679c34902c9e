"""Keys of few queries dealt out in parts among programs, and what these give joined: Flash-Decoding (Dao et al., 2023), for tiles of queries.

o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s), in the order of the keys. A part's output is normalised and float32: it may be much larger than the
sum in which parts cancel. Bytes moved beside the call's own: 8 for each number of the output and each part.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.kernels.attention.tile import LN2, LOG2E, sequence
from onchip.kernels.attention.tile_lists import LEAST, MOST_PARTS, PART, PARTS
from onchip.kernels.launch import starts_early

AT_ONCE = tl.constexpr(4)  # parts of a unit's rows that a program reads at once

# ---- device


@triton.jit(do_not_specialize=["count", "rows", "len_q", "heads"])
def _join(part_ptr, part_lse_ptr, o_ptr, lse_ptr, count, rows, len_q, heads, DV: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """ROWS rows of [batch, heads, len_q], of all `count` parts at once, up to PLACES."""
    row, part, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PLACES), tl.arange(0, BLOCK)
    near, used = row < rows, dims < DV
    real = (part < count)[:, None] & near[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = part.to(tl.int64)[:, None] * rows + row[None, :]
    logs = tl.load(part_lse_ptr + at, mask=real, other=float("-inf"))
    parts = tl.load(part_ptr + at[:, :, None] * DV + dims[None, None, :], mask=real[:, :, None] & used[None, None, :], other=0.0)
    top = tl.max(logs, 0)
    weights = tl.math.exp2((logs - tl.where(top == float("-inf"), 0.0, top)[None, :]) * LOG2E)
    total = tl.sum(weights, 0)
    parts = tl.where((weights > 0.0)[:, :, None], parts, 0.0)  # who saw nothing may hold anything
    out = tl.sum(parts * weights[:, :, None], 0) * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))[:, None]
    batch_head, query = row // len_q, row % len_q
    to = (batch_head // heads * len_q + query).to(tl.int64) * heads + batch_head % heads
    tl.store(o_ptr + to[:, None] * DV + dims[None, :], out.to(o_ptr.dtype.element_ty), mask=near[:, None] & used[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + row, top + tl.math.log2(total) * LN2, mask=near)


@triton.jit(do_not_specialize=["heads", "group", "tokens"], do_not_specialize_on_alignment=["q_offsets", "q_used"])
def _join_units(part_ptr, part_lse_ptr, o_ptr, lse_ptr, units_ptr, q_offsets, q_used, heads, group, tokens, M: tl.constexpr, PACK: tl.constexpr,
                DV: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """ROWS rows of a tile of queries, of one of the `heads` that a tile has, if the unit is the first of several parts; else nothing is to be done."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = M // ROWS
    number = tl.program_id(0) // blocks
    b, word = tl.load(units_ptr + number // heads * 2), tl.load(units_ptr + number // heads * 2 + 1)
    count = word // PARTS + 1
    if (b >= 0) & (count > 1) & (word // PART % 32 == 0):
        start, length = sequence(q_offsets, q_used, b, 0)
        at, dims = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        query, head = word % PART * (M // PACK) + at // PACK, number % heads + at * 0
        near, used, every = query < length, dims < DV, heads
        if PACK > 1:
            near, head, every = near & (at % PACK < group), head * group + at % PACK, heads * group
        part = tl.arange(0, PLACES)
        logs = tl.load(part_lse_ptr + (number + part * heads)[:, None] * M + at[None, :], mask=(part < count)[:, None] & near[None, :], other=float("-inf"))
        top = tl.max(logs, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.math.exp2((logs - base[None, :]) * LOG2E), 0)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, count, AT_ONCE):
            some = first + tl.arange(0, AT_ONCE)
            rows, real = (number + some * heads)[:, None] * M + at[None, :], (some < count)[:, None] & near[None, :]
            weights = tl.math.exp2((tl.load(part_lse_ptr + rows, mask=real, other=float("-inf")) - base[None, :]) * LOG2E)
            real = real & (weights > 0.0)  # who saw nothing may hold anything
            parts = tl.load(part_ptr + rows[:, :, None] * DV + dims[None, None, :], mask=real[:, :, None] & used[None, None, :], other=0.0)
            acc += tl.sum(parts * weights[:, :, None], 0)
        out = acc * tl.where(total == 0.0, 0.0, tl.math.div_rn(1.0, total))[:, None]
        to = (start + query).to(tl.int64) * every + head
        tl.store(o_ptr + to[:, None] * DV + dims[None, :], out.to(o_ptr.dtype.element_ty), mask=near[:, None] & used[None, :])
        if lse_ptr is not None:
            tl.store(lse_ptr + head.to(tl.int64) * tokens + start + query, top + tl.math.log2(total) * LN2, mask=near)


# ---- host

POWERS = (16, 8, 4, 2)  # a kernel of its own for each
WORTH_LISTING = 8192  # keys: 128 queries of 32 heads of 128 over as many take 61 us, in one part about 66; over 32k 132 and 263
JOINED = 8192  # numbers of all parts that a program joins: 64 a thread, all in flight at once


def key_tiles(p: Attention, m: int, n: int) -> tuple[int, int]:
    """Tiles of `n` keys that the first and the last tile of `m` queries see."""
    band = p.mask.hull if isinstance(p.mask, Traced) else p.mask
    shift = band.shift(p.len_q, p.len_k)
    ends = (0, min(m, p.len_q) - 1), (max(0, p.len_q - m), p.len_q - 1)
    return tuple(max(1, triton.cdiv(len(band.keys(first + shift, last + shift, p.len_k)), n)) for first, last in ends)


def parts_allowed(p: Attention, m: int, n: int) -> tuple[int, ...]:
    """In how many parts keys may be dealt out. Of those in pages the host knows no lengths: see `parts_by_lengths`."""
    keys = 0 if p.keys == "paged" or _together(p) else max(key_tiles(p, m, n)) * n
    return (*(parts for parts in POWERS if parts * LEAST <= keys), 1)


def parts_by_lengths(p: Attention, m: int, n: int, heads: int, programs: int) -> bool:
    """Whether a list of tiles is to say in how many parts each one's keys are dealt out: of keys in pages, where the queries make tiles of `m` of `heads` for
    at most half of the programs (of many short sequences there may be more), which may see enough keys for two parts. Queries that are not packed have no
    list as yet, which with what joins parts is seven launches: of them only where keys may be WORTH_LISTING."""
    if p.keys != "paged" or _together(p):
        return False
    tiles = triton.cdiv(p.tokens, m) if p.tokens else p.batch * triton.cdiv(p.len_q, m)
    return 2 * tiles * heads <= programs and max(key_tiles(p, m, n)) * n >= (2 * LEAST if p.tokens else WORTH_LISTING)


def _together(p: Attention) -> bool:
    """Where a map names the keys that are seen, where the batch must not decide, and where dropout wants the registers."""
    return isinstance(p.mask, Traced) or bool({*p.extras} & {"batch_invariant", "dropout"}) or not p.len_q


def apart(p: Attention, count: int, device: torch.device):
    """Output [parts, batch, heads, len_q, dim_v] or [parts, heads, tokens, dim_v] and LSE of `count` parts, float32; of tokens that may be nobody's -inf."""
    sizes = (count, p.heads, p.tokens) if p.tokens else (count, p.batch, p.heads, p.len_q)
    lse = torch.empty(sizes, dtype=torch.float32, device=device)
    return torch.empty(*sizes, p.value_dim, dtype=torch.float32, device=device), lse.fill_(-torch.inf) if p.tokens else lse


def join(parts, part_lse, out, lse) -> None:
    """Into `out` and `lse` (or None), as `tile.outputs` makes them, what parts have that `apart` made."""
    count, *_, heads, len_q, dim_v = parts.shape
    block = triton.next_power_of_2(dim_v)
    places = triton.next_power_of_2(count)
    height, rows, early = max(1, JOINED // (places * block)), part_lse[0].numel(), starts_early(out)
    _join[(triton.cdiv(rows, height),)](
        parts, part_lse, out, lse, count, rows, len_q, heads,
        DV=dim_v, BLOCK=block, PLACES=places, ROWS=height, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def apart_units(p: Attention, rows: int, device: torch.device):
    """Output [rows, dim_v] and LSE [rows], float32, of the tiles whose keys a list deals out in several parts."""
    return torch.empty(rows, p.value_dim, dtype=torch.float32, device=device), torch.empty(rows, dtype=torch.float32, device=device)


def join_units(p: Attention, units, listed, x: Operands, pack: int, out, lse) -> None:
    """Into `out` and `lse` (or None), as `tile.outputs` makes them, of a packed batch the parts of `units` that lie in the first places of a list."""
    parts, part_lse = units
    heads, block, early = p.kv_heads if pack > 1 else p.heads, triton.next_power_of_2(p.value_dim), starts_early(out)
    m = len(parts) // (heads * len(listed))
    rows = min(m, max(1, JOINED // (2 * AT_ONCE.value * block)))  # half as many numbers at once: more spill
    _join_units[(heads * len(listed) * (m // rows),)](
        parts, part_lse, out, lse, listed, x.q_offsets, x.q_used, heads, p.group, p.tokens,
        M=m, PACK=pack, DV=p.value_dim, BLOCK=block, PLACES=MOST_PARTS, ROWS=rows, EARLY=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
