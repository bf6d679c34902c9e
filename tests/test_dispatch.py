"""Which kernel is chosen, what is said about it, and that choosing again costs one look-up."""

import re

import pytest
import torch

import onchip
from onchip import dispatch
from onchip.core.device import GPUS
from onchip.core.kernel import Kernel, missing
from onchip.core.masks import Causal, Document, Full, Window
from onchip.core.problem import Attention, Operands, Rows
from onchip.core.scores import Bias, Softcap
from onchip.dispatch import OPS, select
from onchip.kernels.attention import CUTLASS
from onchip.ops.attend import attention_backward, backward_decision

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
H200, CPU = GPUS["H200"], torch.device("cpu")
PREFILL = Attention("prefill", 4, 4096, 4096, 32, 8, 128, BF16, Window(512))
BACKWARD = PREFILL._replace(op="backward")
WIDE = PREFILL._replace(dim=600, dim_v=128)
EIGHT_BITS = PREFILL._replace(dtype=torch.float8_e4m3fn, mask=Causal())
DECODE = Attention("decode", 32, 1, 4096, 32, 8, 128, BF16, Causal(), "paged", 16)

PADDED = "(add zeros; scale"
DOCUMENT, CAPPED = Document(torch.zeros(4, dtype=torch.int64)).static(), Softcap(30.0).static()
BIASED = Bias(torch.zeros(2, 8, 8)).static()


