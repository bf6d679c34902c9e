"""RMSNorm and LayerNorm of wide rows of 16 bits by clusters that stay, forward and backward (`norm.py` and `norm_backward.py` have the formulas).

A program of a cluster has the same PARTS x 256 WARPS columns of one row after another: its weight and bias stay in registers, and so do the sums of their
gradients. The next rows are on their way to a ring of STAGES buffers in shared memory, by copies that one thread starts (`cp.async.bulk`), and are read from
there twice: for the sums of the row, and once the sums of all programs have come, which may be while the next row is summed up (LATER). Warps go on by
themselves: they hand their sums to the first warp, which tells the other programs, and say when they are past what a copy has brought, in whose place the first
warp has the next row copied. LATER, they may be a turn ahead of it: what they meet it by is there twice, for even turns and for odd ones.
Bytes moved: the floor, rows width (x + y) or rows width (dy + x + dx), and the parameters, or their partial gradients in float32, once a cluster.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from onchip.core.device import Device
from onchip.core.norms import Norm
from onchip.core.problem import Rows
from onchip.kernels.hopper import advance, start_next
from onchip.kernels.launch import starts_early

FIT, FIT_PAIRS = 0.85, 0.97  # of the multiprocessors of a GPU, those that clusters of 16 find: one cluster more would wait for another's end; and pairs
TURNS = 4  # rows of a cluster from which on its beginning is hidden
BOXES, ROUND = 4, 2  # of turns one after the other, and the bits of such a number
TOLD, FREE = 1, 3  # hardware barriers, behind each that of odd turns: the sums of a program's warps are there; none of them reads the row any more


class Tiles(NamedTuple):
    """`clusters` of `ctas` programs that each have `parts` times 256 columns a warp; `stages`: rows in shared memory; `later`: a row's sums are heard while the
    next row is summed up; `registers` of a thread at most, 0: no limit."""

    clusters: int
    ctas: int
    parts: int
    warps: int
    stages: int
    later: bool = False
    registers: int = 0

    def __str__(self):
        return f"1x{self.parts * self.warps * 256} tiles, {self.warps} warps a program, {self.clusters} clusters of {self.ctas} that stay, {self.stages} stages"


# By LayerNorm or not, then by columns; `clusters` are here those that share multiprocessors. Behind them microseconds of 128 MiB in bfloat16 on an H200, in
# brackets of the kernels that others go by, or of sums heard in the same turn. RMSNorm of 64k and 128k columns 75 and 75 (69, 72), backward 64k 108 (107).
STAY = {
    False: {1 << 18: Tiles(2, 16, 8, 8, 3, registers=128)},  # 72 (76); one a multiprocessor, later: 73
    True: {
        1 << 15: Tiles(1, 2, 8, 8, 6, True),  # 75 (78)
        1 << 16: Tiles(1, 4, 4, 16, 6),  # 76 (80); later 78
        1 << 17: Tiles(1, 8, 8, 8, 6, True),  # 76 (82)
        1 << 18: Tiles(1, 16, 8, 8, 6, True),  # 76 (80)
    },
}
STAY_BACKWARD = {
    False: {
        1 << 14: Tiles(1, 2, 4, 8, 6, True),  # 111 (121)
        1 << 15: Tiles(1, 4, 2, 16, 6),  # 107 (119); later 110
        1 << 17: Tiles(1, 16, 2, 16, 6, True),  # 105 (110; 115)
        1 << 18: Tiles(1, 16, 8, 8, 3),  # 111 (132); later 113
    },
    True: {
        1 << 14: Tiles(1, 2, 2, 16, 6, True),  # 113 (122)
        1 << 15: Tiles(1, 4, 4, 8, 6, True),  # 111 (124; 114)
        1 << 16: Tiles(1, 8, 4, 8, 6, True),  # 111 (128; 113); pieces of 16,384 columns and three stages 121
        1 << 17: Tiles(1, 16, 2, 16, 6, True),  # 111 (139; 117)
        1 << 18: Tiles(1, 16, 8, 8, 3),  # 121 (149); later 127, as three stages are too few; 16 warps 132, of which 128 registers are too few
    },
}
GRADIENTS = {False: "x weight", True: "x weight bias"}  # that the backward kernel makes


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for. `arrays` come by copies, 1 or 2; `cluster`: on a GPU, else a program has all of a row."""

    layer: bool
    arrays: int
    ctas: int
    parts: int
    warps: int
    stages: int
    later: bool
    cluster: bool

    width = property(lambda self: self.ctas * self.parts * self.warps * 256)  # columns of a row
    block = property(lambda self: self.warps * 256)  # of a part
    values = property(lambda self: 2 if self.layer else 1)  # that a program tells


