"""A mod: what is asked of attention beside its sizes, in plain Python, and what its mask lets through."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import MaskMod, as_mask
from onchip.core.problem import Attention
from onchip.core.scores import ScoreMod, chain

CELLS = 1 << 26  # (query, key) pairs that are looked at together when the seen ones are counted


class Size(NamedTuple):
    """What a mod is made for: `rows` queries and `cols` keys a sequence, and where its tensors lie."""

    batch: int
    heads: int
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Mod:
    """What is asked of attention beside its sizes.

    mask, score   functions (b, h, i, j) -> bool and (s, b, h, i, j) -> s.       sinks   a logit a head.
    own           arguments of `onchip.attention` that say the same without the functions; a dropout, which is none of them, stands here alone.
    alike         whether the mask is the same for all sequences and heads.
    """

    mask: Callable | None = None
    score: Callable | None = None
    sinks: Tensor | None = None
    own: dict[str, Any] = field(default_factory=dict)
    alike: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of `onchip.attention`, but for the sinks."""
        return self.own or self.functions

    @property
    def functions(self) -> dict[str, Any]:
        """The same from the functions alone, which take part of the sequences and heads as well."""
        given = {"mask": MaskMod(self.mask) if self.mask else None, "score": ScoreMod(self.score) if self.score else None, "dropout": self.own.get("dropout")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is read beside q, k and v."""
        given = self.arguments
        mask, score = given.get("mask"), chain(given.get("bias"), given.get("score"), given.get("softcap"))
        return (*(as_mask(mask).tensors if mask is not None else ()), *(score.tensors if score else ()), *(() if self.sinks is None else (self.sinks,)))


def area(mod: Mod, p: Attention, device: torch.device) -> int:
    """The (query, key) pairs of all sequences and heads that the mask lets through, counted one by one."""
    if mod.mask is None:
        return p.batch * p.heads * p.len_q * p.len_k
    batch, heads = (1, 1) if mod.alike else (p.batch, p.heads)
    b, h, j = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(heads, device=device).view(-1, 1, 1), torch.arange(p.len_k, device=device)
    rows = torch.arange(p.len_q, device=device).split(max(1, CELLS // (batch * heads * p.len_k)))
    seen = sum(int(mod.mask(b, h, i[:, None], j).expand(batch, heads, len(i), p.len_k).sum()) for i in rows)
    return seen * (p.batch * p.heads // (batch * heads))


def dense(mod: Mod, p: Attention, device: torch.device) -> Tensor:
    """Its mask, one for all heads, as torch's own attention takes it: bool [batch, 1, len_q, len_k]."""
    b, i, j = (torch.arange(n, device=device).view(shape) for n, shape in ((p.batch, (-1, 1, 1, 1)), (p.len_q, (-1, 1)), (p.len_k, (-1,))))
    return mod.mask(b, 0, i, j).expand(p.batch, 1, p.len_q, p.len_k).contiguous()
