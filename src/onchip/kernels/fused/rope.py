"""Rotary embedding in place on packed queries and keys, with QK-norm before it and the cache write after it.

    (a, b) -> (a cos - b sin, b cos + a sin)        for the pairs of the first rotary_dim elements of a head; the rest stays

A program takes some heads of one token, and a thread both elements of a pair, so nothing is exchanged but the sum of the
norm. The program that rotates a key head also copies its value head. Each byte moves once: q and k read and written, v
read, k and v written to the cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.problem import Rope

TILE = 2048  # elements of a program
THREAD = 16  # elements of a thread: two 16-byte loads of bf16


class Tiles(NamedTuple):
    """How many heads of a token a program takes."""

    heads: int
    warps: int

    def __str__(self):
        return f"{self.heads} heads a program, {self.warps} warps"


# ---- device


@triton.jit
def _neox_pairs(PAIRS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Which of PAIRS are inside a head, and the columns of both elements, [1, PAIRS]. What lies past ROTARY is paired too, but does not rotate."""
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = (DIM - ROTARY + 1) // 2
    pair = tl.arange(0, PAIRS)[None, :]
    first = tl.where(pair < HALF, pair, pair + HALF)
    return pair < HALF + REST, first, first + tl.where(pair < HALF, HALF, REST)


