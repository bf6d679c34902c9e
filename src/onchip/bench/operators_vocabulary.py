"""Softmax, losses and sampling over a vocabulary, as the suite of row operators asks for them."""

import functools
import importlib
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.row_operator import ENDS, VOCAB, Operator, draw, liger, of, quack, same
from onchip.core.problem import Cost
from onchip.ops.divergence import divergence
from onchip.ops.linear_losses import linear_cross_entropy, token_log_probs
from onchip.ops.losses import cross_entropy
from onchip.ops.sampling import Draft, Penalties, Sampling, adjust_logits, log_probs, sample, verify
from onchip.ops.softmax import log_softmax, softmax

HIDDEN = 4096  # columns of a head's weight
JOINT = (0.8, 50, 0.9, 0.05)  # temperature, top-k, top-p, min-p
PLACES = 4  # tokens of a draft


# ---- losses


def _targets(rows, width, dtype, device):
    return torch.randn(rows, width, dtype=dtype, device=device), torch.randint(width, (rows,), device=device)


def _head(rows, width, dtype, device):
    hidden, weight = torch.randn(rows, HIDDEN, dtype=dtype, device=device), torch.randn(width, HIDDEN, dtype=dtype, device=device) / HIDDEN**0.5
    return hidden, weight, torch.randint(width, (rows,), device=device)


def _products(count: int, passes: int) -> Callable[..., Cost]:
    """Products of hidden states and a head, and passes over both."""
    return lambda rows, width, dtype: Cost(2 * count * rows * width * HIDDEN, passes * (rows + width) * HIDDEN * dtype.itemsize)


def _both(rows, width, dtype) -> Cost:
    """Cross-entropy, forward and backward: logits read twice, and their gradient written."""
    return Cost(8 * rows * width, 3 * rows * width * dtype.itemsize)


def _plain_divergence(x, teacher):
    return F.kl_div(x.float().log_softmax(-1), teacher.float().log_softmax(-1), log_target=True, reduction="batchmean")


LOGITS = ((8192, VOCAB),)
LOSSES = {
    "softmax": Operator(
        of("softmax"), draw(same), softmax, lambda x: x.softmax(-1), of("softmax_backward"), widths=ENDS, small=True,
        peers={"Liger": lambda x: liger("softmax:LigerSoftmaxFunction", x), "quack": quack("softmax")},
    ),
    "log_softmax": Operator(of("softmax", "log"), draw(same), log_softmax, lambda x: x.log_softmax(-1), of("softmax_backward", "log"), widths=(65_536,)),
    "cross_entropy": Operator(
        of("cross_entropy"), _targets, cross_entropy, lambda x, t: F.cross_entropy(x.float(), t), of("cross_entropy_backward"), step=_both, sizes=LOGITS,
        peers={"quack": quack("cross_entropy", reduction="mean")},
    ),
    "linear_cross_entropy": Operator(
        None, _head, linear_cross_entropy, lambda h, w, t: F.cross_entropy((h @ w.t()).float(), t), None, (0, 1), _products(3, 2), sizes=LOGITS,
        peers={"Liger": lambda *args: liger("fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction", *args)},
    ),
    "token_log_probs": Operator(
        _products(1, 1), _head, lambda h, w, t: token_log_probs(h, w, t).log_prob,
        lambda h, w, t: (h @ w.t()).float().log_softmax(-1).gather(1, t.unsqueeze(1)).squeeze(1), sizes=LOGITS,
    ),
    "divergence": Operator(
        of("divergence", "forward"), draw(same, same), lambda x, z: divergence(x, z, beta=0.0), _plain_divergence,
        of("divergence_backward", "forward"), sizes=((4096, VOCAB),),
    ),
}  # fmt: skip


# ---- from logits to tokens


@functools.cache
def _how(rows: int, device: torch.device, setting: tuple) -> Sampling:
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    fields = (torch.full((rows,), x, dtype=dtype, device=device) for x, dtype in zip(setting, kinds, strict=True))
    return Sampling(*fields, torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device))


def _flashinfer_sample(x):
    """Without min-p, which FlashInfer has in a function of its own."""
    temperature, k, p, _ = JOINT
    sampling = importlib.import_module("flashinfer.sampling")
    return lambda: sampling.top_k_top_p_sampling_from_probs(torch.softmax(x.float() / temperature, -1), k, p, filter_apply_order="top_k_first")


