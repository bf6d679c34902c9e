"""Every decode kernel of the menu against float64: page and group sizes, ragged lengths, many queries, and NaN wherever nobody may look."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch, poisoned
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention
from onchip.dispatch import select
from onchip.kernels.attention import DECODE
from onchip.ops.attention import PagedKV

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 300  # keys of the longest sequence that the interpreter gets

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice")  # numpy's, of the interpreter


def edges(page: int) -> tuple[int, ...]:
    """Lengths around the ends of pages."""
    return tuple(sorted({0, 1, page - 1, page, page + 1, 2 * page + 3}))


def case(lengths, page=16, len_q=1, mask=Causal(), dim=16, dtype=FP32, heads=(2, 1)):
    """A Problem and the lengths of its sequences; the page table has a column to spare."""
    columns = -(-max(lengths) // page) + 1
    return Attention("decode", len(lengths), len_q, columns * page, *heads, dim, dtype, mask, "paged", page), tuple(lengths)


def rows(cases, kernels=DECODE.kernels):
    """One case a kernel and problem, with the marks of where it can run."""
    for problem, lengths in cases:
        for kernel in kernels:
            marks = [pytest.mark.gpu] * kernel.needs_triton + [pytest.mark.large] * (kernel.needs_triton and max(lengths) > LIMIT)
            yield pytest.param(kernel.name, problem, lengths, marks=marks, id=f"{problem}-{'_'.join(map(str, lengths))}-{kernel.name}")


def paged(p: Attention, lengths, device) -> PagedKV:
    """Sequences on shuffled pages of a pool. Free pages, slots past a sequence's end, and the pages that spare entries of the table name hold NaN."""
    used = [-(-n // p.page) for n in lengths]
    pages = torch.randperm(sum(used) + 3)
    k, v = (poisoned((len(pages), p.page, p.kv_heads, p.dim), p.dtype, device) for _ in range(2))
    table = torch.full((p.batch, p.len_k // p.page), int(pages[-1]), dtype=torch.int32)
    for i, (n, own) in enumerate(zip(lengths, pages[: sum(used)].split(used), strict=True)):
        table[i, : len(own)] = own
        slots = (own[:, None] * p.page + torch.arange(p.page)).flatten()[:n].to(device)
        for pool in (k, v):
            pool.view(-1, p.kv_heads, p.dim)[slots] = torch.randn(n, p.kv_heads, p.dim, device=device).to(p.dtype)
    return PagedKV(k, v, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def queries(p: Attention, device):
    return torch.randn(p.batch, p.len_q, p.heads, p.dim, device=device).to(p.dtype)


def torch_attention(p: Attention, q, cache: PagedKV):
    """torch's own attention in the same dtype, over the keys of each sequence in order; rows that see none are 0."""
    out = torch.zeros_like(q)
    for i, n in enumerate(cache.lengths.tolist()):
        pages = cache.page_table[i, : -(-n // p.page)].long()
        k, v = (pool[pages].flatten(0, 1)[:n].transpose(0, 1)[None] for pool in (cache.k, cache.v))
        rows, cols = torch.arange(n - p.len_q, n, device=q.device)[:, None], torch.arange(n, device=q.device)
        if n:
            theirs = torch.nn.functional.scaled_dot_product_attention(q[i].transpose(0, 1)[None], k, v, attn_mask=p.mask.dense(rows, cols), enable_gqa=True)
            out[i] = theirs[0].transpose(0, 1).nan_to_num(0.0)
    return out


def check(kernel, p: Attention, q, cache: PagedKV):
    """The kernel's output and LSE against float64, beside the reference in the problem's dtype; the output is right without LSE too."""
    how = {"mask": p.mask, "return_lse": True}
    truth, truth_lse = onchip.paged_attention(q.double(), cache._replace(k=cache.k.double(), v=cache.v.double()), kernel="reference", **how)
    low, low_lse = onchip.paged_attention(q, cache, kernel="reference", **how)
    with onchip.record() as decisions:
        out, lse = onchip.paged_attention(q, cache, kernel=kernel, **how)
    alone = onchip.paged_attention(q, cache, mask=p.mask, kernel=kernel)
    assert [(d.problem, d.kernel.name) for d in decisions] == [(p, kernel)]
    assert out.dtype == p.dtype and out.shape == q.shape
    assert lse.dtype == FP32 and lse.shape == (p.batch, p.heads, p.len_q)
    for ours in (out, alone):
        assert_as_good_as_torch(ours, (low, torch_attention(p, q, cache)), truth)
    assert_as_good_as_torch(lse, low_lse, truth_lse)
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
DIMS = [case([33, 80], dim=dim, dtype=dtype) for dim in (16, 64, 80, 128, 256) for dtype in (FP32, BF16, FP16)]
GROUPS = [case([33, 80], heads=heads, dim=32) for heads in ((1, 1), (3, 3), (9, 3), (16, 1), (10, 2))]
GROUPS += [case([33, 80], heads=(8, 2), len_q=16, dim=32), case([33], heads=(64, 1), dim=32)]


@pytest.mark.parametrize(("kernel", "problem", "lengths"), rows(PAGES + PRIMES + LONG + MANY + DIMS + GROUPS))
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


TRITON = DECODE.kernel("triton_decode")


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("mask", [Causal(), Window(50)], ids=str)
def test_any_split_is_right(splits, tile, mask, device):
    """More shares than tiles leave some shares without a key; a tile may hold many pages, or be part of one."""
    from onchip.kernels.attention.triton_decode import Split

    for page in (4, 32):
        p, lengths = case([0, 201], page, len_q=2, mask=mask)
        q, cache = queries(p, device), paged(p, lengths, device)
        truth = onchip.paged_attention(q.double(), cache._replace(k=cache.k.double(), v=cache.v.double()), mask=mask, return_lse=True, kernel="reference")
        low = onchip.paged_attention(q, cache, mask=mask, return_lse=True, kernel="reference")
        ours = TRITON.load()(p, Split(tile, splits, 4, 2), q, cache, p.dim**-0.5, True)
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
        torch.testing.assert_close(launch(q, cache, p.dim**-0.5, False), expected)


# ---- large, against torch


LARGE = [case([8192] * 8, page, dim=128, dtype=dtype, heads=(32, 8)) for page in (1, 16, 64, 256) for dtype in (BF16, FP16)]
LARGE += [case([131072], dim=128, dtype=BF16, heads=(32, 8)), case([1024, 1, 777] * 64, dim=128, dtype=BF16, heads=(32, 8))]
LARGE += [case([4096, 100], len_q=16, dim=128, dtype=BF16, heads=(32, 8)), case([8192] * 4, dim=128, dtype=BF16, heads=(32, 8), mask=Window(1000))]


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("problem", "lengths"), LARGE, ids=[f"{p}-{n[0]}x{len(n)}" for p, n in LARGE])
def test_large(problem, lengths, device):
    """Against torch's SDPA in float32 on the gathered keys of each sequence, beside torch's in the same dtype."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    out = onchip.paged_attention(q, cache, mask=p.mask, kernel=TRITON.name)
    for i, n in enumerate(lengths):
        pages = cache.page_table[i, : -(-n // p.page)].long()
        k, v = (pool[pages].flatten(0, 1)[:n] for pool in (cache.k, cache.v))
        mask = p.mask.dense(torch.arange(n - p.len_q, n, device=device)[:, None], torch.arange(n, device=device))

        def theirs(dtype, i=i, k=k, v=v, mask=mask):
            heads_first = [x.to(dtype).transpose(0, 1)[None] for x in (q[i], k, v)]
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

        assert_as_good_as_torch(out[i], theirs(p.dtype), theirs(FP32))
