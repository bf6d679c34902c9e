"""What a mask's text says of blocks: right wherever it says something, and so much that pairs which it settles are not looked at."""

import pytest
import torch

import onchip
from onchip.core import masks
from onchip.core.masks import Causal, as_mask
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import blocked_bounds, blocked_tiles
from onchip.kernels.attention.blocked_bounds import bounds, tells
from onchip.kernels.attention.blocked_tiles import CALL, Part, rectangles, tiles
from onchip.kernels.attention.reference import place

CPU = torch.device("cpu")
BATCH, HEADS, KV_HEADS = 2, 4, 2


def of_few(monkeypatch):
    """Blocks are asked for where there are few pairs, too."""
    monkeypatch.setattr(blocked_tiles, "FEW_PAIRS", 1000)
    monkeypatch.setattr(blocked_tiles, "PLACES", 1000)


def documents(n, each=150, dtype=torch.int64):
    """Ids of documents one after another, that are not in order; some -1."""
    return ((torch.arange(n) + 37) // each * 5 % 7 - 1).to(dtype)


def both(m, n):
    q, k = documents(m), documents(n, 110, torch.int32)
    return lambda b, h, i, j: (q[i] == k[j]) & ~(i < j - 40)


def per_head(m, n):
    q, k = torch.stack([documents(m, each) for each in (90, 100, 300, 301)]), documents(n)
    return lambda b, h, i, j: q[h, i] == k[j]


def not_a_number(m, n):
    q, k = documents(m).float(), documents(n).float()
    k[n // 3 :: 7] = float("nan")
    return lambda b, h, i, j: (q[i] <= k[j]) & (i != j)


def tensors_of_one(m, n):
    return lambda b, h, i, j: (i // 64 >= torch.tensor(2) * (j // 128)) & (b == 1)


MASKS = {
    "Document": lambda m, n: masks.Document(torch.arange(n) // 70),
    "in no order": lambda m, n: masks.Document(documents(n, dtype=torch.int32)),
    "in no order at all": lambda m, n: masks.Document(documents(n)[torch.randperm(n)]),
    "of each sequence": lambda m, n: masks.Document(torch.stack([documents(n), documents(n, 77)]).short()),
    "of each head": per_head,
    "of bytes": lambda m, n: masks.Document(documents(n).clamp(min=0).byte()),
    "to itself": lambda m, n: masks.Document(torch.arange(n)),
    "Document & Causal": lambda m, n: masks.Document(documents(n)) & Causal(),
    "Document & Window": lambda m, n: masks.Document(torch.arange(n) // 1001) & masks.Window(600),
    "Document | Causal": lambda m, n: masks.Document(documents(n)) | Causal(),
    "Document & Dense": lambda m, n: masks.Document(documents(n)) & (torch.rand(m, n) < 0.3),
    "Document & KeyPadding": lambda m, n: masks.Document(documents(n)) & masks.KeyPadding(torch.tensor([n - 70, 130])),
    "Document & Tree": lambda m, n: masks.Document(documents(n)) & masks.Tree.of((torch.arange(40) - 1) // 2),
    "captures": both,
    "floats": not_a_number,
    "none in common": lambda m, n: as_mask(lambda b, h, i, j, q=documents(m), k=documents(n) + 20: q[i] == k[j]),
    "all but some": lambda m, n: as_mask(lambda b, h, i, j, q=documents(m), k=documents(n): ~((q[i] == k[j]) | (j < 100)) & (q[i] != k[j] - 1)),
    "of one": tensors_of_one,
    "a product": lambda m, n: as_mask(lambda b, h, i, j: (i * j % 7 < 3) & (i > j)),
    "of nothing": lambda m, n: as_mask(lambda b, h, i, j: h == 2),
    "Prefix": lambda m, n: masks.Prefix(torch.tensor([200, 3])),
    "Tree": lambda m, n: masks.Tree.of((torch.arange(60) - 1) // 2),
    "KeyPadding": lambda m, n: masks.KeyPadding(torch.rand(BATCH, n) < 0.7),
    "Windows": lambda m, n: masks.Window(torch.tensor([10, 200, 64, 0]), 20),
    "Chunked": lambda m, n: masks.Chunked(130),
}


@pytest.mark.parametrize(("len_q", "len_k"), [(300, 500), (500, 300), (129, 1000)])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("most", [200, 512])
def test_tiles_of_bounded_masks_hold_what_is_seen(name, len_q, len_k, most, monkeypatch):
    of_few(monkeypatch)
    mask = as_mask(MASKS[name](len_q, len_k))
    p = Attention("prefill", BATCH, len_q, len_k, HEADS, KV_HEADS, 16, torch.float32, mask.static())
    for b in range(BATCH):
        whole = mask.static().seen(place(b, HEADS, len_q, len_k, CPU)._replace(b=torch.full((1, 1, 1, 1), b)), mask.tensors)
        whole = whole.broadcast_to(1, HEADS, len_q, len_k)
        found = torch.zeros_like(whole)
        for tile in tiles(p, Operands(1.0, mask=mask.tensors), Part(slice(b, b + 1), None, None, len_q, len_k), most, CPU):
            rows, keys = torch.arange(len_q)[tile.rows], torch.arange(len_k)[tile.keys]
            assert torch.equal(tile.at.i.flatten(), rows) and torch.equal(tile.at.j.flatten(), keys) and len(rows) <= most
            seen = torch.ones((), dtype=torch.bool) if tile.seen is None else tile.seen
            found[:, :, tile.rows, keys] |= seen.broadcast_to(1, HEADS, len(rows), len(keys))
        assert torch.equal(found, whole)


@pytest.mark.parametrize("name", MASKS)
def test_what_is_said_of_blocks_is_so(name):
    """Of tiles that begin anywhere, over the keys of some hull."""
    traced, tensors = as_mask(MASKS[name](500, 500)).parts()
    assert isinstance(traced, masks.Traced)
    assert tells(traced)
    at = place(0, HEADS, 500, 500, CPU)._replace(b=torch.arange(BATCH).view(-1, 1, 1, 1))
    whole = traced.seen(at, tensors).broadcast_to(BATCH, HEADS, 500, 500)
    ranges = [(slice(30, 330), range(7, 300)), (slice(330, 450), range(100, 500))]
    for (rows, keys), ends in zip(ranges, bounds(traced, tensors, at._replace(i=None, j=None), ranges), strict=True):
        assert ends.most.shape == (-(-(rows.stop - rows.start) // 128), -(-keys.stop // 64) - keys.start // 64)
        for n, row in enumerate(zip(ends.least.tolist(), ends.most.tolist(), strict=True)):
            for m, (least, most) in enumerate(zip(*row, strict=True), keys.start // 64):
                i = slice(rows.start + n * 128, min(rows.start + (n + 1) * 128, rows.stop))
                block = whole[:, :, i, max(m * 64, keys.start) : min((m + 1) * 64, keys.stop)]
                assert not least or block.all()
                assert most or not block.any()


def blocks_of_documents(n):
    return torch.arange(n) * 8 // n


PAIRS = {  # a mask of so many tokens, and the most of all pairs that may be looked at
    "Document": (lambda n: masks.Document(blocks_of_documents(n)), 0.0),
    "Document, in no order": (lambda n: masks.Document(torch.tensor([5, -1, 9, 2, 1 << 40, 7, 3, 8, 4])[(torch.arange(n) + 50) * 8 // n]), 0.22),
    "Document & Causal": (lambda n: masks.Document(blocks_of_documents(n)) & Causal(), 0.07),
    "captures": (lambda n: lambda b, h, i, j, q=blocks_of_documents(n), k=blocks_of_documents(n): (q[i] == k[j]) & (i >= j), 0.07),
    "Document & KeyPadding": (lambda n: masks.Document(blocks_of_documents(n)) & masks.KeyPadding(torch.tensor([n // 2 + 64])), 0.0),
    "KeyPadding": (lambda n: masks.KeyPadding(torch.tensor([n // 2 + 1])), 0.04),
    "Tree": (lambda n: masks.Tree.of((torch.arange(64) - 1) // 2), 0.003),
    "Prefix": (lambda n: masks.Prefix(n // 4), 0.05),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_are_looked_at(name, monkeypatch):
    """Of 67M at 8,192 tokens a look at each takes 150 ms, and all of attention 250."""
    looked, run = [], blocked_tiles.run
    monkeypatch.setattr(blocked_tiles, "run", lambda traced, tensors, at, *s: looked.append(at.i.numel() * at.j.numel()) or run(traced, tensors, at, *s))
    make, most = PAIRS[name]
    q, k, v = (torch.randn(1, 2048, 1, 16, requires_grad=True) for _ in range(3))
    out = onchip.attention(q, k, v, mask=make(2048), kernel="blocked")
    assert sum(looked) <= most * 2048**2
    looked.clear()
    out.sum().backward()
    assert sum(looked) <= most * 2048**2


def test_rows_that_see_all_of_the_same_keys_are_one_call(monkeypatch):
    calls, forward = [], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setattr(
        "onchip.kernels.attention.blocked.fused_forward", lambda q, k, *rest, **more: calls.append((q.shape[2], k.shape[2])) or forward(q, k, *rest, **more)
    )
    q, k, v = (torch.randn(1, 4096, 1, 8) for _ in range(3))
    onchip.attention(q, k, v, mask=masks.Document(blocks_of_documents(4096) // 4), kernel="blocked")
    assert calls == [(2048, 2048)] * 2


WHOLE = ("Document", "in no order", "in no order at all", "of each sequence", "of each head", "Document & Causal", "captures", "none in common")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("how", [{}, {"softcap": 4.0}, {"bias": torch.randn(HEADS, 1, 500)}], ids=["torch's", "ours", "bias"])
def test_results_and_gradients(name, how, monkeypatch):
    of_few(monkeypatch)
    inputs = [torch.randn(BATCH, n, heads, 16, requires_grad=True) for n, heads in ((300, HEADS), (500, KV_HEADS), (500, KV_HEADS))]
    mask, found = MASKS[name](300, 500), []
    for kernel in ("blocked", "reference"):
        out, lse = onchip.attention(*inputs, mask=mask, return_lse=True, kernel=kernel, **how)
        found.append((out, lse, *torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view_as(out))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_packed(monkeypatch):
    """Each sequence has ids, and a length, of its own."""
    of_few(monkeypatch)
    lengths, ids = (400, 0, 333), torch.stack([documents(400), documents(400, 20), documents(400, 90)])
    q, k, v = (torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    offsets, found = torch.tensor([0, *lengths]).cumsum(0).int(), []
    for kernel in ("blocked", "reference"):
        out = onchip.attention_packed(q, k, v, offsets, mask=masks.Document(ids) & Causal(), kernel=kernel)
        found.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_an_index_past_the_end_is_said(monkeypatch):
    of_few(monkeypatch)
    ids = torch.zeros(299, dtype=torch.int64)
    q = torch.randn(1, 300, 1, 8)
    with pytest.raises(ValueError, match="reads past the end"):
        onchip.attention(q, q, q, mask=lambda b, h, i, j: ids[i] == ids[j], kernel="blocked")


def test_no_key_outside_the_hull_is_asked_for():
    """Not even of a block that lies partly outside; 36 keys before the hull there is nothing."""
    traced, tensors = as_mask(lambda b, h, i, j, ids=torch.zeros(30, dtype=torch.int64): ids[i] == ids[j - 100]).parts()
    (ends,) = bounds(traced, tensors, place(0, 1, 30, 130, CPU)._replace(i=None, j=None), [(slice(0, 30), range(100, 130))])
    assert ends.least.all() and ends.least.shape == (1, 2)


def test_many_blocks_go_some_at_a_time(monkeypatch):
    """A tile at once, and the same is said of it."""
    traced, tensors = (masks.Document(documents(900)) & Causal()).parts()
    at = place(0, 1, 900, 900, CPU)._replace(i=None, j=None)
    ranges = [(slice(start, min(start + 200, 900)), range(start // 2, 900)) for start in range(0, 900, 200)]
    together = list(bounds(traced, tensors, at, ranges))
    monkeypatch.setattr(blocked_bounds, "MOST", 1)
    for one, other in zip(together, bounds(traced, tensors, at, ranges), strict=True):
        assert torch.equal(one.least, other.least) and torch.equal(one.most, other.most)


def test_rectangles():
    """Near each other they are one, as a call costs as much as CALL blocks; one row of blocks alone does not ask for others."""
    wide = [[False] * 40 for _ in range(4)]
    wide[1][2] = wide[1][4] = wide[1][30] = True
    assert rectangles(wide) == [(slice(1, 2), slice(2, 5)), (slice(1, 2), slice(30, 31))]
    assert rectangles([[n // 2 == row for n in range(8)] for row in range(4)]) == [(slice(0, 4), slice(0, 8))]
    assert rectangles([[False] * 3]) == [] and CALL > 4
