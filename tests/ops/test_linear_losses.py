"""Losses of a head's product without its logits: against the product and torch's loss, in chunks, compiled, and with the vocabulary on two ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from judge import assert_as_good_as_torch
from onchip import Head, LossTerms, Shard, cross_entropy, divergence, linear_cross_entropy, linear_divergence, softmax, token_log_probs
from onchip.dispatch import record
from onchip.ops import linear_losses

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS, DIM, VOCAB = 20, 12, 130
TERMS = LossTerms(smoothing=0.1, z_loss=1e-3, softcap=4.0, temperature=0.8)
KERNELS = [pytest.param("triton_cross_entropy", marks=pytest.mark.gpu), "reference"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Of 8 tokens: the calls here have three, the last one short."""
    monkeypatch.setattr(linear_losses, "LEAST", 1)
    monkeypatch.setattr(linear_losses, "ROUND", 8)


def inputs(dtype=FP32, device="cpu", tokens=TOKENS):
    """Hidden states, weight and bias that require gradients, and targets of which some are ignored."""
    hidden, weight, bias = torch.randn(tokens, DIM), torch.randn(VOCAB, DIM), torch.randn(VOCAB)
    targets = torch.randint(VOCAB, (tokens,))
    targets[::7] = -100
    return [t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)], targets.to(device)


def clones(leaves, dtype):
    return [t.detach().to(dtype).requires_grad_() for t in leaves]


def textbook(leaves, targets, terms=LossTerms(), reduction="mean"):
    """Through logits that are there, in one product."""
    z = F.linear(*leaves)
    z = z.to(FP64 if z.dtype == FP64 else FP32)  # the logits are rounded, what follows is not
    z = (terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z) / terms.temperature
    loss = F.cross_entropy(z, targets, label_smoothing=terms.smoothing, reduction="none") + terms.z_loss * z.logsumexp(-1).square() * (targets != -100)
    return {"mean": loss.sum() / (targets != -100).sum(), "sum": loss.sum(), "none": loss}[reduction]


def grads_of(loss, leaves):
    g = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape) if loss.ndim else 1.5 * torch.ones_like(loss)
    return torch.autograd.grad(loss, leaves, g)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "reduction"), [(FP32, "mean"), (BF16, "mean"), (BF16, "sum"), (BF16, "none"), (FP16, "mean")], ids=str)
def test_against_float64(dtype, reduction, kernel, device):
    leaves, targets = inputs(dtype, device)
    terms = LossTerms() if reduction == "sum" else TERMS
    loss, tokens = linear_cross_entropy(*leaves[:2], targets, terms, bias=leaves[2], reduction=reduction, per_token=True, kernel=kernel)
    grads = grads_of(loss, leaves)
    exact, low = clones(leaves, FP64), clones(leaves, dtype)
    truth, theirs = textbook(exact, targets, terms, reduction), textbook(low, targets, terms, reduction)
    assert loss.dtype == FP32
    assert_as_good_as_torch(loss.detach(), theirs.detach(), truth.detach())
    for ours, of_torch, of_truth in zip(grads, grads_of(theirs, low), grads_of(truth, exact), strict=True):
        assert ours.dtype == dtype
        assert_as_good_as_torch(ours, of_torch, of_truth, slack=3)
    plain = token_log_probs(*leaves[:2], targets, LossTerms(softcap=terms.softcap, temperature=terms.temperature), bias=leaves[2], kernel=kernel)
    torch.testing.assert_close(tokens, plain, rtol=2e-6, atol=1e-6)  # sums of other pieces
    assert not tokens.entropy.requires_grad


@pytest.mark.parametrize("kernel", KERNELS)
def test_log_probs_and_entropies(kernel, device):
    """With gradients of both, and 0 of ignored tokens."""
    leaves, targets = inputs(device=device)
    exact = clones(leaves, FP64)
    ours = token_log_probs(leaves[0].view(4, 5, DIM), leaves[1], targets.view(4, 5), LossTerms(temperature=0.7), bias=leaves[2], kernel=kernel)
    log_p = (F.linear(*exact) / 0.7).log_softmax(-1)
    kept = targets != -100
    truth = [log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0] * kept, -(log_p.exp() * log_p).sum(-1) * kept]
    for mine, right in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.flatten().double(), right, rtol=1e-5, atol=1e-5)
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.7, -0.3)):
        both = [sum(w * (t.flatten() ** 2).sum() for w, t in zip(weights, of, strict=True)) for of in (ours, truth)]
        for mine, right in zip(*(torch.autograd.grad(s, of, retain_graph=True) for s, of in zip(both, (leaves, exact), strict=True)), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=2e-4)


