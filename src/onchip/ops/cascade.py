"""Cascade attention: keys that several sequences of a batch share are read once for all of them.

The queries of all readers of a prefix are the rows of one matrix product over its keys, which is as exact as one product a sequence
and moves the keys once (Hydragen, Juravsky et al., 2024; ChunkAttention, Ye et al., 2024; levels after FlashInfer's cascade, Ye et
al., 2025). Each sequence's own keys follow, and partial results are merged by their LSE.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core import device as devices
from onchip.core.arguments import kind_of
from onchip.core.masks import Causal, Full
from onchip.core.parts import is_whole
from onchip.core.problem import Beside, Operands
from onchip.core.scores import chain
from onchip.core.trace import readable
from onchip.dispatch import left_to_others
from onchip.ops.attend import How
from onchip.ops.attention import PagedKV, merge, paged, paged_attention
from onchip.ops.checks import scale_of

FEW = 16  # rows up to which one kernel reads shared keys and a sequence's own


class Level(NamedTuple):
    """Shared keys at one depth of a prefix tree, and who reads them. The same for all layers; see `plan_cascade`.

    page_table   int32 [parts * nodes, most pages]: the pages of each node; entries past its length are not read.
    lengths      int32 [parts * nodes]: keys of each node, 0 for one that stands for rows without a prefix at this depth.
    offsets      int32 [parts * nodes + 1]: node `i` is read by the rows `offsets[i]` to `offsets[i + 1]` of the batch; None: one node, read by all.
    longest      the most rows that read one node; an upper bound will do.
    parts        Long nodes are cut into so many, that few of them keep a whole GPU busy. The batch goes by once for each part: `offsets` counts on
                 from `p * batch` for part `p`.
    sms          multiprocessors that read the last level, if one node of it is read by all, of more than 16 rows, while the others read what is each
                 row's own; 0: one after the other. A kernel need not look at it.
    """

    page_table: Tensor
    lengths: Tensor
    offsets: Tensor | None
    longest: int
    parts: int = 1
    sms: int = 0


def cascade_attention(
    q: Tensor,  # [batch, len_q, heads, dim]
    cache: PagedKV,
    levels: Sequence[Level],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention(q, ...)`, causal, of sequences whose keys are those of their node of each level, in order, and then those of `cache`.

    cache    the pool, and the pages and lengths of what is each sequence's own: the current queries included, or nothing at all (length 0).
    levels   shared keys, all before the current queries, so that every reader sees all of them; without any this is `paged_attention`.
             Rows of the batch stand as the levels want them, the readers of a node side by side.

    What depends on places, windows and ALiBi among it, is for `paged_attention`: a node does not know where in a sequence it stands. Nothing
    is read on the host, so a CUDA graph may capture the call, and what the levels hold may then change. (Not of a quantised cache with more than
    16 rows at a node, unless there is one scale a head, of 64, 128 or 256 columns, and no softcap: plain torch reads it, and waits for the device.)
    Returns as `attention` does.
    Raises ValueError where a level and the batch do not go together.
    """
    if not isinstance(q, Tensor) or q.ndim != 4 or not isinstance(cache, PagedKV):
        raise ValueError(f"cascade_attention: q is {kind_of(q)}, cache {kind_of(cache)}; give q [batch, len_q, heads, dim] and PagedKV(...)")
    if not levels or not q.numel():
        return paged_attention(q, cache, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, kernel=kernel)
    how, scale = How(Full(), chain(None, None, softcap), None, None, False, False, kernel), scale_of(scale, q)
    states, first, second = [], None, None
    for n, level in enumerate(levels):
        _check(n, level, q)
        if n == len(levels) - 1:
            first, second = _beside(level, q, cache)
        states += _shared(level, q, cache, how, Operands(scale, beside=first))
    states.append(paged(q, cache, how._replace(mask=Causal(), sinks=sinks), Operands(scale, beside=second), None, True))
    merged = merge(states)
    return merged if return_lse else merged[0]


