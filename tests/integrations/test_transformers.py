"""`attn_implementation="onchip"` beside "sdpa" (or "eager", where sdpa cannot) on tiny random models: logits, gradients, training, generation."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AriaForConditionalGeneration,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    BloomForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
    masking_utils,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

import onchip
from onchip.core.masks import Causal, Full, KeyPadding, Window
from onchip.integrations import transformers as integration

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALTERNATING = ["sliding_attention", "full_attention"]
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 2}
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
DECODERS = {  # name: (config, what it is compared with)
    "llama": (lambda: LlamaConfig(**GROUPED), "sdpa"),
    "qwen3": (lambda: Qwen3Config(**GROUPED), "sdpa"),
    "mistral": (lambda: MistralConfig(**GROUPED, sliding_window=6), "sdpa"),
    "gemma2": (lambda: Gemma2Config(**GROUPED, sliding_window=6, attn_logit_softcapping=5.0), "eager"),  # softcap
    "gemma3": (lambda: Gemma3TextConfig(**GROUPED, sliding_window=6, layer_types=ALTERNATING), "sdpa"),
    "gpt_oss": (lambda: GptOssConfig(**GROUPED, sliding_window=6, layer_types=ALTERNATING, num_local_experts=2, num_experts_per_tok=1), "eager"),  # sinks
    "deepseek": (lambda: DeepseekV3Config(**{**GROUPED, "num_key_value_heads": 4, "head_dim": 8}, **LATENT), "sdpa"),
    "llama4": (lambda: Llama4TextConfig(**GROUPED, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=4), "sdpa"),
}
CHOSEN = {  # models that say for each query which keys it sees, or what its sink is; of late 5.x: (type, fields, what it is compared with)
    "keys": ("deepseek_v32", {"num_key_value_heads": 4, "head_dim": 8, "n_group": 1, "topk_group": 1, "index_topk": 4, "index_n_heads": 4} | LATENT, "sdpa"),
    "blocks": (
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2},
        "sdpa",
    ),
    "sinks": ("inkling2_text", {"sliding_window": 6}, "eager"),
}
WIDE = {"vocab_size": 64, "initializer_range": 0.3}  # narrower weights attend to all alike, so that what is hidden hardly shows
OWN = {  # models that compute attention for themselves: (type, fields, what they run as)
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4, **WIDE, "hidden_size": 32}, "eager"),
    "gpt neox japanese": ("gpt_neox_japanese", {**SMALL, **WIDE}, "eager"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **WIDE}, "eager"),  # reads a bool mask the other way round
    "gpt neo": (
        "gpt_neo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 4, "hidden_size": 32, **WIDE},
        "eager",
    ),
    "falcon": ("falcon", {**SMALL, **WIDE}, "sdpa"),
    "git": ("git", {**SMALL, **WIDE, "vision_config": {**SMALL, "image_size": 8, "patch_size": 4}}, "eager"),
}
LEFT, RIGHT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7]), torch.tensor([[1] * 11, [1] * 7 + [0] * 4])


@pytest.fixture(autouse=True)
def installed():
    integration.install()
    yield
    integration.uninstall()


def decoder(name):
    torch.manual_seed(1)
    config, other = DECODERS[name]
    return AutoModelForCausalLM.from_config(config(), attn_implementation=other).eval(), other


def tokens(*shape):
    return torch.randint(3, 64, shape)


def both(model, other, call):
    """`call(model)` with the other implementation and with ours, and the masks of ours."""
    model.set_attn_implementation(other)
    theirs = call(model)
    model.set_attn_implementation("onchip")
    with onchip.record() as decisions:
        ours = call(model)
    assert decisions
    return theirs, ours, [str(d.problem.mask) for d in decisions if d.problem.op == "prefill"]


def same_gradients(model, other, call):
    """Losses and gradients of every parameter agree."""

    def run(model):
        model.zero_grad()
        loss = call(model).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs, ours, _ = both(model.train(), other, run)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


# ---- decoders


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, padding):
    model, other = decoder(name)
    ids = tokens(2, 11)
    theirs, ours, masks = both(model, other, lambda m: m(ids, attention_mask=padding).logits)
    real = torch.ones(2, 11, dtype=torch.bool) if padding is None else padding.bool()
    torch.testing.assert_close(ours[real], theirs[real])
    assert not any("Dense" in mask for mask in masks)
    judged = real & torch.nn.functional.pad(real[:, :-1], (1, 0))  # not what padding predicts: to its rows eager gives a mean, sdpa and we zeros
    same_gradients(model, other, lambda m: m(ids, attention_mask=padding, labels=ids.masked_fill(~judged, -100)))


@pytest.mark.parametrize(
    ("name", "masks"), [("llama", ["Causal(top_left)"] * 2), ("gemma3", ["Window(5)", "Causal(top_left)"]), ("mistral", ["Window(5)"] * 2)]
)
def test_what_is_plain_runs_as_a_band(name, masks):
    assert both(*decoder(name), lambda m: m(tokens(2, 11)).logits)[2] == masks


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation(name, cache):
    ids = tokens(2, 11)
    call = lambda m: m.generate(ids, attention_mask=LEFT, max_new_tokens=10, do_sample=False, cache_implementation=cache)  # noqa: E731
    theirs, ours, _ = both(*decoder(name), call)
    assert torch.equal(ours, theirs) and ours.shape[1] > 12


def test_generation_goes_on_from_a_cache_with_many_tokens_at_once():
    ids = tokens(2, 11)

    def call(model):
        past = model(ids[:, :4], use_cache=True).past_key_values
        return model(ids[:, 4:], past_key_values=past).logits

    theirs, ours, masks = both(*decoder("gemma3"), call)
    torch.testing.assert_close(ours, theirs)
    assert masks[2:] == ["Window(5)", "Causal"]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_cache_of_continuous_batching(name):
    """`generate_batch` beside `generate`, one prompt after the other."""
    model, _ = decoder(name)
    prompts = [tokens(n).tolist() for n in (5, 11, 3)]
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    one_by_one = [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **how)[0, len(p) :].tolist() for p in prompts]
    for implementation in integration.NAMES:
        model.set_attn_implementation(implementation)
        with onchip.record() as decisions:
            found = model.generate_batch(prompts, generation_config=GenerationConfig(**how), progress_bar=False)
        assert sorted(r.generated_tokens for r in found.values()) == sorted(one_by_one)
        assert {d.problem.keys for d in decisions} == {"packed"}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_for_each_query(name):
    kind, fields, other = CHOSEN[name]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**GROUPED, **fields}), attn_implementation=other).eval()
    ids = tokens(2, 11)
    for padding in (None, RIGHT):
        theirs, ours, masks = both(model, other, lambda m: m(ids, attention_mask=padding, use_cache=False).logits)  # noqa: B023
        real = torch.ones(2, 11, dtype=torch.bool) if padding is None else padding.bool()
        torch.testing.assert_close(ours[real], theirs[real])
        seen = [mask for mask in masks if mask != "Full"]  # late releases of inkling2 attend to whole earlier layers too
        assert len(seen) == model.config.num_hidden_layers
        assert all({"keys": "Dense", "blocks": "Blocks(1x4)", "sinks": "Window(5)"}[name] in mask for mask in seen)
    same_gradients(model, other, lambda m: m(ids, labels=ids, use_cache=False))


# ---- packed batches


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "two rows"])
def test_documents_laid_end_to_end(name, how):
    model, other = decoder(name)
    lengths, ids = (5, 9, 1, 4), tokens(1, 19)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {"position_ids": places}
    if how == "cu_seq_lens":
        given.update(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=9, max_length_k=9)
    if how == "two rows":
        ids, given = torch.cat([ids, ids.flip(1)]), {"position_ids": torch.cat([places, places.roll(4, 1)])}
    theirs = torch.cat([model(part).logits for part in ids[:1].split(lengths, 1)], 1)
    model.set_attn_implementation("onchip")
    with onchip.record() as decisions:
        ours = model(ids, **given, use_cache=False).logits[:1]
    torch.testing.assert_close(ours, theirs)
    assert {d.problem.keys for d in decisions} == {"dense" if how == "two rows" else "packed"}
    same_gradients(model, other, lambda m: m(ids, labels=ids, use_cache=False, position_ids=given["position_ids"]))


# ---- encoders and encoder-decoders


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders(kind, padding):
    if kind == "bert":
        model = BertForMaskedLM._from_config(BertConfig(**ENCODER), attn_implementation="sdpa").eval()
    else:
        config = ModernBertConfig(**SMALL, local_attention=4, layer_types=["full_attention", "sliding_attention"], reference_compile=False)
        model = ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa").eval()
    ids = tokens(2, 11)
    theirs, ours, masks = both(model, "sdpa", lambda m: m(ids, attention_mask=padding).logits)
    real = torch.ones(2, 11, dtype=torch.bool) if padding is None else padding.bool()
    torch.testing.assert_close(ours[real], theirs[real])
    assert masks[0] == ("Full" if padding is None else "KeyPadding") and not any("Dense" in mask for mask in masks)
    same_gradients(model, "sdpa", lambda m: m(ids, attention_mask=padding, labels=ids.masked_fill(~real, -100)))


def whisper():
    config = WhisperConfig(**SIZES, vocab_size=64, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=40)
    config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id = 0, 1, 2, 1
    return WhisperForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def test_whisper():
    model, sound, labels = whisper(), torch.randn(2, 8, 40), tokens(2, 7)
    theirs, ours, masks = both(model, "sdpa", lambda m: m(sound, labels=labels).logits)
    torch.testing.assert_close(ours, theirs)
    assert masks == ["Full"] * 2 + ["Causal(top_left)", "Full"] * 2
    same_gradients(model, "sdpa", lambda m: m(sound, labels=labels))
    for cache in ("dynamic", "static"):
        config = GenerationConfig(max_new_tokens=10, do_sample=False, cache_implementation=cache, decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
        theirs, ours, _ = both(model, "sdpa", lambda m: super(WhisperForConditionalGeneration, m).generate(sound, generation_config=config))  # noqa: B023
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("padding", [None, RIGHT], ids=["whole", "right"])
def test_a_position_bias(padding):
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ids, labels = tokens(2, 11), tokens(2, 6)
    theirs, ours, _ = both(model, "sdpa", lambda m: m(ids, attention_mask=padding, labels=labels).logits)
    torch.testing.assert_close(ours, theirs)
    same_gradients(model, "sdpa", lambda m: m(ids, attention_mask=padding, labels=labels))


# ---- training


def batch_for(model, step):
    torch.manual_seed(step)
    if isinstance(model, WhisperForConditionalGeneration):
        return {"input_features": torch.randn(2, 8, 40), "labels": tokens(2, 7)}
    ids, padding = tokens(2, 11), (LEFT, RIGHT)[step % 2]
    return {"input_ids": ids, "attention_mask": padding, "labels": ids.masked_fill(padding == 0, -100)}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "bert", "whisper"])
def test_fifty_steps_of_training(name):
    """The same losses and the same weights as with sdpa: in float64, in which neither's rounding is seen."""
    torch.manual_seed(1)
    if name in DECODERS:
        first, _ = decoder(name)
    else:
        first = whisper() if name == "whisper" else BertForMaskedLM._from_config(BertConfig(**ENCODER), attn_implementation="sdpa")
    losses, models = [], []
    for implementation in ("sdpa", "onchip"):
        model = copy.deepcopy(first).double().train()
        model.set_attn_implementation(implementation)
        optimizer, history = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(50):
            batch = {name: x.double() if x.is_floating_point() else x for name, x in batch_for(model, step).items()}
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(torch.tensor(history))
        models.append(dict(model.named_parameters()))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(models[1], models[0], atol=1e-5, rtol=0)
    assert losses[0][-1] != losses[0][0]


