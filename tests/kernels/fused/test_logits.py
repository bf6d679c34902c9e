"""Sampling: the kept sets and the tokens against a float64 oracle that sorts, and the draws against the exact distribution."""

import pytest
import torch

from onchip.core.problem import Rows
from onchip.kernels.fused import SAMPLE
from onchip.kernels.fused.reference_sampling import gumbel, philox
from onchip.ops.sampling import Sampling, log_probs, sample

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in SAMPLE.kernels]
MANY_ROWS = [pytest.param(kernel.name, marks=[pytest.mark.gpu, pytest.mark.large] if kernel.needs_triton else ()) for kernel in SAMPLE.kernels]
LARGE = pytest.param("triton_logits", marks=[pytest.mark.gpu, pytest.mark.large])

PROBLEMS = [Rows("sample", 14, vocab, dtype) for vocab in (1, 2, 63, 1000, 4096) for dtype in (BF16, FP16, FP32)] + [
    Rows("sample", 14, vocab, FP32) for vocab in (4099, 20000)
]
SETTINGS = (  # temperature, top_k, top_p, min_p
    (0.0, 3, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 1 << 30, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (0.6, 0, 0.3, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 20, 0.9, 0.05),
    (1.5, 50, 0.95, 0.0),
    (100.0, 7, 0.999, 0.9),
    (1.0, 0, 1.0, 0.0, 0.3),
    (0.8, 40, 0.9, 0.01, 0.5),
)
FILTERS = [how for how in SETTINGS[:12] if how[0] and (how[2] > 1e-6 and how[1] != 1) and how[1:] != (0, 1.0, 0.0) and how[1] < 1 << 30]


def settings(rows, device, *, seed=0, step=0):
    """A Sampling of `rows`, each (temperature, top_k, top_p, min_p[, typical]); seed and step numbers, or a list of them."""
    temperature, top_k, top_p, min_p, typical = (torch.tensor(field, device=device) for field in zip(*((*row, 1.0)[:5] for row in rows), strict=True))
    seed, step = (torch.tensor([v] * len(rows) if isinstance(v, int) else list(v), device=device) for v in (seed, step))
    return Sampling(temperature.float(), top_k.int(), top_p.float(), min_p.float(), seed, step, typical.float())


def kept_by_sorting(logits, temperature, top_k, top_p, min_p, typical=1.0):
    """The entries [vocab] that one row keeps: float64, step by step as `sample` documents."""
    x = logits.double()
    order = x.argsort(descending=True)
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < len(x):
        kept &= x >= x[order[top_k - 1]]
    if top_p < 1:
        probability = (x / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
        last = int((probability[order].cumsum(-1) < top_p).sum())
        kept &= x >= x[order[min(last, len(x) - 1)]]
    probability = (x / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
    kept &= probability >= min_p * probability.max()
    if typical < 1:
        probability = (x / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
        away = (x - (probability * x.masked_fill(~kept, 0)).sum()).abs().masked_fill(~kept, torch.inf)
        last = int((probability[away.argsort()].cumsum(-1) < typical).sum())
        kept &= away <= away.sort().values[min(last, len(x) - 1)]
    return kept


def oracle(logits, how):
    """The token of each row, by float64 scores over the kept entries."""
    tokens = []
    noise = gumbel(how.seed, how.step, logits.shape[-1], torch.float64)
    for row, drawn, temperature, *filters in zip(logits, noise, *(field.tolist() for field in (*how[:4], how.typical)), strict=True):
        if temperature == 0:
            tokens.append(row.argmax())
            continue
        kept = kept_by_sorting(row, temperature, *filters)
        tokens.append((row.double() / temperature + drawn).masked_fill(~kept, -torch.inf).argmax())
    return torch.stack(tokens)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    logits = (3 * torch.randn(problem.rows, problem.width, device=device)).to(problem.dtype)
    how = settings(SETTINGS, device, seed=[3**39 - i for i in range(14)], step=[7 * i - 40 for i in range(14)])
    tokens = sample(logits, how, kernel=kernel)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == oracle(logits, how).tolist()


def check_the_end_of_the_set(logits, how, kernel):
    """Draw with seeds under which the least kept entry wins, and with some under which the best dropped one would, were it kept."""
    device, temperature = logits.device, how[0]
    kept = kept_by_sorting(logits, *how)
    least, dropped = logits.masked_fill(~kept, torch.inf).argmin(), logits.masked_fill(kept, -torch.inf).argmax()
    noise = gumbel(torch.arange(4000, device=device), torch.zeros(4000, dtype=torch.int64, device=device), len(logits))
    scores = logits.float() / temperature + noise
    best = scores.masked_fill(~kept, -torch.inf).max(-1)
    wins, would = best.indices == least, scores[:, dropped] > best.values
    seeds = [*wins.nonzero().flatten()[:2].tolist(), *would.nonzero().flatten()[:2].tolist()]
    assert len(seeds) == 4
    tokens = sample(logits.expand(4, -1), settings([how] * 4, device, seed=seeds), kernel=kernel)
    assert tokens[:2].tolist() == [least, least]
    assert kept[tokens].all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_kept_sets_end_where_they_should(how, dtype, kernel, device):
    check_the_end_of_the_set(torch.randn(63, device=device).to(dtype), how, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("around", [1.0, -1.0])
@pytest.mark.parametrize("how", [(1.0, 20, 1.0, 0.0), (1.0, 0, 0.5, 0.0)], ids=str)
def test_neighbouring_floats_are_told_apart(how, around, dtype, kernel, device):
    bits = torch.tensor([around], dtype=dtype, device=device).view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    logits = (bits + torch.randperm(63, device=device).to(bits.dtype)).view(dtype)
    check_the_end_of_the_set(logits, how, kernel)


OUTSIDE = (torch.inf, 1e-45, 1e-39, 3e38)  # temperatures, which count as 1e30 or 1e-30


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (0, 1.0, 0.0, 0.9)], ids=str)
def test_temperatures_out_of_range(filters, kernel, device):
    """No float is 1 / 1e-45, and 0 times the infinity of a masked logit is no number."""
    logits = torch.full((4, 70), -torch.inf, device=device)
    logits[:, [7, 40]] = torch.tensor([0.0, 1.0], device=device)
    for seed in range(4):
        within = settings([(min(max(t, 1e-30), 1e30), *filters) for t in OUTSIDE], device, seed=seed)
        tokens = sample(logits, settings([(t, *filters) for t in OUTSIDE], device, seed=seed), kernel=kernel).tolist()
        assert tokens == sample(logits, within, kernel=kernel).tolist()
        assert tokens[1:3] == [40, 40] and {tokens[0], tokens[3]} <= {7, 40}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", [(1.0, 0, 0.5, 0.0), (1.0, 5, 1.0, 0.0)], ids=str)
def test_sets_of_entries_far_apart_end_where_they_should(how, kernel, device):
    """Each is the largest of its group, which is how a kernel knows what not to read."""
    logits = torch.full((1000,), -20.0, device=device)
    logits[::32] = torch.randn(32, device=device)
    check_the_end_of_the_set(logits, how, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_flat_distributions(kernel, device):
    """Kept are thousands: of a token drawn from all entries it is checked whether it is kept. Some are, some are not, and some are not twice."""
    hows = [(1.0, 0, 0.4, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 0.9, 0.08)] * 3
    logits = torch.randn(9, 5000, device=device).to(BF16)
    how = settings(hows, device, seed=range(9))
    tokens = sample(logits, how, kernel=kernel)
    assert tokens.tolist() == oracle(logits, how).tolist()
    assert (tokens != sample(logits, how._replace(top_k=0 * how.top_k, top_p=0 * how.top_p + 1, min_p=0 * how.min_p), kernel=kernel)).sum() > 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_ties_with_the_last_kept_are_kept(kernel, device):
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, 0.0], device=device).log().to(BF16).expand(16, -1)
    for how in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.4)):
        assert set(sample(logits, settings([how] * 16, device, seed=range(16)), kernel=kernel).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_greedy_takes_the_first_of_the_largest(dtype, kernel, device):
    logits = torch.randn(6, 17000, device=device).clamp(max=3).to(dtype)
    for row, places in enumerate(([0], [16999], [5, 6], [8191, 8192], [100, 8292, 16484], [3, 16998])):
        logits[row, places] = 5
    logits[0] = -torch.inf
    assert sample(logits, settings([(0.0, 0, 1.0, 0.0)] * 6, device), kernel=kernel).tolist() == [0, 16999, 5, 8191, 100, 3]


@pytest.mark.parametrize("kernel", MANY_ROWS)
@pytest.mark.parametrize("stream", ["seed", "step"])
@pytest.mark.parametrize("how", [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.5, 12, 0.9, 0.05)], ids=str)
def test_draws_follow_the_distribution(how, stream, kernel, device):
    """Pearson's chi-square of 20,000 draws: mean `df`, variance `2 df`; four standard deviations are allowed."""
    rows, logits = 20000, torch.linspace(2, -2, 30, device=device)
    kept = kept_by_sorting(logits, *how)
    expected = rows * (logits.double() / how[0]).masked_fill(~kept, -torch.inf).softmax(-1)
    drawn = sample(logits.expand(rows, -1), settings([how] * rows, device, **{stream: range(rows)}), kernel=kernel).bincount(minlength=30)
    assert not drawn[~kept].any()
    chi_square = ((drawn - expected).square() / expected)[kept].sum().item()
    df = int(kept.sum()) - 1
    assert chi_square < df + 4 * (2 * df) ** 0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_seed_and_step_same_token_whatever_the_neighbours(kernel, device):
    logits = torch.randn(14, 1000, device=device).to(BF16)
    how = settings(SETTINGS, device, seed=range(14), step=5)
    tokens = sample(logits, how, kernel=kernel)
    order = torch.tensor([7, 3, 11, 1], device=device)
    assert torch.equal(sample(logits, how, kernel=kernel), tokens)
    assert torch.equal(sample(logits[order], Sampling(*(field[order] for field in how)), kernel=kernel), tokens[order])
    wide = how._replace(temperature=torch.full_like(how.temperature, 50.0), top_k=0 * how.top_k, top_p=0 * how.top_p + 1, min_p=0 * how.min_p)
    draws = [sample(logits, other, kernel=kernel) for other in (wide, wide._replace(step=how.step + 1), wide._replace(seed=how.seed + 100))]
    assert all((a != b).sum() >= 10 for a, b in ((draws[0], draws[1]), (draws[0], draws[2]), (draws[1], draws[2])))