@pytest.fixture(autouse=True)
def no_strictness_no_memory(monkeypatch):
    monkeypatch.delenv("ONCHIP_STRICT", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def plain_cpu(monkeypatch):
    """A CPU that is a CPU, also where the interpreter makes it a GPU."""
    from onchip.core import device as devices

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    devices.of.cache_clear()
    yield CPU
    devices.of.cache_clear()


def qkv(n=8, dtype=FP32):
    return [torch.randn(1, n, 2, 16, dtype=dtype) for _ in range(3)]


# ---- the choice


def test_reasons_are_said_when_somebody_asks():
    """Until then a Decision has none: a server on a CPU comes to thousands of them."""
    decision = select(PREFILL._replace(len_q=1001), CPU)
    assert "refused" not in vars(decision)
    assert [name for name, _ in decision.refused] == [kernel.name for kernel in decision.before]


def test_auto_takes_the_first_that_refuses_nothing(plain_cpu):
    assert select(PREFILL, H200).kernel.name == "hopper_prefill" and select(PREFILL, H200).refused == ()
    older = select(PREFILL, GPUS["A100"])
    assert older.kernel.name == "triton_prefill" and older.refused == (
        ("hopper_prefill", ("needs NVIDIA sm_90 alone, A100 is 80",)),
        ("hopper_fp8", ("needs NVIDIA sm_90 alone, A100 is 80", "dtype bf16 is not e4m3")),
        ("bf16_of_e4m3", ("dtype bf16 is not e4m3",)),
    )
    assert select(DECODE, H200).kernel.name == "hopper_decode"
    assert select(BACKWARD, H200).kernel.name == ("hopper_backward" if missing(CUTLASS) else "cutlass_backward")
    wide = select(WIDE, H200)
    assert wide.kernel.name == "blocked"
    assert wide.refused == (
        ("hopper_prefill", ("dim 600 is not in 8..256 by 8",)),
        ("hopper_fp8", ("dtype bf16 is not e4m3", "dim 600 is not one of 64, 128, 256", "values of dim 128 beside queries of dim 600")),
        ("bf16_of_e4m3", ("dtype bf16 is not e4m3", "dim 600 is not in 8..576")),
        ("triton_prefill", ("dim 600 is not in 8..576",)),
    )
    learning = select(BACKWARD._replace(dtype=FP64, extras=("unheard of",)), H200)
    assert learning.kernel.name == "blocked"
    assert learning.refused == (
        ("cutlass_backward", (*filter(None, [missing(CUTLASS)]), "dtype fp64 is not one of bf16, fp16", "no unheard of")),
        ("hopper_backward", ("dtype fp64 is not one of bf16, fp16", "no unheard of")),
        ("hopper_fp8_backward", ("dtype fp64 is not e4m3", "no unheard of")),
        ("bf16_of_e4m3_backward", ("dtype fp64 is not e4m3", "no unheard of")),
        ("triton_backward", ("dtype fp64 is not one of bf16, fp16, fp32", "no unheard of")),
    )
    on_cpu = select(PREFILL, plain_cpu)
    assert on_cpu.kernel.name == "blocked" and on_cpu.refused == (
        ("hopper_prefill", ("runs on NVIDIA sm_90 alone, this is a CPU",)),
        ("hopper_fp8", ("runs on NVIDIA sm_90 alone, this is a CPU", "dtype bf16 is not e4m3")),
        ("bf16_of_e4m3", ("runs on NVIDIA sm_80 and AMD gfx942, this is a CPU", "dtype bf16 is not e4m3")),
        ("triton_prefill", ("runs on NVIDIA sm_80 and AMD gfx942, this is a CPU",)),
    )


def test_a_launch_goes_to_the_gpu_of_its_tensors(current_gpu, monkeypatch):
    """Not to the current one, where Triton would send it: a model over several GPUs leaves that at the first."""
    monkeypatch.setattr(dispatch.devices, "of", lambda device: H200)
    monkeypatch.setattr(Kernel, "load", lambda self: lambda problem, config, *inputs: (current_gpu[-1], inputs))
    monkeypatch.setattr(Kernel, "configs", lambda self, problem, device: [None])
    for index in (0, 1, 0):
        assert select(PREFILL, torch.device("cuda", index)).launch("q") == (index, ("q",))
    assert current_gpu == [0] and select(PREFILL, H200).launch("q") == (0, ("q",))


@pytest.mark.gpu
def test_on_a_gpu_that_is_not_the_current_one(device):
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    away = torch.device("cuda", 1 - torch.cuda.current_device())
    q, k, v = (torch.randn(2, 300, 4, 64, dtype=BF16, device=away, requires_grad=True) for _ in range(3))
    out = onchip.attention(q, k, v, mask=Causal())
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    expected = onchip.attention(*(t.detach().double().requires_grad_() for t in (q, k, v)), mask=Causal(), kernel="reference")
    torch.testing.assert_close(out.double(), expected.detach(), atol=2e-2, rtol=2e-2)
    assert all(grad.isfinite().all() and grad.device == away for grad in grads)


def test_a_named_kernel_runs():
    for name in ("hopper_prefill", "triton_prefill", "blocked", "reference"):
        assert select(PREFILL, H200, name).kernel.name == name


def test_a_named_kernel_never_falls_back():
    """Every reason at once, and the way out."""
    with pytest.raises(onchip.Unsupported) as error:
        select(WIDE._replace(dtype=FP64), H200, "triton_prefill")
    assert str(error.value) == (
        "prefill: kernel='triton_prefill' refused prefill B4 q4096 k4096 h32/8 d600/128 fp64 Window(512): dtype fp64 is not one of bf16, fp16, fp32; "
        "dim 600 is not in 8..576. Leave kernel='auto' (blocked accepts this)"
    )


def test_gradients_of_a_named_kernel_never_fall_back(plain_cpu, monkeypatch):
    """To plain torch: by a kernel for Hopper, by Triton's for any GPU, or not at all."""
    by = lambda kernel, p, device=H200: backward_decision(p, device, kernel).kernel.name  # noqa: E731
    read = BACKWARD._replace(score=BIASED, extras=("deterministic", "score_grad"))
    for kernel, p in (("hopper_prefill", read), ("hopper_fp8", EIGHT_BITS._replace(op="backward", dim=600))):
        with pytest.raises(onchip.Unsupported) as error:
            by(kernel, p)
        assert str(error.value).startswith(f"backward: kernel={kernel!r} has its gradients by a kernel that is not plain torch, and none takes {p} on H200: ")
        assert "triton_backward: " in str(error.value) and str(error.value).endswith(". Leave kernel='auto' (blocked accepts this)")
        assert by("auto", p) == by("blocked", p) == "blocked" and by("reference", p) == "reference"
    with pytest.raises(onchip.Unsupported, match="kernel='triton_backward' refused"):
        by("triton_prefill", read)
    assert by("hopper_prefill", BACKWARD._replace(dim=256, extras=("deterministic",))) == "hopper_backward"
    assert by("hopper_prefill", BACKWARD._replace(len_q=64, len_k=64)) == "triton_backward"
    assert by("hopper_fp8", EIGHT_BITS._replace(op="backward")) == "hopper_fp8_backward"
    assert by("hopper_fp8", EIGHT_BITS._replace(op="backward", dim=256)) == "bf16_of_e4m3_backward"
    assert by("auto", BACKWARD, plain_cpu) == by("blocked", BACKWARD, plain_cpu) == "blocked"
    q, k, v = qkv(dtype=BF16)
    x = Operands(0.25, score=(torch.zeros(2, 8, 8, requires_grad=True),))
    p = Attention("prefill", 1, 8, 8, 2, 2, 16, BF16, score=BIASED, extras=("deterministic",))
    with monkeypatch.context() as patch, pytest.raises(onchip.Unsupported, match="kernel='hopper_prefill' has its gradients by a kernel"):
        patch.setattr(dispatch.devices, "of", lambda device: H200)  # as a backward pass asks
        attention_backward(p, "hopper_prefill", x, q, k, v, q, torch.zeros(1, 2, 8), q)


def test_a_cache_that_may_not_be_quantised():
    paged = DECODE._replace(kv="int8/32")
    reasons = dict(select(paged, H200).refused)
    assert "kv int8/32 is not none" in reasons["hopper_decode"]
    assert "kv int8/32 is not one of none, e4m3, e5m2, int8, int4" in reasons["register_decode"]


def test_a_named_kernel_refuses_a_cpu(plain_cpu):
    with pytest.raises(
        onchip.Unsupported, match=r"kernel='triton_prefill' refused .*: runs on NVIDIA sm_80 and AMD gfx942, this is a CPU\. Leave kernel='auto'"
    ):
        onchip.attention(*qkv(), kernel="triton_prefill")


def test_no_kernel_has_that_name():
    with pytest.raises(
        onchip.Unsupported,
        match=r"prefill: no kernel is named 'flash'; it has hopper_prefill, hopper_fp8, bf16_of_e4m3, triton_prefill, blocked, reference, or "
        "leave kernel='auto'",
    ):
        select(PREFILL, H200, "flash")
    with pytest.raises(onchip.Unsupported, match="no kernel is named 'triton_decode'"):
        select(PREFILL, H200, "triton_decode")


def test_no_kernel_takes_it():
    nothing = WIDE._replace(keys="paged")
    with pytest.raises(onchip.Unsupported) as error:
        select(nothing, H200)
    for kernel in OPS["prefill"].kernels:
        assert f"{kernel.name}: {'; '.join(kernel.refuses(nothing, H200))}" in str(error.value)
    with pytest.raises(onchip.Unsupported, match="No other kernel accepts this either"):
        select(nothing, H200, "blocked")


# ---- ONCHIP_STRICT


def test_strict_turns_a_portable_fallback_on_a_gpu_into_an_error(monkeypatch):
    assert select(WIDE, H200).kernel.portable
    monkeypatch.setenv("ONCHIP_STRICT", "1")
    dispatch.forget()
    with pytest.raises(onchip.Unsupported) as error:
        select(WIDE, H200)
    assert str(error.value) == (
        f"prefill: ONCHIP_STRICT is set and only the portable kernel blocked takes {WIDE} on H200: hopper_prefill: dim 600 is not in 8..256 by 8. "
        "hopper_fp8: dtype bf16 is not e4m3; dim 600 is not one of 64, 128, 256; values of dim 128 beside queries of dim 600. "
        "bf16_of_e4m3: dtype bf16 is not e4m3; dim 600 is not in 8..576. triton_prefill: dim 600 is not in 8..576"
    )


def test_strict_leaves_everything_else_alone(monkeypatch, plain_cpu):
    """A GPU's own kernel, a CPU, and a kernel that was asked for by name."""
    monkeypatch.setenv("ONCHIP_STRICT", "1")
    assert select(PREFILL, H200).kernel.name == "hopper_prefill"
    assert select(PREFILL, plain_cpu).kernel.name == "blocked"
    assert select(WIDE, H200, "blocked").kernel.name == "blocked"


def test_strict_with_a_bad_value(monkeypatch):
    monkeypatch.setenv("ONCHIP_STRICT", "perhaps")
    with pytest.raises(ValueError, match="ONCHIP_STRICT='perhaps' is not a truth value"):
        select(WIDE, H200)


# ---- warm


def test_a_second_choice_is_one_look_up(monkeypatch):
    first = select(PREFILL, H200)

    def refuses(*_):
        raise AssertionError("asked a kernel again")

    monkeypatch.setattr(Kernel, "refuses", refuses)
    before = dispatch._select.cache_info()
    again = select(Attention(*PREFILL), H200)  # equal, not identical
    after = dispatch._select.cache_info()
    assert again is first
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 0)


