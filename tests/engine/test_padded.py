"""Steps with chunks of prompts, padded to one of a few sizes: `test_mixes` has their tokens, in traffic of all kinds; here is what they are and when."""

import pytest
import torch

import tiny
from onchip.engine.llm import LLM
from onchip.engine.padded import SIZES, Padded, accepts
from onchip.engine.request import SamplingParams
from onchip.models.decoder import Step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("padded") / "model")


def test_padding_is_nobodys(folder):
    """What is behind a step's tokens and sequences goes nowhere and sees nothing, whatever a longer step has left there."""
    llm = LLM(folder, device="cpu", dtype="fp32", max_batch=4)
    padded, seen = Padded(llm.model, llm.pool, 5, 8), []

    def capture(run):
        return tiny.Captured(again := tiny.Again(run), again.out)

    def run(step: Step) -> torch.Tensor:
        seen.append(Step(*(x.clone() if isinstance(x, torch.Tensor) else x for x in step)))
        return step.tokens[:, None] + torch.zeros(1, 3)

    def made(tokens: int, sequences: int, width: int) -> Step:
        longs = torch.arange(100, 100 + tokens).repeat(3, 1)
        offsets = torch.tensor([0, *[1] * (sequences - 1), tokens - sequences + 1], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ints = torch.full((sequences, width), 7, dtype=torch.int32)
        return Step(*longs, offsets=offsets, longest=tokens, page_table=ints, lengths=ints[:, 0].clone())

    for tokens, sequences, width in ((30, 5, 8), (17, 2, 3), (9, 3, 8)):
        step = made(tokens, sequences, width)
        assert padded.forward(step, run, capture).tolist() == [[token] * 3 for token in step.tokens.tolist()]
        found = seen[-1]
        assert len(found.tokens) == len(found.positions) == len(found.slots) == found.longest == (16 if tokens == 9 else 32)
        assert found.slots.tolist() == step.slots.tolist() + [-1] * (found.longest - tokens)
        assert found.offsets.tolist() == step.offsets.tolist() + [tokens] * (5 - sequences)
        assert found.lengths.tolist() == step.lengths.tolist() + [0] * (5 - sequences)
        assert torch.equal(found.page_table[:sequences, :width], step.page_table)
    assert set(padded.graphs) == {16, 32} and len(seen) == 3 + 2  # a capture runs once more than it is replayed


@pytest.mark.parametrize(
    ("how", "taken"), [({}, True), ({"kernel": "blocked"}, False), ({"kv_format": "int8"}, False), ({"batch_invariant": True}, False)], ids=str
)
def test_who_goes_without(folder, how, taken):
    llm = LLM(folder, device="cpu", dtype="fp32", max_batch=2, **how)
    assert accepts(llm.model, llm.pool) == taken and llm.runner.padded.most == 0  # without a GPU there are no graphs
    tiny.as_graphs(llm.runner)
    llm.generate([[1, 2, 3]], SamplingParams(2, ignore_eos=True))
    assert list(llm.runner.padded.graphs) == [SIZES[0]] * taken
