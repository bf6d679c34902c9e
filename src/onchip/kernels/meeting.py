"""Programs that share a row meet half way, so that a row too wide for one of them is read once:

    PHASE is BOTH on a GPU (BOTH_AMD):  load a piece -> store its sums -> `meet` -> load all sums -> finish the piece that is still in registers
    in the interpreter, where programs run one after the other, the same kernel is launched with PHASE FIRST (up to the sums), then SECOND (from there on).

Where two numbers a program are all there is to say, `tell` and `hear` stand for storing, meeting and loading. What only a row's last program has to
hear needs no phases: in the interpreter it runs last.

A row's programs are neighbours in the grid. A GPU starts programs in order, so those of the first row that is not done are all running as long as a row has
no more of them than the GPU holds at once: none waits for one that cannot start. Where it may hold fewer, `phases` makes two launches. Counters begin at 0
(`torch.zeros` in the call: part of a CUDA graph, and no two launches share them).
"""

import torch
import triton
import triton.language as tl

from onchip.core.device import Device, of

BOTH, FIRST, SECOND, BOTH_AMD = (tl.constexpr(n) for n in range(4))
MOST = tl.constexpr(32)  # programs that `hear` each other


def room(device: Device, warps: int) -> int:
    """How many programs of so many warps the GPU holds at once, whatever they are: a multiprocessor has registers for 8 warps of 255 each."""
    return device.sms * max(1, 8 // warps)


def phases(x: torch.Tensor, programs: int = 1, warps: int = 1) -> tuple[int, ...]:
    """The values of PHASE that a kernel on x, with so many programs a row, is launched with, in turn: tensors of a CPU are the interpreter's."""
    if x.device.type == "cpu" or programs > room(of(x.device), warps):
        return FIRST.value, SECOND.value
    return ((BOTH if torch.version.hip is None else BOTH_AMD).value,)


@triton.jit
def arrive(count_ptr):
    """What this program's threads have stored before, those see that wait for it."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(count_ptr, programs):
    """Until so many have arrived."""
    while tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()


@triton.jit
def meet(count_ptr, programs, PHASE: tl.constexpr):
    """Until `programs` have come here: what their threads have stored before, loads after it see. Two launches meet between them."""
    if PHASE != FIRST:
        arrive(count_ptr)
        wait_for(count_ptr, programs)


@triton.jit
def held(x, PHASE: tl.constexpr):
    """x, whose registers alone live through the wait: what is made of it afterwards is made again. In bfloat16 that is half of what float32 would take."""
    if PHASE != BOTH:  # the constraint of the assembly is NVIDIA's
        return x
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=4 // (x.dtype.primitive_bitwidth // 8))


@triton.jit
def tell(word_ptr, x, y, there=None):
    """Two float32 numbers for the others (or tensors of such, where they are `there`), in one word of 64 bits, which says by not being 0 that they are there;
    so they may not be 0 both.

    Shorter than `meet` by a fence and a reading: one way to L2 and one back, where those take three and a half ways there and back.
    """
    bits = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (y.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(word_ptr, bits, mask=there, sem="relaxed", scope="gpu")


@triton.jit
def _words(words_ptr, programs, PROGRAMS: tl.constexpr, PHASE: tl.constexpr):
    at = tl.arange(0, PROGRAMS)
    if PHASE == BOTH_AMD:  # `volatile` is not handed on there: a load would be moved out of the loop that waits (gfx942)
        words = tl.where(at < programs, tl.atomic_add(words_ptr + at, 0, mask=at < programs, sem="relaxed", scope="gpu"), 1)
    else:
        words = tl.load(words_ptr + at, mask=at < programs, other=1, volatile=True)
    return words


@triton.jit
def hear(words_ptr, programs, PROGRAMS: tl.constexpr, PHASE: tl.constexpr):
    """What each of `programs` has told, float32 [PROGRAMS] twice, when all have; (0, tiny) past them. Up to MOST each warp listens, without a barrier."""
    words = _words(words_ptr, programs, PROGRAMS, PHASE)
    while tl.min((words != 0).to(tl.int32)) == 0:
        words = _words(words_ptr, programs, PROGRAMS, PHASE)
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), words.to(tl.int32).to(tl.float32, bitcast=True)
