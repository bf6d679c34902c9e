"""What a quantised cache costs: the perplexity of SmolLM2 on a text, with keys and values in each format.

The text goes through the model in chunks. A chunk's keys and values are quantised as they are written to the pages, and its queries attend over
the pages alone, their own tokens included: what an engine does in a chunked prefill, and what a decode step reads.

`bench/alice.txt` is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain) in the Millennium Fulcrum edition 2.9
of Project Gutenberg, as the Canterbury corpus has it (github.com/google/snappy, testdata/alice29.txt), without empty lines in a row.
"""

import hashlib
import importlib.resources
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from onchip.cache.paged import PageList, PagePool
from onchip.core.formats import Format
from onchip.core.problem import SHORT
from onchip.models.decoder import Decoder, Step

FORMATS = ("", "e4m3", "e5m2", "int8", "int4/32", "int4/64", "int4")  # "": the model's own dtype
TOKENS, QUICK, CHUNK, PAGE = 8192, 1024, 512, 16


class Score(NamedTuple):
    """One format: bits a number of a head, scales included; -log p of each next token in nats, the mean; and how often its likeliest token is the text's.

    same      how often the likeliest token is that of the model's own dtype.       seconds   for the whole text.
    kernels   that attended.
    """

    kv: str
    bits: float
    loss: float
    right: float
    same: float
    seconds: float
    kernels: str


def text() -> str:
    return importlib.resources.files("onchip.bench").joinpath("alice.txt").read_text(encoding="utf-8")


def measure(model: Decoder, tokens: torch.Tensor, kv: str, best: torch.Tensor | None = None, chunk: int = CHUNK) -> tuple[Score, torch.Tensor]:
    """The Score of one format on int64 `tokens`, and the likeliest next token at each place; `best` are those of the model's own dtype."""
    from onchip.dispatch import record

    start, losses, likeliest = time.perf_counter(), [], []
    with record() as decisions, torch.inference_mode():
        for logits, target in _logits(model, tokens, kv, chunk):
            losses.append(torch.nn.functional.cross_entropy(logits[: len(target)].float(), target, reduction="none").double())
            likeliest.append(logits[: len(target)].argmax(-1))
    likeliest = torch.cat(likeliest)
    c = model.config
    bits = 8 * Format.of(kv).bytes(c.dim) / c.dim if kv else 8 * model.dtype.itemsize
    right, same = ((likeliest == other).double().mean().item() for other in (tokens[1:], likeliest if best is None else best))
    kernels = ", ".join(dict.fromkeys(d.kernel.name for d in decisions if d.problem.op == "decode"))
    return Score(kv or SHORT[model.dtype], bits, torch.cat(losses).mean().item(), right, same, time.perf_counter() - start, kernels), likeliest


def _logits(model: Decoder, tokens: torch.Tensor, kv: str, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunk by chunk: logits of its places, and the tokens that follow; the last place has none."""
    c, device = model.config, model.device
    pool = PagePool(c.layers, -(-len(tokens) // PAGE), PAGE, c.kv_heads, c.dim, dtype=model.dtype, device=device, format=kv or None)
    sequence = PageList()
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        slots = pool.append(sequence, len(part)).to(device)
        at = torch.arange(first, first + len(part), device=device)
        lengths = torch.tensor([sequence.length], dtype=torch.int32, device=device)
        step = Step(part, at, slots, page_table=pool.table([sequence]).to(device), lengths=lengths)
        yield model.logits(model.forward(step, pool)), tokens[first + 1 : first + 1 + len(part)]


# ---- the suite


def bench(origin: dict, path: Path, device: torch.device, only: str = "", quick: bool = False) -> None:
    """Measure the formats with `only` in their names, print them and write the JSON file `path`, anew after each.

    Formats that the file has from the same commit, model and text are not measured again; the model's own dtype is, for what it finds likeliest.
    """
    from onchip.engine.llm import LLM

    if not any(only.lower() in kv for kv in FORMATS if kv):
        raise ValueError(f"suite 'quality' has no format with {only!r} in its name; they are {', '.join(filter(None, FORMATS))}")
    origin["device"].pop("measured", None)  # ceilings, which say nothing of a text
    progress = Console(stderr=True, highlight=False)
    llm = LLM(None, device=str(device), cache_gib=0.1)
    ids = llm.tokenizer.encode(text())[: QUICK if quick else TOKENS]
    tokens = torch.tensor(ids, device=device)
    asked = {"model": "SmolLM2-135M-Instruct", "text": hashlib.sha256(text().encode()).hexdigest(), "tokens": len(ids), "chunk": CHUNK, "page": PAGE}
    result = {"suite": "quality", **origin, "quick": quick, **asked, "rows": []}
    before, best = _before(path, result), None
    for kv in FORMATS:
        if kv and only.lower() not in kv:
            continue
        name = kv or SHORT[llm.dtype]
        known = kv and (before.get(name) or _alike(kv, llm.model.config.dim, result["rows"]))
        progress.print(f"{name}{' (measured before)' if known else ''}", markup=False)
        if not known:
            score, likeliest = measure(llm.model, tokens, kv, best)
            best = best if kv else likeliest
            known = score._asdict()
        result["rows"].append(known | _beside(known, result["rows"]))
        path.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=None if Console().is_terminal else 200).print(table(result))


def _before(path: Path, result: dict) -> dict:
    """What a file of the same question holds, by format; {} where there is none, or where its commit is not known to be this one."""
    if not path.exists() or not result["commit"] or "dirty" in result["commit"]:
        return {}
    found = json.loads(path.read_text())
    if any(found.get(key) != result[key] for key in ("commit", "device", "versions", "model", "text", "tokens", "chunk", "page")):
        return {}
    return {row["kv"]: {name: row[name] for name in Score._fields} for row in found["rows"]}


def _alike(kv: str, dim: int, rows: list[dict]) -> dict | None:
    """The Score of a format that is the same for heads of `dim`: of 64 columns, "int4/64" is "int4"."""
    form = Format.of(kv)
    same = [row for row in rows[1:] if (other := Format.of(row["kv"])).name == form.name and other.groups(dim) == form.groups(dim)]
    return {name: same[0][name] for name in Score._fields} | {"kv": kv} if same else None


def _beside(row: dict, rows: list[dict]) -> dict[str, float]:
    """Perplexity, and how much more it is than that of the model's own dtype, in percent."""
    perplexity = math.exp(row["loss"])
    return {"perplexity": perplexity, "more": 100 * (perplexity / rows[0]["perplexity"] - 1) if rows else 0.0}


def table(result: dict) -> Table:
    title = f"{result['model']} on {result['tokens']} tokens, chunks of {result['chunk']} over pages of {result['page']}, {result['device']['name']}"
    made = Table(title=title, title_justify="left")
    for name in ("keys and values", "bits a number", "perplexity", "more", "next token right", "as without", "time", "kernel"):
        made.add_column(name, justify="left" if name in ("keys and values", "kernel") else "right")
    for row in result["rows"]:
        shares = (f"{row['right']:.1%}", f"{row['same']:.1%}", f"{row['seconds']:.0f} s")
        made.add_row(row["kv"], f"{row['bits']:.3g}", f"{row['perplexity']:.4f}", f"{row['more']:+.2f}%", *shares, row["kernels"])
    return made
