"""Shared prefixes read once: levels of any shape against attention over each sequence's keys in order, in float64, with NaN wherever nobody may look."""

import pytest
import torch
import torch.nn.functional as F

import onchip
from judge import assert_as_good_as_torch, hardware, poisoned
from onchip.core.masks import Causal
from onchip.ops.attention import PagedKV
from onchip.ops.cascade import Level, cascade_attention

BF16, FP32 = torch.bfloat16, torch.float32

# Each level: (readers, keys) of its nodes, in the order of the batch; keys of a node fill whole pages. Last, the keys of each row's own.
ONE = ([[(5, 48)]], [1, 20, 7, 33, 16])
TREES = {
    "one prefix for all": ONE,
    "uneven groups": ([[(1, 32), (4, 16), (2, 64)]], [3, 1, 17, 16, 40, 2, 9]),
    "rows without a prefix": ([[(2, 32), (1, 0), (3, 16)]], [3, 21, 17, 16, 1, 2]),
    "two levels": ([[(6, 32)], [(2, 16), (1, 0), (3, 48)]], [5, 1, 18, 2, 30, 16]),
    "three levels": ([[(7, 16)], [(4, 32), (3, 16)], [(1, 16), (2, 48), (1, 0), (3, 16)]], [1, 2, 3, 17, 33, 16, 8]),
    "nothing of their own": ([[(4, 32)]], [0, 5, 0, 16]),
    "nothing shared": ([[(3, 0)]], [4, 30, 17]),
    "a batch of one": ([[(1, 32)]], [9]),
}