def test_what_a_decision_holds_is_made_once():
    decision = select(PREFILL._replace(dtype=FP32, dim=64), CPU, "blocked")
    assert decision.launch is decision.launch and decision.run is decision.run and decision.config is None
    assert decision.run.args == (decision.problem, None)


def test_every_field_of_a_problem_counts():
    texts = [dict(zip(("mask", "score"), pair, strict=True)) for pair in ((DOCUMENT, None), (DOCUMENT, CAPPED), (Causal(), CAPPED))]
    fields = [{"mask": Window(511)}, {"mask": Causal()}, {"len_k": 4097}, {"dim_v": 64}, {"extras": ("sinks",)}, {"extras": ("dropout", "sinks")}, *texts]
    variants = [PREFILL, *(PREFILL._replace(**changed) for changed in fields)]
    assert len({id(select(p, H200)) for p in variants}) == len(variants)
    assert select(PREFILL, GPUS["A100"]) is not select(PREFILL, H200)


# ---- record


def test_record_collects_every_call_in_order():
    q, k, v = qkv()
    x = torch.randn(3, 8)
    with onchip.record() as decisions:
        onchip.attention(q, k, v, kernel="reference")
        onchip.rms_norm(x, torch.ones(8), kernel="reference")
        onchip.attention(q, k, v, kernel="reference")
    onchip.attention(q, k, v, kernel="reference")
    p = Attention("prefill", 1, 8, 8, 2, 2, 16, FP32, Full())
    assert [(d.problem, d.kernel.name) for d in decisions] == [(p, "reference"), (Rows("rms_norm", 3, 8, FP32), "reference"), (p, "reference")]


