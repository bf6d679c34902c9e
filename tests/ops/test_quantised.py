"""Attention over quantised queries, keys and values, judged by float64 on the numbers that they stand for."""

import pytest
import torch

import onchip
from onchip import Causal, Document, Full, Quantised, Window
from onchip.core.device import gpu, of
from onchip.core.problem import E4M3, Attention
from onchip.core.scales import SHARES
from onchip.dispatch import select
from onchip.kernels.attention import PREFILL
from onchip.kernels.attention.reference import rotate

STEP = 2**-3  # from one number of e4m3 to the next, at most, as part of it


def inputs(device, len_q=300, len_k=300, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16):
    return [torch.randn(2, n, h, dim, device=device, dtype=dtype) for n, h in ((len_q, heads), (len_k, kv_heads), (len_k, kv_heads))]


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def exact(quantised, **how):
    """Of the numbers that they stand for, in float64."""
    return onchip.attention(*(t.dequantised().double() for t in quantised), kernel="reference", return_lse=True, **how)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kernel", ["blocked", "reference"])
def test_nan_and_infinity_go_through(kernel, share, number):
    """As those of a diverging training step do: they are no error, and stay in their head."""
    leaves = inputs("cpu", heads=2)
    leaves[0][0, 150, 1, 3] = number
    leaves = [t.requires_grad_() for t in leaves]
    out = onchip.attention(*onchip.quantise(*leaves, share=share), kernel=kernel)
    out.float().pow(2).sum().backward()
    for t in (out, *(leaf.grad for leaf in leaves)):
        assert t[1].isfinite().all() and t[0, :, 0].isfinite().all() and not t[0, :, 1].isfinite().all()
    assert not out[0, 150, 1].isfinite().any()


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100)], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_on_any_device(kernel, share, mask, device):
    torch.manual_seed(0)
    quantised = onchip.quantise(*inputs(device, len_q=200), share=share, rotation=onchip.random_signs(64, device=device))
    out, lse = onchip.attention(*quantised, mask=mask, kernel=kernel, return_lse=True)
    truth, true_lse = exact(quantised, mask=mask)
    weights = 0.0  # each of which is rounded to e4m3 on Hopper, to bfloat16 as q, k and v are on others
    if kernel == "auto" and of(device).kind != "cpu":
        weights = rms(truth) * (STEP / 3 if of(device).arch == 90 else 2**-8)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert rms(out - truth) <= rms(truth.bfloat16() - truth) * 1.1 + weights
    assert (lse - true_lse).abs().max() <= 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("len_q", "len_k", "dim"), [(1, 300, 128), (300, 1, 64), (129, 1000, 128), (1000, 1000, 256), (777, 500, 64)])
def test_odd_sizes(len_q, len_k, dim, share, device):
    if of(device).arch != 90:
        pytest.skip("the kernel is Hopper's")
    torch.manual_seed(0)
    quantised = onchip.quantise(*inputs(device, len_q, len_k, dim=dim), share=share)
    with onchip.record() as ran:
        out, lse = onchip.attention(*quantised, mask=Causal(), return_lse=True)
    assert "hopper_fp8" in str(ran)
    truth, true_lse = exact(quantised, mask=Causal())
    assert rms(out - truth) <= rms(truth) * STEP / 3 and torch.equal(lse.isfinite(), true_lse.isfinite())
    again = onchip.attention(*quantised, mask=Causal())
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("share", ["head", "block"])
@pytest.mark.parametrize(("len_q", "len_k", "dim"), [(1, 300, 128), (300, 1, 64), (129, 1000, 128), (1000, 1000, 64), (777, 500, 64), (2000, 2000, 128)])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100)], ids=str)
def test_gradients_of_odd_sizes(mask, len_q, len_k, dim, share, device):
    """In 8 bits, the same in every run, and held against float64. dO is not contiguous."""
    if of(device).arch != 90:
        pytest.skip("the kernel is Hopper's")
    torch.manual_seed(0)
    tensors = [t.requires_grad_() for t in inputs(device, len_q, len_k, dim=dim)]
    quantised = onchip.quantise(*tensors, share=share)
    out, lse = onchip.attention(*quantised, mask=mask, return_lse=True)
    d_out, d_lse = torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2), torch.randn_like(lse)
    with onchip.record() as ran:
        grads, again = (torch.autograd.grad([out, lse], tensors, [d_out, d_lse], retain_graph=True) for _ in range(2))
    assert "hopper_fp8_backward" in str(ran)
    for ours, other, truth in zip(grads, again, exact_gradients(quantised, d_out, d_lse.where(lse.isfinite(), 0.0), mask=mask), strict=True):
        assert torch.equal(ours, other) and rms(ours - truth) <= 8e-2 * rms(truth) + 1e-6


