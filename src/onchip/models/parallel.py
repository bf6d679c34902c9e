"""Tensor parallelism (Megatron-LM; Shoeybi et al., 2019): each rank has some heads, some of the MLP and some words of every layer of one model.

q, k, v, gate and up are cut by rows, o and down by columns, with one sum over the ranks behind each; embedding and head are cut by words. All ranks
compute the same stream of numbers, bit for bit, so that each draws the same tokens.
"""

import socket
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.core import settings
from onchip.core.ranks import Boxes, Ranks
from onchip.models.families import ModelConfig
from onchip.models.pieces import Span

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the same; its name from torch 2.13 on

BOX_BYTES = 8 << 20  # that a rank sends the others of a sum at most: so many took 27 us between two H200s, and NCCL 56


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

    def meet(self, width: int, dtype: torch.dtype, device: torch.device) -> Ranks:
        """What this rank's sums of rows [.., width] go by: memory that all ranks can write to where they are GPUs of one host. All ranks call it together."""
        if self.of == 1 or self.group is None:
            return Ranks()
        boxes, apart = None, self._apart(device)
        if apart:
            return Ranks(self.rank, self.of, self.group, None, apart)
        try:
            boxes = self._boxes(width, dtype, device)
        except RuntimeError as error:  # a container may keep its processes apart
            apart = f"torch shared no memory among the ranks: {str(error).partition(chr(10))[0]}"
        if not self.least(int(boxes is not None), device):  # which is also when all boxes are empty, and the first may send
            boxes, apart = None, apart or "torch shared no memory among the other ranks"
        return Ranks(self.rank, self.of, self.group, boxes, apart)

    def _boxes(self, width: int, dtype: torch.dtype, device: torch.device) -> Boxes:
        from torch.distributed import _symmetric_memory as symmetric  # a part of torch that not every build has

        settings.unless_set("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here is sent to several at once
        rows = max(1, BOX_BYTES // (width * dtype.itemsize * (self.of - 1)))
        shape = (2, self.of, rows, width)
        mine = symmetric.empty(shape, dtype=dtype, device=device)
        memory = symmetric.rendezvous(mine, self.group)
        mine.view(torch.uint8).fill_(255)
        boxes = tuple(mine if rank == self.rank else memory.get_buffer(rank, shape, dtype) for rank in range(self.of))
        return Boxes(boxes, torch.zeros(rows, dtype=torch.int32, device=device), memory)

    def _apart(self, device: torch.device) -> str:
        """Why the ranks have no memory that all can write to, the same sentence on each; "" where they can."""
        if device.type != "cuda" or torch.version.hip is not None:
            return "ranks share memory on NVIDIA GPUs alone"
        own = torch.cuda.current_device() if device.index is None else device.index
        facts = torch.tensor([zlib.crc32(socket.gethostname().encode()), own], device=device)
        every = self.gather(facts[None], 2 * self.of).view(-1, 2).tolist()
        reached = all(at == own or (at < torch.cuda.device_count() and torch.cuda.can_device_access_peer(own, at)) for _, at in every)
        return why_apart(every, bool(self.least(int(reached), device)))

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


def why_apart(every: list[tuple[int, int]], reached: bool) -> str:
    """Why ranks with these hosts and numbers of GPUs cannot write to each other's memory; "" where they can. `reached`: whether all of their GPUs can."""
    hosts, numbers = {host for host, _ in every}, [number for _, number in every]
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(numbers)) < len(every):
        return f"the ranks know their GPUs as {', '.join(f'cuda:{n}' for n in numbers)}; let every process see all GPUs, and take one of its own"
    return "" if reached else "the ranks' GPUs do not all reach each other's memory"


def _fits(c: ModelConfig, of: int) -> bool:
    return c.heads % of == c.inner % of == 0 and (c.kv_heads % of == 0 or of % c.kv_heads == 0)
