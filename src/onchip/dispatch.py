"""From a Problem to the kernel that runs it: `select`, and `explain` and `record` to see what was chosen, why, and what to change."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from onchip.core import device as devices
from onchip.core import settings
from onchip.core.device import Device, Floor
from onchip.core.kernel import Kernel, Op, Unsupported
from onchip.core.problem import Attention, Cost, Problem
from onchip.kernels import again, attention, fused

OPS: dict[str, Op] = {op.name: op for op in (*attention.OPS, *fused.OPS)}
kept: dict[tuple, tuple["Decision", Any]] = {}  # of calls that come again, by all that their Problem and device depend on (`ops/kinds.py`)
recorders: list[list["Decision"]] = []  # of `record`
margin: ContextVar[int | None] = ContextVar("onchip.sm_margin", default=None)


@dataclass(frozen=True, eq=False)
class Decision:
    """The kernel chosen for a Problem on a device, and why the ones before it were not.

    before    the kernels ahead of it in the menu, which leave the Problem; () where it was asked for by name.
    index     of the GPU that the call's tensors are on; None on a CPU, and of a device that is only described.
    """

    problem: Problem
    device: Device
    kernel: Kernel
    before: tuple[Kernel, ...] = ()
    index: int | None = None

    @functools.cached_property
    def refused(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """((kernel name, its reasons), ...) in the order of the menu: what it cannot do, or what does it better. Said when somebody asks: the sentences would
        be two thirds of what a Decision takes, and a server on a CPU comes to thousands."""
        return tuple((kernel.name, tuple(kernel.leaves(self.problem, self.device))) for kernel in self.before)

    @functools.cached_property
    def config(self):
        """What the kernel runs with: its tiles, or what `blocked` asks of torch's own kernel; None where there is no choice."""
        return self.kernel.configs(self.problem, self.device)[0]

    @functools.cached_property
    def run(self) -> Callable:
        """The kernel as a function of its inputs alone, for callers that know that autocast is off."""
        run = functools.partial(self.kernel.load(), self.problem, self.config)
        if self.index is None or self.kernel.portable:
            return run
        return _there(again.repeated(run) if self.kernel.extra is None else run, self.index)

    @functools.cached_property
    def launch(self) -> Callable:
        """The kernel as a function of its inputs alone."""
        return _as_given(self.run, "cpu" if self.device.kind == "cpu" else "cuda") if self.kernel.portable else self.run

    @functools.cached_property
    def recorded(self) -> Callable | None:
        """The same where torch's own autograd has the gradient; else None."""
        return self.kernel.recorded(self.problem)

    @functools.cached_property
    def cost(self) -> Cost:
        return OPS[self.problem.op].cost(self.problem)

    @functools.cached_property
    def floor(self) -> Floor:
        return self.device.floor(self.cost, self.problem.dtype)

    def __str__(self):
        return _report(self)


def select(problem: Problem, device: torch.device | Device, kernel: str = "auto") -> Decision:
    """The Decision for `problem`: the first kernel of the menu that neither refuses it nor knows of a better one, or the one named.

    Raises `Unsupported` with every reason when the named kernel refuses, when none is left, or when `ONCHIP_STRICT` is
    set and only a portable kernel is left on a GPU. A second call with an equal problem is one dictionary look-up.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"{problem.op}: kernel is {kernel!r:.60}; give the name of one, or 'auto'")
    decision = _select(problem, device, kernel, margin.get())
    for recorder in recorders:
        recorder.append(decision)
    return decision


@functools.lru_cache(maxsize=1 << 14)
def _select(problem: Problem, device: torch.device | Device, kernel: str, left: int | None = None) -> Decision:
    op, facts = OPS[problem.op], device if isinstance(device, Device) else devices.of(device)
    facts = facts if left is None else replace(facts, margin=left)
    index = device.index if isinstance(device, torch.device) and device.type == "cuda" else None
    if kernel != "auto":
        chosen = op.kernel(kernel)
        reasons = chosen.refuses(problem, facts)
        if reasons:
            others = [k.name for k in op.kernels if not k.leaves(problem, facts)]
            raise Unsupported(f"{op.name}: kernel={kernel!r} refused {problem}: {'; '.join(reasons)}. {_way_out(others)}")
        return Decision(problem, facts, chosen, index=index)
    refused = []
    for at, candidate in enumerate(op.kernels):
        reasons = candidate.leaves(problem, facts)
        if not reasons:
            if candidate.portable and facts.kind != "cpu" and settings.STRICT.read():
                raise Unsupported(
                    f"{op.name}: ONCHIP_STRICT is set and only the portable kernel {candidate.name} takes {problem} on {facts.name}: {sentences(refused)}"
                )
            return Decision(problem, facts, candidate, op.kernels[:at], index)
        refused.append((candidate.name, tuple(reasons)))
    raise Unsupported(f"{op.name}: no kernel takes {problem} on {facts.name}: {sentences(refused)}")


@functools.lru_cache(maxsize=1 << 14)
def native(problem: Problem, device: torch.device, kernel: str = "auto") -> str | None:
    """The name of the kernel that is not plain torch and would run `problem`: the one asked for if it can, else the menu's first; None where there is none."""
    facts = devices.of(device)
    kernels = sorted((k for k in OPS[problem.op].kernels if not k.portable), key=lambda k: k.name != kernel)
    return next((k.name for k in kernels if not (k.refuses if k.name == kernel else k.leaves)(problem, facts)), None)


