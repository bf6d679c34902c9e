"""The table of GPUs, the floor, and what the machine at hand says of itself."""

import pytest
import torch

from onchip.core import device as devices
from onchip.core.device import GPUS, Device, Floor, gpu
from onchip.core.problem import Cost

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ["A100", "L4", "L40S", "RTX 4090", "H100", "H200", "B200", "MI300X"]


def test_the_table_has_the_gpus_that_explain_promises():
    assert list(GPUS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_possible(name):
    d = gpu(name)
    assert d.name == name and d.kind == ("hip" if name == "MI300X" else "cuda")
    assert 30 < d.sms < 400 and 48 << 10 < d.shared_memory < 256 << 10
    assert 200e9 < d.bandwidth < 10e12 and 20e9 < d.memory < 200e9 and 30e6 < d.l2 < 300e6
    assert d.peaks[BF16] == d.peaks[FP16] and 100e12 < d.peaks[BF16] < 3e15 and d.peaks[FP32] < d.peaks[BF16]
    assert any(year in d.source for year in ("20", "datasheet", "whitepaper")) and len(d.source) > 10


def test_figures_by_hand():
    """One of each vendor, from its datasheet."""
    h200, mi300x = gpu("H200"), gpu("MI300X")
    assert (h200.arch, h200.sms, h200.bandwidth, h200.peaks[BF16], h200.memory) == (90, 132, 4.8e12, 989.4e12, 141e9)
    assert (mi300x.arch, mi300x.sms, mi300x.bandwidth, mi300x.peaks[BF16], mi300x.memory) == (942, 304, 5.3e12, 1307.4e12, 192e9)


@pytest.mark.parametrize("name", ["h200", "rtx_4090", "RTX 4090", "mi300x"])
def test_names_are_forgiving(name):
    assert gpu(name).name.lower() == name.lower().replace("_", " ")


def test_unknown_gpu():
    with pytest.raises(ValueError, match=r"no GPU named 'H300'; known are A100, L4, L40S, RTX 4090, H100, H200, B200, MI300X"):
        gpu("H300")


def test_floor_is_the_larger_of_the_two():
    d = Device("toy", "cuda", 90, 1, 1, 1, 1, 1e9, {BF16: 4e9, FP32: 1e9}, "by hand")
    assert d.floor(Cost(8e9, 1e9), BF16) == Floor(2.0, "math")
    assert d.floor(Cost(2e9, 1e9), BF16) == Floor(1.0, "memory")
    assert d.floor(Cost(2e9, 1e9), FP32) == Floor(2.0, "math")
    assert d.floor(Cost(2e9, 1e9), torch.float64) == Floor(2.0, "math")  # a dtype without a peak: that of float32


def test_this_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    devices.of.cache_clear()
    try:
        d = devices.of(torch.device("cpu"))
        assert (d.name, d.kind, d.arch) == ("CPU", "cpu", 0)
        assert 1e8 < d.bandwidth < 1e13 and 1e8 < d.peaks[FP32] < 1e15 and d.memory > 1e8
        assert d.source.startswith("measured: copy ")
        assert devices.of(torch.device("cpu")) is d
    finally:
        devices.of.cache_clear()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_measuring_draws_nothing_and_heeds_no_autocast(dtype, monkeypatch):
    """It happens in somebody's first call: under a checkpoint, other random numbers the second time would be wrong gradients."""
    seen = []
    monkeypatch.setattr(devices, "_cpu_clock", lambda call: seen.append(call()) or 1.0)
    before = torch.get_rng_state()
    with torch.autocast("cpu", BF16, enabled=dtype == BF16):
        devices.measure.__wrapped__(torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state()) and [t.dtype for t in seen] == [FP32, BF16, FP32, FP32, FP32]


def test_the_interpreter_stands_in_for_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    devices.of.cache_clear()
    try:
        d = devices.of(torch.device("cpu"))
        assert (d.kind, d.arch, d.name) == ("cuda", 89, "Triton interpreter")
    finally:
        devices.of.cache_clear()


class _Properties:
    """What a driver reports."""

    major, minor, multi_processor_count, total_memory, L2_cache_size = 9, 0, 114, 80_000_000_000, 50 << 20
    shared_memory_per_block_optin = 227 << 10

    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    ("reported", "known"), [("NVIDIA H200", "H200"), ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA GeForce RTX 4090", "RTX 4090")]
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(monkeypatch, reported, known):
    """Its own name, multiprocessors and memory; the table's peaks and bandwidth. L40S is not taken for an L4."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties(reported))
    d = devices.of.__wrapped__(torch.device("cuda", 0))
    assert (d.name, d.sms, d.memory) == (reported, 114, 80_000_000_000)
    assert (d.arch, d.bandwidth, d.peaks) == (GPUS[known].arch, GPUS[known].bandwidth, GPUS[known].peaks)


def test_a_gpu_that_is_not_in_the_table_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties("NVIDIA H20"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(devices, "measure", lambda _: (1e12, {BF16: 1e14, FP32: 1e13}, "measured: by hand"))
    d = devices.of.__wrapped__(torch.device("cuda", 0))
    assert (d.name, d.kind, d.arch, d.sms, d.shared_memory, d.bandwidth, d.source) == ("NVIDIA H20", "cuda", 90, 114, 227 << 10, 1e12, "measured: by hand")


@pytest.mark.parametrize(("reported", "arch"), [("gfx942:sramecc+:xnack-", 942), ("gfx90a:sramecc+:xnack-", 909), ("gfx950", 950), ("gfx1100", 1100)])
def test_an_amd_gpu_that_is_not_in_the_table(monkeypatch, reported, arch):
    """Older is smaller, also where a digit is hexadecimal."""
    found = _Properties("AMD Instinct")
    found.gcnArchName = reported
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(devices, "measure", lambda _: (1e12, {BF16: 1e14, FP32: 1e13}, "measured: by hand"))
    d = devices.of.__wrapped__(torch.device("cuda", 0))
    assert (d.kind, d.arch) == ("hip", arch)


def test_a_device_that_is_neither():
    with pytest.raises(ValueError, match=r"device 'meta': onchip runs on cuda \(NVIDIA, AMD\) and cpu"):
        devices.of(torch.device("meta"))


def test_an_engine_runs_on_its_own_gpu(current_gpu):
    """Whatever GPU is the current one: that of the engine made last, for one."""

    class Engine:
        def __init__(self, device):
            self.device = device

        @devices.on_host
        def step(self):
            return current_gpu[-1]

    assert [Engine(torch.device(name)).step() for name in ("cuda:0", "cuda:1", "cpu")] == [0, 1, 0] and current_gpu == [0]
