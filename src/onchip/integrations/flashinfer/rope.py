"""`flashinfer.rope`: rotary embedding (Su et al., 2021) of packed queries and keys, in plain torch, rounded once."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.integrations.flash_attn.rotary import rotate, sequence_of


class Turn(NamedTuple):
    """How fast each pair of elements turns. `smooth`: Llama 3.1's low and high frequency factors and the length it was first trained for."""

    rotary_dim: int | None
    interleave: bool
    scale: float
    theta: float
    smooth: tuple[float, float, int] | None = None

    def rates(self, dim: int, device: torch.device) -> Tensor:
        """Radians a position, float32 `[rotary_dim / 2]`."""
        width = self.rotary_dim or dim
        fast = self.theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        if self.smooth is None:
            return fast / self.scale
        low, high, length = self.smooth
        share = ((length / (2 * math.pi) * fast - low) / (high - low)).clamp(0, 1)
        return (1 - share) * fast / self.scale + share * fast


def _turned(q: Tensor, k: Tensor, positions: Tensor, turn: Turn, inplace: bool = False) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * turn.rates(q.shape[-1], q.device)
    found = [rotate(x, angles.cos(), angles.sin(), turn.interleave) for x in (q, k)]
    return tuple(x.copy_(new) for x, new in zip((q, k), found, strict=True)) if inplace else tuple(found)


def _positions(q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    sequence, index = sequence_of(indptr, len(q))
    return offsets[sequence] + index


def apply_rope(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,
    indptr: Tensor,  # [batch + 1]
    offsets: Tensor,  # [batch]: the position of each sequence's first token
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """q and k rotated: pairs are i and i + rotary_dim / 2, or with `interleave` 2i and 2i + 1."""
    return _turned(q, k, _positions(q, indptr, offsets), Turn(rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_inplace(q, k, indptr, offsets, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4) -> None:
    _turned(q, k, _positions(q, indptr, offsets), Turn(rotary_dim, interleave, rope_scale, rope_theta), True)


def apply_rope_pos_ids(
    q, k, pos_ids: Tensor, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `apply_rope`, with each token's position `[tokens]`."""
    return _turned(q, k, pos_ids, Turn(rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4) -> None:
    _turned(q, k, pos_ids, Turn(rotary_dim, interleave, rope_scale, rope_theta), True)


def apply_llama31_rope(
    q, k, indptr, offsets, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `apply_rope`, with Llama 3.1's rates: slow pairs are slowed by the scale, fast ones are not."""
    return _turned(
        q, k, _positions(q, indptr, offsets), _llama31(rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    )


def apply_llama31_rope_inplace(
    q, k, indptr, offsets, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    how = _llama31(rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _turned(q, k, _positions(q, indptr, offsets), how, True)


def apply_llama31_rope_pos_ids(
    q, k, pos_ids, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _turned(q, k, pos_ids, _llama31(rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len))


def apply_llama31_rope_pos_ids_inplace(
    q, k, pos_ids, rotary_dim: int | None = None, interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    _turned(q, k, pos_ids, _llama31(rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len), True)


def _llama31(rotary_dim, interleave, scale, theta, low, high, length) -> Turn:
    return Turn(rotary_dim, interleave, scale, theta, (low, high, length))


def apply_rope_with_cos_sin_cache(
    positions: Tensor,  # [tokens]
    query: Tensor,  # [tokens, heads * head_size]
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,  # [positions, rotary_dim]: cosines, then sines
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """`query` and `key` rotated by a table; `is_neox`: pairs are i and i + rotary_dim / 2, else 2i and 2i + 1."""
    cos, sin = cos_sin_cache[positions.long()].chunk(2, -1)
    return tuple(rotate(x.unflatten(-1, (-1, head_size)), cos, sin, not is_neox).flatten(-2) for x in (query, key))


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True) -> None:
    for x, new in zip((query, key), apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox), strict=True):
        x.copy_(new)
