"""The prefix tree: the longest match, whole pages, who holds what, what is evicted first, and never a page lost or used twice."""

import itertools
import random
import time
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onchip.cache.paged import OutOfPages, PageList, PagePool
from onchip.cache.radix import RadixTree
from onchip.cache.swap import HostPool

CPU = torch.device("cpu")


def pool(pages=16, page=2) -> PagePool:
    return PagePool(1, pages, page, 1, 1, dtype=torch.float32, device=CPU)


def write(p: PagePool, tokens, sequence: PageList, first: int) -> None:
    """Keys and values from token `first` on, each a number that tells the whole prefix: what a page must hold wherever it is."""
    k, v = p.k[0].numpy(), p.v[0].numpy()  # a tensor takes ten times as long for one number
    for at in range(first, len(tokens)):
        k[sequence.pages[at // p.page], at % p.page] = v[sequence.pages[at // p.page], at % p.page] = value(tokens[: at + 1])


def value(prefix) -> float:
    return float(hash(tuple(prefix)) % (1 << 24))


def read(p: PagePool, sequence: PageList) -> list[float]:
    return p.k[0].numpy()[sequence.pages].ravel()[: sequence.length].tolist()


def run(tree: RadixTree, tokens) -> PageList:
    """A request up to its end: the rest of its tokens computed and written."""
    sequence = tree.match(tokens)
    first = sequence.length
    tree.reserve(sequence, len(tokens))
    tree.pool.append(sequence, len(tokens) - first)
    write(tree.pool, tokens, sequence, first)
    return sequence


def remember(tree: RadixTree, *texts) -> None:
    for tokens in texts:
        tree.finish(tokens, run(tree, tokens))


def nodes(tree: RadixTree) -> list:
    found = [tree.root]
    for node in found:
        found += node.children.values()
    return found[1:]


def check(tree: RadixTree, sequences) -> None:
    """Every page is free or held, by exactly those who list it; every slot likewise; the tree is a prefix tree, and its order that of use."""
    p, all_nodes = tree.pool, nodes(tree)
    held = Counter(itertools.chain(*(s.pages for s in sequences), *(node.pages for node in all_nodes)))
    assert [p.holders(page) for page in range(p.num_pages)] == [held[page] for page in range(p.num_pages)]
    assert sorted(p._free) == [page for page in range(p.num_pages) if not held[page]]
    assert max(Counter(itertools.chain(*(node.pages for node in all_nodes))).values(), default=1) == 1, "one page in two nodes"
    here, away = ({node: at for at, node in enumerate(order)} for order in (tree._here, tree._away))
    assert set(here) == {node for node in all_nodes if node.pages} and set(away) == {node for node in all_nodes if node.slots}
    slots = [slot for node in all_nodes for slot in node.slots]
    if tree.host is not None:
        assert sorted(slots + tree.host._free) == list(range(tree.host.num_slots))
    for node in all_nodes:
        assert bool(node.pages) != bool(node.slots)
        assert len(node.text) == len(node.pages or node.slots) * p.page * 4
        assert node.parent.children[node.text[: p.page * 4]] is node
        for order in (here, away):
            assert node not in order or node.parent not in order or order[node] < order[node.parent]
        assert node.parent is tree.root or not node.pages or node.parent.pages, "a page in the pool whose prefix is not"


# ---- one thing at a time


def test_the_longest_prefix_in_whole_pages():
    tree = RadixTree(pool())
    assert tree.match([1, 2, 3]) == PageList()
    remember(tree, [1, 2, 3, 4, 5, 6, 7])
    assert tree.num_pages == 3 and tree.pool.num_free == 13  # the seventh token fills no page
    for tokens, length in (([1, 2, 3, 4, 5, 6, 7], 6), ([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 4, 5], 4), ([1, 2, 3, 9], 2), ([1], 0), ([9, 2, 3, 4], 0), ([], 0)):
        found = tree.match(tokens)
        assert (found.length, len(found.pages)) == (length, length // 2)
        assert read(tree.pool, found) == [value(tokens[: i + 1]) for i in range(length)]
        tree.pool.release(found)
        check(tree, [])


@pytest.mark.parametrize("page", [1, 2, 16])
def test_branches(page):
    tree = RadixTree(pool(32, page))
    trunk = list(range(3 * page))
    remember(tree, trunk + [100] * page, trunk + [200] * page, trunk[:page] + [300] * page)
    assert tree.num_pages == 6 and len(nodes(tree)) == 5
    for tokens in (trunk + [100] * page, trunk + [200] * page, trunk[:page] + [300] * page):
        found = tree.match(tokens)
        assert found.length == len(tokens) and read(tree.pool, found) == [value(tokens[: i + 1]) for i in range(len(tokens))]
        tree.pool.release(found)
    check(tree, [])


def test_what_is_known_already_is_not_kept_twice():
    tree = RadixTree(pool())
    a, b = PageList(), PageList()
    for sequence in (a, b):  # two at once, before either is known
        tree.pool.append(sequence, 6)
        write(tree.pool, [1, 2, 3, 4, 5, 6], sequence, 0)
    tree.finish([1, 2, 3, 4, 5, 6], a)
    tree.insert([1, 2, 3, 4, 5, 6], b)
    assert tree.num_pages == 3 and tree.pool.num_free == 10
    check(tree, [b])
    tree.pool.release(b)
    assert tree.pool.num_free == 13
    check(tree, [])


def test_known_while_it_runs():
    """`insert` of a running sequence shares its whole pages; the part-filled one stays its own."""
    tree = RadixTree(pool())
    a = run(tree, [1, 2, 3, 4, 5])
    tree.insert([1, 2, 3, 4, 5], a)
    b = tree.match([1, 2, 3, 4, 5, 6])
    assert b.pages == a.pages[:2] and [tree.pool.holders(p) for p in a.pages] == [3, 3, 1]
    tree.pool.append(a, 4)
    check(tree, [a, b])
    with pytest.raises(OutOfPages):
        tree.evict(1)
    tree.pool.release(a)
    tree.pool.release(b)
    tree.evict(2)
    assert tree.pool.num_free == 16


def test_a_cancelled_request_gives_everything_back():
    tree = RadixTree(pool())
    remember(tree, [1, 2, 3, 4])
    sequence = tree.match([1, 2, 3, 4, 5, 6])
    tree.reserve(sequence, 12)
    tree.pool.release(sequence)
    assert tree.pool.num_free == 14 and tree.num_pages == 2
    check(tree, [])


def test_the_least_recently_used_leaf_goes_first():
    tree = RadixTree(pool(6))
    remember(tree, [1, 1, 2, 2], [1, 1, 3, 3], [4, 4, 5, 5])
    tree.pool.release(tree.match([1, 1, 2, 2]))
    order = [[1, 1, 3, 3], [4, 4, 5, 5], [4, 4], [1, 1, 2, 2], [1, 1]]  # the end of a path before its beginning
    for i, gone in enumerate(order):
        tree.evict(1)
        for tokens in order:
            found = tree.match(tokens)
            known = len(tokens) if tokens in order[i + 1 :] else next(n for n in (2, 0) if tokens[:n] in [*order[i + 1 :], []])
            assert found.length == known, (gone, tokens)
            tree.pool.release(found)
        for again in order:  # the look-ups above counted as use
            tree.pool.release(tree.match(again))
        check(tree, [])
    assert tree.pool.num_free == 6


def test_only_as_much_as_is_needed_is_evicted():
    tree = RadixTree(pool(8))
    remember(tree, list(range(12)))
    tree.evict(2)
    assert tree.num_pages == 4 and tree.pool.num_free == 4
    assert tree.match(list(range(12))).length == 8


def test_a_match_protects_its_own_part_of_a_node():
    """A request that uses a page of a long run, and needs what the rest of it holds."""
    tree = RadixTree(pool(8))
    remember(tree, list(range(16)))
    sequence = tree.match([0, 1, 50, 51])
    assert sequence.length == 2 and tree.pool.num_free == 0
    tree.reserve(sequence, 16)
    assert len(sequence.pages) == 8 and tree.num_pages == 1
    check(tree, [sequence])


def test_out_of_pages_evicts_nothing():
    tree = RadixTree(pool(8))
    remember(tree, list(range(8)))
    mine = tree.match(list(range(4)))
    with pytest.raises(
        OutOfPages, match="3 pages are to be evicted and 2 are held by the prefix tree alone; wait for a sequence to end, or make the pool larger"
    ):
        tree.reserve(mine, 18)
    assert tree.num_pages == 4 and mine.length == 4 and len(mine.pages) == 2
    check(tree, [mine])
    tree.reserve(mine, 16)
    assert tree.pool.num_free == 0 and tree.num_pages == 2


def test_what_is_no_count_and_what_is_no_token():
    tree = RadixTree(pool(4))
    remember(tree, [1, 1, 2, 2])
    tree.evict(-1)
    assert tree.num_pages == 2
    for tokens in ([1 << 31], ["a"], [1.5], b"abc"):
        with pytest.raises(ValueError, match=r"^RadixTree: tokens are no whole numbers of 32 bits \(.*\); give a list of ids"):
            tree.match(tokens)
    with pytest.raises(ValueError, match="a sequence of 4 tokens has 1 pages; give one that holds its tokens"):
        tree.insert([1, 2, 3, 4], PageList([3], 4))
    for count in (1.5, "a", None):
        with pytest.raises(ValueError, match=f"^RadixTree.evict: count is {count!r}; give a whole number"):
            tree.evict(count)
    assert tree.num_pages == 2


def test_the_host_memory_of_another_pool():
    """Its pages would go there, and come back, in place of the tree's."""
    with pytest.raises(ValueError, match=r"^RadixTree: host is made for another pool; give HostPool\(pool, slots\) of the same pool"):
        RadixTree(pool(8), HostPool(pool(8), 4))


def test_clear():
    p = pool(8)
    tree = RadixTree(p, HostPool(p, 4))
    remember(tree, [1, 2, 3, 4], [1, 2, 5, 6])
    held = tree.match([1, 2])
    tree.evict(1)
    tree.clear()
    assert tree.num_pages == 0 and tree.host.num_free == 4 and tree.pool.num_free == 7
    check(tree, [held])
    assert tree.match([1, 2]).length == 0


@pytest.mark.parametrize("page", [1, 16])
def test_time_does_not_grow_with_tokens_one_by_one(page):
    """32k tokens are matched in a millisecond or two on an idle machine: no more than a few times what making their bytes takes."""
    tree = RadixTree(pool(40_000 // page, page))
    tokens = [random.randrange(1 << 17) for _ in range(32 << 10)]
    a = PageList()
    tree.pool.append(a, len(tokens))
    tree.finish(tokens, a)

    def best(call):
        times = []
        for _ in range(7):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return min(times)

    def match():
        found = tree.match(tokens)
        assert found.length == len(tokens)
        matches.append(found)

    matches: list[PageList] = []
    one_loop = best(lambda: [token + 1 for token in tokens])
    assert best(match) < (4 if page > 1 else 12) * one_loop
    cut = [*tokens[: 20 << 10], 1 << 20, *tokens[(20 << 10) + 1 :]]
    assert tree.match(cut).length == 20 << 10


# ---- host memory


def test_evicted_pages_come_back_from_the_host():
    p = pool(8)
    tree = RadixTree(p, HostPool(p, 8))
    texts = [[i, i, i + 1, i + 1, 7, 7] for i in (10, 20, 30)]
    remember(tree, *texts)  # nine pages in eight
    assert tree.host.num_free == 7
    check(tree, [])
    for tokens in texts + texts[::-1]:
        found = tree.match(tokens)
        assert found.length == 6 and read(p, found) == [value(tokens[: i + 1]) for i in range(6)]
        check(tree, [found])
        p.release(found)


def test_a_small_host_forgets_the_least_recently_used():
    p = pool(4)
    tree = RadixTree(p, HostPool(p, 3))
    remember(tree, *([i, i, i, i, i, i] for i in range(4)))
    check(tree, [])
    assert tree.num_pages == 4 and tree.host.num_free == 0
    lengths = []
    for i in (3, 2, 1, 0):
        found = tree.match([i] * 6)
        lengths.append(found.length)
        assert read(p, found) == [value([i] * (n + 1)) for n in range(found.length)]
        p.release(found)
        check(tree, [])
    assert lengths[0] == 6 and lengths[-1] == 0


def test_a_node_larger_than_the_host_is_forgotten_with_what_is_below_it():
    p = pool(8)
    tree = RadixTree(p, HostPool(p, 2))
    remember(tree, [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 3, 3, 5, 5])
    tree.evict(2)
    assert tree.host.num_free == 0
    tree.evict(3)  # three pages in one piece, two slots
    assert tree.num_pages == 0 and tree.host.num_free == 2 and p.num_free == 8
    check(tree, [])


def test_a_match_takes_from_the_host_what_fits():
    p = pool(4)
    tree = RadixTree(p, HostPool(p, 4))
    remember(tree, [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 4, 4])
    tree.evict(4)
    other = PageList()
    p.append(other, 4)
    found = tree.match([1, 1, 2, 2, 3, 3, 4, 4])
    assert found.length == 4 and read(p, found) == [value([1, 1, 2, 2][: n + 1]) for n in range(4)]
    check(tree, [found, other])


def test_computed_again_while_on_the_host():
    """The new pages are taken, the slots given back."""
    p = pool(4)
    tree = RadixTree(p, HostPool(p, 4))
    remember(tree, [1, 1, 2, 2])
    tree.evict(2)
    mine = PageList()
    p.append(mine, 6)
    write(p, [1, 1, 2, 2, 3, 3], mine, 0)
    tree.insert([1, 1, 2, 2, 3, 3], mine)
    assert tree.host.num_free == 4 and tree.num_pages == 3
    check(tree, [mine])


def test_an_insert_that_is_refused_changes_nothing():
    """Pages that nobody holds, the first of them for what is on the host."""
    p = pool(4)
    tree = RadixTree(p, HostPool(p, 4))
    remember(tree, [1, 1, 2, 2])
    tree.evict(2)
    mine = PageList()
    p.append(mine, 4)
    for pages in ([*mine.pages, 3], [*mine.pages, 4], [3, 3, 3]):
        with pytest.raises(ValueError, match=f"share: page {pages[-1]} is (free|none of this pool)"):
            tree.insert([1, 1, 2, 2, 3, 3], PageList(pages, 6))
        assert tree.num_pages == 0 and tree.host.num_free == 2
        check(tree, [mine])
    tree.clear()
    check(tree, [mine])


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_that_fails_loses_nothing(way, monkeypatch):
    """A full GPU has no room for the pages that are gathered: what was known stays known, and nothing is held for who has nothing."""
    p = pool(6)
    tree = RadixTree(p, HostPool(p, 4))
    remember(tree, [1, 1, 2, 2])
    remember(tree, [1, 1, 2, 2, 3, 3, 4, 4])
    tree.evict(2)  # the end, to the host

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(tree.host, way, fails)
        with pytest.raises(torch.OutOfMemoryError):
            tree.evict(1) if way == "store" else tree.match([1, 1, 2, 2, 3, 3, 4, 4])
    check(tree, [])
    assert (tree.num_pages, p.num_free, tree.host.num_free) == (2, 4, 2)
    sequence = tree.match([1, 1, 2, 2, 3, 3, 4, 4])
    assert read(p, sequence) == [value([1, 1, 2, 2, 3, 3, 4, 4][: i + 1]) for i in range(8)]
    check(tree, [sequence])


# ---- any order of calls


class Engine:
    """Requests that begin, grow, fork, end and are cancelled, over a small pool; each knows what its keys must be."""

    def __init__(self, pages, page, slots):
        self.pool = pool(pages, page)
        self.tree = RadixTree(self.pool, HostPool(self.pool, slots) if slots else None)
        self.running: list[tuple[list[int], PageList]] = []

    def begin(self, tokens):
        sequence = self.tree.match(tokens)
        assert sequence.length % self.pool.page == 0 and sequence.length <= len(tokens)
        assert read(self.pool, sequence) == [value(tokens[: i + 1]) for i in range(sequence.length)]
        self.running.append((tokens[: sequence.length], sequence))
        self.grow(len(self.running) - 1, tokens[sequence.length :])

    def grow(self, i, more):
        tokens, sequence = self.running[i]
        before = (list(sequence.pages), sequence.length, self.pool.num_free, self.tree.num_pages)
        try:
            self.tree.reserve(sequence, len(tokens) + len(more))
        except OutOfPages:
            assert (sequence.pages, sequence.length, self.pool.num_free, self.tree.num_pages) == before
            return
        self.pool.append(sequence, len(more))
        write(self.pool, tokens + more, sequence, len(tokens))
        self.running[i] = (tokens + more, sequence)

    def fork(self, i):
        tokens, sequence = self.running[i]
        self.running.append((tokens, self.pool.fork(sequence)))

    def end(self, i, known):
        tokens, sequence = self.running.pop(i)
        if known:
            self.tree.finish(tokens, sequence)
        else:
            self.pool.release(sequence)
        assert sequence == PageList()

    def evict(self, count):
        try:
            self.tree.evict(count)
        except OutOfPages:
            return

    def check(self):
        check(self.tree, [sequence for _, sequence in self.running])

    def check_values(self):
        for tokens, sequence in self.running:
            assert read(self.pool, sequence) == [value(tokens[: i + 1]) for i in range(len(tokens))]


TOKENS = st.lists(st.integers(0, 2), max_size=12)


class Requests(RuleBasedStateMachine):
    """What hypothesis makes of it."""

    def __init__(self):
        super().__init__()
        self.engine = Engine(pages=10, page=2, slots=4)

    @rule(tokens=TOKENS)
    def begin(self, tokens):
        self.engine.begin(tokens)

    @precondition(lambda self: self.engine.running)
    @rule(i=st.integers(0, 99), more=TOKENS)
    def grow(self, i, more):
        self.engine.grow(i % len(self.engine.running), more)

    @precondition(lambda self: self.engine.running)
    @rule(i=st.integers(0, 99))
    def known_while_it_runs(self, i):
        self.engine.tree.insert(*self.engine.running[i % len(self.engine.running)])

    @precondition(lambda self: self.engine.running)
    @rule(i=st.integers(0, 99))
    def fork(self, i):
        self.engine.fork(i % len(self.engine.running))

    @precondition(lambda self: self.engine.running)
    @rule(i=st.integers(0, 99), known=st.booleans())
    def end(self, i, known):
        self.engine.end(i % len(self.engine.running), known)

    @rule(count=st.integers(0, 6))
    def evict(self, count):
        self.engine.evict(count)

    @invariant()
    def no_page_is_lost_and_none_is_used_twice(self):
        self.engine.check()

    @invariant()
    def everyone_reads_what_was_written(self):
        self.engine.check_values()


Requests.TestCase.settings = settings(max_examples=60, deadline=None)
TestRequests = Requests.TestCase


@pytest.mark.wide
class TestManyRequests(Requests.TestCase):
    """Up to 100,000 operations, of which hypothesis finds the fewest that fail."""

    settings = settings(max_examples=500, stateful_step_count=200, deadline=None)


@pytest.mark.parametrize(("page", "slots"), [(1, 0), (2, 6)])
def test_a_hundred_thousand_operations(page, slots):
    """Half of them for each kind of tree; counts of holders are looked at after each, the whole tree after every 50th."""
    draw = random.Random(page)
    engine = Engine(pages=24, page=page, slots=slots)
    texts = lambda: [draw.randrange(3) for _ in range(draw.randrange(8 * page))]  # noqa: E731
    for step in range(50_000):
        kind = draw.random()
        if kind < 0.3 and len(engine.running) < 6:
            engine.begin(texts())
        elif kind < 0.35:
            engine.evict(draw.randrange(5))
        elif engine.running:
            i = draw.randrange(len(engine.running))
            if kind < 0.55:
                engine.grow(i, texts()[:4])
            elif kind < 0.65:
                engine.tree.insert(*engine.running[i])
            elif kind < 0.7 and len(engine.running) < 8:
                engine.fork(i)
            else:
                engine.end(i, known=kind < 0.93)
        held = sum(len(s.pages) for _, s in engine.running) + engine.tree.num_pages
        assert sum(engine.pool._holders) == held and min(engine.pool._holders) >= 0
        assert engine.pool._holders.count(0) == engine.pool.num_free == len(set(engine.pool._free))
        if step % 50 == 0:
            engine.check()
            engine.check_values()
    while engine.running:
        engine.end(0, known=True)
    engine.tree.clear()
    assert engine.pool.num_free == 24 and (not slots or engine.tree.host.num_free == slots)
