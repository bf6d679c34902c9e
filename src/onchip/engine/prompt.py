"""Token ids of what a user gives as a prompt."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral

import torch

from onchip.cache.paged import OutOfPages
from onchip.engine.request import Request, SamplingParams
from onchip.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def paired(prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its own params, or with those of all. Raises ValueError."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes) or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(f"generate: prompts are {prompts!r:.60}; give text, a list of texts, or a list of lists of token ids")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    each = list(params) if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"generate: {len(each)} params for {len(prompts)} prompts; give one for all, or one each")
    return list(zip(prompts, each, strict=True))


def check_callback(on_text: object) -> None:
    if not (on_text is None or callable(on_text)):
        raise ValueError(f"generate: on_text is {on_text!r:.60}; give what can be called as (index of the result, new text), or None")


def tokens_of(name: str, prompt: str | Sequence, chat: bool | Mapping, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of text, of token ids, or, with `chat` (True, or settings of the chat template), of a user's message or a list of messages.

    name   what errors call it.

    Raises ValueError.
    """
    if not isinstance(chat, bool | Mapping):
        raise ValueError(f"chat is {chat!r:.60}; give True, False, or settings of the chat template as in {{'enable_thinking': False}}")
    settings = chat if isinstance(chat, Mapping) else None
    chat = chat is not False
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{name} is empty; give at least one character")
        if tokenizer is None:
            raise ValueError(f"{name} is text and this model has no tokenizer.json; add it, or give token ids instead of text")
        ids = tokenizer.chat([{"role": "user", "content": prompt}], settings=settings) if chat else tokenizer.encode(prompt)
    elif chat:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(message, Mapping) for message in prompt):
            raise ValueError(f"{name} is {prompt!r:.60} with chat=True; give a user's message as text, or a list of {{'role': ..., 'content': ...}}")
        if tokenizer is None:
            raise ValueError(f"{name} is a conversation and this model has no tokenizer.json; add it, or give token ids instead of messages")
        ids = tokenizer.chat(prompt, settings=settings)
    elif isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | Set | bytes):
        try:
            prompt = list(prompt)
            ids = list(map(operator.index, prompt))
        except TypeError as error:
            raise ValueError(f"{name} has a token id that is no integer ({error}); give a list like [1, 2, 3]") from None
    else:
        raise ValueError(f"{name} is {prompt!r:.60}; give text or a list of token ids, as in [[1, 2, 3]]; of a chat, [messages] with chat=True")
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token")
    if not isinstance(prompt, str) and any(isinstance(token, bool) or getattr(token, "dtype", None) is torch.bool for token in prompt):
        raise ValueError(f"{name} has True or False for a token id; give a list like [1, 2, 3]")
    return ids


def check_request(what: str, request: Request) -> None:
    if not isinstance(request, Request):
        raise ValueError(f"{what}: {request!r:.60} is no request; give what LLM.request(prompt, SamplingParams()) makes")


def limit_of(name: str, count: int, asked: int, context: int, capacity: int) -> tuple[int, str]:
    """Most new tokens after a prompt of `count`: those `asked` for, cut to the context and to what the cache holds; and which of the three it is.

    Raises ValueError for a prompt that leaves no room in the context for the first of them, OutOfPages for one that leaves none in the cache.
    """
    first, kept = min(1, asked), "one" if asked else "none"
    if count + first > context:
        raise ValueError(f"{name} has {count} tokens, the context is {context}, {kept} of them for the answer; shorten the prompt")
    if count + first > capacity:
        raise OutOfPages(f"{name} has {count} tokens and the cache holds {capacity}, {kept} of them for the answer; give a larger cache_gib")
    return min((asked, "max_tokens"), (context - count, "context"), (capacity - count, "cache"), key=operator.itemgetter(0))


def check_asked(name: str, ids: list[int], params: SamplingParams, priority: int, vocab: int, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError for tokens of a prompt, or of its params, that are not of the vocabulary, for text to look for where there is none, and for a priority
    that is no number."""
    if not isinstance(priority, Integral):
        raise ValueError(f"{name} has priority {priority!r:.60}; give an integer, larger ones run first")
    if params.stop and tokenizer is None:
        raise ValueError(f"{name} has stop strings and this model has no tokenizer.json; add it, or give stop_token_ids instead of stop")
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"{name} has token ids from {min(ids)} to {max(ids)}; the vocabulary is 0 to {vocab - 1}")
    for what, given in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if given and max(given) >= vocab:
            raise ValueError(f"{name}: {what} has token {max(given)}; the vocabulary is 0 to {vocab - 1}")
