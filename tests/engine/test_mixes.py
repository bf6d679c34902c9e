"""Requests of every kind at once: nobody's tokens change, no page is lost or used twice, and everyone ends once, with a reason."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

import tiny
from onchip.cache import sharing
from onchip.cache.paged import PagePool
from onchip.engine.draft import DraftModel, NGram
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.setup import PrefixCache

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
PAGE = PagePool.bytes_per_page(2, 16, 1, 16, torch.float32) / 2**30  # GiB
MOST = 8  # new tokens
PROMPTS = [[(7 * i + same) % 290 for i in range(length)] + [length] for same in range(3) for length in (0, 15, 31, 36)]
PARAMS = [
    SamplingParams(ignore_eos=True),
    SamplingParams(ignore_eos=True, stop_token_ids=range(0, 300, 20)),
    SamplingParams(ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(ignore_eos=True, temperature=1.5, top_k=20, seed=3, logit_bias={5: 3.0, 250: -2.0}),
]


DRAWN = SamplingParams(ignore_eos=True, temperature=0.7, top_p=0.9)
MIX = {  # kinds of requests, and their log-probabilities; where guesses are to be made mostly such that nobody keeps the batch from it
    False: (PARAMS, [None, None, 2]),
    True: ([PARAMS[0], PARAMS[1], DRAWN] * 5 + PARAMS[2:], [None] * 15 + [2]),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("small"), **SMALL)


@pytest.fixture(scope="module")
def alone(folder):
    """What a request gets by itself, without a prefix cache, each computed once."""
    llm, known = LLM(folder, dtype="fp32", device="cpu", max_batch=1, prefix_cache=None), {}

    def run(prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
        seed = seed if params.temperature else 0  # who draws nothing has the same tokens with any
        key = (tuple(prompt), repr(how := replace(params, max_tokens=MOST, n=1, seed=seed, logprobs=None, prompt_logprobs=None)))
        if key not in known:
            known[key] = llm.generate([prompt], how)[0].tokens
        return known[key][: params.max_tokens]

    return run


class Allowed:
    """A mask of one out of three tokens, that moves; it breaks at token 13."""

    def __init__(self, words: int):
        self.words, self.last = words, 0

    def fill(self, row):
        row.copy_(bits([t for t in range(self.words * 32) if t % 3 == self.last % 3], self.words))

    def accept(self, token):
        assert token % 3 == self.last % 3, "a token that the mask forbids"
        if token % 13 == 0:
            raise ValueError("unlucky")
        self.last = token


def bits(tokens: list[int], words: int) -> torch.Tensor:
    flags = torch.zeros(words, 32, dtype=torch.int64)
    flags.view(-1)[torch.tensor(tokens)] = 1
    packed = (flags << torch.arange(32)).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def some_request(rng: random.Random, llm: LLM):
    """A prompt that may begin like others, with parameters of any kind."""
    kinds, logprobs = MIX[llm.runner.speculation is not None]
    params = replace(
        rng.choice(kinds), max_tokens=rng.randrange(MOST), n=rng.choice([1, 1, 1, 2]), logprobs=rng.choice(logprobs),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )  # fmt: skip
    request = llm.request(rng.choice(PROMPTS), params, priority=rng.choice([0, 0, 1, 2]))
    if params.n == 1 and rng.random() < 0.1:
        request.mask = Allowed(-(-300 // 32))
    return request


def check_pages(llm: LLM) -> None:
    """Each page is held by whom it says, and what is written next is nobody else's."""
    pool, running = llm.pool, llm.scheduler.running
    holders = Counter(page for r in running for page in r.pages.pages)
    holders.update(page for node in getattr(llm.tree, "_here", ()) for page in node.pages)
    assert [pool.holders(page) for page in range(pool.num_pages)] == [holders[page] for page in range(pool.num_pages)]
    assert pool.num_free == pool.num_pages - len(holders)
    for r in running:
        at = r.pages.length // pool.page
        assert all(pool.holders(page) == 1 for page in r.pages.pages[at:])


