"""An engine on several ranks: requests come to rank 0, and every rank runs the same engine on its share of the model.

What runs in a step depends on the requests and their tokens alone, and all ranks draw the same tokens from the same bits. So what rank 0 hands on before
each step are requests that came or were cancelled since the last, in their order; a step without any costs one broadcast of 8 bytes between hosts' memories.
"""

import dataclasses
import datetime
import io
import pickle
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onchip.engine.grammar import Vocabulary
from onchip.engine.llm import LLM
from onchip.engine.prompt import check_request
from onchip.engine.request import Event, Request, SamplingParams
from onchip.models.parallel import TensorParallel

PATIENCE = datetime.timedelta(days=365)  # that the other ranks wait for a step


class Add(NamedTuple):
    """A request, with the seed it has on rank 0; of its grammar there are the masks."""

    number: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    masks: bytes  # of each sample, pickled


class Cancel(NamedTuple):
    number: int


class Load(NamedTuple):
    folder: str | Path
    name: str | None


class Unload(NamedTuple):
    name: str


class Forget(NamedTuple):
    """What earlier requests left."""


class Close(NamedTuple):
    """No step follows."""


Said = Add | Cancel | Load | Unload | Forget | Close


class ParallelLLM(LLM):
    """An `LLM` whose model is on all ranks of `parallel`, one process each.

    On rank 0 all is as with an `LLM`, and `close` ends it; each other rank calls `follow`, which comes back then. All ranks make it with the same arguments
    but `device`. Token masks of requests are pickled, those of grammars as their text, and every rank has a copy. A rank that fails leaves the others waiting:
    end them all. So a step that has no memory raises here, where an `LLM` ends the requests that asked for it.

        parallel = TensorParallel.join()        # after torch.distributed.init_process_group("nccl"), one process a GPU
        llm = ParallelLLM("model", parallel=parallel, device=f"cuda:{parallel.rank}")
        llm.follow() if parallel.rank else print(llm.generate("Hello")[0].text); llm.close()
    """

    recovers = False  # the other ranks would wait for this one's sums

    def __init__(self, model: str | Path | None = None, *, parallel: TensorParallel, **how):
        super().__init__(model, parallel=parallel, **how)
        self.parallel = parallel
        ranks = dist.get_process_group_ranks(parallel.group)
        self._first, self._hosts = ranks[0], dist.new_group(ranks, timeout=PATIENCE, backend="gloo")
        self._said: list[Said] = []  # since the last step
        self._numbers: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()  # of the first samples of requests
        self._count = 0

    # ---- rank 0

    def add(self, request: Request) -> None:
        """As `LLM.add`. Raises ValueError for masks that cannot be pickled."""
        check_request("add", request)
        first, masks = request.samples[0], io.BytesIO()
        try:
            _Pickler(masks).dump([sample.mask for sample in request.samples])
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"add: the request's mask cannot go to the other ranks ({error}); give one that can be pickled") from None
        self._mask(request, masks.getvalue())
        super().add(request)
        if first.reason is not None:  # cancelled before, all samples of it: nothing was queued
            return
        self._numbers[first], self._count = self._count, self._count + 1
        params = dataclasses.replace(request.params, seed=first.seed, grammar=None)
        self._said.append(Add(self._numbers[first], first.prompt, params, first.priority, masks.getvalue()))

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        if request.samples[0] in self._numbers:
            self._said.append(Cancel(self._numbers[request.samples[0]]))

    def load_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """As `LLM.load_adapter`; every rank reads the folder."""
        name = super().load_adapter(folder, name)
        self._said.append(Load(folder, name))
        return name

    def unload_adapter(self, name: str) -> None:
        super().unload_adapter(name)
        self._said.append(Unload(name))

    def forget(self) -> None:
        super().forget()
        self._said.append(Forget())

    def step(self) -> list[Event]:
        self._hand_on()
        return super().step()

    def close(self) -> None:
        """Let the other ranks go; nothing happens on those. What is still running stays unfinished."""
        if self.parallel.rank == 0:
            self._said.append(Close())
            self._hand_on()

    def _mask(self, request: Request, masks: bytes) -> None:
        """Rank 0 too has what was unpickled: a lexer that others of its grammar have used may reach its limits at another token."""
        for sample, mask in zip(request.samples, _Unpickler(self, masks).load(), strict=True):
            sample.mask = mask

    def _hand_on(self) -> None:
        if self.parallel.rank:
            raise ValueError(f"step: this is rank {self.parallel.rank}, which does what rank 0 does; call follow()")
        data = pickle.dumps(self._said) if self._said else b""
        self._said = []
        dist.broadcast(torch.tensor([len(data)], device="cpu"), self._first, group=self._hosts)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._first, group=self._hosts)

    # ---- the others

    def follow(self) -> None:
        """On a rank other than 0: repeat what rank 0 does until it closes."""
        known: dict[int, Request] = {}
        while True:
            for said in self._heard():
                match said:
                    case Add(number, prompt, params, priority, masks):
                        known[number] = request = self.request(prompt, params, priority=priority)
                        self._mask(request, masks)
                        super().add(request)
                    case Cancel(number) if number in known:
                        super().cancel(known[number])
                    case Load(folder, name):
                        super().load_adapter(folder, name)
                    case Unload(name):
                        super().unload_adapter(name)
                    case Forget():
                        super().forget()
                    case Close():
                        return
            super().step()
            known = {number: request for number, request in known.items() if any(sample.reason is None for sample in request.samples)}

    def _heard(self) -> list[Said]:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.broadcast(size, self._first, group=self._hosts)
        if not size.item():
            return []
        data = torch.empty(size.item(), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, self._first, group=self._hosts)
        return pickle.loads(data.numpy().tobytes())


class _Pickler(pickle.Pickler):
    """What every rank has itself goes by its name."""

    def persistent_id(self, thing: Any) -> str | None:
        return "vocabulary" if isinstance(thing, Vocabulary) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, llm: ParallelLLM, data: bytes):
        super().__init__(io.BytesIO(data))
        self._llm = llm

    def persistent_load(self, name: str) -> Any:
        return getattr(self._llm, name)
