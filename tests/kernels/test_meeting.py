"""Programs that wait for each other: all of a row's are running at once, whatever the GPU, and what they wait for is read again."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from offline import compile_for
from onchip.core.device import gpu
from onchip.core.problem import Rows
from onchip.kernels import meeting
from onchip.kernels.fused import CROSS_ENTROPY_IN_PLACE, softmax

SLICE = replace(gpu("A100"), sms=14)  # the smallest part that an A100 is cut into


def test_a_row_that_too_few_programs_can_hold():
    kernel = CROSS_ENTROPY_IN_PLACE.kernels[0]
    assert not kernel.refuses(Rows("cross_entropy_in_place", 8, 1 << 20, torch.float32), gpu("H200"))
    assert "rows of 4194308 bytes, of at most 4194304" in str(kernel.refuses(Rows("cross_entropy_in_place", 8, (1 << 20) + 1, torch.float32), gpu("H200")))


def test_two_launches_where_not_all_programs_may_run_at_once(monkeypatch):
    x, tiles = SimpleNamespace(device=torch.device("cuda", 0)), softmax.configs(Rows("softmax", 8, 131072, torch.float32), SLICE)[0]
    for device, launches in ((SLICE, 2), (gpu("H200"), 1)):
        monkeypatch.setattr(meeting, "of", lambda _, device=device: device)
        assert len(meeting.phases(x, 32, tiles.warps)) == launches


def test_what_is_waited_for_is_read_again_on_amd():
    """Triton hands no `volatile` on there: of a load nothing stays in the loop."""
    signature = dict.fromkeys(("y_ptr", "dy_ptr", "dx_ptr"), "*bf16") | {"words_ptr": "*i64", "inverse": "fp32"}
    signature |= dict.fromkeys(("width", "pieces", "y_stride", "dy_stride"), "i32")
    constexprs = {"LOG": False, "SPAN": 1, "PIECES": 32, "BLOCK": 2048, "PHASE": meeting.BOTH_AMD.value}
    assert "atomic_add_x2" in compile_for(softmax._backward_wide, signature, constexprs, "gfx942").ptx
