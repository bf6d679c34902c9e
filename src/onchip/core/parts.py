"""Masks and scores as values: what each reads, and one text for all of a kind, so that equal calls make equal Problems."""

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from onchip.core.trace import Place, Traced, TraceError, stand_in, trace, untouched

WORDS = {"b": "batch", "h": "heads", "i": "len_q", "j": "len_k", "*": "any"}


class Part:
    """What a Mask and a Score have in common: a function of a place, and the tensors it reads.

    A subclass that says neither `tensors` nor `key` is judged by its attributes, as a user's function by what it captures.
    """

    body = ""  # the method that computes it

    @property
    def name(self) -> str:
        """How it is printed."""
        return type(self).__name__

    def __str__(self):
        return self.name

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it reads, in the order of its text."""
        return self.parts()[1]

    @property
    def key(self) -> Hashable:
        """What decides the text, without the tensors' contents: equal keys, equal texts. None: judge by the attributes."""
        return None

    def fits(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        """Raises ValueError when a tensor is too small for such a call."""

    def static(self):
        """The part that a Problem carries."""
        return self.parts()[0]

    def parts(self) -> tuple[Any, tuple[Tensor, ...]]:
        """(what a Problem carries, the tensors that go with it)."""
        key = self.key
        if key is not None:
            return _written(_ByKey(key, self)), self.tensors
        return recall((type(self),), (getattr(type(self), self.body), *sorted(vars(self).items())), self.write)

    def ghost(self) -> "Part":
        """A copy with stand-ins for tensors: enough for its text."""
        fields = (getattr(self, field) for field in type(self).__match_args__)
        return type(self)(*(stand_in(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in fields))

    def write(self, tensors: Sequence[Tensor] = ()) -> tuple[Traced, tuple[Tensor, ...]]:
        """The text, made anew, and the tensors it reads: `tensors` first."""
        raise NotImplementedError(f"{type(self).__name__} is neither a Mask nor a Score: derive it from one of these")


def by_name(part: Part) -> Hashable:
    """The key of a part whose name tells all but the kinds of its tensors."""
    return (type(part), part.name, tuple((t.ndim, t.dtype) for t in part.tensors))


class _ByKey:
    """A part that hashes by its key, so that its text is made once for all of that kind."""

    def __init__(self, key: Hashable, part: Part | None):
        self.key, self.part = key, part

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@functools.lru_cache(maxsize=4096)
def _written(by_key: _ByKey) -> Traced:
    part, by_key.part = by_key.part, None  # the cache must not keep the tensors of the first one alive
    with untouched():
        ghost = part.ghost()
        listed = ghost.tensors
        static, tensors = ghost.write(listed)
    if len(tensors) != len(listed):
        raise TraceError(f"{part.name} reads a tensor that its `tensors` do not list")
    return static


# ---- functions that users write

_MODS: dict[Hashable, tuple[Any, tuple[int, ...]]] = {}  # {what a function is made of: (its text, which of the tensors it captures are read)}
MODS = 1024  # as many at most
ATOMS = (type(None), bool, int, float, str, torch.dtype, torch.device)
TRUSTED = ("builtins", "math", "operator", "torch")  # modules whose contents stay as they are


class _Unknown(Exception):
    """An object whose contents cannot be told apart."""


def trace_mod(function: Callable, score: bool) -> tuple[str, tuple[Tensor, ...]]:
    """The text and tensors of a user's `mask_mod(b, h, i, j)` or `score_mod(s, b, h, i, j)`.

    Functions of the same code over alike captures share a text, also when each call makes a new one. Captured are tensors, numbers,
    other such functions, tuples, lists and dicts of these, and the attributes of functions and tensors; a function that reads anything else (an
    attribute of another object) is traced in every call.
    """
    call = (lambda s, at: function(s, *at[:4])) if score else (lambda at: function(*at[:4]))
    return recall((score,), function, lambda: trace(call, name_of(function), (), score))


def name_of(function: Callable) -> str:
    """A function's own name, or the class of another callable. (`__name__` of a method is more than torch.compile of torch 2.11 can follow.)"""
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else code.co_name.strip("<>")


def recall(head: tuple, reads, write: Callable[[], tuple[Any, Sequence[Tensor]]]) -> tuple[Any, tuple[Tensor, ...]]:
    """`write()`, or what it gave for equal `head` and alike `reads` before, with the tensors of these reads."""
    captures: list[Tensor] = []
    try:
        key = (head, _made_of(reads, captures, []))
        known = _MODS.get(key)
    except _Unknown:
        key = known = None
    if known:
        return known[0], tuple(captures[n] for n in known[1])
    text, tensors = write()
    places = [next((n for n, known in enumerate(captures) if known is t), None) for t in tensors]
    if key and None not in places:  # else it reads a tensor made inside, which is new in every call
        if len(_MODS) >= MODS:
            _MODS.clear()
        _MODS[key] = (text, tuple(places))
    return text, tuple(tensors)


def _made_of(value, captures: list[Tensor], above: list) -> Hashable:
    """What decides a function's text, without the contents of tensors; those go to `captures`. Raises _Unknown for objects that may change unseen."""
    if isinstance(value, Tensor):
        place = next((n for n, known in enumerate(captures) if known is value), None)
        if place is not None:
            return ("as", place)
        captures.append(value)
        own = vars(value) if type(value) in (Tensor, torch.nn.Parameter) else {}
        return (value.dtype, tuple(value.shape), value.device, value.requires_grad, _made_of(own, captures, above) if own else None)
    if isinstance(value, ATOMS):
        return (type(value), value)
    if type(value) in (tuple, list, torch.Size):  # one of a class of its own may have attributes
        return (type(value), *(_made_of(v, captures, above) for v in value))
    if type(value) is dict:
        return (type(value), *(_made_of(item, captures, above) for item in value.items()))
    if isinstance(value, functools.partial):
        return ("partial", *(_made_of(v, captures, above) for v in (value.func, value.args, tuple(sorted(value.keywords.items())))))
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    if module.partition(".")[0] in TRUSTED and isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        return ("of torch", value)
    if not isinstance(value, types.FunctionType):
        raise _Unknown
    if any(value is outer for outer in above):
        return ("itself", next(n for n, outer in enumerate(above) if outer is value))
    cells = tuple(_contents(cell) for cell in value.__closure__ or ())
    shared = tuple(value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
    own = {name: given for name, given in vars(value).items() if name != "__wrapped__"}
    extra = tuple(sorted((value.__kwdefaults__ or {}).items())), own
    return (value.__code__, *(_made_of(v, captures, [*above, value]) for v in (*cells, *shared, value.__defaults__, extra)))


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise _Unknown from None


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that a function names, functions inside it included."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


# ---- tensors that broadcast over [batch, heads, len_q, len_k]


def alike(tensor: Tensor) -> str:
    """Which of b, h, i, j a tensor that broadcasts over [batch, heads, len_q, len_k] depends on."""
    shape, letters = tensor.shape, "bhij"[4 - tensor.ndim :]
    return letters if 1 not in shape else "".join(letter for letter, size in zip(letters, shape, strict=True) if size != 1)


def squeezed(tensor: Tensor) -> Tensor:
    return tensor.squeeze() if 1 in tensor.shape else tensor


def read(tensor: Tensor, letters: str, at: Place):
    """A broadcast tensor, squeezed, at a place."""
    return tensor[tuple(getattr(at, letter) for letter in letters)] if letters else tensor


# ---- checks


def is_whole(number: Any) -> bool:
    """An integer of any kind; True and False are none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def check_whole(name: str, what: str, number) -> None:
    if not is_whole(number) or abs(number) >= 1 << 62:
        raise ValueError(f"{name}: {what} is {number!r}; give a whole number of up to 62 bits")


def check_tensor(name: str, what: str, tensor, ranks: tuple[int, ...], integer: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: {what} is a {type(tensor).__name__}; give a tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(f"{name}: {what} is a nested or sparse tensor; give a dense one")
    if tensor.ndim not in ranks or (integer and (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)):
        wanted = f"{'an integer tensor' if integer else 'a tensor'} of {' or '.join(map(str, ranks))} dimensions"
        raise ValueError(f"{name}: {what} is {tensor.dtype} {list(tensor.shape)}; give {wanted}")


class Exactly(int):
    """Queries or keys of which a call has just so many; of packed sequences, and over pages, they are the most of any."""


def check_sizes(name: str, what: str, tensor: Tensor, letters: str, sizes: tuple[int, int, int, int], loose: bool = False) -> None:
    """Whether a tensor whose dimensions are `letters` of bhij, or * for one of its own, serves (batch, heads, len_q, len_k).

    loose   it broadcasts: sizes of 1 serve all.
    Those of a dense call are its own: a mask of all queries beside the last one is a mistake. Elsewhere only the most of any sequence are known.
    """
    if letters == "bhij"[-len(letters) :] and tensor.shape == sizes[-len(letters) :]:  # as most are, and half of the time of what is below
        return
    needs = dict(zip("bhij", sizes, strict=True))
    for letter, size in zip(letters, tensor.shape, strict=True):
        least = letter in "ij" and not isinstance(needs[letter], Exactly)
        fine = letter == "*" or (size == 1 and loose) or (size >= needs[letter] if least else size == needs[letter])
        if not fine:
            needed = ", ".join(f"{WORDS[x]} {needs[x]}" if x != "*" else "any" for x in letters)
            raise ValueError(f"{name}: {what} is {list(tensor.shape)}; this call needs [{needed}]{', or 1 for all alike' if loose else ''}")
