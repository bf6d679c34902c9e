"""From plain Python to one text: a mask or score function, run once on a place, written down operator by operator.

The text is a Python function over torch's elementary operators (aten). It is hashable, so a Problem carries it; plain
torch runs it (`Traced.run`); a kernel translates it line by line. Tensors that the function reads are its arguments
`c0, c1, ...`, so that the text does not depend on their contents.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

PLACE = ("b", "h", "i", "j", "len_q", "len_k")
DROPPED = ("device", "layout", "pin_memory", "memory_format")  # keywords that say where a value lies, not what it is

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
BRANCHES = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default, aten.equal.default)
CONTENTS = (
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.__repr__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__,
    Tensor.__reduce_ex__,
)  # fmt: skip
BRANCHED = "it branches on, or takes the Python value of, a tensor (use torch.where)"
MIXES = "{} mixes places or changes the shape; the function is of one place at a time"
# of one place, though torch does not tag them as pointwise
ELEMENTWISE = {"_to_copy", "alias", "clone", "detach", "floor_divide", "full_like", "hardswish", "leaky_relu", "ones_like", "zeros_like"}
NEW = {"new_ones": lambda args: 1, "new_zeros": lambda args: 0, "new_full": lambda args: args[2]}  # {name: what it holds}


class Place(NamedTuple):
    """Where a score stands: sequence `b`, query head `h`, query `i` and key `j` of that sequence, and its lengths.

    Integers, or tensors that broadcast against each other.
    """

    b: Any
    h: Any
    i: Any
    j: Any
    len_q: Any
    len_k: Any

    @property
    def row(self):
        """The query's position among the keys, so that the last query sits at the last key (bottom right)."""
        return self.i + (self.len_k - self.len_q)


class TraceError(ValueError):
    """A mask or score function does what cannot be written down; the message says what."""


@dataclass(frozen=True)
class Traced:
    """A function of a place (and a score) as text. `name` is what people read; equal texts are equal functions.

    text      "def run(s, b, h, i, j, len_q, len_k, c0: 'float32[2]', ...): ..." over `aten`; each line annotated with its dtype.
    hull      what a mask certainly hides, as a band; see `bands.Band`. None for a score.
    """

    name: str
    text: str
    hull: Any = None

    def __str__(self):
        return self.name

    @property
    def run(self) -> Callable:
        """The text as a function of torch tensors: (s, *place, *tensors); `s` is None for a mask."""
        return _compiled(self.text)

    def seen(self, at: Place, tensors: Sequence[Tensor]) -> Tensor:
        """A mask's answer at `at`, a bool tensor that broadcasts over it."""
        return self.run(None, *at, *tensors)

    def short(self, why: Any) -> ValueError:
        """What to raise where a tensor has nothing at a place."""
        return ValueError(f"{'score' if self.hull is None else 'mask'} {self.name} reads past the end of a tensor: {why}; make it longer, or clamp the index")

    def stand_ins(self) -> list[Tensor]:
        """Tensors of the kinds that the text reads, without contents: of one element where it takes a whole tensor for a number."""
        head, _, body = self.text.partition("\n")
        whole = set(re.findall(r"\bc\d+\b", re.sub(r"aten\.index\.Tensor\(c\d+, ", "", body)))
        kinds = re.findall(r"(c\d+): '(\w+)\[(\d+)\]'", head)
        return [stand_in((1 if name in whole else 2,) * int(ndim), getattr(torch, dtype)) for name, dtype, ndim in kinds]


class Counting(TorchFunctionMode):
    """Inside, a text's gradient comes from places that count (`counts` is True) alone: at others 0 times an infinite derivative would be NaN."""

    def __init__(self, counts: Tensor):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not aten.index.Tensor:  # all but what is looked up broadcasts over places
            every = torch._C._are_functorch_transforms_active()  # a batch of tensors does not say that there is a gradient
            args = [torch.where(self.counts, t, t.detach()) if isinstance(t, Tensor) and (every or t.requires_grad) else t for t in args]
        return func(*args, **(kwargs or {}))


def hides_keys(mask: Any) -> bool:
    """Whether a mask may hide padding, keys that nobody sees: their values then count as 0, whatever they hold."""
    return isinstance(mask, Traced) and re.search(r"\b(KeyPadding|Dense)\b", mask.name) is not None


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> Callable:
    space = {"aten": aten, "torch": torch}
    exec(compile(text, "<onchip mod>", "exec"), space)
    return space["run"]


# ---- writing down