def test_gradcheck():
    leaves, targets = inputs(FP64)
    leaves = [t.detach().mul(0.3).requires_grad_() for t in leaves]
    of = lambda h, w, b: linear_cross_entropy(h, w, targets, TERMS, bias=b, reduction="none")  # noqa: E731
    assert torch.autograd.gradcheck(of, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(lambda h, w, b: token_log_probs(h, w, targets, bias=b), leaves, fast_mode=True)
    reduced = grads_of(linear_cross_entropy(*leaves[:2], targets, TERMS, bias=leaves[2]), leaves)
    torch.testing.assert_close(reduced, grads_of(textbook(leaves, targets, TERMS), leaves), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradients_of_two_heads_as_differences(beta):
    """By hand: gradcheck asks twice for gradients that go backward once."""
    leaves, targets = inputs(FP64)
    leaves = [t.detach().mul(0.3).requires_grad_() for t in leaves]
    teacher, counts = Head(*(t.detach().cos() for t in leaves)), targets >= 0
    along = [1e-6 * torch.randn_like(t) for t in leaves]

    def of(*head):
        return linear_divergence(Head(*head), teacher, beta=beta, temperature=0.7, counts=counts)

    grads = torch.autograd.grad(of(*leaves), leaves)
    for part in range(3):
        some = [d if n == part else 0 * d for n, d in enumerate(along)]
        ahead, behind = (of(*(t.detach() + sign * d for t, d in zip(leaves, some, strict=True))) for sign in (1, -1))
        torch.testing.assert_close((grads[part] * some[part]).sum(), (ahead - behind) / 2, rtol=1e-5, atol=1e-15)


def test_logits_are_never_all_there(monkeypatch):
    """What is in memory at a time is a chunk; gradients that nobody asked for are not computed."""
    leaves, targets = inputs(BF16)
    with record() as decisions:
        linear_cross_entropy(leaves[0].detach(), leaves[1], targets).backward()
    steps = [(d.problem.op, d.problem.rows) for d in decisions]
    assert steps == [("cross_entropy_in_place", 8), ("cross_entropy_in_place", 8), ("cross_entropy_in_place", 4), ("scale", 1)]
    monkeypatch.setattr(linear_losses, "ROUND", 128)
    assert linear_losses.chunk_of(8192, 128256, 4096, 2) == 1920 and linear_losses.chunk_of(32768, 128256, 4096, 2) == 2048
    assert linear_losses.chunk_of(8192, 128256, 4096, 2, 2) == 896 and linear_losses.chunk_of(1500, 128256, 4096, 2) == 1500
    monkeypatch.setattr(linear_losses, "ROUND", 8)
    monkeypatch.setattr(linear_losses, "IN_WEIGHTS_DTYPE", 2)  # sums in float32 then: as right
    wide = grads_of(linear_cross_entropy(*leaves[:2], targets, bias=leaves[2]), leaves)
    for ours, low, truth in zip(
        wide, *(grads_of(textbook(t := clones(leaves, dtype), targets), t) for dtype in (BF16, FP64)), strict=True
    ):  # fmt: skip
        assert_as_good_as_torch(ours, low, truth, slack=3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_backward_pass_of_no_tokens(kernel, device):
    hidden, weight = (torch.zeros(n, 8, device=device, requires_grad=True) for n in (0, 9))
    linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64, device=device), reduction="sum", kernel=kernel).backward()
    assert hidden.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_no_tokens_and_all_ignored():
    leaves, targets = inputs()
    loss = linear_cross_entropy(leaves[0][:0], leaves[1], targets[:0], reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, leaves[1])[0].eq(0).all()
    loss = linear_cross_entropy(*leaves[:2], torch.full_like(targets, -100))
    assert loss.isnan() and all(g.eq(0).all() for g in torch.autograd.grad(loss, leaves[:2]))


def test_gradients_go_backward_once():
    leaves, targets = inputs()
    loss = linear_cross_entropy(*leaves[:2], targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the loss again"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_divergence_of_heads(beta, reduction):
    leaves, _ = inputs()
    teacher = Head(torch.randn(TOKENS, 16), torch.randn(VOCAB, 16))
    counts = torch.rand(TOKENS) > 0.2
    loss = linear_divergence(Head(*leaves), teacher, beta=beta, temperature=1.3, counts=counts, reduction=reduction)
    expected = divergence(F.linear(*leaves), F.linear(*teacher[:2]), beta=beta, temperature=1.3, counts=counts, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads_of(loss, leaves), grads_of(expected, leaves), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none", "divergence"])
def test_what_does_not_count_is_not_read(reduction):
    """A hidden row of NaN leaves the weight's gradient as it is without that row."""
    hidden, weight, targets = torch.randn(6, DIM), torch.randn(VOCAB, DIM, requires_grad=True), torch.arange(6)
    kept = torch.arange(6) % 3 > 0

    def grad_of(rows, counts):
        if reduction == "divergence":
            loss = linear_divergence(Head(hidden[rows], weight), Head(rows[:, None].float().expand(-1, DIM), weight.detach()), counts=counts)
        else:
            loss = linear_cross_entropy(hidden[rows], weight, targets[rows].masked_fill(~counts, -100), reduction=reduction)
        return torch.autograd.grad(loss.sum(), weight)[0]

    expected = grad_of(kept.nonzero()[:, 0], torch.ones(4, dtype=torch.bool))
    hidden[~kept] = torch.nan
    torch.testing.assert_close(grad_of(torch.arange(6), kept), expected)
    hidden.requires_grad_()  # whose gradient's memory holds the copy without them
    torch.testing.assert_close(grad_of(torch.arange(6), kept), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_not_read_is_left_out_of_a_copy_that_costs_no_memory(reduction, monkeypatch):
    """On a CPU, which knows that all count, there is none; else it lies where the gradient will be."""
    leaves, targets = inputs()
    targets = targets.clamp(min=0)
    copies, where = [], torch.where

    def watched(condition, x, *rest, out=None):
        copies.extend([out is not None] * (isinstance(x, torch.Tensor) and x.shape[1:] == leaves[0].shape[1:]))
        return where(condition, x, *rest) if out is None else where(condition, x, *rest, out=out)

    monkeypatch.setattr(torch, "where", watched)
    for ignored, expected in ((0, []), (1, [True] * 3)):
        targets[:ignored] = -100
        copies.clear()
        grads = grads_of(linear_cross_entropy(*leaves[:2], targets, bias=leaves[2], reduction=reduction).sum(), leaves)
        assert copies == expected
        torch.testing.assert_close(grads, grads_of(textbook(leaves, targets, reduction=reduction).sum(), leaves), rtol=1e-4, atol=1e-5)


def test_a_teacher_has_no_gradient():
    head = Head(torch.randn(3, 4), torch.randn(9, 4, requires_grad=True))
    with pytest.raises(ValueError, match=r"linear_divergence: teacher.weight requires gradients, which it does not get; give teacher.weight.detach\(\)"):
        linear_divergence(head, head)
    with torch.no_grad():
        linear_divergence(head, head)


@pytest.mark.parametrize("function", [linear_cross_entropy, lambda h, w, t, bias: -token_log_probs(h, w, t, bias=bias).log_prob.mean(),
                                      lambda h, w, t, bias: linear_divergence(Head(h, w, bias), Head(h.detach(), w.detach()))])  # fmt: skip
def test_autocast_casts_what_goes_into_the_product(function):
    """As of torch's linear: a layer before may have given bfloat16 beside float32 weights, whose gradients stay in it."""
    (hidden, weight, bias), targets = inputs()
    with torch.autocast("cpu", BF16):
        loss = function(hidden.bfloat16(), weight, targets.clamp(min=0), bias=bias)
    expected = function(*(t.bfloat16() for t in (hidden, weight)), targets.clamp(min=0), bias=bias.bfloat16())
    assert torch.equal(loss, expected)
    for found, same in zip(grads_of(loss, (hidden, weight, bias)), grads_of(expected, (hidden, weight, bias)), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, same)


@pytest.mark.gpu
@pytest.mark.large
def test_nothing_waits_for_the_host(device):
    """Forward and backward, once warm."""
    leaves, targets = inputs(BF16, device)
    calls = [*COMPILED.values(), lambda h, w, b, t: cross_entropy(F.linear(h, w, b), t, in_place=True)]
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for call in calls:
                call(*leaves, targets).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.large
def test_memory_of_a_large_head(device, monkeypatch):
    """Beside the inputs and their gradients less than half the inputs' bytes: the logits would take twice all of them."""
    monkeypatch.undo()
    hidden, weight = (torch.randn(n, 4096, device=device, dtype=BF16).mul_(1 / 64).requires_grad_() for n in (8192, 128256))
    targets = torch.randint(128256, (8192,), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    given = sum(t.numel() * t.element_size() for t in (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * given


COMPILED = {
    "softmax": lambda h, w, b, t: softmax(F.linear(h, w, b), temperature=0.7).square().sum(),
    "cross_entropy": lambda h, w, b, t: cross_entropy(F.linear(h, w, b), t, TERMS),
    "mean": lambda h, w, b, t: linear_cross_entropy(h, w, t, TERMS, bias=b),
    "per token": lambda h, w, b, t: linear_cross_entropy(h, w, t, TERMS, bias=b, reduction="none").square().sum(),
    "entropy": lambda h, w, b, t: sum(x.square().sum() for x in token_log_probs(h, w, t, bias=b)),
    "divergence": lambda h, w, b, t: divergence(F.linear(h, w, b), F.linear(h, w, b).detach().flip(1)),
    "heads": lambda h, w, b, t: linear_divergence(Head(h, w, b), Head(h.detach().flip(1), w.detach())),
}


@pytest.mark.parametrize("name", COMPILED)
def test_in_a_compiled_graph(name):
    leaves, targets = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")(*leaves, targets)
    eager = COMPILED[name](*leaves, targets)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(grads_of(compiled, leaves), grads_of(eager, leaves))


def test_in_place_is_refused_in_a_compiled_graph():
    leaves, targets = inputs()
    with pytest.raises(Exception, match="in_place=True in a compiled graph is not implemented"):
        torch.compile(lambda h, w, t: cross_entropy(h @ w.t(), t, in_place=True), fullgraph=True, backend="eager")(*leaves[:2], targets)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(9, 5)}, r"hidden is torch.float32 \[3, 4\], weight torch.float32 \[9, 5\]"),
        ({"hidden": torch.zeros(3, 0), "weight": torch.zeros(9, 0)}, "give .* of one dtype, dim at least 1"),
        ({"weight": torch.zeros(0, 4)}, "the vocabulary has 0 words; give at least 1"),
        ({"weight": torch.zeros(4)}, r"weight torch.float32 \[4\]; give \[..., dim\] and \[vocab, dim\]"),
        ({"weight": torch.zeros(9, 4, dtype=BF16)}, "of one dtype, dim at least 1"),
        ({"bias": torch.zeros(4)}, r"bias is torch.float32 \[4\]; give torch.float32 \[9\]"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"give int64 \[3\]"),
        ({"reduction": "avg"}, "reduction='avg' is not one of"),
        ({"terms": LossTerms(shard=Shard(None, 5, 12))}, "terms.shard has columns 5 to 14 of 12"),
    ],
)
def test_bad_arguments(change, words):
    call = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "targets": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**call)
    if "terms" not in change and "reduction" not in change:
        with pytest.raises(ValueError, match="token_log_probs: "):
            token_log_probs(**call)
    with pytest.raises(ValueError, match="the vocabulary has 0 words"):
        linear_divergence(*(Head(torch.zeros(3, 4), torch.zeros(0, 4)),) * 2)
    with pytest.raises(TypeError, match=r"linear_cross_entropy: terms is a NoneType; give LossTerms\(...\)"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64), None)
    with pytest.raises(ValueError, match="which only a loss has"):
        token_log_probs(torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64), TERMS)


