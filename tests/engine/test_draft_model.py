"""A second model that guesses: the tokens are those without it, and its keys and values are wherever the first one's are."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from onchip.cache.paged import PagePool
from onchip.core.masks import Window
from onchip.engine.draft import DraftModel, NGram, draft_of
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.runner import bucket
from onchip.engine.setup import PrefixCache
from onchip.engine.speculate import Speculation

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 2 * PagePool.bytes_per_page(2, 16, 2, 16, torch.float32) / 2**30  # both models'
AGAIN = [7, 8, 9, 10, 11] * 6
PROMPTS = [AGAIN, AGAIN[:9], [5], list(range(50, 90)), AGAIN * 2]
KINDS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4, "stop_token_ids": range(0, 320, 19)},
    {"logprobs": 1, "max_tokens": 3},
    {"logit_bias": {9: 5.0}, "max_tokens": 6},
]
PARAMS = [SamplingParams(**{"max_tokens": 25 + i, "ignore_eos": True} | kind) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model, the same again, and one that often says the same."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny.save(folder / "model")
    return {"model": model, "same": model, "near": tiny.near(model, folder / "near", 0.1)}


@pytest.fixture(scope="module")
def expected(models):
    return said(LLM(models["model"], dtype="fp32", device="cpu").generate(PROMPTS, PARAMS))


def said(completions) -> list:
    return [(done.tokens, done.text, done.reason) for done in completions]


def engine(models, draft=None, **how) -> LLM:
    """With rubbish in the cache."""
    llm = LLM(models["model"], **{"dtype": "fp32", "device": "cpu", "max_batch": 6} | how, draft=draft)
    for pool in llm.pool.storage:
        pool.fill_(torch.nan if pool.is_floating_point() else 255)
    return llm


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("second", ["same", "near", "near tree"])
def test_the_same_tokens(models, expected, second, ahead):
    """Greedy and drawn, with chunks of prompts, stops in the middle of what was accepted, prefix hits, and requests that want more than tokens."""
    llm = engine(models, DraftModel(models[second.split()[0]], 4, choices=(4, 2, 2) if "tree" in second else ()), step_tokens=40)
    if ahead:  # as on a GPU, where graphs have rows to spare
        runner, llm.ahead = llm.runner, True
        runner._decode = lambda: runner._step(runner.state.rows(bucket(len(runner.rows))), runner._wants)
    for turn in range(2):
        assert said(llm.generate(PROMPTS, PARAMS)) == expected
        drafted, accepted = llm.stats.drafted_tokens, llm.stats.accepted_tokens
        assert accepted == drafted > 0 if second == "same" else drafted / 10 < accepted < drafted
        assert (llm.stats.cached_tokens > 64) == bool(turn)
        assert llm.pool.num_free + llm.tree.num_pages == llm.pool.num_pages


def test_fewer_steps(models):
    """A draft that is always right: 61 tokens are the prompt's one, and twelve times five."""
    llm = engine(models, DraftModel(models["same"], 4))
    request = llm.request(AGAIN, SamplingParams(61, ignore_eos=True))
    llm.add(request)
    steps = 0
    while not llm.idle:
        steps += bool(llm.step())
    assert steps == 13 and request.tokens == engine(models).generate([AGAIN], SamplingParams(61, ignore_eos=True))[0].tokens


@pytest.mark.parametrize("host", [0.0, 60 * PAGE])
def test_in_a_cache_that_is_full(models, host):
    """Requests that give way in the middle of guessing, to come back from the prefix tree, the host's memory or a prompt computed again: the draft reads all
    of it with them, so that it goes on to be right; and large batches, in which it only reads."""
    prompts = [[i, 1, 2, 3] * 9 for i in range(4)]
    params = SamplingParams(90, ignore_eos=True)
    draft = DraftModel(models["same"], 3, most_rows=2)
    llm = engine(models, draft, cache_gib=16.5 * PAGE, prefix_cache=PrefixCache(host_gib=host))
    llm.ahead = True
    assert llm.pool.num_pages == 16 and llm.pool.page_bytes == PAGE * 2**30
    assert said(llm.generate(prompts, params)) == said(engine(models).generate(prompts, params))
    assert llm.stats.preemptions > 0 and llm.stats.accepted_tokens == llm.stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("form", "draft"), [("int8", DraftModel("same")), ("int4", DraftModel("near", 4, choices=(4, 3))), ("e4m3", NGram(2, 1, 1, matches=4))]
)
def test_a_quantised_cache_is_the_targets(models, form, draft):
    """Guesses are verified over codes, which move with their scales, and made over numbers: the tokens are those without guesses."""
    params = [replace(p, logprobs=None, logit_bias={}) for p in PARAMS]
    how = {"kv_format": form, "prefix_cache": None}
    llm = engine(models, replace(draft, model=models[draft.model]) if isinstance(draft, DraftModel) else draft, **how)
    assert llm.pool.k.dtype == torch.uint8 and (llm.pool.beside is None or llm.pool.beside.k.dtype == torch.float32)
    assert said(llm.generate(PROMPTS, params)) == said(engine(models, **how).generate(PROMPTS, params)) and llm.stats.accepted_tokens > 2


