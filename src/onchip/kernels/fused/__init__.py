"""The menu of fused row operators: each one's cost and its kernels, fastest first. Imports no DSL."""

import torch

from onchip.core.formats import FORMATS, Format
from onchip.core.kernel import Kernel, Op, pick
from onchip.core.norms import CODES
from onchip.core.problem import Cost, Groups, RankSum, Rope, Rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ANY_FLOATS = {"dtype": (*FLOATS, torch.float64)}  # of plain torch: its results in integers would be cut off, a softmax's to 0
GPUS = {"cuda": 80, "hip": 942}


def _op(name: str, entry: str, cost, oracle: str, accepts: dict | None = None, also: tuple = ()) -> Op:
    """A Triton kernel, `entry` being "file:function", and plain torch of the same name in `oracle` under it."""
    accepts = accepts or {}
    kernel = Kernel(f"triton_{entry.partition(':')[0]}", f"onchip.kernels.fused.{entry}", GPUS, {"dtype": FLOATS, **accepts}, also)
    wider = {} if "dtype" in accepts else ANY_FLOATS
    return Op(name, cost, (kernel, Kernel("reference", f"onchip.kernels.fused.{oracle}:{name}", accepts=wider, portable=True)))


def _passes(read: int, written: int, flops: int = 8):
    """Tensors of rows x width, read and written."""
    return lambda p: Cost(flops * p.rows * p.width, (read + written) * p.rows * p.width * p.dtype.itemsize)


# ---- norms


def _rms_norm(p: Rows) -> Cost:
    """x read and y written; with a residual, that is read and written too. About four flops an element."""
    passes = 4 if "residual" in p.variant else 2
    return Cost(4 * p.rows * p.width, (passes * p.rows + 1) * p.width * p.dtype.itemsize)


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


WIDEST_CODES = 1 << 16  # bytes of a row: 32,768 elements of float32 would spill (ptxas, sm_80 and sm_90)
WIDTHS = {"width": range(1, (1 << 24) + 1)}  # the figures of a row's pieces, of 2,048 columns in the backward pass, are one tile

RMS_NORM = _op("rms_norm", "norm:launch", _rms_norm, "reference", WIDTHS)
NORM = _op("norm", "norm:launch_norm", _norm, "reference_norm", WIDTHS, (_codes_in_registers,))
NORM_BACKWARD = _op("norm_backward", "norm_backward:launch", _norm_backward, "reference_norm", WIDTHS)
GROUP_NORM = _op("group_norm", "group_norm:launch", _group_norm, "reference_norm")
GROUP_NORM_BACKWARD = _op("group_norm_backward", "group_norm_backward:launch", _group_norm_backward, "reference_norm")


# ---- rotation and activations


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


def _rotary(p: Rope) -> Cost:
    """q and k read and written; the table is read once a token."""
    heads = p.tokens * (p.heads + p.kv_heads)
    return Cost(6 * heads * p.rotary_dim / 2, 2 * heads * p.dim * p.dtype.itemsize + 4 * p.tokens * p.rotary_dim)


KV = ("", *map(str, FORMATS))
ROTATED = {"dim": range(2, 513), "layout": ("neox", "interleaved")}
ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "mish")
BIAS = ("", " bias")
PLAIN = {"variant": tuple(act + bias for act in ACTS for bias in BIAS)}
GATED = {"variant": tuple(act + layout + bias for act in (*ACTS, "clipped") for layout in ("", " interleaved") for bias in BIAS)}

