"""What a score reads of each query and key, on Hopper: tiles of it come by the copy engine, out of a bias [.., i, j]; what it looks up by the distance
between query and key alone, as T5's does, each thread reads itself.

All of a head's distances are one row of memory, of which 64 x 128 scores need 191 numbers. A thread has columns c and c + 1 of rows r and r + 8 of each eight
columns of a product: at each distance lie those three that go with it too, four numbers of float32 in units of the scores, which one instruction brings to
where the product begins. The multiprocessor's cache holds them, since the copying warp has asked for them. The rows are made once, by the score function
itself in plain torch, and remembered while what it reads is unchanged.
The gradients of such a row are sums of dS along its diagonals. A thread adds up the two that it has of each, and takes every other sum of the thread that has
the next row; then it adds to places in memory that no other thread of its warp adds to, so that an instruction is 512 bytes side by side. Those of eight rows
are added up in plain torch.
"""

import torch
import triton

from onchip.core.problem import Attention, Operands
from onchip.core.trace import Counting, Traced
from onchip.kernels.attention.tile import describable, remembered
from onchip.kernels.hopper import describe, gl, gluon

BESIDE = 256  # distances before the first, and behind the last, that a tile at an end may ask for
BEFORE = gl.constexpr(BESIDE)


# ---- device


