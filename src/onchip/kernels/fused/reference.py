"""The fused operators in plain torch: the oracle in float64, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.once import once
from onchip.core.problem import Rope, Rows, exact_of
from onchip.kernels.fused.formulas import angles, normed, turn


def rms_norm(
    problem: Rows, config: None, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm of x, or (norm of the sum, sum); x [..., width], weight [width]."""
    total = x if residual is None else (x + residual).contiguous()
    y = normed(total, weight, eps, offset)
    return y if residual is None else (y, total)


def _kept(slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Slots of tokens that are written, and which tokens these are; None: all."""
    return (slots, None) if (kept := slots >= 0).all() else (slots[kept], kept)


def rope_append(problem: Rope, config: None, qkv: Tensor, table: Tensor, positions: Tensor, norm, append) -> None:
    """Rotate the heads of qkv [tokens, (heads + 2 kv_heads) dim] in place; norm: QKNorm or None, append: Append or None."""
    p, exact = problem, exact_of(qkv.dtype)
    heads = qkv.view(p.tokens, p.heads + 2 * p.kv_heads, p.dim)
    x = heads[:, : p.heads + p.kv_heads]
    if norm is not None:
        weight = torch.cat((norm.q.expand(p.heads, -1), norm.k.expand(p.kv_heads, -1))).to(exact)
        y = x.to(exact)
        y = F.rms_norm(y, (p.dim,), None, norm.eps) * (weight + norm.offset)
        x[..., p.rotary_dim :] = y[..., p.rotary_dim :]
    else:
        y = x
    turn(x, y, once(("angles", p.layout, exact), [table, positions], lambda: angles(table.index_select(0, positions).unsqueeze(1), exact, p)), p)
    if append is not None:
        k, v = heads[:, p.heads : p.heads + p.kv_heads], heads[:, p.heads + p.kv_heads :]
        slots, kept = once(("kept",), [append.slots], lambda: _kept(append.slots))
        if kept is not None:
            k, v = k[kept], v[kept]
        page = append.k.shape[1]
        places = (slots // page, slots % page) if p.kv else ()
        for pages, new in ((append.k, k), (append.v, v)):
            if p.kv:
                pages.write(places, new)
            elif pages.stride(0) == pages.shape[1] * pages.stride(1):  # 5 us less than by page and offset
                pages.view(-1, p.kv_heads, p.dim).index_copy_(0, slots, new)
            else:
                pages[slots // page, slots % page] = new
