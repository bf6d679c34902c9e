"""What a launch asks of the GPU beside its programs: to begin before the kernel in front of it has ended, and L1 instead of shared memory."""

import ctypes
import functools
import sys
import weakref

import torch

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuda.h, in percent
_asked = weakref.WeakSet()


def starts_early(x: torch.Tensor) -> bool:
    """Whether kernels on x's device know programmatic dependent launch: NVIDIA's from Hopper on."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 9


def prefer_cache(kernel) -> None:
    """Ask that a multiprocessor's memory be L1 while `kernel` runs, a compiled one of Triton on an NVIDIA GPU; from its next launch on.

    Without the request a kernel takes a multiprocessor as the one before it left it. Behind one that has much shared memory 28 KB are L1, and that is all that
    loads have room for on their way: at that a chain of products that read weights goes at 3.5 TB/s, and at 4.1 with 256 KB.
    None stands for one that was not launched (`compiling.withheld`). Raises RuntimeError where the driver refuses.
    """
    if kernel is None or kernel in _asked:
        return
    failed = _driver().cuFuncSetAttribute(ctypes.c_void_p(kernel.function), CARVEOUT, 0)
    if failed:
        raise RuntimeError(f"prefer_cache: the CUDA driver refused the share of shared memory of {kernel.name} with error {failed}; its number is in cuda.h")
    _asked.add(kernel)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
