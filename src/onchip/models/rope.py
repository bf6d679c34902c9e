"""Rotary position embedding: the table of cosines and sines for each way of stretching it to longer contexts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.core.arguments import check_tensors
from onchip.core.once import ends
from onchip.models.gguf import ModelError
from onchip.models.kinds import NUMBERS, POSITIVE, SHARE, SWITCH, TEXT, UNSIGNED, Kind, check_keys, is_number, is_whole

OLD = "original_max_position_embeddings"
SCALINGS = {  # rope_type: what it needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", OLD),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", OLD),
    "yarn": ("factor", OLD),
    "longrope": ("factor", "short_factor", "long_factor", OLD),
    "proportional": (),
}
THETA = Kind("a number above 1", lambda value: is_number(value, 1))
KEYS = {  # of a scaling dict
    **dict.fromkeys(("rope_type", "type"), TEXT.or_none()),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), POSITIVE.or_none()),
    **dict.fromkeys(("mscale", "mscale_all_dim"), UNSIGNED.or_none()),
    **dict.fromkeys(("short_factor", "long_factor", "rope_freqs"), NUMBERS.or_none()),
    OLD: Kind("an integer of 2 or more", lambda value: is_whole(value, 2)).or_none(),
    "rope_theta": THETA.or_none(),
    "partial_rotary_factor": SHARE.or_none(),
    "truncate": SWITCH.or_none(),
}


def type_of(name: str, scaling: Mapping[str, Any]) -> str:
    """The rope_type of a scaling dict. Raises ModelError, which is a ValueError, for another one than of `SCALINGS`, and for a key that holds nonsense."""
    check_keys(name, scaling, KEYS)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SCALINGS:
        raise ModelError(f"{name}: rope_type {kind!r} is not one of {', '.join(SCALINGS)}")
    return kind


def rope_table(
    positions: int, dim: int, theta: float, scaling: Mapping[str, Any] | None = None, device: torch.device | None = None, rows: int | None = None
) -> Tensor:
    """Cosines, then sines, of `position * frequency`: float32 `[positions, dim]`, frequencies `theta ** (-2 i / dim)` (Su et al., 2021).

    scaling   a Hugging Face `rope_scaling` dict. rope_type "linear": all frequencies divided by `factor` (Chen et al., 2023);
              "llama3": only the slow ones, with a ramp (Llama 3.1); "yarn": by parts, and the table scaled by the
              attention factor (Peng et al., 2023); "dynamic": a larger theta where `positions` exceed the old context; "longrope": a divisor for each
              frequency, `long_factor` where `positions` exceed the old context, else `short_factor`, and the table scaled (Ding et al., 2024);
              "proportional": the last pairs of a head stand still but for `partial_rotary_factor` (Gemma 4). "rope_freqs": a divisor for each
              frequency, as GGUF files carry them.
    rows      of the table, where it is to be longer than the texts of `positions` that it is scaled for: drafts are written past the end of a text.

    Raises ValueError for another rope_type, a dict that lacks what its own needs, or a key that holds nonsense.
    """
    scaling = dict(scaling or {})
    kind = type_of("rope_table", scaling)
    if dim % 2 or dim < (4 if kind == "dynamic" else 2) or not THETA.fits(theta):
        raise ValueError(f"rope_table: dim is {dim}, theta {theta!r:.60}; give an even number (for 'dynamic' 4 or more), and more than 1")
    if missing := [key for key in SCALINGS[kind] if scaling.get(key) is None]:
        raise ValueError(f"rope_table: rope_type {kind!r} without {', '.join(missing)}; give it in `scaling`")
    if kind == "dynamic":
        theta = _dynamic(positions, dim, theta, scaling)
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    factor = 1.0
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "yarn":
        frequencies, factor = _yarn(frequencies, dim, theta, scaling)
    elif kind == "longrope":
        frequencies, factor = _longrope(frequencies, positions, scaling)
    elif kind == "proportional":
        frequencies[int(scaling.get("partial_rotary_factor", 1.0) * dim // 2) :] = 0.0
        frequencies = frequencies / scaling.get("factor", 1.0)
    if scaling.get("rope_freqs"):
        frequencies = frequencies / torch.tensor(scaling["rope_freqs"], dtype=torch.float32, device="cpu")
    angles = torch.outer(torch.arange(rows or positions, dtype=torch.float32, device="cpu"), frequencies)
    return torch.cat((angles.cos(), angles.sin()), 1).mul_(factor).to(torch.get_default_device() if device is None else device)


def rope_rows(table: Tensor, positions: Tensor, axes: Sequence[int]) -> Tensor:
    """A table with a row of its own for each token, where a token has several positions (time, height, width): float32 [tokens, dim].

    `rotary` and `rope_append` take it with `torch.arange(tokens)` as positions. Frequency i is turned by position `axes[i]` of the token: Qwen2-VL's sections
    (16, 24, 24) are axes of 16 zeros, 24 ones and 24 twos; a picture's rows and columns two halves of 0 and 1 (with the same frequencies: a table
    that has each twice); Qwen3-VL's alternate.

    table   `rope_table(...)` [positions, dim].        positions   int64 or int32 [axes, tokens].        axes   dim / 2 numbers.
    Positions that are no row of the table are refused on a CPU; on a GPU, where to look would be to wait, torch ends in an assertion.
    """
    check_tensors("rope_rows", table=table)
    check_tensors("rope_rows", positions=positions)
    if table.ndim != 2 or table.shape[1] % 2 or not table.is_floating_point():
        raise ValueError(f"rope_rows: table is {table.dtype} {list(table.shape)}; give floats [positions, dim], as rope_table makes them")
    if positions.ndim != 2 or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rope_rows: positions are {positions.dtype} {list(positions.shape)}; give int64 [axes, tokens], for one axis [1, tokens]")
    if (found := ends(positions)) is not None and not 0 <= found[0] <= found[1] < len(table):
        raise ValueError(f"rope_rows: positions are {found[0]} to {found[1]}; give 0 to {len(table) - 1}, rows of the table, or a longer rope_table")
    half = table.shape[1] // 2
    if len(axes) != half or not all(is_whole(axis, 0, len(positions) - 1) for axis in axes):
        raise ValueError(
            f"rope_rows: {len(axes)} axes {tuple(axes)} for {half} frequencies and {len(positions)} positions a token; give one for each frequency"
        )
    chosen = torch.tensor(axes, device="cpu")
    if positions.is_cuda:  # without a wait
        chosen = chosen.pin_memory().to(positions.device, non_blocking=True)
    at, column = positions[chosen].T, torch.arange(half, device=table.device)  # [tokens, half], [half]
    return torch.cat((table[at, column], table[at, half + column]), 1)


def grid_positions(*sizes: int, device: torch.device | None = None) -> Tensor:
    """Places of a grid's cells in row-major order, int64 [axes, cells]: (height, width) for a picture, (time, height, width) for a film; for `rope_rows`."""
    return torch.cartesian_prod(*(torch.arange(n, device=device) for n in sizes)).reshape(-1, len(sizes)).T


