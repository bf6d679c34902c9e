"""`scaled_dot_product_attention` beside torch's own, in values and gradients, and the patch with torch's modules."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import onchip
from judge import assert_as_good_as_torch
from onchip.integrations import sdpa

TORCH = F.scaled_dot_product_attention


def seen(*shape):
    """A bool mask in which query 0 sees nothing."""
    mask = torch.rand(shape) > 0.3
    mask[..., :1, :] = False
    return mask


SHAPES = {  # query, key, value
    "plain": ((2, 3, 7, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
    "longer keys": ((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    "shorter keys": ((2, 3, 9, 16), (2, 3, 5, 16), (2, 3, 5, 16)),
    "wide values": ((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 24)),
    "one": ((1, 1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8)),
    "two dimensions": ((5, 16), (9, 16), (9, 16)),
    "three dimensions": ((3, 5, 16), (3, 9, 16), (3, 9, 16)),
    "five dimensions": ((2, 2, 3, 5, 16), (2, 2, 3, 9, 16), (2, 2, 3, 9, 16)),
    "broadcast batch": ((2, 3, 5, 16), (1, 3, 9, 16), (2, 3, 9, 16)),
    "broadcast heads": ((2, 3, 5, 16), (2, 1, 9, 16), (2, 1, 9, 16)),
    "broadcast query": ((1, 1, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    "broadcast rank": ((3, 5, 16), (2, 3, 9, 16), (2, 1, 9, 16)),
    "no batch": ((0, 3, 5, 16), (0, 3, 9, 16), (0, 3, 9, 16)),
    "no queries": ((2, 3, 0, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    "no keys": ((2, 3, 5, 16), (2, 3, 0, 16), (2, 3, 0, 16)),
}
MASKS = {  # query and key length -> the keywords
    "full": lambda q, k: {},
    "scale": lambda q, k: {"scale": 0.3},
    "causal": lambda q, k: {"is_causal": True},
    "bool": lambda q, k: {"attn_mask": seen(q, k)},
    "float": lambda q, k: {"attn_mask": torch.randn(q, k).masked_fill(~seen(q, k), -torch.inf)},
    "keys": lambda q, k: {"attn_mask": torch.rand(1, k) > 0.3},
}


def by_kernel(*tensors, **how):
    """torch's by its kernel for CPUs, which takes four dimensions and none that broadcasts: the exponentials of its plain operators are more exact."""
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    out = TORCH(*(t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), 1, *t.shape[-2:]) for t in tensors), **how)
    return out.view(*lead, *out.shape[-2:])


