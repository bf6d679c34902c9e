"""Attention in e4m3 where no kernel multiplies in 8 bits: q, k and v as the bfloat16 numbers that they stand for, by the kernel that takes those.

A number of e4m3 is one of bfloat16, and its product with a scale is rounded once, by 2^-9 where e4m3 rounded it by 2^-4. It costs a pass over q, k and v,
and twice their memory while the kernel runs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.device import Device
from onchip.core.kernel import Kernel
from onchip.core.problem import Attention, Operands
from onchip.core.scales import Scales
from onchip.kernels.attention import BACKWARD, DECODE, PREFILL
from onchip.kernels.attention.dequantised import as_numbers


class By(NamedTuple):
    """The kernel, its problem and how it runs."""

    kernel: Kernel
    problem: Attention
    config: object

    @property
    def order(self) -> Callable[[Attention], str] | None:
        """How the kernel's programs take its tiles, of its own problem."""
        told = getattr(self.config, "order", None)
        return told and (lambda _: told(self.problem))

    def __str__(self):
        what = "keys in bf16" if self.problem.op == "decode" else "q, k and v in bf16"
        return f"{what} by {self.kernel.name}" + f": {self.config}" * (self.config is not None)


def configs(p: Attention, device: Device) -> list[By]:
    """The first kernel of the menu that takes the problem in bfloat16: one that is not plain torch."""
    if p.op == "latent":
        near, kernels = p._replace(op="decode"), DECODE.kernels
    else:
        near = p._replace(dtype=torch.bfloat16, extras=tuple(extra for extra in p.extras if extra not in ("key_scales", "token_scales")))
        kernels = (PREFILL if p.op == "prefill" else BACKWARD).kernels
    kernel = next(kernel for kernel in kernels if not kernel.portable and not kernel.leaves(near, device))
    return [By(kernel, near, kernel.configs(near, device)[0])]


def prefill(_p: Attention, by: By, q: Tensor, k: Tensor, v: Tensor, x: Operands, return_lse: bool):
    """As the kernel returns it: bfloat16, and LSE."""
    return by.kernel.load()(by.problem, by.config, *_dequantised(q, k, v, x.scales), x._replace(scales=None, sources=None), return_lse)


def backward(_p: Attention, by: By, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, x: Operands):
    """Gradients of the numbers that q, k and v stand for, in bfloat16, and the others."""
    return by.kernel.load()(by.problem, by.config, *_dequantised(q, k, v, x.scales), out, lse, d_out, d_lse, x._replace(scales=None, sources=None))


def latent(_p: Attention, by: By, q: Tensor, cache, x: Operands, return_lse: bool):
    """Over a latent cache in e4m3, of which the pages in use are copied, in q's dtype."""
    return by.kernel.load()(by.problem, by.config, q, as_numbers(cache, q.dtype), x, return_lse)


def _dequantised(q: Tensor, k: Tensor, v: Tensor, scales: Scales) -> list[Tensor]:
    """Each product in float32, rounded once."""
    given = zip((q, k, v), scales, strict=True)
    return [t.to(torch.bfloat16).mul_(Scales.of_tokens(scale, t.shape[1]).transpose(1, 2)[..., None]) for t, scale in given]
