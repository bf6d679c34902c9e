"""Exact attention over dense, packed and paged keys, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.core.formats import Codes
from onchip.core.masks import Causal, Full, Mask
from onchip.core.problem import E4M3, Dropout, Operands
from onchip.core.scales import SHARES, Quantised, Scales
from onchip.core.scores import chain
from onchip.ops import attend, graph, registered
from onchip.ops.attend import How, PagedKV
from onchip.ops.differentiable import autocast


def attention(
    q: Tensor | Quantised,  # [batch, len_q, heads, dim]
    k: Tensor | Quantised,  # [batch, len_k, kv_heads, dim]
    v: Tensor | Quantised,  # [batch, len_k, kv_heads, dim_v]
    *,
    mask: Mask | Tensor | Callable = Full(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(softcap(score(scale q k^T + bias)) + mask) v`, in O(len_q + len_k) memory (FlashAttention-2, Dao, 2023).

    Returns `[batch, len_q, heads, dim_v]` in q's dtype; with `return_lse` also the natural log of each row's sum of
    exponentials, float32 `[batch, heads, len_q]`. Both have gradients. A row that sees no key gives 0 and LSE -inf.

    mask      a Mask (`Full`, `Causal`, `Window`, `Document`, ... and `&`, `|` of them), a bool tensor (True: seen), or `mask_mod(b, h, i, j)`.
              Causal and Window align to the bottom right: the last query sees the last key.
    scale     `dim ** -0.5` when None.      bias   a float tensor that broadcasts over [batch, heads, len_q, len_k]; it may have a gradient.
    score     `score_mod(s, b, h, i, j)`, a Score (`ALiBi`, `RelativeBias`, ...) or a list of them, applied in order after the bias.
    softcap   `softcap tanh(s / softcap)`, after the score; None or 0: none.      sinks   [heads]: a logit more in each row's sum; LSE includes it.
    dropout   a probability, or `Dropout(p, seed, offset)`; drawn again in the backward pass, never stored.
    deterministic   the same gradients, bit by bit, in every run.      batch_invariant   a row's bits do not depend on its neighbours.
    kernel    one by name: it runs or raises. Gradients then come from the same family of kernels.

    q, k and v may be `Quantised`, all three (see `quantise`): the output is bfloat16, and gradients go to their sources. Products are in 8 bits on a
    Hopper GPU, for head dimension 64, 128 or (forward) 256, Full, Causal and Window, and nothing else asked for, the backward pass for scales of heads
    and blocks; elsewhere plain torch computes in float32.
    `heads` is a multiple of `kv_heads` (grouped-query attention). Inputs may be strided or expanded; the last dimension should be
    contiguous (else it is copied). Under autocast q, k and v are cast. Gradients of gradients: kernel="reference" only.
    torch.compile, torch.export and torch.func see one operator, `onchip::attention`; masks and functions may be made inside or outside.

    Raises ValueError or TypeError for arguments that disagree, `Unsupported` when `kernel` names one that refuses.
    """
    q, k, v, scales, sources = _taken_apart(q, k, v)
    _check("attention", q, k, v, rank=4, scaled=scales is not None)
    if scales is not None:
        _check_scales(q, k, v, scales)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"attention: k has batch {k.shape[0]}, q has {q.shape[0]}; they must be equal")
    how = How(mask, chain(bias, score, softcap), sinks, dropout, deterministic, batch_invariant, kernel)
    run = graph.attend if graph.in_graph(kernel, q, k, v) else attend.attend
    return run(how, attend.dense_sizes(q, k, v), q, k, v, Operands(_scale(scale, q), scales=scales, sources=sources), return_lse)


