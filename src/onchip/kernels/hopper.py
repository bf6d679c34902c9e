"""What every Hopper kernel in Gluon is made of: names that Triton's releases spell differently, rings of buffers, barriers.

A ring is `(buffers, full, empty)`: STAGES buffers in shared memory, an mbarrier for each that a TMA copy has filled it and one
that every reader has let it go, unless hardware barriers say so. A cursor `(index, phase)` walks round it; the phase flips with every turn.

No mbarrier may be made that nobody uses: its memory becomes a buffer's, and the multiprocessor, which keeps mbarriers in a cache of its own, writes the
dead one back over the data when another process gets its turn. (H200: 16 bytes of dS, and with them NaN in 100 to 500 rows of dQ in each call under load.)
"""

import functools

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 renamed these
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
arrive_when_copied = async_copy.mbarrier_arrive
as_other = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv}


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    """Triton 3.6 has the instruction (cp.reduce.async.bulk.tensor), and no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


@gluon.jit
def ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr = 1, FILLERS: gl.constexpr = 1):
    """A ring of STAGES buffers for the tiles of `desc`, which READERS partitions let go by mbarriers (0: by hardware barriers); of PARTS tiles each, one below
    the other. FILLERS: arrivals (`mbarrier.expect` is one) that fill a buffer."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = full
    if READERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLERS)
        if READERS > 0:
            mbarrier.init(empty.index(stage), count=READERS)
    ROWS: gl.constexpr = PARTS * desc.block_type.shape[-2]
    SHAPE: gl.constexpr = [STAGES] + desc.block_type.shape[:-2] + [ROWS, desc.block_type.shape[-1]]  # noqa: RUF005 (device code)
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout), full, empty


@gluon.jit
def advance(index, phase, STAGES: gl.constexpr):
    """The cursor's next place."""
    if STAGES == 1:
        phase = phase ^ 1
    else:
        index = index + 1
        wrap = index == STAGES
        index = gl.where(wrap, 0, index)
        phase = gl.where(wrap, phase ^ 1, phase)
    return index, phase


