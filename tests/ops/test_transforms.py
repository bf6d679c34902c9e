"""Attention under torch.func, checkpointing, dispatch modes, and derivatives of other kinds: right, or refused in one sentence."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import onchip
from onchip import ALiBi, Causal, Document, Dropout, KeyPadding, PagedKV, Prefix, Window
from onchip.core import parts

MAPPED, BATCH, LEN, HEADS, KV_HEADS, DIM = 3, 2, 6, 4, 2, 8
LONGER = 12  # tokens: over fewer than 8 keys no gradient is torch's own
IDS = torch.tensor([[0, 0, 1, 1, 2, 2]] * BATCH)
OFFSETS = torch.tensor([0, 2, LEN], dtype=torch.int32)
TWICE = "attention: gradients of gradients are not implemented; kernel='reference' has them"
FORWARD = r"attention: forward-mode derivatives \(jvp\) are not implemented; kernel='reference' has them, or use reverse mode"
BATCHED = "; give the mapped dimension as the batch, or use kernel='reference'"


@pytest.fixture
def qkv():
    return [torch.randn(MAPPED, BATCH, LEN, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(q, k, v, mask=Causal(), **keywords):
    return onchip.attention(q, k, v, mask=mask, **keywords)


def loss(*args, **keywords):
    return attend(*args, **keywords).square().sum()


def one_by_one(qkv, **keywords):
    return torch.stack([attend(*each, **keywords) for each in zip(*qkv, strict=True)])


def plain_grad(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


# ---- vmap


@pytest.mark.parametrize(
    "keywords",
    [{}, {"mask": Document(IDS[0])}, {"mask": lambda b, h, i, j: i - j < 3}, {"bias": torch.randn(1, HEADS, LEN, LEN), "sinks": torch.randn(HEADS)}],
    ids=["causal", "document", "function", "bias and sinks"],
)
def test_vmap(qkv, keywords):
    torch.testing.assert_close(vmap(lambda *x: attend(*x, **keywords))(*qkv), one_by_one(qkv, **keywords))


def test_vmap_over_some_and_over_another_dimension(qkv):
    q, k, v = qkv
    expected = one_by_one([q, *(t[:1].expand_as(t) for t in (k, v))])
    torch.testing.assert_close(vmap(attend, in_dims=(0, None, None))(q, k[0], v[0]), expected)
    torch.testing.assert_close(vmap(attend, in_dims=(2, None, None), out_dims=3)(q.movedim(0, 2), k[0], v[0]).movedim(3, 0), expected)


def test_vmap_in_vmap_and_lse(qkv):
    twice = [torch.stack([t, t + 1]) for t in qkv]
    found = vmap(vmap(lambda *x: attend(*x, return_lse=True)))(*twice)
    for n in range(2):
        torch.testing.assert_close(found[0][n], one_by_one([t[n] for t in twice]))
    assert found[1].shape == (2, MAPPED, BATCH, HEADS, LEN)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"mask": lambda b, h, i, j: i - j < b + 1}, "of a mask or score function that reads the batch index"),
        ({"score": lambda s, b, h, i, j: s * (b + 1)}, "of a mask or score function that reads the batch index"),
        ({"dropout": Dropout(0.5, 3)}, "with dropout"),
    ],
    ids=["mask", "score", "dropout"],
)
def test_vmap_where_the_batch_means_something(qkv, keywords, words):
    with pytest.raises(NotImplementedError, match=f"^attention: torch.func.vmap {words} is not implemented{BATCHED}$"):
        vmap(lambda *x: attend(*x, **keywords))(*qkv)
    if "dropout" not in keywords:
        torch.testing.assert_close(vmap(lambda *x: attend(*x, kernel="reference", **keywords))(*qkv), one_by_one(qkv, **keywords))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_gradient_over_a_vmap_has_no_nan_of_hidden_places(qkv, kernel):
    """Whose scores have infinite derivatives; a tensor of a batch does not say that it has a gradient."""
    steep = {"mask": Causal(), "score": lambda s, b, h, i, j: s / (i - j + 1), "kernel": kernel}
    q, k, v = qkv
    found = torch.func.grad(lambda q: vmap(lambda *x: attend(*x, **steep))(q, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(one_by_one([leaf, k, v], **steep).square().sum(), leaf)
    torch.testing.assert_close(found, expected)
    assert found.isfinite().all()


READ = {  # (what is mapped, or differs from sequence to sequence, and the arguments that read it)
    "lengths": (torch.randint(1, LEN, (MAPPED, BATCH)), lambda t: {"mask": KeyPadding(t)}),
    "padding": (torch.rand(MAPPED, BATCH, LEN) < 0.7, lambda t: {"mask": Causal() & KeyPadding(t)}),
    "documents": (torch.randint(0, 3, (MAPPED, BATCH, LEN)), lambda t: {"mask": Document(t) | Window(1)}),
    "documents of all": (torch.randint(0, 3, (MAPPED, LEN)), lambda t: {"mask": Document(t) & (lambda b, h, i, j: i - j < 4)}),
    "prefix": (torch.randint(0, LEN, (MAPPED, BATCH)), lambda t: {"mask": Prefix(t)}),
    "window": (torch.randint(0, LEN, (MAPPED, HEADS)), lambda t: {"mask": Window(t, 0)}),
    "tree": (torch.eye(3).bool().expand(MAPPED, BATCH, 3, 3).clone(), lambda t: {"mask": onchip.Tree(t)}),
    "bool": (torch.rand(MAPPED, 1, HEADS, LEN, LEN) < 0.7, lambda t: {"mask": t}),
    "blocks": (torch.rand(MAPPED, BATCH, 1, 3, 3) < 0.7, lambda t: {"mask": onchip.Blocks(t, 2)}),
    "bias": (torch.randn(MAPPED, BATCH, 1, LEN, LEN), lambda t: {"bias": t, "softcap": 5.0}),
    "bias of all": (torch.randn(MAPPED, LEN, LEN), lambda t: {"bias": t}),
    "bias of one": (torch.randn(MAPPED), lambda t: {"bias": t}),
    "slopes": (torch.rand(MAPPED, HEADS), lambda t: {"score": ALiBi(t)}),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_vmap_over_what_masks_and_scores_read(qkv, name, kernel):
    what, arguments = READ[name]
    expected = torch.stack([attend(*(x[n] for x in qkv), **arguments(what[n])) for n in range(MAPPED)])
    torch.testing.assert_close(vmap(lambda t, *x: attend(*x, kernel=kernel, **arguments(t)))(what, *qkv), expected)
    last = what.movedim(0, -1)  # of the same queries, and along another dimension
    found = vmap(lambda t: attend(*(x[0] for x in qkv), kernel=kernel, **arguments(t)), in_dims=-1)(last)
    torch.testing.assert_close(found, torch.stack([attend(*(x[0] for x in qkv), **arguments(one)) for one in what]))
    torch.testing.assert_close(vmap(lambda *x: attend(*x, kernel=kernel, **arguments(what[0])))(*qkv), one_by_one(qkv, **arguments(what[0])))


def test_gradients_through_a_vmap_over_a_bias(qkv):
    bias = torch.randn(MAPPED, HEADS, LEN, LEN)
    of_all = lambda b, *x: vmap(lambda b, *x: attend(*x, bias=b))(b, *x).square().sum()  # noqa: E731
    expected = plain_grad(lambda b, *x: sum(loss(*(t[n] for t in x), bias=b[n]) for n in range(MAPPED)), bias, *qkv)
    torch.testing.assert_close(grad(of_all, argnums=(0, 1, 2, 3))(bias, *qkv), expected)
    lengths = READ["lengths"][0]
    of_one = grad(lambda q, t, *x: loss(q, *x, mask=KeyPadding(t)))
    each = zip(qkv[0], lengths, *qkv[1:], strict=True)
    torch.testing.assert_close(vmap(of_one)(qkv[0], lengths, *qkv[1:]), torch.stack([of_one(*one) for one in each]))


@pytest.mark.parametrize(
    ("what", "arguments", "words"),
    [
        ((MAPPED, HEADS), lambda t: {"sinks": t}, "over sinks, a table or what a function reads"),
        ((MAPPED, HEADS, 5), lambda t: {"score": onchip.RelativeBias(t)}, "over sinks, a table or what a function reads"),
        ((MAPPED, HEADS), lambda t: {"score": lambda s, b, h, i, j: s * t[h]}, "over sinks, a table or what a function reads"),
        ((MAPPED,), lambda t: {"score": lambda s, b, h, i, j: s * t}, "over sinks, a table or what a function reads"),
        ((MAPPED, LEN), lambda t: {"mask": lambda b, h, i, j: t[j] > 0}, "over sinks, a table or what a function reads"),
        ((MAPPED, HEADS), lambda t: {"sinks": t, "score": ALiBi(t)}, "over sinks, a table or what a function reads"),
        ((MAPPED, BATCH), lambda t: {"mask": lambda b, h, i, j: t[b] > j}, "of a mask or score function that reads the batch index"),
    ],
    ids=["sinks", "table", "score", "number", "mask", "twice", "batch"],
)
def test_vmap_over_what_does_not_join_the_batch(qkv, what, arguments, words):
    what = torch.rand(what)
    with pytest.raises(NotImplementedError, match=f"^attention: torch.func.vmap {words} is not implemented{BATCHED}$"):
        vmap(lambda t, *x: attend(*x, **arguments(t)))(what, *qkv)
    expected = torch.stack([attend(*(x[n] for x in qkv), **arguments(what[n])) for n in range(MAPPED)])
    torch.testing.assert_close(vmap(lambda t, *x: attend(*x, kernel="reference", **arguments(t)))(what, *qkv), expected)


def test_vmap_names_the_sizes_that_the_user_sees(qkv):
    with pytest.raises(ValueError, match=r"^KeyPadding: valid is \[3\]; this call needs \[batch 2\]$"):
        vmap(lambda t, *x: attend(*x, mask=KeyPadding(t)))(torch.ones(MAPPED, 3).long(), *qkv)


def test_vmap_over_other_layouts(qkv):
    q, k, v = qkv
    with pytest.raises(NotImplementedError, match=f"vmap of packed sequences is not implemented{BATCHED}"):
        vmap(lambda *x: onchip.attention_packed(*x, OFFSETS))(q[:, 0], k[:, 0], v[:, 0])
    cache = PagedKV(k[0], v[0], torch.zeros(BATCH, 1, dtype=torch.int32), torch.full((BATCH,), 3, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=r"paged_attention: torch.func transforms are not implemented; use kernel='reference'"):
        vmap(lambda q: onchip.paged_attention(q, cache))(q)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda *x: attend(*x, dropout=0.5))(*qkv)


# ---- gradients


def test_grad(qkv):
    first = [t[0] for t in qkv]
    torch.testing.assert_close(grad(loss, argnums=(0, 1, 2))(*first), plain_grad(loss, *first))
    bias, sinks = torch.randn(1, HEADS, LEN, LEN), torch.randn(HEADS)
    function = lambda b, s: loss(*first, bias=b, sinks=s, score=lambda s, b, h, i, j: s + sinks[h])  # noqa: E731
    torch.testing.assert_close(grad(function, argnums=(0, 1))(bias, sinks), plain_grad(function, bias, sinks))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_grad_of_what_a_function_captures(qkv, kernel):
    """A captured tensor is wrapped by torch.func, and must not be mistaken for what is inside."""
    first, table = [t[0] for t in qkv], torch.randn(HEADS, LEN)
    function = lambda t: loss(*first, score=lambda s, b, h, i, j: s + t.exp()[h, (i - j).abs()], kernel=kernel)  # noqa: E731
    torch.testing.assert_close(grad(function)(table), *plain_grad(function, table))


def test_grads_of_samples_and_of_all(qkv):
    found = vmap(grad(loss, argnums=(0, 1, 2)))(*qkv)
    for n in range(MAPPED):
        torch.testing.assert_close([t[n] for t in found], list(plain_grad(loss, *(t[n] for t in qkv))))
    of_all = grad(lambda *x: vmap(attend)(*x).square().sum(), argnums=(0, 1, 2))(*qkv)
    torch.testing.assert_close(of_all, found)
    with pytest.raises(NotImplementedError, match=r"torch.func.vmap over gradients of sinks, or of what the score reads, is not implemented"):
        vmap(grad(lambda s, *x: loss(*x, sinks=s)), in_dims=(None, 0, 0, 0))(torch.randn(HEADS), *qkv)


def test_jacobians(qkv):
    q, k, v = (t[0, :1, :3] for t in qkv)
    torch.testing.assert_close(jacrev(attend)(q, k, v), jacrev(lambda *x: attend(*x, kernel="reference"))(q, k, v))
    out, pull = vjp(lambda q: attend(q, k, v, return_lse=True)[1], q)
    torch.testing.assert_close(pull(torch.ones_like(out)), vjp(lambda q: attend(q, k, v, return_lse=True, kernel="reference")[1], q)[1](torch.ones_like(out)))


def test_functional_call():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(HEADS, LEN, LEN))

        def forward(self, q, k, v):
            return loss(q, k, v, bias=self.bias)

    module, inputs = Module(), [torch.randn(BATCH, LEN, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    found = grad(lambda bias: functional_call(module, {"bias": bias}, tuple(inputs)))(module.bias.detach())
    module(*inputs).backward()
    torch.testing.assert_close(found, module.bias.grad)


@pytest.fixture(params=[({}, True), ({"softcap": 3.0}, False)], ids=["torch's node", "ours"])
def how(request):
    """Keywords of calls over enough keys for torch's kernel, whose gradient is that of a node of torch's, or one of ours."""
    keywords, own = request.param
    leaf = torch.randn(BATCH, LONGER, HEADS, DIM, requires_grad=True)
    assert ("FlashAttentionForCpu" in attend(leaf, leaf, leaf, **keywords).grad_fn.next_functions[0][0].name()) == own
    return keywords


@pytest.fixture
def longer():
    return [torch.randn(BATCH, LONGER, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("kernel", ["auto", "blocked"])
def test_gradients_of_gradients_are_refused(longer, kernel, how):
    q, k, v = longer
    for function in (lambda q: attend(q, k, v, kernel=kernel, **how).sum(), lambda q: loss(q, k, v, kernel=kernel, **how)):
        leaf = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        torch.testing.assert_close(first.detach(), *plain_grad(function, q))
        with pytest.raises(NotImplementedError, match=TWICE):
            torch.autograd.grad(first.sum(), leaf)
        with pytest.raises(NotImplementedError, match=TWICE):
            grad(lambda q, function=function: grad(function)(q).sum())(q)


def test_gradients_of_gradients_of_the_reference():
    q, k, v = (torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, kernel="reference"), (q, k, v))


def test_forward_mode_is_refused(qkv):
    q, k, v = (t[0] for t in qkv)
    sinks = torch.randn(HEADS)
    for call in (
        lambda: jvp(lambda q: attend(q, k, v), (q,), (q,)),
        lambda: jvp(lambda s: attend(q, k, v, sinks=s), (sinks,), (sinks,)),
        lambda: hessian(lambda q: loss(q, k, v))(q),
    ):
        with pytest.raises(NotImplementedError, match=FORWARD):
            call()
    for needs in (False, True):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD):
            attend(forward_ad.make_dual(q.clone().requires_grad_(needs), q), k, v)
    tangent = jvp(lambda q: attend(q, k, v, kernel="reference"), (q,), (k.repeat_interleave(2, 2),))[1]
    step = 1e-3 * k.repeat_interleave(2, 2)
    torch.testing.assert_close(tangent, (attend(q + step, k, v) - attend(q - step, k, v)) / 2e-3, rtol=1e-2, atol=1e-2)
    assert jvp(lambda x: attend(q, k, v).sum() * x, (torch.ones(()),), (torch.ones(()),))[1] == attend(q, k, v).sum()  # nothing goes through


def test_a_batch_of_backward_passes_is_refused(longer, how):
    q, k, v = longer
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v, **how)
    with pytest.raises(NotImplementedError, match=r"a batch of backward passes at once \(is_grads_batched\) is not implemented; kernel='reference' has it"):
        torch.autograd.grad(out, leaf, torch.stack([out.detach()] * 2), is_grads_batched=True)


# ---- torch.compile over torch.func


def test_compiled_vmap(qkv):
    bias = torch.randn(BATCH, HEADS, LEN, LEN)
    function = lambda *x: vmap(lambda *y: attend(*y, mask=Document(IDS) & (lambda b, h, i, j: i - j < 4), bias=bias))(*x)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), function(*qkv))
    torch.testing.assert_close(plain_grad(lambda *x: compiled(*x).square().sum(), *qkv), plain_grad(lambda *x: function(*x).square().sum(), *qkv))


# ---- checkpoints


@pytest.mark.parametrize("dropout", [None, 0.4, Dropout(0.4, 3)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_numbers_again(qkv, dropout, compiled, reentrant):
    if compiled and reentrant:
        pytest.skip("torch.compile takes use_reentrant=False")
    sinks = torch.randn(HEADS)

    def run(wrap):
        inputs = [t[0].clone().requires_grad_() for t in qkv] + [sinks.clone().requires_grad_()]
        function = wrap(lambda q, k, v, s: attend(q.sin(), k, v, dropout=dropout, sinks=s).square())
        torch.manual_seed(7)
        out = function(*inputs)
        out.sum().backward()
        return [out, *(t.grad for t in inputs)]

    def kept(function):
        through = lambda *x: checkpoint(function, *x, use_reentrant=reentrant)  # noqa: E731
        return torch.compile(through, fullgraph=True, backend="aot_eager") if compiled else through

    torch.testing.assert_close(run(kept), run(lambda function: function))


@pytest.mark.parametrize("how", ["read", "made", "both", "mask"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)  # without, torch refuses to follow functions in a checkpoint
def test_a_checkpoint_sees_nothing_of_how_a_function_is_written_down(qkv, how, compiled):
    """The first call of a function traces it, its recomputation does not."""
    parts._MODS.clear()
    keywords = {
        "read": lambda t: {"score": lambda s, b, h, i, j: s * t[h]},
        "made": lambda t: {"score": lambda s, b, h, i, j: s * t.exp()[h]},
        "both": lambda t: {"score": [onchip.ALiBi(t.sigmoid()), lambda s, b, h, i, j: s - t[h] * t.exp()[h]]},
        "mask": lambda t: {"mask": lambda b, h, i, j: i - j < 2, "bias": t[:, None, None].square()},
    }[how]
    inputs = [t[0].clone().requires_grad_() for t in (*qkv, torch.randn(1, HEADS))]
    through = lambda *x: checkpoint(lambda q, k, v, t: attend(q, k, v, **keywords(t)), *x, use_reentrant=False)  # noqa: E731
    through = torch.compile(through, fullgraph=True, backend="aot_eager") if compiled else through
    found = torch.autograd.grad(through(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(attend(*inputs[:3], **keywords(inputs[3])).square().sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_a_selective_checkpoint_sees_the_operator(qkv):
    """And may keep its results."""
    seen = []

    def policy(_, op, *args, **keywords):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.onchip.attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = [t[0].clone().requires_grad_() for t in qkv]
    with onchip.record() as decisions:
        out = checkpoint(lambda q, k, v: attend(q.sin(), k, v), *inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        out.sum().backward()
    assert torch.ops.onchip.attention.default in seen and [d.problem.op for d in decisions] == ["prefill", "backward"]
    expected = plain_grad(lambda q, k, v: attend(q.sin(), k, v).sum(), *(t[0] for t in qkv))
    torch.testing.assert_close(tuple(t.grad for t in inputs), expected)


# ---- modes and tensors without contents


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        q, k, v = (torch.randn(BATCH, LEN, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        v = torch.cat([v, v], -1)
        out, lse = attend(q, k, v, dropout=0.1, bias=torch.randn(LEN, LEN), return_lse=True)
        assert out.shape == (BATCH, LEN, HEADS, 2 * DIM) and lse.shape == (BATCH, HEADS, LEN) and lse.dtype == torch.float32
        offsets = torch.tensor([0, LEN], dtype=torch.int32)
        assert onchip.attention_packed(q[0], k[0], v[0], offsets).shape == (LEN, HEADS, 2 * DIM)
    q, k, v = (torch.randn(BATCH, LEN, heads, DIM, device="meta", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert attend(q, k, v).is_meta and attend(q, k, v).dtype == torch.bfloat16


def test_make_fx(qkv):
    q, k, v = (t[0] for t in qkv)
    table = torch.randn(HEADS, LEN)
    function = lambda q, k, v: attend(q, k, v, score=lambda s, b, h, i, j: s + table[h, j], bias=torch.zeros(LEN, LEN))  # noqa: E731
    graph = make_fx(function)(q, k, v)
    assert [node.target for node in graph.graph.nodes if "onchip" in str(node.target)] == [torch.ops.onchip.attention.default]
    torch.testing.assert_close(graph(q, k, v), function(q, k, v))


# ---- other operators, in plain torch


def test_vmap_over_a_norms_weights_and_over_logits_of_greedy_tokens():
    x, weights, logits = torch.randn(3, 16), torch.randn(2, 16), torch.randn(2, 3, 128)
    logits[1, 2, 5] = torch.nan
    torch.testing.assert_close(vmap(lambda w: onchip.rms_norm(x, w))(weights), torch.stack([onchip.rms_norm(x, w) for w in weights]))
    none, long = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    greedy = onchip.Sampling(none, none.int(), none + 1, none, long, long)
    assert torch.equal(vmap(lambda some: onchip.sample(some, greedy))(logits), torch.stack([onchip.sample(some, greedy) for some in logits]))
