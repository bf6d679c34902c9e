"""The serving suite on a tiny random model, its loads by hand, and its goals."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

import tiny
from onchip.bench import goals, run, serve, serve_engines, serve_rows
from onchip.bench.serve_engines import Load
from onchip.cache import sharing
from onchip.core import settings
from onchip.models.families import ModelConfig

CPU = torch.device("cpu")
SMALL = {"max_batch": 8, "max_len": 96, "cache_gib": 0.01}
LOADS = {"host time": Load(3, (8, 8), (40, 40)), "batch 1": Load(1, (8, 8), (20, 20), 0.0)}
OWN = Load(5, (4, 20), (6, 20))
plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times an engine, and the interpreter's time means nothing")


@pytest.fixture
def small(monkeypatch):
    """Every row at the size of a test, on one tiny model and this CPU; loops are not compiled."""
    for name in serve_engines.SHAPES:
        monkeypatch.setitem(serve_engines.SHAPES, name, tiny.CONFIG)
    found = [dataclasses.replace(row, on="cpu", load=LOADS.get(row.name, OWN), settings=SMALL) for row in serve.ROWS]
    equal = {"continuous batching", "16 at once"}
    found = [dataclasses.replace(row, load=OWN._replace(new=(9, 9))) if row.name in equal else row for row in found]
    monkeypatch.setattr(serve, "ROWS", found)
    monkeypatch.setattr(serve_rows, "PREFIX", 48)
    monkeypatch.setattr(sharing, "CPU", tiny.SHARED)
    monkeypatch.setattr(serve_rows, "SETTLE", 4)
    monkeypatch.setattr(serve_rows, "STEPS", 10)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_the_protocol_is_nano_vllms():
    prompts, params = serve.PROTOCOL.draw(151_936)
    assert (len(prompts), sum(p.max_tokens for p in params)) == (256, 133_966)
    assert {p.temperature for p in params} == {0.6} and all(p.ignore_eos for p in params)
    assert 100 <= min(map(len, prompts)) < max(map(len, prompts)) <= 1024
    assert max(max(prompt) for prompt in prompts) == 10_000
    assert max(max(prompt) for prompt in Load(9, (50, 50), (1, 1)).draw(97)[0]) == 96


def test_weights_of_llama_by_hand():
    c = ModelConfig.read(serve_engines.SHAPES["Llama-3-8B"])
    assert serve_engines.weights_read(c, 2) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=1e-3)  # all but the embedding


@plain_torch
def test_every_row_says_what_it_measured(small, tmp_path, monkeypatch):
    monkeypatch.setitem(run.WHOLE, "serve", (serve.bench, run.devices.of))
    path = run.bench("serve", CPU, tmp_path)
    result = json.loads(path.read_text())
    assert path == tmp_path / "cpu" / "serve.json" and result["versions"]["torch"] == torch.__version__
    rows = {row["row"]: row for row in result["rows"]}
    assert list(rows) == [str(row) for row in serve.ROWS]
    if importlib.util.find_spec("transformers"):
        assert not any(row["error"] for row in rows.values())
        assert all(goal["measured"] > 0 for goal in result["goals"]) and len(result["goals"]) == len(goals.SERVE)
    protocol = rows["protocol, Qwen3-0.6B"]
    assert protocol["measured"]["tokens"] == sum(p.max_tokens for p in OWN.draw(320)[1]) and "decode" in protocol["kernels"]
    assert protocol["measured"]["token/s"] == pytest.approx(protocol["measured"]["tokens"] / protocol["measured"]["seconds"])
    loaded = rows["under load, Qwen3-0.6B"]["measured"]
    for share in ("50%", "80%", "95%"):
        assert 0 < loaded[f"{share}: TTFT p50, ms"] <= loaded[f"{share}: TTFT p99, ms"]
        assert 0 < loaded[f"{share}: time per token p50, ms"] <= loaded[f"{share}: time per token p99, ms"]
    shared = rows["shared prefix, Llama-3-8B"]["measured"]
    assert 48 / 68 <= shared["prompt tokens from the cache"] <= 48 / 52 and shared["decodes that read it once"] > 5
    assert shared["times a prefix read for each"] > 0
    host = rows["host time, Qwen3-0.6B"]["measured"]
    assert 0 < host["host, us a step"] <= host["us a step"]
    assert serve.table(result).row_count == sum(len(row["measured"]) for row in rows.values())


@plain_torch
def test_an_error_is_written_down_and_the_next_row_runs(small, tmp_path, monkeypatch):
    def breaks(engines, row):
        yield "before", 1.0
        raise RuntimeError("no memory\nat all")

    first, second = serve.ROWS[0], dataclasses.replace(serve.ROWS[0], name="again")
    monkeypatch.setattr(serve, "ROWS", [dataclasses.replace(first, measure=breaks), second])
    origin = {"device": {"name": "a CPU", "measured": {"bandwidth": 1e10, "note": "by hand"}}}
    serve.bench(origin, tmp_path / "serve.json", CPU)
    broken, whole = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert broken["measured"] == {"before": 1.0} and broken["error"] == {"row": "RuntimeError: no memory at all"}
    assert whole["error"] == {} and whole["measured"]["token/s"] > 0
    assert serve.table({**origin, "rows": [broken | {"measured": {}}]}).row_count == 1


def test_one_row_by_its_name_and_few_requests():
    cuda = torch.device("cuda")
    assert [str(row) for row in serve.rows(cuda, "prefix")] == ["shared prefix, Llama-3-8B"]
    assert [str(row) for row in serve.rows(CPU)] == ["16 at once, SmolLM2-135M"]
    assert [row.load.requests for row in serve.rows(cuda, "protocol", quick=True)] == [32] * 4
    assert sum(row.seconds for row in serve.rows(cuda)) <= 250
    with pytest.raises(ValueError, match=r"no row with 'speed' in it on cpu; its rows are 16 at once, SmolLM2-135M$"):
        serve.rows(CPU, "speed")


def test_requests_come_when_their_time_has_come(monkeypatch):
    """An engine of steps of 1 ms by a clock that nothing else moves: each gives every request one token."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(serve_rows, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep))

    class Engine:
        def __init__(self):
            self.running, self.most = [], 0

        @property
        def idle(self):
            return not self.running

        def add(self, request):
            self.running.append(request)

        def step(self):
            sleep(1e-3)
            self.most = max(self.most, len(self.running))
            for request in self.running:
                request.tokens.append(1)
            events = [SimpleNamespace(request=request) for request in self.running]
            self.running = [request for request in self.running if len(request.tokens) < 3]
            return events

    class Asked(SimpleNamespace):
        __hash__ = object.__hash__

    engine, times = Engine(), [0.0, 0.0, 0.02, 0.05]
    found = serve_rows.arrive(engine, [Asked(tokens=[], reason=None) for _ in times], times)
    assert engine.most == 2 and [timing.tokens for timing in found] == [3] * 4
    expected = [(at, pytest.approx(at + 1e-3), pytest.approx(at + 3e-3)) for at in times]
    assert [timing[:3] for timing in found] == expected


def test_percentiles_by_hand():
    assert serve_rows.percentile(range(101), 99) == 99 and serve_rows.percentile([3.0], 50) == 3.0
    result = {"rows": [{"row": "host time, Qwen3-0.6B", "measured": {"host, us a step": 150.0}}, {"row": "protocol, Llama-3-8B", "measured": {}}]}
    assert [(goal["asked"], goal["measured"], goal["met"]) for goal in goals.serve(result)] == [(12_000, None, None), (200, 150, True)]
