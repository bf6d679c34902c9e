"""Attention over quantised pages in plain torch, against float64 of what the codes stand for and of what they were made from; and making them."""

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch, poisoned
from onchip.core.formats import FORMATS
from onchip.core.masks import Causal, Full, KeyPadding, Window
from onchip.ops.attention import PagedKV
from onchip.ops.formats import channel_scale, quantise_cache

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
each = pytest.mark.parametrize("form", FORMATS, ids=str)
portable = pytest.mark.parametrize("kernel", ["blocked", "reference"])


def cache(lengths, page=16, kv_heads=2, dim=64, dtype=FP32):
    """Sequences on shuffled pages; what no sequence uses holds NaN."""
    used = [-(-n // page) for n in lengths]
    pages = torch.randperm(sum(used) + 2)
    k, v = (poisoned((len(pages), page, kv_heads, dim), dtype, "cpu") for _ in range(2))
    table = torch.full((len(lengths), max(used) + 1), int(pages[-1]), dtype=torch.int32)
    for i, (n, own) in enumerate(zip(lengths, pages[: sum(used)].split(used), strict=True)):
        table[i, : len(own)] = own
        slots = (own[:, None] * page + torch.arange(page)).flatten()[:n]
        for pool in (k, v):
            pool.flatten(0, 1)[slots] = torch.randn(n, kv_heads, dim).to(dtype)
    return PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32))


def numbers(quantised: PagedKV, dtype) -> PagedKV:
    """What it stands for, as a cache of tensors."""
    return quantised._replace(k=quantised.k.dequantised(dtype), v=quantised.v.dequantised(dtype))


def check(kernel, q, quantised, **how):
    """Beside the reference over a cache of tensors in q's dtype that hold the same numbers, rounded."""
    truth = onchip.paged_attention(q.double(), numbers(quantised, FP64), kernel="reference", return_lse=True, **how)
    low = onchip.paged_attention(q, numbers(quantised, q.dtype), kernel="reference", return_lse=True, **how)
    ours = onchip.paged_attention(q, quantised, kernel=kernel, return_lse=True, **how)
    assert ours[0].dtype == q.dtype and ours[1].dtype == FP32
    for got, torchs, right in zip(ours, low, truth, strict=True):
        assert_as_good_as_torch(got, torchs, right)
    assert torch.equal(onchip.paged_attention(q, quantised, kernel=kernel, **how), ours[0])


@portable
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@each
def test_what_codes_stand_for(form, dtype, kernel):
    original = cache((70, 1, 0, 33), dtype=dtype)
    check(kernel, torch.randn(4, 1, 4, 64).to(dtype), quantise_cache(original, form, torch.rand(2, 64) + 0.5))


@portable
@pytest.mark.parametrize(("page", "kv_heads", "dim"), [(1, 1, 128), (7, 3, 64), (24, 2, 192)])
@pytest.mark.parametrize("form", ["e4m3", "int8/32", "int4"])
def test_pages_of_any_size(form, page, kv_heads, dim, kernel):
    check(kernel, torch.randn(2, 1, 6, dim), quantise_cache(cache((50, 13), page, kv_heads, dim), form))


@portable
@pytest.mark.parametrize(
    "how",
    [
        {"mask": Window(20)},
        {"mask": Full(), "sinks": torch.randn(4)},
        {"mask": Causal(), "softcap": 3.0},
        {"mask": KeyPadding(torch.rand(2, 600) > 0.3) & Causal(), "scale": 0.3},
        {"mask": Causal(), "sinks": torch.randn(4), "batch_invariant": True},
    ],
    ids=lambda how: " ".join(how),
)
@pytest.mark.parametrize("len_q", [1, 5])
def test_masks_scores_and_many_queries(len_q, how, kernel):
    """More keys than go together, and windows that begin within a tile of them."""
    check(kernel, torch.randn(2, len_q, 4, 64), quantise_cache(cache((600, 530)), "int8/32"), **how)


def test_tiles_of_keys_are_put_together(monkeypatch):
    """Whatever their size."""
    monkeypatch.setattr("onchip.kernels.attention.blocked.DEQUANTISED", 32)
    for lengths, mask in (((300, 32, 33), Causal()), ((300, 64, 1), Window(40))):
        check("blocked", torch.randn(3, 1, 4, 64), quantise_cache(cache(lengths), "int4/32"), mask=mask, sinks=torch.randn(4))


