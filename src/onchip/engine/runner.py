"""Runs the model: packed prefill, and a decode step whose state stays on the device, as one CUDA graph a batch-size bucket."""

import torch
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.engine.request import Request
from onchip.models.decoder import Decoder, Step
from onchip.ops.sampling import Sampling, sample


class State:
    """What a decode step reads and advances, for up to `size` sequences. A row without a sequence has position -1."""

    def __init__(self, size: int, width: int, device: torch.device):
        def at(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens = at(size, dtype=torch.int64)
        self.positions = at(size, dtype=torch.int64)
        self.page_table = at(size, width, dtype=torch.int32)
        floats, ints = torch.float32, torch.int32
        kinds = {"temperature": floats, "top_k": ints, "top_p": floats, "min_p": floats, "seed": torch.int64, "step": torch.int64, "typical": floats}
        self.sampling = Sampling(**{name: at(size, dtype=dtype) for name, dtype in kinds.items()})

    def rows(self, count: int) -> "State":
        """The first `count` rows, sharing memory."""
        part = object.__new__(State)
        part.tokens, part.positions, part.page_table = self.tokens[:count], self.positions[:count], self.page_table[:count]
        part.sampling = Sampling(*(field[:count] for field in self.sampling))
        return part


class Runner:
    """A model on a device with its cache. `prefill` and `decode` return the next token of each request."""

    def __init__(self, model: Decoder, pool: PagePool, max_batch: int, max_len: int):
        self.model, self.pool = model, pool
        self.width = pool.pages_for(max_len)
        self.state = State(_bucket(max_batch), self.width, model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._loaded: list[Request] = []

    @torch.inference_mode()
    def prefill(self, requests: list[Request]) -> list[int]:
        """Whole prompts end to end, without padding."""
        device, lengths = self.model.device, [len(r.prompt) for r in requests]
        tokens = torch.tensor([token for r in requests for token in r.prompt])
        positions = torch.cat([torch.arange(n) for n in lengths])
        slots = torch.cat([self.pool.append(r.pages, n) for r, n in zip(requests, lengths, strict=True)])
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        step = Step(*(x.to(device, non_blocking=True) for x in (tokens, positions, slots, offsets)), longest=max(lengths))
        last = (step.offsets[1:] - 1).long()
        how = _sampling(requests, [n - 1 for n in lengths], device)
        logits = self.model.logits(self.model.forward(step, self.pool)[last])
        return sample(logits, how).tolist()

    @torch.inference_mode()
    def decode(self, requests: list[Request]) -> list[int]:
        """One more token of each request. The state is written anew only when the batch is another one than last time."""
        count = len(requests)
        size = _bucket(count)
        if self.model.device.type == "cuda" and size not in self.graphs:
            self._capture(size)
        if self._loaded != requests:
            self._load(requests)
        for r in requests:
            r.pages.length += 1
        if self.model.device.type == "cuda":
            self.graphs[size].replay()
        else:
            self._step(self.state.rows(count), max(r.pages.length for r in requests))
        return self.state.tokens[:count].tolist()

    def forget(self) -> None:
        """The next decode writes the state anew, even for requests it has seen."""
        self._loaded = []

    def _load(self, requests: list[Request]) -> None:
        """Copy a batch into the state; the rows past it are empty."""
        s, count = self.state, len(requests)
        s.positions.fill_(-1)
        positions = [r.pages.length for r in requests]
        s.tokens[:count] = torch.tensor([r.tokens[-1] for r in requests]).to(s.tokens.device)
        s.positions[:count] = torch.tensor(positions).to(s.tokens.device)
        s.page_table[:count] = self.pool.table([r.pages for r in requests], self.width).to(s.tokens.device)
        for target, source in zip(s.sampling, _sampling(requests, positions, s.tokens.device), strict=True):
            target[:count] = source
        self._loaded = list(requests)

    def _step(self, s: State, longest: int | None = None) -> None:
        """Tokens in, tokens out, in place; nothing here waits for the host. `longest` cuts the page table where the host knows it."""
        page = self.pool.page
        used = s.positions >= 0
        at = s.positions.clamp(min=0)
        table = s.page_table if longest is None else s.page_table[:, : self.pool.pages_for(longest)]
        slots = table.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
        step = Step(s.tokens, at, torch.where(used, slots, -1), page_table=table, lengths=(s.positions + 1).int())
        logits = self.model.logits(self.model.forward(step, self.pool))
        s.sampling.step.copy_(at)
        s.tokens.copy_(sample(logits, s.sampling))
        s.positions.add_(used)

    def _capture(self, size: int) -> None:
        """One CUDA graph of the step for `size` rows, sampler included; the run before it compiles the kernels. Empties the state."""
        rows = self.state.rows(size)
        self.forget()
        self.state.positions.fill_(-1)  # nothing is written to the cache
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(rows)
        self.graphs[size] = graph


def _bucket(count: int) -> int:
    """Rows of the graph that runs `count` sequences: 1, 2, 4, 8, then multiples of 8."""
    return next((size for size in (1, 2, 4) if count <= size), -(-count // 8) * 8)


def _sampling(requests: list[Request], steps: list[int], device: torch.device) -> Sampling:
    p = [r.params for r in requests]
    columns = (
        torch.tensor([x.temperature for x in p], dtype=torch.float32),
        torch.tensor([x.top_k for x in p], dtype=torch.int32),
        torch.tensor([x.top_p for x in p], dtype=torch.float32),
        torch.tensor([x.min_p for x in p], dtype=torch.float32),
        torch.tensor([r.seed for r in requests], dtype=torch.int64),
        torch.tensor(steps, dtype=torch.int64),
        torch.ones(len(p)),
    )
    return Sampling(*(column.to(device) for column in columns))
