"""Distillation: how far a student's distributions are from a teacher's, of logits, or of two heads whose logits are never all there."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_numbers, check_temperature, check_tensors
from onchip.core.problem import Rows, exact_of
from onchip.dispatch import select
from onchip.ops.differentiable import Rule, autocast, differentiable
from onchip.ops.linear_losses import Sums, chunk_of, chunks
from onchip.ops.vocabulary import check_reduction, held

LOSS = 4  # the row of a kernel's figures [6, rows]


class Head(NamedTuple):
    """Hidden states [..., dim], and the weight [vocab, dim] and bias [vocab] that make logits of them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


def divergence(
    student: Tensor,  # [..., vocab]
    teacher: Tensor,  # [..., vocab]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    counts: Tensor | None = None,  # [...] bool
    reduction: str = "mean",
    kernel: str = "auto",
) -> Tensor:
    """The generalised Jensen-Shannon divergence of softmax(student / T) and softmax(teacher / T) (GKD; Agarwal et al., 2023), float32, in nats.

    beta     0: KL(teacher, student); 1: KL(student, teacher); between: `beta KL(teacher, m) + (1 - beta) KL(student, m)`, of their mixture
             `m = beta teacher + (1 - beta) student`.
    counts   the rows that count; others are not read, and give 0. "mean" is over rows that count: NaN of none.
    The gradient is the student's alone. It is not multiplied by T^2. Raises ValueError for arguments that disagree.
    """
    check_tensors("divergence", optional=("counts",), student=student, teacher=teacher, counts=counts)
    check_reduction("divergence", reduction)
    _check("divergence", student, teacher, counts, beta, temperature)
    _check_teacher("divergence", teacher=teacher)
    rows = [t.reshape(-1, t.shape[-1]) for t in (student, teacher)]
    loss, _ = _rows(*rows, None if counts is None else counts.reshape(-1), float(beta), float(temperature), kernel)
    if reduction == "none":
        return loss.view(student.shape[:-1])
    return loss.sum() if reduction == "sum" else loss.sum() * _share(loss, counts)


