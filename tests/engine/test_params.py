"""What sampling parameters do, against one prompt computed at a time and formulas written out in float64."""

import math
import re

import pytest
import torch

import tiny
from onchip.cache.paged import PageList, PagePool
from onchip.engine import runner
from onchip.engine.draft import NGram
from onchip.engine.grammar import Grammar, GrammarError
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.setup import PrefixCache
from onchip.engine.state import State, Wants
from onchip.models.decoder import Step

PROMPT = [(11 * i + 3) % 320 for i in range(37)]
OTHERS = [[5, 6, 7], list(range(100, 150))]  # run beside, and want nothing
PLAIN = {"max_tokens": 12, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(tiny.save(tmp_path_factory.mktemp("tiny")), dtype="fp32", device="cpu", max_batch=6, step_tokens=30)


@pytest.fixture(scope="module")
def logits(llm):
    """float64 logits after each token of a list."""
    pool = PagePool(2, 8, 16, 2, 16, dtype=torch.float32, device=llm.device)

    def run(tokens: list[int]) -> torch.Tensor:
        sequence, n = PageList(), len(tokens)
        with torch.inference_mode():
            step = Step(torch.tensor(tokens), torch.arange(n), pool.append(sequence, n), offsets=torch.tensor([0, n], dtype=torch.int32), longest=n)
            found = llm.model.logits(llm.model.forward(step, pool)).double()
        pool.release(sequence)
        return found

    return run


def beside(llm, **params):
    """One completion of PROMPT, in a batch of others."""
    asked = [SamplingParams(**PLAIN, **params), *[SamplingParams(**PLAIN)] * 2]
    return llm.generate([PROMPT, *OTHERS], asked)[0]


def greedy(logits, count, adjust) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(adjust(logits(PROMPT + tokens)[-1], tokens).argmax()))
    return tokens


def test_penalties(llm, logits):
    def adjust(x, tokens):
        x = x.clone()
        for t in set(PROMPT + tokens):
            x[t] = x[t] / 1.4 if x[t] > 0 else x[t] * 1.4
        for t in tokens:
            x[t] -= 0.7
        for t in set(tokens):
            x[t] -= 0.9
        return x

    expected = greedy(logits, 12, adjust)
    assert expected != greedy(logits, 12, lambda x, _: x)
    assert beside(llm, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.9).tokens == expected


def test_bias(llm, logits):
    bias = {17: 2.5, 40: -3.0, 200: math.inf, 201: -math.inf}
    few = {17: 2.5, 40: -30.0}

    def adjust(x, _):
        x = x.clone()
        for t, value in few.items():
            x[t] += value
        return x

    assert beside(llm, logit_bias=few).tokens == greedy(logits, 12, adjust)
    assert beside(llm, logit_bias=bias).tokens == [200] * 12


def test_min_tokens_and_stop_tokens(llm, logits):
    free = greedy(logits, 12, lambda x, _: x)
    ends = [free[2], free[5]]
    at = min(free.index(end) for end in ends)
    done = beside(llm, stop_token_ids=ends)
    assert (done.tokens, done.reason) == (free[: at + 1], "stop")
    assert done.text == llm.tokenizer.decode(free[:at])

    def adjust(x, tokens):
        x = x.clone()
        x[ends] += torch.tensor([-math.inf, -math.inf]) if len(tokens) < 7 else torch.tensor([100.0, 0.0])
        return x

    later = greedy(logits, 8, adjust)
    done = beside(llm, stop_token_ids=ends, min_tokens=7, logit_bias={ends[0]: 100.0})
    assert (done.tokens, done.reason) == (later, "stop") and later[7] == ends[0]


def test_min_tokens_and_stop_strings(llm):
    """What ends a text in its first tokens does not where there are to be more of them, but does after these."""
    asked = {"stop": ["o"], "logit_bias": {llm.tokenizer.encode("o")[0]: 100.0}}
    assert [beside(llm, min_tokens=n, **asked).text for n in (0, 1, 7)] == ["", "o", "o" * 7]


