"""What kernels in CuTe DSL are made of: shared memory as tensor cores read it, products, copies in bulk, rings of buffers; and a launch that costs little.

A ring is STAGES buffers in shared memory, an mbarrier for each that a copy has filled it and one that every reader has let it go. A number that counts
the buffers filled (or read) so far is the place in it.
"""

import ctypes
import struct
import threading

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

DTYPES = {torch.bfloat16: BFloat16, torch.float16: Float16, torch.float32: Float32, torch.int32: Int32}
ROWS, COLUMNS = OperandMajorMode.K, OperandMajorMode.MN  # which of an operand's places lie side by side: those summed over, or the product's own

# ---- device: shared memory


def swizzled(shape: tuple, dtype):
    """The layout of a tile [rows, columns (, stages)] whose rows lie in pieces of 64 columns, in the order that TMA gives them and tensor cores take them."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def turned(tile):
    """A tile [rows, columns, ...] as [columns, rows, ...]."""
    order = [1, 0, *range(2, cute.rank(tile))]
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, order))


# ---- device: products


def products(dtype, left, right, groups: tuple, columns: int, registers: bool = False):
    """Products of 64 x `columns` on tensor cores, each by a warpgroup; `groups`: warpgroups along rows and along columns."""
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    return make_trivial_tiled_mma(dtype, dtype, left, right, Float32, (*groups, 1), (64, columns), source)


def operands(mma, group, left, right):
    """A warpgroup's part of both, as descriptors of shared memory; the left None: it comes from registers."""
    part = mma.get_slice(group * 128)
    first = None if left is None else part.make_fragment_A(part.partition_A(left))
    return first, part.make_fragment_B(part.partition_B(right))


def sums_of(mma, shape: tuple):
    """Registers for a product of `shape`."""
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


