"""The page pool: nothing is lost, nothing is given twice, and running out changes nothing."""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onchip.cache.paged import OutOfPages, PageList, PagePool
from onchip.core.formats import Codes, encode

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


@pytest.mark.parametrize("form", [None, "e4m3", "int4/64"])
def test_tokens_move(form):
    """In all layers, each read before one is written, codes with their scales; all other slots keep theirs."""
    p = PagePool(2, 5, 4, 3, 64, dtype=torch.bfloat16, device=CPU, format=form)
    read = lambda layer: [part.dequantised() if form else part.clone() for part in p.layer(layer)]  # noqa: E731
    for layer in range(2):
        for part in p.layer(layer):
            part.put(torch.arange(20), torch.randn(20, 3, 64)) if form else part.normal_()
    before = [[t.flatten(0, 1) for t in read(layer)] for layer in range(2)]
    for name, slots in (("source is slots -1 to 3", ([-1, 3], [1, 2])), ("target is slots 2 to 20", ([0, 3], [2, 20]))):  # which lie in another layer
        with pytest.raises(ValueError, match=f"^move: {name}; give 0 to 19"):
            p.move(*map(torch.tensor, slots))
    p.move(torch.tensor([7, 9, 18, 4, 4]), torch.tensor([6, 7, 8, 4, 4]))
    now = torch.arange(20)
    now[6:9] = torch.tensor([7, 9, 18])
    for layer in range(2):
        assert all(torch.equal(new.flatten(0, 1), old[now]) for new, old in zip(read(layer), before[layer], strict=True))


def test_layers():
    p = pool(dtype=torch.bfloat16)
    k, v = p.layer(1)
    assert k.data_ptr() == p.k[1].data_ptr() and v.data_ptr() == p.v[1].data_ptr() and k.shape == (8, 4, 3, 5)


@pytest.mark.parametrize("form", ["e4m3", "e5m2/32", "int8", "int4/64"])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_a_pool_of_codes(form, page):
    """All of a page lies in its own bytes, so that whoever copies `k[:, page]` and `v[:, page]` has copied it; other pages keep theirs."""
    channel = torch.rand(2, 3, 64) + 0.5
    p = PagePool(2, 5, page, 3, 64, dtype=torch.bfloat16, device=CPU, format=form, channel=channel)
    each = PagePool.bytes_per_page(2, page, 3, 64, torch.bfloat16, form)
    assert p.k.shape[:2] == p.v.shape[:2] == (2, 5) and p.k.nbytes + p.v.nbytes == 5 * each and p.num_pages == 5
    p.reserve(PageList(), 2 * page)
    assert p.bytes_used == 2 * each
    for storage in (p.k, p.v):
        storage.fill_(0xFF)
    for layer in range(2):
        k, v = p.layer(layer)
        assert k.shape == v.shape == (5, page, 3, 64) and str(k.format) == form and torch.equal(k.channel, channel[layer]) and v.channel is None
        x = torch.randn(2, page, 3, 64)
        for codes, new in zip((k, v), x, strict=True):
            codes.put(torch.arange(3 * page, 4 * page), new)
            assert torch.equal(codes.of(slice(3, 4)).dequantised()[0], Codes(*encode(new, k.format, codes.channel), k.format, codes.channel).dequantised())
    untouched = [0, 1, 2, 4]
    for storage in (p.k, p.v):
        assert (storage[:, untouched] == 0xFF).all() and (storage[:, 3] != 0xFF).any()
        storage[:, 1] = storage[:, 3]
    for layer in range(2):
        for codes in p.layer(layer):
            assert torch.equal(codes.of(slice(1, 2)).dequantised(), codes.of(slice(3, 4)).dequantised())