def _kept(x, temperature: float, k: int, p: float, min_p: float):
    """The probabilities of what is kept; by sorting where p asks for it."""
    x = x.float() / temperature
    if k:
        x = x.masked_fill(x < x.topk(min(k, x.shape[-1]), -1).values[..., -1:], -torch.inf)
    if p < 1:
        ranked, order = x.sort(-1, descending=True)
        weights = ranked.softmax(-1)
        x = torch.empty_like(x).scatter_(-1, order, ranked.masked_fill(weights.cumsum(-1) - weights >= p, -torch.inf))
    weights = x.softmax(-1)
    if min_p:
        weights = weights.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), 0)
    return weights / weights.sum(-1, keepdim=True)


def _drawn(weights):
    """The quotient with exponential noise."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def _plain_sample(x, *setting):
    return _drawn(_kept(x, *setting))


def _sampled(setting: tuple, peers: Mapping = {}) -> Operator:
    return Operator(
        of("sample"), draw(same), lambda x: sample(x, _how(len(x), x.device, setting)), lambda x: _plain_sample(x, *setting),
        peers=peers, sizes=BATCHES, drawn=True,
    )  # fmt: skip


def _counted(rows, width, dtype, device):
    return torch.randn(rows, width, dtype=dtype, device=device), torch.randint(3, (rows, width), dtype=torch.int32, device=device)


@functools.cache
def _rates(rows: int, device: torch.device) -> Tensor:
    """Repetition, presence and frequency, [3, rows]."""
    return torch.tensor([[1.1], [0.1], [0.2]], device=device).repeat(1, rows)


def _plain_penalties(x, counts):
    repetition, presence, frequency = _rates(len(x), x.device).unsqueeze(-1)
    z, there = x.float(), counts > 0
    z = torch.where(there, torch.where(z > 0, z / repetition, z * repetition), z)
    return (z - presence * there - frequency * counts).to(x.dtype)


def _draft(drawn: bool) -> Callable:
    """Logits of a chain of PLACES tokens and of the place after it, the tokens, and what they were drawn from."""

    def make(rows, width, dtype, device):
        logits = torch.randn(rows, PLACES + 1, width, dtype=dtype, device=device)
        tokens = torch.randint(width, (rows, PLACES), device=device)
        return logits, tokens, *([torch.full((rows, PLACES, width), 1 / width, device=device)] if drawn else [])

    return make


def _plain_verify(logits, tokens, probabilities=None):
    """The token after what is accepted: drawn at each place and compared, or by the ratio of probabilities, then from what is left of them."""
    if probabilities is None:
        drawn = _plain_sample(logits, *JOINT)
        return drawn.gather(1, (drawn[:, :-1] == tokens).long().cumprod(-1).sum(-1, keepdim=True)).squeeze(1)
    p, at = _kept(logits, *JOINT), tokens.unsqueeze(-1)
    ratio = p[:, :-1].gather(-1, at) / probabilities.gather(-1, at)
    count = (torch.rand_like(ratio) < ratio).squeeze(-1).long().cumprod(-1).sum(-1)
    q = torch.cat((probabilities, torch.zeros_like(probabilities[:, :1])), 1)
    return _drawn((p - q)[torch.arange(len(p), device=p.device), count].clamp(min=0))


def _verified(drawn: bool) -> Operator:
    def cost(rows, width, dtype):
        logits = rows * (PLACES + 1) * width
        return Cost(8 * logits, logits * dtype.itemsize + drawn * rows * width * 4)

    return Operator(
        cost, _draft(drawn), lambda x, tokens, q=None: verify(x, Draft(tokens, q), _how(len(x), x.device, JOINT)).token, _plain_verify,
        sizes=((16, VOCAB),), drawn=True,
    )  # fmt: skip


BATCHES = ((64, VOCAB), (1, VOCAB))
SAMPLING = {
    "sample, joint": _sampled(JOINT, {"FlashInfer": _flashinfer_sample}),
    "sample, top-p": _sampled((1.0, 0, 0.9, 0.0)),
    "sample, all": _sampled((1.0, 0, 1.0, 0.0)),
    "log_probs": Operator(
        of("log_probs", "top 20"), _targets, lambda x, t: log_probs(x, t, 20)[:2],
        lambda x, t: (x.float().log_softmax(-1).gather(1, t.unsqueeze(1)).squeeze(1), x.float().log_softmax(-1).topk(20).values), sizes=BATCHES[:1],
    ),
    "adjust_logits": Operator(
        of("adjust_logits", "penalties"), _counted, lambda x, counts: adjust_logits(x, penalties=Penalties(*_rates(len(x), x.device), counts)),
        _plain_penalties, sizes=BATCHES[:1],
    ),
    "verify": _verified(False),
    "verify, drawn": _verified(True),
}  # fmt: skip
