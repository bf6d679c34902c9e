"""What a batch with several LoRA adapters is made of: their matrices for one product, and which row has which."""

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """Matrices of several adapters beside one weight, padded with zeros to one rank: `y += B (A x)` with one A for each part of y.

    a       [adapters, parts rank, in].        b      [adapters, out, rank], the adapter's scale in it.
    ends    int32 [parts], on the device: the column of y behind each part.        parts   the same as sizes, on the host: they add up to `out`.
    """

    a: Tensor
    b: Tensor
    ends: Tensor
    parts: tuple[int, ...]


class Route(NamedTuple):
    """Which adapter each row has.

    adapters   int32 [rows]: an index of LowRank's matrices, -1 for none.
    order      int64 [rows]: the rows sorted by adapter, those without one first.
    starts     int32 [adapters + 1]: where in `order` the rows of each adapter start, and where the last ones end.
    """

    adapters: Tensor
    order: Tensor
    starts: Tensor