def _dynamic(positions: int, dim: int, theta: float, s: Mapping[str, Any]) -> float:
    """NTK: theta such that the slowest frequency is interpolated by as much as there are more positions than in the old context."""
    old = s[OLD]
    return theta if positions <= old else theta * (s["factor"] * positions / old - (s["factor"] - 1)) ** (dim / (dim - 2))


def _longrope(frequencies: Tensor, positions: int, s: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divided by what was searched for each of them, for long texts or for short ones; and the scale of the table."""
    factor, old = s["factor"], s[OLD]
    which = "long_factor" if positions > old else "short_factor"
    if len(s[which]) != len(frequencies):
        raise ValueError(f"rope_table: rope_type 'longrope': {which} has {len(s[which])} numbers for {len(frequencies)} frequencies; give one for each")
    scale = s.get("attention_factor") or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old)))
    return frequencies / torch.tensor(s[which], dtype=torch.float32, device="cpu"), scale


def _llama3(frequencies: Tensor, s: Mapping[str, Any]) -> Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between the two wavelengths."""
    low, high, old = s["low_freq_factor"], s["high_freq_factor"], s[OLD]
    if not low < high:
        raise ValueError(f"rope_table: rope_type 'llama3': low_freq_factor is {low}, high_freq_factor {high}; the high one must be the larger")
    smooth = ((old * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / s["factor"])


def _yarn(frequencies: Tensor, dim: int, theta: float, s: Mapping[str, Any]) -> tuple[Tensor, float]:
    """NTK-by-parts: dimensions that turn less than `beta_slow` times over the old context are interpolated, those above `beta_fast` kept."""
    factor, old = s["factor"], s[OLD]

    def turns(count: float) -> float:  # the dimension that turns `count` times over the old context
        return dim * math.log(old / (count * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = s.get("beta_fast") or 32, s.get("beta_slow") or 1
    if fast < slow:
        raise ValueError(f"rope_table: rope_type 'yarn': beta_fast is {fast}, beta_slow {slow}; the fast one must not be the smaller")
    first, last = turns(fast), turns(slow)
    if s.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, _yarn_attention(factor, s)


def _yarn_attention(factor: float, s: Mapping[str, Any]) -> float:
    """The scale of the table; DeepSeek's `mscale` and `mscale_all_dim` generalise it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if s.get("attention_factor") is not None:
        return s["attention_factor"]
    if s.get("mscale") and s.get("mscale_all_dim"):
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)
