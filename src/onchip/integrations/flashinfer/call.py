"""A call of FlashInfer in onchip's words: masks, scores and scales going in; outputs and LSE in base 2 `[tokens, heads]` coming out."""

import functools
import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.bands import Band, Causal, Full, Mask
from onchip.core.kernel import Unsupported
from onchip.core.parts import by_name, check_sizes, is_whole
from onchip.core.scores import ALiBi, Score, Softcap
from onchip.core.trace import Place
from onchip.integrations.flash_attn.call import Descale, band
from onchip.integrations.flash_attn.rotary import rotate

LOG2E, LN2 = math.log2(math.e), math.log(2)
LAYOUTS = ("NHD", "HND")
POSITIONS = ("NONE", "ROPE_LLAMA", "ALIBI")
BACKENDS = ("auto", "fa2", "fa3", "cudnn", "trtllm-gen", "cutlass", "cute-dsl", "fmha_v2")  # whichever is named, onchip's kernels run


class Way(NamedTuple):
    """What is computed, in FlashInfer's words: the arguments of `plan` that are no tensors of indices. None and -1 stand for what FlashInfer lets them."""

    causal: bool = False
    pos_encoding_mode: str = "NONE"
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None

    @property
    def rotates(self) -> bool:
        return self.pos_encoding_mode == "ROPE_LLAMA"


class Scaling(NamedTuple):
    """Factors of queries, keys and values: numbers, or tensors of one element or one for each of their heads."""

    q: float | Tensor | None = None
    k: float | Tensor | None = None
    v: float | Tensor | None = None


@dataclass(frozen=True)
class Result:
    """What the caller wants back, and where; `lse_out` is written to also where LSE does not come back."""

    dtype: torch.dtype
    lse: bool = False
    out: Tensor | None = None
    lse_out: Tensor | None = None
    base_e: bool = False


@dataclass
class Call:
    """What onchip's functions get beside q, k and v: `keywords`; and what is done to the output after them."""

    mask: Mask
    scale: float
    score: list[Score] = field(default_factory=list)
    sinks: Tensor | None = None
    gain: float | Tensor | None = None  # of values

    @property
    def keywords(self) -> dict[str, Any]:
        return {"mask": self.mask, "scale": self.scale, "score": self.score or None}


# ---- checks


def one_of(name: str, argument: str, value, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name}: {argument} {value!r} is not one of {', '.join(accepted)}; give one of these")


def refuse(name: str, **given) -> None:
    """Raises Unsupported for an argument that is there."""
    why = {
        "jit_args": "kernels from C++ text are compiled by FlashInfer only; give onchip.attention a score or mask function in Python",
        "jit_kwargs": "kernels from C++ text are compiled by FlashInfer only; give onchip.attention a score or mask function in Python",
        "kv_cache_sf": "keys and values in nvfp4 are not implemented; keep them in 16 bits or float8",
        "skip_softmax_threshold_scale_factor": "leaving out small weights is not exact; leave it out",
        "profiler_buffer": "onchip's kernels write no profile; use torch.profiler",
        "use_profiler": "onchip's kernels write no profile; use torch.profiler",
        "uses_spcompress": "compressed weights are not exact; leave it out",
    }
    for argument, value in given.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name}: {argument} is not supported: {why[argument]}")


def dtype_of(given: str | torch.dtype | None, other: torch.dtype | None = None) -> torch.dtype | None:
    """A dtype, given as itself or by its name; None: `other`."""
    if given is None:
        return other
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ValueError(f"flashinfer: {given!r} is no dtype; give one, or its name, as 'float16'")
    return found


def on_host(name: str, argument: str, given: Tensor) -> Tensor:
    """A copy int32 on the CPU of a plan's offsets, lengths or pages: the caller may change its own."""
    check_integers(name, argument, given)
    return given.detach().to("cpu", torch.int32, copy=True)


def check_integers(name: str, argument: str, given: Tensor) -> None:
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64, torch.int16) or not given.ndim:
        raise ValueError(f"{name}: {argument} is {kind_of(given)}; give an int32 tensor of one dimension")


