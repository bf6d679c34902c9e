"""Every decode kernel of the menu against float64: page and group sizes, ragged lengths, many queries, masks and scores, and NaN wherever nobody may look."""

import contextlib

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch, hardware, poisoned
from onchip.core import masks
from onchip.core.formats import FORMATS, Codes, Format
from onchip.core.masks import Band, Causal, Full, Window, as_mask
from onchip.core.problem import Attention, Operands
from onchip.core.scores import ALiBi, BucketBias, RelativeBias, chain
from onchip.dispatch import select
from onchip.kernels.attention import DECODE
from onchip.kernels.attention.reference import place
from onchip.ops.attention import PagedKV

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 300  # keys of the longest sequence that the interpreter gets

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice")  # numpy's, of the interpreter


def edges(page: int) -> tuple[int, ...]:
    """Lengths around the ends of pages."""
    return tuple(sorted({0, 1, page - 1, page, page + 1, 2 * page + 3}))


def case(lengths, page=16, len_q=1, mask=Causal(), dim=16, dtype=FP32, heads=(2, 1), dim_v=0):
    """A Problem and the lengths of its sequences; the page table has a column to spare."""
    columns = -(-max(lengths) // page) + 1
    return Attention("decode", len(lengths), len_q, columns * page, *heads, dim, dtype, mask, "paged", page, dim_v=dim_v), tuple(lengths)


OWN_CASES = ("triton_paged", "triton_shares")  # in the interpreter: those of tests/ops/test_paged_packed.py, and of shares and codes below


def rows(cases, kernels=tuple(kernel for kernel in DECODE.kernels if not kernel.name.startswith(("hopper", "register")))):
    """One case a kernel and problem, with the marks of where it can run. (What is in Gluon has files of its own.)"""
    for problem, lengths in cases:
        for kernel in kernels:
            many = kernel.name in OWN_CASES or max(lengths) > LIMIT
            marks = [pytest.mark.gpu] * kernel.needs_triton + [pytest.mark.large] * (kernel.needs_triton and many)
            yield pytest.param(kernel.name, problem, lengths, marks=marks, id=f"{problem}-{'_'.join(map(str, lengths))}-{kernel.name}")


def paged(p: Attention, lengths, device) -> PagedKV:
    """Sequences on shuffled pages of a pool. Free pages, slots past a sequence's end, and the pages that spare entries of the table name hold NaN."""
    used = [-(-n // p.page) for n in lengths]
    pages = torch.randperm(sum(used) + 3)
    k, v = (poisoned((len(pages), p.page, p.kv_heads, dim), p.dtype, device) for dim in (p.dim, p.value_dim))
    table = torch.full((p.batch, p.len_k // p.page), int(pages[-1]), dtype=torch.int32)
    for i, (n, own) in enumerate(zip(lengths, pages[: sum(used)].split(used), strict=True)):
        table[i, : len(own)] = own
        slots = slots_of(p, own, n).to(device)
        for pool in (k, v):
            pool.flatten(0, 1)[slots] = torch.randn(n, p.kv_heads, pool.shape[-1], device=device).to(p.dtype)
    return PagedKV(k, v, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def slots_of(p: Attention, pages, n: int):
    """Where the first `n` keys on `pages` lie in the pool."""
    return (pages[:, None].long() * p.page + torch.arange(p.page, device=pages.device)).flatten()[:n]


def queries(p: Attention, device):
    return torch.randn(p.batch, p.len_q, p.heads, p.dim, device=device).to(p.dtype)


def torch_attention(p: Attention, q, cache: PagedKV, how: dict):
    """torch's own attention in the same dtype over the keys of each sequence in order, and its LSE: rows that see none are 0 and -inf.

    By its fused kernel where that has a name for it, else by softmax between two products.
    """
    mask, score, sinks = as_mask(how["mask"]), chain(how.get("bias"), how.get("score"), how.get("softcap")), how.get("sinks")
    out, lse = q.new_zeros(*q.shape[:-1], p.value_dim), torch.full((p.batch, p.heads, p.len_q), -torch.inf, device=q.device)
    for b, n in enumerate(cache.lengths.tolist()):
        pages = cache.page_table[b, : -(-n // p.page)]
        k, v = (pool.flatten(0, 1)[slots_of(p, pages, n)].transpose(0, 1).repeat_interleave(p.group, 0) for pool in (cache.k, cache.v))
        at = place(b, p.heads, p.len_q, n, q.device)
        seen = mask.static().seen(at, mask.tensors).broadcast_to(1, p.heads, p.len_q, n)
        heads_first = [q[b].transpose(0, 1)[None], *(t.where(seen[0].any(1)[..., None], 0.0)[None] for t in (k, v))]
        if n and score is None and sinks is None and not p.dim_v and q.device.type == "cpu":
            bias = torch.zeros_like(seen, dtype=p.dtype).masked_fill(~seen, -torch.inf)
            theirs, theirs_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, attn_mask=bias, scale=how.get("scale"))
        else:
            q_h, k_h, v_h = heads_first
            scores = (q_h @ k_h.transpose(2, 3)) * (p.dim**-0.5 if how.get("scale") is None else how["scale"])
            if score is not None:
                scores = score.static().run(scores.float(), *at, *score.tensors).broadcast_to(seen.shape)
            scores = scores.float().masked_fill(~seen, -torch.inf)
            column = [] if sinks is None else [sinks.float().view(1, -1, 1, 1).expand(1, -1, p.len_q, 1)]
            scores = torch.cat([scores, *column], -1)
            theirs, theirs_lse = scores.softmax(-1)[..., :n].to(p.dtype) @ v_h, scores.logsumexp(-1)
        blind = ~seen[0].any(-1)
        out[b] = theirs[0].masked_fill(blind[..., None], 0.0).transpose(0, 1)
        lse[b] = theirs_lse[0] if sinks is not None else theirs_lse[0].masked_fill(blind, -torch.inf)
    return out, lse


def check(kernel, p: Attention, q, cache: PagedKV, **how):
    """The kernel's output and LSE against float64, beside torch and the reference in the problem's dtype; the output is right without LSE too."""
    how = {"mask": p.mask} | how
    truth, truth_lse = onchip.paged_attention(q.double(), cache._replace(k=cache.k.double(), v=cache.v.double()), kernel="reference", return_lse=True, **how)
    low, low_lse = onchip.paged_attention(q, cache, kernel="reference", return_lse=True, **how)
    torchs, torchs_lse = torch_attention(p, q, cache, how)
    with onchip.record() as decisions:
        out, lse = onchip.paged_attention(q, cache, kernel=kernel, return_lse=True, **how)
    alone = onchip.paged_attention(q, cache, kernel=kernel, **how)
    assert [(d.problem._replace(mask=p.mask, score=None, extras=()), d.kernel.name) for d in decisions] == [(p, kernel)]
    assert not isinstance(how["mask"], Band) or decisions[0].problem.mask == how["mask"]
    assert out.dtype == p.dtype and out.shape == (*q.shape[:-1], p.value_dim)
    assert lse.dtype == FP32 and lse.shape == (p.batch, p.heads, p.len_q)
    for ours in (out, alone):
        assert_as_good_as_torch(ours, (low, torchs, *hardware(truth, p.dtype, q.device)), truth)
    assert_as_good_as_torch(lse, (low_lse, torchs_lse, *hardware(truth_lse, p.dtype, q.device)), truth_lse)
    return out, lse


# ---- the oracle


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(5)], ids=str)
@pytest.mark.parametrize("len_q", [1, 3])
def test_reference_is_attention_over_the_keys_in_order(mask, len_q):
    """A cache whose pages lie in order and are full is the dense case."""
    q, k, v = torch.randn(2, len_q, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    pools = [x.reshape(6, 4, 2, 8) for x in (k, v)]
    cache = PagedKV(*pools, torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([12, 12], dtype=torch.int32))
    ours = onchip.paged_attention(q, cache, mask=mask, return_lse=True, kernel="reference")
    expected = onchip.attention(q, k, v, mask=mask, return_lse=True, kernel="reference")
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y)


# ---- lengths, pages, masks, heads, dtypes

PAGES = [case([n for n in edges(page) if n <= LIMIT], page, mask=mask) for page in (1, 16, 64, 256) for mask in (Full(), Causal(), Window(9))]
PRIMES = [case([63, 127, 211, 1], mask=mask) for mask in (Causal(), Window(100))]
LONG = [case([1000, 1, 513], page, mask=mask) for page in (1, 16, 256) for mask in (Causal(), Window(300))]
MANY = [case([0, 1, 17, 70], len_q=n, mask=mask) for n in (2, 3, 7, 16) for mask in (Full(), Causal(), Window(9))]
BANDS = [case([0, 1, 17, 70], len_q=n, mask=mask) for n in (1, 5) for mask in (Causal("top_left"), Window(4, 3), Window(None, 2), Window(2, 30, "top_left"))]
DIMS = [case([33, 80], dim=dim, dtype=dtype) for dim in (16, 64, 80, 128, 256) for dtype in (FP32, BF16, FP16)]
DIMS += [case([33, 80], dim=dim, len_q=2, dtype=dtype) for dim, dtype in ((8, FP32), (9, BF16), (33, FP32), (100, FP16), (192, BF16), (320, FP32), (512, BF16))]
VALUES = [case([33, 0, 80], dim=dim, dim_v=dim_v, dtype=dtype) for dim, dim_v in ((64, 256), (192, 128), (40, 8), (8, 72)) for dtype in (FP32, BF16)]
VALUES += [case([33, 80], dim=576, dim_v=512, dtype=dtype, heads=(heads, 1)) for dtype, heads in ((BF16, 16), (FP16, 40))]
GROUPS = [case([33, 80], heads=heads, dim=32) for heads in ((1, 1), (3, 3), (9, 3), (16, 1), (10, 2))]
GROUPS += [case([33, 80], heads=(8, 2), len_q=16, dim=32), case([33], heads=(64, 1), dim=32)]


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows(PAGES + PRIMES + LONG + MANY + BANDS + DIMS + VALUES + GROUPS))
def test_paged(kernel, problem, lengths, device):
    check(kernel, problem, queries(problem, device), paged(problem, lengths, device))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([0, 2, 40], len_q=5, mask=mask) for mask in (Full(), Causal(), Window(3))]))
def test_rows_that_see_no_key(kernel, problem, lengths, device):
    """A sequence of no key, and one of fewer keys than queries."""
    out, lse = check(kernel, problem, queries(problem, device), paged(problem, lengths, device))
    blind = 0 if isinstance(problem.mask, Full) else 3
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    assert not out[1, :blind].any() and (lse[1, :, :blind] == -torch.inf).all()
    assert lse[1, :, blind:].isfinite().all() and lse[2].isfinite().all()


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([40, 7]), case([40, 7], len_q=3)]))
@pytest.mark.parametrize("scale", [0.7, 0.0, -0.4])
def test_scale(kernel, problem, lengths, scale, device):
    check(kernel, problem, queries(problem, device), paged(problem, lengths, device), scale=scale)