def test_dropout_only_in_training():
    config = LlamaConfig(**GROUPED, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="onchip").eval()
    ids = tokens(2, 11)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant):
    model, other = decoder("gemma3")
    ids = tokens(2, 11)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same_gradients(model, other, lambda m: m(ids, attention_mask=LEFT, labels=ids, use_cache=False))


def test_under_compile():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**GROUPED, "num_hidden_layers": 1}), attn_implementation="sdpa").eval()
    ids = tokens(2, 11)
    expected = model(ids, attention_mask=LEFT).logits
    model.set_attn_implementation("onchip")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, attention_mask=LEFT, use_cache=False).logits, expected)


# ---- models that compute attention for themselves


def own(name):
    """(the model as "eager", the same as "onchip")."""
    kind, fields, _ = OWN[name]
    torch.manual_seed(1)
    theirs, ours = (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields, bos_token_id=1, eos_token_id=2), attn_implementation=x).eval()
        for x in ("eager", "onchip")
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.filterwarnings("ignore:.*computes attention for itself")
@pytest.mark.parametrize("name", OWN)
def test_one_that_attends_for_itself_is_as_it_was(name):
    ids, more = tokens(2, 11), torch.nn.functional.pad(LEFT, (0, 1), value=1)

    def call(model):
        logits = model(ids, attention_mask=LEFT, use_cache=False).logits[LEFT.bool()]
        cache = model(ids, attention_mask=LEFT, use_cache=True).past_key_values
        step = model(ids[:, :1], attention_mask=more, past_key_values=cache).logits
        return logits, step, model.generate(ids, attention_mask=LEFT, max_new_tokens=5, do_sample=False)

    models = own(name)
    with torch.no_grad():
        theirs, ours = map(call, models)
    torch.testing.assert_close(ours, theirs)
    assert models[1].config._attn_implementation == OWN[name][2]


