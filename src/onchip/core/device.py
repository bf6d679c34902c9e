"""Facts of a device, and the floor they set: no kernel is faster than its arithmetic at peak or its bytes at full bandwidth."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from onchip.core import settings
from onchip.core.problem import E4M3, SHORT, Cost
from onchip.core.trace import untouched

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Floor(NamedTuple):
    """The least time of a call on a device, in seconds, and what sets it: "math" or "memory"."""

    seconds: float
    bound: str


@dataclass(frozen=True, eq=False)
class Device:
    """A device as kernels and cost see it.

    kind     "cuda", "hip" or "cpu".      arch    90 for sm_90, 942 for gfx942, 0 for a CPU.
    shared_memory   bytes one block may use.      l2, memory   bytes.
    bandwidth       bytes/s of main memory.       peaks   dense FLOP/s by dtype.      source   where the figures come from.
    margin   multiprocessors that are left to others; None: as the setting says.
    """

    name: str
    kind: str
    arch: int
    sms: int
    shared_memory: int
    l2: int
    memory: int
    bandwidth: float
    peaks: Mapping[torch.dtype, float]
    source: str
    margin: int | None = None

    def floor(self, cost: Cost, dtype: torch.dtype) -> Floor:
        """The larger of arithmetic time and memory time for `cost` in `dtype`."""
        math, memory = cost.flops / self.peaks.get(dtype, self.peaks[FP32]), cost.bytes / self.bandwidth
        return Floor(math, "math") if math > memory else Floor(memory, "memory")


def _gpu(name, kind, arch, sms, shared_kib, l2_mb, memory_gb, gb_s, half_tflops, fp32_tflops, source) -> Device:
    peaks = {BF16: half_tflops * 1e12, FP16: half_tflops * 1e12, FP32: fp32_tflops * 1e12}
    peaks[E4M3] = peaks[BF16] * (2 if kind == "cuda" and arch >= 89 else 1)  # elsewhere numbers of 16 bits are made of them
    return Device(name, kind, arch, sms, shared_kib << 10, l2_mb << 20, int(memory_gb * 1e9), gb_s * 1e9, peaks, source)


# Dense rates without sparsity, boost clock, fp32 accumulation. Shared memory: the limit a single block may opt in to.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", "cuda", 80, 108, 163, 40, 80, 2039, 312, 19.5, "NVIDIA A100 80GB SXM datasheet, June 2021"),
        _gpu("L4", "cuda", 89, 58, 99, 48, 24, 300, 121, 30.3, "NVIDIA L4 datasheet, 2023 (dense rate is half of the sparse one it prints)"),
        _gpu("L40S", "cuda", 89, 142, 99, 96, 48, 864, 362, 91.6, "NVIDIA L40S datasheet, 2023"),
        _gpu("RTX 4090", "cuda", 89, 128, 99, 72, 24, 1008, 165.2, 82.6, "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"),
        _gpu("H100", "cuda", 90, 132, 227, 50, 80, 3350, 989.4, 66.9, "NVIDIA H100 SXM5 datasheet and Hopper architecture whitepaper"),
        _gpu("H200", "cuda", 90, 132, 227, 50, 141, 4800, 989.4, 66.9, "NVIDIA H200 SXM datasheet, 2024"),
        _gpu("B200", "cuda", 100, 148, 227, 126, 180, 8000, 2250, 75, "NVIDIA HGX B200 datasheet, 2024"),
        _gpu("MI300X", "hip", 942, 304, 64, 32, 192, 5300, 1307.4, 163.4, "AMD Instinct MI300X datasheet, December 2023"),
    )
}


def gpu(name: str) -> Device:
    """The GPU of that name in the table, whatever this machine has."""
    if (found := _in_table(name)) is None:
        raise ValueError(f"no GPU named {name!r}; known are {', '.join(GPUS)}")
    return found


def _in_table(name: str) -> Device | None:
    return {key.lower(): value for key, value in GPUS.items()}.get(name.lower().replace("_", " "))


@functools.lru_cache
def of(device: torch.device) -> Device:
    """The facts of a torch device. A GPU that is not in the table gets the figures its driver reports, and a CPU measured ones."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        known = next((g for g in sorted(GPUS.values(), key=lambda g: -len(g.name)) if g.name.lower() in found.name.lower()), None)
        if known is None:
            measured = measure(device)
            hip = torch.version.hip is not None
            arch = _gfx(found.gcnArchName) if hip else 10 * found.major + found.minor
            shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
            return Device(found.name, "hip" if hip else "cuda", arch, found.multi_processor_count, shared, found.L2_cache_size, found.total_memory, *measured)
        return replace(known, name=found.name, sms=found.multi_processor_count, memory=found.total_memory)
    if device.type == "cpu" and settings.INTERPRET.read():
        facts = {"name": "Triton interpreter", "source": "the interpreter stands in for an H200"}
        return replace(GPUS["H200"], arch=89, **facts)  # but not for what Gluon is compiled for
    if device.type == "cpu":
        return Device("CPU", "cpu", 0, torch.get_num_threads(), 1 << 20, 32 << 20, _memory_of_host(), *measure(device))
    raise ValueError(f"device {device.type!r}: onchip runs on cuda (NVIDIA, AMD) and cpu")


