"""A tiny random Llama on disk, tokenizer and chat template included: enough for the engine and the command line, in milliseconds."""

import json
import shutil
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from onchip.cache.sharing import Rates
from onchip.engine.padded import SIZES, Captured, accepts
from onchip.engine.runner import bucket

CORPUS = ["the quick brown fox jumps over the lazy dog and waits for memory", "why do GPUs wait? because bytes are far and sums are near"] * 3
EOS = "<|end|>"
CHAT = "{% for m in messages %}{{ '<|user|>' + m['content'] }}{% endfor %}<|bot|>{% if hum %}hm {% endif %}"
SHARED = Rates(0.0, 1e6, 1e6)  # of a device on which whatever is shared is worth a level of a cascade
CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def save(folder: Path, tokenizer: bool = True, weights: bool = True, **changes) -> Path:
    """A folder as Hugging Face lays it out; `changes` are to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file(tensors(config), folder / "model.safetensors")
    if tokenizer:
        save_tokenizer(folder, config["vocab_size"])
    return folder


def near(model: Path, folder: Path, noise: float) -> Path:
    """The same model but for `noise` in its weights, relative to each: one that often guesses what the other says."""
    shutil.copytree(model, folder)
    generator, found = torch.Generator().manual_seed(1), load_file(model / "model.safetensors")
    save_file({name: x * (1 + noise * torch.randn(x.shape, generator=generator)) for name, x in found.items()}, folder / "model.safetensors")
    return folder


def tensors(c: dict) -> dict[str, torch.Tensor]:
    """Weights large enough that the next token depends on every one before it."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator) * (1.5 * cols**-0.5)

    width, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    found = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], width, generator=generator), "model.norm.weight": torch.ones(width)}
    found["lm_head.weight"] = matrix(c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found |= {f"{at}.self_attn.{name}_proj.weight": matrix(rows, width) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        found |= {f"{at}.self_attn.o_proj.weight": matrix(width, q), f"{at}.mlp.down_proj.weight": matrix(width, inner)}
        found |= {f"{at}.mlp.{name}_proj.weight": matrix(inner, width) for name in ("gate", "up")}
        found |= {f"{at}.{name}.weight": torch.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


class Again:
    """Stands for the graph of a call: a replay calls it anew, and leaves what it gives where the first call did."""

    def __init__(self, run):
        self.run, self.out = run, run()

    def replay(self) -> None:
        self.out.copy_(self.run())


def as_graphs(runner) -> dict:
    """Let a runner on a CPU pad chunks, and decode, as CUDA graphs do: in whole buckets of rows, after a step without any, and reading the tensors that were
    there when the first step of its kind ran. Returns what stands for the graphs."""
    graphs, runner.padded.most = {}, SIZES[-1] if accepts(runner.model, runner.pool) else 0

    def captured(run):
        again = Again(run)
        return Captured(again, again.out)

    def decode():
        count = len(runner.rows)
        size = bucket(count)
        runner._share(0 if runner._drafts(size, runner._wants) else count, size)
        if runner._wants.mask:
            runner.state.allow(runner.rows)
        key, tensors = (size, runner._wants, runner.cascade.kind), [t for level in runner.cascade.levels for t in level if isinstance(t, torch.Tensor)]
        if key not in graphs:
            saved = runner.state.longs.clone()
            runner.state.clear(0)
            runner._step(runner.state.rows(size), runner._wants)
            runner.state.longs.copy_(saved)
        known = graphs.setdefault(key, [t.data_ptr() for t in tensors])
        assert known == [t.data_ptr() for t in tensors]
        return runner._step(runner.state.rows(size), runner._wants)

    runner._decode, runner._captured = decode, captured
    return graphs


def save_tokenizer(folder: Path, size: int) -> None:
    """Byte-level BPE, so that any text can be written and any token read."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": CHAT}))


SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.o_proj": (64, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


def save_adapter(folder, seed, rank=3, modules=SHAPES, layers=(0, 1), **config):
    """A folder as PEFT writes it, and what it adds to each weight."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "use_dora": False, "modules_to_save": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, found, deltas = torch.Generator().manual_seed(seed), {}, {}
    for i in layers:
        for name, (out, width) in modules.items():
            at = f"model.layers.{i}.{name}"
            a, b = (torch.randn(*shape, generator=generator) * 0.3 for shape in ((rank, width), (out, rank)))
            found |= {f"base_model.model.{at}.lora_A.weight": a, f"base_model.model.{at}.lora_B.weight": b}
            alpha = config.get("alpha_pattern", {}).get("up_proj", 6) if "up_proj" in name else 6
            deltas[f"{at}.weight"] = b @ a * (alpha / (rank**0.5 if config.get("use_rslora") else rank))
    save_file(found, folder / "adapter_model.safetensors")
    return deltas
