"""The end of a unit whose keys were cut, without a second launch: the last program to arrive adds the parts of all up, in the order of the keys.

Who is last changes from run to run, what it computes does not: it reads every part, its own too, from memory, and adds up as `decode_merge` does.

Programs arrive by adding to a number that is 0 when a launch begins, and the last puts it back. A cut unit begins in one program, and a program begins at
most one such unit, so there is a number for each program. Calls that may run at the same time must not share them: see `arrivals_of`.
"""

import threading
from dataclasses import dataclass

import torch

from onchip.kernels.again import forget, lasting
from onchip.kernels.attention.decode_tiles import owner_of, share_of
from onchip.kernels.hopper import gl, gluon, one_more, thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# ---- device


@dataclass(frozen=True)
class Merging:
    """A tile of parts [parts, height, width], 64 float32 numbers a thread, so that 32 KiB are on their way at once. A warp has rows of its own, so that sums
    over parts are a thread's, and take no shared memory: `hopper_decode` has none left."""

    height: int
    width: int
    warps: int

    @property
    def parts(self):
        return 2048 * self.warps // (self.height * self.width)

    @property
    def layout(self):
        lanes = min(32, self.width // 4)
        return gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [1, self.warps, 1], [2, 1, 0])


@gluon.jit
def part_of(at, begin, first, items, each):
    """What there is to know of a part, from item `at` of the list on, of a unit of `items` from `first` on, in a word. Shares are as `each`
    says (`share_length`), this program's begins at `begin`.

    Bit 0: which of the program's two places the part goes to. Bit 1: which of its two the unit's first part does. From bit 2: the program
    of that, and from bit 16: how many parts there are.
    """
    owner = owner_of(first, each)
    count = owner_of(first + items - 1, each) - owner + 1
    return (at > begin).to(gl.int32) | ((first > share_of(owner, first, each)).to(gl.int32) << 1) | (owner << 2) | (count << 16)