ROPE_APPEND = _op("rope_append", "rope:launch", _rope_append, "reference", {**ROTATED, "kv": KV}, (_group_in_a_half,))
ROTARY = _op("rotary", "rope:launch_rotary", _rotary, "reference_rows", ROTATED)
ROTARY_BACKWARD = _op("rotary_backward", "rope:launch_rotary_backward", _rotary, "reference_rows", ROTATED)
GATED_ACT = _op("gated_act", "mlp:launch", _passes(2, 1), "reference_rows", GATED)  # `width` is the output's
GATED_ACT_BACKWARD = _op("gated_act_backward", "mlp:launch_backward", _passes(3, 2, 20), "reference_rows", GATED)
ACTIVATE = _op("activate", "mlp:launch", _passes(1, 1), "reference_rows", PLAIN)
ACTIVATE_BACKWARD = _op("activate_backward", "mlp:launch_backward", _passes(2, 1, 16), "reference_rows", PLAIN)


# ---- softmax and losses over a vocabulary

WIDEST_IN_PLACE = 1 << 22  # bytes of a row: 32 programs of 32 warps hold it


def _row_in_registers(p: Rows) -> str | None:
    size = p.width * p.dtype.itemsize
    return f"rows of {size} bytes, of at most {WIDEST_IN_PLACE}" if size > WIDEST_IN_PLACE else None


SOFTMAX = _op("softmax", "softmax:launch", _passes(1, 1, 5), "reference_losses")
SOFTMAX_BACKWARD = _op("softmax_backward", "softmax:launch_backward", _passes(2, 1, 5), "reference_losses")
DIVERGENCE = _op("divergence", "divergence:launch", _passes(2, 0, 12), "reference_losses")
DIVERGENCE_BACKWARD = _op("divergence_backward", "divergence:launch_backward", _passes(2, 1, 10), "reference_losses")
CROSS_ENTROPY = _op("cross_entropy", "cross_entropy:launch", _passes(1, 0, 4), "reference_losses")
CROSS_ENTROPY_BACKWARD = _op("cross_entropy_backward", "cross_entropy:launch_backward", _passes(1, 1, 4), "reference_losses")
CROSS_ENTROPY_IN_PLACE = _op("cross_entropy_in_place", "cross_entropy:launch_in_place", _passes(1, 1, 8), "reference_losses", also=(_row_in_registers,))
SCALE = _op("scale", "cross_entropy:launch_scale", _passes(1, 1, 1), "reference_losses")


# ---- from logits to tokens


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


VOCABULARY = {"width": range(1, (1 << 20) + 1)}

SAMPLE = _op("sample", "logits:launch", _passes(1, 0, 4), "reference_sampling", VOCABULARY)
LOG_PROBS = _op("log_probs", "logprobs:launch", _passes(1, 0, 4), "reference_sampling", VOCABULARY)
ADJUST_LOGITS = _op("adjust_logits", "penalties:launch", _adjust, "reference_sampling", VOCABULARY)
VERIFY = _op("verify", "verify:launch", _verify, "reference_sampling", VOCABULARY)

# ---- beside the model of a decode step

INTEGERS = {"dtype": (torch.int64,)}
DECODE_PLACES = _op("decode_places", "decode_step:launch_places", lambda p: Cost(6 * p.rows, 32 * p.rows), "reference_steps", INTEGERS)
DECODE_ADVANCE = _op(
    "decode_advance", "decode_step:launch_advance", lambda p: Cost(2 * p.rows, (32 + 8 * ("counts" in p.variant)) * p.rows), "reference_steps", INTEGERS
)


# ---- what is used beside a model


def _embedding_backward(p: Rows) -> Cost:
    """The gradient of the output read; that of the weights cleared and written."""
    return Cost(p.rows * p.width, (p.rows + int(p.variant.removeprefix("of "))) * p.width * p.dtype.itemsize)


def _dropout_add(p: Rows) -> Cost:
    """A tenth of a call of Philox an element, about 30 integer operations."""
    return Cost(30 * p.rows * p.width, (2 + (p.variant == "residual")) * p.rows * p.width * p.dtype.itemsize)


def _hadamard(p: Rows) -> Cost:
    """An addition an element and step."""
    return Cost(p.rows * p.width * max(1, p.width.bit_length() - 1), 2 * p.rows * p.width * p.dtype.itemsize)


