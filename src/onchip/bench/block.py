"""One decoder block of a Llama, in training and in inference: with onchip's fusions, with each of them undone in turn, and as others have it.

    s = residual + x        y = norm(s)        q, k, v = y W_qkv        t = s + attention(turned q, turned k, v) W_o
    z = norm(t)             out = (act(z W_gate) * (z W_up)) W_down                                                    -> out, t

The next block would begin by adding the two. A training step is forward and backward of the loss `sum(out d_out + t d_t)`, whose gradient is d_out and d_t.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onchip.bench.call import Call
from onchip.bench.judge import distance, larger
from onchip.bench.row_operator import liger
from onchip.core.masks import Causal
from onchip.core.problem import SHORT, Attention, Cost, Problem, Rope, Rows
from onchip.dispatch import OPS
from onchip.models.rope import rope_table
from onchip.ops.activation import gated_act
from onchip.ops.attention import attention
from onchip.ops.norm import rms_norm
from onchip.ops.rotary import rotary

INFERENCE, TRAINING = "inference", "training step"
EPS = 1e-6
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # weights that may be one


class Block(NamedTuple):
    """A block's work on `tokens` of one sequence; `sizes` is (hidden, heads, kv_heads, dim, mlp)."""

    op: str
    tokens: int
    sizes: tuple[int, int, int, int, int]
    dtype: torch.dtype

    def __str__(self):
        hidden, heads, kv_heads, dim, mlp = self.sizes
        return f"{self.op} T{self.tokens} hidden {hidden} h{heads}/{kv_heads} d{dim} mlp {mlp} {SHORT[self.dtype]}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights."""
        hidden, heads, kv_heads, dim, mlp = self.sizes
        norms = {"norm": (hidden,), "norm_mlp": (hidden,)}
        attend = {"q": (heads * dim, hidden), "k": (kv_heads * dim, hidden), "v": (kv_heads * dim, hidden), "o": (hidden, heads * dim)}
        return norms | attend | {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}

    def problems(self, fusion: str) -> tuple[Problem, ...]:
        """Those of onchip's operators that a fusion is, forward, and backward in training."""
        hidden, heads, kv_heads, dim, mlp = self.sizes
        n, dtype = self.tokens, self.dtype
        of = {
            "norm": (Rows("rms_norm", n, hidden, dtype, "residual"), Rows("norm_backward", n, hidden, dtype, "rms residual weight keep d_total -> x weight")),
            "rotary": tuple(Rope(op, n, heads, kv_heads, dim, dim, dtype, "neox", False, False) for op in ("rotary", "rotary_backward")),
            "attention": tuple(Attention(op, 1, n, n, heads, kv_heads, dim, dtype, Causal()) for op in ("prefill", "backward")),
            "activation": tuple(Rows(op, n, mlp, dtype, "silu") for op in ("gated_act", "gated_act_backward")),
        }
        return of[fusion][: 2 if self.op == TRAINING else 1]

    @property
    def cost(self) -> Cost:
        """Products, of which a gradient has two, weights and their gradients once; and the operators between them."""
        passes = 3 if self.op == TRAINING else 1
        weights = sum(math.prod(shape) for shape in self.shapes.values() if len(shape) == 2)
        products = Cost(2 * passes * self.tokens * weights, (2 if passes == 3 else 1) * weights * self.dtype.itemsize)
        between = [OPS[p.op].cost(p) for fusion in ("norm", "norm", "rotary", "attention", "activation") for p in self.problems(fusion)]
        return reduce(Cost.__add__, between, products)


class Parts(NamedTuple):
    """What a block does between its products, and which weights are one. Tensors are [tokens, ...]; q, k and v [tokens, heads, dim]."""

    add_norm: Callable  # (x, residual, weight) -> (norm, sum)
    turn: Callable  # (q, k, table) -> (q, k)
    attend: Callable  # (q, k, v) -> [tokens, heads, dim]
    act: Callable  # [gate_up] or [gate, up] -> [tokens, mlp]
    joined: tuple[str, ...] = ()


# ---- the parts


def _onchip_attend(q, k, v):
    return attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask=Causal())[0]


def _plain_add_norm(x, residual, weight):
    """As transformers has it."""
    total = residual + x
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype), total


def _sides(table, dtype):
    """Cosines and sines, [tokens, 1, dim]."""
    return (t.repeat(1, 2).unsqueeze(1).to(dtype) for t in table.chunk(2, -1))


def _plain_turn(q, k, table):
    cos, sin = _sides(table, q.dtype)
    return tuple(x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin for x in (q, k))


def _plain_attend(q, k, v):
    """By the matrix of all scores; the softmax in float32, as transformers has it."""
    q, k, v = (x.transpose(0, 1) for x in (q, *(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))))
    hidden = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + hidden).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(0, 1)


