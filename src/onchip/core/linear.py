"""What may stand around a product with a weight, so that one kernel does all of it."""

from typing import NamedTuple

from torch import Tensor


class RowNorm(NamedTuple):
    """RMSNorm of the rows that are multiplied: `x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

    weight: Tensor  # [in]
    eps: float = 1e-6
    offset: float = 0.0


class Around(NamedTuple):
    """The tensors and numbers of `act(norm(x) W^T + bias) + residual` beside x and W, as kernels get them; the Problem says which are there.

    bias   [out], of a gated product [2 out].      residual   [rows, out].      alpha, limit   of a clipped gate.
    constant   W, the norm's weight and the bias may be read before kernels launched earlier are done.
    """

    norm: RowNorm | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    constant: bool = False
