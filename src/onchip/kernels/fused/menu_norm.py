"""The rows of the menu that normalise rows and groups: what each costs, and its kernels."""

import torch

from onchip.core.kernel import Kernel, Op
from onchip.core.norms import CODES
from onchip.core.problem import Cost, Groups, Rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPUS = {"cuda": 80, "hip": 942}
WIDEST_CODES = 1 << 16  # bytes of a row: `norm.WIDEST`


def _stream(words: list[str], p: Rows) -> int:
    """Bytes of a number of the residual stream."""
    return 4 if "residual:fp32" in words else p.dtype.itemsize


def _norm(p: Rows) -> Cost:
    """x read, y or its codes written; the stream read and written; what each row has one of is read. About eight flops an element."""
    words, size = p.variant.split(), p.dtype.itemsize
    y = 1 if any(name in words for name in CODES) else size
    stream = 2 * _stream(words, p) * any(word.startswith("residual") for word in words)
    each = size * sum(word.endswith(":row") or word == "silu" for word in words)
    shared = size * p.width * sum(word in ("weight", "bias", "scale", "shift", "gate") for word in words)
    return Cost(8 * p.rows * p.width, p.rows * p.width * (size + y + stream + each) + shared)


def _norm_backward(p: Rows) -> Cost:
    """dy, z and what each row has one of are read, each gradient written. About sixteen flops an element."""
    said, _, wanted = p.variant.partition(" -> ")
    words, wanted, size = said.split(), wanted.split(), p.dtype.itemsize
    rows = [word.removesuffix(":row") for word in words if word.endswith(":row") or word == "silu"]
    z = _stream(words, p) if "inverse" not in words else size
    branch = size * ("gate" in wanted or "row_scale" in wanted)
    added = _stream(words, p) * ("d_total" in words)
    grads = size * ("x" in wanted) + _stream(words, p) * ("residual" in wanted) + size * sum(name in wanted for name in rows)
    shared = size * p.width * sum(name in wanted and name not in rows for name in ("weight", "bias", "gate", "scale", "shift"))
    return Cost(16 * p.rows * p.width, p.rows * p.width * (size + z + branch + added + size * len(rows) + grads) + shared)


def _codes_in_registers(p: Rows) -> str | None:
    coded = any(name in p.variant.split() for name in CODES)
    return f"codes of rows of {p.width * p.dtype.itemsize} bytes, of at most {WIDEST_CODES}" if coded and p.width * p.dtype.itemsize > WIDEST_CODES else None


def _group_norm(p: Groups) -> Cost:
    """x read and y written."""
    size = p.batch * p.channels * p.pixels
    return Cost(10 * size, 2 * size * p.dtype.itemsize)


def _group_norm_backward(p: Groups) -> Cost:
    """dy and x read, dx written."""
    size = p.batch * p.channels * p.pixels
    return Cost(20 * size, 3 * size * p.dtype.itemsize)


KERNELS = "onchip.kernels.fused"
WIDTHS = {"dtype": FLOATS, "width": range(1, (1 << 30) + 1)}

NORM = Op(
    "norm",
    _norm,
    (
        Kernel("triton_norm", f"{KERNELS}.norm:launch_norm", GPUS, WIDTHS, (_codes_in_registers,)),
        Kernel("reference", f"{KERNELS}.reference_norm:norm", portable=True),
    ),
)
NORM_BACKWARD = Op(
    "norm_backward",
    _norm_backward,
    (
        Kernel("triton_norm_backward", f"{KERNELS}.norm_backward:launch", GPUS, WIDTHS),
        Kernel("reference", f"{KERNELS}.reference_norm:norm_backward", portable=True),
    ),
)
GROUP_NORM = Op(
    "group_norm",
    _group_norm,
    (
        Kernel("triton_group_norm", f"{KERNELS}.group_norm:launch", GPUS, {"dtype": FLOATS}),
        Kernel("reference", f"{KERNELS}.reference_norm:group_norm", portable=True),
    ),
)
GROUP_NORM_BACKWARD = Op(
    "group_norm_backward",
    _group_norm_backward,
    (
        Kernel("triton_group_norm_backward", f"{KERNELS}.group_norm_backward:launch", GPUS, {"dtype": FLOATS}),
        Kernel("reference", f"{KERNELS}.reference_norm:group_norm_backward", portable=True),
    ),
)

OPS = (NORM, NORM_BACKWARD, GROUP_NORM, GROUP_NORM_BACKWARD)
