"""FlashInfer's functions, judged by the formula in float64. `peers.py` runs FlashInfer's own tests."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad

from onchip.core.kernel import Unsupported
from onchip.core.scores import ALiBi
from onchip.integrations import flashinfer as fi

INF = torch.inf
PAGE = 4
LENGTHS = (5, 1, 9, 3), (7, 1, 3, 12)  # queries and keys of four sequences, once more queries than keys
HOW = [
    {},
    {"causal": True},
    {"window_left": 3},
    {"causal": True, "window_left": 2, "logits_soft_cap": 5.0},
    {"pos_encoding_mode": "ALIBI", "causal": True, "sm_scale": 0.3},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 100.0, "rope_scale": 2.0},
    {"pos_encoding_mode": "ROPE_LLAMA", "causal": True, "window_left": 4},
]


def rotated(x, first, theta=1e4, scale=1.0):
    """Llama's rotation in float64 of x [len, heads, dim] from position `first` on."""
    half = x.shape[-1] // 2
    angles = (torch.arange(len(x)) + first)[:, None].double() / scale * theta ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.double().split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def formula(
    q,
    k,
    v,
    *,
    causal=False,
    window_left=-1,
    logits_soft_cap=0.0,
    pos_encoding_mode="NONE",
    sm_scale=None,
    rope_theta=1e4,
    rope_scale=1.0,
    mask=None,
    sinks=None,
):
    """(output, LSE in base 2 [len_q, heads]) in float64 of q [len_q, heads, dim], k and v [len_k, kv_heads, dim]; a sink takes from the output alone."""
    q, k, v = (t.double().cpu() for t in (q, k, v))
    if pos_encoding_mode == "ROPE_LLAMA":
        q, k = rotated(q, len(k) - len(q), rope_theta, rope_scale), rotated(k, 0, rope_theta, rope_scale)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (sm_scale or q.shape[-1] ** -0.5)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    row = i + len(k) - len(q)
    if pos_encoding_mode == "ALIBI":
        scores = scores + ALiBi.slopes_of(q.shape[1]).double()[:, None, None] * (j - i)
    if logits_soft_cap:
        scores = logits_soft_cap * (scores / logits_soft_cap).tanh()
    seen = (j <= row) if causal and mask is None else torch.ones(len(q), len(k), dtype=torch.bool)
    seen = seen if mask is None else mask.cpu()
    if window_left >= 0:
        seen = seen & (j >= row - window_left)
    scores = scores.masked_fill(~seen, -INF)
    lse = scores.logsumexp(-1)
    below = lse if sinks is None else torch.logaddexp(lse, sinks.double().cpu()[:, None])
    weights = (scores - below.masked_fill(below == -INF, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / math.log(2)


def close(ours, truth, tolerance=3e-5):
    torch.testing.assert_close(ours.double().cpu(), truth.double(), atol=tolerance, rtol=tolerance)


def indptr(lengths, device):
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device)


class Batch:
    """Random sequences, and their keys in shuffled pages of which the unused slots hold NaN."""

    def __init__(self, device, lens_q, lens_k, heads=(4, 2), dim=16, page=PAGE, layout="NHD", dtype=torch.float32, paired=False):
        self.lens_q, self.lens_k, self.heads, self.dim, self.page, self.layout = lens_q, lens_k, heads, dim, page, layout
        self.q = torch.randn(sum(lens_q), heads[0], dim, device=device).to(dtype)
        self.k, self.v = (torch.randn(sum(lens_k), heads[1], dim, device=device).to(dtype) for _ in range(2))
        pages = [-(-n // page) for n in lens_k]
        order = torch.randperm(sum(pages) + 3)[: sum(pages)].int()
        pool = torch.full((sum(pages) + 3, 2, page, heads[1], dim), torch.nan, device=device)
        lists = order.split(pages)
        for x, which in ((self.k, 0), (self.v, 1)):
            for part, own in zip(x.split(lens_k), lists, strict=True):
                for n, token in enumerate(part):
                    pool[own[n // page].long(), which, n % page] = token.float()
        pool = pool.to(dtype)
        pool = pool.transpose(2, 3).contiguous() if layout == "HND" else pool
        self.cache = tuple(t.contiguous() for t in pool.unbind(1)) if paired else pool
        self.q_indptr, self.kv_indptr = indptr(lens_q, device), indptr(lens_k, device)
        self.pages, self.indices = indptr(pages, device), order.to(device)
        self.last = torch.tensor([n - (p - 1) * page if p else 0 for n, p in zip(lens_k, pages, strict=True)], dtype=torch.int32, device=device)

    def truth(self, q=None, masks=None, sinks=None, **how):
        q = (self.q if q is None else q).split(self.lens_q)
        masks = masks or [None] * len(q)
        parts = zip(q, self.k.split(self.lens_k), self.v.split(self.lens_k), masks, strict=True)
        return [torch.cat(x) for x in zip(*(formula(*qkv, mask=mask, sinks=sinks, **how) for *qkv, mask in parts), strict=True)]

    def paged(self, wrapper=None, **how):
        wrapper = wrapper or fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8, device=self.q.device), self.layout)
        wrapper.plan(self.q_indptr, self.pages, self.indices, self.last, *self.heads, self.dim, self.page, q_data_type=self.q.dtype, **how)
        return wrapper

    def decode(self, wrapper=None, **how):
        wrapper = wrapper or fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, device=self.q.device), self.layout)
        wrapper.plan(self.pages, self.indices, self.last, *self.heads, self.dim, self.page, q_data_type=self.q.dtype, **how)
        return wrapper

    def ragged(self, **how):
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8, device=self.q.device))
        wrapper.plan(self.q_indptr, self.kv_indptr, *self.heads, self.dim, q_data_type=self.q.dtype, **how)
        return wrapper


# ---- one sequence


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_single(device, how, layout):
    q, k, v = torch.randn(6, 4, 16, device=device), torch.randn(11, 2, 16, device=device), torch.randn(11, 2, 16, device=device)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = fi.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, **how)
    for ours, truth in zip((out, lse), formula(q, k, v, **how), strict=True):
        close(ours, truth)
    close(fi.single_prefill_with_kv_cache_return_lse(q, *given, kv_layout=layout, **how)[1], lse)
    decode = {name: value for name, value in how.items() if name != "causal"}
    out, lse = fi.single_decode_with_kv_cache(q[0], *given, kv_layout=layout, return_lse=True, q_scale=0.5, k_scale=1.5, v_scale=2.0, **decode)
    scale = decode.pop("sm_scale", 0.25) * 0.75
    truth, truth_lse = formula(q[:1], k, v, sm_scale=scale, **decode)
    close(out, 2 * truth[0])
    close(lse, truth_lse[0])


