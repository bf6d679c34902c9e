"""What a decode does beside its model, on the state of its rows: where the last token belongs, and what the drawn one changes. Nothing waits for the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_count
from onchip.core.problem import Rows
from onchip.dispatch import select


class Places(NamedTuple):
    """Where the last token of each row belongs; a row without a sequence is at position -1.

    at      int64 [rows]: its position; 0 without a sequence.        slots   int64 [rows]: of its key and value in the cache; -1: nowhere.
    lengths int32 [rows]: the keys that there are then, 0 without a sequence.
    """

    at: Tensor
    slots: Tensor
    lengths: Tensor


def decode_places(
    positions: Tensor,  # int64 [rows]
    page_table: Tensor,  # int32 [rows, pages]
    page: int,
    *,
    at: Tensor | None = None,  # int64 [rows]
    kernel: str = "auto",
) -> Places:
    """`at = max(positions, 0)`, `slots = page_table[at // page] * page + at % page` and `lengths = positions + 1`, in one launch.

    A position past the table counts as one of its last page.
    at   a tensor that the first of them is written to; None makes one.
    Raises ValueError for shapes or dtypes that disagree.
    """
    rows = _rows("decode_places", positions, "positions")
    if page_table.ndim != 2 or len(page_table) != rows or not page_table.shape[1] or page_table.dtype != torch.int32 or page_table.stride(1) != 1:
        given = f"page_table is {page_table.dtype} {list(page_table.shape)}, its strides {list(page_table.stride())}"
        raise ValueError(f"decode_places: {given}; give int32 [{rows}, pages] of a page or more, the last stride 1")
    check_count("decode_places", 1, page=page)  # 16.0 would make a Problem equal to that of 16
    if at is not None and _rows("decode_places", at, "at") != rows:
        raise ValueError(f"decode_places: at is {list(at.shape)}; give int64 [{rows}], as positions are")
    return Places(*select(Rows("decode_places", rows, page, torch.int64), positions.device, kernel).launch(positions, page_table, at))


def decode_advance(
    drawn: Tensor,  # int64 [rows]
    tokens: Tensor,  # int64 [rows]
    positions: Tensor,  # int64 [rows]
    *,
    counts: Tensor | None = None,  # int32 [rows, vocab]
    history: Tensor | None = None,  # int32 [rows, longest]
    kernel: str = "auto",
) -> None:
    """`tokens = drawn`, and of rows with a sequence `positions += 1`, `counts[drawn] += 1` and `history[positions] = drawn`: all in place, in one launch.

    A position past the history is its last place. Tokens of rows with a sequence are below `vocab`.
    Raises ValueError for shapes or dtypes that disagree.
    """
    rows = _rows("decode_advance", drawn, "drawn")
    for name, given in (("tokens", tokens), ("positions", positions)):
        if _rows("decode_advance", given, name) != rows:
            raise ValueError(f"decode_advance: {name} is {list(given.shape)}; give int64 [{rows}], as drawn is")
    for name, given in (("counts", counts), ("history", history)):
        if given is not None and (given.ndim != 2 or len(given) != rows or not given.shape[1] or given.dtype != torch.int32 or given.stride(1) != 1):
            raise ValueError(f"decode_advance: {name} is {given.dtype} {list(given.shape)}; give int32 [{rows}, n] of one or more, the last stride 1")
    words = " ".join(name for name, given in (("counts", counts), ("history", history)) if given is not None)
    select(Rows("decode_advance", rows, 1, torch.int64, words), drawn.device, kernel).launch(drawn, tokens, positions, counts, history)


def _rows(name: str, given: Tensor, argument: str) -> int:
    """How many a list of numbers has; raises where it is none."""
    if given.ndim != 1 or given.dtype != torch.int64 or (len(given) > 1 and given.stride(0) != 1):
        raise ValueError(f"{name}: {argument} is {given.dtype} {list(given.shape)}, its strides {list(given.stride())}; give int64 [rows], one after the other")
    return len(given)
