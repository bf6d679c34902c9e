"""Attention kernels write every result: `torch.empty` gives NaN here, so one that nobody wrote shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with this, torch.utils.deterministic fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only wait for a second thread, several times as long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
