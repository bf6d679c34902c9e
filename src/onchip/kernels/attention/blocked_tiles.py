"""What `blocked.py` computes on: the sequences of a call, their tiles, and masks and scores cut to a tile.

A tile is some queries and the keys that any of them sees; what none of them sees is never touched.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import Band
from onchip.core.problem import Attention, Operands, spans
from onchip.core.trace import PLACE, Place, Traced, untouched
from onchip.kernels.attention.blocked_bounds import KEYS, ROWS, Ends, bounds, tells

BLOCK = 128  # queries that are looked at together to see whether a mask is sparse
PLACES = 1 << 18  # that a function is computed at in one go: 2 MiB a number
FEW = 16  # queries of a sequence whose keys may be put beside those of others
BESIDE = 4096  # keys that are put side by side, padding included: what a core's cache holds of them
PADDED = 1.25  # and how many they may be for each that is somebody's
FEW_PAIRS = 1 << 21  # up to which blocks are not asked for: of 1,024 to 1,400 tokens that takes 0.3 to 1 ms, as much as it mostly saves
CALL = 10  # blocks that what a mask shows is as soon computed of as it is asked: 150 us for documents under a causal mask, and 12 to 25 a block
RUN = re.compile(rb"\x01(?:\x00{0,%d}\x01)*" % (CALL // 3))  # blocks of a row that are asked for together, with what lies between
SPARSE = 0.75  # a tile goes in blocks when they see less than this part of what it sees; the more calls cost about a tenth


class Part(NamedTuple):
    """Sequences of equal lengths that go together: a few of a dense batch, or one of a packed one.

    batch    their numbers.     rows, cols   tokens of a packed batch, None of a dense one.     origin   the number of the first key at hand.
    """

    batch: slice
    rows: slice | None
    cols: slice | None
    len_q: int
    len_k: int
    origin: int = 0

    def queries(self, t: Tensor) -> Tensor:
        """What is of these sequences in `t`, laid out as q is: [batch, heads, len_q, dim]."""
        return (t[self.batch] if self.rows is None else t[self.rows][None]).transpose(1, 2)

    def keys(self, t: Tensor) -> Tensor:
        """The same, of what is laid out as k is."""
        return (t[self.batch] if self.cols is None else t[self.cols][None]).transpose(1, 2)

    def lse(self, t: Tensor) -> Tensor:
        """The same, of what is laid out as LSE is: [batch, heads, len_q]."""
        return t[self.batch] if self.rows is None else t[None, :, self.rows]


class Tile(NamedTuple):
    """Some queries, and the keys that any of them sees.

    keys     where they lie: a slice, or their numbers when there are gaps.        at   the place of each.
    seen     bool [.., .., rows, keys], which broadcasts over batch and heads; None: every row sees every key.
    shown    bool [.., .., keys, 1], which broadcasts over batch and kv_heads: False where no row of this sequence and head sees
             a key that others see; None: there is no such key.
    added    what torch's kernel adds to the scores instead of `seen`, where that is known without `at`, which is None then.
    """

    rows: slice
    keys: slice | Tensor
    at: Place | None
    seen: Tensor | None = None
    shown: Tensor | None = None
    added: Tensor | None = None

    def of_keys(self, t: Tensor) -> Tensor:
        """The tile's keys of `t` [batch, kv_heads, keys, dim]. What no row sees may hold anything, so it becomes 0."""
        t = take(t, 2, self.keys)
        return t if self.shown is None else torch.where(self.shown, t, 0.0)

    def columns(self, cols: slice) -> "Tile | None":
        """A part of the tile's keys; None when no row sees one."""
        keys = slice(self.keys.start + cols.start, self.keys.start + cols.stop) if isinstance(self.keys, slice) else self.keys[cols]
        seen = None if self.seen is None else self.seen[..., cols]
        if seen is not None and not any_of(seen):
            return None
        return Tile(self.rows, keys, self.at._replace(j=self.at.j[..., cols]), None if seen is None or all_of(seen) else seen)


