"""Gated activations against float64."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core.problem import Rows
from onchip.kernels.fused import GATED_ACT
from onchip.ops.fused import ACTIVATIONS, gated_act

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in GATED_ACT.kernels]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, in the interpreter
TRITON = pytest.param("triton_mlp", marks=[pytest.mark.gpu, pytest.mark.large])

PROBLEMS = [
    Rows("gated_act", rows, width, dtype, act)
    for rows, width in ((1, 1), (5, 63), (3, 1000), (7, 997), (2, 4096), (1, 1536))
    for dtype in (BF16, FP16, FP32)
    for act in ACTIVATIONS
]
LARGE = [
    Rows("gated_act", rows, width, dtype, act) for rows, width in ((8192, 4096), (4099, 14336), (131080, 8192)) for dtype in (BF16, FP32) for act in ACTIVATIONS
]


def inputs(problem, device):
    """x, columns of a wider matrix that holds NaN."""
    shape = (problem.rows, 2 * problem.width)
    return poisoned((problem.rows, 2 * problem.width + 16), problem.dtype, device)[:, 16:].copy_(torch.randn(shape, device=device))


def textbook(x, act):
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")) * up


def check(problem, kernel, device):
    x = inputs(problem, device)
    ours = gated_act(x, problem.variant, kernel=kernel)
    assert ours.shape == (problem.rows, problem.width) and ours.dtype == x.dtype
    some = slice(-4096, None)  # the last rows: those that lie past 2^31 elements, if any do
    x, ours = x[some], ours[some]
    assert_as_good_as_torch(ours, textbook(x, problem.variant), gated_act(x.double(), problem.variant, kernel="reference"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    check(problem, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem, kernel, device):
    check(problem, kernel, device)


def test_oracle_is_the_formula(device):
    gate, up = torch.randn(2, 3, 50, device=device, dtype=torch.float64)
    formula = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "gelu_tanh": gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2,
    }
    for act in ACTIVATIONS:
        torch.testing.assert_close(gated_act(torch.cat((gate, up), -1), act, kernel="reference"), formula[act] * up, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_far_out_it_is_the_gate_or_nothing(act, kernel, device):
    gate = torch.tensor([[-1e4, -1e3, 1e3, 1e4]], device=device)
    out = gated_act(torch.cat((gate, torch.ones_like(gate)), -1), act, kernel=kernel)
    assert torch.equal(out.abs(), gate.clamp(min=0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_and_leading_dimensions(kernel, device):
    x = torch.randn(2, 3, 96, device=device)
    expected = gated_act(x, kernel=kernel)
    assert expected.shape == (2, 3, 48)
    for same in (x.repeat_interleave(2, -1)[..., ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(gated_act(same, kernel=kernel), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gated_act(x[1, 2], kernel=kernel), expected[1, 2], rtol=1e-6, atol=1e-6)
    assert gated_act(x[:0], kernel=kernel).shape == (0, 3, 48)


def test_wrong_arguments(device):
    with pytest.raises(ValueError, match="relu"):
        gated_act(torch.zeros(2, 8, device=device), "relu")
    with pytest.raises(ValueError, match="odd"):
        gated_act(torch.zeros(2, 7, device=device))
