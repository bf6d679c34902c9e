"""`flashinfer.cascade`: merging of partial results, whose LSE is in base 2, and attention over shared prefixes by merging (cascade inference)."""

from collections.abc import Sequence

from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.integrations.flashinfer.call import LN2, LOG2E, check_shape
from onchip.integrations.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from onchip.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from onchip.integrations.flashinfer.single import single_prefill_with_kv_cache
from onchip.ops.attention import merge


def merge_state(
    v_a: Tensor,  # [tokens, heads, dim]
    s_a: Tensor,  # [tokens, heads]
    v_b: Tensor,
    s_b: Tensor,
) -> tuple[Tensor, Tensor]:
    """(output, LSE float32) over the keys of both parts."""
    return _merged([(v_a, s_a), (v_b, s_b)])


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state`, written to `v` and `s`. `mask` bool `[tokens]`: only these tokens."""
    found = _merged([(v, s), (v_other, s_other)])
    if mask is not None and (not isinstance(mask, Tensor) or mask.numel() != len(v)):
        raise ValueError(f"merge_state_in_place: mask is {kind_of(mask)}; give bool [{len(v)}], one for each token, or None")
    for to, new in zip((v, s), found, strict=True):
        to.copy_(new if mask is None else new.where(mask.bool().view(-1, *[1] * (new.ndim - 1)), to))


def merge_states(
    v: Tensor,  # [tokens, states, heads, dim]
    s: Tensor,  # [tokens, states, heads]
) -> tuple[Tensor, Tensor]:
    """(output `[tokens, heads, dim]`, LSE `[tokens, heads]`) over the keys of all states."""
    check_shape("merge_states", "v", v, "[tokens, states, heads, dim]")
    check_shape("merge_states", "s", s, "[tokens, states, heads]")
    if v.shape[:3] != s.shape or not v.shape[1]:
        raise ValueError(
            f"merge_states: v is {list(v.shape)} and s {list(s.shape)}; give [tokens, states, heads, dim] and [tokens, states, heads], of one or more"
        )
    return _merged(list(zip(v.unbind(1), s.unbind(1), strict=True)))


def _merged(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    for v, s in states:
        check_shape("merge_state", "v", v, "[tokens, heads, dim]")
        check_shape("merge_state", "s", s, "[tokens, heads]")
    out, lse = merge([(v, s.float().transpose(0, 1) * LN2) for v, s in states])
    return out, (lse * LOG2E).transpose(0, 1).contiguous()


class MultiLevelCascadeAttentionWrapper:
    """Keys in levels, the first ones shared by many queries: a wrapper for each level, and their results merged."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        arrays = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        short = [name for name, array in arrays.items() if use_cuda_graph and len(array or ()) != num_levels]
        if short:
            raise ValueError(f"MultiLevelCascadeAttentionWrapper: {', '.join(short)} with use_cuda_graph and {num_levels} levels; give one buffer a level")
        levels = list(zip(*arrays.values(), strict=True)) if use_cuda_graph else [()] * num_levels
        self._use_cuda_graph, self._kv_layout = use_cuda_graph, kv_layout
        self._levels = [BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers) for buffers in levels]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        for level, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """A plan for each level; `causal` is for the last one, whose keys are the queries' own."""
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(array) != len(self._levels) for array in arrays):
            raise ValueError(
                f"MultiLevelCascadeAttentionWrapper.plan: {[len(array) for array in arrays]} tensors for {len(self._levels)} levels; give one a level"
            )
        how = {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap, "rope_scale": rope_scale, "rope_theta": rope_theta}
        how |= {"pos_encoding_mode": pos_encoding_mode, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
        for level, *lists in zip(self._levels, *arrays, strict=True):
            level.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and level is self._levels[-1], **how)

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """`[tokens, heads, dim_v]`."""
        states = [level.run(q, paged_kv_cache, return_lse=True) for level in reversed(self._levels)]
        return _merged(states)[0]

    forward = run

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode over a prefix that all share, dense, and pages of each sequence's own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._own, self._kv_layout = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._own.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type="float16",
    ) -> None:
        lists = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._own.plan(*lists, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=data_type, kv_data_type=data_type)

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """`[batch, heads, dim]`."""
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True)
        return _merged([shared, self._own.run(q, unique_kv_cache, return_lse=True)])[0]

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Packed queries over a prefix that all share, dense, and pages of each sequence's own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._own, self._kv_layout = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout), kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._own.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        self._own.plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """`[tokens, heads, dim]`; `causal` is for the sequences' own keys."""
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True)
        own = self._own.forward(q, unique_kv_cache, causal, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, return_lse=True)
        return _merged([shared, own])[0]

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""
