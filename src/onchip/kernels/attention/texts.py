"""What a kernel makes of a score's text (`core/trace.py`) before it is translated: factors it takes over, and what the text reads. Imports no DSL."""

import functools
import re
from typing import NamedTuple

import torch

from onchip.core.problem import Attention

IDENTITY = "def run(s, b, h, i, j, len_q, len_k):\n    return s"  # the score function of a scale that is not positive
FIRST = re.compile(r"\n    (v\d+): 'float32' = aten\.mul\.Tensor\(s, float\('([^']+)'\)\)(?=\n)")
LAST = re.compile(r"\n    (v\d+): 'float32' = aten\.mul\.Tensor\((\w+), float\('([^']+)'\)\)\n    return (v\d+)$")
KEYS = re.compile(
    r"def run\(s, b, h, i, j, len_q, len_k, c0: '(bfloat16|float16)\[\d\]'\):"
    r"\n    v0: '\1' = aten\.index\.Tensor\(c0, \[((?:b, )?(?:h, )?|h, b, )j\]\)\n    v1: 'float32' = aten\.add\.Tensor\((?:s, v0|v0, s)\)\n    return v1"
)


@functools.lru_cache(maxsize=1024)
def fold(text: str) -> tuple[str, float, float]:
    """`score(s) = after * inner(before * s)`: the text of `inner` and the two factors, which a kernel multiplies into its own (a softcap is then one tanh)."""
    before = after = 1.0
    if (found := FIRST.search(text)) and len(re.findall(r"\bs\b", text)) == 2 and float(found[2]) > 0:
        before, text = float(found[2]), re.sub(rf"\b{found[1]}\b", "s", text[: found.start()] + text[found.end() :])
    if (found := LAST.search(text)) and found[1] == found[4] and text.count(f"{found[1]}:") == 1 and float(found[3]) > 0:
        after, text = float(found[3]), text[: found.start()] + f"\n    return {found[2]}"
    return text, before, after


@functools.lru_cache(maxsize=1024)
def pair_bytes(text: str) -> int:
    """Bytes that a text reads for each query and key side by side, as a bias does: its tiles lie in shared memory while they are on their way."""
    sizes = {name: getattr(torch, dtype).itemsize for name, dtype in re.findall(r"(c\d+): '(\w+)\[", text)}
    reads = re.findall(r"aten\.index\.Tensor\((c\d+), \[([^\]]*)\]", text)
    return sum(sizes[name] for name, indices in reads if {"i", "j"} <= set(re.findall(r"\w+", indices)))


@functools.lru_cache(maxsize=1024)
def only_adds(text: str) -> bool:
    """Whether a text is a score, once, and what it reads, as a bias is: scores that nothing else moves grow little from one tile of keys to the next, and a
    product can begin with what is added."""
    used = re.findall(r"\b(?:s|v\d+)\b", text.partition("):\n")[2])
    once = used.count("s") == 1 and all(used.count(name) == 2 for name in used if name != "s") and "alpha=" not in text
    return once and set(re.findall(r"aten\.(\w+)\.", text)) <= {"index", "add", "_to_copy"}


@functools.lru_cache(maxsize=1024)
def is_tanh(text: str) -> bool:
    """Whether a text is a softcap: a tanh of the score, but for factors."""
    return re.search(r"\n    (v\d+): 'float32' = aten\.tanh\.default\(s\)\n    return \1$", fold(text)[0]) is not None and fold(text)[0].count("\n") == 2


@functools.lru_cache(maxsize=1024)
def line_of(text: str) -> str:
    """The kind of a text that is a score and, of each query, a line along the keys, bent where they pass it, as ALiBi is; "" of others.

    "straight"; "i" and "row", bent at a query's number or its place (bottom right); "i row".
    """
    kinds = {"s": "score", "i": "query", "j": "line", **dict.fromkeys(("b", "h", "len_q", "len_k"), "one")}  # of each value
    *lines, last = text.splitlines()[1:]
    ahead = re.findall(r"(\w+): 'int64' = aten\.sub\.Tensor\(len_k, len_q\)\n", text)
    places = {"i": "i", **dict.fromkeys(re.findall(rf"(\w+): 'int64' = aten\.add\.Tensor\(i, (?:{'|'.join(ahead) or '!'})\)\n", text), "row")}
    bent = set()
    for line in lines:
        name, operator, inputs = re.match(r"    (\w+): '\w+' = aten\.(\w+)\.\w+\((.*)\)$", line).groups()
        given = re.sub(r"float\('[^']*'\)|\bc\d+\b", "1", inputs).replace("[", "").replace("]", "").split(", ")
        of = [kinds.get(x, "one") for x in given]
        kind = ""
        if set(of) <= {"one", "query"}:
            kind = max(of)
        elif operator == "sub" and len(given) == 2 and "j" in given and set(given) & places.keys():
            kind = next(f"way {places[x]}" for x in given if x in places)
        elif operator == "abs" and of[0].startswith("way"):
            kind = "line"
            bent.add(of[0].removeprefix("way "))
        elif operator in ("add", "sub") and len(given) == 2 and "" not in of and of.count("score") < 2 and not (operator == "sub" and of[1] == "score"):
            kind = "score" if "score" in of else "line"
        elif ((operator == "mul" and set(of) & {"one", "query"}) or operator in ("neg", "_to_copy")) and not set(of) & {"", "score"}:
            kind = "line"
        kinds[name] = kind
    return (" ".join(sorted(bent)) or "straight") if kinds.get(last.split()[-1]) == "score" and re.search(r"\bj\b", text.partition("):\n")[2]) else ""


