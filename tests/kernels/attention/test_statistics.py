"""What every backward kernel starts from: delta and LSE, beside plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from test_hopper_backward_emulated import statistics as in_torch

from onchip import Causal
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention.statistics import apart, statistics, statistics_apart


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


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [0, 3], ids=["whole", "used"])
@pytest.mark.parametrize(("tile", "dim", "many"), [(64, 64, 0), (16, 64, 0), (32, 256, 0), (64, 64, 70)])
def test_statistics_apart(tile, dim, many, cut, device):
    """Each sequence of a packed batch begins a tile, and all that is no row of its own, or of none that is used, sees nothing."""
    lengths = [5, 100, 64, 0, 33, 1, 70, *[3] * many]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    used = (offsets.diff() - cut).clamp(min=0).int()
    heads, tokens = 3, int(offsets[-1])
    out, d_out = (torch.randn(1, heads, tokens, dim, device=device) for _ in range(2))
    lse, d_lse = (torch.randn(heads, tokens, device=device) for _ in range(2))
    lse[:, 7] = -torch.inf
    p = Attention("backward", len(lengths), 100, 100, heads, heads, dim, torch.float32, Causal(), "packed", 0, tokens)
    x = Operands(1.0, *[offsets.to(device)] * 2, *[used.to(device) if cut else None] * 2)
    delta, scaled = statistics_apart(p, x, out, d_out, lse, d_lse, 1.5, tile)
    theirs = in_torch(p, out, d_out, lse[None], d_lse[None], 1.5, 1)
    expected = torch.zeros_like(delta), torch.full_like(scaled, torch.inf)
    for b, start in enumerate(offsets[:-1].tolist()):
        to, length = apart.fn(start, b, tile), int(used[b])
        for a, e in zip(theirs, expected, strict=True):
            e[0, :, to : to + length] = a[0, :, start : start + length]
    for a, e in zip((delta, scaled), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
