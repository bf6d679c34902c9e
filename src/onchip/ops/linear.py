"""Products of a few rows with a weight, with what stands around them, in one pass over the weight: what a decode step of few sequences is made of."""

import torch
from torch import Tensor

from onchip.core.arguments import check_numbers, refuse_gradients
from onchip.core.linear import Around, RowNorm
from onchip.core.problem import Rows
from onchip.dispatch import select
from onchip.ops.activation import ACTIVATIONS, LAYOUTS, Clipped


def skinny_linear(
    x: Tensor,  # [rows, in]
    weight: Tensor,  # [out, in]; with `act` [2 out, in]
    *,
    norm: RowNorm | None = None,
    bias: Tensor | None = None,  # [len(weight)]
    act: str | Clipped | None = None,
    layout: str = "halves",
    residual: Tensor | None = None,  # [rows, out]
    constant: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """`act(norm(x) weight^T + bias) + residual`, `[rows, out]`; on a GPU with sums in float32 and one rounding at the end.

    norm      RMSNorm of x: `RowNorm(weight, eps, offset)`.
    act       a gate as `gated_act` has it, of a weight that holds rows of gates and of ups; `layout` says where.
    residual  what is added last: the stream of a decoder, which the next call then normalises by itself.
    constant  True says that nothing launched before and still running writes weight, norm.weight or bias, as is so of a model's: on Hopper and later they
              are then read before the kernel in front has ended, which is most of the speed of small products.
    Raises ValueError for shapes or dtypes that disagree. It has no gradient, and says so.
    """
    _check(x, weight, norm, bias, act, layout, residual)
    refuse_gradients("skinny_linear", "train with onchip.rms_norm, torch's linear and onchip.gated_act", x, weight, norm and norm.weight, bias, residual)
    if norm is not None and not type(norm.eps) is type(norm.offset) is float:
        check_numbers("skinny_linear", **{"norm.eps": norm.eps, "norm.offset": norm.offset})
        norm = norm._replace(eps=float(norm.eps), offset=float(norm.offset))
    clipped = Clipped()
    if isinstance(act, Clipped):
        check_numbers("skinny_linear", **{"act.alpha": act.alpha, "act.limit": act.limit})
        clipped = Clipped(float(act.alpha), float(act.limit))
    if torch.compiler.is_compiling():
        words = "clipped" if isinstance(act, Clipped) else act
        return torch.ops.onchip.skinny_linear(x, weight, *(norm or (None, 0.0, 0.0)), bias, residual, words, *clipped, layout, constant, kernel)
    around = Around(norm, bias, residual, *clipped, constant)
    return select(skinny_problem(x, len(weight), around, act, layout), x.device, kernel).launch(x, weight, around)


def skinny_problem(x: Tensor, rows_of_weight: int, around: Around, act: str | Clipped | None = None, layout: str = "halves") -> Rows:
    """The Problem of such a call."""
    words = [f"from {x.shape[1]}", *(name for name in ("norm", "bias", "residual") if getattr(around, name) is not None)]
    if act is not None:
        words.append(("clipped" if isinstance(act, Clipped) else act) + " interleaved" * (layout == "interleaved"))
    return Rows("skinny_linear", len(x), rows_of_weight // (1 if act is None else 2), x.dtype, " ".join(words))


def _check(x: Tensor, weight: Tensor, norm: RowNorm | None, bias: Tensor | None, act, layout: str, residual: Tensor | None) -> None:
    if act is not None and act not in ACTIVATIONS and not isinstance(act, Clipped):
        raise ValueError(f"skinny_linear: act={act!r} is not one of {', '.join(ACTIVATIONS)} or a Clipped, or None for no gate")
    if layout not in LAYOUTS:
        raise ValueError(f"skinny_linear: layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not x.shape[1]:
        raise ValueError(f"skinny_linear: x is {list(x.shape)}, weight {list(weight.shape)}; give [rows, in] and [out, in], of an in of 1 or more")
    if act is not None and len(weight) % 2:
        raise ValueError(f"skinny_linear: weight has {len(weight)} rows, an odd number; for act={act!r} it holds as many gates as ups")
    out = len(weight) // (1 if act is None else 2)
    shapes = {"norm.weight": (x.shape[1],), "bias": (len(weight),), "residual": (len(x), out)}
    for name, given in (("weight", weight), ("norm.weight", norm and norm.weight), ("bias", bias), ("residual", residual)):
        if given is not None and (given.dtype != x.dtype or given.device != x.device or given.shape != shapes.get(name, given.shape)):
            wanted = f"{x.dtype} {list(shapes.get(name, given.shape))} on {x.device}"
            raise ValueError(f"skinny_linear: {name} is {given.dtype} {list(given.shape)} on {given.device}; give {wanted}, as x and weight have it")
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 for t in (x, weight, norm and norm.weight, bias, residual)):
        raise ValueError("skinny_linear: rows of x, weight and residual, and norm.weight and bias must be contiguous; call .contiguous() on them first")


@torch.library.custom_op("onchip::skinny_linear", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, offset: float, bias: Tensor | None, residual: Tensor | None,
    act: str | None, alpha: float, limit: float, layout: str, constant: bool, kernel: str,
) -> Tensor:  # fmt: skip
    given = None if norm is None else RowNorm(norm, eps, offset)
    gate = Clipped(alpha, limit) if act == "clipped" else act
    return skinny_linear(x, weight, norm=given, bias=bias, act=gate, layout=layout, residual=residual, constant=constant, kernel=kernel)


_op.register_fake(lambda x, weight, norm, eps, offset, bias, residual, act, *_: x.new_empty(len(x), len(weight) // (1 if act is None else 2)))


__all__ = ["Around", "RowNorm", "skinny_linear", "skinny_problem"]
