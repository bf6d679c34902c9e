"""The latent decode kernel on Hopper: its sources in each timing of the emulator, with bugs planted, compiled; and, on a GPU, against float64."""

import os
import re
from typing import NamedTuple

import pytest
import torch
from offline_attention import launched, meta
from test_hopper_paged import NOWHERE, Strict

import onchip
from gluon_emulator import MODES, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Mask
from onchip.core.problem import Attention, Operands
from onchip.dispatch import select
from onchip.kernels.attention import DECODE, hopper_mla
from onchip.ops.attend import How, PagedKV, paged_problem, paged_sizes

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("hopper_mla")
PARTS = (
    "curves",
    "attention.texts",
    "attention.mods",
    "attention.tile",
    "attention.decode_tiles",
    "hopper",
    "attention.gluon_shares",
    "attention.hopper_dropout",
    "attention.hopper_tiles",
    "attention.latent_merge",
    "attention.latent_copies",
    "attention.hopper_mla",
)
SOURCES = [f"onchip.kernels.{name}" for name in PARTS]
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
    at_once: int = 0  # tiles of rows of a launch; 0: all

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


def laid_out(lengths: tuple[int, ...], page: int) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Sequences on shuffled pages: how many pages there are, two of which are nobody's; their table, whose entries beyond a sequence name no page; the slots
    of each."""
    used = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(used) + 2, dtype=torch.int32)
    table, slots = torch.full((len(used), max(1, *used) + 1), NOWHERE, dtype=torch.int32), []
    for row, n, own in zip(table, lengths, order[: sum(used)].split(used), strict=True):
        row[: len(own)] = own
        slots.append((own[:, None].long() * page + torch.arange(page)).flatten()[:n])
    return len(order), table, slots


def call_of(c: Case, device="cpu"):
    """Queries and a latent cache on shuffled pages. What nobody uses holds NaN."""
    pages, table, slots = laid_out(c.lengths, c.page)
    latent = torch.full((pages, c.page, 1, 576), torch.nan, dtype=c.dtype)
    for n, own in zip(c.lengths, slots, strict=True):
        steep = 1 + c.steep * torch.arange(n).flip(0)[:, None, None]
        latent.flatten(0, 1)[own] = (torch.randn(n, 1, 576) * steep).to(c.dtype)
    q = torch.randn(len(slots), c.len_q, c.heads, 576).to(c.dtype)
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
    kernel = Strict(mode, seed).load(*SOURCES, edits=[("MERGING, ALL = 1056, 2112", "MERGING, ALL = 9, 9"), *edits])  # fewer than blocks
    tiles = -(-c.len_q * c.heads // 64)
    return kernel.launch(p, kernel.Grid(c.shares, tiles, c.at_once or tiles), q, cache, x, True)


def judge(c: Case, call, result, lse_slack=2.0) -> None:
    """Output and LSE against float64, beside the reference in the case's dtype."""
    q, cache = call
    cache = cache._replace(page_table=torch.where(cache.page_table == NOWHERE, 0, cache.page_table))

    def reference(dtype):
        latent = cache.k.to(dtype)
        there = cache._replace(k=latent, v=latent[..., :512])
        return onchip.paged_attention(q.to(dtype), there, mask=c.mask, scale=c.scale, return_lse=True, kernel="reference")

    for ours, low, truth, slack in zip(result, reference(c.dtype), reference(torch.float64), (2.0, lse_slack), strict=True):
        assert_as_good_as_torch(ours, low, truth, slack)


# ---- as it is

UNEVEN = (300, 0, 1, 129, 64)
CASES = [
    Case((128,), 1),
    Case((385,), 3),  # one sequence, merged
    Case(UNEVEN, 1),
    Case(UNEVEN, 3),
    Case(UNEVEN, 9),  # more shares than pairs
    Case((256, 250), 2, heads=128),  # whole sequences
    Case((700, 200), 2, page=8),
    Case((130, 260), 2, page=16, heads=40, len_q=2),
    Case((140, 5, 150), 2, page=128, len_q=10, heads=8),
    Case((140, 3), 2, page=1024, len_q=3, mask=Full()),
    Case((260, 100), 2, dtype=FP16),
    Case((900,), 2, steep=0.02),  # maxima that grow from block to block
    Case((200, 60), 2, scale=-0.03),
    Case((140, 70), 1, len_q=20, heads=15, at_once=2),  # 5 tiles of rows, the last one in part, in three launches
    Case(tuple(range(5, 180, 5)), 7, heads=3),  # more sequences than a warp has lanes
]


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(CASES, [CASES[1], CASES[3], CASES[6], CASES[11]]), ids=str)
def test_emulated(case, mode):
    call = call_of(case)
    judge(case, call, emulated(case, call, mode))


@emulates
@pytest.mark.parametrize("batch", [1, 33, 70])
def test_every_pair_is_one_share_s(batch):
    """Lengths of all kinds, of more sequences than are looked at at once."""
    c = Case(tuple(torch.randint(0, 200, (batch,)).tolist()), 5, page=16, heads=2)
    call = call_of(c)
    judge(c, call, emulated(c, call, MODES[0]))


# ---- with bugs planted

