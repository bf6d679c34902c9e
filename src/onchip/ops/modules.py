"""Operators as modules, with the parameters and settings that a model keeps; by torch's names where torch has them."""

import torch
from torch import Tensor, nn

from onchip.core.losses import LossTerms
from onchip.core.norms import Residual
from onchip.core.problem import Dropout
from onchip.ops.activation import Clipped, activate, gated_act
from onchip.ops.group_norm import group_norm
from onchip.ops.linear_losses import linear_cross_entropy
from onchip.ops.lookup import dropout_add, embedding
from onchip.ops.losses import cross_entropy
from onchip.ops.norm import Epilogue, invertible_layer_norm, layer_norm, modulated_norm, rms_norm
from onchip.ops.rotary import rotary


class RMSNorm(nn.Module):
    """`rms_norm` with a weight `[width]`, or `[heads, width]`. With `offset` the weight is stored around 0 (Gemma: 1)."""

    def __init__(self, *shape: int, eps: float = 1e-6, offset: float = 0.0, device=None, dtype=None):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full(shape, 1.0 - offset, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | Residual | None = None, after: Epilogue | None = None):
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, residual=residual, after=after)


class LayerNorm(nn.Module):
    """`layer_norm` with a weight and a bias `[width]`, or without (`affine=False`: adaptive norms)."""

    def __init__(self, width: int, *, eps: float = 1e-5, affine: bool = True, bias: bool = True, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if affine and bias else None

    def forward(self, x: Tensor, residual: Tensor | Residual | None = None, after: Epilogue | None = None):
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, after=after)


class GroupNorm(nn.Module):
    """`group_norm` with a weight and a bias `[channels]`, and the activation that follows."""

    def __init__(self, groups: int, channels: int, *, act: str = "", eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.groups, self.act, self.eps = groups, act, eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.groups, self.weight, self.bias, act=self.act, eps=self.eps)


class InvertibleLayerNorm(LayerNorm):
    """`invertible_layer_norm` with a weight and a bias `[width]`."""

    def forward(self, x: Tensor) -> Tensor:
        return invertible_layer_norm(x, self.weight, self.bias, eps=self.eps)


class ModulatedNorm(nn.Module):
    """`modulated_norm`, "layer" or "rms": scale and shift come with each call."""

    def __init__(self, norm: str = "layer", *, eps: float = 1e-6):
        super().__init__()
        self.norm, self.eps = norm, eps

    def forward(self, x: Tensor, scale: Tensor | None, shift: Tensor | None, residual: Tensor | Residual | None = None):
        return modulated_norm(x, scale, shift, norm=self.norm, eps=self.eps, residual=residual)


class Rotary(nn.Module):
    """`rotary` by a table, which stays float32 whatever the module is cast to, and goes to where q is with the first call there."""

    def __init__(self, table: Tensor, *, layout: str = "neox"):
        super().__init__()
        self.table, self.layout = table, layout

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.table.device != q.device:
            self.table = self.table.to(q.device)
        return rotary(q, k, self.table, positions, layout=self.layout)


class Activation(nn.Module):
    """`activate`, with a bias `[width]` where a width is given."""

    def __init__(self, act: str = "silu", width: int | None = None, *, device=None, dtype=None):
        super().__init__()
        self.act = act
        self.bias = None if width is None else nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return activate(x, self.act, bias=self.bias)


class GatedAct(nn.Module):
    """`gated_act`, with a bias `[2 width]` where a width is given."""

    def __init__(self, act: str | Clipped = "silu", width: int | None = None, *, layout: str = "halves", device=None, dtype=None):
        super().__init__()
        self.act, self.layout = act, layout
        self.bias = None if width is None else nn.Parameter(torch.zeros(2 * width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return gated_act(x, self.act, bias=self.bias, layout=self.layout)


class DropoutAdd(nn.Module):
    """`dropout_add` in training, the sum alone in evaluation."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return dropout_add(x, residual, Dropout(self.p), training=self.training)


class Embedding(nn.Embedding):
    """`embedding`, with torch's weight `[vocab, width]`."""

    def __init__(self, vocab: int, width: int, *, padding_idx: int | None = None, device=None, dtype=None):
        super().__init__(vocab, width, padding_idx, device=device, dtype=dtype)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None) -> "Embedding":
        """Torch's, with the weight given [vocab, width], which stays that tensor; frozen where not told otherwise."""
        if not isinstance(embeddings, Tensor) or embeddings.ndim != 2:
            given = list(embeddings.shape) if isinstance(embeddings, Tensor) else f"a {type(embeddings).__name__}"
            raise ValueError(f"Embedding.from_pretrained: embeddings are {given}; give a tensor [vocab, width]")
        made = cls(*embeddings.shape, padding_idx=padding_idx, device="meta")
        made.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        return made

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, padding_idx=self.padding_idx)


class CrossEntropy(nn.Module):
    """`cross_entropy` with its terms."""

    def __init__(self, terms: LossTerms = LossTerms(), *, reduction: str = "mean", in_place: bool = False):
        super().__init__()
        self.terms, self.reduction, self.in_place = terms, reduction, in_place

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, self.terms, reduction=self.reduction, in_place=self.in_place)


class LinearCrossEntropy(nn.Linear):
    """A head, torch's Linear of `width` to `vocab`, and its `linear_cross_entropy`."""

    def __init__(
        self, width: int, vocab: int, terms: LossTerms = LossTerms(), *, bias: bool = False, reduction: str = "mean", device=None, dtype=None
    ):  # fmt: skip
        super().__init__(width, vocab, bias, device, dtype)
        self.terms, self.reduction = terms, reduction

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, targets, self.terms, bias=self.bias, reduction=self.reduction)
