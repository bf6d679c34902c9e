"""`flashinfer.decode`: one query a sequence, or a few, over pages."""

import functools
import warnings

import torch
from torch import Tensor

from onchip.core.arguments import check_count
from onchip.integrations.flashinfer.call import (
    BACKENDS,
    LAYOUTS,
    POSITIONS,
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
    one_of,
    planned,
    refuse,
    scaling_of,
)
from onchip.integrations.flashinfer.pages import Queries, Table, attend, lists_of, unpacked


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode attention over pages: `plan` builds the page table, `run` computes with it, as often as wanted.

    `float_workspace_buffer` says which device; onchip's kernels keep their own memory. With `use_cuda_graph` the table and the lengths stay at
    their addresses: `run` may be captured, and after another `plan` replayed. `use_tensor_cores` and `backend` change nothing.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args=None,
    ) -> None:
        name = type(self).__name__
        one_of(name, "kv_layout", kv_layout, LAYOUTS)
        one_of(name, "backend", backend, BACKENDS)
        refuse(name, jit_args=jit_args)
        self._kv_layout, self._use_cuda_graph, self._use_tensor_cores, self._backend = kv_layout, use_cuda_graph, use_tensor_cores, backend
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        self._fixed_batch_size = fixed_batch(name, use_cuda_graph, buffers, paged_kv_indptr_buffer, paged_kv_last_page_len_buffer)
        fixed = (self._fixed_batch_size, len(paged_kv_indices_buffer)) if use_cuda_graph else None
        self._table = Table(self.device, fixed)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = buffers.values()
        self._way = None

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *args, **kwargs) -> tuple[int, int]:
        """Bytes that `plan` needs of the two workspace buffers: none."""
        return 0, 0

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
    ) -> None:
        """The page table of the batch. `q_len_per_req` queries of each sequence are its last tokens. `block_tables`, `fixed_split_size`,
        `disable_split_kv` and `non_blocking` change nothing.
        """
        name = f"{type(self).__name__}.plan"
        self._way = None  # what a plan that fails leaves behind is none
        one_of(name, "pos_encoding_mode", pos_encoding_mode, POSITIONS)
        if window_right != 0:
            raise ValueError(f"{name}: window_right {window_right} is not supported; a decoded token sees none after itself, so leave it 0")
        check_count(name, 1, q_len_per_req=q_len_per_req)
        lists = lists_of(name, indptr, last_page_len, page_size, seq_lens)
        if q_len_per_req > 1 and len(lists.lengths) and int(lists.lengths.min()) < q_len_per_req:
            raise ValueError(f"{name}: q_len_per_req={q_len_per_req} requires kv_len >= q_len_per_req, and a sequence has {int(lists.lengths.min())} keys")
        if self._use_cuda_graph:
            keep(self._paged_kv_indptr_buf, indptr), keep(self._paged_kv_indices_buf, indices, "indices")
            keep(self._paged_kv_last_page_len_buf, last_page_len)
        self._pages = self._table.fill(name, lists, indices, page_size)
        self._heads, self._dim, self._q_len_per_req = (num_qo_heads, num_kv_heads), head_dim, q_len_per_req
        self._q_dtype = dtype_of(data_type if q_data_type is None else q_data_type)
        self._kv_dtype = dtype_of(data_type if kv_data_type is None else kv_data_type, self._q_dtype)
        self._o_dtype = dtype_of(o_data_type, self._q_dtype)
        self._least = int(lists.lengths.min()) if len(lists.lengths) else q_len_per_req
        self._way = checked(name, Way(True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta))

    begin_forward = plan

    def run(
        self,
        q: Tensor,  # [batch * q_len_per_req, heads, dim]
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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf=None,
    ):
        """`[tokens, heads, dim_v]`; with `return_lse` also LSE `[tokens, heads]` in base 2. Does not wait for the device."""
        name = f"{type(self).__name__}.run"
        planned(name, self._way)
        refuse(name, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf)
        k, v = unpacked(name, paged_kv_cache, self._kv_layout)
        as_planned(name, "q", q, self._q_dtype)
        as_planned(name, "paged_kv_cache", k, self._kv_dtype)
        check_heads(name, q, k.shape[2], self._heads, self._dim)
        batch = len(self._pages.lengths)
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req in run() is deprecated; give it to plan()", DeprecationWarning, stacklevel=2)
        each = q_len_per_req or self._q_len_per_req
        if each > max(1, self._least):
            raise ValueError(f"{name}: q_len_per_req={each} requires kv_len >= q_len_per_req, and a sequence has {self._least} keys")
        if len(q) != batch * each:
            raise ValueError(f"{name}: q has {len(q)} tokens for {batch} sequences of q_len_per_req={each}; give [{batch * each}, heads, dim]")
        way = self._way if window_left is None else checked(name, self._way._replace(window_left=window_left))
        call = call_of(way, self._mask(way, each), self._heads, self._dim, q.device, scaling_of(name, q, args, Scaling(q_scale, k_scale, v_scale)), sinks)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * each  # made here: a graph holds what it reads
        queries = Queries(q, offsets, each, each)
        want = Result(self._o_dtype, return_lse, out, lse)
        dtype = compute_dtype(q.dtype, self._o_dtype)
        return finished(call, want, lambda **keywords: attend(queries, k, v, self._pages, way, dtype, **keywords))

    def _mask(self, way: Way, len_q: int):
        return mask_of(way, None, (None, None) if self._use_cuda_graph else (len_q, self._pages.most))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale=None,
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
        self._way = checked(name, Way(True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper whose buffers are fixed from the start."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """The class's `plan` (callers put this function in its place), with the page lists' bounds from the host where they are given."""
    how = {"sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta, "q_len_per_req": q_len_per_req}
    dtypes = {"q_data_type": q_data_type or data_type or "float16", "kv_data_type": kv_data_type or data_type}
    indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    lists = (indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
    type(self).plan(self, *lists, pos_encoding_mode, window_left, logits_soft_cap, **dtypes, **how)