@pytest.mark.filterwarnings("ignore:.*computes attention for itself")
@pytest.mark.parametrize("name", ["bloom", "gpt neox japanese"])
def test_one_that_attends_for_itself_under_compile(name):
    ids = tokens(2, 11)
    theirs, ours = own(name)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(ours, backend="eager")(ids, attention_mask=LEFT, use_cache=False).logits
        torch.testing.assert_close(compiled[LEFT.bool()], theirs(ids, attention_mask=LEFT, use_cache=False).logits[LEFT.bool()])


@pytest.mark.filterwarnings("ignore:.*computes attention for itself")
def test_longformer_compares_its_mask_with_zero():
    sizes = {**SMALL, **WIDE, "attention_window": 4, "max_position_embeddings": 64}
    theirs, ours = (AutoModelForMaskedLM.from_config(CONFIG_MAPPING["longformer"](**sizes), attn_implementation=x).eval() for x in ("eager", "onchip"))
    ours.load_state_dict(theirs.state_dict())
    ids = tokens(2, 11)
    torch.testing.assert_close(*(m(ids, attention_mask=RIGHT).logits[RIGHT.bool()] for m in (ours, theirs)))


@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize(("kind", "more"), [("bigbird_pegasus", {"attention_type": "original_full"}), ("nllb-moe", {"num_experts": 4})])
def test_one_that_calls_the_interface_and_counts_on_a_mask(kind, more, how):
    """BigBird-Pegasus' decoder calls it, and its encoder adds the mask to scores of its own; NLLB-MoE's decoder does not say that it is causal."""
    sizes = {**SIZES, "vocab_size": 64, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3, **more}
    theirs, ours = (AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**sizes), attn_implementation=x).eval() for x in ("eager", "onchip"))
    ours.load_state_dict(theirs.state_dict())
    batch = {"input_ids": tokens(2, 11), "attention_mask": RIGHT, "decoder_input_ids": tokens(2, 5), "use_cache": False}
    torch._dynamo.reset()
    with torch.no_grad(), onchip.record() as decisions:
        found = (torch.compile(ours, backend="eager") if how == "compiled" else ours)(**batch).logits
        torch.testing.assert_close(found, theirs(**batch).logits)
    assert (decisions or how == "compiled") and ours.config._attn_implementation == integration.BESIDE_OWN
    asked = {"batch_size": 2, "q_length": 1, "kv_length": 9, "q_offset": 8, "mask_function": masking_utils.causal_mask_function}
    assert integration.mask_to_add(**asked, attention_mask=RIGHT[:, 2:].bool()).is_floating_point()


