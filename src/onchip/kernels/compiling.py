"""Kernels of Triton as they are compiled: how many were, and many at once, asked for by launches that are withheld.

To compile one of the largest takes 2 to 3 s of a core, of which Triton holds Python's lock for a fifth, while it reads the kernel's source: so threads help.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

MOST = 16  # threads: with more the one that holds Python's lock is what the others wait for
PATCHING = threading.Lock()  # of who changes what a launch does: launches are withheld here, and written down in `again.py`


class Compilations:
    """Of this process, since `watch`: kernels that were `compiled`, and those that were `loaded` from Triton's cache on disk."""

    def __init__(self):
        self.compiled = self.loaded = 0
        self._lock, self._watches = threading.Lock(), False
        self._read: threading.Thread | None = None

    def watch(self) -> None:
        """Count from now on. Whoever listened to Triton before still does."""
        if self._watches:
            return
        from triton import knobs  # here: there is none on some systems without a GPU
        from triton.runtime.cache import triton_key

        self._read = threading.Thread(target=triton_key, daemon=True)  # its own files, 400 MB: 0.4 s in which others run
        self._read.start()
        self._watches, before = True, knobs.compilation.listener

        def listener(*, cache_hit: bool, **told) -> None:
            with self._lock:
                self.loaded += cache_hit
                self.compiled += not cache_hit
            if before is not None:
                before(cache_hit=cache_hit, **told)

        knobs.compilation.listener = listener

    def wait(self) -> None:
        """Until Triton has read its own files, which names what it keeps: else each thread that compiles would read them."""
        if self._read is not None:
            self._read.join()


compilations = Compilations()


@contextmanager
def withheld() -> Iterator[set[tuple]]:
    """Launches of Triton's kernels inside do nothing but ask for what is to be compiled; threads do that meanwhile, and the end waits for them.

    What comes back grows by each kernel that was asked for and was not there. Outputs of a launch that was withheld hold anything, and it gives None.
    Raises what a compilation raises, at the end.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    compilations.wait()
    asked, run, compile_one = set(), JITFunction.run, JITFunction._do_compile

    def ask(self, *args, grid, warmup, **options) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    def compile_once(self, key, signature, device, *how):
        made = compile_one(self, key, signature, device, *how)
        self.device_caches[device][0].setdefault(key, made)  # else each launch would ask again until the end
        asked.add((self.__name__, key))
        return made

    with PATCHING, ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
        JITFunction.run, JITFunction._do_compile = ask, compile_once
        try:
            yield asked
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_one
