"""Masks and scores as one text and a list of tensors: how they pass through a compiled graph, an export, a saved program.

`pack` runs inside torch.compile's own trace of Python, so it keeps to what that follows: no caches, no identity of functions. A mask of
`core/masks.py` is its class and fields. A function that the user wrote is run on placeholders and written down torch call by torch
call; `build` replays these, and `core/trace.py` then makes of them the text that an eager call gets.
"""

import functools
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from onchip.core import bands, masks, scores
from onchip.core.bands import Mask
from onchip.core.parts import Part
from onchip.core.scores import Score
from onchip.core.trace import DROPPED, PLACE, Place, TraceError, stand_in

KINDS = {
    kind.__name__: kind
    for kind in (
        *(bands.Full, bands.Causal, bands.Window),
        *(masks.Blocks, masks.Both, masks.Chunked, masks.Dense, masks.Document, masks.KeyPadding, masks.Prefix, masks.Tree, masks.Windows),
        *(scores.ALiBi, scores.Bias, scores.BucketBias, scores.RelativeBias, scores.Scores, scores.Softcap),
    )
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


# ---- packing


def pack(part: Any, tensors: list[Tensor], like: Tensor) -> str:
    """JSON of a Mask, a Score, a tensor, a number, a text or a tuple of these; their tensors are appended to `tensors`. `like` tells the device."""
    if part is None:
        return "null"
    if isinstance(part, bool):
        return "true" if part else "false"
    if isinstance(part, (int, torch.SymInt)):
        return "-" + pack(-part, tensors, like) if part < 0 else str(len(range(int(part))))  # of a symbol, a length makes torch.compile decide
    if isinstance(part, (float, torch.SymFloat)):
        number = float.fromhex(part.hex() if isinstance(part, float) else float(part).hex())  # and so does this
        return "NaN" if number != number else "Infinity" if number == float("inf") else "-Infinity" if number == -float("inf") else str(number)
    if isinstance(part, str):
        return '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(part, Tensor):
        return f'{{"tensor": {_place(part, tensors)}}}'
    if isinstance(part, (tuple, list)):
        return "[" + ", ".join([pack(one, tensors, like) for one in part]) + "]"
    kind = type(part).__name__
    if KINDS.get(kind) is type(part):
        return f'{{"{kind}": [{", ".join([pack(getattr(part, field), tensors, like) for field in type(part).__match_args__])}]}}'
    return _written(part, tensors, like)


def _place(tensor: Tensor, tensors: list[Tensor]) -> int:
    for n, known in enumerate(tensors):
        if known is tensor:
            return n
    tensors.append(tensor)
    return len(tensors) - 1


def _written(part: Part, tensors: list[Tensor], like: Tensor) -> str:
    """A mask or score that is a function: its torch calls."""
    score = isinstance(part, Score)
    inputs = [like.new_zeros(1, 1, 1, 1, dtype=torch.int64) for _ in PLACE]
    s = like.new_zeros(1, 1, 1, 1, dtype=torch.float32)
    calls = _Calls([s, *inputs], ["s", *PLACE], tensors)
    at = Place(*inputs)
    with calls:
        out = part.apply(s, at) if score else part.sees(at)
    name = pack(part.name, tensors, like)
    hull = "null" if score else pack(part.hull.name, tensors, like)
    return f'{{"{"score" if score else "mask"}": {name}, "hull": {hull}, "calls": [{", ".join(calls.lines)}], "gives": {calls.write(out)}}}'


class _Calls(TorchFunctionMode):
    """Writes down the torch calls on placeholders. What is made of other tensors alone stays in the graph, with its gradient."""

    def __init__(self, known: list[Tensor], names: list[str], tensors: list[Tensor]):
        super().__init__()
        self.known, self.names, self.tensors, self.lines = known, names, tensors, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        name = "__getitem__" if name == "getitem" else name  # operator.getitem, of an export
        if not self.reads(args) and not self.reads(list(kwargs.values())):
            return func(*args, **kwargs)
        if name[-1:] == "_" and name[-2:] != "__":
            raise TraceError(f"a mask or score function cannot be traced: {name} changes a tensor in place; write it with torch operators on its arguments")
        if name == "__getitem__":
            args = _selected(*args)
        out = args[0].new_zeros(1, 1, 1, 1) if name == "__getitem__" else func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        args = [arg for arg in args if not isinstance(arg, torch.device)]
        kwargs = {key: value for key, value in kwargs.items() if key not in DROPPED}
        self.known.append(out)
        if name == "to" and len(args) == 1 and not kwargs:  # to a device
            self.names.append(self.names[self.index(args[0])])
            return out
        space = "torch" if getattr(torch, name, None) is func else "functional" if getattr(functional, name, None) is func else "Tensor"
        words = ", ".join([f'"{key}": {self.write(value)}' for key, value in kwargs.items()])
        self.names.append(f"v{len(self.lines)}")
        self.lines.append(f'["{space}.{name}", [{", ".join([self.write(arg) for arg in args])}], {{{words}}}]')
        return out

    def index(self, tensor: Tensor) -> int:
        for n, known in enumerate(self.known):
            if known is tensor:
                return n
        return -1

    def reads(self, args) -> bool:
        for arg in args:
            if isinstance(arg, Tensor):
                if self.index(arg) >= 0:
                    return True
            elif isinstance(arg, (tuple, list)) and self.reads(arg):
                return True
        return False

    def write(self, value) -> str:
        if isinstance(value, Tensor):
            n = self.index(value)
            return f'{{"value": "{self.names[n]}"}}' if n >= 0 else pack(value, self.tensors, value)
        if isinstance(value, torch.dtype):
            return f'{{"dtype": "{str(value)[6:]}"}}'
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join([self.write(one) for one in value]) + "]"
        return pack(value, self.tensors, self.known[0])


def _selected(tensor: Tensor, index) -> tuple[Tensor, tuple]:
    """`tensor[index]` with what the index says in numbers done, in the graph, so that only places are left to index by."""
    index = index if isinstance(index, tuple) else (index,)
    places = tuple([x for x in index if isinstance(x, Tensor)])
    if len(places) < len(index):
        tensor = tensor[tuple([slice(None) if isinstance(x, Tensor) else x for x in index])]
    return tensor, places


# ---- building


def build(text: str, tensors: list[Tensor]) -> Any:
    """What was packed, with these tensors."""
    return _build(_parsed(text), tensors)


def order(text: str, n: int) -> list[int]:
    """Which of the tensors the `n`th of a packed tuple reads, in the order of its `parts()`; none where the tuple is shorter."""
    return _order(_parsed(text)[n : n + 1])


def parts(text: str, n: int, tensors: list[Tensor]) -> list[tuple[Part, list[int]]]:
    """The masks or scores that the `n`th of a packed tuple combines, each with which of the tensors it reads."""
    return [(_build(node, tensors), _order(node)) for node in _combined(_parsed(text)[n])]


def _combined(node) -> list:
    if isinstance(node, list):
        return [one for each in node for one in _combined(each)]
    if isinstance(node, dict) and not node.keys().isdisjoint(("Both", "Scores")):
        return _combined(list(node.values()))
    return [node] if isinstance(node, (dict, _Function)) else []


class _Function(NamedTuple):
    """A function that was written down: its calls, with the tensors numbered from 0, so that they do not depend on what else is packed."""

    kind: type
    calls: str
    tensors: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    return json.loads(text, object_hook=lambda node: _alone(node) if "calls" in node else node)


def _alone(node: dict) -> _Function:
    places = list(dict.fromkeys(_order([node["calls"], node["gives"]])))

    def renumbered(value):
        if isinstance(value, list):
            return [renumbered(one) for one in value]
        if isinstance(value, dict):
            return {key: places.index(one) if key == "tensor" else renumbered(one) for key, one in value.items()}
        return value

    return _Function(WrittenScore if "score" in node else WrittenMask, json.dumps(renumbered(node)), tuple(places))


def _order(node) -> list[int]:
    if isinstance(node, _Function):
        return list(node.tensors)
    if isinstance(node, list):
        return [place for one in node for place in _order(one)]
    if isinstance(node, dict):
        return [place for kind, value in node.items() for place in ([value] if kind == "tensor" else _order(value))]
    return []


def _build(node, tensors: list[Tensor]):
    if isinstance(node, _Function):
        return node.kind(node.calls, tuple(tensors[n] for n in node.tensors))
    if isinstance(node, list):
        return tuple(_build(one, tensors) for one in node)
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    return tensors[value] if kind == "tensor" else KINDS[kind](*_build(value, tensors))


class _Written:
    """Torch calls that were written down, with the tensors they read."""

    def __init__(self, calls: str, tensors: tuple[Tensor, ...]):
        self.calls, self.reads = calls, tensors

    @property
    def tensors(self):
        return self.reads

    @property
    def key(self):
        return (type(self), self.calls, tuple((t.ndim, t.dtype, t.numel() == 1) for t in self.reads))

    def ghost(self):
        return type(self)(self.calls, tuple(stand_in(t.shape, t.dtype) for t in self.reads))

    def run(self, s, at: Place):
        """The calls again."""
        node, values = json.loads(self.calls), {"s": s, **at._asdict()}

        def read(x):
            if isinstance(x, list):
                return tuple(read(one) for one in x)
            if not isinstance(x, dict):
                return x
            ((kind, what),) = x.items()
            return values[what] if kind == "value" else self.reads[what] if kind == "tensor" else DTYPES[what]

        for n, (name, args, words) in enumerate(node["calls"]):
            values[f"v{n}"] = _function(name)(*map(read, args), **{key: read(value) for key, value in words.items()})
        return read(node["gives"])


class WrittenMask(_Written, Mask):
    @property
    def name(self) -> str:
        return json.loads(self.calls)["mask"]

    @property
    def hull(self):
        return bands.parse(json.loads(self.calls)["hull"])

    def sees(self, at: Place):
        return self.run(None, at)


class WrittenScore(_Written, Score):
    @property
    def name(self) -> str:
        return json.loads(self.calls)["score"]

    def apply(self, s, at: Place):
        return self.run(s, at)


# what modes see, though torch does not list it
ALSO = {f"Tensor.{name}": getattr(Tensor, name) for name in ("new_ones", "new_zeros", "new_full")} | {"Tensor.log_sigmoid": functional.logsigmoid}


@functools.lru_cache(maxsize=1024)
def _function(name: str):
    """A function that torch lets modes see, by name. No other: a text may come from a file."""
    if name in ALSO:
        return ALSO[name]
    space, _, word = name.partition(".")
    owner = {"torch": torch, "functional": functional, "Tensor": torch.Tensor}[space]
    found = getattr(owner, word, None) or getattr(owner, f"__{word}__", None) or getattr(torch.special, word.removeprefix("special_"), None)
    if found is None or not any(found is one for ones in torch.overrides.get_overridable_functions().values() for one in ones):
        raise TraceError(f"a mask or score function cannot be traced: it calls {name}; write it with torch operators on its arguments")
    return found