def test_records_nest():
    q, k, v = qkv()
    with onchip.record() as outer:
        with onchip.record() as inner:
            onchip.attention(q, k, v)
        onchip.attention(q, k, v)
        with onchip.record() as empty:
            pass
        onchip.attention(q, k, v)
    assert (len(outer), len(inner), len(empty)) == (3, 1, 0)


def test_explain_wants_a_function_or_a_problem():
    with pytest.raises(TypeError, match="explain: 'attention' is neither a function nor a Problem; give one, as in explain"):
        onchip.explain("attention")


def test_explain_a_problem_wants_a_device_and_a_kernel(plain_cpu):
    """Each is heard, however it is given, or refused; none is dropped."""
    there = "prefill B4 q4096 k4096 h32/8 d128 bf16 Window(512), on H200\n  runs   "
    for device in (H200, "H200", "h200"):
        assert onchip.explain(PREFILL, device).startswith(there + "hopper_prefill")
        assert onchip.explain(PREFILL, device=device, kernel="triton_prefill") == onchip.explain(PREFILL, device, "triton_prefill")
        assert onchip.explain(PREFILL, device, kernel="triton_prefill").startswith(there + "triton_prefill")
    assert onchip.explain(PREFILL, "cpu") == onchip.explain(PREFILL, CPU) == onchip.explain(PREFILL)
    for device, words in (
        ("H300", "device 'H300' is not a device; give cpu, cuda or cuda:N, or a GPU of the table: A100, L4"),
        ("meta", "device 'meta' is not supported; give cpu, cuda"),
        (3.5, "device '3.5' is not a device; give cpu"),
        ("cuda:77", "device 'cuda:77' is not there: torch .* sees . GPUs; give cpu.*, or a GPU of the table"),
        (torch.device("cuda:77"), "device 'cuda:77' is not there"),
    ):
        with pytest.raises(ValueError, match=words):
            onchip.explain(PREFILL, device=device)
    for args, keywords in (((H200, "auto", 3), {}), ((H200,), {"device": H200}), ((), {"gpu": "H200"})):
        with pytest.raises(TypeError, match=r"explain: with a Problem come .*; give a device and a kernel, each once"):
            onchip.explain(PREFILL, *args, **keywords)
    with pytest.raises(ValueError, match="explain: a Problem of 'prefil', which is no operator; there are prefill, backward"):
        onchip.explain(PREFILL._replace(op="prefil"))
    assert onchip.explain(lambda device: onchip.attention(*qkv()), device="its own").startswith("prefill")  # of a function all arguments are its own


