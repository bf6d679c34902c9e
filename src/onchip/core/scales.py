"""Numbers in e4m3, and the factors that they are to be multiplied by."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # tokens that may share a scale
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-50  # the scale of tokens that are 0: products of three are still numbers
SHARES = {"head": 0, "block": BLOCK, "token": 1}  # tokens that share a scale; 0: all


class Scales(NamedTuple):
    """Float32 factors, positive, of queries [batch, heads, n], keys and values [batch, kv_heads, n]; sizes of 1 are broadcast.

    n   1: a scale for all tokens of a head; ceil(len / 128): one for each 128 tokens in a row; len: each token has its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def share(scale: Tensor, length: int) -> int:
        """How many of `length` tokens in a row share a scale; 0: all."""
        n = scale.shape[-1]
        if n == 1:
            return 0
        if n == length:
            return 1
        if n == -(-length // BLOCK):
            return BLOCK
        raise ValueError(f"scales of {n} for {length} tokens; accepted are 1, {-(-length // BLOCK)} (one for each {BLOCK}) and {length}: reshape them")

    @staticmethod
    def of_tokens(scale: Tensor, length: int) -> Tensor:
        """The same with one for each token, [batch, heads, length]."""
        each = Scales.share(scale, length)
        return scale.repeat_interleave(each, -1)[..., :length] if each > 1 else scale.expand(*scale.shape[:-1], length)


class Quantised(NamedTuple):
    """Queries, keys or values in e4m3: `values * scale`. As `quantise` makes them, or from a cache or a checkpoint.

    values   float8_e4m3fn [batch, len, heads, dim].
    scale    float32 [batch, heads, n], positive; n 1: one for all tokens of a head; ceil(len / 128): one for each 128 in a row; len: one for each
             token. Sizes of 1 are broadcast: [1, 1, 1] is one for the tensor.
    """

    values: Tensor
    scale: Tensor

    def dequantised(self) -> Tensor:
        """In float32."""
        return self.values.float() * Scales.of_tokens(self.scale, self.values.shape[1]).transpose(1, 2)[..., None]


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """`x * signs` [..., dim] times the Walsh-Hadamard matrix / sqrt(dim), in float32: orthogonal, so that products of two rotated rows stay the same,
    while a large channel is spread over all (incoherent processing, Chee et al., 2023). `signs`: +-1 [dim], the same for queries and keys.
    """
    dim = x.shape[-1]
    x = x.float() * signs
    step = 1
    while step < dim:
        pairs = x.view(*x.shape[:-1], dim // (2 * step), 2, step)
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).view(x.shape)
        step *= 2
    return x * dim**-0.5


def quantised(x: Tensor, share: int, signs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [batch, len, heads, dim] in e4m3, rotated where there are `signs`, and its scales for `share` tokens each (0: all), [batch, heads, n]."""
    x = x.float() if signs is None else rotate(x, signs)
    length = x.shape[1]
    most = x.abs().amax(-1).transpose(1, 2)  # [batch, heads, len]
    if share != 1:
        parts = most.split(share or length, -1) if length else [most.new_zeros(*most.shape[:2], 1)] * (share == 0)
        most = torch.stack([part.amax(-1) for part in parts], -1) if parts else most
    scale = most / LARGEST
    scale = torch.where(scale == 0, SMALLEST, scale)
    each = Scales.of_tokens(scale, length).transpose(1, 2)[..., None]
    return (x / each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
