"""Pages in host memory: the same bytes come back, whatever a page is made of, and no slot is lost."""

import random

import pytest
import torch

from onchip.cache import swap
from onchip.cache.paged import OutOfPages, PagePool
from onchip.cache.swap import HostPool

PAGES = 12


def pool(device, dtype=torch.bfloat16, dim=8) -> PagePool:
    """Random bytes: among them are NaN of every kind."""
    p = PagePool(3, PAGES, 4, 2, dim, dtype=dtype, device=device)
    for tensor in p.storage:
        tensor.view(torch.uint8).random_(0, 256)
    return p


def bytes_of(p: PagePool, pages) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8)[:, pages].clone() for tensor in p.storage]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_bytes_there_and_back(device, monkeypatch, dtype, dim, batch):
    p = pool(device, dtype, dim)
    monkeypatch.setattr(swap, "STAGING", batch * sum(t[:, 0].nbytes for t in p.storage))
    host = HostPool(p, 9)
    host.take(2)
    pages, others = [7, 0, 3, 4, 11], [2, 5, 1, 9, 6]
    wanted, rest = bytes_of(p, pages), bytes_of(p, [8, 10])
    slots = host.take(5)
    host.store(pages, slots)
    for tensor in p.storage:  # at once, as the next step would
        tensor.view(torch.uint8)[:, pages] = 0
    host.load(slots, others)
    assert same(bytes_of(p, others), wanted) and same(bytes_of(p, [8, 10]), rest)
    host.load(slots[::-1][:2], [7, 0])  # in another order, slots with a gap
    assert same(bytes_of(p, [7, 0]), [t[:, [4, 3]] for t in wanted])


def test_storage_of_one_buffer(device):
    """A pool whose page is one piece of bytes, as quantised ones are: keys and values are views of it."""

    class Bytes(PagePool):
        buffer: torch.Tensor

        @property
        def storage(self):
            return (self.buffer,)

    p = pool(device)
    whole = torch.randint(0, 256, (3, PAGES, 40), dtype=torch.uint8, device=device)
    p.__class__, p.buffer = Bytes, whole[..., 8:32]  # of every 40 bytes 24 are the page's
    assert p.bytes_used == 0 and p.take(2) == [0, 1] and p.bytes_used == 2 * 3 * 24
    host, before = HostPool(p, 4), whole.clone()
    host.take(4)
    host.store([5, 2], [1, 3])
    host.load([3, 1], [0, 1])
    assert torch.equal(whole[:, 0, 8:32], before[:, 2, 8:32]) and torch.equal(whole[:, 1, 8:32], before[:, 5, 8:32])
    assert torch.equal(whole[:, 2:], before[:, 2:]) and torch.equal(whole[..., 32:], before[..., 32:]) and torch.equal(whole[..., :8], before[..., :8])


def test_any_order_of_transfers(device):
    """Pages go out and come back in any order, slots and pages being used again at once; a model in plain Python tells what must be where."""
    p, draw = pool(device), random.Random(0)
    host = HostPool(p, 7)
    contents = [[t[:, page].clone() for t in bytes_of(p, list(range(PAGES)))] for page in range(PAGES)]
    out: dict[int, list] = {}
    for _ in range(300):
        count = draw.randrange(1, 5)
        if draw.random() < 0.5 and host.num_free >= count:
            pages = draw.sample(range(PAGES), count)
            slots = host.take(count)
            host.store(pages, slots)
            out |= {slot: contents[page] for slot, page in zip(slots, pages, strict=True)}
            for page in pages:
                for tensor in p.storage:
                    tensor.view(torch.uint8)[:, page].random_(0, 256)
                contents[page] = [t[:, 0] for t in bytes_of(p, [page])]
        elif len(out) >= count:
            slots, pages = draw.sample(sorted(out), count), draw.sample(range(PAGES), count)
            host.load(slots, pages)
            host.free(slots)
            for slot, page in zip(slots, pages, strict=True):
                contents[page] = out.pop(slot)
        assert host.num_free == 7 - len(out)
    for page in range(PAGES):
        assert same([t[:, 0] for t in bytes_of(p, [page])], contents[page])


def test_slots():
    host = HostPool(pool(torch.device("cpu")), 3)
    assert host.take(2) == [0, 1] and host.num_free == 1
    with pytest.raises(OutOfPages, match="2 pages are to go to host memory and 1 of 3 slots are free; free some, or give it more slots"):
        host.take(2)
    host.free([0])
    assert host.take(2) == [0, 2] and host.num_free == 0 and host.num_slots == 3
    with pytest.raises(ValueError, match="HostPool: slots is 0; give a whole number, 1 or more"):
        HostPool(pool(torch.device("cpu")), 0)


def test_a_second_model_that_comes_later():
    """Half of each page would stay behind."""
    p = pool(torch.device("cpu"))
    host = HostPool(p, 3)
    slots = host.take(2)
    p.beside = pool(torch.device("cpu"))
    for call in (lambda: host.store([0, 1], slots), lambda: host.load(slots, [0, 1])):
        with pytest.raises(ValueError, match=r"^HostPool\.(store|load): pool.beside was set after this HostPool was made; set it first"):
            call()
    p.beside = PagePool(1, PAGES - 1, 4, 2, 8, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match=r"^HostPool: pool.beside has 11 pages, pool 12; give it one of as many"):
        HostPool(p, 3)


def test_slots_that_nobody_took():
    p = pool(torch.device("cpu"))
    host, before = HostPool(p, 3), bytes_of(p, list(range(PAGES)))
    assert host.take(2) == [0, 1]
    for call, match in (
        (lambda: host.free([0, 2]), "HostPool.free: slot 2 is not taken; give slots that `take` gave"),
        (lambda: host.free([0, 0]), r"HostPool.free: \[0, 0\] names a slot twice"),
        (lambda: host.store([0, 1], [0, 7]), "HostPool.store: slot 7 is not taken"),
        (lambda: host.load([-1], [0]), "HostPool.load: slot -1 is not taken"),
        (lambda: host.load([0], [0, 1]), r"HostPool.load: pages \[0, 1\] and slots \[0\]; give a slot for each page, of pages 0 to 11"),
        (lambda: host.store([0, PAGES], [0, 1]), "HostPool.store: pages .* of pages 0 to 11"),
        (lambda: host.take(-1), "HostPool.take: slots is -1; give a whole number, 0 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert host.num_free == 1 and same(bytes_of(p, list(range(PAGES))), before)
    host.free([1, 0])
    with pytest.raises(ValueError, match="slot 1 is not taken"):
        host.free([1])
    assert host.take(3) == [0, 1, 2]


@pytest.mark.parametrize(("slots", "runs"), [([], []), ([4], [(0, 4, 1)]), ([0, 1, 2, 5, 6, 4], [(0, 0, 3), (3, 5, 2), (5, 4, 1)])])
def test_neighbouring_slots_are_one_transfer(slots, runs):
    assert list(swap._runs(slots)) == runs