def on_host(method: Callable) -> Callable:
    """`method`, inside which three settings of a user's do not hold: torch.set_default_device, which would put host lists on a GPU, autocast, whose dtype
    would stay in captured graphs, and a current GPU that is not the `device` of its object, whose graphs and streams would be the other one's."""

    @functools.wraps(method)
    def call(*args, **keywords):
        casts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        device = getattr(args[0], "device", None)
        away = device is not None and device.type == "cuda" and torch.cuda.current_device() != device.index
        if not casts and not away and torch.get_default_device().type == "cpu":
            return method(*args, **keywords)
        with contextlib.ExitStack() as stack:
            if away:
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.device("cpu"))
            for kind in casts:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return method(*args, **keywords)

    return call


def named(name: str | torch.device | None) -> torch.device:
    """The device of that name, the current one from now on if it is a GPU; None: a GPU if there is one. Raises ValueError for one that is not there."""
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = there(name)
    if device.type != "cuda":
        return device
    torch.cuda.set_device(device.index or 0)
    return torch.device("cuda", device.index or 0)


def there(name: str | torch.device, more: str = "") -> torch.device:
    """The device of that name. Raises ValueError for one that is not there; `more` is what else may be given."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {str(name)!r} is not a device; give cpu, cuda or cuda:N{more}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(name)!r} is not supported; give cpu, cuda or cuda:N{more}")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        gpus = f" or cuda:0 to cuda:{count - 1}" * bool(count)
        raise ValueError(f"device {str(name)!r} is not there: torch {torch.__version__} sees {count} GPUs; give cpu{gpus}{more}")
    return device


def described(device: Device | torch.device | str) -> Device | torch.device:
    """A Device as it is, a GPU of the table by its name, or a device that is there."""
    if isinstance(device, Device):
        return device
    found = _in_table(device) if isinstance(device, str) else None
    return there(device, f", or a GPU of the table: {', '.join(GPUS)}") if found is None else found


def _gfx(name: str) -> int:
    """AMD's name of an architecture as a number that grows with it: "gfx942:sramecc+" -> 942, "gfx90a" -> 909 (the last two digits are hexadecimal)."""
    digits = name.partition(":")[0].removeprefix("gfx")
    return 100 * int(digits[:-2]) + 10 * min(int(digits[-2], 16), 9) + min(int(digits[-1], 16), 9)


def _memory_of_host() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.lru_cache
def measure(device: torch.device) -> tuple[float, Mapping[torch.dtype, float], str]:
    """Ceilings measured now: (copy bytes/s counting read and write, {dtype: FLOP/s of a large product}, a note). Takes up to 1 s."""
    with untouched():  # autocast and modes are for the user's own products, and so is torch's generator
        return _measure(device, torch.Generator(device).manual_seed(0))


def _measure(device: torch.device, generator: torch.Generator) -> tuple[float, Mapping[torch.dtype, float], str]:
    on_gpu = device.type == "cuda"
    clock = _gpu_clock if on_gpu else _cpu_clock
    source = torch.empty((1 << 32 if on_gpu else 1 << 26) // 4, dtype=FP32, device=device).uniform_(generator=generator)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / clock(lambda: target.copy_(source))
    peaks = {}
    for dtype in (BF16, FP16, FP32):
        if not on_gpu and dtype == FP16:
            continue  # no fp16 units to speak of on most CPUs
        for n in (256, 512, 1024) if not on_gpu else (8192,) if dtype != FP32 else (4096,):
            a, b = (torch.randn(n, n, generator=generator, device=device, dtype=FP32).to(dtype) for _ in range(2))
            seconds = clock(lambda a=a, b=b: a @ b)
            peaks[dtype] = 2 * n**3 / seconds
            if seconds > 0.01 and dtype != FP32:  # the next size takes eight times that: 15 s on a CPU without units for bf16
                break
    peaks[BF16] = max(peaks[BF16], peaks[FP32])  # without them kernels multiply in float32
    peaks[E4M3] = peaks[BF16]  # numbers of 16 bits are made of them
    if on_gpu and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        n = 8192
        a, b = (torch.randn(n, n, generator=generator, device=device, dtype=FP32).to(E4M3) for _ in range(2))
        one = torch.ones((), dtype=FP32, device=device)
        peaks[E4M3] = 2 * n**3 / clock(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True))
    return bandwidth, peaks, f"measured: copy {bandwidth / 1e9:.0f} GB/s, " + ", ".join(f"{SHORT[t]} {rate / 1e12:.3g} TFLOP/s" for t, rate in peaks.items())


def _cpu_clock(call, repeats=5) -> float:
    """The shortest: a ceiling is what the machine does when nobody else is busy."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _gpu_clock(call, repeats=10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]
