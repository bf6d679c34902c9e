"""Keys in parts, by `triton_prefill` in the interpreter or on a GPU, and who gets how many."""

from typing import Any

import pytest
import test_hopper_paged as paged
import torch

pytest.importorskip("triton")

import test_hopper_emulated as plain
from test_hopper_emulated import Call, Case

from onchip.core.device import GPUS
from onchip.core.masks import Causal, Document, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scores import ALiBi, Bias, Softcap, chain
from onchip.dispatch import select
from onchip.kernels.attention import triton_prefill
from onchip.kernels.attention.key_parts import join_units
from onchip.ops.attend import How, dense_sizes, packed_sizes, paged_sizes, problem_of

FP16, BF16 = torch.float16, torch.bfloat16
TILES = (16, 16, 4, 1)  # queries and keys a tile, warps, stages; parts come behind

CASES = [
    Case((*TILES, 3), 40, 150, Full(), heads=(4, 2), batch=2),
    Case((*TILES, 4), 40, 150, dtype=FP16),
    Case((*TILES, 4), 70, 75),  # parts of no keys
    Case((*TILES, 3), 40, 150, Causal(align="top_left")),
    Case((*TILES, 3), 40, 150, Window(90)),
    Case((*TILES, 5), 40, 150, Window(20, 9), heads=(3, 3), batch=2),
    Case((*TILES, 3), 40, 150, sinks=True),
    Case((*TILES, 3), 40, 20),  # rows that see nothing
    Case((*TILES, 3), 20, 150, Full(), score=Softcap(2.0)),
    Case((*TILES, 3), 20, 150, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((*TILES, 3), 20, 150, Full(), score=Bias(torch.randn(2, 1, 150))),
    Case((*TILES, 3), 32, 150, drop=0.3),
    Case((*TILES, 3), lengths=((30, 0, 5, 20), (100, 9, 30, 20))),
    Case((*TILES, 4), lengths=((30, 1), (100, 60)), mask=Window(40), heads=(4, 2), sinks=True),
    Case((*TILES, 3), lengths=((30, 20, 8), (100, 90, 30)), used=((20, 19, 8), (99, 0, 20)), mask=Full()),
]
PAGES = [
    paged.Case((*TILES, 3), 16, (150, 0, 61), 20),
    paged.Case((*TILES, 3), 8, (150, 33), 20, Window(60), sinks=True),
    paged.Case((*TILES, 4), 3, (100, 33), 20, Full(), heads=(4, 2)),
]


def moved(x: Any, device: torch.device) -> Any:
    """The same on a device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    return type(x)(*(moved(part, device) for part in x)) if hasattr(x, "_fields") else tuple(moved(part, device) for part in x) if isinstance(x, tuple) else x


def launched(c, call: Call, device: torch.device):
    sizes = (
        packed_sizes(call.q, call.k, call.v, plain.both(c.lengths).shape[1], *plain.both(c.lengths).amax(1).tolist()) if c.packed else dense_sizes(*call[:3])
    )
    how = How(c.mask, chain(None, c.score, None), call.sinks, None, False, False, "triton_prefill")
    p, x = problem_of("prefill", how, sizes, plain.operands(c, call), call.q)
    q, k, v, x = moved((call.q, call.k, call.v, x), device)
    return moved(triton_prefill.launch(p, triton_prefill.Tiles(*c.tiles), q, k, v, x, True), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case, device):
    call = plain.call_of(case)
    plain.check(case, call, launched(case, call, device))


@pytest.mark.gpu
@pytest.mark.parametrize("returns", [True, False], ids=["LSE", "output alone"])
@pytest.mark.parametrize(("group", "pack", "dim"), [(1, 1, 64), (3, 4, 40), (4, 4, 128), (2, 1, 256), (1, 1, 8)])
def test_units_of_a_list(group, pack, dim, returns, device):
    """Tiles of one, two and five parts, of sequences that end within a tile; what no part has written may be anything, and other rows stay."""
    p = Attention("decode", 2, 70, 8192, 2 * group, 2, dim, BF16, Causal(), "paged", 16, tokens=110)
    m, heads = 64, 2 if pack > 1 else 2 * group
    words = [(1, 0, 5)] * 5 + [(0, 64 * pack // m - 1, 2)] * 2 + [(0, 1, 1), (-1, 0, 1)]
    first = [0] * 5 + [5] * 2 + [7, 8]
    units = torch.tensor([(b, at | (u - first[u]) << 20 | parts - 1 << 25) for u, (b, at, parts) in enumerate(words)], dtype=torch.int32)
    parts, logs = torch.randn(9 * heads * m, dim), torch.randn(9 * heads * m) * 3
    logs[torch.rand(len(logs)) < 0.3] = -torch.inf
    parts[logs == -torch.inf] = torch.nan
    x = Operands(1.0, torch.tensor([0, 70, 110], dtype=torch.int32), q_used=torch.tensor([70, 31], dtype=torch.int32))
    out, lse = torch.full((110, 2 * group, dim), 7.0, dtype=BF16), torch.full((2 * group, 110), 7.0) if returns else None
    ours = moved((out.clone(), lse if lse is None else lse.clone()), device)
    plain.join_units(p, (parts, logs), units, x, pack, out, lse)
    join_units(p, moved((parts, logs), device), moved(units, device), moved(x, device), pack, *ours)
    torch.testing.assert_close(ours[0].cpu(), out, rtol=2**-7, atol=1e-3)
    if returns:
        torch.testing.assert_close(ours[1].cpu(), lse)
    assert (out == 7).any() and (out != 7).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_parts_that_cancel(dtype, device):
    """A part's output is a hundred times the sum of all: rounded to half precision it would be the error."""
    case = Case((*TILES, 2), 40, 256, Full(), dtype=dtype)
    call = plain.call_of(case)
    call.v.copy_((8 - torch.arange(256) / 16)[:, None, None] + 0.1 * torch.randn(1, 256, 1, 64))
    plain.check(case, call, launched(case, call, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PAGES, ids=str)
def test_over_pages(case, device):
    q, cache, sinks = call = paged.call_of(case)
    how = How(case.mask, None, sinks, None, False, False, "triton_paged")
    p, x = problem_of("decode", how, paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1]), Operands(case.dim**-0.5), q)
    q, there, x = moved((q, cache, x), device)
    found = triton_prefill.launch_paged(p, triton_prefill.Tiles(*case.tiles), q, there, x, True)
    paged.judge(case, call, moved(found, torch.device("cpu")))


# ---- who gets how many

LONG = Attention("prefill", 1, 64, 131072, 32, 8, 128, BF16, Causal())


@pytest.mark.parametrize("name", ["A100", "H200", "MI300X"])
def test_few_queries_over_many_keys_fill_the_gpu(name):
    tiles = select(LONG, GPUS[name], "triton_prefill").config
    programs = LONG.heads * -(-LONG.len_q // tiles.m) * tiles.parts
    assert GPUS[name].sms // 2 < programs <= GPUS[name].sms and f"keys in {tiles.parts} parts" in str(tiles)


@pytest.mark.parametrize(
    "p",
    [
        LONG._replace(extras=("batch_invariant",)),
        LONG._replace(extras=("dropout",)),
        LONG._replace(len_q=0),
        LONG._replace(len_k=500),
        LONG._replace(len_q=8192),
        LONG._replace(mask=Window(100)),
        LONG._replace(mask=Document(torch.zeros(131072, dtype=torch.int64)).static()),
    ],
    ids=str,
)
def test_keys_stay_together(p):
    assert select(p, GPUS["A100"], "triton_prefill").config.parts == 1
