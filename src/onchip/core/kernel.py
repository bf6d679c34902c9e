"""What an operator is (its cost and its kernels) and what a kernel declares (as data, so that a refusal is a sentence)."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from onchip.core.device import Device
from onchip.core.problem import SHORT, Cost, Problem


class Unsupported(Exception):
    """No kernel takes this call, or the kernel asked for by name does not; the message lists every reason."""


class Extra(NamedTuple):
    """An optional extra of onchip, called like the module that it brings, and the distribution and its least version that have this module."""

    name: str
    distribution: str
    version: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute an operator.

    entry     "module:function"; imported when first launched. The function takes (problem, config, *inputs).
              A module with a function `configs(problem, device)` gets its first element as `config`, else None;
              one with a function `recorded(problem)` may have a form that torch's autograd records by itself.
    arch      {device kind: least arch, or (the only one,)}; empty: any device torch has.
    accepts   {field of the Problem: the values it may have}; for a class, instances of it.
    also      functions problem -> reason or None, for what no single field can say.
    slower    the same for what another kernel does faster, or in less memory: such a problem is only taken when this kernel is asked for by name.
    least     (problem, device kind) -> bytes of shared memory that the smallest tiles take.
    portable  plain torch: on a GPU a slow fallback, which ONCHIP_STRICT turns into an error.
    extra     the optional extra of onchip that it needs.
    """

    name: str
    entry: str
    arch: Mapping[str, int | tuple[int]] = field(default_factory=dict)
    accepts: Mapping[str, object] = field(default_factory=dict)
    also: Sequence[Callable[[Problem], str | None]] = ()
    slower: Sequence[Callable[[Problem], str | None]] = ()
    least: Callable[[Problem, str], int] | None = None
    portable: bool = False
    extra: Extra | None = None

    @property
    def file(self) -> str:
        return self.entry.partition(":")[0].removeprefix("onchip.").replace(".", "/") + ".py"

    @property
    def needs_triton(self) -> bool:
        return bool(self.arch)

    def refuses(self, problem: Problem, device: Device) -> list[str]:
        """Every reason this kernel cannot run `problem` on `device`; empty when it can."""
        reasons = []
        if self.arch and device.kind not in self.arch:
            reasons.append(f"runs on {' and '.join(_arch(k, a) for k, a in self.arch.items())}, this is a {device.name}")
        elif self.arch and not _runs(self.arch[device.kind], device.arch):
            reasons.append(f"needs {_arch(device.kind, self.arch[device.kind])}, {device.name} is {device.arch}")
        elif reason := (self.needs_triton and _without_triton()) or (self.extra and missing(self.extra)):
            reasons.append(reason)
        for name, allowed in self.accepts.items():
            value = getattr(problem, name)
            if not (isinstance(value, allowed) if _is_types(allowed) else value in allowed):
                reasons.append(f"{name} {_say(value)} is not {_say(allowed)}")
        reasons += _reasons(self.also, problem)
        if not reasons and self.least and (least := self.least(problem, device.kind)) > device.shared_memory:
            reasons.append(f"the smallest tiles take {least >> 10} KiB of shared memory, of {device.shared_memory >> 10} of {device.name}")
        return reasons

    def leaves(self, problem: Problem, device: Device) -> list[str]:
        """Every reason not to take `problem` unless asked to: what it refuses, and what another kernel does better."""
        return self.refuses(problem, device) or _reasons(self.slower, problem)

    def load(self) -> Callable:
        return getattr(self._module(), self.entry.partition(":")[2])

    def configs(self, problem: Problem, device: Device) -> list:
        """The kernel's choices (of tiles, mostly) for this problem, best first; [None] when it has none."""
        choose = self._beside("configs")
        return choose(problem, device) if choose else [None]

    def recorded(self, problem: Problem) -> Callable | None:
        """The form of the launch that torch's autograd records, see `blocked.recorded`; None where this kernel has none for the problem."""
        make = self._beside("recorded")
        return make(problem) if make else None

    def _beside(self, name: str) -> Callable | None:
        return getattr(self._module(), name, None)

    def _module(self):
        """Where the entry is. Of an extra that is installed and cannot be imported it is said; no other kernel is taken in silence."""
        try:
            return importlib.import_module(self.entry.partition(":")[0])
        except (ImportError, AttributeError, OSError) as error:
            if self.extra is None:
                raise
            name, distribution, least = self.extra
            raise Unsupported(
                f"{self.name}: the extra onchip[{name}] is installed and cannot be imported ({type(error).__name__}: {error}); "
                f"pip install --force-reinstall '{distribution}>={least}', or pip uninstall {distribution}: then another kernel runs"
            ) from error


