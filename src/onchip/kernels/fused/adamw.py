"""AdamW over a list of tensors, and the norm of all their gradients: one launch each, whatever the list.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2        p <- p (1 - lr decay) - lr / c1 m / (sqrt(v / c2) + eps)

with g the gradient times min(1, most / (norm + 1e-6)) where it is clipped, c1 = 1 - b1^t and c2 = 1 - b2^t. A table on the device holds the addresses of the
tensors, and a map the tensor and the first element of each chunk; a program takes one chunk. Traffic is the floor: p, m and v read and written, g read. The
norm reads g once: a sum of squares for each chunk, which one program then adds up. A clipped step goes over the chunks from the last to the first: some of
what the norm has read last is in L2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows

CHUNK = 4096  # elements a program: 32 a thread in four turns
BLOCK, WARPS = 1024, 4
MANY, ADDERS = 8192, 16  # sums of squares that the last program of a norm takes at a time, and its warps
KEPT = 16  # tables of addresses: gradients may come and go
ALIGNED = 16  # bytes, of every tensor, so that a thread reads as many at once


class Plan(NamedTuple):
    """What of a list of tensors is on the device: addresses int64 [4, tensors] of p, g, m and v, elements int64 [tensors], and for each chunk its tensor.
    `held`: a CUDA graph reads it there.
    """

    addresses: torch.Tensor
    sizes: torch.Tensor
    tensor: torch.Tensor  # int32 [chunks]
    first: torch.Tensor  # int32 [chunks], in chunks
    aligned: bool
    held: bool = False


# ---- device


@triton.jit
def _place(addresses_ptr, sizes_ptr, tensor_ptr, first_ptr, chunk, CHUNK: tl.constexpr):
    tensor = tl.load(tensor_ptr + chunk).to(tl.int64)
    return addresses_ptr + tensor, tl.load(first_ptr + chunk).to(tl.int64) * CHUNK, tl.load(sizes_ptr + tensor)


@triton.jit
def _at(address_ptr, first, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to element `first` of a tensor whose address stands there."""
    start = tl.load(address_ptr).to(tl.pointer_type(TYPE))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + first


