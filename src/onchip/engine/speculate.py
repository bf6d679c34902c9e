"""Steps that verify guesses (Leviathan et al., 2023): tokens guessed for each row, one forward pass over all of them, and what is accepted, on the device.

The target draws its own token at each place with that place's noise, and a guess is accepted where it is that token: what comes out is what comes without
guesses, to the token, greedy or drawn.

A draft model's keys and values lie in the same pages as the target's, in layers of their own (`PagePool.beside`), and whatever writes the ones writes the
others. So a page means the same to both, and what shares, copies, evicts or swaps pages need not know of the second model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.engine.draft import DraftModel, NGram
from onchip.engine.state import State
from onchip.models.decoder import Decoder, Step
from onchip.ops.sampling import Draft, sample, verify


class Rows(NamedTuple):
    """Where the rows of a step stand: which are in use, bool [rows], the position of each row's last token, int64 [rows], and their page table."""

    used: Tensor
    at: Tensor
    table: Tensor


class SecondModel:
    """A draft model in an engine: it reads what the target reads, and goes ahead of it."""

    def __init__(self, model: Decoder, pool: PagePool, draft: DraftModel):
        self.model, self.pool, self.draft = model, pool.beside, draft

    def follow(self, step: Step) -> None:
        """Keys and values of the tokens of a step of the target."""
        self.model.forward(step._replace(adapters=None), self.pool)

    def propose(self, s: State, rows: Rows) -> Tensor:
        """Tokens, int64 [rows, tokens], each drawn as the target would draw it, with the noise of its place: the two agree as often as they can."""
        token, found = s.tokens, []
        for i in range(self.draft.tokens):
            hidden = self.read(token, rows, i)
            token = sample(self.model.logits(hidden), s.sampling._replace(step=rows.at + i))
            found.append(token)
        return torch.stack(found, 1)

    def read(self, tokens: Tensor, rows: Rows, ahead: int | Tensor) -> Tensor:
        """Hidden states of a token of each row, `ahead` places after its last one; its keys and values are in the cache afterwards."""
        at = rows.at + ahead
        slots = torch.where(rows.used, self.pool.slots(rows.table, at[:, None])[:, 0], -1)
        lengths = torch.where(rows.used, at + 1, 0).int()
        return self.model.forward(Step(tokens, at, slots, page_table=rows.table, lengths=lengths), self.pool)


class Speculation:
    """What guesses are to a `Runner`. `second`: the draft model, where the draft is one."""

    def __init__(self, model: Decoder, pool: PagePool, draft: NGram | DraftModel, second: Decoder | None):
        self.model, self.pool, self.draft = model, pool, draft
        self.second = second and SecondModel(second, pool, draft)

    def follow(self, step: Step) -> None:
        """What a step without guesses leaves to a draft model: to read what the target reads."""
        if self.second:
            self.second.follow(step)

    def step(self, s: State, rows: Rows) -> Tensor:
        """The next tokens of each row, int64 [rows, tokens + 2]: those accepted and the one after them, -1 past the end, and last how many were guessed."""
        guessed = self.second.propose(s, rows) if self.second else self.draft.propose(s.history, s.positions)
        n = guessed.shape[1]
        used = rows.used[:, None]
        places = rows.at[:, None] + torch.arange(n + 1, device=guessed.device)
        slots = torch.where(used, self.pool.slots(rows.table, places), -1)  # also of places without a guess: what is hidden from a query has to be finite
        tokens = torch.cat((s.tokens[:, None], guessed.clamp(min=0)), 1)
        lengths = torch.where(rows.used, rows.at + n + 1, 0).int()
        step = Step(tokens.flatten(), places.flatten(), slots.flatten(), page_table=rows.table, lengths=lengths)
        logits = self.model.logits(self.model.forward(step, self.pool)).unflatten(0, (-1, n + 1))
        s.sampling.step.copy_(rows.at)
        count, _, last = verify(logits, Draft(guessed), s.sampling)
        order = torch.arange(n + 1, device=guessed.device)
        found = torch.where(order < count[:, None], tokens.roll(-1, 1), torch.where(order == count[:, None], last[:, None], -1))
        if self.second:  # the only accepted token that it may not have read is the last one
            self.second.read(tokens.gather(1, count[:, None])[:, 0], rows, count)
        if s.history is not None:
            s.remember(found, used)
        s.tokens.copy_(last)
        s.positions.add_(torch.where(rows.used, count + 1, 0))
        return torch.cat((found, (guessed >= 0).sum(1, keepdim=True)), 1)
