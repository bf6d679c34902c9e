"""The kernels of losses compiled for GPUs that are not here, with the tiles they launch with: nothing spills, memory is read 16 bytes at a time."""

import pytest
import torch
import triton

import onchip.kernels.fused.cross_entropy as cross_entropy
from offline import across, compile_for
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.kernels.fused import divergence, softmax
from onchip.kernels.meeting import BOTH

BF16, FP32 = torch.bfloat16, torch.float32
POINTER = {BF16: "*bf16", FP32: "*fp32"}
GPUS = {"sm_80": gpu("A100"), "sm_90": gpu("H200")}


def check(facts, vectors=1):
    assert facts.spills == 0
    assert facts.vector_loads >= vectors


VARIANTS = [(BF16, ""), (BF16, "smoothing weights softcap"), (FP32, "entropy smoothing weights softcap"), (FP32, ""), (BF16, "entropy")]


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_backward", "cross_entropy_in_place"])
@pytest.mark.parametrize(("dtype", "variant", "arch"), across(GPUS, VARIANTS, sm_90=range(3), sm_80=(0,)))
def test_cross_entropy(op, dtype, variant, arch):
    problem = Rows(op, 8192, 128256, dtype, variant)
    tiles = cross_entropy.configs(problem, GPUS[arch])[0]
    kernel = {"cross_entropy": "_forward", "cross_entropy_backward": "_backward", "cross_entropy_in_place": "_in_place"}[op]
    kernel = getattr(cross_entropy, kernel)
    signature = dict.fromkeys(("logits_ptr", "out_ptr"), POINTER[dtype]) | {"targets_ptr": "*i64", "words_ptr": "*i64"}
    signature |= dict.fromkeys(("weights_ptr", "total_ptr", "stats_ptr", "g_ptr", "g_entropy_ptr"), "*fp32")
    signature |= dict.fromkeys(("tokens", "width", "pieces", "row_stride", "out_stride", "first", "vocab", "ignore"), "i32")
    signature |= dict.fromkeys(("smoothing", "z_loss", "temperature", "inverse", "cap"), "fp32")
    constexprs = {"CAPPED": "softcap" in variant, "ENTROPY": "entropy" in variant, "SMOOTH": "smoothing" in variant, "BLOCK": tiles.block}
    constexprs |= {"PIECES": 32, "PHASE": 0}
    constexprs |= {"LANE": 16 // dtype.itemsize} | ({} if "weights" in variant else {"weights_ptr": None, "total_ptr": None})
    constexprs |= {} if "entropy" in variant else {"g_entropy_ptr": None}
    constexprs = {name: value for name, value in constexprs.items() if name in getattr(kernel, "arg_names", ())}
    check(compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=("width", "row_stride", "out_stride")), 2)


def softmax_facts(problem, arch, constexprs):
    """(tiles, facts) of a kernel of softmax compiled as it is launched: of whole rows, of a cluster, or of programs that meet."""
    tiles, forward = softmax.configs(problem, GPUS[arch])[0], problem.op == "softmax"
    if tiles.span:
        kernel = softmax._softmax_wide if forward else softmax._backward_wide
        constexprs |= {"SPAN": tiles.span, "PIECES": triton.next_power_of_2(triton.cdiv(problem.width, tiles.span * tiles.block)), "PHASE": BOTH}
    else:
        kernel = softmax._softmax if forward else softmax._backward
        constexprs |= {"ROWS": tiles.rows, "CTAS": tiles.ctas, "CLUSTER": True} | ({"PARTS": tiles.parts} if forward else {})
    types = {"words_ptr": "*i64", "mask_ptr": "*u8" if constexprs.get("BOOL") else POINTER[problem.dtype], "temperature": "fp32", "inverse": "fp32"}
    signature = {name: types.get(name, POINTER[problem.dtype] if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    aligned = ("width", "x_stride", "y_stride", "dy_stride", "stride_0", "stride_1", "stride_2")
    constexprs |= {"BLOCK": tiles.block}
    return tiles, compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=aligned, ctas=tiles.ctas, most_registers=tiles.registers)


WIDTHS = [(4096, BF16), (65536, BF16), (16384, FP32), (131072, BF16), (131072, FP32), (1 << 18, BF16)]  # a program's, and clusters' of Hopper
SOFTMAX = [(*size, variant) for variant in ("", "log bool mask", "log mask") for size in WIDTHS]
ON_HOPPER = (1, 3, 5, 6, 11, 14, 16)  # each size, and each variant
ELSEWHERE = (0, 5, 10)  # a program's, and programs' that meet after one piece and after two


@pytest.mark.parametrize(("width", "dtype", "variant", "arch"), across(GPUS, SOFTMAX, sm_90=ON_HOPPER, sm_80=ELSEWHERE))
def test_softmax(width, dtype, variant, arch):
    constexprs = {"DIVIDED": "log" in variant, "BOOL": "bool" in variant, "LOG": "log" in variant} | ({} if "mask" in variant else {"mask_ptr": None})
    tiles, facts = softmax_facts(Rows("softmax", 8192, width, dtype, variant), arch, constexprs)
    check(facts)
    if tiles.ctas > 1 and not variant:
        assert facts.registers <= 80, "a multiprocessor should have three programs or more"


BACK = [(4096, BF16), (16384, BF16), (8192, FP32), (131072, BF16), (131072, FP32), (1 << 18, BF16)]
BACKWARD = [(*size, variant) for variant in ("", "log") for size in BACK]


@pytest.mark.parametrize(("width", "dtype", "variant", "arch"), across(GPUS, BACKWARD, sm_90=(1, 3, 5, 6, 8, 10), sm_80=(1, 10)))
def test_softmax_backward(width, dtype, variant, arch):
    tiles, facts = softmax_facts(Rows("softmax_backward", 8192, width, dtype, variant), arch, {"LOG": "log" in variant})
    check(facts, 2)
    if tiles.ctas > 1 and not variant:
        assert facts.registers <= 80, "a multiprocessor should have three programs or more"


KINDS = [(kind, dtype) for dtype in (BF16, FP32) for kind in range(3)]


@pytest.mark.parametrize("op", ["divergence", "divergence_backward"])
@pytest.mark.parametrize(("kind", "dtype", "arch"), across(GPUS, KINDS, sm_90=(0, 1, 5), sm_80=(2,)))
def test_divergence(op, kind, dtype, arch):
    tiles = divergence.configs(Rows(op, 8192, 128256, dtype), GPUS[arch])[0]
    kernel = divergence._forward if op == "divergence" else divergence._backward
    signature = dict.fromkeys(("student_ptr", "teacher_ptr", "out_ptr"), POINTER[dtype]) | {"counts_ptr": "*u8", "stats_ptr": "*fp32", "g_ptr": "*fp32"}
    signature |= dict.fromkeys(("tokens", "width", "student_stride", "teacher_stride", "out_stride"), "i32")
    signature |= dict.fromkeys(("inverse", "beta"), "fp32")
    constexprs = {"KIND": kind, "BLOCK": tiles.block} | ({"LANE": 16 // dtype.itemsize} if op == "divergence" else {})
    check(compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=("width", "student_stride", "teacher_stride", "out_stride")), 2)
