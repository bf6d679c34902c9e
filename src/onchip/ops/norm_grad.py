"""A norm of rows with its gradients: `forward` and `backward` select a kernel each, `Eager` and the registered operator tie them together.

Saved for the backward pass are the sum (or x, or y of an invertible norm), statistics and parameters; x beside the sum where a gate or a row's
scale trains; of the stream its dtype alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.norms import CODES, TENSORS, Norm, Normed, NormGrads, words
from onchip.core.problem import Rows, exact_of
from onchip.dispatch import select
from onchip.ops.differentiable import no_jvp, once


def forward(x: Tensor, norm: Norm, kernel: str) -> Normed:
    problem = Rows("norm", len(x), x.shape[1], x.dtype, words(norm, x))
    return select(problem, x.device, kernel).launch(x, norm)


class Wanted(NamedTuple):
    """Which gradients the kernel makes, whether x needs its own, and whether the stream's is the same, which is then made once."""

    names: tuple[str, ...]
    x: bool
    stream: bool

    @staticmethod
    def of(needs: dict[str, bool], norm: Norm, x: Tensor) -> "Wanted":
        plain = norm.residual is not None and norm.gate is None and norm.row_scale is None and norm.state is None and norm.residual.dtype == x.dtype
        names = [name for name, needed in needs.items() if needed and name != "state"]
        if plain and "residual" in names:
            names = ["x", *(name for name in names if name not in ("x", "residual"))]
        return Wanted(tuple(names), needs["x"], plain and needs["residual"])

    def all(self, grads: NormGrads) -> list[Tensor | None]:
        """Of x and of each of `TENSORS`."""
        residual = grads.x if self.stream else grads.residual
        return [grads.x if self.x else None, *(residual if name == "residual" else getattr(grads, name, None) for name in TENSORS)]

    @property
    def branch(self) -> bool:
        """Whether x is read again, beside the sum."""
        return "gate" in self.names or "row_scale" in self.names


def backward(wanted: tuple[str, ...], dy: Tensor, d_total: Tensor | None, z: Tensor, x: Tensor | None, normed: Normed, norm: Norm, kernel: str) -> NormGrads:
    """The kernel that is chosen is one of the operator "norm_backward"; a name of a forward kernel means its namesake there."""
    said = words(norm, dy) + " d_total" * (d_total is not None) + " -> " + " ".join(wanted)
    kernel = f"{kernel}_backward" if kernel.startswith("triton") else kernel
    return select(Rows("norm_backward", len(dy), dy.shape[1], dy.dtype, said), dy.device, kernel).launch(wanted, dy, d_total, z, x, normed, norm)


class Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm: Norm, kernel: str, x: Tensor, *tensors: Tensor | None):
        norm = norm._replace(**dict(zip(TENSORS, tensors, strict=True)))
        normed = forward(x, norm, kernel)
        ctx.wanted = Wanted.of(dict(zip(("x", *TENSORS), ctx.needs_input_grad[2:], strict=True)), norm, x)
        _keep(ctx, norm, x, normed)
        ctx.kernel = kernel
        return normed.y, normed.total

    @staticmethod
    def backward(ctx, dy: Tensor | None, d_total: Tensor | None):
        return None, None, *once("norm", lambda: ctx.wanted.all(backward(ctx.wanted.names, *_kept(ctx, dy, d_total), ctx.kernel)), dy, d_total)

    @staticmethod
    def jvp(ctx, *tangents):
        no_jvp("norm")


def _keep(ctx, norm: Norm, x: Tensor, normed: Normed) -> None:
    """What the backward pass reads, and no more: of the stream only its dtype."""
    z = normed.y if norm.inverse else x if normed.total is None else normed.total
    stream = None if norm.residual is None else norm.residual.new_empty((0, x.shape[1]))
    small = norm._replace(residual=stream)
    ctx.save_for_backward(z, x if ctx.wanted.branch else None, normed.mean, normed.rstd, *(getattr(small, name) for name in TENSORS))
    ctx.norm, ctx.dtype = norm._replace(**dict.fromkeys(TENSORS)), x.dtype
    ctx.set_materialize_grads(False)


def _kept(ctx, dy: Tensor | None, d_total: Tensor | None) -> tuple:
    """The inputs of `backward`."""
    z, x, mean, rstd, *small = ctx.saved_tensors
    dy = torch.zeros(z.shape, dtype=ctx.dtype, device=z.device) if dy is None else dy
    return dy, d_total, z, x, Normed(dy, None, mean, rstd), ctx.norm._replace(**dict(zip(TENSORS, small, strict=True)))


