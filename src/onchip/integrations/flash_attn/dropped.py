"""What flash-attn 2 calls S_dmask: the weights of a call with dropout, the dropped ones negative. For tests; O(len_q len_k) memory."""

import torch
from torch import Tensor

from onchip.core.philox import draw, kept
from onchip.core.problem import spans
from onchip.integrations.flash_attn.call import Call, Lengths
from onchip.kernels.attention.reference import place

MULTIPLE = 128  # lengths are rounded up to it


def seeded(call: Call, device: torch.device) -> Call:
    """The call with a seed that `signed_weights` can draw from again.

    Drawn on the CPU, so that nothing waits for the device; a graph cannot hold the number, so there it is a tensor of the device's own generator.
    """
    if call.dropout is None:
        return call
    in_graph = torch.compiler.is_compiling()
    seed = torch.randint(1 << 62, (), device=device if in_graph else "cpu")
    return call._replace(dropout=call.dropout._replace(seed=seed if in_graph else int(seed)))


def signed_weights(call: Call, q: Tensor, k: Tensor, lengths: Lengths | None) -> Tensor:
    """`exp(score - the row's largest score)`, negated where dropped, 0 where hidden: `[batch, heads, len_q, len_k]` of q's dtype, lengths rounded up to 128.

    flash-attn's own are relative to the largest score of the keys from the right up to each block of `_get_block_size_n` keys; with
    one block, as ours, the two are the same. A dropped weight that would round to 0 is the smallest negative number.
    """
    if lengths is None:
        sequences = list(zip(q, k, strict=True))
        longest = q.shape[1], k.shape[1]
    else:
        both = zip(spans(lengths.q, lengths.used[0], len(q)), spans(lengths.k, lengths.used[1], len(k)), strict=True)
        sequences = [(q[rows], k[keys]) for rows, keys in both]
        longest = lengths.longest
    rows, cols = (-(-n // MULTIPLE) * MULTIPLE for n in longest)
    out = q.new_zeros(len(sequences), q.shape[-2], rows, cols)
    state = draw(q.device, call.dropout.seed, call.dropout.offset)
    for b, (one_q, one_k) in enumerate(sequences):
        out[b, :, : len(one_q), : len(one_k)] = _one(call, b, one_q, one_k, state).to(q.dtype)
    return out


@torch.no_grad()
def _one(call: Call, b: int, q: Tensor, k: Tensor, state: Tensor) -> Tensor:
    (len_q, heads, dim), len_k = q.shape, len(k)
    at = place(b, heads, len_q, len_k, q.device)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(heads // k.shape[1], 1)) * (dim**-0.5 if call.scale is None else call.scale)
    for score in call.score:
        scores = score.apply(scores[None], at)[0]
    scores = scores.masked_fill(~call.mask.sees(at)[0], -torch.inf)
    top = scores.amax(-1, keepdim=True) if len_k else scores
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    stays = kept(call.dropout.p, state, at.b, at.h, at.i, at.j, heads)[0]
    least = torch.finfo(q.dtype).smallest_normal
    return torch.where(stays | (scores == -torch.inf), weights, -weights.clamp(min=least))