def test_channels_that_do_not_fit():
    for form, channel in ((None, torch.ones(2, 3, 64)), ("int8", torch.ones(3, 64)), ("int8", torch.ones(2, 3, 64).double())):
        with pytest.raises(ValueError, match=r"PagePool: channel is .* beside format .*; give float32 \[2, 3, 64\] beside a format, or None"):
            PagePool(2, 5, 16, 3, 64, dtype=torch.bfloat16, device=CPU, format=form, channel=channel)
    with pytest.raises(ValueError, match=r"PagePool: channel is a list beside format int8; give float32 \[2, 3, 64\]"):
        PagePool(2, 5, 16, 3, 64, dtype=torch.bfloat16, device=CPU, format="int8", channel=[1.0])
    for number in (0.0, torch.inf, torch.nan):  # what is divided by it would read NaN
        channel = torch.ones(2, 3, 64).index_fill_(0, torch.tensor([1]), number)
        with pytest.raises(ValueError, match=rf"^PagePool: channel has 192 numbers that are 0 or not finite \({number:g} first\); give others"):
            PagePool(2, 5, 16, 3, 64, dtype=torch.bfloat16, device=CPU, format="int8", channel=channel)
    with pytest.raises(ValueError, match="format int8/32 of heads of 5"):
        PagePool(2, 5, 16, 3, 5, dtype=torch.bfloat16, device=CPU, format="int8/32")


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens, pages):
    assert pool().pages_for(tokens) == pages


@pytest.mark.parametrize(("pages", "page"), [(0, 4), (-1, 4), (4, 0), (4, -4)])
def test_a_pool_that_cannot_be(pages, page):
    with pytest.raises(ValueError, match=f"PagePool: .* {pages} pages of {page} tokens, .* give whole numbers: at least one page, of at least one token"):
        pool(pages, page)


@pytest.mark.parametrize("sizes", [(0, 4, 4, 2, 8), (1, 2.5, 4, 2, 8), (1, 4, 4, 0, 8), (1, 4, 4, 2, 0)], ids=str)
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match=r"PagePool: .*; give whole numbers"):
        PagePool(*sizes, dtype=torch.float32, device=torch.device("cpu"))


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


@pytest.mark.parametrize("tokens", [-1, 2.0])
def test_append_of_what_is_no_number_of_tokens(tokens):
    p, a = pool(), PageList()
    p.append(a, 3)
    with pytest.raises(ValueError, match=f"^append: tokens is {tokens}; give a whole number, 0 or more"):
        p.append(a, tokens)
    assert a.length == 3 and type(a.length) is int


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
    with pytest.raises(ValueError, match="drop: page 0 is free; each holder lets go of it once"):
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


# ---- several holders


def test_a_fork_shares_and_copies_before_it_writes():
    p, a = pool(), PageList()
    slots = p.append(a, 6)
    for tensor in (p.k, p.v):
        tensor.view(torch.uint8).random_(0, 256)
    b = p.fork(a)
    assert b == a and [p.holders(page) for page in a.pages] == [2, 2] and p.num_free == 6
    before = [t.view(torch.uint8)[:, a.pages].clone() for t in (p.k, p.v)]
    new = p.append(b, 1)
    assert b.pages[0] == a.pages[0] and b.pages[1] != a.pages[1] and new.tolist() == [b.pages[1] * 4 + 2]
    assert [p.holders(page) for page in (*a.pages, b.pages[1])] == [2, 1, 1] and p.num_free == 5
    for tensor, kept in zip((p.k, p.v), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[:, a.pages], kept) and torch.equal(tensor.view(torch.uint8)[:, b.pages], kept)
    held = list(a.pages)
    assert p.append(a, 1).tolist() == [slots[5] + 1] and a.pages == held  # the last holder writes in place
    p.release(a)
    p.release(b)
    assert p.num_free == 8 and p.bytes_used == 0


def test_a_fork_of_whole_pages_copies_nothing():
    p, a = pool(), PageList()
    p.append(a, 8)
    p.reserve(a, 16)  # what it has not written stays its own
    b = p.fork(a)
    assert b.pages == a.pages[:2] and p.missing(b, 9) == 1
    p.append(b, 1)
    assert p.num_free == 3 and [p.holders(page) for page in a.pages] == [2, 2, 1, 1]


