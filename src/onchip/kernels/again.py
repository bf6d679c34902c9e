"""A launch that comes again: torch's operations and Triton's launches of the last one, with the tensors of this one.

To find what a call launches, how its memory is described and what of it Triton has compiled takes a host 60 to 100 us, in which a GPU attends 2,048
tokens to each other. All of that follows from the inputs' sizes, strides, types and alignment: the second call that has them all in common with an earlier
one is written down, as it runs, and those behind it go by what is written.

    inputs -> key -> known? -> allocate, launch, ... -> outputs

Nothing is written down that what is written could not repeat: reading a number from the device, a tensor that is neither an input nor made on the way,
a second stream. Then the call goes its whole way each time, as the first one does. What is kept while inputs stay the same (a mask's map) is `asked` for.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from onchip.kernels import compiling

MOST = 1 << 12  # calls that are known, of some KB each; those that never come again are let go with the others
HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # of operations that the host waits for
aten = torch.ops.aten
PLACES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)  # in the whole memory, of which a key says nothing
PLAIN = (int, float, bool, str, type(None))
SOONER = {aten.empty.memory_format: torch.empty, aten.zeros.default: torch.zeros, aten.empty_like.default: torch.empty_like}  # 1.8 us instead of 5.2
_here = threading.local()  # .recorder: of this thread


class Slot(NamedTuple):
    """Where a tensor stands among those of a call: the inputs, then what is made."""

    n: int


class Step(NamedTuple):
    """What happened, with slots for tensors. `gives`: "nothing", as a launch, which is always made, or "one" tensor or "several", of which those that were new
    have slots in `made`."""

    run: Callable
    args: list
    named: dict
    made: list[Slot | None]
    gives: str

    @property
    def writes(self) -> bool:
        """Whether it is made though nobody needs what it gives."""
        return self.gives == "nothing" or (isinstance(self.run, torch._ops.OpOverload) and self.run._schema.is_mutable)


class Again:
    """The steps of a call, each a function of its slots, and its result. What is made lives until the last step has run: a launch may begin before the one
    in front of it has ended, so nothing may lie where that still reads.

    slots    what those behind the inputs hold in the beginning: None, or what `lasting` was told of.
    stream   the only one on which these may be used, and by eager calls; None where there are none.
    """

    def __init__(self, slots: list[Tensor | None], steps: Sequence[Callable], result: Callable, stream: int | None):
        self.slots, self.steps, self.result, self.stream = slots, steps, result, stream

    def fits(self) -> bool:
        return self.stream is None or (self.stream == _stream() and not _capturing())

    def __call__(self, tensors: list[Tensor]):
        slots = tensors + self.slots
        for step in self.steps:
            step(slots)
        return self.result(slots)


_known: dict[tuple, Again | bool] = {}  # False: seen once; True: it has to go its whole way


def repeated(run: Callable) -> Callable:
    """`run(*inputs)`, which calls that come again do not go through; `inputs` are tensors, numbers and tuples of them."""

    def launch(*inputs):
        if compiling.PATCHING.locked() or torch._C._are_functorch_transforms_active():  # launches are withheld; tensors have no address
            return run(*inputs)
        tensors: list[Tensor] = []
        try:
            key = run, _key(inputs, tensors)
            found = _known.get(key)
        except (TypeError, RuntimeError):  # a tensor of another kind or without an address, a list, or what cannot be compared
            return run(*inputs)
        if found is None:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = False
        elif found is False:
            _known[key], result = _written_down(run, inputs, tensors)
            return result
        elif found is not True and found.fits():
            return found(tensors)
        return run(*inputs)

    return launch


def forget() -> None:
    """Drop all that was written down."""
    _known.clear()


def _key(inputs: tuple, tensors: list[Tensor]) -> tuple:
    key = _of(inputs, tensors)
    if tensors and torch.is_autocast_enabled(kind := tensors[0].device.type):  # whose casts are written down
        key = key, torch.get_autocast_dtype(kind)
    begins = [t.data_ptr() for t in tensors]
    if len({*begins}) < len(begins):  # the same memory twice, as in a latent cache
        return key, *map(begins.index, begins)
    return key


def _of(value, tensors: list[Tensor]):
    kind = value.__class__
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.is_conj() or value.is_neg():
            raise TypeError
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15, value.requires_grad
    if isinstance(value, tuple):
        return kind, *[part if part is None else _of(part, tensors) for part in value]
    if isinstance(value, (Tensor, list)) or (kind is float and value != value):  # all parameters of a model, say; what equals nothing
        raise TypeError
    return kind, value  # 2 and 2.0 are two calls


# ---- writing down


def refuse(why: str) -> None:
    """Said by what a launch goes through, where it does something that cannot be repeated: the call is not written down."""
    recorder = getattr(_here, "recorder", None)
    if recorder is not None:
        recorder.refused = recorder.refused or why


def lasting(t: Tensor) -> Tensor:
    """`t`, which lives on, and which each eager call of the current stream may use as this one does."""
    recorder = getattr(_here, "recorder", None)
    if recorder is not None:
        recorder.keep(t)
    return t


def asked(find: Callable, *tensors: Tensor | None) -> Tensor:
    """`find(*tensors)`, of which calls that come again ask too: it knows best whether what it found before still holds. Its sizes are the same each time."""
    recorder = getattr(_here, "recorder", None)
    return find(*tensors) if recorder is None else recorder.asked(find, tensors)


def _written_down(run: Callable, inputs: tuple, tensors: list[Tensor]) -> tuple[Again | bool, Any]:
    """What is known of the call from now on, and its result."""
    watched = torch._C._len_torch_dispatch_stack() > 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    if watched or not tensors or _capturing() or not compiling.PATCHING.acquire(blocking=False):
        return False, run(*inputs)  # another time
    try:
        recorder = Recorder(tensors)
        with _launches_told(recorder), recorder:
            result = run(*inputs)
    finally:
        compiling.PATCHING.release()
    return recorder.again(result) or True, result


@contextmanager
def _launches_told(recorder: "Recorder"):
    """Triton's launches of this thread are told to `recorder`."""
    from triton.runtime.jit import JITFunction  # here: there is none on some systems without a GPU

    run, _here.recorder = JITFunction.run, recorder

    def told(self, *args, grid, warmup, **options):
        made = run(self, *args, grid=grid, warmup=warmup, **options)
        if not warmup and getattr(_here, "recorder", None) is recorder:
            recorder.launched(self, made, grid, args, options)
        return made

    JITFunction.run = told
    try:
        yield
    finally:
        JITFunction.run, _here.recorder = run, None


