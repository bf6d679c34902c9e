"""Quantised keys and values in pages: what a code means, and how one is made.

    x = channel * (scale * code)             e4m3, e5m2
    x = channel * (scale * code + zero)      int8, int4: codes 0 to 255 or 15, `zero` the least x of its group (asymmetric, as in KIVI, Liu et al., 2024)

A scale (and a zero) belongs to one token, one head and one group of its columns. Both are bfloat16, and codes are made with them as they are
stored, so that nothing is lost twice: `zero` is rounded down and `scale` up, so that the range of a group fits, and an integer code errs by at most
half a scale. A group of zeros has scale 0 and codes 0. A group with a number that is not finite has scale NaN: all of it reads NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
        name, slash, group = given.partition("/") if isinstance(given, str) else (given.name, "/", str(given.group))
        found = Format(name, int(group) if group.isdecimal() else 0 if not slash else -1)
        if found not in FORMATS:
            raise ValueError(f"{str(given)!r} is not a format of keys and values; give one of {', '.join(map(str, FORMATS))}")
        return found

    def __str__(self):
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


FORMATS = tuple(Format(name, group) for name in LARGEST for group in GROUPS)


def fit(dim: int) -> list[str]:
    """The formats that heads of `dim` may have."""
    return [str(f) for f in FORMATS if not (f.group and dim % f.group) and not (f.name == "int4" and dim % 2)]


class Codes(NamedTuple):
    """Quantised keys or values. All slots that no token uses may hold anything, NaN included.

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

    def of(self, pages: Tensor | slice) -> "Codes":
        """Some pages alone, int64 [n] or a slice (then without a copy)."""
        return self._replace(**{name: None if t is None else _rows(t, pages) for name, t in zip(("codes", "scale", "zero"), self[:3], strict=True)})

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[pages, page, kv_heads, dim], computed in float32 and rounded once."""
        codes = self.codes
        if self.format.name == "int4":
            codes = torch.cat((codes & 15, codes >> 4), -1)
        x = codes.to(torch.float32).unflatten(-1, (self.scale.shape[-1], -1))
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
    scale = rounded_up(span / form.largest)
    some, finite = scale >= TINY, span < torch.inf
    inverse = torch.where(some & finite, 1 / scale, 0.0)
    x = x.where(finite, 0.0)
    if zero is None:
        codes = (x * inverse).clamp_(-form.largest, form.largest)
    else:
        zero = zero.where(finite, 0.0)
        codes = (x - zero).mul_(inverse).add_(0.5).clamp_(0.0, form.largest)
    codes = codes.flatten(-2).to(form.dtype)
    if form.name == "int4":
        low, high = codes.chunk(2, -1)
        codes = low | high << 4
    scale = scale.where(some, 0.0).where(finite, torch.nan)
    return codes, scale.squeeze(-1).bfloat16(), None if zero is None else zero.squeeze(-1).bfloat16()


def rounded_up(x: Tensor) -> Tensor:
    """The least bfloat16 that is not below x, as float32; x is not negative."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def rounded_down(x: Tensor) -> Tensor:
    """The greatest bfloat16 that is not above x, as float32."""
    bits = x.contiguous().view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)


def _rows(t: Tensor, rows: Tensor | slice) -> Tensor:
    return t[rows] if isinstance(rows, slice) or t.dtype.itemsize > 1 else t.view(torch.uint8)[rows].view(t.dtype)  # of 8-bit floats torch selects none
