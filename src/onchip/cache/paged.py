"""The paged KV cache: one pool of pages for all layers, and a page list for each sequence (Kwon et al., 2023, PagedAttention).

A page holds `page` consecutive tokens of one sequence, in every layer at the same index. Sequences of any length share
the pool with at most one part-filled page each.
"""

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onchip.core.formats import Codes, Format


class OutOfPages(RuntimeError):
    """The pool has too few free pages; nothing was taken and nothing was lost."""


@dataclass
class PageList:
    """The pages of one sequence in order, and how many tokens it has in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """Pages of keys and values.

    k, v    [layers, pages, page, kv_heads, dim], or quantised uint8 [layers, pages, bytes of a page]; a free page may hold anything. `layer(i)`: as
            `PagedKV` and `Append` have them.

    format    of quantised keys and values (`Format`, or its text: "int8", "int4/32"); None: they are in `dtype`.
    channel   float32 [layers, kv_heads, dim]: what keys are divided by before they are quantised, see `channel_scale`.
    """

    def __init__(
        self, layers: int, pages: int, page: int, kv_heads: int, dim: int, *, dtype: torch.dtype, device: torch.device,
        format: Format | str | None = None, channel: Tensor | None = None,
    ):  # fmt: skip
        if pages < 1 or page < 1:
            raise ValueError(f"PagePool: {pages} pages of {page} tokens; give at least one page, of at least one token")
        if channel is not None and (format is None or channel.shape != (layers, kv_heads, dim) or channel.dtype != torch.float32):
            given = f"{channel.dtype} {list(channel.shape)} beside format {format}"
            raise ValueError(f"PagePool: channel is {given}; give float32 [{layers}, {kv_heads}, {dim}] beside a format, or None")
        self.page, self.format = page, None if format is None else Format.of(format)
        if self.format is None:
            self.k, self.v = (torch.empty(layers, pages, page, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
            self._layers = list(zip(self.k, self.v, strict=True))
        else:
            form, sizes = self.format, (page, kv_heads, dim)
            self.k, self.v = (torch.empty(layers, pages, form.page_bytes(*sizes), dtype=torch.uint8, device=device) for _ in range(2))
            channels = [None] * layers if channel is None else channel.to(device)
            self._layers = [(Codes.over(k, form, sizes, c), Codes.over(v, form, sizes)) for k, v, c in zip(self.k, self.v, channels, strict=True)]
        self._free = list(range(pages))  # a heap: low pages first, so that one sequence's pages mostly lie side by side
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def bytes_used(self) -> int:
        """Bytes of keys and values in pages that sequences hold."""
        return len(self._used) * self.k[:, :1].nbytes * 2

    @staticmethod
    def bytes_per_page(layers: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype, format: Format | str | None = None) -> int:
        return 2 * layers * (page * kv_heads * dim * dtype.itemsize if format is None else Format.of(format).page_bytes(page, kv_heads, dim))

    def layer(self, i: int) -> tuple[Tensor, Tensor] | tuple[Codes, Codes]:
        """Keys and values of a layer, [pages, page, kv_heads, dim]."""
        return self._layers[i]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page)

    def reserve(self, sequence: PageList, tokens: int) -> None:
        """Give `sequence` pages for `tokens` tokens in all. Raises OutOfPages, and then changes nothing."""
        wanted = self.pages_for(tokens) - len(sequence.pages)
        if wanted > len(self._free):
            raise OutOfPages(
                f"{tokens} tokens need {wanted} more pages of {self.page} tokens and {len(self._free)} of {self.num_pages} are free; "
                "wait for a sequence to end, or make the pool larger"
            )
        taken = [heapq.heappop(self._free) for _ in range(wanted)]
        self._used.update(taken)
        sequence.pages += taken

    def append(self, sequence: PageList, tokens: int) -> Tensor:
        """Room for `tokens` more: their slots (`page index * page size + offset`), int64 [tokens] on the CPU. Raises OutOfPages, and then changes nothing."""
        self.reserve(sequence, sequence.length + tokens)
        positions = torch.arange(sequence.length, sequence.length + tokens)
        sequence.length += tokens
        return torch.tensor(sequence.pages)[positions // self.page] * self.page + positions % self.page

    def release(self, sequence: PageList) -> None:
        """Give back every page of `sequence`, which is empty afterwards."""
        twice = set(sequence.pages) - self._used
        if twice:
            raise ValueError(f"release: pages {sorted(twice)} are free already; a sequence may be released once")
        self._used.difference_update(sequence.pages)
        for page in sequence.pages:
            heapq.heappush(self._free, page)
        sequence.pages, sequence.length = [], 0

    def table(self, sequences: list[PageList], width: int | None = None) -> Tensor:
        """The page table of a batch, int32 [batch, width] on the CPU, 0 past the end of each list; `width` defaults to the longest."""
        width = max([len(s.pages) for s in sequences] + [1]) if width is None else width
        return torch.tensor([s.pages[:width] + [0] * (width - len(s.pages)) for s in sequences], dtype=torch.int32).view(len(sequences), width)
