"""Penalties, bias and bit mask against the formula in float64, entry by entry."""

import pytest
import torch

from judge import assert_as_good_as_torch
from onchip.core.problem import Rows
from onchip.kernels.fused import ADJUST_LOGITS
from onchip.ops.sampling import Bias, Penalties, TokenIds, adjust_logits

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in ADJUST_LOGITS.kernels]
PARTS = ("penalties prompt bias mask", "penalties", "bias", "mask", "")
PROBLEMS = [Rows("adjust_logits", 3, vocab, BF16, PARTS[0]) for vocab in (1, 63)] + [Rows("adjust_logits", 3, 5003, FP32, parts) for parts in PARTS]


def given(problem, device):
    """Arguments of `adjust_logits`, with a list of tokens seen by each row, of those in the prompt, and the allowed ones [rows, vocab]."""
    rows, vocab, parts = problem.rows, problem.width, problem.variant.split()
    output, prompt = (torch.randint(-1, vocab, (rows, 40), device=device) for _ in range(2))
    output[:, 7] = output[:, 6]
    rates = [torch.tensor(rate, device=device) for rate in ([1.3, 1.0, 0.7], [0.5, -0.25, 0.0], [0.1, 0.0, 2.0])]
    biased = torch.stack([torch.randperm(vocab, device=device)[:5] for _ in range(rows)])
    biased[1, 0] = -1
    allowed = torch.rand(rows, vocab, device=device) < 0.5
    bits = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(rows, -1, 32).long() << torch.arange(32, device=device)
    call = {
        "penalties": Penalties(*rates, TokenIds(output), TokenIds(prompt) if "prompt" in parts else None) if "penalties" in parts else None,
        "bias": Bias(biased, torch.randn(biased.shape, device=device)) if "bias" in parts else None,
        "mask": bits.sum(-1).to(torch.int32) if "mask" in parts else None,
    }
    return call, allowed


def by_hand(logits, call, allowed, dtype):
    x = logits.to(dtype).clone()
    for row in range(len(x)):
        if call["bias"]:
            for at, value in zip(*(field[row].tolist() for field in call["bias"]), strict=True):
                if at >= 0:
                    x[row, at] += value
        if call["penalties"]:
            repetition, presence, frequency = (rate[row].item() for rate in call["penalties"][:3])
            output = [token for token in call["penalties"].output.ids[row].tolist() if token >= 0]
            prompt = [token for token in call["penalties"].prompt.ids[row].tolist() if token >= 0] if call["penalties"].prompt else []
            for token in {*output, *prompt}:
                x[row, token] = x[row, token] / repetition if x[row, token] > 0 else x[row, token] * repetition
                x[row, token] -= frequency * output.count(token) + presence * (token in output)
    return x.masked_fill(~allowed, -torch.inf) if call["mask"] is not None else x


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    padded = torch.full((problem.rows, problem.width + 9), torch.nan, device=device, dtype=problem.dtype)
    logits = padded[:, : problem.width].copy_(torch.randn(problem.rows, problem.width, device=device))
    before, (call, allowed) = padded.clone(), given(problem, device)
    ours = adjust_logits(logits, **call, kernel=kernel)
    truth, low = (by_hand(logits, call, allowed, dtype) for dtype in (torch.float64, FP32))
    assert_as_good_as_torch(ours, low.to(problem.dtype), truth)
    assert torch.equal(padded.nan_to_num(), before.nan_to_num())
    if call["penalties"]:
        counts = [ids and torch.stack([row[row >= 0].bincount(minlength=problem.width) for row in ids.ids]).int() for ids in call["penalties"][3:]]
        assert torch.equal(adjust_logits(logits, **call | {"penalties": Penalties(*call["penalties"][:3], *counts)}, kernel=kernel), ours)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_new_logits_where_nothing_is_given(dtype, kernel, device):
    """Rows in order, as the registered operator says, also of logits that are columns in order."""
    for logits in (torch.randn(2, 40, device=device).to(dtype), torch.randn(40, 2, device=device).to(dtype).t()):
        ours = adjust_logits(logits, kernel=kernel)
        assert torch.equal(ours, logits) and ours.data_ptr() != logits.data_ptr() and ours.is_contiguous()


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_outside_the_vocabulary(kernel, device):
    """Are none, below it and past it."""
    logits, rate = torch.randn(1, 40, device=device), torch.full((1,), 1.5, device=device)
    outside, inside = (torch.tensor([ids], device=device) for ids in ([3, 40, -2, 1 << 40], [3, -1, -1, -1]))
    values = torch.ones(1, 4, device=device)
    ours, expected = (
        adjust_logits(logits, penalties=Penalties(rate, rate, rate, TokenIds(ids), TokenIds(ids)), bias=Bias(ids, values), kernel=kernel)
        for ids in (outside, inside)
    )
    assert torch.equal(ours, expected)


def test_errors():
    logits, rate = torch.zeros(2, 40), torch.ones(2)
    counts = torch.zeros(2, 40, dtype=torch.int32)
    for call, words in (
        ({"mask": torch.zeros(2, 1, dtype=torch.int32)}, r"mask is torch.int32 \[2, 1\]; give int32 \[2, 2\], a bit a token"),
        ({"penalties": Penalties(rate, rate, rate[:1], counts)}, r"penalties.frequency is torch.float32 \[1\]; give float32 \[2\]"),
        ({"penalties": Penalties(rate, rate, rate, None, counts)}, r"penalties.output is None; give counts or TokenIds \(of no tokens: int64 \[2, 0\]\)"),
        ({"penalties": Penalties(rate, rate, rate, counts.long())}, r"penalties.output is torch.int64 \[2, 40\]; give counts int32 \[2, 40\], or TokenIds"),
        ({"penalties": Penalties(rate, rate, rate, counts, TokenIds(counts))}, r"penalties.prompt has ids torch.int32 \[2, 40\]; give int64 \[2, n\]"),
        ({"bias": Bias(counts.long(), rate)}, r"the bias's ids are torch.int64 \[2, 40\], its values torch.float32 \[2\]; give int64 and float32 \[2, n\]"),
    ):
        with pytest.raises(ValueError, match=f"^adjust_logits: {words}"):
            adjust_logits(logits, **call)
    with pytest.raises(NotImplementedError, match=r"^adjust_logits: gradients are not implemented"):
        adjust_logits(logits, penalties=Penalties(rate.clone().requires_grad_(), rate, rate, counts))
    for shape in ((2, 0), (2,)):
        with pytest.raises(ValueError, match=r"^adjust_logits: logits are \[2(, 0)?\]; give \[rows, vocab\], vocab at least 1"):
            adjust_logits(torch.zeros(shape))