def _beside(level: Level, q: Tensor, cache: PagedKV) -> tuple[Beside | None, Beside | None]:
    """How the last level and what is each row's own share a GPU, if they do: then nothing else is launched between the two, and nothing that the first
    reads is let go, since the second may write there."""
    if not (level.sms and q.is_cuda) or level.offsets is not None or left_to_others():
        return None, None
    if q.shape[0] * q.shape[1] <= FEW:  # both by one kernel, which counts arrivals that they would share
        return None, None
    parts = q, level.lengths, cache.lengths, level.page_table, cache.page_table
    if not all(t.is_contiguous() for t in parts[1:]) or q.flatten(0, 1).data_ptr() != q.data_ptr():
        return None, None
    return Beside(level.sms, False), Beside(devices.of(q.device).sms - level.sms, True)


def _shared(level: Level, q: Tensor, cache: PagedKV, how: How, x: Operands) -> list[tuple[Tensor, Tensor]]:
    """The partial results of a level, one a part, each like that of the whole batch."""
    batch, len_q, heads, dim = q.shape
    nodes = PagedKV(cache.k, cache.v, level.page_table, level.lengths)
    rows = q.reshape(batch * len_q, heads, dim)
    if level.offsets is None:
        out, lse = paged(rows[None].expand(level.parts, -1, -1, -1), nodes, how, x, None, True)  # [parts, rows, heads, dim], [parts, heads, rows]
    else:
        offsets = level.offsets if len_q == 1 else level.offsets * len_q
        rows = rows if level.parts == 1 else rows.repeat(level.parts, 1, 1)
        out, lse = paged(rows, nodes, how, x._replace(q_offsets=offsets), level.longest * len_q, True)
        lse = lse.unflatten(1, (level.parts, -1)).transpose(0, 1)
    out = out.reshape(level.parts, batch, len_q, heads, -1)
    lse = lse.unflatten(2, (batch, len_q)).transpose(1, 2)  # [parts, batch, heads, len_q]
    return list(zip(out, lse, strict=True))


def _check(n: int, level: Level, q: Tensor) -> None:
    """Whether a level fits the batch, as far as it can be told without waiting for the device."""
    if not isinstance(level, Level):
        raise TypeError(f"cascade_attention: level {n} is a {type(level).__name__}; give a list of Level, as plan_cascade(...).levels(device) makes it")
    table, lengths, offsets, longest, parts, _ = level
    if not is_whole(parts) or (offsets is not None and not is_whole(longest)):
        given = f"parts {parts!r:.40} and longest {longest!r:.40}"
        raise TypeError(f"cascade_attention: level {n} has {given}; give whole numbers, 1 part or more and the most rows that read one node")
    if not all(isinstance(t, Tensor) for t in (table, lengths, table if offsets is None else offsets)):
        raise TypeError(f"cascade_attention: level {n} has a page_table, lengths or offsets that are no tensor; give int32 tensors on {q.device}")
    if not (table.dtype == lengths.dtype == torch.int32 and table.ndim == 2 and lengths.shape == table.shape[:1] and parts >= 1):
        given = f"page_table {table.dtype} {list(table.shape)}, lengths {lengths.dtype} {list(lengths.shape)}, {parts} parts"
        raise ValueError(f"cascade_attention: level {n} has {given}; give int32 [parts * nodes, most pages] and int32 [parts * nodes], with 1 part or more")
    if offsets is None and table.shape[0] != parts:
        raise ValueError(
            f"cascade_attention: level {n} has {table.shape[0]} nodes in {parts} parts and no offsets; give offsets, or one node that all rows read"
        )
    if offsets is not None and (offsets.dtype != torch.int32 or offsets.shape != (table.shape[0] + 1,) or table.shape[0] % parts):
        given = f"{offsets.dtype} {list(offsets.shape)} for {table.shape[0]} nodes in {parts} parts"
        raise ValueError(f"cascade_attention: the offsets of level {n} are {given}; give int32 [parts * nodes + 1]")
    if offsets is not None and readable(offsets):
        first, *_, last = offsets.tolist()
        if (first, last) != (0, parts * q.shape[0]):
            raise ValueError(f"cascade_attention: the offsets of level {n} go from {first} to {last}; give 0 to {parts * q.shape[0]}: each row reads one node")
    if offsets is not None and not 1 <= longest <= q.shape[0]:
        raise ValueError(f"cascade_attention: longest of level {n} is {longest} for a batch of {q.shape[0]}; give the most rows that read one node")


__all__ = ["Level", "cascade_attention"]
