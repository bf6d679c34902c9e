"""Keys that rows of a decode share, read once for all of them: plans of `cache/sharing.py`, in buffers that CUDA graphs read."""

import dataclasses

import torch
from torch import Tensor

from onchip.cache.paged import PageList, PagePool
from onchip.cache.sharing import plan_cascade
from onchip.core import device as devices
from onchip.core.device import Device
from onchip.core.masks import Causal
from onchip.core.problem import Attention
from onchip.engine.state import upload
from onchip.models.decoder import Decoder, Shared
from onchip.models.parallel import TensorParallel
from onchip.ops.cascade import Level

KINDS = 32  # of plans, by their sizes: each has graphs of its own, 0.1 s and some MB each


class Cascade:
    """What the rows that decode share, as far as reading it once pays by the model of `cache/sharing.py`.

    levels   of the plan that holds; none: every row reads all of its keys.
    kind     of a plan for graphs: its sizes, which are all that one depends on. The same kind has the same buffers, whatever is in them.
    most     levels at most; 0: nothing is read once for several rows.
    """

    def __init__(self, model: Decoder, pool: PagePool, rows: int, most: int = 2):
        self.model, self.pool, self.most = model, pool, most
        c, self.device = model.config, _agreed(model.parallel, model.device, model.dtype)
        self.problem = Attention("decode", rows, 1, rows, c.heads, c.kv_heads, c.dim, model.dtype, Causal(), "paged", pool.page)
        self.levels: list[Level] = []
        self.kind: tuple = ()
        self._starts = torch.zeros(rows, dtype=torch.int64, device=model.device)  # of what is a row's own: its first page
        self._kept: dict[tuple, list[Level]] = {(): []}

    @property
    def refused(self) -> str | None:
        """Why this engine shares nothing, whatever its requests have in common."""
        model = self.model
        reasons = (
            (model.batch_invariant, "batch_invariant: how a row is read may not depend on others"),
            (model.kernel != "auto", f"kernel {model.kernel!r} is asked for by name, and one kernel does not read levels and rows"),
            (self.pool.format is not None, "quantised keys: who reads codes for many queries goes over them once for each 16 rows"),
            (not any(isinstance(mask, Causal) for mask in model.config.masks), "each layer has a window"),
        )
        return next((why for holds, why in reasons if holds), None)

    def plan(self, sequences: list[PageList], size: int) -> list[int] | None:
        """Plan for these sequences, in the first rows; what comes back is the order in which they have to stand, None for any.

        size   rows of the graph that reads the plan: its kind is one of a few. 0: no graph does.

        Only whole pages count that are computed, or about to be before the next step. A plan holds for the same sequences however long they grow:
        what they share is what they began with.
        """
        self.levels, self.kind = [], ()
        if self.refused or len({s.pages[0] for s in sequences}) == len(sequences):
            return None
        shared = [[*s.pages[: self._held(s)], -1] for s in sequences]  # one page, which nobody reads, for what is behind: it costs the same in all plans
        lengths = [(len(pages) - 1) * self.pool.page + 1 for pages in shared]
        found = plan_cascade(self.problem._replace(batch=len(sequences)), shared, lengths, self.device, most=self.most, graph=size > 0)
        levels = found._replace(sms=0).levels(torch.device("cpu"), size)  # what is behind grows while a plan holds
        kind = tuple((*level.page_table.shape, level.parts, 0 if level.offsets is None else level.longest) for level in levels) if size else ()
        if not levels or (kind not in self._kept and len(self._kept) > KINDS):
            return None
        made = [level._replace(**{name: upload(t, self.model.device) for name, t in _tensors(level)}) for level in levels]
        self.levels, self.kind = made, kind
        if size:
            self.levels = self._kept.setdefault(kind, made)
            for kept, level in zip(self.levels, made, strict=True):
                for name, t in _tensors(level):
                    getattr(kept, name).copy_(t)
        starts = torch.tensor(found.starts)
        self._starts[: len(starts)] = upload(starts, self.model.device)
        return found.order

    def thin(self) -> None:
        """Forget the kinds of plans, whose graphs are gone."""
        self.levels, self.kind, self._kept = [], (), {(): []}

    def of(self, table: Tensor, positions: Tensor) -> Shared | None:
        """For rows that decode, with these pages [rows, pages] and positions [rows], on the device. Rows without a sequence have position -1 and nothing."""
        if not self.levels:
            return None
        starts, width = self._starts[: len(table)], table.shape[1]
        places = torch.arange(width, device=table.device) + starts[:, None]
        own = table.gather(1, places.clamp_(max=width - 1))
        return Shared(self.levels, own, (positions + 1 - starts * self.pool.page).clamp_(min=0).int())

    def _held(self, sequence: PageList) -> int:
        """The most pages, from the first on, that others may have too: the prefix tree holds those, this sequence and another. By halving, since holders
        become fewer from page to page but where two computed the same at once, and what lies behind the first page of few holders is nobody's prefix."""
        low, high = 0, sequence.length // self.pool.page
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pool.holders(sequence.pages[middle - 1]) > 2 else (low, middle - 1)
        return low


def _tensors(level: Level) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in level._asdict().items() if isinstance(t, Tensor)]


def _agreed(parallel: TensorParallel, device: torch.device, dtype: torch.dtype) -> Device:
    """Facts of the device that are the same on all ranks: plans are to be the same, and what is measured is not."""
    facts = devices.of(device)
    if parallel.of == 1:
        return facts
    bandwidth, peak, sms = (parallel.least(int(n), device) for n in (facts.bandwidth, facts.peaks.get(dtype, facts.peaks[torch.float32]), facts.sms))
    return dataclasses.replace(facts, bandwidth=bandwidth, sms=sms, peaks={dtype: peak, torch.float32: peak})
