"""What decides how a dense attention call goes, so that the second one of a kind is neither checked nor described again.

Between two kernels, which empty a processor's caches, a function of Python takes 2 to 4 us, and a call of 256 tokens 0.2 to 1 ms on a CPU: what such a
call goes through is few functions, and long ones.
"""

import torch
from torch import Tensor

from onchip.core.masks import Band
from onchip.core.parts import squeezed
from onchip.core.problem import Operands
from onchip.dispatch import Decision, kept, margin, recorders

MOST = 4096  # kinds of calls that are kept
PLAIN = (Tensor, torch.nn.Parameter)  # whose operators nobody watches


def known(q: Tensor, k: Tensor, v: Tensor, mask, scale, bias: Tensor | None, softcap, settings: tuple) -> tuple[tuple | None, Decision | None, Operands | None]:
    """(the kind of a call, the Decision and the operands of it), the last two None where none of its kind was kept; of calls without score functions,
    sinks, dropout and scales, outside of graphs that dynamo makes.

    A kind is equal for calls that have one Problem and pass the same checks: sizes, types, devices and settings. It is None where more decides (what
    a mask is made of, what `torch.jit.trace` makes of sizes), where something watches that must see one operator (`graph.in_graph`), and for settings
    of a wrong type.

    settings   deterministic, batch_invariant, kernel.
    """
    deterministic, batch_invariant, kernel = settings
    watched = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    if watched or kernel.__class__ is not str or kernel == "reference":
        return None, None, None
    if not (scale is None or scale.__class__ is float) or not (softcap is None or softcap.__class__ is float):
        return None, None, None
    if q.__class__ not in PLAIN or k.__class__ not in PLAIN or v.__class__ not in PLAIN or q.is_nested or k.is_nested or v.is_nested:
        return None, None, None
    device, dtype, added = q.device, q.dtype, None
    if q.is_meta or (q.is_cuda and dtype == torch.float32):  # whose products may be in tf32 at one time and not at another
        return None, None, None
    if mask.__class__ is Tensor:
        if mask.is_nested or mask.device != device:
            return None, None, None
        seen = mask.shape, mask.dtype, mask.layout
    elif isinstance(mask, Band):
        seen = mask.__class__, mask.left, mask.right, mask.align  # as it hashes itself, without a function
    else:
        return None, None, None
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.is_nested or bias.device != device:
            return None, None, None
        added = bias.shape, bias.dtype, bias.layout
    of_q, of_k, of_v = (q.shape, dtype, device, q.layout), (k.shape, k.dtype, k.device, k.layout), (v.shape, v.dtype, v.device, v.layout)
    kind = seen, scale, added, softcap, bool(deterministic), bool(batch_invariant), kernel, of_q, of_k, of_v, margin.get()
    if (found := kept.get(kind)) is None:
        return kind, None, None
    decision, x = found
    if recorders:
        for recorder in recorders:
            recorder.append(decision)
    if bias is not None or mask.__class__ is Tensor:
        x = Operands(x.scale, mask=(squeezed(mask),) if mask.__class__ is Tensor else (), score=() if bias is None else (squeezed(bias),))
    return kind, decision, x


def keep(kind: tuple, decision: Decision, x: Operands) -> None:
    """For calls of the kind that come again: the Decision, and of the operands what is no tensor."""
    if len(kept) >= MOST:  # as where keys grow by one from call to call
        kept.clear()
    kept[kind] = decision, Operands(x.scale)
