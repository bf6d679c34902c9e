"""The parts of a decoder that have weights: matrix products, laid out once for the device they run on, and norms."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import settings
from onchip.core.low_rank import LowRank, Route
from onchip.core.ranks import Ranks
from onchip.dispatch import native
from onchip.ops.linear import RowNorm, skinny_linear
from onchip.ops.low_rank import add_low_rank
from onchip.ops.norm import rms_norm
from onchip.ops.ranks import rank_problem, sum_ranks


class Linear:
    """`x @ weight.T + bias`; weight `[out, in]`, filled piece by piece by the loader, then `pack()`ed.

    On a CPU, packing hands oneDNN the weight in the layout it computes in. With one row of x torch would lay it out anew
    in every call: 3,072 x 576 in bf16 takes 65 us packed and 125 us not.
    adapters   the LoRA matrices that rows may have beside the weight (`models.lora.AdapterTable` puts them there).
    """

    def __init__(self, rows: int, cols: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(rows, cols, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self.adapters: LowRank | None = None
        self._packed: Tensor | None = None
        self.slab = 0  # rows at a time; 0: all

    def pack(self, keep: bool = False) -> None:
        """Lay the weight out for this device; `keep` the plain weight too when something else reads it."""
        if self.weight.device.type == "cpu" and _onednn_takes(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if not keep:
                self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor, route: Route | None = None) -> Tensor:
        """With a route, what each row's adapter adds to it too."""
        if route is None and not self.slab:
            return self._product(x)
        y = in_slabs(self._product, self.slab, x) if self.slab else self._product(x)
        return y if route is None else add_low_rank(y, x, self.adapters, route)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")

    def around(self, x: Tensor, kernel: str, norm: "Norm | None" = None, act: str | None = None, residual: Tensor | None = None) -> Tensor:
        """`act(norm(x) @ weight.T + bias) + residual` of few rows, by the kernel of that name."""
        before = None if norm is None else RowNorm(norm.weight, norm.eps, norm.offset)
        return skinny_linear(x, self.weight, norm=before, bias=self.bias, act=act, residual=residual, constant=True, kernel=kernel)

    @property
    def kernel(self) -> str:
        """What computes the product."""
        return "oneDNN, weights packed once" if self._packed is not None else "torch F.linear"


class Norm:
    """`rms_norm` with its weights. With a residual: the norm of the sum, and the sum."""

    def __init__(self, width: int, eps: float, offset: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.eps, self.offset = eps, offset
        self.slab = 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.slab:
            return in_slabs(self._norm, self.slab, *((x,) if residual is None else (x, residual)))
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, residual=residual)

    def of_sum(self, x: Tensor, ranks: Ranks, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The same of the sum of all ranks' x, which may be written to: in one kernel where there is one."""
        if ranks.of == 1:
            return self(x, residual)
        after = {"residual": residual, "norm": RowNorm(self.weight, self.eps, self.offset)}
        if native(rank_problem(x, ranks, **after), x.device):
            return sum_ranks(x, ranks, **after)
        return self(summed(x, ranks), residual)

    def _norm(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, residual=residual)


def in_slabs(run: Callable, rows: int, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """`run` of so many rows at a time, the last ones padded with zeros: a kernel is chosen by the number of rows, and sums in an order of its own, so
    that a row's bits would depend on how many others there are."""
    count = len(inputs[0])
    padded = [F.pad(x, (0, 0, 0, -count % rows)) for x in inputs]
    parts = [run(*some) for some in zip(*(x.split(rows) for x in padded), strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[:count]
    return tuple(torch.cat(some)[:count] for some in zip(*parts, strict=True))


def summed(x: Tensor, ranks: Ranks, residual: Tensor | None = None) -> Tensor:
    """The sum of all ranks' x, and the residual; x may be written to."""
    if ranks.of > 1 and (residual is None or native(rank_problem(x, ranks, residual), x.device)):
        return sum_ranks(x, ranks, residual=residual)
    x = summed(x, ranks) if ranks.of > 1 else x
    return x if residual is None else x + residual


def _onednn_takes(dtype: torch.dtype) -> bool:
    if settings.INTERPRET.read() or not torch.backends.mkldnn.is_available():  # the interpreter's kernels read the plain weights
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
