"""Weights of a softcap's scores on Hopper, exp(cap tanh(scale s)) over a constant: scores have a bound, so nobody looks for a maximum."""

import math

import torch

from onchip.core.problem import Attention
from onchip.kernels.attention.texts import is_tanh
from onchip.kernels.hopper import as_pairs, gl, gluon

# Of tanh(x) / x up to REACH, in powers of x^2 - REACH^2: to 2^-11.3, where the instruction errs by 2^-11.
REACH, NEAR = gl.constexpr(0.4), gl.constexpr((0.949494096, -0.313172482))


def _near(n: int) -> tuple[str, str]:
    """PTX: of n scores s the weights exp2(gain tanh(scale s) + rest), in place, where |scale s| < REACH; of a thread where it is not one is infinite.

    A polynomial of degree 3 runs beside the exponentials: these take the special function units 8 cycles for a warp's of one score, and tanh takes as many.
    Operands: scores, -REACH^2 / scale^2, the polynomial's factors, rest.
    """
    near, *k, rest = (f"${n + n * x}" for x in range(1, 5))
    code = "mov.b32 a, 0xffffffff; mov.b32 v, " + near + ";"
    for i in range(n):
        code += f"fma.rn.f32 v, ${i}, ${i}, {near}; and.b32 a, a, v;"  # below 0, and so is not NaN
        code += f"fma.rn.f32 v, v, {k[1]}, {k[0]}; fma.rn.f32 v, v, ${i}, {rest}; ex2.approx.ftz.f32 ${i}, v;"
    code = f"{{ .reg .pred p; .reg .b32 a, v; {code} setp.lt.s32 p, a, 0; selp.b32 ${n - 1}, ${n - 1}, 0x7f800000, p; }}"
    return code, ",".join(["=f"] * n + [str(x) for x in range(n)] + ["f"] * (4 * n))


CAPPED, CAPPED_OPERANDS = (gl.constexpr({n: _near(n)[i] for n in (32, 64)}) for i in (0, 1))


# ---- device


@gluon.jit
def weigh_near(scores, scale, gain, DTYPE: gl.constexpr, C: gl.constexpr):
    """`weigh` of gain tanh(scale scores) over C.cap, scores as the product left them; where one is not small, a sum is infinite. See `_near`."""
    N: gl.constexpr = C.n
    CODE: gl.constexpr = CAPPED[N // 2]
    OPERANDS: gl.constexpr = CAPPED_OPERANDS[N // 2]
    k = scale * gain
    given = [scores, -REACH * REACH / (scale * scale), NEAR[0] * k, NEAR[1] * (k * scale * scale), -1.0 * C.cap]
    weights = gl.inline_asm_elementwise(CODE, OPERANDS, given, dtype=gl.float32, is_pure=True, pack=N // 2)
    return as_pairs(weights, DTYPE), gl.sum(weights.reshape([64, N // 8, 8]), 1)


# ---- host


def cap_of(p: Attention, scale: float, gain: float) -> int:
    """What weights exp2(gain log2(e) tanh(scale s)) are taken over where nobody looks for a maximum, a whole number of powers of 2, or 0: there has to be one.

    Those of bfloat16 and their sums hold 2^-110 to 2^127. A cap of 30 is 2^43.3: over 2^44 no weight is above 1 and none below 2^-88. One of 50, 2^72.2,
    goes over 2^37: weights of up to 2^36, with values of up to 2^74. Up to 55, and where the polynomial's factors, scale^3 among them, are numbers.
    Not at 256, where products hide most of a tanh: 1.06 times plain either way, and 1.18 instead of 1.06 where scores are large.
    """
    most = math.ceil(gain * math.log2(math.e))
    softcap = p.score is not None and is_tanh(p.score.text) and max(p.dim, p.value_dim) <= 128 and p.dtype == torch.bfloat16
    return min(most, 110 - most) if softcap and most <= 80 and 1e-4 < scale < 1e4 else 0
