"""`BatchPrefillWithRaggedKVCacheWrapper`: queries and keys of many sequences, both laid end to end."""

import functools

import torch
from torch import Tensor

from onchip.core.kernel import Unsupported
from onchip.integrations.flash_attn.rotary import sequence_of
from onchip.integrations.flashinfer.call import (
    POSITIONS,
    Result,
    Scaling,
    Way,
    as_planned,
    check_heads,
    checked,
    compute_dtype,
    fixed_batch,
    keep,
    on_host,
    one_of,
    planned,
    refuse,
    scaling_of,
    turned,
    widened,
)
from onchip.integrations.flashinfer.prefill import Prefill
from onchip.ops.attention import attention_packed


class BatchPrefillWithRaggedKVCacheWrapper(Prefill):
    """Packed queries over packed keys: `plan` reads the lengths, `run` computes, as often as wanted.

    With `use_cuda_graph` offsets stay at their addresses: `run` may be captured, and after another `plan` of no more queries and keys replayed.
    `backend` changes nothing.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args=None,
        jit_kwargs=None,
    ) -> None:
        self._start(float_workspace_buffer, kv_layout, backend, (custom_mask_buf, mask_indptr_buf), jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._use_cuda_graph = use_cuda_graph
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        self._fixed_batch_size = fixed_batch(type(self).__name__, use_cuda_graph, buffers, qo_indptr_buf)
        self._qo_indptr_buf, self._kv_indptr_buf = buffers.values()

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """The lengths of the batch, and its masks; see `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Backend "cudnn" gives offsets in elements, tokens times heads times dimension, and may give `v_indptr` and `o_indptr`, which are not read: values
        lie as keys do, outputs as queries.
        """
        name = f"{type(self).__name__}.plan"
        self._way = None  # what a plan that fails leaves behind is none
        one_of(name, "pos_encoding_mode", pos_encoding_mode, POSITIONS)
        if (v_indptr is not None or o_indptr is not None) and self._backend != "cudnn":
            raise Unsupported(f"{name}: v_indptr or o_indptr beside backend {self._backend!r}; values lie as keys do and outputs as queries, so leave them out")
        units = (1, 1)
        if self._backend == "cudnn" and max_token_per_sequence is not None:
            units = (num_qo_heads * head_dim_qk, num_kv_heads * head_dim_qk)
        host = self._queries(name, qo_indptr, units[0])
        keys = on_host(name, "kv_indptr", kv_indptr) // units[1]
        if len(keys) != len(host) or (keys.diff() < 0).any():
            raise ValueError(f"{name}: kv_indptr is {keys.tolist()} beside {len(host) - 1} sequences of queries; give [{len(host)}], never falling")
        if self._use_cuda_graph:
            keep(self._kv_indptr_buf, keys)
        else:
            self._kv_indptr_buf = keys.to(self.device, non_blocking=True)
        self._most_keys, self._keys = int(keys.diff().max()), int(keys[-1])
        self._masks(custom_mask, packed_custom_mask, host.diff(), keys.diff())
        self._items(name, (prefix_len_ptr, token_pos_in_items_ptr), token_pos_in_items_len, keys.diff())
        self._dtypes(q_data_type, kv_data_type, o_data_type)
        self._heads, self._dim, self._dim_v = (num_qo_heads, num_kv_heads), head_dim_qk, head_dim_vo or head_dim_qk
        self._done(checked(name, Way(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)))

    begin_forward = plan

    def run(
        self,
        q: Tensor,  # [tokens, heads, dim]
        k: Tensor,  # [tokens_k, kv_heads, dim], or [kv_heads, tokens_k, dim] for HND
        v: Tensor,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf=None,
    ):
        """`[tokens, heads, dim_v]`, in bfloat16 where the planned output is in 8 bits; with `return_lse` also LSE `[tokens, heads]` in base 2.

        With queries in float8 three more arguments by position are the scales of q, k and v, one a head. Does not wait for the device.
        """
        name = f"{type(self).__name__}.run"
        planned(name, self._way)
        refuse(name, kv_cache_sf=kv_cache_sf)
        if o_scale is not None and o_scale != 1:
            raise Unsupported(f"{name}: o_scale {o_scale} is not supported: outputs are in 16 bits; scale them after")
        as_planned(name, "q", q, self._q_dtype)
        as_planned(name, "k", k, self._kv_dtype)
        wide = self._o_dtype if self._o_dtype.itemsize > 1 else torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        dtype = compute_dtype(q.dtype, wide)
        scaling = scaling_of(name, q, args, Scaling(q_scale, k_scale, v_scale))
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        check_heads(name, q, k.shape[1], self._heads, self._dim, (v.shape[-1], self._dim_v))
        if min(len(k), len(v)) < self._keys:
            raise ValueError(f"{name}: k has {len(k)} tokens and v {len(v)}, and kv_indptr ends at {self._keys}; give as many as were planned")
        wide_q, k, v = (widened(t, dtype) for t in (q, k, v))
        if self._way.rotates:
            sequence, index = sequence_of(self._qo_indptr_buf, len(q))
            first = self._kv_indptr_buf.diff() - self._qo_indptr_buf.diff()
            wide_q = turned(wide_q, first[sequence] + index, self._way)
            k = turned(k, sequence_of(self._kv_indptr_buf, len(k))[1], self._way)
        longest = self._longest, len(k) if self._use_cuda_graph else self._most_keys
        run = lambda **keywords: attention_packed(wide_q, k, v, self._qo_indptr_buf, self._kv_indptr_buf, longest=longest, **keywords)  # noqa: E731
        return self._finished(name, self._way, q, scaling, None, Result(wide, return_lse, out, lse), run)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
