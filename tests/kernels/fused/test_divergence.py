"""Divergences of a student's logits from a teacher's, and the student's gradient, against float64."""

import pytest
import torch

from judge import assert_as_good_as_torch, hardware, poisoned
from onchip import divergence
from onchip.kernels.fused import DIVERGENCE

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in DIVERGENCE.kernels]
BETAS = (0.0, 0.3, 1.0)


def textbook(student, teacher, beta, temperature, counts):
    """By the definition, D(a, b) = sum a (log a - log b)."""
    log_q, log_p = ((t / temperature).log_softmax(-1) for t in (student, teacher))
    q, p = log_q.exp(), log_p.exp()
    log_m = log_p if beta == 1 else log_q if beta == 0 else (beta * p + (1 - beta) * q).log()
    loss = beta * (p * (log_p - log_m)).sum(-1) * (beta < 1) + (1 - beta) * (q * (log_q - log_m)).sum(-1) * (beta > 0)
    loss = loss + (p * (log_p - log_q)).sum(-1) * (beta == 0) + (q * (log_q - log_p)).sum(-1) * (beta == 1)
    return loss[counts].mean()


def by_hand(student, teacher, beta, counts):
    """The gradient by its formula in float32: a second way, as what autograd's errs is a matter of chance."""
    log_q, log_p = ((t.float() / 1.5).log_softmax(-1) for t in (student, teacher))
    q = log_q.exp()
    if beta == 0:
        d = q - log_p.exp()
    else:
        ratio = log_q - (log_p if beta == 1 else (beta * log_p.exp() + (1 - beta) * q).log())
        d = (beta if beta == 1 else 1 - beta) * (q * ratio - q * (q * ratio).sum(-1, keepdim=True))
    return (d * counts[:, None]) / counts.sum()  # g is 1.5, as the temperature


def check(rows, width, dtype, beta, kernel, device):
    """Rows that do not count are NaN."""
    both = [poisoned((rows, width + 16), dtype, device)[:, 16:].copy_(2 * torch.randn(rows, width, device=device)) for _ in range(2)]
    counts = torch.ones(rows, dtype=torch.bool, device=device)
    if rows > 1:
        counts[1] = False
        both[0][1] = both[1][1] = torch.nan
    clean = [t.nan_to_num() for t in both]
    student = both[0].clone().requires_grad_()
    loss = divergence(student, both[1], beta=beta, temperature=1.5, counts=counts, kernel=kernel)
    (d,) = torch.autograd.grad(1.5 * loss, student)
    leaf, exact, wide = clean[0].clone().requires_grad_(), clean[0].double().requires_grad_(), clean[0].float()
    truth = textbook(exact, clean[1].double(), beta, 1.5, counts)
    (d_truth,) = torch.autograd.grad(1.5 * truth, exact)
    (d_low,) = torch.autograd.grad(1.5 * textbook(leaf.float(), clean[1].float(), beta, 1.5, counts), leaf)
    low = textbook(wide, clean[1].float(), beta, 1.5, counts)
    # a row's figure is a difference of logarithms of about log(width) + 2 and the largest logit, each rounded
    scale = truth + torch.finfo(FP32).eps * wide.abs().max()
    assert_as_good_as_torch(loss.detach(), (low, scale, *hardware(truth, FP32, device)), truth.detach())
    assert_as_good_as_torch(d, (d_low, by_hand(*clean, beta, counts).to(dtype)), d_truth, slack=3)
    assert d[~counts].eq(0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("rows", "width"), [(3, 7), (3, 1000), (4, 8201)])
def test_against_float64(rows, width, beta, kernel, device):
    for dtype in (FP32, BF16) if width > 7 else (FP32, BF16, FP16):
        check(rows, width, dtype, beta, kernel, device)


@pytest.mark.parametrize("kernel", [pytest.param("triton_divergence", marks=[pytest.mark.gpu, pytest.mark.large])])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("rows", "width"), [(3, 131072), (1031, 50257), (1, 262144)])
def test_large(rows, width, beta, kernel, device):
    check(rows, width, BF16, beta, kernel, device)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta, device):
    student, teacher = torch.randn(3, 6, device=device, dtype=FP64, requires_grad=True), torch.randn(3, 6, device=device, dtype=FP64)
    assert torch.autograd.gradcheck(lambda x: divergence(x, teacher, beta=beta, temperature=0.7, reduction="none", kernel="reference"), student)


@pytest.mark.parametrize("kernel", KERNELS)
def test_words_that_cannot_be(kernel, device):
    """A word that only the student cannot say is infinitely far from the teacher, and no further than log 2 from the mixture."""
    student, teacher = torch.zeros(1, 4, device=device), torch.zeros(1, 4, device=device)
    student[0, 0] = -torch.inf
    assert divergence(student, teacher, beta=0.0, kernel=kernel) == torch.inf
    torch.testing.assert_close(divergence(student, teacher, beta=1.0, kernel=kernel), torch.tensor(4 / 3, device=device).log())
    assert 0 < divergence(student, teacher, kernel=kernel) < 0.7
    assert divergence(student, student, kernel=kernel) == 0
    student[0, 0] = -300.0  # whose share of the mixture is the teacher's alone
    torch.testing.assert_close(
        divergence(student, teacher, kernel=kernel), textbook(student, teacher, 0.5, 1.0, torch.ones(1, dtype=torch.bool, device=device))
    )
    assert divergence(teacher, teacher, counts=torch.zeros(1, dtype=torch.bool, device=device), kernel=kernel).isnan()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_rows_that_are_no_distribution(beta, kernel, device):
    """A logit of NaN, and a row of -inf: both sides' make the loss and the row's gradient NaN, and no other row's."""
    student, teacher = torch.randn(5, 6, device=device), torch.randn(5, 6, device=device)
    student[0, 2] = teacher[1, 3] = torch.nan
    student[2] = teacher[3] = -torch.inf
    loss = divergence(student.requires_grad_(), teacher, beta=beta, reduction="none", kernel=kernel)
    assert loss[:4].isnan().all() and loss[4].isfinite()
    (d,) = torch.autograd.grad(loss, student, torch.ones_like(loss))
    assert d[:4].isnan().any(-1).all() and d[4].isfinite().all()


def test_bad_arguments():
    x = torch.zeros(2, 5)
    for call, words in (
        (lambda: divergence(x, x[:1]), "they must be equal"),
        (lambda: divergence(x[:, :0], x[:, :0]), r"are \[2, 0\]; give \[..., vocab\], vocab at least 1"),
        (lambda: divergence(x[0, 0], x[0, 0]), r"are \[\]; give \[..., vocab\], vocab at least 1"),
        (lambda: divergence(x, x, beta=2.0), "beta is 2.0; give 0 to 1"),
        (lambda: divergence(x, x.clone().requires_grad_()), r"give teacher.detach\(\)"),
        (lambda: divergence(x, x, counts=torch.ones(2)), r"counts is torch.float32 \[2\]; give bools \[2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
