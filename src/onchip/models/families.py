"""The table of model families, and a model's shape as read from its config.

A family is a row: in what it departs from Llama. Adding one is adding a row (and nothing else, as long as its tensors
carry Llama's names).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onchip.core.masks import Causal, Mask, Window
from onchip.core.problem import DTYPES
from onchip.models.gguf import ModelError
from onchip.models.rope import SCALINGS


@dataclass(frozen=True)
class Family:
    """How a family departs from Llama.

    qkv_bias    biases on q, k, v (the config's `attention_bias` adds them, and the output's, anywhere).
    qk_norm     RMSNorm of every query and key head before the rotation.
    window      which layers see `sliding_window` tokens when the config has one: "none", "all", or "upper": from `max_window_layers` on.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "none"


FAMILIES = {
    "llama": Family(),  # Llama 2 and 3, SmolLM
    "mistral": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="upper"),
    "qwen3": Family(qk_norm=True, window="upper"),
    "phi3": Family(window="all"),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder.

    width, inner    of the residual stream and of the gated MLP.     dim, rotary_dim   of a head, and how much of it is rotated.
    masks           one a layer.                                    context           most positions.
    rope            the Hugging Face scaling dict, "rope_type" and all; {} for none.      rope_layout   "neox" or "interleaved".
    """

    family: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    rotary_dim: int
    vocab: int
    context: int
    eps: float
    act: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    theta: float
    rope: Mapping[str, Any]
    rope_layout: str
    masks: tuple[Mask, ...]
    dtype: torch.dtype

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From a Hugging Face config (`weights.read_config`). Raises ModelError for an unknown family or a config that cannot be."""
        name = raw.get("model_type")
        if name not in FAMILIES:
            raise ModelError(f"model family {name!r} is not one of {', '.join(FAMILIES)}; a family is a row of onchip/models/families.py")
        family = FAMILIES[name]
        layers, width, heads = (_positive(raw, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ModelError(f"config: {heads} attention heads are not a multiple of num_key_value_heads {kv_heads}")
        if not raw.get("head_dim") and width % heads:
            raise ModelError(f"config: hidden_size {width} is not a multiple of {heads} heads; add head_dim")
        dim = raw.get("head_dim") or width // heads
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in SCALINGS:
            raise ModelError(f"config: rope_type {kind!r} is not one of {', '.join(SCALINGS)}")
        context = _positive(raw, "max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", context)
        act = raw.get("hidden_act", "silu")
        if act not in ACTIVATIONS:
            raise ModelError(f"config: hidden_act {act!r} is not one of {', '.join(ACTIVATIONS)}")
        partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
        return cls(
            family=name,
            layers=layers,
            width=width,
            inner=_positive(raw, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            rotary_dim=int(dim * partial),
            vocab=_positive(raw, "vocab_size"),
            context=context,
            eps=raw.get("rms_norm_eps", 1e-6),
            act=ACTIVATIONS[act],
            qkv_bias=family.qkv_bias or bool(raw.get("attention_bias")),
            out_bias=bool(raw.get("attention_bias")) and not family.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias")),
            qk_norm=family.qk_norm,
            tied=bool(raw.get("tie_word_embeddings")),
            theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope=rope,
            rope_layout="interleaved" if raw.get("rope_interleaved") else "neox",
            masks=_masks(raw, family, layers),
            dtype=_dtype(raw),
        )


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config: {key} is {value!r}; it must be a positive integer")
    return value


def _masks(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[Mask, ...]:
    """Causal, or a window of `sliding_window` tokens (the query's own counted) in the layers that slide."""
    window = raw.get("sliding_window") if family.window != "none" and raw.get("use_sliding_window", family.window == "all") else None
    if not window:
        return (Causal(),) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 0) if family.window == "upper" else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ModelError(f"config: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    return tuple(Window(window - 1) if kind == "sliding_attention" else Causal() for kind in kinds)


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(named)
    return DTYPES[found] if found else torch.bfloat16