READY = "    arrive_and_wait(n * 0, ODD_READY, BOTH)\n"
DONE = "            acc = warpgroup_mma_wait(1, deps=[acc])\n"
GONE = "            release(used * 0, LEFT_GONE + 1, C.one_group)\n"
MUTANTS = {
    "keys are let go before their values are used": (READY, "    release(n * 0, LEFT_GONE, C.one_group)\n" + READY),
    "odd values are let go before": (DONE + GONE, GONE + DONE),
    "weights are not waited for": ("    arrive_and_wait(used * 0, EVEN_READY, BOTH)\n", ""),
    "weights are not fenced": ("    tops[0].store(top)\n    fence_async_shared()\n", "    tops[0].store(top)\n"),
    "the other's maximum is not heeded": ("    acc, total = _shrunk(acc, total, gl.exp2(top - base_of(new_top)))\n", ""),
    "sums of one warpgroup": ("    total += sums[1 - GROUP].load(row_layout)\n", ""),
    "queries are overwritten": ("        mbarrier.wait(q_empty, turn % 2 ^ 1)\n", "        mbarrier.wait(q_empty, turn % 2)\n"),
    "the last page's rest is not cleared": ("    _clear(values, n, length, C)\n", ""),
    "the wrong phase": ("mbarrier.wait(block[3].index(ORDER[i]), used % 2)", "mbarrier.wait(block[3].index(ORDER[i]), used % 2 ^ 1)"),
    "each query sees all": ("        least = length - (len_q - 1)\n", ""),
    "slots of two parts are one": ("-1, number + sequence)", "-1, sequence)"),
    "a program's first block alone": ("range(own, blocks, each)", "range(own, each, each)"),
    "no turns": ("            release(used * 0, TURN, BOTH)\n", ""),
}  # fmt: skip


@emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name):
    """Seen in one of the emulator's timings at least."""
    c = Case((400, 129, 300, 260), 3, page=16, heads=8, len_q=8, steep=0.05)
    call = call_of(c)
    for mode in MODES:
        try:
            judge(c, call, emulated(c, call, mode, edits=[MUTANTS[name]]))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not seen")


# ---- compiled


@pytest.mark.parametrize(
    ("page", "len_q", "spills"), [pytest.param(64, 1, 0, marks=pytest.mark.newest), pytest.param(16, 2, 192, marks=pytest.mark.wide)], ids=str
)
def test_compiled(page, len_q, spills):
    """The loop over pairs in registers; products of both warpgroups, once before the loop and once in it: 36 for scores, 12 for the output with its end."""
    q, latent = meta(32, len_q, 128, 576), meta(2048, page, 1, 576)
    cache = PagedKV(latent, latent[..., :512], meta(32, 4096 // page, dtype=torch.int32), meta(32, dtype=torch.int32))
    p, x = problem(Case((), page=page), q, cache)
    how, facts = launched(hopper_mla, "sm_90", p, q, cache, x)
    assert how.shares * how.tiles == 132
    assert facts["_merge"].spills <= 8
    facts = facts["_decode"]
    assert facts.spills <= spills
    assert facts.wgmma == 2 * (2 * 36 + 4 * 4)
    assert facts.tma_loads == 9 + 2 * 9 * max(1, 64 // page)
    assert not facts.serialized
    before = re.findall(r"bar\.sync[^\n]*\n(?:(?!bar\.sync|wgmma)[^\n]*\n)*?[^\n]*stmatrix", facts.ptx)
    assert len(before) == 4, "weights are written over keys that another warp's product may be reading"


# ---- elsewhere


@pytest.mark.parametrize("kernel", ["blocked", "reference"])
@pytest.mark.parametrize("c", [Case((300, 0, 65), page=16, heads=128), Case((40, 9), page=1, heads=3, len_q=4, dtype=FP16)], ids=str)
def test_on_a_cpu(c, kernel):
    q, cache = call = call_of(c)
    judge(c, call, onchip.paged_attention(q, cache, mask=c.mask, scale=c.scale, return_lse=True, kernel=kernel), lse_slack=200.0)  # torch's own is good to 3e-5


def test_latent_problem():
    """That values are columns of the keys is seen, and counted: a key is read once."""
    c = Case((300, 20), heads=128)
    q, cache = call_of(c)
    p, _ = problem(c, q, cache)
    apart, _ = problem(c, q, cache._replace(v=cache.v.clone()))
    assert "latent" in p.extras and "latent" not in apart.extras
    assert DECODE.cost(apart).bytes - DECODE.cost(p).bytes == 2 * 512 * 2 * p.len_k
    assert select(p, GPUS["H200"]).kernel.name == "hopper_mla"
    assert select(p, GPUS["H200"]).kernel.load() is hopper_mla.launch
    assert any("memory of their own" in why for why in KERNEL.refuses(apart, GPUS["H200"]))
    for other in (p._replace(mask=Causal("top_left")), p._replace(page=4), p._replace(dtype=torch.float32), p._replace(extras=("latent", "sinks"))):
        assert KERNEL.refuses(other, GPUS["H200"])


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("c", [*CASES, Case((4096,) * 4, heads=128), Case((8192,), heads=128)], ids=str)
def test_on_a_gpu(c, device):
    q, cache = call = call_of(c, device)
    result = onchip.paged_attention(q, cache, mask=c.mask, scale=c.scale, return_lse=True, kernel=KERNEL.name)
    judge(c, call, result, lse_slack=10.0)  # tensor cores cut off, not round, what they add: 3.7e-5 of an LSE of 62


def test_prefill_of_192_and_128():
    """The other half of MLA, where heads have keys of their own: the Hopper kernel's."""
    p = Attention("prefill", 2, 4096, 4096, 128, 128, 192, BF16, Causal(), dim_v=128)
    assert select(p, GPUS["H200"]).kernel.name == "hopper_prefill"
