"""GGUF files: their metadata as a Hugging Face config, their tensors under Hugging Face's names.

A file is a header (metadata and a table of tensors) followed by the tensors, each quantised in blocks of its own type.
The header is parsed here: the package `gguf` builds a numpy view of every string, which takes 3 s for the 100,000 strings
of a vocabulary of 49,000, against 0.1 s. Dequantisation is the package's.
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

Progress = Callable[[int, int], None]

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # metadata type: struct format
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")

# Whether queries and keys are stored so that rotary pairs lie side by side: llama.cpp permutes those of "llama" only.
ARCHITECTURES = {"gemma2": False, "gemma3": False, "llama": True, "phi3": False, "qwen2": False, "qwen3": False}
GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models; their queries are scaled otherwise, which llama.cpp, too, knows by this alone
PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"}
ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of the config, not of the weights


class ModelError(ValueError):
    """A model on disk that is missing, damaged or of a kind that onchip does not read; the message says what to do."""


class Stored(NamedTuple):
    """A tensor in the file: its shape (row-major), quantisation, and the bytes it fills."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


@dataclass(frozen=True)
class View:
    """A weight on disk: its shape, and `view[rows, columns]`, which reads that part alone (a slice for each dimension, or `[:]`)."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    def __getitem__(self, at: slice | tuple[slice, ...]) -> torch.Tensor:
        return self.read(at if isinstance(at, tuple) else (at,))


class File(NamedTuple):
    """An open GGUF file: metadata by key, tensors by llama.cpp's names, and the mapped bytes."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, Stored]
    data: mmap.mmap

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "")

    def need(self, key: str):
        """The metadata of that key; ModelError when the file has none."""
        if key not in self.metadata:
            raise ModelError(f"{self.path}: the metadata has no {key!r}, without which the model cannot be read; convert it again with a current llama.cpp")
        return self.metadata[key]


# ---- the header


