"""Tiles of `hopper_prefill`, and which ones a call takes: where there are fewer than multiprocessors, those that are done first by a model of the time."""

from typing import NamedTuple

import triton

from onchip.core.device import Device
from onchip.core.kernel import pick
from onchip.core.masks import Band
from onchip.core.problem import Attention
from onchip.kernels.attention.hopper_tiles import pack_of, programs_of, query_tiles, tile_of
from onchip.kernels.attention.key_parts import key_tiles, parts_allowed, parts_by_lengths
from onchip.kernels.attention.texts import far_of, is_light
from onchip.kernels.attention.tile import order, together
from onchip.kernels.hopper import block

# Groups, keys a tile and stages, by head dimension up to. (At 64, 192 queries leave 160 registers a thread: too few for a bias, a window or a map.)
TILES = ((64, (2, 128, 3)), (128, (2, 128, 2)), (256, (2, 64, 2)))
LONG_64 = (3, 128, 3)
TILED = 2  # stages of a problem with a third ring: its hardware barriers begin at 14
SHORT = 2048  # queries of a causal problem: smaller tiles are more even
# Of a key tile's time with two warpgroups (1.36 us at d128): that with one or three, and what a tile of queries and joining parts take beside their keys.
GAIN = 0.9  # of the time without parts, that with them at most: what the model does not know is as much
STEP, TILE, JOIN = {1: 0.77, 2: 1.0, 3: 1.45}, 1.4, 5.0


class Tiles(NamedTuple):
    """Warpgroups of 64 rows, keys a tile, key tiles in flight, programs at most (see `programs_and_counter`), places for heads side by side in a tile's rows,
    a power of two (see `pack_of`; of 1 all rows are queries of one head), and in how many parts the keys of a tile of queries are dealt out; 0: as lengths
    on the device say, which have those of long sequences in parts while multiprocessors would be idle."""

    groups: int
    n: int
    stages: int
    programs: int
    pack: int = 1
    parts: int = 1

    def __str__(self):
        rows = f" of {self.queries} queries x {self.pack} heads" if self.pack > 1 else ""
        keys = {0: ", keys of long sequences in parts", 1: ""}.get(self.parts, f", their keys in {self.parts} parts")
        return f"{64 * self.groups}x{self.n} tiles{rows}{keys}, {self.groups} warpgroups, {self.stages} stages, at most {self.programs} programs"

    @property
    def queries(self) -> int:
        return 64 * self.groups // self.pack

    def count(self, p: Attention) -> int:
        """Tiles of queries, of all heads and sequences."""
        return query_tiles(p, 64 * self.groups, self.pack) * self.heads(p)

    def heads(self, p: Attention) -> int:
        """Heads of which each has tiles of its own."""
        return p.kv_heads if self.pack > 1 else p.heads

    def order(self, p: Attention) -> str:
        """How programs take the tiles of a call; of queries that go as packed ones, as they go."""
        p = p if self.parts else p._replace(tokens=p.tokens or p.batch * p.len_q)
        return order(p, self.count(p) * max(1, self.parts), self.programs, side_by_side(p))


def configs(p: Attention, device: Device) -> list[Tiles]:
    """The tiles of the head dimension; smaller ones, or parts of their keys, where they are too few for the device."""
    width = max(block(p.dim), block(p.value_dim))
    groups, n, stages = pick(TILES, width)
    light = p.keys != "paged" and "dropout" not in p.extras and (p.score is None or is_light(p.score.text) or far_of(p) is not None)
    if width == 64 and light and isinstance(p.mask, Band) and p.mask.left is None and (p.len_q > SHORT or p.mask.right is None):
        groups, n, stages = LONG_64
    if tile := tile_of(p):
        n, stages = n * 2 // tile.dtype.itemsize, TILED
    alone, programs = "batch_invariant" in p.extras, programs_of(device)
    whole = _packed(p, Tiles(groups, n, stages, programs), alone)
    if parts_by_lengths(p, whole.queries, n, whole.heads(p), programs):
        return [whole._replace(groups=min(groups, triton.cdiv(p.len_q * whole.pack, 64)), parts=0)]
    if alone or whole.count(p) >= programs:
        return [whole]
    lower = {_packed(p, Tiles(g, n, stages, programs), alone) for g in range(1, groups + 1)}
    every = [tiles._replace(parts=parts) for tiles in sorted(lower, reverse=True) for parts in parts_allowed(p, tiles.queries, n)]
    dealt, kept = (min(some, key=lambda tiles: time_of(p, tiles)) for some in (every, [tiles for tiles in every if tiles.parts == 1]))
    return [dealt if time_of(p, dealt) < GAIN * time_of(p, kept) else kept]


def _packed(p: Attention, tiles: Tiles, alone: bool) -> Tiles:
    """The same with heads side by side, where that is better, and no more rows than these fill; but for those of others, which a result must not depend on."""
    pack = pack_of(p, 64 * tiles.groups)
    most = triton.cdiv(p.len_q * pack, 64) if not (alone and p.tokens) else tiles.groups
    return tiles._replace(pack=pack, groups=tiles.groups if pack == 1 else min(tiles.groups, 2, most))


def time_of(p: Attention, tiles: Tiles) -> float:
    """In key tiles of two warpgroups: rounds of equal tiles, the longest tile, or all of them on all multiprocessors, whichever is most."""
    first, last = (triton.cdiv(steps, tiles.parts) * STEP[tiles.groups] + TILE for steps in key_tiles(p, tiles.queries, tiles.n))
    count = tiles.count(p) * tiles.parts
    most = max(triton.cdiv(count, tiles.programs) * min(first, last), first, last, count * (first + last) / 2 / tiles.programs)
    return most + JOIN * (tiles.parts > 1)


def side_by_side(p: Attention) -> int:
    """`together`; a head's keys in flight are in a packed problem those of all sequences."""
    return together(p, 0 if not p.tokens else p.batch * p.len_k if p.page else p.tokens_k or p.tokens)
