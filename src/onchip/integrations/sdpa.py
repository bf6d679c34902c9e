"""`torch.nn.functional.scaled_dot_product_attention` on onchip's kernels: as a function, and as a patch that comes off again.

>>> from onchip.integrations import sdpa
>>> with sdpa.installed():
...     model(x)

Beside torch: nested tensors and a dropout of 1 are refused, and what is dropped is drawn by Philox on every device. A row that
sees no key gives zeros, as torch gives since 2.5 (NaN before).
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from onchip.core.masks import Causal, Full, Mask
from onchip.ops.attention import attention

_before: dict[str, Any] = {}  # what `install` replaced; empty while nothing is installed


class Refused(ValueError, RuntimeError):
    """onchip refuses arguments by a ValueError, torch by a RuntimeError: who catches either catches this."""


def scaled_dot_product_attention(
    query: Tensor,  # [..., heads, len_q, dim]
    key: Tensor,  # [..., kv_heads, len_k, dim]
    value: Tensor,  # [..., kv_heads, len_k, dim_v]
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`softmax(scale q k^T + attn_mask) v` `[..., heads, len_q, dim_v]`, with torch's arguments and their meanings.

    attn_mask   bool (True: seen), float (added; it may have a gradient) or a `CausalBias`; it broadcasts over [..., heads, len_q, len_k].
    is_causal   query i sees keys 0 to i: aligned to the top left.
    enable_gqa  `heads` may be a multiple of `kv_heads`; without it leading dimensions broadcast.
    """
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(t, Tensor) and not (t is None and name == "attn_mask"):
            raise TypeError(f"scaled_dot_product_attention: {name} is a {type(t).__name__}; give a tensor{', or None' if name == 'attn_mask' else ''}")
    if query.is_nested or key.is_nested or value.is_nested:
        raise Refused("scaled_dot_product_attention: nested tensors; give their values and offsets to onchip.attention_packed")
    lead, q, k, v = _four(query, key, value, enable_gqa)
    mask, bias = _mask(attn_mask, is_causal, query.shape[-2], key.shape[-2])
    if len(lead) > 2:
        mask, bias = (_over(m, lead[:-1]) if isinstance(m, Tensor) else m for m in (mask, bias))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    try:
        out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p or None).transpose(1, 2)
    except ValueError as error:
        raise Refused(str(error)) from None
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _mask(attn_mask: Tensor | None, is_causal: bool, len_q: int, len_k: int) -> tuple[Mask | Tensor, Tensor | None]:
    """The arguments as (mask, bias)."""
    if attn_mask is None:
        return Causal("top_left") if is_causal else Full(), None
    if is_causal:
        rule = "Explicit attn_mask should not be set when is_causal=True"  # torch's own words
        if isinstance(attn_mask, CausalBias):
            rule = "CausalBias should not be used with causal=True"
        raise Refused(f"scaled_dot_product_attention: {rule}; give one of them, a bool mask with its lower triangle for both")
    if isinstance(attn_mask, CausalBias):
        made_for = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if made_for != (len_q, len_k):
            raise Refused(f"scaled_dot_product_attention: attn_mask is a CausalBias of {made_for} queries and keys; these are {(len_q, len_k)}")
        return Causal("top_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"), None
    if attn_mask.dtype == torch.bool:
        return torch.atleast_2d(attn_mask), None
    if not attn_mask.is_floating_point():
        raise Refused(f"scaled_dot_product_attention: attn_mask is {attn_mask.dtype}; give bool (True: seen) or a float tensor, which is added")
    return Full(), attn_mask


