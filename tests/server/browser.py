"""Headless Chromium over its debugging pipe: enough of the protocol to open a page, run JavaScript in it and take a screenshot."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from pathlib import Path

from live import PATIENCE, until

from onchip.core import settings

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--remote-debugging-pipe")


class Browser:
    """A page of its own process: `with Browser(folder) as page`."""

    def __init__(self, folder: Path):
        (asks, self._out), (self._in, tells) = os.pipe(), os.pipe()
        asks, tells = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (asks, tells))  # out of the way of 3 and 4, where Chromium looks for its pipes
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, asks, 3), (os.POSIX_SPAWN_DUP2, tells, 4)]
        arguments = [PROGRAM, *FLAGS, "--window-size=1280,860", f"--user-data-dir={folder}", "about:blank"]
        self._pid = os.posix_spawn(PROGRAM, arguments, settings.of_child(), file_actions=actions)
        os.close(asks)
        os.close(tells)
        self._held, self._count, self._session = b"", 0, None
        self.complaints: list[str] = []  # what the console and the security policy said
        pages = until(lambda: [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"])
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params) -> dict:
        """One command and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._count:
                assert "error" not in heard, heard["error"]
                return heard["result"]
            if heard.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(heard["params"]["exceptionDetails"]))
            elif heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
                self.complaints.append(heard["params"]["entry"]["text"])

    def _hear(self) -> dict:
        while b"\0" not in self._held:
            assert select.select([self._in], [], [], PATIENCE)[0], "Chromium says nothing"
            read = os.read(self._in, 1 << 20)
            assert read, "Chromium has ended"
            self._held += read
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
