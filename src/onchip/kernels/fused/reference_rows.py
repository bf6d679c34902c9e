"""Activations, rotation, embeddings, adapters, dropout in plain torch: the oracle in float64, and what a CPU runs. Gradients are autograd's of the formula."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onchip.core import philox
from onchip.core.linear import Around, RowNorm
from onchip.core.low_rank import LowRank, Route
from onchip.core.problem import RankSum, Rope, Rows, exact_of
from onchip.core.ranks import Ranks
from onchip.kernels.fused.formulas import angles, normed, turn

ACT = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "mish": F.mish,
}


def gradients(formula: Callable, inputs: list[Tensor | None], d_out: Tensor) -> list[Tensor | None]:
    """Of each input that is there, in its dtype; the formula is computed in float32 or float64. Also inside an operator of torch.library."""
    exact = exact_of(d_out.dtype)
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        leaves = [None if x is None else x.detach().to(exact).requires_grad_() for x in inputs]
        found = iter(torch.autograd.grad(formula(*leaves), [x for x in leaves if x is not None], d_out.to(exact)))
    return [None if x is None else next(found).to(x.dtype).contiguous() for x in inputs]


# ---- activations


def activate(problem: Rows, config: None, x: Tensor, bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """act(x + bias), [..., width]."""
    return ACT[problem.variant.split()[0]](x if bias is None else x + bias).contiguous()


def gated_act(problem: Rows, config: None, x: Tensor, bias: Tensor | None = None, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """act(gate) * up, [..., width]; the activation is rounded to x's dtype before the product, which halves the time on a CPU."""
    act, *words = problem.variant.split()
    x = x if bias is None else x + bias
    gate, up = (x[..., ::2], x[..., 1::2]) if "interleaved" in words else x.chunk(2, -1)
    if act == "clipped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * (alpha * gate).sigmoid() * (up + 1)).contiguous()
    y = ACT[act](gate)
    return (y * up if y.requires_grad else y.mul_(up)).contiguous()


def activate_backward(problem: Rows, config: None, x: Tensor, bias: Tensor | None, alpha: float, limit: float, d_out: Tensor) -> list[Tensor | None]:
    """The gradients of x and bias."""
    return gradients(lambda x, bias: activate(problem, None, x, bias), [x, bias], d_out)


def gated_act_backward(problem: Rows, config: None, x: Tensor, bias: Tensor | None, alpha: float, limit: float, d_out: Tensor) -> list[Tensor | None]:
    """The gradients of x and bias."""
    return gradients(lambda x, bias: gated_act(problem, None, x, bias, alpha, limit), [x, bias], d_out)


# ---- rotation


