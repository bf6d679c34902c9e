"""A latent cache in e4m3, in the form that FlashMLA exchanges with its peers (DeepSeek-V3.2, 2025): 656 bytes a token.

Bytes 0 to 511 hold the first 512 columns in e4m3, the next 16 four scales in float32, one for each 128 of these columns, the last 128 the 64 rope columns
in bfloat16: x = scale * code. On Hopper these bytes are read as they are; elsewhere by way of a copy of the keys in question in bfloat16, which the kernels
of `paged_attention` read.
"""

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal, Mask
from onchip.core.problem import E4M3, Attention, Operands
from onchip.core.scales import LARGEST, SMALLEST
from onchip.kernels.attention import DECODE, LATENT
from onchip.kernels.attention.dequantised import BYTES, TILE, VALUES, WIDTH, as_numbers, numbers
from onchip.ops import checks, graph
from onchip.ops.attend import How, PagedKV, Sizes, launch_paged, problem_of
from onchip.ops.attention import paged_attention

KERNELS = ("auto", *(kernel.name for kernel in LATENT.kernels))


def quantise_latent(
    latent: Tensor,  # [..., 576], floats
) -> Tensor:
    """The same in 656 bytes a token, uint8 [..., 656]; a tile of zeros gets the smallest scale there is."""
    if not isinstance(latent, Tensor) or latent.shape[-1:] != (WIDTH,) or not latent.is_floating_point():
        raise ValueError(f"quantise_latent: latent is {kind_of(latent)}; give floats [..., {WIDTH}]")
    tiles = latent[..., :VALUES].float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1) / LARGEST
    scale = torch.where(scale == 0, SMALLEST, scale)
    codes = (tiles / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3).flatten(-2)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scale, latent[..., VALUES:].to(torch.bfloat16))], -1)


def dequantise_latent(packed: Tensor) -> Tensor:
    """uint8 [..., 656] as bfloat16 [..., 576]."""
    if not isinstance(packed, Tensor) or packed.shape[-1:] != (BYTES,) or packed.dtype != torch.uint8:
        raise ValueError(f"dequantise_latent: packed is {kind_of(packed)}; give uint8 [..., {BYTES}], as quantise_latent makes it")
    return numbers(packed)


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

    On an H100 or H200 `hopper_mla_codes` reads the bytes (bfloat16 queries, Full or Causal). Elsewhere, where gradients are wanted and inside torch.compile
    the pages in use are first copied in q's dtype: for 656 bytes read, 1,152 more are written and read again.

    kernel   also one of `paged_attention`'s, which then reads such a copy.        Under autocast q is cast.
    """
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise ValueError(f"attend_latent: q is {kind_of(q)}; give [batch, len_q, heads, {WIDTH}]")
    if not isinstance(packed, Tensor) or packed.ndim != 4 or packed.shape[2] != 1:
        raise ValueError(f"attend_latent: packed is {kind_of(packed)}; give uint8 [pages, page, 1, {BYTES}]")
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type))
    cache, page = PagedKV(packed, packed, page_table, lengths), packed.shape[1]
    checks.check_pages("attend_latent", q, cache, q.shape[0])
    checks.check_named("attend_latent", page_table, lengths, page, len(packed))
    if packed.shape[-1] != BYTES or packed.dtype != torch.uint8 or packed.device != q.device:
        raise ValueError(f"attend_latent: packed is {kind_of(packed)}; give uint8 [pages, page, 1, {BYTES}] on {q.device}, as quantise_latent makes it")
    if not len(packed):
        cache = cache._replace(k=packed.new_zeros(1, *packed.shape[1:]))  # of which nobody has a key
    how = How(mask, None, None, None, False, False, kernel)
    copied = graph.in_graph(kernel, q, packed, packed) or checks.paged_grad(how, q, cache)
    if copied and kernel == "hopper_mla_codes":
        raise Unsupported("attend_latent: kernel 'hopper_mla_codes' has no gradient, and no place in a compiled graph; leave kernel='auto'")
    if copied and kernel == "bf16_of_latent":
        kernel = "auto"  # which is a copy here
    if kernel not in KERNELS and all(kernel != one.name for one in DECODE.kernels):
        raise Unsupported(f"attend_latent: no kernel is named {kernel!r}; it has {', '.join(KERNELS[1:])}, and over a copy those of paged_attention")
    if copied or kernel not in KERNELS:
        return paged_attention(q, as_numbers(cache, q.dtype), mask=mask, scale=scale, return_lse=return_lse, kernel=kernel)
    problem, x = latent_problem(q, cache, how, scale)
    return launch_paged(problem, kernel, q, cache, x, return_lse)


def latent_problem(q: Tensor, cache: PagedKV, how: How, scale: float | None) -> tuple[Attention, Operands]:
    """The Problem and the operands of a call over a cache whose keys are packed."""
    (batch, len_q, heads, _), (_, page, _, _), columns = q.shape, cache.k.shape, cache.page_table.shape[1]
    key = q.new_empty(0, page, 1, WIDTH)  # what a copy would hold
    checks.check("attend_latent", q, key, key[..., :VALUES], rank=4)
    sizes = Sizes((batch, len_q, columns * page, heads, 1, WIDTH, q.dtype), ("paged", page, 0, 0, VALUES))
    keys = max(cache.lengths.tolist(), default=0) if cache.lengths.device.type == "cpu" else 0
    problem, x = problem_of("latent", how, sizes, Operands(checks.scale_of(scale, q)), q, keys)
    return problem._replace(extras=tuple(sorted((*problem.extras, "latent")))), x