# ---- the vocabulary on two ranks


def rank_main(rank: int, folder: Path, cases) -> None:
    """The first rank has the words before `at`; every figure and gradient is compared with the whole head's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for leaves, targets, terms, reduction, at in cases:
            mine = slice(at, VOCAB) if rank else slice(0, at)
            weights = None if terms.class_weights is None else terms.class_weights[mine]
            sharded = terms._replace(shard=Shard(dist.group.WORLD, mine.start, VOCAB), class_weights=weights)
            whole = [t.detach().clone().requires_grad_() for t in leaves]
            part = [t.detach()[s].clone().requires_grad_() for t, s in zip(leaves, (slice(None), mine, mine), strict=True)]
            for in_logits in (False, True):
                if in_logits:
                    ours = cross_entropy(F.linear(*part), targets, sharded, reduction=reduction, in_place=reduction == "sum"), None
                    theirs = cross_entropy(F.linear(*whole), targets, terms, reduction=reduction), None
                else:
                    ours = linear_cross_entropy(*part[:2], targets, sharded, bias=part[2], reduction=reduction, per_token=True)
                    theirs = linear_cross_entropy(*whole[:2], targets, terms, bias=whole[2], reduction=reduction, per_token=True)
                    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5, equal_nan=True)
                torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)
                grads, expected = list(grads_of(ours[0], part)), grads_of(theirs[0], whole)
                if in_logits:  # a product of torch's knows nothing of the other rank
                    dist.all_reduce(grads[0])
                for grad, right, s in zip(grads, expected, (slice(None), mine, mine), strict=True):
                    torch.testing.assert_close(grad, right[s], rtol=1e-4, atol=1e-5, equal_nan=True)
        words_that_cannot_be(rank)
    finally:
        dist.destroy_process_group()


def words_that_cannot_be(rank: int) -> None:
    """No word of the second rank's slice can be: a loss is as of one rank, infinite where the target is one of them, NaN where it is no class."""
    logits, targets = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 4, 9])
    logits[:, 3:] = -torch.inf
    mine = slice(3 * rank, 3 * rank + 3)
    losses = [
        cross_entropy(x, targets, LossTerms(shard=shard), reduction="none", kernel="reference")
        for x, shard in ((logits[:, mine], Shard(dist.group.WORLD, mine.start, 6)), (logits, None))
    ]
    assert losses[1].isfinite().tolist() == [True, True, False, False] and losses[1][2] == torch.inf
    torch.testing.assert_close(*losses, equal_nan=True)
    smooth = LossTerms(smoothing=0.1, shard=Shard(dist.group.WORLD, mine.start, 6))
    assert cross_entropy(logits[:, mine], targets, smooth, reduction="none", kernel="reference")[:3].eq(torch.inf).all()
    part, whole = (x.clone().requires_grad_() for x in (logits[:2, mine], logits[:2]))
    cross_entropy(part, targets[:2], LossTerms(z_loss=0.1, shard=Shard(dist.group.WORLD, mine.start, 6)), kernel="reference").backward()
    cross_entropy(whole, targets[:2], LossTerms(z_loss=0.1), kernel="reference").backward()
    torch.testing.assert_close(part.grad, whole.grad[:, mine])


def test_a_vocabulary_on_two_ranks(tmp_path):
    leaves, targets = inputs()
    wrong = targets.clone()
    wrong[5] = VOCAB
    weights = torch.rand(VOCAB) + 0.1
    cases = [
        (leaves, targets, LossTerms(), "sum", 65),
        (leaves, targets, TERMS, "mean", 65),
        (leaves, targets, LossTerms(smoothing=0.2, class_weights=weights), "mean", 65),
        (leaves, wrong, LossTerms(smoothing=0.2, class_weights=weights), "none", 65),
        *((leaves, targets, LossTerms(), reduction, 10) for reduction in ("sum", "none")),  # by their own slices chunks would be of 16 tokens and of 8
    ]
    cases = [([t.detach() for t in of], *rest) for of, *rest in cases]
    torch.multiprocessing.start_processes(rank_main, (tmp_path, cases), nprocs=2, start_method="fork" if not torch.cuda.is_available() else "spawn")