def test_a_record_ends_when_its_block_raises():
    with pytest.raises(KeyError), onchip.record() as decisions:
        raise KeyError
    onchip.attention(*qkv())
    assert decisions == [] and dispatch.recorders == []


# ---- explain


def test_explain_by_hand():
    """The figures from first principles: H200 makes 989.4 TFLOP/s in bf16 and reads 4.8 TB/s."""
    pairs = 4 * sum(min(row, 512) + 1 for row in range(4096))
    flops = 4 * 32 * 128 * pairs
    moved = 2 * 128 * 4 * 4096 * (2 * 32 + 2 * 8) + 4 * 4 * 4096 * 32
    seconds = max(flops / 989.4e12, moved / 4.8e12)
    assert seconds == flops / 989.4e12
    lines = str(select(PREFILL, H200)).split("\n")
    assert lines[0] == "prefill B4 q4096 k4096 h32/8 d128 bf16 Window(512), on H200"
    assert re.fullmatch(r"  runs   hopper_prefill   kernels/attention/hopper_prefill.py   \d+x\d+ tiles, \d warpgroups, .*at most 132 programs", lines[1])
    expected = f"  floor  {seconds * 1e6:.1f} us, bound by math: {flops / 1e9:.1f} GFLOP, {moved / 1e6:.1f} MB, {flops / moved:.0f} flop/byte (NVIDIA H200"
    tiles = 4 * 32 * 4096 // 128
    assert lines[2] == f"  order  {tiles} tiles by 132 programs, each drawing its next, the last queries first, 16 heads side by side"  # 2 of 32 MB of K and V
    assert lines[3].startswith(expected) and "130.5 us" in lines[3] and "129.1 GFLOP" in lines[3]
    assert len(lines) == 4


def test_explain_a_call_bound_by_memory():
    read = 2 * 128 * 32 * (2 * 32 + 2 * 4096 * 8) + 4 * 32 * 32
    text = onchip.explain(DECODE, device=H200)
    assert f"floor  {read / 4.8e12 * 1e6:.1f} us, bound by memory: " in text and f" {read / 1e6:.1f} MB, 4 flop/byte" in text


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("len_q", [0, 16])
def test_explain_where_there_are_no_keys(len_q, mask):
    pytest.importorskip("triton")
    text = onchip.explain(Attention("prefill", 1, len_q, 0, 8, 2, 128, BF16, mask), device=H200)
    assert "runs   hopper_prefill" in text and "0 FLOP" in text


def test_explain_where_there_are_no_sequences():
    pytest.importorskip("triton")
    assert "runs   triton_decode" in onchip.explain(DECODE._replace(batch=0, dim=200, dim_v=512), device=H200)
    for p in (PREFILL, BACKWARD):
        assert "  floor  0.0 us, bound by memory: 0 FLOP, 0 B" in onchip.explain(p._replace(batch=0, keys="packed", tokens=0), device=GPUS["A100"])


