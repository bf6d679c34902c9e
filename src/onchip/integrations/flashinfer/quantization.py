"""`flashinfer.quantization`: bits of masks, eight to a byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.integrations.flashinfer.call import one_of


def check_bytes(name: str, packed: Tensor) -> None:
    """Raises ValueError where bits are not in bytes: a mask of bools is another argument."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"{name} is {packed.dtype} {list(packed.shape)}; give uint8, as packbits makes it, or a bool mask as custom_mask")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """The elements of `x` `[n]`, zero or not, as bits of uint8 `[ceil(n / 8)]`, the last byte filled up with zeros, as numpy's."""
    one_of("packbits", "bitorder", bitorder, ("big", "little"))
    bits = F.pad(x.flatten() != 0, (0, -x.numel() % 8)).view(-1, 8)
    order = torch.arange(8, device=x.device)
    return (bits.to(torch.uint8) << (order if bitorder == "little" else 7 - order).to(torch.uint8)).sum(1, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """`packbits` of each segment `x[indptr[i]:indptr[i + 1]]`, and where each one's bytes begin, like `indptr`. Waits for the device."""
    bounds = indptr.to(x.device)
    if x.numel() < (last := int(bounds[-1])):
        raise ValueError(f"segment_packbits: x has {x.numel()} elements, and indptr ends at {last}; give as many")
    lengths = bounds.diff()
    starts = F.pad((lengths + 7).div(8, rounding_mode="floor").cumsum(0), (1, 0)).to(indptr.dtype)
    bits = torch.zeros(int(starts[-1]) * 8, dtype=torch.bool, device=x.device)
    shift = (8 * starts[:-1] - (bounds[:-1] - bounds[0])).repeat_interleave(lengths)  # of each element, from where it is to where it goes
    values = x.flatten()[int(bounds[0]) :][: len(shift)] != 0
    bits[torch.arange(len(shift), device=x.device) + shift] = values
    return packbits(bits, bitorder), starts.to(indptr.device, torch.int32)


def unpacked_bits(packed: Tensor, rows: int, columns: int) -> Tensor:
    """bool `[rows, columns]` of bits whose lowest come first."""
    check_bytes("packed_custom_mask", packed)
    order = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed.flatten()[:, None] >> order & 1).flatten()[: rows * columns]
    if len(bits) < rows * columns:
        raise ValueError(f"packed_custom_mask: {packed.numel()} bytes for {rows} x {columns} bits; give {-(-rows * columns // 8)}")
    return bits.view(rows, columns).bool()
