"""Two ranks on one machine (gloo) against one: logits to rounding, greedy tokens the same, and each reads about half of the weights."""

import contextlib
import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import tiny
from onchip import record
from onchip.cache.paged import PageList, PagePool
from onchip.models import weights
from onchip.models.decoder import Decoder, Step
from onchip.models.families import ModelConfig
from onchip.models.lora import Adapter, AdapterSlots, AdapterTable
from onchip.models.parallel import ALONE, TensorParallel, why_apart

CPU = torch.device("cpu")
MODELS = {  # what departs from tiny.CONFIG
    "llama": {},
    "tied, a word left over": {"tie_word_embeddings": True, "vocab_size": 319},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "fused": {"model_type": "phi3"},
    "norms": {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
}
FUSED = {  # what a GPU's menus have more of, by plain torch: modules that find a kernel there, of the model "llama"
    "sums with what follows": ("layers",),
    "products with what stands around them": ("layers", "decoder"),
}


def save(folder, raw):
    """Random weights for everything a decoder of this config reads, Phi-3's as its files have them."""
    places = Decoder(ModelConfig.read(raw), dtype=torch.float32, device=CPU).places
    found = {}
    for name, (_, spans) in places.pieces.items():
        shape = [span.whole for span in spans]
        found[name] = torch.randn(shape) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    if raw["model_type"] == "phi3":
        for name, parts in places.fused.items():
            if parts[0] in found:
                found[name] = torch.cat([found.pop(part) for part in parts])
    folder.mkdir()
    save_file(found, folder / "model.safetensors")


@torch.inference_mode()
def run(raw, folder, parallel):
    """Logits of a prompt and of greedy steps behind it, and the tokens, without an adapter and with one; the share of the weights that was read."""
    model = Decoder(ModelConfig.read(raw), dtype=torch.float32, device=CPU, parallel=parallel)
    read = []

    def counted(view):
        def part(at):
            read.append(view.read(at))
            return read[-1]

        return dataclasses.replace(view, read=part)

    views = list(weights.views(folder, torch.float32))
    model.load((name, counted(view)) for name, view in views)
    model.prepare(64)
    assert model.ranks.boxes is None and model.ranks.apart == ("" if parallel.of == 1 else "ranks share memory on NVIDIA GPUs alone")
    model.adapters = AdapterTable(model, AdapterSlots(2, 4))
    matrices = {name: (torch.randn(3, p.cols.whole) * 0.2, torch.randn(p.rows.whole, 3) * 0.2) for name, p in model.places.matrices.items()}
    model.adapters.add(Adapter("random", 3, matrices))
    found = [greedy(model, torch.arange(1, 20), adapter) for adapter in (-1, 0)]
    logits, tokens = zip(*found, strict=True)
    return torch.stack(logits), tokens, sum(t.numel() for t in read) / sum(math.prod(view.shape) for _, view in views)


def greedy(model, prompt, adapter, count=12):
    c, n, pages = model.config, len(prompt), PageList()
    pool = PagePool(c.layers, 8, 8, c.kv_heads, c.dim, dtype=torch.float32, device=CPU)
    has = torch.full((n,), adapter, dtype=torch.int32) if adapter >= 0 else None
    step = Step(prompt, torch.arange(n), pool.append(pages, n), torch.tensor([0, n], dtype=torch.int32), n, adapters=has)
    logits, tokens = [model.logits(model.forward(step, pool))], []
    for _ in range(count):
        tokens.append(logits[-1][-1].argmax().item())
        at = torch.tensor([pages.length])
        slots = pool.append(pages, 1)
        has = None if has is None else has[:1]
        step = Step(torch.tensor(tokens[-1:]), at, slots, page_table=pool.table([pages]), lengths=at.int() + 1, adapters=has)
        logits.append(model.logits(model.forward(step, pool)))
    return torch.cat(logits), tokens


def one_rank(rank, of, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=of)
    found = {}
    for name, changes in MODELS.items():
        torch.manual_seed(1)
        found[name] = run(tiny.CONFIG | changes, folder / name, TensorParallel.join())
    for name, modules in FUSED.items():
        torch.manual_seed(1)
        with contextlib.ExitStack() as stack, record() as decisions:
            stack.enter_context(mock.patch("onchip.models.layers._onednn_takes", lambda dtype: False))
            for module in modules:
                stack.enter_context(mock.patch(f"onchip.models.{module}.native", lambda *_: "reference"))
            found[name] = run(tiny.CONFIG, folder / "llama", TensorParallel.join())
        assert {d.problem.variant for d in decisions if d.problem.op == "sum_ranks"} >= {"", "residual", "residual norm"}
        assert any(d.problem.op == "skinny_linear" for d in decisions) == ("decoder" in modules)
    with mock.patch.object(TensorParallel, "_apart", lambda *_: ""):
        assert TensorParallel.join().meet(64, torch.float32, CPU).apart.startswith("torch shared no memory among the ranks: ")
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """{model: what one process has}, and the same of each of two ranks."""
    folder, alone = tmp_path_factory.mktemp("ranks"), {}
    for name, changes in MODELS.items():
        torch.manual_seed(0)
        save(folder / name, tiny.CONFIG | changes)
        torch.manual_seed(1)
        alone[name] = run(tiny.CONFIG | changes, folder / name, ALONE)
    torch.multiprocessing.spawn(one_rank, (2, folder), nprocs=2)
    return alone, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [*MODELS, *FUSED])
