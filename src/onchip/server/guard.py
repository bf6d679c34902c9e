"""What stands before every route: API keys and the size of a body. Plain ASGI, so that a stream passes through untouched."""

import hashlib
import hmac
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onchip.server import errors
from onchip.server.reading import read_text

OPEN = ("/", "/health")  # what needs no key


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are left out. As digests: no key stays in memory."""
    keys = [line.strip() for line in read_text("--api-keys", path).splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ValueError(f"--api-keys {path} holds no key; write one a line, or leave the option out")
    return tuple(_digest(key.encode()) for key in keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """An app behind its checks. keys: digests of `read_keys`, none for an open server; max_body: bytes."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...], max_body: int):
        self.app, self.keys, self.max_body = app, keys, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if self.keys and scope["path"] not in OPEN and not self._known(headers.get(b"authorization", b"")):
            refused = errors.respond(401, "the API key is missing or unknown; send one as 'Authorization: Bearer KEY'", code="invalid_api_key")
        elif not length.isdigit() or int(length) > self.max_body:
            refused = errors.respond(413, self._too_large(length.decode("latin-1")))
        else:
            await self._counted(scope, receive, send)
            return
        await refused(scope, receive, send)

    def _known(self, header: bytes) -> bool:
        kind, _, key = header.partition(b" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, known) for known in self.keys]  # all of them: no time tells which came near
        return kind.lower() == b"bearer" and any(found)

    def _too_large(self, size: str) -> str:
        return f"the body has {size} bytes and this server takes {self.max_body}; send less, or start it with a larger --max-body"

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a body whose length was not told for as long as it keeps to the limit."""
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                raise HTTPException(413, self._too_large(f"more than {self.max_body}"))
            return message

        await self.app(scope, counting, send)
