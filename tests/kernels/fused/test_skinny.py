"""Products of few rows against float64: every kernel, what may stand around them, rows of W and x and columns that fill no tile."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core import settings
from onchip.core.device import gpu
from onchip.core.kernel import Unsupported
from onchip.core.problem import Rows
from onchip.dispatch import native, record, select
from onchip.kernels.fused import SKINNY_LINEAR, skinny
from onchip.ops.activation import ACTIVATIONS, Clipped, gated_act
from onchip.ops.fused import rope_append
from onchip.ops.linear import Around, RowNorm, skinny_linear, skinny_problem
from onchip.ops.norm import rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in SKINNY_LINEAR.kernels]
TRITON = pytest.param("triton_skinny", marks=[pytest.mark.gpu, pytest.mark.large])
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, in the interpreter

CASES = [  # rows, in, out, dtype, what stands around it
    (1, 64, 1, BF16, ""),
    (1, 576, 37, BF16, "norm bias silu residual"),
    (1, 1000, 19, FP16, "norm offset residual"),
    (2, 576, 33, BF16, "norm bias clipped interleaved"),
    (2, 3000, 5, FP16, "bias residual"),
    (3, 64, 17, BF16, "norm residual"),
    (3, 576, 21, FP16, "bias silu interleaved residual"),
    (9, 1000, 40, BF16, "norm offset bias gelu"),
    (16, 576, 35, BF16, "norm bias silu residual"),
]
LARGE = [
    (rows, width, out, BF16, around)
    for rows in (1, 2, 7, 16)
    for width, out, around in ((4096, 6144, "norm bias"), (4096, 14336, "norm silu"), (14336, 4096, "residual"), (576, 960, "norm"), (1024, 151936, "norm"))
]


def textbook(x, weight, norm, bias, act, layout, residual):
    """Every step in the dtype of x."""
    if norm is not None:
        wide = torch.promote_types(x.dtype, FP32)
        y = F.rms_norm(x.to(wide), x.shape[1:], None, norm.eps) * (norm.weight.to(wide) + norm.offset)
        x = y.to(x.dtype)
    y = F.linear(x, weight, bias)
    if act is not None:
        y = gated_act(y, act, layout=layout, kernel="reference")
    return y if residual is None else residual + y


def check(rows, width, out, dtype, around, kernel, device):
    """x, the residual and W are columns of wider matrices of NaN."""
    words = around.split()
    act = next((Clipped() if word == "clipped" else word for word in words if word in (*ACTIVATIONS, "clipped")), None)
    rows_of_w = out * (1 if act is None else 2)

    def normal(*shape, scale=1.0):
        return poisoned((*shape[:-1], shape[-1] + 16), dtype, device)[..., : shape[-1]].copy_(scale * torch.randn(shape, device=device))

    x, weight = normal(rows, width, scale=3.0), normal(rows_of_w, width, scale=width**-0.5)
    norm = RowNorm(normal(width), 1e-5, float("offset" in words)) if "norm" in words else None
    bias, residual = normal(rows_of_w) if "bias" in words else None, normal(rows, out) if "residual" in words else None
    layout = "interleaved" if "interleaved" in words else "halves"
    run = {"norm": norm, "bias": bias, "act": act, "layout": layout, "residual": residual}
    with record() as decisions:
        ours = skinny_linear(x, weight, **run, kernel=kernel)
    assert [d.kernel.name for d in decisions] == [kernel] and ours.dtype == dtype and ours.shape == (rows, out)
    truth = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in run.items()}
    truth["norm"] = norm and norm._replace(weight=norm.weight.double())
    assert_as_good_as_torch(ours, textbook(x, weight, **run), textbook(x.double(), weight.double(), **truth))
    assert torch.equal(skinny_linear(x, weight, **run, kernel=kernel), ours)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, kernel, device):
    check(*case, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, kernel, device):
    check(*case, kernel, device)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [*ACTIVATIONS, "clipped"])
def test_every_gate(act, device):
    check(2, 64, 9, BF16, act, "triton_skinny", device)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "act"), [(1, None), (1, "silu"), (2, None), (5, "silu"), (16, None)])
def test_every_shape_of_the_menu(rows, act, device):
    """Also those that this many rows of W do not get; a step more than is fetched ahead, and columns beyond the last."""
    x, weight = (torch.randn(n, 2120, device=device).to(BF16) for n in (rows, 18))
    norm = RowNorm(torch.randn(2120, device=device).to(BF16))
    around = Around(norm, *([None] * 2), *Clipped())
    problem = skinny_problem(x, 18, around, act)
    shapes = skinny.configs(problem, gpu("H200"))
    assert len(shapes) == len(set(shapes)) == (3 if rows == 1 or (rows == 2 and not act) else 2 if act else 4)
    low = textbook(x, weight, norm, None, act, "halves", None)
    truth = textbook(x.double(), weight.double(), norm._replace(weight=norm.weight.double()), None, act, "halves", None)
    for shape in shapes:
        assert_as_good_as_torch(skinny.launch(problem, shape, x, weight, around), low, truth)


def test_plain_torch_is_the_way_of_four_operators(device):
    """To the bit: what a CPU computes does not depend on who asks."""
    x, weight, residual = torch.randn(3, 40), torch.randn(36, 40), torch.randn(3, 18)
    norm, bias = RowNorm(torch.randn(40), 1e-5), torch.randn(36)
    plain = gated_act(F.linear(rms_norm(x, norm.weight, eps=norm.eps), weight, bias), "silu") + residual
    assert torch.equal(skinny_linear(x, weight, norm=norm, bias=bias, act="silu", residual=residual, kernel="reference"), plain)


def test_the_menu():
    pytest.importorskip("triton")
    problem = Rows("skinny_linear", 1, 4096, BF16, "from 4096 norm")
    (kernel, _), h200 = SKINNY_LINEAR.kernels, gpu("H200")
    assert select(problem, h200).kernel is kernel and select(problem._replace(rows=3), h200).kernel.portable
    assert select(problem._replace(rows=8, width=2048), h200).kernel is kernel is select(problem._replace(rows=16), h200, "triton_skinny").kernel
    assert select(problem._replace(rows=16, width=512), h200).kernel is kernel is not select(problem._replace(rows=9, width=2048), h200).kernel
    cpu, asked = torch.device("cpu"), "triton_skinny"
    assert native(problem, cpu, asked) == native(problem, cpu) == (asked if settings.INTERPRET.read() else None)
    assert native(problem._replace(rows=17), cpu, asked) is None is native(problem._replace(rows=3), cpu)
    assert kernel.leaves(problem._replace(rows=3, variant="from 4096 norm silu"), h200) == [
        "3 rows of a weight of 67.1 MB, of which cuBLAS is faster for more than 2"
    ]
    assert kernel.refuses(problem._replace(rows=3, dtype=FP16), h200) == [
        "a norm of 3 rows in fp16, of at most 2: rows times its weight may be more than fp16 holds"
    ]
    assert not kernel.refuses(problem._replace(rows=3, dtype=FP16, variant="from 4096 residual"), h200)
    with pytest.raises(Unsupported, match=r"rows 17 is not in 1\.\.16"):
        select(problem._replace(rows=17), h200, "triton_skinny")


def test_the_cost_is_the_weight():
    """Llama-3-8B's layer: 436 MB."""
    words = (("from 4096 norm", 6144), ("from 4096 residual", 4096), ("from 4096 norm silu", 14336), ("from 14336 residual", 4096))
    total = sum(SKINNY_LINEAR.cost(Rows("skinny_linear", 1, out, BF16, variant)).bytes for variant, out in words)
    assert total == pytest.approx(2 * 4096 * (6144 + 4096 + 3 * 14336), rel=1e-3)


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    for words, change in (
        (r"act='tanh' is not one of silu", {"act": "tanh"}),
        (r"layout='pairs'", {"layout": "pairs"}),
        (r"weight \[6, 7\]", {"weight": weight[:, :7]}),
        (r"weight has 5 rows, an odd number", {"weight": weight[:5], "act": "silu"}),
        (r"weight is torch.float16", {"weight": weight.half()}),
        (r"norm.weight is torch.float32 \[6\] on cpu; give torch.float32 \[8\]", {"norm": RowNorm(x[0, :6])}),
        (r"bias is torch.float32 \[3\] on cpu; give torch.float32 \[6\]", {"bias": x[0, :3], "act": "silu"}),
        (r"residual is torch.float32 \[2, 6\] on cpu; give torch.float32 \[2, 3\]", {"residual": x[:, :6], "act": "silu"}),
        (r"must be contiguous", {"weight": weight.T.contiguous().T}),
    ):
        with pytest.raises(ValueError, match=words):
            skinny_linear(x, **{"weight": weight, **change})


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_that_start_early_read_what_is_there(rows, device):
    """Layers in one graph, where each kernel starts while those before it run and memory is used again, give the bits of kernels that run alone; attention's
    place is taken by the queries."""
    width, heads = 512, (6, 1)
    weights = [
        [torch.randn(n, k, device=device).to(BF16) * k**-0.5 for n, k in ((512, 512), (384, 384), (512, 384), (2048, 512), (512, 1024))] for _ in range(12)
    ]
    norm, table = RowNorm(torch.ones(width, device=device, dtype=BF16)), torch.randn(9, 64, device=device)
    x, positions = torch.randn(rows, width, device=device).to(BF16), torch.arange(rows, device=device) % 9
    how = {"kernel": "triton_skinny", "constant": True}

    def step(between):
        y = x
        for qkv, mid, out, gate_up, down in weights:
            q = rope_append(between(skinny_linear(y, qkv, norm=norm, **how)), table, positions, heads)[0]
            y = between(skinny_linear(between(skinny_linear(between(q).flatten(1), mid, **how)), out, residual=y, **how))
            y = between(skinny_linear(between(skinny_linear(y, gate_up, norm=norm, act="silu", **how)), down, residual=y, **how))
        return y

    def alone(found):
        torch.cuda.synchronize()
        return found

    wanted, graph = step(alone), torch.cuda.CUDAGraph()
    assert torch.isfinite(wanted).all()
    with torch.cuda.graph(graph):
        found = step(lambda y: y)
    for _ in range(50):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)
