"""Numbers in e4m3, and the factors that they are to be multiplied by."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_tensors

BLOCK = 128  # tokens that may share a scale
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-50  # a scale that `quantise` gives, of tokens that are 0 too: products of three are still numbers
SMALLEST_TAKEN = 2.0**-100  # a scale that Hopper's kernels tell from 0: what divides by it, an LSE's gradient above all, is still a number
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

    def extras(self, len_q: int, len_k: int) -> tuple[str, ...]:
        """What a Problem says of them, as `problem.EXTRAS` has it."""
        of_q, of_k, of_v = Scales.share(self.q, len_q), Scales.share(self.k, len_k), Scales.share(self.v, len_k)
        return ("key_scales",) * bool(of_k or of_v) + ("token_scales",) * (1 in (of_q, of_k, of_v))

    @staticmethod
    def of_tokens(scale: Tensor, length: int) -> Tensor:
        """The same with one for each token, [batch, heads, length]."""
        each = Scales.share(scale, length)
        return scale.repeat_interleave(each, -1)[..., :length] if each > 1 else scale.expand(*scale.shape[:-1], length)


class Quantised(NamedTuple):
    """Queries, keys or values in e4m3: `values * scale`. As `quantise` makes them, or from a cache or a checkpoint.

    values   float8_e4m3fn [batch, len, heads, dim].
    scale    float32 [batch, heads, n], positive; n 1: one for all tokens of a head; ceil(len / 128): one for each 128 in a row; len: one for each
             token. Sizes of 1 are broadcast: [1, 1, 1] is one for the tensor. Hopper's kernels take less than 2^-100 for that, less than 2^-40 of a head's
             largest for as much, and what two scales below 2^-63 are multiplied to for 0; plain torch takes all as they are.
    source   a tensor of the values' shape that gets the gradient of `values * scale`, as if nothing had been rounded ("straight through", Bengio et al.,
             2013): what `quantise` was given, where it needs a gradient; what it holds is not read. Values and scale then get none. None: no gradient.
    """

    values: Tensor
    scale: Tensor
    source: Tensor | None = None

    def dequantised(self) -> Tensor:
        """In float32; its gradient is the source's."""
        check_tensors("dequantised", values=self.values, scale=self.scale)
        values, scale = (self.values, self.scale) if self.source is None else (self.values.detach(), self.scale.detach())
        x = values.float() * Scales.of_tokens(scale, values.shape[1]).transpose(1, 2)[..., None]
        return x if self.source is None else _Through.apply(x, self.source)


class _Through(torch.autograd.Function):
    """x, with the gradient of `source`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, source: Tensor):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return None, grad
