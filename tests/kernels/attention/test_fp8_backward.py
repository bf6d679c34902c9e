"""Gradients in e4m3 and e5m2: the Hopper kernel on a CPU, in each timing of the emulator of Gluon, judged by float64 on what the inputs stand for."""

import os
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch

import onchip
from gluon_emulator import MODES, Emulator, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scales import SMALLEST, SMALLEST_TAKEN, Scales
from onchip.kernels.attention.fp8_operands import Relative

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODULES = ("texts", "mods", "tile", "pairs", "hopper_dropout", "hopper_tiles", "hopper_backward_tiles", "hopper_fp8_backward")
SOURCES = ["onchip.kernels.curves", "onchip.kernels.hopper", *(f"onchip.kernels.attention.{name}" for name in MODULES)]
FEW, EACH = 3, 1000  # programs: few, which do several tiles each, or one for each tile
emulated_only = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call and the tiles it is run with. `shared`: how many tokens share a scale of q, k and v; 0: all."""

    tiles: tuple[int, int, int, int, int, int]  # warpgroups of queries, keys a tile and stages, queries a tile and stages, programs
    len_q: int
    len_k: int
    mask: Any = Causal()
    dim: int = 64
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    shared: tuple[int, int, int] = (0, 0, 0)
    scale: float | None = None
    uneven: float = 1.0  # how much larger than the first token's the last one's gradient is, and than a head's the next one's, in pairs of heads

    def __str__(self):
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name))


class Call(NamedTuple):
    """q, k and v in e4m3 with their scales, and what they are differentiated with."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: Scales
    d_out: torch.Tensor
    d_lse: torch.Tensor


