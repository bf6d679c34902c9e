"""Passes through autograd: gradients of every peer against the reference, what a step holds, and what is asked of packages of a GPU machine."""

import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from onchip.bench import data, passes, peers, run, suite, warm
from onchip.bench.suite import Pass, Row
from onchip.core import settings
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import E4M3, Attention
from onchip.dispatch import OPS
from onchip.ops.attention import attention, attention_packed

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
EFFORT = run.Effort(2, 0.002)
DENSE = Attention("prefill", 2, 40, 40, 4, 2, 16, FP32, Causal())
PACKED = Attention("prefill", 2, 33, 33, 2, 2, 16, FP32, Causal(), "packed", 0, 40)
OPERATORS = ("forward", "backward", "step")
ROWS = [
    *(Row(Pass(op, DENSE), op, "40") for op in OPERATORS),
    Row(Pass("backward", DENSE._replace(dtype=BF16, mask=Full())), "backward", "bf16"),
    Row(Pass("backward", DENSE._replace(mask=Window(7))), "backward", "window"),
    Row(Pass("backward", DENSE._replace(dim_v=8)), "backward", "d16/8"),
    *(Row(Pass(op, PACKED), op, "7+33", (7, 33)) for op in OPERATORS),
]

plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")


@pytest.fixture(scope="module")
def facts():
    return run._measured(CPU)


@pytest.fixture(autouse=True)
def as_bench():
    """`onchip bench` turns gradients off; a pass that needs them turns them on."""
    with torch.no_grad():
        yield


# ---- right and wrong


@plain_torch
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.problem))
def test_ours_is_right_and_a_fault_is_seen(row):
    made = data.inputs(row, CPU)
    right = passes.onchip(made).run()
    assert made.error(right, None) <= made.tolerance and made.error(right, right) <= made.tolerance
    outputs = right if isinstance(right, tuple) else (right,)
    assert len(outputs) == {"forward": 1, "backward": 3, "step": 4}[row.problem.op]
    for n in range(len(outputs)):
        wrong = tuple(x * 1.1 if n == m else x for m, x in enumerate(outputs))
        assert not made.error(wrong, None) <= made.tolerance
        assert not made.error(wrong, right) <= made.tolerance
    assert not made.error(tuple(x * torch.nan for x in outputs), None) <= made.tolerance


@plain_torch
def test_gradients_in_eight_bits():
    """Held against those of what was quantised."""
    made = data.inputs(Row(Pass("backward", DENSE._replace(dtype=E4M3, dim=64)), "backward", "e4m3"), CPU)
    right = passes.onchip(made).run()
    assert 1e-3 < made.error(right, passes.onchip_bf16(made).run()) <= made.tolerance
    assert made.error(tuple(1.2 * x for x in right), None) > made.tolerance


@pytest.mark.parametrize("memory", ["tokens first", "heads first"])
@pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.transpose(1, 2)], ids=["as it comes", "turned"])
def test_tensors_of_all_peers_lie_as_asked(memory, turn):
    made, seen = data.inputs(Row(Pass("backward", DENSE, memory=memory), "backward", memory), CPU), []

    def attend(q, k, v):
        seen.extend(turn(x) for x in (q, k, v))
        return q * 1

    passes.through(made, attend, turn)
    for x, given in zip(seen, (made.q, made.k, made.v), strict=True):
        assert torch.equal(x, given) and (x if memory == "tokens first" else x.transpose(1, 2)).is_contiguous()


def test_gradients_can_be_taken_again():
    call = passes.onchip(data.inputs(ROWS[1], CPU))
    assert all(torch.equal(x, y) for x, y in zip(call.run(), call.run(), strict=True))


def test_a_few_last_rows_stand_for_a_long_causal_one(monkeypatch):
    made = data.inputs(ROWS[2], CPU)
    whole = made._truth
    monkeypatch.setattr(data, "DENSE", 100)
    monkeypatch.setattr(data, "SAMPLE", 8)
    part = data.Trained(made.problem, made.q, made.k, made.v, made.d_out)._truth
    assert [x.shape[0] for x in part] == [8] * 4
    for few, all_rows in zip(part, whole, strict=True):
        torch.testing.assert_close(few, all_rows[-8:])
    assert data.inputs(ROWS[3], CPU)._rows == 40  # without a mask every query sees the last keys


@plain_torch
@pytest.mark.parametrize("row", ROWS[:4], ids=lambda row: str(row.problem))
def test_beside_torch_on_a_cpu(facts, row):
    entry = run.measure(row, CPU, facts, EFFORT)
    assert entry["error"] == {} and set(entry["seconds"]) == {"onchip", "torch SDPA"}
    assert entry["kernel"] == "blocked"
    assert entry["rate"]["unit"] == "FLOP/s" and entry["fields"]["op"] == row.problem.op and entry["fields"]["inner"]["mask"] in ("Causal", "Full")
    json.dumps(entry, allow_nan=False)


# ---- cost and memory


