"""The modules: torch's results with torch's parameters, and gradients to them."""

import pytest
import torch
from torch import nn

import onchip

X = torch.randn(3, 8, 16)


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (onchip.RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5), X),
        (onchip.LayerNorm(16), nn.LayerNorm(16), X),
        (onchip.LayerNorm(16, affine=False), nn.LayerNorm(16, elementwise_affine=False), X),
        (onchip.LayerNorm(16, bias=False), nn.LayerNorm(16, bias=False), X),
        (onchip.GroupNorm(4, 8), nn.GroupNorm(4, 8), X),
        (onchip.GroupNorm(2, 8, act="silu"), nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), X),
        (onchip.InvertibleLayerNorm(16), nn.LayerNorm(16), X),
        (onchip.Activation("gelu"), nn.GELU(), X),
        (onchip.DropoutAdd(0.5).eval(), nn.Dropout(0.5).eval(), X),
        (onchip.Embedding(9, 16, padding_idx=2), nn.Embedding(9, 16, padding_idx=2), torch.tensor([[0, 2], [8, 2]])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_results(ours, theirs, x):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        with torch.no_grad():
            b.copy_(a.normal_())
    torch.testing.assert_close(ours(x), theirs(x))
    for module in (ours, theirs):
        if list(module.parameters()):
            module(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_a_weight_around_zero_and_a_weight_of_each_head():
    torch.testing.assert_close(onchip.RMSNorm(16, offset=1.0)(X), onchip.RMSNorm(16)(X))
    assert onchip.RMSNorm(16, offset=1.0).weight.eq(0).all()
    assert onchip.RMSNorm(8, 16)(X).shape == X.shape
    y, total = onchip.LayerNorm(16)(X, residual=X)
    torch.testing.assert_close((y, total), (nn.LayerNorm(16)(2 * X), 2 * X))


def test_what_a_model_keeps_beside_its_weights():
    gated, plain = onchip.GatedAct("silu", 8), onchip.Activation("relu", 16)
    with torch.no_grad():
        gated.bias.fill_(1.0), plain.bias.fill_(-0.5)
    gate, up = (X + 1).chunk(2, -1)
    torch.testing.assert_close(gated(X), nn.functional.silu(gate) * up)
    torch.testing.assert_close(plain(X), (X - 0.5).relu())
    torch.testing.assert_close(onchip.ModulatedNorm("rms")(X, X, None), nn.functional.rms_norm(X, (16,), eps=1e-6) * (1 + X))
    dropped = onchip.DropoutAdd(0.5)
    assert 0.3 < (dropped(X) == 0).float().mean() < 0.7 and torch.equal(dropped.eval()(X, X), X + X)


def test_under_autocast():
    """A layer before has given bfloat16, beside parameters and a stream in float32."""
    x, gated, plain, dropped = X.bfloat16(), onchip.GatedAct("silu", 8), onchip.Activation("relu", 16), onchip.DropoutAdd(0.5)
    with torch.autocast("cpu", torch.bfloat16):
        ys = [gated(x), plain(x)]
        total = dropped(x, X)
        for wrong in (lambda: onchip.activate(x, "relu", bias=torch.ones(16) > 0), lambda: onchip.dropout_add(x, x.long(), onchip.Dropout(0.5))):
            with pytest.raises(ValueError, match=r"(bias|residual) is torch"):
                wrong()
    assert all(y.dtype == torch.bfloat16 for y in ys) and total.dtype == torch.float32
    dropped_out, kept = (torch.isclose(total, X + k * x.float()) for k in (0, 2))
    assert (dropped_out | kept).all() and dropped_out.any() and kept.any()
    sum(y.float().sum() for y in ys).backward()
    assert gated.bias.grad.dtype == plain.bias.grad.dtype == torch.float32
    with pytest.raises(ValueError, match=r"residual is torch.float32"):
        dropped(x, X)


def test_a_table_of_embeddings():
    """As torch's `from_pretrained`."""
    table, ids = torch.randn(9, 16), torch.tensor([[0, 2], [8, 2]])
    ours, theirs = onchip.Embedding.from_pretrained(table, padding_idx=2), nn.Embedding.from_pretrained(table, padding_idx=2)
    assert torch.equal(ours(ids), theirs(ids)) and ours.weight.data_ptr() == table.data_ptr() and not ours.weight.requires_grad
    assert repr(ours) == repr(theirs) and onchip.Embedding.from_pretrained(table, freeze=False).weight.requires_grad
    with pytest.raises(ValueError, match=r"from_pretrained: embeddings are \[16\]; give a tensor \[vocab, width\]"):
        onchip.Embedding.from_pretrained(table[0])


def test_a_head_and_its_loss():
    head, targets = onchip.LinearCrossEntropy(16, 9, onchip.LossTerms(smoothing=0.1), bias=True), torch.arange(24).view(3, 8) % 9
    logits = nn.functional.linear(X, head.weight, head.bias)
    right = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(X, targets), right)
    torch.testing.assert_close(onchip.CrossEntropy(head.terms)(logits, targets), right)
    head(X, targets).backward()
    assert head.weight.grad.shape == (9, 16) and head.bias.grad.shape == (9,)


def test_a_rotation_keeps_its_table():
    """In float32: a cosine in bfloat16 is off by 0.2%, an angle more."""
    table = torch.linspace(-1, 1, 10 * 8).view(10, 8)
    module, x = onchip.Rotary(table, layout="interleaved").to(torch.bfloat16), torch.randn(2, 7, 3, 8)
    assert all(torch.equal(a, b) for a, b in zip(module(x, x), onchip.rotary(x, x, table, layout="interleaved"), strict=True))
    with pytest.raises(ValueError, match=r"table is torch.bfloat16"):
        onchip.rotary(x, x, table.bfloat16())
