"""From logits to tokens: penalties and masks, sampling, log-probabilities, and the verification of drafts. No call waits for the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_tensors, refuse_gradients
from onchip.core.parts import is_whole
from onchip.core.problem import Rows
from onchip.dispatch import select

DTYPES = {"top_k": torch.int32, "seed": torch.int64, "step": torch.int64}  # of Sampling's fields; others are float32
MOST_TOP = 20  # log-probabilities a row, beside the chosen token's


class Sampling(NamedTuple):
    """How to draw the next token of each row, every field a tensor `[rows]` on the logits' device.

    temperature   float32; 0: the largest logit.        top_k   int32; 0: all.
    top_p         float32 in (0, 1]; 1: all.            min_p   float32 in [0, 1); 0: all.
    seed, step    int64: the draw is a function of these two and of the row's logits alone.
    typical       float32 in (0, 1]; 1, or None for the whole batch: all.
    A temperature below 0 or NaN is as 0, one above 0 as 1e-30 to 1e30. Values outside are not looked for, as that would wait for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor
    typical: Tensor | None = None


HOW = tuple(f"how.{field}" for field in Sampling._fields)  # where one is missing, what it may be is said with its size


class TokenIds(NamedTuple):
    """The tokens of each row so far, as a padded list: int64 `[rows, n]`; what is below 0, or past the vocabulary, is none."""

    ids: Tensor


