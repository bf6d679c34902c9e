"""The kernels of losses compiled for GPUs that are not here, with the tiles they launch with: nothing spills, memory is read 16 bytes at a time."""

import pytest
import torch

from offline import compile_for
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.kernels.fused import cross_entropy

BF16, FP32 = torch.bfloat16, torch.float32
POINTER = {BF16: "*bf16", FP32: "*fp32"}
GPUS = {"sm_80": gpu("A100"), "sm_90": gpu("H200")}
everywhere = pytest.mark.parametrize("arch", GPUS)


def check(facts, vectors=1):
    assert facts.spills == 0
    assert facts.vector_loads >= vectors


VARIANTS = [(BF16, ""), (FP32, ""), (BF16, "entropy"), (BF16, "smoothing weights softcap"), (FP32, "entropy smoothing weights softcap")]


@everywhere
@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_backward", "cross_entropy_in_place"])
@pytest.mark.parametrize(("dtype", "variant"), VARIANTS)
def test_cross_entropy(op, dtype, variant, arch):
    problem = Rows(op, 8192, 128256, dtype, variant)
    tiles = cross_entropy.configs(problem, GPUS[arch])[0]
    kernel = {"cross_entropy": "_forward", "cross_entropy_backward": "_backward", "cross_entropy_in_place": "_in_place"}[op]
    kernel = getattr(cross_entropy, kernel)
    signature = dict.fromkeys(("logits_ptr", "out_ptr"), POINTER[dtype]) | {"targets_ptr": "*i64"}
    signature |= dict.fromkeys(("weights_ptr", "total_ptr", "stats_ptr", "g_ptr", "g_entropy_ptr"), "*fp32")
    signature |= dict.fromkeys(("tokens", "width", "row_stride", "out_stride", "first", "vocab", "ignore"), "i32")
    signature |= dict.fromkeys(("smoothing", "z_loss", "temperature", "inverse", "cap"), "fp32")
    constexprs = {"CAPPED": "softcap" in variant, "ENTROPY": "entropy" in variant, "SMOOTH": "smoothing" in variant, "BLOCK": tiles.block}
    constexprs |= {"LANE": 16 // dtype.itemsize} | ({} if "weights" in variant else {"weights_ptr": None, "total_ptr": None})
    constexprs |= {} if "entropy" in variant else {"g_entropy_ptr": None}
    constexprs = {name: value for name, value in constexprs.items() if name in getattr(kernel, "arg_names", ())}
    check(compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=("width", "row_stride", "out_stride")), 2)
