"""A Hopper GPU that runs Gluon kernels on a CPU: their text as it is, on torch tensors, with the asynchronous units as late as we like.

    kernel = Emulator("slow loads", seed=0).load("onchip.kernels.hopper", "onchip.kernels.attention.hopper_prefill")
    kernel.launch(...)

`load` executes the modules' own sources with stand-ins for triton and Gluon. Programs run one after the other, and the partitions of a
program as threads of which one runs at a time, until it waits. Time is virtual: copies and products take a random while of it, by the
seed, so a run can be repeated, and a deadlock shows when nobody can go on and nothing is under way, however busy the machine. MODES say
what lags behind; each is worth a run, because a slow unit hides the races of the others.

What protects memory is emulated, so that a mistake in it shows as a wrong result or a Fault. From the moment a TMA copy is issued its
buffer holds NaN, until the copy lands; a TMA store reads shared memory late; a product reads its operands when it is issued or not before
it is waited for; mbarriers count arrivals and bytes, named barriers the threads of partitions. Layouts, registers and the divergence of
threads are not emulated: what compiles is for the compiler to say.
"""

import builtins
import functools
import heapq
import importlib.util
import itertools
import math
import operator
import random
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch

MODES = ("slow products", "slow loads", "slow stores")
SHARED = 227 << 10  # bytes of shared memory a program may have
LATE, SOON = (0.0, 300.0), 3.0  # how long the slow unit takes, one or the other; and the longest of the others
PACES = (0.1, 1.0, 10.0)  # of partitions, so that one may get ahead of another


def timings(cases: Sequence, hard: Sequence) -> list[tuple]:
    """(case, mode): those cases that hand buffers over in ways of their own in each timing; masks, scores and sizes, which change none, in one, by turns."""
    return [(case, mode) for n, case in enumerate(cases) for mode in (MODES if case in hard else MODES[n % len(MODES) :][:1])]


class Fault(Exception):
    """What a GPU would punish with a hang or a wrong result."""


class Deadlock(Fault):
    """Every partition waits, and nothing is under way."""


class Stopped(Exception):
    """Ends the partitions that are left when one has failed."""


# ---- values


def raw(x) -> torch.Tensor:
    """A value, or a Python number, as a torch tensor."""
    if isinstance(x, (Tensor, Product)):
        return x.values
    if isinstance(x, int):
        return _integer(x)
    if isinstance(x, float):
        return _real(x.hex())
    raise TypeError(f"a {type(x).__name__} is no value")


@lru_cache(1024, typed=True)
def _integer(x: int) -> torch.Tensor:
    """Or bool; most are asked for again and again."""
    if isinstance(x, bool):
        return torch.tensor(x)
    return torch.tensor(x, dtype=torch.int32 if -(1 << 31) <= x < 1 << 31 else torch.int64)


@lru_cache(1024)
def _real(x: str) -> torch.Tensor:
    """By its digits, since 0.0 and -0.0 are equal."""
    return torch.tensor(float.fromhex(x), dtype=torch.float32)


def lift(function: Callable) -> Callable:
    """A function of torch tensors as one of values."""
    return lambda *args: Tensor(function(*map(raw, args)))


class Tensor:
    """A tile or a scalar, which nothing changes in place; its layout matters only to instructions that see several registers of a thread, `threads`."""

    type = SimpleNamespace(layout=None)

    def __init__(self, values: torch.Tensor, threads: "Linear | None" = None):
        self.values, self.threads = values, threads

    dtype = property(lambda self: self.values.dtype)
    shape = property(lambda self: list(self.values.shape))

    def to(self, dtype, bitcast=False):
        return Tensor(self.values.view(dtype) if bitcast else self.values.to(dtype))

    def reshape(self, shape):
        return Tensor(self.values.reshape(shape))

    def permute(self, order):
        return Tensor(self.values.permute(order))

    def expand_dims(self, dim):
        return Tensor(self.values.unsqueeze(dim))

    def __getitem__(self, index):
        return Tensor(self.values[index])

    def __bool__(self):
        return bool(self.values)

    def __index__(self):
        return int(self.values)

    def __neg__(self):
        return Tensor(-self.values)

    def __invert__(self):
        return Tensor(~self.values)


ZERO, NOTHING = Tensor(torch.tensor(0, dtype=torch.int32)), Tensor(torch.tensor(0.0))


def _quotient(x, y):
    return torch.div(x, y, rounding_mode="trunc")  # as in C


