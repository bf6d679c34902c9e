"""What the norm kernels share: a tile's parameters, the branch that joins the residual, the end of the formula; and on the host their arguments.

Tiles are [ROWS, BLOCK]: rows down, columns across. Row r belongs to set `r // span % sets`, and a parameter has one row for
"all", one for each "set" or one for each "row".
"""

import torch
import triton
import triton.language as tl

from onchip.core.norms import CODES, Norm, sharing
from onchip.core.philox import ROUNDS, threshold

PIECE = 4096  # elements of a wide row that a program handles at a time
SHARES = 128  # programs of one row at most, while its statistics are taken

# ---- device


@triton.jit
def parameter(ptr, stride, row, span, sets, col, inside, width, PER: tl.constexpr):
    """A parameter in float32: [1, BLOCK] where all rows share it, else [ROWS, BLOCK]."""
    if PER == "all":
        x = tl.load(ptr + col, mask=col < width, other=0.0)
    elif PER == "set":
        x = tl.load(ptr + row // span % sets * stride + col, mask=inside, other=0.0)
    else:
        x = tl.load(ptr + row * stride + col, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def dropped(x, state_ptr, bar, grown, row, col, PHILOX_ROUNDS: tl.constexpr):
    """x where dropout keeps it, grown by 1 / (1 - p): Philox of (seed, offset, row, column), as `core/philox.py` draws them."""
    if state_ptr is not None:
        zero = (row + col).to(tl.int32) * 0
        word, _, _, _ = tl.philox(tl.load(state_ptr), zero + col, zero + row.to(tl.int32), zero, tl.load(state_ptr + 1).to(tl.int32), PHILOX_ROUNDS)
        x = tl.where(word >= bar.to(tl.uint32), x * grown, 0.0)
    return x


@triton.jit
def factor(gate_ptr, gate_stride, row_scale_ptr, row, rows, span, sets, col, inside, width, GATE: tl.constexpr):
    """gate * row_scale: what the branch is multiplied by before it joins the stream; broadcasts to the tile."""
    x = tl.full([1, 1], 1.0, tl.float32)
    if gate_ptr is not None:
        x = parameter(gate_ptr, gate_stride, row, span, sets, col, inside, width, GATE)
    if row_scale_ptr is not None:
        x = x * tl.load(row_scale_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    return x


@triton.jit
def affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W: tl.constexpr):
    """weight + offset and bias; 1 and 0 where there is none."""
    w = tl.full([1, 1], 1.0, tl.float32)
    b = tl.full([1, 1], 0.0, tl.float32)
    if w_ptr is not None:
        w = parameter(w_ptr, w_stride, row, span, sets, col, inside, width, W) + offset
    if b_ptr is not None:
        b = parameter(b_ptr, w_stride, row, span, sets, col, inside, width, W)
    return w, b


@triton.jit
def modulated(u, scale_ptr, shift_ptr, mod_stride, row, span, sets, col, inside, width, MOD: tl.constexpr):
    """u * (1 + scale) + shift."""
    if scale_ptr is not None:
        u = u * (1.0 + parameter(scale_ptr, mod_stride, row, span, sets, col, inside, width, MOD))
    if shift_ptr is not None:
        u = u + parameter(shift_ptr, mod_stride, row, span, sets, col, inside, width, MOD)
    return u


@triton.jit
def merged(mean_ptr, square_ptr, row, width, share, shares, LAYER: tl.constexpr, SHARES: tl.constexpr):
    """Mean and mean square deviation of a row from those of its shares (Chan, Golub and LeVeque, 1983), [1, 1]; of "rms" 0 and the mean square.

    Share s has columns [s * share, (s + 1) * share), a mean at mean_ptr[row, s] and a sum of square deviations at square_ptr[row, s].
    """
    s = tl.arange(0, SHARES)[None, :]
    square = tl.load(square_ptr + row * shares + s, mask=s < shares, other=0.0)
    mean = tl.zeros([1, 1], tl.float32)
    if LAYER:
        count = tl.minimum(width - s * share, share).to(tl.float32)
        count = tl.where(s < shares, count, 0.0)
        of_share = tl.load(mean_ptr + row * shares + s, mask=s < shares, other=0.0)
        mean = tl.sum(of_share * count, 1, keep_dims=True) / width
        square += count * (of_share - mean) * (of_share - mean)
    return mean, tl.sum(square, 1, keep_dims=True) / width


@triton.jit
def sum_partials(partial_ptr, out_ptr, count, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum of partial[i, :count], in one order always; partial [items, count, width] float32."""
    pieces = tl.cdiv(width, BLOCK)
    item = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([COUNT, BLOCK], tl.float32)
    for first in range(0, count, COUNT):
        n = first + tl.arange(0, COUNT)[:, None]
        acc += tl.load(partial_ptr + (item * count + n) * width + col, mask=(n < count) & (col < width), other=0.0)
    total = tl.sum(acc, 0, keep_dims=True)
    tl.store(out_ptr + item * width + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


# ---- host


def matrix(x: torch.Tensor | None) -> torch.Tensor | None:
    """x [rows, width] with contiguous rows, any stride apart; copied where a row is not contiguous."""
    return x if x is None or x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def pair(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Two parameters with one stride between rows, and that stride: both are contiguous where theirs differ."""
    a, b = matrix(a), matrix(b)
    if a is not None and b is not None and a.stride(0) != b.stride(0) and len(a) > 1:
        a, b = a.contiguous(), b.contiguous()
    return a, b, (b if a is None else a).stride(0) if a is not None or b is not None else 0


def stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def arguments(norm: Norm, rows: int, width: int) -> dict:
    """What every norm kernel takes of a call."""
    weight, bias, w_stride = pair(norm.weight, norm.bias)
    scale, shift, mod_stride = pair(norm.scale, norm.shift)
    gate, silu = matrix(norm.gate), matrix(norm.silu)
    return {
        "gate_ptr": gate,
        "gate_stride": stride(gate),
        "row_scale_ptr": None if norm.row_scale is None else norm.row_scale.contiguous(),
        "state_ptr": norm.state,
        "bar": threshold(norm.drop),
        "grown": 1 / (1 - norm.drop) if norm.drop < 1 else 0.0,
        "w_ptr": weight,
        "b_ptr": bias,
        "w_stride": w_stride,
        "offset": norm.offset,
        "scale_ptr": scale,
        "shift_ptr": shift,
        "mod_stride": mod_stride,
        "silu_ptr": silu,
        "silu_stride": stride(silu),
        "rows": rows,
        "width": width,
        "span": norm.span,
        "sets": norm.sets,
        "LAYER": norm.kind == "layer",
        "GATE": sharing(norm.gate, rows, norm.sets),
        "W": sharing(weight if bias is None else bias, rows, norm.sets),
        "MOD": sharing(shift if scale is None else scale, rows, norm.sets),
        "PHILOX_ROUNDS": ROUNDS,
    }


def shares_of(width: int, rows: int, sms: int) -> tuple[int, int]:
    """(programs that take a wide row's statistics, columns of each): enough to fill the device four times over, with whole pieces each."""
    pieces = triton.cdiv(width, PIECE)
    each = max(triton.cdiv(pieces, SHARES), pieces * rows // (4 * sms), 1)
    return triton.cdiv(pieces, each), each * PIECE


def largest(codes: str) -> float:
    return CODES[codes][1] if codes else 0.0
