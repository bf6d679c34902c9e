"""Tensors in e4m3 with scales: the launch that makes them, and what their gradients go to."""

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.problem import Rows
from onchip.core.scales import SHARES
from onchip.core.trace import readable
from onchip.dispatch import select
from onchip.kernels.attention import reference
from onchip.ops.attend import UNTRAINED
from onchip.ops.checks import is_dense


def quantise(x: Tensor, share: str, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values in e4m3, and their scales: see `attention.quantise`."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Quantise.apply(x, share, signs)
    batch, length, heads, dim = x.shape
    problem = Rows("quantise", batch * length * heads, dim, x.dtype, share + " rotated" * (signs is not None))
    return select(problem, x.device, "auto" if x.numel() else "reference").launch(x, SHARES[share], signs)  # no launch of nothing


def signs_of(rotation: Tensor, dim: int, device: torch.device) -> Tensor:
    """The signs of a rotation as kernels take them: float32 [dim] on `device`. Raises ValueError for others, by their numbers where these can be read."""
    dense = is_dense(rotation)
    if not dense or rotation.shape != (dim,) or dim & (dim - 1) or not rotation.is_floating_point() or rotation.device.type == "meta" != device.type:
        kind = "nested or sparse" if isinstance(rotation, Tensor) else type(rotation).__name__
        given = kind_of(rotation) if dense else kind
        raise ValueError(f"quantise: rotation is {given} for head dimension {dim}; give +1 and -1, floats [{dim}], of a power of two, or None")
    if rotation.requires_grad and torch.is_grad_enabled():
        raise ValueError("quantise: rotation requires a gradient, which signs have not; give rotation.detach()")
    signs = rotation.to(device, torch.float32).contiguous()
    on_cpu = rotation.float() if rotation.device.type == "cpu" else signs
    if readable(on_cpu) and (other := on_cpu[on_cpu.abs() != 1]).numel():
        raise ValueError(f"quantise: rotation holds {other[0].item():g}; give +1 and -1 alone, as onchip.random_signs({dim}) makes them")
    return signs


def source_of(x: Tensor, signs: Tensor | None) -> Tensor | None:
    """What the gradient of x in e4m3, rotated, goes to, and so x's: x itself, or what has its shape and no memory of its own."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    return x if signs is None else StandIn.apply(x, signs)


class StandIn(torch.autograd.Function):
    """The shape of x, with no memory of its own; its gradient goes to x, rotated back where there are signs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, signs: Tensor | None):
        return x.new_zeros(1).expand(x.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        (signs,) = ctx.saved_tensors
        if signs is None:
            return grad, None
        dim = len(signs)
        part = 0.5 ** (dim.bit_length() // 2)  # of dim^-0.5, a power of two: exact in half precision, and sums of 1,000 stay below its 65,504
        hadamard = reference.rotate(torch.eye(dim, device=signs.device), torch.ones_like(signs)).sign() * part
        return (grad @ hadamard.to(grad.dtype)) * (signs * (dim**-0.5 / part)).to(grad.dtype), None


class _Quantise(torch.autograd.Function):
    """Whose gradient is asked for in vain: a Quantised's goes to its source."""

    @staticmethod
    def forward(ctx, x: Tensor, share: str, signs: Tensor | None):
        return quantise(x, share, signs)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(UNTRAINED)
