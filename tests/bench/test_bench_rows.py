"""The suite of operators on rows: every entry is what plain torch computes, forward and backward, and the goals count what they should."""

import pytest
import torch

from onchip.bench import goals, peers, rows, run
from onchip.bench.suite import Row
from onchip.core import settings

CPU = torch.device("cpu")
SMALL = {"rotary": (7, 640), "hadamard": (3, 256)}
plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")
OPS = [(name, op) for name, operator in rows.OPERATORS.items() for op in (rows.FORWARD, rows.BACKWARD) if op == rows.FORWARD or operator.back]


@plain_torch
@pytest.mark.parametrize(("name", "op"), OPS)
def test_an_entry_agrees_with_plain_torch(name, op):
    p = rows.RowOp(op, name, *SMALL.get(name, (5, 24)), torch.float32)
    made = rows.given(p, CPU)
    cost, outputs = made.cost, [prepare(made).run() for prepare in (rows.onchip, rows.torch_eager)]
    assert cost.bytes >= 4 * p.rows * p.width
    for output in outputs:
        error = made.error(output, None)
        assert (error is None) == (name in rows.DRAWN) and (error is None or error < 1e-5)
    worse = [x * 1.1 for x in outputs[0]] if isinstance(outputs[0], (tuple, list)) else outputs[0] * 1.1
    assert name in rows.DRAWN or made.error(worse, None) > made.tolerance


def test_the_rows_of_a_gpu():
    found = [problem for problem, _, _ in rows.problems(torch.device("cuda"), False)]
    large = [p for p in found if (p.rows, p.width) not in rows.SMALL]
    assert {p.name for p in found} == set(rows.OPERATORS) and all(2 * p.rows * p.width >= 64 << 20 for p in large)
    assert {p.width for p in found if p.name == "swiglu"} == set(rows.WIDTHS)
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
    def row(x, ours, peer, size):
        return {"fields": {"group": "swiglu", "x": x}, "seconds": {"onchip": ours, "torch.compile": peer}, "cost": {"bytes": size}}

    result = {"device": {"kind": "cuda", "measured": {"bandwidth": 4e12}}, "rows": [row("16384x4096", 1e-4, 0.9e-4, 3.8e8), row("1x4096", 2e-6, 1.5e-6, 2e4)]}
    share, ratio, more = goals.rows(result)
    assert share["measured"] == pytest.approx(0.95) and share["met"]
    assert ratio["measured"] == pytest.approx(0.9) and not ratio["met"]
    assert more["measured"] == pytest.approx(0.5) and not more["met"]
    assert goals.rows({"device": {"kind": "cpu"}, "rows": []}) == []
