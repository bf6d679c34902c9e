"""Prefills compiled for GPUs that are not here: spills, and the instructions that make them fast."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")


from offline_attention import BF16, FP32, GPU, allowed, launched, meta, named, products, static, wide

from onchip.core import device as devices
from onchip.core import masks, scores
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import PREFILL, hopper_prefill, triton_prefill
from onchip.kernels.attention.texts import distance_axes, key_tile, pair_tile


def prefill(arch, dim, band, packed=False, module=triton_prefill, len_q=4096, **mod):
    """Four sequences of 4096 tokens in bf16, 4 heads a group."""
    rest = ("packed", 0, 4 * len_q) if packed else ()
    p = Attention("prefill", 4, len_q, len_q, 32, 8, dim, BF16, band, *rest)
    tokens = (4 * len_q,) if packed else (4, len_q)
    offsets = meta(5, dtype=torch.int32) if packed else None
    p, x = static(p, Operands(dim**-0.5, offsets, offsets), **mod)
    tiles, facts = launched(module, arch, p, *(meta(*tokens, heads, dim) for heads in (32, 8, 8)), x)
    return tiles, facts["_prefill"]


@pytest.mark.parametrize(
    ("mask", "packed"),
    named(
        {"dense": (Causal(), False), "window": (Window(1024), False), "packed": (Causal(), True), "packed window": (Window(1024), True)},
        rest=("dense", "packed", "window"),
    ),
)
def test_prefill_sm_90_d64(mask, packed):
    """Everything in registers, products on wgmma, K and V through TMA."""
    _, facts = prefill("sm_90", 64, mask, packed)
    assert facts.spills == 0
    assert facts.wgmma and facts.tma_loads
    assert facts.ptx.count("cp.async.cg") == 0


@pytest.mark.parametrize("mask", [pytest.param(Full(), marks=wide), Causal()], ids=str)
def test_prefill_sm_90_d128(mask):
    """128x64 of 4 warps spills a little, outside of the loop, and was measured faster than tiles that do not."""
    tiles, facts = prefill("sm_90", 128, mask)
    assert facts.spills <= 256, f"{tiles}: {facts.spills} bytes"
    assert facts.wgmma and facts.tma_loads


@pytest.mark.parametrize(
    ("module", "arch", "dim"),
    [(hopper_prefill, "sm_90", 128), (triton_prefill, "sm_80", 128), pytest.param(hopper_prefill, "sm_90", 64, marks=wide)],
)
def test_keys_in_parts(module, arch, dim):
    """Of few queries over many keys: no spills, and one more launch that joins them."""
    p = Attention("prefill", 1, 64, 65536, 32, 8, dim, BF16, Causal())
    tiles, found = launched(module, arch, p, meta(1, 64, 32, dim), *(meta(1, 65536, 8, dim) for _ in range(2)), Operands(dim**-0.5))
    assert tiles.parts > 1 and [*found] == ["_prefill", "_join"]
    assert all(facts.spills <= allowed(0) for facts in found.values()), f"{tiles}: {[facts.spills for facts in found.values()]} bytes"


def test_prefill_sm_80():
    """No TMA: keys and values come through cp.async, 16 bytes a thread, and the products are mma.sync."""
    _, facts = prefill("sm_80", 64, Causal())
    assert facts.spills == 0
    assert facts.tma_loads == facts.wgmma == 0
    assert "mma.sync" in facts.ptx and "cp.async.cg" in facts.ptx and facts.vector_loads


def test_prefill_gfx942():
    tiles, facts = prefill("gfx942", 64, Causal())
    assert facts.shared <= GPU["gfx942"].shared_memory, str(tiles)
    assert re.search(r"vgpr_spill_count:\s+0\b", facts.ptx) and "mfma" in facts.ptx and facts.vector_loads


def test_wide_heads_in_float32_gfx942():
    """Of its 64 KiB: keys are gone when values come, and what queries were in is free when keys do."""
    p = Attention("prefill", 2, 64, 4096, 8, 8, 576, FP32, Causal(), dim_v=512)
    assert PREFILL.kernel("triton_prefill").refuses(p, GPU["gfx942"]) == []
    tiles, found = launched(triton_prefill, "gfx942", p, *(meta(2, n, 8, d, dtype=FP32) for n, d in ((64, 576), (4096, 576), (4096, 512))), Operands(0.1))
    assert all(facts.shared <= GPU["gfx942"].shared_memory for facts in found.values()), str(tiles)


def test_what_a_score_reads_a_pair_has_room():
    """Tables by query and key travel through shared memory beside K and V: with four of them the tiles are smaller."""
    tables = [meta(4, 4096, 4096, dtype=torch.int32) for _ in range(4)]
    edges = scores.chain(None, lambda s, b, h, i, j: s + sum(t[b, i, j] for t in tables), None)
    tiles, facts = prefill("sm_90", 128, Full(), score=edges)
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", devices.GPUS)
def test_every_gpu_has_tiles_that_fit(name, dtype, dim):
    """In shared memory: queries once, keys and values once a stage; a grid of few programs gets small tiles first."""
    gpu = devices.gpu(name)
    for len_q in (1, 64, 8192):
        found = triton_prefill.configs(Attention("prefill", 1, len_q, 8192, 8, 8, dim, dtype, Causal()), gpu)
        assert found
        for tiles in found:
            assert (tiles.m + 2 * tiles.stages * tiles.n) * dim * dtype.itemsize <= gpu.shared_memory
        assert found[0].m <= max(16, 2 * len_q)


PHILOX = 2 * 7  # wide products of a call of seven rounds


@pytest.mark.parametrize(
    ("arch", "dim", "most"),
    [pytest.param("sm_90", 64, 0, marks=wide), ("sm_90", 128, 0), pytest.param("sm_90", 256, 0, marks=wide), ("sm_80", 128, 96)],
)
def test_weights_share_calls_of_philox(arch, dim, most):
    """Sixteen do, and what they are goes once through shared memory: a call for each made the forward pass 6.5 times as long."""
    tiles, facts = prefill(arch, dim, Full(), drops=True)
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    calls = 2 * max(1, tiles.m * tiles.n // 16 // (32 * tiles.warps))  # of a thread, in a loop with the mask and one without
    assert len(re.findall(r"mul\.hi\.u32", facts.ptx)) <= (calls + 2) * PHILOX


@pytest.mark.parametrize(
    ("dim", "band", "most"),
    [pytest.param(64, Full(), 0, marks=wide), (128, Full(), 0), pytest.param(128, Causal(), 124, marks=wide), pytest.param(256, Full(), 56, marks=wide)],
)
def test_dropout_on_hopper(dim, band, most):
    """A lane makes half of the calls of its weights, and gets the other words from its neighbour; nothing goes through shared memory."""
    _, plain = prefill("sm_90", dim, band, module=hopper_prefill)
    tiles, facts = prefill("sm_90", dim, band, module=hopper_prefill, drops=True)
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert not facts.serialized and (dim == 64 or facts.ptx.count("st.shared") == plain.ptx.count("st.shared"))
    calls, words = len(re.findall(r"mul\.wide\.u32", facts.ptx)) / PHILOX, len(re.findall(r"shfl\.sync\.bfly\.b32 \S+ \S+ 4,", facts.ptx))
    assert words and calls * 2 <= words + 2


# ---- on Hopper


HOPPER = {  # dim, packed, mask or score: bytes that a thread may spill, all of them outside of the loops that matter; the newest ptxas spills more
    "d64 causal": (64, False, {"band": Causal(), "len_q": 16384}, 0),
    "d64 short causal": (64, False, {"band": Causal(), "len_q": 1024}, 0),
    "d128": (128, False, {}, 0),
    "d128 window": (128, False, {"band": Window(1024)}, 0),
    "d128 packed": (128, True, {"band": Causal()}, 0),
    "d128 softcap": (128, False, {"band": Causal(), "score": scores.Softcap(30.0)}, 0),
    "d64 softcap": (64, False, {"score": scores.Softcap(30.0)}, 0),
    "d128 ALiBi": (128, False, {"score": scores.ALiBi(meta(32, dtype=FP32))}, 64),
    "d128 document": (128, False, {"mask": masks.Document(meta(4, 4096, dtype=torch.int32))}, 0),
    "d128 padding": (128, False, {"mask": masks.KeyPadding(meta(4, dtype=torch.int32)) & Causal()}, 0),
    "d128 padding by flags": (128, False, {"mask": masks.KeyPadding(meta(4, 4096, dtype=torch.bool))}, 12),
    "d64 padding": (64, False, {"mask": masks.KeyPadding(meta(4, 4096, dtype=torch.bool)) & Causal()}, 0),
    "d256 causal": (256, False, {"band": Causal()}, 0),
    "d128 heads alone": (128, False, {"mask": masks.MaskMod(lambda b, h, i, j: h == 2), "score": scores.ScoreMod(lambda s, b, h, i, j: h.float())}, 0),
    "d128 activation": (128, False, {"score": scores.ScoreMod(lambda s, b, h, i, j: torch.log(torch.nn.functional.gelu(s) + 1.0))}, 0),
    "d128 bias": (128, False, {"score": scores.Bias(meta(4, 32, 4096, 4096))}, 0),
    "d128 bias in fp32": (128, False, {"score": scores.Bias(meta(4096, 4096, dtype=FP32))}, 0),
    "d256 bias": (256, False, {"score": scores.Bias(meta(4096, 4096))}, 0),
    "d128 bias of keys": (128, False, {"score": scores.Bias(meta(32, 1, 4096))}, 0),
    "d128 distances": (128, False, {"score": scores.RelativeBias(meta(32, 257, dtype=FP32))}, 0),
    "d64 distances": (64, False, {"band": Causal(), "len_q": 16384, "score": scores.BucketBias(meta(32, 32, dtype=FP32))}, 0),
    "d64 bias of keys": (64, False, {"band": Causal(), "len_q": 16384, "score": scores.Bias(meta(1, 4096, dtype=torch.float16))}, 0),
}

MORE = ("d64 short causal", "d64 softcap", "d128 padding", "d64 padding", "d64 distances", "d64 bias of keys")
MORE += ("d128 packed", "d128 document", "d256 causal", "d128 window")  # as over pages
MORE += ("d128 heads alone", "d128 activation", "d128 bias of keys", "d128 bias in fp32", "d128 softcap", "d128 ALiBi")


@pytest.mark.parametrize(("dim", "packed", "how", "most"), named(HOPPER, "d128", "d256 bias", rest=MORE))
def test_hopper_prefill(dim, packed, how, most):
    """Every product on wgmma, every tile through TMA, no wait for a product that ptxas adds, and the copying warp gives its registers away."""
    tiles, facts = prefill("sm_90", dim, packed=packed, module=hopper_prefill, **{"band": Full(), **how})
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    text = how["score"].static().text if "score" in how else ""
    times = products(tiles, facts, dim, how.get("band"), text)
    assert times >= 2 * tiles.groups and "mma.sync" not in facts.ptx
    loads = len(re.findall(r"ld\.global\S*\.v4", facts.ptx))  # each is 4 of a thread's n / 2 scores
    assert not text or distance_axes(text) is None or loads == (times + tiles.groups) * tiles.n // 8
    tile, row = (pair_tile(text), key_tile(text)) if text else (None, None)
    boxes = 0 if tile is None else tiles.groups * tiles.n * tile.dtype.itemsize // 128  # 128 bytes wide: of a tile that a score reads, and of a bias of keys
    boxes += 0 if row is None else tiles.n // 64
    assert facts.tma_loads == dim // 64 * (tiles.groups + 4) + 2 * boxes  # queries, and of keys and values a tile's first and the others
    assert "cp.async.cg" not in facts.ptx and facts.ptx.count("cp.async.bulk.tensor.4d.global") == (0 if packed else tiles.groups)
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert max(int(number) for number in re.findall(r"bar(?:rier)?\.sync\s+(\d+)(?:, 128)?;", facts.ptx)) < 6  # hardware barriers: the rest is ours


FOLDED = {  # dim, packed, queries, mask or score, and bytes that a thread may spill: of few queries, whose heads share a tile's rows
    "d64 full": (64, False, 200, {"band": Full()}, 0),
    "d128, one warpgroup": (128, False, 16, {}, 0),
    "d128 window": (128, False, 130, {"band": Window(1024)}, 0),
    "d128 ALiBi": (128, False, 130, {"score": scores.ALiBi(meta(32, dtype=FP32))}, 0),
    "d256 packed": (256, True, 130, {}, 0),
}


@pytest.mark.parametrize(
    ("dim", "packed", "len_q", "how", "most"), named(FOLDED, "d128 ALiBi", rest=("d64 full", "d128 window", "d128, one warpgroup", "d256 packed"))
)
def test_hopper_folds_heads(dim, packed, len_q, how, most):
    """Queries come through TMA in five dimensions, by 64 columns, and so does the output of a dense batch leave; the rest is as with one head a tile."""
    how = {"band": Causal(), **how}
    tiles, facts = prefill("sm_90", dim, packed=packed, module=hopper_prefill, len_q=len_q, **how)
    assert products(tiles, facts, dim, how["band"], how["score"].static().text if "score" in how else "") >= 2 * tiles.groups
    assert tiles.pack == 4 and facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.ptx.count("cp.async.bulk.tensor.5d.shared") == dim // 64 * tiles.groups
    assert facts.ptx.count("cp.async.bulk.tensor.5d.global") == (0 if packed else tiles.groups)
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx and "mma.sync" not in facts.ptx


@pytest.mark.parametrize(("dim", "dim_v"), itertools.product((64, 128, 256), repeat=2))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_hopper_has_room_for_a_bias(dim, dim_v, dtype):
    """Beside queries, output, keys and values, with 3 KiB left for barriers; what has not been measured the menu leaves to Triton."""
    p, _ = static(Attention("prefill", 4, 4096, 4096, 32, 8, dim, BF16, dim_v=dim_v), Operands(1.0), score=scores.Bias(meta(4096, 4096, dtype=dtype)))
    refusals = PREFILL.kernel("hopper_prefill").refuses(p, GPU["sm_90"])
    assert len(refusals) == (dtype == FP32 and max(dim, dim_v) == 256)
    (tiles,) = hopper_prefill.configs(p, GPU["sm_90"])
    output = 0 if dim == dim_v >= 128 else dim_v
    shared = 2 * 64 * tiles.groups * (dim + output) + 2 * tiles.stages * tiles.n * (dim + dim_v) + tiles.stages * 64 * tiles.groups * tiles.n * dtype.itemsize
    assert shared + (3 << 10) <= GPU["sm_90"].shared_memory


@pytest.mark.parametrize(("dtype", "widening"), [(BF16, "and.b32 %r\\d+, %r\\d+, 0xffff0000;"), (torch.float16, "cvt.f32.f16")], ids=["bf16", "fp16"])
def test_hopper_takes_a_bias_by_matrices(dtype, widening):
    """Of a tile of 64 x 128 in 128 threads 8 loads of four matrices, and of each value an instruction that widens it and a product.

    Two warpgroups have it in three places: the first tile, the others, and those done again over another maximum.
    """
    _, plain = prefill("sm_90", 128, module=hopper_prefill, band=Full())
    _, facts = prefill("sm_90", 128, module=hopper_prefill, band=Full(), score=scores.Bias(meta(4, 32, 4096, 4096, dtype=dtype)))
    count = [f.ptx.count("ldmatrix.sync.aligned.m8n8.x4") for f in (plain, facts)]
    assert count[1] - count[0] == 8 * 2 * 3
    assert len(re.findall(widening, facts.ptx)) == 64 * 2 * 3 // (2 if dtype == BF16 else 1)  # beside a shift of bf16's other half
    assert facts.ptx.count("ld.global") == plain.ptx.count("ld.global")
    assert facts.ptx.count("fma.rn.f32") == plain.ptx.count("fma.rn.f32")  # the product of queries and keys adds it
    products = [len(re.findall(r"mul(\.rn)?\.f32", f.ptx)) for f in (plain, facts)]
    assert products[1] - products[0] == 64 * 2 * 3 + 2, products  # and each warpgroup's factor
    assert facts.tma_loads - plain.tma_loads == 2 * 2 * 2  # a box of 64 columns for each half of a tile