@pytest.mark.parametrize(
    ("problem", "order"),
    [
        (BACKWARD._replace(mask=Causal()), "{keys} tiles by 132 programs, each drawing its next, those with most work first, 4 heads side by side"),
        (BACKWARD._replace(mask=Full(), extras=("deterministic",)), "dK, dV {keys} tiles by 132 programs, each drawing its next; dQ {queries} tiles by 132 "
         "programs, each drawing its next"),
        (EIGHT_BITS._replace(op="backward", mask=Full(), len_q=190, len_k=128, batch=1), "dQ 32 tiles by a program each; dK, dV 8 tiles by a program each"),
    ],
    ids=str,
)  # fmt: skip
def test_explain_says_how_gradients_go_by(problem, order):
    pytest.importorskip("triton")
    p = problem
    keys, queries = (p.batch * heads * length // 128 for heads, length in ((p.kv_heads, p.len_k), (p.heads, p.len_q)))
    text = str(select(p, H200, "auto" if p.dtype != torch.bfloat16 else "hopper_backward"))
    assert f"  order  {order.format(keys=keys, queries=queries)}\n" in text


@pytest.mark.parametrize(("gpu", "change"), [("H200", {"dim": 96}), ("A100", {}), ("H200", {"op": "backward", "dim": 256}), ("A100", {"op": "backward"})])
def test_explain_says_how_another_kernels_tiles_are_taken(gpu, change):
    """Of bfloat16 as that one has them: the same line, or none."""
    pytest.importorskip("triton")
    p = EIGHT_BITS._replace(extras=("key_scales", "token_scales"), **change)
    told = [str(select(each, GPUS[gpu])).split("\n") for each in (p, p._replace(dtype=BF16, extras=()))]
    assert "kernels/attention/bf16_of_e4m3.py" in told[0][1]
    ours, theirs = ([line for line in lines if line.startswith("  order")] for lines in told)
    assert ours == theirs and len(ours) == (gpu == "H200")


def test_explain_says_why_not():
    text = onchip.explain(WIDE._replace(dtype=FP64), device=GPUS["A100"])
    assert "  runs   blocked          kernels/attention/blocked.py\n" in text
    assert text.endswith("  not    triton_prefill   dtype fp64 is not one of bf16, fp16, fp32; dim 600 is not in 8..576")


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        (PREFILL, None),
        (PREFILL._replace(dtype=FP32, extras=("tf32",)), "hopper_prefill   would run in bf16"),
        (PREFILL._replace(dim=100), f"hopper_prefill   would run with heads of 104 columns {PADDED}=100**-0.5 where none is given)"),
        (PREFILL._replace(dim=90, dim_v=50), f"hopper_prefill   would run with heads of 96 and 56 columns {PADDED}=90**-0.5 where none is given)"),
        (
            BACKWARD._replace(dim=100, dtype=FP32),
            f"hopper_backward  would run in bf16 and with heads of 104 columns {PADDED}=100**-0.5 where none is given)",
        ),
        (EIGHT_BITS._replace(dim=96), f"hopper_fp8       would run with heads of 128 columns {PADDED}=96**-0.5 where none is given)"),
        (DECODE._replace(page=5), "hopper_decode    would run over pages of 64 tokens"),
        (DECODE._replace(dim=96, kv="int8"), None),  # of codes, zeros are not zeros
        (DECODE._replace(dim=600), None),  # nothing helps
        (Rows("rms_norm", 64, 128, FP64), None),
    ],
    ids=str,
)
def test_explain_says_what_to_change(problem, change):
    pytest.importorskip("triton")
    said = [line for line in onchip.explain(problem, device=H200).split("\n") if line.startswith("  change ")]
    assert said == ([f"  change {change}"] if change else [])


def test_what_to_change_for_a_backward_pass_in_order(monkeypatch):
    """Where the extra is installed, its kernel stands first and takes no order."""
    pytest.importorskip("triton")
    kernel = OPS["backward"].kernel("cutlass_backward")
    leaves = Kernel.leaves
    monkeypatch.setattr(Kernel, "leaves", lambda self, *call: [why for why in leaves(self, *call) if self is not kernel or "cutlass" not in why])
    problem = BACKWARD._replace(mask=Causal(), extras=("deterministic",))
    assert str(select(problem, H200)).endswith("  change cutlass_backward  would run without deterministic")


