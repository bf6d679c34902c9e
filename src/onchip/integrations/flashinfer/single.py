"""One sequence: `single_decode_with_kv_cache` and `single_prefill_with_kv_cache`."""

import functools

import torch
from torch import Tensor

from onchip.core.masks import Dense
from onchip.integrations.flashinfer.call import (
    BACKENDS,
    LAYOUTS,
    POSITIONS,
    Result,
    Scaling,
    Way,
    both,
    call_of,
    check_shape,
    checked,
    compute_dtype,
    dtype_of,
    finished,
    mask_of,
    one_of,
    refuse,
    turned,
    widened,
)
from onchip.integrations.flashinfer.quantization import check_mask, unpacked_bits
from onchip.ops.attention import attention

SHAPES = {"NHD": "[len_k, kv_heads, dim]", "HND": "[kv_heads, len_k, dim]"}


def single_decode_with_kv_cache(
    q: Tensor,  # [heads, dim]
    k: Tensor,  # [len_k, kv_heads, dim], or [kv_heads, len_k, dim] for HND
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
):
    """`[heads, dim_v]`; with `return_lse` also LSE `[heads]` in base 2."""
    check_shape("single_decode_with_kv_cache", "q", q, "[heads, dim]")
    way = Way(True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
    result = single("single_decode_with_kv_cache", way, q[None], k, v, kv_layout, Scaling(q_scale, k_scale, v_scale), Result(q.dtype, return_lse))
    return tuple(t[0] for t in result) if return_lse else result[0]


def single(name: str, way: Way, q: Tensor, k: Tensor, v: Tensor, kv_layout: str, scaling: Scaling, want: Result, custom=None):
    """One sequence: q `[len_q, heads, dim]`; the results of `finished`."""
    one_of(name, "kv_layout", kv_layout, LAYOUTS)
    one_of(name, "pos_encoding_mode", way.pos_encoding_mode, POSITIONS)
    checked(name, way)
    for argument, given in (("k", k), ("v", v)):
        check_shape(name, argument, given, SHAPES[kv_layout])
    dtype = compute_dtype(q.dtype, want.dtype)
    q, k, v = (widened(t, dtype) for t in (q, k, v))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if way.rotates:
        positions = torch.arange(len(k), device=q.device)
        q, k = turned(q, torch.arange(len(q), device=q.device) + (len(k) - len(q)), way), turned(k, positions, way)
    mask = mask_of(way, custom, (len(q), len(k)))
    call = call_of(way, mask, (q.shape[1], k.shape[1]), q.shape[2], q.device, scaling)
    return finished(call, want, lambda **keywords: attention(q[None], k[None], v[None], **keywords))


def single_prefill_with_kv_cache(
    q: Tensor,  # [len_q, heads, dim]
    k: Tensor,  # [len_k, kv_heads, dim], or [kv_heads, len_k, dim] for HND
    v: Tensor,
    scale_q: Tensor | None = None,  # [heads]
    scale_k: Tensor | None = None,  # [kv_heads]
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,  # bool [len_q, len_k]
    packed_custom_mask: Tensor | None = None,  # uint8: `packbits(custom_mask.view(-1), bitorder="little")`
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf=None,
    k_scale=None,
    v_scale=None,
):
    """`[len_q, heads, dim_v]`; with `return_lse` also LSE `[len_q, heads]` in base 2. Causal is aligned to the bottom right.

    q, k and v in float8 are widened, exactly, and `scale_q` and its like count for them alone; the output is in `o_dtype`, or in q's.
    """
    name = "single_prefill_with_kv_cache"
    one_of(name, "backend", backend, BACKENDS)
    refuse(name, kv_cache_sf=kv_cache_sf)
    way = Way(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
    check_shape(name, "q", q, "[len_q, heads, dim]")
    one_of(name, "kv_layout", kv_layout, LAYOUTS)
    check_shape(name, "k", k, SHAPES[kv_layout])
    len_q, len_k = len(q), k.shape[1 if kv_layout == "HND" else 0]
    if packed_custom_mask is not None:
        custom_mask = unpacked_bits(packed_custom_mask, len_q, len_k)
    if custom_mask is not None:
        check_mask(name, custom_mask, [len_q], [len_k])
    custom = None if custom_mask is None else Dense(custom_mask.reshape(len_q, len_k).bool())
    scaling = Scaling(scale_q, both(scale_k, k_scale), both(scale_v, v_scale)) if q.dtype.itemsize == 1 else Scaling(None, k_scale, v_scale)
    return single(name, way, q, k, v, kv_layout, scaling, Result(dtype_of(o_dtype, q.dtype), return_lse), custom)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)