@portable
@each
def test_beside_keys_that_were_not_quantised(form, kernel):
    """Twice the error of quantising alone, in float64, is all."""
    original, q = cache((200, 90)), torch.randn(2, 1, 4, 64)
    quantised = quantise_cache(original, form)
    truth = onchip.paged_attention(q.double(), original._replace(k=original.k.double(), v=original.v.double()), kernel="reference")
    rounded = onchip.paged_attention(q.double(), numbers(quantised, FP64), kernel="reference")
    assert_as_good_as_torch(onchip.paged_attention(q, quantised, kernel=kernel), rounded, truth)


def test_errors_by_format():
    """Fewer bits and larger groups cost more, in this order; channels with outliers cost less where they are divided out first."""
    original, q = cache((400,), dim=128), torch.randn(1, 1, 8, 128)
    k = original.k.clone()
    k[..., 5] *= 30

    def error(form, k, channel=None):
        exact = original._replace(k=k)
        right = onchip.paged_attention(q.double(), exact._replace(k=k.double(), v=original.v.double()), kernel="reference")
        return (onchip.paged_attention(q, quantise_cache(exact, form, channel)) - right).pow(2).mean().sqrt().item()

    errors = [error(form, original.k) for form in ("int8/32", "int8", "e4m3", "e5m2", "int4/32", "int4")]
    assert errors == sorted(errors), errors
    plain, divided = error("int4", k), error("int4", k, channel_scale(k))
    assert divided < 0.7 * plain, (plain, divided)


@pytest.mark.parametrize("form", ["e5m2", "int4/32"])
def test_in_a_compiled_graph(form):
    """One operator, without a break, for keys that were divided too."""
    quantised, q = quantise_cache(cache((40, 7)), form, torch.rand(2, 64) + 0.5), torch.randn(2, 1, 4, 64)
    run = torch.compile(lambda q, quantised: onchip.paged_attention(q, quantised) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(q, quantised), onchip.paged_attention(q, quantised) * 2, rtol=0, atol=0)