def _adamw(p: Rows) -> Cost:
    """p and the moments read and written, g read; `width` is the elements of all tensors, `rows` their number."""
    moments = 2 if p.variant.startswith("bf16") else 4
    return Cost(16 * p.width, p.width * (3 * p.dtype.itemsize + 4 * moments))


def _denoise(p: Rows) -> Cost:
    """The sample and the model's output (guided: two of them) read, the next sample written; the data predicted, where a step looks back, read and written."""
    words = p.variant.split()
    passes = 3 + ("guided" in words) + 2 * ("second" in words) + ("scaled" in words)
    return Cost((60 if "noisy" in words else 10) * p.rows * p.width, passes * p.rows * p.width * p.dtype.itemsize)


def _low_rank(p: Rows) -> Cost:
    """x read, y read and written, and the matrices of every adapter that may be there: of as many as there are rows, at most."""
    words = p.variant.split()
    width, rank, parts, count = int(words[1]), int(words[3]), len(words[5].split("+")), int(words[7])
    matrices = rank * (parts * width + p.width)
    return Cost(2 * p.rows * matrices, p.dtype.itemsize * (p.rows * (width + 2 * p.width) + min(p.rows, count) * matrices))


def _rank_in_a_tile(p: Rows) -> str | None:
    words = p.variant.split()
    reasons = ((int(words[3]), 256, "rank"), (int(words[7]), 1024, "adapters"))
    return next((f"{name} {value} is more than {most}" for value, most, name in reasons if value > most), None)


def _skinny_linear(p: Rows) -> Cost:
    """The weight read, which is all but a thousandth of it; x and the residual read, y written."""
    _, width, *words = p.variant.split()
    weights = int(width) * p.width * (1 if all(word in AROUND for word in words) else 2)
    return Cost(2 * p.rows * weights, p.dtype.itemsize * (weights + p.rows * (int(width) + p.width * (1 + ("residual" in words)))))


def _norm_by_tensor_cores(p: Rows) -> str | None:
    """Rows times the norm's weight are rounded before they are divided by their length."""
    beyond = p.dtype == torch.float16 and p.rows > 2 and "norm" in p.variant.split()
    return f"a norm of {p.rows} rows in fp16, of at most 2: rows times its weight may be more than fp16 holds" if beyond else None


def _by_cublas(p: Rows) -> str | None:
    """Norms and gates of their own and a product of cuBLAS's take less time for more rows than MOST_ROWS."""
    size = _skinny_linear(p._replace(rows=0)).bytes
    most = pick(MOST_ROWS, size)
    return f"{p.rows} rows of a weight of {size / 1e6:.1f} MB, of which cuBLAS is faster for more than {most}" if p.rows > most else None