class Penalties(NamedTuple):
    """What tokens that were there before cost: `x / repetition` of a logit above 0 and `x * repetition` of others (Keskar et al., 2019), for those of the
    prompt and of the output; then less `presence`, and `frequency` for each time, for those of the output.

    repetition, presence, frequency   float32 [rows]; 1, 0 and 0: none.
    output    int32 [rows, vocab], how often each token was there, or `TokenIds`.        prompt   the same, or None.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    output: Tensor | TokenIds
    prompt: Tensor | TokenIds | None = None


class Bias(NamedTuple):
    """Added to few logits of each row: ids int64 `[rows, n]`, each at most once a row, below 0 or past the vocabulary for none; values float32 `[rows, n]`."""

    ids: Tensor
    values: Tensor


class LogProbs(NamedTuple):
    """log softmax of the logits as they were given, in float32: of the chosen token `[rows]`, of the `n` largest `[rows, n]` with their ids (int64), largest
    first, of equal ones the lowest id."""

    chosen: Tensor
    top: Tensor
    ids: Tensor


class Draft(NamedTuple):
    """Tokens proposed after each row's last one.

    tokens          int64 [rows, n]; below 0: none, where a row's draft is shorter.
    probabilities   float32 [rows, n, vocab]: what each token was drawn from. None (greedy drafts, n-grams, any tree): a token is accepted where the target
                    draws it itself, the more often the same if the draft was drawn with the same seed and step, whose noise it shares.
    parents         int32 [n] or [rows, n] of a tree: the place of the token before, below its own; -1 for the row's last token. None: a chain.
    """

    tokens: Tensor
    probabilities: Tensor | None = None
    parents: Tensor | None = None


class Verified(NamedTuple):
    """What came of a draft: `count` accepted tokens, int64 [rows], at the places `path` of the draft, int64 [rows, n], -1 past the end, and the token after
    them, int64 [rows]."""

    count: Tensor
    path: Tensor
    token: Tensor


def sample(
    logits: Tensor,  # [rows, vocab]
    how: Sampling,
    *,
    logprobs: int | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, LogProbs]:
    """Token ids, int64 `[rows]`: the largest logit where the temperature is 0, else a draw.

    Kept are the `top_k` largest, of these the fewest whose probabilities sum to `top_p` (Holtzman et al., 2020), of these
    those with at least `min_p` times the largest probability (Nguyen et al., 2024), and of these the fewest whose log-probability is nearest the mean, that sum
    to `typical` (Meister et al., 2022); ties with the last kept one are kept, too. The token
    is the argmax of `x / temperature + noise` over these (Gumbel's trick, so one pass and no sums), the noise being
    Philox4x32-10 keyed by (seed, step), so a row's token does not depend on its neighbours.
    A NaN counts as -inf; a row of -inf gives token 0; of logits that are inf the first is taken.

    logprobs   0 to 20: log-probabilities come back as well, of the token and of so many others, without gradients.
    """
    rows, vocab = _check_rows("sample", logits, how)
    if torch.compiler.is_compiling():
        tokens = torch.ops.onchip.sample(logits, *how, kernel)
    else:
        tokens = select(Rows("sample", rows, vocab, logits.dtype), logits.device, kernel).launch(logits, how)
    return tokens if logprobs is None else (tokens, log_probs(logits.detach(), tokens, logprobs, kernel="reference" if kernel == "reference" else "auto"))


def log_probs(
    logits: Tensor,  # [rows, vocab]
    tokens: Tensor,  # int64 [rows]
    top: int = 0,
    *,
    kernel: str = "auto",
) -> LogProbs:
    """`x[token] - log sum exp x` in float32, and the same of the `top` largest logits, at most 20. A NaN counts as -inf; a row of -inf gives -inf, and so
    does a token outside the vocabulary. It has no gradient, and says so."""
    check_tensors("log_probs", logits=logits, tokens=tokens)
    refuse_gradients("log_probs", "train with onchip.log_softmax or onchip.token_log_probs", logits)
    rows, vocab = _check_logits("log_probs", logits)
    if not is_whole(top) or not 0 <= top <= min(MOST_TOP, vocab):
        raise ValueError(f"log_probs: top={top!r:.60} of a vocabulary of {vocab}; give 0 to {min(MOST_TOP, vocab)}")
    if tokens.shape != (rows,) or tokens.dtype != torch.int64:
        raise ValueError(f"log_probs: tokens are {tokens.dtype} {list(tokens.shape)}; give int64 [{rows}]")
    if torch.compiler.is_compiling():
        return LogProbs(*torch.ops.onchip.log_probs(logits, tokens, top, kernel))
    return LogProbs(*select(Rows("log_probs", rows, vocab, logits.dtype, f"top {top}"), logits.device, kernel).launch(logits, tokens))


def adjust_logits(
    logits: Tensor,  # [rows, vocab]
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    mask: Tensor | None = None,  # int32 [rows, ceil(vocab / 32)]
    kernel: str = "auto",
) -> Tensor:
    """New logits `[rows, vocab]` in their dtype: the bias added, then the penalties, in float32, rounded once; -inf where the mask's bit is 0.

    mask   bit i % 32 of word i // 32 says whether token i may follow: xgrammar's layout of structured output.
    Raises ValueError for shapes or dtypes that disagree. It has no gradient, and says so.
    """
    for what, value, kind in (("penalties", penalties, Penalties), ("bias", bias, Bias)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"adjust_logits: {what} is a {type(value).__name__}; give {kind.__name__}(...)")
    given = {} if bias is None else {f"bias.{field}": t for field, t in bias._asdict().items()}
    check_tensors("adjust_logits", optional=("mask",), logits=logits, mask=mask, **given)
    learnt = () if penalties is None else penalties[:3]
    refuse_gradients("adjust_logits", "give logits.detach()", logits, None if bias is None else bias.values, *learnt)
    rows, vocab = _check_logits("adjust_logits", logits)
    if penalties is not None and penalties.output is None:
        raise ValueError(f"adjust_logits: penalties.output is None; give counts or TokenIds (of no tokens: int64 [{rows}, 0])")
    counts = (None, None) if penalties is None else (_counted("output", penalties.output, logits), _counted("prompt", penalties.prompt, logits))
    rates = (None,) * 3 if penalties is None else penalties[:3]
    if penalties is not None:
        given = {f"penalties.{field}": t for field, t in zip(Penalties._fields, (*rates, *counts), strict=True)}
        check_tensors("adjust_logits", optional=("penalties.prompt",), logits=logits, **given)
    for name, rate in zip(Penalties._fields, rates, strict=False):
        if rate is not None and (rate.shape != (rows,) or rate.dtype != torch.float32):
            raise ValueError(f"adjust_logits: penalties.{name} is {rate.dtype} {list(rate.shape)}; give float32 [{rows}]")
    ids, values = (None, None) if bias is None else bias
    if bias is not None and (ids.ndim != 2 or len(ids) != rows or values.shape != ids.shape or ids.dtype != torch.int64 or values.dtype != torch.float32):
        given = f"ids are {ids.dtype} {list(ids.shape)}, its values {values.dtype} {list(values.shape)}"
        raise ValueError(f"adjust_logits: the bias's {given}; give int64 and float32 [{rows}, n]")
    if mask is not None and (mask.shape != (rows, -(-vocab // 32)) or mask.dtype != torch.int32):
        raise ValueError(f"adjust_logits: mask is {mask.dtype} {list(mask.shape)}; give int32 [{rows}, {-(-vocab // 32)}], a bit a token")
    if torch.compiler.is_compiling():
        return torch.ops.onchip.adjust_logits(logits, *rates, *counts, ids, values, mask, kernel)
    return _adjust(logits, rates, counts, (ids, values), mask, kernel)


def _adjust(logits, rates, counts, bias, mask, kernel) -> Tensor:
    parts = [("penalties", counts[0]), ("prompt", counts[1]), ("bias", bias[0]), ("mask", mask)]
    variant = " ".join(name for name, given in parts if given is not None)
    rows, vocab = logits.shape
    return select(Rows("adjust_logits", rows, vocab, logits.dtype, variant), logits.device, kernel).launch(logits, rates, counts, bias, mask)


def _counted(name: str, history: Tensor | TokenIds | None, logits: Tensor) -> Tensor | None:
    """How often each token was there, int32 [rows, vocab]."""
    rows, vocab = logits.shape
    if history is None:
        return None
    if not isinstance(history, (Tensor, TokenIds)):
        raise TypeError(f"adjust_logits: penalties.{name} is a {type(history).__name__}; give counts int32 [{rows}, {vocab}], or TokenIds")
    if isinstance(history, TokenIds):
        check_tensors("adjust_logits", logits=logits, **{f"penalties.{name}'s ids": history.ids})
        ids = history.ids
        if ids.ndim != 2 or len(ids) != rows or ids.dtype != torch.int64:
            raise ValueError(f"adjust_logits: penalties.{name} has ids {ids.dtype} {list(ids.shape)}; give int64 [{rows}, n], below 0 for none")
        real = (ids >= 0) & (ids < vocab)
        return torch.zeros(rows, vocab, dtype=torch.int32, device=ids.device).scatter_add_(1, torch.where(real, ids, 0), real.int())
    if history.shape != (rows, vocab) or history.dtype != torch.int32:
        raise ValueError(f"adjust_logits: penalties.{name} is {history.dtype} {list(history.shape)}; give counts int32 [{rows}, {vocab}], or TokenIds")
    return history


def verify(
    logits: Tensor,  # [rows, n + 1, vocab]
    draft: Draft,
    how: Sampling,
    *,
    kernel: str = "auto",
) -> Verified:
    """The longest part of a draft that the target model would have drawn itself, and the token after it: the same distribution as without a draft.

    logits   the target's: at place 0 after the row's last token, at place i + 1 after `draft.tokens[:, i]`.
    how      `step` is that of the first new token; a token k places on is drawn with step + k.
    Without probabilities the token at each place is drawn as `sample` draws it, and a draft is accepted where it is that token: the results are
    the very tokens that `sample` gives one by one, also of a tree (as of SpecInfer, Miao et al., 2024, or EAGLE, Li et al., 2024).
    With probabilities q of a chain a token is accepted with min(1, p / q), and in place of the first that is not one is drawn from max(p - q, 0)
    (Leviathan et al., 2023; Chen et al., 2023), p being what `how` makes of the logits. The noise of both is of streams of their own, so the draft
    may be drawn with `sample` and the same seed and step. q is taken as it is: entries that are NaN or below 0 count as 0, a q that does not sum to 1
    changes the distribution but never gives a token that `how` does not keep, and where nothing is left of p - q the token is drawn from p.
    Temperature 0 accepts the largest logit. Raises ValueError for shapes that disagree, and for a tree with probabilities.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"verify: draft is a {type(draft).__name__}; give Draft(tokens, ...)")
    check_tensors("verify", optional=("draft.probabilities", "draft.parents"), logits=logits, **{f"draft.{field}": t for field, t in draft._asdict().items()})
    tokens, q, parents = draft
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or logits.ndim != 3 or logits.shape[:2] != (tokens.shape[0], tokens.shape[1] + 1):
        given = f"logits are {list(logits.shape)}, draft tokens {tokens.dtype} {list(tokens.shape)}"
        raise ValueError(f"verify: {given}; give [rows, n + 1, vocab] and int64 [rows, n]")
    rows, n = tokens.shape
    if not 1 <= n <= 1024:
        raise ValueError(f"verify: a draft of {n} tokens; give 1 to 1024")
    if q is not None and (q.shape != (rows, n, logits.shape[-1]) or q.dtype != torch.float32):
        raise ValueError(f"verify: draft probabilities are {q.dtype} {list(q.shape)}; give float32 {[rows, n, logits.shape[-1]]}")
    if parents is not None and ((parents.shape != (n,) and parents.shape != (rows, n)) or parents.dtype != torch.int32):
        raise ValueError(f"verify: draft parents are {parents.dtype} {list(parents.shape)}; give int32 [{n}] or [{rows}, {n}]")
    if parents is not None and q is not None:
        raise ValueError("verify: a tree with draft probabilities; leave the probabilities out: its tokens are then accepted with the target's own")
    _check_rows("verify", logits[:, 0], how)
    if torch.compiler.is_compiling():
        return Verified(*torch.ops.onchip.verify(logits, tokens, q, parents, *how, kernel))
    return _verify(logits, draft, how, kernel)


