"""An operator and its gradient, once for eager code and once for compiled graphs.

Both ways run the same two functions: an eager call through a `torch.autograd.Function`, a compiled graph through the torch.library operators
`onchip::NAME` and `onchip::NAME_backward`, whose boundary costs about 60 us a call.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How the gradient of an operator is asked for.

    keep      (ctx, inputs, output): what of a call the backward pass reads, as `setup_context` of torch.
    back      (ctx, backward, *grads) -> a gradient or None for each input; it calls `backward`, the function or the operator.
    shapes    the fake of the forward function, and that of the backward function: the same arguments, empty tensors of the right shape.
    """

    keep: Callable
    back: Callable
    shapes: tuple[Callable, Callable]


def differentiable(name: str, forward: Callable, backward: Callable, rule: Rule) -> Callable:
    """`forward` with the gradient that `backward` computes. Both have annotations that torch.library can read; neither changes its inputs."""
    op = torch.library.custom_op(f"onchip::{name}", forward, mutates_args=())
    op_backward = torch.library.custom_op(f"onchip::{name}_backward", backward, mutates_args=())
    op.register_fake(rule.shapes[0])
    op_backward.register_fake(rule.shapes[1])
    op.register_autograd(lambda ctx, *grads: rule.back(ctx, op_backward, *grads), setup_context=rule.keep)
    eager = type(name, (torch.autograd.Function,), {})
    eager.forward = staticmethod(forward)
    eager.setup_context = staticmethod(rule.keep)
    eager.backward = staticmethod(lambda ctx, *grads: _once(name, ctx, rule.back, backward, grads))

    def call(*inputs):
        if torch.compiler.is_compiling():
            return op(*inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return eager.apply(*inputs)
        return forward(*inputs)

    return call


def _once(name: str, ctx, back: Callable, backward: Callable, grads: tuple) -> tuple:
    with torch.no_grad():
        found = back(ctx, backward, *grads)
    if not torch.is_grad_enabled():
        return found
    anchors = [x for x in (*grads, *ctx.saved_tensors) if x is not None]  # create_graph: whoever goes on through these gradients shall know
    return _Once.apply(name, len(anchors), *anchors, *found)


class _Once(torch.autograd.Function):
    """Gradients that have none themselves."""

    @staticmethod
    def forward(ctx, name: str, anchors: int, *tensors: Tensor | None):
        ctx.name = name
        return tuple(None if x is None else x.view_as(x) for x in tensors[anchors:])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.name}: gradients of gradients are not implemented; torch's own formula has them")
