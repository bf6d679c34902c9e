"""Losses of preferences and rewards, against their papers' formulas, and numbers by hand."""

import math

import pytest
import torch

import onchip
from onchip import BNPO, DAPO, DR_GRPO, GRPO, GSPO, Pair, Policy

PAIR, REFERENCE = Pair(torch.tensor([-4.0, -9.0]), torch.tensor([-6.0, -8.0])), Pair(torch.tensor([-5.0, -9.5]), torch.tensor([-5.5, -9.0]))
NLL = torch.tensor([0.4, 0.9])
MARGIN = [1.5, -1.5]  # (-4 + 6) - (-5 + 5.5), (-9 + 8) - (-9.5 + 9)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def odds(x):
    return x - math.log(1 - math.exp(x))


EXPECTED = {
    "dpo": (onchip.dpo(PAIR, REFERENCE, beta=0.5), [-log_sigmoid(0.5 * m) for m in (1.5, -0.5)]),
    "cdpo": (onchip.dpo(PAIR, REFERENCE, beta=0.5, smoothing=0.1), [-0.9 * log_sigmoid(0.5 * m) - 0.1 * log_sigmoid(-0.5 * m) for m in (1.5, -0.5)]),
    "hinge": (onchip.dpo(PAIR, REFERENCE, beta=0.5, loss="hinge"), [0.25, 1.25]),
    "ipo": (onchip.dpo(PAIR, REFERENCE, beta=0.5, loss="ipo"), [0.25, 2.25]),
    "simpo": (onchip.simpo(PAIR, beta=2.0, margin=0.5), [-log_sigmoid(3.5), -log_sigmoid(-2.5)]),
    "cpo": (onchip.cpo(PAIR, NLL, beta=0.1, weight=2.0), [0.8 - log_sigmoid(0.2), 1.8 - log_sigmoid(-0.1)]),
    "orpo": (onchip.orpo(PAIR, NLL), [0.4 - 0.1 * log_sigmoid(odds(-4) - odds(-6)), 0.9 - 0.1 * log_sigmoid(odds(-9) - odds(-8))]),
    "kto": (
        onchip.kto(PAIR.chosen, REFERENCE.chosen, torch.tensor([True, False]), torch.tensor(0.25), beta=0.5, weights=(1.0, 1.5)),
        [1 - sigmoid(0.5 * 0.75), 1.5 * (1 - sigmoid(0.5 * (0.25 - 0.5)))],
    ),
    "kto, below 0": (onchip.kto(PAIR.chosen, REFERENCE.chosen, torch.tensor([True, True]), torch.tensor(-3.0), beta=1.0), [1 - sigmoid(1), 1 - sigmoid(0.5)]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_by_hand(name):
    ours, expected = EXPECTED[name]
    torch.testing.assert_close(ours, torch.tensor(expected))


def test_odds_near_certainty():
    """1 - p where p is nearly 1, and a gradient there and far below."""
    chosen = torch.tensor([-1e-6, -0.69, -0.7, -80.0], requires_grad=True)
    loss = onchip.orpo(Pair(chosen, torch.full((4,), -1.0)), torch.zeros(4))
    exact = chosen.detach().double().requires_grad_()
    other = -1 - math.log(1 - math.exp(-1))
    truth = -0.1 * torch.nn.functional.logsigmoid(exact - (-torch.expm1(exact)).log() - other)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), chosen)[0].double(), torch.autograd.grad(truth.sum(), exact)[0], rtol=1e-5, atol=1e-12)


def test_odds_of_certainty():
    """A mean log-probability may be rounded to 0, or above: the loss is finite, and so is its gradient."""
    chosen = torch.tensor([0.0, 1e-8], requires_grad=True)
    rejected = torch.tensor([-1.0, 0.0], requires_grad=True)
    loss = onchip.orpo(Pair(chosen, rejected), torch.zeros(2))
    assert loss.isfinite().all() and all(d.isfinite().all() for d in torch.autograd.grad(loss.sum(), (chosen, rejected)))
    torch.testing.assert_close(loss[1].item(), 0.1 * math.log(2))


