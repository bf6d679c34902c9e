"""Attention over 16,384 tokens keeps no N x N buffer on any path but the reference."""

import pytest
import torch

import onchip
from onchip.core import device as devices
from onchip.core.masks import Causal, Document, Full, Window

N = 16_384
ALLOWED = 32 << 20  # bytes; booleans for all pairs, the smallest buffer of that size, take 64 MiB or more in every test here


def peak(call) -> int:
    """The most bytes a call held at once on the CPU, what it returns included, from every allocation that torch makes in it."""
    devices.of(torch.device("cpu"))  # measures copies and products of its own, once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def qkv(len_q=N, len_k=N, device="cpu", heads=(1, 1), dim=16, dtype=torch.float32):
    return [torch.randn(1, n, h, dim, device=device, dtype=dtype) for n, h in ((len_q, heads[0]), (len_k, heads[1]), (len_k, heads[1]))]


def test_the_measure_sees_the_reference():
    """Which has all scores in memory at once, and a few copies of them."""
    n = 2048
    inputs = qkv(n, n)
    assert peak(lambda: onchip.attention(*inputs, kernel="reference")) >= 2 * 4 * n * n


def step(inputs, **how):
    """Forward and backward."""
    out = onchip.attention(*inputs, kernel="blocked", **how)
    return torch.autograd.grad(out, inputs, torch.ones(()).expand(out.shape))


BANDS = (Full(), Causal(), Window(1000))
IDS = torch.arange(N) // 3000


@pytest.mark.parametrize(
    "mask", [*BANDS, Document(IDS) & Causal(), lambda b, h, i, j: (i - j) % 7 == 0], ids=["full", "causal", "window", "document", "function"]
)
def test_blocked(mask):
    inputs = qkv()
    assert peak(lambda: onchip.attention(*inputs, mask=mask, kernel="blocked")) < ALLOWED


@pytest.mark.parametrize("mask", [*BANDS, Document(IDS) & Causal()], ids=["full", "causal", "window", "document"])
def test_blocked_backward(mask):
    """torch's kernel computes the tiles: the weights are there again in parts."""
    inputs = [t.requires_grad_() for t in qkv()]
    assert peak(lambda: step(inputs, mask=mask)) < ALLOWED


FEW = N // 8  # rows: the whole takes long; a boolean a pair still takes 32 MiB
TABLE = torch.randn(1, 2 * N, requires_grad=True)
OURS = {
    "softcap": {"softcap": 20.0, "mask": Window(1000, 1000)},
    "dropout": {"dropout": 0.1, "mask": Window(1000)},
    "a table that learns": {"score": lambda s, b, h, i, j: s + TABLE[h, i + j]},
}


@pytest.mark.parametrize("name", OURS)
def test_blocked_of_our_own_products(name):
    inputs = [t.requires_grad_() for t in qkv(FEW)]
    assert peak(lambda: onchip.attention(*(t.detach() for t in inputs), return_lse=True, kernel="blocked", **OURS[name])) < ALLOWED
    assert peak(lambda: step(inputs, **OURS[name])) < ALLOWED


def test_blocked_with_fewer_queries_than_keys():
    """The path whose tiles take a slice of the mask."""
    inputs = [t.requires_grad_() for t in qkv(N // 2)]
    assert peak(lambda: step(inputs, mask=Causal())) < ALLOWED


def test_blocked_of_a_matrix_that_is_there():
    """A mask and a bias for all pairs, 80 MiB, are not copied; of the bias's gradient, 64 MiB, there is one."""
    n = N // 4
    inputs = [t.requires_grad_() for t in qkv(n, n)]
    mask, bias = torch.rand(n, n) < 0.5, torch.randn(n, n)
    assert peak(lambda: step(inputs, mask=mask, bias=bias)) < ALLOWED
    learns = [*inputs, bias.requires_grad_()]
    assert peak(lambda: torch.autograd.grad(onchip.attention(*inputs, mask=mask, bias=bias, kernel="blocked").sum(), learns)) < bias.nbytes + ALLOWED


def test_blocked_packed():
    q, k, v = (x[0].requires_grad_() for x in qkv())
    offsets = torch.tensor([0, 384, N], dtype=torch.int32)
    how = {"longest": N - 384, "mask": Causal(), "kernel": "blocked"}
    assert peak(lambda: torch.autograd.grad(onchip.attention_packed(q, k, v, offsets, **how).sum(), (q, k, v))) < ALLOWED


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(1000)], ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
def test_triton_prefill_takes_its_outputs_and_no_more(mask, return_lse, device):
    q, k, v = qkv(device=device, heads=(8, 2), dim=128, dtype=torch.bfloat16)
    onchip.attention(q, k, v, mask=mask, return_lse=return_lse, kernel="triton_prefill")  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    onchip.attention(q, k, v, mask=mask, return_lse=return_lse, kernel="triton_prefill")
    outputs = q.nbytes + return_lse * 4 * 8 * N
    assert torch.cuda.max_memory_allocated() - before <= outputs + (1 << 20)
