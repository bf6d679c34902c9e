"""The engine behind a server: one thread owns the LLM, and asyncio's thread talks to it by a queue.

What the steps bring comes back by `call_soon_threadsafe`, gathered so that the event loop, which an event of a stream costs 40 us, leaves the engine's thread
most of the interpreter's time. Every request ends once, with a `Piece` whose reason is set, whatever happens.
"""

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from onchip.engine.llm import LLM
from onchip.engine.request import Event, Request, TokenLogProbs
from onchip.server.metrics import Metrics

GATHER = 0.010  # seconds that text in the middle of an answer waits at most, or, for many streams ...
EACH = 160e-6  # ... this long for each of them: then their events take a quarter of the time; an answer's first and last text do not wait
FAREWELL = 20.0  # seconds that the last step may take when the server ends
FAILURES = 3  # steps in a row that may fail before the engine gives up
# Python hands the interpreter from one busy thread to another every 5 ms: five decode steps of a small model
SWITCH_INTERVAL = 0.0005
YOUNG = 10_000  # objects until Python looks for garbage among them: every 700, a body of 4 MB of small lists takes 0.22 s to read, not 0.08
SHUT = "the server is shutting down; send the request to another one"
ENDED = "the server was shut down before the answer was complete", "the engine has stopped"  # why an answer is not whole, and another server may help
T = TypeVar("T")


class Overloaded(RuntimeError):
    """No request is taken now: too many wait, the server is shutting down, or its engine has stopped."""


class Piece(NamedTuple):
    """What came for one request of a job since its last piece; the last one has a reason, as `Request.reason` has it."""

    index: int  # of the request in its job
    text: str
    logprobs: list[TokenLogProbs] | None = None
    reason: str | None = None

    @staticmethod
    def joined(pieces: "list[Piece]") -> "Piece":
        """Pieces of one request, in order, as one."""
        logprobs = [one for piece in pieces for one in piece.logprobs or ()]
        told = any(piece.logprobs is not None for piece in pieces)
        return Piece(pieces[0].index, "".join(piece.text for piece in pieces), logprobs if told else None, pieces[-1].reason)


class Job:
    """The requests of one HTTP call, all samples of each, queued by `Serving.submit`. `close` ends what is left; pages are free before the next step."""

    def __init__(self, serving: "Serving", asked: list[Request], arrived: float):
        self.asked, self._serving = asked, serving
        self.requests = [sample for request in asked for sample in request.samples]
        self.arrived, self.closed = arrived, False
        self._left = len(self.requests)
        self._pieces: dict[int, list[Piece]] = {}  # joined where they are taken: a client that does not read costs an append each
        self._wake = asyncio.Event()

    async def pieces(self, patience: float | None = None) -> AsyncIterator[Piece | None]:
        """Pieces as they come, until all requests have ended or the job is closed; None where nothing came for `patience` seconds."""
        while self._left and not self.closed:
            try:
                await asyncio.wait_for(self._wake.wait(), patience)
            except TimeoutError:
                yield None
                continue
            self._wake.clear()
            taken, self._pieces = self._pieces, {}
            for pieces in taken.values():
                piece = Piece.joined(pieces)
                self._left -= piece.reason is not None
                yield piece

    def put(self, piece: Piece) -> None:
        self._pieces.setdefault(piece.index, []).append(piece)
        self._wake.set()

    def close(self) -> None:
        """For a client that has gone or has had its answer; may be called again."""
        if not self.closed:
            self.closed = True
            self._wake.set()
            if self._left:
                self._serving.cancel(self)


@dataclass(eq=False)
class _Life:
    """A request inside the engine, and what of its answer has not been handed over."""

    request: Request
    job: Job
    index: int
    piece: Piece | None = None
    urgent: bool = False  # the piece begins or ends an answer
    first_at: float | None = None


