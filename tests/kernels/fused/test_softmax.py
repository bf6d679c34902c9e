"""Softmax and its logarithm with temperature and mask, forward and backward, against float64."""

import pytest
import torch

from judge import assert_as_good_as_torch, hardware, poisoned
from onchip import log_softmax, softmax
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.dispatch import record
from onchip.kernels.fused import SOFTMAX

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in SOFTMAX.kernels]
TRITON = pytest.param("triton_softmax", marks=[pytest.mark.gpu, pytest.mark.large])
FUNCTIONS = {"softmax": (softmax, torch.softmax), "log_softmax": (log_softmax, torch.log_softmax)}
MASKS = ("", "bools", "floats", "bools of rows")


def mask_of(kind, shape, device):
    """The last one hides some columns of a row, and broadcasts over one dimension in the middle."""
    if kind == "floats":
        return torch.randn(shape[-1], device=device)
    if not kind:
        return None
    mask = torch.rand(shape if kind == "bools" else (*shape[:-2], 1, shape[-1]), device=device) > 0.3
    mask[..., 0] = True
    return mask


def reference(of, x, mask, temperature):
    z = x / temperature
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    return of(z, -1)


def by_hand(name, y, d):
    """The gradient of x from torch's result, rounded as that is: a second way, as a row's error is that of one or two differences that cancel."""
    y, g = y.float(), d.float()
    g = g - y.exp() * g.sum(-1, keepdim=True) if name == "log_softmax" else y * g - y * (y * g).sum(-1, keepdim=True)
    return (g / 0.7).to(d.dtype)


def check(shape, dtype, name, kind, kernel, device):
    """What a mask of bools hides is NaN; its gradient is 0."""
    ours, textbook = FUNCTIONS[name]
    mask = mask_of(kind, shape, device)
    shown = torch.ones(shape, dtype=torch.bool, device=device) if mask is None or mask.dtype != torch.bool else mask.expand(shape)
    clean = (3 * torch.randn(shape, device=device)).to(dtype)
    x = poisoned((*shape[:-1], shape[-1] + 16), dtype, device)[..., 16:].copy_(clean.masked_fill(~shown, torch.nan)).detach().requires_grad_()
    d = torch.randn(shape, device=device).to(dtype).masked_fill(~shown, 0)
    y = ours(x, temperature=0.7, mask=mask, kernel=kernel)
    low, exact = (clean.to(t, copy=True).requires_grad_() for t in (dtype, FP64))
    of_low, truth = reference(textbook, low, mask, 0.7), reference(textbook, exact, mask, 0.7)
    assert y.shape == shape and y.dtype == dtype
    assert_as_good_as_torch(y, (of_low.to(dtype), *hardware(truth, dtype, device)), truth)
    y.backward(d)
    of_low.backward(d.to(of_low.dtype))
    truth.backward(d.double())
    assert_as_good_as_torch(x.grad, (low.grad, by_hand(name, of_low.detach().to(dtype), d)), exact.grad, slack=3)
    assert x.grad[~shown].eq(0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (2, 2, 2, 63), (9, 1000), (2, 40000)], ids=str)
def test_against_float64(shape, name, kind, kernel, device):
    for dtype in (FP32, BF16) if shape[-1] > 7 else (FP32, BF16, FP16):
        check(shape, dtype, name, kind, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("kind", ["", "bools"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 131072), (1, 262144), (70, 65536), (4096, 4096), (300000, 8192)], ids=str)
def test_large(shape, name, kind, kernel, device):
    if shape[0] > 100000:  # rows beyond 2^31 elements, without an oracle of 20 GB
        x = torch.randn(shape, device=device, dtype=BF16)
        y = FUNCTIONS[name][0](x, kernel=kernel)
        torch.testing.assert_close(y[-5:], FUNCTIONS[name][1](x[-5:], -1))
    else:
        check(shape, BF16, name, kind, kernel, device)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name, device):
    x = torch.randn(2, 5, device=device, dtype=FP64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True], device=device)
    assert torch.autograd.gradcheck(lambda x: FUNCTIONS[name][0](x, temperature=0.7, mask=mask, kernel="reference")[:, mask], x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [70, 40000])
def test_a_row_with_nothing_left(width, kernel, device):
    """0, its logarithm -inf, and no gradient, also where one is given that is NaN; but NaN among logits is seen."""
    x = torch.randn(3, width, device=device)
    x[1] = -torch.inf
    mask = torch.ones(3, 1, dtype=torch.bool, device=device)
    mask[2] = False
    for name, nothing in (("softmax", 0), ("log_softmax", -torch.inf)):
        leaf = x.clone().requires_grad_()
        y = FUNCTIONS[name][0](leaf, mask=mask, kernel=kernel)
        assert y[1:].eq(nothing).all()
        y.backward(torch.ones_like(y).masked_fill_(y == -torch.inf, torch.nan))
        torch.testing.assert_close(leaf.grad[1:], torch.zeros_like(x[1:]))
        x_nan = x.clone().index_fill_(1, torch.tensor([3], device=device), torch.nan)
        assert FUNCTIONS[name][0](x_nan, kernel=kernel).isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_that_lie_anyhow(kernel, device):
    """By strides, broadcast, and where no three strides say it, copied; x and the gradient by any strides."""
    x = torch.randn(2, 2, 2, 2, 9, device=device)
    odd = torch.rand(2, 2, 2, 2, 9, device=device).permute(1, 2, 0, 3, 4) > 0.3
    for mask in (odd, odd[..., :1], odd[:1], odd[:, :1, :, :1], odd[0, 0, 0, 0], torch.rand(2, 2, 2, 2, 18, device=device)[..., ::2]):
        dense = mask.expand(x.shape).contiguous()
        assert torch.equal(softmax(x, mask=mask, kernel=kernel), softmax(x, mask=dense, kernel=kernel))
    y = x.transpose(0, 2).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(softmax(y, kernel=kernel)[..., 0].sum(), y)[0], torch.autograd.grad(y.softmax(-1)[..., 0].sum(), y)[0])
    assert softmax(x[:0], kernel=kernel).shape == (0, 2, 2, 2, 9)