class Bloom(BloomForCausalLM):
    """A user's, in a file without attention."""


class Llama(LlamaForCausalLM):
    """As above."""


@pytest.mark.filterwarnings("ignore:.*computes attention for itself")
def test_each_model_is_judged_for_itself():
    """Models inside another too; and one that calls the interface keeps "onchip"."""
    as_onchip = {"attn_implementation": "onchip"}
    with torch.device("meta"):
        with pytest.warns(UserWarning, match='Bloom computes attention for itself, .* it runs as "eager"'):
            assert Bloom._from_config(CONFIG_MAPPING["bloom"](**OWN["bloom"][1]), **as_onchip).config._attn_implementation == "eager"
        git = AutoModelForCausalLM.from_config(CONFIG_MAPPING["git"](**OWN["git"][1]), **as_onchip).config
        assert (git._attn_implementation, git.vision_config._attn_implementation) == ("eager", "onchip")
        sam = AutoModel.from_config(CONFIG_MAPPING["sam"](vision_config={**SMALL, "global_attn_indexes": [0]}), **as_onchip).config
        assert [c._attn_implementation for c in (sam, sam.mask_decoder_config, sam.vision_config)] == ["onchip", "onchip", "sdpa"]
        assert Llama._from_config(LlamaConfig(**GROUPED), **as_onchip).config._attn_implementation == "onchip"
        for make, _ in DECODERS.values():
            assert AutoModelForCausalLM.from_config(make(), **as_onchip).config._attn_implementation == "onchip"


