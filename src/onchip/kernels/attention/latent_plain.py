"""A latent cache in e4m3 by kernels in plain torch: keys as the numbers that they stand for, in q's dtype, by the kernel of that name that reads those."""

from torch import Tensor

from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import DECODE
from onchip.kernels.attention.dequantised import as_numbers


def blocked(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    return _by("blocked", p, q, cache, x, return_lse)


def reference(p: Attention, _config, q: Tensor, cache, x: Operands, return_lse: bool):
    return _by("reference", p, q, cache, x, return_lse)


def _by(name: str, p: Attention, q: Tensor, cache, x: Operands, return_lse: bool):
    return DECODE.kernel(name).load()(p._replace(op="decode"), None, q, as_numbers(cache, q.dtype), x, return_lse)
