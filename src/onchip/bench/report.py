"""A result, as read from its JSON, as a table on the terminal, as a plot, and as a page that needs nothing but itself."""

import html
import math
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from onchip.bench import bars, goals

# Ours is the first. Each has a contrast of 3.5 or more with the white figures in the bars, and stands out from both grounds.
COLOURS = ("#0077bb", "#d2601a", "#00897b", "#7a5cc4", "#c2185b", "#8a6d00", "#707070", "#4f8a10", "#a0522d")
STYLE = """
text{font:12px system-ui,sans-serif;fill:#1f2328} .soft{fill:#59636e;font-size:11px} .title{font-weight:600;font-size:13px}
.value{fill:#fff;font-size:10px} .above{font-size:10px} .grid{stroke:#d1d9e0} .floor{stroke:#1f2328;stroke-dasharray:4 3;stroke-width:1.5} .paper{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.soft{fill:#9198a1}.value{fill:#fff}.grid{stroke:#3d444d}.floor{stroke:#f0f6fc}.paper{fill:#0d1117}}
"""
PAGE = """
:root{color-scheme:light dark;--line:#d1d9e0;--soft:#59636e} @media(prefers-color-scheme:dark){:root{--line:#3d444d;--soft:#9198a1}}
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem;background:light-dark(#fff,#0d1117);color:light-dark(#1f2328,#f0f6fc)}
svg{max-width:100%;height:auto} .scroll{overflow-x:auto} p,dl{color:var(--soft)} h1{font-size:1.4rem;margin-bottom:0} h2{font-size:1.1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.25rem .7rem;text-align:right;white-space:nowrap}
th:first-child,td:first-child,td.words{text-align:left} td.words{white-space:normal;min-width:18rem;color:var(--soft)} td.ours{font-weight:600}
"""
WIDTH, HEIGHT, GAP = 440, 250, 16  # of a panel, and between panels, in pixels
LEFT, TOP, BOTTOM = 58, 44, 26  # around the bars
PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


class Summary(NamedTuple):
    """What a row says about ours. `percent` of the floor, `ratio` > 1 when ours is faster than `best`; None where there is nothing to say."""

    seconds: float | None
    rate: float | None
    percent: float | None
    best: str | None
    ratio: float | None


def summary(row: dict) -> Summary:
    ours, rate, floor = row["seconds"].get("onchip"), row["rate"], row["floor"]
    peers = {name: seconds for name, seconds in row["seconds"].items() if not name.startswith("onchip")}
    best = min(peers, key=peers.get) if peers else None
    if ours is None:
        return Summary(None, None, None, best, None)
    percent = 100 * floor["seconds"] / ours if floor else None
    return Summary(ours, rate["amount"] / ours if rate else None, percent, best, peers[best] / ours if best else None)


def notes(row: dict) -> list[str]:
    """What the columns do not say: a goal, the path to the kernel, what results that were drawn were compared with, and everything that went wrong."""
    ours, alone = row["seconds"].get("onchip"), row["seconds"].get("onchip kernel alone")
    found = []
    if row["goal"] and ours:
        found.append(f"goal: under {duration(row['goal'])}, {'met' if ours < row['goal'] else 'missed'}")
    if ours and alone:
        found.append(f"{duration(max(0.0, ours - alone))} over the kernel alone")
    for name, held in row.get("memory", {}).get("held", {}).items():
        found.append(f"{name} holds {quantity(held, 'B')}, {held / row['memory']['ideal']:.2f}x of inputs, output, gradients and LSE")
    found += [f"{name} was compared {text}" for name, text in row.get("compared", {}).items()]
    return found + [f"{name}: {text}" for name, text in row["error"].items()]


def write(result: dict, path: Path) -> None:
    """Print the table, and write the plot and the page beside the JSON file `path`."""
    publish(result, path, table(result), svg(result), page(result))


