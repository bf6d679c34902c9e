"""Keys of few queries dealt out in parts among programs, and what these give joined: Flash-Decoding (Dao et al., 2023), for tiles of queries.

o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s), in the order of the keys. A part's output is normalised and float32: it may be much larger than the
sum in which parts cancel. Bytes moved beside the call's own: 8 for each number of the output and each part.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Attention
from onchip.core.trace import Traced
from onchip.kernels.attention.tile import LN2, LOG2E
from onchip.kernels.launch import starts_early

# ---- device


@triton.jit(do_not_specialize=["count", "rows", "len_q", "heads"])
def _join(part_ptr, part_lse_ptr, o_ptr, lse_ptr, count, rows, len_q, heads, DV: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """ROWS rows of [batch, heads, len_q], of all `count` parts at once, up to PARTS."""
    row, part, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PARTS), tl.arange(0, BLOCK)
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


# ---- host

PARTS = (16, 8, 4, 2)  # a kernel of its own for each
LEAST = 1024  # keys of a part
JOINED = 8192  # numbers of all parts that a program joins: 64 a thread, all in flight at once


def key_tiles(p: Attention, m: int, n: int) -> tuple[int, int]:
    """Tiles of `n` keys that the first and the last tile of `m` queries see."""
    band = p.mask.hull if isinstance(p.mask, Traced) else p.mask
    shift = band.shift(p.len_q, p.len_k)
    ends = (0, min(m, p.len_q) - 1), (max(0, p.len_q - m), p.len_q - 1)
    return tuple(max(1, triton.cdiv(len(band.keys(first + shift, last + shift, p.len_k)), n)) for first, last in ends)


def parts_allowed(p: Attention, m: int, n: int) -> tuple[int, ...]:
    """In how many parts keys may be dealt out. Together: where a map names those that are seen, where the batch must not decide, where dropout wants the
    registers, and over pages, whose lengths are on the device."""
    together = isinstance(p.mask, Traced) or p.keys == "paged" or {*p.extras} & {"batch_invariant", "dropout"} or not p.len_q
    keys = 0 if together else max(key_tiles(p, m, n)) * n
    return (*(parts for parts in PARTS if parts * LEAST <= keys), 1)


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
        DV=dim_v, BLOCK=block, PARTS=places, ROWS=height, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
