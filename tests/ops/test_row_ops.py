"""Activations, rotation, embeddings, dropout, Hadamard and denoising through a compiled graph, with their gradients, and what is recorded."""

import pytest
import torch

import onchip
from onchip.core import philox
from onchip.core.problem import Dropout
from onchip.models.rope import rope_rows
from onchip.ops.diffusion import DPM2M, denoise_step, schedule

T, W = 6, 16
TABLE = torch.linspace(-1, 1, 10 * 8).view(10, 8)
CALLS = {
    "activate": (lambda x, w: onchip.activate(x, "mish", bias=w), (T, W), (W,)),
    "gated_act": (lambda x, w: onchip.gated_act(x, onchip.Clipped(limit=0.5), bias=w, layout="interleaved"), (2, T, W), (W,)),
    "rotary": (lambda q, k: onchip.rotary(q, k, TABLE)[0] * 2 + onchip.rotary(q, k, TABLE)[1].sum(-2, keepdim=True), (2, T, 4, W), (2, T, 1, W)),
    "embedding": (lambda x, w: onchip.embedding(torch.tensor([[0, 3], [3, 1]]), w, padding_idx=1) * x, (2, 2, W), (5, W)),
    "dropout_add": (lambda x, w: onchip.dropout_add(x, w, Dropout(0.5, 7)), (T, W), (T, W)),
    "dropout": (lambda x, w: onchip.dropout_add(x, None, Dropout(0.5, 7)) * w, (T, W), (T, W)),
    "hadamard": (lambda x, w: onchip.hadamard(x) * w, (T, W), (T, W)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_graph_with_gradients(name):
    function, *shapes = CALLS[name]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        out = run(*inputs)
        found.append((out.detach(), *torch.autograd.grad(out, inputs, torch.arange(out.numel()).view(out.shape) / 50)))
    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def _shifted(y, x):
    low = onchip.LowRank(torch.ones(2, 4, W), torch.ones(2, T, 4), torch.tensor([T], dtype=torch.int32), (T,))
    return onchip.add_low_rank(y.clone(), x, low, onchip.route_adapters(torch.tensor([0, 1, -1, 0, 0, 1], dtype=torch.int32), 2))


def _chosen(q, k):
    """Quest's pages of a cache of two sequences."""
    q, table, lengths = q.view(2, 1, 3, W), torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([2, 3], dtype=torch.int32)
    cache = onchip.PagedKV(*k.view(2, 4, 2, 1, W).unbind(0), table, lengths)
    pages = onchip.top_pages(onchip.page_scores(q, onchip.page_bounds(cache), table, lengths, 2), 1, 1, lengths, 2)
    return onchip.attend_pages(q, cache, pages)


INFERENCE = {
    "skinny_linear": (lambda x, w: onchip.skinny_linear(x, w, norm=onchip.RowNorm(w[0], 1e-6), act=onchip.Clipped(limit=0.5)), (T, W), (4, W)),
    "add_low_rank": (_shifted, (T, T), (T, W)),
    "attend_pages": (_chosen, (6, W), (16, W)),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_a_compiled_graph_without_gradients(name):
    function, *shapes = INFERENCE[name]
    inputs = [torch.randn(shape) for shape in shapes]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs))


def test_a_compiled_step_of_a_sampler():
    plan, step, x = schedule(DPM2M(), 5), torch.ones(1, dtype=torch.int64), torch.randn(2, 3, 4)

    def function(x, step):
        return denoise_step(x, x.repeat(2, 1, 1).sin(), plan, step, guidance=3.0, history=x)

    torch._dynamo.reset()
    for compiled, eager in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(x, step), function(x, step), strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_default_device_of_the_users():
    """An optimiser's and a sampler's numbers are the host's until they are copied."""
    with torch.device("meta"):
        param = torch.nn.Parameter(torch.ones(3, device="cpu"))
        param.grad = torch.ones(3, device="cpu")
        onchip.AdamW([param], lr=0.5, weight_decay=0.0, max_norm=1.0).step()
        plan = schedule(DPM2M(), 5, device="cpu")
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))
    assert torch.equal(plan.table, schedule(DPM2M(), 5).table)


def test_only_what_is_wanted_is_computed():
    x, w = torch.randn(T, W), torch.randn(W)
    with onchip.record() as decisions:
        onchip.gated_act(x, bias=w)
        onchip.gated_act(x.requires_grad_(), bias=w).sum().backward()
    assert [d.problem.op for d in decisions] == ["gated_act", "gated_act", "gated_act_backward"]
    with torch.no_grad():
        assert not onchip.gated_act(x).requires_grad


