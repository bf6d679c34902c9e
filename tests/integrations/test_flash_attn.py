"""flash-attn's functions, judged by the formula in float64, and by each other where they must agree. `peers.py` runs flash-attn's own tests."""

import pytest
import torch
from torch.nn.functional import pad

import onchip
from onchip.integrations.flash_attn import fa2, fa2_private, fa3, fa4, rotary

INF = torch.inf
LENGTHS = (5, 0, 9, 1), (7, 4, 3, 12)  # queries and keys of four sequences: more and fewer keys than queries, no query


def tensors(device, *shapes, dtype=torch.float32):
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def formula(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None, sink=None, chunk=0):
    """(output, LSE with -inf) in float64 of q [len_q, heads, dim], k and v [len_k, kv_heads, dim]; slopes [heads]."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    row = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    col = torch.arange(len(k), device=q.device)
    seen = torch.ones_like(row >= col)
    if window[0] >= 0:
        seen &= col >= row - window[0]
    if causal or window[1] >= 0:
        seen &= col <= row + (0 if causal else window[1])
    if chunk:
        seen &= row // chunk == col // chunk
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (row - col).abs()
    scores = scores.masked_fill(~seen, -INF)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def each(function, *batches, **keywords):
    """`formula` of every sequence, stacked."""
    return (torch.stack(x) for x in zip(*(function(*one, **keywords) for one in zip(*batches, strict=True)), strict=True))


def close(ours, truth, tolerance=2e-5):
    torch.testing.assert_close(ours.double(), truth.double(), atol=tolerance, rtol=tolerance)


def offsets(lengths, device):
    return pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()


# ---- flash-attn 2

MASKS = [{}, {"causal": True}, {"window": (3, 0)}, {"window": (2, 4)}, {"window": (-1, 2)}, {"window": (4, -1)}, {"causal": True, "window": (5, 9)}]


@pytest.mark.parametrize("len_q, len_k", [(13, 13), (7, 19), (19, 7), (1, 11)])
@pytest.mark.parametrize("how", MASKS, ids=str)
def test_dense_and_its_gradients(device, how, len_q, len_k):
    q, k, v = tensors(device, (2, len_q, 6, 16), (2, len_k, 2, 16), (2, len_k, 2, 16))
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    window = torch.tensor(how.get("window", (-1, -1)))  # flash-attn's tests give it as a tensor
    out, lse, weights = fa2.flash_attn_func(*ours, causal=how.get("causal", False), window_size=window, return_attn_probs=True)
    truth, truth_lse = each(formula, *theirs, **how)
    close(out, truth)
    close(lse, truth_lse.masked_fill(truth_lse == -INF, INF))
    assert weights.numel() == 0
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, ours, g), torch.autograd.grad(truth, theirs, g.double()), strict=True):
        close(a, b)


def test_softcap_comes_before_alibi(device):
    q, k, v = tensors(device, (2, 5, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8))
    slopes = torch.rand(2, 4, device=device)
    out = fa2.flash_attn_func(q * 10, k, v, softcap=3.0, alibi_slopes=slopes, causal=True, softmax_scale=0.7)
    close(out, torch.stack([formula(q[b] * 10, k[b], v[b], softcap=3.0, slopes=slopes[b], causal=True, scale=0.7)[0] for b in range(2)]))
    alike = fa2.flash_attn_func(q, k, v, alibi_slopes=slopes[0])
    close(alike[1], formula(q[1], k[1], v[1], slopes=slopes[0])[0])


def test_packed_forms_are_the_same_function(device):
    (qkv,) = tensors(device, (2, 6, 3, 4, 8))
    want = fa2.flash_attn_func(*qkv.unbind(2), 0.0, 0.3, True, (2, 0))
    assert torch.equal(fa2.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True, (2, 0)), want)
    assert torch.equal(fa2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, 0.3, True, (2, 0)), want)
    flat, cu = qkv.flatten(0, 1), torch.tensor([0, 6, 12], device=device, dtype=torch.int32)
    want = fa2.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 6, 6, 0.0, 0.3, True)
    assert torch.equal(fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 6, 0.0, 0.3, True), want)
    assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 6, 6, 0.0, 0.3, True), want)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (3, 1)}], ids=str)
def test_varlen_with_and_without_pages(device, how):
    lens_q, lens_k = LENGTHS
    q, k, v = tensors(device, (sum(lens_q), 4, 8), (sum(lens_k), 2, 8), (sum(lens_k), 2, 8))
    cu_q, cu_k = offsets(lens_q, device), offsets(lens_k, device)
    arguments = {"causal": how.get("causal", False), "window_size": how.get("window", (-1, -1))}
    out, lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 12, return_attn_probs=True, **arguments)
    parts = [formula(*one, **how) for one in zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), strict=True)]
    close(out, torch.cat([p[0] for p in parts]))
    truth_lse = torch.cat([p[1] for p in parts], 1)
    close(lse, truth_lse.masked_fill(truth_lse == -INF, INF))
    pool, table = paged([t.split(lens_k) for t in (k, v)], page=4, device=device)
    table[1, 1:] = 1 << 20
    again, lse_again, _ = fa2.flash_attn_varlen_func(q, *pool, cu_q, cu_k, 9, 12, return_attn_probs=True, block_table=table, **arguments)
    close(again, out)
    close(lse_again, lse)
    ours, theirs = ([t.clone().requires_grad_() for t in pair] for pair in ((q, pool[0]), (q, k)))
    through_pages = fa2.flash_attn_varlen_func(*ours, pool[1], cu_q, cu_k, 9, 12, block_table=table, **arguments)
    dq, d_pool = torch.autograd.grad(through_pages.sum(), ours)
    dq_packed, dk = torch.autograd.grad(fa2.flash_attn_varlen_func(*theirs, v, cu_q, cu_k, 9, 12, **arguments).sum(), theirs)
    close(dq, dq_packed)
    close(torch.cat([d_pool[row.long()[: -(-n // 4)]].flatten(0, 1)[:n] for row, n in zip(table, lens_k, strict=True)]), dk)


def paged(sequences, page, device):
    """Pools of keys and values whose unused slots are NaN, and the table; `sequences` are lists of `[len, heads, dim]`."""
    counts = [-(-len(s) // page) for s in sequences[0]]
    order = torch.randperm(sum(counts) + 3, device=device)[: sum(counts)].int()
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32, device=device)
    for row, ids in zip(table, order.split(counts), strict=True):
        row[: len(ids)] = ids
    pools = []
    for kind in sequences:
        pool = torch.full((sum(counts) + 3, page, *kind[0].shape[1:]), torch.nan, device=device, dtype=kind[0].dtype)
        for row, one in zip(table.long(), kind, strict=True):
            slots = torch.arange(len(one), device=device)
            pool[row[slots // page], slots % page] = one
        pools.append(pool)
    return pools, table


@pytest.mark.parametrize("packed", [False, True])
def test_dropped_weights_can_be_seen(device, packed):
    """S_dmask's signs and sizes give the output back, by flash-attn's own recipe with one block of keys."""
    q, k, v = tensors(device, (2, 7, 4, 8), (2, 150, 2, 8), (2, 150, 2, 8))
    arguments = {"dropout_p": 0.3, "causal": True, "return_attn_probs": True}
    torch.manual_seed(3)
    if packed:
        cu_q, cu_k = offsets([7, 7], device), offsets([150, 150], device)
        out, lse, weights = fa2.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 7, 150, **arguments)
        out, lse = out.unflatten(0, (2, 7)), lse.unflatten(1, (2, 7)).transpose(0, 1)
    else:
        out, lse, weights = fa2.flash_attn_func(q, k, v, **arguments)
        torch.manual_seed(3)
        assert torch.equal(out, fa2.flash_attn_func(q, k, v, **arguments)[0])
    give_the_output_back(weights, out, lse, q, k, v)


def give_the_output_back(weights, out, lse, q, k, v):
    device, batch = q.device, len(q)
    assert weights.shape == (batch, 4, 128, 256) and fa2._get_block_size_n(device, 8, True, True) > 256
    weights = weights[:, :, :7, :150].double()
    seen = torch.ones(7, 150, dtype=torch.bool, device=device).tril(143)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) * 8**-0.5
    top = scores.masked_fill(~seen, -INF).amax(-1)
    norm = weights.abs() * (top - lse.double()).exp()[..., None]
    close(norm.sum(-1), torch.ones(batch, 4, 7))
    dropped = (weights < 0) & seen
    assert 0.2 < dropped.sum() / (seen.sum() * 4 * batch) < 0.4
    close(out, torch.einsum("bhqk,bkhd->bqhd", norm.masked_fill(dropped, 0.0) / 0.7, v.double().repeat_interleave(2, 2)))


def test_dropped_weights_in_a_graph(device):
    """The seed is a tensor there, and another one in each call; sizes of packed sequences are not known."""
    q, k, v = tensors(device, (1, 7, 4, 8), (1, 150, 2, 8), (1, 150, 2, 8))
    call = torch.compile(lambda q: fa2.flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True), backend="aot_eager", fullgraph=True)
    first, second = call(q), call(q)
    for out, lse, weights in (first, second):
        give_the_output_back(weights, out, lse, q, k, v)
    assert not torch.equal(first[0], second[0])
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    packed = lambda q: fa2.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, 0.3, return_attn_probs=True)[0]  # noqa: E731
    with pytest.raises(Exception, match="return_attn_probs with dropout_p in a compiled graph"):
        torch.compile(packed, backend="aot_eager", fullgraph=True)(q[0])


# ---- the cache


def cache_case(device, kind, lengths, capacity=24, heads=2, dim=8):
    """(k_cache, v_cache, keywords, read) where `read(b)` gives the keys and values of sequence b in the cache; unused slots are NaN."""
    keys = [tensors(device, (n, heads, dim), (n, heads, dim)) for n in lengths]
    if kind.startswith("paged"):
        room = [[pad(t, (0, 0, 0, 0, 0, capacity - len(t)), value=torch.nan) for t in one] for one in keys]
        (k, v), table = paged([[one[i] for one in room] for i in (0, 1)], page=3 if kind == "paged by 3" else 4, device=device)
        table = table[:, :-1].contiguous()
        return k, v, {"block_table": table}, lambda b: tuple(pool[table[b].long()].flatten(0, 1) for pool in (k, v))
    rows = {"indexed": [3, 0, 5, 2], "sliced": range(4), "dense": range(4)}[kind]
    wide = capacity + 8 if kind == "sliced" else capacity
    k, v = (torch.full((6 if kind == "indexed" else 4, wide, heads, dim), torch.nan, device=device)[:, :capacity] for _ in range(2))
    for row, one in zip(rows, keys, strict=True):
        k[row, : len(one[0])], v[row, : len(one[1])] = one
    extra = {"cache_batch_idx": torch.tensor(list(rows), dtype=torch.int32, device=device)} if kind == "indexed" else {}
    return k, v, extra, lambda b: (k[rows[b]], v[rows[b]])


@pytest.mark.parametrize("kind", ["dense", "indexed", "sliced", "paged", "paged by 3"])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": True, "window": (4, 0)}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("len_q", [1, 3, 20])
def test_cache(device, kind, how, len_q):
    lengths = [11, 4, 24, 7]
    k, v, extra, read = cache_case(device, kind, lengths)
    (q,) = tensors(device, (4, len_q, 6, 8))
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = {"causal": how.get("causal", False), "window_size": how.get("window", (-1, -1)), "softcap": how.get("softcap", 0.0)}
    if "paged" in kind:  # behind a sequence's last page a table holds anything
        first = torch.arange(extra["block_table"].shape[1], device=device) * k.shape[1]
        extra = {"block_table": extra["block_table"].where(first < seqlens[:, None], 1 << 20)}
    with onchip.record() as decisions:
        out, lse = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **extra, **arguments)
    assert "paged" not in kind or [d.problem.keys for d in decisions] == ["paged"]
    truth, truth_lse = (torch.stack(x) for x in zip(*(formula(q[b], *(t[:n] for t in read(b)), **how) for b, n in enumerate(lengths)), strict=True))
    close(out, truth)
    close(lse, truth_lse.masked_fill(truth_lse == -INF, INF))
    names = {"block_table": "page_table"}
    four = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **{names.get(n, n): t for n, t in extra.items()}, **arguments)
    assert len(four) == 4 and four[2].numel() == four[3].numel() == 0
    close(four[0], truth)
    close(four[1], truth_lse)


@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_append_and_rotation(device, kind, interleaved, causal):
    """New keys land after the old, rotated; without a causal mask all queries stand at the first new position."""
    lengths, new, rotary_dim = [11, 4, 20, 7], 3, 16
    k, v, extra, read = cache_case(device, kind, lengths, dim=24)
    before = [[t[:n].clone() for t in read(b)] for b, n in enumerate(lengths)]
    q, fresh_k, fresh_v = tensors(device, (4, 2, 4, 24), (4, new, 2, 24), (4, new, 2, 24))
    angles = torch.rand(24, rotary_dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": seqlens, "causal": causal, "rotary_interleaved": interleaved}
    out = fa2.flash_attn_with_kvcache(q, k, v, fresh_k, fresh_v, **arguments, **extra)
    for b, n in enumerate(lengths):
        turn = lambda x, first: rotary.apply_rotary_emb_torch(x[None], cos[first], sin[first], interleaved)[0]  # noqa: E731
        turned_k = turn(fresh_k[b], slice(n, n + new))
        turned_q = turn(q[b], slice(n, n + 2) if causal else [n, n])
        in_cache = [t[: n + new] for t in read(b)]
        close(in_cache[0], torch.cat([before[b][0], turned_k]))
        assert torch.equal(in_cache[1], torch.cat([before[b][1], fresh_v[b]]))
        assert read(b)[0][n + new :].isnan().all()
        close(out[b], formula(turned_q, *in_cache, causal=causal)[0])


@pytest.mark.parametrize("len_q", [2, 20])
def test_left_padding(device, len_q):
    k, v, _, read = cache_case(device, "dense", [11, 4, 24, 7])
    (q,) = tensors(device, (4, len_q, 2, 8))
    used, left = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([11, 4, 24, 7], [3, 0, 5, 6]))
    slopes = torch.rand(2, device=device)
    for b, n in enumerate(left.tolist()):
        k[b, :n] = v[b, :n] = torch.nan
    out = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=left, causal=True, alibi_slopes=slopes)
    plain = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=left, causal=True)
    for b in range(4):
        keys = [t[left[b] : used[b]] for t in read(b)]
        close(out[b], formula(q[b], *keys, causal=True, slopes=slopes)[0])
        close(plain[b], formula(q[b], *keys, causal=True)[0])


def test_varlen_queries_and_new_keys_over_pages(device):
    """FlashAttention-3's: packed queries, packed new keys, table rows by index, left padding, all at once."""
    lengths, news, lens_q, left = [11, 4, 20, 7], [2, 0, 3, 1], [3, 1, 5, 2], [2, 1, 0, 3]
    k, v, extra, read = cache_case(device, "paged", lengths)
    order = torch.tensor([2, 0, 3, 1], device=device)
    table = torch.empty_like(extra["block_table"]).index_copy_(0, order, extra["block_table"])  # sequence b has row order[b]
    q, fresh_k, fresh_v = tensors(device, (sum(lens_q), 4, 8), (sum(news), 2, 8), (sum(news), 2, 8))
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, fresh_k, fresh_v, cache_seqlens=ints(lengths), cache_batch_idx=order.int(), cache_leftpad=ints(left), page_table=table,
        cu_seqlens_q=offsets(lens_q, device), cu_seqlens_k_new=offsets(news, device), max_seqlen_q=5, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    want = [formula(one, *(t[left[b] : n + news[b]] for t in read(b)), causal=True) for b, (one, n) in enumerate(zip(q.split(lens_q), lengths, strict=True))]
    close(out, torch.cat([w[0] for w in want]))
    close(lse, torch.cat([w[1] for w in want], 1))


