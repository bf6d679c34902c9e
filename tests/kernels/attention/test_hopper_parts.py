"""`hopper_prefill` with the keys of a tile of queries dealt out in parts: in each timing of the emulator, with bugs planted, and on a GPU."""

import os
from typing import NamedTuple

import pytest
import test_hopper_emulated as plain
import test_hopper_paged as paged
import test_hopper_ragged as ragged
import torch
from test_hopper_emulated import EACH, FEW, Case, bias

import onchip
from gluon_emulator import MODES, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Beside
from onchip.core.scores import ALiBi, Bias, RelativeBias, Softcap
from onchip.dispatch import select

BF16, FP16 = torch.bfloat16, torch.float16
emulates = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")

CASES = [
    SMALL := Case((1, 64, 2, EACH, 1, 3), 70, 400, Full(), dim=128, batch=2),
    TALL := Case((2, 64, 2, FEW, 1, 4), 200, 600, heads=(4, 2)),
    Case((2, 128, 2, EACH, 1, 2), 150, 500, Causal(align="top_left"), dtype=FP16),
    AHEAD := Case((2, 64, 2, EACH, 1, 4), 300, 330),  # parts that end before the diagonal, and parts within it
    Case((2, 64, 2, FEW, 1, 3), 200, 500, Window(300)),
    Case((2, 32, 2, EACH, 1, 4), 70, 200, Window(90, 30), heads=(3, 3), batch=2),
    PACKED_HEADS := Case((1, 64, 2, EACH, 4, 3), 17, 400, heads=(8, 2), batch=2),
    Case((2, 64, 2, EACH, 4, 3), 17, 400, Full(), heads=(6, 2)),
    SINKS := Case((2, 64, 2, FEW, 1, 3), 130, 400, sinks=True),
    Case((1, 64, 2, EACH, 2, 3), 40, 300, sinks=True, dtype=FP16),
    Case((2, 64, 2, EACH, 1, 3), 70, 400, dim=256, heads=(1, 1)),
    Case((2, 64, 2, EACH, 1, 3), 70, 400, dim=128, dim_v=64),
    Case((2, 64, 2, EACH, 1, 3), 200, 90),  # rows that see nothing
    Case((2, 64, 2, EACH, 1, 3), 130, 400, Full(), heads=(1, 1), steep=400.0),
    Case((2, 64, 2, FEW, 1, 3), 130, 400, heads=(1, 1), dtype=FP16, steep=-300.0),
]
PACKED = [
    UNEVEN := Case((1, 64, 2, EACH, 1, 3), lengths=((70, 0, 5, 90), (400, 9, 30, 200))),
    Case((2, 128, 2, FEW, 1, 3), lengths=((30, 100, 1), (600, 260, 1)), mask=Full(), dim=128, heads=(4, 2)),
    USED := Case((2, 64, 2, EACH, 1, 3), lengths=((80, 100, 30), (300, 400, 130)), used=((70, 99, 30), (299, 0, 70)), mask=Window(200)),
    Case((2, 64, 2, EACH, 4, 4), lengths=((17, 9), (300, 140)), heads=(8, 2), sinks=True),
]
SCORED = [
    Case((2, 64, 2, FEW, 1, 3), 130, 400, Full(), score=Softcap(2.0)),
    Case((2, 64, 2, EACH, 1, 3), 130, 460, score=Softcap(30.0), steep=40.0, sinks=True),
    Case((2, 64, 2, EACH, 1, 3), 130, 400, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((2, 64, 2, FEW, 1, 3), 200, 400, Full(), score=ALiBi(torch.tensor([[0.5, -0.02]]))),
    Case((2, 64, 2, FEW, 1, 3), 72, 400, Full(), batch=2, score=bias(2, 2, 72, 400)),
    Case((2, 64, 2, EACH, 1, 3), 130, 400, Full(), heads=(4, 2), score=RelativeBias(torch.randn(4, 401).bfloat16())),
    Case((2, 64, 2, FEW, 1, 3), 130, 264, Full(), heads=(4, 2), dim=128, score=bias(1, 4, 1, 264)),
    Case((2, 64, 2, EACH, 1, 3), lengths=((70, 5), (400, 200)), mask=Full(), score=Bias(torch.randn(2, 1, 400))),
    Case((2, 64, 2, FEW, 1, 3), 130, 400, drop=0.3),  # which no choice deals out
]
PAGES = [
    LOOKED_UP := paged.Case((2, 64, 2, EACH, 1, 3), 16, (400, 0, 61, 131), 70),
    paged.Case((1, 64, 2, FEW, 4, 4), 8, (400, 90, 33), 17, heads=(8, 2)),
    paged.Case((2, 64, 2, EACH, 1, 3), 1, (300, 0, 70), 70, Window(150)),
    paged.Case((2, 128, 2, EACH, 1, 3), 24, (500, 30), 40, sinks=True, dim=128),
]
# to be emulated, by tiles of 64 keys: no part has less
SHORT = [("MOST_PARTS, LEAST = 16, 1024", "MOST_PARTS, LEAST = 16, 64"), ("GRAIN = tl.constexpr(128)", "GRAIN = tl.constexpr(16)")]
LISTED = [  # how many parts a list says, of as many programs
    LONG_ONE := ragged.Case((2, 64, 2, 40, 4, 0), ((1, 300), (60, 400), (1, 20), (0, 9)), heads=(8, 2)),
    ragged.Case((2, 64, 2, 12, 1, 0), ((1, 300), (130, 400), (1, 20)), heads=(2, 1), sinks=True, room=40),
    NARROW := ragged.Case((2, 64, 2, 40, 1, 0), ((1, 300), (60, 400), (1, 20), (0, 9)), heads=(4, 2), mask=Window(200), sinks=True),
    THREES := ragged.Case((1, 64, 2, 9, 4, 0), ((1, 300), (20, 400), (70, 60)), 1, heads=(3, 1), dtype=FP16),
    ragged.Case((2, 64, 3, 20, 2, 0), ((9, 500), (1, 64)), 24, Full(), score=Softcap(2.0)),
    ragged.Case((2, 64, 2, 20, 1, 0), ((30, 300), (1, 130)), 128, dim_v=128, score=ALiBi(torch.tensor([0.5, 0.25]))),
]
DENSE = [  # the same, of queries that are not packed
    EVEN := paged.Case((2, 64, 2, 20, 1, 0), 16, (400, 0, 61, 131), 70, sinks=True),
    paged.Case((1, 64, 2, 24, 4, 0), 8, (400, 90, 33), 17, heads=(8, 2)),
    paged.Case((2, 64, 2, 12, 1, 0), 1, (300, 0, 70), 140, Window(150)),
    paged.Case((2, 64, 2, 16, 1, 0), 24, (500, 30), 40, Full(), dim=128, dim_v=64, dtype=FP16),
    paged.Case((2, 64, 2, 20, 1, 0), 16, (400, 30), 70, score=bias(2, 2, 70, 400)),
    paged.Case((2, 64, 2, 20, 1, 0), 64, (400,), 1, score=Softcap(2.0)),
]
TOGETHER = [ragged.Case((2, 64, 2, EACH, 4, 3), ((1, 300), (60, 400), (1, 20), (0, 9)), 16, heads=(8, 2))]


@pytest.fixture(autouse=True)
def filled():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(CASES + PACKED + SCORED, [SMALL, TALL, SINKS, UNEVEN]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    call = plain.call_of(case)
    plain.check(case, call, plain.emulated(case, call, mode))


@emulates
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_parts_that_cancel(dtype):
    """A part's output is a hundred times the sum of all: rounded to half precision it would be the error."""
    case = Case((2, 64, 2, EACH, 1, 2), 70, 512, Full(), dtype=dtype)
    call = plain.call_of(case)
    call.v.copy_((8 - torch.arange(512) / 32)[:, None, None] + 0.1 * torch.randn(1, 512, 1, 64))
    plain.check(case, call, plain.emulated(case, call, "slow loads"))


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(PAGES, [LOOKED_UP]), ids=str)
def test_over_pages(case, mode):
    call = paged.call_of(case)
    paged.judge(case, call, paged.emulated(case, call, mode))


@emulates
@pytest.mark.parametrize("mode", MODES[:2])
def test_queries_of_several_sequences_over_pages(mode):
    (case,) = TOGETHER
    call = ragged.ragged(case)
    ragged.judge(case, call, ragged.emulated(case, call, mode))


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(LISTED, [LONG_ONE, NARROW]), ids=str)
def test_as_many_parts_as_a_list_says(case, mode):
    call = ragged.ragged(case)
    ragged.judge(case, call, ragged.emulated(case, call, mode, edits=SHORT))


