"""The latent decode kernel over a cache in e4m3: its sources in each timing of the emulator, with bugs planted, compiled; and, on a GPU, against float64."""

import re
from typing import NamedTuple

import pytest
import torch
from offline_attention import launched, meta
from test_hopper_mla import SOURCES, emulates, laid_out
from test_hopper_paged import NOWHERE, Strict

import onchip
from gluon_emulator import MODES, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal, Full, Mask, Window
from onchip.core.problem import Attention, Operands
from onchip.dispatch import select
from onchip.kernels.attention import LATENT, hopper_mla
from onchip.ops.attend import How, PagedKV
from onchip.ops.latent import attend_latent, dequantise_latent, latent_problem, quantise_latent

BF16 = torch.bfloat16
KERNEL = LATENT.kernel("hopper_mla_codes")


class Case(NamedTuple):
    """A call, and the shares of the keys that it is run with."""

    lengths: tuple[int, ...]
    shares: int = 2
    page: int = 64
    heads: int = 16
    len_q: int = 1
    mask: Mask = Causal()
    scale: float = 576**-0.5
    lse: bool = True
    apart: int = 0  # bytes between pages

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed)


def call_of(c: Case, device="cpu"):
    """Queries and a packed cache on shuffled pages, of tiles of 128 columns that differ in size. What nobody uses holds bytes of NaN."""
    pages, table, slots = laid_out(c.lengths, c.page)
    pool = torch.full((pages, c.page * 656 + c.apart), 255, dtype=torch.uint8)
    packed = pool[:, : c.page * 656].unflatten(1, (c.page, 1, 656))
    spread = torch.tensor([1.0, 0.25, 2.0, 0.5]).repeat_interleave(128)
    for n, own in zip(c.lengths, slots, strict=True):
        latent = torch.randn(n, 1, 576)
        latent[..., :512] *= spread
        packed[own // c.page, own % c.page] = quantise_latent(latent.to(BF16))
    q = torch.randn(len(slots), c.len_q, c.heads, 576).to(BF16)
    pool = pool.to(device)
    packed = pool[:, : c.page * 656].unflatten(1, (c.page, 1, 656))
    return q.to(device), PagedKV(packed, packed, table.to(device), torch.tensor(c.lengths, dtype=torch.int32, device=device))


def problem(c: Case, q, cache) -> tuple[Attention, Operands]:
    return latent_problem(q, cache, How(c.mask, None, None, None, False, False, KERNEL.name), c.scale)


def emulated(c: Case, call, mode: str, seed=0, edits=()):
    """Output of the kernel, and LSE if the case wants it."""
    q, cache = call
    p, x = problem(c, q, cache)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    kernel = Strict(mode, seed).load(*SOURCES, edits=[("MERGING, ALL = 1056, 2112", "MERGING, ALL = 9, 9"), *edits])  # fewer than blocks
    tiles = -(-c.len_q * c.heads // 64)
    result = kernel.launch(p, kernel.Grid(c.shares, tiles, tiles), q, cache, x, c.lse)
    return result if c.lse else (result,)


def judge(c: Case, call, result, lse_slack=2.0) -> None:
    """Output and LSE against float64 over what the bytes say, beside the reference in bfloat16."""
    q, (packed, _, table, lengths) = call
    table = torch.where(table == NOWHERE, 0, table)

    def reference(dtype):
        latent = dequantise_latent(packed).to(dtype)
        there = PagedKV(latent, latent[..., :512], table, lengths)
        return onchip.paged_attention(q.to(dtype), there, mask=c.mask, scale=c.scale, return_lse=True, kernel="reference")

    for ours, low, truth, slack in zip(result, reference(BF16), reference(torch.float64), (2.0, lse_slack), strict=False):
        assert_as_good_as_torch(ours, low, truth, slack)


# ---- as it is

UNEVEN = (300, 0, 1, 63, 64, 65, 127, 128, 129)
CASES = [
    Case((128,), 1),
    Case((385,), 3),  # one sequence, merged
    Case(UNEVEN, 1),
    Case(UNEVEN, 4, apart=48),
    Case((300, 129, 1), 9, lse=False),  # more shares than pairs
    Case((256, 250), 2, heads=128),  # whole sequences
    Case((300, 200), 2, page=1),
    Case((130, 260), 2, page=3, heads=40, len_q=3),
    Case((140, 5, 150), 2, page=128, len_q=10, heads=8, lse=False),
    Case((140, 3), 2, page=1000, len_q=3, mask=Full()),
    Case((200, 60), 2, scale=-0.03),
    Case(tuple(range(5, 180, 5)), 7, heads=3),  # more sequences than a warp has lanes
]


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(CASES, [CASES[1], CASES[3]]), ids=str)
def test_emulated(case, mode):
    call = call_of(case)
    judge(case, call, emulated(case, call, mode))


# ---- with bugs planted

ROOM = "            arrive_and_wait(used * 0, {}_GONE + ODD_ONE, C.{})\n"
TOLD = "    mbarrier.arrive(block[3].index(piece), count=1)\n"
PUT = "    if piece == 4:\n        block[2].index(0)"
MUTANTS = {
    "scales of other columns": ("(at + (SCALES_AT + piece))", "(at + (SCALES_AT + piece // 2))"),
    "codes of other columns": ("else piece * 32", "else piece // 2 * 64"),
    "one key too many": ("* of_slot) * UNIT, (at >= low * 128) & (at < length)", "* of_slot) * UNIT, (at >= low * 128) & (at <= length)"),
    "the page of another block": ("places = _places(more, n + 64,", "places = _places(later, n + 64,"),
    "pages looked up for the block before": ("more = _look(table, sequence, n - 64,", "more = _look(table, sequence, n,"),
    "the table read past the end": ("// C.page, mask=(at >= low * 128) & (at < length)", "// C.page, mask=at >= low * 128"),
    "a left half is overwritten": (ROOM.format("LEFT", "one_group"), "            pass\n"),
    "a right half is overwritten": (ROOM.format("RIGHT", "one_group"), "            pass\n"),
    "rope columns are overwritten": (ROOM.format("ROPE", "two_groups"), "            pass\n"),
    "told before it is there": (PUT, TOLD + PUT),
    "not fenced off": ("        if C.codes:\n            fence_async_shared()", "        if C.codes:\n            pass"),
    "a slot further": ("at % C.page * of_slot", "(at + 1) % C.page * of_slot"),
}  # fmt: skip
BESIDE = {  # what has to be changed too
    "told before it is there": [(f".store(numbers)\n{TOLD}", ".store(numbers)\n")],
    "one key too many": [("// C.page, mask=(at >= low * 128) & (at < length)", "// C.page, mask=(at >= low * 128) & (at <= length)")],
}


@emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name):
    """Seen in one of the emulator's timings at least."""
    c = Case((129, 300, 260, 400), 3, page=16, heads=8, len_q=8)
    call = call_of(c)
    edits = [MUTANTS[name], *BESIDE.get(name, ())]
    for mode in MODES:
        try:
            judge(c, call, emulated(c, call, mode, edits=edits))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not seen")


