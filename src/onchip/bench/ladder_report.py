"""The suite "io" as a table of rungs, as two plots with logarithmic axes (time and memory against length), and as a page."""

import html
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from onchip.bench import report
from onchip.bench.report import BOTTOM, COLOURS, HEIGHT, LEFT, TOP, WIDTH, _text, duration, quantity

COLUMNS = ("n", "rung", "time", "% of floor", "peak memory", "modelled bytes", "counted bytes")
ABOUT = (
    "Medians of readings taken in turn; point at a time for its 10th and 90th percentile. Peak memory is what a call holds beside its inputs, "
    "its output included. Modelled bytes are those of the formulas in docs/io-model.md; counted ones come from the GPU's own counters."
)
NO_MEMORY = ("OutOfMemoryError", "can't allocate memory")  # of torch on a GPU and of a host that is asked first; of torch's allocator on a CPU
INSET = 26  # between the edges of a plot and its first and last length


class Line(NamedTuple):
    """One rung of one row, as text; `spread` is the title of its time."""

    cells: tuple[str, ...]
    spread: str
    notes: str


def write(result: dict, path: Path) -> None:
    """Print the table, and write the plot and the page beside the JSON file `path`."""
    report.publish(result, path, table(result), svg(result), page(result))


def rungs(result: dict) -> dict[str, str]:
    """The colour of every rung of the result, ours first, whether or not it ran."""
    names = dict.fromkeys(name for row in result["rows"] for name in row.get("moved", {}))
    order = sorted(names, key=lambda name: name != "onchip")
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(order)}


def out_of_memory(row: dict, name: str) -> bool:
    return any(text in row["error"].get(name, "") for text in NO_MEMORY)


# ---- table


def lines(row: dict) -> Iterator[Line]:
    """The rungs of a row in the order of the ladder, onchip last."""
    for name, moved in row.get("moved", {}).items():
        seconds, held = row["seconds"].get(name), row["held"].get(name)
        time = "out of memory" if out_of_memory(row, name) else duration(seconds)
        percent = f"{100 * row['floor']['seconds'] / seconds:.0f}" if seconds else ""
        counted = quantity(moved["counted"], "B") if moved["counted"] is not None else moved["why"]
        cells = (row["fields"]["x"], name, time, percent, quantity(held, "B") if held is not None else "", quantity(moved["modelled"], "B"), counted)
        low, high = row["spread"].get(name, (None, None))
        kernel = f"{row['kernel'] or ''} {row['config'] or ''}".strip() if name == "onchip" else ""
        yield Line(cells, f"{duration(low)} to {duration(high)}", "; ".join(filter(None, (kernel, row["error"].get(name)))))


def table(result: dict) -> Table:
    made = Table(title=report.heading(result), title_justify="left")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("rung", "counted bytes") else "right", overflow="fold")
    for row in result["rows"]:
        for line in lines(row):
            made.add_row(*line.cells)
        made.add_section()
    return made


# ---- plots


class Axis(NamedTuple):
    """A vertical axis over whole powers of ten."""

    low: int
    high: int

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - math.log10(value)) / (self.high - self.low)


def panels(result: dict) -> list[str]:
    """For each shape its time and its memory against n, each an SVG group of WIDTH x HEIGHT."""
    groups: dict[str, list[dict]] = {}
    for row in result["rows"]:
        groups.setdefault(row["fields"]["group"], []).append(row)
    colours, drawn = rungs(result), []
    for title, rows in groups.items():
        floors = [(row["fields"]["inner"]["len_q"], row["floor"]["seconds"]) for row in rows if row["floor"]]
        drawn.append(_panel(f"time, {title}", rows, "seconds", duration, colours, floors))
        drawn.append(_panel(f"peak memory, {title}", rows, "held", lambda value: quantity(value, "B"), colours, []))
    return drawn


def _panel(title: str, rows: list[dict], field: str, say: Callable[[float], str], colours: dict[str, str], floors: list[tuple[int, float]]) -> str:
    """A line a rung, a dashed one for the floor, and a cross above each length whose rung was out of memory."""
    places = _places(rows)
    values = {name: [(row["fields"]["inner"]["len_q"], row[field][name]) for row in rows if row.get(field, {}).get(name)] for name in colours}
    found = [value for points in (*values.values(), floors) for _, value in points]
    parts = [_text(4, 15, title, "title")]
    if not found:
        return "\n".join([*parts, _text(4, 31, "nothing ran", "soft")])
    axis = Axis(math.floor(math.log10(min(found))), math.floor(math.log10(max(found))) + 1)
    for power in range(axis.low, axis.high + 1):
        y = axis.y(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, say(10.0**power), "soft", "end"))
    for row in rows:
        parts.append(_text(places[row["fields"]["inner"]["len_q"]], HEIGHT - 8, row["fields"]["x"], "soft", "middle"))
    if floors:
        parts.append(f'<polyline class="floor" fill="none" points="{_points(floors, places, axis)}"/>')
    for name, points in values.items():
        parts += _line(name, points, colours[name], places, axis, say)
    for row in rows:
        gone = [name for name in colours if out_of_memory(row, name)]
        parts += [_cross(places[row["fields"]["inner"]["len_q"]], TOP + 6 + 14 * i, name, colours[name]) for i, name in enumerate(gone)]
    return "\n".join(parts)


def _places(rows: list[dict]) -> dict[int, float]:
    """Where each length lies, by its logarithm."""
    lengths = sorted({row["fields"]["inner"]["len_q"] for row in rows})
    least, most = math.log2(lengths[0]), math.log2(lengths[-1])
    width = WIDTH - LEFT - 2 * INSET
    return {n: LEFT + INSET + width * ((math.log2(n) - least) / (most - least) if most > least else 0.5) for n in lengths}


def _points(points: list[tuple[int, float]], places: dict[int, float], axis: Axis) -> str:
    return " ".join(f"{places[n]:.1f},{axis.y(value):.1f}" for n, value in points)


def _line(name: str, points: list[tuple[int, float]], colour: str, places: dict[int, float], axis: Axis, say: Callable[[float], str]) -> list[str]:
    parts = [f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{_points(points, places, axis)}"/>'] if len(points) > 1 else []
    for n, value in points:
        title = f"<title>{html.escape(name)}, n = {n:,}: {say(value)}</title>"
        parts.append(f'<circle cx="{places[n]:.1f}" cy="{axis.y(value):.1f}" r="3.5" fill="{colour}">{title}</circle>')
    return parts


def _cross(x: float, y: float, name: str, colour: str) -> str:
    shape = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
    return f'<path d="{shape}" stroke="{colour}" stroke-width="2.5"><title>{html.escape(name)}: out of memory</title></path>'


def svg(result: dict, columns: int = 2) -> str:
    """The plots, with a legend of the rungs; a cross is a length at which its rung was out of memory."""
    return report.sheet(result, panels(result), rungs(result), columns)


# ---- page


def page(result: dict) -> str:
    """The plots, and a line for each rung of each row."""
    rows = [_page_row(line) for row in result["rows"] for line in lines(row)]
    return report.document(result, svg(result), ABOUT, [*COLUMNS, "notes"], rows)


def _page_row(line: Line) -> str:
    ours = ' class="ours"' if line.cells[1] == "onchip" else ""
    cells = [f"<td{ours}>{html.escape(cell)}</td>" for cell in line.cells]
    cells[2] = f'<td{ours} title="{line.spread}">{html.escape(line.cells[2])}</td>'
    return "<tr>" + "".join([*cells, f'<td class="words">{html.escape(line.notes)}</td>']) + "</tr>"
