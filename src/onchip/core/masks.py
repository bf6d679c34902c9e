"""Masks: which keys a query may see.

A mask is one class with one meaning: `sees(at)`, written with torch operators on a `Place`. The oracle runs it on whole
score matrices, the kernels translate it (`core/trace.py`). Masks that are a band of keys around each row (`Full`,
`Causal`, `Window`) say so, and cost kernels two comparisons. `&` and `|` combine any of them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.core.trace import Place, Traced, trace, trace_mod

ALIGN = ("bottom_right", "top_left")


class Mask:
    """Which keys a query sees. Subclasses give `sees`, and what tensors they read; `name` is how they are printed."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def __str__(self):
        return self.name

    def sees(self, at: Place):
        """Whether the query at `at` sees its key: a bool expression of torch operators."""
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors `sees` reads, in a fixed order."""
        return ()

    @property
    def key(self) -> Any:
        """What decides the mask's text, without its tensors: equal keys, equal texts."""
        return (type(self), self.name, tuple(t.ndim for t in self.tensors))

    @property
    def hull(self) -> "Band":
        """A band outside of which nothing is seen."""
        return Full()

    def static(self) -> "Band | Traced":
        """The part of the mask that a Problem carries."""
        return _static(ByKey(self.key, self))

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(self, other, "&")

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(self, other, "|")


# ---- bands


@dataclass(frozen=True)
class Band(Mask):
    """Keys from `row - left` to `row + right`, each end unlimited when it is None.

    `row` is the query's position among the keys: bottom right aligned (the last query at the last key), or with
    align="top_left" the query's own number.
    """

    left = None
    right = None
    align = "bottom_right"

    __str__ = Mask.__str__

    @property
    def hull(self) -> "Band":
        return self

    def static(self) -> "Band":
        return self

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
        rows = torch.arange(len_q) + self.shift(len_q, len_k)
        first = torch.zeros_like(rows) if self.left is None else (rows - self.left).clamp(min=0)
        last = torch.full_like(rows, len_k) if self.right is None else (rows + self.right + 1).clamp(max=len_k)
        return int((last - first).clamp(min=0).sum())


@dataclass(frozen=True)
class Full(Band):
    """Every query sees every key."""

    __str__ = Mask.__str__


@dataclass(frozen=True)
class Causal(Band):
    """A query sees the keys at and before its own position.

    align   "bottom_right": the last query sees the last key (flash-attn 2.1 and later); "top_left": query i sees keys 0..i (torch's `is_causal`).
    """

    align: str = "bottom_right"
    right = 0

    __str__ = Mask.__str__

    def __post_init__(self):
        _check_align("Causal", self.align)

    @property
    def name(self) -> str:
        return "Causal" if self.align == "bottom_right" else f"Causal({self.align})"


@dataclass(frozen=True)
class Window(Band):
    """A query sees its own key, `left` keys before it and `right` after it; None: all of them.

    `left` and `right` are integers, or for windows that differ integer tensors `[heads]`, `[batch, heads]` or `[batch, 1]`;
    then it is no band any more, and `window(...)` of the tensors is what is built: `Window(Tensor)` gives a `Windows`.
    """

    left: int | None
    right: int | None = 0
    align: str = "bottom_right"

    __str__ = Mask.__str__

    def __new__(cls, left=None, right=0, align="bottom_right"):
        return Windows(left, right, align) if isinstance(left, Tensor) or isinstance(right, Tensor) else object.__new__(cls)

    def __post_init__(self):
        _check_align("Window", self.align)
        for side, keys in (("left", self.left), ("right", self.right)):
            if keys is not None and keys < 0:
                raise ValueError(f"Window: {side} {keys} is negative; it counts keys beside a query's own, so 0 or more, or None for all")

    @property
    def name(self) -> str:
        rest = [] if self.right == 0 and self.align == "bottom_right" else [self.right]
        rest += [] if self.align == "bottom_right" else [self.align]
        return f"Window({', '.join(map(str, [self.left, *rest]))})"


def _check_align(name: str, align: str) -> None:
    if align not in ALIGN:
        raise ValueError(f"{name}: align {align!r} is not one of {', '.join(ALIGN)}")


def _meet(a: Band, b: Band) -> Band | None:
    """The band that both see, when they align alike."""
    if isinstance(a, Full) or isinstance(b, Full):
        return b if isinstance(a, Full) else a
    if a.align != b.align:
        return None
    left, right = (min((x for x in ends if x is not None), default=None) for ends in ((a.left, b.left), (a.right, b.right)))
    return Causal(a.align) if (left, right) == (None, 0) else Window(left, right, a.align)


