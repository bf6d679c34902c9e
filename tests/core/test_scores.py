"""Every score function against its formula, place by place; the gradients of what it reads; and the order of several."""

import math

import pytest
import torch

from onchip.core import scores
from onchip.core.scores import ALiBi, Bias, BucketBias, RelativeBias, Score, ScoreMod, Scores, Softcap, chain
from onchip.core.trace import Place

BATCH, HEADS = 2, 3
SIZES = [(5, 5), (3, 7), (1, 8)]


def place(len_q: int, len_k: int) -> Place:
    count = lambda n, *shape: torch.arange(n).view(shape)  # noqa: E731
    lengths = (torch.full((1, 1, 1, 1), n) for n in (len_q, len_k))
    return Place(count(BATCH, -1, 1, 1, 1), count(HEADS, 1, -1, 1, 1), count(len_q, 1, 1, -1, 1), count(len_k, 1, 1, 1, -1), *lengths)


def bucket(distance: int, buckets: int, longest: int, both: bool) -> int:
    """T5's, as of Hugging Face's `_relative_position_bucket`: distance is memory minus context."""
    base, n = 0, -distance
    if both:
        buckets //= 2
        base = buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    near = buckets // 2
    if n < near:
        return base + n
    return base + min(near + int(math.log(n / near) / math.log(longest / near) * (buckets - near)), buckets - 1)


SLOPES = torch.tensor([0.5, 0.25, 0.125])
TABLE = torch.randn(HEADS, 5, generator=torch.Generator().manual_seed(0))
BUCKETS = torch.randn(8, HEADS, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(BATCH, HEADS, 5, 8, generator=torch.Generator().manual_seed(2))


def user(s, b, h, i, j):
    return torch.where(i >= j, s * SLOPES[h], TABLE[h, torch.clamp(j - i, max=4)])


CASES = {
    "softcap": (Softcap(2.0), lambda s, b, h, i, j, row: 2.0 * math.tanh(s / 2.0)),
    "alibi": (ALiBi(SLOPES), lambda s, b, h, i, j, row: s - SLOPES[h] * abs(row - j)),
    "alibi linear": (ALiBi(SLOPES, "linear"), lambda s, b, h, i, j, row: s + SLOPES[h] * (j - row)),
    "alibi [batch, heads]": (ALiBi(torch.stack([SLOPES, 2 * SLOPES])), lambda s, b, h, i, j, row: s - (1 + b) * SLOPES[h] * abs(row - j)),
    "relative": (RelativeBias(TABLE), lambda s, b, h, i, j, row: s + TABLE[h, max(-2, min(2, j - row)) + 2]),
    "buckets": (BucketBias(BUCKETS, 6), lambda s, b, h, i, j, row: s + BUCKETS[bucket(j - row, 8, 6, True), h]),
    "buckets back": (BucketBias(BUCKETS, 6, False), lambda s, b, h, i, j, row: s + BUCKETS[bucket(j - row, 8, 6, False), h]),
    "bias": (Bias(BIAS), lambda s, b, h, i, j, row: s + BIAS[b, h, i, j]),
    "bias [heads, 1, len_k]": (Bias(BIAS[0, :, :1]), lambda s, b, h, i, j, row: s + BIAS[0, h, 0, j]),
    "bias [len_q, len_k]": (Bias(BIAS[0, 0]), lambda s, b, h, i, j, row: s + BIAS[0, 0, i, j]),
    "bias of one": (Bias(BIAS[:1, :1, :1, :1]), lambda s, b, h, i, j, row: s + BIAS[0, 0, 0, 0]),
    "function": (ScoreMod(user), lambda s, b, h, i, j, row: s * SLOPES[h] if i >= j else TABLE[h, min(j - i, 4)]),
    "constant": (ScoreMod(lambda s, b, h, i, j: 1), lambda s, b, h, i, j, row: 1.0),
    "several": (
        chain(BIAS, [ALiBi(SLOPES), user], 2.0),
        lambda s, b, h, i, j, row: 2 * math.tanh(((s + BIAS[b, h, i, j] - SLOPES[h] * abs(row - j)) * SLOPES[h] if i >= j else TABLE[h, min(j - i, 4)]) / 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("len_q", "len_k"), SIZES)
def test_a_score_is_its_formula(name, len_q, len_k):
    score, rule = CASES[name]
    s, at = torch.randn(BATCH, HEADS, len_q, len_k), place(len_q, len_k)
    static, tensors = score.parts()
    ours = static.run(s, *at, *tensors).broadcast_to(s.shape)
    torch.testing.assert_close(ours, torch.as_tensor(score.apply(s, at), dtype=torch.float32).broadcast_to(s.shape))
    shift = len_k - len_q
    index = [(b, h, i, j) for b in range(BATCH) for h in range(HEADS) for i in range(len_q) for j in range(len_k)]
    expected = torch.tensor([float(rule(float(s[at]), *at, at[2] + shift)) for at in index]).view(s.shape)
    torch.testing.assert_close(ours, expected)
    score.fits(BATCH, HEADS, len_q, len_k)


def test_every_score_is_here():
    kinds = {kind for kind in vars(scores).values() if isinstance(kind, type) and issubclass(kind, Score)}
    assert kinds == {type(score) for score, _ in CASES.values()} | {Score}


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[:1, :, :1], lambda t: t.exp()], ids=["itself", "a view", "made of it"])
@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=["grad", "no_grad", "inference"])
def test_gradients_reach_what_is_read(view, first):
    """Also where the same object was used without gradients before."""
    bias, s, at = BIAS[:1].clone().requires_grad_(), torch.randn(BATCH, HEADS, 5, 8), place(5, 8)
    score = chain(view(bias), lambda s, b, h, i, j: s * bias[0, h, i, j], None)
    with first():
        score.parts()
    static, tensors = score.parts()
    found = torch.autograd.grad(static.run(s, *at, *tensors).square().sum(), bias)[0]
    expected = torch.autograd.grad(((s + view(bias)) * bias).square().sum(), bias)[0]
    torch.testing.assert_close(found, expected)


