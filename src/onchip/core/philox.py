"""Philox-4x32 with seven rounds (Salmon et al., 2011) in plain torch: the random numbers of dropout, the same on every device.

Of attention's weights sixteen share a call: queries i, i + 1, i + 8, i + 9 and keys j, j + 1, j + 8, j + 9, since these are what a thread of a tensor core's
accumulator has side by side, whether its rows are queries or keys. The counter is (key, query, batch * heads + head, offset), key and query without their
bits of value 1 and 8; the key of the cipher is the 64-bit seed. Bits 1 of query and key choose one of the four words, bits 8 which of its bytes comes first:
a weight is dropped where that word, turned round and read as a signed number, is below `bar(p)`. So each weight is dropped with probability p to 2^-32.
Two that share a word know of each other where a first byte is that of the bar: their correlation is at most about 1/256. (Where p is below 1/256, that is
whenever one is dropped: of those few there are more together than chance would have.)
"""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from onchip.core.parts import is_whole

ROUNDS = 7  # passes BigCrush; ten are only more of a margin
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
SHARED = 9  # the bits of a query and of a key that choose one of the sixteen numbers of a call


def philox(key: tuple[Tensor, Tensor], counter: Sequence[Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """The four 32-bit words, as int64, of a key of two words and a counter of four; int64 tensors that broadcast."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(rounds):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32-bit product, whose 64 bits are those of int64's too."""
    if torch.compiler.is_compiling():  # past 2^63 C++ promises nothing, and a compiler of graphs may write C++
        product = (a - (1 << 32)) * b
        return ((product >> 32) + b) & WORD, product & WORD
    product = a * b
    return (product >> 32) & WORD, product & WORD


def threshold(p: float) -> int:
    """A number is dropped when its word is below this."""
    return min(int(p * 2**32), WORD)


def bar(p: float) -> int:
    """`threshold` of words that are read as signed numbers, as kernels compare them."""
    return threshold(p) - (1 << 31)


def kept(p: float, state: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, heads: int) -> Tensor:
    """True where a weight of attention stays; b, h, i, j broadcast as in a Place, queries along the last but one dimension and keys along the last."""
    if i.device.type != "cpu" or torch.compiler.is_compiling():  # to find what calls there are would wait for the device, and no graph can hold it
        return _kept_alone(p, state, b * heads + h, i, j)
    (rows, own_row), (cols, own_col) = _calls(i.flatten()), _calls(j.flatten())
    w0, w1, w2, w3 = (word.to(torch.int32) for word in _words(state, b * heads + h, rows[:, None], cols))  # [.., rows, cols]
    words = torch.stack((torch.stack((w0, w1), -1), torch.stack((w2, w3), -1)), -3)  # bit 1 of a query behind rows, of a key behind cols
    stays = [words >= bar(p), *((words << n | words >> 32 - n & (1 << n) - 1) >= bar(p) for n in (8, 16, 24))]
    stays = torch.stack((torch.stack(stays[:2], -2), torch.stack(stays[2:], -2)), -5)  # and bits 8 in front of these
    return stays.flatten(-6, -4).flatten(-3).index_select(-2, own_row).index_select(-1, own_col)


def _kept_alone(p: float, state: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The same by a call for each weight."""
    words, turns = _words(state, head, i, j), (i & 8) * 2 + (j & 8)
    word = torch.where(i % 2 == 0, torch.where(j % 2 == 0, *words[:2]), torch.where(j % 2 == 0, *words[2:]))
    return (((word << turns | word >> 32 - turns) & WORD) ^ 1 << 31) >= threshold(p)


def _words(state: Tensor, head: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    """The four words of the calls of queries and keys."""
    seed, offset = state[0], state[1]
    counter = tuple(x.long() & WORD for x in (j & ~SHARED, i & ~SHARED, head, offset))
    return philox((seed & WORD, (seed >> 32) & WORD), counter)


def _calls(places: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers without SHARED, and where each of `places` is among four times as many, its bits 8 and 1 behind."""
    found, at = torch.unique(places.long() & ~SHARED, return_inverse=True)
    return found, 4 * at + (places & 8) // 4 + (places & 1)


def kept_rows(p: float, state: Tensor, rows: int, width: int) -> Tensor:
    """True where an element of [rows, width] stays, a call each: of norms, whose programs have whole rows."""
    row, col = (torch.arange(n, device=state.device) for n in (rows, width))
    seed, offset = state[0], state[1]
    return philox((seed & WORD, (seed >> 32) & WORD), (col, row[:, None], torch.zeros_like(col), offset & WORD))[0] >= threshold(p)


def check(name: str, p: float, seed: int | Tensor | None, offset: int) -> None:
    if not isinstance(p, Real) or not 0 <= p < 1:
        raise ValueError(f"{name}: dropout {p!r} is not a probability below 1; give 0 <= p < 1")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.ndim:
            raise ValueError(f"{name}: the seed is a tensor, {seed.dtype} {list(seed.shape)}; give int64 [], an integer or None")
        seed = None  # its number is not looked at
    if not (seed is None or is_whole(seed)) or not is_whole(offset) or not (0 <= (seed or 0) < 1 << 63 and 0 <= offset < 1 << 32):
        raise ValueError(f"{name}: the seed is {seed}, the offset {offset}; give a seed of 63 bits or None, and an offset of 32 bits")


def draw(device: torch.device, seed: int | Tensor | None, offset: int) -> Tensor:
    """The state: the given seed, or one of torch's generator of the device (no synchronisation)."""
    if seed is None:
        state = torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)
    elif isinstance(seed, Tensor):
        state = seed.to(device).repeat(2)
    else:
        state = torch.full((2,), seed, dtype=torch.int64, device=device)
    state[1:].fill_(offset)  # `state[1] = offset` would wait for the device
    return state


def words(state: Tensor, elements: int, third: int | Tensor) -> Tensor:
    """A word for each of `elements` numbers, int64: word i % 4 of the counter (i // 4 low, i // 4 high, third, offset)."""
    group = torch.arange((elements + 3) // 4, device=state.device)
    seed, offset = state[0], state[1]
    third = third.to(group.device).expand_as(group) & WORD if isinstance(third, Tensor) else torch.full_like(group, third & WORD)  # without a wait
    counter = (group & WORD, group >> 32, third, (offset & WORD).expand_as(group))
    return torch.stack(philox((seed & WORD, (seed >> 32) & WORD), counter), -1).flatten()[:elements]


def kept_elements(p: float, state: Tensor, elements: int) -> Tensor:
    """True where an element of a tensor stays. The third word of the counter is one that no weight of attention has."""
    return words(state, elements, -1) >= threshold(p)


def normal(state: Tensor, elements: int, step: Tensor) -> Tensor:
    """Normal noise, float32 [elements], by Box and Muller (1958): elements 2 i and 2 i + 1 are the cosine and the sine of one angle."""
    first, second = words(state, 2 * ((elements + 1) // 2), step).view(-1, 2).unbind(1)
    radius = (((first >> 8).float() + 0.5) * 2**-24).log().mul(-2).sqrt()
    angle = (second >> 8).float() * (2**-24 * 2 * torch.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten()[:elements]
