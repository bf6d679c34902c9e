"""What requests share is read once for all of them: the same tokens as without, plans that hold while the rows are the same, and nothing where nothing pays."""

import pytest
import torch

import tiny
from onchip.cache import sharing
from onchip.cache.paged import PageList
from onchip.core.device import Device
from onchip.core.masks import Causal
from onchip.core.problem import Attention
from onchip.engine import cascade, runner, scheduler, state
from onchip.engine.draft import NGram
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.setup import PrefixCache
from onchip.models import decoder

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
TRUNK, BRANCHES = [7 * i % 290 for i in range(48)], [[(5 * i + n) % 290 for i in range(33)] for n in (1, 2)]
PROMPTS = [[*TRUNK, *BRANCHES[i % 2], i] for i in range(6)] + [[*TRUNK, 250, 251], [252]] + [[*TRUNK, i] for i in (253, 254)]
GREEDY, SEEDED = SamplingParams(14, ignore_eos=True), SamplingParams(9, temperature=1.2, top_k=30, seed=3, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("small"), **SMALL)


@pytest.fixture
def always(monkeypatch):
    """Sharing a page pays, and entries of tables that nobody is to read are no pages."""
    for name in ("CPU", "GPU", "EAGER"):
        monkeypatch.setattr(sharing, name, tiny.SHARED)
    monkeypatch.setattr(sharing, "PART", 16)

    def poisoned(table):
        def made(lists, *more):
            found = table(lists, *more)
            for row, pages in zip(found[0] if isinstance(found, tuple) else found, lists, strict=True):
                row[len(pages) :] = 1 << 30
            return found

        return made

    monkeypatch.setattr(sharing, "_table", poisoned(sharing._table))
    monkeypatch.setattr(state, "_table", poisoned(state._table))


def engine(folder, **how) -> LLM:
    llm = LLM(folder, **{"dtype": "fp32", "device": "cpu", "max_batch": 16, **how})
    for pool in (llm.pool.k, llm.pool.v):
        pool.fill_(torch.nan)
    return llm


def primed(folder, **how) -> LLM:
    """An engine whose prefix cache knows the trunk and both branches."""
    llm = engine(folder, **how)
    llm.generate([[*TRUNK, *branch, 299] for branch in BRANCHES], SamplingParams(1))
    return llm


def answers(llm, prompts=PROMPTS, params=None) -> list[list[int]]:
    return [done.tokens for done in llm.generate(prompts, params or [(GREEDY, SEEDED)[i % 3 == 1] for i in range(len(prompts))])]


@pytest.fixture
def calls(monkeypatch):
    """(rows, nodes) of each level of each call that had some."""
    found, read = [], decoder.cascade_attention

    def counted(q, cache, levels, **how):
        found.append([(len(q), len(level.page_table)) for level in levels])
        return read(q, cache, levels, **how)

    monkeypatch.setattr(decoder, "cascade_attention", counted)
    return found


def test_tokens_are_those_without(folder, always, calls):
    """A tree of prefixes, and a request that shares nothing, in an order in which no neighbours share; each plan serves as long as the same requests run."""
    expected = answers(engine(folder, prefix_cache=None))
    assert not calls
    llm, plans = primed(folder), []
    plan = llm.runner.cascade.plan
    llm.runner.cascade.plan = lambda rows, size: plans.extend(rows[:1]) or plan(rows, size)
    assert answers(llm) == expected and llm.stats.cached_tokens > 6 * 80
    assert calls[0] == [(10, 2), (10, 3)]  # the trunk and one without, both branches and those without
    assert len(plans) == 2 and llm.stats.cascade_steps == 13 and len(calls) == 13 * llm.config.layers  # seeded answers are shorter
    llm.runner.cascade.most = 1
    assert answers(llm) == expected and max(map(len, calls)) == 2 and len(calls[-1]) == 1
    llm.runner.cascade.most, before = 0, len(calls)
    assert answers(llm) == expected and len(calls) == before and llm.stats.cascade_steps == 0