def test_the_order_is_bias_functions_softcap():
    score = chain(BIAS, [Softcap(3.0), user], 2.0)
    assert str(score) == "Bias(bhij), Softcap(3), user, Softcap(2)" and [type(one) for one in score.each] == [Bias, Softcap, ScoreMod, Softcap]
    assert chain(None, None, None) is None and chain(None, [], 0.0) is None and chain(None, [], None) is None
    assert isinstance(chain(None, user, None), ScoreMod) and isinstance(chain(BIAS, None, None), Bias)


def test_a_tensor_of_one_element_is_a_number_behind_others():
    """And may be indexed as well, as where there is one head."""
    zero, factor = torch.tensor(0), torch.tensor([1.7], requires_grad=True)
    at = Place(zero, zero, torch.arange(5)[:, None], torch.arange(8), 5, 8)
    s = torch.randn(5, 8)
    for mod in (lambda s, b, h, i, j: s * factor, lambda s, b, h, i, j: s * factor.sigmoid()[h] + factor):
        for score in (chain(None, mod, 3.0), chain(BIAS[:1, :1], [mod, mod], None)):
            text, tensors = score.parts()
            found, expected = text.run(s, *at, *tensors), score.apply(s, at)
            torch.testing.assert_close(found, expected)
            assert torch.equal(*(torch.autograd.grad(out.sum(), factor)[0] for out in (found, expected)))


def test_slopes_in_half_precision_are_multiplied_in_float32():
    slopes, far = torch.tensor([0.7]).bfloat16(), Place(0, 0, torch.tensor([511]), torch.tensor([0]), 512, 512)
    assert ALiBi(slopes).apply(torch.zeros(1), far) == ALiBi(slopes.float()).apply(torch.zeros(1), far) == -511 * slopes.item()


