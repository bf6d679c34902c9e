"""What the public functions of attention say to inputs that disagree."""

import pytest
import torch

import onchip
from onchip.core.masks import Causal
from onchip.ops.attention import PagedKV

FP32, INT32 = torch.float32, torch.int32


def zeros(*shape, dtype=FP32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        (zeros(5, 2, 16), zeros(1, 5, 2, 16), zeros(1, 5, 2, 16), "q, k, v have 3, 4, 4 dimensions; each needs 4"),
        (zeros(1, 5, 2, 16), zeros(1, 6, 2, 16), zeros(1, 5, 2, 16), r"k is \[1, 6, 2, 16\] and v \[1, 5, 2, 16\]; they must be equal"),
        (zeros(1, 5, 2, 16), zeros(1, 5, 2, 32), zeros(1, 5, 2, 32), "q has head dimension 16, k has 32"),
        (zeros(1, 5, 3, 16), zeros(1, 5, 2, 16), zeros(1, 5, 2, 16), "3 query heads are not a multiple of 2 key heads"),
        (zeros(1, 5, 2, 16), zeros(1, 5, 0, 16), zeros(1, 5, 0, 16), "2 query heads are not a multiple of 0 key heads"),
        (zeros(1, 5, 2, 16), zeros(1, 5, 2, 16, dtype=torch.float16), zeros(1, 5, 2, 16, dtype=torch.float16), "q is torch.float32, k torch.float16"),
        (zeros(1, 5, 2, 16), zeros(1, 5, 2, 16).to("meta"), zeros(1, 5, 2, 16), "q is on cpu, k on meta, v on cpu; move them to one device"),
        (zeros(2, 5, 2, 16), zeros(1, 5, 2, 16), zeros(1, 5, 2, 16), "k has batch 1, q has 2"),
    ],
)
def test_dense_inputs_that_disagree(q, k, v, words):
    with pytest.raises(ValueError, match=f"^attention: .*{words}"):
        onchip.attention(q, k, v)


def test_packed_inputs_that_disagree():
    x, offsets = zeros(5, 2, 16), torch.tensor([0, 5], dtype=INT32)
    with pytest.raises(ValueError, match=r"offsets are torch.int64 \[2\]; give int32 \[batch \+ 1\]"):
        onchip.attention_packed(x, x, x, offsets.long(), longest=5)
    with pytest.raises(ValueError, match=r"offsets are torch.int32 \[1\]"):
        onchip.attention_packed(x, x, x, offsets[:1], longest=5)
    with pytest.raises(ValueError, match="k has 4 tokens, q has 5"):
        onchip.attention_packed(x, x[:4], x[:4], offsets, longest=5)


def test_paged_inputs_that_disagree():
    q, pages = zeros(2, 1, 2, 16), zeros(4, 8, 2, 16)
    good = PagedKV(pages, pages, zeros(2, 3, dtype=INT32), zeros(2, dtype=INT32))
    assert onchip.paged_attention(q, good).shape == q.shape
    for bad, words in (
        (good._replace(page_table=good.page_table.long()), r"page_table is torch.int64 \[2, 3\]; give int32 \[2, most pages\]"),
        (good._replace(page_table=good.page_table[:1]), r"page_table is torch.int32 \[1, 3\]"),
        (good._replace(lengths=good.lengths.long()), r"lengths are torch.int64 \[2\]; give int32 \[2\]"),
        (good._replace(lengths=good.lengths[:1]), r"lengths are torch.int32 \[1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            onchip.paged_attention(q, bad)


def test_gradients_take_a_kernel_that_has_them():
    q, k, v = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3))
    with onchip.record() as decisions:
        out = onchip.attention(q, k, v, mask=Causal())
        with torch.no_grad():
            onchip.attention(q, k, v, mask=Causal(), kernel="blocked")
    assert decisions[0].kernel.name == "reference" and decisions[0].problem.grad and not decisions[1].problem.grad
    out.sum().backward()
    assert q.grad.isfinite().all() and k.grad.any() and v.grad.any()
    with pytest.raises(onchip.Unsupported, match="grad True is not False"):
        onchip.attention(q, k, v, kernel="blocked")
