"""GroupNorm with its activation, forward and backward, in every layout, against float64 and beside torch's autograd in the same dtype."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import onchip
from gluon_emulator import Emulator
from judge import assert_as_good_as_torch, poisoned
from onchip.core.device import gpu
from onchip.core.problem import Groups
from onchip.kernels.fused import GROUP_NORM
from onchip.ops.group_norm import group_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in GROUP_NORM.kernels]
TRITON = pytest.param("triton_group_norm", marks=[pytest.mark.gpu, pytest.mark.large])
EPS = 1e-5
ACT = {"": lambda x: x, "silu": F.silu, "mish": F.mish}
FORMAT = {"first": torch.contiguous_format, "last": torch.channels_last, "video": torch.channels_last_3d}

CASES = [  # shape, groups, act, layout
    ((2, 6, 7, 9), 3, "silu", "first"),
    ((1, 4, 1, 1), 2, "", "first"),
    ((2, 10, 37, 5), 2, "mish", "last"),
    ((1, 6, 3, 5, 7), 3, "silu", "video"),
    ((3, 4, 11), 1, "mish", "first"),
    ((2, 130, 3, 3), 13, "", "last"),
    ((1, 3, 5, 40, 21), 3, "", "first"),
]
LARGE = [
    ((1, 128, 1024, 1024), 32, "silu", "first"),
    ((1, 128, 512, 512), 32, "silu", "last"),
    ((1, 512, 128, 128), 32, "silu", "first"),
    ((16, 320, 64, 64), 32, "silu", "first"),
    ((16, 320, 64, 64), 32, "mish", "last"),
    ((2, 1280, 16, 16), 32, "", "first"),
    ((1, 96, 9, 240, 416), 32, "silu", "video"),
    ((3, 7, 1013, 1009), 7, "silu", "first"),
]


def inputs(shape, dtype, layout, device):
    ramp = torch.linspace(0, 4, math.prod(shape[2:]), device=device).view(shape[2:])  # so that a group's parts differ
    x = (torch.randn(shape, device=device) * 2 + 1 + ramp).to(dtype).contiguous(memory_format=FORMAT[layout]).requires_grad_()
    weight, bias = ((torch.randn(shape[1], device=device) + 0.5).to(dtype).requires_grad_() for _ in range(2))
    return x, weight, bias


def textbook(act, groups, given):
    x, weight, bias = given
    return ACT[act](F.group_norm(x, groups, weight, bias, EPS))


def check(case, dtype, kernel, device):
    shape, groups, act, layout = case
    given = inputs(shape, dtype, layout, device)
    exact = [t.detach().double().requires_grad_() for t in given]
    with onchip.record() as decisions:
        y = group_norm(given[0], groups, *given[1:], act=act, eps=EPS, kernel=kernel)
        outer = torch.randn(shape, device=device).to(dtype)
        found = torch.autograd.grad(y, given, outer)
    assert [d.problem.op for d in decisions] == ["group_norm", "group_norm_backward"]
    assert {d.problem.layout for d in decisions} == {"channels_first" if layout == "first" or 1 in shape[2:4] else "channels_last"}
    low, truth = textbook(act, groups, given), textbook(act, groups, exact)
    assert y.stride() == found[0].stride() == given[0].stride() and y.dtype == found[0].dtype == dtype
    assert_as_good_as_torch(y.detach(), low.detach(), truth.detach())
    beside, right = torch.autograd.grad(low, given, outer), torch.autograd.grad(truth, exact, outer.double())
    for a, b, c in zip(found, beside, right, strict=True):
        assert_as_good_as_torch(a, b, c, 3.0)
    return y, *found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, dtype, kernel, device):
    check(case, dtype, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, dtype, kernel, device):
    check(case, dtype, kernel, device)


def cut(monkeypatch, sms=132, held=32, **knobs):
    """Both passes cut as asked, like much larger problems; what has not been written is NaN."""
    from onchip.kernels.fused import group_last, group_norm, group_norm_backward, group_tile

    for module, tensors in ((group_norm, 1), (group_norm_backward, 2)):

        def configs(problem, device, tensors=tensors):
            if problem.layout == "channels_last":
                tiles = group_last.cut(problem, warps=1, **knobs)
                assert tiles.ranges > 1
            else:
                tiles = group_tile.first(problem, replace(device, sms=sms), tensors, tensors == 1, warps=1, most=64, alone=0, **knobs)
                assert tiles.team > 1
            return [tiles]

        monkeypatch.setattr(module, "configs", configs)
    monkeypatch.setattr(group_norm, "MOST", SimpleNamespace(value=held))
    for module in (group_last, group_norm, group_norm_backward):
        monkeypatch.setattr(module, "scratch", lambda x, *shape: poisoned(shape, torch.float32, x.device))
    monkeypatch.setattr(group_last, "AHEAD", 0)  # who writes stands right behind those that sum up
    monkeypatch.setattr(group_last, "FOLD", 8)  # and merges a few numbers at a time
    onchip.dispatch.forget()


CUTS = {  # what they try: shape, groups, act, layout, knobs
    "teams": ((1, 6, 8, 24), 3, "silu", "first", {"hold": 512}),
    "runs of two tiles": ((1, 4, 16, 16), 2, "silu", "first", {"hold": 512}),
    "several channels a tile": ((1, 40, 4, 4), 2, "silu", "first", {"hold": 256}),
    "read twice": ((1, 4, 32, 16), 2, "mish", "first", {"hold": 256, "sms": 3, "held": 1}),
    "read twice, runs torn": ((1, 6, 37, 5), 2, "", "first", {"hold": 256, "sms": 2, "held": 1}),
    "last": ((2, 6, 8, 8), 3, "silu", "last", {"share": 16}),
    "last, whole": ((3, 64, 4, 8), 4, "silu", "last", {"share": 16}),
    "last, groups over blocks": ((1, 130, 5, 4), 13, "mish", "last", {"share": 8}),
    "last, a group of blocks": ((2, 160, 3, 3), 1, "silu", "last", {"share": 4}),
    "last, a group a channel": ((1, 72, 6, 6), 72, "", "last", {"share": 16}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS)
def test_units_shared_out(name, device, monkeypatch):
    """A large problem's cut on a small one, in float32, whose rounding hides no member; the same bits every time."""
    *case, knobs = CUTS[name]
    cut(monkeypatch, **knobs)
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(check(case, FP32, "triton_group_norm", device))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    onchip.dispatch.forget()


