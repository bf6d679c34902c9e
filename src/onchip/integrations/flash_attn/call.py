"""A call of flash-attn in onchip's words: its mask, its scores, and the two functions that run it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import truth
from onchip.core.bands import Band, Causal, Full, Mask, Window
from onchip.core.kernel import Unsupported
from onchip.core.parts import by_name, check_sizes
from onchip.core.problem import Dropout, Operands
from onchip.core.scores import ALiBi, Score, Softcap, chain
from onchip.core.trace import Place
from onchip.ops.attend import How, attention_backward, dense_sizes, longest_of, packed_sizes, problem_of
from onchip.ops.attention import attention, attention_packed

FP8 = torch.float8_e4m3fn


class Call(NamedTuple):
    """What is computed, without q, k and v."""

    mask: Mask = Full()
    scale: float | None = None
    score: tuple[Score, ...] = ()
    sinks: Tensor | None = None
    dropout: Dropout | None = None
    deterministic: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        return {**self._asdict(), "score": list(self.score) or None}


class Lengths(NamedTuple):
    """Sequences laid end to end: offsets int32 `[batch + 1]`, the longest of queries and of keys (None: read them), and how much of each is used."""

    q: Tensor
    k: Tensor
    longest: tuple[int, int] | None
    used: tuple[Tensor | None, Tensor | None] = (None, None)


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None = None, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """(out, LSE or None) of dense `[batch, len, heads, dim]`, or with `lengths` of packed `[tokens, heads, dim]`."""
    wide_enough(q)
    if lengths is None:
        result = attention(q, k, v, return_lse=return_lse, **call.keywords)
    else:
        used = lengths.used if lengths.used != (None, None) else None
        result = attention_packed(q, k, v, lengths.q, lengths.k, longest=lengths.longest, used=used, return_lse=return_lse, **call.keywords)
    return result if return_lse else (result, None)


def wide_enough(q: Tensor) -> None:
    if q.dtype.itemsize == 1:
        raise Unsupported(f"flash_attn: q is {q.dtype}; FlashAttention-3's functions (flash_attn_interface) take float8_e4m3fn, these bfloat16 and wider")


def gradients(call: Call, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths | None, state: Tensor | None, d_lse=None):
    """(dq, dk, dv, d_sinks) of a forward call whose result was `out` and `lse`, which need not be of these keys alone (ring attention).

    state   int64 `[2]`: seed and offset of the forward call's dropout.
    """
    how = How(call.mask, chain(None, list(call.score), None), call.sinks, None, truth("flash_attn", "deterministic", call.deterministic), False, "auto")
    x = Operands(q.shape[-1] ** -0.5 if call.scale is None else call.scale, drop=call.dropout.p if call.dropout else 0.0, state=state, softmax="part")
    if lengths is None:
        sizes = dense_sizes(q, k, v)
    else:
        longest = lengths.longest or (longest_of(lengths.q), longest_of(lengths.k))
        sizes = packed_sizes(q, k, v, len(lengths.q) - 1, *longest)
        x = x._replace(q_offsets=lengths.q, k_offsets=lengths.k, q_used=lengths.used[0], k_used=lengths.used[1])
    problem, x = problem_of("prefill", how, sizes, x, q)
    return attention_backward(problem, "auto", x, q, k, v, out, lse, d_out, d_lse)[:4]


# ---- masks


@dataclass(frozen=True)
class Between(Mask):
    """Keys from `row - left` to `row + right`, as `Window`, but an end may be negative: beyond the query's own key."""

    left: int | None
    right: int | None

    __str__ = Mask.__str__
    key = property(by_name)
    tensors = ()

    @property
    def name(self) -> str:
        return f"Between({self.left}, {self.right})"

    @property
    def hull(self) -> Band:
        return band(*(end and max(end, 0) for end in (self.left, self.right)))

    def sees(self, at: Place):
        seen = at.j >= 0 if self.left is None else at.j >= at.row - self.left
        return seen if self.right is None else seen & (at.j <= at.row + self.right)


@dataclass(frozen=True)
class SameChunk(Mask):
    """Keys of the query's own chunk of `size` positions, before and after it (`Chunked` sees those before it only)."""

    size: int

    __str__ = Mask.__str__
    key = property(by_name)
    tensors = ()

    @property
    def name(self) -> str:
        return f"SameChunk({self.size})"

    @property
    def hull(self) -> Band:
        return Window(self.size - 1, self.size - 1)

    def sees(self, at: Place):
        return at.row // self.size == at.j // self.size


def band(left: int | None, right: int | None, len_q: int | None = None, len_k: int | None = None) -> Mask:
    """The band between two ends, None for no limit.

    Ends that reach past every key of `len_q` queries and `len_k` keys become none: each band is a kernel of its own.
    """
    if left is not None and len_k is not None and left >= len_k - 1:
        left = None
    if right is not None and len_q is not None and right >= len_q - 1:
        right = None
    if any(end is not None and end < 0 for end in (left, right)):
        return Between(left, right)
    return Full() if left is right is None else Causal() if (left, right) == (None, 0) else Window(left, right)


def ends(name: str, window_size, causal: bool) -> tuple[int | None, int | None]:
    """flash-attn 2's and 3's `window_size` (left, right), where any negative number is no limit, as onchip's; it may be a tensor."""
    window = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(isinstance(end, int) for end in window):
        raise ValueError(f"{name}: window_size {window_size} is not two integers; give (left, right), -1 for no limit")
    left, right = (None if end < 0 else end for end in window)
    return left, 0 if causal else right


def unpacked(name: str, packed: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """The `parts` tensors that lie along the third last dimension of `[.., parts, heads, dim]`."""
    if packed.ndim != rank or packed.shape[-3] != parts:
        argument, lead = "kv" if parts == 2 else "qkv", "batch, len" if rank == 5 else "tokens"
        raise ValueError(f"{name}: {argument} is {list(packed.shape)}; give [{lead}, {parts}, heads, dim]")
    return packed.unbind(-3)


# ---- scores


@dataclass(frozen=True, eq=False)
class Descale(Score):
    """`s * factors[b, h]`: what the scales of quantised queries and keys multiply to, `[heads]` or `[batch, heads]`."""

    factors: Tensor

    __str__ = Score.__str__
    key = property(by_name)

    @property
    def tensors(self):
        return (self.factors,)

    def fits(self, *sizes):
        check_sizes("Descale", "factors", self.factors, "bh"[2 - self.factors.ndim :], sizes)

    def apply(self, s, at: Place):
        return s * (self.factors[at.h] if self.factors.ndim == 1 else self.factors[at.b, at.h])


def score_of(name: str, softcap: float, alibi_slopes: Tensor | None = None) -> tuple[Score, ...]:
    """flash-attn's order: scale, softcap, then ALiBi."""
    if softcap < 0:
        raise ValueError(f"{name}: softcap {softcap} is negative; give the bound of the scores, or 0 for none")
    each: tuple[Score, ...] = (Softcap(float(softcap)),) if softcap else ()
    return each if alibi_slopes is None else (*each, ALiBi(alibi_slopes))