def forget() -> None:
    """Drop every decision, so that changed settings are read again."""
    _select.cache_clear()
    kept.clear()
    native.cache_clear()
    again.forget()


def _as_given(run: Callable, device: str) -> Callable:
    """Plain torch without autocast, which operators heed where they begin: inside, it would round what is summed in float32."""

    def launch(*inputs):
        if not torch.is_autocast_enabled(device):
            return run(*inputs)
        with torch.autocast(device, enabled=False):
            return run(*inputs)

    return launch


def _there(run: Callable, index: int) -> Callable:
    """A launch where its tensors are: Triton's go to the current GPU, whatever they are given. (Models over several GPUs leave that at the first one.)"""

    def launch(*inputs):
        if torch.cuda.current_device() == index:
            return run(*inputs)
        with torch.cuda.device(index):
            return run(*inputs)

    return launch


def sentences(refused) -> str:
    """Who refused, and why: of a Decision, or of a menu of which nothing is left."""
    return ". ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in refused)


def _way_out(others: list[str]) -> str:
    return f"Leave kernel='auto' ({others[0]} accepts this)" if others else "No other kernel accepts this either"


@contextmanager
def record() -> Iterator[list[Decision]]:
    """Collect the Decision of every operator called inside, in order.

    >>> with onchip.record() as decisions:
    ...     onchip.attention(q, k, v)
    >>> decisions[0].kernel.name
    """
    decisions: list[Decision] = []
    recorders.append(decisions)
    try:
        yield decisions
    finally:
        recorders[:] = [recorder for recorder in recorders if recorder is not decisions]


@contextmanager
def sm_margin(multiprocessors: int | None) -> Iterator[None]:
    """Leave so many multiprocessors of a GPU to others, as communication that runs beside; 0 none, None as many as `ONCHIP_SM_MARGIN` says.

    Hopper's attention kernels and `register_decode` keep to it, and the backward passes of eager calls made inside; compiled graphs forward alone.

    >>> with onchip.sm_margin(16):
    ...     out = onchip.attention(q, k, v)
    """
    if multiprocessors is not None and (type(multiprocessors) is not int or multiprocessors < 0):
        raise ValueError(f"sm_margin: {multiprocessors!r}; give a number of multiprocessors, 0 or more, or None")
    before = margin.set(multiprocessors)
    try:
        yield
    finally:
        margin.reset(before)


def left_to_others() -> int:
    """Multiprocessors that a call made now leaves."""
    return settings.SM_MARGIN.read() if (left := margin.get()) is None else left


def explain(call: Callable | Problem, *args, **keywords) -> str:
    """What runs, why, the floor of the hardware, and what to change so that a kernel further ahead runs, as text: for a function and its arguments (which
    is run once), or for a Problem, as of `select` with a `device` (cpu where none is given; also the name of one, or of a GPU of the table) and a `kernel`.

    >>> print(onchip.explain(onchip.attention, q, k, v, mask=onchip.Causal()))
    >>> print(onchip.explain(problem, device="H200", kernel="triton_prefill"))
    """
    if callable(call):
        with record() as decisions:
            call(*args, **keywords)
        unique = {(d.problem, d.kernel.name): d for d in decisions}
        return "\n".join(str(d) for d in unique.values()) or "no onchip operator was called"
    if not isinstance(call, tuple) or not hasattr(call, "op"):
        raise TypeError(f"explain: {call!r:.60} is neither a function nor a Problem; give one, as in explain(onchip.attention, q, k, v)")
    if call.op not in OPS:
        raise ValueError(f"explain: a Problem of {call.op!r:.60}, which is no operator; there are {', '.join(OPS)}")
    given = dict(zip(("device", "kernel"), args, strict=False)) | keywords
    if len(given) < len(args) + len(keywords) or not given.keys() <= {"device", "kernel"}:
        raise TypeError(f"explain: with a Problem come {[*args, *keywords]!r:.80}; give a device and a kernel, each once: explain(problem, device=, kernel=)")
    device = given.get("device")
    return str(select(call, devices.described("cpu" if device is None else device), given.get("kernel", "auto")))