def _sdpa(q, k, v):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1)


def _plain_act(parts):
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
    return F.silu(gate) * up


def _liger_add_norm(x, residual, weight):
    total = residual + x
    return liger("rms_norm:LigerRMSNormFunction", total, weight, EPS)(), total


def _liger_turn(q, k, table):
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (t.transpose(0, 1) for t in _sides(table, q.dtype))
    q, k = LigerRopeFunction.apply(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


ONCHIP = Parts(lambda x, r, w: rms_norm(x, w, eps=EPS, residual=r), rotary, _onchip_attend, lambda parts: gated_act(parts[0]), tuple(JOINED))
TORCH = Parts(_plain_add_norm, _plain_turn, _sdpa, _plain_act)
LIGER = TORCH._replace(add_norm=_liger_add_norm, turn=_liger_turn, act=lambda parts: liger("swiglu:LigerSiLUMulFunction", *parts)())


class Fusion(NamedTuple):
    """What one of onchip's fusions is replaced by: other parts, and how often a block has it."""

    name: str
    undone: Parts
    times: int = 1


FUSIONS = {
    "onchip, norms undone": Fusion("norm", ONCHIP._replace(add_norm=_plain_add_norm), 2),
    "onchip, rotary undone": Fusion("rotary", ONCHIP._replace(turn=_plain_turn)),
    "onchip, attention undone": Fusion("attention", ONCHIP._replace(attend=_plain_attend)),
    "onchip, activation undone": Fusion("activation", ONCHIP._replace(act=_plain_act)),
    "onchip, q, k, v apart": Fusion("qkv", ONCHIP._replace(joined=("gate_up",))),
}


# ---- a block


def _products(x: Tensor, weights: dict[str, Tensor], name: str) -> Sequence[Tensor]:
    """One product, or one for each weight."""
    return (F.linear(x, weights[name]),) if name in weights else [F.linear(x, weights[part]) for part in JOINED[name]]


def _qkv(parts: Sequence[Tensor], sizes: tuple) -> tuple[Tensor, ...]:
    _, heads, kv_heads, dim, _ = sizes
    parts = parts[0].split([heads * dim, kv_heads * dim, kv_heads * dim], -1) if len(parts) == 1 else parts
    return tuple(x.unflatten(-1, (-1, dim)) for x in parts)


def block(parts: Parts, sizes: tuple, table: Tensor, x: Tensor, residual: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y, s = parts.add_norm(x, residual, weights["norm"])
    q, k, v = _qkv(_products(y, weights, "qkv"), sizes)
    out = parts.attend(*parts.turn(q, k, table), v)
    z, t = parts.add_norm(F.linear(out.flatten(1), weights["o"]), s, weights["norm_mlp"])
    return F.linear(parts.act(_products(z, weights, "gate_up")), weights["down"]), t


@dataclass(frozen=True, eq=False)
class Given:
    """x and residual [tokens, hidden], the weights, and the gradients of both results."""

    problem: Block
    x: Tensor
    residual: Tensor
    weights: dict[str, Tensor]
    table: Tensor
    d_out: tuple[Tensor, Tensor]
    on_host: bool = field(default=False)
    maths: bool = field(default=True)

    @property
    def cost(self) -> Cost:
        return self.problem.cost

    @property
    def tolerance(self) -> float:
        """A block in half precision rounds some ten times one after the other."""
        return 3e-2 if self.problem.dtype.itemsize == 2 else 1e-4

    def error(self, output: tuple[Tensor, ...], _ours) -> float:
        """||x - truth|| / ||truth|| of each result or gradient, the largest; the truth is torch's block in float32."""
        return reduce(larger, (distance(x, truth) for x, truth in zip(output, self._truth, strict=True)))

    @cached_property
    def _truth(self) -> tuple[Tensor, ...]:
        wide = {name: w.float() for name, w in self.weights.items()}
        exact = Given(self.problem, self.x.float(), self.residual.float(), wide, self.table, tuple(d.float() for d in self.d_out))
        return tuple(x.to(self.problem.dtype) for x in exact.call(TORCH).run())

    def call(self, parts: Parts, block: Callable = block) -> Call:
        """Both results, or in training the gradients of x, residual and each weight, those of a joined weight taken apart."""
        p, weights = self.problem, {name: w for name, w in self.weights.items() if not any(name in JOINED[whole] for whole in parts.joined)}
        weights |= {whole: torch.cat([self.weights[name] for name in JOINED[whole]]) for whole in parts.joined}
        if p.op == INFERENCE:
            return Call(lambda: block(parts, p.sizes, self.table, self.x, self.residual, weights))
        x, residual, *leaves = (t.detach().requires_grad_() for t in (self.x, self.residual, *weights.values()))
        named = dict(zip(weights, leaves, strict=True))

        def step():
            with torch.enable_grad():
                out = block(parts, p.sizes, self.table, x, residual, named)
            grads = torch.autograd.grad(out, [x, residual, *leaves], self.d_out)
            found = dict(zip(named, grads[2:], strict=True))
            for whole in parts.joined:
                found |= zip(JOINED[whole], found.pop(whole).split([len(self.weights[name]) for name in JOINED[whole]]), strict=True)
            return *grads[:2], *(found[name] for name in self.weights)

        return Call(step)


def given(p: Block, device: torch.device) -> Given:
    hidden, _, _, dim, _ = p.sizes
    x, residual, *d_out = (torch.randn(p.tokens, hidden, dtype=p.dtype, device=device) for _ in range(4))
    weights = {name: torch.randn(shape, dtype=p.dtype, device=device) * (shape[-1] ** -0.5 if len(shape) == 2 else 1) for name, shape in p.shapes.items()}
    return Given(p, x, residual, weights, rope_table(p.tokens, dim, 5e5, device=device), tuple(d_out))


def problems(device: torch.device, quick: bool) -> list[Block]:
    """Llama 8B and 8k tokens on a GPU; on a CPU a block of a few million weights."""
    if device.type == "cuda":
        return [Block(op, 8192, (4096, 32, 8, 128, 14_336), torch.bfloat16) for op in (TRAINING, INFERENCE)]
    return [Block(op, n, (256, 4, 2, 64, 896), torch.float32) for n in (64, 512)[: 1 if quick else 2] for op in (TRAINING, INFERENCE)]


# ---- who is timed


def peer(parts: Parts) -> Callable[[Given], Call]:
    return lambda inputs: inputs.call(parts)


def compiled(inputs: Given) -> Call:
    return inputs.call(TORCH, _compiled())


@cache
def _compiled() -> Callable:
    return torch.compile(block, dynamic=False)


# ---- what each fusion saves


class Saving(NamedTuple):
    """Bytes that a block moves more with a fusion undone, the seconds that they take at the bandwidth of a copy, and those that were measured."""

    fusion: str
    bytes: float
    predicted: float
    measured: float | None


def savings(row: dict, bandwidth: float) -> list[Saving]:
    fields, seconds = row["fields"], row["seconds"]
    dtype = next(dtype for dtype, name in SHORT.items() if name == fields["dtype"])
    p = Block(fields["op"], fields["tokens"], tuple(fields["sizes"]), dtype)
    found = []
    for name, fusion in FUSIONS.items():
        more = fusion.times * saved(p, fusion.name)
        timed = seconds[name] - seconds["onchip"] if name in seconds and "onchip" in seconds else None
        found.append(Saving(name.removeprefix("onchip, "), more, more / bandwidth, timed))
    return found


@cache
def saved(p: Block, fusion: str) -> float:
    """Bytes of torch's operators that a fusion stands for, each of which reads what it is given and writes what it makes, beyond those of the fusion."""
    hidden, heads, kv_heads, dim, mlp = p.sizes

    def moved(function: Callable, *shapes: tuple[int, ...]) -> int:
        return _moved(lambda *t: function(*t), [torch.empty(shape, dtype=p.dtype, device="meta") for shape in shapes], p.op == TRAINING)

    x, n = (p.tokens, hidden), p.tokens
    q, k = (n, heads, dim), (n, kv_heads, dim)
    if fusion == "qkv":
        apart, whole = [p.shapes[name] for name in JOINED["qkv"]], (sum(p.shapes[name][0] for name in JOINED["qkv"]), hidden)
        one = moved(lambda y, w: tuple(F.linear(y, w).split([s[0] for s in apart], -1)), x, whole)
        return moved(lambda y, *w: tuple(F.linear(y, part) for part in w), x, *apart) - one
    table = torch.empty(n, dim, device="meta")
    plain = {
        "norm": lambda: moved(_plain_add_norm, x, x, (hidden,)),
        "rotary": lambda: moved(lambda q, k: _plain_turn(q, k, table), q, k),
        "attention": lambda: moved(_plain_attend, q, k, k),
        "activation": lambda: moved(lambda both: _plain_act([both]), (n, 2 * mlp)),
    }[fusion]()
    return plain - sum(OPS[problem.op].cost(problem).bytes for problem in p.problems(fusion))


def _moved(function: Callable, inputs: list[Tensor], trained: bool) -> int:
    counter = _Counter()
    with torch.set_grad_enabled(trained), counter:
        leaves = [x.requires_grad_(trained) for x in inputs]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        if trained:
            torch.autograd.grad(out, leaves, [torch.empty_like(y) for y in out])
    return counter.bytes


class _Counter(TorchDispatchMode):
    """Adds up what torch's operators read and write; views move nothing, and of what is expanded each number is read once."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::_unsafe_view", "aten::detach", "aten::new_empty")):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.element_size() * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) for t in tensors)
        return out
