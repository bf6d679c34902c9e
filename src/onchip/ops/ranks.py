"""Sums over the ranks of a model, with what a decoder does next."""

from torch import Tensor

from onchip.core.linear import RowNorm
from onchip.core.problem import RankSum
from onchip.core.ranks import Ranks
from onchip.dispatch import select


def sum_ranks(
    x: Tensor,  # [rows, width]
    ranks: Ranks,
    *,
    residual: Tensor | None = None,  # [rows, width]
    norm: RowNorm | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The sum of all ranks' x, plus `residual`; with a norm RMSNorm of that, and with both the norm and the sum. The same bits on every rank.

    All ranks call it at the same place with the same shapes and the same residual. x may be written to. Sums are in float32 and rounded once, but in
    the reference, which rounds as the group's all-reduce does. Raises ValueError for shapes or dtypes that disagree. No gradients: this is for inference.
    """
    _check(x, ranks, residual, norm)
    return select(rank_problem(x, ranks, residual, norm), x.device, kernel).launch(x, ranks, residual, norm)


def rank_problem(x: Tensor, ranks: Ranks, residual: Tensor | None = None, norm: RowNorm | None = None) -> RankSum:
    """The Problem of such a call."""
    words = " ".join(name for name, given in (("residual", residual), ("norm", norm)) if given is not None)
    return RankSum("sum_ranks", *x.shape, x.dtype, ranks.of, words, ranks.apart, len(ranks.boxes.turns) if ranks.boxes else 0)


def _check(x: Tensor, ranks: Ranks, residual: Tensor | None, norm: RowNorm | None) -> None:
    if x.ndim != 2:
        raise ValueError(f"sum_ranks: x is {list(x.shape)}; give [rows, width]")
    shapes = {"residual": x.shape, "norm.weight": x.shape[1:]}
    for name, given in (("residual", residual), ("norm.weight", norm and norm.weight)):
        if given is not None and (given.dtype != x.dtype or given.device != x.device or given.shape != shapes[name]):
            wanted = f"{x.dtype} {list(shapes[name])} on {x.device}"
            raise ValueError(f"sum_ranks: {name} is {given.dtype} {list(given.shape)} on {given.device}; give {wanted}, as x has it")
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 for t in (x, residual, norm and norm.weight)):
        raise ValueError("sum_ranks: rows of x and residual, and norm.weight must be contiguous; call .contiguous() on them first")
    if ranks.boxes and (ranks.boxes.boxes[0].shape[3], ranks.boxes.boxes[0].dtype) != (x.shape[1], x.dtype):
        have = ranks.boxes.boxes[0]
        raise ValueError(f"sum_ranks: x is {x.dtype} of width {x.shape[1]}, the ranks' boxes {have.dtype} of {have.shape[3]}; make boxes for it")
