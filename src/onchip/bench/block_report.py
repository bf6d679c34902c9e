"""The suite "block" as its rows, and a table of what each fusion saves: bytes predicted from costs beside the time measured with that fusion undone."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from onchip.bench import block, report
from onchip.bench.report import duration, quantity

COLUMNS = ("block", "fusion", "bytes saved", "predicted", "measured", "share of the block")


def write(result: dict, path: Path) -> None:
    """Print both tables, and write the plot and the page beside the JSON file `path`."""
    found = list(lines(result))
    made = Table(title="What each fusion saves", title_justify="left")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in COLUMNS[:2] else "right", overflow="fold")
    for line in found:
        made.add_row(*line)
    report.publish(result, path, report.table(result), report.svg(result), page(result))
    Console(width=None if Console().is_terminal else 200).print(made)


def page(result: dict) -> str:
    extra = "\n".join(report._together("What each fusion saves", COLUMNS, list(lines(result))))
    return report.page(result).replace("</body>", f"{extra}</body>")


def lines(result: dict):
    """One fusion of one row, as text; predicted is the time of its bytes at the bandwidth of a copy."""
    for row in result["rows"]:
        for saving in block.savings(row, result["device"]["measured"]["bandwidth"]):
            share = "" if saving.measured is None else f"{100 * saving.measured / row['seconds']['onchip']:.1f}%"
            yield (row["fields"]["op"], saving.fusion, quantity(saving.bytes, "B"), duration(saving.predicted), duration(saving.measured), share)