class Group(NamedTuple):
    """Paged sequences of about equally many keys, which go together; the rows of keys are filled up with the last one, which is hidden there.

    members, numbers   the sequences, as ints and as int64 [n].     rows   int64 [n x len_q]: their queries, in all queries end to end.
    columns, offsets   int64 [n, keys]: where in its row of the page table, and in the page, each key lies.
    mask     what torch's kernel adds to the scores, [n, 1, len_q, keys]; None: every query sees every key.
    in_order   `rows` counts from 0.        blind   whether a query sees no key.        known   the last page table that slots were asked for, and these.
    """

    members: tuple[int, ...]
    numbers: Tensor
    rows: Tensor
    columns: Tensor
    offsets: Tensor
    mask: Tensor | None
    in_order: bool
    blind: bool
    known: list[tuple[Tensor, tuple[Tensor, range]]]

    def slots(self, page_table: Tensor, page: int) -> tuple[Tensor, range]:
        """Where in the pool each key lies, int64 [n x keys], and the pages from the least to the greatest. The layers of a model ask the same."""
        for table, found in self.known:
            if torch.equal(table, page_table):
                return found
        pages = page_table.index_select(0, self.numbers).gather(1, self.columns)
        least, greatest = torch.stack(pages.aminmax()).tolist()
        found = torch.add(self.offsets, pages, alpha=page).flatten(), range(least, greatest + 1)
        self.known[:] = [(page_table.clone(), found)]
        return found


# ---- from a call to its tiles


@functools.lru_cache(maxsize=4)  # the layers of a model ask the same, but for windows
def groups(
    band: Band, page: int, dtype: torch.dtype, spare: int, starts: tuple[int, ...], counts: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Group, ...]:
    """The sequences that go together, at least two in each group, which have `counts` queries from `starts` on and `lengths` keys; the others go alone.

    `spare`: the keys that may be padding in any group, as they cost no more than one group more.
    """
    waiting = []  # (queries, keys, the first of them, the first query's place, the sequence)
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        row = band.shift(count, length)
        if 0 < count <= FEW and (seen := band.keys(row, row + count - 1, length)):
            waiting.append((count, len(seen), seen.start, row, b))
    waiting.sort()
    found, first, used = [], 0, 0
    for i, (count, keys, *_) in enumerate(waiting):
        padded, real = (i + 1 - first) * keys, used + keys
        if count != waiting[first][0] or padded > min(BESIDE, max(PADDED * real, real + spare)):
            found.append(waiting[first:i])
            first, used = i, 0
        used += keys
    found.append(waiting[first:])
    with untouched():
        return tuple(_group(band, page, dtype, starts, some) for some in found if len(some) > 1)


