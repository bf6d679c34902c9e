"""Programs that share a row meet half way, so that a row too wide for one of them is read once:

    PHASE is BOTH on a GPU:  load a piece -> store its sums -> `arrive` -> `wait` -> load all sums of the row -> finish the piece that is still in registers
    in the interpreter, where programs run one after the other, the same kernel is launched with PHASE FIRST (up to the sums), then SECOND (from there on).

A row's programs are neighbours in the grid. A GPU starts programs in order, so those of the first row that is not done are all running as long as a row has
fewer of them than the GPU holds at once: none waits for one that cannot start. Counters begin at 0 (`torch.zeros` in the call: part of a CUDA graph, and no
two launches share them).
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
