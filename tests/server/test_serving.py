"""The engine's thread: every request ends once, whatever fails; what is full says so; health tells the truth."""

import asyncio
import gc
import math
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from live import PATIENCE

import onchip
import tiny
from onchip.cache.paged import OutOfPages
from onchip.engine.request import Event, TokenLogProbs
from onchip.server.serving import Job, Overloaded, Piece, Serving


class StubRequest(SimpleNamespace):
    """A request of `length` tokens; one of None cannot be added."""

    def __init__(self, length: float | None):
        super().__init__(prompt=[1, 2, 3], tokens=[], length=length, reason=None, cached_tokens=0, first_token_at=0.0)
        self.samples = [self]

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class StubLLM:
    """As much of an LLM as a server uses: each step brings each of the first `batch` requests a token. `fail` is raised by the next step, `hold` keeps it
    where `entered` says that it is."""

    recovers = True

    def __init__(self, batch: int = 4):
        self.batch, self.fail, self.hold, self.entered = batch, None, threading.Event(), threading.Event()
        self.device = SimpleNamespace(type="cpu")
        self.pool, self.stats = SimpleNamespace(num_pages=8, num_free=8), SimpleNamespace(kernels={"sample": "stub"}, drafted_tokens=0, accepted_tokens=0)
        self.scheduler = SimpleNamespace(waiting=[], running=[])
        self.hold.set()

    def close(self) -> None:
        pass

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def add(self, request: StubRequest) -> None:
        if request.length is None:
            raise OutOfPages("too long")
        self.scheduler.waiting.append(request)

    def cancel(self, request: StubRequest) -> None:
        request.reason = request.reason or "cancelled"
        for queue in (self.scheduler.waiting, self.scheduler.running):
            if request in queue:
                queue.remove(request)

    def step(self) -> list[Event]:
        self.entered.set()
        assert self.hold.wait(PATIENCE)
        s = self.scheduler
        room = self.batch - len(s.running)
        s.running, s.waiting = s.running + s.waiting[:room], s.waiting[room:]
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        for request in s.running:
            request.tokens.append(len(request.tokens))
            request.reason = "length" if len(request.tokens) == request.length else None
        events = [Event(request, f"{request.tokens[-1]} ", request.tokens[-1:]) for request in s.running]
        s.running = [request for request in s.running if request.reason is None]
        return events


def run(test, **options):
    """`await test(serving, llm)` beside a running engine thread."""

    async def main():
        llm, before = StubLLM(), (sys.getswitchinterval(), 0, gc.get_threshold())
        serving = Serving(llm, **options)
        serving.start()
        assert gc.get_threshold()[0] >= 10_000  # a large body is not looked over for garbage again and again
        try:
            await asyncio.wait_for(test(serving, llm), PATIENCE)
        finally:
            llm.hold.set()
            await serving.stop()
        after = sys.getswitchinterval(), gc.get_freeze_count(), gc.get_threshold()
        assert not serving._thread.is_alive() and after == before  # the process is as it was

    asyncio.run(main())


async def all_of(job: Job) -> tuple[dict[int, str], dict[int, str]]:
    """The texts and reasons of a job's requests; a second reason would be an error."""
    texts, reasons = {}, {}
    async for piece in job.pieces():
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        if piece.reason is not None:
            assert piece.index not in reasons
            reasons[piece.index] = piece.reason
    return texts, reasons


def test_many_jobs_at_once_each_get_their_own():
    async def test(serving, llm):
        jobs = [serving.submit([StubRequest(n), StubRequest(n + 1)]) for n in range(1, 41)]
        for n, (texts, reasons) in enumerate(await asyncio.gather(*map(all_of, jobs)), 1):
            assert texts == {i: "".join(f"{t} " for t in range(n + i)) for i in (0, 1)}
            assert reasons == {0: "length", 1: "length"}
        assert serving.metrics.ended == {"stop": 0, "length": 80, "cancelled": 0, "error": 0}
        assert not (serving._lives or serving._fresh or serving._live)
        assert serving.metrics.new_tokens == sum(2 * n + 1 for n in range(1, 41))

    run(test)


