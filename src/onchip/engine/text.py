"""Text from tokens, held back while it may still be the beginning of a stop string."""

from collections.abc import Sequence


class StopText:
    """The text of a request. `push` and `finish` return what is certain; `stopped` is set where a stop string came, which is not part of the text."""

    def __init__(self, stream, stop: Sequence[str]):
        self._stream, self._stop = stream, tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        return self._emit(self._stream.push(token), last=False)

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
        self.text += out
        return out

    def _may_begin_stop(self) -> int:
        """Length of the longest tail of the held text that a stop string begins with."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0


class NoText:
    """The stream of a model without a tokenizer: token ids only."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
