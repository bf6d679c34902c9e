"""A row too wide for one program, held by a cluster of them: programs of neighbouring multiprocessors that write to each other's shared memory (sm_90 on).

    kernel[grid](..., CTAS=N, num_ctas=N)           a program of Triton is a cluster of N, tiles are [N, BLOCK]: the compiler gives each CTA one row of it
    col = tl.arange(0, N)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    box = begin(VALUES, N)                          as early as may be: the others' start is waited for in `total`, beside which loads are in flight by then
    sums = total(tl.sum(x, 1), box, turn, N)        [N], the same in all; without keep_dims, with which Triton would write the assembly once for each register

Exchanges of VALUES float32 numbers a CTA, `turn` 0, 1, 2 and so on. A value goes by `st.async` to each CTA's box, which counts bytes (an mbarrier): no fence of
memory, which a cluster's barrier would mean. No CTA leaves before it has what is sent to it, so nobody writes to one that has left. There are two boxes, by
turns: who writes in turn n + 2 has heard all in turn n + 1, and they spoke, behind the barrier of their own sum, after they had read turn n.
In the interpreter, where a program holds the whole row, CLUSTER is False and the sum is the tile's own.
"""

import triton
import triton.language as tl

from onchip.core.device import Device


def largest(device: Device) -> int:
    """Programs of a cluster at most, 1 where there are none. 16 are more than each GPU promises: a slice of one may not have so many neighbours."""
    if device.kind != "cuda" or device.arch < 90:
        return 1
    return 16 if device.arch < 120 and device.sms > 100 else 8


