"""What is done once a step, of an optimiser or of a sampler of diffusion models, as the suite of row operators asks for it."""

import functools

import torch
from torch import Tensor

from onchip.bench.row_operator import Operator, of
from onchip.core.problem import Cost, Rows
from onchip.dispatch import OPS
from onchip.ops.diffusion import DDPM, DPM2M, Schedule, denoise_step, noise_state, schedule
from onchip.ops.optim import AdamW

MAX_NORM = 1.0
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
GUIDANCE, STEP = 7.5, 5  # of 20


# ---- an optimiser's step


class Trained:
    """Parameters with gradients, and the optimisers that hold their moments, in the parameters' dtype as torch has them."""

    def __init__(self, params: list[Tensor]):
        self.params = params

    @functools.cached_property
    def onchip(self) -> AdamW:
        return AdamW(self.params, **SETTINGS, moments=self.params[0].dtype)

    @functools.cached_property
    def clipped(self) -> AdamW:
        return AdamW(self.params, **SETTINGS, moments=self.params[0].dtype, max_norm=MAX_NORM)

    @functools.cached_property
    def torch(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.params, **SETTINGS, fused=True)

    def step(self, name: str, clip: bool = False) -> Tensor:
        if clip:
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        getattr(self, name).step()
        return self.params[0].detach()


def _parameters(rows, width, dtype, device):
    """`rows` tensors of `width` elements."""
    params = [torch.nn.Parameter(torch.randn(width, dtype=dtype, device=device)) for _ in range(rows)]
    for p in params:
        p.grad = torch.randn_like(p)
    return (Trained(params),)


def _adamw(rows, width, dtype) -> Rows:
    return Rows("adamw", rows, rows * width, dtype, f"{'bf16' if dtype == torch.bfloat16 else 'fp32'} moments")


def _clipped(rows, width, dtype) -> Cost:
    """Gradients are read twice: none may be used before the norm of all is known."""
    p = _adamw(rows, width, dtype)
    return OPS["adamw"].cost(p) + OPS["grad_norm"].cost(p._replace(op="grad_norm", variant=""))


# ---- a sampler's step


@functools.cache
def _plan(sampler, device: torch.device) -> tuple[Schedule, Tensor, Tensor]:
    """20 steps, the counter of one in the middle, and what noise is drawn from."""
    return schedule(sampler, 20, device=device), torch.tensor(STEP, device=device), noise_state(0, device)


def _images(streams: int):
    """x, the model's output without and with the prompt, and `streams` tensors like x."""

    def make(rows, width, dtype, device):
        new = functools.partial(torch.randn, dtype=dtype, device=device)
        return new(rows, width), new(2 * rows, width), *(new(rows, width) for _ in range(streams))

    return make


def _ours(sampler):
    def step(x, output, history=None):
        plan, at, state = _plan(sampler, x.device)
        y, data, _ = denoise_step(x, output, plan, at, guidance=GUIDANCE, history=history, state=state)
        return y if history is None else (y, data)

    return step


def _plain(sampler):
    def step(x, output, history=None):
        of_x, of_o, y_x, y_o, y_data, y_history, y_noise, _ = _plan(sampler, x.device)[0].table[STEP]
        without, given = output.chunk(2)
        o = without + GUIDANCE * (given - without)
        data = of_x * x + of_o * o
        y = y_x * x + y_o * o + y_data * data
        if history is None:
            return (y + y_noise * torch.randn_like(x)).to(x.dtype)
        return (y + y_history * history).to(x.dtype), data.to(x.dtype)

    return step


def _denoised(sampler, words: str, streams: int, drawn: bool) -> Operator:
    return Operator(of("denoise", f"{words} guided"), _images(streams), _ours(sampler), _plain(sampler), sizes=((64, 1 << 20),), least=(2, 24), drawn=drawn)


STEPS = {
    "adamw": Operator(
        _adamw, _parameters, lambda t: t.step("onchip"), lambda t: t.step("torch"), sizes=((16, 1 << 22),), least=(3, 40), drawn=True,
    ),
    "adamw, clipped": Operator(
        _clipped, _parameters, lambda t: t.step("clipped"), lambda t: t.step("torch", True), sizes=((16, 1 << 22),), least=(3, 40), drawn=True,
    ),
    "denoise, DPM-Solver++": _denoised(DPM2M(), "second", 1, False),
    "denoise, DDPM": _denoised(DDPM(), "noisy", 0, True),
}  # fmt: skip