def test_a_full_queue_turns_away_and_takes_again():
    async def test(serving, llm):
        llm.hold.clear()  # nothing ends
        jobs = [serving.submit([StubRequest(1)]) for _ in range(10_000)]
        with pytest.raises(Overloaded, match="10000 requests wait or run, and this server takes 10000"):
            serving.submit([StubRequest(1)])
        for job in jobs[100:]:
            job.close()
        llm.hold.set()
        ends = await asyncio.gather(*map(all_of, jobs[:100]))
        assert all(reasons == {0: "length"} for _, reasons in ends)
        while serving._live:  # those that were closed end too
            await asyncio.sleep(0.01)
        assert (await all_of(serving.submit([StubRequest(1)])))[1] == {0: "length"}
        assert llm.idle and serving.metrics.refused == 1

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [OutOfPages("no page is left"), RuntimeError("CUDA out of memory"), ValueError("Overflow when unpacking long long")])
def test_a_failed_step_ends_what_it_ran_and_nothing_else(error):
    async def test(serving, llm):
        llm.hold.clear()
        running = serving.submit([StubRequest(50) for _ in range(4)])
        waiting = serving.submit([StubRequest(3) for _ in range(4)])
        llm.fail = error
        llm.hold.set()
        failed, fine = await asyncio.gather(all_of(running), all_of(waiting))
        assert all(reason.startswith("error: a step of the engine failed") and str(error) in reason for reason in failed[1].values())
        assert len(failed[1]) == 4
        assert fine[1] == dict.fromkeys(range(4), "length")
        assert serving.trouble() is None

    run(test)


def test_a_request_that_cannot_be_added_ends_alone():
    async def test(serving, llm):
        _, reasons = await all_of(serving.submit([StubRequest(None), StubRequest(2)]))
        assert reasons == {0: "error: too long", 1: "length"}

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_ends_everything_and_health_says_so():
    async def test(serving, llm):
        llm.hold.clear()
        jobs = [serving.submit([StubRequest(9)])]
        assert await asyncio.to_thread(llm.entered.wait, PATIENCE)
        jobs += [serving.submit([StubRequest(9)]) for _ in range(6)]  # the engine is in a step: these are in its inbox when it dies
        late = asyncio.ensure_future(serving.between_steps(lambda: 1))
        await asyncio.sleep(0)
        llm.fail = SystemExit("a bug beyond all others")
        llm.hold.set()
        for job in jobs:
            assert (await all_of(job))[1] == {0: "error: the engine has stopped"}
        serving._thread.join(10)
        with pytest.raises(Overloaded, match="engine has stopped"):
            await late
        assert "thread has ended" in serving.trouble()
        with pytest.raises(Overloaded, match="has to be started again"):
            serving.submit([StubRequest(1)])

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_only_fails_gives_up():
    async def test(serving, llm):
        for reason in [*["error: a step of the engine failed (RuntimeError: broken)"] * 3, "error: the engine has stopped"]:
            assert serving.trouble() is None
            llm.fail = RuntimeError("broken")
            assert (await all_of(serving.submit([StubRequest(2)])))[1] == {0: reason}
        assert "thread has ended" in serving.trouble()

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_of_several_ranks_gives_up_at_once():
    """The other ranks wait for the sums of a step that has failed here."""

    async def test(serving, llm):
        llm.recovers, llm.fail = False, RuntimeError("broken")
        assert (await all_of(serving.submit([StubRequest(2)])))[1] == {0: "error: the engine has stopped"}
        assert "thread has ended" in serving.trouble()

    run(test)


def test_a_stuck_engine_is_no_healthy_one():
    async def test(serving, llm):
        llm.hold.clear()
        job = serving.submit([StubRequest(2)])
        while serving.trouble() is None:
            await asyncio.sleep(0.01)
        assert "stuck" in serving.trouble()
        llm.hold.set()
        assert (await all_of(job))[1] == {0: "length"}
        while serving.trouble():
            await asyncio.sleep(0.01)

    run(test, stuck_after=1.5)  # an idle engine shows itself once a second


def test_closing_ends_a_job_and_frees_it_once():
    async def test(serving, llm):
        job, other = serving.submit([StubRequest(math.inf), StubRequest(math.inf)]), serving.submit([StubRequest(5)])
        async for _ in job.pieces():
            break
        job.close()
        job.close()
        assert (await all_of(other))[1] == {0: "length"}
        while serving._live:
            await asyncio.sleep(0.005)
        assert llm.idle and serving.metrics.ended["cancelled"] == 2

    run(test)


def test_calls_between_steps():
    async def test(serving, llm):
        job = serving.submit([StubRequest(400)])
        assert await serving.between_steps(threading.get_ident) == serving._thread.ident
        for call, error in ((lambda: int("x"), ValueError), (lambda: {}["x"], KeyError)):
            with pytest.raises(error):
                await serving.between_steps(call)
        assert (await all_of(job))[1] == {0: "length"}

    run(test)