def _group(band: Band, page: int, dtype: torch.dtype, starts: tuple[int, ...], some: list[tuple[int, ...]]) -> Group:
    count, longest = some[-1][:2]
    some = sorted(some, key=lambda one: one[-1])
    keys, first, row, numbers = (torch.tensor(column, device="cpu")[:, None] for column in list(zip(*some, strict=True))[1:])
    place = torch.arange(longest, device="cpu")
    at = first + torch.minimum(place, keys - 1)
    beside = first[..., None] + place - row[..., None] - torch.arange(count, device="cpu")[:, None]  # [n, len_q, keys]: of a key beside a query
    seen = (place < keys)[:, None].expand(beside.shape)
    seen = seen if band.left is None else seen & (beside >= -band.left)
    seen = seen if band.right is None else seen & (beside <= band.right)
    wide = dtype if dtype != torch.float16 else torch.float32
    mask = None if seen.all() else torch.zeros(seen.shape, dtype=wide, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]
    rows = torch.tensor([starts[b] for *_, b in some], device="cpu")[:, None] + torch.arange(count, device="cpu")
    rows = rows.flatten()
    in_order = torch.equal(rows, torch.arange(len(rows), device="cpu"))
    return Group(tuple(b for *_, b in some), numbers[:, 0], rows, at // page, at % page, mask, in_order, not bool(seen.any(-1).all()), [])


def parts(p: Attention, x: Operands, q: Tensor, k: Tensor, most: int) -> list[Part]:
    """The sequences, `most` of a dense batch at once; one by one where a mask or score tells them apart, for then each has keys of its own."""
    if x.q_offsets is not None:
        lengths = zip(spans(x.q_offsets, x.q_used, len(q)), spans(x.k_offsets, x.k_used, len(k), shared=p.op != "backward"), strict=True)
        return [Part(slice(b, b + 1), rows, cols, rows.stop - rows.start, cols.stop - cols.start) for b, (rows, cols) in enumerate(lengths)]
    batch, len_q, len_k = *q.shape[:2], k.shape[1]
    step = 1 if "batch_invariant" in p.extras or differs(p, "b") else max(1, most)
    return [Part(slice(b, min(b + step, batch)), None, None, len_q, len_k) for b in range(0, batch, step)]


def tiles(p: Attention, x: Operands, part: Part, most: int, device: torch.device) -> Iterator[Tile]:
    """Tiles of at most so many queries, without those that see no key."""
    band = hull(p)
    shift = band.shift(part.len_q, part.len_k)
    count = lambda first, last, *shape: torch.arange(first, last, device=device).view(shape)  # noqa: E731
    lengths = (torch.full((1, 1, 1, 1), n, device=device) for n in (part.len_q, part.len_k))
    whole = Place(count(part.batch.start, part.batch.stop, -1, 1, 1, 1), count(0, p.heads, 1, -1, 1, 1), None, None, *lengths)
    starts = ((start, min(start + most, part.len_q)) for start in range(0, part.len_q, most))
    found = [(slice(start, stop), keys) for start, stop in starts if (keys := band.keys(start + shift, stop + shift - 1, part.len_k))]
    for (rows, keys), ends in zip(found, _ends(p, x, whole, found), strict=False):
        at = whole._replace(i=count(rows.start, rows.stop, 1, 1, -1, 1), j=count(keys.start, keys.stop, 1, 1, 1, -1))
        tile = Tile(rows, slice(keys.start - part.origin, keys.stop - part.origin), at)
        if ends is not None:
            yield from _bounded(p, x, tile, ends)
        elif isinstance(p.mask, Traced):
            yield from _narrowed(p, tile, value(p.mask, x.mask, at))
        else:  # any key of the range is seen by some row
            first, last = rows.start + shift, rows.stop + shift - 1
            inside = (band.right is None or keys.stop - 1 <= first + band.right) and (band.left is None or keys.start >= last - band.left)
            yield tile if inside else tile._replace(seen=band.seen(at))


def _ends(p: Attention, x: Operands, at: Place, found: list[tuple[slice, range]]) -> Iterable[Ends | None]:
    """What the mask says of blocks of each tile; None: nothing, or it is read at each place, or pairs are so few that they are soon computed."""
    pairs = [(rows.stop - rows.start) * len(keys) for rows, keys in found]
    if sum(pairs) <= FEW_PAIRS or max(pairs) <= PLACES or not isinstance(p.mask, Traced) or is_lookup(p.mask) or blocks_of(p.mask) or not tells(p.mask):
        return repeat(None)
    return bounds(p.mask, x.mask, at, found)


def _bounded(p: Attention, x: Operands, tile: Tile, ends: Ends) -> Iterator[Tile]:
    """`_narrowed`, of a tile of which is known what blocks see: what the mask shows is computed where that is not all or nothing."""
    near = any_of(ends.most, 0).nonzero()[:, 0]
    if not len(near):
        return
    near = slice(int(near[0]), int(near[-1]) + 1)
    first, stop = int(tile.at.j[..., 0]), int(tile.at.j[..., -1]) + 1
    origin = (first // KEYS + near.start) * KEYS  # of the first block
    keys = slice(max(first, origin), min(stop, origin + (near.stop - near.start) * KEYS))
    cut = slice(keys.start - first, keys.stop - first)
    tile = tile._replace(keys=slice(tile.keys.start + cut.start, tile.keys.start + cut.stop), at=tile.at._replace(j=tile.at.j[..., cut]))
    whole = ends.least[:, near]
    if all_of(whole):
        yield tile
        return
    asked, count = rectangles((ends.most[:, near] & ~whole).tolist()), tile.rows.stop - tile.rows.start
    found = []  # (rows, keys, what these rows see of them)
    for rows, blocks in asked:
        rows = slice(rows.start * ROWS, min(rows.stop * ROWS, count))
        cols = slice(max(0, origin + blocks.start * KEYS - keys.start), min(origin + blocks.stop * KEYS, keys.stop) - keys.start)
        found.append((rows, cols, value(p.mask, x.mask, tile.at._replace(i=tile.at.i[:, :, rows], j=tile.at.j[..., cols]))))
    if asked == [(slice(0, len(whole)), slice(0, whole.shape[1]))]:
        seen = found[0][2]
    else:
        seen = spread(whole[None, None], (slice(0, count), keys), (ROWS, KEYS)).repeat(*(found[0][2].shape[:2] if found else (1, 1)), 1, 1)
        for rows, cols, more in found:
            seen[:, :, rows, cols] = more
    yield from _narrowed(p, tile, seen)


def rectangles(asked: list[list[bool]]) -> list[tuple[slice, slice]]:
    """(row blocks, key blocks) in which all blocks lie that are asked for: of all rows together, or one row of blocks after another, whichever costs less."""
    found = []
    for some in ([[any(column) for column in zip(*asked, strict=True)]], asked):
        tall = len(asked) // len(some)
        found.append([(slice(n * tall, (n + 1) * tall), slice(*run.span())) for n, line in enumerate(some) for run in RUN.finditer(bytes(line))])
    return min(found, key=lambda each: sum(CALL + (rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in each))


def _narrowed(p: Attention, tile: Tile, seen: Tensor) -> Iterator[Tile]:
    """The tile without the keys that none of its rows sees; in blocks of rows where these see less than the whole does."""
    by_block, by_key = seen_by_blocks(seen)
    found = any_of(by_key, 0).nonzero()[:, 0]
    if not len(found):
        return
    if len(by_key) > 1 and by_key.sum() < SPARSE * len(by_key) * len(found):
        for start in range(0, seen.shape[2], BLOCK):
            rows = slice(tile.rows.start + start, min(tile.rows.start + start + BLOCK, tile.rows.stop))
            near = slice(start, start + BLOCK)
            yield from _narrowed(p, tile._replace(rows=rows, at=tile.at._replace(i=tile.at.i[:, :, near])), seen[:, :, near])
        return
    low, high = int(found[0]), int(found[-1]) + 1
    gaps = high - low > len(found)
    near = found if gaps else slice(low, high)
    keys = found + tile.keys.start if gaps else slice(tile.keys.start + low, tile.keys.start + high)
    tile = tile._replace(keys=keys, at=tile.at._replace(j=tile.at.j[..., near]))
    seen, by_head = take(seen, 3, near), take(any_of(by_block, 2), 2, near)
    if all_of(seen):
        yield tile
        return
    if by_head.shape[1] > 1:
        by_head = any_of(by_head.unflatten(1, (p.kv_heads, p.group)), 2)
    yield tile._replace(seen=seen, shown=None if all_of(by_head) else by_head[..., None])


def merged(found: Iterator[Tile]) -> Iterator[Tile]:
    """Tiles one after another whose rows see all of the same keys are one, without places: it needs no mask, and keys are packed anew in each call."""
    last = None
    for tile in found:
        alike = last is not None and last.seen is tile.seen is None and isinstance(last.keys, slice) and last.keys == tile.keys
        if alike and last.rows.stop == tile.rows.start:
            last = Tile(slice(last.rows.start, tile.rows.stop), last.keys, None)
            continue
        if last is not None:
            yield last
        last = tile
    if last is not None:
        yield last


def seen_by_blocks(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that some row of each block of rows sees, [batch, heads, blocks, keys], and those that one of any sequence and head does, [blocks, keys]."""
    by_block = torch.stack([any_of(block, 2) for block in seen.split(BLOCK, 2)], 2)
    return by_block, any_of(by_block.flatten(0, 1), 0)


def hull(p: Attention) -> Band:
    """The band around the mask."""
    return p.mask.hull if isinstance(p.mask, Traced) else p.mask


def any_of(seen: Tensor, dim: int | tuple[int, ...] = ()) -> Tensor:
    """`seen.any(dim)` of what is not empty: of bytes it takes 5 us where of booleans it takes 110 (256 x 1,024)."""
    return seen.view(torch.uint8).amax(dim).view(torch.bool)


def all_of(seen: Tensor) -> Tensor:
    return seen.view(torch.uint8).amin().view(torch.bool)


def take(t: Tensor, dim: int, keys: slice | Tensor) -> Tensor:
    if not isinstance(keys, slice):
        return t.index_select(dim, keys)
    return t if keys.stop - keys.start == t.shape[dim] else t.narrow(dim, keys.start, keys.stop - keys.start)


def add(t: Tensor, dim: int, keys: slice | Tensor, more: Tensor) -> None:
    """`take`'s part of `t` grows by `more`."""
    if isinstance(keys, slice):
        t.narrow(dim, keys.start, keys.stop - keys.start).add_(more)
    else:
        t.index_add_(dim, keys, more.to(t.dtype))


# ---- masks and scores on a tile


def value(traced: Traced, tensors: tuple[Tensor, ...], at: Place, *s: Tensor) -> Tensor:
    """A mask's or score's value [.., .., rows, keys] at `at`, some keys at a time: what comes between takes 8 bytes a place. A tensor's own is a view. What
    is the same in whole blocks is computed once a block."""
    rows, keys = at.i.shape[2], at.j.shape[3]
    near = _range(at.i), _range(at.j)
    if not s and all(isinstance(n, slice) for n in near) and (sides := blocks_of(traced)):
        return _of_blocks(traced, tensors, at, near, sides)
    step = keys if is_lookup(traced) else max(1, PLACES // rows)
    whole = None
    for start in range(0, keys, step):
        near = at._replace(j=at.j[..., start : start + step])
        found = run(traced, reads(traced, tensors, near), near, *s)
        found = found.expand(*found.shape[:2], rows, near.j.shape[3])
        if keys <= step:
            return found
        whole = found.new_empty(*found.shape[:3], keys) if whole is None else whole
        whole[..., start : start + step] = found
    return whole


def _of_blocks(traced: Traced, tensors: tuple[Tensor, ...], at: Place, near: tuple[slice, slice], sides: tuple[int, int]) -> Tensor:
    """The value of each block that queries and keys `near` are in, spread over them."""
    firsts = [torch.arange(n.start // side, (n.stop - 1) // side + 1, device=at.i.device) * side for n, side in zip(near, sides, strict=True)]
    place = at._replace(i=firsts[0].view(1, 1, -1, 1), j=firsts[1].view(1, 1, 1, -1))
    found = run(traced, reads(traced, tensors, place), place)
    return spread(found.expand(*found.shape[:2], *map(len, firsts)), near, sides)


def spread(found: Tensor, near: tuple[slice, slice], sides: tuple[int, int]) -> Tensor:
    """What is said of blocks, [.., .., row blocks, key blocks], for each of the queries and keys `near`; keys first, so that rows are copied whole."""
    for dim, n, side in zip((3, 2), reversed(near), reversed(sides), strict=True):
        each = found.unsqueeze(dim + 1).expand(*found.shape[: dim + 1], side, *found.shape[dim + 1 :]).flatten(dim, dim + 1)
        found = each.narrow(dim, n.start % side, n.stop - n.start)
    return found


@functools.lru_cache(maxsize=1024)
def blocks_of(traced: Traced) -> tuple[int, int] | None:
    """The sides of blocks of queries and keys in which a mask or score is the same, as it asks for `i // side` and `j // side` alone; None: there are none."""
    body, sides = traced.text.partition("):\n")[2], []
    for letter in "ij":
        divided = re.findall(rf"\bfloor_divide\.default\({letter}, (\d+)\)", body)
        if len({*divided}) != 1 or len(divided) != len(re.findall(rf"\b{letter}\b", body)):
            return None
        sides.append(int(divided[0]))
    return tuple(sides)


LOOKUP = re.compile(r"def run\(.*c0: 'bool\[\d\]'\):\s+v0: 'bool' = aten\.index\.Tensor\(c0, .*\)\s+return v0\s*")


@functools.lru_cache(maxsize=1024)
def is_lookup(traced: Traced) -> bool:
    """Whether a mask is what one bool tensor holds at the place itself."""
    return LOOKUP.fullmatch(traced.text) is not None and 0 in cutting(traced)[1]


def run(traced: Traced, tensors: list[Tensor], at: Place, s: Tensor | None = None) -> Tensor:
    """A mask's or score's value at `at`, of four dimensions; `tensors` as `reads` gives them."""
    try:
        found = cutting(traced)[0](s, *at, *tensors)
    except IndexError as error:
        raise traced.short(error) from error
    return found[(None,) * (4 - found.ndim)]


def reads(traced: Traced, tensors: tuple[Tensor, ...], at: Place) -> list[Tensor]:
    """What the function reads at `at`: of a tensor read at the place itself, [.., i, j], only what lies there; others whole."""
    letters = cutting(traced)[1]
    return [_cut(traced, t, letters[n], at) if n in letters else t for n, t in enumerate(tensors)]


def _cut(traced: Traced, t: Tensor, letters: tuple[str, ...], at: Place) -> Tensor:
    """The part of `t`, a dimension a letter, that lies at `at`, as [batch, heads, rows, keys]; a view where the numbers have no gap."""
    places = [_range(getattr(at, letter)) for letter in letters]
    _check_long(traced, t, letters, places)
    for dim, near in enumerate(places):
        t = take(t, dim, near)
    return t[tuple(slice(None) if letter in letters else None for letter in PLACE[:4])]


def _check_long(traced: Traced, t: Tensor, letters: tuple[str, ...], places: list[slice | Tensor]) -> None:
    """Raises where a tensor that is read at the place itself, a dimension a letter, ends before it."""
    for size, letter, near in zip(t.shape, letters, places, strict=True):
        last = near.stop - 1 if isinstance(near, slice) else int(near[-1])
        if last >= size:
            raise traced.short(f"{list(t.shape)} is read at {letter} = {last}")


def add_read(t: Tensor, letters: tuple[str, ...] | None, at: Place, more: Tensor) -> None:
    """What `reads` takes of `t` grows by `more`."""
    if letters is None:
        t += more
        return
    for dim, letter in enumerate(letters[:-1]):  # only keys have gaps, and they come last
        t = take(t, dim, _range(getattr(at, letter)))
    add(t, len(letters) - 1, _range(getattr(at, letters[-1])), more[tuple(slice(None) if letter in letters else 0 for letter in PLACE[:4])])


_found: list[tuple[bool, bool]] = []  # the setting as each who is inside `one_order`, in any thread, found it: the first found the user's
_ordering = threading.Lock()


@contextmanager
def one_order() -> Iterator[None]:
    """torch adds up the gradient of a look-up in any order, unless told not to, and slower: 4M places of 20 numbers take two threads 121 and 54 ms.

    It is told for all threads at once, so who leaves puts back what the last to come found, and the last to leave what the first found.
    """
    with _ordering:
        _found.append((torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()))
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        with _ordering:
            before, warns = _found.pop()
            torch.use_deterministic_algorithms(before, warn_only=warns)


def _range(numbers: Tensor) -> slice | Tensor:
    numbers = numbers.flatten()
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last + 1 - first == len(numbers) else numbers


BOTH = re.compile(r"(?<='bool' = )(aten\.bitwise_(?:and|or)\.Tensor\(v\d+), (v\d+)\)")  # of bools


@functools.lru_cache(maxsize=1024)
def cutting(traced: Traced) -> tuple[Callable, dict[int, tuple[str, ...]]]:
    """(the function, {n: the letters that tensor n is read at}) where a read at the place itself is left to `reads`.

    A view costs nothing, the look-up of 1M numbers 3 ms, and its gradient a tensor of the whole's size in each tile. And, of 4M places, 7.3 ms where bools
    are put together, one of them the same for a row; as bytes they take 0.2.
    """
    text, letters = BOTH.sub(r"\1.view(torch.uint8), \2.view(torch.uint8)).view(torch.bool)", traced.text), {}
    for read, name, inside in re.findall(r"(aten\.index\.Tensor\((c\d+), \[([bhij, ]+)\]\))", text):
        at = tuple(inside.split(", "))
        if len(re.findall(rf"\b{name}\b", text)) == 2 and list(at) == sorted(set(at)):  # once in the head of the text, once here
            text = text.replace(read, name)
            letters[int(name[1:])] = at
    return Traced(traced.name, _once(text)).run, letters


def _once(text: str) -> str:
    """The text without lines that say what one before says: a small call of an operator takes 5 to 10 us, and `Document & Causal` has 4 such in 16."""
    lines, said, same = [], {}, {}
    for line in text.splitlines():
        line = re.sub(r"\bv\d+\b", lambda name: same.get(name[0], name[0]), line)
        name, _, what = line.strip().partition(": ")
        if what and (first := said.setdefault(what, name)) != name:
            same[name] = first
        else:
            lines.append(line)
    return "\n".join(lines)


@functools.lru_cache(maxsize=1024)
def differs(p: Attention, letter: str) -> bool:
    """Whether the mask or the score differs along a dimension of the Place."""
    texts = [part.text.partition("\n")[2] for part in (p.mask, p.score) if isinstance(part, Traced)]
    return any(re.search(rf"\b{letter}\b", text) for text in texts)


BIAS = re.compile(r"def run\(.*c0: '(\w+)\[\d\]'\):\s+v0: '\w+' = aten\.index\.Tensor\(c0, .*\)\s+v1: '\w+' = aten\.add\.Tensor\(s, v0\)\s+return v1\s*")


@functools.lru_cache(maxsize=1024)
def bias_dtype(score: Traced) -> torch.dtype | None:
    """Of the tensor, when a score is `s` and what one tensor holds at the place itself, each key's own; else None."""
    found = BIAS.fullmatch(score.text)
    return getattr(torch, found[1]) if found and "j" in cutting(score)[1].get(0, ()) else None


def bias(p: Attention, x: Operands, part: Part) -> Tensor:
    """All of it that a part reads, as [batch, heads, rows, keys]; a view."""
    return lookup(p.score, x.score, p, part)


def lookup(traced: Traced, tensors: tuple[Tensor, ...], p: Attention, part: Part) -> Tensor:
    """What a part reads of the one tensor of a mask or score, at the place itself, as [batch, heads, rows, keys]; a view."""
    letters, near = cutting(traced)[1][0], {"b": part.batch, "h": slice(0, p.heads), "i": slice(0, part.len_q), "j": slice(0, part.len_k)}
    (t,) = tensors
    _check_long(traced, t, letters, [near[letter] for letter in letters])
    for dim, (letter, places) in enumerate(near.items()):
        t = take(t, dim, places) if letter in letters else t.unsqueeze(dim)
    return t


@functools.lru_cache(maxsize=1024)
def is_sum(score: Traced) -> bool:
    """Whether a score is `s` and terms that do not depend on it."""
    now, gone = "s", set()
    *lines, last = score.text.splitlines()[1:]
    for line in lines:
        name, _, expression = line.strip().partition(": ")
        words = re.findall(r"\w+", expression)
        if gone & set(words) or words.count(now) > 1:
            return False
        if now in words:
            if not re.search(rf"= aten\.(add\.\w+\(({now}, |\w+, {now}\))|sub\.\w+\({now}, )", expression):
                return False
            gone.add(now)
            now = name
    return last.strip() == f"return {now}"
