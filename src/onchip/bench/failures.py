"""What may go wrong with one contender, and does not end the run."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from onchip.core.kernel import Unsupported

ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ImportError, OSError, subprocess.SubprocessError, Unsupported)
FOREIGN_ERRORS = (  # what compilers and libraries derive from Exception itself; looked up in modules that are loaded
    ("triton.errors", "TritonError"),
    ("cutlass.base_dsl.common", "DSLBaseError"),
    ("flashinfer.utils", "BackendSupportedError"),
    ("flashinfer.utils", "GPUArchitectureError"),
)


@contextmanager
def noted(errors: dict[str, str], name: str) -> Iterator[None]:
    """Write down the error of one contender and go on; another kind of error than a kernel or a library raises ends the run."""
    try:
        yield
    except failures() as error:
        lines = str(error).strip().splitlines()
        errors[name] = f"{type(error).__name__}: {' '.join(lines[:3])[:300]}" if lines else type(error).__name__


def failures() -> tuple[type[BaseException], ...]:
    loaded = [(sys.modules[module], name) for module, name in FOREIGN_ERRORS if module in sys.modules]
    return (*ERRORS, *(getattr(module, name) for module, name in loaded if hasattr(module, name)))