def publish(result: dict, path: Path, listing: Table, plot: str, text: str) -> None:
    """Print a suite's table and its notes, and write its plot and its page."""
    console = Console(width=None if Console().is_terminal else 200)
    console.print(listing)
    console.print(bars.table(result.get("summary", [])))
    if result.get("goals"):
        console.print(goals.table(result["goals"]))
    for row in result["rows"]:
        for note in notes(row):
            console.print(f"{row['problem']}: {note}", markup=False, highlight=False)
    path.with_suffix(".svg").write_text(plot)
    path.with_suffix(".html").write_text(text)


def heading(result: dict) -> str:
    return f"{result['suite']}, {result['device']['name']} ({result['device']['measured']['note']})"


def table(result: dict) -> Table:
    made = Table(title=heading(result), title_justify="left")
    for name, where in (("problem", "left"), ("kernel", "left"), ("time", "right"), ("rate", "right"), ("% of floor", "right"), ("best peer", "left")):
        made.add_column(name, justify=where, overflow="fold")
    made.add_column("ratio", justify="right")
    modded = any(row.get("over_plain") for row in result["rows"])
    if modded:
        made.add_column("over plain", justify="right")
    for row in result["rows"]:
        made.add_row(row["problem"], row["kernel"] or "", *_cells(row), *([_over_plain(row)] if modded else []))
    return made


def _cells(row: dict) -> list[str]:
    """Time, rate, percent of the floor, best peer and the ratio to it, as text."""
    s = summary(row)
    best = f"{s.best} {duration(row['seconds'][s.best])}" if s.best else ""
    rate = quantity(s.rate, row["rate"]["unit"]) if s.rate else ""
    return [duration(s.seconds), rate, f"{s.percent:.0f}" if s.percent is not None else "", best, f"{s.ratio:.2f}x" if s.ratio is not None else ""]


def _over_plain(row: dict) -> str:
    """The time over that of the plain kernel; of a mask, which hides pairs, also the time a pair."""
    over = row.get("over_plain")
    if not over:
        return ""
    same = abs(over["a pair"] / over["time"] - 1) < 1e-6
    return f"{over['time']:.2f}x" if same else f"{over['time']:.2f}x, {over['a pair']:.2f}x a pair"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if abs(seconds) >= size), (1e-9, "ns"))
    return f"{seconds / size:.4g} {unit}"


def quantity(value: float, unit: str) -> str:
    """Three digits and a prefix: 6.12e14 FLOP/s is "612 TFLOP/s"."""
    prefix, size = next(((p, s) for p, s in PREFIXES if value >= s), PREFIXES[-1])
    return f"{_digits(value / size)} {prefix}{unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# ---- plots


def contenders(result: dict) -> dict[str, str]:
    """The colour of every contender that was timed, ours first."""
    names = dict.fromkeys(name for row in result["rows"] for name in row["seconds"])
    order = sorted(names, key=lambda name: name != "onchip")
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(order)}


def panels(result: dict) -> list[str]:
    """One plot per group of rows, each an SVG group of WIDTH x HEIGHT."""
    groups: dict[str, list[dict]] = {}
    for row in result["rows"]:
        if row["seconds"]:
            groups.setdefault(row["fields"]["group"], []).append(row)
    return [_panel(title, rows, contenders(result)) for title, rows in groups.items()]


class Axis(NamedTuple):
    """A vertical axis from 0 to `top`, a grid line each `step`; figures are shown divided by `size`, which `unit` names."""

    top: float
    step: float
    size: float
    unit: str

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / self.top)

    def say(self, value: float) -> str:
        return _digits(value / self.size)


def _axis(highest: float, unit: str) -> Axis:
    """A round axis with 3 to 6 grid lines that reaches `highest`."""
    power = 10 ** math.floor(math.log10(highest / 3))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if highest / (power * factor) <= 5)
    top = step * math.ceil(highest / step)
    prefix, size = ("", 1.0) if unit == "us" else next((p, s) for p, s in PREFIXES if top >= s)
    return Axis(top, step, size, f"{prefix}{unit}")


