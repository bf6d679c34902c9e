"""Cross-entropy of logits: figures of rows, gradients in the backward pass and in place, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, hardware, poisoned
from onchip import LossTerms, cross_entropy
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.dispatch import record
from onchip.kernels.fused import CROSS_ENTROPY

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in CROSS_ENTROPY.kernels]
TRITON = pytest.param("triton_cross_entropy", marks=[pytest.mark.gpu, pytest.mark.large])
IGNORED = -7

TERMS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "weights": {"smoothing": 0.2, "class_weights": True},
    "softcap": {"softcap": 2.0, "temperature": 0.7},
    "z_loss": {"z_loss": 1e-2, "class_weights": True},
}
SIZES = ((1, 1), (3, 7), (3, 1000), (3, 8201), (1, 20000))  # pieces of 2,048 to 8,192


def terms_of(name, width, device):
    terms = LossTerms(**TERMS[name], ignore_index=IGNORED)
    return terms._replace(class_weights=torch.rand(width, device=device) + 0.1) if terms.class_weights else terms


def inputs(rows, width, dtype, device):
    """Logits as columns of a wider matrix that holds NaN, and targets, of which one is ignored; its row is NaN too."""
    logits = poisoned((rows, width + 16), dtype, device)[:, 16:].copy_(3 * torch.randn(rows, width, device=device))
    targets = torch.randint(width, (rows,), device=device)
    if rows > 1:
        targets[1], logits[1] = IGNORED, torch.nan
    return logits, targets


def textbook(logits, targets, terms, reduction="mean"):
    kept = targets != IGNORED
    z = logits.masked_fill(~kept[:, None], 0)
    z = (terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z) / terms.temperature
    weights = None if terms.class_weights is None else terms.class_weights.to(z.dtype)
    loss = F.cross_entropy(z, targets, weights, ignore_index=IGNORED, label_smoothing=terms.smoothing, reduction="none")
    loss = loss + terms.z_loss * z.logsumexp(-1).square() * kept
    if reduction == "none":
        return loss
    return loss.sum() / (kept.sum() if weights is None else weights[targets.clamp(min=0)][kept].sum())


def gradient(loss_of, logits, g=1.5):
    """The loss and the gradient of logits, by way of a tensor that is no leaf."""
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf * 1)
    (d,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, g))
    return loss.detach(), d


def check(rows, width, dtype, name, kernel, device):
    logits, targets = inputs(rows, width, dtype, device)
    terms = terms_of(name, width, device)
    truth, d_truth = gradient(lambda x: textbook(x, targets, terms), logits.double())
    low, _ = gradient(lambda x: textbook(x, targets, terms), logits.float())
    _, d_low = gradient(lambda x: textbook(x.float(), targets, terms), logits)
    for in_place in (False, True)[: 1 if dtype == FP16 else 2]:
        loss, d = gradient(lambda x, in_place=in_place: cross_entropy(x, targets, terms, in_place=in_place, kernel=kernel), logits)
        assert loss.dtype == FP32 and d.dtype == dtype
        assert_as_good_as_torch(loss, (low, *hardware(truth, FP32, device)), truth)
        assert_as_good_as_torch(d, d_low, d_truth, slack=3)
        assert d[targets == IGNORED].eq(0).all()
    each = cross_entropy(logits, targets, terms, reduction="none", kernel=kernel)
    exact = textbook(logits.double(), targets, terms, "none")
    assert_as_good_as_torch(each, (textbook(logits.float(), targets, terms, "none"), *hardware(exact, FP32, device)), exact)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_against_float64(rows, width, name, kernel, device):
    for dtype in (FP32, BF16) if width > 7 else (FP32, BF16, FP16):
        check(rows, width, dtype, name, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("rows", "width"), [(3, 131072), (1, 262144), (4096, 4096), (1031, 50257), (300, 128256), (3000, 65536)])
def test_large(rows, width, name, kernel, device):
    check(rows, width, BF16, name, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_2_to_the_31_logits(in_place, kernel, device):
    """The last rows, as when they are alone."""
    logits = torch.randn(33000, 65536, device=device, dtype=BF16).requires_grad_()
    targets = torch.randint(65536, (33000,), device=device)
    (d,) = torch.autograd.grad(cross_entropy(logits * 1, targets, reduction="sum", in_place=in_place, kernel=kernel), logits)
    alone = logits[-5:].detach().requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(alone * 1, targets[-5:], reduction="sum", in_place=in_place, kernel=kernel), alone)
    assert torch.equal(d[-5:], expected)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("kernel", ["reference"])
def test_gradcheck(name, kernel, device):
    terms = terms_of(name, 7, device)
    terms = terms._replace(class_weights=None if terms.class_weights is None else terms.class_weights.double())
    targets = torch.tensor([2, IGNORED, 6], device=device)
    x = torch.randn(3, 7, device=device, dtype=FP64, requires_grad=True)
    for reduction in ("mean", "sum", "none"):
        assert torch.autograd.gradcheck(lambda x, r=reduction: cross_entropy(x, targets, terms, reduction=r, kernel=kernel), x)
    torch.testing.assert_close(cross_entropy(x, targets, terms, kernel=kernel), textbook(x, targets, terms), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("in_place", [False, True])
def test_targets_that_are_no_class_are_nan_and_nobody_elses(kernel, in_place, device):
    logits, terms = torch.randn(4, 100, device=device), LossTerms(ignore_index=IGNORED)
    for wrong in (100, -1, 1 << 40):
        targets = torch.tensor([5, wrong, IGNORED, 99], device=device)
        loss, d = gradient(lambda x, t=targets: cross_entropy(x, t, terms, reduction="sum", in_place=in_place, kernel=kernel), logits)
        assert loss.isnan() and d[1].isnan().all() and not d[[0, 2, 3]].isnan().any()
        each = cross_entropy(logits, targets, terms, reduction="none", kernel=kernel)
        assert each.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("kernel", KERNELS)
def test_class_weights_of_another_dtype(kernel, device):
    logits, targets = torch.randn(2, 300, device=device), torch.tensor([1, 299], device=device)
    weights = torch.rand(300, device=device).to(BF16)
    for smoothing in (0.0, 0.3):
        losses = [cross_entropy(logits, targets, LossTerms(smoothing, class_weights=weights.to(d)), kernel=kernel) for d in (BF16, FP32, FP64)]
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[1], losses[2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_rows_ignored(kernel, in_place, device):
    """The mean of nothing is NaN, as torch has it, the sum 0; no gradient of either is NaN."""
    targets = torch.full((3,), -100, device=device)
    for reduction in ("mean", "sum"):
        loss, d = gradient(lambda x, r=reduction: cross_entropy(x, targets, reduction=r, in_place=in_place, kernel=kernel), torch.randn(3, 40, device=device))
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert d.eq(0).all()
    assert cross_entropy(torch.randn(0, 40, device=device), targets[:0], reduction="sum", kernel=kernel) == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinite_and_shifted_logits(kernel, device):
    """-inf is a class that cannot be; a part common to all logits costs no digits of a float32 loss."""
    x = torch.randn(2, 300, device=device)
    targets = torch.tensor([1, 299], device=device)
    gone = x.clone()
    gone[:, 100:200] = -torch.inf
    loss, d = gradient(lambda x: cross_entropy(x, targets, kernel=kernel), gone)
    truth, d_truth = gradient(lambda x: F.cross_entropy(x, targets), gone.double())
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(d.double(), d_truth, rtol=1e-5, atol=1e-7)
    assert cross_entropy(gone, targets + 100 * (targets == 1), reduction="none", kernel=kernel)[0] == torch.inf
    assert cross_entropy(torch.full_like(x, -torch.inf), targets, kernel=kernel).isnan() and cross_entropy(x * torch.nan, targets, kernel=kernel).isnan()
    shifted = x.mul(64).round().div(64) + 1024  # exact
    torch.testing.assert_close(cross_entropy(shifted, targets, kernel=kernel), cross_entropy(shifted - 1024, targets, kernel=kernel), rtol=3e-7, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_and_leading_dimensions(kernel, device):
    x, targets = torch.randn(2, 3, 40, device=device), torch.randint(40, (2, 3), device=device)
    expected = cross_entropy(x, targets, reduction="none", kernel=kernel)
    assert expected.shape == (2, 3)
    for y in (x.repeat_interleave(2, -1)[..., ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(cross_entropy(y, targets, reduction="none", kernel=kernel), expected)


def test_in_place_is_one_launch_and_no_second_tensor(device):
    """The memory of the logits holds their gradient; whoever else saved them for a backward pass is told."""
    logits, targets = torch.randn(3, 50, device=device, requires_grad=True), torch.tensor([1, 2, 3], device=device)
    x = logits * 1
    with record() as decisions:
        loss = cross_entropy(x, targets, in_place=True)
    assert [d.problem for d in decisions] == [Rows("cross_entropy_in_place", 3, 50, FP32)]
    torch.testing.assert_close(x.detach(), torch.autograd.grad(F.cross_entropy(logits, targets), logits)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given in its first backward pass"):
        loss.backward()
    y = logits.tanh()  # whose gradient needs its values
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(y, targets, in_place=True).backward()


@pytest.mark.gpu
def test_in_place_is_noticed_on_a_gpu_too(device):
    logits, targets = torch.randn(3, 50, device=device, requires_grad=True), torch.tensor([1, 2, 3], device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(logits.tanh(), targets, in_place=True, kernel="triton_cross_entropy").backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "avg"}, "reduction='avg' is not one of mean, sum, none"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, r"targets is torch.int32 \[3\]; give int64 \[3\]"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"give int64 \[3\]"),
        ({"terms": LossTerms(smoothing=1.5)}, "terms.smoothing is 1.5; give 0 to 1"),
        ({"terms": LossTerms(temperature=0.0)}, "terms.temperature is 0.0; give 1e-30 to 1e30"),
        ({"terms": LossTerms(temperature=1e-40)}, "terms.temperature is 1e-40; give 1e-30 to 1e30"),
        ({"terms": LossTerms(temperature=1e39)}, "terms.temperature is 1e\\+39; give 1e-30 to 1e30"),
        ({"terms": LossTerms(softcap=1e39)}, "terms.softcap is 1e\\+39; give 0 for none, or 1e-30 to 1e30"),
        ({"terms": LossTerms(softcap=math.inf)}, "terms.softcap is inf; give 0 for none, or 1e-30 to 1e30"),
        ({"terms": LossTerms(z_loss=math.inf)}, "terms.z_loss is inf; give 0 or more, but a number"),
        ({"terms": LossTerms(class_weights=torch.ones(5))}, r"terms.class_weights is torch.float32 \[5\]; give a float tensor \[9\]"),
        ({"in_place": True, "reduction": "none"}, "reduction='none' does not know"),
        ({"logits": torch.zeros(3, 0)}, "the vocabulary has 0 words; give at least 1"),
        ({"logits": torch.zeros(())}, r"logits are \[\]; give \[..., vocab\]"),
        ({"in_place": True}, "overwrites logits, which is a leaf"),
        ({"in_place": True, "logits": torch.zeros(3, 9, dtype=FP16, requires_grad=True)}, "in_place=True on float16 would lose gradients"),
    ],
)
def test_bad_arguments(change, words):
    call = {"logits": torch.zeros(3, 9, requires_grad=True), "targets": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=words):
        cross_entropy(**call)


def test_tiles():
    pytest.importorskip("triton")
    from onchip.kernels.fused.cross_entropy import Tiles, configs

    tiles = [configs(Rows(op, 8192, 128256, BF16), gpu("H200")) for op in ("cross_entropy", "cross_entropy_in_place", "cross_entropy_backward")]
    assert tiles == [[Tiles(4096, 8)], [Tiles(8192, 4)], [Tiles(4096, 4)]]
    assert configs(Rows("cross_entropy_in_place", 8, 1 << 19, BF16), gpu("H200")) == [Tiles(16384, 8)]  # 32 programs, which hear each other
    assert configs(Rows("cross_entropy", 3, 7, FP32), gpu("H200")) == [Tiles(128, 1)]