class Serving:
    """An LLM that many coroutines use at once.

    max_queued    requests that may wait or run at a time; with one more `submit` raises Overloaded.
    stuck_after   seconds that a step may take before the engine counts as stuck; the first steps on a GPU compile kernels.
    each          seconds for each stream that text is gathered at least, beyond GATHER.
    """

    def __init__(self, llm: LLM, *, max_queued: int = 10_000, stuck_after: float = 300.0, each: float = EACH):
        self.llm, self.max_queued, self.stuck_after, self.each = llm, max_queued, stuck_after, each
        self.metrics = Metrics(pages=llm.pool.num_pages)
        self._inbox: SimpleQueue = SimpleQueue()
        self._live = self._claimed = 0  # requests that have not ended, and calls' that are being read; of the event loop's thread
        self._ending = self._dead = self.draining = False
        self._thread = threading.Thread(target=self._work, name="onchip-engine", daemon=True)
        self._lives: dict[Request, _Life] = {}  # this and what follows are the engine thread's
        self._fresh: dict[_Life, None] = {}  # those with a piece, in order
        self._flushed = self._beat = time.monotonic()
        self._failures = 0
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future]] = deque()

    # ---- the event loop's side

    def start(self) -> None:
        """Start the engine's thread; the running event loop gets what it brings."""
        self._loop = asyncio.get_running_loop()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, SWITCH_INTERVAL))
        gc.collect()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(max(YOUNG, self._thresholds[0]), *self._thresholds[1:])
        gc.freeze()  # a full collection goes over all that torch and the model are made of: 0.2 to 0.3 s in which no step begins
        self._thread.start()

    def drain(self) -> int:
        """Refuse what comes from now on; answers on their way go on. Returns how many of them are left."""
        self.draining = True
        return self._live + self._claimed

    def end(self) -> int:
        """End what still runs, with a reason that says so, and the engine's thread. Returns how many answers that cuts off."""
        self._ending = True
        self._inbox.put(None)
        return self._live + self._claimed

    async def stop(self) -> None:
        """`end`, and then the engine; the process is as it was before `start`."""
        self.end()
        await asyncio.to_thread(self._thread.join, FAREWELL)
        if not self._thread.is_alive():
            await asyncio.wait_for(asyncio.to_thread(self.llm.close), FAREWELL)
        sys.setswitchinterval(self._interval)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    @contextmanager
    def claim(self, count: int) -> Iterator[float]:
        """Room for `count` requests while they are read, or worked on elsewhere; the time, for `submit`. Raises Overloaded, before any work is done for them;
        ValueError for more than there is ever room for."""
        if count > self.max_queued:
            raise ValueError(f"{count} answers are asked for in one call and this server takes {self.max_queued} at once; send several calls")
        self._check_room(count, self._live + self._claimed)
        self._claimed += count
        try:
            yield time.perf_counter()
        finally:
            self._claimed -= count

    def submit(self, asked: list[Request], arrived: float | None = None) -> Job:
        """Queue the requests of one call, which arrived now or, as `claim` says, before they were read. Raises Overloaded."""
        job = Job(self, asked, time.perf_counter() if arrived is None else arrived)
        self._check_room(len(job.requests), self._live)
        self._live += len(job.requests)
        self._inbox.put((self._add, job))
        return job

    def _check_room(self, count: int, there: int) -> None:
        why = self.trouble()
        if why is None and there + count > self.max_queued:
            why = f"{there} requests wait or run, and this server takes {self.max_queued}; send this one again later"
        if why is not None:
            self.metrics.refused += count
            raise Overloaded(why)

    def cancel(self, job: Job) -> None:
        self._inbox.put((self._cancel, job))

    async def between_steps(self, call: Callable[[], T]) -> T:
        """What `call()` returns or raises in the engine's thread, one call a step. Raises Overloaded."""
        if why := self._broken():  # one that drains goes on with what it has begun
            raise Overloaded(why)
        future = self._loop.create_future()
        self._inbox.put((self._calls.append, (call, future)))
        return await future

    def trouble(self) -> str | None:
        """Why no request can be served; None when all is well."""
        return SHUT if self._ending or self.draining else self._broken()

    def _broken(self) -> str | None:
        if self._ending:
            return SHUT
        if self._dead or not self._thread.is_alive():
            return "the engine's thread has ended; the server's log says why, and it has to be started again"
        silent = time.monotonic() - self._beat
        if silent > self.stuck_after:
            return f"the engine has been in one step for {silent:.0f} s; it is stuck, and has to be started again"
        return None

    def _deliver(self, pairs: list[tuple[Job, Piece]]) -> None:
        for job, piece in pairs:
            self._live -= piece.reason is not None
            job.put(piece)

    def _bury(self, why: str) -> None:
        """End the jobs that the engine's thread has not taken. None comes after them: `submit` asks `_dead` on this thread."""
        while not self._inbox.empty():
            do, given = self._inbox.get() or (None, None)
            if do == self._add:
                self._deliver([(given, Piece(index, "", None, why)) for index in range(len(given.requests))])
            elif do == self._calls.append:
                do(given)
        for _, future in self._calls:
            _settle(future, future.set_exception, Overloaded(why.removeprefix("error: ")))

    # ---- the engine thread's side

    def _work(self) -> None:
        if self.llm.device.type == "cuda":
            torch.cuda.set_device(self.llm.device)  # each thread has a current device of its own
        try:
            while self._take():
                if self._calls:
                    self._call(*self._calls.popleft())
                if not self.llm.idle:
                    self._step()
                self.metrics.watch(self.llm)  # before whoever has an answer can ask
                self._flush()
        finally:  # after a bug too, whose traceback Python prints
            why = f"error: {ENDED[0] if self._ending else ENDED[1]}"
            self._dead = True
            for life in list(self._lives.values()):
                self._end(life, why)
            self._flush()
            self._loop.call_soon_threadsafe(self._bury, why)

    def _take(self) -> bool:
        """Do what the inbox asks for, waiting for it where there is nothing else to do. False: it is time to end."""
        wait = self.llm.idle and not self._calls
        while True:
            self._beat = time.monotonic()
            try:
                command = self._inbox.get(wait, 1.0)
            except Empty:
                self._beat = time.monotonic()
                return True
            if command is None:
                return False
            do, given = command
            do(given)
            wait = False

    def _add(self, job: Job) -> None:
        for index, request in enumerate(job.requests):
            self._lives[request] = _Life(request, job, index)
        for request in job.asked:
            try:
                self.llm.add(request)
            except (ValueError, RuntimeError) as error:  # what the caller asked for, or OutOfPages
                self._stop(request, f"error: {error}")

    def _cancel(self, job: Job) -> None:
        for request in job.asked:
            self._stop(request, "cancelled")

    def _call(self, call: Callable[[], Any], future: asyncio.Future) -> None:
        if future.cancelled():  # whoever waited has gone
            return
        try:
            result, tell = call(), future.set_result
        except Exception as error:  # all of them: it is the caller's, on another thread
            result, tell = error, future.set_exception
        self._loop.call_soon_threadsafe(_settle, future, tell, result)
        self._beat = time.monotonic()

    def _stop(self, request: Request, reason: str) -> None:
        """End all samples of a request that have not ended. Of those that have, the engine has an event yet to bring."""
        self.llm.cancel(request)
        for sample in request.samples:
            if sample in self._lives and sample.reason == "cancelled":
                self._end(self._lives[sample], reason)

    def _step(self) -> None:
        try:
            events = self.llm.step()
        except Exception as error:  # no memory, a kernel that failed, a bug: the engine itself ends what it can blame
            self._give_up(error)
            return
        self._failures = 0
        now = time.perf_counter()
        for event in events:
            if event.request in self._lives:
                self._hear(event, now)
        self.metrics.steps += 1

    def _hear(self, event: Event, now: float) -> None:
        life = self._lives[event.request]
        reason = event.request.reason
        if event.request.first_token_at is not None and life.first_at is None:
            life.first_at, life.urgent = now, True
            self.metrics.began(event.request, now - life.job.arrived)
        self.metrics.new_tokens += len(event.tokens)
        if event.text or event.logprobs is not None or event.tokens:
            self._say(life, Piece(life.index, event.text, event.logprobs))
        if reason is not None:
            if len(event.request.tokens) > 1 and life.first_at is not None:
                self.metrics.token_took((now - life.first_at) / (len(event.request.tokens) - 1))
            self._end(life, reason)

    def _give_up(self, error: Exception) -> None:
        """A step has failed: end the requests that it ran, and keep those that wait. Those that it ended itself are in the events of the next step."""
        self._failures += 1
        if self._failures > FAILURES or not self.llm.recovers:
            raise error
        blamed = [r for r in self.llm.scheduler.running if r in self._lives] or [r for r in self._lives if r.reason is None]
        traceback.print_exception(error)
        for request in blamed:
            self._stop(request, f"error: a step of the engine failed ({type(error).__name__}: {error})")

    def _say(self, life: _Life, piece: Piece) -> None:
        life.piece = piece if life.piece is None else Piece.joined([life.piece, piece])
        self._fresh[life] = None

    def _end(self, life: _Life, reason: str) -> None:
        self._say(life, Piece(life.index, "", None, reason))
        life.urgent = True
        del self._lives[life.request]
        self.metrics.ended[reason.partition(":")[0]] += 1

    def _flush(self) -> None:
        """Hand over the pieces that have waited long enough."""
        now = time.monotonic()
        everything = now - self._flushed >= max(GATHER, self.each * len(self._fresh))
        due = [life for life in self._fresh if everything or life.urgent]
        if not due:
            return
        if everything:
            self._flushed = now
        pairs = [(life.job, life.piece) for life in due]
        for life in due:
            life.piece, life.urgent = None, False
            del self._fresh[life]
        self._loop.call_soon_threadsafe(self._deliver, pairs)


def _settle(future: asyncio.Future, tell: Callable[[Any], None], what: Any) -> None:
    if not future.done():  # whoever waited may have gone
        tell(what)
