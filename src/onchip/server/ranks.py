"""`onchip serve --tensor-parallel N`: one engine on N GPUs of this machine, a process each. This one is rank 0 and has the server; the others are started by it
and repeat its steps (`engine/parallel.py`).

Nobody else has a rank's part of the model, so that the server ends where one of them does. They end with the server, however that ends: their standard
input closes then.
"""

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from onchip.cache.paged import OutOfPages
from onchip.core import settings
from onchip.models import weights
from onchip.models.families import ModelConfig
from onchip.models.parallel import TensorParallel

if TYPE_CHECKING:
    from onchip.server.run import Recipe

GRACE = 3.0  # seconds that this process has to say itself what is wrong, where a rank has ended
PAUSE = 1.5  # seconds that a rank waits before it says so: mostly the server says the same, and ends, and the rank with it


class Seat(NamedTuple):
    """One process's place: its rank of `of`, its device, and the folder in which all meet."""

    rank: int
    of: int
    device: str
    folder: str

    def take(self) -> TensorParallel:
        """Join the others; all come back together."""
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // self.of))
        if sys.platform == "linux":
            settings.unless_set("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, and nobody else is to reach them
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{self.folder}/store", rank=self.rank, world_size=self.of)
        return TensorParallel.join()


def start(recipe: "Recipe") -> Seat:
    """Start the other ranks of a server. Raises ValueError before, for more ranks than GPUs, and for a model that cannot be cut in so many parts."""
    devices = devices_of(recipe.engine["device"], recipe.ranks)
    config = ModelConfig.read(weights.read_config(weights.locate(recipe.engine["model"])))
    TensorParallel(0, recipe.ranks).share(config)
    folder = tempfile.mkdtemp(prefix="onchip-ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after a signal it is the other ranks that do it
    own, *others = [Seat(rank, recipe.ranks, device, folder) for rank, device in enumerate(devices)]
    threading.Thread(target=_watch, args=([_process(recipe, seat) for seat in others], folder), name="onchip-ranks", daemon=True).start()
    return own


def devices_of(device: str | None, ranks: int) -> list[str]:
    """A device for each rank. Raises ValueError."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device is {device} and each rank of --tensor-parallel has its own GPU; give --device cuda, or cpu")
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return ["cpu"] * ranks
    if ranks > (count := torch.cuda.device_count()):
        raise ValueError(f"--tensor-parallel is {ranks} and this machine has {count} GPUs; give at most as many")
    return [f"cuda:{rank}" for rank in range(ranks)]


def _process(recipe: "Recipe", seat: Seat) -> subprocess.Popen:
    """Another rank: apart from the terminal, whose Ctrl-C is for the server alone, and as the server without the folder it is in among its imports."""
    process = subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, start_new_session=True)
    process.stdin.write(pickle.dumps((recipe, seat)))
    process.stdin.flush()  # and it stays open
    return process


def _watch(others: list[subprocess.Popen], folder: str) -> None:
    """End this process when one of the others has, but for those that were let go."""
    while True:
        for rank, process in enumerate(others, 1):
            if process.poll():
                time.sleep(GRACE)
                print(f"rank {rank} has ended ({process.returncode}), and with it the engine: the server ends", file=sys.stderr, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
        time.sleep(0.2)


def main() -> None:
    """A rank but the first, until that lets it go. It ends by `os._exit`: Python's own end would wait for the thread that reads."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is meant for all of a service's processes: answers on their way need this one
    recipe, seat = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_server, args=(seat.folder,), daemon=True).start()
    status = 1
    try:
        recipe.engine_at(seat).follow()
        dist.destroy_process_group()
        status = 0
    except (ValueError, OutOfPages) as error:
        time.sleep(PAUSE)
        print(f"rank {seat.rank}: {error}", file=sys.stderr, flush=True)
    except Exception:  # all others: a bug's traceback is this rank's, one of a server that has gone is nobody's
        time.sleep(PAUSE)
        traceback.print_exc()
    shutil.rmtree(seat.folder, ignore_errors=True)
    os._exit(status)


def _end_with_server(folder: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
