"""Requests with LoRA adapters, in one batch and over a prefix cache, against a model with the adapter merged into its weights."""

import pytest
import torch
from safetensors.torch import save_file

import tiny
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.models.lora import AdapterSlots

HOW = {"dtype": "fp32", "device": "cpu", "max_batch": 4, "step_tokens": 24}
PROMPTS = [list(range(7, 47)), list(range(7, 47)), list(range(7, 27)), [9]]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model, and models with each of two adapters merged; the adapters are beside them."""
    folder = tmp_path_factory.mktemp("lora")
    tiny.save(folder / "base", tokenizer=False)
    for seed, name in enumerate(("one", "two")):
        deltas = tiny.save_adapter(folder / name, seed)
        tiny.save(folder / f"merged {name}", tokenizer=False, weights=False)
        weights = {at: weight + deltas.get(at, 0) for at, weight in tiny.tensors(tiny.CONFIG).items()}
        save_file(weights, folder / f"merged {name}" / "model.safetensors")
    return folder


def params(names):
    return [SamplingParams(max_tokens=20, ignore_eos=True, adapter=name) for name in names]


def tokens(llm, names=None):
    return [one.tokens for one in llm.generate(PROMPTS, GREEDY if names is None else params(names))]


def test_adapters_in_one_batch(folders):
    alone = {name: tokens(LLM(folders / path, **HOW)) for name, path in ((None, "base"), ("one", "merged one"), ("two", "merged two"))}
    assert len({str(found) for found in alone.values()}) == 3
    llm = LLM(folders / "base", adapters=AdapterSlots(2, 4), **HOW)
    assert tokens(llm) == alone[None]
    assert [llm.load_adapter(folders / name) for name in ("two", "one")] == ["two", "one"]
    for names in (["one", None, "two", "two"], [None, "one", "one", "one"], ["two"] * 4, [None] * 4):  # the prefix cache knows the others' prompts by now
        assert tokens(llm, names) == [alone[name][i] for i, name in enumerate(names)]
    again = llm.generate(PROMPTS[:1], params(["two"]))[0]
    assert again.tokens == alone["two"][0] and again.cached_tokens == 32  # its own
    llm.unload_adapter("one")
    llm.load_adapter(folders / "one", "two")  # another one of that name: what it made before is not found
    again = llm.generate(PROMPTS[:1], params(["two"]))[0]
    assert again.tokens == alone["one"][0] and again.cached_tokens == 0


def test_adapters_that_are_not_there_or_in_use(folders):
    llm = LLM(folders / "base", adapters=AdapterSlots(1, 4), **HOW)
    with pytest.raises(ValueError, match="adapter 'one'; loaded are none: see load_adapter"):
        llm.generate(PROMPTS, params(["one"] * 4))
    llm.load_adapter(folders / "one")
    with pytest.raises(ValueError, match="all 1 slots are taken, by one"):
        llm.load_adapter(folders / "two")
    early, late = (llm.request([1, 2], SamplingParams(adapter="one", n=2)) for _ in range(2))
    llm.add(early)
    with pytest.raises(ValueError, match="adapter 'one' is in use by 1 requests"):
        llm.unload_adapter("one")
    llm.step()
    llm.cancel(early)
    llm.unload_adapter("one")
    with pytest.raises(ValueError, match="add: the request has adapter 'one'; loaded are none"):
        llm.add(late)
    with pytest.raises(ValueError, match="no room for adapters; make it with adapters=AdapterSlots"):
        LLM(folders / "base", **HOW).load_adapter(folders / "one")
    while not llm.idle:
        llm.step()
    assert torch.count_nonzero(llm.model.layers[0].qkv.adapters.a) == 0
    with pytest.raises(ValueError, match="batch_invariant with adapters"):
        LLM(folders / "base", batch_invariant=True, adapters=AdapterSlots(), **HOW)
