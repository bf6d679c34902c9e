"""Every fused kernel compiled for GPUs that are not here, with the tiles it launches with: nothing spills, memory is read 16 bytes at a time."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from offline import across, compile_for, compiled, wide
from onchip.core.device import gpu
from onchip.core.formats import Format
from onchip.core.problem import Groups, Rope, Rows
from onchip.kernels.fused import (
    adamw,
    decode_step,
    denoise,
    dropout,
    embedding,
    gluon_hadamard,
    gluon_stay,
    group_last,
    group_norm,
    group_norm_backward,
    group_stay,
    group_tile,
    hadamard,
    hopper_hadamard,
    logits,
    logprobs,
    low_rank,
    mlp,
    norm,
    norm_backward,
    penalties,
    rope,
    skinny,
    verify,
    vocabulary,
)
from onchip.kernels.meeting import BOTH, SECOND

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POINTER = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
GPUS = {"sm_80": gpu("A100"), "sm_90": gpu("H200"), "gfx942": gpu("MI300X")}
everywhere = pytest.mark.parametrize("arch", across(GPUS, [()], gfx942=(0,)))


def check(facts, arch, spills=0):
    assert facts.spills <= spills
    if arch.startswith("sm"):  # gfx942 has 64 lanes a warp, so that short rows give each less than 16 bytes
        assert facts.vector_loads


STRIDES = ("x_stride", "residual_stride", "total_stride", "z_stride", "dy_stride", "d_total_stride", "w_stride", "gate_stride", "mod_stride", "silu_stride")
IN_FP32 = {f"{name}_ptr" for name in ("codes", "mean", "rstd", "d_w", "d_b", "d_gate", "d_scale", "d_shift")}
NORM_FORMS = {  # name: (tensors of the forward pass, of the backward pass, words of the Problem)
    "rms": ("x w y", "dy z w dx d_w rstd", "rms weight -> x weight"),
    "add": ("x residual total w y", "dy d_total z w dx d_w rstd", "rms residual weight d_total -> x weight"),
    "layer": ("x w b y mean rstd", "dy z w b dx d_w d_b mean rstd", "layer weight bias -> x weight bias"),
    "silu": ("x w silu y rstd", "dy z w silu dx d_w d_silu rstd", "rms weight silu -> x weight silu"),
    "modulated": ("x scale shift y", "dy z scale dx d_scale d_shift mean rstd", "layer scale shift -> x scale shift"),
    "zero": (
        "x residual total gate scale shift y mean rstd", "dy d_total z x gate scale dx d_residual d_gate d_scale d_shift mean rstd",
        "layer residual gate scale shift d_total -> x residual gate scale shift",
    ),
}  # fmt: skip


def norm_facts(kernel, tiles, width, dtype, there, words, arch, codes=""):
    """A norm kernel compiled with these tensors there and no others; of a row in pieces, with the wait for the others where a GPU's kernel has it."""
    ctas = getattr(tiles, "ctas", 1)
    pieces = triton.cdiv(width, tiles.parts * tiles.block * ctas)
    there = {f"{name}_ptr" for name in there.split()} | ({"word_ptr", "z_ptr"} if pieces > 1 else set())
    values = {"LAYER": words.startswith("layer"), "W": "all", "GATE": "set", "MOD": "set", "PHILOX_ROUNDS": 7, "CODES": codes, "LARGEST": 0.0, "INVERSE": False}
    values |= {"ROWS": tiles.rows, "PARTS": tiles.parts, "BLOCK": tiles.block, "STAGES": getattr(tiles, "stages", 1), "PIECES": triton.next_power_of_2(pieces)}
    values |= {"LAG": getattr(tiles, "lag", 0) if pieces > 1 else 0, "CTAS": ctas, "CLUSTER": True, "HELD": getattr(tiles, "registers", 0) > 0}
    values |= {"offset": None, "HOPPER": arch == "sm_90", "EARLY": arch == "sm_90" and ctas == 1}
    values |= {"PHASE": BOTH if arch.startswith("sm") or pieces == 1 else SECOND} | ({"pieces": 1} if pieces == 1 else {})
    names = kernel.arg_names
    constexprs = {name: values[name] for name in names if name in values} | {name: None for name in names if name.endswith("_ptr") and name not in there}
    types = dict.fromkeys(("eps", "offset", "grown"), "fp32") | {"bar": "i64", "word_ptr": "*i64"} | dict.fromkeys(IN_FP32, "*fp32")
    types |= {"y_ptr": "*u8"} if codes else {}
    signature = {name: types.get(name, POINTER[dtype] if name.endswith("_ptr") else "i32") for name in names}
    return compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=("width", *STRIDES), ctas=ctas, most_registers=getattr(tiles, "registers", 0))


