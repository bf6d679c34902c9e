"""Masks: which keys a query may see.

A mask is one class with one meaning: `sees(at)`, written with torch operators on a `Place`. The oracle runs it on whole
score matrices, the kernels translate it (`core/trace.py`). Masks that are a band of keys around each row (`core/bands.py`)
say so, and cost kernels two comparisons. `&` and `|` combine any of them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.core.bands import BANDS, Band, Causal, Full, Mask, Window, check_align, join, meet, parse
from onchip.core.parts import alike, by_name, check_sizes, check_tensor, check_whole, is_whole, name_of, read, squeezed, trace_mod
from onchip.core.trace import Place, Traced, readable, trace, untouched
from onchip.core.tree import Tree

# ---- masks of masks


def combine(a: Mask, b: Any, sign: str) -> Mask:
    """`a & b` or `a | b`: a band where it is one."""
    b = as_mask(b)
    if isinstance(a, Full) or isinstance(b, Full):
        return Full() if sign == "|" else b if isinstance(a, Full) else a
    if isinstance(a, Band) and isinstance(b, Band) and (one := (meet if sign == "&" else join)(a, b)) is not None:
        return one
    return Both(a, b, sign)


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
    def hull(self) -> Band:
        if self.sign == "|":
            return join(self.a.hull, self.b.hull) or Full()
        return meet(self.a.hull, self.b.hull) or self.a.hull

    def fits(self, *sizes):
        self.a.fits(*sizes)
        self.b.fits(*sizes)

    def parts(self):
        (a, reads_a), (b, reads_b) = self.a.parts(), self.b.parts()
        return _both(a, b, self.sign, self.name, self.hull), (*reads_a, *reads_b)

    def sees(self, at: Place):
        return self.a.sees(at) & self.b.sees(at) if self.sign == "&" else self.a.sees(at) | self.b.sees(at)


@functools.lru_cache(maxsize=4096)
def _both(a: Band | Traced, b: Band | Traced, sign: str, name: str, hull: Band) -> Traced:
    """The text of two texts."""
    one, two = (part.stand_ins() if isinstance(part, Traced) else [] for part in (a, b))
    run = lambda at: a.seen(at, one) & b.seen(at, two) if sign == "&" else a.seen(at, one) | b.seen(at, two)  # noqa: E731
    with untouched():
        return Traced(name, trace(run, name, (*one, *two))[0], hull)


# ---- masks with a shape of their own


@dataclass(frozen=True, eq=False)
class Windows(Mask):
    """A `Window` of its own for each head or sequence: `left` and `right` as of `Window`, or integer tensors `[heads]`, `[batch, heads]` or `[batch, 1]`.

    Numbers in a tensor are 0 or more; what is negative hides a query's own key too (a ValueError on a CPU, where it can be seen).
    """

    left: Tensor | int | None
    right: Tensor | int | None = 0
    align: str = "bottom_right"

    __str__ = Mask.__str__

    def __post_init__(self):
        check_align("Window", self.align)
        for side, size in (("left", self.left), ("right", self.right)):
            if not isinstance(size, Tensor):
                Window(**{"left": None, side: size})  # which says what is wrong with a number
            elif size.ndim not in (1, 2) or size.dtype.is_floating_point or size.dtype.is_complex or size.dtype == torch.bool:
                raise ValueError(f"Window: {side} is {size.dtype} {list(size.shape)}; give an integer tensor [heads], [batch, heads] or [batch, 1]")
            elif readable(size) and (size < 0).any():
                raise ValueError(f"Window: {side} is {size.tolist()}; it counts keys beside a query's own, so 0 or more, or a large number for all")

    @property
    def key(self):
        sides = tuple((x.ndim, x.shape[-1] == 1, x.dtype) if isinstance(x, Tensor) else x for x in (self.left, self.right))
        return (Windows, sides, self.align)

    @property
    def tensors(self):
        return tuple(x for x in (self.left, self.right) if isinstance(x, Tensor))

    def fits(self, *sizes):
        for side, size in (("left", self.left), ("right", self.right)):
            if isinstance(size, Tensor):
                check_sizes("Window", side, size, "h" if size.ndim == 1 else "bh" if size.shape[1] > 1 else "b*", sizes)

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
    key = property(by_name)
    tensors = ()

    def __post_init__(self):
        check_whole("Chunked", "size", self.size)
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
    """A query sees the keys of its own document: `ids` integer `[batch, len_k]`, or `[len_k]` for all sequences. The last query is at the last key."""

    ids: Tensor

    __str__ = Mask.__str__
    key = property(by_name)

    def __post_init__(self):
        check_tensor(self.name, "ids", self.ids, (1, 2), integer=True)

    @property
    def tensors(self):
        return (self.ids,)

    def fits(self, *sizes):
        check_sizes("Document", "ids", self.ids, "bj"[2 - self.ids.ndim :], sizes)

    def sees(self, at: Place):
        row = torch.clamp(at.row, min=0)  # where queries outnumber keys, the first ones are before any document
        one, two = (self.ids[row], self.ids[at.j]) if self.ids.ndim == 1 else (self.ids[at.b, row], self.ids[at.b, at.j])
        return (one == two) & (at.row >= 0)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Causal, but the first `length` keys are seen by all (a bidirectional prefix): an integer, or a tensor `[batch]`."""

    length: int | Tensor

    __str__ = Mask.__str__
    key = property(by_name)

    def __post_init__(self):
        if isinstance(self.length, Tensor):
            check_tensor(self.name, "length", self.length, (1,), integer=True)
            if readable(self.length) and (self.length < 0).any():
                raise ValueError(f"Prefix: length is {self.length.tolist()}; it counts the keys that all see, so 0 or more")
            return
        check_whole("Prefix", "length", self.length)
        if self.length < 0:
            raise ValueError(f"Prefix: length {self.length} is negative; it counts the keys that all see, so 0 or more")

    def fits(self, *sizes):
        if isinstance(self.length, Tensor):
            check_sizes("Prefix", "length", self.length, "b", sizes)

    @property
    def name(self) -> str:
        return "Prefix" if isinstance(self.length, Tensor) else f"Prefix({self.length})"

    @property
    def tensors(self):
        return (self.length,) if isinstance(self.length, Tensor) else ()

    def sees(self, at: Place):
        return (at.j <= at.row) | (at.j < (self.length[at.b] if isinstance(self.length, Tensor) else self.length))


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Keys that are not padding: integer `lengths` `[batch]` (the first so many are real), or bool `[batch, len_k]`, True at a real key.

    What this mask, or a bool tensor, hides from all queries may hold anything, NaN included. A key that some query sees has to be finite: where others
    do not see it, it is multiplied by 0. On a GPU so has what other masks hide from all.
    """

    valid: Tensor

    __str__ = Mask.__str__
    key = property(by_name)

    def __post_init__(self):
        check_tensor(self.name, "valid", self.valid, (1, 2))
        if (self.valid.ndim == 2) != (self.valid.dtype == torch.bool) or self.valid.dtype.is_floating_point or self.valid.dtype.is_complex:
            raise ValueError(f"KeyPadding: valid is {self.valid.dtype} {list(self.valid.shape)}; give integer lengths [batch] or bool [batch, len_k]")
        if self.valid.ndim == 1 and readable(self.valid) and (self.valid < 0).any():
            raise ValueError(f"KeyPadding: valid is {self.valid.tolist()}; it counts keys, so 0 or more")

    @property
    def tensors(self):
        return (self.valid,)

    def fits(self, *sizes):
        check_sizes("KeyPadding", "valid", self.valid, "bj"[: self.valid.ndim], sizes)

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
        check_tensor(self.name, "blocks", self.blocks, (2, 3, 4))
        if self.blocks.dtype != torch.bool:
            raise ValueError(f"Blocks: blocks are {self.blocks.dtype}; give bool, True where a block of queries sees a block of keys")
        if len(self.sizes) != 2 or not all(is_whole(n) and n > 0 for n in self.sizes):
            raise ValueError(f"Blocks: size {self.size} is not one or two positive numbers; give the tokens a side, or (queries, keys)")

    @property
    def sizes(self) -> tuple[int, int]:
        return tuple(self.size) if isinstance(self.size, (tuple, list)) else (self.size, self.size)

    @property
    def name(self) -> str:
        return f"Blocks({'x'.join(map(str, dict.fromkeys(self.sizes)))})"

    @property
    def key(self):
        return (Blocks, self.sizes, alike(self.blocks))

    @property
    def tensors(self):
        return (squeezed(self.blocks),)

    def fits(self, batch, heads, len_q, len_k):
        rows, cols = self.sizes
        what = f"blocks, one for {rows} queries and {cols} keys,"
        check_sizes(self.name, what, self.blocks, "bhij"[4 - self.blocks.ndim :], (batch, heads, -(-len_q // rows), -(-len_k // cols)), True)

    def sees(self, at: Place):
        rows, cols = self.sizes
        return read(self.tensors[0], alike(self.blocks), at._replace(i=at.i // rows, j=at.j // cols))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean matrix, True where a query sees a key: `[len_q, len_k]`, `[heads, ...]` or `[batch, heads, len_q, len_k]`; sizes of 1 are for all alike."""

    seen_by: Tensor

    __str__ = Mask.__str__

    def __post_init__(self):
        check_tensor(self.name, "mask", self.seen_by, (2, 3, 4))
        if self.seen_by.dtype != torch.bool:
            raise ValueError(f"Dense: the mask is {self.seen_by.dtype}; give bool, True where a query sees a key (a float tensor goes to bias=)")

    @property
    def key(self):
        return (Dense, alike(self.seen_by))

    @property
    def tensors(self):
        return (squeezed(self.seen_by),)

    def fits(self, *sizes):
        check_sizes("Dense", "the mask", self.seen_by, "bhij"[4 - self.seen_by.ndim :], sizes, True)

    def sees(self, at: Place):
        return read(self.tensors[0], alike(self.seen_by), at)


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """A mask in plain Python: `function(b, h, i, j)` -> bool, written with torch operators; `i` and `j` count from the start of a sequence.

    >>> attention(q, k, v, mask=MaskMod(lambda b, h, i, j: (i - j).abs() < 16))
    """

    function: Callable

    __str__ = Mask.__str__

    @property
    def name(self) -> str:
        return name_of(self.function)

    def parts(self):
        text, tensors = trace_mod(self.function, score=False)
        return Traced(self.name, text, Full()), tensors

    def sees(self, at: Place):
        return self.function(*at[:4])


# ---- from what users give


def as_mask(mask: Any) -> Mask:
    """A Mask, from itself, a boolean tensor or a `mask_mod(b, h, i, j)`. Raises TypeError for anything else."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    if callable(mask) and not isinstance(mask, type):
        return MaskMod(mask)
    kind = f"the class {mask.__name__}" if isinstance(mask, type) else f"a {type(mask).__name__}"
    raise TypeError(f"mask is {kind}; give a Mask (Full(), Causal(), Window(512), ...), a bool tensor or a function mask_mod(b, h, i, j)")


__all__ = [
    "BANDS", "Band", "Blocks", "Both", "Causal", "Chunked", "Dense", "Document", "Full", "KeyPadding", "Mask", "MaskMod", "Prefix", "Tree", "Window",
    "Windows", "as_mask", "combine", "parse",
]  # fmt: skip
