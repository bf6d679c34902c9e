"""A latent cache in e4m3: its bytes, and attention over it."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal
from onchip.ops.attend import PagedKV
from onchip.ops.latent import attend_latent, dequantise_latent, quantise_latent

BF16 = torch.bfloat16


def test_bytes_by_hand():
    """FlashMLA's layout: 512 codes, four float32 scales of 128 each, 64 bfloat16."""
    latent = torch.randn(3, 1, 576).to(BF16)
    latent[1, 0, 128:256] = 0
    packed = quantise_latent(latent)
    assert packed.shape == (3, 1, 656) and packed.dtype == torch.uint8
    scales = packed[..., 512:528].contiguous().view(torch.float32)
    for tile in range(4):
        columns = latent[..., 128 * tile : 128 * tile + 128].float()
        want = columns.abs().amax(-1) / 448
        assert torch.equal(scales[..., tile][want > 0], want[want > 0])
        codes = packed[..., 128 * tile : 128 * tile + 128].contiguous().view(torch.float8_e4m3fn).float()
        assert ((codes * scales[..., tile, None] - columns).abs() <= columns.abs() / 16 + scales[..., tile, None] * 2**-10).all()
    assert torch.equal(packed[..., 528:].contiguous().view(BF16), latent[..., 512:])


def test_there_and_back():
    latent = torch.randn(5, 16, 1, 576).to(BF16)
    back = dequantise_latent(quantise_latent(latent))
    assert back.shape == latent.shape and back.dtype == BF16
    assert torch.equal(back[..., 512:], latent[..., 512:])
    assert ((back - latent).abs() <= latent.abs() / 15 + latent.abs().amax() * 2**-17).all()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("len_q", [1, 3])
def test_attention(kernel, len_q):
    """Against float64 over what the bytes say; unused slots hold bytes of NaN, and the table beyond a sequence names no page."""
    lengths, page, heads = (40, 0, 17), 16, 20
    order = torch.randperm(8, dtype=torch.int32)
    packed = torch.full((8, page, 1, 656), 255, dtype=torch.uint8)
    table = torch.full((3, 4), 1 << 20, dtype=torch.int32)
    at = 0
    for row, n in zip(table, lengths, strict=True):
        for p in range(-(-n // page)):
            row[p] = order[at]
            tokens = min(page, n - p * page)
            packed[order[at], :tokens] = quantise_latent(torch.randn(tokens, 1, 576).to(BF16))
            at += 1
    q, used = torch.randn(3, len_q, heads, 576).to(BF16), torch.tensor(lengths, dtype=torch.int32)
    result = attend_latent(q, packed, table, used, return_lse=True, kernel=kernel)
    assert result[0].shape == (3, len_q, heads, 512)

    def reference(dtype):
        latent = dequantise_latent(packed).to(dtype)
        cache = PagedKV(latent, latent[..., :512], table.clamp(max=7), used)
        return onchip.paged_attention(q.to(dtype), cache, mask=Causal(), return_lse=True, kernel="reference")

    for ours, low, truth in zip(result, reference(BF16), reference(torch.float64), strict=True):
        slack = 2.0 if ours.dtype == BF16 else 200.0  # torch's own attention in bfloat16 keeps LSE to 2e-5
        assert_as_good_as_torch(ours, low, truth, slack)


def test_gradient_of_queries():
    """Of the formula in plain torch, over a copy."""
    packed = quantise_latent(torch.randn(2, 16, 1, 576).to(BF16))
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    q = torch.randn(1, 2, 4, 576).to(BF16).requires_grad_()
    out = attend_latent(q, packed, table, lengths)
    assert torch.equal(out, attend_latent(q.detach(), packed, table, lengths))
    latent = dequantise_latent(packed)
    again = onchip.paged_attention(q, PagedKV(latent, latent[..., :512], table, lengths))
    assert torch.equal(*(torch.autograd.grad(o.float().square().sum(), q)[0] for o in (out, again)))


def test_under_autocast():
    packed, table = quantise_latent(torch.randn(2, 16, 1, 576)), torch.tensor([[1, 0]], dtype=torch.int32)
    q, lengths = torch.randn(1, 1, 4, 576), torch.tensor([20], dtype=torch.int32)
    with torch.autocast("cpu", BF16):
        out = attend_latent(q, packed, table, lengths)
    assert out.dtype == BF16 and torch.equal(out, attend_latent(q.to(BF16), packed, table, lengths))


def test_errors():
    with pytest.raises(ValueError, match="576"):
        quantise_latent(torch.zeros(3, 512))
    with pytest.raises(ValueError, match="uint8"):
        dequantise_latent(torch.zeros(3, 656))
    for function in (quantise_latent, dequantise_latent):
        for wrong, words in (([1.0], "is a list; give"), (torch.tensor(1.0), r"is torch.float32 \[\] on cpu; give")):
            with pytest.raises(ValueError, match=f"^{function.__name__}: .* {words}"):
                function(wrong)
    with pytest.raises(ValueError, match="pages, page, 1"):
        attend_latent(torch.zeros(1, 1, 2, 576), torch.zeros(4, 16, 656, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1).int())
    q, packed, table = torch.zeros(1, 1, 2, 576), torch.zeros(4, 16, 1, 656, dtype=torch.uint8), torch.tensor([[3, 4]], dtype=torch.int32)
    with pytest.raises(ValueError, match="attend_latent: page_table has pages 3 to 4; the cache has 0 to 3"):
        attend_latent(q, packed, table, torch.tensor([17]).int())
    shape = r"q is .*; give \[batch, len_q, heads, 576\]"
    for wrong, words in (((None, packed), shape), ((q[0], packed), shape), ((q, None), "packed is a NoneType")):
        with pytest.raises(ValueError, match=f"attend_latent: {words}"):
            attend_latent(*wrong, table, torch.tensor([17]).int())
    with pytest.raises(ValueError, match="attend_latent: lengths are a list"):
        attend_latent(q, packed, table, [17])


@pytest.mark.parametrize("batch, width", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_of_no_page(batch, width):
    table, lengths = torch.zeros(batch, width, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    q, packed = torch.randn(batch, 1, 4, 576).to(BF16), torch.zeros(0, 16, 1, 656, dtype=torch.uint8)
    out, lse = attend_latent(q, packed, table, lengths, return_lse=True)
    assert torch.equal(out, out.new_zeros(batch, 1, 4, 512)) and torch.equal(lse, lse.new_full((batch, 4, 1), -torch.inf))


def test_kernels_by_name():
    """Those over a copy too; what is not there is named with what is."""
    packed, table = quantise_latent(torch.randn(2, 16, 1, 576)), torch.tensor([[1, 0]], dtype=torch.int32)
    q, lengths = torch.randn(1, 1, 4, 576).to(BF16).requires_grad_(), torch.tensor([20], dtype=torch.int32)
    assert torch.equal(attend_latent(q, packed, table, lengths, kernel="bf16_of_latent"), attend_latent(q, packed, table, lengths))
    with pytest.raises(Unsupported, match=r"^attend_latent: kernel 'hopper_mla_codes' has no gradient, and no place in a compiled graph; leave"):
        attend_latent(q, packed, table, lengths, kernel="hopper_mla_codes")
    with pytest.raises(
        Unsupported, match=r"^attend_latent: no kernel is named 'hoper_mla_codes'; it has hopper_mla_codes, bf16_of_latent, blocked, reference, and"
    ):
        attend_latent(q.detach(), packed, table, lengths, kernel="hoper_mla_codes")
