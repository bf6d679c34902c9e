"""What a batch's sequences share, and whether reading it once pays: from page lists to the levels of `ops/cascade.py`.

Two sequences share what is on the same pages, as `PagePool.fork` and `RadixTree.match` leave them. The shared beginnings of a batch
make a tree of runs of pages; a plan cuts each path through it into at most `most` runs that are read once for all their readers,
and the sequence's own rest. Which cuts are best is searched for by the time that the model below gives, over all of them.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core import device as devices
from onchip.core.arguments import check_count
from onchip.core.device import Device
from onchip.core.parts import is_whole
from onchip.core.problem import Attention, Cost
from onchip.kernels.attention import PARTS, bytes_of_token
from onchip.ops.cascade import FEW, Level

TILE = 128  # rows of a tile of many queries over pages
PART = 512  # keys at least that a part of a node has
LEAST_WIDTH = 32  # pages of a table that stands for many
EVEN = 16  # pages that the width of any other is a multiple of: a kernel is compiled once for all of these
STEP = 16  # multiprocessors


class Rates(NamedTuple):
    """What a kind of device makes of its figures: seconds of one more level beside its keys, how often their bytes go by, and the share of the peak of
    matrix products that many queries reach."""

    launch: float
    reads: float
    reached: float


# 64 x (8k + 1k) on an H200, in a graph: the last merge 4.5 us, and what a launch over tiles takes at least.
GPU = Rates(11e-6, 1, 0.5)
EAGER = GPU._replace(launch=80e-6)  # of the host, where there is no graph: a launch over pages takes it 36 us, and then there is the merge
# One thread, time of the processor: a level takes 0.3 to 0.5 ms (8 rows of 16 + 64 keys); a key for one row four times its bytes at the rate of a copy (it
# is gathered, and its product is one row's: 0.2 us for 768 bytes, 2.2 for 4,096), for many rows a quarter of the peak.
CPU = Rates(0.5e-3, 4, 0.25)


class Run(NamedTuple):
    """Pages that some neighbouring rows of a plan share; none for rows without a prefix at this level."""

    rows: range
    pages: list[int]


class Plan(NamedTuple):
    """How a batch is read.

    order     the rows of the batch as the levels need them: row `i` of a call is sequence `order[i]`.
    shared    for each level its runs, which cover all rows in order; none where sharing does not pay.
    parts     for each level, into how many its runs are cut.        sms   that read the last level while the others read what is each row's own; 0: none.
    own       what each row, in order, has of its own: pages and keys.
    seconds   of one layer by the model, and with every sequence read for itself.
    """

    order: list[int]
    shared: list[list[Run]]
    parts: list[int]
    sms: int
    own: list[tuple[list[int], int]]
    page: int
    seconds: float
    apart: float

    @property
    def starts(self) -> list[int]:
        """The page at which what is its own begins, of each row, in order."""
        starts = [0] * len(self.order)
        for run in itertools.chain.from_iterable(self.shared):
            for i in run.rows:
                starts[i] += len(run.pages)
        return starts

    def levels(self, device: torch.device, rows: int = 0) -> list[Level]:
        """The shared levels as `cascade_attention` takes them.

        rows   of the batch, where graphs are to be few: those past the plan's own may read anything, and sizes are powers of two.
        """
        levels = [self._level(runs, parts, device, rows) for runs, parts in zip(self.shared, self.parts, strict=True)]
        return [*levels[:-1], *(level._replace(sms=self.sms) for level in levels[-1:])]

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`page_table` and `lengths` of what is each row's own."""
        return _table([pages for pages, _ in self.own], [keys for _, keys in self.own], device)

    def _level(self, runs: list[Run], parts: int, device: torch.device, rows: int) -> Level:
        runs, longest, width, batch = list(runs), max(len(run.rows) for run in runs), 0, rows or len(self.order)
        if rows:
            unused = range(len(self.order), rows)
            longest, width = min(rows, power(max(longest, len(unused)))), max(LEAST_WIDTH, power(math.ceil(max(len(run.pages) for run in runs) / parts)))
            if len(runs) > 1:
                runs.append(Run(unused, []))
                runs += [Run(range(rows, rows), [])] * (power(len(runs)) - len(runs))
        chunks = [math.ceil(len(run.pages) / parts) for run in runs]
        pages = [run.pages[p * size : (p + 1) * size] for p in range(parts) for run, size in zip(runs, chunks, strict=True)]
        width = width or EVEN * math.ceil(max(map(len, pages)) / EVEN)
        offsets = [p * batch + run.rows.start for p in range(parts) for run in runs] + [parts * batch]
        table, lengths = _table(pages, [len(some) * self.page for some in pages], device, width)
        return Level(table, lengths, torch.tensor(offsets, dtype=torch.int32).to(device) if len(runs) > 1 else None, longest, parts)


