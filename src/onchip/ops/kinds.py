"""What decides how a dense attention call goes, so that the second one of a kind is neither checked nor described again.

Between two kernels, which empty a processor's caches, a function of Python takes 2 to 4 us; a call of 256 tokens takes 0.5 to 2 ms on a CPU, and went
through 27 of these.
"""

import torch
from torch import Tensor

from onchip.core.masks import Band
from onchip.core.parts import squeezed
from onchip.core.problem import Operands


def kind_of(q: Tensor, k: Tensor, v: Tensor, mask, scale, bias: Tensor | None, softcap, settings: tuple) -> tuple | None:
    """Equal for calls that have one Problem and pass the same checks: sizes, types, devices and settings. None where more decides (what a mask is made of,
    what `torch.jit.trace` makes of sizes), and for settings of a wrong type. Of calls without score functions, sinks, dropout and scales.

    settings   deterministic, batch_invariant, kernel.
    """
    deterministic, batch_invariant, kernel = settings
    if torch._C._get_tracing_state() is not None or kernel.__class__ is not str or kernel == "reference":
        return None
    if not (scale is None or scale.__class__ is float) or not (softcap is None or softcap.__class__ is float):
        return None
    if q.is_nested or k.is_nested or v.is_nested or (q.is_cuda and q.dtype == torch.float32):  # whose products may be in tf32 at one time and not at another
        return None
    device = q.device
    if mask.__class__ is Tensor:
        if mask.is_nested or mask.device != device:
            return None
        mask = mask.shape, mask.dtype, mask.layout
    elif not isinstance(mask, Band):
        return None
    added = None
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.is_nested or bias.device != device:
            return None
        added = bias.shape, bias.dtype, bias.layout
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    places = device, k.device, v.device, q.layout, k.layout, v.layout
    return mask, scale, added, softcap, bool(deterministic), bool(batch_invariant), kernel, shapes, dtypes, places


def operands(x: Operands, mask, bias: Tensor | None) -> Operands:
    """Those of such a call, which has passed the checks; `x`: of one before, without its tensors."""
    return Operands(x.scale, mask=(squeezed(mask),) if mask.__class__ is Tensor else (), score=() if bias is None else (squeezed(bias),))