LEARNT = {
    "dpo": lambda t: onchip.dpo(PAIR, REFERENCE, beta=t),
    "ipo": lambda t: onchip.dpo(PAIR, REFERENCE, beta=t, loss="ipo"),
    "simpo": lambda t: onchip.simpo(PAIR, beta=t, margin=t),
    "cpo": lambda t: onchip.cpo(PAIR, NLL, beta=t, weight=t),
    "orpo": lambda t: onchip.orpo(PAIR, NLL, beta=t),
    "kto": lambda t: onchip.kto(PAIR.chosen, REFERENCE.chosen, NLL > 0.5, NLL[0], beta=t, weights=(t, 2.0)),
    "kto, both": lambda t: onchip.kto(PAIR.chosen, REFERENCE.chosen, NLL > 0.5, NLL[0], weights=torch.stack((t, t))),
}


@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("name", LEARNT)
def test_numbers_that_are_learnt(name, shape):
    """As the number of each row; the gradient is that of small steps."""
    t = torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True)
    expected = LEARNT[name](0.5) if name != "kto, both" else onchip.kto(PAIR.chosen, REFERENCE.chosen, NLL > 0.5, NLL[0], weights=(0.5, 0.5))
    found = LEARNT[name](t)
    torch.testing.assert_close(found.float(), expected)
    (d,) = torch.autograd.grad(found.sum(), t)
    assert d.shape == shape and d.abs().min() > 1e-3
    torch.testing.assert_close(d.sum().float(), (LEARNT[name](t.detach() + 1e-2) - LEARNT[name](t.detach() - 1e-2)).sum().float() / 2e-2, rtol=1e-2, atol=1e-3)


# ---- groups of answers

LOG_PROB = torch.tensor([[-1.0, -2.0, -0.5, torch.nan], [-3.0, torch.nan, torch.nan, torch.nan]])
OLD = torch.tensor([[-1.4, -2.0, -0.4, torch.nan], [-2.6, torch.nan, torch.nan, torch.nan]])
COUNTS = ~LOG_PROB.isnan()
ADVANTAGES = torch.tensor([1.0, -2.0])
RATIOS = [[math.exp(0.4), 1.0, math.exp(-0.1)], [math.exp(-0.4)]]


def clipped(below, above):
    """-min(r A, clip(r) A) of each token."""
    return [[-min(r * a, min(max(r, 1 - below), 1 + above) * a) for r in of] for of, a in zip(RATIOS, (1.0, -2.0), strict=True)]


def by_hand(how):
    below, above = how.clip
    if how.ratio == "sequence":
        means = math.exp(0.3 / 3), math.exp(-0.4)
        return sum(-min(r * a, min(max(r, 1 - below), 1 + above) * a) for r, a in zip(means, (1.0, -2.0), strict=True)) / 2
    first, second = clipped(below, above)
    if how.average == "sequence":
        return (sum(first) / 3 + sum(second)) / 2
    return (sum(first) + sum(second)) / (4 if how.average == "tokens" else 2 * (how.length or 4))


@pytest.mark.parametrize("how", [GRPO, BNPO, DAPO, DR_GRPO, DR_GRPO._replace(length=9), GSPO, Policy(clip=(0.1, 0.6))], ids=str)
def test_policies_by_hand(how):
    """What does not count is NaN, in all that is given."""
    leaf = LOG_PROB.clone().requires_grad_()
    loss = onchip.grpo(leaf, OLD, ADVANTAGES, COUNTS, how)
    torch.testing.assert_close(loss.detach(), torch.tensor(by_hand(how)))
    wide = ADVANTAGES[:, None].expand(2, 4).masked_fill(~COUNTS, torch.nan)
    torch.testing.assert_close(onchip.grpo(LOG_PROB, OLD, wide, COUNTS, how), loss.detach())
    (d,) = torch.autograd.grad(loss, leaf)
    assert d[~COUNTS].eq(0).all() and not d.isnan().any() and (how.ratio == "sequence" or d[0, 1] < 0)


