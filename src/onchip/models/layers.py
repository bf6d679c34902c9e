"""The parts of a decoder that have weights: matrix products, laid out once for the device they run on, and norms."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.low_rank import LowRank, Route
from onchip.ops.low_rank import add_low_rank
from onchip.ops.norm import rms_norm


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

    def pack(self, keep: bool = False) -> None:
        """Lay the weight out for this device; `keep` the plain weight too when something else reads it."""
        if self.weight.device.type == "cpu" and _onednn_takes(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if not keep:
                self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor, route: Route | None = None) -> Tensor:
        """With a route, what each row's adapter adds to it too."""
        if self._packed is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y if route is None else add_low_rank(y, x, self.adapters, route)

    @property
    def kernel(self) -> str:
        """What computes the product."""
        return "oneDNN, weights packed once" if self._packed is not None else "torch F.linear"


class Norm:
    """`rms_norm` with its weights. With a residual: the norm of the sum, and the sum."""

    def __init__(self, width: int, eps: float, offset: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, residual=residual)


def unchanged(x: Tensor) -> Tensor:
    """In place of a norm that a family does not have."""
    return x


def _onednn_takes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
