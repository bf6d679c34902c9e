"""Verification of drafts: which tokens of a chain or a tree the target model accepts, and the token after them.

Without probabilities the target has drawn a token at each place (`sample`); the walk goes from the root to the child that holds the token drawn there,
until there is none: any tree is verified exactly, and a chain is a tree. Bytes: the draft's tokens and parents.

With a chain's probabilities q (Leviathan et al., 2023) token i is accepted where u q < p, p = exp((x - largest) / temperature) / mass of the entries
that `sample` keeps, and the first that is not accepted is replaced by argmax log max(p - q, 0) + gumbel. A row's programs each find out what is accepted and
look through a piece of that row; the last one is told what the others found (`meeting.py`). Bytes: at most one row of logits and one of q.
"""

import torch
import triton
import triton.language as tl

from onchip.core.problem import Rows
from onchip.kernels.fused.vocabulary import entries, gumbel, uniform, within
from onchip.kernels.meeting import MOST, hear, phases, tell

BLOCK = 4096
WARPS = 8

# ---- device


@triton.jit
def _walk(tokens_ptr, parents_ptr, drawn_ptr, count_ptr, path_ptr, token_ptr, num, parents_stride, NUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, NUM)
    inside = place < num
    tokens = tl.load(tokens_ptr + row * num + place, mask=inside, other=-1)
    parents = place - 1
    if parents_ptr is not None:
        parents = tl.load(parents_ptr + row * parents_stride + place, mask=inside, other=-2)
    drawn_ptr += row * (num + 1)
    at, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    tl.store(path_ptr + row * num + place, tl.full([NUM], -1, tl.int64), mask=inside)
    tl.debug_barrier()  # the path is written over by one thread
    going = num > 0
    while going:
        wanted = tl.load(drawn_ptr + at)
        found = tl.min(tl.where(inside & (parents == at - 1) & (tokens == wanted), place, NUM))
        going = (found < NUM) & (count < num)
        if going:
            tl.store(path_ptr + row * num + count, found.to(tl.int64))
            at, count = found + 1, count + 1
    tl.store(count_ptr + row, count.to(tl.int64))
    tl.store(token_ptr + row, tl.load(drawn_ptr + at))


@triton.jit
def _probability(x, temperature, limits_ptr, inside):
    """The target's probabilities of logits x, under limits for each or for all."""
    floor, middle = tl.load(limits_ptr, mask=inside, other=0.0), tl.load(limits_ptr + 1, mask=inside, other=0.0)
    reach, largest = tl.load(limits_ptr + 2, mask=inside, other=0.0), tl.load(limits_ptr + 3, mask=inside, other=0.0)
    mass = tl.load(limits_ptr + 4, mask=inside, other=1.0)
    distance = tl.where(x == middle, 0.0, tl.abs(x - middle))
    p = tl.div_rn(tl.exp(tl.div_rn(x - largest, temperature + tl.zeros_like(x))), mass + tl.zeros_like(x))
    return tl.where((x >= floor) & (distance <= reach), p, 0.0)


