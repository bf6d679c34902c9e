"""Philox-4x32 with seven rounds (Salmon et al., 2011) in plain torch: the random numbers of dropout, the same on every device.

The counter is (key, query, batch * heads + head, offset), the key the 64-bit seed; the first of the four words decides.
"""

import torch
from torch import Tensor

ROUNDS = 7  # passes BigCrush; ten are only more of a margin
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox(state: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """The first 32-bit word, as int64, of counters that broadcast; `state` int64 [2] holds seed and offset."""
    seed, offset = state[0], state[1]
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    c0, c1, c2, c3 = (c.long() & WORD for c in (c0, c1, c2, offset))
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32-bit product, in halves: int64 has a sign."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    middle = (high & 0xFFFF) << 16
    total = low + middle
    return ((high >> 16) + (total >> 32)) & WORD, total & WORD


def threshold(p: float) -> int:
    """A weight is dropped when its word is below this."""
    return min(int(p * 2**32), WORD)


def kept(p: float, state: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, heads: int) -> Tensor:
    """True where a weight stays; b, h, i, j broadcast as in a Place."""
    return philox(state, j, i, b * heads + h) >= threshold(p)


def draw(device: torch.device, seed: int | None, offset: int) -> Tensor:
    """The state: the given seed, or one of torch's generator of the device (no synchronisation)."""
    state = torch.empty(2, dtype=torch.int64, device=device)
    state[0].random_() if seed is None else state[0].fill_(seed)
    state[1].fill_(offset)
    return state
