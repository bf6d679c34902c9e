"""Arguments of operators as they come: tensors that are tensors, all in one place, numbers that are numbers, and no gradient that would be lost."""

from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from onchip.core.parts import is_whole


def kind_of(tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


def check_tensors(name: str, *, optional: tuple[str, ...] = (), **given: Tensor | None) -> None:
    """Each is a dense tensor of real numbers where the first one is; None where it is `optional`."""
    leader = None
    for what, t in given.items():
        if t is None and what in optional:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {what} is a {type(t).__name__}; give a tensor")
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name}: {what} is a nested or sparse tensor; give a dense one")
        if t.is_complex():  # a cast would drop the imaginary part
            raise TypeError(f"{name}: {what} is {t.dtype}; give real numbers")
        leader = leader or (what, t.device)
        if t.device != leader[1]:
            raise ValueError(f"{name}: {what} is on {t.device}, {leader[0]} on {leader[1]}; move one of them")


def check_numbers(name: str, least: float | None = None, **given: float) -> None:
    """A tensor is none: its gradient would be lost, and to read it is to wait for the device. Nor is NaN, nor a number below `least`."""
    for what, number in given.items():
        if type(number) is not float:
            _check_real(name, what, number)
        if number != number or (least is not None and number < least):
            raise ValueError(f"{name}: {what} is {number}; give {'a number' if least is None else f'{least:g} or more'}")


def _check_real(name: str, what: str, number) -> None:
    """True is no number that somebody meant."""
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{name}: {what} is {number!r:.60}; give a number")
    try:
        float(number)
    except OverflowError:  # its digits may be more than Python prints
        raise ValueError(f"{name}: {what} is a {type(number).__name__} past 1.8e308, which no float holds; give a number below") from None


COLD, HOT = 1e-30, 1e30  # what logits may be divided by: float32 has no 1 / 1e-40, and no 1e39


def check_temperature(name: str, **given: float) -> None:
    check_numbers(name, **given)
    for what, number in given.items():
        if not COLD <= number <= HOT:
            raise ValueError(f"{name}: {what} is {number}; give 1e-30 to 1e30")


def check_pair(name: str, least: float | None = None, **given: tuple[float, float]) -> None:
    """Each is a tuple or list of two numbers."""
    for what, pair in given.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}: {what} is {pair!r:.60}; give two numbers")
        check_numbers(name, least, **{f"{what}[{n}]": number for n, number in enumerate(pair)})


def check_count(name: str, least: int, **given: int) -> None:
    """Each is a whole number."""
    for what, number in given.items():
        if not is_whole(number) or number < least:
            raise ValueError(f"{name}: {what} is {number!r:.60}; give a whole number, {least} or more")


def as_int(number: Integral) -> int:
    """Python's own: a launcher of Triton's knows no other; a symbol of a compiled graph stays one."""
    return number if type(number) is int else int(number)


def truth(name: str, what: str, given) -> bool:
    """What is True or False, numpy's too, as Python's; anything else has a truth that nobody meant ('no' is true), or none."""
    if given is True or given is False:
        return given
    if isinstance(given, np.bool_):
        return bool(given)
    shown = kind_of(given) if isinstance(given, Tensor) else repr(given)
    raise TypeError(f"{name}: {what} is {shown:.60}; give True or False")


def refuse_gradients(name: str, way_out: str, *tensors: Tensor | None) -> None:
    """For what has none, where they would be lost in silence."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise NotImplementedError(f"{name}: gradients are not implemented; call it under torch.no_grad(), or {way_out}")
