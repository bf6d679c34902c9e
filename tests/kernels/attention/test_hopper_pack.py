"""The heads of a group in the rows of a tile (PackGQA): the kernel's sources in each timing of the emulator, and with bugs planted; and, on a GPU."""

import os

import pytest
import test_hopper_emulated as plain
import test_hopper_paged as paged
import torch
from test_hopper_emulated import BF16, EACH, FEW, FP16, Bug, Case

import onchip
from gluon_emulator import timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Document, Full, MaskMod, Window
from onchip.core.problem import Attention
from onchip.core.scores import ALiBi, Bias, ScoreMod, Softcap, chain

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")

SLOPES, CURVES = torch.tensor([0.5, 0.25, 1.0, 0.75, 0.125, 0.375]), torch.randn(6, 200)
BY_HEAD = ScoreMod(lambda s, b, h, i, j: s + CURVES[h, i] - h * j * 0.01)  # what a query and its head look up, and arithmetic of all three
HEADS_ALONE = ScoreMod(lambda s, b, h, i, j: h.float() * 0.5)
PACKED = [  # tiles with a fifth number: heads in their rows
    Case((1, 64, 2, EACH, 2), 1, 200, heads=(4, 2), batch=2),
    Case((1, 64, 2, FEW, 4), 5, 150, Full(), heads=(8, 2), batch=3),
    Case((1, 64, 2, EACH, 4), 17, 90, heads=(6, 2)),
    Case((2, 64, 2, EACH, 4), 64, 200, heads=(6, 2), dtype=FP16),
    Case((2, 64, 3, FEW, 8), 17, 130, heads=(8, 1), batch=2),
    Case((1, 128, 2, FEW, 4), 64, 200, dim=128, heads=(8, 2)),
    Case((2, 128, 2, EACH, 8), 33, 150, Full(), dim=128, heads=(5, 1)),
    Case((2, 64, 2, FEW, 2), 70, 130, dim=256, heads=(2, 1)),
    Case((3, 128, 2, FEW, 2), 130, 200, Full(), heads=(2, 1)),
    Case((1, 64, 1, EACH, 64), 3, 100, heads=(40, 1)),
    Case((2, 64, 2, EACH, 2), 130, 70, heads=(2, 1)),
    Case((1, 64, 2, EACH, 4), 17, 300, Window(40), heads=(6, 2)),
    Case((2, 64, 2, EACH, 2), 100, 200, Window(70, 20), dim=128, dim_v=64, heads=(4, 2)),
    Case((1, 64, 2, EACH, 4), 17, 90, heads=(6, 2), sinks=True),
    Case((1, 64, 2, EACH, 4), 17, 200, Full(), heads=(6, 2), batch=2, score=Softcap(2.0)),
    Case((1, 64, 2, EACH, 4), 17, 200, heads=(6, 2), score=ALiBi(SLOPES), sinks=True),
    Case((2, 64, 2, EACH, 4), 64, 130, dim=128, heads=(6, 2), score=chain(None, ALiBi(SLOPES), 2.0)),
    Case((1, 64, 2, EACH, 4), 17, 150, heads=(6, 2), score=BY_HEAD),
    Case((1, 64, 2, EACH, 2), 17, 70, Full(), heads=(2, 1), score=HEADS_ALONE),
    Case((1, 64, 2, EACH, 4), 17, 200, Causal() & Document(torch.arange(200) // 60), heads=(6, 2), score=ALiBi(SLOPES)),
    Case((2, 64, 2, FEW, 2), 64, 200, Document(torch.arange(200) // 60), heads=(4, 2), batch=2),
    Case((1, 64, 2, EACH, 4), 17, 400, Full(), heads=(3, 1), steep=400.0),
    Case((1, 64, 2, EACH, 4), lengths=(17, 0, 1, 64), heads=(6, 2)),
    Case((2, 64, 2, FEW, 4), lengths=((5, 40, 1), (150, 90, 7)), mask=Full(), dim=128, heads=(8, 2), sinks=True),
    Case((1, 64, 2, EACH, 8), lengths=((17, 9), (100, 30)), used=((12, 9), (90, 30)), heads=(8, 1), score=ALiBi(torch.arange(8) * 0.1)),
    Case((2, 64, 2, EACH, 4), lengths=((17, 40), (100, 60)), dim=256, heads=(3, 1), mask=Window(30)),
    Case((1, 64, 2, EACH, 2), lengths=((17, 40), (200, 60)), heads=(4, 2), mask=Document(torch.arange(200) // 60)),
]
PAGED = [
    paged.Case((1, 64, 2, EACH, 4), 16, (130, 0, 61), 5, heads=(6, 2)),
    paged.Case((2, 64, 2, FEW, 4), 128, (200, 90), 64, dim=128, heads=(8, 2), sinks=True),
    paged.Case((1, 64, 2, EACH, 8), 8, (100, 33), 1, heads=(8, 1), score=ALiBi(torch.arange(8) * 0.1)),
    paged.Case((1, 64, 2, EACH, 2), 16, (400, 90, 33), 17, Window(50), heads=(4, 2)),
]


@pytest.fixture(autouse=True)
def filled():
    """Memory that nobody has written holds NaN, and lists in it name nothing that there is."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("case", "mode"), timings(PACKED + PAGED, [*PACKED[:5], PACKED[23], *PAGED[:2]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    if isinstance(case, paged.Case):
        paged.test_emulated(case, mode)
    else:
        plain.test_emulated(case, mode)


# ---- with a bug

THREE, TWO_GROUPS, TOGETHER, WITH_SINKS, WITH_SLOPES, MASKED = PACKED[2], PACKED[3], PACKED[22], PACKED[13], PACKED[15], PACKED[19]
LOOKED_UP = PACKED[17]
BUGS = [
    Bug("rows are heads first, and queries change with each", THREE, (
        ("one = rows % C.pack", "one = rows // C.own"), ("C.own + rows // C.pack, len_q)", "C.own + rows % C.own, len_q)"),
    )),
    Bug("a tile's rows are as many queries", THREE, (("        return self.groups * self.own\n", "        return self.groups * 64\n"),)),
    Bug("the second warpgroup's rows begin at query 64", TWO_GROUPS, (("GROUP * C.own + rows // C.pack", "GROUP * 64 + rows // C.pack"),)),
    Bug("the second warpgroup is given the first one's queries", TWO_GROUPS, (("tile_m * C.m + group * C.own, C)", "tile_m * C.m, C)"),)),
    Bug("the second warpgroup's output goes where the first one's does", TWO_GROUPS, (
        ("tile_m * C.m + GROUP * C.own, C), buffer)", "tile_m * C.m, C), buffer)"),
    )),
    Bug("all key heads are the first one's", THREE, (("if C.pack == 1:\n                kv_head", "if C.pack:\n                kv_head"),)),
    Bug("a group of three has four heads", THREE, (("head = head * group + one", "head = head * C.pack + one"),)),
    Bug("a row of no head is stored", THREE, (("gl.where(one < group, ", "gl.where(one < C.pack, "),)),
    Bug("a row of no head is stored in a packed batch", TOGETHER, (("gl.where(one < group, ", "gl.where(one < C.pack, "),)),
    Bug("queries lie in memory as the next group's heads do", THREE, (
        ("t.unflatten(1, (kv_heads, -1)).transpose(2, 3)", "t.unflatten(1, (-1, kv_heads)).transpose(1, 2).transpose(2, 3)"),
    )),
    Bug("a sink is that of the group's first head", WITH_SINKS, (("sinks_ptr + head, mask", "sinks_ptr + place[1] * sizes[4], mask"),)),
    Bug("sinks behind the last one are read", WITH_SINKS, (("mask=None if C.pack == 1 else rows < len_q)", "mask=None)"),)),
    Bug("a score's head is that of the keys", LOOKED_UP, (("b, tall(head, C), len_q", "b, place[1], len_q"),)),
    Bug("what rows decide is that of the keys' head", WITH_SLOPES, (("of_rows(rows, b, head,", "of_rows(rows, b, rows * 0 + place[1],"),)),
    Bug("a map is of tiles of as many queries as rows", MASKED, (("x, shape.m, tiles.n", "x, 64 * tiles.groups, tiles.n"),)),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    plain.test_a_planted_bug_shows(bug)


# ---- which problems


SHORT = Attention("prefill", 64, 16, 4096, 32, 8, 128, BF16, Causal())
TWO, BLIND = Document(torch.zeros(4096, dtype=torch.int64)).static(), MaskMod(lambda b, h, i, j: i + h >= j).static()


@pytest.mark.parametrize(("changed", "groups", "pack"), [
    ({}, 1, 4), ({"len_q": 17}, 2, 4), ({"len_q": 64}, 2, 4), ({"len_q": 64, "batch": 2}, 2, 4), ({"len_q": 130}, 2, 4), ({"len_q": 128}, 2, 1),
    ({"len_q": 4000}, 2, 1), ({"len_q": 4096}, 2, 1), ({"heads": 8}, 2, 1), ({"heads": 24}, 1, 4), ({"heads": 40}, 2, 8), ({"heads": 1024}, 2, 1),
    ({"dim": 64, "mask": Full()}, 1, 4), ({"dim": 64, "mask": Full(), "len_q": 64}, 2, 4), ({"dim": 64, "mask": Full(), "len_q": 4096}, 3, 1),
    ({"op": "decode", "keys": "paged", "page": 16}, 1, 4), ({"mask": Window(100)}, 1, 4), ({"mask": TWO}, 1, 4), ({"mask": BLIND}, 2, 1),
    ({"score": ALiBi(SLOPES).static()}, 1, 4), ({"score": Bias(torch.zeros(32, 1, 4096)).static()}, 2, 1),
    ({"score": Bias(torch.zeros(16, 4096)).static()}, 2, 1), ({"extras": ("batch_invariant",)}, 1, 4),
    ({"keys": "packed", "tokens": 64 * 16}, 1, 4), ({"keys": "packed", "tokens": 64 * 16, "len_q": 1000}, 2, 4),
    ({"extras": ("dropout",)}, 2, 1), ({"dim": 64, "mask": Full(), "len_q": 4096, "extras": ("dropout",)}, 2, 1),
    ({"keys": "packed", "tokens": 64 * 512, "len_q": 1000}, 2, 1), ({"keys": "packed", "tokens": 64 * 16, "extras": ("batch_invariant",)}, 2, 1),
])  # fmt: skip
def test_who_packs(changed, groups, pack):
    """Where tiles of one head would be part empty, and nothing is read by one row's head and key. Where weights are dropped no third warpgroup has room."""
    hopper_prefill = pytest.importorskip("onchip.kernels.attention.hopper_prefill")
    (tiles,) = hopper_prefill.configs(SHORT._replace(**changed), GPUS["H200"])
    assert (tiles.groups, tiles.pack) == (groups, pack)
    assert (f"tiles of {64 * groups // pack} queries x {pack} heads" in str(tiles)) == (pack > 1)


# ---- on a GPU


HOW = {  # {name: a device and heads -> arguments}
    "causal": lambda at, heads: {"mask": Causal()},
    "window": lambda at, heads: {"mask": Window(90, 20), "softcap": 2.0},
    "alibi": lambda at, heads: {"mask": Causal(), "score": ALiBi(ALiBi.slopes_of(heads, at)), "sinks": torch.randn(heads, device=at)},
    "documents": lambda at, heads: {"mask": Causal() & Document(torch.arange(300, device=at) // 70), "sinks": torch.randn(heads, device=at)},
}


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("batch", [2, 70])
@pytest.mark.parametrize(("heads", "len_q", "dim"), [((4, 2), 1, 128), ((6, 2), 17, 64), ((8, 2), 40, 128), ((10, 2), 20, 256), ((16, 2), 40, 128)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_on_a_gpu(packed, heads, len_q, dim, batch, name, device):
    how = {"return_lse": True} | HOW[name](device, heads[0])
    queries, keys = (torch.tensor([n, n // 3][: 1 + packed], device=device).repeat(batch // (1 + packed)) for n in (len_q, 300))
    q, k, v = (torch.randn(int(n.sum()), h, dim, device=device).to(BF16) for n, h in zip((queries, keys, keys), heads[:1] + heads[1:] * 2, strict=True))

    def attend(q, k, v, kernel):
        if not packed:
            return onchip.attention(*(x.unflatten(0, (batch, -1)) for x in (q, k, v)), **how, kernel=kernel)
        offsets = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (queries, keys))
        return onchip.attention_packed(q, k, v, *offsets, longest=(len_q, 300), **how, kernel=kernel)

    with onchip.record() as decisions:
        result = attend(q, k, v, "hopper_prefill")
    assert decisions[0].config.pack >= heads[0] // heads[1]
    for ours, low, truth in zip(result, attend(q, k, v, "reference"), attend(q.double(), k.double(), v.double(), "reference"), strict=True):
        beside = truth + how.get("softcap", 0.0) * 2**-11 * max(1.0, truth.nan_to_num(0, 0, 0).abs().max().item())  # as much does the hardware's tanh err
        assert_as_good_as_torch(ours, (low, beside), truth)
