"""Which requests run in the next step, and with how many tokens: continuous batching with a budget of tokens (Orca, Yu et al., 2022; chunks of prompts
beside decodes after Sarathi-Serve, Agrawal et al., 2024).

A request is admitted when there are pages for all of its prompt, and gets those of its answer as it grows. Where none is left the request that ranks
lowest (least priority, then latest) gives its pages to the prefix cache and waits again: what nobody else took of them, or what went to the host,
it finds there when it is its turn.
"""

import bisect
import itertools
from typing import NamedTuple

from onchip.cache.paged import OutOfPages, PageList, PagePool
from onchip.cache.radix import RadixTree
from onchip.engine.draft import Guesses
from onchip.engine.request import Request

AHEAD = 64  # tokens a growing sequence gets pages for at once where there are enough: its page table changes once in so many steps


class Work(NamedTuple):
    """So many next tokens of a request; `last`: with all that there are, so that a new one comes of it."""

    request: Request
    count: int
    last: bool

    @property
    def prompt(self) -> bool:
        """Whether this is a chunk of a prompt, or all of it."""
        return self.count > 1 or not self.last or not self.request.pages.length


class Unshared:
    """In place of a prefix tree: nothing is known, nothing is kept."""

    num_pages = 0

    def __init__(self, pool: PagePool):
        self.reserve, self.pool = pool.reserve, pool

    def match(self, tokens: list[int]) -> PageList:
        return PageList()

    def insert(self, tokens: list[int], sequence: PageList) -> None:
        pass

    def finish(self, tokens: list[int], sequence: PageList) -> None:
        self.pool.release(sequence)

    def clear(self) -> None:
        pass


