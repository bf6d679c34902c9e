"""Time a suite: ours and every peer in turn, in one process, each one checked before it is timed."""

import datetime
import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

import onchip
from onchip.bench import bars, block_report, chance, data, goals, judge, ladder, ladder_report, meters, paged, quality, report, serve, suite, warm
from onchip.bench import rows as operators
from onchip.bench.call import Call
from onchip.bench.failures import noted
from onchip.bench.peers import Peer, contenders, versions
from onchip.core import device as devices
from onchip.core import settings
from onchip.core.device import Device
from onchip.core.masks import Mask
from onchip.core.problem import SHORT, Attention
from onchip.core.trace import Traced
from onchip.dispatch import record

RESULTS = Path("benchmarks/results")
REPORTS = {"io": ladder_report, "block": block_report}  # the suites that have tables and plots of their own
FLUSH, FLUSHES = 1 << 30, 4  # bytes read before a reading, and how often: many times any L2, and about 1 ms in which the host queues the call
SHORT_CALL = 50e-6  # seconds; below, the gap between launches shows, and the calls go into a CUDA graph
GRAPH_CALLS, MOST_COPIES, SWEPT = 20, 64, 6  # calls a graph at least, sets of inputs that they go round, and how often these fill L2
SHORT_READING = 2e-4  # seconds; below, one reading of the host's clock spans several calls
LONG_READING = 1.0  # seconds; above, half as many rounds have to do
# A GPU's clock follows its power of the last tenth of a second: a turn of calls this long begins with 0.1 s that is not read. The backward pass of one sequence
# of 32k takes 30.5 ms behind a contender that leaves the tensor cores alone, 33 right after that, and 35 from then on (H200: 690 W, 1,980 to 1,500 MHz).
LONG_CALL, SETTLED = 2e-3, 0.1


@dataclass(frozen=True)
class Effort:
    """Rounds over the contenders, and seconds of readings for each of them; one reading a round at least, and `most`."""

    rounds: int
    budget: float
    most: int = 50


MATHS = ("prefill", "forward", "backward", "step")  # whose rate counts FLOP; that of all others bytes
MANY = 128  # but for decoding with as many rows of a key, which waits for arithmetic
FULL, QUICK = Effort(5, 0.4), Effort(3, 0.1)
EFFORTS = {"rows": Effort(5, 0.1, 10)}  # a suite of many rows: flushing L2 takes 1 ms a reading


def bench(suite_name: str, device: torch.device, out: Path = RESULTS, only: str = "", quick: bool = False) -> Path:
    """Run a suite, print its table, and write `<out>/<device>/<suite>.json` with a page (.html) and a plot (.svg) beside it.

    `only` keeps the rows whose problem or plot has that text in its name; their files are named `<suite>-<only>`, so that
    a part never replaces the whole. Returns the path of the JSON file, which is rewritten after each row.
    """
    if suite_name in WHOLE:
        return _whole(suite_name, device, Path(out), only, quick)
    rows = suite.rows(suite_name, device, quick, only)
    if not rows:
        raise ValueError(f"suite {suite_name!r} has no row with {only!r} in it on {device.type}; leave --only out to run them all")
    progress = Console(stderr=True, highlight=False)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        facts = _measured(device)
        result = {"suite": suite_name, "device": _describe(device, facts), **_origin(), "quick": quick, "rows": []}
        path = _place(Path(out), result["device"], suite_name, only)
        if suite_name in warm.SUITES and device.type == "cuda":
            warm.compile_rows(suite_name, device, only, quick)
        for number, row in enumerate(rows, 1):
            progress.print(f"{number}/{len(rows)} {row.problem}", markup=False)
            result["rows"].append(measure(row, device, facts, QUICK if quick else EFFORTS.get(suite_name, FULL)))
            result["rows"][-1]["over_plain"] = bars.over_plain(result["rows"][-1], result["rows"])
            result["summary"] = bars.summary(result["rows"])
            result["goals"] = goals.GOALS[suite_name](result) if suite_name in goals.GOALS else []
            path.write_text(json.dumps(result, indent=1) + "\n")
    REPORTS.get(suite_name, report).write(result, path)
    return path


