"""Functions of a number that kernels share: tanh, sigmoid, activations and their slopes.

float32 to a few ulp; QUICK, for what is rounded to half precision, to 2^-18 of a result or of 1: no quotient, whose exact form is a branch and whose plain
form takes six instructions, and erf in 9 instructions instead of 31. An H200 has 27 instructions for each of 4 bytes at the speed of memory.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """To 1.6 ulp: near 0 a polynomial, as 1 - 2 / (1 + exp(2 x)) cancels there."""
    square = x * x
    near = (((-0.005905854981392622 * square + 0.020805373787879944) * square - 0.05378668010234833) * square + 0.13331958651542664) * square
    far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(x) * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.6, x + x * square * (near - 0.33333298563957214), tl.where(x < 0.0, -far, far))


@triton.jit
def quotient(x, y, QUICK: tl.constexpr):
    """x / y, y at least 1."""
    if QUICK:  # two multiplications and the instruction, which is good to 2^-22
        root = tl.rsqrt(y)
        return x * (root * root)
    return tl.math.div_rn(x, y)  # the plain quotient may be two ulps off


@triton.jit
def exp(x, QUICK: tl.constexpr):
    return tl.exp2(x * 1.4426950408889634) if QUICK else tl.exp(x)  # exp keeps what is below 1e-38: three more instructions


@triton.jit
def held(x, low, high):
    """x from `low` to `high`; NaN stays."""
    return tl.minimum(tl.maximum(x, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x, QUICK: tl.constexpr = False):
    return quotient(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x, QUICK), QUICK)


@triton.jit
def sigmoids(x, QUICK: tl.constexpr = False):
    """sigmoid(x) and sigmoid(-x), which as a difference to 1 would lose its digits."""
    if QUICK:
        s = sigmoid(x, True)
        return s, 1 - s
    e = tl.exp(-tl.where(x < -80, -80.0, x))  # below, it is 1e-35
    s = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1 + e)
    return s, e * s


@triton.jit
def beyond(x):
    """The share of normal numbers above x >= 0, good to 3.4e-6 of it up to 5, from where on its logarithm goes down as a polynomial does."""
    log = ((-1.6016304e-06 * x + 5.7843463e-05) * x - 0.0009071228) * x + 0.008436878
    return tl.exp2((((log * x - 0.05385194) * x - 0.4585406) * x - 1.1512316) * x - 0.99999607)


@triton.jit
def normal(x, QUICK: tl.constexpr):
    """The share of normal numbers below x."""
    if QUICK:
        far = beyond(tl.abs(x))
        return tl.where(x > 0, 1 - far, far)
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def cubic(x):
    """(1 + tanh(u)) / 2 is sigmoid(2 u): 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x * (1.5957691216057308 + 0.07135481282553508 * x * x)


@triton.jit
def activated(x, ACT: tl.constexpr, alpha=1.0, QUICK: tl.constexpr = False):
    """The activation of x: "" for none, relu, relu2, gelu, mish, silu, gelu_tanh, or "clipped", `x sigmoid(alpha x)`."""
    if ACT == "":
        return x
    if ACT == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays
    if ACT == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive  # times x, -infinity would be NaN
    if ACT == "gelu":
        if QUICK:
            far = tl.minimum(tl.abs(x), 16.0, tl.PropagateNan.ALL)  # where nothing is left beyond: infinity times 0 would be NaN
            return tl.maximum(x, 0.0) - far * beyond(far)
        return x * normal(x, False)
    if ACT == "mish":  # tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2); from 20 on it is 1
        e = exp(tl.where(x > 20, 20.0, x), QUICK)
        n = e * (e + 2)
        return x * quotient(n, n + 2, QUICK)
    z = x if ACT == "silu" else (alpha * x if ACT == "clipped" else cubic(held(x, -12.0, 12.0)))
    return quotient(x, 1 + exp(-z, QUICK), QUICK)


@triton.jit
def slope(x, ACT: tl.constexpr, alpha=1.0, QUICK: tl.constexpr = False):
    """Its derivative."""
    if ACT == "":
        return tl.full(x.shape, 1.0, tl.float32)
    if ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    if ACT == "relu2":
        return 2 * tl.where(x < 0, 0.0, x)
    if ACT == "gelu":
        return normal(x, QUICK) + x * exp(-0.5 * x * x, QUICK) * 0.3989422804014327
    if ACT == "mish":  # t + x (1 - t^2) sigmoid, without a difference
        e = exp(tl.where(x > 20, 20.0, x), QUICK)
        n = e * (e + 2)
        t = quotient(n, n + 2, QUICK)
        return t + x * (quotient(quotient(4 * e * (1 + e), n + 2, True), n + 2, True) if QUICK else tl.math.div_rn(4 * e * (1 + e), (n + 2) * (n + 2)))
    if ACT == "gelu_tanh":
        x = held(x, -12.0, 12.0)  # x^3 may overflow; the slope is 0 or 1 before that
        s, rest = sigmoids(cubic(x), QUICK)
        return s + x * s * rest * (1.5957691216057308 + 0.21406443847660524 * x * x)
    z = alpha * x if ACT == "clipped" else x
    s = sigmoid(z, QUICK)
    return s * (1 + z * (1 - s))
