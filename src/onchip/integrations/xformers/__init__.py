"""xFormers' `memory_efficient_attention` and its attention biases on onchip's kernels, forward and backward, on any device.

>>> from onchip.integrations.xformers import BlockDiagonalCausalMask, memory_efficient_attention
>>> bias, x = BlockDiagonalCausalMask.from_tensor_list([a, b])

`install()` puts them under xFormers' own module names, into the real package where it is installed, whose biases are
taken as well as these. Queries and keys are `[batch, len, heads, dim]`, `[batch, len, groups, heads of a group, dim]`, or
`[batch, len, dim]` for one head. Paged biases are refused: `onchip.paged_attention` takes pages. A row that sees no key
gives 0 and LSE -inf.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

from onchip.core.masks import Full
from onchip.integrations.xformers import attn_bias as biases
from onchip.integrations.xformers.attn_bias import *  # noqa: F403
from onchip.integrations.xformers.attn_bias import AttentionBias, band
from onchip.ops.attention import attention, attention_packed, merge


def memory_efficient_attention(
    query: Tensor,  # [batch, len_q, heads, dim], or [batch, len_q, groups, heads of a group, dim], or [batch, len_q, dim]
    key: Tensor,  # [batch, len_k, heads, dim], ...
    value: Tensor,  # [batch, len_k, heads, dim_v], ...
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: str | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`dropout(softmax(scale q k^T + attn_bias)) v`, of query's shape with the values' dimension; with gradients.

    attn_bias   a bias from above or from xFormers, or a float tensor that broadcasts over [batch, heads, len_q, len_k]
                ([batch, groups, heads, ...] for five dimensions); it may have a gradient.
    op          the name of an onchip kernel, as `kernel=` of `onchip.attention`; xFormers' operators are refused.

    Keys and values that were expanded over the heads of a group are read once, not repeated, where they need no gradient.
    """
    out = _attend(query, key, value, attn_bias, p, scale, op, False)[0]
    return out if output_dtype is None else out.to(output_dtype)


memory_efficient_attention_forward = memory_efficient_attention


def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """(`memory_efficient_attention`, LSE): natural log, float32 `[batch, heads, len_q]`; `[1, heads, tokens]` where blocks lie end to end."""
    out, lse = _attend(query, key, value, attn_bias, p, scale, op, True)
    return out if output_dtype is None else out.to(output_dtype), lse


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """(output, LSE) over a part of the keys, for `merge_attentions`; in query's dtype unless `output_dtype` says else. Both have gradients."""
    return memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


def memory_efficient_attention_backward(grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    """(dq, dk, dv) of a call without dropout; the forward pass runs again, `output` and `lse` are not read."""
    if p:
        raise ValueError(f"memory_efficient_attention_backward: p is {p}; what was dropped is not known here, so let autograd call the backward pass")
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        return torch.autograd.grad(memory_efficient_attention(*inputs, attn_bias, 0.0, scale, op=op), inputs, grad)


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],  # [parts, batch, len_q, (groups,) heads, dim], or a list of parts
    lse_split: Tensor | Sequence[Tensor],  # [parts, batch, (groups,) heads, len_q]
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output, LSE) over all keys from those over parts of them; LSE is None without `write_lse`. Both have gradients."""
    parts = list(zip(attn_split, lse_split, strict=True))
    if any(out.ndim != lse.ndim + 1 for out, lse in parts):
        raise ValueError(
            f"merge_attentions: outputs {list(parts[0][0].shape)}, LSE {list(parts[0][1].shape)}; give [batch, len, heads, dim] and [batch, heads, len]"
        )
    grouped, sizes = parts[0][0].ndim == 5, parts[0][0].shape[2:4]
    dtype = output_dtype or parts[0][0].dtype
    parts = [(out.to(torch.promote_types(out.dtype, dtype)), lse) for out, lse in parts]
    out, lse = merge([(out.flatten(2, 3), lse.flatten(1, 2)) for out, lse in parts] if grouped else parts)
    if grouped:
        out, lse = out.unflatten(2, sizes), lse.unflatten(1, sizes)
    return out.to(dtype), lse if write_lse else None


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """`x.unbind(dim)`: models that split a qkv import it beside the functions, and go without them where it is not there (DINOv2)."""
    return x.unbind(dim)


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_bias, p: float, scale: float | None, op: str | None, return_lse: bool):
    """(output, LSE or None) in the shapes of the caller."""
    rank = query.ndim
    if rank not in (3, 4, 5) or key.ndim != rank or value.ndim != rank:
        raise ValueError(f"memory_efficient_attention: query, key, value have {rank}, {key.ndim}, {value.ndim} dimensions; give 3, 4 or 5 to all")
    if not (op is None or isinstance(op, str)):
        raise ValueError(f"memory_efficient_attention: op is {op}, an operator of xFormers; leave op=None, or name a kernel of onchip")
    q, k, v = _four(query, key, value)
    how = {"scale": scale, "dropout": p or None, "kernel": op or "auto", "return_lse": return_lse}
    if hasattr(attn_bias, "q_seqinfo"):
        out = _packed(q, k, v, attn_bias, how)
    else:
        mask, bias = (Full(), attn_bias) if attn_bias is None or isinstance(attn_bias, Tensor) else (band(attn_bias), getattr(attn_bias, "_bias", None))
        if bias is not None and rank != 4:
            bias = _over_groups(bias, query.shape[2:4]) if rank == 5 else bias.unsqueeze(1) if bias.ndim == 3 else bias
        out = attention(q, k, v, mask=mask, bias=bias, **how)
    out, lse = out if return_lse else (out, None)
    if rank == 5:
        out, lse = out.unflatten(2, query.shape[2:4]), None if lse is None else lse.unflatten(1, query.shape[2:4])
    return out.squeeze(2) if rank == 3 else out, lse


def _over_groups(bias: Tensor, sizes: tuple[int, int]) -> Tensor:
    """A bias that broadcasts over [batch, groups, heads, len_q, len_k] as one over [batch, groups x heads, len_q, len_k]."""
    given = (1,) * (5 - bias.ndim) + tuple(bias.shape)
    if len(given) > 5 or any(n not in (1, size) for n, size in zip(given[1:3], sizes, strict=True)):
        wanted = f"[batch, {sizes[0]}, {sizes[1]}, len_q, len_k]"
        raise ValueError(f"memory_efficient_attention: attn_bias is {list(bias.shape)}; give floats that broadcast over {wanted}")
    bias = bias.reshape(given)
    return (bias if given[1:3] == (1, 1) else bias.expand(-1, *sizes, -1, -1)).flatten(1, 2)


def _four(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as `[batch, len, heads, dim]`, with one key head for all that it was expanded to."""
    if query.ndim == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    expanded = all(x.stride(-2) == 0 and x.shape[-2] > 1 for x in (key, value))
    if expanded and not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)):
        key, value = key[..., :1, :], value[..., :1, :]
    return (query, key, value) if query.ndim == 4 else tuple(x.flatten(2, 3) for x in (query, key, value))