def _whole(suite_name: str, device: torch.device, out: Path, only: str, quick: bool) -> Path:
    """A suite that is no list of calls: it has rows, a file and tables of its own."""
    run, facts = WHOLE[suite_name]
    described = _describe(device, facts(device))
    path = _place(out, described, suite_name, only)
    run({"device": described, **_origin()}, path, device, only, quick)
    return path


def _place(out: Path, device: dict, suite_name: str, only: str) -> Path:
    path = out / device["slug"] / f"{_slug(f'{suite_name} {only}')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ---- one row


def measure(row: suite.Row, device: torch.device, facts: Device, effort: Effort) -> dict:
    """A row of the result: the times of every contender that was right, and what was wrong with the others."""
    fields = {**plain(row.problem), "group": row.group, "x": row.x, "lengths": list(row.lengths), "queries": list(row.queries)}
    entry = {"problem": str(row.problem), "fields": fields, "kernel": None, "config": None, "seconds": {}, "spread": {}, "distance": {}, "compared": {}}
    entry |= {"cost": None, "floor": None, "rate": None, "goal": None, "timed_by": None, "waits": None, "error": {}}
    errors = entry["error"]
    found, entry["refused"] = contenders(row.problem, device)
    with noted(errors, "row"):  # what all contenders need: memory for the inputs, above all
        inputs = data.inputs(row, device)
        _weigh(entry, inputs, facts)
        calls = _checked(found, inputs, entry)
        if isinstance(row.problem, suite.Ladder):
            _account(entry, calls, inputs.problem, device)
        if isinstance(row.problem, suite.Pass) and row.problem.op == "step":
            _hold(entry, calls, inputs, device)
        clock = HostClock(device) if inputs.on_host or device.type == "cpu" else DeviceClock(device)
        guesses = guess(calls, clock, errors)
        entry["timed_by"] = clock.name
        trained = isinstance(row.problem, suite.Pass) or row.problem.op in (operators.BACKWARD, operators.STEP)  # autograd chooses its own stream
        graphs = isinstance(clock, DeviceClock) and not trained
        if graphs and guesses and (serves(inputs) or min(guesses.values()) < SHORT_CALL):
            copies = [data.inputs(row, device) for _ in range(_copies(inputs, device) - 1)]
            calls = _captured([peer for peer in found if peer.name in guesses], calls, copies, errors)
            guesses = guess(calls, clock, errors)
            entry["timed_by"] = f"CUDA graph over {len(copies) + 1} sets of inputs"
        for name, seconds in take(calls, guesses, clock, effort, errors).items():
            deciles = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds
            entry["seconds"][name], entry["spread"][name] = statistics.median(seconds), (deciles[0], deciles[-1])
    return entry


def serves(inputs) -> bool:
    """Whether it is a call as an engine makes it: always in a graph, whatever it takes, and never waiting for the device."""
    return isinstance(inputs, (paged.Paged, paged.Appended))


def _weigh(entry: dict, inputs, facts: Device) -> None:
    """The row's cost, its floor on this device, and what its rate counts."""
    p, cost = inputs.problem, inputs.cost
    if cost is None:
        entry["goal"] = suite.GOAL if p.op == "select" else None
        return
    entry["cost"], entry["floor"] = cost._asdict(), facts.floor(cost, p.dtype)._asdict()
    if p.op == "generate":
        entry["rate"] = {"unit": "token/s", "amount": p.batch * (p.prompt if p.phase == "prefill" else 1)}
    else:
        maths = p.op in MATHS or (p.op in ("decode", "latent") and p.len_q * p.group >= MANY) or getattr(inputs, "maths", False)
        entry["rate"] = {"unit": "FLOP/s", "amount": cost.flops} if maths else {"unit": "B/s", "amount": cost.bytes}