# ---- what programs of a cluster tell each other, and copies that nobody waits for


@triton.constexpr_function
def _places(c: Shape) -> tuple[int, int, int]:
    """Bytes of a box, and where the sums of warps (LATER of even and of odd turns) and the mbarriers of stages begin, behind all boxes."""
    box = 16 + 4 * c.values * c.ctas
    return box, BOXES * box, BOXES * box + (1 + c.later) * 4 * c.values * c.warps + 8 & -8


@triton.constexpr_function
def _begin(c: Shape) -> str:
    """PTX: boxes, each of an mbarrier and a number of each value and program, room for a number of each value and warp, and an mbarrier for each stage; the
    address of the first."""
    box, _, full = _places(c)
    told = [f"[$0 + {n * box}]" for n in range(BOXES)]
    came = [f"[$0 + {full + 8 * n}]" for n in range(c.stages)]
    return (
        "{ .reg .pred one; .reg .b32 t; "
        f".shared .align 16 .b8 box[{full + 8 * c.stages}]; "
        "mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; mov.u32 $0, box; "
        + "".join(f"@one mbarrier.init.shared::cta.b64 {bar}, 1; " for bar in told + came)
        + "@one fence.mbarrier_init.release.cluster; @one fence.proxy.async; "
        + "".join(f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, {bar}, {box - 16}; " for bar in told)
        + "}"
    )


@triton.constexpr_function
def _copy(c: Shape, wait: bool) -> str:
    """PTX: this program's piece of a row of each array to a stage; if `wait`, when all warps are past what lies there, for which the first one waits.

    Operands: a result that is nothing, the box, the stage, whether, the turn, the rows' addresses. The ring is all that Triton has put in shared memory.
    """
    piece = 2 * c.parts * c.block
    copies = "".join(
        f"mad.lo.u64 from, rank, {piece}, ${5 + array}; "
        f"@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [from], {piece}, [bar]; add.u32 to, to, {piece}; "
        for array in range(c.arrays)
    )
    threads = 32 * c.warps
    turn, free = (f"and.b32 to, $4, 1; add.u32 to, to, {FREE}; ", "to") if c.later else ("", FREE)
    until = f"{turn}setp.ge.u32 one, t, 32; @one bar.arrive {free}, {threads}; @one bra past_${{:uid}}; bar.sync {free}, {threads}; " if wait else ""
    return (
        f"{{ .reg .pred one; .reg .b32 t, to, bar; .reg .b64 from, rank; mov.u32 t, %tid.x; {until}setp.eq.u32 one, t, 0; setp.ne.and.u32 one, $3, 0, one; "
        f"mad.lo.u32 bar, $2, 8, $1; add.u32 bar, bar, {_places(c)[2]}; mov.u32 to, global_smem; mad.lo.u32 to, $2, {c.arrays * piece}, to; "
        f"mov.u32 t, %cluster_ctarank; cvt.u64.u32 rank, t; @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {c.arrays * piece}; {copies}"
        "past_${:uid}: mov.u32 $0, 0; }"
    )


@triton.constexpr_function
def _came(c: Shape) -> str:
    """PTX: waits for a row. Operands: a result that is nothing, the box, the stage, the phase."""
    return (
        f"{{ .reg .pred done; .reg .b32 bar; mad.lo.u32 bar, $2, 8, $1; add.u32 bar, bar, {_places(c)[2]}; "
        "again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], $3; @!done bra again_${:uid}; mov.u32 $0, 0; }"
    )


@triton.constexpr_function
def _folded(x: str, lanes: int) -> str:
    """PTX: the sum of x over `lanes` lanes, in all of them."""
    steps = (lanes >> n for n in range(1, lanes.bit_length()))
    return "".join(f"shfl.sync.bfly.b32 o, {x}, {step}, 0x1f, 0xffffffff; add.f32 {x}, {x}, o; " for step in steps)


@triton.constexpr_function
def _spread(mean: str, square: str, lanes: int, piece: int) -> str:
    """PTX: mean and sum of square deviations of `lanes` pieces of one length, from those of each (Chan, Golub and LeVeque, 1983)."""
    return (
        f"mov.f32 d, {mean}; {_folded(mean, lanes)}mul.f32 {mean}, {mean}, {1 / lanes!r}; "
        f"sub.f32 d, d, {mean}; mul.f32 d, d, d; fma.rn.f32 {square}, d, {float(piece)!r}, {square}; {_folded(square, lanes)}"
    )


@triton.constexpr_function
def _tell(c: Shape, piece: int) -> str:
    """PTX: of each value the sum over warps, or mean and sum of square deviations of warps' pieces, to the boxes of all, from the first warp; the others go on.

    Operands: a result that is nothing, the box, the turn, and the values, each warp's own."""
    values, ctas, warps = c.values, c.ctas, c.warps
    box, sums, _ = _places(c)
    keep = "".join(f"@one st.shared.f32 [t + {sums + 4 * v * warps}], ${3 + v}; " for v in range(values))
    load = "".join(f"ld.shared.f32 x{v}, [t + {sums + 4 * v * warps}]; " for v in range(values))
    fold = _spread("x0", "x1", warps, piece) if piece else "".join(_folded(f"x{v}", warps) for v in range(values))
    odd = f"and.b32 odd, $2, 1; mad.lo.u32 here, odd, {4 * values * warps}, $1; add.u32 odd, odd, {TOLD}; " if c.later else ""
    at, told = ("here", "odd") if c.later else ("$1", TOLD)
    send = "".join(f"@to st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there + {4 * v * ctas}], x{v}, [bar]; " for v in range(values))
    return (
        "{ .reg .pred to, one; .reg .b32 t, u, there, bar, here, odd; .reg .f32 x0, x1, o, d; mov.u32 t, %tid.x; and.b32 u, t, 31; shr.u32 t, t, 5; "
        f"{odd}setp.eq.u32 one, u, 0; setp.ne.u32 to, t, 0; shl.b32 t, t, 2; add.u32 t, t, {at}; {keep}"
        f"@to bar.arrive {told}, {32 * warps}; @to bra told_${{:uid}}; bar.sync {told}, {32 * warps}; "
        f"and.b32 t, u, {warps - 1}; shl.b32 t, t, 2; add.u32 t, t, {at}; {load}{fold}"
        f"and.b32 t, $2, {BOXES - 1}; mad.lo.u32 here, t, {box}, $1; setp.lt.u32 to, u, {ctas}; mov.u32 there, %cluster_ctarank; "
        "mad.lo.u32 there, there, 4, here; add.u32 there, there, 16; @to mapa.shared::cluster.u32 there, there, u; @to mapa.shared::cluster.u32 bar, here, u; "
        f"{send}told_${{:uid}}: mov.u32 $0, 0; }}"
    )


@triton.constexpr_function
def _heard(values: int, ctas: int) -> str:
    """PTX: waits for a turn; then value v of lane n is number n % ctas of those that came. Operands: results, the box and the turn."""
    size = 4 * values * ctas
    return (
        ".reg .pred one, done; .reg .b32 t, here, odd; .reg .f32 o, d; "
        f"and.b32 t, ${values + 1}, {BOXES - 1}; mad.lo.u32 here, t, {16 + size}, ${values}; "
        f"shr.u32 odd, ${values + 1}, {ROUND}; and.b32 odd, odd, 1; mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; "
        "again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 done, [here], odd; @!done bra again_${:uid}; "
        f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [here], {size}; and.b32 t, t, {ctas - 1}; mad.lo.u32 here, t, 4, here; "
        + "".join(f"ld.shared.f32 ${v}, [here + {16 + 4 * v * ctas}]; " for v in range(values))
    )


@triton.constexpr_function
def _hear(c: Shape, piece: int) -> str:
    """PTX: sums of what was told, or moments of pieces. Operands: results, the box and the turn."""
    values, ctas = c.values, c.ctas
    return "{ " + _heard(values, ctas) + (_spread("$0", "$1", ctas, piece) if piece else "".join(_folded(f"${v}", ctas) for v in range(values))) + "}"


@gluon.jit
def begin(C: gl.constexpr):
    box = 0
    if C.cluster:
        box = gl.inline_asm_elementwise(_begin(C), "=&r,r", [C.ctas], dtype=gl.int32, is_pure=False, pack=1)
    return box


@gluon.jit
def together(C: gl.constexpr):
    """Until all programs of the cluster have begun."""
    if C.cluster:
        gl.inline_asm_elementwise(
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def tell(x, y, box, turn, PIECE: gl.constexpr, C: gl.constexpr):
    """x [ctas, warps], and of LayerNorm y, to all programs of the cluster: as sums, or where there is a PIECE, columns of a warp, as moments."""
    if C.cluster and C.values == 1:
        gl.inline_asm_elementwise(_tell(C, PIECE), "=&r,r,r,f", [box, turn, x], dtype=gl.int32, is_pure=False, pack=1)
    elif C.cluster:
        gl.inline_asm_elementwise(_tell(C, PIECE), "=&r,r,r,f,f", [box, turn, x, y], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def heard(x, y, box, turn, PIECE: gl.constexpr, C: gl.constexpr):
    """The sums of what was told in `turn`, or the row's moments, numbers; x and y [ctas, warps] are those of this program, where it has the whole row."""
    if C.cluster and C.values == 1:
        x, y = gl.inline_asm_elementwise(_hear(C, 0), "=&f,r,r", [box, turn], dtype=gl.float32, is_pure=False, pack=1), 0.0
    elif C.cluster:
        x, y = gl.inline_asm_elementwise(_hear(C, PIECE * C.warps), "=&f,=&f,r,r", [box, turn], dtype=(gl.float32, gl.float32), is_pure=False, pack=1)
    elif PIECE > 0:
        whole = gl.sum(gl.sum(x, 1), 0) * (1.0 / (C.ctas * C.warps))
        y = gl.sum(gl.sum(y + (x - whole) * (x - whole) * PIECE, 1), 0)
        x = whole
    else:
        x, y = gl.sum(gl.sum(x, 1), 0), gl.sum(gl.sum(y, 1), 0)
    return x, y


# ---- rows


@triton.constexpr_function
def layout(c: Shape) -> gl.BlockedLayout:
    """Of a part, [ctas, 256 warps]: a vector each thread, a row each program."""
    return gl.BlockedLayout([1, 8], [1, 32], [1, c.warps], [1, 0], cga_layout=[[1 << bit, 0] for bit in range(c.ctas.bit_length() - 1)])


@triton.constexpr_function
def shared(c: Shape) -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[1 << bit, 0] for bit in range(c.ctas.bit_length() - 1)])


@gluon.jit
def wide(x, C: gl.constexpr):
    """float32 of x; of bfloat16 by one instruction for each number."""
    if C.cluster and x.dtype == gl.bfloat16:
        code: gl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }"
        x = gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    return x.to(gl.float32)


