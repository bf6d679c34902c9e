"""The latent decode kernel on Hopper: its sources in each timing of the emulator, with bugs planted, compiled; and, on a GPU, against float64."""

import os
from typing import NamedTuple

import pytest
import torch
from test_attention_compile import launched, meta
from test_hopper_paged import NOWHERE, Strict

import onchip
from gluon_emulator import MODES, Fault
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Mask
from onchip.core.problem import Attention, Operands
from onchip.dispatch import select
from onchip.kernels.attention import DECODE
from onchip.ops.attend import How, PagedKV, paged_problem, paged_sizes

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("hopper_mla")
SOURCES = [f"onchip.kernels.{name}" for name in ("attention.texts", "attention.mods", "attention.tile", "hopper", "attention.hopper_tiles", "attention.hopper_mla")]
emulates = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call, and the shares of the keys that it is run with."""

    lengths: tuple[int, ...]
    shares: int = 2
    page: int = 64
    heads: int = 16
    len_q: int = 1
    mask: Mask = Causal()
    dtype: torch.dtype = BF16
    scale: float = 576**-0.5
    steep: float = 0.0  # how much larger scores of early keys are

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


def call_of(c: Case, device="cpu"):
    """Queries and a latent cache on shuffled pages. What nobody uses holds NaN, entries of the table beyond a sequence name no page."""
    used = [-(-n // c.page) for n in c.lengths]
    order = torch.randperm(sum(used) + 2, dtype=torch.int32)
    latent = torch.full((len(order), c.page, 1, 576), torch.nan, dtype=c.dtype)
    table = torch.full((len(used), max(1, *used) + 1), NOWHERE, dtype=torch.int32)
    for row, n, own in zip(table, c.lengths, order[: sum(used)].split(used), strict=True):
        slots = (own[:, None].long() * c.page + torch.arange(c.page)).flatten()[:n]
        steep = 1 + c.steep * torch.arange(n).flip(0)[:, None, None]
        latent.flatten(0, 1)[slots] = (torch.randn(n, 1, 576) * steep).to(c.dtype)
        row[: len(own)] = own
    q = torch.randn(len(used), c.len_q, c.heads, 576).to(c.dtype)
    latent = latent.to(device)
    return q.to(device), PagedKV(latent, latent[..., :512], table.to(device), torch.tensor(c.lengths, dtype=torch.int32, device=device))


def problem(c: Case, q, cache) -> tuple[Attention, Operands]:
    how = How(c.mask, None, None, None, False, False, KERNEL.name)
    return paged_problem(how, paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1]), q, cache.k, cache.v, Operands(c.scale))


def emulated(c: Case, call, mode: str, seed=0, edits=()):
    """Output and LSE of the kernel."""
    q, cache = call
    p, x = problem(c, q, cache)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    kernel = Strict(mode, seed).load(*SOURCES, edits=edits)
    return kernel.launch(p, kernel.Grid(c.shares, -(-c.len_q * c.heads // 64)), q, cache, x, True)


def judge(c: Case, call, result) -> None:
    """Output and LSE against float64, beside the reference in the case's dtype."""
    q, cache = call
    cache = cache._replace(page_table=torch.where(cache.page_table == NOWHERE, 0, cache.page_table))

    def reference(dtype):
        latent = cache.k.to(dtype)
        there = cache._replace(k=latent, v=latent[..., :512])
        return onchip.paged_attention(q.to(dtype), there, mask=c.mask, scale=c.scale, return_lse=True, kernel="reference")

    for ours, low, truth in zip(result, reference(c.dtype), reference(torch.float64), strict=True):
        assert_as_good_as_torch(ours, low, truth)


# ---- as it is

UNEVEN = (300, 0, 1, 129, 64)
CASES = [
    Case((128,), 1),
    Case((385,), 3),  # one sequence, merged
    Case(UNEVEN, 1),
    Case(UNEVEN, 3),
    Case(UNEVEN, 9),  # more shares than pairs
    Case((256, 256, 256), 3, heads=128),  # whole sequences
    Case((700, 200), 2, page=8),
    Case((130, 260), 2, page=16, heads=40, len_q=2),
    Case((140, 5, 270), 2, page=128, len_q=16),
    Case((140, 3), 2, page=1024, len_q=3, mask=Full()),
    Case((260, 100), 2, dtype=FP16),
    Case((900,), 2, steep=0.02),  # maxima that grow from block to block
    Case((200, 60), 2, scale=-0.03),
    Case(tuple(range(10, 360, 10)), 7, heads=3),  # more sequences than a warp has lanes
]


@emulates
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case, mode):
    call = call_of(case)
    judge(case, call, emulated(case, call, mode))
