"""What a suite is to reach: asked, measured, and the row that says so.

A Goal is one line: `measured` is the worst of its rows, at the place `at`; None where no row could say. `most`: asked is the most, not the least.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rich.table import Table

from onchip.bench import mods

LARGE = ("32x4k", "128x1k", "128x8k", "1x128k")
SMALL = ("1x1k", "1x8k", "8x8k")
TINY = ("1x4096", "64x4096")
LEAST = 64 << 20  # bytes of a large row
STEPS = (("cross_entropy step", "bytes", "TB/s", 3.74), ("linear_cross_entropy step", "flops", "TFLOP/s", 600.0))
JOINT = (("64x128256", 40.0), ("1x128256", 15.0))  # microseconds of a batch
SERVE = (  # row, figure, asked, and whether that is the most
    ("protocol, Qwen3-0.6B", "token/s", 20_000.0, False),
    ("protocol, Llama-3-8B", "token/s", 12_000.0, False),
    ("batch 1, SmolLM2-135M's shape", "token/s", 1_500.0, False),
    ("batch 1, Llama-3-8B", "share of weights over bandwidth", 0.8, False),
    ("batch 1, Llama-3-8B", "times the compiled loop", 1.0, False),
    ("continuous batching, Qwen3-0.6B", "times transformers", 2.0, False),
    ("shared prefix, Llama-3-8B", "times no prefix cache", 8.0, False),
    ("host time, Qwen3-0.6B", "host, us a step", 200.0, True),
    ("16 at once, SmolLM2-135M", "times transformers", 1.5, False),
)
PRODUCTS = ("linear_", "token_")  # whose floor is arithmetic
SKINNY = "skinny"  # products of few rows: goals of their own
BASE = "32x4k"  # bf16, page 16: what other pages, heads and formats stand beside
GRID = re.compile(r"(prefill|backward) d(64|128|256) (full|causal)")
PASSES = ("prefill", "backward")
OTHERS = ("heads over", "packed", "window")  # in the names of rows beside the grid of which more is asked: "32 heads over 8", "packed 64..8k"
TRITON, FA2 = "onchip, Triton", "FlashAttention-2 (torch)"
BARS = (  # what, asked, measure of `bars`, whether that is the most
    ("rate of dense rows, packed", 0.9, "rate", False),
    ("times as fast as causal, window of 1k at 16k", 6.0, "less time", False),
    ("memory held over what must exist", 1.2, "memory", True),
)
PRICE = "the price of a mod, "  # and which pass


class Goal(NamedTuple):
    what: str
    asked: float
    measured: float | None
    at: str
    most: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.asked if self.most else self.measured >= self.asked


class Row(NamedTuple):
    """A timed row: its time and bandwidth by ours, and the peers' times."""

    group: str
    x: str
    seconds: float
    share: float
    peers: dict[str, float]
    ours: dict[str, float]
    waits: bool | None

    def over(self, *names: str) -> float | None:
        """The time of the fastest peer whose name begins with one of these, over ours; None: none was timed."""
        times = [t for name, t in self.peers.items() if name.startswith(names)]
        return min(times) / self.seconds if times else None


def decode(result: dict) -> list[dict]:
    """The goals of the decode suite on a GPU, as JSON holds them; shares are of the copy bandwidth measured in the same run."""
    if result["device"]["kind"] != "cuda":
        return []
    rows = [_row(row, result["device"]["measured"]["bandwidth"]) for row in result["rows"]]
    return [{**goal._asdict(), "met": goal.met} for goal in _decode(rows)] if rows else []


def _decode(rows: list[Row]) -> Iterator[Goal]:
    of = {(row.group, row.x): row for row in rows}
    bf16 = {row.x: row for row in rows if row.group == "decode in bf16"}
    base = bf16.get(BASE)
    yield _goal("share of the copy bandwidth, bf16, large", 0.96, {x: bf16[x].share for x in LARGE if x in bf16})
    yield _goal("times the speed of FlashInfer or SDPA, whichever is faster", 1.0, {_at(row): row.over("FlashInfer", "torch") for row in rows})
    yield _goal("times FlashInfer, bf16, small", 1.2, {x: bf16[x].over("FlashInfer") for x in SMALL if x in bf16})
    yield _goal("microseconds, bf16", 10.0, {x: 1e6 * bf16[x].seconds for x in ("1x8k",) if x in bf16}, most=True)
    for kv, asked in (("e4m3", 1.8), ("int8", 1.8), ("int4", 3.0)):
        found = {row.x: _ratio(row, "onchip, bf16") for row in rows if row.group == f"decode in {kv}" and row.x in LARGE}
        yield _goal(f"times our bf16, {kv}, large", asked, found)
    for group in ("other pages", "other heads"):
        yield _goal(f"share over that of {BASE}, {group}", 0.9, {row.x: row.share / base.share for row in rows if row.group == group and base})
    uneven, even = of.get(("uneven lengths", "128k and 63 of 512")), of.get(("uneven lengths", "even"))
    yield _goal("times the time of even lengths", 1.15, {uneven.x: uneven.seconds / even.seconds} if uneven and even else {}, most=True)
    yield _goal("times one by one, shared prefix", 4.0, {row.x: _ratio(row, "onchip, one by one") for row in rows if row.group == "shared prefix"})
    yield _goal("times FlashInfer, MLA", 1.1, {row.x: row.over("FlashInfer") for row in rows if row.group.startswith("latent")})
    yield _goal("share of the copy bandwidth, append", 0.85, {row.x: row.share for row in rows if row.group == "append"})
    yield _goal("rows that make the host wait", 0.0, {_at(row): float(row.waits) for row in rows if row.waits is not None}, most=True)


