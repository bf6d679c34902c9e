"""One set of kernel tests for three places: a GPU (`pytest -m gpu`), Triton's interpreter (TRITON_INTERPRET=1), and plain torch on a CPU."""

import contextlib
import gc
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before numpy is there: the interpreter's products wait up to 500 times as long for a second thread
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import torch

ABREAST = 6  # large tests at once on each GPU
LONGEST = [  # files of more than 10 seconds, where nothing is compiled yet, as they are or in the interpreter
    "kernels/attention/test_prefill_compile", "kernels/attention/test_decode_compile", "kernels/fused/test_compile",
    "kernels/attention/test_hopper_backward_emulated", "ops/test_compiled", "kernels/attention/test_backward_compile", "kernels/attention/test_decode",
    "kernels/attention/test_fp8_compile", "kernels/attention/test_hopper_emulated", "models/test_decoder", "kernels/attention/test_blocked",
    "kernels/attention/test_random", "kernels/fused/test_logits", "kernels/attention/test_tile", "kernels/attention/test_prefill",
    "kernels/fused/test_compile_losses", "kernels/fused/test_softmax", "kernels/attention/test_statistics", "ops/test_row_ops",
    "kernels/attention/test_fp8_backward", "kernels/attention/test_register_decode", "kernels/attention/test_hopper_mla",
    "kernels/attention/test_hopper_ragged", "engine/test_mixes", "engine/test_llm", "engine/test_draft_model", "engine/test_llm_ranks",
    "models/test_parallel", "integrations/test_transformers", "kernels/attention/test_memory", "cache/test_radix", "bench/test_serve",
]  # fmt: skip
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:
    from interpreter import repair

    repair()
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_thread():
    """A tiny model only waits for a second thread, a hundred times as long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_ignore_collect(collection_path, config):
    """Of GPU tests alone, a file is not even imported that marks none: what they import takes each process 10 s."""
    only = config.option.markexpr.startswith("gpu") and collection_path.suffix == ".py"
    return True if only and "mark.gpu" not in collection_path.read_text() else None


def pytest_collectstart(collector):
    """What a file draws while it is imported is the same whichever files came before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is wide
def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None and item.get_closest_marker("wide") is None:
            if seen[item.nodeid.partition("[")[0]] % mark.args[0]:
                item.add_marker("wide")
            seen[item.nodeid.partition("[")[0]] += 1
    if "PYTEST_XDIST_WORKER" in os.environ:  # one that came last would leave the other processes idle
        order = {f"tests/{name}.py": at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    on_gpu = torch.cuda.is_available()
    on_hopper = on_gpu and torch.cuda.get_device_capability()[0] == 9
    for item in items:
        if item.get_closest_marker("hopper") and not on_hopper:
            item.add_marker(pytest.mark.skip(reason="for Hopper: needs an H100 or H200"))
        elif item.get_closest_marker("large") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="too large for the interpreter: needs a GPU"))
        elif item.get_closest_marker("gpu") and not (on_gpu or INTERPRET):
            item.add_marker(pytest.mark.skip(reason="a GPU kernel: needs a GPU or TRITON_INTERPRET=1"))


def pytest_collection_finish():
    """What was imported stays: a full collection of garbage need not look at it, which takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """Where kernel tests run."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def current_gpu(monkeypatch) -> list[int]:
    """The current GPU, last of the list, where there is none: torch's own functions read it and change it."""
    current = [0]

    @contextlib.contextmanager
    def changed(device):
        current.append(device if isinstance(device, int) else device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", changed)
    return current


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def room(request):
    """A large test finds the GPU without what tests before it left in torch's cache, and has at most ABREAST - 1 others beside it, whatever the number of
    processes (`pytest -n`): a few hold 40 GB.
    """
    if not request.node.get_closest_marker("large") or not torch.cuda.is_available():
        yield
        return
    with _turn():
        torch.cuda.empty_cache()
        yield
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _turn():
    """One of the ABREAST locks of this GPU, which all processes share."""
    import fcntl  # not on Windows, where no large test runs

    gpu = torch.cuda.get_device_properties(0).uuid
    names = [Path(tempfile.gettempdir(), f"onchip-large-{gpu}-{n}") for n in range(ABREAST)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(name, "a")) for name in names]
        while True:
            for file in files:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.1)


def pytest_terminal_summary(terminalreporter, config):
    """On a GPU, `pytest -m gpu` leaves its counts beside the benchmarks: benchmarks/results/<gpu>/tests.json."""
    if config.option.markexpr != "gpu" or not torch.cuda.is_available():
        return
    import datetime
    import json
    import platform
    import subprocess

    import triton

    import onchip

    git = subprocess.run(["git", "-C", config.rootpath, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name()
    summary = {
        "device": name,
        "commit": git.stdout.strip() or os.environ.get("GIT_COMMIT"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"onchip": onchip.__version__, "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "counts": {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")},
    }
    folder = config.rootpath / "benchmarks" / "results" / name.lower().removeprefix("nvidia ").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tests.json").write_text(json.dumps(summary, indent=1) + "\n")
