"""The suite of a decoder block: all contenders compute the same, and what a fusion saves is counted as by hand."""

import json

import pytest
import torch

from onchip.bench import block, block_report, peers, report, run, suite
from onchip.bench.block import FUSIONS, INFERENCE, TRAINING, Block
from onchip.core import settings
from onchip.core.problem import Cost
from onchip.dispatch import OPS

CPU = torch.device("cpu")
SIZES = (48, 4, 2, 16, 56)
FP32 = torch.float32
plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")


@pytest.mark.parametrize("op", [INFERENCE, TRAINING])
def test_every_contender_agrees(op):
    made = block.given(Block(op, 11, SIZES, FP32), CPU)
    ways = [block.ONCHIP, block.TORCH, *(fusion.undone for fusion in FUSIONS.values())]
    outputs = [made.call(parts).run() for parts in ways]
    assert all(len(output) == (2 if op == INFERENCE else 2 + len(made.weights)) for output in outputs)
    assert all(made.error(output, None) < 1e-5 for output in outputs)
    assert made.error(tuple(1.01 * x for x in outputs[0]), None) > made.tolerance
    wrong = block.TORCH._replace(turn=lambda q, k, table: (q, k))
    assert made.error(made.call(wrong).run(), None) > made.tolerance


def test_what_a_fusion_saves():
    """In bytes of float32: SiLU reads and writes n, the product reads 2 n and writes n; the fused operator reads 2 n and writes n."""
    n = 4 * 11 * 56
    assert block.saved(Block(INFERENCE, 11, SIZES, FP32), "activation") == 2 * n
    # backward: the product's two gradients and SiLU's, 3 n each, and both written into one tensor, 4 n; the fused operator 5 n
    assert block.saved(Block(TRAINING, 11, SIZES, FP32), "activation") == (2 + 9 + 4 - 5) * n
    assert block.saved(Block(INFERENCE, 11, SIZES, FP32), "qkv") == 2 * 4 * 11 * 48, "y is read three times"
    assert all(block.saved(Block(op, 64, SIZES, FP32), fusion.name) > 0 for op in (INFERENCE, TRAINING) for fusion in FUSIONS.values())


def test_the_cost_of_a_block():
    p = Block(TRAINING, 11, SIZES, FP32)
    weights = 48 * (64 + 32 + 32) + 64 * 48 + 3 * 48 * 56
    between = [OPS[problem.op].cost(problem) for name in ("norm", "norm", "rotary", "attention", "activation") for problem in p.problems(name)]
    assert p.cost.flops == 6 * 11 * weights + sum(cost.flops for cost in between)
    assert isinstance(p.cost, Cost) and p.cost.bytes > p._replace(op=INFERENCE).cost.bytes


@plain_torch
def test_a_row_and_its_report(monkeypatch, tmp_path):
    p = Block(TRAINING, 16, SIZES, FP32)
    monkeypatch.setitem(suite.SUITES, "block", lambda _device, _quick: [suite.Row(p, f"Llama block, {p.op}", "16 tokens")])
    monkeypatch.setattr(run, "QUICK", run.Effort(2, 0.002))
    path = run.bench("block", CPU, tmp_path, quick=True)
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert set(row["seconds"]) == {"onchip", "torch", *FUSIONS} and row["error"] == {} and row["rate"]["unit"] == "FLOP/s"
    assert report.summary(row).best == "torch", "a block with one fusion undone is no peer"
    found = list(block_report.lines(result))
    assert len(found) == len(FUSIONS) and all(len(line) == len(block_report.COLUMNS) for line in found)
    assert found[0][1] in path.with_suffix(".html").read_text()
    del row["seconds"]["onchip, rotary undone"]
    assert next(line for line in block_report.lines(result) if line[1] == "rotary undone")[-2:] == ("-", "")


def test_who_takes_part_on_a_gpu():
    p = Block(TRAINING, 8, SIZES, torch.bfloat16)
    gpu = torch.device("cuda")
    assert [peer.name for peer in peers.PEERS if peer.kind is Block and peer.why_not(p, gpu) is None] == ["onchip", *FUSIONS, "torch.compile", "Liger", "torch"]
