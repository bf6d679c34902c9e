"""The attention kernels compiled for GPUs that are not here: spills, and the instructions that make them fast."""

import re

import pytest
import torch

pytest.importorskip("triton")

from offline import compile_for
from onchip.core import device as devices
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention
from onchip.kernels.attention import triton_decode, triton_prefill

GPU = {"sm_80": devices.gpu("A100"), "sm_90": devices.gpu("H200"), "gfx942": devices.gpu("MI300X")}
PREFILL_STRIDES = ("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "o_batch", "o_head", "o_row")
DECODE_STRIDES = ("q_batch", "q_row", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head")


def prefill(arch, dim, mask, packed=False):
    """The first configuration for long sequences in bf16, and what it becomes on `arch`; with LSE, and TMA where a launch would use it."""
    fn = triton_prefill._prefill
    tiles = triton_prefill.configs(Attention("prefill", 4, 4096, 4096, 32, 8, dim, torch.bfloat16, mask), GPU[arch])[0]
    tma = arch == "sm_90"
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    constexprs = {"D": dim, "BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_D": dim, "LEFT": left, "RIGHT": right, "TMA": tma}
    constexprs |= {"PACKED": packed, "LSE": True, "STAGES": tiles.stages, **({} if packed else {"offsets_ptr": None})}
    signature = dict.fromkeys(fn.arg_names, "i32") | {"scale": "fp32", "offsets_ptr": "*i32", "lse_ptr": "*fp32"}
    for name, rows in (("q", tiles.m), ("k", tiles.n), ("v", tiles.n), ("o", None if packed else tiles.m)):
        signature[f"{name}_src"] = f"tensordesc<bf16[1, 1, {rows}, {dim}]>" if tma and rows else "*bf16"
    return tiles, compile_for(fn, signature, constexprs, arch, tiles.warps, tiles.stages, PREFILL_STRIDES)


def decode(arch, dim, page=16):
    """The first configuration of `_partial` for 32 sequences of 4096 keys in bf16, 4 heads a group, and what it becomes on `arch`."""
    fn = triton_decode._partial
    how = triton_decode.configs(Attention("decode", 32, 1, 4096, 32, 8, dim, torch.bfloat16, Causal(), "paged", page), GPU[arch])[0]
    constexprs = {"D": dim, "ROWS": 16, "BLOCK_N": how.n, "BLOCK_D": dim, "PAGE": page, "LEFT": -1, "RIGHT": -1, "STAGES": how.stages}
    signature = dict.fromkeys(fn.arg_names, "i32") | dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32")
    signature |= {"scale": "fp32", "o_ptr": "*fp32", "lse_ptr": "*fp32"}
    return how, compile_for(fn, signature, constexprs, arch, how.warps, how.stages, DECODE_STRIDES)


# ---- prefill


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("mask", [Causal(), Window(1024)], ids=str)
def test_prefill_sm_90_d64(mask, packed):
    """Everything in registers, products on wgmma, K and V through TMA."""
    _, facts = prefill("sm_90", 64, mask, packed)
    assert facts.spills == 0
    assert facts.wgmma and facts.tma_loads
    assert facts.ptx.count("cp.async.cg") == 0


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_prefill_sm_90_d128(mask):
    """128x64 of 4 warps spills a little, outside of the loop, and was measured faster than tiles that do not."""
    tiles, facts = prefill("sm_90", 128, mask)
    assert facts.spills <= 256, f"{tiles}: {facts.spills} bytes"
    assert facts.wgmma and facts.tma_loads


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


# ---- decode


@pytest.mark.parametrize(("arch", "dim"), [("sm_80", 64), ("sm_80", 128), ("sm_90", 128)])
def test_decode_nvidia(arch, dim):
    """Pages come through cp.async, 16 bytes a thread, so that tiles in flight cost no registers."""
    how, facts = decode(arch, dim)
    assert facts.spills == 0, str(how)
    assert "cp.async.cg" in facts.ptx and "mma.sync" in facts.ptx
    assert 2 * facts.shared <= GPU[arch].shared_memory  # two programs a multiprocessor


def test_decode_gfx942():
    how, facts = decode("gfx942", 128)
    assert re.search(r"vgpr_spill_count:\s+0\b", facts.ptx) and "mfma" in facts.ptx and facts.vector_loads, str(how)
    assert facts.shared <= GPU["gfx942"].shared_memory


def test_merge_reads_shares_in_vectors():
    fn = triton_decode._merge
    constexprs = {"D": 128, "ROWS": 16, "BLOCK_D": 128, "SPLITS": 8, "LSE": True}
    signature = dict.fromkeys(fn.arg_names, "i32") | {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "o_ptr": "*bf16", "lse_ptr": "*fp32"}
    facts = compile_for(fn, signature, constexprs, "sm_90", num_warps=2, aligned=("o_batch", "o_row", "o_head"))
    assert facts.spills == 0 and facts.vector_loads
