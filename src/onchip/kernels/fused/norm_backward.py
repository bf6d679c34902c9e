"""Gradients of RMSNorm and LayerNorm of rows, and of what stands around them (`norm.py` has the formula):

    dv = dy silu(g),  dg = dy v silu'(g)        v = u (1 + scale) + shift
    dscale = dv u,  dshift = dv,  du = dv (1 + scale)
    dweight = du hat,  dbias = du,  dhat = du (weight + offset)        hat = (z - mean) rstd, or (y - bias) / (weight + offset) where x was not kept
    dz = rstd (dhat - mean(dhat) - hat mean(dhat hat)) + dtotal        (mean(dhat) for LayerNorm alone)
    dx = dz gate row_scale dropped(1),  dgate = dz row_scale dropped(x),  drow_scale = sum of dz gate dropped(x)

A grid of about two programs a multiprocessor goes over the rows of one set after another, whole rows in registers, the next row's loads in
flight; dy and z are read once and dx is written once. What rows share is summed in a program's registers, written once a program and added up
by a second launch, in one order always: no atomics, the same bits in every run. Rows too wide for that are shared out as in `norm.py`: one launch
sums dhat and dhat hat, a second one goes down columns; a slab of rows goes through both while it is in L2.
Bytes moved: the floor, rows width (dy + z + dx), and 8 programs width for each parameter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of
from onchip.core.norms import PARAMETERS, Norm, Normed, NormGrads, sharing
from onchip.core.problem import Rows
from onchip.kernels.curves import sigmoid
from onchip.kernels.fused.norm_tile import affine, arguments, dropped, factor, matrix, modulated, parameter, shares_of, stride, sum_partials

WIDEST = 8192  # elements of a row in registers: dy, z, the weight and two sums of 16,384 would not fit a thread's 128 registers
TILE = 4096  # elements of a program that holds several rows
THREAD = 16  # elements a thread: with two sums beside dy, z and the next row's, about 110 registers
PIECE, PIECE_WARPS = 1024, 4  # elements of a wider row
SLAB = 2  # a slab of wide rows is at most this part of the L2 cache


class Tiles(NamedTuple):
    """How much of the matrix a program holds, `rows` of `block` columns, how many programs there are, and whether the next row is on its way
    while one is computed.
    """

    rows: int
    block: int
    warps: int
    programs: int
    ahead: bool

    def __str__(self):
        return f"{self.rows}x{self.block} tiles, {self.warps} warps, {self.programs} programs"


# ---- device


@triton.jit
def _hat(z, w, b, mean_ptr, rstd, row, inside, INVERSE: tl.constexpr):
    """The normalised row, 0 outside of it."""
    if INVERSE:
        hat = tl.math.div_rn(z - b, tl.where(inside, w, 1.0))
    elif mean_ptr is not None:
        hat = (z - tl.load(mean_ptr + row, mask=row >= 0, other=0.0)) * rstd
    else:
        hat = z * rstd
    return tl.where(inside, hat, 0.0)


@triton.jit
def _before_norm(dy, hat, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD: tl.constexpr):
    """dhat, du, dv, u and the gradient of the silu gate (0 where there is none)."""
    u = hat * w + b
    d_silu = dy * 0.0
    if silu_ptr is not None:
        g = tl.load(silu_ptr + row * silu_stride + col, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(g)
        d_silu = dy * modulated(u, scale_ptr, shift_ptr, mod_stride, row, span, sets, col, inside, width, MOD) * s * (1.0 + g * (1.0 - s))
        dy = dy * g * s
    du = dy
    if scale_ptr is not None:
        du = dy * (1.0 + parameter(scale_ptr, mod_stride, row, span, sets, col, inside, width, MOD))
    return du * w, du, dy, u, d_silu


@triton.jit
def _put(ptr, x, row, col, width, inside):
    tl.store(ptr + row * width + col, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _joined_back(
    dz, x_ptr, x_stride, dx_ptr, d_residual_ptr, d_gate_ptr, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
    row, rows, span, sets, col, inside, width, GATE: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
):  # fmt: skip
    """dx and the stream's gradient are written, dgate too where each row has a gate; what gradients of shared gates and of scales are summed of."""
    if d_residual_ptr is not None:
        _put(d_residual_ptr, dz, row, col, width, inside)
    if dx_ptr is not None:
        dx = dropped(dz, state_ptr, bar, grown, row, col, PHILOX_ROUNDS)
        if gate_ptr is not None or row_scale_ptr is not None:
            dx = dx * factor(gate_ptr, gate_stride, row_scale_ptr, row, rows, span, sets, col, inside, width, GATE)
        _put(dx_ptr, dx, row, col, width, inside)
    of_gate = dz
    of_scale = dz
    if x_ptr is not None:
        x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        branch = dz * dropped(x, state_ptr, bar, grown, row, col, PHILOX_ROUNDS)
        of_gate = branch * factor(None, 0, row_scale_ptr, row, rows, span, sets, col, inside, width, GATE)
        of_scale = branch * factor(gate_ptr, gate_stride, None, row, rows, span, sets, col, inside, width, GATE)
        if d_gate_ptr is not None and GATE == "row":
            _put(d_gate_ptr, of_gate, row, col, width, inside)
    return of_gate, of_scale