# ---- what the three disagree in


def test_rows_that_see_nothing(device):
    q, k, v = tensors(device, (1, 3, 2, 8), (1, 1, 2, 8), (1, 1, 2, 8))
    sink = torch.randn(2, device=device)
    out2, lse2, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out3, lse3 = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out4, lse4 = fa4.flash_attn_func(q, k, v, causal=True, return_lse=True)
    _, with_sink = fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    assert (lse2[:, :, :2] == INF).all() and (lse3[:, :, :2] == -INF).all() and (lse4[:, :, :2] == -INF).all()
    close(with_sink[0, :, 0], sink)
    for out in (out2, out3, out4):
        assert (out[:, :2] == 0).all()
        close(out[:, 2:], v)
    nothing = k[:, :0]
    assert (fa2.flash_attn_func(q, nothing, nothing, return_attn_probs=True)[1] == INF).all()
    assert (fa3.flash_attn_func(q, nothing, nothing) == 0).all() and fa4.flash_attn_func(q[:, :0], k, v)[0].shape == (1, 0, 2, 8)


def test_what_a_window_of_minus_one_means(device):
    q, k, v = tensors(device, (1, 6, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    full, causal = (formula(q[0], k[0], v[0], causal=c)[0] for c in (False, True))
    for module in (fa2, fa3):
        for none in (-1, -5):
            close(module.flash_attn_func(q, k, v, window_size=(none, 0))[0], causal)
            close(module.flash_attn_func(q, k, v, window_size=(none, none))[0], full)
    close(fa4.flash_attn_func(q, k, v, window_size=(None, 0))[0][0], causal)
    with pytest.warns(UserWarning, match="takes that for no window"):
        close(fa4.flash_attn_func(q, k, v, window_size=(-1, 0))[0][0], full)
    close(fa4.flash_attn_func(q, k, v, causal=True, window_size=(-1, -1))[0][0], causal)
    beyond = fa4.flash_attn_func(q, k, v, window_size=(None, -2))[0][0]
    close(beyond[2:], formula(q[0, 2:], k[0, :4], v[0, :4], causal=True)[0])
    assert (beyond[:2] == 0).all()
    ahead = fa4.flash_attn_func(q, k, v, window_size=(-2, None))[0][0]
    close(ahead[0], formula(q[0, :1], k[0, 2:], v[0, 2:])[0][0])


# ---- arguments that cannot be


@pytest.mark.parametrize("how", ["plain", "gradient", "dropout"])
@pytest.mark.parametrize("page", [-1, 4])
def test_pages_that_are_none(page, how):
    """However the call goes: pages are read in place, or with gradients or dropout gathered first."""
    q, pool = torch.randn(6, 2, 16, requires_grad=how == "gradient"), torch.randn(4, 4, 2, 16)
    offsets, table = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([[0, page, 99]], dtype=torch.int32)
    lengths = torch.tensor([6], dtype=torch.int32)
    words = rf"^flash_attn_varlen_func: {{}} has pages {min(0, page)} to {max(0, page)} among those of a sequence; give 0 to 3, those of k$"
    with pytest.raises(ValueError, match=words.format("block_table")):
        fa2.flash_attn_varlen_func(q, pool, pool, offsets, offsets, 6, 6, 0.1 if how == "dropout" else 0.0, block_table=table)
    with pytest.raises(ValueError, match=words.format("page_table")):
        fa4.flash_attn_varlen_func(q, pool, pool, cu_seqlens_q=offsets, max_seqlen_q=6, seqused_k=lengths, page_table=table)
    with pytest.raises(ValueError, match=words.replace("flash_attn", "_flash_attn").replace("func", "forward").format("block_table")):
        fa2_private._flash_attn_varlen_forward(q, pool, pool, offsets, offsets, 6, 6, 0.1 if how == "dropout" else 0.0, 0.3, False, block_table=table)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("table", [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2)], ids=["rows", "rank", "dtype"])
def test_tables_that_are_none(table, gradient):
    q, pool, offsets = torch.randn(6, 2, 16, requires_grad=gradient), torch.randn(4, 4, 2, 16), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: block_table is torch.* on cpu; give int32 \[1, most pages\]$"):
        fa2.flash_attn_varlen_func(q, pool, pool, offsets, offsets, 6, 6, block_table=table)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: fa2.flash_attn_qkvpacked_func(x(1, 6, 2, 2, 16)), r"packed_func: qkv is \[1, 6, 2, 2, 16\]; give \[batch, len, 3, heads, dim\]"),
        (lambda x: fa2.flash_attn_kvpacked_func(x(1, 6, 2, 16), x(1, 6, 3, 2, 16)), r"kv is \[1, 6, 3, 2, 16\]; give \[batch, len, 2, heads, dim\]"),
        (lambda x: fa2.flash_attn_varlen_qkvpacked_func(x(6, 2, 2, 16), None, 6), r"qkv is \[6, 2, 2, 16\]; give \[tokens, 3, heads, dim\]"),
        (lambda x: fa2.flash_attn_varlen_kvpacked_func(x(6, 2, 16), x(6, 2, 16), None, None, 6, 6), r"kv is \[6, 2, 16\]; give \[tokens, 2, heads, dim\]"),
        (lambda x: fa3.flash_attn_qkvpacked_func(x(1, 6, 7, 16), num_heads_q=2), r"\[1, 6, 7, 16\], num_heads_q 2; give \[batch, len, num_heads_q"),
        (lambda x: fa3.flash_attn_qkvpacked_func(x(6, 3, 2)), r"qkv is \[6, 3, 2\]; give \[batch, len, 3, heads, dim\]"),
        (lambda x: fa2.flash_attn_func(*[x(1, 6, 2, 16)] * 3, window_size=4), r"window_size 4 is not two integers; give \(left, right\), -1 for no limit"),
    ],
)
def test_shapes_that_are_none(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros)