@gluon.jit
def add_up(part, unit, group, out, lse, sinks, parts, DIM_V: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr):
    """o = sum_s exp(lse_s - lse) o_s, lse = log sum_s exp(lse_s) of a unit whose parts are there, the sink one more in the sum, if this program is the last.

    part     `part_of` it.        unit   sequence, key head, first row, queries, and the first of these.
    out, lse   pointer and strides of sequence, token and head (lse: sequence and head); lse's pointer may be None.
    parts    float32 [2 programs, ROWS, M.width], their LSE in base 2 [.., ROWS], and the numbers of arrivals.
    """
    owner, count, later = (part >> 2) & 0x3FFF, part >> 16, (part >> 1) & 1
    thread_barrier()  # what all threads have stored is this program's
    if gl.atomic_add(parts[2] + owner, 1, sem="acq_rel", scope="gpu") == count - 1:
        gl.store(parts[2] + owner, 0)
        b, kv_head, first_row, queries, token = unit
        P: gl.constexpr = M.parts
        H: gl.constexpr = M.height
        DV: gl.constexpr = M.width
        TILE: gl.constexpr = M.layout
        LOGS: gl.constexpr = gl.SliceLayout(2, TILE)
        ROW: gl.constexpr = gl.SliceLayout(0, LOGS)
        RESULT: gl.constexpr = gl.SliceLayout(0, TILE)
        OUT_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
        dims = gl.arange(0, DV, layout=gl.SliceLayout(0, RESULT))[None, :]
        rows = gl.minimum(queries * group - first_row, ROWS)
        for row in range(0, rows, H):
            r = row + gl.arange(0, H, layout=ROW)
            there = r < rows
            top = gl.full([H], float("-inf"), gl.float32, ROW)
            sums = gl.zeros([H], gl.float32, ROW)
            acc = gl.zeros([H, DV], gl.float32, RESULT)
            for first in range(0, count, P):
                s = first + gl.arange(0, P, layout=gl.SliceLayout(1, LOGS))
                at = (2 * (owner + s) + gl.where(s == 0, later, 0)).to(gl.int64)[:, None] * ROWS + r[None, :]
                real = (s < count)[:, None] & there[None, :]
                logs = gl.load(parts[1] + at, mask=real, other=float("-inf"))
                x = gl.load(parts[0] + (at * DV)[:, :, None] + dims[None, :, :], mask=real[:, :, None] & (dims < DIM_V)[None, :, :], other=0.0)
                new_top = gl.maximum(top, gl.max(logs, 0))
                base = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights, shrink = gl.exp2(logs - base[None, :]), gl.exp2(top - base)
                acc = acc * gl.convert_layout(shrink, OUT_ROW)[:, None] + gl.sum(x * weights[:, :, None], 0)
                sums = sums * shrink + gl.sum(weights, 0)
                top = new_top
            query, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
            grown = gl.full([H], 1.0, gl.float32, ROW)
            if sinks is not None:
                logit = gl.load(sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E
                top, sums, grown = one_more(top, sums, logit)
            grown = grown * gl.where(sums == 0.0, 0.0, gl.div_rn(1.0, sums))
            x = acc * gl.convert_layout(grown, OUT_ROW)[:, None]
            to = b.to(gl.int64) * out[1] + (token + query).to(gl.int64) * out[2] + head * out[3]
            kept = gl.convert_layout(there, OUT_ROW)[:, None] & (dims < DIM_V)
            gl.store(out[0] + (gl.convert_layout(to, OUT_ROW)[:, None] + dims), x.to(out[0].dtype.element_ty), mask=kept)
            if lse[0] is not None:
                gl.store(lse[0] + b.to(gl.int64) * lse[1] + head * lse[2] + token + query, (top + gl.log2(sums)) * LN2, mask=there)


# ---- host

EACH = 1 << 11  # programs of a call at most
LEAST = 64  # programs: of 24 (9 heads over 3, d64, 1k) a merge apart took 5.9 us, this 6.2; of 64 (32 over 8, d128, 1k) 7.5 and 7.4
MOST = 16  # parts of a unit on the average: of 32 (1x128k) 128.3 and 129.3
CALLS = 1 << 10  # captured calls that a piece of memory is for, 8 MiB


def merging_of(rows: int, width: int, warps: int) -> Merging:
    """For units of so many rows and columns: one row a warp at least, or as many as it can read at once."""
    return Merging(min(16, max(warps * max(1, 128 // width), 1 << (rows - 1).bit_length())), width, warps)


class _Arrivals:
    """Numbers of a device that are 0 between launches: of each stream, whose calls come one after the other, and of each call that a graph has captured,
    which holds their address alone: so they stay as long as the process, 8 KiB a call."""

    def __init__(self, device: torch.device):
        self.device, self.streams, self.captured, self.pieces, self.lock = device, {}, [], [], threading.Lock()

    def of_stream(self, stream: int) -> tuple[torch.Tensor, bool]:
        few, new = len(self.captured) < CALLS // 2, stream not in self.streams
        if few:  # not while capturing, where zeros would be zeros anew in every replay
            with self.lock:
                self.pieces.append(torch.zeros(CALLS, EACH, dtype=torch.int32, device=self.device))
                self.captured += self.pieces[-1].unbind()
        if new:
            self.streams[stream] = torch.zeros(EACH, dtype=torch.int32, device=self.device)
        return self.streams[stream], few or new

    def of_graph(self) -> torch.Tensor | None:
        if len(self.captured) < CALLS // 2:
            forget()  # so that the next eager call comes by and makes more
        with self.lock:
            return self.captured.pop() if self.captured else None


_of: dict[int, _Arrivals] = {}


def arrivals_of(q: torch.Tensor, programs: int, units: int) -> tuple[torch.Tensor | None, bool]:
    """int32 [programs or more] that are 0 when the next launch on q's device begins, if that leaves them so; None: there are none, so merge apart. And
    whether a launch has just made them. Of few programs, and of many for each unit, a merge apart is faster.

    A stream's are its own. A captured call has some for ever, which were made before the capture: a graph may run beside another one, or beside eager
    calls. Where nothing on the device came before the capture there are none.
    """
    if not LEAST <= programs <= min(EACH, MOST * units):
        return None, False
    if not q.is_cuda:
        return torch.zeros(EACH, dtype=torch.int32, device=q.device), True
    found = _of.get(q.device.index)
    if torch.cuda.is_current_stream_capturing():
        return found and found.of_graph(), False
    if found is None:
        found = _of.setdefault(q.device.index, _Arrivals(q.device))
    numbers, new = found.of_stream(torch.cuda.current_stream(q.device).cuda_stream)
    return lasting(numbers), new
