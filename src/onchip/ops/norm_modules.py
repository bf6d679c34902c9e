"""The norms as modules: their parameters beside the functions, in place of torch's of the same names."""

import torch
from torch import Tensor, nn

from onchip.core.norms import Residual
from onchip.ops.group_norm import group_norm
from onchip.ops.norm import Epilogue, layer_norm, rms_norm


class RMSNorm(nn.Module):
    """`rms_norm` with a weight `[width]`, or `[heads, width]`. With `offset` the weight is stored around 0 (Gemma: 1)."""

    def __init__(self, *shape: int, eps: float = 1e-6, offset: float = 0.0, device=None, dtype=None):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full(shape, 1.0 - offset, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | Residual | None = None, after: Epilogue | None = None):
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, residual=residual, after=after)


class LayerNorm(nn.Module):
    """`layer_norm` with a weight and a bias `[width]`, or without (`affine=False`: adaptive norms)."""

    def __init__(self, width: int, *, eps: float = 1e-5, affine: bool = True, bias: bool = True, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if affine and bias else None

    def forward(self, x: Tensor, residual: Tensor | Residual | None = None, after: Epilogue | None = None):
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, after=after)


class GroupNorm(nn.Module):
    """`group_norm` with a weight and a bias `[channels]`, and the activation that follows."""

    def __init__(self, groups: int, channels: int, *, act: str = "", eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.groups, self.act, self.eps = groups, act, eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.groups, self.weight, self.bias, act=self.act, eps=self.eps)
