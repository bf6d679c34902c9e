"""LoRA adapters of a batch: each row of a product has its own, or none."""

import torch
from torch import Tensor

from onchip.core.arguments import refuse_gradients
from onchip.core.low_rank import LowRank, Route
from onchip.core.problem import Rows
from onchip.dispatch import select


def route_adapters(adapters: Tensor, count: int) -> Route:  # int32 [rows]
    """Rows sorted by adapter, for `add_low_rank`: once a forward pass, whatever the number of layers. Nothing waits for the device.

    adapters   of each row an index below `count`, or -1: none. An index of `count` or more is none, too: to refuse it would be to wait.
    """
    if adapters.dtype != torch.int32 or adapters.ndim != 1:
        raise ValueError(f"route_adapters: adapters is {adapters.dtype} {list(adapters.shape)}; give int32 [rows]")
    found, order = torch.sort(adapters, stable=True)
    starts = torch.searchsorted(found, torch.arange(count + 1, dtype=torch.int32, device=adapters.device), out_int32=True)
    return Route(adapters, order, starts)


def add_low_rank(
    y: Tensor,  # [rows, out]
    x: Tensor,  # [rows, in]
    low: LowRank,
    route: Route,
    *,
    kernel: str = "auto",
) -> Tensor:
    """`y[r] += B[i] (A[i] x[r])` in place, i the adapter of row r; rows without one stay as they are (Hu et al., 2021).

    Of a y in parts (q, k, v of one product) each has a matrix A of its own. A x is summed in float32, rounded to x's dtype on the way to B, and what is
    added to y is rounded with it, once. Raises ValueError for shapes or dtypes that disagree. It has no gradient, and says so.
    """
    refuse_gradients("add_low_rank", "train with torch's products", y, x, low.a, low.b)
    if torch.compiler.is_compiling():
        torch.ops.onchip.add_low_rank(y, x, *low, *route, kernel)
        return y
    (count, outer, width), (_, out, rank) = low.a.shape, low.b.shape
    if not y.dtype == x.dtype == low.a.dtype == low.b.dtype:
        raise ValueError(f"add_low_rank: y is {y.dtype}, x {x.dtype}, low.a {low.a.dtype}, low.b {low.b.dtype}; they must be of one dtype")
    if y.shape != (len(x), out) or x.shape[1:] != (width,) or outer != rank * len(low.parts) or sum(low.parts) != out:
        shapes = f"y is {list(y.shape)}, x {list(x.shape)}, low.a {list(low.a.shape)}, low.b {list(low.b.shape)} in parts {low.parts}"
        raise ValueError(f"add_low_rank: {shapes}; give [rows, out], [rows, in], [adapters, parts rank, in] and [adapters, out, rank], parts that sum to out")
    if len(route.adapters) != len(x) or len(route.starts) != count + 1:
        raise ValueError(
            f"add_low_rank: the route has {len(route.adapters)} rows and {len(route.starts) - 1} adapters, x {len(x)} rows and low {count} adapters; "
            "make it by route_adapters for these"
        )
    if y.stride(1) != 1 or x.stride(1) != 1 or not (low.a.is_contiguous() and low.b.is_contiguous()):
        raise ValueError("add_low_rank: rows of y and x, low.a and low.b must be contiguous")
    parts = "+".join(map(str, low.parts))
    problem = Rows("low_rank", len(x), out, x.dtype, f"from {width} rank {rank} parts {parts} of {count}")
    return select(problem, x.device, kernel).launch(y, x, low, route)


@torch.library.custom_op("onchip::add_low_rank", mutates_args=("y",))
def _op(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor, parts: list[int], adapters: Tensor, order: Tensor, starts: Tensor, kernel: str
) -> None:  # fmt: skip
    add_low_rank(y, x, LowRank(a, b, ends, tuple(parts)), Route(adapters, order, starts), kernel=kernel)


_op.register_fake(lambda *_: None)


__all__ = ["LowRank", "Route", "add_low_rank", "route_adapters"]
