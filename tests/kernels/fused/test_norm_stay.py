"""Norms by clusters that stay: rows that the clusters do not share evenly, statistics, and which calls they are for."""

import pytest
import torch

from judge import assert_as_good_as_torch, poisoned
from onchip.core.device import GPUS
from onchip.core.norms import Norm
from onchip.core.problem import Rows

norm, norm_stay = (pytest.importorskip(f"onchip.kernels.fused.{name}") for name in ("norm", "norm_stay"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def textbook(x, kind, weight, bias, offset):
    """In x's dtype, as torch has it; mean and rstd."""
    mean = x.mean(-1, keepdim=True) if kind == "layer" else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * rstd * (weight + offset)
    return y if bias is None else y + bias, mean[:, 0], rstd[:, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "rows", "dtype", "offset", "config"),
    [
        ("layer", 7, BF16, 0.0, norm_stay.Stay(3, 4, 2, 512, 2, 3)),
        ("layer", 1, FP16, 0.5, norm_stay.Stay(2, 2, 1, 1024, 4, 4)),
        ("rms", 9, FP16, 1.0, norm_stay.Stay(3, 2, 4, 512, 2, 2)),
        ("rms", 2, BF16, 0.0, norm_stay.Stay(5, 8, 1, 256, 1, 3)),
    ],
    ids=str,
)
def test_against_float64(kind, rows, dtype, offset, config, device):
    width = config.ctas * config.parts * config.block
    x = poisoned((rows, width + 16), dtype, device)[:, 16:].copy_(torch.randn(rows, width, device=device) + 3)
    weight, bias = torch.randn(2, 1, width, device=device).to(dtype)
    bias = bias if kind == "layer" else None
    y, mean, rstd = poisoned((rows, width), dtype, device), *poisoned((2, rows), FP32, device)
    norm_stay.launch(config, x, y, mean if kind == "layer" else None, rstd, Norm(kind, EPS, offset, weight=weight, bias=bias))
    truth, low = (textbook(x.to(of), kind, weight.to(of), bias if bias is None else bias.to(of), offset) for of in (torch.float64, FP32))
    assert_as_good_as_torch(y, low[0].to(dtype), truth[0])
    torch.testing.assert_close(rstd, truth[2].float(), rtol=2e-6, atol=0)
    if kind == "layer":
        torch.testing.assert_close(mean, truth[1].float(), rtol=2e-6, atol=1e-7)


def test_which_calls():
    """Rows of one width in 16 bits, so many that the beginning is hidden; on one of Hopper's GPUs that has a place for a cluster."""
    asked = Rows("norm", 256, 1 << 18, BF16, "layer weight bias keep")
    first, held = norm.configs(asked, GPUS["H200"])
    assert str(first) == "1x16384 tiles, 16 warps a program, 7 clusters of 16 that stay, 3 stages" and held == norm._held(1 << 19, 2, True)
    assert norm_stay.config(Rows("rms_norm", 28, 1 << 18, FP16, ""), GPUS["H200"]) == [norm_stay.Stay(7, 16, 4, 4096, 16, 4)]
    for other in (asked._replace(rows=27), asked._replace(width=1 << 17), asked._replace(dtype=FP32), asked._replace(variant="layer")):
        assert not norm_stay.config(other, GPUS["H200"])
    assert not any(isinstance(config, norm_stay.Stay) for config in norm.configs(asked, GPUS["A100"]))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_large(kind, device):
    """As it is chosen; and parameters in another dtype, or rows that begin anywhere, which go the old way."""
    x = torch.randn(61, (1 << 18) + 16, device=device).to(BF16)
    weight, bias = torch.randn(2, 1, 1 << 18, device=device).to(BF16)
    given = {"weight": weight, "bias": bias if kind == "layer" else None}
    problem = Rows("norm", 61, 1 << 18, BF16, kind + (" weight bias keep" if kind == "layer" else " weight keep"))
    for rows, how in ((x[:, 16:], given), (x[:, 3:-13], given), (x[:, 16:], {name: p if p is None else p.float() for name, p in given.items()})):
        found = norm.launch_norm(problem, norm.configs(problem, GPUS["H200"])[0], rows, Norm(kind, EPS, keep=True, **how))
        low, truth = (textbook(rows.to(of), kind, weight.to(of), bias.to(of) if kind == "layer" else None, 0.0) for of in (FP32, torch.float64))
        assert_as_good_as_torch(found.y, low[0].to(BF16), truth[0])
        torch.testing.assert_close(found.rstd, truth[2].float(), rtol=2e-6, atol=0)