@gluon.jit
def distances_of(rows, b, head, row, len_rows, N: gl.constexpr, layout: gl.constexpr):
    """Where a thread finds what its scores of 64 rows from `row` on, and columns from 0 on, begin with: [8 w + g, n // 8, c // 2, 2 r + c % 2] for a
    product's rows 16 w + 8 r + g and columns 8 n + c."""
    tile = gl.zeros([64, N], gl.float32, layout).reshape([4, 2, 8, N // 8, 4, 2]).permute((0, 2, 3, 4, 1, 5)).reshape([32, N // 8, 4, 4])
    own: gl.constexpr = tile.type.layout
    below = gl.arange(0, 32, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, own))))
    two = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, own)))) * 2
    below = (below + below // 8 * 8)[:, None][:, :, None][:, :, :, None]
    ahead = len_rows + BEFORE - row + two[None, :][:, None, :][:, :, :, None] - below
    return rows[0] + b.to(gl.int64) * rows[5] + head.to(gl.int64) * rows[6] + ahead * 4


@gluon.jit
def by_distance(at, n, N: gl.constexpr, layout: gl.constexpr):
    """What the scores of columns from `n` on begin with."""
    own: gl.constexpr = at.type.layout
    eight = gl.arange(0, N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, own)))) * 32  # constants of the code
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, own))))
    found = gl.load(at + n * 4 + (eight[None, :][:, :, None][:, :, :, None] + four[None, :][:, None, :][:, :, None, :]))
    found = found.reshape([4, 8, N // 8, 4, 2, 2]).permute((0, 4, 1, 2, 3, 5)).reshape([64, N])
    return gl.convert_layout(found, layout)


@gluon.jit
def ask_for(rows, b, head, row, len_rows, n, M: gl.constexpr, N: gl.constexpr):
    """Let the cache fetch what [M, N] scores from (`row`, `n`) on begin with, eight distances a line; by one warp, a tile ahead."""
    LINES: gl.constexpr = 32 if M + N <= 256 else 64
    line = gl.minimum(gl.arange(0, LINES, layout=gl.BlockedLayout([1], [32], [1], [0])), (M + N) // 8)
    at = rows[0] + b.to(gl.int64) * rows[5] + head.to(gl.int64) * rows[6] + (len_rows + BEFORE - row - M + n + 8 * line) * 4
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _sums(n: int) -> str:
    """PTX: `n` slopes of a thread to their sums. Of eights of columns k, row r's and, of those behind, row r + 8's are of the same distances: x and y, of even
    columns and odd ones. In odd rows a distance is one less, so that x goes with the y of the row before, two columns back: where that is another eight's,
    with that eight's; and in even ones with the y of the next row.
    """
    last = n // 4 - 1
    code = "mov.u32 $0, 0; { .reg .f32 x<20>, y<20>, u<20>, o, r; .reg .pred odd, first; .reg .u32 lane, t, from; mov.u32 lane, %laneid;"
    code += "and.b32 t, lane, 4; setp.ne.u32 odd, t, 0; and.b32 t, lane, 3; setp.eq.u32 first, t, 0; and.pred first, odd, first; add.u32 from, lane, 4;"
    code += "sub.u32 t, lane, 5; selp.b32 from, t, from, odd; sub.u32 t, lane, 1; selp.b32 from, t, from, first;"
    for k in range(-1, last + 1):
        for c, name in enumerate("xy"):
            both = [f"${n + 4 * k + c}"] * (k >= 0) + [f"${n + 4 * k + 6 + c}"] * (k < last)
            code += f"{'add' if len(both) == 2 else 'mov'}.f32 {name}{k + 1}, {', '.join(both)};"
    code += "selp.f32 u0, x0, 0f00000000, first;"
    for k in range(-1, last + 1):
        behind = f"x{k + 2}" if k < last else "0f00000000"
        code += f"selp.f32 o, {behind}, x{k + 1}, first; shfl.sync.idx.b32 r, y{k + 1}, from, 31, 0xffffffff; add.f32 u{k + 2}, o, r;"
    code += f"red.relaxed.gpu.global.add.v2.f32 [${2 * n} + -1016], {{u0, u1}};"
    for k in range(0, last, 4):
        code += f"red.relaxed.gpu.global.add.v4.f32 [${2 * n} + {256 * k}], {{{', '.join(f'u{k + 2 + each}' for each in range(4))}}};"
    return code + "}"


@gluon.constexpr_function
def _sums_operands(n: int) -> str:
    return ",".join(["=r"] * n + ["f"] * n + ["l"] * n)


@gluon.jit
def add_by_distance(sums, b, head, row, len_rows, n, slopes, layout: gl.constexpr):
    """Add slopes [64, N] of rows from `row` on and columns from `n` on to `sums` [.., distance // 32, odd warp, row % 8, column % 8 // 2, distance // 8 % 4],
    of distances less what columns and rows are more than multiples of 8, and, so that odd warps begin where even ones do, 16 more of those."""
    N: gl.constexpr = slopes.shape[1]
    CODE: gl.constexpr = _sums(N // 2)
    OPERANDS: gl.constexpr = _sums_operands(N // 2)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :]
    eight = ((len_rows + BEFORE + 31) // 32 * 32 - row + n) // 8 + cols // 8 - rows // 32 * 4 - rows // 8 % 2
    at = sums[9] + b.to(gl.int64) * sums[14] + head.to(gl.int64) * sums[15]
    at += eight // 4 * 256 + rows // 16 % 2 * 128 + rows % 8 * 16 + cols % 8 // 2 * 4 + eight % 4  # only a thread's first one is looked at
    gl.inline_asm_elementwise(CODE, OPERANDS, [slopes, at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=N // 2)


# ---- host


def pair_view(t, axes: str, rows: int = 64):
    """A tensor of `axes` and i, j as TMA describes it, [batch or 1, heads or 1, i, j], and how far a sequence, a head and a query are in its dimensions.

    What one dimension repeats is taken once, of rows `rows`. A layout that TMA does not know (rows of no multiple of 16 bytes, a base that is not aligned)
    is copied.
    """
    if axes == "hb":
        t = t.transpose(0, 1)
    for n, axis in enumerate("bh"):
        if axis not in axes or t.stride(n) == 0:
            t = (t.select(n, 0) if axis in axes else t).unsqueeze(n)
    steps = (int(t.shape[0] > 1), int(t.shape[1] > 1), int(t.stride(2) > 0))
    if not steps[2]:
        t = t[:, :, :rows]
    if not describable(t):
        unit = 16 // t.element_size()
        t = t.new_empty((*t.shape[:3], triton.cdiv(t.shape[3], unit) * unit))[..., : t.shape[3]].copy_(t)
    return t, steps


def pair_tiles(t, axes: str, rows: int, columns: int):
    """Tiles of `pair_view`, and its steps."""
    t, steps = pair_view(t, axes)
    return describe(t, rows, columns), steps


def laid_out(p: Attention, x: Operands, q, axes: str, of_keys: bool = False):
    """The call with what its scores begin with, [batch, heads, distances, 4] (`_rows`), in place of a score; with queries for which the scale is positive,
    since it is in units of the scores; and the sign that they have now. `of_keys`: rows are keys, and columns queries."""
    sign = (x.scale > 0) - (x.scale < 0)
    if sign <= 0:
        q, x = q * sign, x._replace(scale=-x.scale or 1.0)
    what = ("distances", p.score.text, p.batch, p.heads, p.len_q, p.len_k, x.scale, of_keys)
    rows = remembered(what, x.score, q.device, lambda: _rows(p, x, axes, of_keys, q.device))
    return p._replace(score=None), x._replace(score=(rows.expand(p.batch, p.heads, -1, -1),)), q, sign


def _places(p: Attention) -> int:
    return triton.cdiv(p.len_q + p.len_k + 2 * BESIDE, 16) * 16


@torch.no_grad()
def _rows(p: Attention, x: Operands, axes: str, of_keys: bool, device: torch.device):
    """[batch or 1, heads or 1, distances, 4]: at e are numbers e, e + 1, e - 8 and e - 7 of those where a column is e - BESIDE - all rows ahead of a row."""
    made = _looked_up(p, x.score, axes, of_keys, device) / x.scale
    return torch.stack((made[..., 8:-1], made[..., 9:], made[..., :-9], made[..., 1:-8]), -1)


def _looked_up(p: Attention, tensors, axes: str, of_keys: bool, device: torch.device):
    """[batch or 1, heads or 1, 8 + distances + 1]."""
    batch, heads = (size if axis in axes else 1 for axis, size in (("b", p.batch), ("h", p.heads)))
    count = 8 + _places(p) + 1
    at = lambda n, *shape: torch.arange(n, device=device).view(shape)  # noqa: E731
    ahead = at(count, 1, 1, 1, count) - (8 + BESIDE + (p.len_k if of_keys else p.len_q))
    distance = (-ahead if of_keys else ahead).clamp(1 - p.len_q, p.len_k - 1)
    lengths = (torch.full((), n, device=device) for n in (p.len_q, p.len_k))  # by a launch: a CUDA graph may capture it, and nobody waits
    zero = torch.zeros(batch, heads, 1, count, device=device)
    place = at(batch, batch, 1, 1, 1), at(heads, heads, 1, 1), torch.zeros_like(distance), distance
    return Traced(p.score.name, p.score.text).run(zero, *place, *lengths, *tensors)[:, :, 0]


def empty_sums(p: Attention, axes: str, device: torch.device):
    """What `add_by_distance` adds to, [batch or 1, heads or 1, distances // 32, 256]."""
    return torch.zeros(p.batch if "b" in axes else 1, p.heads if "h" in axes else 1, _places(p) // 32 + 2, 256, device=device)


class _LookUp(torch.autograd.Function):
    """Numbers of a tensor, whose gradients are added by atomics: torch's own sort them first, half a millisecond where many are of one number."""

    @staticmethod
    def forward(ctx, t, at):
        ctx.save_for_backward(at)
        ctx.shape = t.shape
        return t.flatten()[at]

    @staticmethod
    def backward(ctx, d):
        (at,) = ctx.saved_tensors
        return d.new_zeros(ctx.shape.numel()).index_add_(0, at.flatten(), d.flatten()).view(ctx.shape), None


class _Scattered(torch.overrides.TorchFunctionMode):
    """Inside, what is looked up is a `_LookUp`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.index.Tensor or not args[0].requires_grad:
            return func(*args, **(kwargs or {}))
        t, at = args[0], 0
        for index, size in zip(args[1], t.shape, strict=True):
            at = at * size + torch.where(index < 0, index + size, index)
        return _LookUp.apply(t, at)


def slopes_of(p: Attention, tensors, axes: str, sums) -> tuple:
    """The gradients of what a score looks up, of sums of dS where rows are keys."""
    batch, heads, places, _ = sums.shape
    late = -(p.len_k + BESIDE) % 32  # before the first that was looked up
    each = sums.view(batch, heads, places, 2, 8, 4, 4).permute(0, 1, 3, 4, 2, 6, 5).flatten(4, 5)  # [.., odd warp, row % 8, eight, column % 8 // 2]
    both = torch.zeros(batch, heads, 8, 4 * places + 2, 4, device=sums.device)
    both[:, :, :, : 4 * places] = each[:, :, 0]
    both[:, :, :, : 4 * places - 2] += each[:, :, 1, :, 2:]
    both[:, :, 1::2, 1:, 0] = both[:, :, 1::2, :-1, 0].clone()  # of odd rows' first columns: with the eight before
    held = torch.zeros(batch, heads, 8, 32 * places + 64, device=sums.device)  # row % 8, distance - distance % 8 + column % 8
    held[..., 8 : 8 + 32 * places + 16 : 2] = both.flatten(3)
    of = held.as_strided((batch, heads, 8, _places(p)), (*held.stride()[:2], held.stride(2) + 1, 1), 8 + late).sum(2)
    leaves = [t.detach().float().requires_grad_() if t.requires_grad else t for t in tensors]  # thousands of distances may be one bucket's
    with torch.enable_grad(), _Scattered(), Counting(torch.nn.functional.pad(of, (8, 1))[:, :, None] != 0):
        made = _looked_up(p, leaves, axes, True, sums.device)
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(made[..., 8:-1], wanted, of, allow_unused=True, materialize_grads=True))
    return tuple(next(found).to(t.dtype) if t.requires_grad else None for t in tensors)


__all__ = ["add_by_distance", "ask_for", "by_distance", "distances_of", "empty_sums", "laid_out", "pair_tiles", "pair_view", "slopes_of"]