def test_costs_are_those_of_the_operators():
    forward, backward, step = (data.inputs(row, CPU).cost for row in ROWS[:3])
    assert forward == OPS["prefill"].cost(DENSE) and backward == OPS["backward"].cost(DENSE) and step == forward + backward
    assert backward.flops == 2.5 * forward.flops
    pairs = sum(n * (n + 1) // 2 for n in (7, 33))
    assert data.inputs(ROWS[7], CPU).cost.flops == 10 * pairs * PACKED.heads * PACKED.dim


@plain_torch
def test_a_step_holds_its_tensors_at_least(facts):
    entry = run.measure(ROWS[2], CPU, facts, EFFORT)
    q, k, lse = 2 * 40 * 4 * 16 * 4, 2 * 40 * 2 * 16 * 4, 2 * 40 * 4 * 4
    assert entry["memory"]["ideal"] == 2 * (2 * q + 2 * k) + lse  # q, k, v, the output, and the gradient of each
    assert set(entry["memory"]["held"]) == {"onchip", "torch SDPA"}
    assert all(held >= entry["memory"]["ideal"] for held in entry["memory"]["held"].values())
    assert "memory" not in run.measure(ROWS[1], CPU, facts, EFFORT)


# ---- rows


def test_rows_of_the_suite_on_a_gpu():
    rows = suite.rows("backward", GPU)

    def cells(problems):
        return {(p.dim, p.len_q, str(p.mask)) for p in problems if p.batch * p.len_q == 16_384}

    grid = cells(row.problem.inner for row in rows)
    assert {(dim, n, mask) for dim in (64, 128, 256) for n in (1024, 4096, 16_384) for mask in ("Full", "Causal")} <= grid
    assert (128, 16_384, "Window(1024)") in grid
    assert grid <= cells(row.problem for row in suite.rows("attention", GPU)) | {(128, 8192, "Causal")}
    assert [row.problem.inner.group for row in rows].count(8) == 1
    assert sum(bool(row.lengths) for row in rows) == 2 and all(min(row.lengths) >= 64 and max(row.lengths) <= 8192 for row in rows if row.lengths)
    assert rows[-1].problem.op == "step" and rows[-1].problem.inner.len_q == 65_536


def test_peers_say_why_not():
    def takers(problem, device):
        return {peer.name for peer in peers.PEERS if isinstance(problem, peer.kind) and peer.why_not(problem, device) is None}

    half = Pass("backward", DENSE._replace(dtype=BF16))
    assert takers(half, GPU) == {"onchip", "onchip, Triton", "cuDNN (torch)", "FlashAttention-2 (torch)", "FlashAttention-4"}
    assert takers(half._replace(inner=DENSE._replace(dtype=E4M3, dim=64)), GPU) == {"onchip", "onchip, bf16"}
    assert takers(half._replace(inner=PACKED._replace(dtype=BF16)), GPU) == {"onchip", "onchip, Triton", "FlashAttention-4"}
    assert takers(half._replace(mod="softcap"), GPU) == {"onchip", "FlexAttention"}
    assert takers(Pass("backward", DENSE), CPU) == {"onchip", "torch SDPA"}
    assert takers(Pass("backward", DENSE, "softcap"), CPU) == {"onchip"}
    assert takers(Pass("forward", DENSE, "softcap"), CPU) == {"onchip", "FlexAttention, eager"}


@pytest.mark.parametrize("row", [ROWS[1], ROWS[2], ROWS[3], ROWS[4], ROWS[7]], ids=lambda row: str(row.problem))
def test_flash_attention_4_is_asked_for_the_same(monkeypatch, row):
    def mask(causal, window_size):
        return Causal() if causal else Full() if window_size == (None, None) else Window(window_size[0])

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
        return attention(q, k, v, mask=mask(causal, window_size), kernel="reference"), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, causal=False, window_size=(None, None)):
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        return attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, mask=mask(causal, window_size), kernel="reference"), None

    module = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    made = data.inputs(row, CPU)
    assert made.error(passes.fa4(made).run(), passes.onchip(made).run()) <= made.tolerance


# ---- compiling first


def test_each_row_is_compiled_once(monkeypatch):
    ran = []
    monkeypatch.setitem(suite.SUITES, "tiny", lambda _device, _quick: ROWS)
    ours = peers.Peer("onchip", Pass, lambda made: passes.Call(lambda: ran.append(made.problem)))
    other = peers.Peer("cuDNN (torch)", Pass, lambda made: passes.Call(lambda: ran.append("a peer that keeps nothing")))
    monkeypatch.setattr(peers, "PEERS", (ours, other))
    for part in range(3):
        warm._part("tiny", "cpu", "", "0", str(part), "3")
    assert sorted(map(str, ran)) == sorted(str(row.problem) for row in ROWS)


def test_processes_that_compile_come_to_an_end(monkeypatch, capsys):
    monkeypatch.setattr(warm, "MOST", 2)
    warm.compile_rows("no such suite", CPU, "", True)
    said = capsys.readouterr().err
    assert "compiled in " in said and "cut off" not in said
    monkeypatch.setattr(warm, "LIMIT", 0.0)
    warm.compile_rows("no such suite", CPU, "", True)
    assert "of them were cut off: a row takes long" in " ".join(capsys.readouterr().err.split())
    assert set(warm.SUITES) <= set(suite.SUITES)
