"""What keys of a model's files, and options, may hold: a table for each, looked at before anything is computed of their values."""

import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple

import torch

from onchip.models.gguf import ModelError

MOST = 2**31 - 1  # of a count: the device has int32


class Kind(NamedTuple):
    """What `accepted` says, and whether a value is of it."""

    accepted: str
    fits: Callable[[Any], bool]

    def or_none(self, none: str = "null") -> "Kind":
        return Kind(f"{self.accepted}, or {none}", lambda value: value is None or self.fits(value))


def is_whole(value: object, least: int = 0, most: int = MOST) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, above: float = -sys.float_info.max, most: float = sys.float_info.max) -> bool:
    """Neither NaN nor an infinity, and more than `above`."""
    return isinstance(value, Real) and not isinstance(value, bool) and above < value <= most


def of_type(accepted: str, *types: type) -> Kind:
    return Kind(accepted, lambda value: isinstance(value, types))


def mapping_of(accepted: str, fits: Callable[[Any], bool]) -> Kind:
    return Kind(accepted, lambda value: isinstance(value, Mapping) and all(map(fits, value.values())))


def records(*keys: str) -> Kind:
    def fits(one: object) -> bool:
        return isinstance(one, Mapping) and all(isinstance(one.get(key), str) for key in keys)

    return Kind(f"a list of objects with the texts {' and '.join(keys)}", lambda value: isinstance(value, list) and all(map(fits, value)))


COUNT = Kind("a positive integer", lambda value: is_whole(value, 1))
INDEX = Kind("an integer of 0 or more", is_whole)
NUMBER = Kind("a number", is_number)
UNSIGNED = Kind("a number of 0 or more", lambda value: is_number(value) and value >= 0)
POSITIVE = Kind("a number above 0", lambda value: is_number(value, 0))
SHARE = Kind("a number above 0, at most 1", lambda value: is_number(value, 0, 1))
NUMBERS = Kind("a list of numbers above 0", lambda value: isinstance(value, list) and bool(value) and all(is_number(one, 0) for one in value))
TEXT, TEXTS = of_type("text", str), Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
SWITCH, OBJECT = of_type("true or false", bool), of_type("an object", Mapping)
DEVICE = of_type("cpu, cuda or cuda:N", str, torch.device, NoneType)


def check_keys(file: object, found: Mapping[str, Any], table: Mapping[str, Kind]) -> None:
    """Raises ModelError for a key of `table` that holds anything else; what is not there counts as null.

    file   what the error calls the object.
    """
    for key, kind in table.items():
        if not kind.fits(found.get(key)):
            raise ModelError(f"{file}: {key} is {found.get(key)!r:.60}; it must be {kind.accepted}")


def check_options(name: str, given: Mapping[str, Any], table: Mapping[str, Kind]) -> None:
    """Raises ValueError for an option that is something else than `table` has for it; `name`: whose options they are, with the ": " behind it, or ""."""
    for option, value in given.items():
        if not table[option].fits(value):
            raise ValueError(f"{name}{option} is {value!r:.60}; give {table[option].accepted}")