def test_slopes_of_the_paper():
    assert ALiBi.slopes_of(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert ALiBi.slopes_of(3).tolist() == pytest.approx([2**-4, 2**-8, 2**-2])
    assert ALiBi.slopes_of(12).tolist() == pytest.approx([2.0**-n for n in range(1, 9)] + [2 ** -(n + 0.5) for n in range(4)])


def test_names():
    names = {name: str(score) for name, (score, _) in CASES.items()}
    assert names == {
        "softcap": "Softcap(2)",
        "alibi": "ALiBi",
        "alibi linear": "ALiBi(linear)",
        "alibi [batch, heads]": "ALiBi",
        "relative": "RelativeBias(2)",
        "buckets": "BucketBias(8, 6, both)",
        "buckets back": "BucketBias(8, 6)",
        "bias": "Bias(bhij)",
        "bias [heads, 1, len_k]": "Bias(hj)",
        "bias [len_q, len_k]": "Bias(ij)",
        "bias of one": "Bias(one)",
        "function": "user",
        "constant": "lambda",
        "several": "Bias(bhij), ALiBi, user, Softcap(2)",
    }


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (ALiBi(SLOPES), ALiBi(2 * SLOPES), True),
        (ALiBi(SLOPES), ALiBi(SLOPES.half()), False),
        (ALiBi(SLOPES), ALiBi(SLOPES, "linear"), False),
        (Softcap(2.0), Softcap(2.0000001), False),
        (Softcap(2.0), Softcap(2.0), True),
        (RelativeBias(TABLE), RelativeBias(TABLE[:, :3]), False),
        (BucketBias(BUCKETS, 6), BucketBias(BUCKETS, 7), False),
        (Bias(BIAS), Bias(BIAS[:, :, :3].exp()), True),
        (Bias(BIAS), Bias(BIAS[:1]), False),
        (Bias(BIAS), Bias(BIAS.double()), False),
        (Scores((Softcap(2.0), ALiBi(SLOPES))), Scores((ALiBi(SLOPES), Softcap(2.0))), False),
        (Scores((Softcap(2.0), ALiBi(SLOPES))), Scores((Softcap(2.0), ALiBi(2 * SLOPES))), True),
    ],
    ids=str,
)
def test_which_scores_share_a_text(a, b, same):
    assert (a.static() == b.static()) == same


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Softcap(0.0), "softcap 0.0 is not a number from 1e-30 to 1e30; give the bound of the scores, or None for no cap"),
        (lambda: chain(None, None, -1.0), "softcap -1.0 is not a number"),
        (lambda: Softcap(torch.inf), "softcap inf is not a number from 1e-30 to 1e30"),
        (lambda: Softcap(1e39), r"softcap 1e\+39 is not a number"),  # infinite in float32
        (lambda: ALiBi(SLOPES, "square"), "ALiBi: form 'square' is not one of absolute, linear"),
        (lambda: ALiBi(SLOPES.long()), r"ALiBi: slopes are torch.int64 \[3\]; give floats \[heads\] or \[batch, heads\]"),
        (lambda: ALiBi(SLOPES[None, None]), r"ALiBi: slopes are torch.float32 \[1, 1, 3\]"),
        (lambda: ALiBi.slopes_of(0), "ALiBi.slopes_of: heads is 0; give 1 or more"),
        (lambda: ALiBi.slopes_of(2.5), "ALiBi.slopes_of: heads is 2.5; give a whole number"),
        (lambda: ALiBi([1.0, 0.5]), r"ALiBi: slopes are a list; give floats \[heads\] or \[batch, heads\]"),
        (lambda: RelativeBias([1.0]), r"RelativeBias: table is a list; give floats \[heads, 2 reach \+ 1\]"),
        (lambda: BucketBias(None), r"BucketBias: table is a NoneType; give floats \[buckets, heads\]"),
        (lambda: BucketBias(BUCKETS, 2.5), "BucketBias: longest is 2.5; give a whole number"),
        (lambda: RelativeBias(TABLE[:, :4]), r"RelativeBias: table is torch.float32 \[3, 4\]; give floats \[heads, 2 reach \+ 1\]"),
        (lambda: BucketBias(BUCKETS[:6]), r"BucketBias: table is torch.float32 \[6, 3\]; give floats \[buckets, heads\], buckets a multiple of 4"),
        (lambda: BucketBias(BUCKETS, 2), "BucketBias: longest 2 is not past the 2 exact buckets; give a larger distance"),
        (lambda: Bias(BIAS > 0), r"bias is torch.bool \[2, 3, 5, 8\]; give floats that broadcast .* \(a bool tensor goes to mask=\)"),
        (lambda: Bias(BIAS.to(torch.float8_e4m3fn)), r"bias is torch.float8_e4m3fn \[2, 3, 5, 8\]; give floats of 16 to 64 bits that broadcast"),
        (lambda: Bias(BIAS.to_sparse()), r"bias is torch.float32 \[2, 3, 5, 8\]; give dense floats that broadcast"),
        (lambda: Bias(3.0), "bias is a float; give floats that broadcast"),
        (lambda: chain(BIAS[None], None, None), r"bias is torch.float32 \[1, 2, 3, 5, 8\]"),
    ],
)
def test_what_a_score_says_to_bad_arguments(make, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        make()


@pytest.mark.parametrize(
    ("score", "sizes", "words"),
    [
        (ALiBi(SLOPES), (2, 4, 5, 5), r"ALiBi: slopes is \[3\]; this call needs \[heads 4\]"),
        (RelativeBias(TABLE), (2, 4, 5, 5), r"RelativeBias: table is \[3, 5\]; this call needs \[heads 4, any\]"),
        (BucketBias(BUCKETS), (2, 4, 5, 5), r"BucketBias: table is \[8, 3\]; this call needs \[any, heads 4\]"),
        (Bias(BIAS), (2, 3, 6, 8), r"Bias: bias is \[2, 3, 5, 8\]; this call needs \[batch 2, heads 3, len_q 6, len_k 8\], or 1 for all alike"),
        (chain(BIAS, ALiBi(SLOPES), None), (1, 3, 5, 8), r"Bias: bias is \[2, 3, 5, 8\]; this call needs \[batch 1"),
    ],
    ids=str,
)
def test_what_a_score_says_to_a_call_that_it_does_not_fit(score, sizes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        score.fits(*sizes)


def test_what_is_no_score():
    with pytest.raises(
        TypeError, match=r"score is a str; give a function score_mod\(s, b, h, i, j\), a Score \(ALiBi\(...\), Softcap\(30.0\)\) or a list of them"
    ):
        chain(None, "alibi", None)
    with pytest.raises(TypeError, match="score is the class ALiBi; give"):
        chain(None, [ALiBi], None)