class _Cursor:
    """A place in the mapped header. struct.error: it ends too early."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def numbers(self, form: str) -> tuple:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def strings(self, count: int) -> list[str]:
        found, data, at = [], self.data, self.at
        for _ in range(count):
            stop = at + 8 + LENGTH.unpack_from(data, at)[0]
            if stop > len(data):
                raise struct.error("a string ends past the file")
            found.append(data[at + 8 : stop].decode())
            at = stop
        self.at = at
        return found

    def value(self, kind: int):
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self.strings(1)[0]
        if kind != ARRAY:
            raise ValueError(f"metadata of type {kind}")
        kind, count = self.numbers("IQ")
        if kind in SCALARS:
            return list(self.numbers(f"{count}{SCALARS[kind]}"))
        return self.strings(count) if kind == STRING else [self.value(kind) for _ in range(count)]


def read(path: Path) -> File:
    """Parse the header of a GGUF file and map its data; no tensor is read.

    Raises ModelError when it is not GGUF version 2 or 3, is damaged, ends too early, or is one part of several.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or path.stat().st_size < 24:
            raise ModelError(f"{path} is not a GGUF file (those start with the bytes GGUF and a header of 24 bytes); download it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    _, version, num_tensors, num_keys = cursor.numbers("4sIQQ")
    if version not in (2, 3):
        why = "was written for big-endian machines" if version & 0xFFFF == 0 else f"is GGUF version {version}"
        raise ModelError(f"{path} {why}; versions 2 and 3, little-endian, are read: convert it again with a current llama.cpp")
    try:
        metadata = {cursor.strings(1)[0]: cursor.value(cursor.numbers("I")[0]) for _ in range(num_keys)}
        table = [_entry(cursor) for _ in range(num_tensors)]
    except struct.error:
        raise ModelError(f"{path} is truncated: its header runs past its {len(data):,} bytes; download it again") from None
    except ValueError as error:
        raise ModelError(f"{path} is damaged near byte {cursor.at:,}: {error}; download it again") from None
    if metadata.get("split.count", 0) > 1:
        raise ModelError(f"{path} is one of {metadata['split.count']} parts; join them first with `llama-gguf-split --merge`")
    align = metadata.get("general.alignment") or 32
    base = -(-cursor.at // align) * align
    return File(path, metadata, {name: _stored(path, name, *entry, base, len(data)) for name, *entry in table}, data)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """The next row of the tensor table: name, shape, type, offset from the start of the data."""
    name = cursor.strings(1)[0]
    (dims,) = cursor.numbers("I")
    shape = cursor.numbers(f"{dims}Q")
    kind, offset = cursor.numbers("IQ")
    return name, shape[::-1], kind, offset


def _stored(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, base: int, end: int) -> Stored:
    if kind not in GGML_QUANT_SIZES:
        raise ModelError(f"{path}: tensor {name!r} has type {kind}, which the installed package gguf does not know; update gguf, or use Q4_K_M, Q8_0 or F16")
    kind = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[kind]
    if 0 in shape or math.prod(shape) % block:
        raise ModelError(f"{path}: tensor {name!r} of shape {list(shape)} is not whole blocks of {block} as its type {kind.name} needs; download it again")
    stored = Stored(shape, kind, base + offset, math.prod(shape) // block * size)
    if stored.start + stored.size > end:
        raise ModelError(f"{path} is truncated: tensor {name!r} ends at byte {stored.start + stored.size:,} of {end:,}; download it again")
    return stored


# ---- tensors


def views(file: File, dtype: torch.dtype, progress: Progress | None = None) -> Iterator[tuple[str, View]]:
    """Every weight under its Hugging Face name, in the file's order; what is read of one is dequantised, on the CPU in `dtype`.

    llama.cpp adds 1 to the weights of Gemma's norms, and here it is taken off again: they are as Hugging Face's files have them.
    """
    interleaved(file)
    done, total = 0, sum(stored.size for stored in file.tensors.values())
    for name, stored in file.tensors.items():
        done += stored.size
        if progress:
            progress(done, total)
        if name not in ROTARY:
            yield hugging_face_name(file, name), View(stored.shape, functools.partial(_weight, file, name, dtype))


def _weight(file: File, name: str, dtype: torch.dtype, at: tuple[slice, ...]) -> torch.Tensor:
    if file.architecture in GEMMA and name.endswith("norm.weight"):
        return values(file, name, torch.float32, at).sub_(1).to(dtype)
    return values(file, name, dtype, at)


def values(file: File, name: str, dtype: torch.dtype, at: tuple[slice, ...] = ()) -> torch.Tensor:
    """One tensor by its llama.cpp name, dequantised, in `dtype`; with `at` that part, of whose rows whole blocks are dequantised.

    Raises ModelError for a type that gguf cannot dequantise.
    """
    stored = file.tensors[name]
    block, size = GGML_QUANT_SIZES[stored.kind]
    raw = np.frombuffer(file.data, np.uint8, stored.size, stored.start)
    if stored.shape[-1] % block:  # blocks go over the ends of rows
        return _dequantised(file, name, raw, dtype).view(stored.shape)[at or ...]
    at = [slice(*part.indices(n)) for part, n in zip((*at, *[slice(None)] * (len(stored.shape) - len(at))), stored.shape, strict=True)]
    cols = at.pop()
    first = cols.start // block
    raw = raw.reshape(*stored.shape[:-1], -1, size)[(*at, slice(first, -(-cols.stop // block)))]
    found = _dequantised(file, name, raw, dtype).view(*raw.shape[:-2], -1)
    return found[..., cols.start - first * block : cols.stop - first * block]


def _dequantised(file: File, name: str, raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """What whole blocks of a tensor hold, [numbers]."""
    kind = file.tensors[name].kind
    if kind in PLAIN:
        return torch.from_numpy(raw.flatten()).view(PLAIN[kind]).to(dtype)
    # 16 rows of 2,048 elements at a time: gguf works on 16 rows, and torch casts up to 32,768 elements on the calling thread;
    # above that its threads wait for each other thousands of times, 0.4 s against 4 s for 135M weights on two busy cores
    block, size = GGML_QUANT_SIZES[kind]
    count = raw.size // size
    rows = raw.reshape(-1, math.gcd(count, 2048 // block) * size)
    out = torch.empty(count * block, dtype=dtype)
    try:
        for part, some in zip(out.view(len(rows), -1).split(16), np.split(rows, range(16, len(rows), 16)), strict=True):
            part.copy_(torch.from_numpy(dequantize(some, kind)))
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {name!r} is {kind.name}, which the package gguf cannot dequantise; use a Q4_K_M, Q8_0 or F16 file of the model"
        ) from None
    return out


def hugging_face_name(file: File, name: str) -> str:
    """llama.cpp's name of a weight as Hugging Face spells it. Raises ModelError for a tensor that the model types read here do not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, stem, suffix = match.groups() if match else (None, "", "")
    if layer is None and stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    if layer is not None and stem in GEMMA_NAMES and file.architecture in GEMMA:
        return f"model.layers.{layer}.{GEMMA_NAMES[stem]}.{suffix}"
    if layer is not None and stem in LAYER_NAMES:
        fused = file.architecture == "phi3" and stem == "ffn_up"  # holds gate and up
        return f"model.layers.{layer}.{'mlp.gate_up_proj' if fused else LAYER_NAMES[stem]}.{suffix}"
    raise ModelError(f"{file.path}: tensor {name!r} is no part of a dense {file.architecture} model (mixtures of experts and adapters are not read)")


def interleaved(file: File) -> bool:
    """Whether rotary pairs are elements 2i and 2i + 1 of a head. Raises ModelError for an architecture that is not read."""
    if file.architecture not in ARCHITECTURES:
        raise ModelError(f"{file.path}: general.architecture is {file.architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} are read")
    return ARCHITECTURES[file.architecture]


# ---- the config


def config(file: File) -> dict:
    """The metadata under the keys of a Hugging Face config.json.

    Three keys are not Hugging Face's: `rope_interleaved` (llama.cpp stores the queries and keys of "llama" permuted, so
    rotate elements 2i and 2i + 1 as a pair), `rope_freqs` in `rope_scaling` (divisors of the rotary frequencies,
    `[rotary_dim / 2]`: how llama.cpp spells Llama 3's scaling) and `quantization` (the type most of the weights have).
    Raises ModelError for an unknown architecture, missing metadata, or layers that differ from one another.
    """
    arch = file.architecture
    pairs = interleaved(file)
    hidden, heads = (_same(file, f"{arch}.{key}") for key in ("embedding_length", "attention.head_count"))
    head_dim = _same(file, f"{arch}.attention.key_length", hidden // heads)
    has = file.tensors.__contains__
    if not has("token_embd.weight"):
        raise ModelError(f"{file.path} holds no 'token_embd.weight', so it is not a whole language model; use the model's own file")
    return {
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": file.need(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same(file, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _same(file, f"{arch}.feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": file.need(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.metadata.get(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file),
        "rope_interleaved": pairs,
        "partial_rotary_factor": file.metadata.get(f"{arch}.rope.dimension_count", head_dim) / head_dim,
        "max_position_embeddings": file.need(f"{arch}.context_length"),
        "sliding_window": file.metadata.get(f"{arch}.attention.sliding_window") or None,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        "mlp_bias": has("blk.0.ffn_up.bias"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        **_types(file),
        **(_gemma(file, head_dim, hidden // heads) if arch in GEMMA else {}),
    }


def _gemma(file: File, head_dim: int, width_per_head: int) -> dict:
    """What a config of Gemma 2 or 3 holds besides, or otherwise than, the others. What the file leaves out is among the defaults of the family."""
    arch, get = file.architecture, file.metadata.get
    found = {
        "model_type": {"gemma3": "gemma3_text"}.get(arch, arch),
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width_per_head if file.need(f"{arch}.block_count") == GEMMA[arch] else head_dim,
        "sliding_window": get(f"{arch}.attention.sliding_window", 4096),
        "attn_logit_softcapping": get(f"{arch}.attn_logit_softcapping"),
        "final_logit_softcapping": get(f"{arch}.final_logit_softcapping"),
        "sliding_window_pattern": get(f"{arch}.attention.sliding_window_pattern"),
        "rope_local_base_freq": get(f"{arch}.rope.freq_base_swa"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _same(file: File, key: str, default: int | None = None) -> int:
    """A count, at least 1, that some files give once and some once a layer."""
    value = file.need(key) if default is None else file.metadata.get(key, default)
    counts = set(value) if isinstance(value, list) else {value}
    if len(counts) > 1:
        raise ModelError(f"{file.path}: {key} differs from layer to layer ({value[:8]}...); models whose layers are alike are read")
    count = counts.pop() if counts else None
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"{file.path}: {key} is {value!r}, not a count; convert it again with a current llama.cpp")
    return count


def _rope_scaling(file: File) -> dict | None:
    """Hugging Face's `rope_scaling`; None when positions are not scaled."""
    key = f"{file.architecture}.rope.scaling"
    kind, get = file.metadata.get(f"{key}.type", "none"), file.metadata.get
    if "rope_factors_long.weight" in file.tensors:
        long, short = (values(file, f"rope_factors_{which}.weight", torch.float64).tolist() for which in ("long", "short"))
        found = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": get(f"{key}.attn_factor")}
    elif "rope_freqs.weight" in file.tensors:
        found = {"rope_type": "default", "rope_freqs": values(file, "rope_freqs.weight", torch.float64).tolist()}
    elif kind == "none":
        return None
    elif kind in ("linear", "yarn"):
        found = {"rope_type": kind, "factor": file.need(f"{key}.factor")}
        if kind == "yarn":
            found |= {"beta_fast": get(f"{key}.yarn_beta_fast"), "beta_slow": get(f"{key}.yarn_beta_slow")}
    else:
        raise ModelError(f"{file.path}: {key}.type is {kind!r}; none, linear, yarn and longrope are read")
    found["original_max_position_embeddings"] = get(f"{key}.original_context_length")
    return {name: value for name, value in found.items() if value is not None}


def _types(file: File) -> dict[str, str]:
    """The type that most of the matrices have, and the torch dtype to run it in: its own, or bfloat16 when it is quantised."""
    sizes: dict[GGMLQuantizationType, int] = {}
    for stored in file.tensors.values():
        if len(stored.shape) > 1:
            sizes[stored.kind] = sizes.get(stored.kind, 0) + math.prod(stored.shape)
    most = max(sizes, key=sizes.get)
    return {"quantization": most.name, "torch_dtype": str(PLAIN.get(most, torch.bfloat16)).removeprefix("torch.")}
