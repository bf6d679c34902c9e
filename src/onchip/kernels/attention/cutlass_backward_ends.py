"""What goes before and after `cutlass_backward`: delta = rowsum(dO O) - dLSE, LSE in base 2, that no sums of dQ are there yet; and dQ rounded from these.

Both move each byte once: before, O, dO and LSE are read; after, 4 bytes a number of dQ, and 2 written. A block takes 64 rows of a head. `C` is the kernel's
`Shape`; `sizes`: batch, heads, rows of q, rows of LSE, delta and dQ's sums, queries of a dense sequence. `given` [heads, rows], int32: at the row that a tile
of queries begins with and the one behind it is 2 where a warpgroup's part of the tile's sums is there, 0 where no key is seen and nothing is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

LOG2E = 1.4426950408889634
ROWS = 64
BEFORE, AFTER = 256, 128  # threads


def vector(ptr, offset, dtype, count: int):
    """`count` numbers in memory, of 16 bytes at most, taken at once."""
    offset = cute.assume(offset, divby=count)
    return cute.make_tensor(ptr + offset, cute.make_layout(count))


@cute.jit
def sequence_of(row, lengths, C: cutlass.Constexpr):
    """Of a packed batch, the sequence that `row` of the sums is in: each lies C.pad further on than in q, from a multiple of 8 on."""
    low = Int32(0)
    if const_expr(C.packed):
        high, offsets, _ = lengths
        while high - low > 1:
            middle = (low + high) // 2
            if (offsets[middle] + middle * C.pad) // 8 * 8 <= row:
                low = middle
            else:
                high = middle
    return low


@cute.jit
def token_of(row, at, lengths, sizes, C: cutlass.Constexpr):
    """The row of q at `row` of the sums, whether there is one, how far into its tile, and its sequence; `at`: that of a row before."""
    token, there, within = row, row < sizes[4], row
    if const_expr(C.packed):
        sequences, offsets, used = lengths
        after = at + 1
        while (after < sequences) & ((offsets[after] + after * C.pad) // 8 * 8 <= row):
            after += 1
        at = after - 1
        start = offsets[at]
        length = used[at] if const_expr(C.q_used) else offsets[after] - start
        within = row - (start + at * C.pad) // 8 * 8
        token, there = start + within, within < length
    return token, there, within % C.m, at


@cute.jit
def block_of(heads):
    """The rows, head and sequence of a block: the heads of the same rows side by side, since a token's lie side by side in memory."""
    number, _, b = cute.arch.block_idx()
    block = number // heads
    return block, number - block * heads, b


@cute.kernel
def prepare(out: cute.Pointer, out_strides: tuple[Int64, Int64, Int64], do: cute.Pointer, do_strides: tuple[Int64, Int64, Int64],
            lse: cute.Pointer, d_lse: cute.Pointer, lse2: cute.Pointer, delta: cute.Pointer, given: cute.Pointer, counter: cute.Pointer,
            offsets: cute.Pointer, used: cute.Pointer, sizes: tuple[Int32, Int32, Int32, Int32, Int32], C: cutlass.Constexpr):  # fmt: skip
    cute.arch.griddepcontrol_launch_dependents()
    batch, heads, rows, pitch, _ = sizes
    thread = cute.arch.thread_idx()[0]
    block, head, b = block_of(heads)
    each = C.width // 8  # threads of a row
    column = thread % each * 8
    lists = cute.make_layout(1 << 30)
    lengths = batch, cute.make_tensor(offsets, lists), cute.make_tensor(used, lists)
    at = Int64(b * heads + head)
    out += cute.assume(b * out_strides[0] + head * out_strides[1], divby=8)
    do += cute.assume(b * do_strides[0] + head * do_strides[1], divby=8)
    passes, apart = ROWS * each // BEFORE, BEFORE // each
    first = block * ROWS + thread // each
    # where all rows lie, then all loads, then what is made of them: one wait for memory
    tokens, rows_there, sequence = [], [], sequence_of(first, lengths, C)
    for i in cutlass.range_constexpr(passes):
        token, there, _, sequence = token_of(first + i * apart, sequence, lengths, sizes, C)
        tokens.append(token)
        rows_there.append(there)
    o, d = (cute.make_rmem_tensor((8, passes), C.dtype) for _ in range(2))
    o.fill(0.0)
    d.fill(0.0)
    value, slope = (cute.make_rmem_tensor(passes, Float32) for _ in range(2))
    value.fill(-Float32.inf)
    slope.fill(0.0)
    for i in cutlass.range_constexpr(passes):
        if rows_there[i] & (column < C.dim):
            cute.autovec_copy(vector(out, tokens[i] * out_strides[2] + column, C.dtype, 8), o[None, i])
            cute.autovec_copy(vector(do, tokens[i] * do_strides[2] + column, C.dtype, 8), d[None, i])
            value[i] = cute.make_tensor(lse + (at * rows + tokens[i]), cute.make_layout(1))[0]
            if const_expr(C.slopes):
                slope[i] = cute.make_tensor(d_lse + (at * rows + tokens[i]), cute.make_layout(1))[0]
    for i in cutlass.range_constexpr(passes):
        row = first + i * apart
        product = o[None, i].load().to(Float32) * d[None, i].load().to(Float32)
        total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for j in cutlass.range_constexpr(each.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << j)
        if (column == 0) & (row < pitch):
            empty = value[i] == -Float32.inf
            cute.make_tensor(lse2 + at * pitch + row, cute.make_layout(1))[0] = Float32.inf if empty else value[i] * LOG2E
            cute.make_tensor(delta + at * pitch + row, cute.make_layout(1))[0] = Float32(0.0) if empty else total - slope[i]
            cute.make_tensor(given + at * pitch + row, cute.make_layout(1))[0] = Int32(0)
    if (thread == 0) & (block == 0) & (head == 0) & (b == 0):
        cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)


