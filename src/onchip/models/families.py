"""The table of model families, and a model's shape as read from its config.

A family is a row: in what it departs from Llama. Adding one is adding a row (and nothing else, as long as its tensors
carry Llama's names).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onchip.core.masks import Causal, Mask, Window
from onchip.core.problem import DTYPES
from onchip.models.gguf import ModelError
from onchip.models.kinds import COUNT, INDEX, OBJECT, POSITIVE, SHARE, SWITCH, TEXT, TEXTS, UNSIGNED, check_keys
from onchip.models.rope import OLD, THETA, rope_table, type_of


@dataclass(frozen=True)
class Family:
    """How a family departs from Llama.

    qkv_bias    biases on q, k, v (the config's `attention_bias` adds them, and the output's, anywhere).
    qk_norm     RMSNorm of every query and key head before the rotation.
    post_norms  RMSNorm of what attention and the MLP give, too, before it is added to the residual stream.
    norm_offset what every norm adds to its weights.
    scaled      embeddings are multiplied by `sqrt(hidden_size)`.
    window      which layers see `sliding_window` tokens when the config has one and no `layer_types`: "none", "all", "upper":
                from `max_window_layers` on, or "most": all but each `sliding_window_pattern`-th.
    defaults    what the config means where its file is silent.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    scaled: bool = False
    window: str = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


