"""What a score reads of each query and key, where a kernel can copy it tile by tile. Imports no DSL."""

import functools
import re
from typing import NamedTuple

import torch


class PairTile(NamedTuple):
    """What a text reads for each query and key, where that is one float tensor at [.., i, j]: tiles of it can be copied.

    tensor    its number among the captured ones.      axes   which of b and h come before i and j, and in which order.
    """

    tensor: int
    axes: str
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def pair_tile(text: str) -> PairTile | None:
    """None where there is no such tensor, or more is read by query and key."""
    reads = {read for read in re.findall(r"aten\.index\.Tensor\((c\d+), \[([^\]]*)\]", text) if {"i", "j"} <= set(re.findall(r"\w+", read[1]))}
    if len(reads) != 1:
        return None
    ((name, indices),) = reads
    axes, dtype = indices.removesuffix("i, j").replace(", ", ""), re.search(rf"{name}: '(\w+)\[", text)[1]
    others = len(re.findall(rf"aten\.index\.Tensor\({name}, ", text)) - text.count(f"aten.index.Tensor({name}, [{indices}])")
    if axes not in ("", "b", "h", "bh", "hb") or dtype not in ("bfloat16", "float16", "float32") or others:
        return None
    return PairTile(int(name[1:]), axes, getattr(torch, dtype))
