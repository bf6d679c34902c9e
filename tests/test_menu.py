"""Every row of every menu: it can be loaded, its claims name real fields, and a call outside a claim is refused in words."""

import importlib.util
import itertools
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from onchip.core import device as devices
from onchip.core.device import GPUS, Device
from onchip.core.kernel import Unsupported, _is_types, missing
from onchip.core.masks import Causal, Dense, Document, Full, KeyPadding, Mask, MaskMod, Window
from onchip.core.problem import E4M3, EXTRAS, Attention, Groups, RankSum, Rope, Rows
from onchip.core.scores import ALiBi, Bias, ScoreMod, Softcap
from onchip.core.trace import Traced
from onchip.dispatch import OPS, select
from onchip.kernels.attention import CUTLASS

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
H200 = GPUS["H200"]
CPU = Device("CPU", "cpu", 0, 2, 1 << 20, 32 << 20, 1 << 34, 1e10, {FP32: 1e11}, "by hand")

DOCUMENT, ALIBI = Document(torch.zeros(4, dtype=torch.int64)).static(), ALiBi(torch.ones(8)).static()
TYPICAL = {  # one Problem an operator, which every kernel of its menu takes
    "prefill": Attention("prefill", 2, 1000, 1000, 8, 2, 64, BF16, Causal()),
    "backward": Attention("backward", 64, 1000, 1000, 8, 2, 64, BF16, Causal()),
    "decode": Attention("decode", 2, 1, 1024, 4, 2, 64, BF16, Causal(), "paged", 16),
    "latent": Attention("latent", 2, 1, 1024, 4, 1, 576, BF16, Causal(), "paged", 16, dim_v=512, extras=("latent",)),
    "rms_norm": Rows("rms_norm", 63, 4096, BF16, "residual"),
    "gated_act": Rows("gated_act", 63, 4096, BF16, "silu"),
    "rope_append": Rope("rope_append", 63, 8, 2, 64, 64, BF16, "neox", False, True),
    "sample": Rows("sample", 8, 49152, BF16),
    "log_probs": Rows("log_probs", 8, 49152, BF16, "top 5"),
    "adjust_logits": Rows("adjust_logits", 8, 49152, BF16, "penalties mask"),
    "verify": Rows("verify", 8, 49152, BF16, "chain of 4"),
    "decode_places": Rows("decode_places", 8, 16, torch.int64),
    "decode_advance": Rows("decode_advance", 8, 1, torch.int64, "counts"),
    "quantise": Rows("quantise", 8000, 128, BF16, "block"),
    "merge": Rows("merge", 2048, 128, BF16, "2 parts"),
    "page_scores": Rows("page_scores", 8000, 128, BF16, "4 heads"),
    "gated_act_backward": Rows("gated_act_backward", 63, 4096, BF16, "clipped interleaved bias"),
    "activate": Rows("activate", 63, 4096, BF16, "mish"),
    "activate_backward": Rows("activate_backward", 63, 4096, BF16, "relu2 bias"),
    "rotary": Rope("rotary", 63, 8, 2, 64, 64, BF16, "neox", False, False),
    "rotary_backward": Rope("rotary_backward", 63, 8, 2, 96, 64, BF16, "neox", False, False),
    "embedding": Rows("embedding", 63, 4096, BF16, "of 50257"),
    "embedding_backward": Rows("embedding_backward", 63, 4096, BF16, "of 50257"),
    "dropout_add": Rows("dropout_add", 63, 4096, BF16, "residual"),
    "hadamard": Rows("hadamard", 63, 4096, BF16),
    "adamw": Rows("adamw", 300, 1 << 27, BF16, "fp32 moments"),
    "grad_norm": Rows("grad_norm", 300, 1 << 27, BF16),
    "low_rank": Rows("low_rank", 63, 4096, BF16, "from 1024 rank 16 parts 2048+1024+1024 of 8"),
    "skinny_linear": Rows("skinny_linear", 1, 4096, BF16, "from 1024 norm bias residual silu"),
    "sum_ranks": RankSum("sum_ranks", 63, 4096, BF16, 2, "residual norm", room=256),
    "denoise": Rows("denoise", 2, 16384, BF16, "second guided"),
    "softmax": Rows("softmax", 63, 4096, BF16, "log mask"),
    "softmax_backward": Rows("softmax_backward", 63, 4096, BF16, "log"),
    "divergence": Rows("divergence", 63, 4096, BF16, "reverse"),
    "divergence_backward": Rows("divergence_backward", 63, 4096, BF16, "reverse"),
    "cross_entropy": Rows("cross_entropy", 63, 4096, BF16, "entropy softcap"),
    "cross_entropy_backward": Rows("cross_entropy_backward", 63, 4096, BF16, "entropy softcap"),
    "cross_entropy_in_place": Rows("cross_entropy_in_place", 63, 4096, BF16, "smoothing"),
    "scale": Rows("scale", 63, 4096, BF16, "once"),
    "norm": Rows("norm", 63, 4096, BF16, "layer residual:fp32 weight bias scale:row"),
    "norm_backward": Rows("norm_backward", 63, 4096, BF16, "rms residual gate:row weight silu d_total -> x weight gate silu"),
    "group_norm": Groups("group_norm", 2, 320, 32, 4096, BF16, "silu"),
    "group_norm_backward": Groups("group_norm_backward", 2, 320, 32, 4096, BF16, "mish", "channels_last"),
}
LATENT = TYPICAL["decode"]._replace(heads=128, kv_heads=1, dim=576, dim_v=512, page=64, extras=("latent",))
ROWS = [pytest.param(op, kernel, id=f"{op.name}-{kernel.name}") for op in OPS.values() for kernel in op.kernels]
CLAIMS = [
    pytest.param(op, kernel, field, id=f"{op.name}-{kernel.name}-{field}") for op in OPS.values() for kernel in op.kernels for field in kernel.accepts
]  # fmt: skip


@pytest.fixture(autouse=True)
def extras_installed(monkeypatch):
    """What a row claims does not depend on what is installed here."""
    monkeypatch.setattr("onchip.core.kernel.missing", lambda extra: None)


def typical(op, kernel):
    """The Problem of an operator that this kernel takes."""
    if kernel.name == "hopper_mla":
        return LATENT
    if kernel.name == "nccl":
        return TYPICAL[op.name]._replace(variant="")
    return TYPICAL[op.name]._replace(dtype=E4M3) if E4M3 in kernel.accepts.get("dtype", ()) else TYPICAL[op.name]


class Odd(Mask):
    """A mask that no menu names."""


