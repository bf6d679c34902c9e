"""Activations and their gradients against float64."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core.problem import Rows
from onchip.dispatch import record
from onchip.kernels.fused import GATED_ACT, GATED_ACT_BACKWARD, mlp
from onchip.ops.activation import ACTIVATIONS, Clipped, activate, gated_act

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in GATED_ACT.kernels]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, in the interpreter
TRITON = pytest.param("triton_mlp", marks=[pytest.mark.gpu, pytest.mark.large])
ACTS = [*ACTIVATIONS, "clipped"]
MOST, LAST = 8192, 4096  # rows that are compared whole; of more rows these

CASES = [
    ("gated_act", (rows, width, dtype), act, layout, bias)
    for act in ACTS
    for (rows, width, dtype), layout, bias in (
        ((1, 1, FP32), "halves", True),
        ((5, 63, BF16), "interleaved", True),
        ((3, 1000, FP16), "halves", False),
        ((7, 997, FP32), "interleaved", False),
    )
] + [("activate", (rows, 1537, dtype), act, "halves", bias) for act in ACTIVATIONS for rows, dtype, bias in ((3, BF16, False), (2, FP32, True))]
LARGE = [
    ("gated_act", (rows, width, dtype), act, layout, bias)
    for rows, width in ((8192, 4096), (131080, 8192))
    for dtype in (BF16, FP32)
    for act, layout, bias in (("silu", "halves", False), ("gelu", "halves", True), ("clipped", "interleaved", True))
]  # fmt: skip


def named(act):
    return Clipped() if act == "clipped" else act


def apply(op, x, act, layout, bias, kernel="auto"):
    return activate(x, act, bias=bias, kernel=kernel) if op == "activate" else gated_act(x, named(act), bias=bias, layout=layout, kernel=kernel)


def textbook(op, x, act, layout, bias):
    """Every step in the dtype of x."""
    x = x if bias is None else x + bias
    gate, up = (x, None) if op == "activate" else (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    if act == "clipped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    functions = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "mish": F.mish}
    functions |= {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu2": lambda x: F.relu(x).square()}
    return functions[act](gate) if up is None else functions[act](gate) * up


def leaves(x, bias, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, bias)]


def check(op, shape, act, layout, biased, kernel, device):
    rows, width, dtype = shape
    wide = width if op == "activate" else 2 * width
    around = poisoned((rows, wide + 16), dtype, device)[:, 16:].copy_(3 * torch.randn(rows, wide, device=device))  # columns of a wider matrix
    bias = torch.randn(wide, device=device).to(dtype) if biased else None
    d_out = torch.randn(rows, width, device=device).to(dtype)
    results = []
    for run, of in ((lambda *a: apply(*a, kernel=kernel), None), (textbook, None), (textbook, torch.float64)):
        x, b = leaves(around, bias, of)
        with record() as decisions:
            out = run(op, x, act, layout, b)
            grads = torch.autograd.grad(out, [t for t in (x, b) if t is not None], d_out.to(out.dtype))
        if not results:
            assert [d.problem.op for d in decisions] == [op, f"{op}_backward"] and {d.kernel.name for d in decisions} == {kernel}
            if rows > MOST:  # the rest in float64 would fill a GPU; a bias's gradient is the sum of all rows of dx
                for total in grads[1:]:
                    right = grads[0].sum(0, dtype=FP32)
                    assert (total - right).norm() < 1e-2 * right.norm()
                grads, around, d_out = grads[:1], around[-LAST:].clone(), d_out[-LAST:]
        results.append((out.detach()[-LAST:], grads[0][-LAST:], *(grads[1:] if rows <= MOST else ())))  # the last rows: past 2^31 elements, if any are
        del x, b, out, grads
    for n, (ours, low, truth) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == dtype
        assert_as_good_as_torch(ours, low, truth, slack=3.0 if n else 2.0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, kernel, device):
    check(*case, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, kernel, device):
    check(*case, kernel, device)


def test_gradients_of_the_oracle(device):
    """By finite differences, away from where a derivative jumps."""
    x, bias = (torch.randn(s, device=device, dtype=torch.float64).mul(4).requires_grad_() for s in ((3, 10), (10,)))
    for act in (*ACTS[:3], "mish", "clipped"):
        torch.autograd.gradcheck(lambda x, b, act=act: gated_act(x, named(act), bias=b, layout="interleaved", kernel="reference"), (x, bias))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_far_out_it_is_the_gate_or_nothing(act, kernel, device):
    gate = torch.tensor([[-1e4, -1e3, 1e3, 1e4]], device=device)
    x = torch.cat((gate, torch.ones_like(gate)), -1).requires_grad_()
    out = gated_act(x, act, kernel=kernel)
    (grad,) = torch.autograd.grad(out.sum(), x)
    positive, square = gate.clamp(min=0), act == "relu2"
    assert torch.equal(out.abs(), positive.square() if square else positive)
    torch.testing.assert_close(grad[:, :4], 2 * positive if square else (gate > 0).float(), rtol=0, atol=1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act != "relu2"])
def test_infinity_and_nan_stay(act, device):
    """Of four numbers in float32 torch makes gelu(infinity) NaN on a CPU: its own, so not asked of the reference."""
    for dtype in (FP16, FP32):
        out = activate(torch.tensor([torch.inf, torch.nan, 60000.0], device=device, dtype=dtype), act, kernel="triton_mlp")
        assert out[0] == torch.inf and out[1].isnan() and out[2] == 60000.0


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_square_of_infinities(kernel, device):
    x = torch.tensor([-torch.inf, torch.inf, torch.nan], device=device)
    torch.testing.assert_close(activate(x, "relu2", kernel=kernel), torch.tensor([0.0, torch.inf, torch.nan], device=device), equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_and_leading_dimensions(kernel, device):
    x = torch.randn(2, 3, 96, device=device)
    expected = gated_act(x, kernel=kernel)
    assert expected.shape == (2, 3, 48)
    for same in (x.repeat_interleave(2, -1)[..., ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(gated_act(same, kernel=kernel), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gated_act(x[1, 2], kernel=kernel), expected[1, 2], rtol=1e-6, atol=1e-6)
    nothing, bias = x[:0].requires_grad_(), torch.ones(96, device=device, requires_grad=True)
    out = gated_act(nothing, bias=bias, kernel=kernel)
    out.sum().backward()
    assert out.shape == (0, 3, 48) and nothing.grad.shape == (0, 3, 96) and not bias.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "stages"), [("halves", 3), ("interleaved", 1)])
def test_a_program_with_many_rows(layout, stages, device):
    """Rows of a bias's gradient that do not divide evenly, and more than one piece; twice the same bits."""
    p = Rows("gated_act_backward", 11, 70, FP32, f"silu{' interleaved' * (layout == 'interleaved')} bias")
    x, bias, d_out = torch.randn(11, 140, device=device), torch.randn(140, device=device), torch.randn(11, 70, device=device)
    found, again = (mlp.launch_backward(p, mlp.Tiles(64, 1, 4, stages), x, bias, 0.0, 0.0, d_out) for _ in range(2))
    for ours, same, truth in zip(found, again, GATED_ACT_BACKWARD.kernels[-1].load()(p, None, x, bias, 0.0, 0.0, d_out), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, same)


def test_wrong_arguments(device):
    x = torch.zeros(2, 8, device=device)
    for call, message in (
        (lambda: gated_act(x, "tanh"), "act='tanh' is not one of silu"),
        (lambda: gated_act(x[:, :7]), "width 7 is odd"),
        (lambda: gated_act(x, layout="pairs"), "layout='pairs'"),
        (lambda: gated_act(x, bias=x[0, :4]), r"bias is torch.float32 \[4\]; give torch.float32 \[8\]"),
        (lambda: activate(x, "clipped"), "act='clipped'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_problem_of_a_call(device):
    with record() as decisions:
        gated_act(torch.zeros(3, 8, device=device), Clipped(), bias=torch.zeros(8, device=device), layout="interleaved")
    assert decisions[0].problem == Rows("gated_act", 3, 4, FP32, "clipped interleaved bias")
