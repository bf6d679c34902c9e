"""The norms of rows and groups, forward and backward, in plain torch: the oracle in float64, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import philox
from onchip.core.norms import CODES, PARAMETERS, Norm, Normed, NormGrads, sharing
from onchip.core.problem import Groups, Rows, exact_of


def _all_rows(parameter: Tensor | None, norm: Norm, x: Tensor, absent: float = 0.0) -> Tensor | float:
    """A parameter in the exact dtype, as [1, width] or [rows, width]."""
    if parameter is None:
        return absent
    parameter = parameter.to(exact_of(x.dtype))
    if sharing(parameter, len(x), norm.sets) != "set":
        return parameter
    return parameter[torch.arange(len(x), device=x.device) // norm.span % norm.sets]


def _dropped(norm: Norm, x: Tensor) -> Tensor:
    """x in the exact dtype where dropout keeps it, grown by 1 / (1 - p)."""
    exact = x.to(exact_of(x.dtype))
    if norm.state is None:
        return exact
    return torch.where(philox.kept_rows(norm.drop, norm.state, *x.shape), exact / (1 - norm.drop), 0.0)


def _factor(norm: Norm, x: Tensor) -> Tensor | float:
    """gate * row_scale."""
    scale = 1.0 if norm.row_scale is None else norm.row_scale.to(exact_of(x.dtype)).unsqueeze(1)
    return _all_rows(norm.gate, norm, x, 1.0) * scale


def _affine(norm: Norm, x: Tensor):
    """weight + offset, bias, 1 + scale, shift and the gate before silu."""
    weight = 1.0 if norm.weight is None else _all_rows(norm.weight, norm, x) + norm.offset
    gate = None if norm.silu is None else norm.silu.to(exact_of(x.dtype))
    return weight, _all_rows(norm.bias, norm, x), 1 + _all_rows(norm.scale, norm, x), _all_rows(norm.shift, norm, x), gate


def norm(problem: Rows, config: None, x: Tensor, norm: Norm) -> Normed:
    """Of x [rows, width]."""
    z = x.to(exact_of(x.dtype))
    total = None
    if norm.residual is not None:
        total = (norm.residual + _dropped(norm, x) * _factor(norm, x)).to(norm.residual.dtype).contiguous()
        z = total.to(z.dtype)
        total = norm.residual.copy_(total) if norm.in_place else total
    mean = z.mean(-1, keepdim=True) if norm.kind == "layer" else torch.zeros_like(z[:, :1])
    rstd = torch.rsqrt((z - mean).square().mean(-1, keepdim=True) + norm.eps)
    weight, bias, scale, shift, gate = _affine(norm, x)
    y = ((z - mean) * rstd * weight + bias) * scale + shift
    y = y if gate is None else y * F.silu(gate)
    kept = (mean.squeeze(1) if norm.kind == "layer" else None, rstd.squeeze(1)) if norm.keep else (None, None)
    if not norm.codes:
        return Normed(y.to(x.dtype).contiguous(), total, *kept)
    dtype, largest = CODES[norm.codes]
    step = y.abs().amax(-1, keepdim=True) / largest
    y = torch.where(step > 0, y / torch.where(step > 0, step, 1.0), 0.0).clamp(-largest, largest)
    return Normed((y.round() if dtype == torch.int8 else y).to(dtype).contiguous(), total, *kept, step.squeeze(1).float())


def norm_backward(
    problem: Rows, config: None, wanted: tuple[str, ...], dy: Tensor, d_total: Tensor | None, z: Tensor, x: Tensor | None, normed: Normed, norm: Norm
):
    """The gradients of `wanted`, as NormGrads; z [rows, width] is total or x, or y where `norm.inverse`, and x what was dropped and scaled."""
    exact = exact_of(dy.dtype)
    dy, z, rstd = dy.to(exact), z.to(exact), normed.rstd.to(exact).unsqueeze(1)
    weight, bias, scale, shift, gate = _affine(norm, dy)
    if norm.inverse:
        hat = (z - bias) / weight
    else:
        hat = (z if normed.mean is None else z - normed.mean.to(exact).unsqueeze(1)) * rstd
    u = hat * weight + bias
    d = {}
    if gate is not None:
        s = torch.sigmoid(gate)
        d["silu"] = dy * (u * scale + shift) * s * (1 + gate * (1 - s))
        dy = dy * gate * s
    du = dy * scale
    d |= {"shift": dy, "scale": dy * u, "bias": du, "weight": du * hat}
    d_hat = du * weight
    mean = d_hat.mean(-1, keepdim=True) if norm.kind == "layer" else 0.0
    dz = rstd * (d_hat - mean - hat * (d_hat * hat).mean(-1, keepdim=True))
    d["residual"] = dz = dz if d_total is None else dz + d_total.to(exact)
    d["x"] = dz if norm.residual is None else _dropped(norm, dz.to(exact)) * _factor(norm, dz)
    if x is not None:
        branch = dz * _dropped(norm, x)
        d["gate"] = branch if norm.row_scale is None else branch * norm.row_scale.to(exact).unsqueeze(1)
        d["row_scale"] = (branch * _all_rows(norm.gate, norm, x, 1.0)).sum(-1)
    given = {name: normed.y if name == "x" else getattr(norm, name) for name in wanted}
    return NormGrads(**{name: (_summed(d[name], t, norm) if name in PARAMETERS else d[name]).to(t.dtype).contiguous() for name, t in given.items()})


def _summed(grad: Tensor, parameter: Tensor, norm: Norm) -> Tensor:
    """Over the rows that share a parameter."""
    if not len(grad):
        return torch.zeros_like(parameter)
    if len(parameter) == len(grad):
        return grad
    if len(parameter) == 1:
        return grad.sum(0, keepdim=True)
    return grad.view(-1, norm.sets, norm.span, grad.shape[1]).sum((0, 2))


ACT = {"": lambda x: x, "silu": F.silu, "mish": F.mish}


def _grouped(p: Groups, x: Tensor) -> Tensor:
    """[batch, groups, channels of one, pixels] in the exact dtype."""
    x = x.transpose(1, 2) if p.layout == "channels_last" else x
    return x.to(exact_of(x.dtype)).reshape(p.batch, p.groups, p.channels // p.groups, p.pixels)


def _ungrouped(p: Groups, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.view(p.batch, p.channels, p.pixels)
    return (x.transpose(1, 2) if p.layout == "channels_last" else x).to(dtype).contiguous()


def _channels(p: Groups, t: Tensor | None, absent: float, like: Tensor) -> Tensor | float:
    return absent if t is None else t.to(like.dtype).view(p.groups, -1, 1)


def group_norm(problem: Groups, config: None, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keep: bool):
    """y, mean and 1 / deviation [batch, groups]; x [batch, channels, pixels] or [batch, pixels, channels]."""
    z = _grouped(problem, x)
    mean = z.mean((2, 3), keepdim=True)
    rstd = torch.rsqrt((z - mean).square().mean((2, 3), keepdim=True) + eps)
    u = (z - mean) * rstd * _channels(problem, weight, 1.0, z) + _channels(problem, bias, 0.0, z)
    return _ungrouped(problem, ACT[problem.act](u), x.dtype), mean.flatten(1), rstd.flatten(1)


def group_norm_backward(problem: Groups, config: None, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None):
    """dx, and the gradients of weight and bias."""
    dy, z = _grouped(problem, dy), _grouped(problem, x)
    rstd = rstd.to(z.dtype)[..., None, None]
    hat = (z - mean.to(z.dtype)[..., None, None]) * rstd
    w = _channels(problem, weight, 1.0, z)
    u = hat * w + _channels(problem, bias, 0.0, z)
    s = torch.sigmoid(u)
    t = torch.tanh(F.softplus(u, threshold=100))
    du = dy * {"": torch.ones_like(u), "silu": s * (1 + u * (1 - s)), "mish": t + u * (1 - t * t) * s}[problem.act]
    d_hat = du * w
    dx = rstd * (d_hat - d_hat.mean((2, 3), keepdim=True) - hat * (d_hat * hat).mean((2, 3), keepdim=True))
    given = next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
    d_weight, d_bias = ((t.sum((0, 3))).flatten().to(given) for t in (du * hat, du))
    return _ungrouped(problem, dx, x.dtype), d_weight, d_bias
