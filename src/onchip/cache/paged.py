"""The paged KV cache: one pool of pages for all layers, and a page list for each sequence (Kwon et al., 2023, PagedAttention).

A page holds `page` consecutive tokens, in every layer at the same index. Sequences of any length share the pool with at most
one part-filled page each. A page may have several holders, sequences or the tree of `radix.py`; the last to let go frees it, and
who appends to a page that others hold gets a copy of it first.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from onchip.core.arguments import check_count, kind_of
from onchip.core.formats import Codes, Format
from onchip.core.once import ends
from onchip.core.parts import is_whole
from onchip.core.trace import readable


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
        if not all(is_whole(n) and n > 0 for n in (layers, pages, page, kv_heads, dim)):
            given = f"{layers} layers, {pages} pages of {page} tokens, {kv_heads} heads of {dim}"
            raise ValueError(f"PagePool: {given}; give whole numbers: at least one page, of at least one token, and one or more of the others")
        if channel is not None:
            self._check_channel(channel, format, (layers, kv_heads, dim))
        self.page, self.format = page, None if format is None else Format.of(format)
        if self.format is None:
            self.k, self.v = (torch.empty(layers, pages, page, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
            self._layers = list(zip(self.k, self.v, strict=True))
            self._tokens = [self.k.flatten(0, 1), self.v.flatten(0, 1)]  # [layers pages, page, ...]
        else:
            form, sizes = self.format, (page, kv_heads, dim)
            self.k, self.v = (torch.empty(layers, pages, form.page_bytes(*sizes), dtype=torch.uint8, device=device) for _ in range(2))
            channels = [None] * layers if channel is None else channel.to(device)
            self._layers = [(Codes.over(k, form, sizes, c), Codes.over(v, form, sizes)) for k, v, c in zip(self.k, self.v, channels, strict=True)]
            parts = [part for whole in (self.k, self.v) for part in Codes.over(whole.flatten(0, 1), form, sizes).tensors]
            self._tokens = [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]  # torch does not write floats of 8 bits by index
        self.beside: PagePool | None = None  # of a second model that reads the same tokens: its layers of the same pages, which are copied with these
        self._free = list(range(pages))  # a heap: low pages first, so that one sequence's pages mostly lie side by side
        self._holders = [0] * pages

    @staticmethod
    def _check_channel(channel: Tensor, form: Format | str | None, shape: tuple[int, int, int]) -> None:
        if form is None or not isinstance(channel, Tensor) or channel.shape != shape or channel.dtype != torch.float32:
            raise ValueError(f"PagePool: channel is {kind_of(channel)} beside format {form}; give float32 {list(shape)} beside a format, or None")
        if readable(channel) and not bool((channel.isfinite() & (channel != 0)).all()):  # keys are divided by it
            odd = channel[~channel.isfinite() | (channel == 0)]
            raise ValueError(f"PagePool: channel has {len(odd)} numbers that are 0 or not finite ({odd[0]:g} first); give others, as channel_scale makes them")

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """The tensors that a page is made of, each [layers, pages, ...]: what is copied when a page is."""
        return (self.k, self.v) if self.beside is None else (self.k, self.v, *self.beside.storage)

    @cached_property
    def page_bytes(self) -> int:
        """Of one page, keys and values of all layers."""
        return sum(tensor[:, 0].nbytes for tensor in self.storage)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def bytes_used(self) -> int:
        """Bytes of keys and values in pages that somebody holds; what is shared counts once."""
        return (self.num_pages - self.num_free) * self.page_bytes

    @staticmethod
    def bytes_per_page(layers: int, page: int, kv_heads: int, dim: int, dtype: torch.dtype, format: Format | str | None = None) -> int:
        return 2 * layers * (page * kv_heads * dim * dtype.itemsize if format is None else Format.of(format).page_bytes(page, kv_heads, dim))

    def layer(self, i: int) -> tuple[Tensor, Tensor] | tuple[Codes, Codes]:
        """Keys and values of a layer, [pages, page, kv_heads, dim]."""
        return self._layers[i]

    def slots(self, table: Tensor, places: Tensor) -> Tensor:
        """Where keys and values of places int64 [rows, n] of sequences go whose pages are in the rows of `table`: `page index * page size + offset`."""
        return table.gather(1, (places // self.page).clamp(max=table.shape[1] - 1)).long() * self.page + places % self.page

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy keys and values, in all layers, from slots `source` to slots `target`, int64 [n] on the device; all are read before one is written. Equal
        targets need equal sources. Raises ValueError for slots that there are not, where they are on a CPU, and then copies nothing."""
        for name, slots in (("source", source), ("target", target)):
            if not isinstance(slots, Tensor) or slots.dtype not in (torch.int64, torch.int32) or slots.ndim != 1 or slots.shape != source.shape:
                raise ValueError(f"move: {name} is {kind_of(slots)}; give int64 [n], as many slots of source as of target")
            if (found := ends(slots)) is not None and not 0 <= found[0] <= found[1] < self.num_pages * self.page:
                raise ValueError(f"move: {name} is slots {found[0]} to {found[1]}; give 0 to {self.num_pages * self.page - 1}")
        first = torch.arange(0, self.k.shape[0] * self.num_pages, self.num_pages, device=source.device)[:, None]  # page of each layer
        (old, place), (new, to) = ((first + slots // self.page, slots % self.page) for slots in (source, target))
        for tensor in self._tokens:
            tensor[new, to] = tensor[old, place]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page)

    def holders(self, page: int) -> int:
        """How many hold `page`; 0 where it is free."""
        return self._holders[page]

    def missing(self, sequence: PageList, tokens: int) -> int:
        """Pages that `reserve` of the same arguments takes."""
        check_count("reserve", 0, tokens=tokens)
        return max(0, self.pages_for(tokens) - len(sequence.pages)) + len(self._copies(sequence, tokens))

    def reserve(self, sequence: PageList, tokens: int) -> None:
        """Give `sequence` pages for `tokens` tokens in all, and where those past its end go to pages that others hold too, copies of these.

        Raises OutOfPages, and then changes nothing.
        """
        taken = self.take(self.missing(sequence, tokens), f"{tokens} tokens")
        for at in self._copies(sequence, tokens):
            own = taken.pop()
            for tensor in self.storage:
                tensor[:, own].copy_(tensor[:, sequence.pages[at]])
            self.drop([sequence.pages[at]])
            sequence.pages[at] = own
        sequence.pages += taken

    def take(self, count: int, what: str = "they") -> list[int]:
        """`count` free pages, each held once from now on. Raises OutOfPages, in which `what` needs them, and then changes nothing."""
        check_count("take", 0, pages=count)
        if count > len(self._free):
            raise OutOfPages(
                f"{what} need {count} more pages of {self.page} tokens and {len(self._free)} of {self.num_pages} are free; "
                "wait for a sequence to end, or make the pool larger"
            )
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One holder more of each of these pages, which somebody holds already; `drop` or `release` takes it back. Raises ValueError where one is free
        or none of this pool, and then changes nothing."""
        self._listed("share", pages)
        holders, count = self._holders, len(self._holders)
        for page in pages:  # 32k pages of one token take 1.1 ms
            if not 0 <= page < count or not holders[page]:
                raise ValueError(f"share: page {page} is {self._lost(page)}; share pages while a sequence holds them")
        for page in pages:
            holders[page] += 1

    def fork(self, sequence: PageList) -> PageList:
        """A sequence of the same tokens on the same pages; whichever appends first to a part-filled page copies it."""
        pages = sequence.pages[: self.pages_for(sequence.length)]
        self.share(pages)
        return PageList(pages, sequence.length)

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less of each of these pages; those without any are free. Raises ValueError where one is held by nobody, and then changes nothing."""
        holders, count, push, named = self._holders, len(self._holders), heapq.heappush, Counter(pages)
        self._listed("drop", named)
        for page, times in named.items():
            if not 0 <= page < count or holders[page] < times:
                raise ValueError(f"drop: page {page} is {self._lost(page)}; each holder lets go of it once")
        for page, times in named.items():
            holders[page] = left = holders[page] - times
            if not left:
                push(self._free, page)

    @staticmethod
    def _listed(name: str, pages: Iterable[int]) -> None:
        """Raises TypeError for elements of a tensor, which are no numbers: two of one page differ, and one would be a free page."""
        if isinstance(next(iter(pages), 0), Tensor):
            raise TypeError(f"{name}: pages are tensors; give a list of numbers, as its tolist() makes it")

    def _lost(self, page: int) -> str:
        """What a page is that nobody holds."""
        return "free" if 0 <= page < self.num_pages else f"none of this pool, which has 0 to {self.num_pages - 1}"

    def _copies(self, sequence: PageList, tokens: int) -> list[int]:
        """Where in the sequence's list others read pages that tokens past its end would be written to; of a length that was lowered these may be several."""
        if tokens <= sequence.length:
            return []
        end = min(len(sequence.pages), self.pages_for(tokens))
        return [at for at in range(sequence.length // self.page, end) if self._holders[sequence.pages[at]] > 1]

    def append(self, sequence: PageList, tokens: int) -> Tensor:
        """Room for `tokens` more: their slots (`page index * page size + offset`), int64 [tokens] on the CPU. Raises OutOfPages, and then changes nothing."""
        check_count("append", 0, tokens=tokens)
        self.reserve(sequence, sequence.length + tokens)
        positions = torch.arange(sequence.length, sequence.length + tokens, device="cpu")
        sequence.length += tokens
        return torch.tensor(sequence.pages, dtype=torch.int64, device="cpu")[positions // self.page] * self.page + positions % self.page

    def release(self, sequence: PageList) -> None:
        """Let go of every page of `sequence`, which is empty afterwards."""
        self.drop(sequence.pages)
        sequence.pages, sequence.length = [], 0

    def table(self, sequences: list[PageList], width: int | None = None) -> Tensor:
        """The page table of a batch, int32 [batch, width] on the CPU, 0 past the end of each list; `width` defaults to the longest."""
        width = max([len(s.pages) for s in sequences] + [1]) if width is None else width
        check_count("table", 0, width=width)
        return torch.tensor([s.pages[:width] + [0] * (width - len(s.pages)) for s in sequences], dtype=torch.int32, device="cpu").view(len(sequences), width)
