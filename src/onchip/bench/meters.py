"""What a call takes beside time: the memory it holds at most, and the bytes that cross the pins of a GPU's memory.

`python -m onchip.bench.meters BATCH LEN HEADS DIM DTYPE MASK DEVICE NAME...` is what runs under ncu: rungs of the ladder, counted in their second calls.
"""

import csv
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from onchip.core import settings
from onchip.core.problem import DTYPES, SHORT, Attention

SPARE = 0.8  # of a host's free memory may be asked for: when the last of it goes, Linux ends a process, and it may be this one
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
BETWEEN = "spin_kernel"  # what stands in ncu's list behind each rung: torch's own kernel that waits for a while, which no rung launches
COUNTING = 300  # seconds for ncu: it runs every kernel alone and loads torch first
CGROUPS = (  # (limit, used) of the control group that a container is, version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

# ---- memory held


def peak(run: Callable, device: torch.device) -> int:
    """The most bytes that a call holds beside what was there before; its output counts."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    settings.unless_set("KINETO_LOG_LEVEL", "99")  # some builds of torch announce each profile on the error stream
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = run()
    # every allocation and release, in their order; `profile.events()` leaves those out that an operator made
    events = sorted((event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"), key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    del output
    return most


def make_room(need: float, device: torch.device) -> None:
    """OutOfMemoryError when a host lacks `need` bytes. It has to be asked first: Linux promises memory that it does not have, and then ends the process."""
    free = free_memory() if device.type == "cpu" else None
    if free is not None and need > SPARE * free:
        raise torch.OutOfMemoryError(f"needs {need / 1e9:.1f} GB beside its inputs, and of {free / 1e9:.1f} GB free {SPARE:.0%} may be used")


def free_memory() -> int | None:
    """Bytes this process may still allocate on the host; None where Linux does not say."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    free = [1024 * int(line.split()[1]) for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
    for limit, used in CGROUPS:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()) != "max":
            free.append(int(most) - int(Path(used).read_text()))
    return max(0, min(free)) if free else None


# ---- bytes moved


def count(names: Sequence[str], p: Attention, device: torch.device) -> dict[str, tuple[int | None, str | None]]:
    """Of each rung the bytes that the GPU's memory read and wrote in one call, or None and why there is no count. All in one process: ncu takes 10 s to begin.

    Nsight Compute empties the caches before each kernel, so what one kernel leaves in L2 for the next counts as moved.
    """
    why = refusal(device)
    return dict.fromkeys(names, (None, why)) if why else _ncu(names, p, device)


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Why nothing can be counted here, from one small attempt; None when it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "no counter: NVIDIA GPUs only"
    if shutil.which("ncu") is None:
        return "no counter: ncu (Nsight Compute) is not installed"
    return _ncu(["onchip"], Attention("prefill", 1, 64, 64, 1, 1, 64, torch.bfloat16), device)["onchip"][1]


def _ncu(names: Sequence[str], p: Attention, device: torch.device) -> dict[str, tuple[int | None, str | None]]:
    sizes = [str(n) for n in (p.batch, p.len_q, p.heads, p.dim)]
    flags = ["--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all", "--metrics", ",".join(METRICS)]
    command = ["ncu", *flags, sys.executable, "-m", "onchip.bench.meters", *sizes, SHORT[p.dtype], str(p.mask), str(device), *names]
    torch.cuda.empty_cache()  # the other process needs the memory that torch keeps here for later
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COUNTING, check=False)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(names, (None, f"no counter: ncu took more than {COUNTING} s"))
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line] or done.stderr.strip().splitlines()[-1:]
    why = f"no counter: ncu says {said[0].removeprefix('==ERROR==').strip()[:120]!r}" if said else "no counter: ncu counted nothing"
    totals = parse(done.stdout)
    totals += [None] * (len(names) - len(totals))
    return {name: (total, why if total is None else None) for name, total in zip(names, totals, strict=False)}


def parse(text: str) -> list[int | None]:
    """From ncu's CSV the sum of METRICS over the kernels in front of each one of BETWEEN; None where there is none."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    totals, values, last = [], [], None
    for row in csv.DictReader(lines):
        if BETWEEN in row["Kernel Name"]:
            if row["ID"] != last:
                totals.append(round(sum(values)) if values else None)
            values, last = [], row["ID"]
        elif row["Metric Name"] in METRICS:
            values.append(float(row["Metric Value"].replace(",", "")))
    return totals


def _counted(batch: str, length: str, heads: str, dim: str, dtype: str, mask: str, device: str, *names: str) -> None:
    """What runs under ncu."""
    from onchip.bench import data, suite
    from onchip.bench.failures import noted
    from onchip.bench.peers import PEERS
    from onchip.core.masks import Causal, Full

    sizes = (int(size) for size in (batch, length, length, heads, heads, dim))
    problem = Attention("prefill", *sizes, DTYPES[dtype], {"Full": Full, "Causal": Causal}[mask]())
    row, errors = suite.Row(suite.Ladder("ladder", problem), "", ""), {}
    with torch.no_grad(), torch.cuda.device(torch.device(device)):
        inputs = data.inputs(row, torch.device(device))
        for name in names:
            with noted(errors, name):
                run = next(peer for peer in PEERS if peer.kind is suite.Ladder and peer.name == name).prepare(inputs).run
                run()  # compiles, or runs out of memory
                torch.cuda.synchronize()
            torch.cuda.profiler.start()
            if name not in errors:
                run()
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            torch.cuda.empty_cache()
    for name, text in errors.items():
        print(f"{name}: {text}", file=sys.stderr)


if __name__ == "__main__":
    _counted(*sys.argv[1:])


def waits(run: Callable) -> bool:
    """Whether a call makes the host wait for the GPU; made once before, so that nothing is compiled."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
