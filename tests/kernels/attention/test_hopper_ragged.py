"""Packed queries over a paged cache on Hopper: the kernel's sources in each timing of the emulator, with bugs planted, and on a GPU under a CUDA graph."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from test_hopper_emulated import EACH, FEW, prepared
from test_hopper_paged import BF16, FP16, KERNEL, NOWHERE, Strict, call_of, emulates
from test_hopper_paged import Case as Paged

import onchip
from gluon_emulator import MODES, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Chunked, Document, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scores import ALiBi, Bias, Softcap, chain
from onchip.dispatch import select
from onchip.kernels.attention import hopper_prefill
from onchip.ops.attend import How, paged_sizes, problem_of

MIXED = ((1, 130), (70, 70), (0, 40), (1, 1), (20, 15), (130, 200), (3, 90))  # (queries, keys): decodes, a prefill, nothing, more queries than keys, chunks


class Case(NamedTuple):
    """A call and the tiles it is run with."""

    tiles: tuple[int, ...]  # groups, keys a tile, stages, programs; heads side by side, parts of the keys
    sequences: tuple[tuple[int, int], ...] = MIXED
    page: int = 16
    mask: Any = Causal()
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 1)
    sinks: bool = False
    score: Any = None
    alone: bool = False  # batch_invariant
    room: int = 0  # tokens behind the last sequence

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


class Call(NamedTuple):
    q: torch.Tensor
    q_offsets: torch.Tensor
    cache: Any
    sinks: torch.Tensor | None


def ragged(c: Case) -> Call:
    """What nobody uses holds NaN, the tokens behind the last sequence too."""
    counts, lengths = zip(*c.sequences, strict=True)
    whole = Paged(c.tiles[:4], c.page, lengths, 0, Causal(), c.dim, c.dim_v, c.dtype, c.heads, sinks=c.sinks)
    _, cache, sinks = call_of(whole)
    if isinstance(c.mask, Window):
        for row, n, queries in zip(cache.page_table, lengths, counts, strict=True):
            row[: max(0, n - max(1, queries) - c.mask.left) // c.page] = NOWHERE
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.full((sum(counts) + c.room, c.heads[0], c.dim), torch.nan, dtype=c.dtype)
    q[: sum(counts)] = torch.randn(sum(counts), c.heads[0], c.dim).to(c.dtype)
    return Call(q, offsets, cache, sinks)


def emulated(c: Case, call: Call, mode: str, seed=0, edits=()):
    """Output and LSE of the kernel, of the tokens that there are."""
    kernel = prepared(Strict(mode, seed), edits)
    how = How(c.mask, chain(None, c.score, None), call.sinks, None, False, c.alone, KERNEL.name)
    sizes = paged_sizes(call.q, call.cache.k, call.cache.v, call.cache.page_table.shape[1], (len(c.sequences), max(n for n, _ in c.sequences)))
    p, x = problem_of("decode", how, sizes, Operands(c.dim**-0.5, call.q_offsets), call.q)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    out, lse = kernel.launch_paged(p, kernel.Tiles(*c.tiles), call.q, call.cache, x, True)
    return out[: call.q_offsets[-1]], lse[:, : call.q_offsets[-1]]


def judge(c: Case, call: Call, result) -> None:
    """Against float64, beside the reference in the case's dtype."""
    q = call.q[: call.q_offsets[-1]]
    cache = call.cache._replace(page_table=torch.where(call.cache.page_table == NOWHERE, 0, call.cache.page_table))  # which looks up what a window hides

    def reference(dtype):
        there = cache._replace(k=cache.k.to(dtype), v=cache.v.to(dtype))
        how = {"mask": c.mask, "score": c.score, "sinks": call.sinks, "return_lse": True, "kernel": "reference"}
        return onchip.paged_attention(q.to(dtype), there, q_offsets=call.q_offsets, **how)

    for ours, low, truth in zip(result, reference(c.dtype), reference(torch.float64), strict=True):
        capped = (truth + c.score.cap * 2**-11,) if isinstance(c.score, Softcap) and q.is_cuda else ()  # the hardware's tanh, see test_random.py
        assert_as_good_as_torch(ours, (low, *capped), truth)


# ---- as it is

