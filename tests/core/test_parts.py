"""When a user's function is traced again, when it is not, and what the memory of it keeps."""

import functools
import gc
import operator
import weakref

import pytest
import torch

from onchip.core import parts
from onchip.core.parts import trace_mod
from onchip.core.trace import Place, Traced, TraceError

TABLE = torch.randn(3, 9)
BACK = 2


@pytest.fixture
def traces(monkeypatch):
    """How often something is traced."""
    count = []
    monkeypatch.setattr(parts, "_MODS", {})
    monkeypatch.setattr(parts, "trace", lambda *args, _trace=parts.trace, **words: count.append(args[1]) or _trace(*args, **words))
    return count


def run(mod, score: bool = False):
    """The mod's answers through its text, and by itself."""
    at = Place(*(torch.arange(n).view([-1 if k == d else 1 for k in range(4)]) for d, n in enumerate((2, 3, 4, 5))), 4, 5)
    text, tensors = trace_mod(mod, score)
    s = torch.ones(2, 3, 4, 5)
    found = Traced("f", text).run(s if score else None, *at, *tensors).broadcast_to(s.shape)
    expected = torch.as_tensor(mod(*((s,) if score else ()), *at[:4]), dtype=found.dtype).broadcast_to(s.shape)
    assert torch.equal(found, expected)
    return text


def banded(width):
    return lambda b, h, i, j: i - j < width


def shifted(table):
    return lambda s, b, h, i, j: s + table[h, j]


def test_a_new_function_of_the_same_code_is_not_traced_again(traces):
    assert run(banded(3)) == run(banded(3)) and traces == ["lambda"]


def test_a_number_that_is_closed_over_counts(traces):
    assert len({run(banded(n)) for n in (1, 2, True, 1.0)}) == 4 == len(traces)


def test_a_variable_that_is_rebound_counts(traces):
    width = 1
    mod = lambda b, h, i, j: i - j < width  # noqa: E731
    first = run(mod)
    width = 2
    assert run(mod) != first and len(traces) == 2
    width = 1
    assert run(mod) == first and len(traces) == 2


def test_a_list_or_dict_counts_by_what_it_holds(traces):
    widths, names = [1, 2], {"left": 3}
    mod = lambda b, h, i, j: (i - j < widths[0]) & (j - i < names["left"])  # noqa: E731
    first = run(mod)
    assert run(mod) == first and len(traces) == 1
    widths[0] = 2
    second = run(mod)
    names["left"] = 4
    assert len({first, second, run(mod)}) == 3 == len(traces)


def test_an_attribute_of_a_function_or_a_tensor_counts(traces):
    def factor(h):
        return factor.base * (h + 1)

    table = torch.ones(3)
    scaled = lambda s, b, h, i, j: s * factor(h) * table.extra  # noqa: E731
    factor.base, table.extra = 1.0, 1.0
    first = run(scaled, True)
    assert run(scaled, True) == first and len(traces) == 1
    factor.base = 3.0
    second = run(scaled, True)
    table.extra = 2.0
    assert len({first, second, run(scaled, True)}) == 3 == len(traces)
    table.extra = object()
    with pytest.raises(TraceError, match="'Tensor' and 'object'"):
        trace_mod(scaled, True)


def test_an_attribute_of_a_tuple_of_ones_own_counts():
    class Sides(tuple):
        far = 1

    sides = Sides((2,))
    mod = lambda b, h, i, j: i - j < sides[0] + sides.far  # noqa: E731
    first = run(mod)
    Sides.far = 3
    assert run(mod) != first


def test_whether_a_tensor_learns_counts(traces):
    learns = lambda table: lambda s, b, h, i, j: s + table[h] if table.requires_grad else s - table[h]  # noqa: E731
    assert run(learns(torch.ones(3)), True) != run(learns(torch.ones(3, requires_grad=True)), True)


def test_a_global_that_is_rebound_counts(traces, monkeypatch):
    mod = lambda b, h, i, j: i - j < BACK  # noqa: E731
    first = run(mod)
    monkeypatch.setitem(globals(), "BACK", 3)
    assert run(mod) != first and len(traces) == 2