def _four(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The leading dimensions of the output, and query, key and value as `[batch, heads, len, dim]`."""
    tensors = (query, key, value)
    ranks = [t.ndim for t in tensors]
    if min(ranks) < 2:
        raise Refused(f"scaled_dot_product_attention: query, key and value have {ranks} dimensions; each needs 2 at least")
    heads, kv_heads, v_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in tensors)
    if not enable_gqa and len({heads, kv_heads, v_heads} - {1}) > 1:
        raise Refused(f"scaled_dot_product_attention: query, key and value have {heads}, {kv_heads} and {v_heads} heads; make them equal, or enable_gqa=True")
    most = heads if enable_gqa else max(heads, kv_heads, v_heads)
    if kv_heads != v_heads:  # broadcast, or repeated as torch does
        key, value = (t if n == 1 else t.repeat_interleave(most // n, -3) for t, n in ((key, kv_heads), (value, v_heads)))
        kv_heads = v_heads = most
    if ranks == [4, 4, 4] and query.shape[0] == key.shape[0] == value.shape[0] and (heads, key.shape[1], value.shape[1]) == (most, kv_heads, v_heads):
        return query.shape[:2], query, key, value
    leads = [t.shape[:-3] for t in tensors]
    try:
        batch = torch.broadcast_shapes(*leads)
    except RuntimeError:
        given = "{}, {} and {}".format(*map(list, leads))
        raise Refused(f"scaled_dot_product_attention: query, key and value have batches {given}; make them equal, or 1 where all share one") from None
    q, k, v = (t.expand(*batch, n, *t.shape[-2:]).reshape(math.prod(batch), n, *t.shape[-2:]) for t, n in ((query, most), (key, kv_heads), (value, v_heads)))
    return (*batch, most) if max(ranks) > 2 else (), q, k, v


def _over(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts over [*batch, heads, len_q, len_k] as one over [prod(batch), heads, len_q, len_k]."""
    if mask.ndim <= 3:
        return mask
    given = (1,) * (len(batch) + 3 - mask.ndim) + tuple(mask.shape)
    if len(given) != len(batch) + 3 or any(n not in (1, size) for n, size in zip(given, batch, strict=False)):
        raise Refused(f"scaled_dot_product_attention: attn_mask is {list(mask.shape)}; its leading dimensions are to broadcast over {list(batch)}")
    if all(n == 1 for n in given[: len(batch)]):
        return mask.reshape(given[len(batch) :])
    return mask.expand(*batch, *given[len(batch) :]).reshape(math.prod(batch), *given[len(batch) :])


# ---- the patch


def install() -> None:
    """Put `scaled_dot_product_attention` into `torch.nn.functional`, for whoever looks it up there from now on.

    That is torch's own modules, transformers' "sdpa" and diffusers' "native", not names imported before. torch's fused
    inference path of `nn.TransformerEncoder` and `nn.MultiheadAttention`, which goes round the function, is turned off.
    What `torch.compile` compiled before keeps what it has, and `torch.jit.script` means torch's operator, which a file can hold.
    """
    if not _before:
        torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
        torch.overrides.get_overridable_functions()  # torch lists its functions once, when first asked: with its own in place
        _before.update(function=F.scaled_dot_product_attention, fastpath=torch.backends.mha.get_fastpath_enabled())
        F.scaled_dot_product_attention = scaled_dot_product_attention
        torch.backends.mha.set_fastpath_enabled(False)


def uninstall() -> None:
    """Put torch's back. Raises RuntimeError when someone replaced ours meanwhile, and then changes nothing."""
    other = F.scaled_dot_product_attention
    if _before and other not in (scaled_dot_product_attention, _before["function"]):
        raise RuntimeError(f"sdpa.uninstall: torch.nn.functional.scaled_dot_product_attention is {other!r} by now; take that away first")
    if _before:
        F.scaled_dot_product_attention = _before["function"]
        torch.backends.mha.set_fastpath_enabled(_before["fastpath"])
        torch.jit._builtins._get_builtin_table().pop(id(scaled_dot_product_attention), None)
        _before.clear()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a `with` block; inside another install it changes nothing."""
    outer = bool(_before)
    install()
    try:
        yield
    finally:
        if not outer:
            uninstall()
