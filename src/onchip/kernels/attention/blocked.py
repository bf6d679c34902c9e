"""Attention in plain torch, O(N) memory, on any device, forward and backward: what a CPU runs.

Queries go in tiles; a tile knows which keys its rows see, so products are made for the mask's area (`blocked_tiles.py`). What a mask
that is no band shows is computed for each query and key of its hull that blocks do not tell of (`blocked_bounds.py`), of one in blocks once a
block, for all heads that share it. On a CPU torch's own fused kernel does a tile wherever it means the same; else the keys go in tiles too: forward the online
softmax of FlashAttention (Dao et al., 2022, algorithm 1), backward the weights again from the LSE (its algorithm 4):

    P = exp(S - LSE)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = dS K    dK = dS^T Q    delta = rowsum(dO O) - dLSE
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.device import Device
from onchip.core.formats import Codes, read
from onchip.core.once import once
from onchip.core.philox import kept
from onchip.core.problem import Attention, Operands, spans
from onchip.core.trace import Counting, Place, Traced
from onchip.kernels.attention.blocked_fused import (
    LEAST_KEYS,
    ROOM,
    Whole,
    added,
    added_bias,
    cleared,
    even,
    fit,
    fitting,
    float_mask,
    fused_backward,
    fused_forward,
    fuses,
    in_float32,
    laid_out,
    narrow,
    padded,
    staircase,
    unmasked,
    upright,
    whole,
    whole_part,
)
from onchip.kernels.attention.blocked_tiles import (
    Group,
    Part,
    Tile,
    add,
    add_read,
    cutting,
    differs,
    groups,
    hull,
    is_sum,
    merged,
    one_order,
    parts,
    reads,
    run,
    take,
    tiles,
    value,
)
from onchip.kernels.attention.dequantised import backward_from_e4m3, prefill_from_e4m3

TILE = {"cpu": (128, 256)}  # rows and keys of a tile of our own products; on a CPU 64 to 512 of either are within a tenth
MOST_TILE = (512, 1024)  # on a GPU, where a launch costs more than a miss
SCORES = 64  # tiles, of all sequences and heads, that go together
DEQUANTISED = 512  # keys of a quantised cache that go together
SPARE = 1 << 18  # numbers of padded keys that a call of torch's kernel, and what is around it, costs as much as: 1,365 keys of 3 heads of 64, 250 us
LONE = 2048  # numbers of a head's keys from which a row of bfloat16 that goes alone goes twice: 32 heads of 128 over 64 keys 607 us, two equal rows 132
FUSED_ROWS = (64, 768)  # queries of a call of torch's kernel with a band, from few (windows) to many (it packs the keys anew in each call)
FUSED_TRACED = 1024  # of one with another mask, at most; below 768 the backward pass in bfloat16 takes 1.4 times as long
FUSED_MASK = 1 << 24  # bytes of the mask of such a call


# ---- launches


def configs(p: Attention, device: Device) -> list[Whole | None]:
    return [whole(p) if p.op == "prefill" and device.kind == "cpu" else None]


def prefill(p: Attention, how: Whole | None, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """Dense `[batch, len, heads, dim]`, or packed `[tokens, heads, dim]` with offsets."""
    if how is not None:
        near = laid_out(p, how, q, k, v)
        mask, all_seen = added(p, how, x, near[0].dtype) if how.added else (None, True)  # a plain call does not even ask: 3 us
        if all_seen:
            if how.bare and x.scale > 0:
                out, lse = fused_forward(*near, 0.0, how.causal, attn_mask=mask, scale=x.scale)
                if mask is not None and (return_lse or not torch.equal(lse, lse)):
                    out, lse = cleared(mask, out, lse)
            else:
                out, lse = _fused(p, x, mask, *near, how.causal, return_lse)
            out = out.transpose(1, 2) if how.as_is else narrow(out, p.value_dim).to(q.dtype).transpose(1, 2)
            return (out, lse.contiguous()) if return_lse else out
    return _prefill(p, q, k, v, x, return_lse)


def _prefill(p: Attention, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """The same in tiles."""
    if torch.is_grad_enabled():
        with torch.no_grad():  # as a decorator it is six functions of Python in each call
            return _prefill(p, q, k, v, x, return_lse)
    if x.scales is not None:
        return prefill_from_e4m3(lambda p, _, *given: prefill(p, whole(p) if q.is_cpu else None, *given), p, q, k, v, x, return_lse)
    every = parts(p, x, q, k, p.batch if fuses(p, q.device) else SCORES // p.heads)
    results = (_forward(p, x, part, part.queries(q), part.keys(k), part.keys(v)) for part in every)
    if len(every) == 1 and x.q_offsets is None:  # nothing to put together
        out, lse = next(results)
        return (out.transpose(1, 2), lse.contiguous()) if return_lse else out.transpose(1, 2)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=_wide(q), device=q.device) if return_lse else None
    for part, (part_out, part_lse) in zip(every, results, strict=True):
        part.queries(out).copy_(part_out)
        if return_lse:
            part.lse(lse).copy_(part_lse)
    return (out, lse) if return_lse else out


def recorded(p: Attention) -> Callable | None:
    """A function of (x, q, k, v, hook) -> the output `[batch, len, heads, dim]` where torch's autograd has the gradient, else None.

    It gives None for what only the launch can do: gradients of the score's tensors, and NaN in a row that sees no key, or in a key that no row
    sees. `hook(grads of q, k and v, (grad of the output, ..))` runs after the backward pass, and may return other gradients.
    """
    how = whole(p) if p.op == "prefill" else None
    return functools.partial(_recorded, p, how) if how is not None and how.trained else None


def _recorded(p: Attention, how: Whole, x: Operands, q: Tensor, k: Tensor, v: Tensor, hook: Callable) -> Tensor | None:
    if (how.causal and x.scale <= 0) or (x.score and any(t.requires_grad for t in x.score)):
        return None
    dtype = q.dtype
    q, k, v = laid_out(p, how, q, k, v)
    mask, all_seen = added(p, how, x, q.dtype) if how.added else (None, True)
    if not all_seen:
        return None
    out, lse = fused_forward(q, k, v, 0.0, how.causal, attn_mask=mask, scale=x.scale)
    if mask is not None and not torch.equal(lse, lse):
        return None
    out.grad_fn.register_hook(hook)
    return out.transpose(1, 2) if how.as_is else narrow(out, p.value_dim).to(dtype).transpose(1, 2)


@torch.no_grad()
def backward(p: Attention, _config, q, k, v, out, lse, d_out, d_lse, x: Operands):
    """Gradients of q, k, v, the sinks and each tensor that the score reads; None where one needs none. `d_lse` may be None."""
    if x.scales is not None:
        return backward_from_e4m3(backward, p, q, k, v, out, lse, d_out, d_lse, x)
    if q.is_cpu and d_lse is None and x.sinks is None and (how := whole(p)) and (not how.added or (how.added == "bias" and not (lse == -torch.inf).any())):
        each = (t.transpose(1, 2) for t in (q, k, v, out, d_out.to(q.dtype)))
        return *(d.to(q.dtype).transpose(1, 2) for d in _fused_backward(p, x, whole_part(p), *each, lse)), None, (None,) * len(x.score)
    wide = _wide(q)
    d_sinks = None if x.sinks is None else torch.zeros(p.heads, dtype=wide, device=q.device)
    d_score = [torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, wide), device=t.device) if t.requires_grad else None for t in x.score]
    fused = fuses(p, q.device) and d_lse is None and all(d is None for d in d_score)
    every = parts(p, x, q, k, p.batch if fused else SCORES // p.heads)
    given = Given(q, k, v, out, lse, d_out.to(q.dtype), d_lse)
    results = (_gradients(p, x, part, fused, given, d_sinks, d_score) for part in every)
    if len(every) == 1 and x.q_offsets is None:
        grads = [d.to(t.dtype).transpose(1, 2) for d, t in zip(next(results), (q, k, v), strict=True)]
    else:
        grads = [t.new_zeros(t.shape) for t in (q, k, v)]
        for part, (dq, dk, dv) in zip(every, results, strict=True):
            for to, d in ((part.queries(grads[0]), dq), (part.keys(grads[1]), dk), (part.keys(grads[2]), dv)):
                to.copy_(d)
    d_sinks = None if d_sinks is None else d_sinks.to(x.sinks.dtype)
    return *grads, d_sinks, tuple(None if d is None else d.to(t.dtype) for d, t in zip(d_score, x.score, strict=True))


def decode(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    """`q [batch, len_q, heads, dim]`, or packed `[tokens, heads, dim]` with offsets, over pages; of few queries, some sequences at once."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return decode(p, _config, q, cache, x, return_lse)
    laid = None if p.kv else (cache.k.stride(), cache.v.stride())
    read = [cache.page_table, cache.lengths, x.q_offsets]
    places, lengths, beside = once(("beside", p, laid), read, lambda: _laid_side_by_side(p, x, q, cache))
    if len(beside) == 1 and beside[0].in_order and beside[0].rows.shape[0] == q.shape[:-2].numel():  # everybody's
        out, lse = _side_by_side(p, x, beside[0], q, cache, return_lse)
        out = out.view(*q.shape[:-1], p.value_dim)
        return (out, lse if x.q_offsets is None else lse.transpose(0, 1).flatten(1)) if return_lse else out
    out = q.new_zeros(*q.shape[:-1], p.value_dim)
    lse = torch.full((*q.shape[:-3], p.heads, q.shape[-3]), -torch.inf, dtype=_wide(q), device=q.device)
    for group in beside:
        found, found_lse = _side_by_side(p, x, group, q, cache, return_lse)
        out.flatten(0, -3).index_copy_(0, group.rows, found)
        if return_lse and x.q_offsets is None:
            lse.index_copy_(0, group.numbers, found_lse)
        elif return_lse:
            lse.index_copy_(1, group.rows, found_lse.transpose(0, 1).flatten(1))
    done = {b for group in beside for b in group.members}
    q = q.to(_wide(q)) if p.kv else q  # as what is dequantised
    band = hull(p)
    for b, (rows, length) in enumerate(zip(places, lengths, strict=True)):
        len_q = p.len_q if rows is None else rows.stop - rows.start
        if not len_q or b in done:
            continue
        row = band.shift(len_q, length)
        seen = band.keys(row, row + len_q - 1, length)
        part = Part(slice(b, b + 1), rows, None, len_q, length, seen.start)
        near = part.queries(q)
        if len_q == 1 and p.mask is band and p.score is None and q.is_cpu and seen:  # it sees all keys of its range
            found, found_lse = _one_row(p, x, near, cache, b, seen)
        else:
            found, found_lse = _forward(p, x, part, near, *(_keys(p, pool, cache.page_table[b], seen, q.dtype) for pool in cache[:2]))
        part.queries(out).copy_(narrow(found, p.value_dim))
        part.lse(lse).copy_(found_lse)
    return (out, lse) if return_lse else out


