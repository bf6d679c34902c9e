"""`batch_invariant=True`: the bits of every log-probability are those of the request alone, whatever runs beside it."""

import random

import pytest
import torch

import tiny
from onchip.cache.paged import PagePool
from onchip.core.problem import DTYPES
from onchip.engine.llm import INVARIANT_CHUNK, LLM
from onchip.engine.request import SamplingParams
from onchip.models.layers import in_slabs

LENGTHS = (3, 40, 255, 256, 257, 300, 700, 513)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(tmp_path, dtype):
    bits_alone_and_together(tmp_path, dtype, hidden_size=256, head_dim=64)


@pytest.mark.parametrize("dtype", ["fp32"])
def test_on_a_cpu(tmp_path, dtype):
    bits_alone_and_together(tmp_path, dtype)


def bits_alone_and_together(folder, dtype: str, **changes):
    """Prompts of many lengths, some with a common beginning of more than a chunk, that come at random, in a small cache, in small steps."""
    folder = tiny.save(folder, max_position_embeddings=1024, **changes)
    at = {"dtype": dtype, "device": DEVICE, "batch_invariant": True, "cache_gib": 0.2}
    prompts = [[(5 * j) % 310 for j in range(n - 2)] + [i, 1] for i, n in enumerate(LENGTHS)]
    params = SamplingParams(9, ignore_eos=True, logprobs=2, temperature=0.7, seed=5)
    alone = [LLM(folder, **at, prefix_cache=None).generate([prompt], params)[0] for prompt in prompts]
    page = PagePool.bytes_per_page(2, 16, 2, changes.get("head_dim", 16), DTYPES[dtype]) / 2**30
    llm, rng = LLM(folder, **at | {"cache_gib": 130.5 * page}, max_batch=5, step_tokens=400), random.Random(0)
    for _ in range(2):
        requests = [llm.request(prompt, params, priority=i % 2) for i, prompt in enumerate(prompts)]
        todo = rng.sample(requests, len(requests))
        while todo or not llm.idle:
            if todo and rng.random() < 0.5:
                llm.add(todo.pop())
            llm.step()
        assert [r.completion() for r in requests] == alone  # log-probabilities compare to the last bit
    assert sum(r.cached_tokens for r in requests) >= 3 * INVARIANT_CHUNK
    assert {r.cached_tokens % INVARIANT_CHUNK for r in requests} == {0}
    assert llm.scheduler.preemptions == 0 and llm.pool.num_free + llm.tree.num_pages == llm.pool.num_pages


def test_a_quantised_cache_reads_codes_throughout(tmp_path):
    """Whether the prefix cache knew a prompt makes no difference then, as it does without `batch_invariant`."""
    llm = LLM(tiny.save(tmp_path, max_position_embeddings=1024), dtype="fp32", device="cpu", kv_format="int4", batch_invariant=True)
    params = SamplingParams(9, ignore_eos=True, logprobs=2)
    prompts = [[(7 * j + i) % 300 for j in range(300)] for i in range(2)]
    first = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    assert again == first and [done.cached_tokens for done in again] == [INVARIANT_CHUNK] * 2


def test_without_it_bits_differ(tmp_path):
    """Else the test above would show nothing."""
    llm = LLM(tiny.save(tmp_path, max_position_embeddings=1024), dtype="fp32", device="cpu")
    params = SamplingParams(9, ignore_eos=True, logprobs=2)
    prompts = [[(5 * j + i) % 310 for j in range(n)] for i, n in enumerate(LENGTHS)]
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    llm.tree.clear()
    assert llm.generate(prompts, params) != alone


def test_slabs():
    """Rows go in slabs of a fixed size and come back as they were, of one result or two."""
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    sizes = []

    def run(*some):
        sizes.append(len(some[0]))
        return some[0] * 2 if len(some) == 1 else (some[0] + some[1], some[1])

    assert torch.equal(in_slabs(run, 4, x), x * 2)
    both = in_slabs(run, 4, x, y)
    assert torch.equal(both[0], x + y) and torch.equal(both[1], y) and sizes == [4] * 4
