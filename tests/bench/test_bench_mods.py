"""Suites "mods" and "gym": each mask and score as onchip and as FlexAttention see it, how much a mask shows, and rows that people can read."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from onchip.bench import chance, data, mod, mods, passes, peers, report, run, suite
from onchip.bench.suite import Pass, Row
from onchip.core import device as devices
from onchip.core import settings
from onchip.core.masks import Full, as_mask
from onchip.core.problem import Attention, Dropout
from onchip.core.scores import chain
from onchip.dispatch import select

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = Attention("prefill", 2, 64, 64, 4, 4, 16, torch.float32, Full())
LONG = SMALL._replace(batch=1, len_q=512, len_k=512, dim=64)  # where chance evens out
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
@pytest.mark.sampled(3)
def test_onchip_and_flex_attention_agree_with_the_reference(name):
    made = data.inputs(row("forward", name), CPU)
    ours = passes.onchip(made).run()
    assert made.error(ours, None) <= made.tolerance
    assert name in mods.DROPPED or made.error(passes.flex(False)(made).run(), ours) <= made.tolerance
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
    extras = ("dropout",) if "dropout" in given else ()
    p = p._replace(mask=as_mask(given["mask"]).static() if "mask" in given else p.mask, score=score.static() if score else None, extras=extras)
    for op in ("prefill", "backward"):
        assert select(p._replace(op=op), devices.gpu("H200")).kernel.needs_triton


def test_areas_by_hand():
    def area(name):
        p = mods.sizes(name, SMALL)
        return mod.area(mods.make(name, p, CPU), p, CPU) / (p.batch * p.heads)

    assert area("plain") == area("softcap") == area("dropout") == 64 * 64
    assert area("causal") == area("dropout, causal") == 64 * 65 / 2
    assert area("sliding window") == 36 + (64 - 8) * 9
    assert area("prefix LM") == 64 * 65 / 2 + 28
    assert area("NATTEN") == area("NATTEN, tiled") == area("NATTEN, Morton") == 64 * 9
    assert area("cross-attention") == 64 * 16
    assert area("draft training") == 64 * 16 + 4 * 136


def test_a_mask_of_every_head_is_counted_in_parts(monkeypatch):
    made = mods.make("video sparse", SMALL, CPU)
    whole = mod.area(made, SMALL, CPU)
    monkeypatch.setattr(mod, "CELLS", 1000)
    assert mod.area(made, SMALL, CPU) == whole


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


# ---- padding


def test_rows_with_padding_and_who_takes_them():
    for device, takers in ((GPU, ["onchip", "cuDNN (torch)", "FlexAttention"]), (CPU, ["onchip", "torch SDPA", "FlexAttention, eager"])):
        rows = suite.rows("mods", device, True, "padding")
        assert [(row.problem.op, row.problem.mod) for row in rows] == [(op, name) for op in ("forward", "backward") for name in mods.PADDED]
        said = {peer.name: peer.why_not(rows[0].problem, device) for peer in peers.PEERS if peer.kind is Pass}
        assert [name for name, why in said.items() if why is None] == takers
        assert device == CPU or said["FlashAttention-2 (torch)"] == "no padding"


@pytest.mark.parametrize("name", mods.PADDED)
def test_padding_is_in_the_sequence_that_is_looked_at(name):
    """The first one, of which a wrong mask shows in the row's own check; torch's own attention says the same of all."""
    made = data.inputs(row("backward", name), CPU)
    ours = passes.onchip(made).run()
    assert made.error(passes.sdpa(None)(made).run(), ours) <= made.tolerance
    seen = mod.dense(made.mod, made.problem.inner, CPU)
    keys, causal = made.problem.inner.len_k, "causal" in name
    assert seen[0].any(1).sum() == keys * 3 // 4 and seen[0, 0, -1].sum() == keys * 3 // 4
    assert seen[0, 0, 0].sum() == (1 if causal else keys * 3 // 4)


# ---- dropout


def dropping(op: str, name: str, **own) -> data.Trained:
    """Inputs of a row with dropout, their mod with other arguments in place of its own."""
    torch.manual_seed(5)
    made = data.inputs(Row(Pass(op, LONG, name), "mods", name), CPU)
    return replace(made, mod=replace(made.mod, own=made.mod.own | own))


def test_rows_with_dropout_and_who_takes_them():
    for device, quick in ((GPU, False), (GPU, True), (CPU, True)):
        rows = suite.rows("mods", device, quick, "dropout")
        assert [(row.problem.op, row.problem.mod) for row in rows] == [(op, name) for op in ("forward", "backward") for name in mods.DROPPED]
        assert all(row.group == f"the price of a mod, {row.problem.op}" and row in suite.rows("mods", device, quick, "price") for row in rows)
        (inner,) = {row.problem.inner for row in rows}
        assert device == CPU or (inner.batch, inner.len_q, inner.heads, inner.dim, inner.dtype) == (2, 8192, 16, 128, torch.bfloat16)
        for row in rows:
            said = {peer.name: peer.why_not(row.problem, device) for peer in peers.PEERS if peer.kind is Pass}
            takers = ["onchip", "cuDNN (torch)", "FlashAttention-2 (torch)"] if device == GPU else ["onchip", "torch SDPA"]
            assert [name for name, why in said.items() if why is None] == takers
            assert said["FlexAttention" if device == GPU else "FlexAttention, eager"] == "has no dropout"
            assert device == CPU or (said["FlashAttention-4"], said["onchip, Triton"]) == ("has no dropout", "timed without a mod only")
    assert all(peer.draws == ("torch" in peer.name) for peer in peers.PEERS if peer.kind is Pass)


@pytest.mark.parametrize("op", ["forward", "backward", "step"])
@pytest.mark.parametrize("name", mods.DROPPED)
def test_a_wrong_dropout_is_seen(op, name):
    made, (p, seed, _) = dropping(op, name), mods.DROP
    right, theirs = passes.onchip(made).run(), passes.sdpa(None)(made).run()
    assert made.error(right, None) <= made.tolerance and chance.compared(made, right, False).startswith("number by number with the float32 reference")
    assert made.error(theirs, None) > 10 * made.tolerance  # numbers of its own, about which its mean and noise say that they are as many
    assert chance.compared(made, theirs, True).startswith("by mean and noise alone")
    for wrong in (Dropout(p, seed + 1), Dropout(p, seed, 1)):
        found = passes.onchip(dropping(op, name, dropout=wrong)).run()
        assert made.error(found, None) > 10 * made.tolerance and chance.compared(made, found, True)  # which weights: the reference alone knows
    bare = passes.onchip(dropping(op, name, dropout=Dropout(0.0, seed))).run()
    often, other = (passes.sdpa(None)(dropping(op, name, dropout=Dropout(2 * p))).run(), tuple(torch.nan * x for x in as_tuple(right)))
    for found in (bare, often, other, tuple((1 - p) * x for x in as_tuple(theirs))):  # none, twice as many, NaN, and without 1 / (1 - p)
        with pytest.raises(ValueError, match=r"^wrong: it is .* of the result without dropout, and noise of .*; not timed$"):
            chance.compared(made, found, True)


def test_heads_whose_numbers_are_drawn_again():
    """They fit beside all else in the memory of a GPU of 80 GB, and are more than one, since a kernel may number heads wrongly."""
    (inner,) = {row.problem.inner for row in suite.rows("mods", GPU, only="dropout")}
    nothing = torch.empty(0)
    for name, heads in (("dropout", 2), ("dropout, causal", 2), ("softcap", 4)):
        assert data.Trained(Pass("forward", inner, name), *[nothing] * 4, mod=mods.make(name, inner, CPU))._heads == (heads, heads)


def as_tuple(output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


@plain_torch
def test_a_row_says_what_was_compared(monkeypatch):
    row, facts = Row(Pass("backward", LONG, "dropout"), "the price of a mod, backward", "dropout"), run._measured(CPU)
    made = run.measure(row, CPU, facts, EFFORT)
    assert made["error"] == {} and set(made["seconds"]) == set(made["compared"]) == {"onchip", "torch SDPA"}
    assert made["refused"]["FlexAttention, eager"] == "has no dropout"
    assert made["distance"]["onchip"] < 1e-3 and made["distance"]["torch SDPA"] is None
    said = report.notes(made)
    assert any(note.startswith("onchip was compared number by number with the float32 reference") for note in said)
    assert any(note.startswith("torch SDPA was compared by mean and noise alone, not number by number") for note in said)
    json.dumps(made, allow_nan=False)

    def other_seed(i):
        return passes.onchip(replace(i, mod=replace(i.mod, own={"dropout": Dropout(mods.DROP.p, mods.DROP.seed + 1)})))

    def never_drops(i):
        return passes.sdpa(None)(replace(i, mod=mod.Mod()))

    monkeypatch.setattr(peers, "PEERS", (peers.Peer("onchip", Pass, other_seed), peers.Peer("torch SDPA", Pass, never_drops, draws=True)))
    made = run.measure(row, CPU, facts, EFFORT)
    assert made["seconds"] == {} and made["error"]["onchip"].startswith("ValueError: wrong: its result is off by 0.4")
    assert made["error"]["torch SDPA"].startswith("ValueError: wrong: it is 1.000 of the result without dropout, and noise of 0.000 of its norm")


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
