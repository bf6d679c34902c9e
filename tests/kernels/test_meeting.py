"""Programs that wait for each other: all of a row's are running at once, whatever the GPU, and what they wait for is read again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from offline import compile_for
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.kernels import meeting
from onchip.kernels.fused import CROSS_ENTROPY_IN_PLACE, cross_entropy, softmax

SLICE = replace(gpu("A100"), sms=14)  # the smallest part that an A100 is cut into
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("device", [SLICE, gpu("H200")], ids=lambda device: str(device.sms))
@pytest.mark.parametrize(("width", "dtype"), [(32000, BF16), (128256, BF16), (128256, FP32), (262144, FP32)])
def test_a_row_in_place(width, dtype, device):
    tiles = cross_entropy.configs(Rows("cross_entropy_in_place", 8, width, dtype), device)[0]
    assert triton.cdiv(width, tiles.block) <= min(meeting.MOST.value, meeting.room(device, tiles.warps)) and tiles.warps <= 32


def test_a_row_that_too_few_programs_can_hold():
    kernel = CROSS_ENTROPY_IN_PLACE.kernels[0]
    assert not kernel.refuses(Rows("cross_entropy_in_place", 8, 1 << 20, FP32), gpu("H200"))
    assert "rows of 4194308 bytes, of at most 4194304" in str(kernel.refuses(Rows("cross_entropy_in_place", 8, (1 << 20) + 1, FP32), gpu("H200")))


def test_two_launches_where_not_all_programs_may_run_at_once(monkeypatch):
    x, tiles = SimpleNamespace(device=torch.device("cuda", 0)), softmax.configs(Rows("softmax", 8, 131072, FP32), SLICE)[0]
    for device, launches in ((SLICE, 2), (gpu("H200"), 1)):
        monkeypatch.setattr(meeting, "of", lambda _, device=device: device)
        assert len(meeting.phases(x, 32, tiles.warps)) == launches


def test_what_is_waited_for_is_read_again_on_amd():
    """Triton hands no `volatile` on there: of a load nothing stays in the loop."""
    signature = dict.fromkeys(("y_ptr", "dy_ptr", "dx_ptr"), "*bf16") | {"words_ptr": "*i64", "inverse": "fp32"}
    signature |= dict.fromkeys(("width", "pieces", "y_stride", "dy_stride"), "i32")
    constexprs = {"LOG": False, "SPAN": 1, "PIECES": 32, "BLOCK": 2048, "PHASE": meeting.BOTH_AMD.value}
    assert "atomic_add_x2" in compile_for(softmax._backward_wide, signature, constexprs, "gfx942").ptx
