"""How each row of the serving suite is measured. A function a row: (engines, row) -> figures, made one by one, so that those before an error are kept."""

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from onchip.bench import serve_peers as peers
from onchip.bench.failures import noted
from onchip.bench.serve_engines import Engines, Load, Row, warm, weights_read
from onchip.core.problem import SHORT
from onchip.engine.llm import LLM
from onchip.engine.request import Request, SamplingParams
from onchip.engine.runner import Launched
from onchip.kernels.compiling import compilations

Figures = Iterator[tuple[str, float]]
SHARES = (0.5, 0.8, 0.95)  # of saturation
STEPS, SETTLE = 100, 20  # steps whose host time is read, and those before
REPEATS = 3
PREFIX, OWN, ANSWER = 8192, 128, 64  # tokens: of the prefix, of a request behind it, and of its answer
EMPTY, KNOWN, EACH, NONE = "all at once, cache empty", "prefix in the cache", "prefix in the cache, read for each", "no prefix cache"


def run(engines: Engines, llm: LLM, prompts: list[list[int]], params: Sequence[SamplingParams]) -> tuple[float, int]:
    """Seconds and tokens of `generate`. Raises RuntimeError where a request did not get all of its tokens."""
    engines.wait()
    start = time.perf_counter()
    done = llm.generate(prompts, params)
    engines.wait()
    seconds = time.perf_counter() - start
    for found, p in zip(done, params, strict=True):
        if len(found.tokens) != p.max_tokens:
            raise RuntimeError(f"a request got {len(found.tokens)} of its {p.max_tokens} tokens: {found.reason}")
    return seconds, sum(len(found.tokens) for found in done)


# ---- throughput


def protocol(engines: Engines, row: Row) -> Figures:
    llm = engines.of(row)
    warm(llm, row.load)
    seconds, tokens = run(engines, llm, *row.load.draw(llm.config.vocab))
    yield "token/s", tokens / seconds
    yield "tokens", tokens
    yield "seconds", seconds
    yield "preemptions", llm.stats.preemptions


def batch_one(engines: Engines, row: Row) -> Figures:
    """As gpt-fast counts: new tokens over all of the time, the prompt's included."""
    llm = engines.of(row)
    yield "token/s", (rate := _median(engines, llm, *row.load.draw(llm.config.vocab)))
    yield "share of weights over bandwidth", rate * weights_read(llm.config, llm.dtype.itemsize) / engines.bandwidth


def _median(engines: Engines, llm: LLM, prompts: list, params: list) -> float:
    """Tokens a second, after a run that nobody times."""
    run(engines, llm, prompts, params)
    return statistics.median(tokens / seconds for seconds, tokens in (run(engines, llm, prompts, params) for _ in range(REPEATS)))


def batch_one_beside(engines: Engines, row: Row) -> Figures:
    """The same, and a compiled loop on the same shape."""
    figures = dict(batch_one(engines, row))
    yield from figures.items()
    llm = engines.of(row)
    dtype, (prompts, params) = llm.dtype, row.load.draw(llm.config.vocab)
    del llm
    engines.free()
    with noted(engines.errors, peers.COMPILED):
        rate = peers.compiled_loop(row.model, dtype, engines.device, prompts[0], params[0].max_tokens, REPEATS)
        yield f"{peers.COMPILED}, token/s", rate
        yield "times the compiled loop", figures["token/s"] / rate


def beside_transformers(engines: Engines, row: Row) -> Figures:
    """Requests whose answers are equally long, since `generate_batch` takes one length for all."""
    llm = engines.of(row)
    warm(llm, row.load)
    prompts, params = row.load.draw(llm.config.vocab)
    seconds, tokens = run(engines, llm, prompts, params)
    yield "token/s", (ours := tokens / seconds)
    dtype = llm.dtype
    del llm
    engines.free()
    with noted(engines.errors, peers.CONTINUOUS):
        rate = peers.continuous_batching(row.model, dtype, engines.device, prompts, params[0])
        yield f"{peers.CONTINUOUS}, token/s", rate
        yield "times transformers", ours / rate


def at_once(engines: Engines, row: Row) -> Figures:
    """A batch on a CPU: answers equally long, so that `generate` of transformers computes no token in vain but its padding."""
    llm = engines.of(row)
    prompts, params = row.load.draw(llm.config.vocab)
    llm.generate(prompts[:2], params[0])
    yield "threads", torch.get_num_threads()
    dtype, rates = llm.dtype, {"onchip": [], peers.GENERATE: []}
    theirs = peers.padded_batch(row.model, dtype, engines.device, prompts, params[0].max_tokens)
    for _ in range(REPEATS):  # in turns
        llm.tree.clear()
        seconds, tokens = run(engines, llm, prompts, params)
        rates["onchip"].append(tokens / seconds)
        rates[peers.GENERATE].append(theirs())
    ours, other = (statistics.median(found) for found in rates.values())
    yield f"token/s in {SHORT[dtype]}", ours
    yield f"{peers.GENERATE}, token/s", other
    yield "times transformers", ours / other


# ---- one prefix