def test_a_ratio_that_no_float_holds():
    """Cut off it has no gradient, beside an advantage of 0 neither; where it counts, it is inf, not NaN."""
    leaf, old = torch.zeros(3, 1, requires_grad=True), torch.full((3, 1), -90.0)
    losses = [onchip.grpo(leaf[i], old[i], a, torch.ones(1, dtype=torch.bool), BNPO) for i, a in enumerate(torch.tensor([2.0, 0.0, -1.0]))]
    torch.testing.assert_close(torch.stack(losses), torch.tensor([-2.4, 0.0, math.inf]))
    assert [torch.autograd.grad(loss, leaf)[0].sum().item() for loss in losses] == [0.0, 0.0, math.inf]


def test_divergence_from_the_reference():
    reference = LOG_PROB + torch.tensor([0.3, -0.2, 0.0, 1.0])
    beta = Policy(beta=0.04, average="tokens")
    expected = by_hand(BNPO) + 0.04 * (2 * (math.exp(0.3) - 1.3) + math.exp(-0.2) - 0.8) / 4
    torch.testing.assert_close(onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, beta, reference=reference), torch.tensor(expected))


def test_an_old_policy_that_is_the_policy():
    """The gradient of the first step is the plain one: A times that of the log-probability."""
    leaf = torch.randn(3, 5).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5])
    (d,) = torch.autograd.grad(onchip.grpo(leaf, leaf.detach(), advantages, torch.ones(3, 5, dtype=torch.bool), BNPO), leaf)
    torch.testing.assert_close(d, -advantages[:, None].expand(3, 5) / 15)


@pytest.mark.parametrize("how", [GRPO, BNPO, DAPO, DR_GRPO, GSPO], ids=["grpo", "bnpo", "dapo", "dr_grpo", "gspo"])
def test_no_answers_cost_nothing(how):
    """A rank without any still has its gradients: of nothing, or of none."""
    for shape in ((0, 4), (0, 0), (2, 0)):
        leaf = torch.zeros(shape, requires_grad=True)
        loss = onchip.grpo(leaf, leaf.detach(), torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.bool), how)
        loss.backward()
        assert loss == 0 and leaf.grad.shape == shape


GRADED = {  # of log-probabilities [4, 3], of others that are fixed, and of a factor []
    **{loss: lambda x, old, beta, loss=loss: onchip.dpo(Pair(*x[:2]), Pair(*old[:2]), beta=beta, loss=loss) for loss in ("sigmoid", "ipo")},
    "cdpo": lambda x, old, beta: onchip.dpo(Pair(*x[:2]), Pair(*old[:2]), beta=beta, smoothing=0.2),
    "simpo": lambda x, old, beta: onchip.simpo(Pair(*x[:2]), beta=beta, margin=beta),
    "cpo": lambda x, old, beta: onchip.cpo(Pair(*x[:2]), -x[2], weight=beta),
    "orpo": lambda x, old, beta: onchip.orpo(Pair(*x[:2]), -x[2], beta=beta),
    "kto": lambda x, old, beta: onchip.kto(x[0], old[0], old[0] < -1, old[0, 0], beta=beta, weights=(beta, 2.0)),
    **{name: lambda x, old, beta, how=how: beta * onchip.grpo(x, old, old[:, 0], old < -0.2, how._replace(beta=0.1), reference=old - 0.3)
       for name, how in (("grpo", GRPO), ("dapo", DAPO), ("dr_grpo", DR_GRPO), ("gspo", GSPO))},
}  # fmt: skip


