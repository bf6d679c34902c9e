"""What decides how an attention call, dense or over pages, goes, so that the second one of a kind is neither checked nor described again.

Between two kernels, which empty a processor's caches, a function of Python takes 2 to 4 us, and a call of 256 tokens 0.2 to 1 ms on a CPU: what such a
call goes through is few functions, and long ones.
"""

import torch
from torch import Tensor

from onchip.core.masks import BANDS
from onchip.core.parts import squeezed
from onchip.core.problem import Operands
from onchip.dispatch import Decision, kept, margin, recorders

MOST = 4096  # kinds of calls that are kept
PLAIN = (Tensor, torch.nn.Parameter)  # whose operators nobody watches
NOTHING = None, None, None  # of a call that is of no kind


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
    if watched or kernel.__class__ is not str or kernel == "reference" or deterministic.__class__ is not bool or batch_invariant.__class__ is not bool:
        return NOTHING
    if not (scale is None or scale.__class__ is float) or not (softcap is None or softcap.__class__ is float):
        return NOTHING
    if q.__class__ not in PLAIN or k.__class__ not in PLAIN or v.__class__ not in PLAIN or q.is_nested or k.is_nested or v.is_nested:
        return NOTHING
    device, dtype, added = q.device, q.dtype, None
    if q.is_meta or (q.is_cuda and dtype == torch.float32):  # whose products may be in tf32 at one time and not at another
        return NOTHING
    if mask.__class__ is Tensor:
        if mask.is_nested or mask.device != device:
            return NOTHING
        seen = mask.shape, mask.dtype, mask.layout
    elif mask.__class__ in BANDS:  # one of somebody's own may say more
        seen = mask.__class__, mask.left, mask.right, mask.align
    else:
        return NOTHING
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.is_nested or bias.device != device:
            return NOTHING
        added = bias.shape, bias.dtype, bias.layout
    of_q, of_k, of_v = (q.shape, dtype, device, q.layout), (k.shape, k.dtype, k.device, k.layout), (v.shape, v.dtype, v.device, v.layout)
    kind = seen, scale, added, softcap, deterministic, batch_invariant, kernel, of_q, of_k, of_v, margin.get()
    if (found := kept.get(kind)) is None:
        return kind, None, None
    decision, x = found
    for recorder in recorders:
        recorder.append(decision)
    if bias is not None or mask.__class__ is Tensor:
        x = Operands(x.scale, mask=(squeezed(mask),) if mask.__class__ is Tensor else (), score=() if bias is None else (squeezed(bias),))
    return kind, decision, x


def known_paged(q: Tensor, cache: tuple, q_offsets: Tensor | None, longest, settings: tuple) -> tuple[tuple | None, Decision | None, Operands | None]:
    """`known` of a call over pages, a `PagedKV`, that are no Codes, under a band, with nothing but a softcap beside it and no gradients.

    settings   mask, scale, softcap, batch_invariant, kernel.
    """
    mask, scale, softcap, batch_invariant, kernel = settings
    watched = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    if watched or torch._C._is_any_autocast_enabled() or kernel.__class__ is not str or kernel == "reference" or mask.__class__ not in BANDS:
        return NOTHING
    if batch_invariant.__class__ is not bool or not (scale is None or scale.__class__ is float) or not (softcap is None or softcap.__class__ is float):
        return NOTHING
    k, v, table, lengths = cache
    for t in (q, k, v, table, lengths):
        if t.__class__ not in PLAIN or t.is_nested or t.layout != torch.strided or t.is_meta:
            return NOTHING
    if q.ndim < 3 or not k.ndim == v.ndim == 4 or table.ndim != 2 or (q_offsets is None and longest is not None):  # as checks will say
        return NOTHING
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return NOTHING
    device, dtype, of_q = q.device, q.dtype, q.shape
    if not q.numel() or table.stride(-1) != 1 or not lengths.is_contiguous() or (q.is_cuda and dtype == torch.float32):
        return NOTHING
    packed = None
    if q_offsets is not None:  # on a CPU they are looked at
        if q_offsets.__class__ is not Tensor or longest.__class__ is not int or not q_offsets.is_cuda or not q_offsets.is_contiguous():
            return NOTHING
        packed = longest, q_offsets.shape, q_offsets.dtype, q_offsets.device
    same = v.shape[-1] == of_q[-1] or (k.stride() == v.stride() and k.data_ptr() == v.data_ptr())  # of other widths: values that are columns of keys
    seen = mask.__class__, mask.left, mask.right, mask.align
    of_k, of_v = (k.shape, k.dtype, k.device), (v.shape, v.dtype, v.device)
    places = table.shape, table.dtype, table.device, lengths.shape, lengths.dtype, lengths.device
    kind = "paged", seen, scale, softcap, batch_invariant, kernel, of_q, dtype, device, of_k, of_v, places, packed, same, margin.get()
    if (found := kept.get(kind)) is None:
        return kind, None, None
    if lengths.is_cpu and not 0 <= min(given := lengths.tolist()) <= max(given) <= table.shape[1] * k.shape[1]:
        return NOTHING
    decision, x = found
    for recorder in recorders:
        recorder.append(decision)
    return kind, decision, x if q_offsets is None else Operands(x.scale, q_offsets)


def keep(kind: tuple, decision: Decision, x: Operands) -> None:
    """For calls of the kind that come again: the Decision, and of the operands what is no tensor."""
    if len(kept) >= MOST:  # as where keys grow by one from call to call
        kept.clear()
    kept[kind] = decision, Operands(x.scale)