def build(tree, *, page=16, len_q=1, heads=(4, 2), dim=16, dim_v=0, dtype=FP32, device="cpu", parts=1):
    """(q, cache of each row's own, levels, cache of whole sequences): nodes and sequences on shuffled pages; all that is nobody's holds NaN."""
    shared, own = tree
    batch, count = len(own), lambda keys: -(-keys // page)
    total = sum(count(keys) for level in shared for _, keys in level) + sum(map(count, own))
    free = torch.randperm(total + 2).tolist()
    k, v = (poisoned((total + 2, page, heads[1], d), dtype, device) for d in (dim, dim_v or dim))

    def filled(keys):
        pages = [free.pop() for _ in range(count(keys))]
        slots = torch.tensor([p * page + i for p in pages for i in range(page)][:keys], dtype=torch.int64, device=device)
        for pool in (k, v):
            pool.flatten(0, 1)[slots] = torch.randn(keys, heads[1], pool.shape[-1], device=device).to(dtype)
        return pages

    def table(lists, width):
        return torch.tensor([[*some, *[1 << 30] * (width - len(some))] for some in lists], dtype=torch.int32, device=device)

    whole, lengths, levels = [[] for _ in range(batch)], [0] * batch, []
    ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    for level in shared:
        nodes, offsets = [], [0]
        for readers, keys in level:
            nodes.append(filled(keys))
            for row in range(offsets[-1], offsets[-1] + readers):
                whole[row] = whole[row] + nodes[-1]
                lengths[row] += keys
            offsets.append(offsets[-1] + readers)
        assert offsets[-1] == batch
        sizes = [-(-len(node) // parts) for node in nodes]
        cut = [node[p * size : (p + 1) * size] for p in range(parts) for node, size in zip(nodes, sizes, strict=True)]
        spread = [p * batch + at for p in range(parts) for at in offsets[:-1]] + [parts * batch]
        alone = len(nodes) == 1
        levels.append(
            Level(table(cut, max(map(len, cut)) + 1), ints([len(c) * page for c in cut]), None if alone else ints(spread), max(r for r, _ in level), parts)
        )
    rest = [filled(keys) for keys in own]
    cache = PagedKV(k, v, table(rest, max(map(len, rest)) + 1), ints(own))
    whole = [a + b for a, b in zip(whole, rest, strict=True)]
    everything = PagedKV(k, v, table(whole, max(map(len, whole)) + 1), ints([n + keys for n, keys in zip(lengths, own, strict=True)]))
    q = torch.randn(batch, len_q, heads[0], dim, device=device).to(dtype)
    return q, cache, levels, everything


def torchs(q, cache):
    """Output and LSE of torch's own kernels in the same dtype, for one query a row; the LSE on a CPU alone, and there is none of either elsewhere.

    The LSE also of rows filled up to 32 keys: of 16 and more torch's exponentials of half precision are quick ones, which err more.
    """
    if q.shape[1] > 1:
        return (), ()
    out, lse = torch.zeros_like(q), torch.full((len(q), q.shape[2], 1), -torch.inf)
    filled = lse.clone()
    for b, keys in enumerate(cache.lengths.tolist()):
        pages = cache.page_table[b, : -(-keys // cache.k.shape[1])]
        k, v = (pool[pages].flatten(0, 1)[:keys].transpose(0, 1).repeat_interleave(q.shape[2] // pool.shape[2], 0)[None] for pool in cache[:2])
        row = q[b : b + 1].transpose(1, 2)
        if keys and q.is_cpu:
            found, lse[b : b + 1] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(row, k, v)
            out[b] = found[0].transpose(0, 1)
            more = max(0, 32 - keys)
            hide = torch.zeros(1, 1, 1, keys + more, dtype=q.dtype)
            hide[..., keys:] = -torch.inf
            k, v = (F.pad(t, (0, 0, 0, more)) for t in (k, v))
            filled[b : b + 1] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(row, k, v, attn_mask=hide)[1]
        elif keys:
            out[b] = F.scaled_dot_product_attention(row, k, v)[0].transpose(0, 1)
    return (out,), (lse, filled) if q.is_cpu else ()


def check(q, cache, levels, everything, kernel="auto", **how):
    wide = everything._replace(k=cache.k.double(), v=cache.v.double())
    truth, truth_lse = onchip.paged_attention(q.double(), wide, kernel="reference", return_lse=True, **how)
    low, low_lse = onchip.paged_attention(q, everything, kernel="reference", return_lse=True, **how)
    theirs, theirs_lse = ((), ()) if how or cache.v.shape[-1] != q.shape[-1] else torchs(q, everything)
    out, lse = cascade_attention(q, cache, levels, kernel=kernel, return_lse=True, **how)
    assert out.dtype == q.dtype and out.shape == truth.shape and lse.shape == truth_lse.shape
    assert_as_good_as_torch(out, (low, *theirs, *hardware(truth, q.dtype, q.device)), truth)
    assert_as_good_as_torch(lse, (low_lse, *theirs_lse, *hardware(truth_lse, FP32, q.device)), truth_lse)
    assert torch.equal(cascade_attention(q, cache, levels, kernel=kernel, **how), out)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_it_is_attention_over_all_keys(tree, dtype):
    check(*build(TREES[tree], dtype=dtype))


@pytest.mark.parametrize("tree", [name for name in TREES if name != "nothing of their own"])
@pytest.mark.parametrize("parts", [2, 3])
def test_many_queries_and_parts(tree, parts):
    """Several queries a row, all of them after the shared keys; nodes in parts, of which some are empty."""
    shared, own = TREES[tree]
    check(*build((shared, [n + 2 for n in own]), len_q=3, parts=parts, heads=(6, 2), dim_v=8))


def test_arguments_that_every_part_knows():
    q, cache, levels, everything = build(TREES["three levels"])
    check(q, cache, levels, everything, scale=0.3, softcap=2.0, sinks=torch.randn(4))
    check(q, cache, levels, everything, kernel="reference", sinks=torch.randn(4))
    q, cache, levels, everything = build(TREES["nothing of their own"])
    check(q, cache, levels, everything, sinks=torch.randn(4))


def test_no_levels_is_paged_attention():
    q, cache, _, _ = build(ONE)
    assert torch.equal(cascade_attention(q, cache, []), onchip.paged_attention(q, cache, mask=Causal()))


def test_float64():
    q, cache, levels, everything = build(TREES["two levels"], dtype=torch.float64)
    torch.testing.assert_close(cascade_attention(q, cache, levels), onchip.paged_attention(q, everything))


def test_gradients_go_through():
    """Of queries and of what is in the pages, as of attention over all keys."""
    q, cache, levels, everything = build(TREES["two levels"])
    k, v = (t.nan_to_num(0.0).requires_grad_() for t in cache[:2])
    q.requires_grad_()
    d_out = torch.randn_like(q)
    ours = torch.autograd.grad(cascade_attention(q, cache._replace(k=k, v=v), levels), (q, k, v), d_out)
    theirs = torch.autograd.grad(onchip.paged_attention(q, everything._replace(k=k, v=v)), (q, k, v), d_out)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_each_prefix_is_read_once():
    """One call for each level and one for the rest, however many rows there are."""
    q, cache, levels, _ = build(TREES["three levels"])
    with onchip.record() as decisions:
        cascade_attention(q, cache, levels)
    assert [(d.problem.op, getattr(d.problem, "batch", 0), getattr(d.problem, "len_q", 0)) for d in decisions] == [
        ("decode", 1, 7), ("decode", 2, 4), ("decode", 4, 3), ("decode", 7, 1), ("merge", 0, 0),
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton_decode", "triton_paged"])
def test_in_triton(device, kernel):
    """One node, few rows: as much as the interpreter runs."""
    check(*build(([[(3, 32)]], [1, 20, 7]), device=device, heads=(2, 1)), kernel=kernel)


@pytest.mark.gpu
def test_packed_in_triton(device):
    check(*build(([[(2, 32), (1, 0)]], [1, 0, 7]), device=device, heads=(2, 1), parts=2))


def test_compiled():
    q, cache, levels, _ = build(TREES["two levels"])
    compiled = torch.compile(cascade_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, cache, levels, return_lse=True), cascade_attention(q, cache, levels, return_lse=True))


# ---- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("tree", TREES)
def test_on_hopper(device, tree, parts, dtype):
    """Rows of many readers by matrix products."""
    shared, own = TREES[tree]
    shared = [[(8 * readers, 4 * keys) for readers, keys in level] for level in shared]
    check(*build((shared, own * 8), device=device, dtype=dtype, heads=(8, 2), dim=128, parts=parts))


@pytest.mark.hopper
@pytest.mark.parametrize("sms", [16, 48])
def test_what_is_shared_and_what_is_not_at_once(device, sms):
    """By two launches of which the second waits for nothing: as one after the other, again and again, in a graph, and behind a kernel that writes queries."""
    q, cache, levels, everything = build(([[(96, 2048)]], [5, 33, 0, 640] * 24), device=device, dtype=BF16, heads=(8, 2), dim=128, parts=4)
    both = [levels[0]._replace(sms=sms)]
    check(q, cache, both, everything)
    expected = cascade_attention(q, cache, levels)
    torch.testing.assert_close(cascade_attention(q, cache, both), expected, rtol=1e-2, atol=1e-2)  # the rows' own keys are cut elsewhere
    expected, there = cascade_attention(q, cache, both), torch.empty_like(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            there.zero_()
            there.copy_(q)
            out = cascade_attention(there, cache, both)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    # rows that are not whole 16 bytes apart are copied, so that one waits for the other
    apart = torch.zeros(96, 1, 8, 132, dtype=BF16, device=device)[..., :128].copy_(q)
    assert torch.equal(cascade_attention(apart, cache, both), expected)


@pytest.mark.hopper
def test_few_rows_go_one_after_the_other(device):
    """One kernel reads both, whose launches count the same arrivals."""
    q, cache, levels, everything = build(([[(8, 8192)]], [4000] * 8), device=device, dtype=BF16, heads=(32, 8), dim=128)
    assert torch.equal(cascade_attention(q, cache, [levels[0]._replace(sms=64)]), cascade_attention(q, cache, levels))
    check(q, cache, levels, everything)


@pytest.mark.hopper
def test_a_graph_reads_levels_on_the_device(device):
    """Captured once; then nodes get other pages and lengths, and rows other nodes."""
    tree = ([[(24, 64), (40, 256)]], [5, 33, 18, 64] * 16)
    q, cache, levels, _ = build(tree, device=device, dtype=BF16, heads=(8, 2), dim=64)
    levels = [levels[0]._replace(longest=64)]
    cascade_attention(q, cache, levels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cascade_attention(q, cache, levels)
    for moved in (0, 8):
        levels[0].offsets[1] -= moved
        start = int(levels[0].offsets[1])
        graph.replay()
        rows = [levels[0].page_table[int(i >= start)][: int(levels[0].lengths[int(i >= start)]) // 16].tolist() for i in range(64)]
        whole = [row + cache.page_table[i].tolist() for i, row in enumerate(rows)]
        width = max(map(len, whole))
        table = torch.tensor([row + [0] * (width - len(row)) for row in whole], dtype=torch.int64).clamp(max=len(cache.k) - 1).int().to(device)
        lengths = torch.tensor([len(row) * 16 for row in rows], dtype=torch.int32, device=device) + cache.lengths
        everything = PagedKV(cache.k, cache.v, table, lengths)
        truth = onchip.paged_attention(q.double(), everything._replace(k=cache.k.double(), v=cache.v.double()), kernel="reference")
        assert_as_good_as_torch(out, torchs(q, everything)[0], truth)


# ---- what does not go together


def test_what_does_not_go_together():
    q, cache, (level,), _ = build(TREES["uneven groups"])
    for wrong, words in (
        (level._replace(page_table=level.page_table.long()), r"level 0 has page_table torch.int64 \[3, 5\], .*; give int32 \[parts \* nodes, most pages\]"),
        (level._replace(parts=0), "0 parts; give .* with 1 part or more"),
        (level._replace(offsets=None), "level 0 has 3 nodes in 1 parts and no offsets; give offsets, or one node that all rows read"),
        (level._replace(offsets=level.offsets[:-1]), r"offsets of level 0 are torch.int32 \[3\] for 3 nodes in 1 parts; give int32 \[parts \* nodes \+ 1\]"),
        (level._replace(parts=2), "for 3 nodes in 2 parts"),
        (level._replace(longest=8), "longest of level 0 is 8 for a batch of 7; give the most rows that read one node"),
        (level._replace(longest=1), "longest is 1, and a sequence has 4 tokens; give the most of any, or more"),
        (level._replace(offsets=level.offsets.clamp(max=6)), "the offsets of level 0 go from 0 to 6; give 0 to 7: each row reads one node"),
    ):
        with pytest.raises(ValueError, match=words):
            cascade_attention(q, cache, [wrong])
    for wrong, words in (
        (tuple(level), "level 0 is a tuple; give a list of Level"),
        (level._replace(lengths=[8]), "level 0 has .* no tensor; give int32 tensors"),
        (level._replace(longest=None), "level 0 has parts 1 and longest None; give whole numbers"),
        (level._replace(parts="a"), "level 0 has parts 'a' and longest 4; give whole numbers"),
    ):
        with pytest.raises(TypeError, match=words):
            cascade_attention(q, cache, [wrong])


def test_no_rows():
    q, cache, levels, _ = build(TREES["two levels"])
    nothing = cache._replace(page_table=cache.page_table[:0], lengths=cache.lengths[:0])
    out, lse = cascade_attention(q[:0], nothing, levels, return_lse=True)
    assert out.shape == q[:0].shape and lse.shape == (0, q.shape[2], q.shape[1])
