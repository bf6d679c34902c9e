"""From pieces of answers to OpenAI's objects: one `Dialect` for chat and one for plain completions, whole or as server-sent events."""

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from onchip.engine.grammar import speller
from onchip.engine.request import Request, TokenLogProbs
from onchip.models.tokenizer import Tokenizer
from onchip.server import errors
from onchip.server.serving import ENDED, Job, Piece

KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it lives: proxies close silent connections after 30 to 60 s
DUMP = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


def encode(data: Any) -> str:
    """JSON on one line, also for a client that ends lines as Unicode does (`str.splitlines`, httpx's `iter_lines`): an event is one line."""
    return DUMP(data).replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def sliced(data: Any, depth: int = 5) -> str:
    """JSON of a large object, in another thread: the encoder does not let the interpreter go within one call, so one call each for what lies `depth` deep,
    where log-probabilities have a token's entry."""
    if depth and isinstance(data, dict):
        return "{" + ",".join(f"{encode(key)}:{sliced(value, depth - 1)}" for key, value in data.items()) + "}"
    if depth and isinstance(data, list):
        return "[" + ",".join(sliced(value, depth - 1) for value in data) + "]"
    return encode(data)


class Word(NamedTuple):
    """A token's bytes, or the name of one that is no text: two of those are not to be taken for each other."""

    text: bytes
    name: str = ""


def words(tokenizer: Tokenizer | None) -> Callable[[int], Word]:
    """The words of tokens; without a tokenizer all go by their numbers."""
    spell = speller(tokenizer) if tokenizer else lambda token: b""

    def word(token: int) -> Word:
        text = spell(token)
        return Word(text) if text else Word(text, (tokenizer and tokenizer.name(token)) or f"token_id:{token}")

    return lru_cache(maxsize=None)(word)


class Spelled(NamedTuple):
    """A token, its log-probability, and those of the likeliest."""

    token: Word
    logprob: float | None
    top: list[tuple[Word, float]]


@dataclass
class Reply:
    """One call's answer. `dialect` says how its choices look; `spell` a token's word, for log-probabilities."""

    dialect: "Chat | Plain"
    model: str
    job: Job
    spell: Callable[[int], Word]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> bytes:
        """The answer in one object, as JSON. Raises ApiError where a request has failed."""
        pieces: list[list[Piece]] = [[] for _ in self.job.requests]
        async for piece in self.job.pieces():
            pieces[piece.index].append(piece)
            if failed := _failure(piece):
                raise errors.ApiError(*failed)
        answers = [Piece.joined(answer) for answer in pieces if answer]  # one without a piece has lost its client
        if any(answer.logprobs is not None for answer in answers):
            return await asyncio.to_thread(self._written, answers, sliced)
        return self._written(answers, encode)

    def _written(self, answers: list[Piece], write: Callable[[dict], str]) -> bytes:
        return write(self._object(self.dialect.whole, [self._choice(answer) for answer in answers]) | {"usage": self.usage()}).encode()

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error is an event too, the last one of its choice, which ends before its last words then."""
        null = {"usage": None} if include_usage else {}
        for i in range(len(self.job.requests)):
            if opening := self.dialect.opening(i):
                yield _event(self._object(self.dialect.chunk, [opening]) | null)
        async for piece in self.job.pieces(KEEP_ALIVE):
            if piece is None:
                yield b": waiting\n\n"
            elif failed := _failure(piece):
                yield _event(errors.body(*failed))
            else:
                yield _event(self._object(self.dialect.chunk, [self._choice(piece, part=True)]) | null)
        if include_usage:
            yield _event(self._object(self.dialect.chunk, []) | {"usage": self.usage()})
        yield DONE

    def usage(self) -> dict:
        """Tokens: the prompt of several samples counts once, what came from the prefix cache beside it."""
        asked = self.job.asked
        prompt, cached = sum(len(r.prompt) for r in asked), sum(r.cached_tokens or 0 for r in asked)
        new = sum(len(r.tokens) for r in self.job.requests)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, "prompt_tokens_details": {"cached_tokens": cached}}

    def _object(self, kind: str, choices: list[dict]) -> dict:
        return {"id": f"{self.dialect.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, piece: Piece, part: bool = False) -> dict:
        found = piece.logprobs
        if found is not None and not part:
            found = self._of_prompt(self.job.requests[piece.index].samples[0]) + found
        logprobs = None if found is None else self.dialect.logprobs(piece.index, [self._spelled(one) for one in found])
        return {"index": piece.index, **self.dialect.content(piece, part), "logprobs": logprobs, "finish_reason": piece.reason}

    def _of_prompt(self, request: Request) -> list[TokenLogProbs]:
        """Where they were asked for; nothing predicts the first token."""
        found = request.prompt_logprobs or []
        return [one or TokenLogProbs(token, None, []) for token, one in zip(request.prompt, found, strict=False)]

    def _spelled(self, one: TokenLogProbs) -> Spelled:
        return Spelled(self.spell(one.token), one.logprob, [(self.spell(token), logprob) for token, logprob in one.top])


class Chat:
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict | None:
        """The first event of a choice."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def content(self, piece: Piece, part: bool) -> dict:
        if part:
            return {"delta": {"content": piece.text} if piece.text else {}}
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def logprobs(self, index: int, spelled: list[Spelled]) -> dict:
        def entry(token: Word, logprob: float) -> dict:
            shown = {"token": token.name, "bytes": None} if token.name else {"token": token.text.decode("utf-8", "replace"), "bytes": list(token.text)}
            return shown | {"logprob": logprob}

        return {"content": [entry(token, own) | {"top_logprobs": [entry(*one) for one in top]} for token, own, top in spelled], "refusal": None}


class Plain:
    """/v1/completions. `echoes`: the text that each choice begins with, where the call asked for its prompt back."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, echoes: list[str] | None = None):
        self._echoes = echoes
        self._ends: Counter[int] = Counter()  # where the text of a choice's tokens ends

    def opening(self, index: int) -> dict | None:
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None} if self._echoes else None

    def content(self, piece: Piece, part: bool) -> dict:
        return {"text": piece.text if part or not self._echoes else self._echoes[piece.index] + piece.text}

    def logprobs(self, index: int, spelled: list[Spelled]) -> dict:
        def text(token: Word) -> str:
            """As OpenAI writes tokens: what is a part of a character by its bytes, so that no two become the same."""
            try:
                return token.name or token.text.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)

        tokens, offsets = [text(token) for token, _, _ in spelled], []
        for token, _, _ in spelled:
            offsets.append(self._ends[index])
            self._ends[index] += sum(byte & 0xC0 != 0x80 for byte in token.text)  # a character counts where its first byte is
        tops = [{text(token): p for token, p in [*one.top, one[:2]]} if one.logprob is not None else None for one in spelled]
        return {"tokens": tokens, "token_logprobs": [own for _, own, _ in spelled], "top_logprobs": tops, "text_offset": offsets}


def _failure(piece: Piece) -> tuple[int, str] | None:
    """Why the answer is not whole: a status, and what follows "error: " in its reason; None where it is well. A grammar is the caller's own."""
    if piece.reason is None or piece.reason in ("stop", "length"):
        return None
    why = piece.reason.removeprefix("error: ")
    return 400 if why.startswith("the mask of its tokens") else 503 if why in ENDED else 500, why


def _event(data: dict) -> bytes:
    return b"data: " + encode(data).encode() + b"\n\n"
