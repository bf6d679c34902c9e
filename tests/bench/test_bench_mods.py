"""Suites "mods" and "gym": each mask and score as onchip and as FlexAttention see it, how much a mask shows, and rows that people can read."""

import json
import warnings

import pytest
import torch

from onchip.bench import data, mods, passes, report, run, suite
from onchip.bench.suite import Pass, Row
from onchip.core import device as devices
from onchip.core import settings
from onchip.core.masks import Full, as_mask
from onchip.core.problem import Attention
from onchip.core.scores import chain
from onchip.dispatch import select

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = Attention("prefill", 2, 64, 64, 4, 4, 16, torch.float32, Full())
EFFORT = run.Effort(2, 0.002)

plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")
named = pytest.mark.parametrize("name", mods.MODS)


def row(op: str, name: str) -> Row:
    return Row(Pass(op, mods.sizes(name, SMALL), name), "mods", name)


@pytest.fixture(autouse=True)
def as_bench():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FlexAttention would rather be compiled
        yield


@named
def test_onchip_and_flex_attention_agree_with_the_reference(name):
    made = data.inputs(row("forward", name), CPU)
    ours, flex = passes.onchip(made).run(), passes.flex(False)(made).run()
    assert made.error(ours, None) <= made.tolerance and made.error(flex, ours) <= made.tolerance
    if name != "plain":
        bare = passes.onchip(data.Trained(Pass("forward", made.problem.inner), made.q, made.k, made.v, made.d_out)).run()
        assert name == "latent attention" or not made.error(bare, ours) <= made.tolerance  # the mod changes something


@named
def test_gradients_agree_with_the_reference(name):
    made = data.inputs(row("backward", name), CPU)
    found = passes.onchip(made).run()
    assert made.error(found, None) <= made.tolerance
    assert len(found) == (4 if name == "sinks" else 3)


@named
def test_a_kernel_for_a_gpu_takes_it(name):
    p = mods.sizes(name, SMALL._replace(dtype=torch.bfloat16))
    given = mods.make(name, p, CPU).arguments
    score = chain(given.get("bias"), given.get("score"), given.get("softcap"))
    p = p._replace(mask=as_mask(given["mask"]).static() if "mask" in given else p.mask, score=score.static() if score else None)
    for op in ("prefill", "backward"):
        assert select(p._replace(op=op), devices.gpu("H200")).kernel.needs_triton


def test_areas_by_hand():
    def area(name):
        p = mods.sizes(name, SMALL)
        return mods.area(mods.make(name, p, CPU), p, CPU) / (p.batch * p.heads)

    assert area("plain") == area("softcap") == 64 * 64
    assert area("causal") == 64 * 65 / 2
    assert area("sliding window") == 36 + (64 - 8) * 9
    assert area("prefix LM") == 64 * 65 / 2 + 28
    assert area("NATTEN") == area("NATTEN, tiled") == area("NATTEN, Morton") == 64 * 9
    assert area("cross-attention") == 64 * 16
    assert area("draft training") == 64 * 16 + 4 * 136


def test_a_mask_of_every_head_is_counted_in_parts(monkeypatch):
    made = mods.make("video sparse", SMALL, CPU)
    whole = mods.area(made, SMALL, CPU)
    monkeypatch.setattr(mods, "CELLS", 1000)
    assert mods.area(made, SMALL, CPU) == whole


def test_cost_counts_what_is_seen_and_what_is_read():
    plain, causal, bias = (data.inputs(row("forward", name), CPU).cost for name in ("plain", "causal", "bias [B,H,N,N]"))
    assert causal.flops == plain.flops * 65 / 128 and causal.bytes == plain.bytes
    assert bias.flops == plain.flops and bias.bytes == plain.bytes + 4 * 2 * 4 * 64 * 64


def test_every_mod_has_its_row():
    asked = [row.problem for name in ("mods", "gym") for row in suite.rows(name, GPU)]
    assert {(p.op, p.mod) for p in asked} == {(op, name) for op in ("forward", "backward") for name in mods.MODS if name not in mods.DENSE}
    assert all(p.inner.batch * p.inner.len_q == 16_384 and p.inner.len_q == 8192 for p in asked)
    assert suite.rows("gym", GPU)[0].problem.mod == "plain"  # what the others are measured by
    assert set(mods.DENSE) < {row.problem.mod for row in suite.rows("sdpa", CPU)}


@plain_torch
def test_a_suite_on_this_machine(monkeypatch, tmp_path, capsys):
    names = ("plain", "softcap", "sinks", "document")
    monkeypatch.setitem(suite.SUITES, "tiny", lambda _device, _quick: [row(op, name) for op in ("forward", "backward") for name in names])
    monkeypatch.setattr(run, "QUICK", EFFORT)
    path = run.bench("tiny", CPU, tmp_path, quick=True)
    assert "aten" not in path.read_text()  # names, not the texts of functions
    result = json.loads(path.read_text())
    for (op, name), made in zip([(op, name) for op in ("forward", "backward") for name in names], result["rows"], strict=True):
        assert made["error"] == {} and made["problem"].endswith(f"fp32 {name}") and made["fields"]["mod"] == name
        assert set(made["seconds"]) == ({"onchip", "FlexAttention, eager"} if op == "forward" else {"onchip"})
        over = made["over_plain"]
        assert over["time"] > 0 and (over["time"] == pytest.approx(over["a pair"])) == (name != "document")
        assert report._over_plain(made).endswith("a pair") == (name == "document")
    assert {(bar["against"], bar["measure"]) for bar in result["summary"]} == {("FlexAttention, eager", "speed"), ("plain", "time"), ("plain", "time a pair")}
    assert "Summary" in capsys.readouterr().out and "Summary" in path.with_suffix(".html").read_text()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("name", ["sinks", "document", "video sparse"])
def test_compiled_flex_attention_agrees(name, op):
    p = SMALL._replace(len_q=512, len_k=512, dim=64, dtype=torch.bfloat16)
    made = data.inputs(Row(Pass(op, p, name), "mods", name), GPU)
    ours, flex = passes.onchip(made).run(), passes.flex(True)(made)
    assert made.error(ours, None) <= made.tolerance
    assert made.error(flex.run(), ours) <= made.tolerance and made.error(flex.run(), ours) <= made.tolerance  # the graph is kept
