"""Whether a transformers model calls the attention interface, or computes attention for itself.

No attribute of a class says that, so its source is read, as transformers does in `set_attn_implementation`, but class by class.
"""

import functools
import inspect
import re
import sys
from typing import Any

from transformers.modeling_utils import PreTrainedModel

ATTENTION = re.compile(r"class \w*Attention\w*\((torch\.)?nn\.Module\)")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
UNTOLD = re.compile(r"is_causal: [\w |]+ = False")  # whether attention is causal is not known from it alone
TABLE = re.compile(r"(?<!FUNCTIONS)\[[\w.]*_attn_implementation\]")  # of a model's own classes, which a new name is not in


def interface_of(model: type[PreTrainedModel]) -> str:
    """Of a class: "calls", or "none" where it attends for itself. "calls beside its own" where masks have to be there, as floats: some layers add them to
    scores of their own, or are causal by them alone. Where no source tells, as in a notebook, it is "calls".
    """
    parts = _made_of(model)
    own = [part for part in parts if ATTENTION.match(part) and INTERFACE not in part]
    if own and (any(map(TABLE.search, parts)) or not any(INTERFACE in part for part in parts)):
        return "none"
    if model._supports_sdpa:  # whose masks are bool, and may be None: models that take them add none, and say themselves that they are causal
        return "calls"
    return "calls beside its own" if any("softmax" in part for part in own) or any(map(UNTOLD.search, parts)) else "calls"


def _made_of(model: type[PreTrainedModel]) -> list[str]:
    """The sources of it, of the models with which it may share a config, and so an implementation, and of all in their modules that they name."""
    bases = model.__mro__[: model.__mro__.index(PreTrainedModel)]
    near = {kind for base in bases for kind in (base, *vars(sys.modules.get(base.__module__, base)).values()) if _is_model(kind)}
    alike = [kind for kind in near if kind in bases or kind.config_class is model.config_class or _holds(model, kind)]
    named, parts = [(kind.__module__, kind.__name__) for kind in alike if "__init__" in vars(kind)], {}  # others make nothing, and name much in lists
    while named:
        module, name = key = named.pop()
        if key not in parts and name in _defined(module):
            parts[key] = _defined(module)[name]
            named += [(module, word) for word in re.findall(r"\w+", parts[key]) if not _is_model(getattr(sys.modules[module], word, None))]
    return list(parts.values())


def _holds(model: type[PreTrainedModel], kind: type[PreTrainedModel]) -> bool:
    """Whether an imported model may be made from the config of this one."""
    return kind.__module__ != model.__module__ and _is_class(model.config_class, kind.config_class)


def _is_model(kind: Any) -> bool:
    return _is_class(kind, PreTrainedModel) and kind is not PreTrainedModel


def _is_class(kind: Any, base: Any) -> bool:
    return isinstance(kind, type) and isinstance(base, type) and issubclass(kind, base)


@functools.cache
def _defined(module: str) -> dict[str, str]:
    """The source of each class, function and table of a module; none for one of a notebook."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    parts = re.split(r"^(?=class |def |@|\w+ = )", source, flags=re.MULTILINE)[1:]
    return {found[1]: part for part in parts if (found := re.match(r"(?:class |def )?(\w+)", part))}
