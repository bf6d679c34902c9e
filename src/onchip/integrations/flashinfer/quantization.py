"""`flashinfer.quantization`: bits of masks, eight to a byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.integrations.flashinfer.call import check_integers, one_of


def check_bytes(name: str, packed: Tensor) -> None:
    """Raises ValueError where bits are not in bytes: a mask of bools is another argument."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"{name} is {packed.dtype} {list(packed.shape)}; give uint8, as packbits makes it, or a bool mask as custom_mask")


def check_mask(name: str, mask: Tensor, lengths_q: list[int], lengths_k: list[int]) -> None:
    """Raises ValueError for a mask of floats, in which 0 may be what is seen, of another size, or `[len_k, len_q]`."""
    sizes = list(zip(lengths_q, lengths_k, strict=True))
    count = sum(len_q * len_k for len_q, len_k in sizes)
    whole = isinstance(mask, Tensor) and not mask.is_floating_point() and mask.numel() == count
    if not whole or (max(mask.shape, default=0) < count and any(mask.shape[-2:] != pair for pair in sizes)):  # or it is flat
        given = f"custom_mask is {kind_of(mask)} for {lengths_q} queries over {lengths_k} keys"
        raise ValueError(f"{name}: {given}; give bool [len_q, len_k] of each sequence, flat and end to end: {count} elements")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """The elements of `x` `[n]`, zero or not, as bits of uint8 `[ceil(n / 8)]`, the last byte filled up with zeros, as numpy's."""
    one_of("packbits", "bitorder", bitorder, ("big", "little"))
    bits = F.pad(x.flatten() != 0, (0, -x.numel() % 8)).view(-1, 8)
    order = torch.arange(8, device=x.device)
    return (bits.to(torch.uint8) << (order if bitorder == "little" else 7 - order).to(torch.uint8)).sum(1, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """`packbits` of each segment `x[indptr[i]:indptr[i + 1]]`, and where each one's bytes begin, like `indptr`. Waits for the device."""
    check_integers("segment_packbits", "indptr", indptr)
    bounds = indptr.to(x.device)
    if indptr.ndim != 1 or not len(indptr) or int(bounds[0]) < 0 or (bounds.diff() < 0).any():
        raise ValueError(f"segment_packbits: indptr is {indptr.tolist()}; give [segments + 1], of 0 or more and never falling")
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