def _verify(logits: Tensor, draft: Draft, how: Sampling, kernel: str) -> Verified:
    tokens, q, parents = draft
    (rows, n), vocab = tokens.shape, logits.shape[-1]
    kind = "chain" if parents is None else "tree"
    each = how if parents is None else how._replace(step=(how.step.unsqueeze(1) + _depths(parents.expand(rows, -1).clamp(-1, n - 1))).flatten())
    flat = logits.flatten(0, 1)
    sampler = "reference" if kernel == "reference" else "auto"
    drawn = select(Rows("sample", len(flat), vocab, logits.dtype, "" if q is None else "limits"), logits.device, sampler).launch(flat, each)
    drawn, limits = (drawn, None) if q is None else drawn
    problem = Rows("verify", rows, vocab, logits.dtype, f"{kind} of {n}" + " with probabilities" * (q is not None))
    return Verified(*select(problem, logits.device, kernel).launch(logits, draft, how, drawn.view(rows, n + 1), limits))


def _depths(parents: Tensor) -> Tensor:
    """How many tokens each place lies behind the row's last one, int64 [rows, n + 1]: the draft's own distance to the root. Doubles its jumps: log2 n steps."""
    rows, n = parents.shape
    jump = torch.cat((parents.new_zeros(rows, 1), parents + 1), 1).long()  # the root is place 0, and its own parent
    depth = torch.ones_like(jump)
    depth[:, 0].zero_()
    for _ in range(n.bit_length()):
        depth, jump = depth + depth.gather(1, jump), jump.gather(1, jump)
    return depth


