"""The suites: lists of Problems, and of questions about them that `onchip bench` asks."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from onchip.bench import block, mods
from onchip.bench import rows as operators
from onchip.core.masks import Causal, Full, Mask, Window
from onchip.core.problem import E4M3, SHORT, Attention, Problem, Rope, Rows
from onchip.core.trace import Traced

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN = 16_384, 2_048  # of the prefill rows on a GPU: batch x length, heads x dim
LENGTHS = tuple(1 << i for i in range(10, 16))
GOAL = 5e-6  # seconds one warm `select` may take
POWERS = tuple(1 << i for i in range(6, 14)) * 2  # lengths of packed sequences
DRAWN = tuple(map(random.Random(3).randint, [64] * 8, [8192] * 8))
SINGLE = ((512, 16), (2048, 8), (512, 8), (512, 32), (1024, 16), (2048, 32))  # queries and heads of one short sequence
AHEAD = ((64, 131072), (128, 32768), (128, 8192))  # queries, and keys of which most come before them
HEADS = (32, 8, 128)  # query heads, key heads and dimension of the decode rows
SHAPES = ((1, 1024), (1, 8192), (1, 131_072), (8, 8192), (32, 4096), (128, 1024), (128, 8192))  # (batch, keys) of them
UNEVEN = (131_072, *[512] * 63)


class Generate(NamedTuple):
    """SmolLM2 over `batch` prompts of `prompt` tokens: "prefill" is the time to the first new token, "decode" that of each of the next `new`."""

    op: str
    phase: str
    batch: int
    prompt: int
    new: int
    dtype: torch.dtype

    def __str__(self):
        return f"{self.op} {self.phase} SmolLM2-135M B{self.batch} prompt {self.prompt} new {self.new} {SHORT[self.dtype]}"


class Overhead(NamedTuple):
    """What a call costs before its kernel: "select" builds a Problem and selects, "call" is the whole public function on tiny tensors."""

    op: str
    inner: Attention | Rows

    def __str__(self):
        return f"{self.op}: {self.inner}"


class Ladder(NamedTuple):
    """Attention by every rung of `bench/ladder.py`, from the score matrix in memory to onchip, with memory and bytes beside the time."""

    op: str
    inner: Attention

    def __str__(self):
        return f"{self.op}: {self.inner}"


class Pass(NamedTuple):
    """One pass of attention as a model in training makes it: "forward", "backward", or "step" (both, and the memory they hold).

    `inner` is without the mod, which is one of `bench/mods.py` by name; empty: the plain Problem is all that is asked.
    memory   "tokens first" ([batch, len, heads, dim]) or "heads first": how q, k, v and the output's gradient lie, for all peers alike; empty: for
             each as it likes best, and the copy is off the clock.
    """

    op: str
    inner: Attention
    mod: str = ""
    memory: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def __str__(self):
        asked = self.inner._replace(op=self.op, mask=Traced(self.mod, "") if self.mod else self.inner.mask)
        return f"{asked} {self.memory}".rstrip()


class Shared(NamedTuple):
    """Paged attention of sequences whose first `prefix` tokens are the same, in the same pages: read once, or once for each."""

    op: str
    inner: Attention
    prefix: int

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def __str__(self):
        return f"{self.op} of {self.prefix}: {self.inner}"


Asked = Problem | Generate | Overhead | Ladder | Pass | Shared | operators.RowOp | block.Block


@dataclass(frozen=True)
class Row:
    """One line of a suite: what is asked, the plot it is in and its place there.

    lengths   tokens of packed sequences, keys of paged ones.       queries   of each paged sequence, where they are packed.
    """

    problem: Asked
    group: str
    x: str
    lengths: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()


# ---- rows


def rows(suite: str, device: torch.device, quick: bool = False, only: str = "") -> list[Row]:
    """The rows of a suite for this kind of device, of those with `only` in the name of their plot or problem; ValueError when there is no such suite."""
    if suite not in SUITES:
        raise ValueError(f"no suite named {suite!r}; the suites are {', '.join(SUITES)}, quality and serve")
    return [row for row in SUITES[suite](device, quick) if only.lower() in f"{row.group} {row.problem}".lower()]


def _attention(device: torch.device, quick: bool) -> list[Row]:
    if device.type == "cpu":
        return _attention_cpu(quick)
    found = []
    for dim in (64, 128) if quick else (64, 128, 256):
        for mask in (Full(), Causal()):
            for n in (1024, TOKENS) if quick else LENGTHS:
                heads = HIDDEN // dim
                found.append(_prefill((max(1, TOKENS // n), n), (heads, heads, dim), f"prefill d{dim} {type(mask).__name__.lower()}", mask=mask))
    for kv_heads in (8, 4):
        for batch, n in ((2, 8192),) if quick else ((4, 4096), (2, 8192), (1, TOKENS)):
            found.append(_prefill((batch, n), (32, kv_heads, 128), f"prefill d128 causal, 32 heads over {kv_heads}"))
    found.append(_prefill((4, 4096), (20, 20, 96), "prefill, other shapes", "d96 4k"))
    found.append(_prefill((1, TOKENS), (16, 16, 128), "prefill, other shapes", "window 1k", Window(1024)))
    found.append(_prefill((4, 8192), (16, 16, 128), "prefill, other shapes", "4 x 8k"))
    found += [Row(_packed(lengths), "prefill, other shapes", x, lengths) for x, lengths in (("packed 64..8k", POWERS), ("packed, drawn", DRAWN))]
    for dim, n in ((128, TOKENS),) if quick else ((128, 4096), (128, TOKENS), (64, TOKENS), (256, TOKENS)):
        for mask in (Full(), Causal()):
            heads = (HIDDEN // dim, HIDDEN // dim, dim)
            found.append(_prefill((TOKENS // n, n), heads, "prefill e4m3", f"d{dim} {type(mask).__name__.lower()} {_short(n)}", mask, E4M3))
    for dim, mask, sizes in (
        (128, Causal(), SINGLE[:2] if quick else SINGLE),
        (128, Full(), SINGLE[:0] if quick else SINGLE[1::2]),
        (64, Causal(), SINGLE[:1]),
    ):
        for n, heads in sizes:
            group = f"prefill d{dim} {type(mask).__name__.lower()}, one short sequence"
            found.append(_prefill((1, n), (heads, heads, dim), group, f"{_short(n)}, {heads} heads", mask))
    for mask in (Causal(), Full())[: 1 if quick else 2]:
        for len_q, len_k in AHEAD[:1] if quick else AHEAD:
            p = Attention("prefill", 1, len_q, len_k, 32, 8, 128, BF16, mask)
            found.append(Row(p, f"prefill d128 {type(mask).__name__.lower()}, few queries over many keys", f"{len_q} over {_short(len_k)}"))
    return found


def _attention_cpu(quick: bool) -> list[Row]:
    found = []
    for dtype in (FP32, BF16):
        for heads in ((9, 3, 64), (8, 8, 128)):
            group = f"prefill causal {SHORT[dtype]}, {heads[0]} heads over {heads[1]}, d{heads[2]}"
            found += [_prefill((1, n), heads, group, dtype=dtype) for n in ((128, 512) if quick else (128, 512, 2048))]
        found += _few(quick, dtype)
    return found


def _few(quick: bool, dtype: torch.dtype) -> list[Row]:
    return [_decode((batch, 1024), (9, 3, 64), f"decode {SHORT[dtype]}, 9 heads over 3, d64", dtype=dtype) for batch in ((1,) if quick else (1, 8))]


def _decoding(device: torch.device, quick: bool) -> list[Row]:
    """What an engine asks of a paged cache. `quick`: a row of each kind."""
    if device.type == "cpu":
        return [row for dtype in (FP32, BF16) for row in _few(quick, dtype)]
    found = [_decode(shape, HEADS, "decode in bf16") for shape in (SHAPES if not quick else ((1, 8192), (32, 4096)))]
    for kv in ("e4m3", "int8", "int4"):
        found += [_decode(shape, HEADS, f"decode in {kv}", kv=kv) for shape in (SHAPES[3:] if not quick else ((32, 4096),))]
    found += [_decode((32, 4096), HEADS, "other pages", f"page {page}", page) for page in (1, 256)]
    shapes = {"d64": (64, (32, 8, 64)), "d256": (16, (32, 8, 256)), "MHA": (32, (8, 8, 128)), "MQA": (256, (32, 1, 128))}  # of about the bytes of 32x4k
    shapes |= {"GQA 4": (64, (16, 4, 128)), "GQA 8": (64, (32, 4, 128)), "GQA 16": (128, (32, 2, 128))}
    found += [_decode((batch, 4096), heads, "other heads", x) for x, (batch, heads) in shapes.items()]
    even = sum(UNEVEN) // 64
    found.append(_cached((64, 1, UNEVEN[0]), HEADS, "uneven lengths", "128k and 63 of 512", lengths=UNEVEN))
    found.append(_cached((64, 1, even), HEADS, "uneven lengths", "even"))
    found.append(_cached((32, 4, 4096), HEADS, "speculative", "4 queries, 32x4k"))
    found.append(_cached((8, 512, 8192), HEADS, "chunks of a prefill", "8x512 over 8k"))
    found.append(_cached((1, 128, 131072), HEADS, "chunks of a prefill", "128 over 128k"))
    found.append(_mixed((60, 4096), (4, 512, 8192)))
    alike = _cached((64, 1, 9216), HEADS, "shared prefix", "64 share 8k of 9k")
    found.append(replace(alike, problem=Shared("cascade", alike.problem, 8192)))
    for batch, n in ((32, 4096),) if quick else ((1, 8192), (32, 4096), (128, 4096)):
        p = Attention("decode", batch, 1, n, 128, 1, 576, BF16, Causal(), "paged", 64, dim_v=512, extras=("latent",))
        found.append(Row(p, "latent (MLA), 128 heads", f"{batch}x{_short(n)}"))
        found.append(Row(p._replace(op="latent"), "MLA in e4m3, 128 heads", f"{batch}x{_short(n)}"))
    append = Rope("rope_append", 4096, *HEADS, HEADS[2], BF16, "neox", False, True)
    return found + [Row(append._replace(kv=kv), "append", kv or "bf16") for kv in ("", "e4m3", "int8", "int4")]


def _prefill(shape: tuple, heads: tuple, group: str, x: str = "", mask: Mask = Causal(), dtype: torch.dtype = BF16) -> Row:
    """`shape` is (batch, len), `heads` (heads, kv_heads, dim)."""
    return Row(Attention("prefill", shape[0], shape[1], shape[1], *heads, dtype, mask), group, x or _short(shape[1]))


def _packed(lengths: tuple[int, ...]) -> Attention:
    return Attention("prefill", len(lengths), max(lengths), max(lengths), 16, 16, 128, BF16, Causal(), "packed", 0, sum(lengths))


def _decode(shape: tuple, heads: tuple, group: str, x: str = "", page: int = 16, dtype: torch.dtype = BF16, kv: str = "") -> Row:
    """`shape` is (batch, keys), `heads` (heads, kv_heads, dim), `kv` the format of keys and values."""
    return Row(Attention("decode", shape[0], 1, shape[1], *heads, dtype, Causal(), "paged", page, kv=kv), group, x or f"{shape[0]}x{_short(shape[1])}")


def _cached(shape: tuple, heads: tuple, group: str, x: str, **more) -> Row:
    """`shape` is (batch, queries, keys of the longest); `more` goes to the Row."""
    return Row(Attention("decode", *shape, *heads, BF16, Causal(), "paged", 16), group, x, **more)


def _mixed(decodes: tuple, chunks: tuple) -> Row:
    """`decodes` is (sequences, keys), `chunks` (sequences, queries, keys), in one packed call."""
    queries, lengths = (1,) * decodes[0] + (chunks[1],) * chunks[0], (decodes[1],) * decodes[0] + (chunks[2],) * chunks[0]
    p = Attention("decode", len(queries), chunks[1], chunks[2], *HEADS, BF16, Causal(), "paged", 16, sum(queries))
    return Row(p, "chunks of a prefill", f"{decodes[0]} decodes and {chunks[0]} chunks", lengths, queries)


def _generate(device: torch.device, quick: bool) -> list[Row]:
    found = []
    for dtype in (BF16,) if quick or device.type != "cpu" else (BF16, FP32):
        for batch in (1,) if quick else (1, 8):
            for phase in ("prefill", "decode"):
                found.append(Row(Generate("generate", phase, batch, 512, 64, dtype), phase, f"{SHORT[dtype]} B{batch}"))
    return found


def _dispatch(_device: torch.device, _quick: bool) -> list[Row]:
    inner = {
        "attention": Attention("prefill", 1, 8, 8, 2, 2, 16, FP32, Causal()),
        "paged attention": Attention("decode", 1, 1, 16, 2, 2, 16, FP32, Causal(), "paged", 16),
        "rms_norm": Rows("rms_norm", 1, 64, FP32),
        "gated_act": Rows("gated_act", 1, 64, FP32, "silu"),
    }
    return [Row(Overhead(op, problem), op, name) for op in ("select", "call") for name, problem in inner.items()]


def _io(device: torch.device, quick: bool) -> list[Row]:
    """One shape at growing length; the score matrices of the longest take 8.6 GB on a CPU and 69 GB on a GPU, two at a time."""
    batch, heads, dtype = (1, 4, FP32) if device.type == "cpu" else (4, 16, BF16)
    group = f"B{batch} h{heads} d64 {SHORT[dtype]}"
    lengths = [1 << i for i in (range(9, 12) if quick else range(9, 15))]
    return [Row(Ladder("ladder", Attention("prefill", batch, n, n, heads, heads, 64, dtype, Full())), group, _short(n)) for n in lengths]


def _backward(device: torch.device, quick: bool) -> list[Row]:
    if device.type == "cpu":
        found = [_pass("backward", row) for row in _attention_cpu(quick) if row.problem.op == "prefill"]
        return [*found, Row(Pass("step", Attention("prefill", 1, 2048, 2048, 4, 4, 64, FP32, Causal())), "forward and backward", "2k")]
    rows = [row for row in _attention(device, quick) if row.problem.op == "prefill"]
    grid = [row for row in rows if row.group.endswith((" full", " causal"))]
    others = [row for row in rows if row.x in ("window 1k", "4 x 8k", "packed 64..8k", "packed, drawn")]
    grouped = _prefill((2, 8192), (32, 4, 128), "prefill d128 causal, 32 heads over 4")
    long = Row(Pass("step", Attention("prefill", 1, 65_536, 65_536, 16, 16, 128, BF16, Causal())), "forward and backward", "64k")
    eight_bits = [row for row in rows if row.group == "prefill e4m3" and row.problem.dim <= 128]
    return [*(_pass("backward", row) for row in [*grid, grouped, *others, *eight_bits]), long]


def _pass(op: str, row: Row) -> Row:
    """The row of a forward pass as one of another pass."""
    return Row(Pass(op, row.problem), row.group.replace("prefill", op), row.x, row.lengths)


def _mods(device: torch.device, quick: bool) -> list[Row]:
    names = {"the price of a mod": mods.PRICE, "padding": mods.PADDED, "attention-gym": mods.GYM}
    few = {title: [name for n, name in enumerate(found) if n < 3 or name in mods.DROPPED] for title, found in names.items()}
    return [row for title, found in (few if quick else names).items() for row in _modded(device, title, list(found))]


def _sdpa(device: torch.device, quick: bool) -> list[Row]:
    """All that torch's attention has, on a CPU, of the same tensors in either layout: its masks are tensors of all pairs."""
    if device.type != "cpu":
        return []
    kinds = {"full": (4, Full(), ""), "causal": (4, Causal(), ""), "grouped causal": (2, Causal(), "")} | {name: (4, Full(), name) for name in mods.DENSE}
    found = []
    for op, memory, (name, (kv_heads, mask, mod)) in product(("forward", "backward"), ("tokens first", "heads first"), kinds.items()):
        for dtype, dim, n in product((FP32, BF16), (64, 128), (256, 1024) if quick else (256, 1024, 2048, 4096)):
            p = Attention("prefill", 1, n, n, 4, kv_heads, dim, dtype, mask)
            found.append(Row(Pass(op, p, mod, memory), f"{op}, {memory}, {name}, {SHORT[dtype]}, d{dim}", _short(n)))
    return found


