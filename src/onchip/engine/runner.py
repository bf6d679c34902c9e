"""Runs a step: what decodes alone as one CUDA graph a batch-size bucket, with chunks of prompts as one packed pass, up to 2,048 tokens as a graph too.

Nothing here waits for the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.cache.paged import PagePool
from onchip.cache.sharing import power
from onchip.engine.cascade import Cascade
from onchip.engine.padded import Captured, Padded
from onchip.engine.request import Request, TokenLogProbs
from onchip.engine.scheduler import Work
from onchip.engine.speculate import Rows, Speculation
from onchip.engine.state import State, Wants, upload
from onchip.models.decoder import Decoder, Step
from onchip.ops.decode_step import Places, decode_advance, decode_places
from onchip.ops.sampling import MOST_TOP, adjust_logits, log_probs, sample

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows of graphs; beyond them multiples of 256
LEAST = 16  # pages of a table of chunks: Triton compiles anew for one whose width is no multiple of 16
LOGITS = 1024  # tokens of a prompt whose logits are in memory at once


class Chunk(NamedTuple):
    """So many tokens of a request, from its token `start` on."""

    request: Request
    start: int
    size: int


class Drawn(NamedTuple):
    """What a step brings: tokens int64 [rows], or what `Speculation.step` gives; and log-probabilities (`_packed_logprobs`), where somebody wants them."""

    tokens: Tensor
    logprobs: Tensor | None = None


class Launched(NamedTuple):
    """A step on its way: its results, on their way to the host, a row for each of `requests`; `prompts`: (request, place of the first token, tokens,
    their log-probabilities) of prompts."""

    requests: list[Request]
    tokens: Tensor
    logprobs: Tensor | None
    prompts: list[tuple[Request, int, list[int], Tensor]]
    done: torch.cuda.Event | None
    kind: str  # "decode", or "prefill" where there were chunks of prompts
    shared: bool = False  # whether what several rows have in common was read once

    def wait(self) -> list[list[int]]:
        """The new tokens of each request: one, or with drafts one and those accepted before it."""
        if self.done is not None:
            self.done.synchronize()
        if self.tokens.ndim == 1:
            return [[token] for token in self.tokens.tolist()]
        return [[token for token in row if token >= 0] for row in self.tokens[:, :-1].tolist()]

    def guessed(self) -> list[int]:
        """After `wait`: how many tokens were guessed of each request."""
        return [0] * len(self.requests) if self.tokens.ndim == 1 else self.tokens[:, -1].tolist()

    def of_tokens(self) -> list[TokenLogProbs | None]:
        """After `wait`: of each request's token, where it wants them."""
        return [None] * len(self.requests) if self.logprobs is None else _said(self.logprobs, self.tokens.tolist(), [r.params.logprobs for r in self.requests])

    def of_prompts(self):
        """After `wait`: (request, place of the first token, log-probabilities of it and those that follow)."""
        for request, first, tokens, found in self.prompts:
            yield request, first, _said(found, tokens, [request.params.prompt_logprobs] * len(tokens))


