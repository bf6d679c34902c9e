"""A few queries over a paged cache on Hopper: the kernel's sources in each timing of the emulator, and with bugs planted; and, on a GPU, against float64."""

import itertools
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from test_decode import case, check, paged, queries
from test_hopper_paged import Bug, Strict, call_of, judge

import onchip
from gluon_emulator import MODES, Fault, timings
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Beside, Operands
from onchip.core.scores import ALiBi, Softcap, chain
from onchip.dispatch import select
from onchip.kernels.attention import DECODE, gluon_merge
from onchip.kernels.attention.decode_merge import at_once
from onchip.ops.attend import How, paged_sizes, problem_of

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("hopper_decode")
PARTS = (
    "curves",
    "attention.texts",
    "attention.mods",
    "attention.tile",
    "hopper",
    "attention.hopper_dropout",
    "attention.hopper_tiles",
    "attention.decode_tiles",
    "attention.gluon_merge",
    "attention.gluon_shares",
    "attention.hopper_decode",
)
SOURCES = [f"onchip.kernels.{name}" for name in PARTS]
emulates = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call and the tiles it is run with; `counts`: of packed queries, how many each sequence has (`len_q` is the most)."""

    tiles: tuple[int, int, int, int]  # keys a tile, stages, rounds, programs
    page: int
    lengths: tuple[int, ...]
    len_q: int = 1
    mask: Any = Causal()
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 1)
    spare: int = 1  # columns of the page table beyond the longest sequence
    sinks: bool = False
    score: Any = None
    item: int = 0  # keys that a program takes whole, of a batch_invariant problem
    scale: float = 0.0
    at_once: int = 256  # sequences that a program looks at at once

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


def starts_of(total, longest, programs):
    """Where shares begin, and the last ends: as many items for all, or a little more where that cuts no unit, or each one evenly."""
    each = max(1, -(-total // programs))
    even = (-(-3 * longest // 2) if 2 * each <= 3 * longest else 2 * longest) if longest < each else -(-longest // (longest // each))
    if each <= even <= each * 17 // 16:
        return [min(p * even, total) for p in range(programs + 1)]
    return [p * (total // programs) + min(p, total % programs) for p in range(programs + 1)]


class Merge:
    """`decode_merge.merge` in plain torch, which finds the parts of each unit from the list of all key tiles."""

    def __getitem__(self, _grid):
        return self

    def __call__(self, out, lse, sinks, part, part_lse, lengths, offsets, batch, kv_heads, group, len_q, programs, _units, *, DV, BLOCK_N, ITEM, BAND, **_):
        left, right, top_left = BAND
        bounds = [b * len_q for b in range(batch + 1)] if offsets is None else offsets.tolist()
        spans = []  # of each unit: sequence, key head, first item, behind the last
        for b, n in enumerate(lengths.tolist()):
            queries = bounds[b + 1] - bounds[b]
            shift = 0 if top_left else n - queries
            start = max(0, shift - left) // BLOCK_N * BLOCK_N if left >= 0 else 0
            end = min(n, max(0, queries + right)) if top_left and right >= 0 else n
            for head in range(kv_heads if queries else 0):
                first = spans[-1][3] if spans else 0
                spans.append((b, head, first, first + max(1, -(-(end - start) // ITEM))))
        total = spans[-1][3] if spans else 0
        starts = starts_of(total, max((last - first for *_, first, last in spans), default=1), programs)
        for b, head, first, last in spans:
            if ITEM != BLOCK_N:
                places = list(range(first, last))
            else:
                places = [2 * p + (s < first) for p, (s, e) in enumerate(itertools.pairwise(starts)) if max(s, first) < min(e, last)]
                places = [2 * (place // 2) + (first > starts[place // 2]) for place in places]
            if len(places) == 1:
                continue
            queries = bounds[b + 1] - bounds[b]
            rows, heads = slice(0, queries * group), slice(head * group, (head + 1) * group)
            logs, values = part_lse[places, rows], part[places, rows, :DV]
            if sinks is not None:
                logs = torch.cat([logs, (sinks[heads].float() * 1.4426950408889634).repeat(queries)[None]])
                values = torch.cat([values, torch.zeros_like(values[:1])])
            whole = torch.logsumexp(logs * 0.6931471805599453, 0)
            weights = (logs * 0.6931471805599453 - torch.where(whole.isneginf(), 0.0, whole)).exp()
            result = (weights[..., None] * values).sum(0).view(queries, group, DV)
            to, to_lse = out[0], lse[0]
            if offsets is None:
                to, to_lse = to[b], to_lse[b]
                place = slice(0, queries)
            else:
                place = slice(bounds[b], bounds[b + 1])
            to[place, heads] = result.to(to.dtype)
            to_lse[heads, place] = whole.view(queries, group).T


class Poisoned:
    """torch, whose new memory holds NaN."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, **how):
        return torch.empty(*shape, **how).fill_(torch.nan)