def test_explain_a_function(plain_cpu):
    """It is run once; calls that are alike are told once."""
    q, k, v = qkv()
    times = []

    def model(q, *, repeats):
        times.append(repeats)
        for _ in range(repeats):
            q = onchip.attention(q, k, v, mask=Causal())
        return onchip.attention(q, k, v)

    text = onchip.explain(model, q, repeats=3)
    assert times == [3]
    heads = [line for line in text.split("\n") if not line.startswith(" ")]
    assert heads == ["prefill B1 q8 k8 h2/2 d16 fp32 Causal, on CPU", "prefill B1 q8 k8 h2/2 d16 fp32 Full, on CPU"]
    assert text.count("runs   blocked") == 2 and text.count("not    triton_prefill") == 2


def test_explain_gradients_and_compiled_calls(plain_cpu):
    """Whichever way a call takes, what ran is told, the backward pass too."""
    q, k, v = (t.requires_grad_() for t in qkv())

    def train(attention):
        attention(q, k, v).sum().backward()

    compiled = torch.compile(lambda q, k, v: onchip.attention(q, k, v), fullgraph=True, backend="aot_eager")
    for attention in (onchip.attention, compiled):
        lines = onchip.explain(train, attention).split("\n")
        assert [line for line in lines if not line.startswith(" ")] == [f"{op} B1 q8 k8 h2/2 d16 fp32 Full, on CPU" for op in ("prefill", "backward")]
        assert sum(line.startswith("  runs   blocked ") for line in lines) == 2


def test_explain_the_public_function():
    assert onchip.explain(onchip.attention, *qkv(), kernel="reference").split("\n")[1].startswith("  runs   reference ")


def test_explain_a_function_that_calls_nothing():
    assert onchip.explain(abs, -1) == "no onchip operator was called"


@pytest.mark.parametrize(("value", "text"), [(0, "0 "), (999, "999 "), (1000, "1.0 k"), (2.55e6, "2.5 M"), (129.1e9, "129.1 G"), (3e15, "3000.0 T")])
def test_units(value, text):
    assert dispatch._si(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(1e-7, "0.1 us"), (130.5e-6, "130.5 us"), (1e-3, "1.00 ms"), (2.5, "2500.00 ms")])
def test_times(seconds, text):
    assert dispatch._time(seconds) == text


# ---- multiprocessors left to others


def test_multiprocessors_left_by_some_calls(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("ONCHIP_SM_MARGIN", "4")
    programs = lambda: select(PREFILL, H200, "hopper_prefill").config.programs  # noqa: E731
    assert programs() == 128 and dispatch.left_to_others() == 4
    with onchip.sm_margin(12):
        assert programs() == 120 and dispatch.left_to_others() == 12
        assert "120 programs" in onchip.explain(PREFILL, device=H200)
        with onchip.sm_margin(0):
            assert programs() == 132 and dispatch.left_to_others() == 0
        with pytest.raises(RuntimeError), onchip.sm_margin(None):
            assert programs() == 128
            raise RuntimeError
        assert programs() == 120
    assert programs() == 128
    with onchip.sm_margin(132), pytest.raises(ValueError, match="sm_margin=132 of the 132 multiprocessors of H200; give 0 to 131"):
        programs()
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match=f"sm_margin: {wrong!r}; give a number of multiprocessors, 0 or more, or None"), onchip.sm_margin(wrong):
            pass


@pytest.mark.parametrize("inside", [False, True])
def test_the_way_back_leaves_as_many_as_the_way_there(inside, plain_cpu):
    """In whichever thread torch goes back, and whatever holds then."""
    q, k, v = (t.requires_grad_() for t in qkv())
    with onchip.record() as decisions, onchip.sm_margin(12 if inside else None):
        out, _ = onchip.attention(q, k, v, return_lse=True)
    with onchip.record() as back, onchip.sm_margin(3):
        out.sum().backward()
    assert [d.problem.op for d in (*decisions, *back)] == ["prefill", "backward"]
    assert [d.device.margin for d in (*decisions, *back)] == [12 if inside else None] * 2
