"""The ladder of suite "io": every rung against float64, its model beside what is measured, and rows that ran out of memory."""

import json
import xml.etree.ElementTree as ET

import pytest
import torch

from judge import assert_as_good_as_torch, hardware
from onchip.bench import ladder, ladder_report, meters, peers, run, suite
from onchip.core import settings
from onchip.core.masks import Causal, Full
from onchip.core.problem import Attention
from onchip.ops.attention import attention

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SVG = "{http://www.w3.org/2000/svg}"
EFFORT = run.Effort(2, 0.002)

gpu = pytest.mark.gpu
large = pytest.mark.large
plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")
bothways = pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)


def problem(n, dim=16, mask=Full(), dtype=FP32, batch=2, heads=2) -> Attention:
    return Attention("prefill", batch, n, n, heads, heads, dim, dtype, mask)


def row(p: Attention) -> suite.Row:
    return suite.Row(suite.Ladder("ladder", p), "shape", str(p.len_q))


def tensors(p: Attention, device):
    """q, k, v as a rung takes them."""
    return [torch.randn(p.batch, p.heads, p.len_q, p.dim, device=device).to(p.dtype) for _ in range(3)]


def check(p: Attention, qkv, out):
    """`out` against float64, beside standard attention in the problem's dtype."""
    truth = attention(*(x.double().transpose(1, 2) for x in qkv), mask=p.mask, kernel="reference").transpose(1, 2)
    assert out.dtype == p.dtype and out.shape == qkv[0].shape
    assert_as_good_as_torch(out, (ladder.standard(p, *qkv), *hardware(truth, p.dtype, out.device)), truth)


@pytest.fixture
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with this, torch.utils.deterministic fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def little_memory(monkeypatch):
    """Room for one score matrix of 64 queries and 4 heads, and not for two."""
    monkeypatch.setattr(meters, "free_memory", lambda: 120_000)


# ---- the rungs are right


@bothways
@pytest.mark.parametrize("n", [1, 63, 601])
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_a_rung_is_exact_on_a_cpu(name, n, mask):
    p = problem(n, mask=mask)
    qkv = tensors(p, CPU)
    check(p, qkv, ladder.RUNGS[name].attend(p, *qkv))


@gpu
@pytest.mark.usefixtures("nan_in_fresh_memory")
@bothways
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("n", [1, 63, 130])
def test_softmax_kernel(device, n, dtype, mask):
    from onchip.bench.ladder_kernels import softmax

    p = problem(n, mask=mask, dtype=dtype)
    q, k, v = tensors(p, device)
    scores = q @ k.transpose(-1, -2)
    there = torch.ones(n, n, dtype=torch.bool, device=device) if isinstance(mask, Full) else torch.ones(n, n, dtype=torch.bool, device=device).tril()
    scale = p.dim**-0.5
    low = torch.softmax((scores * scale).masked_fill(~there, -torch.inf), -1)
    truth = torch.softmax((scores.double() * scale).masked_fill(~there, -torch.inf), -1)
    weights = softmax(p, torch.where(there, scores, torch.nan), scale)  # what a mask hides is not read
    assert_as_good_as_torch(weights, low, truth)
    check(p, (q, k, v), softmax(p, scores, scale) @ v)


@gpu
@pytest.mark.usefixtures("nan_in_fresh_memory")
@bothways
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("n", "dim"), [(1, 16), (63, 16), (130, 32), (97, 24)])
def test_version_1_kernel(device, n, dim, dtype, mask):
    """Key tiles of 32: the output, the maximum and the sum go through memory up to four times."""
    from onchip.bench.ladder_kernels import one_block

    p = problem(n, dim, mask, dtype)
    qkv = tensors(p, device)
    check(p, qkv, one_block(p, *qkv, p.dim**-0.5, 32))


@gpu
@large
@bothways
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_a_rung_is_exact_on_a_gpu(name, mask):
    """At the shape of the suite, twice: threads read what others of their block have written, so a missing barrier would show as a difference."""
    p = problem(2048, 64, mask, BF16, batch=4, heads=16)
    qkv = tensors(p, GPU)
    out = ladder.RUNGS[name].attend(p, *qkv)
    assert torch.equal(out, ladder.RUNGS[name].attend(p, *qkv))
    check(p, qkv, out)