def outside(field: str, allowed) -> list:
    """Values of a field that a claim leaves out, next to its ends where it has some."""
    if isinstance(allowed, range):
        return [allowed.start - 1, allowed[-1] + 1]
    odd = {
        "dtype": [torch.float64, torch.int8],
        "dim": [96],
        "value_dim": [256, 96],
        "kv_heads": [2],
        "width": [96],
        "score": [ALIBI],
        "mask": [Odd()],
        "keys": ["ring"],
        "page": [0, 3, 4096],
        "variant": ["relu", "tanh"],
        "layout": ["gptj"],
        "kv": ["int3"],
        "tokens": [9],
    }
    return [value for value in odd[field] if value not in allowed]


def inside(allowed) -> list:
    """Values that a claim admits: all of a few, the ends of a range."""
    if isinstance(allowed, range):
        return [allowed.start, allowed[-1]]
    return [{Full: Full(), Causal: Causal(), Window: Window(7), Traced: DOCUMENT}[kind] for kind in allowed] if _is_types(allowed) else list(allowed)


def with_field(problem, kernel, field: str, value):
    """The Problem with one field changed, and no other that a claim is about: `dim` is that of queries and keys, `value_dim` that of values."""
    if field == "value_dim":
        return problem._replace(dim_v=value)
    apart = field == "dim" and "value_dim" in kernel.accepts
    return problem._replace(**{field: value}, **({"dim_v": problem.value_dim} if apart else {}))


# ---- rows


def test_every_operator_is_here():
    assert set(TYPICAL) == set(OPS) and all(name == op.name for name, op in OPS.items())


@pytest.mark.parametrize(("op", "kernel"), ROWS)
def test_a_row_can_be_loaded(op, kernel):
    """Portable rows everywhere; the others where Triton is installed, GPU or not."""
    if kernel.needs_triton:
        pytest.importorskip("triton")
    if kernel.extra:
        pytest.importorskip(kernel.extra.name, reason=f"the extra onchip[{kernel.extra.name}] is not installed")
    assert callable(kernel.load())
    assert kernel.file.startswith("kernels/") and kernel.file.endswith(".py")
    if kernel.name == "bf16_of_e4m3_backward":  # which asks for the tiles of another kernel
        pytest.importorskip(CUTLASS.name, reason=f"the extra onchip[{CUTLASS.name}] is not installed")
    assert kernel.configs(typical(op, kernel), H200)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_menu_ends_with_what_takes_anything(op):
    names = [kernel.name for kernel in op.kernels]
    assert len(set(names)) == len(names)
    portable = [kernel.portable for kernel in op.kernels]
    assert portable == sorted(portable), "fastest first: the portable ones come last"
    assert all(kernel.portable == (not kernel.needs_triton) for kernel in op.kernels)
    last = op.kernels[-1]
    assert last.name == "reference"
    for device in (CPU, H200, GPUS["MI300X"]):
        assert last.refuses(TYPICAL[op.name]._replace(dtype=FP64), device) == []


@pytest.mark.parametrize(("op", "kernel"), ROWS)
@pytest.mark.parametrize("name", GPUS)
def test_a_row_takes_the_typical_problem_on_every_gpu(op, kernel, name):
    """But those of one architecture, elsewhere."""
    gpu = devices.gpu(name)
    least = kernel.arch.get(gpu.kind, 0)
    reasons = kernel.refuses(typical(op, kernel), gpu)
    runs = gpu.arch in least if isinstance(least, tuple) else gpu.arch >= least
    assert reasons == [] if runs and (not kernel.arch or gpu.kind in kernel.arch) else re.search("NVIDIA sm_(90 alone|89|80)", reasons[0])


# ---- claims


@pytest.mark.parametrize("name", GPUS)
def test_what_is_claimed_has_tiles(name, monkeypatch):
    """Of any widths of keys and values, on every GPU; who has no room for the smallest ones says so."""
    pytest.importorskip("triton")
    monkeypatch.setattr("onchip.core.kernel.missing", lambda extra: "is not installed")  # whose tiles are not to be had here
    gpu, widths = devices.gpu(name), (8, 64, 72, 128, 192, 256, 264, 512, 576)
    for op, dtype, (dim, dim_v), extras in itertools.product(
        ("prefill", "backward", "decode"), (BF16, FP32, E4M3), itertools.product(widths, repeat=2), ((), ("dropout",), ("tf32",), ("batch_invariant",))
    ):
        p = TYPICAL[op]._replace(dtype=dtype, dim=dim, dim_v=dim_v if dim_v != dim else 0, extras=extras)
        for kernel in OPS[op].kernels:
            if kernel.portable or kernel.extra or kernel.refuses(p, gpu):
                continue
            assert all(kernel.configs(one, gpu) for one in (p, p._replace(len_q=1))), f"{kernel.name}: {p}"
    wide = [(TYPICAL[op]._replace(dtype=FP32, dim=dim, dim_v=264), f"triton_{op}") for op, dim in (("prefill", 264), ("backward", 264), ("prefill", 576))]
    small = [f"the smallest tiles take {kib} KiB of shared memory, of 99 of {name}" for kib in (129, 128)] if gpu.shared_memory == 99 << 10 else ["", ""]
    assert ["".join(OPS[p.op].kernel(kernel).refuses(p, gpu)) for p, kernel in wide] == ["", *small]


@pytest.mark.parametrize(("op", "kernel", "field"), CLAIMS)
def test_a_claim_is_about_a_field(op, kernel, field):
    assert field in type(TYPICAL[op.name])._fields or (field == "value_dim" and isinstance(TYPICAL[op.name], Attention))


@pytest.mark.parametrize(("op", "kernel", "field"), CLAIMS)
def test_what_a_claim_admits_is_taken(op, kernel, field):
    for value in inside(kernel.accepts[field]):
        assert kernel.refuses(with_field(typical(op, kernel), kernel, field, value), H200) == []


@pytest.mark.parametrize(("op", "kernel", "field"), CLAIMS)
def test_what_a_claim_leaves_out_is_refused_in_words(op, kernel, field):
    values = outside(field, kernel.accepts[field])
    assert values
    for value in values:
        (reason,) = kernel.refuses(with_field(typical(op, kernel), kernel, field, value), H200)
        assert reason.startswith(f"{field} ") and " is not " in reason and "<" not in reason and "torch.bf" not in reason