NORMS = [
    ("add", 512, 32768, BF16),  # clusters of 4 on Hopper, pieces on other GPUs
    ("silu", 4096, 4096, BF16),
    ("zero", 4096, 4096, BF16),
    ("layer", 8192, 8192, FP32),
    ("modulated", 32768, 1152, BF16),  # four rows a tile
    ("rms", 4096, 16384, BF16),
    ("rms", 8192, 576, BF16),
    ("layer", 8192, 1152, BF16),
    ("modulated", 18432, 3072, BF16),
    ("add", 512, 65536, BF16),
]


@pytest.mark.parametrize(("form", "rows", "width", "dtype", "arch"), across(GPUS, NORMS, sm_90=range(6), gfx942=(0, 1)))
def test_norm(form, rows, width, dtype, arch):
    there, _, words = NORM_FORMS[form]
    tiles = norm.configs(Rows("norm", rows, width, dtype, words.partition(" ->")[0]), GPUS[arch])[0]
    facts = norm_facts(norm._norm, tiles, width, dtype, there, words, arch)
    check(facts, arch)
    assert facts.ptx.count("barrier.cluster.wait") == (tiles.ctas > 1), "the exchange was written more than once: its result is wanted in two layouts"
    if arch == "sm_90" and tiles.ctas == 1:
        before, _ = facts.ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before and "ld.global" not in before and "st.global" not in before


STAYS = [("norm", "rms", 1 << 18), ("norm", "layer", 1 << 17), ("norm_backward", "rms", 1 << 17), ("norm_backward", "layer", 1 << 18)]
MORE_STAY = [("norm", "rms", 1 << 17), ("norm", "layer", 1 << 18), ("norm_backward", "rms", 1 << 18), ("norm_backward", "layer", 1 << 17)]


@pytest.mark.parametrize(("op", "form", "width"), [*STAYS, *(pytest.param(*case, marks=wide) for case in MORE_STAY)])
def test_norm_by_clusters_that_stay(op, form, width):
    """A row and its sums are waited for, and by nobody for all of a program's threads; the ring is all of Triton's shared memory, where `_copy` finds it."""
    words, wanted = ("layer weight bias keep", "x weight bias") if form == "layer" else ("rms weight keep", "x weight")
    back = op == "norm_backward"
    problem = Rows(op, 256, width, BF16, f"{words} -> {wanted}" if back else words)
    tiles = next(iter(gluon_stay.configs(problem, GPUS["sm_90"])), None)
    if tiles is None:
        pytest.skip("others are faster")
    shape = gluon_stay.Shape(form == "layer", 1 + back, *tiles[1:6], True)
    kernel = gluon_stay._backward if back else gluon_stay._forward
    pointers = {"x_ptr", "y_ptr", "rstd_ptr", "w_ptr", "dy_ptr", "z_ptr", "dx_ptr", "dw_ptr"} | ({"mean_ptr", "b_ptr", "db_ptr"} if form == "layer" else set())
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"), "*fp32") | {"eps": "fp32"}
    signature |= dict.fromkeys(("x_stride", "dy_stride", "z_stride", "rows"), "i32")
    values = {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in pointers} | {"offset": None, "EARLY": True, "C": shape}
    values = {name: value for name, value in values.items() if name in kernel.arg_names}
    facts = compile_for(kernel, signature, values, "sm_90", tiles.warps, aligned=("x_stride", "dy_stride", "z_stride"), ctas=tiles.ctas)
    check(facts, "sm_90")
    assert facts.shared == tiles.stages * tiles.parts * tiles.warps * 512 * (1 + back) and "bar.sync \t0" not in facts.ptx
    assert facts.ptx.count("try_wait") == 2 + tiles.later and facts.ptx.count("st.async") == (1 + tiles.later) * shape.values
    assert facts.ptx.count("cp.async.bulk") == (1 + back) * (tiles.stages + 1)


@pytest.mark.parametrize("form", ["rms", "layer"])
def test_norm_to_codes(form):
    """By the GPU's own conversion, two numbers at a time; without a mean by one reduction, of two barriers."""
    there, _, words = NORM_FORMS[form]
    tiles = norm.configs(Rows("norm", 8192, 4096, BF16, f"{words.partition(' ->')[0]} e4m3"), GPUS["sm_90"])[0]
    facts = norm_facts(norm._norm, tiles, 4096, BF16, f"{there} codes", words, "sm_90", "e4m3")
    check(facts, "sm_90")
    assert facts.ptx.count("cvt.rn.satfinite.e4m3x2") == 16 and (facts.ptx.count("bar.sync") == 2) == (form == "rms")


