"""What others import from FlashAttention-4's `flash_attn.cute.interface` beside its public functions: the passes on their own."""

import torch
from torch import Tensor

from onchip.core.kernel import Unsupported
from onchip.integrations.flash_attn import fa4
from onchip.integrations.flash_attn.call import Lengths, gradients


def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                    min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
                    window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384,
                    num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
                    lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
                    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False):  # fmt: skip
    """(output, LSE, None, None); LSE where it was asked for, or where a gradient may need it. No gradients."""
    if any(d is not None for d in (q_descale, k_descale, v_descale)):
        raise Unsupported("_flash_attn_fwd: q_descale, k_descale or v_descale; float8 is in flash_attn_interface (FlashAttention-3), with the same arguments")
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, learnable_sink))
    common = {"qv": qv, "softmax_scale": softmax_scale, "causal": causal, "window_size": (window_size_left, window_size_right), "softcap": softcap or 0.0,
              "learnable_sink": learnable_sink, "score_mod": score_mod, "mask_mod": mask_mod, "block_sparse_tensors": block_sparse_tensors,
              "aux_tensors": aux_tensors, "aux_scalars": aux_scalars, "gather_kv_indices": gather_kv_indices,
              "return_lse": return_lse or grads or lse is not None}  # fmt: skip
    with torch.no_grad():
        if all(t is None for t in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)):
            found = fa4.flash_attn_func(q, k, v, **common)
        else:
            lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
                       "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "page_table": page_table}  # fmt: skip
            found = fa4.flash_attn_varlen_func(q, k, v, **lengths, **common)
    results = (given if given is None or target is None else target.copy_(given) for given, target in zip(found, (out, lse), strict=True))
    return *results, None, None


@torch.no_grad()
def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None, *_tiles,
                    cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
                    dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None,
                    block_sparse_tensors=None, dlse=None, learnable_sink=None, **_also_tiles) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), or with a sink (dq, dk, dv, dsink), in the tensors given or new ones."""
    fa4._refuse("_flash_attn_bwd", score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
                block_sparse_tensors=block_sparse_tensors)  # fmt: skip
    lengths, longest = None, (q.shape[-3], k.shape[-3])
    if any(t is not None for t in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise Unsupported("_flash_attn_bwd: seqused_q or seqused_k of dense tensors; call flash_attn_varlen_func and differentiate it")
        given = ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k))
        longest = tuple(int(offsets.diff().max() if most is None else most) for offsets, most in given)
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, longest, (seqused_q, seqused_k))
    window = window_size_left, window_size_right
    call = fa4._call(*longest, softmax_scale, causal, window, learnable_sink, softcap or 0.0, deterministic)
    found = gradients(call, dout.contiguous(), q, k, v, out, lse, lengths, None, dlse)
    written = [grad if target is None else target.copy_(grad) for grad, target in zip(found, (dq, dk, dv, None), strict=True)]
    return tuple(written if learnable_sink is not None else written[:3])


def _flash_attn_fwd_combine(out_partial, lse_partial, out, lse=None, cu_seqlens=None, seqused=None, num_splits_dynamic_ptr=None, virtual_batch_idx=None,
                            semaphore_to_reset=None, *, _arch=None) -> None:  # fmt: skip
    """`flash_attn_combine` into `out` and `lse`."""
    if num_splits_dynamic_ptr is not None or semaphore_to_reset is not None:
        raise Unsupported("_flash_attn_fwd_combine: num_splits_dynamic_ptr or semaphore_to_reset; fill the parts that do not count with LSE -inf")
    _, found = fa4.flash_attn_combine(out_partial, lse_partial, out)
    if lse is not None:
        lse.copy_(found)


def _flash_attn_bwd_sparse_mla(*_, **__):
    """Refused."""
    raise Unsupported("_flash_attn_bwd_sparse_mla: gather_kv_indices is not in onchip; give the keys that each query sees as a mask to onchip.attention")


_flash_attn_fwd.compile_cache = {}  # callers clear it when memory runs out
_flash_attn_bwd.compile_cache = {}
_flash_attn_fwd_combine.compile_cache = {}
