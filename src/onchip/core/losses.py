"""What a loss over a vocabulary asks for beside its logits and targets."""

from typing import NamedTuple

from torch import Tensor

# Rows of the figures of tokens, [6, tokens]. logsumexp(z) is TOP + LOG_SUM: apart, so that a large part common to all logits costs no digits.
LOG_PROB, TOP, LOG_SUM, ENTROPY, SMOOTH, WEIGHT = range(6)


class Shard(NamedTuple):
    """One rank's slice of the vocabulary, as tensor-parallel heads have it: columns `first` and on, of `vocab` in all.

    group   a `torch.distributed` process group whose slices together are the vocabulary; each rank calls with the same targets.
    """

    group: object
    first: int
    vocab: int


class LossTerms(NamedTuple):
    """The terms of a cross-entropy over `z = softcap(logits) / temperature`.

        loss = -(1 - smoothing) w[t] log p[t] - smoothing / V sum_j w[j] log p[j] + z_loss logsumexp(z)^2

    smoothing       share of the uniform distribution in the target (Szegedy et al., 2016), 0 to 1.
    z_loss          weight of the squared log-partition (PaLM; Chowdhery et al., 2022).
    softcap         `cap tanh(logits / cap)` (Gemma 2, 2024); 0: none.        temperature   1e-30 to 1e30.
    class_weights   float32 [V] (of a shard: its slice), or None: ones.       ignore_index  a target with this value counts nothing.
    shard           where the logits are a slice of the vocabulary.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    temperature: float = 1.0
    class_weights: Tensor | None = None
    ignore_index: int = -100
    shard: Shard | None = None


class RowLoss(NamedTuple):
    """The same as kernels get it: the logits are columns `first` and on, of `vocab`; `total`: the sum of all class weights, where there are some."""

    smoothing: float
    z_loss: float
    softcap: float
    temperature: float
    ignore_index: int
    first: int
    vocab: int
    class_weights: Tensor | None = None  # [width]
    total: Tensor | None = None  # []