BINARY = {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "lshift", "rshift")}
BINARY |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "floordiv": _quotient, "mod": torch.fmod}
for _name, _function in BINARY.items():
    setattr(Tensor, f"__{_name}__", lift(_function))
    setattr(Tensor, f"__r{_name}__", lift(lambda x, y, f=_function: f(y, x)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tensor, f"__{_name}__", lift(getattr(operator, _name)))


def _largest(x: Tensor, axis: int) -> Tensor:
    values = raw(x)
    if values.is_floating_point():  # a maximum on a GPU passes over NaN
        values = torch.where(values.isnan(), -torch.inf, values)
    return Tensor(values.amax(axis))


def _reduce(given: tuple, axis: int, combine: Callable) -> tuple:
    """Several tensors together, one number of each after the other."""
    return functools.reduce(lambda so_far, next: combine(*so_far, *next), zip(*(map(Tensor, raw(x).unbind(axis)) for x in given), strict=True))


def _where(condition, x, y):
    if isinstance(x, Pointer):
        return Pointer(x.memory, x.written, torch.where(raw(condition), x.places, y.places))
    return Tensor(torch.where(raw(condition), raw(x), raw(y)))


class Pointer:
    """Places in the memory of a tensor, in elements from where it begins."""

    type = SimpleNamespace(layout=None)

    def __init__(self, memory: torch.Tensor, written: torch.Tensor, places=0):
        self.memory, self.written, self.places = memory, written, places

    dtype = property(lambda self: SimpleNamespace(element_ty=self.memory.dtype))
    shape = property(lambda self: list(self.places.shape))

    def __add__(self, offset):
        return Pointer(self.memory, self.written, self.places + raw(offset).long())

    def to(self, _dtype):
        return self

    def __sub__(self, offset):
        return Pointer(self.memory, self.written, self.places - raw(offset).long())

    def chosen(self, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """The places that a mask leaves, and where they are among all."""
        places = torch.as_tensor(self.places)
        mask = torch.tensor(True) if mask is None else raw(mask)
        places, mask = torch.broadcast_tensors(places, mask)
        chosen = places[mask]
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self.memory):
            raise Fault(f"places {int(chosen.min())} to {int(chosen.max())} of a memory of {len(self.memory)} elements")
        return chosen, mask


def load(pointer: Pointer, mask=None, other=0, **_hints) -> Tensor:
    chosen, mask = pointer.chosen(mask)
    values = torch.full(mask.shape, other, dtype=pointer.memory.dtype)
    values[mask] = pointer.memory[chosen]
    return Tensor(values)


def store(pointer: Pointer, value, mask=None) -> None:
    chosen, mask = pointer.chosen(mask)
    _once(pointer.written[chosen])
    pointer.memory[chosen] = raw(value).to(pointer.memory.dtype).broadcast_to(mask.shape)[mask]
    pointer.written[chosen] = True


def count(pointer: Pointer, added=1, **_order) -> Tensor:
    """An atomic addition: what stood there before."""
    (place,), _ = pointer.chosen(None)
    pointer.memory[place] += added
    return Tensor(pointer.memory[place] - added)


def _maxima(words: torch.Tensor, below: torch.Tensor) -> Tensor:
    """What threads of `hopper.largest` find, each in its columns of the first eight; other columns are NaN. As whole numbers floats below 0 are in reverse."""
    each = words.view(64, -1, 8)
    most, least = each.amax(1), each.masked_fill(each >= 0, -1).amin(1)  # of the latter, without a sign, the least
    found = torch.full(words.shape, torch.nan).view(torch.int32)
    found[:, :8] = torch.where((below != 0) & (most < 0), least, most)
    return Tensor(found)


def _once(written: torch.Tensor) -> None:
    """Work that is done twice gives the same result; this is where it shows."""
    if written.any():
        raise Fault(f"{int(written.sum())} elements of a result are written twice")


# ---- time


class Partition(threading.Thread):
    """Some warps of a program, at work or waiting until `ready()`."""

    def __init__(self, clock: "Clock", name: str, threads: int, work: Callable[[], None]):
        super().__init__(name=name, daemon=True)
        self.clock, self.threads, self.work, self.pace = clock, threads, work, clock.random.choice(PACES)
        self.go, self.ready, self.waits_for = threading.Lock(), lambda: True, "its start"
        self.done, self.stopped = False, False
        self.products, self.stores, self.unfenced = [], [], set()  # issued and not waited for, oldest first; addresses written and not fenced
        self.copies, self.copied = [[]], 0.0  # by its threads: groups of them, oldest first, the last not committed; and when the last of them lands
        self.unseen, self.fenced = {}, 0  # addresses where what threads copied or handed over came to lie since this partition's last fence: when; and its time
        self.go.acquire()

    def run(self):
        error = None
        try:
            self.park()
            self.work()
            if self.products or self.stores:
                raise Fault(f"{self.name} ends with {len(self.products)} products and {len(self.stores)} stores that it did not wait for")
        except Stopped:
            pass
        except Exception as what:
            error = what
        self.done = True
        if not self.stopped:
            self.clock.leave(error)

    def park(self):
        """Until the clock says go."""
        self.go.acquire()
        if self.stopped:
            raise Stopped


class Clock:
    """What happens when, in one program: partitions that can go on do, then the next event comes. Who waits looks for the next one itself, so that one
    that is next again, the most frequent case, costs no change of threads."""

    def __init__(self, seed: str):
        self.random, self.now, self.running, self.error = random.Random(seed), 0.0, None, None
        self.events, self.order, self.partitions, self.over = [], itertools.count(1), [], threading.Lock()
        self.over.acquire()

    def start(self, name: str, threads: int, work: Callable[[], None]) -> Partition:
        partition = Partition(self, name, threads, work)
        self.partitions.append(partition)
        partition.start()
        return partition

    def run(self) -> None:
        """Until every partition is done. Raises what one of them raises."""
        try:
            self.leave()
            self.over.acquire()
            if self.error:
                raise self.error
        finally:
            for partition in self.partitions:
                partition.stopped = True
                if not partition.done:
                    partition.go.release()
                partition.join()
        if self.events:
            raise Fault("the program ends while copies are under way")

    def next(self) -> Partition | None:
        """Who runs now; none when all are done."""
        live = [p for p in self.partitions if not p.done]
        while live:
            if able := [p for p in live if p.ready()]:
                self.running = self.random.choice(able)
                return self.running
            if not self.events:
                raise Deadlock("; ".join(f"{p.name} waits for {p.waits_for}" for p in live))
            self.now, _, action = heapq.heappop(self.events)
            action()
        return None

    def leave(self, error: Exception | None = None, here: Partition | None = None) -> bool:
        """Let the next partition run, or end the program. Whether `here` is next."""
        following = None
        try:
            following = None if error else self.next()
        except Exception as what:
            error = what
        if following is None:
            self.error = error
            self.over.release()
        elif following is not here:
            following.go.release()
        return following is not None and following is here

    def hand_over(self, span: "Span") -> None:
        """The asynchronous units see what threads wrote there past a fence, of who issues them or of who tells him."""
        now = next(self.order)
        for partition in self.partitions:
            partition.unseen[span] = now

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self.order), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """The running partition waits."""
        here = self.running
        here.ready, here.waits_for = ready, what
        if not self.leave(here=here):
            here.park()

    def sleep(self, delay: float) -> None:
        end, here = self.now + delay, self.running
        if not (self.events and self.events[0][0] <= end) and not any(p.ready() for p in self.partitions if p is not here and not p.done):
            self.now = end  # nothing comes between, and nobody else can go on
            self.random.choice((here,))
            return
        self.after(delay, lambda: None)
        self.until(lambda: self.now >= end, "an instruction")


