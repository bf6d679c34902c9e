"""Quantising to e4m3: the rotation, the scales, and the kernel against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from offline_attention import meta
from triton.runtime.jit import JITFunction

from offline import compiled
from onchip.core.scales import LARGEST, SMALLEST, Scales
from onchip.kernels.attention import quantise
from onchip.kernels.attention.reference import quantise as plain
from onchip.kernels.attention.reference import rotate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARES = (0, 1, 128)


def signs_of(dim: int, device) -> torch.Tensor:
    return torch.randint(0, 2, (dim,), device=device).mul(2).sub(1).float()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_rotation_changes_no_product(dim):
    q, k, signs = torch.randn(3, 5, dim), torch.randn(3, 7, dim), signs_of(dim, "cpu")
    assert torch.allclose(rotate(q, signs) @ rotate(k, signs).mT, q @ k.mT, atol=1e-4)


def test_a_rotation_spreads_a_large_channel():
    x = torch.randn(100, 128)
    x[:, 5] *= 100
    assert rotate(x, signs_of(128, "cpu")).abs().max() < x.abs().max() / 5


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("length", [1, 128, 300])
def test_quantised(share, length):
    x = torch.randn(2, length, 3, 64) * torch.rand(2, length, 3, 1)
    x[0, 0, 1], x[1, :, 0] = 0, 1e-17
    y, scale = plain(None, None, x, share, None)
    assert scale.shape == (2, 3, {0: 1, 1: length, 128: -(-length // 128)}[share])
    back = y.float() * Scales.of_tokens(scale, length).transpose(1, 2)[..., None]
    assert (back - x).abs().max() <= x.abs().max() * 2**-4 and (scale >= SMALLEST).all()
    assert y.float().abs().amax((1, 3)).max() == LARGEST


def test_scales_of_an_odd_length_are_refused():
    with pytest.raises(ValueError, match="scales of 7 for 300 tokens; accepted are 1, 3"):
        Scales.share(torch.ones(1, 1, 7), 300)


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("length", "dim", "dtype"), [(1, 64, BF16), (200, 64, FP16), (130, 128, BF16), (129, 256, BF16), (40, 8, BF16), (33, 256, FP32), (60, 192, FP16)], ids=str
)
def test_kernel(length, dim, dtype, share, rotated, device):
    """Scales, and codes as near as torch's to what they stand for, but for the rounding of sums and of a quotient: of two as near either will do."""
    if rotated and dim & (dim - 1):
        pytest.skip("a rotation is of a power of two")
    x = torch.randn(2, length, 2, dim, device=device).to(dtype)
    x[0, 0, 1], x[1, :, 0] = 0, 1e-17
    signs = signs_of(dim, device) if rotated else None
    (y, scale), (y_low, scale_low), (y_true, scale_true) = (
        quantise.launch(None, None, x, share, signs),
        plain(None, None, x, share, signs),
        plain(None, None, x.double(), share, signs),
    )
    assert (scale >= SMALLEST).all() and torch.allclose(scale, scale_true, rtol=1e-5) and torch.allclose(scale_low, scale_true, rtol=1e-5)
    exact = (rotate(x.double(), signs) if rotated else x.double()) / Scales.of_tokens(scale_true, length).transpose(1, 2)[..., None]
    of_sums = LARGEST * (2**-14 if dtype == FP32 else 2**-18) if rotated else 0.0
    assert ((y.double() - exact).abs() <= (y_true.double() - exact).abs() + exact.abs() * 2**-20 + of_sums).all()
    assert (y.float() != y_low.float()).float().mean() < 1e-2


@pytest.mark.parametrize(("dim", "dtype", "rotated"), [(128, BF16, True), (256, FP32, True), (192, FP16, False)], ids=str)
def test_compiled(dim, dtype, rotated, monkeypatch):
    """Without spills, and with no more shared memory than any GPU with e4m3 has."""
    if not isinstance(quantise._quantise, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    launches = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: launches.append((kernel, args, options)))
    quantise.launch(None, None, meta(2, 1000, 4, dim, dtype=dtype), 128, meta(dim, dtype=FP32) if rotated else None)
    facts = compiled(*launches[0], "sm_90")
    assert facts.spills == 0 and facts.shared <= 99 << 10