def rotary(problem: Rope, config: None, q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [batch, len, heads, dim] and k [batch, len, kv_heads, dim] rotated; positions [batch, len], or None: 0, 1, 2, ... along len."""
    by = _angles(q, table, positions, problem)
    return tuple(_rotated(x, by, problem) for x in (q, k))


def rotary_backward(problem: Rope, config: None, q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of q and k from those of the rotated: turned back."""
    *cos, across = _angles(q, table, positions, problem)
    by = *cos, across.conj_physical() if across.is_complex() else -across
    return tuple(_rotated(x, by, problem) for x in (q, k))


def _angles(q: Tensor, table: Tensor, positions: Tensor | None, p: Rope) -> tuple[Tensor, ...]:
    """Of each token, [batch or 1, len, 1, half]."""
    rows = table[: q.shape[1]].unsqueeze(0) if positions is None else F.embedding(positions, table)  # not table[positions], which counts from the end below 0
    return angles(rows.unsqueeze(2), exact_of(q.dtype), p)


def _rotated(x: Tensor, by: tuple[Tensor, ...], p: Rope) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    turn(y, x, by, p)
    return y


# ---- embeddings


def embedding(problem: Rows, config: None, ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight; NaN where an id is none of its rows."""
    known = (ids >= 0) & (ids < len(weight))
    rows = F.embedding(torch.where(known, ids, 0), weight)
    if ids.device.type == "cpu" and not torch._C._are_functorch_transforms_active() and known.all():  # on a GPU it would cost a wait to know
        return rows
    return rows.masked_fill(~known.unsqueeze(-1), torch.nan)


def embedding_backward(problem: Rows, config: None, ids: Tensor, d_out: Tensor, vocab: int, padding: int) -> Tensor:
    """The gradient of weight [vocab, width]: sums in the order of the tokens."""
    exact = exact_of(d_out.dtype)
    ids, d_out = ids.reshape(-1), d_out.reshape(ids.numel(), problem.width).to(exact)  # a width of 0 leaves -1 open
    counted = (ids >= 0) & (ids < vocab) & (ids != padding)
    total = torch.zeros(vocab, problem.width, dtype=exact, device=d_out.device)
    return total.index_add_(0, torch.where(counted, ids, 0), d_out.masked_fill(~counted.unsqueeze(1), 0.0))


# ---- products


def skinny_linear(problem: Rows, config: None, x: Tensor, weight: Tensor, around: Around) -> Tensor:
    """act(norm(x) W^T + bias) + residual, [rows, out], step by step, each rounded to x's dtype."""
    act = [word for word in problem.variant.split()[2:] if word not in ("norm", "bias", "residual")]
    if around.norm is not None:
        x = normed(x, *around.norm)
    y = F.linear(x, weight, around.bias)
    if act:
        y = gated_act(problem._replace(variant=" ".join(act)), None, y, None, around.alpha, around.limit)
    return y if around.residual is None else around.residual + y


# ---- adapters


def low_rank(problem: Rows, config: None, y: Tensor, x: Tensor, low: LowRank, route: Route) -> Tensor:
    """y + B A x of each row's adapter, in place. A CPU takes an adapter's rows out; elsewhere that would be a wait, and all rows are computed."""
    exact, rank = exact_of(x.dtype), low.b.shape[2]
    for i, (a, b) in enumerate(zip(low.a, low.b, strict=True)):
        mine = route.adapters == i
        rows = mine.nonzero()[:, 0] if x.device.type == "cpu" else slice(None)
        if x.device.type == "cpu" and not len(rows):
            continue
        t = F.linear(x[rows], a)
        pieces = [F.linear(t[:, n * rank :][:, :rank], part) for n, part in enumerate(b.split(low.parts))]
        more = y[rows].to(exact) + torch.cat(pieces, 1)
        y[rows] = torch.where(mine[rows][:, None], more, y[rows]).to(y.dtype)
    return y


# ---- dropout


def dropout_add(problem: Rows, config: None, x: Tensor, residual: Tensor | None, p: float, state: Tensor) -> Tensor:
    """x / (1 - p) where it is kept, 0 elsewhere, plus the residual."""
    exact = exact_of(x.dtype)
    y = torch.where(philox.kept_elements(p, state, x.numel()).view(x.shape), x.to(exact) * (1 / (1 - p)), 0.0)
    return (y if residual is None else y + residual).to(x.dtype)


# ---- Hadamard


def hadamard(problem: Rows, config: None, x: Tensor) -> Tensor:
    """x H / sqrt(width): log2(width) steps of sums and differences of halves."""
    y = x.to(exact_of(x.dtype))
    step = 1
    while step < problem.width:
        a, b = y.reshape(-1, problem.width // (2 * step), 2, step).unbind(2)
        y, step = torch.stack((a + b, a - b), 2), 2 * step
    return (y.reshape(x.shape) * problem.width**-0.5).to(x.dtype)


def sum_ranks(problem: RankSum, config: None, x: Tensor, ranks: Ranks, residual: Tensor | None, norm: RowNorm | None) -> Tensor | tuple[Tensor, Tensor]:
    """By the group's all-reduce, in place."""
    dist.all_reduce(x, group=ranks.group)
    total = x if residual is None else x + residual
    if norm is None:
        return total
    y = normed(total, *norm)
    return y if residual is None else (y, total)