def test_appending_in_a_compiled_graph_is_refused():
    """In words of ours; around a function that the compiler leaves alone it goes."""
    qkv, table = torch.randn(5, 6 * 64), torch.cat((torch.rand(9, 32).cos(), torch.rand(9, 32).sin()), -1)
    pool = onchip.PagePool(1, 2, 4, 1, 64, dtype=FP32, device=torch.device("cpu"), format="int8")
    append = onchip.Append(*pool.layer(0), torch.arange(5) + 2)

    def step(x, append):
        return onchip.rope_append(x, table, torch.arange(5), (4, 1), append=append)[0] + 1

    with pytest.raises(Exception, match=r"writing to a quantised cache in a compiled graph is not implemented; use torch\.compiler\.disable"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(qkv.clone(), append)
    outside = torch.compiler.disable(step)
    ours = torch.compile(lambda x, append: outside(x, append) * 2, backend="aot_eager")(qkv.clone(), append)
    torch.testing.assert_close(ours, step(qkv.clone(), append) * 2)


def test_gradients_of_a_channel_scale():
    """Also where nothing else has one."""
    quantised = quantise_cache(cache((40, 7)), "int8", torch.rand(2, 64) + 0.5)
    channel, q = quantised.k.channel.clone().requires_grad_(), torch.randn(2, 1, 4, 64)
    found = [onchip.paged_attention(q, quantised._replace(k=quantised.k._replace(channel=channel)), kernel=kernel) for kernel in ("auto", "reference")]
    ours, right = (torch.autograd.grad(out.square().sum(), channel)[0] for out in found)
    torch.testing.assert_close(ours, right)


def test_gradients_of_queries():
    """Of codes alone, none."""
    quantised, q = quantise_cache(cache((40, 7)), "int8"), torch.randn(2, 1, 4, 64, requires_grad=True)
    onchip.paged_attention(q, quantised).square().sum().backward()
    (right,) = torch.autograd.grad(onchip.paged_attention(q, numbers(quantised, FP32), kernel="reference").square().sum(), q)
    torch.testing.assert_close(q.grad, right)


def test_quantise_cache_in_parts(monkeypatch):
    original = cache((70, 33))
    whole = quantise_cache(original, "int4/32", torch.rand(2, 64) + 0.5)
    monkeypatch.setattr("onchip.ops.formats.AT_ONCE", 3 * 16 * 2 * 64)
    parts = quantise_cache(original, whole.k.format, whole.k.channel)
    for ours, right in ((parts.k, whole.k), (parts.v, whole.v)):
        for a, b in zip(ours.tensors, right.tensors, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    assert parts.page_table is original.page_table and parts.k.channel is whole.k.channel and parts.v.channel is None


def test_channel_scale():
    k = torch.randn(100, 2, 64)
    k[:, 0, 7] *= 50
    k[:, 1, 3] = 0
    k[5, 0, 1], k[6, 0, 2] = torch.nan, torch.inf
    scale = channel_scale(k.view(10, 10, 2, 64))
    assert scale.shape == (2, 64) and scale.dtype == FP32
    torch.testing.assert_close(scale.log().mean(-1), torch.zeros(2), atol=1e-5, rtol=0)
    divided = (k.nan_to_num(0, 0) / scale).abs().amax(0)
    torch.testing.assert_close(divided[0], divided[0, :1].expand(64))
    assert scale[1].argmin() == 3 and scale[0].argmax() == 7
    assert torch.equal(channel_scale(torch.zeros(3, 2, 4)), torch.ones(2, 4))


def test_wrong_arguments():
    original = cache((20,))
    quantised, q = quantise_cache(original, "int8"), torch.randn(1, 1, 4, 64)
    other = quantise_cache(original, "int4")
    for wrong, error, words in (
        (quantised._replace(v=original.v), TypeError, "v is Tensor, the other Codes; give both as Codes of one format"),
        (quantised._replace(k=original.k), TypeError, "k is Tensor, the other Codes; give both"),
        (quantised._replace(v=other.v), ValueError, "v has format int4, k int8; they must be of one"),
        (quantised._replace(v=quantised.v._replace(zero=None)), ValueError, "v.zero is None; format int8 of heads of 64 takes torch.bfloat16"),
        (quantised._replace(k=quantised.k._replace(scale=quantised.k.scale.float())), ValueError, "k.scale is torch.float32"),
        (quantised._replace(v=quantised.v._replace(channel=torch.ones(2, 64))), ValueError, "v has a channel scale, which only keys have"),
        (quantised._replace(k=quantised.k._replace(channel=torch.ones(64))), ValueError, r"k.channel is torch.float32 \[64\]"),
    ):
        with pytest.raises(error, match=words):
            onchip.paged_attention(q, wrong)
    with pytest.raises(ValueError, match="q has head dimension 32, k has 64"):
        onchip.paged_attention(q[..., :32], quantised)
    with pytest.raises(ValueError, match="the cache has format int8 already"):
        quantise_cache(quantised, "int4")
    with pytest.raises(ValueError, match=r"channel is torch.float32 \[64\] on cpu; give float32 \[2, 64\] on cpu"):
        quantise_cache(original, "int8", torch.ones(64))
    with pytest.raises(ValueError, match="channel is a list; give float32"):
        quantise_cache(original, "int8", [1.0])
    with pytest.raises(ValueError, match=r"k is torch.int32, v torch.float32; give floats"):
        quantise_cache(original._replace(k=original.k.int()), "int8")
    for wrong in ({"k": None}, {"v": [1.0]}, {"k": original.k[0]}, {"v": original.v[:1]}, {"v": original.v.to_sparse()}):
        with pytest.raises(ValueError, match=r"^quantise_cache: [kv] is .*; give dense tensors \[pages, page, kv_heads, dim\]"):
            quantise_cache(original._replace(**wrong), "int8")
    with pytest.raises(TypeError, match=r"^quantise_cache: cache is a tuple; give PagedKV"):
        quantise_cache(tuple(original), "int8")
    with pytest.raises(ValueError, match=r"^channel_scale: k is torch.float32 \[0, 2, 64\]; give floats \[..., kv_heads, dim\], of a token or more"):
        channel_scale(torch.zeros(0, 2, 64))
    with pytest.raises(TypeError, match=r"^channel_scale: k is a list; give a tensor of floats"):
        channel_scale([1.0])
    with pytest.raises(ValueError, match="format int8/64 of heads of 96"):
        quantise_cache(cache((20,), dim=96), "int8/64")
    with pytest.raises(ValueError, match=r"k is torch.float32 \[64\]; give floats"):
        channel_scale(torch.ones(64))