@gluon.jit
def raised(w, offset, AGAIN: gl.constexpr, C: gl.constexpr):
    """w + offset, float32. AGAIN: made here of w as it is stored, and not kept from an earlier time in twice the registers."""
    if C.cluster and AGAIN:
        w = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2)
    w = wide(w, C)
    if offset is not None:
        w += offset
    return w


@gluon.jit
def of_warps(x, C: gl.constexpr):
    """Sums of each warp's columns, [ctas, warps]."""
    CTAS: gl.constexpr = C.ctas
    WARPS: gl.constexpr = C.warps
    return gl.sum(x.reshape([CTAS, WARPS, 256]), 2)


@gluon.jit
def columns(C: gl.constexpr):
    """Of the first part."""
    rank = gl.arange(0, C.ctas, layout=gl.SliceLayout(1, layout(C)))[:, None]
    return rank * (C.parts * C.block) + gl.arange(0, C.block, layout=gl.SliceLayout(0, layout(C)))[None, :]


@gluon.jit
def part(ring, stage, ARRAY: gl.constexpr, n: gl.constexpr, C: gl.constexpr):
    """Part n of a row of an array, float32."""
    return wide(ring.index((stage * C.arrays + ARRAY) * C.parts + n).load(layout(C)), C)


@gluon.jit
def fetch(ring, box, stage, live, turn, a, b, WAIT: gl.constexpr, C: gl.constexpr):
    """A row, to which a and of two arrays b point, on its way to a stage of the ring; if WAIT, when all warps are past what lies there."""
    PARTS: gl.constexpr = C.parts
    if C.cluster and C.arrays == 1:
        given = [box, stage, live.to(gl.int32), turn, a.to(gl.int64)]
        gl.inline_asm_elementwise(_copy(C, WAIT), "=&r,r,r,r,r,l", given, dtype=gl.int32, is_pure=False, pack=1)
    elif C.cluster:
        given = [box, stage, live.to(gl.int32), turn, a.to(gl.int64), b.to(gl.int64)]
        gl.inline_asm_elementwise(_copy(C, WAIT), "=&r,r,r,r,r,l,l", given, dtype=gl.int32, is_pure=False, pack=1)
    else:
        if live:
            col = columns(C)
            for n in gl.static_range(PARTS):
                async_copy.async_copy_global_to_shared(ring.index(stage * C.arrays * C.parts + n), a + col + n * C.block)
                if C.arrays == 2:
                    async_copy.async_copy_global_to_shared(ring.index((stage * 2 + 1) * C.parts + n), b + col + n * C.block)
        async_copy.commit_group()


