"""Which part of a file's tensors fills which weight: a rank that has slices of a model reads no more than those."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from onchip.models.gguf import ModelError, View
from onchip.models.layers import Linear


class Span(NamedTuple):
    """`count` of `whole` rows, columns or heads, from `first` on."""

    first: int
    count: int
    whole: int

    def times(self, size: int) -> "Span":
        """The same in things of which there are `size` in each."""
        return Span(*(n * size for n in self))

    def slice(self, start: int = 0) -> slice:
        """These among others, the first of all at `start`."""
        return slice(start + self.first, start + self.first + self.count)


def whole(count: int) -> Span:
    return Span(0, count, count)


class Piece(NamedTuple):
    """A weight, or some rows of one, and the part of a file's tensor that it holds: a span for each dimension."""

    target: Tensor
    spans: tuple[Span, ...]


class Placed(NamedTuple):
    """A matrix of a file, and where it is here: `rows` and `cols` of it are part `part` of a Linear's rows."""

    linear: Linear
    part: int
    rows: Span
    cols: Span


class Places:
    """Where the tensors of a model's files go, by Hugging Face's names.

    pieces     what each name fills.          fused    names of tensors that stand for several, one after another.
    matrices   what is a Linear, or rows of one, without ".weight".        ignored   a pattern of names that have no place and need none.
    """

    def __init__(self, model: str, ignored: str = r".*rotary_emb\.inv_freq"):
        self.model, self.ignored = model, [ignored]
        self.pieces: dict[str, Piece] = {}
        self.fused: dict[str, list[str]] = {}
        self.matrices: dict[str, Placed] = {}

    def add(self, name: str, target: Tensor, *spans: Span) -> None:
        """A tensor of which all is here, or these spans."""
        self.pieces[name] = Piece(target, spans or tuple(whole(n) for n in target.shape))

    def linear(self, prefix: str, linear: Linear, rows: Mapping[str, Span], cols: Span, *, bias: bool, fused: str | None = None) -> None:
        """A Linear of matrices one below the other, {name: its rows}; `fused`: what a file calls them as one tensor.

        bias   whether the file has biases. Where columns are cut, one rank alone has them: they are added once to a sum over ranks.
        """
        sizes = [span.count for span in rows.values()]
        for part, (name, span) in enumerate(rows.items()):
            self.matrices[f"{prefix}.{name}"] = Placed(linear, part, span, cols)
        for (name, span), weight in zip(rows.items(), linear.weight.split(sizes), strict=True):
            self.add(f"{prefix}.{name}.weight", weight, span, cols)
        if bias and linear.bias is None:
            self.ignored += [re.escape(f"{prefix}.{name}.bias") for name in (*rows, fused) if name]
        elif bias:
            for (name, span), part in zip(rows.items(), linear.bias.split(sizes), strict=True):
                self.add(f"{prefix}.{name}.bias", part, span)
        if fused:
            for kind in ("weight", "bias"):
                self.fused[f"{prefix}.{fused}.{kind}"] = [f"{prefix}.{name}.{kind}" for name in rows]

    def fill(self, tensors: Iterable[tuple[str, Tensor | View]]) -> None:
        """Fill every weight from (name, tensor or view) pairs. Raises ModelError for one that is missing, unknown or of another shape."""
        missing, ignored = set(self.pieces), re.compile("|".join(self.ignored))
        for name, stored in tensors:
            if ignored.fullmatch(name):
                continue
            parts = self.fused.get(name, [name])
            if not set(parts) <= set(self.pieces):
                raise ModelError(f"weights: {name!r} has no place in this {self.model}; config and weights are not of one model")
            pieces = [self.pieces[part] for part in parts]
            (_, *inner), start = pieces[0].spans, 0
            shape = [sum(piece.spans[0].whole for piece in pieces), *(span.whole for span in inner)]
            if list(stored.shape) != shape:
                raise ModelError(f"weights: {name} is {list(stored.shape)}, the config makes it {shape}; config and weights are not of one model")
            for target, spans in pieces:
                if target.numel():
                    target.copy_(stored[(spans[0].slice(start), *(span.slice() for span in inner))])
                start += spans[0].whole
            missing.difference_update(parts)
        if missing:
            few = ", ".join(sorted(missing)[:3])
            raise ModelError(f"weights: {len(missing)} tensors are missing, among them {few}; the file is incomplete or of another model")