# ---- masks, scores, sinks

BATCH, HEADS, KEYS = 4, 4, 96  # of every case below
LENGTHS = [70, 0, 33, 3]
LOW = {"dtype": BF16, "dim": 64}


def mods(len_q: int, **sizes):
    return case(LENGTHS, len_q=len_q, heads=(HEADS, 2), **sizes)


def ids(device, *shape):
    """Documents: 0, 0, 1, 1, 1, 2, ..."""
    return torch.randint(0, 5, shape, device=device).sort(-1).values


def parents(device, *shape):
    """A tree of four drafted tokens."""
    return torch.tensor([-1, 0, 0, 1], device=device).expand(*shape, 4)


def flips(device, *shape):
    return torch.rand(shape, device=device) < 0.7


MASKS = {  # {name: a device -> a mask}
    "documents": lambda at: masks.Document(ids(at, BATCH, KEYS)),
    "documents, causal": lambda at: masks.Document(ids(at, KEYS)) & Causal(),
    "chunked": lambda at: masks.Chunked(16),
    "chunked or near": lambda at: masks.Chunked(16) | Window(9),
    "padding": lambda at: masks.KeyPadding(torch.tensor([50, 0, 33, 2], device=at)),
    "padding on both sides": lambda at: masks.KeyPadding(flips(at, BATCH, KEYS)) & Causal(),
    "windows of heads": lambda at: Window(torch.tensor([0, 3, 20, 90], device=at)),
    "windows of sequences": lambda at: Window(torch.tensor([[30], [1], [0], [9]], device=at), 2),
    "prefixes": lambda at: masks.Prefix(torch.tensor([30, 1, 0, 9], device=at)) & masks.Document(ids(at, KEYS)),
    "dense": lambda at: masks.Dense(flips(at, BATCH, HEADS, 1, KEYS)),
    "top left": lambda at: Window(40, 20, "top_left") & masks.KeyPadding(flips(at, BATCH, KEYS)),
    "function": lambda at: lambda b, h, i, j: (i + j + h) % 3 != 0,
    "nothing": lambda at: lambda b, h, i, j: j < 0,
}
TREES = {
    "tree": lambda at: masks.Tree.of(parents(at)),
    "tree with a window": lambda at: masks.Tree(masks.Tree.of(parents(at, BATCH)).ancestors, 9),
    "trees": lambda at: masks.Tree.of(parents(at, BATCH)) & masks.KeyPadding(flips(at, BATCH, KEYS)),
}