@pytest.mark.parametrize("name", GRADED)
def test_gradcheck(name):
    old = -2 * torch.rand(4, 3, dtype=torch.float64) - 0.1
    x = (old + 0.05 * torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(GRADED[name], (x, old, torch.tensor(0.7, dtype=torch.float64, requires_grad=True)))


def test_through_the_head():
    """From hidden states to the loss, as through logits."""
    hidden, weight, targets = torch.randn(4, 6, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True), torch.randint(30, (4, 6))
    targets[0, 2:] = -100
    ours = onchip.sequence_log_probs(hidden, weight, targets, mean=True)
    log_p = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    theirs = log_p.sum(-1) / (targets != -100).sum(-1)
    torch.testing.assert_close(ours, theirs)
    losses = [onchip.orpo(Pair(*t.chunk(2)), -t[:2]).mean() for t in (ours, theirs)]
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(onchip.sequence_log_probs(hidden, weight, targets), log_p.sum(-1))


def test_bad_arguments():
    for call, words in (
        (lambda: onchip.dpo(PAIR, REFERENCE, loss="square"), "loss='square' is not one of sigmoid, hinge, ipo"),
        (lambda: onchip.dpo(PAIR, Pair(NLL, NLL[:1])), r"\[2\], \[2\], \[2\], \[1\]; they must be of one shape"),
        (lambda: onchip.dpo(PAIR, REFERENCE, smoothing=2), "smoothing is 2, beta 0.1; give 0 to 1, and more than 0 where the loss is 'ipo'"),
        (lambda: onchip.dpo(PAIR, REFERENCE, beta=0, loss="ipo"), "smoothing is 0.0, beta 0.0; give"),
        (lambda: onchip.simpo(PAIR, beta=-1.0), "simpo: beta is -1.0; give 0 or more"),
        (lambda: onchip.dpo(PAIR, REFERENCE, loss=["ipo"]), r"loss=\['ipo'\] is not one of"),
        (lambda: onchip.simpo(PAIR, beta=math.inf), "simpo: beta is inf; give 0 or more, but a number"),
        (lambda: onchip.simpo(Pair(NLL, NLL.long())), "simpo: log-probabilities are torch.int64; give floats"),
        (lambda: onchip.simpo(PAIR, margin=math.nan), "simpo: margin is nan; give a number"),
        (lambda: onchip.cpo(PAIR, NLL, weight=math.nan), "cpo: weight is nan; give a number"),
        (lambda: onchip.kto(NLL, NLL, NLL > 0, NLL[0], weights=(1.0, math.nan)), r"kto: weights\[1\] is nan; give 0 or more"),
        (lambda: onchip.simpo(PAIR, margin=NLL[:, None]), r"simpo: margin is torch.float32 \[2, 1\]; give a number, or floats \[\] or \[2\]"),
        (lambda: onchip.cpo(PAIR, NLL, weight=NLL.long()), "cpo: weight is torch.int64"),
        (lambda: onchip.simpo(PAIR, margin=NLL.to("meta")), "simpo: margin is on meta, log-probabilities 1 on cpu; move one of them"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, Policy(clip=(-0.2, 0.2))), r"grpo: clip\[0\] is -0.2; give 0 or more"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, Policy(length=-5)), "grpo: length is -5; give a whole number, 0 or more"),
        (lambda: onchip.kto(NLL, NLL, NLL, NLL[0]), r"desirable is torch.float32 \[2\]; give bools \[2\]"),
        (lambda: onchip.kto(NLL, NLL, NLL > 0, NLL), r"divergence is \[2\]; give one number"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES[:1], COUNTS), r"advantages \[1, 1\]; give bools \[2, 4\], and one an answer"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES.expand(4, 2).T[:1], COUNTS), r"advantages \[1, 4\]"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS.float()), "counts is torch.float32"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, Policy(average="all")), "average='all', ratio='token'"),
        (lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, Policy(beta=0.1)), "there is no reference"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for call in (
        lambda: onchip.kto(NLL, NLL, NLL > 0, NLL[0], weights=NLL[0]),
        lambda: onchip.kto(NLL, NLL, NLL > 0, NLL[0], weights=(1.0,)),
        lambda: onchip.grpo(LOG_PROB, OLD, ADVANTAGES, COUNTS, Policy(beta=NLL[0])),
        lambda: onchip.simpo(PAIR, margin="1"),
    ):
        with pytest.raises(TypeError, match=r"^(kto: weights is .*; give two numbers, or two tensors|(grpo: beta|simpo: margin) is .*; give a number)$"):
            call()