def trace(function: Callable, name: str, tensors: Sequence[Tensor] = (), score: bool = False) -> tuple[str, list[Tensor]]:
    """The text of `function(at)`, or with `score` of `function(s, at)`, and the tensors it reads in order: `tensors` first, then others it closes over.

    The places are meta tensors, so nothing is computed, on any device. What the function makes of captured tensors alone
    (`table.exp()`) is computed, with its gradient, and read as one more tensor.
    Raises TraceError when the function branches on a value, mixes places, or gives something of another shape or kind.
    """
    if torch.is_grad_enabled():  # without, or hooks of whoever counts what autograd keeps (checkpoints) would see the places
        with torch.no_grad():
            text, found, learnt = _traced(function, name, tensors, score)
        if not learnt:
            return text, found
    return _traced(function, name, tensors, score)[:2]


def _traced(function: Callable, name: str, tensors: Sequence[Tensor], score: bool) -> tuple[str, list[Tensor], bool]:
    """`trace`, and whether the function made something of tensors with a gradient."""
    inputs = [stand_in((1, 1, 1, 1), torch.float32)] if score else []
    inputs += [stand_in((1, 1, 1, 1), torch.int64) for _ in PLACE]
    recorder = _Recorder(inputs, ("s", *PLACE) if score else PLACE, tensors)
    try:
        with recorder, _Sealed():
            at = Place(*inputs[-len(PLACE) :])
            out = function(inputs[0], at) if score else function(at)
        return recorder.finish(out, score), recorder.tensors, recorder.learnt
    except (_CannotError, RuntimeError, TypeError, IndexError) as error:
        why = BRANCHED if "cannot be called on meta tensors" in str(error) else error
        way_out = "write it with torch operators on its arguments"
        if "positional argument" in str(error):
            way_out = f"it is called as {'score_mod(s, b, h, i, j)' if score else 'mask_mod(b, h, i, j)'}"
        raise TraceError(f"{'score' if score else 'mask'} {name}: the function cannot be traced: {why}; {way_out}") from error


def _dispatch_state() -> tuple:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


with ThreadPoolExecutor(1) as fresh:  # a thread starts with the state that no compiler, transform or mode has touched
    UNTOUCHED = fresh.submit(_dispatch_state).result()


@contextmanager
def untouched() -> Iterator[None]:
    """Inside, torch dispatches as at its start, so that a text is the same wherever it is made: in inference mode, in an operator, under torch.func."""
    with torch.inference_mode(False), _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*UNTOUCHED):
        yield


def readable(tensor: Tensor) -> bool:
    """Whether a check may look at a tensor's numbers: on a CPU, where nobody waits for them, and outside of graphs and transforms."""
    eager = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0
    return eager and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


