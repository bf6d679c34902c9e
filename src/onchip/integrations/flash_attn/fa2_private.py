"""What others import from flash-attn 2 beside its public functions: the passes on their own (ring attention calls them block by block).

They have no gradients of their own. A backward pass takes the output and LSE it is given, which need not be of these keys alone.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from onchip.core.philox import draw
from onchip.integrations.flash_attn.call import Call, Lengths, gradients, run
from onchip.integrations.flash_attn.dropped import seeded, signed_weights
from onchip.integrations.flash_attn.fa2 import _call, _lse
from onchip.integrations.flash_attn.kvcache import Cache, attend
from onchip.integrations.flash_attn.kvcache_checks import check_pages


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
    """(output, LSE, S_dmask, state of the dropout int64 [2]) of dense q, k, v."""
    call = _call(q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, False)
    return _forward(call, q, k, v, None, return_softmax)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
                               window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
                               seqused_k=None, zero_tensors=False, num_splits=0):  # fmt: skip
    """The same of packed q, k, v, or of k and v in pages. `zero_tensors` has no effect: all of the output is written."""
    window, longest = (window_size_left, window_size_right), (int(max_seqlen_q), int(max_seqlen_k))
    call = _call(*longest, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    used = seqused_k
    if leftpad_k is not None:
        used = (cu_seqlens_k.diff() if used is None else used) - leftpad_k
    if block_table is None:
        offsets_k = cu_seqlens_k if leftpad_k is None else cu_seqlens_k + torch.nn.functional.pad(leftpad_k, (0, 1))
        return _forward(call, q, k, v, Lengths(cu_seqlens_q, offsets_k, longest, (None, used)), return_softmax)
    if leftpad_k is not None:
        raise ValueError("_flash_attn_varlen_forward: leftpad_k with block_table; start the table at the first page that counts")
    if num_splits > 1:  # a RuntimeError, as flash-attn's
        raise RuntimeError("_flash_attn_varlen_forward: num_splits > 1 is not supported with block_table; leave it 0")
    cache = Cache(k, v, cu_seqlens_k.diff() if used is None else used, block_table)
    check_pages("_flash_attn_varlen_forward", "block_table", cache)
    with torch.no_grad():
        out, lse = attend(call, q, cache, True, cu_seqlens_q, longest[0])
    return out, _lse(lse), q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                         alibi_slopes, deterministic, rng_state=None):  # fmt: skip
    """Gradients into `dq`, `dk`, `dv`; returns the rows' sums of output times gradient, float32 `[batch, heads, len_q]`."""
    window = window_size_left, window_size_right
    call = _call(q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    return _backward(call, dout, q, k, v, out, softmax_lse, (dq, dk, dv), None, rng_state)


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
                                zero_tensors=False):  # fmt: skip
    """The same of packed tensors; the sums are `[heads, tokens]`."""
    window, longest = (window_size_left, window_size_right), (int(max_seqlen_q), int(max_seqlen_k))
    call = _call(*longest, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    return _backward(call, dout, q, k, v, out, softmax_lse, (dq, dk, dv), Lengths(cu_seqlens_q, cu_seqlens_k, longest), rng_state)


@torch.no_grad()
def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, return_softmax: bool):
    call = seeded(call, q.device)
    out, lse = run(call, q, k, v, lengths, True)
    weights = signed_weights(call, q, k, lengths) if return_softmax and call.dropout else q.new_empty(0)
    state = draw(q.device, call.dropout.seed, 0) if call.dropout else torch.zeros(2, dtype=torch.int64, device=q.device)
    return out, _lse(lse), weights, state


@torch.no_grad()
def _backward(call: Call, dout, q, k, v, out, lse, into, lengths: Lengths | None, state: Tensor | None) -> Tensor:
    if call.dropout and state is None:
        raise ValueError("_flash_attn_backward: rng_state is None and dropout_p is not 0; give the fourth result of the forward pass")
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    found = gradients(call, dout.contiguous(), q, k, v, out, lse, lengths, state)
    for target, grad in zip(into, found, strict=False):
        if target is not None:
            target.copy_(grad)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


# ---- the extension module, by its positional arguments


def _no_generator(generator) -> None:
    if generator is not None:  # a RuntimeError, as flash-attn's
        raise RuntimeError("The `generator` argument is no longer supported; give None, and seed with torch.manual_seed")


def _into(out: Tensor | None, results: tuple):
    return results if out is None else (out.copy_(results[0]), *results[1:])


def _fwd(q, k, v, out, alibi_slopes, dropout_p, softmax_scale, causal, left, right, softcap, return_softmax, generator):
    _no_generator(generator)
    return _into(out, _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax))


def _varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p,
                softmax_scale, zero_tensors, causal, left, right, softcap, return_softmax, generator, num_splits=0):  # fmt: skip
    _no_generator(generator)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k, zero_tensors, num_splits
    return _into(out, _flash_attn_varlen_forward(q, k, v, *lengths, *rest))


def _bwd(dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal, left, right, softcap, deterministic, generator, rng_state):
    _no_generator(generator)
    into = [torch.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v))]
    rest = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic, rng_state
    return *into, _flash_attn_backward(dout, q, k, v, out, lse, *into, *rest)


def _varlen_bwd(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                zero_tensors, causal, left, right, softcap, deterministic, generator, rng_state):  # fmt: skip
    _no_generator(generator)
    into = [torch.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v))]
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic, rng_state
    return *into, _flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, *lengths, *rest)


flash_attn_gpu = SimpleNamespace(fwd=_fwd, varlen_fwd=_varlen_fwd, bwd=_bwd, varlen_bwd=_varlen_bwd)