def emulated(c: Case, call, mode: str, seed=0, edits=(), apart=False, beside=None):
    """Output and LSE of the kernel; a call is queries, cache and sinks, or of packed queries, their offsets. apart: parts are merged by a second launch."""
    q, cache, third = call
    packed = q.dim() == 3
    sinks, offsets = (None, third) if packed else (third, None)
    emulator = Strict(mode, seed)
    stand_ins = emulator.stand_ins
    merge = SimpleNamespace(merge=Merge(), LISTED=1024, SHARE=512, at_once=at_once)
    emulator.stand_ins = lambda: stand_ins() | {"onchip.kernels.attention.decode_merge": merge}
    kernel = emulator.load(*SOURCES, edits=edits)
    kernel.AT_ONCE, kernel.torch = c.at_once, Poisoned()
    kernel.outputs.__globals__["torch"] = kernel.torch
    how = How(c.mask, chain(None, c.score, None), sinks, None, False, c.item > 0, KERNEL.name)
    like = q.new_empty(len(cache.lengths), c.len_q, *q.shape[-2:])
    p, x = problem_of("decode", how, paged_sizes(like, cache.k, cache.v, cache.page_table.shape[1]), Operands(c.scale or c.dim**-0.5, offsets), q)
    p = p._replace(tokens=len(q) * packed)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    arrivals = torch.zeros(1024, dtype=torch.int32)
    kernel.arrivals_of = lambda *_: (None if apart else arrivals, False)
    result = kernel.launch(p, kernel.Tiles(*c.tiles, c.item or c.tiles[0]), q, cache, x._replace(beside=beside), True)
    assert not arrivals.any()
    return result


# ---- as it is

