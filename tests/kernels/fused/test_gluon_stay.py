"""Norms of wide rows whose next rows are on their way to shared memory, in the emulator: rows that programs do not share evenly, statistics, gradients."""

import pytest
import torch

from gluon_emulator import MODES, Emulator, Fault
from judge import assert_as_good_as_torch, poisoned
from onchip.core.device import GPUS
from onchip.core.norms import Norm, Normed
from onchip.core.problem import Rows

norm, norm_backward, gluon_stay = (pytest.importorskip(f"onchip.kernels.fused.{name}") for name in ("norm", "norm_backward", "gluon_stay"))

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
MODULES = ("onchip.kernels.hopper", "onchip.kernels.fused.gluon_stay")


def textbook(x, dy, kind, weight, bias, offset):
    """In x's dtype, as torch has it: y, mean, rstd, and the gradients of x, weight and bias."""
    mean = x.mean(-1, keepdim=True) if kind == "layer" else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    hat = (x - mean) * rstd
    y = hat * (weight + offset) + bias
    dh = dy * (weight + offset)
    level = dh.mean(-1, keepdim=True) if kind == "layer" else 0
    return y, mean[:, 0], rstd[:, 0], rstd * (dh - level - hat * (dh * hat).mean(-1, keepdim=True)), (dy * hat).sum(0), dy.sum(0)


def check(kernel, kind, rows, dtype, offset, config):
    width = config.ctas * config.parts * config.warps * 256
    x, dy = (poisoned((rows, width + 16), dtype, "cpu")[:, 16:].copy_(torch.randn(rows, width) + mean) for mean in (3, 0))
    weight, bias = torch.randn(2, 1, width).to(dtype)
    bias = bias if kind == "layer" else torch.zeros_like(bias)
    y, dx, mean, rstd = poisoned((rows, width), dtype, "cpu"), poisoned((rows, width), dtype, "cpu"), *poisoned((2, rows), FP32, "cpu")
    norm = Norm(kind, EPS, offset, weight=weight, bias=bias if kind == "layer" else None)
    kernel.launch(config, x, y, mean if kind == "layer" else None, rstd, norm)
    sums = poisoned((2, min(rows, config.clusters), width), FP32, "cpu")
    sums = {"weight": sums[0]} | ({"bias": sums[1]} if kind == "layer" else {})
    kernel.launch_backward(config, dy, x, dx, sums, mean if kind == "layer" else None, rstd, norm)
    truth, low = (textbook(x.to(of), dy.to(of), kind, weight.to(of), bias.to(of), offset) for of in (torch.float64, FP32))
    assert_as_good_as_torch(y, low[0].to(dtype), truth[0])
    torch.testing.assert_close(rstd, truth[2].float(), rtol=2e-6, atol=0)
    if kind == "layer":
        torch.testing.assert_close(mean, truth[1].float(), rtol=2e-6, atol=1e-7)
    assert_as_good_as_torch(dx, low[3].to(dtype), truth[3], 3)
    for ours, *of in zip(sums.values(), low[4:], truth[4:], strict=False):
        assert_as_good_as_torch(ours.sum(0), *of, 3)


@pytest.mark.parametrize(
    ("kind", "rows", "dtype", "offset", "mode", "config"),
    [
        ("layer", 7, BF16, 0.0, MODES[1], (3, 4, 2, 2, 3, True)),
        ("layer", 1, FP16, 0.5, MODES[0], (2, 2, 1, 4, 4)),
        ("rms", 9, FP16, 1.0, MODES[1], (2, 2, 3, 1, 3, True)),
        ("rms", 2, BF16, 0.0, MODES[2], (5, 8, 1, 1, 3)),
    ],
    ids=str,
)
def test_against_float64(kind, rows, dtype, offset, mode, config):
    kernel = Emulator(mode).load(*MODULES)
    check(kernel, kind, rows, dtype, offset, kernel.Tiles(*config))


