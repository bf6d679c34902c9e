"""What operators in plain torch have in common: the norm of rows, and the rotation of pairs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.problem import Rope, exact_of

FEW = 1 << 16  # numbers whose copies stay in a core's cache


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)`. Of few rows by torch's own, the same bits in half the time; of many with few tensors made on the way: of
    705 x 576 numbers F.rms_norm takes 0.18 ms, and 1.5 where all it makes is memory that nobody has touched yet."""
    if not offset and x.numel() <= FEW and x.dtype == weight.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
    y = x.to(exact_of(x.dtype), copy=True)
    y.mul_(torch.rsqrt(y.square().mean(-1, keepdim=True).add_(eps)))
    return y.mul_(weight.to(y.dtype) + offset if offset else weight.to(y.dtype)).to(x.dtype).contiguous()


def angles(rows: Tensor, exact: torch.dtype, p: Rope) -> tuple[Tensor, ...]:
    """Of rows [..., rotary_dim] of a table, what `turn` takes: cosines and sines [..., rotary_dim / 2], of neighbours as one complex number."""
    cos, sin = rows.to(exact).chunk(2, -1)
    return (cos, sin) if p.layout == "neox" else (torch.complex(cos, sin),)


def turn(x: Tensor, y: Tensor, by: tuple[Tensor, ...], p: Rope) -> None:
    """The first columns of x [..., dim] become the pairs of y turned by their angles; of neighbours in a third of the time, as complex numbers: where they lie
    if y is x and each begins at an even place, as torch asks of complex numbers."""
    half, exact = p.rotary_dim // 2, by[0].real.dtype
    if p.layout == "neox":
        (cos, sin), a, b = by, y[..., :half].to(exact), y[..., half : 2 * half].to(exact)
        x[..., :half], x[..., half : 2 * half] = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
        return
    pairs = x[..., : 2 * half].view(*x.shape[:-1], half, 2)
    if y is x and x.dtype == exact and not any(n % 2 for n in (*pairs.stride()[:-1], pairs.storage_offset())):
        torch.view_as_complex(pairs).mul_(by[0])
    else:
        given = pairs if y is x else y[..., : 2 * half].view(*y.shape[:-1], half, 2)
        pairs.copy_(torch.view_as_real(torch.view_as_complex(given.to(exact).contiguous()) * by[0]))