UNEVEN = (200, 0, 61, 131)
SMALL = Case((64, 2, 2, 4), 8, UNEVEN, heads=(4, 2))
LARGE = SMALL._replace(page=256)
LONG = Case((64, 2, 2, 1), 8, (700, 30), spare=0)
SHORT = Case((64, 4, 2, 2), 16, (5, 9, 70, 3, 66, 12, 1, 20), heads=(4, 2))
WINDOW = Case((64, 2, 2, 5), 16, (420, 90, 33, 50), 16, Window(150), heads=(4, 2))  # sight begins on both sides of a tile's end
SINKS = Case((64, 2, 2, 5), 16, (150, 0, 20), 3, sinks=True)
LISTED = Case((64, 2, 2, 6), 16, (*UNEVEN * 9, 70), at_once=32)
CASES = [
    *(Case((n, 2, 2, 5), page, UNEVEN, heads=(4, 2)) for n in (32, 64, 128) for page in (8, 16, 64, 256)),
    *(Case((64, 3, 2, programs), 16, (1, 15, 16, 17, 0, 300), heads=(8, 2)) for programs in (1, 2, 7, 40)),
    Case((64, 4, 1, 3), 16, (90, 5, 400), 3, heads=(6, 2)),
    Case((64, 2, 2, 4), 16, (90, 5, 400), 16, heads=(4, 1)),
    Case((32, 5, 2, 4), 16, (90, 5, 200), 2, dim=256, heads=(2, 1)),
    Case((64, 2, 2, 4), 64, (90, 5, 200), 2, dim=128, dim_v=64, heads=(4, 2), dtype=FP16),
    Case((64, 2, 2, 4), 16, (90, 200), dim=40, heads=(3, 3)),
    Case((64, 2, 2, 5), 16, (300, 20, 170), 5, Full(), heads=(4, 2)),
    Case((64, 2, 2, 5), 16, (400, 90, 33, 50), 4, Window(50), heads=(4, 2)),
    Case((64, 2, 2, 5), 128, (400, 90, 33), 9, Window(50, 2), heads=(4, 2)),
    Case((64, 2, 2, 3), 16, (150, 90), 7, Causal("top_left")),
    Case((64, 2, 2, 3), 16, (150, 90), 7, Window(2, 90, "top_left")),
    Case((64, 2, 2, 5), 16, (290, 30), score=Softcap(2.0)),
    Case((64, 2, 2, 5), 128, (290, 30), 2, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((64, 2, 2, 5), 16, (290, 30), scale=-0.2),
    Case((64, 2, 2, 2), 16, (0, 0), spare=0, sinks=True),
    *(LONG, SHORT, WINDOW, SINKS, LISTED),
    Case((64, 2, 2, 5), 16, (290, 30, 0, 64), 2, heads=(4, 2), item=128, sinks=True),
]


@emulates
@pytest.mark.parametrize(("c", "mode"), timings(CASES, [*CASES[:4], CASES[13], *CASES[-6:-1]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(c, mode):
    call = call_of(c)
    judge(c, call, emulated(c, call, mode))


@emulates
def test_heads_before_slots():
    """A pool [pages, kv_heads, page, dim], as a view."""
    q, cache, _ = call = call_of(SMALL)
    turned = cache._replace(**{name: getattr(cache, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "kv"})
    for ours, theirs in zip(emulated(SMALL, (q, turned, None), "slow loads"), emulated(SMALL, call, "slow loads"), strict=True):
        assert torch.equal(ours, theirs)


@emulates
def test_parts_merged_apart():
    """By a launch of its own where a program may not: the same numbers but for the order of additions."""
    call = call_of(SMALL)
    judge(SMALL, call, emulated(SMALL, call, "slow loads", apart=True))


@emulates
def test_beside_another_launch():
    """With fewer programs, and without a wait before the end."""
    c = SMALL._replace(tiles=(64, 2, 2, 9))
    call = call_of(c)
    for ours, theirs in zip(emulated(c, call, "slow loads", beside=Beside(2, True)), emulated(SMALL, call, "slow loads"), strict=True):
        assert torch.equal(ours, theirs)


@emulates
def test_packed_queries():
    """Counts that differ, none at all included; tokens behind the last are left alone."""
    counts, lengths, c = (1, 0, 3, 2), (200, 70, 33, 2), Case((64, 2, 2, 5), 16, (200, 70, 33, 2), 3, heads=(4, 2))
    q, cache, _ = call_of(c)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = torch.cat([row[-n:] if n else row[:0] for row, n in zip(q, counts, strict=True)] + [torch.full_like(q[0, :2], torch.nan)])
    for mode in MODES:
        out, lse = emulated(c, (tokens, cache, offsets), mode)
        assert out.shape == tokens.shape and lse.shape == (4, len(tokens))
        assert out[offsets[-1] :].isnan().all() and lse[:, offsets[-1] :].isnan().all()
        for b, (n, keys) in enumerate(zip(counts, lengths, strict=True)):
            if n:
                own = (q[b : b + 1, -n:], cache._replace(page_table=cache.page_table[b : b + 1], lengths=cache.lengths[b : b + 1]), None)
                here = slice(offsets[b], offsets[b + 1])
                judge(c._replace(len_q=n, lengths=(keys,)), own, (out[None, here], lse[None, :, here]))


@emulates
@pytest.mark.parametrize("mode", MODES)
def test_items_of_a_batch_invariant_problem_do_not_depend_on_the_batch(mode):
    c = Case((64, 2, 2, 5), 16, (290, 30, 200), 2, heads=(4, 2), item=128)
    q, cache, _ = call_of(c)
    together = emulated(c, (q, cache, None), mode)
    for b in range(3):
        one = slice(b, b + 1)
        alone = emulated(c, (q[one], cache._replace(page_table=cache.page_table[one], lengths=cache.lengths[one]), None), mode)
        assert all(torch.equal(ours[0], theirs[b]) for ours, theirs in zip(alone, together, strict=True))


# ---- with a bug

ADD = "        acc, total = shrunk(acc, total, shrink, C)\n        total = total + sums"
DONE = "        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])\n"
FREE = "        mbarrier.arrive(v_empty.index(vi), count=1)\n"
MINE = "        mbarrier.arrive(q_empty.index(mine), count=1)\n"
ARRIVED = 'scope="gpu") == count - 1:'
MANY, TALL = LONG._replace(tiles=(32, 2, 2, 40), dim=256), Case((64, 2, 2, 5), 16, (290, 30), 9, heads=(4, 2))
SEQUENCE = "sequence_of(lengths, offsets, b, b < batch, len_q)\n            len_k ="
BUGS = [
    Bug("a share begins where the next one does", SMALL, (
        ("begin = share_of(program, total, each)\n        b, before = _p", "begin = share_of(program + 1, total, each)\n        b, before = _p"),
    )),
    Bug("the last unit begins with the share's last item", SMALL, (("before + (stop - 1 - before) // items * items", "stop - 1"),)),
    Bug("the others begin where the share does", SMALL, (("at, until = others, last_begin", "at, until = begin, last_begin"),)),
    Bug("a program begins with the first sequence's pages", SMALL, (("table[0] + b.to(gl.int64)", "table[0] + b.to(gl.int64) * 0"),)),
    Bug("items of sequences before the list's second part are forgotten", LISTED, (("            seen += _all(work)\n", ""),)),
    Bug("lengths are those of the sequence before", SMALL, ((SEQUENCE, SEQUENCE.replace("b, b <", "gl.maximum(b - 1, 0), b <")),)),
    Bug("the pages behind 32 are not looked up", LONG, (("(lane == 0) & (t > 0)", "t < 0"),)),
    Bug("pages of a tile are another one's", SMALL, (("lane = t % KNOWN * C.parts", "lane = t % KNOWN"),)),
    Bug("keys are copied before their buffer is free", SMALL, (("mbarrier.wait(empty.index(index), phase ^ 1)", "pass"),)),
    Bug("a tile in a large page begins where the page does", LARGE, (
        ("v_ring, v_at, v_desc, pages, kv_head, n, C.page,", "v_ring, v_at, v_desc, pages, kv_head, n * 0, C.page,"),
    )),
    Bug("queries are let go before they are multiplied", SHORT, (
        ("        q = tiles.index(mine)", MINE + "        q = tiles.index(mine)"),
        (MINE + "        turn += 1", "        turn += 1"),
    )),
    Bug("queries are another unit's", SHORT, (("mine = turn % C.rounds\n", "mine = turn * 0\n"),)),
    Bug("values are let go before they are multiplied", SMALL, ((DONE + FREE + "        vi", FREE + DONE + "        vi"),)),
    Bug("values of free slots are not cleared", SMALL, (("        clear(v_ring, vi, vp, n, len_k, C)\n        words", "        words"),)),
    Bug("values of free slots are not cleared in a first tile", SMALL, (("    clear(v_ring, vi, vp, n, len_k, C)\n    acc", "    acc"),)),
    Bug("the output is not over the largest score", LONG, ((ADD, ADD.splitlines()[1]),)),
    Bug("a part goes where the program's other one does", SMALL, (("slot = 2 * gl.program_id(0) + (part & 1)", "slot = 2 * gl.program_id(0)"),)),
    Bug("a part is added up before the last one is there", SMALL, ((ARRIVED, ARRIVED.replace("1:", "2:")),)),
    Bug("arrivals are not set back", SMALL, (("        gl.store(parts[2] + owner, 0)\n", ""),)),
    Bug("the first part is looked for where the program's other one is", SMALL, (("gl.where(s == 0, later, 0)", "0"),)),
    Bug("parts past a tile of them are left out", MANY, (("for first in range(0, count, P):", "for first in range(0, P, P):"),)),
    Bug("parts are not over one maximum", LARGE, (("+ gl.sum(x * weights[:, :, None], 0)", "+ gl.sum(x, 0)"),)),
    Bug("rows past a tile of them are left out", TALL, (("for row in range(0, rows, H):", "for row in range(0, H, H):"),)),
    Bug("the sink of a unit in parts is left out", SINKS, (("if sinks is not None:\n                logit", "if False:\n                logit"),)),
    Bug("each part has the sink", SINKS, (('logit = gl.where(part < 0, logit, float("-inf"))', "logit = logit * 1.0"),)),
    Bug("a window hides nothing in a tile that it ends in", WINDOW, (("(n < first_whole) | (n + N > whole_end)", "n + N > whole_end"),)),
    Bug("a tile of a window is left out", WINDOW, (("n = start + item * C.item", "n = start + item * C.item + (start > 0) * N"),)),
]  # fmt: skip


@emulates
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    call = call_of(bug.case)
    for mode in MODES:
        try:
            judge(bug.case, call, emulated(bug.case, call, mode, edits=bug.edits))
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug.what}")


# ---- on a GPU


def gpu(problem, lengths):
    """A case of the file's own tests on a GPU."""
    return pytest.param(problem, lengths, marks=[pytest.mark.gpu, pytest.mark.hopper], id=f"{problem}-{'_'.join(map(str, lengths))}")


LENGTHS = [700, 0, 1, 15, 16, 17, 61, 1031]
LOW = {"dtype": BF16, "dim": 128, "heads": (8, 2)}
ON_GPU = [gpu(*case(LENGTHS, page, len_q=3, mask=mask, **LOW)) for page in (8, 16, 64, 256, 1024) for mask in (Full(), Causal(), Window(90))]
ON_GPU += [gpu(*case(LENGTHS, 16, len_q=n, **LOW)) for n in (1, 2, 16)]
ON_GPU += [gpu(*case([n], 16, **LOW)) for n in (1, 64, 1000, 9000)]
ON_GPU += [gpu(*case(LENGTHS, 16, len_q=2, dim=dim, dtype=dtype)) for dim in (8, 40, 64, 96, 256) for dtype in (BF16, FP16)]
ON_GPU += [gpu(*case(LENGTHS, 16, dim=dim, dim_v=dim_v, dtype=BF16)) for dim, dim_v in ((128, 64), (64, 256), (192, 128))]
ON_GPU += [gpu(*case(LENGTHS, 16, dim=64, heads=heads, dtype=BF16)) for heads in ((32, 1), (12, 4), (5, 5), (64, 1))]
ON_GPU += [gpu(*case(LENGTHS * 40, 16, **LOW))]


@pytest.mark.parametrize(("problem", "lengths"), ON_GPU)
def test_paged(problem, lengths, device):
    check(KERNEL.name, problem, queries(problem, device), paged(problem, lengths, device))


MODS = {  # {name: a device -> arguments}
    "softcap": lambda at: {"softcap": 2.0},
    "alibi": lambda at: {"score": ALiBi(ALiBi.slopes_of(8, at))},
    "sinks": lambda at: {"sinks": torch.randn(8, device=at)},
    "batch_invariant": lambda at: {"batch_invariant": True},
}


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case(LENGTHS, page, len_q=2, **LOW)) for page in (16, 128)])
@pytest.mark.parametrize("name", MODS)
def test_mods(problem, lengths, name, device):
    check(KERNEL.name, problem, queries(problem, device), paged(problem, lengths, device), **MODS[name](device))


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case([1040] * 4, 16, len_q=2, **LOW))])
def test_lengths_change_under_a_graph(problem, lengths, device):
    """A captured call is right for other lengths and another order of pages, and the same bits twice."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    launch = select(p, device, KERNEL.name).launch
    launch(q, cache, Operands(0.1), True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch(q, cache, Operands(0.1), True)
    for new in ([700, 0, 61, 1031], [1040, 17, 0, 300]):
        cache.lengths.copy_(torch.tensor(new, dtype=torch.int32))
        cache.page_table.copy_(cache.page_table.flip(0))
        graph.replay()
        for ours, theirs in zip((out, lse), onchip.paged_attention(q, cache, scale=0.1, return_lse=True, kernel="reference"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        assert torch.equal(out, launch(q, cache, Operands(0.1), True)[0])


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case([700, 5000], 16, **LOW))])
def test_graphs_of_more_calls_than_there_are_numbers_for(problem, lengths, device, monkeypatch):
    """What a graph counts by is nobody else's memory, however many are captured after it and whatever is let go between them."""
    monkeypatch.setattr(gluon_merge, "CALLS", 64)
    monkeypatch.setattr(gluon_merge, "_of", {})
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    launch, kept = select(p, device, KERNEL.name).launch, []
    for _ in range(8):
        expected, graph = launch(q, cache, Operands(0.1), False), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [launch(q, cache, Operands(0.1), False) for _ in range(24)]
        torch.cuda.empty_cache()
        kept.append((graph, out, torch.full((64, gluon_merge.EACH), 7, dtype=torch.int32, device=device)))  # where numbers would have been let go
    for graph, out, others in kept:
        for _ in range(2):
            graph.replay()
        assert all(torch.equal(one, expected) for one in out) and bool((others == 7).all())


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case([700, 5000], 16, **LOW))])
def test_graphs_run_beside_each_other(problem, lengths, device):
    """Two of one problem on two streams, and calls on a third: each counts its own arrivals, and leaves zeros."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    launch, streams = select(p, device, KERNEL.name).launch, [torch.cuda.Stream() for _ in range(3)]
    expected = launch(q, cache, Operands(0.1), False)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append([launch(q, cache, Operands(0.1), False) for _ in range(20)])
    for _ in range(10):
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = [launch(q, cache, Operands(0.1), False) for _ in range(10)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for found in (*results, eager) for out in found)