@triton.jit
def _verify_chain(
    logits_ptr, tokens_ptr, q_ptr, drawn_ptr, limits_ptr, words_ptr, count_ptr, path_ptr, token_ptr, temperature_ptr, seed_ptr, step_ptr,
    row_stride, place_stride, num, vocab, pieces, NUM: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    place = tl.arange(0, NUM)
    inside = place < num
    tokens = tl.load(tokens_ptr + row * num + place, mask=inside, other=-1)
    real = (tokens >= 0) & (tokens < vocab)
    drawn = tl.load(drawn_ptr + row * (num + 1) + place, mask=inside, other=-1)
    temperature, seed, step = tl.load(temperature_ptr + row), tl.load(seed_ptr + row), tl.load(step_ptr + row)
    hot, temperature = temperature > 0, within(temperature)
    taken = tokens == drawn
    if hot:
        x = tl.load(logits_ptr + row * row_stride + place.to(tl.int64) * place_stride + tokens, mask=real, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        limit_ptr = limits_ptr + (row * (num + 1) + place) * 5
        q = tl.load(q_ptr + (row * num + place) * vocab + tokens, mask=real, other=0.0)
        p = _probability(x, temperature, limit_ptr, inside)
        at = step + place
        word, _, _, _ = tl.philox(seed, tl.zeros([NUM], tl.int32), at.to(tl.int32), (at >> 32).to(tl.int32), 1)
        taken = uniform(word) * tl.where(q > 0, q, 0.0) < p
    taken = taken & real
    count = tl.min(tl.where(taken, num, place))
    token = tl.load(drawn_ptr + row * (num + 1) + count)
    if hot & (count < num):
        row_ptr = logits_ptr + row * row_stride + count.to(tl.int64) * place_stride
        limit_ptr = limits_ptr + (row * (num + 1) + count) * 5
        q_row = q_ptr + (row * num + count) * vocab
        given = tl.load(tokens_ptr + row * num + count) >= 0  # else the draft ends here, and q means nothing
        span = tl.cdiv(tl.cdiv(vocab, BLOCK), pieces) * BLOCK
        best, index = _rest(row_ptr, q_row, limit_ptr, given, temperature, seed, step + count, piece * span, (piece + 1) * span, vocab, BLOCK)
        tell(words_ptr + row * pieces + piece, best, (index + 1).to(tl.float32))  # exact below 2^24
        if piece == pieces - 1:
            bests, indices = hear(words_ptr + row * pieces, pieces, PIECES, PHASE)
            bests = tl.where(tl.arange(0, PIECES) < pieces, bests, float("-inf"))
            best = tl.max(bests)
            index = tl.min(tl.where(bests == best, indices, 1e9)).to(tl.int32) - 1
            if best == float("-inf"):  # q is nowhere below p
                best, index = _rest(row_ptr, q_row, limit_ptr, False, temperature, seed, step + count, 0, vocab, vocab, BLOCK)
                if best == float("-inf"):  # p is nothing: of an infinite logit
                    index = token.to(tl.int32)
            token = index.to(tl.int64)
    if piece == pieces - 1:
        tl.store(count_ptr + row, count.to(tl.int64))
        tl.store(path_ptr + row * num + place, tl.where(place < count, place, -1).to(tl.int64), mask=inside)
        tl.store(token_ptr + row, token)


@triton.jit
def _rest(row_ptr, q_ptr, limits_ptr, given, temperature, seed, step, begin, end, vocab, BLOCK: tl.constexpr):
    """The largest log max(p - q, 0) + noise among the entries from `begin` to `end`, and its first index; q counts where `given`."""
    best, token = tl.full([1, BLOCK], float("-inf"), tl.float32), tl.zeros([1, BLOCK], tl.int32)
    for first in range(begin, tl.minimum(end, vocab), BLOCK):
        index = first + tl.arange(0, BLOCK)[None, :]
        p = _probability(entries(row_ptr, index, vocab), temperature, limits_ptr, True)
        q = tl.load(q_ptr + index, mask=(index < vocab) & given, other=0.0)
        rest = tl.maximum(p - tl.where(q > 0, q, 0.0), 0.0)
        score = tl.where((rest > 0) & (index < vocab), tl.log(rest), float("-inf"))
        if tl.max(score) + 17.0 > tl.max(best):  # more than any noise
            score += gumbel(seed, step, first // 4 + tl.arange(0, BLOCK // 4)[None, :], 2)
        better = score > best
        best, token = tl.where(better, score, best), tl.where(better, index, token)
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, token, vocab))


# ---- host


def launch(problem: Rows, config: None, logits: torch.Tensor, draft, how, drawn: torch.Tensor, limits: torch.Tensor | None):
    """Count [rows], path [rows, n] and token [rows], int64; logits [rows, n + 1, vocab], drawn [rows, n + 1], limits [rows (n + 1), 5] or None."""
    tokens, q, parents = draft
    rows, num = tokens.shape
    count, token = (torch.empty(rows, dtype=torch.int64, device=tokens.device) for _ in range(2))
    path = torch.empty(rows, num, dtype=torch.int64, device=tokens.device)
    if rows and q is None:
        parents = parents if parents is None else parents.expand(rows, num).contiguous()
        size = max(32, triton.next_power_of_2(num))
        _walk[(rows,)](tokens.contiguous(), parents, drawn, count, path, token, num, num, NUM=size, num_warps=max(1, min(4, size // 32)))
    elif rows:
        logits = logits if logits.stride(2) == 1 else logits.contiguous()
        fields = (field.contiguous() for field in (how.temperature, how.seed, how.step))
        pieces = min(MOST.value, triton.cdiv(problem.width, BLOCK))
        words = torch.zeros(rows * pieces, dtype=torch.int64, device=tokens.device)
        _verify_chain[(rows * pieces,)](
            logits,
            tokens.contiguous(),
            q.contiguous(),
            drawn,
            limits,
            words,
            count,
            path,
            token,
            *fields,
            logits.stride(0),
            logits.stride(1),
            num,
            problem.width,
            pieces,
            NUM=triton.next_power_of_2(num),
            PIECES=triton.next_power_of_2(pieces),
            BLOCK=BLOCK,
            PHASE=phases(logits)[-1],
            num_warps=WARPS,
        )
    return count, path, token
