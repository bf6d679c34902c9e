"""Norms of rows: RMSNorm, LayerNorm, and what fuses with them before and after, with gradients.

`_call` is the one way in: it makes matrices of the tensors and a `Norm` of the values, and goes through `Eager` where something trains, round
it where nothing does, and through the registered operator in a compiled graph.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core import philox
from onchip.core.arguments import check_numbers, check_tensors, truth
from onchip.core.norms import CODES, TENSORS, Modulate, Norm, Residual, RowCodes, SiluGate
from onchip.core.problem import Dropout, Rows
from onchip.dispatch import select
from onchip.ops.norm_grad import Eager, compiled, forward

NORMS = ("", "residual", "offset", "residual offset")  # variants of the operator "rms_norm": a residual counts 1, an offset 2
Epilogue = Modulate | SiluGate | RowCodes


def rms_norm(
    x: Tensor,  # [..., width]
    weight: Tensor | None,  # [width], or [heads, width] of x [..., heads, width]
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Tensor | Residual | None = None,  # [..., width]
    bias: Tensor | None = None,  # like weight
    after: Epilogue | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset) + bias` over the last dimension, in float32, rounded once (Zhang and Sennrich, 2019).

    eps       0 or more, a number: None, which torch reads as that of x's dtype, is refused.
    offset    1 for Gemma, whose weights are stored around 0: in bfloat16 their sum with 1 would lose most of their digits.
    residual  x is first added to it; the sum, in its dtype, comes back as the second result, and the norm is of that sum. `Residual` has what
              else may happen to x before: a gate, a weight of each row, dropout.
    after     what follows: `Modulate(scale, shift)`, `SiluGate(gate)`, or `RowCodes("e4m3" or "int8")`, whose first result is (codes, scales [...]).
    Differentiable in every tensor, but not with codes. Raises ValueError for shapes that disagree.
    """
    plain = isinstance(x, Tensor) and isinstance(weight, Tensor) and bias is None and after is None
    plain = plain and x.ndim > 0 and weight.ndim == 1 and x.layout == torch.strided and weight.device == x.device and weight.is_floating_point()
    plain = plain and (residual is None or (isinstance(residual, Tensor) and residual.dtype == x.dtype))
    if plain and forward_ad._current_level < 0 and not (torch.is_grad_enabled() and _trains(x, weight, residual)):
        return _rms_norm(x, weight, eps, offset, residual, kernel)
    return _call("rms_norm", x, Norm("rms", eps, offset), weight, bias, residual, after, kernel)