def test_single_with_a_custom_mask(device):
    q, k, v = torch.randn(6, 4, 16, device=device), torch.randn(11, 2, 16, device=device), torch.randn(11, 2, 16, device=device)
    mask = torch.rand(6, 11, device=device) > 0.5
    mask[3] = False
    for how in ({}, {"window_left": 4}, {"causal": True}):  # causal counts for nothing beside it
        truth, truth_lse = formula(q, k, v, mask=mask, **how)
        out, lse = fi.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, return_lse=True, **how)
        packed = fi.packbits(mask.view(-1), bitorder="little")
        again = fi.single_prefill_with_kv_cache(q, k, v, packed_custom_mask=packed, **how)
        close(out, truth)
        close(lse, truth_lse)
        assert torch.equal(out, again) and (out[3] == 0).all() and (lse[3] == -INF).all()
        for given in (mask.view(-1), mask.T.contiguous().T):  # flat, as FlashInfer takes it, and in another order of memory
            assert torch.equal(fi.single_prefill_with_kv_cache(q, k, v, custom_mask=given, **how), out)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(device, dtype):
    batch = Batch(device, *LENGTHS, dtype=dtype)
    factors = [torch.rand(n, device=device) + 0.5 for n in (4, 2, 2)]
    q, k, v = (x.float() * (f[:, None]) for x, f in zip((batch.q, batch.k, batch.v), factors, strict=True))
    wide = Batch(device, *LENGTHS)
    wide.q, wide.k, wide.v = q, k, v
    truth, _ = wide.truth(causal=True)
    ours = batch.ragged(causal=True, o_data_type=torch.float16).run(batch.q, batch.k, batch.v, *factors)
    assert ours.dtype == torch.float16
    close(ours, truth, 4e-3)
    paged = batch.paged(causal=True, o_data_type="float16").run(batch.q, batch.cache, *factors)
    assert torch.equal(ours, paged)
    one = fi.single_prefill_with_kv_cache(batch.q[:5], batch.k[:7], batch.v[:7], *factors, o_dtype=torch.float16, causal=True)
    close(one, truth[:5], 4e-3)
    # keys alone in float8, with numbers as scales
    half = torch.randn(4, 4, 16, device=device, dtype=torch.bfloat16)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, device=device))
    decode.plan(batch.pages, batch.indices, batch.last, 4, 2, 16, PAGE, q_data_type=half.dtype, kv_data_type=dtype)
    ours = decode.run(half, batch.cache, k_scale=0.5, v_scale=torch.tensor(3.0, device=device))
    wide.lens_q, wide.q, wide.k, wide.v = (1,) * 4, half, batch.k.float() * 0.5, batch.v.float() * 3
    close(ours, wide.truth()[0], 3e-2)


# ---- batches


@pytest.mark.parametrize("layout, paired, page", [("NHD", False, 4), ("HND", False, 4), ("NHD", True, 5), ("HND", True, 1), ("HND", False, 3)])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_paged_prefill(device, how, layout, paired, page):
    batch = Batch(device, *LENGTHS, page=page, layout=layout, paired=paired)
    wrapper = batch.paged(**how)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    for ours, truth in zip((out, lse), batch.truth(**how), strict=True):
        close(ours, truth)
    mine, my_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    assert wrapper.run(batch.q, batch.cache, out=mine, lse=my_lse) is mine
    assert torch.equal(mine, out) and torch.equal(my_lse, lse)
    again = wrapper.forward(batch.q, batch.cache, k_scale=2.0, v_scale=0.5, **how)
    close(again, 0.5 * batch.truth(**{**how, "sm_scale": 2 * how.get("sm_scale", 0.25)})[0])


@pytest.mark.parametrize("how", HOW, ids=str)
def test_ragged_prefill(device, how):
    batch = Batch(device, *LENGTHS)
    wrapper = batch.ragged(**how)
    out, lse = wrapper.run_return_lse(batch.q, batch.k, batch.v, v_scale=2.0)
    truth, truth_lse = batch.truth(**how)
    close(out, 2 * truth)
    close(lse, truth_lse)
    close(wrapper.forward(batch.q, batch.k, batch.v, **how), truth)


def test_custom_masks_of_batches(device):
    batch = Batch(device, *LENGTHS)
    masks = [torch.rand(a, b, device=device) > 0.4 for a, b in zip(*LENGTHS, strict=True)]
    flat = torch.cat([mask.view(-1) for mask in masks])
    sizes = indptr([mask.numel() for mask in masks], device)
    packed, first = fi.segment_packbits(flat, sizes, bitorder="little")
    assert first.tolist() == indptr([-(-mask.numel() // 8) for mask in masks], device).tolist()
    for how in ({}, {"window_left": 3, "logits_soft_cap": 4.0}):
        truth, truth_lse = batch.truth(masks=masks, **how)
        for given in ({"custom_mask": flat}, {"packed_custom_mask": packed}):
            out, lse = batch.paged(**how, **given, causal=True).run(batch.q, batch.cache, return_lse=True)
            close(out, truth)
            close(lse, truth_lse)
            close(batch.ragged(**how, **given).run(batch.q, batch.k, batch.v), truth)
    close(batch.paged(batch.paged(custom_mask=flat)).run(batch.q, batch.cache), batch.truth()[0])  # a plan forgets the one before


def test_items_after_a_shared_prefix(device):
    """Multi-item scoring: two items of 3 tokens after a prefix of 4, with a delimiter before each and at the end."""
    batch = Batch(device, (13, 13), (13, 13))
    position = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], device=device)
    row, col = torch.arange(13)[:, None], torch.arange(13)
    item = torch.tensor([-1] * 4 + [0] * 4 + [1] * 4 + [2])
    seen = (col <= row) & ((col < 4) | (item[:, None] == item) & (torch.cat((torch.ones(4), position.cpu()))[:, None] > row - col))
    how = {
        "prefix_len_ptr": torch.tensor([4, 4], device=device),
        "token_pos_in_items_ptr": position.repeat(2)[:-1].to(torch.uint16),  # without the last delimiter
        "token_pos_in_items_len": 9,
    }
    out = batch.paged(causal=True, **how).run(batch.q, batch.cache)
    close(out, batch.truth(masks=[seen] * 2)[0])


def test_items_of_a_graph_stay_where_they_are():
    """Their addresses are all that a graph knows."""
    batch = Batch("cpu", (13, 13), (13, 13))
    sizes = {"qo_indptr_buf": 3, "paged_kv_indptr_buf": 3, "paged_kv_indices_buf": 64, "paged_kv_last_page_len_buf": 2}
    buffers = {name: torch.zeros(n, dtype=torch.int32) for name, n in sizes.items()}
    wrapper, seen = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8), use_cuda_graph=True, **buffers), []
    for prefix, width in ((4, 9), (5, 9), (5, 8)):
        how = {"prefix_len_ptr": torch.tensor([prefix] * 2), "token_pos_in_items_ptr": torch.arange(2 * width) % width, "token_pos_in_items_len": width}
        if width == 8:
            with pytest.raises(ValueError, match=r"8 places in an item for each of 2 sequences .* first plan had \[2, 9\]; give as many"):
                batch.paged(wrapper, causal=True, **how)
            break
        batch.paged(wrapper, causal=True, **how)
        seen.append((wrapper._item.prefix, wrapper._item.position))
    assert seen[0][0] is seen[1][0] and seen[0][1] is seen[1][1] and seen[0][0].tolist() == [5, 5]


@pytest.mark.parametrize("kind", ["paged", "ragged"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token_pos_in_items_ptr": None}, r"token_pos_in_items_ptr a NoneType; give the lengths of the prefixes, \[2\], and the later tokens' places"),
        ({"prefix_len_ptr": None}, r"prefix_len_ptr is a NoneType, token_pos_in_items_ptr torch.int64 \[18\]"),
        ({"prefix_len_ptr": torch.tensor([4])}, r"prefix_len_ptr is torch.int64 \[1\] on cpu"),
        ({"token_pos_in_items_len": 1.5}, "token_pos_in_items_len is 1.5; give a whole number, 0 or more"),
        ({"token_pos_in_items_ptr": torch.zeros(8).int()}, "8 places in token_pos_in_items_ptr for 2 sequences of 9 each; give 9 for all but the last one"),
        ({"token_pos_in_items_ptr": torch.zeros(16).int()}, "sequence 1 has 9 keys past its prefix and 7 places in token_pos_in_items_ptr"),
        ({"prefix_len_ptr": torch.tensor([3, 4])}, "sequence 0 has 10 keys past its prefix and 9 places"),
    ],
)
def test_items_by_halves(kind, wrong, words):
    batch = Batch("cpu", (13, 13), (13, 13))
    how = {"prefix_len_ptr": torch.tensor([4, 4]), "token_pos_in_items_ptr": torch.tensor([0, 1, 2] * 6), "token_pos_in_items_len": 9}
    getattr(batch, kind)(causal=True, **how)
    with pytest.raises(ValueError, match=f"KVCacheWrapper.plan: .*{words}"):
        getattr(batch, kind)(causal=True, **how | wrong)


