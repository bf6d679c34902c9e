"""What a score reads of each query and key, on Hopper: tiles of it come by the copy engine, out of a bias [.., i, j], or out of what it looks up by the
distance between query and key alone, as T5's does.

All of a head's distances are one row of memory, and row i of a tile of queries is a piece of it that begins one number sooner than row i - 1's. So it lies
there eight times, each a number later, [8, distances]: eight rows of a tile are a box of it. The rows are made once, by the score
function itself in plain torch, and remembered while what it reads is unchanged.
"""

import torch
import triton

from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced
from onchip.kernels.attention.texts import PairTile
from onchip.kernels.attention.tile import describable, remembered
from onchip.kernels.hopper import advance, describe, gl, gluon, mbarrier, reclaim, tma_load

EIGHT = 8  # rows of a box, as shared memory is swizzled
ROWS = gl.constexpr(EIGHT)
ADDED = """def run(s, b, h, i, j, len_q, len_k, c0: '{0}[4]'):
    v0: '{0}' = aten.index.Tensor(c0, [b, h, i, j])
    v1: 'float32' = aten.add.Tensor(s, v0)
    return v1"""  # a bias, as `core.trace` writes it


# ---- device


@gluon.jit
def fill_distances(ring, cursor, desc, b, head, x, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """`hopper.fill` of a tile of 64 queries, the first of which finds its first key's number at `x`."""
    buffers, full, _ = ring
    index, phase, used = cursor
    reclaim(index, used, STAGES, BARRIER, THREADS)
    mbarrier.expect(full.index(index), 64 // ROWS * desc.block_type.nbytes)
    for eighth in gl.static_range(64 // ROWS):
        tma_load(desc, [b, head, 0, x - eighth * ROWS], full.index(index), buffers.index(index).slice(eighth * ROWS, ROWS, 2))
    index, phase = advance(index, phase, STAGES)
    return index, phase, used + 1


# ---- host


def pair_view(t, axes: str):
    """A tensor of `axes` and i, j as TMA describes it, [batch or 1, heads or 1, i, j], and how far a sequence, a head and a query are in its dimensions.

    What one dimension repeats is taken once, of rows 64. A layout that TMA does not know (rows of no multiple of 16 bytes, a base that is not aligned)
    is copied.
    """
    if axes == "hb":
        t = t.transpose(0, 1)
    for n, axis in enumerate("bh"):
        if axis not in axes or t.stride(n) == 0:
            t = (t.select(n, 0) if axis in axes else t).unsqueeze(n)
    steps = (int(t.shape[0] > 1), int(t.shape[1] > 1), int(t.stride(2) > 0))
    if not steps[2]:
        t = t[:, :, :64]
    if not describable(t):
        unit = 16 // t.element_size()
        t = t.new_empty((*t.shape[:3], triton.cdiv(t.shape[3], unit) * unit))[..., : t.shape[3]].copy_(t)
    return t, steps


def laid_out(p: Attention, x: Operands, tile: PairTile, n: int):
    """The call, what it reads of each query and key in tiles of 64 x `n`, and how far a sequence, a head and a query are in that; of distances the call as one
    with a bias, and instead of how far a query is query 0's first key."""
    if tile.tensor >= 0:
        pairs, steps = pair_view(x.score[tile.tensor], tile.axes)
        return p, x, describe(pairs, 64, n), steps
    what = ("distances", p.score.text, p.batch, p.heads, p.len_q, p.len_k)
    rows = remembered(what, x.score, x.score[0].device, lambda: _rows(p, tile, x.score))
    steps = (int(rows.shape[0] > 1), int(rows.shape[1] > 1), _ahead(p))
    dtype = str(tile.dtype).removeprefix("torch.")
    return p._replace(score=Traced(p.score.name, ADDED.format(dtype))), x._replace(score=(rows,)), describe(rows, EIGHT, n), steps


def _ahead(p: Attention) -> int:
    """The number of query 0's first key, so far that all are there, and a multiple of 8: TMA takes a box from a multiple of 16 bytes on."""
    return -(-p.len_q // EIGHT) * EIGHT


def _rows(p: Attention, tile: PairTile, tensors):
    """[batch or 1, heads or 1, 8, distances]: row r has at number e that of distance e - r - `_ahead`."""
    batch, heads = (size if axis in tile.axes else 1 for axis, size in (("b", p.batch), ("h", p.heads)))
    count = -(-(_ahead(p) + p.len_k) // EIGHT) * EIGHT
    at = lambda n, *shape: torch.arange(n, device=tensors[0].device).view(shape)  # noqa: E731
    r, e = at(EIGHT, EIGHT, 1), at(count, 1, count)
    distance = (e - r - _ahead(p)).clamp(1 - p.len_q, p.len_k - 1)
    lengths = (torch.full((), n, device=r.device) for n in (p.len_q, p.len_k))  # by a launch: a CUDA graph may capture it, and nobody waits
    zero = torch.zeros(batch, heads, EIGHT, count, device=r.device)
    with torch.no_grad():
        made = Traced(p.score.name, p.score.text).run(zero, at(batch, batch, 1, 1, 1), at(heads, heads, 1, 1), r, distance + r, *lengths, *tensors)
    return made.to(tile.dtype).contiguous()


__all__ = ["fill_distances", "laid_out", "pair_view"]
