"""torch's own attention kernel for CPUs: what it computes, how it wants it, and dense calls that are one call of it, gradients included.

What means the same as a call of torch's is one, and where the way back is the same too it has torch's autograd node (`blocked.recorded`). A mask of
floats takes 4 bytes a score, so that of a bool tensor is made for small calls alone.
"""

import functools
import platform
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Attention, Operands
from onchip.core.trace import Traced, untouched
from onchip.kernels.attention import blocked_tiles
from onchip.kernels.attention.blocked_tiles import SPARSE, Part, all_of, any_of, bias, bias_dtype, cutting, is_lookup, is_sum, lookup, seen_by_blocks, take

FUSED_FEW = 128  # queries up to which torch's backward pass is faster in float32 than in bfloat16: 128 take 0.5 and 0.9 ms, 256 2.1 and 2.1
ALONGSIDE = 512  # queries from which bfloat16 is laid out head by head first: 1,024 take 1 to 4% less time then (5 to 10% more with AMX), 256 up to 5% more
FEW_BLOCKS = 2  # blocks of rows of which a mask is not asked what each sees: 25 us, of the 500 that 256 rows take
LEAST_KEYS = 8  # keys from which torch's kernel tells NaN from nothing
WHOLE_MASK = 1 << 22  # elements of the mask of a whole call: 16 MiB, as much as a tile's, kept for the backward pass
CPU = torch.device("cpu")
INFINITY = {torch.bfloat16: (torch.int16, -1 << 7), torch.float32: (torch.int32, -1 << 23), torch.float64: (torch.int64, -1 << 52)}  # the bits of -inf
fused_forward = torch._scaled_dot_product_flash_attention_for_cpu  # torch.ops has the same, 4 us later
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# ---- what it takes


def fuses(p: Attention, device: torch.device) -> bool:
    """Whether torch's CPU kernel computes this: no dropout, and scores that are sums, whose terms it takes as a mask of floats."""
    return device.type == "cpu" and "dropout" not in p.extras and (p.score is None or is_sum(p.score))


def in_float32(p: Attention, rows: int) -> bool:
    """Whether torch's backward pass, which has products of bfloat16, is faster in float32, or errs more than torch's own way: of values of another width
    than keys that is by float32's sums, and its kernel's errors are 3 to 7 times as large."""
    return p.dtype == torch.bfloat16 and (rows <= FUSED_FEW or p.dim != p.value_dim or _slow_in_bfloat16())


@functools.cache
def _slow_in_bfloat16() -> bool:
    """On an x86 CPU without units for it, 7 to 17 times: 8,192 tokens under a window of 1,024 in tiles of 256 2.0 s, in float32 0.28."""
    return platform.machine() in ("x86_64", "AMD64") and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def whole_part(p: Attention) -> Part:
    return Part(slice(0, p.batch), None, None, p.len_q, p.len_k)


def unmasked(p: Attention, part: Part) -> tuple[slice, bool] | None:
    """(the keys that are seen, whether row i sees the first i + 1 of them and not all) where torch's kernel needs no mask, but a bias as it is; else None."""
    if isinstance(p.mask, Traced) or not part.len_q or not part.len_k:
        return None
    unlimited = p.mask.left is p.mask.right is None
    if p.score is not None and not (unlimited and part.origin == 0 and takes_bias(p)):
        return None
    shift = p.mask.shift(part.len_q, part.len_k)
    last = shift + part.len_q - 1
    keys = p.mask.keys(shift, last, part.len_k)
    if (shift < 0 and not unlimited) or (p.mask.left is not None and p.mask.left < last - keys.start):
        return None
    near = slice(keys.start - part.origin, keys.stop - part.origin)
    if p.mask.right is None or p.mask.right + shift >= keys.stop - 1:
        return near, False
    return (near, True) if p.mask.right == shift == keys.start == 0 else None


def takes_bias(p: Attention) -> bool:
    """Whether torch's kernel reads the score's tensor itself."""
    kinds = {torch.float32: (torch.float32,), torch.bfloat16: (torch.bfloat16, torch.float32)}
    return bias_dtype(p.score) in kinds.get(p.dtype, ()) and "score_grad" not in p.extras


def added_bias(p: Attention, x: Operands, part: Part, dtype: torch.dtype) -> Tensor | None:
    """A score that `_unmasked` lets pass, as torch's kernel takes it beside q, k and v of `dtype`."""
    return None if p.score is None else as_added(bias(p, x, part), dtype)


