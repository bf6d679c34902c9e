"""Norms, activations, rotation and what is used beside a model, as the suite asks for them. A new operator is one entry."""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.operators_steps import STEPS
from onchip.bench.operators_vocabulary import LOSSES, SAMPLING
from onchip.bench.row_operator import ENDS, TILES, WIDTHS, Operator, draw, flashinfer, halves, liger, of, quack, same, vector, wide
from onchip.core import device as devices
from onchip.core.norms import Residual, RowCodes, SiluGate
from onchip.core.problem import Cost, Dropout, Groups, Problem, Rope, Rows
from onchip.dispatch import OPS
from onchip.models.rope import rope_table
from onchip.ops.activation import Clipped, activate, gated_act
from onchip.ops.group_norm import group_norm
from onchip.ops.linear import Around, RowNorm, skinny_linear, skinny_problem
from onchip.ops.lookup import dropout_add, embedding, hadamard
from onchip.ops.norm import layer_norm, modulated_norm, rms_norm
from onchip.ops.rotary import rotary

HEAD = 128  # columns of a head, where rows are made of heads
LOOKED_UP = 32_768  # rows of an embedding's weight


# ---- norms


def _norm(forward: str, wanted: str, kind: str = "rms") -> dict:
    """The Problems of a norm: words of the forward pass, and the gradients; where there is a residual, the sum has one too, which is read."""
    kept = "keep d_total" if "residual" in forward else "keep"
    return {"problem": of("norm", f"{kind} {forward}"), "back": of("norm_backward", f"{kind} {forward} {kept} -> {wanted}")}


def _rms(x, w):
    return F.rms_norm(x, w.shape, w, 1e-6)


def _add_rms(x, w, residual):
    total = x + residual
    return _rms(total, w), total


def _codes(x, w):
    y = _rms(x.float(), w.float())
    scale = y.abs().amax(-1) / 448
    return scale, (y / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)


