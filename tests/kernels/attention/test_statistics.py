"""What every backward kernel starts from: delta and LSE, beside plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from test_hopper_backward_emulated import statistics as in_torch

from onchip import Causal
from onchip.core.problem import Attention
from onchip.kernels.attention.statistics import statistics


@pytest.mark.gpu
@pytest.mark.parametrize(("phases", "batch", "tile"), [(1, 2, 1), (1, 2, 64), (4, 1, 64)])
def test_statistics(phases, batch, tile, device):
    """Filled up to whole tiles with rows that see nothing; of a batch of one also from later rows on, as TMA needs it of packed sequences."""
    heads, rows, dim = 3, 130, 64
    out, d_out = (torch.randn(batch, heads, rows, dim, device=device) for _ in range(2))
    lse, d_lse = torch.randn(batch, heads, rows, device=device), torch.randn(batch, heads, rows, device=device)
    lse[..., 5] = -torch.inf
    p = Attention("backward", batch, rows, rows, heads, heads, dim, torch.float32, Causal())
    ours, theirs = (make(p, out, d_out, lse, d_lse, 1.5, tile, phases) for make in (statistics, in_torch))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
