"""A few queries over a cache whose words go straight to registers: the kernel's sources in the emulator, also with bugs; and, on a GPU, against float64."""

from types import SimpleNamespace

import pytest
import torch
from test_decode import case, coded, paged, queries
from test_hopper_decode import Merge, Poisoned, emulates
from test_hopper_paged import NOWHERE, Bug

import onchip
from gluon_emulator import Emulator, Fault
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.dispatch import select
from onchip.kernels.attention import DECODE, register_decode
from onchip.kernels.attention.decode_merge import at_once

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("register_decode")
PARTS = ("curves", "attention.texts", "attention.mods", "attention.tile", "hopper", "attention.decode_tiles", "attention.gluon_merge", "attention.gluon_shares")
PARTS += ("attention.register_tiles", "attention.register_decode")
SOURCES = [f"onchip.kernels.{name}" for name in PARTS]


def emulated(p, q, cache, how, edits=(), sinks=None, seen=1024, offsets=None, scale=None, apart=False):
    """Output and LSE of the kernel; `how`: keys of a warp and step, warps, programs, rows of a tile, tiles, and keys of an item or 0."""
    emulator = Emulator("slow loads")
    stand_ins = emulator.stand_ins
    merge = SimpleNamespace(merge=Merge(), LISTED=1024, SHARE=512, at_once=at_once)
    emulator.stand_ins = lambda: stand_ins() | {"onchip.kernels.attention.decode_merge": merge}
    kernel = emulator.load(*SOURCES, edits=edits)
    kernel.AT_ONCE, kernel.torch = seen, Poisoned()
    kernel.outputs.__globals__["torch"] = kernel.torch
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    *tiles, item = how
    arrivals = torch.zeros(1024, dtype=torch.int32)
    kernel.arrivals_of = lambda *_: (None if apart else arrivals, False)
    result = kernel.launch(p, kernel.Shares(*tiles, item or how[0] * how[1]), q, cache, Operands(scale or p.dim**-0.5, offsets, sinks=sinks), True)
    assert not arrivals.any()
    return result


def judge(p, q, cache, result, sinks=None) -> None:
    """Output and LSE against float64, beside the reference in the problem's dtype."""
    how = {"mask": p.mask, "sinks": sinks, "return_lse": True, "kernel": "reference"}
    cache = cache._replace(page_table=torch.where(cache.page_table == NOWHERE, 0, cache.page_table))  # which looks up what a window hides
    wide, low = (cache._replace(**{n: getattr(cache, n).dequantised(t) if p.kv else getattr(cache, n).to(t) for n in "kv"}) for t in (torch.float64, p.dtype))
    truth, torchs = onchip.paged_attention(q.double(), wide, **how), onchip.paged_attention(q, low, **how)
    for mine, theirs, true in zip(result, torchs, truth, strict=True):
        assert_as_good_as_torch(mine, theirs, true)