# ---- FlashAttention-3 alone


def test_values_of_another_size_and_a_second_query(device):
    q, qv, k, v = tensors(device, (2, 5, 4, 8), (2, 5, 4, 24), (2, 9, 2, 8), (2, 9, 2, 24))
    close(fa3.flash_attn_func(q, k, v, causal=True), next(each(formula, q, k, v, causal=True)))
    out, lse = fa3.flash_attn_func(q, k, v, None, True, qv, return_attn_probs=True)
    scores = torch.cat([q, qv], -1), torch.cat([k, v], -1), v
    want, want_lse = each(formula, *scores, causal=True, scale=32**-0.5)
    close(out, want)
    close(lse, want_lse)
    cached = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, causal=True)
    close(cached, want)
    out4, lse4 = fa4.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    close(out4, want)
    close(lse4, want_lse.transpose(1, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_float8(device, packed):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in tensors(device, (2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
    descales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    wide = [t.double() * s.double()[:, None].repeat_interleave(t.shape[2] // 2, 2)[..., None] for t, s in zip((q, k, v), descales, strict=True)]
    truth = next(each(formula, *wide, causal=True, softcap=4.0))
    if packed:
        cu_q, cu_k = offsets([5, 5], device), offsets([9, 9], device)
        rest = {"q_descale": descales[0], "k_descale": descales[1], "v_descale": descales[2], "causal": True, "softcap": 4.0}
        out = fa3.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 5, 9, **rest).unflatten(0, (2, 5))
    else:
        out = fa3.flash_attn_func(q, k, v, None, True, None, *descales, softcap=4.0)
        cached = fa3.flash_attn_with_kvcache(q, k, v, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2], causal=True, softcap=4.0)
        close(cached, truth, 2e-2)
    assert out.dtype == torch.bfloat16
    close(out, truth, 2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks(device, causal):
    q, k, v = tensors(device, (1, 7, 2, 8), (1, 12, 2, 8), (1, 12, 2, 8))
    close(fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=4)[0], formula(q[0], k[0], v[0], causal=causal, chunk=4)[0])
    both = fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=4, window_size=(2, 2))
    close(both[0], formula(q[0], k[0], v[0], causal=causal, chunk=4, window=(2, 2))[0])


def test_used_lengths_and_packed_heads(device):
    lens_q, lens_k = LENGTHS
    q, k, v = tensors(device, (sum(lens_q), 4, 8), (sum(lens_k), 2, 8), (sum(lens_k), 2, 8))
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 0, 9, 1], [7, 1, 0, 10]))
    k[7 + 1 : 14] = torch.nan  # the rest of the second sequence's keys, and all of the third's
    out = fa3.flash_attn_varlen_func(q, k, v, *(offsets(x, device) for x in LENGTHS), 9, 12, used_q, used_k, causal=True)
    parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), used_q.tolist(), used_k.tolist(), strict=True)
    for part, (one, keys, values, n_q, n_k) in zip(out.split(lens_q), parts, strict=True):
        close(part[:n_q], formula(one[:n_q], keys[:n_k], values[:n_k], causal=True)[0])
        assert (part[n_q:] == 0).all()
    (qkv,) = tensors(device, (2, 6, 4 + 2 + 2, 8))
    close(fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), fa3.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True))


