"""A prefix tree over the page pool: a sequence that begins like an earlier one starts from that one's pages (RadixAttention, Zheng et al., 2024).

A node is a run of whole pages and their tokens; its children begin with different pages. The tree holds each of its pages once,
and so does every sequence that got it from `match`: a page's count of holders is the lock, and letting go of a sequence, ended or
cancelled, is `pool.release`. A sequence holds a path from the root, so a node is in use where its first page is.

Tokens are compared as bytes, whole runs at once, and a child is found by the bytes of its first page: no loop over tokens.
Where there is a `HostPool`, what is evicted goes to host memory, whose own least recently used pages make room.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack

from onchip.cache.paged import OutOfPages, PageList, PagePool
from onchip.cache.swap import HostPool
from onchip.core.parts import check_whole

TOKEN = array("i").itemsize


class Node:
    """A run of pages. `pages` are in the pool or, where that is empty, `slots` in host memory."""

    __slots__ = ("children", "pages", "parent", "slots", "text")

    def __init__(self, text: bytes, pages: list[int], slots: list[int], parent: "Node | None"):
        self.text, self.pages, self.slots, self.parent = text, pages, slots, parent
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """The prefixes whose keys and values are in `pool`, and in `host` where one is given.

    >>> sequence = tree.match(prompt[:-1])          # the longest known prefix: its pages, held once more
    >>> tree.reserve(sequence, len(prompt) + 64)    # room for the rest, evicting what nobody uses
    >>> tree.finish(prompt + answer, sequence)      # known from now on
    """

    def __init__(self, pool: PagePool, host: HostPool | None = None):
        if host is not None and host.pool is not pool:  # what is evicted would be copied from the other's pages
            raise ValueError("RadixTree: host is made for another pool; give HostPool(pool, slots) of the same pool, or None")
        self.pool, self.host = pool, host
        self.root = Node(b"", [], [], None)
        # Least recently used first. Whoever uses a node uses the ones above it after it, so a node stands before its parent.
        self._here: OrderedDict[Node, None] = OrderedDict()
        self._away: OrderedDict[Node, None] = OrderedDict()
        self._step = pool.page * TOKEN

    @property
    def num_pages(self) -> int:
        """Pages of the pool that the tree holds."""
        return sum(len(node.pages) for node in self._here)

    def match(self, tokens: Sequence[int]) -> PageList:
        """The longest prefix of `tokens` that is known, in whole pages, as a sequence that holds them: `pool.release` gives them back.

        Pages that are in host memory come back first, as many as the pool has room for. To compute a next token, leave the last one out of `tokens`.
        """
        path = self._walk(_text(tokens))
        here = [node for node in path if node.pages]
        pages: list[int] = []
        for node in here:
            pages += node.pages
        self.pool.share(pages)  # from here on they are not evicted
        self._touch(path)
        with ExitStack() as undo:  # a copy may fail, a GPU that is full has no room for what it gathers
            undo.callback(self.pool.drop, pages)
            self._return(path[len(here) :], pages)
            undo.pop_all()
        self._touch(path)
        return PageList(pages, len(pages) * self.pool.page)

    def reserve(self, sequence: PageList, tokens: int) -> None:
        """`pool.reserve`, evicting what it takes. Raises OutOfPages where what is free and what nobody uses are too few; then nothing is evicted."""
        self._room(self.pool.missing(sequence, tokens))
        self.pool.reserve(sequence, tokens)

    def insert(self, tokens: Sequence[int], sequence: PageList) -> None:
        """Make the whole pages of `sequence`, which hold the keys and values of `tokens` from the first on, known to `match`.

        The sequence goes on holding its pages and may grow. Where a prefix is known already the tree keeps the pages it has.
        """
        count = min(len(tokens), sequence.length) // self.pool.page
        if count > len(sequence.pages):
            raise ValueError(f"RadixTree: a sequence of {sequence.length} tokens has {len(sequence.pages)} pages; give one that holds its tokens")
        text = _text(tokens[: count * self.pool.page])
        path = self._walk(text)
        at, coming = 0, []
        for node in path:
            size = len(node.text) // self._step
            if not node.pages:  # in host memory, and here again
                coming.append((node, sequence.pages[at : at + size]))
            at += size
        if at < count:
            node = Node(text[at * self._step :], [], [], path[-1] if path else self.root)
            path.append(node)
            coming.append((node, sequence.pages[at:count]))
        self.pool.share([page for _, pages in coming for page in pages])  # which refuses what nobody holds, before the tree is another
        for node, pages in coming:
            node.parent.children[node.text[: self._step]] = node
            self._hold(node, pages)
        self._touch(path)

    def finish(self, tokens: Sequence[int], sequence: PageList) -> None:
        """`insert`, and the sequence lets go of its pages."""
        self.insert(tokens, sequence)
        self.pool.release(sequence)

    def evict(self, count: int) -> None:
        """Free `count` pages that the tree alone holds: of the least recently used, the ends first. They go to the host where there is room for them.

        Raises OutOfPages where there are too few, and then changes nothing.
        """
        check_whole("RadixTree.evict", "count", count)
        leaving: dict[Node, None] = {}
        found, count = 0, max(0, count)
        for node in self._here:
            if found >= count:
                break
            if self.pool.holders(node.pages[0]) == 1 and all(child in leaving or not child.pages for child in node.children.values()):
                leaving[node] = None
                found += len(node.pages)
        if found < count:
            raise OutOfPages(
                f"{count} pages are to be evicted and {found} are held by the prefix tree alone; wait for a sequence to end, or make the pool larger"
            )
        if found > count:  # the beginning of the last one stays
            for node in (self._split(next(reversed(leaving)), found - count), *reversed(leaving)):  # in order, should one not get away
                self._here.move_to_end(node, last=False)
        for node in leaving:
            self._send_away(node)

    def clear(self) -> None:
        """Forget everything, in host memory too."""
        self._forget(*self.root.children.values())

    # ---- the tree

    def _walk(self, text: bytes) -> list[Node]:
        """The nodes from the root down that `text` begins with, the last one cut where they part."""
        node, at, path = self.root, 0, []
        while (child := node.children.get(text[at : at + self._step])) is not None:
            same = _common(child.text, text[at : at + len(child.text)], self._step)
            if same < len(child.text):
                child = self._split(child, same // self._step)
            path.append(child)
            node, at = child, at + same
        return path

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` pages; returns the beginning, which is new and the most recently used. The end is `node` still."""
        cut = count * self._step
        upper = Node(node.text[:cut], node.pages[:count], node.slots[:count], node.parent)
        node.parent.children[upper.text[: self._step]] = upper
        node.text, node.pages, node.slots, node.parent = node.text[cut:], node.pages[count:], node.slots[count:], upper
        upper.children[node.text[: self._step]] = node
        (self._here if upper.pages else self._away)[upper] = None
        return upper

    def _touch(self, path: list[Node]) -> None:
        """These are the most recently used, and the first of them, which is the highest, the last to go."""
        for node in reversed(path):
            if node.pages:
                self._here.move_to_end(node)
            elif node.slots:  # else it had to go
                self._away.move_to_end(node)

    def _hold(self, node: Node, pages: list[int]) -> None:
        """`node` is on `pages`, which are held for it."""
        if node.slots:
            self.host.free(node.slots)
            del self._away[node]
        node.pages, node.slots = pages, []
        self._here[node] = None

    def _forget(self, *nodes: Node) -> None:
        """Take nodes, and all below them, out of the tree."""
        nodes = list(nodes)
        for node in nodes:
            node.parent.children.pop(node.text[: self._step], None)
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.pages:
                self.pool.drop(node.pages)
                del self._here[node]
            else:
                self.host.free(node.slots)
                del self._away[node]
            node.pages, node.slots, node.children = [], [], {}

    # ---- between pool and host

    def _room(self, count: int) -> None:
        """At least `count` free pages in the pool."""
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)

    def _send_away(self, node: Node) -> None:
        """A node without children in the pool: to the host, or out of the tree."""
        if not self._room_on_host(len(node.pages)):
            self._forget(node)
            return
        slots = self.host.take(len(node.pages))
        with ExitStack() as undo:
            undo.callback(self.host.free, slots)
            self.host.store(node.pages, slots)
            undo.pop_all()
        self.pool.drop(node.pages)
        node.pages, node.slots = [], slots
        del self._here[node]
        self._away[node] = None

    def _room_on_host(self, count: int) -> bool:
        """Whether the host has `count` free slots, now that its least recently used nodes made room."""
        if self.host is None or count > self.host.num_slots:
            return False
        while count > self.host.num_free and self._away:
            self._forget(next(iter(self._away)))
        return count <= self.host.num_free

    def _return(self, nodes: list[Node], pages: list[int]) -> None:
        """Bring nodes from the host, from the highest on, as many as fit; to `pages`, held once for the caller."""
        for node in nodes:
            try:
                self._room(len(node.slots))
            except OutOfPages:
                break
            if not node.slots:  # making room took it
                break
            own = self.pool.take(len(node.slots))
            with ExitStack() as undo:
                undo.callback(self.pool.drop, own)
                self.host.load(node.slots, own)
                undo.pop_all()
            pages += own
            self.pool.share(own)
            self._hold(node, own)


def _text(tokens: Sequence[int]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError, ValueError) as error:  # ValueError: bytes, but no whole number of ids
        raise ValueError(f"RadixTree: tokens are no whole numbers of 32 bits ({error}); give a list of ids") from error


def _common(a: bytes, b: bytes, step: int) -> int:
    """Bytes in which two texts agree from their start, in whole steps; by halving, so that each byte is compared about once."""
    low, high = 0, min(len(a), len(b)) // step
    if a[: high * step] == b[: high * step]:
        return high * step
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * step : middle * step] == b[low * step : middle * step]:
            low = middle
        else:
            high = middle - 1
    return low * step
