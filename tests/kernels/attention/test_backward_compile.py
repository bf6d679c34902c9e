"""Backward passes compiled for a Hopper GPU that is not here: products, copies, what ptxas spills."""

import re

import pytest
import torch

pytest.importorskip("triton")


from offline_attention import BF16, FP32, GPU, allowed, launched, meta, named, newest, static, wide

from onchip.core import masks, scores
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import hopper_backward, hopper_backward_ordered, triton_backward

BACKWARD = {  # head dimension, packed, mask, copies by TMA and its additions, and bytes that ptxas may spill, stores and loads together
    "d64 causal": (64, False, Causal(), (12, 6), 284),
    "d128 full": (128, False, Full(), (20, 6), 120),
    "d128 packed": (128, True, Causal(), (14, 7), 352),
    "d128 window": (128, False, Window(1024), (14, 8), 304),
}


def backward(dim, packed, band, dim_v=0, extras=(), module=hopper_backward, **mod):
    """Four sequences of 4096 tokens in bf16, 4 heads a group."""
    tokens = (4 * 4096,) if packed else (4, 4096)
    p = Attention("backward", 4, 4096, 4096, 32, 8, dim, BF16, band, *(("packed", 0, 4 * 4096) if packed else ()), dim_v=dim_v, extras=extras)
    offsets = meta(5, dtype=torch.int32) if packed else None
    p, x = static(p, Operands(dim**-0.5, offsets, offsets), **mod)
    q, k, v, out = (meta(*tokens, heads, d) for heads, d in ((32, dim), (8, dim), (8, p.value_dim), (32, p.value_dim)))
    lse = meta(32, 4 * 4096, dtype=FP32) if packed else meta(4, 32, 4096, dtype=FP32)
    return launched(module, "sm_90", p, q, k, v, out, lse, out, None, x, returns=())


@pytest.mark.parametrize(("packed", "most"), [pytest.param(False, 0, marks=wide), (True, 128)], ids=["dense", "packed"])
def test_triton_backward(packed, most):
    """LSE and delta come by TMA as queries do: as single reads of each thread they took a third of a packed batch's loop over queries, and spilled in it."""
    _, found = backward(128, packed, Causal(), module=triton_backward)
    facts = found["_backward"]
    assert facts.spills <= allowed(most) and not facts.serialized
    assert facts.tma_loads and "cp.async.ca" not in facts.ptx and "mma.sync" not in facts.ptx


@pytest.mark.parametrize(("dim", "packed", "band", "copies", "most"), named(BACKWARD, "d128 packed", rest=("d128 full", "d128 window")))
def test_hopper_backward(dim, packed, band, copies, most):
    tiles, found = backward(dim, packed, band)
    check(dim, band, tiles, found["_backward"], copies, most)