def test_parts_combine(device):
    q, k, v = tensors(device, (2, 5, 4, 8), (2, 12, 4, 8), (2, 12, 4, 8))
    parts = [fa3.flash_attn_func(q, k[:, cut], v[:, cut], return_attn_probs=True) for cut in (slice(0, 5), slice(5, 12))]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([e.transpose(1, 2) for _, e in parts])
    truth, truth_lse = each(formula, q, k, v)
    for module in (fa3, fa4):
        into = torch.empty_like(q)
        out, lse = module.flash_attn_combine(outs, lses, into)
        assert out is into and module.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
        close(out, truth)
        close(lse, truth_lse.transpose(1, 2))
    assert fa3.get_scheduler_metadata(2, 5, 12, 4, 4, 8, torch.tensor([12, 12], device=device)).dtype == torch.int32


# ---- FlashAttention-4 alone


def test_every_form_of_varlen_agrees(device):
    """Queries and keys dense or packed, lengths by offsets or used: the same numbers."""
    q, k, v = tensors(device, (3, 4, 4, 8), (3, 8, 2, 8), (3, 8, 2, 8))
    sink = torch.randn(4, device=device, requires_grad=True)
    used = torch.tensor([8, 0, 5], dtype=torch.int32, device=device)
    k[2, 5:] = v[2, 5:] = torch.nan
    want = [formula(q[b], k[b, :n], v[b, :n], causal=True, sink=sink, softcap=3.0) for b, n in enumerate(used.tolist())]
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32, device=device) * n for n in (4, 8))
    pool, table = paged([list(t) for t in (k, v)], page=2, device=device)
    flat_q, flat = q.flatten(0, 1), [t.flatten(0, 1) for t in (k, v)]
    arguments = {"seqused_k": used, "causal": True, "learnable_sink": sink, "softcap": 3.0, "return_lse": True}
    forms = [
        fa4.flash_attn_varlen_func(q, k, v, **arguments),
        fa4.flash_attn_varlen_func(q, *flat, cu_seqlens_k=cu_k, **arguments),
        fa4.flash_attn_varlen_func(q, *pool, page_table=table[:, :-1], **arguments),
    ]
    packed = [
        fa4.flash_attn_varlen_func(flat_q, *flat, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=torch.tensor(4), max_seqlen_k=8, **arguments),
        fa4.flash_attn_varlen_func(flat_q, k, v, cu_seqlens_q=cu_q, **arguments),
        fa4.flash_attn_varlen_func(flat_q, *pool, cu_seqlens_q=cu_q, max_seqlen_q=4, page_table=table[:, :-1], **arguments),
    ]
    for out, lse in (*forms, *((o.unflatten(0, (3, 4)), e.unflatten(1, (3, 4)).transpose(0, 1)) for o, e in packed)):
        close(out, torch.stack([w[0] for w in want]))
        close(lse, torch.stack([w[1] for w in want]))
    assert fa4.flash_attn_varlen_func(q, k, v)[1] is None
    truth = torch.autograd.grad(sum(w[0].sum() + w[1].sum() for w in want), sink)[0]
    close(torch.autograd.grad(forms[0][0].sum() + forms[0][1].sum(), sink)[0], truth)


def test_multiprocessors_left_to_others():
    """`sm_margin` of FlashAttention-3's functions, there and back; 0 is what the setting says."""
    q, k, v = (torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed, cache = [t.flatten(0, 1) for t in (q, k, v)], [t.detach().clone() for t in (k, v)]
    calls = {
        "dense": lambda n: fa3.flash_attn_func(q, k, v, sm_margin=n, return_attn_probs=True)[0],
        "packed": lambda n: fa3.flash_attn_varlen_func(*packed, offsets, offsets, 9, 9, sm_margin=n),
        "together": lambda n: fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), sm_margin=n, return_attn_probs=True)[0],
        "cached": lambda n: fa3.flash_attn_with_kvcache(q.detach(), *cache, sm_margin=n),
    }
    for name, call in calls.items():
        for margin in (0, 7):
            with onchip.record() as decisions:
                out = call(margin)
                if name != "cached":
                    out.sum().backward()
            assert decisions and {d.device.margin for d in decisions} == {margin or None}, name
    with pytest.raises(ValueError, match="sm_margin: -1; give"):
        fa3.flash_attn_func(q, k, v, sm_margin=-1)
