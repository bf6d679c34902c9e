"""What a row of the suite of row operators is made from: an operator, what it is given, what plain torch and others do."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from onchip.bench.judge import first
from onchip.core.problem import Cost, Problem, Rows

WIDTHS = (4096, 65_536, 262_144)
ENDS = (4096, 262_144)
VOCAB = 128_256
TILES = ("onchip, tiles 2", "onchip, tiles 3", "onchip, tiles 4")  # a kernel's others than those that it runs with


@dataclass(frozen=True)
class Operator:
    """What is asked of a row of the suite.

    problem   (rows, width, dtype) -> the Problem that its cost is taken from, or the Cost.   back, step   the same of the backward pass, and of forward and
              backward together. None: not timed.
    make      (rows, width, dtype, device) -> the arguments.
    ours, plain   functions of these; plain is torch's own, also what torch.compile is given.
    learnt    which arguments get a gradient.
    peers     {name in PEERS: "module:function", or a function that returns a call on the arguments}
    widths    that are timed, at rows that make ELEMENTS; or `sizes`, (rows, width) each.   least   of a check; rows are multiples of its rows.
    small     1 and 64 rows of 4096 are timed, too.        drawn   its numbers are drawn, peers' by another generator, or what it is
              given changes with each call: results are not compared.
    """

    problem: Callable[..., Problem | Cost] | None
    make: Callable[..., tuple]
    ours: Callable
    plain: Callable
    back: Callable[..., Problem] | None = None
    learnt: tuple[int, ...] = (0,)
    step: Callable[..., Problem | Cost] | None = None
    peers: Mapping[str, Callable] = field(default_factory=dict)
    widths: tuple[int, ...] = ENDS[:1]
    sizes: tuple[tuple[int, int], ...] = ()
    least: tuple[int, int] = (5, 24)
    small: bool = False
    drawn: bool = False


def draw(*shapes: Callable):
    """Normal numbers of the shapes that functions of (rows, width) say."""
    return lambda rows, width, dtype, device: tuple(torch.randn(shape(rows, width), dtype=dtype, device=device) for shape in shapes)


def wide(rows, width):
    return rows, 2 * width


def same(rows, width):
    return rows, width


def vector(_rows, width):
    return (width,)


def of(op: str, words: str = "") -> Callable[..., Problem]:
    return lambda rows, width, dtype: Rows(op, rows, width, dtype, words)


# ---- who else has it


def liger(name: str, *args) -> Callable:
    """`name` is "module:function" in liger_kernel.ops."""
    module, _, function = name.partition(":")
    return lambda: first(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply(*args))


def halves(name: str) -> Callable:
    """Liger takes gates and ups as two tensors."""
    return lambda x: liger(name, *(part.contiguous() for part in x.chunk(2, -1)))


def flashinfer(name: str) -> Callable:
    return lambda *args: lambda: getattr(importlib.import_module("flashinfer"), name)(*args)


def quack(name: str, **settings) -> Callable:
    return lambda *args: lambda: getattr(importlib.import_module("quack"), name)(*args, **settings)
