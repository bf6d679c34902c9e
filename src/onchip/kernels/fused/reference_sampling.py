"""Sampling and its kin in plain torch: the oracle in float64, and what a CPU runs."""

import numpy as np
import torch
from torch import Tensor

from onchip.core.arguments import COLD, HOT
from onchip.core.problem import Rows

LOW = 0xFFFFFFFF  # the low 32 bits of an int64
GROUP = 64  # entries of a row whose maximum is taken first


def _exact(x: Tensor) -> Tensor:
    """x in float32, or in float64 when that was given, with -inf for NaN; in one pass, for `isnan` and `masked_fill` take 11 times as long on a CPU."""
    x = x if x.dtype == torch.float64 else x.float()
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def _argmax(x: Tensor) -> Tensor:
    """`x.argmax(-1)` of [rows, vocab]: of the first group with the largest maximum, since torch finds maxima 5 times as fast as places on a CPU."""
    if x.shape[1] % GROUP:
        return x.argmax(-1)
    groups = x.unflatten(1, (-1, GROUP))
    first = groups.amax(-1).argmax(-1, keepdim=True)  # [rows, 1]
    return groups.take_along_dim(first[..., None], 1).squeeze(1).argmax(-1) + first[:, 0] * GROUP


def _greatest(logits: Tensor) -> Tensor:
    """Where each row is greatest. To torch NaN is more than all else, so of a row that has some it finds one: then, and only then, they are made -inf
    (under torch.func, which lets nobody look, at once)."""
    if torch._C._are_functorch_transforms_active():
        return _argmax(_exact(logits))
    found = _argmax(logits)
    return _argmax(_exact(logits)) if logits.take_along_dim(found[:, None], 1).isnan().any() else found


def sample(problem: Rows, config: None, logits: Tensor, how):
    """Token ids, int64 [rows]; logits [rows, vocab], how: Sampling.

    Of the variant "limits" also what is kept, [rows, 5]: entry i is kept if `x[i] >= floor` and `|x[i] - middle| <= reach`, and has then the
    probability `exp((x[i] - largest) / temperature) / mass`. The five of a row with temperature 0 mean nothing.
    Settings may be fewer than rows: each is then that of as many rows, one after the other, and a step that of the first, which the next count on from.
    """
    how = _for_each_row(how, len(logits))
    limited, hot = problem.variant == "limits", (how.temperature > 0).unsqueeze(1)
    if not limited and not _may_be(hot):
        return _greatest(logits)
    x = _exact(logits)
    temperature = torch.where(hot, how.temperature.unsqueeze(1), 1.0).to(x.dtype).clamp(COLD, HOT)
    largest = x.amax(-1, keepdim=True)
    score = (x - _finite(largest)) * (1 / temperature) + gumbel(how.seed, how.step, problem.width, x.dtype)
    typical = torch.ones_like(how.top_p) if how.typical is None else how.typical
    floor = middle = reach = kept = None
    if limited or _may_be((how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0) | (typical < 1)):
        floor = smallest_kept(x, temperature, how)
        kept = x >= floor
        if limited or _may_be(typical < 1):
            middle, reach = around(x, temperature, kept, typical.unsqueeze(1))
            kept &= _distance(x, middle) <= reach
        score = score.masked_fill(~kept, -torch.inf)
    tokens = _argmax(torch.where(hot, score, x))
    if not limited:
        return tokens
    mass = _weight(x, largest, temperature).masked_fill(~kept, 0).sum(-1, keepdim=True)
    return tokens, torch.cat((floor, middle, reach, largest, mass), 1)


