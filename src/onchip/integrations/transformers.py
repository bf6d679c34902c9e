"""`attn_implementation="onchip"` for the models of transformers 5: training, generation, packed batches, continuous batching.

>>> from onchip.integrations import transformers as onchip_attention
>>> onchip_attention.install()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="onchip")

The attention function takes what "sdpa" and "flash_attention_2" take between them: masks, position bias, softcap, sinks,
`cu_seq_lens_*`, the paged cache of `generate_batch`. A mask function goes with it, for without one transformers drops
padding in silence. It gives None where plain causal or full attention is meant, and else a mask that says what is seen in
O(len) memory and turns into the dense one when a model computes with it. A model that computes attention for itself, as
Bloom does, runs as it would without the name, and a warning says so.
"""

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from onchip.core.masks import Band, Blocks, Both, Causal, Dense, Document, Full, KeyPadding, Mask, Window, as_mask
from onchip.core.scores import Bias, Softcap
from onchip.integrations.own_attention import interface_of
from onchip.ops.attention import attention, attention_packed

aten = torch.ops.aten
PLAIN = Causal("top_left")


# ---- masks


class LazyMask(Tensor):
    """What `sdpa_mask` would give, bool `[batch, 1, len_q, len_k]`, as the onchip Mask `seen`; any operator on it makes it dense first."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, seen: Mask, asked: dict[str, Any]):
        shape = (asked["batch_size"], 1, asked["q_length"], asked["kv_length"])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(asked.get("device", "cpu")))
        self.seen, self.asked = seen, asked
        return self

    def dense(self) -> Tensor:
        return sdpa_mask(**{**self.asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    @functools.cached_property
    def documents(self) -> dict[str, Any] | None:
        """The keywords `cu_seq_lens_q` and so on of documents laid end to end in a batch of one; None where it is something else."""
        parts = (self.seen.a, self.seen.b) if isinstance(self.seen, Both) and self.seen.sign == "&" else (self.seen, Full())
        document, band = parts if isinstance(parts[0], Document) else parts[::-1]  # releases differ in the order
        if not isinstance(document, Document) or not isinstance(band, Band) or len(document.ids) != 1 or self.shape[2] != self.shape[3]:
            return None
        ids = document.ids[0]
        starts = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
        offsets = torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=len(ids)).int()
        longest = int(offsets.diff().max())
        return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}

    def __repr__(self):
        return f"LazyMask({self.seen}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default) or _whole(func, args):
            return cls(args[0].seen, args[0].asked)
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        if func in (aten.add.Tensor, aten.add_.Tensor):  # modules that attend for themselves add what "eager" gives them
            args = [_added(x, args) if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in args]
        return func(*args, **kwargs)


def _added(seen: Tensor, terms) -> Tensor:
    """A mask as a term of a sum: 0 where seen, else the least number of the other term's dtype."""
    dtype = next((x.dtype for x in terms if isinstance(x, Tensor) and x.is_floating_point()), None)
    return seen if dtype is None else torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _whole(func, args) -> bool:
    """Whether it is a slice that leaves nothing out."""
    if func is not aten.slice.Tensor:
        return False
    x, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    return not start and step == 1 and (end is None or end >= x.shape[dim])


class Span(NamedTuple):
    """Where a mask stands: `len_q` queries, the first at position `row` of the `len_k` keys, and the first key at token `start`."""

    row: int
    start: int
    len_q: int
    len_k: int

    @property
    def at_end(self) -> bool:
        """The last query stands at the last key."""
        return self.row == self.len_k - self.len_q


def mask(**asked: Any) -> Tensor | None:
    """The mask function: keywords as of transformers' `sdpa_mask`; a `LazyMask`, None where all is seen, or for what is not recognised its dense mask.

    A causal mask is said, not left to a module's `is_causal`: decoders that transformers gives a mask at all times have none. In compiled graphs it
    is `sdpa_mask`'s.
    """
    found = _lazy(asked)
    return sdpa_mask(**asked) if found is NotImplemented else found


