"""What a decode step reads and advances, on the device: a row for each request that decodes."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.engine.request import MOST_BIASED, Request
from onchip.ops.sampling import Bias, Penalties, Sampling

LONGS = ("tokens", "positions", "seed", "step")  # int64
FLOATS = ("temperature", "top_p", "min_p", "typical", "repetition", "presence", "frequency")  # float32, in words of 32 bits
NEVER = -(1 << 62)  # a position before all


class Wants(NamedTuple):
    """What some row of a batch wants beside being drawn. A step, and so a graph, has only what somebody wants."""

    penalties: bool = False
    bias: bool = False
    mask: bool = False
    logprobs: bool = False
    adapter: bool = False

    @property
    def plain(self) -> bool:
        return not any(self)

    @staticmethod
    def of(requests: list[Request]) -> "Wants":
        p = [r.params for r in requests]
        return Wants(
            any(x.penalised for x in p),
            any(x.logit_bias or x.min_tokens for x in p),
            any(r.mask is not None for r in requests),
            any(x.logprobs is not None for x in p),
            any(r.slot >= 0 for r in requests),
        )


class State:
    """Up to `size` rows; one without a sequence has position -1. What only some requests want takes memory when the first of them comes."""

    def __init__(self, size: int, width: int, vocab: int, device: torch.device):
        self.size, self.vocab, self.device = size, vocab, device
        self.longs = torch.zeros(len(LONGS), size, dtype=torch.int64, device=device)
        self.words = torch.zeros(len(FLOATS) + 2, size, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(size, width, dtype=torch.int32, device=device)
        self.output: Tensor | None = None  # int32 [size, vocab]: how often each token was there
        self.prompt: Tensor | None = None
        self.bias_ids: Tensor | None = None  # int64 [size, MOST_BIASED]
        self.bias_values: Tensor | None = None
        self.bias_until: Tensor | None = None  # at positions before this one the token is forbidden
        self.mask: Tensor | None = None  # int32 [size, words]
        self.history: Tensor | None = None  # int32 [size, most tokens of a sequence and a draft]: the tokens of each row, for who drafts
        self.clear(0)

    def rows(self, count: int) -> "State":
        """The first `count` rows, sharing memory."""
        part = object.__new__(State)
        part.size, part.vocab, part.device = count, self.vocab, self.device
        part.longs, part.words = self.longs[:, :count], self.words[:, :count]
        for name in ("page_table", *OPTIONAL):
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else tensor[:count])
        return part

    @property
    def tokens(self) -> Tensor:
        return self.longs[0]

    @property
    def positions(self) -> Tensor:
        return self.longs[1]

    @property
    def adapters(self) -> Tensor:
        """The slot of each row's LoRA adapter, -1 for none."""
        return self.words[-1]

    @property
    def sampling(self) -> Sampling:
        t, top_p, min_p, typical, *_ = self.words[: len(FLOATS)].view(torch.float32)
        return Sampling(t, self.words[-2], top_p, min_p, self.longs[2], self.longs[3], typical)

    def penalties(self) -> Penalties:
        return Penalties(*self.words[4:7].view(torch.float32), self.output, self.prompt)

    def bias(self, positions: Tensor) -> Bias:
        return Bias(self.bias_ids, torch.where(positions[:, None] < self.bias_until, -torch.inf, self.bias_values))

    def remember(self, new: Tensor, used: Tensor) -> None:
        """Tokens [rows, n] after those up to each row's position, into the history of the rows in use, [rows, 1]."""
        at = self.positions[:, None] + 1 + torch.arange(new.shape[1], device=new.device)
        at = at.clamp(max=self.history.shape[1] - 1)
        self.history.scatter_(1, at, torch.where(used, new.int(), self.history.gather(1, at)))

    # ---- written from the host, before a step

    def clear(self, first: int) -> None:
        """No sequence in the rows from `first` on."""
        self.positions[first:].fill_(-1)

    def thin(self) -> None:
        """Give back the memory of what only some requests want: no graph may read it any more."""
        for name in OPTIONAL:
            if name != "history":
                setattr(self, name, None)

    def keep(self, rows: list[int]) -> None:
        """These rows, in this order, are the first ones from now on."""
        if rows == list(range(len(rows))):
            return
        index, count = upload(torch.tensor(rows), self.device), len(rows)
        self.longs[:, :count] = self.longs[:, index]
        self.words[:, :count] = self.words[:, index]
        for name in ("page_table", *OPTIONAL):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor[:count] = tensor[index]

    def load(self, first: int, requests: list[Request], wants: Wants) -> None:
        """Write requests, all of whose tokens have been read, to the rows from `first` on."""
        self._provide(wants)
        rows = slice(first, first + len(requests))
        p = [r.params for r in requests]
        known = [r.known() for r in requests]
        longs = [[k[-1] for k in known], [len(k) - 1 for k in known], [r.seed for r in requests], [0] * len(p)]
        self.longs[:, rows] = upload(torch.tensor(longs), self.device)
        floats = [(x.temperature, x.top_p, x.min_p, x.typical_p, x.repetition_penalty, x.presence_penalty, x.frequency_penalty) for x in p]
        ints = torch.tensor([[x.top_k for x in p], [r.slot for r in requests]], dtype=torch.int32)
        self.words[:, rows] = upload(torch.cat((torch.tensor(floats, dtype=torch.float32).T.contiguous().view(torch.int32), ints)), self.device)
        self.page_table[rows] = upload(_table([r.pages.pages for r in requests], self.page_table.shape[1]), self.device)
        if self.output is not None:
            self.output[rows] = self._counts([r.tokens for r in requests])
            self.prompt[rows] = self._counts([r.prompt for r in requests])
        if self.mask is not None:
            self.mask[rows] = -1
        if self.history is not None:
            width = max(map(len, known))
            self.history[rows, :width] = upload(torch.tensor([k + [0] * (width - len(k)) for k in known], dtype=torch.int32), self.device)
        if self.bias_ids is not None:
            self._load_bias(rows, requests)

    def grow(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """Pages that sequences got since they were loaded."""
        index = upload(torch.tensor([rows, columns, pages]), self.device)
        self.page_table[index[0], index[1]] = index[2].int()

    def allow(self, requests: list[Request]) -> None:
        """The tokens that may follow now, for the first rows."""
        free = torch.full_like(self.mask[0], -1, device="cpu")
        rows = torch.stack([free if request.mask is None else request.allowed for request in requests])
        self.mask[: len(requests)] = upload(rows, self.device)

    def _provide(self, wants: Wants) -> None:
        """Memory for what is wanted; the rows that are there want none of it."""

        def full(width: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((self.size, width), value, dtype=dtype, device=self.device)

        if wants.penalties and self.output is None:
            self.output, self.prompt = full(self.vocab, 0), full(self.vocab, 0)
        if wants.bias and self.bias_ids is None:
            ids, until = (full(MOST_BIASED, value, torch.int64) for value in (-1, NEVER))
            self.bias_ids, self.bias_until, self.bias_values = ids, until, full(MOST_BIASED, 0, torch.float32)  # all three or, without memory, none
        if wants.mask and self.mask is None:
            self.mask = full(-(-self.vocab // 32), -1)

    def _counts(self, tokens: list[list[int]]) -> Tensor:
        """How often each token is in each list, int32 [lists, vocab]."""
        rows = torch.repeat_interleave(torch.tensor([len(some) for some in tokens]))
        flat = torch.tensor([token for some in tokens for token in some], dtype=torch.int64)
        places = upload(rows * self.vocab + flat, self.device)
        counts = torch.zeros(len(tokens) * self.vocab, dtype=torch.int32, device=self.device)
        return counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32)).view(-1, self.vocab)

    def _load_bias(self, rows: slice, requests: list[Request]) -> None:
        ids = torch.full((len(requests), MOST_BIASED), -1)
        values, until = torch.zeros_like(ids, dtype=torch.float32), torch.full_like(ids, NEVER)
        for i, r in enumerate(requests):
            p = r.params
            early = len(r.prompt) + p.min_tokens - 1  # position of the last token at which one that ends the text may follow
            entries = {token: (float(value), NEVER) for token, value in p.logit_bias.items()}
            if p.min_tokens:
                entries |= {token: (p.logit_bias.get(token, 0.0), early) for token in sorted(r.ends)}
            if entries:
                count = len(entries)
                ids[i, :count] = torch.tensor(list(entries))
                values[i, :count] = torch.tensor([value for value, _ in entries.values()])
                until[i, :count] = torch.tensor([end for _, end in entries.values()])
        for tensor, source in ((self.bias_ids, ids), (self.bias_values, values), (self.bias_until, until)):
            tensor[rows] = upload(source, self.device)


OPTIONAL = ("output", "prompt", "bias_ids", "bias_values", "bias_until", "mask", "history")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without a wait: from pinned memory, which torch keeps until the copy is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _table(lists: list[list[int]], width: int) -> Tensor:
    """Rows of pages, int32 [lists, width], 0 past the end of each."""
    table = torch.zeros(len(lists), width, dtype=torch.int32)
    for row, pages in zip(table, lists, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return table
