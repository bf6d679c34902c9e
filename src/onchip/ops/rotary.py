"""Rotary embedding of queries and keys, with a gradient: one pass over both, forward and backward; a norm of each head before it is one more."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_numbers, check_tensors
from onchip.core.once import ends
from onchip.core.problem import Rope
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, differentiable
from onchip.ops.norm import rms_norm


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head before the rotation (Qwen3, Gemma 3): weights `[dim]` each, epsilon, and what is added to the weights."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0


def check_norm(name: str, norm: QKNorm | None, dim: int) -> None:
    if norm is None:
        return
    if not isinstance(norm, QKNorm):
        raise TypeError(f"{name}: norm is a {type(norm).__name__}; give QKNorm(q, k, eps), the weights of query and key heads")
    if not (isinstance(norm.q, Tensor) and isinstance(norm.k, Tensor)):
        raise TypeError(f"{name}: norm.q is a {type(norm.q).__name__}, norm.k a {type(norm.k).__name__}; give tensors [{dim}] both, a head's")
    if type(norm.eps) is not float or not norm.eps >= 0:
        check_numbers(name, 0, **{"norm.eps": norm.eps})
    if type(norm.offset) is not float or norm.offset != norm.offset:
        check_numbers(name, **{"norm.offset": norm.offset})
    if not (norm.q.is_floating_point() and norm.k.is_floating_point()):
        raise TypeError(f"{name}: norm.q is {norm.q.dtype}, norm.k {norm.k.dtype}; give floats [{dim}] both, a head's")
    if not norm.q.shape == norm.k.shape == (dim,):
        raise ValueError(f"{name}: norm has weights {list(norm.q.shape)} and {list(norm.k.shape)}; give [{dim}] both, a head's")


def rotary(
    q: Tensor,  # [batch, len, heads, dim] or [tokens, heads, dim]
    k: Tensor,  # [batch, len, kv_heads, dim] or [tokens, kv_heads, dim]
    table: Tensor,  # [positions, rotary_dim] float32
    positions: Tensor | None = None,  # [batch, len], [len] or [tokens], int64 or int32
    *,
    norm: QKNorm | None = None,
    layout: str = "neox",
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """q and k with `(a, b) -> (a cos - b sin, b cos + a sin)` for the pairs of the first rotary_dim elements of each head (Su et al., 2021).

    table      `models.rope.rope_table(...)`: cosines of the first half of its columns, then sines; scaled or not. What has several positions a token
               (pictures, films, Qwen2-VL's sections) has a row of its own for each, see `models.rope.rope_rows`.
    positions  the row of the table for each token, in [0, positions); None: 0, 1, 2, ... along len or the tokens. Others are refused on a CPU; on a GPU,
               where to look would be to wait, what they rotate is NaN (by its kernels: plain torch, as of float64, ends in an assertion).
    norm       RMSNorm of each head before the rotation, by `rms_norm`, a pass of its own; `rope_append` has both in one, in place, without a gradient.
    layout     "neox" pairs element i with i + rotary_dim / 2, "interleaved" 2i with 2i + 1; elements past rotary_dim stay.
    Any strides: q and k may be views of packed qkv, or transposed. The gradient is the rotation by minus the angle; none goes to the table.
    `kernel` is the rotation's.
    """
    check_tensors("rotary", optional=("positions",), q=q, k=k, table=table, positions=positions)
    if layout not in ("neox", "interleaved"):
        raise ValueError(f"rotary: layout={layout!r} is not one of neox, interleaved")
    if q.ndim not in (3, 4) or q.ndim != k.ndim or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype:
        raise ValueError(f"rotary: q is {q.dtype} {list(q.shape)}, k {k.dtype} {list(k.shape)}; they may differ in heads alone, [(batch), len, heads, dim]")
    check_table("rotary", table, q.shape[-1])
    check_norm("rotary", norm, q.shape[-1])
    places = q.shape[:-2]
    if positions is None:
        if len(table) < places[-1]:
            raise ValueError(f"rotary: table has {len(table)} positions, q has {places[-1]} tokens; give a longer rope_table or positions")
    elif (positions.shape != places and positions.shape != places[-1:]) or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rotary: positions are {positions.dtype} {list(positions.shape)}; give int64 {list(places)} or {list(places[-1:])}")
    elif (found := ends(positions)) is not None and not 0 <= found[0] <= found[1] < len(table):
        raise ValueError(f"rotary: positions are {found[0]} to {found[1]}; give 0 to {len(table) - 1}, rows of the table, or a longer rope_table")
    else:
        positions = positions.expand(places if q.ndim == 4 else (1, *places))
    if norm is not None:
        q, k = (rms_norm(x, weight, eps=norm.eps, offset=norm.offset) for x, weight in ((q, norm.q), (k, norm.k)))
    if q.ndim == 4:
        return _run(q, k, table, positions, layout, kernel)
    q, k = _run(q.unsqueeze(0), k.unsqueeze(0), table, positions, layout, kernel)
    return q.squeeze(0), k.squeeze(0)


def check_table(name: str, table: Tensor, dim: int) -> None:
    if table.ndim != 2 or table.shape[1] > dim or table.shape[1] % 2 or table.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: table is {table.dtype} {list(table.shape)}; give float32 [positions, an even number of columns, at most {dim}]")


def _problem(op: str, q: Tensor, k: Tensor, table: Tensor, layout: str) -> Rope:
    batch, length, heads, dim = q.shape
    return Rope(op, batch * length, heads, k.shape[2], dim, table.shape[1], q.dtype, layout, False, False)


def _forward(q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None, layout: str, kernel: str) -> tuple[Tensor, Tensor]:
    return select(_problem("rotary", q, k, table, layout), q.device, kernel).launch(q, k, table, positions)


def _backward(dq: Tensor, dk: Tensor, table: Tensor, positions: Tensor | None, layout: str, kernel: str) -> tuple[Tensor, Tensor]:
    return select(_problem("rotary_backward", dq, dk, table, layout), dq.device, kernel).launch(dq, dk, table, positions)


def _shapes(q, k, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _keep(ctx, inputs, output):
    _, _, table, positions, *ctx.rest = inputs
    ctx.save_for_backward(table, positions)


def _back(ctx, backward, dq, dk):
    return *backward(dq, dk, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_run = differentiable("rotary", _forward, _backward, Rule(_keep, _back, (_shapes, _shapes)))

__all__ = ["QKNorm", "check_norm", "rotary"]
