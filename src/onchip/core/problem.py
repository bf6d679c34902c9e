"""A Problem is a call without its tensors: sizes, dtype and the static part of the mask.

It is the dispatch key, the test id, the benchmark row and the input of the cost model. Problems are named tuples because
building and hashing one is on the path of every call (about 1 us; a frozen dataclass takes three times that).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.masks import Band, Full
from onchip.core.scales import Scales
from onchip.core.trace import Traced

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
DTYPES = {name: dtype for dtype, name in SHORT.items()}
E4M3 = torch.float8_e4m3fn
SHORT[E4M3] = "e4m3"


def exact_of(dtype: torch.dtype) -> torch.dtype:
    """What sums and statistics of numbers in `dtype` are in: float32, or float64 where that was given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Cost(NamedTuple):
    """What a call has to do at least: multiply-adds counted as two, and bytes read once and written once."""

    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class Attention(NamedTuple):
    """`softmax(score(scale q k^T) + mask) v`.

    op      "prefill": many queries a sequence; "backward": its gradients; "decode": queries, one or many, over a paged cache; "latent": over one of
            latent keys in e4m3 (`ops/latent.py`).
    keys    "dense" [batch, len, heads, dim], "packed" [tokens, heads, dim] or "paged" [pages, page, kv_heads, dim].
    len_q, len_k   of the longest sequence. A packed problem also has `tokens`, the queries in all (and `tokens_k`, the keys, where
            they are not as many); its cost supposes sequences of equal length. A paged problem's `len_k` is the capacity of its page table,
            and it has `tokens` where its queries are packed.
    mask    a band (`Full`, `Causal`, `Window`), or the text of any other mask.     score   the text of what happens to a score, or None.
    dim_v   of the values, where it is not `dim`; else 0.
    extras  in alphabetical order, what else the call asks for: see EXTRAS.
    kv      the format of quantised keys and values of a paged problem (`str(Format)`), "" for those in `dtype`.
    """

    op: str
    batch: int
    len_q: int
    len_k: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    mask: Band | Traced = Full()
    keys: str = "dense"
    page: int = 0
    tokens: int = 0
    tokens_k: int = 0
    dim_v: int = 0
    score: Traced | None = None
    extras: tuple[str, ...] = ()
    kv: str = ""

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        return self.dim_v or self.dim

    def __str__(self):
        parts = [
            f"{self.op} B{self.batch} q{self.len_q} k{self.len_k} h{self.heads}/{self.kv_heads} d{self.dim}" + f"/{self.dim_v}" * bool(self.dim_v),
            SHORT.get(self.dtype, str(self.dtype)),
            str(self.mask),
        ]
        packed = f"packed {self.tokens}" + f"/{self.tokens_k}" * bool(self.tokens_k) + " tokens"
        parts += {"dense": [], "packed": [packed], "paged": [packed] * bool(self.tokens) + [f"page {self.page}"]}[self.keys]
        return " ".join(parts + [f"kv {self.kv}"] * bool(self.kv) + [str(self.score)] * (self.score is not None) + list(self.extras))


EXTRAS = {
    "batch_invariant": "a row's result does not depend on its neighbours in the batch",
    "deterministic": "gradients are the same bits in every run",
    "dropout": "weights are dropped at random",
    "key_scales": "keys or values in e4m3 have more scales than one a head",
    "latent": "values are the first columns of the keys, in the same memory",
    "score_grad": "gradients to the tensors that the score reads",
    "sinks": "a learnt logit a head joins the softmax's sum",
    "tf32": "float32 products on tensor cores",
    "token_scales": "numbers in e4m3 have a scale for each token",
    "used": "sequences use less than their share of the packed tokens",
}


class Dropout(NamedTuple):
    """Each weight is dropped with probability `p`, the others grow by 1 / (1 - p).

    The random numbers are Philox-4x32 (Salmon et al., 2011) of (seed, offset, sequence, head, query, key), as `core/philox.py` says: whatever kernel runs,
    on whatever device, drops the same ones. `seed` None: drawn from torch's generator of the device. In a compiled graph, which holds no numbers of its own,
    it may be a tensor, int64 [].
    """

    p: float
    seed: int | Tensor | None = None
    offset: int = 0