def test_a_function_that_is_called_counts(traces):
    def outer(width):
        inner = banded(width)
        return lambda b, h, i, j: inner(b, h, i, j) & (i >= 0)

    assert run(outer(1)) != run(outer(2)) and run(outer(1)) == run(outer(1)) and len(traces) == 2


def test_defaults_partials_and_inner_functions_count(traces):
    def keyword(b, h, i, j, *, width=1):
        return i - j < width

    def default(width):
        return lambda b, h, i, j, width=width: i - j < width

    def inside(b, h, i, j):
        return (lambda x: x < BACK)(i - j)

    assert run(default(1)) != run(default(2)) and run(inside)
    assert run(functools.partial(keyword, width=2)) != run(functools.partial(keyword, width=3))
    known = len(traces)
    assert run(default(1)) and run(functools.partial(keyword, width=2)) and run(inside) and len(traces) == known
    keyword.__kwdefaults__["width"] = 5
    assert run(keyword) and len(traces) == known + 1


def test_tensors_are_those_of_the_call(traces):
    a, b = torch.randn(3, 9), torch.randn(3, 9)
    assert run(shifted(a), True) == run(shifted(b), True) and len(traces) == 1
    assert trace_mod(shifted(b), True)[1][0] is b
    assert run(shifted(torch.randn(3, 8)), True) and len(traces) == 2  # it may have asked for the size
    assert run(shifted(a.double()), True) and len(traces) == 3


def test_two_names_of_one_tensor(traces):
    def two(x, y):
        return lambda s, b, h, i, j: s + x[h, j] - 2 * y[h, j]

    a, b = torch.randn(3, 9), torch.randn(3, 9)
    run(two(a, a), True)
    run(two(a, b), True)
    run(two(b, b), True)
    assert len(traces) == 2


class Holder:
    def __init__(self, table, width):
        self.table, self.width = table, width

    def score(self, s, b, h, i, j):
        return s + self.table[h, j] * self.width

    def __call__(self, b, h, i, j):
        return i - j < self.width


def test_what_reads_an_object_is_traced_in_every_call(traces):
    holder = Holder(torch.randn(3, 9), 1)
    first = run(holder.score, True)
    holder.table, holder.width = torch.randn(3, 9), 2
    assert run(holder.score, True) != first and trace_mod(holder.score, True)[1][0] is holder.table
    first = run(holder)
    holder.width = 3
    assert run(holder) != first and parts._MODS == {}


def test_a_tensor_made_inside_is_new_in_every_call():
    table = torch.randn(3, 9)
    mod = lambda s, b, h, i, j: s + (table * 2)[h, j]  # noqa: E731
    run(mod, True)
    table.mul_(3)
    run(mod, True)


def test_a_function_that_calls_itself():
    def mod(b, h, i, j, depth=2):
        return (i >= j) if depth == 0 else mod(b, h, i, j, depth - 1) | (i == depth)

    assert run(mod) == run(mod)


def test_the_memory_keeps_no_tensor(traces):
    table = torch.randn(3, 977)
    gone = weakref.ref(table)
    run(shifted(table), True)
    assert len(parts._MODS) == 1
    del table
    gc.collect()
    assert gone() is None


def test_the_memory_is_bounded(traces, monkeypatch):
    monkeypatch.setattr(parts, "MODS", 8)
    for width in range(20):
        trace_mod(banded(width), False)
        assert len(parts._MODS) <= 8


def test_other_functions_of_torch_are_atoms(traces):
    mod = lambda s, b, h, i, j: torch.nn.functional.silu(s) + operator.add(s, 1)  # noqa: E731
    assert run(mod, True) == run(mod, True) and len(traces) == 1


def test_names():
    assert parts.name_of(banded(1)) == "lambda" and parts.name_of(Holder(TABLE, 1).score) == "score" and parts.name_of(Holder(TABLE, 1)) == "Holder"