# what both of the Gemma families below have in common; files of Gemma 3 leave out whatever equals these
GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2 = {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
QWEN = {"sliding_window": 4096, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),  # Llama 2 and 3, SmolLM
    "mistral": Family(window="all", defaults={"sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, window="upper", defaults=QWEN),
    "qwen3": Family(qk_norm=True, window="upper", defaults=QWEN | {"head_dim": 128}),
    "phi3": Family(window="all", defaults={"rms_norm_eps": 1e-5}),
    "gemma2": Family(post_norms=True, norm_offset=1.0, scaled=True, window="most", defaults=GEMMA | GEMMA2),
    "gemma3_text": Family(qk_norm=True, post_norms=True, norm_offset=1.0, scaled=True, window="most", defaults=GEMMA | GEMMA3),
}
KEYS = {  # of a config, behind the defaults of its family
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings"), COUNT),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window_pattern", OLD), COUNT.or_none()),
    **dict.fromkeys(("sliding_window", "max_window_layers"), INDEX.or_none()),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_interleaved", "use_sliding_window"), SWITCH.or_none()),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), THETA.or_none()),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT.or_none()),
    **dict.fromkeys(("hidden_act", "hidden_activation", "dtype", "torch_dtype"), TEXT.or_none()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), UNSIGNED.or_none()),
    "partial_rotary_factor": SHARE.or_none(),
    "query_pre_attn_scalar": POSITIVE.or_none(),
    "rms_norm_eps": POSITIVE,
    "layer_types": TEXTS.or_none(),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder.

    width, inner    of the residual stream and of the gated MLP.     dim, rotary_dim   of a head, and how much of it is rotated.
    masks           one a layer.                                    context           most positions.
    rope            the Hugging Face scaling dict, "rope_type" and all; {} for none.      rope_layout   "neox" or "interleaved".
    window_theta    base of the rotation, not scaled, in the layers with a Window; None: as in the others.
    scale, softcap  of attention's scores.                          logit_softcap   of the logits; None: not capped.
    embedding_scale, norm_offset, post_norms   as in Family.
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
    post_norms: bool
    norm_offset: float
    embedding_scale: float
    tied: bool
    theta: float
    window_theta: float | None
    rope: Mapping[str, Any]
    rope_layout: str
    masks: tuple[Mask, ...]
    scale: float
    softcap: float | None
    logit_softcap: float | None
    dtype: torch.dtype

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From a Hugging Face config (`weights.read_config`). Raises ModelError for an unknown family or a config that cannot be."""
        name = raw.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            raise ModelError(f"model family {name!r} is not one of {', '.join(FAMILIES)}; a family is a row of onchip/models/families.py")
        family = FAMILIES[name]
        raw = {"rms_norm_eps": 1e-6, "hidden_act": "silu", **family.defaults, **raw}
        check_keys("config", raw, KEYS)
        if raw.get("use_bidirectional_attention"):
            raise ModelError("config: use_bidirectional_attention is set: this is a model of embeddings, which generates no text")
        layers, width, heads, context = (raw[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"))
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ModelError(f"config: {heads} attention heads are not a multiple of num_key_value_heads {kv_heads}")
        if not raw.get("head_dim") and width % heads:
            raise ModelError(f"config: hidden_size {width} is not a multiple of {heads} heads; add head_dim")
        dim = raw.get("head_dim") or width // heads
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = type_of("config: rope_scaling", rope)
        rope[OLD] = rope.get(OLD) or raw.get(OLD) or context  # Phi-3 has it beside the dict
        if kind == "longrope":
            rope.setdefault("factor", context / rope[OLD])
        act = raw.get("hidden_activation") or raw["hidden_act"]  # Gemma's files have both, and go by the first
        if act not in ACTIVATIONS:
            raise ModelError(f"config: hidden_act {act!r} is not one of {', '.join(ACTIVATIONS)}")
        partial = 1.0 if kind == "proportional" else rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
        rotary_dim, theta = int(dim * partial), float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        try:
            rope_table(context, rotary_dim, theta, rope, rows=1)  # what no table can be made of is said before weights are read
        except ValueError as error:
            raise ModelError(f"config: {error}") from None
        return cls(
            family=name,
            layers=layers,
            width=width,
            inner=raw["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            rotary_dim=rotary_dim,
            vocab=raw["vocab_size"],
            context=context,
            eps=raw["rms_norm_eps"],
            act=ACTIVATIONS[act],
            qkv_bias=family.qkv_bias or bool(raw.get("attention_bias")),
            out_bias=bool(raw.get("attention_bias")) and not family.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias")),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            norm_offset=family.norm_offset,
            embedding_scale=width**0.5 if family.scaled else 1.0,
            tied=bool(raw.get("tie_word_embeddings")),
            theta=theta,
            window_theta=raw.get("rope_local_base_freq"),
            rope=rope,
            rope_layout="interleaved" if raw.get("rope_interleaved") else "neox",
            masks=_masks(raw, family, layers),
            scale=(raw.get("query_pre_attn_scalar") or dim) ** -0.5,
            softcap=raw.get("attn_logit_softcapping") if name == "gemma2" else None,  # Gemma 3 has the key, and does nothing with it
            logit_softcap=raw.get("final_logit_softcapping"),
            dtype=_dtype(raw),
        )


def _masks(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[Mask, ...]:
    """Causal, or a window of `sliding_window` tokens (the query's own counted) in the layers that slide."""
    window = raw.get("sliding_window") if family.window != "none" and raw.get("use_sliding_window", family.window != "upper") else None
    if family.window == "most":
        check_keys("config", raw, {"sliding_window": COUNT})
        window = raw["sliding_window"]
    if not window:
        return (Causal(),) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in _slide(raw, family, layers)]
    if len(kinds) != layers:
        raise ModelError(f"config: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    if odd := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"config: layer_types has {sorted(map(str, odd))[0]!r}; a layer is sliding_attention or full_attention")
    return tuple(Window(window - 1) if kind == "sliding_attention" else Causal() for kind in kinds)


def _slide(raw: Mapping[str, Any], family: Family, layers: int) -> list[bool]:
    """Which layers see a window only, in a config without `layer_types`."""
    if family.window == "most":
        check_keys("config", raw, {"sliding_window_pattern": COUNT})
        return [(i + 1) % raw["sliding_window_pattern"] != 0 for i in range(layers)]
    if family.window != "upper":
        return [True] * layers
    check_keys("config", raw, {"max_window_layers": INDEX})
    return [i >= raw["max_window_layers"] for i in range(layers)]


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    key = "dtype" if raw.get("dtype") else "torch_dtype"
    named = (raw.get(key) or "bfloat16").removeprefix("torch.")
    known = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"}  # the engine has no wider one
    if named not in known:
        raise ModelError(f"config: {key} is {named!r}; it must be one of {', '.join(known)}, or null for bfloat16")
    return DTYPES[known[named]]