class Operands(NamedTuple):
    """The tensors of an attention call beside q, k and v, as kernels get them; None or () where the Problem does not ask for them.

    q_offsets, k_offsets   int32 [batch + 1] of a packed problem, the first alone of packed queries over pages; q_used, k_used: int32 [batch] or None.
    mask, score    the tensors that the mask's and the score's text reads.        sinks   [heads].
    drop, state    the probability, and int64 [2] on the device: seed and offset.
    scales         of q, k and v in e4m3.
    sources        what their gradients go to, see `Quantised`: of kernels, only those in plain torch look at it, so that autograd finds its way.
    beside         which launch shares the device with this one; a kernel need not look at it.
    softmax        what the output and LSE of a backward pass are of: the "whole" of a row's keys, or these are a "part" of them (ring attention).
    """

    scale: float
    q_offsets: Tensor | None = None
    k_offsets: Tensor | None = None
    q_used: Tensor | None = None
    k_used: Tensor | None = None
    mask: tuple[Tensor, ...] = ()
    score: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    drop: float = 0.0
    state: Tensor | None = None
    scales: Scales | None = None
    sources: tuple[Tensor, ...] | None = None
    beside: "Beside | None" = None
    softmax: str = "whole"


def spans(offsets: Tensor, used: Tensor | None, tokens: int, shared: bool = False) -> list[slice]:
    """The tokens of each sequence of a packed batch, of `tokens` in all; waits for the device.

    Raises ValueError where a sequence does not lie in them: torch's own kernels end the process there. And where two have some in common, unless
    they may be `shared`: the one would be written over the other.
    """
    bounds = offsets.tolist()
    ends = bounds[1:] if used is None else [first + n for first, n in zip(bounds, used.tolist(), strict=False)]
    found = list(zip(bounds, ends, strict=False))
    for i, (first, end) in enumerate(found):
        if not 0 <= first <= end <= tokens:
            raise ValueError(f"attention: sequence {i} of a packed batch has tokens {first} to {end} of {tokens}; give offsets that rise and lie in them")
    if used is not None and not shared:
        for (_, end), (first, _) in itertools.pairwise(sorted(span for span in found if span[0] < span[1])):
            if first < end:
                raise ValueError(f"attention: two sequences of a packed batch use token {first}; give used lengths that end where the next one begins")
    return [slice(*span) for span in found]


class Beside(NamedTuple):
    """Two launches, one behind the other, of which neither reads what the other writes and both may run at once.

    sms     multiprocessors that this one takes.        second   whether it is the later one: it may begin when the first has begun,
            and is complete when both are.
    """

    sms: int
    second: bool


class Rows(NamedTuple):
    """An operator on the rows of a matrix: `rms_norm`, `gated_act`, `sample`, `softmax`, `cross_entropy`, `quantise` ...

    variant   its form: "residual", "silu", "block", "4 heads".
    """

    op: str
    rows: int
    width: int
    dtype: torch.dtype
    variant: str = ""

    def __str__(self):
        return " ".join(part for part in (self.op, f"{self.rows}x{self.width}", SHORT.get(self.dtype, str(self.dtype)), self.variant) if part)


class Rope(NamedTuple):
    """Rotary embedding of packed queries and keys `[tokens, (heads + 2 kv_heads) dim]`, with QK-norm and the cache write.

    kv   the format of the cache where it is quantised (`str(Format)`), "" where it is in `dtype`.
    """

    op: str
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rotary_dim: int
    dtype: torch.dtype
    layout: str
    norm: bool
    append: bool
    kv: str = ""

    def __str__(self):
        extras = ["qk-norm"] * self.norm + ["append"] * self.append + [f"kv {self.kv}"] * bool(self.kv)
        return " ".join(
            [
                f"{self.op} T{self.tokens} h{self.heads}/{self.kv_heads} d{self.dim} r{self.rotary_dim}",
                SHORT.get(self.dtype, str(self.dtype)),
                self.layout,
                *extras,
            ]
        )


class Groups(NamedTuple):
    """GroupNorm and its activation: `[batch, channels, pixels]`, or `[batch, pixels, channels]` where the layout is "channels_last".

    op   "group_norm" or "group_norm_backward".        act   "", "silu" or "mish".
    """

    op: str
    batch: int
    channels: int
    groups: int
    pixels: int
    dtype: torch.dtype
    act: str = ""
    layout: str = "channels_first"

    def __str__(self):
        sizes = f"{self.op} B{self.batch} c{self.channels} g{self.groups} p{self.pixels} {SHORT.get(self.dtype, str(self.dtype))} {self.act} {self.layout}"
        return " ".join(sizes.split())


class RankSum(NamedTuple):
    """A sum of rows over ranks, each of which has a part of it, with what follows.

    variant   "residual", "norm", both or "".        apart   why the ranks have no memory that all can write to; "" where they do.
    room      rows that this memory holds.
    """

    op: str
    rows: int
    width: int
    dtype: torch.dtype
    ranks: int
    variant: str = ""
    apart: str = ""
    room: int = 0

    def __str__(self):
        memory = f"apart: {self.apart}" * bool(self.apart) + f" room {self.room}" * bool(self.room)
        words = f"{self.op} {self.rows}x{self.width} {SHORT.get(self.dtype, str(self.dtype))} over {self.ranks} ranks {self.variant} {memory}"
        return " ".join(words.split())


Problem = Attention | Rows | Rope | Groups | RankSum
