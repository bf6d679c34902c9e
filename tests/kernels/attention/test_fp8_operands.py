"""What the backward pass in e4m3 starts from, beside plain torch."""

import pytest
import torch

pytest.importorskip("triton")

import test_fp8_backward as plain

from onchip.core.problem import Attention
from onchip.kernels.attention import fp8_operands

E4M3 = torch.float8_e4m3fn


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "dim", "rows"), [(1, 64, 64), (200, 128, 128), (130, 64, 32)])
def test_turned(length, dim, rows, device):
    """Bytes, of a tensor with strides; past the end zeros."""
    x = torch.randn(2, length, 3, dim, device=device).to(E4M3).transpose(1, 2)
    counters = torch.full((2, 1), 7, dtype=torch.int32, device=device)  # of the tiles that the launch behind draws
    ours, truth = (make(x, rows, counter).view(torch.uint8) for make, counter in zip((fp8_operands.turned, plain.turned), counters, strict=True))
    assert torch.equal(ours, truth) and not counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(("length", "dim"), [(1, 128), (200, 64)])
def test_of_output(length, dim, with_lse, device):
    """Of dO with tokens that are 0 or far smaller than others; rows that saw nothing; a gradient of LSE that is larger than all."""
    out, d_out = (torch.randn(2, length, 4, dim, device=device).bfloat16().transpose(1, 2) for _ in range(2))
    lse, d_lse = torch.randn(2, 4, length, device=device), torch.randn(2, 4, length, device=device)
    given = 0.01 + torch.rand(3, 2, 2, device=device)
    d_out[:, 0, -1], d_out[:, 1, -1], lse[0, 1, 0] = 0, d_out[:, 1, -1] * 2.0**-40, -torch.inf
    d_lse[1, 2, -1] = 1e6
    p = Attention("backward", 2, length, length, 4, 2, dim, E4M3)
    of = [fp8_operands.Relative((), given, torch.zeros(2, 2, device=device)) for _ in range(2)]
    makers = fp8_operands.of_output, plain.of_output
    ours, truth = (make(p, out, d_out, lse, d_lse if with_lse else None, relative, 64) for make, relative in zip(makers, of, strict=True))
    torch.testing.assert_close(of[0].top, of[1].top, rtol=1e-6, atol=0)
    for a, b in zip(ours[:2], truth[:2], strict=True):
        assert a.isnan().sum() == 0 and (a.float() != b.float()).float().mean() < 1e-2  # where a quotient lies between two numbers, they may differ
    for a, b in zip(ours[2:], truth[2:], strict=True):
        a, b = a.clone(), b.clone()
        torch.testing.assert_close(a[1, 2, length - 1], b[1, 2, length - 1], rtol=1e-3, atol=1e-2)
        a[1, 2, length - 1] = b[1, 2, length - 1] = 0  # with d_lse larger than all others, which are held against their own largest
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b[b.isfinite()].abs().max().item())
    y, _, token, *_ = ours
    back = y.float() * token[..., :length, None]
    if not with_lse:
        assert (back - d_out).abs().amax(-1).le(d_out.abs().amax(-1).float() * 2**-4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FC0, 0x7FFF, -1], ids=hex)
def test_nan_stays_nan(bits, device):
    """Whichever bits it has: a GPU's own are all ones, and one more makes them 0."""
    out, d_out = (torch.randn(1, 20, 1, 64, device=device).bfloat16().transpose(1, 2) for _ in range(2))
    d_out.view(torch.int16)[0, 0, 3, 5] = bits
    p, lse = Attention("backward", 1, 20, 20, 1, 1, 64, E4M3), torch.zeros(1, 1, 20, device=device)
    relative = fp8_operands.Relative((), torch.ones(3, 1, 1, device=device), torch.zeros(1, 1, device=device))
    y, copy, _, _, delta = fp8_operands.of_output(p, out, d_out, lse, None, relative, 64)
    assert y[0, 0, 3, 5].isnan() and copy.float().isnan().any() and delta[0, 0, 3].isnan() and delta[0, 0, :3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "heads", "batch", "shared"), [(300, (4, 2), 2, (0, 0, 0)), (1500, (3, 1), 1, (1, 128, 1)), (1, (2, 2), 2, (1, 1, 128))])
def test_scales(length, heads, batch, shared, device):
    """Over the largest of a key head's: one number, one for 128 tokens, one a token; from 2^-40 of it down all alike; all too small; with strides."""
    numbers = [1 if each == 0 else -(-length // each) for each in shared]
    scales = [torch.rand(batch, n, h, device=device).transpose(1, 2) for n, h in zip(numbers, (heads[0], heads[1], heads[1]), strict=True)]
    scales[0][:, :1] *= 2.0**-60
    scales[2][:] *= 2.0**-120
    scales[1] = scales[1][:1]  # the same in each sequence
    p = Attention("backward", batch, length, length, *heads, 64, E4M3)
    ours, truth = (module.scales_of(p, plain.Scales(*scales)) for module in (fp8_operands, plain))
    for a, b in zip((*ours.scales, ours.most, ours.top), (*truth.scales, truth.most, truth.top), strict=True):
        assert torch.equal(a, b.to(a.device))


@pytest.mark.gpu
def test_a_scale_that_is_no_number_stays_so(device):
    scales = [torch.ones(1, 2, 5, device=device) for _ in range(3)]
    scales[1][0, 1, 3] = torch.nan
    p = Attention("backward", 1, 5, 5, 2, 2, 64, E4M3)
    made = fp8_operands.scales_of(p, plain.Scales(*scales)).scales
    assert made[1][0, 1, 3].isnan() and sum(x.isnan().sum() for x in made) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "heads"), [(64, (4, 2)), (1088, (3, 1))])
def test_weighed(length, heads, device):
    """Tokens from the largest scale down to one whose share is too small for a float, and rows that saw nothing."""
    p = Attention("backward", 2, length, length, *heads, 64, E4M3)
    token = torch.rand(2, heads[0], length, device=device) * torch.logspace(-30, 2, length, device=device)
    token[0, 0, 0] = 2.0**-100
    lse = torch.randn(2, heads[0], length, device=device)
    lse[1, -1, -1] = torch.inf
    relative = fp8_operands.Relative((), torch.rand(3, 2, heads[1], device=device), token.unflatten(1, (heads[1], -1)).amax((2, 3)))
    relative.top[0, 0] = 2.0**80  # of which 2^-100 is 2^-180
    ours, truth = (module.weighed(p, 0.3, relative, token, lse, 9, 15) for module in (fp8_operands, plain))
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)