def layer_norm(
    x: Tensor,  # [..., width]
    weight: Tensor | None = None,  # [width], or [heads, width] of x [..., heads, width]
    bias: Tensor | None = None,  # like weight
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
    residual: Tensor | Residual | None = None,  # [..., width]
    after: Epilogue | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`(x - mean) / sqrt(var + eps) * (weight + offset) + bias` over the last dimension, in float32, rounded once (Ba et al., 2016).

    `residual` and `after` as `rms_norm` has them.
    """
    return _call("layer_norm", x, Norm("layer", eps, offset), weight, bias, residual, after, kernel)


def invertible_layer_norm(
    x: Tensor,  # [..., width]
    weight: Tensor,  # [width], nowhere 0
    bias: Tensor,  # [width]
    *,
    eps: float = 1e-5,
    kernel: str = "auto",
) -> Tensor:
    """`layer_norm` that keeps its output for the backward pass, which the next operator keeps anyway, and not its input (DeepSpeed's idea).

    The backward pass divides by the weight: where that is 0, or so small that y is rounded away beside the bias, the gradients of x and of the
    weight are wrong or not finite. That is not looked for, as it would wait for the GPU: use `layer_norm` where weights may be 0.
    """
    check_tensors("invertible_layer_norm", optional=("weight", "bias"), x=x, weight=weight, bias=bias)
    if weight is None or bias is None or not x.ndim or weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        shapes = [None if t is None else list(t.shape) for t in (weight, bias)]
        raise ValueError(f"invertible_layer_norm: weight and bias are {shapes[0]} and {shapes[1]}, x is {list(x.shape)}; give [..., width], and [width] both")
    return _call("invertible_layer_norm", x, Norm("layer", eps, inverse=True), weight, bias, None, None, kernel)


def modulated_norm(
    x: Tensor,  # [batch, ..., width]
    scale: Tensor | None,  # [batch, width], [batch, 1, width], [width] or like x
    shift: Tensor | None,  # like scale
    *,
    norm: str = "layer",
    eps: float = 1e-6,
    weight: Tensor | None = None,  # [width]
    residual: Tensor | Residual | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`norm(x) * (1 + scale) + shift`: the adaptive norm of DiT and Flux (Peebles and Xie, 2023).

    norm       "layer" or "rms".
    residual   `Residual(stream, gate)` adds the last block's output before: `total = stream + gate * x`, the second result. That is adaLN-Zero.
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f"modulated_norm: norm={norm!r} is not one of layer, rms")
    return _call("modulated_norm", x, Norm(norm, eps), weight, None, residual, Modulate(scale, shift), kernel)


# ---- one call


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None, kernel: str) -> Tensor | tuple[Tensor, Tensor]:
    """Without gradients: the shortest way, which every decoder layer goes twice."""
    if type(eps) is not float or type(offset) is not float or not (eps >= 0 and offset == offset):
        eps, offset = _numbers("rms_norm", eps, offset)
    if torch.compiler.is_compiling():
        if residual is None:
            return torch.ops.onchip.rms_norm(x, weight, eps, offset, kernel)
        return torch.ops.onchip.add_rms_norm(x, weight, eps, offset, residual, kernel)
    width = x.shape[-1]
    if weight.shape != (width,) or not width:
        raise ValueError(f"rms_norm: weight is {list(weight.shape)}, x has width {width}; give [{width}], of 1 or more")
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        given = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
        raise ValueError(f"rms_norm: residual is {given}, x is {x.dtype} {list(x.shape)} on {x.device}; they must be equal")
    problem = Rows("rms_norm", x.numel() // width, width, x.dtype, NORMS[(residual is not None) + 2 * (offset != 0)])
    return select(problem, x.device, kernel).launch(x, weight, eps, residual, offset)


def _numbers(name: str, eps: float, offset: float) -> tuple[float, float]:
    """As Python's floats: a launcher of Triton's knows no other."""
    check_numbers(name, 0, eps=eps)
    check_numbers(name, offset=offset)
    return float(eps), float(offset)


def _trains(*tensors: Tensor | None) -> bool:
    """Also with forward-mode derivatives, which autograd then refuses: a kernel would lose them in silence."""
    return (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)) or forward_ad._current_level >= 0


def _call(name: str, x: Tensor, norm: Norm, weight, bias, residual, after, kernel: str):
    check_tensors(name, optional=("weight", "bias"), x=x, weight=weight, bias=bias)
    if type(norm.eps) is not float or type(norm.offset) is not float or not (norm.eps >= 0 and norm.offset == norm.offset):
        eps, offset = _numbers(name, norm.eps, norm.offset)
        norm = norm._replace(eps=eps, offset=offset)
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{name}: x is {list(x.shape)}; its last dimension is what is normalised: give [..., width] with a width of 1 or more")
    if isinstance(residual, Tensor):
        residual = Residual(residual)
    norm = _with(name, x, norm, weight, bias, residual, after)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    trains = _trains(x, *(getattr(norm, field) for field in TENSORS))
    if norm.in_place and trains:
        raise ValueError(f"{name}: in_place=True would overwrite what autograd keeps; leave it out, or call it under torch.no_grad()")
    if norm.codes and trains:
        raise NotImplementedError(f"{name}: codes have no gradient; call it under torch.no_grad(), or without RowCodes")
    if trains and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name}: gradients under torch.func are not implemented; use torch.autograd.grad, or torch's own norm")
    if torch.compiler.is_compiling():
        y, total, scale = compiled(rows, norm._replace(keep=trains), kernel)
    elif trains:
        y, total = Eager.apply(norm._replace(keep=True, **dict.fromkeys(TENSORS)), kernel, rows, *(getattr(norm, field) for field in TENSORS))
        scale = None
    else:
        normed = forward(rows, norm, kernel)
        y, total, scale = normed.y, normed.total, normed.scale
    if x.ndim != 2:
        y, total, scale = y.view(x.shape), total if total is None else total.view(x.shape), scale if scale is None else scale.view(x.shape[:-1])
    y = y if scale is None else (y, scale)
    return y if residual is None else (y, total)


# ---- arguments


def _with(name: str, x: Tensor, norm: Norm, weight, bias, residual: Residual | None, after: Epilogue | None) -> Norm:
    """The call's tensors as matrices, checked."""
    of = _Shapes(name, x)
    norm = norm._replace(weight=of.heads("weight", weight), bias=of.heads("bias", bias))
    if weight is not None and bias is not None and weight.shape != bias.shape:
        raise ValueError(f"{name}: weight is {list(weight.shape)}, bias {list(bias.shape)}; they must be equal")
    if residual is not None:
        if not isinstance(residual, Residual):
            raise TypeError(f"{name}: residual is a {type(residual).__name__}; give a tensor like x, or a Residual")
        check_tensors(name, optional=("gate", "row_scale"), residual=residual.stream, x=x, gate=residual.gate, row_scale=residual.row_scale)
        of.like("residual", residual.stream, (x.dtype, torch.float32))
        if truth(name, "in_place", residual.in_place) and not _in_rows(residual.stream):
            raise ValueError(
                f"{name}: in_place=True needs a residual whose rows are contiguous, each in a place of its own; call .contiguous() first, or leave in_place out"
            )
        norm = norm._replace(residual=residual.stream.reshape(of.rows, of.width), gate=of.samples("gate", residual.gate), in_place=residual.in_place)
        if residual.row_scale is not None:
            if residual.row_scale.shape != x.shape[:-1]:
                raise ValueError(f"{name}: row_scale is {list(residual.row_scale.shape)}; x is {list(x.shape)}: give {list(x.shape[:-1])}")
            norm = norm._replace(row_scale=residual.row_scale.reshape(of.rows))
        drop = residual.dropout
        if drop is not None:
            if not isinstance(drop, Dropout):
                raise TypeError(f"{name}: dropout is {drop!r:.60}; give Dropout(p)")
            philox.check(name, *drop)
        if drop is not None and drop.p:
            norm = norm._replace(drop=float(drop.p), state=philox.draw(x.device, drop.seed, drop.offset))
    if isinstance(after, Modulate):
        check_tensors(name, optional=("scale", "shift"), x=x, scale=after.scale, shift=after.shift)
        if after.scale is None and after.shift is None:
            raise ValueError(f"{name}: Modulate has neither scale nor shift; give one of them, or leave it out")
        scale, shift = of.samples("scale", after.scale), of.samples("shift", after.shift)
        if scale is not None and shift is not None and scale.shape != shift.shape:
            raise ValueError(f"{name}: scale is {list(after.scale.shape)}, shift {list(after.shift.shape)}; give both a row for each sample, or for each row")
        norm = norm._replace(scale=scale, shift=shift)
    elif isinstance(after, SiluGate):
        check_tensors(name, gate=after.gate, x=x)
        of.like("gate", after.gate)
        norm = norm._replace(silu=after.gate.reshape(of.rows, of.width))
    elif isinstance(after, RowCodes):
        if after.format not in (*CODES,):  # a list is in no dict
            raise ValueError(f"{name}: RowCodes({after.format!r}) is not one of {', '.join(CODES)}")
        norm = norm._replace(codes=after.format)
    elif after is not None:
        raise ValueError(f"{name}: after={after!r} is not one of Modulate, SiluGate, RowCodes")
    return norm._replace(span=of.span, sets=of.sets)


def _in_rows(t: Tensor) -> bool:
    """Whether t is a matrix of its rows as it lies, no two in one place, so that writing that matrix writes t."""
    ahead = [(size, stride) for size, stride in zip(t.shape[:-1], t.stride(), strict=False) if size != 1]
    apart = not ahead or ahead[-1][1] >= t.shape[-1]
    return not t.numel() or (apart and all(stride == size * inner for (_, stride), (size, inner) in pairwise(ahead)))


class _Shapes:
    """Reads shapes beside x; finds the sets of rows (heads or samples) that parameters have a row for."""

    def __init__(self, name: str, x: Tensor):
        self.name, self.x, self.width = name, x, x.shape[-1]
        self.rows, self.span, self.sets = x.numel() // self.width, 1, 1

    def _one_of(self, what: str, sets: int, span: int) -> None:
        if self.sets != 1 and (self.sets != sets or self.span != span):
            raise ValueError(f"{self.name}: {what} has a row for each of {sets} sets of rows, another parameter for each of {self.sets}; give heads or samples")
        self.sets, self.span = sets, span

    def like(self, what: str, t: Tensor, dtypes: tuple[torch.dtype, ...] = ()) -> None:
        if t.shape != self.x.shape or (dtypes and t.dtype not in dtypes):
            raise ValueError(f"{self.name}: {what} is {t.dtype} {list(t.shape)}, x is {self.x.dtype} {list(self.x.shape)}; they must be equal"
                             + " (a residual may be float32)" * bool(dtypes))  # fmt: skip

    def heads(self, what: str, t: Tensor | None) -> Tensor | None:
        """[width] or [heads, width]."""
        if t is None:
            return None
        if t.shape == (self.width,):
            return t.unsqueeze(0)
        if t.ndim != 2 or self.x.ndim < 2 or t.shape != self.x.shape[-2:]:
            heads = f", or {list(self.x.shape[-2:])} for weights of each head" if self.x.ndim > 2 else ""
            raise ValueError(f"{self.name}: {what} is {list(t.shape)}, x has width {self.width}; give [{self.width}]{heads}")
        self._one_of(what, t.shape[0], 1)
        return t

    def samples(self, what: str, t: Tensor | None) -> Tensor | None:
        """[width], [batch, width], [batch, 1, width] or like x."""
        if t is None:
            return None
        if t.shape == (self.width,):
            return t.unsqueeze(0)
        if t.shape == self.x.shape:
            return t.reshape(self.rows, self.width)
        batch = self.x.shape[0]
        if self.x.ndim < 2 or t.ndim < 2 or t.shape[0] != batch or t.shape[-1] != self.width or t.numel() != batch * self.width:
            raise ValueError(
                f"{self.name}: {what} is {list(t.shape)}, x is {list(self.x.shape)}; give [{self.width}], [{batch}, {self.width}] for each sample, or x's shape"
            )
        if batch > 1:
            self._one_of(what, batch, self.rows // batch)
        return t.reshape(batch, self.width)


# ---- in compiled graphs: the short way as torch.library operators


@torch.library.custom_op("onchip::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float, offset: float, kernel: str) -> Tensor:
    return _rms_norm(x, weight, eps, offset, None, kernel)


@torch.library.custom_op("onchip::add_rms_norm", mutates_args=())
def _add_rms_norm_op(x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, weight, eps, offset, residual, kernel)


_rms_norm_op.register_fake(lambda x, *_: x.new_empty(x.shape))
_add_rms_norm_op.register_fake(lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