def attention(result: dict) -> list[dict]:
    """Those of a pass of attention: beside the best peer, by Triton beside FlashAttention-2, packed, within a window, in memory and in 8 bits."""
    if result["device"]["kind"] != "cuda":
        return []
    timed = [_row(row, result["device"]["measured"]["bandwidth"]) for row in result["rows"]]
    return [{**goal._asdict(), "met": goal.met} for goal in (*_attention(timed), *_beside(result["summary"]), *_prices(result["rows"])) if goal.met is not None]


def _attention(rows: list[Row]) -> Iterator[Goal]:
    """A mean is the geometric one: over the lengths of a group, over both packed batches, over both masks in 8 bits."""
    backward = any(row.group.startswith("backward") for row in rows)
    grid = [row for row in rows if GRID.fullmatch(row.group)]
    for heads, asked in (("d64 d128", 1.0), ("d256", 1.1 if backward else 1.0)):
        groups = _means((row.group, row.over("")) for row in grid if row.group.split()[1] in heads.split())
        yield _goal(f"times the best peer, {heads.replace(' ', ' and ')}, mean over lengths", asked, groups)
    yield _goal("times the best peer, each length", 0.95, {_at(row): row.over("") for row in grid})
    others = _means((kind, row.over("")) for kind in OTHERS for row in rows if row.group.startswith(PASSES) and kind in _at(row))
    yield _goal("times the best peer, grouped heads, packed, window", 1.05, others)
    for name, asked in (("one short sequence", 0.95), ("few queries over many keys", 1.0)):
        yield _goal(f"times the best peer, {name}", asked, {_at(row): row.over("") for row in rows if row.group.endswith(name)})
    triton_rows = grid + [row for row in rows if row.group.startswith("backward") and "heads over" in row.group]
    by_triton = {_at(row): row.peers[FA2] / row.ours[TRITON] for row in triton_rows if TRITON in row.ours and FA2 in row.peers}
    yield _goal("times FlashAttention-2, by Triton, mean", 1.25 if backward else 1.5, _means((f"{len(by_triton)} rows", value) for value in by_triton.values()))
    yield _goal("times FlashAttention-2, by Triton, each", 1.0 if backward else 1.2, by_triton)
    eight = [row for row in rows if row.group == "prefill e4m3" and re.fullmatch("d128 (full|causal) 16k", row.x)]
    yield _goal("times our bf16, e4m3, d128 at 16k, mean of full and causal", 1.5, _means(("d128 16k", _ratio(row, "onchip, bf16")) for row in eight))


def _beside(bars: list[dict]) -> Iterator[Goal]:
    """Of what stands in the summary: rows beside other rows of ours, and FlexAttention."""
    ours = [bar for bar in bars if bar["measure"] != "memory" or bar["against"].startswith("onchip")]
    for what, asked, measure, most in BARS:
        found = [bar for bar in ours if bar["measure"] == measure]
        yield _goal(what, asked, {", ".join((bar["group"], bar["at"], bar["against"])): bar["worst"] for bar in found}, most)
    flex = [bar for bar in bars if bar["against"] == "FlexAttention" and bar["group"] != "all rows"]
    yield _goal("times FlexAttention", 1.0, {f"{bar['group']}, {bar['at']}": bar["worst"] for bar in flex})


def _prices(rows: list[dict]) -> Iterator[Goal]:
    """What a score costs over the plain kernel, the worse of both passes; of dropout, which draws a number a pair, nothing is asked."""
    free = ("plain", *mods.DROPPED)
    priced = [row for row in rows if row["fields"]["group"].startswith(PRICE) and row["fields"].get("mod") not in free and row["over_plain"]]
    for x in dict.fromkeys(row["fields"]["x"] for row in priced):
        found = {row["fields"]["group"].removeprefix(PRICE): row["over_plain"]["time"] for row in priced if row["fields"]["x"] == x}
        yield _goal(f"time over plain, {x}", 1.15, found, most=True)


