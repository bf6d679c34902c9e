"""The attention kernels compiled for GPUs that are not here: registers, spills, and the instructions that make them fast."""

import pytest
import torch

pytest.importorskip("triton")

from offline import compile_for
from onchip.core import device as devices
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention
from onchip.kernels.attention import triton_decode, triton_prefill

BF16 = torch.bfloat16
GPU = {"sm_80": devices.gpu("A100"), "sm_90": devices.gpu("H200"), "gfx942": devices.gpu("MI300X")}
ALIGNED = "q_batch q_head q_row k_batch k_head k_row v_batch v_head v_row o_batch o_head o_row".split()


def prefill(arch, dim, mask, packed=False, lse=False):
    """What the first configuration for a long sequence becomes on `arch`, and that configuration."""
    p = Attention("prefill", 4, 4096, 4096, 32, 8, dim, BF16, mask)
    tiles = triton_prefill.configs(p, GPU[arch])[0]
    tma = arch == "sm_90"
    blocks = {"q_src": tiles.m, "k_src": tiles.n, "v_src": tiles.n, **({} if packed else {"o_src": tiles.m})} if tma else {}
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    constexprs = {"D": dim, "BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_D": dim, "LEFT": left, "RIGHT": right, "TMA": tma}
    constexprs |= {"PACKED": packed, "LSE": lse, "STAGES": tiles.stages}
    constexprs |= {name: None for name, given in (("offsets_ptr", packed), ("lse_ptr", lse)) if not given}
    signature = dict.fromkeys(triton_prefill._prefill.arg_names, "i32") | {"scale": "fp32", "offsets_ptr": "*i32", "lse_ptr": "*fp32"}
    signature |= {f"{x}_src": f"tensordesc<bf16[1, 1, {blocks[f'{x}_src']}, {dim}]>" if f"{x}_src" in blocks else "*bf16" for x in "qkvo"}
    facts = compile_for(triton_prefill._prefill, signature, constexprs, arch, tiles.warps, tiles.stages, aligned=tuple(ALIGNED))
    return facts, tiles


def decode(arch, dim, page=16, group=4):
    p = Attention("decode", 32, 1, 4096, 8 * group, 8, dim, BF16, Causal(), "paged", page)
    how = triton_decode.configs(p, GPU[arch])[0]
    constexprs = {"D": dim, "ROWS": 16, "BLOCK_N": how.n, "BLOCK_D": dim, "PAGE": page, "LEFT": -1, "RIGHT": -1, "STAGES": how.stages}
    signature = dict.fromkeys(triton_decode._partial.arg_names, "i32") | {"scale": "fp32", "table_ptr": "*i32", "lengths_ptr": "*i32"}
    signature |= {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "o_ptr": "*fp32", "lse_ptr": "*fp32"}
    aligned = "q_batch q_row q_head k_page k_slot k_head v_page v_slot v_head".split()
    facts = compile_for(triton_decode._partial, signature, constexprs, arch, how.warps, how.stages, aligned=tuple(aligned))
    return facts, how


if __name__ == "__main__":
    import time
    for arch in GPU:
        for dim in (64, 128):
            for mask in (Full(), Causal(), Window(1024)):
                t=time.time(); f, tiles = prefill(arch, dim, mask, lse=True); print(arch, dim, mask, tiles, f.registers, f.spills, f.shared, f.wgmma, f.tma_loads, f.vector_loads, f.ptx.count('cp.async.cg'), time.time()-t, flush=True)
            t=time.time(); f, tiles = decode(arch, dim); print(arch, dim, 'decode', tiles, f.registers, f.spills, f.shared, f.wgmma, f.tma_loads, f.vector_loads, f.ptx.count('cp.async.cg'), time.time()-t, flush=True)
