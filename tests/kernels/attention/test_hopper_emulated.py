"""The Hopper kernel on a CPU: its sources as they are, in each timing of an emulator of Gluon; and with bugs planted, each of which must show."""

import os
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

import onchip
from gluon_emulator import MODES, Deadlock, Emulator, Fault, timings
from judge import assert_as_good_as_torch
from onchip.core.masks import Causal, Dense, Document, Full, KeyPadding, MaskMod, Window, as_mask
from onchip.core.problem import Dropout, Operands
from onchip.core.scores import ALiBi, Bias, BucketBias, RelativeBias, ScoreMod, Softcap, chain
from onchip.core.trace import hides_keys
from onchip.kernels.attention.reference import place, spans
from onchip.ops.attend import How, dense_sizes, drawn, packed_sizes, problem_of

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="has nothing to do with Triton's interpreter: runs without it")

FEW, EACH = 3, 1000  # programs: few, which do several tiles each, or one for each tile
ATTENTION = "texts mods tile tile_lists hopper_dropout pairs hopper_tiles hopper_parts capped lines key_bias hopper_halves hopper_copies hopper_prefill"
SOURCES = ["onchip.kernels.curves", "onchip.kernels.hopper", *(f"onchip.kernels.attention.{name}" for name in ATTENTION.split())]


class Case(NamedTuple):
    """A call and the tiles it is run with. `lengths` and `used`: of a packed batch, queries and keys alike or (queries, keys)."""

    tiles: tuple[int, ...]  # groups, keys a tile, stages, programs; heads side by side, parts of the keys
    len_q: int = 0
    len_k: int = 0
    mask: Any = Causal()
    dim: int = 64
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    lengths: tuple | None = None
    used: tuple | None = None
    sinks: bool = False
    score: Any = None
    dim_v: int = 0
    deterministic: bool = False
    steep: float = 0.0  # how far scores rise from the last key to the first, see `tilt`
    alone: bool = False  # batch_invariant
    scale: float | None = None
    drop: float = 0.0

    def __str__(self):
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return " ".join(changed).replace("torch.", "")

    @property
    def packed(self) -> bool:
        return self.lengths is not None

    @property
    def dropout(self) -> Dropout | None:
        return Dropout(self.drop, (9 << 40) + 5, 3) if self.drop else None


class Call(NamedTuple):
    """The tensors of a case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: tuple = ()
    used: tuple | None = None
    sinks: torch.Tensor | None = None


def call_of(c: Case) -> Call:
    """Random tensors; rows that no sequence uses hold NaN, and so do padding and what lies behind the last one."""
    heads, dims = (c.heads[0], c.heads[1], c.heads[1]), (c.dim, c.dim, c.dim_v or c.dim)
    sinks = torch.randn(c.heads[0]) if c.sinks else None
    if not c.packed:
        lengths = (c.len_q, c.len_k, c.len_k)
        q, k, v = (torch.randn(c.batch, n, h, d).to(c.dtype) for n, h, d in zip(lengths, heads, dims, strict=True))
        tilt(q, k, c.steep)
        for b in range(c.batch):
            hold_anything(c, b, c.len_q, k[b], v[b])
        return Call(q, k, v, sinks=sinks)
    lengths, used = both(c.lengths), both(c.used or c.lengths)
    q, k, v = (rows(*of, h, d, c.dtype) for of, h, d in zip(zip(lengths[[0, 1, 1]], used[[0, 1, 1]], strict=True), heads, dims, strict=True))
    for one in zip(q.split(lengths[0].tolist()), k.split(lengths[1].tolist()), strict=True):
        tilt(*one, c.steep)
    for b, of in enumerate(zip(used[0].tolist(), k.split(lengths[1].tolist()), v.split(lengths[1].tolist()), strict=True)):
        hold_anything(c, b, of[0], *(t[: used[1][b]] for t in of[1:]))
    said = tuple(None if n.equal(of) else n.int() for n, of in zip(used, lengths, strict=True))  # nothing, where sequences use all that they have
    return Call(q, k, v, tuple(offsets(n) for n in lengths), said if c.used else None, sinks)


def hold_anything(c: Case, b: int, len_q: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """What a mask that may hide padding shows to no query of sequence `b`."""
    if len_q and len(k) and hides_keys(mask := as_mask(c.mask).static()):
        seen = mask.seen(place(b, 1, len_q, len(k), k.device), c.mask.tensors)[0, 0].any(0)
        for t in (k, v):
            t[~seen] = torch.tensor([torch.nan, -torch.inf, torch.finfo(c.dtype).max, -1.0]).repeat(t.shape[-1] // 4).to(c.dtype)


def tilt(q: torch.Tensor, k: torch.Tensor, steep: float) -> None:
    """Let the scores of a sequence rise by `steep` from its last key, which the kernel takes first, to its first: in the rows of a warpgroup's first warp;
    in those of the others by two thirds of it, a third, and nothing. Below 0 they fall."""
    if steep:
        warp, key = torch.arange(q.shape[-3]) // 16 % 4, torch.arange(k.shape[-3])
        q[..., 0] = (steep * (3 - warp) / 3)[:, None]
        k[..., 0] = ((len(key) - 1 - key) / len(key) * q.shape[-1] ** 0.5)[:, None]


def both(lengths: tuple) -> torch.Tensor:
    """[2, sequences]: queries and keys."""
    return torch.tensor(lengths if isinstance(lengths[0], tuple) else (lengths, lengths))


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths.tolist())], dtype=torch.int32)


def rows(lengths, used, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A packed tensor: of each sequence the used rows are random, the others NaN; 70 more of those lie behind it."""
    parts = [torch.full((n, heads, dim), torch.nan) for n in [*lengths.tolist(), 70]]
    for part, n in zip(parts, used.tolist(), strict=False):
        part[:n] = torch.randn(n, heads, dim)
    return torch.cat(parts).to(dtype)[:-70]


def prepared(emulator: Emulator, edits=()):
    """The kernel, with what others launch in plain torch."""
    kernel = emulator.load(*SOURCES, edits=edits)
    kernel.mask_map, kernel.join, kernel.join_units = mask_map, join, join_units
    return kernel


