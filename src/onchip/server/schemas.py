"""The bodies of requests, as OpenAI's API has them, with vLLM's names for what OpenAI has not; and what of them the engine is asked.

Fields that would change an answer and are not served are errors, not ignored; those about billing and bookkeeping are taken and dropped.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from onchip.engine.grammar import Grammar
from onchip.engine.request import MOST_NAMED, SamplingParams

MAX_CHOICES = 128  # prompts times samples of one call
TOP_LOGPROBS = 20
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}").fullmatch  # each id has one spelling: of "5" and "05" one would count
NOT_SERVED = ("tools", "functions", "function_call", "audio", "prediction", "suffix", "web_search_options", "reasoning_effort", "verbosity")


def _texts(value: Any) -> Any:
    """One text stands for a list of it."""
    return [value] if isinstance(value, str) else value


def _source(value: Any) -> Any:
    """A schema as an object, as true (any JSON) or as its text."""
    return json.dumps(value) if isinstance(value, dict | bool) else value


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _prompts(value: Any) -> Any:
    """Text, token ids, or a list of either, as a list of prompts."""
    if isinstance(value, list) and value and type(value[0]) is not int:
        _check_count(value, 10_000)
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(token) is int for token in value)):
        return [value]
    known = isinstance(value, list) and value and all(isinstance(p, str) or (isinstance(p, list) and all(type(t) is int for t in p)) for p in value)
    if not known:
        raise ValueError(f"{value!r:.60} is not text; give text, a list of token ids, or a list of either")
    return value


def _at_most(count: int) -> BeforeValidator:
    """So many entries, asked before one of them is read: of 2 million odd ones pydantic writes as many complaints, for 20 s."""
    return BeforeValidator(lambda value: _check_count(value, count))


def _check_count(value: Any, count: int) -> Any:
    if isinstance(value, list | dict) and len(value) > count:
        raise ValueError(f"{len(value)} entries are more than {count}; give fewer")
    return value


FIELDS = 100  # of an object
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16), BeforeValidator(_texts)]  # each of them is searched for at each token
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any):
        """null is as good as left out: clients send back the null fields of answers."""
        if not isinstance(body, dict):
            return body
        if len(body) > FIELDS:
            raise ValueError(f"an object of {len(body)} fields has more than {FIELDS}; leave those out that are not this server's")
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # taken and dropped


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"response_format has type {self.type!r} and json_schema {self.json_schema!r:.40}; give json_schema with type 'json_schema' alone")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "json_object":
            return Grammar("json", '{"type": "object"}')
        return None if self.json_schema is None else Grammar("json", json.dumps(self.json_schema.schema_))


class StructuredOutputs(Body):
    """vLLM's extension: exactly one of them."""

    json_: Annotated[Text, BeforeValidator(_source)] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True), _at_most(10_000)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self):
        given = [name for name in ("json_", "regex", "choice", "grammar", "json_object") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {', '.join(given).replace('json_', 'json') or 'nothing'}; give one of json, regex, choice, grammar, json_object"
            )
        return self

    def as_grammar(self) -> Grammar:
        if self.json_ is not None:
            return Grammar("json", self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar.of_choices(self.choice)
        return Grammar("json", '{"type": "object"}') if self.json_object else Grammar("lark", self.grammar)


class Generation(Body):
    """What chat and plain completions have in common."""

    model: str
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    max_tokens: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], _at_most(MOST_NAMED)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MAX_CHOICES)
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, lt=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True), _at_most(MOST_NAMED)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # taken and dropped
    user: str | None = None
    metadata: Annotated[dict[str, str], _at_most(16)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, body: Any):
        asked = [name for name in NOT_SERVED if isinstance(body, dict) and body.get(name)]
        if asked:
            raise ValueError(f"{asked[0]} is not served; leave it out")
        return body

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None):
        if bias is not None and not all(TOKEN_ID(key) and -100 <= value <= 100 for key, value in bias.items()):
            raise ValueError("logit_bias has a key that is no token id or a value outside of -100 to 100; give {'token id': bias}")
        return bias

    @model_validator(mode="after")
    def _stream_options(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true or leave it out")
        return self

    @property
    def samples(self) -> int:
        return self.n or 1

    def grammar(self) -> Grammar | None:
        return None if self.structured_outputs is None else self.structured_outputs.as_grammar()

    def limit(self) -> int | None:
        """Most new tokens; None: as the context allows."""
        return self.max_tokens

    def top_logprobs_(self) -> int | None:
        """How many log-probabilities beside a token's own; None: not even that."""
        raise NotImplementedError(f"{type(self).__name__} is no request: define top_logprobs_(self)")

    def prompt_logprobs_(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    def params(self, context: int, adapter: str | None) -> SamplingParams:
        """What the engine is asked. `context`: the most tokens that an answer may have. Raises ValueError."""
        given = {
            "adapter": adapter,
            "n": self.n, "seed": self.seed, "top_p": self.top_p, "min_p": self.min_p, "typical_p": self.typical_p,
            "top_k": None if self.top_k == -1 else self.top_k,  # vLLM's "all"
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty, "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(key): value for key, value in self.logit_bias.items()} if self.logit_bias else None,
            "stop": self.stop, "min_tokens": self.min_tokens, "stop_token_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos,
            "logprobs": self.top_logprobs_(), "prompt_logprobs": self.prompt_logprobs_(),
        }  # fmt: skip
        asked = {name: value for name, value in given.items() if value is not None}
        limit = context if self.limit() is None else self.limit()
        return SamplingParams(max_tokens=limit, temperature=1.0 if self.temperature is None else self.temperature, **asked)


class Part(Body):
    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text(cls, part: Any):
        if isinstance(part, dict) and part.get("type") != "text":
            raise ValueError(f"a part of a message has type {part.get('type')!r:.40}; this server reads parts of type 'text'")
        return part


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    name: str | None = None  # taken and dropped: chat templates have no place for it
    content: Annotated[list[Part], Field(fail_fast=True), _at_most(10_000), BeforeValidator(_parts)]
    annotations: Annotated[list, Field(max_length=0)] = []  # of an answer that is sent back
    tool_calls: Annotated[list, Field(max_length=0)] = []

    @model_validator(mode="before")
    @classmethod
    def _said(cls, message: Any):
        """An answer of no text has null for its content."""
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        if message.get("tool_calls"):
            raise ValueError("an assistant's message has tool_calls, which are not served; leave them out, and give what was said as content")
        return message | {"content": ""} if "content" in message and message["content"] is None else message

    def plain(self) -> dict[str, str]:
        """As chat templates have it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(fail_fast=True), _at_most(10_000)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # of these only the values that ask for nothing, see NOT_SERVED
    tools: list | None = None
    functions: list | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], _at_most(16)] | None = None

    @model_validator(mode="after")
    def _agree(self):
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} and logprobs is not true; set logprobs to true or leave top_logprobs out")
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs are both given; give one of them")
        return self

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def grammar(self) -> Grammar | None:
        return (self.response_format and self.response_format.grammar()) or super().grammar()

    def top_logprobs_(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None
    max_tokens: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _agree(self):
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which is for the prompt alone; set echo to true, or give 1 or more")
        if self.best_of is not None and self.best_of != self.samples:
            raise ValueError(f"best_of is {self.best_of} and n is {self.samples}; this server returns every sample: leave best_of out")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo, logprobs and stream are all given; leave stream out: a prompt's log-probabilities come with the whole answer")
        return self

    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # 16 is OpenAI's

    def top_logprobs_(self) -> int | None:
        return self.logprobs

    def prompt_logprobs_(self) -> int | None:
        return self.logprobs if self.echo else None


class EmbeddingRequest(Body):
    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
