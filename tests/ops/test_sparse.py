"""Attention over chosen tokens and pages, Quest's bounds and scores: against float64 over the keys that were chosen, written out."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch
from onchip.cache.paged import PageList, PagePool
from onchip.ops.attend import PagedKV
from onchip.ops.sparse import PageBounds, append_bounds, attend_pages, attend_tokens, page_bounds, page_scores, top_pages

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LENGTHS = (70, 0, 33, 16)
LAYOUTS = ("tokens first", "heads first", "latent")
KERNELS = [
    "reference",
    "blocked",
    pytest.param("triton_decode", marks=pytest.mark.gpu),
]


def cache_of(layout="tokens first", page=16, kv_heads=2, dim=32, dim_v=32, dtype=FP32, device="cpu"):
    """Shuffled pages of which the unused slots hold NaN; the table beyond a sequence is filled with a page that is not there."""
    used = [-(-n // page) for n in LENGTHS]
    order = torch.randperm(sum(used) + 3, dtype=torch.int32)
    k, v = (torch.full((len(order), page, kv_heads, d), torch.nan, dtype=dtype) for d in (dim, dim_v))
    if layout == "heads first":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    table = torch.full((len(used), max(used) + 1), 1 << 20, dtype=torch.int32)
    for row, n, own in zip(table, LENGTHS, order[: sum(used)].split(used), strict=True):
        row[: len(own)] = own
        for at in range(n):
            k[own[at // page], at % page] = torch.randn(kv_heads, dim).to(dtype)
            v[own[at // page], at % page] = torch.randn(kv_heads, dim_v).to(dtype)
    k, v = k.to(device), v.to(device)
    if layout == "latent":
        v = k[..., :dim_v]
    return PagedKV(k, v, table.to(device), torch.tensor(LENGTHS, dtype=torch.int32, device=device))


def by_hand(q, cache, chosen, dtype):
    """Softmax over the chosen tokens, lists [batch][kv_heads] of places: output and LSE."""
    page, group = cache.k.shape[1], q.shape[2] // cache.k.shape[2]
    out, lse = torch.zeros(*q.shape[:-1], cache.v.shape[-1], dtype=dtype), torch.full((len(q), q.shape[2], 1), -torch.inf, dtype=dtype)
    for b, heads in enumerate(chosen):
        for h in range(q.shape[2]):
            at = torch.tensor(heads[h // group], dtype=torch.long)
            if len(at):
                slots = cache.page_table[b].cpu()[at // page].long(), at % page
                k, v = (t.cpu()[slots][:, h // group].to(dtype) for t in (cache.k, cache.v))
                scores = (k @ q[b, 0, h].cpu().to(dtype)) * q.shape[-1] ** -0.5
                out[b, 0, h], lse[b, h, 0] = scores.softmax(0) @ v, scores.logsumexp(0)
    return out, lse


def judge(q, cache, chosen, result):
    for ours, low, truth in zip(result, by_hand(q, cache, chosen, FP32), by_hand(q, cache, chosen, FP64), strict=True):
        assert_as_good_as_torch(ours.cpu(), low, truth, slack=4.0)  # sums in another order: of 40 numbers, that is a factor of 3


def choice(most: int, top: int, heads: int, device):
    """Different numbers, some of them none, some past the end: int32 [batch, heads, top]."""
    rows = [torch.randperm(most + 4)[:top] for _ in range(len(LENGTHS) * heads)]
    picked = torch.stack(rows).view(len(LENGTHS), heads, top)
    return torch.where(torch.rand(picked.shape) < 0.2, -1, picked).to(torch.int32).to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens(kernel, per_head, layout, device):
    heads = 1 if layout == "latent" else 2
    cache = cache_of(layout, kv_heads=heads, dim=48, dim_v=32, device=device)
    q = torch.randn(len(LENGTHS), 1, 4, 48, device=device)
    tokens = choice(70, 40, heads if per_head else 1, device)
    chosen = [[[t for t in row.tolist() if 0 <= t < n] for row in rows.expand(heads, -1)] for rows, n in zip(tokens, LENGTHS, strict=True)]
    judge(q, cache, chosen, attend_tokens(q, cache, tokens if per_head else tokens[:, 0], return_lse=True, kernel=kernel))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_pages(kernel, per_head, layout, device):
    heads = 1 if layout == "latent" else 2
    cache = cache_of(layout, kv_heads=heads, dim=48, dim_v=32, device=device)
    q = torch.randn(len(LENGTHS), 1, 4, 48, device=device)
    pages = choice(5, 6, heads if per_head else 1, device)
    chosen = [
        [[t for p in row.tolist() if p >= 0 for t in range(16 * p, min(n, 16 * p + 16))] for row in rows.expand(heads, -1)]
        for rows, n in zip(pages, LENGTHS, strict=True)
    ]
    judge(q, cache, chosen, attend_pages(q, cache, pages if per_head else pages[:, 0], return_lse=True, kernel=kernel))


def test_all_of_it_is_paged_attention(device):
    """Every token, or every page, in any order: what `paged_attention` gives."""
    cache = cache_of(device=device)
    q = torch.randn(len(LENGTHS), 1, 4, 32, device=device)
    want = onchip.paged_attention(q, cache)
    everything = torch.randperm(80, device=device).to(torch.int32).expand(len(LENGTHS), -1)
    pages = torch.randperm(5, device=device).to(torch.int32).expand(len(LENGTHS), -1)
    torch.testing.assert_close(attend_tokens(q, cache, everything), want)
    torch.testing.assert_close(attend_pages(q, cache, pages), want)


@pytest.mark.parametrize("top", [40, 64, 100])
def test_tokens_of_many_heads_of_a_latent(top):
    """More than 64 heads: the chosen tokens are copied into pages of 64."""
    cache = cache_of("latent", kv_heads=1, dim=48, dim_v=32)
    q = torch.randn(len(LENGTHS), 1, 70, 48)
    tokens = choice(110, top, 1, "cpu")[:, 0]
    with onchip.record() as seen:
        result = attend_tokens(q, cache, tokens, return_lse=True)
    assert seen[0].problem.page == 64 and "latent" in seen[0].problem.extras
    judge(q, cache, [[[t for t in row.tolist() if 0 <= t < n]] for row, n in zip(tokens, LENGTHS, strict=True)], result)


def test_latent_stays_latent():
    """A view of chosen tokens of a latent cache is one, so that its kernels take it."""
    with onchip.record() as seen:
        cache = cache_of("latent", kv_heads=1, dim=48, dim_v=32)
        attend_tokens(torch.randn(len(LENGTHS), 1, 4, 48), cache, choice(70, 8, 1, "cpu"))
    assert "latent" in seen[0].problem.extras and seen[0].problem.page == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": torch.zeros(4, 3, dtype=torch.int64)}, "int32"),
        ({"tokens": torch.zeros(3, 3, dtype=torch.int32)}, "the choice is"),
        ({"tokens": torch.zeros(4, 0, dtype=torch.int32)}, "top at least 1"),
        ({"tokens": [[0, 1]] * 4}, "the choice is a list; give int32"),
        ({"q": torch.zeros(4, 2, 4, 32)}, "one query"),
        ({"q": torch.zeros(4, 1, 3, 32)}, "3 query heads over 2 key heads; give .* a multiple"),
        ({"q": torch.zeros(4, 1, 4, 16)}, "q has head dimension 16, k has 32"),
        ({"q": [1.0]}, "q is a list; give one query"),
    ],
)
@pytest.mark.parametrize("attend", [attend_tokens, attend_pages])
def test_errors(attend, change, words):
    given = {"q": torch.zeros(4, 1, 4, 32), "tokens": torch.zeros(4, 3, dtype=torch.int32)} | change
    with pytest.raises(ValueError, match=words):
        attend(given["q"], cache_of(), given["tokens"])


@pytest.mark.parametrize(("batch", "width"), [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("attend", [attend_tokens, attend_pages])
@pytest.mark.parametrize("sizes", [(2, 4, 32), (1, 128, 576)], ids=["heads", "latent"])  # key heads, heads, dim
def test_no_sequences_and_no_pages(attend, batch, width, sizes):
    kv_heads, heads, dim = sizes
    k, q = torch.full((3, 64, kv_heads, dim), torch.nan), torch.randn(batch, 1, heads, dim)
    cache = PagedKV(k, k[..., :24], torch.zeros(batch, width, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))
    for shape in ((batch, 3), (batch, kv_heads, 3)):
        chosen = torch.zeros(shape, dtype=torch.int32)
        out, lse = attend(q, cache, chosen, return_lse=True)
        assert out.shape == attend(q, cache, chosen).shape == (batch, 1, heads, 24) and lse.shape == (batch, heads, 1)
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("attend", [attend_tokens, attend_pages])
def test_sizes_that_a_compiler_does_not_know(attend):
    cache, q = cache_of(), torch.randn(len(LENGTHS), 1, 4, 32)
    chosen = torch.tensor([[0, 3, -1], [0, 1, 2], [2, 1, 0], [0, -1, -1]], dtype=torch.int32)
    compiled = torch.compile(lambda q, cache, chosen: attend(q, cache, chosen), backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(q, cache, chosen), attend(q, cache, chosen))


def test_mixed_orders_of_memory_are_refused():
    cache = cache_of()
    with pytest.raises(ValueError, match="one order"):
        attend_pages(torch.zeros(4, 1, 4, 32), cache._replace(v=cache_of("heads first").v), torch.zeros(4, 2, 3, dtype=torch.int32))


# ---- Quest


def least_and_largest(cache, b, h, p):
    page = cache.k.shape[1]
    n = min(page, LENGTHS[b] - p * page)
    keys = cache.k[cache.page_table[b, p].long(), :n, h]
    return keys.amin(0), keys.amax(0)


def test_page_bounds():
    cache = cache_of(dtype=BF16)
    bounds = page_bounds(cache)
    for b, n in enumerate(LENGTHS):
        for p in range(-(-n // 16)):
            for h in range(2):
                at = cache.page_table[b, p].long()
                for ours, want in zip(bounds, least_and_largest(cache, b, h, p), strict=True):
                    assert torch.equal(ours[at, h], want)
    assert bounds.low.isinf().all(-1).all(-1).sum() == 3  # pages of nobody


def test_appended_bounds():
    """Tokens in parts, and a page that another sequence had: what `page_bounds` finds."""
    pool = PagePool(1, 6, 16, 2, 32, dtype=FP32, device=torch.device("cpu"))
    bounds = PageBounds(torch.full((6, 2, 32), -9.0), torch.full((6, 2, 32), 9.0))  # of sequences that are gone
    sequence = PageList()
    for tokens in (5, 1, 30, 1, 12):
        slots = pool.append(sequence, tokens)
        keys = torch.randn(tokens, 2, 32)
        pool.k[0].flatten(0, 1)[slots] = keys
        append_bounds(bounds, keys, slots, 16)
    cache = PagedKV(pool.k[0], pool.v[0], pool.table([sequence]), torch.tensor([sequence.length], dtype=torch.int32))
    used = torch.tensor(sequence.pages)
    for ours, want in zip(bounds, page_bounds(cache), strict=True):
        assert torch.equal(ours[used], want[used])
    before = [bound.clone() for bound in bounds]
    append_bounds(bounds, torch.full((2, 2, 32), 50.0), torch.tensor([-1, -1]), 16)  # nowhere
    assert all(torch.equal(ours, was) for ours, was in zip(bounds, before, strict=True))


def test_bounds_of_other_keys():
    bounds = page_bounds(cache_of())
    k = torch.zeros(3, 2, 32)
    for keys, slots in ((k, torch.zeros(2).long()), (k[:, :1], torch.zeros(3).long()), (k, torch.zeros(3).int())):
        with pytest.raises(ValueError, match=r"^append_bounds: k is .*; give \[tokens, 2, 32\], and an int64 slot for each token"):
            append_bounds(bounds, keys, slots, 16)
    before, last = [bound.clone() for bound in bounds], len(bounds.low) * 16 - 1
    with pytest.raises(ValueError, match=f"^append_bounds: slots are -1 to {last + 1}; give 0 to {last}, or -1: nowhere"):
        append_bounds(bounds, k + 99, torch.tensor([0, -1, last + 1]), 16)
    with pytest.raises(ValueError, match=f"^append_bounds: slots are -2 to 1; give 0 to {last}, or -1: nowhere"):
        append_bounds(bounds, k + 99, torch.tensor([0, -2, 1]), 16)
    assert all(torch.equal(ours, was) for ours, was in zip(bounds, before, strict=True))


def test_bounds_of_what_is_no_cache():
    cache, bounds = cache_of(), page_bounds(cache_of())
    for wrong, words in (
        (cache.k, "cache is torch.float32 .*; give PagedKV"),
        (cache._replace(k=cache.k[0]), r"k is torch.float32 \[16, 2, 32\] on cpu; give \[pages, page, kv_heads, dim\]"),
        (cache._replace(k=None), "k is a NoneType; give"),
        (cache._replace(page_table=None), "page_table is a NoneType; give"),
        (cache._replace(lengths=3), "lengths are a int; give int32"),
        (cache._replace(lengths=cache.lengths[:1]), r"lengths are .*; give int32 \[4\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^page_bounds: {words}"):
            page_bounds(wrong)
        for none in (wrong, PageBounds(1, 2)):
            with pytest.raises(TypeError, match=r"^append_bounds: bounds are .*; give what page_bounds makes"):
                append_bounds(none, torch.zeros(1, 2, 32), torch.zeros(1).long(), 16)
    for attend in (attend_tokens, attend_pages):
        for name in "kv":
            with pytest.raises(ValueError, match=r"q, k, v have 4, .* dimensions; each needs 4"):
                attend(torch.zeros(len(LENGTHS), 1, 4, 32), cache._replace(**{name: cache.k[0]}), torch.zeros(len(LENGTHS), 1).int())
    with pytest.raises(ValueError, match=r"^append_bounds: page is 16\.0; give a whole number"):
        append_bounds(bounds, torch.zeros(1, 2, 32), torch.zeros(1).long(), 16.0)


def test_bounds_of_pages_that_there_are_not():
    cache = cache_of()
    wrong = cache._replace(page_table=cache.page_table + len(cache.k))
    sentence = "page_table has pages .*; the cache has 0 to"
    with pytest.raises(ValueError, match=f"^page_bounds: {sentence}"):
        page_bounds(wrong)
    with pytest.raises(ValueError, match=f"^page_scores: {sentence}"):
        page_scores(torch.zeros(len(LENGTHS), 1, 4, 32), page_bounds(cache), wrong.page_table, cache.lengths, 16)


@pytest.mark.parametrize("batch", [0, 2])
def test_bounds_of_no_page(batch):
    table, lengths, k = torch.zeros(batch, 3, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32), torch.zeros(0, 16, 2, 32)
    bounds = page_bounds(PagedKV(k, k, table, lengths))
    assert bounds.low.shape == bounds.high.shape == (0, 2, 32)
    append_bounds(bounds, torch.zeros(2, 2, 32), torch.tensor([-1, -1]), 16)
    scores = page_scores(torch.zeros(batch, 1, 4, 32), bounds, table, lengths, 16)
    assert scores.shape == (batch, 4, 3) and (scores == -torch.inf).all()
    assert (top_pages(scores, 2, 2, lengths, 16) == -1).all()


def test_pages_without_bounds_are_never_chosen():
    q, bounds = torch.zeros(1, 1, 2, 32), PageBounds(torch.full((3, 2, 32), torch.inf), torch.full((3, 2, 32), -torch.inf))
    bounds.low[1], bounds.high[1] = -1.0, 1.0
    scores = page_scores(q, bounds, torch.arange(3, dtype=torch.int32)[None], torch.tensor([48], dtype=torch.int32), 16)
    assert scores[0, 0].tolist() == [-torch.inf, 0.0, -torch.inf]


@pytest.mark.parametrize("kernel", ["reference", pytest.param("triton_page_scores", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kv_heads", "heads", "dim", "dtype"), [(2, 4, 32, FP32), (1, 24, 40, BF16), (2, 2, 128, torch.float16)])
def test_page_scores(kv_heads, heads, dim, dtype, kernel, device):
    cache = cache_of(kv_heads=kv_heads, dim=dim, dim_v=dim, dtype=dtype)
    q, bounds = torch.randn(len(LENGTHS), 1, heads, dim).to(dtype), page_bounds(cache)
    there = PageBounds(*(t.to(device) for t in bounds))
    ours = page_scores(q.to(device), there, cache.page_table.to(device), cache.lengths.to(device), 16, kernel=kernel).cpu()
    want, low = torch.full(ours.shape, -torch.inf, dtype=FP64), torch.full(ours.shape, -torch.inf)
    for b, n in enumerate(LENGTHS):
        for p in range(-(-n // 16)):
            for h in range(heads):
                ends = [bound[cache.page_table[b, p].long(), h // (heads // kv_heads)] for bound in bounds]
                want[b, h, p] = torch.maximum(*(q[b, 0, h].double() * end.double() for end in ends)).sum()
                low[b, h, p] = torch.maximum(*(q[b, 0, h].float() * end.float() for end in ends)).sum()
    cut = want.float() * (1 + 2.0**-21) if dtype != FP32 else low  # tensor cores cut off, not round, what they add: 1.6e-4 of 197 on an H200
    assert_as_good_as_torch(ours, (low, cut), want)
    keys = cache.k[cache.page_table[0, 2].long(), :, 0].double() @ q[0, 0, 0].double()
    assert (keys <= want[0, 0, 2] + 1e-6).all()  # it is a bound


def test_what_page_scores_says_to_what_does_not_belong_together():
    cache = cache_of(kv_heads=2, dim=32, dim_v=32, dtype=FP32)
    good = torch.randn(len(LENGTHS), 1, 4, 32), page_bounds(cache), cache.page_table, cache.lengths, 16
    for place, bad, words in [
        (0, good[0][:, 0], "q is .*, bounds are a PageBounds; give q"),
        (1, tuple(good[1]), "q is .*, bounds are a tuple; give .* what page_bounds makes"),
        (2, cache.page_table[:1], "page_table is torch.int32 .*; give int32"),
        (2, [0], "page_table is a list; give int32"),
        (2, cache.page_table.float(), "page_table is torch.float32 .*; give int32"),
        (3, cache.lengths[:1], r"lengths is torch.int32 \[1\] on cpu; give int32"),
        (4, 0, "page is 0; give a whole number, 1 or more"),
        (4, 2.5, "page is 2.5; give a whole number"),
        (0, None, "q is a NoneType, bounds are a PageBounds; give q"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^page_scores: {words}"):
            page_scores(*good[:place], bad, *good[place + 1 :])


def test_top_pages():
    scores = torch.tensor([[[3.0, 9.0, 5.0, 1.0], [8.0, 2.0, 4.0, 0.0]], [[7.0, 6.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf, -torch.inf]]])
    lengths = torch.tensor([60, 20], dtype=torch.int32)
    found = top_pages(scores, 3, 1, lengths, 16)
    assert sorted(found[0, 0].tolist()) == [0, 1, 3] and sorted(found[1, 0].tolist()) == [-1, 0, 1]
    assert sorted(top_pages(scores, 2, 2, lengths, 16, recent=0)[0, 1].tolist()) == [0, 2]
    assert top_pages(scores, 6, 1, lengths, 16).shape == (2, 1, 6)
    with pytest.raises(ValueError, match="top is 0"):
        top_pages(scores, 0, 1, lengths, 16)
    with pytest.raises(ValueError, match="kv_heads is 0; give a whole number, 1 or more"):
        top_pages(scores, 1, 0, lengths, 16)
    for wrong in ((scores[0], lengths), (scores, lengths[:, None]), (scores, lengths[:1]), (scores, [60, 20]), (scores, lengths.float())):
        with pytest.raises(ValueError, match=r"^top_pages: scores are .*, lengths .*; give \[batch, heads, most pages\] and int32 \[batch\]"):
            top_pages(wrong[0], 1, 1, wrong[1], 16)
    with pytest.raises(ValueError, match=r"^top_pages: top is 2, recent 3, .*; give a top of at least 1, of which recent is a part"):
        top_pages(scores, 2, 1, lengths, 16, recent=3)
    for recent in (-1, 1.5, None):
        with pytest.raises((TypeError, ValueError), match=rf"^top_pages: recent is {recent}; give a whole number, 0 or more"):
            top_pages(scores, 2, 1, lengths, 16, recent=recent)


def test_quest_finds_the_page_that_matters():
    """One key that the query is after, in a page of its own: chosen among 5, and the result is that of all keys."""
    cache = cache_of()
    q = torch.randn(len(LENGTHS), 1, 4, 32)
    page, slot = cache.page_table[0, 2], 3
    cache.k[page, slot] = 40 * q[0, 0].view(2, 2, 32).mean(1)
    scores = page_scores(q, page_bounds(cache), cache.page_table, cache.lengths, 16)
    pages = top_pages(scores, 2, 2, cache.lengths, 16)
    torch.testing.assert_close(attend_pages(q, cache, pages)[0], onchip.paged_attention(q, cache)[0], atol=1e-3, rtol=1e-3)
