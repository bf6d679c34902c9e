"""From options to a running process: what a server is made of, uvicorn, file descriptors, a graceful end."""

import asyncio
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onchip.engine.llm import LLM
from onchip.engine.parallel import ParallelLLM
from onchip.models.lora import Adapter, AdapterSlots
from onchip.server.app import Front, Limits, build, check_names
from onchip.server.embeddings import Embeddings
from onchip.server.guard import Guard
from onchip.server.ranks import Seat, start

LAST_WORDS = 5.0  # seconds for a step of the engine to end and for clients to read what became of their answers
MOST_HEAD = 1 << 16  # bytes of a request line and its headers


@dataclass(frozen=True)
class Recipe:
    """What a server is made of, before anything is loaded: it can go to another process.

    name       what requests call the model; None: its folder's or file's name.
    engine     arguments of `LLM`.        adapters   {name: folder of PEFT's}.
    encoder    for /v1/embeddings: "minilm", or a folder. None: there are no embeddings.
    ranks      GPUs of this machine that have the model together.
    """

    name: str | None
    engine: dict[str, Any]
    limits: Limits = Limits()
    keys: tuple[bytes, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    encoder: str | None = None
    ranks: int = 1

    def build(self, front: type[Front] = Front, progress: Callable[[int, int], None] | None = None) -> Guard:
        """The app, with its model loaded. Raises as `LLM` does, and as `ranks.start`."""
        name = self.name or served_name(self.engine["model"])
        check_names([name, *self.adapters, *([served_name(self.encoder)] if self.encoder else [])])
        if self.ranks > 1:
            llm = self.engine_at(start(self), embedder=self.encoder, progress=progress)
        else:
            llm = LLM(**self.engine, adapters=self._room(), embedder=self.encoder, progress=progress)
        for adapter, folder in self.adapters.items():
            llm.load_adapter(folder, adapter)
        if llm.device.type == "cuda":
            print("warming up: steps of all sizes, so that no request waits for a kernel to be compiled", file=sys.stderr, flush=True)
            print(f"warm: {llm.warm()}", file=sys.stderr, flush=True)
        embeddings = Embeddings(llm.embedder, served_name(self.encoder)) if self.encoder else None
        return build(llm, name, limits=self.limits, keys=self.keys, embeddings=embeddings, front=front)

    def engine_at(self, seat: Seat, **how) -> ParallelLLM:
        """A rank's part of the engine. All ranks come back together."""
        return ParallelLLM(**self.engine | {"device": seat.device}, adapters=self._room(), parallel=seat.take(), **how)

    def _room(self) -> AdapterSlots | None:
        ranks = [Adapter.read(folder, name).rank for name, folder in self.adapters.items()]
        return AdapterSlots(len(ranks), max(ranks)) if ranks else None


def served_name(model: str | None) -> str:
    """What requests call a model unless --name says otherwise: never a path of this machine."""
    if model is None:
        return "smollm2"
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def check_address(host: str, port: int) -> None:
    """Raises ValueError where a server could not listen: this is asked before a model is read, which may take minutes."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is {port}; give 1 to 65535, or 0 for any that is free")

    async def bind() -> None:
        (await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)).close()

    try:
        asyncio.run(bind())
    except (OSError, UnicodeError) as error:  # the latter of a name that is none
        why = getattr(error, "strerror", error)
        raise ValueError(f"--host {host} --port {port}: {why}; give an address of this machine, and a port that is free (0: any)") from None


class Http(HttpToolsProtocol):
    """uvicorn's, with an end to what a client may send before its body: httptools keeps a header until it is whole, and asyncio would go on reading."""

    head = -1  # bytes of a head that is not complete, but for the first that came; -1: none is on its way

    def data_received(self, data: bytes) -> None:
        begun = self.head >= 0  # before these bytes: those of a body may come first
        super().data_received(data)
        if begun and self.head >= 0:
            self.head += len(data)
            if self.head > MOST_HEAD and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                self.transport.close()

    def on_message_begin(self) -> None:
        self.head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.head = -1
        super().on_headers_complete()


class Server(uvicorn.Server):
    """uvicorn's, with another end: after `drain` seconds uvicorn would cancel its tasks, each with a traceback, and clients would not hear why."""

    def __init__(self, app: Guard, drain: float, **how):
        super().__init__(uvicorn.Config(app, http=Http, **how))
        self._app, self._drain = app, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.create_task(self._cut())
        await super().shutdown(sockets)
        cut.cancel()

    async def _cut(self) -> None:
        """End the answers that are left, whose clients are told, and then the connections of clients that do not read."""
        await asyncio.sleep(self._drain)
        left = self._app.app.state.front.serving.end()
        if left:
            print(f"--drain {self._drain:g}: {left} answers were on their way after so many seconds and end here; give them more", file=sys.stderr, flush=True)
        await asyncio.sleep(LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def run(app: Guard, host: str, port: int, drain: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then no connection is taken, and answers on their way have `drain` seconds to end."""
    room_for_connections()
    # one access line a request would cost more than a decode step of a small model
    server = Server(app, drain, host=host, port=port, access_log=False, backlog=4096)
    with suppress(KeyboardInterrupt):  # raised again by uvicorn once the server has ended
        server.run()
    if not server.started:
        raise SystemExit(3)  # as uvicorn's own command has it


def room_for_connections() -> None:
    """As many open sockets as the system allows: 1,024 is a common default, and each queued request holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