def _panel(title: str, rows: list[dict], colours: dict[str, str]) -> str:
    """Bars of each contender for each row; a dashed line is the limit that the floor sets, where it is near enough to show."""
    values, floors, unit = _heights(rows)
    highest = max(value for bars in values for value in bars.values())
    floors = [floor if floor and floor <= 2.5 * highest else None for floor in floors]
    axis = _axis(max([highest, *(floor for floor in floors if floor)]), unit)
    parts = [_text(4, 15, title, "title"), _text(4, 31, f"{axis.unit}, less is better" if unit == "us" else axis.unit, "soft")]
    for i in range(round(axis.top / axis.step) + 1):
        y = axis.y(i * axis.step)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{i * axis.step / axis.size:.4g}", "soft", "end"))
    each = (WIDTH - LEFT) / len(rows)
    for i, (row, heights, floor) in enumerate(zip(rows, values, floors, strict=True)):
        left = LEFT + i * each
        parts += _bars(heights, colours, (left, each), axis)
        if floor:
            y = axis.y(floor)
            parts.append(f'<line class="floor" x1="{left + 0.06 * each:.1f}" x2="{left + 0.94 * each:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left + each / 2, HEIGHT - 8, row["fields"]["x"], "soft", "middle"))
    return "\n".join(parts)


def _heights(rows: list[dict]) -> tuple[list[dict[str, float]], list[float | None], str]:
    """The bars of each row, the floor of each, and their unit: the row's rate, or microseconds where it has none."""
    if rows[0]["rate"] is None:
        return [{name: 1e6 * seconds for name, seconds in row["seconds"].items()} for row in rows], [None] * len(rows), "us"
    values = [{name: row["rate"]["amount"] / seconds for name, seconds in row["seconds"].items()} for row in rows]
    return values, [row["rate"]["amount"] / row["floor"]["seconds"] if row["floor"] else None for row in rows], rows[0]["rate"]["unit"]


def _bars(bars: dict[str, float], colours: dict[str, str], place: tuple[float, float], axis: Axis) -> list[str]:
    """The bars of one row in `place` (left edge, width), each with its value written upright inside it, or above when it is short."""
    left, each = place
    width = min(34.0, 0.84 * each / len(bars))
    x, base, parts = left + (each - width * len(bars)) / 2, axis.y(0), []
    for name in sorted(bars, key=list(colours).index):
        top, value = axis.y(bars[name]), axis.say(bars[name])
        shape = f'x="{x:.1f}" y="{top:.1f}" width="{width - 1.5:.1f}" height="{base - top:.1f}"'
        parts.append(f'<rect {shape} fill="{colours[name]}"><title>{html.escape(name)}: {value} {axis.unit}</title></rect>')
        inside = base - top > 8 + 6.5 * len(value)
        kind, anchor, at = ("value", "end", top + 5) if inside else ("above", "start", top - 3)
        if width >= 10:
            middle = x + width / 2 + 3
            parts.append(_text(middle, at, value, kind, anchor, f' transform="rotate(-90 {middle:.1f} {at:.1f})"'))
        x += width
    return parts


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start", turned: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{turned}>{html.escape(words)}</text>'


def _legend(colours: dict[str, str], limit: bool, width: int) -> tuple[str, int]:
    """Names and colours in lines of at most `width` pixels, and the height of it."""
    x, y, parts = 0.0, 0, []
    entries = [(name, f'<rect x="{{x:.0f}}" y="{{y}}" width="12" height="12" fill="{colour}"/>') for name, colour in colours.items()]
    if limit:
        entries.append(("limit of the device, measured in this run", '<line class="floor" x1="{x:.0f}" x2="{end:.0f}" y1="{middle}" y2="{middle}"/>'))
    for name, mark in entries:
        wide = 34 + 6.6 * len(name)
        if x and x + wide > width:
            x, y = 0.0, y + 20
        parts += [mark.format(x=x, y=y, end=x + 14, middle=y + 6), _text(x + 18, y + 10, name, "soft")]
        x += wide
    return "\n".join(parts), y + 20


def svg(result: dict, columns: int = 2) -> str:
    """All panels of a suite as one plot."""
    return sheet(result, panels(result), contenders(result), columns)


def sheet(result: dict, drawn: list[str], colours: dict[str, str], columns: int) -> str:
    """Panels with their legend as one plot, on a ground of its own that follows the reader's light or dark scheme."""
    columns = max(1, min(columns, len(drawn)))
    width = columns * WIDTH + (columns + 1) * GAP
    legend, tall = _legend(colours, any('class="floor"' in panel for panel in drawn), width - 2 * GAP)
    head = f"{result['suite']} on {result['device']['name']}, {result['date'][:10]}"
    below = 34 + tall + GAP // 2
    height = below + math.ceil(len(drawn) / columns) * (HEIGHT + GAP)
    parts = [f'<rect class="paper" width="{width}" height="{height}" rx="6"/>', _text(GAP, 24, head, "title"), _at(GAP, 36, legend)]
    for i, panel in enumerate(drawn):
        parts.append(_at(GAP + i % columns * (WIDTH + GAP), below + i // columns * (HEIGHT + GAP), panel))
    return _document(width, height, "\n".join(parts), head)


def _at(x: float, y: float, parts: str) -> str:
    return f'<g transform="translate({x} {y})">\n{parts}\n</g>'


def _document(width: int, height: int, parts: str, label: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(label)}">\n<style>{STYLE}</style>\n{parts}\n</svg>\n'


# ---- page


def page(result: dict) -> str:
    """The plots, every contender's time in every row, and what the figures come from."""
    colours = contenders(result)
    columns = ["problem", *colours, "rate", "% of floor", "ratio to best peer", "kernel", "notes"]
    about = "Medians of readings taken in turn; point at a time for its 10th and 90th percentile. A ratio above 1: onchip is faster."
    return document(result, svg(result, columns=3), about, columns, [_page_row(row, colours) for row in result["rows"]])


def document(result: dict, plot: str, about: str, columns: list[str], rows: list[str]) -> str:
    """A page of one plot and one table; `rows` are the HTML of the table's rows."""
    device = result["device"]
    head = html.escape(f"{result['suite']} on {device['name']}")
    names = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = f"{device['measured']['note']}. {versions}. {result['date']}, commit {result['commit'] or 'unknown'}."
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{head}</title>',
            f"<style>{PAGE}</style></head><body><h1>{head}</h1>",
            f"<p>{html.escape(source)}</p>",
            plot,
            f"<h2>All rows</h2><p>{html.escape(about)}</p>",
            f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>',
            *rows,
            "</tbody></table></div>",
            *_together("Summary", bars.Bar._fields, [bars.cells(line) for line in result.get("summary", [])]),
            *_together("Asked and measured", ("what", "asked", "measured", "worst at", "met"), [goals.cells(line) for line in result.get("goals", [])]),
            "</body></html>\n",
        ]
    )


def _together(title: str, columns: tuple[str, ...], lines: list) -> list[str]:
    """Lines that speak of several rows, as a table of the page."""
    if not lines:
        return []
    names = "".join(f"<th>{name}</th>" for name in columns)
    rows = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines]
    return [f"<h2>{title}</h2>", f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>', *rows, "</tbody></table></div>"]


def _page_row(row: dict, colours: dict[str, str]) -> str:
    cells = [f"<td>{html.escape(row['problem'])}</td>"]
    for name in colours:
        kind = ' class="ours"' if name == "onchip" else ""
        if name in row["seconds"]:
            low, high = row["spread"][name]
            cells.append(f'<td{kind} title="{duration(low)} to {duration(high)}">{duration(row["seconds"][name])}</td>')
        else:
            cells.append(f"<td{kind}></td>")
    _, rate, percent, _, ratio = _cells(row)
    cells += [f"<td>{rate}</td><td>{percent}</td><td>{ratio}</td>"]
    over = [f"{_over_plain(row)} of the plain kernel's time"] if _over_plain(row) else []
    words = (f"{row['kernel'] or ''} {row['config'] or ''}", "; ".join([*over, *notes(row), row["timed_by"] or ""]))
    return "<tr>" + "".join(cells + [f'<td class="words">{html.escape(text)}</td>' for text in words]) + "</tr>"
