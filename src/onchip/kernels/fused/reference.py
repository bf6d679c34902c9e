"""The fused operators in plain torch: the oracle in float64, and what a CPU runs."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.problem import Rope, Rows

LOW = 0xFFFFFFFF  # the low 32 bits of an int64


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: float32, or float64 when that was given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(
    problem: Rows, config: None, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm of x, or (norm of the sum, sum); x [..., width], weight [width]."""
    total = x if residual is None else x + residual
    exact = _exact(x.dtype)
    weight = weight.to(exact) + offset if offset else weight.to(exact)
    y = F.rms_norm(total.to(exact), (problem.width,), weight, eps).to(x.dtype)
    return y if residual is None else (y, total)


def rope_append(problem: Rope, config: None, qkv: Tensor, table: Tensor, positions: Tensor, norm, append) -> None:
    """Rotate the heads of qkv [tokens, (heads + 2 kv_heads) dim] in place; norm: QKNorm or None, append: Append or None."""
    p, half, exact = problem, problem.rotary_dim // 2, _exact(qkv.dtype)
    heads = qkv.view(p.tokens, p.heads + 2 * p.kv_heads, p.dim)
    x = heads[:, : p.heads + p.kv_heads]
    if norm is not None:
        weight = torch.cat((norm.q.expand(p.heads, -1), norm.k.expand(p.kv_heads, -1))).to(exact)
        y = x.to(exact)
        y = F.rms_norm(y, (p.dim,), None, norm.eps) * (weight + norm.offset)
        x[..., p.rotary_dim :] = y[..., p.rotary_dim :]
    else:
        y = x
    first, second = (slice(0, half), slice(half, 2 * half)) if p.layout == "neox" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = y[..., first].to(exact), y[..., second].to(exact)
    cos, sin = table.index_select(0, positions).to(exact).unsqueeze(1).chunk(2, -1)  # [tokens, 1, half]
    rotated = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    x[..., first], x[..., second] = rotated
    if append is not None:
        slots, k, v = append.slots, heads[:, p.heads : p.heads + p.kv_heads], heads[:, p.heads + p.kv_heads :]
        kept = slots >= 0
        if not kept.all():
            slots, k, v = slots[kept], k[kept], v[kept]
        for pages, new in ((append.k, k), (append.v, v)):
            if p.kv:
                pages.put(slots, new)
            elif pages.stride(0) == pages.shape[1] * pages.stride(1):  # 5 us less than by page and offset
                pages.view(-1, p.kv_heads, p.dim).index_copy_(0, slots, new)
            else:
                pages[slots // pages.shape[1], slots % pages.shape[1]] = new


def sample(problem: Rows, config: None, logits: Tensor, how) -> Tensor:
    """Token ids, int64 [rows]; logits [rows, vocab], how: Sampling."""
    x = logits.to(_exact(logits.dtype))
    hot = (how.temperature > 0).unsqueeze(1)
    if not _may_be(hot):
        return x.argmax(-1)
    temperature = torch.where(hot, how.temperature.unsqueeze(1), 1.0).to(x.dtype)
    score = x * (1 / temperature) + gumbel(how.seed, how.step, problem.width, x.dtype)
    if _may_be((how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0)):
        score = score.masked_fill(x < smallest_kept(x, temperature, how), -torch.inf)
    return torch.where(hot, score, x).argmax(-1)


def _may_be(flags: Tensor) -> bool:
    """Whether one of `flags` is set, on a CPU; on a GPU it would cost a wait to know, so True."""
    return flags.device.type != "cpu" or bool(flags.any())


def smallest_kept(x: Tensor, temperature: Tensor, how) -> Tensor:
    """The smallest logit that top-k, top-p and min-p keep, [rows, 1]; each keeps the entries from some logit up."""
    vocab = x.shape[-1]
    ranked = _descending(x)
    k = torch.where(how.top_k > 0, how.top_k, vocab).clamp(max=vocab).long().unsqueeze(1)
    floor = ranked.gather(1, k - 1)
    weight = ((ranked - ranked[:, :1]) / temperature).exp().masked_fill(ranked < floor, 0)
    reached = weight.cumsum(-1, dtype=torch.float64)
    enough = (reached < how.top_p.unsqueeze(1) * reached[:, -1:]).sum(-1, keepdim=True)
    floor = torch.where(how.top_p.unsqueeze(1) < 1, ranked.gather(1, enough.clamp(max=vocab - 1)), floor)
    return torch.maximum(floor, ranked[:, :1] + temperature * how.min_p.unsqueeze(1).to(x.dtype).log())


def _descending(x: Tensor) -> Tensor:
    """Each row sorted, largest first. On a CPU by numpy, which carries no indices along: 0.1 ms for 49,152 logits, torch 3.1 ms."""
    return -torch.from_numpy(np.sort(-x.detach().numpy(), -1)) if x.device.type == "cpu" else x.sort(-1, descending=True).values


def gumbel(seed: Tensor, step: Tensor, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gumbel noise [rows, vocab]: -log(-log(u)) with u = (w // 2^9 + 1/2) / 2^23, w a 32-bit word of Philox4x32-10.

    Entry i takes word i % 4 of the block whose key is (seed low, seed high) and whose counter is (i // 4, step low, step
    high, 0), low and high being the 32-bit halves. u is exact in float32, and neither 0 nor 1.
    """
    seed, step = seed.unsqueeze(1), step.unsqueeze(1)
    block = torch.arange((vocab + 3) // 4, device=seed.device).unsqueeze(0)
    words = philox((block, step & LOW, (step >> 32) & LOW, torch.zeros_like(step)), (seed & LOW, (seed >> 32) & LOW))
    u = torch.stack([word >> 9 for word in words], -1).flatten(1)[:, :vocab].to(dtype).add_(0.5).mul_(2**-23)
    return u.log_().neg_().log_().neg_()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10 (Salmon et al., 2011) for four 32-bit counters and two keys, all held in int64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps, which leaves the 64 bits of the product right
        c0, c1, c2, c3 = ((p1 >> 32) & LOW) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3
