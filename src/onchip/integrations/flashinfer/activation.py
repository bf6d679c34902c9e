"""`flashinfer.activation`: gated activations, in onchip's kernels: `act(gate) * up` of the two halves of the last dimension."""

from torch import Tensor

from onchip.ops.activation import gated_act


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, "silu", out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, "gelu", out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, "gelu_tanh", out)


def _gated(input: Tensor, act: str, out: Tensor | None) -> Tensor:
    found = gated_act(input, act)
    return found if out is None else out.copy_(found)
