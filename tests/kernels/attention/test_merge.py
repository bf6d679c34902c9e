"""Partial results merged by their LSE, by every kernel of the menu, against float64: parts that lie anywhere, parts that saw nothing, and NaN in those."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch, hardware, poisoned
from offline import compile_for
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.dispatch import select
from onchip.kernels.attention import MERGE, PARTS, gluon_merge, triton_merge

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in MERGE.kernels]
TRITON = pytest.param("triton_merge", marks=[pytest.mark.gpu, pytest.mark.large])

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy's, of the interpreter


def states(count, shape, dtype, device):
    """Parts of (batch, len, heads, dim), of which some saw nothing for some rows and hold NaN there: dense, or as packed queries leave them, in turn."""
    batch, length, heads, dim = shape
    made = []
    for s in range(count):
        out, lse = torch.randn(shape, device=device).to(dtype), 4 * torch.randn(batch, length, heads, device=device) + 3 * s
        blind = torch.rand(lse.shape, device=device) < (0.3 if s else 0.2)
        blind[0, 0, 0] = True  # nobody saw anything there
        out = poisoned((batch, length, heads, dim + 8), dtype, device)[..., :dim].copy_(out.masked_fill(blind[..., None], torch.nan))
        lse = lse.masked_fill(blind, -torch.inf)
        lse = lse.transpose(1, 2).contiguous() if s % 2 else lse.flatten(0, 1).T.contiguous().view(heads, batch, length).transpose(0, 1)
        made.append((out, lse))
    return made


def truth_of(parts):
    """In float64, over the rows that saw something."""
    lse = torch.stack([e for _, e in parts]).double()
    total = lse.logsumexp(0)
    shares = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp()
    return sum(share.transpose(-1, -2)[..., None] * o.double().nan_to_num(0.0) for share, (o, _) in zip(shares, parts, strict=True)), total


def check(count, shape, dtype, kernel, device, packed=False):
    parts = states(count, shape, dtype, device)
    if packed:
        parts = [(out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) for out, lse in parts]
    truth, truth_lse = truth_of(parts)
    problem = Rows("merge", parts[0][1].numel(), shape[-1], dtype, f"{count} parts")
    out, lse = select(problem, device, kernel).launch(parts)
    assert out.shape == parts[0][0].shape and out.dtype == dtype and lse.shape == parts[0][1].shape and lse.dtype == FP32
    plain = torch.stack([e for _, e in parts])
    low = (plain.softmax(0).nan_to_num(0.0).transpose(-1, -2)[..., None] * torch.stack([o.nan_to_num(0.0) for o, _ in parts])).sum(0)
    assert_as_good_as_torch(out, (low.to(dtype), *hardware(truth, dtype, device)), truth)
    assert_as_good_as_torch(lse, (plain.logsumexp(0), *hardware(truth_lse, FP32, device)), truth_lse)
    assert not out[truth_lse.transpose(-1, -2) == -torch.inf].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1, 1, 1)), (2, (3, 1, 4, 16)), (3, (2, 5, 3, 63)), (5, (1, 7, 2, 128)), (PARTS, (2, 2, 2, 40))])
def test_merge(count, shape, dtype, kernel, device):
    check(count, shape, dtype, kernel, device)
    check(count, shape, dtype, kernel, device, packed=True)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("count", "shape"), [(2, (64, 1, 32, 128)), (9, (64, 1, 32, 128)), (3, (4, 1000, 16, 256)), (2, (1, 4099, 128, 512)), (4, (7, 3, 5, 1000))]
)
def test_merge_at_full_size(count, shape, dtype, kernel, device):
    check(count, shape, dtype, kernel, device)


@pytest.mark.gpu
def test_who_merges(device):
    """The kernel where nobody needs gradients, else torch, with the same result; more parts than one launch takes are torch's too."""
    parts = states(3, (2, 3, 2, 8), FP32, device)
    with onchip.record() as decisions:
        plain = onchip.merge(parts)
        with_gradients = onchip.merge([(out.nan_to_num(0.0).requires_grad_(), lse) for out, lse in parts])
        onchip.merge(parts * 6)
    assert [d.kernel.name for d in decisions] == ["triton_merge", "reference"]
    torch.testing.assert_close(plain, tuple(t.detach() for t in with_gradients))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    "problem", [Rows("merge", 2048, 128, BF16, "2 parts"), Rows("merge", 65536, 512, BF16, "16 parts"), Rows("merge", 2048, 128, FP32, "9 parts")], ids=str
)
def test_merge_compiles(problem, arch):
    """Nothing spills, and parts are read 16 bytes at a time."""
    how = triton_merge.configs(problem, gpu({"sm_80": "A100", "sm_90": "H200", "gfx942": "MI300X"}[arch]))[0]
    parts, kind = int(problem.variant.split()[0]), {BF16: "*bf16", FP32: "*fp32"}[problem.dtype]
    three = ("i64", "i64", "i64")
    signature = {
        "outs": (kind,) * parts, "lses": ("*fp32",) * parts, "out_strides": (three,) * parts, "lse_strides": (three,) * parts,
        "o_ptr": kind, "o_lse_ptr": "*fp32", "o_lse_strides": three, "rows": "i32", "len_q": "i32", "heads": "i32",
    }  # fmt: skip
    constexprs = {"PARTS": parts, "DV": problem.width, "ROWS": how.rows, "BLOCK": how.block, "EARLY": arch == "sm_90"}
    facts = compile_for(triton_merge._merge, signature, constexprs, arch, how.warps, aligned=("out_strides",))
    assert facts.spills == 0 and facts.registers <= 128
    assert facts.vector_loads >= parts or arch == "gfx942"  # 64 lanes a warp: short rows give each less


def test_numbers_of_captured_calls_stay():
    """A graph holds the address of its numbers and not their tensor: what nobody else holds would be somebody else's memory after a while."""
    arrivals, places = gluon_merge._Arrivals(torch.device("cpu")), set()
    for _ in range(3 * gluon_merge.CALLS):
        if (numbers := arrivals.of_graph()) is None:
            arrivals.of_stream(0)
            numbers = arrivals.of_graph()
        assert numbers.data_ptr() not in places and not numbers.any()
        places.add(numbers.data_ptr())
        del numbers
        arrivals.of_stream(0)
    assert len(arrivals.pieces) * gluon_merge.CALLS >= len(places)
