"""Masks that are a band of keys around each row: all a kernel needs to know is two numbers. And what every mask is."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from onchip.core.parts import Part, check_whole
from onchip.core.trace import Place, Traced, trace

ALIGN = ("bottom_right", "top_left")
ALL = 1 << 30  # keys of a window from which on it is without an end: no sequence has them, and kernels add them to rows in 32 bits


class Mask(Part):
    """Which keys a query sees. Subclasses give `sees`."""

    body = "sees"

    def sees(self, at: Place):
        """Whether the query at `at` sees its key: a bool expression of torch operators."""
        raise NotImplementedError(f"{type(self).__name__} is a Mask that says nothing: define sees(self, at)")

    @property
    def hull(self) -> "Band":
        """A band outside of which nothing is seen."""
        return Full()

    def write(self, tensors=()):
        text, tensors = trace(self.sees, self.name, tensors)
        return Traced(self.name, text, self.hull), tuple(tensors)

    def __and__(self, other: Any) -> "Mask":
        return _masks().combine(self, other, "&")

    def __or__(self, other: Any) -> "Mask":
        return _masks().combine(self, other, "|")

    __rand__, __ror__ = __and__, __or__


def _masks():
    from onchip.core import masks  # which builds on this file

    return masks


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """Keys from `row - left` to `row + right`, each end unlimited when it is None.

    `row` is the query's position among the keys: bottom right aligned (the last query at the last key), or with
    align="top_left" the query's own number. Two of one class are equal where all they hold is.
    """

    left = None
    right = None
    align = "bottom_right"
    tensors = ()

    __str__ = Mask.__str__

    def __eq__(self, other):
        return vars(self) == vars(other) if self.__class__ is other.__class__ else NotImplemented

    def __hash__(self):
        return hash((self.__class__, self.left, self.right, self.align))

    @property
    def hull(self) -> "Band":
        return self

    def parts(self) -> tuple["Band", tuple]:
        return self, ()

    def shift(self, len_q, len_k):
        """The row of query 0."""
        return len_k - len_q if self.align == "bottom_right" else 0

    def sees(self, at: Place):
        row = at.row if self.align == "bottom_right" else at.i
        seen = at.j >= 0
        if self.right is not None:
            seen = at.j <= row + self.right
        if self.left is not None:
            inside = at.j >= row - self.left
            seen = inside if self.right is None else seen & inside
        return seen

    def seen(self, at: Place, _tensors=()) -> Tensor:
        """As of `Traced.seen`: `sees` on tensors that broadcast."""
        return self.sees(at)

    def dense(self, rows: Tensor, cols: Tensor) -> Tensor:
        """True where row `rows` sees key `cols`; the two are broadcast against each other."""
        seen = torch.ones(torch.broadcast_shapes(rows.shape, cols.shape), dtype=torch.bool, device=rows.device)
        if self.right is not None:
            seen &= cols <= rows + self.right
        if self.left is not None:
            seen &= cols >= rows - self.left
        return seen

    def keys(self, first_row: int, last_row: int, len_k: int) -> range:
        """The keys that any row of `[first_row, last_row]` sees: what a tile of queries has to load."""
        start = 0 if self.left is None else max(0, first_row - self.left)
        stop = len_k if self.right is None else min(len_k, last_row + self.right + 1)
        return range(start, max(start, stop))

    def area(self, len_q: int, len_k: int) -> int:
        """How many (query, key) pairs are seen."""
        first = self.shift(len_q, len_k)
        before = 0 if self.left is None else _keys_before(first - self.left, len_q, len_k)
        return (len_q * len_k if self.right is None else _keys_before(first + self.right + 1, len_q, len_k)) - before


@dataclass(frozen=True, eq=False)
class Full(Band):
    """Every query sees every key."""

    __str__ = Mask.__str__


@dataclass(frozen=True, eq=False)
class Causal(Band):
    """A query sees the keys at and before its own position.

    align   "bottom_right": the last query sees the last key (flash-attn 2.1 and later); "top_left": query i sees keys 0..i (torch's `is_causal`).
    """

    align: str = "bottom_right"
    right = 0

    __str__ = Mask.__str__

    def __post_init__(self):
        check_align("Causal", self.align)

    @property
    def name(self) -> str:
        return "Causal" if self.align == "bottom_right" else f"Causal({self.align})"


@dataclass(frozen=True, eq=False)
class Window(Band):
    """A query sees its own key, `left` keys before it and `right` after it; None: all of them.

    `left` and `right` are integers, or for windows that differ integer tensors `[heads]`, `[batch, heads]` or `[batch, 1]`;
    these make it a `Windows`, which is no band.
    """

    left: int | None
    right: int | None = 0
    align: str = "bottom_right"

    __str__ = Mask.__str__

    def __new__(cls, left=None, right=0, align="bottom_right"):
        return _masks().Windows(left, right, align) if isinstance(left, Tensor) or isinstance(right, Tensor) else object.__new__(cls)

    def __post_init__(self):
        check_align("Window", self.align)
        for side, keys in (("left", self.left), ("right", self.right)):
            if keys is None:
                continue
            if isinstance(keys, Integral) and keys >= ALL:
                object.__setattr__(self, side, None)
                continue
            check_whole("Window", side, keys)
            if keys < 0:
                raise ValueError(f"Window: {side} {keys} is negative; it counts keys beside a query's own, so 0 or more, or None for all")

    @property
    def name(self) -> str:
        rest = [] if self.right == 0 and self.align == "bottom_right" else [self.right]
        rest += [] if self.align == "bottom_right" else [self.align]
        return f"Window({', '.join(map(str, [self.left, *rest]))})"


BANDS = (Full, Causal, Window)


def _keys_before(first: int, rows: int, len_k: int) -> int:
    """How many of `len_k` keys are before `first`, and before each of the `rows - 1` numbers that follow it, in all: no list of rows, which may be 2^31."""

    def below(stop: int) -> int:  # the same of the numbers 0 to stop - 1
        few, many = min(max(0, stop), len_k), max(0, stop - len_k)
        return few * (few - 1) // 2 + len_k * many

    return below(first + rows) - below(first)


def check_align(name: str, align: str) -> None:
    if align not in ALIGN:
        raise ValueError(f"{name}: align {align!r} is not one of {', '.join(ALIGN)}")


def meet(a: Band, b: Band) -> Band | None:
    """The band that both see, when they align alike."""
    if isinstance(a, Full) or isinstance(b, Full):
        return b if isinstance(a, Full) else a
    if a.align != b.align:
        return None
    left, right = (min((x for x in ends if x is not None), default=None) for ends in ((a.left, b.left), (a.right, b.right)))
    return Causal(a.align) if (left, right) == (None, 0) else Window(left, right, a.align)


def join(a: Band, b: Band) -> Band | None:
    """The band of what either sees, when they align alike: both hold a query's own key, so nothing lies between them."""
    if isinstance(a, Full) or isinstance(b, Full):
        return Full()
    if a.align != b.align:
        return None
    left, right = (None if None in ends else max(ends) for ends in ((a.left, b.left), (a.right, b.right)))
    if (left, right) == (None, None):
        return Full()
    return Causal(a.align) if (left, right) == (None, 0) else Window(left, right, a.align)


def parse(text: str) -> Band:
    """The band whose `str` is `text`."""
    name, _, rest = text.partition("(")
    kind = next((band for band in BANDS if band.__name__ == name), None)
    if kind is None:
        raise ValueError(f"mask {text!r} is no band; give one of {', '.join(band.__name__ for band in BANDS)}")
    words = [word.strip() for word in rest.rstrip(")").split(",") if word.strip()]
    return kind(*(None if word == "None" else int(word) if word.lstrip("-").isdigit() else word for word in words))