# (Bytes of a weight up to, rows.) Decode steps by cuBLAS and by this, us: SmolLM2-135M (gate and up 3.5 MB) 16 rows 980, 811; Qwen3-0.6B (12.6) 8 rows 1,247,
# 1,080, 16 rows 1,326, 1,423; Llama-3-8B (235) 2 rows 4,767, 4,173, 4 rows 4,807, 5,138. Nothing between 12.6 and 235 has been timed.
MOST_ROWS = ((1 << 22, 16), (1 << 24, 8), (float("inf"), 2))
EMBEDDING = _op("embedding", "embedding:launch", _passes(1, 1, 0), "reference_rows")
EMBEDDING_BACKWARD = _op("embedding_backward", "embedding:launch_backward", _embedding_backward, "reference_rows")
DROPOUT_ADD = _op("dropout_add", "dropout:launch", _dropout_add, "reference_rows", {"variant": ("", "residual")})
HADAMARD = Op(
    "hadamard",
    _hadamard,
    (
        Kernel(
            "gluon_hadamard", "onchip.kernels.fused.gluon_hadamard:launch", {"cuda": (90,)}, {"dtype": FLOATS, "width": tuple(1 << i for i in range(11, 16))}
        ),
        *_op("hadamard", "hadamard:launch", _hadamard, "reference_rows", {"width": tuple(1 << i for i in range(16))}).kernels,
    ),
)
ADAMW = _op("adamw", "adamw:launch", _adamw, "reference_steps", {"variant": ("fp32 moments", "bf16 moments")})
GRAD_NORM = _op("grad_norm", "adamw:launch_norm", lambda p: Cost(2 * p.width, p.width * p.dtype.itemsize), "reference_steps")
DENOISE = _op("denoise", "denoise:launch", _denoise, "reference_steps")
AROUND = ("norm", "bias", "residual")  # of the words of a skinny product those that are no activation
SKINNY_LINEAR = Op(
    "skinny_linear",
    _skinny_linear,
    (
        Kernel(
            "triton_skinny",
            "onchip.kernels.fused.skinny:launch",
            GPUS,
            {"dtype": FLOATS[:2], "rows": range(1, 17)},
            also=(_norm_by_tensor_cores,),
            slower=(_by_cublas,),
        ),
        Kernel("reference", "onchip.kernels.fused.reference_rows:skinny_linear", accepts=ANY_FLOATS, portable=True),
    ),
)
LOW_RANK = _op("low_rank", "low_rank:launch", _low_rank, "reference_rows", also=(_rank_in_a_tile,))


# ---- over ranks


def _sum_ranks(p: RankSum) -> Cost:
    """x read, a part of each other rank, and the sum or its norm written; a residual read, and the stream written beside its norm."""
    words = p.variant.split()
    passes = 2 + (p.ranks - 1) + ("residual" in words) + (len(words) == 2)
    return Cost((p.ranks + 4) * p.rows * p.width, passes * p.rows * p.width * p.dtype.itemsize)


def _within_reach(p: RankSum) -> str | None:
    return p.apart or None


def _fits_boxes(p: RankSum) -> str | None:
    return f"{p.rows} rows, of at most {p.room} that there is common memory for" if p.rows > p.room and not p.apart else None


def _row_of_a_program(p: RankSum) -> str | None:
    """Of 8 ranks, wider ones spill (ptxas, sm_90)."""
    size = p.width * min(p.dtype.itemsize, 4)
    return f"rows of {size} bytes, of at most 16384" if size > 1 << 14 else None


SUM_RANKS = Op(
    "sum_ranks",
    _sum_ranks,
    (
        Kernel(
            "triton_ranks",
            "onchip.kernels.fused.ranks:launch",
            {"cuda": 80},
            {"dtype": FLOATS},
            also=(_within_reach, _fits_boxes, _row_of_a_program),
        ),
        Kernel("nccl", "onchip.kernels.fused.reference_rows:sum_ranks", GPUS, {"variant": ("",)}),
        Kernel("reference", "onchip.kernels.fused.reference_rows:sum_ranks", portable=True),
    ),
)


OPS = (
    *(RMS_NORM, NORM, NORM_BACKWARD, GROUP_NORM, GROUP_NORM_BACKWARD),
    *(ROPE_APPEND, ROTARY, ROTARY_BACKWARD, GATED_ACT, GATED_ACT_BACKWARD, ACTIVATE, ACTIVATE_BACKWARD),
    *(SOFTMAX, SOFTMAX_BACKWARD, DIVERGENCE, DIVERGENCE_BACKWARD, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_IN_PLACE, SCALE),
    *(SAMPLE, LOG_PROBS, ADJUST_LOGITS, VERIFY, DECODE_PLACES, DECODE_ADVANCE),
    *(EMBEDDING, EMBEDDING_BACKWARD, DROPOUT_ADD, HADAMARD, ADAMW, GRAD_NORM, DENOISE, LOW_RANK, SKINNY_LINEAR, SUM_RANKS),
)