class Runner:
    """A model on a device with its cache. `launch` starts a step; requests that decode have rows of `state`, in the order of `rows`.

    longest       most tokens of a sequence, what a draft may write past its end included.
    speculation   steps that only decode also verify guesses for each row, as long as nobody wants more than tokens.
    """

    def __init__(self, model: Decoder, pool: PagePool, max_batch: int, longest: int, speculation: Speculation | None = None):
        self.model, self.pool, self.speculation = model, pool, speculation
        self.state = State(bucket(max_batch), pool.pages_for(longest), model.config.vocab, model.device)
        if speculation is not None and speculation.second is None:
            self.state.history = torch.zeros(self.state.size, longest, dtype=torch.int32, device=model.device)
        self.cascade = Cascade(model, pool, self.state.size)
        self.padded = Padded(model, pool, self.state.size + 1, self.state.page_table.shape[1])  # who decodes, and one whose prompt goes on
        self.graphs: dict[tuple[int, Wants, tuple], Captured] = {}  # by rows, what they want, and the kind of what they share
        self.rows: list[Request] = []
        self.torn = False  # whether the last step failed: what its rows hold is not known
        self._asked: list[Request] = []  # the same requests, in the order in which they were given last
        self._pages: list[int] = []  # of each row, that its page table has
        self._wants = Wants()
        self.decodes: list[Work] | None = None  # the work of the last step, where that was a decode: the same list is one, too
        self._planned: tuple[int, int] | None = None  # of how many of the rows the cascade's plan is, in a graph of how many

    @torch.inference_mode()
    def launch(self, work: list[Work]) -> Launched:
        """Start a step. The state is written only where the batch or its pages changed; where the work is that of the last step, neither is looked at."""
        if self.torn:
            self.forget()
        self.torn = True
        prompts: list[tuple] = []
        if work is self.decodes:
            drawn, kind = self._decode(), "decode"
        else:
            kept = self._seat([w.request for w in work if w.last])
            chunks = any(w.prompt for w in work)
            drawn, kind = (self._chunks(work, kept, prompts), "prefill") if chunks else (self._decode(), "decode")
        launched = self._results(drawn, prompts, kind)
        for request, count, _ in work:
            request.pages.length += count
        for request in self.rows:
            request.pending += 1
        self.decodes, self.torn = work if kind == "decode" else None, False
        return launched

    @property
    def masked(self) -> bool:
        """Whether the mask of some row's next token needs its last one."""
        return self._wants.mask

    def forget(self) -> None:
        """No request has a row, whatever came of the last step; all tokens have to be read by now."""
        self.torn = False
        for request in self.rows:
            request.seated = False
        self._asked, self.rows, self._pages, self._wants, self.decodes, self._planned = [], [], [], Wants(), None, None
        self.state.clear(0)

    def thin(self, graphs: bool = False) -> None:
        """Let go of the graphs, and of their memory, that only some requests want or that read what rows share; with `graphs` of all."""
        if graphs:
            self.padded.graphs.clear()
        self.graphs = {} if graphs else {key: kept for key, kept in self.graphs.items() if key[1]._replace(adapter=False).plain and not key[2]}
        self.forget()
        self.state.thin()
        self.cascade.thin()

    # ---- rows

    def _seat(self, requests: list[Request]) -> int:
        """Rows for the requests that get a new token: those that have one first, in their order. Returns how many these are."""
        if requests != self._asked or not all(request.seated for request in requests):
            wanted = set(requests)
            keep = [i for i, request in enumerate(self.rows) if request in wanted and request.seated]
            rows, pages = [self.rows[i] for i in keep], [self._pages[i] for i in keep]
            stay = set(rows)
            for request in self.rows:
                request.seated = request in stay
            new = [request for request in requests if request not in stay]
            self._wants = Wants.of(requests)
            self.state.keep(keep)
            self.state.clear(len(keep))
            self._asked, self.rows, self._pages, self._planned, kept = [], rows, pages, None, len(rows)
            if new:
                self.state.load(kept, new, self._wants)
            for request in new:
                request.seated = True
            self._asked, self.rows, self._pages = requests, rows + new, pages + [len(r.pages.pages) for r in new]
        else:
            kept = len(requests)
        self._grow()
        return kept

    def _grow(self) -> None:
        """Pages that sequences got since the last step."""
        grown = [i for i, (request, had) in enumerate(zip(self.rows, self._pages, strict=True)) if len(request.pages.pages) != had]
        if grown:
            new = [(i, column, page) for i in grown for column, page in enumerate(self.rows[i].pages.pages[self._pages[i] :], self._pages[i])]
            self.state.grow(*map(list, zip(*new, strict=True)))
            for i in grown:
                self._pages[i] = len(self.rows[i].pages.pages)

    def _share(self, count: int, size: int) -> None:
        """Plan what the first `count` rows share, where others were planned last, and put those side by side that read the same.

        size   rows of the step's graph; 0 where there is none.
        """
        if self._planned == (count, size):
            return
        self._planned = count, size
        order = self.cascade.plan([request.pages for request in self.rows[:count]], size)
        if order is not None:
            self.state.keep(order)
            order += range(count, len(self.rows))
            self.rows, self._pages = [self.rows[i] for i in order], [self._pages[i] for i in order]

    # ---- the two kinds of a step

    def _decode(self) -> Drawn:
        """One more token of each row."""
        count, graphs = len(self.rows), self.model.device.type == "cuda"
        drafts = self._drafts(bucket(count) if graphs else count, self._wants)
        self._share(0 if drafts else count, bucket(count) if graphs else 0)
        if self._wants.mask:
            self.state.allow(self.rows)
        if not graphs:
            return self._step(self.state.rows(count), self._wants, max(len(r.pages.pages) for r in self.rows) * self.pool.page)
        key = bucket(count), self._wants, self.cascade.kind
        if key not in self.graphs:
            self.graphs[key] = self._capture(*key[:2])
        self.graphs[key].graph.replay()
        return self.graphs[key].out

    def _chunks(self, work: list[Work], kept: int, prompts: list) -> Drawn | None:
        """Decodes and chunks of prompts end to end: first the `kept` rows, then the rows whose prompts end here, then chunks that do not end theirs."""
        self._share(kept, 0)
        counts = {w.request: w.count for w in work}
        going = [w.request for w in work if not w.last]
        chunks = [Chunk(r, r.pages.length, counts[r]) for r in self.rows[kept:] + going]
        if self._wants.mask:
            self.state.allow(self.rows)
        s = self.state.rows(len(self.rows))
        places = self._places(s, s.page_table)
        longs, offsets = (upload(x, self.model.device) for x in _packed(chunks, kept, self.pool.page))
        longest = max(chunk.size for chunk in chunks)
        padded = longs.shape[1] + kept <= self.padded.most
        if not padded and not kept and not any(chunk.start for chunk in chunks) and not self.model.batch_invariant:
            step = Step(*longs, offsets=offsets, longest=longest)
        else:
            longs = torch.cat((torch.stack((s.tokens[:kept], places.at[:kept], places.slots[:kept])), longs), 1)
            width = min(power(max(LEAST, *(len(r.pages.pages) for r in self.rows + going))), s.page_table.shape[1])
            table = torch.cat((s.page_table[:, :width], upload(self.pool.table([r.pages for r in going], width), self.model.device)))
            ends = torch.tensor([chunk.start + chunk.size for chunk in chunks], dtype=torch.int32)
            lengths = torch.cat((places.lengths[:kept], upload(ends, self.model.device)))
            if (shared := self.cascade.of(table[:kept], s.positions[:kept])) is not None:
                shared = shared._replace(offsets=offsets[kept:] - kept)
            step = Step(*longs, offsets=offsets, longest=min(power(longest), longs.shape[1]), page_table=table, lengths=lengths, shared=shared)
        if any(request.slot >= 0 for request in self.rows + going):
            new = [torch.full((chunk.size,), chunk.request.slot, dtype=torch.int32) for chunk in chunks]
            step = step._replace(adapters=torch.cat((s.adapters[:kept], upload(torch.cat(new), self.model.device))))
        padded = padded and step.shared is None and step.adapters is None
        hidden = self.padded.forward(step, self._forward, self._captured) if padded else self._forward(step)
        first = kept
        for request, start, size in chunks:
            if request.scores:
                self._score(request, start, hidden[first : first + size], prompts)
            first += size
        return self._draw(s, hidden[(offsets[1 : s.size + 1] - 1).long()], self._wants) if s.size else None

    def _step(self, s: State, wants: Wants, longest: int | None = None) -> Drawn:
        """A token of each row in, one out, in place; or with a draft one to `n + 1`. `longest` cuts the page table where the host knows it."""
        table = s.page_table if longest is None else s.page_table[:, : self.pool.pages_for(longest)]
        if self._drafts(s.size, wants):
            return Drawn(self.speculation.step(s, Rows(s.positions >= 0, s.positions.clamp(min=0), table)))
        at, slots, lengths = self._places(s, table)
        adapters = s.adapters if wants.adapter else None
        step = Step(s.tokens, at, slots, page_table=table, lengths=lengths, adapters=adapters, shared=self.cascade.of(table, s.positions))
        return self._draw(s, self._forward(step), wants)

    def _places(self, s: State, table: Tensor) -> Places:
        """Where the last tokens of the rows belong; their positions are the steps that the next ones are drawn with, too."""
        return decode_places(s.positions, table, self.pool.page, at=s.sampling.step)

    def _drafts(self, size: int, wants: Wants) -> bool:
        """Whether a decode of so many rows guesses."""
        return self.speculation is not None and wants.plain and size <= bucket(self.speculation.draft.most_rows)

    def _forward(self, step: Step) -> Tensor:
        """Hidden states of a step without guesses."""
        if self.speculation:
            self.speculation.follow(step)
        return self.model.forward(step, self.pool)

    def _draw(self, s: State, hidden: Tensor, wants: Wants) -> Drawn:
        """After `_places`: the next token of each row, into the state too, and its log-probabilities where somebody wants them."""
        raw = logits = self.model.logits(hidden)
        if wants.penalties or wants.bias or wants.mask:
            penalties = s.penalties() if wants.penalties else None
            bias = s.bias(s.positions) if wants.bias else None
            logits = adjust_logits(logits, penalties=penalties, bias=bias, mask=s.mask if wants.mask else None)
        tokens = sample(logits, s.sampling)
        decode_advance(tokens, s.tokens, s.positions, counts=s.output if wants.penalties else None, history=s.history)
        return Drawn(s.tokens, _packed_logprobs(raw, tokens) if wants.logprobs else None)

    def _score(self, request: Request, start: int, hidden: Tensor, prompts: list) -> None:
        """The log-probabilities of the tokens of a prompt that follow those from `start` on."""
        following = request.prompt[start + 1 : start + 1 + len(hidden)]
        for at in range(0, len(following), LOGITS):
            tokens = following[at : at + LOGITS]
            logits = self.model.logits(hidden[at : at + len(tokens)])
            found = _packed_logprobs(logits, upload(torch.tensor(tokens), logits.device))
            prompts.append((request, start + 1 + at, tokens, found.to("cpu", non_blocking=True)))

    def _results(self, drawn: Drawn | None, prompts: list, kind: str) -> Launched:
        """What was launched last, on its way to the host."""
        count, shared = len(self.rows), bool(self.cascade.levels)
        tokens = self.state.tokens[:0] if drawn is None else drawn.tokens[:count]
        logprobs = None if drawn is None or drawn.logprobs is None else drawn.logprobs[:count]
        if self.model.device.type != "cuda":
            return Launched(list(self.rows), tokens.clone(), logprobs, prompts, None, kind, shared)
        logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
        tokens, done = tokens.to("cpu", non_blocking=True), torch.cuda.Event()
        done.record()
        return Launched(list(self.rows), tokens, logprobs, prompts, done, kind, shared)

    def _capture(self, size: int, wants: Wants) -> Captured:
        """The step of `size` rows as a graph, sampler included. The state stays as it was."""
        rows, saved = self.state.rows(size), self.state.longs.clone()
        self.state.clear(0)  # nothing is written to the cache
        made = self._captured(lambda: self._step(rows, wants))
        self.state.longs.copy_(saved)
        return made

    def _captured(self, run: Callable) -> Captured:
        """One CUDA graph of `run`; the call before it compiles the kernels."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((one.graph.pool() for one in (*self.graphs.values(), *self.padded.graphs.values())), None)
        with torch.cuda.graph(graph, pool=pool):
            out = run()
        return Captured(graph, out)


def _packed(chunks: list[Chunk], kept: int, page: int) -> tuple[Tensor, Tensor]:
    """Token, position and slot of each token of the chunks, int64 [3, tokens], and the offsets int32 [kept + chunks + 1] of `kept` decodes and then them."""
    columns = []
    for request, start, size in chunks:
        places, first = torch.arange(start, start + size), start // page
        pages = torch.tensor(request.pages.pages[first : (start + size - 1) // page + 1])
        columns.append(torch.stack((torch.tensor(request.known()[start : start + size]), places, pages[places // page - first] * page + places % page)))
    sizes = torch.tensor([0, *[1] * kept, *(chunk.size for chunk in chunks)], dtype=torch.int32)
    return torch.cat(columns, 1), sizes.cumsum(0, dtype=torch.int32)


def bucket(count: int) -> int:
    """Rows of the graph that runs `count` sequences."""
    return next((size for size in BUCKETS if count <= size), -(-count // 256) * 256)


def _packed_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities as one transfer: int32 [rows, 1 + 2 n], the bits of the token's and of the n largest, and whose these are."""
    chosen, top, ids = log_probs(logits, tokens, min(MOST_TOP, logits.shape[1]))
    return torch.cat((chosen[:, None].view(torch.int32), top.view(torch.int32), ids.int()), 1)


def _said(found: Tensor, tokens: list[int], counts: list[int | None]) -> list[TokenLogProbs | None]:
    """A token's of each row, with as many of the largest as `counts` says; None where that is None. Lists at once: a tensor's element takes 3 us."""
    n = found.shape[1] // 2
    most = min(n, max(count or 0 for count in counts))
    values, ids = found[:, : 1 + most].view(torch.float32).tolist(), found[:, 1 + n : 1 + n + most].tolist()
    rows = zip(tokens, values, ids, counts, strict=True)
    return [None if count is None else TokenLogProbs(token, x[0], list(zip(i[:count], x[1 : 1 + count], strict=True))) for token, x, i, count in rows]
