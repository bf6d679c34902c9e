"""Forward passes over chunks of prompts, and the decodes beside them, as CUDA graphs: one for each of a few numbers of tokens, to which a step is padded.

On the host a layer in eight operators takes 0.3 ms, and 1 to 1.8 where others use its cores, whatever it computes: longer than on an H200 for a thousand tokens
of most models. What a pass reads of lengths, places and pages it reads on the device, so that a graph is for all steps of its size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.models.decoder import Decoder, Step

SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)  # tokens


def accepts(model: Decoder, pool: PagePool) -> bool:
    """Not where a prompt alone is read from its own tensors (quantised caches), or by a kernel that was asked for by name; where a token's bits may not depend
    on how many others there are; or on several ranks, whose sums have not been tried so."""
    return pool.format is None and model.kernel == "auto" and not model.batch_invariant and model.parallel.of == 1


class Captured(NamedTuple):
    """A graph, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    out: tuple | Tensor


class Padded:
    """Buffers for steps of up to `most` tokens and `rows` sequences, of pages up to `width`. `most` is 0 where steps run as they come."""

    def __init__(self, model: Decoder, pool: PagePool, rows: int, width: int):
        self.most = SIZES[-1] if model.device.type == "cuda" and accepts(model, pool) else 0
        self.rows, self.width, self.device = rows, width, model.device
        self.graphs: dict[int, Captured] = {}
        self._step: Step | None = None

    def forward(self, step: Step, run: Callable[[Step], Tensor], capture: Callable[[Callable], Captured]) -> Tensor:
        """`run(step)`, of chunks over pages, of up to `most` tokens: hidden states, which the next pass of this size overwrites."""
        tokens, sequences = len(step.tokens), len(step.lengths)
        size = next(size for size in SIZES if tokens <= size)
        padded = self._padded(size)
        for name in ("tokens", "positions", "slots", "offsets", "lengths"):
            given = getattr(step, name)
            getattr(padded, name)[: len(given)].copy_(given)
        padded.page_table[:sequences, : step.page_table.shape[1]].copy_(step.page_table)
        padded.slots[tokens:].fill_(-1)  # nowhere
        padded.offsets[sequences + 1 :].fill_(tokens)
        padded.lengths[sequences:].fill_(0)
        if size not in self.graphs:
            self.graphs[size] = capture(lambda: run(padded))
        self.graphs[size].graph.replay()
        return self.graphs[size].out[:tokens]

    def _padded(self, size: int) -> Step:
        """The buffers of a size: the first of all."""
        if self._step is None:
            longs = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=self.device)
            ints = torch.zeros(2, self.rows + 1, dtype=torch.int32, device=self.device)
            table = torch.zeros(self.rows, self.width, dtype=torch.int32, device=self.device)
            self._step = Step(*longs, offsets=ints[0], page_table=table, lengths=ints[1, 1:])
        s, rows = self._step, min(size, self.rows)
        cut = s._replace(tokens=s.tokens[:size], positions=s.positions[:size], slots=s.slots[:size], offsets=s.offsets[: rows + 1], longest=size)
        return cut._replace(page_table=s.page_table[:rows], lengths=s.lengths[:rows])