BACKWARD = [
    ("add", 512, 131072, BF16),  # pieces
    ("silu", 8192, 4096, BF16),
    ("zero", 4096, 4096, FP32),
    ("rms", 512, 131072, BF16),  # clusters of 16 on Hopper
    ("layer", 8192, 1152, BF16),
    ("zero", 8192, 5120, BF16),
]


@pytest.mark.parametrize(("form", "rows", "width", "dtype", "arch"), across(GPUS, BACKWARD, sm_90=range(5), gfx942=(0, 1)))
def test_norm_backward(form, rows, width, dtype, arch):
    _, there, words = NORM_FORMS[form]
    tiles = norm_backward.configs(Rows("norm_backward", rows, width, dtype, words), GPUS[arch])[-1]  # of which the first may be clusters that stay
    facts = norm_facts(norm_backward._norm_backward, tiles, width, dtype, there, words, arch)
    assert facts.spills == 0 and facts.ptx.count("barrier.cluster.wait") == (tiles.ctas > 1)
    if arch.startswith("sm"):
        assert "cp.async" in facts.ptx and facts.shared <= GPUS[arch].shared_memory


GROUPS = [
    (Groups("group_norm", 16, 1280, 32, 256, BF16, "silu"),),
    (Groups("group_norm", 1, 128, 32, 1 << 20, FP32),),
    (Groups("group_norm", 16, 320, 32, 4096, BF16, "silu", "channels_last"),),
    (Groups("group_norm", 1, 128, 32, 1 << 20, FP32, "mish", "channels_last"),),
    (Groups("group_norm", 16, 100, 4, 4096, FP16, "silu", "channels_last"),),
]


