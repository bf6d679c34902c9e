"""`flashinfer.attention`: `BatchAttention`, and the wrapper with attention sinks."""

import torch
from torch import Tensor

from onchip.core.arguments import check_numbers
from onchip.integrations.flashinfer.call import checked, one_of, refuse
from onchip.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchAttention:
    """Prefills and decodes over pages in one call."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda"):
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=torch.device(device)), kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        refuse("BatchAttention.plan", use_profiler=use_profiler)
        how = {"causal": causal, "sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo)
        self._wrapper.plan(qo_indptr, kv_indptr, kv_indices, None, *sizes, seq_lens=kv_len_arr, **how)
        self._cap = logits_soft_cap or 0.0

    def run(
        self,
        q: Tensor,
        kv_cache: Tensor | tuple[Tensor, Tensor],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale=None,
        v_scale=None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf=None,
    ) -> tuple[Tensor, Tensor]:
        """(output `[tokens, heads, dim_v]`, LSE `[tokens, heads]` in base 2). The softcap is that of `plan`; given again, it must be the same."""
        refuse("BatchAttention.run", profiler_buffer=profiler_buffer)
        check_numbers("BatchAttention.run", logits_soft_cap=logits_soft_cap)
        if logits_soft_cap > 0 and logits_soft_cap != self._cap:
            raise ValueError(f"BatchAttention.run: logits_soft_cap {logits_soft_cap}, plan() was told {self._cap}; give both the same")
        return self._wrapper.run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=True, kv_cache_sf=kv_cache_sf)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose `run` takes a logit a head that joins each row's sum, and the scale, by position.

    What FlashInfer compiles its kernel for (dtypes, dimensions, `window_left`) changes nothing: `plan` says it again.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        one_of(type(self).__name__, "pos_encoding_mode", pos_encoding_mode, ("NONE",))  # plan() takes the others
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, backend)

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], sinks: Tensor | None = None, sm_scale: float | None = None, **keywords):
        """As the parent's `run`; `sm_scale` None is that of `plan`."""
        planned = self._way
        try:
            if sm_scale is not None and planned is not None:
                self._way = checked(f"{type(self).__name__}.run", planned._replace(sm_scale=sm_scale))
            return super().run(q, paged_kv_cache, sinks=sinks, **keywords)
        finally:
            self._way = planned
