"""Warming up: what an H200 would be asked to compile, without one; and on a GPU, that nothing is compiled after it."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import tiny
from onchip import dispatch
from onchip.core import device as devices
from onchip.engine import padded
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.warm import rounds, run, sketched
from onchip.kernels.attention import key_parts
from onchip.kernels.compiling import compilations, withheld
from onchip.ops import checks, fused

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 640}
CONTEXT = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("warm") / "model", weights=False, **SIZES, max_position_embeddings=CONTEXT)


def traffic(llm, seed: int, share: float = 0.3) -> None:
    """Requests of all lengths that come a few a step, of which some begin alike, filter, or want more than tokens."""
    drawn = random.Random(seed)
    wanted = ({}, {"top_k": 5, "top_p": 0.9}, {"presence_penalty": 0.3}, {"logprobs": 2}, {"logit_bias": {7: 1.0}})
    left = 40
    while left or not llm.idle:
        for _ in range(min(left, drawn.choice((0, 0, 1, 1, 2, 9)))):
            own = [drawn.randrange(640) for _ in range(drawn.choice((1, 3, 17, 60, 200, 400)))]
            params = SamplingParams(drawn.randint(1, 12), drawn.choice((0.0, 0.7)), ignore_eos=True, **(drawn.choice(wanted) if seed else {}))
            prefix = [drawn.randrange(3) + 3] * 520
            llm.add(llm.request(prefix + own if drawn.random() < share else own, params))
            left -= 1
        llm.step()
    llm.tree.clear()


@pytest.fixture
def hopper(monkeypatch):
    """Launches go to an H200 that is not there: `withheld` sees what they ask for, and nothing is compiled."""
    triton = pytest.importorskip("triton")
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: "an H200 of this test")
        get_current_stream = staticmethod(lambda device: 0)

    monkeypatch.setattr(devices, "of", lambda device: devices.GPUS["H200"])
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda *asked: object())
    monkeypatch.setattr(checks, "check_pages", lambda *given: None)  # nobody reads lengths of a GPU, and where launches are withheld they may be any,
    monkeypatch.setattr(fused, "ends", lambda places: None)  # nor places
    monkeypatch.setattr(key_parts, "LEAST", 64)  # so that in a short context keys go in parts, too
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight)))  # nor numbers: a CPU's in bf16 take 20 s
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a GPU where there is none")
def test_a_warm_up_asks_for_all_that_traffic_asks_for(model, hopper):
    llm = LLM(model, device="cpu", dtype="bf16", dummy_weights=True, max_batch=12, step_tokens=1500)
    llm.model._few = lambda *a: None  # on a CPU weights are packed for oneDNN, which no kernel of few rows reads
    graphs = tiny.as_graphs(llm.runner)
    with withheld() as asked:
        ran = list(run(llm, rounds(llm), itertools.count()))
        llm.runner.thin()
        llm.tree.clear()
        graphs.clear()
        known = set(asked)
        assert {"_prefill", "_norm", "_rope_append", "_draw", "_adjust"} <= {name for name, _ in known} and len(ran) > 40
        for seed in range(3):
            traffic(llm, seed)
        late = asked - known
    assert not late, {name for name, _ in late}
    assert set(padded.SIZES) - set(llm.runner.padded.graphs) == {1792, 2048}  # more than the tokens of a step
    assert llm.idle and llm.pool.num_free == llm.pool.num_pages


def test_memory_of_what_few_want_is_given_back(model):
    llm = LLM(model, device="cpu", dtype="fp32", dummy_weights=True, max_batch=4, step_tokens=256)
    before = llm.generate([[1, 2, 3]], SamplingParams(4))
    ran = list(run(llm, rounds(llm), itertools.count()))
    assert any(one.params.penalised for one in ran) and any(one.masked for one in ran) and max(map(len, (one.lengths for one in ran))) == 4
    assert llm.runner.state.output is not None
    llm.runner.thin()
    assert llm.runner.state.output is None and llm.runner.state.mask is None and llm.runner.rows == []
    assert llm.generate([[1, 2, 3]], SamplingParams(4)) == before


def test_no_graph_runs_while_launches_are_withheld(model):
    llm = LLM(model, device="cpu", dtype="fp32", dummy_weights=True, max_batch=4, step_tokens=256)
    tiny.as_graphs(llm.runner)
    llm.generate([[1, 2, 3], [4] * 200], SamplingParams(4))
    assert llm.runner.padded.graphs
    with sketched(llm.runner):
        assert not (llm.runner.graphs or llm.runner.padded.graphs)
        llm.generate([[1, 2, 3], [4] * 200], SamplingParams(4))
        assert llm.runner.padded.graphs
    assert not (llm.runner.graphs or llm.runner.padded.graphs)


def test_only_an_idle_engine(model):
    llm = LLM(model, device="cpu", dtype="fp32", dummy_weights=True)
    assert llm.warm().compiled == 0  # nothing to do on a CPU
    llm.add(llm.request([1, 2, 3]))
    with pytest.raises(ValueError, match="warm: requests wait or run; warm an engine up before the first of them"):
        llm.warm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter compiles nothing")
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_nothing_is_compiled_after_it(model, used):
    llm = LLM(model, device="cuda", dtype="bf16", dummy_weights=True, max_batch=20, step_tokens=1024, cache_gib=1.0)
    if used:  # with graphs of decodes and of chunks beside them, which launch whatever is withheld
        traffic(llm, 0, share=0.5)
        assert llm.runner.graphs and llm.runner.padded.graphs
    warmed = llm.warm()
    assert warmed.rounds and warmed.graphs >= 5 and llm.pool.num_free == llm.pool.num_pages
    before, graphs = compilations.compiled + compilations.loaded, len(llm.runner.graphs)
    traffic(llm, 0, share=0.0)
    assert len(llm.runner.graphs) == graphs
    for seed in range(1, 4):
        traffic(llm, seed)
    assert compilations.compiled + compilations.loaded == before
