"""The modules of norms: torch's results with torch's parameters, and gradients to them."""

import pytest
import torch
from torch import nn

import onchip

X = torch.randn(3, 8, 16)


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (onchip.RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5), X),
        (onchip.LayerNorm(16), nn.LayerNorm(16), X),
        (onchip.LayerNorm(16, affine=False), nn.LayerNorm(16, elementwise_affine=False), X),
        (onchip.LayerNorm(16, bias=False), nn.LayerNorm(16, bias=False), X),
        (onchip.GroupNorm(4, 8), nn.GroupNorm(4, 8), X),
        (onchip.GroupNorm(2, 8, act="silu"), nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), X),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_results(ours, theirs, x):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        with torch.no_grad():
            b.copy_(a.normal_())
    torch.testing.assert_close(ours(x), theirs(x))
    for module in (ours, theirs):
        if list(module.parameters()):
            module(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_a_weight_around_zero_and_a_weight_of_each_head():
    torch.testing.assert_close(onchip.RMSNorm(16, offset=1.0)(X), onchip.RMSNorm(16)(X))
    assert onchip.RMSNorm(16, offset=1.0).weight.eq(0).all()
    assert onchip.RMSNorm(8, 16)(X).shape == X.shape
    y, total = onchip.LayerNorm(16)(X, residual=X)
    torch.testing.assert_close((y, total), (nn.LayerNorm(16)(2 * X), 2 * X))
