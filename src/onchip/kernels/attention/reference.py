"""The oracle: attention as it is written on paper, in float32 (float64 for float64 inputs), with all scores in memory at once."""

from itertools import pairwise

import torch
from torch import Tensor

from onchip.core.problem import Attention


def prefill(p: Attention, _config, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, scale: float, return_lse: bool):
    """Dense `[batch, len, heads, dim]`, or packed `[tokens, heads, dim]` with `offsets`."""
    if offsets is None:
        out, lse = zip(*(one(p, *qkv, scale) for qkv in zip(q, k, v, strict=True)), strict=True)
        out, lse = torch.stack(out), torch.stack(lse)
    else:
        bounds = offsets.tolist()
        spans = [slice(a, b) for a, b in pairwise(bounds)]
        out, lse = zip(*(one(p, q[s], k[s], v[s], scale) for s in spans), strict=True)
        out, lse = torch.cat(out), torch.cat(lse, 1)
    return (out, lse) if return_lse else out


def decode(p: Attention, _config, q: Tensor, cache, scale: float, return_lse: bool):
    """`q [batch, len_q, heads, dim]` over the pages of each sequence."""
    out, lse = [], []
    for row, pages, length in zip(q, cache.page_table, cache.lengths.tolist(), strict=True):
        used = pages[: -(-length // p.page)].long()
        k, v = (pool[used].flatten(0, 1)[:length] for pool in (cache.k, cache.v))
        o, e = one(p, row, k, v, scale)
        out.append(o)
        lse.append(e)
    out = torch.stack(out)
    return (out, torch.stack(lse)) if return_lse else out


def one(p: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence: q `[len_q, heads, dim]`, k and v `[len_k, kv_heads, dim]` -> the output like q, LSE `[heads, len_q]`."""
    work = torch.promote_types(q.dtype, torch.float32)
    len_q, len_k = len(q), len(k)
    k, v = (x.to(work).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(work), k) * scale
    rows = torch.arange(len_k - len_q, len_k, device=q.device)[:, None]
    scores = scores.masked_fill(~p.mask.dense(rows, torch.arange(len_k, device=q.device)), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()  # a row that sees nothing gets all zeros
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out.to(q.dtype), lse if work == torch.float64 else lse.float()