def check(dim, band, tiles, facts, copies, most):
    """Five products a tile on wgmma, everything through TMA, dQ by its reductions, and no product that ptxas waits for on its own."""
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    steps = dim // 16 + dim // 16 + 2 * (tiles.m // 16) + tiles.n // 16  # of the scores, dP, dV and dK, and dQ
    blind = (band.right is not None) + (band.left is not None) if tiles.m == 64 else 0  # loops of dQ alone
    in_loops = facts.wgmma - (2 + blind) * (tiles.n // 16)  # each warpgroup adds a tile's last dQ behind them
    assert in_loops % (2 * steps) == 0 and in_loops >= 2 * 2 * steps and "mma.sync" not in facts.ptx
    assert (facts.tma_loads, facts.ptx.count("cp.reduce.async.bulk.tensor.3d")) == copies and "cp.async.cg" not in facts.ptx
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx


@pytest.mark.parametrize(("dim", "most"), [(128, 484), pytest.param(64, 68, marks=wide)])
def test_hopper_backward_of_dropout(dim, most):
    """What is kept is a word of bits for a step, made before there are scores; plain attention spills 120 bytes at d128."""
    tiles, found = backward(dim, False, Full(), drops=True)
    facts = found["_backward"]
    assert tiles.m == 64
    check(dim, Full(), tiles, facts, (20 if dim == 128 else 12, 6), most)
    assert facts.ptx.count("cvt.rn.relu.bf16x2") and len(re.findall(r"shfl\.sync\.bfly\.b32 \S+ \S+ 4,", facts.ptx)) == 2 * 2 * 4


@pytest.mark.parametrize(("dim", "copies", "most"), [(128, (14, 6), 288), pytest.param(64, (12, 6), 808, marks=wide)])
def test_hopper_backward_of_padding(dim, copies, most):
    """Cleared once a tile of keys; a document's mask spills 356 and 1,912 bytes, in its tiles that are seen in part."""
    tiles, found = backward(dim, False, Full(), mask=masks.KeyPadding(meta(4, 4096, dtype=torch.bool)) & Causal())
    check(dim, Full(), tiles, found["_backward"], copies, most)


@pytest.mark.parametrize(("dim", "most"), [pytest.param(128, 204, marks=wide), (64, 0)])
def test_hopper_backward_of_a_bias(dim, most):
    """Each warpgroup's part of a tile comes through TMA, and turned round by `ldmatrix`; it has room beside all else."""
    tiles, found = backward(dim, False, Full(), score=scores.Bias(meta(4, 32, 4096, 4096)))
    facts = found["_backward"]
    assert tiles.m == 64
    check(dim, Full(), tiles, facts, (16, 6), most)
    assert len(re.findall(r"ldmatrix\S*\.trans", facts.ptx)) == 2 * 2 * 4, "each loop of each warpgroup, 64 x 64 in tiles of 16 x 16 and a quarter a warp"


@pytest.mark.parametrize(("dim", "learnt", "most"), [pytest.param(128, False, 332, marks=wide), pytest.param(128, True, 512, marks=wide), (64, True, 132)])
def test_hopper_backward_by_distance(dim, learnt, most):
    """16 bytes a load of what scores begin with, and 16 an addition to the sums; no room in shared memory."""
    tiles, found = backward(dim, False, Full(), score=scores.RelativeBias(meta(32, 257, dtype=FP32).requires_grad_(learnt)))
    facts = found["_backward"]
    assert tiles.m == 64
    check(dim, Full(), tiles, facts, (14 if dim == 128 else 12, 6), most)
    assert len(re.findall(r"ld\.global\S*\.v4", facts.ptx)) == 2 * 2 * 8, "each loop of each warpgroup, 64 x 64 a quarter a warp"
    assert facts.ptx.count("red.relaxed.gpu.global.add.v4.f32") == 2 * 2 * 2 * learnt


ORDERED = {  # head dimension, that of values, packed, mask, of each pass copies by TMA, and bytes that it may spill, all of them outside of the loops
    "d64 full": (64, 0, False, Full(), (16, 12), (0, 0)),
    "d128 packed": (128, 0, True, Causal(), (22, 20), (0, 0)),
    "d256 window": (256, 0, False, Window(1024), (26, 42, 40), (0, 0, 0)),
    "d192 and 128": (192, 128, False, Causal(), (24, 32, 30), (0, 0, 0)),
    "d192 and 64": (192, 64, False, Causal(), (27, 25), (0, 0)),
}


@pytest.mark.parametrize(
    ("dim", "dim_v", "packed", "band", "copies", "most"), named(ORDERED, rest=("d256 window", "d128 packed", "d192 and 128", "d192 and 64"))
)
def test_hopper_backward_in_order(dim, dim_v, packed, band, copies, most):
    """Seven or eight products of a tile in passes; everything through TMA, nothing summed in memory, no product that ptxas waits for on its own."""
    tiles, found = backward(dim, packed, band, dim_v, ("deterministic",))
    facts_of = [facts for name, facts in found.items() if name.startswith("_backward_pass")]
    cuts, cuts_v = (hopper_backward_ordered.WIDTHS[hopper_backward_ordered.columns(d)] for d in (dim, dim_v or dim))
    for one, facts, spills in zip(tiles.passes, facts_of, most, strict=True):
        assert facts.spills <= allowed(spills), f"{one}: {facts.spills} bytes"
        assert facts.shared <= GPU["sm_90"].shared_memory
        steps = sum(cuts) // 16 + len(cuts_v) * one.stream // 16 * ("dV" in one.makes)  # of the scores, and dV
        if one.makes != "dV":
            steps += sum(cuts_v) // 16 + len(cuts) * one.stream // 16  # of dP, and dK or dQ
        assert facts.wgmma == 2 * 2 * steps  # of two warpgroups, in loops with and without a mask
        assert "mma.sync" not in facts.ptx and "cp.async.cg" not in facts.ptx and "cp.reduce" not in facts.ptx
        assert packed or "cp.async.bulk.tensor.4d.global" in facts.ptx
        assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert tuple(facts.tma_loads for facts in facts_of) == copies


@newest
def test_hopper_backward_in_order_under_a_mask():
    _, found = backward(128, False, Full(), extras=("deterministic",), mask=masks.Document(meta(4, 4096, dtype=torch.int32)))
    passes = [facts for name, facts in found.items() if name.startswith("_backward_pass")]
    spills = [facts.spills for facts in passes]
    assert all(ours <= allowed(limit) for ours, limit in zip(spills, (8, 112), strict=True)), spills
    assert [(facts.wgmma, facts.tma_loads, facts.serialized) for facts in passes] == [(96, 22, False), (96, 20, False)]