@pytest.mark.parametrize("layout, page", [("NHD", 4), ("HND", 1), ("NHD", 6)])
@pytest.mark.parametrize("how", [how for how in HOW if "causal" not in how or how["causal"]], ids=str)
def test_decode(device, how, layout, page):
    how = {name: value for name, value in how.items() if name != "causal"}
    batch = Batch(device, (1,) * 5, (7, 1, 0, 12, 30), page=page, layout=layout)
    wrapper = batch.decode(**how)
    out, lse = wrapper.run(batch.q, batch.cache, return_lse=True)
    truth, truth_lse = batch.truth(**how)
    close(out, truth)
    close(lse, truth_lse)
    assert (out[2] == 0).all() and (lse[2] == -INF).all()
    close(wrapper.forward_return_lse(batch.q, batch.cache, q_scale=2.0, **how)[1], batch.truth(**{**how, "sm_scale": 2 * how.get("sm_scale", 0.25)})[1])


def test_several_queries_a_sequence_are_its_last_ones(device):
    batch = Batch(device, (3,) * 3, (7, 3, 12))
    close(batch.decode(q_len_per_req=3).run(batch.q, batch.cache), batch.truth(causal=True)[0])
    with pytest.raises(ValueError, match="kv_len >= q_len_per_req"):
        batch.decode(q_len_per_req=4)


def test_sinks_take_from_the_output_alone(device):
    batch, sinks = Batch(device, (1,) * 3, (7, 0, 12)), torch.randn(4, device=device)
    truth, truth_lse = batch.truth(sinks=sinks)
    close(batch.decode().run(batch.q, batch.cache, sinks=sinks), truth)
    out, lse = batch.paged().run(batch.q, batch.cache, sinks=sinks, return_lse=True)
    close(out, truth)
    close(lse, truth_lse)
    wrapper = batch.paged(fi.BatchAttentionWithAttentionSinkWrapper(torch.empty(8, device=device)))
    planned = wrapper.run(batch.q, batch.cache, sinks)
    close(wrapper.run(batch.q, batch.cache, sinks, 0.5), batch.truth(sinks=sinks, sm_scale=0.5)[0])
    assert torch.equal(wrapper.run(batch.q, batch.cache, sinks), planned)  # a scale of one call stays in it


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_second_plan_keeps_to_the_memory_of_the_first(device, kind):
    """What a CUDA graph needs: tables, lengths and offsets at their addresses, whatever is planned."""
    first, second = (Batch(device, (1,) * 3, lens) for lens in ((2, 1, 3), (9, 0, 30)))
    ints = lambda n: torch.zeros(n, dtype=torch.int32, device=device)  # noqa: E731
    work, buffers = torch.empty(8, device=device), (ints(4), ints(20), ints(3))
    if kind == "decode":
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(work, *buffers)
        plan = Batch.decode
    else:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", True, ints(4), *buffers)
        plan = Batch.paged
    where = []
    for batch in (first, second, first):
        plan(batch, wrapper)
        close(wrapper.run(batch.q, batch.cache), batch.truth()[0])
        where.append((wrapper._pages.table.data_ptr(), wrapper._pages.lengths.data_ptr(), wrapper._pages.table.shape))
    assert len(set(where)) == 1 and buffers[0].tolist() == first.pages.tolist() and wrapper.is_cuda_graph_enabled
    with pytest.raises(ValueError, match="CUDA graphs"):
        plan(Batch(device, (1,) * 4, (1,) * 4), wrapper)
    with pytest.raises(ValueError, match="qo_indptr_buf"):
        fi.BatchPrefillWithPagedKVCacheWrapper(work, use_cuda_graph=True)


def test_fast_decode_plan_and_batch_attention(device):
    batch = Batch(device, (1,) * 3, (7, 2, 12))
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, device=device), use_tensor_cores=True, backend="fa2")
    how = {"q_data_type": torch.float32, "global_override_indptr_cpu": batch.pages.cpu()}
    fi.fast_decode_plan(wrapper, batch.pages, batch.indices, batch.last, 4, 2, 16, PAGE, **how)
    close(wrapper.run(batch.q, batch.cache), batch.truth()[0])
    batch = Batch(device, *LENGTHS)
    both = fi.BatchAttention(device=str(device))
    lengths = torch.tensor(batch.lens_k, dtype=torch.int32)
    both.plan(batch.q_indptr, batch.pages, batch.indices, lengths, 4, 2, 16, 16, PAGE, True, None, 3.0, torch.float32, torch.float32)
    for ours, truth in zip(both.run(batch.q, batch.cache, logits_soft_cap=3.0), batch.truth(causal=True, logits_soft_cap=3.0), strict=True):
        close(ours, truth)


# ---- merging


def test_merging_in_base_two(device):
    q, k, v = torch.randn(6, 4, 16, device=device), torch.randn(11, 2, 16, device=device), torch.randn(11, 2, 16, device=device)
    parts = [fi.single_prefill_with_kv_cache(q, k[s], v[s], return_lse=True) for s in (slice(0, 4), slice(4, 5), slice(5, 11))]
    nothing = torch.zeros_like(q), torch.full((6, 4), -INF, device=device)
    truth = formula(q, k, v)
    a, b = parts[:2]
    ab = fi.merge_state(*a, *b)
    for ours, want in zip(fi.merge_state(*ab, *parts[2]), truth, strict=True):
        close(ours, want)
    stacked = [torch.stack(x, 1) for x in zip(*parts, nothing, strict=True)]
    for ours, want in zip(fi.merge_states(*stacked), truth, strict=True):
        close(ours, want)
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    out, lse = (x.clone() for x in a)
    fi.merge_state_in_place(out, lse, *b, mask=mask)
    for ours, new, old in zip((out, lse), ab, a, strict=True):
        assert torch.equal(ours[mask == 1], new[mask == 1]) and torch.equal(ours[mask == 0], old[mask == 0])
    assert all(torch.equal(x, y) for x, y in zip(fi.merge_state(*nothing, *nothing), nothing, strict=True))


def test_cascades_are_attention_over_all_levels(device):
    prefix, own = Batch(device, (9,), (8,)), Batch(device, (3, 2, 4), (7, 2, 12))
    q = prefix.q
    shift = len(prefix.cache)
    cache = torch.cat((prefix.cache, own.cache))
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, torch.empty(8, device=device))
    lists = [[getattr(x, name) for x in (prefix, own)] for name in ("q_indptr", "pages", "indices", "last")]
    lists[2][1] = lists[2][1] + shift
    wrapper.plan(*lists, 4, 2, 16, PAGE, causal=True, q_data_type=torch.float32)
    out = wrapper.run(q, cache)
    masks, truth = [], []
    for part, k, v in zip(q.split(own.lens_q), own.k.split(own.lens_k), own.v.split(own.lens_k), strict=True):
        row = torch.arange(len(part))[:, None] + len(k) - len(part)
        mask = torch.cat((torch.ones(len(part), 8, dtype=torch.bool), torch.arange(len(k)) <= row), 1)
        masks.append(mask)
        truth.append(formula(part, torch.cat((prefix.k, k)), torch.cat((prefix.v, v)), mask=mask)[0])
    close(out, torch.cat(truth))
    old = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(8, device=device))
    with pytest.raises(ValueError, match="float16"):  # its plan has no dtype but the default
        old.begin_forward(own.q_indptr, own.pages, own.indices, own.last, 4, 2, 16, PAGE)
        old.forward(q, prefix.k, prefix.v, own.cache, causal=True)
    old = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(8, device=device))
    old.begin_forward(own.pages, own.indices, own.last, 4, 2, 16, PAGE, data_type=torch.float32)
    ours = old.forward(q[:3], prefix.k, prefix.v, own.cache)
    parts = zip(q[:3].split(1), own.k.split(own.lens_k), own.v.split(own.lens_k), strict=True)
    close(ours, torch.cat([formula(one, torch.cat((prefix.k, k)), torch.cat((prefix.v, v)))[0] for one, k, v in parts]))