def join(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """`key_parts.join` by the reference."""
    found, found_lse = onchip.merge([*zip(parts.transpose(-3, -2), part_lse, strict=True)])
    out.copy_(found)
    lse.copy_(found_lse)


def join_units(p, units, listed, x: Operands, pack: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """`key_parts.join_units` by the reference, unit by unit."""
    heads = p.kv_heads if pack > 1 else p.heads
    parts, part_lse = (t.unflatten(0, (len(listed), heads, -1)) for t in units)
    rows, r, h = spans(x.q_offsets, x.q_used, p.tokens), torch.arange(parts.shape[2]), torch.arange(heads)[:, None]
    for u, (b, word) in enumerate(listed.tolist()):
        count = 1 + (word >> 25 & 31)
        if b < 0 or count == 1 or word >> 20 & 31:
            continue
        query = rows[b].start + ((word & (1 << 20) - 1) * len(r) + r) // pack
        real = ((query < rows[b].stop) & (r % pack < max(1, p.group * (pack > 1)))).nonzero().flatten()
        to = (h * p.group + r % pack if pack > 1 else h.expand(-1, len(r)))[:, real]
        one, one_lse = onchip.merge([(o.transpose(0, 1), s) for o, s in zip(parts[u : u + count], part_lse[u : u + count], strict=True)])
        out[query[real], to] = one[real].transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse[to, query[real]] = one_lse[:, real]


def emulated(c: Case, call: Call, mode: str, seed=0, edits=()):
    """Output and LSE of the kernel."""
    kernel = prepared(Emulator(mode, seed), edits)
    if c.packed:
        sizes = packed_sizes(call.q, call.k, call.v, both(c.lengths).shape[1], *both(c.lengths).amax(1).tolist())
    else:
        sizes = dense_sizes(call.q, call.k, call.v)
    x = operands(c, call)
    p, x = problem_of("prefill", How(c.mask, chain(None, c.score, None), call.sinks, None, False, c.alone, "hopper_prefill"), sizes, x, call.q)
    return kernel.launch(p, kernel.Tiles(*c.tiles), call.q, call.k, call.v, x, True)


def operands(c: Case, call: Call) -> Operands:
    x = Operands(c.dim**-0.5 if c.scale is None else c.scale, *call.offsets, *(call.used or ()))
    return drawn(c.dropout, call.q, x) if c.drop else x


def mask_map(p, _sees, x: Operands, m: int, n: int, _of_keys: bool, _device, bits: bool = False):
    """`tile.mask_map` of a mask that is the same for all heads, in plain torch; what it leaves out may be any number, here one too large."""
    inner = -(-p.len_k // n)
    found = torch.full((p.batch, -(-p.len_q // m), 2 + inner * (2 + n // 32 if bits else 1)), 3 << 24, dtype=torch.int32)
    for rows, seen in zip(found, shown(p, x), strict=True):
        some, every = in_tiles(seen, m, n, False).any(-1), in_tiles(seen, m, n, True).all(-1)
        keys = torch.nn.functional.pad(seen, (0, inner * n - seen.shape[1], 0, -len(seen) % m)).view(-1, m, inner * n).any(1) if bits else some
        for row, *listed, bit in zip(rows, some & ~every, every, keys, strict=False):
            list_tiles(row, *listed)
            if bits:
                words = (bit.view(-1, 32) << torch.arange(32)).sum(1)
                row[2 + inner : 2 + inner + len(words)] = words.to(torch.int32)
    return found, (found.shape[1], 0, found.shape[2], *[2 + inner] * bits)


def shown(p, x: Operands) -> list[torch.Tensor]:
    """What the mask shows of each sequence, bools [len_q, len_k]; the same for all heads."""
    queries = [p.len_q] * p.batch if x.q_offsets is None else [s.stop - s.start for s in spans(x.q_offsets, x.q_used, int(x.q_offsets[-1]))]
    keys = [p.len_k] * p.batch if x.k_used is None else x.k_used.tolist()
    if x.k_offsets is not None:
        keys = [s.stop - s.start for s in spans(x.k_offsets, x.k_used, int(x.k_offsets[-1]))]
    seen = []
    for b, (len_q, len_k) in enumerate(zip(queries, keys, strict=True)):
        here = len_q and len_k
        at = place(b, 1, len_q, len_k, torch.device("cpu"))
        seen.append(p.mask.seen(at, x.mask)[0, 0].expand(len_q, len_k) if here else torch.zeros(len_q, len_k, dtype=torch.bool))
    return seen


def in_tiles(seen: torch.Tensor, m: int, n: int, past: bool) -> torch.Tensor:
    """Bools [len_q, len_k] as [tiles of m queries, tiles of n keys, m x n]; `past`: what rows past the end see of keys that are there."""
    seen = torch.nn.functional.pad(seen, (0, 0, 0, -seen.shape[0] % m), value=past)
    seen = torch.nn.functional.pad(seen, (0, -seen.shape[1] % n))
    return seen.view(len(seen) // m, m, seen.shape[1] // n, n).transpose(1, 2).flatten(2)


def list_tiles(row: torch.Tensor, part: torch.Tensor, whole: torch.Tensor) -> None:
    """Into a row of the map how many tiles are seen in part and whole, the former from the front, the latter from the back."""
    part, whole = (where.nonzero()[:, 0].to(torch.int32) for where in (part, whole))
    row[0], row[1] = len(part), len(whole)
    row[2 : 2 + len(part)] = part
    row[len(row) - len(whole) :] = whole.flip(0)


def reference(c: Case, call: Call, dtype: torch.dtype):
    """The same of the reference, on the tensors in `dtype`."""
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    how = {"mask": c.mask, "score": c.score, "sinks": call.sinks, "scale": c.scale, "dropout": c.dropout, "return_lse": True, "kernel": "reference"}
    if not c.packed:
        return onchip.attention(q, k, v, **how)
    return onchip.attention_packed(q, k, v, *call.offsets, longest=tuple(both(c.lengths).amax(1).tolist()), used=call.used, **how)


def check(c: Case, call: Call, result) -> None:
    """Output and LSE against float64, beside the reference in the case's dtype."""
    cap = c.score.cap if isinstance(c.score, Softcap) else 0.0
    for ours, low, truth in zip(result, reference(c, call, c.dtype), reference(c, call, torch.float64), strict=True):
        beside = truth + cap * 2**-14 * max(1.0, truth.nan_to_num(0, 0, 0).abs().max().item())  # as much does a polynomial for tanh err
        assert_as_good_as_torch(ours, (low, beside), truth)


# ---- as it is

DENSE = [
    Case((1, 64, 2, EACH), 130, 130),
    Case((2, 64, 2, FEW), 300, 300),
    Case((3, 128, 2, FEW), 400, 400, heads=(1, 1)),
    Case((2, 128, 2, FEW), 260, 260, dim=128, heads=(4, 2)),
    Case((2, 64, 2, FEW), 140, 140, dim=256, heads=(1, 1)),
    Case((3, 128, 2, FEW), 200, 330, Full(), heads=(1, 1), batch=2),
    Case((2, 128, 2, FEW), 70, 400, Full(), dim=128, dtype=FP16),
    Case((1, 64, 1, FEW), 1, 200, Full(), heads=(8, 1)),
    Case((2, 64, 3, EACH), 200, 330, dtype=FP16),
    Case((2, 64, 3, EACH), 330, 150),
    Case((2, 64, 3, FEW), 300, 300, Window(100)),
    Case((2, 32, 2, EACH), 200, 150, Window(40, 30), heads=(3, 3), batch=2),
    Case((1, 64, 2, EACH), 190, 190, Window(None, 20)),
    Case((2, 64, 2, EACH), 150, 200, Causal(align="top_left")),
    Case((2, 64, 2, FEW), 130, 130, dim=40),
    Case((2, 64, 2, FEW), 200, 200, dim=128, dim_v=64),
    Case((2, 64, 2, FEW), 200, 200, sinks=True),
    Case((2, 64, 2, EACH), 200, 90, sinks=True, dtype=FP16),
]
HALVES = [  # tiles of keys, and halves, that one warpgroup sees nothing of
    HALVED := Case((2, 128, 2, FEW), 300, 428, Window(110), heads=(1, 1)),  # a half at either end, to the key
    Case((2, 128, 2, EACH), 300, 427, Window(130, 20), heads=(1, 1)),
    Case((2, 128, 2, FEW), 400, 400, dim=128, heads=(1, 1)),
    Case((3, 128, 2, FEW), 500, 600, Window(200), heads=(1, 1)),
    Case((2, 64, 2, FEW), 300, 341, Window(100), dim=256, heads=(1, 1)),
    Case((2, 128, 2, EACH), 400, 150, Window(40), heads=(1, 1)),
    Case((2, 128, 2, FEW), 200, 300, heads=(1, 1), score=Softcap(3.0)),
    Case((2, 128, 2, FEW), 300, 420, heads=(1, 1), steep=400.0),
    Case((2, 128, 2, EACH), lengths=((200, 0, 130), (263, 9, 300)), mask=Window(100), heads=(4, 2)),
]
PACKED = [
    Case((2, 128, 3, EACH), lengths=(70, 0, 5, 300)),
    Case((2, 128, 2, EACH), lengths=(30, 260, 1), mask=Full(), dim=128, heads=(4, 2)),
    Case((2, 64, 2, EACH), lengths=(200, 0, 130), used=(150, 0, 1), mask=Full()),
    Case((2, 64, 2, EACH), lengths=(200, 3, 130), used=(131, 0, 130), mask=Window(50), dtype=FP16),
    Case((2, 64, 2, EACH), lengths=((20, 90, 0), (150, 40, 7)), sinks=True),
    Case((2, 64, 2, EACH), lengths=(100, 70), dim=256, heads=(1, 1)),
    Case((1, 64, 2, FEW), lengths=(70, 0, 5, 200), heads=(4, 2)),
    Case((2, 64, 2, FEW), lengths=(100, 70, 200), dim=256, heads=(2, 1)),
]
TILT = torch.rand(100)
MODS = [
    Case((1, 64, 2, FEW), 300, 300, Causal() & Document(torch.arange(300) // 60)),
    Case((2, 64, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60)),
    Case((2, 64, 2, EACH), lengths=(130, 0, 200), used=(90, 0, 150), mask=Document(torch.arange(200) // 60)),
    Case((2, 64, 2, FEW), 130, 200, Full(), score=Softcap(2.0)),
    Case((2, 64, 2, EACH), 130, 130, score=ALiBi(torch.tensor([0.5, 0.25]))),
    BENT := Case((2, 64, 2, FEW), 200, 400, Full(), score=ALiBi(torch.tensor([[0.5, -0.02]]))),  # lines on both sides, and a tile that is on neither
    Case((2, 64, 2, EACH), lengths=((130, 5, 90), (40, 200, 300)), mask=Full(), dim=128, score=ALiBi(torch.tensor([0.3, 0.0625]))),
    Case((1, 64, 2, EACH), 100, 260, Causal(align="top_left"), score=ScoreMod(lambda s, b, h, i, j: s - TILT[i] * (i - j).abs() + 0.1 * j), sinks=True),
    Case((2, 64, 2, EACH), 150, 150, Causal() & Document(torch.arange(150) // 40), heads=(2, 1), score=Bias(torch.randn(2, 1, 150))),
    Case((2, 64, 2, FEW), 130, 170, MaskMod(lambda b, h, i, j: (i // 9 % 5 - j // 7 % 6).abs() < 2), score=Bias(torch.randn(2, 130, 1).bfloat16())),
]
ON_THE_LEFT = KeyPadding(torch.arange(300) >= torch.tensor([[90], [0]]))
PADDED = [  # which holds NaN, infinity and more
    HELD := Case((2, 64, 2, FEW), 200, 200, KeyPadding(torch.tensor([170, 64])) & Causal(), batch=2),
    Case((2, 128, 2, EACH), 300, 300, ON_THE_LEFT & Causal(), batch=2, dim=128, heads=(4, 2)),
    Case((2, 64, 2, FEW), 130, 200, KeyPadding(torch.rand(2, 200) < 0.7), batch=2, sinks=True),
    Case((1, 64, 2, FEW), 70, 130, Dense(torch.rand(70, 130) < 0.02), dtype=FP16),
    Case((2, 64, 2, FEW), 136, 264, Dense(torch.rand(2, 1, 1, 264) < 0.6) & Window(90), dim=256, batch=2, heads=(1, 1), score=Softcap(3.0)),
    Case((2, 64, 2, EACH), lengths=(130, 0, 200), used=(90, 0, 150), mask=KeyPadding(torch.tensor([70, 9, 200])) & Causal()),
    Case((2, 64, 2, EACH), 200, 200, KeyPadding(torch.rand(2, 200) < 0.5), batch=2, score=Softcap(30.0)),
    Case((2, 128, 2, EACH), 300, 300, ON_THE_LEFT & Causal(), batch=2, drop=0.3),
    Case((1, 64, 2, EACH, 4), 14, 200, KeyPadding(torch.rand(2, 200) < 0.5), batch=2, heads=(4, 1)),
]


def bias(*shape, dtype=BF16, causal=False, inside=None, expand=None):
    """A bias, of which what a causal mask hides, and with `inside` what lies outside of so many queries and keys of each sequence, is NaN; 64 columns
    of NaN lie behind it."""
    values = torch.full((*shape[:-1], shape[-1] + 64), torch.nan)[..., : shape[-1]]
    values.copy_(torch.randn(shape))
    if causal:
        i, j = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
        values.masked_fill_(j > i + shape[-1] - shape[-2], torch.nan)
    for one, (rows, cols) in zip(values if inside else (), inside or (), strict=True):
        one[..., rows:, :], one[..., cols:] = torch.nan, torch.nan
    values = torch.empty_strided(values.shape, values.stride(), dtype=dtype).copy_(values) if dtype != torch.float32 else values
    return Bias(values if expand is None else values.expand(expand))


SWAPPED, TWICE = torch.randn(2, 3, 72, 136).to(BF16), torch.randn(136, 136).to(FP16)
TILED = [  # which a third ring brings
    Case((2, 64, 2, FEW), 200, 264, Full(), batch=2, score=bias(2, 2, 200, 264)),
    Case((2, 128, 2, EACH), 72, 400, dim=128, heads=(4, 2), score=bias(1, 4, 72, 400, dtype=FP16, causal=True)),
    Case((2, 64, 2, FEW), 300, 300, dim=128, heads=(4, 1), score=bias(300, 300, causal=True)),
    Case((2, 64, 2, FEW), 130, 77, Full(), batch=2, score=bias(2, 1, 130, 77)),
    Case((1, 64, 2, FEW), 130, 200, Full(), batch=2, score=bias(130, 200, expand=(2, 2, 130, 200))),
    Case((2, 64, 2, FEW), 70, 136, Full(), batch=2, score=bias(2, 1, 1, 136, expand=(2, 2, 70, 136))),
    Case((2, 64, 2, FEW), 72, 136, Full(), batch=3, score=ScoreMod(lambda s, b, h, i, j: s * 0.5 + SWAPPED[h, b, i, j] * (i * 0.01))),
    Case((2, 64, 2, EACH), 136, 136, score=chain(None, lambda s, b, h, i, j: (s + TWICE[i, j]) * TWICE[i, j].abs(), 2.0)),
    Case((2, 64, 2, FEW), 136, 200, Full(), score=chain(None, bias(2, 136, 200, dtype=torch.float32), 2.0), sinks=True),
    Case((2, 32, 2, EACH), 136, 200, Window(50), score=bias(2, 136, 200)),
    Case((2, 64, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60), score=bias(2, 200, 200, causal=True)),
    Case((2, 64, 2, FEW), 136, 136, dim=256, heads=(1, 1), score=bias(136, 136, causal=True)),
    Case((2, 64, 2, EACH), lengths=(70, 0, 5, 200), score=bias(4, 2, 200, 200, inside=((70, 70), (0, 0), (5, 5), (200, 200)))),
    Case((2, 64, 2, FEW), lengths=(100, 70, 200), dim=128, score=bias(3, 2, 200, 200)),
    Case((2, 64, 2, EACH), lengths=((20, 90, 8), (150, 40, 7)), mask=Full(), score=bias(3, 1, 90, 152, inside=((20, 150), (90, 40), (8, 7)))),
]
UNSCALED = [  # over a scale that is no larger than 0 nothing is taken out of the scores
    Case((1, 64, 2, EACH), 70, 136, score=bias(70, 136), scale=0.0),
    Case((1, 64, 2, EACH), 70, 136, score=bias(70, 136), scale=-0.25),
    Case((1, 64, 2, EACH), 70, 130, score=ALiBi(torch.tensor([0.5, 0.25])), scale=0.0),
    Case((1, 64, 2, EACH), 70, 130, score=ALiBi(torch.tensor([0.5, 0.25])), scale=-0.25),
    Case((1, 64, 2, EACH), 70, 130, scale=0.0),
]
FAR = torch.randn(4, 600)
TILED += [  # by distance
    BY_DISTANCE := Case((2, 64, 2, FEW), 200, 264, Full(), batch=2, heads=(4, 2), score=RelativeBias(torch.randn(4, 401).bfloat16())),
    Case((2, 64, 2, EACH), 300, 300, heads=(4, 2), score=RelativeBias(torch.randn(4, 61).half()), dtype=FP16),
    Case((2, 128, 2, FEW), 130, 77, Full(), dim=128, score=BucketBias(torch.randn(32, 2).bfloat16())),
    Case((1, 64, 2, FEW), 200, 300, Window(90), heads=(4, 1), score=ScoreMod(lambda s, b, h, i, j: s + FAR[h, i - j + 299]), sinks=True),
    Case((2, 64, 2, EACH), 200, 300, heads=(2, 2), batch=2, score=ScoreMod(lambda s, b, h, i, j: s + FAR[b + 1, j - i + 200] * 2), scale=-0.25),
    Case((1, 64, 2, EACH), 70, 130, Full(), heads=(2, 2), score=RelativeBias(FAR[:2, :61]), scale=0.0),
    Case((2, 64, 2, FEW), 140, 200, dim=256, heads=(1, 1), score=RelativeBias(torch.randn(1, 201).bfloat16())),
    Case((2, 64, 2, FEW), 260, 392, Full(), heads=(1, 1), score=RelativeBias(torch.randn(1, 801).bfloat16()), steep=500.0),
    Case(
        (2, 64, 2, EACH), 200, 200, Causal() & Document(torch.arange(200) // 60), heads=(4, 4), score=ScoreMod(lambda s, b, h, i, j: s + FAR[h, (j - i).abs()])
    ),
]
HIDDEN = torch.randn(2, 1, 264).masked_fill(torch.rand(2, 1, 264) < 0.5, -torch.inf)
ADDED = [  # by the tensor cores
    Case((2, 64, 2, FEW), 200, 264, Full(), batch=2, heads=(4, 2), dim=128, score=bias(2, 4, 1, 264)),
    Case((3, 128, 2, FEW), 400, 400, heads=(2, 2), score=Bias(HIDDEN.to(BF16)[..., :1].expand(2, 1, 400))),
    Case((1, 64, 2, EACH), 130, 150, Full(), batch=2, dtype=FP16, score=Bias(100 * torch.randn(2, 1, 1, 150).half())),
    Case((2, 64, 2, FEW), 200, 264, Window(70), dtype=FP16, score=Bias(HIDDEN.to(BF16)), sinks=True),
    Case((2, 64, 2, FEW), 136, 264, Full(), dim=256, heads=(2, 2), score=Bias(HIDDEN.half())),
    Case((2, 64, 2, EACH), lengths=(70, 0, 5, 200), dim=128, score=bias(4, 1, 1, 200, inside=((1, 70), (1, 0), (1, 5), (1, 200)))),
    Case((2, 64, 2, FEW), 136, 392, Causal() & Document(torch.arange(392) // 60), score=Bias(torch.randn(1, 392).to(BF16)), steep=500.0),
]
BLIND = torch.randn(2, 136, 200)
BLIND[:, ::3, 60:], BLIND[:, 5] = -torch.inf, -torch.inf  # rows that see nothing of the tiles taken first, and one that sees nothing
STEEP = [  # the largest score of the tile taken first, or of all before, is not one to take weights over
    Case((2, 64, 2, FEW), 260, 400, Full(), heads=(1, 1), steep=400.0),
    Case((1, 64, 2, EACH), 130, 400, Full(), heads=(1, 1), dtype=FP16, steep=60.0),
    Case((2, 64, 2, FEW), 260, 400, Full(), heads=(1, 1), dtype=FP16, steep=400.0),
    Case((3, 128, 3, FEW), 400, 600, steep=800.0),
    Case((2, 128, 2, FEW), 200, 420, Full(), dim=128, dim_v=64, sinks=True, steep=400.0),
    Case((2, 64, 2, FEW), 140, 330, dim=256, heads=(1, 1), steep=400.0),
    Case((2, 64, 3, EACH), 200, 330, dtype=FP16, steep=100.0),
    Case((2, 64, 2, EACH), 200, 263, steep=-300.0),  # the first row of a tile of queries sees nothing of the tiles that need the mask
    Case((2, 64, 2, EACH), 200, 263, dim=128, dtype=FP16, steep=-300.0),
    Case((2, 64, 2, FEW), 300, 400, Window(250), steep=900.0),
    Case((2, 32, 2, EACH), 200, 300, Window(150, 31), dtype=FP16, steep=900.0),
    Case((2, 64, 2, EACH), lengths=((100, 70), (163, 197)), dtype=FP16, steep=600.0),
    Case((2, 64, 2, EACH), lengths=((100, 0, 70), (163, 9, 197)), steep=-600.0),
    Case((1, 64, 2, FEW), lengths=(70, 0, 5, 400), mask=Full(), steep=500.0),
    Case((1, 64, 2, FEW), 200, 263, MaskMod(lambda b, h, i, j: (j < 128) | (i % 2 > 0)), steep=-300.0),
    Case((2, 64, 2, EACH), lengths=(130, 0, 300), used=(90, 0, 250), mask=MaskMod(lambda b, h, i, j: (j < 128) | (i % 3 > 0)), steep=800.0),
    CLIMBING := Case((2, 64, 2, FEW), 460, 460, Full(), dtype=FP16, score=ALiBi(torch.tensor([0.1, 0.05]))),  # lines that rise by a little at each tile
    Case((2, 64, 2, FEW), 260, 460, Full(), score=ALiBi(torch.tensor([2.0, -2.0])), steep=400.0),  # lines that rise by 184 a tile, and fall
    Case((1, 64, 2, EACH), 200, 463, Full(), heads=(2, 2), dim=128, dtype=FP16, score=ALiBi(torch.tensor([0.02, -0.02])), steep=100.0),
    Case((2, 64, 2, FEW), 300, 400, heads=(2, 2), score=ALiBi(torch.tensor([0.03, -0.03])), steep=900.0),
    Case((2, 64, 2, EACH), lengths=((100, 0, 70), (263, 9, 397)), mask=Window(200, 100), score=ALiBi(torch.tensor([0.3, 0.03])), steep=-600.0),
    CAPPED := Case(
        (2, 64, 2, FEW), 140, 460, Full(), heads=(1, 1), score=Softcap(30.0), steep=40.0, sinks=True
    ),  # tiles that take the polynomial for tanh, and then not
    Case((2, 64, 2, FEW), lengths=((100, 0, 70), (163, 9, 197)), dim=128, score=Softcap(50.0), steep=-2000.0),
    Case((2, 64, 2, FEW), 136, 392, Full(), batch=2, score=bias(2, 2, 136, 392), steep=500.0),
    Case((2, 64, 2, EACH), 200, 328, dtype=FP16, batch=2, score=bias(2, 2, 200, 328, dtype=FP16, causal=True), steep=500.0),
    Case((2, 64, 2, EACH), lengths=((104, 72), (167, 199)), score=bias(2, 2, 104, 200), steep=-600.0),
    Case((2, 64, 2, EACH), 136, 200, Full(), score=Bias(BLIND), steep=-300.0),
    Case((2, 64, 2, EACH), 136, 392, Full(), score=chain(None, Softcap(300.0), None), steep=2000.0),
]


@pytest.fixture(autouse=True)
def filled():
    """Memory that nobody has written holds NaN, and lists in it name nothing that there is."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


DROPPED = [
    Case((2, 64, 2, FEW), 300, 300, drop=0.3),
    Case((2, 128, 2, EACH), 200, 330, Full(), dim=128, heads=(4, 2), batch=2, drop=0.1, dtype=FP16),
    Case((1, 128, 2, EACH), 130, 190, Window(70), dim=40, drop=0.5, sinks=True),
    Case((2, 64, 2, EACH), 140, 140, dim=256, heads=(1, 1), drop=0.3),
    Case((2, 128, 2, EACH), lengths=((200, 3, 130), (40, 90, 130)), drop=0.3, score=Softcap(2.0)),
    Case((2, 64, 2, EACH), 150, 200, Causal() & Document(torch.arange(200) // 60), drop=0.3, score=ALiBi(torch.tensor([0.5, 0.25]))),
    Case((2, 128, 2, EACH), 300, 300, Full(), drop=0.3, steep=30.0),  # tiles that are done again drop the same weights
    Case((2, 128, 2, EACH), 260, 260, drop=0.3),  # halves of tiles
    Case((2, 128, 2, EACH), 200, 330, Window(70), dim=128, drop=0.3),
]
HARD = [*DENSE[:5], PACKED[0], PACKED[6], MODS[0], *TILED[:3], ADDED[0], STEEP[0], STEEP[3]]  # beside those of the bugs


@pytest.mark.parametrize(("case", "mode"), timings(DENSE + HALVES + PACKED + MODS + PADDED + TILED + ADDED + STEEP + DROPPED + UNSCALED, HARD), ids=str)
@pytest.mark.sampled(2)
def test_emulated(case, mode):
    call = call_of(case)
    check(case, call, emulated(case, call, mode))


@pytest.mark.parametrize("case", [DENSE[0], DENSE[1], PACKED[3], STEEP[0]], ids=str)
def test_the_same_bits_in_any_order(case):
    call = call_of(case)
    first, *others = (emulated(case, call, mode, seed) for mode in MODES for seed in range(2))
    for other in others:
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


@pytest.mark.parametrize("case", [Case((2, 64, 2, EACH), 200, 70), Case((1, 64, 2, EACH), lengths=((150, 9), (0, 9)))], ids=str)
def test_rows_that_see_no_key(case):
    out, lse = emulated(case, call_of(case), "slow loads")
    out, blind = (out, 150) if case.packed else (out[0], 130)
    assert not out[:blind].any() and (lse[..., :blind] == -torch.inf).all()
    assert lse[..., blind:].isfinite().all()


def test_a_sequence_alone_has_the_same_bits():
    """In its last tile lie the next one's queries, whose scores outgrow its own."""
    both_of = Case((1, 64, 2, EACH), lengths=((40, 70), (300, 70)), mask=Full(), alone=True)
    call, first = call_of(both_of), slice(0, 40)
    tilt(call.q[:40], call.k[:300], 1e-3)
    call.q[40:, :, 0] = 400.0
    together = emulated(both_of, call, "slow loads")
    alone = Call(call.q[:40], call.k[:300], call.v[:300], tuple(offsets(torch.tensor([n])) for n in (40, 300)))
    alone = emulated(both_of._replace(lengths=((40,), (300,))), alone, "slow loads")
    assert torch.equal(together[0][first], alone[0]) and torch.equal(together[1][:, first], alone[1])


def test_the_height_of_a_tile_changes_no_bit():
    """Of a batch-invariant packed batch it is chosen by the longest sequence."""
    low = Case((2, 128, 3, EACH), lengths=((190, 70), (330, 200)), alone=True)
    call = call_of(low)
    for ours, other in zip(*(emulated(c, call, "slow loads") for c in (low, low._replace(tiles=(3, 128, 3, EACH)))), strict=True):
        assert torch.equal(ours, other)


# ---- with a bug


class Bug(NamedTuple):
    """What is wrong, a case in which it shows, and how the sources differ: (text, what stands there instead)."""

    what: str
    case: Case
    edits: tuple[tuple[str, str], ...]


FULL = Case((2, 64, 2, FEW), 260, 400, Full(), heads=(1, 1))
THREE = Case((3, 128, 2, FEW), 200, 330, Full(), heads=(1, 1))
SHORT = Case((1, 64, 2, FEW), 60, 60, Full(), heads=(24, 1))  # many tiles of one step
CAUSAL = Case((2, 64, 2, EACH), 200, 330)
GROWING = CAUSAL._replace(dtype=FP16)  # without headroom
WINDOW = Case((2, 64, 2, FEW), 200, 300, Window(100))
WIDE = Case((2, 64, 2, FEW), 70, 130, Full(), dim=256, heads=(9, 1))
SPLIT = MODS[-2]
UNEVEN = Case((1, 64, 2, EACH), lengths=(70, 0, 5, 200))
NEIGHBOUR = Case((2, 64, 2, EACH), lengths=(100, 70), used=(90, 70), mask=Full())

WAIT_FOR_SCORES = "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
RELEASE_KEYS = "            release(ki, 10, C.readers)\n"
RELEASE_MASKED = "            let_go(shrink, ki, t_ring, C, GROUP)\n"
RELEASE_VALUES = "        release(vi, 10 + C.stages, C.readers)\n"
ALL_BUT_DONE = "        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])  # all but done"
WAIT_FOR_OUTPUT = ALL_BUT_DONE + ": its first operand is read from registers, which held the warps up\n" + RELEASE_VALUES
RELEASE_QUERIES = "                mbarrier.arrive(q_empty.index(mine), count=1)\n"
LEFT_BEFORE = "                tma.store_wait(0)  # the tile before has left\n"
LEFT = "                tma.store_wait(0)\n"
NEXT = "        b = next_sequence(message, turn)\n"
MESSAGE = "    numbers, full, empty = message\n"
LOW = "low - left, 1 + masked + bare, own, "
ATTEND = "            acc, ki, kp, vi, vp = _attend("
SHRUNK = "    return acc, total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]\n"
BUGS = [
    Bug("K is released before its product is waited for", FULL, (
        (RELEASE_KEYS, ""),
        (WAIT_FOR_SCORES, RELEASE_KEYS[4:] + WAIT_FOR_SCORES),
    )),
    Bug("K under a mask is released before its product is waited for", CAUSAL, (
        (RELEASE_MASKED, "            pass\n"),
        (WAIT_FOR_SCORES, f"        if EDGE:\n    {RELEASE_KEYS[4:]}{WAIT_FOR_SCORES}"),
    )),
    Bug("V is released before its product is waited for", FULL, ((WAIT_FOR_OUTPUT, RELEASE_VALUES + WAIT_FOR_OUTPUT.replace(RELEASE_VALUES, "")),)),
    Bug("V is released twice", FULL, ((WAIT_FOR_OUTPUT, WAIT_FOR_OUTPUT + RELEASE_VALUES),)),
    Bug("K is never released", FULL, ((RELEASE_KEYS, ""),)),
    Bug("K under a mask is never released", CAUSAL, ((RELEASE_MASKED, "            pass\n"),)),
    Bug("K of a wide head is never released", WIDE, ((RELEASE_MASKED, "            pass\n"),)),
    Bug("V is not waited for", FULL, (
        ("        come(v_full, vi, vp, C)\n        weights =", "        weights ="),
    )),
    Bug("scores are not waited for", FULL, ((WAIT_FOR_SCORES, ""),)),
    Bug("the output is scaled while its product is under way", FULL, ((WAIT_FOR_OUTPUT, RELEASE_VALUES),)),
    Bug("weights do not go through the wait", FULL, (
        (WAIT_FOR_OUTPUT, WAIT_FOR_OUTPUT.replace("acc, weights =", "acc =").replace("[acc, weights]", "[acc]")),
    )),
    Bug("the copier takes the wrong phase", FULL, (("mbarrier.wait(empty.index(index), phase ^ 1)", "mbarrier.wait(empty.index(index), phase)"),)),
    Bug("the copier takes a buffer for free once too often", FULL, (("elif used >= STAGES:", "elif used > STAGES:"),)),
    Bug("the copier announces half of the bytes", FULL, (("full.index(index), desc.block_type.nbytes)", "full.index(index), desc.block_type.nbytes // 2)"),)),
    Bug("the copier counts itself out", FULL, (("self.groups + 32 * max", "self.groups + 0 * max"),)),
    Bug("the phase does not flip where a ring wraps", FULL, (("gl.where(wrap, phase ^ 1, phase)", "phase"),)),
    Bug("the phase of Q is not flipped", SHORT, (("turn // C.rounds % 2)", "0)"),)),
    Bug("the phase of Q flips with every tile", SHORT, (("turn // C.rounds % 2)", "turn % 2)"),)),
    Bug("Q of the second round is read from the first one's buffer", SHORT, (("queries.index(mine)", "queries.index(GROUP)"),)),
    Bug("Q is released before it is used", SHORT, ((RELEASE_QUERIES + LEFT_BEFORE, LEFT_BEFORE), (ATTEND, RELEASE_QUERIES[4:] + ATTEND))),
    Bug("the output's buffer is rewritten before it has left", SHORT, ((LEFT_BEFORE, ""),)),
    Bug("the queries' buffer is given back before the output in it has left", WIDE, ((LEFT, ""),)),
    Bug("the last output is not waited for", FULL, ((NEXT + "    tma.store_wait(0)\n", NEXT),)),
    Bug("the output leaves without a fence", FULL, (("                fence_async_shared()\n                tma_store(", "                tma_store("),)),
    Bug("a packed output's buffer is filled again without a fence", PACKED[-1], (
        ("                if C.share:  # before the copy engine fills it again\n", "                if C.m < 0:\n"),
    )),
    Bug("the turn is never handed over", FULL, (("        turn_over(GROUP, C.groups)\n        tile = ", "        tile = "),)),
    Bug("nobody goes first", FULL, (("    first_turn(GROUP, C.groups)\n", ""),)),
    Bug("of three, nobody comes after the second", THREE, (("TURNS[(GROUP + 1) % GROUPS]", "TURNS[(GROUP + 1) % 2]"),)),
    Bug("both warpgroups take the first one's queries", FULL, (("queries.index(mine)", "queries.index(mine - GROUP)"),)),
    Bug("a causal mask off by one", CAUSAL, (("(shift + C.right + 1)", "(shift + C.right + 2)"),)),
    Bug("a window off by one", WINDOW, (("(shift - C.left)", "(shift - C.left + 1)"),)),
    Bug("the window's end is taken for whole tiles", WINDOW, ((LOW + '"edge"', LOW + '"whole"'),)),
    Bug("one tile too many goes without the mask", CAUSAL, (
        ("masked = top - outer", "masked = gl.maximum(top - outer - 1, 0)"),
        ("bare = outer - inner", "bare = top - inner - masked"),
    )),
    Bug("the sum does not shrink", GROWING, ((SHRUNK, "    return acc, total\n"),)),
    Bug("the output does not shrink", GROWING, (("    acc = scale_rows(", "    scale_rows("),)),
    Bug("values of the next sequence are not cleared", NEIGHBOUR, (("    if n + N > len_k:\n        layout", "    if n < 0:\n        layout"),)),
    Bug("values of padding are not cleared", HELD, (("if seen != -1:", "if seen == 1:"),)),
    Bug("padding is another tile's", HELD, (("here(map_strides[3]) + n // 32", "here(map_strides[3])"),)),
    Bug("padding of a part of a tile is not looked for", HELD, (("gl.static_range(C.n // 32)", "gl.static_range(1)"),)),
    Bug("padding is in the first tile alone", PADDED[2], (("if C.mapped and EDGE:\n            clear", "if C.mapped and C.cap > 0:\n            clear"),)),
    Bug("cleared values are read without a fence", NEIGHBOUR, (("0.0).to(values.dtype))\n    fence_async_shared()\n", "0.0).to(values.dtype))\n"),)),
    Bug("what keys decide is that of the first tile", SPLIT, (("        j = n + gl.arange(0, C.n, layout", "        j = gl.arange(0, C.n, layout"),)),
    Bug("what rows decide is that of the first warpgroup", SPLIT, (("of_rows(rows, b, head,", "of_rows(rows - GROUP * 64, b, head,"),)),
    Bug("what keys decide of another head", SPLIT, (("known = KEYS(call[2], call[3]", "known = KEYS(call[2], call[3] * 0"),)),
    Bug("a place of the list without a tile is taken for one", UNEVEN, (("there = b >= 0", "there = b >= -1"),)),
    Bug("all sequences are listed from the first place on", UNEVEN, (("        start += tl.sum(", "        tl.sum("),)),
    Bug("two tiles of as much work have one place", UNEVEN, (("others[None, :] < at[:, None]", "others[None, :] < 0"),)),
    Bug("a tile is drawn twice", SHORT, (("gl.num_programs(0) + gl.inline_asm", "gl.num_programs(0) - 1 + gl.inline_asm"),)),
    Bug("the first tiles are drawn again", SHORT, (("gl.num_programs(0) + gl.inline_asm", "gl.inline_asm"),)),
    Bug("the next tile is told before the one before was heard", SHORT, (("    mbarrier.wait(empty.index(index), turn // 2 % 2 ^ 1)\n", ""),)),
    Bug("the next tile is not waited for", SHORT, (("    if N == 0:\n        mbarrier.wait(full.index(index), turn // 2 % 2)\n", ""),)),
    Bug("nobody says that the next tile was heard", SHORT, (("    mbarrier.arrive(empty.index(turn % 2), count=1)\n", "    pass\n"),)),
    Bug("the next tile is told in the place of the one before", SHORT, ((MESSAGE + "    index = turn % 2\n", MESSAGE + "    index = 0\n"),)),
    Bug("the end is never told", FULL, (("    tell(message, turn, (gl.to_tensor(-1),))\n", ""),)),
    Bug("how long a sequence is has not been heard", UNEVEN, (("turn, 3, WARPS), hear(message, turn, 4, WARPS)", "turn, 3, WARPS), len_q"),)),
]  # fmt: skip

BUGS += [
    Bug("half a tile is left out of which one key is seen", HALVED._replace(len_k=429), (("end <= mine * N + N // 2", "end <= mine * N + N // 2 + 1"),)),
    Bug("half a tile is left out at a window's end of which one key is seen", HALVED._replace(mask=Window(129)), (
        ("start >= lowest * N + N // 2", "start >= lowest * N + N // 2 - 1"),
    )),
    Bug("the half that is seen is the other one", HALVED, ((".slice(LEFT, SEEN, 0)", ".slice(0, SEEN, 0)"),)),
    Bug("half a tile's weights are of its other half's values", HALVED, (("among(made, LEFT > 0, words)", "among(made, False, words)"),)),
    Bug("half a tile's mask is of its other half", HALVED, (("hide(scores, n + LEFT, ", "hide(scores, n, "),)),
    Bug("a tile that is passed over is not let go", WINDOW, (("        release(ki, 10, C.readers)\n        if t_ring", "        if t_ring"),)),
    Bug("a tile that is passed over is none of the turns", WINDOW, (("        turn_over(GROUP, C.groups)\n        release(ki, 10", "        release(ki, 10"),)),
    Bug("a warpgroup leaves out what the one before it sees nothing of", WINDOW, (
        (" + group * C.own + shift\n        start, end", " + (group - 1) * C.own + shift\n        start, end"),
    )),
]  # fmt: skip

READ = "        start = begin(n, call, of, t_ring, ki, kp, SCORE, C, s_layout)\n"
RELEASE_TILE = "                release(ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)\n"
RELEASE_MASKED_TILE = "        release_after(shrink, ki, PAIRS_LET_GO - 8 * GROUP, ONE_GROUP)\n"
BUGS += [
    Bug("the third ring is not waited for", TILED[0], (("        mbarrier.wait(full.index(index), phase)\n        tile = ", "        tile = "),)),
    Bug("the third ring is released before it is read", TILED[0], ((RELEASE_TILE, "                pass\n"), (READ, RELEASE_TILE[8:] + READ))),
    Bug("the third ring is released before it is read under a mask", TILED[1], (
        (RELEASE_MASKED_TILE, "        pass\n"), (READ, f"        if EDGE:\n{RELEASE_TILE[4:]}{READ}"),
    )),
    Bug("the third ring is never released", TILED[0], ((RELEASE_TILE, "                pass\n"),)),
    Bug("the third ring is never released under a mask", TILED[1], ((RELEASE_MASKED_TILE, "        pass\n"),)),
    Bug("another buffer of the third ring is released first", TILED[0], (("is not None:\n        release(ki,", "is not None:\n        release(ki ^ 1,"),)),
    Bug("both warpgroups take the first one's tile", TILED[0], (("rings[2], rings[3 + GROUP], alarms", "rings[2], rings[3], alarms"),)),
    Bug("both warpgroups' tiles are the first one's", TILED[0], (("(tile_m * C.m + group * 64) * steps[2], n]", "tile_m * C.m * steps[2], n]"),)),
    Bug("a tile is that of the keys before", TILED[0], (("place, after - start_k, C)", "place, n - start_k, C)"),)),
    Bug("a packed batch's keys are counted from its beginning", TILED[14], (("place, n - start_k, C)", "place, n, C)"),)),
    Bug("what one dimension repeats is looked for further on", TILED[3], (("head * steps[1], (tile", "head, (tile"),)),
    Bug("a row that is repeated is looked for further on", TILED[5], (("+ group * 64) * steps[2], n]", "+ group * 64), n]"),)),
    Bug("all sequences read the first one's", TILED[3], (("[b * steps[0], head", "[b * 0, head"),)),
    Bug("keys are looked up that a map does not say", SPLIT, (("        tile = gl.minimum(tile, call[5] // C.n)\n", "        pass\n"),)),
    Bug("all heads read the first one's bias of keys", ADDED[0], (("steps[1] * head", "0"),)),
    Bug("a bias of keys is not waited for", ADDED[0], (("2 if C.biased else C.fillers)", "C.fillers)"),)),
    Bug("a bias of keys is another stage's", ADDED[0], (("rows.index(index).reshape", "rows.index(0).reshape"),)),
    Bug("a bias of keys is rounded", ADDED[2], (("gl.where(columns < 3, each", "gl.where(columns < 1, each"),)),
    Bug("a bias of -inf meets a factor of 0", ADDED[3], (("rest)), LEAST)", "0.0)), 0.0)"),)),
    Bug("an output takes the place of queries that are ahead", ADDED[0], (("o_buffers.index(mine if C.share else GROUP)", "o_buffers.index(GROUP)"),)),
]  # fmt: skip

RISING, SLOWLY, TILED_RISING = STEEP[0], STEEP[1], STEEP[-5]
UNSETTLED = [STEEP[7], STEEP[8], STEEP[14], STEEP[-2]]
ALARM = "    return gl.max(alarms.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > 0\n"
AGAIN = "                acc, total = shrunk(acc, total, shrink, C)\n"
IF_OUTGROWN, IF_RISES = "            if outgrown(", "        if RISES:\n            "
BUGS += [
    *(Bug("the alarm is never raised", case, ((ALARM, "    return alarms is None\n"),)) for case in (RISING, RISING._replace(dtype=FP16), TILED_RISING)),
    Bug("one warp's alarm counts", RISING, ((ALARM, ALARM.replace("gl.max(", "").replace(", 0) > 0", "[3] > 0")),)),
    Bug("weights may be larger than float16 holds", SLOWLY, (("MOST = gl.constexpr(2.0**14)", "MOST = gl.constexpr(2.0**20)"),)),
    Bug("the output does not shrink after an alarm", RISING, ((AGAIN, AGAIN.replace("acc, total =", "_, total =")),)),
    Bug("the sum does not shrink after an alarm", RISING, ((AGAIN, AGAIN.replace("acc, total =", "acc, _ =")),)),
    Bug("weights stay what they were after an alarm", RISING, ((AGAIN + "                words, sums =", AGAIN + "                _, sums ="),)),
    Bug("sums stay what they were after an alarm", RISING, ((AGAIN + "                words, sums =", AGAIN + "                words, _ ="),)),
    Bug("a tile is done again without what its score adds", TILED_RISING, (
        ("deps=[product(q, kt, k_ring, ki, start, PART, C, GROUP)]", "deps=[warpgroup_mma(q, kt, start, use_acc=False, is_async=True)]"),
    )),
    Bug("K is released before a tile may be done again", RISING, ((RELEASE_KEYS, ""), (IF_OUTGROWN, RELEASE_KEYS + IF_OUTGROWN))),
    Bug("distances are those of a warp's first rows", BY_DISTANCE, ((":, None] - below\n", ":, None] - below // 16 * 16\n"),)),
    Bug("distances are the first warpgroup's", BY_DISTANCE, (("C.m + GROUP * 64, len_q, N,", "C.m, len_q, N,"),)),
    Bug("distances are the first head's", BY_DISTANCE, (("head.to(gl.int64) * rows[6] + ahead", "head.to(gl.int64) * 0 + ahead"),)),
    Bug("a line goes past where it bends", BENT, (("gl.maximum(first // C.n - (high", "gl.maximum(first // C.n + 1 - (high"),)),
    Bug("a line begins where it does not bend yet", BENT, (("gl.cdiv(gl.maximum(last, 0), C.n)", "(gl.maximum(last, 0) // C.n)"),)),
    Bug("a line is as high at its far end", BENT, (("        n += C.n\n", "        n += 1\n"),)),
    Bug("a line is as steep as bfloat16 says", BENT, (("gl.where(column == 1, middle, ", "gl.where(column == 1, 0.0, "),)),
    Bug("weights of a rising line are over the tile before's crest", CLIMBING, (("top, shrink = grown(crest + height", "_, shrink = grown(crest + height"),)),
    Bug("the output does not shrink where lines rise", CLIMBING, ((IF_RISES + "acc, total =", IF_RISES + "_, _ ="),)),
    Bug("a bend lies in a tile of one slope", BENT, (("x + bare - before, own", "x + bare - before - bent, own"),)),
    Bug("a cap's weights are over another number", CAPPED, (("-1.0 * C.cap]", "-1.0 * C.cap + 1.0]"),)),
    Bug("large scores are taken for small ones", CAPPED, (("    far = strayed(sums, call[7], alarms, C)\n", "    far = C.cap == 0\n"),)),
    Bug("queries are as they came", CAPPED, ((" * 2.0**C.fold", ""),)),
    Bug("a tile is done twice where scores grow", CAPPED, (("x, whole = x + done, whole - done\n", "x, whole = x + done - 1, bare + 1 - done\n"),)),
    Bug("the third ring is released before a tile may be done again", TILED_RISING, (
        (RELEASE_TILE, "                pass\n"), (IF_OUTGROWN, f"            if t_ring is not None:\n{RELEASE_TILE}{IF_OUTGROWN}"),
    )),
    *(Bug("a row without a maximum of its own is taken for settled", case, (("unsettled[:, None] | (sums", "(sums"),)) for case in UNSETTLED),
]  # fmt: skip


LANES = "    first, second = gl.where(odd, other, mine), gl.where(odd, mine, other)\n"
SUMS = "        sums = gl.sum(weights.reshape([64, N // 8, 8]), 1)\n"
DROP_FIRST = "        weights = gl.where(kept(n, drops, N, False, layout), weights, 0.0)\n"
DROP = "        words = as_pairs(gl.where(kept(n, drops, N, False, layout), weights, 0.0), DTYPE)\n"
BUGS += [
    Bug("dropped weights are not in the sums", DROPPED[0], ((SUMS + DROP, DROP_FIRST + SUMS + "        words = as_pairs(weights, DTYPE)\n"),)),
    Bug("weights that stay do not grow", DROPPED[0], (("inverse * growth(dropout, C)", "inverse * 1.0"),)),
    Bug("both warpgroups drop the same weights", DROPPED[0], (("place[2] * C.m + GROUP * C.own, b * sizes[3]", "place[2] * C.m, b * sizes[3]"),)),
    Bug("all heads drop the same weights", DROPPED[1], (("b * sizes[3] + head, C)", "b * sizes[3], C)"),)),
    Bug("all tiles of keys drop the same weights", DROPPED[1], ((DROP, DROP.replace("kept(n,", "kept(n * 0,")),)),
    Bug("a lane has its own words twice", DROPPED[1], ((LANES, "    first, second = mine, mine\n"),)),
    Bug(
        "a lane has its neighbour's words in its own place",
        DROPPED[1],
        ((LANES, "    second, first = gl.where(odd, other, mine), gl.where(odd, mine, other)\n"),),
    ),
    Bug(
        "a tile's right half drops as its left one",
        DROPPED[8],
        (("n + LEFT, drops, values.dtype, C)\n            words = among", "n, drops, values.dtype, C)\n            words = among"),),
    ),
    Bug("half of a first tile is not dropped", DROPPED[7], (("weigh_kept(scores, top, gain, n, drops, DTYPE, C)", "weigh(scores, top, gain, DTYPE, C)"),)),
    Bug(
        "half of a first tile drops as another tile",
        DROPPED[7],
        (("weigh_kept(scores, top, gain, n, drops, DTYPE, C)", "weigh_kept(scores, top, gain, n + N, drops, DTYPE, C)"),),
    ),
    Bug("words are not turned", DROPPED[1], (("16 * _along(tile, ROW_8) + 8 * _along(tile, COLUMN_8)", "16 * _along(tile, ROW_8)"),)),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
@pytest.mark.sampled(3)
def test_a_planted_bug_shows(bug):
    """In one of the timings: as a wrong result, a hang, or what the emulator refuses."""
    call = call_of(bug.case)
    for mode in MODES:
        try:
            check(bug.case, call, emulated(bug.case, call, mode, edits=bug.edits))
        except (Fault, AssertionError):
            return
    pytest.fail(f"nobody noticed that {bug.what}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [FULL, THREE, SHORT, CAUSAL, WINDOW, WIDE, UNEVEN, NEIGHBOUR], ids=str)
def test_without_the_bug(case, mode):
    test_emulated(case, mode)


def test_a_bug_must_find_its_place():
    with pytest.raises(LookupError, match="stands in none"):
        Emulator(MODES[0]).load(*SOURCES, edits=[("no such text", "")])


def test_a_deadlock_says_who_waits_for_what():
    with pytest.raises(Deadlock, match=r"copy.* waits for named barrier 1[01]"):
        emulated(FULL, call_of(FULL), MODES[0], edits=[(RELEASE_KEYS, "")])
