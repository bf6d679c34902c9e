"""What the layers of a model make of the same tensors is made once a pass: the list of tiles of all sequences took 10 us of a GPU and four launches a layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

from onchip.core.trace import readable

T = TypeVar("T")
_pass: ContextVar[dict | None] = ContextVar("pass", default=None)


@contextmanager
def one_pass() -> Iterator[None]:
    """Nothing inside, all on one stream, writes the lengths, offsets and masks that kernels read: what is made of them is made once. A CUDA graph may capture
    all of it."""
    token = _pass.set({})
    try:
        yield
    finally:
        _pass.reset(token)


def passing() -> bool:
    """Whether a pass is on."""
    return _pass.get() is not None


def once(what: tuple, tensors: list, make: Callable[[], T]) -> T:
    """What `make()` gives, made once a pass for a `what` and these tensors; in each call where no pass is on."""
    known = _pass.get()
    if known is None:
        return make()
    key = (*what, *map(id, tensors))
    if key not in known:
        known[key] = tensors, make()  # who lives keeps its id
    return known[key][1]


def ends(numbers: Tensor) -> tuple[int, int] | None:
    """The least and the greatest of whole numbers, looked at once a pass; None where a check may not look, or there are none."""
    if not readable(numbers) or not numbers.numel():
        return None
    return once(("ends",), [numbers], lambda: tuple(map(int, numbers.aminmax())))