def _lazy(asked: dict[str, Any]) -> Any:
    """`mask` where it need not be dense; else NotImplemented."""
    padding = asked.get("attention_mask")
    if asked["q_length"] == 1 or torch.compiler.is_compiling() or (padding is not None and padding.ndim != 2):
        return NotImplemented
    start = int(asked.get("kv_offset", 0))
    span = Span(int(asked.get("q_offset", 0)) - start, start, asked["q_length"], asked["kv_length"])
    seen = _read(asked["mask_function"], span)
    if seen is None:
        return NotImplemented
    if padding is not None:
        valid = _reach(padding.bool(), start, span.len_k)
        end = span.len_k if seen.hull.right is None else min(span.len_k, span.len_q + seen.hull.right + seen.hull.shift(span.len_q, span.len_k))
        if not valid[:, :end].all():  # keys from `end` on are hidden as it is
            return LazyMask(seen & KeyPadding(valid), asked)
    if seen == Causal() and span.len_q == span.len_k:
        seen = PLAIN
    if asked.get("allow_is_bidirectional_skip", False) and seen == Full():
        return None
    return LazyMask(seen, asked)


def mask_to_add(**asked: Any) -> Tensor | None:
    """The mask function of models that add the mask to scores of their own in some layers, or count on one where they are causal."""
    found = _lazy(asked)
    return found if isinstance(found, LazyMask) else eager_mask(**asked)  # None too: they need not say that they are causal


def _reach(tokens: Tensor, start: int, length: int) -> Tensor:
    """`length` columns of `tokens [batch, ...]` from `start` on; what it does not have is False or 0."""
    tokens = tokens[:, start : start + length]
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))


