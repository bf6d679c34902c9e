"""What a decode does beside its model, entry by entry, and every kernel to the bit."""

import pytest
import torch

from onchip.kernels.fused import DECODE_ADVANCE, DECODE_PLACES
from onchip.ops.decode_step import decode_advance, decode_places

KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in DECODE_PLACES.kernels]
assert [kernel.name for kernel in DECODE_PLACES.kernels] == [kernel.name for kernel in DECODE_ADVANCE.kernels]
SPARE = 77777  # around what a kernel has to write: it stays there


def positions_of(rows, longest, device):
    """Without a sequence at first, at 0, at the end, and past it; the others anywhere, one in four without a sequence."""
    drawn = torch.where(torch.rand(rows, device=device) < 0.25, -1, torch.randint(longest, (rows,), device=device))
    for row, position in enumerate([-1, 0, longest - 1, longest][:rows]):
        drawn[row] = position
    return drawn


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "pages", "page"), [(0, 3, 16), (1, 1, 16), (63, 5, 1), (131, 7, 16), (130, 3, 24)])
def test_places(rows, pages, page, kernel, device):
    """Of tables that are columns of wider ones, as an engine cuts them; pages and positions whose slots are past 2^31."""
    positions, table = positions_of(rows, pages * page, device), torch.full((rows, pages + 2), -SPARE, dtype=torch.int32, device=device)
    table[:, :pages] = torch.randint(1 << 30, (rows, pages), device=device)
    states = torch.full((3, rows + 1), SPARE, device=device)
    before = positions.clone()
    at, slots, lengths = decode_places(positions, table[:, :pages], page, at=states[1, :rows], kernel=kernel)
    assert torch.equal(positions, before) and torch.equal(states[1, :rows], at) and (states[[0, 2]] == SPARE).all() and (states[:, rows:] == SPARE).all()
    assert (at.dtype, slots.dtype, lengths.dtype) == (torch.int64, torch.int64, torch.int32)
    for row, position in enumerate(positions.tolist()):
        found = at[row].item(), slots[row].item(), lengths[row].item()
        index = table[row, min(position // page, pages - 1)].item()
        assert found == ((0, -1, 0) if position < 0 else (position, index * page + position % page, position + 1))
    assert torch.equal(decode_places(positions, table[:, :pages], page, kernel=kernel).at, at)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "words"), [(0, "counts history"), (1, ""), (67, "counts"), (131, "counts history"), (67, "history")])
def test_advance(rows, words, kernel, device):
    vocab, longest = 50, 9
    positions, tokens = (torch.full((rows + 1,), SPARE, device=device) for _ in range(2))
    positions[:rows] = positions_of(rows, longest, device)
    drawn = torch.randint(vocab, (rows,), device=device)
    counts, history = (torch.randint(3, (rows + 1, n + 1), dtype=torch.int32, device=device) for n in (vocab, longest))
    was = positions.tolist(), counts.tolist(), history.tolist()
    given = {name: tensor[:rows, :-1] for name, tensor in (("counts", counts), ("history", history)) if name in words}
    decode_advance(drawn, tokens[:rows], positions[:rows], **given, kernel=kernel)
    at, counted, known = was
    for row, token in enumerate(drawn.tolist()):
        if at[row] >= 0:
            at[row] += 1
            counted[row][token] += "counts" in words
            known[row][min(at[row], longest - 1)] = token if "history" in words else known[row][min(at[row], longest - 1)]
    assert (positions.tolist(), counts.tolist(), history.tolist()) == (at, counted, known)
    assert tokens.tolist() == [*drawn.tolist(), SPARE]


LONGS, WORDS = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: decode_places(LONGS.int(), WORDS, 16), r"positions is torch.int32 \[3\], its strides \[1\]; give int64 \[rows\]"),
        (lambda: decode_places(LONGS, WORDS[:2], 16), r"page_table is torch.int32 \[2, 2\], its strides \[2, 1\]; give int32 \[3, pages\]"),
        (lambda: decode_places(LONGS, WORDS, 0), "^decode_places: page is 0; give a whole number, 1 or more"),
        (lambda: decode_places(LONGS, WORDS, 16.0), "^decode_places: page is 16.0; give a whole number, 1 or more"),
        (lambda: decode_places(LONGS, WORDS, 16, at=LONGS[:2]), r"at is \[2\]; give int64 \[3\]"),
        (lambda: decode_advance(LONGS, LONGS[:2], LONGS), r"tokens is \[2\]; give int64 \[3\], as drawn is"),
        (lambda: decode_advance(LONGS, LONGS, LONGS, counts=WORDS.long()), r"counts is torch.int64 \[3, 2\]; give int32 \[3, n\]"),
        (lambda: decode_advance(LONGS, LONGS, LONGS, history=WORDS[:, :0]), r"history is torch.int32 \[3, 0\]; give int32 \[3, n\]"),
    ],
)
def test_what_does_not_fit(call, said):
    with pytest.raises(ValueError, match=said):
        call()
