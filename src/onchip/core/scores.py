"""What happens to a score between `scale q k^T` and the softmax: bias, ALiBi, softcap, or any function in plain Python.

A score function is one class with one meaning: `apply(s, at)`, written with torch operators on the score and its `Place`.
Several are applied in order. Gradients flow to the tensors that they read.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from onchip.core.parts import Part, alike, by_name, check_sizes, check_whole, name_of, read, squeezed, trace_mod
from onchip.core.trace import Place, Traced, trace, untouched


def check_floats(what: str, given: Any, ranks: Sequence[int], way: str, fits: Callable[[torch.Size], Any] = lambda shape: True) -> None:
    """Raises ValueError where `given` is no tensor of floats of so many dimensions, or its shape does not fit."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{what} a {type(given).__name__}; give floats {way}")
    if given.ndim not in ranks or not given.dtype.is_floating_point or given.dtype.itemsize == 1 or given.layout != torch.strided or not fits(given.shape):
        narrow = given.is_floating_point() and given.itemsize == 1
        floats = "dense floats" if given.layout != torch.strided else "floats of 16 to 64 bits" if narrow else "floats"
        raise ValueError(f"{what} {given.dtype} {list(given.shape)}; give {floats} {way}")


class Score(Part):
    """A function of a score. Subclasses give `apply`."""

    body = "apply"

    def apply(self, s, at: Place):
        """The new score: an expression of torch operators."""
        raise NotImplementedError(f"{type(self).__name__} is a Score that does nothing: define apply(self, s, at)")

    def write(self, tensors=()):
        text, tensors = trace(self.apply, self.name, tensors, score=True)
        return Traced(self.name, text), tuple(tensors)


@dataclass(frozen=True)
class Softcap(Score):
    """`cap tanh(s / cap)` (Gemma 2, Grok): scores stay within (-cap, cap)."""

    cap: float

    __str__ = Score.__str__
    key = property(lambda self: (Softcap, self.cap))  # the name has six digits
    tensors = ()

    def __post_init__(self):
        if not isinstance(self.cap, Real) or isinstance(self.cap, bool) or not 1e-30 <= self.cap <= 1e30:  # whose reciprocal float32 has, too
            raise ValueError(f"softcap {self.cap!r} is not a number from 1e-30 to 1e30; give the bound of the scores, or None for no cap")

    @property
    def name(self) -> str:
        return f"Softcap({self.cap:g})"

    def apply(self, s, at: Place):
        return torch.tanh(s * (1.0 / self.cap)) * float(self.cap)


@dataclass(frozen=True, eq=False)
class ALiBi(Score):
    """Attention with linear biases (Press et al., 2022): `s - slope |row - j|`, or with form="linear" `s + slope (j - row)`.

    slopes   floats `[heads]` or `[batch, heads]`, multiplied in float32 at least; `ALiBi.slopes_of(heads)` gives the paper's.
    """

    slopes: Tensor
    form: str = "absolute"

    __str__ = Score.__str__
    key = property(by_name)

    def __post_init__(self):
        if self.form not in ("absolute", "linear"):
            raise ValueError(f"ALiBi: form {self.form!r} is not one of absolute, linear")
        check_floats("ALiBi: slopes are", self.slopes, (1, 2), "[heads] or [batch, heads]")

    @staticmethod
    def slopes_of(heads: int, device: torch.device | None = None) -> Tensor:
        """The slopes of the paper for `heads` heads, a power of two or not. Raises ValueError for fewer than one."""
        check_whole("ALiBi.slopes_of", "heads", heads)
        if heads < 1:
            raise ValueError(f"ALiBi.slopes_of: heads is {heads}; give 1 or more")
        whole = 1 << (heads.bit_length() - 1)
        slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
        slopes += [2 ** (-4 * (2 * n + 1) / whole) for n in range(heads - whole)]
        return torch.tensor(slopes, dtype=torch.float32, device=device)

    @property
    def name(self) -> str:
        return "ALiBi" if self.form == "absolute" else "ALiBi(linear)"

    @property
    def tensors(self):
        return (self.slopes,)

    def fits(self, *sizes):
        check_sizes("ALiBi", "slopes", self.slopes, "bh"[2 - self.slopes.ndim :], sizes)

    def apply(self, s, at: Place):
        slope = self.slopes[at.h] if self.slopes.ndim == 1 else self.slopes[at.b, at.h]
        if slope.dtype.itemsize < 4:  # in bfloat16's 8 bits a distance of 500 is off by one
            slope = slope.float()
        distance = at.j - at.row
        return s - slope * distance.abs() if self.form == "absolute" else s + slope * distance


@dataclass(frozen=True, eq=False)
class RelativeBias(Score):
    """A learnt bias for each distance: `s + table[h, clamp(j - row, -reach, reach) + reach]` (Shaw et al., 2018).

    table   `[heads, 2 reach + 1]`.
    """

    table: Tensor

    __str__ = Score.__str__
    key = property(by_name)

    def __post_init__(self):
        check_floats("RelativeBias: table is", self.table, (2,), "[heads, 2 reach + 1]", lambda shape: shape[1] % 2)

    @property
    def reach(self) -> int:
        return self.table.shape[1] // 2

    @property
    def name(self) -> str:
        return f"RelativeBias({self.reach})"

    @property
    def tensors(self):
        return (self.table,)

    def fits(self, *sizes):
        check_sizes("RelativeBias", "table", self.table, "h*", sizes)

    def apply(self, s, at: Place):
        return s + self.table[at.h, torch.clamp(at.j - at.row, -self.reach, self.reach) + self.reach]