def attention_packed(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [tokens_k, kv_heads, dim]
    v: Tensor,  # [tokens_k, kv_heads, dim_v]
    q_offsets: Tensor,  # [batch + 1] int32
    k_offsets: Tensor | None = None,  # [batch + 1] int32
    *,
    longest: int | tuple[int, int] | None = None,
    used: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    mask: Mask | Tensor | Callable = Full(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` for sequences of different lengths laid end to end without padding.

    The queries of sequence `i` are the tokens `q_offsets[i]` to `q_offsets[i + 1]`, its keys those of `k_offsets` (None: the same).
    Returns `[tokens, heads, dim_v]`, and with `return_lse` float32 `[heads, tokens]`. All else as for `attention`; masks and
    scores count queries and keys from the start of their sequence.

    longest   the most queries and keys of a sequence, one number or two; an upper bound will do. None: read from the
              offsets, which waits for the device.
    used      int32 [batch]: how many tokens of each sequence are used, for queries and keys alike or (queries, keys); the rest may hold
              anything, NaN included, and gives 0 and LSE -inf.
    """
    _plain("attention_packed", q, k, v)
    q, k, v = autocast(q, k, v)
    _check("attention_packed", q, k, v, rank=3)
    if k_offsets is None and len(k) != len(q):
        raise ValueError(f"attention_packed: k has {len(k)} tokens, q has {len(q)}; they must be equal, or give k_offsets")
    k_offsets = q_offsets if k_offsets is None else k_offsets
    (q_used, k_used), (longest_q, longest_k) = _both("used", used), _both("longest", longest)
    _check_offsets(q, q_offsets, k_offsets, q_used, k_used)
    how = How(mask, chain(bias, score, softcap), sinks, dropout, deterministic, batch_invariant, kernel)
    x = Operands(_scale(scale, q), q_offsets, k_offsets, q_used, k_used)
    run = graph.attend
    if not graph.in_graph(kernel, q, k, v):
        run = attend.attend
        longest_q, longest_k = attend.longest_of(q_offsets, longest_q, q_used), attend.longest_of(k_offsets, longest_k, k_used)
    return run(how, attend.packed_sizes(q, k, v, len(q_offsets) - 1, longest_q, longest_k), q, k, v, x, return_lse)


def paged_attention(
    q: Tensor,  # [batch, len_q, heads, dim], or with q_offsets [tokens, heads, dim]
    cache: PagedKV,
    *,
    q_offsets: Tensor | None = None,  # [batch + 1] int32
    longest: int | None = None,
    mask: Mask | Tensor | Callable = Causal(),
    scale: float | None = None,
    bias: Tensor | None = None,
    score: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the last `len_q` tokens of each sequence over its keys in a paged cache: a step of decoding, or a chunk of a prefill.

    Of up to 16 queries the keys of one sequence are read by several blocks at once and merged by their LSE (Flash-Decoding, Dao et al.,
    2023); the heads of a group, and the queries, share each key that is read. More go in tiles: on a Hopper GPU by a kernel for bf16 and fp16, head
    dimensions 8 to 256 by 8; on any other by one for all GPUs. Pages may have any size. Lengths are read on the device, so the call can be captured
    in a CUDA graph. Returns as `attention` does; arguments and errors as there.

    q_offsets   for sequences with different numbers of queries, laid end to end (chunks of prefills and decodes in one call): those of sequence
                `i` are the tokens `q_offsets[i]` to `q_offsets[i + 1]`, none at all included, and still its last ones. Returns
                `[tokens, heads, dim_v]`, and LSE `[heads, tokens]`; tokens from the last offset on are not computed and may come back as anything.
    longest     the most queries of a sequence; an upper bound will do. None: read from the offsets, which waits for the device.

    Multi-head latent attention (DeepSeek-V2, 2024): the cache's values are the first 512 columns of its keys, in the same memory, which is then read
    once. The heads' own projections of keys are absorbed by the queries, those of values by the output (w_uk [heads, 128, 512], w_uv [heads, 512, 128]):

        q = torch.cat([torch.einsum("bqhn,hnc->bqhc", q_nope, w_uk), q_rope], -1)  # [batch, len_q, heads, 512 + 64]
        o = paged_attention(q, PagedKV(latent, latent[..., :512], page_table, lengths), scale=(128 + 64) ** -0.5)
        o = torch.einsum("bqhc,hcv->bqhv", o, w_uv)
    """
    _plain("paged_attention", q)
    how = How(mask, chain(bias, score, softcap), sinks, None, False, batch_invariant, kernel)
    return paged(q, cache, how, Operands(_scale(scale, q), q_offsets), longest, return_lse)


def paged(q: Tensor, cache: PagedKV, how: How, x: Operands, longest: int | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention`, for who has more to say than its arguments do."""
    q_offsets = x.q_offsets
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type) if isinstance(cache.k, Codes) else cache.k.dtype)
    batch, pages = _paged_batch(q, q_offsets, longest), cache.page_table
    if isinstance(cache.k, Codes) or isinstance(cache.v, Codes):
        _check_codes(q, cache)
    else:
        _check("paged_attention", q, cache.k, cache.v, rank=4, rank_q=q.ndim)
    (k, v), _ = registered.taken_apart(cache)
    if pages.dtype != torch.int32 or pages.ndim != 2 or pages.shape[0] != batch or pages.device != q.device:
        raise ValueError(f"paged_attention: page_table is {_kind(pages)}; give int32 [{batch}, most pages] on {q.device}")
    if cache.lengths.dtype != torch.int32 or cache.lengths.shape != (batch,) or cache.lengths.device != q.device:
        raise ValueError(f"paged_attention: lengths are {_kind(cache.lengths)}; give int32 [{batch}] on {q.device}")
    run = graph.attend_paged
    if not graph.in_graph(how.kernel, q, k, v):
        longest = attend.longest_of(q_offsets) if q_offsets is not None and longest is None else longest
        if how.kernel == "reference" or not _paged_grad(how, q, cache):
            run = attend.attend_paged
    sizes = attend.paged_sizes(q, cache.k, cache.v, pages.shape[1], None if q_offsets is None else (batch, longest))
    return run(how, sizes, q, cache, x, return_lse)


def merge(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One result from partial ones over disjoint keys: `o = sum exp(lse_s - lse) o_s`, `lse = log sum exp(lse_s)`.

    states   (output, LSE) pairs as `attention(..., return_lse=True)` or `attention_packed` gives them, of one shape.
    Returns such a pair; both have gradients (Flash-Decoding, Dao et al., 2023). Parts with LSE -inf add nothing, whatever their output holds.
    One kernel on a GPU, as long as nobody needs gradients.
    """
    if not states:
        raise ValueError("merge: states is empty; give at least one (output, LSE) pair")
    for n, (out, lse) in enumerate(states):
        if out.shape != states[0][0].shape or lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
            raise ValueError(f"merge: part {n} has an output {list(out.shape)} and LSE {list(lse.shape)}; give [..., len, heads, dim] and [..., heads, len]")
    return attend.merge(states)


def quantise(
    q: Tensor,  # [batch, len_q, heads, dim]
    k: Tensor,  # [batch, len_k, kv_heads, dim]
    v: Tensor,  # [batch, len_k, kv_heads, dim_v]
    *,
    share: str = "block",
    rotation: Tensor | None = None,
) -> tuple[Quantised, Quantised, Quantised]:
    """q, k and v in e4m3 for `attention`, each with scales max |x| / 448, after FlashAttention-3 (Shah et al., 2024, section 3.3).

    share      what shares a scale: "head" (all tokens of it), "block" (128 tokens) or "token".
    rotation   random signs, float32 [dim], see `random_signs`: q and k are multiplied by diag(signs) H / sqrt(dim) with H the Walsh-Hadamard
               matrix, which changes no score, and spreads what is large in few channels over all (dim a power of two).

    Gradients come back as if nothing had been rounded, by the `source` of each (see `Quantised`). Raises ValueError for a share or signs that do not fit.
    """
    if share not in tuple(SHARES):
        raise ValueError(f"quantise: share is {share!r}; give one of {', '.join(map(repr, SHARES))}")
    _plain("quantise", q, k, v)
    q, k, v = autocast(q, k, v)
    _check("quantise", q, k, v, rank=4)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"quantise: k has batch {k.shape[0]}, q has {q.shape[0]}; they must be equal")
    dim = q.shape[-1]
    if rotation is not None:
        if not isinstance(rotation, Tensor) or rotation.shape != (dim,) or dim & (dim - 1):
            given = list(rotation.shape) if isinstance(rotation, Tensor) else type(rotation).__name__
            raise ValueError(f"quantise: rotation is {given} for head dimension {dim}; give signs [{dim}], of a power of two, or None")
        rotation = rotation.to(q.device, torch.float32).contiguous()
    run = graph.quantise if graph.in_graph("auto", q, k, v) else attend.quantise
    return tuple(Quantised(*run(x, share, signs), attend.source_of(x, signs)) for x, signs in ((q, rotation), (k, rotation), (v, None)))


def random_signs(dim: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """+1 and -1, float32 [dim], the same for the same seed on every device: the rotation of `quantise`. Made once, outside of what is compiled."""
    drawn = torch.randint(0, 2, (dim,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return (2 * drawn - 1).to(device, torch.float32)


# ---- checks


def _plain(name: str, *tensors: Tensor) -> None:
    """Raises where a tensor is something else; only `attention` takes quantised ones."""
    for given, t in zip("qkv", tensors, strict=False):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {given} is {type(t).__name__}; give a tensor" + " (attention alone takes quantised ones)" * isinstance(t, Quantised))


def _taken_apart(q, k, v) -> tuple[Tensor, Tensor, Tensor, Scales | None, tuple[Tensor, ...] | None]:
    """Tensors, cast, and the scales and sources of quantised ones."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        return *autocast(q, k, v), None, None
    if not any(isinstance(t, Quantised) for t in (q, k, v)):
        _plain("attention", q, k, v)
    plain = [name for name, t in (("q", q), ("k", k), ("v", v)) if not isinstance(t, Quantised)]
    if plain:
        raise TypeError(f"attention: of q, k, v, {' and '.join(plain)} not Quantised; give all three as onchip.quantise makes them, or plain tensors")
    odd = [f"{name}.{field}" for name, t in (("q", q), ("k", k), ("v", v)) for field in t._fields[: 2 + (t.source is not None)]
           if not isinstance(getattr(t, field), Tensor)]  # fmt: skip
    if odd:
        raise TypeError(f"attention: {' and '.join(odd)} not tensors; give Quantised(values, scale) as onchip.quantise makes it")
    if q.source is k.source is v.source is None:
        return q.values, k.values, v.values, Scales(q.scale, k.scale, v.scale), None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.source is None and (t.values.requires_grad or t.scale.requires_grad):
            raise ValueError(f"attention: {name} has no source, but values or scales that require a gradient, beside others with a source; detach them")
        learnt = [] if t.source is None else [field for field in ("values", "scale") if (x := getattr(t, field)).requires_grad and x.is_leaf]
        if learnt:  # what quantise makes is no leaf
            raise ValueError(f"attention: {name}.{learnt[0]} requires a gradient, and {name} has a source, which gets it all; detach it, or give no source")
        if t.source is not None and (t.source.shape != t.values.shape or not t.source.is_floating_point() or t.source.device != t.values.device):
            raise ValueError(f"attention: the source of {name} is {_kind(t.source)}; give floats, {list(t.values.shape)} on {t.values.device}, or None")
    sources = tuple(t.scale.new_zeros(1).expand(t.values.shape) if t.source is None else t.source for t in (q, k, v))
    return q.values.detach(), k.values.detach(), v.values.detach(), Scales(*(t.scale.detach() for t in (q, k, v))), sources


def _check_scales(q: Tensor, k: Tensor, v: Tensor, scales: Scales) -> None:
    """Whether quantised tensors and their scales go together."""
    for name, t, scale in zip("qkv", (q, k, v), scales, strict=True):
        batch, length, heads, _ = t.shape
        if t.dtype != E4M3:
            raise ValueError(f"attention: {name} is Quantised with values in {t.dtype}; give torch.float8_e4m3fn")
        if scale.dtype != torch.float32 or scale.ndim != 3 or scale.shape[0] not in (1, batch) or scale.shape[1] not in (1, heads) or scale.device != t.device:
            raise ValueError(f"attention: the scale of {name} is {_kind(scale)}; give float32 [{batch} or 1, {heads} or 1, n] on {t.device}")
        Scales.share(scale, length)


def _scale(scale: float | None, q: Tensor) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise TypeError("attention: scale requires a gradient, which a number has not; give scale=1.0 and score=lambda s, b, h, i, j: s * scale")
    try:
        return q.shape[-1] ** -0.5 if scale is None else float(scale)
    except (TypeError, ValueError) as error:
        raise TypeError(f"attention: scale is {scale!r}; give a number, or None for dim ** -0.5") from error


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, rank: int, scaled: bool = False, rank_q: int = 0) -> None:
    """The ways in which q, k and v may disagree, each with the way out. `rank_q`: of q, where it is another one."""
    if q.is_nested or k.is_nested or v.is_nested or not q.layout == k.layout == v.layout == torch.strided:
        raise TypeError(f"{name}: a nested or sparse tensor; give dense ones, sequences of different lengths as values() and offsets() to attention_packed")
    _check_shapes(name, q, k, v, rank, rank_q)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype")
    if not q.dtype.is_floating_point:
        raise ValueError(f"{name}: q, k, v are {q.dtype}; give floats")
    if q.dtype.itemsize == 1 and not scaled:
        raise ValueError(f"{name}: q, k, v are {q.dtype} without scales; give them to attention as onchip.Quantised(values, scale)")
    if not q.device == k.device == v.device:
        raise ValueError(f"{name}: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def _check_shapes(name: str, q: Tensor, k: Tensor | Codes, v: Tensor | Codes, rank: int, rank_q: int = 0) -> None:
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
        raise ValueError(f"{name}: {shape_q[-2]} query heads are not a multiple of {shape_k[-2]} key heads")


def _check_codes(q: Tensor, cache: PagedKV) -> None:
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
                raise ValueError(f"paged_attention: {name}.{field} is {None if got is None else _kind(got)}; format {form} of heads of {dim} takes {want}")
    k, v = cache[:2]
    if v.channel is not None:
        raise ValueError("paged_attention: v has a channel scale, which only keys have; divide the columns of the next weight by it, or give None")
    if k.channel is not None and (k.channel.dtype != torch.float32 or k.channel.shape != k.shape[2:] or k.channel.device != q.device):
        raise ValueError(f"paged_attention: k.channel is {_kind(k.channel)}; give float32 {list(k.shape[2:])} on {q.device}, or None")
    _check_shapes("paged_attention", q, k, v, rank=4, rank_q=q.ndim)
    if not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise ValueError(f"paged_attention: q is {q.dtype}; give float16, bfloat16, float32 or float64")


def _check_offsets(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_used: Tensor | None, k_used: Tensor | None) -> None:
    """What says where the sequences of a packed batch lie."""
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.ndim != 1 or len(offsets) < 2 or offsets.device != q.device:
            raise ValueError(f"attention_packed: {name} are {_kind(offsets)}; give int32 [batch + 1] on {q.device}")
    batch = len(q_offsets) - 1
    if len(k_offsets) != batch + 1:
        raise ValueError(f"attention_packed: k_offsets are of {len(k_offsets) - 1} sequences, q_offsets of {batch}; they must be as many")
    for lengths in (q_used, k_used):
        if lengths is None:
            continue
        if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or lengths.shape != (batch,) or lengths.device != q.device:
            raise ValueError(f"attention_packed: used is {_kind(lengths)}; give int32 [{batch}] on {q.device}")


def _paged_batch(q: Tensor, q_offsets: Tensor | None, longest: int | None) -> int:
    """How many sequences `q` has."""
    if q.ndim != (4 if q_offsets is None else 3):
        way = "[batch, len_q, heads, dim] without q_offsets, [tokens, heads, dim] with them"
        raise ValueError(f"paged_attention: q is {list(q.shape)} {'without' if q_offsets is None else 'with'} q_offsets; give {way}")
    if q_offsets is None:
        if longest is not None:
            raise ValueError(f"paged_attention: longest is {longest} without q_offsets; give q_offsets for packed queries, or leave longest out")
        return len(q)
    if q_offsets.dtype != torch.int32 or q_offsets.ndim != 1 or len(q_offsets) < 2 or q_offsets.device != q.device:
        raise ValueError(f"paged_attention: q_offsets are {_kind(q_offsets)}; give int32 [batch + 1] on {q.device}")
    if longest is not None and longest < 0:
        raise ValueError(f"paged_attention: longest is {longest}; give the most queries of a sequence, or None to have it read from q_offsets")
    return len(q_offsets) - 1


def _both(what: str, given) -> tuple:
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"attention_packed: {what} is a tuple of {len(pair)}; give one for queries and keys alike, or (queries, keys)")
    return pair


def _kind(tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


def _paged_grad(how: How, q: Tensor, cache: PagedKV) -> bool:
    """Whether a call over a cache needs gradients."""
    reads = () if how.score is None else how.score.tensors
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, cache.k, cache.v, how.sinks, *reads) if not isinstance(t, Codes))


__all__ = ["Dropout", "PagedKV", "Quantised", "attention", "attention_packed", "merge", "paged_attention", "quantise", "random_signs"]
