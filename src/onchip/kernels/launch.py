"""Which launches may begin before the kernel in front of them has ended."""

import torch


def starts_early(x: torch.Tensor) -> bool:
    """Whether kernels on x's device know programmatic dependent launch: NVIDIA's from Hopper on."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 9