@emulates
@pytest.mark.parametrize(("case", "mode"), timings(DENSE, [EVEN]), ids=str)
def test_a_dense_batch_over_pages(case, mode):
    call = paged.call_of(case)
    paged.judge(case, call, paged.emulated(case, call, mode, edits=SHORT))


@emulates
@pytest.mark.parametrize("view", [lambda q: q, lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)], ids=["as it is", "heads first"])
def test_a_dense_batch_over_pages_without_its_lse(view):
    """The same bits; an LSE is [batch, heads, len_q], one after the other."""
    q, *more = paged.call_of(EVEN)
    out, lse = paged.emulated(EVEN, (view(q), *more), MODES[0], edits=SHORT)
    assert torch.equal(out, paged.emulated(EVEN, (view(q), *more), MODES[0], edits=SHORT, lse=False)) and out.shape == q.shape
    assert lse.shape == (4, 2, 70) and lse.is_contiguous()


@emulates
@pytest.mark.parametrize("beside", [Beside(3, False), Beside(3, True)])
def test_a_dense_batch_beside_another_launch_stays_together(beside):
    """Nothing may be launched between the two."""
    call = paged.call_of(EVEN)
    list_of_tiles = ("        listed = sequence_tiles(", "        listed = nobody_asks_for_a_list(")
    paged.judge(EVEN, call, paged.emulated(EVEN, call, MODES[0], edits=[*SHORT, list_of_tiles], beside=beside))


