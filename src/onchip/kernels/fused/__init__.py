"""The menu of fused row operators: each one's cost and its kernels, fastest first. Imports no DSL."""

import torch

from onchip.core.formats import FORMATS, Format
from onchip.core.kernel import Kernel, Op
from onchip.core.problem import Cost, Rope, Rows
from onchip.kernels.fused import menu_norm

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPUS = {"cuda": 80, "hip": 942}
KV = ("", *map(str, FORMATS))


def _rms_norm(p: Rows) -> Cost:
    """x read and y written; with a residual, that is read and written too. About four flops an element."""
    passes = 4 if "residual" in p.variant else 2
    return Cost(4 * p.rows * p.width, (passes * p.rows + 1) * p.width * p.dtype.itemsize)


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


RMS_NORM = _family("rms_norm", "norm", {"width": range(1, (1 << 30) + 1)}, _rms_norm)
ROPE_APPEND = _family("rope_append", "rope", {"dim": range(2, 513), "layout": ("neox", "interleaved"), "kv": KV}, _rope_append, (_group_in_a_half,))

OPS = (RMS_NORM, ROPE_APPEND)


# ---- activations, rotation and what is used beside a model: reference_rows.py and reference_steps.py

ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "mish")
BIAS = ("", " bias")
PLAIN = tuple(act + bias for act in ACTS for bias in BIAS)
GATED = tuple(act + layout + bias for act in (*ACTS, "clipped") for layout in ("", " interleaved") for bias in BIAS)


def _passes(read: int, written: int, flops: int = 8):
    """Tensors of rows x width, read and written."""
    return lambda p: Cost(flops * p.rows * p.width, (read + written) * p.rows * p.width * p.dtype.itemsize)


def _rotary(p: Rope) -> Cost:
    """q and k read and written; the table is read once a token."""
    heads = p.tokens * (p.heads + p.kv_heads)
    return Cost(6 * heads * p.rotary_dim / 2, 2 * heads * p.dim * p.dtype.itemsize + 4 * p.tokens * p.rotary_dim)


def _pair(op: str, entry: str, accepts: dict, cost, oracle: str = "reference_rows") -> Op:
    """As `_family`, where a file has more than one operator: `entry` is "file:function"."""
    file = entry.partition(":")[0]
    rows = Kernel(f"triton_{file}", f"onchip.kernels.fused.{entry}", GPUS, {"dtype": FLOATS, **accepts})
    return Op(op, cost, (rows, Kernel("reference", f"onchip.kernels.fused.{oracle}:{op}", portable=True)))


GATED_ACT = _pair("gated_act", "mlp:launch", {"variant": GATED}, _passes(2, 1))  # `width` is the output's
GATED_ACT_BACKWARD = _pair("gated_act_backward", "mlp:launch_backward", {"variant": GATED}, _passes(3, 2, 20))
ACTIVATE = _pair("activate", "mlp:launch", {"variant": PLAIN}, _passes(1, 1))
ACTIVATE_BACKWARD = _pair("activate_backward", "mlp:launch_backward", {"variant": PLAIN}, _passes(2, 1, 16))

OPS += (GATED_ACT, GATED_ACT_BACKWARD, ACTIVATE, ACTIVATE_BACKWARD)


def _embedding_backward(p: Rows) -> Cost:
    """The gradient of the output read; that of the weights cleared and written."""
    return Cost(p.rows * p.width, (p.rows + int(p.variant.removeprefix("of "))) * p.width * p.dtype.itemsize)


def _dropout_add(p: Rows) -> Cost:
    """A tenth of a call of Philox an element, about 30 integer operations."""
    return Cost(30 * p.rows * p.width, (2 + (p.variant == "residual")) * p.rows * p.width * p.dtype.itemsize)


def _hadamard(p: Rows) -> Cost:
    """An addition an element and step."""
    return Cost(p.rows * p.width * max(1, p.width.bit_length() - 1), 2 * p.rows * p.width * p.dtype.itemsize)


