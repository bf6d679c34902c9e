"""A server in this process, on a free port of this machine."""

import socket
import threading
import time

import httpx
import openai

from onchip.server.run import Server

PATIENCE = 120.0  # seconds for what takes one on a quiet machine: only a test that fails waits so long


class Live:
    """`with Live(app) as live`: `live.client` is OpenAI's own, `live.http` is httpx at its address."""

    def __init__(self, app, drain: float = 5):
        self._server = Server(app, drain, port=0, log_level="critical")
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "Live":
        self._thread.start()
        until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.address, timeout=PATIENCE)
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        return self

    def __exit__(self, *_) -> None:
        self.client.close()
        self.http.close()
        self.end()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not end"

    def end(self) -> None:
        """What SIGTERM does."""
        self._server.should_exit = True

    def takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def stats(self) -> dict:
        return self.http.get("/stats").json()


def until(condition, seconds: float = PATIENCE):
    """The first true value of `condition()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError("it did not come true")


def slow(monkeypatch, llm) -> None:
    """Each step of `llm` takes 10 ms or more: an answer of 400 tokens is left in its middle on any machine."""
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: (time.sleep(0.01), step())[1])