def call(form, lengths, page, **sizes):
    """A Problem, its queries and its cache, in a format or in bf16."""
    torch.manual_seed(0)
    p, lengths = case(lengths, page, **{"dim": 64, "dtype": BF16, "heads": (4, 2)} | sizes)
    cache = paged(p, lengths, "cpu")
    cache.v[cache.page_table[0, :4].long()] *= 2.0**-9  # scales that grow
    p = p._replace(kv=form)
    if isinstance(p.mask, Window) and p.mask.align != "top_left":
        for row, n in zip(cache.page_table, lengths, strict=True):
            row[: max(0, n - p.len_q - p.mask.left) // page] = NOWHERE
    return p, queries(p, "cpu"), coded(p, cache, False) if form else cache


# ---- as it is

UNEVEN = (200, 0, 61, 131)
ONE = (16, 2, 3, 8, 1, 0)
CASES = [
    ("", UNEVEN, 16, ONE, {}),
    ("", UNEVEN, 16, (32, 2, 5, 8, 1, 0), {"dtype": FP16, "dim": 128, "dim_v": 64}),  # pages of keys and of values are not alike
    ("e4m3", UNEVEN, 64, (32, 1, 4, 8, 1, 0), {"dim": 128}),
    ("e5m2", UNEVEN, 1, ONE, {"len_q": 3, "heads": (8, 2), "rows": 16}),
    ("int8", UNEVEN, 16, (32, 2, 4, 8, 1, 0), {"dim": 128}),
    ("int8", (300, 20), 8, (16, 4, 3, 16, 1, 0), {"len_q": 5, "mask": Window(70), "heads": (6, 2)}),
    ("int4", UNEVEN, 16, (64, 1, 4, 8, 1, 0), {"dim": 128}),
    ("int4", UNEVEN, 16, (64, 1, 4, 4, 1, 0), {"dim": 128}),
    ("int8", UNEVEN, 16, (32, 2, 4, 4, 1, 0), {"dim": 128}),
    ("e4m3", UNEVEN, 1, (32, 2, 3, 4, 1, 0), {"heads": (6, 2)}),
    ("int4", UNEVEN, 64, (64, 2, 3, 4, 2, 0), {"len_q": 3, "mask": Window(70)}),
    ("int4", UNEVEN, 3, (16, 2, 4, 8, 1, 0), {"dim": 64, "dim_v": 128, "dtype": FP16}),
    ("int4", (90,), 16, (16, 1, 2, 8, 1, 0), {"dim": 256}),
    ("", (90, 40), 32, (16, 1, 2, 8, 1, 0), {"dim": 256, "heads": (2, 1)}),
    ("int8", (150, 40), 16, (16, 2, 3, 8, 1, 0), {"len_q": 3, "mask": Window(40, 1), "heads": (2, 1)}),
    ("int8", (150, 40), 16, (16, 2, 3, 8, 1, 0), {"len_q": 3, "mask": Causal("top_left"), "heads": (2, 1)}),
    ("e4m3", (250, 40), 1, (16, 2, 3, 8, 1, 0), {"mask": Window(40)}),
    ("e4m3", (290, 30, 64), 16, (16, 2, 5, 8, 1, 64), {"len_q": 2, "mask": Full()}),
]


@emulates
@pytest.mark.parametrize(("form", "lengths", "page", "how", "sizes"), CASES, ids=str)
@pytest.mark.sampled(2)
def test_emulated(form, lengths, page, how, sizes):
    p, q, cache = call(form, lengths, page, **{k: v for k, v in sizes.items() if k != "rows"})
    judge(p, q, cache, emulated(p, q, cache, (*how[:3], sizes.get("rows", how[3]), *how[4:])))


@emulates
def test_sinks_and_a_long_list():
    """Sequences looked at a few at a time."""
    p, q, cache = call("int8", (*UNEVEN * 9, 70), 16, heads=(4, 2))
    sinks = torch.randn(4)
    judge(p, q, cache, emulated(p, q, cache, ONE, sinks=sinks, seen=32), sinks)


@emulates
def test_scales_far_outside_of_float16():
    """One token's values are a million times as large as the others'."""
    p, q, cache = call("", (200, 65), 16)
    for size in (1e-30, 1e30):
        values = cache.v * size
        values[cache.page_table[0, 3].long(), 5] *= 1e6
        p8 = p._replace(kv="int8")
        codes = coded(p8, cache._replace(v=values), False)
        judge(p8, q, codes, emulated(p8, q, codes, ONE))


@emulates
def test_parts_merged_apart():
    p, q, cache = call("int8", UNEVEN, 16, dim=128)
    judge(p, q, cache, emulated(p, q, cache, (32, 2, 4, 8, 1, 0), apart=True))


@emulates
def test_a_negative_scale():
    p, q, cache = call("int8", UNEVEN, 16)
    result = emulated(p, q, cache, ONE, scale=-0.2)
    wide = cache._replace(k=cache.k.dequantised(torch.float64), v=cache.v.dequantised(torch.float64))
    truth = onchip.paged_attention(q.double(), wide, mask=p.mask, scale=-0.2, kernel="reference")
    assert (result[0] - truth).abs().max() <= 2e-2 * truth.abs().max()


@emulates
@pytest.mark.parametrize("item", [0, 64])
def test_packed_queries(item):
    """Counts that differ, none at all included; tokens behind the last are left alone. With items, as of a batch_invariant problem, parts are few."""
    counts, lengths = (1, 0, 3, 2), (200, 70, 33, 2)
    p, q, cache = call("int8", lengths, 16, len_q=3)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = torch.cat([row[-n:] if n else row[:0] for row, n in zip(q, counts, strict=True)] + [torch.full_like(q[0, :2], torch.nan)])
    packed = p._replace(tokens=len(tokens))
    out, lse = emulated(packed, tokens, cache, (*ONE[:5], item), offsets=offsets)
    assert out[offsets[-1] :].isnan().all() and lse[:, offsets[-1] :].isnan().all()
    for b, n in enumerate(counts):
        if n:
            own, here = slice(b, b + 1), slice(offsets[b], offsets[b + 1])
            one = p._replace(batch=1, len_q=n)
            judge(one, q[own, -n:], cache._replace(page_table=cache.page_table[own], lengths=cache.lengths[own]), (out[None, here], lse[None, :, here]))


SMALL_PROGRAMS = [("e4m3", 1, 1024, 4), ("e4m3", 61, 1024, 4), ("e4m3", 62, 1024, 2), ("e4m3", 123, 1024, 2), ("e4m3", 124, 1 << 14, 1)]
SMALL_PROGRAMS += [("e4m3", 999, 1 << 15, 2), ("int8", 128, 1 << 13, 1), ("int8", 128, 1 << 14, 2), ("int8", 128, 1 << 15, 4)]
SMALL_PROGRAMS += [("int4", 128, 8192, 1), ("int4", 128, 8193, 2)]


@pytest.mark.parametrize(("form", "batch", "len_k", "warps"), SMALL_PROGRAMS)
def test_programs_are_small_where_units_are_many(form, batch, len_k, warps):
    """And where no warp adds up so many keys that its sums lose digits."""
    p = Attention("decode", batch, 1, len_k, 32, 8, 128, BF16, Causal(), "paged", 16, kv=form)
    how = register_decode.configs(p, GPUS["H200"])[0]
    assert how.warps == warps and how.warps * how.programs <= 8 * 132
    for other in (p._replace(extras=("batch_invariant",)), p._replace(len_q=40)):  # a row's bits are not the batch's
        assert register_decode.configs(other, GPUS["H200"])[0].warps == 4


@pytest.mark.parametrize(
    ("form", "heads", "page", "rows"), [("int4", 32, 16, 4), ("int8", 32, 16, 4), ("int8", 32, 1, 8), ("int4", 64, 16, 8), ("e4m3", 32, 16, 8), ("", 32, 16, 8)]
)
def test_two_steps_of_few_rows_stand_abreast(form, heads, page, rows):
    """Where scores are much of the work, and a tile has two steps."""
    p = Attention("decode", 32, 1, 4096, heads, 8, 128, BF16, Causal(), "paged", page, kv=form)
    assert register_decode.configs(p, GPUS["H200"])[0].rows == rows
    assert register_decode.configs(p._replace(extras=("batch_invariant",)), GPUS["H200"])[0].rows == 16


# ---- with a bug

SMALL = ("int8", UNEVEN, 16, (32, 2, 4, 8, 1, 0), {"dim": 128})
FOUR = ("int4", UNEVEN, 16, (64, 2, 4, 4, 1, 0), {"dim": 128})
LONG = ("int8", (500,), 16, (16, 2, 1, 8, 1, 0), {})
NEXT = "        n = new\n        pages = pages_of(entries, k[1], n"
ADDED = "added = gl.sum(gl.convert_layout(added, of_warps) * share, 0)"
ZERO = "x += number(of_old[s][1])[:, :, :, None] * q_sums[:, None, :, :]"
ODD = '_merged(even, odd, "0x7362")'
BUGS = [
    Bug("a warp reads another one's keys", SMALL, (("C.n * gl.arange(0, C.warps", "0 * gl.arange(0, C.warps"),)),
    Bug("a step's second keys are its first ones'", SMALL, (("* self.abreast + step % self.abreast) * 8", "* self.abreast + step % self.abreast) * 0"),)),
    Bug("pages are those of the tile before", SMALL, ((NEXT + " + C.tile", NEXT),)),
    Bug("columns of queries come in order", SMALL, (("inside = 2 * e + h if C.planes == 2 else 2 * h + e", "inside = 2 * e + h"),)),
    Bug("weights are not turned", SMALL, ((".permute((0, 1, 4, 3, 2)).reshape([W, 16, R])", ".reshape([W, 16, R])"),)),
    Bug("even and odd keys change places", SMALL, ((ODD, ODD.replace("even, odd", "odd, even")),)),
    Bug("numbers lie as far apart as words do", SMALL, (("2 if C.alike else 1", "1"),)),
    Bug("values of int4's high bits keep the low ones", ("int4", UNEVEN, 16, (64, 1, 4, 8, 1, 0), {"dim": 128}), (("more = more - acc", "more = more"),)),
    Bug("a key's zero is left out", SMALL, ((ZERO, "x += 0.0"),)),
    Bug("a value's zero is left out", SMALL, ((ADDED, "added = sums * 0.0"),)),
    Bug("sums do not shrink as the scale grows", LONG, (("gl.maximum(peak - new_peak, -126)", "gl.maximum(peak - peak, -126)"),)),
    Bug("values of free slots are not cleared", SMALL, (("return gl.where(seen[:, :, None], words, 0)", "return words"),
                                                       ("of = (gl.where(seen, of[0], 0), gl.where(seen, of[1], 0))", "of = (of[0], of[1])"))),
    Bug("a part goes where the program's other one does", SMALL, (("place = 2 * gl.program_id(0) + (part & 1)", "place = 2 * gl.program_id(0)"),)),
    Bug("parts of a unit are those of the one before", SMALL, (("part_of(at, begin, before + number * items,", "part_of(at, begin, before,"),)),
    Bug("warps' sums are not over one maximum", SMALL, (("gl.convert_layout(x, layout) * share[:, :, None]", "gl.convert_layout(x, layout)"),)),
    Bug("a step's values are weighed by the other one's weights", FOUR, (("-1, 0)[None, :, None]", "0, -1)[None, :, None]"),)),
    Bug("scores of the second step are the first one's", FOUR, (("gl.where(first_abreast, x, raw[2 * s + 1])", "x"),)),
    Bug("scales of the second step are the first one's", FOUR, (("[None, :, None] + 8 * later)", "[None, :, None] + 0 * later)"),)),
    Bug("a window hides nothing in a tile that it begins in", ("int8", (300, 90), 16, (16, 2, 4, 8, 1, 0), {"mask": Window(70)}),
        (("(n < first_whole) | (new > whole_end)", "new > whole_end"),)),
]  # fmt: skip


@emulates
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    form, lengths, page, how, sizes = bug.case
    p, q, cache = call(form, lengths, page, **sizes)
    with pytest.raises((Fault, AssertionError)):
        judge(p, q, cache, emulated(p, q, cache, how, bug.edits))


# ---- on a GPU

LENGTHS = [700, 0, 1, 15, 16, 17, 61, 1031]
ON_GPU = [(form, page, {}) for form in ("", "e4m3", "e5m2", "int8", "int4") for page in (1, 3, 16, 64)]
ON_GPU += [(form, 16, {"dim": dim, "dim_v": dim_v}) for form in ("", "int8", "int4") for dim, dim_v in ((64, 0), (256, 0), (64, 256), (128, 64))]
ON_GPU += [(form, 16, {"len_q": n, "heads": heads}) for form in ("", "e4m3", "int4") for n, heads in ((4, (8, 2)), (3, (16, 1)), (16, (8, 2)))]
ON_GPU += [("int8", 16, {"mask": mask, "len_q": 3, "dtype": FP16}) for mask in (Full(), Window(90), Window(40, 1), Causal("top_left"))]
ON_GPU += [(form, 16, {"lengths": LENGTHS * n, "heads": (16, 8)}) for form in ("e4m3", "int8", "int4") for n in (8, 15)]  # programs of two warps, and of one
ON_GPU += [("int8", 16, {"len_q": 70}), ("e4m3", 16, {"len_q": 600, "lengths": [900, 600, 1300]})]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(("form", "page", "sizes"), ON_GPU, ids=str)
def test_on_a_gpu(form, page, sizes, device):
    """Like the reference, the same bits twice, and what the batch holds does not change a batch_invariant row."""
    sizes = {"dim": 128, "heads": (8, 2), "dtype": BF16} | sizes
    p, lengths = case(sizes.pop("lengths", LENGTHS), page, **sizes)
    cache, q = paged(p, lengths, device), queries(p, device)
    if form:
        p = p._replace(kv=form)
        cache = coded(p, cache, form == "int8" and p.dtype == BF16)  # in float16 a channel's factor rounds a query as much as torch errs
    how = {"mask": p.mask, "return_lse": True, "kernel": KERNEL.name}
    first = onchip.paged_attention(q, cache, **how)
    judge(p, q, cache, first)
    assert all(torch.equal(a, b) for a, b in zip(first, onchip.paged_attention(q, cache, **how), strict=True))
    together = onchip.paged_attention(q, cache, batch_invariant=True, **how)
    judge(p, q, cache, together)
    alone = cache._replace(page_table=cache.page_table[-1:], lengths=cache.lengths[-1:])
    assert torch.equal(onchip.paged_attention(q[-1:], alone, batch_invariant=True, **how)[0][0], together[0][-1])


@pytest.mark.gpu
@pytest.mark.hopper
def test_lengths_change_under_a_graph(device):
    """A captured call is right for other lengths and another order of pages."""
    p, lengths = case([1040] * 4, 16, dim=128, dtype=BF16, heads=(8, 2))
    q, plain = queries(p, device), paged(p, lengths, device)
    p = p._replace(kv="int8")
    cache = coded(p, plain, False)
    launch = select(p, device, KERNEL.name).launch
    launch(q, cache, Operands(p.dim**-0.5), True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch(q, cache, Operands(p.dim**-0.5), True)
    for new in ([700, 0, 61, 1031], [1040, 17, 0, 300]):
        cache.lengths.copy_(torch.tensor(new, dtype=torch.int32))
        cache.page_table.copy_(cache.page_table.flip(0))
        graph.replay()
        judge(p, q, cache, result)
