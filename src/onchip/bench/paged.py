"""Fresh random inputs of the rows over a paged cache, and the truth of them."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.bench.judge import distance, larger
from onchip.bench.suite import Row, Shared
from onchip.core.formats import Codes, Format, read
from onchip.core.problem import Attention, Cost, Operands, Rope
from onchip.dispatch import OPS
from onchip.kernels.attention import bytes_of_token, reference
from onchip.models.rope import rope_table
from onchip.ops.attention import PagedKV
from onchip.ops.latent import quantise_latent

PART = 1 << 26  # numbers that are quantised at once
SAMPLE = 64  # queries of a sequence that are held against the reference
# Relative errors of random normal numbers: a code of e4m3 errs by 2.6%, of e5m2 by 5%, of int4 by a tenth of their spread; keys and values both do.
TOLERANCE = {"": 2e-2, "int8": 3e-2, "e4m3": 8e-2, "e5m2": 0.16, "int4": 0.3}


@dataclass(frozen=True, eq=False)
class Paged:
    """Random queries, `[batch, len_q, heads, dim]` or packed `[tokens, heads, dim]` by `offsets`, over a cache whose pages are shuffled.

    source     the keys and values in the Problem's dtype; `cache` has them in its format, and is the same where there is none.
    lengths, queries   of each sequence.        shared   tokens that all sequences begin with, in the same pages.
    """

    problem: Attention
    q: Tensor
    source: PagedKV
    cache: PagedKV
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    offsets: Tensor | None = None
    shared: int = 0
    on_host = False  # time it where it runs, not by the host's clock

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def tolerance(self) -> float:
        kind = "e4m3" if self.problem.op == "latent" else self.problem.kv.partition("/")[0]
        return TOLERANCE[kind] if self.problem.dtype.itemsize == 2 else 1e-3

    @functools.cached_property
    def cost(self) -> Cost:
        """The products, and the bytes of keys and values alone: codes and scales, shared ones once."""
        p = self.problem
        pairs = sum(p.mask.area(rows, n) for rows, n in zip(self.queries, self.lengths, strict=True))
        keys = sum(self.lengths) - self.shared * (len(self.lengths) - 1)
        return Cost(2 * pairs * p.heads * (p.dim + p.value_dim), keys * p.kv_heads * bytes_of_token(p))

    def error(self, output: Tensor, ours: Tensor | None) -> float:
        """||output - truth|| / ||truth||: against the float32 reference on the last queries of the longest sequence and of the last, and against `ours`."""
        far = [distance(self._sample(output, b), truth) for b, truth in self._truths.items()]
        return functools.reduce(larger, [*far, *([] if ours is None else [distance(output, ours)])])

    @functools.cached_property
    def _truths(self) -> dict[int, Tensor]:
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        found = {}
        for b in {longest, len(self.lengths) - 1}:
            pages, length = self.source.page_table[b].long(), self.lengths[b]
            k, v = (pool[pages[: -(-length // self.problem.page)]].flatten(0, 1)[:length] for pool in self.source[:2])
            found[b] = reference.one(self.problem, 0, self._sample(self.q, b).float(), k, v, Operands(self.problem.dim**-0.5))[0]
        return found

    def _sample(self, x: Tensor, b: int) -> Tensor:
        """The last queries of sequence `b`, `[queries, heads, dim]`; masks align bottom right, so these are a Problem of their own."""
        end = sum(self.queries[: b + 1])
        rows = x if self.offsets is not None else x.flatten(0, 1)
        return rows[end - min(SAMPLE, self.queries[b]) : end]


@dataclass(frozen=True, eq=False)
class Appended:
    """Random packed queries, keys and values of new tokens, the pages that they go to, all of them new, and a slot for each token.

    Keys and values are written without their channels, so what is read again is compared with numbers as they were.
    """

    problem: Rope
    qkv: Tensor
    table: Tensor
    positions: Tensor
    k: Tensor | Codes
    v: Tensor | Codes
    slots: Tensor
    page: int
    truth: tuple[Tensor, Tensor, Tensor]
    on_host = False

    @property
    def device(self) -> torch.device:
        return self.qkv.device

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.problem.kv.partition("/")[0]]

    @property
    def cost(self) -> Cost:
        return OPS[self.problem.op].cost(self.problem)

    def written(self, pool: Tensor | Codes) -> Tensor:
        """What lies in the slots of the tokens, `[tokens, kv_heads, dim]`."""
        return read(pool, slice(None), self.qkv.dtype).flatten(0, 1)[self.slots]

    def error(self, output: tuple[Tensor, Tensor, Tensor], _ours) -> float:
        """||x - truth|| / ||truth|| of rotated queries, written keys and written values, the largest."""
        return functools.reduce(larger, [distance(x, truth) for x, truth in zip(output, self.truth, strict=True)])


def appended(row: Row, device: torch.device) -> Appended:
    """`tokens` new tokens of sequences of 512, in shuffled pages of 16."""
    p, page = row.problem, 16
    qkv = torch.randn(p.tokens, (p.heads + 2 * p.kv_heads) * p.dim, dtype=p.dtype, device=device)
    table = rope_table(8192, p.rotary_dim, 1e4, device=device)
    at = torch.arange(p.tokens, device=device)
    positions = 4096 + at % 512
    pages = torch.randperm(p.tokens // page, device=device)
    slots = pages[at // page] * page + at % page
    sizes = (p.tokens // page, page, p.kv_heads, p.dim)
    k, v = (empty_codes(sizes, p.kv, device) if p.kv else torch.full(sizes, torch.nan, dtype=p.dtype, device=device) for _ in range(2))
    return Appended(p, qkv, table, positions, k, v, slots, page, _rotated(p, qkv, table[positions]))


def _rotated(p: Rope, qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(p.tokens, -1, p.dim).split((p.heads, p.kv_heads, p.kv_heads), 1)
    cos, sin = table[:, None].chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(p.dtype)

    return turned(q), turned(k), v.clone()


def empty_codes(sizes: tuple[int, int, int, int], kv: str, device: torch.device) -> Codes:
    """Pages in a format, of sizes (pages, page, kv_heads, dim), with NaN for scales."""
    form = Format.of(kv)
    return Codes.over(torch.full((sizes[0], form.page_bytes(*sizes[1:])), 255, dtype=torch.uint8, device=device), form, sizes[1:])


def quantised(x: Tensor, kv: str) -> Codes:
    """Pages of numbers in a format; a part of them at a time, for it is done in float32."""
    made, tokens = empty_codes(tuple(x.shape), kv, x.device), x.flatten(0, 1)
    for slots in torch.arange(len(tokens), device=x.device).split(max(1, PART // tokens[0].numel())):
        made.put(slots, tokens[slots])
    return made


def attended(row: Row, device: torch.device) -> Paged:
    p, shared = (row.problem.inner, row.problem.prefix) if isinstance(row.problem, Shared) else (row.problem, 0)
    lengths, queries = row.lengths or (p.len_k,) * p.batch, row.queries or (p.len_q,) * p.batch
    draw = functools.partial(torch.randn, dtype=p.dtype, device=device)
    table, pages = _table(lengths, shared, p.page, device)
    k = draw(pages, p.page, p.kv_heads, p.dim)
    v = k[..., : p.value_dim] if "latent" in p.extras else draw(pages, p.page, p.kv_heads, p.value_dim)
    source = PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32, device=device))
    cache = source._replace(k=quantised(k, p.kv), v=quantised(v, p.kv)) if p.kv else source
    if p.op == "latent":
        packed = torch.cat([quantise_latent(part) for part in k.split(max(1, PART // k[0].numel()))])
        cache = source._replace(k=packed, v=packed)
    if not row.queries:
        return Paged(p, draw(p.batch, p.len_q, p.heads, p.dim), source, cache, lengths, queries, shared=shared)
    offsets = torch.tensor([0, *queries]).cumsum(0).to(device, torch.int32)
    return Paged(p, draw(p.tokens, p.heads, p.dim), source, cache, lengths, queries, offsets, shared)


def _table(lengths: tuple[int, ...], shared: int, page: int, device: torch.device) -> tuple[Tensor, int]:
    """The page table of sequences with as many pages as they need, shuffled, and the pages in all; those of the shared tokens come first in each."""
    first = shared // page
    own = torch.tensor([math.ceil((n - shared) / page) for n in lengths])
    width, pages = first + int(own.max()), first + int(own.sum())
    order = torch.randperm(pages)
    place = torch.arange(width - first).expand(len(lengths), -1)
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    table[:, :first] = order[:first]
    table[:, first:][place < own[:, None]] = order[first:].int()
    if first and len(set(lengths)) == 1:  # side by side as `plan_cascade` wants them
        table = table[table[:, first].sort().indices]
    return table.to(device), pages