def _for_each_row(how, rows: int):
    fields = [field if field is None or len(field) == rows else field.repeat_interleave(rows // len(field)) for field in how]
    each = how._make(fields)
    return each if len(how.step) == rows else each._replace(step=each.step + torch.arange(rows, device=each.step.device) % (rows // len(how.step)))


def _may_be(flags: Tensor) -> bool:
    """Whether one of `flags` is set, on a CPU; on a GPU it would cost a wait to know, so True."""
    return flags.device.type != "cpu" or bool(flags.any())


def _weight(x: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - largest) / temperature), also where both are infinite."""
    return torch.where(x >= largest, 1.0, ((x - largest) / temperature).exp())


def _finite(largest: Tensor) -> Tensor:
    """What logits are taken less, so that noise counts however large they are; less this, infinite ones stay so."""
    return largest.clamp(torch.finfo(largest.dtype).min, torch.finfo(largest.dtype).max)


def _distance(x: Tensor, middle: Tensor) -> Tensor:
    return torch.where(x == middle, 0.0, (x - middle).abs())


def smallest_kept(x: Tensor, temperature: Tensor, how) -> Tensor:
    """The smallest logit that top-k, top-p and min-p keep, [rows, 1]; each keeps the entries from some logit up."""
    vocab = x.shape[-1]
    ranked = _descending(x)
    k = torch.where(how.top_k > 0, how.top_k, vocab).clamp(max=vocab).long().unsqueeze(1)
    floor = ranked.gather(1, k - 1)
    reached = _weight(ranked, ranked[:, :1], temperature).masked_fill(ranked < floor, 0).cumsum(-1, dtype=torch.float64)
    enough = (reached < how.top_p.unsqueeze(1) * reached[:, -1:]).sum(-1, keepdim=True)
    floor = torch.where(how.top_p.unsqueeze(1) < 1, ranked.gather(1, enough.clamp(max=vocab - 1)), floor)
    min_p = how.min_p.unsqueeze(1).to(x.dtype)
    return torch.where(min_p > 0, torch.maximum(floor, ranked[:, :1] + temperature * min_p.log()), floor)


def around(x: Tensor, temperature: Tensor, kept: Tensor, typical: Tensor) -> tuple[Tensor, Tensor]:
    """The mean logit of the kept entries and the distance from it that typical sampling keeps, [rows, 1] each; inf where `typical` is 1.

    |-log p - entropy| is |x - mean of x| / temperature: the nearest entries, until they weigh `typical` of all.
    """
    largest = x.max(-1, keepdim=True).values
    w = _weight(x, largest, temperature).masked_fill(~kept, 0)
    middle = largest + (w * (x - largest).masked_fill((x >= largest) | (w == 0), 0)).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
    distance, order = _distance(x, middle).masked_fill(~kept, torch.inf).sort(-1)
    reached = w.gather(1, order).cumsum(-1, dtype=torch.float64)
    enough = (reached < typical * reached[:, -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return middle, torch.where(typical < 1, distance.gather(1, enough), torch.inf)


def _descending(x: Tensor) -> Tensor:
    """Each row sorted, largest first. On a CPU by numpy, which carries no indices along: 0.1 ms for 49,152 logits, torch 3.1 ms."""
    return -torch.from_numpy(np.sort(-x.detach().numpy(), -1)) if x.device.type == "cpu" else x.sort(-1, descending=True).values


def gumbel(seed: Tensor, step: Tensor, vocab: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> Tensor:
    """Gumbel noise [rows, vocab]: -log(-log(u)) with u = (w // 2^9 + 1/2) / 2^23, w a 32-bit word of Philox4x32-10.

    Entry i takes word i % 4 of the block whose key is (seed low, seed high) and whose counter is (i // 4, step low, step
    high, stream), low and high being the 32-bit halves. u is exact in float32, and neither 0 nor 1.
    """
    return uniform(seed, step, vocab, dtype, stream).log_().neg_().log_().neg_()


def uniform(seed: Tensor, step: Tensor, count: int, dtype: torch.dtype = torch.float32, stream: int = 0) -> Tensor:
    """The u of `gumbel`, [rows, count]."""
    seed, step = seed.unsqueeze(1), step.unsqueeze(1)
    block = torch.arange((count + 3) // 4, device=seed.device).unsqueeze(0)
    words = philox((block, step & LOW, (step >> 32) & LOW, torch.full_like(step, stream)), (seed & LOW, (seed >> 32) & LOW))
    return torch.stack([word >> 9 for word in words], -1).flatten(1)[:, :count].to(dtype).add_(0.5).mul_(2**-23)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10 (Salmon et al., 2011) for four 32-bit counters and two keys, all held in int64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps, which leaves the 64 bits of the product right
        c0, c1, c2, c3 = ((p1 >> 32) & LOW) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def log_probs(problem: Rows, config: None, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax at `tokens` [rows], and the largest of it [rows, top] with their indices, the lowest first of equal ones."""
    x = _exact(logits)
    top = x.amax(-1, keepdim=True)
    whole = _weight(x, top, 1.0).sum(-1, keepdim=True).log()  # less top, apart: a large part common to all logits costs no digits
    order = x.sort(dim=-1, descending=True, stable=True).indices[:, : int(problem.variant.split()[1])].contiguous()
    real = (tokens >= 0) & (tokens < problem.width)
    at = torch.where(real, tokens, 0).unsqueeze(1)
    found = [torch.where(z == -torch.inf, -torch.inf, z - top - whole).float() for z in (x.gather(1, at), x.gather(1, order))]
    return found[0].squeeze(1).masked_fill(~real, -torch.inf), found[1], order


def adjust_logits(problem: Rows, config: None, logits: Tensor, rates, counts, bias, mask: Tensor | None) -> Tensor:
    """See `ops.sampling.adjust_logits`; rates: repetition, presence and frequency [rows], counts: of output and prompt [rows, vocab], or None."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    ids, values = bias
    if ids is not None:
        real = (ids >= 0) & (ids < problem.width)
        x = x.scatter_add(1, torch.where(real, ids, 0), torch.where(real, values, 0).to(x.dtype))
    output, prompt = counts
    if output is not None:
        repetition, presence, frequency = (rate.unsqueeze(1).to(x.dtype) for rate in rates)
        seen = output > 0 if prompt is None else (output > 0) | (prompt > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x) - frequency * output - presence * (output > 0)
    if mask is not None:
        bit = torch.arange(problem.width, device=mask.device)
        x = x.masked_fill((mask[:, bit // 32] >> (bit % 32)) & 1 == 0, -torch.inf)
    x = x.to(logits.dtype).contiguous()
    return x.clone() if x is logits else x


def verify(problem: Rows, config: None, logits: Tensor, draft, how, drawn: Tensor, limits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, path and token of `ops.sampling.Verified`; drawn: `sample` at each place [rows, n + 1], limits: what it kept."""
    rows, n = draft.tokens.shape
    if draft.probabilities is not None:
        return _verify_drawn(logits, draft, how, drawn, limits.view(rows, n + 1, 5))
    parents = torch.arange(-1, n - 1, device=drawn.device) if draft.parents is None else draft.parents
    parents, places = parents.expand(rows, n), torch.arange(n, device=drawn.device)
    at, path, count = drawn.new_zeros(rows), drawn.new_full((rows, n), -1), drawn.new_zeros(rows)
    for depth in range(n):
        wanted = drawn.gather(1, at.unsqueeze(1))
        place = torch.where((parents == at.unsqueeze(1) - 1) & (draft.tokens == wanted), places, n).min(-1).values
        going = (place < n) & (count == depth)
        path[:, depth] = torch.where(going, place, -1)
        at, count = torch.where(going, place + 1, at), count + going
    return count, path, drawn.gather(1, at.unsqueeze(1)).squeeze(1)


def _verify_drawn(logits: Tensor, draft, how, drawn: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A chain whose tokens were drawn from known probabilities. Uniforms are of stream 1, the noise of the residual of stream 2."""
    (rows, n), places = draft.tokens.shape, torch.arange(draft.tokens.shape[1], device=drawn.device)
    x, q = _exact(logits[:, :n]), draft.probabilities
    q = torch.where((q > 0) & (draft.tokens >= 0).unsqueeze(2), q, 0)
    floor, middle, reach, largest, mass = limits[:, :n].unsqueeze(-2).unbind(-1)  # [rows, n, 1] each
    hot = (how.temperature > 0).unsqueeze(1)
    temperature = torch.where(hot, how.temperature.unsqueeze(1), 1.0).clamp(COLD, HOT)
    kept = (x >= floor) & (_distance(x, middle) <= reach)
    p = (((x - largest) / temperature.unsqueeze(2)).exp() / mass).masked_fill(~kept, 0)
    at = draft.tokens.clamp(0, x.shape[-1] - 1).unsqueeze(2)
    real = (draft.tokens >= 0) & (draft.tokens < x.shape[-1])
    steps = (how.step.unsqueeze(1) + places).flatten()
    u = uniform(how.seed.repeat_interleave(n), steps, 1, x.dtype, 1).view(rows, n)
    taken = real & torch.where(hot, u * q.gather(2, at).squeeze(2) < p.gather(2, at).squeeze(2), draft.tokens == drawn[:, :n])
    count = taken.long().cumprod(-1).sum(-1)
    end = count.clamp(max=n - 1).unsqueeze(1)
    p, q = (t.gather(1, end.unsqueeze(2).expand(-1, -1, t.shape[-1])).squeeze(1) for t in (p, q))
    rest = (p - q).clamp(min=0)
    rest = torch.where((rest > 0).any(-1, keepdim=True), rest, p)
    noise = gumbel(how.seed, how.step + end.squeeze(1), rest.shape[-1], x.dtype, 2)
    token = torch.where(hot.squeeze(1) & (count < n), (rest.log() + noise).argmax(-1), drawn.gather(1, count.unsqueeze(1)).squeeze(1))
    return count, torch.where(places < count.unsqueeze(1), places, -1), token