def _checked(found: list[Peer], inputs, entry: dict) -> dict[str, Call]:
    """The contenders whose result is right, as calls that have run once; ours is the first of them and gives the row its kernel."""
    calls, ours, errors, drops = {}, None, entry["error"], chance.drops(inputs)
    for peer in found:
        with noted(errors, peer.name):
            call = peer.prepare(inputs)
            with record() as decisions:
                output = call.run()
                output = output if call.result is None else call.result()
            if peer.name == "onchip":
                entry["waits"] = meters.waits(call.run) if serves(inputs) and inputs.device.type == "cuda" else None
                entry["kernel"] = ", ".join(dict.fromkeys(d.kernel.name for d in decisions)) or None
                entry["config"] = ", ".join(dict.fromkeys(str(d.config) for d in decisions if d.config is not None)) or None
            distance = None if drops and peer.draws else inputs.error(output, ours)
            entry["distance"][peer.name] = distance if distance is None or math.isfinite(distance) else None
            if drops:
                entry["compared"][peer.name] = chance.compared(inputs, output, peer.draws)
            if distance is not None and not distance <= inputs.tolerance:
                raise ValueError(f"wrong: its result is off by {distance:.2g}, where {inputs.tolerance:g} is allowed; not timed")
            calls[peer.name] = call
            ours = output if peer.name == "onchip" else ours
    return calls


def _account(entry: dict, calls: dict[str, Call], p: Attention, device: torch.device) -> None:
    """The bytes that each rung moves by its model and by a counter, and those that it holds; of a rung that did not run the model alone."""
    entry["moved"] = {name: {"modelled": model(p, device), "counted": None, "why": "not run"} for name, model in ladder.MOVED.items()}
    entry["held"] = {}
    for name, call in calls.items():
        with noted(entry["error"], name):
            entry["held"][name] = meters.peak(call.run, device)
    with noted(entry["error"], "ncu"):
        for name, (counted, why) in meters.count(list(entry["held"]), p, device).items():
            entry["moved"][name] |= {"counted": counted, "why": why}


def _hold(entry: dict, calls: dict[str, Call], inputs: data.Trained, device: torch.device) -> None:
    """The most memory that each contender holds in a step, what it was given included, and what it cannot do without."""
    entry["memory"] = {"ideal": inputs.ideal, "held": {}}
    for name, call in calls.items():
        with noted(entry["error"], name):
            entry["memory"]["held"][name] = inputs.given + meters.peak(call.run, device)


def _copies(inputs, device: torch.device) -> int:
    """Sets of inputs that together are several times the L2 cache, so that none is found there when its turn comes again."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, math.ceil(SWEPT * l2 / inputs.cost.bytes)))


def _captured(found: list[Peer], calls: dict[str, Call], copies: list, errors: dict) -> dict[str, Call]:
    graphs = {}
    for peer in found:
        with noted(errors, peer.name):
            graphs[peer.name] = capture([calls[peer.name], *(peer.prepare(inputs) for inputs in copies)])
    return graphs


def capture(calls: list[Call]) -> Call:
    """A CUDA graph that makes the calls in turn, GRAPH_CALLS or more in all; its last output is compared with that of a plain call.

    What a call leaves in memory was compared after a plain call alone: those that rotate in place give another result each time.
    """
    expected = judge.first([call.run() for call in calls][-1])
    returned = calls[-1].result is None
    expected = expected.clone() if returned else None
    torch.cuda.synchronize()
    graph, passes = torch.cuda.CUDAGraph(), math.ceil(GRAPH_CALLS / len(calls))
    with torch.cuda.graph(graph):
        for call in calls * passes:
            output = call.run()
    if returned:
        judge.first(output).fill_(torch.nan)
    graph.replay()
    if returned and not judge.distance(judge.first(output), expected) < 1e-2:
        raise RuntimeError("its CUDA graph does not give the result of the plain call: it launches on a stream of its own")

    def replay(_alive=(calls, output)):  # a graph owns neither its inputs nor the scratch memory of a plan
        graph.replay()

    return Call(replay, count=len(calls) * passes)


# ---- clocks


class HostClock:
    """Seconds of a call by the host's clock; a GPU is idle before it and after it."""

    name = "host clock"

    def __init__(self, device: torch.device):
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def read(self, run: Callable) -> float:
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start


