"""LoRA adapters of mixed rows: every kernel against float64, rows without an adapter untouched, and memory of adapters that no row has unread."""

import pytest
import torch

from judge import assert_as_good_as_torch, poisoned
from onchip.core.kernel import Unsupported
from onchip.core.low_rank import LowRank
from onchip.kernels.fused import LOW_RANK
from onchip.ops.low_rank import add_low_rank, route_adapters

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
kernels = pytest.mark.parametrize("kernel", [pytest.param(k.name, marks=pytest.mark.gpu if k.needs_triton else ()) for k in LOW_RANK.kernels])


def check(rows, width, parts, rank, count, kernel, dtype, device, pick):
    """`pick`: adapters of rows; the last slot is never one of them, and holds NaN."""
    adapters = pick(rows, count - 1).int().to(device)
    x = poisoned((rows, width + 8), dtype, device)[:, 8:].copy_(torch.randn(rows, width, device=device))
    a, b = poisoned((count, len(parts) * rank, width), dtype, device), poisoned((count, sum(parts), rank), dtype, device)
    a[:-1], b[:-1] = torch.randn(a[:-1].shape, device=device) * width**-0.5, torch.randn(b[:-1].shape, device=device) * rank**-0.5
    y = poisoned((rows, sum(parts) + 8), dtype, device)[:, : sum(parts)].copy_(torch.randn(rows, sum(parts), device=device))
    low = LowRank(a, b, torch.tensor(parts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), parts)

    def formula(of):
        out = y.to(of, copy=True)
        for i in set(adapters.tolist()) & set(range(count)):
            here = adapters == i
            t = (x[here].to(of) @ a[i].to(of).T).split(rank, 1)
            out[here] += torch.cat([one @ part.T for one, part in zip(t, b[i].to(of).split(parts), strict=True)], 1)
        return out

    before, (low_precision, truth) = y.clone(), (formula(dtype), formula(torch.float64))
    ours = add_low_rank(y, x, low, route_adapters(adapters, count), kernel=kernel)
    assert ours is y
    assert_as_good_as_torch(y, low_precision, truth)
    without = (adapters < 0) | (adapters >= count)
    assert torch.equal(y[without], before[without])
    again = add_low_rank(before, x, low, route_adapters(adapters, count), kernel=kernel)
    assert torch.equal(again, y)


def mixed(rows, count):
    return torch.randint(-1, count, (rows,))


@kernels
@pytest.mark.parametrize(("rows", "width", "parts", "rank", "count", "dtype", "pick"), [
    (1, 63, (40,), 4, 2, FP32, lambda rows, count: torch.zeros(rows)),
    (37, 200, (150, 24, 24), 5, 4, FP32, mixed),
    (63, 1000, (130, 130), 16, 7, BF16, mixed),
    (50, 64, (96,), 33, 3, FP16, lambda rows, count: (torch.arange(rows) >= 17).int()),
    (300, 130, (70,), 8, 4, BF16, lambda rows, count: torch.arange(rows) // 110),
    (20, 40, (24,), 3, 4, FP32, lambda rows, count: torch.full((rows,), -1)),
    (20, 40, (24,), 3, 2, FP32, lambda rows, count: torch.arange(rows) % 2 * 9),
])  # fmt: skip
def test_low_rank(rows, width, parts, rank, count, dtype, pick, kernel, device):
    check(rows, width, parts, rank, count, kernel, dtype, device, pick)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    ("rows", "width", "parts", "rank", "count"), [(64, 4096, (4096, 1024, 1024), 16, 9), (5000, 14336, (4096,), 64, 5), (1, 4096, (14336, 14336), 8, 33)]
)
def test_large(rows, width, parts, rank, count, device):
    check(rows, width, parts, rank, count, "triton_low_rank", BF16, device, mixed)


def test_what_does_not_fit_is_refused():
    x, y, adapters = torch.zeros(3, 8), torch.zeros(3, 6), torch.zeros(3, dtype=torch.int32)
    low = LowRank(torch.zeros(2, 4, 8), torch.zeros(2, 6, 2), torch.tensor([4, 6], dtype=torch.int32), (4, 2))
    add_low_rank(y, x, low, route_adapters(adapters, 2))
    for words, change in (
        ("y is torch.float16", lambda: add_low_rank(y.half(), x, low, route_adapters(adapters, 2))),
        (r"y is \[3, 5\]", lambda: add_low_rank(y[:, :5], x, low, route_adapters(adapters, 2))),
        (r"parts \(4, 1\)", lambda: add_low_rank(y, x, low._replace(parts=(4, 1)), route_adapters(adapters, 2))),
        ("route has 2 rows", lambda: add_low_rank(y, x, low, route_adapters(adapters[:2], 2))),
        ("3 adapters, x 3 rows and low 2", lambda: add_low_rank(y, x, low, route_adapters(adapters, 3))),
        ("contiguous", lambda: add_low_rank(y.T.contiguous().T, x, low, route_adapters(adapters, 2))),
        (r"torch.int64 \[3\]", lambda: route_adapters(adapters.long(), 2)),
    ):
        with pytest.raises(ValueError, match=words):
            change()
    wide = LowRank(torch.zeros(1, 300, 8), torch.zeros(1, 6, 300), torch.tensor([6], dtype=torch.int32), (6,))
    with pytest.raises(Unsupported, match=r"rank 300 is more than 256|runs on NVIDIA"):
        add_low_rank(y, x, wide, route_adapters(adapters, 1), kernel="triton_low_rank")