def linear_divergence(
    student: Head,
    teacher: Head,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    counts: Tensor | None = None,  # [...] bool
    reduction: str = "mean",
    kernel: str = "auto",
) -> Tensor:
    """`divergence` of the logits of two heads, without the logits in memory: the student's gradients are made in this call, and go backward once.

    The teacher's hidden states may have a width of their own. "mean" and "sum". Raises ValueError for arguments that disagree.
    """
    student, teacher = _head("student", student), _head("teacher", teacher)
    optional = ("student.bias", "teacher.bias", "counts")
    check_tensors("linear_divergence", optional=optional, **{f"student.{k}": t for k, t in student._asdict().items()}, counts=counts)
    check_tensors("linear_divergence", optional=optional, **{f"teacher.{k}": t for k, t in teacher._asdict().items()}, student=student.hidden)
    _check_teacher("linear_divergence", **{f"teacher.{k}": t for k, t in teacher._asdict().items()})
    student, teacher = (Head(*autocast(*head)) for head in (student, teacher))
    for name, head in (("student", student), ("teacher", teacher)):
        hidden, weight, bias = head
        fits = weight.ndim == 2 and weight.shape[1] > 0 and hidden.shape[-1:] == weight.shape[1:] and hidden.shape[:-1] == student.hidden.shape[:-1]
        if not fits or not hidden.dtype == weight.dtype == student.hidden.dtype:
            raise ValueError(
                f"linear_divergence: {name} is {hidden.dtype} {list(hidden.shape)} and {weight.dtype} {list(weight.shape)}; "
                f"give {student.hidden.dtype} {[*student.hidden.shape[:-1], 'dim']} and [vocab, dim], dim at least 1"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise ValueError(f"linear_divergence: {name}'s bias is {bias.dtype} {list(bias.shape)}; give {weight.dtype} {list(weight.shape[:1])}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"linear_divergence: reduction={reduction!r} is not one of mean, sum; use divergence on logits for others")
    if student.hidden.dtype == torch.float16:
        raise ValueError("linear_divergence: float16 would lose gradients, which are made before a loss is scaled; use bfloat16, or divergence on logits")
    _check_numbers("linear_divergence", beta, temperature)
    if len(teacher.weight) != len(student.weight):
        raise ValueError(f"linear_divergence: the student has {len(student.weight)} words, the teacher {len(teacher.weight)}; they must be as many")
    if len(student.weight) < 1:
        raise ValueError("linear_divergence: the vocabulary has 0 words; give at least 1")
    _check_counts("linear_divergence", counts, student.hidden.shape[:-1])
    flat = [t for hidden, weight, bias in (student, teacher) for t in (hidden.reshape(-1, hidden.shape[-1]), weight, bias)]
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in flat[:3]]
    rows = len(flat[0])
    factor = (
        _share(flat[0].new_empty(rows, dtype=exact_of(flat[0].dtype)), counts) if reduction == "mean" else flat[0].new_ones((), dtype=exact_of(flat[0].dtype))
    )
    counts = None if counts is None else counts.reshape(-1)
    call = (float(beta), float(temperature), kernel, needs)
    if torch.compiler.is_compiling():
        return torch.ops.onchip.linear_divergence(*flat, counts, factor, *call)[0]

    def run():
        loss, *grads = _with_gradients(*flat, counts, factor, *call)
        return loss, (), grads

    return held("linear_divergence", run, *flat[:3])[0]


def _head(what: str, given: Head) -> Head:
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise TypeError(f"linear_divergence: {what} is a {type(given).__name__}, no head; give Head(hidden, weight, bias), a bias or none")
    return Head(*given)


def _share(losses: Tensor, counts: Tensor | None) -> Tensor:
    """1 / how many rows count, on the device."""
    return 1 / (torch.full((), losses.numel(), device=losses.device) if counts is None else counts.sum()).to(losses.dtype)


def _check_teacher(name: str, **given: Tensor | None) -> None:
    for what, t in given.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: {what} requires gradients, which it does not get; give {what}.detach()")


def _check_numbers(name: str, beta: float, temperature: float) -> None:
    check_numbers(name, beta=beta)
    check_temperature(name, temperature=temperature)
    if not 0 <= beta <= 1:
        raise ValueError(f"{name}: beta is {beta}; give 0 to 1")


def _check_counts(name: str, counts: Tensor | None, shape: torch.Size) -> None:
    if counts is not None and (counts.dtype != torch.bool or counts.shape != shape):
        raise ValueError(f"{name}: counts is {counts.dtype} {list(counts.shape)}; give bools {list(shape)}")


def _check(name: str, student: Tensor, teacher: Tensor, counts: Tensor | None, beta: float, temperature: float) -> None:
    _check_numbers(name, beta, temperature)
    if student.shape != teacher.shape or student.dtype != teacher.dtype:
        of = [f"{t.dtype} {list(t.shape)}" for t in (student, teacher)]
        raise ValueError(f"{name}: student is {of[0]}, teacher {of[1]}; they must be equal")
    if student.ndim == 0 or student.shape[-1] < 1:
        raise ValueError(f"{name}: student and teacher are {list(student.shape)}; give [..., vocab], vocab at least 1")
    _check_counts(name, counts, student.shape[:-1])


def _problem(op: str, student: Tensor, beta: float) -> Rows:
    return Rows(op, *student.shape, student.dtype, {0: "forward", 1: "reverse"}.get(beta, ""))


# ---- of logits


def _forward(student: Tensor, teacher: Tensor, counts: Tensor | None, beta: float, temperature: float, kernel: str) -> tuple[Tensor, Tensor]:
    stats = select(_problem("divergence", student, beta), student.device, kernel).launch(student, teacher, counts, beta, temperature)
    return stats[LOSS].clone(), stats


def _backward(
    student: Tensor, teacher: Tensor, counts: Tensor | None, beta: float, temperature: float, kernel: str, stats: Tensor, g: Tensor
) -> Tensor:  # fmt: skip
    out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    return _gradient(student, teacher, counts, stats, g, beta, temperature, kernel, out)


def _gradient(student, teacher, counts, stats, g, beta, temperature, kernel, out) -> Tensor:
    problem = _problem("divergence_backward", student, beta)
    return select(problem, student.device, kernel).launch(student, teacher, counts, stats, g.to(stats.dtype), beta, temperature, out)


def _keep(ctx, inputs, output):
    ctx.call = inputs[3:]
    ctx.save_for_backward(*inputs[:3], output[1])


def _back(ctx, backward, g, _):
    student, teacher, counts, stats = ctx.saved_tensors
    return backward(student, teacher, counts, *ctx.call, stats, g), *(None for _ in range(5))


def _shapes(student, *_):
    exact = exact_of(student.dtype)
    return student.new_empty(len(student), dtype=exact), student.new_empty(6, len(student), dtype=exact)


_rows = differentiable("divergence", _forward, _backward, Rule(_keep, _back, (_shapes, lambda student, *_: student.new_empty(student.shape))))


# ---- of heads


def _with_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, t_hidden: Tensor, t_weight: Tensor, t_bias: Tensor | None, counts: Tensor | None, factor: Tensor,
    beta: float, temperature: float, kernel: str, needs: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The loss `factor * sum`, and the gradients of the student's head that are needed."""
    size = chunk_of(len(hidden), *weight.shape, weight.element_size(), heads=2)
    sums = Sums(hidden, weight, bias, needs, size, counts)
    total, g = factor.new_zeros(()), factor.expand(len(hidden))
    both = zip(chunks(hidden, weight, bias, size), chunks(t_hidden, t_weight, t_bias, size), strict=True)
    for (of, student), (_, teacher) in both:
        counted = None if counts is None else counts[of]
        stats = select(_problem("divergence", student, beta), student.device, kernel).launch(student, teacher, counted, beta, temperature)
        total = total + stats[LOSS].sum()
        if any(needs):
            sums.add(of, _gradient(student, teacher, counted, stats, g[of], beta, temperature, kernel, student))
    return total * factor, *sums.done()


@torch.library.custom_op("onchip::linear_divergence", mutates_args=())
def _compiled(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, t_hidden: Tensor, t_weight: Tensor, t_bias: Tensor | None, counts: Tensor | None, factor: Tensor,
    beta: float, temperature: float, kernel: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss, *grads = _with_gradients(hidden, weight, bias, t_hidden, t_weight, t_bias, counts, factor, beta, temperature, kernel, needs)
    return loss, *(hidden.new_empty(0) if grad is None else grad for grad in grads)


@_compiled.register_fake
def _(hidden, weight, bias, t_hidden, t_weight, t_bias, counts, factor, beta, temperature, kernel, needs):
    given = zip((hidden, weight, bias), needs, strict=True)
    return factor.new_empty(()), *(t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in given)


def _keep_gradients(ctx, inputs, output):
    ctx.needs = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _give_gradients(ctx, g, *_):
    grads = [grad * g.to(grad.dtype) if need else None for grad, need in zip(ctx.saved_tensors, ctx.needs, strict=True)]
    return *grads, *(None for _ in range(9))


_compiled.register_autograd(_give_gradients, setup_context=_keep_gradients)