ROTARY = _pair("rotary", "rope:launch_rotary", {"dim": range(2, 513), "layout": ("neox", "interleaved")}, _rotary)
ROTARY_BACKWARD = _pair("rotary_backward", "rope:launch_rotary_backward", {"dim": range(2, 513), "layout": ("neox", "interleaved")}, _rotary)
EMBEDDING = _pair("embedding", "embedding:launch", {}, _passes(1, 1, 0))
EMBEDDING_BACKWARD = _pair("embedding_backward", "embedding:launch_backward", {}, _embedding_backward)
DROPOUT_ADD = _pair("dropout_add", "dropout:launch", {"variant": ("", "residual")}, _dropout_add)
HADAMARD = _pair("hadamard", "hadamard:launch", {"width": tuple(1 << i for i in range(16))}, _hadamard)

OPS += (ROTARY, ROTARY_BACKWARD, EMBEDDING, EMBEDDING_BACKWARD, DROPOUT_ADD, HADAMARD)


def _adamw(p: Rows) -> Cost:
    """p and the moments read and written, g read; `width` is the elements of all tensors, `rows` their number."""
    moments = 2 if p.variant.startswith(("bf16", "fp16")) else 4
    return Cost(16 * p.width, p.width * (3 * p.dtype.itemsize + 4 * moments))


def _denoise(p: Rows) -> Cost:
    """The sample and the model's output (guided: two of them) read, the next sample written; the data predicted, where a step looks back, read and written."""
    words = p.variant.split()
    passes = 3 + ("guided" in words) + 2 * ("second" in words) + ("scaled" in words)
    return Cost((60 if "noisy" in words else 10) * p.rows * p.width, passes * p.rows * p.width * p.dtype.itemsize)


ADAMW = _pair("adamw", "adamw:launch", {"variant": ("fp32 moments", "bf16 moments", "fp16 moments")}, _adamw, "reference_steps")
GRAD_NORM = _pair("grad_norm", "adamw:launch_norm", {}, lambda p: Cost(2 * p.width, p.width * p.dtype.itemsize), "reference_steps")
DENOISE = _pair("denoise", "denoise:launch", {}, _denoise, "reference_steps")

OPS += (ADAMW, GRAD_NORM, DENOISE)


def _loss(op: str, file: str, function: str, cost) -> Op:
    """A Triton kernel, and plain torch under it."""
    kernel = Kernel(f"triton_{file}", f"onchip.kernels.fused.{file}:{function}", GPUS, {"dtype": FLOATS})
    return Op(op, cost, (kernel, Kernel("reference", f"onchip.kernels.fused.reference_losses:{op}", portable=True)))


CROSS_ENTROPY = _loss("cross_entropy", "cross_entropy", "launch", _passes(1, 0, 4))
CROSS_ENTROPY_BACKWARD = _loss("cross_entropy_backward", "cross_entropy", "launch_backward", _passes(1, 1, 4))
CROSS_ENTROPY_IN_PLACE = _loss("cross_entropy_in_place", "cross_entropy", "launch_in_place", _passes(1, 1, 8))
SCALE = _loss("scale", "cross_entropy", "launch_scale", _passes(1, 1, 1))
SOFTMAX = _loss("softmax", "softmax", "launch", _passes(1, 1, 5))
SOFTMAX_BACKWARD = _loss("softmax_backward", "softmax", "launch_backward", _passes(2, 1, 5))
DIVERGENCE = _loss("divergence", "divergence", "launch", _passes(2, 0, 12))
DIVERGENCE_BACKWARD = _loss("divergence_backward", "divergence", "launch_backward", _passes(2, 1, 10))

OPS += (SOFTMAX, SOFTMAX_BACKWARD, DIVERGENCE, DIVERGENCE_BACKWARD, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_IN_PLACE, SCALE)

OPS += menu_norm.OPS

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

OPS += (SAMPLE, LOG_PROBS, ADJUST_LOGITS, VERIFY)
