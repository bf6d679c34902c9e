"""What a caller asks for, what comes back, and a request on its way between the two."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onchip.cache.paged import PageList


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens    most new tokens.               temperature   0: always the likeliest token.
    top_k         0: all.                        top_p, min_p  1 and 0: all. The order is temperature, top-k, top-p, min-p.
    seed          None: a fresh one. The same seed, prompt, device and batch size give the same tokens: noise depends on the
                  seed and the position alone, but a GPU's matrix products round differently in batches of another size.
    stop          strings that end the text; they are not part of it.           ignore_eos   go on to max_tokens.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        checks = (
            (self.max_tokens >= 1, "max_tokens", "1 or more"),
            (self.temperature >= 0, "temperature", "0 (always the likeliest token) or more"),
            (self.top_k >= 0, "top_k", "0 (all) or more"),
            (0 < self.top_p <= 1, "top_p", "more than 0 and at most 1 (all)"),
            (0 <= self.min_p < 1, "min_p", "at least 0 (all) and less than 1"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer"),
            (not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop), "stop", "a list of strings that are not empty"),
        )
        for good, name, accepted in checks:
            if not good:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; give {accepted}")


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt; `reason` is "stop" (end-of-text token or a stop string) or "length" (max_tokens, or the context is full)."""

    prompt: list[int]
    tokens: list[int]
    text: str
    reason: str


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    reason     None until it has ended; then "stop" (end-of-text token or a stop string), "length" (max_tokens, or the context is full), "cancelled", or
               "error: ..." with what went wrong.
    priority   higher ones run first.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # most new tokens: max_tokens, cut to the context
    text: "StopText"
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: PageList = field(default_factory=PageList)
    reason: str | None = None
    first_token_at: float | None = None

    def accept(self, token: int, eos: frozenset[int]) -> str:
        """Take the next token; sets `reason` when it is the last. Returns the text that is now certain."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        if token in eos and not self.params.ignore_eos:
            self.reason = "stop"
            return self.text.finish()
        text = self.text.push(token)
        if self.text.stopped:
            self.reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
            text += self.text.finish()
        return text

    def completion(self) -> Completion:
        return Completion(self.prompt, self.tokens, self.text.text, self.reason)


class Event(NamedTuple):
    """What a step brought for one request: text that is now certain, and new tokens. The last one has `request.reason` set.

    logprobs   of each token, where they were asked for.
    """

    request: Request
    text: str
    tokens: list[int]
    logprobs: list | None = None


class StopText:
    """Text from tokens, held back while it may still be the beginning of a stop string."""

    def __init__(self, stream, stop: Sequence[str]):
        self._stream, self._stop = stream, tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        return self._emit(self._stream.push(token), last=False)

    def finish(self) -> str:
        return self._emit(self._stream.finish(), last=True)

    def _emit(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        hits = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            self.stopped = True
            out = self._held[: min(hits)]
        elif last:
            out = self._held
        else:
            out = self._held[: len(self._held) - self._may_begin_stop()]
        self._held = self._held[len(out) :]
        self.text += out
        return out

    def _may_begin_stop(self) -> int:
        """Length of the longest tail of the held text that a stop string begins with."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0
