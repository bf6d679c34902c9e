"""A program's share of the list of key tiles (`decode_tiles`), in Gluon."""

from onchip.kernels.attention.decode_tiles import items_of, sequence_of, share_length, share_of
from onchip.kernels.hopper import gl, gluon, prefetch


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def _all(x):
    return gl.sum(gl.sum(x, 1), 0)


@gluon.jit
def _work(lists, first, BAND: gl.constexpr, C: gl.constexpr):
    """Items of each of `C.listed` sequences from `first` on, all units together; whether there are such sequences; and the items of the longest unit."""
    lengths, offsets, batch, len_q, kv_heads, group = lists
    LIST: gl.constexpr = C.list
    b = first + gl.arange(0, C.listed, layout=gl.SliceLayout(0, LIST))[None, :]
    len_k, queries, _ = sequence_of(lengths, offsets, b, b < batch, len_q)
    items, tiles = items_of(len_k, queries, kv_heads, group, BAND, C.rows, C.tile, C.item)
    return gl.where(b < batch, items * tiles * kv_heads, 0), b < batch, gl.max(gl.max(gl.where((b < batch) & (tiles > 0), items, 0), 1), 0)


@gluon.jit
def _passed(work, there, item, seen):
    """How many sequences end before `item`, and their items; `seen` lie before these."""
    over = there & (seen + gl.associative_scan(work, 1, _plus) <= item)
    return _all(over.to(gl.int32)), _all(gl.where(over, work, 0))


@gluon.jit
def fetch(lengths, batch, table, WARPS: gl.constexpr):
    """The lengths, and this program's slice of the page table, to L2: all programs together bring most of it while each still prepares to read."""
    entries, row, columns = table
    line = 16 * gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))  # 64 bytes
    prefetch(lengths + gl.where(line < batch, line, 0))
    line += 16 * 128 * gl.program_id(0)
    prefetch(entries + gl.where(line < (batch - 1) * row + columns, line, 0))


@gluon.jit
def my_share(lists, BAND: gl.constexpr, C: gl.constexpr):
    """This program's items, [begin, stop), the items of each share, the sequence that the first is of, and the items before that sequence's. Loads wait
    for no other, of a batch that is looked at at once.

    lists: lengths, offsets of packed queries or None, sequences, queries, key heads, heads of a group.        C: `rows` and keys of a `tile`, keys
    of an `item`, `listed` sequences at a time, [1, listed] by threads as `list` says, in which no warp has sequences of its own; `once` if that is all.
    """
    program, programs, batch = gl.program_id(0), gl.num_programs(0), lists[2]
    if C.once:
        work, there, longest = _work(lists, 0, BAND, C)
        total = _all(work)
        each = share_length(total, longest, programs)
        begin = share_of(program, total, each)
        b, before = _passed(work, there, begin, 0)
    else:
        total, longest = batch * 0, batch * 0
        for first in range(0, batch, C.listed):
            work, _, unit = _work(lists, first, BAND, C)
            total += _all(work)
            longest = gl.maximum(longest, unit)
        each = share_length(total, longest, programs)
        begin = share_of(program, total, each)
        b, before, seen = batch * 0, batch * 0, batch * 0
        for first in range(0, batch, C.listed):
            work, there, _ = _work(lists, first, BAND, C)
            more, items = _passed(work, there, begin, seen)
            b += more
            before += items
            seen += _all(work)
    return begin, share_of(program + 1, total, each), each, b, before
