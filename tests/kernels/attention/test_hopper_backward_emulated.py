"""The Hopper backward kernel on a CPU, as `test_hopper_emulated.py` runs the forward one: in each timing, and with bugs planted."""

import os
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from test_hopper_emulated import EACH, FEW, FP16, ON_THE_LEFT, Call, Case, bias, both, call_of, in_tiles, list_tiles, mask_map, operands, shown

import onchip
from gluon_emulator import MODES, Emulator, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Dense, Document, Full, KeyPadding, Window
from onchip.core.problem import Operands
from onchip.core.scores import ALiBi, Bias, BucketBias, RelativeBias, ScoreMod, Softcap, chain
from onchip.ops.attend import How, dense_sizes, packed_sizes, problem_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")

MODULES = (
    "texts",
    "mods",
    "tile",
    "tile_lists",
    "hopper_dropout",
    "pairs",
    "hopper_tiles",
    "hopper_backward_tiles",
    "hopper_backward_ordered",
    "hopper_backward",
)
SOURCES = ["onchip.kernels.curves", "onchip.kernels.hopper", *(f"onchip.kernels.attention.{name}" for name in MODULES)]


def statistics(_p, out, d_out, lse, d_lse, unit, tile, phases=1):
    """`statistics.statistics` in plain torch."""
    rows = out.shape[2]
    delta = (out.float() * d_out.float()).sum(-1) - (0 if d_lse is None else d_lse.view(out.shape[:3]))
    lse = lse.view(out.shape[:3])
    empty, pad = lse == -torch.inf, -rows % tile
    delta, lse = torch.where(empty, 0.0, delta), torch.where(empty, torch.inf, lse * unit)
    later = [
        (torch.nn.functional.pad(delta, (0, pad + n))[..., n:], torch.nn.functional.pad(lse, (0, pad + n), value=torch.inf)[..., n:]) for n in range(phases)
    ]
    return tuple(torch.cat(kind, 1) for kind in zip(*later, strict=True))