def as_added(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias as torch's kernel takes it beside q, k and v of `dtype`."""
    bias = bias if bias.stride(-1) in (0, 1) else bias.contiguous()
    return bias if bias.dtype == torch.float32 else bias.to(dtype)


def narrow(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else t[..., :width]


def even(t: Tensor) -> Tensor:
    """torch's kernel reads rows as contiguous without looking."""
    return t if t.stride(-1) == 1 else t.contiguous()


def fit(t: Tensor, p: Attention, wide: bool = False) -> Tensor:
    """As torch's kernel takes it: keys and values of one width; no half precision, of which a forward pass with a mask takes 3 times as long as
    of float32 and a backward pass 15 times; and with `wide` no bfloat16."""
    t = t.float() if t.dtype == torch.float16 or (wide and t.dtype == torch.bfloat16) else t
    width = max(p.dim, p.value_dim)
    return t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))


def fitting(p: Attention, q: Tensor, k: Tensor, v: Tensor, wide: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [batch, heads, len, dim] by `fit`, and laid out for torch's kernel, which reads rows as contiguous without looking."""
    if wide or p.dtype == torch.float16 or p.dim_v not in (0, p.dim):
        q, k, v = fit(q, p, wide), fit(k, p, wide), fit(v, p, wide)
    if alongside(p):
        return q.contiguous(), k.contiguous(), v.contiguous()
    return (q, k, v) if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 else (even(q), even(k), even(v))


def upright(q: Tensor, scale: float, causal: bool) -> tuple[Tensor, float, float]:
    """q, the scale and what q was multiplied by. torch's causal mask comes before its scale: of one of 0 or below, -inf would end as NaN or inf."""
    if scale > 0 or not causal:
        return q, scale, 1.0
    sign = -1.0 if scale else 0.0
    return q * sign, -scale or 1.0, sign


def padded(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, keys and values of LEAST_KEYS keys, of which the last are hidden: of fewer torch's kernel gives 0 and LSE 0 where a query is NaN."""
    more = LEAST_KEYS - k.shape[2]
    if mask is None:
        mask = q.new_zeros(1, 1, q.shape[2] if causal else 1, k.shape[2])
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf) if causal else mask
    return torch.nn.functional.pad(mask, (0, more), value=-torch.inf), *(torch.nn.functional.pad(t, (0, 0, 0, more)) for t in (k, v))


def cleared(mask: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The same with 0 and LSE -inf in rows that see no key: torch's kernel gives them 0 and LSE 0, or NaN if they hold NaN."""
    if (some := lse.abs() > 0).all():
        return out, lse
    blind = ~some & (mask.amax(-1) == -torch.inf)
    return out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)


@functools.lru_cache(maxsize=2)  # of 16 MiB at most
def staircase(left: int | None, right: int | None, rows: int, first: int, width: int, dtype: torch.dtype) -> Tensor:
    """What torch's kernel adds for a band, for `rows` rows and the keys from `first` beside the first row's own: each tile takes a part of it."""
    with untouched():
        mask = torch.full((1, 1, rows, width), -torch.inf, dtype=dtype, device="cpu")
        if left is None:
            return mask.triu_(right - first + 1)
        before = -left - first - 1
        return mask.tril_(before) if right is None else mask.triu(right - first + 1).add_(mask.tril_(before))


# ---- whole calls


class Whole(NamedTuple):
    """A dense call that is one call of torch's kernel.

    keys   those that are seen.     causal   row i sees the first i + 1 of them.     added   what is added to the scores: "bias", "seen" or "" for nothing.
    shape   of the tensor that is added: its own, and as [batch, heads, len_q, len_k] with 1 for what it has not.
    as_is     q, k and v are taken as they come, once rows are contiguous.     trained   torch's gradient of it is the way back.
    bare      of a scale above 0, its output and LSE are the call's, but in rows that see no key.
    """

    keys: slice
    causal: bool
    added: str
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    as_is: bool
    trained: bool
    bare: bool

    def __str__(self):
        return "one call of torch's own kernel" + ", or tiles where the mask hides much" * (self.added == "seen")


@functools.lru_cache(maxsize=1024)
def whole(p: Attention) -> Whole | None:
    """How a call is one of torch's kernel; known beforehand, for at 512 tokens the way there costs 4 %."""
    if p.keys != "dense" or not p.batch or not p.len_q or p.len_k < 2 or p.dtype.itemsize == 1 or not fuses(p, CPU):  # of one key the gradients are known
        return None
    if "batch_invariant" in p.extras:  # which of torch's threads takes a head shows in its last bits
        return None
    few = in_float32(p, p.len_q)
    as_is = p.dim == p.value_dim and p.dtype != torch.float16 and not alongside(p)
    if how := unmasked(p, whole_part(p)):
        keys, causal = how
        alone = len(range(*keys.indices(p.len_k))) >= LEAST_KEYS and "sinks" not in p.extras
        biased = ("", ((), ())) if p.score is None else ("bias", _shape(p, p.score))
        return Whole(keys, causal, *biased, as_is and keys == slice(0, p.len_k), alone and not few, alone and p.len_q > 1)
    if isinstance(p.mask, Traced) and p.score is None and p.len_q > 1 and is_lookup(p.mask):
        letters = cutting(p.mask)[1][0]
        size = p.len_q * p.len_k * (p.batch if "b" in letters else 1) * (p.heads if "h" in letters else 1)
        if {"i", "j"} <= {*letters} and size <= WHOLE_MASK:
            alone = p.len_k >= LEAST_KEYS and "sinks" not in p.extras
            return Whole(slice(0, p.len_k), False, "seen", _shape(p, p.mask), as_is, alone and not few, alone)
    return None


def _shape(p: Attention, traced: Traced) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the one tensor of a mask or score that is read at the place itself."""
    letters, sizes = cutting(traced)[1][0], dict(zip("bhij", (p.batch, p.heads, p.len_q, p.len_k), strict=True))
    return tuple(sizes[letter] for letter in letters), tuple(size if letter in letters else 1 for letter, size in sizes.items())


def alongside(p: Attention) -> bool:
    """Whether the numbers of a head are to lie together. Where a CPU has AMX torch's kernel packs them anyway."""
    return p.dtype == torch.bfloat16 and p.len_q >= ALONGSIDE and not torch.cpu._is_amx_tile_supported()


def added(p: Attention, how: Whole, x: Operands, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """(what torch's kernel adds to the scores of a whole call that has something to add, whether that is all there is to it): not where no row of a
    sequence and head sees a key, which may hold NaN, nor where blocks of rows see so few that tiles cost less."""
    traced, tensors = (p.score, x.score) if how.added == "bias" else (p.mask, x.mask)
    shape, of_four = how.shape
    seen = tensors[0].view(of_four) if tensors[0].shape == shape else lookup(traced, tensors, p, whole_part(p))  # what a function reads may be longer
    if how.added == "bias":
        return as_added(seen, dtype), True
    if p.len_q <= FEW_BLOCKS * blocked_tiles.BLOCK:
        return (float_mask(seen, dtype), True) if seen.view(torch.uint8).amax(2).amin().item() else (None, False)
    by_block, by_key = seen_by_blocks(seen)
    if not all_of(any_of(by_block, 2)) or by_key.sum() < SPARSE * by_key.numel():
        return None, False
    return float_mask(seen, dtype), True


def laid_out(p: Attention, how: Whole, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a whole call as `[batch, heads, len, dim]`, each as torch's kernel likes it best."""
    if how.as_is and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return fitting(p, q.transpose(1, 2), take(k, 1, how.keys).transpose(1, 2), take(v, 1, how.keys).transpose(1, 2))


class Room(threading.local):
    """A thread's memory for the mask of one tile after another: the first touch of 16 MiB takes 12 ms in a virtual machine, all else about it 1 ms."""

    bytes: Tensor | None = None

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        if self.bytes is None or len(self.bytes) < size:
            with untouched():
                self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.bytes[:size].view(dtype).view(shape)


ROOM = Room()


def float_mask(seen: Tensor, dtype: torch.dtype, room: Room | None = None) -> Tensor:
    """0 where it is seen, -inf elsewhere: 30 times as fast as torch.where. In `room`, it holds until the next one."""
    bits, infinity = INFINITY[dtype]
    found = seen.to(bits) if room is None else room.of(seen.shape, bits).copy_(seen)
    return torch.add(_number(infinity, bits, seen.device), found, alpha=-infinity, out=found).view(dtype)


@functools.lru_cache
def _number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with untouched():
        return torch.tensor([value], dtype=dtype, device=device)