# ---- compiled


@pytest.mark.parametrize(("page", "len_q", "spills"), [(64, 1, 16), pytest.param(3, 2, 80, marks=pytest.mark.wide)], ids=str)
def test_compiled(page, len_q, spills):
    """All loops in registers, products as in half precision, 16 bytes a thread from memory and to shared memory, and no key by the copy engine."""
    q, packed = meta(32, len_q, 128, 576), meta(2048, page, 1, 656, dtype=torch.uint8)
    cache = PagedKV(packed, packed, meta(32, -(-4096 // page), dtype=torch.int32), meta(32, dtype=torch.int32))
    p, x = problem(Case((), page=page), q, cache)
    how, facts = launched(hopper_mla, "sm_90", p, q, cache, x)
    assert how.shares * how.tiles == 132
    facts = facts["_decode"]
    assert facts.spills <= spills
    assert facts.wgmma == 2 * (2 * 36 + 4 * 4)
    assert facts.tma_loads == 3
    assert not facts.serialized
    assert facts.vector_loads >= 4 * (10 + 2)  # of each piece of a pair, and of the first two
    assert len(re.findall(r"st\.shared\.v4\.b32", facts.ptx)) >= 8 * 8 + 2 * 4


# ---- elsewhere


def test_menu():
    c = Case((300, 20), heads=128)
    p, _ = problem(c, *call_of(c))
    chosen = select(p, GPUS["H200"])
    assert chosen.kernel is KERNEL and isinstance(chosen.config, hopper_mla.Grid) and chosen.kernel.load() is hopper_mla.launch
    decode = p._replace(op="decode")
    assert LATENT.cost(p).flops == LATENT.cost(decode).flops
    assert LATENT.cost(decode).bytes - LATENT.cost(p).bytes == 2 * (1152 - 656) * p.len_k
    for other in (p._replace(dtype=torch.float16), p._replace(mask=Causal("top_left")), p._replace(mask=Window(5))):
        copied = select(other, GPUS["H200"])
        assert copied.kernel.name == "bf16_of_latent" and KERNEL.refuses(other, GPUS["H200"])
        assert str(copied.config).startswith("keys in bf16 by ")
    assert str(select(p, GPUS["A100"]).config).startswith("keys in bf16 by triton_")
    with pytest.raises(Unsupported, match=r"hopper_mla_codes.*Full, Causal"):
        select(p._replace(mask=Window(5)), GPUS["H200"], KERNEL.name)


@pytest.mark.gpu
@pytest.mark.hopper
def test_copied_on_a_gpu(device):
    """Three times: the whole way, written down, repeated."""
    c = Case(UNEVEN, page=16, heads=128)
    q, cache = call = call_of(c, device)
    for _ in range(3):
        result = attend_latent(q, *cache[1:], return_lse=True, kernel="bf16_of_latent")
        judge(c, call, result, lse_slack=10.0)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("c", [*CASES, Case((4096,) * 4, heads=128), Case((8192,), heads=128)], ids=str)
def test_on_a_gpu(c, device):
    q, cache = call = call_of(c, device)
    for _ in range(3):  # the second call is written down, the third repeats it
        result = attend_latent(q, *cache[1:], mask=c.mask, scale=c.scale, return_lse=True, kernel=KERNEL.name)
        judge(c, call, result, lse_slack=10.0)  # tensor cores cut off, not round, what they add