def test_logprobs(llm, logits):
    """Of the logits as they are, whatever penalties and a temperature make of them."""
    done = beside(llm, logprobs=3, prompt_logprobs=2, temperature=0.8, seed=4, presence_penalty=1.0)
    truth = logits(PROMPT + done.tokens).log_softmax(-1)
    assert len(done.logprobs) == 12 and len(done.prompt_logprobs) == len(PROMPT) and done.prompt_logprobs[0] is None
    for at, found, count in [(36 + i, f, 3) for i, f in enumerate(done.logprobs)] + [(i, f, 2) for i, f in enumerate(done.prompt_logprobs[1:])]:
        assert found.token == (PROMPT + done.tokens)[at + 1] and found.logprob == pytest.approx(truth[at, found.token].item(), abs=1e-4)
        top = truth[at].topk(count)
        assert [t for t, _ in found.top] == top.indices.tolist() and [x for _, x in found.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert beside(llm, logprobs=0).logprobs[0].top == [] and beside(llm).logprobs is None


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": None}, {"draft": NGram()}, {"batch_invariant": True}], ids=str)
def test_a_prompt_alone_may_fill_the_context(llm, tmp_path, settings):
    """No token comes of it, and its log-probabilities are those that it has beside an answer."""
    own, full = LLM(tiny.save(tmp_path), dtype="fp32", device="cpu", **settings), [(7 * i + 5) % 320 for i in range(128)]
    expected = llm.generate([full[:-1]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    alone, beside = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1, n=2), SamplingParams(**PLAIN)
    for _ in range(2):
        *found, other = own.generate([full, OTHERS[1]], [alone, beside])
        assert [(done.text, done.tokens, done.logprobs, done.reason) for done in found] == [("", [], [], "length")] * 2 and len(other.tokens) == 12
        assert len(found[0].prompt_logprobs) == 128 and found[0].prompt_logprobs == found[1].prompt_logprobs
        assert [one.logprob for one in found[0].prompt_logprobs[1:-1]] == pytest.approx([one.logprob for one in expected[1:]], abs=1e-4)
    forbidden = SamplingParams(max_tokens=0, grammar=Grammar("regex", "a"), logit_bias=dict.fromkeys(range(own.config.vocab), -math.inf))
    assert [done.reason for done in own.generate(["one two"], forbidden)] == ["length"]  # what nobody wants may be forbidden
    own.forget()
    assert own.pool.num_free == own.pool.num_pages
    with pytest.raises(ValueError, match="prompt 0 has 129 tokens, the context is 128, none of them for the answer"):
        own.generate([[*full, 1]], alone)


def test_what_log_probabilities_cost(monkeypatch):
    """All rows of a step become lists at once."""
    rows, calls, tolist = 64, [], torch.Tensor.tolist
    logits, tokens = torch.randn(rows, 50), torch.arange(rows) % 50
    counts = [None if row % 3 == 0 else row % 5 for row in range(rows)]
    found, truth = runner._packed_logprobs(logits, tokens), logits.log_softmax(-1)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: calls.append(x) or tolist(x))
    said = runner._said(found, tokens.tolist(), counts)
    assert len(calls) <= 3
    for row, (one, count) in enumerate(zip(said, counts, strict=True)):
        assert (one is None) == (count is None)
        if one is not None:
            ids = truth[row].topk(count).indices.tolist()
            expected = truth[row, [row % 50, *ids]].tolist()
            assert one.token == row % 50 and [t for t, _ in one.top] == ids and [one.logprob, *(x for _, x in one.top)] == pytest.approx(expected, abs=1e-5)


def test_typical(llm, logits):
    """The tokens whose information is nearest its mean: of a tiny share only one is left, which is not the likeliest."""
    x = logits(PROMPT)[-1].log_softmax(-1)
    nearest = int((x + (x.exp() * x).sum().neg()).abs().argmin())
    done = beside(llm, temperature=1.0, seed=1, typical_p=1e-4)
    assert done.tokens[0] == nearest != int(x.argmax())


def test_samples(llm):
    """As many as asked for, each with the tokens of its own seed, on the pages of one prompt."""
    alone = [llm.generate([PROMPT], SamplingParams(**PLAIN, temperature=1.0, seed=7 + i))[0] for i in range(3)]
    llm.tree.clear()
    three = llm.generate([PROMPT, OTHERS[0]], [SamplingParams(**PLAIN, temperature=1.0, seed=7, n=3), SamplingParams(**PLAIN)])
    assert three[:3] == alone and len(three) == 4
    assert [done.cached_tokens for done in three] == [0, 32, 32, 0]
    assert llm.stats.prompt_tokens == 3 * 37 + 3 and llm.stats.cached_tokens == 64


@pytest.mark.parametrize("length", [21, 33], ids=["of the last chunk", "beyond what is known"])
def test_samples_of_a_prompt_whose_last_chunk_is_one_token_run_together(llm, tmp_path, length):
    params, prompt = SamplingParams(**PLAIN, temperature=1.0, seed=7, n=2), (PROMPT * 2)[:length]
    small = LLM(tiny.save(tmp_path), dtype="fp32", device="cpu", max_batch=4, step_tokens=20)
    whole = llm.generate([prompt], params)
    if length > 21:
        small.generate([prompt[:32]], SamplingParams(max_tokens=1))
    request = small.request(prompt, params)
    small.add(request)
    while not request.tokens:
        small.step()
    small.step()
    assert small.scheduler.running == request.samples
    while not small.idle:
        small.step()
    assert [sample.tokens for sample in request.samples] == [done.tokens for done in whole]


def test_samples_share_what_is_scored(llm):
    one, two = llm.generate([PROMPT], SamplingParams(**PLAIN, temperature=1.0, seed=7, n=2, prompt_logprobs=1))
    assert one.prompt_logprobs == two.prompt_logprobs and len(one.prompt_logprobs) == len(PROMPT)


class Even:
    """Lets even tokens through; wants each to be told of."""

    def __init__(self, fail=None):
        self.accepted, self.fail = [], fail

    def fill(self, row):
        if len(self.accepted) == self.fail:
            raise ValueError("no grammar like this")
        row.fill_(0x55555555)

    def accept(self, token):
        self.accepted.append(token)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_mask(llm, logits, monkeypatch, ahead):
    monkeypatch.setattr(llm, "ahead", ahead)
    request, free, broken = (llm.request(PROMPT, SamplingParams(**PLAIN)) for _ in range(3))
    request.mask, broken.mask = Even(), Even(fail=4)
    for r in (request, free, broken):
        llm.add(r)
    ends = []
    while not llm.idle:
        ends += [event.request.reason for event in llm.step() if event.request is broken and event.request.reason]

    def adjust(x, _):
        x = x.clone()
        x[1::2] = -math.inf
        return x

    assert request.tokens == greedy(logits, 12, adjust) and request.mask.accepted == request.tokens[:-1]
    assert free.tokens == greedy(logits, 12, lambda x, _: x) != request.tokens
    assert broken.tokens == request.tokens[:4] and ends == ["error: the mask of its tokens: no grammar like this"]


@pytest.mark.parametrize("what", [{"stop_token_ids": [320]}, {"logit_bias": {320: 1.0}}])
def test_tokens_past_the_vocabulary(llm, what):
    with pytest.raises(ValueError, match=r"^request: prompt: \w+ has token 320; the vocabulary is 0 to 319"):
        llm.request(PROMPT, SamplingParams(**what))


ENDS = [
    {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
    {"temperature": 1e-5},
    {"temperature": 1e5, "seed": -(2**63)},
    {"temperature": 1.0, "seed": 2**63 - 1, "top_k": 2**31 - 1},
    {"temperature": 1.0, "top_p": 5e-324, "min_p": 1 - 1e-16, "typical_p": 5e-324},
    *[{"repetition_penalty": x, "presence_penalty": y, "frequency_penalty": y} for x, y in ((1e-3, -1e3), (1e3, 1e3))],
    {"logit_bias": {10: 10**30, 11: -(10**30), 12: -math.inf}},
]


def test_parameters_at_their_ends(llm, logits):
    """They run, and harm nobody beside them."""
    asked = [SamplingParams(**{"max_tokens": 4, **how}) for how in ENDS]
    done = llm.generate([PROMPT] * (len(ENDS) + 1), [*asked, SamplingParams(**PLAIN)])
    assert [d.reason for d in done] == ["length"] * len(done) and done[-1].tokens == greedy(logits, 12, lambda x, _: x)
    assert done[1].tokens == done[-1].tokens[:4] == done[4].tokens and done[7].tokens == [10] * 4


def test_a_grammar(llm, logits):
    """Each sample is on a way of its own through it, and nobody beside them is."""
    form = Grammar("regex", "[abc]{2,9}-[0-9]{2}")
    *found, free = llm.generate([PROMPT] * 2, [SamplingParams(30, 1.0, seed=3, n=3, grammar=form), SamplingParams(**PLAIN)])
    assert all(re.fullmatch(form.text, done.text) and done.reason == "stop" for done in found) and len({done.text for done in found}) == 3
    assert free.tokens == greedy(logits, 12, lambda x, _: x)
    (stuck,) = llm.generate([PROMPT], SamplingParams(grammar=Grammar("regex", "a"), logit_bias={llm.tokenizer.encode("a")[0]: -math.inf}))
    assert (stuck.tokens, stuck.reason) == ([], "error: no token is left that both the mask of its tokens and its logit_bias allow")
    with pytest.raises(GrammarError, match="unclosed"):
        llm.generate([PROMPT], SamplingParams(grammar=Grammar("regex", "([")))
    assert llm.idle


def test_a_grammar_without_a_tokenizer(tmp_path):
    silent = LLM(tiny.save(tmp_path, tokenizer=False), device="cpu")
    with pytest.raises(GrammarError, match=r"no tokenizer\.json, and a grammar is about text"):
        silent.generate([PROMPT], SamplingParams(grammar=Grammar("regex", "a")))


# ---- the cache


def test_a_prompt_that_is_known(llm):
    """In whole pages, and never its last token; a second turn finds the first one's answer, too."""
    llm.tree.clear()
    first = llm.generate([PROMPT], SamplingParams(**PLAIN))[0]
    again = llm.generate([PROMPT], SamplingParams(**PLAIN))[0]
    turn = llm.generate([PROMPT + first.tokens + [1, 2]], SamplingParams(**PLAIN))[0]
    assert (first.cached_tokens, again.cached_tokens, turn.cached_tokens) == (0, 32, 48) and first == again
    llm.tree.clear()
    assert llm.generate([PROMPT + first.tokens + [1, 2]], SamplingParams(**PLAIN))[0] == turn


def test_without_a_prefix_cache(llm, tmp_path):
    none = LLM(tiny.save(tmp_path), dtype="fp32", device="cpu", prefix_cache=None)
    for _ in range(2):
        (done,) = none.generate([PROMPT], SamplingParams(**PLAIN))
        assert done == llm.generate([PROMPT], SamplingParams(**PLAIN))[0] and done.cached_tokens == 0 and none.pool.num_free == none.pool.num_pages


def test_what_gives_way_comes_back_from_the_host(llm, tmp_path):
    """A cache too small for two requests and what they knew: pages go to the host and come back, tokens stay the same."""
    page = PagePool.bytes_per_page(2, 16, 2, 16, torch.float32) / 2**30
    prompts = [[(3 * i + j) % 320 for i in range(40)] for j in range(4)]
    params = SamplingParams(80, ignore_eos=True)
    small = LLM(tiny.save(tmp_path), dtype="fp32", device="cpu", cache_gib=14.5 * page, prefix_cache=PrefixCache(host_gib=64.5 * page))
    expected = llm.generate(prompts, params)
    assert small.generate(prompts, params) == expected and small.stats.preemptions > 0
    assert small.tree.host.num_free < 64
    again = small.generate(prompts, params)
    assert again == expected and [done.cached_tokens for done in again] == [32] * 4


@pytest.mark.parametrize("gib", [1e-9, -1.0, math.nan, math.inf, "1"])
def test_host_memory_that_cannot_be(tmp_path, gib):
    with pytest.raises(ValueError, match=r"^PrefixCache: host_gib is .*; give 0 \(none\), or at least"):
        LLM(tiny.save(tmp_path), device="cpu", prefix_cache=PrefixCache(host_gib=gib))


@pytest.mark.parametrize("drawn", [False, True], ids=["in the forward pass", "with all tokens drawn"])
def test_out_of_memory_in_a_step(llm, monkeypatch, drawn):
    """The prompts of that step end with the reason, and nobody else."""
    expected = llm.generate([OTHERS[1]], SamplingParams(**PLAIN))[0]
    runs, comes = llm.request(OTHERS[1], SamplingParams(**PLAIN)), llm.request(PROMPT, SamplingParams(**PLAIN, logprobs=1))
    llm.tree.clear()
    llm.add(runs)
    for _ in range(4):
        llm.step()
    llm.add(comes)
    with monkeypatch.context() as patch:
        patch.setattr(*((runner, "_packed_logprobs") if drawn else (llm.model, "forward")), lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
        while comes.reason is None:
            events = llm.step()
    (event,) = events
    assert event.request is comes and comes.reason.startswith("error: out of memory in a step of") and not comes.pages.pages
    while not llm.idle:
        llm.step()
    assert runs.completion() == expected


def test_out_of_memory_for_a_bias(monkeypatch):
    """All of what a bias needs is there, or nothing, and the next request tries again."""
    state, full = State(2, 2, 50, torch.device("cpu")), torch.full

    def fail(*args, dtype=None, **more):
        if dtype == torch.float32:
            raise torch.OutOfMemoryError("planted")
        return full(*args, dtype=dtype, **more)

    monkeypatch.setattr(torch, "full", fail)
    with pytest.raises(torch.OutOfMemoryError):
        state._provide(Wants(bias=True))
    monkeypatch.undo()
    assert state.bias_ids is None
    state._provide(Wants(bias=True))
    assert state.bias_values.shape == state.bias_ids.shape == state.bias_until.shape


def test_out_of_memory_when_all_is_said(llm, monkeypatch):
    """The last token is read before anybody is blamed: who has ended stays as it did."""
    monkeypatch.setattr(llm, "ahead", True)
    expected = llm.generate([OTHERS[0]], SamplingParams(**PLAIN))[0].tokens[:3]
    launch, steps = llm.runner.launch, iter(range(100))
    monkeypatch.setattr(llm.runner, "launch", lambda work: launch(work) if next(steps) != 3 else (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
    assert len(set(expected)) == 3
    (done,) = llm.generate([OTHERS[0]], SamplingParams(**PLAIN, stop_token_ids=expected[2:]))
    assert (done.tokens, done.reason) == (expected, "stop") and next(steps) == 4  # the fourth ran out


def test_samples_without_the_scores_of_their_prompt(llm):
    """They come of the first sample; where it fails before they do, so do the others."""
    request = llm.request(PROMPT, SamplingParams(**PLAIN, n=2, prompt_logprobs=1))
    request.mask = Even(fail=0)
    llm.add(request)
    events = [event for _ in range(4) for event in llm.step()]
    assert [e.request for e in events] == request.samples and llm.idle
    assert {s.reason for s in request.samples} == {"error: the mask of its tokens: no grammar like this"}


def test_what_is_on_its_way(llm):
    """A request is added once, and `generate` takes no events of others."""
    request = llm.request(PROMPT, SamplingParams(**PLAIN))
    llm.add(request)
    with pytest.raises(ValueError, match=r"^add: the request was added before"):
        llm.add(request)
    with pytest.raises(ValueError, match=r"^generate: 1 requests given to add are not done"):
        llm.generate([PROMPT])
    llm.cancel(request)
    with pytest.raises(ValueError, match=r"^request: prompt has a token id that is no integer \('float' object"):
        llm.request([1.9])


def test_a_request_of_another_llm(llm, tmp_path):
    """One that this LLM could not hold would fail in a step, or wait for ever."""
    short = LLM(tiny.save(tmp_path), dtype="fp32", device="cpu", max_len=40)
    with pytest.raises(ValueError, match=r"^add: the request is another LLM's, of 49 tokens in the end, and this one holds 40; make it with this one's"):
        short.add(llm.request(PROMPT, SamplingParams(**PLAIN)))
    assert short.idle
