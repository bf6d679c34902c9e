"""An OpenAI-compatible server over the engine: `onchip serve`. Needs the extra `serve`."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Modules and a model stay: to look them over again and again for garbage takes a seventh of a server's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