class Scheduler:
    """Waiting and running requests, both in the order of their rank.

    max_batch   requests that run at once.        budget   tokens of a step: one for each that decodes, the rest for chunks of prompts.
    chunk       0, or: how each token is computed depends on its request alone. Prompts come in chunks of so many tokens from their first one on, and
                never beside decodes; whole chunks are all that the prefix cache learns; and a request is admitted with pages for all it may become,
                since tokens of an answer that came back as a prompt would be computed in another way.
    draft       how many tokens more a step may write, and a request have pages for.
    """

    def __init__(self, pool: PagePool, cache: RadixTree | Unshared, max_batch: int, budget: int, chunk: int = 0, draft: Guesses | None = None):
        self.chunk = chunk
        self.drafted, self.room = (draft.places, draft.room) if draft else (0, 0)
        self.apart = chunk > 0 or pool.format is not None  # prompts without decodes: few kernels read codes for chunks, and prompts alone need not read any
        self.pool, self.cache, self.max_batch, self.budget = pool, cache, max_batch, max(budget, max_batch + max(chunk, pool.page))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self._orders = itertools.count()
        self._held: dict[Request, list[Request]] = {}  # samples that wait for the first of their prompt
        self._stuck: Request | None = None  # the first that waits, for which there was no room when it was looked for last
        self._prompted = False  # whether the last step, of prompts apart, left out those who decode
        self._steady: list[Work] = []  # the last plan, where it may hold for the next step: nobody came or went since
        self._calm = 0  # for how many steps it holds for certain

    # ---- in and out

    def add(self, *requests: Request) -> None:
        """Queue the samples of a prompt: the first at once, the others when the first one's prompt is computed."""
        for request in requests:
            request.order = next(self._orders)
        self._steady, self._calm = [], 0
        for first in requests[:1]:
            self._held[first] = list(requests[1:])
            bisect.insort(self.waiting, first, key=Request.rank.fget)

    def end(self, request: Request) -> None:
        """Forget a request, wherever it is; its pages are the prefix cache's, and free for others."""
        if request in self.running:
            self.running.remove(request)
            self.cache.finish(self._learnt(request), request.pages)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._stirred()
        self._bring_samples(request)

    def awaits(self, request: Request) -> bool:
        """Whether its prompt is not done: its last chunk may be one token, which looks like a decode."""
        return request in self._held

    def prompt_done(self, request: Request) -> None:
        """Its prompt is computed, or about to be before anything that is launched later: others may begin from it."""
        self.cache.insert(self._learnt(request), request.pages)
        self._stirred()
        self._bring_samples(request)

    def _learnt(self, request: Request) -> list[int]:
        """What the prefix cache may know of a request."""
        return request.keyed()[: len(request.prompt) // self.chunk * self.chunk] if self.chunk else request.keyed()

    def _bring_samples(self, first: Request) -> None:
        """Queue what waits for `first`."""
        for request in self._held.pop(first, ()):
            if request.reason is None:
                bisect.insort(self.waiting, request, key=Request.rank.fget)

    def _stirred(self) -> None:
        """Who runs, or what pages are free, has changed."""
        self._stuck, self._steady, self._calm = None, [], 0

    # ---- a step

    def plan(self) -> list[Work]:
        """The work of the next step, pages reserved; [] where there is none. The same list as long as the same requests decode, in the same pages."""
        if self._calm:
            self._calm -= 1
            return self._steady
        if self._steady and self._holds():
            return self._steady
        self._make_way()
        work: list[Work] = []
        chunks = self.budget - len(self.running)  # tokens left for prompts
        for request in list(self.running):
            left = request.left
            if not left or not request.pages.pages or (left > 1 and chunks < 1):
                continue  # its last token is on its way, it has just been preempted, or it is not its turn
            count = self._count(request, left, chunks + 1)
            if count and self._grown(request, count):
                chunks -= count - 1
                work.append(Work(request, count, count == left))
        work += self._admit(chunks)
        prompts = [w for w in work if w.prompt]
        if prompts and self.apart:  # turn by turn, so that nobody's next token waits for all prompts
            decodes = [w for w in work if not w.prompt]
            self._prompted = not (self._prompted and decodes)
            return prompts if self._prompted else decodes
        self._prompted = False
        still = work and not prompts and (not self.waiting or self.waiting[0] is self._stuck)
        self._steady = work if still else []
        if still:
            self._holds()
        return work

    def _holds(self) -> bool:
        """Whether the last plan, of requests that decode, holds for this step, now that who had filled its pages has more; and for how many after it.
        Where somebody got pages it is another list."""
        calm, each, page, grown = AHEAD, self.drafted + 1, self.pool.page, False
        for request, _, _ in self._steady:
            tokens = request.limit - len(request.tokens) - request.pending
            pages = request.pages
            room = len(pages.pages) * page - pages.length - self.drafted * request.pending
            if room < each:
                if not self._grown(request, 1) or not self._steady:  # somebody had to give way
                    return False
                room, grown = len(pages.pages) * page - pages.length - self.drafted * request.pending, True
            if tokens < 1:  # its last one is on its way
                return False
            calm = min(calm, room, tokens)
        self._calm = max(0, calm // each - 1)
        if grown:
            self._steady = list(self._steady)
        return True

    def _count(self, request: Request, left: int, most: int) -> int:
        """Tokens of the next chunk, of the `left` that are to be computed; 0 where it has to be a whole one and `most` are fewer."""
        if not self.chunk:
            return min(left, most)
        whole = min(left, self.chunk - request.pages.length % self.chunk)
        return whole if whole <= most else 0

    def _make_way(self) -> None:
        """Let the lowest of those with less priority than the first that waits wait themselves, as many as it takes; nobody where all are too few."""
        first, running = self.waiting[0] if self.waiting else None, self.running
        lower = [r for r in running if first and r.priority < first.priority]
        if not lower or self.chunk or first.pending or first is self._stuck:
            return
        known = first.keyed()
        found = PageList() if first.scores else self.cache.match(known[:-1])
        room = self.pool.num_pages - self.pool.pages_for(self._ahead(first, len(known))) + len(found.pages)
        held, stay = set(found.pages), len(running) - len(lower)  # what several hold counts once, and what nobody holds can be evicted
        self.pool.release(found)
        held.update(page for r in running[:stay] for page in r.pages.pages)
        if len(held) > room:
            return
        for r in lower:
            held.update(r.pages.pages)
            if stay + 1 >= self.max_batch or len(held) > room:
                break
            stay += 1
        for r in reversed(running[stay:]):
            self.preempt(r)

    def _grown(self, request: Request, count: int) -> bool:
        """Pages for `count` more tokens, if need be those of requests that rank lower; False where the request itself had to go."""
        pages = request.pages
        count += self.drafted * (request.pending + 1)
        if count <= len(pages.pages) * self.pool.page - pages.length:
            return True
        ahead = self._ahead(request, pages.length)
        if self.pool.missing(pages, ahead) <= self.pool.num_free:
            self.pool.reserve(pages, ahead)
            return True
        while True:
            try:
                self.cache.reserve(pages, pages.length + count)
                return True
            except OutOfPages:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    return False

    def _ahead(self, request: Request, length: int) -> int:
        """Tokens to have pages for at `length`."""
        most = len(request.prompt) + request.limit + self.room
        return most if self.chunk else min(length + AHEAD, most)

    def preempt(self, request: Request) -> None:
        """Let a running request wait again; what is known of it stays in the prefix cache as long as nobody needs the pages."""
        self.running.remove(request)
        self.cache.finish(request.keyed(), request.pages)
        request.seated = False
        bisect.insort(self.waiting, request, key=Request.rank.fget)
        self.preemptions += 1
        self._stirred()

    def _admit(self, chunks: int) -> list[Work]:
        """The first of those that wait, as far as batch, pages and budget go."""
        work: list[Work] = []
        while self.waiting and chunks > 0:
            request = self.waiting[0]
            if request is self._stuck or request.pending:
                break
            if not self._seated(request):
                self._stuck = request
                break
            self.waiting.pop(0)
            bisect.insort(self.running, request, key=Request.rank.fget)
            if count := self._count(request, request.left, chunks):
                chunks -= count
                work.append(Work(request, count, count == request.left))
        return work

    def _matched(self, tokens: list[int]) -> PageList:
        """What the prefix cache knows of tokens, in whole chunks."""
        found = self.cache.match(tokens)
        if self.chunk and (over := found.length % self.chunk):
            found.length -= over
            pages = found.length // self.pool.page
            self.pool.drop(found.pages[pages:])
            del found.pages[pages:]
        return found

    def _seated(self, request: Request) -> bool:
        """Give a request a place in the batch, and pages for all that is known of it and `AHEAD` more; False where there are too few."""
        if len(self.running) >= self.max_batch:
            return False
        known = request.keyed()
        if not request.scores:
            request.pages = self._matched(known[:-1])
        try:
            self.cache.reserve(request.pages, self._ahead(request, len(known)))
        except OutOfPages:
            self.pool.release(request.pages)
            return False
        if request.cached_tokens is None:
            request.cached_tokens = request.pages.length
        return True