def test_samples_and_preemption(folder, always, monkeypatch):
    """Samples share their prompt's pages; who gives way and comes back may find others to share with."""
    monkeypatch.setattr(scheduler, "AHEAD", 16)
    params = SamplingParams(30, temperature=1.0, seed=5, n=3, ignore_eos=True)
    expected = answers(engine(folder, prefix_cache=None), [TRUNK, PROMPTS[0]], params)
    page = 2 * 2 * 16 * 16 * 4 / 2**30
    for host in (0.0, 4 * page):
        llm = engine(folder, cache_gib=12.5 * page, prefix_cache=PrefixCache(host))
        llm.ahead = True
        assert answers(llm, [TRUNK, PROMPTS[0]], params) == expected
        assert llm.stats.preemptions > 0 and llm.stats.cascade_steps > 10


def test_requests_that_come_and_go(folder, always):
    """Rows that decode share beside chunks of prompts too; a window in every other layer reads for itself."""
    masks = {"model_type": "mistral", "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    folder = tiny.save(folder / "windows", **SMALL, **masks)
    alone = engine(folder, prefix_cache=None, max_batch=1)
    assert sum(isinstance(mask, Causal) for mask in alone.config.masks) == 1
    expected, llm, kinds = answers(alone), primed(folder, step_tokens=24), []
    launch = llm.runner.launch
    llm.runner.launch = lambda work: kinds.append(launch(work)) or kinds[-1]
    requests = [llm.request(prompt, (GREEDY, SEEDED)[i % 3 == 1]) for i, prompt in enumerate(PROMPTS)]
    waiting = list(requests)
    while waiting or not llm.idle:
        for request in waiting[:2]:
            llm.add(request)
        del waiting[:2]
        for _ in range(2):
            llm.step()
        if len(waiting) == 2:
            llm.cancel(requests[3])
    assert [r.tokens for r in requests if r is not requests[3]] == [tokens for i, tokens in enumerate(expected) if i != 3]
    assert requests[3].tokens == expected[3][: len(requests[3].tokens)]
    assert {step.kind for step in kinds if step.shared} == {"decode", "prefill"} and llm.stats.cascade_steps == sum(step.shared for step in kinds)


def test_who_takes_a_place_is_planned_for(folder, always):
    """As many rows as in the plan before, but others: one ends in the step in which another's prompt ends."""
    prompts, params = [PROMPTS[0], PROMPTS[2], [*BRANCHES[1], 7]], [SamplingParams(n, ignore_eos=True) for n in (4, 12, 12)]
    expected, llm = answers(engine(folder, prefix_cache=None), prompts, params), primed(folder)
    requests = [llm.request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    llm.add(requests[0]), llm.add(requests[1])
    while len(requests[0].tokens) < 3:
        llm.step()
    llm.add(requests[2])
    llm.step()
    assert [len(r.tokens) for r in requests] == [4, 4, 1] and llm.stats.cascade_steps == 3
    while not llm.idle:
        llm.step()
    assert [r.tokens for r in requests] == expected and llm.stats.cascade_steps == 3


def test_a_graph_depends_on_the_kind_alone(folder, always, monkeypatch):
    """Steps of whole buckets of rows, as graphs have them: those of one kind read the same buffers, and a step of no rows changes nothing."""
    expected = answers(engine(folder, prefix_cache=None))
    llm = primed(folder)
    graphs, found = tiny.as_graphs(llm.runner), llm.runner.cascade.of

    def checked(table, positions):
        shared = found(table, positions)
        assert shared is None or (shared.lengths >= (positions >= 0).int()).all()
        return shared

    monkeypatch.setattr(llm.runner.cascade, "of", checked)
    for _ in range(2):
        assert answers(llm) == expected
        assert answers(llm, PROMPTS[3:8]) == expected[3:8] and answers(llm, PROMPTS[6:7]) == expected[6:7]
    assert {bool(kind) for _, _, kind in graphs} == {True, False} and len(graphs) <= 8
    for size, _, kind in graphs:
        assert all(rows & (rows - 1) == 0 and width == sharing.LEAST_WIDTH and longest <= size for rows, width, _, longest in kind)


def test_kinds_are_bounded(folder, always, monkeypatch):
    """Beyond so many kinds plans go without; those that are known, and steps without a graph, do not."""
    monkeypatch.setattr(cascade, "KINDS", 1)
    found = primed(folder).runner.cascade
    four = [PageList([*range(5), 10 + i], 90) for i in range(4)]
    three = [*four[:2], PageList([20], 9)]
    found.pool.share(list(range(5))), found.pool.share(list(range(5)))
    for rows, size, shares in ((four, 4, True), (three, 4, False), (three, 0, True), (four, 4, True), (four[:2], 2, True)):
        assert (found.plan(rows, size) is not None) == shares == bool(found.levels)
        assert bool(found.kind) == (shares and size > 0)


def test_what_shares_nothing(folder, always, calls):
    """Options that go without, each with its reason; guesses read for themselves; and requests without a page in common are not looked at."""
    for how, words in (
        ({"batch_invariant": True}, "batch_invariant"), ({"kernel": "reference"}, "'reference' is asked for"), ({"kv_format": "int8"}, "quantised keys"),
    ):  # fmt: skip
        llm = LLM(folder, dtype="fp32", device="cpu", **how)
        assert words in llm.runner.cascade.refused
        llm.generate([[*TRUNK, 1]] * 2, SamplingParams(2, ignore_eos=True))
        llm.generate([[*TRUNK, 1]] * 2, SamplingParams(3, ignore_eos=True))
    llm = primed(folder, draft=NGram())
    assert answers(llm, PROMPTS[:4], GREEDY) == answers(engine(folder, prefix_cache=None), PROMPTS[:4], GREEDY)
    assert not calls
    llm = engine(folder)
    llm.pool.holders = None
    assert llm.runner.cascade.refused is None
    answers(llm, [[i] * 40 for i in range(3)])


def test_what_does_not_pay_changes_nothing(folder, calls):
    """A tiny model's prefixes are not worth a level, on a CPU as on a GPU; long ones of many rows are."""
    llm = primed(folder)
    llm.runner.cascade.device = device = Device("CPU", "cpu", 0, 2, 0, 0, 0, 1e10, {torch.float32: 1e11, torch.bfloat16: 2e11}, "")
    answers(llm)
    assert not calls and llm.stats.cascade_steps == 0 and llm.runner.cascade.kind == ()
    many = Attention("decode", 8, 1, 2176, 9, 3, 64, torch.bfloat16, Causal(), "paged", 16)
    pages = [[*range(128), 1000 + i] for i in range(8)]
    assert [len(run.pages) for run in sharing.plan_cascade(many, pages, [128 * 16 + 1] * 8, device).shared[0]] == [128]
    assert not sharing.plan_cascade(many, [row[-5:] for row in pages], [4 * 16 + 1] * 8, device).shared


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs below cover a GPU")
def test_in_triton(folder, always):
    """Two rows of one page and one that shares nothing, every operator a Triton kernel: the tokens of rows that read for themselves."""
    llm = engine(folder, max_len=32, max_batch=4)
    prompts = [[*TRUNK[:16], 250], [251], [*TRUNK[:16], 252]]
    llm.generate([[*TRUNK[:16], 1]], SamplingParams(1))
    found = answers(llm, prompts, SamplingParams(3, ignore_eos=True))
    assert llm.stats.cascade_steps == 2 and llm.stats.kernels["merge"] == "triton_merge"
    llm.runner.cascade.most = 0
    assert answers(llm, prompts, SamplingParams(3, ignore_eos=True)) == found


@pytest.mark.gpu
@pytest.mark.large
def test_graphs_of_levels(folder, always):
    """Captured by kind and replayed for other plans; tokens of an engine without a prefix cache."""
    expected = answers(engine(folder, device="cuda", cache_gib=0.1, prefix_cache=None))
    llm = primed(folder, device="cuda", cache_gib=0.1)
    for _ in range(2):
        assert answers(llm) == expected and llm.stats.cascade_steps > 10
        assert answers(llm, PROMPTS[::-1], [(GREEDY, SEEDED)[i % 3 == 1] for i in range(len(PROMPTS))][::-1]) == expected[::-1]
    assert any(kind for _, _, kind in llm.runner.graphs)
    assert all(isinstance(found, runner.Captured) for found in llm.runner.graphs.values())