def finish(sums, dq, factor, first):
    """`statistics.finish` in plain torch."""
    heads, rows, columns = sums.shape
    plain = sums.view(heads, rows, columns // 32, 4, 4, 2).transpose(3, 4).reshape(heads, rows, columns)[..., : dq.shape[3]]
    for n, head in enumerate(plain, first):
        dq[n // dq.shape[1], n % dq.shape[1]] = (head * factor).to(dq.dtype)


def forward(c: Case, call: Call, dtype: torch.dtype):
    """Output, LSE and the leaves of the reference in `dtype`."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (call.q, call.k, call.v, *([call.sinks] if c.sinks else []))]
    how = {"mask": c.mask, "score": c.score, "sinks": leaves[3] if c.sinks else None, "scale": c.scale, "return_lse": True, "kernel": "reference"}
    how["dropout"] = c.dropout
    if not c.packed:
        return *onchip.attention(*leaves[:3], **how), leaves
    return *onchip.attention_packed(*leaves[:3], *call.offsets, longest=tuple(both(c.lengths).amax(1).tolist()), used=call.used, **how), leaves


def emulated(c: Case, call: Call, d_out, d_lse, mode: str, seed=0, edits=(), shares=1):
    """The gradients of the kernel."""
    kernel = Emulator(mode, seed).load(*SOURCES, edits=edits)
    kernel.mask_map, kernel.statistics, kernel.finish = mask_map_of_either, statistics, finish
    kernel.hopper_backward_ordered.mask_map = mask_map_of_either
    sizes = (
        packed_sizes(call.q, call.k, call.v, both(c.lengths).shape[1], *both(c.lengths).amax(1).tolist()) if c.packed else dense_sizes(call.q, call.k, call.v)
    )
    how = How(c.mask, chain(None, c.score, None), call.sinks, None, c.deterministic, False, "hopper_backward")
    p, x = problem_of("backward", how, sizes, operands(c, call), call.q)
    out, lse = (t.detach() for t in forward(c, call, torch.float64)[:2])
    groups, n, stages, programs = c.tiles
    tiles = kernel.Tiles(64 * groups, n, stages, shares, programs)
    if c.deterministic or max(c.dim, c.dim_v) > 128:
        tiles = kernel.hopper_backward_ordered.configs(p, GPUS["H200"])[0]._replace(programs=programs)
    dq, dk, dv, d_sinks, d_score = kernel.launch(p, tiles, call.q, call.k, call.v, out.to(c.dtype), lse.float(), d_out, d_lse, x)
    return [dq, dk, dv, *(d.to(c.dtype) for d in (*[d_sinks] * c.sinks, *d_score) if d is not None)]  # sums of delta are as good as the output


def mask_map_of_either(p, _sees, x: Operands, m: int, n: int, of_keys: bool, _device, bits: bool = False):
    """The map of the same mask, for tiles of keys with queries and keys the other way round."""
    if not of_keys:
        return mask_map(p, None, x, m, n, False, None, bits)
    inner = -(-p.len_q // m)
    result = torch.full((p.batch, -(-p.len_k // n), 2 + inner + bits * (inner + n // 32)), -1, dtype=torch.int32)
    for rows, seen in zip(result, shown(p, x), strict=True):
        tiles = in_tiles(torch.nn.functional.pad(seen, (0, p.len_k - seen.shape[1], 0, p.len_q - seen.shape[0])).T, n, m, False)
        for row, key in zip(rows, tiles, strict=True):
            list_tiles(row, key.any(-1) & ~key.all(-1), key.all(-1))
            if bits:
                keys = key.view(inner, n, m).any(2).any(0)
                row[2 + inner : 2 + inner + n // 32] = (keys.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)
    return result, (result.shape[1], 0, result.shape[2], *[2 + inner] * bits)


def check(c: Case, mode: str, edits=(), shares=1, seed=0) -> None:
    """Gradients of output and LSE against float64, beside the reference in the case's dtype."""
    call, d_out, d_lse, lows, truths = expected(c)
    for ours, low, truth in zip(emulated(c, call, d_out, d_lse, mode, seed, edits, shares), lows, truths, strict=True):
        assert_as_good_as_torch(ours, low, truth, 3)


@lru_cache
def expected(c: Case):
    """A case's call, and its gradients in its dtype and in float64: the same in each timing, and with each bug."""
    torch.manual_seed(0)
    call = call_of(c)
    d_out = torch.randn(*call.q.shape[:-1], c.dim_v or c.dim).to(c.dtype)
    lows, truths = (gradients(c, call, d_out, dtype) for dtype in (c.dtype, torch.float64))
    d_lse = torch.ones_like(forward(c, call, torch.float64)[1]).float()
    d_out = torch.where(call.q.isnan().any(-1, keepdim=True), torch.nan, d_out)  # nobody reads what belongs to no query either
    return call, d_out, d_lse, lows, truths


def gradients(c: Case, call: Call, d_out, dtype):
    out, lse, leaves = forward(c, call, dtype)
    seen = lse != -torch.inf
    leaves += [t for t in (c.score.tensors if c.score else ()) if t.requires_grad]
    return torch.autograd.grad([out, lse[seen].sum()], leaves, [d_out.to(out.dtype), torch.ones((), dtype=lse.dtype)])


CASES = [
    Case((1, 128, 2, EACH), 200, 200, heads=(2, 1)),
    Case((2, 128, 2, FEW), 200, 200, Full(), heads=(2, 2), batch=2),
    Case((1, 128, 2, EACH), 130, 190, dim=128, heads=(1, 1)),
    Case((1, 128, 2, FEW), 190, 130, Full(), dim=128, dtype=FP16, heads=(1, 1)),
    Case((2, 128, 2, EACH), 330, 150),
    Case((1, 128, 2, FEW), 300, 300, Window(100), dim=96),
    Case((2, 128, 2, FEW), 400, 300, Window(40, 30), heads=(4, 2), batch=2),
    Case((1, 128, 2, EACH), 150, 200, Causal(align="top_left"), dim=40),
    Case((1, 128, 2, EACH), 100, 100, dim=128, dim_v=64, sinks=True),
    Case((1, 128, 2, EACH), lengths=(70, 0, 5, 150)),
    Case((2, 128, 2, EACH), lengths=(200, 3, 130), used=(131, 0, 130), mask=Window(50), dtype=FP16),
    Case((1, 128, 2, EACH), lengths=((20, 90, 0), (150, 40, 7)), sinks=True),
    Case((1, 128, 2, EACH), lengths=((20, 9), (0, 0)), sinks=True),
    Case((1, 128, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60)),
    Case((1, 128, 2, FEW), lengths=(70, 0, 5, 200), heads=(4, 2)),
    Case((1, 128, 2, FEW), 300, 300, Causal() & Document(torch.arange(300) // 60)),
    Case((1, 128, 2, FEW), 500, 500, dim=128, heads=(2, 1), batch=2),
    Case((1, 128, 2, EACH), 700, 700, Window(330), heads=(1, 1)),
    Case((1, 128, 2, FEW), 130, 200, Full(), score=Softcap(2.0)),
    Case((2, 128, 2, EACH), 130, 130, score=ALiBi(torch.tensor([0.5, 0.25]))),
]
TABLES = torch.randn(2, 200).requires_grad_()
LEARNT, STEEP = torch.rand(2, requires_grad=True), 1 / torch.arange(200.0)  # infinite where a causal mask hides
PAIRS = [  # a bias that the copy engine brings
    Case((1, 128, 2, FEW), 200, 264, Full(), batch=2, heads=(4, 2), dim=128, score=bias(2, 4, 200, 264)),
    Case((1, 128, 2, FEW), 304, 304, dim=128, heads=(2, 1), score=bias(304, 304, causal=True)),
    Case((1, 128, 2, EACH), 130, 200, Full(), batch=2, dtype=FP16, score=bias(2, 1, 1, 200, dtype=FP16, expand=(2, 2, 130, 200))),
    Case((1, 128, 2, FEW), 136, 264, Window(50), dim=40, score=bias(2, 136, 264)),
    Case((1, 128, 2, EACH), lengths=((20, 90, 8), (150, 40, 7)), mask=Full(), score=bias(3, 1, 90, 152, inside=((20, 150), (90, 40), (8, 7)))),
    Case((1, 128, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60), score=bias(2, 200, 200, causal=True), sinks=True),
    Case((1, 128, 2, EACH), 130, 200, Full(), heads=(1, 1), score=Bias(torch.randn(130, 200).masked_fill(torch.rand(130, 200) < 0.5, -torch.inf).to(FP16))),
]
CASES += PAIRS
UNSCALED = [Case((1, 128, 2, EACH), 70, 130, scale=scale) for scale in (0.0, -0.25)]
UNSCALED += [Case((1, 128, 2, EACH), 72, 136, score=bias(72, 136), scale=scale) for scale in (0.0, -0.25)]
DISTANCES = [  # by distance; of some the table has a gradient
    BY_DISTANCE := Case((1, 128, 2, FEW), 200, 264, Full(), batch=2, heads=(4, 2), dim=128, score=RelativeBias(torch.randn(4, 401).requires_grad_())),
    Case((1, 128, 2, FEW), 300, 300, heads=(2, 1), dim=40, score=RelativeBias(torch.randn(2, 61).half()), dtype=FP16),
    Case((1, 128, 2, EACH), 333, 77, Full(), heads=(2, 2), score=BucketBias(torch.randn(32, 2).requires_grad_()), sinks=True),
    Case((1, 128, 2, EACH), 130, 290, Window(90), heads=(4, 1), score=BucketBias(torch.randn(8, 4).requires_grad_(), 40, both=False)),
    Case((1, 128, 2, FEW), 200, 200, Causal() & Document(torch.arange(200) // 60), score=ScoreMod(lambda s, b, h, i, j: s + TABLES[b, (j - i).abs()]), batch=2),
    Case((1, 128, 2, EACH), 100, 150, heads=(2, 2), score=RelativeBias(torch.randn(2, 101).requires_grad_()), scale=-0.25),
    Case((1, 128, 2, EACH), 100, 150, Full(), heads=(1, 1), score=RelativeBias(torch.randn(1, 101).requires_grad_()), scale=0.0),
    Case((1, 128, 2, EACH), 150, 150, heads=(2, 2), score=ScoreMod(lambda s, b, h, i, j: s - LEARNT[h] * STEEP[(i - j + 1).clamp(min=0)])),
]
CASES += DISTANCES
DROPS = Case((1, 128, 2, FEW), 200, 264, Full(), batch=2, heads=(4, 2), dim=128, drop=0.3)
CASES += [
    DROPS,
    Case((1, 128, 2, EACH), 200, 200, drop=0.1, dtype=FP16),
    Case((1, 128, 2, EACH), 300, 300, Window(70), dim=40, drop=0.5, sinks=True),
    Case((1, 128, 2, EACH), lengths=((20, 90, 0), (150, 40, 7)), drop=0.3, score=Softcap(2.0)),
    Case((1, 128, 2, FEW), lengths=(70, 0, 5, 200), heads=(4, 2), drop=0.3, dim=128),
    Case((1, 128, 2, EACH), 136, 264, Window(50), drop=0.3, score=bias(2, 136, 264)),
    Case((1, 128, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60), drop=0.3),
]
CASES += [  # padding, which holds NaN, infinity and more
    HELD := Case((1, 128, 2, FEW), 200, 200, KeyPadding(torch.tensor([150, 64])) & Causal(), batch=2, dim=128),
    Case((1, 128, 2, EACH), 300, 300, ON_THE_LEFT & Causal(), batch=2, heads=(4, 2)),
    Case((1, 128, 2, FEW), 130, 200, KeyPadding(torch.rand(2, 200) < 0.7), batch=2, sinks=True),
    Case((1, 128, 2, EACH), 70, 130, Dense(torch.rand(70, 130) < 0.02), dtype=FP16, dim=40, drop=0.3),
    Case((1, 128, 2, EACH), lengths=(130, 0, 200), used=(90, 0, 150), mask=KeyPadding(torch.tensor([70, 9, 200])) & Causal()),
    Case((1, 128, 2, EACH), 200, 200, KeyPadding(torch.rand(2, 200) < 0.5), batch=2, score=Softcap(3.0)),
    Case((1, 128, 2, EACH), 333, 77, KeyPadding(torch.tensor([60])), heads=(2, 2), score=BucketBias(torch.randn(32, 2).requires_grad_())),
]
APIECE, DRAWN = (2, 64, 3, EACH), (2, 64, 3, FEW)  # of heads beyond 128 all else is given
CASES += [
    Case(APIECE, 200, 200, dim=256),
    Case(DRAWN, 150, 300, Full(), dim=256, dtype=FP16, heads=(2, 2)),
    Case(APIECE, 130, 190, dim=192, dim_v=128, batch=2),
    Case(DRAWN, 300, 150, Full(), dim_v=200, heads=(1, 1), batch=2),
    Case(DRAWN, 400, 300, Window(40, 30), dim=160, heads=(4, 2), batch=2),
    Case(APIECE, 700, 700, Window(330), heads=(1, 1), dim=256),
    Case(APIECE, 150, 200, Causal(align="top_left"), dim=136),
    Case(APIECE, 100, 100, dim=256, dim_v=64, sinks=True),
    Case(APIECE, lengths=(70, 0, 5, 150), dim=256),
    Case(APIECE, lengths=(200, 3, 130), used=(131, 0, 130), mask=Window(50), dtype=FP16, dim=256),
    Case(APIECE, lengths=((20, 90, 0), (150, 40, 7)), sinks=True, dim=192, dim_v=128),
    Case(APIECE, lengths=((20, 9), (0, 0)), sinks=True, dim=256),
    Case(DRAWN, lengths=(70, 0, 5, 200), heads=(4, 2), dim=256),
    Case(APIECE, 200, 200, Causal() & Document(torch.arange(200) // 60), dim=256),
    Case(DRAWN, 300, 300, Causal() & Document(torch.arange(300) // 60), dim=192, dim_v=128),
    Case(DRAWN, 130, 200, Full(), score=Softcap(2.0), dim=256),
    Case(APIECE, 130, 130, score=ALiBi(torch.tensor([0.5, 0.25])), dim=192),
]
CASES += [
    APART_HELD := HELD._replace(tiles=DRAWN, dim=256),
    Case(APIECE, 130, 200, KeyPadding(torch.rand(2, 200) < 0.7), batch=2, dim=192, dim_v=128, sinks=True, dtype=FP16),
    Case(APIECE, lengths=(130, 0, 200), used=(90, 0, 150), mask=KeyPadding(torch.tensor([70, 9, 200])) & Causal(), dim=256),
    Case(APIECE, 130, 200, KeyPadding(torch.rand(1, 200) < 0.5), dim=256, heads=(1, 1), score=Softcap(3.0)),
]
ORDERED = [  # dK and dV together, nothing summed in memory
    Case(APIECE, 200, 200),
    Case(DRAWN, 200, 200, Full(), dim=128, heads=(4, 2), batch=2),
    Case(DRAWN, 130, 190, dim=96, dtype=FP16),
    Case(DRAWN, 400, 300, Window(40, 30), dim=128),
    Case(APIECE, 700, 700, Window(330), heads=(1, 1)),
    Case(APIECE, 100, 150, Causal(align="top_left"), dim=40, dim_v=136),
    Case(APIECE, lengths=(70, 0, 5, 150)),
    Case(DRAWN, lengths=(200, 3, 130), used=(131, 0, 130), mask=Window(50), dim=128, dtype=FP16),
    Case(APIECE, lengths=((20, 90, 0), (150, 40, 7)), sinks=True, dim=128, dim_v=64),
    Case(DRAWN, 300, 300, Causal() & Document(torch.arange(300) // 60), dim=128),
    Case(DRAWN, 130, 200, Full(), score=Softcap(2.0)),
    Case(APIECE, 300, 300, ON_THE_LEFT & Causal(), batch=2, heads=(4, 2), dim=128),
]
HARD = [CASES[0], CASES[1], CASES[2], CASES[9], CASES[13], CASES[14], CASES[20], CASES[21], CASES[22]]
CASES += [case._replace(deterministic=True) for case in ORDERED]
HARD += [CASES[-12], CASES[-11]]


@pytest.mark.parametrize(("case", "mode"), timings(CASES + UNSCALED, HARD), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    check(case, mode)


@pytest.mark.parametrize(
    ("case", "held"),
    [(HELD, torch.nan), (APART_HELD, torch.inf), (HELD._replace(score=Softcap(3.0)), torch.nan), (HELD, -torch.inf)]
    + [pytest.param(case, held, marks=pytest.mark.wide) for case, held in ((HELD, torch.inf), (APART_HELD, torch.nan), (APART_HELD, -torch.inf))]
    + [pytest.param(HELD._replace(score=Softcap(3.0)), held, marks=pytest.mark.wide) for held in (torch.inf, -torch.inf)],
    ids=str,
)
def test_what_somebody_sees_is_not_hidden(case, held):
    """A key that is no padding: dQ of who sees it is as little a number as the reference's."""
    call = call_of(case)
    call.k[0, 5, :, 3] = held
    d_out = torch.randn(call.q.shape).to(case.dtype)
    exact, ours = (dq.isfinite().all(-1) for dq in (gradients(case, call, d_out, torch.float64)[0], emulated(case, call, d_out, None, MODES[0])[0]))
    assert torch.equal(ours, exact) and exact[1].all() and not exact[0, 5:].any()


@pytest.mark.parametrize("used", [((131, 0, 130), (200, 3, 130)), ((200, 3, 130), (131, 0, 130))], ids=["queries", "keys"])
@pytest.mark.parametrize("ordered", [False, True], ids=["summed", "ordered"])
def test_gradients_of_tokens_that_nobody_uses(used, ordered):
    """Are zeros, in memory that held NaN: `used` of queries alone, or of keys alone."""
    tiles = APIECE if ordered else (1, 128, 2, EACH)
    case = Case(tiles, lengths=((200, 3, 130), (200, 3, 130)), used=used, mask=Full(), heads=(1, 1), deterministic=ordered)
    assert [n is None for n in expected(case)[0].used] == [used[0] == case.lengths[0], used[1] == case.lengths[1]]
    check(case, MODES[0])


SHARED = [
    Case((2, 128, 2, EACH), 200, 200, heads=(4, 2), batch=2),
    Case((1, 128, 2, FEW), 200, 200, Full(), dim=128, heads=(3, 3)),
    Case((1, 128, 2, EACH), lengths=(70, 0, 150), heads=(6, 3)),
    Case((1, 128, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60), heads=(4, 4)),
]


@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_in_several_launches(case, shares):
    check(case, MODES[0], shares=shares)


@pytest.mark.parametrize("lengths", [((0, 0), (30, 20)), ((30, 20), (0, 0))])
def test_nobody_to_attend(lengths, monkeypatch):
    """Without queries, or keys, gradients are 0, though the bounds on lengths are not."""
    c = Case((1, 128, 2, EACH), lengths=lengths)
    call = call_of(c)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape[0] if len(shape) == 1 else shape, torch.nan, **how))
    kernel = Emulator(MODES[0], 0).load(*SOURCES)
    kernel.statistics = statistics
    p, x = problem_of(
        "backward", How(c.mask, None, None, None, False, False, ""), packed_sizes(call.q, call.k, call.v, 2, 64, 64), Operands(0.2, *call.offsets), call.q
    )
    out, lse = torch.zeros_like(call.q), torch.full((call.q.shape[1], len(call.q)), -torch.inf)
    grads = kernel.launch(p, kernel.Tiles(64, 128, 2, 1, EACH), call.q, call.k, call.v, out, lse, out, None, x)
    assert all(not grad.any() for grad in grads[:3])


@pytest.mark.parametrize("lengths", [(0, 20), (20, 0)])
def test_nobody_to_look_up(lengths):
    """Nor has what would be looked up by distance a gradient other than 0."""
    c = Case((1, 128, 2, EACH), *lengths, score=RelativeBias(torch.randn(2, 9).requires_grad_()))
    call = call_of(c)
    for grad in emulated(c, call, torch.zeros_like(call.q), None, MODES[0]):
        assert grad.shape in (call.q.shape, call.k.shape, c.score.table.shape) and not grad.any()


@pytest.mark.parametrize(("dim", "deterministic"), [(64, False), (64, True), (256, False)])
def test_nan_stays_in_its_sequence(dim, deterministic):
    torch.manual_seed(0)
    c = Case((1, 128, 2, EACH), lengths=(70, 90, 60), dim=dim, deterministic=deterministic)
    call = call_of(c)
    for t in (call.q, call.k, call.v):
        t[70:160] = torch.nan
    d_out = torch.randn(*call.q.shape[:-1], c.dim).to(c.dtype)
    for gradient in emulated(c, call, d_out, torch.ones(call.q.shape[1], len(call.q)), MODES[0]):
        assert gradient[70:160].isnan().all()
        assert gradient[:70].isfinite().all()
        assert gradient[160:220].isfinite().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bits_depend_on_neither_run_nor_batch(dim):
    """In all timings, with programs that do one tile or draw several, alone or beside others."""
    torch.manual_seed(0)
    c = Case(APIECE, 200, 200, dim=dim, batch=2, deterministic=True)
    call = call_of(c)
    d_out, d_lse = torch.randn_like(call.q), torch.ones(2, 2, 200)
    first = emulated(c, call, d_out, d_lse, MODES[0])
    again = emulated(c._replace(tiles=DRAWN), call, d_out, d_lse, MODES[1], seed=1)
    alone = call._replace(q=call.q[1:], k=call.k[1:], v=call.v[1:])
    alone = emulated(c._replace(batch=1), alone, d_out[1:], d_lse[1:], MODES[2])
    for one, other, row in zip(first, again, alone, strict=True):
        assert torch.equal(one, other) and torch.equal(one[1:], row)


def test_bits_do_not_depend_on_other_sequences():
    torch.manual_seed(0)
    c = Case(APIECE, lengths=(150, 70, 130), dim=128, deterministic=True)
    call = call_of(c)
    d_out, d_lse = torch.randn_like(call.q), torch.ones(call.q.shape[1], len(call.q))
    last = slice(220, 350)
    alone = call_of(c._replace(lengths=(130,)))._replace(q=call.q[last], k=call.k[last], v=call.v[last])
    alone = emulated(c._replace(lengths=(130,)), alone, d_out[last], d_lse[:, last].contiguous(), MODES[0])
    for together, row in zip(emulated(c, call, d_out, d_lse, MODES[0]), alone, strict=True):
        assert torch.equal(together[last], row)


class Bug(NamedTuple):
    """What is wrong, a case in which it shows, how the sources differ, and with which seed of the timings."""

    what: str
    case: Case
    edits: tuple[tuple[str, str], ...]
    seed: int = 0


FULL = Case((1, 128, 2, FEW), 400, 260, Full(), heads=(4, 4))
WINDOW = Case((1, 128, 2, EACH), 300, 300, Window(100))
NARROW = Case((1, 128, 2, EACH), 300, 300, Window(100), dim=128, heads=(1, 1))  # tiles of 64 queries, of which some see one warpgroup's keys alone
PACKED = Case((1, 128, 2, EACH), lengths=(70, 5, 150), used=(60, 5, 100), mask=Full())
WIDE = Case((1, 128, 2, EACH), 700, 700, Window(330), heads=(1, 1))  # has tiles that it shows whole
TURNS = Case((1, 128, 2, FEW), 500, 500, dim=128, heads=(3, 3))
HIDDEN = Case((1, 128, 2, FEW), lengths=(100, 20, 0, 0, 0), mask=Full(), heads=(8, 4))  # three places without a tile behind the two of each head
WAIT_FOR_DV = "            dv, left_p, dq = warpgroup_mma_wait(1, deps=[dv, left_p, dq])\n"
LET_OUTPUTS_GO = "        release(index, OUTPUTS_LET_GO, READERS)\n"
WAIT_FOR_DK = "            dk, left = warpgroup_mma_wait(0, deps=[dk, left])\n"
LET_QUERIES_GO = "        release(index, QUERIES_LET_GO, READERS)\n"
LET_KEYS_GO = "            release(0, KEYS_LET_GO, READERS)\n"
DELTA = "start(zeros, deltas.index(index), gl.SliceLayout(0, layout))"
WAIT_FOR_OTHER = "        arrive_and_wait((step + 1) % 2, WRITTEN + 2 * (1 - GROUP), 256)\n"
MAY_TELL = "    mbarrier.wait(empty.index(index), turn // 2 % 2 ^ 1)\n"
IS_TOLD = "    if N == 0:\n        mbarrier.wait(full.index(index), turn // 2 % 2)\n"
IS_HEARD = "    mbarrier.arrive(empty.index(turn % 2), count=1)\n"
TELL = "        tell(message, turn, (number,))\n        turn += 1\n"
TELL_NO_END = f"        if number < sizes[0]:\n    {TELL}"
BLIND_DS = "            ds = gl.zeros([64, M], queries.dtype, s_layout)\n"
LAST_PRODUCT = "            dq = warpgroup_mma_wait(0, deps=[_queries(written, step, k_tile"
MEETS = "            clear_unseen_of(far, other, steps, map_strides, STREAM, GROUP)\n            arrive_and_wait(0, MEETING, 256)\n"
BUGS = [
    Bug("distances are the first warpgroup's", BY_DISTANCE, (("h, tile_n * N + GROUP * 64, len_k, M", "h, tile_n * N, len_k, M"),)),
    Bug("distances are the first head's", BY_DISTANCE, (("distances_of(call[2][1], b, h, ", "distances_of(call[2][1], b, h * 0, "),)),
    Bug("sums by distance are the first warpgroup's", BY_DISTANCE, (("h, place[2] * C.n + GROUP * 64, place[6], m", "h, place[2] * C.n, place[6], m"),)),
    Bug("sums by distance are the first head's", BY_DISTANCE, (("place[0], h, place[2] * C.n", "place[0], h * 0, place[2] * C.n"),)),
    Bug("sums by distance are another tile's", BY_DISTANCE, (("place[6], m, ds", "place[6], m + 64, ds"),)),
    Bug("sums by distance are a row's", BY_DISTANCE, (("cols // 8 - rows // 32 * 4", "cols // 8"),)),
    Bug("a bias is not waited for", PAIRS[0], (("        mbarrier.wait(full.index(0), phase)\n        zeros", "        zeros"),)),
    Bug("a bias is never let go", PAIRS[0], (("        mbarrier.arrive(empty.index(0), count=1)\n", ""),)),
    Bug("a bias is the first warpgroup's keys'", PAIRS[0], (("tile_n * C.n + warpgroup * 64]", "tile_n * C.n]"),)),
    Bug("a bias is the head before's", PAIRS[0], (("head * OF_HEAD, (m", "kv_head * group * OF_HEAD, (m"),)),
    Bug("dO is never released", FULL, ((LET_OUTPUTS_GO, ""),)),
    Bug("P goes not through the wait for dV", FULL, ((WAIT_FOR_DV, "            dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])\n"),)),
    Bug("Q is released before dK is there", FULL, ((f'        if PART != "blind":\n{WAIT_FOR_DK}{LET_QUERIES_GO}', LET_QUERIES_GO + WAIT_FOR_DK[4:]),)),
    Bug("Q is never released", FULL, ((LET_QUERIES_GO, ""),)),
    Bug("Q is not waited for", FULL, (("        mbarrier.wait(q_full.index(index), phase)\n", ""),)),
    Bug("dO is not waited for", FULL, (("            mbarrier.wait(do_full.index(index), phase)\n            dp", "            dp"),)),
    Bug("K is not waited for", FULL, (("            mbarrier.wait(full, tiles % 2)\n", ""),)),
    Bug("the next K is not waited for", FULL, (("mbarrier.wait(full, tiles % 2)", "mbarrier.wait(full, 0)"),)),
    Bug("K is released before the last dQ", FULL, ((LET_KEYS_GO, ""), (LAST_PRODUCT, LET_KEYS_GO + LAST_PRODUCT))),
    Bug("K is never released", FULL, ((LET_KEYS_GO, ""),)),
    Bug("the last dQ of a tile is left out", FULL, (("            _add(dq, dq_desc, dq_buffer, row, m, place, C, GROUP)\n", ""),)),
    Bug("the other's dS is not waited for", FULL, ((WAIT_FOR_OTHER, ""),)),
    Bug("the other's last dS is not waited for", FULL, ((f"    {WAIT_FOR_OTHER[:-1]}  # one", "            # one"),)),
    Bug("nobody begins", FULL, (("256)\n    first_turn(GROUP, C.partners)\n", "256)\n"),)),
    Bug("dS has two buffers", FULL, (("BUFFERS = gl.constexpr(3)", "BUFFERS = gl.constexpr(2)"),)),
    Bug("dS is read without a fence", FULL, (("store(ds)\n        fence_async_shared()\n", "store(ds)\n"),)),
    Bug("dQ's buffer is rewritten before it has left", FULL, (("        tma.store_wait(0)\n        buffer.reshape", "        buffer.reshape"),)),
    Bug("dV's buffer is rewritten before it has left", FULL, (("            tma.store_wait(0)  # so has dV\n", ""),)),
    Bug("dV leaves without a fence", FULL, (("    else:\n        fence_async_shared()\n        tma_store", "    else:\n        tma_store"),)),
    Bug("the last dK is not waited for", FULL, (("    tma.store_wait(0)\n\n\n@gluon.jit(do_not", "\n\n@gluon.jit(do_not"),)),
    Bug("dQ lies in another order", FULL, ((".permute((0, 1, 3, 2, 4)).reshape([ROWS, COLS]))", ".reshape([ROWS, COLS]))"),)),
    Bug("delta is left out", FULL, ((DELTA, "gl.zeros([64, M], gl.float32, layout)"),)),
    Bug("a causal mask off by one", Case((1, 128, 2, EACH), 200, 200), (("rows - (shift + C.right + other)", "rows - (shift + C.right + 1 + other)"),)),
    Bug("a warpgroup's first queries are taken to see none of its keys", NARROW, (
        ("early = gl.minimum(gl.maximum(", "early = gl.minimum(1 + gl.maximum("),
    )),
    Bug("a warpgroup's last queries are taken to see none of its keys", NARROW, (("late = gl.minimum(gl.maximum(", "late = gl.minimum(1 + gl.maximum("),)),
    Bug("of who is blind to a tile dS is what it was", NARROW, ((BLIND_DS, BLIND_DS.replace("zeros([64, M]", "full([64, M], 1.0")),)),
    Bug("who is blind to a tile does not hand its turn over", NARROW, ((f"            turn_over(GROUP, C.partners)\n{BLIND_DS}", BLIND_DS),)),
    Bug("a window off by one", WINDOW, (("(shift - C.left - 1 + other)", "(shift - C.left + other)"),)),
    Bug("tiles past a window's whole ones are taken from behind its start", WIDE, (("gl.where(x < masked, bare, before - masked)", "0"),)),
    Bug("another tile is told than is copied", TURNS, (("values[n], gl.int32", "values[n] + 1, gl.int32"),)),
    Bug("a tile is drawn twice", TURNS, (("gl.num_programs(0) + gl.inline_asm", "gl.num_programs(0) - 1 + gl.inline_asm"),)),
    Bug("the next tile is told before the one before was heard", HIDDEN, ((MAY_TELL, ""),)),
    Bug("the next tile is not waited for", HIDDEN, ((IS_TOLD, ""),)),
    Bug("nobody says that the next tile was heard", TURNS, ((IS_HEARD, "    pass\n"),)),
    Bug("the end is never told", TURNS, ((f"{TELL}\n\n@gluon", f"{TELL_NO_END}\n\n@gluon"),)),
    Bug("queries of the next sequence are not cleared", PACKED, (("            if m + M > place[4]:", "            if m < 0:"),)),
    Bug("keys of padding that pass by are not cleared", APART_HELD, (("clear_unseen_of(far, other, steps, map_strides, STREAM, GROUP)", "pass"),)),
    Bug("nobody waits until keys of padding that pass by are cleared", APART_HELD, ((MEETS, MEETS.partition("            arrive")[0]),), 2),
    Bug("weights of padding have slopes where nothing is summed in memory", APART_HELD, (("if EDGE and C.padded:", "if EDGE and C.of_keys and C.dim < 8:"),)),
    Bug("keys of padding are not cleared", HELD, (("clear_unseen(k_tile.reshape([N, D]), place, group, map_ptr, map_strides, N, GROUP)", "pass"),)),
    Bug("gradients of weights of padding are not 0", HELD, (("if C.padded and EDGE:", "if C.padded and C.far:"),)),
    Bug("keys of the next sequence are not cleared", PACKED, (("            if tile_n * N + N > len_k:", "            if tile_n < 0:"),)),
    Bug("a sequence's LSE is taken from a multiple of four", PACKED, (("late = m % PHASES", "late = m % 1"),)),
]  # fmt: skip

APART = Case(DRAWN, 260, 200, Full(), dim=256, heads=(4, 2))
APART_CAUSAL, APART_WINDOW = Case(APIECE, 300, 300, dim=256), Case(APIECE, 700, 700, Window(330), dim=256, heads=(1, 1))
APART_EACH = Case(APIECE, 130, 130, Full(), dim=256, heads=(12, 12))  # V comes late by itself where it is the first of a program
APART_PACKED = PACKED._replace(dim=256)
WAIT_FOR_DP = "            dp = warpgroup_mma_wait(len(CUTS[C.columns]), deps=[dp])\n"
LET_FIRST_GO = "            if not C.values:\n                release(first, SLOTS_LET_GO, READERS)\n"
WAIT_FOR_SUM = "        if C.slopes:\n            of_d = warpgroup_mma_wait(0, deps=of_d + (left,))[: len(of_d)]  # noqa: RUF005 (device code)\n"
LET_SECOND_GO = "        release(second, SLOTS_LET_GO, READERS)\n"
WAIT_FOR_SECOND = "            mbarrier.wait(full.index(second), second_phase)\n"
LEAVE = "            tma.store_wait(0)\n"
LET_OWN_GO = "            release(0, OWN_LET_GO, READERS)\n"
LET_OWN_V_GO = "            if C.slopes and not C.values:\n                release(0, OWN_V_LET_GO, READERS)\n"
ZERO = "            of_v, of_d = (), ()\n"
WAIT_FOR_OWN = "    if tiles > 0:\n        arrive_and_wait(0, OWN_LET_GO, READERS)\n"
UNSEEN = Case(DRAWN, 130, 400, Causal(align="top_left"), dim=256, heads=(1, 1))  # nothing streams past the last keys, whose copy waits for nothing else
MEETS_PACKED = "                    clear(far_v, length - other, STREAM, GROUP)\n                arrive_and_wait(0, MEETING, 256)\n"
THEN = "stats, C)\n                        cursor = _fill(ring, cursor, far_desc"
APART_TURNS = HIDDEN._replace(tiles=DRAWN, dim=256)
BUGS += [
    Bug("dO and V are released before dP is there", APART, ((WAIT_FOR_DP + LET_FIRST_GO, LET_FIRST_GO + WAIT_FOR_DP),)),
    Bug("dO and V are never released", APART, ((WAIT_FOR_DP + LET_FIRST_GO, WAIT_FOR_DP),)),
    Bug("a ring's second tile is released before the sum is there", APART, ((WAIT_FOR_SUM + LET_SECOND_GO, LET_SECOND_GO + WAIT_FOR_SUM),)),
    Bug("a ring's second tile is never released", APART, ((LET_SECOND_GO, ""),)),
    Bug("dS goes not through the wait for the sum", APART, (("deps=of_d + (left,))", "deps=of_d)"),)),
    Bug("a ring's first tile is not waited for", APART, (("        mbarrier.wait(full.index(first), first_phase)\n", ""),)),
    Bug("Q and K are not waited for", APART, ((f"{WAIT_FOR_SECOND}            s = _scores", "            s = _scores"),)),
    Bug("dO is not waited for in dV's pass", APART, ((f"{WAIT_FOR_SECOND}        if C.values:", "        if C.values:"),)),
    Bug("the tile that stays is not waited for", APART, (("            mbarrier.wait(own_full, tiles % 2)\n", ""),)),
    Bug("the next tile that stays is not waited for", APART, (("mbarrier.wait(own_full, tiles % 2)", "mbarrier.wait(own_full, 0)"),)),
    Bug("the tile that stays is overwritten in use", APART, ((WAIT_FOR_OWN, ""), (LET_OWN_GO, ""))),
    Bug("the V that stays is not waited for", APART_EACH, (("                mbarrier.wait(own_v_full, tiles % 2)\n", "                pass\n"),)),
    Bug("the V that stays is let go at once", UNSEEN, ((LET_OWN_V_GO, ""), (ZERO, LET_OWN_V_GO + ZERO))),
    Bug("the tile that stays is let go before its gradient has left", APART, ((LEAVE + LET_OWN_GO, LET_OWN_GO + LEAVE),)),
    Bug("both warpgroups take the same keys", APART, (("    mine = firsts.index(GROUP)", "    mine = firsts.index(0)"),)),
    Bug("both warpgroups take the same values", APART, (("mine_v = seconds.index(GROUP)", "mine_v = seconds.index(0)"),)),
    Bug("the other heads of a group are left out", APART, (("sizes[4] if C.of_keys else 1)", "1)"), ("start_q, group\n", "start_q, group * 0 + 1\n"))),
    Bug("LSE and delta change places", APART, ((f"delta_desc, {THEN}", f"lse_desc, {THEN}"),)),
    Bug("dQ forgets delta", APART, (("zeros - values[:, None]", "zeros - 0 * values[:, None]"),)),
    Bug("nobody begins beyond 128", APART, (("0, 0, 0\n    first_turn(GROUP, C.partners)\n", "0, 0, 0\n"),)),
    Bug("dQ forgets the tiles behind those that need no mask", APART_CAUSAL, (("masked = before + last - outer", "masked = before"),)),
    Bug("dQ takes tiles behind a window's whole ones from before", APART_WINDOW, (("gl.where(x < masked, bare, before - masked)", "0"),)),
    Bug("rows of the next sequence are not cleared", APART_PACKED, (("clear(far, length - other", "clear(far, STREAM"),)),
    Bug("nobody waits until rows of the next sequence are cleared", APART_PACKED, ((MEETS_PACKED, MEETS_PACKED.partition("                arrive")[0]),)),
    Bug("dP of the next sequence is used", APART_PACKED, (("                ds = gl.where(there[None, :], ds, 0.0)\n", ""),)),
    Bug("beyond 128, a sequence's LSE is taken from a multiple of four", APART_PACKED, (("late = at % PHASES", "late = at % 1"),)),
    Bug("beyond 128, another tile is told than is copied", APART, (("values[n], gl.int32", "values[n] + 1, gl.int32"),)),
    Bug("beyond 128, a tile is drawn twice", APART, (("gl.num_programs(0) + gl.inline_asm", "gl.num_programs(0) - 1 + gl.inline_asm"),)),
    Bug("beyond 128, the next tile is told before the one before was heard", APART_TURNS, ((MAY_TELL, ""),)),
    Bug("beyond 128, the next tile is not waited for", APART_TURNS, ((IS_TOLD, ""),)),
    Bug("beyond 128, nobody says that the next tile was heard", APART_TURNS, ((IS_HEARD, "    pass\n"),)),
    Bug("beyond 128, the end is never told", APART_TURNS, ((f"{TELL}\n\n# ----", f"{TELL_NO_END}\n\n# ----"),)),
    Bug("what left by threads is overwritten without a fence", APART_TURNS, ((f"    fence_async_shared()\n{LEAVE}", f"    pass\n{LEAVE}"),)),
]  # fmt: skip

BOTH = Case(DRAWN, 260, 200, Full(), dim=128, heads=(4, 2), deterministic=True)
TWO_CUTS = Case(APIECE, 70, 130, dim=192, dim_v=128, score=Softcap(2.0))
WAIT_FOR_BOTH = "            of_v = warpgroup_mma_wait(len(of_d), deps=of_v + (left_v,))[: len(of_v)]  # noqa: RUF005 (device code)\n"
LET_DO_GO = "            release(first, SLOTS_LET_GO, READERS)\n"
LET_LAST_V_GO = "            if C.slopes and C.values:\n                release(0, OWN_V_LET_GO, READERS)\n"
BUGS += [
    Bug("dO is released before dV beside dK is there", BOTH, ((WAIT_FOR_BOTH + LET_DO_GO, LET_DO_GO + WAIT_FOR_BOTH),)),
    Bug("dO is never released beside dK", BOTH, ((WAIT_FOR_BOTH + LET_DO_GO, WAIT_FOR_BOTH),)),
    Bug("P goes not through the wait for dV beside dK", BOTH, (("len(of_d), deps=of_v + (left_v,))", "len(of_d), deps=of_v)"),)),
    Bug("V is let go before dV has left through it", BOTH, ((LET_LAST_V_GO, ""), (LEAVE, LET_LAST_V_GO + LEAVE))),
    Bug("dO of the next sequence is not cleared beside Q", PACKED._replace(deterministic=True), (("clear(far_v, length - other", "clear(far_v, STREAM"),)),
    Bug("a head's last columns are multiplied by the first", TWO_CUTS, (("far.slice(128 * n, EACH[n]", "far.slice(0, EACH[n]"),)),
    Bug("a head's first columns are left out of its scores", TWO_CUTS, (("use_acc=n > 0 or not FRESH", "use_acc=not FRESH"),)),
    Bug("dK's last columns lie over the first", TWO_CUTS, (("flat.slice(128 * n, sums", "flat.slice(0, sums"),)),
    Bug("dP is not waited for beside scores of two products", TWO_CUTS, (("wait(len(CUTS[C.columns])", "wait(1 + len(CUTS[C.columns])"),)),
    Bug("both warpgroups' dV leave through the same tile", BOTH, (("seconds.index(GROUP), place", "seconds.index(0), place"),)),
]  # fmt: skip


BUGS += [
    Bug("a dropped weight has no delta", DROPS, (("- gl.abs(p) * delta", "- gl.maximum(p, 0.0) * delta"),)),
    Bug("dropped weights are in dV", DROPS, (("as_pairs(p, queries.dtype, True)", "as_pairs(gl.abs(p), queries.dtype, True)"),)),
    Bug("dV does not grow", DROPS, (("(dv,), growth(dropout, C),", "(dv,), 1.0,"),)),
    Bug("dK does not grow", DROPS, (("call[3] * growth(dropout, C)", "call[3]"),)),
    Bug("queries drop as keys do", DROPS, (("kept_bits(m, drops, M, True,", "kept_bits(m, drops, M, False,"),)),
    Bug("both warpgroups drop the same keys", DROPS, (("tile_n * N + GROUP * 64, b * (sizes[3]", "tile_n * N, b * (sizes[3]"),)),
    Bug("a head's weights are dropped as the group's first one's", DROPS, (("(sizes[3] * group) + h, C)", "(sizes[3] * group) + kv_head * group, C)"),)),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    for mode in MODES:
        try:
            check(bug.case, mode, edits=bug.edits, seed=bug.seed)
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug.what}")
