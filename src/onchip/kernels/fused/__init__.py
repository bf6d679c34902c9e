"""The menu of fused row operators: each one's cost and its kernels, fastest first. Imports no DSL."""

import torch

from onchip.core.formats import FORMATS, Format
from onchip.core.kernel import Kernel, Op
from onchip.core.problem import Cost, Rope, Rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPUS = {"cuda": 80, "hip": 942}
KV = ("", *map(str, FORMATS))


def _rms_norm(p: Rows) -> Cost:
    """x read and y written; with a residual, that is read and written too. About four flops an element."""
    passes = 4 if "residual" in p.variant else 2
    return Cost(4 * p.rows * p.width, (passes * p.rows + 1) * p.width * p.dtype.itemsize)


def _gated_act(p: Rows) -> Cost:
    """Gate and up are read, their product written; `width` is the output's."""
    return Cost(8 * p.rows * p.width, 3 * p.rows * p.width * p.dtype.itemsize)


def _rope_append(p: Rope) -> Cost:
    """q and k read and written, v read when it is appended; appending writes k and v once more, or their codes. The table is read once a token."""
    head = p.dim * p.dtype.itemsize
    appended = p.append * p.kv_heads * (head + 2 * (Format.of(p.kv).bytes(p.dim) if p.kv else head))
    return Cost(6 * p.tokens * (p.heads + p.kv_heads) * p.dim, p.tokens * (2 * (p.heads + p.kv_heads) * head + appended + 4 * p.rotary_dim))


def _group_in_a_half(p: Rope) -> str | None:
    """A program has both halves of a head apart, as pairs and int4 have them."""
    groups = Format.of(p.kv).groups(p.dim) if p.kv in KV[1:] else 1
    return (
        f"{groups} groups of a head of {p.dim} in format {p.kv}, of one or an even number: one would lie in both halves" if groups > 1 and groups % 2 else None
    )


def _family(op: str, file: str, accepts: dict, cost, also: tuple = ()) -> Op:
    """A Triton kernel, and plain torch under it."""
    return Op(
        op,
        cost,
        (
            Kernel(f"triton_{file}", f"onchip.kernels.fused.{file}:launch", GPUS, {"dtype": FLOATS, **accepts}, also),
            Kernel("reference", f"onchip.kernels.fused.reference:{op}", portable=True),
        ),
    )


RMS_NORM = _family("rms_norm", "norm", {"width": range(1, (1 << 16) + 1)}, _rms_norm)
GATED_ACT = _family("gated_act", "mlp", {"variant": ("silu", "gelu", "gelu_tanh")}, _gated_act)
ROPE_APPEND = _family("rope_append", "rope", {"dim": range(2, 513), "layout": ("neox", "interleaved"), "kv": KV}, _rope_append, (_group_in_a_half,))


# ---- logits


def _once(p: Rows) -> Cost:
    """The logits are read once."""
    return Cost(4 * p.rows * p.width, p.rows * p.width * p.dtype.itemsize)


def _adjust(p: Rows) -> Cost:
    """Logits read and written; counts of 4 bytes, and a bit of the mask, for each."""
    parts = p.variant.split()
    bits = 16 * p.dtype.itemsize + 32 * ("penalties" in parts) + 32 * ("prompt" in parts) + ("mask" in parts)
    return Cost(6 * p.rows * p.width, p.rows * p.width * bits / 8)


def _verify(p: Rows) -> Cost:
    """Beside what sampling at each place reads: the place where the draft ends, logits and probabilities, or tokens alone."""
    drawn = "probabilities" in p.variant
    places = int(p.variant.split()[2])
    return Cost(8 * p.rows * (p.width if drawn else places), p.rows * (p.width * (p.dtype.itemsize + 4) if drawn else 20 * places))


def _logits(name: str, file: str, cost) -> Op:
    """A Triton kernel, and plain torch under it."""
    return Op(
        name,
        cost,
        (
            Kernel(f"triton_{file}", f"onchip.kernels.fused.{file}:launch", GPUS, {"dtype": FLOATS, "width": range(1, (1 << 20) + 1)}),
            Kernel("reference", f"onchip.kernels.fused.reference_sampling:{name}", portable=True),
        ),
    )


SAMPLE = _logits("sample", "logits", _once)
LOG_PROBS = _logits("log_probs", "logprobs", _once)
ADJUST_LOGITS = _logits("adjust_logits", "penalties", _adjust)
VERIFY = _logits("verify", "verify", _verify)

OPS = (RMS_NORM, GATED_ACT, ROPE_APPEND, SAMPLE, LOG_PROBS, ADJUST_LOGITS, VERIFY)