@pytest.mark.parametrize(
    "edit",
    [
        ("wait_group(C.stages - 1 - C.later)", "wait_group(C.stages)"),
        ("fetch(ring, box, stage, turn + STAGES < turns, turn, x,", "fetch(ring, box, (stage + 1) % C.stages, turn + STAGES < turns, turn, x,"),
        ("fetch(ring, box, stage, turn + STAGES < turns, turn, dy,", "fetch(ring, box, (stage + 1) % C.stages, turn + STAGES < turns, turn, dy,"),
    ],
    ids=["a row is not waited for", "a row is overwritten before it is read", "backward"],
)
def test_planted_bugs_show(edit):
    kernel = Emulator("slow loads").load(*MODULES, edits=[edit])
    with pytest.raises((AssertionError, Fault)):
        check(kernel, "rms", 8, BF16, 0.0, kernel.Tiles(2, 1, 1, 1, 3, True))


def test_which_calls():
    """Plain norms of a few widths in 16 bits with all of their gradients, of so many rows that the beginning is hidden; on one of Hopper's GPUs."""
    asked, back = Rows("norm", 256, 1 << 18, BF16, "layer weight bias keep"), Rows("norm_backward", 1024, 1 << 16, BF16, "layer weight bias -> x weight bias")
    first, held = norm.configs(asked, GPUS["H200"])
    assert str(first) == "1x16384 tiles, 8 warps a program, 7 clusters of 16 that stay, 6 stages" and held == norm._held(1 << 19, 2, True)
    assert norm.configs(Rows("rms_norm", 56, 1 << 18, FP16, ""), GPUS["H200"])[0].clusters == 14
    assert norm_backward.configs(back, GPUS["H200"])[0] == gluon_stay.Tiles(14, 8, 4, 8, 6, True)
    pairs = back._replace(rows=4096, width=1 << 14)
    assert norm_backward.configs(pairs, GPUS["H200"])[0].clusters == 64  # nearly all multiprocessors: two neighbours are easily found
    assert isinstance(norm_backward.configs(back, GPUS["H200"])[1], norm_backward.Tiles)
    for other in (asked._replace(rows=27), asked._replace(width=1 << 14), asked._replace(dtype=FP32), asked._replace(variant="layer")):
        assert not gluon_stay.configs(other, GPUS["H200"])
    for variant in ("layer weight bias -> x", "layer weight bias residual -> x weight bias", "layer weight bias inverse -> x weight bias"):
        assert not gluon_stay.configs(back._replace(variant=variant), GPUS["H200"])
    assert not gluon_stay.configs(asked, GPUS["A100"]) and not gluon_stay.configs(back, GPUS["MI300X"])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("width", [1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_large(kind, width, device):
    """As they are chosen; and parameters in another dtype, or rows that begin anywhere, which go the old way. The same bits each time."""
    rows = max(61, 5 * (1 << 20) // width + 1)
    x, dy = (torch.randn(rows, width + 16, device=device).to(BF16) for _ in range(2))
    weight, bias = torch.randn(2, 1, width, device=device).to(BF16)
    given = {"weight": weight, "bias": bias if kind == "layer" else None}
    words, wanted = ("layer weight bias keep", ("x", "weight", "bias")) if kind == "layer" else ("rms weight keep", ("x", "weight"))
    forward, back = Rows("norm", rows, width, BF16, words), Rows("norm_backward", rows, width, BF16, f"{words} -> {' '.join(wanted)}")
    for first, how in ((16, given), (3, given), (16, {name: p if p is None else p.float() for name, p in given.items()})):
        part, d_part, call = x[:, first : first + width], dy[:, first : first + width], Norm(kind, EPS, keep=True, **how)
        found = norm.launch_norm(forward, norm.configs(forward, GPUS["H200"])[0], part, call)
        kept = Normed(None, None, found.mean, found.rstd, None)
        grads, again = (
            norm_backward.launch(back, norm_backward.configs(back, GPUS["H200"])[0], wanted, d_part, None, part, None, kept, call) for _ in range(2)
        )
        low, truth = (
            textbook(part.to(of), d_part.to(of), kind, weight.to(of), bias.to(of) if kind == "layer" else 0 * bias.to(of), 0.0) for of in (FP32, torch.float64)
        )
        assert_as_good_as_torch(found.y, low[0].to(BF16), truth[0])
        torch.testing.assert_close(found.rstd, truth[2].float(), rtol=2e-6, atol=0)
        for name, a, b in zip(wanted, low[3:], truth[3:], strict=False):
            assert torch.equal(getattr(grads, name), getattr(again, name))
            assert_as_good_as_torch(getattr(grads, name).view(b.shape), a.to(getattr(grads, name).dtype), b, 3)