def relative(at):
    """What a user writes, over a tensor of each head."""
    table = torch.randn(HEADS, KEYS, device=at)
    return lambda s, b, h, i, j: s + table[h, j] * (i + 1)


SCORES = {  # {name: a device -> arguments}
    "softcap": lambda at: {"softcap": 2.0},
    "alibi": lambda at: {"score": ALiBi(ALiBi.slopes_of(HEADS, at))},
    "alibi of sequences": lambda at: {"score": ALiBi(torch.rand(BATCH, HEADS, device=at), "linear"), "mask": Full()},
    "linear alibi": lambda at: {"score": ALiBi(ALiBi.slopes_of(HEADS, at), "linear"), "mask": Window(20)},
    "relative bias": lambda at: {"score": RelativeBias(torch.randn(HEADS, 17, device=at)), "mask": Causal("top_left")},
    "buckets": lambda at: {"score": BucketBias(torch.randn(8, HEADS, device=at), 40, both=False)},
    "function": lambda at: {"score": relative(at)},
    "heads alone": lambda at: {"score": lambda s, b, h, i, j: torch.where(h % 2 == 0, s, -s) * (h + b)},
    "bias": lambda at: {"bias": torch.randn(BATCH, HEADS, 1, KEYS, device=at)},
    "bias with holes": lambda at: {"bias": torch.randn(1, HEADS, 1, KEYS, device=at).masked_fill(~flips(at, KEYS), -torch.inf)},
    "all of them": lambda at: {
        "bias": torch.randn(BATCH, 1, 1, KEYS, device=at),
        "score": [ALiBi(ALiBi.slopes_of(HEADS, at)), relative(at)],
        "softcap": 3.0,
        "mask": masks.Document(ids(at, KEYS)) | Window(5),
        "sinks": torch.randn(HEADS, device=at),
    },
}


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(1), mods(4)]))
@pytest.mark.parametrize("name", MASKS)
def test_masks(kernel, problem, lengths, name, device):
    check(kernel, problem, queries(problem, device), paged(problem, lengths, device), mask=MASKS[name](device))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(4), mods(4, page=1, dim=64, dim_v=32, dtype=BF16)]))
