"""Who runs: first come, first served within a priority, in chunks, as pages, the batch and the budget allow; and who gives way."""

import pytest
import torch

from onchip.cache.paged import PagePool
from onchip.cache.radix import RadixTree
from onchip.engine.request import Request, SamplingParams
from onchip.engine.scheduler import AHEAD, Scheduler, Unshared
from onchip.engine.text import StopText


def request(prompt=3, limit=5, priority=0, token=1, samples=1) -> Request:
    made: list[Request] = []
    for _ in range(samples):
        made.append(Request([token] * prompt, SamplingParams(), 0, limit, StopText(None, ()), priority, samples=made))
    return made[0]


def scheduler(pages=8, page=4, max_batch=3, budget=100, tree=Unshared) -> Scheduler:
    pool = PagePool(1, pages, page, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    return Scheduler(pool, tree(pool), max_batch, budget)


def add(s: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for r in requests:
        s.add(*r.samples)
    return requests


def run(s: Scheduler) -> list[tuple[Request, int, bool]]:
    """A step whose tokens are all read at once."""
    work = s.plan()
    for r, count, last in work:
        assert len(r.pages.pages) * s.pool.page >= r.pages.length + count
        r.pages.length += count
        if last:
            r.tokens.append(7)
            if count > 1:
                s.prompt_done(r)
    for r in [w.request for w in work if len(w.request.tokens) >= w.request.limit]:
        r.reason = "length"
        s.end(r)
    return [tuple(w) for w in work]


def test_a_request_from_prompt_to_end():
    s = scheduler()
    (r,) = add(s, request(6, 3))
    assert run(s) == [(r, 6, True)] and s.running == [r] and not s.waiting
    assert run(s) == [(r, 1, True)] and run(s) == [(r, 1, True)] and r.reason == "length"
    assert s.plan() == [] and s.pool.num_free == 8


def test_the_batch_is_full():
    s = scheduler(pages=100)
    a, b, c, d, e = add(s, *(request() for _ in range(5)))
    assert [w[0] for w in run(s)] == [a, b, c] and s.waiting == [d, e]
    b.reason = "stop"
    s.end(b)
    assert run(s) == [(a, 1, True), (c, 1, True), (d, 3, True)]


def test_the_pool_is_full_and_nobody_overtakes():
    s = scheduler(pages=5)
    first, large, small = add(s, request(10, 8), request(12, 8), request(1, 1))
    assert run(s) == [(first, 10, True)] and s.waiting == [large, small]
    s.end(first)
    assert [w[0] for w in run(s)] == [large]  # 12 tokens, and 8 to come


def test_prompts_in_chunks_beside_decodes():
    """What decodes has its token in every step; the rest of the budget goes to prompts in their order."""
    s = scheduler(pages=100, max_batch=4, budget=10)
    a, b, c = add(s, request(9), request(17), request(1))
    assert run(s) == [(a, 9, True), (b, 1, False)]
    assert run(s) == [(a, 1, True), (b, 9, False)]
    assert run(s) == [(a, 1, True), (b, 7, True), (c, 1, True)]
    assert run(s) == [(a, 1, True), (b, 1, True), (c, 1, True)]


def test_pages_come_as_needed():
    s = scheduler(pages=100, page=16, budget=200)
    (r,) = add(s, request(16, 500))
    run(s)
    assert len(r.pages.pages) == 1 + AHEAD // 16
    for _ in range(AHEAD + 1):
        run(s)
    assert len(r.pages.pages) == 1 + 2 * AHEAD // 16


def test_the_latest_gives_way_and_comes_back():
    """Two that both fit at first: the second waits again when the first needs its pages, and finds its own where nobody took them."""
    s = scheduler(pages=34, page=4, tree=RadixTree)
    a, b = add(s, request(4, 100), request(4, 100, token=2))
    run(s)
    while b in s.running:
        run(s)
    assert s.preemptions == 1 and s.waiting == [b] and b.reason is None and not b.pages.pages and len(b.tokens) == 65
    while b.reason is None:
        run(s)
    assert a.reason == "length" and len(b.tokens) == 100 and b.cached_tokens == 0
    s.cache.clear()
    assert s.pool.num_free == 34


def test_priority():
    """The higher runs first, and takes the place of a lower one."""
    s = scheduler(pages=100, max_batch=2)
    low, mid = add(s, request(priority=0), request(priority=1))
    run(s)
    (high,) = add(s, request(priority=2))
    assert run(s) == [(mid, 1, True), (high, 3, True)] and s.waiting == [low]
    assert run(s) == [(high, 1, True), (mid, 1, True)]


def test_priority_over_pages():
    s = scheduler(pages=6, page=4)
    (low,) = add(s, request(8, 8))
    run(s)
    (high,) = add(s, request(16, 4, priority=1))
    assert run(s) == [(high, 16, True)] and s.waiting == [low] and low.tokens == [7]


def test_what_is_known_is_not_computed_again():
    s = scheduler(pages=50, tree=RadixTree)
    (a,) = add(s, request(11))
    run(s)
    b, c = add(s, request(11), request(9))
    assert run(s) == [(a, 1, True), (b, 3, True), (c, 1, True)]
    assert (a.cached_tokens, b.cached_tokens, c.cached_tokens) == (0, 8, 8)
    assert a.pages.pages[:2] == b.pages.pages[:2] == c.pages.pages[:2]


def test_samples_wait_for_the_prompt_and_share_its_pages():
    s = scheduler(pages=50, max_batch=4, tree=RadixTree)
    first, other = add(s, request(9, samples=3), request(2))
    assert run(s) == [(first, 9, True), (other, 2, True)]
    second, third = first.samples[1:]
    assert run(s) == [(first, 1, True), (other, 1, True), (second, 1, True), (third, 1, True)]
    assert s.running == [first, second, third, other]  # in the order in which they came
    assert first.pages.pages[:2] == second.pages.pages[:2] == third.pages.pages[:2]


def test_samples_go_on_without_the_first():
    s = scheduler(pages=50)
    (first,) = add(s, request(9, samples=2))
    first.reason = "cancelled"
    s.end(first)
    assert run(s) == [(first.samples[1], 9, True)]


def test_a_token_on_its_way_is_counted():
    """No step for a request whose last token is on its way, and one for a token after it elsewhere."""
    s = scheduler()
    _, b = add(s, request(3, 1), request(3, 2))
    for r, count, _ in s.plan():
        r.pages.length += count
        r.pending += 1
    assert [tuple(w) for w in s.plan()] == [(b, 1, True)]


@pytest.mark.parametrize("tree", [Unshared, RadixTree])
def test_ended_wherever_it_is(tree):
    s = scheduler(tree=tree)
    a, b, c, d = add(s, *(request(token=i) for i in range(4)))
    run(s)
    for r in (d, b, a, c, c):
        s.end(r)
    s.cache.clear()
    assert not s.waiting and not s.running and s.pool.num_free == 8


def test_shared_pages_count_once():
    """Nobody gives way while there is room; a page of many holders is one page, and so is one that who comes finds."""
    s = scheduler(pages=29, max_batch=8, tree=RadixTree)
    add(s, request(40))
    run(s)
    low = add(s, *(request(40) for _ in range(4)))
    run(s)
    assert sum(len(r.pages.pages) for r in s.running) > s.pool.num_pages and s.pool.num_free == 5
    (high,) = add(s, request(3, priority=1, token=2))
    run(s)
    assert s.preemptions == 0 and len(high.tokens) == 1
    (other,) = add(s, request(45, 1, priority=1))
    run(s)
    assert s.preemptions == 0 and len(other.tokens) == 1 and all(r in s.running for r in low)


def test_nobody_gives_way_in_vain():
    s = scheduler(pages=20)
    high, low, _ = add(s, request(40, 8, priority=1), request(8, 8), request(4, 4))
    run(s)
    (more,) = add(s, request(40, 8, priority=1))
    while high.reason is None:
        assert low.reason or low in s.running
        run(s)
    assert s.preemptions == 0
    run(s)
    assert more.tokens and s.preemptions == 0


def test_as_few_give_way_as_it_takes():
    s = scheduler(pages=12, max_batch=4)
    low = add(s, *(request(8, 8) for _ in range(3)))
    run(s)
    (high,) = add(s, request(13, 3, priority=1))
    run(s)
    assert s.running == [high, *low[:2]] and s.waiting == [low[2]]


def test_prompts_apart_take_turns_with_decodes():
    """Nobody's next token waits for more than one step of prompts."""
    s = scheduler(pages=400, max_batch=8, budget=16)
    s.apart = True
    (first,) = add(s, request(3, 50))
    run(s)
    add(s, *(request(60) for _ in range(5)))
    while s.waiting:
        had = len(first.tokens)
        steps = [run(s), run(s)]
        assert len(first.tokens) == had + 1 and sorted(any(w[1] > 1 for w in step) for step in steps) == [False, True]
    assert first.reason is None
