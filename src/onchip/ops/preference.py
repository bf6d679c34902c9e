"""Losses of preferences and of rewards: short formulas over log-probabilities, which `token_log_probs` makes without the logits in memory.

>>> chosen, rejected = onchip.sequence_log_probs(hidden, weight, targets).chunk(2)  # the pairs' chosen answers, then the rejected ones
>>> onchip.dpo(onchip.Pair(chosen, rejected), onchip.Pair(*reference)).mean().backward()

Gradients are autograd's through the formula, and the fused product's below it. What comes back is a number for each pair or answer, but for `grpo`.
beta, margin and weights are numbers, or float tensors of one or of one a row, which get gradients and are not looked at; those of a Policy are numbers.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.arguments import check_count, check_numbers, check_pair, check_tensors, truth
from onchip.core.losses import LossTerms
from onchip.ops.linear_losses import token_log_probs

AVERAGES = ("sequence", "tokens", "length")
RATIOS = ("token", "sequence")
DPO_LOSSES = {  # of the reward margin, before beta
    "sigmoid": lambda margin, beta: -F.logsigmoid(beta * margin),
    "hinge": lambda margin, beta: F.relu(1 - beta * margin),
    "ipo": lambda margin, beta: (margin - 1 / (2 * beta)).square(),
}


class Pair(NamedTuple):
    """Log-probabilities [pairs] of the answers that were preferred and of the others, under one model."""

    chosen: Tensor
    rejected: Tensor


class Policy(NamedTuple):
    """How a policy gradient over groups of answers is clipped and averaged; its relatives are values of this.

    clip      how far below and above 1 the ratio to the old policy counts, each 0 or more.
    beta      weight of the divergence from the reference, `exp(d) - d - 1` of `d = reference - log p` (Schulman's k3, 2020).
    average   "sequence": over each answer's tokens, then over answers; "tokens": over all tokens; "length": over answers times `length`.
    ratio     "token", or "sequence": the geometric mean over the answer's tokens.
    length    of an answer at most, for "length"; 0: the width of log_prob.
    """

    clip: tuple[float, float] = (0.2, 0.2)
    beta: float = 0.0
    average: str = "sequence"
    ratio: str = "token"
    length: int = 0


GRPO = Policy()  # Shao et al., 2024 (DeepSeekMath); with beta=0.04 there
BNPO = Policy(average="tokens")
DAPO = Policy(clip=(0.2, 0.28), average="tokens")  # Yu et al., 2025
DR_GRPO = Policy(average="length")  # Liu et al., 2025; advantages without their division by the group's deviation
GSPO = Policy(clip=(3e-4, 4e-4), ratio="sequence")  # Zheng et al., 2025


def sequence_log_probs(
    hidden: Tensor,  # [answers, len, dim]
    weight: Tensor,  # [vocab, dim]
    targets: Tensor,  # [answers, len] int64
    terms: LossTerms = LossTerms(),
    *,
    bias: Tensor | None = None,  # [vocab]
    mean: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """The log-probability of each answer, float32 [answers]: the sum over its tokens that are not ignored, or their mean (NaN of none)."""
    mean = truth("sequence_log_probs", "mean", mean)
    log_prob = token_log_probs(hidden, weight, targets, terms, bias=bias, kernel=kernel).log_prob.sum(-1)
    return log_prob / (targets != terms.ignore_index).sum(-1) if mean else log_prob


def dpo(policy: Pair, reference: Pair, *, beta: float | Tensor = 0.1, smoothing: float = 0.0, loss: str = "sigmoid") -> Tensor:
    """Direct preference optimisation, [pairs] (Rafailov et al., 2023): `-log sigmoid(beta m)`, m the log-ratio of chosen to rejected over the reference's.

    smoothing   the share of labels that are turned round (cDPO; Mitchell, 2023).
    loss        "sigmoid"; "hinge", `relu(1 - beta m)` (SLiC; Zhao et al., 2023); "ipo", `(m - 1 / 2 beta)^2` of mean log-probabilities (Azar et al., 2023).
    """
    policy, reference = _pair("dpo", policy), _pair("dpo", reference)
    beta = _check("dpo", beta, *policy, *reference)
    if loss not in (*DPO_LOSSES,):  # a list is one of no dict
        raise ValueError(f"dpo: loss={loss!r} is not one of {', '.join(DPO_LOSSES)}")
    check_numbers("dpo", smoothing=smoothing)
    if not 0 <= smoothing <= 1 or (loss == "ipo" and not isinstance(beta, Tensor) and not beta):
        raise ValueError(f"dpo: smoothing is {smoothing}, beta {beta}; give 0 to 1, and more than 0 where the loss is 'ipo'")
    smoothing = float(smoothing)
    margin, of = (policy.chosen - policy.rejected) - (reference.chosen - reference.rejected), DPO_LOSSES[loss]
    return (1 - smoothing) * of(margin, beta) + smoothing * of(-margin, beta) if smoothing else of(margin, beta)


def simpo(policy: Pair, *, beta: float | Tensor = 2.0, margin: float | Tensor = 1.0) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected) - margin)` of mean log-probabilities, [pairs], without a reference (SimPO; Meng et al., 2024)."""
    policy = _pair("simpo", policy)
    beta = _check("simpo", beta, *policy)
    margin = _factor("simpo", policy.chosen, None, margin=margin)
    return -F.logsigmoid(beta * (policy.chosen - policy.rejected) - margin)


def cpo(policy: Pair, nll: Tensor, *, beta: float | Tensor = 0.1, weight: float | Tensor = 1.0) -> Tensor:
    """Contrastive preference optimisation, [pairs] (Xu et al., 2024): `-log sigmoid(beta (chosen - rejected)) + weight nll`, nll that of the chosen answers."""
    policy = _pair("cpo", policy)
    beta = _check("cpo", beta, *policy, nll)
    weight = _factor("cpo", nll, None, weight=weight)
    return -F.logsigmoid(beta * (policy.chosen - policy.rejected)) + weight * nll


def orpo(policy: Pair, nll: Tensor, *, beta: float | Tensor = 0.1) -> Tensor:
    """Odds-ratio preference optimisation, [pairs] (Hong et al., 2024): `nll - beta log sigmoid(log odds(chosen) - log odds(rejected))`.

    Of mean log-probabilities below 0: `log odds(l) = l - log(1 - exp l)`.
    """
    policy = _pair("orpo", policy)
    beta = _check("orpo", beta, *policy, nll)
    return nll - beta * F.logsigmoid(_log_odds(policy.chosen) - _log_odds(policy.rejected))


def _log_odds(log_p: Tensor) -> Tensor:
    """log p - log(1 - p), to the last digits near p = 0 and near p = 1; of p = 1, to which log p is rounded, as of the nearest number below."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    near_one = log_p > -math.log(2)
    return log_p - torch.where(near_one, (-torch.expm1(log_p.clamp(min=-1))).log(), torch.log1p(-log_p.clamp(max=-0.5).exp()))


def kto(
    policy: Tensor,  # [answers]
    reference: Tensor,  # [answers]
    desirable: Tensor,  # [answers] bool
    divergence: Tensor,  # []
    *,
    beta: float | Tensor = 0.1,
    weights: tuple[float | Tensor, float | Tensor] | Tensor = (1.0, 1.0),
) -> Tensor:
    """Kahneman-Tversky optimisation of answers that were liked or not, [answers] (Ethayarajh et al., 2024).

        `w (1 - sigmoid(beta (r - z)))` of desirable answers, `w (1 - sigmoid(beta (z - r)))` of others;  r = policy - reference

    divergence   z, the policy's from the reference on answers of other prompts: taken from 0 up, without gradients.
    weights      w of desirable answers and of others, each 0 or more.
    """
    beta = _check("kto", beta, policy, reference)
    if not isinstance(weights, (tuple, list, Tensor)) or (isinstance(weights, Tensor) and not weights.ndim) or len(weights) != 2:
        raise TypeError(f"kto: weights is {weights!r:.60}; give two numbers, or two tensors")
    weights = [_factor("kto", policy, 0, **{f"weights[{n}]": weight}) for n, weight in enumerate(weights)]
    check_tensors("kto", policy=policy, desirable=desirable, divergence=divergence)
    if desirable.dtype != torch.bool or desirable.shape != policy.shape:
        raise ValueError(f"kto: desirable is {desirable.dtype} {list(desirable.shape)}; give bools {list(policy.shape)}")
    if divergence.numel() != 1:
        raise ValueError(f"kto: divergence is {list(divergence.shape)}; give one number")
    gain = beta * (policy - reference - divergence.detach().clamp(min=0))
    return torch.where(desirable, weights[0] * torch.sigmoid(-gain), weights[1] * torch.sigmoid(gain))


def grpo(
    log_prob: Tensor,  # [answers, len]
    old: Tensor,  # [answers, len]
    advantages: Tensor,  # [answers], or [answers, len]
    counts: Tensor,  # [answers, len] bool
    how: Policy = GRPO,
    *,
    reference: Tensor | None = None,  # [answers, len]
) -> Tensor:
    """The clipped policy gradient over groups of answers, one number: `-min(r A, clip(r) A) + beta d`, `r = p / p_old`, averaged as `how` says.

    A ratio is clipped before it is computed, so that one that no float holds costs nothing where it is cut off; where it counts (A below 0), it is inf.
    how      GRPO, or one of its relatives BNPO, DAPO, DR_GRPO, GSPO, or a Policy of your own.
    counts   the tokens that the model wrote; what other places hold is not looked at. Of no answers, and of no tokens, the loss is 0.
    """
    if not isinstance(how, Policy):
        raise TypeError(f"grpo: how is a {type(how).__name__}; give GRPO, or a Policy")
    check_pair("grpo", 0, clip=how.clip)
    check_count("grpo", 0, length=how.length)
    check_numbers("grpo", 0, beta=how.beta)
    beta = _check("grpo", how.beta, log_prob, old, *([] if reference is None else [reference]))
    check_tensors("grpo", log_prob=log_prob, advantages=advantages, counts=counts)
    advantages = advantages.unsqueeze(-1) if advantages.ndim == log_prob.ndim - 1 else advantages
    one = advantages.shape == (*log_prob.shape[:-1], 1)  # not by `in`, which does not know symbols
    if counts.dtype != torch.bool or counts.shape != log_prob.shape or not (one or advantages.shape == log_prob.shape):
        raise ValueError(
            f"grpo: counts is {counts.dtype} {list(counts.shape)}, advantages {list(advantages.shape)}; give bools {list(log_prob.shape)}, and one an answer"
        )
    if how.average not in AVERAGES or how.ratio not in RATIOS:
        raise ValueError(f"grpo: average={how.average!r}, ratio={how.ratio!r}; give one of {', '.join(AVERAGES)}, and one of {', '.join(RATIOS)}")
    if how.beta and reference is None:
        raise ValueError(f"grpo: beta is {how.beta} and there is no reference; give its log-probabilities, or beta=0")
    log_prob = log_prob.masked_fill(~counts, 0)
    advantages = advantages.masked_fill(~counts, 0) if advantages.shape == counts.shape else advantages
    change = log_prob - old.masked_fill(~counts, 0)
    tokens = counts.sum(-1, keepdim=True).clamp(min=1)
    if how.ratio == "sequence":
        change = change.sum(-1, keepdim=True) / tokens
    below, above = how.clip
    lowest, highest = math.log1p(-below) if below < 1 else -math.inf, math.log1p(above)
    loss = -torch.where(advantages < 0, change.clamp(min=lowest), change.clamp(max=highest)).exp() * advantages
    if beta:
        d = reference.masked_fill(~counts, 0) - log_prob
        loss = loss + beta * (torch.expm1(d) - d)
    loss = torch.where(counts, loss, 0)
    if how.average == "sequence":
        each = loss.sum(-1, keepdim=True) / tokens
        return each.sum() / max(each.numel(), 1)
    return loss.sum() / (counts.sum().clamp(min=1) if how.average == "tokens" else max(len(loss) * (how.length or loss.shape[-1]), 1))


def _pair(name: str, given: Pair) -> Pair:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{name}: a {type(given).__name__} is no pair of log-probabilities; give Pair(chosen, rejected)")
    return Pair(*given)


def _check(name: str, beta: float | Tensor, *log_probs: Tensor) -> float | Tensor:
    """beta, as `_factor`."""
    check_tensors(name, **{f"log-probabilities {n}": t for n, t in enumerate(log_probs, 1)})
    if odd := [str(t.dtype) for t in log_probs if not t.is_floating_point()]:
        raise ValueError(f"{name}: log-probabilities are {', '.join(odd)}; give floats")
    shapes = [list(t.shape) for t in log_probs]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name}: log-probabilities are {', '.join(map(str, shapes))}; they must be of one shape")
    beta = _factor(name, log_probs[0], 0, beta=beta)
    if not isinstance(beta, Tensor) and beta == math.inf:
        raise ValueError(f"{name}: beta is {beta}; give 0 or more, but a number")
    return beta


def _factor(name: str, like: Tensor, least: float | None, **given: float | Tensor) -> float | Tensor:
    """A number, `least` or more; or a tensor, one or one a row: it keeps its gradient, and nobody waits to look at what it holds."""
    ((what, factor),) = given.items()
    if not isinstance(factor, Tensor):
        check_numbers(name, least, **given)
        return float(factor)  # numpy's would make arrays of tensors
    check_tensors(name, **{"log-probabilities 1": like}, **given)
    if not factor.is_floating_point() or (factor.numel() != 1 and factor.shape != like.shape):
        raise ValueError(f"{name}: {what} is {factor.dtype} {list(factor.shape)}; give a number, or floats [] or {list(like.shape)}")
    return factor.reshape(()) if factor.numel() == 1 else factor