# ---- in compiled graphs: torch.library operators. What is not there comes back as a tensor of no elements.


@torch.library.custom_op("onchip::norm", mutates_args=())
def _op(
    x: Tensor, tensors: list[Tensor], names: str, kind: str, codes: str, keep: bool, inverse: bool, eps: float, offset: float, drop: float,
    span: int, sets: int, kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = dict(zip(names.split(), tensors, strict=True))
    normed = forward(x, Norm(kind, eps, offset, **given, span=span, sets=sets, drop=drop, codes=codes, keep=keep, inverse=inverse), kernel)
    return tuple(x.new_empty(0) if t is None else t for t in normed)


@_op.register_fake
def _(x, tensors, names, kind, codes, keep, inverse, *_):
    given = dict(zip(names.split(), tensors, strict=True))
    stat = exact_of(x.dtype)
    rows, none = x.shape[0], 0
    total = x.new_empty(x.shape, dtype=given["residual"].dtype) if "residual" in given else x.new_empty(0)
    sizes = (rows if keep and kind == "layer" else none, stat), (rows if keep else none, stat), (rows if codes else none, torch.float32)
    stats = (x.new_empty(n, dtype=dtype if n is not none else x.dtype) for n, dtype in sizes)
    return x.new_empty(x.shape, dtype=CODES[codes][0] if codes else x.dtype), total, *stats


@torch.library.custom_op("onchip::norm_backward", mutates_args=())
def _op_backward(
    dy: Tensor, d_total: Tensor | None, z: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor, tensors: list[Tensor], names: str, kind: str,
    inverse: bool, eps: float, offset: float, drop: float, span: int, sets: int, wanted: str, kernel: str,
) -> list[Tensor]:  # fmt: skip
    given = dict(zip(names.split(), tensors, strict=True))
    norm = Norm(kind, eps, offset, **given, span=span, sets=sets, drop=drop, keep=True, inverse=inverse)
    grads = backward(tuple(wanted.split()), dy, d_total, z, x, Normed(dy, None, mean, rstd), norm, kernel)
    return [getattr(grads, name) for name in wanted.split()]


@_op_backward.register_fake
def _(dy, d_total, z, x, mean, rstd, tensors, names, *rest):
    given, wanted = dict(zip(names.split(), tensors, strict=True)), rest[-2].split()
    return [dy.new_empty(dy.shape if name in ("x", "residual") else given[name].shape, dtype=(dy if name == "x" else given[name]).dtype) for name in wanted]


def compiled(x: Tensor, norm: Norm, kernel: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    names = [name for name in TENSORS if getattr(norm, name) is not None]
    tensors = [getattr(norm, name) for name in names]
    y, total, _, _, scale = torch.ops.onchip.norm(
        x, tensors, " ".join(names), norm.kind, norm.codes, norm.keep, norm.inverse, norm.eps, norm.offset, norm.drop, norm.span, norm.sets, kernel
    )
    if norm.in_place:
        total = norm.residual.copy_(total)
    return y, None if norm.residual is None else total, scale if norm.codes else None


def _setup(ctx, inputs, output):
    x, tensors, names, kind, _, _, inverse, eps, offset, drop, span, sets, kernel = inputs
    y, total, mean, rstd, _ = output
    given = dict(zip(names.split(), tensors, strict=True))
    norm = Norm(kind, eps, offset, **given, span=span, sets=sets, drop=drop, keep=True, inverse=inverse)
    needs = dict(zip(("x", *names.split()), (t.requires_grad for t in (x, *tensors)), strict=True))
    ctx.wanted, ctx.names, ctx.kernel = Wanted.of(needs, norm, x), names.split(), kernel
    _keep(ctx, norm, x, Normed(y, total if norm.residual is not None else None, mean if kind == "layer" else None, rstd))


def _back(ctx, dy, d_total, *_):
    dy, d_total, z, x, normed, norm = _kept(ctx, dy, d_total)
    tensors = [getattr(norm, name) for name in ctx.names]
    given = (" ".join(ctx.names), norm.kind, norm.inverse, norm.eps, norm.offset, norm.drop, norm.span, norm.sets, " ".join(ctx.wanted.names), ctx.kernel)
    found = torch.ops.onchip.norm_backward(dy, d_total, z, x, normed.mean, normed.rstd, tensors, *given)
    dx, *grads = ctx.wanted.all(NormGrads(**dict(zip(ctx.wanted.names, found, strict=True))))
    grads = dict(zip(TENSORS, grads, strict=True))
    return dx, [grads[name] for name in ctx.names], *(None,) * 11


_op.register_autograd(_back, setup_context=_setup)
