"""Nothing compiles while people wait: an engine's own steps over requests that nobody made, before the first of those that somebody did.

Which kernels a step wants depends on how many rows decode, on how many prompts of which lengths come beside them, and on what its requests want. So rounds
go through these, twice. First launches are withheld (`kernels.compiling`), which takes the host 5 ms a step: what they ask for is compiled by threads. Then
the rounds that asked for something run, and with them the graph of each batch-size bucket is captured.
Steps with chunks of few tokens are padded (`padded.py`), so that one round of each size stands for all.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip.engine.padded import SIZES, Captured
from onchip.engine.request import Request, SamplingParams
from onchip.engine.runner import BUCKETS, Runner
from onchip.engine.stats import Stats
from onchip.kernels.compiling import compilations, withheld

if TYPE_CHECKING:
    from onchip.engine.llm import LLM

LENGTHS = (1, 3, 6, 11, 16, 24, 40, 100, 200, 400, 800, 1700, 3500, 7000)  # tokens of a prompt, where nobody decodes: tiles change between them
COUNTS = (1, 5, 40)  # prompts that come together
BESIDE = (1, 3, 8, 32, 128)  # requests that decode meanwhile, and all that there may be
SHORT = 4  # tokens of a prompt that is there to decode
PREFIXES = (512, 2048, 8192)  # tokens that all requests of a batch have in common
READERS = (2, 9, 20, 33, 80)  # of them, and all that there may be
NONE = -1
TURNS = ((0, NONE), (0, 1), (0, 1, 2, 3), tuple(range(8)))  # of prefixes, where not all have the same; of the longest prefix the first alone


class Warmed(NamedTuple):
    """What a warm-up did: seconds in all, kernels that were compiled, and that were found compiled, rounds that ran, graphs that were captured."""

    seconds: float
    compiled: int
    loaded: int
    rounds: int
    graphs: int

    def __str__(self):
        return f"{self.compiled} kernels compiled, {self.loaded} loaded, {self.graphs} graphs captured in {self.seconds:.1f} s"


class Round(NamedTuple):
    """Prompts of so many tokens that come together, while so many other requests decode; `new` tokens of each, and what all of them want.

    prefix   tokens that they begin with, and the others: those of the prefixes `turn`, one after the other; NONE is no prefix.
    oldest   tokens of the first one's prompt of the others.
    """

    lengths: tuple[int, ...]
    beside: int = 0
    new: int = 1
    params: SamplingParams = SamplingParams()
    masked: bool = False
    prefix: int = 0
    turn: tuple[int, ...] = (0,)
    oldest: int = SHORT

    @property
    def plain(self) -> bool:
        """Whether its steps are those of most requests, for which graphs stay."""
        return not self.prefix and not self.masked and dataclasses.replace(self.params, adapter=None) == SamplingParams()


class Once:
    """Stands for the graph of a step that has run: there is nothing to repeat."""

    def replay(self) -> None:
        pass


class Anything:
    """A mask under which every token may follow."""

    def fill(self, row: Tensor) -> None:
        row.fill_(-1)

    def accept(self, token: int) -> None:
        pass


def warm(llm: "LLM") -> Warmed:
    """Compile and capture what requests will want, and leave no trace of it but that. Only an idle engine can be warmed up: else ValueError."""
    if not llm.idle:
        raise ValueError("warm: requests wait or run; warm an engine up before the first of them")
    if llm.device.type != "cuda":
        return Warmed(0.0, 0, 0, 0, 0)  # nothing compiles
    start, compiled, loaded = time.perf_counter(), compilations.compiled, compilations.loaded
    todo, runner, numbers = list(rounds(llm)), llm.runner, itertools.count()
    if llm.model.parallel.of == 1:  # several ranks wait for each other's sums
        with withheld() as asked, sketched(runner):
            known, found = 0, []
            for one in run(llm, todo, numbers):
                if one.new > 1 or (len(asked) > known and one.plain):  # others have nothing to leave but what is compiled
                    found.append(one)
                known = len(asked)
        todo = found
        llm.tree.clear()
    ran = sum(1 for _ in run(llm, todo, numbers))
    llm.forget()
    llm.stats, llm.scheduler.preemptions = Stats(kernels=llm.stats.kernels), 0
    torch.cuda.synchronize(llm.device)
    return Warmed(time.perf_counter() - start, compilations.compiled - compiled, compilations.loaded - loaded, ran, len(runner.graphs))


def rounds(llm: "LLM") -> Iterator[Round]:
    """Those that an engine of this size can run, each in a step or a few."""
    most, budget = _most(llm), llm.scheduler.budget
    longest = min(llm.max_len, (llm.pool.num_pages - 1) * llm.pool.page - llm.scheduler.room) - 2
    if most < 1 or longest < SHORT:
        return
    sizes = [size for size in BUCKETS if size < most]
    adapters = [name for name in llm.model.adapters.names if name][:1] if llm.model.adapters else []
    for params in (SamplingParams(), *(SamplingParams(adapter=name) for name in adapters)):
        for size in (*sizes, most):
            yield Round((SHORT,) * size, new=2, params=params)
        padded = 0 if params.adapter else llm.runner.padded.most  # up to so many tokens a step is one of a few sizes
        for size, below in zip(SIZES, (0, *SIZES), strict=False):
            total = min(size, budget)
            parts = -(-total // longest)
            if below < total and size <= padded and parts < most:
                yield Round(((total - 1) // parts,) * parts, 1)
        rounds = [Round((length,) * count, params=params) for count in COUNTS for length in LENGTHS]
        decodes = sorted({*BESIDE, most - 1})
        powers = [(count, 1 << n) for count, least in zip(COUNTS, (13, 10, 7), strict=True) for n in range(least)]  # what the longest of a step counts as
        rounds += [Round((length,) * count, beside, params=params) for beside in decodes for count, length in powers]
        rounds += [Round((1 << n,), beside, params=params, oldest=longest // 2) for beside in (1, most // 2) for n in range(9)]
        for one in rounds:
            if one.beside + len(one.lengths) <= most and one.lengths[0] <= longest and padded < one.beside + sum(one.lengths) <= budget:
                yield one
        if longest > budget:
            yield Round((budget + SHORT,), 0, params=params)  # a chunk behind another
    room = llm.pool.num_pages // 2
    for prefix in PREFIXES:
        for count in sorted({*READERS, most - 1}):
            if count < most and prefix + 100 <= longest and prefix // llm.pool.page + (count + 1) * llm.pool.pages_for(100 + 64) <= room:
                yield from (Round((prefix + own,), count, prefix=prefix) for own in (SHORT, 100))
                yield from (Round((prefix + SHORT,), count, prefix=prefix, turn=turn) for turn in TURNS[: 1 if prefix == PREFIXES[-1] else None])
    wants = [{"presence_penalty": 0.5}, {"logit_bias": {0: 1.0}}]
    for some in itertools.chain.from_iterable(itertools.combinations(wants, n) for n in range(3)):
        for masked in (False, True):
            yield Round((min(20, longest),), params=SamplingParams(**dict(itertools.chain.from_iterable(map(dict.items, some)))), masked=masked)
    for wanted in ({"logprobs": 1}, {"prompt_logprobs": 1}):
        yield Round((min(20, longest),), params=SamplingParams(**wanted))


def run(llm: "LLM", todo: Iterable[Round], numbers: Iterator[int]) -> Iterator[Round]:
    """Each round, when its last token is there. `numbers` are of requests: no two begin with the same page, but for a prefix."""
    others: list[Request] = []
    there = None
    for one in todo:
        if there != (asked := (one.beside, one.prefix, one.turn, one.oldest)) or any(sample.reason for request in others for sample in request.samples):
            _end(llm, others)
            there = asked
            firsts = [Round((), prefix=0 if which == NONE else one.prefix, turn=(which,)) for which in one.turn]
            if one.prefix:
                _start(llm, [_request(llm, numbers, one.prefix, 1, first) for first in firsts if first.prefix])
            counts = [len(range(i, one.beside - 1, len(firsts))) for i in range(len(firsts))]
            others = [_request(llm, numbers, firsts[0].prefix + one.oldest, llm.max_len, firsts[0])][: one.beside]
            others += [_request(llm, numbers, first.prefix + SHORT, llm.max_len, first, n) for first, n in zip(firsts, counts, strict=True) if n > 0]
            _start(llm, others)
            for _ in range(2 if others else 0):
                llm.step()
        made = [_request(llm, numbers, length, one.new, one) for length in one.lengths]
        _start(llm, made)
        while any(request.reason is None for request in made):
            llm.step()
        if failed := next((request.reason for request in made if request.reason.startswith("error")), None):
            raise RuntimeError(f"warm: a step of the warm-up failed: {failed}")
        yield one
    _end(llm, others)


def _start(llm: "LLM", requests: list[Request]) -> None:
    """Until each sample has a token."""
    for request in requests:
        llm.add(request)
    while any(not (sample.tokens or sample.reason) for request in requests for sample in request.samples):
        llm.step()


def _end(llm: "LLM", requests: list[Request]) -> None:
    for request in requests:
        llm.cancel(request)
    while not llm.idle:
        llm.step()


def _request(llm: "LLM", numbers: Iterator[int], length: int, new: int, one: Round, samples: int = 1) -> Request:
    vocab, number = llm.config.vocab, next(numbers)
    ids = ([one.turn[0]] * one.prefix + [number % vocab, number // vocab % vocab] + [1] * length)[:length]
    request = llm.request(ids, dataclasses.replace(one.params, max_tokens=new, ignore_eos=True, seed=0, n=samples))
    request.mask = Anything() if one.masked else None
    return request


def _most(llm: "LLM") -> int:
    """Requests that decode at once, a page or a few of each."""
    each = llm.pool.pages_for(SHORT + 64 + llm.scheduler.room)
    return min(llm.scheduler.max_batch, llm.pool.num_pages // each)


@contextmanager
def sketched(runner: Runner) -> Iterator[None]:
    """A model whose layers stand for those like them, and whose products by torch do nothing: results hold anything.

    Tokens stay those that were there, since no kernel advances them, and all that torch takes for an index is the host's. Guesses are not: nobody guesses.
    No graph is there before or after: one of steps that ran would launch what is withheld, at places that nobody wrote, and those made here repeat nothing.
    """
    runner.thin(graphs=True)
    linear, model, speculation = torch.nn.functional.linear, runner.model, runner.speculation
    layers, config = model.layers, model.config
    few = max(config.masks.index(mask) for mask in config.masks) + 1  # up to the first of the last kind
    few = min(max(few, 2), len(layers))  # the norm of the second one has a residual
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))
    model.layers, model.config, runner.speculation = layers[:few], dataclasses.replace(config, layers=few), None
    runner._captured = lambda run: Captured(Once(), run())
    try:
        yield
    finally:
        torch.nn.functional.linear, model.layers, model.config, runner.speculation = linear, layers, config, speculation
        del runner._captured
        runner.thin(graphs=True)
