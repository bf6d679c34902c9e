"""Softmax and losses over a vocabulary in plain torch: the oracle in float64, and what a CPU runs."""

import math

import torch
from torch import Tensor

from onchip.core.losses import ENTROPY, LOG_SUM, TOP, WEIGHT, RowLoss
from onchip.core.problem import Rows, exact_of


def softmax(problem: Rows, config: None, x: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """Of x [..., width] / temperature, plus a mask or where it is set; a row with nothing left is 0, its logarithm -inf."""
    z = x.to(exact_of(x.dtype)) / temperature
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    nothing = z.amax(-1, keepdim=True) == -torch.inf
    y = z.log_softmax(-1) if "log" in problem.variant else z.softmax(-1)
    return y.masked_fill(nothing, -torch.inf if "log" in problem.variant else 0).to(x.dtype)


def softmax_backward(problem: Rows, config: None, y: Tensor, dy: Tensor, temperature: float) -> Tensor:
    """The gradient of x, from the result and its gradient; none where a logarithm is -inf."""
    exact = exact_of(y.dtype)
    p, g = y.to(exact), dy.to(exact)
    if "log" in problem.variant:
        g = g.masked_fill(p == -torch.inf, 0)
        d = g - p.exp() * g.sum(-1, keepdim=True)
    else:
        d = p * (g - (p * g).sum(-1, keepdim=True))
    return (d / temperature).to(y.dtype)


def _logits(logits: Tensor, x: RowLoss) -> Tensor:
    """z, in the exact dtype."""
    z = logits.to(exact_of(logits.dtype))
    return (x.softcap * torch.tanh(z / x.softcap) if x.softcap else z) / x.temperature


def _at(problem: Rows, targets: Tensor, x: RowLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which rows count, which have their target among these columns, which have no class as target; and the column, 0 where it is not here."""
    local, kept = targets - x.first, targets != x.ignore_index
    here = kept & (local >= 0) & (local < problem.width)
    return kept, here, kept & ((targets < 0) | (targets >= x.vocab)), torch.where(here, local, 0)


def cross_entropy(problem: Rows, config: None, logits: Tensor, targets: Tensor, x: RowLoss) -> Tensor:
    """Figures [6, rows] (core.losses.LOG_PROB ... WEIGHT), float32 or float64, of logits [rows, width] and targets [rows]."""
    z = _logits(logits, x)
    log_p, top = z.log_softmax(-1), z.amax(-1)
    top = top.masked_fill(top == -torch.inf, 0)  # of a rank's slice without a word that can be: logsumexp is -inf, not NaN
    kept, here, wrong, column = _at(problem, targets, x)
    picked = torch.where(here, log_p.gather(1, column[:, None])[:, 0], -torch.inf).masked_fill(wrong, torch.nan)
    weight = here.to(z.dtype) if x.class_weights is None else torch.where(here, x.class_weights.to(z.dtype)[column], 0)
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(z.dtype).min)).sum(-1) if "entropy" in problem.variant else torch.zeros_like(top)
    smooth = torch.zeros_like(top)
    if x.smoothing:
        smooth = -(log_p if x.class_weights is None else log_p * x.class_weights.to(z.dtype)).sum(-1)
    return torch.where(kept, torch.stack((picked, top, (z - top[:, None]).logsumexp(-1), entropy, smooth, weight)), 0)


def cross_entropy_backward(
    problem: Rows, config: None, logits: Tensor, targets: Tensor, stats: Tensor, g: Tensor, g_entropy: Tensor | None, x: RowLoss, out: Tensor
) -> Tensor:
    """The gradient of logits, written to `out`: of the loss by g [rows], of the entropy by g_entropy [rows]."""
    z = _logits(logits, x)
    kept, here, wrong, column = _at(problem, targets, x)
    log_p = z - stats[TOP, :, None] - stats[LOG_SUM, :, None]
    p, weight, total = log_p.exp(), stats[WEIGHT].masked_fill(wrong, torch.nan), x.vocab if x.total is None else x.total
    of_weights = g * (x.smoothing / x.vocab)
    of_target = g * (1 - x.smoothing) * weight
    d = p * (2 * x.z_loss * g * (stats[TOP] + stats[LOG_SUM]) + of_weights * total)[:, None]
    if g_entropy is not None:
        d -= torch.where(p > 0, p * (log_p + stats[ENTROPY, :, None]), 0) * g_entropy[:, None]
    if x.smoothing:
        d -= of_weights[:, None] * (1 if x.class_weights is None else x.class_weights)
    d += p.scatter_add_(1, column[:, None], torch.where(here, -1.0, 0.0).to(p.dtype)[:, None]) * of_target[:, None]
    if x.softcap:
        d *= 1 - (z * (x.temperature / x.softcap)).square()
    return out.copy_(torch.where(kept[:, None], d / x.temperature, 0))


def cross_entropy_in_place(problem: Rows, config: None, logits: Tensor, targets: Tensor, g: Tensor, x: RowLoss) -> Tensor:
    """Figures [6, rows]; the logits become the gradient of `sum g loss`."""
    stats = cross_entropy(problem, None, logits, targets, x)
    cross_entropy_backward(problem, None, logits, targets, stats, g, None, x, logits)
    return stats


def scale(problem: Rows, config: None, x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor, in place."""
    return x.mul_(factor)


def divergence(problem: Rows, config: None, student: Tensor, teacher: Tensor, counts: Tensor | None, beta: float, temperature: float) -> Tensor:
    """[6, rows]: of the student's logits and of the teacher's the maximum and logsumexp less that, the divergence, and what the student's part of it is."""
    z = [t.to(exact_of(t.dtype)) / temperature for t in (student, teacher)]
    q, p = (t.log_softmax(-1) for t in z)
    m = p if beta == 1 else q if beta == 0 else torch.logaddexp(q + math.log1p(-beta), p + math.log(beta))
    of_q, of_p = (torch.where(t.exp() == 0, 0, t.exp() * (t - m)).sum(-1) for t in (q, p))
    loss = of_p if beta == 0 else of_q if beta == 1 else beta * of_p + (1 - beta) * of_q
    top = [t.amax(-1) for t in z]
    stats = torch.stack((*(f for t, at in zip(z, top, strict=True) for f in (at, (t - at[:, None]).logsumexp(-1))), loss, of_q))
    return stats if counts is None else torch.where(counts, stats, 0)


def divergence_backward(
    problem: Rows, config: None, student: Tensor, teacher: Tensor, counts: Tensor | None, stats: Tensor, g: Tensor, beta: float, temperature: float, out: Tensor
) -> Tensor:
    """The gradient of the student's logits, by that of each row's divergence, g [rows]; written to `out`."""
    q, p = (t.to(stats.dtype) / temperature - top[:, None] - log_sum[:, None] for t, top, log_sum in ((student, *stats[:2]), (teacher, *stats[2:4])))
    if beta == 0:
        d = q.exp() - p.exp()
    else:
        m = p if beta == 1 else torch.logaddexp(q + math.log1p(-beta), p + math.log(beta))
        d = (1 if beta == 1 else 1 - beta) * torch.where(q.exp() == 0, 0, q.exp() * (q - m - stats[5, :, None]))
    d = d * (g / temperature)[:, None]
    return out.copy_(d if counts is None else torch.where(counts[:, None], d, 0))
