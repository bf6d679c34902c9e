"""Products of a few rows with a weight, and what stands around them: y = act(norm(x) W^T + b) + residual, W [out, in]; gated, W holds gates and ups.

    norm(x) W^T = (x g) W^T / sqrt(mean(x^2) + eps)

so that nothing waits for the sum of squares: it is made beside the products, by every program again, of x out of L2. Traffic is W, once; x, y and the
residual are a thousandth of it. An H200's memory needs about 4.1 TB/s x 700 ns = 2.9 MB in flight, 22 KB a multiprocessor: each thread has 128 bytes on their
way (of one row 256), or all that there is for it, in loads of 16 (DEPTH steps, each fetched anew as soon as it is used up).

    ALONE    1 and 2 rows: a warp has BLOCK_N rows of W and BLOCK_K columns at a time, products and sums in float32 registers; no barrier and no shared memory.
             3 instructions an element and row; a GPU has 14 for each at the speed of memory.
    TOGETHER 3 to 16 rows: tensor cores, W as the long side and 8 rows of x as the narrow one; the warps of a program have the same rows of W and columns of
             their own, and their sums are added up in order at the end. Both sides lie in registers as they were loaded (`_operand`), so the loop has no
             barrier and no shared memory either. Rows come to the product rounded to W's dtype, after the norm's weight.

Small products last 2 to 4 us, most of which is latency. With programmatic dependent launch a program starts while the kernel before it runs, and where weights
are CONSTANT has its first DEPTH steps of W, the norm's weight and the bias on their way before it waits for that kernel; only then it reads x and the residual.
Loads on their way have room in L1, so that is asked for (`prefer_cache`): behind attention, which takes it for shared memory, products go 14% slower without.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onchip.core.device import Device
from onchip.core.linear import Around
from onchip.core.problem import Rows
from onchip.kernels.curves import activated, held
from onchip.kernels.launch import prefer_cache, starts_early

VECTOR = tl.constexpr(8)  # numbers of 16 bits in 16 bytes
ALONE = 2  # rows that go without tensor cores: 4 would take 60% of a GPU's instructions, and twice as long where clocks are low
FLIGHT = 8  # loads of W that a thread has on their way: 128 bytes, so that two kernels' programs fit on a multiprocessor side by side
FLIGHT_OF_ONE = 16  # of one row: a step of Qwen3-0.6B 669 to 642 us, of Llama-3-8B 3,960 to 3,934; of two rows that one 4,169 to 4,549
LINE = 64  # columns of 16 bits that a warp reads side by side on tensor cores: 128 bytes, as pieces of 64 out of 512 come at half of memory's speed
FILL = 3  # programs a multiprocessor, before a warp gets more rows of W: 384 for qkv of Llama-3-8B, 2.9 each, take 18 us, 768 take 13
FULL = 0.75  # programs a multiprocessor, 32 KB in flight each, before a program gets 32 rows of W: 16 rows of x for 16 of W are as many bytes of L2 again
REGISTERS = 128  # of a thread of eight warps, so that a multiprocessor has two such programs; ptxas would take 138 of the widest (16 rows, gated)


class Tiles(NamedTuple):
    """`rows` of x; `block_n` rows of W a warp, on tensor cores a program; `block_k` columns a warp and step, `depth` steps ahead; `slab` rows of x a product
    on tensor cores, 0 without."""

    rows: int
    block_n: int
    block_k: int
    depth: int
    warps: int
    slab: int

    def __str__(self):
        rows = f"{self.block_n} rows of W a program on tensor cores, {self.rows} of x" if self.slab else f"{self.block_n} rows of W a warp"
        return f"{rows}, {self.block_k} columns a warp and step, {self.depth} steps ahead, {self.warps} warps"


# ---- device


@triton.jit
def _weights(w_ptr, norm_ptr, w_at, real, col, WIDTH: tl.constexpr, PARTS: tl.constexpr, SLAB: tl.constexpr):
    """What a step reads that no kernel before this one has made: tiles of W, and the norm's weight [WARPS, 1, BLOCK_K], or again for each row of x."""
    found = ()
    of_w, of_norm = col, col
    if SLAB:
        of_w, of_norm = tl.expand_dims(col, 2), tl.broadcast_to(col, (SLAB, col.shape[1], col.shape[2], col.shape[3]))
    for part in tl.static_range(PARTS):
        found += (tl.load(w_ptr + w_at[part] + of_w, mask=real & (of_w < WIDTH), other=0.0, eviction_policy="evict_first"),)
    if norm_ptr is not None:
        found += (tl.load(norm_ptr + of_norm, mask=of_norm < WIDTH, other=0.0),)
    return found


