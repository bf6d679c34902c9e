"""Every fused kernel compiled for GPUs that are not here, with the tiles it launches with: nothing spills, memory is read 16 bytes at a time."""

import pytest
import torch

from offline import compile_for
from onchip.core.device import gpu
from onchip.core.formats import Format
from onchip.core.problem import Rope, Rows
from onchip.kernels.fused import logits, mlp, norm, rope

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POINTER = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
GPUS = {"sm_80": gpu("A100"), "sm_90": gpu("H200"), "gfx942": gpu("MI300X")}
everywhere = pytest.mark.parametrize("arch", GPUS)


def check(facts, arch):
    assert facts.spills == 0
    if arch.startswith("sm"):  # gfx942 has 64 lanes a warp, so that short rows give each less than 16 bytes
        assert facts.vector_loads


@everywhere
@pytest.mark.parametrize(
    "problem",
    [
        Rows("rms_norm", rows, width, dtype, variant)
        for rows, width, dtype in ((8192, 576, BF16), (1, 4096, BF16), (8192, 8192, FP32), (512, 32768, BF16), (512, 65536, FP32))
        for variant in ("", "residual")
    ],
    ids=str,
)
def test_norm(problem, arch):
    tiles = norm.configs(problem, GPUS[arch])[0]
    matrix, added = POINTER[problem.dtype], problem.variant == "residual"
    signature = dict.fromkeys(("x_ptr", "residual_ptr", "w_ptr", "y_ptr", "sum_ptr"), matrix)
    signature |= dict.fromkeys(("rows", "width", "x_stride", "residual_stride"), "i32") | {"eps": "fp32", "offset": "fp32"}
    constexprs = {"RESIDUAL": added, "ROWS": tiles.rows, "BLOCK": tiles.block} | ({} if added else {"residual_ptr": None, "sum_ptr": None})
    kernel = norm._rms_norm if tiles.block >= problem.width else norm._rms_norm_wide
    check(compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=("width", "x_stride", "residual_stride")), arch)


@everywhere
@pytest.mark.parametrize("problem", [Rows("gated_act", 4096, 11008, dtype, act) for dtype in (BF16, FP32) for act in ("silu", "gelu", "gelu_tanh")], ids=str)
def test_mlp(problem, arch):
    tiles = mlp.configs(problem, GPUS[arch])[0]
    signature = {"x_ptr": POINTER[problem.dtype], "y_ptr": POINTER[problem.dtype], "width": "i32", "x_stride": "i32"}
    check(compile_for(mlp._gated_act, signature, {"ACT": problem.variant, "BLOCK": tiles.block}, arch, tiles.warps, aligned=("width", "x_stride")), arch)


@everywhere
@pytest.mark.parametrize(
    "problem",
    [
        Rope("rope_append", 512, heads, kv_heads, dim, rotary, dtype, layout, norm, True)
        for heads, kv_heads, dim, rotary, dtype in ((32, 8, 128, 128, BF16), (9, 3, 64, 64, FP32), (32, 32, 96, 32, BF16))
        for layout, norm in (("neox", dim == 64), ("interleaved", dim != 64))
    ]
    + [
        Rope("rope_append", 512, 32, 8, 128, 128, BF16, layout, False, True, kv)
        for kv, layout in (("e4m3", "neox"), ("e5m2", "interleaved"), ("int8", "neox"), ("int8/64", "interleaved"), ("int4", "neox"), ("int4/32", "neox"))
    ],
    ids=str,
)
def test_rope(problem, arch):
    tiles = rope.configs(problem, GPUS[arch])[0]
    form = Format.of(problem.kv) if problem.kv else None
    signature = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr"), POINTER[problem.dtype])
    signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8" if form else POINTER[problem.dtype])
    scales, zeros = ("k_scale_ptr", "v_scale_ptr"), ("k_zero_ptr", "v_zero_ptr")
    signature |= dict.fromkeys((*scales, *zeros), "*bf16")
    signature |= {"table_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64", "channel_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}
    strides = ("token_stride", "table_stride", "page_stride", "slot_stride", "head_stride", "scale_page_stride")
    signature |= dict.fromkeys(("num_q", "num_kv", "page", *strides, "scale_slot_stride", "scale_head_stride"), "i32")
    absent = (*(() if form else scales), *(() if form and form.has_zero else zeros), "channel_ptr", *(() if problem.norm else ("q_weight_ptr", "k_weight_ptr")))
    constexprs = {
        "NORM": problem.norm,
        "APPEND": problem.append,
        "INTERLEAVED": problem.layout == "interleaved",
        "ROTARY": problem.rotary_dim,
        "DIM": problem.dim,
        "PAIRS": rope.pairs(problem),
        "HEADS": tiles.heads,
        "FORMAT": form.name if form else "",
        "GROUPS": form.groups(problem.dim) if form else 1,
        "LARGEST": form.largest if form else 1.0,
    } | dict.fromkeys(absent)
    facts = compile_for(rope._rope_append, signature, constexprs, arch, tiles.warps, aligned=strides)
    check(facts, arch)
    assert problem.norm or form or facts.shared == 0, "the elements of a pair met in shared memory, not in a thread"


@everywhere
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_logits(dtype, arch):
    signature = {"logits_ptr": POINTER[dtype], "tokens_ptr": "*i64", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32"}
    signature |= {"min_p_ptr": "*fp32", "seed_ptr": "*i64", "step_ptr": "*i64", "row_stride": "i32", "vocab": "i32"}
    constexprs = {"BITS": logits.CONSTANT_BITS[dtype], "MARKS": logits.MARKS, "BLOCK": logits.BLOCK}
    check(compile_for(logits._sample, signature, constexprs, arch, logits.WARPS, aligned=("row_stride", "vocab")), arch)