@pytest.mark.gpu
@pytest.mark.large
def test_more_elements_than_int32_counts(device):
    """In a group: its last channel beside float64's statistics of all, taken channel by channel."""
    x = torch.randn(1, 2049, 1 << 20, dtype=BF16, device=device)
    x[:, -1] += 1
    y = group_norm(x, 1, kernel="triton_group_norm")
    means = torch.stack([c.double().mean() for c in x[0]])
    squares = torch.stack([(c.double() - means.mean()).square().mean() for c in x[0]])
    truth = (x[0, -1].double() - means.mean()) / (squares.mean() + 1e-5).sqrt()
    assert_as_good_as_torch(y[0, -1], truth.to(BF16), truth)


def test_how_shapes_are_cut():
    """A U-Net's groups are one program's; a VAE's are shared out, by backward programs that hold them as far as registers go and are all running at once."""
    pytest.importorskip("triton")
    from onchip.kernels.fused import group_norm, group_norm_backward

    h200 = gpu("H200")
    unet = Groups("group_norm", 16, 1280, 32, 16 * 16, BF16, "silu")
    vae = Groups("group_norm", 1, 128, 32, 1 << 20, BF16, "silu")
    video = Groups("group_norm", 1, 128, 32, 17 << 18, FP32, "silu")
    odd = Groups("group_norm", 3, 7, 7, 1013 * 1009, BF16, "silu")
    for module in (group_norm, group_norm_backward):
        *_, tiles = module.configs(unet, h200)
        assert tiles.team == 1 and tiles.held * tiles.rows * tiles.cols == 40 * 256
        for problem in (vae, video, odd):
            *stay, tiles = module.configs(problem, h200)
            assert len(stay) == (module is group_norm and problem is vae)
            runs = problem.channels // problem.groups * -(-problem.pixels // (tiles.cols * tiles.span))
            assert tiles.team > 1 and (tiles.team - 1) * tiles.share < runs <= tiles.team * tiles.share
            assert tiles.team <= h200.sms if module is group_norm_backward else tiles.share * tiles.span == tiles.held * tiles.rows
            assert tiles.held * tiles.rows * tiles.cols <= 1 << 16 and tiles.cut == ("torn" if problem is odd else "full")
    for module in (group_norm, group_norm_backward):
        (last,) = module.configs(unet._replace(layout="channels_last", op=module.__name__.split(".")[-1]), h200)
        assert (last.warps, last.share, last.ranges, last.whole) == (4, 128, 2, True)
        (last,) = module.configs(vae._replace(layout="channels_last", op=module.__name__.split(".")[-1]), h200)
        assert last.warps == 16 and 128 < 2 * last.ranges <= 2 * h200.sms  # all of those that sum up are running at once


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_parameters_and_far_from_zero(kernel, device):
    """A mean a thousand times the deviation costs no digits but those that x has not."""
    far = (torch.randn(2, 4, 5, 7, device=device) + 1000).contiguous(memory_format=torch.channels_last)
    assert_as_good_as_torch(group_norm(far, 2, kernel=kernel), F.group_norm(far, 2), F.group_norm(far.double(), 2))
    x = (torch.randn(2, 4, 33, device=device) + 1000).requires_grad_()
    y = group_norm(x, 2, kernel=kernel)
    assert_as_good_as_torch(y.detach(), F.group_norm(x, 2).detach(), F.group_norm(x.double(), 2).detach())
    assert group_norm(x[:0], 2, kernel=kernel).shape == (0, 4, 33)
    one = torch.ones(4, device=device, requires_grad=True)
    (alone,) = torch.autograd.grad(group_norm(x.detach(), 2, one, kernel=kernel).square().sum(), one)
    bare = torch.randn(2, 4, 0, device=device)
    assert torch.equal(torch.autograd.grad(group_norm(bare, 2, one, kernel=kernel).sum(), one)[0], torch.zeros_like(one))
    torch.testing.assert_close(alone, 2 * F.group_norm(x.detach(), 2).square().sum((0, 2)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_in_a_compiled_graph(layout):
    torch._dynamo.reset()
    given = inputs((2, 6, 4, 5), FP32, layout, torch.device("cpu"))

    def call(x, weight, bias):
        return group_norm(x, 3, weight, bias, act="silu")

    ours, eager = torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given)
    outer = torch.randn_like(eager)
    assert ours.stride() == eager.stride()
    for a, b in zip((ours, *torch.autograd.grad(ours, given, outer)), (eager, *torch.autograd.grad(eager, given, outer)), strict=True):
        torch.testing.assert_close(a, b)


X = torch.zeros(2, 6, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: group_norm(X, 4), "x is \\[2, 6, 4\\], groups=4; give \\[batch, channels, ...\\] and a number that divides the channels"),
        (lambda: group_norm(X, 3, act="gelu"), "act='gelu' is not one of '', 'silu', 'mish'"),
        (lambda: group_norm(X, 3, torch.ones(4)), r"weight is \[4\]; x has 6 channels: give \[6\]"),
        (lambda: group_norm(X, 3, torch.ones(6), torch.ones(6).half()), "they must be of one dtype"),
    ],
)
def test_what_does_not_fit_is_said(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("problem", [Groups("group_norm", 5, 3, 1, 8192, BF16, "silu"), Groups("group_norm", 1, 8, 4, 16384, FP16)], ids=str)
def test_programs_that_stay(problem):
    """The text of the kernel for Hopper in the emulator, by two teams of one program."""
    kernel, p = Emulator("slow loads").load("onchip.kernels.hopper", "onchip.kernels.fused.group_stay"), problem
    x = (torch.randn(p.batch, p.channels, p.pixels) * 2 + 3).to(p.dtype)
    weight, bias = torch.randn(2, p.channels).to(p.dtype)
    y, (mean, rstd) = poisoned(x.shape, p.dtype, "cpu"), poisoned((2, p.batch, p.groups), FP32, "cpu")
    kernel.launch(p, kernel.Tiles(2, 1, p.channels // p.groups * p.pixels), x, y, weight, bias, EPS, mean, rstd)
    exact = textbook(p.act, p.groups, [t.double() for t in (x, weight, bias)])
    assert_as_good_as_torch(y, textbook(p.act, p.groups, (x, weight, bias)), exact)
    groups = x.double().reshape(p.batch, p.groups, -1)
    assert torch.allclose(mean.double(), groups.mean(-1), atol=1e-5) and torch.allclose(rstd.double(), (groups.var(-1, False) + EPS).rsqrt(), rtol=1e-4)
