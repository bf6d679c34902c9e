"""Drafts from what stood before: the tokens are those without them, in fewer steps."""

import pytest
import torch

import tiny
from onchip.cache.paged import PagePool
from onchip.engine.draft import DraftModel, NGram
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams

PAGE = PagePool.bytes_per_page(2, 16, 2, 16, torch.float32) / 2**30

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny"))


def said(completions) -> list:
    return [(done.tokens, done.text, done.reason) for done in completions]


def brute(tokens: list[int], how: NGram) -> list[int]:
    found = {}
    for size in range(how.longest, how.shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                found.setdefault(tokens[end], tokens[end : end + how.tokens])
    rows = [*found.values(), *[[]] * how.matches][: how.matches]
    return [token for row in rows for token in row + [-1] * (how.tokens - len(row))]


@pytest.mark.parametrize("how", [NGram(), NGram(1, 1, 1), NGram(7, 4, 1), NGram(3, 5, 5), NGram(5, 2, 1, matches=3)], ids=str)
def test_proposals(how):
    """Those of a search written out, in rows of any length, past whose ends there is rubbish."""
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 1, 2, 3, 9, 20, 33, 40]
    history = torch.randint(0, 2 + (how.matches > 1), (len(lengths), 40), generator=generator, dtype=torch.int32)
    positions = torch.tensor(lengths) - 1
    expected = [brute(row[:n].tolist(), how) for row, n in zip(history, lengths, strict=True)]
    assert how.propose(history, positions).tolist() == expected
    assert any(row[0] >= 0 for row in expected)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", [NGram(), NGram(9, 3, 1), NGram(4, 2, 1, matches=3)], ids=str)
def test_the_same_tokens_in_fewer_steps(folder, how, ahead):
    """Greedy and drawn, with stops and ends in the middle of what was accepted, and requests that come in between and want more than tokens."""
    plain = LLM(folder, dtype="fp32", device="cpu", max_batch=6)
    again = [7, 8, 9, 10, 11] * 6
    prompts = [again, again[:9], [5], list(range(50, 90)), again * 2]
    kinds = [
        {},
        {"temperature": 0.1, "seed": 3},
        {"stop_token_ids": range(0, 320, 9)},
        {"logprobs": 1, "max_tokens": 3},
        {"logit_bias": {9: 5.0}, "max_tokens": 6},
    ]
    params = [SamplingParams(**{"max_tokens": 30 + i, "ignore_eos": True} | kind) for i, kind in enumerate(kinds)]
    expected = said(plain.generate(prompts, params))
    llm = LLM(folder, dtype="fp32", device="cpu", max_batch=6, draft=how, step_tokens=40)
    for pool in (llm.pool.k, llm.pool.v):
        pool.fill_(torch.nan)
    llm.ahead = ahead
    for _ in range(2):
        assert said(llm.generate(prompts, params)) == expected
        assert llm.pool.num_free + llm.tree.num_pages == llm.pool.num_pages


@pytest.mark.parametrize("graphs", [False, True])
def test_which_batches_guess(folder, graphs):
    """As many rows as a graph for `most_rows` has, on whatever device: 3 are a graph's 4, and 5 are its 8."""
    drafted = []
    for rows in (1, 3, 4, 5):
        llm = LLM(folder, dtype="fp32", device="cpu", max_batch=8, draft=NGram(3, 1, 1, most_rows=3))
        if graphs:
            tiny.as_graphs(llm.runner)
        llm.generate([[7, 8, 9] * 3] * rows, SamplingParams(4, ignore_eos=True))
        drafted.append(llm.stats.drafted_tokens > 0)
    assert drafted == [True, True, True, False]


def test_fewer_steps(folder, monkeypatch):
    """A model that says its prompt again and again: all of every draft is accepted."""
    llm = LLM(folder, dtype="fp32", device="cpu", draft=NGram(4, 2, 2))
    monkeypatch.setattr(llm.model, "logits", lambda hidden: torch.nn.functional.one_hot((llm.fed + 1) % 10, 320).float())
    forward = llm.model.forward

    def follow(step, pool):
        llm.fed = step.tokens if step.offsets is None else step.tokens[step.offsets[1:].long() - 1]
        return forward(step, pool)

    monkeypatch.setattr(llm.model, "forward", follow)
    request = llm.request(list(range(10)) * 2, SamplingParams(51, ignore_eos=True))
    llm.add(request)
    steps = 0
    while not llm.idle:
        llm.step()
        steps += 1
    assert request.tokens == [n % 10 for n in range(51)] and steps == 11  # the prompt, and ten of five tokens
    assert (llm.stats.drafted_tokens, llm.stats.accepted_tokens) == (40, 40)