@pytest.mark.parametrize(("problem", "arch"), across(GPUS, GROUPS, gfx942=(0, 2)))
def test_group_norm(problem, arch):
    is_last = problem.layout == "channels_last"
    for module in (group_norm, group_norm_backward):
        problem = problem._replace(op=module.__name__.split(".")[-1])
        tiles = module.configs(problem, GPUS[arch])[-1]
        if is_last:
            kernel = group_last._forward_last if module is group_norm else group_last._backward_last
            values = group_last.constants(problem, tiles, arch.startswith("sm"))
        else:
            kernel = group_norm_backward._backward_first if module is group_norm_backward else group_norm._twice if tiles.team > 32 else group_norm._held
            values = group_tile.arguments(problem, tiles, torch.empty(0)) | {"PHASE": 0, "WORDS": arch.startswith("sm")}
            values |= {"STREAM": tiles.share > tiles.held // tiles.span * tiles.rows, "TEAM": triton.next_power_of_2(tiles.team)}
            values |= {"KEEP": group_norm_backward._keeps(tiles)}
        values["EARLY"] = arch == "sm_90"
        matrices, numbers = {"x_ptr", "y_ptr", "dy_ptr", "dx_ptr", "w_ptr", "b_ptr"}, {"count_ptr": "*i64", "word_ptr": "*i64", "eps": "fp32"}
        numbers |= {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr") and name not in numbers}
        signature = {name: POINTER[problem.dtype] if name in matrices else numbers.get(name, "i32") for name in kernel.arg_names}
        constexprs = {name: values[name] for name in kernel.arg_names if name.isupper()}
        most = values.get("maxnreg", 0) if arch.startswith("sm") else 0
        odd = problem.channels % 16 > 0
        aligned = ("pixels", "share") if odd else ("channels", "pixels", "share")
        facts = compile_for(kernel, signature, constexprs, arch, tiles.warps, aligned=aligned, most_registers=most)
        assert facts.spills <= (0 if odd or module is group_norm else 256 if tiles.warps > 8 else 64)
        assert facts.vector_loads or odd or not arch.startswith("sm")


def launched(monkeypatch, launch, *args):
    """What the kernel of a launch on meta tensors becomes for Hopper."""
    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **rest: calls.append((kernel, args, rest)))
    launch(*args)
    ((kernel, args, rest),) = calls
    return compiled(kernel, args, rest, "sm_90")


def test_programs_that_stay(monkeypatch):
    """Everything in registers, one copy's instruction, all of a multiprocessor's shared memory."""
    p = Groups("group_norm", 1, 128, 32, 1 << 20, BF16, "silu")
    x, weight = torch.empty(p.batch, p.channels, p.pixels, dtype=BF16, device="meta"), torch.empty(p.channels, dtype=BF16, device="meta")
    facts = launched(monkeypatch, group_stay.launch, p, group_stay.configs(p, GPUS["sm_90"])[0], x, x, weight, weight, 1e-5, None, None)
    assert facts.tma_loads == 1 and facts.spills <= 16 and facts.shared <= GPUS["sm_90"].shared_memory


APPENDS = [
    Rope("rope_append", 512, heads, kv_heads, dim, rotary, dtype, layout, norm, True)
    for heads, kv_heads, dim, rotary, dtype in ((32, 8, 128, 128, BF16), (9, 3, 64, 64, FP32), (32, 32, 96, 32, BF16))
    for layout, norm in (("neox", dim == 64), ("interleaved", dim != 64))
]
APPENDS += [
    Rope("rope_append", 512, 32, 8, 128, 128, BF16, layout, False, True, kv)
    for kv, layout in (("e4m3", "neox"), ("e5m2", "interleaved"), ("int8", "neox"), ("int8/64", "interleaved"), ("int4", "neox"), ("int4/32", "neox"))
]
APPENDS += [Rope("rope_append", 4096, 32, 8, 128, 128, BF16, "neox", False, True, kv) for kv in ("", "int4", "e4m3")]  # whole tokens a program
ON_HOPPER = (1, 2, 4, 6, 9, 10, 11, 12, 13)  # each layout, norm and size of a head; of codes each kind


@pytest.mark.parametrize(("problem", "arch"), across(GPUS, [(p,) for p in APPENDS], sm_90=ON_HOPPER, gfx942=(1, 11)))
def test_rope(problem, arch):
    tiles = rope.configs(problem, GPUS[arch])[0]
    form = Format.of(problem.kv) if problem.kv else None
    signature = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr"), POINTER[problem.dtype])
    signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8" if form else POINTER[problem.dtype])
    scales, zeros = ("k_scale_ptr", "v_scale_ptr"), ("k_zero_ptr", "v_zero_ptr")
    signature |= dict.fromkeys((*scales, *zeros), "*bf16")
    signature |= {"table_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64", "channel_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}
    strides = ("token_stride", "table_stride", "page_stride", "slot_stride", "head_stride", "scale_page_stride")
    signature |= dict.fromkeys(("num_q", "num_kv", "page", "num_slots", "table_rows", *strides, "scale_slot_stride", "scale_head_stride"), "i32")
    absent = (*(() if form else scales), *(() if form and form.has_zero else zeros), "channel_ptr", *(() if problem.norm else ("q_weight_ptr", "k_weight_ptr")))
    constexprs = {
        "NORM": problem.norm,
        "APPEND": problem.append,
        "INTERLEAVED": problem.layout == "interleaved",
        "ROTARY": problem.rotary_dim,
        "DIM": problem.dim,
        "PAIRS": rope.pairs(problem),
        "HEADS": tiles.heads,
        "PIECES": tiles.pieces,
        "FORMAT": form.name if form else "",
        "GROUPS": form.groups(problem.dim) if form else 1,
        "LARGEST": form.largest if form else 1.0,
        "EARLY": arch == "sm_90",
    } | dict.fromkeys(absent)
    facts = compile_for(rope._rope_append, signature, constexprs, arch, tiles.warps, aligned=strides, most_registers=tiles.registers or 0)
    check(facts, arch, 72 if tiles.registers else 0)  # of 72 registers none, and 2% slower
    assert problem.norm or form or facts.shared == 0, "the elements of a pair met in shared memory, not in a thread"
    if arch == "sm_90":
        before, after = facts.ptx.split("griddepcontrol.wait")
        assert "ld.global" not in before and "ld.global" in after, "nothing is read before the kernel in front is done"


TILES = {"GROUP": 16, "TILE": vocabulary.TILE, "SLICES": 32, "GROUPS": 8192}  # of a vocabulary of 128,256
SIZES = ("row_stride", "place_stride", "vocab", "slices", "groups")


def logits_signature(dtype):
    numbers = ("top_k_ptr", "list_ptr", "output_ptr", "prompt_ptr", "mask_ptr", "parents_ptr")
    ids = ("words_ptr", "tokens_ptr", "ids_ptr", "drawn_ptr", "count_ptr", "path_ptr", "token_ptr", "seed_ptr", "step_ptr")
    floats = ("slices_ptr", "limits_ptr", "chosen_ptr", "top_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "values_ptr", "q_ptr")
    floats += ("temperature_ptr", "top_p_ptr", "min_p_ptr", "typical_ptr")
    kinds = (POINTER[dtype], ("logits_ptr", "maxima_ptr", "out_ptr")), ("*i32", numbers), ("*i64", ids), ("*fp32", floats)
    return {name: kind for kind, names in kinds for name in names} | dict.fromkeys((*SIZES, "pieces", "num", "parents_stride", "places", "step_places"), "i32")


EITHER = [(BF16,), (FP32,)]


@pytest.mark.parametrize(("dtype", "arch"), across(GPUS, EITHER, sm_90=(0,), gfx942=(1,)))
def test_survey(dtype, arch):
    constexprs = {"GROUP": 16, "SLICE": vocabulary.SLICE, "EARLY": arch == "sm_90"}
    check(compile_for(vocabulary._survey, logits_signature(dtype), constexprs, arch, vocabulary.SLICE_WARPS, aligned=SIZES), arch)


@pytest.mark.parametrize(("dtype", "arch"), across(GPUS, EITHER, sm_90=(0,)))
def test_logits(dtype, arch):
    constexprs = TILES | {"BITS": vocabulary.CONSTANT_BITS[dtype], "EARLY": arch == "sm_90"}
    (tiles,) = logits.configs(Rows("sample", 64, 128_256, dtype), GPUS[arch])
    check(compile_for(logits._draw, logits_signature(dtype), constexprs, arch, tiles.warps, aligned=SIZES), arch)


@everywhere
def test_logprobs(arch):
    constexprs = TILES | {"BITS": vocabulary.CONSTANT_BITS[BF16], "TOP": 20, "EARLY": arch == "sm_90"}
    check(compile_for(logprobs._log_probs, logits_signature(BF16), constexprs, arch, logprobs.WARPS, aligned=SIZES), arch)


@everywhere
def test_penalties(arch):
    check(compile_for(penalties._adjust, logits_signature(BF16), {"BLOCK": penalties.BLOCK}, arch, penalties.WARPS, aligned=SIZES), arch)
    assert compile_for(penalties._adjust_biased, logits_signature(BF16), {"FEW": penalties.FEW}, arch, aligned=SIZES).spills == 0


@everywhere
def test_verify(arch):
    check(
        compile_for(
            verify._verify_chain, logits_signature(BF16), {"NUM": 8, "PIECES": 32, "BLOCK": verify.BLOCK, "PHASE": 0}, arch, verify.WARPS, aligned=SIZES
        ),
        arch,
    )
    assert compile_for(verify._walk, logits_signature(BF16), {"NUM": 64}, arch, 2).spills == 0


# ---- activations, rotation, and what is used beside a model


ACTIVATIONS = [
    (Rows(op, 4096, 11008, dtype, variant),)
    for op, variant, dtype in (
        ("gated_act", "silu", BF16),
        ("gated_act_backward", "clipped interleaved bias", BF16),
        ("gated_act", "gelu", FP32),
        ("gated_act", "clipped interleaved bias", BF16),
        ("gated_act_backward", "silu", BF16),
        ("gated_act_backward", "gelu bias", FP32),
        ("activate_backward", "mish bias", BF16),
        ("gated_act", "gelu", BF16),
        ("gated_act", "silu", FP32),
    )
]


@pytest.mark.parametrize(("problem", "arch"), across(GPUS, ACTIVATIONS, sm_90=range(7), gfx942=(0, 1)))
def test_activations(problem, arch):
    tiles, (act, lie) = mlp.configs(problem, GPUS[arch])[0], mlp.form(problem)
    back, bias = problem.op.endswith("backward"), "bias" in problem.variant
    signature = dict.fromkeys(("x_ptr", "y_ptr", "dy_ptr", "dx_ptr", "bias_ptr"), POINTER[problem.dtype]) | {"partial_ptr": "*fp32"}
    signature |= dict.fromkeys(("rows", "width", "x_stride", "dy_stride"), "i32") | {"alpha": "fp32", "limit": "fp32"}
    constexprs = {"ACT": act, "FORM": lie, "BLOCK": tiles.block} | ({"STAGES": tiles.stages} if back else {}) | ({} if bias else {"bias_ptr": None})
    constexprs |= {"partial_ptr": None} if back and not bias else {}
    facts = compile_for(mlp._gradient if back else mlp._activate, signature, constexprs, arch, tiles.warps, aligned=("width", "x_stride", "dy_stride"))
    check(facts, arch)
    assert problem.dtype == FP32 or not re.search(r"div\.\w+\.f32", facts.ptx), (
        "a quotient in half precision: at the speed of memory an element has 27 instructions"
    )


ROTARY = [(128, 128, BF16, "neox"), (64, 64, FP32, "interleaved"), (96, 32, BF16, "neox")]


@pytest.mark.parametrize(("dim", "rotary_dim", "dtype", "layout", "arch"), across(GPUS, ROTARY, gfx942=(1,)))
def test_rotary(dim, rotary_dim, dtype, layout, arch):
    problem = Rope("rotary", 8192, 32, 8, dim, rotary_dim, dtype, layout, False, False)
    tiles = rope.configs(problem, GPUS[arch])[0]
    signature = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), POINTER[dtype]) | {"table_ptr": "*fp32", "positions_ptr": "*i64"}
    signature |= dict.fromkeys(("num_q", "num_kv", "length", "table_rows", "table_stride"), "i32") | dict.fromkeys(("q_strides", "k_strides"), ("i32",) * 3)
    signature |= {"position_strides": ("i32",) * 2}
    constexprs = {"BACK": True, "INTERLEAVED": layout == "interleaved", "ROTARY": rotary_dim, "DIM": dim, "PAIRS": rope.pairs(problem)}
    constexprs |= {"HEADS": tiles.heads, "ALIGNED": True}
    facts = compile_for(rope._rotary, signature, constexprs, arch, tiles.warps, aligned=("table_stride", "q_strides", "k_strides"))
    check(facts, arch)
    assert facts.shared == 0, "the elements of a pair met in shared memory, not in a thread"


@pytest.mark.parametrize(("dtype", "arch"), across(GPUS, EITHER, sm_90=(0,), gfx942=(1,)))
def test_lookup(dtype, arch):
    pointer, sizes = POINTER[dtype], {"width": "i32", "weight_stride": "i32", "dy_stride": "i32", "tokens": "i32", "vocab": "i32", "padding": "i32"}
    tiles = embedding.configs(Rows("embedding", 8192, 4096, dtype), GPUS[arch])[0]
    signature = dict.fromkeys(("weight_ptr", "y_ptr", "dy_ptr", "dw_ptr"), pointer) | sizes
    signature |= {
        "ids_ptr": "*i32",
        "known_ptr": "*i32",
        "count_ptr": "*i32",
        "first_ptr": "*i32",
        "order_ptr": "*i64",
        "head_ptr": "*fp32",
        "tail_ptr": "*fp32",
    }
    aligned = ("width", "weight_stride", "dy_stride")
    for kernel, constexprs in (
        (embedding._look_up, {}), *((kernel, {"CHUNK": embedding.CHUNK, "EARLY": arch == "sm_90"}) for kernel in (embedding._sums, embedding._borders)),
    ):  # fmt: skip
        check(compile_for(kernel, signature, constexprs | {"BLOCK": tiles.block}, arch, tiles.warps, aligned=aligned), arch, 16)
    for kernel, constexprs in ((embedding._known, {"BLOCK": embedding.KNOWN}), (embedding._rows, {"ROWS": embedding.ROWS, "BLOCK": embedding.ROW}),
        (embedding._clear, {"ROWS": embedding.CLEARED, "BLOCK": tiles.block}),
    ):  # fmt: skip
        assert not compile_for(kernel, signature, constexprs, arch, aligned=aligned).spills
    signature = {"x_ptr": pointer, "residual_ptr": pointer, "y_ptr": pointer, "state_ptr": "*i64", "elements": "i32", "bar": "i64", "grow": "fp32"}
    check(compile_for(dropout._dropout_add, signature, {"BLOCK": dropout.BLOCK}, arch, dropout.WARPS, aligned=("elements",)), arch)


HADAMARD = [(300_000, 128, BF16), (8192, 4096, BF16), (2048, 32768, BF16), (2048, 32768, FP32)]


@pytest.mark.parametrize(("rows", "width", "dtype", "arch"), across(GPUS, HADAMARD, sm_90=(0, 1, 2), gfx942=(3,)))
def test_hadamard(rows, width, dtype, arch):
    tiles = hadamard.configs(Rows("hadamard", rows, width, dtype), GPUS[arch])[0]
    signature = {"x_ptr": POINTER[dtype], "y_ptr": POINTER[dtype], "rows": "i32", "x_stride": "i32"}
    part = width // tiles.parts
    constexprs = {"ROWS": tiles.rows, "WIDTH": part, "PARTS": tiles.parts, "BITS": part.bit_length() - 1, "STEP": tiles.step, "SCALE": width**-0.5}
    check(compile_for(hadamard._hadamard, signature, constexprs, arch, tiles.warps, aligned=("x_stride",)), arch)


@pytest.mark.parametrize(("width", "dtype"), [(16384, FP32), (4096, BF16), (32768, BF16)])
def test_gluon_hadamard(width, dtype):
    """Two exchanges by vectors, of no more than three barriers each; of 16 bits and up to 8,192 columns one, behind a product of x as it was loaded."""
    tiles = gluon_hadamard.configs(Rows("hadamard", 64, width, dtype), GPUS["sm_90"])[0]
    signature = {"x_ptr": POINTER[dtype], "y_ptr": POINTER[dtype], "x_stride": "i32"}
    part = width // tiles.parts
    constexprs = {"WIDTH": part, "PARTS": tiles.parts, "SCALE": width**-0.5, "SIZE": dtype.itemsize, "WARPS": tiles.warps, "HALVES": tiles.halves}
    facts = compile_for(gluon_hadamard._hadamard, signature, constexprs, "sm_90", tiles.warps, aligned=("x_stride",), most_registers=tiles.registers)
    check(facts, "sm_90", 8)
    assert facts.shared <= 4 * part and facts.ptx.count("bar.sync") <= (4 if width > 8192 else 3)


def test_hopper_hadamard(monkeypatch):
    """Products of 64 x 64 in steps of 16; nothing goes between threads but on its way out."""
    p = Rows("hadamard", 2048, 32768, BF16)
    x = torch.empty(p.rows, p.width, dtype=BF16, device="meta")
    facts = launched(monkeypatch, hopper_hadamard.launch, p, gluon_hadamard.configs(p, GPUS["sm_90"])[0], x, x)
    assert facts.wgmma == 2 * 4 * 4 * 4 and not facts.serialized and facts.spills <= 128 and facts.shared <= GPUS["sm_90"].shared_memory


@everywhere
def test_adamw(arch):
    """Parameters in bfloat16, moments in float32."""
    signature = {"addresses_ptr": "*i64", "sizes_ptr": "*i64", "tensor_ptr": "*i32", "first_ptr": "*i32", "tensors": "i32", "partial_ptr": "*fp32"}
    signature |= {"powers_ptr": "*fp64", "norm_ptr": "*fp64", "count": "i32"} | dict.fromkeys(("lr", "most", "fresh1", "b2", "fresh2", "eps", "decay"), "fp32")
    constexprs = {"P": tl.bfloat16, "ALIGNED": True, "CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK}
    check(compile_for(adamw._squares, signature, constexprs, arch, adamw.WARPS), arch)
    assert compile_for(adamw._root, signature, {"MANY": adamw.MANY}, arch, adamw.ADDERS).spills == 0
    check(compile_for(adamw._adamw, signature, constexprs | {"M": tl.float32, "ON_DEVICE": False}, arch, adamw.WARPS), arch)


@everywhere
def test_decode_step(arch):
    """A number a thread and load."""
    longs, words = ("positions_ptr", "at_ptr", "slots_ptr", "drawn_ptr", "tokens_ptr"), ("table_ptr", "lengths_ptr", "counts_ptr", "history_ptr")
    sizes = ("rows", "pages", "table_stride", "counts_stride", "history_stride", "longest")
    signature = dict.fromkeys(longs, "*i64") | dict.fromkeys(words, "*i32") | dict.fromkeys(sizes, "i32")
    for kernel, constexprs in ((decode_step._places, {"PAGE": 16}), (decode_step._advance, {})):
        assert compile_for(kernel, signature, constexprs | {"BLOCK": decode_step.BLOCK}, arch, decode_step.WARPS).spills == 0


@everywhere
def test_denoise(arch):
    signature = dict.fromkeys(("x_ptr", "output_ptr", "history_ptr", "y_ptr", "data_ptr", "input_ptr"), "*bf16")
    signature |= {"table_ptr": "*fp32", "step_ptr": "*i64", "state_ptr": "*i64", "elements": "i32", "guidance": "fp32", "clip": "fp32"}
    constexprs = {"GUIDED": True, "CLIPPED": True, "NOISY": True, "FAST": arch.startswith("sm"), "BLOCK": denoise.BLOCK}
    check(compile_for(denoise._denoise, signature, constexprs, arch, denoise.WARPS, aligned=("elements",)), arch)


SKINNY = [(1, 6144, 4096, "norm"), (2, 576, 1536, "bias residual"), (16, 14336, 4096, "norm silu")]


@pytest.mark.parametrize(("rows", "outs", "width", "words", "arch"), across(GPUS, SKINNY, sm_80=(2,), gfx942=(1,)))
def test_skinny(rows, outs, width, words, arch):
    """On Hopper all weights of the first steps are on their way before the kernel that came before is waited for; nothing goes by shared memory
    in the loop, and of 16 rows, gated, two programs fit on a multiprocessor, of one row three."""
    tiles = skinny.configs(Rows("skinny_linear", rows, outs, BF16, f"from {width} {words}"), GPUS[arch])[0]
    act, hopper = skinny.act_of(words.split()), arch == "sm_90"
    there = {f"{name}_ptr" for name in ("x", "w", "y", *words.split())}
    constexprs = {name: None for name in skinny._linear.arg_names if name.endswith("_ptr") and name not in there}
    constexprs |= {
        "WIDTH": width,
        "ACT": act,
        "EARLY": hopper,
        "CONSTANT": True,
        "SLAB": tiles.slab,
        "ROWS": tiles.rows,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }
    constexprs |= {"DEPTH": tiles.depth, "WARPS": tiles.warps, "down": 1}
    types = dict.fromkeys(("eps", "offset", "alpha", "limit"), "fp32")
    signature = {name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in skinny._linear.arg_names}
    aligned = ("x_stride", "w_stride", "residual_stride", "outs", "apart")
    most = skinny.REGISTERS if tiles.slab and arch != "gfx942" else 0
    facts = compile_for(skinny._linear, signature, constexprs, arch, tiles.warps, 1, aligned, most_registers=most)
    assert not facts.spills and facts.vector_loads
    if arch != "gfx942":
        assert facts.registers <= (168 if rows == 1 else 128) and (tiles.slab or facts.ptx.count("bar.sync") <= 3) and "ldmatrix" not in facts.ptx
    if hopper:
        before, after = facts.ptx.split("griddepcontrol.wait")
        steps = tiles.block_n * tiles.block_k * tiles.depth * (2 if act else 1) // 256  # loads of a thread, of 8 numbers each
        assert len(re.findall(r"ld\.global[.\w:]*v4\.b32", before)) >= steps and "griddepcontrol.launch_dependents" in before
        of_norm = tiles.depth * (tiles.block_k // 32 if tiles.slab else 1) if "norm" in words else 0
        assert before.count("ld.global") == steps + of_norm + ("bias" in words), "and nothing of x or the residual"
        waits = compile_for(skinny._linear, signature, constexprs | {"CONSTANT": False}, arch, tiles.warps, 1, aligned, most_registers=most)
        assert "ld.global" in after and "ld.global" not in waits.ptx.partition("griddepcontrol.wait")[0]


LOW_RANK = [(64, 16, BF16), (4096, 64, FP16), (16, 128, FP32), (4096, 256, BF16)]


@pytest.mark.parametrize(("rows", "rank", "dtype", "arch"), across(GPUS, LOW_RANK, sm_90=(2, 3), gfx942=(0,)))
def test_low_rank(rows, rank, dtype, arch):
    tiles = low_rank.configs(Rows("low_rank", rows, 6144, dtype, f"from 4096 rank {rank} parts 4096+1024+1024 of 8"), GPUS[arch])[0]
    types = dict.fromkeys(("x_ptr", "a_ptr", "b_ptr", "y_ptr"), POINTER[dtype]) | {
        "t_ptr": "*fp32",
        "order_ptr": "*i64",
        "starts_ptr": "*i32",
        "ends_ptr": "*i32",
    }
    (m, columns, shares, warps), (expand_m, block_n, block_r, expand_warps) = tiles
    shrink = {"RANK": rank, "BLOCK_M": m, "BLOCK_K": columns}
    expand = {"SHARES": shares, "BLOCK_M": expand_m, "BLOCK_N": block_n, "BLOCK_R": block_r}
    for kernel, sizes, threads in ((low_rank._shrink, shrink, warps), (low_rank._expand, expand, expand_warps)):
        sizes["ADAPTERS"] = 8
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in sizes}
        facts = compile_for(kernel, signature, sizes, arch, threads, aligned=("width", "rank", "x_stride", "y_stride", "each"))
        assert facts.spills == 0 and facts.shared <= (99 if arch.startswith("sm") else 64) << 10
        assert facts.vector_loads or "cp.async.cg" in facts.ptx  # both are 16 bytes at a time
