"""Tensor parallelism (Megatron-LM; Shoeybi et al., 2019): each rank has some heads, some of the MLP and some words of every layer of one model.

q, k, v, gate and up are cut by rows, o and down by columns, with one sum over the ranks behind each; embedding and head are cut by words. All ranks
compute the same stream of numbers, bit for bit, so that each draws the same tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.models.families import ModelConfig
from onchip.models.pieces import Span

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the same; its name from torch 2.13 on


class Share(NamedTuple):
    """What one rank has of a model."""

    heads: Span
    kv_heads: Span
    inner: Span
    vocab: Span


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `of`, which have a model together.

    group   their `torch.distributed` process group: NCCL's on GPUs, where its collectives are captured in CUDA graphs like any kernel; gloo's on CPUs.
    """

    rank: int = 0
    of: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def join(group: dist.ProcessGroup | None = None) -> "TensorParallel":
        """This process in `group`, the default one of `torch.distributed.init_process_group` if None."""
        group = group or dist.group.WORLD
        return TensorParallel(dist.get_rank(group), dist.get_world_size(group), group)

    def share(self, config: ModelConfig) -> Share:
        """This rank's part. Where there are more ranks than key heads, each key head is on several.

        Raises ValueError for a model that cannot be cut in `of`, and says in how many it can.
        """
        c = config
        if not _fits(c, self.of):
            fine = [of for of in range(1, c.heads + 1) if _fits(c, of)]
            raise ValueError(
                f"tensor parallelism: {c.heads} heads over {c.kv_heads} key heads, with {c.inner} columns in the MLP, cannot be cut in {self.of} equal parts; "
                f"take {' or '.join(map(str, fine))} ranks"
            )
        words = -(-c.vocab // self.of)  # as many on each rank, the last ones of which may be no word
        first = min(self.rank * words, c.vocab)
        heads, inner = c.heads // self.of, c.inner // self.of
        return Share(
            Span(self.rank * heads, heads, c.heads),
            Span(self.rank * c.kv_heads // self.of, max(1, c.kv_heads // self.of), c.kv_heads),
            Span(self.rank * inner, inner, c.inner),
            Span(first, min(words, c.vocab - first), c.vocab),
        )

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its dtype, in place; the same bits on every rank."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """[rows, width] of every rank's columns x [rows, ..] side by side; what is past `width` is left off."""
        if self.group is None:
            return x
        parts = x.new_empty(self.of * len(x), x.shape[1])
        GATHER(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (self.of, -1)).transpose(0, 1).flatten(1)[:, :width]

    def least(self, count: int, device: torch.device) -> int:
        """The least of all ranks' counts, handed over on `device`."""
        if self.group is None:
            return count
        found = torch.tensor(count, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)


ALONE = TensorParallel()


def _fits(c: ModelConfig, of: int) -> bool:
    return c.heads % of == c.inner % of == 0 and (c.kv_heads % of == 0 or of % c.kv_heads == 0)