def _entropy(x):
    return onchip.token_log_probs(x, TABLE[:5].repeat(1, 2), torch.arange(T) % 5).entropy


@pytest.mark.parametrize(("name", "function"), [("activation", onchip.activate), ("linear_tokens", _entropy)])
def test_a_gradient_of_a_gradient_is_refused(name, function):
    """Of a backward function that returns a tensor, and of one that returns a list."""
    x = torch.randn(T, W, requires_grad=True)
    (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{name}: gradients of gradients"):
        grad.sum().backward()
    assert torch.equal(torch.func.grad(lambda x: function(x).sum())(x.detach()), grad.detach())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["rope_append", "log_probs", "adjust_logits"])
def test_what_has_no_gradient_says_so(name, compiled):
    """It would be lost in silence: a rotation in place is not in autograd's graph."""
    calls = {
        "rope_append": lambda x: onchip.rope_append(x * 1, TABLE, torch.arange(T), (2, 1))[0],
        "log_probs": lambda x: onchip.log_probs(x, torch.zeros(T, dtype=torch.int64)).chosen,
        "adjust_logits": lambda x: onchip.adjust_logits(x),
    }
    x, call = torch.randn(T, 4 * W), torch.compile(calls[name], backend="aot_eager") if compiled else calls[name]
    assert not call(x).requires_grad
    with pytest.raises(Exception, match=f"{name}: gradients are not implemented; call it under torch.no_grad\\(\\), or"):
        call(x.requires_grad_())
    with torch.no_grad():
        call(x)


def test_losses_and_norms_under_torch_func():
    """A loss whose gradient is made in its forward pass makes it in the backward pass there; norms say that they do not."""
    x, weight, targets = torch.randn(T, W), torch.randn(9, W), torch.arange(T)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(onchip.linear_cross_entropy(leaf, weight, targets), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: onchip.linear_cross_entropy(x, weight, targets))(x), expected)
    with pytest.raises(NotImplementedError, match=r"layer_norm: gradients under torch.func are not implemented; use torch.autograd.grad"):
        torch.func.grad(lambda x: onchip.layer_norm(x).sum())(x)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_integers_are_refused(kernel):
    """Plain torch would cut its results off: a softmax's to 0."""
    for function in (onchip.softmax, lambda x, kernel: onchip.rms_norm(x, torch.ones(W), kernel=kernel), onchip.activate):
        with pytest.raises(onchip.Unsupported, match=r"dtype torch.int32 is not one of bf16, fp16, fp32, fp64"):
            function(torch.ones(T, W, dtype=torch.int32), kernel=kernel)


@pytest.mark.gpu
@pytest.mark.large
def test_nothing_waits_for_the_device(device):
    def draw(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    x, w, table, q, k, rows = draw(T, 2 * W), draw(2 * W), TABLE.to(device), draw(2, T, 4, W), draw(2, T, 1, W), draw(5, W)
    ids, step = torch.randint(5, (7,), device=device), torch.ones(1, dtype=torch.int64, device=device)
    state = philox.draw(device, 3, 0)
    params = [torch.nn.Parameter(t.detach().clone()) for t in (w, rows)]
    optimiser, plan = onchip.AdamW(params, max_norm=1.0), schedule(DPM2M(), 5, device=device)

    def everything():
        outputs = [onchip.gated_act(x, bias=w), onchip.activate(x, "gelu"), *onchip.rotary(q, k, table), onchip.embedding(ids, rows)]
        outputs += [onchip.dropout_add(x, x, Dropout(0.5)), onchip.hadamard(x)]
        philox.kept_elements(0.5, state, 9), rope_rows(table, torch.zeros(2, 7, dtype=torch.int64, device=device), [0, 1] * (table.shape[1] // 4))
        torch.autograd.grad(sum(out.sum() for out in outputs), (x, w, q, k, rows))
        for p in params:
            p.grad = torch.ones_like(p)
        optimiser.step()
        denoise_step(x.detach(), x.detach(), plan, step, history=x.detach())

    everything()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dropout_is_a_value():
    with pytest.raises(TypeError, match=r"dropout_add: dropout is 0.1; give Dropout\(p\)"):
        onchip.dropout_add(torch.ones(2, 2), None, 0.1)