class AttentionPooling(nn.Module):
    """Of no model: what it is called says nothing of the model around it."""

    def __init__(self, width):
        super().__init__()
        self.weights = nn.Linear(width, 1)

    def forward(self, x):
        return (x * self.weights(x).softmax(1)).sum(1)


class OwnConfig(LlamaConfig):
    model_type = "llama of one's own"


class Pooled(PreTrainedModel):
    """A user's, around an imported one."""

    config_class, _supports_sdpa = LlamaConfig, True

    def __init__(self, config):
        super().__init__(config)
        self.model, self.pool = LlamaModel(config), AttentionPooling(config.hidden_size)
        self.post_init()

    def forward(self, ids):
        return self.pool(self.model(ids).last_hidden_state)


class PooledOfItsOwn(Pooled):
    config_class = OwnConfig


@pytest.mark.parametrize(("kind", "config"), [(Pooled, LlamaConfig), (PooledOfItsOwn, OwnConfig)])
def test_a_model_around_an_imported_one_is_as_that_is(kind, config):
    model = kind._from_config(config(**GROUPED), attn_implementation="onchip").eval()
    with torch.no_grad(), onchip.record() as decisions:
        model(tokens(1, 7))
    assert model.config._attn_implementation == "onchip" and len(decisions) == GROUPED["num_hidden_layers"]


@pytest.mark.filterwarnings("ignore:.*computes attention for itself")
def test_models_inside_one_that_attends_for_itself():
    """Made with it, or given it later; what the outer one runs as is not theirs."""
    sizes = {**SMALL, "vocab_size": 64}
    of_text = {**sizes, "model_type": "aria_text", "moe_num_experts": 2, "moe_num_shared_experts": 1}
    config = CONFIG_MAPPING["aria"](text_config=of_text, vision_config={**sizes, "model_type": "idefics3_vision", "image_size": 32, "patch_size": 8})
    with torch.device("meta"):
        model = AriaForConditionalGeneration._from_config(copy.deepcopy(config), attn_implementation="eager")
        made = AriaForConditionalGeneration._from_config(config, attn_implementation="onchip")
        model.set_attn_implementation("onchip")
    for c in (model.config, made.config):
        assert [part._attn_implementation for part in (c, c.text_config, c.vision_config)] == ["sdpa", "onchip", "onchip"]
    model.set_attn_implementation({"text_config": "eager"})
    assert [part._attn_implementation for part in (model.config, model.config.text_config)] == ["sdpa", "eager"]


# ---- the mask function


def overlay(b, h, i, j):
    return j != i - 1


SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1, 1, 1, 1, 2, 2]])
FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, True),
    "full": (masking_utils.bidirectional_mask_function, True),
    "window": (masking_utils.sliding_window_causal_mask_function(3), True),
    "window to both sides": (masking_utils.sliding_window_bidirectional_mask_function(2), True),
    "chunks": (masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])), True),
    "or": (masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_bidirectional_overlay(2)), True),
    "images": (masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(IMAGES)), True),
    "of a user": (masking_utils.and_masks(masking_utils.causal_mask_function, overlay), False),
}
if packed := getattr(masking_utils, "packed_sequence_compatibility_function", None):  # of late 5.x
    FUNCTIONS |= {
        "packed": (packed(masking_utils.causal_mask_function, PLACES, SEQUENCES), True),
        "packed window": (packed(masking_utils.sliding_window_causal_mask_function(3), PLACES, SEQUENCES), True),
        "packed chunks": (packed(masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64)), PLACES, SEQUENCES), False),
    }
