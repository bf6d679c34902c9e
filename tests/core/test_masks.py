"""Every mask against a matrix written by hand, and what a band or a combination says of itself against that matrix."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core import masks
from onchip.core.bands import Band, Full, Mask, meet
from onchip.core.masks import (
    BANDS,
    Blocks,
    Both,
    Causal,
    Chunked,
    Dense,
    Document,
    KeyPadding,
    MaskMod,
    Prefix,
    Tree,
    Window,
    Windows,
    as_mask,
    parse,
)  # fmt: skip
from onchip.core.parts import Exactly, Part
from onchip.core.scores import Score
from onchip.core.trace import Place, TraceError

BATCH, HEADS = 2, 3
LENGTHS = st.integers(0, 24)
ALIGN = st.sampled_from(["bottom_right", "top_left"])
SIDE = st.none() | st.integers(0, 30)
BAND = st.one_of(st.just(Full()), st.builds(Causal, ALIGN), st.builds(Window, SIDE, SIDE, ALIGN))
unhurried = settings(deadline=None)  # the first call of a torch function takes a second
SIZES = [(5, 5), (3, 7), (7, 7), (1, 8)]


def place(len_q: int, len_k: int) -> Place:
    """Every place of a call, as the oracle asks."""
    count = lambda n, *shape: torch.arange(n).view(shape)  # noqa: E731
    lengths = (torch.full((1, 1, 1, 1), n) for n in (len_q, len_k))
    return Place(count(BATCH, -1, 1, 1, 1), count(HEADS, 1, -1, 1, 1), count(len_q, 1, 1, -1, 1), count(len_k, 1, 1, 1, -1), *lengths)


def seen(mask: Mask, len_q: int, len_k: int) -> torch.Tensor:
    """What the text says, bool [batch, heads, len_q, len_k]; `sees` itself must say the same."""
    at = place(len_q, len_k)
    static, tensors = mask.parts()
    by_text = static.seen(at, tensors).broadcast_to(BATCH, HEADS, len_q, len_k)
    assert by_text.dtype == torch.bool and torch.equal(by_text, torch.as_tensor(mask.sees(at)).broadcast_to(by_text.shape))
    return by_text


def by_hand(rule, len_q: int, len_k: int) -> torch.Tensor:
    """`rule(b, h, i, j, row)` of Python numbers, place by place."""
    shift = len_k - len_q
    rows = [[[[bool(rule(b, h, i, j, i + shift)) for j in range(len_k)] for i in range(len_q)] for h in range(HEADS)] for b in range(BATCH)]
    return torch.tensor(rows, dtype=torch.bool).view(BATCH, HEADS, len_q, len_k)


def within(band, i: int, j: int, row: int) -> bool:
    """A band, in words."""
    row = row if band.align == "bottom_right" else i
    return (band.left is None or j >= row - band.left) and (band.right is None or j <= row + band.right)


# ---- bands


@unhurried
@given(BAND, LENGTHS, LENGTHS)
def test_a_band_is_its_definition(band, len_q, len_k):
    expected = by_hand(lambda b, h, i, j, row: within(band, i, j, row), len_q, len_k)
    assert torch.equal(seen(band, len_q, len_k), expected)
    first = len_k - len_q if band.align == "bottom_right" else 0
    assert torch.equal(band.dense(torch.arange(first, first + len_q)[:, None], torch.arange(len_k)), expected[0, 0])
    assert band.area(len_q, len_k) == int(expected[0, 0].sum())
    assert band.parts() == (band, ()) and band.hull is band and band.tensors == ()


def test_the_area_of_lengths_that_no_list_holds():
    n = 1 << 40
    for band, pairs in ((Full(), n * n), (Causal(), n * (n + 1) // 2), (Window(9), 10 * n - 45), (Window(None, 0, "top_left"), n * (n + 1) // 2)):
        assert band.area(n, n) == pairs
    assert Causal().area(n, 0) == Window(3, 4).area(0, n) == 0 and Window(5, None).area(2, n) == 13


@unhurried
@given(BAND, st.integers(1, 24), LENGTHS, st.data())
def test_keys_are_those_that_some_row_sees(band, len_q, len_k, data):
    """No key too few, and none too many at either end."""
    start = data.draw(st.integers(0, len_q - 1))
    stop = data.draw(st.integers(start, len_q - 1))
    shift = band.shift(len_q, len_k)
    columns = seen(band, len_q, len_k)[0, 0, start : stop + 1].any(0).nonzero().flatten().tolist()
    assert list(band.keys(start + shift, stop + shift, len_k)) == columns


@unhurried
@given(BAND)
def test_a_band_survives_its_text(band):
    assert parse(str(band)) == band


def test_texts_of_bands():
    bands = [Full(), Causal(), Causal("top_left"), Window(512), Window(3, 1), Window(None, None), Window(3, align="top_left")]
    assert list(map(str, bands)) == ["Full", "Causal", "Causal(top_left)", "Window(512)", "Window(3, 1)", "Window(None, None)", "Window(3, 0, top_left)"]
    assert len({*bands, *bands}) == len(bands)
    with pytest.raises(ValueError, match=r"mask 'Odd\(3\)' is no band; give one of Full, Causal, Window"):
        parse("Odd(3)")


@pytest.mark.parametrize("size", [1 << 30, (1 << 31) - 1, 1 << 40, 1 << 70])
def test_a_window_longer_than_any_sequence_has_no_end(size):
    """Kernels would add it to rows in 32 bits."""
    assert Window(size, size) == Window(None, None) and Window(3, size) == Window(3, None) and Window(size) == Window(None)


def test_alignment():
    """The last query sees what the last key sees, whatever the lengths; or the first query what the first key sees."""
    assert seen(Causal(), 2, 4)[0, 0].tolist() == [[True, True, True, False], [True] * 4]
    assert seen(Causal(), 3, 1)[0, 0].tolist() == [[False], [False], [True]]
    assert seen(Causal("top_left"), 2, 4)[0, 0].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert seen(Window(1), 2, 4)[0, 0].tolist() == [[False, True, True, False], [False, False, True, True]]


# ---- the others, each with its definition

IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 0, 0, 0, 1]])
SIDES = torch.tensor([0, 2, 5])
GRID = torch.rand(BATCH, HEADS, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.4
PARENTS = [-1, 0, 0, 1]
ANCESTORS = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}}
TREES = torch.stack([Tree.of(torch.tensor(PARENTS)).ancestors, torch.eye(4, dtype=torch.bool)])


def tree(sees, i, j, row, len_k):
    node, key = row - len_k + 4, j - len_k + 4
    return key < 0 or (node >= 0 and sees(node, key))


def near(node, key, window):
    stands, lies = (n + 1 if n < 0 else len(ANCESTORS[n]) for n in (node, key))
    return stands - lies <= window


def numbers(b, h, i, j):
    return (i - j <= SIDES[h]) & (IDS[b, i] == IDS[b, j])


CASES = {
    "windows [heads]": (Window(SIDES), lambda b, h, i, j, row, k: row - int(SIDES[h]) <= j <= row),
    "windows [batch, heads]": (
        Window(torch.stack([SIDES, SIDES + 1]), 2), lambda b, h, i, j, row, k: row - int(SIDES[h]) - b <= j <= row + 2,
    ),
    "windows [batch, 1]": (Window(None, torch.tensor([[0], [3]], dtype=torch.int32)), lambda b, h, i, j, row, k: j <= row + 3 * b),
    "windows of both sides": (Window(SIDES, SIDES, "top_left"), lambda b, h, i, j, row, k: i - int(SIDES[h]) <= j <= i + int(SIDES[h])),
    "chunked": (Chunked(3), lambda b, h, i, j, row, k: row // 3 == j // 3 and j <= row),
    "document": (Document(IDS), lambda b, h, i, j, row, k: row >= 0 and IDS[b, row] == IDS[b, j]),
    "document int32": (Document(IDS.int()), lambda b, h, i, j, row, k: row >= 0 and IDS[b, row] == IDS[b, j]),
    "document for all": (Document(IDS[1]), lambda b, h, i, j, row, k: row >= 0 and IDS[1, row] == IDS[1, j]),
    "prefix": (Prefix(3), lambda b, h, i, j, row, k: j <= row or j < 3),
    "prefix [batch]": (Prefix(torch.tensor([1, 4])), lambda b, h, i, j, row, k: j <= row or j < (1, 4)[b]),
    "tree": (Tree.of(torch.tensor(PARENTS)), lambda b, h, i, j, row, k: tree(lambda n, m: m in ANCESTORS[n], i, j, row, k)),
    "trees": (Tree(TREES), lambda b, h, i, j, row, k: tree(lambda n, m: n == m if b else m in ANCESTORS[n], i, j, row, k)),
    "tree with a window": (
        Tree(TREES[0], 2), lambda b, h, i, j, row, k: tree(lambda n, m: m in ANCESTORS[n], i, j, row, k) and near(row - k + 4, j - k + 4, 2),
    ),
    "lengths": (KeyPadding(torch.tensor([2, 5])), lambda b, h, i, j, row, k: j < (2, 5)[b]),
    "padding": (KeyPadding(GRID[:, 0, 0]), lambda b, h, i, j, row, k: GRID[b, 0, 0, j]),
    "blocks": (Blocks(GRID[0, 0, :2, :2], 4), lambda b, h, i, j, row, k: GRID[0, 0, i // 4, j // 4]),
    "blocks of heads": (Blocks(GRID[:1, :, :, :3], (1, 3)), lambda b, h, i, j, row, k: GRID[0, h, i, j // 3]),
    "blocks of all": (Blocks(GRID[:, :, :3, :2], (3, 4)), lambda b, h, i, j, row, k: GRID[b, h, i // 3, j // 4]),
    "dense [len_q, len_k]": (Dense(GRID[0, 0]), lambda b, h, i, j, row, k: GRID[0, 0, i, j]),
    "dense [heads, 1, len_k]": (Dense(GRID[0, :, :1]), lambda b, h, i, j, row, k: GRID[0, h, 0, j]),
    "dense": (Dense(GRID), lambda b, h, i, j, row, k: GRID[b, h, i, j]),
    "dense of one": (Dense(torch.ones(1, 1, dtype=torch.bool)), lambda b, h, i, j, row, k: True),
    "function": (MaskMod(numbers), lambda b, h, i, j, row, k: i - j <= int(SIDES[h]) and IDS[b, i] == IDS[b, j]),
    "constant": (MaskMod(lambda b, h, i, j: False), lambda b, h, i, j, row, k: False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("len_q", "len_k"), SIZES)
def test_a_mask_is_its_definition(name, len_q, len_k):
    mask, rule = CASES[name]
    expected = by_hand(lambda b, h, i, j, row: rule(b, h, i, j, row, len_k), len_q, len_k)
    assert torch.equal(seen(mask, len_q, len_k), expected)
    assert not (expected & ~seen(mask.hull, len_q, len_k)).any(), f"{mask.hull} hides what {mask} shows"
    mask.fits(BATCH, HEADS, len_q, len_k)


def test_a_document_where_queries_outnumber_keys():
    """The queries before the first key are in no document."""
    expected = by_hand(lambda b, h, i, j, row: row >= 0 and IDS[b, row] == IDS[b, j], 6, 4)
    assert torch.equal(seen(Document(IDS), 6, 4), expected) and not expected[:, :, :2].any()


def test_every_mask_is_here():
    kinds = {kind for kind in vars(masks).values() if isinstance(kind, type) and issubclass(kind, Mask)}
    assert kinds == {type(mask) for mask, _ in CASES.values()} | {*BANDS, Both, Mask, masks.Band}


# ---- combinations

LEAF = st.one_of(BAND, st.sampled_from([mask for mask, _ in CASES.values()]))
ANY = st.recursive(LEAF, lambda inner: st.builds(lambda a, b, both: a & b if both else a | b, inner, inner, st.booleans()), max_leaves=4)


@unhurried
@given(LEAF, LEAF, st.sampled_from(SIZES))
def test_and_and_or(a, b, size):
    assert torch.equal(seen(a & b, *size), seen(a, *size) & seen(b, *size))
    assert torch.equal(seen(a | b, *size), seen(a, *size) | seen(b, *size))


@unhurried
@given(ANY, st.sampled_from(SIZES))
def test_a_hull_holds_its_mask(mask, size):
    assert not (seen(mask, *size) & ~seen(mask.hull, *size)).any(), f"{mask.hull} hides what {mask} shows"


@unhurried
@given(BAND, BAND)
def test_bands_stay_bands(a, b):
    if Full() in (a, b) or a.align == b.align:
        assert isinstance(a & b, BANDS) and isinstance(a | b, BANDS) and meet(a, b) == a & b
    else:
        assert isinstance(a & b, Both) and (a & b).hull == a and (a | b).hull == Full()


def test_combinations_by_hand():
    document = Document(IDS)
    assert document & Full() is document and Full() & document is document and document | Full() == Full()
    assert Causal() & Window(3, 3) == Window(3) and Causal() | Window(3, 3) == Window(None, 3) and Window(None, None) | Causal() == Full()
    assert str(Causal() & document | KeyPadding(torch.tensor([1, 2]))) == "((Causal & Document) | KeyPadding)"
    assert (Causal() & document).hull == Causal() and (Chunked(4) & document).hull == Window(3)
    assert str(Causal() & GRID[0, 0]) == "(Causal & Dense)" and str(document | numbers) == "(Document | numbers)"


# ---- texts


def test_bands_are_equal_by_class_and_what_they_hold():
    class Near(Band):
        def __init__(self, left):
            self.left = self.right = left

    class Steps(Band):
        def __init__(self, step):
            self.step = step

    bands = [Full(), Causal(), Causal("top_left"), Window(3), Window(4), Window(3, 3), Window(3, 0, "top_left"), Near(3), Near(4), Steps(1), Steps(2)]
    for n, band in enumerate(bands):
        assert [other == band for other in bands] == [m == n for m in range(len(bands))]
    assert Causal() == Causal() and hash(Window(3, 3)) == hash(Window(3, 3)) and Near(4) == Near(4) and Full() != "Full"


def test_equal_masks_share_a_text():
    a, b = Document(IDS), Document(torch.zeros(7, 300, dtype=torch.int64))
    assert a.static() == b.static() and hash(a.static()) == hash(b.static())
    assert (Causal() & a).static() == (Causal() & b).static()
    assert (Causal() & a).parts()[1] == (a.ids,)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Document(IDS), Document(IDS.int())),
        (Document(IDS), Document(IDS[0])),
        (Window(SIDES), Window(SIDES.int())),
        (Window(SIDES), Window(torch.stack([SIDES, SIDES]))),
        (Window(SIDES, 0), Window(SIDES, 1)),
        (Blocks(GRID, 2), Blocks(GRID, 4)),
        (Dense(GRID), Dense(GRID[:1])),
        (Prefix(2), Prefix(3)),
        (Chunked(2), Chunked(3)),
        (Causal() & Document(IDS), Window(3) & Document(IDS)),
        (Causal() & Document(IDS), Chunked(3) & Document(IDS)),
        (Chunked(2) & Document(IDS), Chunked(2) | Document(IDS)),
        (KeyPadding(torch.tensor([2, 5])), KeyPadding(torch.tensor([2, 5], dtype=torch.int32))),
    ],
    ids=str,
)
def test_masks_that_differ_have_different_texts(a, b):
    assert a.static() != b.static()


def test_a_text_keeps_no_tensor_alive():
    ids = torch.randint(0, 5, (2, 977))
    gone = weakref.ref(ids)
    mask = Causal() & Document(ids) | KeyPadding(ids[:, 0])
    mask.parts()
    del mask, ids
    gc.collect()
    assert gone() is None


class Strided(Mask):
    """A mask from outside, with a number and a tensor of its own."""

    def __init__(self, step, offsets):
        self.step, self.offsets = step, offsets

    def sees(self, at):
        return (at.row - at.j - self.offsets[at.h]) % self.step == 0


def test_a_tensor_of_one_element_is_a_number_in_a_combination():
    reach, at = torch.tensor([[2]]), Place(0, 0, torch.arange(5)[:, None], torch.arange(5), 5, 5)
    near = MaskMod(lambda b, h, i, j: (i - j) < reach)
    for mask in (near & Causal(), near & Document(IDS[0, :5]), Causal() & (near | near)):
        text, tensors = mask.parts()
        assert torch.equal(text.seen(at, tensors), mask.sees(at))


def test_a_mask_of_ones_own():
    """Instances that differ in a number have texts of their own; those that differ in a tensor share one."""
    for step, offsets in ((2, SIDES), (3, SIDES), (2, SIDES + 1), (2, SIDES.int())):
        expected = by_hand(lambda b, h, i, j, row, step=step, offsets=offsets: (row - j - int(offsets[h])) % step == 0, 4, 6)
        assert torch.equal(seen(Strided(step, offsets), 4, 6), expected)
    assert Strided(2, SIDES).static() == Strided(2, SIDES + 1).static() != Strided(3, SIDES).static()


class Forgetful(Chunked):
    """Reads a tensor that it does not list."""

    def sees(self, at):
        return SIDES[at.h] > 0


def test_a_mask_that_does_not_list_its_tensors():
    with pytest.raises(TraceError, match=r"Chunked\(3\) reads a tensor that its `tensors` do not list"):
        Forgetful(3).static()


# ---- errors


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window(-1), "Window: left -1 is negative; it counts keys beside a query's own, so 0 or more, or None for all"),
        (lambda: Window(1, -2), "Window: right -2 is negative"),
        (lambda: Window(2.5), "Window: left is 2.5; give a whole number"),
        (lambda: Window(True), "Window: left is True; give a whole number"),
        (lambda: Blocks(GRID, True), "Blocks: size True is not one or two positive numbers"),
        (lambda: Prefix(torch.tensor([3, -1])), r"Prefix: length is \[3, -1\]; it counts the keys that all see, so 0 or more"),
        (lambda: KeyPadding(torch.tensor([-4, 2])), r"KeyPadding: valid is \[-4, 2\]; it counts keys, so 0 or more"),
        (lambda: Tree([[True]]), "Tree: ancestors is a list; give a tensor"),
        (lambda: Tree.of(torch.tensor([-1, 1])), r"Tree: parents are \[-1, 1\]; none may be its node or come after it"),
        (lambda: Chunked(1 << 62), "Chunked: size is 4611686018427387904; give a whole number of up to 62 bits"),
        (lambda: Chunked(2.5), "Chunked: size is 2.5; give a whole number"),
        (lambda: Prefix("3"), "Prefix: length is '3'; give a whole number"),
        (lambda: Blocks(GRID, [16, 2.5]), r"Blocks: size \[16, 2.5\] is not one or two positive numbers"),
        (lambda: Window(1, align="left"), "Window: align 'left' is not one of bottom_right, top_left"),
        (lambda: Causal("middle"), "Causal: align 'middle' is not one of bottom_right, top_left"),
        (lambda: Window(torch.rand(3)), r"Window: left is torch.float32 \[3\]; give an integer tensor \[heads\], \[batch, heads\] or \[batch, 1\]"),
        (lambda: Window(SIDES, -1), "Window: right -1 is negative"),
        (lambda: Window(torch.tensor([-1, 3])), r"Window: left is \[-1, 3\]; it counts keys beside a query's own, so 0 or more, or a large number for all"),
        (lambda: Window(torch.ones(3) * 1j), r"Window: left is torch.complex64 \[3\]; give an integer tensor"),
        (lambda: Document(torch.ones(3) * 1j), r"Document: ids is torch.complex64 \[3\]; give an integer tensor of 1 or 2 dimensions"),
        (lambda: Document(torch.ones(3).int().to_sparse()), "Document: ids is a nested or sparse tensor; give a dense one"),
        (lambda: KeyPadding(torch.ones(3) * 1j), r"KeyPadding: valid is torch.complex64 \[3\]; give integer lengths"),
        (lambda: Windows(SIDES, 0, "up"), "Window: align 'up' is not one of"),
        (lambda: Chunked(0), "Chunked: size 0 is less than 1; it counts the positions of a chunk"),
        (lambda: Document([0, 1]), "Document: ids is a list; give a tensor"),
        (lambda: Document(torch.rand(3)), r"Document: ids is torch.float32 \[3\]; give an integer tensor of 1 or 2 dimensions"),
        (lambda: Prefix(-1), "Prefix: length -1 is negative; it counts the keys that all see, so 0 or more"),
        (lambda: Prefix(torch.ones(2, 2)), r"Prefix: length is torch.float32 \[2, 2\]; give an integer tensor of 1 dimensions"),
        (lambda: Tree(torch.ones(3, 4)), r"Tree: ancestors are torch.float32 \[3, 4\]; give bool \[nodes, nodes\] or \[batch, nodes, nodes\]"),
        (lambda: Tree.of(torch.zeros(0, dtype=torch.int64)), r"Tree: ancestors are torch.bool \[0, 0\]; give bool .*, of 1 node or more"),
        (lambda: Tree(torch.eye(4, dtype=torch.bool), torch.tensor([1, 2])), r"Tree: window is tensor\(\[1, 2\]\); give a whole number of up to 62 bits"),
        (lambda: Tree.of([-1, 0]), r"Tree: parents is a list; give a tensor"),
        (lambda: Tree.of(torch.tensor([-1.0, 0.0])), r"Tree: parents is torch.float32 \[2\]; give an integer tensor of 1 or 2 dimensions"),
        (lambda: Tree.of(torch.tensor([-1, 5])), r"Tree: parents are \[-1, 5\]; none may be its node or come after it; give an index before it, -1 for a root"),
        (lambda: KeyPadding(torch.ones(2, 3)), r"KeyPadding: valid is torch.float32 \[2, 3\]; give integer lengths \[batch\] or bool \[batch, len_k\]"),
        (lambda: KeyPadding(torch.ones(2)), r"KeyPadding: valid is torch.float32 \[2\]; give integer lengths"),
        (lambda: Blocks(torch.ones(2, 2)), "Blocks: blocks are torch.float32; give bool, True where a block of queries sees a block of keys"),
        (lambda: Blocks(GRID, 0), "Blocks: size 0 is not one or two positive numbers; give the tokens a side, or"),
        (lambda: Dense(torch.ones(2, 2)), r"Dense: the mask is torch.float32; give bool, True where a query sees a key \(a float tensor goes to bias=\)"),
        (lambda: Dense(GRID[0, 0, 0]), r"Dense: mask is torch.bool \[8\]; give a tensor of 2 or 3 or 4 dimensions"),
    ],
)
def test_what_a_mask_says_to_bad_arguments(make, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        make()


@pytest.mark.parametrize(
    ("mask", "sizes", "words"),
    [
        (Document(IDS), (2, 3, 5, 9), r"Document: ids is \[2, 8\]; this call needs \[batch 2, len_k 9\]"),
        (Document(IDS), (1, 3, 5, 5), r"Document: ids is \[2, 8\]; this call needs \[batch 1, len_k 5\]"),
        (Document(IDS), (2, 3, 5, Exactly(7)), r"Document: ids is \[2, 8\]; this call needs \[batch 2, len_k 7\]"),
        (Tree(TREES), (2, 4, 5, Exactly(3)), r"Tree: ancestors are of 4 nodes; this call has 3 keys, of which the last are the nodes; give at most so many"),
        (Window(SIDES), (2, 4, 5, 5), r"Window: left is \[3\]; this call needs \[heads 4\]"),
        (Window(torch.ones(2, 1).int()), (3, 4, 5, 5), r"Window: left is \[2, 1\]; this call needs \[batch 3, any\]"),
        (Prefix(SIDES), (2, 4, 5, 5), r"Prefix: length is \[3\]; this call needs \[batch 2\]"),
        (Tree(TREES), (3, 4, 5, 5), r"Tree: ancestors is \[2, 4, 4\]; this call needs \[batch 3, any, any\]"),
        (KeyPadding(GRID[:, 0, 0]), (2, 3, 1, 9), r"KeyPadding: valid is \[2, 8\]; this call needs \[batch 2, len_k 9\]"),
        (
            Blocks(GRID[0, 0, :2, :2], 4),
            (2, 3, 9, 8),
            r"Blocks\(4\): blocks, one for 4 queries and 4 keys, is \[2, 2\]; this call needs \[len_q 3, len_k 2\], or 1 for all alike",
        ),
        (Dense(GRID), (2, 3, 8, 9), r"Dense: the mask is \[2, 3, 8, 8\]; this call needs \[batch 2, heads 3, len_q 8, len_k 9\], or 1 for all alike"),
        (Causal() & Document(IDS) | Dense(GRID), (2, 4, 5, 5), r"Dense: the mask is \[2, 3, 8, 8\]; this call needs \[batch 2, heads 4"),
    ],
    ids=str,
)
def test_what_a_mask_says_to_a_call_that_it_does_not_fit(mask, sizes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        mask.fits(*sizes)


def test_what_is_no_mask():
    words = r"give a Mask \(Full\(\), Causal\(\), Window\(512\), ...\), a bool tensor or a function mask_mod\(b, h, i, j\)"
    with pytest.raises(TypeError, match=f"mask is a str; {words}"):
        as_mask("causal")
    with pytest.raises(TypeError, match=f"mask is the class Causal; {words}"):
        as_mask(Causal)
    with pytest.raises(TypeError, match="mask is a int"):
        _ = Causal() & 3
    assert str(as_mask(GRID)) == "Dense" and str(as_mask(numbers)) == "numbers" and as_mask(Causal()) == Causal()


@pytest.mark.parametrize(("kind", "call", "way"), [
    (Mask, lambda part: part.sees(None), r"Odd is a Mask that says nothing: define sees\(self, at\)"),
    (Score, lambda part: part.apply(None, None), r"Odd is a Score that does nothing: define apply\(self, s, at\)"),
    (Part, lambda part: part.write(), "Odd is neither a Mask nor a Score: derive it from one of these"),
])  # fmt: skip
def test_kinds_that_lack_what_makes_them_one(kind, call, way):
    with pytest.raises(NotImplementedError, match=way):
        call(type("Odd", (kind,), {})())