@triton.jit
def _load(ptr, at, inside):
    """Float32; `inside` None: all, 16 bytes a thread, which an end that nothing is known of does not allow."""
    if inside is None:
        x = tl.load(ptr + at)
    else:
        x = tl.load(ptr + at, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _sum_of_squares(g_ptr, left, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for turn in tl.static_range(CHUNK // BLOCK):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        g = _load(g_ptr, at, None if WHOLE else at < left)
        total += g * g
    return tl.sum(total, 0)


@triton.jit
def _squares(addresses_ptr, sizes_ptr, tensor_ptr, first_ptr, tensors, partial_ptr,
             P: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, first, size = _place(addresses_ptr, sizes_ptr, tensor_ptr, first_ptr, tl.program_id(0), CHUNK)
    g_ptr = _at(row + tensors, first, P, ALIGNED)
    if first + CHUNK <= size:
        total = _sum_of_squares(g_ptr, size - first, CHUNK, BLOCK, True)
    else:
        total = _sum_of_squares(g_ptr, size - first, CHUNK, BLOCK, False)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def _root(partial_ptr, norm_ptr, count, MANY: tl.constexpr):
    """The root of the sum of `count` numbers, in float64 and in one order always."""
    total = tl.zeros([MANY], tl.float64)
    for first in range(0, count, MANY):
        at = first + tl.arange(0, MANY)
        total += tl.load(partial_ptr + at, mask=at < count, other=0.0).to(tl.float64)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, 0)))


@triton.jit
def _update(pointers, numbers, left, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    p_ptr, g_ptr, m_ptr, v_ptr = pointers
    kept, step, root, factor, fresh1, b2, fresh2, eps = numbers
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = None if WHOLE else at < left
        g, p, m, v = _load(g_ptr, at, inside) * factor, _load(p_ptr, at, inside), _load(m_ptr, at, inside), _load(v_ptr, at, inside)
        m += fresh1 * (g - m)
        v = b2 * v + fresh2 * g * g
        p = p * kept - step * (m / (tl.sqrt(v) * root + eps))
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _adamw(addresses_ptr, sizes_ptr, tensor_ptr, first_ptr, tensors, lr, powers_ptr, norm_ptr, most, fresh1, b2, fresh2, eps, decay,
           P: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ON_DEVICE: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    if norm_ptr is not None:
        chunk = tl.num_programs(0) - 1 - chunk
    row, first, size = _place(addresses_ptr, sizes_ptr, tensor_ptr, first_ptr, chunk, CHUNK)
    p_ptr, g_ptr = _at(row, first, P, ALIGNED), _at(row + tensors, first, P, ALIGNED)
    m_ptr, v_ptr = _at(row + 2 * tensors, first, M, ALIGNED), _at(row + 3 * tensors, first, M, ALIGNED)
    rate = tl.load(lr).to(tl.float32) if ON_DEVICE else lr
    step = rate / (1 - tl.load(powers_ptr)).to(tl.float32)
    root = 1 / tl.sqrt_rn((1 - tl.load(powers_ptr + 1)).to(tl.float32))
    factor = 1.0
    if norm_ptr is not None:
        factor = tl.math.div_rn(most, (tl.load(norm_ptr) + 1e-6).to(tl.float32))
        factor = tl.where(factor > 1, 1.0, factor)  # of a norm that is NaN it is NaN
    pointers, numbers = (p_ptr, g_ptr, m_ptr, v_ptr), (1 - rate * decay, step, root, factor, fresh1, b2, fresh2, eps)
    if first + CHUNK <= size:
        _update(pointers, numbers, size - first, CHUNK, BLOCK, True)
    else:
        _update(pointers, numbers, size - first, CHUNK, BLOCK, False)


# ---- host

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def plan(lists: tuple[list[torch.Tensor], ...], known: dict) -> Plan:
    """Of p, g, m and v; made once for the same addresses, copied from pinned memory, so that the host does not wait. `known` keeps the last few that
    were used, and all that a CUDA graph reads.
    """
    key = tuple(t.data_ptr() for given in lists for t in given)
    made = known.pop(key, None)
    if made is None:
        for old in [k for k, plan in known.items() if not plan.held][:-KEPT]:
            del known[old]
        made = _plan(lists)
    if made.sizes.is_cuda and torch.cuda.is_current_stream_capturing():
        made = made._replace(held=True)
    known[key] = made
    return made


def _plan(lists: tuple[list[torch.Tensor], ...]) -> Plan:
    device, sizes = lists[1][0].device, [t.numel() for t in lists[1]]
    rows = [[t.data_ptr() for t in given] for given in lists]
    places = [(n, at) for n, size in enumerate(sizes) for at in range(triton.cdiv(size, CHUNK))]
    aligned = all(address % ALIGNED == 0 for row in rows for address in row)
    tensor, first = ([place[i] for place in places] for i in (0, 1))

    def on_device(values, dtype):
        made = torch.tensor(values, dtype=dtype, device="cpu")
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made

    return Plan(on_device(rows, torch.int64), on_device(sizes, torch.int64), on_device(tensor, torch.int32), on_device(first, torch.int32), aligned)


def launch_norm(problem: Rows, config: None, lists: tuple[list[torch.Tensor], ...], known: dict) -> torch.Tensor:
    """The 2-norm of all gradients together, float64 [] on the device."""
    made = plan(lists, known)
    partial = torch.empty(len(made.tensor), dtype=torch.float32, device=made.sizes.device)
    norm = torch.empty((), dtype=torch.float64, device=made.sizes.device)
    if len(partial):
        _squares[(len(partial),)](
            *made[:4], len(made.sizes), partial, P=TYPES[problem.dtype], ALIGNED=made.aligned, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip
    _root[(1,)](partial, norm, len(partial), MANY=MANY, num_warps=ADDERS)
    return norm


def launch(problem: Rows, config: None, lists: tuple[list[torch.Tensor], ...], known: dict, how, powers: torch.Tensor, clip) -> None:
    """One step in place; how: ops.optim.Hyper, powers: b1^t and b2^t, float64 [2] on the device, clip: ops.optim.Clip or None.

    1 - b1 and 1 - b2 are the host's differences: in float32 1 - 0.999 is off by 5e-5.
    """
    made = plan(lists, known)
    if len(made.tensor):
        _adamw[(len(made.tensor),)](
            *made[:4], len(made.sizes), how.lr, powers, *(clip or (None, 0.0)), 1 - how.beta1, how.beta2, 1 - how.beta2, how.eps, how.decay,
            P=TYPES[problem.dtype], M=TYPES[lists[2][0].dtype], ALIGNED=made.aligned, CHUNK=CHUNK, BLOCK=BLOCK,
            ON_DEVICE=isinstance(how.lr, torch.Tensor), num_warps=WARPS,
        )  # fmt: skip