SPANS = {"square": (9, 9, 0, 0), "goes on": (4, 9, 5, 0), "sliding cache": (4, 9, 9, 4), "static cache": (5, 9, 0, 0), "static cache, goes on": (3, 9, 4, 0)}


@pytest.mark.parametrize("padding", [None, "left", "right", "short"])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_is_the_dense_one(name, span, padding):
    function, known = FUNCTIONS[name]
    len_q, len_k, row, start = SPANS[span]
    if "packed" in name and span != "square":
        return
    given = None
    if padding:
        given = torch.ones(2, start + len_k - 2 * (padding == "short"), dtype=torch.bool)
        given[1, slice(0, start + 2) if padding == "left" else slice(start + len_k - 3, None)] = False
    asked = {"batch_size": 2, "q_length": len_q, "kv_length": len_k, "q_offset": row, "kv_offset": start, "mask_function": function, "attention_mask": given}
    dense = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    mask = integration.mask(**asked, allow_is_causal_skip=False)
    if not isinstance(mask, integration.LazyMask):
        assert not known or (name in ("chunks", "images") and "static" in span) or span == "static cache, goes on"  # no band and no document ends there
        return
    assert known and mask.shape == dense.shape and mask.dtype == torch.bool
    q, k = torch.randn(2, len_q, 1, 8), torch.randn(2, len_k, 1, 8)
    torch.testing.assert_close(onchip.attention(q, k, k, mask=mask.seen), onchip.attention(q, k, k, mask=dense))
    assert torch.equal(mask & True, dense) and torch.equal(mask[..., :3], dense[..., :3]) and torch.equal(torch.cat([mask, mask], -1)[..., len_k:], dense)


def test_as_little_as_possible():
    asked = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": masking_utils.causal_mask_function}
    plain = integration.mask(**asked)
    assert plain.seen == Causal("top_left") and plain[..., :9].seen == plain[:].seen == plain.seen and type(plain[..., :8]) is torch.Tensor
    assert integration.mask(**asked, attention_mask=torch.ones(2, 9, dtype=torch.bool)).seen == plain.seen
    assert integration.mask(**{**asked, "mask_function": masking_utils.sliding_window_causal_mask_function(9)}, local_size=9).seen == plain.seen
    window = integration.mask(**{**asked, "mask_function": masking_utils.sliding_window_causal_mask_function(4)}, local_size=4)
    assert window.seen == Window(3) and window.documents is None
    full = {**asked, "mask_function": masking_utils.bidirectional_mask_function, "allow_is_causal_skip": False}
    assert integration.mask(**full, allow_is_bidirectional_skip=True) is None and integration.mask(**full).seen == Full()
    static = {**asked, "kv_length": 20, "q_offset": torch.tensor(0), "attention_mask": torch.ones(2, 9, dtype=torch.bool)}
    assert integration.mask(**static).seen == plain.seen
    padded = integration.mask(**asked, attention_mask=RIGHT[:, 2:].bool())
    assert padded.seen.a == Causal() and isinstance(padded.seen.b, KeyPadding)
    one = integration.mask(**{**asked, "q_length": 1, "q_offset": 8}, attention_mask=RIGHT[:, 2:].bool())
    assert type(one) is torch.Tensor and one.shape == (2, 1, 1, 9)


# ---- the function alone


class Module(torch.nn.Module):
    is_causal = True
    layer_idx = 0