class _Fork(NamedTuple):
    """A node of the tree of shared pages: neighbouring rows that agree up to page `end`, and are equal where it has no children."""

    rows: range
    end: int
    children: list["_Fork"]


def plan_cascade(
    problem: Attention, pages: Sequence[Sequence[int]], lengths: Sequence[int], device: Device | torch.device, *, most: int = 2, graph: bool = True
) -> Plan:
    """The fastest way, by the model, to read a batch of sequences with at most `most` levels of shared pages.

    problem   the paged call: op "decode", with its heads, dim, dtype, page and len_q.
    pages     of each sequence, in order.        lengths   keys of each, those of the current queries included: no more than its pages hold.
    graph     whether a CUDA graph reads the plan, on a GPU; else the host launches each part of it.

    The model: a run of pages takes the longer of its bytes at the device's bandwidth and its products at a share of the peak, and each level one
    launch more, and results that are written and read once more (`Rates`). A pure function; time grows with the batch and with pages compared whole
    lists at once.
    """
    lengths = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    _check(problem, pages, lengths, device, most)
    device = device if isinstance(device, Device) else devices.of(device)
    whole = [list(own[: max(0, n - problem.len_q) // problem.page]) for own, n in zip(pages, lengths, strict=True)]  # full pages that all queries see
    order = sorted(range(len(whole)), key=whole.__getitem__)
    costs = _Costs(problem, device, [-(-lengths[i] // problem.page) for i in order], graph)
    if sum(map(len, whole)) * costs.alone <= costs.level(len(order)):  # even if nobody had to read them
        whole = [[] for _ in order]
    tree = _tree([whole[i] for i in order])
    best, apart = _search(tree, costs, most), costs.apart(tree.rows, 0)
    times = [apart, *(best[id(tree), left].seconds[0] + left * costs.level(len(order)) for left in range(1, most + 1))]
    levels = times.index(min(times))
    shared: list[list[Run]] = [[] for _ in range(levels)]
    todo = [(tree, 0, 0, levels)] if levels else []
    while todo:
        node, at, start, left = todo.pop()
        if best[id(node), left].cuts[at]:
            row = order[node.rows.start]
            shared[levels - left].append(Run(node.rows, whole[row][start : node.end]))
            at, start, left = -1, node.end, left - 1
        below = [child for child in node.children if (id(child), left) in best]
        todo += [(child, at if at >= 0 else len(best[id(child), left].cuts) - 1, start, left) for child in below]
    shared = [_covering(sorted(runs, key=lambda run: run.rows.start), len(order)) for runs in shared if runs]
    plan = Plan(order, shared, [costs.parts(runs, len(shared)) for runs in shared], 0, [], problem.page, times[levels], apart)
    starts = plan.starts
    for i, start in zip(order, starts, strict=True):
        plan.own.append((list(pages[i][start : -(-lengths[i] // problem.page)]), lengths[i] - start * problem.page))
    return plan._replace(sms=costs.sms(shared[-1], costs.before[-1] - sum(starts))) if shared else plan


def _check(problem: Attention, pages: Sequence[Sequence[int]], lengths: Sequence[int], device: Device | torch.device, most: int) -> None:
    """Keys past a sequence's pages would be read from page 0, which is another's."""
    if not isinstance(device, (Device, torch.device)):
        raise TypeError(f"plan_cascade: device is {device!r:.60}; give a torch.device, or a Device of onchip's table")
    if not isinstance(problem, Attention) or problem.page < 1:
        given = f"{problem.op} over pages of {problem.page} tokens" if isinstance(problem, Attention) else f"a {type(problem).__name__}"
        raise ValueError(f"plan_cascade: problem is {given}; give an Attention over pages, of 1 token or more each")
    check_count("plan_cascade", 0, most=most)
    if not 0 < len(pages) == len(lengths):
        raise ValueError(f"plan_cascade: {len(pages)} lists of pages and {len(lengths)} lengths; give one of each a sequence, of one sequence or more")
    for i, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        if not is_whole(length) or not 0 <= length <= len(own) * problem.page:
            given = f"length {length!r:.60} and {len(own)} pages of {problem.page} tokens"
            raise ValueError(f"plan_cascade: sequence {i} has {given}; give a whole number, 0 to {len(own) * problem.page}, or all of its pages")


class _Costs:
    """The model: seconds of the parts of a plan, for one layer."""

    def __init__(self, p: Attention, device: Device, pages: list[int], graph: bool = True):
        self.p, self.device, self.rates = p, device, CPU if device.kind == "cpu" else GPU if graph else EAGER
        self.before = [0, *itertools.accumulate(pages)]  # of the rows before each one, the last part-filled ones included
        numbers = p.page * (p.dim + p.value_dim)
        self.read = device.floor(Cost(0, self.rates.reads * p.page * p.kv_heads * bytes_of_token(p)), p.dtype).seconds  # a page
        self.multiply = device.floor(Cost(2 * numbers * p.heads * p.len_q / self.rates.reached, 0), p.dtype).seconds  # a page, for one reader
        self.alone = self.run(1, 1)

    def run(self, pages: int, readers: int) -> float:
        """So many pages, read once for so many rows."""
        return pages * max(self.read, readers * self.multiply)

    def apart(self, rows: range, start: int) -> float:
        """What rows have from page `start` on, each read for itself."""
        return (self.before[rows.stop] - self.before[rows.start] - len(rows) * start) * self.alone

    def level(self, batch: int) -> float:
        """One level more: its launch, and its results written and read."""
        state = batch * self.p.len_q * self.p.heads * (self.p.value_dim * self.p.dtype.itemsize + 4)
        return self.rates.launch + 2 * state / self.device.bandwidth

    def few(self, runs: list[Run]) -> bool:
        """Whether the kernel of few queries reads a level."""
        rows = max(len(run.rows) for run in runs if run.pages) * self.p.len_q
        return rows <= FEW and rows * self.p.group <= 4 * FEW

    def sms(self, runs: list[Run], own: int) -> int:
        """Multiprocessors that multiply what one node has for all rows, while the others read `own` pages: by the time that each takes alone, and a fifth
        more, since keys are long on their way beside others. 0 where that is more than a quarter of the time: what is left has to keep memory busy.

        64 x (8k + 1k), a share of 0.24: 91 us by 48 of 132, 98 one after the other; 99 by 32, 98 by 64.
        """
        if self.rates is not GPU or len(runs) > 1 or self.few(runs):
            return 0
        alone = self.run(len(runs[0].pages), len(runs[0].rows))
        share = alone / (alone + own * self.alone)
        return STEP * math.ceil(1.2 * share * self.device.sms / STEP) if share <= 0.25 else 0

    def parts(self, runs: list[Run], levels: int) -> int:
        """Into how many the runs of a level are cut, a power of two, so that the tiles fill the device, and one launch merges the parts of all levels."""
        if self.device.kind == "cpu":
            return 1  # nodes go one after the other there
        if self.few(runs):
            return 1  # the kernel of few queries cuts keys itself
        tiles = sum(math.ceil(len(run.rows) * self.p.len_q * self.p.group / TILE) for run in runs if run.pages) * self.p.kv_heads
        longest = max(len(run.pages) for run in runs) * self.p.page
        return 1 << max(1, min(self.device.sms // tiles, longest // PART, (PARTS - 1) // levels)).bit_length() - 1


def _tree(lists: list[list[int]]) -> _Fork:
    """The tree of what sorted lists share at their beginnings. Its leaves are equal rows; every other node has two children or more, but for the root."""
    root = _Fork(range(len(lists)), 0, [])
    open_nodes: list[tuple[int, int, list[_Fork]]] = [(0, 0, root.children)]  # (end, first row, children) on the way to the row before
    shared, begin = [*(_common(a, b) for a, b in pairwise(lists)), 0], 0
    for row, (own, after) in enumerate(zip(lists, shared, strict=True)):
        if row + 1 < len(lists) and after == len(own) == len(lists[row + 1]):
            continue
        leaf, begin = _Fork(range(begin, row + 1), len(own), []), row + 1
        if after > open_nodes[-1][0]:
            open_nodes.append((after, leaf.rows.start, []))
        open_nodes[-1][2].append(leaf)
        while after < open_nodes[-1][0]:
            end, first, children = open_nodes.pop()
            node = _Fork(range(first, row + 1), end, children)
            if after > open_nodes[-1][0]:
                open_nodes.append((after, first, []))
            open_nodes[-1][2].append(node)
    return root


class _Best(NamedTuple):
    """Of a node and so many levels left, for each page from which nothing is read yet: the least seconds of its rows, and whether a run ends at its end."""

    seconds: list[float]
    cuts: list[bool]


def _search(tree: _Fork, costs: _Costs, most: int) -> dict[tuple[int, int], _Best]:
    """By id of a node and levels left, for nodes of several rows; the leaves first. All `most` levels are only left where nothing is read yet.

    In a chain of forks each node has as many such pages as nodes above it: lists of them take 0.5 us an entry, 65 ms for 512 rows.
    """
    above: list[tuple[_Fork, tuple[int, ...]]] = [(tree, (0,))]  # each node with the pages where a run above it may have ended
    for node, ends in above:
        below = (*ends, node.end) if node.end > ends[-1] else ends
        above += [(child, below) for child in node.children if len(child.rows) > 1]
    best: dict[tuple[int, int], _Best] = {}
    for node, ends in reversed(above):
        forks = [child for child in node.children if len(child.rows) > 1]
        single = [child.rows for child in node.children if len(child.rows) == 1] if node.children else [node.rows]
        count, pages = sum(map(len, single)), sum(costs.before[rows.stop] - costs.before[rows.start] for rows in single)
        for left in range(1, most + 1):
            starts = ends if left < most else ends[:1]
            below = [(pages - count * start) * costs.alone for start in starts]
            for child in forks:
                below = list(map(operator.add, below, best[id(child), left].seconds))
            if left == 1:
                rest = costs.apart(node.rows, node.end)
            else:
                rest = (pages - count * node.end) * costs.alone + sum(best[id(child), left - 1].seconds[-1] for child in forks)
            each = costs.run(1, len(node.rows))
            once = [(node.end - start) * each + rest for start in starts]
            best[id(node), left] = _Best(list(map(min, below, once)), list(map(operator.lt, once, below)))
    return best


def _covering(runs: list[Run], batch: int) -> list[Run]:
    """The runs of a level with empty ones between them, so that every row has one."""
    covering, at = [], 0
    for run in [*runs, Run(range(batch, batch), [])]:
        if run.rows.start > at:
            covering.append(Run(range(at, run.rows.start), []))
        covering += [run] if run.rows else []
        at = run.rows.stop
    return covering


def _table(pages: list[list[int]], lengths: list[int], device: torch.device, width: int = 0) -> tuple[Tensor, Tensor]:
    """Page table and lengths, of `width` pages or of as many as it takes."""
    width = width or max([1, *map(len, pages)])
    table = torch.tensor([[*some, *[0] * (width - len(some))] for some in pages], dtype=torch.int32).view(len(pages), width)
    return table.to(device), torch.tensor(lengths, dtype=torch.int32).to(device)


def _common(a: list[int], b: list[int]) -> int:
    """How many elements two lists have in common from their start, by halving."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


__all__ = ["Plan", "Run", "plan_cascade"]
