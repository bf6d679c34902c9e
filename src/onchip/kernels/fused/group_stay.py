"""GroupNorm with or without SiLU of large groups in 16 bits on Hopper, channels first, by programs that stay (`group_norm.py` has the formula).

A group is one stretch of memory, which a team of programs shares out; a team goes from group to group. In a program one warp copies its share (TMA) to a
ring in shared memory, CHUNK numbers at a time; a warpgroup sums up each chunk as it comes, and tells the team the share's mean and square deviations in one
word (`meeting.py`); WRITERS others hear those of all, and write y from the chunks, which then are free. So copies, sums and output go on side by side, of as
many groups as the ring has room for, and nobody is waited for but at the beginning and the end. Sums are of x less the share's first number, so that a far
mean costs no digits. Bytes moved: the floor, x and y once each.
"""

from typing import NamedTuple

import torch
import triton

from onchip.core.device import Device
from onchip.core.problem import Groups
from onchip.kernels.hopper import advance, describe, fence_async_shared, gl, gluon, mbarrier, tma_load, widened

CHUNK = gl.constexpr(8192)  # numbers, rows of 64
ROWS = gl.constexpr(128)
STAGES = 13
TINY = gl.constexpr(1.2e-38)  # makes no difference, but of two zeros a word that says something
MOST = 128  # programs of a team
SHARE = 64 << 10  # bytes of a program, of a team
LEAST = 4 << 20  # bytes of a group. Of 8 MB 157 us, read twice 172 (1x128x1024x1024); of 4 MB 85.7 and 86.4, of 2 MB 49.4 and 45.7
FIT = 0.9  # of the multiprocessors that teams of a size have to find
WRITERS = gl.constexpr(3)  # warpgroups


class Tiles(NamedTuple):
    """`teams` of `team` programs that each have `share` numbers of a group."""

    teams: int
    team: int
    share: int

    def __str__(self):
        return f"{self.teams} teams of {self.team} programs that stay, {self.share} numbers each, {STAGES} stages"


# ---- device


@gluon.jit
def tell(word_ptrs, x, y):
    """Two numbers for the team, or as many of each as pointers, in one word each."""
    code: gl.constexpr = "{ .reg .b64 w; mov.b64 w, {$2, $3}; st.relaxed.gpu.global.b64 [$1], w; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r,l,f,f", [word_ptrs.to(gl.int64), x, y + TINY], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _until_there(n: int) -> str:
    """PTX: n words, when none of them is 0 any more, each as two numbers."""
    load = "".join(f"ld.relaxed.gpu.global.b64 w{i}, [${2 * n + i}]; " for i in range(n))
    look = "".join(f"setp.eq.or.u64 p, w{i}, 0, p; " for i in range(1, n))
    give = "".join(f"mov.b64 {{${i}, ${n + i}}}, w{i}; " for i in range(n))
    return f"{{ .reg .pred p; .reg .b64 w<{n}>; again_${{:uid}}: {load}setp.eq.u64 p, w0, 0; {look}@p bra again_${{:uid}}; {give}}}"


@gluon.constexpr_function
def _operands(n: int) -> str:
    return ",".join(["=&f"] * (2 * n) + ["l"] * n)


@gluon.jit
def hear(word_ptrs, N: gl.constexpr):
    """The numbers of each word, once they are there; a thread has N words."""
    return gl.inline_asm_elementwise(_until_there(N), _operands(N), [word_ptrs.to(gl.int64)], dtype=(gl.float32, gl.float32), is_pure=False, pack=N)