class DeviceClock:
    """Seconds of a call by CUDA events, L2 flushed.

    FLUSH bytes are read first, FLUSHES times (not written: dirty lines would be written back while the call runs): none of the inputs is
    then in L2, and the host has queued the call before the first event fires, so that launch time does not count.
    """

    name = "CUDA events, L2 flushed"

    def __init__(self, device: torch.device):
        self.flush = torch.ones(FLUSH // 4, dtype=torch.float32, device=device)

    def read(self, run: Callable) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            self.flush.sum()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3


def read(call: Call, clock: HostClock | DeviceClock) -> float:
    """Seconds of one of the `count` things that a call does."""
    return (clock.read(call.run) - (clock.read(call.minus) if call.minus else 0.0)) / call.count


def guess(calls: dict[str, Call], clock: HostClock | DeviceClock, errors: dict) -> dict[str, float]:
    """About how long each call takes, in seconds, from one reading or, if that is short, the least of three more."""
    guesses = {}
    for name, call in calls.items():
        with noted(errors, name):
            first = read(call, clock)
            guesses[name] = max(1e-9, first if first * call.count > 0.1 else min(read(call, clock) for _ in range(3)))
    return guesses


def take(calls: dict[str, Call], guesses: dict[str, float], clock: HostClock | DeviceClock, effort: Effort, errors: dict) -> dict[str, list[float]]:
    """Readings of every call in seconds, a few at a time, round after round; each round begins with another contender."""
    names = [name for name in guesses if name not in errors]
    readings = {name: [] for name in names}
    slowest = max((guesses[name] * calls[name].count for name in names), default=0.0)
    for turn in range(effort.rounds if slowest < LONG_READING else (effort.rounds + 1) // 2):
        start = turn % max(1, len(names))
        for name in names[start:] + names[:start]:
            if name in errors:
                continue
            with noted(errors, name):
                call = calls[name]
                if isinstance(clock, HostClock):
                    call = stretch(call, guesses[name] * call.count)
                seconds = guesses[name] * call.count
                if isinstance(clock, DeviceClock) and LONG_CALL < seconds < SETTLED:
                    for _ in range(math.ceil(SETTLED / seconds)):
                        call.run()
                wanted = effort.budget / effort.rounds / seconds
                readings[name] += [read(call, clock) for _ in range(max(1, min(effort.most, int(wanted))))]
    return {name: seconds for name, seconds in readings.items() if name not in errors}


def stretch(call: Call, seconds: float) -> Call:
    """The same call as often in a row as makes a reading long enough for the host's clock; `seconds` is what it takes once."""
    times = math.ceil(SHORT_READING / seconds)
    if times <= 1 or call.minus:
        return call

    def run():
        for _ in range(times):
            call.run()

    return Call(run, count=call.count * times)


# ---- what is written down


def plain(value):
    """A Problem, or a value in one, as JSON holds it."""
    if isinstance(value, tuple):
        return {name: plain(part) for name, part in value._asdict().items()} if hasattr(value, "_asdict") else [plain(part) for part in value]
    return SHORT[value] if isinstance(value, torch.dtype) else str(value) if isinstance(value, (Mask, Traced)) else value


def _measured(device: torch.device) -> Device:
    """The device with the ceilings measured now in place of those of its datasheet."""
    bandwidth, peaks, source = devices.measure(device)
    return replace(devices.of(device), bandwidth=bandwidth, peaks=peaks, source=source)


def _describe(device: torch.device, facts: Device) -> dict:
    measured = {"bandwidth": facts.bandwidth, "flops": {SHORT[dtype]: rate for dtype, rate in facts.peaks.items()}, "note": facts.source}
    if device.type == "cpu":
        props = {"model": _cpu_model(), "threads": torch.get_num_threads()}
        return {"name": f"{props['model']}, {props['threads']} threads", "slug": "cpu", "kind": facts.kind, "properties": props, "measured": measured}
    found = torch.cuda.get_device_properties(device)
    props = {name: getattr(found, name) for name in ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size")}
    known = next((name for name in sorted(devices.GPUS, key=len, reverse=True) if name.lower() in found.name.lower()), found.name)
    return {"name": found.name, "slug": _slug(known), "kind": facts.kind, "properties": props, "measured": measured}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _origin() -> dict:
    """Versions, date and commit: what a number cannot be quoted without."""
    found = {"onchip": onchip.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version()), "driver": driver}
    folder, name = Path(__file__).parent, Path(__file__).name
    tracked = _output("git", "-C", str(folder), "ls-files", name)  # else the repository around an installed package would answer
    commit = _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if tracked else settings.COMMIT.read() or None
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"versions": found | versions(), "date": date, "commit": commit}


def _output(*command: str) -> str | None:
    """What a command prints, or None when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


WHOLE = {"quality": (quality.bench, devices.of), "serve": (serve.bench, _measured)}  # what runs, and what it has to know of the device
