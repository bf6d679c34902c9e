"""Samplers of diffusion models: a schedule made once on the device, and one fused step that finds its row by a counter there.

All samplers are one formula. A noisy sample is `x = alpha data + sigma noise`; the model's output and x give the data, and the next sample is a sum of
x, the output, the data, the data of the step before and fresh noise, with coefficients that depend on the step alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core import philox
from onchip.core.arguments import check_count, check_numbers, check_tensors, refuse_gradients
from onchip.core.parts import is_whole
from onchip.core.problem import Rows
from onchip.core.trace import readable
from onchip.dispatch import select

PREDICTIONS = ("epsilon", "v", "sample", "flow")
SPACINGS = ("leading", "trailing", "linspace")
LAST = ("zero", "first")
FEW = 15  # steps: with fewer, DPM2M's last one is of first order


class Betas(NamedTuple):
    """The noise a model was trained with: betas from `start` to `end`, between 0 and 1, linear in their square roots (`scaled`, Stable Diffusion)
    or in themselves.

    last   noise left after the last step: "zero", or "first", that of training step 0 (diffusers: set_alpha_to_one=False).
    """

    start: float = 0.00085
    end: float = 0.012
    scaled: bool = True
    steps: int = 1000
    last: str = "zero"


class Flow(NamedTuple):
    """Rectified flow: `x = (1 - sigma) data + sigma noise`, sigmas from 1 down, shifted towards noise: `shift s / (1 + (shift - 1) s)` (Esser et al., 2024)."""

    shift: float = 1.0
    steps: int = 1000


class DDPM(NamedTuple):
    """Ancestral sampling (Ho et al., 2020), the smaller variance; data cut off at +-clip, above 0, None: not."""

    clip: float | None = None


class DDIM(NamedTuple):
    """Song et al. (2021); eta 0 draws no noise, 1 as much as DDPM, no more."""

    eta: float = 0.0
    clip: float | None = None


class Euler(NamedTuple):
    """Euler's method in sigma (Karras et al., 2022); over a Flow the usual step of rectified flow."""


class DPM2M(NamedTuple):
    """DPM-Solver++, second order, multistep, midpoint (Lu et al., 2022); the first step is of first order, the last where it ends at data
    without noise or is one of fewer than FEW (diffusers' lower_order_final).
    """


class Spacing(NamedTuple):
    """Which of the training steps are taken: "leading", "trailing" or "linspace" (Lin et al., 2023), the leading ones moved by `offset`.

    A step ends where the next begins. diffusers' DDIM and DDPM end it `1000 // steps` training steps on, which is elsewhere with "linspace", and with
    "trailing" where 1000 / steps is no whole number: there their pictures are others.
    """

    kind: str = "leading"
    offset: int = 0


class Schedule(NamedTuple):
    """Every step of a sampler.

    timesteps   float32 [steps], what the model is told.       start   standard deviation of the first sample.
    table       float32 [steps + 1, 8]: coefficients of a step, see `kernels/fused/denoise.py`; the last column scales the model's input.
    words       what a step has to do: "clipped", "second" (looks at the step before), "noisy", "scaled".
    """

    timesteps: Tensor
    table: Tensor
    start: float
    words: str
    clip: float

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def first_input(self, x: Tensor) -> Tensor:
        """What the model gets in the first step, of the first sample; later ones are given by `denoise_step`."""
        return (x * self.table[0, -1]).to(x.dtype)


