"""Compile what a suite needs in several processes at once, so that the one that times finds it in the caches of Triton and Inductor.

`python -m onchip.bench.warm SUITE DEVICE ONLY QUICK PART PARTS` runs every call of its part of the rows once.
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
from rich.console import Console

from onchip.core import settings

SUITES = ("backward", "decode", "mods", "gym", "rows")  # that compile for minutes: each mod is a kernel of its own, for onchip and for FlexAttention
KEPT = {
    "onchip": None,
    "FlexAttention": None,
    "torch.compile": None,
    "FlashAttention-4": settings.FA4_CACHE,
}  # whose kernels stay on disk, as FlashInfer's do, and the switch
MOST = 8  # processes; each one holds a row's inputs on the GPU, a few GB
LIMIT = 120  # seconds; what is not compiled by then compiles when its turn comes


def compile_rows(suite: str, device: torch.device, only: str, quick: bool) -> None:
    """Run every row of a suite once, untimed, in as many processes as there are cores for."""
    start, parts = time.perf_counter(), max(1, min(MOST, (os.cpu_count() or 2) // 2))
    alone = settings.of_child(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "onchip.bench.warm", suite, str(device), only, str(int(quick))]
    quiet = subprocess.DEVNULL
    workers = [subprocess.Popen([*command, str(part), str(parts)], env=alone, stdout=quiet, stderr=quiet) for part in range(parts)]
    try:
        for worker in workers:
            worker.wait(max(0.1, start + LIMIT - time.perf_counter()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        cut = sum(worker.poll() is None for worker in workers)
        for worker in workers:
            worker.kill()
            worker.wait()
    more = f"; {cut} of them were cut off: a row takes long to compile, or to run" if cut else ""
    Console(stderr=True, highlight=False).print(f"compiled in {parts} processes, {time.perf_counter() - start:.0f} s{more}")


def _part(suite_name: str, device_name: str, only: str, quick: str, part: str, parts: str) -> None:
    from onchip.bench import data, suite
    from onchip.bench.failures import noted
    from onchip.bench.peers import contenders

    device = torch.device(device_name)
    kept = [name for name, switch in KEPT.items() if switch is None or switch.read()]
    rows = suite.rows(suite_name, device, quick == "1", only)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for row in rows[int(part) :: int(parts)]:
            with noted({}, "row"):
                made = data.inputs(row, device)
                for peer in contenders(row.problem, device)[0]:
                    if peer.name in kept or peer.module == "flashinfer":
                        with noted({}, peer.name):
                            peer.prepare(made).run()


if __name__ == "__main__":
    _part(*sys.argv[1:])
