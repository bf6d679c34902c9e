"""Attention kernels write every result: `torch.empty` gives NaN here, so one that nobody wrote shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with this, torch.utils.deterministic fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)
