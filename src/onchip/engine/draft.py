"""What guesses the next tokens: what followed the last few where they stood before (prompt look-up decoding, Saxena, 2023), or a smaller model.

`speculate.py` verifies the guesses.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOKENS = "1 to 15: with the last one these are queries of one decode"


@dataclass(frozen=True)
class Guesses:
    """What every draft is to scheduler and runner: it guesses up to `tokens` tokens a step, in batches of up to `most_rows` requests."""

    def _check(self, *checks: tuple[bool, str, str]) -> None:
        checks = ((1 <= self.tokens <= 15, "tokens", TOKENS), *checks, (self.most_rows >= 1, "most_rows", "1 or more"))
        for good, name, accepted in checks:
            if not good:
                raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)}; give {accepted}")

    @property
    def room(self) -> int:
        """Tokens past all a request may become that its pages have: two steps may be on their way when it ends."""
        return 2 * (self.tokens + 1)


@dataclass(frozen=True)
class NGram(Guesses):
    """Drafts of up to `tokens` tokens: those that followed the latest place where the last tokens, `longest` to `shortest` of them, stood before, the longer
    first. Batches of more than `most_rows` requests go without: they are no longer bound by the weights' bytes."""

    tokens: int = 4
    longest: int = 3
    shortest: int = 2
    most_rows: int = 16

    def __post_init__(self):
        self._check((1 <= self.shortest <= self.longest <= 16, "shortest", "1 to longest, which is 16 at most"))

    def propose(self, history: Tensor, positions: Tensor) -> Tensor:
        """Drafts int64 [rows, tokens], -1 past the end of each and for a row at position -1.

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
        best, place = score.max(1)
        at = place[:, None] + 1 + torch.arange(self.tokens, device=history.device)
        known = (best >= 0)[:, None] & (at <= positions[:, None])
        return torch.where(known, history.gather(1, at.clamp(max=width - 1)).long(), -1)


@dataclass(frozen=True)
class DraftModel(Guesses):
    """Drafts of `tokens` tokens by another model of the same vocabulary: a Hugging Face folder, a GGUF file, or a name, as `LLM` takes its own. It has the
    target's dtype, and keys and values in the same pages, never quantised. Batches of more than `most_rows` requests go without, and it only reads along."""

    model: str | Path
    tokens: int = 4
    most_rows: int = 16

    def __post_init__(self):
        self._check()


def draft_of(text: str | None) -> NGram | DraftModel | None:
    """A draft by its name on a command line: "ngram", or a model's; None for none."""
    return None if text is None else NGram() if text == "ngram" else DraftModel(text)