@dataclass(frozen=True, eq=False)
class Op:
    """An operator: its name, the cost of a Problem, and its kernels, fastest first; the last takes floats of any sizes."""

    name: str
    cost: Callable[[Problem], Cost]
    kernels: Sequence[Kernel]

    def kernel(self, name: str) -> Kernel:
        found = next((kernel for kernel in self.kernels if kernel.name == name), None)
        if found is None:
            raise Unsupported(f"{self.name}: no kernel is named {name!r}; it has {', '.join(k.name for k in self.kernels)}, or leave kernel='auto'")
        return found


@functools.cache
def missing(extra: Extra) -> str | None:
    """Why an extra cannot be used: its module is not there, is another distribution's of that name, or is too old. Looked up once; imports nothing."""
    name, distribution, least = extra
    if importlib.util.find_spec(name) is None:
        found = "is not installed"
    else:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found = f"is not installed: the module {name!r} that was found is another package's"
        else:
            if _release(version) >= _release(least):
                return None
            found = f"is {version}" if version else "has no version that can be read"
    return f"needs the extra onchip[{name}], {distribution} {least} or later, which {found}: pip install '.[{name}]' in a checkout"


def _without_triton() -> str | None:
    """Why there is no Triton for these kernels: Gluon as they are written in came with 3.6."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    version = _version_of_triton()
    return f"needs Triton 3.6 or later, as torch 2.10 and later bring it; this is {version}" if version and _release(version) < (3, 6) else None


@functools.cache
def _version_of_triton() -> str | None:
    """None where it is installed under a name that is not known."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _release(version: str | None) -> tuple[int, ...]:
    """The numbers that a version begins with, for comparison: (4, 10) of "4.10rc1", none of "dev"."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version or "")[0])))


def pick(ladder: Sequence[tuple], size: int):
    """The value of the first rung `(up to, value)` that holds `size`; the last rung holds everything."""
    return next((value for limit, value in ladder if size <= limit), ladder[-1][1])


def _reasons(rules, problem: Problem) -> list[str]:
    return [reason for rule in rules if (reason := rule(problem))]


def _is_types(allowed) -> bool:
    return isinstance(allowed, type) or (isinstance(allowed, tuple) and all(isinstance(a, type) for a in allowed))


def _runs(wanted: int | tuple[int], arch: int) -> bool:
    return arch in wanted if isinstance(wanted, tuple) else arch >= wanted


def _arch(kind: str, arch: int | tuple[int]) -> str:
    if isinstance(arch, tuple):
        return f"{_arch(kind, arch[0])} alone"
    return f"NVIDIA sm_{arch}" if kind == "cuda" else f"AMD gfx{arch}"


def _say(value) -> str:
    if isinstance(value, torch.dtype):
        return SHORT.get(value, str(value))
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, range):
        return f"in {value.start}..{value[-1]}" + (f" by {value.step}" if value.step > 1 else "")
    if isinstance(value, (tuple, frozenset, list)):
        names = [_say(v) for v in value]
        return names[0] if len(names) == 1 else "one of " + ", ".join(names)
    return str(value) or "none"
