"""The routes: OpenAI's, health, metrics, and the page at /."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.types import Receive, Scope, Send

import onchip
from onchip.cache.paged import OutOfPages
from onchip.engine.grammar import Budget, Grammar
from onchip.engine.llm import LLM
from onchip.engine.request import Request as EngineRequest
from onchip.server import errors
from onchip.server.embeddings import Embeddings
from onchip.server.errors import ApiError
from onchip.server.guard import Guard
from onchip.server.reading import check_text
from onchip.server.replies import Chat, Plain, Reply, words
from onchip.server.schemas import MAX_CHOICES, ChatRequest, CompletionRequest, EmbeddingRequest, Generation
from onchip.server.serving import EACH, Job, Serving


@dataclass(frozen=True)
class Limits:
    """What a server takes. max_prompt: tokens, None as many as the context holds; max_body: bytes; max_queued: requests that wait or run."""

    max_prompt: int | None = None
    max_body: int = 4 << 20
    max_queued: int = 10_000


class Front:
    """What the routes share: the LLM as a server sees it."""

    each = EACH  # of `Serving`

    def __init__(self, llm: LLM, name: str, limits: Limits, embeddings: Embeddings | None):
        self.llm, self.name, self.limits, self.embeddings = llm, name, limits, embeddings
        self.serving = Serving(llm, max_queued=limits.max_queued, each=self.each)
        self.created = int(time.time())
        self.spell = words(llm.tokenizer)
        self._most = limits.max_prompt or llm.max_len
        self._parsers = ThreadPoolExecutor(1, "onchip-grammar")  # apart from the threads that make tokens of everybody's text

    @property
    def generators(self) -> dict[str, int]:
        """The language model and its adapters, and the most tokens of each."""
        return dict.fromkeys([self.name, *self.adapters], self.llm.max_len)

    @property
    def adapters(self) -> list[str]:
        table = self.llm.model.adapters
        return [name for name in (table.names if table else ()) if name]

    @property
    def encoders(self) -> dict[str, int]:
        return {self.embeddings.name: self.embeddings.embedder.max_len} if self.embeddings else {}

    async def health(self) -> dict:
        """Whether a request can be served, and if not why."""
        why = self.serving.trouble()
        return {"status": "ok"} if why is None else {"status": "down", "reason": why}

    async def metrics(self) -> bytes:
        """Prometheus' text format."""
        return self.serving.metrics.text()

    async def stats(self) -> dict:
        """The page's figures."""
        return self.serving.metrics.stats() | self.about()

    def about(self) -> dict:
        return {"model": self.name, "max_len": self.llm.max_len, "device": str(self.llm.device)}

    def cards(self) -> dict[str, dict]:
        """All models, as OpenAI lists them."""
        about = {"object": "model", "created": self.created, "owned_by": "onchip"}
        return {name: {"id": name, **about, "max_model_len": most} for name, most in (self.generators | self.encoders).items()}

    def chat(self, messages: list[dict[str, str]], settings: dict | None) -> list[list[int]]:
        """The one prompt of a chat."""
        if self.llm.tokenizer is None:
            raise ValueError("this model has no tokenizer.json; call /v1/completions with token ids")
        for i, message in enumerate(messages):
            self._check(f"messages.{i}.content", message["content"])
        text = self.llm.tokenizer.render(messages, settings=settings)
        self._check("the conversation", text)
        return [self.llm.tokenizer.encode(text, special=False)]

    def plain(self, prompts: list[str | list[int]]) -> list[str | list[int]]:
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str) and self.llm.tokenizer is not None:
                self._check(f"prompt {i}" if len(prompts) > 1 else "the prompt", prompt)
        return prompts

    def _check(self, name: str, text: str) -> None:
        check_text(name, text, self._most, self.llm.tokenizer.encode)

    def echoes(self, prompts: list[str | list[int]], samples: int) -> list[str]:
        """The prompts as text, for each of their samples. Away from the event loop: 8,000 tokens may take 10 ms."""
        texts = [prompt if isinstance(prompt, str) else self.llm.tokenizer.decode(prompt) if self.llm.tokenizer else "" for prompt in prompts]
        return [text for text in texts for _ in range(samples)]

    async def submit(self, body: Generation, prompts: int, read: Callable[[], list]) -> Job:
        """The requests of a call, queued: the samples of each of the `prompts` that `read` returns side by side. Raises ApiError and Overloaded."""
        check_served(body.model, self.generators)
        if prompts * body.samples > MAX_CHOICES:
            raise ApiError(400, f"{prompts} prompts with n {body.samples} are more than {MAX_CHOICES} answers; send several calls")
        try:
            with self.serving.claim(prompts * body.samples) as arrived:
                made = await asyncio.to_thread(self._requests, body, read)
                if (grammar := body.grammar()) is not None:
                    await asyncio.get_running_loop().run_in_executor(self._parsers, self._constrain, grammar, body.min_tokens, made)
                return self.serving.submit(made, arrived)
        except (ValueError, OutOfPages) as error:  # OutOfPages: one that the empty cache could not hold
            raise ApiError(400, _said(error)) from None

    def _requests(self, body: Generation, read: Callable[[], list]) -> list[EngineRequest]:
        """Away from the event loop: text becomes tokens here."""
        params = body.params(self.llm.max_len, adapter=None if body.model == self.name else body.model)
        made, prompts = [], read()
        for i, prompt in enumerate(prompts):
            try:
                made.append(self.llm.request(prompt, params))
                if self.limits.max_prompt is not None and len(made[-1].prompt) > self.limits.max_prompt:
                    raise ValueError(f"the prompt has {len(made[-1].prompt)} tokens and this server takes {self.limits.max_prompt}; shorten it")
            except (ValueError, OutOfPages) as error:
                said = _said(error)
                raise ApiError(400, f"prompt {i}: {said}" if len(prompts) > 1 and said.startswith(("prompt", "the prompt")) else said) from None
        return made

    def _constrain(self, grammar: Grammar, min_tokens: int | None, made: list[EngineRequest]) -> None:
        """Give each request its parser of the grammar, which is read once."""
        if min_tokens:
            raise ValueError(f"min_tokens is {min_tokens} and the answer has a given form, which says itself where it may end; leave min_tokens out")
        matcher = self.llm.vocabulary.matcher(grammar)
        matcher.copy().first()
        # seconds of a processor are not the same on all ranks, which have to agree on where an answer ends
        budget = Budget() if self.llm.recovers else None
        for request in made:
            for sample in request.samples:
                sample.mask = matcher.copy(budget)


