"""Attention over numbers in e4m3 for a kernel in plain torch, which has no products of them; and a latent cache in e4m3 as numbers, for any kernel.

A token of that is 656 bytes: 512 columns in e4m3, four scales in float32, one for each 128 of these columns, and 64 columns more in bfloat16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.core.problem import E4M3, Attention, Operands
from onchip.core.scales import Quantised

BYTES, WIDTH, VALUES, TILE = 656, 576, 512, 128  # of a token: bytes, columns, those that are its value, those that share a scale


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


# ---- a latent cache


def as_numbers(cache, dtype: torch.dtype):
    """A cache whose pages are those that a packed one's sequences use, as numbers: for 656 bytes read, 1,152 more are written, and read again."""
    packed, table = cache.k, cache.page_table
    used = torch.arange(table.shape[1], device=table.device) * packed.shape[1] < cache.lengths[:, None]
    latent = numbers(packed[torch.where(used, table, 0).flatten().long()]).to(dtype)
    return cache._replace(k=latent, v=latent[..., :VALUES], page_table=torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape))


def numbers(packed: Tensor) -> Tensor:
    """uint8 [..., 656] as bfloat16 [..., 576]: each product in float32, rounded once."""
    codes, scale, rope = (part.contiguous() for part in packed.split((VALUES, VALUES // TILE * 4, (WIDTH - VALUES) * 2), -1))
    values = codes.view(E4M3).float().unflatten(-1, (-1, TILE)) * scale.view(torch.float32)[..., None]
    return torch.cat([values.flatten(-2).to(torch.bfloat16), rope.view(torch.bfloat16)], -1)
