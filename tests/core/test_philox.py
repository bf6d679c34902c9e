"""The random numbers of dropout: the known answers of Random123, the rate, their independence, and Triton's own."""

import itertools
import math

import pytest
import torch

from onchip.core.philox import MULTIPLIERS, WORD, _kept_alone, _product, bar, draw, kept, philox, threshold

PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ZEROS, ONES = ((0,) * 4, (0,) * 2), ((WORD,) * 4, (WORD,) * 2)
KNOWN = [  # kat_vectors of Random123, philox4x32: rounds, (counter, key), words
    (7, ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "given", "words"), KNOWN)
def test_known_answers(rounds, given, words):
    counter, key = (tuple(map(torch.tensor, part)) for part in given)
    assert tuple(map(int, philox(key, counter, rounds))) == words


def everywhere(batch, heads, len_q, len_k):
    return (torch.arange(n).view([-1 if k == d else 1 for k in range(4)]) for d, n in enumerate((batch, heads, len_q, len_k)))


def masks(p, seed=3, offset=0, sizes=(2, 4, 128, 256)):
    return kept(p, draw(torch.device("cpu"), seed, offset), *everywhere(*sizes), sizes[1]).broadcast_to(sizes)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_rate(p):
    """Within five standard deviations, over all, and over each sequence, head, row and column."""
    keep = masks(p).double()
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        rates = keep.mean(dims)
        deviation = math.sqrt(p * (1 - p) * rates.numel() / keep.numel())
        assert (rates - (1 - p)).abs().max() < 5 * deviation


def test_neighbours_agree_as_often_as_strangers():
    """Half of the time at p 0.5: along each dimension, between neighbouring seeds, and between neighbouring offsets."""
    keep = masks(0.5)
    pairs = [(keep.narrow(dim, 0, keep.shape[dim] - 1), keep.narrow(dim, 1, keep.shape[dim] - 1)) for dim in range(4)]
    pairs += [(masks(0.5, a), masks(0.5, b)) for a, b in ((3, 4), (3, 3 + (1 << 32)))] + [(masks(0.5), masks(0.5, offset=1))]
    for a, b in pairs:
        assert abs((a == b).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


def test_a_number_depends_on_its_place_alone():
    """Not on the lengths, so that padded and packed calls drop alike; two heads of two sequences differ."""
    keep = masks(0.3)
    assert torch.equal(masks(0.3, sizes=(1, 4, 7, 9)), keep[:1, :, :7, :9])
    assert len({tuple(keep[b, h].flatten().tolist()) for b, h in itertools.product(range(2), range(4))}) == 8
    assert torch.equal(masks(0.3), keep) and not torch.equal(masks(0.3, 4), keep)


def test_ends_of_the_threshold():
    assert threshold(0.0) == 0 and threshold(0.5) == 1 << 31 and threshold(1 - 2**-40) == WORD
    assert masks(0.0).all()


def test_a_state():
    assert draw(torch.device("cpu"), 7, 5).tolist() == [7, 5]
    torch.manual_seed(1)
    a, b = (draw(torch.device("cpu"), None, 3) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(draw(torch.device("cpu"), None, 3), a) and a[0] != b[0] and a[1] == b[1] == 3 and 0 <= a[0] < 1 << 62


def test_in_a_graph(monkeypatch):
    """Where a product is written so that it does not pass 2^63, and nothing asks which calls there are."""
    keep, state = masks(0.3, (1 << 62) - 12345, sizes=(2, 3, 20, 30)), draw(torch.device("cpu"), torch.tensor((1 << 62) - 12345), 9)
    assert state.tolist() == [(1 << 62) - 12345, 9]
    key = torch.tensor([0, 1, 1 << 31, WORD, 3248582714])
    product = [torch.stack(_product(a, key)) for a in MULTIPLIERS]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(masks(0.3, (1 << 62) - 12345, sizes=(2, 3, 20, 30)), keep)
    for a, found in zip(MULTIPLIERS, product, strict=True):
        assert torch.equal(torch.stack(_product(a, key)), found)
        assert [(high << 32) + low for high, low in found.T.tolist()] == [a * n for n in key.tolist()]


def test_sixteen_weights_of_a_call():
    """As the text says it, a weight at a time: odd places, the same ones again, and those of one query or key alone."""
    p, heads, state = 0.3, 3, draw(torch.device("cpu"), (5 << 40) + 77, 9)
    b, h = torch.tensor([0, 2]).view(2, 1, 1, 1), torch.tensor([1, 2]).view(1, 2, 1, 1)
    for rows, cols in (([3, 17, 18, 19, 40, 3], [8, 0, 9, 1, 1000]), ([7], [70000]), ([], [1])):
        i, j = torch.tensor(rows, dtype=torch.int64).view(1, 1, -1, 1), torch.tensor(cols).view(1, 1, 1, -1)
        found = kept(p, state, b, h, i, j, heads)
        assert found.shape == (2, 2, len(rows), len(cols)) and torch.equal(found, _kept_alone(p, state, b * heads + h, i, j))
        for at in itertools.product(range(2), range(2), range(len(rows)), range(len(cols))):
            query, key = rows[at[2]], cols[at[3]]
            counter = key & ~9, query & ~9, int(b[at[0], 0, 0, 0]) * heads + int(h[0, at[1], 0, 0]), 9
            words = philox((torch.tensor(77), torch.tensor(5 << 8)), tuple(map(torch.tensor, counter)))
            word, turns = int(words[query % 2 * 2 + key % 2]), (query & 8) * 2 + (key & 8)
            word = (word << turns | word >> 32 - turns) & WORD
            assert bool(found[at]) == ((word if word < 1 << 31 else word - (1 << 32)) >= bar(p)), at


@pytest.mark.parametrize("p", [0.002, 0.1, 0.5, 0.9])
def test_weights_of_a_call_hardly_know_each_other(p):
    """The correlation of any two of the sixteen, over 524,288 calls: within five standard deviations of what tied first bytes make, 1/256 at most."""
    keep = masks(p, sizes=(4, 8, 256, 1024)).view(32, 16, 2, 4, 2, 64, 2, 4, 2).permute(0, 1, 3, 5, 7, 2, 4, 6, 8).reshape(-1, 16).double()
    found = torch.corrcoef(keep.T) - torch.eye(16)
    assert found.abs().max() < 5 / math.sqrt(len(keep)) + 1 / 256


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("seed", [0, 5, (1 << 40) + 3, (1 << 62) + 12345])
def test_triton_draws_the_same(rounds, seed, device):
    import triton
    import triton.language as tl

    @triton.jit
    def words(out_ptr, state_ptr, b_h, N: tl.constexpr, ROUNDS: tl.constexpr):
        i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        word, _, _, _ = tl.philox(tl.load(state_ptr), j, i, b_h, tl.load(state_ptr + 1).to(tl.int32), ROUNDS)
        tl.store(out_ptr + i * N + j, word.to(tl.uint32, bitcast=True).to(tl.int64))

    state, out = draw(device, seed, 11), torch.empty(16, 16, dtype=torch.int64, device=device)
    words[(1,)](out, state, 21, N=16, ROUNDS=rounds)
    i, j = torch.arange(16, device=device)[:, None], torch.arange(16, device=device)
    key = (state[0] & WORD, state[0] >> 32 & WORD)
    expected = philox(key, (j, i, torch.tensor(21, device=device), state[1]), rounds)[0]
    assert torch.equal(out, expected.broadcast_to(16, 16))
