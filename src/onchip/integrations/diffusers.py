"""The attention backend "onchip" of diffusers.

>>> from onchip.integrations import diffusers as onchip_attention
>>> onchip_attention.install()
>>> pipe.transformer.set_attention_backend("onchip")   # or: with attention_backend("onchip"): ...
>>> onchip_attention.use(pipe.unet)                    # also where processors call torch's attention and know no backend

A backend reaches the models whose processors ask diffusers for one (Flux, Wan, Qwen-Image, ...). UNets, VAEs, DiT and
Stable Diffusion 3 call torch themselves: `use` sees to both, for one model, `onchip.integrations.sdpa.install` for all.
"""

import functools
from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onchip.integrations import sdpa

NAME = "onchip"


def attention(
    query: Tensor,  # [batch, len_q, heads, dim]
    key: Tensor,  # [batch, len_k, kv_heads, dim]
    value: Tensor,  # [batch, len_k, kv_heads, dim_v]
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend: `[batch, len_q, heads, dim_v]`. The mask is as for torch, or `[batch, len_k]` of keys that are seen; is_causal aligns top left."""
    if _parallel_config is not None:
        raise ValueError('backend "onchip": no context parallelism; set another backend, or no parallel_config')
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return sdpa.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)


# ---- the registry


def install() -> None:
    """Make the backend known. diffusers keeps its names in a closed Enum, so a member is added to it."""
    if NAME in AttentionBackendName._value2member_map_:
        return
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_, member.__objclass__, member._sort_order_ = NAME.upper(), NAME, AttentionBackendName, len(AttentionBackendName)
    type.__setattr__(AttentionBackendName, member.name, member)
    AttentionBackendName._member_names_.append(member.name)
    AttentionBackendName._member_map_[member.name] = AttentionBackendName._value2member_map_[NAME] = member
    _AttentionBackendRegistry.register(member)(attention)


def uninstall() -> None:
    """Take it out again; where it was the active backend, torch's is again."""
    member = AttentionBackendName._value2member_map_.pop(NAME, None)
    if member is None:
        return
    type.__delattr__(AttentionBackendName, member.name)
    AttentionBackendName._member_names_.remove(member.name)
    del AttentionBackendName._member_map_[member.name]
    for table in (_AttentionBackendRegistry._backends, _AttentionBackendRegistry._constraints, _AttentionBackendRegistry._supported_arg_names):
        del table[member]
    if _AttentionBackendRegistry._active_backend is member:
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


# ---- one model


def use(model: nn.Module) -> None:
    """Run every attention processor of `model` on onchip: by the backend where it knows one, else in place of torch's function while it runs."""
    install()
    for processor in _processors(model):
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName(NAME)
        elif not hasattr(type(processor), "_onchip_of"):
            processor.__class__ = _patched(type(processor))


def unuse(model: nn.Module) -> None:
    """Undo `use`: processors have no backend of their own again."""
    for processor in _processors(model):
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = None
        elif hasattr(type(processor), "_onchip_of"):
            processor.__class__ = type(processor)._onchip_of


def _processors(model: nn.Module) -> list[Any]:
    found = (getattr(module, "processor", None) for module in model.modules())
    return list({id(p): p for p in found if callable(p)}.values())


class _Ours(TorchFunctionMode):
    """Torch's attention is ours inside, in this thread."""

    def __torch_function__(self, function, types, args=(), keywords=None):
        ours = sdpa.scaled_dot_product_attention if function is F.scaled_dot_product_attention else function
        return ours(*args, **(keywords or {}))


@functools.cache
def _patched(kind: type) -> type:
    """A processor's class whose calls of torch's attention come to ours; the signature stays, which diffusers reads."""

    @functools.wraps(kind.__call__)
    def call(self, *args, **keywords):
        with _Ours():
            return kind.__call__(self, *args, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call, "_onchip_of": kind})
