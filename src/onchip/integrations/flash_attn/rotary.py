"""`flash_attn.layers.rotary` and `flash_attn.ops.triton.rotary`: rotary embedding (Su et al., 2021) in plain torch, rounded once.

`cos` and `sin` are `[positions, rotary_dim / 2]`; elements past `rotary_dim` stay. Positions past the end of the tables are not rotated.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Turn(NamedTuple):
    """How tokens are rotated: their positions start at `offsets`, an integer or `[batch]`; `cu_seqlens` where they are packed."""

    interleaved: bool = False
    offsets: int | Tensor = 0
    cu_seqlens: Tensor | None = None


def rotate(
    x: Tensor,  # [..., heads, dim]
    cos: Tensor,  # [..., rotary_dim / 2]: at the token's own position
    sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """`x` rotated, in its dtype; pairs are 2i and 2i + 1, or i and i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    turned = x[..., : 2 * half].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def at(table: Tensor, positions: Tensor, beyond: float) -> Tensor:
    """Rows of a table, `beyond` for positions past its end."""
    inside = (positions < len(table)).unsqueeze(-1)
    return torch.where(inside, table[positions.clamp(max=len(table) - 1)], beyond)


def sequence_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(sequence, position in it) of each packed token, int64 `[tokens]`; without a wait for the device."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(index, cu_seqlens[1:].long(), right=True).clamp(max=len(cu_seqlens) - 2)
    return sequence, index - cu_seqlens[sequence]


def apply_rotary(
    x: Tensor,  # [batch, len, heads, dim], or [tokens, heads, dim] with cu_seqlens
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved=False,
    inplace=False,
    conjugate=False,
) -> Tensor:
    """`x` rotated, or with `conjugate` rotated back; `max_seqlen` is not needed."""
    if cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"apply_rotary: cos is {list(cos.shape)}, sin {list(sin.shape)}; give both as [positions, at most {x.shape[-1] // 2}]")
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device) + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    else:
        sequence, positions = sequence_of(cu_seqlens, len(x))
        positions = positions + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    out = rotate(x, at(cos, positions, 1.0), at(-sin if conjugate else sin, positions, 0.0), interleaved)
    return x.copy_(out) if inplace else out


class _Rotate(torch.autograd.Function):
    """`parts(x)` gives (view of x, cos, sin) of what is rotated. In place also on a leaf, as flash-attn does."""

    @staticmethod
    def forward(ctx, x: Tensor, parts: Callable, turn: Turn, inplace: bool):
        ctx.parts, ctx.turn = parts, turn
        return _each(x if inplace else x.clone(), parts, turn, False)

    @staticmethod
    def backward(ctx, d_out):
        return _each(d_out.clone(), ctx.parts, ctx.turn, True), None, None, None


def _each(x: Tensor, parts: Callable, turn: Turn, conjugate: bool) -> Tensor:
    for view, cos, sin in parts(x):
        apply_rotary(view, cos, sin, turn.offsets, turn.cu_seqlens, interleaved=turn.interleaved, inplace=True, conjugate=conjugate)
    return x


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets: int | Tensor = 0, cu_seqlens=None, max_seqlen=None) -> Tensor:
    """`x` `[batch, len, heads, dim]`, or `[tokens, heads, dim]` with `cu_seqlens`, rotated."""
    return _Rotate.apply(x, lambda t: [(t, cos, sin)], Turn(interleaved, seqlen_offsets, cu_seqlens), inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets: int | Tensor = 0, num_heads_q=None) -> Tensor:
    """Queries and keys of `qkv` rotated in place: `[batch, len, 3, heads, dim]`, or `[batch, len, heads + 2 kv_heads, dim]` and `num_heads_q`."""
    if qkv.ndim == 4 and num_heads_q is None:
        raise ValueError("apply_rotary_emb_qkv_: qkv has 4 dimensions and num_heads_q is None; give the number of query heads")

    def parts(t):
        if t.ndim == 5:
            q, k = t[:, :, 0], t[:, :, 1]
        else:
            q, k = t[:, :, :num_heads_q], t[:, :, num_heads_q : (num_heads_q + t.shape[2]) // 2]
        return [(q, cos, sin), (k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]

    return _Rotate.apply(qkv, parts, Turn(interleaved, seqlen_offsets), True)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets: int | Tensor = 0) -> Tensor:
    """The keys of `kv` `[batch, len, 2, heads, dim]` rotated in place."""
    return _Rotate.apply(kv, lambda t: [(t[:, :, 0], cos, sin)], Turn(interleaved, seqlen_offsets), True)


def rotate_half(x: Tensor, interleaved=False) -> Tensor:
    """`(-b, a)` of each pair (a, b)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved=False) -> Tensor:
    """The formula in x's own dtype: `x` `[batch, len, heads, dim]`, `cos` and `sin` `[(batch,) len, rotary_dim / 2]`."""
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos.unsqueeze(-2), sin.unsqueeze(-2)))
    turned = x[..., : cos.shape[-1]]
    return torch.cat((turned * cos + rotate_half(turned, interleaved) * sin, x[..., cos.shape[-1] :]), -1)


class RotaryEmbedding(torch.nn.Module):
    """Rotates `qkv`, or `q` and `kv`, in place, with tables that grow as needed; `scale_base` (512, say) makes it XPos (Sun et al., 2022)."""

    def __init__(self, dim: int, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / self.base ** (even / dim), persistent=False)
        self.register_buffer("scale", None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim), persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """cos and sin of queries, then of keys, at least `[length, dim / 2]`."""
        old = self._tables
        if not old or len(old[0]) < length or (old[0].device, old[0].dtype) != (device, dtype) or (self.training and old[0].is_inference()):
            even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
            angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 1.0 / self.base ** (even / self.dim))
            scale = torch.ones_like(angles)
            if self.scale is not None:
                power = (torch.arange(length, device=device) - length // 2) / self.scale_base
                scale = self.scale.to(device) ** power[:, None]
            both = angles.cos(), angles.sin()
            self._tables = tuple(t.to(dtype) for t in (*(t * scale for t in both), *(t / scale for t in both)))
        return self._tables

    def forward(self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None, num_heads_q: int | None = None):
        """As `apply_rotary_emb_qkv_`; with `kv` `qkv` is q alone, and (q, kv) comes back. A tensor `seqlen_offset` needs `max_seqlen`, once."""
        if isinstance(seqlen_offset, Tensor) and max_seqlen is None and not self._tables:
            raise ValueError("RotaryEmbedding: seqlen_offset is a tensor; give max_seqlen too, so that the tables are long enough")
        length = max_seqlen or (0 if isinstance(seqlen_offset, Tensor) else qkv.shape[1] + seqlen_offset)
        cos, sin, cos_k, sin_k = self.tables(length, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