# ---- shared memory and barriers


class Span(NamedTuple):
    """Addresses from `start` to before `end`, of rows `pitch` bytes apart the first `width` bytes."""

    start: int
    end: int
    pitch: int
    width: int

    def meets(self, other: "Span") -> bool:
        """Whether the two have a byte in common; columns side by side, as pieces of one tile are, have none."""
        if other.end <= self.start or self.end <= other.start:
            return False
        between = (other.start - self.start) % self.pitch
        return self.pitch != other.pitch or between < self.width or between + other.width > self.pitch


class Shared:
    """A part of shared memory."""

    def __init__(self, emulator: "Emulator", values: torch.Tensor):
        self.emulator, self.values = emulator, values

    dtype = property(lambda self: self.values.dtype)
    shape = property(lambda self: list(self.values.shape))

    def index(self, i):
        i = operator.index(i)
        if not 0 <= i < len(self.values):
            raise Fault(f"buffer {i} of {len(self.values)}")
        return Shared(self.emulator, self.values[i])

    def reshape(self, shape):
        return Shared(self.emulator, self.values.view(shape))

    def permute(self, order):
        return Shared(self.emulator, self.values.permute(order))

    def slice(self, start, length: int, dim: int = 0):
        return Shared(self.emulator, self.values.narrow(dim, operator.index(start), length))

    def _reinterpret(self, dtype, shape, layout):
        size = math.prod(shape) * dtype.itemsize // self.values.element_size()
        return Shared(self.emulator, self.values.view(-1)[:size].view(dtype).view(shape))

    def store(self, value: Tensor):
        self.values.copy_(raw(value))
        self.emulator.clock.running.unfenced.add(self.span)

    def load(self, layout=None):
        return Tensor(self.values.clone(), layout if isinstance(layout, Linear) else None)

    @property
    def span(self) -> "Span":
        """Addresses from the first byte to behind the last."""
        size, start = self.values.element_size(), self.values.data_ptr()
        steps = sorted((stride, n - 1) for n, stride in zip(self.values.shape, self.values.stride(), strict=True) if n > 1)
        *columns, (pitch, rows) = steps or [(1, 0)]
        width = 1 + sum(stride * n for stride, n in columns)
        return Span(start, start + (pitch * rows + width) * size, pitch * size, width * size)

    def check_fenced(self):
        """The asynchronous units see what threads have written only past a fence, by the threads that wrote."""
        span = self.span
        for partition in self.emulator.clock.partitions:
            if any(map(span.meets, partition.unfenced)):
                raise Fault("a product or a TMA store reads what was written before fence_async_shared()")
        if any(map(span.meets, self.emulator.clock.running.unseen)):
            raise Fault("a product or a TMA store reads what threads copied or handed over, without fence_async_shared() since")

    def check_major(self, dim: int):
        """Of bytes, wgmma takes operands whose summed dimension is contiguous."""
        if self.dtype.itemsize == 1 and self.values.stride(dim) != 1:
            raise Fault("a product sums bytes over a dimension that is not contiguous")


