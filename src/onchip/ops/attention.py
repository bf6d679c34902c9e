"""Exact attention over dense, packed and paged keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core import masks
from onchip.core.masks import Causal, Full, Mask
from onchip.core.problem import Attention
from onchip.dispatch import select


class PagedKV(NamedTuple):
    """Keys and values of many sequences in pages of one pool (vLLM's PagedAttention, Kwon et al., 2023).

    k, v         [pages, page, kv_heads, dim]; slots that no sequence uses may hold anything, NaN included.
    page_table   [batch, most pages] int32: the pages of each sequence in order; entries past its length are not read.
    lengths      [batch] int32: keys of each sequence, those of the current queries included.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    lengths: Tensor


def attention(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim]
    *,
    mask: Mask = Full(),
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(scale q k^T + mask) v`, in O(len_q + len_k) memory (FlashAttention-2, Dao, 2023).

    Returns `[batch, len_q, heads, dim]` in q's dtype; with `return_lse` also the natural log of each row's sum of
    exponentials, float32 `[batch, heads, len_q]`. `heads` is a multiple of `kv_heads` (grouped-query attention).
    `scale` defaults to `dim ** -0.5`. A row that sees no key gives 0 and LSE -inf. Masks align to the bottom right.
    Inputs may be strided; the last dimension should be contiguous (else it is copied).

    Raises ValueError for shapes or dtypes that disagree, `Unsupported` when `kernel` names one that refuses.
    """
    if torch.compiler.is_compiling():
        return _pick(torch.ops.onchip.attention(q, k, v, str(mask), _scale(scale, q.shape[-1]), kernel), return_lse)
    _check("attention", q, k, v, rank=4)
    batch, len_q, heads, dim = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"attention: k has batch {k.shape[0]}, q has {batch}; they must be equal")
    problem = Attention("prefill", batch, len_q, k.shape[1], heads, k.shape[2], dim, q.dtype, mask, grad=_grad(q, k, v))
    return select(problem, q.device, kernel).launch(q, k, v, None, _scale(scale, dim), return_lse)


def attention_packed(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [tokens, kv_heads, dim]
    v: Tensor,  # [tokens, kv_heads, dim]
    offsets: Tensor,  # [batch + 1] int32
    longest: int,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` for sequences of different lengths laid end to end without padding.

    Sequence `i` is the tokens `offsets[i]` to `offsets[i + 1]`; `longest` is the most tokens one has (an upper bound
    will do; it keeps the call free of device synchronisation). Returns `[tokens, heads, dim]`, and with `return_lse`
    float32 `[heads, tokens]`. Errors as for `attention`.
    """
    if torch.compiler.is_compiling():
        return _pick(torch.ops.onchip.attention_packed(q, k, v, offsets, longest, str(mask), _scale(scale, q.shape[-1]), kernel), return_lse)
    _check("attention_packed", q, k, v, rank=3)
    tokens, heads, dim = q.shape
    if offsets.dtype != torch.int32 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"attention_packed: offsets are {offsets.dtype} {list(offsets.shape)}; give int32 [batch + 1]")
    if k.shape[0] != tokens:
        raise ValueError(f"attention_packed: k has {k.shape[0]} tokens, q has {tokens}; they must be equal")
    problem = Attention("prefill", len(offsets) - 1, longest, longest, heads, k.shape[1], dim, q.dtype, mask, "packed", 0, tokens, _grad(q, k, v))
    return select(problem, q.device, kernel).launch(q, k, v, offsets, _scale(scale, dim), return_lse)


def paged_attention(
    q: Tensor,  # [batch, len_q, heads, dim]
    cache: PagedKV,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the last `len_q` tokens of each sequence (1 to 16) over its keys in a paged cache.

    The keys of one sequence are read by several blocks at once and merged by their LSE (Flash-Decoding, Dao et al.,
    2023); the heads of a group, and the queries, share each key that is read. Lengths are read on the device, so the
    call can be captured in a CUDA graph. Returns as `attention` does; errors as there.
    """
    if torch.compiler.is_compiling():
        return _pick(torch.ops.onchip.paged_attention(q, *cache, str(mask), _scale(scale, q.shape[-1]), kernel), return_lse)
    _check("paged_attention", q, cache.k, cache.v, rank=4)
    batch, len_q, heads, dim = q.shape
    page, kv_heads = cache.k.shape[1:3]
    table = cache.page_table
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"paged_attention: page_table is {table.dtype} {list(table.shape)}; give int32 [{batch}, most pages]")
    if cache.lengths.dtype != torch.int32 or cache.lengths.shape != (batch,):
        raise ValueError(f"paged_attention: lengths are {cache.lengths.dtype} {list(cache.lengths.shape)}; give int32 [{batch}]")
    problem = Attention("decode", batch, len_q, table.shape[1] * page, heads, kv_heads, dim, q.dtype, mask, "paged", page, 0, _grad(q, cache.k, cache.v))
    return select(problem, q.device, kernel).launch(q, cache, _scale(scale, dim), return_lse)


def _scale(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else scale


def _grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    """The ways in which q, k and v may disagree, each with the way out."""
    if q.ndim != rank or k.ndim != rank or v.ndim != rank:
        raise ValueError(f"{name}: q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions; each needs {rank}")
    if k.shape != v.shape:
        raise ValueError(f"{name}: k is {list(k.shape)} and v {list(v.shape)}; they must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{name}: q has head dimension {q.shape[-1]}, k has {k.shape[-1]}; they must be equal")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{name}: {q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def _pick(results: tuple[Tensor, Tensor], return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    return results if return_lse else results[0]


# ---- in compiled graphs: the same functions as torch.library operators. Eager calls step round that boundary, which costs about 60 us.


@torch.library.custom_op("onchip::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: str, scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, mask=masks.parse(mask), scale=scale, return_lse=True, kernel=kernel)
    return out.contiguous(), lse  # the layout that `_shapes` promises


@torch.library.custom_op("onchip::attention_packed", mutates_args=())
def _attention_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, mask: str, scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    return attention_packed(q, k, v, offsets, longest, mask=masks.parse(mask), scale=scale, return_lse=True, kernel=kernel)


@torch.library.custom_op("onchip::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, mask: str, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return paged_attention(q, PagedKV(k, v, page_table, lengths), mask=masks.parse(mask), scale=scale, return_lse=True, kernel=kernel)


def _shapes(q: Tensor, *_rest) -> tuple[Tensor, Tensor]:
    """The output like q; LSE with the heads before the queries."""
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


for _operator in (_attention, _attention_packed, _paged_attention):
    _operator.register_fake(_shapes)


__all__ = ["PagedKV", "attention", "attention_packed", "paged_attention"]