def test_masks_of_callers():
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16)
    seen = torch.rand(2, 1, 5, 9) > 0.3
    plain, weights = integration.attention_forward(Module(), q, k, k, seen, scaling=0.2)
    assert plain.shape == (2, 5, 4, 16) and plain.is_contiguous() and weights is None
    assert integration.attention_forward(Module(), q[:, :2], k, k, None)[0].is_contiguous()
    added = torch.zeros(2, 1, 5, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    torch.testing.assert_close(integration.attention_forward(Module(), q, k, k, added, scaling=0.2)[0], plain)
    torch.testing.assert_close(integration.attention_forward(Module(), q[:1], k, k, seen, scaling=0.2)[0][0], plain[0])
    for where in ({"cache": object.__new__(integration.PagedAttentionCache)}, {"cu_seq_lens_q": torch.tensor([0, 5])}):
        for what in ({"indices": torch.zeros(2, 5, 1, dtype=torch.int64)}, {"sinks": torch.zeros(2, 4, 5, 1)}, {"position_bias": torch.zeros(1, 4, 5, 9)}):
            with pytest.raises(NotImplementedError, match="sinks of queries and position_bias over pages, or over documents"):
                integration.attention_forward(Module(), q, k, k, None, **where, **what)
    with pytest.raises(ValueError, match=r"attention_mask is torch.bool \[2, 9\]"):
        integration.attention_forward(Module(), q, k, k, seen[:, 0, 0])
    with pytest.warns(UserWarning, match='output_attentions=True wants: the output has none; use "eager"'):
        assert integration.attention_forward(Module(), q, k, k, None, output_attentions=True)[1] is None


def test_a_float_mask_hides_beside_a_softcap():
    """Gemma 2's order: what is added comes after the cap, which would make -3e38 a score like others."""
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16)
    seen = torch.rand(2, 1, 5, 9) > 0.3
    added = torch.zeros(2, 1, 5, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = integration.attention_forward(Module(), q, k, k, seen, softcap=3.0)[0]
    torch.testing.assert_close(integration.attention_forward(Module(), q, k, k, added, softcap=3.0)[0], expected)
    bias = torch.randn(1, 4, 5, 9)
    scores = 3.0 * torch.tanh(torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.25 / 3.0) + bias
    expected = torch.einsum("bhqk,bhkd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), k.repeat_interleave(2, 1))
    torch.testing.assert_close(integration.attention_forward(Module(), q, k, k, seen, softcap=3.0, position_bias=bias)[0], expected)


class Both(Module):
    """A decoder's, as transformers has some: nothing in it says causal."""

    is_causal = False


def test_a_causal_mask_counts_whatever_the_module_says():
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    causal = integration.mask(batch_size=1, q_length=9, kv_length=9, mask_function=masking_utils.causal_mask_function)
    expected, _ = integration.attention_forward(Module(), q, k, k, None)
    assert torch.equal(integration.attention_forward(Both(), q, k, k, causal)[0], expected)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5}
    two = torch.cat([integration.attention_forward(Module(), q[:, :, s], k[:, :, s], k[:, :, s], None)[0] for s in (slice(4), slice(4, 9))], 1)
    torch.testing.assert_close(integration.attention_forward(Both(), q, k, k, causal, **packed)[0], two)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_in_documents_counts_the_query_itself(causal):
    """`sliding_window` keys with the query's own: one fewer before it, and behind it where nothing is causal."""
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5, "is_causal": causal, "sliding_window": 3}
    back = torch.arange(9)[:, None] - torch.arange(9)
    ids = torch.arange(9) // 4 > 0
    seen = (back < 3) & (back >= 0 if causal else back > -3) & (ids[:, None] == ids)
    expected = integration.attention_forward(Module(), q, k, k, seen[None, None])[0]
    torch.testing.assert_close(integration.attention_forward(Module(), q, k, k, None, **packed)[0], expected)


def test_a_mask_that_is_added_to_scores_hides():
    for dtype in (torch.float32, torch.bfloat16):
        mask = integration.mask(batch_size=2, q_length=9, kv_length=9, mask_function=masking_utils.causal_mask_function)
        scores = torch.randn(2, 3, 9, 9, dtype=dtype)
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        for added in (scores + mask, mask + scores, scores.clone().add_(mask)):
            assert added.dtype == dtype and torch.equal(added.softmax(-1), scores.masked_fill(~seen, -torch.inf).softmax(-1))
        assert torch.equal(mask + 1, seen.expand(2, 1, 9, 9) + 1)


def test_names_are_there_and_go_again():
    integration.install()
    assert set(integration.NAMES) <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    integration.uninstall()
    assert not set(integration.NAMES) & set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    assert not set(integration.NAMES) & set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
    methods = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
    for theirs in (integration.ContinuousBatchingManager.switch_to_cb_friendly_attn, *methods):
        assert theirs.__module__.startswith("transformers.") and "<locals>" not in theirs.__qualname__
    with pytest.raises(ValueError, match="onchip"):
        AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED), attn_implementation="onchip")
    integration.uninstall()