def test_a_step_of_empty_rows_changes_nothing(folder):
    """As it runs before a graph is captured: of drafts, of penalties and of all that is asked for, in the middle of a batch."""
    prompts = [[7, 8, 9, 10, 11] * 6, [5], list(range(50, 90))]
    params = [SamplingParams(20, ignore_eos=True), SamplingParams(20, ignore_eos=True), SamplingParams(6, ignore_eos=True, frequency_penalty=0.5, logprobs=1)]
    llm = LLM(folder, dtype="fp32", device="cpu", draft=NGram(), prefix_cache=None)
    expected = said(llm.generate(prompts, params))
    runner, decode = llm.runner, llm.runner._decode

    def empty_first():
        state = runner.state
        saved = {name: tensor.clone() for name, tensor in vars(state).items() if isinstance(tensor, torch.Tensor)}
        state.clear(0)
        runner._step(state.rows(len(runner.rows)), runner._wants)
        state.longs.copy_(saved.pop("longs"))
        checked.update(saved)
        assert all(torch.equal(getattr(state, name), tensor) for name, tensor in saved.items())
        return decode()

    runner._decode, checked = empty_first, set()
    assert said(llm.generate(prompts, params)) == expected
    assert {"history", "output", "page_table"} <= checked


def test_in_a_cache_that_is_full(folder):
    """Requests that give way in the middle of guessing, and answers that end with the cache or the context."""
    prompts = [[i, 1, 2, 3] * 9 for i in range(4)]
    params = SamplingParams(90, ignore_eos=True, logit_bias={})
    expected = LLM(folder, dtype="fp32", device="cpu").generate(prompts, params)
    small = LLM(folder, dtype="fp32", device="cpu", cache_gib=16.5 * PAGE, draft=NGram())
    small.ahead = True
    assert small.generate(prompts, params) == expected and small.stats.preemptions > 0
    tiny_one = LLM(folder, dtype="fp32", device="cpu", cache_gib=4.5 * PAGE, draft=NGram())
    (done,) = tiny_one.generate([prompts[0]], params)
    assert done.reason == "length" and len(done.tokens) == 64 - NGram().room - 36 and done.tokens == expected[0].tokens[: len(done.tokens)]


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("scaling", "most"), [({"rope_type": "dynamic", "factor": 4.0}, None), (LONG, 64)], ids=["dynamic", "longrope"])
def test_the_room_of_a_draft_stretches_no_rotation(tmp_path, scaling, most):
    """The scaling is chosen by the longest text, not by the rows of the table, which guesses past its end need."""
    model = tiny.save(tmp_path / "tiny", rope_scaling=scaling)
    prompt, params = [[1, 2, 3, 4, 5, 6, 7, 8] * 3], SamplingParams(max_tokens=30, ignore_eos=True)
    with_, without = (LLM(model, dtype="fp32", device="cpu", max_len=most, draft=draft).generate(prompt, params) for draft in (NGram(), None))
    assert with_[0].tokens == without[0].tokens


def test_arguments(folder):
    for wrong in ({"tokens": "3"}, {"longest": None}, {"matches": 2.0}, {"most_rows": 1.5}, {"tokens": True}):
        with pytest.raises(ValueError, match=rf"^NGram: {next(iter(wrong))} is .*; give an integer"):
            NGram(**wrong)
    for wrong in ({"model": 5}, {"model": "x", "choices": 3}, {"model": "x", "choices": (1.5,)}, {"model": "x", "choices": (True,)}):
        with pytest.raises(ValueError, match=rf"^DraftModel: {list(wrong)[-1]} is .*; give"):
            DraftModel(**wrong)
    for given in ({"tokens": 0}, {"tokens": 16}, {"shortest": 4}, {"shortest": 0}, {"longest": 17}, {"most_rows": 0}, {"matches": 0}, {"matches": 4}):
        with pytest.raises(ValueError, match=r"^NGram: \w+ is .*; give "):
            NGram(**given)
    with pytest.raises(ValueError, match=r"^draft: .*; leave draft or batch_invariant out"):
        LLM(folder, device="cpu", draft=NGram(), batch_invariant=True)
