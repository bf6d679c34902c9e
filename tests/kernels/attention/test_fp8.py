"""Attention in e4m3: the Hopper kernel on a CPU, in each timing of the emulator of Gluon, judged by float64 on what the inputs stand for."""

import os
from typing import Any, NamedTuple

import pytest
import torch
from test_fp8_backward import turned

import onchip
from gluon_emulator import MODES, Emulator, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scales import SMALLEST, Scales
from onchip.dispatch import select
from onchip.ops.attend import How, dense_sizes, problem_of

E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")
ATTENTION = ("texts", "mods", "tile", "tile_lists", "hopper_dropout", "hopper_tiles", "hopper_parts", "hopper_fp8")
SOURCES = ["onchip.kernels.curves", "onchip.kernels.hopper", *(f"onchip.kernels.attention.{name}" for name in ATTENTION)]
FEW, EACH = 3, 1000  # programs: few, which do several tiles each, or one for each tile


class Case(NamedTuple):
    """A call and the tiles it is run with. `shared`: how many tokens share a scale of q, k and v; 0: all. `parts`: of the keys of the
    last tiles of queries."""

    tiles: tuple[int, ...]  # groups, keys a tile, stages, programs, keys of a piece
    len_q: int
    len_k: int
    mask: Any = Causal()
    dim: int = 64
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    shared: tuple[int, int, int] = (0, 0, 0)
    scale: float | None = None
    parts: int = 1

    def __str__(self):
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name))


