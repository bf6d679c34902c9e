"""Gradients of a causal call of torch's CPU kernel by halves: torch computes what its mask hides within blocks of 512 keys.

Blocks of BASE rows on the diagonal are one call with torch's mask. Then, with s = BASE, 2 BASE, .., the second half of each 2 s rows goes over the keys of
the first half, all of a size in one call. A part's weights are exp(S - LSE) of the whole row's LSE (Dao et al., 2022, algorithm 4), so gradients add up, and
products are n (n + BASE) / 2 of n^2. The forward pass has parts to merge, which takes what that saves.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

BASE = 128  # rows of a block on the diagonal
HALVES = range(385, 1025)  # rows: of 300 the calls cost 14% more than they save, of 512 they save 19 to 24%, of 1,024 7%, of 2,048 nothing


def halved(rows: int, keys: slice, dtype: torch.dtype) -> bool:
    """Whether a call in which row i sees the first i + 1 keys goes so; not in bfloat16, whose keys torch lays out anew in each call."""
    return dtype != torch.bfloat16 and rows in HALVES and keys == slice(0, rows)


class Step(NamedTuple):
    """`count` calls at once, each of `rows` queries over `keys` keys; the next one's begin `stride` further on. On the diagonal rows and keys are the same."""

    row: int
    key: int
    rows: int
    keys: int
    stride: int
    count: int

    @property
    def diagonal(self) -> bool:
        return self.row == self.key

    def of_rows(self, t: Tensor) -> Tensor:
        """[batch, heads, n, ..] -> a view [batch, count, heads, rows, ..]."""
        return self._of(t, self.row, self.rows)

    def of_keys(self, t: Tensor) -> Tensor:
        return self._of(t, self.key, self.keys)

    def _of(self, t: Tensor, start: int, size: int) -> Tensor:
        near = t[:, :, start : start + (self.count - 1) * self.stride + size].unfold(2, size, self.stride)
        return (near.transpose(-1, -2) if t.dim() == 4 else near).movedim(2, 1)


@functools.lru_cache(maxsize=64)
def steps(n: int, base: int) -> tuple[Step, ...]:
    """The calls for n rows and keys, at least `base`; rows that are left over at the end have calls of their own."""
    found, size = [Step(0, 0, base, base, base, n // base)], base
    if rest := n % base:
        found.append(Step(n - rest, n - rest, rest, rest, rest, 1))
    while size < n:
        if pairs := n // (2 * size):
            found.append(Step(size, 0, size, size, 2 * size, pairs))
        start = pairs * 2 * size
        if n - start > size:
            found.append(Step(start + size, start, n - start - size, size, size, 1))
        size *= 2
    return tuple(found)


def by_halves(call, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, as `call`, torch's kernel, gives them."""
    batch, n = len(q), q.shape[2]
    grads = tuple(torch.empty(len(t), t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype, device=t.device).transpose(1, 2) for t in (q, k, v))
    for step in steps(n, BASE):
        near = (step.of_rows(d_out), step.of_rows(q), step.of_keys(k), step.of_keys(v), step.of_rows(out), step.of_rows(lse))
        found = call(*(t.flatten(0, 1) for t in near), 0.0, step.diagonal, scale=scale)
        for to, d in zip((step.of_rows(grads[0]), *map(step.of_keys, grads[1:])), found, strict=True):
            d = d.unflatten(0, (batch, -1))
            to.copy_(d) if step.diagonal else to.add_(d)
    return grads