def test_two_ranks_are_as_one(ranks, name):
    alone, (first, second) = ranks
    logits, tokens, read = alone["llama" if name in FUSED else name]
    assert torch.equal(first[name][0], second[name][0])  # each draws from the same bits
    torch.testing.assert_close(first[name][0], logits, atol=1e-4, rtol=1e-4)
    assert first[name][1] == second[name][1] == tokens
    assert read == 1 and (logits[0] - logits[1])[:19].abs().max() > 0.1
    for rank in (first, second):  # norms and single key heads are read by both
        assert 0.48 < rank[name][2] < 0.56


@pytest.mark.parametrize(
    ("changes", "of", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96}, 2, "9 heads over 3 key heads.*take 1 or 3 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}, 3, "take 1 or 2 or 4 or 12 ranks"),
        ({"intermediate_size": 97}, 2, "97 columns in the MLP.*take 1 ranks"),
    ],
)
def test_what_cannot_be_cut(changes, of, words):
    with pytest.raises(ValueError, match=words):
        TensorParallel(0, of).share(ModelConfig.read(tiny.CONFIG | changes))


def test_shares_cover_the_model():
    """Key heads of which there are fewer than ranks are on several; words are shared out to the last."""
    config = ModelConfig.read(tiny.CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 101})
    shares = [TensorParallel(rank, 4).share(config) for rank in range(4)]
    assert [tuple(share.kv_heads) for share in shares] == [(0, 1, 2), (0, 1, 2), (1, 1, 2), (1, 1, 2)]
    assert [tuple(share.heads) for share in shares] == [(0, 2, 8), (2, 2, 8), (4, 2, 8), (6, 2, 8)]
    assert [tuple(share.vocab) for share in shares] == [(0, 26, 101), (26, 26, 101), (52, 26, 101), (78, 23, 101)]


def test_why_ranks_share_no_memory():
    assert why_apart([(7, 0), (7, 1)], True) == ""
    assert why_apart([(7, 0), (7, 1)], False) == "the ranks' GPUs do not all reach each other's memory"
    assert why_apart([(7, 0), (8, 0)], True) == "the ranks are on 2 hosts"
    assert why_apart([(7, 0), (7, 0)], True).startswith("the ranks know their GPUs as cuda:0, cuda:0; let every process see all GPUs")