@gluon.jit
def wait(box, stage, phase, C: gl.constexpr):
    """For the row of a stage."""
    if C.cluster:
        gl.inline_asm_elementwise(_came(C), "=r,r,r,r", [box, stage, phase], dtype=gl.int32, is_pure=False, pack=1)
    else:
        async_copy.wait_group(C.stages - 1 - C.later)


# ---- forward


@gluon.jit
def _even_pair(mean, square, count, other_mean, other_square, other_count):
    """Mean, sum of square deviations and count of two sets of one size together (Chan, Golub and LeVeque, 1983)."""
    half = (other_mean - mean) * 0.5
    return mean + half, square + other_square + half * half * (count + other_count), count + other_count


@gluon.jit
def _sums(ring, box, stage, phase, C: gl.constexpr):
    """Of each warp's columns: mean and sum of square deviations, of RMSNorm twice the sum of squares."""
    CTAS: gl.constexpr = C.ctas
    PARTS: gl.constexpr = C.parts
    WARPS: gl.constexpr = C.warps
    EACH: gl.constexpr = [CTAS, WARPS, 32, 8]
    wait(box, stage, phase, C)
    for n in gl.static_range(PARTS):
        x = part(ring, stage, 0, n, C)
        if not C.layer:
            x *= x
        if n == 0:
            sums = x
        else:
            sums += x
    mean = of_warps(sums, C)
    square = mean
    if C.layer:
        if C.cluster:  # of a thread's numbers first, then by one reduction
            mean = gl.sum(sums.reshape(EACH), 3) * (1.0 / (8 * PARTS))
            of_each = mean[:, :, :, None]
        else:
            mean = mean * (1.0 / (256 * PARTS))
            of_each = mean[:, :, None, None]
        for n in gl.static_range(PARTS):
            off = part(ring, stage, 0, n, C).reshape(EACH) - of_each
            if n == 0:
                squares = off * off
            else:
                squares += off * off
        square = gl.sum(squares, 3)
        if C.cluster:
            mean, square, _ = gl.reduce((mean, square, gl.full_like(mean, 8.0 * PARTS)), 2, _even_pair)
        else:
            square = gl.sum(square, 2)
    return mean, square


