"""Weights of a softcap's scores on Hopper, exp(cap tanh(scale s)) over a constant: scores have a bound, so nobody looks for a maximum."""

import math

import torch

from onchip.core.problem import Attention
from onchip.kernels.attention.hopper_tiles import scored, weigh
from onchip.kernels.attention.texts import is_tanh
from onchip.kernels.hopper import as_pairs, fence_async_shared, gl, gluon

# Of tanh(x) / x up to REACH, in powers of x^2: to 2^-11.3, where the instruction errs by 2^-11.
REACH, NEAR = gl.constexpr(0.4), gl.constexpr((0.999601624, -0.313172482))


def _near(n: int) -> tuple[str, str]:
    """PTX: of n scores s the weights exp2(s (k[0] + k[1] min(s^2, 1)) + rest), in place. Operands: scores, k, rest.

    Three instructions where a weight without a cap takes one, beside the exponentials: these take the special function units 8 cycles for a warp's of one
    score, and tanh takes as many. The square's bound costs none, and with it the exponent rises all the way (`scaled`), so that sums show what `strayed`.
    """
    a, b, rest = (f"${n * x}" for x in range(2, 5))
    code = "".join(f"mul.rn.sat.f32 v, ${i}, ${i}; fma.rn.f32 v, v, {b}, {a}; fma.rn.f32 v, v, ${i}, {rest}; ex2.approx.ftz.f32 ${i}, v;" for i in range(n))
    return f"{{ .reg .b32 v; {code} }}", ",".join(["=f"] * n + [str(x) for x in range(n)] + ["f"] * (3 * n))


CAPPED, CAPPED_OPERANDS = (gl.constexpr({n: _near(n)[i] for n in (32, 64)}) for i in (0, 1))


# ---- device


@gluon.jit
def fold(q, C: gl.constexpr):
    """A softcap's queries times a power of two, in place: see `scaled`."""
    if C.cap > 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        q.store((q.load(layout).to(gl.float32) * 2.0**C.fold).to(q.dtype))
        fence_async_shared()
    return q


@gluon.jit
def weigh_near(scores, scale, gain, DTYPE: gl.constexpr, C: gl.constexpr):
    """`weigh` of gain tanh(scale scores) over C.cap, scores as the product left them, where they are small. See `_near`."""
    N: gl.constexpr = C.n
    CODE: gl.constexpr = CAPPED[N // 2]
    OPERANDS: gl.constexpr = CAPPED_OPERANDS[N // 2]
    k = scale * gain
    given = [scores, NEAR[0] * k, NEAR[1] * (k * scale * scale), -1.0 * C.cap]
    weights = gl.inline_asm_elementwise(CODE, OPERANDS, given, dtype=gl.float32, is_pure=True, pack=N // 2)
    return as_pairs(weights, DTYPE), gl.sum(weights.reshape([64, N // 8, 8]), 1)


@gluon.jit
def strayed(sums, gain, alarms, C: gl.constexpr):
    """Whether one of `weigh_near`'s sums [64, 8] may hold a score beyond REACH: in any of a warpgroup's four warps.

    One above it is a weight that no sum may hold. Those below -REACH are weights made too small: by 2^-9 of what a sum is to hold, at most (2^-7 at a cap of
    10). Bits compare as their numbers do, NaN above all; less the least's and 2^31 (one instruction with a maximum) what is below it is above all too.
    """
    edge = REACH * (NEAR[0] + NEAR[1] * REACH * REACH) * gain
    low = gl.exp2(6.0 - edge - C.cap).to(gl.int32, bitcast=True) + (-2147483648)
    high = gl.exp2(gl.maximum(edge, 6.0 - edge) - C.cap).to(gl.int32, bitcast=True)
    over = gl.max((sums.to(gl.int32, bitcast=True) - low).reshape([4, 2, 64]), 1)  # as in `outgrown`
    alarms.store(gl.max(over, 1))
    return gl.max(alarms.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > high - low


@gluon.jit
def weigh_capped(scores, top, n, call, of, tile, alarms, SCORE: gl.constexpr, DTYPE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """`weigh` of scores as the product left them, and whether one of them was not small."""
    words, sums = weigh_near(scores, call[6], call[7], DTYPE, C)
    far = strayed(sums, call[7], alarms, C)
    if far:
        words, sums = weigh(scored(scores, n, call, of, tile, SCORE, C, layout), top, call[7], DTYPE, C)
    return words, sums, far


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


def scaled(scale: float, cap: int) -> tuple[int, float]:
    """The power of two that queries are multiplied by, exactly, and the scale of their scores: of one of 1, where `_near`'s square ends, tanh is taken between
    0.5 and 1."""
    power = math.frexp(scale)[1] if cap else 0
    return power, scale * 2.0**-power
