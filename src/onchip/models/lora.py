"""LoRA adapters from PEFT's folders, and the table of those that a decoder's requests may have (Hu et al., 2021)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.low_rank import LowRank, Route
from onchip.models.gguf import ModelError
from onchip.models.kinds import NUMBER, SWITCH, Kind, check_keys, is_whole
from onchip.models.layers import Linear
from onchip.models.pieces import Places
from onchip.models.weights import open_safetensors, read_json
from onchip.ops.low_rank import route_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
HARMLESS = {  # PEFT's keys (0.21) that may be set: to anything where they say how the adapter was made, else to these values
    "alpha_pattern": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": ("none",),
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "inference_mode": None,
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others change the base weights: W is then another
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": None,
    "lora_alpha": None,
    "lora_dropout": None,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": None,
    "peft_type": ("LORA",),
    "peft_version": None,
    "qalora_group_size": None,
    "r": None,
    "rank_pattern": None,
    "revision": None,
    "runtime_config": None,
    "target_modules": None,
    "task_type": None,
    "use_rslora": None,
    "velora_config": None,
}


MOST_SLOTS = 1 << 16  # and ranks: all of them have memory from the start


def _patterns(value: object) -> bool:
    try:
        return isinstance(value, Mapping) and all(re.compile(pattern) and NUMBER.fits(alpha) for pattern, alpha in value.items())
    except re.error:
        return False


KEYS = {"lora_alpha": NUMBER, "alpha_pattern": Kind("an object of regular expressions and numbers", _patterns).or_none(), "use_rslora": SWITCH.or_none()}


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: `W + B A` instead of W for some matrices.

    matrices   {Hugging Face's name of a matrix: (A [rank, in], B [out, rank])}, float32 on the CPU, the scale in B.
    """

    name: str
    rank: int
    matrices: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def read(cls, folder: str | Path, name: str | None = None) -> "Adapter":
        """From a folder as PEFT's `save_pretrained` writes it; its name, if none is given, is the folder's.

        Raises ModelError for files that are missing or damaged, for what is not plain LoRA on matrices (DoRA, biases, embeddings, PiSSA's changed base
        weights), and for keys of its config that are not known and are set.
        """
        if not isinstance(folder, str | Path) or not (name is None or isinstance(name, str)):
            raise ModelError(f"adapter {folder!r:.60}, name {name!r:.60}: give a folder that PEFT's save_pretrained wrote, and a name as text or None")
        folder = Path(folder).expanduser()
        config = read_json(folder / CONFIG)
        if config is None:
            raise ModelError(f"adapter {str(folder)!r}: there is no {CONFIG}; give a folder that PEFT's save_pretrained wrote")
        if config.get("peft_type") != "LORA":
            raise ModelError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; LORA is read")
        for key, value in config.items():
            fine = HARMLESS.get(key, ())
            if value and fine is not None and value not in fine:
                raise ModelError(f"{folder / CONFIG}: {key} is {value!r}, which is not read; merge the adapter into the model with PEFT's merge_and_unload")
        check_keys(folder / CONFIG, config := {"lora_alpha": 8, **config}, KEYS)
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"adapter {str(folder)!r}: there is no {WEIGHTS}; save it again with PEFT's save_pretrained(safe_serialization=True)")
        halves: dict[str, dict[str, Tensor]] = {}
        with open_safetensors(folder / WEIGHTS) as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                found = KEY.fullmatch(key)
                if found is None:
                    raise ModelError(f"{folder / WEIGHTS}: {key!r} is no A or B of a matrix; LoRA of matrices is read, without embeddings or whole modules")
                if not (half := file.get_tensor(key)).is_floating_point():
                    raise ModelError(f"{folder / WEIGHTS}: {key!r} is {half.dtype}; it must be of floating-point numbers")
                halves.setdefault(found[1], {})[found[2]] = half.float()
        for at, pair in halves.items():
            if set(pair) != {"A", "B"} or not pair["A"].ndim == pair["B"].ndim == 2 or not len(pair["A"]) == pair["B"].shape[1] >= 1:
                shapes = ", ".join(f"{half} {list(t.shape)}" for half, t in sorted(pair.items()))
                raise ModelError(f"{folder / WEIGHTS}: of {at} there is {shapes}; it takes an A [rank, in] and a B [out, rank]")
        matrices = {at: (pair["A"], pair["B"] * _scale(config, at, len(pair["A"]))) for at, pair in halves.items()}
        return cls(name or folder.resolve().name, max((len(a) for a, _ in matrices.values()), default=0), matrices)


def _scale(config: Mapping[str, Any], matrix: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) where the ranks are stabilised (Kalajdzievski, 2023)."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for pattern, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", matrix)), config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