@triton.jit
def _load_pairs(ptr, rows, PAIRS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each pair of the heads at `ptr`, each [HEADS, PAIRS]; 0 where `rows` [HEADS, 1] is not set."""
    if INTERLEAVED:  # one load of neighbours, taken apart in registers
        col = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(ptr + col, mask=rows & (col < DIM), other=0.0)
        return tl.split(x.reshape(x.shape[0], PAIRS, 2))
    inside, first, second = _neox_pairs(PAIRS, DIM, ROTARY)
    a = tl.load(ptr + first, mask=rows & inside, other=0.0)
    return a, tl.load(ptr + second, mask=rows & inside & (second < DIM), other=0.0)


@triton.jit
def _store_pairs(ptr, a, b, rows, WIDTH: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The reverse of `_load_pairs`, for the first WIDTH columns."""
    PAIRS: tl.constexpr = a.shape[1]
    if INTERLEAVED:
        col = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.join(a, b).reshape(a.shape[0], 2 * PAIRS)
        tl.store(ptr + col, x.to(ptr.dtype.element_ty), mask=rows & (col < WIDTH))
    else:
        inside, first, second = _neox_pairs(PAIRS, DIM, ROTARY)
        tl.store(ptr + first, a.to(ptr.dtype.element_ty), mask=rows & inside & (first < WIDTH))
        tl.store(ptr + second, b.to(ptr.dtype.element_ty), mask=rows & inside & (second < WIDTH))


@triton.jit
def _qk_norm(a, b, is_query, q_weight_ptr, k_weight_ptr, eps, offset, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """RMSNorm of each head by the weights of queries or of keys."""
    scale = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / DIM + eps)
    q_a, q_b = _load_pairs(q_weight_ptr, is_query, a.shape[1], DIM, ROTARY, INTERLEAVED)
    k_a, k_b = _load_pairs(k_weight_ptr, ~is_query, a.shape[1], DIM, ROTARY, INTERLEAVED)
    w_a, w_b = q_a.to(tl.float32) + k_a.to(tl.float32), q_b.to(tl.float32) + k_b.to(tl.float32)  # one of the two is 0
    return a * scale * (w_a + offset), b * scale * (w_b + offset)


@triton.jit
def _rope_append(
    qkv_ptr,
    table_ptr,
    positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_q,
    num_kv,
    token_stride,
    table_stride,
    slot_stride,
    head_stride,
    eps,
    offset,
    NORM: tl.constexpr,
    APPEND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    tiles = tl.cdiv(num_q + num_kv, HEADS)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)[:, None]
    rows = head < num_q + num_kv
    heads_ptr = qkv_ptr + token * token_stride + head * DIM  # [HEADS, 1]

    x_a, x_b = _load_pairs(heads_ptr, rows, PAIRS, DIM, ROTARY, INTERLEAVED)  # [HEADS, PAIRS]
    a, b = x_a.to(tl.float32), x_b.to(tl.float32)
    if NORM:
        a, b = _qk_norm(a, b, head < num_q, q_weight_ptr, k_weight_ptr, eps, offset, DIM, ROTARY, INTERLEAVED)

    pair = tl.arange(0, PAIRS)[None, :]
    angles_ptr = table_ptr + tl.load(positions_ptr + token) * table_stride + pair
    cos = tl.load(angles_ptr, mask=pair < HALF, other=1.0).to(tl.float32)  # [1, PAIRS]
    sin = tl.load(angles_ptr + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    y_a = tl.where(pair < HALF, a * cos - b * sin, a).to(x_a.dtype)
    y_b = tl.where(pair < HALF, b * cos + a * sin, b).to(x_b.dtype)
    _store_pairs(heads_ptr, y_a, y_b, rows, DIM if NORM else ROTARY, DIM, ROTARY, INTERLEAVED)

    if APPEND:
        slot = tl.load(slots_ptr + token)
        kept = rows & (head >= num_q) & (slot >= 0)
        target = slot * slot_stride + (head - num_q) * head_stride  # [HEADS, 1]
        _store_pairs(k_cache_ptr + target, y_a, y_b, kept, DIM, DIM, ROTARY, INTERLEAVED)
        v_a, v_b = _load_pairs(heads_ptr + num_kv * DIM, kept, PAIRS, DIM, ROTARY, INTERLEAVED)
        _store_pairs(v_cache_ptr + target, v_a, v_b, kept, DIM, DIM, ROTARY, INTERLEAVED)


# ---- host


def configs(problem: Rope, device: Device) -> list[Tiles]:
    """As many heads as fill a tile."""
    block = 2 * pairs(problem)
    heads = max(1, min(TILE // block, triton.next_power_of_2(problem.heads + problem.kv_heads)))
    return [Tiles(heads, max(1, heads * block // (32 * THREAD)))]


def pairs(problem: Rope) -> int:
    """Pairs of elements in a head, or the next power of two."""
    return triton.next_power_of_2((problem.dim + 1) // 2)


def launch(
    problem: Rope,
    config: Tiles,
    qkv: torch.Tensor,  # [tokens, (heads + 2 kv_heads) dim]
    table: torch.Tensor,  # [positions, rotary_dim]
    positions: torch.Tensor,  # [tokens]
    norm,  # QKNorm or None
    append,  # Append or None
) -> None:
    if qkv.stride(1) != 1:
        raise ValueError(f"rope_append: the rows of qkv are not contiguous (strides {qkv.stride()}), and they are rotated in place; give qkv.contiguous()")
    table = table if table.stride(1) == 1 else table.contiguous()
    q_weight, k_weight, eps, offset = (None, None, 0.0, 0.0) if norm is None else (norm.q.contiguous(), norm.k.contiguous(), norm.eps, norm.offset)
    k_cache, v_cache, slots = (None, None, None) if append is None else _flat(append)
    tiles = triton.cdiv(problem.heads + problem.kv_heads, config.heads)
    _rope_append[(problem.tokens * tiles,)](
        qkv,
        table,
        positions.contiguous(),
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slots,
        problem.heads,
        problem.kv_heads,
        qkv.stride(0),
        table.stride(0),
        0 if append is None else k_cache.stride(0),
        0 if append is None else k_cache.stride(1),
        eps,
        offset,
        NORM=problem.norm,
        APPEND=problem.append,
        INTERLEAVED=problem.layout == "interleaved",
        ROTARY=problem.rotary_dim,
        DIM=problem.dim,
        PAIRS=pairs(problem),
        HEADS=config.heads,
        num_warps=config.warps,
    )


def _flat(append) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache as [slots, kv_heads, dim], without a copy, and the slot of each token."""
    k, v = (pages.view(-1, *pages.shape[2:]) for pages in append[:2])
    if k.stride() != v.stride() or k.stride(2) != 1:
        raise ValueError(f"rope_append: pages of k and v have strides {append.k.stride()} and {append.v.stride()}; they must be equal, the last one 1")
    return k, v, append.slots.contiguous()
