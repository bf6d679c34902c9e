"""Keys of few queries dealt out in parts among programs, and what these give joined: Flash-Decoding (Dao et al., 2023), for tiles of queries.

A part's output is normalised and in the result's dtype, with its LSE; `triton_merge` joins all of them, in the order of the keys.
"""

import torch
import triton

from onchip.core import device
from onchip.core.problem import Attention, Rows
from onchip.core.trace import Traced
from onchip.kernels.attention import MERGE

MOST, LEAST = 16, 8  # parts: what one launch merges; and key tiles of each


def key_tiles(p: Attention, m: int, n: int) -> tuple[int, int]:
    """Tiles of `n` keys that the first and the last tile of `m` queries see; over pages of half of what the table has room for: lengths are on the device."""
    band = p.mask.hull if isinstance(p.mask, Traced) else p.mask
    len_k = p.len_k if p.keys != "paged" else max(p.len_k // 2, min(p.len_q, p.len_k))
    shift = band.shift(p.len_q, len_k)
    ends = (0, min(m, p.len_q) - 1), (max(0, p.len_q - m), p.len_q - 1)
    return tuple(max(1, triton.cdiv(len(band.keys(first + shift, last + shift, len_k)), n)) for first, last in ends)


def most_parts(p: Attention, m: int, n: int) -> int:
    """In how many parts keys may be dealt out: 1 where a map names those that are seen, and where the batch must not decide."""
    alone = isinstance(p.mask, Traced) or "batch_invariant" in p.extras
    return 1 if alone else max(1, min(MOST, max(key_tiles(p, m, n)) // LEAST))


def apart(p: Attention, q, count: int):
    """Output and LSE of `count` parts one behind the other, as `tile.outputs` has one; of tokens that may be nobody's LSE -inf: they have seen nothing."""
    sizes = (p.heads, p.tokens) if q.ndim == 3 else (p.batch, p.heads, p.len_q)
    lse = torch.empty(count * sizes[0], *sizes[1:], dtype=torch.float32, device=q.device)
    if q.ndim == 3:
        lse.fill_(-torch.inf)
    return q.new_empty(count * (p.tokens if q.ndim == 3 else p.batch), *q.shape[1:-1], p.value_dim), lse


def as_one(out, lse, count: int):
    """One output and LSE of those that `apart` made, by the first kernel of the menu for `merge`."""
    outs, lses = out.unflatten(0, (count, -1)), lse.unflatten(0, (count, -1))
    rows = Rows("merge", lses[0].numel(), out.shape[-1], out.dtype, f"{count} parts")
    kernel = MERGE.kernels[0]
    return kernel.load()(rows, kernel.configs(rows, device.of(out.device))[0], [*zip(outs, lses, strict=True)])
