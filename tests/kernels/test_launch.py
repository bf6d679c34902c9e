"""What a launch asks of the GPU, beside a driver that only notes it."""

from types import SimpleNamespace

import pytest
import torch

from onchip.kernels import launch


class Kernel(SimpleNamespace):
    """Of Triton's compiled kernels what is looked at."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.fixture
def driver(monkeypatch):
    calls = SimpleNamespace(made=[], error=0)

    def attribute(function, number, percent):
        calls.made.append((function.value, number, percent))
        return calls.error

    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuFuncSetAttribute=attribute))
    return calls


def test_a_kernel_is_asked_for_once(driver):
    kernels = [Kernel(name="_linear", function=1 << 40), Kernel(name="_linear", function=7)]
    for kernel in (*kernels, *kernels):
        launch.prefer_cache(kernel)
    assert driver.made == [(1 << 40, 9, 0), (7, 9, 0)]


def test_a_refusal_is_said_each_time(driver):
    kernel, driver.error = Kernel(name="_linear", function=5), 400
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused the share of shared memory of _linear with error 400"):
            launch.prefer_cache(kernel)
    assert len(driver.made) == 2


@pytest.mark.gpu
def test_the_driver_knows_it(device):
    """After a launch each compiled form of the products has it."""
    from onchip.kernels.fused import skinny
    from onchip.ops.linear import skinny_linear

    if not launch.starts_early(torch.empty(1, device=device)):
        pytest.skip("from Hopper on")
    x, w = (torch.randn(n, 64, device=device).bfloat16() for n in (1, 32))
    skinny_linear(x, w, kernel="triton_skinny")
    kernels = [kernel for cache in skinny._linear.device_caches.values() for kernel in cache[0].values()]
    assert kernels and all(kernel in launch._asked for kernel in kernels)