# ---- pages and bits


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_append(device, layout, dtype):
    batch = Batch(device, (3, 0, 2), (7, 2, 12), layout=layout)
    new_k, new_v = torch.randn(7, 2, 16, device=device), torch.randn(7, 2, 16, device=device)
    lengths = fi.get_seq_lens(batch.pages, batch.last, PAGE)
    assert lengths.tolist() == [7, 2, 12]
    sequence, position = fi.get_batch_indices_positions(batch.q_indptr, lengths, torch.tensor(7))  # two more than there are
    assert sequence.tolist() == [0, 0, 0, 2, 2, -1, -1] and position.tolist() == [4, 5, 6, 10, 11, 0, 0]
    cache = batch.cache.to(dtype)
    before = cache.float().clone()
    fi.append_paged_kv_cache(new_k, new_v, sequence, position, cache, batch.indices, batch.pages, batch.last, layout)
    want = before.transpose(2, 3) if layout == "HND" else before
    for n, (s, p) in enumerate(zip([0, 0, 0, 2, 2], [4, 5, 6, 10, 11], strict=True)):
        page = int(batch.indices[int(batch.pages[s]) + p // PAGE])
        want[page, 0, p % PAGE], want[page, 1, p % PAGE] = (x[n].to(dtype).float() for x in (new_k, new_v))
    assert torch.equal(cache.float().nan_to_num(), before.nan_to_num())  # `want` is a view of `before`
    fi.append_paged_kv_cache(new_k, new_v, torch.full_like(sequence, -1), position, cache, batch.indices, batch.pages, batch.last, layout)
    assert torch.equal(cache.float().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits_are_numpys(bitorder):
    numpy = pytest.importorskip("numpy")
    x = torch.rand(37) > 0.5
    assert fi.packbits(x, bitorder).tolist() == numpy.packbits(x.numpy(), bitorder=bitorder).tolist()
    for start in (0, 3):
        bounds = torch.tensor([start, 5, 5, 21, 37])
        packed, first = fi.segment_packbits(x, bounds, bitorder)
        want = [numpy.packbits(x[a:b].numpy(), bitorder=bitorder) for a, b in pairwise(bounds)]
        assert packed.tolist() == numpy.concatenate(want).tolist() and first.tolist() == [0, 1, 1, 3, 5]


# ---- latent attention


def test_plans_of_a_graph_share_rows_out_as_they_like(device):
    """What a captured run reads is in buffers; nothing of the first plan is left in it."""
    heads, dims, lens_k = 4, (32, 8), (7, 3, 12)
    ints = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 4, 64, 3)]
    wrapper, static = fi.BatchMLAPagedAttentionWrapper(torch.empty(8, device=device), True, *ints), []
    for lens_q in ((1, 1, 1), (2, 0, 1)):
        batch = Batch(device, lens_q, lens_k, heads=(heads, 1), dim=sum(dims))
        whole = batch.cache[:, 0, :, 0]
        lengths = torch.tensor(lens_k, dtype=torch.int32, device=device)
        wrapper.plan(batch.q_indptr, batch.pages, batch.indices, lengths, heads, *dims, PAGE, True, 0.2, torch.float32, torch.float32)
        batch.v = batch.k[..., : dims[0]]
        close(wrapper.run(*batch.q.split(dims, -1), whole[..., : dims[0]], whole[..., dims[0] :]), batch.truth(causal=True, sm_scale=0.2)[0])
        static.append((wrapper._even, wrapper._longest))
    assert static[0] == static[1]


@pytest.mark.parametrize("beside", [True, False], ids=["side by side", "two tensors"])
@pytest.mark.parametrize("causal", [True, False])
def test_latent_attention(device, beside, causal):
    lens_q, lens_k, heads, dims = (2, 1, 3), (7, 0, 12), 4, (32, 8)
    batch = Batch(device, lens_q, lens_k, heads=(heads, 1), dim=sum(dims))
    whole = batch.cache[:, 0, :, 0]
    parts = whole[..., : dims[0]], whole[..., dims[0] :]
    parts = parts if beside else tuple(part.clone() for part in parts)
    wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(8, device=device), backend="fa3")
    lengths = torch.tensor(lens_k, dtype=torch.int32, device=device)
    wrapper.plan(batch.q_indptr, batch.pages, batch.indices, lengths, heads, *dims, PAGE, causal, 0.2, torch.float32, torch.float32)
    q = batch.q.split(dims, -1)
    out, lse = wrapper.run(*q, *parts, return_lse=True)
    batch.v = batch.k[..., : dims[0]]
    truth, truth_lse = batch.truth(causal=causal, sm_scale=0.2)
    close(out, truth)
    close(lse, truth_lse)
    close(wrapper.run(*q, *parts, return_lse=True, return_lse_base_on_e=True)[1], truth_lse * math.log(2))
    close(wrapper.run(*q, *parts, kv_len=lengths // 2, page_table=torch.zeros(3, 1).int()), truth)  # which are for "cutlass"
    if beside:
        apart = torch.stack((whole, whole), -1)[..., 0]  # every other number in memory
        close(wrapper.run(*q, apart[..., : dims[0]], apart[..., dims[0] :]), truth)
        return
    wrapper.plan(batch.q_indptr, batch.pages, batch.indices, lengths, heads, *dims, PAGE, causal, 0.2, torch.float32, torch.float8_e4m3fn)
    codes = [(part / scale).to(torch.float8_e4m3fn) for part, scale in zip(parts, (0.1, 0.2), strict=True)]
    ours = wrapper.run(*q, *codes, ckv_scale=0.1, kpe_scale=0.2)
    close(ours, truth, 0.2)  # what e4m3 rounds
    with pytest.raises(ValueError, match="Exactly one"):
        wrapper.run(*q, *codes, kpe_scale=0.2)


@pytest.mark.parametrize("beside", [True, False])
def test_latent_attention_of_no_sequences(device, beside):
    wrapper, none = fi.BatchMLAPagedAttentionWrapper(torch.empty(8, device=device)), torch.zeros(0, dtype=torch.int32, device=device)
    wrapper.plan(indptr([], device), indptr([], device), none, none, 4, 32, 8, PAGE, True, 0.2, torch.float32, torch.float32)
    cache = torch.zeros(3, PAGE, 40, device=device)
    parts = cache[..., :32], cache[..., 32:] if beside else cache[..., 32:].clone()
    out, lse = wrapper.run(torch.zeros(0, 4, 32, device=device), torch.zeros(0, 4, 8, device=device), *parts, return_lse=True)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)


def test_latent_attention_without_a_plan(device):
    """Backend "cutlass": the scale is that of heads of 128 and 64 columns."""
    lens_k, dims = (7, 1, 12), (128, 8)
    batch = Batch(device, (1, 1, 1), lens_k, heads=(4, 1), dim=sum(dims))
    ckv, kpe = (part.clone() for part in batch.cache[:, 0, :, 0].nan_to_num().split(dims, -1))
    table = torch.zeros(3, 3, dtype=torch.int32, device=device)
    for n, (a, b) in enumerate(pairwise(batch.pages)):
        table[n, : b - a] = batch.indices[a:b]
    wrapper, q = fi.BatchMLAPagedAttentionWrapper(torch.empty(8, device=device), backend="cutlass"), batch.q.split(dims, -1)
    batch.v = batch.k[..., : dims[0]]
    truth, truth_lse = batch.truth(sm_scale=(128 + dims[1]) ** -0.5)
    where = {"kv_len": torch.tensor(lens_k, dtype=torch.int32, device=device), "page_table": table}
    out, lse = wrapper.run(*q, ckv, kpe, **where, return_lse=True)
    close(out, truth)
    close(lse, truth_lse)
    close(wrapper.run(*q, ckv, kpe, **where, return_lse=True, return_lse_base_on_e=True)[1], truth_lse * math.log(2))
    codes = [(part / scale).to(torch.float8_e4m3fn) for part, scale in ((ckv, 0.1), (kpe, 0.2))]
    close(wrapper.run(*q, *codes, **where, ckv_scale=0.1, kpe_scale=0.2), truth, 0.2)
    with pytest.raises(ValueError, match="Exactly one"):
        wrapper.run(*q, *codes, **where)


def test_flash_mla(device):
    from onchip.integrations.flashinfer.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    lens_k, heads = (7, 0, 12), 4
    batch = Batch(device, (2,) * 3, lens_k, heads=(heads, 1), dim=40)
    cache, most = batch.cache[:, 0], 4
    table = torch.full((3, most), 2147480000, dtype=torch.int32, device=device)
    for n, (a, b) in enumerate(zip(batch.pages[:-1], batch.pages[1:], strict=True)):
        table[n, : b - a] = batch.indices[a:b]
    batch.v = batch.k[..., :32]
    lengths, meta = torch.tensor(lens_k, dtype=torch.int32, device=device), get_mla_metadata()
    for causal in (True, False):
        out, lse = flash_mla_with_kvcache(batch.q.unflatten(0, (3, 2)), cache, table, lengths, 32, *meta, causal=causal)
        truth, truth_lse = batch.truth(causal=causal)
        close(out.flatten(0, 1), truth)
        truth_lse = (truth_lse * math.log(2)).unflatten(0, (3, 2)).transpose(1, 2)
        close(lse, truth_lse.masked_fill(truth_lse == -INF, INF))
    picked = torch.tensor([[[0, 3, -1, 6], [-1, -1, -1, -1]], [[1, 2, 3, 4], [5, -1, -1, 0]], [[7, 7, 2, 9], [8, 1, 0, 3]]], dtype=torch.int32, device=device)
    pool, sink = torch.randn(3, PAGE, 1, 40, device=device), torch.tensor([0.5, -INF, INF, 0.0], device=device)
    count = torch.tensor([4, 2, 3], device=device)
    out, lse = flash_mla_with_kvcache(batch.q.unflatten(0, (3, 2)), pool, None, None, 32, *meta, indices=picked, attn_sink=sink, topk_length=count)
    for b in range(3):
        for i in range(2):
            own = picked[b, i, : count[b]]
            k = pool.view(-1, 1, 40)[own[own >= 0].long()]
            truth, truth_lse = formula(batch.q[2 * b + i][None], k, k[..., :32], sinks=sink)
            close(out[b, i], truth[0])
            close(lse[b, :, i], (truth_lse[0] * math.log(2)).masked_fill(truth_lse[0] == -INF, INF))
    with pytest.raises(ValueError, match="causal with indices"):
        flash_mla_with_kvcache(batch.q.unflatten(0, (3, 2)), pool, None, None, 32, *meta, causal=True, indices=picked)


def test_flash_mla_reads_no_index_that_does_not_count(device):
    """What lies past topk_length may be anything, and so may the cache where no index points."""
    from onchip.integrations.flashinfer.flash_mla import flash_mla_with_kvcache

    q, pool = torch.randn(2, 1, 4, 40, device=device), torch.full((3, PAGE, 1, 40), torch.nan, device=device)
    pool[0, :2] = torch.randn(2, 1, 40, device=device)
    picked = torch.tensor([[[0, 1, 1 << 30, 5]], [[1, -1, -7, 1 << 30]]], dtype=torch.int32, device=device)
    count, splits = torch.tensor([2, 3], dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    out, lse = flash_mla_with_kvcache(q, pool, None, None, 32, splits, splits, indices=picked, topk_length=count)
    for b, own in enumerate(([0, 1], [1])):
        k = pool[0, own]
        truth, truth_lse = formula(q[b], k, k[..., :32])
        close(out[b], truth)
        close(lse[b, :, 0], truth_lse[0] * math.log(2))


WRONG = {  # arguments of flash_mla_with_kvcache beside two queries of 4 heads each, and over 12 tokens
    "extra_indices_in_kvcache without indices": {"extra_indices_in_kvcache": torch.zeros(2, 1, 3).int()},
    "extra_k_cache and extra_indices_in_kvcache go together": {"indices": torch.zeros(2, 1, 3).int(), "extra_topk_length": torch.ones(2).int()},
    r"num_splits is torch.int32 \[2\] on cpu; give int32 \[3\]": {"num_splits": torch.zeros(2).int()},
    "num_splits is a float": {"num_splits": 0.125},
    "tile_scheduler_metadata is a float": {"tile_scheduler_metadata": 0.125},
    r"attn_sink is torch.float32 \[1\] on cpu; give float32 \[4\]": {"indices": torch.zeros(2, 1, 3).int(), "attn_sink": torch.zeros(1)},
    r"indices is torch.int32 \[2, 3\] on cpu; give int32 \[2, 1, most\]": {"indices": torch.zeros(2, 3).int()},
    r"topk_length is torch.int32 \[3\] on cpu; give int32 \[2\]": {"indices": torch.zeros(2, 1, 3).int(), "topk_length": torch.ones(3).int()},
    "indices name token 12 of 3 pages of 4; give 0 to 11, or -1: no key": {"indices": torch.full((2, 1, 3), 12).int()},
    "head_dim_v is 41 for q of 40": {"head_dim_v": 41},
    r"cache_seqlens is torch.int32 \[3\] on cpu; give int32 \[2\]": {"cache_seqlens": torch.ones(3).int()},
    r"block_table is torch.int32 \[2\] on cpu; give int32 \[2, most pages\]": {"block_table": torch.ones(2).int()},
    r"k_cache is torch.float32 \[12, 40\] on cpu; give \[pages, page, 1, dim\]": {"indices": torch.zeros(2, 1, 3).int(), "k_cache": torch.zeros(12, 40)},
    r"k_cache is \[0, 4, 1, 40\] beside indices; give one page": {"indices": torch.zeros(2, 1, 3).int(), "k_cache": torch.zeros(0, 4, 1, 40)},
    "k_cache has tokens of 36 columns, q of 40": {"indices": torch.zeros(2, 1, 3).int(), "extra_indices_in_kvcache": torch.zeros(2, 1, 3).int()}
    | {"extra_k_cache": torch.zeros(3, 4, 1, 36)},
    r"is_fp8_kvcache with strides \(5248, 1312, 1312, 2\); give pages": {"indices": torch.zeros(2, 1, 3).int(), "q": torch.zeros(2, 1, 4, 576)}
    | {"is_fp8_kvcache": True, "k_cache": torch.zeros(3, 4, 1, 1312, dtype=torch.uint8)[..., ::2]},
    r"q is torch.float32 \[2, 4, 40\] on cpu; give \[batch, len_q, heads, dim\]": {"q": torch.zeros(2, 4, 40)},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_flash_mla_refuses(sentence):
    from onchip.integrations.flashinfer.flash_mla import flash_mla_with_kvcache

    right = {"q": torch.zeros(2, 1, 4, 40), "k_cache": torch.zeros(3, PAGE, 1, 40), "head_dim_v": 32}
    right |= {"block_table": torch.zeros(2, 1).int(), "cache_seqlens": torch.ones(2).int()}
    assert flash_mla_with_kvcache(**right)[0].shape == (2, 1, 4, 32)
    with pytest.raises(ValueError, match=f"flash_mla_with_kvcache: (extra_)?{sentence}"):
        flash_mla_with_kvcache(**right | WRONG[sentence])


# ---- refusals, and names


def test_what_cannot_be_done_is_refused_by_name(device):
    work, batch = torch.empty(8, device=device), Batch(device, (1,) * 3, (7, 2, 12))
    for make in (fi.BatchDecodeWithPagedKVCacheWrapper, fi.BatchPrefillWithPagedKVCacheWrapper, fi.BatchPrefillWithRaggedKVCacheWrapper):
        with pytest.raises(Unsupported, match="jit_args"):
            make(work, jit_args=["a", "b"])
        with pytest.raises(ValueError, match="backend 'fa9'"):
            make(work, backend="fa9")
        with pytest.raises(ValueError, match="kv_layout 'DHN'"):
            make(work, "DHN")
        with pytest.raises(RuntimeError, match="plan"):
            make(work).run(batch.q, *[batch.cache] * (1 if make is not fi.BatchPrefillWithRaggedKVCacheWrapper else 2))
    wrapper = batch.decode()
    for given, word in (({"kv_cache_sf": batch.q}, "kv_cache_sf"), ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax")):
        with pytest.raises(Unsupported, match=word):
            wrapper.run(batch.q, batch.cache, **given)
    with pytest.raises(Unsupported, match="jit_args"):
        wrapper.run(batch.q, batch.cache, 1.0)
    with pytest.raises(ValueError, match=r"q\.dtype is torch.float64"):
        wrapper.run(batch.q.double(), batch.cache)
    with pytest.raises(ValueError, match="2 tokens for 3 sequences"):
        wrapper.run(batch.q[:2], batch.cache)
    k, v = batch.cache if isinstance(batch.cache, tuple) else batch.cache.unbind(1)
    with pytest.raises(ValueError, match=rf"pages of {PAGE // 2} tokens and plan\(\) was told page_size {PAGE}"):
        wrapper.run(batch.q, (k[:, : PAGE // 2], v[:, : PAGE // 2]))
    with pytest.raises(ValueError, match="page lists"):
        wrapper.plan(batch.pages, batch.indices, batch.last + PAGE, 4, 2, 16, PAGE)
    with pytest.raises(ValueError, match="pos_encoding_mode"):
        batch.paged(pos_encoding_mode="ROPE")
    with pytest.raises(ValueError, match="does not match qo_indptr"):
        batch.paged().run(batch.q[:2], batch.cache)


def test_what_a_plan_and_its_run_disagree_about(device):
    """Each would read other memory, or the same memory as something else."""
    work, batch = torch.empty(8, device=device), Batch(device, (1,) * 3, (7, 2, 12))
    for wrapper, dims in ((batch.decode(), "4 heads over 2, of 16"), (batch.paged(), "4 heads over 2, of 16")):
        for q in (batch.q[:, :2], batch.q[..., :8]):
            with pytest.raises(ValueError, match=rf"run: q is \[3, .*\] over 2 key heads; plan\(\) was told {dims} columns"):
                wrapper.run(q, batch.cache)
    with pytest.raises(ValueError, match=r"run: q is \[3, 4, 16\] over 1 key heads; plan"):
        batch.ragged().run(batch.q, batch.k[:, :1], batch.v[:, :1])
    for last, indices, words in ((batch.last - 9, batch.indices, "last_page_len is"), (batch.last, batch.indices[:-1], "5 indices .* go on to 6")):
        with pytest.raises(ValueError, match=words):
            fi.BatchDecodeWithPagedKVCacheWrapper(work).plan(batch.pages, indices, last, 4, 2, 16, PAGE)
    for count in (20, 22):  # of 7 + 2 + 12
        with pytest.raises(ValueError, match=rf"custom_mask is torch.bool \[{count}\] on .* for \[1, 1, 1\] queries over \[7, 2, 12\] keys; give"):
            batch.paged(custom_mask=torch.ones(count, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match=r"^segment_packbits: x has 3 elements, and indptr ends at 4; give as many"):
        fi.segment_packbits(torch.ones(3), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="pos_encoding_mode 'ALIBI' is not one of NONE"):
        fi.BatchAttentionWithAttentionSinkWrapper(work, pos_encoding_mode="ALIBI")


def test_positions_past_the_pages_of_a_sequence():
    """There another one's page would be written."""
    batch = Batch("cpu", (1,) * 3, (7, 2, 12))
    for position in (-1, 2 * PAGE):
        with pytest.raises(ValueError, match=r"^append: positions up to .* are past the pages of their sequences; give kv_indptr and kv_indices with room"):
            tokens, place = torch.zeros(1, 2, 16), torch.tensor([position], dtype=torch.int32)
            fi.append_paged_kv_cache(tokens, tokens, torch.tensor([0]), place, batch.cache, batch.indices, batch.pages, batch.last)


def test_what_append_would_write_elsewhere_is_refused():
    k, ints = torch.zeros(6, PAGE, 1, 8), lambda *n: torch.tensor(n, dtype=torch.int32)
    new, two = torch.ones(2, 1, 8), ints(0, 1)
    good = (new, new, two, ints(0, 0), (k, k.clone()), ints(2, 3), ints(0, 1, 2), ints(1, 1))
    fi.append_paged_kv_cache(*good)
    for place, bad, words in [
        (5, ints(2), r"batch_indices up to 1 beside 2 page lists, which end at 2 of 1 kv_indices; give kv_indptr \[batch \+ 1\]"),
        (2, ints(0, 5), "batch_indices up to 5 beside 2 page lists"),
        (5, ints(2, -1), "kv_indices are -1 to 2; the cache has pages 0 to 5"),
        (5, ints(2, 77), "kv_indices are 2 to 77; the cache has pages 0 to 5"),
        (0, new[:1], r"a cache \[6, 4, 1, 8\] beside one \[6, 4, 1, 8\], and new rows \[1, 1, 8\] for 2 tokens; give caches of the same pages"),
        (1, new[..., :1], r"and new rows \[2, 1, 1\] for 2 tokens"),
        (3, ints(0), "2 batch_indices, 1 positions"),
        (3, torch.zeros(2), r"positions is torch.float32 \[2\]; give whole numbers of one dimension"),
        (6, ints(0, 9, 2), r"kv_indptr is \[0, 9, 2\]; give \[batch \+ 1\], of 0 or more and never falling"),
        (6, ints(-1, 1, 2), r"kv_indptr is \[-1, 1, 2\]; give"),
        (4, (k, k[:, :2]), r"a cache \[6, 2, 1, 8\] beside one \[6, 4, 1, 8\]"),
    ]:
        with pytest.raises(ValueError, match=f"^append: .*{words}"):
            fi.append_paged_kv_cache(*good[:place], bad, *good[place + 1 :])


@pytest.mark.parametrize("kind", ["decode", "prefill", "masked", "ragged", "latent"])
def test_a_plan_keeps_what_it_was_given(kind):
    """Its tensors may be written to afterwards."""
    lens_q = (1, 1) if kind == "decode" else (2, 1)
    batch, ints, work = Batch("cpu", lens_q, (7, 6)), lambda *n: torch.tensor(n, dtype=torch.int32), torch.empty(8)
    q, lengths, keys, mask = batch.q_indptr, ints(7, 6), ints(0, 7, 13), torch.full((3,), 255, dtype=torch.uint8)
    if kind == "decode":
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(work)
        wrapper.plan(batch.pages, batch.indices, batch.last, 4, 2, 16, PAGE, q_data_type=torch.float32, seq_lens=lengths)
    elif kind == "ragged":
        wrapper, q = fi.BatchPrefillWithRaggedKVCacheWrapper(work), batch.q_indptr.clone()
        wrapper.plan(q, keys, 4, 2, 16, q_data_type=torch.float32)
    elif kind == "latent":
        batch = Batch("cpu", lens_q, (7, 6), heads=(4, 1), dim=40)
        wrapper = fi.BatchMLAPagedAttentionWrapper(work, backend="fa3")
        wrapper.plan(q, batch.pages, batch.indices, lengths, 4, 32, 8, PAGE, True, 0.2, torch.float32, torch.float32)
    else:
        wrapper, how = fi.BatchPrefillWithPagedKVCacheWrapper(work), {"packed_custom_mask": mask} if kind == "masked" else {"seq_lens": lengths}
        wrapper.plan(q, batch.pages, batch.indices, batch.last, 4, 2, 16, PAGE, q_data_type=torch.float32, **how)
    whole = batch.cache[:, 0, :, 0]
    inputs = (*batch.q.split((32, 8), -1), whole[..., :32], whole[..., 32:]) if kind == "latent" else (batch.q, batch.cache)
    inputs = (batch.q, batch.k, batch.v) if kind == "ragged" else inputs
    first = wrapper.run(*inputs)
    for given in (lengths, mask, q, keys, batch.pages, batch.indices, batch.last):
        given.zero_()
    assert torch.equal(wrapper.run(*inputs), first)


@pytest.mark.parametrize("graph", [False, True])
def test_a_plan_that_fails_leaves_none(device, graph):
    batch = Batch(device, (1, 1), (7, 2))
    places = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 3, 8, 2)]
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8, device=device), "NHD", graph, *(places if graph else ()))
    with pytest.raises(RuntimeError, match="nothing is planned"):
        wrapper.forward(batch.q, batch.cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="last_page_len is"):
            wrapper.plan(batch.q_indptr, batch.pages, batch.indices, batch.last + PAGE, 4, 2, 16, PAGE)
        with pytest.raises(RuntimeError, match="nothing is planned"):
            wrapper.run(batch.q, batch.cache)
        more = Batch(device, (2, 3), (7, 2))  # than the plan that failed had, which does not count as the first
        close(more.paged(wrapper).run(more.q, more.cache), more.truth()[0])


INDPTR, ONE, TWO = torch.tensor([0, 1, 2]), torch.ones(4, 2, 8), torch.tensor([3, 4])


def planned(wrapper):
    wrapper.plan(INDPTR, TWO, TWO, 4, 2, 16, 16, q_data_type=torch.float32)
    return wrapper


def scaled(wrapper, **how):
    return planned(wrapper).run(ONE[:2, :1].repeat(1, 4, 2), ONE.new_zeros(5, 2, 16, 2, 16), **how)


def merged(mask):
    fi.merge_state_in_place(ONE.clone(), ONE[..., 0].clone(), ONE, ONE[..., 0], mask)


def latent(ckv, kpe, sm_scale=0.5):
    wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(8))
    wrapper.plan(INDPTR, INDPTR, TWO, TWO, 4, 4, 2, 16, True, sm_scale, torch.float32, torch.float32)
    wrapper.run(ONE.new_zeros(2, 4, 4), ONE.new_zeros(2, 4, 2), ckv, kpe)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: w.plan([0, 1, 2], TWO, TWO, 4, 2, 16, 16), "a page list's indptr is a list; give an int32 tensor"),
        (lambda w: w.plan(INDPTR[0], TWO, TWO, 4, 2, 16, 16), r"a page list's indptr is torch.int64 \[\] on cpu; give .* of one dimension"),
        (lambda w: w.plan(INDPTR, TWO[0], TWO, 4, 2, 16, 16), r"the list of pages is torch.int64 \[\] on cpu; give"),
        (lambda w: planned(w).run(ONE[:2, :1].repeat(1, 4, 2), ONE.new_zeros(5, 2, 16, 2, 16), sinks=[0.0]), "sinks are a list; give one logit a query head"),
        (lambda w: planned(w).run([[0.0]], ONE.new_zeros(5, 2, 16, 2, 16)), r"run: q is a list; give a tensor"),
        (lambda w: planned(w).run(ONE[:2, :1].repeat(1, 4, 2), ([], [])), "paged_kv_cache is neither a tensor"),
        (lambda w: w.plan(INDPTR, TWO.float(), TWO, 4, 2, 16, 16), "the list of pages is torch.float32"),
        (lambda w: w.plan(INDPTR, TWO - 4, TWO, 4, 2, 16, 16), "page -1 is among those of a sequence"),
        (lambda w: fi.BatchPrefillWithRaggedKVCacheWrapper(ONE).plan([0, 4], [0, 4], 4, 2, 16), "qo_indptr is a list"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE[0], ONE, ONE), r"q is torch.float32 \[2, 8\] on cpu; give \[len_q, heads, dim\]"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE, ONE[0], ONE), r"k is .* give \[len_k, kv_heads, dim\]"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE, ONE, ONE, custom_mask=torch.ones(3, 4) > 0), r"custom_mask is .* \[3, 4\] on cpu for \[4\] queries"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE[:3], ONE, ONE, custom_mask=torch.ones(4, 3) > 0), r"custom_mask is torch.bool \[4, 3\]"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE, ONE, ONE, custom_mask=torch.zeros(4, 4)), r"custom_mask is torch.float32 .* give bool"),
        (lambda w: w.plan(INDPTR, TWO, TWO - 3, 4, 2, 16, 16), r"last_page_len is \[0, 1\] of page lists of .* give 1 to 16 where there is a page"),
        (lambda w: w.plan(INDPTR, TWO, TWO + 13, 4, 2, 16, 16), r"last_page_len is \[16, 17\]"),
        (lambda w: fi.segment_packbits(ONE[0, 0] > 0, torch.tensor([0, 5, 2])), r"^segment_packbits: indptr is \[0, 5, 2\]; give \[segments \+ 1\]"),
        (lambda w: fi.segment_packbits(ONE[0, 0] > 0, torch.tensor([-1, 2])), r"^segment_packbits: indptr is \[-1, 2\]"),
        (lambda w: fi.segment_packbits(ONE[0, 0] > 0, torch.tensor([], dtype=torch.int32)), r"^segment_packbits: indptr is \[\]"),
        (lambda w: fi.segment_packbits(ONE[0, 0] > 0, torch.tensor([0.0, 2.0])), "^segment_packbits: indptr is torch.float32"),
        (lambda w: fi.single_decode_with_kv_cache(ONE, ONE, ONE), r"give \[heads, dim\]"),
        (lambda w: fi.merge_states(ONE[:, None], ONE[..., 0]), r"s is .* give \[tokens, states, heads\]"),
        (lambda w: fi.merge_states(ONE[:, None], ONE[:, :, :1]), r"v is \[4, 1, 2, 8\] and s \[4, 2, 1\]"),
        (lambda w: fi.merge_state(ONE[0], ONE[0, :, 0], ONE[0], ONE[0, :, 0]), r"give \[tokens, heads, dim\]"),
        (lambda w: merged(torch.ones(1) > 0), r"^merge_state_in_place: mask is torch.bool \[1\] on cpu; give bool \[4\], one for each token"),
        (lambda w: merged([True] * 4), "^merge_state_in_place: mask is a list"),
        (lambda w: w.plan(INDPTR - 1, TWO, TWO, 4, 2, 16, 16), r"a page list's indptr is \[-1, 0, 1\]; give \[batch \+ 1\], of 0 or more and never falling"),
        (lambda w: w.plan(torch.tensor([0, 2, 1]), TWO, TWO, 4, 2, 16, 16), r"a page list's indptr is \[0, 2, 1\]"),
        (lambda w: fi.get_batch_indices_positions(INDPTR, TWO, -2), "^get_batch_indices_positions: nnz is -2; give a whole number, 0 or more"),
        (lambda w: fi.get_batch_indices_positions(INDPTR, TWO[:1], 2), r"seq_lens is torch.int64 \[1\] on cpu; give \[2\], the keys of each sequence"),
        (lambda w: w.plan(INDPTR, TWO, TWO, 4, 2, 16, 16, window_left="1"), r"plan: window_left is '1'; give a whole number of keys, or -1"),
        (lambda w: w.plan(INDPTR, TWO, TWO, 4, 2, 16, 16, logits_soft_cap="1"), r"plan: logits_soft_cap is '1'; give a number, or None"),
        (lambda w: w.plan(INDPTR, TWO, TWO, 4, 2, 16, 16.0), r"plan: page_size is 16.0; give a whole number, 1 or more"),
        (lambda w: w.plan(INDPTR, TWO, TWO, 4, 2, 16, 16, q_len_per_req=1.0), r"plan: q_len_per_req is 1.0; give a whole number, 1 or more"),
        (lambda w: scaled(w, window_left="1"), r"run: window_left is '1'; give a whole number"),
        (lambda w: scaled(w, q_scale="a"), r"q_scale is 'a'; give a number, a tensor of one, or one a head"),
        (lambda w: scaled(w, k_scale="a"), r"k_scale is 'a'; give a number"),
        (lambda w: scaled(w, v_scale="a"), r"v_scale is 'a'; give a number"),
        (lambda w: fi.single_decode_with_kv_cache(ONE[0], ONE, ONE, window_left="1"), r"^single_decode_with_kv_cache: window_left is '1'"),
        (lambda w: fi.single_prefill_with_kv_cache(ONE, ONE, ONE, o_dtype="float61"), r"'float61' is no dtype; give one, or its name"),
        (
            lambda w: latent(ONE.new_zeros(5, 16, 4), ONE.new_zeros(5, 8, 2)),
            r"kpe_cache is .* \[5, 8, 2\] on cpu beside ckv_cache \[5, 16, 4\]; give \[pages, page",
        ),
        (
            lambda w: latent(ONE.new_zeros(5, 16, 1, 4), ONE.new_zeros(5, 16, 2)),
            r"ckv_cache is torch.float32 \[5, 16, 1, 4\] on cpu; give \[pages, page, columns\]",
        ),
        (lambda w: latent(None, None, sm_scale=None), r"BatchMLAPagedAttentionWrapper.plan: sm_scale is None; give a number"),
        (lambda w: latent(None, None, sm_scale="1"), r"BatchMLAPagedAttentionWrapper.plan: sm_scale is '1'; give a number"),
    ],
)
def test_a_mistake_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8)))


