"""What the text of a mask says of whole blocks of queries and keys, by interval arithmetic: which see nothing, and which all there is.

What depends on the query alone, or on the key alone, is computed once for each of them, and of a block its least and greatest number are kept. Two of these
that are compared, as the documents of query and key, tell of a block that it is hidden, or seen, or neither; `&`, `|` and `~` go on from there. Whatever
else depends on both is unknown. 8,192 x 8,192 pairs are 8,192 blocks, which take 0.2 ms where the pairs take 150.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.trace import PLACE, Place, Traced, aten, stand_in, untouched

ROWS, KEYS = 128, 64  # the sides of a block: of as many rows as are looked at together for what they see
MOST = 1 << 18  # blocks at once, 8 bytes each: of 64k tokens half
ORDERED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # no floats: NaN is in no interval


class Along(NamedTuple):
    """A value that depends on the query ("i") or on the key ("j"), not on both; as torch computes it, [.., .., rows, 1] or [.., .., 1, keys]."""

    axis: str
    value: Tensor


class Ends(NamedTuple):
    """The least and the greatest value in each block, [.., .., row blocks, key blocks]; of a condition, whether all and whether any of the block meets it.

    Two Python bools: nothing is known.
    """

    least: Any
    most: Any

    @property
    def unknown(self) -> bool:
        return isinstance(self.least, bool)


UNKNOWN = Ends(False, True)
COMPARED = {
    "le": lambda a, b: Ends(a.most <= b.least, a.least <= b.most),
    "lt": lambda a, b: Ends(a.most < b.least, a.least < b.most),
    "ge": lambda a, b: Ends(a.least >= b.most, a.most >= b.least),
    "gt": lambda a, b: Ends(a.least > b.most, a.most > b.least),
    "eq": lambda a, b: Ends((a.least == b.most) & (a.most == b.least), (a.least <= b.most) & (a.most >= b.least)),
    "ne": lambda a, b: Ends((a.most < b.least) | (a.least > b.most), (a.least != b.most) | (a.most != b.least)),
}
JOINED = {
    "and": lambda a, b: Ends(a.least & b.least, a.most & b.most),
    "or": lambda a, b: Ends(a.least | b.least, a.most | b.most),
    "not": lambda a: UNKNOWN if a.unknown else Ends(~a.most, ~a.least),
}


# ---- blocks of tiles


def bounds(traced: Traced, tensors: tuple[Tensor, ...], at: Place, tiles: list[tuple[slice, range]]) -> Iterator[Ends]:
    """Of each tile, its queries and the keys of its hull, whether [row blocks, key blocks] are seen as a whole and in part.

    Blocks of rows begin with the tile, blocks of keys at multiples of KEYS. `at`: a place whose sequences and heads are asked for, without queries and keys.
    """
    first, last = min(keys.start for _, keys in tiles) // KEYS, max(keys.stop for _, keys in tiles)
    count, deepest = -(-last // KEYS) - first, max(-(-(rows.stop - rows.start) // ROWS) for rows, _ in tiles)
    places = lambda start, stop, side: torch.arange(start, -(-(stop - start) // side) * side + start, device=at.len_k.device).clamp_(max=stop - 1)  # noqa: E731
    least = min(keys.start for _, keys in tiles)
    j = places(first * KEYS, last, KEYS).clamp_(min=least).view(1, 1, 1, -1)
    step = max(1, MOST // (count * deepest))
    for n in range(0, len(tiles), step):
        some = tiles[n : n + step]
        i = torch.cat([places(rows.start, rows.stop, ROWS) for rows, _ in some]).view(1, 1, -1, 1)
        found = _run(traced, tensors, at._replace(i=i, j=j))
        whole = found.least.flatten(0, 1).all(0).expand(i.shape[2] // ROWS, count)
        part = found.most.flatten(0, 1).any(0).expand_as(whole)
        start = 0
        for rows, keys in some:
            stop = start - (rows.start - rows.stop) // ROWS
            near = slice(start, stop), slice(keys.start // KEYS - first, -(-keys.stop // KEYS) - first)
            yield Ends(whole[near], part[near])
            start = stop


@functools.lru_cache(maxsize=1024)
def tells(traced: Traced) -> bool:
    """Whether a mask's text says anything of blocks."""
    with untouched():
        numbers = {letter: stand_in((1, 1, ROWS if letter == "i" else 1, KEYS if letter == "j" else 1), torch.int64) for letter in PLACE}
        return not _run(traced, tuple(traced.stand_ins()), Place(**numbers)).unknown