def test_kernels_on_sm_90():
    """What a launch of the suite compiles to: all in registers, products on wgmma, queries copied ahead of their turn."""
    pytest.importorskip("triton")
    from offline import compile_for
    from onchip.bench import ladder_kernels

    halves, floats = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16"), dict.fromkeys(("state_ptr", "top_ptr", "total_ptr"), "*fp32")
    keys = ladder.key_tile(problem(16_384, 64, dtype=BF16), GPU)
    constexprs = {"D": 64, "BLOCK_M": ladder_kernels.QUERIES, "BLOCK_N": keys, "BLOCK_D": 64, "CAUSAL": False}
    how = (ladder_kernels.BLOCK_WARPS, ladder_kernels.STAGES, ("length",))
    facts = compile_for(ladder_kernels._one_block, {**halves, **floats, "scale": "fp32", "length": "i32"}, constexprs, "sm_90", *how)
    assert facts.spills == 0 and facts.wgmma and "cp.async.cg" in facts.ptx and facts.vector_loads
    signature = {"scores_ptr": "*bf16", "scale": "fp32", "length": "i32"}
    facts = compile_for(ladder_kernels._softmax_rows, signature, {"CAUSAL": False, "BLOCK": 16_384}, "sm_90", 16, aligned=("length",))
    assert facts.spills == 0 and facts.vector_loads


# ---- the models


def test_modelled_bytes_by_hand():
    p = problem(1024, 64, dtype=BF16, batch=4, heads=16)
    tensor, scores = 4 * 16 * 1024 * 64 * 2, 4 * 16 * 1024 * 1024 * 2
    assert ladder.standard_moved(p, GPU) == 4 * tensor + 6 * scores
    assert ladder.fused_moved(p, GPU) == 4 * tensor + 4 * scores
    state = 4 * 16 * 1024 * (64 * 4 + 8)  # 8 passes of 128 keys
    assert ladder.key_tile(p, GPU) == 128 and ladder.version_1_moved(p, GPU) == 11 * tensor + 14 * state
    assert ladder.onchip_moved(p, GPU) == 4 * tensor + 4 * 4 * 16 * 1024


def test_one_pass_of_version_1_is_the_floor():
    p = problem(128, 64, dtype=BF16)
    assert ladder.version_1_moved(p, GPU) == ladder.onchip_moved(p, GPU) - 4 * p.batch * p.heads * p.len_q  # the LSE


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_each_rung_moves_less_than_the_one_before(device):
    for row in suite.rows("io", device):
        if row.problem.inner.len_q >= 1024:
            moved = [model(row.problem.inner, device) for model in ladder.MOVED.values()]
            assert moved == sorted(moved, reverse=True) and list(ladder.MOVED)[-1] == "onchip"


@plain_torch
@bothways
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_what_a_rung_holds_is_what_it_was_said_to_need(name, mask):
    p = problem(1024, 64, mask, heads=4, batch=1)
    qkv = tensors(p, CPU)
    held, model = meters.peak(lambda: ladder.RUNGS[name].attend(p, *qkv), CPU), ladder.RUNGS[name].held(p, CPU)
    assert 0.7 * model < held <= 1.01 * model


# ---- the meters


@plain_torch
def test_peak_counts_what_is_held_at_once():
    def run():
        a = torch.empty(1 << 20)
        del a
        b = torch.empty(1 << 19)
        return b.neg()

    assert meters.peak(run, CPU) == 4 << 20
    assert meters.peak(lambda: None, CPU) == 0


def test_memory_is_asked_for_before_it_is_needed(monkeypatch):
    monkeypatch.setattr(meters, "free_memory", lambda: 10_000_000_000)
    meters.make_room(7.9e9, CPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"^needs 8\.1 GB beside its inputs, and of 10\.0 GB free 80% may be used$"):
        meters.make_room(8.1e9, CPU)
    monkeypatch.setattr(meters, "free_memory", lambda: None)  # nobody knows
    meters.make_room(1e18, CPU)