@triton.constexpr_function
def _begin(values: int, ctas: int) -> str:
    """PTX: two boxes, each of an mbarrier and `values` rows of `ctas` numbers; the address of the first."""
    size = 4 * values * ctas
    boxes = [f"[$0 + {n * (16 + size)}]" for n in range(2)]
    return (
        "{ .reg .pred one; .reg .b32 t; "
        f".shared .align 16 .b8 box[{2 * (16 + size)}]; "
        "mov.u32 t, %tid.x; setp.eq.u32 one, t, 0; mov.u32 $0, box; "
        + "".join(f"@one mbarrier.init.shared::cta.b64 {box}, 1; " for box in boxes)
        + "@one fence.mbarrier_init.release.cluster; "
        + "".join(f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, {box}, {size}; " for box in boxes)
        + "barrier.cluster.arrive.relaxed.aligned; }"
    )


@triton.constexpr_function
def _exchange(values: int, ctas: int) -> str:
    """PTX: each value to the boxes of all; what follows finds value v of CTA c at [here + 16 + 4 (v ctas + c)]."""
    first = 2 if values == 3 else values  # operands: results, then the box, the turn, and the values
    size = 4 * values * ctas
    send = "".join(f"@to st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there + {4 * v * ctas}], ${first + 2 + v}, [bar]; " for v in range(values))
    return (
        ".reg .pred to, one, done; .reg .b32 t, there, bar, here, odd; "
        f"setp.eq.u32 one, ${first + 1}, 0; @one barrier.cluster.wait.acquire.aligned; "
        f"and.b32 t, ${first + 1}, 1; mad.lo.u32 here, t, {16 + size}, ${first}; shr.u32 odd, ${first + 1}, 1; and.b32 odd, odd, 1; "
        f"mov.u32 t, %tid.x; setp.lt.u32 to, t, {ctas}; setp.eq.u32 one, t, 0; mov.u32 there, %cluster_ctarank; shl.b32 there, there, 2; "
        "add.u32 there, there, here; add.u32 there, there, 16; @to mapa.shared::cluster.u32 there, there, t; @to mapa.shared::cluster.u32 bar, here, t; "
        f"{send}again_${{:uid}}: mbarrier.try_wait.parity.shared::cta.b64 done, [here], odd; @!done bra again_${{:uid}}; "
        f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [here], {size}; "
    )


@triton.constexpr_function
def _total(values: int, ctas: int) -> str:
    """PTX: the sums of `values` values."""
    lines = [f"mov.f32 ${v}, 0f00000000; " for v in range(values)]
    lines += [f"ld.shared.f32 x, [here + {16 + 4 * (v * ctas + c)}]; add.f32 ${v}, ${v}, x; " for v in range(values) for c in range(ctas)]
    return "{ .reg .f32 x; " + _exchange(values, ctas) + "".join(lines) + "}"


@triton.constexpr_function
def _moments(ctas: int) -> str:
    """PTX: mean and sum of square deviations of all from (mean, sum of square deviations, count) of each."""
    at = [[f"[here + {16 + 4 * (v * ctas + c)}]" for c in range(ctas)] for v in range(3)]
    lines = ["mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 n, 0f00000000; "]
    lines += [f"ld.shared.f32 x, {at[0][c]}; ld.shared.f32 k, {at[2][c]}; fma.rn.f32 $0, x, k, $0; add.f32 n, n, k; " for c in range(ctas)]
    lines += ["div.rn.f32 $0, $0, n; "]
    lines += [
        f"ld.shared.f32 x, {at[0][c]}; ld.shared.f32 k, {at[2][c]}; sub.f32 x, x, $0; mul.f32 k, k, x; fma.rn.f32 $1, k, x, $1; "
        f"ld.shared.f32 x, {at[1][c]}; add.f32 $1, $1, x; "
        for c in range(ctas)
    ]
    return "{ .reg .f32 x, k, n; " + _exchange(3, ctas) + "".join(lines) + "}"


@triton.constexpr_function
def _peak(ctas: int) -> str:
    """PTX: the maximum of all maxima, and the sum of exponentials from it on of (maximum, sum from it on) of each."""
    at = [[f"[here + {16 + 4 * (v * ctas + c)}]" for c in range(ctas)] for v in range(2)]
    lines = ["mov.f32 $0, 0fFF800000; mov.f32 $1, 0f00000000; "]
    lines += [f"ld.shared.f32 x, {at[0][c]}; max.f32 $0, $0, x; " for c in range(ctas)]
    lines += ["setp.eq.f32 none, $0, 0fFF800000; selp.f32 base, 0f00000000, $0, none; "]
    lines += [
        f"ld.shared.f32 x, {at[0][c]}; ld.shared.f32 k, {at[1][c]}; sub.f32 x, x, base; mul.f32 x, x, 0f3FB8AA3B; ex2.approx.ftz.f32 x, x; "
        "fma.rn.f32 $1, x, k, $1; "
        for c in range(ctas)
    ]
    return "{ .reg .f32 x, k, base; .reg .pred none; " + _exchange(2, ctas) + "".join(lines) + "}"


@triton.jit
def begin(VALUES: tl.constexpr, CTAS: tl.constexpr, CLUSTER: tl.constexpr = True):
    """The boxes that exchanges of VALUES numbers a CTA go through."""
    box = 0
    if CLUSTER:
        box = tl.inline_asm_elementwise(_begin(VALUES, CTAS), "=&r,r", [CTAS], dtype=tl.int32, is_pure=False, pack=1)
    return box


@triton.jit
def total(x, box, turn, CTAS: tl.constexpr, CLUSTER: tl.constexpr = True):
    """The sum of x [CTAS], as [CTAS]."""
    if CLUSTER:
        x = tl.inline_asm_elementwise(_total(1, CTAS), "=&f,r,r,f", [box, turn, x], dtype=tl.float32, is_pure=False, pack=1)
    else:
        x = tl.zeros_like(x) + tl.sum(x, 0)
    return x


@triton.jit
def totals(x, y, box, turn, CTAS: tl.constexpr, CLUSTER: tl.constexpr = True):
    """The sums of x and of y [CTAS], as [CTAS]."""
    if CLUSTER:
        x, y = tl.inline_asm_elementwise(_total(2, CTAS), "=&f,=&f,r,r,f,f", [box, turn, x, y], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
    else:
        x, y = tl.zeros_like(x) + tl.sum(x, 0), tl.zeros_like(y) + tl.sum(y, 0)
    return x, y


@triton.jit
def moments(mean, square, count, box, turn, CTAS: tl.constexpr, CLUSTER: tl.constexpr = True):
    """Mean and sum of square deviations of a row, [CTAS], from those of its pieces and their lengths, float32 [CTAS] (Chan, Golub and LeVeque, 1983)."""
    if CLUSTER:
        mean, square = tl.inline_asm_elementwise(
            _moments(CTAS), "=&f,=&f,r,r,f,f,f", [box, turn, mean, square, count], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        whole = tl.sum(count * mean, 0) / tl.sum(count, 0)
        square = tl.zeros_like(square) + tl.sum(square + count * (mean - whole) * (mean - whole), 0)
        mean = tl.zeros_like(mean) + whole
    return mean, square


@triton.jit
def peak(top, mass, box, turn, CTAS: tl.constexpr, CLUSTER: tl.constexpr = True):
    """Maximum and sum of exponentials from it on of a row, [CTAS], from those of its pieces; a sum is from 0 on where the maximum is -inf."""
    if CLUSTER:
        top, mass = tl.inline_asm_elementwise(_peak(CTAS), "=&f,=&f,r,r,f,f", [box, turn, top, mass], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
    else:
        most = tl.max(top, 0)
        base = tl.where(most == float("-inf"), 0.0, most)
        mass = tl.zeros_like(mass) + tl.sum(mass * tl.exp(top - base), 0)
        top = tl.zeros_like(top) + most
    return top, mass
