"""Text from tokens, held back while it may still be the beginning of a stop string."""

from collections.abc import Sequence


class StopText:
    """The text of a request. `push` and `finish` return what is certain; `stopped` is set where a stop string came, which is not part of the text. In that of
    the first `free` tokens none is looked for."""

    def __init__(self, stream, stop: Sequence[str], free: int = 0):
        self._stream, self._stop = stream, tuple(stop)
        self._longest = max((len(s) - 1 for s in self._stop), default=0)
        self._firsts = {s[0] for s in self._stop}
        self._held, self._free = "", free
        self._out: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """What has come out so far."""
        self._out = ["".join(self._out)]
        return self._out[0]

    def push(self, token: int) -> str:
        new = self._stream.push(token)
        if self._stop and self._free <= 0:
            return self._emit(new, last=False)
        self._free -= 1
        self._out.append(new)
        return new

    def finish(self) -> str:
        return self._emit(self._stream.finish(), last=True)

    def _emit(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        hits = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            self.stopped = True
            out = self._held[: min(hits)]
        elif last:
            out = self._held
        else:
            out = self._held[: len(self._held) - self._may_begin_stop()]
        self._held = self._held[len(out) :]
        self._out.append(out)
        return out

    def _may_begin_stop(self) -> int:
        """Length of the longest tail of the held text that a stop string begins with."""
        tail = self._held[-self._longest :] if self._longest else ""
        if self._firsts.isdisjoint(tail):
            return 0
        for size in range(len(tail), 0, -1):
            if any(s.startswith(tail[-size:]) for s in self._stop):
                return size
        return 0


class NoText:
    """The stream of a model without a tokenizer: token ids only."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