def _check_logits(name: str, logits: Tensor) -> tuple[int, int]:
    """Their shape; raises where that is none of rows over a vocabulary."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"{name}: logits are {list(logits.shape)}; give [rows, vocab], vocab at least 1")
    return tuple(logits.shape)


def _check_rows(name: str, logits: Tensor, how: Sampling) -> tuple[int, int]:
    """The shape of the logits; raises where a field of `how` does not fit."""
    if not isinstance(how, Sampling):
        raise TypeError(f"{name}: how is a {type(how).__name__}; give Sampling(...)")
    check_tensors(name, optional=HOW, logits=logits, **{f"how.{field}": t for field, t in how._asdict().items()})
    rows, vocab = _check_logits(name, logits)
    for field, value in zip(Sampling._fields, how, strict=True):
        if value is None and field == "typical":
            continue
        if value is None:
            raise TypeError(f"{name}: how.{field} is None; give a tensor [{rows}]")
        if value.shape != (rows,):
            raise ValueError(f"{name}: how.{field} is {list(value.shape)}; give [{rows}], one value a row")
        dtype = DTYPES.get(field, torch.float32)
        if value.dtype != dtype:
            raise ValueError(f"{name}: how.{field} is {value.dtype}; give {dtype}")
    return rows, vocab


# ---- in compiled graphs: the same functions as torch.library operators. Eager calls step round that boundary.


@torch.library.custom_op("onchip::sample", mutates_args=())
def _sample_op(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, step: Tensor, typical: Tensor | None, kernel: str
) -> Tensor:  # fmt: skip
    return sample(logits, Sampling(temperature, top_k, top_p, min_p, seed, step, typical), kernel=kernel)


@torch.library.custom_op("onchip::log_probs", mutates_args=())
def _log_probs_op(logits: Tensor, tokens: Tensor, top: int, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(log_probs(logits, tokens, top, kernel=kernel))


@torch.library.custom_op("onchip::adjust_logits", mutates_args=())
def _adjust_op(
    logits: Tensor, repetition: Tensor | None, presence: Tensor | None, frequency: Tensor | None, output: Tensor | None, prompt: Tensor | None,
    ids: Tensor | None, values: Tensor | None, mask: Tensor | None, kernel: str,
) -> Tensor:  # fmt: skip
    return _adjust(logits, (repetition, presence, frequency), (output, prompt), (ids, values), mask, kernel)


@torch.library.custom_op("onchip::verify", mutates_args=())
def _verify_op(
    logits: Tensor, tokens: Tensor, probabilities: Tensor | None, parents: Tensor | None, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, step: Tensor, typical: Tensor | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(_verify(logits, Draft(tokens, probabilities, parents), Sampling(temperature, top_k, top_p, min_p, seed, step, typical), kernel))


@_log_probs_op.register_fake
def _(logits, tokens, top, kernel):
    rows = logits.shape[0]
    return tokens.new_empty(rows, dtype=torch.float32), tokens.new_empty(rows, top, dtype=torch.float32), tokens.new_empty(rows, top)


_sample_op.register_fake(lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64))
_adjust_op.register_fake(lambda logits, *_: logits.new_empty(logits.shape))
_verify_op.register_fake(lambda logits, tokens, *_: (tokens.new_empty(len(tokens)), tokens.new_empty(tokens.shape), tokens.new_empty(len(tokens))))