@pytest.mark.parametrize("kernel", KERNELS)
def test_high_halves_of_seed_and_step_matter(kernel, device):
    logits = torch.zeros(3, 4096, device=device)
    how = settings([(1.0, 0, 1.0, 0.0)] * 3, device, seed=[9, 9 + (1 << 32), 9], step=[4, 4, 4 + (1 << 32)])
    assert len(set(sample(logits, how, kernel=kernel).tolist())) == 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_logits_and_settings(kernel, device):
    logits = torch.randn(14, 100, device=device).to(BF16)
    how = settings(SETTINGS, device, seed=range(14))
    tokens = sample(logits, how, kernel=kernel)
    padded = torch.full((14, 128), torch.inf, dtype=BF16, device=device)
    padded[:, :100] = logits
    assert torch.equal(sample(padded[:, :100], how, kernel=kernel), tokens)
    assert torch.equal(sample(logits.T.contiguous().T, Sampling(*(field.repeat_interleave(2)[::2] for field in how)), kernel=kernel), tokens)
    assert sample(logits[:0], Sampling(*(field[:0] for field in how)), kernel=kernel).shape == (0,)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_forbidden_entries_are_never_drawn(dtype, kernel, device):
    logits = torch.full((14, 1000), -torch.inf, dtype=dtype, device=device)
    logits[:, 500:503] = torch.tensor([0.0, -20.0, -80.0], device=device)
    hows = settings([(max(t, 50.0), k, p, 0.0) for t, k, p, *_ in SETTINGS], device, seed=range(14))
    tokens = sample(logits, hows, kernel=kernel)
    assert ((tokens >= 500) & (tokens < 503)).all()
    assert tokens.tolist() == oracle(logits, hows).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_fewer_entries_than_top_k_that_may_be(dtype, kernel, device):
    """Top-k ends at -inf then, and top-p begins there."""
    logits = torch.full((5, 64), -torch.inf, dtype=dtype, device=device)
    logits[:, 20:23] = torch.tensor([0.5, 0.0, -0.5], device=device)
    hows = settings([(1.0, 5, 0.95, 0.0)] * 5, device, seed=range(5))
    tokens = sample(logits, hows, kernel=kernel)
    assert len(set(tokens.tolist())) > 1
    assert tokens.tolist() == sample(logits, hows, kernel="reference").tolist() == oracle(logits, hows).tolist()


