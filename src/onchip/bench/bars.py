"""What the rows of a suite say together: ours against each peer by group, and rows that are measured by another row.

A Bar is one line of it: `mean` is the geometric mean over `rows` rows, `worst` the worst of them, at the place `at`. Measures:

    speed         the peer's time over ours; of several, also that of a row's best. Above 1: onchip is faster.
    rate          packed rows: FLOP/s over those of the dense row beside them.     1: packing costs nothing.
    less time     windows: the time of the causal row over that of the window.
    time          mods: time over that of the plain kernel.                        1: the mod costs nothing.
    time a pair   the same for masks, divided by the pairs that they let through.
    dropout       the time a pair of rows with dropout over that of the plain kernel; they are in no other line beside it.
    memory        held at most over inputs, output, their gradients and LSE.

Where rows were timed by Triton's kernels too, all of it is said of these once more, in groups with ", by Triton" behind their name.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.table import Table

from onchip.bench import mods

GRID = re.compile(r"(prefill|backward) d\d+ (full|causal)")
ALL, GRIDS = "all rows", "all heads and masks"
BEST = "the best peer"  # of each row
PORTABLE = "onchip, Triton"  # ours by the kernels that every NVIDIA GPU has


class Bar(NamedTuple):
    group: str
    against: str
    measure: str
    rows: int
    mean: float
    worst: float
    at: str


def summary(rows: list[dict]) -> list[dict]:
    """The Bars of a suite, as JSON holds them."""
    portable = [{**row, "seconds": row["seconds"] | {"onchip": row["seconds"][PORTABLE]}, "memory": {}} for row in rows if PORTABLE in row["seconds"]]
    again = [bar._replace(group=f"{bar.group}, by Triton") for bar in (*_speeds(portable), *_beside(portable))]
    return [bar._asdict() for bar in [*_speeds(rows), *_beside(rows), *again]]


def over_plain(row: dict, rows: list[dict]) -> dict[str, float] | None:
    """The time of a row with a mod, and its time a pair, over those of the plain kernel in the same run."""
    base = _plain(row, rows)
    return {"time": row["seconds"]["onchip"] / base["seconds"]["onchip"], "a pair": _a_pair(row) / _a_pair(base)} if base else None


def table(bars: list[dict]) -> Table:
    made = Table(title="Summary", title_justify="left")
    for name in Bar._fields:
        made.add_column(name, justify="right" if name in ("rows", "mean", "worst") else "left", overflow="fold")
    for bar in bars:
        made.add_row(*cells(bar))
    return made


def cells(bar: dict) -> list[str]:
    return [f"{value:.3g}" if isinstance(value, float) else str(value) for value in bar.values()]


# ---- against peers


def _speeds(rows: list[dict]) -> Iterator[Bar]:
    timed = [row for row in rows if "onchip" in row["seconds"]]
    groups: dict[str, list[dict]] = {}
    for row in timed:
        groups.setdefault(row["fields"]["group"], []).append(row)
    grid = [row for row in timed if GRID.fullmatch(row["fields"]["group"])]
    if grid:
        groups[GRIDS if len({row["fields"]["group"] for row in grid}) > 1 else ALL] = grid
    if len(groups) > 1:
        groups[ALL] = timed
    for group, found in groups.items():
        peers = [{name: t for name, t in row["seconds"].items() if not name.startswith("onchip")} for row in found]
        names = dict.fromkeys(name for times in peers for name in times)
        if len(names) > 1:
            peers = [times | {BEST: min(times.values())} if times else times for times in peers]
            names[BEST] = None
        for name in names:
            ratios = {_place(row, group): times[name] / row["seconds"]["onchip"] for row, times in zip(found, peers, strict=True) if name in times}
            yield _bar(group, name, "speed", ratios, min)


# ---- against other rows


def _beside(rows: list[dict]) -> Iterator[Bar]:
    timed = [row for row in rows if "onchip" in row["seconds"]]
    for row in timed:
        group, x, sizes = row["fields"]["group"], row["fields"]["x"], _sizes(row)
        if sizes.get("keys") == "packed" and (dense := _dense(row, timed)):
            ours, beside = (other["rate"]["amount"] / other["seconds"]["onchip"] for other in (row, dense))
            yield _bar(group, dense["problem"], "rate", {x: ours / beside}, min)
        if str(sizes.get("mask")).startswith("Window") and (causal := _like(row, timed, mask="Causal")):
            yield _bar(group, causal["problem"], "less time", {x: causal["seconds"]["onchip"] / row["seconds"]["onchip"]}, min)
        for name, held in row.get("memory", {}).get("held", {}).items():
            yield _bar(group, name, "memory", {x: held / row["memory"]["ideal"]}, max)
    for group in dict.fromkeys(row["fields"]["group"] for row in timed if row["fields"].get("mod")):
        pairs = [(row, base) for row in timed if row["fields"]["group"] == group and (base := _plain(row, timed)) and base is not row]
        kinds: dict[str, dict[str, float]] = {"time": {}, "time a pair": {}, "dropout": {}}
        for row, base in pairs:  # a score changes the time, a mask also what there is to do
            dropped, alike = row["fields"]["mod"] in mods.DROPPED, row["cost"]["flops"] == base["cost"]["flops"]
            kinds["dropout" if dropped else "time" if alike else "time a pair"][row["fields"]["x"]] = _a_pair(row) / _a_pair(base)
        for measure, costs in kinds.items():
            if costs:
                yield _bar(group, "plain", measure, costs, max)


def _a_pair(row: dict) -> float:
    return row["seconds"]["onchip"] / row["cost"]["flops"]


def _sizes(row: dict) -> dict:
    """The fields of the attention Problem of a row."""
    return row["fields"].get("inner") or row["fields"]


def _like(row: dict, rows: list[dict], **changed) -> dict | None:
    """The row of the same pass and sizes but for `changed`."""
    wanted = _sizes(row) | changed
    keys = [key for key in wanted if key not in ("group", "x", "lengths", "inner", "mod")]
    same = (other for other in rows if other["fields"]["op"] == row["fields"]["op"] and all(_sizes(other).get(key) == wanted[key] for key in keys))
    return next(same, None)


def _dense(row: dict, rows: list[dict]) -> dict | None:
    """The dense row of the same heads, mask and dtype whose length is nearest to the longest packed one."""
    names = ("heads", "kv_heads", "dim", "dim_v", "dtype", "mask")
    sizes = _sizes(row)
    alike = [other for other in rows if other["fields"]["op"] == row["fields"]["op"] and _sizes(other).get("keys") == "dense"]
    alike = [other for other in alike if all(_sizes(other)[name] == sizes[name] for name in names) and not other["fields"].get("mod")]
    return min(alike, key=lambda other: (abs(_sizes(other)["len_q"] - sizes["len_q"]), -_sizes(other)["batch"]), default=None)


def _plain(row: dict, rows: list[dict]) -> dict | None:
    fields = row["fields"]
    same = (other for other in rows if other["fields"].get("mod") == "plain" and other["fields"]["op"] == fields["op"] and "onchip" in other["seconds"])
    return next((other for other in same if _sizes(other) == _sizes(row)), None) if fields.get("mod") and "onchip" in row["seconds"] else None


def _place(row: dict, group: str) -> str:
    return row["fields"]["x"] if row["fields"]["group"] == group else f"{row['fields']['group']}, {row['fields']['x']}"


def _bar(group: str, against: str, measure: str, values: dict[str, float], worst: Callable) -> Bar:
    at = worst(values, key=values.get)
    return Bar(group, against, measure, len(values), math.exp(sum(map(math.log, values.values())) / len(values)), values[at], at)
