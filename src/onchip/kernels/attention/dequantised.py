"""Attention over numbers in e4m3 for a kernel in plain torch, which has no products of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.core.problem import Attention, Operands
from onchip.core.scales import Quantised


def prefill_from_e4m3(prefill: Callable, p: Attention, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """What a kernel's `prefill`, run in float32, makes of q, k and v: bfloat16, and LSE."""
    for name, scale in zip("qkv", x.scales, strict=True):
        if scale.is_cpu and (wrong := scale[scale <= 0]).numel():  # NaN, of what was NaN before, goes where it should
            raise ValueError(f"attention: a scale of {name} is {wrong.min().item():g}; all are to be positive")
    q, k, v = (Quantised(*given).dequantised() for given in zip((q, k, v), x.scales, x.sources or (None,) * 3, strict=True))
    out, lse = prefill(p._replace(dtype=torch.float32), None, q, k, v, x._replace(scales=None, sources=None), True)
    return (out.bfloat16(), lse) if return_lse else out.bfloat16()


def backward_from_e4m3(backward: Callable, p: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse, x: Operands):
    """What a kernel's `backward`, run in float32, makes of q, k and v: gradients of the numbers that they stand for, in float32."""
    q, k, v = (Quantised(t, scale).dequantised() for t, scale in zip((q, k, v), x.scales, strict=True))
    return backward(p._replace(dtype=torch.float32), None, q, k, v, out.float(), lse, d_out.float(), d_lse, x._replace(scales=None))
