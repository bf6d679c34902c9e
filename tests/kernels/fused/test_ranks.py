"""Sums over ranks by memory that they share. The interpreter runs every rank's kernel in one process: first all send, then all sum."""

import functools

import pytest
import torch

from judge import assert_as_good_as_torch, poisoned
from offline import compile_for
from onchip.core.device import gpu
from onchip.core.linear import RowNorm
from onchip.core.ranks import Boxes, Ranks
from onchip.dispatch import select
from onchip.kernels.fused import SUM_RANKS, ranks
from onchip.kernels.meeting import FIRST, SECOND
from onchip.ops.ranks import rank_problem, sum_ranks

FORMS = {"": (False, False), "residual": (True, False), "norm": (False, True), "residual norm": (True, True)}
WORDS = {2: torch.int16, 4: torch.int32}


def empty_boxes(of: int, rows: int, width: int, dtype: torch.dtype) -> list[Ranks]:
    """Of each rank, all on one device."""
    boxes = tuple(torch.full((2, of, rows, width), -1, dtype=WORDS[dtype.itemsize]).view(dtype) for _ in range(of))
    return [Ranks(rank, of, None, Boxes(boxes, torch.zeros(rows, dtype=torch.int32))) for rank in range(of)]


def summed(all_ranks: list[Ranks], parts, residual, norm) -> list:
    """What each rank gets: a launch of the kernel up to sending, and one from there on."""
    problem = rank_problem(parts[0], all_ranks[0], residual, norm)
    launch = functools.partial(ranks.launch, problem, ranks.configs(problem, None)[0])
    for phase in (FIRST, SECOND):
        found = [launch(x, mine, residual, norm, phase.value) for x, mine in zip(parts, all_ranks, strict=True)]
    return [one if isinstance(one, tuple) else (one,) for one in found]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("of", "width"), [(2, 1), (3, 100), (2, 5120)])
def test_sums(of, width, dtype, device):
    """In all forms and numbers of rows, one after the other in the same boxes; between them every number is empty."""
    if device.type != "cpu":
        pytest.skip("ranks of one process wait for each other on a GPU: `onchip.bench.ranks` runs it on several")
    all_ranks = empty_boxes(of, 4, width, dtype)
    for rows, (has_residual, has_norm) in zip((4, 1, 3, 4), FORMS.values(), strict=True):
        parts = [torch.randn(rows, 2 * width, dtype=torch.float64)[:, :width].to(dtype).as_strided((rows, width), (width, 1)) for _ in range(of)]
        residual = torch.randn(rows, width).to(dtype) if has_residual else None
        norm = RowNorm((torch.randn(width) * 0.3).to(dtype), 1e-5, 1.0) if has_norm else None

        def formula(to, parts=parts, residual=residual, norm=norm):
            total = functools.reduce(torch.add, [x.to(to) for x in parts if x is not None])
            total = total if residual is None else total + residual.to(to)
            if norm is None:
                return (total,)
            y = torch.nn.functional.rms_norm(total, (total.shape[1],), norm.weight.to(to) + norm.offset, norm.eps)
            return (y,) if residual is None else (y, total)

        found = summed(all_ranks, parts, residual, norm)
        for ours, low, truth in zip(found[0], formula(dtype), formula(torch.float64), strict=True):
            assert_as_good_as_torch(ours, low, truth)
        assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
        assert all((box.view(WORDS[dtype.itemsize]) == -1).all() for box in all_ranks[0].boxes.boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_an_empty_box_are_a_nan_like_others(dtype, device):
    if device.type != "cpu":
        pytest.skip("ranks of one process wait for each other on a GPU")
    all_ranks, parts = empty_boxes(2, 1, 8, dtype), [torch.ones(1, 8, dtype=dtype) for _ in range(2)]
    parts[0].view(WORDS[dtype.itemsize])[0, 3] = -1
    for (total,) in summed(all_ranks, parts, None, None):
        assert total.isnan().tolist() == [[i == 3 for i in range(8)]] and total.nansum() == 14


def test_what_is_refused():
    """Without common memory, or of more rows than it holds, sums are the group's; by name the kernel refuses them."""
    x, mine = torch.ones(5, 8), empty_boxes(2, 4, 8, torch.float32)[0]
    apart = mine._replace(boxes=None, apart="the ranks are on 2 hosts")
    kernel = SUM_RANKS.kernel("triton_ranks")
    h200 = gpu("H200")
    assert kernel.refuses(rank_problem(x, apart), h200) == ["the ranks are on 2 hosts"]
    assert kernel.refuses(rank_problem(x, mine), h200) == ["5 rows, of at most 4 that there is common memory for"]
    assert kernel.refuses(rank_problem(x[:4], mine), h200) == [] and select(rank_problem(x, mine), h200).kernel.name == "nccl"
    wide = rank_problem(x, mine)._replace(width=8200, dtype=torch.bfloat16, rows=4)
    assert kernel.refuses(wide, h200) == ["rows of 16400 bytes, of at most 16384"]
    norm = RowNorm(torch.ones(8))
    for wrong, words in (
        (functools.partial(sum_ranks, x[0], mine), r"x is \[8\]; give \[rows, width\]"),
        (functools.partial(sum_ranks, x, mine, residual=x[:4]), r"residual is torch.float32 \[4, 8\].*give torch.float32 \[5, 8\]"),
        (functools.partial(sum_ranks, x.half(), mine, norm=norm), r"norm.weight is torch.float32 \[8\].*give torch.float16"),
        (functools.partial(sum_ranks, x.T, mine), "call .contiguous"),
        (functools.partial(sum_ranks, x[:, :7].contiguous(), mine), "width 7, the ranks' boxes torch.float32 of 8"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("of", "width", "dtype"), [(2, 4096, "*bf16"), (8, 8192, "*bf16"), (8, 8192, "*fp16"), (8, 4096, "*fp32")])
def test_compiled(of, width, dtype, arch):
    """Nothing spills; x, the residual and the weight are read, and boxes listened to, 16 bytes at a time."""
    problem = rank_problem(poisoned((1, width), torch.bfloat16, "meta"), Ranks(0, of))
    constexprs = {"RANK": 1, "PHASE": 0, "BLOCK": width}
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "total_ptr", "weight_ptr", "y_ptr"), dtype) | {"turn_ptr": "*i32", "boxes": (dtype,) * of}
    signature = dict.fromkeys(ranks._sum_ranks.arg_names, "i32") | pointers | {"eps": "fp32", "offset": "fp32"}
    aligned = ("x_stride", "residual_stride", "room", "width")
    (warps,) = ranks.configs(problem, None)[0]
    facts = compile_for(ranks._sum_ranks, signature, constexprs, arch, warps, aligned=aligned)
    assert facts.spills == 0 and facts.ptx.count("ld.global.v4.b32") == 3 * width * (4 if dtype == "*fp32" else 2) // (512 * warps)
    assert "ld.volatile.global.v4.b32" in facts.ptx and "ld.volatile.global.b" not in facts.ptx
