"""`attn_implementation="onchip"` on every decoder, encoder and encoder-decoder of the installed transformers that can be made tiny by common names of sizes.

    python tests/integrations/every_model.py [NAME ...]

Logits are compared with "sdpa"'s (or "eager"'s, where a model has no sdpa), in a batch with padding and in one without, and tokens of greedy generation.
A line for each model that differs or fails, and the counts; those that compute attention for themselves never call onchip. Weights are large, for with
those that transformers begins with attention is a mean of what is seen, and near to one of everything.
"""

import copy
import itertools
import signal
import sys
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, logging
from transformers.models.auto import modeling_auto

import onchip
from onchip.integrations import transformers as integration

LIMIT = 30  # seconds a model
LARGEST = 30_000_000  # parameters: a model whose sizes have other names stays large
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "d_model": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_layers": 2, "num_heads": 4, "ffn_dim": 48, "d_kv": 8, "d_ff": 48, "dim": 32, "n_heads": 4,
    "n_layers": 2, "hidden_dim": 48, "embedding_size": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 8, "sliding_window": 5,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8,
    "index_topk": 4, "index_n_heads": 4, "index_head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "max_position_embeddings": 64,
    "n_positions": 64, "attention_window": 4, "local_attention": 4, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "dropout_rate": 0.0,
    "attention_probs_dropout_prob": 0.0, "reference_compile": False, "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
KINDS = {
    "decoders": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "encoders": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "encoder-decoders": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(0))
LEFT, RIGHT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7]), torch.tensor([[1] * 11, [1] * 7 + [0] * 4])


class TooLongError(Exception):
    """A model takes more than LIMIT."""


def stop(*_):
    raise TooLongError


def tiny(auto, name: str):
    """(model, what it is compared with), or None where it cannot be made."""
    fields = set(vars(default := AutoConfig.for_model(name))) | set(getattr(type(default), "attribute_map", {}))
    config = AutoConfig.for_model(name, **{field: size for field, size in SIZES.items() if field in fields})
    config.decoder_start_token_id = 1
    torch.manual_seed(0)
    for other in ("sdpa", "eager"):
        try:
            with torch.device("meta"):  # large ones never have memory
                size = sum(p.numel() for p in auto.from_config(config, attn_implementation=other).parameters())
        except ValueError:
            continue
        return (auto.from_config(config, attn_implementation=other).eval(), other) if size <= LARGEST else None
    return None


@torch.no_grad()
def results(model, kind: str, padding) -> list[torch.Tensor]:
    """Logits of what is no padding, and tokens of greedy generation."""
    real = torch.ones_like(IDS).bool() if padding is None else padding.bool()
    if kind == "encoders":
        return [model(IDS, attention_mask=padding).logits[real]]
    if kind == "encoder-decoders":
        return [model(IDS, attention_mask=padding, labels=IDS[:, :5].contiguous()).logits]
    tokens = model.generate(IDS, attention_mask=padding, max_new_tokens=5, do_sample=False)
    return [model(IDS, attention_mask=padding, use_cache=False).logits[real], tokens]


def compare(auto, name: str, kind: str) -> str:
    """ "equal", or what is to be said of it; names of counts, or a sentence."""
    try:
        made = tiny(auto, name)
        theirs = made and [results(made[0], kind, padding) for padding in (None, LEFT if kind == "decoders" else RIGHT)]
    except Exception:  # whatever a model says to sizes that are not its own
        return "not made"
    if not made:
        return "not made"
    model = type(made[0])._from_config(copy.deepcopy(made[0].config), attn_implementation="onchip").eval()  # models that attend for themselves refuse to change
    model.load_state_dict(made[0].state_dict())
    with onchip.record() as decisions:
        ours = [results(model, kind, padding) for padding in (None, LEFT if kind == "decoders" else RIGHT)]
    for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        same = torch.allclose(mine, other, atol=1e-4, rtol=1e-3) if mine.is_floating_point() else torch.equal(mine, other)
        if not same:
            return f"differs from {made[1]}, masks {', '.join(sorted({str(d.problem.mask) for d in decisions}))}"
    return "equal" if decisions else "attend for themselves"


def main(names: list[str]) -> int:
    integration.install()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, stop)
    wrong = 0
    for kind, (auto, known) in KINDS.items():
        counts: dict[str, int] = {}
        for name in sorted(set(known) & set(names) if names else known):
            signal.alarm(LIMIT)
            try:
                said = compare(auto, name, kind)
            except TooLongError:
                said = "not made"
            except Exception as error:
                said = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.alarm(0)
            if said not in ("equal", "not made", "attend for themselves"):
                print(f"{name}: {said}", flush=True)
                said, wrong = "wrong", wrong + 1
            counts[said] = counts.get(said, 0) + 1
        print(f"{kind}: {', '.join(f'{n} {said}' for said, n in sorted(counts.items()))}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
