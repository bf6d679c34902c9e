"""Arguments of operators as they come."""

import torch
from torch import Tensor


def refuse_gradients(name: str, way_out: str, *tensors: Tensor | None) -> None:
    """For what has none, where they would be lost in silence."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(f"{name}: gradients are not implemented; call it under torch.no_grad(), or {way_out}")
