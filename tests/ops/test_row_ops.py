"""Activations, rotation, embeddings, dropout, Hadamard and denoising through a compiled graph, with their gradients, and what is recorded."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from onchip.core import philox
from onchip.core.problem import Dropout
from onchip.models.rope import rope_rows
from onchip.ops.diffusion import DPM2M, denoise_step, schedule

T, W = 6, 16
TABLE = torch.linspace(-1, 1, 10 * 8).view(10, 8)
PLAN = schedule(onchip.DDIM(), 5)
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


def test_sizes_that_are_symbols():
    """Beside tensors whose sizes are numbers: buffers."""
    how = onchip.Sampling(*(torch.ones(3, dtype=t) for t in (torch.float32, torch.int32, *(torch.float32,) * 2, *(torch.int64,) * 2)))
    given = (torch.arange(T) != 2, torch.arange(T), torch.ones(3), torch.tensor([-1, 0, 0, 1, 1], dtype=torch.int32))
    calls = (
        lambda kept, x: onchip.softmax(x[..., 0], mask=kept),
        lambda places, x: onchip.rotary(x.unsqueeze(2), x.unsqueeze(2), TABLE, places)[0],
        lambda advantages, x: onchip.grpo(x[..., 0], x[..., 1], advantages, x[..., 2] > 0),
        lambda parents, x: onchip.verify(x, onchip.Draft(x[:, 1:, 0].long(), None, parents), how).token,
    )
    x = torch.randn(3, T, W)
    for call, buffer in zip(calls, given, strict=True):
        module = torch.nn.Module()
        module.register_buffer("buffer", buffer)
        module.forward = lambda x, module=module, call=call: call(module.buffer, x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(module, dynamic=True, fullgraph=True, backend="aot_eager")(x), module(x))


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


def _of_head(loss):
    return lambda x: loss(x, TABLE[:5].repeat(1, 2), torch.arange(T) % 5)


TWICE = {  # of backward functions that return a tensor or a list, of norms (of a sum, whose parts share a gradient), and of losses with their gradients made
    "activation": onchip.activate,
    "linear_tokens": _entropy,
    "norm": lambda x: onchip.rms_norm(x, torch.ones(W)),
    "norm of a sum": lambda x: onchip.layer_norm(x, residual=x)[0],
    "loss": _of_head(onchip.linear_cross_entropy),
    "loss in place": lambda x: onchip.cross_entropy(x * 1, torch.arange(T), in_place=True),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_gradient_of_a_gradient_is_refused(name):
    """Also where nothing but the input needs one: the penalty of a gradient would have none."""
    function = TWICE[name]
    x = torch.randn(T, W, requires_grad=True)
    (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    said = {"loss": "linear_cross_entropy", "loss in place": "cross_entropy with in_place=True"}.get(name, name.split()[0])
    with pytest.raises(NotImplementedError, match=f"{said}: gradients of gradients"):
        grad.sum().backward()
    assert torch.equal(torch.autograd.grad(function(x).sum(), x)[0], grad.detach())
    if name in ("activation", "linear_tokens"):
        assert torch.equal(torch.func.grad(lambda x: function(x).sum())(x.detach()), grad.detach())


@pytest.mark.parametrize("name", TWICE)
def test_a_tangent_is_refused(name):
    """A kernel would lose it in silence."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(T, W), torch.randn(T, W))
        if name == "loss in place":  # without a gradient it is as any other
            x = x.requires_grad_()
        with pytest.raises(NotImplementedError, match=r"derivatives in forward mode \(jvp, jacfwd\) are not implemented; use reverse mode"):
            TWICE[name](x)


