"""Rotation of packed queries and keys in place, with QK-norm and the write to the cache: one pass over memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import as_int, check_tensors, kind_of, refuse_gradients
from onchip.core.formats import Codes, check_channels
from onchip.core.once import ends, once
from onchip.core.parts import is_whole
from onchip.core.problem import Rope
from onchip.dispatch import select
from onchip.ops.rotary import QKNorm, check_norm, check_table

PLACES = {"positions": (torch.int64, torch.int32), "append.slots": (torch.int64,)}


class Append(NamedTuple):
    """Where new keys and values go: the pages `[pages, page, kv_heads, dim]` of one layer, and a slot for each token.

    k, v    in qkv's dtype, or `Codes` of one format: what is written is then quantised. Equal strides, the last one 1.
    slots   [tokens] int64: `page index * page size + offset`; a token with slot -1 is not written. Others below 0 or past the last page are refused on a
            CPU; on a GPU, where to look would be to wait, its kernels do not write them either (of `kernel="reference"` torch ends the process).
    """

    k: Tensor | Codes
    v: Tensor | Codes
    slots: Tensor


def rope_append(
    qkv: Tensor,  # [tokens, (heads + 2 kv_heads) dim]
    table: Tensor,  # [positions, rotary_dim] float32
    positions: Tensor,  # [tokens] int64
    heads: tuple[int, int],
    *,
    layout: str = "neox",
    norm: QKNorm | None = None,
    append: Append | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of packed `qkv` in place (Su et al., 2021), and write keys and values to the cache.

    heads    (heads, kv_heads).        table   `rope_table(...)`: cosines of the first half of its columns, then sines.
    Positions that are no row of the table are refused on a CPU, and give NaN by the kernels of a GPU.
    layout   "neox" pairs element i with i + rotary_dim / 2, "interleaved" 2i with 2i + 1; elements past rotary_dim stay.
    append   a cache to write to. A quantised one gets the codes of the keys (rotated, in qkv's dtype) and of the values.
    Returns q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of `qkv`, whose rows must be contiguous. It has no gradient, and says so.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and tuple(map(type, heads) if type(heads) is tuple else ()) != (int, int):  # compiled, sizes may be symbols
        _check_heads(heads)
        heads = tuple(map(as_int, heads))
    num_q, num_kv = heads
    check_tensors("rope_append", qkv=qkv, table=table, positions=positions)
    refuse_gradients("rope_append", "train with onchip.rotary, which takes a norm too", qkv, *(norm[:2] if isinstance(norm, QKNorm) else ()))
    if qkv.ndim != 2 or num_q < 1 or num_kv < 1:
        raise ValueError(
            f"rope_append: qkv is {list(qkv.shape)} of {num_q} + 2 x {num_kv} heads; give [tokens, (heads + 2 kv_heads) dim], of 1 head each or more"
        )
    tokens, packed = qkv.shape
    if compiling:
        if append is not None and isinstance(append.k, Codes):  # "aot_autograd() does not yet handle input mutations on views with different dtypes"
            raise NotImplementedError("rope_append: writing to a quantised cache in a compiled graph is not implemented; use torch.compiler.disable around it")
        torch.ops.onchip.rope_append(qkv, table, positions, num_q, num_kv, layout, *(norm or (None, None, 0.0, 0.0)), *(append or (None, None, None)), kernel)
        return qkv.view(tokens, num_q + 2 * num_kv, -1).split((num_q, num_kv, num_kv), 1)
    if packed % (num_q + 2 * num_kv):
        raise ValueError(f"rope_append: qkv has width {packed}, not a multiple of {num_q} + 2 x {num_kv} heads")
    if layout not in ("neox", "interleaved"):
        raise ValueError(f"rope_append: layout={layout!r} is not one of neox, interleaved")
    dim = packed // (num_q + 2 * num_kv)
    check_table("rope_append", table, dim)
    _check_places("positions", positions, qkv, 0, len(table))
    check_norm("rope_append", norm, dim)
    if norm is not None and not type(norm.eps) is type(norm.offset) is float:  # numpy's, say, which Triton's launcher does not know
        norm = norm._replace(eps=float(norm.eps), offset=float(norm.offset))
    kv = "" if append is None else _check_append(append, num_kv, dim, qkv)
    problem = Rope("rope_append", tokens, num_q, num_kv, dim, table.shape[-1], qkv.dtype, layout, norm is not None, append is not None, kv)
    select(problem, qkv.device, kernel).launch(qkv, table, positions, norm, append)
    q, k, v = qkv.view(tokens, num_q + 2 * num_kv, dim).split_with_sizes((num_q, num_kv, num_kv), 1)
    return q, k, v


def _check_heads(heads: tuple[int, int]) -> None:
    """2.0 heads would make a Problem equal to that of 2, and what was kept of the one would be the other's."""
    if not isinstance(heads, (tuple, list)) or len(heads) != 2 or not (is_whole(heads[0]) and is_whole(heads[1])):
        raise TypeError(f"rope_append: heads is {heads!r:.60}; give (heads, kv_heads), two whole numbers")