@pytest.mark.parametrize("name", TREES)
def test_trees(kernel, problem, lengths, name, device):
    """Drafted tokens at the end of the keys, and sequences that are shorter than the tree."""
    check(kernel, problem, queries(problem, device), paged(problem, lengths, device), mask=TREES[name](device))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(1), mods(3, **LOW)]))
@pytest.mark.parametrize("name", SCORES)
def test_scores(kernel, problem, lengths, name, device):
    check(kernel, problem, queries(problem, device), paged(problem, lengths, device), **SCORES[name](device))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(1), mods(3, mask=Window(9)), mods(2, **LOW), mods(1, dim=24, dim_v=40)]))
@pytest.mark.parametrize("kind", ["float32", "of the problem's dtype", "a column", "no sink for some"])
def test_sinks(kernel, problem, lengths, kind, device):
    """LSE includes them; a row that sees no key gives 0 and the sink."""
    sinks = torch.randn(HEADS, 3, device=device)[:, 0]
    if kind == "of the problem's dtype":
        sinks = sinks.to(problem.dtype)
    elif kind == "no sink for some":
        sinks[::2] = -torch.inf
    sinks = sinks if kind == "a column" else sinks.contiguous()
    out, lse = check(kernel, problem, queries(problem, device), paged(problem, lengths, device), sinks=sinks)
    assert not out[1].any()
    torch.testing.assert_close(lse[1], sinks.float()[:, None].expand(-1, problem.len_q), rtol=2.5e-7, atol=0)  # in base 2 and back


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(1, mask=Window(9)), mods(3, mask=Window(9), page=4)]))
def test_keys_before_a_window_may_be_gone(kernel, problem, lengths, device):
    """Their slots hold NaN, and the entries of their pages name none."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    clean = onchip.paged_attention(q, cache, mask=p.mask, kernel=kernel, return_lse=True)
    for b, n in enumerate(lengths):
        gone = max(0, n - p.len_q - p.mask.left)
        slots = slots_of(p, cache.page_table[b], gone)
        for pool in (cache.k, cache.v):
            pool.flatten(0, 1)[slots] = torch.nan
        cache.page_table[b, : gone // p.page] = -1
    for ours, before in zip(onchip.paged_attention(q, cache, mask=p.mask, kernel=kernel, return_lse=True), clean, strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([mods(1), mods(4, mask=Full())]))
def test_keys_that_no_row_sees_may_hold_nan(kernel, problem, lengths, device):
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    valid = flips(device, BATCH, KEYS)
    how = {"mask": masks.KeyPadding(valid) & p.mask, "softcap": 4.0, "return_lse": True, "kernel": kernel}
    clean = onchip.paged_attention(q, cache, **how)
    for b, n in enumerate(lengths):
        slots = slots_of(p, cache.page_table[b], n)[~valid[b, :n]]
        for pool in (cache.k, cache.v):
            pool.flatten(0, 1)[slots] = torch.nan
    for ours, before in zip(onchip.paged_attention(q, cache, **how), clean, strict=True):
        assert torch.equal(ours, before)


# ---- storage

STORAGE = ("heads before slots", "k and v side by side", "layers apart", "q transposed", "q a slice", "q dim not last", "table a slice")


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([5, 40, 33], len_q=2, mask=mask) for mask in (Causal(), Window(9))]))
@pytest.mark.parametrize("storage", STORAGE)
def test_strides(kernel, problem, lengths, storage, device):
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    k, v, table, sizes = cache
    if storage == "heads before slots":  # [pages, kv_heads, page, dim] underneath
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif storage == "k and v side by side":
        k, v = torch.stack((k, v), 1).unbind(1)
    elif storage == "layers apart":
        k, v = (torch.stack((torch.full_like(x, torch.nan), x), 1)[:, 1] for x in (k, v))
    elif storage == "q transposed":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif storage == "q a slice":
        q = torch.cat((q, torch.full_like(q, torch.nan)), 2)[:, :, : p.heads]
    elif storage == "q dim not last":
        q = q.transpose(1, 3).contiguous().transpose(1, 3)
    else:
        table = torch.cat((table, torch.full_like(table, -1)), 1)[:, : table.shape[1]]
    check(kernel, p, q, PagedKV(k, v, table, sizes))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([5, 40, 33], len_q=2)]))
def test_a_pool_whose_rows_are_scattered(kernel, problem, lengths, device):
    """Is copied, and that is said: a Problem has no strides, so that no menu could refuse it."""
    k, v, table, sizes = paged(problem, lengths, device)
    k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (k, v))
    portable = DECODE.kernel(kernel).portable
    with contextlib.nullcontext() if portable else pytest.warns(UserWarning, match=f"{kernel} copies all pages of a pool"):
        check(kernel, problem, queries(problem, device), PagedKV(k, v, table, sizes))


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([40, 33, 70], len_q=2)]))
def test_a_neighbour_of_nan_does_not_leak(kernel, problem, lengths, device):
    q, cache = queries(problem, device), paged(problem, lengths, device)
    clean, clean_lse = onchip.paged_attention(q, cache, kernel=kernel, return_lse=True)
    q[1] = torch.nan
    for pool in (cache.k, cache.v):
        pool[cache.page_table[1, :3].long()] = torch.nan
    out, lse = onchip.paged_attention(q, cache, kernel=kernel, return_lse=True)
    assert torch.equal(out[[0, 2]], clean[[0, 2]]) and torch.equal(lse[[0, 2]], clean_lse[[0, 2]])


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows([case([200, 77], dim=64, dtype=BF16), case([200, 77], len_q=4, dim=64)]))
def test_the_same_bits_again(kernel, problem, lengths, device):
    q, cache = queries(problem, device), paged(problem, lengths, device)
    first, again = (onchip.paged_attention(q, cache, return_lse=True, kernel=kernel) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# ---- splits


TRITON, SHARES = DECODE.kernel("triton_decode"), DECODE.kernel("triton_shares")


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("mask", [Causal(), Window(50), masks.Chunked(120)], ids=str)
def test_any_split_is_right(splits, tile, mask, device):
    """More shares than tiles leave some shares without a key; a tile may hold many pages, or be part of one."""
    from onchip.kernels.attention.triton_decode import Split

    for page in (4, 32):
        p, lengths = case([0, 201], page, len_q=2, mask=mask.static())
        q, cache = queries(p, device), paged(p, lengths, device)
        truth = onchip.paged_attention(q.double(), cache._replace(k=cache.k.double(), v=cache.v.double()), mask=mask, return_lse=True, kernel="reference")
        low = onchip.paged_attention(q, cache, mask=mask, return_lse=True, kernel="reference")
        ours = TRITON.load()(p, Split(tile, splits, 4, 2), q, cache, Operands(p.dim**-0.5), True)
        for mine, torchs, true in zip(ours, low, truth, strict=True):
            assert_as_good_as_torch(mine, torchs, true)


@pytest.mark.gpu
def test_the_choice_depends_on_the_problem_alone(device):
    """So that a captured graph stays right when lengths change: the same call, new lengths in place."""
    p, lengths = case([40, 3, 0], mask=Causal())
    q, cache = queries(p, device), paged(p, (48, 48, 48), device)
    launch = select(p, device, TRITON.name).launch
    for new in (lengths, (48, 0, 17)):
        cache.lengths.copy_(torch.tensor(new, dtype=torch.int32))
        expected = onchip.paged_attention(q, cache, kernel="reference")
        torch.testing.assert_close(launch(q, cache, Operands(p.dim**-0.5), False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "mask"), [
    *((kernel, mask) for kernel in (TRITON, SHARES) for mask in (Causal(), Window(700))),
    pytest.param(TRITON, masks.Chunked(300), marks=pytest.mark.large), pytest.param(SHARES, masks.Chunked(300), marks=pytest.mark.large),
], ids=lambda x: x.name if hasattr(x, "entry") else str(x))  # fmt: skip
def test_batch_invariant_bits_do_not_depend_on_the_batch(kernel, mask, device):
    """A sequence alone, among others, and with a wider page table."""
    p, lengths = case([1300, 40, 0, 513], 64, len_q=2, mask=mask.static(), heads=(4, 2))
    q, cache = queries(p, device), paged(p, lengths, device)
    sinks = torch.randn(p.heads, device=device)

    def run(rows, columns):
        problem = p._replace(batch=len(rows), len_k=columns * p.page, extras=("batch_invariant", "sinks"))
        table = torch.nn.functional.pad(cache.page_table[rows], (0, 99), value=-1)[:, :columns].contiguous()
        return select(problem, device, kernel.name).launch(q[rows], PagedKV(cache.k, cache.v, table, cache.lengths[rows]), Operands(0.2, sinks=sinks), True)

    out, lse = run([0, 1, 2, 3], p.len_k // p.page)
    expected = onchip.paged_attention(q, cache, mask=mask, scale=0.2, sinks=sinks, return_lse=True, kernel="reference")
    for ours, theirs in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for b, n in enumerate(lengths):
        for columns in (max(1, -(-n // p.page)), 60):
            alone, alone_lse = run([b], columns)
            assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.gpu
@pytest.mark.parametrize(("programs", "tile", "apart"), [(1, 64, True), (7, 16, False), (7, 64, True), (24, 64, True)])
@pytest.mark.parametrize("lengths", [[300, 1, 0, 17], [64] * 3, [0, 129]], ids=str)
def test_shares_of_uneven_batches(programs, tile, apart, lengths, device):
    """Shares that end inside of a unit, at its end, in the first tile; several in one unit, several units in one; no item for some."""
    p, lengths = case(lengths, 8, len_q=3, dim=32, dtype=BF16)
    check_shares(p, lengths, programs, tile, apart, Causal(), device)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [Window(30), Window(5, 3, "top_left"), masks.Chunked(50)], ids=str)
def test_shares_under_masks(mask, device):
    """A window has fewer items; a unit whose every key is hidden still writes its zeros."""
    p, lengths = case([200, 3, 0, 77], 16, len_q=2, mask=mask.static(), heads=(4, 2), dim=32, dtype=BF16)
    check_shares(p, lengths, 5, 64, True, mask, device)


def check_shares(p, lengths, programs, tile, apart, mask, device):
    from onchip.kernels.attention.triton_shares import Shares

    q, cache = queries(p, device), paged(p, lengths, device)
    sinks = torch.randn(p.heads, device=device)
    how = {"mask": mask, "sinks": sinks, "return_lse": True, "kernel": "reference"}
    truth = onchip.paged_attention(q.double(), cache._replace(k=cache.k.double(), v=cache.v.double()), **how)
    low = onchip.paged_attention(q, cache, **how)
    ours = SHARES.load()(p._replace(extras=("sinks",)), Shares(tile, programs, 4, 2, apart, tile, 0), q, cache, Operands(p.dim**-0.5, sinks=sinks), True)
    for mine, torchs, true in zip(ours, low, truth, strict=True):
        assert_as_good_as_torch(mine, torchs, true)


@pytest.mark.gpu
@pytest.mark.parametrize("extras", [(), ("batch_invariant",)], ids=str)
@pytest.mark.parametrize("counts", [[1, 0, 3, 0, 9, 2], [0, 0, 1]], ids=str)
def test_packed_queries(counts, extras, device):
    """Sequences with different numbers of queries, none at all included, like each by itself; tokens behind the last are left alone."""
    p, lengths = case([70, 9, 3, 0, 100, 33][: len(counts)], 16, len_q=max(counts), heads=(4, 2), dim=32, dtype=BF16)
    p = p._replace(tokens=sum(counts) + 2, extras=extras)
    cache = paged(p, lengths, device)
    q = torch.randn(p.tokens, p.heads, p.dim, device=device).to(p.dtype)
    offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    out, lse = select(p, device, SHARES.name).launch(q, cache, Operands(p.dim**-0.5, offsets), True)
    assert out.shape == q.shape and lse.shape == (p.heads, p.tokens)
    for b, n in enumerate(counts):
        if n:
            at = slice(int(offsets[b]), int(offsets[b + 1]))
            alone = cache._replace(page_table=cache.page_table[b : b + 1], lengths=cache.lengths[b : b + 1])
            how = {"return_lse": True, "kernel": "reference"}
            truth = onchip.paged_attention(q[None, at].double(), alone._replace(k=cache.k.double(), v=cache.v.double()), **how)
            low = onchip.paged_attention(q[None, at], alone, **how)
            assert_as_good_as_torch(out[at], low[0][0], truth[0][0])
            assert_as_good_as_torch(lse[:, at], low[1][0], truth[1][0])


# ---- codes

CODES = [(str(form), {}) for form in FORMATS]
CODES += [
    ("int4/32", {"dim": 128, "len_q": 3, "mask": Window(40)}),
    ("int8", {"dim": 80, "dim_v": 48, "len_q": 2}),
    ("e4m3/64", {"heads": (16, 1), "dtype": FP16}),
]
CODES += [("int4", {"dim": 256, "page": 24}), ("int8/32", {"page": 1, "dim_v": 32}), ("e5m2", {"len_q": 5, "heads": (8, 2)})]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "sizes", "channel"), [(*each, False) for each in CODES] + [(form, {}, True) for form in ("e4m3", "int8", "int4/32")], ids=str)
def test_codes(form, sizes, channel, device):
    """Against attention in float64 over the numbers that the codes stand for; free slots hold codes, and scales of NaN."""
    p, lengths = case([70, 0, 200], **{"dim": 64, "dtype": BF16} | sizes)
    p = p._replace(kv=form)
    cache = coded(p, paged(p, lengths, device), channel)
    q = queries(p, device)
    how = {"mask": p.mask, "return_lse": True, "kernel": "reference"}
    wide, low = (cache._replace(k=cache.k.dequantised(dtype), v=cache.v.dequantised(dtype)) for dtype in (torch.float64, p.dtype))
    truth, torchs = onchip.paged_attention(q.double(), wide, **how), onchip.paged_attention(q, low, **how)
    for ours in (
        onchip.paged_attention(q, cache, **how | {"kernel": SHARES.name}),
        onchip.paged_attention(q, cache, batch_invariant=True, **how | {"kernel": SHARES.name}),
    ):
        for mine, theirs, true in zip(ours, torchs, truth, strict=True):
            assert_as_good_as_torch(mine, theirs, true)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_codes_of_any_size(size, device):
    """Scales far outside of float16, and one token whose values are a million times as large as the others'."""
    p, lengths = case([200, 65], dim=64, dtype=BF16, heads=(4, 2))
    p = p._replace(kv="int8")
    cache = paged(p, lengths, device)
    cache.v.mul_(size)
    first = cache.page_table[0, 3].long()
    cache.v[first, 5] *= 1e6
    cache = coded(p, cache, False)
    q = queries(p, device) * 3
    how = {"return_lse": True, "kernel": "reference"}
    wide, low = (cache._replace(k=cache.k.dequantised(dtype), v=cache.v.dequantised(dtype)) for dtype in (torch.float64, p.dtype))
    truth, torchs = onchip.paged_attention(q.double(), wide, **how), onchip.paged_attention(q, low, **how)
    for mine, theirs, true in zip(onchip.paged_attention(q, cache, **how | {"kernel": SHARES.name}), torchs, truth, strict=True):
        for b in range(2):  # the second sequence has no such token
            assert_as_good_as_torch(mine[b], theirs[b], true[b])