def _gym(device: torch.device, quick: bool) -> list[Row]:
    return _modded(device, "attention-gym, the rest", ["plain", *mods.REST][: 3 if quick else None])


def _operators(device: torch.device, quick: bool) -> list[Row]:
    return [Row(*found) for found in operators.problems(device, quick)]


def _block(device: torch.device, quick: bool) -> list[Row]:
    return [Row(p, f"Llama block, {p.op}", f"{_short(p.tokens)} tokens") for p in block.problems(device, quick)]


def _modded(device: torch.device, title: str, names: list[str]) -> list[Row]:
    shape = (1, 512, 512, 4, 4, 64, FP32) if device.type == "cpu" else (2, 8192, 8192, 16, 16, 128, BF16)
    p = Attention("prefill", *shape, Full())
    return [Row(Pass(op, mods.sizes(name, p), name), f"{title}, {op}", name) for op in ("forward", "backward") for name in names]


SUITES: dict[str, Callable[[torch.device, bool], list[Row]]] = {
    "attention": _attention, "decode": _decoding, "backward": _backward, "mods": _mods, "gym": _gym, "sdpa": _sdpa, "generate": _generate,
    "dispatch": _dispatch, "rows": _operators, "block": _block, "io": _io,
}  # fmt: skip


def _short(n: int) -> str:
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)