def test_free_memory_is_the_lesser_of_the_host_and_the_container(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "current").write_text("3000\n")
    host = meters.free_memory()
    if host is None:
        pytest.skip("no /proc/meminfo here")
    monkeypatch.setattr(meters, "CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    assert meters.free_memory() == 2000 < host
    (tmp_path / "max").write_text("max\n")
    assert meters.free_memory() > 2000


NCU = """==PROF== Connected to process 1 (/usr/bin/python3)
==PROF== Profiling "_prefill" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","python3","_prefill","Command line profiler metrics","dram__bytes_read.sum","byte","1,234,560"
"0","1","python3","_prefill","Command line profiler metrics","dram__bytes_write.sum","byte","7"
"1","1","python3","copy","Command line profiler metrics","dram__bytes_read.sum","byte","3"
"1","1","python3","copy","Command line profiler metrics","gpu__time.sum","ns","99"
"2","1","python3","at::cuda::spin_kernel(long)","Command line profiler metrics","dram__bytes_read.sum","byte","50"
"2","1","python3","at::cuda::spin_kernel(long)","Command line profiler metrics","dram__bytes_write.sum","byte","60"
"3","1","python3","at::cuda::spin_kernel(long)","Command line profiler metrics","dram__bytes_read.sum","byte","50"
"4","1","python3","_one_block","Command line profiler metrics","dram__bytes_read.sum","byte","8"
"5","1","python3","at::cuda::spin_kernel(long)","Command line profiler metrics","dram__bytes_read.sum","byte","50"
"""


@pytest.fixture
def ncu(monkeypatch, tmp_path):
    """A stand-in on the PATH: prints what it is given, and writes its arguments down."""
    meters.refusal.cache_clear()

    def install(text: str, status: int = 0):
        (tmp_path / "text").write_text(text)
        tool = tmp_path / "ncu"
        tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n/bin/cat {tmp_path}/text\nexit {status}\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "asked"

    yield install
    meters.refusal.cache_clear()


def test_bytes_are_summed_over_the_kernels_of_each(ncu):
    asked, names = ncu(NCU), ("onchip", *ladder.RUNGS)
    nothing = (None, "no counter: ncu counted nothing")  # it ran out of memory, and the last one ended the process
    counted = meters.count(names, problem(64, 16, Causal(), BF16), GPU)
    assert counted == dict(zip(names, ((1_234_570, None), nothing, (8, None), nothing), strict=True))
    assert asked.read_text().strip().endswith(f"-m onchip.bench.meters 2 64 2 16 bf16 Causal cuda {' '.join(names)}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", "no counter: ncu says 'ERR_NVGPUCTRPERM - no permission'"),
        ("", "no counter: ncu counted nothing"),
    ],
)
def test_no_permission_to_count(ncu, text, why):
    ncu(text, 1)
    assert meters.count(["onchip"], problem(64), GPU) == {"onchip": (None, why)}


def test_nothing_to_count_with(monkeypatch, tmp_path):
    meters.refusal.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert meters.count(["onchip"], problem(64), CPU) == {"onchip": (None, "no counter: NVIDIA GPUs only")}
    assert meters.count(["onchip"], problem(64), GPU) == {"onchip": (None, "no counter: ncu (Nsight Compute) is not installed")}
    meters.refusal.cache_clear()


# ---- the suite


@plain_torch
def test_the_suite_on_this_machine(monkeypatch, tmp_path):
    lengths = (16, 32, 64)
    monkeypatch.setitem(suite.SUITES, "io", lambda _device, _quick: [row(problem(n)) for n in lengths])
    monkeypatch.setattr(run, "QUICK", EFFORT)
    path = run.bench("io", CPU, tmp_path, quick=True)
    result = json.loads(path.read_text())
    for n, made in zip(lengths, result["rows"], strict=True):
        assert made["error"] == {} and made["kernel"] == "blocked" and made["fields"]["inner"]["len_q"] == n
        assert set(made["seconds"]) == set(made["held"]) == set(made["moved"]) == set(ladder.MOVED)
        for name, moved in made["moved"].items():
            assert made["distance"][name] < 1e-5 and made["held"][name] >= 2 * 2 * n * 16 * 4  # the output
            assert moved == {"modelled": ladder.MOVED[name](problem(n), CPU), "counted": None, "why": "no counter: NVIDIA GPUs only"}
    plot, page = path.with_suffix(".svg").read_text(), path.with_suffix(".html").read_text()
    root = ET.fromstring(plot)
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * 3 * 4  # time and memory, three lengths, four rungs
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 * 4 + 1  # and the floor
    assert page.partition("<h2>Summary")[0].count("<tr>") == 1 + 3 * 4 and page.count("<svg") == 1
    for text in (plot, page):
        assert "nan" not in text and "<script" not in text and "src=" not in text and "href" not in text