def check(inputs, keywords, dtype=torch.float32):
    """Values and gradients, of the mask's too, beside torch's in `dtype` and in float64."""
    results, torchs = [], TORCH if {"attn_mask", "enable_gqa"} & {*keywords} else by_kernel
    for function, kind in ((sdpa.scaled_dot_product_attention, dtype), (TORCH, dtype), (torchs, dtype), (TORCH, torch.float64)):
        tensors = [t.detach().to(kind).requires_grad_() for t in inputs]
        given = dict(keywords)
        if isinstance(mask := given.get("attn_mask"), torch.Tensor) and mask.is_floating_point() and type(mask) is torch.Tensor:
            given["attn_mask"] = mask.detach().to(kind).requires_grad_()
            tensors.append(given["attn_mask"])
        out = function(*tensors[:3], **given)
        weight = torch.linspace(-1, 1, max(1, out.numel()), dtype=torch.float64)[: out.numel()].view(out.shape).to(kind)
        out.backward(weight)
        results.append([out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in tensors)])
    for n, (ours, *low, truth) in enumerate(zip(*results, strict=True)):
        assert ours.shape == truth.shape and ours.dtype == dtype
        assert_as_good_as_torch(ours, tuple(low), truth, 3.0 if n else 2.0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch(shape, mask):
    inputs = [torch.randn(s) for s in SHAPES[shape]]
    check(inputs, MASKS[mask](inputs[0].shape[-2], inputs[1].shape[-2]))


@pytest.mark.parametrize("shape", [(1, 1, 5, 9), (2, 1, 5, 9), (1, 3, 5, 9), (2, 3, 5, 9), (2, 1, 1, 9), (3, 5, 9)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_that_broadcast(shape, kind):
    inputs = [torch.randn(2, 3, n, 16) for n in (5, 9, 9)]
    check(inputs, {"attn_mask": torch.randn(shape) if kind == "float" else torch.rand(shape) > 0.3})


@pytest.mark.parametrize("shape", [(9,), (1,), ()], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_keys_alone(shape, kind):
    """torch takes them on its way in plain operators, and on others not."""
    mask = torch.randn(shape) if kind == "float" else torch.rand(shape) > 0.1
    q, k, v = (torch.randn(2, 3, n, 16) for n in (5, 9, 9))
    ours = sdpa.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, TORCH(q, k, v, mask.expand(5, 9).contiguous()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 9), (3, 5, 9), (1, 1, 3, 5, 9), (2, 1, 1, 5, 9), (4, 1, 5, 9), (2, 4, 3, 5, 9)], ids=str)
def test_masks_over_five_dimensions(shape):
    check([torch.randn(2, 4, 3, n, 16) for n in (5, 9, 9)], {"attn_mask": torch.randn(shape)})


@pytest.mark.parametrize("heads", [(6, 2, 2), (6, 1, 1), (6, 6, 2), (6, 2, 1)], ids=str)
@pytest.mark.parametrize("lead", [(2,), (), (2, 2)], ids=str)
def test_groups_of_heads(heads, lead):
    check([torch.randn(*lead, h, n, 16) for h, n in zip(heads, (5, 9, 9), strict=True)], {"enable_gqa": True, "is_causal": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    check([torch.randn(2, 3, n, 16) for n in (5, 9, 9)], {"attn_mask": torch.rand(5, 9) > 0.3}, dtype)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right], ids=lambda b: b.__name__)
@pytest.mark.parametrize("sizes", [(5, 9), (7, 7)], ids=str)
def test_causal_bias_objects(bias, sizes):
    check([torch.randn(2, 3, n, 16) for n in (sizes[0], sizes[1], sizes[1])], {"attn_mask": bias(*sizes)})


def test_dropout_keeps_the_mean_and_drops():
    q, k = torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 300, 8)
    out = sdpa.scaled_dot_product_attention(q, k, torch.ones(1, 1, 300, 8), dropout_p=0.25)
    assert abs(out.mean() - 1) < 0.01 and out.std() > 0.01
    torch.testing.assert_close(sdpa.scaled_dot_product_attention(q, k, torch.ones(1, 1, 300, 8), dropout_p=0.0), torch.ones(1, 1, 200, 8))


X = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("inputs", "keywords", "words"),
    [
        ((X, X, X), {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "give one of them"),
        ((X, X, X), {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "Explicit attn_mask should not be set when is_causal=True"),
        ((X, X, X), {"attn_mask": causal_upper_left(5, 5), "is_causal": True}, "CausalBias should not be used with causal=True"),
        ((X, X, X), {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, "attn_mask is torch.int64"),
        ((X[None], X[None], X[None]), {"attn_mask": torch.ones(3, 1, 5, 5)}, r"attn_mask is \[3, 1, 5, 5\]; its leading dimensions"),
        ((X[None], X[None], X[None]), {"attn_mask": torch.ones(1, 1, 2, 4, 5, 5)}, "its leading dimensions"),
        ((X, X, X), {"attn_mask": causal_lower_right(4, 5)}, r"CausalBias of \(4, 5\)"),
        ((X, X, X), {"dropout_p": 1.0}, "dropout 1.0"),
        ((X, X[:, :2], X[:, :2]), {}, "4, 2 and 2 heads"),
        ((X, *[torch.zeros(3, 4, 5, 8)] * 2), {}, r"query, key and value have batches \[2\], \[3\] and \[3\]; make them equal, or 1 where all share one"),
        ((X, X.half(), X), {}, "cast them to one dtype"),
        ((X, X, X[0, 0, 0]), {}, r"\[4, 4, 1\] dimensions"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(inputs, keywords, words):
    for kind in (ValueError, RuntimeError):  # onchip's, and torch's
        with pytest.raises(kind, match=words):
            sdpa.scaled_dot_product_attention(*inputs, **keywords)


@pytest.mark.parametrize("given", [{"query": None}, {"key": [X]}, {"attn_mask": [[True]]}], ids=lambda given: next(iter(given)))
def test_what_is_no_tensor_is_refused(given):
    with pytest.raises(TypeError, match=f"{next(iter(given))} is a .*; give a tensor"):
        sdpa.scaled_dot_product_attention(**{"query": X, "key": X, "value": X, **given})


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2, 4, 8), torch.zeros(2, 3, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="attention_packed"):
        sdpa.scaled_dot_product_attention(nested, nested, nested)


# ---- the patch


def test_the_patch_comes_off():
    fast, scripted = torch.backends.mha.get_fastpath_enabled(), dict(torch.jit._builtins._get_builtin_table())
    with sdpa.installed():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention and not torch.backends.mha.get_fastpath_enabled()
        with sdpa.installed():
            sdpa.install()
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is TORCH and torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.jit._builtins._get_builtin_table() == scripted
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCH


def test_a_patch_over_the_patch_stays(monkeypatch):
    with sdpa.installed():
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", theirs := lambda *args: TORCH(*args))
            with pytest.raises(RuntimeError, match=r"^sdpa.uninstall: torch.nn.functional.scaled_dot_product_attention is .* by now; take that away first$"):
                sdpa.uninstall()
            assert F.scaled_dot_product_attention is theirs
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is TORCH


def test_a_patch_that_torch_was_put_back_over_comes_off():
    fast = torch.backends.mha.get_fastpath_enabled()
    sdpa.install()
    F.scaled_dot_product_attention = TORCH
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCH and torch.backends.mha.get_fastpath_enabled() == fast
    with sdpa.installed():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention


MODULES = {
    "MultiheadAttention": lambda x, pad: (nn.MultiheadAttention(32, 4, batch_first=True), (x, x, x), {"key_padding_mask": pad, "need_weights": False}),
    "MultiheadAttention, causal": lambda x, pad: (
        nn.MultiheadAttention(32, 4, batch_first=True),
        (x, x, x),
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True, "need_weights": False},
    ),
    "TransformerEncoder": lambda x, pad: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2),
        (x,),
        {"src_key_padding_mask": pad},
    ),
    "Transformer": lambda x, pad: (
        nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True),
        (x, x[:, :5]),
        {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True, "memory_key_padding_mask": pad},
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_modules_of_torch(name, training):
    pad = torch.zeros(2, 9, dtype=torch.bool)
    pad[1, 6:] = True
    module, args, keywords = MODULES[name](torch.randn(2, 9, 32), pad)
    module.train(training)
    outputs, grads = [], []
    for patched in (False, True):
        module.zero_grad()
        with onchip.record() as decisions, sdpa.installed() if patched else torch.enable_grad(), torch.set_grad_enabled(training):
            out = module(*args, **keywords)
            out = out[0] if isinstance(out, tuple) else out
            if training:
                out.square().sum().backward()
        assert bool(decisions) == patched
        outputs.append(out.detach()[~pad] if out.shape[1] == 9 else out.detach())
        grads.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_scripts_keep_torchs_operator():
    module, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    expected = module(x, x, x, need_weights=False)[0]
    with sdpa.installed(), onchip.record() as decisions:
        scripted = torch.jit.script(module)
        torch.testing.assert_close(scripted(x, x, x, need_weights=False)[0], expected)
    assert not decisions


def test_under_compile():
    q, k, v = (torch.randn(2, 3, 7, 16) for _ in range(3))
    function = lambda q, k, v: F.scaled_dot_product_attention(2 * q, k, v, is_causal=True) + 1  # noqa: E731
    expected = function(q, k, v)
    torch._dynamo.reset()
    with sdpa.installed(), onchip.record() as decisions:
        torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v), expected)
    assert decisions