@gluon.jit
def silu(v):
    """u sigmoid(u) of v = -log2(e) u, in four instructions: the factor goes off with the quotient."""
    code: gl.constexpr = """{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; fma.rn.f32 t, t, 0fBFB8AA3B, 0fBFB8AA3B; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }"""
    return gl.inline_asm_elementwise(code, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sum(x_ptr, word_ptr, rows, units, size, share, team, STAGES: gl.constexpr):
    """Mean and square deviations of a share of one group after the other, by sums of x less its first number."""
    buffers, full, _ = rows
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stage, phase = 0, 0
    member = gl.program_id(0) % team
    first, step = gl.program_id(0) // team, gl.num_programs(0) // team
    about = gl.load(x_ptr + first.to(gl.int64) * size + member * share).to(gl.float32)
    for turn in range((units - first + step - 1) // step):
        unit = first + turn * step
        next_about = gl.load(x_ptr + gl.minimum(unit + step, units - 1).to(gl.int64) * size + member * share).to(gl.float32)
        sums = gl.zeros([ROWS // 2, 64], gl.float32, layout)
        squares = gl.zeros([ROWS // 2, 64], gl.float32, layout)
        for _chunk in range(share // CHUNK):
            mbarrier.wait(full.index(stage), phase)
            buffer = buffers.index(stage)
            for half in gl.static_range(2):
                off = widened(buffer.slice(half * (ROWS // 2), ROWS // 2, 0).load(layout)) - about
                sums += off
                squares += off * off
            stage, phase = advance(stage, phase, STAGES)
        off = gl.sum(gl.sum(sums, 1), 0) / share
        tell(word_ptr + (unit * team + member), about + off, gl.maximum(gl.sum(gl.sum(squares, 1), 0) - off * off * share, 0.0))
        about = next_about


@gluon.jit
def _write(tensors, rows, eps, units, groups, each, pixels, size, share, team,
           SILU: gl.constexpr, TEAM: gl.constexpr, STAGES: gl.constexpr, WRITER: gl.constexpr):  # fmt: skip
    """y of each WRITERS-th chunk of a share of one group after the other."""
    y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, word_ptr = tensors
    buffers, full, empty = rows
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lanes: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    row = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, layout))
    place = row[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    t = gl.arange(0, TEAM, layout=lanes)
    member = gl.program_id(0) % team
    factor: gl.constexpr = -1.4426950408889634 if SILU else 1.0
    number, past = WRITER, 0  # of all chunks, the next of this warpgroup; those of the groups before
    first, step = gl.program_id(0) // team, gl.num_programs(0) // team
    for turn in range((units - first + step - 1) // step):
        unit = first + turn * step
        begin = unit.to(gl.int64) * size
        means, squares = hear(word_ptr + unit * team + gl.minimum(t, team - 1), TEAM // 32)
        mean = gl.sum(gl.where(t < team, means, 0.0), 0) / team
        squares += (means - mean) * (means - mean) * share
        rstd = gl.rsqrt(gl.sum(gl.where(t < team, squares, 0.0), 0) / size + eps)
        if mean_ptr is not None and WRITER == 0:
            gl.store(mean_ptr + unit, mean, mask=member == 0)
            gl.store(rstd_ptr + unit, rstd, mask=member == 0)
        past += share // CHUNK
        while number < past:
            start = member * share + (number - past) * CHUNK + share
            stage = number % STAGES
            mbarrier.wait(full.index(stage), number // STAGES & 1)
            c = unit % groups * each + start // pixels
            w = rstd * factor
            if w_ptr is not None:
                w = gl.load(w_ptr + c).to(gl.float32) * w
            b = -mean * w
            if b_ptr is not None:
                b += gl.load(b_ptr + c).to(gl.float32) * factor
            for half in gl.static_range(2):
                u = widened(buffers.index(stage).slice(half * (ROWS // 2), ROWS // 2, 0).load(layout)) * w + b
                if half == 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                if SILU:
                    u = silu(u)
                gl.store(y_ptr + (begin + start + half * (CHUNK // 2)) + place, u.to(y_ptr.dtype.element_ty))
            number += WRITERS


@gluon.jit
def _copy(x_desc, rows, units, size, share, team, STAGES: gl.constexpr):
    buffers, full, empty = rows
    stage, phase = 0, 0
    first, step = gl.program_id(0) // team, gl.num_programs(0) // team
    for turn in range((units - first + step - 1) // step):
        unit = first + turn * step
        begin = (unit.to(gl.int64) * size + gl.program_id(0) % team * share) // 64
        for chunk in range(share // CHUNK):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
            tma_load(x_desc, [begin.to(gl.int32) + chunk * ROWS, 0], full.index(stage), buffers.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["units", "groups", "each"])
def _group_norm(x_desc, x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, word_ptr, eps, units, groups, each, pixels, size, share, team,
                SILU: gl.constexpr, TEAM: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    buffers = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005 (device code)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    rows = (buffers, full, empty)
    tensors = (y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, word_ptr)
    gl.warp_specialize(
        [
            (_write, (tensors, rows, eps, units, groups, each, pixels, size, share, team, SILU, TEAM, STAGES, 0)),
            (_write, (tensors, rows, eps, units, groups, each, pixels, size, share, team, SILU, TEAM, STAGES, 1)),
            (_write, (tensors, rows, eps, units, groups, each, pixels, size, share, team, SILU, TEAM, STAGES, 2)),
            (_sum, (x_ptr, word_ptr, rows, units, size, share, team, STAGES)),
            (_copy, (x_desc, rows, units, size, share, team, STAGES)),
        ],
        [4, 4, 4, 1],
        [112, 112, 136, 24],
    )


# ---- host


def configs(p: Groups, device: Device) -> list[Tiles]:
    """A team that nearly all multiprocessors are in, for groups of more than LEAST bytes whose channels are whole chunks; none where there is no such."""
    units, size = p.batch * p.groups, p.channels // p.groups * p.pixels
    if device.kind != "cuda" or device.arch != 90 or p.dtype.itemsize != 2 or p.layout == "channels_last" or p.act not in ("", "silu"):
        return []
    if size * 2 <= LEAST or p.pixels % int(CHUNK):
        return []
    chunks = size // int(CHUNK)
    teams = [n for n in range(triton.cdiv(size * 2, SHARE), min(MOST, device.sms) + 1) if chunks % n == 0 and device.sms // n * n >= FIT * device.sms]
    return [Tiles(min(units, device.sms // n), n, size // n) for n in teams[:1]]


def launch(p: Groups, t: Tiles, x: torch.Tensor, y: torch.Tensor, weight, bias, eps: float, mean, rstd) -> None:
    """y, and mean and rstd [batch, groups] where they are kept, of contiguous x [batch, channels, pixels]."""
    units, each = p.batch * p.groups, p.channels // p.groups
    words = torch.zeros(units * t.team, dtype=torch.int64, device=x.device)
    _group_norm[(t.teams * t.team,)](
        describe(x.view(-1, 64), int(ROWS), 64), x, y, weight, bias, mean, rstd, words, eps, units, p.groups, each, p.pixels, each * p.pixels, t.share, t.team,
        SILU=p.act == "silu", TEAM=max(32, triton.next_power_of_2(t.team)), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
