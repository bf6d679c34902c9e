"""The peers of a Pass: one forward pass, the gradients alone of one that was made before, or both, each through torch's autograd.

A peer says how it attends in its own layout; `through` makes the call that is timed, of tensors that lie as the Pass says. The graph of
a backward pass is made once and kept (`retain_graph`), so that gradients alone are on the clock.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench import mods
from onchip.bench.call import Call
from onchip.bench.data import Trained
from onchip.bench.mod import dense
from onchip.bench.suite import Pass
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import E4M3
from onchip.ops.attention import attention, attention_packed, quantise

NO_DROPOUT = "has no dropout"


def through(i: Trained, attend: Callable[..., Tensor], turn: Callable[[Tensor], Tensor] = lambda x: x) -> Call:
    """`attend(q, k, v[, sinks])` -> output, as a Call; `turn` goes from [batch, len, heads, dim] to the peer's layout and back."""
    op, extra = i.problem.op, [] if i.mod.sinks is None else [i.mod.sinks]
    leaves = [*(_lying(x, i.problem.memory, turn).detach() for x in (i.q, i.k, i.v)), *(x.detach() for x in extra)]
    if op == "forward":
        return Call(lambda: turn(attend(*leaves)))
    d_out, leaves = _lying(i.d_out, i.problem.memory, turn), [x.requires_grad_() for x in leaves]

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(out, leaves, d_out, retain_graph=op == "backward")
        return (*(turn(x) for x in found[:3]), *found[3:])

    def step() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = attend(*leaves)
        return (turn(out.detach()), *gradients(out))

    if op == "step":
        return Call(step)
    with torch.enable_grad():
        out = attend(*leaves)
    return Call(lambda: gradients(out))


def _lying(x: Tensor, memory: str, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """`x` [batch, len, heads, dim] in a peer's layout, its numbers in the order that is asked for."""
    if not memory:
        return turn(x).contiguous()
    return turn(x.contiguous() if memory == "tokens first" else _heads_first(_heads_first(x).contiguous()))


def onchip(i: Trained, kernel: str = "auto") -> Call:
    p = i.problem.inner
    how = {"mask": p.mask, "kernel": kernel, **i.mod.arguments}
    if p.keys == "packed":
        return through(i, lambda q, k, v: attention_packed(q, k, v, i.offsets, longest=p.len_q, **how))
    if p.dtype == E4M3:
        return through(i, lambda q, k, v: attention(*quantise(q, k, v, share="head"), **how))
    return through(i, lambda q, k, v, sinks=None: attention(q, k, v, sinks=sinks, **how))


def onchip_triton(i: Trained) -> Call:
    """By the kernels that every NVIDIA GPU has, wherever this runs."""
    return onchip(i, "triton_prefill")


def onchip_bf16(i: Trained) -> Call:
    """What gradients in 8 bits are to beat."""
    return through(i, lambda q, k, v: attention(q, k, v, mask=i.problem.inner.mask))


def sdpa(backend: str | None) -> Callable[[Trained], Call]:
    """torch's attention, which takes [batch, heads, len, dim]; `backend` None: torch chooses."""

    def prepare(i: Trained) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        p, own = i.problem.inner, i.mod.own
        mask, drop = own.get("mask", p.mask), own["dropout"].p if "dropout" in own else 0.0
        given, causal = mask if isinstance(mask, Tensor) else own.get("bias"), isinstance(mask, Causal)
        if i.problem.mod in mods.PADDED:
            given = dense(i.mod, p, i.q.device)

        def attend(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, given, drop, is_causal=causal, enable_gqa=p.group > 1)

        return through(i, attend, _heads_first)

    return prepare


def sdpa_takes(p: Pass, _device) -> str | None:
    inner = p.inner
    if inner.keys != "dense":
        return "no packed keys"
    if p.mod in (*mods.DENSE, *mods.DROPPED, *mods.PADDED):
        return None
    if p.mod or not isinstance(inner.mask, (Full, Causal)):
        return f"{p.mod or inner.mask} only as a dense mask"
    return "aligns Causal to the top left" if isinstance(inner.mask, Causal) and inner.len_q != inner.len_k else None


def flash_takes(p: Pass, device) -> str | None:
    """FlashAttention-2 as torch has it, which takes no mask."""
    return f"no {p.mod}" if p.mod in (*mods.DENSE, *mods.PADDED) else sdpa_takes(p, device)


def fa4(i: Trained) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    p = i.problem.inner
    how = {"causal": isinstance(p.mask, Causal), "window_size": (p.mask.left, 0) if isinstance(p.mask, Window) else (None, None)}
    if p.keys == "packed":
        how |= {"cu_seqlens_q": i.offsets, "cu_seqlens_k": i.offsets, "max_seqlen_q": p.len_q, "max_seqlen_k": p.len_k}
    function = flash_attn_varlen_func if p.keys == "packed" else flash_attn_func
    return through(i, lambda q, k, v: function(q, k, v, **how)[0])


def flex_takes(p: Pass, device) -> str | None:
    if not p.mod:
        return "asked for mods only"
    if p.mod in mods.DENSE:
        return f"has no {p.mod} but as a function"
    if p.mod in mods.DROPPED:
        return NO_DROPOUT
    return "no gradients on a CPU" if device.type == "cpu" and p.op != "forward" else None


def no_mod(p: Pass, _device) -> str | None:
    return NO_DROPOUT if p.mod in mods.DROPPED else f"no {p.mod}" if p.mod else None


def plain_only(p: Pass, _device) -> str | None:
    """Of a contender that could."""
    return "timed without a mod only" if p.mod else None


def flex(compiled: bool) -> Callable[[Trained], Call]:
    """FlexAttention with the mod's functions; its block mask is made here, off the clock. Sinks scale its output, by LSE."""

    def prepare(i: Trained) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        p, mod = i.problem.inner, i.mod
        sizes = (None, None) if mod.alike else (p.batch, p.heads)
        blocks = None if mod.mask is None else create_block_mask(mod.mask, *sizes, p.len_q, p.len_k, device=i.q.device)
        score = mod.score

        def attend(q, k, v, sinks=None):
            if sinks is None:
                return flex_attention(q, k, v, score_mod=score, block_mask=blocks)
            out, lse = flex_attention(q, k, v, score_mod=score, block_mask=blocks, return_lse=True)
            return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

        if not compiled:
            return through(i, attend, _heads_first)
        torch._dynamo.reset()  # each mod is a recompilation, and after eight of them torch gives up
        with torch._functorch.config.patch(donated_buffer=False):  # a graph that is kept must keep its buffers
            return through(i, torch.compile(attend, dynamic=False), _heads_first)

    return prepare


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