def rows(result: dict) -> list[dict]:
    """Those of the operators on rows: at the bandwidth of a copy where they are large, and no slower than the best peer."""
    if result["device"]["kind"] != "cuda":
        return []
    timed = [(_row(row, result["device"]["measured"]["bandwidth"]), row["cost"]) for row in result["rows"] if row["cost"]]
    return [{**goal._asdict(), "met": goal.met} for goal in _rows(timed)]


def _rows(timed: list[tuple[Row, dict]]) -> Iterator[Goal]:
    """Of rows and their costs."""
    bound = [(row, cost) for row, cost in timed if not row.group.startswith((*PRODUCTS, SKINNY))]
    large = [row for row, cost in bound if cost["bytes"] >= LEAST]
    small = [row for row, _ in bound if row.x in TINY and row.peers]
    yield _goal("share of the copy bandwidth, 64 MiB and more", 0.92, {_at(row): row.share for row in large})
    yield _goal("times the speed of the best peer, 64 MiB and more", 0.97, {_at(row): row.over("") for row in large})
    yield _goal("microseconds more than the best peer, small", 0.3, {_at(row): 1e6 * row.seconds * (1 - row.over("")) for row in small}, most=True)
    for begin, asked in (("GroupNorm", 2.0), ("modulated_norm", 1.0)):
        yield _goal(f"times torch.compile, {begin}", asked, {_at(row): row.over("torch.compile") for row, _ in timed if row.group.startswith(begin)})
    for group, what, unit, asked in STEPS:
        yield _goal(f"{unit}, {group}", asked, {_at(row): cost[what] / row.seconds / 1e12 for row, cost in timed if row.group == group})
    few = [(row, cost["bytes"]) for row, cost in timed if row.group.startswith(SKINNY)]
    one = {_at(row): row.share for row, nbytes in few if row.x.startswith("1x") and nbytes >= LEAST}
    yield _goal("share of the copy bandwidth, products of 1 row, 64 MiB and more", 0.8, one)
    yield _goal("times the speed of the best peer, products of few rows", 1.0, {_at(row): row.over("onchip, one", "torch") for row, _ in few})
    for x, asked in JOINT:
        found = [row for row, _ in timed if (row.group, row.x) == ("sample, joint", x)]
        yield _goal(f"microseconds, joint sampling, {x}", asked, {row.x: 1e6 * row.seconds for row in found}, most=True)


def serve(result: dict) -> list[dict]:
    """Those of the serving suite, of the rows that were run."""
    rows = {row["row"]: row["measured"] for row in result["rows"]}
    found = [_goal(what, asked, {row: rows[row].get(what)}, most) for row, what, asked, most in SERVE if row in rows]
    return [{**goal._asdict(), "met": goal.met} for goal in found]


def _row(row: dict, bandwidth: float) -> Row:
    ours = {name: t for name, t in row["seconds"].items() if name.startswith("onchip")}
    peers = {name: t for name, t in row["seconds"].items() if name not in ours}
    seconds = ours.get("onchip", math.inf)  # what did not run, or was wrong, meets nothing
    share = row["cost"]["bytes"] / seconds / bandwidth
    return Row(row["fields"]["group"], row["fields"]["x"], seconds, share, peers, ours, row.get("waits"))


def _ratio(row: Row, name: str) -> float | None:
    return row.ours[name] / row.seconds if name in row.ours else None


def _at(row: Row) -> str:
    return f"{row.group}, {row.x}"


def _means(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The geometric mean of the values of each name; what no peer could do is left out."""
    named: dict[str, list[float]] = {}
    for name, value in values:
        if value is not None:
            named.setdefault(name, []).append(value)
    return {name: math.prod(found) ** (1 / len(found)) for name, found in named.items()}


def _goal(what: str, asked: float, values: dict[str, float | None], most: bool = False) -> Goal:
    known = {at: value for at, value in values.items() if value is not None}
    worst = (max if most else min)(known, key=known.get) if known else None
    return Goal(what, asked, known.get(worst), worst or "", most)


GOALS: dict[str, Callable[[dict], list[dict]]] = {"decode": decode, "rows": rows, **dict.fromkeys(("attention", "backward", "mods", "gym"), attention)}


def table(goals: list[dict]) -> Table:
    made = Table(title="Asked and measured", title_justify="left")
    for name in ("what", "asked", "measured", "worst at", "met"):
        made.add_column(name, justify="right" if name in ("asked", "measured") else "left", overflow="fold")
    for goal in goals:
        made.add_row(*cells(goal))
    return made


def cells(goal: dict) -> tuple[str, ...]:
    measured = "" if goal["measured"] is None else f"{goal['measured']:.3g}"
    met = {True: "yes", False: "no", None: "not timed"}[goal["met"]]
    return goal["what"], f"{'at most' if goal['most'] else 'at least'} {goal['asked']:.3g}", measured, goal["at"], met