def _samples(batch: int, streams: int, modulations: int) -> Callable:
    """x and streams like it [batch, tokens, width], then modulations [batch, width]."""

    def make(rows, width, dtype, device):
        x = (torch.randn(batch, rows // batch, width, dtype=dtype, device=device) for _ in range(1 + streams))
        return *x, *(0.3 * torch.randn(batch, width, dtype=dtype, device=device) for _ in range(modulations))

    return make


def _modulated(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _zero(x, stream, gate, scale, shift):
    total = stream + gate.unsqueeze(1) * x
    return _modulated(total, scale, shift), total


def _dit(batch: int, tokens: int, width: int) -> Operator:
    return Operator(
        **_norm("scale shift", "x scale shift", "layer"), make=_samples(batch, 0, 2), ours=modulated_norm, plain=_modulated, learnt=(0, 1, 2),
        sizes=((batch * tokens, width),), least=(2 * batch, 24),
    )  # fmt: skip


def _group(batch: int, channels: int, side: int, last: bool = False) -> Operator:
    """GroupNorm and SiLU of images; a row is a channel of one."""

    def problem(op):
        return lambda rows, width, dtype: Groups(op, rows // channels, channels, 32, width, dtype, "silu", "channels_last" if last else "channels_first")

    def make(rows, width, dtype, device):
        x = torch.randn(rows // channels, channels, math.isqrt(width), width // math.isqrt(width), dtype=dtype, device=device)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return x, *(torch.randn(channels, dtype=dtype, device=device) for _ in range(2))

    return Operator(
        problem("group_norm"), make, lambda x, w, b: group_norm(x, 32, w, b, act="silu"), lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        problem("group_norm_backward"), (0, 1, 2), sizes=((batch * channels, side * side),), least=(2 * channels, 9),
    )  # fmt: skip


# (batch, channels, side): decoders of Stable Diffusion and SDXL at 1024, and the U-Net at 512, 16 images
IMAGES = ((1, 128, 1024), (1, 512, 256), (1, 512, 128), (16, 320, 64), (16, 1280, 16))

NORMS = {
    "rms_norm": Operator(
        of("rms_norm"), draw(same, vector), rms_norm, _rms, of("norm_backward", "rms weight keep -> x weight"), (0, 1), widths=WIDTHS, small=True,
        peers={
            "Liger": lambda x, w: liger("rms_norm:LigerRMSNormFunction", x, w, 1e-6), "quack": quack("rmsnorm", eps=1e-6),
            "FlashInfer": flashinfer("rmsnorm"),
        },
    ),
    "add_rms_norm": Operator(
        of("rms_norm", "residual"), draw(same, vector, same), lambda x, w, r: rms_norm(x, w, residual=r), _add_rms,
        of("norm_backward", "rms residual weight keep d_total -> x weight"), (0, 1, 2), small=True,
    ),
    "layer_norm": Operator(
        **_norm("weight bias", "x weight bias", "layer"), make=draw(same, vector, vector), ours=layer_norm,
        plain=lambda x, w, b: F.layer_norm(x, w.shape, w, b), learnt=(0, 1, 2), widths=ENDS,
        peers={"Liger": lambda x, w, b: liger("layer_norm:LigerLayerNormFunction", x, w, b, 1e-5)},
    ),
    "rms_norm, SiLU gate": Operator(
        **_norm("weight silu", "x weight silu"), make=draw(same, vector, same), ours=lambda x, w, g: rms_norm(x, w, after=SiluGate(g)),
        plain=lambda x, w, g: _rms(x, w) * F.silu(g), learnt=(0, 1, 2),
    ),
    "rms_norm to e4m3": Operator(
        of("norm", "rms weight e4m3"), draw(same, vector), lambda x, w: rms_norm(x, w, after=RowCodes("e4m3"))[::-1], _codes,
    ),
    "modulated_norm, DiT": _dit(32, 1024, 1152),
    "modulated_norm, Flux": _dit(4, 4608, 3072),
    "adaLN-Zero": Operator(
        **_norm("residual gate scale shift", "x residual gate scale shift", "layer"), make=_samples(4, 1, 3),
        ours=lambda x, r, g, s, b: modulated_norm(x, s, b, residual=Residual(r, g)), plain=_zero, learnt=(0, 1, 2, 3, 4),
        sizes=((4 * 4608, 3072),), least=(8, 24),
    ),
    **{f"GroupNorm+SiLU {batch}x{channels}x{side}x{side}": _group(batch, channels, side) for batch, channels, side in IMAGES},
    "GroupNorm+SiLU 16x320x64x64, channels last": _group(16, 320, 64, True),
}  # fmt: skip


# ---- activations, rotation and what is used beside a model


def _rope(op: str) -> Callable[..., Problem]:
    """Rows of four query heads for each key head, all of HEAD columns."""
    return lambda rows, width, dtype: Rope(op, rows, width // HEAD * 4 // 5, width // HEAD // 5, HEAD, HEAD, dtype, "neox", False, False)


def _heads(rows, width, dtype, device):
    kv = width // HEAD // 5
    q, k = (torch.randn(1, rows, n, HEAD, dtype=dtype, device=device) for n in (4 * kv, kv))
    return q, k, rope_table(rows, HEAD, 1e4, device=device)


def _plain_rotary(q, k, table):
    cos, sin = (t.repeat(1, 2).unsqueeze(1).to(q.dtype) for t in table.chunk(2, -1))

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return turned(q), turned(k)


def _plain_hadamard(x):
    """By one product with the matrix of 128 and one with that of the rest, as Kronecker factors; a matrix of all columns would be arithmetic alone."""
    rows, width = x.shape
    left, right = (_matrix(n, x.dtype, x.device) for n in (width // min(width, HEAD), min(width, HEAD)))
    return (left @ (x.view(rows, -1, min(width, HEAD)) @ right)).reshape(rows, width)


@functools.cache
def _matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard(torch.eye(n, dtype=torch.float32, device=device), kernel="reference").to(dtype)


def _ids(rows, width, dtype, device):
    return torch.randint(LOOKED_UP, (rows,), device=device), torch.randn(LOOKED_UP, width, dtype=dtype, device=device)


def _gate(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _clipped(x):
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


ROWS = {
    "swiglu": Operator(
        of("gated_act", "silu"), draw(wide), gated_act, _gate, of("gated_act_backward", "silu"), widths=WIDTHS, small=True,
        peers={"Liger": halves("swiglu:LigerSiLUMulFunction"), "FlashInfer": flashinfer("silu_and_mul")},
    ),
    "geglu": Operator(
        of("gated_act", "gelu_tanh"), draw(wide), lambda x: gated_act(x, "gelu_tanh"),
        lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1], of("gated_act_backward", "gelu_tanh"),
        peers={"Liger": halves("geglu:LigerGELUMulFunction"), "FlashInfer": flashinfer("gelu_tanh_and_mul")},
    ),
    "gpt-oss gate": Operator(
        of("gated_act", "clipped interleaved"), draw(wide), lambda x: gated_act(x, Clipped(), layout="interleaved"), _clipped,
        of("gated_act_backward", "clipped interleaved"),
    ),
    "gelu, bias": Operator(
        of("activate", "gelu bias"), draw(same, vector), lambda x, b: activate(x, "gelu", bias=b), lambda x, b: F.gelu(x + b),
        of("activate_backward", "gelu bias"), (0, 1),
    ),
    "rotary": Operator(_rope("rotary"), _heads, rotary, _plain_rotary, _rope("rotary_backward"), (0, 1), widths=(5120,), least=(7, 640)),
    "dropout_add": Operator(
        of("dropout_add", "residual"), draw(same, same), lambda x, r: dropout_add(x, r, Dropout(0.1, 1)), lambda x, r: r + F.dropout(x, 0.1),
        of("dropout_add"), drawn=True,
    ),
    "hadamard": Operator(of("hadamard"), draw(same), hadamard, _plain_hadamard, of("hadamard"), widths=(4096, 32_768), least=(3, 256)),
    "embedding": Operator(of("embedding", f"of {LOOKED_UP}"), _ids, embedding, F.embedding, of("embedding_backward", f"of {LOOKED_UP}"), (1,)),
}  # fmt: skip


# ---- products of few rows


def _skinny(out: int, width: int, words: str) -> Operator:
    """Llama-3-8B's weight of `out` rows and `width` columns, for as many rows of x as the menu gives the kernel; of another size in proportion."""
    act = "silu" if "silu" in words else None

    def columns(rows):
        return max(1, rows * width // out)

    def make(rows, size, dtype, device):
        wide, ups = columns(size), size if act is None else 2 * size
        x, last = (torch.randn(shape, dtype=dtype, device=device) for shape in ((rows, wide), (wide,) if "norm" in words else (rows, size)))
        return x, torch.randn(ups, wide, dtype=dtype, device=device) * wide**-0.5, last

    def ours(x, w, last):
        around = {"norm": RowNorm(last)} if "norm" in words else {"residual": last}
        return skinny_linear(x, w, act=act, **around, constant=True)

    def apart(x, w, last):  # a decoder adds the stream in the norm that follows, which the next row then has
        y = F.linear(rms_norm(x, last) if "norm" in words else x, w)
        return y + last if "residual" in words else y if act is None else gated_act(y)

    def plain(x, w, last):
        y = F.linear(_rms(x, last) if "norm" in words else x, w)
        return y + last if "residual" in words else y if act is None else _gate(y)

    def problem(rows, size, dtype):
        return Rows("skinny_linear", rows, size, dtype, f"from {columns(size)} {words}")

    def tiles(n):  # of the kernel's, which runs the first
        def run(x, w, last):
            around = Around(norm=RowNorm(last), constant=True) if "norm" in words else Around(residual=last, constant=True)
            asked = skinny_problem(x, len(w), around, act)
            kernel = OPS[asked.op].kernels[0]
            return kernel.load()(asked, kernel.configs(asked, devices.of(x.device))[n], x, w, around)

        return lambda *args: lambda: run(*args)

    peers = {"onchip, one by one": lambda *args: lambda: apart(*args)} | {name: tiles(n) for n, name in enumerate(TILES, 1)}
    return Operator(problem, make, ours, plain, peers=peers, sizes=((1, out), (2, out)), least=(2, 24))


def _layer_weights(rows, width, dtype, device):
    """x, and weights in Llama-3-8B's proportions, the norms' before qkv's and before gate and up's."""

    def draw(*shape):
        return torch.randn(shape, dtype=dtype, device=device)

    wide, inner = width * 3 // 2, width * 7 // 2
    norms, matrices = (draw(width) for _ in range(2)), ((wide, width), (width, width), (2 * inner, width), (width, inner))
    return draw(rows, width), *norms, *(draw(*shape) * shape[1] ** -0.5 for shape in matrices)


def _layer_cost(rows, width, dtype) -> Cost:
    wide, inner = width * 3 // 2, width * 7 // 2
    products = ((wide, width, "norm"), (width, width, "residual"), (inner, width, "norm silu"), (width, inner, "residual"))
    costs = [OPS["skinny_linear"].cost(Rows("skinny_linear", rows, out, dtype, f"from {size} {words}")) for out, size, words in products]
    return functools.reduce(Cost.__add__, costs)


def _layer(x, g, h, qkv, out, gate_up, down):
    """A layer's four products one after the other, its queries in place of what attention makes of them."""
    q = skinny_linear(x, qkv, norm=RowNorm(g), constant=True)[:, : x.shape[1]]
    y = skinny_linear(q, out, residual=x, constant=True)
    return skinny_linear(skinny_linear(y, gate_up, norm=RowNorm(h), act="silu", constant=True), down, residual=y, constant=True)


def _layer_apart(x, g, h, qkv, out, gate_up, down):
    a = F.linear(F.linear(rms_norm(x, g), qkv)[:, : x.shape[1]], out)
    normed, y = rms_norm(a, h, residual=x)
    return y + F.linear(gated_act(F.linear(normed, gate_up)), down)


def _layer_plain(x, g, h, qkv, out, gate_up, down):
    y = x + F.linear(F.linear(_rms(x, g), qkv)[:, : x.shape[1]], out)
    return y + F.linear(_gate(F.linear(_rms(y, h), gate_up)), down)


PRODUCTS = {
    "skinny, a layer's four": Operator(
        _layer_cost, _layer_weights, _layer, _layer_plain, peers={"onchip, one by one": lambda *args: lambda: _layer_apart(*args)},
        sizes=((1, 4096), (2, 4096), (8, 1024), (1, 576)), least=(2, 24),
    ),
    "skinny qkv": _skinny(6144, 4096, "norm"),
    "skinny out": _skinny(4096, 4096, "residual"),
    "skinny gate and up": _skinny(14336, 4096, "norm silu"),
    "skinny down": _skinny(4096, 14336, "residual"),
}  # fmt: skip


OPERATORS: dict[str, Operator] = {**NORMS, **ROWS, **PRODUCTS, **LOSSES, **SAMPLING, **STEPS}