# ---- a text on blocks


def _run(traced: Traced, tensors: tuple[Tensor, ...], at: Place) -> Ends:
    """The text's ends at `at`, whose queries and keys are whole blocks."""
    try:
        least, most = _ends(_compiled(traced.text)(None, *at._replace(i=Along("i", at.i), j=Along("j", at.j)), *tensors))
    except IndexError as error:
        raise traced.short(error) from error
    return UNKNOWN if isinstance(least, bool) else Ends(*(x[(None,) * (4 - x.ndim)] for x in (least, most)))


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> Callable:
    """The text with each operator left to `_apply`."""
    space = {"aten": aten, "torch": torch, "_apply": _apply}
    exec(compile(re.sub(r": '(\w+)' = aten\.(\w+)\.(\w+)\(", r" = _apply('\1', '\2', aten.\2.\3, ", text), "<onchip bounds>", "exec"), space)
    return space["run"]


def _apply(kind: str, name: str, operator: Callable, /, *args, **more) -> Along | Ends | Tensor:
    """An operator on values along one axis, as it is, or on the ends of what differs along both."""
    each = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    axes = {x.axis for x in each if isinstance(x, Along)}
    if len(axes) < 2 and not any(isinstance(x, Ends) for x in each):
        plain = lambda x: [plain(y) for y in x] if isinstance(x, list) else x.value if isinstance(x, Along) else x  # noqa: E731
        found = operator(*map(plain, args), **more)
        return Along(axes.pop(), found) if axes else found
    if name in ("eq", "ne") and all(isinstance(x, Along) for x in args):
        args = _in_order(*args)
    if name in COMPARED:
        ends = [_ends(x) for x in args]
        return UNKNOWN if any(x.unknown for x in ends) else COMPARED[name](*ends)
    word = name.removeprefix("bitwise_").removeprefix("logical_")
    if word in JOINED and kind == "bool":
        ends = [_ends(x) for x in args]
        return JOINED[word](*(x if x.unknown or x.least.dtype == torch.bool else UNKNOWN for x in ends))
    return UNKNOWN


def _in_order(a: Along, b: Along) -> tuple[Along, Along]:
    """Two values that are compared for equality alone, each named by where it comes first among the keys, unless keys have them in order: so a block in which
    one document ends and the next begins has no third between its ends, whatever their ids are."""
    keys, rows = sorted((a, b), key=lambda x: x.axis == "i")
    line = keys.value.flatten()
    if line.is_meta or not {keys.value.dtype, rows.value.dtype} <= {*ORDERED} or (line[1:] >= line[:-1]).all():
        return a, b
    names, at = torch.unique(torch.cat([line, rows.value.flatten()]), return_inverse=True)
    places = torch.arange(len(at), device=at.device)
    first = torch.full((len(names),), len(at), device=at.device).scatter_reduce_(0, at, places, "amin")[at]
    return Along("j", first[: len(line)].view_as(keys.value)), Along("i", first[len(line) :].view_as(rows.value))


def _ends(x: Any) -> Ends:
    if isinstance(x, Ends):
        return x
    if not isinstance(x, Along):
        return Ends(x, x)
    if x.value.dtype not in ORDERED:
        return UNKNOWN
    dim, side = (2, ROWS) if x.axis == "i" else (3, KEYS)
    blocks = x.value.unflatten(dim, (-1, side))
    return Ends(blocks.amin(dim + 1), blocks.amax(dim + 1))
