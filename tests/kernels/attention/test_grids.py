"""More sequences than a GPU takes in y and z of a grid, 65,535: what each kernel would launch, without running it."""

import math

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from onchip.core import device as devices
from onchip.core.masks import Causal, Document
from onchip.core.problem import E4M3, Attention, Operands, Rows
from onchip.core.scales import Scales
from onchip.dispatch import OPS
from onchip.ops.attend import PagedKV

MANY, HEADS, DIM = 66_000, 2, 64
H200 = devices.gpu("H200")
BF16 = torch.bfloat16
DOCUMENTS = Document(torch.zeros(MANY, 3, dtype=torch.int32))


@pytest.fixture
def grids(monkeypatch):
    """The grid of every launch, which does nothing."""
    found = []

    def launch(_kernel, grid):
        found.append(grid)
        return lambda *_values, **_constants: None

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return found


def dense(op: str, mask, dtype=BF16):
    """A Problem and q, k, v of three tokens a sequence."""
    static, captured = mask.parts()
    p = Attention(op, MANY, 3, 3, HEADS, HEADS, DIM, dtype, static)
    return p, [torch.zeros(MANY, 3, HEADS, DIM, dtype=dtype) for _ in range(3)], Operands(0.1, mask=captured)


KERNELS = [("prefill", "triton_prefill"), ("prefill", "hopper_prefill"), ("backward", "triton_backward"), ("backward", "hopper_backward")]


@pytest.mark.parametrize("mask", [Causal(), DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize(("op", "name"), KERNELS, ids=[name for _, name in KERNELS])
def test_dense(op, name, mask, grids):
    p, (q, k, v), x = dense(op, mask)
    kernel = OPS[op].kernel(name)
    run, (tiles, *_) = kernel.load(), kernel.configs(p, H200)
    if op == "prefill":
        run(p, tiles, q, k, v, x, True)
    else:
        run(p, tiles, q, k, v, torch.zeros_like(q), torch.zeros(MANY, HEADS, 3), torch.zeros_like(q), None, x)
    fit(grids)


@pytest.mark.parametrize(("op", "name"), [("prefill", "hopper_fp8"), ("backward", "hopper_fp8_backward")], ids=["forward", "backward"])
def test_e4m3(op, name, grids):
    p, (q, k, v), x = dense(op, Causal(), E4M3)
    x = x._replace(scales=Scales(*(torch.ones(MANY, HEADS, 1) for _ in range(3))))
    kernel = OPS[op].kernel(name)
    run, (tiles, *_) = kernel.load(), kernel.configs(p, H200)
    if op == "prefill":
        run(p, tiles, q, k, v, x, True)
    else:
        out = torch.zeros(q.shape, dtype=BF16)
        run(p, tiles, q, k, v, out, torch.zeros(MANY, HEADS, 3), out, None, x)
    fit(grids)


@pytest.mark.parametrize("share", [0, 1, 128])
def test_quantise(share, grids):
    kernel = OPS["quantise"].kernel("triton_quantise")
    kernel.load()(Rows("quantise", MANY, DIM, BF16), None, torch.zeros(MANY, 3, HEADS, DIM, dtype=BF16), share)
    fit(grids)


def test_decode(grids):
    p = Attention("decode", MANY, 1, 16, HEADS, HEADS, DIM, BF16, Causal(), "paged", 16)
    table, lengths = torch.zeros(MANY, 1, dtype=torch.int32), torch.ones(MANY, dtype=torch.int32)
    pages = [torch.zeros(4, 16, HEADS, DIM, dtype=BF16) for _ in range(2)]
    kernel = OPS["decode"].kernel("triton_decode")
    q = torch.zeros(MANY, 1, HEADS, DIM, dtype=BF16)
    kernel.load()(p, kernel.configs(p, H200)[0], q, PagedKV(*pages, table, lengths), Operands(0.1), True)
    fit(grids)


def fit(grids):
    assert grids
    for x, *others in grids:
        assert x < 1 << 31 and math.prod(others) <= 65_535