def _check_places(name: str, places: Tensor, qkv: Tensor, least: int, end: int) -> None:
    """A kernel reads one for each token, whatever is there; on a CPU they are looked at, once a pass: from `least` on, and below `end`."""

    def check() -> None:
        if places.shape != qkv.shape[:1] or places.dtype not in PLACES[name] or places.device != qkv.device:
            given = f"{places.dtype} {list(places.shape)} on {places.device}"
            raise ValueError(f"rope_append: {name} are {given}; give int64 [{len(qkv)}], one a token, on {qkv.device}")
        if (found := ends(places)) is not None and not least <= found[0] <= found[1] < end:
            of = "rows of the table" if name == "positions" else "slots of the pages, and -1 for a token that is not written"
            raise ValueError(f"rope_append: {name} are {found[0]} to {found[1]}; give 0 to {end - 1}: {of}")

    once((name, qkv.shape[0], qkv.device, end), [places], check)


def _check_append(append: Append, kv_heads: int, dim: int, qkv: Tensor) -> str:
    """The format of the cache, "" if it is not quantised; raises where it is none of this call."""
    if not isinstance(append, Append) or not isinstance(append.slots, Tensor):
        given = f"append.slots are a {type(append.slots).__name__}" if isinstance(append, Append) else f"append is a {type(append).__name__}"
        raise TypeError(f"rope_append: {given}; give Append(k, v, slots), pages and a tensor of a slot for each token")
    k, v = append.k, append.v
    if not (isinstance(k, (Tensor, Codes)) and isinstance(v, (Tensor, Codes))):
        name, odd = ("v", v) if isinstance(k, (Tensor, Codes)) else ("k", k)
        raise TypeError(f"rope_append: append.{name} is {kind_of(odd)}; give a tensor [pages, page, {kv_heads}, {dim}] or Codes, as append.k and append.v both")
    if isinstance(k, Codes) != isinstance(v, Codes) or (isinstance(k, Codes) and k.format != v.format):
        kinds = [str(t.format) if isinstance(t, Codes) else str(t.dtype) for t in (k, v)]
        raise ValueError(f"rope_append: k is {kinds[0]}, v {kinds[1]}; give both as Codes of one format, or both as tensors")
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or tuple(t.shape[2:]) != (kv_heads, dim) or t.shape[:2] != k.shape[:2] or t.device != qkv.device:
            raise ValueError(f"rope_append: append.{name} is {list(t.shape)} on {t.device}; give [pages, page, {kv_heads}, {dim}] on {qkv.device}")
    _check_places("append.slots", append.slots, qkv, -1, k.shape[0] * k.shape[1])
    if not isinstance(k, Codes):
        if not k.dtype == v.dtype == qkv.dtype:
            raise ValueError(f"rope_append: append.k is {k.dtype}, append.v {v.dtype}, qkv {qkv.dtype}; they must be of one dtype, or the cache of Codes")
        return ""
    k.format.groups(dim)
    check_channels("rope_append: append.", k, v)
    return str(k.format)


# ---- in compiled graphs: the same functions as torch.library operators. Eager calls step round that boundary.


@torch.library.custom_op("onchip::rope_append", mutates_args=("qkv", "k", "v"))
def _rope_append(
    qkv: Tensor, table: Tensor, positions: Tensor, heads: int, kv_heads: int, layout: str,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float,
    k: Tensor | None, v: Tensor | None, slots: Tensor | None, kernel: str,
) -> None:  # fmt: skip
    norm = None if q_norm is k_norm is None else QKNorm(q_norm, k_norm, eps, offset)
    append = None if k is v is slots is None else Append(k, v, slots)
    rope_append(qkv, table, positions, (heads, kv_heads), layout=layout, norm=norm, append=append, kernel=kernel)


_rope_append.register_fake(lambda *_: None)