def coded(p: Attention, cache: PagedKV, channel: bool) -> PagedKV:
    """The same keys and values in the Problem's format; slots of NaN have scales of NaN and codes of 255."""
    form, pools = Format.of(p.kv), []
    for pool, channels in ((cache.k, channel), (cache.v, False)):
        factor = torch.rand(p.kv_heads, pool.shape[-1], device=pool.device) + 0.5 if channels else None
        storage = torch.empty(len(pool), form.page_bytes(*pool.shape[1:]), dtype=torch.uint8, device=pool.device)
        made = Codes.over(storage, form, tuple(pool.shape[1:]), factor)  # as pages have them: head after head, scales behind
        made.fill(pool)
        empty = pool.isnan().all(-1)
        made.codes.view(torch.uint8)[empty] = 255
        if made.zero is not None:
            made.zero[empty] = torch.nan
        pools.append(made)
    return cache._replace(k=pools[0], v=pools[1])


# ---- large, against torch


LARGE = [case([8192] * 8, page, dim=128, dtype=dtype, heads=(32, 8)) for page in (1, 16, 64, 256) for dtype in (BF16, FP16)]
LARGE += [case([131072], dim=128, dtype=BF16, heads=(32, 8)), case([1024, 1, 777] * 64, dim=128, dtype=BF16, heads=(32, 8))]
LARGE += [case([4096, 100], len_q=16, dim=128, dtype=BF16, heads=(32, 8)), case([8192] * 4, dim=128, dtype=BF16, heads=(32, 8), mask=Window(1000))]