def schedule(
    sampler: DDPM | DDIM | Euler | DPM2M,
    steps: int,
    *,
    noise: Betas | Flow = Betas(),
    prediction: str = "epsilon",
    spacing: Spacing = Spacing(),
    device: torch.device | None = None,
) -> Schedule:
    """The Schedule of `steps` steps, computed in float64 and copied to the device once.

    prediction   what the model gives: "epsilon" the noise, "v" (alpha noise - sigma data; Salimans and Ho, 2022), "sample" the data, "flow" (noise - data).
    Raises ValueError for numbers that are out of range, and for what does not go together.
    """
    _check_plan(sampler, steps, noise, prediction, spacing)
    device = None if device is None else _device("schedule", device)
    flow = isinstance(noise, Flow)
    if flow != (prediction == "flow") or (flow and not isinstance(sampler, (Euler, DPM2M))):
        raise ValueError(
            f"schedule: {sampler} with prediction={prediction!r} over {noise}; a Flow goes with 'flow' and with Euler or DPM2M, and 'flow' with a Flow"
        )
    if flow:
        times, alphas, sigmas = _flow_levels(noise, steps, isinstance(sampler, DPM2M))
    else:
        times = _times(sampler, steps, noise, spacing)
        if times != sorted({min(max(t, 0), noise.steps - 1) for t in times}, reverse=True):
            taken = f"{times[0]:g} to {times[-1]:g}, some twice" if len(set(times)) < steps else f"{times[0]:g} to {times[-1]:g}"
            raise ValueError(f"schedule: {steps} steps of {spacing} are training steps {taken}, of 0 to {noise.steps - 1}; give fewer, or another offset")
        times, alphas, sigmas = _levels(noise, times)
    exploding = isinstance(sampler, Euler) and not flow  # in the coordinates of x / alpha
    rows = []
    for n in range(steps):
        level, following = (alphas[n], sigmas[n]), (alphas[n + 1], sigmas[n + 1])
        data = _data(prediction, *level)
        if exploding:
            data = data[0] * level[0], data[1]
            scale, level, following = level[0], (1.0, level[1] / level[0]), (1.0, following[1] / following[0])
        before = (alphas[n - 1], sigmas[n - 1]) if n and (n < steps - 1 or steps >= FEW) else None
        rows.append([*data, *_step(sampler, level, following, before, data), scale if exploding else 1.0])
    rows.append([0.0] * 7 + [1.0])
    clip = getattr(sampler, "clip", None)
    words = ["clipped"] * (clip is not None) + ["second"] * isinstance(sampler, DPM2M) + ["noisy"] * any(row[6] for row in rows) + ["scaled"] * exploding
    start = math.hypot(1.0, sigmas[0] / alphas[0]) if exploding else 1.0
    if exploding and spacing.kind != "leading":
        start = sigmas[0] / alphas[0]
    made = torch.tensor(rows, dtype=torch.float32, device=device), torch.tensor(times, dtype=torch.float32, device=device)
    return Schedule(made[1], made[0], start, " ".join(words), 0.0 if clip is None else float(clip))