def test_a_step_of_empty_rows_writes_nothing(models, expected):
    """As it runs before a graph is captured."""
    llm = engine(models, DraftModel(models["near"], 4))
    runner = llm.runner
    runner._step(runner.state.rows(4), runner._wants)
    assert all(tensor.isnan().all() for tensor in llm.pool.storage)
    assert said(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("width", [312, 332])
def test_logits_of_another_width(models, expected, tmp_path, width):
    """The same tokens, padded to a narrower or wider product: what one model has and the other has not is never guessed, and may be read."""
    folder = tiny.near(models["model"], tmp_path / "width", 0)
    found = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.cat((found[name], found[name][:12] + 1))[:width].contiguous()
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"vocab_size": width}))
    llm = engine(models, DraftModel(folder))
    assert said(llm.generate(PROMPTS, PARAMS)) == expected and llm.stats.drafted_tokens < 2 * llm.stats.accepted_tokens
    assert any(token >= 312 for tokens, *_ in expected for token in tokens)


def test_a_tree_finds_more(models):
    """What is accepted of the second candidates is what a chain guesses wrong: as many tokens in fewer steps."""
    steps = []
    for choices in ((), (5, 4, 2, 2)):
        llm = engine(models, DraftModel(models["near"], 4, choices=choices))
        request = llm.request(AGAIN, SamplingParams(60, ignore_eos=True))
        llm.add(request)
        steps.append(0)
        while not llm.idle:
            steps[-1] += bool(llm.step())
        assert llm.stats.accepted_tokens + steps[-1] >= 60 and llm.stats.drafted_tokens == (4 + sum(choices) - len(choices)) * (steps[-1] - 1)
    assert steps[1] < 0.9 * steps[0]


@pytest.mark.parametrize("draft", [NGram(3, 1, 1, matches=5), DraftModel("near", 4, choices=(3, 3, 3, 2)), DraftModel("near", 5)], ids=str)
def test_under_a_sliding_window(models, tmp_path, draft):
    """Layers with a window count places along a path of the tree, not slots of the cache."""
    folder = tiny.save(tmp_path / "window", model_type="mistral", sliding_window=7)
    draft = replace(draft, model=tiny.near(folder, tmp_path / "near", 0.02)) if isinstance(draft, DraftModel) else draft
    params = [replace(p, logprobs=None, logit_bias={}, max_tokens=40) for p in PARAMS]
    there = {"model": folder}
    llm = engine(there, draft)
    assert isinstance(llm.config.masks[0], Window)
    assert said(llm.generate(PROMPTS, params)) == said(engine(there).generate(PROMPTS, params)) and llm.stats.accepted_tokens > 2