def test_a_tangent_is_refused_before_logits_are_written_over():
    with forward_ad.dual_level():
        logits = forward_ad.make_dual(torch.randn(T, W), torch.randn(T, W)).requires_grad_() * 1
        before = logits.detach().clone()
        with pytest.raises(NotImplementedError, match=r"cross_entropy with in_place=True: derivatives in forward mode"):
            onchip.cross_entropy(logits, torch.arange(T), in_place=True)
        assert torch.equal(forward_ad.unpack_dual(logits.detach()).primal, before)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, compiled) for name in ("rope_append", "denoise_step") for compiled in (False, True)),
        *((name, False) for name in ("log_probs", "adjust_logits", "skinny_linear", "add_low_rank")),
    ],
)
def test_what_has_no_gradient_says_so(name, compiled):
    """It would be lost in silence: a rotation in place is not in autograd's graph."""
    low = onchip.LowRank(torch.ones(1, 2, 4 * W), torch.ones(1, 4 * W, 2), torch.tensor([4 * W], dtype=torch.int32), (4 * W,))
    calls = {
        "rope_append": lambda x: onchip.rope_append(x * 1, TABLE, torch.arange(T), (2, 1))[0],
        "denoise_step": lambda x: denoise_step(x * 1, x.sin(), PLAN, torch.ones(1, dtype=torch.int64))[0],
        "log_probs": lambda x: onchip.log_probs(x, torch.zeros(T, dtype=torch.int64)).chosen,
        "adjust_logits": lambda x: onchip.adjust_logits(x),
        "skinny_linear": lambda x: onchip.skinny_linear(x, torch.ones(3, 4 * W)),
        "add_low_rank": lambda x: onchip.add_low_rank(x * 1, x, low, onchip.route_adapters(torch.zeros(T, dtype=torch.int32), 1)),
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


def test_losses_under_vmap():
    """What needs no memory of its own goes through; the rest says so."""
    x, weight, targets = torch.randn(3, T, W), torch.randn(9, W), torch.arange(3 * T).view(3, T) % 9
    for loss in (onchip.cross_entropy, lambda x, t: onchip.divergence(x, x.sin()), lambda x, t: onchip.grpo(x, x.sin(), x[:, 0], x > 0)):
        torch.testing.assert_close(torch.vmap(loss)(x, targets), torch.stack([loss(*each) for each in zip(x, targets, strict=True)]))
    assert torch.vmap(onchip.embedding, (0, None))(targets, weight).equal(weight[targets])
    for call, words in (
        (lambda x, t: onchip.linear_cross_entropy(x, weight, t), "linear_cross_entropy: torch.vmap is not implemented"),
        (lambda x, t: onchip.token_log_probs(x, weight, t).log_prob, "token_log_probs: torch.vmap is not implemented"),
        (lambda x, t: onchip.linear_divergence((x, weight), (x, weight)), "linear_divergence: it makes its gradients in this call"),
        (torch.func.grad(onchip.cross_entropy), "cross_entropy: gradients under torch.vmap, and so jacrev's, are not"),
        (torch.func.grad(lambda x, t: onchip.softmax(x).sum()), "softmax: gradients under torch.vmap, and so jacrev's, are not"),
        (lambda x, t: torch.func.grad(lambda x: onchip.linear_cross_entropy(x, weight, t))(x), "linear_cross_entropy: torch.vmap is not implemented"),
        (lambda x, t: onchip.linear_cross_entropy(weight, weight, t.new_ones(9), bias=x[0, :9]), "linear_cross_entropy: torch.vmap is not"),
        (lambda x, t: onchip.linear_cross_entropy(weight, weight, t.new_ones(9), onchip.LossTerms(class_weights=x[0, :9])), "linear_cross_entropy: torch.v"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{words}"):
            torch.vmap(call)(x, targets)


def test_backward_passes_at_once():
    """Each by itself is right."""
    x, weight, targets, eye = torch.randn(T, 9, requires_grad=True), torch.randn(W, 9), torch.arange(T), torch.eye(T)
    terms = {"reduction": "none"}
    for ours, plain in (
        (lambda x: onchip.cross_entropy(x, targets, **terms), lambda x: torch.nn.functional.cross_entropy(x, targets, **terms)),
        (lambda x: onchip.linear_cross_entropy(x, weight, targets, **terms), lambda x: torch.nn.functional.cross_entropy(x @ weight.t(), targets, **terms)),
    ):
        torch.testing.assert_close(torch.func.jacrev(ours, chunk_size=1)(x), torch.func.jacrev(plain)(x))
        with pytest.raises(NotImplementedError, match=r"gradients under torch.vmap, and so jacrev's, are not implemented; loop over"):
            torch.func.jacrev(ours)(x)
        with pytest.raises(NotImplementedError, match=r"gradients under torch.vmap, and so jacrev's, are not implemented; loop over"):
            torch.autograd.grad(ours(x), x, eye, is_grads_batched=True)
    for y in (onchip.linear_cross_entropy(x, weight, targets), onchip.layer_norm(x)):
        with pytest.raises(NotImplementedError, match=r"gradients under torch.vmap, and so jacrev's, are not implemented; loop over"):
            torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True, retain_graph=True)
        torch.autograd.grad(y.sum(), x)  # a loss that holds its gradients has them still


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_integers_are_refused(kernel):
    """Plain torch would cut its results off: a softmax's to 0."""
    for function in (onchip.softmax, lambda x, kernel: onchip.rms_norm(x, torch.ones(W), kernel=kernel), onchip.activate):
        with pytest.raises(onchip.Unsupported, match=r"dtype torch.int32 is not one of bf16, fp16, fp32, fp64"):
            function(torch.ones(T, W, dtype=torch.int32), kernel=kernel)


class NothingRead(TorchDispatchMode):
    """Torch's operators that hand a number, or a size that depends on numbers, to the host."""

    READ = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        by_bools = name.startswith("index") and any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in pytree.tree_leaves(args[1:]))
        assert name not in self.READ and not by_bools, f"{function} reads the device"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_read(device):
    """What waits for the device raises; in the interpreter what would."""
    if device.type == "cpu":
        with NothingRead():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.large
def test_nothing_waits_for_the_device(device):
    """Every operator on rows, those with a gradient forward and backward."""

    def draw(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    x, w, half, head, small = draw(T, 2 * W), draw(2 * W), draw(W), draw(9, 2 * W), draw(5, W)
    q, k, table = draw(2, T, 4, W), draw(2, T, 1, W), TABLE.to(device)
    stream, picture, logits = draw(T, 2 * W), draw(2, W, 3, 3), draw(3, 40)
    ids, targets, places = (torch.tensor(n, device=device) for n in ([0, 4, 1], [0, 8, -100, 3, 1, 2], list(range(T))))
    step, state, counts = torch.ones(1, dtype=torch.int64, device=device), philox.draw(device, 3, 0), targets > 0
    terms = onchip.LossTerms(smoothing=0.1, z_loss=0.1, softcap=3.0, class_weights=torch.ones(2 * W, device=device))
    how = onchip.Sampling(*(torch.ones(3, dtype=t, device=device) for t in (torch.float32, torch.int32, *(torch.float32,) * 2, *(torch.int64,) * 2)))
    how = how._replace(top_k=how.top_k * 3, min_p=how.min_p * 0.1, typical=how.top_p * 0.9)
    rates, drafted, mask = (how.temperature,) * 3, torch.zeros(3, 4, dtype=torch.int64, device=device), torch.ones(3, 2, dtype=torch.int32, device=device)
    trees = torch.tensor([-1, 0, 0, 1], dtype=torch.int32, device=device)
    pages = torch.zeros(2, 4, 1, W, device=device)
    plans = [schedule(sampler, 5, device=device) for sampler in (DPM2M(), onchip.DDPM(1.0), onchip.Euler())]
    params = [torch.nn.Parameter(t.detach().clone()) for t in (w, small)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimiser = onchip.AdamW(params, max_norm=1.0)

    def everything():
        around = onchip.Residual(stream, w, x[:, 0], Dropout(0.5))
        outputs = [onchip.rms_norm(x, w), *onchip.rms_norm(x, w, residual=around, after=onchip.SiluGate(x)), onchip.layer_norm(x, w, w)]
        outputs += [onchip.invertible_layer_norm(x, w, w), onchip.modulated_norm(x, w, w), onchip.group_norm(picture, 2, half, half, act="silu")]
        outputs += [onchip.gated_act(x, bias=w), onchip.activate(x, "gelu"), *onchip.rotary(q, k, table), onchip.softmax(x, mask=x > 0), onchip.log_softmax(x)]
        outputs += [onchip.embedding(ids, small), onchip.dropout_add(x, x, Dropout(0.5)), onchip.hadamard(x)]
        outputs += [onchip.cross_entropy(x, targets, terms), onchip.cross_entropy(x * 1, targets, terms, in_place=True)]
        outputs += [onchip.linear_cross_entropy(x, head, targets, per_token=True)[0], onchip.linear_cross_entropy(x, head, targets, reduction="none")]
        outputs += [onchip.divergence(x, x.detach(), counts=counts)]
        outputs += [onchip.linear_divergence(onchip.Head(x, head), onchip.Head(x.detach(), head.detach()), counts=counts)]
        policy = onchip.sequence_log_probs(x.view(2, 3, -1), head, targets.view(2, 3), mean=True)
        pair, old = onchip.Pair(policy, policy * 2), policy.detach()
        outputs += [onchip.dpo(pair, onchip.Pair(old, old)), onchip.cpo(pair, policy), onchip.simpo(pair), onchip.orpo(pair, policy)]
        outputs += [onchip.kto(policy, old, old < -1, old[0]), onchip.grpo(policy[:, None], old[:, None], old, old[:, None] < 0, onchip.DAPO)]
        torch.autograd.grad(sum(out.sum() for out in outputs), (x, w, q, k, small, stream, picture, half, head))
        optimiser.step()
        philox.kept_elements(0.5, state, 9), rope_rows(table, torch.zeros(2, 7, dtype=torch.int64, device=device), [0, 1] * (table.shape[1] // 4))
        with torch.no_grad():
            onchip.layer_norm(x, w, after=onchip.RowCodes("int8"))
            onchip.rope_append(x.repeat(1, 2), table, places, (2, 1), append=onchip.Append(pages, pages.clone(), places))
            history = onchip.Penalties(*rates, onchip.TokenIds(drafted))
            onchip.sample(onchip.adjust_logits(logits, penalties=history, bias=onchip.Bias(drafted[:, :1], logits[:, :1]), mask=mask), how, logprobs=3)
            for draft in (onchip.Draft(drafted), onchip.Draft(drafted, parents=trees), onchip.Draft(drafted, logits[:, None].expand(3, 4, 40).softmax(-1))):
                onchip.verify(logits[:, None].expand(3, 5, 40), draft, how)
            for plan in plans:
                denoise_step(x, x, plan, step, history=x, state=state)

    everything()  # compiles
    with nothing_read(device):
        everything()


def test_dropout_is_a_value():
    with pytest.raises(TypeError, match=r"dropout_add: dropout is 0.1; give Dropout\(p\)"):
        onchip.dropout_add(torch.ones(2, 2), None, 0.1)
