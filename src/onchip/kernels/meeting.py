"""Programs that share a row meet half way, so that a row too wide for one of them is read once:

    PHASE is BOTH on a GPU:  load a piece -> store its sums -> `arrive` -> `wait` -> load all sums of the row -> finish the piece that is still in registers
    in the interpreter, where programs run one after the other, the same kernel is launched with PHASE FIRST (up to the sums), then SECOND (from there on).

A row's programs are neighbours in the grid. A GPU starts programs in order, so those of the first row that is not done are all running as long as a row has
fewer of them than the GPU holds at once: none waits for one that cannot start. Counters begin at 0 (`torch.zeros` in the call: part of a CUDA graph, and no
two launches share them).

Two sums need no counter: `publish` stores a word that is not 0, and `gather` loads a row's words until none is. That is one trip to L2 and back less.
"""

import torch
import triton
import triton.language as tl

BOTH, FIRST, SECOND = (tl.constexpr(n) for n in range(3))


def phases(x: torch.Tensor) -> tuple[int, ...]:
    """The values of PHASE that a kernel on x is launched with, in turn: tensors of a CPU are the interpreter's."""
    return (FIRST.value, SECOND.value) if x.device.type == "cpu" else (BOTH.value,)


@triton.jit
def arrive(count_ptr):
    """What the threads of this program have stored may be read by those that `wait`."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait(count_ptr, programs):
    """Until `programs` have arrived; loads after it see what they stored."""
    while tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()


@triton.jit
def publish(word_ptr, x, y, mask=None):
    """Two float32 numbers as one int64 where `gather` finds them: the bits of x turned round, which only one NaN has as 0."""
    word = (~x.to(tl.int32, bitcast=True)).to(tl.int64) & 0xFFFFFFFF | y.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(word_ptr, tl.where(word == 0, 1, word), mask=mask)


@triton.jit
def gather(word_ptr, PHASE: tl.constexpr):
    """The pairs at these addresses, each as soon as it has been published; words are 0 before. BOTH is PTX: each thread waits for its own words."""
    if PHASE == BOTH:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 w; again_${:uid}: ld.relaxed.gpu.global.b64 w, [$2]; setp.eq.b64 p, w, 0; @p bra again_${:uid}; "
            "mov.b64 {$0, $1}, w; bar.warp.sync -1; }",
            "=r,=r,l", [word_ptr], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        word = tl.load(word_ptr)
        low = word.to(tl.int32)
        high = (word >> 32).to(tl.int32)
    return (~low).to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