@triton.jit
def _inputs(x_ptr, x_at, there, col, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """Rows of x: a tile each, or one of SLAB."""
    found = ()
    for m in tl.static_range(TILES):
        found += (tl.load(x_ptr + x_at[m] + col, mask=there[m] & (col < WIDTH), other=0.0),)
    return found


@triton.jit
def _folded(x):
    """Sums of 8 neighbours of the last axis, which one thread has. x [.., .., columns], or its columns in two axes."""
    COLUMNS: tl.constexpr = x.shape[2] if len(x.shape) == 3 else x.shape[2] * x.shape[3]
    return tl.sum(x.reshape(x.shape[0], x.shape[1], COLUMNS // VECTOR, VECTOR), 3)


@triton.jit
def _operand(x, LINES: tl.constexpr, SLAB: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [SLAB, WARPS, LINES / SLAB, BLOCK_K / 32, 32] as a product takes it, [WARPS, LINES, BLOCK_K], its columns in the order in which registers hold them:
    of 32, a thread has 8 neighbours where `mma.sync` wants four times two. Both sides agree, so nothing moves between threads."""
    x = x.reshape(SLAB, WARPS, LINES // SLAB, BLOCK_K // 32, 4, 2, 2, 2)
    return x.permute(1, 2, 0, 3, 5, 6, 4, 7).reshape(WARPS, LINES, BLOCK_K)


@triton.jit
def _step(sums, squares, own, given, norm_ptr, offset,
          PARTS: tl.constexpr, TILES: tl.constexpr, SLAB: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The sums of products, PARTS times TILES of them, and of squares with one step more."""
    x, new_squares, new_sums = (), (), ()
    for m in tl.static_range(TILES):
        wide = given[m].to(tl.float32)
        if norm_ptr is None:
            new_squares += (squares[m],)
        else:
            new_squares += (squares[m] + _folded(wide * wide),)
            wide *= own[PARTS].to(tl.float32) + offset
        if SLAB:
            x += (_operand(wide.to(given[m].dtype), SLAB, SLAB, WARPS, BLOCK_K).permute(0, 2, 1),)
        else:
            x += (wide,)
    for part in tl.static_range(PARTS):
        w = own[part]
        for m in tl.static_range(TILES):
            if SLAB:
                new_sums += (tl.dot(_operand(w, SLAB * w.shape[2], SLAB, WARPS, BLOCK_K), x[m], sums[part * TILES + m]),)
            else:
                new_sums += (sums[part * TILES + m] + _folded(w.to(tl.float32) * x[m]),)
    return new_sums, new_squares


@triton.jit
def _total(sums, DOT: tl.constexpr):
    """Of all threads of a warp, or of all warps: [WARPS, BLOCK_N, 1], or [1, BLOCK_N, SLAB]."""
    if DOT:
        found = tl.sum(sums, 0, keep_dims=True)
    else:
        found = tl.sum(sums, 2, keep_dims=True)
    return found


@triton.jit
def _total_of_squares(squares, DOT: tl.constexpr):
    """[WARPS, 1, 1], or [1, 1, SLAB]."""
    if DOT:
        found = tl.sum(tl.sum(squares, 2), 1)[None, None, :]
    else:
        found = tl.sum(squares, 2, keep_dims=True)
    return found


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr, x_stride, w_ptr, w_stride, norm_ptr, bias_ptr, residual_ptr, residual_stride, y_ptr, rows, outs, eps, offset, alpha, limit, down, apart,
    WIDTH: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr, CONSTANT: tl.constexpr, SLAB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Gates are rows `down` n of W, ups `apart` further on. Tiles of W are [WARPS, BLOCK_N, BLOCK_K], a warp's rows its own; on tensor cores
    [SLAB, WARPS, BLOCK_N / SLAB, BLOCK_K / 32, 32], a warp's columns its own: beside the columns Triton gives lanes to the first axis, and warps to the next.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if not CONSTANT:
            tl.extra.cuda.gdc_wait()
    DOT: tl.constexpr = SLAB > 0
    PARTS: tl.constexpr = 1 if ACT == "" else 2
    TILES: tl.constexpr = ROWS // SLAB if DOT else ROWS
    EACH: tl.constexpr = SLAB if DOT else 1
    STEP: tl.constexpr = WARPS * BLOCK_K if DOT else BLOCK_K
    if DOT:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
        line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N // SLAB)[None, None, :, None, None] * SLAB + tl.arange(0, SLAB)[:, None, None, None, None]
        col = tl.arange(0, WARPS)[None, :, None, None] * BLOCK_K + tl.arange(0, BLOCK_K // 32)[None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        x_row, to_row = tl.arange(0, SLAB)[:, None, None, None], tl.arange(0, SLAB)[None, None, :]
        squares_of: tl.constexpr = (SLAB, WARPS, BLOCK_K // VECTOR)
        sums_of: tl.constexpr = (WARPS, BLOCK_N, SLAB)
    else:
        warp = tl.arange(0, WARPS)[:, None, None]
        n = (tl.program_id(0) * WARPS + warp) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
        line = n
        col = tl.arange(0, BLOCK_K)[None, None, :] + warp * 0
        x_row, to_row = warp * 0, 0
        squares_of: tl.constexpr = (WARPS, 1, BLOCK_K // VECTOR)
        sums_of: tl.constexpr = (WARPS, BLOCK_N, BLOCK_K // VECTOR)
    real, real_line = n < outs, line < outs
    w_at, biases, own = (), (), ()
    for part in tl.static_range(PARTS):
        w_at += ((line * down + part * apart).to(tl.int64) * w_stride,)
        if bias_ptr is not None:
            biases += (tl.load(bias_ptr + n * down + part * apart, mask=real, other=0.0),)
    for d in tl.static_range(DEPTH):
        own += (_weights(w_ptr, norm_ptr, w_at, real_line, col + d * STEP, WIDTH, PARTS, SLAB),)
    if EARLY:  # in every program: whoever comes after this kernel must find the results of the one before it
        tl.extra.cuda.gdc_wait()
    x_at, there, sums, squares, given, streams = (), (), (), (), (), ()
    for m in tl.static_range(TILES):
        row, to = m * EACH + x_row, m * EACH + to_row
        x_at += (row * x_stride,)
        there += (row < (rows if DOT else ROWS),)  # alone, there are as many as ROWS
        squares += (tl.zeros(squares_of, tl.float32),)
        if residual_ptr is not None:
            streams += (tl.load(residual_ptr + to * residual_stride + n, mask=real & (to < (rows if DOT else ROWS)), other=0.0),)
    for _ in tl.static_range(PARTS * TILES):
        sums += (tl.zeros(sums_of, tl.float32),)
    for d in tl.static_range(DEPTH):
        given += (_inputs(x_ptr, x_at, there, col + d * STEP, WIDTH, TILES),)
    for first in range(0, WIDTH, DEPTH * STEP):
        for d in tl.static_range(DEPTH):
            sums, squares = _step(sums, squares, own[d], given[d], norm_ptr, offset, PARTS, TILES, SLAB, WARPS, BLOCK_K)
            after = col + (first + (DEPTH + d) * STEP)
            own = own[:d] + (_weights(w_ptr, norm_ptr, w_at, real_line, after, WIDTH, PARTS, SLAB),) + own[d + 1 :]  # noqa: RUF005 -- Triton knows no other
            given = given[:d] + (_inputs(x_ptr, x_at, there, after, WIDTH, TILES),) + given[d + 1 :]  # noqa: RUF005
    for m in tl.static_range(TILES):
        y, up = _total(sums[m], DOT), _total(sums[(PARTS - 1) * TILES + m], DOT)
        if norm_ptr is not None:
            rstd = tl.rsqrt(_total_of_squares(squares[m], DOT) / WIDTH + eps)
            y, up = y * rstd, up * rstd
        if bias_ptr is not None:
            y, up = y + biases[0].to(tl.float32), up + biases[PARTS - 1].to(tl.float32)
        if ACT == "clipped":
            y, up = tl.minimum(y, limit, tl.PropagateNan.ALL), held(up, -limit, limit) + 1
        if PARTS == 2:
            y = activated(y, ACT, alpha, True) * up
        if residual_ptr is not None:
            y += streams[m].to(tl.float32)
        to = m * EACH + to_row
        tl.store(y_ptr + to * outs + n, y.to(y_ptr.dtype.element_ty), mask=real & (to < (rows if DOT else ROWS)))


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """The most rows of W a warp that still make FILL programs a multiprocessor, and the most steps ahead that FLIGHT allows; then the other shapes."""
    _, width, *words = problem.variant.split()
    parts, width = 2 if act_of(words) else 1, int(width)
    columns = 256 if device.kind == "cuda" else 512  # 16 bytes a lane, of which AMD has 64
    if problem.rows <= ALONE:
        flight = FLIGHT_OF_ONE if problem.rows == 1 else FLIGHT
        shapes = [Tiles(problem.rows, n, columns, _depth(width, columns, n * parts, flight), 4, 0) for n in (4, 2, 1) if n * parts <= flight // 2]
        fits = [tiles for tiles in shapes if triton.cdiv(problem.width, tiles.block_n * tiles.warps) >= FILL * device.sms]
    else:
        slab = 8 if device.kind == "cuda" else 16
        rows = triton.cdiv(problem.rows, slab) * slab
        depth = lambda n, k: _depth(width, 8 * k, n * parts * k // 256, FLIGHT)  # noqa: E731
        lines, half = ([Tiles(rows, n, k, depth(n, k), 8, slab) for n in (32, 16) if n * parts <= 32] for k in (LINE, LINE // 2))
        shapes = lines + half
        fits = [tiles for tiles in lines if triton.cdiv(problem.width, tiles.block_n) >= FULL * device.sms] or lines[-1:]
    best = fits[0] if fits else shapes[-1]
    return [best, *(tiles for tiles in shapes if tiles != best)]


def _depth(width: int, columns: int, loads: int, flight: int) -> int:
    """Steps that are on their way together, of `columns` and `loads` a thread each: the fewest turns of the loop, all as long as the others or nearly so."""
    steps = triton.cdiv(width, columns)
    turns = triton.cdiv(steps, flight // loads)
    return triton.cdiv(steps, turns)


def act_of(words: list[str]) -> str:
    """The gate's activation among the words of a Problem; "" where there is no gate."""
    return next((word for word in words if word not in ("norm", "bias", "residual", "interleaved")), "")


def launch(problem: Rows, config: Tiles, x: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    """x [rows, in], weight [out, in], or [2 out, in] of a gated product; rows of both contiguous. Returns [rows, out]."""
    (rows, width), outs, words = x.shape, problem.width, problem.variant.split()[2:]
    down, apart = (2, 1) if "interleaved" in words else (1, outs)
    y = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    norm, residual = around.norm, around.residual
    early = starts_early(x)
    options = ({"launch_pdl": True} if early else {}) | ({"maxnreg": REGISTERS} if config.slab and torch.version.hip is None else {})
    tiles = {"SLAB": config.slab, "ROWS": config.rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "DEPTH": config.depth, "WARPS": config.warps}
    grid = (triton.cdiv(outs, config.block_n if config.slab else config.block_n * config.warps),)
    kernel = _linear[grid](
        x, x.stride(0) if rows > 1 else width, weight, weight.stride(0), None if norm is None else norm.weight, around.bias,
        residual, 0 if residual is None else residual.stride(0), y, rows, outs, *((0.0, 0.0) if norm is None else norm[1:]),
        around.alpha, around.limit, down, apart,
        WIDTH=width, ACT=act_of(words), EARLY=early, CONSTANT=around.constant, **tiles, num_warps=config.warps, num_stages=1, **options,
    )  # fmt: skip
    if early:
        prefer_cache(kernel)
    return y
