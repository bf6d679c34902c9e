"""Every prefill kernel of the menu against float64: dense and packed, every mask, dtype and head dimension, strided and poisoned inputs."""

from itertools import pairwise

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.dispatch import select
from onchip.kernels.attention import PREFILL

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")
HOPPER = [kernel for kernel in PREFILL.kernels if isinstance(kernel.arch.get("cuda"), tuple)]
LIMIT = 300  # the longest sequence that the interpreter gets

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice")  # numpy's, of the interpreter


def dense(len_q, len_k=None, mask=Causal(), dim=64, dtype=FP32, heads=(2, 1), batch=1) -> Attention:
    return Attention("prefill", batch, len_q, len_q if len_k is None else len_k, *heads, dim, dtype, mask)


def packed(lengths, mask=Causal(), dim=64, dtype=FP32, heads=(2, 1)) -> Attention:
    longest = max(lengths)
    return Attention("prefill", len(lengths), longest, longest, *heads, dim, dtype, mask, "packed", 0, sum(lengths))


def rows(problems, kernels=PREFILL.kernels):
    """One case a kernel and problem of a dtype that it takes, with the marks of where it can run; those for one architecture, of what they accept there."""
    for problem in problems:
        for kernel in kernels:
            if problem.dtype not in kernel.accepts.get("dtype", (problem.dtype,)):
                continue
            if kernel in HOPPER:
                if not kernel.refuses(problem, GPUS["H200"]):
                    yield pytest.param(kernel.name, problem, marks=[pytest.mark.gpu, pytest.mark.hopper], id=f"{problem}-{kernel.name}")
                continue
            marks = [pytest.mark.gpu] * kernel.needs_triton + [pytest.mark.large] * (kernel.needs_triton and max(problem.len_q, problem.len_k) > LIMIT)
            yield pytest.param(kernel.name, problem, marks=marks, id=f"{problem}-{kernel.name}")


def tensors(p: Attention, device):
    """Random q, k, v of a dense problem."""
    q, k, v = (torch.randn(p.batch, n, h, p.dim, device=device) for n, h in ((p.len_q, p.heads), (p.len_k, p.kv_heads), (p.len_k, p.kv_heads)))
    return q.to(p.dtype), k.to(p.dtype), v.to(p.dtype)


def check(kernel, p: Attention, q, k, v):
    """The kernel's output and LSE against float64, beside the reference in the problem's dtype; the output is the same without LSE."""
    truth, truth_lse = onchip.attention(q.double(), k.double(), v.double(), mask=p.mask, return_lse=True, kernel="reference")
    low, low_lse = onchip.attention(q, k, v, mask=p.mask, return_lse=True, kernel="reference")
    with onchip.record() as decisions:
        out, lse = onchip.attention(q, k, v, mask=p.mask, return_lse=True, kernel=kernel)
        alone = onchip.attention(q, k, v, mask=p.mask, kernel=kernel)
    assert [(d.problem._replace(extras=()), d.kernel.name) for d in decisions] == [(p, kernel)] * 2
    assert out.dtype == p.dtype and out.shape == (p.batch, p.len_q, p.heads, p.dim)
    assert lse.dtype == FP32 and lse.shape == (p.batch, p.heads, p.len_q)
    for ours in (out, alone):
        assert_as_good_as_torch(ours, low, truth)
    assert_as_good_as_torch(lse, low_lses(p, kernel, low_lse, truth_lse), truth_lse)
    return out, lse


def low_lses(p: Attention, kernel: str, low_lse, truth_lse):
    """What LSE may err: as the reference does, and of torch's CPU kernel, whose exponentials have few digits in bfloat16, 2^-14."""
    return (low_lse, truth_lse + 2**-14) if kernel == "blocked" and p.dtype == BF16 else low_lse


