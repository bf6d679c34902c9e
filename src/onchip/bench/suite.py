"""The suites: lists of Problems, and fresh random inputs for each one."""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import Causal, Full, Mask, Window
from onchip.core.problem import SHORT, Attention, Cost, Operands, Problem, Rows
from onchip.dispatch import OPS
from onchip.kernels.attention import reference
from onchip.models import gguf, weights
from onchip.ops.attention import PagedKV

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN = 16_384, 2_048  # of the prefill rows on a GPU: batch x length, heads x dim
SAMPLE = 64  # queries of one sequence that are held against the reference
GOAL = 5e-6  # seconds one warm `select` may take


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


@dataclass(frozen=True)
class Row:
    """One line of a suite: what is asked, the plot it is in and its place there, and the lengths of packed sequences."""

    problem: Problem | Generate | Overhead | Ladder
    group: str
    x: str
    lengths: tuple[int, ...] = ()


# ---- rows


def rows(suite: str, device: torch.device, quick: bool = False) -> list[Row]:
    """The rows of a suite for this kind of device; ValueError when there is no such suite."""
    if suite not in SUITES:
        raise ValueError(f"no suite named {suite!r}; the suites are {', '.join(SUITES)}")
    return SUITES[suite](device, quick)


def _attention(device: torch.device, quick: bool) -> list[Row]:
    if device.type == "cpu":
        return _attention_cpu(quick)
    found = []
    for dim in (64, 128) if quick else (64, 128, 256):
        for mask in (Full(), Causal()):
            for n in (1024, TOKENS) if quick else (1024, 4096, TOKENS):
                heads = HIDDEN // dim
                found.append(_prefill((TOKENS // n, n), (heads, heads, dim), f"prefill d{dim} {type(mask).__name__.lower()}", mask=mask))
    for batch, n in ((2, 8192),) if quick else ((4, 4096), (2, 8192), (1, TOKENS)):
        found.append(_prefill((batch, n), (32, 8, 128), "prefill d128 causal, 32 heads over 8"))
    found.append(_prefill((4, 4096), (20, 20, 96), "prefill, other shapes", "d96 4k"))
    found.append(_prefill((1, TOKENS), (16, 16, 128), "prefill, other shapes", "window 1k", Window(1024)))
    lengths = tuple(1 << i for i in range(6, 14)) * 2
    packed = Attention("prefill", len(lengths), max(lengths), max(lengths), 16, 16, 128, BF16, Causal(), "packed", 0, sum(lengths))
    found.append(Row(packed, "prefill, other shapes", "packed 64..8k", lengths))
    for n, heads in ((512, 16), (2048, 8)):
        found.append(_prefill((1, n), (heads, heads, 128), "prefill d128 causal, one short sequence"))
    return found + _decode_gpu(quick)


def _attention_cpu(quick: bool) -> list[Row]:
    found = []
    for dtype in (FP32, BF16):
        for heads in ((9, 3, 64), (8, 8, 128)):
            group = f"prefill causal {SHORT[dtype]}, {heads[0]} heads over {heads[1]}, d{heads[2]}"
            found += [_prefill((1, n), heads, group, dtype=dtype) for n in ((128, 512) if quick else (128, 512, 2048))]
        for batch in (1,) if quick else (1, 8):
            found.append(_decode((batch, 1024), (9, 3, 64), f"decode {SHORT[dtype]}, 9 heads over 3, d64", dtype=dtype))
    return found


def _decode_gpu(quick: bool) -> list[Row]:
    shapes = ((1, 8192), (32, 4096)) if quick else ((1, 8192), (1, 131_072), (8, 8192), (32, 4096), (128, 1024), (128, 8192))
    found = [_decode(shape, (32, 8, 128), "decode d128, 32 heads over 8, page 16") for shape in shapes]
    found += [_decode((32, 4096), (32, 8, 128), "decode 32x4k, other pages", f"page {page}", page) for page in (1, 64, 256)]
    return [*found, _decode((32, 4096), (32, 8, 64), "decode 32x4k, other pages", "d64")]


def _prefill(shape: tuple, heads: tuple, group: str, x: str = "", mask: Mask = Causal(), dtype: torch.dtype = BF16) -> Row:
    """`shape` is (batch, len), `heads` (heads, kv_heads, dim)."""
    return Row(Attention("prefill", shape[0], shape[1], shape[1], *heads, dtype, mask), group, x or _short(shape[1]))


def _decode(shape: tuple, heads: tuple, group: str, x: str = "", page: int = 16, dtype: torch.dtype = BF16) -> Row:
    """`shape` is (batch, keys), `heads` (heads, kv_heads, dim)."""
    return Row(Attention("decode", shape[0], 1, shape[1], *heads, dtype, Causal(), "paged", page), group, x or f"{shape[0]}x{_short(shape[1])}")


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


SUITES: dict[str, Callable[[torch.device, bool], list[Row]]] = {"attention": _attention, "generate": _generate, "dispatch": _dispatch, "io": _io}


def _short(n: int) -> str:
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


# ---- inputs


@dataclass(frozen=True, eq=False)
class Tensors:
    """Random inputs of an attention Problem, `[batch, len, heads, dim]`, or without batch when `offsets` says they are packed."""

    problem: Attention
    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    offsets: Tensor | None = None
    cache: PagedKV | None = None
    lengths: tuple[int, ...] = ()
    on_host = False  # time it where it runs, not by the host's clock

    @property
    def tolerance(self) -> float:
        return 2e-2 if self.problem.dtype.itemsize == 2 else 1e-3

    @property
    def cost(self) -> Cost:
        """That of the Problem; for packed sequences that of the lengths they really have."""
        of = OPS[self.problem.op].cost
        each = [of(self.problem._replace(batch=1, len_q=n, len_k=n, keys="dense", tokens=0)) for n in self.lengths]
        return functools.reduce(Cost.__add__, each) if each else of(self.problem)

    def error(self, output: Tensor, ours: Tensor | None) -> float:
        """||output - truth|| / ||truth||: against the float32 reference on one sequence's last queries, and against `ours` in full; the larger."""
        to_truth = distance(self._sample(output), self._truth)
        return to_truth if ours is None else _larger(to_truth, distance(output, ours))

    @functools.cached_property
    def _truth(self) -> Tensor:
        if self.cache is not None:
            pages, length = self.cache.page_table[-1].long(), int(self.cache.lengths[-1])
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in (self.cache.k, self.cache.v))
        else:
            k, v = ((x[-self.lengths[-1] :] if self.lengths else x[-1]) for x in (self.k, self.v))
        return reference.one(self.problem, 0, self._sample(self.q).float(), k, v, Operands(self.problem.dim**-0.5))[0]

    def _sample(self, x: Tensor) -> Tensor:
        """The last queries of the last sequence, `[queries, heads, dim]`; masks align bottom right, so these are a Problem of their own."""
        queries = self.lengths[-1] if self.lengths else self.problem.len_q
        return (x if self.lengths else x[-1])[-min(SAMPLE, queries) :]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Random token ids, new ones for each call, so that no cache of prefixes can answer."""

    problem: Generate
    device: torch.device
    on_host = True

    @property
    def tolerance(self) -> float:
        return 1.0 if self.problem.dtype.itemsize == 2 else 0.1  # nats; a wrong token is off by several

    @property
    def cost(self) -> Cost:
        return _model_cost(self.problem)

    def draw(self) -> list[list[int]]:
        return torch.randint(1000, 40_000, (self.problem.batch, self.problem.prompt)).tolist()

    def error(self, output: tuple, _ours) -> float | None:
        """The most by which transformers' best next token beats the one chosen, in nats; None without transformers."""
        if importlib.util.find_spec("transformers") is None:
            return None
        prompts, new = (torch.tensor(x, device=self.device) for x in output)
        logits = packaged_model(self.problem.dtype, self.device)(torch.cat([prompts, new], 1), logits_to_keep=new.shape[1] + 1).logits[:, :-1].float()
        return (logits.amax(-1) - logits.gather(2, new[..., None])[..., 0]).max().item()


@dataclass(frozen=True, eq=False)
class Tiny:
    """Tensors so small that only the path to the kernel costs anything."""

    problem: Overhead
    device: torch.device
    args: tuple  # of the public function
    on_host = True
    cost = None
    tolerance = 0.0

    def error(self, _output, _ours) -> float:
        return 0.0


def inputs(row: Row, device: torch.device) -> Tensors | Prompts | Tiny:
    """Fresh random inputs for one row."""
    if isinstance(row.problem, Generate):
        return Prompts(row.problem, device)
    if isinstance(row.problem, Overhead):
        return Tiny(row.problem, device, _tiny(row.problem.inner, device))
    if isinstance(row.problem, Ladder):
        return _tensors(row.problem.inner, (), device)
    return _tensors(row.problem, row.lengths, device)


def _tensors(p: Attention, lengths: tuple[int, ...], device: torch.device) -> Tensors:
    draw = functools.partial(torch.randn, dtype=p.dtype, device=device)
    if p.keys == "paged":
        each = p.len_k // p.page
        k, v = (draw(p.batch * each, p.page, p.kv_heads, p.dim) for _ in range(2))
        table = torch.randperm(p.batch * each, device=device).view(p.batch, each).int()
        cache = PagedKV(k, v, table, torch.full((p.batch,), p.len_k, dtype=torch.int32, device=device))
        return Tensors(p, draw(p.batch, p.len_q, p.heads, p.dim), cache=cache)
    if p.keys == "packed":
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return Tensors(p, draw(p.tokens, p.heads, p.dim), *(draw(p.tokens, p.kv_heads, p.dim) for _ in range(2)), offsets=offsets, lengths=lengths)
    return Tensors(p, draw(p.batch, p.len_q, p.heads, p.dim), *(draw(p.batch, p.len_k, p.kv_heads, p.dim) for _ in range(2)))


def _tiny(p: Attention | Rows, device: torch.device) -> tuple:
    if isinstance(p, Attention):
        made = _tensors(p, (), device)
        return (made.q, made.cache) if p.keys == "paged" else (made.q, made.k, made.v)
    if p.op == "rms_norm":
        return tuple(torch.randn(*shape, dtype=p.dtype, device=device) for shape in ((p.rows, p.width), (p.width,)))
    return (torch.randn(p.rows, 2 * p.width, dtype=p.dtype, device=device),)


def distance(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||, in float32."""
    truth = truth.float()
    return ((x.float() - truth).norm() / truth.norm()).item()


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


# ---- the packaged model


@functools.lru_cache(maxsize=1)
def packaged_model(dtype: torch.dtype, device: torch.device):
    """The packaged model in transformers, its weights unpacked to `dtype`: the truth for tokens, and a peer."""
    import transformers

    # Since 5.17 transformers leaves the weights in GGUF blocks unless asked; before, it had no such class and always unpacked.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    file = weights.locate(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype, **unpack)
    return model.eval().to(device)


@functools.cache
def _widths() -> tuple[int, int, int, int]:
    """Weights in all, those of the (tied) embedding, and the columns of q and of k and v summed over layers."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in gguf.read(weights.locate(None)).tensors.items()}
    hidden = sizes["output_norm.weight"]
    q, kv = (sum(n for name, n in sizes.items() if name.endswith(ends)) // hidden for ends in (("attn_q.weight",), ("attn_k.weight", "attn_v.weight")))
    return sum(sizes.values()), sizes["token_embd.weight"], q, kv


def _model_cost(p: Generate) -> Cost:
    """Weights read once a step, keys and values written (prefill) or read (decode) once; only last positions meet the vocabulary."""
    stored, embedding, q_cols, kv_cols = _widths()
    size = p.dtype.itemsize
    if p.phase == "prefill":
        flops = 2 * (stored - embedding) * p.prompt + 2 * embedding + 4 * q_cols * Causal().area(p.prompt, p.prompt)
        return Cost(p.batch * flops, size * (stored + p.batch * p.prompt * kv_cols))
    keys = p.prompt + p.new // 2  # of the middle step
    return Cost(p.batch * (2 * stored + 4 * q_cols * keys), size * (stored + p.batch * keys * kv_cols))