def denoise_step(
    x: Tensor,  # [batch, ...]
    output: Tensor,  # [batch, ...], guided [2 batch, ...]
    plan: Schedule,
    step: Tensor,  # int64 [] or [1]
    *,
    guidance: float | None = None,
    history: Tensor | None = None,
    state: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(next sample, predicted data, next model input), each as x, computed in float32. It has no gradient, and says so.

    step       which row of the plan, below plan.steps: a counter on the device, so that a CUDA graph of a step serves all; add 1 to it after each.
    guidance   classifier-free (Ho and Salimans, 2022): `output` holds the outputs without the prompt, then those with it.
    history    the predicted data of the step before; a DPM2M plan needs it (before the first step any tensor like x).
    state      `noise_state(seed)`, for a plan that draws noise; the noise is a function of it, the step and the place.
    The predicted data is `x` itself where the plan has no use for it, and the next model input the next sample where it needs no scale.
    """
    _check(x, output, plan, step, guidance, history, state)
    guidance = None if guidance is None else float(guidance)
    if torch.compiler.is_compiling():
        return torch.ops.onchip.denoise_step(x, output, *plan, step, guidance, history, state, kernel)
    y, data, scaled = _step_forward(x, output, plan, step, guidance, history, state, kernel)
    return y, x if data is None else data, y if scaled is None else scaled


def noise_state(seed: int | None, device: torch.device) -> Tensor:
    """What a plan's noise is drawn from, int64 [2]; seed None: from torch's generator of the device."""
    philox.check("noise_state", 0.0, seed, 0)
    return philox.draw(_device("noise_state", device), seed, 0)


def _device(name: str, given) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: device is {given!r:.60}; give a torch.device or what it is made of, such as 'cuda'") from error


def _check(x: Tensor, output: Tensor, plan: Schedule, step: Tensor, guidance: float | None, history: Tensor | None, state: Tensor | None) -> None:
    if not isinstance(plan, Schedule):
        raise TypeError(f"denoise_step: plan is a {type(plan).__name__}; give what schedule(...) makes")
    optional = ("history", "state")
    check_tensors("denoise_step", optional=optional, x=x, output=output, plan=plan.table, step=step, history=history, state=state)
    refuse_gradients("denoise_step", "give tensors that require none, such as output.detach()", x, output, plan.table, history)
    if guidance is not None:
        check_numbers("denoise_step", guidance=guidance)
    if not x.ndim:
        raise ValueError("denoise_step: x is []; give [batch, ...]")
    if step.numel() != 1 or step.dtype != torch.int64:
        raise ValueError(f"denoise_step: step is {step.dtype} {list(step.shape)}; give int64 [] or [1]")
    if readable(step) and not 0 <= step.item() < plan.steps:
        raise ValueError(f"denoise_step: step is {step.item()}; give 0 to {plan.steps - 1}, a row of the plan")
    shape = x.shape if guidance is None else (2 * len(x), *x.shape[1:])
    if output.shape != shape or not output.is_floating_point():
        with_prompt = ", without and with the prompt" * (guidance is not None)
        raise ValueError(f"denoise_step: output is {output.dtype} {list(output.shape)}; give floats {list(shape)}{with_prompt}")
    if "second" in plan.words and (history is None or history.shape != x.shape or not history.is_floating_point()):
        raise ValueError("denoise_step: a DPM2M plan looks at the step before; give history, what the last call returned second, at first a tensor like x")
    if "noisy" in plan.words and (state is None or state.dtype != torch.int64 or state.shape != (2,)):
        raise ValueError("denoise_step: the plan draws noise; give state=noise_state(seed, device)")


def _step_forward(x, output, plan, step, guidance, history, state, kernel):
    words = " ".join([*plan.words.split(), *["guided"] * (guidance is not None)])
    problem = Rows("denoise", len(x), x.numel() // max(len(x), 1), x.dtype, words)
    history = history if "second" in plan.words else None
    with torch.no_grad():
        return select(problem, x.device, kernel).launch(x, output, plan.table, step, guidance or 0.0, history, state, plan.clip)


def _check_plan(sampler, steps: int, noise: Betas | Flow, prediction: str, spacing: Spacing) -> None:
    if not isinstance(sampler, (DDPM, DDIM, Euler, DPM2M)):
        raise ValueError(f"schedule: sampler is {sampler!r:.60}; give DDPM(), DDIM(), Euler() or DPM2M()")
    if not isinstance(noise, (Betas, Flow)) or not isinstance(spacing, Spacing):
        raise TypeError(f"schedule: noise is {noise!r:.60}, spacing {spacing!r:.60}; give Betas(...) or Flow(...), and Spacing(...)")
    if prediction not in PREDICTIONS:
        raise ValueError(f"schedule: prediction={prediction!r} is not one of {', '.join(PREDICTIONS)}")
    if spacing.kind not in SPACINGS:
        raise ValueError(f"schedule: spacing={spacing.kind!r} is not one of {', '.join(SPACINGS)}")
    check_count("schedule", 1, **{"noise.steps": noise.steps})
    check_count("schedule", 0, **{"spacing.offset": spacing.offset})
    if not is_whole(steps) or not 1 <= steps <= noise.steps:
        raise ValueError(f"schedule: steps={steps!r:.60}; give 1 to {noise.steps}, the steps of training")
    if (clip := getattr(sampler, "clip", None)) is not None:
        check_numbers("schedule", **{"sampler.clip": clip})
        if clip <= 0:
            raise ValueError(f"schedule: sampler.clip is {clip}; give a number above 0, or None")
    if isinstance(sampler, DDIM):
        check_numbers("schedule", 0, **{"sampler.eta": sampler.eta})
        if sampler.eta > 1:
            raise ValueError(f"schedule: sampler.eta is {sampler.eta}; give 0 to 1")
    if isinstance(noise, Flow):
        check_numbers("schedule", **{"noise.shift": noise.shift})
        if not 0 < noise.shift < math.inf:
            raise ValueError(f"schedule: noise.shift is {noise.shift}; give a number above 0")
        return
    check_numbers("schedule", **{"noise.start": noise.start, "noise.end": noise.end})
    if not (0 < noise.start < 1 and 0 < noise.end < 1) or noise.last not in LAST or not isinstance(noise.scaled, bool):
        raise ValueError(f"schedule: noise is {noise}; give a start and an end between 0 and 1, scaled=True or False, and last={' or '.join(map(repr, LAST))}")


# ---- coefficients


def _times(sampler, steps: int, noise: Betas, spacing: Spacing) -> list[float]:
    """Training steps from the last to the first, as diffusers has them; DPM2M leaves out the end of one more."""
    more, last = steps + isinstance(sampler, DPM2M), noise.steps - 1
    if spacing.kind == "linspace":
        found = [last - n * last / max(more - 1, 1) for n in range(steps)]
        return found if isinstance(sampler, Euler) else [float(round(t)) for t in found]
    if spacing.kind == "trailing":
        return [float(round(noise.steps - n * noise.steps / steps) - 1) for n in range(steps)]
    stride = noise.steps // more
    return [float((more - 1 - n) * stride + spacing.offset) for n in range(steps)]


def _levels(noise: Betas, times: Sequence[float]) -> tuple[Sequence[float], list[float], list[float]]:
    """alpha and sigma of each time, and of the end. Between two training steps sigma / alpha is interpolated."""
    power = 0.5 if noise.scaled else 1.0
    betas = torch.linspace(noise.start**power, noise.end**power, noise.steps, dtype=torch.float64, device="cpu") ** (1 / power)
    product = (1 - betas).cumprod(0)
    ratios = ((1 - product) / product).sqrt().tolist()
    found = []
    for t in times:
        below = min(max(int(t), 0), noise.steps - 1)
        above = min(below + 1, noise.steps - 1)
        found.append(ratios[below] + (t - below) * (ratios[above] - ratios[below]))
    found.append(ratios[0] if noise.last == "first" else 0.0)
    alphas = [1 / math.hypot(1.0, ratio) for ratio in found]
    return times, alphas, [ratio * alpha for ratio, alpha in zip(found, alphas, strict=True)]


def _flow_levels(noise: Flow, steps: int, past_noise: bool) -> tuple[list[float], list[float], list[float]]:
    """As diffusers has them: between the two ends after their shift, then shifted; `past_noise`: from one training step after pure noise on."""
    if past_noise:  # where alpha is 0 its logarithm is infinite
        even = [(1 - 1 / noise.steps) * (1 - n / steps) for n in range(steps)]
    else:
        last = _shifted(1 / noise.steps, noise.shift)
        even = [1 - n * (1 - last) / max(steps - 1, 1) for n in range(steps)]
    sigmas = [_shifted(s, noise.shift) for s in even] + [0.0]
    times = [noise.steps * s for s in sigmas[:-1]]
    return [float(int(t)) for t in times] if past_noise else times, [1 - s for s in sigmas], sigmas


def _shifted(s: float, shift: float) -> float:
    return shift * s / (1 + (shift - 1) * s)


def _data(prediction: str, alpha: float, sigma: float) -> tuple[float, float]:
    """The data as c0 x + c1 output."""
    return {"epsilon": (1 / max(alpha, 1e-30), -sigma / max(alpha, 1e-30)), "v": (alpha, -sigma), "sample": (0.0, 1.0), "flow": (1.0, -sigma)}[prediction]


def _step(sampler, level: tuple, following: tuple, before: tuple | None, data: tuple) -> list[float]:
    """Coefficients of x, the output, the data, the data of the step before (`before` None: not looked at), and the noise."""
    (alpha, sigma), (alpha_to, sigma_to) = level, following
    if isinstance(sampler, DDPM):  # the posterior's mean and variance
        kept = (alpha / alpha_to) ** 2
        variance = (sigma_to / sigma) ** 2 * (1 - kept)
        return [math.sqrt(kept) * (sigma_to / sigma) ** 2, 0.0, alpha_to * (1 - kept) / sigma**2, 0.0, math.sqrt(variance)]
    if isinstance(sampler, DPM2M):
        shrink = _shrink(level, following)
        half = 0.0
        if before is not None and sigma_to > 0:
            half = 0.5 * math.log(_odds(following) / _odds(level)) / math.log(_odds(level) / _odds(before))
        weight = alpha_to * (1 - shrink)
        return [sigma_to / sigma, 0.0, weight * (1 + half), -weight * half, 0.0]
    eta = sampler.eta if isinstance(sampler, DDIM) else 0.0
    noise = eta * sigma_to / sigma * math.sqrt(max(0.0, 1 - (alpha / alpha_to) ** 2))
    along = math.sqrt(max(0.0, sigma_to**2 - noise**2)) / sigma  # the noise that was predicted is (x - alpha data) / sigma, of data not cut off
    return [along * (1 - alpha * data[0]), -along * alpha * data[1], alpha_to, 0.0, noise]


def _odds(level: tuple) -> float:
    return level[0] / level[1]


def _shrink(level: tuple, following: tuple) -> float:
    """exp(-h), h the step in log(alpha / sigma)."""
    return level[0] * following[1] / (level[1] * following[0])


# ---- in compiled graphs


@torch.library.custom_op("onchip::denoise_step", mutates_args=())
def _compiled(
    x: Tensor, output: Tensor, timesteps: Tensor, table: Tensor, start: float, words: str, clip: float, step: Tensor,
    guidance: float | None, history: Tensor | None, state: Tensor | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y, data, scaled = _step_forward(x, output, Schedule(timesteps, table, start, words, clip), step, guidance, history, state, kernel)
    return y, x.clone() if data is None else data, y.clone() if scaled is None else scaled


@_compiled.register_fake
def _(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape)


__all__ = ["DDIM", "DDPM", "DPM2M", "Betas", "Euler", "Flow", "Schedule", "Spacing", "denoise_step", "noise_state", "schedule"]