@plain_torch
@pytest.mark.usefixtures("little_memory")
def test_out_of_memory_is_a_row(capsys):
    """Two score matrices are too many, one is not; the other rungs go on."""
    entry = run.measure(row(problem(64, batch=1, heads=4)), CPU, run._measured(CPU), EFFORT)
    assert entry["error"] == {
        "standard attention": "OutOfMemoryError: needs 0.0 GB beside its inputs, and of 0.0 GB free 80% may be used",
        "FlashAttention (1)": "OutOfMemoryError: needs 0.0 GB beside its inputs, and of 0.0 GB free 80% may be used",
    }
    assert set(entry["seconds"]) == set(entry["held"]) == {"fused, materialised", "onchip"}
    result = {"suite": "io", "device": {"name": "a CPU", "measured": {"note": "n"}}, "versions": {}, "date": "2026-01-01", "commit": None, "rows": [entry]}
    cells = {line.cells[1]: line.cells for line in ladder_report.lines(entry)}
    assert cells["standard attention"][2:5] == ("out of memory", "", "") and cells["standard attention"][5] and cells["standard attention"][6] == "not run"
    root = ET.fromstring(ladder_report.svg(result))
    assert [node[0].text for node in root.iter(f"{SVG}path")] == ["standard attention: out of memory", "FlashAttention (1): out of memory"] * 2
    assert ladder_report.page(result).count("out of memory") >= 2


def test_an_allocation_that_fails_is_out_of_memory():
    entry = {"error": {}}
    with run.noted(entry["error"], "x"):
        torch.empty(1 << 52)
    assert ladder_report.out_of_memory(entry, "x") and not ladder_report.out_of_memory(entry, "y")


def test_a_result_in_which_nothing_ran():
    fields = {"group": "g", "x": "64", "inner": {"len_q": 64}}
    rows = [{"problem": "p", "fields": fields, "kernel": None, "config": None, "seconds": {}, "spread": {}, "floor": None, "goal": None, "error": {"row": "x"}}]
    result = {"suite": "io", "device": {"name": "d", "measured": {"note": "n"}}, "versions": {}, "date": "2026-01-01", "commit": None, "rows": rows}
    ET.fromstring(ladder_report.svg(result))
    assert "<table>" in ladder_report.page(result) and ladder_report.table(result).row_count == 0


def test_onchip_stands_first_among_the_rungs():
    """Its output is what the others are compared with."""
    names = [peer.name for peer in peers.PEERS if peer.kind is suite.Ladder]
    assert names == ["onchip", *ladder.RUNGS] and set(names) == set(ladder.MOVED)


@gpu
@large
def test_a_row_on_a_gpu(monkeypatch):
    """Peak memory is what the model says it is, up to the rounding of torch's allocator; a rung that asks for more than there is leaves a note."""

    def too_much(*_):
        return torch.empty(1 << 50, device=GPU)

    monkeypatch.setattr(peers, "PEERS", (*peers.PEERS, peers.Peer("too much", suite.Ladder, lambda inputs: peers.Call(too_much))))
    p = problem(2048, 64, dtype=BF16, batch=4, heads=16)
    entry = run.measure(row(p), GPU, run._measured(GPU), EFFORT)
    assert set(entry["seconds"]) == set(ladder.MOVED) and set(entry["error"]) == {"too much"}
    assert ladder_report.out_of_memory(entry, "too much")
    for name, rung in ladder.RUNGS.items():
        assert entry["held"][name] == pytest.approx(rung.held(p, GPU), rel=0.1)