def test_no_room_for_the_copy():
    p, a, rest = pool(), PageList(), PageList()
    p.append(a, 6)
    b = p.fork(a)
    p.append(rest, 24)
    assert p.missing(b, 7) == 1 and p.missing(b, 6) == 0
    with pytest.raises(OutOfPages, match="7 tokens need 1 more pages of 4 tokens and 0 of 8 are free"):
        p.append(b, 1)
    assert b == a and [p.holders(page) for page in a.pages] == [2, 2]


@pytest.mark.parametrize(("page", "kept", "appended", "copies"), [(4, 5, 6, [1, 2]), (4, 4, 1, [1]), (1, 1, 2, [1, 2]), (4, 9, 7, [2]), (4, 9, 0, [])])
def test_what_was_truncated_is_not_written_to(page, kept, appended, copies):
    """A length that was lowered, as when guessed tokens are rejected, leaves pages behind it that others may read."""
    p, a = pool(12, page), PageList()
    p.append(a, 3 * page - 1 if page > 1 else 3)
    for tensor in p.storage:
        tensor.random_(0, 9)
    b = p.fork(a)
    b.length = kept
    before = [tensor[:, a.pages].clone() for tensor in p.storage]
    assert p.missing(b, kept + appended) == len(copies) + max(0, p.pages_for(kept + appended) - 3)
    slots = p.append(b, appended)
    assert [at for at in range(3) if a.pages[at] != b.pages[at]] == copies and not {slot // page for slot in slots.tolist()} & set(a.pages)
    assert all(torch.equal(tensor[:, b.pages[:3]], kept) for tensor, kept in zip(p.storage, before, strict=True))
    p.release(a)
    p.release(b)
    assert p.num_free == 12


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_counts_that_are_none(count):
    p, a = pool(), PageList()
    calls = (lambda: p.reserve(a, count), "reserve: tokens"), (lambda: p.take(count), "take: pages"), (lambda: p.table([a], count), "table: width")
    for call, what in calls:
        with pytest.raises(ValueError, match=f"^{what} is {count}; give a whole number, 0 or more"):
            call()
    assert p.num_free == 8 and a.pages == []


@pytest.mark.parametrize(
    "slots", [([1], [2]), (torch.tensor([1]), torch.tensor([2, 3])), (torch.tensor([1.0]), torch.tensor([2])), (torch.tensor(1),) * 2], ids=str
)
def test_slots_that_cannot_move(slots):
    with pytest.raises(ValueError, match=r"^move: (source|target) is .*; give int64 \[n\], as many slots of source as of target"):
        pool().move(*slots)


def test_free_pages_cannot_be_shared():
    p, a = pool(), PageList()
    p.append(a, 4)
    with pytest.raises(ValueError, match="share: page 3 is free; share pages while a sequence holds them"):
        p.share([a.pages[0], 3])
    assert p.holders(a.pages[0]) == 1 and p.num_free == 7
    with pytest.raises(ValueError, match="drop: page 3 is free; each holder lets go of it once"):
        p.drop([3])
    before = [*p._holders], sorted(p._free)
    for pages in ([a.pages[0], 3], [a.pages[0], -1], [a.pages[0], 8]):
        for call in (p.drop, p.share, lambda pages: p.release(PageList(pages, 8))):
            with pytest.raises(ValueError, match=f"page {pages[1]} is (free|none of this pool)"):
                call(pages)
            assert ([*p._holders], sorted(p._free)) == before
    for call, pages in itertools.product((p.drop, p.share), (p.table([a])[0], [*p.table([a])[0]])):
        with pytest.raises(TypeError, match="pages are tensors; give a list of numbers, as its tolist"):
            call(pages)
    assert ([*p._holders], sorted(p._free)) == before
    assert p.holders(3) == 0 and p.append(PageList(), 0).dtype == torch.int64