def _join(a: Band, b: Band) -> Band:
    """A band that holds both."""
    if isinstance(a, Full) or isinstance(b, Full) or a.align != b.align:
        return Full()
    left, right = (None if None in ends else max(ends) for ends in ((a.left, b.left), (a.right, b.right)))
    if (left, right) == (None, None):
        return Full()
    return Causal(a.align) if (left, right) == (None, 0) else Window(left, right, a.align)


def _combine(a: Mask, b: Mask, sign: str) -> Mask:
    a, b = as_mask(a), as_mask(b)
    if isinstance(a, Band) and isinstance(b, Band) and sign == "&" and (both := _meet(a, b)) is not None:
        return both
    if sign == "&" and (isinstance(a, Full) or isinstance(b, Full)):
        return b if isinstance(a, Full) else a
    if sign == "|" and (isinstance(a, Full) or isinstance(b, Full)):
        return Full()
    return Both(a, b, sign)


# ---- masks with a shape of their own


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """`a & b` or `a | b`."""

    a: Mask
    b: Mask
    sign: str

    __str__ = Mask.__str__

    @property
    def name(self) -> str:
        return f"({self.a.name} {self.sign} {self.b.name})"

    @property
    def key(self):
        return (self.sign, self.a.key, self.b.key)

    @property
    def tensors(self):
        return (*self.a.tensors, *self.b.tensors)

    @property
    def hull(self) -> Band:
        if self.sign == "|":
            return _join(self.a.hull, self.b.hull)
        return _meet(self.a.hull, self.b.hull) or self.a.hull

    def sees(self, at: Place):
        return self.a.sees(at) & self.b.sees(at) if self.sign == "&" else self.a.sees(at) | self.b.sees(at)


@dataclass(frozen=True, eq=False)
class Windows(Mask):
    """A `Window` of its own for each head and sequence: `left` and `right` are integers, None, or integer tensors `[heads]`, `[batch, heads]` or `[batch, 1]`."""

    left: Tensor | int | None
    right: Tensor | int | None = 0
    align: str = "bottom_right"

    __str__ = Mask.__str__

    def __post_init__(self):
        _check_align("Window", self.align)
        for side, size in (("left", self.left), ("right", self.right)):
            if isinstance(size, Tensor) and (size.ndim not in (1, 2) or size.dtype.is_floating_point):
                raise ValueError(f"Window: {side} is {size.dtype} {list(size.shape)}; give an integer tensor [heads], [batch, heads] or [batch, 1]")

    @property
    def key(self):
        sides = tuple((x.ndim, x.shape[-1] == 1) if isinstance(x, Tensor) else x for x in (self.left, self.right))
        return (Windows, sides, self.align)

    @property
    def tensors(self):
        return tuple(x for x in (self.left, self.right) if isinstance(x, Tensor))

    @property
    def hull(self) -> Band:
        left, right = (None if isinstance(x, Tensor) else x for x in (self.left, self.right))
        return Full() if left is None and right is None else Window(left, right, self.align)

    def sees(self, at: Place):
        row = at.row if self.align == "bottom_right" else at.i
        seen = at.j >= 0
        if self.right is not None:
            seen = seen & (at.j <= row + _per_head(self.right, at))
        if self.left is not None:
            seen = seen & (at.j >= row - _per_head(self.left, at))
        return seen


def _per_head(size, at: Place):
    if not isinstance(size, Tensor):
        return size
    if size.ndim == 1:
        return size[at.h]
    return size[at.b, at.h if size.shape[1] > 1 else at.h * 0]


@dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk of `size` positions, up to itself (Llama 4's local layers). Combine with `|` for more."""

    size: int

    __str__ = Mask.__str__

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"Chunked: size {self.size} is less than 1; it counts the positions of a chunk")

    @property
    def name(self) -> str:
        return f"Chunked({self.size})"

    @property
    def hull(self) -> Band:
        return Window(self.size - 1)

    def sees(self, at: Place):
        return (at.row // self.size == at.j // self.size) & (at.j <= at.row)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query sees the keys of its own document: `ids` integer `[batch, len_k]`, or `[len_k]` for all sequences alike; keys and queries bottom right aligned."""

    ids: Tensor

    __str__ = Mask.__str__

    def __post_init__(self):
        _want(self, "ids", self.ids, (1, 2), integer=True)

    @property
    def tensors(self):
        return (self.ids,)

    def sees(self, at: Place):
        if self.ids.ndim == 1:
            return self.ids[at.row] == self.ids[at.j]
        return self.ids[at.b, at.row] == self.ids[at.b, at.j]


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Causal, but the first `length` keys are seen by all (a bidirectional prefix): an integer, or a tensor `[batch]`."""

    length: int | Tensor

    __str__ = Mask.__str__

    @property
    def name(self) -> str:
        return "Prefix" if isinstance(self.length, Tensor) else f"Prefix({self.length})"

    @property
    def tensors(self):
        return (self.length,) if isinstance(self.length, Tensor) else ()

    def sees(self, at: Place):
        length = self.length[at.b] if isinstance(self.length, Tensor) else self.length
        return (at.j <= at.row) | (at.j < length)


@dataclass(frozen=True, eq=False)
class Tree(Mask):
    """A tree of drafted tokens at the end of the keys: each sees all keys before the tree, and of the tree its ancestors and itself.

    ancestors   bool `[nodes, nodes]` or `[batch, nodes, nodes]`: row n is True at n and at its ancestors; `Tree.of(parents)` makes it.
    """

    ancestors: Tensor

    __str__ = Mask.__str__

    def __post_init__(self):
        _want(self, "ancestors", self.ancestors, (2, 3))
        if self.ancestors.dtype != torch.bool or self.ancestors.shape[-1] != self.ancestors.shape[-2]:
            raise ValueError(f"Tree: ancestors are {self.ancestors.dtype} {list(self.ancestors.shape)}; give bool [nodes, nodes] or [batch, nodes, nodes]")

    @classmethod
    def of(cls, parents: Tensor) -> "Tree":
        """From `parents` `[nodes]` or `[batch, nodes]`: the index of each node's parent, which comes before it; -1 for a root."""
        nodes = parents.shape[-1]
        seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(*parents.shape, nodes).clone()
        at = parents.clone()
        for _ in range(nodes):
            alive = at >= 0
            seen |= torch.nn.functional.one_hot(at.clamp(min=0), nodes).bool() & alive[..., None]
            at = torch.where(alive, parents.gather(-1, at.clamp(min=0)), at)
        return cls(seen)

    @property
    def name(self) -> str:
        return f"Tree({self.ancestors.shape[-1]})"

    @property
    def tensors(self):
        return (self.ancestors,)

    def sees(self, at: Place):
        nodes = self.ancestors.shape[-1]
        row, col = at.row - at.len_k + nodes, at.j - at.len_k + nodes  # numbers in the tree; negative: before it
        inside = (torch.clamp(row, min=0), torch.clamp(col, min=0))
        among = self.ancestors[inside] if self.ancestors.ndim == 2 else self.ancestors[(at.b, *inside)]
        return (col < 0) | ((row >= 0) & among)


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Keys that are not padding: integer `lengths` `[batch]` (the first so many are real), or bool `[batch, len_k]`, True at a real key."""

    valid: Tensor

    __str__ = Mask.__str__

    def __post_init__(self):
        _want(self, "valid", self.valid, (1, 2))
        if (self.valid.ndim == 2) != (self.valid.dtype == torch.bool):
            raise ValueError(f"KeyPadding: valid is {self.valid.dtype} {list(self.valid.shape)}; give integer lengths [batch] or bool [batch, len_k]")

    @property
    def tensors(self):
        return (self.valid,)

    def sees(self, at: Place):
        return at.j < self.valid[at.b] if self.valid.ndim == 1 else self.valid[at.b, at.j]


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Block-sparse: query i sees key j when `blocks[..., i // size, j // size]`.

    blocks   bool `[rows, cols]`, `[heads, rows, cols]` or `[batch, heads, rows, cols]` (1 for all alike); `size` tokens a side, or (queries, keys).
    """

    blocks: Tensor
    size: int | tuple[int, int] = 128

    __str__ = Mask.__str__

    def __post_init__(self):
        _want(self, "blocks", self.blocks, (2, 3, 4))
        if self.blocks.dtype != torch.bool:
            raise ValueError(f"Blocks: blocks are {self.blocks.dtype}; give bool, True where a block of queries sees a block of keys")

    @property
    def sizes(self) -> tuple[int, int]:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def name(self) -> str:
        return f"Blocks({'x'.join(map(str, dict.fromkeys(self.sizes)))})"

    @property
    def key(self):
        return (Blocks, self.sizes, _alike(self.blocks))

    @functools.cached_property
    def tensors(self):
        return (_squeezed(self.blocks),)

    def sees(self, at: Place):
        rows, cols = self.sizes
        return _at(self.tensors[0], _alike(self.blocks), at._replace(i=at.i // rows, j=at.j // cols))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean matrix, True where a query sees a key: `[len_q, len_k]`, `[heads, ...]` or `[batch, heads, len_q, len_k]`; sizes of 1 are for all alike."""

    seen_by: Tensor

    __str__ = Mask.__str__

    def __post_init__(self):
        _want(self, "mask", self.seen_by, (2, 3, 4))
        if self.seen_by.dtype != torch.bool:
            raise ValueError(f"Dense: the mask is {self.seen_by.dtype}; give bool, True where a query sees a key (a float tensor goes to bias=)")

    @property
    def key(self):
        return (Dense, _alike(self.seen_by))

    @functools.cached_property
    def tensors(self):
        return (_squeezed(self.seen_by),)

    def sees(self, at: Place):
        return _at(self.tensors[0], _alike(self.seen_by), at)


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """A mask in plain Python: `function(b, h, i, j)` -> bool, written with torch operators; `i` and `j` count from the start of a sequence.

    >>> attention(q, k, v, mask=MaskMod(lambda b, h, i, j: (i - j).abs() < 16))
    """

    function: Callable

    __str__ = Mask.__str__

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "mask_mod").strip("<>")

    @property
    def _traced(self):
        return trace_mod(self.function, score=False)

    @property
    def key(self):
        return (MaskMod, self.name, self._traced[0])

    @property
    def tensors(self):
        return tuple(self._traced[1])

    def sees(self, at: Place):
        return self.function(*at[:4])


def _want(mask: Mask, name: str, tensor, ranks: tuple[int, ...], integer: bool = False) -> None:
    kind = type(mask).__name__
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{kind}: {name} is a {type(tensor).__name__}; give a tensor")
    if tensor.ndim not in ranks or (integer and (tensor.dtype.is_floating_point or tensor.dtype == torch.bool)):
        wanted = f"{'an integer tensor' if integer else 'a tensor'} of {' or '.join(map(str, ranks))} dimensions"
        raise ValueError(f"{kind}: {name} is {tensor.dtype} {list(tensor.shape)}; give {wanted}")


def _alike(tensor: Tensor) -> str:
    """Which of b, h, i, j a tensor that broadcasts over [batch, heads, len_q, len_k] depends on."""
    return "".join(letter for letter, size in zip("bhij"[4 - tensor.ndim :], tensor.shape, strict=True) if size != 1)


def _squeezed(tensor: Tensor) -> Tensor:
    return tensor.squeeze() if 1 in tensor.shape else tensor


def _at(tensor: Tensor, letters: str, at: Place):
    """A broadcast tensor, squeezed, at a place."""
    return tensor[tuple(getattr(at, letter) for letter in letters)] if letters else tensor


# ---- what a Problem carries


class ByKey:
    """A mask or score that hashes by its key, so that its text is made once for all of that kind."""

    def __init__(self, key, value):
        self.key, self.value = key, value

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@functools.lru_cache(maxsize=4096)
def _static(by_key: ByKey) -> Traced:
    mask = by_key.value
    text, tensors = trace(mask.sees, mask.name, mask.tensors)
    assert len(tensors) == len(mask.tensors), f"{mask.name} reads a tensor that it does not list"
    by_key.value = None  # the cache must not keep the tensors of the first mask alive
    return Traced(mask.name, text, mask.hull)


def as_mask(mask: Any) -> Mask:
    """A Mask, from itself, a boolean tensor or a `mask_mod(b, h, i, j)`. Raises TypeError for anything else."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    if callable(mask):
        return MaskMod(mask)
    raise TypeError(f"mask is a {type(mask).__name__}; give a Mask (Full(), Causal(), Window(512), ...), a bool tensor or a function mask_mod(b, h, i, j)")


BANDS = (Full, Causal, Window)


def parse(text: str) -> Band:
    """The band whose `str` is `text`: how it passes through a compiled graph."""
    name, _, rest = text.partition("(")
    kind = next(mask for mask in BANDS if mask.__name__ == name)
    words = [word.strip() for word in rest.rstrip(")").split(",") if word.strip()]
    return kind(*(None if word == "None" else int(word) if word.lstrip("-").isdigit() else word for word in words))
