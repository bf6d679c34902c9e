"""xFormers' functions and biases: each bias beside its own matrix, in values, LSE and gradients."""

import importlib
import importlib.util
import sys

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch
from onchip.integrations import xformers as xf
from onchip.integrations.xformers import attn_bias as ab

Q, K = [3, 1, 6], [5, 4, 6]


def longhand(q, k, v, bias, scale=None):
    """(output, LSE) of xFormers' formula with the bias as a matrix, `[batch, len, heads, dim]`; a row that sees nothing gives 0."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q * (q.shape[-1] ** -0.5 if scale is None else scale), k)
    scores = scores if bias is None else scores + bias.to(scores)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def torchs(q, k, v, bias, scale=None):
    """The same by torch's own attention; the LSE is the formula's."""
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias, scale=scale)
    return out.transpose(1, 2), longhand(q, k, v, bias, scale)[1]


DENSE = {
    "LowerTriangularMask": lambda: ab.LowerTriangularMask(),
    "LowerTriangularFromBottomRightMask": lambda: ab.LowerTriangularFromBottomRightMask(),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda: ab.LowerTriangularFromBottomRightMask().make_local_attention(4),
    "LocalAttentionFromBottomRightMask": lambda: ab.LocalAttentionFromBottomRightMask(2, 3),
}
BLOCKS = {
    "BlockDiagonalMask": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K),
    "BlockDiagonalMask of one length": lambda: ab.BlockDiagonalMask.from_seqlens(Q),
    "BlockDiagonalCausalMask": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal(),
    "BlockDiagonalCausalFromBottomRightMask": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(),
    "BlockDiagonalCausalLocalAttentionMask": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(3),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(3),
    "BlockDiagonalPaddedKeysMask": lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 8, K),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda: ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 8, K),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 8, K).make_local_attention(2, 1),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 8, K, 3),
    "BlockDiagonalGappyKeysMask": lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [1, 7, 12, 20], K),
    "BlockDiagonalGappyKeysMask that share keys": lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [9, 2, 4, 20], K),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda: ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, [1, 7, 12, 20], K),
}


def check(inputs, bias, matrix, **keywords):
    """Output, LSE and gradients, those of a bias that is a tensor too, beside the formula and torch in float32 and the formula in float64."""
    results = []
    for function, given, dtype in (
        (xf.memory_efficient_attention_forward_requires_grad, bias, torch.float32),
        (longhand, matrix, torch.float32),
        (torchs, matrix, torch.float32),
        (longhand, matrix, torch.float64),
    ):
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs]
        if isinstance(given, torch.Tensor) and given.requires_grad:
            tensors.append(given := given.detach().to(dtype).requires_grad_())
        out, lse = function(*tensors[:3], given, **keywords)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(out, tensors, weight)])
    for n, (ours, *low, truth) in enumerate(zip(*results, strict=True)):
        assert ours.shape == truth.shape
        assert_as_good_as_torch(ours, tuple(low), truth, 3.0 if n > 1 else 2.0)


@pytest.mark.parametrize("sizes", [(7, 7), (3, 9), (1, 1), (9, 5)], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_biases(name, sizes):
    bias = DENSE[name]()
    seen = bias.materialize(sizes) == 0
    if not seen.any(1).all():  # the formula has no gradient there
        out = xf.memory_efficient_attention(*(torch.randn(1, n, 2, 16) for n in (sizes[0], sizes[1], sizes[1])), bias)
        assert (out[0, ~seen.any(1)] == 0).all() and (out[0, seen.any(1)] != 0).all()
        return
    check([torch.randn(2, n, 2, 16) for n in (sizes[0], sizes[1], sizes[1])], bias, bias.materialize((2, 2, *sizes)), scale=0.3)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_diagonal_biases(name):
    bias = BLOCKS[name]()
    assert type(bias).__name__ == name.split()[0]
    shape = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    matrix = bias.materialize((1, 2, *shape))
    assert (matrix == 0).any(-1).all() and matrix.shape == (1, 2, *shape)
    check([torch.randn(1, n, 2, 16) for n in (shape[0], shape[1], shape[1])], bias, matrix)


@pytest.mark.parametrize("name", ["BlockDiagonalPaddedKeysMask", "BlockDiagonalCausalWithOffsetGappyKeysMask"])
def test_room_that_is_not_used_is_not_read(name):
    bias = BLOCKS[name]()
    len_q, len_k = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    q, k, v = (torch.randn(1, n, 2, 16) for n in (len_q, len_k, len_k))
    expected = xf.memory_efficient_attention(q, k, v, bias)
    unused = (bias.materialize((len_q, len_k)) != 0).all(0)
    k[:, unused], v[:, unused] = torch.nan, torch.nan
    assert unused.any() and torch.equal(xf.memory_efficient_attention(q, k, v, bias), expected)


@pytest.mark.parametrize("shape", [(2, 3, 5, 9), (1, 1, 5, 9), (1, 3, 1, 9)], ids=str)
def test_a_tensor_as_bias(shape):
    bias = torch.randn(shape, requires_grad=True)
    check([torch.randn(2, n, 3, 16) for n in (5, 9, 9)], bias, bias)


def test_causal_with_a_tensor():
    tensor = torch.randn(2, 3, 7, 7)
    bias = ab.LowerTriangularMask().add_bias(tensor).to(torch.device("cpu"))
    assert isinstance(bias, ab.LowerTriangularMaskWithTensorBias)
    check([torch.randn(2, 7, 3, 16) for _ in range(3)], bias, bias.materialize((2, 3, 7, 7)))
    tensor.requires_grad_()
    xf.memory_efficient_attention(*(torch.randn(2, 7, 3, 16) for _ in range(3)), ab.LowerTriangularMaskWithTensorBias(tensor)).sum().backward()
    assert tensor.grad.shape == tensor.shape and (tensor.grad.triu(1) == 0).all()


# ---- shapes


def test_three_dimensions_are_one_head():
    q, k, v, bias = torch.randn(2, 5, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 24), torch.randn(2, 5, 9)
    out, lse = xf.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    expected = xf.memory_efficient_attention_forward_requires_grad(q[:, :, None], k[:, :, None], v[:, :, None], bias[:, None])
    assert torch.equal(out, expected[0][:, :, 0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("bias", [None, "causal", "blocks", "tensor"])
@pytest.mark.parametrize("expanded", [True, False])
def test_five_dimensions_are_groups(bias, expanded):
    q = torch.randn(1, 7, 2, 3, 16)
    k, v = (torch.randn(1, 7, 2, 1, 16).expand(-1, -1, -1, 3, -1) for _ in range(2))
    if not expanded:
        k, v = k.contiguous() + torch.randn(3, 1), v.contiguous()
    tensor = torch.randn(1, 2, 3, 7, 7)
    bias = {"causal": ab.LowerTriangularMask(), "blocks": ab.BlockDiagonalMask.from_seqlens([3, 4]), "tensor": tensor}.get(bias)
    flat = bias.flatten(1, 2) if bias is tensor else bias
    with onchip.record() as decisions:
        out, lse = xf.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    assert decisions[0].problem.kv_heads == (2 if expanded else 6)
    expected = xf.memory_efficient_attention_forward_requires_grad(*(x.flatten(2, 3) for x in (q, k, v)), flat)
    torch.testing.assert_close((out, lse), (expected[0].unflatten(2, (2, 3)), expected[1].unflatten(1, (2, 3))))


@pytest.mark.parametrize("shape", [(1, 1, 3, 7, 7), (2, 2, 1, 1, 7), (1, 1, 1, 7, 7), (2, 1, 7, 7), (3, 7, 7), (7, 7), ()], ids=str)
def test_a_bias_broadcasts_over_groups_and_heads(shape):
    q, k, v = (torch.randn(2, 7, 2, 3, 16) for _ in range(3))
    bias = torch.randn(shape, requires_grad=True)
    whole = bias.expand(2, 2, 3, 7, 7)
    out, expected = (xf.memory_efficient_attention(q, k, v, b) for b in (bias, whole.contiguous()))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.sin().sum(), bias)[0] for o in (out, expected)))


def test_an_expanded_key_gets_a_gradient_for_each_head():
    q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 1, 16).expand(-1, -1, 4, -1).requires_grad_(), torch.randn(1, 5, 4, 16)
    plain = k.detach().contiguous().requires_grad_()
    for key in (k, plain):
        xf.memory_efficient_attention(q, key, v).square().sum().backward()
    torch.testing.assert_close(k.grad, plain.grad)


def test_tensor_lists_are_laid_end_to_end_and_split_again():
    tensors = [torch.randn(2, 3, 1, 8), torch.randn(1, 6, 1, 8)]
    bias, x = ab.BlockDiagonalCausalMask.from_tensor_list(tensors)
    assert isinstance(bias, ab.BlockDiagonalCausalMask) and x.shape == (1, 12, 1, 8) and bias.q_seqinfo is bias.k_seqinfo
    parts = bias.split(xf.memory_efficient_attention(x, x, x, bias))
    assert [p.shape for p in parts] == [t.shape for t in tensors]
    torch.testing.assert_close(parts, [xf.memory_efficient_attention(t, t, t, ab.LowerTriangularMask()) for t in tensors])
    bias, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv(tensors, [t[:, :2] for t in tensors], None)
    assert q.shape[1] == 12 and k.shape[1] == 6 and v is None
    assert [p.shape[1] for p in bias.split_kv(k)] == [2, 2] and [p.shape[1] for p in bias.split_queries(q)] == [3, 6]


# ---- parts and the low level


@pytest.mark.parametrize("groups", [(), (2,)], ids=["heads", "groups"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_parts_merge_to_the_whole(groups, stacked):
    q, k, v = (torch.randn(2, n, *groups, 3, 16, requires_grad=True) for n in (5, 12, 12))
    whole, lse = xf.memory_efficient_attention_forward_requires_grad(q, k, v)
    parts = [xf.memory_efficient_attention_partial(q, k[:, at : at + 4], v[:, at : at + 4]) for at in (0, 4, 8)]
    outs, lses = ([p[n] for p in parts] for n in (0, 1))
    merged = xf.merge_attentions(*((torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses)))
    torch.testing.assert_close(merged, (whole, lse))
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for out in (merged[0], whole)]
    torch.testing.assert_close(*grads)
    assert xf.merge_attentions(outs, lses, write_lse=False)[1] is None


def test_parts_merge_into_any_dtype():
    q, k, v = (torch.randn(2, n, 3, 16, dtype=torch.bfloat16) for n in (5, 12, 12))
    out, lse = xf.memory_efficient_attention_partial(q, k, v)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert xf.memory_efficient_attention_partial(q, k, v, output_dtype=torch.float32)[0].dtype == torch.float32
    assert xf.merge_attentions([out.float()], [lse], output_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert xf.merge_attentions([out], [lse], output_dtype=torch.float32)[0].dtype == torch.float32


def test_keys_may_reach_past_the_last_block():
    bias = BLOCKS["BlockDiagonalPaddedKeysMask"]()
    q, k = torch.randn(1, 10, 2, 16), torch.randn(1, 40, 2, 16)
    assert torch.equal(xf.memory_efficient_attention(q, k, k, bias), xf.memory_efficient_attention(q, k[:, :24], k[:, :24], bias))


def test_backward_function():
    q, k, v = (torch.randn(2, 5, 3, 16, requires_grad=True) for _ in range(3))
    out, lse = xf.memory_efficient_attention_forward_requires_grad(q, k, v, ab.LowerTriangularMask())
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(xf.memory_efficient_attention_backward(grad, out, lse, q, k, v, ab.LowerTriangularMask()), expected)
    with pytest.raises(ValueError, match=r"p is 0.5; what was dropped"):
        xf.memory_efficient_attention_backward(grad, out, lse, q, k, v, p=0.5)


def test_dropout_drops():
    q, v = torch.zeros(1, 200, 1, 8), torch.ones(1, 300, 1, 8)
    out = xf.memory_efficient_attention(q, torch.zeros_like(v), v, p=0.25)
    assert abs(out.mean() - 1) < 0.01 and out.std() > 0.01


@pytest.mark.parametrize("name", ["LowerTriangularMask", "BlockDiagonalCausalMask"])
def test_under_compile(name):
    bias, inputs = {**DENSE, **BLOCKS}[name](), [torch.randn(1, n, 2, 16) for n in ((10, 15, 15) if name in BLOCKS else (7, 7, 7))]
    function = lambda q, k, v: xf.memory_efficient_attention(q, k, v, bias)  # noqa: E731
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs), function(*inputs))


# ---- refusals


def test_refusals():
    x = torch.zeros(1, 5, 2, 8)
    cases = (
        ((x, x, x[0]), {}, "4, 4, 3 dimensions"),
        ((x, x, x), {"op": torch.nn.Linear}, "an operator of xFormers"),
        ((x, x, x), {"attn_bias": object()}, "attn_bias is a object"),
        ((x[:, :, None],) * 3, {"attn_bias": torch.zeros(1, 2, 3, 5, 5)}, r"attn_bias is \[1, 2, 3, 5, 5\]; give .* \[batch, 1, 2, len_q, len_k\]"),
        ((x, x, x), {"attn_bias": ab.BlockDiagonalMask.from_seqlens([3, 3])}, r"query is \[1, 5, 2, 8\].*give \[1, 6"),
        ((x, x, x), {"attn_bias": ab.BlockDiagonalMask.from_seqlens([5]).to(torch.device("meta"))}, "is on meta, query on cpu"),
    )
    for inputs, keywords, words in cases:
        with pytest.raises(ValueError, match=words):
            xf.memory_efficient_attention(*inputs, **keywords)
    with pytest.raises(onchip.Unsupported, match="no kernel is named 'flash'"):
        xf.memory_efficient_attention(x, x, x, op="flash")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ab.LocalAttentionFromBottomRightMask(-1, 2),
        lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0),
        lambda: ab.BlockDiagonalMask.from_seqlens([3]).make_local_attention(0),
        lambda: ab.BlockDiagonalMask.from_seqlens([5], [3]).make_causal_from_bottomright(),
        lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([3], 4, [5]),
        lambda: ab.BlockDiagonalMask.from_seqlens([3]).materialize((4, 3)),
        lambda: ab.BlockDiagonalMask.from_seqlens([3]).split(torch.zeros(1, 4, 1, 8)),
    ],
)
def test_biases_that_make_no_sense(make):
    with pytest.raises(ValueError):
        make()


# ---- names


@pytest.mark.skipif(importlib.util.find_spec("xformers") is not None, reason="xFormers is installed")
def test_names_are_there_and_go_again():
    xf.install()
    try:
        xf.install()
        ops = importlib.import_module("xformers.ops")
        assert ops.memory_efficient_attention is xf.memory_efficient_attention
        assert importlib.import_module("xformers.ops.fmha.attn_bias").LowerTriangularMask is ops.LowerTriangularMask
        assert importlib.import_module("xformers").ops.fmha.BlockDiagonalMask is ab.BlockDiagonalMask
        assert importlib.util.find_spec("xformers") is not None
        q, _, v = ops.unbind(torch.arange(12).view(2, 3, 2), 1)
        assert q.tolist() == [[0, 1], [6, 7]] and v.tolist() == [[4, 5], [10, 11]]
    finally:
        xf.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "xformers"]
    with pytest.raises(ImportError):
        importlib.import_module("xformers.ops")


def test_the_real_package_is_patched(tmp_path, monkeypatch):
    (tmp_path / "xformers" / "ops" / "fmha").mkdir(parents=True)
    (tmp_path / "xformers" / "__init__.py").touch()
    (tmp_path / "xformers" / "ops" / "__init__.py").write_text("from .fmha import memory_efficient_attention\n")
    (tmp_path / "xformers" / "ops" / "fmha" / "__init__.py").write_text("def memory_efficient_attention(): pass\nclass LowerTriangularMask: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        ops = importlib.import_module("xformers.ops")
        theirs = ops.memory_efficient_attention
        xf.install()
        x = torch.randn(1, 5, 2, 16)
        out = ops.memory_efficient_attention(x, x, x, attn_bias=ops.fmha.LowerTriangularMask())
        torch.testing.assert_close(out, xf.memory_efficient_attention(x, x, x, ab.LowerTriangularMask()))
        assert ops.fmha.memory_efficient_attention is xf.memory_efficient_attention and not hasattr(ops, "merge_attentions")
        xf.uninstall()
        assert ops.memory_efficient_attention is theirs is ops.fmha.memory_efficient_attention
    finally:
        xf.uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
            del sys.modules[name]
