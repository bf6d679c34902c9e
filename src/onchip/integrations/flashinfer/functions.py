"""FlashInfer's functions on onchip's kernels, all of them in one place, as in `import flashinfer`."""

from onchip.integrations.flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from onchip.integrations.flashinfer.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from onchip.integrations.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from onchip.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from onchip.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper
from onchip.integrations.flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from onchip.integrations.flashinfer.page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from onchip.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from onchip.integrations.flashinfer.quantization import packbits, segment_packbits
from onchip.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from onchip.integrations.flashinfer.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from onchip.integrations.flashinfer.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper", "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache", "append_paged_mla_kv_cache", "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids", "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace", "fast_decode_plan", "fused_add_rmsnorm", "gelu_and_mul", "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_state_in_place", "merge_states",
    "packbits", "rmsnorm", "segment_packbits", "silu_and_mul", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]  # fmt: skip
