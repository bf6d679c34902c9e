"""Pages in host memory: where evicted ones wait until they are wanted again.

A page is its bytes, whatever tensors the pool is made of. On the host it lies in one piece, all layers together, so that many
small pieces become one transfer: pages are gathered into a staging buffer on the device, and neighbouring slots are copied at
once. Gathers and scatters run on the caller's stream, so a page may be written over, or read, by whatever is launched next;
the transfers run beside it on a stream of their own, in order, and nothing waits for the host.
"""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onchip.cache.paged import OutOfPages, PagePool
from onchip.core.arguments import check_count

# Bytes gathered for one transfer: 1 ms of a PCIe 5 link. torch keeps them until it is over, so a large batch takes its size in device memory.
STAGING = 64 << 20


class HostPool:
    """`slots` pages of `pool`'s kind in host memory, pinned where the pool is on a GPU (torch rounds pinned memory up to a power of two of bytes)."""

    def __init__(self, pool: PagePool, slots: int):
        check_count("HostPool", 1, slots=slots)
        storage = pool.storage
        if (least := min(tensor.shape[1] for tensor in storage)) < pool.num_pages:
            raise ValueError(f"HostPool: pool.beside has {least} pages, pool {pool.num_pages}; give it one of as many, since a page is copied in both")
        self.pool, self.num_slots = pool, slots
        self._device = tuple(_words(tensor) for tensor in storage)  # [layers, pages, ...]
        on_gpu = self._device[0].is_cuda
        self._host = tuple(torch.empty(slots, *t[:, 0].shape, dtype=t.dtype, device="cpu", pin_memory=on_gpu) for t in self._device)
        self._batch = max(1, STAGING // sum(t[0].nbytes for t in self._host))  # pages
        self._stream = torch.cuda.Stream(self._device[0].device) if on_gpu else None
        self._free = list(range(slots))  # a heap: neighbouring slots travel together
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free slots. Raises OutOfPages, and then takes none."""
        check_count("HostPool.take", 0, slots=count)
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages are to go to host memory and {len(self._free)} of {self.num_slots} slots are free; free some, or give it more slots"
            )
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(slots)
        return slots

    def free(self, slots: list[int]) -> None:
        """Give slots back; transfers that were begun still end well. Raises ValueError where one is not taken, or named twice, and then frees none."""
        self._check("free", slots)
        if len(set(slots)) < len(slots):
            raise ValueError(f"HostPool.free: {slots} names a slot twice; each is given back once")
        self._taken.difference_update(slots)
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _check(self, name: str, slots: list[int]) -> None:
        if not self._taken.issuperset(slots):
            none = next(slot for slot in slots if slot not in self._taken)
            raise ValueError(f"HostPool.{name}: slot {none} is not taken; give slots that `take` gave, until they are freed")

    def store(self, pages: list[int], slots: list[int]) -> None:
        """Copy pages of the pool to slots. The pages may be written over by what is launched after this returns."""
        for part, some in self._parts("store", pages, slots):
            index = torch.tensor(part, device="cpu").to(self._device[0].device, non_blocking=True)
            for host, device in zip(self._host, self._device, strict=True):
                staging = device.transpose(0, 1).index_select(0, index)
                with self._beside(staging):
                    for at, slot, size in _runs(some):
                        host[slot : slot + size].copy_(staging[at : at + size], non_blocking=True)

    def load(self, slots: list[int], pages: list[int]) -> None:
        """Copy slots to pages of the pool, which what is launched after this returns may read."""
        for part, some in self._parts("load", pages, slots):
            index = torch.tensor(part, device="cpu").to(self._device[0].device, non_blocking=True)
            for host, device in zip(self._host, self._device, strict=True):
                staging = torch.empty((len(part), *host.shape[1:]), dtype=host.dtype, device=device.device)
                with self._beside(staging):
                    for at, slot, size in _runs(some):
                        staging[at : at + size].copy_(host[slot : slot + size], non_blocking=True)
                if self._stream is not None:
                    torch.cuda.current_stream(device.device).wait_stream(self._stream)
                device.index_copy_(1, index, staging.transpose(0, 1))

    def _parts(self, name: str, pages: list[int], slots: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Pages and slots, as many as fit into the staging buffer. Raises ValueError, before the first, where they are none."""
        self._check(name, slots)
        if [t.data_ptr() for t in self.pool.storage] != [t.data_ptr() for t in self._device]:  # half of each page would stay behind
            raise ValueError(f"HostPool.{name}: pool.beside was set after this HostPool was made; set it first, and make a HostPool then")
        count = self._device[0].shape[1]
        if len(pages) != len(slots) or not all(0 <= page < count for page in pages):
            raise ValueError(f"HostPool.{name}: pages {pages} and slots {slots}; give a slot for each page, of pages 0 to {count - 1}")
        for at in range(0, len(pages), self._batch):
            yield pages[at : at + self._batch], slots[at : at + self._batch]

    @contextmanager
    def _beside(self, staging: Tensor) -> Iterator[None]:
        """The stream of transfers, which begins where the caller's is now; on a CPU nothing."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(staging.device))
        staging.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield


def _words(tensor: Tensor) -> Tensor:
    """The same memory in integers: every dtype can be gathered, and 8 bytes a thread."""
    width = tensor.shape[-1] * tensor.itemsize
    strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    offset = tensor.storage_offset() * tensor.itemsize
    return tensor.view(torch.int64 if all(n % 8 == 0 for n in (width, offset, *strides)) else torch.uint8)


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the list, first slot, how many) of neighbours."""
    begin = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield begin, slots[begin], i - begin
            begin = i
