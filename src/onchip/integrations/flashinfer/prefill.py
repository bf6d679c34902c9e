"""Queries of many sequences laid end to end, over pages; and what that shares with keys laid end to end (`ragged.py`)."""

import functools
from typing import Any

import torch
from torch import Tensor

from onchip.core.arguments import check_count, kind_of
from onchip.core.masks import Mask
from onchip.core.trace import readable
from onchip.integrations.flashinfer.call import (
    BACKENDS,
    LAYOUTS,
    POSITIONS,
    Bits,
    Items,
    Result,
    Scaling,
    Way,
    as_planned,
    call_of,
    check_heads,
    checked,
    compute_dtype,
    dtype_of,
    finished,
    fixed_batch,
    keep,
    mask_of,
    on_host,
    one_of,
    planned,
    refuse,
    scaling_of,
)
from onchip.integrations.flashinfer.pages import Queries, Table, attend, lists_of, unpacked
from onchip.integrations.flashinfer.quantization import check_bytes, check_mask, segment_packbits


class Prefill:
    """What the two wrappers share: queries laid end to end, a mask for each sequence, and how results come back."""

    def _start(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str, masks: tuple[Tensor | None, Tensor | None], **jit: Any) -> None:
        name = type(self).__name__
        one_of(name, "kv_layout", kv_layout, LAYOUTS)
        one_of(name, "backend", backend, BACKENDS)
        refuse(name, **jit)
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        self._kv_layout, self._backend = kv_layout, backend
        self._custom_mask_buf, self._mask_indptr_buf = masks
        self._way, self._most_rows, self._kept_item = None, None, None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *args, **kwargs) -> tuple[int, int]:
        """Bytes that `plan` needs of the two workspace buffers: none."""
        return 0, 0

    def _queries(self, name: str, qo_indptr: Tensor, unit: int = 1) -> Tensor:
        """Where queries lie, on the host, of offsets in `unit`s; the device's copy is kept for `run`, and how many there are at most."""
        host = on_host(name, "qo_indptr", qo_indptr) // unit
        lengths = host.diff()
        if len(host) < 2 or (lengths < 0).any():
            raise ValueError(f"{name}: qo_indptr is {host.tolist()}; give [batch + 1], of one sequence or more, never falling")
        self._rows, self._longest = int(host[-1]), int(lengths.max())
        self._even = self._longest if int(lengths.min()) == self._longest and int(host[0]) == 0 else None
        if not self._use_cuda_graph:
            self._qo_indptr_buf = host.to(self.device, non_blocking=True)
            return host
        most = self._rows if self._most_rows is None else self._most_rows
        if self._rows > most:
            raise ValueError(f"{name}: {self._rows} queries in a wrapper for CUDA graphs first planned for {most}; that many are the most")
        if len(host) != self._fixed_batch_size + 1:
            raise ValueError(f"{name}: {len(host) - 1} sequences in a wrapper for CUDA graphs of {self._fixed_batch_size}; the batch size cannot change")
        keep(self._qo_indptr_buf, host)
        self._longest, self._even = most, None  # whatever later plans say, what is captured serves them
        return host

    def _done(self, way: Way) -> None:
        """A plan that went well: `run` may come."""
        self._way = way
        if self._use_cuda_graph:
            self._most_rows = self._longest

    def _masks(self, custom_mask: Tensor | None, packed: Tensor | None, lengths_q: Tensor, lengths_k: Tensor) -> None:
        """The bits of the sequences' masks, and each one's first byte."""
        if custom_mask is None and packed is None:
            if not self._use_cuda_graph:
                self._custom_mask_buf = self._mask_indptr_buf = None
            self._masked = False
            return
        sizes = lengths_q.long() * lengths_k.long()
        if packed is None:
            check_mask("plan", custom_mask, lengths_q.tolist(), lengths_k.tolist())
            packed, first = segment_packbits(custom_mask.reshape(-1), torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), "little")
        else:
            check_bytes("plan: packed_custom_mask", packed)
            first = torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0)).int()
        if len(packed) < int(first[-1]):
            raise ValueError(f"plan: packed_custom_mask has {len(packed)} bytes; these lengths need {int(first[-1])}, each sequence's beginning with a byte")
        self._masked = True
        if not self._use_cuda_graph:
            self._custom_mask_buf, self._mask_indptr_buf = packed.to(self.device, copy=True), first.to(self.device)
            return
        for argument, buffer in (("custom_mask_buf", self._custom_mask_buf), ("mask_indptr_buf", self._mask_indptr_buf)):
            if not isinstance(buffer, Tensor):
                raise ValueError(f"plan: {argument} is {type(buffer).__name__}, and custom_mask is given to a wrapper for CUDA graphs; give one at the start")
        keep(self._custom_mask_buf, packed, "bytes of custom_mask")
        keep(self._mask_indptr_buf, first)

    def _items(self, name: str, given: tuple[Tensor | None, Tensor | None], width: int | Tensor, lengths: Tensor) -> None:
        """Multi-item scoring: the lengths of the shared prefixes, and each later token's place in its item; `width` of them a sequence, 0: as many as there
        are. What fills up the last sequence's, and the 0 of its last delimiter, may be left out. `lengths`: of the keys."""
        self._item, (prefix, position), batch = None, given, len(lengths)
        if prefix is None and position is None:
            return
        if not isinstance(prefix, Tensor) or not isinstance(position, Tensor) or prefix.numel() != batch:
            given = f"prefix_len_ptr is {kind_of(prefix)}, token_pos_in_items_ptr {kind_of(position)}"
            raise ValueError(f"{name}: {given}; give the lengths of the prefixes, [{batch}], and the later tokens' places in their items, or neither")
        if not isinstance(width, Tensor):
            check_count(name, 0, token_pos_in_items_len=width)
        count, width = position.numel(), int(width) or -(-position.numel() // batch)
        if count < (batch - 1) * width:
            raise ValueError(f"{name}: {count} places in token_pos_in_items_ptr for {batch} sequences of {width} each; give {width} for all but the last one")
        if readable(prefix) and width:
            needed = (lengths - prefix.reshape(batch).int()).tolist()
            there = [width] * (batch - 1) + [min(width, count - (batch - 1) * width)]
            short = next((i for i, (wanted, found) in enumerate(zip(needed, there, strict=True)) if wanted > found + (i == batch - 1)), None)
            if short is not None:
                given = f"sequence {short} has {needed[short]} keys past its prefix and {there[short]} places in token_pos_in_items_ptr"
                raise ValueError(f"{name}: {given}; give each of them its place in its item, with token_pos_in_items_len the most of any sequence")
        position = position.to(self.device, torch.int32, copy=True).flatten()
        position = torch.nn.functional.pad(position, (0, max(0, batch * width - count)))[: batch * width].view(batch, width)
        item = Items(prefix.reshape(batch).to(self.device, torch.int32, copy=True), position)
        if self._use_cuda_graph:  # a graph holds the addresses of the first plan's
            kept = self._kept_item = item if self._kept_item is None else self._kept_item
            if kept.position.shape != item.position.shape:
                given = f"{width} places in an item for each of {batch} sequences"
                raise ValueError(f"{name}: {given} in a wrapper for CUDA graphs whose first plan had {list(kept.position.shape)}; give as many")
            kept.prefix.copy_(item.prefix), kept.position.copy_(item.position)
            item = kept
        self._item = item

    def _custom(self) -> Mask | None:
        if self._item is not None:
            made, tensors = Items, self._item.tensors
        elif self._masked:
            made, tensors = Bits, (self._custom_mask_buf, self._mask_indptr_buf[:-1])
        else:
            return None
        if self._use_cuda_graph:  # what kernels find out about a mask's tensors is found out anew in each replay
            tensors = (t.clone() for t in tensors)
        return made(*tensors)

    def _dtypes(self, q_data_type, kv_data_type, o_data_type) -> None:
        self._q_dtype = dtype_of(q_data_type)
        self._kv_dtype = dtype_of(kv_data_type, self._q_dtype)
        self._o_dtype = dtype_of(o_data_type, self._q_dtype)

    def _finished(self, name: str, way: Way, q: Tensor, scaling: Scaling, sinks: Tensor | None, want: Result, run):
        if len(q) != self._rows:
            raise ValueError(f"{name}: q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._rows}); give [{self._rows}, heads, dim]")
        lengths = (None, None) if self._use_cuda_graph else (self._longest, self._most_keys)
        call = call_of(way, mask_of(way, self._custom(), lengths), self._heads, self._dim, q.device, scaling, sinks)
        return finished(call, want, run)

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""


class BatchPrefillWithPagedKVCacheWrapper(Prefill):
    """Packed queries over pages: `plan` builds the page table, `run` computes with it, as often as wanted.

    `float_workspace_buffer` says which device. With `use_cuda_graph` table, lengths and offsets stay at their addresses: `run` may be captured, and
    after another `plan` of no more queries replayed. `backend` changes nothing.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args=None,
        jit_kwargs=None,
    ) -> None:
        self._start(float_workspace_buffer, kv_layout, backend, (custom_mask_buf, mask_indptr_buf), jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._use_cuda_graph = use_cuda_graph
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        self._fixed_batch_size = fixed_batch(type(self).__name__, use_cuda_graph, buffers, qo_indptr_buf, paged_kv_last_page_len_buf)
        self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = buffers.values()
        self._table = Table(self.device, (self._fixed_batch_size, len(paged_kv_indices_buf)) if use_cuda_graph else None)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """The page table of the batch, and its masks.

        custom_mask          bool, `[len_q, len_k]` of each sequence, flat and end to end; it stands in the place of `causal`.
        packed_custom_mask   the same as bits, see `segment_packbits(..., bitorder="little")`.
        prefix_len_ptr, token_pos_in_items_ptr   multi-item scoring, see `Items`.
        Backend "cudnn" gives `qo_indptr` in elements, tokens times heads times dimension. What only steers FlashInfer's kernels
        (`use_fp16_qk_reduction`, `fixed_split_size`, `disable_split_kv`, `block_tables`, `max_...`) changes nothing.
        """
        name = f"{type(self).__name__}.plan"
        self._way = None  # what a plan that fails leaves behind is none
        one_of(name, "pos_encoding_mode", pos_encoding_mode, POSITIONS)
        in_elements = self._backend == "cudnn" and max_token_per_sequence is not None
        host = self._queries(name, qo_indptr, num_qo_heads * head_dim_qk if in_elements else 1)
        lists = lists_of(name, paged_kv_indptr, paged_kv_last_page_len, page_size, seq_lens)
        if len(lists.lengths) != len(host) - 1:
            raise ValueError(f"{name}: paged_kv_indptr is of {len(lists.lengths)} sequences, qo_indptr of {len(host) - 1}; they must be as many")
        if self._use_cuda_graph:
            keep(self._paged_kv_indptr_buf, paged_kv_indptr), keep(self._paged_kv_indices_buf, paged_kv_indices, "indices")
            keep(self._paged_kv_last_page_len_buf, paged_kv_last_page_len)
        self._pages = self._table.fill(name, lists, paged_kv_indices, page_size)
        self._most_keys = self._pages.most
        self._masks(custom_mask, packed_custom_mask, host.diff(), lists.lengths)
        self._items(name, (prefix_len_ptr, token_pos_in_items_ptr), token_pos_in_items_len, lists.lengths)
        self._dtypes(q_data_type, kv_data_type, o_data_type)
        self._heads, self._dim, self._dim_v = (num_qo_heads, num_kv_heads), head_dim_qk, head_dim_vo or head_dim_qk
        self._done(checked(name, Way(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)))

    begin_forward = plan

    def run(
        self,
        q: Tensor,  # [tokens, heads, dim]
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ):
        """`[tokens, heads, dim_v]`; with `return_lse` also LSE `[tokens, heads]` in base 2. Does not wait for the device.

        With queries in float8 three more arguments by position are the scales of q, k and v, one a head.
        """
        name = f"{type(self).__name__}.run"
        planned(name, self._way)
        refuse(name, kv_cache_sf=kv_cache_sf, uses_spcompress=uses_spcompress, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        k, v = unpacked(name, paged_kv_cache, self._kv_layout)
        as_planned(name, "q", q, self._q_dtype)
        as_planned(name, "paged_kv_cache", k, self._kv_dtype)
        check_heads(name, q, k.shape[2], self._heads, self._dim, (v.shape[-1], self._dim_v))
        way = self._way if window_left is None else checked(name, self._way._replace(window_left=window_left))
        scaling = scaling_of(name, q, args, Scaling(q_scale, k_scale, v_scale))
        queries, dtype = Queries(q, self._qo_indptr_buf, self._longest, self._even), compute_dtype(q.dtype, self._o_dtype)
        run = lambda **keywords: attend(queries, k, v, self._pages, way, dtype, **keywords)  # noqa: E731
        return self._finished(name, way, q, scaling, sinks, Result(self._o_dtype, return_lse, out, lse), run)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale=None,
        v_scale=None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ):
        """`run`, with what is computed given here instead of to `plan`."""
        name = f"{type(self).__name__}.forward"
        one_of(name, "pos_encoding_mode", pos_encoding_mode, POSITIONS)
        planned(name, self._way)
        self._way = checked(name, Way(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