# ---- with a bug


class Bug(NamedTuple):
    """What is wrong, a case in which it shows, and how the sources differ: (text, what stands there instead)."""

    what: str
    case: Case
    edits: tuple[tuple[str, str], ...]


NEXT, STEPS = "gl.maximum((part + 1) * count // parts, first + 1)", "key_steps(place, map_ptr, map_strides, C)"
HALVED = AHEAD._replace(tiles=(2, 64, 2, EACH, 1, 2))
IDLE = Case((2, 64, 2, FEW, 1, 3), lengths=((70, 5), (400, 300)), mask=Full(), dim=128)  # a warpgroup that has no queries
BUGS = [
    Bug("all parts begin where the tile does", SMALL, (("steps = (top - first, near,", "steps = (top, near,"),)),
    Bug("a part ends a step late", SMALL, ((NEXT, f"gl.minimum({NEXT} + 1, count)"),)),
    Bug("a part's steps at the diagonal are not masked", HALVED, (("gl.minimum(1 + masked, end)", "gl.minimum(1 + masked * 0, end)"),)),
    Bug("the window's other end is not masked", CASES[4], (("far = gl.maximum(end - gl.maximum(1 + masked + bare, first + 1), 0)", "far = first * 0"),)),
    Bug("every part has the sink", SINKS, (("gl.where(part == 0, logit,", "gl.where(part >= 0, logit,"),)),
    Bug("no part has the sink", SINKS, (("gl.where(part == 0, logit,", "gl.where(part < 0, logit,"),)),
    Bug("parts of no keys see some", AHEAD, (("count // C.split > part * count // C.split, len_k", "count // C.split >= 0, len_k"),)),
    Bug("parts go to the first one's place", SMALL, (("b += part * (sizes[7] // sizes[3])", "b += part * 0"),)),
    Bug("heads of a packed batch's parts go to the first one's", UNEVEN, (("head += part * all_heads(sizes, C)", "head += part * 0"),)),
    Bug("rows behind a sequence's part are stored", UNEVEN, (("acc, mask=(rows < len_q)", "acc, mask=(rows >= 0)"),)),
    Bug("queries of a packed batch's parts lie at its beginning", UNEVEN, (("lse_at(b, heads, start_q + rows,", "lse_at(b, heads, rows,"),)),
    Bug("a warpgroup without queries passes a tile's keys", IDLE, ((f"steps_of_part({STEPS}, hidden, C)\n            ki", f"{STEPS}\n            ki"),)),
]  # fmt: skip


@emulates
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    call = plain.call_of(bug.case)
    for mode in MODES:
        try:
            plain.check(bug.case, call, plain.emulated(bug.case, call, mode, edits=bug.edits))
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug.what}")


