"""Masks: which keys a query may see.

Rows and columns are positions aligned to the bottom right: query `i` of `len_q` sits at row `i + len_k - len_q`, so that
the last query sees what the last key sees. A mask is one class with all of its meanings: its dense form for the oracle,
the keys it touches for the kernels, its area for the cost.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mask:
    """A band of keys around each row: from `row - left` to `row + right`, each end unlimited when it is None."""

    def __str__(self):
        return type(self).__name__

    @property
    def left(self) -> int | None:
        return None

    @property
    def right(self) -> int | None:
        return None

    def dense(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
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
        rows = torch.arange(len_k - len_q, len_k)
        first = torch.zeros_like(rows) if self.left is None else (rows - self.left).clamp(min=0)
        last = torch.full_like(rows, len_k) if self.right is None else (rows + self.right + 1).clamp(max=len_k)
        return int((last - first).clamp(min=0).sum())


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at and before its own position, bottom right aligned."""

    @property
    def right(self) -> int:
        return 0


@dataclass(frozen=True)
class Window(Mask):
    """A query sees its own key and the `size` keys before it, none after."""

    size: int

    def __str__(self):
        return f"Window({self.size})"

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"Window: size {self.size} is negative; it counts the keys before a query's own, so 0 or more")

    @property
    def left(self) -> int:
        return self.size

    @property
    def right(self) -> int:
        return 0


MASKS = (Full, Causal, Window)


def parse(text: str) -> Mask:
    """The mask whose `str` is `text`: how a mask passes through a compiled graph."""
    name, _, rest = text.partition("(")
    kind = next(mask for mask in MASKS if mask.__name__ == name)
    return kind(*(int(number) for number in rest.rstrip(")").split(",") if number))
