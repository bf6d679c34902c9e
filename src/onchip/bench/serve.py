"""The serving suite: whole runs of the engine, beside transformers where it is installed.

The protocol is that of nano-vllm's bench.py: 256 requests, prompts of 100 to 1,024 random tokens, answers of 100 to 1,024, drawn from seed 0
(133,966 tokens), temperature 0.6, no end-of-text token, one warm-up. Weights are random but for SmolLM2's on a CPU.
"""

import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from onchip.bench import goals
from onchip.bench import serve_rows as measure
from onchip.bench.failures import noted
from onchip.bench.serve_engines import Engines, Load, Row

QWEN, LLAMA, SMOL = "Qwen3-0.6B", "Llama-3-8B", "SmolLM2-135M"
SMALL = f"{SMOL}'s shape"
PROTOCOL = Load(256, (100, 1024), (100, 1024))
MANY = {"max_batch": 256, "max_len": 4096, "step_tokens": 16_384, "cache_gib": 48.0}  # 37 GiB is all that the protocol fills of Llama's
E4M3, INT4 = ({**MANY, "kv_format": codes} for codes in ("e4m3", "int4"))
ONE = Load(1, (8, 8), (200, 200), temperature=0.0)
PREFIXED = {"max_batch": 64, "max_len": 8448}
QUICK = 8  # of so many requests one
ROWS = (  # those of one engine one after the other
    Row("protocol", QWEN, measure.protocol, PROTOCOL, MANY, 15, "nano-vllm's protocol"),
    Row("host time", QWEN, measure.host_time, Load(64, (128, 128), (300, 300)), MANY, 3, "a step of 64 that decode, less the wait for the device; medians"),
    Row("under load", QWEN, measure.under_load, Load(512, (100, 1024), (16, 256)), MANY, 35, "Poisson arrivals at shares of saturation, in process"),
    Row("continuous batching", QWEN, measure.beside_transformers, PROTOCOL._replace(new=(64, 64)), MANY, 25, "the protocol, but 64 new tokens each"),
    Row("protocol", LLAMA, measure.protocol, PROTOCOL, MANY, 25, "nano-vllm's protocol"),
    Row("protocol in e4m3", LLAMA, measure.protocol, PROTOCOL, E4M3, 25, "the protocol, keys and values in e4m3 (kv_format)"),
    Row("protocol in int4", LLAMA, measure.protocol, PROTOCOL, INT4, 25, "the protocol, keys and values in int4"),
    Row("batch 1", LLAMA, measure.batch_one_beside, ONE, MANY, 49, "8 tokens of prompt, 200 new ones, greedy"),
    Row("shared prefix", LLAMA, measure.shared_prefix, Load(64, (measure.OWN,) * 2, (measure.ANSWER,) * 2), PREFIXED, 40, "8,192 tokens before 128 of each"),
    Row("batch 1", SMALL, measure.batch_one, ONE, {"max_batch": 8, "max_len": 4096}, 7, "8 tokens of prompt, 200 new ones, greedy"),
    Row("16 at once", SMOL, measure.at_once, Load(16, (16, 64), (24, 24), 0.0), {"max_batch": 16, "max_len": 512}, 25, "greedy, the same threads", "cpu"),
)  # fmt: skip


def rows(device: torch.device, only: str = "", quick: bool = False) -> list[Row]:
    """The rows for this kind of device with `only` in their names; ValueError where there is none."""
    found = [row for row in ROWS if row.on == device.type and only.lower() in str(row).lower()]
    if not found:
        known = "; ".join(str(row) for row in ROWS if row.on == device.type)
        raise ValueError(f"suite 'serve' has no row with {only!r} in it on {device.type}; its rows are {known}")
    return [dataclasses.replace(row, load=row.load._replace(requests=max(1, row.load.requests // QUICK))) for row in found] if quick else found


def bench(origin: dict, path: Path, device: torch.device, only: str = "", quick: bool = False) -> None:
    """Run the rows, print their figures and goals and write the JSON file `path`, anew after each row."""
    progress, asked = Console(stderr=True, highlight=False), rows(device, only, quick)
    engines = Engines(device, origin["device"]["measured"]["bandwidth"])
    result = {"suite": "serve", **origin, "quick": quick, "rows": []}
    for number, row in enumerate(asked, 1):
        progress.print(f"{number}/{len(asked)} {row} (about {row.seconds} s on {'an H200' if row.on == 'cuda' else 'two cores'})", markup=False)
        result["rows"].append(entry(engines, row))
        result["goals"] = goals.serve(result)
        path.write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table(result))
    console.print(goals.table(result["goals"]))
    for row in result["rows"]:
        for name, why in row["error"].items():
            console.print(f"{row['row']}: {name}: {why}", markup=False, highlight=False)


def entry(engines: Engines, row: Row) -> dict:
    """What a row measured, and what went wrong with it or with one of its peers."""
    engines.errors, engines.kernels = {}, {}
    start, measured = time.perf_counter(), {}
    with noted(engines.errors, "row"):
        for what, value in row.measure(engines, row):
            measured[what] = value
    if "row" in engines.errors:
        engines.free()
    asked = {"row": str(row), "about": row.about, "load": row.load._asdict(), "settings": dict(row.settings)}
    return {**asked, "measured": measured, "kernels": engines.kernels, "took": time.perf_counter() - start, "error": engines.errors}


def table(result: dict) -> Table:
    made = Table(title=f"serve, {result['device']['name']} ({result['device']['measured']['note']})", title_justify="left")
    for name in ("row", "how", "measured", "", "took"):
        made.add_column(name, justify="right" if name in ("", "took") else "left", overflow="fold")
    for row in result["rows"]:
        head = row["row"], row["about"]
        for what, value in row["measured"].items():
            made.add_row(*head, what, f"{value:,.0f}" if value >= 1000 else f"{value:.3g}", f"{row['took']:.0f} s" if head[0] else "")
            head = "", ""
        if not row["measured"]:
            made.add_row(*head, "nothing", "", f"{row['took']:.0f} s")
    return made
