"""The ways in which the arguments of an attention call may disagree, each with the way out."""

from numbers import Integral

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.core.formats import Codes, check_channels
from onchip.core.once import ends, once
from onchip.core.problem import E4M3
from onchip.core.scales import Quantised, Scales
from onchip.core.trace import readable
from onchip.ops.attend import How, PagedKV, check_scale
from onchip.ops.differentiable import autocast


def plain(name: str, *tensors: Tensor) -> None:
    """Raises where a tensor is something else; only `attention` takes quantised ones."""
    for given, t in zip("qkv", tensors, strict=False):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {given} is {type(t).__name__}; give a tensor" + " (attention alone takes quantised ones)" * isinstance(t, Quantised))


def taken_apart(q, k, v) -> tuple[Tensor, Tensor, Tensor, Scales | None, tuple[Tensor, ...] | None]:
    """Tensors, cast, and the scales and sources of quantised ones."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        cast = not q.is_meta and torch.is_autocast_enabled(q.device.type)
        return *(autocast(q, k, v) if cast else (q, k, v)), None, None
    if not any(isinstance(t, Quantised) for t in (q, k, v)):
        plain("attention", q, k, v)
    bare = [name for name, t in (("q", q), ("k", k), ("v", v)) if not isinstance(t, Quantised)]
    if bare:
        raise TypeError(f"attention: of q, k, v, {' and '.join(bare)} not Quantised; give all three as onchip.quantise makes them, or plain tensors")
    odd = [f"{name}.{field}" for name, t in (("q", q), ("k", k), ("v", v)) for field in t._fields[: 2 + (t.source is not None)]
           if not is_dense(getattr(t, field))]  # fmt: skip
    if odd:
        raise TypeError(f"attention: {' and '.join(odd)} not dense tensors; give Quantised(values, scale) as onchip.quantise makes it")
    if q.source is k.source is v.source is None:
        return q.values, k.values, v.values, Scales(q.scale, k.scale, v.scale), None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.source is None and (t.values.requires_grad or t.scale.requires_grad):
            raise ValueError(f"attention: {name} has no source, but values or scales that require a gradient, beside others with a source; detach them")
        learnt = [] if t.source is None else [field for field in ("values", "scale") if (x := getattr(t, field)).requires_grad and x.is_leaf]
        if learnt:  # what quantise makes is no leaf
            raise ValueError(f"attention: {name}.{learnt[0]} requires a gradient, and {name} has a source, which gets it all; detach it, or give no source")
        if t.source is not None and (t.source.shape != t.values.shape or not t.source.is_floating_point() or t.source.device != t.values.device):
            raise ValueError(f"attention: the source of {name} is {kind_of(t.source)}; give floats, {list(t.values.shape)} on {t.values.device}, or None")
    sources = tuple(t.scale.new_zeros(1).expand(t.values.shape) if t.source is None else t.source for t in (q, k, v))
    return q.values.detach(), k.values.detach(), v.values.detach(), Scales(*(t.scale.detach() for t in (q, k, v))), sources


def check_scales(q: Tensor, k: Tensor, v: Tensor, scales: Scales) -> None:
    """Whether quantised tensors and their scales go together."""
    for name, t, scale in zip("qkv", (q, k, v), scales, strict=True):
        batch, length, heads, _ = t.shape
        if t.dtype != E4M3:
            raise ValueError(f"attention: {name} is Quantised with values in {t.dtype}; give torch.float8_e4m3fn")
        if scale.dtype != torch.float32 or scale.ndim != 3 or scale.shape[0] not in (1, batch) or scale.shape[1] not in (1, heads) or scale.device != t.device:
            raise ValueError(f"attention: the scale of {name} is {kind_of(scale)}; give float32 [{batch} or 1, {heads} or 1, n] on {t.device}")
        Scales.share(scale, length)


def scale_of(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5 if q.ndim and q.shape[-1] else 1.0  # such a q is refused for its shape
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise TypeError("attention: scale requires a gradient, which a number has not; give scale=1.0 and score=lambda s, b, h, i, j: s * scale")
    try:
        number = float(scale)
        if isinstance(scale, (str, bytes, bytearray)):  # which Python would read
            raise TypeError
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"attention: scale is {scale!r:.40}; give a number, or None for dim ** -0.5") from error
    if not torch.compiler.is_dynamo_compiling():  # whose number is a symbol, at which the operator looks
        check_scale(number, q.dtype)
    return number


def check_dropout(name: str, dropout) -> None:
    """Raises TypeError for a tensor, which has no truth; what else is no probability is seen later."""
    if isinstance(dropout, Tensor):
        raise TypeError(f"{name}: dropout is {kind_of(dropout)}; give a probability below 1, Dropout(p, seed, offset) or None")


def check(name: str, q: Tensor, k: Tensor, v: Tensor, rank: int, scaled: bool = False, rank_q: int = 0) -> None:
    """The ways in which q, k and v may disagree, each with the way out. `rank_q`: of q, where it is another one."""
    if q.is_nested or k.is_nested or v.is_nested or not q.layout == k.layout == v.layout == torch.strided:
        raise TypeError(f"{name}: a nested or sparse tensor; give dense ones, sequences of different lengths as values() and offsets() to attention_packed")
    check_shapes(name, q, k, v, rank, rank_q)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype")
    if not q.dtype.is_floating_point:
        raise ValueError(f"{name}: q, k, v are {q.dtype}; give floats")
    if q.dtype.itemsize == 1 and not scaled:
        raise ValueError(f"{name}: q, k, v are {q.dtype} without scales; give them to attention as onchip.Quantised(values, scale)")
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def check_shapes(name: str, q: Tensor, k: Tensor | Codes, v: Tensor | Codes, rank: int, rank_q: int = 0) -> None:
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if len(shape_q) != (rank_q or rank) or len(shape_k) != rank or len(shape_v) != rank:
        raise ValueError(f"{name}: q, k, v have {len(shape_q)}, {len(shape_k)}, {len(shape_v)} dimensions; each needs {rank}")
    if shape_k != shape_v and shape_k[:-1] != shape_v[:-1]:
        raise ValueError(f"{name}: k is {list(shape_k)} and v {list(shape_v)}; all but the last dimension must be equal")
    if shape_q[-1] != shape_k[-1]:
        raise ValueError(f"{name}: q has head dimension {shape_q[-1]}, k has {shape_k[-1]}; they must be equal")
    if not shape_q[-1] or not shape_v[-1]:
        raise ValueError(f"{name}: heads of q and k have {shape_q[-1]} columns, those of v {shape_v[-1]}; give 1 or more")
    if shape_k[-2] == 0 or shape_q[-2] % shape_k[-2]:
        raise ValueError(f"{name}: {shape_q[-2]} query heads over {shape_k[-2]} key heads; give 1 key head or more, and a multiple of them of q")


def check_codes(q: Tensor, cache: PagedKV) -> None:
    """Whether quantised pages are whole, and go together with q."""
    for name, t in zip("kv", cache[:2], strict=True):
        if not isinstance(t, Codes):
            raise TypeError(f"paged_attention: {name} is {type(t).__name__}, the other Codes; give both as Codes of one format, or both as tensors")
    for name, t in zip("kv", cache[:2], strict=True):
        form, dim = t.format, t.shape[-1]
        if form != cache.k.format:
            raise ValueError(f"paged_attention: v has format {form}, k {cache.k.format}; they must be of one")
        columns = (form.columns(dim), *(form.groups(dim),) * 2)
        kinds = (form.dtype, torch.bfloat16, torch.bfloat16 if form.has_zero else None)
        for field, kind, width in zip(("codes", "scale", "zero"), kinds, columns, strict=True):
            got, shape = getattr(t, field), (*t.codes.shape[:3], width)
            if got is None and kind is None:
                continue
            if got is None or kind is None or got.dtype != kind or got.shape != shape or got.device != q.device:
                want = "None" if kind is None else f"{kind} {list(shape)} on {q.device}"
                raise ValueError(f"paged_attention: {name}.{field} is {None if got is None else kind_of(got)}; format {form} of heads of {dim} takes {want}")
    k, v = cache[:2]
    check_channels("paged_attention: ", k, v)
    check_shapes("paged_attention", q, k, v, rank=4, rank_q=q.ndim)
    if not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise ValueError(f"paged_attention: q is {q.dtype}; give float16, bfloat16, float32 or float64")


def check_offsets(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_used: Tensor | None, k_used: Tensor | None) -> None:
    """What says where the sequences of a packed batch lie."""
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.ndim != 1 or offsets.shape[0] < 2 or offsets.device != q.device:
            raise ValueError(f"attention_packed: {name} are {kind_of(offsets)}; give int32 [batch + 1], of one sequence or more, on {q.device}")
    batch = q_offsets.shape[0] - 1
    if k_offsets.shape[0] != batch + 1:
        raise ValueError(f"attention_packed: k_offsets are of {k_offsets.shape[0] - 1} sequences, q_offsets of {batch}; they must be as many")
    for lengths in (q_used, k_used):
        if lengths is None:
            continue
        if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or lengths.shape != (batch,) or lengths.device != q.device:
            raise ValueError(f"attention_packed: used is {kind_of(lengths)}; give int32 [{batch}] on {q.device}")


def paged_batch(q: Tensor, cache: PagedKV, q_offsets: Tensor | None, longest: int | None) -> int:
    """How many sequences `q` has."""
    if not isinstance(cache, PagedKV):
        raise TypeError(f"paged_attention: cache is a {type(cache).__name__}; give PagedKV(k, v, page_table, lengths)")
    if not (isinstance(cache.k, (Tensor, Codes)) and isinstance(cache.v, (Tensor, Codes))):
        kinds = f"k is a {type(cache.k).__name__}, v a {type(cache.v).__name__}"
        raise TypeError(f"paged_attention: {kinds}; give tensors [pages, page, kv_heads, dim], or Codes")
    if q.ndim != (4 if q_offsets is None else 3):
        way = "[batch, len_q, heads, dim] without q_offsets, [tokens, heads, dim] with them"
        raise ValueError(f"paged_attention: q is {list(q.shape)} {'without' if q_offsets is None else 'with'} q_offsets; give {way}")
    if q_offsets is None:
        if longest is not None:
            raise ValueError(f"paged_attention: longest is {longest} without q_offsets; give q_offsets for packed queries, or leave longest out")
        return q.shape[0]
    if not isinstance(q_offsets, Tensor) or q_offsets.dtype != torch.int32 or q_offsets.ndim != 1 or q_offsets.shape[0] < 2 or q_offsets.device != q.device:
        raise ValueError(f"paged_attention: q_offsets are {kind_of(q_offsets)}; give int32 [batch + 1], of one sequence or more, on {q.device}")
    check_longest("paged_attention", longest)
    if longest is not None and longest < 0:
        raise ValueError(f"paged_attention: longest is {longest}; give the most queries of a sequence, or None to have it read from q_offsets")
    return q_offsets.shape[0] - 1


def check_pages(name: str, q: Tensor, cache: PagedKV, batch: int) -> None:
    """Whether there is a page of each sequence for all of its keys; of lengths on a GPU nothing is known here."""
    _, _, table, lengths = cache
    page = cache.k.shape[1]
    if not isinstance(table, Tensor) or table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != batch or table.device != q.device:
        raise ValueError(f"{name}: page_table is {kind_of(table)}; give int32 [{batch}, most pages] on {q.device}")
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or lengths.shape != (batch,) or lengths.device != q.device:
        raise ValueError(f"{name}: lengths are {kind_of(lengths)}; give int32 [{batch}] on {q.device}")
    if not page:
        raise ValueError(f"{name}: k is {list(cache.k.shape)}, pages of no tokens; give 1 token a page or more")
    if readable(lengths):
        known, most = lengths.tolist() or [0], page * table.shape[1]
        if min(known) < 0 or max(known) > most:
            raise ValueError(f"{name}: lengths are {min(known)} to {max(known)}; give 0 to {most}: {table.shape[1]} pages of {page} tokens each")


def check_named(name: str, table: Tensor, lengths: Tensor, page: int, pages: int) -> None:
    """Whether the pages of a table that lengths reach are pages of the cache; looked at on a CPU alone."""

    def named() -> tuple[int, int] | None:
        return ends(table[torch.arange(table.shape[1], device=table.device) * page < lengths[:, None]])

    if readable(table) and readable(lengths) and (found := once(("named", page), [table, lengths], named)) and not 0 <= found[0] <= found[1] < pages:
        raise ValueError(f"{name}: page_table has pages {found[0]} to {found[1]}; the cache has 0 to {pages - 1}")


def pair_of(what: str, given) -> tuple:
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"attention_packed: {what} is a tuple of {len(pair)}; give one for queries and keys alike, or (queries, keys)")
    return pair


def check_longest(name: str, *given) -> None:
    """Each is a whole number of tokens, or None."""
    for longest in given:
        if longest is None or isinstance(longest, (Integral, torch.SymInt)):
            continue
        if not isinstance(longest, Tensor) or longest.ndim or longest.is_floating_point():
            shown = kind_of(longest) if isinstance(longest, Tensor) else repr(longest)
            raise ValueError(f"{name}: longest is {shown}; give a whole number of tokens, or None to have it read from the offsets")


def is_dense(tensor) -> bool:
    return isinstance(tensor, Tensor) and not tensor.is_nested and tensor.layout == torch.strided


def paged_grad(how: How, q: Tensor, cache: PagedKV) -> bool:
    """Whether a call over a cache needs gradients."""
    if not torch.is_grad_enabled():
        return False
    pools = [t for pool in cache[:2] for t in ((*pool.tensors, pool.channel) if isinstance(pool, Codes) else (pool,))]
    return any(isinstance(t, Tensor) and t.requires_grad for t in (q, *pools, how.sinks, *(() if how.score is None else how.score.tensors)))