@pytest.mark.parametrize("width", [70, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite(kernel, width, device):
    """NaN counts as -inf, a row without any other entry gives token 0, and of infinite logits the first is taken."""
    logits = torch.full((3, width), torch.nan, device=device)
    logits[1, 9], logits[1, 33] = 1.0, -torch.inf
    logits[2] = 1.0
    logits[2, [40, 41]] = torch.inf
    for how in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1), (1.0, 0, 0.5, 0.0, 0.5)):
        assert sample(logits, settings([how] * 3, device, seed=range(3)), kernel=kernel).tolist() == [0, 9, 40]


@pytest.mark.parametrize("kernel", KERNELS)
def test_noise_counts_whatever_logits_share(kernel, device):
    """At 2^24 floats are 2 apart: so are these logits. Of two slices, with and without filters."""
    logits = 2.0 * torch.randint(5, (14, 5000), device=device, generator=torch.Generator(device).manual_seed(1))
    how = settings(SETTINGS, device, seed=range(14))
    assert sample(logits + 2**24, how, kernel=kernel).tolist() == sample(logits, how, kernel=kernel).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", [(1.0, 0, 1.0, 0.0, 0.4), (0.7, 30, 0.95, 0.0, 0.4)], ids=str)
def test_typical_sets_end_where_they_should(how, kernel, device):
    """Seeds under which the least or the largest kept entry wins, and under which one that is not kept would have."""
    logits = torch.randn(63, device=device)
    logits[17] = 3
    kept = kept_by_sorting(logits, *how)
    assert not kept[logits.argmax()]  # the likeliest token is not typical
    noise = gumbel(torch.arange(4000, device=device), torch.zeros(4000, dtype=torch.int64, device=device), 63)
    scores = logits / how[0] + noise
    best, free = scores.masked_fill(~kept, -torch.inf).argmax(-1), scores.argmax(-1)
    ends = logits.masked_fill(~kept, torch.inf).argmin(), logits.masked_fill(~kept, -torch.inf).argmax()
    seeds = torch.cat([*((best == end).nonzero().flatten()[:2] for end in ends), (best != free).nonzero().flatten()[:4]]).tolist()
    assert len(seeds) == 8
    assert sample(logits.expand(len(seeds), -1), settings([how] * len(seeds), device, seed=seeds), kernel=kernel).tolist() == best[seeds].tolist()


