"""The oracle: attention as it is written on paper, in float32 (float64 for float64 inputs), with all scores in memory at once.

Gradients are torch's own, through the same lines.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.core.bands import Band
from onchip.core.formats import Codes, read
from onchip.core.philox import kept
from onchip.core.problem import Attention, Operands, Rows, spans
from onchip.core.scales import LARGEST, SMALLEST, Scales
from onchip.core.trace import Counting, Place, Traced
from onchip.kernels.attention.dequantised import backward_from_e4m3, prefill_from_e4m3


def prefill(p: Attention, _config, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """Dense `[batch, len, heads, dim]`, or packed `[tokens, heads, dim]` with offsets."""
    if x.scales is not None:
        return prefill_from_e4m3(prefill, p, q, k, v, x, return_lse)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(_lse_shape(q), -torch.inf, dtype=_lse_dtype(q), device=q.device)
    if x.q_offsets is None:
        parts = [one(p, b, *qkv, x) for b, qkv in enumerate(zip(q, k, v, strict=True))]
        if parts:
            out, lse = (torch.stack(each) for each in zip(*parts, strict=True))
        return (out, lse) if return_lse else out
    for b, (rows, keys) in enumerate(zip(spans(x.q_offsets, x.q_used, len(q)), spans(x.k_offsets, x.k_used, len(k), shared=True), strict=True)):
        part, part_lse = one(p, b, q[rows], k[keys], v[keys], x)
        index = torch.arange(rows.start, rows.stop, device=q.device)
        out, lse = out.index_copy(0, index, part), lse.index_copy(1, index, part_lse)
    return (out, lse) if return_lse else out


def backward(p: Attention, _config, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """Gradients of q, k, v, the sinks and each tensor that the score reads; None where one needs none. `d_lse` may be None."""
    if x.scales is not None:
        return backward_from_e4m3(backward, p, q, k, v, out, lse, d_out, d_lse, x)
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        sinks = None if x.sinks is None else x.sinks.detach().requires_grad_()
        score = tuple(t.detach().requires_grad_(t.requires_grad) for t in x.score)
        result = prefill(p._replace(op="prefill"), None, q, k, v, x._replace(sinks=sinks, score=score), True)
        pairs = [(r, d) for r, d in zip(result, (d_out, d_lse), strict=True) if d is not None and r.requires_grad]
        wanted = [t for t in (q, k, v, sinks, *score) if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [d.to(r.dtype) for r, d in pairs], allow_unused=True))
    grads = [next(found) if t is not None and t.requires_grad else None for t in (q, k, v, sinks, *score)]
    grads = [torch.zeros_like(t) if g is None and t is not None and t.requires_grad else g for g, t in zip(grads, (q, k, v, sinks, *score), strict=True)]
    return *grads[:4], tuple(grads[4:])


def decode(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    """`q [batch, len_q, heads, dim]`, or packed `[tokens, heads, dim]` with offsets, over the pages of each sequence.

    Quantised ones are dequantised to what is computed in.
    """
    packed = x.q_offsets is not None
    places = spans(x.q_offsets, None, len(q)) if packed else ()
    rows = [q[place] for place in places] if packed else q
    out, lse, work = [], [], torch.promote_types(q.dtype, torch.float32)
    for b, (row, pages, length) in enumerate(zip(rows, cache.page_table, cache.lengths.tolist(), strict=True)):
        used = pages[: -(-length // p.page)].long()
        k, v = (_keys(pool, used, length, work) for pool in (cache.k, cache.v))
        o, e = one(p, b, row, k, v, x)
        out.append(o)
        lse.append(e)
    if packed:  # and tokens before the first sequence and behind the last
        rest = places[0].start, len(q) - places[-1].stop
        before, behind = (q.new_zeros(n, p.heads, p.value_dim) for n in rest)
        first, last = (torch.full((p.heads, n), -torch.inf, dtype=_lse_dtype(q), device=q.device) for n in rest)
        out, lse = torch.cat([before, *out, behind]), torch.cat([first, *lse, last], 1)
    else:
        out, lse = torch.stack(out), torch.stack(lse)
    return (out, lse) if return_lse else out


def _keys(pool: Tensor | Codes, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The numbers of a sequence. Those of no token are cut off before the channel scale, whose gradient would sum over them."""
    if not isinstance(pool, Codes) or pool.channel is None:
        return read(pool, pages, dtype).flatten(0, 1)[:length]
    return (read(pool._replace(channel=None), pages, torch.float32).flatten(0, 1)[:length] * pool.channel).to(dtype)