def _read(function: Callable, span: Span) -> Mask | None:
    """What one of transformers' mask functions sees; None for one that is not known here. They are closures, known by where they are written."""
    code = getattr(function, "__code__", None)
    held = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    match getattr(function, "__qualname__", "").partition(".")[0], held:
        case "causal_mask_function", _:
            return _band(None, 0, span)
        case "bidirectional_mask_function", _:
            return Full()
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return _band(size - 1, None, span)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return _band(size, size, span)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": Tensor() as skip} if span.at_end:
            return Document((torch.arange(span.start, span.start + span.len_k, device=skip.device) - skip[:, None]) // size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as ids} if span.len_q == span.len_k:
            return Document(ids)
        case "blockwise_overlay", {"block_sequence_ids": Tensor() as ids} if span.at_end:  # text, of ids below 0, sees itself: it does in what this is put over
            ids = _reach(ids, span.start, span.len_k)
            return Document(torch.where(ids < 0, -1 - torch.arange(span.len_k, device=ids.device), ids))
        case "remap_positions_for_packed_sequence", {"mask_function": inner} if span.len_q == span.len_k:
            seen = _read(inner, span)  # inside a document positions differ as places do
            return seen if isinstance(seen, Band) else None
        case "and_masks" | "or_masks" as kind, {"mask_functions": functions}:
            parts = [_read(f, span) for f in functions]
            return None if any(part is None for part in parts) else functools.reduce(operator.and_ if kind == "and_masks" else operator.or_, parts)
    return None


def _band(left: int | None, right: int | None, span: Span) -> Band | None:
    """`left` keys before a query's own place and `right` after it, None: all; None when there is no such band."""
    align = "bottom_right" if span.at_end else "top_left"
    if left is not None and left >= span.row + span.len_q - 1:
        left = None
    if align == "top_left":
        left, right = None if left is None else left - span.row, None if right is None else right + span.row
    if (left or 0) < 0 or (right or 0) < 0:
        return None
    if (left, right) == (None, None):
        return Full()
    return Causal(align) if (left, right) == (None, 0) else Window(left, right, align)


# ---- attention


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [batch, heads, len_q, dim]
    key: Tensor,  # [batch, kv_heads, len_k, dim]
    value: Tensor,  # [batch, kv_heads, len_k, dim_v]
    attention_mask: Tensor | None,
    **how: Any,
) -> tuple[Tensor, None]:
    """(output `[batch, len_q, heads, dim_v]`, None: the weights are never stored, and asking for them warns). transformers' contract of attention functions.

    attention_mask   a `LazyMask`, bool (True: seen) or float (added) `[batch or 1, heads or 1, len_q or 1, len_k]`; None: causal
                     from the top left where `is_causal`, or else the module, says so.
    how              dropout, scaling, is_causal, sliding_window, softcap, s_aux (sinks), position_bias (added), cu_seq_lens_q/k and
                     max_length_q/k (documents laid end to end), cache (of continuous batching). The window counts where there are
                     documents or pages; elsewhere it is in the mask. Of models that choose keys: indices, block_indices; sinks of each query.
    """
    if how.get("output_attentions"):
        warnings.warn('attn_implementation="onchip" never stores the weights that output_attentions=True wants: the output has none; use "eager"', stacklevel=2)
    causal = how.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    common = {"scale": how.get("scaling"), "softcap": how.get("softcap"), "sinks": how.get("s_aux"), "dropout": how.get("dropout") or None}
    chosen, sinks = _chosen(module, query, key, how), how.get("sinks")
    lazy = attention_mask if isinstance(attention_mask, LazyMask) else None
    if lazy is not None and lazy.seen == PLAIN:
        attention_mask, lazy, causal = None, None, True
    alone = how.get("position_bias") is None and chosen is None and sinks is None  # nothing that depends on where a query stands in its batch
    pages = isinstance(how.get("cache"), PagedAttentionCache)  # releases from 5.24 on write to it before they call
    documents = attention_mask is None and how.get("cu_seq_lens_q") is not None
    if (pages or documents) and not alone:
        raise NotImplementedError(
            'attn_implementation="onchip": indices, block_indices, sinks of queries and position_bias over pages, or over documents without a mask; '
            "use generate, give position_ids, or choose another implementation"
        )
    if pages:
        key, value = how["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=how)
        return _packed(query, key, value, _window(True, how), how, common)
    if alone and len(query) == 1:
        if documents:
            return _packed(query, key, value, _window(causal, how), how, common)
        if lazy is not None and lazy.documents:
            return _packed(query, key, value, lazy.seen.hull, lazy.documents, common)
    bias = how.get("position_bias")
    if lazy is not None:
        seen = lazy.seen
    elif attention_mask is None:
        seen = PLAIN if causal and query.shape[2] > 1 else Full()
    elif attention_mask.ndim != 4:
        raise ValueError(f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}; give [batch, heads or 1, len_q, len_k]")
    elif attention_mask.dtype == torch.bool:
        seen = attention_mask
    else:
        seen, bias = Full(), attention_mask if bias is None else bias + attention_mask
    if len(query) != len(key):  # queries that are learnt have a batch of one
        batch = max(len(query), len(key))
        query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    seen = seen if chosen is None else as_mask(seen) & chosen
    if bias is not None and common["softcap"]:  # what is added to a capped score comes after the cap
        common |= {"softcap": None, "score": [Softcap(common["softcap"]), Bias(bias)]}
        bias = None
    out = attention(query, key, value, mask=seen, bias=bias, return_lse=sinks is not None, **common)
    if sinks is not None:  # a logit more in the sum of each row
        out, lse = out
        out = out * torch.sigmoid(lse[..., None] - sinks).transpose(1, 2).to(out.dtype)
    return out.contiguous(), None  # models view it


def _chosen(module: nn.Module, query: Tensor, key: Tensor, how: dict[str, Any]) -> Mask | None:
    """The keys that a model's indexer chose for each query: `indices [batch, len_q, n]`, or `block_indices [batch, kv_heads, len_q, n]` of blocks, -1: none."""
    tokens, blocks = how.get("indices"), how.get("block_indices")
    if tokens is not None:
        seen = torch.zeros(*tokens.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        return Dense(seen.scatter_(-1, tokens.long(), True)[:, None])
    if blocks is not None:
        size = module.indexer.block_size
        count = -(-key.shape[2] // size)
        seen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=key.device)
        seen = seen.scatter_(-1, torch.where(blocks < 0, count, blocks), True)[..., :count]
        return Blocks(seen.repeat_interleave(query.shape[1] // blocks.shape[1], 1), (1, size))
    return None


def _window(causal: bool, how: dict[str, Any]) -> Band:
    """What is seen inside a document."""
    window = how.get("sliding_window")
    if window is None:
        return Causal() if causal else Full()
    return Window(window - 1, 0 if causal else window - 1)


def _packed(query: Tensor, key: Tensor, value: Tensor, seen: Band, how: dict[str, Any], common: dict[str, Any]) -> tuple[Tensor, None]:
    """Attention in documents laid end to end in a batch of one."""
    offsets = how["cu_seq_lens_q"].int(), how["cu_seq_lens_k"].int()
    longest = how.get("max_length_q"), how.get("max_length_k")
    longest = None if None in longest else tuple(map(int, longest))
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_packed(*tokens, *offsets, longest=longest, mask=seen, **common)[None].contiguous(), None


# ---- names

BESIDE_OWN = "onchip_beside_own"  # what "onchip" becomes for models that `mask_to_add` is for
NAMES = {"onchip": mask, "paged|onchip": mask, BESIDE_OWN: mask_to_add}  # the second is what releases before 5.23 ask for in `generate_batch`
RUNS_AS = {"calls": "onchip", "calls beside its own": BESIDE_OWN, "none": None}
_before: dict[str, Any] = {}  # the methods that `install` replaced; empty while nothing is installed


def install() -> None:
    """Make `attn_implementation="onchip"` known, to models and to `generate_batch`."""
    if _before:
        return
    for name, function in NAMES.items():
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, function)
    switch = _before["switch"] = ContinuousBatchingManager.switch_to_cb_friendly_attn
    resolve = _before["resolve"] = PreTrainedModel.get_correct_attn_implementation
    give = _before["give"] = PreTrainedModel.set_attn_implementation

    def switch_to_cb_friendly_attn(self, model, *args, **keywords):  # it knows "sdpa" and names with "flash" in them only
        return None if model.config._attn_implementation in NAMES else switch(self, model, *args, **keywords)

    def get_correct_attn_implementation(self, requested_attention, *args, **keywords):  # of each model inside another too
        if requested_attention not in NAMES:
            return resolve(self, requested_attention, *args, **keywords)
        # BESIDE_OWN comes from the model around this one, with the same config
        name = requested_attention if requested_attention == BESIDE_OWN else RUNS_AS[interface_of(type(self))]
        found = resolve(self, requested_attention if name == "onchip" else name, *args, **keywords)
        if name is None:
            warnings.warn(
                f'{type(self).__name__} computes attention for itself, not by the attention interface of transformers: attn_implementation="onchip" '
                f'has no part in it, and it runs as "{found}" (models inside it with a config of their own are judged for themselves)',
                stacklevel=2,
            )
        return found

    @functools.wraps(give)
    def set_attn_implementation(self, attn_implementation, *args, **keywords):  # transformers hands on what the outer model runs as
        inner = self.config.sub_configs if attn_implementation in tuple(NAMES) and RUNS_AS[interface_of(type(self))] is None else ()
        if inner:
            attn_implementation = {"": self.get_correct_attn_implementation(attn_implementation), **dict.fromkeys(inner, attn_implementation)}
        return give(self, attn_implementation, *args, **keywords)

    PreTrainedModel.set_attn_implementation = set_attn_implementation
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def uninstall() -> None:
    """Take the names out again; models that use them must be given another implementation first."""
    if not _before:
        return
    for name in NAMES:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _before.pop("switch")
    PreTrainedModel.get_correct_attn_implementation = _before.pop("resolve")
    PreTrainedModel.set_attn_implementation = _before.pop("give")