@gluon.jit(do_not_specialize=["rows"])
def _forward(x_ptr, x_stride, y_ptr, mean_ptr, rstd_ptr, eps, w_ptr, b_ptr, offset, rows, C: gl.constexpr):
    CTAS: gl.constexpr = C.ctas
    PARTS: gl.constexpr = C.parts
    STAGES: gl.constexpr = C.stages
    BLOCK: gl.constexpr = C.block
    PIECE: gl.constexpr = 256 * PARTS if C.layer else 0
    first, step = gl.program_id(0), gl.num_programs(0)
    turns = (rows - first + step - 1) // step
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * PARTS, CTAS, BLOCK], shared(C))
    box = begin(C)
    x = x_ptr + first.to(gl.int64) * x_stride  # of the row that is fetched next
    by = step.to(gl.int64) * x_stride
    for stage in gl.static_range(STAGES):
        fetch(ring, box, gl.to_tensor(stage), stage < turns, stage, x, x, False, C)
        x += by
    col = columns(C)
    w, b = (), ()
    for n in gl.static_range(PARTS):
        w += (gl.load(w_ptr + col + n * BLOCK),)
        b += (gl.load(b_ptr + col + n * BLOCK) if b_ptr is not None else 0.0,)
    together(C)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    if C.later:
        sums, squares = _sums(ring, box, stage, phase, C)
        tell(sums, squares, box, gl.to_tensor(0), PIECE, C)
        ahead, ahead_phase = advance(stage, phase, STAGES)
    for turn in range(turns):
        if C.later:
            next_sums, next_squares = sums, squares
            if turn + 1 < turns:  # while this turn's sums are on their way
                next_sums, next_squares = _sums(ring, box, ahead, ahead_phase, C)
                tell(next_sums, next_squares, box, turn + 1, PIECE, C)
            ahead, ahead_phase = advance(ahead, ahead_phase, STAGES)
            mean, square = heard(sums, squares, box, turn, PIECE, C)
            sums, squares = next_sums, next_squares
        else:
            mean, square = _sums(ring, box, stage, phase, C)
            tell(mean, square, box, turn, PIECE, C)
            mean, square = heard(mean, square, box, turn, PIECE, C)
        rstd = gl.rsqrt((square if C.layer else mean) * (1.0 / C.width) + eps)
        row = first + turn * step
        if rstd_ptr is not None:
            gl.store(rstd_ptr + row, rstd)
            if C.layer:
                gl.store(mean_ptr + row, mean)
        y = y_ptr + row.to(gl.int64) * C.width + col
        for n in gl.static_range(PARTS):
            hat = part(ring, stage, 0, n, C) * rstd
            if C.layer:
                hat -= mean * rstd
            hat *= raised(w[n], offset, False, C)
            if C.layer:
                hat += raised(b[n], None, False, C)
            gl.store(y + n * BLOCK, hat.to(y_ptr.dtype.element_ty))
        fetch(ring, box, stage, turn + STAGES < turns, turn, x, x, True, C)
        x += by
        stage, phase = advance(stage, phase, STAGES)


