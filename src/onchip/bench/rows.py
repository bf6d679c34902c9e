"""The operators that read and write rows: what is timed, beside whom. A new operator is one entry of OPERATORS."""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.call import Call
from onchip.bench.judge import distance, larger
from onchip.core.problem import SHORT, Cost, Dropout, Problem, Rope, Rows
from onchip.dispatch import OPS
from onchip.models.rope import rope_table
from onchip.ops.activation import Clipped, activate, gated_act
from onchip.ops.fused import rms_norm
from onchip.ops.lookup import dropout_add, embedding, hadamard
from onchip.ops.rotary import rotary

FORWARD, BACKWARD = "rows", "rows backward"
ELEMENTS = 1 << 26  # of the large rows' first tensor: 128 MiB of bf16, twice and a half an H200's L2
WIDTHS = (4096, 16_384, 65_536, 262_144)
SMALL = ((1, 4096), (64, 4096))
HEAD = 128  # columns of a head, where rows are made of heads
VOCAB = 32_768  # of an embedding


class RowOp(NamedTuple):
    """An operator of OPERATORS on `rows` x `width`, forward or backward alone."""

    op: str
    name: str
    rows: int
    width: int
    dtype: torch.dtype

    def __str__(self):
        return f"{self.name}{' backward' * (self.op == BACKWARD)} {self.rows}x{self.width} {SHORT[self.dtype]}"


@dataclass(frozen=True)
class Operator:
    """What is asked of a row of the suite.

    problem   (rows, width, dtype) -> the Problem that its cost is taken from.      back   the same of the backward pass; None: not timed.
    make      (rows, width, dtype, device) -> the arguments.
    ours, plain   functions of these; plain is torch's own, also what torch.compile is given.
    learnt    which arguments get a gradient.
    peers     {name in PEERS: "module:function", or a function that returns a call on the arguments}
    widths    that are timed; rows follow from ELEMENTS.
    """

    problem: Callable[..., Problem]
    make: Callable[..., tuple]
    ours: Callable
    plain: Callable
    back: Callable[..., Problem] | None = None
    learnt: tuple[int, ...] = (0,)
    peers: Mapping[str, Callable] = field(default_factory=dict)
    widths: tuple[int, ...] = WIDTHS


def _draw(*shapes: Callable):
    """Normal numbers of the shapes that functions of (rows, width) say."""
    return lambda rows, width, dtype, device: tuple(torch.randn(shape(rows, width), dtype=dtype, device=device) for shape in shapes)


def _of(op: str, words: str = "") -> Callable[..., Problem]:
    return lambda rows, width, dtype: Rows(op, rows, width, dtype, words)


