"""Kernels compiled ahead by launches that are withheld: for an H200, without one."""

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from onchip.kernels.compiling import Compilations, withheld


@triton.jit
def _double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


class Driver:
    """Of an H200 that is not there."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: "an H200 of test_compiling")
    get_current_stream = staticmethod(lambda device: 0)


def test_launches_ask_and_do_nothing_else(monkeypatch, tmp_path):
    if not isinstance(_double, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, before, counted = torch.ones(40), (JITFunction.run, JITFunction._do_compile), Compilations()
    counted.watch()
    for expected in ((2, 0), (2, 2)):  # compiled, and then found on disk
        with withheld() as asked:
            made = [_double[(1,)](x, n, BLOCK=block) for n, block in ((40, 64), (40, 64), (39, 64), (40, 128))]
        assert made == [None] * 4 and x.sum() == 40
        assert {name for name, _ in asked} == {"_double"} and len(asked) == 2
        assert (counted.compiled, counted.loaded) == expected
        assert (JITFunction.run, JITFunction._do_compile) == before
        kernels = _double.device_caches.pop(Driver.get_current_device())[0]
        assert len(kernels) == 2 and all("cubin" in kernel.asm for kernel in kernels.values())