@gluon.jit
def release(index, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Let a buffer of a ring with hardware barriers go: those from BARRIER on, at which THREADS meet, all readers and the copying warp's 32.

    (Triton makes the warps of a partition wait for each other before each arrival at an mbarrier; here nobody waits.)
    """
    gl.inline_asm_elementwise("bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r", [index + BARRIER, index * 0 + THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_and_wait(index, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS, these among them, are at hardware barrier BARRIER + `index`, and see what they have written."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r", [index + BARRIER, index * 0 + THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_after(shrink, index, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """`release` by threads of two values of `shrink` each, none negative, not before they are there.

    ptxas keeps barriers and waits for products in order, but lets a computation that neither needs sink below them.
    """
    code: gl.constexpr = """{ .reg .b32 t, u; mov.b32 t, $2; mov.b32 u, $3; or.b32 t, t, u; shr.u32 t, t, 31; add.u32 t, t, $4; bar.arrive t, $6;
        mov.u32 $0, 0; mov.u32 $1, 0; }"""
    gl.inline_asm_elementwise(code, "=r,=r,f,f,r,r,r,r", [shrink, index + BARRIER, index * 0 + THREADS], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def _until_free(empty, cursor, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until the buffer at a cursor is free. BARRIER 0: the ring's mbarriers say when."""
    index, phase, used = cursor
    if BARRIER == 0:
        mbarrier.wait(empty.index(index), phase ^ 1)
    elif used >= STAGES:
        arrive_and_wait(index, BARRIER, THREADS)


@gluon.jit
def fill(ring, cursor, desc, at, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Start a copy into the next buffer once it is free (`_until_free`); returns the cursor's next place."""
    buffers, full, empty = ring
    index, phase, used = cursor
    _until_free(empty, cursor, STAGES, BARRIER, THREADS)
    mbarrier.expect(full.index(index), desc.block_type.nbytes)
    tma_load(desc, at, full.index(index), buffers.index(index))
    index, phase = advance(index, phase, STAGES)
    return index, phase, used + 1


@gluon.jit
def fill_pages(ring, cursor, desc, pages, head, n, PAGE: gl.constexpr, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr, first=0):
    """`fill` of a buffer of one or more tiles of a pool [pages, heads, PAGE, dim], keys from `n` on; lanes of the warp from `first` on hold their pages."""
    buffers, full, empty = ring
    index, phase, used = cursor
    ROWS: gl.constexpr = desc.block_type.shape[2]
    PARTS: gl.constexpr = buffers.shape[3] // ROWS
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    _until_free(empty, cursor, STAGES, BARRIER, THREADS)
    mbarrier.expect(full.index(index), PARTS * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        page = gl.sum(gl.where(lane == first + part, pages, 0), 0)  # one instruction: redux
        slot = n * 0
        if PAGE > ROWS:
            slot = (n + part * ROWS) % PAGE
        tma_load(desc, [page, head, slot, 0], full.index(index), buffers.index(index).slice(part * ROWS, ROWS, 2))
    index, phase = advance(index, phase, STAGES)
    return index, phase, used + 1


@gluon.jit
def fill_both(ring, cursor, desc, at, row_desc, row_at, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """`fill` of a ring whose buffers are pairs: a tile, and a row that goes with it."""
    tiles, rows, full = ring
    index, phase, used = cursor
    if used >= STAGES:
        arrive_and_wait(index, BARRIER, THREADS)
    mbarrier.expect(full.index(index), desc.block_type.nbytes + row_desc.block_type.nbytes)
    tma_load(desc, at, full.index(index), tiles.index(index))
    tma_load(row_desc, row_at, full.index(index), rows.index(index))
    index, phase = advance(index, phase, STAGES)
    return index, phase, used + 1


@gluon.jit
def reclaim(index, used, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until a buffer of a ring with hardware barriers is free, of which `used` were filled before: `fill` for a partition that writes itself."""
    if used >= STAGES:
        arrive_and_wait(index, BARRIER, THREADS)


@gluon.jit
def uniform(x):
    """An int32 that is the same in all threads, in a register of the warp, as what comes from arguments is: of these there are others than a thread's,
    and a copy's coordinates have to be there."""
    return gl.inline_asm_elementwise("redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def here(x):
    """x, an int32 of an argument: what is made of it is made where this stands. LLVM makes it in the kernel's first lines, since warps wait for their
    partition in a loop, and it is then in registers of all, or in memory, until it is needed. Not everywhere faster (docs/measured/hopper-backward.md)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wide_product(x, y):
    """Of two int32 that are not negative, as int64: one instruction, where a product of int64 is five, and takes the high word of what y is widened to."""
    return gl.inline_asm_elementwise("mul.wide.u32 $0, $1, $2;", "=l,r,r", [x, y], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def message(READERS: gl.constexpr):
    """Two places for 8 numbers that the copying warp tells READERS other partitions, so that each is not made by all of them."""
    numbers = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return numbers, full, empty


@gluon.jit
def tell(message, turn, values, WARPS: gl.constexpr = 1):
    """The `turn`-th message, a tuple of int32, by a partition of WARPS warps."""
    numbers, full, empty = message
    index = turn % 2
    mbarrier.wait(empty.index(index), turn // 2 % 2 ^ 1)
    for n in gl.static_range(len(values)):
        numbers.index(8 * index + n).store(gl.full([1], values[n], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(full.index(index), count=1)


@gluon.jit
def hear(message, turn, N: gl.constexpr, WARPS: gl.constexpr):
    """Number N of the `turn`-th message, in a partition of WARPS warps; the first is waited for, behind the last comes `forget`."""
    numbers, full, _ = message
    index = turn % 2
    if N == 0:
        mbarrier.wait(full.index(index), turn // 2 % 2)
    return uniform(gl.max(numbers.index(8 * index + N).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0))  # of one


@gluon.jit
def forget(message, turn):
    """This partition has heard what it wants of the `turn`-th message."""
    _, _, empty = message
    mbarrier.arrive(empty.index(turn % 2), count=1)


@gluon.jit
def one_more(top, sums, logit):
    """A sink's logit, which weighs nothing, beside sums of weights over `top`: the new maximum, the sums over that, and what weights shrink by."""
    new_top = gl.maximum(top, logit)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = gl.exp2(top - base)
    return new_top, sums * shrink + gl.exp2(logit - base), shrink


@gluon.jit
def start_next():
    """A kernel that was launched to depend on this one (programmatic dependent launch) may start as soon as there is room for it."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_last():
    """Of a kernel that was launched to depend on the one before: until all of that one's results are in memory."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(pointers):
    """Bring what lies at `pointers` to L2; nobody waits."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def draw(counter, tiles):
    """The next of `tiles` for this program, in its copying warp; `tiles` and more: there is none."""
    tile = tiles
    if counter is not None:
        # In PTX: Triton's own atomic_add of a scalar goes by shared memory, and cost 240 bytes of spills.
        code: gl.constexpr = """{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.u32 t, 0;
            @p atom.relaxed.gpu.global.add.u32 t, [$1], 1; redux.sync.or.b32 $0, t, 0xffffffff; }"""
        tile = gl.num_programs(0) + gl.inline_asm_elementwise(code, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    return tile


TURNS = gl.constexpr((8, 9, 7))  # hardware barriers at which a warpgroup waits for its turn, with the one that goes before


@gluon.jit
def take_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Of two or three warpgroups, wait until the one before has started its products (FlashAttention-3's ping-pong)."""
    if GROUPS > 1:
        MINE: gl.constexpr = TURNS[GROUP]
        code: gl.constexpr = f"bar.sync {MINE}, 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_over(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Now the next may start its products."""
    if GROUPS > 1:
        NEXT: gl.constexpr = TURNS[(GROUP + 1) % GROUPS]
        code: gl.constexpr = f"bar.arrive {NEXT}, 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Before all turns: the first warpgroup goes first."""
    if GROUP == GROUPS - 1:
        turn_over(GROUP, GROUPS)


def _products(n: int) -> tuple[gl.constexpr, gl.constexpr]:
    """PTX: n values times n factors in place, past it where no thread of the warp has a factor but 1 (the first and third say it: a thread has two rows)."""
    each = " ".join(f"mul.f32 ${x}, ${x}, ${2 * n + x};" for x in range(n))
    code = f"""{{ .reg .pred p; .reg .pred q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;
        vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; {each} SKIP: }}"""
    return gl.constexpr(code), gl.constexpr(",".join(["=f"] * n + [str(x) for x in range(n)] + ["f"] * n))


PRODUCTS, OPERANDS = _products(64)


@gluon.jit
def scale_rows(acc, factor, TOGETHER: gl.constexpr):
    """acc * factor[:, None]. TOGETHER: values of a thread that are multiplied, or, where all factors of a warp are 1, left alone; 0: no look."""
    gl.static_assert(TOGETHER == 0 or TOGETHER == 64)
    if TOGETHER == 0:
        acc = acc * factor[:, None]
    else:
        acc = gl.inline_asm_elementwise(PRODUCTS, OPERANDS, [acc, factor[:, None]], dtype=gl.float32, is_pure=True, pack=64)
    return acc


@gluon.constexpr_function
def _maxima(n: int) -> str:
    """PTX of `largest`: outputs, n scores, n times the alarm; of four scores side by side two are of a row of the thread and two of its other."""

    def chains(kind: str, name: str) -> str:
        begin = "".join(f"mov.b32 {name}{j}, ${n + j};" for j in range(4))
        return begin + "".join(f"{kind} {name}{j}, {name}{j}, ${x};" for j in range(4) for x in range(n + j + 4, 2 * n, 4))

    mend = "".join(f"setp.lt.s32 p, m{j}, 0; selp.b32 m{j}, u{j}, m{j}, p;" for j in range(4))
    return f"""{{ .reg .b32 m<4>; .reg .b32 u<4>; .reg .pred p; {chains("max.s32", "m")} setp.ne.b32 p, ${2 * n}, 0; @!p bra SKIP;
        {chains("min.u32", "u")} {mend} SKIP: mov.b32 $0, m0; mov.b32 $1, m1; mov.b32 $2, m2; mov.b32 $3, m3; }}"""


@gluon.constexpr_function
def _maxima_operands(n: int) -> str:
    return ",".join(["=r"] * n + ["r"] * (2 * n))


@gluon.jit
def any_below(x):
    """Of [64] in the layout of an accumulator's rows: 1 where one of a warp's 16 is below 0."""
    code: gl.constexpr = """{ .reg .pred p; .reg .f32 t; min.f32 t, $2, $3; setp.lt.f32 p, t, 0f00000000; vote.sync.any.pred p, p, 0xffffffff;
        selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }"""
    return gl.inline_asm_elementwise(code, "=r,=r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def columns(x, N: gl.constexpr):
    """The first N, a power of two: no instruction."""
    found = x
    if x.shape[1] > N:
        found, _rest = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))
        found = columns(found, N)
    return found


@gluon.jit
def largest(scores, below):
    """Of each row of scores [64, N] the largest, or, where it is below 0 and `below` 0, any number below 0.

    Floats that are not negative are in order as whole numbers too, of which an instruction takes the largest of three (VIMNMX3); the others are in reverse.
    below   [64], `any_below` of what the rows' largest are compared with: asked for before the scores are there.
    """
    VALUES: gl.constexpr = scores.shape[1] // 2  # of a thread
    words = [scores.to(gl.int32, bitcast=True), below[:, None]]
    found = gl.inline_asm_elementwise(_maxima(VALUES), _maxima_operands(VALUES), words, dtype=gl.int32, is_pure=True, pack=VALUES)
    return gl.max(columns(found, 8).to(gl.float32, bitcast=True), 1)


@gluon.jit
def widened(x):
    """Values in float32. Two of bfloat16 side by side take an instruction each, where Triton's own conversion takes three."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        out = gl.inline_asm_elementwise(code, "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        out = x.to(gl.float32)
    return out


@gluon.jit
def logarithm(x):
    """log2 of float32, within 2^-22: gl.log2's polynomial is a chain of fifteen instructions."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def in_order(x):
    """Columns of an accumulator in the order in which, turned into bytes in place, it is the first operand of another product: a thread keeps its own.

    Column 16 K + 4 t + 2 i + b holds column 16 K + 8 i + 2 t + b       t < 4; b, i < 2
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])


@gluon.jit
def as_pairs(x, DTYPE: gl.constexpr, RELU: gl.constexpr = False):
    """Values in half precision, rounded, two columns of a thread in an int32: halves that go from one loop to another are taken apart and put together anew.
    RELU: those below 0 are 0, by the same instruction."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    KIND: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"  # noqa: SIM300 (DTYPE varies)
    code: gl.constexpr = f"cvt.rn.relu.{KIND}.f32 $0, $2, $1;" if RELU else f"cvt.rn.{KIND}.f32 $0, $2, $1;"
    even, odd = gl.split(x.reshape([M, N // 2, 2]))
    return gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_halves(words, DTYPE: gl.constexpr):
    """The values of `as_pairs`: no instruction."""
    even = words.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(even, odd).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def as_words(x, DTYPE: gl.constexpr = gl.float8e4nv):
    """Values in e4m3 or e5m2, rounded, four columns of a thread in an int32: single bytes that go round a loop are taken apart and put together anew."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    KIND: gl.constexpr = "e5m2x2" if DTYPE == gl.float8e5 else "e4m3x2"  # noqa: SIM300 (DTYPE varies)
    code: gl.constexpr = f"{{ .reg .b16 a, b; cvt.rn.satfinite.{KIND}.f32 a, $2, $1; cvt.rn.satfinite.{KIND}.f32 b, $4, $3; mov.b32 $0, {{a, b}}; }}"
    even, odd = gl.split(x.reshape([M, N // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return gl.inline_asm_elementwise(code, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_bytes(words, DTYPE: gl.constexpr = gl.float8e4nv):
    """The values of `as_words`: no instruction."""
    x0 = words.to(gl.int8).to(DTYPE, bitcast=True)
    x1 = (words >> 8).to(gl.int8).to(DTYPE, bitcast=True)
    x2 = (words >> 16).to(gl.int8).to(DTYPE, bitcast=True)
    x3 = (words >> 24).to(gl.int8).to(DTYPE, bitcast=True)
    return gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([words.shape[0], 4 * words.shape[1]])


def describe(t: torch.Tensor, *sizes: int) -> TensorDescriptor:
    """Tiles of `sizes` of the last dimensions, as of [batch, heads, len, dim] the last two; what lies outside reads as 0 and is not written."""
    tile = [1] * (t.dim() - len(sizes)) + list(sizes)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), tile, _layout(tuple(tile), t.dtype))


@functools.lru_cache
def _layout(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(tile), DTYPES[dtype])


def block(dim: int) -> int:
    """The columns that hold a head."""
    return max(64, 1 << (dim - 1).bit_length())


__all__ = [
    "DTYPES", "TensorDescriptor", "advance", "any_below", "arrive_and_wait", "arrive_when_copied", "as_bytes", "as_halves", "as_other", "as_pairs",
    "as_words", "block", "copy_async", "describe", "draw", "fence_async_shared", "fill", "fill_both", "fill_pages", "first_turn", "forget", "gl", "gluon",
    "hear", "here", "in_order", "largest",
    "logarithm", "mbarrier", "message", "one_more", "prefetch", "reclaim", "release", "release_after", "ring", "scale_rows", "start_next", "take_turn",
    "tell", "thread_barrier", "tma", "tma_add", "tma_load", "tma_store", "turn_over", "uniform", "wait_for_last", "warpgroup_mma", "warpgroup_mma_wait",
    "wide_product", "widened",
]  # fmt: skip
