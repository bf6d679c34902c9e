"""What the clock is held against."""

from collections.abc import Callable
from typing import NamedTuple


class Call(NamedTuple):
    """What is timed: (time of `run` - time of `minus`) / `count` seconds. `run` returns what can be checked, or `result` does after it."""

    run: Callable
    minus: Callable | None = None
    count: int = 1
    result: Callable | None = None
