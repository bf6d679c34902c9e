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

BLOCK, WARPS = 1024, 2
COLUMNS = tl.constexpr(8)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)

# ---- device


@triton.jit
def _radius(u, FAST: tl.constexpr):
    """sqrt(-2 log(u)). FAST: by the GPU's own instructions, log2 within 2^-22; accurate ones take twenty for each number."""
    if FAST:
        code: tl.constexpr = "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; mul.f32 t, t, 0fBFB17218; max.f32 t, t, 0f00000000; sqrt.approx.ftz.f32 $0, t; }"
        return tl.inline_asm_elementwise(code, "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    return tl.sqrt(-1.3862943611198906 * tl.log2(u))


@triton.jit
def _normal(first, second, FAST: tl.constexpr):
    """Two normal numbers of two words (Box and Muller, 1958), as `core/philox.normal` makes them.

    The angle is a whole number of 2^-24 turns, so that its eighth of a turn is exact; in that, polynomials are good to 1e-7. A cosine of any angle takes
    local memory, and with it an element had 137 instructions. FAST: the GPU's own, within 2^-20.9 up to half a turn.
    """
    u = ((first >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    radius = _radius(u, FAST)
    if FAST:
        angle = (second.to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 3.7450702829238413e-07  # 2 pi / 2^24
        cosine = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
        return radius * cosine, radius * tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    turn = (second >> 8).to(tl.int32)
    quarter = (turn + (1 << 21)) >> 22
    x = (turn - (quarter << 22)).to(tl.float32) * 3.7450702829238413e-07  # 2 pi / 2^24
    square = x * x
    sine = x + x * square * ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1)
    cosine = 1 - 0.5 * square + square * square * ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2)
    odd = (quarter & 1) == 1
    a, b = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    a = tl.where(((quarter + 1) & 2) == 0, a, -a)
    return radius * a, radius * tl.where((quarter & 2) == 0, b, -b)


@triton.jit
def _words(seed, group, third, offset):
    """The four words of Philox as `core/philox.words` has them. `tl.philox` takes two instructions for the halves of a product."""
    a, b = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    c, d = tl.zeros_like(a) + third.to(tl.uint32), tl.zeros_like(a) + offset.to(tl.uint32)
    low_key, high_key = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32 & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        first, second = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b, c, d = (second >> 32).to(tl.uint32) ^ b ^ low_key, second.to(tl.uint32), (first >> 32).to(tl.uint32) ^ d ^ high_key, first.to(tl.uint32)
        low_key, high_key = low_key + 0x9E3779B9, high_key + 0xBB67AE85
    return a, b, c, d


@triton.jit
def _noise(state_ptr, step, first, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """A thread makes 8 numbers side by side, which lie as it loads them."""
    seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
    group = first // 4 + 2 * tl.arange(0, BLOCK // 8)
    pairs = ()
    for n in tl.static_range(2):
        a, b, c, d = _words(seed, group + n, step, offset)
        x, y = _normal(a, b, FAST)
        z, w = _normal(c, d, FAST)
        pairs += ((x, y, z, w),)
    low, high = pairs
    even = tl.join(tl.join(low[0], high[0]), tl.join(low[2], high[2]))
    odd = tl.join(tl.join(low[1], high[1]), tl.join(low[3], high[3]))
    return tl.join(even, odd).reshape(BLOCK)


@triton.jit
def _denoise(x_ptr, output_ptr, history_ptr, y_ptr, data_ptr, input_ptr, table_ptr, step_ptr, state_ptr, elements, guidance, clip,
             GUIDED: tl.constexpr, CLIPPED: tl.constexpr, NOISY: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
        y += tl.load(row + 6) * _noise(state_ptr, step, first, FAST, BLOCK)
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
    fast = x.is_cuda and torch.version.hip is None and x.dtype != torch.float32
    if x.numel():
        _denoise[(triton.cdiv(x.numel(), BLOCK),)](
            x.contiguous(), output.contiguous(), history, y, data, scaled, table, step, state, x.numel(), guidance, clip,
            GUIDED="guided" in words, CLIPPED="clipped" in words, NOISY="noisy" in words, FAST=fast, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return y, data, scaled