# ---- backward


@gluon.jit
def _sums_back(ring, box, stage, phase, mean, w, offset, C: gl.constexpr):
    """Of each warp's columns the sums of dhat (z - mean) and of dhat."""
    PARTS: gl.constexpr = C.parts
    wait(box, stage, phase, C)
    for n in gl.static_range(PARTS):
        d_hat = part(ring, stage, 0, n, C) * raised(w[n], offset, True, C)
        z = part(ring, stage, 1, n, C)
        if C.layer:
            z -= mean
        if n == 0:
            along = d_hat * z
            level = d_hat
        else:
            along += d_hat * z
            level += d_hat
    along = of_warps(along, C)
    return along, of_warps(level, C) if C.layer else along


@gluon.jit
def _statistics(mean_ptr, rstd_ptr, row, rows, C: gl.constexpr):
    row = gl.minimum(row, rows - 1)
    return gl.load(mean_ptr + row) if C.layer else 0.0, gl.load(rstd_ptr + row)


@gluon.jit(do_not_specialize=["rows"])
def _backward(dy_ptr, dy_stride, z_ptr, z_stride, mean_ptr, rstd_ptr, w_ptr, offset, dx_ptr, dw_ptr, db_ptr, rows, EARLY: gl.constexpr, C: gl.constexpr):
    CTAS: gl.constexpr = C.ctas
    PARTS: gl.constexpr = C.parts
    STAGES: gl.constexpr = C.stages
    BLOCK: gl.constexpr = C.block
    if EARLY:
        start_next()
    first, step = gl.program_id(0), gl.num_programs(0)
    turns = (rows - first + step - 1) // step
    ring = gl.allocate_shared_memory(z_ptr.dtype.element_ty, [STAGES * 2 * PARTS, CTAS, BLOCK], shared(C))
    box = begin(C)
    dy, z = dy_ptr + first.to(gl.int64) * dy_stride, z_ptr + first.to(gl.int64) * z_stride  # of the row that is fetched next
    by, z_by = step.to(gl.int64) * dy_stride, step.to(gl.int64) * z_stride
    for stage in gl.static_range(STAGES):
        fetch(ring, box, gl.to_tensor(stage), stage < turns, stage, dy, z, False, C)
        dy += by
        z += z_by
    col = columns(C)
    w, sum_w, sum_b = (), (), ()
    for n in gl.static_range(PARTS):
        w += (gl.load(w_ptr + col + n * BLOCK),)
        sum_w += (gl.zeros([CTAS, BLOCK], gl.float32, layout=layout(C)),)
        sum_b += (gl.zeros([CTAS, BLOCK], gl.float32, layout=layout(C)) if C.layer else 0.0,)
    mean, rstd = _statistics(mean_ptr, rstd_ptr, first, rows, C)
    if C.later:
        next_mean, next_rstd = _statistics(mean_ptr, rstd_ptr, first + step, rows, C)
    together(C)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    if C.later:
        sums, levels = _sums_back(ring, box, stage, phase, mean, w, offset, C)
        tell(sums, levels, box, gl.to_tensor(0), 0, C)
        ahead, ahead_phase = advance(stage, phase, STAGES)
    for turn in range(turns):
        row = first + turn * step
        new_mean, new_rstd = _statistics(mean_ptr, rstd_ptr, row + (1 + C.later) * step, rows, C)
        if C.later:
            next_sums, next_levels = sums, levels
            if turn + 1 < turns:
                next_sums, next_levels = _sums_back(ring, box, ahead, ahead_phase, next_mean, w, offset, C)
                tell(next_sums, next_levels, box, turn + 1, 0, C)
            ahead, ahead_phase = advance(ahead, ahead_phase, STAGES)
            along, level = heard(sums, levels, box, turn, 0, C)
            sums, levels = next_sums, next_levels
        else:
            along, level = _sums_back(ring, box, stage, phase, mean, w, offset, C)
            tell(along, level, box, turn, 0, C)
            along, level = heard(along, level, box, turn, 0, C)
        along *= rstd * rstd * rstd * (-1.0 / C.width)
        level *= rstd * (-1.0 / C.width)
        dx = dx_ptr + row.to(gl.int64) * C.width + col
        old_w, old_b = sum_w, sum_b
        sum_w, sum_b = (), ()
        for n in gl.static_range(PARTS):
            g = part(ring, stage, 0, n, C)
            off = part(ring, stage, 1, n, C)
            if C.layer:
                off -= mean
            sum_b += (old_b[n] + g if C.layer else 0.0,)
            d_z = off * along
            if C.layer:
                d_z += level
            g *= rstd
            d_z += g * raised(w[n], offset, True, C)
            sum_w += (old_w[n] + g * off,)
            gl.store(dx + n * BLOCK, d_z.to(dx_ptr.dtype.element_ty))
        fetch(ring, box, stage, turn + STAGES < turns, turn, dy, z, True, C)
        dy += by
        z += z_by
        mean, rstd = (next_mean, next_rstd) if C.later else (new_mean, new_rstd)
        if C.later:
            next_mean, next_rstd = new_mean, new_rstd
        stage, phase = advance(stage, phase, STAGES)
    at = first.to(gl.int64) * C.width + col
    for n in gl.static_range(PARTS):
        gl.store(dw_ptr + at + n * BLOCK, sum_w[n])
        if C.layer:
            gl.store(db_ptr + at + n * BLOCK, sum_b[n])


