"""Rows with dropout: what a result is held against where each library draws random numbers of its own.

Output, dq, dk and dv are linear in what each weight is multiplied by, 0 or 1 / (1 - p), so that the mean of a result is what it is without
dropout. V and the output's gradient are independent normal numbers: the squares of a result's parts add up, and so do those of what dropout adds
to each part, p / (1 - p) times as large.

    result = mean + noise,    |noise| / |mean| = sqrt(p / (1 - p)),    noise . mean = 0

A weight that is kept too often or too seldom shows in the noise, a 1 / (1 - p) that is missing in the share of the mean. Which weights are dropped shows in
neither: that only the same numbers drawn again can say, as the reference does for ours. Of the tokens the middle half is looked at, for at
the ends of a causal mask a few weights decide everything.
"""

from torch import Tensor

from onchip.bench.data import Trained

# Allowed for the share and for the noise, and more of it the shorter a sequence is: from seed to seed they vary, of 4 heads under a causal mask,
# by 0.8% and 3.5% (one standard deviation) at 512 tokens, 0.4% and 2% at 1,024; of 2 heads at 2,048 still by 2%, since all tokens share one mean of V.
# At 8k these tell p = 0.1 from 0.084 and 0.117.
SHARE, NOISE = (0.01, 20.0), (0.08, 80.0)
OURS = "number by number with the float32 reference, which drops the same weights, and by mean and noise"
ITS_OWN = "by mean and noise alone, not number by number, for its random numbers are its own"


def drops(inputs) -> bool:
    """Whether the row asks for dropout."""
    return isinstance(inputs, Trained) and "dropout" in inputs.mod.own


def compared(inputs: Trained, output: Tensor | tuple[Tensor, ...], draws: bool) -> str:
    """With what a result was compared, to be read after "was compared"; `draws`: its random numbers are others than those of the reference.

    Raises ValueError when it has not the mean or the noise that the dropout's probability makes.
    """
    p, n, parts = inputs.mod.own["dropout"].p, inputs.problem.inner.len_q, inputs.beside_undropped(output)
    due, found = (p / (1 - p)) ** 0.5, [stands(x, mean) for x, mean in parts]
    shares, noises = zip(*found, strict=True)
    said = f"it is {_span(shares)} of the result without dropout, and noise of {_span(noises)} of its norm, where p = {p:g} makes 1 and {due:.3f}"
    said += f" (middle tokens of {parts[0][0].shape[1]} heads of a sequence)"
    share_off, noise_off = (least + more / n for least, more in (SHARE, NOISE))
    if not all(abs(share - 1) <= share_off and abs(noise / due - 1) <= noise_off for share, noise in found):
        raise ValueError(f"wrong: {said}; not timed")
    return f"{ITS_OWN if draws else OURS}: {said}"


def stands(x: Tensor, mean: Tensor) -> tuple[float, float]:
    """The share of `mean` in x, and the norm of what is added to `mean` over its own, of the middle half of the tokens."""
    middle = slice(len(x) // 4, len(x) - len(x) // 4)
    x, mean = x[middle].double(), mean[middle].double()
    square = (mean * mean).sum()
    return ((x * mean).sum() / square).item(), ((x - mean).norm() / square.sqrt()).item()


def _span(values: tuple[float, ...]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"
