"""What the attention kernels share: the tiles of a band, the list of a packed batch's tiles, and the memory of what is made from tensors."""

import itertools
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from onchip.core.masks import Blocks, Causal, Chunked, Dense, Document, Full, MaskMod, Prefix, Window
from onchip.core.once import one_pass
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import mods, tile, tile_lists
from onchip.kernels.attention.hopper_copies import pool_of
from onchip.kernels.attention.reference import place
from onchip.kernels.attention.register_decode import _words
from onchip.kernels.attention.tile import describable, ends, for_tma, inner_span, key_span, mask_map, query_span, remembered
from onchip.kernels.attention.tile_lists import sequence_tiles

# ---- which tiles a band shows

BANDS = [Full(), Causal(), Causal("top_left"), *map(Window, (0, 5, 14, 15)), Window(30, 1), Window(40, 15), Window(None, 4), Window(7, None, "top_left")]
SIZES = [(1, 1), (16, 16), (17, 40), (40, 17), (33, 64), (64, 33), (48, 48), (70, 5)]


@triton.jit
def _spans(of_keys_ptr, of_queries_ptr, shift, len_q, len_k, LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr):
    tile = tl.program_id(0)
    first, inner, outer, last = query_span(tile * N, shift, len_q, len_k, LEFT, RIGHT, M, N, PACKED)
    tl.store(of_keys_ptr + tile * 4, first)
    tl.store(of_keys_ptr + tile * 4 + 1, inner)
    tl.store(of_keys_ptr + tile * 4 + 2, outer)
    tl.store(of_keys_ptr + tile * 4 + 3, last)
    top = tile * M + shift
    first, last = key_span(top, tl.minimum(tile * M + M, len_q) - 1 + shift, len_k, LEFT, RIGHT)
    inner, outer = inner_span(top, top + M - 1, len_k, LEFT, RIGHT, N)
    tl.store(of_queries_ptr + tile * 4, first)
    tl.store(of_queries_ptr + tile * 4 + 1, inner)
    tl.store(of_queries_ptr + tile * 4 + 2, outer)
    tl.store(of_queries_ptr + tile * 4 + 3, last)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_spans_hold_what_is_seen_and_mask_what_has_to_be(band, packed, device):
    """Of a tile of keys: the queries that see some of it, and between them tiles that see all of it; the same of a tile of queries."""
    for (len_q, len_k), (m, n) in product(SIZES, ((16, 16), (16, 32), (32, 16))):
        of_keys, of_queries = (torch.zeros(max(len_q, len_k), 4, dtype=torch.int32, device=device) for _ in range(2))
        shift = band.shift(len_q, len_k)
        left, right, _ = ends(band)
        _spans[(-(-max(len_q, len_k) // min(m, n)),)](of_keys, of_queries, shift, len_q, len_k, LEFT=left, RIGHT=right, M=m, N=n, PACKED=packed)
        seen = band.dense(torch.arange(len_q)[:, None] + shift, torch.arange(len_k))
        for start, (first, inner, outer, last) in zip(range(0, len_k, n), of_keys.tolist(), strict=False):
            rows = seen[:, start : start + n].any(1).nonzero()[:, 0].tolist()
            assert first % m == inner % m == outer % m == 0 and first <= inner <= outer <= last
            assert not rows or (first <= rows[0] < first + m and rows[-1] < last)
            assert seen[inner:outer, start : start + n].all() and (inner == outer or start + n <= len_k)
            assert outer <= -(-len_q // m) * m and (not packed or inner == outer or outer <= len_q)
        for start, (first, inner, outer, last) in zip(range(0, len_q, m), of_queries.tolist(), strict=False):
            cols = seen[start : start + m].any(0).nonzero()[:, 0].tolist()
            assert not cols or (first, last) == (cols[0], cols[-1] + 1)
            assert inner >= outer or (inner % n == outer % n == 0 and outer <= len_k and seen[start : start + m, inner:outer].all())


# ---- which tiles any other mask shows

MAPPED = {
    "document": lambda: Document(torch.arange(70) // 20),
    "document, causal": lambda: Document(torch.tensor([[0] * 30 + [1] * 40, [0] * 60 + [1] * 10])) & Causal(),
    "chunked": lambda: Chunked(20),
    "prefix": lambda: Prefix(40),
    "blocks": lambda: Blocks(torch.rand(2, 5, 5) < 0.4, 16),
    "dense": lambda: Dense(torch.rand(70, 70) < 0.002),
    "a function": lambda: MaskMod(lambda b, h, i, j: (i - j) % 32 == 0),
    "two windows": lambda: Window(10) | Prefix(8),
    "nothing": lambda: MaskMod(lambda b, h, i, j: i < 0),
    "corners": lambda: MaskMod(lambda b, h, i, j: i + j >= 0) & Window(1, 1),  # of tiles beside the diagonal's
}


@pytest.mark.gpu
@pytest.mark.parametrize("of_keys", [False, True], ids=["of queries", "of keys"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", MAPPED)
def test_a_map_holds_the_tiles_that_are_seen_and_no_others(name, packed, of_keys, device):
    """So a hidden tile costs nothing, and one that is seen in whole no mask; rows past the end hide nothing of a tile of queries."""
    mask = MAPPED[name]()
    lengths = ((70, 70), (33, 70)) if packed else ((70, 70),) * 2
    p = Attention("prefill", 2, 70, 70, 2, 2, 16, torch.float32, mask.static(), *(("packed", 0, 103, 140) if packed else ()))
    offsets = [torch.tensor([0, *accumulate(n[side] for n in lengths)], dtype=torch.int32, device=device) for side in (0, 1)] if packed else [None, None]
    reads = tuple(t.to(device) for t in mask.tensors)
    sees, x = mods.mask_function(p.mask.text), Operands(1.0, *offsets, mask=reads)
    for m, n in ((16, 16), (32, 16), (16, 32)):
        bits = n == 32
        found, (apart, next_head, _, *words) = mask_map(p, sees, x, m, n, of_keys, device, bits)
        for (b, (len_q, len_k)), h in product(enumerate(lengths), range(2)):
            seen = p.mask.seen(place(b, 2, len_q, len_k, device), reads).expand(1, 2, len_q, len_k)[0, h].cpu()
            rows = found.flatten(0, 2)[b * apart + h * next_head :]
            tiles = [[seen[i : i + m, j : j + n] for j in range(0, 70, n)] for i in range(0, 70, m)]
            for row, line in zip(rows.tolist(), zip(*tiles, strict=True) if of_keys else tiles, strict=False):
                whole = [at for at, tile in enumerate(line) if tile.shape[1] == n and tile.all() and (len(tile) == m or (len(tile) and not of_keys))]
                part = [at for at, tile in enumerate(line) if tile.any() and at not in whole]
                assert (row[0], row[1]) == (len(part), len(whole))
                assert row[2 : 2 + len(part)] == part and row[len(row) - len(whole) :] == whole[::-1]
                if bits and of_keys:  # which of its own keys are seen
                    shown = F.pad(torch.cat(line).any(0), (0, n - line[0].shape[1])).view(-1, 32)
                    assert row[words[0] : words[0] + 1] == (shown << torch.arange(32)).sum(1).to(torch.int32).tolist()
                elif bits:  # which keys of each tile are seen
                    shown = F.pad(torch.cat(line, 1).any(0), (0, -70 % n)).view(-1, 32)
                    assert row[words[0] : words[0] + len(shown)] == (shown << torch.arange(32)).sum(1).to(torch.int32).tolist()


# ---- tiles of a packed batch

MASKS = [
    Full(),
    Causal(),
    Causal(align="top_left"),
    Window(70),
    Window(40, 30),
    Window(None, 20, "top_left"),
    Document(torch.zeros(700, dtype=torch.int32)) & Causal(),
]


def packed(lengths: list[tuple[int, int]], used, mask, device) -> tuple[Attention, Operands]:
    """A Problem of sequences of (queries, keys), of which `used` are used, and its lengths on the device."""
    ints = {"dtype": torch.int32, "device": device}
    len_q, len_k = zip(*lengths, strict=True)
    offsets = [torch.tensor([0, *accumulate(n)], **ints) for n in (len_q, len_k)]
    static, _ = mask.parts()
    p = Attention("prefill", len(lengths), max(len_q), max(len_k), 2, 2, 64, torch.bfloat16, static, "packed", 0, sum(len_q), sum(len_k))
    return p, Operands(1.0, *offsets, *(torch.tensor(n, **ints) for n in zip(*used, strict=True)) if used else ())


def listed(lengths, mask, block: int, of_keys: bool) -> list[tuple[int, int]]:
    """What the list is to hold."""
    return [(b, tile) for _, b, tile in worked(lengths, mask, block, of_keys)]


def worked(lengths, mask, block: int, of_keys: bool) -> list[tuple[int, int, int]]:
    """(what it sees, sequence, tile): tiles in order of sequences, later queries or earlier keys first, then sorted by what whole tiles see."""
    band, found = mask.hull, []
    for b, (len_q, len_k) in enumerate(lengths):
        rows, keys = torch.arange(len_q) + band.shift(len_q, len_k), torch.arange(len_k)
        if of_keys:
            found += [(int(band.dense(rows[:, None], n + torch.arange(block)).any(1).sum()), b, n // block) for n in range(0, len_k, block)]
        else:
            tiles = range(0, len_q, block)
            found += [(int(band.dense(rows[m] + torch.arange(block)[:, None], keys).any(0).sum()), b, m // block) for m in reversed(tiles)]
    return sorted(found, key=lambda tile: -tile[0])


def drawn(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]] | None]:
    """Lengths of 1 to 90 sequences, some of them 0, and, of every second batch, how much of each is used."""
    r = random.Random(seed)
    n = r.choice((1, 4, 90))
    most = 64 if n == 90 else 700
    lengths = [(r.choice((0, 1, r.randint(1, most))), r.choice((0, 1, r.randint(1, most)))) for _ in range(n)]
    lengths[0] = (most, r.randint(1, most))
    return lengths, [(r.randint(0, q), r.randint(0, k)) for q, k in lengths] if seed % 2 else None


@pytest.mark.gpu
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_of_a_packed_batch(mask, of_keys, device):
    """All of them once, those that see most first; the work that counts is what the used part of one side sees of the other's."""
    for seed in range(6):
        lengths, used = drawn(seed)
        p, x = packed(lengths, used, mask, device)
        for block in (32, 128):
            found, expected = sequence_tiles(p, x, block, of_keys), listed(used or lengths, mask, block, of_keys)
            assert found.dtype == torch.int32 and len(found) <= sum(n[of_keys] for n in lengths) // block + len(lengths)
            assert list(map(tuple, found.tolist())) == expected + [(-1, 0)] * (len(found) - len(expected))


@pytest.mark.gpu
def test_equal_sequences_leave_no_place_empty(device):
    p, x = packed([(128, 128)] * 3, None, Full(), device)
    assert sequence_tiles(p, x, 64).tolist() == [[0, 1], [0, 0], [1, 1], [1, 0], [2, 1], [2, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("many", [0, 70])
def test_sequence_after_sequence(many, device):
    """The longest first, of equal ones the earlier; tiles in order, on either side, with where both begin and how long they are; what is used counts."""
    lengths = [(64, 1), (200, 70), (0, 300), (130, 0), *[(10, 10)] * many, (150, 129)]
    for used in (None, [(min(q, 130), min(k, 70)) for q, k in lengths]):
        p, x = packed(lengths, used, Causal(), device)
        for side in (0, 1):
            tiles = [-(-n[side] // 64) for n in used or lengths]
            order = sorted(range(len(tiles)), key=lambda b: -tiles[b])
            found = sequence_tiles(p, x, 64, bool(side), by_work=False)[:, :6].tolist()
            starts = [[sum(n[i] for n in lengths[:b]) for b in range(len(lengths))] for i in (side, 1 - side)]
            ends = [[n[i] for n in used or lengths] for i in (side, 1 - side)]
            expected = [[b, tile, starts[0][b], ends[0][b], starts[1][b], ends[1][b]] for b in order for tile in range(tiles[b])]
            assert found == expected + [[-1] * 6] * (len(found) - len(expected))


@pytest.mark.gpu
def test_a_list_stays_in_its_place_whatever_lengths_say(device):
    """Of sequences longer than the call promised, the tiles that it promised."""
    p, x = packed([(64, 64), (300, 300), (64, 64)], None, Full(), device)
    assert sequence_tiles(p._replace(len_q=128), x, 64).tolist() == [[1, 1], [1, 0], [0, 0], [2, 0], *[[-1, 0]] * 2]


@pytest.mark.gpu
@pytest.mark.parametrize("deal", [1, 16, 132])
def test_keys_of_long_tiles_are_dealt_out(deal, device, monkeypatch):
    """In parts of as few keys as are no more than the places, or of a place's share of all keys where tiles are as many; first part to last."""
    monkeypatch.setattr(tile_lists, "LEAST", 32)
    for seed, mask in product(range(4), (Full(), Causal(), Window(100))):
        lengths, used = drawn(seed)
        p, x = packed(lengths, used, mask, device)
        tiles = worked(used or lengths, mask, 32, False)
        least, expected = -(-max(32, -(-sum(work for work, _, _ in tiles) // deal)) // 128) * 128, []
        few = len(tiles) < deal
        size = next(n for n in itertools.count(least, 128) if not few or sum(max(1, -(-work // n)) for work, _, _ in tiles) <= deal)
        for work, b, at in tiles:
            parts = max(1, min(-(-work // size) if few else work // size, work // 32, 16))
            assert parts == 1 or len(expected) + parts <= deal
            expected += [(b, at | part << 20 | parts - 1 << 25) for part in range(parts)]
        found = list(map(tuple, sequence_tiles(p, x, 32, deal=deal).tolist()))
        assert found[: len(expected)] == expected and {b for b, _ in found[len(expected) :]} <= {-1}


# ---- memory


def test_remembered_until_a_tensor_changes():
    """By torch's count of writes; one tensor in another's place is another tensor; what inference mode made counts nothing. In a pass nothing is written."""
    made, tensor = [], torch.zeros(3)

    def ask(what="a", of=tensor, changing=False):
        return remembered((what,), (of, None), tensor.device, lambda: made.append(what) or len(made), changing)

    assert [ask(), ask(), ask("b"), ask("b"), ask()] == [1, 1, 2, 2, 1]
    tensor += 1
    assert [ask(), ask(), ask(of=tensor.clone()), ask()] == [3, 3, 4, 3]
    with torch.inference_mode():
        blank = torch.zeros(3)
    assert [ask(of=blank), ask(of=blank)] == [5, 6]
    assert [ask(changing=True), ask(changing=True)] == [7, 8]
    for first in (9, 12):
        with one_pass():
            assert [ask(of=blank), ask(of=blank), ask("b", blank), ask(changing=True), ask(), ask(of=blank)] == [
                first,
                first,
                first + 1,
                *[first + 2] * 2,
                first,
            ]
    assert ask() == 3


def test_threads_remember_side_by_side(monkeypatch):
    """What one lets go of, another may be about to take."""
    monkeypatch.setattr(tile, "REMEMBERED", 2)
    tensors, before = [torch.zeros(1) for _ in range(6)], sys.getswitchinterval()

    def ask(seed):
        draw = random.Random(seed)
        for _ in range(10000):
            at = draw.randrange(len(tensors))
            assert remembered(("x",), (tensors[at],), tensors[at].device, lambda at=at: at) == at

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
    finally:
        sys.setswitchinterval(before)


# ---- what TMA takes


def laid_out(shape: tuple, strides: tuple, first: int, dtype=torch.bfloat16):
    """Random numbers in memory that begins at a multiple of 16 bytes, `first` places on."""
    size = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randint(1, 99, (size,)).to(dtype).as_strided(shape, strides, first)


@pytest.mark.parametrize(
    ("shape", "strides", "first", "dtype", "fits"),
    [
        ((2, 4, 3, 64), (768, 192, 64, 1), 0, torch.bfloat16, True),
        ((2, 4, 3, 64), (768, 192, 64, 1), 8, torch.bfloat16, True),
        ((2, 4, 3, 64), (768, 192, 64, 1), 1, torch.bfloat16, False),  # contiguous, so that `contiguous` does not move it
        ((2, 4, 3, 64), (768, 192, 64, 1), 8, torch.uint8, False),
        ((2, 4, 3, 64), (768, 192, 64, 1), 4, torch.float32, True),
        ((12, 3, 64), (192, 64, 1), 7, torch.bfloat16, False),
        ((12, 3, 64), (192, 64, 1), 16, torch.bfloat16, True),
        ((2, 4, 3, 64), (780, 195, 65, 1), 0, torch.bfloat16, False),
        ((1, 4, 3, 64), (3, 192, 64, 1), 0, torch.bfloat16, False),  # contiguous too, since there is one
        ((2, 4, 3, 64), (0, 192, 64, 1), 0, torch.bfloat16, False),
        ((1, 4, 3, 64), (0, 192, 64, 1), 0, torch.bfloat16, True),
        ((2, 4, 3, 64), (768, 192, 1, 3), 0, torch.bfloat16, False),
    ],
)
def test_what_tma_takes(shape, strides, first, dtype, fits):
    """As it is, or a copy that it takes, of the same numbers."""
    t = laid_out(shape, strides, first, dtype)
    assert describable(t) == fits
    mended = for_tma(t)
    assert (mended is t) == fits
    assert describable(mended) and mended.data_ptr() % 16 == 0
    assert torch.equal(mended, t)


def test_copies_of_pools_are_said():
    """Once for each pool of its kind: by what, of what, and what to do."""
    t = laid_out((2, 4, 3, 64), (780, 195, 65, 1), 0, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"hopper_paged copies all pages of a pool \[2, 4, 3, 64\] in each call.*\(780, 195, 65, 1\).*16 bytes; give one"):
        mended = for_tma(t, "hopper_paged")
    assert describable(mended) and torch.equal(mended, t)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert for_tma(mended, "hopper_paged") is mended and describable(for_tma(t))


def test_a_pool_at_an_odd_number():
    """Is contiguous, so that `contiguous` would leave it there; words of four bytes begin at even ones."""
    numbers = torch.randn(2 * 4 * 3 * 64 + 1).bfloat16()
    pool = numbers[1:].view(2, 4, 3, 64)
    with pytest.warns(UserWarning, match="register_decode copies all pages .* 4 bytes"):
        words = _words(pool)
    assert torch.equal(words.view(torch.bfloat16), pool)
    assert _words(numbers[:-1].view(2, 4, 3, 64)).data_ptr() == numbers.data_ptr()


def test_pages_out_of_reach():
    """Of 12 slots, 8 numbers more than a whole number of slots apart; a whole number of slots apart many more are in reach."""
    pool = lambda pages, page: torch.empty(1, device="meta").bfloat16().as_strided((pages, 8, 12, 128), (page, 128, 1024, 1))  # noqa: E731
    assert pool_of(pool(1 << 21, 12 * 1024 + 8))[1:] == (1, 16, 1537, 128)
    assert pool_of(pool(1 << 27, 13 * 1024))[1:] == (128, 16, 13, 1)
    with pytest.raises(ValueError, match=r"4194304 pages of 12 slots, 12296 .*give pages a multiple of 1024 numbers apart, or kernel='triton_paged'"):
        pool_of(pool(1 << 22, 12 * 1024 + 8))
