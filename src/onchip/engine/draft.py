"""What guesses the next tokens: what followed the last few where they stood before (prompt look-up decoding, Saxena, 2023), or a smaller model.

Guesses are a chain, or a tree with several candidates for a place (SpecInfer, Miao et al., 2024). `speculate.py` verifies them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MOST = 15  # places of a draft: with the last token they are the queries of one decode, of which kernels for few queries take 16


class Guesses:
    """What every draft is to scheduler and runner: up to `tokens` tokens that follow each other are guessed in a step of up to `most_rows` requests,
    rounded up to the rows of a graph (1, 2, 4, 8, 16, 24, 32, ...), and none in a larger one.

    parents   of each place of a tree the place of the token before it, below its own, -1 for the row's last token; None: a chain.
    """

    parents: tuple[int, ...] | None = None

    def _check(self, *checks: tuple[bool, str, str]) -> None:
        checks = ((1 <= self.tokens <= MOST, "tokens", f"1 to {MOST}: with the last one these are queries of one decode"), *checks)
        for good, name, accepted in (*checks, (self.most_rows >= 1, "most_rows", "1 or more")):
            if not good:
                raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)}; give {accepted}")

    def _check_integers(self) -> None:
        for name, value in vars(self).items():
            if name not in ("model", "choices") and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{type(self).__name__}: {name} is {value!r:.60}; give an integer")

    @property
    def places(self) -> int:
        """Tokens that a step verifies beside the last one: all those of a tree."""
        return self.tokens if self.parents is None else len(self.parents)

    @property
    def room(self) -> int:
        """Tokens past all a request may become that its pages have: two steps may be on their way when it ends."""
        return 2 * (self.places + 1)


@dataclass(frozen=True)
class NGram(Guesses):
    """Drafts of up to `tokens` tokens: those that followed the latest place where the last tokens, `longest` to `shortest` of them, stood before, the longer
    first. Batches of more than `most_rows` requests go without: they are no longer bound by the weights' bytes. With several `matches` it is a tree: the
    next best places, with another token after each, are verified beside the best."""

    tokens: int = 4
    longest: int = 3
    shortest: int = 2
    most_rows: int = 16
    matches: int = 1

    def __post_init__(self):
        self._check_integers()
        self._check(
            (1 <= self.shortest <= self.longest <= 16, "shortest", "1 to longest, which is 16 at most"),
            (self.matches >= 1 and self.matches * self.tokens <= MOST, "matches", f"1 or more; matches of {self.tokens} tokens are at most {MOST} together"),
        )

    @property
    def parents(self) -> tuple[int, ...] | None:
        n = self.tokens
        return None if self.matches == 1 else tuple(place - 1 if place % n else -1 for place in range(self.matches * n))

    def propose(self, history: Tensor, positions: Tensor) -> Tensor:
        """Drafts int64 [rows, matches * tokens], one match after another, -1 past the end of each and for a row at position -1.

        history   int32 [rows, width]: the tokens of each row, up to its position; what is after may hold anything.        positions   int64 [rows].
        """
        width = history.shape[1]
        places = torch.arange(width, device=history.device)
        earlier = places < positions[:, None]
        agrees, common = earlier, torch.zeros_like(history)
        for back in range(self.longest):  # how many tokens up to each place are the last ones
            last = history.gather(1, (positions - back).clamp(min=0)[:, None])
            shifted = history if back == 0 else torch.nn.functional.pad(history, (back, 0), value=-1)[:, :width]
            agrees = agrees & (shifted == last) & (positions[:, None] >= back)
            common = common + agrees
        score = torch.where(common >= self.shortest, common * width + places, -1)
        found, following = [], torch.nn.functional.pad(history[:, 1:], (0, 1), value=-1)
        while True:
            best, place = score.max(1)
            at = place[:, None] + 1 + torch.arange(self.tokens, device=history.device)
            known = (best >= 0)[:, None] & (at <= positions[:, None])
            found.append(torch.where(known, history.gather(1, at.clamp(max=width - 1)).long(), -1))
            if len(found) == self.matches:
                return torch.cat(found, 1)
            score = score.masked_fill(following == following.gather(1, place[:, None]), -1)  # the next one has another token after it


@dataclass(frozen=True)
class DraftModel(Guesses):
    """Drafts of `tokens` tokens by another model of the same vocabulary: a Hugging Face folder, a GGUF file, or a name, as `LLM` takes its own. It has the
    target's dtype, and keys and values in the same pages, never quantised. Batches of more than `most_rows` requests go without, and it only reads along.

    choices   how many candidates there are for the first places, 1 for those past its end: `(3, 2)` is a tree, in which the likeliest goes on.
    """

    model: str | Path
    tokens: int = 4
    most_rows: int = 16
    choices: tuple[int, ...] = ()

    def __post_init__(self):
        self._check_integers()
        if not isinstance(self.model, str | Path):
            raise ValueError(f"DraftModel: model is {self.model!r:.60}; give a folder, a GGUF file, or a cached model's name")
        if not isinstance(self.choices, tuple) or not all(isinstance(count, int) and not isinstance(count, bool) for count in self.choices):
            raise ValueError(f"DraftModel: choices is {self.choices!r:.60}; give a tuple of integers, as in (3, 2)")
        beside = sum(self.choices) - len(self.choices)
        good = len(self.choices) <= self.tokens and min(self.choices, default=1) >= 1 and self.tokens + beside <= MOST
        self._check((good, "choices", f"numbers of 1 or more for at most {self.tokens} places, at most {MOST} candidates in all"))

    @property
    def parents(self) -> tuple[int, ...] | None:
        """The chain of the likeliest comes first, then the others of each place."""
        others = [place - 1 for place, count in enumerate(self.choices) for _ in range(count - 1)]
        return (*range(-1, self.tokens - 1), *others) if others else None


def draft_of(text: str | None) -> NGram | DraftModel | None:
    """A draft by its name on a command line: "ngram", or a model's; None for none."""
    return None if text is None else NGram() if text == "ngram" else DraftModel(text)
