"""What losses over a vocabulary have in common: their arguments checked, figures of rows to losses, slices of a vocabulary put together, reductions."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from onchip.core.arguments import COLD, HOT, as_int, check_numbers, check_tensors
from onchip.core.losses import LOG_PROB, LOG_SUM, SMOOTH, TOP, WEIGHT, LossTerms, RowLoss, Shard
from onchip.core.parts import check_whole
from onchip.core.problem import Rows, exact_of
from onchip.dispatch import select
from onchip.ops.differentiable import no_jvp, once, refuse_batches

REDUCTIONS = ("mean", "sum", "none")


class Call(NamedTuple):
    """A call but its tensors, as schemas of torch.library can say it: the numbers of a RowLoss, the process group's name, "" for none, and more."""

    floats: list[float]  # smoothing, z_loss, softcap, temperature
    ints: list[int]  # ignore_index, first, vocab
    group: str
    entropy: bool
    kernel: str

    @property
    def ranks(self):
        """The process group of the slices, or None."""
        return dist.distributed_c10d._resolve_process_group(self.group) if self.group else None

    @property
    def words(self) -> int:
        """Of the vocabulary, for each rank: the same number on all of them, also where their slices are not equally wide."""
        return self.ints[2] if self.ranks is None else -(-self.ints[2] // dist.get_world_size(self.ranks))

    def problem(self, op: str, logits: Tensor) -> Rows:
        smoothing, _, softcap, _ = self.floats
        parts = ["entropy"] * self.entropy + ["smoothing"] * (smoothing > 0) + ["softcap"] * (softcap > 0)
        return Rows(op, *logits.shape, logits.dtype, " ".join(parts))


def call_of(name: str, x: Tensor, width: int, terms: LossTerms, entropy: bool, kernel: str) -> Call:
    """Of logits of `width` words, beside x. Raises ValueError where a term is out of its range, or there is no word."""
    check_terms(name, terms)
    if width < 1:
        raise ValueError(f"{name}: the vocabulary has {width} words; give at least 1")
    smoothing, z_loss, softcap, temperature, weights, ignore, shard = terms
    check_numbers(name, **{f"terms.{term}": value for term, value in zip(LossTerms._fields[:4], terms[:4], strict=True)})
    check_tensors(name, optional=("terms.class_weights",), logits=x, **{"terms.class_weights": weights})
    check_whole(name, "terms.ignore_index", ignore)
    for term, value, fine, accepted in (
        ("smoothing", smoothing, 0 <= smoothing <= 1, "0 to 1"),
        ("z_loss", z_loss, 0 <= z_loss < math.inf, "0 or more, but a number"),
        ("softcap", softcap, softcap == 0 or COLD <= softcap <= HOT, "0 for none, or 1e-30 to 1e30"),
        ("temperature", temperature, COLD <= temperature <= HOT, "1e-30 to 1e30"),
    ):
        if not fine:
            raise ValueError(f"{name}: terms.{term} is {value}; give {accepted}")
    if weights is not None and (weights.shape != (width,) or not weights.is_floating_point() or weights.requires_grad):
        kind = f"{weights.dtype} {list(weights.shape)}" + ", which requires gradients" * weights.requires_grad
        raise ValueError(f"{name}: terms.class_weights is {kind}; give a float tensor [{width}] without gradients")
    if shard is not None and not isinstance(shard, Shard):
        raise TypeError(f"{name}: terms.shard is a {type(shard).__name__}; give Shard(group, first, vocab), or None")
    group, first, vocab = shard or (None, 0, width)
    if not 0 <= first <= first + width <= vocab:
        raise ValueError(f"{name}: terms.shard has columns {first} to {first + width} of {vocab}; they must lie in the vocabulary")
    return Call([float(v) for v in terms[:4]], [as_int(ignore), as_int(first), as_int(vocab)], group.group_name if group is not None else "", entropy, kernel)


def check_terms(name: str, terms: LossTerms) -> None:
    if not isinstance(terms, LossTerms):
        raise TypeError(f"{name}: terms is a {type(terms).__name__}; give LossTerms(...)")


def check_targets(name: str, targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape or targets.dtype != torch.int64:
        raise ValueError(f"{name}: targets is {targets.dtype} {list(targets.shape)}; give int64 {list(shape)}")


def check_reduction(name: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")


def weights_of(call: Call, class_weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The class weights as figures of logits in `dtype` are, and their sum on all ranks where smoothing reads it."""
    if class_weights is None:
        return None, None
    class_weights = class_weights.to(exact_of(dtype))
    if call.floats[0] == 0:
        return class_weights, None
    total = class_weights.sum()
    if call.ranks is not None:
        dist.all_reduce(total, group=call.ranks)
    return class_weights, total


def row_loss(call: Call, class_weights: Tensor | None, total: Tensor | None) -> RowLoss:
    return RowLoss(*call.floats, *call.ints, class_weights, total)


def figures(call: Call, logits: Tensor, targets: Tensor, x: RowLoss) -> Tensor:
    """[6, rows] of the whole vocabulary, from logits [rows, width] of all of it or of a slice."""
    stats = select(call.problem("cross_entropy", logits), logits.device, call.kernel).launch(logits, targets, x)
    return stats if call.ranks is None else _together(call, stats, targets, x, logits.shape[1])


def gradient(call: Call, logits: Tensor, targets: Tensor, stats: Tensor, grads: tuple[Tensor, Tensor | None], x: RowLoss, out: Tensor) -> Tensor:
    """Of the logits, by the gradients of the losses and of the entropies of rows [rows]; written to `out`, which may be the logits."""
    g, g_entropy = (None if grad is None else grad.to(stats.dtype) for grad in grads)
    problem = call._replace(entropy=g_entropy is not None).problem("cross_entropy_backward", logits)
    return select(problem, logits.device, call.kernel).launch(logits, targets, stats, g, g_entropy, x, out)


def _together(call: Call, stats: Tensor, targets: Tensor, x: RowLoss, width: int) -> Tensor:
    """Figures of the vocabulary from those of its slices, the same bits on every rank: one collective."""
    ranks = call.ranks
    mass = stats.new_full((1, stats.shape[1]), width) if x.class_weights is None else x.class_weights.sum().to(stats.dtype).expand(1, stats.shape[1])
    mine = torch.cat((stats, mass))
    slices = [torch.empty_like(mine) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(slices, mine, group=ranks)
    log_prob, top, log_sum, entropy, smooth, weight, mass = torch.stack(slices).unbind(1)  # [ranks, rows] each
    top = torch.where(log_sum == -torch.inf, -torch.inf, top)  # no word of the slice can be
    highest = top.amax(0)
    log_whole = (top - highest + log_sum).logsumexp(0)
    more = top - highest + log_sum - log_whole
    share = more.exp()
    entropy = (share * torch.where(share > 0, entropy - more, 0)).sum(0)
    smooth = torch.where(more == -torch.inf, 0, smooth)
    log_prob = torch.where(more == -torch.inf, -torch.inf, log_prob).masked_fill((targets < 0) | (targets >= x.vocab), torch.nan)
    found = torch.stack(((log_prob + more).amax(0), highest, log_whole, entropy, (smooth - mass * more).sum(0), weight.sum(0)))
    return torch.where(targets != x.ignore_index, found, 0)


def losses_of(stats: Tensor, x: RowLoss) -> Tensor:
    """The loss of each row, [rows], from its figures."""
    loss = -stats[LOG_PROB]
    if x.class_weights is not None or x.smoothing:
        loss = loss * stats[WEIGHT] * (1 - x.smoothing) if x.class_weights is not None else loss * (1 - x.smoothing)
    if x.smoothing:
        loss = loss + stats[SMOOTH] * (x.smoothing / x.vocab)
    return loss + x.z_loss * (stats[TOP] + stats[LOG_SUM]).square() if x.z_loss else loss


def reduced(loss: Tensor, weight: Tensor, reduction: str) -> Tensor:
    """The losses of rows as one: their sum, or that by the sum of their targets' class weights."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / weight.sum()


def factor_of(call: Call, targets: Tensor, class_weights: Tensor | None, reduction: str, dtype: torch.dtype) -> Tensor:
    """What the sum of the losses of logits in `dtype` is multiplied by, [], before any of them is known: 1, or 1 by the sum of the targets' class weights."""
    exact = exact_of(dtype)
    if reduction == "sum":
        return torch.ones((), dtype=exact, device=targets.device)
    return 1 / _weights(call, targets, class_weights, exact).sum()


def _weights(call: Call, targets: Tensor, class_weights: Tensor | None, exact: torch.dtype) -> Tensor:
    """The class weight of each row's target, [rows]; 0 where it is ignored or no class."""
    ignore, first, vocab = call.ints
    counts = (targets != ignore) & (targets >= 0) & (targets < vocab)
    if class_weights is None:
        return counts.to(exact)
    local = targets - first
    here = counts & (local >= 0) & (local < len(class_weights))
    weight = torch.where(here, class_weights[torch.where(here, local, 0)].to(exact), 0)
    if call.ranks is not None:
        dist.all_reduce(weight, group=call.ranks)
    return weight


class _Held(torch.autograd.Function):
    """A scalar loss whose gradients were computed together with it: `run()` gives it, more results and the gradients, which go backward once."""

    @staticmethod
    def forward(ctx, name, run, *inputs):
        ctx.name = name
        loss, more, ctx.held = run()
        ctx.mark_non_differentiable(*more)
        ctx.set_materialize_grads(False)
        return loss, *more

    @staticmethod
    def backward(ctx, g, *_):
        refuse_batches(ctx.name, g)
        if ctx.held is None:
            raise RuntimeError("the gradients of this loss were given in its first backward pass, and scaled in place; call the loss again")
        held, ctx.held = ctx.held, None
        return None, None, *once(ctx.name, lambda: [None if grad is None or g is None else _scaled(grad, g.detach()) for grad in held])

    @staticmethod
    def jvp(ctx, *tangents):
        no_jvp(ctx.name)


def held(name: str, run, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name}: it makes its gradients in this call, which torch.func does not know; use torch.autograd.grad outside of it")
    if forward_ad._current_level >= 0 and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs):
        no_jvp(name)  # before logits are written over
    return _Held.apply(name, run, *inputs)


def _scaled(grad: Tensor, g: Tensor) -> Tensor:
    problem = Rows("scale", 1, grad.numel(), grad.dtype)
    return select(problem, grad.device).launch(grad, g)
