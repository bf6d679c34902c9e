"""xFormers' attention biases: what a query sees, as objects that hold lengths and windows instead of a matrix.

Names, constructors and `materialize` are xFormers'; `band` turns one, theirs or these, into onchip's mask of one block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.core.masks import Band, Causal, Full, Window

# ---- the division of a sequence into blocks


def _default_device(device: torch.device | None) -> torch.device:
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class _SeqLenInfo:
    """Blocks laid end to end: `seqstart` int32 [blocks + 1] and the same as a list, and the lengths of the longest and shortest."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self, device: torch.device):
        tensors = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return type(self)(**{**vars(self), **tensors})

    def intervals(self) -> Iterable[tuple[int, int]]:
        yield from zip(self.seqstart_py, self.seqstart_py[1:], strict=False)

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: torch.device | None = None) -> "_SeqLenInfo":
        lengths, starts = list(seqlens), [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        return cls(torch.tensor(starts, dtype=torch.int32, device=_default_device(device)), max(lengths, default=-1), min(lengths, default=-1), starts)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """`x [1, tokens, ...]` as one `[batch size, len, ...]` for each of `batch_sizes`, by default one a block."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"split: x is {list(x.shape)}; give [1, {self.seqstart_py[-1]}, ...]")
        sizes, parts, at = batch_sizes or [1] * (len(self.seqstart_py) - 1), [], 0
        for size in sizes:
            parts.append(x[:, self.seqstart_py[at] : self.seqstart_py[at + size]].reshape(size, -1, *x.shape[2:]))
            at += size
        return parts


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """Blocks that begin at `seqstart` and are `seqlen` long; what lies between them is not read."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    def intervals(self) -> Iterable[tuple[int, int]]:
        yield from ((start, start + length) for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False))

    @classmethod
    def from_seqlens_gappy(cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool = False, *, device: torch.device | None = None):
        if paged or len(seqstarts) != len(seqlens) + 1:
            raise ValueError(
                f"from_seqlens_gappy: {len(seqstarts)} starts of {len(seqlens)} lengths, paged={paged}; give one start more than lengths, no pages"
            )
        starts, lengths = (torch.tensor(x, dtype=torch.int32, device=_default_device(device)) for x in (list(seqstarts), list(seqlens)))
        return cls(starts, max(seqlens), min(seqlens), list(seqstarts), lengths, list(seqlens))


@dataclass
class _PaddedSeqLenInfo(_GappySeqInfo):
    """Blocks with room for `padding` each, of which the first `seqlen` are used."""

    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: torch.device | None = None) -> "_PaddedSeqLenInfo":
        if max(seqlens) > padding:
            raise ValueError(f"from_seqlens_padded: a sequence of {max(seqlens)} in a room of {padding}; give a larger padding")
        starts = list(range(0, len(seqlens) * padding + 1, padding))
        tensors = [torch.tensor(x, dtype=torch.int32, device=_default_device(device)) for x in (starts, list(seqlens))]
        return cls(tensors[0], max(seqlens), min(seqlens), starts, tensors[1], list(seqlens), padding)


# ---- biases