def test_an_output_dtype_by_its_name():
    assert fi.single_prefill_with_kv_cache(ONE, ONE, ONE, o_dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("way", [{}, {"pos_encoding_mode": "ROPE_LLAMA"}, {"kv_data_type": torch.float8_e4m3fn}], ids=["plain", "rotated", "e4m3"])
def test_a_page_past_the_cache_is_an_error_however_it_is_read(way):
    wrapper, cache = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8)), torch.randn(8, 2, 16, 2, 16).to(way.get("kv_data_type", torch.float32))
    wrapper.plan(INDPTR, torch.tensor([0, 8]), TWO, 4, 2, 16, 16, q_data_type=torch.float32, **way)
    with pytest.raises(ValueError, match="the plan has page 8 among those of a sequence; the cache has 0 to 7"):
        wrapper.run(torch.randn(2, 4, 16), cache)


def test_values_are_as_wide_as_they_were_planned():
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8))
    wrapper.plan(INDPTR, INDPTR, TWO, TWO, 4, 2, 16, 16, head_dim_vo=8, q_data_type=torch.float32)
    with pytest.raises(ValueError, match=r"v has 16 columns; plan\(\) was told head_dim_vo 8"):
        wrapper.run(torch.randn(2, 4, 16), torch.randn(8, 2, 16, 2, 16))


