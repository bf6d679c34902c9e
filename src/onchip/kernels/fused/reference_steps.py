"""An optimiser's step, a denoising step and what a decode step does beside its model in plain torch: the oracle in float64, and what a CPU runs."""

import torch
from torch import Tensor

from onchip.core import philox
from onchip.core.problem import Rows, exact_of


def grad_norm(problem: Rows, config: None, lists: tuple[list[Tensor], ...], known: dict) -> Tensor:
    """The 2-norm of all gradients together, float64 []."""
    return torch.stack([g.to(exact_of(g.dtype)).square().sum(dtype=torch.float64) for g in lists[1]]).sum().sqrt()


def adamw(problem: Rows, config: None, lists: tuple[list[Tensor], ...], known: dict, how, powers: Tensor, clip) -> None:
    """One step in place; p, g, m and v are lists of tensors. how: ops.optim.Hyper, powers: b1^t and b2^t, float64 [2], clip: ops.optim.Clip or None.

    Gradients are scaled as torch.nn.utils.clip_grad_norm_ scales them.
    """
    factor = None if clip is None else (clip.most / (clip.norm + 1e-6)).clamp(max=1.0)
    for p, g, m, v in zip(*lists, strict=True):
        exact = exact_of(p.dtype)
        first, second = (1 - powers).to(exact)
        grad = g.to(exact) if factor is None else g.to(exact) * factor.to(exact)
        mean, square = m.to(exact).lerp(grad, 1 - how.beta1), how.beta2 * v.to(exact) + (1 - how.beta2) * grad * grad
        m.copy_(mean)
        v.copy_(square)
        p.copy_(p.to(exact) * (1 - how.lr * how.decay) - how.lr / first * mean / (square.sqrt() / second.sqrt() + how.eps))


def denoise(problem: Rows, config: None, x: Tensor, output: Tensor, table: Tensor, step: Tensor, guidance: float, history, state, clip: float):
    """(next sample, predicted data or None, next model input or None), see `ops.diffusion.denoise_step`."""
    exact = exact_of(x.dtype)
    words = problem.variant.split()
    row, scale = table.index_select(0, step.view(1)).to(exact)[0], table.index_select(0, step.view(1) + 1).to(exact)[0, -1]
    data_x, data_o, of_x, of_o, of_data, of_history, of_noise, _ = row
    sample, out = x.to(exact), output.to(exact)
    if "guided" in words:
        without, given = out.chunk(2)
        out = without + guidance * (given - without)
    data = data_x * sample + data_o * out
    data = data.clamp(-clip, clip) if "clipped" in words else data
    y = of_x * sample + of_o * out + of_data * data
    if history is not None:
        y = y + torch.where(of_history == 0, 0.0, of_history * history.to(exact))  # before the first step it holds anything
    if "noisy" in words:
        y = y + of_noise * philox.normal(state, x.numel(), step.view(())).view(x.shape).to(exact)
    return y.to(x.dtype), None if history is None else data.to(x.dtype), (y * scale).to(x.dtype) if "scaled" in words else None


def decode_places(problem: Rows, config: None, positions: Tensor, page_table: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """at and slots, int64 [rows], and lengths, int32 [rows]; `width` is the page."""
    page = problem.width
    at = torch.clamp(positions, min=0, out=at)
    index = page_table.gather(1, (at // page).clamp(max=page_table.shape[1] - 1)[:, None])[:, 0].long()
    return at, torch.where(positions >= 0, index * page + at % page, -1), (positions + 1).int()


def decode_advance(problem: Rows, config: None, drawn: Tensor, tokens: Tensor, positions: Tensor, counts: Tensor | None, history: Tensor | None) -> None:
    """In place."""
    used = positions >= 0
    tokens.copy_(drawn)
    positions.add_(used)
    if counts is not None:
        counts.scatter_add_(1, torch.where(used, drawn, 0)[:, None], used[:, None].int())
    if history is not None:
        place = positions.clamp(0, history.shape[1] - 1)[:, None]
        history.scatter_(1, place, torch.where(used[:, None], drawn[:, None].int(), history.gather(1, place)))
