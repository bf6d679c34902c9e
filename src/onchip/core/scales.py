"""Numbers in e4m3, and the factors that they are to be multiplied by."""

from typing import NamedTuple

from torch import Tensor

BLOCK = 128  # tokens that may share a scale
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-50  # the scale of tokens that are 0: products of three are still numbers
SHARES = {"head": 0, "block": BLOCK, "token": 1}  # tokens that share a scale; 0: all


class Scales(NamedTuple):
    """Those of quantised queries, keys and values, as `Quantised` has them."""

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
