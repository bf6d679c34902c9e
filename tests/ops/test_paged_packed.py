"""Packed queries over a paged cache: chunks of prefills and decodes in one call, by every kernel that takes them."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch, poisoned
from onchip.core.masks import Band, Causal, Chunked, Full, Window
from onchip.core.problem import Attention
from onchip.core.scores import ALiBi
from onchip.integrations import flashinfer
from onchip.kernels.attention import DECODE, cost
from onchip.ops.attention import PagedKV

FP32, BF16 = torch.float32, torch.bfloat16
MIXED = ((1, 40), (0, 0), (7, 7), (0, 21), (3, 2), (18, 33), (1, 1), (2, 0))  # (queries, keys) of each sequence: the first tokens of (3, 2) see nothing
KERNELS = [kernel for kernel in DECODE.kernels if kernel.name in ("triton_paged", "blocked", "reference")]
EVERY = [pytest.param(kernel.name, marks=[pytest.mark.gpu] * kernel.needs_triton) for kernel in KERNELS]
BANDS = (Causal(), Full(), Window(9), Causal("top_left"))

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice")  # numpy's, of the interpreter


def paged(sequences, page, kv_heads, dim, dtype, device, dim_v=0) -> PagedKV:
    """Sequences on shuffled pages of a pool; all that is not theirs holds NaN, and spare entries of the table name no page."""
    used = [-(-keys // page) for _, keys in sequences]
    pages = torch.randperm(sum(used) + 2)
    k, v = (poisoned((len(pages), page, kv_heads, d), dtype, device) for d in (dim, dim_v or dim))
    table = torch.full((len(sequences), max(used) + 1), 1 << 30, dtype=torch.int32)
    for b, (own, (_, keys)) in enumerate(zip(pages[: sum(used)].split(used), sequences, strict=True)):
        table[b, : len(own)] = own
        slots = (own[:, None] * page + torch.arange(page)).flatten()[:keys].to(device)
        for pool in (k, v):
            pool.flatten(0, 1)[slots] = torch.randn(keys, kv_heads, pool.shape[-1], device=device).to(dtype)
    return PagedKV(k, v, table.to(device), torch.tensor([keys for _, keys in sequences], dtype=torch.int32, device=device))


def packed(sequences, heads, dim, dtype, device):
    """Queries and their offsets."""
    counts = [queries for queries, _ in sequences]
    offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return torch.randn(sum(counts), heads, dim, device=device).to(dtype), offsets


def one_by_one(q, offsets, cache, **how):
    """Each sequence's queries in a call of their own, by the plain formula."""
    outs, lses = [], []
    for b, (start, stop) in enumerate(torch.stack([offsets[:-1], offsets[1:]], 1).tolist()):
        same = q[None, start:stop].expand(len(cache.lengths), -1, -1, -1)  # so that it keeps its number
        out, lse = onchip.paged_attention(same, cache, kernel="reference", return_lse=True, **how)
        outs.append(out[b])
        lses.append(lse[b])
    return torch.cat(outs), torch.cat(lses, 1)


