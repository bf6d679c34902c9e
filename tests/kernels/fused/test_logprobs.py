"""Log-probabilities against float64, and their order."""

import pytest
import torch

from judge import assert_as_good_as_torch
from onchip.core.problem import Rows
from onchip.kernels.fused import LOG_PROBS
from onchip.ops.sampling import log_probs

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in LOG_PROBS.kernels]
PROBLEMS = [Rows("log_probs", 3, vocab, dtype, f"top {top}") for vocab, top, dtype in ((1, 1, FP32), (63, 20, BF16), (5003, 4, FP32), (9001, 20, BF16))]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    """Of bfloat16 many logits are equal: their indices rise."""
    rows, vocab, top = problem.rows, problem.width, int(problem.variant.split()[1])
    padded = torch.full((rows, 2 * vocab), torch.nan, device=device, dtype=problem.dtype)
    logits = padded[:, ::2].copy_(3 * torch.randn(rows, vocab, device=device))
    tokens = torch.randint(vocab, (rows,), device=device)
    found = log_probs(logits, tokens, top, kernel=kernel)
    truth, low = (torch.log_softmax(logits.to(dtype), -1) for dtype in (torch.float64, FP32))
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(found.ids, order)
    assert_as_good_as_torch(found.top, low.gather(1, order), truth.gather(1, order))
    at = tokens.unsqueeze(1)
    assert_as_good_as_torch(found.chosen, low.gather(1, at).squeeze(1), truth.gather(1, at).squeeze(1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_logits_share_costs_no_digits(kernel, device):
    logits, tokens = torch.randint(4, (3, 70), device=device).float(), torch.arange(3, device=device)
    near, far = (log_probs(x, tokens, 4, kernel=kernel) for x in (logits, logits + 2**20))
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite(kernel, device):
    """NaN counts as -inf, and comes after all others; a row of -inf has -inf alone."""
    logits = torch.full((2, 70), -torch.inf, device=device)
    logits[0, :3] = torch.tensor([1.0, torch.nan, 1.0], device=device)
    found = log_probs(logits, torch.tensor([1, 5], device=device), 4, kernel=kernel)
    assert found.chosen.tolist() == [-torch.inf, -torch.inf]
    half = torch.tensor(0.5).log().item()
    assert found.top[0].tolist() == pytest.approx([half, half, -torch.inf, -torch.inf]) and found.top[1].tolist() == [-torch.inf] * 4
    assert found.ids.tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_outside_the_vocabulary(kernel, device):
    logits = torch.zeros(4, 8, device=device)
    found = log_probs(logits, torch.tensor([7, 8, -1, 1 << 40], device=device), kernel=kernel)
    assert found.chosen.tolist() == [pytest.approx(-2.0794415), *[-torch.inf] * 3]


def test_as_registered():
    """In a compiled graph too: float32, and indices without gaps, whatever the logits are."""
    logits = torch.randn(3, 9, dtype=torch.float64)
    torch.library.opcheck(torch.ops.onchip.log_probs.default, (logits, torch.tensor([1, 8, 0]), 2, "reference"), test_utils=("test_schema", "test_faketensor"))


def test_errors():
    logits, tokens = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^log_probs: top=10 of a vocabulary of 9; give 0 to 9"):
        log_probs(logits, tokens, 10)
    with pytest.raises(ValueError, match=r"^log_probs: tokens are torch.int64 \[1\]; give int64 \[2\]"):
        log_probs(logits, tokens[:1])
    for shape in ((2, 0), (2,)):
        with pytest.raises(ValueError, match=r"^log_probs: logits are \[2(, 0)?\]; give \[rows, vocab\], vocab at least 1"):
            log_probs(torch.zeros(shape), tokens)


@pytest.mark.parametrize("kernel", [pytest.param("triton_logprobs", marks=[pytest.mark.gpu, pytest.mark.large])])
def test_large(kernel, device):
    logits = torch.randn(64, 128256, device=device).to(BF16)
    tokens = torch.randint(128256, (64,), device=device)
    ours, theirs = (log_probs(logits, tokens, 20, kernel=name) for name in (kernel, "reference"))
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=2e-6, atol=2e-6)