@pytest.mark.gpu
def test_several_rows_a_program(device):
    """The last program has fewer; each row comes out as when it is alone."""
    from onchip.kernels.fused.softmax import Tiles, configs, launch, launch_backward

    p = Rows("softmax", 6, 63, FP32)
    assert configs(p._replace(rows=4096), gpu("H200")) == [Tiles(8, 64, 4)]
    x, d = torch.randn(6, 63, device=device), torch.randn(6, 63, device=device)
    y, alone = (launch(p, Tiles(rows, 64, 4), x, None, 1.0) for rows in (4, 1))
    torch.testing.assert_close(y, alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(*(launch_backward(p, Tiles(rows, 64, 4), y, d, 1.0) for rows in (4, 1)), rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("span", [1, 2, 3])
def test_programs_that_share_a_row(span, device):
    """Of pieces that each go through once, and of several blocks, the first of which are read again; the last program has fewer columns, or none."""
    from onchip.kernels.fused.softmax import Tiles, configs, launch, launch_backward

    assert [configs(Rows("softmax", 9, width, BF16), gpu("A100"))[0].span for width in (1 << 14, 1 << 17, 1 << 18)] == [0, 1, 2]
    p, tiles = Rows("softmax", 3, 1100, FP32), Tiles(1, 256, 1, span)
    x, d = torch.randn(3, 1100, device=device), torch.randn(3, 1100, device=device)
    y = launch(p, tiles, x, None, 1.0)
    torch.testing.assert_close(y, x.softmax(-1))
    torch.testing.assert_close(launch_backward(p, tiles, y, d, 1.0), y * (d - (y * d).sum(-1, keepdim=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [2, 8])
@pytest.mark.parametrize("log", ["", "log"])
def test_clusters_that_share_a_row(log, ctas, device):
    """Some have fewer columns, or none; of a row that is -inf in some, or in all."""
    from onchip.kernels.fused.softmax import Tiles, configs, launch, launch_backward

    assert [configs(Rows("softmax", 9, width, BF16), gpu("H200"))[0].ctas for width in (1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 19)] == [1, 4, 16, 16, 1]
    p, tiles, parted = Rows("softmax", 4, 1100, FP32, log), Tiles(1, 2048 // ctas, 4, 0, ctas), Tiles(1, 1024 // ctas, 4, 0, ctas, 2)
    x, d = torch.randn(4, 1100, device=device), torch.randn(4, 1100, device=device)
    x[1, :700], x[2] = -torch.inf, -torch.inf
    mask = torch.rand(4, 1100, device=device) > 0.5
    for shown in (None, mask):
        truth = reference(FUNCTIONS["log_softmax" if log else "softmax"][1], x.double(), shown, 1.0).nan_to_num(-torch.inf if log else 0.0, neginf=-torch.inf)
        y = launch(p, parted, x, shown, 1.0)
        torch.testing.assert_close(y, truth.float(), rtol=2e-6, atol=1e-6)
        dy = d.double().masked_fill(truth == -torch.inf, 0)
        dx = dy - truth.exp() * dy.sum(-1, keepdim=True) if log else truth * (dy - (truth * dy).sum(-1, keepdim=True))
        torch.testing.assert_close(launch_backward(p, tiles, truth.float(), d, 1.0), dx.float(), rtol=1e-5, atol=1e-5)


def test_the_problems_of_a_call(device):
    x = torch.randn(2, 5, device=device, requires_grad=True)
    with record() as decisions:
        log_softmax(x, mask=torch.ones(5, device=device)).sum().backward()
    assert [d.problem for d in decisions] == [Rows("softmax", 2, 5, FP32, "log mask"), Rows("softmax_backward", 2, 5, FP32, "log")]


def test_bad_arguments():
    x = torch.zeros(2, 5)
    for keywords, words in (
        ({"temperature": 0.0}, "temperature is 0.0; give 1e-30 to 1e30"),
        ({"temperature": 1e-40}, "temperature is 1e-40; give 1e-30 to 1e30"),
        ({"temperature": torch.inf}, "temperature is inf; give 1e-30 to 1e30"),
        ({"mask": torch.ones(3)}, r"mask is \[3\]; give a shape that broadcasts to \[2, 5\]"),
        ({"mask": torch.ones(5, dtype=torch.int32)}, "mask is torch.int32; give bools, or floats without gradients"),
        ({"mask": torch.ones(5, requires_grad=True)}, "which requires gradients"),
    ):
        with pytest.raises(ValueError, match=words):
            softmax(x, **keywords)
    with pytest.raises(ValueError, match="must hold something"):
        softmax(torch.zeros(2, 0))