class Unrepeatable(Exception):
    """What keeps a call from being written down."""


class Recorder(TorchDispatchMode):
    """Writes down what happens inside. `refused`: why it could not.

    A tensor is known again by what it is exactly, or for a launch by where it begins. Of inputs that overlap, one may hold a tensor that another one is a
    view of: so each has `roots`, the inputs that it was made of.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.device, self.stream, self.refused = tensors[0].device, _stream(), ""
        self.kept: list[Tensor] = []  # so that no address is two tensors'
        self.roots: list[frozenset[int]] = []
        self.exactly: dict[tuple, Slot] = {}
        self.beginning: dict[int, Slot | None] = {}  # None: more than one tensor's
        self.steps: list[Step] = []
        self.inputs = len(tensors)
        self.lasting: dict[Slot, Tensor] = {}
        begins = [t.data_ptr() for t in tensors]
        for t in tensors:
            self.enter(t, frozenset((begins.index(t.data_ptr()),)))
        if any(t.device != self.device for t in tensors):
            self.refused = "an input on another device"

    def enter(self, t: Tensor, roots: frozenset[int] = frozenset()) -> Slot | None:
        """A new tensor; None where it is one that is known."""
        slot = Slot(len(self.kept))
        known = self.exactly.setdefault(_exactly(t), slot)
        if known is not slot and len(self.kept) >= self.inputs:
            if self.roots[known.n] != roots:
                raise Unrepeatable("two tensors in one place")
            return None
        self.kept.append(t)
        self.roots.append(roots)
        if t.numel():
            first = self.beginning.setdefault(t.data_ptr(), slot)
            if first is not None and self.roots[first.n] != roots:
                self.beginning[t.data_ptr()] = None
        return slot

    def keep(self, t: Tensor) -> None:
        try:
            self.lasting[self.enter(t) or self.find(t)] = t  # it may have been made just now
        except Unrepeatable as error:
            self.refused = self.refused or str(error)

    def asked(self, find: Callable, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """What happens in it is not written down, but that it is asked."""
        _here.recorder = None
        try:
            with _disable_current_modes():
                found = find(*tensors)
        finally:
            _here.recorder = self
        if not self.refused:
            try:
                given = [None if t is None else self.find(t) for t in tensors]
                self.steps.append(Step(find, given, {}, [self.enter(found)], "one"))
            except Unrepeatable as error:
                self.refused = str(error)
        return found

    def find(self, t: Tensor) -> Slot:
        slot = self.exactly.get(_exactly(t))
        if slot is None or not t.numel():
            raise Unrepeatable(f"a tensor {list(t.shape)} of unknown origin")
        return slot

    def memory(self, t: Tensor) -> Slot:
        """What begins where it does: of a tensor a launch gets the address."""
        slot = self.beginning.get(t.data_ptr())
        return self.find(t) if slot is None else slot

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self.refused:
            try:
                self.operated(func, args, kwargs, found)
            except (Unrepeatable, RuntimeError) as error:  # a tensor without an address
                self.refused = str(error)
        return found

    def operated(self, func, args: tuple, kwargs: dict, found) -> None:
        made = [found] if isinstance(found, Tensor) else found
        stays = isinstance(made, (list, tuple)) and all(isinstance(t, Tensor) and t.device == self.device for t in made)
        if not stays or func in PLACES or any(tag in func.tags for tag in HOST):
            raise Unrepeatable(f"{func} gives something to the host, or looks past what a key says")
        if _stream() != self.stream:
            raise Unrepeatable(f"{func} on another stream")
        of = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, (Tensor, torch.Generator))]
        if any(isinstance(leaf, torch.Generator) for leaf in of):
            raise Unrepeatable("a generator of random numbers")
        roots = frozenset().union(*(self.roots[self.find(t).n] for t in of))
        slots = [None if any(t is given for given in of) else self.enter(t, roots) for t in made]
        args, kwargs = (tree_map_only(Tensor, self.find, given) for given in (list(args), kwargs))
        self.steps.append(Step(func, args, kwargs, slots, "one" if isinstance(found, Tensor) else "several"))

    def launched(self, kernel, made, grid, args: tuple, options: dict) -> None:
        if self.refused:
            return
        try:
            if made is None or callable(grid) or _stream() != self.stream:
                raise Unrepeatable(f"{kernel.__name__} is not launched as it stands")
            given = [args[n] if n < len(args) else options.get(param.name, param.default) for n, param in enumerate(kernel.params)]
            given = [value if param.is_constexpr else self.argument(value) for value, param in zip(given, kernel.params, strict=True)]
            self.steps.append(Step(made[(*grid, 1, 1)[:3]], given, {}, [], "nothing"))
        except (Unrepeatable, RuntimeError) as error:
            self.refused = str(error)

    def argument(self, value):
        """An argument of a launch with slots for its tensors."""
        if isinstance(value, Tensor):
            return self.memory(value)
        if isinstance(base := getattr(value, "base", None), Tensor):
            return Described(value, self.memory(base))
        if isinstance(value, tuple):
            return type(value)(*map(self.argument, value)) if hasattr(value, "_fields") else tuple(map(self.argument, value))
        if isinstance(value, PLAIN) or type(value).__name__ in ("constexpr", "dtype", "JITFunction", "GluonJITFunction"):
            return value
        raise Unrepeatable(f"an argument of {type(value).__name__}")

    def again(self, result) -> Again | None:
        """What was written down, less the steps that nothing needs; None where that is not all."""
        try:
            result = self.returned(result, {})
        except (Unrepeatable, RuntimeError) as error:
            self.refused = self.refused or str(error)
        if self.refused:
            return None
        needed, steps = set(_slots(result)), []
        needed.difference_update(self.lasting)
        for step in reversed(self.steps):
            if step.writes or needed.intersection(step.made):
                needed.update(set(_slots((step.args, step.named))).difference(self.lasting))
                steps.append(_done_again(step))
        slots = [self.lasting.get(Slot(n)) for n in range(self.inputs, len(self.kept))]
        return Again(slots, steps[::-1], _filled(result) or (lambda slots: result), self.stream if self.lasting else None)

    def returned(self, result, seen: dict[Slot, Tensor]):
        """A result with slots for its tensors, each of which is one object: an input itself, or another one."""
        if isinstance(result, Tensor):
            slot = self.find(result)
            if seen.setdefault(slot, self.kept[slot.n] if slot.n < self.inputs else result) is not result:
                raise Unrepeatable("a result that is another one's view of itself")
            return slot
        if isinstance(result, tuple):
            parts = [self.returned(part, seen) for part in result]
            return result._make(parts) if hasattr(result, "_make") else tuple(parts)
        if isinstance(result, PLAIN):
            return result
        raise Unrepeatable(f"a result that is a {type(result).__name__}")


class Described:
    """A descriptor whose memory is a slot's."""

    def __init__(self, descriptor, slot: Slot):
        self.kind, self.fields, self.slot = type(descriptor), {**descriptor.__dict__, "base": None}, slot

    def fill(self, slots: list[Tensor]):
        """It was checked when it was made."""
        found = object.__new__(self.kind)
        found.__dict__.update(self.fields, base=slots[self.slot.n])
        return found