class Barrier:
    """An mbarrier: a phase is complete when all have arrived and all bytes they announced are there."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phases = 0

    def arrive(self, count: int, announced: int = 0):
        if count > self.pending:
            raise Fault(f"{count} arrivals at a barrier that expects {self.pending} more of {self.count}")
        self.pending -= count
        self.add(announced)

    def add(self, announced: int):
        self.bytes += announced
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Barriers:
    """An array of mbarriers."""

    def __init__(self, n: int):
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i) -> Barrier:
        return self.barriers[operator.index(i)]


class NamedBarrier:
    """One of the 16 hardware barriers of a program."""

    def __init__(self):
        self.turns, self.expected, self.arrived, self.fenced = 0, 0, [], 0

    def arrive(self, partition: Partition, threads: int):
        if partition in self.arrived:
            raise Fault(f"{partition.name} arrives twice at a named barrier")
        if self.arrived and threads != self.expected:
            raise Fault(f"{partition.name} arrives at a named barrier of {threads} threads, where others await {self.expected}")
        self.expected, self.fenced = threads, max(self.fenced, partition.fenced)
        self.arrived.append(partition)
        here = sum(p.threads for p in self.arrived)
        if here > threads:
            raise Fault(f"{here} threads at a named barrier of {threads}")
        if here == threads:
            self.turns, self.arrived = self.turns + 1, []


class Descriptor:
    """TensorDescriptor: tiles of a tensor in global memory, as TMA sees them."""

    def __init__(self, base: torch.Tensor, shape, strides, block_shape, layout):
        size = base.element_size()
        if base.data_ptr() % 16 or any(stride * size % 16 for stride in strides[:-1]) or strides[-1] != 1:
            raise Fault(f"TMA takes no tensor of strides {list(strides)} at {base.data_ptr():x}")
        if max(block_shape) > 256:
            raise Fault(f"TMA takes no tile of {block_shape}")
        self.base, self.layout, self.dtype = base, layout, base.dtype
        self.block_type = SimpleNamespace(shape=list(block_shape), nbytes=size * math.prod(block_shape))

    def cut(self, at) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tile at `at` that lies in the tensor: where in the tile, and where in the tensor."""
        if operator.index(at[-1]) * self.base.element_size() % 16:
            raise Fault(f"TMA takes no tile from column {operator.index(at[-1])} of {self.dtype}")
        inner, outer = [], []
        for start, size, length in zip(map(operator.index, at), self.block_type.shape, self.base.shape, strict=True):
            first = max(start, 0)
            last = max(first, min(start + size, length))
            inner.append(slice(first - start, last - start))
            outer.append(slice(first, last))
        return tuple(inner), tuple(outer)


class Product:
    """An asynchronous product on its way."""

    def __init__(self, a, compute: Callable[[], torch.Tensor]):
        self.a, self.compute, self.result = a, compute, None

    def finish(self):
        if self.result is None:
            self.result = Tensor(self.compute())

    @property
    def values(self):
        raise Fault("a product is used before it was waited for")

    shape = values


# ---- the device


@lru_cache(1024)
def _named_barrier(code: str) -> tuple[str, ...] | None:
    """How it is met, its number and how many threads meet there, the latter two as they stand in the code."""
    found = re.match(r"bar\.(sync|arrive) (\S+), (\S+);", code)
    return found and found.groups()


class Layout:
    """Any layout: kernels ask one for its parent and for the shape of its instructions, no more."""

    def __init__(self, *args, parent=None, instr_shape=None, **kwargs):
        self.parent, self.instr_shape = parent, instr_shape

    get_default_for = classmethod(lambda cls, *args: cls())


class Linear(Layout):
    """DistributedLinearLayout: where the bits of a register's, a lane's and a warp's number lead."""

    def __init__(self, reg_bases, lane_bases, warp_bases, block_bases, shape):
        super().__init__()
        self.shape = list(shape)
        registers, lanes, warps = (self.reach(bases) for bases in (reg_bases, lane_bases, warp_bases))
        self.places = (warps[:, None, None] ^ lanes[:, None] ^ registers).flatten(0, 1)  # [threads, registers], into the flat tensor

    def reach(self, bases) -> torch.Tensor:
        """Places of 0, 1, ...: a number's are those of its bits together."""
        places = torch.zeros(1, dtype=torch.int64)
        for at in bases:
            places = torch.cat([places, places ^ sum(x * math.prod(self.shape[dim + 1 :]) for dim, x in enumerate(at))])
        return places


class BarrierLayout(Layout):
    """Marks the shared memory that holds mbarriers."""


class Kernel:
    """A device function: called by others, or started on a grid."""

    def __init__(self, emulator: "Emulator", function: Callable):
        self.emulator, self.function, self.__name__ = emulator, function, function.__name__

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.emulator.start(self.function, grid, args, kwargs)