def test_a_row_of_the_public_call_does_not_depend_on_the_batch(device):
    p, lengths = case([40, 300, 7, 120], dim=64, heads=(4, 2))
    q, cache = queries(p, device), paged(p, lengths, device)
    together = onchip.paged_attention(q, cache, batch_invariant=True)
    with onchip.record() as ran:
        for row in range(4):
            alone = cache._replace(page_table=cache.page_table[row : row + 1], lengths=cache.lengths[row : row + 1])
            assert torch.equal(onchip.paged_attention(q[row : row + 1], alone, batch_invariant=True)[0], together[row])
    assert all("batch_invariant" in str(decision.problem) for decision in ran)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("problem", "lengths"), LARGE, ids=[f"{p}-{n[0]}x{len(n)}" for p, n in LARGE])
def test_large(problem, lengths, device):
    """Against torch's SDPA in float32 on the gathered keys of each sequence, beside torch's in the same dtype."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    out = onchip.paged_attention(q, cache, mask=p.mask, kernel=SHARES.name)
    for i, n in enumerate(lengths):
        pages = cache.page_table[i, : -(-n // p.page)].long()
        k, v = (pool[pages].flatten(0, 1)[:n] for pool in (cache.k, cache.v))
        mask = p.mask.dense(torch.arange(n - p.len_q, n, device=device)[:, None], torch.arange(n, device=device))

        def theirs(dtype, i=i, k=k, v=v, mask=mask):
            heads_first = [x.to(dtype).transpose(0, 1)[None] for x in (q[i], k, v)]
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

        assert_as_good_as_torch(out[i], theirs(p.dtype), theirs(FP32))
