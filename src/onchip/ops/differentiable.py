"""An operator and its gradient, once for eager code and once for compiled graphs.

Both ways run the same two functions: an eager call through a `torch.autograd.Function`, a compiled graph through the torch.library operators
`onchip::NAME` and `onchip::NAME_backward`, whose boundary costs about 60 us a call.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Rule(NamedTuple):
    """How the gradient of an operator is asked for.

    keep      (ctx, inputs, output): what of a call the backward pass reads, as `setup_context` of torch.
    back      (ctx, backward, *grads) -> a gradient or None for each input; it calls `backward`, the function or the operator.
    shapes    the fake of the forward function, and that of the backward function: the same arguments, empty tensors of the right shape.
    """

    keep: Callable
    back: Callable
    shapes: tuple[Callable, Callable]


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype where it is on for the first one's device and that holds floats; doubles stay, as torch leaves them."""
    first = tensors[0]
    if not as_autocast(first, first) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t if t is None else t.to(dtype) for t in tensors)


def as_autocast(x: Tensor, beside: Tensor) -> bool:
    """Whether autocast is on where x is, and both are floats: what goes beside it may then be of another dtype, for layers before have cast it."""
    return x.is_floating_point() and beside.is_floating_point() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


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
    eager.vmap = staticmethod(lambda *_: _no_vmap(name))
    eager.jvp = staticmethod(lambda *_: no_jvp(name))
    again = functools.partial(_Once.apply, name, backward)

    def back(ctx, *grads):
        refuse_batches(name, *grads)
        return rule.back(ctx, again if torch.is_grad_enabled() else backward, *grads)

    eager.backward = staticmethod(back)

    def call(*inputs):
        if torch.compiler.is_compiling():
            return op(*inputs)
        if (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)) or forward_ad._current_level >= 0:
            return eager.apply(*inputs)  # which refuses tangents: a kernel would lose them in silence
        return forward(*inputs)

    return call


def _no_vmap(name: str):
    way_out = "loop over the batch (jacrev: chunk_size=1), or give it as more rows"
    raise NotImplementedError(f"{name}: gradients under torch.vmap, and so jacrev's, are not implemented; {way_out}")


def no_jvp(name: str):
    raise NotImplementedError(f"{name}: derivatives in forward mode (jvp, jacfwd) are not implemented; use reverse mode, or torch's own formula")


def batched(*grads: Tensor | None) -> bool:
    """Whether they are those of many backward passes at once (is_grads_batched), as torch makes them without torch.func."""
    return any(d is not None and torch._C._functorch.is_legacy_batchedtensor(d) for d in grads)


def refuse_batches(name: str, *grads: Tensor | None) -> None:
    if batched(*grads):
        _no_vmap(name)


def once(name: str, run: Callable, *grads: Tensor | None):
    """`run()` of these gradients, which a backward pass ends with; one that is differentiated itself (create_graph) shall find that its results have none."""
    refuse_batches(name, *grads)
    return _Once.apply(name, lambda _: run(), torch.empty((), requires_grad=True)) if torch.is_grad_enabled() else run()


class _Once(torch.autograd.Function):
    """`backward`, whose results have no gradients themselves: whoever goes on through them (create_graph) shall know."""

    @staticmethod
    def forward(name: str, backward: Callable, *inputs):
        found = backward(*inputs)
        return tuple(found) if isinstance(found, list) else found  # autograd does not look into lists

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def vmap(info, dims, name: str, *_):
        _no_vmap(name)

    @staticmethod
    def jvp(ctx, *_):
        no_jvp(ctx.name)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.name}: gradients of gradients are not implemented; torch's own formula has them")