@cute.jit
def multiply(mma, out, left, right, fresh: cutlass.Constexpr[bool]):
    """out += left right, started; `fresh`: out = left right."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not fresh)
    for k in cutlass.range_constexpr(cute.size(left.shape[2])):
        cute.gemm(atom, out, left[None, None, k], right[None, None, k], out)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def as_left(x):
    """Registers of a product ((2, 2, columns / 8), 1, 1) as those of a left operand ((2, 2, 2), 1, columns / 16): each thread's own."""
    return cute.make_tensor(x.iterator, cute.make_layout(((2, 2, 2), 1, cute.size(x) // 8)))


def halved(x, dtype):
    """Float32 registers, rounded."""
    out = cute.make_rmem_tensor(x.layout, dtype)
    out.store(x.load().to(dtype))
    return out


def matrix_store(mma, tile, thread, dtype, transpose: bool):
    """How registers of a product go to shared memory, four 8 x 8 matrices an instruction: a function of registers and of what is behind `tile`'s two modes."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
    tiled = cute.make_tiled_copy_C(atom, mma)
    part = tiled.get_slice(thread)
    there = part.partition_D(tile)

    def store(values, index=None):
        cute.copy(tiled, tiled.retile(values), there if index is None else there[None, None, None, index])

    return store


def matrix_load(mma, tile, thread, dtype, transpose: bool):
    """The other way: a function of `n` and of what is behind `tile`'s two modes; it gives the eight registers of a product from 8 n on."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
    tiled = cute.make_tiled_copy_C(atom, mma)
    part = tiled.get_slice(thread)
    there = part.partition_S(tile)

    def load(n, index):
        values = cute.make_rmem_tensor((8,), dtype)
        cute.copy(atom, there[(None, n), 0, 0, index], values)
        return values

    return load


# ---- device: copies


@cute.jit
def bulk_load(to, start, nbytes: cutlass.Constexpr[int], full):
    """A row of memory to shared memory, by one thread of a warp; the mbarrier `full` counts its bytes."""
    with cute.arch.elect_one():
        code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
        cute.arch.inline_ptx(code, read_only_args=[to, start, Int32(nbytes), full])


@cute.jit
def glance(flag):
    """What a number in memory is, and that all that came before it was written is there too."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag])


@cute.jit
def bulk_give(to, start, nbytes: cutlass.Constexpr[int], flag, seen):
    """float32 of shared memory to memory that nobody has cleared, by one thread of a warp; a bulk group of its own. Who comes first stores, the others add.

    flag   where the number lies that says how far that is: 0 nobody has come, 1 somebody has, 2 what the first one brought is there.
    seen   what it was a while ago: after the first few it is 2, and nothing is waited for.
    """
    with cute.arch.elect_one():
        code = """{
            .reg .pred p;
            .reg .b32 t;
            setp.eq.s32 p, {$r4}, 2;
            @p bra ADD;
            atom.relaxed.gpu.global.cas.b32 t, [{$r3}], 0, 1;
            setp.ne.s32 p, t, 0;
            @p bra WAIT;
            cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
            fence.proxy.async.global;
            st.release.gpu.global.b32 [{$r3}], 2;
            bra DONE;
        WAIT:
            ld.acquire.gpu.global.b32 t, [{$r3}];
            setp.ne.s32 p, t, 2;
            @p bra WAIT;
        ADD:
            fence.proxy.async.global;
            cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};
        DONE:
        }"""
        cute.arch.inline_ptx(code, read_only_args=[to, start, Int32(nbytes), flag, seen])


def tiles_in(atom, tile, tiles):
    """What a TMA copy moves: of shared memory `tile` [rows, columns (, stages)], of memory `tiles` [rows, columns (, numbers)]."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(tiles, 0, 2))


@cute.jit
def expect(full, nbytes: cutlass.Constexpr[int]):
    """One thread of a warp tells an mbarrier what is to come."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)


@cute.jit
def let_go(empty, first):
    """A warp of readers is done with a buffer; `first`: this is its first thread. Without a branch, beside which ptxas finds no room for products in flight."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[empty], predicate=first)


@cute.jit
def draw(counter):
    """The next tile for this program, in one of its warps: each has begun with that of its own number."""
    code = """{
        .reg .pred p;
        .reg .u32 t;
        setp.eq.u32 p, {$r1}, 0;
        mov.u32 t, 0;
        @p atom.relaxed.gpu.global.add.u32 t, [{$r0}], 1;
        redux.sync.or.b32 {$w0}, t, 0xffffffff;
    }"""
    return cute.arch.grid_dim()[0] + cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[counter, cute.arch.lane_idx()])


# ---- host

_CODES = {Int32: "i", Int64: "q", Float32: "f"}  # of `struct`


class Compiled:
    """A compiled function of pointers and numbers, on a stream. A launch writes them where the function looks for them, a place of each thread's own made
    once, and takes nothing of the DSL's own bookkeeping: 6 us (19 with an object for each)."""

    def __init__(self, function, dtype, arguments: tuple, **options):
        """`arguments`: a type for each number, ("pointer", type, alignment in bytes) for each pointer (None: `dtype`), a tuple of these for a tuple."""
        self.compiled = cute.compile(function, *(_example(a, dtype) for a in arguments), driver.CUstream(0), **options)
        self.codes = "@" + _codes(arguments) + "P"
        self.packer = struct.Struct(self.codes)
        self.mine = threading.local()

    def __call__(self, *values):
        """The numbers and addresses, in order and without tuples, on the current stream of the current device."""
        mine = self.mine
        if not hasattr(mine, "memory"):
            mine.memory = (ctypes.c_int64 * (self.packer.size // 8 + 1))()
            ends = (struct.calcsize(self.codes[: i + 1]) for i in range(1, len(self.codes)))
            first = ctypes.addressof(mine.memory)
            mine.addresses = [ctypes.c_void_p(first + end - struct.calcsize("@" + code)) for end, code in zip(ends, self.codes[1:], strict=True)]
        self.packer.pack_into(mine.memory, 0, *values, torch.cuda.current_stream().cuda_stream)
        self.compiled.run_compiled_program(mine.addresses)


def _example(argument, dtype):
    if isinstance(argument, tuple) and argument[0] == "pointer":
        return make_ptr(argument[1] or dtype, 0, cute.AddressSpace.gmem, assumed_align=argument[2])
    return tuple(_example(a, dtype) for a in argument) if isinstance(argument, tuple) else argument(1)


def _codes(arguments: tuple) -> str:
    """A letter of `struct` for each pointer and number."""
    pointers = ("P" if isinstance(a, tuple) and a[0] == "pointer" else None for a in arguments)
    return "".join(p or (_codes(a) if isinstance(a, tuple) else _CODES[a]) for p, a in zip(pointers, arguments, strict=True))
