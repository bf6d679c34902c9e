"""A Problem is a call without its tensors: sizes, dtype and the static part of the mask.

It is the dispatch key, the test id, the benchmark row and the input of the cost model. Problems are named tuples because
building and hashing one is on the path of every call (about 1 us; a frozen dataclass takes three times that).
"""

from typing import NamedTuple

import torch

from onchip.core.masks import Full, Mask

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
DTYPES = {name: dtype for dtype, name in SHORT.items()}


class Cost(NamedTuple):
    """What a call has to do at least: multiply-adds counted as two, and bytes read once and written once."""

    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class Attention(NamedTuple):
    """`softmax(scale q k^T + mask) v`.

    op      "prefill": many queries a sequence; "decode": at most 16, over a paged cache.
    keys    "dense" [batch, len, heads, dim], "packed" [tokens, heads, dim] or "paged" [pages, page, kv_heads, dim].
    len_q, len_k   of the longest sequence. A packed problem also has `tokens`, the queries in all; its cost supposes
            sequences of equal length. A paged problem's `len_k` is the capacity of its page table.
    """

    op: str
    batch: int
    len_q: int
    len_k: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    mask: Mask = Full()
    keys: str = "dense"
    page: int = 0
    tokens: int = 0
    grad: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def __str__(self):
        parts = [
            f"{self.op} B{self.batch} q{self.len_q} k{self.len_k} h{self.heads}/{self.kv_heads} d{self.dim}",
            SHORT.get(self.dtype, str(self.dtype)),
            str(self.mask),
        ]
        parts += {"dense": [], "packed": [f"packed {self.tokens} tokens"], "paged": [f"page {self.page}"]}[self.keys]
        return " ".join(parts + ["grad"] * self.grad)


class Rows(NamedTuple):
    """An operator on the rows of a matrix: `rms_norm`, `gated_act` or `sample`; `variant` names its form ("residual", "silu")."""

    op: str
    rows: int
    width: int
    dtype: torch.dtype
    variant: str = ""

    def __str__(self):
        return " ".join(part for part in (self.op, f"{self.rows}x{self.width}", SHORT.get(self.dtype, str(self.dtype)), self.variant) if part)


class Rope(NamedTuple):
    """Rotary embedding of packed queries and keys `[tokens, (heads + 2 kv_heads) dim]`, with QK-norm and the cache write."""

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

    def __str__(self):
        extras = ["qk-norm"] * self.norm + ["append"] * self.append
        return " ".join(
            [
                f"{self.op} T{self.tokens} h{self.heads}/{self.kv_heads} d{self.dim} r{self.rotary_dim}",
                SHORT.get(self.dtype, str(self.dtype)),
                self.layout,
                *extras,
            ]
        )


Problem = Attention | Rows | Rope
