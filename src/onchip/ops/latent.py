"""A latent cache in e4m3, in the form that FlashMLA exchanges with its peers (DeepSeek-V3.2, 2025): 656 bytes a token.

Bytes 0 to 511 hold the first 512 columns in e4m3, the next 16 four scales in float32, one for each 128 of these columns, the last 128 the 64 rope columns
in bfloat16: x = scale * code. It is read by way of a copy of the keys in question in bfloat16, which the kernels of `paged_attention` read.
"""

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.masks import Causal, Mask
from onchip.core.problem import E4M3
from onchip.core.scales import LARGEST, SMALLEST
from onchip.ops.attend import PagedKV
from onchip.ops.attention import paged_attention
from onchip.ops.checks import check_named, check_pages

BYTES, WIDTH, VALUES, TILE = 656, 576, 512, 128


def quantise_latent(
    latent: Tensor,  # [..., 576], floats
) -> Tensor:
    """The same in 656 bytes a token, uint8 [..., 656]; a tile of zeros gets the smallest scale there is."""
    if latent.shape[-1] != WIDTH or not latent.is_floating_point():
        raise ValueError(f"quantise_latent: latent is {latent.dtype} {list(latent.shape)}; give floats [..., {WIDTH}]")
    tiles = latent[..., :VALUES].float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1) / LARGEST
    scale = torch.where(scale == 0, SMALLEST, scale)
    codes = (tiles / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3).flatten(-2)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scale, latent[..., VALUES:].to(torch.bfloat16))], -1)


def dequantise_latent(packed: Tensor) -> Tensor:
    """uint8 [..., 656] as bfloat16 [..., 576]."""
    if packed.shape[-1] != BYTES or packed.dtype != torch.uint8:
        raise ValueError(f"dequantise_latent: packed is {packed.dtype} {list(packed.shape)}; give uint8 [..., {BYTES}], as quantise_latent makes it")
    codes, scale, rope = (part.contiguous() for part in packed.split((VALUES, VALUES // TILE * 4, (WIDTH - VALUES) * 2), -1))
    values = codes.view(E4M3).float().unflatten(-1, (-1, TILE)) * scale.view(torch.float32)[..., None]
    return torch.cat([values.flatten(-2).to(torch.bfloat16), rope.view(torch.bfloat16)], -1)


def attend_latent(
    q: Tensor,  # [batch, len_q, heads, 576], bfloat16
    packed: Tensor,  # uint8 [pages, page, 1, 656]
    page_table: Tensor,  # int32 [batch, most pages]
    lengths: Tensor,  # int32 [batch]
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` over a latent cache in e4m3, absorbed: values are the first 512 columns. Returns `[batch, len_q, heads, 512]`, and LSE as there.

    The pages in use are first copied in bfloat16: for 656 bytes read, 1,152 more are written and read again.
    """
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise ValueError(f"attend_latent: q is {kind_of(q)}; give [batch, len_q, heads, {WIDTH}]")
    if not isinstance(packed, Tensor) or packed.ndim != 4 or packed.shape[2] != 1:
        raise ValueError(f"attend_latent: packed is {kind_of(packed)}; give uint8 [pages, page, 1, {BYTES}]")
    check_pages("attend_latent", q, PagedKV(packed, packed, page_table, lengths), q.shape[0])
    page = packed.shape[1]
    check_named("attend_latent", page_table, lengths, page, len(packed))
    packed = packed if len(packed) else packed.new_zeros(1, *packed.shape[1:])  # of which nobody has a key
    used = torch.arange(page_table.shape[1], device=q.device) * page < lengths[:, None]
    latent = dequantise_latent(packed[torch.where(used, page_table, 0).flatten().long()]).to(q.dtype)
    table = torch.arange(page_table.numel(), dtype=torch.int32, device=q.device).view(page_table.shape)
    return paged_attention(
        q, PagedKV(latent, latent[..., :VALUES], table, lengths), mask=mask, scale=scale, return_lse=return_lse, kernel=kernel
    )  # fmt: skip