def call_of(c: Case) -> Call:
    """Random numbers, scales about 0.1."""
    lengths, heads = (c.len_q, c.len_k, c.len_k), (c.heads[0], c.heads[1], c.heads[1])
    tensors = [torch.randn(c.batch, n, h, c.dim).mul(10).to(E4M3) for n, h in zip(lengths, heads, strict=True)]
    scales = Scales(*(0.05 + 0.1 * torch.rand(c.batch, h, -(-n // each) if each else 1) for n, h, each in zip(lengths, heads, c.shared, strict=True)))
    sizes = c.uneven ** (torch.linspace(0, 1, c.len_q)[:, None, None] + torch.arange(c.heads[0])[:, None] % 2)
    return Call(*tensors, scales, (torch.randn(c.batch, c.len_q, c.heads[0], c.dim) * sizes).bfloat16(), torch.randn(c.batch, c.heads[0], c.len_q))


def factor(c: Case) -> float:
    return c.dim**-0.5 if c.scale is None else c.scale


def exact(c: Case, call: Call):
    """Output, LSE and gradients in float64."""
    leaves = [onchip.Quantised(t, s).dequantised().double().requires_grad_() for t, s in zip(call[:3], call.scales, strict=True)]
    out, lse = onchip.attention(*leaves, mask=c.mask, scale=factor(c), return_lse=True, kernel="reference")
    seen = lse != -torch.inf
    return out, lse, torch.autograd.grad([out, (lse * call.d_lse).masked_fill(~seen, 0.0).sum()], leaves, [call.d_out.double(), torch.ones(()).double()])


def rounded(c: Case, call: Call, out, lse):
    """The same in float32 with the kernel's roundings: dO to e4m3, P and dS to e5m2."""
    group, room = c.heads[0] // c.heads[1], c.dim.bit_length() + 2
    q, k, v = (t.float().transpose(1, 2) for t in call[:3])
    q_scale, k_scale, v_scale = (Scales.of_tokens(s, t.shape[2])[..., None] for s, t in zip(call.scales, (q, k, v), strict=True))
    k, v, k_scale, v_scale = (t.repeat_interleave(group, 1) for t in (k, v, k_scale, v_scale))
    most, k_most, q_most = v_scale.amax(2, keepdim=True), k_scale.amax(2, keepdim=True), q_scale.amax(2, keepdim=True)
    p = Attention("backward", c.batch, c.len_q, c.len_k, *c.heads, c.dim, E4M3, c.mask)
    relative = scales_of(p, call.scales)
    do, _, token, lse2, delta = of_output(p, out.transpose(1, 2), call.d_out.transpose(1, 2), lse, call.d_lse, relative, 1)
    token, do, top = token[..., None], do.float(), relative.top.repeat_interleave(group, 1)[..., None, None]
    p = ((q * q_scale) @ (k * k_scale).mT * (factor(c) * 1.4426950408889634) - lse2[..., None]).exp2() * seen(c)
    dp = do @ v.mT * (v_scale / most).mT - delta[..., None]
    ds = p * dp * 2.0**-room
    dv = (p * token / top * 2.0**15).to(E5M2).float().mT @ do * top * 2.0**-15
    dq = (ds * (k_scale / k_most).mT).to(E5M2).float() @ k * k_most * most * token
    dk = (ds * token / top * (q_scale / q_most)).to(E5M2).float().mT @ q * q_most * most * top
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk * factor(c) * 2.0**room, dv))
    return [t.transpose(1, 2).bfloat16() for t in (dq * factor(c) * 2.0**room, dk, dv)]


def seen(c: Case):
    """Which keys a query sees."""
    ahead = torch.arange(c.len_k) - torch.arange(c.len_q)[:, None] - c.mask.shift(c.len_q, c.len_k)
    shown = torch.ones_like(ahead, dtype=torch.bool)
    if c.mask.right is not None:
        shown &= ahead <= c.mask.right
    if c.mask.left is not None:
        shown &= -ahead <= c.mask.left
    return shown


def turned(x, rows: int, counter=None):
    """`fp8_operands.turned` in plain torch."""
    if counter is not None:
        counter.zero_()
    batch, heads, length, dim = x.shape
    x = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, -length % rows)).view(batch, heads, -1, rows // 16, 2, 4, 2, dim)
    return x.permute(0, 1, 2, 7, 3, 5, 4, 6).reshape(batch, heads, -1, rows).view(E4M3)


def scales_of(p, scales):
    """`fp8_operands.scales_of` in plain torch."""
    given = [scale.expand(p.batch, heads, -1) for scale, heads in zip(scales, (p.heads, p.kv_heads, p.kv_heads), strict=True)]
    most = torch.stack([t.unflatten(1, (p.kv_heads, -1)).amax((2, 3)).clamp(min=SMALLEST_TAKEN) for t in given])
    over = [(t / m.repeat_interleave(t.shape[1] // p.kv_heads, 1)[..., None]).clamp(min=2.0**-40) for t, m in zip(given, most, strict=True)]
    return Relative(tuple(over), most, torch.zeros(p.batch, p.kv_heads))


def weighed(p, scale, relative, token, lse, room, raised):
    """`fp8_operands.weighed` in plain torch."""
    (q, k, v), top = relative.most, relative.top
    shared = scale * 2.0**room * v
    gains = torch.stack([scale * 1.4426950408889634 * q * k, shared * k, shared * top * q, top * 2.0**-raised])
    return gains, lse + room, lse - (token / top.repeat_interleave(p.group, 1)[..., None]).log2() - raised


def of_output(p, out, d_out, lse, d_lse, relative, rows: int):
    """`fp8_operands.of_output` in plain torch."""
    out, d_out = out.float(), d_out.float()
    most, empty = relative.most[2].repeat_interleave(p.group, 1)[..., None], lse == -torch.inf
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.masked_fill(empty, 0.0) / most
    token = torch.maximum((d_out.abs().amax(-1) / 448).clamp(min=2.0**-100), d_lse.abs() * 4 / (448 * 448 * out.shape[-1]))
    y = (d_out / token[..., None]).clamp(-448, 448).to(E4M3)
    delta = ((y.float() * out).sum(-1) / most - d_lse / token).masked_fill(empty, 0.0)
    relative.top.copy_(token.unflatten(1, (p.kv_heads, -1)).amax((2, 3)))
    lse2 = (lse * 1.4426950408889634).masked_fill(empty, torch.inf)
    fill = lambda t, value: torch.nn.functional.pad(t.float(), (0, -t.shape[-1] % rows), value=value)  # noqa: E731
    return y, turned(y, rows) if rows > 1 else None, fill(token, 2.0**-100), fill(lse2, torch.inf), fill(delta, 0.0)


def emulated(c: Case, call: Call, out, lse, mode: str, seed=0, edits=()):
    """The gradients of the kernel."""
    kernel = Emulator(mode, seed).load(*SOURCES, edits=edits)
    kernel.turned, kernel.of_output, kernel.scales_of, kernel.weighed = turned, of_output, scales_of, weighed
    p = Attention("backward", c.batch, c.len_q, c.len_k, *c.heads, c.dim, E4M3, c.mask)
    x = Operands(factor(c), scales=call.scales)
    return kernel.launch(p, kernel.Tiles(*c.tiles), *call[:3], out, lse, call.d_out, call.d_lse, x)[:3]


def check(c: Case, mode: str, edits=(), call=None) -> None:
    call, out, lse, lows, truths = expected(c, call)
    for ours, low, truth in zip(emulated(c, call, out, lse, mode, edits=edits), lows, truths, strict=True):
        assert_as_good_as_torch(ours, low, truth)
        worst = max(1e-2, 1.3 * ((low.double() - truth).pow(2).mean() / truth.pow(2).mean()).sqrt().item())
        assert (ours.double() - truth).pow(2).mean().sqrt() <= worst * truth.pow(2).mean().sqrt()


@lru_cache
def expected(c: Case, call=None):
    """A case's call, its output and LSE, and its gradients, rounded and exact: the same in each timing, and with each bug."""
    torch.manual_seed(0)
    call = call or call_of(c)
    out, lse, truths = exact(c, call)
    out, lse = out.detach().bfloat16(), lse.detach().float()
    return call, out, lse, rounded(c, call, out, lse), truths


FAST, SMALL, THREE = (2, 128, 3, 64, 3), (2, 64, 2, 128, 2), (3, 64, 3, 64, 3)
CASES = [
    Case((*FAST, FEW), 300, 300, Full()),
    Case((*FAST, FEW), 300, 300, heads=(1, 1)),
    Case((*FAST, EACH), 200, 390, dim=128),
    Case((*SMALL, FEW), 200, 330, Full(), batch=2, heads=(4, 2), shared=(128, 128, 128)),
    Case((*FAST, EACH), 300, 200, Window(100), dim=128, heads=(1, 1), shared=(0, 128, 128), uneven=1e4),
    Case((*THREE, EACH), 330, 150, heads=(3, 3), shared=(128, 0, 0)),
    Case((*THREE, FEW), 200, 150, Window(40, 30), heads=(2, 2), shared=(0, 0, 128)),
    Case((*FAST, EACH), 150, 200, Causal(align="top_left"), shared=(0, 128, 0), scale=-0.125),
    Case((*FAST, EACH), 1, 200, Full(), heads=(8, 1), scale=0.0),
    Case((*THREE, EACH), 130, 1, Full(), uneven=1e-6),
]


@emulated_only
@pytest.mark.parametrize(("case", "mode"), timings(CASES, [*CASES[:4], CASES[5]]), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    check(case, mode)


@emulated_only
def test_tokens_without_a_gradient():
    """Of dO or LSE alone, or of neither; a token of zeros with the least scale takes no digits from the others."""
    c = Case((*FAST, FEW), 130, 300, Full(), shared=(0, 128, 128))
    call = call_of(c)
    call.d_out[:, :64], call.d_lse[:, :, 32:64] = 0, 0
    for x, scale in zip(call[1:3], call.scales[1:], strict=True):
        x[:, 256:] = 0
        scale[:, :, -1] = SMALLEST
    check(c, MODES[0], call=call)
    check(c, MODES[0], call=call._replace(d_out=call.d_out * 0))


@emulated_only
@pytest.mark.parametrize("tiny", [(2.0**-60, 1, 1), (1, 2.0**-95, 1), (1, 1, 2.0**-95), (2.0**-60, 1, 2.0**-90)], ids=str)
def test_tiny_scales(tiny):
    """A user's own are taken as they are, down to SMALLEST_TAKEN."""
    c = Case((*FAST, FEW), 130, 300, shared=(0, 128, 128))
    call = call_of(c)
    call = call._replace(scales=Scales(*(s * less for s, less in zip(call.scales, tiny, strict=True))))
    check(c, MODES[0], call=call)
    check(c, MODES[0], call=call._replace(d_lse=call.d_lse * 0))  # which is large beside what tiny values make


@emulated_only
@pytest.mark.parametrize(("len_q", "len_k"), [(0, 5), (5, 0)])
def test_no_tokens(len_q, len_k):
    c = Case((*FAST, FEW), len_q, len_k, Full())
    call = call_of(c)
    grads = emulated(c, call, torch.zeros(1, len_q, 2, 64).bfloat16(), torch.full((1, 2, len_q), -torch.inf), MODES[0])
    assert all(grad.dtype == torch.bfloat16 and not grad.any() for grad in grads)


# ---- with a bug

FULL = Case((2, 128, 2, 64, 2, FEW), 200, 300, Full(), heads=(4, 2), shared=(128, 128, 128), uneven=100.0)
WAIT = """        if C.of_keys:
            acc, acc_v, words, words_v = warpgroup_mma_wait(0, deps=[acc, acc_v, words, words_v])
        else:
            acc, words = warpgroup_mma_wait(0, deps=[acc, words])
"""
RELEASE = "        release(index, STEPS_LET_GO, C.readers)\n"
LET_OWN_GO, WAIT_FOR_OWN = "            release(0, OWN_LET_GO, C.readers)\n", "            mbarrier.wait(own_full, tiles % 2)\n"
TELL = "        tell(message, turn, (number,))\n        turn += 1\n"
BUGS = {  # what is wrong, and how the sources differ
    "a stage is let go before its products are there": ((WAIT + RELEASE, RELEASE + WAIT),),
    "a stage is never let go": ((RELEASE, ""),),
    "copies are not waited for": (("        mbarrier.wait(full.index(index), phase)\n        factor", "        factor"),),
    "rows of dO's copies are announced and forgotten": (("        tma_load(delta_desc, [row, tile * C.stream], barrier, deltas.index(index))\n", ""),),
    "what stays is not waited for": ((WAIT_FOR_OWN, ""),),
    "what stays is overwritten in use": ((LET_OWN_GO, ""), ("    if tiles > 0:\n        arrive_and_wait(0, OWN_LET_GO, C.readers)\n", "")),
    "both warpgroups take the same keys": (("firsts.index(GROUP).reshape", "firsts.index(0).reshape"),),
    "dV's buffer is rewritten before it has left": (("                tma.store_wait(0)  # so has dV\n", ""),),
    "columns keep their order": (("return x.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])", "return x"),),
    "delta is left out": (("zeros - delta", "zeros - 0 * delta"),),
    "dQ forgets delta": (("        lse, delta = lse[:, None], delta[:, None]\n", "        lse, delta = lse[:, None], 0 * delta[:, None]\n"),),
    "the other heads of a group are left out": (
        ("in range(group if C.of_keys else 1):\n                h =", "in range(1):\n                h ="),
        ("in range(group if C.of_keys else 1):\n                far_head", "in range(1):\n                far_head"),
    ),
    "the scale of a block is its neighbour's": (("at += first // EACH * strides[2]", "at += first // EACH * 0"),),
    "the scales of V's blocks are left out of dP": (("            delta = delta / each\n", ""),),
    "the scales of K's blocks are left out of dS": (("            lse = lse - logarithm(each)\n        if C.each_v", "        if C.each_v"),),
    "gradients of tokens weigh alike": (("for t in (heavy, deltas)", "for t in (lses - RAISED, deltas)"),),
    "P outgrows e5m2": (("RAISED = 15", "RAISED = 22"),),
    "dS outgrows e5m2": (("return dim.bit_length() + 2", "return dim.bit_length() - 12"),),
    "dS falls below e5m2": (("return dim.bit_length() + 2", "return dim.bit_length() + 16"),),
    "the next tile is drawn twice": (("gl.num_programs(0) + gl.inline_asm", "gl.num_programs(0) - 1 + gl.inline_asm"),),
    "the end is never told": ((f"{TELL}\n\n# ----", f"        if number < sizes[0]:\n    {TELL}\n\n# ----"),),
}  # fmt: skip


@emulated_only
@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    for mode in MODES:
        try:
            check(FULL, mode, edits=BUGS[bug])
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug}")
