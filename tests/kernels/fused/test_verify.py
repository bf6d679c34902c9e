"""Drafts: the tokens that come out are those that come without one, or have the same distribution."""

import pytest
import torch

from onchip.kernels.fused import VERIFY
from onchip.ops.sampling import Draft, Penalties, Sampling, TokenIds, adjust_logits, sample, verify

FP32 = torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in VERIFY.kernels]
MANY_ROWS = [pytest.param(kernel.name, marks=[pytest.mark.gpu, pytest.mark.large] if kernel.needs_triton else ()) for kernel in VERIFY.kernels]
HOW = ((1.0, 0, 1.0, 0.0, 1.0), (0.0, 0, 1.0, 0.0, 1.0), (0.8, 6, 0.9, 0.05, 1.0), (1.2, 0, 0.7, 0.0, 0.8))


def settings(rows, device, seed=0, step=0):
    """A Sampling: `rows` settings of temperature, top_k, top_p, min_p and typical."""
    temperature, top_k, top_p, min_p, typical = (torch.tensor(field, device=device) for field in zip(*rows, strict=True))
    seeds = torch.arange(len(rows), device=device) + seed
    return Sampling(temperature.float(), top_k.int(), top_p.float(), min_p.float(), seeds, torch.full_like(seeds, step), typical.float())


def model(sequence, vocab):
    """The logits after a sequence of tokens: of its last two alone."""
    a, b = (0, 0, *sequence)[-2:]
    generator = torch.Generator().manual_seed(int(1000 * a + b))
    return 2 * torch.randn(vocab, generator=generator)


def one_by_one(row, vocab, how, count):
    tokens = []
    for step in range(count):
        each = Sampling(*(field[row : row + 1] for field in how))
        tokens.append(sample(model(tokens, vocab).to(each.seed.device)[None], each._replace(step=each.step + step), kernel="reference").item())
    return tokens


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("right", [2, 4])
def test_a_chain_gives_the_tokens_of_sampling(right, kernel, device):
    """A draft of 4 whose first `right` tokens are those that come, then another; the last row's is one shorter."""
    vocab, how = 37, settings(HOW, device, seed=5, step=(1 << 32) - 2)
    wanted = [one_by_one(row, vocab, how, 5) for row in range(4)]
    drafts = [[token if i < right else (token + 1) % vocab for i, token in enumerate(tokens[:4])] for tokens in wanted]
    drafts[3][3] = -1
    logits = torch.stack([torch.stack([model(draft[:i], vocab) for i in range(5)]) for draft in drafts]).to(device)
    found = verify(logits, Draft(torch.tensor(drafts, device=device)), how, kernel=kernel)
    counts = [right, right, right, min(right, 3)]
    assert found.count.tolist() == counts
    assert found.path.tolist() == [[*range(count), *[-1] * (4 - count)] for count in counts]
    assert found.token.tolist() == [tokens[count] for tokens, count in zip(wanted, counts, strict=True)]


PARENTS = [-1, -1, 0, 1, 1, 3, 4, 3]  # the path 1, 3, 7 is three deep


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tree_gives_the_tokens_of_sampling(kernel, device):
    vocab, how = 37, settings(HOW, device, seed=9, step=3)
    wanted, drafts = [one_by_one(row, vocab, how, 4) for row in range(4)], []
    for row, tokens in enumerate(wanted):
        draft = [(tokens[0] + 1) % vocab] * 8
        for depth, place in enumerate((1, 3, 7)[: row if row else 3]):
            draft[place] = tokens[depth]
        drafts.append(draft)
    ways = [[*_way(place), place] for place in range(8)]
    logits = torch.stack([torch.stack([model([], vocab), *(model([draft[at] for at in way], vocab) for way in ways)]) for draft in drafts]).to(device)
    parents, depth = torch.tensor(PARENTS, dtype=torch.int32, device=device), [3, 1, 2, 3]
    found = verify(logits, Draft(torch.tensor(drafts, device=device), parents=parents), how, kernel=kernel)
    assert found.count.tolist() == depth
    assert found.path.tolist() == [[*(1, 3, 7)[:count], *[-1] * (8 - count)] for count in depth]
    assert found.token.tolist() == [tokens[count] for tokens, count in zip(wanted, depth, strict=True)]


