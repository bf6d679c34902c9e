"""Penalties, a sparse bias and a bit mask on logits: one pass over the row, and one over the few that have a bias.

    x = logits + bias;   x = x / repetition if x > 0 else x * repetition, where the token was seen;
    x = x - frequency * count - presence * (count > 0);   -inf where the mask's bit is 0

A program has a piece of a row. Bytes: logits read and written, counts (4 bytes an entry) and bits read. The entries with a bias are
computed again from the logits by a second launch, one program a row: a search of the list in each piece would cost more than it.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows

BLOCK = 2048  # 8 entries a thread: 16 bytes of bf16
WARPS = 8
FEW = 256  # biased entries a program has at a time

# ---- device


@triton.jit
def _adjusted(x, row, index, inside, vocab, repetition_ptr, presence_ptr, frequency_ptr, output_ptr, prompt_ptr, mask_ptr):
    """The formula for entries `index` of a row, x with its bias."""
    if output_ptr is not None:
        count = tl.load(output_ptr + row * vocab + index, mask=inside, other=0)
        seen = count > 0
        if prompt_ptr is not None:
            seen = seen | (tl.load(prompt_ptr + row * vocab + index, mask=inside, other=0) > 0)
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition), x)
        x -= tl.load(frequency_ptr + row) * count + tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    if mask_ptr is not None:
        word = tl.load(mask_ptr + row * ((vocab + 31) // 32) + index // 32, mask=inside, other=0)
        x = tl.where((word >> (index % 32).to(tl.int32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _adjust(
    logits_ptr, out_ptr, repetition_ptr, presence_ptr, frequency_ptr, output_ptr, prompt_ptr, mask_ptr, row_stride, vocab, pieces, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    index = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=0.0).to(tl.float32)
    x = _adjusted(x, row, index, inside, vocab, repetition_ptr, presence_ptr, frequency_ptr, output_ptr, prompt_ptr, mask_ptr)
    tl.store(out_ptr + row * vocab + index, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _adjust_biased(
    logits_ptr, out_ptr, repetition_ptr, presence_ptr, frequency_ptr, output_ptr, prompt_ptr, mask_ptr, ids_ptr, values_ptr,
    row_stride, vocab, num, FEW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, num, FEW):
        n = first + tl.arange(0, FEW)
        index = tl.load(ids_ptr + row * num + n, mask=n < num, other=-1)
        inside = (index >= 0) & (index < vocab)
        x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=0.0).to(tl.float32) + tl.load(values_ptr + row * num + n, mask=inside, other=0.0)
        x = _adjusted(x, row, index, inside, vocab, repetition_ptr, presence_ptr, frequency_ptr, output_ptr, prompt_ptr, mask_ptr)
        tl.store(out_ptr + row * vocab + index, x.to(out_ptr.dtype.element_ty), mask=inside)


# ---- host


def launch(problem: Rows, config: None, logits: torch.Tensor, rates, counts, bias, mask) -> torch.Tensor:
    """New logits [rows, vocab]; rates: repetition, presence and frequency, counts: of output and prompt, bias: ids and values, all as in `ops.sampling`."""
    rows, vocab = problem.rows, problem.width
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        given = [tensor if tensor is None else tensor.contiguous() for tensor in (*rates, *counts, mask)]
        pieces = triton.cdiv(vocab, BLOCK)
        _adjust[(rows * pieces,)](logits, out, *given, logits.stride(0), vocab, pieces, BLOCK=BLOCK, num_warps=WARPS)
        if bias[0] is not None and bias[0].shape[1]:
            ids, values = (tensor.contiguous() for tensor in bias)
            _adjust_biased[(rows,)](logits, out, *given, ids, values, logits.stride(0), vocab, ids.shape[1], FEW=FEW)
    return out
