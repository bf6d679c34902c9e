"""The menu of fused row operators: each one's cost and its kernels, fastest first. Imports no DSL."""

import torch

from onchip.core.kernel import Kernel, Op
from onchip.core.problem import Cost, Rope, Rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPUS = {"cuda": 80, "hip": 942}


def _rms_norm(p: Rows) -> Cost:
    """x read and y written; with a residual, that is read and written too. About four flops an element."""
    passes = 4 if "residual" in p.variant else 2
    return Cost(4 * p.rows * p.width, (passes * p.rows + 1) * p.width * p.dtype.itemsize)


def _gated_act(p: Rows) -> Cost:
    """Gate and up are read, their product written; `width` is the output's."""
    return Cost(8 * p.rows * p.width, 3 * p.rows * p.width * p.dtype.itemsize)


def _rope_append(p: Rope) -> Cost:
    """q and k read and written, v read when it is appended; appending writes k and v once more. The table is read once a token."""
    moved = 2 * (p.heads + p.kv_heads) + (3 * p.kv_heads if p.append else 0)
    return Cost(6 * p.tokens * (p.heads + p.kv_heads) * p.dim, p.tokens * (moved * p.dim * p.dtype.itemsize + 4 * p.rotary_dim))


def _sample(p: Rows) -> Cost:
    """The logits are read once."""
    return Cost(4 * p.rows * p.width, p.rows * p.width * p.dtype.itemsize)


def _family(op: str, file: str, accepts: dict, cost) -> Op:
    """A Triton kernel, and plain torch under it."""
    return Op(
        op,
        cost,
        (
            Kernel(f"triton_{file}", f"onchip.kernels.fused.{file}:launch", GPUS, {"dtype": FLOATS, **accepts}),
            Kernel("reference", f"onchip.kernels.fused.reference:{op}", portable=True),
        ),
    )


RMS_NORM = _family("rms_norm", "norm", {"width": range(1, (1 << 16) + 1)}, _rms_norm)
GATED_ACT = _family("gated_act", "mlp", {"variant": ("silu", "gelu", "gelu_tanh")}, _gated_act)
ROPE_APPEND = _family("rope_append", "rope", {"dim": range(2, 513), "layout": ("neox", "interleaved")}, _rope_append)
SAMPLE = _family("sample", "logits", {"width": range(1, (1 << 20) + 1)}, _sample)

OPS = (RMS_NORM, GATED_ACT, ROPE_APPEND, SAMPLE)
