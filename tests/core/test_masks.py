"""A mask's dense form against its definition, and its keys and area against its dense form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core.masks import MASKS, Causal, Full, Window

LENGTHS = st.integers(0, 40)
ANY = st.one_of(st.just(Full()), st.just(Causal()), st.integers(0, 50).map(Window))

unhurried = settings(deadline=None)  # the first call of a torch function takes a second


def sees(mask, row: int, key: int) -> bool:
    """The definition, in words of each class."""
    if isinstance(mask, Full):
        return True
    if isinstance(mask, Causal):
        return key <= row
    return row - mask.size <= key <= row


def dense(mask, len_q: int, len_k: int) -> torch.Tensor:
    return mask.dense(torch.arange(len_k - len_q, len_k)[:, None], torch.arange(len_k))


@unhurried
@given(ANY, LENGTHS, LENGTHS)
def test_dense_is_the_definition(mask, len_q, len_k):
    expected = [[sees(mask, i + len_k - len_q, j) for j in range(len_k)] for i in range(len_q)]
    assert dense(mask, len_q, len_k).tolist() == expected


@unhurried
@given(ANY, LENGTHS, LENGTHS)
def test_area_counts_what_is_seen(mask, len_q, len_k):
    assert mask.area(len_q, len_k) == int(dense(mask, len_q, len_k).sum())


@unhurried
@given(ANY, LENGTHS, LENGTHS, st.data())
def test_keys_are_those_that_some_row_sees(mask, len_q, len_k, data):
    """No key too few, and none too many at either end."""
    if len_q == 0:
        return
    start = data.draw(st.integers(0, len_q - 1))
    stop = data.draw(st.integers(start, len_q - 1))
    shift = len_k - len_q
    columns = dense(mask, len_q, len_k)[start : stop + 1].any(0).nonzero().flatten().tolist()
    assert list(mask.keys(start + shift, stop + shift, len_k)) == columns


def test_bottom_right():
    """The last query sees what the last key sees, whatever the lengths."""
    assert dense(Causal(), 2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert dense(Causal(), 3, 1).tolist() == [[False], [False], [True]]
    assert dense(Window(1), 2, 4).tolist() == [[False, True, True, False], [False, False, True, True]]


def test_a_mask_is_a_value():
    assert [str(mask) for mask in (Full(), Causal(), Window(512))] == ["Full", "Causal", "Window(512)"]
    assert len({Window(1), Window(1), Window(2), Causal(), Causal(), Full(), Full()}) == 4


def test_every_mask_is_tested_here():
    assert set(MASKS) == {Full, Causal, Window}


def test_window_below_zero():
    with pytest.raises(ValueError, match="size -1 is negative; it counts the keys before a query's own, so 0 or more"):
        Window(-1)