DOCUMENTS = Document(torch.arange(40).div(15, rounding_mode="floor").expand(2, -1))
OTHERS = {
    "d40": (40, {"mask": Causal()}),
    "document": (64, {"mask": DOCUMENTS, "scale": 0.1}),
    "sinks, softcap": (96, {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "score, in order": (64, {"slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "mask": Causal(), "deterministic": True}),
    "dropout": (32, {"dropout": onchip.Dropout(0.3, 1)}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "share"), zip(OTHERS, [*SHARES, *SHARES], strict=False))
def test_what_no_kernel_multiplies_in_8_bits(name, share, device):
    """By the kernels of bfloat16, of the numbers that q, k and v stand for; on any GPU."""
    torch.manual_seed(0)
    dim, how = OTHERS[name]
    how = {what: given.to(device) if isinstance(given, torch.Tensor) else given for what, given in how.items()}
    if name == "document":
        how["mask"] = Document(DOCUMENTS.ids.to(device))
    if "slopes" in how:
        how["score"] = onchip.ALiBi(how.pop("slopes"))
    leaves = [t.requires_grad_() for t in inputs(device, 40, 40, dim=dim)]
    quantised = onchip.quantise(*leaves, share=share)
    out, lse = onchip.attention(*quantised, return_lse=True, kernel="bf16_of_e4m3", **how)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    with onchip.record() as ran:
        grads = torch.autograd.grad([out, lse], leaves, [d_out, d_lse])
    assert [d.kernel.name for d in ran] == ["bf16_of_e4m3_backward"] and "q, k and v in bf16 by " in str(ran[0])
    truth, true_lse = exact(quantised, **how)
    assert out.dtype == torch.bfloat16 and rms(out - truth) <= 1e-2 * rms(truth) and (lse - true_lse).abs().max() <= 2e-2
    for ours, truth in zip(grads, exact_gradients(quantised, d_out, d_lse, **how), strict=True):
        assert rms(ours - truth) <= 1.5e-2 * rms(truth)


def test_a_rotation_keeps_outliers_from_the_others():
    """Channels that are large in every query and key (FlashAttention-3, section 3.3): without the rotation the others have few digits left."""
    torch.manual_seed(0)
    q, k, v = inputs("cpu", dim=128, dtype=torch.float32)
    large = 1 + 30 * (torch.rand(128) < 0.03)
    q, k = q * large.sqrt(), k * large.sqrt()
    truth = onchip.attention(q, k, v, scale=0.02)
    plain, rotated = (rms(onchip.attention(*onchip.quantise(q, k, v, share="head", rotation=r), scale=0.02) - truth) for r in (None, onchip.random_signs(128)))
    assert rotated < 0.8 * plain


def test_one_scale_for_a_tensor():
    q, k, v = (Quantised(t.to(E4M3), torch.full((1, 1, 1), 0.5)) for t in inputs("cpu"))
    out = onchip.attention(q, k, v, kernel="blocked")
    assert torch.equal(out, onchip.attention(*(t.values.float() / 2 for t in (q, k, v)), kernel="blocked").bfloat16())


@pytest.mark.parametrize("share", SHARES)
def test_torch_compile(share):
    """By inductor, which believes what the operator says of its strides; of the layout that models have."""
    signs = onchip.random_signs(64)
    call = lambda q, k, v: onchip.attention(*onchip.quantise(q, k, v, share=share, rotation=signs), mask=Causal())  # noqa: E731
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs("cpu")]
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors))
    for x in tensors:
        torch.library.opcheck(torch.ops.onchip.quantise.default, (x, share, None), test_utils=("test_schema", "test_faketensor"))


def exact_gradients(quantised, d_out, d_lse, signs=None, **how):
    """Of the numbers that they stand for, in float64, rotated back where they were rotated."""
    leaves = [t._replace(source=None).dequantised().detach().double().requires_grad_() for t in quantised]
    pairs = zip(onchip.attention(*leaves, kernel="reference", return_lse=True, **how), (d_out, d_lse), strict=True)
    grads = torch.autograd.grad([(t * d).sum() for t, d in pairs], leaves)
    if signs is None:
        return grads
    rotation = rotate(torch.eye(len(signs), device=signs.device), signs).double()
    return [*(grad @ rotation.T for grad in grads[:2]), grads[2]]


@pytest.mark.parametrize(("mask", "share", "rotated"), [(Full(), "head", True), (Causal(), "block", False), (Window(100), "token", True)], ids=str)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_gradients_go_straight_through(kernel, mask, share, rotated, device):
    """To what was quantised, as if nothing had been rounded."""
    q, k, v = (t.requires_grad_() for t in inputs(device, len_q=200))
    signs = onchip.random_signs(64, device=device) if rotated else None
    quantised = onchip.quantise(q, k, v, share=share, rotation=signs)
    out, lse = onchip.attention(*quantised, mask=mask, kernel=kernel, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad([out, lse], [q, k, v], [d_out, d_lse])
    eight_bits = of(device).arch == 90 and kernel == "auto" and share != "token"
    for ours, truth in zip(grads, exact_gradients(quantised, d_out, d_lse, signs, mask=mask), strict=True):
        assert ours.dtype == torch.bfloat16
        assert rms(ours - truth) <= rms(truth) * (8e-2 if eight_bits else 1e-2)


def test_large_gradients_in_half_precision_are_rotated_back():
    """Sums of 128 gradients of 1,000 lie beyond float16, what comes of them does not."""
    x = torch.randn(1, 2, 1, 128).half().requires_grad_()
    signs = onchip.random_signs(128)
    source = onchip.quantise(x, x, x, rotation=signs)[0].source
    (grad,) = torch.autograd.grad(source, x, torch.full_like(x, 1000))
    torch.testing.assert_close(grad.float(), 1000 * rotate(torch.eye(128), signs).sum(1).expand(x.shape), rtol=2**-10, atol=0.1)


def test_a_source_of_ones_own():
    """Gradients go where it says, and nowhere else; the other two need none. Through `dequantised` too."""
    quantised = [t._replace(source=None) for t in onchip.quantise(*inputs("cpu"))]
    q, k, v = quantised
    mine = torch.zeros(k.values.shape, requires_grad=True)
    d_out = torch.randn(2, 300, 4, 64).bfloat16()
    (ours,) = torch.autograd.grad(onchip.attention(q, k._replace(source=mine), v), mine, d_out)
    truth = exact_gradients(quantised, d_out, 0.0)[1]
    assert ours.dtype == torch.float32 and rms(ours - truth) <= 3e-3 * rms(truth)
    (plain,) = torch.autograd.grad(k._replace(source=mine).dequantised().sum(), mine)
    assert (plain == 1).all()
    both = onchip.quantise(x := torch.randn(1, 9, 2, 64, requires_grad=True), x, x)  # one source of three
    assert torch.autograd.grad(onchip.attention(*both).float().square().sum(), x)[0].any()


def test_gradients_of_what_a_score_reads():
    q, k, v = (t.requires_grad_() for t in inputs("cpu"))
    bias = torch.randn(300, 300, requires_grad=True)
    d_bias, dq = torch.autograd.grad(onchip.attention(*onchip.quantise(q, k, v), bias=bias).sum(), [bias, q])
    assert d_bias.shape == bias.shape and d_bias.any() and dq.any()


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_under_torch_compile(rotated):
    signs = onchip.random_signs(64) if rotated else None
    tensors = [t.requires_grad_() for t in inputs("cpu")]
    call = lambda q, k, v: onchip.attention(*onchip.quantise(q, k, v, rotation=signs), mask=Causal())  # noqa: E731
    d_out = torch.randn(2, 300, 4, 64).bfloat16()
    ours, truth = (torch.autograd.grad(run(*tensors), tensors, d_out) for run in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_under_torch_func(rotated, kernel):
    signs = onchip.random_signs(64) if rotated else None
    tensors = inputs("cpu")

    def loss(q, k, v):
        return onchip.attention(*onchip.quantise(q, k, v, rotation=signs), mask=Causal(), kernel=kernel).float().square().sum()

    truth = torch.autograd.grad(loss(*(t.requires_grad_() for t in tensors)), tensors)
    tensors = [t.detach() for t in tensors]
    for n, ours in enumerate(torch.func.grad(loss, (0, 1, 2))(*tensors)):
        assert torch.equal(ours, truth[n])
    (alone,) = torch.func.grad(loss, (1,))(*tensors)
    assert torch.equal(alone, truth[1])
    with pytest.raises(NotImplementedError, match="goes to the source of a Quantised"):
        torch.func.grad(lambda x: onchip.quantise(x, x, x)[0].values.float().sum())(tensors[0])
    with pytest.raises(NotImplementedError, match="quantise: forward-mode"):
        torch.func.jvp(loss, tuple(tensors), tuple(tensors))


def test_sources_are_not_kept_for_the_backward_pass():
    """Of a compiled call: what they hold is not read. In bfloat16 the output alone is kept."""
    tensors = [t.requires_grad_() for t in inputs("cpu")]
    kept = {}

    def keep(t):
        if t.dtype == torch.bfloat16:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    call = torch.compile(lambda *qkv: onchip.attention(*onchip.quantise(*qkv)), fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = call(*tensors)
    assert not kept.keys() & {t.untyped_storage().data_ptr() for t in tensors}
    assert out.nbytes <= sum(kept.values()) <= out.nbytes + 100


def test_a_gradient_is_not_dropped_in_silence():
    """Scales and values have none, whoever asks for it."""
    quantised = onchip.quantise(*(t.requires_grad_() for t in inputs("cpu")))
    learnt = [Quantised(t.values.detach(), t.scale.detach().requires_grad_()) for t in quantised]
    plain = [t._replace(source=None) for t in quantised]
    for given in (learnt, plain):
        out = onchip.attention(*given)
        assert out.requires_grad
        with pytest.raises(NotImplementedError, match="goes to the source of a Quantised"):
            out.sum().backward()
    with pytest.raises(NotImplementedError, match="goes to the source of a Quantised"):
        plain[0].values.float().sum().backward()
    q, k, v = (Quantised(t.values.detach(), t.scale.detach()) for t in quantised)
    for given, call in (  # torch.func's own way
        (q.scale, lambda scale: onchip.attention(q._replace(scale=scale), k, v)),
        (q.values, lambda values: onchip.attention(q._replace(values=values), k, v)),
    ):
        with pytest.raises(NotImplementedError, match="goes to the source of a Quantised"):
            torch.func.grad(lambda x, call=call: call(x).float().sum())(given)
    out = onchip.attention(*quantised)
    (once,) = torch.autograd.grad(out.sum(), quantised[0].source, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        once.sum().backward()


@pytest.mark.parametrize("share", SHARES)
def test_no_tokens(share):
    q, k, v = (torch.randn(2, n, 2, 64) for n in (5, 0, 0))
    out, lse = onchip.attention(*onchip.quantise(q, k, v, share=share), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    assert onchip.attention(*onchip.quantise(k, q, q, share=share)).shape == (2, 0, 2, 64)


def test_under_autocast_and_other_defaults():
    q, k, v = (t.float() for t in inputs("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(onchip.quantise(q, k.bfloat16(), v)[1].values, onchip.quantise(*(t.bfloat16() for t in (q, k, v)))[1].values)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert onchip.random_signs(64).dtype == onchip.quantise(q, k, v)[0].scale.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_runs():
    hopper, p = gpu("H200"), Attention("prefill", 1, 4096, 4096, 16, 16, 128, E4M3)
    assert select(p, hopper).kernel.name == "hopper_fp8" and select(p, gpu("A100")).kernel.name == "bf16_of_e4m3"
    p_back = p._replace(op="backward")
    assert select(p_back, hopper).kernel.name == "hopper_fp8_backward" and select(p_back, gpu("A100")).kernel.name == "bf16_of_e4m3_backward"
    tokens = select(p_back._replace(extras=("token_scales",)), hopper)
    assert str(tokens.config).startswith(
        "q, k and v in bf16 by hopper_backward: "
    ) and "accepted is one scale for a head, or for 128 tokens in a row; quantise with share=" in str(tokens.refused)
    assert PREFILL.kernel("hopper_fp8").refuses(p._replace(dim=96), hopper) == ["dim 96 is not one of 64, 128, 256"]
    assert select(p, hopper).floor.seconds == pytest.approx(select(p._replace(dtype=torch.bfloat16), hopper).floor.seconds / 2)


def packed(*qkv):
    return onchip.attention_packed(*qkv, torch.tensor([0, 300], dtype=torch.int32))


def paged(q, k, v):
    return onchip.paged_attention(q, onchip.PagedKV(k.values, v.values, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)))


def learnt(q, k, v):
    onchip.attention(q._replace(scale=q.scale.clone().requires_grad_()), k._replace(source=torch.zeros(k.values.shape)), v)


def learnt_beside(q, k, v):
    onchip.attention(Quantised(q.values, q.scale.clone().requires_grad_(), torch.zeros(q.values.shape)), k, v)


def again(q, k, v, **how):
    return onchip.quantise(*(t.dequantised() for t in (q, k, v)), **how)


BAD = {
    "no scales": (lambda q, k, v: onchip.attention(q.values, k.values, v.values), ValueError, "without scales; give them to attention as onchip.Quantised"),
    "one is plain": (lambda q, k, v: onchip.attention(q, k.values, v), TypeError, "of q, k, v, k not Quantised; give all three"),
    "values of another kind": (lambda *qkv: onchip.attention(*(Quantised(t.values.half(), t.scale) for t in qkv)), ValueError, "values in torch.float16"),
    "too few scales": (lambda q, k, v: onchip.attention(q, k._replace(scale=k.scale[..., :2]), v), ValueError, "scales of 2 for 300 tokens"),
    "scales in bf16": (lambda q, k, v: onchip.attention(q, k, v._replace(scale=v.scale.bfloat16())), ValueError, "scale of v is torch.bfloat16"),
    "a source beside learnt scales": (learnt, ValueError, "q has no source, but values or scales that require a gradient"),
    "learnt scales beside their own source": (learnt_beside, ValueError, "q.scale requires a gradient, and q has a source, which gets it all; detach it"),
    "a source of another shape": (lambda q, k, v: onchip.attention(q, k._replace(source=torch.zeros(3)), v), ValueError, "source of k is torch.float32"),
    "another share": (lambda *qkv: again(*qkv, share="row"), ValueError, "'row'; give one of 'head', 'block', 'token'"),
    "signs of another size": (lambda *qkv: again(*qkv, rotation=torch.ones(32)), ValueError, r"floats \[64\]"),
    "a packed call": (packed, TypeError, r"attention_packed: q is Quantised; give a tensor \(attention alone"),
    "values of a packed call": (lambda *qkv: packed(*(t.values[0] for t in qkv)), ValueError, "without scales"),
    "a paged call": (paged, TypeError, "paged_attention: q is Quantised"),
    "quantised twice": (onchip.quantise, TypeError, "quantise: q is Quantised"),
    "a number for a scale": (lambda q, k, v: onchip.attention(q, k, Quantised(v.values, 0.5)), TypeError, "v.scale not dense tensors"),
    "a sparse scale": (lambda q, k, v: onchip.attention(q, k._replace(scale=k.scale.to_sparse()), v), TypeError, "k.scale not dense tensors; give Quantised"),
    "a sparse scale, dequantised": (lambda q, k, v: q._replace(scale=q.scale.to_sparse()).dequantised(), TypeError, "scale is a nested or sparse tensor"),
    "bool signs": (lambda *qkv: again(*qkv, rotation=torch.ones(64) > 0), ValueError, r"rotation is torch.bool \[64\] on cpu .*; give \+1 and -1, floats"),
    "complex signs": (lambda *qkv: again(*qkv, rotation=torch.ones(64) + 0j), ValueError, "rotation is torch.complex64"),
    "sparse signs": (lambda *qkv: again(*qkv, rotation=torch.ones(64).to_sparse()), ValueError, "rotation is nested or sparse"),
    "signs without numbers": (lambda *qkv: again(*qkv, rotation=torch.ones(64, device="meta")), ValueError, "on meta for head dimension 64"),
    "learnt signs": (lambda *qkv: again(*qkv, rotation=torch.ones(64).requires_grad_()), ValueError, "rotation requires a gradient, which signs have not"),
    "a sign of 0": (lambda *qkv: again(*qkv, rotation=(torch.arange(64) > 0).float()), ValueError, r"rotation holds 0; give \+1 and -1 alone"),
    "signs of 2": (lambda *qkv: again(*qkv, rotation=2 * onchip.random_signs(64)), ValueError, "rotation holds -?2; give"),
    "a sign of NaN": (lambda *qkv: again(*qkv, rotation=torch.full((64,), torch.nan)), ValueError, "rotation holds nan; give"),
    "a negative number of signs": (lambda *_: onchip.random_signs(-1), ValueError, "random_signs: dim is -1; give the head dimension of q and k, a power"),
    "signs of no power of two": (lambda *_: onchip.random_signs(96), ValueError, "random_signs: dim is 96; give"),
    "a seed of no number": (lambda *_: onchip.random_signs(64, None), ValueError, "random_signs: seed is None; give an integer of 64 bits"),
    "a seed between two": (lambda *_: onchip.random_signs(64, 1.5), ValueError, "random_signs: seed is 1.5; give"),
    "a seed too large": (lambda *_: onchip.random_signs(64, 1 << 64), ValueError, "random_signs: seed is 18446744073709551616; give"),
    "signs nowhere": (lambda *_: onchip.random_signs(64, 0, "nope"), ValueError, "random_signs: device is 'nope'; give cpu"),
    "a scale of 0": (lambda q, k, v: onchip.attention(q, k, v._replace(scale=0 * v.scale)), ValueError, "a scale of v is 0; all are to be positive"),
    "several batches": (lambda q, k, v: onchip.quantise(q.values.float()[:1], k.values.float(), v.values.float()), ValueError, "k has batch 2, q has 1"),
    "a list of signs": (lambda *qkv: again(*qkv, rotation=[1.0] * 64), ValueError, "rotation is list"),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input(call, error, text):
    with pytest.raises(error, match=text):
        call(*onchip.quantise(*inputs("cpu"), share="token"))
