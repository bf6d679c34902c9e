"""The page pool: nothing is lost, nothing is given twice, and running out changes nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onchip.cache.paged import OutOfPages, PageList, PagePool

CPU = torch.device("cpu")


def pool(pages=8, page=4, layers=2, kv_heads=3, dim=5, dtype=torch.float32) -> PagePool:
    return PagePool(layers, pages, page, kv_heads, dim, dtype=dtype, device=CPU)


def test_shapes_and_bytes():
    p = pool(dtype=torch.bfloat16)
    assert p.k.shape == p.v.shape == (2, 8, 4, 3, 5) and p.k.dtype == torch.bfloat16
    assert (p.num_pages, p.num_free, p.page, p.bytes_used) == (8, 8, 4, 0)
    each = PagePool.bytes_per_page(2, 4, 3, 5, torch.bfloat16)
    assert each == 2 * 2 * 4 * 3 * 5 * 2 and p.k.nbytes + p.v.nbytes == 8 * each
    p.reserve(PageList(), 9)
    assert p.bytes_used == 3 * each and p.num_free == 5


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens, pages):
    assert pool().pages_for(tokens) == pages


@pytest.mark.parametrize(("pages", "page"), [(0, 4), (-1, 4), (4, 0), (4, -4)])
def test_a_pool_that_cannot_be(pages, page):
    with pytest.raises(ValueError, match=f"PagePool: {pages} pages of {page} tokens; give at least one page, of at least one token"):
        pool(pages, page)


def test_append_gives_slots_in_order():
    p, a, b = pool(), PageList(), PageList()
    first = p.append(a, 3)
    p.append(b, 2)
    second = p.append(a, 6)  # the rest of the first page, then a page past b's
    slots = torch.cat((first, second))
    assert slots.dtype == torch.int64 and a.length == 9 and len(a.pages) == 3
    assert slots.tolist() == [a.pages[i // 4] * 4 + i % 4 for i in range(9)]
    assert not set(a.pages) & set(b.pages)


def test_append_of_nothing():
    p, a = pool(), PageList()
    assert p.append(a, 0).tolist() == [] and a.pages == [] and a.length == 0


def test_append_after_reserve_takes_no_more_pages():
    p, a = pool(), PageList()
    p.reserve(a, 10)
    assert len(a.pages) == 3 and a.length == 0
    held = list(a.pages)
    p.append(a, 4)
    p.append(a, 6)
    assert a.pages == held and p.num_free == 5


def test_reserve_of_what_is_there_does_nothing():
    p, a = pool(), PageList()
    p.append(a, 9)
    held = list(a.pages)
    p.reserve(a, 9)
    p.reserve(a, 2)
    assert a.pages == held and a.length == 9


@pytest.mark.parametrize("call", ["reserve", "append"])
def test_out_of_pages_loses_nothing(call):
    p, a, b = pool(), PageList(), PageList()
    p.append(a, 9)
    p.append(b, 5)
    before = (p.num_free, list(a.pages), a.length, p.bytes_used)
    with pytest.raises(OutOfPages, match=r"4 more pages of 4 tokens and 3 of 8 are free; wait for a sequence to end, or make the pool larger"):
        getattr(p, call)(a, 28 if call == "reserve" else 19)
    assert (p.num_free, list(a.pages), a.length, p.bytes_used) == before
    p.append(a, 12)  # what is left, to the last page
    assert p.num_free == 0


def test_release():
    p, a, b = pool(), PageList(), PageList()
    p.append(a, 9)
    p.append(b, 5)
    p.release(a)
    assert a.pages == [] and a.length == 0 and p.num_free == 6
    p.release(a)  # an empty sequence holds nothing
    assert p.num_free == 6
    p.release(b)
    assert p.num_free == 8 and p.bytes_used == 0


def test_release_of_pages_that_are_free():
    """A copy of a sequence is not a sequence; the pool stays as it was."""
    p, a = pool(), PageList()
    p.append(a, 9)
    copy = PageList(list(a.pages), a.length)
    p.release(a)
    with pytest.raises(ValueError, match=r"release: pages \[0, 1, 2\] are free already; a sequence may be released once"):
        p.release(copy)
    assert p.num_free == 8 and copy.length == 9


def test_pages_of_one_sequence_lie_side_by_side():
    """Low pages first, also those that came back."""
    p, a, b, c = pool(), PageList(), PageList(), PageList()
    p.append(a, 8)
    p.append(b, 8)
    p.release(a)
    p.append(c, 12)
    assert c.pages == [0, 1, 4]


def test_table():
    p, a, b, empty = pool(), PageList(), PageList(), PageList()
    p.append(a, 9)
    p.append(b, 1)
    assert p.table([a, b, empty]).tolist() == [[*a.pages], [b.pages[0], 0, 0], [0, 0, 0]]
    assert p.table([b], 3).tolist() == [[b.pages[0], 0, 0]]
    assert p.table([a], 2).tolist() == [a.pages[:2]]
    assert p.table([empty]).shape == (1, 1) and p.table([], 3).shape == (0, 3)
    assert p.table([a]).dtype == torch.int32


class Pool(RuleBasedStateMachine):
    """Any order of calls, against a list of what each sequence ought to hold."""

    def __init__(self):
        super().__init__()
        self.pool = pool(pages=6, page=2, layers=1, kv_heads=1, dim=1)
        self.sequences: list[PageList] = []
        self.lengths: list[int] = []
        self.slots: list[list[int]] = []

    @rule()
    def begin(self):
        self.sequences.append(PageList())
        self.lengths.append(0)
        self.slots.append([])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def append(self, data, tokens):
        i = data.draw(st.integers(0, len(self.sequences) - 1))
        missing = -(-(self.lengths[i] + tokens) // 2) - len(self.sequences[i].pages)
        if missing > self.pool.num_free:
            with pytest.raises(OutOfPages):
                self.pool.append(self.sequences[i], tokens)
            return
        self.slots[i] += self.pool.append(self.sequences[i], tokens).tolist()
        self.lengths[i] += tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.integers(0, 14))
    def reserve(self, data, tokens):
        i = data.draw(st.integers(0, len(self.sequences) - 1))
        try:
            self.pool.reserve(self.sequences[i], tokens)
        except OutOfPages:
            assert -(-tokens // 2) - len(self.sequences[i].pages) > self.pool.num_free

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        i = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences[i])
        self.lengths[i], self.slots[i] = 0, []

    @invariant()
    def no_page_is_lost_and_none_is_used_twice(self):
        held = [page for sequence in self.sequences for page in sequence.pages]
        assert sorted(held + self.pool._free) == list(range(6))
        assert self.pool.num_free == 6 - len(held) and self.pool.bytes_used == len(held) * 2 * 2 * 4

    @invariant()
    def no_slot_is_used_twice(self):
        assert [sequence.length for sequence in self.sequences] == self.lengths
        slots = [slot for some in self.slots for slot in some]
        assert len(set(slots)) == len(slots)
        for sequence, some in zip(self.sequences, self.slots, strict=True):
            assert [slot // 2 for slot in some] == [sequence.pages[j // 2] for j in range(len(some))]


Pool.TestCase.settings = settings(max_examples=60, deadline=None)
TestPool = Pool.TestCase
