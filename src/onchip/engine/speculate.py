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
from onchip.core.masks import Causal, Tree, Window
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

    def __init__(self, model: Decoder, pool: PagePool, draft: DraftModel, vocab: int):
        self.model, self.pool, self.vocab = model, pool.beside, vocab
        self.choices = (*draft.choices, *[1] * (draft.tokens - len(draft.choices)))

    def follow(self, step: Step) -> None:
        """Keys and values of the tokens of a step of the target."""
        self.model.forward(step._replace(tokens=self._known(step.tokens), adapters=None), self.pool)

    def propose(self, s: State, rows: Rows) -> Tensor:
        """Tokens, int64 [rows, places], each drawn as the target would draw it, with the noise of its place: the two agree as often as they can. First a
        chain, then what would be drawn at each place of it if the tokens before were forbidden there."""
        chain, others = [s.tokens], []
        for i, choices in enumerate(self.choices):
            logits, how = self.model.logits(self.read(chain[-1], rows, i))[:, : self.vocab], s.sampling._replace(step=rows.at + i)
            chain.append(sample(logits, how))
            last = chain[-1]
            for _ in range(choices - 1):
                logits = logits.scatter(1, last[:, None], -torch.inf)
                last = sample(logits, how)
                others.append(last)
        return torch.stack((*chain[1:], *others), 1)

    def read(self, tokens: Tensor, rows: Rows, ahead: int | Tensor) -> Tensor:
        """Hidden states of a token of each row, `ahead` places after its last one; its keys and values are in the cache afterwards."""
        at = rows.at + ahead
        slots = torch.where(rows.used, self.pool.slots(rows.table, at[:, None])[:, 0], -1)
        lengths = torch.where(rows.used, at + 1, 0).int()
        return self.model.forward(Step(self._known(tokens), at, slots, page_table=rows.table, lengths=lengths), self.pool)

    def _known(self, tokens: Tensor) -> Tensor:
        """The same, where the target's logits are padded to more tokens than this model has: what no text becomes is another such."""
        return tokens if self.vocab <= self.model.config.vocab else tokens.clamp(max=self.model.config.vocab - 1)


class Speculation:
    """What guesses are to a `Runner`. `second`: the draft model, where the draft is one."""

    def __init__(self, model: Decoder, pool: PagePool, draft: NGram | DraftModel, second: Decoder | None):
        self.model, self.pool, self.draft = model, pool, draft
        self.second = second and SecondModel(second, pool, draft, model.config.vocab)
        self.depths, self.parents, self.masks = torch.arange(draft.places + 1, device=model.device), None, None  # places after the last token, itself included
        if draft.parents is not None:
            self.parents = torch.tensor(draft.parents, dtype=torch.int32, device=model.device)
            seen = Tree.of(torch.nn.functional.pad(self.parents + 1, (1, 0), value=-1)).ancestors  # the last token is the root
            self.depths = seen.sum(-1) - 1
            assert all(isinstance(mask, Causal | Window) for mask in model.config.masks)
            kinds = {mask: Tree(seen, mask.left if isinstance(mask, Window) else None) for mask in model.config.masks}
            self.masks = tuple(kinds[mask] for mask in model.config.masks)

    def follow(self, step: Step) -> None:
        """What a step without guesses leaves to a draft model: to read what the target reads."""
        if self.second:
            self.second.follow(step)

    def step(self, s: State, rows: Rows) -> Tensor:
        """The next tokens of each row, int64 [rows, tokens + 2]: those accepted and the one after them, -1 past the end, and last how many were guessed."""
        guessed = self.second.propose(s, rows) if self.second else self.draft.propose(s.history, s.positions)
        n, used = guessed.shape[1], rows.used[:, None]
        order, at = torch.arange(n + 1, device=guessed.device), rows.at[:, None]
        slots = torch.where(used, self.pool.slots(rows.table, at + order), -1)  # also of places without a guess: what is hidden from a query has to be finite
        tokens = torch.cat((s.tokens[:, None], guessed.clamp(min=0)), 1)
        lengths = torch.where(rows.used, rows.at + n + 1, 0).int()
        step = Step(tokens.flatten(), (at + self.depths).flatten(), slots.flatten(), page_table=rows.table, lengths=lengths, masks=self.masks)
        logits = self.model.logits(self.model.forward(step, self.pool)).unflatten(0, (-1, n + 1))
        s.sampling.step.copy_(rows.at)
        count, path, last = verify(logits, Draft(guessed, parents=self.parents), s.sampling)
        order, path = order[: self.draft.tokens + 1], path[:, : self.draft.tokens] + 1  # of the places with the last token
        taken = torch.cat((s.tokens[:, None], tokens.gather(1, path)), 1)  # up to `count`
        if self.parents is not None:
            self._settle(slots, torch.where(order[1:] <= count[:, None], path, order[1:]))
        if self.second:  # the only accepted token that it may not have read is the last one
            self.second.read(taken.gather(1, count[:, None])[:, 0], rows, count)
        found = torch.where(order < count[:, None], taken.roll(-1, 1), torch.where(order == count[:, None], last[:, None], -1))
        if s.history is not None:
            s.remember(found, used)
        s.tokens.copy_(last)
        s.positions.add_(torch.where(rows.used, count + 1, 0))
        return torch.cat((found, (guessed >= 0).sum(1, keepdim=True)), 1)

    def _settle(self, slots: Tensor, path: Tensor) -> None:
        """Move the keys and values of the places `path` [rows, tokens] of a tree, whose slots are [rows, places + 1], to those after the root."""
        source, target = slots.gather(1, path), slots[:, 1 : path.shape[1] + 1]
        used = slots[:, :1] >= 0
        first = used[:, 0].int().argmax(0, keepdim=True)  # rows without a sequence repeat what this one does; where all are, slot 0 stays where it is
        source, target = (torch.where(used, x, x.index_select(0, first)).clamp(min=0).flatten() for x in (source, target))
        self.pool.move(source, target)