class Call(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: Scales


def call_of(c: Case) -> Call:
    """Random numbers in e4m3, and scales about 0.1."""
    lengths, heads = (c.len_q, c.len_k, c.len_k), (c.heads[0], c.heads[1], c.heads[1])
    tensors = (torch.randn(c.batch, n, h, c.dim).mul(10).to(E4M3) for n, h in zip(lengths, heads, strict=True))
    scales = (0.05 + 0.1 * torch.rand(c.batch, h, -(-n // each) if each else 1) for n, h, each in zip(lengths, heads, c.shared, strict=True))
    return Call(*tensors, Scales(*scales))


def emulated(c: Case, call: Call, mode: str, seed=0, edits=()):
    """Output and LSE of the kernel."""
    kernel = Emulator(mode, seed).load(*SOURCES, edits=edits)
    kernel.turned = turned
    p = Attention("prefill", c.batch, c.len_q, c.len_k, *c.heads, c.dim, E4M3, c.mask)
    return kernel.launch(p, kernel.Tiles(*c.tiles)._replace(parts=c.parts), *call[:3], Operands(factor(c), scales=call.scales), True)


def factor(c: Case) -> float:
    return c.dim**-0.5 if c.scale is None else c.scale


def plain(c: Case, call: Call, dtype: torch.dtype):
    """The same in plain torch. In float32 weights are rounded to e4m3, as the kernel's are, and the output to bfloat16."""
    group = c.heads[0] // c.heads[1]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in call[:3])
    q_scale, k_scale, v_scale = (Scales.of_tokens(s, x.shape[2]).to(dtype)[..., None] for s, x in zip(call.scales, (q, k, v), strict=True))
    k, v, v_scale = ((x * s).repeat_interleave(group, 1) for x, s in ((k, k_scale), (v, 1), (v_scale, 1)))
    scores = (q * q_scale) @ k.transpose(2, 3) * factor(c)
    ahead = torch.arange(c.len_k) - torch.arange(c.len_q)[:, None] - c.mask.shift(c.len_q, c.len_k)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if c.mask.right is not None:
        hidden |= ahead > c.mask.right
    if c.mask.left is not None:
        hidden |= -ahead > c.mask.left
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp() * 256
    total, most = weights.sum(-1, keepdim=True), v_scale.amax(2, keepdim=True)
    weights = weights * (v_scale / most).transpose(2, 3)
    if dtype == torch.float32:
        weights = weights.to(E4M3).float()
    out = (weights @ v * (most / total)).nan_to_num(0.0).transpose(1, 2)
    return out.bfloat16() if dtype == torch.float32 else out, scores.logsumexp(-1)


def check(c: Case, call: Call, result) -> None:
    for ours, low, truth in zip(result, plain(c, call, torch.float32), plain(c, call, torch.float64), strict=True):
        assert_as_good_as_torch(ours, low, truth)


CASES = [
    Case((2, 128, 2, FEW), 300, 300, Full()),
    Case((2, 128, 2, FEW), 300, 300, heads=(1, 1)),
    Case((2, 128, 3, EACH), 200, 390, dim=128),
    Case((2, 64, 2, FEW), 140, 140, dim=256, heads=(1, 1)),
    Case((3, 128, 2, FEW), 200, 330, Full(), batch=2),
    Case((1, 128, 2, FEW), 1, 200, Full(), heads=(8, 1)),
    Case((2, 64, 2, EACH), 330, 150),
    Case((2, 128, 2, FEW), 300, 500, Window(100), dim=128, heads=(1, 1)),
    Case((2, 64, 2, EACH), 200, 150, Window(40, 30), heads=(3, 3)),
    Case((2, 128, 2, FEW), 70, 300, Full(), dim=128, shared=(128, 128, 128)),
    Case((2, 128, 2, EACH), 200, 300, shared=(1, 128, 0)),
    Case((2, 64, 2, FEW), 130, 200, Full(), shared=(1, 1, 1)),
    Case((2, 128, 2, EACH), 200, 200, shared=(0, 1, 128)),
    Case((2, 128, 2, EACH), 700, 200, Window(10, align="top_left"), shared=(128, 128, 128)),
    Case((2, 64, 2, EACH), 150, 200, Causal(align="top_left"), shared=(0, 128, 1)),
    Case((2, 64, 2, EACH), 130, 1, Full(), shared=(1, 0, 1)),
    Case((2, 128, 2, FEW), 130, 300, Full(), scale=-0.125),
    Case((2, 128, 2, EACH), 200, 300, shared=(1, 128, 0), scale=-0.01),
    Case((2, 128, 2, FEW), 130, 300, Full(), shared=(128, 128, 1), scale=0.0),
    Case((2, 256, 2, FEW, 64), 300, 700, Full(), dim=128),
    Case((2, 256, 2, EACH, 64), 300, 500, dim=128),
    Case((2, 256, 2, FEW, 32), 300, 900, Window(300, 20), shared=(1, 0, 0)),
    Case((2, 256, 2, 5, 64), 300, 900, Full(), dim=128, heads=(4, 2), parts=3),
    Case((2, 256, 2, 5, 64), 200, 600, Full(), dim=128, batch=4, parts=2),
]


@pytest.mark.parametrize(("case", "mode"), timings(CASES, [*CASES[:5], CASES[9], CASES[12], *CASES[-5:-3], *CASES[-2:]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    call = call_of(case)
    check(case, call, emulated(case, call, mode))


@pytest.mark.parametrize("spread", [1.0, 1e-5])
@pytest.mark.parametrize("share", [128, 1])
def test_tokens_of_zeros(share, spread):
    """They take no digits from the others, however small these are; nor does a scale of 0."""
    c = Case((2, 128, 2, FEW), 130, 300, Full(), shared=(share, share, share))
    call = call_of(c)
    call = call._replace(scales=Scales(*(s * spread for s in call.scales)))
    last = slice(256, None) if share == 128 else slice(299, None)
    for x, scale in zip(call[1:3], call.scales[1:], strict=True):
        x[:, last] = 0
        scale[:, :, -1] = SMALLEST
    check(c, call, emulated(c, call, MODES[0]))
    call.scales.q[:, :, 0] = 0
    for zeros in (-1, slice(None)):  # the last, and all of a head
        call.scales.v[:, :, zeros] = 0
        out, lse = emulated(c, call, MODES[0])
        assert out.isfinite().all() and lse.isfinite().all()


def test_strided_scales():
    """What lies between them is not read."""
    c = Case((2, 64, 2, FEW), 130, 200, Full(), shared=(1, 1, 1))
    call = call_of(c)
    apart = call._replace(scales=Scales(*(torch.stack((s, s * torch.nan), -1)[..., 0] for s in call.scales)))
    assert all(map(torch.equal, emulated(c, apart, MODES[0]), emulated(c, call, MODES[0])))


@pytest.mark.parametrize("tiny", [2.0**-60, 2.0**-95])
@pytest.mark.parametrize("share", [0, 128, 1])
def test_tiny_scales(share, tiny):
    """A user's own are taken as they are, down to SMALLEST_TAKEN; the largest of a head alone is looked at."""
    c = Case((2, 128, 2, FEW), 130, 300, Full(), shared=(share, share, share))
    call = call_of(c)
    for which in (0, 2):
        scales = Scales(*(s * (tiny if i == which else 1) for i, s in enumerate(call.scales)))
        check(c, call._replace(scales=scales), emulated(c, call._replace(scales=scales), MODES[0]))


@pytest.mark.parametrize("bug", [(), (("(largest(scores, below)", "(largest(scores, 0 * below)"),)], ids=["right", "wrong"])
@pytest.mark.parametrize("tiles", [(2, 256, 2, FEW, 64), (1, 64, 2, FEW)], ids=str)
def test_scores_below_zero(tiles, bug):
    """As whole numbers they are in reverse, which shows where a row's largest so far is below 0 too, and nobody looks."""
    c = Case(tiles, 70, 600, Causal(), dim=128, batch=2)
    call = call_of(c)
    call = call._replace(q=call.q.float().abs().to(E4M3), k=(-call.k.float().abs()).to(E4M3))
    call.k[1, 150:160] = call.q[1, :1, :1]  # scores above 0, in the midst of one sequence
    call.k[1, 300:310] = 0
    if bug:
        with pytest.raises(AssertionError):
            check(c, call, emulated(c, call, MODES[0], edits=bug))
    else:
        check(c, call, emulated(c, call, MODES[0]))


# ---- with a bug

WAIT = "        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])  # all but done: its first operand is read from registers, which held the warps up\n"
RELEASE = "        release(vi, 10 + C.k_stages, C.readers)\n        vi, vp = advance(vi, vp, C.stages)\n"
DONE, LET_GO = "        acc = warpgroup_mma_wait(0, deps=[acc])\n", RELEASE + "    return acc, top"
FULL = Case((2, 128, 2, FEW), 260, 700, Full(), heads=(3, 1), shared=(0, 128, 128))
BUGS = {  # what is wrong, and how the sources differ
    "turned tiles are not waited for": (("        mbarrier.wait(v_full.index(vi), vp)\n        if C", "        if C"),),
    "a turned tile is let go before its product is waited for": ((WAIT + RELEASE, RELEASE + WAIT),),
    "keys keep their order": (("return x.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])", "return x"),),
    "the scale of a block is its neighbour's": (("len_k - 1, 0)) // EACH", "len_k - 1, 0)) // EACH * 0"),),
    "V's largest scale is left out": (("inverse = gl.where(total == 0.0, 0.0, most / total)", "inverse = gl.where(total == 0.0, 0.0, 1 / total)"),),
    "the next tile is told before all have heard the one before": (("told = message(C.groups)", "told = message(C.groups - 1)"),),
    "the end is never told": (("    tell(message, turn, (gl.to_tensor(-1),))\n", ""),),
    "the phase of Q is not flipped": (("turn // C.rounds % 2)", "0)"),),
    "weights outgrow e4m3": (("GROWTH = gl.constexpr(0.8)", "GROWTH = gl.constexpr(8.0)"),),
}  # fmt: skip

PIECES = Case((2, 256, 2, FEW, 64), 260, 900, Full(), heads=(3, 1))
SCALED = "        acc = scale_rows(acc, gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent)), C.lazily)\n        total"
BUGS_OF_PIECES = {
    "values are not waited for": (("        mbarrier.wait(v_full.index(vi), vp)\n        tiles", "        tiles"),),
    "values are let go before their products are waited for": ((DONE + LET_GO, LET_GO.replace("    return", DONE + "    return")),),
    "a piece's values are another's": (("i * PIECE % KEYS, PIECE", "0, PIECE"),),
    "what only some rows see is left out": (("at + i * PIECE < ends[1]", "at + i * PIECE < ends[0]"),),
    "what only some rows see is seen by all": (("or n > seen", "or n > seen + 63"),),
    "the output is not scaled where a maximum grew": ((SCALED, "        total"),),
}
BUGS_OF_PARTS = {
    "a part's last keys are left out": (("(part + 1) * (top + 1) // C.parts", "(part + 1) * top // C.parts"),),
    "parts weigh the same": (("tl.exp2((tl.load(lse_ptr + first + s * M) - top) * LOG2E)", "tl.exp2(top * 0)"),),
}


@pytest.mark.parametrize(
    ("case", "bug"),
    [
        *((FULL, bug) for bug in BUGS),
        *((PIECES if "rows see" not in bug else PIECES._replace(mask=Causal(), len_q=250), bug) for bug in BUGS_OF_PIECES),
        *((CASES[-1], bug) for bug in BUGS_OF_PARTS),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(case, bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    call = call_of(case)
    for mode in MODES:
        try:
            check(case, call, emulated(case, call, mode, edits=(BUGS | BUGS_OF_PIECES | BUGS_OF_PARTS)[bug]))
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug}")


# ---- what is chosen

LONG = Attention("prefill", 1, 16384, 16384, 16, 16, 128, E4M3)
CHOSEN = [  # warpgroups, keys a tile, stages, keys of a piece, parts of the last tiles' keys
    (LONG, (2, 256, 2, 64, 5)),
    (LONG._replace(mask=Causal()), (2, 256, 2, 64, 1)),
    (LONG._replace(mask=Window(500)), (2, 128, 3, 0, 1)),
    (LONG._replace(mask=Window(500, None)), (2, 128, 3, 0, 1)),
    (LONG._replace(extras=("key_scales",)), (2, 128, 3, 0, 1)),
    (LONG._replace(extras=("token_scales",)), (2, 256, 2, 64, 5)),  # of queries alone
    (LONG._replace(len_q=4096, len_k=4096), (2, 256, 2, 64, 1)),  # in parts they would take longer
    (LONG._replace(len_q=1024, batch=16), (2, 128, 3, 0, 1)),
    (LONG._replace(len_q=1025, batch=16, mask=Causal()), (2, 256, 2, 64, 1)),
    (LONG._replace(len_q=1024), (1, 128, 3, 0, 1)),
    (LONG._replace(len_q=2048, heads=8, kv_heads=8), (1, 128, 3, 0, 1)),
    (LONG._replace(dim=64), (3, 128, 3, 0, 1)),
    (LONG._replace(dim=64, len_q=4096, mask=Causal()), (2, 128, 3, 0, 1)),
    (LONG._replace(dim=64, len_q=1400), (1, 128, 3, 0, 1)),
    (LONG._replace(dim=256), (2, 128, 2, 0, 1)),
]


@pytest.mark.parametrize(("p", "tiles"), CHOSEN, ids=str)
def test_choice(p, tiles):
    chosen = select(p, GPUS["H200"], "hopper_fp8").config
    assert (chosen.groups, chosen.n, chosen.stages, chosen.piece, chosen.parts) == tiles


def test_multiprocessors_left_to_others_choose_too():
    p = LONG._replace(len_q=1024, mask=Causal())  # 128 tiles of 128 queries
    with onchip.sm_margin(4):
        assert select(p, GPUS["H200"]).config[:4] == (2, 128, 3, 128)


@pytest.mark.parametrize("shared", [(0, 0, 0), (1, 0, 0), (0, 128, 0), (0, 0, 128), (1, 1, 1)], ids=str)
def test_what_is_launched_is_what_explain_says(shared, monkeypatch):
    """And a call's Problem says what its tiles go by."""
    from triton.runtime.jit import JITFunction

    n = [-(-LONG.len_k // each) if each else 1 for each in shared]
    scales = Scales(*(torch.empty(1, 16, count, device="meta") for count in n))
    q = torch.empty(1, LONG.len_q, 16, 128, dtype=E4M3, device="meta")
    p, x = problem_of("prefill", How(Full(), None, None, None, False, False, "auto"), dense_sizes(q, q, q), Operands(0.1, scales=scales), q)
    assert p.extras == ("key_scales",) * any(shared[1:]) + ("token_scales",) * (1 in shared)
    decision, launches = select(p, GPUS["H200"]), []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **rest: launches.append((kernel.__name__, grid, rest.get("C"))))
    tiles = decision.config
    decision.kernel.load()(p, tiles, q, q, q, x, True)
    (shape,) = [shape for name, _, shape in launches if name == "_prefill_fp8"]
    assert (shape.groups, shape.n, shape.stages, shape.piece, shape.parts) == (tiles.groups, tiles.n, tiles.stages, tiles.piece, tiles.parts)
    assert [name for name, *_ in launches] == ["_turn", "_prefill_fp8", *["_join"] * (tiles.parts > 1)]
    if any(shared[1:]):
        assert "128x128 tiles, 2 warpgroups, 3 stages" in str(decision) and "2048 tiles by 132 programs, each drawing its next\n" in str(decision)
    else:
        assert "128x256 tiles in pieces of 64 keys, of scales of heads, " in str(decision)
        assert "2048 tiles by 132 programs, each drawing its next, the keys of the last 68 in 5 parts, joined by a launch behind\n" in str(decision)