@triton.jit
def _put_sum(ptr, acc, program, col, width):
    tl.store(ptr + program * width + col, tl.sum(acc, 0, keep_dims=True), mask=col < width)


@triton.jit
def _row(k, s, span, sets):
    """The k-th row of set s."""
    return (k // span).to(tl.int64) * (span * sets) + s * span + k % span


@triton.jit
def _norm_backward(
    dy_ptr, dy_stride, d_total_ptr, d_total_stride, z_ptr, z_stride, x_ptr, x_stride, mean_ptr, rstd_ptr,
    dx_ptr, d_residual_ptr, d_w_ptr, d_b_ptr, d_gate_ptr, d_scale_ptr, d_shift_ptr, d_row_scale_ptr, d_silu_ptr,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, span, sets, per, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    INVERSE: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) // per
    count = rows // sets
    col = tl.arange(0, BLOCK)[None, :]
    sum_w = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_b = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_scale = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_shift = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) % per * ROWS
    k = first + tl.arange(0, ROWS)[:, None]
    row = _row(k, s, span, sets)
    inside = (k < count) & (col < width)
    w, b = affine(w_ptr, b_ptr, w_stride, offset, s * span, span, sets, col, col < width, width, W)  # of one set, so of all its rows
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0)
    z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0)
    for start in range(first, count, per * ROWS):
        k = start + tl.arange(0, ROWS)[:, None]
        row = _row(k, s, span, sets)
        inside = (k < count) & (col < width)
        after = _row(k + per * ROWS, s, span, sets)
        there = (k + per * ROWS < count) & (col < width)
        if AHEAD:
            next_dy = tl.load(dy_ptr + after * dy_stride + col, mask=there, other=0.0)
            next_z = tl.load(z_ptr + after * z_stride + col, mask=there, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=k < count, other=0.0)
        hat = _hat(z.to(tl.float32), w, b, mean_ptr, rstd, tl.where(k < count, row, -1), inside, INVERSE)
        d_hat, du, dv, u, d_silu = _before_norm(
            dy.to(tl.float32), hat, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD
        )
        dz = d_hat - hat * (tl.sum(d_hat * hat, 1, keep_dims=True) / width)
        if LAYER:
            dz -= tl.sum(d_hat, 1, keep_dims=True) / width
        dz = dz * rstd
        if d_total_ptr is not None:
            dz += tl.load(d_total_ptr + row * d_total_stride + col, mask=inside, other=0.0).to(tl.float32)
        of_gate, of_scale = _joined_back(dz, x_ptr, x_stride, dx_ptr, d_residual_ptr, d_gate_ptr, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                                         row, rows, span, sets, col, inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
        if d_row_scale_ptr is not None:
            of_row = tl.sum(tl.where(inside, of_scale, 0.0), 1, keep_dims=True)
            tl.store(d_row_scale_ptr + row, of_row.to(d_row_scale_ptr.dtype.element_ty), mask=k < count)
        if d_silu_ptr is not None:
            _put(d_silu_ptr, d_silu, row, col, width, inside)
        if MOD == "row":
            if d_scale_ptr is not None:
                _put(d_scale_ptr, dv * u, row, col, width, inside)
            if d_shift_ptr is not None:
                _put(d_shift_ptr, dv, row, col, width, inside)
        if d_w_ptr is not None:
            sum_w += du * hat
        if d_b_ptr is not None:
            sum_b += du
        if d_gate_ptr is not None:
            sum_gate += of_gate
        if d_scale_ptr is not None:
            sum_scale += dv * u
        if d_shift_ptr is not None:
            sum_shift += dv
        if not AHEAD:
            next_dy = tl.load(dy_ptr + after * dy_stride + col, mask=there, other=0.0)
            next_z = tl.load(z_ptr + after * z_stride + col, mask=there, other=0.0)
        dy = next_dy
        z = next_z
    program = tl.program_id(0).to(tl.int64)
    if d_w_ptr is not None:
        _put_sum(d_w_ptr, sum_w, program, col, width)
    if d_b_ptr is not None:
        _put_sum(d_b_ptr, sum_b, program, col, width)
    if d_gate_ptr is not None and GATE != "row":
        _put_sum(d_gate_ptr, sum_gate, program, col, width)
    if d_scale_ptr is not None and MOD != "row":
        _put_sum(d_scale_ptr, sum_scale, program, col, width)
    if d_shift_ptr is not None and MOD != "row":
        _put_sum(d_shift_ptr, sum_shift, program, col, width)


@triton.jit
def _sums(
    dy_ptr, dy_stride, z_ptr, z_stride, mean_ptr, rstd_ptr, hat_ptr, square_ptr, first_k, ks, share, shares,
    w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, rows, width, span, sets,
    W: tl.constexpr, MOD: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of dhat and of dhat hat over a share of a wide row."""
    item = tl.program_id(0) // shares
    row = _row(first_k + item % ks, item // ks, span, sets) + tl.zeros([1, 1], tl.int64)
    first = tl.program_id(0) % shares * share
    rstd = tl.load(rstd_ptr + row)
    sums = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(first, tl.minimum(first + share, width), BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        inside = col < width
        w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0).to(tl.float32)
        hat = _hat(z, w, b, mean_ptr, rstd, row, inside, INVERSE)
        d_hat, _, _, _, _ = _before_norm(dy, hat, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD)
        sums += tl.where(inside, d_hat, 0.0)
        squares += tl.where(inside, d_hat * hat, 0.0)
    place = row * shares + tl.program_id(0) % shares
    tl.store(hat_ptr + place, tl.sum(sums, 1, keep_dims=True))
    tl.store(square_ptr + place, tl.sum(squares, 1, keep_dims=True))


@triton.jit
def _wide_backward(
    dy_ptr, dy_stride, d_total_ptr, d_total_stride, z_ptr, z_stride, x_ptr, x_stride, mean_ptr, rstd_ptr, hat_ptr, square_ptr, first_k, ks, shares,
    dx_ptr, d_residual_ptr, d_w_ptr, d_b_ptr, d_gate_ptr, d_scale_ptr, d_shift_ptr, d_row_scale_ptr, d_silu_ptr,
    gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown, w_ptr, b_ptr, w_stride, offset, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride,
    rows, width, span, sets, per, slab, slabs, LAYER: tl.constexpr, GATE: tl.constexpr, W: tl.constexpr, MOD: tl.constexpr, PHILOX_ROUNDS: tl.constexpr,
    INVERSE: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One piece of columns, down some rows of a slab."""
    pieces = tl.cdiv(width, BLOCK)
    piece = tl.program_id(0) % pieces
    p = tl.program_id(0) // pieces % per
    s = tl.program_id(0) // pieces // per
    col = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = col < width
    sum_w = tl.zeros([1, BLOCK], tl.float32)
    sum_b = tl.zeros([1, BLOCK], tl.float32)
    sum_gate = tl.zeros([1, BLOCK], tl.float32)
    sum_scale = tl.zeros([1, BLOCK], tl.float32)
    sum_shift = tl.zeros([1, BLOCK], tl.float32)
    part = tl.arange(0, SHARES)[None, :]
    for k in range(first_k + p, first_k + ks, per):
        row = _row(k, s, span, sets) + tl.zeros([1, 1], tl.int64)
        w, b = affine(w_ptr, b_ptr, w_stride, offset, row, span, sets, col, inside, width, W)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * z_stride + col, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        hat = _hat(z, w, b, mean_ptr, rstd, row, inside, INVERSE)
        d_hat, du, dv, u, d_silu = _before_norm(
            dy, hat, w, b, scale_ptr, shift_ptr, mod_stride, silu_ptr, silu_stride, row, span, sets, col, inside, width, MOD
        )
        along = tl.sum(tl.load(square_ptr + row * shares + part, mask=part < shares, other=0.0), 1, keep_dims=True) / width
        dz = d_hat - hat * along
        if LAYER:
            dz -= tl.sum(tl.load(hat_ptr + row * shares + part, mask=part < shares, other=0.0), 1, keep_dims=True) / width
        dz = dz * rstd
        if d_total_ptr is not None:
            dz += tl.load(d_total_ptr + row * d_total_stride + col, mask=inside, other=0.0).to(tl.float32)
        of_gate, of_scale = _joined_back(dz, x_ptr, x_stride, dx_ptr, d_residual_ptr, d_gate_ptr, gate_ptr, gate_stride, row_scale_ptr, state_ptr, bar, grown,
                                         row, rows, span, sets, col, inside, width, GATE, PHILOX_ROUNDS)  # fmt: skip
        if d_row_scale_ptr is not None:
            tl.store(d_row_scale_ptr + row * pieces + piece, tl.sum(tl.where(inside, of_scale, 0.0), 1, keep_dims=True))
        if d_silu_ptr is not None:
            _put(d_silu_ptr, d_silu, row, col, width, inside)
        if MOD == "row":
            if d_scale_ptr is not None:
                _put(d_scale_ptr, dv * u, row, col, width, inside)
            if d_shift_ptr is not None:
                _put(d_shift_ptr, dv, row, col, width, inside)
        if d_w_ptr is not None:
            sum_w += du * hat
        if d_b_ptr is not None:
            sum_b += du
        if d_gate_ptr is not None:
            sum_gate += of_gate
        if d_scale_ptr is not None:
            sum_scale += dv * u
        if d_shift_ptr is not None:
            sum_shift += dv
    program = ((s * slabs + slab) * per + p).to(tl.int64)
    if d_w_ptr is not None:
        _put_sum(d_w_ptr, sum_w, program, col, width)
    if d_b_ptr is not None:
        _put_sum(d_b_ptr, sum_b, program, col, width)
    if d_gate_ptr is not None and GATE != "row":
        _put_sum(d_gate_ptr, sum_gate, program, col, width)
    if d_scale_ptr is not None and MOD != "row":
        _put_sum(d_scale_ptr, sum_scale, program, col, width)
    if d_shift_ptr is not None and MOD != "row":
        _put_sum(d_shift_ptr, sum_shift, program, col, width)


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Several narrow rows a program, two programs a multiprocessor; one where a row takes half of its registers."""
    if problem.width > WIDEST:
        return [Tiles(1, PIECE, PIECE_WARPS, 4 * device.sms, False)]
    block = triton.next_power_of_2(problem.width)
    rows = max(1, min(TILE // block, problem.rows // (2 * device.sms)))
    rows = 1 << (rows.bit_length() - 1)
    warps = max(1, min(16, rows * block // (32 * THREAD)))
    wanted = problem.variant.partition(" -> ")[2].split()
    ahead = warps <= 8 or sum(name in wanted for name in PARAMETERS) <= 1  # else 16 warps' registers are full
    return [Tiles(rows, block, warps, device.sms * (2 if warps <= 8 else 1), ahead)]


class Sums(NamedTuple):
    """Where the parameters' gradients are written: sums of programs in float32 for what rows share, else the gradient itself."""

    partial: dict[str, torch.Tensor]  # [sets, programs of a set, width]
    done: dict[str, torch.Tensor]

    @property
    def pointers(self) -> dict:
        short = {"weight": "w", "bias": "b"}
        return {f"d_{short.get(name, name)}_ptr": self.partial.get(name, self.done.get(name)) for name in PARAMETERS}

    def total(self, norm: Norm) -> dict[str, torch.Tensor]:
        """The gradients, each summed over programs; those of one shape in one launch."""
        grads = dict(self.done)
        for name, partial in self.partial.items():
            given = getattr(norm, name)
            sets, _, width = partial.shape
            items = sets if len(given) > 1 else 1
            grads[name] = torch.empty((items, width), dtype=given.dtype, device=partial.device)
            add_up(partial.view(items, -1, width), grads[name])
        return grads


def add_up(partial: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = the sum of partial[i], [items, count, width] float32."""
    items, count, width = partial.shape
    block = min(64, triton.next_power_of_2(width))
    sum_partials[(items * triton.cdiv(width, block),)](partial, out, count, width, COUNT=32, BLOCK=block, num_warps=4)


def launch(
    problem: Rows,
    config: Tiles,
    wanted: tuple[str, ...],
    dy: torch.Tensor,
    d_total: torch.Tensor | None,
    z: torch.Tensor,
    x: torch.Tensor | None,
    normed: Normed,
    norm: Norm,
) -> NormGrads:
    """Matrices [rows, width]: z is the sum or x, or y where `norm.inverse`; x is what was dropped and scaled, where `wanted` needs it."""
    rows, width, count = problem.rows, problem.width, problem.rows // norm.sets
    wide = config.block < width
    facts = of(dy.device)
    slab = count if not wide else min(count, max(1, facts.l2 // SLAB // (norm.sets * width * (dy.element_size() + z.element_size()))))
    slabs = max(1, triton.cdiv(count, max(1, slab)))
    per = triton.cdiv(config.programs, norm.sets * (triton.cdiv(width, config.block) if wide else 1))
    per = max(1, min(per, triton.cdiv(slab, config.rows)))

    def new(*shape, dtype=torch.float32):
        return (torch.empty if rows else torch.zeros)(shape, dtype=dtype, device=dy.device)

    sums = Sums({}, {})
    for name in PARAMETERS:
        if name not in wanted:
            continue
        given = getattr(norm, name)
        if sharing(given, rows, norm.sets) == "row":
            sums.done[name] = new(rows, width, dtype=given.dtype)
        else:
            sums.partial[name] = new(norm.sets, slabs * per, width)
    pieces = triton.cdiv(width, config.block)
    grads = {name: new(rows, width, dtype=dy.dtype if name == "x" else getattr(norm, name).dtype) for name in ("x", "residual", "silu") if name in wanted}
    row_scale = None
    if "row_scale" in wanted:
        grads["row_scale"] = new(rows, dtype=norm.row_scale.dtype)
        row_scale = new(rows, pieces) if wide else grads["row_scale"]
    dy, d_total, z, x = matrix(dy), matrix(d_total), matrix(z), matrix(x)
    given = arguments(norm, rows, width) | {"INVERSE": norm.inverse}
    read = {"dy_ptr": dy, "dy_stride": stride(dy), "z_ptr": z, "z_stride": stride(z), "mean_ptr": normed.mean, "rstd_ptr": normed.rstd}
    read_too = {"d_total_ptr": d_total, "d_total_stride": stride(d_total), "x_ptr": x, "x_stride": stride(x)}
    write = {"dx_ptr": grads.get("x"), "d_residual_ptr": grads.get("residual"), "d_silu_ptr": grads.get("silu"), "d_row_scale_ptr": row_scale, **sums.pointers}
    if not rows:
        return NormGrads(**grads, **sums.total(norm))
    if not wide:
        grid = (norm.sets * per,)
        _norm_backward[grid](**read, **read_too, **write, **given, per=per, AHEAD=config.ahead, ROWS=config.rows, BLOCK=config.block, num_warps=config.warps)
        return NormGrads(**grads, **sums.total(norm))
    shares, share = shares_of(width, slab * norm.sets, facts.sms)
    inner = new(2, rows, shares)
    split = {"hat_ptr": inner[0], "square_ptr": inner[1], "shares": shares, "BLOCK": config.block, "num_warps": config.warps}
    unread = ("gate_ptr", "gate_stride", "row_scale_ptr", "state_ptr", "bar", "grown", "LAYER", "GATE", "PHILOX_ROUNDS")
    first = {name: value for name, value in given.items() if name not in unread}
    for n in range(slabs):
        where = {"first_k": n * slab, "ks": min(slab, count - n * slab)}
        _sums[(norm.sets * where["ks"] * shares,)](**read, **first, **split, **where, share=share)
        _wide_backward[(norm.sets * per * pieces,)](
            **read, **read_too, **write, **given, **split, **where, per=per, slab=n, slabs=slabs, SHARES=triton.next_power_of_2(shares)
        )
    if row_scale is not None:
        add_up(row_scale.unsqueeze(-1), grads["row_scale"].unsqueeze(-1))
    return NormGrads(**grads, **sums.total(norm))
