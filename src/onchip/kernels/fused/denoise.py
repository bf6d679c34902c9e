"""One step of a sampler of diffusion models, with guidance before it and noise after it, in one pass.

    o = u + guidance (c - u)                    of the outputs without and with the prompt
    d = c0 x + c1 o                             the data that it predicts, cut off at +-clip where that is asked
    y = c2 x + c3 o + c4 d + c5 d' + c6 z       d' of the step before (DPM-Solver++ 2M), z normal noise
    next model input = y c7(next step)

The row of coefficients is found by a step number on the device. A program takes BLOCK elements; each tensor is read or written once.
Noise is Philox of (seed, offset, step, place), four numbers a call.
"""

import torch
import triton
import triton.language as tl

from onchip.core.philox import ROUNDS
from onchip.core.problem import Rows

BLOCK, WARPS = 1024, 4
COLUMNS = tl.constexpr(8)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)

# ---- device


@triton.jit
def _normal(first, second):
    """Two normal numbers of two words (Box and Muller, 1958), as `core/philox.normal` makes them."""
    u = ((first >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    radius = tl.sqrt_rn(-2 * tl.log(u))
    angle = (second >> 8).to(tl.int32).to(tl.float32) * 3.7450702829238413e-07  # 2 pi / 2^24
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _noise(state_ptr, step, first, BLOCK: tl.constexpr):
    group = first // 4 + tl.arange(0, BLOCK // 4)
    offset = tl.load(state_ptr + 1).to(tl.int32)
    third = tl.full([BLOCK // 4], 0, tl.int32) + step.to(tl.int32)
    a, b, c, d = tl.philox(tl.load(state_ptr), group.to(tl.int32), (group >> 32).to(tl.int32), third, offset, PHILOX_ROUNDS)
    x, y = _normal(a, b)
    z, w = _normal(c, d)
    return tl.join(tl.join(x, z), tl.join(y, w)).reshape(BLOCK)


@triton.jit
def _denoise(x_ptr, output_ptr, history_ptr, y_ptr, data_ptr, input_ptr, table_ptr, step_ptr, state_ptr, elements, guidance, clip,
             GUIDED: tl.constexpr, CLIPPED: tl.constexpr, NOISY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside, step = at < elements, tl.load(step_ptr).to(tl.int64)
    row = table_ptr + step * COLUMNS
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(output_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        given = tl.load(output_ptr + elements + at, mask=inside, other=0.0).to(tl.float32)
        o += guidance * (given - o)
    d = tl.load(row) * x + tl.load(row + 1) * o
    if CLIPPED:
        d = tl.where(d > clip, clip, tl.where(d < -clip, -clip, d))
    y = tl.load(row + 2) * x + tl.load(row + 3) * o + tl.load(row + 4) * d
    if history_ptr is not None:
        of_history = tl.load(row + 5)
        before = tl.load(history_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y += tl.where(of_history == 0.0, 0.0, of_history * before)  # before the first step it holds anything
        tl.store(data_ptr + at, d.to(data_ptr.dtype.element_ty), mask=inside)
    if NOISY:
        y += tl.load(row + 6) * _noise(state_ptr, step, first, BLOCK)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    if input_ptr is not None:
        tl.store(input_ptr + at, (y * tl.load(row + COLUMNS + 7)).to(input_ptr.dtype.element_ty), mask=inside)


# ---- host


def launch(
    problem: Rows,
    config: None,
    x: torch.Tensor,  # [...]
    output: torch.Tensor,  # as x, or twice as long in the first dimension
    table: torch.Tensor,  # float32 [steps + 1, 8]
    step: torch.Tensor,  # int64 [] or [1]
    guidance: float,
    history: torch.Tensor | None,
    state: torch.Tensor | None,  # int64 [2]
    clip: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The next sample, the predicted data where there is a history, and the next model input where it is scaled."""
    words = problem.variant.split()
    y, data, scaled = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if made else None for made in (True, history is not None, "scaled" in words))
    history = None if history is None else history.contiguous()
    if x.numel():
        _denoise[(triton.cdiv(x.numel(), BLOCK),)](
            x.contiguous(), output.contiguous(), history, y, data, scaled, table, step, state, x.numel(), guidance, clip,
            GUIDED="guided" in words, CLIPPED="clipped" in words, NOISY="noisy" in words, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return y, data, scaled