@pytest.mark.parametrize(("op", "keys"), [("prefill", {"keys": "packed", "tokens": 9}), ("backward", {"keys": "packed", "tokens": 9}), ("decode", {})])
def test_numbers_in_e4m3_are_of_dense_calls(op, keys):
    """As the functions have it: none of the others takes a Quantised."""
    p = TYPICAL[op]._replace(dtype=E4M3, **keys)
    for kernel in OPS[op].kernels:
        assert kernel.refuses(p, H200) and kernel.refuses(p, CPU), kernel.name
    with pytest.raises(Unsupported, match=r"reference: pa(ck|g)ed calls take no numbers in e4m3; give them to a dense call as Quantised"):
        select(p, H200)


def test_refusals_by_hand():
    """What a user reads."""
    kernel = OPS["prefill"].kernel("triton_prefill")
    p = TYPICAL["prefill"]._replace(dtype=FP64, dim=600, dim_v=4, mask=Odd(), extras=("dropout", "score_grad", "sinks"))
    assert kernel.refuses(p, GPUS["A100"]) == [
        "dtype fp64 is not one of bf16, fp16, fp32",
        "dim 600 is not in 8..576",
        "value_dim 4 is not in 8..512",
        "mask Odd is not one of Full, Causal, Window, Traced",
        "no score_grad",
    ]
    assert kernel.refuses(TYPICAL["prefill"], CPU) == ["runs on NVIDIA sm_80 and AMD gfx942, this is a CPU"]


ALSO = {  # what each kernel of a GPU takes beside the fields that it names
    "hopper_prefill": {"batch_invariant", "deterministic", "dropout", "sinks", "used"},
    "triton_prefill": {"batch_invariant", "deterministic", "dropout", "sinks", "tf32", "used"},
    "hopper_fp8": {"deterministic", "key_scales", "token_scales"},
    "bf16_of_e4m3": {"batch_invariant", "deterministic", "dropout", "key_scales", "sinks", "token_scales"},
    "cutlass_backward": {"sinks", "used"},
    "hopper_backward": {"batch_invariant", "deterministic", "dropout", "sinks", "used"},
    "hopper_fp8_backward": {"batch_invariant", "deterministic", "key_scales"},
    "bf16_of_e4m3_backward": {"batch_invariant", "deterministic", "dropout", "key_scales", "score_grad", "sinks", "token_scales"},
    "triton_backward": {"batch_invariant", "deterministic", "dropout", "score_grad", "sinks", "tf32", "used"},
    "hopper_decode": {"batch_invariant", "deterministic", "sinks"},
    "register_decode": {"batch_invariant", "deterministic", "sinks"},
    "hopper_paged": {"batch_invariant", "deterministic", "latent", "sinks"},
    "hopper_mla": {"deterministic", "latent"},
    "hopper_mla_codes": {"deterministic", "latent"},
    "bf16_of_latent": {"deterministic", "latent", "tf32"},
    "triton_decode": {"batch_invariant", "deterministic", "latent", "sinks", "tf32"},
    "triton_shares": {"batch_invariant", "deterministic", "latent", "sinks", "tf32"},
    "triton_paged": {"batch_invariant", "deterministic", "latent", "sinks", "tf32"},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("op", "kernel"), [row for row in ROWS if isinstance(TYPICAL[row.values[0].name], Attention)])
def test_extras(op, kernel, extra):
    """Each by itself is taken, or refused by its name; plain torch takes all."""
    takes = kernel.portable or extra in ALSO[kernel.name]
    p = typical(op, kernel)
    reasons = kernel.refuses(p._replace(extras=tuple(sorted({*p.extras, extra}))), H200)
    assert not reasons if takes else [reason.split(" for ")[0] for reason in reasons] == [f"no {extra}"]


@pytest.mark.parametrize(
    ("more", "said"),
    [({"dim": 256}, "dropout beside heads of 256, of at most 128"), ({"extras": ("deterministic", "dropout")}, "no dropout beside deterministic"),
     ({"extras": ("batch_invariant", "dropout")}, "no dropout beside batch_invariant")],
    ids=str,
)  # fmt: skip
def test_dropout_goes_where_sums_are_in_memory(more, said):
    """The passes that sum nothing in memory know no dropout: `triton_backward` does."""
    p = TYPICAL["backward"]._replace(**{"extras": ("dropout",), **more})
    (reason,) = OPS["backward"].kernel("hopper_backward").refuses(p, H200)
    assert reason == said
    assert not OPS["backward"].kernel("triton_backward").refuses(p, H200)


@pytest.mark.parametrize(("dim", "extras", "queries"), [(64, (), 128), (64, ("dropout",), 64), (128, (), 64), (128, ("dropout",), 64)])
def test_gradients_of_dropped_weights_are_in_tiles_of_64_queries(dim, extras, queries):
    """With 128 a warpgroup's registers do not hold the bits beside its sums."""
    pytest.importorskip("triton")
    p = TYPICAL["backward"]._replace(dim=dim, extras=extras)
    (tiles,) = OPS["backward"].kernel("hopper_backward").configs(p, H200)
    assert (tiles.m, tiles.n) == (queries, 128)


def test_gradients_that_are_the_same_every_time():
    """In passes up to a head of 128 too; whatever else is in the batch, the same kernel and tiles."""
    pytest.importorskip("triton")
    kernel, p = OPS["backward"].kernel("hopper_backward"), TYPICAL["backward"]
    two, three = "a pass each for dK, dV 128x{}; dQ 128x128 tiles", "a pass each for dV 128x64; dK 128x64; dQ 128x64 tiles"
    for dims, mask, passes in (
        ((64, 0), Full(), two.format(128)),
        ((64, 0), DOCUMENT, two.format(64)),
        ((128, 0), Causal(), two.format(64)),
        ((96, 64), Causal(), two.format(64)),
        ((192, 128), Causal(), three),
    ):
        for extra in ("batch_invariant", "deterministic"):
            asked = p._replace(dim=dims[0], dim_v=dims[1], mask=mask, extras=(extra,))
            assert select(asked, H200).kernel is kernel and str(kernel.configs(asked, H200)[0]).startswith(passes)
    few = p._replace(batch=2)
    assert select(few._replace(extras=("batch_invariant",)), H200).kernel is kernel
    assert select(few._replace(extras=("deterministic",)), H200).kernel.name == "triton_backward"


def test_gradients_of_reads_come_in_any_order():
    p = TYPICAL["backward"]._replace(score=ALIBI, extras=("deterministic", "score_grad"))
    (reason,) = OPS["backward"].kernel("triton_backward").refuses(p, H200)
    assert reason == "gradients of what the score reads are summed in any order, so not deterministic"
    assert OPS["backward"].kernel("blocked").refuses(p, H200) == []