# ---- the oracle


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2)], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 5), (3, 7), (7, 3)])
def test_reference_is_the_formula(mask, len_q, len_k):
    """Row by row, key by key, in Python."""
    q, k, v = (torch.randn(1, n, h, 4, dtype=FP64) for n, h in ((len_q, 4), (len_k, 2), (len_k, 2)))
    out, lse = onchip.attention(q, k, v, mask=mask, scale=0.3, return_lse=True, kernel="reference")
    for i in range(len_q):
        row = i + len_k - len_q
        seen = [j for j in range(len_k) if isinstance(mask, Full) or (j <= row and (isinstance(mask, Causal) or row - j <= 2))]
        for head in range(4):
            weights = [torch.exp(0.3 * (q[0, i, head] @ k[0, j, head // 2])) for j in seen]
            total = sum(weights, torch.tensor(0.0, dtype=FP64))
            expected = sum((w * v[0, j, head // 2] for w, j in zip(weights, seen, strict=True)), torch.zeros(4, dtype=FP64)) / (total if seen else 1)
            torch.testing.assert_close(out[0, i, head], expected)
            torch.testing.assert_close(lse[0, head, i], total.log())


# ---- dense

SQUARE = [dense(n, mask=mask, dim=16) for n in (1, 63, 127) for mask in (Full(), Causal(), Window(16))]
OBLONG = [dense(q, k, mask, dim=16) for q, k in ((1, 63), (17, 211), (63, 17), (130, 1)) for mask in (Full(), Causal(), Window(16))]
WINDOWS = [dense(211, mask=Window(size), dim=16) for size in (0, 1, 100, 500)]
LONG = [dense(q, k, mask, dim=16) for q, k in ((1000, 1000), (257, 1000), (1000, 257)) for mask in (Full(), Causal(), Window(100))]
DIMS = [dense(67, mask=Causal(), dim=dim, dtype=dtype, heads=(1, 1)) for dim in (16, 64, 80, 128, 256) for dtype in (FP32, BF16, FP16)]
HALVES = [dense(q, k, mask, 64, dtype) for q, k in ((127, 127), (33, 211)) for mask in (Window(40),) for dtype in (BF16, FP16)]
GROUPS = [dense(65, heads=heads, dim=32, batch=2) for heads in ((1, 1), (3, 3), (4, 1), (6, 2))]


@pytest.mark.parametrize(("kernel", "problem"), rows(SQUARE + OBLONG + WINDOWS + LONG + DIMS + HALVES + GROUPS))
def test_dense(kernel, problem, device):
    check(kernel, problem, *tensors(problem, device))


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(40, 9, Causal()), dense(40, 9, Window(3)), dense(3, 0, Full()), dense(3, 0, Causal())]))
def test_rows_that_see_no_key(kernel, problem, device):
    out, lse = check(kernel, problem, *tensors(problem, device))
    blind = max(0, problem.len_q - problem.len_k)
    assert not out[:, :blind].any() and (lse[:, :, :blind] == -torch.inf).all()
    assert lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(0, 5, Full()), dense(0, 0)]))
def test_no_query(kernel, problem, device):
    out, lse = onchip.attention(*tensors(problem, device), mask=problem.mask, return_lse=True, kernel=kernel)
    assert out.shape == (1, 0, 2, 64) and lse.shape == (1, 2, 0)


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(40, mask=Causal())]))
def test_scale(kernel, problem, device):
    q, k, v = tensors(problem, device)
    truth = onchip.attention(q.double(), k.double(), v.double(), scale=0.7, mask=problem.mask, kernel="reference")
    low = onchip.attention(q, k, v, scale=0.7, mask=problem.mask, kernel="reference")
    assert_as_good_as_torch(onchip.attention(q, k, v, scale=0.7, mask=problem.mask, kernel=kernel), low, truth)


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(65, dtype=dtype, heads=(4, 2)) for dtype in (FP32, BF16)]))
def test_large_scores(kernel, problem, device):
    """Scores far outside what exp can hold."""
    q, k, v = tensors(problem, device)
    check(kernel, problem, q * 30, k * 30, v)