def _packed(q: Tensor, k: Tensor, v: Tensor, bias: Any, how: dict[str, Any]):
    """Attention in the blocks of `bias`, laid end to end in a batch of one."""
    seen, q_info, k_info = band(bias), bias.q_seqinfo, bias.k_seqinfo
    name = type(bias).__name__
    if len(q) != 1 or len(k) != 1 or q.shape[1] != q_info.seqstart_py[-1] or k.shape[1] < k_info.seqstart_py[-1]:
        sizes = f"[1, {q_info.seqstart_py[-1]}, ...] and [1, {k_info.seqstart_py[-1]}, ...]"
        raise ValueError(f"memory_efficient_attention: query is {list(q.shape)}, key {list(k.shape)}; with this {name} give {sizes}")
    if q_info.seqstart.device != q.device:
        raise ValueError(f"memory_efficient_attention: the {name} is on {q_info.seqstart.device}, query on {q.device}; move it with attn_bias.to(device)")
    k_offsets, used = (None if k_info is q_info else k_info.seqstart), getattr(k_info, "seqlen", None)
    if used is not None and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):  # blocks may share keys, whose gradients add up
        k, v = (torch.cat([x[:, start:stop] for start, stop in k_info.intervals()], 1) for x in (k, v))
        k_offsets, used = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)), None
    how = {"longest": (q_info.max_seqlen, k_info.max_seqlen), "used": None if used is None else (None, used), "mask": seen, **how}
    out = attention_packed(q[0], k[0], v[0], q_info.seqstart, k_offsets, **how)
    return (out[0][None], out[1][None]) if how["return_lse"] else out[None]


# ---- under xFormers' names

FUNCTIONS = (
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
)
_before: list[tuple[Any, str, Any]] = []  # (module, name, what it was), or (None, the name of a module that was made, None)
fmha = sys.modules[__name__]  # xFormers has the functions in `xformers.ops` and in `xformers.ops.fmha`


def install() -> None:
    """Let `import xformers.ops` find this: the functions in the real package where there is one, else modules of those names."""
    if _before:
        return
    if importlib.util.find_spec("xformers"):
        for module in map(importlib.import_module, ("xformers.ops", "xformers.ops.fmha")):
            for name in FUNCTIONS:
                if hasattr(module, name):
                    _before.append((module, name, getattr(module, name)))
                    setattr(module, name, globals()[name])
        return
    root = types.ModuleType("xformers", __doc__)
    root.__spec__, root.__path__, root.ops = ModuleSpec("xformers", None, is_package=True), [], fmha
    for name, module in (("xformers", root), ("xformers.ops", fmha), ("xformers.ops.fmha", fmha), ("xformers.ops.fmha.attn_bias", biases)):
        sys.modules[name] = module
        _before.append((None, name, None))


def uninstall() -> None:
    """Take it out again."""
    for module, name, value in _before:
        if module is None:
            del sys.modules[name]
        else:
            setattr(module, name, value)
    _before.clear()
