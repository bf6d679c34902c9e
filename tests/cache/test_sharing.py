"""Plans of what a batch shares: every key once for every row, the best cuts by the model, nothing shared where it does not pay, and the same attention."""

import itertools
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
from judge import assert_as_good_as_torch
from onchip.cache import sharing
from onchip.cache.paged import PageList, PagePool
from onchip.cache.radix import RadixTree
from onchip.cache.sharing import plan_cascade
from onchip.core.device import gpu
from onchip.core.masks import Causal
from onchip.core.problem import Attention
from onchip.ops.attention import PagedKV
from onchip.ops.cascade import cascade_attention

H200 = gpu("H200")
PAGE = 16


def problem(batch, len_q=1, page=PAGE, longest=9 << 10, **other) -> Attention:
    return Attention("decode", batch, len_q, longest, 32, 8, 128, torch.bfloat16, Causal(), "paged", page)._replace(**other)


def check(plan, p, pages, lengths):
    """Each row reads its pages in order; the runs of each level cover the batch; only whole pages before the queries are shared."""
    assert sorted(plan.order) == list(range(len(pages)))
    for at, row in enumerate(plan.order):
        found, keys = [], 0
        for runs in plan.shared:
            (run,) = (run for run in runs if at in run.rows)
            found, keys = found + run.pages, keys + len(run.pages) * p.page
        own, rest = plan.own[at]
        assert found + own == list(pages[row][: -(-lengths[row] // p.page)]) and keys + rest == lengths[row]
        assert keys <= max(0, lengths[row] - p.len_q)
    for runs in plan.shared:
        assert [row for run in runs for row in run.rows] == list(range(len(pages))) and any(run.pages for run in runs)
        assert all(len(run.rows) > 1 for run in runs if run.pages)
    assert plan.seconds <= plan.apart and (plan.seconds < plan.apart) == bool(plan.shared)


def fan(groups):
    """Pages of (readers, shared pages, own pages) groups, all different."""
    fresh = itertools.count()
    take = lambda n: list(itertools.islice(fresh, n))  # noqa: E731
    pages = []
    for readers, common, own in groups:
        trunk = take(common)
        pages += [trunk + take(own) for _ in range(readers)]
    return pages, [len(row) * PAGE for row in pages]


def test_a_long_prefix_of_many():
    """The case that cascade attention is for: 64 sequences share 8k of 9k keys."""
    pages, lengths = fan([(64, 512, 64)])
    p = problem(64)
    plan = plan_cascade(p, pages, torch.tensor(lengths), H200)
    check(plan, p, pages, lengths)
    assert [[(len(run.rows), len(run.pages)) for run in runs] for runs in plan.shared] == [[(64, 512)]]
    assert plan.parts == [8] and plan.apart / plan.seconds > 5  # 16 tiles of 128 rows on 132 multiprocessors
    (level,) = plan.levels(torch.device("cpu"))
    assert level.sms == plan.sms == 48
    assert level.page_table.shape == (8, 64) and level.lengths.tolist() == [1024] * 8 and level.offsets is None and level.longest == 64
    assert plan_cascade(p, pages, lengths, H200, graph=False).sms == plan_cascade(p, *fan([(64, 512, 4)]), H200).sms == 0  # or little is a row's own
    assert plan_cascade(p._replace(batch=4), *fan([(4, 512, 64)]), H200).sms == 0  # few rows: the same kernel reads both
    few = p._replace(heads=8, kv_heads=1)  # a rank's: 4 tiles, but one launch merges no more than 16
    assert plan_cascade(few, pages, lengths, H200).parts == [8]


@pytest.mark.parametrize(
    ("groups", "shapes"),
    [
        ([(1, 512, 64)], []),
        ([(64, 0, 64)], []),
        ([(2, 4, 64)], []),  # 64 keys saved are not worth a launch
        ([(32, 512, 8), (32, 256, 8)], [[(32, 512), (32, 256)]]),
        ([(30, 512, 8), (2, 0, 8), (32, 256, 8)], [[(30, 512), (2, 0), (32, 256)]]),
        ([(4, 512, 8), (1, 512, 8)], [[(4, 512), (1, 0)]]),
    ],
)
def test_what_pays(groups, shapes):
    pages, lengths = fan(groups)
    p = problem(len(pages))
    plan = plan_cascade(p, pages, lengths, H200)
    check(plan, p, pages, lengths)
    assert [[(len(run.rows), len(run.pages)) for run in runs] for runs in plan.shared] == shapes
    eager = plan_cascade(p, pages, lengths, H200, graph=False)  # 80 us a level
    assert bool(eager.shared) == (plan.apart - plan.seconds > sharing.EAGER.launch - sharing.GPU.launch)


TWO = [(64, 1024), *[(16, 200)] * 4]


def test_two_levels_and_no_more_than_asked_for():
    trunk = list(range(1024))
    pages = [trunk + list(range(2000 * g, 2000 * g + 200)) + [20_000 + 100 * g + i] for g in range(1, 5) for i in range(16)]
    p, lengths = problem(64), [1225 * PAGE] * 64
    depths = {}
    for most in (0, 1, 2, 3):
        plan = plan_cascade(p, pages, lengths, H200, most=most)
        check(plan, p, pages, lengths)
        depths[most] = [(len(run.rows), len(run.pages)) for runs in plan.shared for run in runs], plan.seconds
    assert [depths[most][0] for most in (0, 1, 2, 3)] == [[], [(16, 1224)] * 4, TWO, TWO]
    assert depths[0][1] > depths[1][1] > depths[2][1] == depths[3][1]


def test_rows_are_put_in_order():
    pages, lengths = fan([(8, 512, 1), (8, 512, 1)])
    mixed = [i // 2 + 8 * (i % 2) for i in range(16)]
    p = problem(16)
    plan = plan_cascade(p, [pages[i] for i in mixed], [lengths[i] for i in mixed], H200)
    check(plan, p, [pages[i] for i in mixed], [lengths[i] for i in mixed])
    assert [len(run.rows) for run in plan.shared[0]] == [8, 8]


def test_only_what_all_queries_see():
    """Equal pages up to the last: the page that holds a current query is a row's own, and so is one that is part-filled."""
    row = list(range(128))
    for len_q, length, expected in ((1, 2048, 127), (1, 2033, 127), (1, 2032, 126), (4, 2051, 127), (3, 2051, 128)):
        p = problem(32, len_q)
        plan = plan_cascade(p, [[*row, 999]] * 32, [length] * 32, H200)
        check(plan, p, [[*row, 999]] * 32, [length] * 32)
        assert [len(run.pages) for run in plan.shared[0]] == [expected]
    assert plan_cascade(problem(2), [[], [1]], [0, 1], H200).shared == []


SIZE = st.integers(0, 60)
TREE = st.lists(st.tuples(SIZE, st.lists(st.tuples(SIZE, st.lists(st.tuples(SIZE, st.just([])), max_size=2)), max_size=3)), min_size=1, max_size=2)


def rows_of(tree, trunk, fresh):
    if not tree:
        return [trunk]
    return [row for size, kids in tree for row in rows_of(kids, trunk + list(itertools.islice(fresh, size)), fresh)]


@settings(max_examples=100, deadline=None)
@given(TREE, st.integers(0, 3), st.integers(1, 40))
def test_no_plan_is_better(tree, most, scale):
    """Against all ways to cut a small tree of pages; every page stands for `scale`, so that some cuts pay and some do not."""
    pages = rows_of(tree, [], itertools.count())
    p = problem(len(pages), page=PAGE * scale)
    lengths = [len(row) * p.page + 1 for row in pages]
    pages = [[*row, 10_000 + i] for i, row in enumerate(pages)]
    plan = plan_cascade(p, pages, lengths, H200, most=most)
    check(plan, p, pages, lengths)
    assert len(plan.shared) <= most
    costs = sharing._Costs(p, H200, [len(row) for row in pages])
    whole = [row[:-1] for row in pages]
    inner = {tuple(row[:end]) for row in whole for end in range(1, len(row) + 1)}  # every prefix that ends where two rows or more part
    inner = [run for run in inner if sum(tuple(row[: len(run)]) == run for row in whole) > 1]
    inner = [run for run in inner if len({tuple(row[: len(run) + 1]) for row in whole if tuple(row[: len(run)]) == run}) > 1 or run in map(tuple, whole)]
    least = float("inf")
    for chosen in itertools.chain.from_iterable(itertools.combinations(inner, n) for n in range(len(inner) + 1)):
        depth, seconds = 0, 0.0
        for run in chosen:
            above = max((len(up) for up in chosen if len(up) < len(run) and run[: len(up)] == up), default=0)
            seconds += costs.run(len(run) - above, sum(tuple(row[: len(run)]) == run for row in whole))
        for row in whole:
            ends = [len(run) for run in chosen if tuple(row[: len(run)]) == run]
            depth = max(depth, len(ends))
            seconds += costs.run(len(row) + 1 - max(ends, default=0), 1)
        if depth <= most:
            least = min(least, seconds + depth * costs.level(len(pages)))
    assert plan.seconds == pytest.approx(least, rel=1e-9)


def test_a_plan_takes_few_steps():
    """256 sequences of 2,000 pages, and a chain of 400 different prefixes, which costs most: 20 and 75 ms.

    Counted are lines of Python, since a clock also reads what else the machine does. A chain has 400 * 400 / 2 entries in each of two tables; lists made at
    once take one line an entry, a search entry by entry five and more.
    """
    pages, lengths = fan([(128, 1500, 500), (128, 1000, 1000)])
    chain = [[*range(4 * i), 10**6 + i] for i in range(400)]
    for some, n, most in ((pages, lengths, 20_000), (chain, [len(row) * PAGE for row in chain], 250_000)):
        plan, steps = counted(lambda some=some, n=n: plan_cascade(problem(len(some)), some, n, H200))
        assert 1000 < steps < most
        check(plan, problem(len(some)), some, n)


def counted(call):
    """What a call returns, and how many lines of Python it ran."""
    lines = 0

    def line(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, lines


@pytest.mark.parametrize("seed", range(6))
def test_from_the_tree_to_attention(seed, monkeypatch):
    """Requests over a prefix tree, planned and read: the same results as each sequence by itself."""
    monkeypatch.setattr(sharing, "GPU", sharing.GPU._replace(launch=0.0))  # so that small sharing pays
    monkeypatch.setattr(sharing, "PART", 16)
    draw = random.Random(seed)
    page, heads, kv_heads, dim = draw.choice([1, 4, 16]), 4, 2, 8
    pool = PagePool(1, 600 // page, page, kv_heads, dim, dtype=torch.float32, device=torch.device("cpu"))
    pool.k.normal_()
    pool.v.normal_()
    tree = RadixTree(pool)
    trunk = [draw.randrange(9) for _ in range(64)]
    running = []
    for _ in range(9):
        tokens = trunk[: draw.choice([0, 16, 40, 64])] + [draw.randrange(9) for _ in range(draw.randrange(1, 30))]
        sequence = tree.match(tokens[:-1])
        tree.reserve(sequence, len(tokens))
        pool.append(sequence, len(tokens) - sequence.length)
        tree.insert(tokens, sequence)
        running.append(sequence)
    running.append(pool.fork(running[0]))
    pool.append(running[-1], 1)
    p = Attention("decode", len(running), 1, 128, heads, kv_heads, dim, torch.float32, Causal(), "paged", page)
    lengths = [s.length for s in running]
    plan = plan_cascade(p, [s.pages for s in running], lengths, H200)
    check(plan, p, [s.pages for s in running], lengths)
    assert plan.shared
    q = torch.randn(len(running), 1, heads, dim)
    table = PagedKV(pool.k[0], pool.v[0], pool.table(running), torch.tensor(lengths, dtype=torch.int32))
    low = onchip.paged_attention(q, table, kernel="reference")
    truth = onchip.paged_attention(q.double(), table._replace(k=table.k.double(), v=table.v.double()), kernel="reference")
    cache = PagedKV(pool.k[0], pool.v[0], *plan.table(torch.device("cpu")))
    out = cascade_attention(q[plan.order], cache, plan.levels(torch.device("cpu")))
    assert_as_good_as_torch(out, low[plan.order], truth[plan.order])
    levels = plan.levels(torch.device("cpu"), rows=16)  # as a graph of 16 rows has them, six of which are nobody's
    for level in levels:
        nodes, width = level.page_table.shape
        assert all(n & (n - 1) == 0 for n in (nodes, width, level.parts)) and level.longest in (2, 4, 8, 16)
        if level.offsets is not None:
            assert level.offsets.diff().max() <= level.longest and level.offsets[-1] == 16 * level.parts
            assert all(level.lengths[(level.offsets <= row).sum() - 1] == 0 for p in range(level.parts) for row in range(16 * p + 10, 16 * p + 16))
    wider = [torch.nn.functional.pad(t, (0, 0, 0, 6)[-2 * t.ndim :]) for t in cache[2:]]
    out = cascade_attention(torch.cat((q[plan.order], q[:6])), PagedKV(*cache[:2], *wider), levels)
    assert_as_good_as_torch(out[:10], low[plan.order], truth[plan.order])
    assert not out[10:].isnan().any()
    for sequence in running:
        pool.release(sequence)
    tree.clear()
    assert pool.num_free == pool.num_pages


def test_page_lists_are_left_alone():
    pages, lengths = fan([(8, 512, 2)])
    before = [list(row) for row in pages]
    plan = plan_cascade(problem(8), [PageList(row).pages for row in pages], lengths, H200)
    plan.own[0][0].append(7)
    plan.shared[0][0].pages.append(7)
    assert pages == before


def test_a_device_of_torchs_and_lists_of_different_lengths():
    pages, lengths = fan([(2, 64, 1)])
    assert plan_cascade(problem(2), pages, lengths, torch.device("cpu")).order == [0, 1]
    for some in (lengths[:1], []):
        with pytest.raises(ValueError, match=rf"^plan_cascade: 2 lists of pages and {len(some)} lengths; give one of each a sequence"):
            plan_cascade(problem(2), pages, some, H200)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lengths": [33, 40]}, "sequence 0 has length 33 and 2 pages of 16 tokens; give a whole number, 0 to 32, or all of its pages"),
        ({"lengths": [32, -1]}, "sequence 1 has length -1 and 4 pages of 16 tokens; give a whole number, 0 to 64"),
        ({"lengths": [32, 40.0]}, "sequence 1 has length 40.0 and"),
        ({"problem": problem(2, page=0)}, "problem is decode over pages of 0 tokens; give an Attention over pages, of 1 token or more each"),
        ({"problem": None}, "problem is a NoneType; give an Attention"),
        ({"device": "cpu"}, "device is 'cpu'; give a torch.device, or a Device"),
        ({"most": 1.5}, "most is 1.5; give a whole number, 0 or more"),
        ({"most": "a"}, "most is 'a'; give a whole number, 0 or more"),
    ],
    ids=str,
)
def test_what_cannot_be_planned(wrong, words):
    """Keys that a sequence has no pages for would be read from page 0, another's."""
    given = {"problem": problem(2), "pages": [[1, 2], [3, 4, 5, 6]], "lengths": [32, 64], "device": H200} | wrong
    with pytest.raises((ValueError, TypeError), match=f"^plan_cascade: {words}"):
        plan_cascade(**given)
