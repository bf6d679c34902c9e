"""What the ranks of a model share to sum up over them."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup


class Boxes(NamedTuple):
    """Memory that the ranks of one host write each other's parts of sums to.

    boxes   of each rank in order: [2, ranks, rows, width], all within reach of this one. Every number is all ones (a NaN) at first, and between sums.
    turns   int32 [rows], this rank's alone: which of the 2 a row's next sum takes. 0 at first.
    memory  what keeps the others' memory within reach.
    """

    boxes: tuple[Tensor, ...]
    turns: Tensor
    memory: object = None


class Ranks(NamedTuple):
    """Rank `rank` of `of`, as an operator that sums over them takes it.

    boxes   None where the ranks have no memory that all can write to; `apart` is then why, as a sentence.
    """

    rank: int = 0
    of: int = 1
    group: ProcessGroup | None = None
    boxes: Boxes | None = None
    apart: str = ""
