"""Gradients in e4m3 and e5m2: the Hopper kernel on a CPU, in each timing of the emulator of Gluon, judged by float64 on what the inputs stand for."""

import os
from typing import Any, NamedTuple

import pytest
import torch

import onchip
from gluon_emulator import MODES, Emulator, Fault
from judge import assert_as_good_as_torch
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scales import SMALLEST, Scales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODULES = ("texts", "mods", "tile", "hopper_tiles", "hopper_backward_tiles", "hopper_fp8_backward")
SOURCES = ["onchip.kernels.hopper", *(f"onchip.kernels.attention.{name}" for name in MODULES)]
FEW, EACH = 3, 1000  # programs: few, which do several tiles each, or one for each tile
emulated_only = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call and the tiles it is run with. `shared`: how many tokens share a scale of q, k and v; 0: all."""

    tiles: tuple[int, int, int, int, int]  # keys a tile and stages, queries a tile and stages, programs
    len_q: int
    len_k: int
    mask: Any = Causal()
    dim: int = 64
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    shared: tuple[int, int, int] = (0, 0, 0)
    scale: float | None = None
    uneven: float = 1.0  # how much larger than the first token's the last one's gradient is

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
    sizes = c.uneven ** torch.linspace(0, 1, c.len_q)[:, None, None]
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
    do, _, token, lse2, delta = of_output(None, out.transpose(1, 2), call.d_out.transpose(1, 2), lse, call.d_lse, most[:, ::group, 0, 0], 1)
    token, do = token[..., None], do.float()
    p = ((q * q_scale) @ (k * k_scale).mT * (factor(c) * 1.4426950408889634) - lse2[..., None]).exp2() * seen(c)
    dp = do @ v.mT * (v_scale / most).mT - delta[..., None]
    ds = p * dp * 2.0**-room
    top = token.unflatten(1, (-1, group)).amax((2, 3, 4))[:, :, None].repeat_interleave(group, 1)[..., None]
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


def turned(x, rows: int):
    """`fp8_operands.turned` in plain torch."""
    batch, heads, length, dim = x.shape
    x = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, -length % rows)).view(batch, heads, -1, rows // 16, 2, 4, 2, dim)
    return x.permute(0, 1, 2, 7, 3, 5, 4, 6).reshape(batch, heads, -1, rows).view(E4M3)


def of_output(_p, out, d_out, lse, d_lse, most, rows: int):
    """`fp8_operands.of_output` in plain torch."""
    out, d_out, group = out.float(), d_out.float(), out.shape[1] // most.shape[1]
    most, empty = most.repeat_interleave(group, 1)[..., None], lse == -torch.inf
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.masked_fill(empty, 0.0) / most
    token = torch.maximum((d_out.abs().amax(-1) / 448).clamp(min=2.0**-100), d_lse.abs() * 4 / (448 * 448 * out.shape[-1]))
    y = (d_out / token[..., None]).clamp(-448, 448).to(E4M3)
    delta = ((y.float() * out).sum(-1) / most - d_lse / token).masked_fill(empty, 0.0)
    lse2 = (lse * 1.4426950408889634).masked_fill(empty, torch.inf)
    fill = lambda t, value: torch.nn.functional.pad(t.float(), (0, -t.shape[-1] % rows), value=value)  # noqa: E731
    return y, turned(y, rows) if rows > 1 else None, fill(token, 2.0**-100), fill(lse2, torch.inf), fill(delta, 0.0)


def emulated(c: Case, call: Call, out, lse, mode: str, seed=0, edits=()):
    """The gradients of the kernel."""
    kernel = Emulator(mode, seed).load(*SOURCES, edits=edits)
    kernel.turned, kernel.of_output = turned, of_output
    p = Attention("backward", c.batch, c.len_q, c.len_k, *c.heads, c.dim, E4M3, c.mask)
    x = Operands(factor(c), scales=call.scales)
    return kernel.launch(p, kernel.Tiles(*c.tiles), *call[:3], out, lse, call.d_out, call.d_lse, x)[:3]


def check(c: Case, mode: str, edits=(), call=None) -> None:
    torch.manual_seed(0)
    call = call or call_of(c)
    out, lse, truths = exact(c, call)
    out, lse = out.detach().bfloat16(), lse.detach().float()
    lows = rounded(c, call, out, lse)
    for ours, low, truth in zip(emulated(c, call, out, lse, mode, edits=edits), lows, truths, strict=True):
        assert_as_good_as_torch(ours, low, truth)
        worst = max(1e-2, 1.3 * ((low.double() - truth).pow(2).mean() / truth.pow(2).mean()).sqrt().item())
        assert (ours.double() - truth).pow(2).mean().sqrt() <= worst * truth.pow(2).mean().sqrt()


FAST = (128, 3, 64, 3)
CASES = [
    Case((*FAST, FEW), 300, 300, Full()),
    Case((*FAST, FEW), 300, 300, heads=(1, 1)),
    Case((*FAST, EACH), 200, 390, dim=128),
    Case((64, 2, 64, 2, FEW), 200, 330, Full(), batch=2, heads=(4, 2), shared=(128, 128, 128)),
    Case((*FAST, EACH), 300, 200, Window(100), dim=128, heads=(1, 1), shared=(0, 128, 128), uneven=1e4),
    Case((*FAST, EACH), 330, 150, heads=(3, 3), shared=(128, 0, 0)),
    Case((*FAST, FEW), 200, 150, Window(40, 30), heads=(2, 2), shared=(0, 0, 128)),
    Case((*FAST, EACH), 150, 200, Causal(align="top_left"), shared=(0, 128, 0), scale=-0.125),
    Case((*FAST, EACH), 1, 200, Full(), heads=(8, 1), scale=0.0),
    Case((*FAST, EACH), 130, 1, Full(), uneven=1e-6),
]


@emulated_only
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case, mode):
    check(case, mode)