def test_what_hopper_leaves_to_triton():
    pytest.importorskip("triton")
    kernel, p = OPS["prefill"].kernel("hopper_prefill"), TYPICAL["prefill"]
    table, flags = torch.zeros(8, 1000, 1000), torch.zeros(1000, 1000, dtype=torch.int32)
    pairs, look_up = (ScoreMod(f).static() for f in (lambda s, b, h, i, j: s + table[h, i, j], lambda s, b, h, i, j: s + table[h, (i - j).abs(), 0]))
    elsewhere = ScoreMod(lambda s, b, h, i, j: s + table[h, i * j % 1000, 0]).static()
    turned, group = (ScoreMod(f).static() for f in (lambda s, b, h, i, j: s + table[h, j, i], lambda s, b, h, i, j: s + table[h // 2, i, j]))
    both, counts = (ScoreMod(f).static() for f in (lambda s, b, h, i, j: s + table[h, i, j] * flags[i, j], lambda s, b, h, i, j: s + flags[i, j]))
    many = "a score reads more for each query and key than one float tensor at [.., i, j]: slow"
    padded = KeyPadding(torch.ones(2, dtype=torch.int32)).static()
    dilated = MaskMod(lambda b, h, i, j: (i - j) % 2 == 0).static()
    for changed, reason in (
        *(({"score": score}, many) for score in (turned, group, both, counts)),
        ({"score": pairs, "len_k": 1001}, "a score reads rows of 1001 in fp32, of a multiple of 16 bytes: triton_prefill is faster"),
        ({"score": pairs, "dim": 256}, "a score reads fp32 for each query and key beside heads of 256, of at most 128: no room for tiles of it"),
        ({"score": look_up}, "2e+07 pairs of a query and a key, of at least 1e+08: to lay distances out takes twenty launches, and triton_prefill is faster"),
        ({"score": look_up, "keys": "packed", "tokens": 4000}, "a score looks values up at places that it computes: not measured"),
        ({"score": elsewhere}, "a score looks values up at places that it computes: not measured"),
        (
            {"len_q": 1025, "len_k": 1025, "mask": dilated},
            "dim 64 under a mask with arithmetic of its own, 1025 queries, of at most 1024: triton_prefill is faster",
        ),
    ):
        assert kernel.leaves(p._replace(**changed), H200) == [reason]
        assert bool(kernel.refuses(p._replace(**changed), H200)) == (not reason.endswith("faster"))
    assert kernel.leaves(p._replace(score=ALIBI, mask=DOCUMENT, extras=("sinks",)), H200) == []
    assert kernel.leaves(p._replace(score=pairs, keys="packed", tokens=4000), H200) == []
    assert kernel.leaves(p._replace(mask=padded), H200) == []
    kernel, p = OPS["backward"].kernel("hopper_backward"), TYPICAL["backward"]
    assert kernel.leaves(p._replace(mask=padded), H200) == []
    assert not any(
        kernel.leaves(p._replace(mask=padded, **how), H200) for how in ({"dim": 256}, {"extras": ("deterministic",)}, {"extras": ("batch_invariant",)})
    )
    pairs_seen = Dense(torch.ones(1000, 1000, dtype=torch.bool)).static()
    assert kernel.leaves(p._replace(mask=pairs_seen), H200) == [
        "a mask reads a value for each query and key, of 1000 queries, of at least 2048: triton_backward is faster"
    ]
    assert kernel.leaves(p._replace(mask=pairs_seen, len_q=2048, len_k=2048), H200) == []
    slow = "a score reads a value for each query and key, and is no half-precision bias beside heads of up to 128: triton_backward is faster"
    half = Bias(torch.zeros(8, 1000, 1000, dtype=torch.bfloat16)).static()
    for changed in ({"score": pairs}, {"score": half, "dim": 256}, {"score": half, "extras": ("deterministic",)}, {"score": half, "len_k": 1001}):
        assert kernel.leaves(p._replace(**changed), H200) == [slow]
    assert kernel.leaves(p._replace(score=half), H200) == []
    learnt = p._replace(score=look_up, extras=("score_grad",))
    assert kernel.leaves(p._replace(score=look_up), H200) == kernel.leaves(learnt, H200) == []
    gradients = "no score_grad for anything but what is looked up by distance, beside heads of up to 128 and where nothing is to be the same every time"
    for changed in ({"score": half}, {"dim": 256}, {"extras": ("deterministic", "score_grad")}, {"keys": "packed", "tokens": 4000}):
        assert kernel.refuses(learnt._replace(**changed), H200) == [gradients]
    for changed in ({"dim": 256}, {"extras": ("deterministic",)}, {"score": elsewhere}):
        assert kernel.refuses(learnt._replace(extras=(), **changed) if "extras" not in changed else learnt._replace(**changed), H200) == [
            "a score looks values up at places that it computes: not measured"
        ]
    assert kernel.leaves(p._replace(batch=2), H200) == [
        "2e+07 pairs of a query and a key, of at least 1e+08: two more launches cost what the faster kernel saves"
    ]
    most, more = (p._replace(batch=1, len_q=4096, len_k=n) for n in (262_144, 262_145))  # times 2 key heads
    for name in ("H200", "H100"):
        assert kernel.leaves(most, GPUS[name]) == [] and kernel.configs(most, replace(GPUS[name], sms=78))[0].shares == 1
    assert kernel.leaves(more, H200) == [] and kernel.configs(more, H200)[0].shares == 2
    assert kernel.leaves(p._replace(dim=256), H200) == [] and "a pass each" in str(kernel.configs(p._replace(dim=256), H200)[0])
    assert kernel.refuses(p._replace(dim=264), H200) == ["dim 264 is not in 8..256 by 8", "value_dim 264 is not in 8..256 by 8"]
    assert kernel.refuses(p._replace(score=ALIBI, mask=DOCUMENT, extras=("sinks",)), H200) == []


@pytest.mark.parametrize(("op", "name", "each"), [
    ("prefill", "hopper_prefill", 1), ("prefill", "hopper_fp8", 1), ("backward", "hopper_backward", 1), ("backward", "hopper_fp8_backward", 1),
    ("decode", "hopper_paged", 1), ("decode", "hopper_decode", 2), ("decode", "register_decode", 2),
])  # fmt: skip
def test_multiprocessors_left_to_others(op, name, each, monkeypatch):
    """`each`: programs of a multiprocessor."""
    pytest.importorskip("triton")
    kernel = OPS[op].kernel(name)
    p = typical(OPS[op], kernel)
    p = p._replace(batch=64, len_k=8192) if op == "decode" else p
    (tiles,) = kernel.configs(p, H200)
    assert tiles.programs == 132 * each
    monkeypatch.setenv("ONCHIP_SM_MARGIN", "12")
    (tiles,) = kernel.configs(p, H200)
    assert tiles.programs == 120 * each
    monkeypatch.setenv("ONCHIP_SM_MARGIN", "132")
    with pytest.raises(ValueError, match="ONCHIP_SM_MARGIN=132 of the 132 multiprocessors of H200; give 0 to 131"):
        kernel.configs(p, H200)


def test_multiprocessors_left_to_others_by_a_latent_decode(monkeypatch):
    """Of more tiles of rows than multiprocessors are left, a launch has no more than these."""
    pytest.importorskip("triton")
    kernel = OPS["decode"].kernel("hopper_mla")
    few, many = LATENT._replace(batch=64, len_k=8192), LATENT._replace(batch=64, len_k=8192, len_q=65)
    assert [tuple(kernel.configs(p, H200)[0]) for p in (few, many)] == [(66, 2, 2), (1, 130, 130)]
    monkeypatch.setenv("ONCHIP_SM_MARGIN", "12")
    assert [tuple(kernel.configs(p, H200)[0]) for p in (few, many)] == [(60, 2, 2), (1, 130, 120)]
    assert "130 tiles of rows, 120 a launch" in str(kernel.configs(many, H200)[0])
    monkeypatch.setenv("ONCHIP_SM_MARGIN", "132")
    with pytest.raises(ValueError, match="give 0 to 131"):
        kernel.configs(many, H200)


@pytest.mark.parametrize("op", ["prefill", "backward", "decode"])
def test_texts_that_have_no_triton_form(op):
    pytest.importorskip("triton")
    kernel = next(kernel for kernel in OPS[op].kernels if "score" not in kernel.accepts and isinstance(DOCUMENT, kernel.accepts["mask"]))
    assert kernel.refuses(TYPICAL[op]._replace(mask=DOCUMENT, score=ALIBI), H200) == []
    odd = ScoreMod(lambda s, b, h, i, j: torch.special.bessel_j0(s)).static()
    (reason,) = kernel.refuses(TYPICAL[op]._replace(score=odd), H200)
    assert "bessel_j0" in reason and "no Triton form" in reason
    assert OPS[op].kernel("blocked").refuses(TYPICAL[op]._replace(score=odd), H200) == []


@pytest.mark.parametrize(("op", "kernel"), ROWS)
@pytest.mark.parametrize(
    ("device", "words"),
    [
        (CPU, "runs on NVIDIA sm_80 and AMD gfx942, this is a CPU"),
        (replace(H200, name="V100", arch=70), "needs NVIDIA sm_80, V100 is 70"),
        (replace(GPUS["MI300X"], name="MI250X", arch=90), "needs AMD gfx942, MI250X is 90"),
    ],
    ids=["cpu", "sm_70", "gfx90"],
)
def test_an_older_device_is_refused_in_words(op, kernel, device, words):
    reasons = kernel.refuses(typical(op, kernel), device)
    if any(isinstance(arch, tuple) for arch in kernel.arch.values()):
        assert "NVIDIA sm_90 alone" in reasons[0] and device.name in reasons[0]
    elif kernel.arch == {"cuda": 80, "hip": 942}:
        assert reasons == [words]
    else:
        assert (device.name in reasons[0]) if kernel.arch else reasons == []


def test_triton_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for op in OPS.values():
        for kernel in op.kernels:
            assert kernel.refuses(typical(op, kernel), H200) == (["needs the package triton"] if kernel.needs_triton else [])


@pytest.mark.parametrize(("version", "old"), [("3.5.1", True), ("2.3.0+git1", True), ("3.6.0", False), ("3.10.0", False), (None, False)])
def test_an_old_triton(version, old, monkeypatch):
    """Its Gluon lacks what kernels import: a reason, where it was an ImportError in the middle of a call."""
    monkeypatch.setattr("onchip.core.kernel._version_of_triton", lambda: version)
    reasons = [f"needs Triton 3.6 or later, as torch 2.10 and later bring it; this is {version}"] if old else []
    for op in OPS.values():
        for kernel in op.kernels:
            found = kernel.refuses(typical(op, kernel), H200)
            assert [why for why in found if "Triton" in why] == (reasons if kernel.needs_triton else [])


EXTRA = "needs the extra onchip[cutlass], nvidia-cutlass-dsl 4.8 or later, which {}: pip install '.[cutlass]' in a checkout"


@pytest.mark.parametrize(
    ("module", "version", "found"),
    [
        (None, None, "is not installed"),
        ("cutlass", None, "is not installed: the module 'cutlass' that was found is another package's"),
        ("cutlass", "4.7.9", "is 4.7.9"),
        ("cutlass", "3.12", "is 3.12"),
        ("cutlass", "4.8.0", None),
        ("cutlass", "4.10rc1", None),
        ("cutlass", "5", None),
        ("cutlass", "dev", "is dev"),
        ("cutlass", "", "has no version that can be read"),
    ],
)
def test_an_extra(module, version, found, tmp_path, monkeypatch):
    """Its distribution and the version count, not a module of that name; what is found lies on the path, as it does where a package is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "triton" or (module if name == "cutlass" else find(name)))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if version is not None:
        folder = tmp_path / f"nvidia_cutlass_dsl-{version or 1}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\n" + f"Version: {version}\n" * bool(version))
    monkeypatch.setattr("onchip.core.kernel.missing", missing.__wrapped__)
    reasons = OPS["backward"].kernel("cutlass_backward").refuses(TYPICAL["backward"], H200)
    assert reasons == ([EXTRA.format(found)] if found else [])


@pytest.mark.parametrize("broken", ["raise ImportError('libcute.so: cannot open')", "raise OSError('libcute.so')", "import nowhere_to_be_found"])
def test_an_extra_that_cannot_be_imported(broken, tmp_path, monkeypatch):
    """It says so, and how to go on, where its kernel is asked for its tiles or for what it does; nothing else runs instead."""
    (tmp_path / "broken_kernel.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_kernel", raising=False)
    kernel = replace(OPS["backward"].kernel("cutlass_backward"), entry="broken_kernel:launch")
    words = r"cutlass_backward: the extra onchip\[cutlass\] is installed and cannot be imported \(\w+: .*(libcute|nowhere).*\); pip install .* or pip uninstall"
    for asked in (kernel.load, partial(kernel.configs, TYPICAL["backward"], H200)):
        with pytest.raises(Unsupported, match=words):
            asked()
    with pytest.raises((ImportError, OSError)):  # of our own modules it is a bug
        replace(kernel, extra=None).load()


def test_what_cutlass_leaves_to_others():
    p, kernel = TYPICAL["backward"], OPS["backward"].kernel("cutlass_backward")
    assert kernel.refuses(p._replace(extras=("deterministic",)), H200) == ["no deterministic"]
    assert kernel.leaves(p._replace(batch=2), H200) == OPS["backward"].kernel("hopper_backward").leaves(p._replace(batch=2), H200) != []
    assert kernel.refuses(p._replace(dim_v=32), H200) == ["values of dim 32 beside queries of dim 64"]
    assert kernel.refuses(p._replace(keys="packed", tokens=64_000, extras=("sinks",)), H200) == ["sinks in a packed batch"]


@pytest.mark.parametrize(("len_q", "heads", "reasons"), [(16, 8, []), (16, 10, ["16 queries x 5 heads a group = 80 rows, of at most 64"]), (1, 128, [])])
def test_decode_takes_at_most_64_rows(len_q, heads, reasons):
    p = TYPICAL["decode"]._replace(len_q=len_q, heads=heads)
    assert OPS["decode"].kernel("triton_decode").refuses(p, H200) == reasons


def test_shares_take_any_group_and_most_codes():
    kernel, p = OPS["decode"].kernel("triton_shares"), TYPICAL["decode"]
    for changed in ({"len_q": 16, "heads": 256}, {"heads": 128}, {"page": 24}, {"kv": "int4/32"}, {"kv": "int8", "dim": 80, "dim_v": 48}, {"kv": "e4m3/64"}):
        assert kernel.refuses(p._replace(**changed), H200) == []
    assert kernel.refuses(p._replace(kv="int8", dtype=FP32), H200) == ["fp32 queries of keys and values in int8, of bf16 and fp16"]
    for kv, dim in (("int4", 66), ("int4/32", 96), ("int8", 65)):
        (reason,) = kernel.refuses(p._replace(kv=kv, dim=dim), H200)
        assert reason == f"{kv} of dim {dim}: a row of codes is an even number of bytes, and of int4 an even number of groups"


def test_who_takes_many_queries_over_pages():
    """On Hopper a kernel of its own, also a few queries where they are too many rows for `triton_decode`; elsewhere one of all GPUs."""
    p = TYPICAL["decode"]
    for len_q, heads, page, gpu, name in (
        (16, 8, 16, "H200", "hopper_decode"),
        (16, 10, 16, "H200", "hopper_paged"),
        (17, 4, 16, "H200", "hopper_paged"),
        (8192, 4, 1024, "H100", "hopper_paged"),
        (17, 4, 16, "A100", "triton_paged"),
        (17, 4, 1, "H200", "hopper_paged"),
        (17, 4, 24, "H200", "hopper_paged"),
        (17, 4, 24, "A100", "triton_paged"),
        (1, 4, 12, "H200", "register_decode"),
        (1, 4, 12, "A100", "triton_shares"),
        (1, 4, 12, "L40S", "register_decode"),
        (1, 4, 1 << 20, "H200", "blocked"),
    ):
        decision = select(p._replace(len_q=len_q, heads=heads, page=page), GPUS[gpu])
        assert decision.kernel.name == name
    many = p._replace(batch=32)
    assert select(many._replace(len_q=16, heads=8), H200).kernel.name == "hopper_decode"
    assert select(many._replace(len_q=16, heads=8), GPUS["A100"]).kernel.name == "triton_decode"
    document = p._replace(mask=DOCUMENT)
    assert select(document._replace(batch=32, len_q=16, heads=8), H200).kernel.name == "hopper_paged"
    assert select(document._replace(len_q=16, heads=8), H200).kernel.name == "triton_decode"  # 4 key heads: too few to fill the device without splitting keys
    assert select(document._replace(batch=32, len_q=16, heads=8, extras=("batch_invariant",)), H200).kernel.name == "triton_decode"
    assert select(document._replace(batch=32, len_q=8), H200).kernel.name == "triton_decode"  # 16 rows: both at the bandwidth of memory
    assert select(p, H200, "hopper_paged").kernel.name == "hopper_paged"  # slower, but asked for
    mixed, decodes = p._replace(len_q=500, tokens=501), p._replace(len_q=1, tokens=2)
    assert select(mixed, H200).kernel.name == "hopper_paged" and select(mixed, GPUS["A100"]).kernel.name == "triton_paged"
    assert {select(decodes, GPUS[name]).kernel.name for name in ("H200", "A100")} == {"hopper_decode", "triton_shares"}
    alone = decodes._replace(extras=("batch_invariant",))  # as of a longer batch
    assert select(alone, H200).kernel.name == "hopper_paged" and select(alone, GPUS["A100"]).kernel.name == "triton_paged"
    kernel = OPS["decode"].kernel("hopper_paged")
    assert not any(kernel.refuses(p._replace(page=page), H200) for page in (1, 4, 12, 24, 2048))
    assert not kernel.refuses(p._replace(mask=KeyPadding(torch.ones(2, dtype=torch.int32)).static()), H200)


def test_what_hopper_decode_leaves_to_triton():
    pytest.importorskip("triton")
    kernel, p = OPS["decode"].kernel("hopper_decode"), TYPICAL["decode"]
    biases = torch.zeros(4, 1024, 1024)
    by_pair, by_head = (ScoreMod(f).static() for f in (lambda s, b, h, i, j: s + biases[h, i, j], lambda s, b, h, i, j: s + biases[h, 0, j]))
    for changed, reason in (
        ({"len_q": 16, "heads": 10}, "16 queries of 8 heads, of at most 64 in all"),
        ({"mask": DOCUMENT}, "mask Document is not one of Full, Causal, Window"),
        ({"kv": "int8"}, "kv int8 is not none"),
        *(({"score": score}, "a score reads values of keys for each query or head: triton_decode looks them up") for score in (by_pair, by_head)),
    ):
        assert kernel.refuses(p._replace(**changed), H200) == [reason]
        assert OPS["decode"].kernel("triton_shares").refuses(p._replace(**changed), H200) == []
    packed = p._replace(tokens=9, extras=("batch_invariant",))
    assert kernel.leaves(p._replace(batch=17), H200) == [] and "the longest of the batch" in kernel.leaves(packed, H200)[0]
    for score in (ALIBI, Softcap(2.0).static()):
        assert kernel.refuses(p._replace(score=score), H200) == []


def test_a_few_heads_of_64_columns_go_straight_to_registers():
    """On Hopper; not where something else of the Problem was not measured, or may not choose."""
    p = TYPICAL["decode"]
    assert select(p, H200).kernel.name == select(p._replace(batch=16), H200).kernel.name == "register_decode"
    others = {"batch": 17}, {"dim": 128}, {"dim_v": 128}, {"len_k": 4097}, {"len_q": 2}, {"heads": 18}, {"score": ALIBI}, {"extras": ("batch_invariant",)}
    assert {select(p._replace(**other), H200).kernel.name for other in others} == {"hopper_decode"}


def test_few_queries_share_a_tile_with_other_heads():
    """On Hopper, which then reads keys once for all heads of a group; many fill tiles of their own."""
    pytest.importorskip("triton")
    prefill, decode = TYPICAL["prefill"], TYPICAL["decode"]
    for p, name, words in (
        (prefill._replace(len_q=1), "hopper_prefill", "64x128 tiles of 16 queries x 4 heads, 1 warpgroups"),
        (prefill._replace(len_q=17, heads=6), "hopper_prefill", "64x128 tiles of 16 queries x 4 heads, 1 warpgroups"),
        (prefill, "hopper_prefill", "128x128 tiles, 2 warpgroups"),
        (prefill._replace(heads=6), "hopper_prefill", "64x128 tiles, 1 warpgroups"),
        (decode._replace(len_q=17), "hopper_paged", "64x128 tiles of 32 queries x 2 heads, 1 warpgroups"),
    ):
        decision = select(p, H200)
        assert decision.kernel.name == name and str(decision.config).startswith(words)


# ---- Problems


VARIED = {
    "batch": 3, "len_q": 5, "len_k": 999, "heads": 16, "kv_heads": 1, "dim": 80, "rows": 64, "width": 4095, "tokens": 64, "rotary_dim": 32,
    "dtype": torch.float16, "mask": Window(9), "page": 32, "variant": "gelu", "layout": "interleaved", "norm": True, "append": False,
    "dim_v": 96, "score": ALIBI, "extras": ("dropout", "sinks"), "kv": "int4/32", "channels": 640, "groups": 16, "pixels": 4097, "act": "",
    "ranks": 3, "apart": "the ranks are on 2 hosts", "room": 9,
}  # fmt: skip


@pytest.mark.parametrize("problem", TYPICAL.values(), ids=str)
def test_a_problem_is_its_text(problem):
    """Problems that differ in any one or two fields that mean something differ in their text, which is their test id and benchmark row."""
    unused = {"op", "keys"} | (
        {"page", "tokens", "tokens_k"} - ({"page"} if problem.op in ("decode", "latent") else set()) if isinstance(problem, Attention) else set()
    )
    unused |= {"append"} if problem.op.startswith("rotary") else set()  # there is no cache
    fields = [field for field in problem._fields if field not in unused and getattr(problem, field) != VARIED[field]]
    changed = [dict.fromkeys(chosen) for size in (0, 1, 2) for chosen in itertools.combinations(fields, size)]
    problems = [problem._replace(**{field: VARIED[field] for field in chosen}) for chosen in changed]
    assert len(set(problems)) == len(problems) == len({str(p) for p in problems})


def test_problems_of_different_storage_differ_in_their_text():
    dense = TYPICAL["prefill"]
    packed = dense._replace(keys="packed", tokens=1500)
    problems = [dense, packed, packed._replace(tokens=1501), packed._replace(tokens_k=1600), TYPICAL["decode"], *TYPICAL.values()]
    assert len({str(p) for p in problems}) == len(set(problems))


def test_texts_by_hand():
    assert [str(p) for p in TYPICAL.values()] == [
        "prefill B2 q1000 k1000 h8/2 d64 bf16 Causal",
        "backward B64 q1000 k1000 h8/2 d64 bf16 Causal",
        "decode B2 q1 k1024 h4/2 d64 bf16 Causal page 16",
        "latent B2 q1 k1024 h4/1 d576/512 bf16 Causal page 16 latent",
        "rms_norm 63x4096 bf16 residual",
        "gated_act 63x4096 bf16 silu",
        "rope_append T63 h8/2 d64 r64 bf16 neox append",
        "sample 8x49152 bf16",
        "log_probs 8x49152 bf16 top 5",
        "adjust_logits 8x49152 bf16 penalties mask",
        "verify 8x49152 bf16 chain of 4",
        "decode_places 8x16 torch.int64",
        "decode_advance 8x1 torch.int64 counts",
        "quantise 8000x128 bf16 block",
        "merge 2048x128 bf16 2 parts",
        "page_scores 8000x128 bf16 4 heads",
        "gated_act_backward 63x4096 bf16 clipped interleaved bias",
        "activate 63x4096 bf16 mish",
        "activate_backward 63x4096 bf16 relu2 bias",
        "rotary T63 h8/2 d64 r64 bf16 neox",
        "rotary_backward T63 h8/2 d96 r64 bf16 neox",
        "embedding 63x4096 bf16 of 50257",
        "embedding_backward 63x4096 bf16 of 50257",
        "dropout_add 63x4096 bf16 residual",
        "hadamard 63x4096 bf16",
        "adamw 300x134217728 bf16 fp32 moments",
        "grad_norm 300x134217728 bf16",
        "low_rank 63x4096 bf16 from 1024 rank 16 parts 2048+1024+1024 of 8",
        "skinny_linear 1x4096 bf16 from 1024 norm bias residual silu",
        "sum_ranks 63x4096 bf16 over 2 ranks residual norm room 256",
        "denoise 2x16384 bf16 second guided",
        "softmax 63x4096 bf16 log mask",
        "softmax_backward 63x4096 bf16 log",
        "divergence 63x4096 bf16 reverse",
        "divergence_backward 63x4096 bf16 reverse",
        "cross_entropy 63x4096 bf16 entropy softcap",
        "cross_entropy_backward 63x4096 bf16 entropy softcap",
        "cross_entropy_in_place 63x4096 bf16 smoothing",
        "scale 63x4096 bf16 once",
        "norm 63x4096 bf16 layer residual:fp32 weight bias scale:row",
        "norm_backward 63x4096 bf16 rms residual gate:row weight silu d_total -> x weight gate silu",
        "group_norm B2 c320 g32 p4096 bf16 silu channels_first",
        "group_norm_backward B2 c320 g32 p4096 bf16 mish channels_last",
    ]
    full = Attention("backward", 2, 70, 80, 4, 4, 16, FP32, DOCUMENT, "packed", 0, 100, 120, 8, ALIBI, ("dropout", "sinks"))
    assert str(full) == "backward B2 q70 k80 h4/4 d16/8 fp32 Document packed 100/120 tokens ALiBi dropout sinks"


# ---- costs


def test_costs_of_attention_by_hand():
    """Two products of 2 flops a pair and dimension; q, k, v, o once in their dtype, and LSE in float32."""
    dense = Attention("prefill", 2, 3, 5, 4, 2, 16, BF16, Full())
    assert OPS["prefill"].cost(dense) == (4 * 2 * 4 * 16 * 15, 2 * 16 * 2 * (2 * 3 * 4 + 2 * 5 * 2) + 4 * 2 * 3 * 4)
    causal = dense._replace(mask=Causal())  # rows see 3, 4 and 5 keys
    assert OPS["prefill"].cost(causal).flops == 4 * 2 * 4 * 16 * 12
    packed = Attention("prefill", 2, 6, 6, 4, 2, 16, BF16, Causal(), "packed", 0, 8)  # as if of 4 tokens each
    assert OPS["prefill"].cost(packed) == (4 * 2 * 4 * 16 * 10, 2 * 16 * (2 * 8 * 4 + 2 * 8 * 2) + 4 * 8 * 4)
    paged = Attention("decode", 2, 1, 64, 4, 2, 16, FP32, Window(9), "paged", 16)  # 10 keys of 64 are read
    assert OPS["decode"].cost(paged) == (4 * 2 * 4 * 16 * 10, 4 * 16 * 2 * (2 * 4 + 2 * 10 * 2) + 4 * 2 * 4)


def test_costs_of_wide_values_and_of_masks_by_hand():
    """A text costs what the band around it costs; values have a width of their own; keys that no band reaches are not read."""
    p = Attention("prefill", 1, 4, 10, 2, 1, 16, FP32, Full(), dim_v=8)
    assert OPS["prefill"].cost(p) == (2 * 2 * (16 + 8) * 40, 4 * (16 + 8) * (4 * 2 + 10) + 4 * 4 * 2)
    assert OPS["prefill"].cost(p._replace(mask=DOCUMENT)) == OPS["prefill"].cost(p)
    assert OPS["prefill"].cost(p._replace(mask=(Window(1) & Document(torch.zeros(10).int())).static())) == OPS["prefill"].cost(p._replace(mask=Window(1)))
    assert OPS["prefill"].cost(p._replace(mask=Window(1))) == (2 * 2 * (16 + 8) * 8, 4 * (16 + 8) * (4 * 2 + 5) + 4 * 4 * 2)
    packed = Attention("prefill", 2, 6, 9, 4, 2, 16, BF16, Full(), "packed", 0, 8, 14)  # as if of 4 queries and 7 keys each
    assert OPS["prefill"].cost(packed) == (4 * 2 * 4 * 16 * 28, 2 * 16 * 2 * (8 * 4 + 14 * 2) + 4 * 8 * 4)


def test_costs_of_gradients_by_hand():
    """Five products where the forward pass has two; what it read, and the output's gradient, are read, three gradients written."""
    p = Attention("backward", 1, 4, 10, 2, 1, 16, FP32, Full(), dim_v=8)
    assert OPS["backward"].cost(p) == (2 * 2 * (3 * 16 + 2 * 8) * 40, 4 * 2 * (16 + 8) * (4 * 2 + 10) + 4 * 4 * 2)
    eight_bits = p._replace(dtype=E4M3)
    assert OPS["backward"].cost(eight_bits).bytes == OPS["backward"].cost(p._replace(dtype=BF16)).bytes - (16 * 4 * 2 + (16 + 8) * 10)
    square = TYPICAL["backward"]
    assert OPS["backward"].cost(square).flops == 2.5 * OPS["prefill"].cost(square).flops


def test_costs_of_rows_by_hand():
    costs = {name: OPS[name].cost(p) for name, p in TYPICAL.items()}
    assert costs["rms_norm"].bytes == (4 * 63 + 1) * 4096 * 2
    assert OPS["rms_norm"].cost(TYPICAL["rms_norm"]._replace(variant="")).bytes == (2 * 63 + 1) * 4096 * 2
    assert costs["gated_act"].bytes == 3 * 63 * 4096 * 2
    assert costs["sample"].bytes == costs["log_probs"].bytes == 8 * 49152 * 2
    assert costs["adjust_logits"].bytes == 8 * 49152 * (2 + 2 + 4 + 1 / 8)
    assert costs["verify"].bytes == 8 * 4 * 20
    assert OPS["verify"].cost(TYPICAL["verify"]._replace(variant="chain of 4 with probabilities")).bytes == 8 * 49152 * (2 + 4)
    assert costs["quantise"].bytes == 8000 * 128 * (2 + 1)
    assert OPS["quantise"].cost(TYPICAL["quantise"]._replace(variant="head rotated")).bytes == 8000 * 128 * (2 + 2 + 1)
    assert costs["page_scores"].bytes == 8000 * (2 * 128 * 2 + 4 * 4)
    assert costs["low_rank"] == (2 * 63 * 16 * (3 * 1024 + 4096), 2 * (63 * (1024 + 2 * 4096) + 8 * 16 * (3 * 1024 + 4096)))
    matrix = 63 * 4096 * 2
    passes = {"softmax": 2, "softmax_backward": 3, "divergence": 2, "divergence_backward": 3, "cross_entropy": 1, "cross_entropy_backward": 2, "scale": 2}
    assert {name: costs[name].bytes for name in passes} == {name: count * matrix for name, count in passes.items()}
    assert costs["norm"].bytes == 63 * 4096 * (2 + 2 + 2 * 4 + 2) + 2 * 4096 * 2
    assert OPS["norm"].cost(TYPICAL["norm"]._replace(variant="rms int8")).bytes == 63 * 4096 * (2 + 1)
    assert costs["norm_backward"].bytes == 63 * 4096 * 2 * (2 + 4 + 1 + 2) + 4096 * 2  # dy and z; the gates, x, dtotal; dx; the gates' gradients
    assert costs["group_norm"].bytes == 2 * 2 * 320 * 4096 * 2
    assert costs["group_norm_backward"].bytes == 3 * 2 * 320 * 4096 * 2
    assert costs["rope_append"].bytes == 63 * ((2 * 10 + 3 * 2) * 64 * 2 + 4 * 64)