def _laid_side_by_side(p: Attention, x: Operands, q: Tensor, cache) -> tuple[list[slice | None], list[int], tuple[Group, ...]]:
    """Of each sequence its queries, None of a dense batch, and how many keys it has; and those whose keys lie side by side: numbers at equal
    distances under a band, where bits may depend on neighbours."""
    places = [None] * p.batch if x.q_offsets is None else spans(x.q_offsets, None, len(q))
    lengths = cache.lengths.tolist()
    plain = not p.kv and p.dtype.itemsize > 1 and p.score is None and not isinstance(p.mask, Traced) and "batch_invariant" not in p.extras
    if p.batch < 2 or not q.is_cpu or not plain or any(pool.stride(0) != p.page * pool.stride(1) for pool in cache[:2]):
        return places, lengths, ()
    if x.q_offsets is None:
        starts, counts = range(0, p.batch * p.len_q, p.len_q), [p.len_q] * p.batch
    else:
        starts, counts = (rows.start for rows in places), (rows.stop - rows.start for rows in places)
    return places, lengths, groups(p.mask, p.page, p.dtype, SPARE // (p.kv_heads * p.dim), tuple(starts), tuple(counts), tuple(lengths))


def _side_by_side(p: Attention, x: Operands, group: Group, q: Tensor, cache, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, dim_v] and LSE [n, heads, len_q] of a group of sequences: one product where a call a sequence costs more than its keys do."""
    slots, pages = once(("slots", group.members, p.page), [cache.page_table, group.columns], lambda: group.slots(cache.page_table, p.page))
    _inside(cache.k, pages[0], pages[-1], "some sequences")
    (count, longest), heads, dim_v = group.columns.shape, p.kv_heads, p.value_dim
    k = cache.k.flatten(0, 1).index_select(0, slots).view(count, longest, heads, p.dim).transpose(1, 2)
    v = cache.v.flatten(0, 1).index_select(0, slots).view(count, longest, heads, dim_v).transpose(1, 2)
    near = q.flatten(0, -3)
    near = near if group.in_order and near.shape[0] == group.rows.shape[0] else near.index_select(0, group.rows)
    near = near.view(count, -1, p.heads, p.dim).transpose(1, 2)
    found, lse = _fused(p, x, group.mask, *fitting(p, near, k, v), return_lse=return_lse, blind=group.blind)
    return narrow(found, dim_v).transpose(1, 2).flatten(0, 1).to(q.dtype), lse.to(_wide(q))


def _one_row(p: Attention, x: Operands, q: Tensor, cache, b: int, seen: range) -> tuple[Tensor, Tensor]:
    """A query that sees all keys of `seen`; quantised keys some at a time, which stay in a core's cache between their numbers and the product."""
    step = max(1, DEQUANTISED // p.page) * p.page if p.kv else seen.stop
    plain, first = x._replace(sinks=None), seen.start // step * step
    out = lse = None
    for start in range(first, seen.stop, step):
        keys = range(max(start, seen.start), min(start + step, seen.stop))
        k, v = (_keys(p, pool, cache.page_table[b], keys, q.dtype) for pool in cache[:2])
        part, part_lse = _fused(p, plain, None, *(fit(t, p) for t in (q, k, v)))
        if out is None:
            out, lse = part, part_lse
        else:
            total = torch.logaddexp(lse, part_lse)
            out = out * (lse - total).exp_()[..., None] + part * (part_lse - total).exp_()[..., None]
            lse = total
    return _with_sinks(x, out, lse)


def _keys(p: Attention, pool: Tensor | Codes, pages: Tensor, keys: range, dtype: torch.dtype) -> Tensor:
    """Some keys of a sequence with these pages, [1, kv_heads, keys, dim]."""
    near = slice(keys.start // p.page, -(-keys.stop // p.page))
    skip = near.start * p.page
    return _gather(pool, pages[near], dtype)[None, keys.start - skip : keys.stop - skip].transpose(1, 2)


def _gather(pool: Tensor | Codes, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Pages of a pool as one `[keys, kv_heads, dim]`; no copy when they lie side by side, as one sequence's mostly do. Codes are dequantised to `dtype`."""
    if pool.device.type == "cpu":
        ids = pages.tolist()
        if ids:
            _inside(pool, min(ids), max(ids), "a sequence")
        if ids and ids[-1] - ids[0] == len(ids) - 1 and ids == list(range(ids[0], ids[-1] + 1)):  # pages of one token may be 100,000
            return read(pool, slice(ids[0], ids[-1] + 1), dtype).flatten(0, 1)
    return read(pool, pages.long(), dtype).flatten(0, 1)


def _inside(pool: Tensor | Codes, least: int, greatest: int, whose: str) -> None:
    if not 0 <= least <= greatest < pool.shape[0]:
        raise ValueError(f"paged_attention: page_table has pages {least} to {greatest} among those of {whose}; the cache has 0 to {pool.shape[0] - 1}")


# ---- forward


def _forward(p: Attention, x: Operands, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q `[batch, heads, len_q, dim]`, k and v `[batch, kv_heads, keys, dim]` -> the output like q, LSE `[batch, heads, len_q]`."""
    dtype, dim_v, fused = q.dtype, v.shape[-1], fuses(p, q.device)
    q, k, v = fitting(p, q, k, v) if fused else (t.to(_wide(t)) for t in (q, k, v))
    if fused and (how := unmasked(p, part)):
        keys, causal = how
        k, v = (k, v) if keys.stop - keys.start == k.shape[2] else (take(k, 2, keys), take(v, 2, keys))
        out, lse = _fused(p, x, None if p.score is None else added_bias(p, x, part, q.dtype), q, k, v, causal)
        return narrow(out, dim_v).to(dtype), lse
    out = lse = None
    for tile in _fused_tiles(p, x, part, q.dtype) if fused else tiles(p, x, part, _tile(q)[0], q.device):
        near = q[:, :, tile.rows], tile.of_keys(k), tile.of_keys(v)
        found, found_lse = _fused(p, x, _fused_mask(p, x, tile, q.dtype), *near) if fused else _online(p, x, tile, *near)
        if tile.rows == slice(0, part.len_q):
            return narrow(found, dim_v).to(dtype), found_lse
        out, lse = (out, lse) if out is not None else _nothing(p, x, q, dtype)
        out[:, :, tile.rows], lse[:, :, tile.rows] = narrow(found, dim_v), found_lse
    return (out, lse) if out is not None else _nothing(p, x, q, dtype)


def _nothing(p: Attention, x: Operands, q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and LSE of rows that see no key."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_wide(q), device=q.device)
    return torch.zeros(*q.shape[:-1], p.value_dim, dtype=dtype, device=q.device), lse if x.sinks is None else lse.copy_(x.sinks[:, None])


def _online(p: Attention, x: Operands, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One tile of queries over its keys, some at a time."""
    batch, heads, rows, _ = q.shape
    q = _grouped(q * x.scale, p)
    acc = q.new_zeros(*q.shape[:3], v.shape[-1])
    top = q.new_full((batch, heads, rows, 1), -torch.inf)
    if x.sinks is not None:
        top.copy_(x.sinks[:, None, None])
    total = (top > -torch.inf).to(q.dtype)
    for cols, part in _columns(tile, k):
        scores = _hide(_scores(p, x, part, _ungrouped(q @ k[:, :, cols].transpose(2, 3), p)), part)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)  # a row that has seen nothing yet stays at zero
        weights, shrink = (scores - safe).exp_(), (top - safe).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        if x.drop:
            weights *= _keeps(p, x, part.at, q.dtype)
        acc = acc.mul_(_grouped(shrink, p)).add_(_grouped(weights, p) @ v[:, :, cols])
        top = new_top
    out = _ungrouped(acc, p) / total.masked_fill(total == 0, 1.0)
    return out, (top + total.log())[..., 0]


def _scores(p: Attention, x: Operands, tile: Tile, products: Tensor, tensors: list[Tensor] | None = None) -> Tensor:
    """The scores [batch, heads, rows, keys] of a tile, from its products."""
    if p.score is None:
        return products
    tensors = reads(p.score, x.score, tile.at) if tensors is None else tensors
    return run(p.score, tensors, tile.at, products).to(products.dtype).expand(products.shape)


def _hide(scores: Tensor, tile: Tile) -> Tensor:
    return scores if tile.seen is None else scores.masked_fill(~tile.seen, -torch.inf)


def _keeps(p: Attention, x: Operands, at: Place, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies the weights with."""
    return kept(x.drop, x.state, at.b, at.h, at.i, at.j, p.heads).to(dtype) / (1 - x.drop)


def _grouped(t: Tensor, p: Attention) -> Tensor:
    """[batch, heads, rows, ..] -> [batch, kv_heads, group x rows, ..]: the heads of a group are rows of one product."""
    return t.reshape(t.shape[0], p.kv_heads, p.group * t.shape[2], t.shape[3])


def _ungrouped(t: Tensor, p: Attention) -> Tensor:
    return t.reshape(t.shape[0], p.heads, t.shape[2] // p.group, t.shape[3])


def _tile(q: Tensor) -> tuple[int, int]:
    return TILE.get(q.device.type, MOST_TILE)


def _columns(tile: Tile, keys: Tensor) -> Iterator[tuple[slice, Tile]]:
    """The parts of a tile's keys that a row sees."""
    step = _tile(keys)[1]
    for start in range(0, keys.shape[2], step):
        cols = slice(start, min(start + step, keys.shape[2]))
        if (part := tile.columns(cols)) is not None:
            yield cols, part


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


# ---- backward


class Given(NamedTuple):
    """What a backward pass is given, of all parts: the forward pass's tensors, and gradients in the dtype of q; `d_lse` may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None


class Sums(NamedTuple):
    """Of each row `[batch, heads, len_q]`: the LSE, delta = rowsum(dO O), and the gradient of the LSE or None."""

    lse: Tensor
    delta: Tensor | None
    d_lse: Tensor | None

    def shared(self, rows: slice) -> Tensor:
        """What the gradients of all weights of a row are less by."""
        delta = self.delta[:, :, rows, None]
        return delta if self.d_lse is None else delta - self.d_lse[:, :, rows, None]


def _gradients(p: Attention, x: Operands, part: Part, fused: bool, given: Given, d_sinks, d_score) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv `[batch, heads or kv_heads, len, dim]` of a part; adds to `d_sinks` and `d_score`."""
    wide = _wide(given.q)
    q, out, d_out = part.queries(given.q), part.queries(given.out), part.queries(given.d_out)
    k, v, lse = part.keys(given.k), part.keys(given.v), part.lse(given.lse).to(wide)
    blind = lse == -torch.inf
    if blind.any():  # their weights are 0; what they hold must not make 0 x NaN of that
        q, d_out, lse = q.masked_fill(blind[..., None], 0.0), d_out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, 0.0)
    fused = fused and (part.len_k > 1 or x.softmax == "part")  # of one key torch's kernel makes gradients of q and k of 1e-6, and rounds dV twice
    delta = (d_out.to(wide) * out).sum(-1) if not fused or x.sinks is not None else None
    sums = Sums(lse, delta, None if given.d_lse is None else part.lse(given.d_lse).masked_fill(blind, 0.0))
    if fused:
        found = _fused_backward(p, x, part, q, k, v, out, d_out, lse)
    else:
        found = _backward(p, x, part, *(t.to(wide) for t in (q, k, v, d_out)), sums, d_score)
    if x.sinks is not None:
        d_sinks -= ((x.sinks.to(wide)[:, None] - lse).exp() * sums.shared(slice(None))[..., 0]).sum((0, 2))
    return found


def _backward(p: Attention, x: Operands, part: Part, q, k, v, d_out, sums: Sums, d_score) -> tuple[Tensor, Tensor, Tensor]:
    """By our own products, tile by tile; adds to `d_score`. Where a row's keys are one tile its delta is made anew, without the output's rounding."""
    dq, dk, dv = _zeros(q, k, v)
    for tile in tiles(p, x, part, _tile(q)[0], q.device):
        near, d_near = _grouped(q[:, :, tile.rows] * x.scale, p), _grouped(d_out[:, :, tile.rows], p)
        row_lse = sums.lse[:, :, tile.rows, None]
        keys, values = tile.of_keys(k), tile.of_keys(v)
        found = torch.zeros_like(near)
        for cols, small in _columns(tile, keys):
            scores, pull = _with_gradient(p, x, small, _ungrouped(near @ keys[:, :, cols].transpose(2, 3), p), d_score)
            weights = kept_weights = (_hide(scores, small) - row_lse).exp_()
            if part.len_k == 1 and x.sinks is None and x.softmax == "whole":
                weights.round_()  # 1 whatever its score is, or 0: gradients of q and k are 0 in all bits
            d_weights = _ungrouped(d_near @ values[:, :, cols].transpose(2, 3), p)
            if x.drop:
                keeps = _keeps(p, x, small.at, q.dtype)
                d_weights *= keeps
                kept_weights = weights * keeps
            add(dv, 2, small.keys, _grouped(kept_weights, p).transpose(2, 3) @ d_near)
            if part.len_k <= _tile(q)[1] and x.softmax == "whole":
                sums.delta[:, :, tile.rows] = (weights * d_weights).sum(-1)
            d_scores = _grouped(pull(d_weights.sub_(sums.shared(tile.rows)).mul_(weights)), p)
            found += d_scores @ keys[:, :, cols]
            add(dk, 2, small.keys, d_scores.transpose(2, 3) @ near)
        dq[:, :, tile.rows] = _ungrouped(found * x.scale, p)
    return dq, dk, dv


def _with_gradient(p: Attention, x: Operands, tile: Tile, products: Tensor, d_score: list[Tensor | None]):
    """(the tile's scores, a function from their gradient to the products', which adds to `d_score` what the tensors get)."""
    if p.score is None or (all(d is None for d in d_score) and is_sum(p.score)):
        return _scores(p, x, tile, products), lambda d: d
    with torch.enable_grad():
        products = products.requires_grad_()
        tensors = [t.detach().requires_grad_(d is not None) for t, d in zip(reads(p.score, x.score, tile.at), d_score, strict=True)]
        scores = _scores(p, x, tile, products, tensors)

    def pull(d: Tensor) -> Tensor:
        wanted = [t for t in (products, *tensors) if t.requires_grad]
        with one_order():
            d_products, *found = torch.autograd.grad(scores, wanted, d, allow_unused=True) if scores.requires_grad else [None] * len(wanted)
            if not all(t is None or t.sum().isfinite() for t in (d_products, *found)):  # derivatives that are infinite where nothing counts?
                with torch.enable_grad(), Counting(d != 0):
                    again = _scores(p, x, tile, products, tensors)
                d_products, *found = torch.autograd.grad(again, wanted, d, allow_unused=True)
        for n, more in zip((n for n, to in enumerate(d_score) if to is not None), found, strict=True):
            if more is not None:
                add_read(d_score[n], cutting(p.score)[1].get(n), tile.at, more)
        return torch.zeros_like(d) if d_products is None else d_products

    return scores.detach(), pull


# ---- torch's own kernel


def _fused_rows(p: Attention, len_k: int) -> int:
    """Queries of a call with a mask: more for long rows of keys, as far as the mask stays small."""
    band, each = hull(p), 1 if p.score is None else 2  # a score's terms, and those that count
    most = FUSED_MASK // max(4 if p.dtype == torch.float16 else 0, p.dtype.itemsize) // (max(1, len_k) * (p.heads if differs(p, "h") else 1) * each)
    bounded = band.left is not None and band.right is not None
    if isinstance(p.mask, Traced) and not bounded:
        return max(32, min(FUSED_TRACED, most))
    rows = min(len_k, band.left + band.right + 1) // 8 if bounded else len_k // 4
    return max(32, min(max(rows, FUSED_ROWS[0]), FUSED_ROWS[1], most))


def _fused_tiles(p: Attention, x: Operands, part: Part, dtype: torch.dtype) -> Iterator[Tile]:
    """The tiles of calls of torch's kernel; those of a band with what it adds to the scores."""
    most = _fused_rows(p, part.len_k)
    if isinstance(p.mask, Traced) or p.score is not None:
        found = tiles(p, x, part, most, torch.device("cpu"))
        yield from found if p.score is not None else merged(found)
        return
    shift = p.mask.shift(part.len_q, part.len_k)
    found = []  # (rows, keys, the place of its first key beside its first row)
    for start in range(0, part.len_q, most):
        stop = min(start + most, part.len_q)
        if keys := p.mask.keys(start + shift, stop + shift - 1, part.len_k):
            found.append((slice(start, stop), keys, keys.start - start - shift))
    if not found:
        return
    least = min(at for *_, at in found)
    width = max(at + len(keys) for _, keys, at in found) - least
    mask = staircase(p.mask.left, p.mask.right, min(most, part.len_q), least, width, dtype)
    for rows, keys, at in found:
        near = slice(keys.start - part.origin, keys.stop - part.origin)
        yield Tile(rows, near, None, added=mask[:, :, : rows.stop - rows.start, at - least : at - least + len(keys)])


def _fused_mask(p: Attention, x: Operands, tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """What torch's kernel adds to the scores: 0, the terms of the score, or -inf. It holds until the next tile's."""
    if tile.added is not None:
        return tile.added
    if p.score is None:
        if tile.seen is None:
            return None
        return float_mask(tile.seen, dtype, ROOM)
    wide = torch.promote_types(dtype, torch.float32)
    term = value(p.score, x.score, tile.at, torch.zeros(1, 1, 1, 1, dtype=wide, device="cpu")).to(wide)
    return term if tile.seen is None else torch.where(tile.seen, term, -torch.inf)


def _fused(p: Attention, x: Operands, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, return_lse: bool = True, blind=True):
    """Output and LSE of q, k, v [batch, heads, .., dim]; `mask` is added to the scores. An LSE that nobody reads may be wrong in rows that see no key:
    `blind`, whether there may be some."""
    batch, heads, rows, dim = q.shape
    together = rows == 1 and (mask is None or mask.shape[1] == 1)  # the heads of a group are rows of one product
    q = _grouped(q, p) if together else q
    q, scale, _ = upright(q, x.scale, True) if causal and x.scale <= 0 else (q, x.scale, 1.0)
    if k.shape[2] < LEAST_KEYS:
        mask, k, v, causal = *padded(mask, q, k, v, causal), False
    alone = q.shape[2] == 1 and q.dtype == torch.bfloat16 and not causal and k.shape[2] * dim >= LONE
    q = q.expand(-1, -1, 2, -1) if alone else q
    q, k, v = (q, k, v) if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 else (even(q), even(k), even(v))
    out, lse = fused_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    out, lse = (out[:, :, :1], lse[:, :, :1]) if alone else (out, lse)
    if together:
        out, lse = out.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)
    if mask is not None and blind and (return_lse or x.sinks is not None or not torch.equal(lse, lse)):
        out, lse = cleared(mask, out, lse)
    return (out, lse) if x.sinks is None else _with_sinks(x, out, lse)


def _with_sinks(x: Operands, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE where a logit of each head joins the sum."""
    if x.sinks is None:
        return out, lse
    total = torch.logaddexp(lse, x.sinks.to(lse.dtype)[:, None])
    share = torch.sigmoid(lse - x.sinks.to(lse.dtype)[:, None]).masked_fill(total == -torch.inf, 0.0)  # exp(lse - total), without the rounding of total
    return (out * share[..., None]).to(out.dtype), total


def _fused_backward(p: Attention, x: Operands, part: Part, q, k, v, out, d_out, lse) -> tuple[Tensor, Tensor, Tensor]:
    """Its weights are exp(S - LSE), so an LSE that counts a sink is as good."""
    how = unmasked(p, part)
    few = in_float32(p, min(part.len_q, part.len_q if how else _fused_rows(p, part.len_k)))
    q, k, v = fitting(p, q, k, v, few)
    out, d_out = even(fit(out, p, few)), fit(d_out, p, few).contiguous()

    def narrowed(dq: Tensor, dk: Tensor, dv: Tensor):
        return narrow(dq, p.dim), narrow(dk, p.dim), narrow(dv, p.value_dim)

    if how:
        near = (take(k, 2, how[0]), take(v, 2, how[0]))
        q, scale, sign = upright(q, x.scale, how[1])
        dq, *found = fused_backward(d_out, q, *near, out, lse, 0.0, how[1], attn_mask=added_bias(p, x, part, q.dtype), scale=scale)
        found = (dq if sign == 1 else dq * sign, *found)
        pad = (0, 0, how[0].start, part.len_k - how[0].stop)
        return narrowed(*found) if not any(pad) else narrowed(found[0], *(torch.nn.functional.pad(d, pad) for d in found[1:]))
    grads = None
    for tile in _fused_tiles(p, x, part, q.dtype):
        near = (d_out[:, :, tile.rows], q[:, :, tile.rows], tile.of_keys(k), tile.of_keys(v), out[:, :, tile.rows], lse[:, :, tile.rows])
        found = fused_backward(*near, 0.0, False, attn_mask=_fused_mask(p, x, tile, q.dtype), scale=x.scale)
        of_all = isinstance(tile.keys, slice) and tile.keys == slice(0, part.len_k)
        if of_all and tile.rows == slice(0, part.len_q):
            return narrowed(*found)
        if grads is None and of_all:  # the others' are added to these
            grads = q.new_zeros(q.shape), *(d.to(_wide(d)) for d in found[1:])
        else:
            grads = grads or _zeros(q, k, v)
            add(grads[1], 2, tile.keys, found[1])
            add(grads[2], 2, tile.keys, found[2])
        grads[0][:, :, tile.rows] = found[0]
    return narrowed(*(grads or _zeros(q, k, v)))


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where dq, dk and dv are put together; of a key's, many tiles add up."""
    return tuple(torch.zeros(t.shape, dtype=q.dtype if t is q else _wide(t), device=t.device) for t in (q, k, v))
