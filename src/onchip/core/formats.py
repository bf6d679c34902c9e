"""Quantised keys and values in pages: what a code means, and how one is made.

    x = channel * (scale * code)             e4m3, e5m2
    x = channel * (scale * code + zero)      int8, int4: codes 0 to 255 or 15, `zero` the least x of its group (asymmetric, as in KIVI, Liu et al., 2024)

A scale (and a zero) belongs to one token, one head and one group of its columns. Both are bfloat16, and codes are made with them as they are
stored, so that nothing is lost twice: `zero` is rounded down and `scale` up, so that the range of a group fits, and an integer code errs by at most
half a scale. A group of zeros has scale 0 and codes 0. A group with a number that is not finite has scale NaN: all of it reads NaN. So does one of integer
codes whose ends lie farther apart than float32 reaches (-2e38 and 2e38), since every reader multiplies codes by scales before it adds zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.once import ends

GROUPS = (0, 32, 64)  # columns that share a scale; 0: all of a head
TINY = 2.0**-126  # scales below are 0: the reciprocal of a number that is not normal may be infinite
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 255.0, "int4": 15.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.uint8, "int4": torch.uint8}


class Format(NamedTuple):
    """How keys and values are stored: `str` gives "int8", or "int4/32" for a scale for each 32 columns; `Format.of` reads that."""

    name: str
    group: int = 0

    @staticmethod
    def of(given: "str | Format") -> "Format":
        """Raises ValueError for what is not a format."""
        if not isinstance(given, (str, Format)):
            raise ValueError(f"{given!r:.60} is not a format of keys and values; give one of {', '.join(map(str, FORMATS))}")
        name, slash, group = given.partition("/") if isinstance(given, str) else (given.name, "/", str(given.group))
        found = Format(name, int(group) if group.isdecimal() else 0 if not slash else -1)
        if found not in FORMATS:
            raise ValueError(f"{str(given)!r} is not a format of keys and values; give one of {', '.join(map(str, FORMATS))}")
        return found

    def __str__(self):
        for group in GROUPS[1:]:  # torch.compile may hold a symbol for a number that it has seen change, and writes none into a text
            if self.group == group:
                return f"{self.name}/{group}"
        return f"{self.name}/{self.group}" if self.group else self.name

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def largest(self) -> float:
        """Code."""
        return LARGEST[self.name]

    @property
    def has_zero(self) -> bool:
        return self.dtype == torch.uint8

    def columns(self, dim: int) -> int:
        """Bytes of the codes of a head of `dim` numbers."""
        return dim // 2 if self.name == "int4" else dim

    def groups(self, dim: int) -> int:
        """Of a head of `dim` numbers. Raises ValueError where they do not fit."""
        if (self.group and dim % self.group) or (self.name == "int4" and dim % 2):
            raise ValueError(f"format {self} of heads of {dim}: a head has a whole number of groups, and of pairs in int4; give one of {', '.join(fit(dim))}")
        return dim // self.group if self.group else 1

    def bytes(self, dim: int) -> int:
        """Of a token of one head, scales included."""
        return self.columns(dim) + self.groups(dim) * 2 * (1 + self.has_zero)

    def page_bytes(self, page: int, kv_heads: int, dim: int) -> int:
        """Of a page of keys or of values: codes, scales and zeros, each from a multiple of 16 bytes on; pages begin at multiples of 64, so that a kernel knows
        from the stride alone that it may load 16 bytes at once."""
        tokens = page * kv_heads
        size = _whole(tokens * self.columns(dim)) + (1 + self.has_zero) * _whole(tokens * self.groups(dim) * 2)
        return -(-size // 64) * 64


FORMATS = tuple(Format(name, group) for name in LARGEST for group in GROUPS)


def fit(dim: int) -> list[str]:
    """The formats that heads of `dim` may have."""
    return [str(f) for f in FORMATS if not (f.group and dim % f.group) and not (f.name == "int4" and dim % 2)]


class Codes(NamedTuple):
    """Quantised keys or values. All slots that no token uses may hold anything, NaN included.

    In a page's memory head comes after head, for one head is what a reader reads at a time: the 64 bytes of a token and head of int4, 512 bytes apart, came
    at half of the memory's bandwidth.

    codes     [pages, page, kv_heads, columns]: float8 of the format; uint8 for int8; for int4 uint8 of half as many columns, of which byte c holds
              number c in its low 4 bits and number c + dim / 2 in its high 4 bits.
    scale     bfloat16 [pages, page, kv_heads, groups].        zero   like scale for int8 and int4, None for e4m3 and e5m2.
    channel   float32 [kv_heads, dim] or None: keys are divided by it before they are quantised; a reader multiplies its queries by it instead.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    format: Format
    channel: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, page, kv_heads, dim] of what it stands for."""
        *most, columns = self.codes.shape
        return (*most, columns * 2 if self.format.name == "int4" else columns)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What lies in the pages."""
        return tuple(t for t in self[:3] if t is not None)

    @staticmethod
    def over(storage: Tensor, form: Format, sizes: tuple[int, int, int], channel: Tensor | None = None) -> "Codes":
        """Views of uint8 [pages, `form.page_bytes(*sizes)`], contiguous; sizes: (page, kv_heads, dim)."""
        page, kv_heads, dim = sizes
        tokens, start, parts = page * kv_heads, 0, []
        for width, dtype in ((form.columns(dim), form.dtype), *((form.groups(dim), torch.bfloat16),) * (1 + form.has_zero)):
            size = tokens * width * dtype.itemsize
            parts.append(storage[:, start : start + size].view(dtype).unflatten(1, (kv_heads, page, width)).transpose(1, 2))
            start += _whole(size)
        return Codes(parts[0], parts[1], parts[2] if form.has_zero else None, form, channel)

    def put(self, slots: Tensor, x: Tensor) -> None:
        """Quantise x [tokens, kv_heads, dim], and write it; slots: int64 [tokens], `page index * page size + offset`.

        Raises ValueError for slots that there are not, where they are on a CPU; -1 is none either.
        """
        pages, page = self.codes.shape[:2]
        if not isinstance(x, Tensor) or not isinstance(slots, Tensor) or slots.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"put: x is {kind_of(x)}, slots are {kind_of(slots)}; give a tensor [tokens, kv_heads, dim], and int64 [tokens]")
        if slots.shape != x.shape[:1] or x.shape[1:] != self.shape[2:]:
            given = f"x is {list(x.shape)}, slots {list(slots.shape)}"
            raise ValueError(f"put: {given}; give [tokens, {self.shape[2]}, {self.shape[3]}], and a slot for each token")
        if (found := ends(slots)) is not None and not 0 <= found[0] <= found[1] < pages * page:
            raise ValueError(f"put: slots are {found[0]} to {found[1]}; give 0 to {pages * page - 1}, without the tokens that have none")
        self.write((slots // page, slots % page), x)

    def write(self, places: tuple[Tensor, Tensor], x: Tensor) -> None:
        """`put` at (pages, offsets) that somebody has looked at: keys and values of a call have the same."""
        for to, new in self._encoded(x):
            to[places] = new

    def fill(self, x: Tensor) -> None:
        """Quantise x [pages, page, kv_heads, dim], and write it to all slots."""
        if x.shape != self.shape:
            raise ValueError(f"fill: x is {list(x.shape)}; give {list(self.shape)}, a number for each")
        for to, new in self._encoded(x):
            to.copy_(new)

    def _encoded(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each tensor in the pages, and what is new to it; floats of 8 bits as bytes, since torch does not write them by index."""
        parts = zip(self.tensors, encode(x, self.format, self.channel), strict=False)
        return [(to.view(torch.uint8), new.view(torch.uint8)) if to.dtype.itemsize == 1 else (to, new) for to, new in parts]

    def of(self, pages: Tensor | slice) -> "Codes":
        """Some pages alone, int64 [n] or a slice (then without a copy)."""
        return self._replace(**{name: None if t is None else _rows(t, pages) for name, t in zip(("codes", "scale", "zero"), self[:3], strict=True)})

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[pages, page, kv_heads, dim], computed in float32 and rounded once."""
        codes = self.codes
        if self.format.name == "int4":
            codes = torch.cat((codes & 15, codes >> 4), -1)
        x = (codes.to(torch.float32) if self.format.has_zero else small_floats(codes)).unflatten(-1, (self.scale.shape[-1], -1))
        scale = self.scale.to(torch.float32).unsqueeze(-1)
        x = x.mul_(scale) if self.zero is None else x.mul_(scale).add_(self.zero.to(torch.float32).unsqueeze(-1))
        x = x.flatten(-2)
        return (x if self.channel is None else x.mul_(self.channel)).to(dtype)


def read(pool: "Tensor | Codes", pages: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Some pages of keys or values as numbers, [n, page, kv_heads, dim]: of a tensor in its own dtype, of codes in `dtype`."""
    return pool.of(pages).dequantised(dtype) if isinstance(pool, Codes) else _rows(pool, pages)


def encode(x: Tensor, form: Format, channel: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero) of x [..., kv_heads, dim], as `Codes` has them."""
    x = x.to(torch.float32)
    x = x if channel is None else x / channel
    x = x.unflatten(-1, (form.groups(x.shape[-1]), -1))
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero = rounded_down(low) if form.has_zero else None
    span = high - zero if form.has_zero else torch.maximum(-low, high)
    scale = rounded_up(span / torch.full_like(span, form.largest))  # by a Python number torch multiplies with the reciprocal on a GPU: exact quotients grew
    some, finite = scale >= TINY, span < torch.inf
    inverse = torch.where(some & finite, 1 / scale, 0.0)
    x = x.where(finite, 0.0)
    if zero is None:
        codes = (x * inverse).clamp_(-form.largest, form.largest)
    else:
        zero = zero.where(finite, 0.0)
        codes = (x - zero).mul_(inverse).round_().clamp_(0.0, form.largest)
    codes = codes.flatten(-2).to(form.dtype)
    if form.name == "int4":
        low, high = codes.chunk(2, -1)
        codes = low | high << 4
    scale = scale.where(some, 0.0).where(finite, torch.nan)
    return codes, scale.squeeze(-1).bfloat16(), None if zero is None else zero.squeeze(-1).bfloat16()


def small_floats(x: Tensor) -> Tensor:
    """Numbers in e4m3 or e5m2 as float32. On a CPU by way of float16, whose bits theirs are the upper ones of: 0.5M take 0.16 ms, torch's own way 1.6."""
    if x.device.type != "cpu":
        return x.to(torch.float32)
    bits = x.view(torch.int8).to(torch.int16)
    if x.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).to(torch.float32)
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)  # an exponent has one bit more; what counted from 7 now counts from 15
    nan = (bits & 0x7FFF).add_(0x80).bitwise_and_(0x4000)
    return bits.bitwise_or_(nan).view(torch.float16).to(torch.float32).mul_(256)


def rounded_up(x: Tensor) -> Tensor:
    """The least bfloat16 that is not below x, as float32; x is not negative."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def rounded_down(x: Tensor) -> Tensor:
    """The greatest bfloat16 that is not above x, as float32."""
    bits = x.contiguous().view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)


def _whole(size: int) -> int:
    """In units of 16 bytes, which a thread loads at once."""
    return -(-size // 16) * 16


def _rows(t: Tensor, rows: Tensor | slice) -> Tensor:
    return t[rows] if isinstance(rows, slice) or t.dtype.itemsize > 1 else t.view(torch.uint8)[rows].view(t.dtype)  # of 8-bit floats torch selects none


def check_channels(name: str, k: Codes, v: Codes) -> None:
    """Raises ValueError where values have a scale of channels, or that of the keys is none of theirs. `name`: what stands before k and v."""
    if v.channel is not None:
        raise ValueError(f"{name}v has a channel scale, which only keys have; divide the columns of the next weight by it, or give None")
    channel, wanted = k.channel, k.shape[2:]
    if channel is not None and (channel.dtype != torch.float32 or channel.shape != wanted or channel.device != k.device):
        given = f"{channel.dtype} {list(channel.shape)} on {channel.device}"
        raise ValueError(f"{name}k.channel is {given}; give float32 {list(wanted)} on {k.device}, or None")