def _said(error: Exception) -> str:
    """What the engine found, without the names that it has for its arguments."""
    return str(error).removeprefix("SamplingParams: ").removeprefix("request: ").removeprefix("prompt: ")


def check_served(asked: str, models: Iterable[str]) -> None:
    """Raises ApiError for a model that is not one of `models`."""
    if asked not in models:
        there = ", ".join(map(repr, models))
        raise ApiError(404, f"model {asked!r:.80} is not served here; this server has {there}", param="model", code="model_not_found")


class _Events(StreamingResponse):
    """Server-sent events of a job, which is closed however the response ends."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.close()


async def _answer(reply: Reply, body: Generation, request: Request) -> Response:
    if body.stream:
        options = body.stream_options
        return _Events(reply.job, reply.stream(options is not None and options.include_usage))
    watch = asyncio.create_task(_when_gone(request, reply.job.close))
    try:
        return Response(await reply.whole(), media_type="application/json")
    finally:
        watch.cancel()
        reply.job.close()


async def _when_gone(request: Request, close: Callable[[], None]) -> None:
    """A client that hangs up does not keep the engine busy."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    close()


def check_names(names: list[str]) -> None:
    if twice := [one for one in names if names.count(one) > 1]:
        raise ValueError(f"{twice[0]!r} is the name of two models of this server; give each its own")


def build(
    llm: LLM,
    name: str,
    *,
    limits: Limits = Limits(),
    keys: tuple[bytes, ...] = (),
    embeddings: Embeddings | None = None,
    front: Callable[..., Front] = Front,
) -> Guard:
    """The ASGI app that serves `llm` as model `name`, and its adapters under theirs. keys: of `guard.read_keys`; none: open to all who reach it.

    front   makes what the routes share: another `Front` where there are more servers beside this one.
    """
    front = front(llm, name, limits, embeddings)
    check_names([name, *front.adapters, *front.encoders])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        front.serving.start()
        yield
        await front.serving.stop()

    app = FastAPI(
        title="onchip", version=onchip.__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )  # FastAPI's pages load scripts from elsewhere
    app.state.front = front
    errors.install(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        job = await front.submit(body, 1, lambda: front.chat([message.plain() for message in body.messages], body.chat_template_kwargs))
        return await _answer(Reply(Chat(), body.model, job, front.spell), body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = await front.submit(body, len(body.prompt), lambda: front.plain(body.prompt))
        with ExitStack() as undo:  # a job that nobody will read
            undo.callback(job.close)
            echoes = await asyncio.to_thread(front.echoes, body.prompt, body.samples) if body.echo else None
            undo.pop_all()
        return await _answer(Reply(Plain(echoes), body.model, job, front.spell), body, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        if embeddings is None:
            raise ApiError(501, "this server has no embeddings; start it with --embeddings MODEL")
        check_served(body.model, front.encoders)
        with front.serving.claim(1):
            work = asyncio.create_task(embeddings.answer(body, front.serving))
            watch = asyncio.create_task(_when_gone(request, work.cancel))
            try:
                await asyncio.wait({work})
                return Response(status_code=499) if work.cancelled() else Response(work.result(), media_type="application/json")
            except ValueError as error:
                raise ApiError(400, str(error)) from None
            finally:
                watch.cancel()
                work.cancel()

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": list(front.cards().values())}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict:
        cards = front.cards()
        check_served(asked, cards)
        return cards[asked]

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        told = await front.health()
        return JSONResponse(told, 503 if told["status"] == "down" else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.metrics(), media_type=METRICS_TYPE)

    @app.get("/stats")
    async def stats() -> dict:
        return await front.stats()

    page = resources.files("onchip.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = _policy(page)

    @app.get("/", response_class=HTMLResponse)
    async def home() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"})

    return Guard(app, keys, limits.max_body)


def _policy(page: str) -> str:
    """What the page may load: its own style and script, by their digests, and this server."""

    def digest(tag: str) -> str:
        text = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = (f"script-src {digest('script')}", f"style-src {digest('style')}", "connect-src 'self'", "img-src data:")
    return "; ".join(("default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"))
