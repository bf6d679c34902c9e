"""A few queries over a paged cache on Hopper: the kernel's sources in each timing of the emulator, and with bugs planted; and, on a GPU, against float64."""

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from test_decode import case, check, paged, queries
from test_hopper_paged import NOWHERE, Bug, Strict, call_of, judge

import onchip
from gluon_emulator import MODES, Fault
from onchip.core.device import GPUS
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Operands
from onchip.core.scores import ALiBi, Softcap, chain
from onchip.dispatch import select
from onchip.kernels.attention import DECODE
from onchip.ops.attend import How, paged_sizes, problem_of

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = DECODE.kernel("hopper_decode")
PARTS = ("attention.texts", "attention.mods", "attention.tile", "hopper", "attention.hopper_tiles", "attention.decode_tiles", "attention.hopper_decode")
SOURCES = [f"onchip.kernels.{name}" for name in PARTS]
emulates = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")


class Case(NamedTuple):
    """A call and the tiles it is run with; `counts`: of packed queries, how many each sequence has (`len_q` is the most)."""

    tiles: tuple[int, int, int, int]  # keys a tile, stages, rounds, programs
    page: int
    lengths: tuple[int, ...]
    len_q: int = 1
    mask: Any = Causal()
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 1)
    spare: int = 1  # columns of the page table beyond the longest sequence
    sinks: bool = False
    score: Any = None
    item: int = 0  # keys that a program takes whole, of a batch_invariant problem
    scale: float = 0.0
    at_once: int = 256  # sequences that a program looks at at once

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")


class Merge:
    """`triton_decode._merge` in plain torch, which finds the parts of each unit from the list of all key tiles."""

    def __getitem__(self, _grid):
        return self

    def __call__(self, out, lse, sinks, part, part_lse, lengths, offsets, batch, kv_heads, group, len_q, programs, _units, *, DV, BLOCK_N, ITEM, BAND, **_):
        left, right, top_left = BAND
        bounds = [b * len_q for b in range(batch + 1)] if offsets is None else offsets.tolist()
        spans = []  # of each unit: sequence, key head, first item, behind the last
        for b, n in enumerate(lengths.tolist()):
            queries = bounds[b + 1] - bounds[b]
            shift = 0 if top_left else n - queries
            start = max(0, shift - left) // BLOCK_N * BLOCK_N if left >= 0 else 0
            end = min(n, max(0, queries + right)) if top_left and right >= 0 else n
            for head in range(kv_heads if queries else 0):
                first = spans[-1][3] if spans else 0
                spans.append((b, head, first, first + max(1, -(-(end - start) // ITEM))))
        total = spans[-1][3] if spans else 0
        starts = [p * (total // programs) + min(p, total % programs) for p in range(programs + 1)]
        for b, head, first, last in spans:
            if ITEM != BLOCK_N:
                places = list(range(first, last))
            else:
                places = [2 * p + (s < first) for p, (s, e) in enumerate(zip(starts, starts[1:], strict=False)) if max(s, first) < min(e, last)]
                places = [2 * (place // 2) + (first > starts[place // 2]) for place in places]
            if len(places) == 1:
                continue
            queries = bounds[b + 1] - bounds[b]
            rows, heads = slice(0, queries * group), slice(head * group, (head + 1) * group)
            logs, values = part_lse[places, rows], part[places, rows, :DV]
            if sinks is not None:
                logs = torch.cat([logs, (sinks[heads].float() * 1.4426950408889634).repeat(queries)[None]])
                values = torch.cat([values, torch.zeros_like(values[:1])])
            whole = torch.logsumexp(logs * 0.6931471805599453, 0)
            weights = (logs * 0.6931471805599453 - torch.where(whole.isneginf(), 0.0, whole)).exp()
            result = (weights[..., None] * values).sum(0).view(queries, group, DV)
            to, to_lse = out[0], lse[0]
            if offsets is None:
                to, to_lse = to[b], to_lse[b]
                place = slice(0, queries)
            else:
                place = slice(bounds[b], bounds[b + 1])
            to[place, heads] = result.to(to.dtype)
            to_lse[heads, place] = whole.view(queries, group).T


def emulated(c: Case, call, mode: str, seed=0, edits=()):
    """Output and LSE of the kernel."""
    q, cache, sinks = call
    emulator = Strict(mode, seed)
    stand_ins = emulator.stand_ins
    merge = SimpleNamespace(_merge=Merge(), LISTED=1024, SHARE=512)
    emulator.stand_ins = lambda: stand_ins() | {"onchip.kernels.attention.triton_decode": merge}
    kernel = emulator.load(*SOURCES, edits=edits)
    kernel.AT_ONCE = c.at_once
    how = How(c.mask, chain(None, c.score, None), sinks, None, False, c.item > 0, KERNEL.name)
    p, x = problem_of("decode", how, paged_sizes(q, cache.k, cache.v, cache.page_table.shape[1]), Operands(c.scale or c.dim**-0.5), q)
    assert KERNEL.refuses(p, GPUS["H200"]) == []
    return kernel.launch(p, kernel.Tiles(*c.tiles, c.item or c.tiles[0]), q, cache, x, True)


# ---- as it is

UNEVEN = (200, 0, 61, 131)
CASES = [
    *(Case((n, 2, 2, 5), page, UNEVEN, heads=(4, 2)) for n in (32, 64, 128) for page in (8, 16, 64, 256)),
    *(Case((64, 3, 2, programs), 16, (1, 15, 16, 17, 0, 300), heads=(8, 2)) for programs in (1, 2, 7, 40)),
    Case((64, 2, 2, 1), 8, (700, 30), spare=0),
    Case((64, 4, 1, 3), 16, (90, 5, 400), 3, heads=(6, 2)),
    Case((64, 2, 2, 4), 16, (90, 5, 400), 16, heads=(4, 1)),
    Case((32, 5, 2, 4), 16, (90, 5, 200), 2, dim=256, heads=(2, 1)),
    Case((64, 2, 2, 4), 64, (90, 5, 200), 2, dim=128, dim_v=64, heads=(4, 2), dtype=FP16),
    Case((64, 2, 2, 4), 16, (90, 200), dim=40, heads=(3, 3)),
    Case((64, 2, 2, 5), 16, (300, 20, 170), 5, Full(), heads=(4, 2)),
    Case((64, 2, 2, 5), 16, (400, 90, 33, 50), 4, Window(50), heads=(4, 2)),
    Case((64, 2, 2, 5), 128, (400, 90, 33), 9, Window(50, 2), heads=(4, 2)),
    Case((64, 2, 2, 3), 16, (150, 90), 7, Causal("top_left")),
    Case((64, 2, 2, 3), 16, (150, 90), 7, Window(2, 90, "top_left")),
    Case((64, 2, 2, 5), 16, (150, 0, 20), 3, sinks=True),
    Case((64, 2, 2, 5), 16, (290, 30), score=Softcap(2.0)),
    Case((64, 2, 2, 5), 128, (290, 30), 2, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((64, 2, 2, 5), 16, (290, 30), scale=-0.2),
    Case((64, 2, 2, 5), 16, (290, 30, 0, 64), 2, heads=(4, 2), item=128, sinks=True),
    Case((64, 2, 2, 6), 16, (*UNEVEN * 9, 70), at_once=32),
]


@emulates
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("c", CASES, ids=str)
def test_emulated(c, mode):
    call = call_of(c)
    judge(c, call, emulated(c, call, mode))