def one(p: Attention, b: int, q: Tensor, k: Tensor, v: Tensor, x: Operands) -> tuple[Tensor, Tensor]:
    """Sequence `b`: q `[len_q, heads, dim]`, k and v `[len_k, kv_heads, dim]` -> the output like q, LSE `[heads, len_q]`."""
    work = torch.promote_types(q.dtype, torch.float32)
    (len_q, heads, _), len_k = q.shape, len(k)
    at = place(b, heads, len_q, len_k, q.device)
    seen = torch.zeros(1, heads, len_q, len_k, dtype=torch.bool, device=q.device)
    if len_q and len_k:  # a mask may read what is not there for a query without keys
        seen = _read(p.mask, lambda: p.mask.seen(at, x.mask)).broadcast_to(seen.shape)
    seen = seen[0]
    k, v = (t.to(work).repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    shown = seen.any(1).T[..., None]  # a key that nobody sees is padding, and may hold anything
    k, v = (torch.where(shown, t, 0.0) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(work), k) * x.scale
    if p.score is not None and len_q and len_k:
        products, made = scores[None], lambda: p.score.run(products, *at, *x.score).broadcast_to(1, heads, len_q, len_k)[0].to(work)
        with torch.no_grad():
            counts = seen & (_read(p.score, made) != -torch.inf)
        with Counting(counts):
            scores = made()
    scores = scores.masked_fill(~seen, -torch.inf)
    if x.sinks is not None:
        scores = torch.cat([scores, x.sinks.to(work)[:, None, None].expand(heads, len_q, 1)], -1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # of these logsumexp has no gradient
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf) if scores.shape[-1] else scores.sum(-1) - torch.inf
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()[..., :len_k]  # a row that sees nothing gets all zeros
    if x.drop:
        weights = weights * kept(x.drop, x.state, at.b, at.h, at.i, at.j, heads)[0] / (1 - x.drop)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out.to(q.dtype), lse if work == torch.float64 else lse.float()


def _read(part: Band | Traced, run: Callable[[], Tensor]) -> Tensor:
    """`run()` of a mask or score, which may read past the end of a tensor."""
    try:
        return run()
    except IndexError as error:
        raise part.short(error) from error


def merge(_p: Rows | None, _config, states) -> tuple[Tensor, Tensor]:
    """One (output, LSE) pair from several over disjoint keys; a part whose LSE is -inf may hold anything, and one of NaN makes both NaN."""
    lse = torch.stack([part for _, part in states])
    peak = lse.detach().amax(0)
    parts = (lse - peak.masked_fill(peak == -torch.inf, 0.0)).exp()  # 0 where a part sees nothing
    total = parts.sum(0)
    some = total.where(total != 0, 1.0)
    shares = [(part / some).transpose(-1, -2).unsqueeze(-1) for part in parts]
    out = sum(share * out.where(share > 0, 0.0) for share, (out, _) in zip(shares, states, strict=True))
    return out.to(states[0][0].dtype), (some.log() + peak).where(total != 0, -torch.inf)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """`x * signs` [..., dim] times the Walsh-Hadamard matrix / sqrt(dim), in float32: orthogonal, so that products of two rotated rows stay the same,
    while a large channel is spread over all (incoherent processing, Chee et al., 2023). `signs`: +-1 [dim], the same for queries and keys.
    """
    dim = x.shape[-1]
    x = x.float() * signs
    step = 1
    while step < dim:
        pairs = x.view(*x.shape[:-1], dim // (2 * step), 2, step)
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).view(x.shape)
        step *= 2
    return x * dim**-0.5


def quantise(_p: Rows, _config, x: Tensor, share: int, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [batch, len, heads, dim] in e4m3, rotated where there are `signs`, and its scales for `share` tokens each (0: all), [batch, heads, n]."""
    x = x.float() if signs is None else rotate(x, signs)
    length = x.shape[1]
    most = x.abs().amax(-1).transpose(1, 2)  # [batch, heads, len]
    if share != 1:
        parts = most.split(share or length, -1) if length else [most.new_zeros(*most.shape[:2], 1)] * (share == 0)
        most = torch.stack([part.amax(-1) for part in parts], -1) if parts else most
    scale = most / LARGEST
    scale = torch.where(scale < SMALLEST, SMALLEST, scale)
    each = Scales.of_tokens(scale, length).transpose(1, 2)[..., None]
    return (x / each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def page_scores(_p: Rows, _config, q: Tensor, low: Tensor, high: Tensor, page_table: Tensor, lengths: Tensor, page: int) -> Tensor:
    """q [batch, heads, dim], low and high [pages, kv_heads, dim] -> sum max(q low, q high) [batch, heads, most pages], -inf past a sequence's end and of
    pages without bounds."""
    work = torch.promote_types(q.dtype, torch.float32)
    used = torch.arange(page_table.shape[1], device=q.device) * page < lengths[:, None]
    at = torch.where(used, page_table, 0).long()
    low, high = (torch.where(used[..., None, None], t[at], 0).to(work) for t in (low, high))  # [batch, most pages, kv_heads, dim]
    q = q.to(work).unflatten(1, (low.shape[2], -1))
    scores = torch.einsum("bhgd,bphd->bhgp", q.clamp(min=0), high) + torch.einsum("bhgd,bphd->bhgp", q.clamp(max=0), low)
    return scores.flatten(1, 2).masked_fill(~used[:, None], -torch.inf).nan_to_num(-torch.inf, torch.inf, -torch.inf)


def place(b: int, heads: int, len_q: int, len_k: int, device: torch.device) -> Place:
    """Every (head, query, key) of sequence `b`, each number along its own dimension of [1, heads, len_q, len_k]."""
    count = lambda n, *shape: torch.arange(n, device=device).view(shape)  # noqa: E731
    lengths = (torch.full((1, 1, 1, 1), n, device=device) for n in (len_q, len_k))
    b_at = torch.full((1, 1, 1, 1), b, device=device)
    return Place(b_at, count(heads, 1, -1, 1, 1), count(len_q, 1, 1, -1, 1), count(len_k, 1, 1, 1, -1), *lengths)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
