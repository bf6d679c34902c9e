"""Modules of ours under other libraries' names: what `install` and `uninstall` of a drop-in do with `sys.modules`."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandIns:
    """The modules of one drop-in.

    home      the package whose modules have what is shown.
    modules   name -> (modules of `home`, all of whose names it has; version).
    library   makes operators in `torch.ops` that live while the modules stand there, and gives what holds them; or None.
    """

    def __init__(self, home: str, modules: dict[str, tuple[list[str], str]], library: Callable[[], Any] | None = None):
        self.home, self.modules, self.library = home, modules, library
        self.own = {name.partition(".")[0] for name in modules}  # taken away, children included, while ours stand there
        self._before: dict[str, ModuleType] = {}  # what stood there
        self._ours: dict[str, ModuleType] = {}  # empty while nothing is installed
        self._held: list[Any] = []

    def install(self) -> None:
        """Put the modules into `sys.modules`, for whoever imports them from now on.

        An installed library of that name steps aside, all of its modules, until `uninstall`. A second `install` changes nothing. Names imported
        before keep what they have, and so does what libraries found out before (transformers asks the metadata of packages, not modules).
        """
        if self._ours:
            return
        made = {name: self._module(name, *what) for name, what in self.modules.items()}
        self._before.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] in self.own})
        for name in self._before:
            del sys.modules[name]
        self._ours.update(made)
        sys.modules.update(made)
        for name, module in made.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, module)
        if self.library is not None:
            self._held.append(self.library())

    def uninstall(self) -> None:
        """Take the modules away and put back what stood there. Raises RuntimeError when someone replaced ours meanwhile, and then changes nothing."""
        foreign = [name for name, module in self._ours.items() if sys.modules.get(name) is not module]
        if foreign:
            raise RuntimeError(
                f"uninstall: {', '.join(foreign)} in sys.modules is no longer the module that install() put there; undo what came after it first"
            )
        for name in [name for name in sys.modules if name.partition(".")[0] in self.own] if self._ours else ():
            del sys.modules[name]
        sys.modules.update(self._before)
        for held in filter(None, self._held):
            held._destroy()
        for kept in (self._held, self._before, self._ours):
            kept.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """`install` for the length of a `with` block; inside another install it changes nothing."""
        outer = bool(self._ours)
        self.install()
        try:
            yield
        finally:
            if not outer:
                self.uninstall()

    def _module(self, name: str, sources: list[str], version: str) -> ModuleType:
        """A module of that name with all that `sources` have; a package where it has children."""
        module = ModuleType(name)
        for source in reversed(sources):  # the first one's text and file stay
            origin = importlib.import_module(f"{self.home}.{source}")
            module.__dict__.update({key: value for key, value in vars(origin).items() if not (key.startswith("__") and key.endswith("__"))})
            module.__doc__, module.__file__ = origin.__doc__, origin.__file__
        is_package = any(other.startswith(f"{name}.") for other in self.modules)
        module.__spec__ = ModuleSpec(name, None, origin=module.__dict__.get("__file__"), is_package=is_package)
        module.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            module.__path__ = []
        module.__version__ = version
        return module