def test_run_reads_nothing_from_the_device(device, monkeypatch):
    """On a CPU: no `.item()`, `.tolist()` or `.cpu()` of a plan's tensors in the drop-in itself."""
    import onchip.integrations.flashinfer.pages as pages

    batch = Batch(device, *LENGTHS, dtype=torch.float32)
    wrappers = [batch.paged(), batch.paged(pos_encoding_mode="ROPE_LLAMA"), batch.paged(custom_mask=torch.ones(64 + 50, dtype=torch.bool)[: 35 + 1 + 27 + 36])]
    seen = []
    for name in ("paged_attention", "attention_packed"):
        monkeypatch.setattr(pages, name, lambda q, *_, **__: (seen.append(q.shape), torch.zeros_like(q))[1])

    def caught(*_, **__):
        raise AssertionError("run() waits for the device")

    for name in ("item", "tolist", "cpu", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, caught)
    for wrapper in wrappers:
        wrapper.run(batch.q, batch.cache)
    assert len(seen) == 3


def test_norms_activations_and_rotations(device):
    x, r, w = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device), torch.rand(16, device=device)
    norm = lambda t, weight: t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight  # noqa: E731
    close(fi.rmsnorm(x, w), norm(x, w))
    close(fi.gemma_rmsnorm(x, w, out=torch.empty_like(x)), norm(x, w + 1))
    total = x + r
    fi.fused_add_rmsnorm(x, r, w)
    close(r, total)
    close(x, norm(total, w))
    close(fi.silu_and_mul(x), torch.nn.functional.silu(x[:, :8]) * x[:, 8:])
    close(fi.gelu_tanh_and_mul(x), torch.nn.functional.gelu(x[:, :8], approximate="tanh") * x[:, 8:])
    q, k = torch.randn(9, 4, 16, device=device), torch.randn(9, 2, 16, device=device)
    offsets = torch.tensor([3, 0], device=device)
    ours = fi.apply_rope(q, k, indptr((4, 5), device), offsets, rope_scale=2.0, rope_theta=50.0)
    for got, given in zip(ours, (q, k), strict=True):
        close(got, torch.cat([rotated(part.cpu(), int(o), 50.0, 2.0) for part, o in zip(given.split((4, 5)), offsets, strict=True)]))
    positions = torch.cat((torch.arange(4) + 3, torch.arange(5))).to(device)
    fi.apply_rope_pos_ids_inplace(q, k, positions, rope_scale=2.0, rope_theta=50.0)
    assert torch.equal(q, ours[0]) and torch.equal(k, ours[1])
    table = torch.randn(12, 8, device=device)
    got, _ = fi.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), 16, table, is_neox=False)
    cos, sin = table[positions].chunk(2, -1)
    a, b = q[..., :8:2], q[..., 1:8:2]
    want = torch.stack((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1).flatten(-2)
    close(got.view(9, 4, 16), torch.cat((want, q[..., 8:]), -1))


def test_install_and_its_undo():
    import importlib
    import sys

    names = ("flashinfer", "flash_mla")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    with fi.installed():
        for name, function in (
            ("flashinfer", fi.single_decode_with_kv_cache),
            ("flashinfer.decode", fi.single_decode_with_kv_cache),
            ("flashinfer.prefill", fi.BatchPrefillWithRaggedKVCacheWrapper),
            ("flashinfer.cascade", fi.merge_state),
            ("flashinfer.mla", fi.BatchMLAPagedAttentionWrapper),
            ("flashinfer.page", fi.append_paged_kv_cache),
            ("flashinfer.quantization", fi.packbits),
        ):
            assert getattr(importlib.import_module(name), function.__name__) is function
        import flash_mla
        import flashinfer

        assert flashinfer.page.get_seq_lens is fi.get_seq_lens and callable(flash_mla.get_mla_metadata)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flashinfer.fused_moe")
    assert {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names} == before