def _rope(op: str) -> Callable[..., Problem]:
    """Rows of four query heads for each key head, all of HEAD columns."""
    return lambda rows, width, dtype: Rope(op, rows, width // HEAD * 4 // 5, width // HEAD // 5, HEAD, HEAD, dtype, "neox", False, False)


def _heads(rows, width, dtype, device):
    kv = width // HEAD // 5
    q, k = (torch.randn(1, rows, n, HEAD, dtype=dtype, device=device) for n in (4 * kv, kv))
    return q, k, rope_table(rows, HEAD, 1e4, device=device)


def _plain_rotary(q, k, table):
    cos, sin = (t.repeat(1, 2).unsqueeze(1).to(q.dtype) for t in table.chunk(2, -1))

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return turned(q), turned(k)


def _plain_hadamard(x):
    """By one product with the matrix of 128 and one with that of the rest, as Kronecker factors; a matrix of all columns would be arithmetic alone."""
    rows, width = x.shape
    first, second = (_matrix(n, x.dtype, x.device) for n in (width // min(width, HEAD), min(width, HEAD)))
    return (first @ (x.view(rows, -1, min(width, HEAD)) @ second)).reshape(rows, width)


@functools.cache
def _matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard(torch.eye(n, dtype=torch.float32, device=device), kernel="reference").to(dtype)


def _ids(rows, width, dtype, device):
    return torch.randint(VOCAB, (rows,), device=device), torch.randn(VOCAB, width, dtype=dtype, device=device)


def _gate(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _clipped(x):
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def _halves(name: str) -> Callable:
    """Liger takes gates and ups as two tensors."""
    return lambda x: _liger(name, *(part.contiguous() for part in x.chunk(2, -1)))


def _liger(name: str, *args) -> Callable:
    """`name` is "module:function" in liger_kernel.ops."""
    module, _, function = name.partition(":")
    return lambda: getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply(*args)


def _flashinfer(name: str) -> Callable:
    return lambda *args: lambda: getattr(importlib.import_module("flashinfer"), name)(*args)


def _quack_norm(x, w):
    return lambda: importlib.import_module("quack").rmsnorm(x, w, eps=1e-6)


def _wide(rows, width):
    return rows, 2 * width


def _same(rows, width):
    return rows, width


def _vector(_rows, width):
    return (width,)


OPERATORS: dict[str, Operator] = {
    "rms_norm": Operator(
        _of("rms_norm"), _draw(_same, _vector), rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        peers={"Liger": lambda x, w: _liger("rms_norm:LigerRMSNormFunction", x, w, 1e-6), "quack": _quack_norm, "FlashInfer": _flashinfer("rmsnorm")},
    ),
    "add_rms_norm": Operator(
        _of("rms_norm", "residual"), _draw(_same, _vector, _same), lambda x, w, r: rms_norm(x, w, residual=r),
        lambda x, w, r: (F.rms_norm(x + r, w.shape, w, 1e-6), x + r),
    ),
    "swiglu": Operator(
        _of("gated_act", "silu"), _draw(_wide), gated_act, _gate, _of("gated_act_backward", "silu"),
        peers={"Liger": _halves("swiglu:LigerSiLUMulFunction"), "FlashInfer": _flashinfer("silu_and_mul")},
    ),
    "geglu": Operator(
        _of("gated_act", "gelu_tanh"), _draw(_wide), lambda x: gated_act(x, "gelu_tanh"),
        lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1], _of("gated_act_backward", "gelu_tanh"),
        peers={"Liger": _halves("geglu:LigerGELUMulFunction"), "FlashInfer": _flashinfer("gelu_tanh_and_mul")},
    ),
    "gpt-oss gate": Operator(
        _of("gated_act", "clipped interleaved"), _draw(_wide), lambda x: gated_act(x, Clipped(), layout="interleaved"), _clipped,
        _of("gated_act_backward", "clipped interleaved"),
    ),
    "gelu, bias": Operator(
        _of("activate", "gelu bias"), _draw(_same, _vector), lambda x, b: activate(x, "gelu", bias=b), lambda x, b: F.gelu(x + b),
        _of("activate_backward", "gelu bias"), (0, 1),
    ),
    "rotary": Operator(_rope("rotary"), _heads, rotary, _plain_rotary, _rope("rotary_backward"), (0, 1), widths=(5120, 20_480)),
    "dropout_add": Operator(
        _of("dropout_add", "residual"), _draw(_same, _same), lambda x, r: dropout_add(x, r, Dropout(0.1, 1)), lambda x, r: r + F.dropout(x, 0.1),
        _of("dropout_add"), widths=WIDTHS[:1],
    ),
    "hadamard": Operator(_of("hadamard"), _draw(_same), hadamard, _plain_hadamard, _of("hadamard"), widths=(128, 4096, 32_768)),
    "embedding": Operator(
        _of("embedding", f"of {VOCAB}"), _ids, embedding, F.embedding, _of("embedding_backward", f"of {VOCAB}"), (1,), widths=WIDTHS[:1],
    ),
}  # fmt: skip
DRAWN = ("dropout_add",)  # whose peers draw numbers of their own, so that only ours are judged


# ---- the rows


def problems(device: torch.device, quick: bool) -> list[tuple[RowOp, str, str]]:
    """(problem, plot, place in it). `quick`: the narrowest rows, and the smallest."""
    gpu, found = device.type == "cuda", []
    dtype = torch.bfloat16 if gpu else torch.float32
    for name, operator in OPERATORS.items():
        elements = ELEMENTS if gpu else 1 << 20
        large = [(elements // width, width) for width in (operator.widths[:1] if quick or not gpu else operator.widths)]
        small = [(rows, width) for rows, width in SMALL if width in operator.widths][: 1 if quick else None] if gpu else []
        for op in (FORWARD, BACKWARD) if operator.back else (FORWARD,):
            title = name + " backward" * (op == BACKWARD)
            found += [(RowOp(op, name, *size, dtype), title, f"{size[0]}x{size[1]}") for size in large + (small if op == FORWARD else [])]
    return found


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
        p = self.problem
        of = (self.operator.back if p.op == BACKWARD else self.operator.problem)(p.rows, p.width, p.dtype)
        return OPS[of.op].cost(of)

    def error(self, output, ours) -> float | None:
        """||x - truth|| / ||truth|| of each result, the largest; the truth is plain torch in float32. None where numbers are drawn."""
        if self.problem.name in DRAWN:
            return None
        found = output if isinstance(output, (tuple, list)) else (output,)
        return functools.reduce(larger, (distance(x, truth) for x, truth in zip(found, self._truth, strict=False)))

    @functools.cached_property
    def _truth(self) -> tuple[Tensor, ...]:
        exact = tuple(x.float() if x.is_floating_point() else x for x in self.args)
        found = self.call(self.operator.plain, exact).run()
        return tuple(x.to(self.problem.dtype) for x in (found if isinstance(found, (tuple, list)) else (found,)))

    def call(self, function: Callable, args: tuple | None = None) -> Call:
        """`function` on the arguments, or the backward pass of it alone."""
        args = self.args if args is None else args
        if self.problem.op == FORWARD:
            return Call(lambda: function(*args))
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(n in self.operator.learnt) for n, x in enumerate(args)]
            out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        wanted, grads = [leaves[n] for n in self.operator.learnt], [d.to(x.dtype) for d, x in zip(self.d_out, out, strict=True)]
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

    with torch._functorch.config.patch(donated_buffer=False):  # a backward pass that can be run again
        call = inputs.call(_compiled(inputs.problem))
        call.run()
    return call


@functools.lru_cache(maxsize=1)
def _compiled(problem: RowOp) -> Callable:
    """One for all copies of a row's inputs; of what was compiled before, dynamo would keep eight shapes and then run eagerly."""
    torch._dynamo.reset()
    return torch.compile(OPERATORS[problem.name].plain, dynamic=False)


def package(name: str) -> Callable[[Given], Call]:
    return lambda inputs: Call(inputs.operator.peers[name](*inputs.args))


def has(name: str) -> Callable:
    return lambda p, _device: None if name in OPERATORS[p.name].peers else f"no {p.name}"


def no_backward(p: RowOp, _device) -> str | None:
    return "no gradients" if p.op == BACKWARD else None