def test_each_row_may_have_a_tree_of_its_own(device):
    logits = torch.full((2, 4, 5), -torch.inf, device=device)
    for row, place, token in ((0, 0, 1), (0, 2, 3), (0, 3, 4), (1, 0, 1), (1, 2, 2)):
        logits[row, place, token] = 0
    tokens, parents = torch.tensor([[2, 1, 3], [2, 1, 3]], device=device), torch.tensor([[-1, -1, 1], [-1, -1, 0]], dtype=torch.int32, device=device)
    found = verify(logits, Draft(tokens, parents=parents), settings(HOW[:1] * 2, device))
    assert [field.tolist() for field in found] == [[2, 1], [[1, 2, -1], [1, -1, -1]], [4, 2]]


def _way(place):
    """The places before one, from the root."""
    return [] if PARENTS[place] < 0 else [*_way(PARENTS[place]), PARENTS[place]]


@pytest.mark.parametrize("kernel", [pytest.param("triton_verify", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [67, 9001])
def test_drawn_drafts_as_the_reference(vocab, kernel, device):
    """Also where q has NaN, does not sum to 1, or is p itself; a strided batch of logits; a draft that is shorter; a row of several programs."""
    how = settings(HOW * 2, device, step=7)
    padded = torch.full((8, 5, vocab), torch.nan, device=device)
    logits = padded[:, 1:4].copy_(2 * torch.randn(8, 3, vocab, device=device))
    q = (logits[:, :2] + torch.randn(8, 2, vocab, device=device)).softmax(-1)
    tokens = q.flatten(0, 1).multinomial(1).view(8, 2)
    tokens[2, 1], q[4] = -1, 3 * q[4]
    tokens[0, 0], logits[0, 0, 5], q[0, 0] = -1, 20.0, torch.eye(vocab, device=device)[5]
    q[6, :, ::3] = torch.nan
    q[3, 0] = 2.0
    ours, theirs = (verify(logits, Draft(tokens, q), how, kernel=name) for name in (kernel, "reference"))
    assert theirs.token[0] == 5 and (vocab > 67 or set(theirs.count.tolist()) == {0, 1, 2})
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_infinite_logit_is_drawn(kernel, device):
    """As `sample` draws it, where its probability cannot be said."""
    logits = torch.randn(2, 2, 50, device=device)
    logits[:, :, 9] = torch.inf
    q = torch.full((2, 1, 50), 1 / 50, device=device)
    found = verify(logits, Draft(torch.tensor([[3], [-1]], device=device), q), settings(HOW[:1] * 2, device), kernel=kernel)
    assert found.count.tolist() == [0, 0] and found.token.tolist() == [9, 9]


@pytest.mark.parametrize("kernel", KERNELS)
def test_temperatures_out_of_range(kernel, device):
    """As `sample` has them: 1e30 or 1e-30. A masked logit's infinity times 0 is no number."""
    outside, logits = (torch.inf, 1e-45, 1e-39, 3e38), torch.full((4, 3, 50), -torch.inf, device=device)
    logits[..., [7, 40]] = torch.tensor([0.0, 1.0], device=device)
    draft = Draft(torch.tensor([[40, 3]] * 4, device=device), torch.full((4, 2, 50), 1 / 50, device=device))
    ours, within = (verify(logits, draft, settings([(t, 0, 1.0, 0.0, 1.0) for t in of], device, seed=3), kernel=kernel)
                    for of in (outside, [min(max(t, 1e-30), 1e30) for t in outside]))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, within, strict=True))
    assert ours.count.tolist() == [1] * 4 and ours.token[1:3].tolist() == [40, 40] and set(ours.token.tolist()) <= {7, 40}


@pytest.mark.parametrize("kernel", KERNELS)
def test_probabilities_whatever_logits_share(kernel, device):
    """At 2^22 floats are 0.5 apart: what was taken off them all would be rounded to that."""
    logits = torch.randint(3, (16, 2, 9), device=device, generator=torch.Generator(device).manual_seed(1)).float()
    how, draft = settings(HOW * 4, device), Draft(torch.zeros(16, 1, dtype=torch.int64, device=device), torch.full((16, 1, 9), 0.13, device=device))
    near, far = (verify(x, draft, how, kernel=kernel) for x in (logits, logits + 2**22))
    assert 0 < near.count.sum() < 16 and all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


