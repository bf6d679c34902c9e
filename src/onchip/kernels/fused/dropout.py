"""Dropout and the residual addition: y = x / (1 - p) where it is kept, else 0, plus the residual.

Nothing is kept for the backward pass: the same random numbers are drawn again. A program takes BLOCK elements, a call of Philox four of them
(`core/philox.kept_elements`). Traffic is the floor: x and the residual read, y written.
"""

import torch
import triton
import triton.language as tl

from onchip.core.philox import ROUNDS, threshold
from onchip.core.problem import Rows

BLOCK, WARPS = 1024, 2  # 16 elements a thread: two 16-byte loads of bf16
PHILOX_ROUNDS = tl.constexpr(ROUNDS)

# ---- device


@triton.jit
def _dropout_add(x_ptr, residual_ptr, y_ptr, state_ptr, elements, bar, grow, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    group = first // 4 + tl.arange(0, BLOCK // 4)
    low, high = group.to(tl.int32), (group >> 32).to(tl.int32)
    offset = tl.load(state_ptr + 1).to(tl.int32)
    a, b, c, d = tl.philox(tl.load(state_ptr), low, high, tl.full([BLOCK // 4], -1, tl.int32), offset, PHILOX_ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    y = tl.where(words >= bar.to(tl.uint32), x * grow, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < elements)


# ---- host


def launch(problem: Rows, config: None, x: torch.Tensor, residual: torch.Tensor | None, p: float, state: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual = None if residual is None else residual.contiguous()
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _dropout_add[grid](x.contiguous(), residual, y, state, x.numel(), threshold(p), 1 / (1 - p), BLOCK=BLOCK, num_warps=WARPS)
    return y
