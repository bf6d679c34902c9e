"""How far a result is from the truth."""

import math

from torch import Tensor


def distance(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||, in float32."""
    truth = truth.float()
    return ((x.float() - truth).norm() / truth.norm()).item()


def larger(a: float, b: float) -> float:
    """NaN where one of them is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Of several results that come together."""
    return output[0] if isinstance(output, (tuple, list)) else output
