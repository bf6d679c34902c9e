"""Every public function in a compiled graph: no break, the eager result."""

import pytest
import torch

import onchip
from onchip.core.masks import parse

T = 24


def qkv(*lead):
    return [torch.randn(*lead, heads, 16) for heads in (4, 2, 2)]


def sampling(rows):
    floats = [torch.full((rows,), x) for x in (0.8, 0.9, 0.05)]
    ints = [torch.full((rows,), x, dtype=torch.int64) for x in (7, 3)]
    return onchip.Sampling(floats[0], torch.full((rows,), 20, dtype=torch.int32), *floats[1:], *ints)


def paged(q, mask):
    pages = torch.arange(8 * 4 * 2 * 16, dtype=torch.float32).view(8, 4, 2, 16).sin()
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    return onchip.paged_attention(q, onchip.PagedKV(pages, pages.cos(), table, torch.tensor([7, 4], dtype=torch.int32)), mask=mask)


def rope(x, append):
    x = x.clone()
    pool = torch.zeros(2, 3, 16, 2, 16) if append else (None, None)
    where = onchip.Append(pool[0], pool[1], torch.arange(T)) if append else None
    table = torch.linspace(-1, 1, 40 * 16).view(40, 16)
    out = onchip.rope_append(x, table, torch.arange(T), (4, 2), append=where)
    return [*out, x, *((pool[0].clone(), pool[1].clone()) if append else ())]


CALLS = {
    "attention": lambda: (lambda q, k, v: onchip.attention(q, k, v, mask=onchip.Window(5), return_lse=True), qkv(2, T)),
    "attention_packed": lambda: (
        lambda q, k, v: onchip.attention_packed(q, k, v, torch.tensor([0, 10, T], dtype=torch.int32), longest=14, return_lse=True),
        qkv(T),
    ),
    "paged_attention": lambda: (lambda q: paged(q, onchip.Causal()), [torch.randn(2, 1, 4, 16)]),
    "rms_norm": lambda: (lambda x: onchip.rms_norm(x, torch.ones(64)), [torch.randn(T, 64)]),
    "add_rms_norm": lambda: (lambda x, r: onchip.rms_norm(x, torch.ones(64), residual=r), [torch.randn(T, 64), torch.randn(T, 64)]),
    "gated_act": lambda: (lambda x: onchip.gated_act(x, "gelu"), [torch.randn(T, 64)]),
    "rope_append": lambda: (lambda x: rope(x, True), [torch.randn(T, 8 * 16)]),
    "rope": lambda: (lambda x: rope(x, False), [torch.randn(T, 8 * 16)]),
    "sample": lambda: (lambda x: onchip.sample(x, sampling(3)), [torch.randn(3, 100)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_fullgraph_gives_the_eager_result(name):
    function, inputs = CALLS[name]()
    eager = function(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("mask", [onchip.Full(), onchip.Causal(), onchip.Window(12)], ids=str)
def test_a_mask_survives_its_text(mask):
    assert parse(str(mask)) == mask
