"""Many queries over a paged cache on Hopper: the kernel's sources in each timing of the emulator, and with bugs planted; and, on a GPU, against float64."""

import os
from typing import Any, NamedTuple

import pytest
import torch
from test_decode import case, check, paged, queries
from test_hopper_emulated import EACH, FEW, prepared

import onchip
from gluon_emulator import MODES, Emulator, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Chunked, Document, Full, KeyPadding, Prefix, Window
from onchip.core.problem import Beside, Operands
from onchip.core.scores import ALiBi, Bias, Softcap, chain
from onchip.dispatch import select
from onchip.kernels.attention import DECODE
from onchip.ops.attend import How, PagedKV, paged_sizes, problem_of

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("hopper_paged")
NOWHERE = 1 << 20  # no page of any pool
emulates = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call and the tiles it is run with."""

    tiles: tuple[int, ...]  # groups, keys a tile, stages, programs; heads side by side, parts of the keys
    page: int
    lengths: tuple[int, ...]
    len_q: int
    mask: Any = Causal()
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 1)
    spare: int = 1  # columns of the page table beyond the longest sequence
    sinks: bool = False
    score: Any = None

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


class Strict(Emulator):
    """Which has no page but those of the pool, and -1 where nothing is to be read."""

    def tma_load(self, descriptor, at, barrier, buffer):
        if not -1 <= int(at[0]) < len(descriptor.base):
            raise Fault(f"page {int(at[0])} of {len(descriptor.base)}")
        super().tma_load(descriptor, at, barrier, buffer)


def call_of(c: Case):
    """Queries, sinks and a cache on shuffled pages. What nobody uses holds NaN, entries beyond a sequence, and those before its window, name no page."""
    used = [-(-n // c.page) for n in c.lengths]
    order = torch.randperm(sum(used) + 2)
    k, v = (torch.full((len(order), c.page, c.heads[1], dim), torch.nan, dtype=c.dtype) for dim in (c.dim, c.dim_v or c.dim))
    table = torch.full((len(used), max(used) + c.spare), NOWHERE, dtype=torch.int32)
    for b, (row, n, own) in enumerate(zip(table, c.lengths, order[: sum(used)].split(used), strict=True)):
        slots = (own[:, None] * c.page + torch.arange(c.page)).flatten()[:n]
        for pool in (k, v):
            pool.flatten(0, 1)[slots] = torch.randn(n, c.heads[1], pool.shape[-1]).to(c.dtype)
            if isinstance(c.mask, KeyPadding):
                pool.flatten(0, 1)[slots[~c.mask.valid[b, :n]]] = torch.nan
        row[: len(own)] = own
        if isinstance(c.mask, Window) and c.mask.left is not None and c.mask.align != "top_left":
            row[: max(0, n - c.len_q - c.mask.left) // c.page] = NOWHERE
    q = torch.randn(len(used), c.len_q, c.heads[0], c.dim).to(c.dtype)
    return q, PagedKV(k, v, table, torch.tensor(c.lengths, dtype=torch.int32)), torch.randn(c.heads[0]) if c.sinks else None


def emulated(c: Case, call, mode: str, seed=0, edits=(), beside=None, lse=True):
    """Output and LSE of the kernel."""
    q, cache, sinks = call
    kernel = prepared(Strict(mode, seed), edits)
    how = How(c.mask, chain(None, c.score, None), sinks, None, False, False, KERNEL.name)
    p, x = problem_of("decode", how, paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1]), Operands(c.dim**-0.5), q)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    return kernel.launch_paged(p, kernel.Tiles(*c.tiles), q, cache, x._replace(beside=beside), lse)


def judge(c: Case, call, result) -> None:
    """Output and LSE against float64, beside the reference in the case's dtype."""
    q, cache, sinks = call
    cache = cache._replace(page_table=torch.where(cache.page_table == NOWHERE, 0, cache.page_table))  # which looks up what a window hides

    def reference(dtype):
        there = cache._replace(k=cache.k.to(dtype), v=cache.v.to(dtype))
        return onchip.paged_attention(
            q.to(dtype), there, mask=c.mask, score=c.score, sinks=sinks, scale=getattr(c, "scale", 0.0) or None, return_lse=True, kernel="reference"
        )

    for ours, low, truth in zip(result, reference(c.dtype), reference(torch.float64), strict=True):
        assert_as_good_as_torch(ours, low, truth)