@cute.kernel
def finish(sums: cute.Pointer, given: cute.Pointer, dq: cute.Pointer, dq_strides: tuple[Int64, Int64, Int64], offsets: cute.Pointer, used: cute.Pointer,
           sizes: tuple[Int32, Int32, Int32, Int32, Int32], scale: Float32, C: cutlass.Constexpr):  # fmt: skip
    """Of a head, float32 [halves of 64 columns, groups of 8 rows, 512]: an accumulator of dQ^T, 64 x 8, as a warpgroup's threads hold it, 4 numbers each."""
    batch, heads, _, pitch, _ = sizes
    thread = cute.arch.thread_idx()[0]
    block, head, b = block_of(heads)
    halves, groups = C.width // 64, ROWS // 8
    lists = cute.make_layout(1 << 30)
    lengths = batch, cute.make_tensor(offsets, lists), cute.make_tensor(used, lists)
    # rows 16 bytes longer than they need be: those of a thread and its neighbours begin in different banks
    tile = cutlass.utils.SmemAllocator().allocate_tensor(C.dtype, cute.make_layout((ROWS, C.width), stride=(C.width + 8, 1)), byte_alignment=128)
    each = C.width // 8
    passes, apart, column = ROWS * each // AFTER, AFTER // each, thread % each * 8
    first = block * ROWS + thread // each
    tokens, flags, sequence = [], [], sequence_of(first, lengths, C)
    for i in cutlass.range_constexpr(passes):
        row = first + i * apart
        token, there, within, sequence = token_of(row, sequence, lengths, sizes, C)
        side = column // 64 if const_expr(C.width > 64) else within // (C.m // 2)
        tokens.append(token)
        flags.append(row - within + side if there & (column < C.dim) else Int32(-1))
    begin = Int64(b * heads + head) * halves * pitch * 64
    cute.arch.griddepcontrol_wait()
    held = cute.make_rmem_tensor((4, groups * halves), Float32)
    held.fill(0.0)
    for i in cutlass.range_constexpr(groups):
        for half in cutlass.range_constexpr(halves):
            place = (block * groups + i) * 512 + thread * 4
            if place < pitch * 64:
                cute.autovec_copy(vector(sums, begin + half * Int64(pitch) * 64 + place, Float32, 4), held[None, i * halves + half])
    seen = cute.make_rmem_tensor(passes, Int32)
    seen.fill(0)
    for i in cutlass.range_constexpr(passes):
        if flags[i] >= 0:
            seen[i] = cute.make_tensor(given + (Int64(b * heads + head) * pitch + flags[i]), cute.make_layout(1))[0]
    cute.arch.barrier()  # so that ptxas starts all loads before it waits for one
    row, spot = thread % 4 * 2, thread // 32 * 16 + thread % 32 // 4
    for i in cutlass.range_constexpr(groups):
        for half in cutlass.range_constexpr(halves):
            for x in cutlass.range_constexpr(4):  # which of two rows, which of two columns
                tile[i * 8 + row + x % 2, half * 64 + spot + x // 2 * 8] = (held[x, i * halves + half] * scale).to(C.dtype)
    cute.arch.barrier()
    dq += cute.assume(b * dq_strides[0] + head * dq_strides[1], divby=8)
    for i in cutlass.range_constexpr(passes):
        if flags[i] >= 0:
            out = cute.make_rmem_tensor(8, C.dtype)
            out.fill(0.0)
            if seen[i] != 0:
                cute.autovec_copy(vector(tile.iterator, (i * apart + thread // each) * (C.width + 8) + column, C.dtype, 8), out)
            cute.autovec_copy(out, vector(dq, tokens[i] * dq_strides[2] + column, C.dtype, 8))
