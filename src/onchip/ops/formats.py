"""Quantised caches from ones that are not, and the scales of key channels."""

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.formats import Codes, Format
from onchip.ops.attend import PagedKV
from onchip.ops.checks import is_dense

AT_ONCE = 1 << 24  # numbers whose float32 copy is held


def quantise_cache(cache: PagedKV, format: Format | str, channel: Tensor | None = None) -> PagedKV:
    """The same cache quantised, in memory of its own: all pages, those that no sequence uses too.

    format    a Format, or its text: "e4m3", "e5m2", "int8", "int4", or with a scale for each 32 or 64 columns "int8/32", "int4/64", ...
    channel   float32 [kv_heads, dim], what keys are divided by first, see `channel_scale`.

    Raises ValueError for a cache that is quantised, a format that its heads do not fit, or a channel of another shape.
    """
    if not isinstance(cache, PagedKV):
        raise TypeError(f"quantise_cache: cache is a {type(cache).__name__}; give PagedKV(k, v, page_table, lengths)")
    if isinstance(cache.k, Codes) or isinstance(cache.v, Codes):
        raise ValueError(f"quantise_cache: the cache has format {cache.k.format} already; give one of tensors")
    for name, pool in (("k", cache.k), ("v", cache.v)):
        if not is_dense(pool) or pool.ndim != 4 or pool.shape[:-1] != cache.k.shape[:-1]:
            raise ValueError(f"quantise_cache: {name} is {kind_of(pool)}; give dense tensors [pages, page, kv_heads, dim], k and v")
    form, (pages, page, kv_heads, dim) = Format.of(format), cache.k.shape
    if not (cache.k.dtype.is_floating_point and cache.v.dtype.is_floating_point):
        raise ValueError(f"quantise_cache: k is {cache.k.dtype}, v {cache.v.dtype}; give floats")
    fits = isinstance(channel, Tensor) and (channel.shape, channel.dtype, channel.device) == ((kv_heads, dim), torch.float32, cache.k.device)
    if channel is not None and not fits:
        raise ValueError(f"quantise_cache: channel is {kind_of(channel)}; give float32 [{kv_heads}, {dim}] on {cache.k.device}, or None")
    found = []
    for pool, divisor in ((cache.k, channel), (cache.v, None)):
        sizes = (page, kv_heads, pool.shape[-1])
        storage = torch.empty(pages, form.page_bytes(*sizes), dtype=torch.uint8, device=pool.device)
        codes = Codes.over(storage, form, sizes, divisor)
        step = max(1, AT_ONCE // max(1, page * kv_heads * pool.shape[-1]))
        for start in range(0, pages, step):
            codes.of(slice(start, start + step)).fill(pool[start : start + step])
        found.append(codes)
    return cache._replace(k=found[0], v=found[1])


def channel_scale(k: Tensor) -> Tensor:
    """What to divide the channels of keys by before they are quantised, float32 [kv_heads, dim]: the largest size of each beside its head's other channels.

    k   [..., kv_heads, dim]: keys of a calibration text, rotated as in the cache; numbers that are not finite do not count.

    Keys have few channels much larger than the others, which would take all digits of a token's scale (KIVI, Liu et al., 2024). A head's scales have a
    geometric mean of 1; a channel of zeros has the least of its head.
    """
    if not isinstance(k, Tensor):
        raise TypeError(f"channel_scale: k is a {type(k).__name__}; give a tensor of floats [..., kv_heads, dim]")
    if k.ndim < 2 or not k.dtype.is_floating_point or not k.numel():
        raise ValueError(f"channel_scale: k is {k.dtype} {list(k.shape)}; give floats [..., kv_heads, dim], of a token or more")
    size = k.detach().abs()
    most = size.where(size < torch.inf, 0.0).reshape(-1, *k.shape[-2:]).amax(0).float()
    least = torch.where(most > 0, most, torch.inf).amin(-1, keepdim=True)
    most = torch.where(most > 0, most, least.where(least < torch.inf, 1.0))
    return most / most.log().mean(-1, keepdim=True).exp()


__all__ = ["channel_scale", "quantise_cache"]