# ---- storage


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(67, mask=mask, dim=32, heads=(2, 2), batch=2) for mask in (Full(), Causal(), Window(9))]))
@pytest.mark.parametrize("storage", ["transposed", "packed qkv", "odd stride", "dim not last", "one key for all", "ends in NaN"])
def test_strides(kernel, problem, storage, device):
    p = problem
    q, k, v = tensors(p, device)
    if storage == "transposed":  # [batch, heads, len, dim] underneath
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif storage == "packed qkv":
        q, k, v = torch.stack((q, k, v), 2).unbind(2)
    elif storage == "odd stride":  # rows that are no multiple of 16 bytes apart, which TMA cannot describe
        q, k, v = (torch.nn.functional.pad(x, (0, 3), value=NAN)[..., : p.dim] for x in (q, k, v))
    elif storage == "dim not last":
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    elif storage == "one key for all":  # stride 0
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    else:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 70), value=NAN)[:, : p.len_q] for x in (q, k, v))
    assert storage == "one key for all" or not q.is_contiguous()
    check(kernel, p, q, k, v)


# ---- packed


def flat(p: Attention, device, tail=0):
    """Random q, k, v of a packed problem, followed in memory by `tail` rows of NaN."""
    tensors = []
    for heads in (p.heads, p.kv_heads, p.kv_heads):
        x = torch.full((p.tokens + tail, heads, p.dim), NAN, dtype=p.dtype, device=device)
        x[: p.tokens] = torch.randn(p.tokens, heads, p.dim, device=device)
        tensors.append(x[: p.tokens])
    return tensors