class AdapterSlots(NamedTuple):
    """Room for LoRA adapters: how many, and the largest rank one may have."""

    slots: int = 8
    rank: int = 16


class AdapterTable:
    """Adapters of one decoder on its device, in `slots` slots padded to one rank; a step's tokens name them by their slot.

    Its memory is there from the start, and a slot is written in place, so that captured CUDA graphs see what it holds.
    rank   the largest that an adapter may have.        names   the adapter in each slot, None for none.
    serials   of what is in each slot: no two adapters that were added have the same.
    """

    def __init__(self, decoder, room: AdapterSlots = AdapterSlots()):
        slots, rank = room
        if not all(is_whole(count, 1, MOST_SLOTS) for count in room):
            raise ValueError(f"AdapterSlots: slots is {slots!r:.60}, rank {rank!r:.60}; give whole numbers of 1 or more, up to {MOST_SLOTS}")
        self.rank, self.names, self.serials = rank, [None] * slots, [0] * slots
        self._added = 0
        self._places: Places = decoder.places
        self._pairs = decoder.config.dim if decoder.config.rope_layout == "interleaved" else 0
        rows: dict[Linear, list[int]] = {}
        for linear, _, part, _ in self._places.matrices.values():
            rows.setdefault(linear, []).append(part.count)
        for linear, cols in {placed.linear: placed.cols for placed in self._places.matrices.values()}.items():
            parts, at = tuple(rows[linear]), {"dtype": decoder.dtype, "device": decoder.device}
            a, b = torch.zeros(slots, rank * len(parts), cols.count, **at), torch.zeros(slots, sum(parts), rank, **at)
            linear.adapters = LowRank(a, b, torch.tensor(parts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(decoder.device), parts)

    def route(self, adapters: Tensor) -> Route:
        """Of tokens by their slots, int32 [tokens], -1 for none: what the layers of one step take."""
        return route_adapters(adapters, len(self.names))

    def add(self, adapter: Adapter) -> int:
        """Write an adapter to a free slot, or to the one that has its name already; returns the slot.

        Raises ValueError where no slot is free or its rank is too large, ModelError where it is of another model; the table is then as it was.
        """
        if adapter.rank > self.rank:
            raise ValueError(f"adapter {adapter.name!r} has rank {adapter.rank}, the table {self.rank}; make it with rank={adapter.rank}")
        slot = next((i for wanted in (adapter.name, None) for i, name in enumerate(self.names) if name == wanted), None)
        if slot is None:
            raise ValueError(f"adapter {adapter.name!r}: all {len(self.names)} slots are taken, by {', '.join(self.names)}; remove one, or make more slots")
        taken = [(placed, a, rows) for name, (a, b) in adapter.matrices.items() for placed, rows in self._parts(adapter.name, name, a, b)]
        self.remove(adapter.name)
        for (linear, part, _, cols), a, rows in taken:
            low, first, rank = linear.adapters, sum(linear.adapters.parts[:part]), len(a)
            low.a[slot, part * self.rank :][:rank].copy_(a[:, cols.slice()])
            low.b[slot, first : first + len(rows), :rank].copy_(rows)
        self._added += 1
        self.names[slot], self.serials[slot] = adapter.name, self._added
        return slot

    def remove(self, name: str) -> None:
        """Free the adapter's slot; nothing happens where there is no such adapter. No running request may have it."""
        if name in self.names:
            slot = self.names.index(name)
            self.names[slot] = None
            for linear in {placed.linear for placed in self._places.matrices.values()}:
                linear.adapters.a[slot].zero_()
                linear.adapters.b[slot].zero_()

    def _parts(self, adapter: str, name: str, a: Tensor, b: Tensor):
        """(where it goes, this rank's rows of B) of a matrix, or of each one that a fused matrix stands for."""
        names = [part.removesuffix(".weight") for part in self._places.fused.get(f"{name}.weight", [f"{name}.weight"])]
        if not set(names) <= set(self._places.matrices):
            raise ModelError(f"adapter {adapter!r}: {name!r} is no matrix of this {self._places.model}, or none that adapters are read for")
        places = [self._places.matrices[part] for part in names]
        shapes = [sum(placed.rows.whole for placed in places), places[0].cols.whole]
        if [b.shape[0], a.shape[1]] != shapes:
            raise ModelError(f"adapter {adapter!r}: {name} is for a matrix {[b.shape[0], a.shape[1]]}, the model's is {shapes}; it is of another model")
        if self._pairs and name.endswith(("q_proj", "k_proj")):  # a GGUF file has these rows in pairs, PEFT in halves
            b = b.unflatten(0, (-1, 2, self._pairs // 2)).transpose(1, 2).flatten(0, 2)
        start = 0
        for placed in places:
            yield placed, b[placed.rows.slice(start)]
            start += placed.rows.whole