class AttentionBias:
    """What may be given as `attn_bias`; `band(bias)` says what a query sees, in each block of it."""

    def to(self, device: torch.device) -> "AttentionBias":
        return type(self)(**{name: value.to(device) if isinstance(value, _SeqLenInfo) else value for name, value in vars(self).items()})

    def materialize(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        """The bias as a tensor of `shape` `[..., len_q, len_k]`, 0 where a key is seen and -inf elsewhere: for tests."""
        bias, seen_by = torch.full(shape[-2:], -torch.inf, dtype=dtype, device=device), band(self)
        for (q_start, q_stop), (k_start, k_stop) in self._blocks(*shape[-2:]):
            len_q, len_k = q_stop - q_start, k_stop - k_start
            rows = torch.arange(len_q, device=device)[:, None] + seen_by.shift(len_q, len_k)
            seen = seen_by.dense(rows, torch.arange(len_k, device=device))
            bias[q_start:q_stop, k_start:k_stop].masked_fill_(seen, 0.0)
        return bias.expand(shape)

    def _blocks(self, len_q: int, len_k: int) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        yield (0, len_q), (0, len_k)


class LowerTriangularMask(AttentionBias):
    """Query i sees keys 0 to i: causal, aligned to the top left."""

    def __init__(self, device: torch.device | None = None):
        """`device` is there for xFormers' sake."""

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask` and a tensor `[batch, heads, len_q, len_k]`, which may have a gradient."""

    def __init__(self, bias: Tensor):
        self._bias = bias

    def to(self, device):
        return type(self)(self._bias.to(device))

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, aligned to the bottom right: the last query sees the last key."""

    def make_local_attention(self, window_size: int) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, aligned to the bottom right, and at most `_window_size` keys."""

    _window_size: int

    def __post_init__(self):
        _check_window(self, self._window_size, 1)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """`window_left` keys before a query's own, and `window_right` after it."""

    window_left: int
    window_right: int

    def __post_init__(self):
        _check_window(self, min(self.window_left, self.window_right), 0)


def _check_window(bias: AttentionBias, size: int, least: int) -> None:
    if size < least:
        raise ValueError(f"{type(bias).__name__}: a window of {size}; give {least} or more")


@dataclass
class _BlockDiagonal(AttentionBias):
    """Queries of block i see keys of block i."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def _blocks(self, len_q: int, len_k: int):
        sizes = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if (len_q, len_k) != sizes:
            raise ValueError(f"{type(self).__name__}: {len_q} queries and {len_k} keys; its blocks take {sizes[0]} and {sizes[1]}")
        return zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=False)

    def _lengths(self) -> list[tuple[int, int]]:
        return [(q[1] - q[0], k[1] - k[0]) for q, k in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=False)]


@dataclass
class BlockDiagonalMask(_BlockDiagonal):
    """Sequences of different lengths laid end to end in a batch of one."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: torch.device | None = None):
        q_info = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(q_info, q_info if kv_seqlen is None or kv_seqlen == q_seqlen else _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """The bias of `tensors`, each `[batch, len, ...]`, and these laid end to end: `[1, tokens, ...]`."""
        bias = cls.from_seqlens(_lengths(tensors), device=tensors[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors]
        return bias, _end_to_end(tensors)

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None):
        """As `from_tensor_list`, with keys, and values if given, of lengths of their own: (bias, q, k, v or None)."""
        bias = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k), device=tensors_q[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        return bias, _end_to_end(tensors_q), _end_to_end(tensors_k), None if tensors_v is None else _end_to_end(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def _as(self, kind: type, *rest):
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *rest)

    def make_causal(self):
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self):
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int):
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size: int):
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], 1)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block is causal, aligned to the top left."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block is causal, aligned to the bottom right; it has at least as many keys as queries."""

    def __post_init__(self):
        short = [n for n in self._lengths() if n[1] < n[0]]
        if short:
            raise ValueError(f"{type(self).__name__}: a block of {short[0][0]} queries has {short[0][1]} keys; give as many or more")


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each block is causal, aligned to the top left, with at most `_window_size` keys a query."""

    _window_size: int = 0

    def __post_init__(self):
        _check_window(self, self._window_size, 1)
        blind = [n for n in self._lengths() if n[0] - self._window_size >= n[1]]
        if blind:
            raise RuntimeError(f"{type(self).__name__}: in a block of {blind[0][0]} queries and {blind[0][1]} keys some query sees no key; widen the window")


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Each block is causal, aligned to the bottom right, with at most `_window_size` keys a query."""

    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        _check_window(self, self._window_size, 1)


class BlockDiagonalPaddedKeysMask(_BlockDiagonal):
    """Each block of keys has the same room, of which a part is used; queries lie end to end."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *, device=None):
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device))

    @classmethod
    def from_seqlens_local(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], *window: int, **windows: int):
        return cls(_SeqLenInfo.from_seqlens(q_seqlen), _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding), *window, **windows)

    def make_local_attention(self, window_left: int, window_right: int) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask`, causal, aligned to the last query and the last key in use."""

    causal_diagonal: Any = None  # xFormers keeps it for old callers


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask` with `window_left` keys before a query's own and `window_right` after it, aligned to the last ones."""

    window_left: int
    window_right: int


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask` with at most `_window_size` keys a query."""

    _window_size: int


class BlockDiagonalGappyKeysMask(_BlockDiagonal):
    """Blocks of keys begin anywhere; queries lie end to end."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device=None):
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, device=device))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """`BlockDiagonalGappyKeysMask`, causal, aligned to the bottom right of each block."""


_BANDS = {  # by name, so that xFormers' own classes are known as well
    "LowerTriangularMask": lambda bias: Causal("top_left"),
    "LowerTriangularMaskWithTensorBias": lambda bias: Causal("top_left"),
    "LowerTriangularFromBottomRightMask": lambda bias: Causal(),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: Window(bias._window_size - 1),
    "LocalAttentionFromBottomRightMask": lambda bias: Window(bias.window_left, bias.window_right),
    "BlockDiagonalMask": lambda bias: Full(),
    "BlockDiagonalCausalMask": lambda bias: Causal("top_left"),
    "BlockDiagonalCausalFromBottomRightMask": lambda bias: Causal(),
    "BlockDiagonalCausalLocalAttentionMask": lambda bias: Window(bias._window_size - 1, 0, "top_left"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda bias: Window(bias._window_size - 1),
    "BlockDiagonalPaddedKeysMask": lambda bias: Full(),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda bias: Causal(),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda bias: Window(bias.window_left, bias.window_right),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda bias: Window(bias._window_size - 1),
    "BlockDiagonalGappyKeysMask": lambda bias: Full(),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda bias: Causal(),
}
__all__ = ["AttentionBias", *_BANDS]


def band(bias: Any) -> Band:
    """What each query of a block sees, of a bias from here or from xFormers. Raises ValueError for any other."""
    made = _BANDS.get(type(bias).__name__)
    if made is None:
        raise ValueError(f"attn_bias is a {type(bias).__name__}; give a float tensor or one of {', '.join(_BANDS)} (pages go to onchip.paged_attention)")
    return made(bias)