def torchs_lse(q, offsets, cache, mask=Causal(), sinks=None, **how):
    """Of torch's own kernel, in the same dtype, where it computes such a call."""
    if not q.is_cpu or how or not isinstance(mask, Band) or cache.k.shape != cache.v.shape:
        return ()
    page, parts = cache.k.shape[1], []
    for b, (start, stop) in enumerate(torch.stack([offsets[:-1], offsets[1:]], 1).tolist()):
        keys, rows = int(cache.lengths[b]), stop - start
        k, v = (pool[cache.page_table[b, : -(-keys // page)]].flatten(0, 1)[:keys].transpose(0, 1) for pool in (cache.k, cache.v))
        k, v = (t.repeat_interleave(q.shape[1] // len(t), 0)[None] for t in (k, v))
        seen = mask.dense(torch.arange(rows)[:, None] + mask.shift(rows, keys), torch.arange(keys))
        lse = torch.full((q.shape[1], rows), -torch.inf)
        if rows and keys:
            bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)[None, None]
            _, found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[start:stop].transpose(0, 1)[None], k, v, attn_mask=bias)
            lse = found[0].masked_fill(~seen.any(1), -torch.inf)
        parts.append(lse if sinks is None else torch.logaddexp(lse, sinks[:, None]))
    return (torch.cat(parts, 1),)


def check(q, offsets, cache, kernel, longest=None, **how):
    wide = [t.double() for t in (q, cache.k, cache.v)]
    truth, truth_lse = one_by_one(wide[0], offsets, cache._replace(k=wide[1], v=wide[2]), **how)
    low, low_lse = one_by_one(q, offsets, cache, **how)
    out, lse = onchip.paged_attention(q, cache, q_offsets=offsets, longest=longest, kernel=kernel, return_lse=True, **how)
    assert out.shape == truth.shape and out.dtype == q.dtype and lse.shape == truth_lse.shape and lse.dtype == FP32
    assert_as_good_as_torch(out, low, truth)
    assert_as_good_as_torch(lse, (low_lse, *torchs_lse(q, offsets, cache, **how)), truth_lse)
    alone = onchip.paged_attention(q, cache, q_offsets=offsets, longest=longest, kernel=kernel, **how)
    assert_as_good_as_torch(alone, low, truth)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize(("page", "mask", "dtype"), [(page, BANDS[n % 4], (FP32, BF16)[n // 4]) for n, page in enumerate((1, 3, 16, 3, 16, 1, 64, 16))])
def test_a_mixed_batch(kernel, page, mask, dtype, device):
    q, offsets = packed(MIXED, 4, 16, dtype, device)
    check(q, offsets, paged(MIXED, page, 2, 16, dtype, device), kernel, mask=mask)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize(
    ("len_q", "page", "dims", "mask", "dtype"),
    [(20, 12, (40, 24), Causal(), FP32), (33, 5, (16, 16), Window(9), BF16), (3, 1, (8, 8), Chunked(8), FP32), (17, 64, (64, 64), Window(3, 4), FP32)],
    ids=str,
)
def test_as_many_queries_of_each(kernel, len_q, page, dims, mask, dtype, device):
    """Without offsets; and so offsets that say the same change nothing."""
    sequences = [(len_q, keys) for keys in (41, 0, len_q, 1)]
    q, offsets = packed(sequences, 4, dims[0], dtype, device)
    cache = paged(sequences, page, 2, dims[0], dtype, device, dims[1])
    check(q, offsets, cache, kernel, mask=mask, sinks=torch.randn(4, device=device))
    out, lse = onchip.paged_attention(q.unflatten(0, (4, len_q)), cache, mask=mask, return_lse=True, kernel=kernel)
    expected = onchip.paged_attention(q, cache, q_offsets=offsets, mask=mask, return_lse=True, kernel=kernel)
    torch.testing.assert_close((out.flatten(0, 1), lse.transpose(0, 1).flatten(1)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", EVERY)
def test_what_counts_does_so_from_the_start_of_a_sequence(kernel, device):
    """Masks that are functions, scores, sinks; values of another width; an upper bound of the queries."""
    q, offsets = packed(MIXED, 4, 24, FP32, device)
    cache = paged(MIXED, 4, 2, 24, FP32, device, dim_v=16)
    table = torch.randn(len(MIXED), 4, device=device)
    how = {"score": [ALiBi(torch.rand(4, device=device)), lambda s, b, h, i, j: s + table[b, h] * (j - i)], "sinks": torch.randn(4, device=device)}
    check(q, offsets, cache, kernel, mask=Chunked(8), longest=50, **how)
    check(q, offsets, cache, kernel, mask=lambda b, h, i, j: (i + j + b) % 3 > 0, softcap=2.0)


@pytest.mark.parametrize("kernel", EVERY)
def test_tokens_of_no_sequence_change_nothing(kernel, device):
    """Room for more queries than there are, behind them: what a CUDA graph is captured with. And tokens before the first sequence."""
    q, offsets = packed(MIXED, 2, 16, FP32, device)
    cache = paged(MIXED, 4, 1, 16, FP32, device)
    out, lse = onchip.paged_attention(q, cache, q_offsets=offsets, longest=18, kernel=kernel, return_lse=True)
    room = torch.cat([q, torch.full_like(q, torch.nan)])
    more, more_lse = onchip.paged_attention(room, cache, q_offsets=offsets, longest=18, kernel=kernel, return_lse=True)
    torch.testing.assert_close((more[: len(q)], more_lse[:, : len(q)]), (out, lse))
    room = torch.cat([torch.full_like(q[:3], torch.nan), q])
    more, more_lse = onchip.paged_attention(room, cache, q_offsets=offsets + 3, longest=18, kernel=kernel, return_lse=True)
    torch.testing.assert_close((more[3:], more_lse[:, 3:]), (out, lse))


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("sequences", [((0, 5), (0, 0)), ((0, 9),)], ids=str)
def test_no_queries_at_all(kernel, sequences, device):
    q, offsets = packed(sequences, 2, 16, FP32, device)
    out, lse = onchip.paged_attention(q, paged(sequences, 4, 1, 16, FP32, device), q_offsets=offsets, longest=0, kernel=kernel, return_lse=True)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("mask", [Causal(), Window(20)], ids=str)
def test_chunks_of_a_prefill_equal_the_prefill_at_once(kernel, mask, device):
    lengths, step = (45, 16, 7), 16
    whole = [(n, n) for n in lengths]
    q, offsets = packed(whole, 4, 16, FP32, device)
    cache = paged(whole, 8, 2, 16, FP32, device)
    k, v = (torch.cat([pool[cache.page_table[b, : -(-n // 8)]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]) for pool in (cache.k, cache.v))
    expected = onchip.attention_packed(q, k, v, offsets, mask=mask, kernel="blocked" if kernel != "reference" else kernel)
    parts = [[] for _ in lengths]
    for start in range(0, max(lengths), step):
        now = [max(0, min(n - start, step)) for n in lengths]
        chunk = torch.cat([q[offsets[b] + start : offsets[b] + start + n] for b, n in enumerate(now)])
        known = torch.tensor([min(n, start + step) for n in lengths], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *now], device=device).cumsum(0).int()
        out = onchip.paged_attention(chunk, cache._replace(lengths=known), q_offsets=starts, longest=step, mask=mask, kernel=kernel)
        for part, found in zip(parts, out.split(now), strict=True):
            part.append(found)
    torch.testing.assert_close(torch.cat([torch.cat(part) for part in parts]), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", EVERY)
def test_neighbours_leave_no_trace_where_that_is_asked_for(kernel, device):
    q, offsets = packed(MIXED, 4, 16, BF16, device)
    cache = paged(MIXED, 16, 2, 16, BF16, device)
    together = onchip.paged_attention(q, cache, q_offsets=offsets, batch_invariant=True, kernel=kernel)
    for b, (start, stop) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        alone = cache._replace(page_table=cache.page_table[b : b + 1], lengths=cache.lengths[b : b + 1])
        some = offsets[b : b + 2] - offsets[b]
        assert torch.equal(onchip.paged_attention(q[start:stop], alone, q_offsets=some, batch_invariant=True, kernel=kernel), together[start:stop])


def test_gradients():
    """By the plain formula, whatever kernel ran forward; queries without keys get none."""
    q, offsets = packed(MIXED, 4, 16, FP32, "cpu")
    cache = paged(MIXED, 4, 2, 16, FP32, "cpu")
    cache = cache._replace(k=cache.k.nan_to_num(0.0).requires_grad_(), v=cache.v.nan_to_num(0.0).requires_grad_())
    leaves = (q.requires_grad_(), cache.k, cache.v)
    for kernel in ("auto", "reference"):
        out, lse = onchip.paged_attention(q, cache, q_offsets=offsets, kernel=kernel, return_lse=True)
        ours = torch.autograd.grad([out.sin().sum(), lse.masked_fill(lse.isinf(), 0.0).sum()], leaves)
        out, lse = one_by_one(q, offsets, cache)
        torch.testing.assert_close(ours, torch.autograd.grad([out.sin().sum(), lse.masked_fill(lse.isinf(), 0.0).sum()], leaves))


def test_a_call_is_a_problem():
    q, offsets = packed(MIXED, 4, 16, FP32, "cpu")
    cache = paged(MIXED, 4, 2, 16, FP32, "cpu")
    for longest, counted in ((None, 18), (64, 64)):
        with onchip.record() as decisions:
            onchip.paged_attention(q, cache, q_offsets=offsets, longest=longest)
        problem = decisions[0].problem
        assert problem == Attention("decode", 8, counted, 44, 4, 2, 16, FP32, Causal(), "paged", 4, tokens=32)
        assert str(problem) == f"decode B8 q{counted} k44 h4/2 d16 fp32 Causal packed 32 tokens page 4"


def test_what_counts_as_cost():
    """Queries that there are, not the longest times the batch; keys once."""
    dense = Attention("decode", 4, 8, 64, 4, 2, 16, FP32, Causal(), "paged", 16)
    assert cost(dense._replace(tokens=32)) == cost(dense)
    assert cost(dense._replace(len_q=29, tokens=32)) == cost(dense)  # three decodes and a chunk
    assert cost(dense._replace(tokens=16)).flops < cost(dense).flops


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_offsets": None}, r"q is \[32, 4, 16\] without q_offsets; give \[batch, len_q, heads, dim\] without q_offsets, \[tokens, heads, dim\] with them"),
        ({"q": torch.zeros(2, 3, 4, 16)}, r"q is \[2, 3, 4, 16\] with q_offsets; give"),
        ({"q": torch.zeros(2, 3, 4, 16), "q_offsets": None, "longest": 3}, "longest is 3 without q_offsets; give q_offsets for packed"),
        ({"q_offsets": torch.zeros(9)}, r"q_offsets are torch.float32 \[9\] on cpu; give int32 \[batch \+ 1\], of one sequence or more, on cpu"),
        ({"q_offsets": torch.zeros(1, dtype=torch.int32)}, r"q_offsets are torch.int32 \[1\] on cpu"),
        ({"q_offsets": torch.zeros(9, dtype=torch.int32, device="meta")}, r"q_offsets are torch.int32 \[9\] on meta"),
        ({"q_offsets": torch.zeros(3, dtype=torch.int32)}, r"page_table is torch.int32 \[8, 11\] on cpu; give int32 \[2, most pages\] on cpu"),
        ({"q_offsets": [0, 1]}, r"q_offsets are a list; give int32 \[batch \+ 1\], of one sequence or more, on cpu"),
        ({"longest": 3}, r"longest is 3, and a sequence has 18 tokens; give the most of any, or more"),
        ({"longest": -1}, "longest is -1; give the most queries of a sequence, or None to have it read from q_offsets"),
    ],
)
def test_arguments_that_disagree(change, words):
    q, offsets = packed(MIXED, 4, 16, FP32, "cpu")
    given = {"q": q, "q_offsets": offsets} | change
    with pytest.raises(ValueError, match=f"^paged_attention: {words}"):
        onchip.paged_attention(given.pop("q"), paged(MIXED, 4, 2, 16, FP32, "cpu"), **given)


@pytest.mark.parametrize("page", [1, 256])
def test_a_hundred_thousand_keys(page):
    """131,072 keys and one, beside a sequence of one key, against the formula in float64."""
    sequences = ((2, 131_073), (1, 1))
    (q, offsets), cache = packed(sequences, 2, 16, FP32, "cpu"), paged(sequences, page, 1, 16, FP32, "cpu")
    out = onchip.paged_attention(q, cache, q_offsets=offsets)
    own = cache.page_table[0, : -(-131_073 // page)].long()
    k, v = (pool[own].flatten(0, 1)[:131_073, 0] for pool in (cache.k, cache.v))
    hidden = torch.tensor([True, False])[:, None, None] & (torch.arange(131_073) == 131_072)  # the last key, from the query before the last

    def formula(dtype):
        scores = torch.einsum("qhd,kd->qhk", q[:2].to(dtype), k.to(dtype)) / 4
        return torch.einsum("qhk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.to(dtype))

    torchs = torch.nn.functional.scaled_dot_product_attention(q[:2].transpose(0, 1), k[None].expand(2, -1, -1), v[None].expand(2, -1, -1), ~hidden[None, :, 0])
    assert_as_good_as_torch(out[:2], (formula(FP32), torchs.transpose(0, 1)), formula(torch.float64))
    assert torch.equal(out[2], cache.v[cache.page_table[1, 0], 0].expand(2, 16))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("form", [None, "e4m3", "int8", "int4/32"])
def test_nothing_waits_for_the_device(form, device):
    """A decode, a mixed batch and FlashInfer's `run`: nothing reads what a tensor on the GPU holds."""
    sequences = ((1, 300), (1, 40), (1, 0), (1, 129))
    (q, _), cache = packed(sequences, 8, 128, BF16, device), paged(sequences, 16, 2, 128, BF16, device)
    (more, places), mixed = packed(((40, 300), *sequences[1:]), 8, 128, BF16, device), cache
    codes = cache if form is None else onchip.quantise_cache(PagedKV(cache.k.nan_to_num(), cache.v.nan_to_num(), *cache[2:]), form)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, device=device))
    ends = torch.tensor([0, 19, 22, 22, 31], dtype=torch.int32)
    wrapper.plan(ends, cache.page_table[:, :19].flatten()[:31] % len(cache.k), torch.tensor([12, 8, 0, 1]), 8, 2, 128, 16, q_data_type=BF16)

    def everything():
        found = [onchip.paged_attention(q[:, None], codes), *onchip.paged_attention(q[:, None], codes, mask=Window(60), return_lse=True)]
        found += [onchip.paged_attention(q[:, None], codes, batch_invariant=True)]
        if form is None:
            found += [onchip.paged_attention(more, mixed, q_offsets=places, longest=40), wrapper.run(q, (cache.k, cache.v))]
        return found

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(t) for t in again)
