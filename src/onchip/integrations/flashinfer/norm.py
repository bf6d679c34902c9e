"""`flashinfer.norm`: RMSNorm, in onchip's kernels."""

from torch import Tensor

from onchip.ops.norm import rms_norm


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """`input / sqrt(mean(input^2) + eps) * weight` over the last dimension."""
    return _to(out, rms_norm(input, weight, eps=eps))


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """`rmsnorm` by `weight + 1`."""
    return _to(out, rms_norm(input, weight, eps=eps, offset=1.0))


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None) -> None:
    """`residual += input; input = rmsnorm(residual)`, in place."""
    _add(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None) -> None:
    """`fused_add_rmsnorm` by `weight + 1`."""
    _add(input, residual, weight, eps, 1.0)


def _add(input: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    normed, total = rms_norm(input, weight, eps=eps, offset=offset, residual=residual)
    input.copy_(normed)
    residual.copy_(total)


def _to(out: Tensor | None, found: Tensor) -> Tensor:
    return found if out is None else out.copy_(found)
