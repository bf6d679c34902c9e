"""From plain Python to one text: a mask or score function, run once on a place, written down operator by operator.

The text is a Python function over torch's elementary operators (aten). It is hashable, so a Problem carries it; plain
torch runs it (`Traced.run`); a kernel translates it line by line. Tensors that the function reads are its arguments
`c0, c1, ...`, so that the text does not depend on their contents.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PLACE = ("b", "h", "i", "j", "len_q", "len_k")
DROPPED = ("device", "layout", "pin_memory", "memory_format")  # keywords that say where a constant lies, not what it is


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
    hull      what a mask certainly hides, as a band; see `masks.Band`. None for a score.
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


def trace(function: Callable, name: str, tensors: Sequence[Tensor] = (), score: bool = False, device: torch.device | None = None) -> tuple[str, list[Tensor]]:
    """The text of `function(at)`, or with `score` of `function(s, at)`, and the tensors it reads in order: `tensors` first, then others it closes over.

    Raises TraceError when the function branches on a value, indexes a tensor in part, or gives something of another shape.
    """
    device = device or next((t.device for t in tensors), torch.device("cpu"))
    inputs = [torch.ones(1, 1, 1, 1, dtype=torch.float32, device=device)] if score else []
    inputs += [torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device) for _ in PLACE]
    names = ("s", *PLACE) if score else PLACE
    recorder = _Recorder(dict(zip(map(id, inputs), names, strict=True)), list(tensors))
    try:
        with torch.no_grad(), recorder:
            at = Place(*inputs[-len(PLACE) :])
            out = function(inputs[0], at) if score else function(at)
    except (RuntimeError, TypeError, IndexError) as error:
        raise TraceError(f"{name}: the function cannot be traced: {error}; write it with torch operators on its arguments") from error
    return recorder.finish(out, name, score), recorder.tensors


class _Recorder(TorchDispatchMode):
    """Writes down every operator that runs inside."""

    def __init__(self, names: dict[int, str], tensors: list[Tensor]):
        super().__init__()
        self.names, self.tensors, self.lines = names, tensors, []
        self.alive: list[Tensor] = []  # ids are only unique among the living
        self.made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise TypeError("it branches on, or takes the Python value of, one of its arguments (use torch.where)")
        if func is torch.ops.aten.index.Tensor and (len(args[1]) != args[0].ndim or any(x is None for x in args[1])):
            raise TypeError(f"a tensor of {args[0].ndim} dimensions is indexed by {len(args[1])}; index all of them at once")
        # a tensor may be shorter than the place it is asked about here: only the kind of the answer matters
        out = args[0].new_zeros(1, 1, 1, 1) if func is torch.ops.aten.index.Tensor else func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        self.alive.append(out)
        if func is torch.ops.aten.lift_fresh.default:
            return out
        if not _depends(args, self.names) and out.ndim not in (0, 4):
            return out  # a tensor made from captured ones alone: becomes a captured one itself
        keywords = "".join(f", {key}={_write(value, self._name)}" for key, value in kwargs.items() if key not in DROPPED and value is not None)
        line = f"{func}({', '.join(_write(arg, self._name) for arg in args)}{keywords})"
        name = f"v{len(self.lines)}"
        self.names[id(out)] = name
        self.lines.append(f"    {name}: '{str(out.dtype).removeprefix('torch.')}' = {line}")
        return out

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) in self.names:
            return self.names[id(tensor)]
        index = next((n for n, known in enumerate(self.tensors) if known is tensor), None)
        if index is None:
            index = len(self.tensors)
            self.tensors.append(tensor)
        return f"c{index}"

    def finish(self, out, name: str, score: bool) -> str:
        if not isinstance(out, Tensor):
            out_text = repr(out)
            if not isinstance(out, (bool, int, float)):
                raise TraceError(f"{name}: the function gives a {type(out).__name__}; it must give one value for one place")
        else:
            if out.numel() != 1:
                raise TraceError(f"{name}: the function gives {list(out.shape)}; it must give one value for one place")
            out_text = self._name(out)
        kinds = [f"c{n}: '{str(t.dtype).removeprefix('torch.')}[{t.ndim}]'" for n, t in enumerate(self.tensors)]
        return "\n".join([f"def run({', '.join(['s', *PLACE, *kinds])}):", *self.lines, f"    return {out_text}"])


def _depends(args, names) -> bool:
    """Whether a traced value is among the arguments."""
    return any(_depends(arg, names) if isinstance(arg, (list, tuple)) else isinstance(arg, Tensor) and id(arg) in names for arg in args)


def _write(value, name: Callable[[Tensor], str]) -> str:
    if isinstance(value, Tensor):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_write(v, name) for v in value)}]"
    if isinstance(value, float):
        return f"float('{value}')"
    return repr(value)


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> Callable:
    space = {"aten": torch.ops.aten, "torch": torch}
    exec(compile(text, "<onchip mod>", "exec"), space)
    return space["run"]


# ---- functions that users write

_MODS: dict[Any, tuple[tuple, str, list[Tensor]]] = {}


def captured(function: Callable) -> tuple:
    """What a plain function reads beside its arguments, to see whether it still is what was traced."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    code = getattr(function, "__code__", None)
    shared = tuple(function.__globals__[n] for n in code.co_names if n in function.__globals__) if code else ()
    return cells + shared + (getattr(function, "__defaults__", None),)


def trace_mod(function: Callable, score: bool) -> tuple[str, list[Tensor]]:
    """The text and tensors of a user's `mask_mod(b, h, i, j)` or `score_mod(s, b, h, i, j)`; traced again when what it closes over was rebound."""
    reads = captured(function) if hasattr(function, "__closure__") else ()
    known = _MODS.get(function)
    if known and len(known[0]) == len(reads) and all(a is b for a, b in zip(known[0], reads, strict=True)):
        return known[1], known[2]
    name = getattr(function, "__name__", type(function).__name__)
    call = (lambda s, at: function(s, *at[:4])) if score else (lambda at: function(*at[:4]))
    device = next((read.device for read in reads if isinstance(read, Tensor)), None)
    text, tensors = trace(call, name, (), score, device)
    lost = [t for t in reads if isinstance(t, Tensor) and t.requires_grad and not any(t is known for known in tensors)]
    if lost:
        raise TraceError(f"{name}: a captured tensor {list(lost[0].shape)} needs a gradient but is not indexed directly; index it in the function")
    if len(_MODS) > 4096:
        _MODS.clear()
    _MODS[function] = (reads, text, tensors)
    return text, tensors