LISTED_BUGS = [
    Bug("every unit is a tile's first part", LONG_ONE, (("part, parts = told % 32,", "part, parts = told % 1,"),)),
    Bug("a unit lies where its tile's first part does", LONG_ONE, (("return told // 1024 * (64 * C.groups)", "return told * 0"),)),
    Bug("both warpgroups have the same rows", LONG_ONE, (("+ GROUP * 64 + gl.arange(0, 64, layout=layout)\n\n", "+ gl.arange(0, 64, layout=layout)\n\n"),)),
    Bug("the first absent unit is done", THREES, (("    real = b >= 0\n", "    real = b >= -1\n"),)),
    Bug("a program ends behind its first unit", THREES._replace(tiles=(1, 64, 2, 3, 4, 0)), (("more = more & there", "more = more & (number < 0)"),)),
    Bug("each part has the sink", NARROW, (("gl.where(part == 0, logit,", "gl.where(part >= 0, logit,"),)),
    Bug("a tile in parts goes to the output as well", LONG_ONE, (("                len_q = gl.where(parts > 1, 0, len_q)\n", ""),)),
    Bug("a tile in parts has an LSE of its own", LONG_ONE, (("        len_q = gl.where(parts > 1, 0, len_q)\n    if lse_ptr", "    if lse_ptr"),)),
]  # fmt: skip


@emulates
@pytest.mark.parametrize("bug", LISTED_BUGS, ids=lambda bug: bug.what)
def test_a_bug_planted_in_listed_parts_shows(bug):
    call = ragged.ragged(bug.case)
    with pytest.raises((Fault, AssertionError, IndexError)):
        for mode in MODES:
            ragged.judge(bug.case, call, ragged.emulated(bug.case, call, mode, edits=[*SHORT, *bug.edits]))


@emulates
@pytest.mark.parametrize(
    "edit",
    [("torch.arange(0, tokens + 1, p.len_q,", "torch.arange(0, tokens + 1, 1,"), (".transpose(0, 1).contiguous())", ".view(p.batch, p.heads, p.len_q))")],
)
def test_a_dense_batch_taken_apart_wrongly_shows(edit):
    call = paged.call_of(EVEN)
    with pytest.raises((Fault, AssertionError, IndexError)):
        paged.judge(EVEN, call, paged.emulated(EVEN, call, MODES[0], edits=[*SHORT, edit]))


@emulates
def test_small_pages_of_a_part_show_a_bug():
    case = PAGES[2]
    with pytest.raises((Fault, AssertionError)):
        call = paged.call_of(case)
        edit = ("key_steps(place, map_ptr, map_strides, C), told, C)", "key_steps(place, map_ptr, map_strides, C), told * 0, C)")
        paged.judge(case, call, paged.emulated(case, call, MODES[0], edits=[edit]))


# ---- what is chosen

LONG = Attention("prefill", 1, 64, 131072, 32, 8, 128, BF16, Causal())
PAGED = LONG._replace(op="decode", keys="paged", page=16)


def chosen(p: Attention):
    return select(p, GPUS["H200"], "hopper_paged" if p.keys == "paged" else "hopper_prefill").config


@pytest.mark.parametrize("p", [LONG, LONG._replace(len_q=17), LONG._replace(len_q=128, mask=Full()), LONG._replace(dim=256)], ids=str)
def test_few_queries_over_many_keys_fill_the_gpu(p):
    """Of 8 to 32 tiles whose keys nobody else would read."""
    tiles = chosen(p)
    assert 96 <= tiles.count(p) * tiles.parts <= 132 and f"keys in {tiles.parts} parts" in str(tiles)
    assert f"{tiles.count(p) * tiles.parts} tiles by a program each" in tiles.order(p)


@pytest.mark.parametrize(
    "p",
    [
        LONG._replace(extras=("batch_invariant",)),
        LONG._replace(extras=("dropout",)),
        LONG._replace(len_q=0),
        PAGED._replace(len_k=8000),  # no list
        PAGED._replace(batch=5),
        PAGED._replace(mask=Window(7000)),
        PAGED._replace(extras=("batch_invariant",), tokens=64),
        PAGED._replace(len_k=1900, tokens=64),
        PAGED._replace(mask=Window(500), tokens=64),
        PAGED._replace(len_q=300, tokens=300),
        PAGED._replace(batch=300, tokens=300),
        LONG._replace(len_k=2048, mask=Full()),  # two parts would be done in 0.92 of the time: less than a tenth is gained
        LONG._replace(len_k=900),  # 8 key tiles: less than two parts
        LONG._replace(len_q=131072),
        LONG._replace(batch=16),
        LONG._replace(mask=Window(500)),
    ],
    ids=str,
)
def test_keys_stay_together(p):
    assert chosen(p).parts == 1