def offsets_of(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


LENGTHS = ([5, 0, 1, 67], [1], [64, 130, 0, 0, 63])
PACKED = [(lengths, packed(lengths, mask, 32)) for lengths in LENGTHS for mask in (Full(), Causal(), Window(20))]
PACKED += [(LENGTHS[0], packed(LENGTHS[0], Causal(), dim, dtype)) for dim, dtype in ((64, FP16), (80, BF16))]
PACKED += [([500, 1, 0, 1000], packed([500, 1, 0, 1000], mask, 16)) for mask in (Causal(), Window(100))]


def packed_rows():
    for lengths, problem in PACKED:
        for case in rows([problem]):
            yield pytest.param(case.values[0], lengths, problem, marks=case.marks, id=f"{case.id}-{lengths}")


@pytest.mark.parametrize(("kernel", "lengths", "problem"), packed_rows())
def test_packed(kernel, lengths, problem, device):
    p = problem
    q, k, v = flat(p, device, tail=70)
    offsets = offsets_of(lengths, device)
    how = {"mask": p.mask, "return_lse": True}
    truth, truth_lse = onchip.attention_packed(q.double(), k.double(), v.double(), offsets, longest=p.len_q, kernel="reference", **how)
    low, low_lse = onchip.attention_packed(q, k, v, offsets, longest=p.len_q, kernel="reference", **how)
    with onchip.record() as decisions:
        out, lse = onchip.attention_packed(q, k, v, offsets, longest=p.len_q, kernel=kernel, **how)
    alone = onchip.attention_packed(q, k, v, offsets, longest=p.len_q, mask=p.mask, kernel=kernel)
    assert decisions[0].problem._replace(extras=()) == p
    assert out.shape == q.shape and lse.shape == (p.heads, p.tokens) and lse.dtype == FP32
    for ours in (out, alone):
        assert_as_good_as_torch(ours, low, truth)
    assert_as_good_as_torch(lse, low_lses(p, kernel, low_lse, truth_lse), truth_lse)


@pytest.mark.parametrize("longest", [67, 200])
@pytest.mark.parametrize(("kernel", "problem"), rows([packed(LENGTHS[0], Causal(), 32)]))
def test_packed_is_each_sequence_alone(kernel, problem, longest, device):
    """`longest` may be an upper bound."""
    q, k, v = flat(problem, device)
    offsets = offsets_of(LENGTHS[0], device)
    out = onchip.attention_packed(q, k, v, offsets, longest=longest, mask=Causal(), kernel=kernel)
    for a, b in pairwise(offsets.tolist()):
        one = onchip.attention(*(x[None, a:b] for x in (q, k, v)), mask=Causal(), kernel="reference")[0]
        torch.testing.assert_close(out[a:b], one)


@pytest.mark.parametrize(("kernel", "problem"), rows([packed([40, 70, 33], mask, 32) for mask in (Full(), Causal(), Window(20))]))
def test_a_neighbour_of_nan_does_not_leak(kernel, problem, device):
    """Neither into results nor into gradients."""
    p = problem
    q, k, v = flat(p, device)
    d_out, offsets = torch.randn_like(q), offsets_of([40, 70, 33], device)

    def step():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = onchip.attention_packed(*leaves, offsets, longest=70, mask=p.mask, kernel=kernel, return_lse=True)
        return out, lse.T, *torch.autograd.grad(out, leaves, d_out)

    clean = step()
    for x in (q, k, v, d_out):
        x[40:110] = NAN
    others = torch.tensor([*range(40), *range(110, 143)], device=device)
    for found, expected in zip(step(), clean, strict=True):
        assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("used", ["", "used", "queries", "keys"])
@pytest.mark.parametrize(("kernel", "problem"), rows([packed([40, 7], Causal(), 32, heads=(4, 2))]))
def test_tokens_of_no_sequence(kernel, problem, used, device, monkeypatch):
    """Sinks do not learn from them, and with `used`, of either side, they give 0 and -inf, and get gradients of 0, whatever memory held."""
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 5, 9)) for x in flat(problem, device))
    offsets, fresh, results = offsets_of([40, 7], device) + 5, torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: (made := fresh(*sizes, **how)).fill_(NAN if made.is_floating_point() else 0))
    for name in (kernel, "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.ones(4, device=device))]
        lengths = {"": None, "used": offsets.diff(), "queries": (offsets.diff(), None), "keys": (None, offsets.diff())}[used]
        how = {"longest": 40, "used": lengths, "mask": problem.mask, "kernel": name}
        out, lse = onchip.attention_packed(*leaves[:3], offsets, sinks=leaves[3], return_lse=True, **how)
        grads = torch.autograd.grad(out[5:-9].square().sum(), leaves)
        of_queries, of_keys = (slice(None) if used in ("used", side) else slice(5, -9) for side in ("queries", "keys"))
        results.append((*(t[of_queries] for t in (out, lse.T, grads[0])), *(d[of_keys] for d in grads[1:3]), grads[3]))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kernel", "problem"), rows([packed([40, 7], Causal(), 32, heads=(4, 2))]))
def test_packed_slices_of_one_qkv(kernel, problem, device):
    """What a decoder passes: views of the packed projection."""
    p = problem
    qkv = torch.randn(p.tokens, p.heads + 2 * p.kv_heads, p.dim, device=device)
    q, k, v = qkv.split((p.heads, p.kv_heads, p.kv_heads), 1)
    how = {"longest": 40, "mask": p.mask}
    out = onchip.attention_packed(q, k, v, offsets_of([40, 7], device), kernel=kernel, **how)
    expected = onchip.attention_packed(q, k, v, offsets_of([40, 7], device), kernel="reference", **how)
    torch.testing.assert_close(out, expected)


# ---- run after run, tile after tile


@pytest.mark.parametrize(("kernel", "problem"), rows([dense(130, mask=mask, dtype=BF16) for mask in (Full(), Causal(), Window(50))]))
def test_the_same_bits_again(kernel, problem, device):
    inputs = tensors(problem, device)
    first, again = (onchip.attention(*inputs, mask=problem.mask, return_lse=True, kernel=kernel) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


ALONE = [packed([33, 7, 0, 70], mask, 32, dtype, (4, 2)) for mask, dtype in ((Full(), FP32), (Causal(), BF16), (Window(20), FP32))]


@pytest.mark.parametrize(("kernel", "problem"), rows(ALONE, [kernel for kernel in PREFILL.kernels if kernel.name != "reference"]))
def test_bits_do_not_depend_on_the_batch(kernel, problem, device):
    """With batch_invariant: outputs, LSE and gradients of a sequence among others, and alone; the same bits again."""

    def results(tensors, offsets):
        *inputs, d_out = (t.detach().requires_grad_() for t in tensors)
        longest = int(offsets.diff().max())
        out, lse = onchip.attention_packed(*inputs, offsets, longest=longest, mask=problem.mask, return_lse=True, batch_invariant=True, kernel=kernel)
        return [out.detach(), lse.detach().T, *torch.autograd.grad(out, inputs, d_out)]

    tensors = [*flat(problem, device), torch.randn(problem.tokens, problem.heads, problem.dim, device=device).to(problem.dtype)]
    offsets = offsets_of([33, 7, 0, 70], device)
    together, again = (results(tensors, offsets) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(together, again, strict=True))
    for a, b in pairwise(offsets.tolist()):
        alone = results([t[a:b] for t in tensors], offsets_of([b - a], device))
        assert [torch.equal(one, whole[a:b]) for one, whole in zip(alone, together, strict=True)] == [True] * 5


TRITON = PREFILL.kernel("triton_prefill")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [dense(130, 150, mask, dim, dtype, (1, 1)) for dim, dtype, mask in ((64, BF16, Causal()), (128, BF16, Window(40)), (64, FP32, Window(40)))],
    ids=str,
)
def test_every_tile_is_right(problem, device):
    """The first configuration is what runs; the others are what tuning may choose."""
    p = problem
    q, k, v = tensors(p, device)
    truth = onchip.attention(q.double(), k.double(), v.double(), mask=p.mask, kernel="reference")
    low = onchip.attention(q, k, v, mask=p.mask, kernel="reference")
    decision = select(p, device, TRITON.name)
    configs = TRITON.configs(p, decision.device)
    assert len(configs) > 1
    for tiles in configs:
        assert_as_good_as_torch(TRITON.load()(p, tiles, q, k, v, Operands(p.dim**-0.5), False), low, truth)


# ---- large, against torch


SHAPES = ((4096, 64), (4096, 128), (4096, 80), (16384, 128))
LARGE = [dense(n, None, mask, dim, dtype, (8, 2), 2) for n, dim in SHAPES for dtype in (BF16, FP16) for mask in (Full(), Causal())]
LARGE += [dense(1024, 8192, Causal(), 128, BF16, (8, 2)), dense(4096, mask=Causal(), dim=256, dtype=BF16, heads=(4, 1)), dense(4096, mask=Full(), dtype=FP32)]


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kernel", ["triton_prefill", pytest.param("hopper_prefill", marks=pytest.mark.hopper)])
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem, kernel, device):
    """Against torch's SDPA in float32, beside torch's in the same dtype."""
    p = problem
    if kernel == "hopper_prefill" and PREFILL.kernel(kernel).refuses(p, GPUS["H200"]):
        pytest.skip("the menu gives it to another kernel")
    q, k, v = tensors(p, device)

    def theirs(dtype):
        heads_first = [x.transpose(1, 2).to(dtype) for x in (q, k, v)]
        mask = None if isinstance(p.mask, Full) else torch.ones(p.len_q, p.len_k, dtype=torch.bool, device=device).tril(p.len_k - p.len_q)
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    truth = theirs(FP32) if p.dtype != FP32 else theirs(FP64)
    assert_as_good_as_torch(onchip.attention(q, k, v, mask=p.mask, kernel=kernel), theirs(p.dtype), truth)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kernel", ["triton_prefill", pytest.param("hopper_prefill", marks=pytest.mark.hopper)])
def test_large_window(kernel, device):
    """The rows of one window, cut out, against the reference."""
    p = dense(16384, mask=Window(1024), dim=128, dtype=BF16, heads=(8, 2))
    q, k, v = tensors(p, device)
    out = onchip.attention(q, k, v, mask=p.mask, kernel=kernel)
    for stop in (1, 1000, 1025, 8192, 16384):
        rows, keys = slice(max(0, stop - 64), stop), slice(max(0, stop - 64 - 1024), stop)
        part = [x[:, s] for x, s in ((q, rows), (k, keys), (v, keys))]
        truth = onchip.attention(*(x.double() for x in part), mask=p.mask, kernel="reference")
        assert_as_good_as_torch(out[:, rows], onchip.attention(*part, mask=p.mask, kernel="reference"), truth)
