"""An engine on two ranks (gloo) against one: the same tokens, whatever comes and goes."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

import tiny
from onchip.cache import sharing
from onchip.engine.draft import DraftModel
from onchip.engine.grammar import Budget, Grammar
from onchip.engine.llm import LLM
from onchip.engine.parallel import ParallelLLM
from onchip.engine.request import SamplingParams
from onchip.models.lora import AdapterSlots
from onchip.models.parallel import TensorParallel

HOW = {
    "dtype": "fp32",
    "device": "cpu",
    "max_batch": 4,
    "cache_gib": 12 * 3 * (16 * 2 * 2 * 16 * 4) / 2**30,
    "step_tokens": 32,
    "adapters": AdapterSlots(1, 4),
}  # 12 pages of three key heads: a rank's one, and the two of the draft model, which every rank has whole
PROMPTS = [[i + 1, *range(5, 5 + 7 * i)] for i in range(5)]
GREEDY, SAMPLED = SamplingParams(max_tokens=80, ignore_eos=True), SamplingParams(max_tokens=20, temperature=0.8, seed=5, n=2, ignore_eos=True)

FORM = Grammar("regex", "[abc]{2,9}-[0-9]{2}")


class Even:
    """Only even tokens may follow."""

    def fill(self, row):
        row.fill_(0x55555555)

    def accept(self, token):
        assert token % 2 == 0


def run(llm, adapter):
    """A batch, half of it with an adapter, one with another in its place, one of samples, then requests one by one: some cancelled, one under a mask, two under
    a grammar's."""
    llm.load_adapter(adapter)
    each = [dataclasses.replace(GREEDY, adapter="lora" if i % 2 else None) for i in range(len(PROMPTS))]
    found = [llm.generate(PROMPTS, each)]
    llm.forget()  # or one of them would begin where another one has its prefix
    llm.unload_adapter("lora")  # there is room for one
    llm.load_adapter(adapter, "again")
    found.append(llm.generate(PROMPTS[:2], dataclasses.replace(GREEDY, max_tokens=9, adapter="again")))
    found.append(llm.generate([*PROMPTS[3:], PROMPTS[0]], SAMPLED))
    accepted = llm.stats.accepted_tokens
    never = llm.request(PROMPTS[0], GREEDY)
    llm.cancel(never)
    llm.add(never)
    requests = [llm.request(prompt, dataclasses.replace(GREEDY, max_tokens=9), priority=i % 2) for i, prompt in enumerate(PROMPTS[:5])]
    requests[4].mask = Even()
    form, begun = (llm.request(PROMPTS[2 - n], SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=n, grammar=FORM)) for n in (2, 1))
    begun.mask.accept(llm.tokenizer.encode("a")[0])
    requests += [form, begun]
    for request in requests:
        llm.add(request)
    steps = 0
    while not llm.idle:
        llm.step()
        steps += 1
        if steps == 2:
            llm.cancel(requests[1])
    found.append([sample.completion() for request in requests for sample in request.samples])
    return [[dataclasses.asdict(completion) for completion in batch] for batch in found], (llm.stats.preemptions, accepted)


def one_rank(rank, of, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=of)
    sharing.CPU = tiny.SHARED  # samples of a prompt read its page once: rows have to stand in one order on all ranks
    llm = ParallelLLM(folder / "model", parallel=TensorParallel.join(), **HOW, draft=DraftModel(folder / "model", 3, most_rows=2, choices=(2,)))
    if rank:
        with pytest.raises(ValueError, match=r"this is rank 1.*call follow"):
            llm.step()
        llm.follow()
    else:
        torch.save((run(llm, folder / "lora"), llm.pool.num_pages), folder / "found.pt")
        assert llm.stats.cascade_steps > 0
        with pytest.raises(ValueError, match="mask cannot go to the other ranks"):
            request = llm.request([1])
            request.mask = lambda row: None
            llm.add(request)
        with pytest.raises(ValueError, match="seconds of one processor"):
            request.mask = llm.vocabulary.matcher(FORM, Budget())
            llm.add(request)
    llm.close()
    assert llm.idle and llm.pool.k.shape[3] == 1  # of two key heads
    dist.destroy_process_group()


def test_two_ranks_say_what_one_says(tmp_path):
    tiny.save(tmp_path / "model")
    tiny.save_adapter(tmp_path / "lora", 1)
    torch.multiprocessing.spawn(one_rank, (2, tmp_path), nprocs=2)
    (found, (preemptions, accepted)), pages = torch.load(tmp_path / "found.pt")
    draft = DraftModel(tmp_path / "model", 3, most_rows=2, choices=(2,))
    alone = LLM(tmp_path / "model", **HOW | {"cache_gib": HOW["cache_gib"] * 4 / 3}, draft=draft)  # two key heads of each
    assert alone.pool.num_pages == pages and run(alone, tmp_path / "lora") == (found, (preemptions, accepted)) and min(preemptions, accepted) > 0
    greedy, _, _, single = found
    assert len({tuple(one["tokens"]) for one in greedy}) == len(PROMPTS) and single[1]["reason"] == "cancelled"
    assert all(token % 2 == 0 for token in single[4]["tokens"])
    assert all(re.fullmatch(FORM.text, one["text"]) for one in single[5:7]) and re.fullmatch(FORM.text, "a" + single[7]["text"])