def is_light(text: str) -> bool:
    """Whether a score takes few registers beside a product's: a softcap, lines, or a bias of keys that the product adds."""
    return bool(is_tanh(text) or line_of(text) or key_tile(text))


@functools.lru_cache(maxsize=1024)
def only_compares(text: str) -> bool:
    """Whether a mask compares places and what it reads of them, as one of documents does, and no more."""
    places, truths = {"index", "add", "sub", "clamp", "_to_copy"}, {"bitwise_and", "bitwise_or", "logical_and", "logical_or", "logical_not"}
    return set(re.findall(r"aten\.(\w+)\.", text)) <= places | truths | {"eq", "ne", "ge", "gt", "le", "lt"}


@functools.lru_cache(maxsize=1024)
def gathers(text: str) -> bool:
    """Whether a text reads at a place it has computed, as a table of distances is."""
    return any(re.search(r"\bv\d+\b", indices) for indices in re.findall(r"aten\.index\.Tensor\(\w+, \[([^\]]*)\]", text))


@functools.lru_cache(maxsize=1024)
def of_heads_and_keys(text: str) -> bool:
    """Whether a text reads something by head and key: for rows of several heads that is a look-up for each row and key."""
    return any({"h", "j"} <= set(re.findall(r"\w+", indices)) for indices in re.findall(r"aten\.index\.Tensor\(\w+, \[([^\]]*)\]", text))


class PairTile(NamedTuple):
    """What a text reads for each query and key, where that is one float tensor at [.., i, j]: tiles of it can be copied.

    tensor    its number among the captured ones.      axes   which of b and h come before i and j, and in which order.
    """

    tensor: int
    axes: str
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def pair_tile(text: str) -> PairTile | None:
    """None where there is no such tensor, or more is read by query and key."""
    reads = {read for read in re.findall(r"aten\.index\.Tensor\((c\d+), \[([^\]]*)\]", text) if {"i", "j"} <= set(re.findall(r"\w+", read[1]))}
    if len(reads) != 1:
        return None
    ((name, indices),) = reads
    axes, dtype = indices.removesuffix("i, j").replace(", ", ""), re.search(rf"{name}: '(\w+)\[", text)[1]
    others = len(re.findall(rf"aten\.index\.Tensor\({name}, ", text)) - text.count(f"aten.index.Tensor({name}, [{indices}])")
    if axes not in ("", "b", "h", "bh", "hb") or dtype not in ("bfloat16", "float16", "float32") or others:
        return None
    return PairTile(int(name[1:]), axes, getattr(torch, dtype))


def bias_of(p: Attention) -> PairTile | None:
    """The tensor of a score that adds one of the queries' dtype at [.., i, j], and does nothing else."""
    tile = pair_tile(p.score.text) if p.score and p.keys == "dense" and only_adds(p.score.text) else None
    return tile if tile and tile.dtype == p.dtype else None


ADDS_DISTANCE = (("add", ["score", "distance"]), ("add", ["distance", "score"]), ("sub", ["score", "distance"]))


@functools.lru_cache(maxsize=1024)
def ahead_axes(text: str) -> str | None:
    """Of a text that adds to the score what depends on the distance between query and key alone: by which of b and h it differs as well."""
    kinds = {"s": "score", "i": "query", "j": "key", **dict.fromkeys(("b", "h", "len_q", "len_k"), "one")}  # of each value
    *lines, last = text.splitlines()[1:]
    for line in lines:
        made = re.match(r"    (\w+): '\w+' = aten\.(\w+)\.\w+\((.*)\)$", line)
        if made is None:
            return None
        name, operator, inputs = made.groups()
        given = re.sub(r"float\('[^']*'\)|\bc\d+\b|\w+=[\w.]+", "1", inputs).replace("[", "").replace("]", "").split(", ")
        of = [kinds.get(x, "one") for x in given]
        if set(of) <= {"one", "distance"}:
            kind = max(of, key="one distance".index)
        elif operator == "sub" and set(of) == {"query", "key"} and len(of) == 2:
            kind = "distance"
        elif operator in ("add", "sub") and of[0] in ("query", "key") and of[1:] == ["one"]:
            kind = of[0]
        elif (operator, of) in ADDS_DISTANCE and line == lines[-1] and last == f"    return {name}":
            return "".join(x for x in "bh" if re.search(rf"\b{x}\b", text.partition("):\n")[2]))
        else:
            return None
        kinds[name] = kind
    return None


def distance_axes(text: str) -> str | None:
    """The same of a text that looks it up."""
    return ahead_axes(text) if gathers(text) else None


def far_of(p: Attention) -> str | None:
    """Which of b and h a score looks up by, where it adds what it looks up by the distance; None of others."""
    return distance_axes(p.score.text) if p.score and p.keys == "dense" else None


def ahead_of(p: Attention) -> str | None:
    """The same of a score that may compute it too, as ALiBi does."""
    return ahead_axes(p.score.text) if p.score and p.keys == "dense" else None


@functools.lru_cache(maxsize=1024)
def key_tile(text: str) -> PairTile | None:
    """The same of a text that adds one half-precision tensor at [.., j] to the score, and does nothing else."""
    found = KEYS.fullmatch(text)
    return found and PairTile(0, found[2].replace(", ", ""), getattr(torch, found[1]))
