"""Every fused kernel compiled for GPUs that are not here, with the tiles it launches with: nothing spills, memory is read 16 bytes at a time."""

import pytest
import torch

from offline import compile_for
from onchip.core.device import gpu
from onchip.core.formats import Format
from onchip.core.problem import Rope, Rows
from onchip.kernels.fused import logits, logprobs, mlp, norm, penalties, rope, verify, vocabulary

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
        for layout in ("neox", "interleaved")
        for norm in (False, True)
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


TILES = {"MARKS": vocabulary.MARKS, "GROUP": 16, "TILE": vocabulary.TILE, "SLICES": 32, "GROUPS": 8192}  # of a vocabulary of 128,256
SIZES = ("row_stride", "place_stride", "vocab", "slices", "groups")


def logits_signature(dtype):
    numbers = ("top_k_ptr", "list_ptr", "output_ptr", "prompt_ptr", "mask_ptr", "parents_ptr")
    ids = ("tokens_ptr", "ids_ptr", "drawn_ptr", "count_ptr", "path_ptr", "token_ptr", "seed_ptr", "step_ptr")
    floats = ("slices_ptr", "limits_ptr", "chosen_ptr", "top_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "values_ptr", "q_ptr")
    floats += ("temperature_ptr", "top_p_ptr", "min_p_ptr", "typical_ptr")
    kinds = (POINTER[dtype], ("logits_ptr", "maxima_ptr", "out_ptr")), ("*i32", numbers), ("*i64", ids), ("*fp32", floats)
    return {name: kind for kind, names in kinds for name in names} | dict.fromkeys((*SIZES, "pieces", "num", "parents_stride"), "i32")


@everywhere
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_survey(dtype, arch):
    constexprs = {"GROUP": 16, "SLICE": vocabulary.SLICE}
    check(compile_for(vocabulary._survey, logits_signature(dtype), constexprs, arch, vocabulary.SLICE_WARPS, aligned=SIZES), arch)


@everywhere
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_logits(dtype, arch):
    constexprs = TILES | {"BITS": vocabulary.CONSTANT_BITS[dtype]}
    (tiles,) = logits.configs(Rows("sample", 64, 128_256, dtype), GPUS[arch])
    check(compile_for(logits._draw, logits_signature(dtype), constexprs, arch, tiles.warps, aligned=SIZES), arch)


@everywhere
def test_logprobs(arch):
    constexprs = TILES | {"BITS": vocabulary.CONSTANT_BITS[BF16], "TOP": 20}
    check(compile_for(logprobs._log_probs, logits_signature(BF16), constexprs, arch, logprobs.WARPS, aligned=SIZES), arch)


@everywhere
def test_penalties(arch):
    check(compile_for(penalties._adjust, logits_signature(BF16), {"BLOCK": penalties.BLOCK}, arch, penalties.WARPS, aligned=SIZES), arch)
    assert compile_for(penalties._adjust_biased, logits_signature(BF16), {"FEW": penalties.FEW}, arch, aligned=SIZES).spills == 0


@everywhere
def test_verify(arch):
    check(compile_for(verify._verify_chain, logits_signature(BF16), {"NUM": 8, "BLOCK": verify.BLOCK}, arch, verify.WARPS, aligned=SIZES), arch)
    assert compile_for(verify._walk, logits_signature(BF16), {"NUM": 64}, arch, 2).spills == 0