def _report(d: Decision) -> str:
    """The page that `explain` prints."""
    seconds, bound = d.floor
    lines = [f"{d.problem}, on {d.device.name}"]
    tiles = f"   {d.config}" if d.config is not None else ""
    lines.append(f"  runs   {d.kernel.name:<15}  {d.kernel.file}{tiles}")
    intensity = d.cost.flops / max(d.cost.bytes, 1)
    if told := getattr(d.config, "order", None):
        lines.append(f"  order  {told(d.problem)}")
    lines.append(f"  floor  {_time(seconds)}, bound by {bound}: {_si(d.cost.flops)}FLOP, {_si(d.cost.bytes)}B, {intensity:.0f} flop/byte ({d.device.source})")
    lines += [f"  not    {name:<15}  {'; '.join(reasons)}" for name, reasons in d.refused]
    if change := _change(d):
        lines.append(f"  change {change[0]:<15}  would run {' and '.join(change[1])}")
    return "\n".join(lines)


# ---- what to change: other Problems whose result is the same, or nearly


def _in_bfloat16(p: Attention) -> tuple[str, Attention] | None:
    extras = tuple(extra for extra in p.extras if extra != "tf32")
    return ("in bf16", p._replace(dtype=torch.bfloat16, extras=extras)) if p.dtype in (torch.float32, torch.float64) else None


def _wider(least: Callable[[int], int], p: Attention) -> tuple[str, Attention] | None:
    dim, dim_v = least(p.dim), least(p.value_dim)
    if (dim, dim_v) == (p.dim, p.value_dim) or p.kv or "latent" in p.extras:
        return None
    columns = f"{dim}" if dim == dim_v else f"{dim} and {dim_v}"
    return f"with heads of {columns} columns (add zeros; scale={p.dim}**-0.5 where none is given)", p._replace(dim=dim, dim_v=0 if dim == dim_v else dim_v)


def _by_pages(page: int, p: Attention) -> tuple[str, Attention] | None:
    return (f"over pages of {page} tokens", p._replace(page=page)) if p.keys == "paged" and p.page != page else None


def _without(extra: str, p: Attention) -> tuple[str, Attention] | None:
    return (f"without {extra}", p._replace(extras=tuple(e for e in p.extras if e != extra))) if extra in p.extras else None


EDITS: tuple[Callable[[Attention], tuple[str, Attention] | None], ...] = (
    _in_bfloat16,
    functools.partial(_wider, lambda dim: -(-dim // 8) * 8),
    functools.partial(_wider, lambda dim: max(64, 1 << (dim - 1).bit_length())),
    functools.partial(_by_pages, 64),
    functools.partial(_without, "deterministic"),
    functools.partial(_without, "batch_invariant"),
)


def _change(d: Decision) -> tuple[str, tuple[str, ...]] | None:
    """The kernel that stands first in the menu of those that one edit leads to, or else two, and the words of these edits."""
    if not isinstance(d.problem, Attention) or not d.refused:
        return None
    ranks = {kernel.name: rank for rank, kernel in enumerate(OPS[d.problem.op].kernels)}
    for count in (1, 2):
        found = [edited for edits in itertools.combinations(EDITS, count) if (edited := _edited(d, edits)) and ranks[edited[0]] < ranks[d.kernel.name]]
        if found:
            return min(found, key=lambda edited: ranks[edited[0]])
    return None


def _edited(d: Decision, edits) -> tuple[str, tuple[str, ...]] | None:
    """The kernel that would run the Problem after these edits, and their words; None where one of them has nothing to change, or no kernel takes it."""
    problem, words = d.problem, ()
    for edit in edits:
        if (made := edit(problem)) is None:
            return None
        words, problem = (*words, made[0]), made[1]
    try:
        return _select(problem, d.device, "auto").kernel.name, words
    except Unsupported:
        return None


def _si(value: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {prefix}"
    return f"{value:.0f} "


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