def draft_of(folder, seed: int):
    """What guesses in a mix, if anything does, and how many times the memory a page then takes."""
    near = folder.parent / "near"
    if seed == 8 and not near.exists():
        tiny.near(folder, near, 0.1)
    return {7: (NGram(3, 2, 1, matches=4), 1), 8: (DraftModel(near, 3, choices=(3, 2)), 2), 9: (DraftModel(folder, 4, most_rows=4), 2)}.get(seed, (None, 1))


@pytest.mark.parametrize("seed", range(11))
def test_any_mix(folder, alone, seed, monkeypatch):
    """500 mixes in all, 50 a seed (25 with a second model), of requests that come and go, in a cache that holds two or three of them; where a page is shared
    it is read once."""
    monkeypatch.setattr(sharing, "CPU", tiny.SHARED)
    rng = random.Random(seed)
    draft, times = draft_of(folder, seed)
    llm = LLM(
        folder, dtype="fp32", device="cpu", max_batch=rng.choice([2, 5, 8]), cache_gib=times * PAGE * rng.choice([5, 8, 12.5]),
        prefix_cache=[None, PrefixCache(), PrefixCache(host_gib=20.5 * PAGE * times)][seed % 3], step_tokens=rng.choice([18, 40, 300]), draft=draft,
    )  # fmt: skip
    if seed in (1, 4, 7):
        tiny.as_graphs(llm.runner)
    llm.ahead, llm.scheduler.apart = seed % 2 == 0, seed in (3, 4, 8)
    for pool in llm.pool.storage:
        pool.fill_(torch.nan)
    checked = 0
    for _ in range(50 // times):
        coming = [some_request(rng, llm) for _ in range(rng.randrange(1, 4))]
        everyone = [s for r in coming for s in r.samples]
        tokens, texts, ends = ({s: [] for s in everyone} for _ in range(3))
        if rng.random() < 0.1:
            break_once(llm)
        for _ in range(2000):
            if coming and rng.random() < 0.4:
                llm.add(coming.pop())
            if rng.random() < 0.05:
                llm.cancel(rng.choice(everyone))
            for event in llm.step():
                assert not ends[event.request], "an event after the end"
                tokens[event.request] += event.tokens
                texts[event.request].append(event.text)
                if event.request.reason is not None:
                    ends[event.request].append(event.request.reason)
                if event.tokens and event.request.params.logprobs is not None:
                    assert [found.token for found in event.logprobs] == event.tokens and len(event.logprobs[0].top) == 2
            check_pages(llm)
            if llm.idle and not coming:
                break
        for s in everyone:
            assert s.reason is not None and tokens[s] == s.tokens and "".join(texts[s]) == s.text.text
            assert ends[s] == ([] if s.reason == "cancelled" else [s.reason])
            if s.mask is None:
                expected = alone(s.prompt, s.params, s.seed)
                whole = len(s.tokens) == min(len(expected), s.limit)  # whoever has all tokens has no error, and the other way round
                assert s.tokens == expected[: len(s.tokens)] and (s.reason == "cancelled" or not s.limit or whole != s.reason.startswith("error"))
                checked += 1
            if s.params.prompt_logprobs is not None and s.reason in ("stop", "length"):
                assert [found and found.token for found in s.completion().prompt_logprobs] == [None, *s.prompt[1:]]
        assert llm.idle and llm.pool.num_free + llm.tree.num_pages == llm.pool.num_pages
    assert bool(llm.runner.padded.graphs) == (seed in (1, 4, 7))
    assert checked > 80 // times and (llm.stats.drafted_tokens > 30 or draft is None)
    if seed == 9:  # the model itself guesses: it is right wherever it has read all that came before
        assert llm.stats.accepted_tokens == llm.stats.drafted_tokens
    if draft is None or seed % 3 == 0:  # small batches guess instead
        assert (llm.stats.cascade_steps > 0) == (seed % 3 > 0)
    llm.tree.clear()
    assert llm.pool.num_free == llm.pool.num_pages


def break_once(llm: LLM) -> None:
    """The next forward pass runs out of memory."""
    forward = llm.model.forward

    def fail(*args):
        llm.model.forward = forward
        raise torch.OutOfMemoryError("planted")

    llm.model.forward = fail