BATCH = 80  # at once: a step of many rows takes little longer than one of a few
WORDS, LONG = 5, 4  # a vocabulary so small, and answers so short, that an answer comes often
DRAWN = SamplingParams(LONG, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize("draft", [DraftModel("near", 3, BATCH, (2, 2)), NGram(3, 2, 1, BATCH, 2)], ids=["model", "ngram"])
def test_the_distribution_is_the_models(tmp_path, draft):
    """Pearson's chi-square of 1,600 drawn answers, against the probability of every answer that there is."""
    folder = tiny.save(tmp_path / "model", tokenizer=False, vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    draft = replace(draft, model=tiny.near(folder, tmp_path / "near", 0.3)) if isinstance(draft, DraftModel) else draft
    prompt, how = [0, 1, 2, 0, 3, 1, 4, 0], {"dtype": "fp32", "device": "cpu", "max_batch": BATCH}
    answers = list(itertools.product(range(WORDS), repeat=LONG))
    scored = LLM(folder, **how).generate([prompt + list(answer) for answer in answers], SamplingParams(1, prompt_logprobs=0))
    expected = torch.tensor([[found.logprob for found in one.prompt_logprobs[-LONG:]] for one in scored]).double().sum(1).exp()
    assert abs(expected.sum() - 1) < 1e-5
    count, accepted, drawn = 1600, 0, Counter()
    llm = LLM(folder, **how, draft=draft)
    for first in range(0, count, BATCH):  # a batch: in steps with prompts in them nothing is guessed
        drawn.update(tuple(one.tokens) for one in llm.generate([prompt] * BATCH, [replace(DRAWN, seed=first + i) for i in range(BATCH)]))
        accepted += llm.stats.accepted_tokens
    found = torch.tensor([drawn[answer] for answer in answers]).double()
    often = expected * count >= 5  # the others are one class
    seen, wanted = (torch.cat((x[often], x[~often].sum()[None])) for x in (found, expected * count))
    chi, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
    assert freedom > 30 and chi < freedom + 4 * (2 * freedom) ** 0.5, f"chi-square {chi:.0f} of {freedom}"
    assert accepted > count / 4


DRAFTS = [DraftModel("near", 2), DraftModel("near", 2, choices=(2, 2)), NGram(2, 1, 1, matches=2)]


def guessed(models, draft, params: list[SamplingParams], runs: int = 1, **how) -> tuple:
    """What two prompts become, the same in each run, and the last one's stats."""
    llm = engine(models, replace(draft, model=models[draft.model]) if isinstance(draft, DraftModel) else draft, max_len=96, **how)
    found = [said(llm.generate([AGAIN[:7], [5]], params)) for _ in range(runs)]
    assert llm.device.type == "cpu" or all(isinstance(one.graph, torch.cuda.CUDAGraph) for one in llm.runner.graphs.values())
    assert all(one == found[0] for one in found)
    return found[0], llm.stats


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs below cover a GPU")
def test_by_triton_kernels(models):
    """Guesses, verification and what moves, every operator a Triton kernel."""
    params = [SamplingParams(4, ignore_eos=True), SamplingParams(3, temperature=0.8, seed=3, ignore_eos=True)]
    found, stats = guessed(models, DRAFTS[1], params)
    assert {"triton_decode", "triton_verify"} <= set(stats.kernels.values()) and stats.drafted_tokens
    assert found == guessed(models, None, params)[0]


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_graphs_guess(models, draft):
    """In one CUDA graph a step, captured in the first run and replayed in the second."""
    params = [SamplingParams(40, ignore_eos=True), SamplingParams(40, temperature=0.8, seed=3, ignore_eos=True)]
    how = {"device": "cuda", "cache_gib": 0.1, "prefix_cache": None}
    found, stats = guessed(models, draft, params, 2, **how)
    assert found == guessed(models, None, params, **how)[0] and stats.drafted_tokens > 20


@pytest.mark.parametrize("rows", [[[7, 0, 1, 2], [-1] * 4], [[-1] * 4, [7, 0, 1, 2], [-1] * 4], [[-1] * 4] * 2], ids=["first", "middle", "none"])
def test_rows_without_a_sequence_move_nothing(rows):
    """Nor do they put back what a row that is in use moves to slot 0."""
    pool = PagePool(1, 2, 4, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.arange(8.0).view_as(tensor))
    path = torch.tensor([[2, 3] if row[0] >= 0 else [1, 2] for row in rows])
    Speculation._settle(SimpleNamespace(pool=pool), torch.tensor(rows), path)
    moved = any(row[0] >= 0 for row in rows)
    assert pool.k.flatten().tolist() == pool.v.flatten().tolist() == ([1, 2] if moved else [0, 1]) + [*range(2, 8)]


def test_arguments(models, tmp_path):
    bad = ({"tokens": 0}, {"tokens": 16}, {"most_rows": 0}, {"choices": (0,)}, {"choices": (9, 9)}, {"choices": (1, 1, 1, 1, 2)})
    for given in bad:
        with pytest.raises(ValueError, match=r"^DraftModel: \w+ is .*; give "):
            DraftModel("any", **given)
    assert (draft_of(None), draft_of("ngram"), draft_of("some/model")) == (None, NGram(), DraftModel("some/model"))
    with pytest.raises(ValueError, match=r"^draft: .*/other' has 300 tokens in its vocabulary, the model 320; give a draft model with the model's own$"):
        engine(models, DraftModel(tiny.save(tmp_path / "other", tokenizer=False, vocab_size=300)))
    words = tiny.near(models["model"], tmp_path / "words", 0)
    text = (words / "tokenizer.json").read_text()
    (words / "tokenizer.json").write_text(text.replace('"a":', '"swap":').replace('"b":', '"a":').replace('"swap":', '"b":'))
    with pytest.raises(ValueError, match=r"^draft: to .*/words' the text '[ab]' is another token than to the model; give a draft model"):
        engine(models, DraftModel(words))
