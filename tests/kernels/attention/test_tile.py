"""What the attention kernels share: the memory of what is made from tensors."""

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels.attention.tile import remembered


def test_remembered_until_a_tensor_changes():
    """By torch's count of writes; one tensor in another's place is another tensor; what inference mode made counts nothing."""
    made, tensor = [], torch.zeros(3)

    def ask(what="a", of=tensor):
        return remembered((what,), (of, None), tensor.device, lambda: made.append(what) or len(made))

    assert [ask(), ask(), ask("b"), ask("b"), ask()] == [1, 1, 2, 2, 1]
    tensor += 1
    assert [ask(), ask(), ask(of=tensor.clone()), ask()] == [3, 3, 4, 3]
    with torch.inference_mode():
        blank = torch.zeros(3)
    assert [ask(of=blank), ask(of=blank)] == [5, 6]
