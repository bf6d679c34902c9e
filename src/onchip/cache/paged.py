"""The paged KV cache: one pool of pages for all layers, and a page list for each sequence (Kwon et al., 2023, PagedAttention).

A page holds `page` consecutive tokens of one sequence, in every layer at the same index. Sequences of any length share
the pool with at most one part-filled page each.
"""

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor


class OutOfPages(RuntimeError):
    """The pool has too few free pages; nothing was taken and nothing was lost."""


@dataclass
class PageList:
    """The pages of one sequence in order, and how many tokens it has in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagePool:
    """Pages of keys and values.

    k, v    [layers, pages, page, kv_heads, dim]; a free page may hold anything.
    """

    def __init__(self, layers: int, pages: int, page: int, kv_heads: int, dim: int, *, dtype: torch.dtype, device: torch.device):
        if pages < 1 or page < 1 or page & (page - 1):
            raise ValueError(f"PagePool: {pages} pages of {page} tokens; give at least one page, of a power of two of tokens")
        self.page = page
        self.k, self.v = (torch.empty(layers, pages, page, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
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
    def bytes_per_page(layers: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * page * kv_heads * dim * dtype.itemsize

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
