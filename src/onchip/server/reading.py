"""Text before it becomes tokens: what is no Unicode, or far too long, is refused before it is read whole."""

from collections.abc import Callable
from pathlib import Path

BEGINNING = 8  # characters for each token allowed: of English twice as many as fit
SLACK = 64  # tokens that a cut may make more


def read_text(option: str, path: Path) -> str:
    """The text of a file that a command was given as `option`. Raises ValueError for one that cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read ({error.strerror}); give a file of text") from None


def check_text(name: str, text: str, most: int, read: Callable[[str], list[int]]) -> None:
    """Raise ValueError for half of a surrogate pair, and for text whose beginning alone has more than `most` tokens: 4 MB would take 10 s to be read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no Unicode at character {error.start}: half of a surrogate pair; send whole characters") from None
    size = BEGINNING * most
    while size < len(text):
        if (count := len(read(text[:size]))) > most + SLACK:
            raise ValueError(f"{name} has {len(text)} characters, {count} tokens in the first {size} of them, and this server takes {most}; shorten it")
        size *= 4
