"""Denoising steps: each kernel against float64, and whole loops against diffusers' schedulers."""

import pytest
import torch

from judge import assert_as_good_as_torch
from onchip.core import philox
from onchip.dispatch import record
from onchip.kernels.fused import DENOISE
from onchip.ops.diffusion import DDIM, DDPM, DPM2M, Betas, Euler, Flow, Spacing, denoise_step, noise_state, schedule

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in DENOISE.kernels]
PLANS = {
    "ddpm": (DDPM(clip=1.0), {"prediction": "epsilon"}),
    "ddim": (DDIM(eta=0.5), {"prediction": "v"}),
    "euler": (Euler(), {"prediction": "epsilon"}),
    "flow": (Euler(), {"prediction": "flow", "noise": Flow(3.0)}),
    "dpm": (DPM2M(), {"prediction": "sample"}),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_against_float64(name, dtype, kernel, device):
    sampler, how = PLANS[name]
    plan = schedule(sampler, 9, device=device, **how)
    state, step = noise_state(7, device), torch.tensor([4], device=device)
    x, history = (torch.randn(3, 4, 5, 31, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    output = torch.randn(6, 5, 4, 31, device=device).to(dtype)
    with record() as decisions:
        ours = denoise_step(x, output, plan, step, guidance=5.0, history=history, state=state, kernel=kernel)
    assert decisions[0].kernel.name == kernel
    truth, low = (by_hand(plan, x, output, 5.0, history, state, of) for of in (torch.float64, dtype))
    for result, t, right in zip(ours, low, truth, strict=True):
        if right is not None:
            assert_as_good_as_torch(result, t, right)
    assert (ours[1] is x) == ("second" not in plan.words) and (ours[2] is ours[0]) == ("scaled" not in plan.words)


def by_hand(plan, x, output, guidance, history, state, dtype):
    row = plan.table[4].to(dtype)
    x, output, history = x.to(dtype), output.to(dtype), history.to(dtype)
    without, given = output.chunk(2)
    out = without + guidance * (given - without)
    data = row[0] * x + row[1] * out
    data = data.clamp(-plan.clip, plan.clip) if "clipped" in plan.words else data
    y = row[2] * x + row[3] * out + row[4] * data + row[5] * history
    if "noisy" in plan.words:
        y = y + row[6] * philox.normal(state, x.numel(), torch.tensor(4, device=x.device)).view(x.shape).to(dtype)
    return y, data if "second" in plan.words else None, y * plan.table[5, 7].to(dtype) if "scaled" in plan.words else None


@pytest.mark.parametrize("kernel", [pytest.param("triton_denoise", marks=[pytest.mark.gpu, pytest.mark.large])])
def test_large(kernel, device):
    """Elements past 2^31."""
    plan, step = schedule(Euler(), 9, device=device), torch.tensor(4, device=device)
    x = torch.randn(33, 64, 1024, 1024, device=device, dtype=BF16)
    y, _, scaled = denoise_step(x, x, plan, step, kernel=kernel)
    some = slice(-1, None)
    right = denoise_step(x[some].double(), x[some].double(), plan, step, kernel="reference")
    assert_as_good_as_torch(y[some], right[0].to(BF16), right[0])
    assert_as_good_as_torch(scaled[some], right[2].to(BF16), right[2])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("name", PLANS)
def test_a_graph_of_one_step_serves_all(name, device):
    """The counter is on the device: the same graph, replayed, makes the whole loop."""
    sampler, how = PLANS[name]
    plan, state = schedule(sampler, 6, device=device, **how), noise_state(7, device)
    first, step = torch.randn(2, 4, 5, 31, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def go(x, history, fed):
        found = denoise_step(x, torch.sin(fed), plan, step, history=history, state=state)
        step.add_(1)
        return found

    eager = first, first, plan.first_input(first)
    for _ in range(plan.steps):
        eager = go(*eager)
    held = [t.clone() for t in (first, first, plan.first_input(first))]
    graph = torch.cuda.CUDAGraph()
    step.zero_()
    with torch.cuda.graph(graph):
        for kept, new in zip(held, go(*held), strict=True):
            kept.copy_(new)
    for _ in range(plan.steps):
        graph.replay()
    assert torch.equal(held[0], eager[0]) and step.item() == plan.steps


# ---- beside diffusers

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LINEAR = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
LOOPS = {
    "ddim": ("DDIMScheduler", DDIM(), SD | {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False}, Betas(last="first"), Spacing("leading", 1)),
    "ddim clipped": ("DDIMScheduler", DDIM(clip=1.0), LINEAR | {"clip_sample": True}, Betas(1e-4, 0.02, False), Spacing()),
    "ddim eta": (
        "DDIMScheduler",
        DDIM(0.6),
        SD | {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False},
        Betas(last="first"),
        Spacing("leading", 1),
    ),
    "ddim eta clipped": ("DDIMScheduler", DDIM(1.0, 1.0), LINEAR | {"clip_sample": True}, Betas(1e-4, 0.02, False), Spacing()),
    "ddim eta v": ("DDIMScheduler", DDIM(0.3), SD | {"clip_sample": False, "timestep_spacing": "trailing"}, Betas(), Spacing("trailing")),
    "ddim v": ("DDIMScheduler", DDIM(), SD | {"clip_sample": False, "timestep_spacing": "trailing"}, Betas(), Spacing("trailing")),
    "ddpm": ("DDPMScheduler", DDPM(clip=1.0), LINEAR, Betas(1e-4, 0.02, False), Spacing()),
    "ddpm sample": ("DDPMScheduler", DDPM(), LINEAR | {"clip_sample": False}, Betas(1e-4, 0.02, False), Spacing()),
    "euler": ("EulerDiscreteScheduler", Euler(), SD | {"timestep_spacing": "leading", "steps_offset": 1}, Betas(), Spacing("leading", 1)),
    "euler v": ("EulerDiscreteScheduler", Euler(), SD | {"timestep_spacing": "linspace"}, Betas(), Spacing("linspace")),
    "euler flow": ("FlowMatchEulerDiscreteScheduler", Euler(), {"shift": 3.0}, Flow(3.0), Spacing()),
    "dpm": ("DPMSolverMultistepScheduler", DPM2M(), SD | {"timestep_spacing": "linspace"}, Betas(), Spacing("linspace")),
    "dpm v": ("DPMSolverMultistepScheduler", DPM2M(), SD | {"timestep_spacing": "leading", "steps_offset": 1}, Betas(), Spacing("leading", 1)),
    "dpm sample": ("DPMSolverMultistepScheduler", DPM2M(), SD | {"timestep_spacing": "trailing"}, Betas(), Spacing("trailing")),
    "dpm few": (
        "DPMSolverMultistepScheduler",
        DPM2M(),
        SD | {"timestep_spacing": "linspace", "final_sigmas_type": "sigma_min"},
        Betas(last="first"),
        Spacing("linspace"),
    ),
    "dpm flow": (
        "DPMSolverMultistepScheduler",
        DPM2M(),
        {"use_flow_sigmas": True, "flow_shift": 2.0, "prediction_type": "flow_prediction"},
        Flow(2.0),
        Spacing(),
    ),
}
THEIR = {"v": "v_prediction", "sample": "sample", "flow": "flow_prediction"}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_as_diffusers_makes_it(name, device, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    class_name, sampler, config, noise, spacing = LOOPS[name]
    prediction = {"v": "v", "sample": "sample", "flow": "flow"}.get(name.split()[-1], "epsilon")
    if prediction in THEIR and name != "euler flow":  # whose scheduler knows of no other
        config = config | {"prediction_type": THEIR[prediction]}
    steps = 9 if name.endswith("few") else 20
    theirs = getattr(diffusers, class_name)(**config)
    theirs.set_timesteps(steps)
    plan = schedule(sampler, steps, noise=noise, prediction=prediction, spacing=spacing, device=device)
    torch.testing.assert_close(plan.timesteps.cpu(), theirs.timesteps.float(), rtol=1e-5, atol=1e-3)
    state, step = noise_state(3, device), torch.zeros(1, dtype=torch.int64, device=device)
    noises = iter(range(steps))
    drawn = lambda shape, **_: philox.normal(state, shape.numel(), torch.tensor(next(noises))).view(shape).cpu()  # noqa: E731
    for module in ("ddpm", "ddim"):
        monkeypatch.setattr(f"diffusers.schedulers.scheduling_{module}.randn_tensor", drawn)

    def model(x, t):
        return torch.sin(2 * x + t / 300).to(x.dtype)

    assert plan.start == pytest.approx(float(getattr(theirs, "init_noise_sigma", 1.0)), rel=1e-4)
    first = torch.randn(2, 4, 5, 3) * plan.start
    x, history = first.to(device), torch.full_like(first, torch.nan, device=device)
    fed = plan.first_input(x)
    for n in range(steps):
        x, history, fed = denoise_step(x, model(fed, plan.timesteps[n]), plan, step, history=history, state=state)
        step += 1
    y = first
    for t in theirs.timesteps:
        scaled = theirs.scale_model_input(y, t) if hasattr(theirs, "scale_model_input") else y
        y = theirs.step(model(scaled, t), t, y, **({"eta": sampler.eta} if isinstance(sampler, DDIM) else {})).prev_sample
    torch.testing.assert_close(x.cpu(), y, rtol=2e-3, atol=2e-3)


def test_wrong_arguments(device):
    plan, x, step = schedule(DPM2M(), 5, device=device), torch.zeros(2, 3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    noisy = schedule(DDPM(), 5, device=device)
    for call, message in (
        (lambda: schedule(Euler, 5), r"sampler is <class .*Euler'>; give DDPM\(\), DDIM\(\), Euler\(\) or DPM2M\(\)"),
        (lambda: schedule(DDIM(), 5, prediction="x0"), "prediction='x0'"),
        (lambda: schedule(DDIM(), 5, spacing=Spacing("karras")), "spacing='karras'"),
        (lambda: schedule(DDIM(), 0), "steps=0; give 1 to 1000"),
        (lambda: schedule(DPM2M(), 1000), r"1000 steps of Spacing\(kind='leading', offset=0\) are training steps 0 to 0, some twice, of 0 to 999"),
        (lambda: schedule(DPM2M(), 1000, spacing=Spacing("linspace")), "some twice, of 0 to 999; give fewer, or another offset"),
        (lambda: schedule(DDIM(), 1000, spacing=Spacing(offset=1)), "are training steps 1000 to 1, of 0 to 999; give fewer, or another offset"),
        (lambda: denoise_step(x, x, plan, torch.zeros(2, device=device), history=x), r"step is torch.float32 \[2\]; give int64 \[\] or \[1\]"),
        (lambda: schedule(DDPM(), 5, noise=Flow(), prediction="flow"), "a Flow goes with 'flow' and with Euler or DPM2M"),
        (lambda: denoise_step(x, x[:1], plan, step, history=x), r"output is torch.float32 \[1, 3\]; give floats \[2, 3\]"),
        (lambda: denoise_step(x, x, plan, step, guidance=2.0, history=x), r"give floats \[4, 3\], without and with the prompt"),
        (lambda: denoise_step(x, x, plan, step), "give history"),
        (lambda: denoise_step(x, x, noisy, step), "give state=noise_state"),
        (lambda: denoise_step(x, x, noisy, step, state=x[0, :2]), "give state=noise_state"),
        (lambda: denoise_step(x, x.long(), plan, step, history=x), r"output is torch.int64 \[2, 3\]; give floats \[2, 3\]"),
        (lambda: denoise_step(x[0, 0], x[0, 0], plan, step, history=x), r"x is \[\]; give \[batch, ...\]"),
        *((lambda at=at: denoise_step(*(torch.zeros(2, 3),) * 2, schedule(DDIM(), 5), torch.tensor(at)), f"step is {at}; give 0 to 4") for at in (-1, 5)),
        (lambda: schedule(DDIM(), 10.5), "steps=10.5; give 1 to 1000"),
        (lambda: schedule(DDIM(eta=1.5), 5), "sampler.eta is 1.5; give 0 to 1"),
        (lambda: schedule(DDIM(eta=-1), 5), "sampler.eta is -1; give 0 or more"),
        (lambda: schedule(DDPM(clip=-1), 5), "sampler.clip is -1; give a number above 0, or None"),
        (lambda: schedule(DDIM(), 5, noise=Betas(last="First")), r"last='First'.*give a start and an end between 0 and 1, .* last='zero' or 'first'"),
        (lambda: schedule(DDIM(), 5, noise=Betas(start=2.0)), r"noise is Betas\(start=2.0"),
        (lambda: schedule(DDIM(), 5, noise=Betas(steps=1e3)), "noise.steps is 1000.0; give a whole number, 1 or more"),
        (lambda: schedule(Euler(), 5, noise=Flow(shift=0.0), prediction="flow"), "noise.shift is 0.0; give a number above 0"),
        (lambda: schedule(DDIM(), 5, spacing=Spacing(offset=0.5)), "spacing.offset is 0.5; give a whole number, 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: schedule(DDIM(), 5, noise=None), r"noise is None, .*give Betas\(...\) or Flow\(...\), and Spacing\(...\)"),
        (lambda: schedule(DDIM(), 5, spacing="leading"), "spacing 'leading'; give"),
        (lambda: denoise_step(x, x, plan.table, step, history=x), r"plan is a Tensor; give what schedule\(...\) makes"),
        (lambda: denoise_step(x, x.repeat(2, 1), plan, step, guidance="a", history=x), "guidance is 'a'; give a number"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