def shared_prefix(engines: Engines, row: Row) -> Figures:
    """First with nothing in the cache, then with the prefix of requests that came before, the same when each reads it for itself, and then on an engine
    without a prefix cache."""
    rates = {}
    for cached in (True, False):
        llm = engines.of(row) if cached else engines.of(row, prefix_cache=None)
        other, prefix = (Load(1, (PREFIX, PREFIX), row.load.new).draw(llm.config.vocab, seed)[0][0] for seed in (1, 0))
        warm(llm, row.load)
        for seed in (5, 6) if cached else (5,):  # another prefix, new and then known: kernels and graphs of what such requests share
            prompts, params = row.load.draw(llm.config.vocab, seed)
            run(engines, llm, [other + own for own in prompts], params if cached else [dataclasses.replace(p, max_tokens=2) for p in params])
        llm.tree.clear()
        most = llm.runner.cascade.most
        for seed, what in ((2, EMPTY), (3, KNOWN), (4, EACH)) if cached else ((3, NONE),):
            prompts, params = row.load.draw(llm.config.vocab, seed)
            llm.runner.cascade.most = 0 if what == EACH else most
            seconds, tokens = run(engines, llm, [prefix + own for own in prompts], params)
            yield f"token/s, {what}", tokens / seconds
            rates[what] = tokens / seconds
            if what == KNOWN:
                yield "prompt tokens from the cache", llm.stats.cached_tokens / llm.stats.prompt_tokens
                yield "decodes that read it once", llm.stats.cascade_steps
        llm.runner.cascade.most = most
        del llm
    yield "times no prefix cache", rates[KNOWN] / rates[NONE]
    yield "times a prefix read for each", rates[KNOWN] / rates[EACH]


# ---- under load


class Timing(NamedTuple):
    """Of one request, in seconds since the first could have come: when it came, and when its first and its last token were there."""

    came: float
    first: float
    last: float
    tokens: int


def arrive(llm: LLM, requests: list[Request], times: Sequence[float]) -> list[Timing]:
    """Add each request when its time has come, and step; in one thread, so a request that comes during a step is added after it, which counts as waiting."""
    first, last, queue = {}, {}, 0
    start = time.perf_counter()
    while queue < len(requests) or not llm.idle:
        now = time.perf_counter() - start
        while queue < len(requests) and times[queue] <= now:
            llm.add(requests[queue])
            queue += 1
        if llm.idle:
            time.sleep(max(0.0, min(times[queue] - now, 1e-3)))
            continue
        events = llm.step()
        now = time.perf_counter() - start
        for event in events:
            if event.request.reason and event.request.reason.startswith("error"):
                raise RuntimeError(f"a request ended: {event.request.reason}")
            first.setdefault(event.request, now)
            last[event.request] = now
    return [Timing(at, first[r], last[r], len(r.tokens)) for r, at in zip(requests, times, strict=True)]


def under_load(engines: Engines, row: Row) -> Figures:
    """Saturation is what the engine finishes a second with all requests there at once, over the middle half of them; then they come as a Poisson process.
    All that was compiled before is what a server's start compiles."""
    llm = engines.of(row)
    warmed = llm.warm()
    yield "warm-up, s", warmed.seconds
    yield "kernels compiled in it", warmed.compiled
    compiled = compilations.compiled
    made = _requests(llm, row.load, 0)
    ends = sorted(timing.last for timing in arrive(llm, made, [0.0] * len(made)))
    quarter = len(ends) // 4
    most = (len(ends) - 2 * quarter) / (ends[-quarter - 1] - ends[quarter])
    yield "saturation, request/s", most
    for seed, share in enumerate(SHARES, 1):
        llm.tree.clear()
        drawn = random.Random(seed)
        times = list(itertools.accumulate(drawn.expovariate(share * most) for _ in range(row.load.requests)))
        found = arrive(llm, _requests(llm, row.load, seed), times)
        waits = [timing.first - timing.came for timing in found]
        each = [(timing.last - timing.first) / (timing.tokens - 1) for timing in found if timing.tokens > 1]
        for what, seconds in (("TTFT", waits), ("time per token", each)):
            for percent in (50, 99):
                yield f"{share:.0%}: {what} p{percent}, ms", 1e3 * percentile(seconds, percent)
    yield "kernels compiled under load", compilations.compiled - compiled


def _requests(llm: LLM, load: Load, seed: int) -> list[Request]:
    return [llm.request(prompt, p) for prompt, p in zip(*load.draw(llm.config.vocab, seed), strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


# ---- the host


@contextmanager
def waiting() -> Iterator[list[float]]:
    """[seconds that the host has waited for the device's results]: counts as long as the context lasts."""
    waited, wait = [0.0], Launched.wait

    def timed(launched: Launched):
        start = time.perf_counter()
        if launched.done is not None:
            launched.done.synchronize()
        waited[0] += time.perf_counter() - start
        return wait(launched)

    Launched.wait = timed
    try:
        yield waited
    finally:
        Launched.wait = wait


def host_time(engines: Engines, row: Row) -> Figures:
    """Steps of a batch in which nobody comes and nobody ends, each less what it waited for the device."""
    llm = engines.of(row)
    requests = _requests(llm, row.load, 0)
    for request in requests:
        llm.add(request)
    while any(len(request.tokens) < SETTLE and not request.reason for request in requests):
        llm.step()
    host, whole = [], []
    with waiting() as waited:
        for _ in range(STEPS):
            before, start = waited[0], time.perf_counter()
            llm.step()
            whole.append(time.perf_counter() - start)
            host.append(whole[-1] - (waited[0] - before))
    if any(request.reason for request in requests):
        raise RuntimeError(f"a request ended within {SETTLE + STEPS} steps; give longer answers")
    for request in requests:
        llm.cancel(request)
    while not llm.idle:
        llm.step()
    yield "host, us a step", 1e6 * statistics.median(host)
    yield "host p90, us a step", 1e6 * percentile(host, 90)
    yield "us a step", 1e6 * statistics.median(whole)