@pytest.mark.parametrize(
    "p",
    [
        PAGED,
        PAGED._replace(batch=4, len_k=8192),
        PAGED._replace(tokens=64),
        PAGED._replace(batch=100, len_q=100, tokens=256),
        PAGED._replace(heads=8, len_q=40, tokens=40),
    ],
    ids=str,
)
def test_lengths_say_in_how_many_parts_keys_of_pages_are(p):
    """Whatever the table's width, of few tokens."""
    tiles = chosen(p)
    assert tiles.parts == 0 and "keys of long sequences in parts" in str(tiles) and tiles.groups == min(2, -(-p.len_q * tiles.pack // 64))
    assert tiles.order(p).startswith(str(tiles.count(p))) and tiles.order(p) == tiles.order(p._replace(tokens=p.tokens or p.batch * p.len_q))


@pytest.mark.parametrize(
    ("heads", "length", "mask", "groups"), [(8, 2048, Full(), 2), (8, 2048, Causal(), 1), (32, 512, Full(), 2), (32, 512, Causal(), 2), (16, 512, Full(), 1)]
)
def test_tiles_of_short_sequences(heads, length, mask, groups):
    """Tiles of half the size where these are done earlier: not where they go round twice, and whole ones once."""
    assert chosen(Attention("prefill", 1, length, length, heads, heads, 128, BF16, mask)).groups == groups


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Causal(), Full(), Window(3000)], ids=str)
def test_gpu(mask, dim, device):
    """Against float64, and the same bits again; what is not there holds NaN."""
    p = Attention("prefill", 2, 40, 5000, 8, 2, dim, BF16, mask)
    assert chosen(p).parts > 1
    q, k, v = (torch.randn(2, n, h, dim, device=device, dtype=BF16) for n, h in ((40, 8), (5000, 2), (5000, 2)))
    sinks = torch.randn(8, device=device)
    run = lambda dtype, kernel: onchip.attention(*(t.to(dtype) for t in (q, k, v)), mask=mask, sinks=sinks, return_lse=True, kernel=kernel)  # noqa: E731
    ours, again = (run(BF16, "hopper_prefill") for _ in range(2))
    for found, same, low, truth in zip(ours, again, run(BF16, "reference"), run(torch.float64, "reference"), strict=True):
        assert torch.equal(found, same)
        assert_as_good_as_torch(found, (low,), truth)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [1, 16])
def test_lengths_change_under_a_graph(page, dim, device):
    """How many parts keys are in follows the lengths: of packed queries over pages and of a dense batch, long sequences and short ones, and none."""
    rows, most = 4, 40000 // page
    pool = [torch.randn(rows * most, page, 2, dim, device=device, dtype=BF16) for _ in range(2)]
    table, lengths = torch.randperm(rows * most, device=device).int().view(rows, most), torch.full((rows,), 40000, device=device, dtype=torch.int32)
    cache = onchip.PagedKV(*pool, table, lengths)
    q, offsets = torch.randn(rows, 30, 8, dim, device=device, dtype=BF16), torch.arange(0, 121, 30, device=device, dtype=torch.int32)
    sinks = torch.randn(8, device=device)
    calls = [
        lambda kernel, q=q: onchip.paged_attention(q, cache, sinks=sinks, return_lse=True, kernel=kernel),
        lambda kernel, q=q.flatten(0, 1): onchip.paged_attention(q, cache, q_offsets=offsets, longest=30, sinks=sinks, return_lse=True, kernel=kernel),
    ]
    for call in calls:
        for _ in range(3):
            call("hopper_paged")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours = call("hopper_paged")
        for new in ([40000, 1, 0, 3000], [40000] * 4, [100, 29, 4000, 0], [0, 0, 0, 33333]):
            lengths.copy_(torch.tensor(new, dtype=torch.int32))
            graph.replay()
            first = [t.clone() for t in ours]
            graph.replay()
            for found, same, eager, low in zip(first, ours, call("hopper_paged"), call("triton_paged"), strict=True):
                assert torch.equal(found, same) and torch.equal(found, eager)
                torch.testing.assert_close(found, low, rtol=2e-2, atol=1e-2)
