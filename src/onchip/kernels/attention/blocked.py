"""Attention in plain torch, O(N) memory, on any device: what a CPU runs.

Queries go in tiles of ROWS; a tile sees one range of keys, so a mask costs what its area costs. Where torch's own fused
kernel means the same (a CPU, no LSE wanted, no row without a key) it does the tile; else the keys go in tiles too, with
the online softmax of FlashAttention (Dao et al., 2022, algorithm 1).
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.masks import Causal, Full
from onchip.core.problem import Attention, Operands

ROWS, COLS = 256, 1024  # a tile of scores: 1 MiB a head in float32
FUSED_ROWS = 128  # queries a call of torch's kernel: it computes what a mask hides, so short tiles save work (512 causal rows: 6.3 ms, in one call 8.1)
FUSED_MOST = 1024  # queries up to which that holds; then the masks cost more than they save (2,048 rows: 93 ms, in one call 79)


def prefill(p: Attention, _config, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """Dense `[batch, len, heads, dim]`, or packed `[tokens, heads, dim]` with `offsets`, one sequence after the other."""
    offsets, scale = x.q_offsets, x.scale
    if offsets is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _dense(p, q, k, v, scale, return_lse)
        out = out.transpose(1, 2)
        return (out, lse) if return_lse else out
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=_lse_dtype(q), device=q.device) if return_lse else None
    bounds = offsets.tolist()
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        part, part_lse = _dense(p, *(x[None, start:stop].transpose(1, 2) for x in (q, k, v)), scale, return_lse)
        out[start:stop] = part[0].transpose(0, 1)
        if return_lse:
            lse[:, start:stop] = part_lse[0]
    return (out, lse) if return_lse else out


def decode(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    """`q [batch, len_q, heads, dim]` over the pages of each sequence; no loop over tokens."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((p.batch, p.heads, p.len_q), -torch.inf, dtype=_lse_dtype(q), device=q.device) if return_lse else None
    scale = x.scale
    for i, length in enumerate(cache.lengths.tolist()):
        seen = p.mask.keys(length - p.len_q, length - 1, length)
        if not seen:
            continue
        pages = slice(seen.start // p.page, -(-seen.stop // p.page))
        skip = pages.start * p.page
        k, v = (_gather(pool, cache.page_table[i, pages])[seen.start - skip : seen.stop - skip] for pool in (cache.k, cache.v))
        k, v = (x.transpose(0, 1)[None] for x in (k, v))  # [1, kv_heads, keys, dim]
        if p.len_q == 1 and not return_lse and q.device.type == "cpu":  # one row sees all of `seen`, so the heads of a group are the rows
            out[i] = F.scaled_dot_product_attention(q[i].view(1, p.kv_heads, p.group, p.dim), k, v, scale=scale).view(1, p.heads, p.dim)
            continue
        part, part_lse = _online(p, q[i : i + 1].transpose(1, 2), k, v, scale, length - p.len_q, seen.start)
        out[i] = part[0].transpose(0, 1)
        if return_lse:
            lse[i] = part_lse[0]
    return (out, lse) if return_lse else out


def _gather(pool: Tensor, pages: Tensor) -> Tensor:
    """Pages of a pool as one `[keys, kv_heads, dim]`; no copy when they lie side by side, as one sequence's mostly do."""
    if pool.device.type == "cpu":
        ids = pages.tolist()
        if ids[-1] - ids[0] == len(ids) - 1 and all(b - a == 1 for a, b in pairwise(ids)):
            return pool[ids[0] : ids[-1] + 1].flatten(0, 1)
    return pool.index_select(0, pages).flatten(0, 1)


def _dense(p: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float, return_lse: bool):
    """q `[batch, heads, len_q, dim]`, k and v `[batch, kv_heads, len_k, dim]` -> out like q, LSE `[batch, heads, len_q]` or None."""
    len_q, len_k = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and not return_lse and len_q <= len_k:
        if isinstance(p.mask, Full) or (isinstance(p.mask, Causal) and len_q == len_k and not FUSED_ROWS < len_q <= FUSED_MOST):
            return F.scaled_dot_product_attention(q, k, v, is_causal=isinstance(p.mask, Causal) and len_q > 1, scale=scale, enable_gqa=gqa), None
        return _fused_tiles(p, q, k, v, scale), None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=_lse_dtype(q), device=q.device)
    for start in range(0, len_q, ROWS):
        stop = min(start + ROWS, len_q)
        out[:, :, start:stop], lse[:, :, start:stop] = _online(p, q[:, :, start:stop], k, v, scale, start + len_k - len_q, 0)
    return out, lse


def _fused_tiles(p: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Tiles of queries through torch's kernel, each with its slice of the mask; every row sees a key."""
    len_q, len_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    if group > 1:  # once, instead of in every call
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start in range(0, len_q, FUSED_ROWS):
        stop = min(start + FUSED_ROWS, len_q)
        first = start + len_k - len_q
        seen = p.mask.keys(first, first + stop - start - 1, len_k)
        rows, cols = torch.arange(first, first + stop - start), torch.arange(seen.start, seen.stop)
        keys, values = (x[:, :, seen.start : seen.stop] for x in (k, v))
        mask = p.mask.dense(rows[:, None], cols)
        out[:, :, start:stop] = F.scaled_dot_product_attention(q[:, :, start:stop], keys, values, attn_mask=mask, scale=scale)
    return out


def _online(p: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float, first_row: int, first_col: int):
    """One tile of queries over its keys. Row 0 sits at `first_row`, column 0 of k at `first_col`, both counted from the first key."""
    batch, heads, rows, dim = q.shape
    kv_heads, len_k = k.shape[1], k.shape[2]
    work = torch.promote_types(q.dtype, torch.float32)
    q = (q.to(work) * scale).reshape(batch, kv_heads, -1, dim)  # the heads of a group are rows of one product
    position = torch.arange(first_row, first_row + rows, device=q.device).repeat(heads // kv_heads)[:, None]
    acc = q.new_zeros(q.shape)
    total = q.new_zeros(*q.shape[:3], 1)
    top = torch.full_like(total, -torch.inf)
    seen = p.mask.keys(first_row, first_row + rows - 1, first_col + len_k)
    for start in range(max(seen.start, first_col), seen.stop, COLS):
        cols = torch.arange(start, min(start + COLS, seen.stop), device=q.device)
        tile = slice(start - first_col, start - first_col + len(cols))
        scores = (q @ k[:, :, tile].to(work).transpose(2, 3)).masked_fill(~p.mask.dense(position, cols), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)  # a row that has seen nothing yet stays at zero
        weights, shrink = (scores - safe).exp(), (top - safe).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ v[:, :, tile].to(work)
        top = new_top
    out = acc / total.masked_fill(total == 0, 1.0)
    lse = (top + total.log()).reshape(batch, heads, rows)
    return out.reshape(batch, heads, rows, dim), lse


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
