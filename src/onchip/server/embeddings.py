"""/v1/embeddings: an encoder beside the language model. It runs in the engine's thread between steps, since a graph may be captured at any of them."""

import asyncio
import base64
import sys

from torch import Tensor

from onchip.models.encoder import Embedder, batches
from onchip.server.reading import check_text
from onchip.server.replies import sliced
from onchip.server.schemas import EmbeddingRequest
from onchip.server.serving import Serving

MOST_TEXTS = 2048  # of a call, as OpenAI has it
BETWEEN_STEPS = 2048  # tokens: answers on their way wait no longer than for a chunk of a prompt


class Embeddings:
    """An encoder under a name."""

    def __init__(self, embedder: Embedder, name: str):
        self.embedder, self.name = embedder, name

    async def answer(self, body: EmbeddingRequest, serving: Serving) -> bytes:
        """OpenAI's object as JSON. Raises ValueError for what cannot be embedded, and Overloaded."""
        ids = await asyncio.to_thread(self._read, body)
        rows = [row for batch in batches(ids, BETWEEN_STEPS) for row in await serving.between_steps(lambda batch=batch: self.embedder.embed(batch).cpu())]
        return await asyncio.to_thread(self._object, rows, body.encoding_format, sum(map(len, ids)))

    def _object(self, rows: list[Tensor], form: str | None, tokens: int) -> bytes:
        """Row by row, so that the event loop's thread gets its turns: 2,048 rows at once would hold the interpreter for 0.9 s."""
        data = [{"object": "embedding", "index": i, "embedding": _written(row, form)} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return sliced({"object": "list", "model": self.name, "data": data, "usage": usage}, depth=2).encode()

    def _read(self, body: EmbeddingRequest) -> list[list[int]]:
        """Token ids of each input; none is cut off in silence."""
        e = self.embedder
        if len(body.input) > MOST_TEXTS:
            raise ValueError(f"input has {len(body.input)} texts; give at most {MOST_TEXTS} a call")
        if body.dimensions not in (None, e.dim):
            raise ValueError(f"dimensions is {body.dimensions} and the model's are {e.dim}; leave it out")
        found = [self._framed(i, one) if isinstance(one, str) else one for i, one in enumerate(body.input)]
        for i, ids in enumerate(found):
            if not ids or len(ids) > e.max_len:
                raise ValueError(f"input {i} has {len(ids)} tokens; give 1 to {e.max_len}")
            if min(ids) < 0 or max(ids) >= e.config.vocab:
                raise ValueError(f"input {i} has token ids from {min(ids)} to {max(ids)}; the vocabulary is 0 to {e.config.vocab - 1}")
        return found

    def _framed(self, i: int, text: str) -> list[int]:
        def read(part: str) -> list[int]:
            return self.embedder.tokenizer.frame(part, sys.maxsize)

        check_text(f"input {i}", text, self.embedder.max_len, read)
        return read(text)


def _written(row, form: str | None) -> list[float] | str:
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode() if form == "base64" else row.tolist()
