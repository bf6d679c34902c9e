"""Embeddings, dropout and the Hadamard rotation with their gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F

from gluon_emulator import Emulator
from judge import assert_as_good_as_torch, poisoned
from onchip.core import philox
from onchip.core.device import GPUS
from onchip.core.problem import Dropout, Rows
from onchip.dispatch import record
from onchip.kernels.fused import DROPOUT_ADD, EMBEDDING, HADAMARD
from onchip.ops.lookup import dropout_add, embedding, hadamard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGE = [pytest.mark.gpu, pytest.mark.large]


def kernels(op):
    return [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in op.kernels]


# ---- embeddings

IDS = {  # tokens of a vocabulary of 50
    "all different": lambda: torch.randperm(50)[:37].view(1, 37),
    "all one": lambda: torch.full((83,), 7),
    "few": lambda: torch.randint(3, (2, 40)),
    "any": lambda: torch.randint(50, (100,)),
    "a few of many rows": lambda: torch.randint(6, (20,)),
    "one": lambda: torch.tensor([[49]]),
    "unknown": lambda: torch.tensor([3, -1, 50, 3, 1 << 40, 0, -1, -(1 << 40)]),
}


def check_embedding(ids, vocab, width, dtype, kernel, device, padding=None):
    ids = ids.to(device)
    weight = poisoned((vocab, width + 8), dtype, device)[:, 8:].copy_(torch.randn(vocab, width, device=device))
    known = (ids >= 0) & (ids < vocab)
    d_out = torch.randn(*ids.shape, width, device=device).to(dtype)
    leaf = weight.detach().requires_grad_()
    with record() as decisions:
        out = embedding(ids, leaf, padding_idx=padding, kernel=kernel)
        (ours,) = torch.autograd.grad(out, leaf, d_out)
        (again,) = torch.autograd.grad(embedding(ids, leaf, padding_idx=padding, kernel=kernel), leaf, d_out)
    assert [d.problem.op for d in decisions[:2]] == ["embedding", "embedding_backward"] and {d.kernel.name for d in decisions} == {kernel}
    assert torch.equal(out.detach()[known], weight[ids[known]]) and out.detach()[~known].isnan().all()
    counted = known if padding is None else known & (ids != padding)
    assert torch.equal(ours, again) and ours.dtype == dtype
    used, at = ids[counted].unique(return_inverse=True)
    sums = {of: torch.zeros(len(used), width, dtype=of, device=device).index_add_(0, at, d_out[counted].to(of)) for of in (dtype, torch.float64)}
    assert_as_good_as_torch(ours[used], sums[dtype], sums[torch.float64], slack=3.0)
    assert not ours.index_fill_(0, used, 0).any()


@pytest.mark.parametrize("kernel", kernels(EMBEDDING))
@pytest.mark.parametrize(("name", "width", "dtype", "padding"), [
    ("all different", 130, BF16, None), ("all one", 63, FP32, None), ("few", 8, FP16, 1), ("any", 200, BF16, 0), ("one", 1, FP32, 49),
    ("a few of many rows", 24, FP32, 3),
    ("unknown", 40, FP32, None),
])  # fmt: skip
def test_embedding(name, width, dtype, padding, kernel, device):
    check_embedding(IDS[name](), 50, width, dtype, kernel, device, padding)


@pytest.mark.parametrize("kernel", [pytest.param("triton_embedding", marks=LARGE)])
@pytest.mark.parametrize("most", [1, 100, 600_000])
def test_large_embedding(most, kernel, device):
    """A gradient of more than 2^31 elements."""
    check_embedding(torch.randint(most, (20_011,)), 600_000, 4096, BF16, kernel, device)


@pytest.mark.parametrize("kernel", kernels(EMBEDDING))
def test_no_tokens(kernel, device):
    weight = torch.randn(5, 3, device=device, requires_grad=True)
    out = embedding(torch.zeros(0, 2, dtype=torch.int32, device=device), weight, kernel=kernel)
    out.sum().backward()
    assert out.shape == (0, 2, 3) and not weight.grad.any()


# ---- dropout


@pytest.mark.parametrize("kernel", kernels(DROPOUT_ADD))
@pytest.mark.parametrize(("shape", "dtype", "residual", "p"), [((3, 7), FP32, True, 0.5), ((2, 1023), BF16, True, 0.1), ((5, 1000), FP16, False, 0.3)])
def test_dropout(shape, dtype, residual, p, kernel, device):
    x, add, d_out = (torch.randn(*shape[::-1], device=device).to(dtype).T for _ in range(3))
    leaves = [x.detach().requires_grad_(), *([add.detach().requires_grad_()] if residual else [])]
    how = Dropout(p, 3**35, 11)
    out = dropout_add(leaves[0], leaves[1] if residual else None, how, kernel=kernel)
    grads = torch.autograd.grad(out, leaves, d_out)
    kept = philox.kept_elements(p, philox.draw(device, *how[1:]), x.numel()).view(shape)
    truth = torch.where(kept, x.double() / (1 - p), 0) + (add.double() if residual else 0)
    low = torch.where(kept, x / (1 - p), 0) + (add if residual else 0)
    assert_as_good_as_torch(out.detach(), low, truth)
    assert_as_good_as_torch(grads[0], torch.where(kept, d_out / (1 - p), 0), torch.where(kept, d_out.double() / (1 - p), 0), slack=3.0)
    assert not residual or torch.equal(grads[1], d_out)
    assert torch.equal(out, dropout_add(*leaves, *([] if residual else [None]), how, kernel=kernel))


def test_what_is_kept(device):
    state = philox.draw(device, 1, 2)
    kept = philox.kept_elements(0.3, state, 40_001)
    assert kept.shape == (40_001,) and abs(kept.float().mean() - 0.7) < 5 * (0.21 / 40_001) ** 0.5
    assert torch.equal(kept[:500], philox.kept_elements(0.3, state, 500))
    others = [philox.kept_elements(0.3, philox.draw(device, *of), 500) for of in ((1, 3), (2, 2), (1 << 40, 2))]
    assert all((kept[:500] != other).float().mean() > 0.3 for other in others)
    x = torch.randn(4, 5, device=device)
    assert dropout_add(x, None, Dropout(0.5), training=False) is x and torch.equal(dropout_add(x, x, Dropout(0.0)), 2 * x)
    drawn = [dropout_add(torch.ones(1000, device=device), None, Dropout(0.5)) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_normal_noise(device):
    noise = philox.normal(philox.draw(device, 5, 0), 50_001, torch.tensor([3], device=device)).double()
    assert noise.shape == (50_001,) and abs(noise.mean()) < 0.02 and abs(noise.var() - 1) < 0.03 and abs((noise**4).mean() - 3) < 0.2
    assert abs((noise[:-1] * noise[1:]).mean()) < 0.02
    assert not torch.equal(noise, philox.normal(philox.draw(device, 5, 0), 50_001, torch.tensor([4], device=device)).double())


# ---- Hadamard


@functools.lru_cache(2)
def walsh(width, device):
    at = torch.arange(width, device=device)
    bits = at[:, None] & at
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return (1 - 2 * (bits & 1)).double()


def product(x, most=4096):
    """With the matrix, or beyond so many columns with two that it is the Kronecker product of."""
    rows, width = x.shape
    inner = width if width <= most else 256
    left, right = (walsh(n, x.device).to(x.dtype) for n in (width // inner, inner))
    return (left @ (x.view(rows, -1, inner) @ right)).reshape(rows, width) * width**-0.5


def check_hadamard(rows, width, dtype, kernel, device):
    x = poisoned((rows, width + 8), dtype, device)[:, 8:].copy_(torch.randn(rows, width, device=device))
    leaf, d_out = x.detach().requires_grad_(), torch.randn(rows, width, device=device).to(dtype)
    out = hadamard(leaf, kernel=kernel)
    (grad,) = torch.autograd.grad(out, leaf, d_out)
    part = slice(-64, None)
    for ours, of in ((out.detach(), x), (grad, d_out)):
        truth, low = (product(of[part].to(like)) for like in (torch.float64, dtype))
        assert_as_good_as_torch(ours[part], low, truth)


@pytest.mark.parametrize("kernel", kernels(HADAMARD)[1:])
@pytest.mark.parametrize(("rows", "width", "dtype"), [(3, 1, FP32), (5, 2, BF16), (300, 64, FP32), (3, 128, FP16), (2, 2048, BF16), (1, 4096, FP32)])
def test_hadamard(rows, width, dtype, kernel, device):
    check_hadamard(rows, width, dtype, kernel, device)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "kernel"),
    [
        (3, 2048, BF16, "gluon_hadamard"),
        (5, 4096, FP16, "gluon_hadamard"),
        (5, 4096, FP32, "gluon_hadamard"),
        (300_000, 8192, BF16, "gluon_hadamard"),
        (150_001, 16384, BF16, "gluon_hadamard"),
        (75_001, 32768, BF16, "gluon_hadamard"),
        (1, 16384, FP16, "gluon_hadamard"),
        (5, 32768, FP16, "gluon_hadamard"),
        (601, 32768, FP16, "gluon_hadamard"),
        (4099, 32768, FP32, "gluon_hadamard"),
        (3, 16384, FP32, "gluon_hadamard"),
        (300_000, 8192, BF16, "triton_hadamard"),
        (70_001, 128, BF16, "triton_hadamard"),
    ],
)
@pytest.mark.gpu
@pytest.mark.large
def test_large_hadamard(rows, width, dtype, kernel, device):
    check_hadamard(rows, width, dtype, kernel, device)


@pytest.mark.parametrize(("width", "dtype"), [(2048, FP16), (4096, BF16), (4096, FP32), (16384, BF16), (32768, BF16), (32768, FP32)])
def test_six_bits_at_a_time(width, dtype):
    """The text of the kernel for Hopper in the emulator, rows apart by more than their width; each bit of the column is added along once, in registers or by
    the product."""
    kernel = Emulator("slow loads").load("onchip.kernels.fused.gluon_hadamard")
    x = poisoned((2, width + 16), dtype, "cpu")[:, 16:].copy_(torch.randn(2, width))
    problem = Rows("hadamard", 2, width, dtype)
    ours = kernel.launch(problem, kernel.configs(problem, GPUS["H200"])[0], x)
    truth = product(x.double(), 256)
    assert_as_good_as_torch(ours, product(x, 256) if dtype == FP32 else truth.to(dtype), truth)
    columns, passes = min(width, kernel.WHOLE), kernel.passes(min(width, kernel.WHOLE), x.element_size())
    done = kernel.PRODUCT if kernel.multiplied(columns, x.element_size()) else ()
    assert sorted([*done, *(bit for _, added in passes for bit in added)]) == list(range(columns.bit_length() - 1))
    assert all(len(set(held)) == kernel.HELD and set(added) <= set(held) for held, added in passes)


@pytest.mark.parametrize("mode", ["slow loads", "slow products"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_by_products(dtype, mode):
    """The text of the kernel for Hopper in the emulator: two programs that stay, an odd number of rows, apart by more than their width."""
    rows, width = 5, 32768
    kernel = Emulator(mode).load("onchip.kernels.hopper", "onchip.kernels.fused.hopper_hadamard")
    x = poisoned((rows, width + 16), dtype, "cpu")[:, 16:].copy_(torch.randn(rows, width))
    ours = poisoned((rows, width), dtype, "cpu")
    kernel.launch(Rows("hadamard", rows, width, dtype), kernel.Tiles(2), x, ours)
    truth = product(x.double(), 256)
    assert_as_good_as_torch(ours, truth.to(dtype), truth)


def test_wrong_arguments(device):
    x, ids = torch.zeros(2, 6, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for call, message in (
        (lambda: embedding(x, x), "ids are torch.float32"),
        (lambda: embedding(ids, x[0]), r"weight is \[6\]"),
        (lambda: embedding(ids, x, padding_idx=2), "padding_idx=2 is no row"),
        (lambda: dropout_add(x, None, Dropout(1.0)), "dropout 1.0 is not a probability below 1"),
        (lambda: dropout_add(x, None, Dropout(0.5, 1 << 63)), "give a seed of 63 bits or None, and an offset of 32 bits"),
        (lambda: dropout_add(x, x[:1], Dropout(0.5)), "must be equal"),
        (lambda: hadamard(x), "width 6 is no power of two; pad x to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_rows_of_no_width(device):
    weight = torch.ones(5, 0, device=device, requires_grad=True)
    embedding(torch.tensor([1], device=device), weight).sum().backward()
    assert weight.grad.shape == (5, 0)


def test_as_torch_embeds(device):
    ids, weight = torch.randint(9, (4, 3), device=device), torch.randn(9, 5, device=device, dtype=torch.float64)
    assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))