CASES = [
    *(Case((groups, 64, 2, EACH), page=page) for groups in (1, 2) for page in (8, 64, 128)),
    Case((2, 64, 2, FEW), heads=(4, 2)),
    Case((2, 64, 2, FEW, 2)),
    Case((2, 64, 2, EACH, 4), heads=(4, 1)),
    Case((2, 64, 3, FEW, 4), heads=(6, 2), sinks=True),
    Case((2, 128, 2, FEW), mask=Full(), dim=128, dtype=FP16),
    Case((2, 64, 2, FEW), mask=Window(50)),
    Case((2, 64, 2, EACH, 2), mask=Window(30, 10)),
    Case((2, 64, 2, EACH), mask=Causal("top_left")),
    Case((2, 64, 2, EACH), ((1, 40), (0, 9), (130, 130)), dim=256, heads=(1, 1)),
    Case((2, 64, 2, FEW), dim_v=128, sinks=True, room=70),
    Case((2, 64, 2, EACH), alone=True, room=200),
    Case((2, 64, 2, FEW), score=Softcap(2.0)),
    Case((2, 64, 2, FEW, 2), score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((2, 64, 2, EACH), score=Bias(torch.randn(7, 2, 130, 208).to(BF16))),
    Case((2, 64, 2, EACH), mask=Chunked(40)),
    Case((2, 64, 2, FEW), mask=Causal() & Document(torch.arange(256) // 60)),
    Case((2, 64, 2, FEW, 2), page=1),
    Case((2, 64, 2, FEW), page=4, mask=Window(50)),
    Case((1, 64, 2, EACH), page=24, heads=(4, 2)),
]


@emulates
@pytest.mark.parametrize(("c", "mode"), timings(CASES, [CASES[0], *CASES[4:10]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(c, mode):
    call = ragged(c)
    judge(c, call, emulated(c, call, mode))


# ---- with a bug


class Bug(NamedTuple):
    """What is wrong, a case in which it shows, and how the sources differ: (text, what stands there instead)."""

    what: str
    case: Case
    edits: tuple[tuple[str, str], ...]


FIRST, TWO, PACKED = CASES[0], CASES[3], CASES[7]
TURNS = "        take_turn(GROUP, C.groups)\n        turn_over(GROUP, C.groups)\n        release"
CURSORS = "    return ki, kp, vi, vp\n\n\n@gluon.jit\ndef among"
PASS_OVER = "        release(ki, 10, C.readers)\n        if t_ring is not None:\n            mbarrier"
BUGS = [
    Bug("queries of all sequences begin at the first token", FIRST, (("queries_at(q_batch, head, start_q + ", "queries_at(q_batch, head, "),)),
    Bug("outputs of all sequences begin at the first token", FIRST, (("output_at(start_q + rows,", "output_at(rows,"),)),
    Bug("LSE of all sequences begins at the first token", FIRST, (("lse_at(b, head, start_q + rows,", "lse_at(b, head, rows,"),)),
    Bug("rows behind a sequence are stored", FIRST, (("load(layout), mask=(rows < len_q)", "load(layout), mask=(rows >= 0)"),)),
    Bug("rows that a warpgroup has are passed over", TWO, (("GROUP * C.own < len_q", "GROUP * C.own + C.own <= len_q"),)),
    Bug("a warpgroup without rows keeps the keys", TWO, ((PASS_OVER, PASS_OVER.replace("        release(ki, 10, C.readers)\n", "")),)),
    Bug("a warpgroup without rows takes no turns", TWO, ((TURNS, "        release"),)),
    Bug("a warpgroup without rows keeps its queries", Case((2, 64, 2, FEW), dim=128), (
        ("C, GROUP)\n            mbarrier.arrive(q_empty.index(mine), count=1)\n        turn", "C, GROUP)\n        turn"),
    )),
    Bug("the cursors stay where they were", Case((2, 64, 2, FEW)), ((CURSORS, CURSORS.replace("ki, kp, vi, vp", "cursors")),)),
    Bug("a packed tile holds as many queries as rows", PACKED, (("sequence_tiles(p, x, shape.m,", "sequence_tiles(p, x, 64 * tiles.groups,"),)),
]  # fmt: skip


@emulates
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    call = ragged(bug.case)
    for mode in MODES:
        try:
            judge(bug.case, call, emulated(bug.case, call, mode, edits=bug.edits))
        except (Fault, AssertionError, IndexError):
            return
    pytest.fail(f"nobody noticed that {bug.what}")


# ---- which tiles


def test_tiles_of_a_mixed_batch():
    """A group's heads are folded where that saves tiles; of one that does not depend on its neighbours, by the group alone."""
    h200 = GPUS["H200"]
    p = Attention("decode", 64, 512, 8192, 32, 8, 128, BF16, Causal(), "paged", 16, tokens=60 + 4 * 512)
    assert hopper_prefill.configs(p, h200)[0][:3] + hopper_prefill.configs(p, h200)[0][4:] == (2, 128, 2, 4, 1)
    assert hopper_prefill.configs(p._replace(batch=8, tokens=8 * 512), h200)[0].pack == 1
    few = p._replace(batch=2, len_q=99, tokens=100)
    assert hopper_prefill.configs(few, h200)[0].parts == 0 and hopper_prefill.configs(few._replace(len_k=1024), h200)[0][:1] == (
        1,
    )  # of few keys smaller tiles
    found = {
        hopper_prefill.configs(p._replace(batch=batch, len_q=longest, tokens=tokens, extras=("batch_invariant",)), h200)[0]
        for batch, longest, tokens in ((1, 1, 1), (64, 512, 700), (2, 9000, 9001), (8, 512, 4096))
    }
    assert len(found) == 1 and found.pop().pack == 4
    assert hopper_prefill.configs(p._replace(heads=24, extras=("batch_invariant",)), h200)[0].pack == 1  # three of four places would be filled


# ---- on a GPU

ON_GPU = [pytest.mark.gpu, pytest.mark.hopper]
LARGE = ((1, 700), (300, 1031), (0, 64), (129, 129), (1, 1), (64, 900), (17, 16), (2, 0))


def on_gpu(c: Case, device) -> Call:
    return Call(*(t if t is None else type(t)(*(x.to(device) for x in t)) if isinstance(t, tuple) else t.to(device) for t in ragged(c)))


def launched(c: Case, call: Call, **how):
    there = call.q_offsets[-1]
    out, lse = onchip.paged_attention(
        call.q, call.cache, q_offsets=call.q_offsets, mask=c.mask, score=c.score, sinks=call.sinks, return_lse=True, kernel=KERNEL.name, **how
    )
    return out[:there], lse[:, :there]


GPU_CASES = [
    *(Case((), LARGE, page, mask, 128, heads=(8, 2)) for page in (8, 16, 64, 256) for mask in (Full(), Causal(), Window(90))),
    *(Case((), LARGE, 16, dim=dim, dtype=dtype, heads=heads) for dim in (8, 64, 96, 256) for dtype in (BF16, FP16) for heads in ((2, 2), (6, 2))),
    Case((), LARGE, mask=Window(60, 40), sinks=True, heads=(4, 1), dim=128, room=300),
    Case((), LARGE, mask=Chunked(100), heads=(4, 1), dim=128),
    Case((), LARGE, score=Softcap(2.0), heads=(4, 1), dim=128, dim_v=64),
]


@pytest.mark.parametrize("c", [pytest.param(c, marks=ON_GPU, id=str(c)) for c in GPU_CASES])
def test_on_a_gpu(c, device):
    call = on_gpu(c, device)
    judge(c, call, launched(c, call))


@pytest.mark.parametrize("c", [pytest.param(Case((), LARGE, dim=128, heads=(8, 2), room=600), marks=ON_GPU)], ids=str)
def test_offsets_and_lengths_change_under_a_graph(c, device):
    """A captured call is right for other numbers of queries, other lengths and another order of pages, as far as its sizes go."""
    call = on_gpu(c, device)
    sizes = paged_sizes(call.q, call.cache.k, call.cache.v, call.cache.page_table.shape[1], (len(c.sequences), 300))
    p, x = problem_of("decode", How(c.mask, None, None, None, False, False, KERNEL.name), sizes, Operands(c.dim**-0.5, call.q_offsets), call.q)
    launch = select(p, device, KERNEL.name).launch
    call.q.nan_to_num_(0.5)
    launch(call.q, call.cache, x, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch(call.q, call.cache, x, True)
    for turned in (0, 1, 3):  # offsets and lengths of the sequences in another order
        counts, lengths = zip(*(LARGE[turned:] + LARGE[:turned]), strict=True)
        call.q_offsets.copy_(torch.tensor([0, *counts]).cumsum(0))
        call.cache.page_table.copy_(call.cache.page_table.roll(-turned, 0))
        call.cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        judge(c, call, (out[: sum(counts)], lse[:, : sum(counts)]))
        call.cache.page_table.copy_(call.cache.page_table.roll(turned, 0))


@pytest.mark.parametrize("c", [pytest.param(Case((), LARGE, dim=128, heads=(8, 2)), marks=ON_GPU)], ids=str)
def test_batch_invariant_bits_do_not_depend_on_the_batch(c, device):
    call = on_gpu(c, device)
    together = launched(c, call, batch_invariant=True)
    bounds = call.q_offsets.tolist()
    for b, (start, stop) in enumerate(pairwise(bounds)):
        cache = call.cache._replace(page_table=call.cache.page_table[b : b + 1], lengths=call.cache.lengths[b : b + 1])
        alone = launched(c, Call(call.q[start:stop], call.q_offsets[b : b + 2] - start, cache, None), batch_invariant=True)
        assert torch.equal(alone[0], together[0][start:stop]) and torch.equal(alone[1], together[1][:, start:stop])