def test_calls_and_steps_take_turns():
    """Callers that always have a next call ready do not keep steps waiting, nor later callers."""

    async def test(serving, llm):
        done = []

        async def caller():
            while not done:
                await serving.between_steps(lambda: time.sleep(0.003))

        callers = [asyncio.ensure_future(caller()) for _ in range(3)]
        assert (await all_of(serving.submit([StubRequest(20)])))[1] == {0: "length"}
        gate = threading.Event()
        waiting = [
            asyncio.ensure_future(serving.between_steps(call)) for call in (lambda: gate.wait(PATIENCE), *(lambda i=i: done.append(i) for i in range(5)))
        ]
        await asyncio.sleep(0)
        waiting[3].cancel()  # whoever asked has gone: it is not done
        gate.set()
        await asyncio.gather(*callers, *waiting[:3], *waiting[4:])
        assert done == [0, 1, 3, 4] and waiting[3].cancelled()

    run(test)


def test_a_client_that_does_not_read_costs_an_append():
    async def test(serving, llm):
        job = Job(serving, [StubRequest(1)], 0.0)
        begin = time.thread_time()
        for _ in range(30_000):
            job.put(Piece(0, "some text, ", [TokenLogProbs(1, -1.0, [])]))
        job.put(Piece(0, "", None, "length"))
        assert time.thread_time() - begin < 1
        [piece] = [piece async for piece in job.pieces()]
        assert (len(piece.text), len(piece.logprobs), piece.reason) == (11 * 30_000, 30_000, "length")

    run(test)


def test_room_is_claimed_before_a_call_is_read():
    async def test(serving, llm):
        with serving.claim(2) as arrived:
            with pytest.raises(Overloaded, match="2 requests wait or run, and this server takes 3"), serving.claim(2):
                pass
            await asyncio.sleep(0.1)
            job = serving.submit([StubRequest(2), StubRequest(2)], arrived)
        assert (await all_of(job))[1] == {0: "length", 1: "length"}
        assert serving.metrics.stats()["first_token_ms"]["p50"] >= 100  # its reading included
        with serving.claim(3):
            assert serving.metrics.refused == 2

    run(test, max_queued=3)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ahead", [True, False])
def test_what_ends_in_a_step_that_fails_ends_once(ahead, tmp_path):
    """Of the real engine: the one that has ended keeps its answer, the one that the step ran says why, and the next is right."""
    llm = onchip.LLM(tiny.save(tmp_path / "tiny"), device="cpu")
    llm.ahead = ahead
    params = onchip.SamplingParams(max_tokens=5, ignore_eos=True)
    expected = llm.generate("why wait", params)[0].text

    class Mask:
        """Fails in the step whose launch fails, unless steps run ahead: then that step reads the last token."""

        left = 6 if ahead else 3

        def fill(self, row):
            self.left -= 1
            if not self.left:
                raise ValueError("no token fits")
            row.fill_(-1)

        def accept(self, token):
            pass

    async def test():
        serving = Serving(llm)
        serving.start()
        ends, runs = llm.request("why wait", params), llm.request("the quick", onchip.SamplingParams(max_tokens=100, ignore_eos=True))
        ends.mask, launch = Mask(), llm.runner.launch

        def failing(work):
            if ends.reason is not None and runs.reason is None:
                raise RuntimeError("planted")
            return launch(work)

        llm.runner.launch = failing
        jobs = [serving.submit([request]) for request in (ends, runs)]
        (text, reason), (_, other) = await asyncio.wait_for(asyncio.gather(*map(all_of, jobs)), PATIENCE)
        assert "planted" in other[0]
        assert (text[0], reason[0]) == (expected, "length") if ahead else reason[0].endswith("no token fits")
        assert (await asyncio.wait_for(all_of(serving.submit([llm.request("why wait", params)])), PATIENCE))[0] == {0: expected}
        assert not serving._live and not serving._lives and llm.idle
        await serving.stop()

    asyncio.run(test())


def test_the_middle_of_an_answer_is_gathered():
    """Its first and its last text do not wait."""

    async def test(serving, llm):
        step = llm.step
        llm.step = lambda: (time.sleep(0.002), step())[1]
        pieces = [piece async for piece in serving.submit([StubRequest(20)]).pieces()]
        assert len(pieces) <= 2 and "".join(piece.text for piece in pieces).split() == [str(i) for i in range(20)]

    run(test, each=60.0)


def test_a_silent_engine_is_heard_of():
    async def test(serving, llm):
        llm.hold.clear()
        job = serving.submit([StubRequest(1)])
        silences = 0
        async for piece in job.pieces(patience=0.02):
            silences += piece is None
            if silences == 2:
                llm.hold.set()
        assert silences >= 2

    run(test)
