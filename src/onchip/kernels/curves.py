"""Functions of a number that kernels share, float32 to a few ulp: tanh, sigmoid, activations and their slopes."""

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
def sigmoid(x):
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))  # the plain quotient may be two ulps off


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), which as a difference to 1 would lose its digits."""
    e = tl.exp(-tl.where(x < -80, -80.0, x))  # below, it is 1e-35
    s = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1 + e)
    return s, e * s


@triton.jit
def activated(x, ACT: tl.constexpr, alpha=1.0):
    """The activation of x: "" for none, relu, relu2, gelu, mish, silu, gelu_tanh, or "clipped", `x sigmoid(alpha x)`."""
    if ACT == "":
        return x
    if ACT == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays
    if ACT == "relu2":
        return tl.where(x < 0, 0.0, x) * x
    if ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACT == "mish":  # tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2); from 20 on it is 1
        e = tl.exp(tl.where(x > 20, 20.0, x))
        n = e * (e + 2)
        return x * tl.math.div_rn(n, n + 2)
    # (1 + tanh(u)) / 2 is sigmoid(2 u); here 2 sqrt(2 / pi)
    z = x if ACT == "silu" else (alpha * x if ACT == "clipped" else 1.5957691216057308 * (x + 0.044715 * x * x * x))
    return tl.math.div_rn(x, 1 + tl.exp(-z))  # the plain quotient may be two ulps off


@triton.jit
def slope(x, ACT: tl.constexpr, alpha=1.0):
    """Its derivative."""
    if ACT == "":
        return tl.full(x.shape, 1.0, tl.float32)
    if ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    if ACT == "relu2":
        return 2 * tl.where(x < 0, 0.0, x)
    if ACT == "gelu":
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if ACT == "mish":  # t + x (1 - t^2) sigmoid, without a difference
        e = tl.exp(tl.where(x > 20, 20.0, x))
        n = e * (e + 2)
        return tl.math.div_rn(n, n + 2) + x * tl.math.div_rn(4 * e * (1 + e), (n + 2) * (n + 2))
    if ACT == "gelu_tanh":
        x = tl.where(x > 10, 10.0, tl.where(x < -10, -10.0, x))  # x^3 may overflow; the slope is 0 or 1 before that
        s, rest = sigmoids(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * rest * 1.5957691216057308 * (1 + 0.134145 * x * x)
    z = alpha * x if ACT == "clipped" else x
    s = sigmoid(z)
    return s * (1 + z * (1 - s))
