"""First come, first served, as pages, the batch and a prefill's size allow."""

import pytest
import torch

from onchip.cache.paged import OutOfPages, PagePool
from onchip.engine.request import Request, SamplingParams, StopText
from onchip.engine.scheduler import Scheduler


def request(prompt=3, limit=5) -> Request:
    return Request([1] * prompt, SamplingParams(), 0, limit, StopText(None, ()))


def scheduler(pages=8, page=4, max_batch=3, max_prefill=100) -> Scheduler:
    return Scheduler(PagePool(1, pages, page, 1, 1, dtype=torch.float32, device=torch.device("cpu")), max_batch, max_prefill)


def add(s: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for r in requests:
        s.add(r)
    return requests


def test_a_request_gets_pages_for_all_it_may_become():
    s = scheduler()
    (r,) = add(s, request(3, 6))
    assert s.admit() == [r] and s.running == [r] and not s.waiting
    assert len(r.pages.pages) == 3 and r.pages.length == 0 and s.pool.num_free == 5


def test_the_batch_is_full():
    s = scheduler(pages=100)
    requests = add(s, *(request() for _ in range(5)))
    assert s.admit() == list(requests[:3]) and list(s.waiting) == list(requests[3:])
    assert s.admit() == []
    requests[1].reason = "stop"
    assert s.retire() and s.admit() == [requests[3]]
    assert s.running == [requests[0], requests[2], requests[3]]


def test_the_pool_is_full_and_nobody_overtakes():
    s = scheduler(pages=5)
    first, large, small = add(s, request(4, 8), request(4, 8), request(1, 1))
    assert s.admit() == [first]
    assert s.admit() == [] and list(s.waiting) == [large, small]
    first.reason = "length"
    s.retire()
    assert s.pool.num_free == 5
    assert s.admit() == [large, small]


def test_a_prefill_is_bounded_but_one_always_fits():
    s = scheduler(pages=100, max_batch=10, max_prefill=8)
    a, b, c, d = add(s, request(5), request(3), request(1), request(20))
    assert s.admit() == [a, b]
    assert s.admit() == [c]
    assert s.admit() == [d]


def test_the_last_page_counts():
    s = scheduler(pages=2)
    (r,) = add(s, request(3, 5))
    assert s.admit() == [r] and s.pool.num_free == 0


def test_a_request_that_can_never_run():
    s = scheduler(pages=2)
    with pytest.raises(OutOfPages, match="a prompt of 3 tokens and 6 new ones exceed the cache's 8; give fewer max_tokens or a larger cache_gib"):
        s.add(request(3, 6))
    assert not s.waiting


def test_retire_of_nobody():
    s = scheduler()
    add(s, request())
    s.admit()
    assert not s.retire() and len(s.running) == 1


def test_clear_gives_everything_back():
    s = scheduler(pages=4)
    requests = add(s, request(), request(), request())
    s.admit()
    assert s.waiting and s.running
    s.clear()
    assert not s.waiting and not s.running and s.pool.num_free == 4
    assert all(not r.pages.pages for r in requests)
    s.clear()
    assert s.pool.num_free == 4