# ---- as it is

UNEVEN = (200, 0, 61, 131)
CASES = [
    *(Case((2, n, 2, EACH), page, UNEVEN, 70) for n in (64, 128) for page in (8, 16, 64, 128, 256)),
    Case((2, 64, 3, EACH), 16, (300, 20, 170), 100, Full(), heads=(4, 2)),
    Case((2, 64, 2, FEW), 16, (128, 64, 144), 130, Full(), spare=0),
    Case((1, 64, 2, EACH), 8, (100, 40), 64, heads=(3, 3), dtype=FP16),
    Case((1, 128, 1, EACH), 32, (256, 7), 17, dim=128),
    Case((2, 64, 2, EACH), 16, (400, 90, 33), 70, Window(50)),
    Case((2, 64, 2, EACH), 128, (400, 90, 33), 140, Window(50, 20), heads=(4, 2)),
    Case((2, 64, 2, EACH), 1024, (900, 1030), 70, Window(300)),
    Case((2, 64, 2, EACH), 16, (150, 90), 100, Causal("top_left")),
    Case((2, 64, 2, EACH), 16, (150, 0, 20), 100, sinks=True),
    Case((2, 64, 2, EACH), 8, (90, 70), 70, dim=256, heads=(1, 1)),
    Case((2, 128, 2, EACH), 16, (130, 90), 70, dim=128, dim_v=64),
    Case((2, 64, 2, EACH), 16, (130, 90), 70, dim=40),
    Case((2, 64, 2, EACH), 16, (90, 30), 70, score=Softcap(2.0)),
    Case((2, 64, 2, EACH), 128, (90, 30), 70, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((2, 64, 2, EACH), 16, (136, 30), 70, score=Bias(torch.randn(2, 2, 70, 136).to(BF16))),
    Case((2, 64, 2, EACH), 16, UNEVEN, 70, Chunked(40)),
    Case((2, 64, 2, EACH), 64, (210, 100), 70, Causal() & Document(torch.arange(256) // 60)),
    Case((2, 64, 2, EACH), 8, (210, 100), 70, Prefix(torch.tensor([30, 1]))),
    Case((2, 128, 2, EACH), 24, (200, 0, 23, 25), 70),
    Case((2, 64, 2, EACH), 48, (300, 49, 131), 70, Window(50)),
    Case((2, 64, 2, EACH), 2048, (130, 2050), 70, Window(100)),
    Case((2, 128, 2, EACH), 1, (200, 0, 1, 131), 70),
    Case((2, 64, 2, EACH), 4, (200, 3, 5, 131), 70, Window(50)),
    Case((1, 64, 2, EACH), 12, (100, 11, 13), 64, heads=(3, 3), dtype=FP16),
    Case((2, 64, 3, FEW), 2, (128, 64, 144), 130, Full(), heads=(4, 2), dim=40, dim_v=96),
    Case((2, 64, 2, EACH), 1, (200, 70), 70, Chunked(40)),
    Case((2, 64, 2, EACH), 1, (136, 30), 70, score=Bias(torch.randn(2, 2, 70, 136).to(BF16))),
    Case((2, 64, 2, EACH), 1, (136, 30), 70, score=Bias(torch.randn(2, 2, 1, 136).to(BF16))),
    Case((2, 64, 2, EACH), 16, (136, 30), 70, score=Bias(torch.randn(2, 2, 1, 136).to(BF16))),
    Case((2, 64, 2, EACH), 16, (150, 90), 70, KeyPadding(torch.arange(176) >= torch.tensor([[70], [3]]))),
]


@emulates
@pytest.mark.parametrize(("c", "mode"), timings(CASES, [CASES[1], CASES[3], CASES[9], CASES[10], CASES[13], CASES[15], CASES[16]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(c, mode):
    call = call_of(c)
    judge(c, call, emulated(c, call, mode))


@emulates
@pytest.mark.parametrize("page", [8, 128])
def test_rows_that_see_no_key(page):
    c = Case((2, 64, 2, EACH), page, (20, 0), 150)
    out, lse = emulated(c, call_of(c), "slow loads")
    for row, blind in enumerate((130, 150)):
        assert not out[row, :blind].any() and (lse[row, :, :blind] == -torch.inf).all() and lse[row, :, blind:].isfinite().all()


@emulates
@pytest.mark.parametrize("page", [1, 4])
def test_threads_copy_out_of_any_pool(page):
    """Of keys head after head, with a gap behind a page that is no number of slots; of values beside something else."""
    c = Case((2, 64, 2, EACH), page, (90, 33), 70, heads=(4, 2))
    q, cache, sinks = call_of(c)
    k = torch.empty(len(cache.k), 2 * page * 64 + 8, dtype=c.dtype)[:, :-8].unflatten(1, (2, page, 64)).transpose(1, 2).copy_(cache.k)
    call = q, cache._replace(k=k, v=torch.stack([cache.k, cache.v], 1)[:, 1]), sinks
    judge(c, call, emulated(c, call, "slow loads"))


@emulates
@pytest.mark.parametrize("beside", [None, Beside(3, False)])
def test_the_same_queries_of_all(beside):
    """As a cascade has them: in memory once. And by a few programs, each of which has every third tile."""
    c = Case((2, 64, 2, EACH), 16, UNEVEN, 70, Full(), heads=(4, 2))
    q, cache, sinks = call_of(c)
    call = q[:1].expand(len(q), -1, -1, -1), cache, sinks
    judge(c, call, emulated(c, call, "slow loads", beside=beside))


# ---- with a bug


class Bug(NamedTuple):
    """What is wrong, a case in which it shows, and how the sources differ: (text, what stands there instead)."""

    what: str
    case: Case
    edits: tuple[tuple[str, str], ...]


SMALL, LARGE, WINDOW, FITS = CASES[1], CASES[9], CASES[14], CASES[11]
ODD, ONES, FOURS, TWELVES, LONG, MAPPED = CASES[28], *CASES[31:36]
BUGS = [
    Bug("all parts come from the first page", SMALL, (("gl.where(lane == first + part, pages, 0)", "gl.where(lane == first, pages, 0)"),)),
    Bug("all parts go to the first rows", SMALL, ((".slice(part * ROWS, ROWS, 2)", ".slice(0, ROWS, 2)"),)),
    Bug("a part's page is that of the tile's first key", SMALL, (("at = n + lane * ROWS", "at = n + lane * 0"),)),
    Bug("all sequences are the first one's", SMALL, (("(b * columns", "(b * 0"),)),
    Bug("a tile in a large page begins where the page does", LARGE, (("slot = (n + part * ROWS) % PAGE", "slot = n * 0"),)),
    Bug("all parts of an odd page are its first", ODD, (("(n + part * ROWS) % PAGE", "n % PAGE"),)),
    Bug("a page larger than its parts is looked up as one of them", ODD, (("at // C.page)", "at // ROWS)"),)),
    Bug("entries behind a sequence are read", SMALL, (("& (at < len_k) &", "& (at < len_k + C.n) &"),)),
    Bug("entries behind the table are read", FITS, (("& (at < len_k) &", "&"),)),
    Bug("entries before a window are read", WINDOW, (("(at + ROWS > first)", "(at >= 0)"),)),
    Bug("a page that a window begins in is left out", WINDOW, (("(at + ROWS > first)", "(at > first)"),)),
    Bug("a page that a sequence ends in is left out", SMALL, (("& (at < len_k) &", "& (at + ROWS <= len_k) &"),)),
    Bug("a page too few is announced", SMALL, (("PARTS * desc.block_type.nbytes", "(PARTS - 1) * desc.block_type.nbytes"),)),
    Bug("a page is announced for all", SMALL, (("PARTS * desc.block_type.nbytes", "desc.block_type.nbytes"),)),
    Bug("pages are copied before their buffer is free", SMALL, (("    elif used >= STAGES:", "    elif used > STAGES:"),)),
    Bug("values of free slots are not cleared", SMALL, (("        return self.packed or self.page > 0", "        return self.packed"),)),
    Bug("the table's width is the length of all", SMALL, (("    if used_ptr is not None:\n        length = tl.load(used_ptr + batch)\n", ""),)),
    Bug("what threads copied is not fenced off", ONES, (("    if C.gathers > 0:\n        fence_async_shared()\n", ""),)),
    Bug("threads arrive before they have copied", ONES, (
        ("arrive_when_copied(full.index(index), increment_count=False)", "mbarrier.arrive(full.index(index), 64)"),
    )),
    Bug("threads copy before a buffer is free", LONG, (("reclaim(index, used, C.stages,", "reclaim(index, used, C.stages + 1,"),)),
    Bug("threads read entries behind a sequence", ONES, (("last = gl.maximum(len_k - 1, 0)", "last = len_k"), ("mask=at < len_k, other=0)", "other=0)"))),
    Bug("threads read an entry of a sequence without keys", ONES, (("mask=at < len_k, other=0)", "other=0)"),)),
    Bug("threads read entries before a window", FOURS, ((", gl.minimum(first_seen(place, C), last))", ", 0)"),)),
    Bug("threads read a page's first key for all", FOURS, (("% C.page * of_slot", "* 0"),)),
    Bug("threads read the pages of the tile before", LONG, (("place, kv_head, after, more, 10, C)", "place, kv_head, after, pages, 10, C)"),)),
    Bug("threads look up what a map does not say", MAPPED, (
        ("return gl.maximum(gl.minimum(at, last), gl.minimum(first_seen(place, C), last))", "return gl.minimum(at, last)"),
    )),
    Bug("threads read the first head", TWELVES, (("kv_head.to(gl.int64) * of_head", "kv_head.to(gl.int64) * 0"),)),
    Bug("threads bring the next tile's values", ONES, (
        ("kv_head, n, pages, 10 + C.stages, C)\n            n,", "kv_head, after, more, 10 + C.stages, C)\n            n,"),
    )),
    Bug("values are the next tile's", SMALL, (
        ("                v_at = fill_keys(v_ring, v_at, v_desc, table, place, (batch, kv_head), n,",
         "                v_at = fill_keys(v_ring, v_at, v_desc, table, place, (batch, kv_head), after,"),
    )),
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


LENGTHS = [700, 0, 61, 1031]
LOW = {"dtype": BF16, "dim": 128, "heads": (4, 2)}
ON_GPU = [gpu(*case(LENGTHS, page, len_q=300, mask=mask, **LOW)) for page in (8, 16, 24, 64, 128, 1000, 2048) for mask in (Full(), Causal(), Window(90))]
ON_GPU += [gpu(*case(LENGTHS, 16, len_q=n, **LOW)) for n in (1, 16, 17, 64, 65, 129, 1000)]
ON_GPU += [gpu(*case(LENGTHS, page, len_q=100, dim=dim, dtype=dtype)) for page in (8, 64) for dim in (8, 40, 64, 96, 256) for dtype in (BF16, FP16)]
ON_GPU += [gpu(*case(LENGTHS, 16, len_q=100, dim=dim, dim_v=dim_v, dtype=BF16)) for dim, dim_v in ((128, 64), (64, 256), (192, 128))]
ON_GPU += [gpu(*case(LENGTHS, 16, len_q=200, mask=mask, **LOW)) for mask in (Causal("top_left"), Window(60, 40), Window(None, 30), Window(2, 30, "top_left"))]


GATHERED = [gpu(*case(LENGTHS, page, len_q=100, mask=mask, **LOW)) for page, mask in ((1, Causal()), (1, Window(90)), (4, Full()))]
GATHERED += [gpu(*case([11, 12, 13, 1], 12, len_q=20, **LOW)), gpu(*case([130, 0, 1, 257], 1, len_q=200, **LOW))]
GATHERED += [gpu(*case(LENGTHS, page, len_q=100, dim=dim, dtype=FP16)) for page, dim in ((1, 40), (2, 256))]


@pytest.mark.parametrize(("problem", "lengths"), GATHERED)
def test_small_pages(problem, lengths, device):
    """Which threads copy: the same bits each time."""
    q, cache = queries(problem, device), paged(problem, lengths, device)
    first, _ = check(KERNEL.name, problem, q, cache)
    for _ in range(20):
        assert torch.equal(onchip.paged_attention(q, cache, mask=problem.mask, kernel=KERNEL.name), first)


@pytest.mark.parametrize(("problem", "lengths"), ON_GPU)
def test_paged(problem, lengths, device):
    check(KERNEL.name, problem, queries(problem, device), paged(problem, lengths, device))


MODS = {  # {name: a device -> arguments}
    "softcap": lambda at: {"softcap": 2.0},
    "alibi": lambda at: {"score": ALiBi(ALiBi.slopes_of(4, at))},
    "bias": lambda at: {"bias": torch.randn(4, 4, 200, 1032, device=at).to(BF16)},
    "sinks": lambda at: {"sinks": torch.randn(4, device=at)},
    "chunked": lambda at: {"mask": Chunked(100)},
    "documents": lambda at: {"mask": Causal() & Document(torch.randint(0, 5, (4, 1100), device=at).sort(-1).values), "sinks": torch.randn(4, device=at)},
    "prefixes": lambda at: {"mask": Prefix(torch.tensor([300, 1, 0, 90], device=at))},
}


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case(LENGTHS, page, len_q=200, **LOW)) for page in (16, 128)])
@pytest.mark.parametrize("name", MODS)
def test_mods(problem, lengths, name, device):
    check(KERNEL.name, problem, queries(problem, device), paged(problem, lengths, device), **MODS[name](device))


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case(LENGTHS, 16, len_q=200, **LOW))])
@pytest.mark.parametrize("entry", [-1, NOWHERE])
def test_entries_that_name_no_page(problem, lengths, entry, device):
    """Behind each sequence, and before its window."""
    p, q, cache = problem._replace(mask=Window(90)), queries(problem, device), paged(problem, lengths, device)
    clean = onchip.paged_attention(q, cache, mask=p.mask, kernel=KERNEL.name, return_lse=True)
    for row, n in zip(cache.page_table, lengths, strict=True):
        row[-(-n // p.page) :] = entry
        row[: max(0, n - p.len_q - p.mask.left) // p.page] = entry
    for ours, before in zip(onchip.paged_attention(q, cache, mask=p.mask, kernel=KERNEL.name, return_lse=True), clean, strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case([1040] * 4, 16, len_q=200, **LOW))])
def test_lengths_change_under_a_graph(problem, lengths, device):
    """A captured call is right for other lengths and another order of pages."""
    p, q, cache = problem, queries(problem, device), paged(problem, lengths, device)
    launch = select(p, device, KERNEL.name).launch
    launch(q, cache, Operands(0.1), True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch(q, cache, Operands(0.1), True)
    for new in (LENGTHS, [1040, 17, 0, 300]):
        cache.lengths.copy_(torch.tensor(new, dtype=torch.int32))
        cache.page_table.copy_(cache.page_table.flip(0))
        graph.replay()
        for ours, theirs in zip((out, lse), onchip.paged_attention(q, cache, scale=0.1, return_lse=True, kernel="reference"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("problem", "lengths"), [gpu(*case(LENGTHS, 16, len_q=200, **LOW))])
def test_batch_invariant_bits_do_not_depend_on_the_batch(problem, lengths, device):
    q, cache = queries(problem, device), paged(problem, lengths, device)
    run = lambda rows: onchip.paged_attention(  # noqa: E731
        q[rows], cache._replace(page_table=cache.page_table[rows], lengths=cache.lengths[rows]), batch_invariant=True, kernel=KERNEL.name
    )
    together = run(slice(None))
    assert all(torch.equal(run(slice(row, row + 1))[0], together[row]) for row in range(4))