class Emulator:
    """One GPU, of which `mode` names the slow unit."""

    def __init__(self, mode: str, seed: int = 0):
        self.mode, self.seed = mode, seed
        self.programs, self.program, self.clock, self.named, self.shared, self.written = 1, 0, None, {}, 0, {}

    # host

    def load(self, *names: str, edits: Sequence[tuple[str, str]] = ()) -> ModuleType:
        """The last of some modules, their sources executed in order on this GPU; (old, new) are put into whichever holds `old`."""
        texts = {name: Path(importlib.util.find_spec(name).origin).read_text() for name in names}
        for old, new in edits:
            found = [name for name, text in texts.items() if old in text]
            if len(found) != 1 or texts[found[0]].count(old) != 1:
                raise LookupError(f"{old!r} is to stand once in {', '.join(names)}; it stands in {found or 'none'}")
            texts[found[0]] = texts[found[0]].replace(old, new)
        loaded = self.stand_ins()
        for name, text in texts.items():
            module = loaded[name] = ModuleType(name)
            module.__builtins__ = vars(builtins) | {"__import__": lambda *args: _import(loaded, *args)}
            exec(_compiled(text, importlib.util.find_spec(name).origin), vars(module))
        return module

    def start(self, function: Callable, grid: tuple, args: tuple, kwargs: dict) -> None:
        """A launch: the programs one after the other."""
        warps, *_ = (kwargs.pop(name, 4) for name in ("num_warps", "maxnreg", "launch_pdl"))
        (self.programs,), self.written = grid, {}
        args = [self.argument(x) for x in args]
        for program in range(self.programs):
            self.program, self.clock, self.named, self.shared = program, Clock(f"{self.mode} {self.seed} {program}"), {}, 0
            self.clock.start("the program", 32 * warps, partial(function, *args, **kwargs))
            self.clock.run()

    def argument(self, x):
        """What the device sees of an argument that is no constant."""
        if isinstance(x, tuple):
            return tuple(map(self.argument, x))
        if isinstance(x, torch.Tensor):
            count = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            memory = x.as_strided((count,), (1,))
            return Pointer(memory, self.marks(memory))
        return Tensor(raw(x)) if isinstance(x, (int, float)) else x

    def marks(self, x: torch.Tensor) -> torch.Tensor:
        """Which elements this launch has written."""
        storage = x.untyped_storage()
        key = storage.data_ptr(), x.element_size()  # a page of codes is seen in words and in numbers
        if key not in self.written:
            self.written[key] = torch.zeros(storage.nbytes() // x.element_size(), dtype=torch.bool)
        return self.written[key].as_strided(x.shape, x.stride(), x.storage_offset())

    # time

    def pause(self) -> None:
        here = self.clock.running
        self.clock.sleep(here.pace * self.clock.random.random())

    def delay(self, slow: str) -> float:
        """Of a copy that `slow` mode makes late."""
        return self.clock.random.choice(LATE) if self.mode == slow else SOON * self.clock.random.random()

    # mbarriers

    def init(self, barrier: Barrier, count: int):
        barrier.count = barrier.pending = count

    def arrive(self, barrier: Barrier, count: int = 1):
        """What its threads have written and not fenced, whoever waits for the barrier may fence."""
        self.pause()
        here = self.clock.running
        for span in here.unfenced:
            self.clock.hand_over(span)
        here.unfenced.clear()
        barrier.arrive(count)

    def expect(self, barrier: Barrier, nbytes: int):
        barrier.arrive(1, nbytes)

    def wait(self, barrier: Barrier, phase):
        self.pause()
        parity = operator.index(phase)
        state = f"after {barrier.phases} phases, {barrier.pending} of {barrier.count} to come"
        self.clock.until(lambda: barrier.passed(parity), f"phase {parity} of an mbarrier {state}")

    # copies

    def tma_load(self, descriptor: Descriptor, at, barrier: Barrier, buffer: Shared):
        inner, outer = descriptor.cut(at)
        buffer.values.fill_(torch.nan)

        def land():
            buffer.values.zero_()
            buffer.values[inner] = descriptor.base[outer]
            barrier.add(-descriptor.block_type.nbytes)

        self.clock.after(self.delay("slow loads"), land)

    def copy(self, buffer: Shared, pointer: Pointer, mask=None):
        """cp.async: a copy by threads, which wait for groups of them or arrive when they have landed. Products see it past a fence of who issues them."""
        chosen, mask = pointer.chosen(mask)
        delay, here, landed = self.delay("slow loads"), self.clock.running, threading.Event()
        here.copies[-1].append(landed)
        here.copied = max(here.copied, self.clock.now + delay)
        buffer.values.fill_(torch.nan)

        def land():
            values = torch.zeros(mask.shape, dtype=pointer.memory.dtype)
            values[mask] = pointer.memory[chosen]
            buffer.values.copy_(values.view(buffer.values.shape))
            self.clock.hand_over(buffer.span)
            landed.set()

        self.clock.after(delay, land)

    def commit_copies(self):
        self.clock.running.copies.append([])

    def wait_for_copies(self, num_outstanding=0):
        self.pause()
        groups = self.clock.running.copies
        while len(groups) - 1 > num_outstanding:
            group = groups.pop(0)
            self.clock.until(lambda group=group: all(landed.is_set() for landed in group), "a group of copies")

    def arrive_when_copied(self, barrier: Barrier, increment_count=True):
        """Each thread arrives when all its copies so far have landed."""
        here = self.clock.running
        self.clock.at(max(here.copied, self.clock.now), partial(barrier.arrive, here.threads))

    def tma_store(self, descriptor: Descriptor, at, buffer: Shared):
        written = self.marks(descriptor.base)

        def put(outer, values):
            _once(written[outer])
            descriptor.base[outer] = values
            written[outer] = True

        self.leave(descriptor, at, buffer, put)

    def tma_add(self, descriptor: Descriptor, at, buffer: Shared):
        def put(outer, values):
            descriptor.base[outer] += values

        self.leave(descriptor, at, buffer, put)

    def leave(self, descriptor: Descriptor, at, buffer: Shared, put: Callable):
        """A buffer's way to global memory, where `put` lets it land."""
        buffer.check_fenced()
        inner, outer = descriptor.cut(at)
        landed = threading.Event()
        self.clock.running.stores.append(landed)

        def land():
            put(outer, buffer.values[inner])
            landed.set()

        self.clock.after(self.delay("slow stores"), land)

    def store_wait(self, pendings: int):
        self.pause()
        stores = self.clock.running.stores
        while len(stores) > pendings:
            self.clock.until(stores.pop(0).is_set, "a store")

    def fence(self, cluster=False):
        here = self.clock.running
        here.unfenced.clear()
        here.unseen.clear()
        here.fenced = next(self.clock.order)

    # products

    def multiply(self, a, b: Shared, acc: Tensor, use_acc=True, is_async=False):
        self.pause()
        if a.dtype != b.dtype and not a.dtype.itemsize == b.dtype.itemsize == 1:  # of bytes each operand may be e4m3 or e5m2
            raise Fault(f"a product of {a.dtype} and {b.dtype}")
        start = acc if use_acc else NOTHING
        for operand, dim in ((a, 1), (b, 0)):
            if isinstance(operand, Shared):
                operand.check_fenced()
                operand.check_major(dim)
        product = Product(a, lambda: raw(start.result if isinstance(start, Product) else start) + a.values.float() @ b.values.float())  # one after the other
        if self.mode == "slow loads":
            product.finish()
        self.clock.running.products.append(product)
        return product if is_async else self.wait_for_products(0, [product, a])[0]

    def wait_for_products(self, num_outstanding=0, deps=()):
        self.pause()
        products = self.clock.running.products
        while len(products) > num_outstanding:
            if self.mode == "slow products":  # who frees an operand too early has time to see it overwritten
                self.clock.sleep(self.clock.random.choice(LATE))
            product = products.pop(0)
            product.finish()
            wide = isinstance(product.a, Tensor) and product.a.dtype.itemsize > 1  # Triton 3.6 takes no bytes through a wait
            if wide and not any(x is product.a for x in deps):
                raise Fault("registers that a product reads do not go through the wait for it, so they may be used again before")
        if any(x is product for x in deps for product in products):
            raise Fault("a product is used that this wait is not for")
        deps = [x.result if isinstance(x, Product) else x for x in deps]
        return deps[0] if len(deps) == 1 else tuple(deps)

    # inline assembly

    def assembly(self, code: str, constraints: str, args: list, dtype=None, is_pure=True, pack=1):
        """What the kernels say in PTX: an arrival at a named barrier, or a product of rows."""
        if found := _named_barrier(code):
            return self.meet(found[0], *(operator.index(args[int(x[1:]) // pack - 1]) if x[0] == "$" else int(x) for x in found[1:]))
        inputs = {f"${pack * (n + 1)}": x for n, x in enumerate(args)}  # $0 and on are the results, `pack` of them
        if found := re.search(r"shr\.u32 t, t, 31; add\.u32 t, t, (\S+); bar\.arrive t, (\S+);", code):
            if (raw(args[0]) < 0).any():  # its sign is part of the barrier's number, so that it is there before
                raise Fault("a negative value leads to another barrier")
            return self.meet("arrive", *(operator.index(inputs[x]) for x in found.groups()))
        if re.search(r"mul\.f32 \$0, \$0, \$\d+; mul\.f32 \$1, ", code):
            return args[0] * args[1]
        if "max.s32 m0, m0, " in code:
            return _maxima(*map(raw, args))
        if "setp.lt.f32 p, t, 0f00000000; vote.sync.any.pred p, p," in code:
            warps = (raw(args[0]) < 0).view(4, 16)
            return Tensor(warps.any(1, keepdim=True).expand(4, 16).reshape(64).to(torch.int32))
        if "mul.rn.sat.f32 v, " in code:  # near 0 a polynomial for tanh
            s, *k, rest = map(raw, args)
            return Tensor(((k[0] + k[1] * (s * s).nan_to_num(0.0).clamp(0, 1)) * s + rest).exp2())
        if code == "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;":
            return args[0].to(torch.float32)
        if "atom.relaxed.gpu.global.add.u32 t, [$1], 1;" in code:
            return count(*args)
        if code.startswith(("griddepcontrol.", "prefetch.global.", "bar.warp.sync ")):
            return ZERO
        if "red.relaxed.gpu.global.add.v" in code:  # every other column to the thread that has the next row, or the one before
            numbers, places = raw(args[0]), args[1].places
            row, column = (torch.arange(size).view(shape) % 8 for size, shape in zip(numbers.shape, ((-1, 1), (1, -1)), strict=True))
            odd, q = row % 2 > 0, column // 2
            before = torch.where(places % 4 > 0, places - 1, places - 253)  # of the eight before
            own = torch.where(odd & (q == 0), before, places)
            other = torch.where(odd, places - 16, places + 16 + torch.where(q < 3, 4, -12))
            places = torch.where(column % 2 == 0, own, other)
            args[1].memory.index_add_(0, places.flatten(), numbers.flatten())
            return ZERO
        if code == "redux.sync.or.b32 $0, $1, 0xffffffff;":
            return args[0]
        if code == "mov.b32 $0, $1;":
            return args[0]
        if code == "mul.wide.u32 $0, $1, $2;":
            return Tensor((raw(args[0]).long() & 0xFFFFFFFF) * (raw(args[1]).long() & 0xFFFFFFFF))
        if code == "shfl.sync.bfly.b32 $0, $1, 4, 31, -1;":  # of an accumulator's rows, [warps, 8, ..], the one beside it
            return Tensor(raw(args[0]).unflatten(1, (4, 2)).flip(2).flatten(1, 2))
        if code == "shf.l.wrap.b32 $0, $1, $1, $2;":
            word, turns = raw(args[0]).long() & 0xFFFFFFFF, raw(args[1])
            return Tensor((word << turns | word >> (32 - turns)).to(torch.int32))
        if code == "lg2.approx.ftz.f32 $0, $1;":
            return Tensor(torch.as_tensor(raw(args[0]), dtype=torch.float32).log2())
        if code == "cvt.u32.u16 $0, $1;":
            return Tensor(raw(args[0]).to(torch.int32) & 0xFFFF)
        if "st.relaxed.gpu.global.b64 [$1], w;" in code:  # two numbers in a word that others wait for
            self.pause()
            word, *numbers = args
            numbers = torch.broadcast_tensors(*(torch.as_tensor(raw(x), dtype=torch.float32) for x in numbers), torch.as_tensor(word.places))[:2]
            return store(word, Tensor(torch.stack(numbers, -1).view(torch.int64)[..., 0])) or ZERO
        if "ld.relaxed.gpu.global.b64 w0" in code:
            self.clock.until(lambda: bool((raw(load(args[0])) != 0).all()), "words of others")
            return tuple(map(Tensor, raw(load(args[0]))[..., None].view(torch.float32).unbind(-1)))
        if "fma.rn.f32 t, t, 0fBFB8AA3B, 0fBFB8AA3B; rcp.approx.ftz.f32" in code:
            return Tensor(raw(args[0]) / ((raw(args[0]).exp2() + 1) * -math.log2(math.e)))
        if "movmatrix.sync.aligned.m8n8.trans.b16" in code:
            warps, rows, columns = args[0].shape
            x = raw(args[0]).view(warps, rows // 8, 8, columns // 8, 8).transpose(2, 4).reshape(warps, rows, columns)
            return Tensor(x) if len(args) == 1 else (Tensor(torch.where(raw(args[1]) < 0, x, 0)), Tensor(torch.where(raw(args[1]) < 0, 0, x)))
        if "cvt.rn.f16x2.e4m3x2 x, a;" in code:  # four codes of a word, times a scale
            numbers = raw(args[0])[..., None].view(torch.float8_e4m3fn).to(torch.float32) * raw(args[1])[..., None]
            return tuple(map(Tensor, numbers.to(torch.bfloat16).view(torch.int32).unbind(-1)))
        if "cvt.rn.f16x2.e4m3x2" in code:
            halves = raw(args[0])[..., None].view(torch.float8_e4m3fn).to(torch.float16).view(torch.int32)
            return tuple(map(Tensor, halves.unbind(-1)))
        if found := re.fullmatch(r"prmt\.b32 \$0, \$2, 0, 0x(\d+); prmt\.b32 \$1, \$2, 0, 0x(\d+);", code):
            return tuple(_bytes(raw(args[0]), torch.zeros_like(raw(args[0])), order) for order in found.groups())
        if found := re.fullmatch(r"prmt\.b32 \$0, \$1, \$2, 0x(\d+);", code):
            return _bytes(raw(args[0]), raw(args[1]), found[1])
        if code.startswith("{ .reg .b32 y; shr.u32 y, $4, 8;"):
            return tuple(Tensor((raw(args[0]) >> shift) & int(mask, 16)) for mask, shift in zip(re.findall(r"0x(\w+);", code), (0, 8, 0, 8), strict=True))
        if code.startswith("and.b32 $2, $4, 0x00FF00FF; prmt.b32 $3, $4, 0, 0x4341;"):
            return tuple(Tensor((raw(args[0]) >> shift) & mask) for mask in (0xF000F, 0xFF00FF) for shift in (0, 8))
        if code.startswith("prmt.b32 $0"):
            return _shuffled(args[0], code)
        if found := re.search(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32 a, \$2, \$1; cvt\.rn\.satfinite\.\1x2\.f32 b, \$4, \$3; mov\.b32 \$0, {a, b};", code):
            kind, most = {"e4m3": (torch.float8_e4m3fn, 448), "e5m2": (torch.float8_e5m2, 57344)}[found[1]]
            values = torch.stack([raw(x) for x in args], -1).clamp(-most, most)
            return Tensor(values.to(kind).view(torch.int32)[..., 0])
        if found := re.fullmatch(r"cvt\.rn(\.relu)?\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", code):
            halves = torch.stack([raw(x).relu() if found[1] else raw(x) for x in args], -1).to({"bf16": torch.bfloat16, "f16": torch.float16}[found[2]])
            return Tensor(halves.view(torch.int32)[..., 0])
        raise NotImplementedError(f"no emulation of {code!r}")

    def meet(self, how: str, number: int, threads: int) -> Tensor:
        self.pause()
        if not 0 <= number < 16 or threads % 32:
            raise Fault(f"named barrier {number} of {threads} threads")
        barrier = self.named.setdefault(number, NamedBarrier())
        turn = barrier.turns
        barrier.arrive(self.clock.running, threads)
        if how == "sync":
            self.clock.until(lambda: barrier.turns > turn, f"named barrier {number}")
            here = self.clock.running
            here.unseen = {span: when for span, when in here.unseen.items() if when > barrier.fenced}
        return ZERO

    # programs

    def specialise(self, functions: list, warps: list[int], registers: list[int]):
        """Partitions: the first has the program's own warps."""
        main = self.clock.running
        threads = [main.threads, *(32 * n for n in warps)]
        parts = []
        for n, ((function, args), count) in enumerate(zip(functions, threads, strict=True)):
            parts.append(self.clock.start(f"partition {n} ({function.__name__})", count, partial(function, *args)))
        self.clock.until(lambda: all(part.done for part in parts), "its partitions")

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Layout):
        self.shared += math.prod(shape) * dtype.itemsize
        if self.shared > SHARED:
            raise Fault(f"{self.shared} bytes of shared memory, of at most {SHARED}")
        if isinstance(layout, BarrierLayout):
            return Barriers(shape[0])
        return Shared(self, torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))

    # the modules

    def stand_ins(self) -> dict[str, object]:
        """What a kernel's source imports and gets from here."""
        language = self.language()
        mbarrier = SimpleNamespace(init=self.init, arrive=self.arrive, expect=self.expect, wait=self.wait, MBarrierLayout=BarrierLayout)
        copies = {"async_copy_global_to_shared": self.tma_load, "async_copy_shared_to_global": self.tma_store, "async_atomic_add": self.tma_add}
        tma = SimpleNamespace(store_wait=self.store_wait, **copies)
        products = {"warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_for_products}
        hopper = SimpleNamespace(fence_async_shared=self.fence, mbarrier=mbarrier, tma=tma, **products)
        copies = {"async_copy_global_to_shared": self.copy, "commit_group": self.commit_copies, "wait_group": self.wait_for_copies}
        copies["mbarrier_arrive"] = self.arrive_when_copied
        gluon = SimpleNamespace(jit=self.jit, language=language, constexpr_function=lambda f: f)
        sizes = {"cdiv": lambda a, b: -(-a // b), "next_power_of_2": lambda n: 1 << (n - 1).bit_length()}
        triton = SimpleNamespace(
            jit=self.jit, language=language, constexpr_function=lambda f: f, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)), **sizes
        )
        return {
            "triton": triton,
            "triton.language": language,
            "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language": language,
            "triton.experimental.gluon.language._core": SimpleNamespace(builtin=lambda function: function),
            "triton._C.libtriton": SimpleNamespace(ir=None),
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
            "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
            "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(
                async_copy=SimpleNamespace(**copies), mma_v2=lift(lambda a, b, acc: acc + a.float() @ b.float())
            ),
        }

    def jit(self, function: Callable | None = None, **options):
        return Kernel(self, function) if function else lambda function: Kernel(self, function)

    def language(self) -> SimpleNamespace:
        """Gluon's language, and Triton's as far as they agree."""
        dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int8", "int16", "int32", "int64", "uint8")}
        layouts = ("SwizzledSharedLayout", "SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout")
        return SimpleNamespace(
            **dtypes,
            **dict.fromkeys(layouts, Layout),
            float8e4nv=torch.float8_e4m3fn,
            float8e5=torch.float8_e5m2,
            shared_memory_descriptor=Shared,
            DistributedLinearLayout=Linear,
            join=lambda x, y: Tensor(torch.stack([raw(x), raw(y)], -1)),
            split=lambda x: tuple(map(Tensor, raw(x).unbind(-1))),
            int1=torch.bool,
            constexpr=lambda value: value,
            static_assert=_static_assert,
            static_range=range,
            where=_where,
            minimum=lift(torch.fmin),
            maximum=lift(torch.fmax),
            abs=lift(torch.abs),
            div_rn=lift(torch.div),
            exp2=lift(torch.exp2),
            rsqrt=lift(torch.rsqrt),
            log2=lift(torch.log2),
            cdiv=lift(lambda x, y: _quotient(x + y - 1, y)),
            max=_largest,
            reduce=_reduce,
            sum=lambda x, axis: Tensor(raw(x).sum(axis, dtype=raw(x).dtype)),
            cumsum=(cumsum := lambda x, axis: Tensor(raw(x).cumsum(axis, dtype=raw(x).dtype))),
            associative_scan=lambda x, axis, _sum: cumsum(x, axis),
            cast=lambda x, dtype, bitcast=False: x.to(dtype, bitcast) if isinstance(x, Tensor) else Tensor(raw(x).to(dtype)),
            broadcast_to=lambda x, shape: Tensor(raw(x).broadcast_to(shape)),
            convert_layout=lambda x, layout: x,
            arange=lambda start, stop, layout=None: Tensor(torch.arange(start, stop, dtype=torch.int32)),
            full=lambda shape, value, dtype, layout=None: Tensor(raw(value).to(dtype).expand(shape)),
            zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(shape, dtype=dtype)),
            load=load,
            store=store,
            atomic_add=count,
            thread_barrier=lambda: None,
            to_tensor=lambda x: Tensor(raw(x)),
            program_id=lambda axis: Tensor(raw(self.program)),
            num_programs=lambda axis: Tensor(raw(self.programs)),
            allocate_shared_memory=self.allocate,
            inline_asm_elementwise=self.assembly,
            warp_specialize=self.specialise,
            extra=SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)),  # kernels come one after the other
        )


def _bytes(x: torch.Tensor, y: torch.Tensor, order: str) -> Tensor:
    """PRMT: of each two registers' eight bytes those that the digits of `order` name, the last digit the lowest byte."""
    both = torch.stack([x, y], -1).view(torch.uint8)
    return Tensor(both[..., [int(digit) for digit in reversed(order)]].contiguous().view(torch.int32)[..., 0])


def _shuffled(x: Tensor, code: str) -> Tensor:
    """Two byte permutations of two registers, each of two 16-bit elements that a thread holds."""
    places = x.threads.places
    registers = raw(x).flatten()[places].contiguous().view(torch.uint8).view(len(places), -1, 8)  # [threads, pairs of registers, bytes]
    order = [int(digit) for digits in re.findall(r"prmt\.b32 \$\d, \$2, \$3, 0x(\d+);", code) for digit in reversed(digits)]
    values = torch.empty(raw(x).numel(), dtype=raw(x).dtype)
    values[places] = registers[..., order].contiguous().view(len(places), -1).view(raw(x).dtype)
    return Tensor(values.view(raw(x).shape))


@lru_cache
def _compiled(text: str, origin: str):
    return compile(text, origin, "exec")


def _static_assert(condition, message=""):
    assert condition, message


def _import(loaded: dict[str, object], name: str, space=None, local=None, names=(), level=0):
    """`import`, which finds what is loaded or stood in for first."""
    if names and all(f"{name}.{part}" in loaded for part in names):
        return SimpleNamespace(**{part: loaded[f"{name}.{part}"] for part in names})
    if name in loaded:
        return loaded[name if names else name.partition(".")[0]]
    return builtins.__import__(name, space, local, names, level)
