"""RMSNorm, with and without a residual and an offset of the weights, against float64."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.kernels.fused import RMS_NORM
from onchip.kernels.fused.formulas import FEW
from onchip.ops.norm import NORMS, rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in RMS_NORM.kernels]
TRITON = pytest.param("triton_norm", marks=[pytest.mark.gpu, pytest.mark.large])
EPS = 1e-5
LAST = 16384  # rows that are compared: in float64 all would fill a GPU

PROBLEMS = [
    Rows("rms_norm", rows, width, dtype, variant)
    for rows, width, dtypes in (
        (1, 1, (BF16, FP16, FP32)),
        (5, 63, (BF16, FP16, FP32)),
        (3, 576, (BF16, FP32)),
        (3, 1000, (BF16, FP16, FP32)),
        (7, 997, (BF16, FP32)),
        (2, 4096, (BF16, FP16, FP32)),
        (3, 16400, (FP32,)),  # from here on the row is read in pieces
        (2, 40000, (BF16,)),
        (1, 65536, (FP16, FP32)),
    )
    for dtype in dtypes
    for variant in NORMS
]
LARGE = [
    Rows("rms_norm", rows, width, dtype, variant)
    for rows, width in ((8192, 4096), (16384, 8192), (1, 16384), (4099, 5120), (257, 32768), (300000, 8192))
    for dtype in (BF16, FP32)
    for variant in ("", "residual")
    if rows * width * dtype.itemsize < 5 << 30
]


def inputs(problem, device):
    """x, weight and residual (or None); both matrices are columns of wider ones that hold NaN."""
    shape = (problem.rows, problem.width)
    x, residual = (poisoned((problem.rows, problem.width + 16), problem.dtype, device)[:, 16:].copy_(torch.randn(shape, device=device)) for _ in range(2))
    return x, torch.randn(problem.width, device=device).to(problem.dtype), residual if "residual" in problem.variant else None


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def offset(problem):
    return 1.0 if "offset" in problem.variant else 0.0


def textbook(x, weight, residual, offset):
    total = x if residual is None else x + residual
    if offset:  # as Gemma has it
        y = (F.rms_norm(total.float(), (x.shape[-1],), None, EPS) * (offset + weight.float())).type_as(x)
    else:
        y = F.rms_norm(total, (x.shape[-1],), weight, EPS)
    return (y,) if residual is None else (y, total)


def check(problem, kernel, device):
    x, weight, residual = inputs(problem, device)
    before = x.clone(), residual if residual is None else residual.clone()
    ours = as_tuple(rms_norm(x, weight, eps=EPS, offset=offset(problem), residual=residual, kernel=kernel))
    assert torch.equal(x, before[0]) and (residual is None or torch.equal(residual, before[1]))
    assert all(result.shape == x.shape and result.dtype == x.dtype for result in ours)
    ours, x, residual = [result[-LAST:] for result in ours], x[-LAST:], residual if residual is None else residual[-LAST:]
    wide = residual if residual is None else residual.double()
    truth = as_tuple(rms_norm(x.double(), weight.double(), eps=EPS, offset=offset(problem), residual=wide, kernel="reference"))
    for result, low, exact in zip(ours, textbook(x, weight, residual, offset(problem)), truth, strict=True):
        assert_as_good_as_torch(result, low, exact)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    check(problem, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem, kernel, device):
    check(problem, kernel, device)


def test_oracle_is_the_formula(device):
    x, weight, residual = (t.double() for t in inputs(Rows("rms_norm", 5, 63, FP32, "residual"), device))
    y, total = rms_norm(x, weight, eps=EPS, residual=residual, kernel="reference")
    assert torch.equal(total, x + residual)
    formula = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y, formula * weight, rtol=1e-14, atol=1e-14)
    y, _ = rms_norm(x, weight, eps=EPS, offset=0.75, residual=residual, kernel="reference")
    torch.testing.assert_close(y, formula * (weight + 0.75), rtol=1e-14, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [Rows("rms_norm", 6, 63, dtype, variant) for dtype in (BF16, FP32) for variant in ("", "residual")], ids=str)
def test_several_rows_a_program(problem, device):
    """The tiles of a matrix with many rows, on one whose last program has fewer; each row comes out as when it is alone."""
    from onchip.kernels.fused.norm import Tiles, configs, launch

    assert configs(problem._replace(rows=4096), gpu("H200")) == [Tiles(8, 1, 64, 4)]
    x, weight, residual = inputs(problem, device)
    tiled, alone = (as_tuple(launch(problem, Tiles(rows, 1, 64, 4), x, weight, EPS, residual)) for rows in (4, 1))
    for ours, expected in zip(tiled, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=torch.finfo(x.dtype).eps, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sum_is_torchs_to_the_bit(kernel, device):
    x, weight, residual = inputs(Rows("rms_norm", 5, 63, BF16, "residual"), device)
    assert torch.equal(rms_norm(x, weight, residual=residual, kernel=kernel)[1], x + residual)


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_and_leading_dimensions(kernel, device):
    weight = torch.randn(96, device=device)
    x = torch.randn(2, 3, 96, device=device)
    expected = rms_norm(x, weight, kernel=kernel)
    apart = torch.randn(2, 3, 192, device=device)[..., ::2].copy_(x)
    swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
    one = x[0, 0]
    assert expected.shape == x.shape
    assert torch.equal(rms_norm(apart, weight, kernel=kernel), expected)
    assert torch.equal(rms_norm(swapped, weight.repeat_interleave(2)[::2], kernel=kernel), expected)
    assert torch.equal(rms_norm(one, weight, kernel=kernel), expected[0, 0])
    for total in (x, apart):
        torch.testing.assert_close(rms_norm(total, weight, residual=swapped, kernel=kernel)[1], x + x, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_of_another_dtype_and_no_rows(kernel, device):
    x, weight = torch.randn(3, 64, device=device, dtype=BF16), torch.randn(64, device=device)
    assert_as_good_as_torch(
        rms_norm(x, weight, kernel=kernel), F.rms_norm(x, (64,), weight.to(BF16), 1e-6), rms_norm(x.double(), weight.double(), kernel="reference")
    )
    assert rms_norm(x[:0], weight, kernel=kernel).shape == (0, 64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_offset_keeps_small_weights(kernel, device):
    """Weights below the rounding of 1 in their dtype: only their sum with 1 in float32 tells them from none."""
    weight = torch.full((64,), 2**-9, device=device, dtype=BF16)
    ones = torch.ones(2, 64, device=device)
    assert rms_norm(ones, weight, eps=0.0, offset=1.0, kernel=kernel).eq(1 + 2**-9).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_eps_keeps_a_row_of_zeros_finite(kernel, device):
    assert rms_norm(torch.zeros(2, 100, device=device), torch.ones(100, device=device), kernel=kernel).eq(0).all()


def test_shapes_that_disagree(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="give \\[8\\]"):
        rms_norm(x, torch.ones(4, device=device))
    with pytest.raises(ValueError, match="must be equal"):
        rms_norm(x, torch.ones(8, device=device), residual=x[:1])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
@pytest.mark.parametrize("width", [64, 576, 1001])
def test_plain_rows_have_the_bits_of_few(width, dtype):
    """In plain torch a row has the same bits alone, among few, which torch's own norm takes, and among many."""
    many = FEW // width + 1
    x, weight = torch.randn(many, width).to(dtype), torch.rand(width).to(dtype)
    whole = rms_norm(x, weight, kernel="reference")
    assert x[:7].numel() <= FEW < x.numel()
    assert torch.equal(rms_norm(x[:7], weight, kernel="reference"), whole[:7])
    assert torch.equal(torch.cat([rms_norm(row[None], weight, kernel="reference") for row in x[:7]]), whole[:7])
