"""The rows of the suite of row operators: which are timed, what is given to whom, and who is timed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.bench.call import Call
from onchip.bench.judge import distance, first, larger
from onchip.bench.operators import OPERATORS
from onchip.bench.row_operator import Operator
from onchip.core import device as devices
from onchip.core.problem import SHORT, Cost
from onchip.dispatch import OPS

FORWARD, BACKWARD, STEP = "rows", "rows backward", "rows step"
ELEMENTS = 1 << 26  # of the large rows' first tensor: 128 MiB of bf16, twice and a half an H200's L2
SMALL = ((1, 4096), (64, 4096))
MATHS = 100  # flops a byte, beyond which a rate counts flops


class RowOp(NamedTuple):
    """An operator of OPERATORS on `rows` x `width`: forward or backward alone, or a step of both."""

    op: str
    name: str
    rows: int
    width: int
    dtype: torch.dtype

    def __str__(self):
        return f"{self.name}{self.op.removeprefix(FORWARD)} {self.rows}x{self.width} {SHORT[self.dtype]}"


# ---- the rows


def problems(device: torch.device, quick: bool) -> list[tuple[RowOp, str, str]]:
    """(problem, plot, place in it). `quick`: the first size, and the smallest."""
    gpu, found = device.type == "cuda", []
    dtype = torch.bfloat16 if gpu else torch.float32
    for name, operator in OPERATORS.items():
        large = _sizes(operator, gpu)[: 1 if quick or not gpu else None]
        small = list(SMALL[: 1 if quick else None]) if gpu and operator.small else []
        for op, asked in ((FORWARD, operator.problem), (BACKWARD, operator.back), (STEP, operator.step)):
            sizes = (large + (small if op == FORWARD else [])) if asked else []
            found += [(RowOp(op, name, *size, dtype), name + op.removeprefix(FORWARD), f"{size[0]}x{size[1]}") for size in sizes]
    return found


def _sizes(operator: Operator, gpu: bool) -> list[tuple[int, int]]:
    """On a CPU about a million elements, of an operator with sizes of its own a multiple of its least rows; one row where that is its first size."""
    if gpu:
        return list(operator.sizes) or [(ELEMENTS // width, width) for width in operator.widths]
    if operator.sizes and operator.sizes[0][0] == 1:
        return list(operator.sizes[:1])
    if not operator.sizes:
        return [((1 << 20) // width, width) for width in operator.widths]
    width, unit = min(operator.sizes[0][1], 1 << 14), operator.least[0]
    return [(unit * max(1, (1 << 20) // (width * unit)), width)]


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of a RowOp, and the gradient of its output."""

    problem: RowOp
    args: tuple
    d_out: tuple[Tensor, ...]
    on_host = False
    tolerance = 2e-2

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.problem.name]

    @property
    def cost(self) -> Cost:
        p, operator = self.problem, self.operator
        of = {FORWARD: operator.problem, BACKWARD: operator.back, STEP: operator.step}[p.op](p.rows, p.width, p.dtype)
        return of if isinstance(of, Cost) else OPS[of.op].cost(of)

    @property
    def maths(self) -> bool:
        return self.cost.flops > MATHS * self.cost.bytes

    def error(self, output, ours) -> float | None:
        """||x - truth|| / ||truth|| of each result, the largest; the truth is plain torch in float32. None where numbers are drawn."""
        if self.operator.drawn:
            return None
        found = output if isinstance(output, (tuple, list)) else (output,)
        return functools.reduce(larger, (distance(x, truth) for x, truth in zip(found, self._truth, strict=True)))

    @functools.cached_property
    def _truth(self) -> tuple[Tensor, ...]:
        exact = tuple(x.float() if x.is_floating_point() else x for x in self.args)
        found = self.call(self.operator.plain, exact).run()
        return tuple(x.to(self.problem.dtype) for x in (found if isinstance(found, (tuple, list)) else (found,)))

    def call(self, function: Callable, args: tuple | None = None) -> Call:
        """`function` on the arguments, the backward pass of it alone, or both."""
        args = self.args if args is None else args
        if self.problem.op == FORWARD:  # what is drawn is another each time a graph runs
            return Call(lambda: function(*args), result=(lambda: None) if self.operator.drawn else None)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(n in self.operator.learnt) for n, x in enumerate(args)]
        wanted = [leaves[n] for n in self.operator.learnt]

        def forward():
            with torch.enable_grad():
                out = function(*leaves)
            out = out if isinstance(out, tuple) else (out,)
            return out, [d.to(x.dtype) for d, x in zip(self.d_out, out, strict=True)]

        def step():
            out, grads = forward()
            return torch.autograd.grad(out, wanted, grads)

        if self.problem.op == STEP:
            return Call(step)
        out, grads = forward()
        return Call(lambda: torch.autograd.grad(out, wanted, grads, retain_graph=True))


def given(problem: RowOp, device: torch.device) -> Given:
    p, operator = problem, OPERATORS[problem.name]
    args = operator.make(p.rows, p.width, p.dtype, device)
    if p.op == FORWARD:
        return Given(p, args, ())
    with torch.no_grad():
        out = operator.ours(*args)
    return Given(p, args, tuple(torch.randn_like(x) for x in (out if isinstance(out, tuple) else (out,))))


# ---- who is timed


def onchip(inputs: Given) -> Call:
    return inputs.call(inputs.operator.ours)


def torch_eager(inputs: Given) -> Call:
    return inputs.call(inputs.operator.plain)


def torch_compiled(inputs: Given) -> Call:
    import torch._functorch.config

    keep = torch._functorch.config.patch(donated_buffer=False)  # a backward pass that can be run again; what comes out of its cache is asked at each run
    with keep:
        call = inputs.call(_compiled(inputs.problem))
        call.run()
    return call if inputs.problem.op == FORWARD else call._replace(run=keep(call.run))


@functools.lru_cache(maxsize=1)
def _compiled(problem: RowOp) -> Callable:
    """One for all copies of a row's inputs; of what was compiled before, dynamo would keep eight shapes and then run eagerly."""
    torch._dynamo.reset()
    return torch.compile(OPERATORS[problem.name].plain, dynamic=False)


def package(name: str) -> Callable[[Given], Call]:
    """A peer of the operator by name; the first of its results."""
    return lambda inputs: inputs.call(lambda *args: first(inputs.operator.peers[name](*args)()))


def has(name: str) -> Callable:
    return lambda p, _device: None if name in OPERATORS[p.name].peers else f"no {p.name}"


def has_tiles(n: int) -> Callable:
    """Whether the operator's first kernel has so many tiles to choose from."""

    def why_not(p: RowOp, device: torch.device) -> str | None:
        asked = OPERATORS[p.name].problem(p.rows, p.width, p.dtype)
        return None if len(OPS[asked.op].kernels[0].configs(asked, devices.of(device))) >= n else f"fewer than {n} tiles"

    return why_not


def no_backward(p: RowOp, _device) -> str | None:
    """Not alone: Liger's and quack's write over what they are given."""
    return "no gradients" if p.op == BACKWARD else None