def test_log_probabilities_of_the_same_call(device):
    logits = torch.randn(14, 100, device=device)
    how = settings(SETTINGS, device, seed=range(14))
    tokens, found = sample(logits, how, logprobs=3)
    assert torch.equal(tokens, sample(logits, how))
    assert torch.equal(found.chosen, log_probs(logits, tokens).chosen) and found.ids.shape == found.top.shape == (14, 3)


def test_errors():
    how = settings(SETTINGS, "cpu")
    with pytest.raises(ValueError, match=r"^sample: how.step is \[3\]; give \[14\], one value a row"):
        sample(torch.zeros(14, 9), how._replace(step=how.step[:3]))
    for field, value, words in (
        ("top_p", how.top_p.double(), "torch.float64; give torch.float32"),
        ("top_k", how.top_k.long(), "torch.int64; give torch.int32"),
        ("seed", how.seed.int(), "torch.int32; give torch.int64"),
        ("step", how.step.to("meta"), "on meta, logits on cpu"),
    ):
        with pytest.raises(ValueError, match=f"^sample: how.{field} is {words}"):
            sample(torch.zeros(14, 9), how._replace(**{field: value}))
    for shape in ((14, 0), (14,)):
        with pytest.raises(ValueError, match=r"^sample: logits are \[14(, 0)?\]; give \[rows, vocab\], vocab at least 1"):
            sample(torch.zeros(shape), how)


def test_philox_is_philox4x32_10():
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    for counter, key, words in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(map(int, philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key))))) == words


def test_noise_is_gumbels():
    """Finite, with the mean (Euler's constant) and variance (pi^2 / 6) of the distribution."""
    noise = gumbel(torch.arange(64), torch.full((64,), 3), 10001, torch.float64)
    assert noise.isfinite().all() and noise.max() <= 17
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("kernel", [LARGE])
@pytest.mark.parametrize(
    "problem", [Rows("sample", rows, vocab, dtype) for rows, vocab in ((56, 49152), (56, 152064), (28, 1 << 20)) for dtype in (BF16, FP32)], ids=str
)
def test_large(problem, kernel, device):
    logits = (3 * torch.randn(problem.rows, problem.width, device=device)).to(problem.dtype)
    how = settings(SETTINGS * (problem.rows // 14), device, seed=range(problem.rows), step=1)
    assert sample(logits, how, kernel=kernel).tolist() == oracle(logits, how).tolist()


@pytest.mark.parametrize("kernel", [LARGE])
def test_rows_past_two_billion_entries(kernel, device):
    logits = torch.zeros(16384, 152064, dtype=BF16, device=device)
    logits[-1, 77777] = 1
    assert sample(logits, settings([(0.0, 0, 1.0, 0.0)] * 16384, device), kernel=kernel)[-1] == 77777


@pytest.mark.parametrize("kernel", [LARGE])
def test_replayed_in_a_cuda_graph(kernel, device):
    """One capture serves any settings: what a row asks for is read on the GPU."""
    logits = torch.randn(14, 32000, device=device)
    plain, all_kinds = settings([(0.0, 0, 1.0, 0.0)] * 14, device), settings(SETTINGS, device, seed=range(14), step=9)
    expected = sample(logits, all_kinds, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, plain, kernel=kernel)
    for field, value in zip(plain, all_kinds, strict=True):
        field.copy_(value)
    graph.replay()
    assert torch.equal(tokens, expected)