# ---- host


def configs(problem: Rows, device: Device) -> list[Tiles]:
    """Those of a plain norm that such clusters are for, else none."""
    words, _, wanted = problem.variant.partition(" -> ")
    forward, layer, said = problem.op != "norm_backward", "layer" in words.split(), {*words.split(), *(["weight"] if problem.op == "rms_norm" else [])}
    tiles = (STAY if forward else STAY_BACKWARD)[layer].get(problem.width)
    plain = said - {"offset", "keep"} in ({"rms", "weight"}, {"weight"}) if not layer else said - {"offset", "keep"} == {"layer", "weight", "bias"}
    if tiles is None or problem.dtype.itemsize != 2 or not plain or device.kind != "cuda" or device.arch < 90 or not (forward or wanted == GRADIENTS[layer]):
        return []
    tiles = tiles._replace(clusters=tiles.clusters * int((FIT_PAIRS if tiles.ctas == 2 else FIT) * device.sms / tiles.ctas))
    return [tiles] if tiles.clusters and problem.rows >= TURNS * tiles.clusters else []


def takes(norm: Norm, *given: torch.Tensor) -> bool:
    """Whether parameters are in the rows' dtype, which such a kernel has in registers, and all rows begin at multiples of 16 bytes, where copies do."""
    like = given[0].dtype
    same = norm.sets == 1 and all(x is None or x.dtype == like for x in (norm.weight, norm.bias))
    return same and all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and (len(x) < 2 or x.stride(0) % 8 == 0) for x in given)


