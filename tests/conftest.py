"""One set of kernel tests for three places: a GPU (`pytest -m gpu`), Triton's interpreter (TRITON_INTERPRET=1), and plain torch on a CPU."""

import os

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:
    from interpreter import repair

    repair()
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    on_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("large") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="too large for the interpreter: needs a GPU"))
        elif item.get_closest_marker("gpu") and not (on_gpu or INTERPRET):
            item.add_marker(pytest.mark.skip(reason="a GPU kernel: needs a GPU or TRITON_INTERPRET=1"))


@pytest.fixture
def device() -> torch.device:
    """Where kernel tests run."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
