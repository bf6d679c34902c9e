"""The routes: OpenAI's, health, metrics, and the page at /."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.types import Receive, Scope, Send

import onchip
from onchip.cache.paged import OutOfPages
from onchip.engine.grammar import Vocabulary, speller
from onchip.engine.llm import LLM
from onchip.engine.request import Request as EngineRequest
from onchip.server import errors
from onchip.server.errors import ApiError
from onchip.server.guard import Guard
from onchip.server.replies import Chat, Plain, Reply
from onchip.server.schemas import MAX_CHOICES, ChatRequest, CompletionRequest, EmbeddingRequest, Generation
from onchip.server.serving import Job, Serving


@dataclass(frozen=True)
class Limits:
    """What a server takes. max_prompt: tokens, None as many as the context holds; max_body: bytes; max_queued: requests that wait or run."""

    max_prompt: int | None = None
    max_body: int = 4 << 20
    max_queued: int = 10_000


class Front:
    """What the routes share: the LLM as a server sees it."""

    def __init__(self, llm: LLM, name: str, limits: Limits):
        self.llm, self.name, self.limits = llm, name, limits
        self.serving = Serving(llm, max_queued=limits.max_queued)
        self.created = int(time.time())
        self.spell = speller(llm.tokenizer) if llm.tokenizer else lambda token: b""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Made by the first call that asks for a grammar."""
        if self.llm.tokenizer is None:
            raise ValueError("this model has no tokenizer.json, and a grammar is about text; leave it out")
        return Vocabulary(self.llm.tokenizer, self.llm.config.vocab)

    def card(self) -> dict:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "onchip", "max_model_len": self.llm.max_len}

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self.llm.tokenizer is None:
            raise ValueError("this model has no tokenizer.json; call /v1/completions with token ids")
        return self.llm.tokenizer.chat(messages)

    def text(self, prompt: str | list[int]) -> str:
        """A prompt as text, for `echo`."""
        return prompt if isinstance(prompt, str) else self.llm.tokenizer.decode(prompt) if self.llm.tokenizer else ""

    def check_model(self, asked: str) -> None:
        if asked != self.name:
            raise ApiError(404, f"model {asked!r:.80} is not served here; this server has {self.name!r}", param="model", code="model_not_found")

    async def submit(self, body: Generation, read: Callable[[], list]) -> Job:
        """The requests of a call, queued: the samples of each of the prompts that `read` returns side by side. Raises ApiError and Overloaded."""
        self.check_model(body.model)
        try:
            return self.serving.submit(await asyncio.to_thread(self._requests, body, read))
        except (ValueError, OutOfPages) as error:  # OutOfPages: one that the empty cache could not hold
            raise ApiError(400, str(error).removeprefix("SamplingParams: ").removeprefix("request: ")) from None

    def _requests(self, body: Generation, read: Callable[[], list]) -> list[EngineRequest]:
        """Away from the event loop: text becomes tokens here, and grammars parsers."""
        prompts, grammar, made = read(), body.grammar(), []
        if len(prompts) * body.samples > MAX_CHOICES:
            raise ValueError(f"{len(prompts)} prompts with n {body.samples} are more than {MAX_CHOICES} answers; send several calls")
        params = body.params(self.llm.max_len)
        for prompt in prompts:
            request = self.llm.request(prompt, params, priority=body.priority or 0)
            if self.limits.max_prompt is not None and len(request.prompt) > self.limits.max_prompt:
                raise ValueError(f"the prompt has {len(request.prompt)} tokens and this server takes {self.limits.max_prompt}; shorten it")
            if grammar is not None:
                for sample in request.samples:
                    sample.mask = self.vocabulary.matcher(grammar)
            made.append(request)
        return made


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
    watch = asyncio.create_task(_close_when_gone(request, reply.job))
    try:
        return JSONResponse(await reply.whole())
    finally:
        watch.cancel()
        reply.job.close()


async def _close_when_gone(request: Request, job: Job) -> None:
    """A client that hangs up does not keep the engine busy."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.close()


def build(llm: LLM, name: str, *, limits: Limits = Limits(), keys: tuple[bytes, ...] = ()) -> Guard:
    """The ASGI app that serves `llm` as model `name`. keys: of `guard.read_keys`; none: open to all who reach it."""
    front = Front(llm, name, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        front.serving.start()
        yield
        await front.serving.stop()

    app = FastAPI(title="onchip", version=onchip.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)  # FastAPI's pages load scripts from elsewhere
    errors.install(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        job = await front.submit(body, lambda: [front.chat([message.plain() for message in body.messages])])
        return await _answer(Reply(Chat(), name, job, front.spell), body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = await front.submit(body, lambda: body.prompt)
        echoes = [front.text(prompt) for prompt in body.prompt for _ in range(body.samples)] if body.echo else None
        return await _answer(Reply(Plain(echoes), name, job, front.spell), body, request)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        front.check_model(body.model)
        raise ApiError(501, "this server has no embeddings: its model generates text; leave them to a server of an embedding model")

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [front.card()]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict:
        front.check_model(asked)
        return front.card()

    @app.get("/health")
    async def health() -> Response:
        why = front.serving.trouble()
        return JSONResponse({"status": "ok"} if why is None else {"status": "down", "reason": why}, 200 if why is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(front.serving.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/stats")
    async def stats() -> dict:
        return front.serving.metrics.stats() | {"model": name, "max_len": llm.max_len, "device": str(llm.device)}

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