def _options(config: Tiles, arrays: int, x: torch.Tensor, norm: Norm) -> dict:
    return {"C": Shape(norm.kind == "layer", arrays, *config[1:6], x.is_cuda), "num_warps": config.warps, "maxnreg": config.registers or None} | (
        {"num_ctas": config.ctas} if x.is_cuda else {}
    )


def launch(config: Tiles, x: torch.Tensor, y: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor | None, norm: Norm) -> None:
    """Of x [rows, width] with contiguous rows; y, mean and rstd are written."""
    _forward[(min(config.clusters, len(x)),)](
        x, x.stride(0), y, mean, rstd, norm.eps, norm.weight, norm.bias, norm.offset or None, len(x), **_options(config, 1, x, norm)
    )


def launch_backward(config: Tiles, dy: torch.Tensor, z: torch.Tensor, dx: torch.Tensor, sums: dict, mean: torch.Tensor | None, rstd: torch.Tensor, norm: Norm):
    """Of dy and z [rows, width] with contiguous rows; dx is written, and the clusters' parts of the gradients, [clusters, width] float32."""
    _backward[(min(config.clusters, len(z)),)](
        dy, dy.stride(0), z, z.stride(0), mean, rstd, norm.weight, norm.offset or None, dx, sums["weight"], sums.get("bias"), len(z), starts_early(z),
        **_options(config, 2, z, norm),
    )  # fmt: skip
