"""What a norm of rows has around it: a residual stream before, a modulation, a gate or a rounding to codes after. One value each."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Dropout

CODES = {"e4m3": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}  # name: (dtype, largest code)
PARAMETERS = ("weight", "bias", "gate", "scale", "shift")  # what has fewer rows than x, and gradients summed over rows


class Residual(NamedTuple):
    """The stream that x joins before it is normalised: `total = stream + gate * row_scale * dropout(x)`, rounded to the stream's dtype.

    stream      like x, in x's dtype or float32.
    gate        [width], [batch, width] or [batch, 1, width] (a row for each sample), or like x: the gate of adaLN-Zero (Peebles and Xie, 2023).
    row_scale   x's shape without the last dimension: stochastic depth, or any weight of a row.
    dropout     `Dropout(p, seed)`: the same numbers are drawn again in the backward pass, nothing is stored.
    in_place    total is written over stream: inference alone.
    """

    stream: Tensor
    gate: Tensor | None = None
    row_scale: Tensor | None = None
    dropout: Dropout | None = None
    in_place: bool = False


class Modulate(NamedTuple):
    """`y * (1 + scale) + shift` (FiLM, adaLN): [width], [batch, width] or [batch, 1, width], or like x. At least one of them."""

    scale: Tensor | None = None
    shift: Tensor | None = None


class SiluGate(NamedTuple):
    """`y * silu(gate)`, the gate like x: the gated norm of Mamba 2 and of Qwen3-Next."""

    gate: Tensor


class RowCodes(NamedTuple):
    """y as codes, "e4m3" or "int8", with a float32 scale a row: `y = scale * code`, the largest of a row is the largest code."""

    format: str


class Norm(NamedTuple):
    """A norm of rows as kernels get it, tensors and numbers; None where the call has no such thing.

    y = (((z - mean) / sqrt(var + eps) * (weight + offset) + bias) * (1 + scale) + shift) * silu(silu),    z = residual + gate * row_scale * dropout(x)

    kind        "layer", or "rms": mean is 0 and var the mean of squares.
    residual, silu           [rows, width].       row_scale   [rows].       state   int64 [2]: seed and offset of the dropout.
    weight, bias             [1, width], or [sets, width]: a row for each set.
    gate, scale, shift       [1, width], [sets, width] or [rows, width].
    span, sets               row r belongs to set `r // span % sets`: samples (span rows of each sample) or heads (span 1).
    codes       "", or the format of y.
    keep        statistics come back, for the backward pass.
    in_place    total is written over residual.
    inverse     x is not kept: the backward pass makes it from y.
    """

    kind: str
    eps: float
    offset: float = 0.0
    residual: Tensor | None = None
    gate: Tensor | None = None
    row_scale: Tensor | None = None
    state: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    silu: Tensor | None = None
    span: int = 1
    sets: int = 1
    drop: float = 0.0
    codes: str = ""
    keep: bool = False
    in_place: bool = False
    inverse: bool = False


TENSORS = ("residual", "gate", "row_scale", "state", "weight", "bias", "scale", "shift", "silu")


class Normed(NamedTuple):
    """What the forward pass gives: y and total [rows, width], mean, rstd and the scales of codes float32 [rows]; None where not asked for."""

    y: Tensor
    total: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    scale: Tensor | None = None


def sharing(parameter: Tensor | None, rows: int, sets: int) -> str:
    """How rows share a parameter: "all" have one, each "set" has one, or each "row"."""
    if parameter is None or len(parameter) == 1:
        return "all"
    return "set" if len(parameter) == sets else "row"


def words(norm: Norm, x: Tensor) -> str:
    """The variant of the Problem: the kind, then what the call has; ":row" is what each row has one of, and a stream in another dtype says so."""
    said = [norm.kind]
    for name in TENSORS:
        given = getattr(norm, name)
        if given is None:
            continue
        if name == "residual" and given.dtype != x.dtype:
            said.append("residual:fp32")
        elif name == "state":
            said.append("dropout")
        else:
            said.append(f"{name}:row" if name in PARAMETERS and sharing(given, len(x), norm.sets) == "row" else name)
    said += [norm.codes] * bool(norm.codes) + ["keep"] * norm.keep + ["inverse"] * norm.inverse
    return " ".join(said)


class NormGrads(NamedTuple):
    """Gradients of x and of what is in `Norm`, shaped like that; None for what was not wanted. `residual` is None too where it is that of x."""

    x: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    row_scale: Tensor | None = None
    silu: Tensor | None = None
