"""Token ids of what a user gives as a prompt."""

import operator
from collections.abc import Iterable, Mapping, Sequence

from onchip.models.tokenizer import Tokenizer


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
        if not prompt.strip():
            raise ValueError(f"{name} is empty; give at least one word")
        if tokenizer is None:
            raise ValueError(f"{name} is text and this model has no tokenizer.json; add it, or give token ids instead of text")
        ids = tokenizer.chat([{"role": "user", "content": prompt}], settings=settings) if chat else tokenizer.encode(prompt)
    elif chat:
        if tokenizer is None or not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
            raise ValueError(f"{name} is {prompt!r:.60} with chat=True; give a user's message as text, or a list of {{'role': ..., 'content': ...}}")
        ids = tokenizer.chat(prompt, settings=settings)
    elif isinstance(prompt, Iterable) and not isinstance(prompt, Mapping):
        try:
            ids = list(map(operator.index, prompt))
        except TypeError as error:
            raise ValueError(f"{name} has a token id that is no integer ({error}); give a list like [1, 2, 3]") from None
    else:
        raise ValueError(f"{name} is {prompt!r:.60}; give text or a list of token ids, as in [[1, 2, 3]]; of a chat, [messages] with chat=True")
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token")
    return ids