def _exactly(t: Tensor) -> tuple:
    """Without `requires_grad`: the mode that sees a view made finds it False there, and True when the view is used."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _stream() -> int:
    from triton.runtime import driver

    return driver.active.get_current_stream(driver.active.get_current_device())


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _slots(value) -> list[Slot]:
    leaves = tree_iter(value, is_leaf=lambda leaf: isinstance(leaf, (Slot, Described)))
    return [leaf.slot if isinstance(leaf, Described) else leaf for leaf in leaves if isinstance(leaf, (Slot, Described))]


# ---- doing it again


def _filled(value) -> Callable | None:
    """A function of the slots -> `value` with their tensors; None where it has none."""
    if isinstance(value, Slot):
        return lambda slots, n=value.n: slots[n]
    if isinstance(value, Described):
        return value.fill
    if isinstance(value, (tuple, list)):
        holes = [(n, fill) for n, part in enumerate(value) if (fill := _filled(part))]
        if not holes:
            return None
        whole = value._make if hasattr(value, "_make") else type(value)

        def fill(slots):
            parts = list(value)
            for n, one in holes:
                parts[n] = one(slots)
            return whole(parts)

        return fill
    return None


def _done_again(step: Step) -> Callable:
    """It as a function of the slots."""
    run, args, named, made, gives = step
    fill, fill_named, run = _filled(args) or (lambda slots: args), _filled(list(named.values())), SOONER.get(run, run)
    if gives == "nothing":
        return lambda slots: run(*fill(slots))

    def again(slots):
        found = run(*fill(slots), **(named if fill_named is None else dict(zip(named, fill_named(slots), strict=True))))
        for slot, t in zip(made, (found,) if gives == "one" else found, strict=True):
            if slot is not None:
                slots[slot.n] = t

    return again
