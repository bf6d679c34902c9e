"""What a server knows of itself: for Prometheus at /metrics, and as JSON for the page's charts.

The engine's thread only adds to plain numbers; Prometheus' families are made from them when somebody asks.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from onchip.engine.llm import LLM
from onchip.engine.request import Request
from onchip.kernels.compiling import compilations

RECENT = 512  # requests that the page's quantiles are of
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Numbers since the start, and the state after the last step."""

    def __init__(self, pages: int):
        self.pages = pages
        self.steps = self.prompt_tokens = self.cached_tokens = self.new_tokens = self.refused = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
        self.waiting = self.running = self.pages_used = self.drafted = self.accepted = 0
        self.kernels: dict[str, str] = {}
        self._recent_first: deque[float] = deque(maxlen=RECENT)
        self._recent_token: deque[float] = deque(maxlen=RECENT)
        self._registry = CollectorRegistry()
        for make in (ProcessCollector, PlatformCollector, GCCollector):
            make(registry=self._registry)
        self._registry.register(self)
        self._first = Histogram("onchip_time_to_first_token_seconds", "From arrival to the first token", buckets=FIRST_TOKEN, registry=self._registry)
        self._token = Histogram("onchip_time_per_token_seconds", "Of an answer, after its first token", buckets=PER_TOKEN, registry=self._registry)

    # ---- from the engine's thread

    def watch(self, llm: LLM) -> None:
        """The engine's state between two steps."""
        self.waiting, self.running = len(llm.scheduler.waiting), len(llm.scheduler.running)
        self.pages_used = self.pages - llm.pool.num_free
        self.kernels = llm.stats.kernels
        self.drafted, self.accepted = llm.stats.drafted_tokens, llm.stats.accepted_tokens

    def began(self, request: Request, seconds: float) -> None:
        """The first token of a request has come, `seconds` after the call."""
        if request is request.samples[0]:  # the prompt of several samples is computed once
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached_tokens or 0
        self._first.observe(seconds)
        self._recent_first.append(seconds)

    def token_took(self, seconds: float) -> None:
        """An answer has ended; its tokens after the first took `seconds` each."""
        self._token.observe(seconds)
        self._recent_token.append(seconds)

    # ---- from the event loop's thread

    def stats(self) -> dict:
        """What the page draws: totals since the start, the state, and quantiles of the last 512 answers in milliseconds."""
        names = ("steps", "prompt_tokens", "cached_tokens", "new_tokens", "drafted", "accepted", "refused", "waiting", "running", "pages", "pages_used")
        found = {name: getattr(self, name) for name in names}
        found |= {"ended": dict(self.ended), "kernels": dict(self.kernels)}
        found["first_token_ms"], found["token_ms"] = _quantiles(self._recent_first), _quantiles(self._recent_token)
        return found

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry."""
        for name, about, value in (
            ("prompt_tokens", "Tokens of prompts, those from the prefix cache included", self.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that came from the prefix cache", self.cached_tokens),
            ("generated_tokens", "New tokens", self.new_tokens),
            ("drafted_tokens", "Tokens that a draft guessed", self.drafted),
            ("accepted_tokens", "Guessed tokens that the model drew itself", self.accepted),
            ("steps", "Steps of the engine", self.steps),
            ("kernels_compiled", "Kernels that Triton compiled since the process began; more after the start are waits in answers", compilations.compiled),
            ("requests_refused", "Requests turned away because too many waited or the engine had stopped", self.refused),
        ):
            yield CounterMetricFamily(f"onchip_{name}", about, value)
        ended = CounterMetricFamily("onchip_requests_ended", "Requests by how they ended", labels=["reason"])
        for reason, count in self.ended.copy().items():
            ended.add_metric([reason], count)
        yield ended
        for name, about, value in (
            ("requests_waiting", "Requests in the queue", self.waiting),
            ("requests_running", "Requests in the batch", self.running),
            ("cache_pages", "Pages of the cache", self.pages),
            ("cache_pages_used", "Pages that a request or the prefix cache holds", self.pages_used),
        ):
            yield GaugeMetricFamily(f"onchip_{name}", about, value)
        kernels = InfoMetricFamily("onchip_kernel", "The kernel that last ran each operator", labels=["operator"])
        for operator, kernel in dict(self.kernels).items():
            kernels.add_metric([operator], {"kernel": kernel})
        yield kernels


def _quantiles(seconds: deque[float]) -> dict[str, float | None]:
    """The median and the 99th percentile in milliseconds; None before the first answer."""
    found = sorted(seconds.copy())  # the engine appends to it meanwhile
    if not found:
        return {"p50": None, "p99": None}
    return {"p50": round(statistics.median(found) * 1e3, 3), "p99": round(found[min(len(found) - 1, int(len(found) * 0.99))] * 1e3, 3)}


def merged(values: Sequence[Any]) -> Any:
    """What several servers say of one thing, or of a table of them: counts are summed, of times the largest, of names the first; None where none knows."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        return {name: merged([value.get(name) for value in known]) for name in dict.fromkeys(name for value in known for name in value)}
    return sum(known) if isinstance(known[0], int) else max(known) if isinstance(known[0], float) else known[0]


def joined(texts: Mapping[str, str]) -> bytes:
    """Prometheus' texts of several replicas as one: each sample says which it is of."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
    return generate_latest(SimpleNamespace(collect=families.values))