@pytest.mark.parametrize("kernel", MANY_ROWS)
@pytest.mark.parametrize("how", [(1.0, 0, 1.0, 0.0, 1.0), (0.7, 5, 0.95, 0.0, 1.0)], ids=str)
@pytest.mark.parametrize("drawn", ["q", "the same noise", "without q"])
def test_drafts_do_not_change_the_distribution(how, drawn, kernel, device):
    """Pearson's chi-square of the first two tokens of 20,000 rows against the target's; four standard deviations are allowed.

    The draft is drawn from another model's q: from torch's generator, or with `sample` and the very seeds and steps of the verification.
    """
    rows, vocab = 20000, 8
    how = settings([how] * rows, device)
    target = 1.5 * torch.randn(3, vocab, device=device, generator=torch.Generator(device).manual_seed(3))
    q = (target[:2] + torch.randn(2, vocab, device=device, generator=torch.Generator(device).manual_seed(4))).softmax(-1)
    if drawn == "the same noise":
        plain = settings([(1.0, 0, 1.0, 0.0, 1.0)] * rows, device)
        tokens = torch.stack([sample(q[i].log().expand(rows, -1), plain._replace(step=plain.step + i)) for i in range(2)], 1)
    else:
        tokens = torch.stack([q[i].multinomial(rows, replacement=True) for i in range(2)], 1)
    draft = Draft(tokens, None if drawn == "without q" else q.expand(rows, -1, -1).contiguous())
    found = verify(target.expand(rows, -1, -1), draft, how, kernel=kernel)
    kept = [sample(target[i].expand(4000, -1), Sampling(*(field[:4000] for field in how))).bincount(minlength=vocab) > 0 for i in range(2)]
    p = [(target[i].double() / how.temperature[0]).masked_fill(~kept[i], -torch.inf).softmax(-1) for i in range(2)]
    first = torch.where(found.count > 0, tokens[:, 0], found.token)
    second = torch.where(found.count > 1, tokens[:, 1], found.token)[found.count > 0]
    for drawn_tokens, each in ((first, p[0]), (second, p[1])):
        expected, seen = len(drawn_tokens) * each, drawn_tokens.bincount(minlength=vocab)
        assert not seen[each == 0].any()
        df = int((each > 0).sum()) - 1
        assert ((seen - expected).square() / expected)[each > 0].sum().item() < df + 4 * (2 * df) ** 0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_draft_as_the_target_would_is_accepted(kernel, device):
    how, logits = settings(HOW[:1] * 3, device), torch.randn(3, 3, 50, device=device)
    q = logits[:, :2].softmax(-1) * (1 - 1e-5)  # p and q are rounded apart
    found = verify(logits, Draft(q.flatten(0, 1).multinomial(1).view(3, 2), q), how, kernel=kernel)
    assert found.count.tolist() == [2] * 3


def test_errors():
    how, logits, tokens = settings(HOW[:2], "cpu"), torch.zeros(2, 4, 9), torch.zeros(2, 3, dtype=torch.int64)
    q, parents = torch.zeros(2, 3, 9), torch.zeros(3, dtype=torch.int32)
    for call, words in (
        ((logits[:, :3], Draft(tokens), how), r"logits are \[2, 3, 9\], draft tokens torch.int64 \[2, 3\]; give \[rows, n \+ 1, vocab\]"),
        ((logits, Draft(tokens, q[:, :2]), how), r"draft probabilities are torch.float32 \[2, 2, 9\]; give float32 \[2, 3, 9\]"),
        ((logits, Draft(tokens, parents=parents.long()), how), r"draft parents are torch.int64 \[3\]; give int32 \[3\] or \[2, 3\]"),
        ((logits, Draft(tokens, q, parents), how), "a tree with draft probabilities; leave the probabilities out"),
        ((logits, Draft(tokens), settings(HOW[:3], "cpu")), r"how.temperature is \[3\]; give \[2\], one value a row"),
    ):
        with pytest.raises(ValueError, match=f"^verify: {words}"):
            verify(*call)


@pytest.mark.parametrize("kernel", [pytest.param("triton_verify", marks=[pytest.mark.gpu, pytest.mark.large])])
def test_a_step_in_a_cuda_graph(kernel, device):
    """Penalties, mask, sampling with log-probabilities and the verification of a tree, captured once, without a wait for the host."""
    logits, how = torch.randn(4, 9, 32000, device=device), settings(HOW, device)
    draft = Draft(torch.zeros(4, 8, dtype=torch.int64, device=device), parents=torch.tensor(PARENTS, dtype=torch.int32, device=device))
    seen, rate = TokenIds(torch.zeros(4, 3, dtype=torch.int64, device=device)), torch.full((4,), 1.5, device=device)
    mask = torch.full((4, 1000), -1, dtype=torch.int32, device=device)

    def step():
        adjusted = adjust_logits(logits[:, 0], penalties=Penalties(rate, rate, rate, seen), mask=mask)
        tokens, found = sample(adjusted, how, logprobs=5)
        return tokens, *found, *verify(logits, draft, how, kernel=kernel)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            results = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    draft.tokens.copy_(torch.arange(8, device=device))
    logits.normal_()
    graph.replay()
    for a, b in zip(results, step(), strict=True):
        assert torch.equal(a, b)
