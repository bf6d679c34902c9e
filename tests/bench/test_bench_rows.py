"""The suite of operators on rows: every entry is what plain torch computes, forward and backward, and the goals count what they should."""

import pytest
import torch

from onchip.bench import goals, peers, rows, run
from onchip.bench.row_operator import WIDTHS
from onchip.bench.suite import Row
from onchip.core import settings

CPU = torch.device("cpu")
plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")
WAYS = {"problem": rows.FORWARD, "back": rows.BACKWARD, "step": rows.STEP}
OPS = [(name, op) for name, operator in rows.OPERATORS.items() for way, op in WAYS.items() if getattr(operator, way)]


@plain_torch
@pytest.mark.parametrize(("name", "op"), OPS)
def test_an_entry_agrees_with_plain_torch(name, op):
    p = rows.RowOp(op, name, *rows.OPERATORS[name].least, torch.float32)
    made = rows.given(p, CPU)
    calls = [prepare(made) for prepare in (rows.onchip, rows.torch_eager)]
    cost, outputs = made.cost, [call.run() for call in calls]
    assert op != rows.FORWARD or all((call.result is None) != made.operator.drawn for call in calls), "a graph's result is compared where none is drawn"
    assert cost.bytes > 4 * p.rows or made.maths
    for output in outputs:
        error = made.error(output, None)
        assert (error is None) == made.operator.drawn and (error is None or error < 1e-5)
    worse = [x.float() * 1.1 for x in outputs[0]] if isinstance(outputs[0], (tuple, list)) else outputs[0] * 1.1
    assert made.operator.drawn or made.error(worse, None) > made.tolerance


def test_the_rows_of_a_gpu():
    found = [problem for problem, _, _ in rows.problems(torch.device("cuda"), False)]
    large = [p for p in found if (p.rows, p.width) not in rows.SMALL and not rows.OPERATORS[p.name].sizes]
    assert {p.name for p in found} == set(rows.OPERATORS) and all(2 * p.rows * p.width >= 64 << 20 for p in large)
    assert len(found) <= 102, "the suite is to take 200 s"
    assert {p.width for p in found if p.name == "swiglu"} == set(WIDTHS)
    text = "swiglu backward 16384x4096 bf16"
    assert text in {str(p) for p in found} and len({str(p) for p in found}) == len(found)


@plain_torch
def test_a_row_is_measured(monkeypatch):
    p = rows.RowOp(rows.BACKWARD, "swiglu", 8, 24, torch.float32)
    entry = run.measure(Row(p, "swiglu backward", "8x24"), CPU, run._measured(CPU), run.Effort(2, 0.002))
    assert set(entry["seconds"]) == {"onchip", "torch"} and entry["error"] == {} and entry["kernel"] == "reference"
    assert entry["rate"]["unit"] == "B/s" and entry["cost"]["bytes"] == 5 * 8 * 24 * 4
    half = p._replace(dtype=torch.bfloat16)
    (theirs,) = (peer for peer in peers.PEERS if peer.name == "FlashInfer" and peer.kind is rows.RowOp)
    assert theirs.why_not(half, torch.device("cuda")) == "no gradients"
    assert theirs.why_not(half._replace(op=rows.FORWARD), torch.device("cuda")) is None
    assert theirs.why_not(half._replace(op=rows.FORWARD, name="hadamard"), torch.device("cuda")) == "no hadamard"


def test_goals():
    def row(group, x, ours, peer, **cost):
        costs = {"bytes": 1, "flops": 1} | cost
        return {"fields": {"group": group, "x": x}, "seconds": {"onchip": ours, "torch.compile": peer}, "cost": costs}

    found = [
        row("swiglu", "16384x4096", 1e-4, 0.9e-4, bytes=3.8e8),
        row("swiglu", "1x4096", 2e-6, 1.5e-6, bytes=2e4),
        row("GroupNorm+SiLU 1x512x128x128", "512x16384", 1e-5, 1.9e-5, bytes=2e7),
        row("cross_entropy step", "8192x128256", 1e-3, 2e-3, bytes=3.8e9),
        row("linear_cross_entropy step", "8192x128256", 0.05, 0.06, bytes=2e9, flops=2.5e13),
        row("sample, joint", "1x128256", 16e-6, 1e-4),
    ]
    made = {goal["what"]: goal for goal in goals.rows({"device": {"kind": "cuda", "measured": {"bandwidth": 4e12}}, "rows": found})}
    expected = {
        "share of the copy bandwidth, 64 MiB and more": (0.95, True),
        "times the speed of the best peer, 64 MiB and more": (0.9, False),
        "microseconds more than the best peer, small": (0.5, False),
        "times torch.compile, GroupNorm": (1.9, False),
        "TB/s, cross_entropy step": (3.8, True),
        "TFLOP/s, linear_cross_entropy step": (500, False),
        "microseconds, joint sampling, 1x128256": (16, False),
    }
    assert {what: goal["met"] for what, goal in made.items() if goal["met"] is not None} == {what: met for what, (_, met) in expected.items()}
    assert {what: made[what]["measured"] for what in expected} == pytest.approx({what: value for what, (value, _) in expected.items()})
    assert goals.rows({"device": {"kind": "cpu"}, "rows": []}) == []
