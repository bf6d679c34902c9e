"""Attention in e4m3, forward and backward, compiled for a Hopper GPU that is not here."""

import pytest
import torch

pytest.importorskip("triton")


from offline_attention import FP32, GPU, allowed, launched, meta, named, newest, wide

from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scales import Scales
from onchip.kernels.attention import hopper_fp8, hopper_fp8_backward


def prefill_fp8(dim, mask, share=0, tokens=4096):
    """Four sequences in e4m3; `share`: keys and values that share a scale."""
    n = tokens // share if share else 1
    scales = Scales(*(meta(4, heads, n, dtype=FP32) for heads in (32, 8, 8)))
    p = Attention("prefill", 4, tokens, tokens, 32, 8, dim, torch.float8_e4m3fn, mask, extras=scales.extras(tokens, tokens))
    inputs = (meta(4, tokens, heads, dim, dtype=p.dtype) for heads in (32, 8, 8))
    tiles, facts = launched(hopper_fp8, "sm_90", p, *inputs, Operands(dim**-0.5, scales=scales))
    return tiles, facts["_prefill_fp8"]


@pytest.mark.parametrize(
    ("dim", "mask", "share", "tokens", "spills"),
    [
        pytest.param(64, Window(1024), 128, 4096, 0, marks=wide),
        pytest.param(128, Causal(), 0, 8192, 0, marks=newest),
        pytest.param(128, Causal(), 1, 4096, 0, marks=wide),
        (256, Causal(), 0, 4096, 0),
        pytest.param(64, Full(), 0, 4096, 0, marks=wide),
        (64, Full(), 1, 4096, 48),  # three warpgroups
        (128, Causal(), 128, 4096, 0),
        pytest.param(128, Window(1024), 0, 4096, 0, marks=wide),
        (128, Full(), 0, 8192, 0),  # the last tiles in parts
        pytest.param(256, Full(), 128, 4096, 0, marks=wide),
    ],
    ids=str,
)
def test_hopper_fp8(dim, mask, share, tokens, spills):
    """Both products in e4m3, weights packed by the conversion alone; no byte is moved from one place of a register to another."""
    tiles, facts = prefill_fp8(dim, mask, share, tokens)
    assert facts.spills <= allowed(spills), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    assert (tiles.parts > 1) == (dim == 128 and mask == Full())
    steps = dim // 32 + tiles.n // 32  # of one tile of scores, and of one of the output
    assert facts.wgmma % steps == 0 and facts.wgmma >= 2 * steps * tiles.groups and facts.ptx.count(".f32.e4m3.e4m3 ") == facts.wgmma
    assert facts.tma_loads == -(-dim // 128) * (tiles.groups + 2) + 2  # boxes of 128 bytes: of queries, and of a first tile and others
    assert "prmt.b32" not in facts.ptx and not facts.serialized and "setmaxnreg.dec" in facts.ptx


FP8_BACKWARD = {  # head dimension, mask, scales for 128 tokens, and bytes that the passes of dQ and of dK and dV may spill
    "d64 causal": (64, Causal(), True, (0, 84)),
    "d128": (128, Full(), False, (0, 0)),
    "d128 window": (128, Window(1024), True, (48, 28)),
}


@pytest.mark.parametrize(("dim", "mask", "blocks", "most"), named(FP8_BACKWARD, "d128 window", rest=("d64 causal", "d128")))
def test_hopper_fp8_backward(dim, mask, blocks, most):
    """Three products of each tile and four, with P and dS in e5m2 beside e4m3; the first operand of each sum comes from registers without a shuffle."""
    p = Attention("backward", 4, 4096, 4096, 32, 8, dim, torch.float8_e4m3fn, mask)
    scales = Scales(*(meta(4, heads, 32 if blocks else 1, dtype=FP32) for heads in (32, 8, 8)))
    inputs = [meta(4, 4096, heads, dim, dtype=p.dtype) for heads in (32, 8, 8)]
    out, lse = meta(4, 4096, 32, dim), meta(4, 32, 4096, dtype=FP32)
    tiles, found = launched(hopper_fp8_backward, "sm_90", p, *inputs, out, lse, out, None, Operands(dim**-0.5, scales=scales), returns=())
    passes = [facts for name, facts in found.items() if name.startswith("_backward_fp8")]
    kinds = ((tiles.groups, 1, tiles.keys), (2, 2, tiles.queries))  # warpgroups, and products with P or dS
    for facts, spills, (groups, mixed, stream) in zip(passes, most, kinds, strict=True):
        assert facts.spills <= allowed(spills), f"{tiles}: {facts.spills} bytes"
        assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
        loops = 2 * groups  # with and without a mask
        assert facts.ptx.count(".f32.e4m3.e4m3 ") == loops * 2 * dim // 32  # S and dP
        assert facts.ptx.count(".f32.e5m2.e4m3 ") == loops * mixed * stream // 32
        assert facts.wgmma == loops * (2 * dim + mixed * stream) // 32
        assert "prmt" not in facts.ptx and "cp.reduce" not in facts.ptx
        assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert [facts.tma_loads for facts in passes] == [18, 20]
    assert [found[name].spills for name in ("_scales_of", "_of_output", "_weighed", "_turn")] == [0, 0, 0, 0]