@dataclass(frozen=True, eq=False)
class BucketBias(Score):
    """T5's relative position bias (Raffel et al., 2020): exact buckets for near distances, logarithmic ones up to `longest`.

    table   `[buckets, heads]`, as T5 stores it.      both   distances to both sides (an encoder), or only back (a decoder).
    """

    table: Tensor
    longest: int = 128
    both: bool = True

    __str__ = Score.__str__
    key = property(by_name)

    def __post_init__(self):
        least = 4 if self.both else 2
        way = f"[buckets, heads], buckets a multiple of {least}"
        check_floats("BucketBias: table is", self.table, (2,), way, lambda shape: shape[0] >= least and shape[0] % least == 0)
        check_whole("BucketBias", "longest", self.longest)
        if self.longest <= self.table.shape[0] // least:
            raise ValueError(f"BucketBias: longest {self.longest} is not past the {self.table.shape[0] // least} exact buckets; give a larger distance")

    @property
    def name(self) -> str:
        return f"BucketBias({self.table.shape[0]}, {self.longest}{', both' if self.both else ''})"

    @property
    def tensors(self):
        return (self.table,)

    def fits(self, *sizes):
        check_sizes("BucketBias", "table", self.table, "*h", sizes)

    def apply(self, s, at: Place):
        buckets, distance = self.table.shape[0], at.j - at.row
        base = 0
        if self.both:
            buckets //= 2
            base = torch.where(distance > 0, buckets, 0)
            distance = distance.abs()
        else:
            distance = torch.clamp(-distance, min=0)
        near = buckets // 2
        ratio = torch.log(torch.clamp(distance, min=1).float() / near) / math.log(self.longest / near)
        far = torch.clamp(near + (ratio * (buckets - near)).int(), max=buckets - 1)
        return s + self.table[base + torch.where(distance < near, distance, far), at.h]


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """`s + bias`: a float tensor `[batch, heads, len_q, len_k]`, or fewer leading dimensions; sizes of 1 broadcast."""

    bias: Tensor

    __str__ = Score.__str__

    def __post_init__(self):
        check_floats("bias is", self.bias, range(5), "that broadcast over [batch, heads, len_q, len_k] (a bool tensor goes to mask=)")

    @property
    def name(self) -> str:
        return f"Bias({alike(self.bias) or 'one'})"

    @property
    def key(self):
        return (Bias, alike(self.bias), self.bias.dtype)

    @property
    def tensors(self):
        return (squeezed(self.bias),)

    def fits(self, *sizes):
        check_sizes("Bias", "bias", self.bias, "bhij"[4 - self.bias.ndim :], sizes, True)

    def apply(self, s, at: Place):
        return s + read(self.tensors[0], alike(self.bias), at)


@dataclass(frozen=True, eq=False)
class ScoreMod(Score):
    """A score function in plain Python: `function(s, b, h, i, j)` -> s, written with torch operators.

    `i` and `j` count from the start of a sequence; tensors that it indexes get gradients. A place past a tensor's end is a ValueError on a CPU; a GPU, which
    does not ask, reads 0 there. A function that reads attributes of an
    object is traced in every eager call (about 0.5 ms on a CPU core): give the tensor a name of its own before.

    >>> attention(q, k, v, score=ScoreMod(lambda s, b, h, i, j: s + table[h, (i - j).abs()]))
    """

    function: Callable

    __str__ = Score.__str__

    @property
    def name(self) -> str:
        return name_of(self.function)

    def parts(self):
        text, tensors = trace_mod(self.function, score=True)
        return Traced(self.name, text), tensors

    def apply(self, s, at: Place):
        return self.function(s, *at[:4])


@dataclass(frozen=True, eq=False)
class Scores(Score):
    """Several, applied in order."""

    each: tuple[Score, ...]

    __str__ = Score.__str__

    @property
    def name(self) -> str:
        return ", ".join(score.name for score in self.each)

    def fits(self, *sizes):
        for score in self.each:
            score.fits(*sizes)

    def parts(self):
        texts, reads = zip(*(score.parts() for score in self.each), strict=True)
        return _chained(texts, self.name), tuple(t for tensors in reads for t in tensors)

    def apply(self, s, at: Place):
        for score in self.each:
            s = score.apply(s, at)
        return s


@functools.lru_cache(maxsize=4096)
def _chained(texts: tuple[Traced, ...], name: str) -> Traced:
    """The text of several, one after the other."""
    reads = [text.stand_ins() for text in texts]

    def run(s, at: Place):
        for text, tensors in zip(texts, reads, strict=True):
            s = text.run(s, *at, *tensors)
        return s

    with untouched():
        return Traced(name, trace(run, name, [t for tensors in reads for t in tensors], score=True)[0])


def chain(bias: Tensor | None, score: Any, softcap: float | None) -> Score | None:
    """All that happens to a score, in the order bias, score functions, softcap; None when nothing does."""
    if isinstance(softcap, Tensor):
        raise TypeError(f"softcap is a tensor {list(softcap.shape)}; give a number, or a function score=lambda s, b, h, i, j: cap * torch.tanh(s / cap)")
    if bias is None and score is None and not softcap:
        return None
    each: list[Score] = [Bias(bias)] if bias is not None else []
    for one in score if isinstance(score, (list, tuple)) else () if score is None else (score,):
        if not isinstance(one, Score) and (not callable(one) or isinstance(one, type)):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"score is {kind}; give a function score_mod(s, b, h, i, j), a Score (ALiBi(...), Softcap(30.0)) or a list of them")
        each.append(one if isinstance(one, Score) else ScoreMod(one))
    if softcap:
        each.append(Softcap(softcap))
    return each[0] if len(each) == 1 else Scores(tuple(each)) if each else None
