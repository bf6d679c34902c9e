"""onchip keeps transformer arithmetic on the chip: exact IO-aware attention, fused operators, and a small engine.

The public names load on first use; importing onchip itself loads neither triton nor transformers.
"""

import importlib

__version__ = "0.1.0"

_NAMES = {
    "onchip.core.masks": ("Full", "Causal", "Window", "Chunked", "Document", "Prefix", "Tree", "KeyPadding", "Blocks", "Dense", "MaskMod"),
    "onchip.core.scores": ("ALiBi", "BucketBias", "RelativeBias", "ScoreMod", "Softcap"),
    "onchip.core.problem": ("Dropout",),
    "onchip.core.kernel": ("Unsupported",),
    "onchip.dispatch": ("explain", "record", "sm_margin"),
    "onchip.ops.attention": ("PagedKV", "Quantised", "attention", "attention_packed", "merge", "paged_attention", "quantise", "random_signs"),
    "onchip.core.formats": ("Codes", "Format"),
    "onchip.ops.cascade": ("Level", "cascade_attention"),
    "onchip.ops.formats": ("channel_scale", "quantise_cache"),
    "onchip.ops.latent": ("attend_latent", "dequantise_latent", "quantise_latent"),
    "onchip.ops.sparse": ("PageBounds", "append_bounds", "attend_pages", "attend_tokens", "page_bounds", "page_scores", "top_pages"),
    "onchip.ops.linear": ("RowNorm", "skinny_linear"),
    "onchip.ops.low_rank": ("LowRank", "add_low_rank", "route_adapters"),
    "onchip.ops.fused": ("Append", "rope_append"),
    "onchip.ops.activation": ("Clipped", "activate", "gated_act"),
    "onchip.ops.lookup": ("dropout_add", "embedding", "hadamard"),
    "onchip.ops.rotary": ("QKNorm", "rotary"),
    "onchip.ops.optim": ("AdamW",),
    "onchip.ops.diffusion": ("DDIM", "DDPM", "DPM2M", "Betas", "Euler", "Flow", "Schedule", "Spacing", "denoise_step", "noise_state", "schedule"),
    "onchip.core.losses": ("LossTerms", "Shard"),
    "onchip.ops.losses": ("cross_entropy",),
    "onchip.ops.divergence": ("Head", "divergence", "linear_divergence"),
    "onchip.ops.linear_losses": ("Tokens", "linear_cross_entropy", "token_log_probs"),
    "onchip.ops.softmax": ("log_softmax", "softmax"),
    "onchip.ops.preference": (
        *("BNPO", "DAPO", "DR_GRPO", "GRPO", "GSPO", "Pair", "Policy"),
        *("cpo", "dpo", "grpo", "kto", "orpo", "sequence_log_probs", "simpo"),
    ),
    "onchip.core.norms": ("Modulate", "Residual", "RowCodes", "SiluGate"),
    "onchip.ops.norm": ("invertible_layer_norm", "layer_norm", "modulated_norm", "rms_norm"),
    "onchip.ops.group_norm": ("group_norm",),
    "onchip.ops.modules": (
        *("Activation", "CrossEntropy", "DropoutAdd", "Embedding", "GatedAct", "GroupNorm"),
        *("InvertibleLayerNorm", "LayerNorm", "LinearCrossEntropy", "ModulatedNorm", "RMSNorm", "Rotary"),
    ),
    "onchip.ops.sampling": ("Bias", "Draft", "LogProbs", "Penalties", "Sampling", "TokenIds", "Verified", "adjust_logits", "log_probs", "sample", "verify"),
    "onchip.cache.paged": ("OutOfPages", "PagePool"),
    "onchip.cache.radix": ("RadixTree",),
    "onchip.cache.sharing": ("plan_cascade",),
    "onchip.cache.swap": ("HostPool",),
    "onchip.models.encoder": ("Embedder",),
    "onchip.models.lora": ("Adapter", "AdapterSlots", "AdapterTable"),
    "onchip.models.parallel": ("TensorParallel",),
    "onchip.engine.parallel": ("ParallelLLM",),
    "onchip.engine.llm": ("LLM",),
    "onchip.engine.grammar": ("Grammar",),
    "onchip.engine.request": ("Completion", "Event", "Request", "SamplingParams", "TokenLogProbs"),
    "onchip.engine.setup": ("PrefixCache",),
    "onchip.engine.draft": ("DraftModel", "NGram"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'onchip' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOME[name]), name)  # the next look-up does not come here
    return value


def __dir__():
    return sorted(__all__)
