"""Which requests run: first come, first served, as pages and the batch allow."""

from collections import deque

from onchip.cache.paged import OutOfPages, PagePool
from onchip.engine.request import Request


class Scheduler:
    """Waiting and running requests. A request is admitted with pages for all it may become, so that none runs out half way."""

    def __init__(self, pool: PagePool, max_batch: int, max_prefill: int):
        self.pool, self.max_batch, self.max_prefill = pool, max_batch, max_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def check(self, request: Request) -> None:
        """Raises OutOfPages for a request that the empty pool could not hold."""
        tokens = len(request.prompt) + request.limit
        if self.pool.pages_for(tokens) > self.pool.num_pages:
            raise OutOfPages(
                f"a prompt of {len(request.prompt)} tokens and {request.limit} new ones exceed the cache's {self.pool.num_pages * self.pool.page}; "
                "give fewer max_tokens or a larger cache_gib"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `check` does."""
        self.check(request)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, its pages returned."""
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.pages)
        elif request in self.waiting:
            self.waiting.remove(request)

    def admit(self) -> list[Request]:
        """The requests to prefill next: those that fit in the batch, the pool and `max_prefill` tokens (one always fits)."""
        admitted, tokens = [], 0
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            total = len(request.prompt) + request.limit
            if self.pool.pages_for(total) > self.pool.num_free or (admitted and tokens + len(request.prompt) > self.max_prefill):
                break
            self.pool.reserve(request.pages, total)
            tokens += len(request.prompt)
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def retire(self) -> bool:
        """Give back the pages of ended requests; True when there were any."""
        ended = [r for r in self.running if r.reason is not None]
        for request in ended:
            self.pool.release(request.pages)
        self.running = [r for r in self.running if r.reason is None]
        return bool(ended)

    def clear(self) -> None:
        """Drop everything, pages returned: for when a run is cut short."""
        for request in self.running:
            self.pool.release(request.pages)
        self.running, self.waiting = [], deque()