class _CannotError(Exception):
    """Why a function cannot be written down. No TypeError: Python would take one inside `a + b` for "try the other operand"."""


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class _Sealed(TorchFunctionMode):
    """What `_Recorder` cannot see, because it goes past the dispatcher (the contents of a tensor), or cannot write down as it comes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if any(func is one for one in CONTENTS):
            raise _CannotError(BRANCHED)
        if func is torch.nn.functional.logsigmoid:  # whose operator gives a buffer beside its value
            return -torch.nn.functional.softplus(-args[0] if args else -kwargs["input"])
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes down every operator that runs inside."""

    def __init__(self, inputs: Sequence[Tensor], names: Sequence[str], tensors: Sequence[Tensor]):
        super().__init__()
        self.names, self.tensors, self.lines = dict(zip(map(id, inputs), names, strict=True)), list(tensors), []
        self.scalars: set[int] = set()  # of `names`, what no place decides
        self.learnt = False  # whether something was made of captured tensors with a gradient
        self.alive = list(inputs)  # ids are only unique among the living

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # autograd has not taken it apart: inference mode, or inside an operator
            with self:
                return func.decompose(*args, **kwargs)
        read = _tensors((args, tuple(kwargs.values())))
        placed = any(id(t) in self.names and id(t) not in self.scalars for t in read)
        elementwise = torch.Tag.pointwise in func.tags or func is aten.index.Tensor or name in ELEMENTWISE
        if func in BRANCHES:
            raise _CannotError(BRANCHED)
        if func is aten.lift_fresh.default and args[0].numel() == 1 and not args[0].is_meta:  # torch.tensor(3.0)
            func, args, kwargs, read = aten.scalar_tensor.default, (args[0].item(),), {"dtype": args[0].dtype}, []
        elif name in NEW and placed and math.prod(args[1]) == 1:  # of the place nothing but the dtype
            func, args, kwargs, read = aten.scalar_tensor.default, (NEW[name](args),), {"dtype": kwargs.get("dtype") or args[0].dtype}, []
            placed = False
        elif not placed and read and not (elementwise and all(t.numel() == 1 for t in read)):
            if name != "detach_" and any(id(t) in self.names for t in read):
                raise _CannotError(MIXES.format(name))
            self.learnt = self.learnt or any(t.requires_grad for t in read)
            if getattr(kwargs.get("device"), "type", "") == "meta":  # of a place: a tensor is where it is
                del kwargs["device"]
            return func(*args, **kwargs)  # of captured tensors alone: the result is one more of them
        if why := _refusal(func, name, read, placed and not elementwise):
            raise _CannotError(why)
        out = self._run(func, name, args, kwargs)
        if not isinstance(out, Tensor):
            return out
        if out.numel() != 1:
            if placed:
                raise _CannotError(f"{name} gives {list(out.shape)}; a tensor of more than one element must be indexed by the place")
            return func(*args, **kwargs)  # made from nothing, as torch.arange(8)
        keywords = "".join(f", {key}={_write(value, self._name)}" for key, value in kwargs.items() if key not in DROPPED and value is not None)
        line = f"{func}({', '.join(_write(arg, self._name) for arg in args)}{keywords})"
        self.alive.append(out)
        self.names[id(out)] = f"v{len(self.lines)}"
        self.lines.append(f"    v{len(self.lines)}: '{_short(out.dtype)}' = {line}")
        if not placed:
            self.scalars.add(id(out))
        return out

    def _run(self, func, name: str, args, kwargs):
        """The operator on stand-ins: only the kind of its result matters."""
        if func is aten.index.Tensor:
            if len(args[1]) != args[0].ndim or any(x is None for x in args[1]):
                raise _CannotError(f"a tensor of {args[0].ndim} dimensions is indexed by {len(args[1])}; index all of them at once")
            if any(x.dtype == torch.bool for x in args[1]):
                raise _CannotError("a tensor is indexed by a condition (use torch.where)")
            if any(x.dtype.is_floating_point for x in args[1]):
                raise _CannotError("a tensor is indexed by a float (make it whole by // or .long())")
            return stand_in((1, 1, 1, 1), args[0].dtype)
        kwargs = {key: _meta(value) for key, value in kwargs.items() if key not in DROPPED}
        if not _tensors(args):
            kwargs["device"] = "meta"
        try:
            return func(*_meta(args), **kwargs)
        except RuntimeError as error:
            raise _CannotError(f"{name}: {error}") from error

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) in self.names:
            return self.names[id(tensor)]
        index = next((n for n, known in enumerate(self.tensors) if known is tensor or _same_view(known, tensor)), None)
        if index is None:
            index = len(self.tensors)
            self.tensors.append(tensor)
        return f"c{index}"

    def finish(self, out, score: bool) -> str:
        """The text, when the function gave `out`."""
        if not score and isinstance(out, bool):
            self.lines, value = [f"    v0: 'bool' = aten.{'ge' if out else 'lt'}.Scalar(j, 0)"], "v0"
        elif score and isinstance(out, (int, float)):
            self.lines, value = [f"    v0: 'float32' = aten.full_like.default(s, {_write(float(out), self._name)})"], "v0"
        elif not isinstance(out, Tensor):
            raise _CannotError(f"it gives a {type(out).__name__} instead of one value for one place")
        elif out.numel() != 1:
            raise _CannotError(f"it gives {list(out.shape)} instead of one value for one place")
        elif out.dtype.is_floating_point != score or (not score and out.dtype != torch.bool):
            raise _CannotError(f"it gives {_short(out.dtype)} instead of {'a float' if score else 'a bool'}")
        else:
            value = self._name(out)
        kinds = [f"c{n}: '{_short(t.dtype)}[{t.ndim}]'" for n, t in enumerate(self.tensors)]
        return "\n".join([f"def run({', '.join(['s', *PLACE, *kinds])}):", *self.lines, f"    return {value}"])


def _refusal(func, name: str, read: list[Tensor], mixes: bool) -> str:
    """Why an operator cannot be written down; "" where it can."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return f"{name} draws random numbers (for dropout, give dropout=)"
    if name == "empty_like":  # what torch's dropout draws into
        return "empty_like holds what nothing decides (for dropout, give dropout=)"
    if func._schema.is_mutable:
        return f"{name} changes a tensor in place"
    if mixes:
        return MIXES.format(name)
    if func is not aten.index.Tensor and name != "_to_copy" and any(t.is_floating_point() and t.dtype.itemsize == 1 for t in read):
        return f"{name} of a tensor of 8 bits (cast it first)"  # torch has no operators of these
    return ""


def _same_view(a: Tensor, b: Tensor) -> bool:
    return a._base is not None and a._base is b._base and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _tensors(args) -> list[Tensor]:
    return [t for arg in args for t in (_tensors(arg) if isinstance(arg, (list, tuple)) else [arg] if isinstance(arg, Tensor) else [])]


def _meta(value):
    """Tensors in it replaced by stand-ins."""
    if isinstance(value, Tensor):
        return value if value.is_meta else stand_in(value.shape, value.dtype)
    return type(value)(_meta(v) for v in value) if isinstance(value, (list, tuple)) else value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(value, name: Callable[[Tensor], str]) -> str:
    if isinstance(value, Tensor):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_write(v, name) for v in value)}]"
    if isinstance(value, float):
        return f"float('{value}')"
    return repr(value)
