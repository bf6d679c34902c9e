"""FlashAttention-3's passes on their own, and its operators `torch.ops.flash_attn_3`, which exported programs call."""

import inspect

import torch
from torch import Tensor

from onchip.core.kernel import Unsupported
from onchip.integrations.flash_attn import fa3
from onchip.integrations.flash_attn.call import Lengths, gradients

NAMESPACE = "flash_attn_3"
SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, "
    "Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, "
    "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> Tensor",
}


@torch.no_grad()
def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
                        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,
                        rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                        causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):  # fmt: skip
    """(output, LSE, and twice an empty tensor) of dense or packed q, k, v, or over a cache."""
    window = window_size_left, window_size_right
    tail = {"softmax_scale": softmax_scale, "causal": causal, "qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
            "window_size": window, "attention_chunk": attention_chunk, "softcap": softcap, "sm_margin": sm_margin}  # fmt: skip
    cached = any(t is not None for t in (k_new, page_table, kv_batch_idx, leftpad_k)) or (seqused_k is not None and cu_seqlens_k is None)
    if cached:
        if seqused_q is not None or cu_seqlens_k is not None:
            raise Unsupported("_flash_attn_forward: seqused_q or cu_seqlens_k over a cache; give cu_seqlens_q and seqused_k")
        result = fa3.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary, rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **tail,
        )  # fmt: skip
    elif cu_seqlens_q is None and cu_seqlens_k is None and seqused_q is None:
        result = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **tail)
    elif cu_seqlens_q is None or cu_seqlens_k is None:
        raise Unsupported("_flash_attn_forward: of cu_seqlens_q and cu_seqlens_k one is None; pack both queries and keys, or neither")
    else:
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        result = fa3.flash_attn_varlen_func(q, k, v, *lengths, return_attn_probs=True, **tail)
    out, lse = result[:2]
    empty = torch.empty(0, dtype=torch.float32, device=q.device)
    return out if out_ is None else out_.copy_(out), lse, empty, empty.clone()


@torch.no_grad()
def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
                         max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
                         window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0) -> Tensor:  # fmt: skip
    """Gradients into `dq`, `dk`, `dv`; returns the rows' sums of output times gradient, float32 as LSE."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise Unsupported("_flash_attn_backward: of cu_seqlens_q and cu_seqlens_k one is None; pack both queries and keys, or neither")
    longest = (q.shape[1], k.shape[1]) if cu_seqlens_q is None else (int(max_seqlen_q), int(max_seqlen_k))
    lengths = None if cu_seqlens_q is None else Lengths(cu_seqlens_q, cu_seqlens_k, longest, (sequed_q, sequed_k))
    call = fa3._call(*longest, softmax_scale, is_causal, (window_size_left, window_size_right), 0, softcap, deterministic)
    with fa3.leaving(sm_margin):
        found = gradients(call, dout.contiguous(), q, k, v, out, softmax_lse, lengths, None)
    for target, grad in zip((dq, dk, dv), found, strict=False):
        if target is not None:
            target.copy_(grad)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


# ---- operators


def register() -> torch.library.Library | None:
    """`torch.ops.flash_attn_3`, for as long as the Library lives; None where an installed FlashAttention-3 has them already."""
    if hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    functions = {"fwd": _fwd, "bwd": _bwd, "fwd_combine": fa3.flash_attn_combine, "get_scheduler_metadata": _metadata}
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, functions[name], "CompositeExplicitAutograd")
    return library


def _fwd(*args):
    """The operator rotates halves by default, the function interleaved pairs; and torch passes no trailing defaults."""
    at = list(inspect.signature(_flash_attn_forward).parameters).index("rotary_interleaved")
    return _flash_attn_forward(*args, **({} if len(args) > at else {"rotary_interleaved": False}))


def _bwd(dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
         max_seqlen_q=None, max_seqlen_k=None, *rest):  # fmt: skip
    into = [torch.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v))]
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    sums = _flash_attn_backward(dout, q, k, v, out, softmax_lse, *lengths, *into, *rest)
    return *into, sums, *(torch.empty(0, dtype=torch.float32, device=q.device) for _ in range(4))


def _metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k, *_, **__) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=seqused_k.device)
