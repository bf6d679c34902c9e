"""`flashinfer.utils`: what libraries ask about a device and a dtype before they call."""

import torch

from onchip.core.scores import ALiBi


class GPUArchitectureError(Exception):
    """FlashInfer's, for whoever catches it. Never raised here: what cannot be done is refused as `onchip.core.kernel.Unsupported`."""


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"get_compute_capability: {device} is no CUDA device; give one")
    return torch.cuda.get_device_capability(device)


def is_sm90a_supported(device: torch.device) -> bool:
    return get_compute_capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Whether Blackwell's own kernels are there: never, onchip has none."""
    return False


is_sm100f_supported = is_sm103a_supported = is_sm110a_supported = is_sm120a_supported = is_sm121a_supported = is_sm12x_supported = is_sm100a_supported


def device_support_pdl(device: torch.device) -> bool:
    """Whether a launch may overlap the one before it: `enable_pdl` changes nothing here."""
    return False


def is_float8(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def get_alibi_slopes(n_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """float32 `[n_heads]` (Press et al., 2022)."""
    return ALiBi.slopes_of(n_heads, device)
