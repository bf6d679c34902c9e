"""What a caller asks for, what comes back, and a request on its way between the two."""

import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from types import NoneType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onchip.cache.paged import PageList
from onchip.engine.grammar import Grammar
from onchip.engine.text import StopText
from onchip.models.kinds import MOST, Kind, check_options, is_whole, of_type
from onchip.ops.sampling import MOST_TOP

MOST_BIASED = 512  # tokens of a request with a logit bias, or that min_tokens forbids
MOST_NAMED = MOST_BIASED - 16  # of these that a caller names; the others are ends of text
LEAST_TEMPERATURE = 1e-5  # logits over less overflow
MOST_SAMPLES = 1 << 16  # of a prompt: all of them are made before one runs
WHOLE = Kind("a whole number", lambda value: is_whole(value, -math.inf, math.inf))
REAL = Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool))


def _listed(value: object) -> bool:
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


KINDS = {  # of sampling parameters, looked at before their values: what is none of these would only fail in a step, which others share
    **dict.fromkeys(("max_tokens", "top_k", "min_tokens", "n"), WHOLE),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), WHOLE.or_none("None")),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), REAL),
    "stop": Kind("a list of strings, which may be empty", _listed),
    "stop_token_ids": Kind("a list of token ids, which may be empty", _listed),
    "logit_bias": of_type("{token id: number}, which may be empty", Mapping),
    "ignore_eos": of_type("True or False", bool),
    "adapter": of_type("a name, or None", str, NoneType),
    "grammar": of_type("Grammar('json', schema), or None", Grammar, NoneType),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens    most new tokens, which the context may cut; 0: the prompt alone, which may fill the context.
    temperature   less than 1e-5 is 0: always the likeliest token.
    top_k         0: all.                        top_p, min_p, typical_p  1, 0 and 1: all. The order is temperature, top-k, top-p, min-p, typical.
    seed          None: a fresh one. The same seed, prompt, device and batch size give the same tokens: noise depends on the
                  seed and the position alone, but a GPU's matrix products round differently in batches of another size.
    stop          strings that end the text; they are not part of it.           ignore_eos   go on to max_tokens.
    stop_token_ids   tokens that end the text, and are no part of it.
    min_tokens    no token ends the text before there are so many, and no stop string in the text of these.
    n             samples of the prompt, whose pages they share; sample i has the seed after that of sample i - 1.
    repetition_penalty, presence_penalty, frequency_penalty   see `onchip.ops.sampling.Penalties`; 1, 0 and 0: none.
    logit_bias    {token: what is added to its logit}.
    logprobs      0 to 20: log-probabilities of each token and of so many likeliest ones, of the logits as the model gives them. None: none.
    adapter       the name of a LoRA adapter (`LLM.load_adapter`), or None.
    grammar       the form of the answer, which says itself where it may end: a JSON schema, a regular expression, ... (`Grammar`). None: any.
    prompt_logprobs  the same for the tokens of the prompt, which is then computed whole, whatever the prefix cache knows of it: once for all samples, that fail
                  together where that fails.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: str | None = None
    grammar: Grammar | None = None

    def __post_init__(self):
        check_options("SamplingParams: ", vars(self), KINDS)
        bias, most = self.logit_bias, f"0 to {MOST_TOP}, or None"
        checks = (
            (self.max_tokens >= 0, "max_tokens", "0 (the prompt alone) or more"),
            (0 <= self.temperature <= 1e5, "temperature", "0 (always the likeliest token) to 1e5"),
            (0 <= self.top_k <= MOST, "top_k", f"0 (all) to {MOST}"),
            (0 < self.top_p <= 1, "top_p", "more than 0 and at most 1 (all)"),
            (0 <= self.min_p < 1, "min_p", "at least 0 (all) and less than 1"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer"),
            (all(isinstance(s, str) and s for s in self.stop), "stop", "a list of strings that are not empty"),
            (0 < self.typical_p <= 1, "typical_p", "more than 0 and at most 1 (all)"),
            (all(map(_token, self.stop_token_ids)), "stop_token_ids", "a list of token ids"),
            (0 <= self.min_tokens <= min(self.max_tokens, MOST), "min_tokens", f"0 to max_tokens, {min(self.max_tokens, MOST)}"),
            (not (self.grammar and self.min_tokens), "min_tokens", "0 beside a grammar, which says itself where the answer may end"),
            (1 <= self.n <= MOST_SAMPLES, "n", f"1 to {MOST_SAMPLES}"),
            (1e-3 <= self.repetition_penalty <= 1e3, "repetition_penalty", "0.001 to 1000; 1 is none"),  # logits of 60 stay finite in float16
            (-1e3 <= self.presence_penalty <= 1e3, "presence_penalty", "-1000 to 1000; 0 is none"),
            (-1e3 <= self.frequency_penalty <= 1e3, "frequency_penalty", "-1000 to 1000; 0 is none"),
            (all(_token(t) and _biases(x) for t, x in bias.items()), "logit_bias", "{token id: -1e30 to 1e30, or an infinity}"),
            (len(self.stop_token_ids) <= MOST_NAMED, "stop_token_ids", f"at most {MOST_NAMED}"),
            (len(bias) + len(self.stop_token_ids) <= MOST_NAMED, "logit_bias", f"at most {MOST_NAMED} tokens, stop_token_ids included"),
            (self.logprobs is None or 0 <= self.logprobs <= MOST_TOP, "logprobs", most),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MOST_TOP, "prompt_logprobs", most),
        )
        for good, name, accepted in checks:
            if not good:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r:.60}; give {accepted}")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _token(x: object) -> bool:
    return WHOLE.fits(x) and x >= 0