def check_shape(name: str, argument: str, given: Tensor, shape: str) -> None:
    """Whether it is a tensor of as many dimensions as `shape`, which says what they are."""
    if not isinstance(given, Tensor) or given.ndim != shape.count(",") + 1:
        raise ValueError(f"{name}: {argument} is {kind_of(given)}; give {shape}")


def checked(name: str, way: Way) -> Way:
    """`way`, whose window is a whole number, and whose other numbers are numbers where they are given."""
    if not is_whole(way.window_left):
        raise ValueError(f"{name}: window_left is {way.window_left!r:.60}; give a whole number of keys, or -1 for no window")
    for argument in ("sm_scale", "logits_soft_cap", "rope_scale", "rope_theta"):
        if (given := getattr(way, argument)) is not None and not isinstance(given, (Real, Tensor)):
            raise ValueError(f"{name}: {argument} is {given!r:.60}; give a number, or None")
    return way


def as_planned(name: str, argument: str, given: Tensor, planned: torch.dtype | None) -> None:
    """Whether it is a tensor, of the dtype that `plan` was told."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: {argument} is {kind_of(given)}; give a tensor")
    if planned is not None and given.dtype != planned:
        raise ValueError(f"{name}: {argument}.dtype is {given.dtype}, plan() was told {planned}; give plan() the dtype that run() gets")


# ---- masks and scores


@dataclass(frozen=True, eq=False)
class Bits(Mask):
    """A bit for each query and key of each sequence, row by row, the lowest bit of a byte first; `first` int32 `[batch]` is each sequence's first byte."""

    bits: Tensor
    first: Tensor

    __str__ = Mask.__str__
    key = property(by_name)

    @property
    def tensors(self):
        return (self.bits, self.first)

    def fits(self, *sizes):
        check_sizes("custom_mask", "mask_indptr", self.first, "b", sizes)

    def sees(self, at: Place):
        place = at.i * at.len_k + at.j
        return (self.bits[self.first[at.b] + place // 8].int() >> (place % 8).int()) & 1 > 0


@dataclass(frozen=True, eq=False)
class Items(Mask):
    """Several items after a shared prefix, each blind to the others (multi-item scoring): causal, and past the prefix a token sees the
    prefix and, of its own item, the tokens before it.

    prefix   integers `[batch]`.     position   integers `[batch, longest]`: of each token past the prefix in its item, 0 for what separates items.
    """

    prefix: Tensor
    position: Tensor

    __str__ = Mask.__str__
    key = property(by_name)

    @property
    def hull(self) -> Band:
        return Causal()

    @property
    def tensors(self):
        return (self.prefix, self.position)

    def fits(self, *sizes):
        check_sizes("prefix_len_ptr", "prefix lengths", self.prefix, "b", sizes)
        check_sizes("token_pos_in_items_ptr", "positions", self.position, "b*", sizes)

    def sees(self, at: Place):
        prefix = self.prefix[at.b]
        past = torch.clamp(at.row - prefix, min=0, max=self.position.shape[1] - 1)
        near = (at.row < prefix) | (at.j < prefix) | (at.j > at.row - self.position[at.b, past])
        return (at.j <= at.row) & near


@dataclass(frozen=True, eq=False)
class Linear(Score):
    """FlashInfer's ALiBi: `s + slopes[h] (j - i)`, where queries count from their own first one; its LSE is that of these scores."""

    slopes: Tensor

    __str__ = Score.__str__
    key = property(by_name)

    @property
    def tensors(self):
        return (self.slopes,)

    def fits(self, *sizes):
        check_sizes("ALIBI", "slopes", self.slopes, "h", sizes)

    def apply(self, s, at: Place):
        return s + self.slopes[at.h] * (at.j - at.i)


def mask_of(way: Way, custom: Mask | None = None, lengths: tuple[int | None, int | None] = (None, None)) -> Mask:
    """Which keys are seen. A custom mask stands in causal's place, a window beside both; `lengths`: the most queries and keys, where they are known."""
    left = None if way.window_left < 0 else way.window_left
    if custom is None:
        return band(left, 0 if way.causal else None, *lengths)
    window = band(left, None, *lengths)
    return custom if isinstance(window, Full) else custom & window


def call_of(way: Way, mask: Mask, heads: tuple[int, int], dim: int, device: torch.device, scaling: Scaling = Scaling(), sinks: Tensor | None = None) -> Call:
    """The call: scale, then ALiBi, then softcap. `heads`: of queries, of keys."""
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.shape == (heads[0],)):
        raise ValueError(f"flashinfer: sinks are {kind_of(sinks)}; give one logit a query head, [{heads[0]}]")
    for argument, factor in zip(("q_scale", "k_scale", "v_scale"), scaling, strict=True):
        if factor is not None and not isinstance(factor, (Real, Tensor)):
            raise ValueError(f"flashinfer: {argument} is {factor!r:.60}; give a number, a tensor of one, or one a head")
    scale, score = way.sm_scale if way.sm_scale is not None else dim**-0.5, []
    tensors = []
    scaling = Scaling(*(float(x) if isinstance(x, Tensor) and x.numel() == 1 and x.is_cpu else x for x in scaling))
    for argument, factor, count in (("q_scale", scaling.q, heads[0]), ("k_scale", scaling.k, heads[1])):
        if isinstance(factor, Tensor):
            tensors.append(_of_heads(argument, factor, count, heads[0], device))
        elif factor is not None:
            scale *= factor
    if isinstance(scale, Tensor):
        tensors, scale = [_of_heads("sm_scale", scale, 1, heads[0], device), *tensors], 1.0
    if tensors:
        score.append(Descale(math.prod(tensors[1:], start=tensors[0])))
    if way.pos_encoding_mode == "ALIBI":
        score.append(Linear(slopes(heads[0], device)))
    if way.logits_soft_cap is not None and way.logits_soft_cap > 0:
        score.append(Softcap(float(way.logits_soft_cap)))
    gain = scaling.v
    if isinstance(gain, Tensor):
        gain = _of_heads("v_scale", gain, heads[1], heads[0], device)[:, None]
    return Call(mask, float(scale), score, sinks, gain)


@functools.lru_cache(maxsize=64)
def slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's, copied to the device once: a copy in `run` could not be captured."""
    return ALiBi.slopes_of(heads, device)


def _of_heads(argument: str, factor: Tensor, count: int, heads: int, device: torch.device) -> Tensor:
    """One factor a query head, float32 `[heads]`, of a tensor of one element or `count`."""
    flat = factor.reshape(-1).to(device, torch.float32)
    if len(flat) not in (1, count):
        raise ValueError(f"flashinfer: {argument} is {list(factor.shape)}; give a number, a tensor of one, or one a head, [{count}]")
    return flat.expand(heads) if len(flat) == 1 else flat.repeat_interleave(heads // count)


# ---- what goes in and comes out


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype that is computed in; float8 has a place in all of them."""
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(q: torch.dtype, out: torch.dtype) -> torch.dtype:
    """q's, and for queries in float8 the output's where it is wider, else bfloat16."""
    if q.itemsize > 1:
        return q
    return out if out.itemsize > 1 else torch.bfloat16


def turned(x: Tensor, positions: Tensor, way: Way) -> Tensor:
    """`x` `[tokens, heads, dim]` rotated as Llama's queries and keys are (Su et al., 2021), element i with i + dim / 2."""
    half = x.shape[-1] // 2
    power = torch.arange(half, device=x.device, dtype=torch.float32) / half
    turn = 1.0 / ((way.rope_scale or 1.0) * (way.rope_theta or 1e4) ** power)
    angles = positions.float()[..., None] * turn
    return rotate(x, angles.cos(), angles.sin(), False)


def finished(call: Call, want: Result, run) -> Tensor | tuple[Tensor, Tensor]:
    """`run(**keywords)`, an attention function of onchip's without its tensors, and its results as FlashInfer gives them.

    A sink takes from the output alone: LSE is that of the keys.
    """
    with_lse = want.lse or want.lse_out is not None
    keep = with_lse and call.sinks is not None
    out = run(**call.keywords, sinks=None if keep else call.sinks, return_lse=with_lse)
    out, lse = out if with_lse else (out, None)
    out = out.flatten(0, -3) if out.ndim > 3 else out
    if lse is not None:
        lse = (lse.transpose(0, 1).flatten(1) if lse.ndim == 3 else lse).transpose(0, 1)  # [tokens, heads]
    if keep:
        share = torch.sigmoid(lse - call.sinks.float()).where(lse > -math.inf, 0.0)
        out = out * share[..., None]
    gain = None if isinstance(call.gain, (int, float)) and call.gain == 1 else call.gain
    if gain is not None:
        out = out.float() * gain
    out = _into("out", want.out, out, want.dtype)
    if lse is not None:
        lse = _into("lse", want.lse_out, lse if want.base_e else lse * LOG2E, torch.float32)
    return (out, lse) if want.lse else out


def _into(argument: str, to: Tensor | None, found: Tensor, dtype: torch.dtype) -> Tensor:
    if to is None:
        return found.to(dtype).contiguous()
    if to.shape != found.shape or to.dtype != dtype or to.device != found.device:
        given = f"{to.dtype} {list(to.shape)} on {to.device}"
        raise ValueError(f"flashinfer: {argument} is {given}; give {dtype} {list(found.shape)} on {found.device}, or None")
    return to.copy_(found)


# ---- what wrappers share


def fixed_batch(name: str, use_cuda_graph: bool, buffers: dict[str, Tensor | None], indptr: Tensor | None, each: Tensor | None = None) -> int:
    """How many sequences the buffers of a wrapper for CUDA graphs are for; 0 for another."""
    if not use_cuda_graph:
        return 0
    for argument, buffer in buffers.items():
        if not isinstance(buffer, Tensor):
            raise ValueError(f"{name}: {argument} is {type(buffer).__name__} with use_cuda_graph; give a tensor on the GPU")
    batch = len(indptr) - 1
    if any(t is not None and "indptr" in argument and len(t) != batch + 1 for argument, t in buffers.items()) or (each is not None and len(each) != batch):
        sizes = {argument: len(t) for argument, t in buffers.items()}
        raise ValueError(f"{name}: buffers of {sizes} for one batch; give batch size + 1 for those of indptr, and the batch size for the last pages")
    return batch


def keep(buffer: Tensor, given: Tensor, what: str = "") -> None:
    """Copy what a plan is given to the caller's buffer, of which it may fill a part."""
    if len(given) > len(buffer) or (not what and len(given) != len(buffer)):
        raise ValueError(f"plan: {len(given)} {what or 'entries'} in a wrapper for CUDA graphs with a buffer of {len(buffer)}; give a larger buffer")
    buffer[: len(given)].copy_(given)


def check_heads(name: str, q: Tensor, kv_heads: int, heads: tuple[int, int], dim: int, values: tuple[int, int] = (0, 0)) -> None:
    """Whether `run` gets what `plan` was told: `heads` of queries and of keys, and the columns of `values`, here and there."""
    if values[0] != values[1]:
        raise ValueError(f"{name}: v has {values[0]} columns; plan() was told head_dim_vo {values[1]} (head_dim_qk, if None): give both the same")
    if q.ndim != 3 or tuple(q.shape[1:]) != (heads[0], dim) or kv_heads != heads[1]:
        given = f"q is {list(q.shape)} over {kv_heads} key heads; plan() was told {heads[0]} heads over {heads[1]}, of {dim} columns"
        raise ValueError(f"{name}: {given}; give plan() the heads that run() gets")


def planned(name: str, way: Way | None) -> None:
    if way is None:
        raise RuntimeError(f"{name}: nothing is planned; call plan() first")


def scaling_of(name: str, q: Tensor, args: tuple, scaling: Scaling) -> Scaling:
    """With the factors of queries, keys and values in float8, one a head, that come by position."""
    if not args:
        return scaling
    if q.dtype.itemsize > 1 or len(args) != 3:
        what = f"{len(args)} more arguments by position beside q in {q.dtype}"
        raise Unsupported(f"{name}: {what}; accepted are three scales, of q, k and v in float8 (those of jit_args are not supported)")
    return Scaling(*(both(a, b) for a, b in zip(args, scaling, strict=True)))


def both(a, b):
    """The product of two factors, either of which may be None."""
    return b if a is None else a if b is None else a * b
