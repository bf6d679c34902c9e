"""`install`: the modules `flash_attn`, `flash_attn_interface` and `flash_attn.cute`, and their undo."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOME = "onchip.integrations.flash_attn"
FA2, FA3, FA4 = "2.8.4", "3.0.0", "4.0.0"  # the versions whose functions these are
OWN = {"flash_attn", "flash_attn_interface", "flash_attn_3"}  # what is taken away, children included, while ours stand there

MODULES = {  # name -> (our modules whose names it has, version)
    "flash_attn": (["fa2"], FA2),
    "flash_attn.flash_attn_interface": (["fa2", "fa2_private"], FA2),
    "flash_attn.bert_padding": (["bert_padding"], FA2),
    "flash_attn.layers": ([], FA2),
    "flash_attn.layers.rotary": (["rotary"], FA2),
    "flash_attn.ops": ([], FA2),
    "flash_attn.ops.triton": ([], FA2),
    "flash_attn.ops.triton.rotary": (["rotary"], FA2),
    "flash_attn_interface": (["fa3", "fa3_private"], FA3),
    "flash_attn_3": (["fa3", "fa3_private"], FA3),
    "flash_attn_3.flash_attn_interface": (["fa3", "fa3_private"], FA3),
    "flash_attn.cute": (["fa4"], FA4),
    "flash_attn.cute.interface": (["fa4", "fa4_private"], FA4),
}

_before: dict[str, ModuleType] = {}  # what stood there
_ours: dict[str, ModuleType] = {}  # empty while nothing is installed
_libraries: list[Any] = []  # operators live as long as these


def install() -> None:
    """Put the modules into `sys.modules`, for whoever imports them from now on, and the operators into `torch.ops.flash_attn_3`.

    An installed flash-attn steps aside, all of its modules, until `uninstall`. A second `install` changes nothing. Names imported
    before keep what they have, and so does what libraries found out before (transformers asks the metadata of packages, not modules).
    """
    if _ours:
        return
    made = {name: _module(name, *what) for name, what in MODULES.items()}
    _before.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] in OWN})
    for name in _before:
        del sys.modules[name]
    _ours.update(made)
    sys.modules.update(made)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    _libraries.append(importlib.import_module(f"{HOME}.fa3_private").register())


def uninstall() -> None:
    """Take the modules away and put back what stood there. Raises RuntimeError when someone replaced ours meanwhile, and then changes nothing."""
    foreign = [name for name, module in _ours.items() if sys.modules.get(name) is not module]
    if foreign:
        raise RuntimeError(f"uninstall: {', '.join(foreign)} in sys.modules is no longer the module that install() put there; undo what came after it first")
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN] if _ours else ():
        del sys.modules[name]
    sys.modules.update(_before)
    for library in filter(None, _libraries):
        library._destroy()
    _libraries.clear()
    _before.clear()
    _ours.clear()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a `with` block; inside another install it changes nothing."""
    outer = bool(_ours)
    install()
    try:
        yield
    finally:
        if not outer:
            uninstall()


def _module(name: str, sources: list[str], version: str) -> ModuleType:
    """A module of that name with all that `sources` have; a package where it has children."""
    module = ModuleType(name)
    for source in reversed(sources):  # the first one's text and file stay
        origin = importlib.import_module(f"{HOME}.{source}")
        module.__dict__.update({key: value for key, value in vars(origin).items() if not (key.startswith("__") and key.endswith("__"))})
        module.__doc__, module.__file__ = origin.__doc__, origin.__file__
    is_package = any(other.startswith(f"{name}.") for other in MODULES)
    module.__spec__ = ModuleSpec(name, None, origin=module.__dict__.get("__file__"), is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = []
    module.__version__ = version
    return module