def _biases(x: object) -> bool:
    return REAL.fits(x) and (-1e30 <= x <= 1e30 or abs(x) == math.inf)


class TokenLogProbs(NamedTuple):
    """The log-probability of a token, and the likeliest tokens with theirs, (token, log-probability), the likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    reason   "stop" (end-of-text token, a stop token or a stop string), "length" (no more tokens: `full` says of what), "cancelled", or "error: ..." with
             what went wrong.
    full     where reason is "length": "max_tokens", "context" (the model's, or `LLM(max_len=)`) or "cache" (a larger `cache_gib` holds more); else "".
    cached_tokens     of the prompt, that the prefix cache knew.
    logprobs          of each token, where asked for.        prompt_logprobs   of each token of the prompt; None for the first, which nothing predicts.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    reason: str
    cached_tokens: int = field(default=0, compare=False)
    logprobs: list[TokenLogProbs] | None = None
    prompt_logprobs: list[TokenLogProbs | None] | None = None
    full: str = ""


class TokenMask(Protocol):
    """Which tokens may follow, for structured output.

    fill     writes the bits of the next token (bit i % 32 of word i // 32: token i may follow) to a row int32 [ceil(vocab / 32)] on the CPU, all of it.
    accept   takes each token that came, but for the last of the request.
    A ValueError or RuntimeError of either ends the request alone.
    """

    def fill(self, row: Tensor) -> None: ...

    def accept(self, token: int) -> None: ...


@dataclass(eq=False)
class Request:
    """One sample of a prompt on its way through the engine.

    reason     None until it has ended; then as `Completion` has it.        priority   higher ones run first.
    mask       what tokens may follow; set it before `add`.
    samples    all samples of the prompt, this one included, the first first: `LLM.add` takes all.
    pages      those of the tokens that have been computed, or are being computed; `pages.length` counts them.
    pending    steps whose tokens are on the device and not read yet, at least one of each.
    slot, salt the slot of its LoRA adapter, -1 for none, and what tells apart keys and values that adapters made: 0 for none.
    seated     whether the runner has a row for it, with these pages.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # most new tokens: max_tokens, cut to the context and the cache; `full` says which it is
    text: StopText
    priority: int = 0
    ends: frozenset[int] = frozenset()  # tokens that end the text
    mask: TokenMask | None = None
    samples: list["Request"] | None = field(default=None, repr=False)
    tokens: list[int] = field(default_factory=list)
    pages: PageList = field(default_factory=PageList)
    reason: str | None = None
    order: int = -1  # of arrival; -1 before it
    pending: int = 0
    seated: bool = False
    slot: int = -1
    salt: int = 0
    cached_tokens: int | None = None
    logprobs: list[TokenLogProbs] | None = None
    prompt_logprobs: list[TokenLogProbs | None] | None = None
    first_token_at: float | None = None
    allowed: Tensor | None = None  # the mask's row for the next token
    full: str = "max_tokens"

    def __post_init__(self):
        self.logprobs = None if self.params.logprobs is None else []
        self.prompt_logprobs = None if self.params.prompt_logprobs is None else [None]
        self.samples = self.samples if self.samples is not None else [self]

    @property
    def left(self) -> int:
        """Tokens whose keys and values are not computed yet; 0 where no token is to follow the ones on their way."""
        new = len(self.tokens) + self.pending
        return 0 if new >= max(1, self.limit) else len(self.prompt) + new - self.pages.length

    @property
    def scores(self) -> bool:
        """Whether the log-probabilities of the prompt come of this sample: of the first, for all."""
        return self.prompt_logprobs is not None and self.samples[0] is self

    @property
    def rank(self) -> tuple[int, int]:
        """The lower, the sooner it runs."""
        return -self.priority, self.order

    def known(self) -> list[int]:
        """The tokens of prompt and answer that have been read."""
        return self.prompt + self.tokens

    def keyed(self) -> list[int]:
        """The same as the prefix cache has them: apart for each adapter, by the bits of the first two that no vocabulary of less than 2^19 tokens has."""
        tokens = self.known()
        for i, bits in enumerate((self.salt & 4095, self.salt >> 12)[: len(tokens)]):
            tokens[i] |= bits << 19
        return tokens

    def accept(self, new: list[int]) -> str:
        """Take the next tokens; sets `reason` at the last, and leaves of `new` what came before the end. Returns the text that is now certain."""
        tokens = self.tokens
        if not tokens:
            self.first_token_at = time.perf_counter()
        text = ""
        if not self.limit:  # what is drawn where a prompt ends is nobody's
            self.reason = "length"
            new.clear()
        for at, token in enumerate(new):
            tokens.append(token)
            if token in self.ends:
                self.reason = "stop"
                text += self.text.finish()
            else:
                text += self.text.push(token)
                if self.text.stopped:
                    self.reason = "stop"
                elif len(tokens) >= self.limit:
                    text += self.text.finish()
                    self.reason = "stop" if self.text.stopped else "length"
            if self.reason is not None:
                del new[at + 1 :]
        return text

    def fill_mask(self, vocab: int) -> None:
        """`allowed` for the next token."""
        if self.allowed is None:
            self.allowed = torch.empty(-(-vocab // 32), dtype=torch.int32)
        self.mask.fill(self.allowed)

    def allows(self, token: int) -> bool:
        """Whether the mask as it was filled last does, and the bias: of a row of -inf alone token 0 is drawn."""
        return bool(self.allowed[token // 32] >> token % 32 & 1) and self.params.logit_bias.get(token) != -math.inf

    def take_prompt_logprobs(self, first: int, found: list[TokenLogProbs]) -> None:
        """Those of the tokens of the prompt from place `first` on; a request that had to give way gets some again."""
        self.prompt_logprobs[first : first + len(found)] = found

    def completion(self) -> Completion:
        done = self.prompt, self.tokens, self.text.text, self.reason
        return Completion(*done, self.cached_tokens or 0, self.logprobs, self.samples[0].prompt_logprobs, self.full if self.reason == "length" else "")


class Event(NamedTuple):
    """What a step brought for one request: text that is now certain, and new tokens. The last one has `request.reason` set.

    logprobs   of each of the tokens, where they were asked for.
    """

    request: Request
    text: str
    tokens: list[int]
    logprobs: list[TokenLogProbs] | None = None
