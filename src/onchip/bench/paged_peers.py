"""Calls over a paged cache as each contender makes them: from the inputs of `bench/paged.py` to a Call."""

import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.call import Call
from onchip.bench.paged import Appended, Paged
from onchip.cache.sharing import plan_cascade
from onchip.core import device as devices
from onchip.core.kernel import Unsupported
from onchip.core.problem import Attention, Rope
from onchip.ops.attention import PagedKV, paged_attention
from onchip.ops.cascade import cascade_attention
from onchip.ops.fused import Append, rope_append
from onchip.ops.latent import attend_latent

EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WORKSPACE = 256 << 20  # bytes; FlashInfer advises 128 MiB, which 16 splits of 64 queries exceed
GROUPS = (1, 2, 4, 8)  # query heads a key head that FlashInfer's kernel without tensor cores is made for

# ---- ours


def onchip(inputs: Paged) -> Call:
    return Call(_attend(inputs, inputs.cache))


def onchip_bf16(inputs: Paged) -> Call:
    """What a quantised cache is to beat."""
    return Call(_attend(inputs, inputs.source))


def onchip_cascade(inputs: Paged) -> Call:
    """What is shared is found from the page lists on the host, once for all layers and all steps until a page is added: not timed."""
    i, p = inputs, inputs.problem
    plan = plan_cascade(p, i.cache.page_table.tolist(), i.lengths, devices.of(i.device))
    if plan.order != list(range(p.batch)):
        raise ValueError(f"the plan wants rows {plan.order[:4]}...; rows of a benchmark stand in the order of their pages")
    table, lengths = plan.table(i.device)
    own, levels = i.cache._replace(page_table=table, lengths=lengths), plan.levels(i.device)
    return Call(lambda: cascade_attention(i.q, own, levels))


def _attend(i: Paged, cache: PagedKV) -> Callable:
    if i.problem.op == "latent":
        return lambda: attend_latent(i.q, *cache[1:], mask=i.problem.mask)
    packed = {} if i.offsets is None else {"q_offsets": i.offsets, "longest": i.problem.len_q}
    return lambda: paged_attention(i.q, cache, mask=i.problem.mask, **packed)


def onchip_append(inputs: Appended) -> Call:
    """Rows of its own, since they are rotated in place."""
    i, p, qkv = inputs, inputs.problem, inputs.qkv.clone()
    append = Append(i.k, i.v, i.slots)
    run = functools.partial(rope_append, qkv, i.table, i.positions, (p.heads, p.kv_heads), append=append)
    return Call(run, result=lambda: (_heads(p, qkv)[0].clone(), i.written(i.k), i.written(i.v)))


def _heads(p: Rope, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views of the packed rows."""
    return qkv.view(p.tokens, -1, p.dim).split((p.heads, p.kv_heads, p.kv_heads), 1)


# ---- torch


def sdpa(inputs: Paged) -> Call:
    """torch's attention over keys copied from their pages to [batch, kv_heads, len, dim]; the heads of a group are the rows."""
    p, cache = inputs.problem, inputs.source
    if len(set(inputs.lengths)) > 1:
        raise Unsupported(f"lengths from {min(inputs.lengths)} to {max(inputs.lengths)}; its keys are dense, of one length")
    k, v = (pool[cache.page_table.long()].flatten(1, 2)[:, : p.len_k].transpose(1, 2).contiguous() for pool in cache[:2])
    q = inputs.q.view(p.batch, p.kv_heads, p.group, p.dim)
    return Call(lambda: F.scaled_dot_product_attention(q, k, v).view(p.batch, 1, p.heads, p.value_dim))


def sdpa_takes(p: Attention, _device) -> str | None:
    if p.kv:
        return f"no {p.kv}"
    if p.len_q > 1:
        return "of one query a sequence only, whose mask shows all keys"
    return "its keys are as wide as its values" if p.dim_v else None


# ---- FlashInfer


def decode_takes(p: Attention, _device) -> str | None:
    """What FlashInfer's decode wrapper is asked for; with 2 and more queries its prefill wrapper is."""
    if p.dim_v:
        return "has a wrapper of its own for latent keys"
    return _no_format(p)


def cores_take(p: Attention, device) -> str | None:
    """FlashInfer without tensor cores; each further dtype and head dimension is another minute of compiling for a kernel that is behind the other."""
    if p.group not in GROUPS:
        return f"{p.group} heads a group, of {', '.join(map(str, GROUPS))}"
    if p.len_q > 1 or p.kv or p.dim != 128:
        return "one query, head dimension 128 and keys in 16 bits only: slower than tensor cores elsewhere"
    return decode_takes(p, device)


def fa3_takes(p: Attention, device) -> str | None:
    """FlashInfer's kernel for Hopper, which makes tiles of many queries."""
    return decode_takes(p, device) or (None if p.len_q >= 64 and not p.kv else "64 and more queries over keys in 16 bits only")


def latent_takes(p: Attention, _device) -> str | None:
    return None if (p.dim, p.dim_v) == (576, 512) else "latent keys of 512 and 64 columns only"


def append_takes(p: Rope, _device) -> str | None:
    return None if p.kv in ("", *EIGHT_BITS) else f"no {p.kv}"


def _no_format(p: Attention) -> str | None:
    return None if p.kv in ("", *EIGHT_BITS) else f"no {p.kv}"


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """FlashInfer's scratch memory; wrappers used one after the other may share it."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def _pages(i: Paged, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table, from token `start` on: bounds int32 [batch + 1], pages end to end, tokens on each last page."""
    page, lengths = i.problem.page, [n - start for n in i.lengths]
    each = [math.ceil(n / page) for n in lengths]
    bounds = torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32)
    table = i.cache.page_table[:, start // page :]
    pages = table[torch.arange(table.shape[1], device=table.device) < torch.tensor(each, device=table.device)[:, None]]
    return bounds, pages, torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32)


def _pools(i: Paged) -> tuple[Tensor, Tensor]:
    """Keys and values as FlashInfer has them: in 8 bits without scales."""
    dtype = EIGHT_BITS.get(i.problem.kv)
    return i.source[:2] if dtype is None else tuple(pool.to(dtype) for pool in i.source[:2])


def flashinfer(tensor_cores: bool) -> Callable[[Paged], Call]:
    """Of one query a sequence by its decode wrapper, of more by its prefill wrapper; both run the same kernel where tensor cores do."""

    def prepare(inputs: Paged) -> Call:
        import flashinfer

        p = inputs.problem
        if p.len_q > 1:
            return _flashinfer_prefill(inputs, "fa2")
        pools = _pools(inputs)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(inputs.q.device), "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(*_pages(inputs), p.heads, p.kv_heads, p.dim, p.page, q_data_type=p.dtype, kv_data_type=pools[0].dtype)
        q = inputs.q[:, 0]
        return Call(lambda: wrapper.run(q, pools)[:, None])

    return prepare


def flashinfer_fa3(inputs: Paged) -> Call:
    return _flashinfer_prefill(inputs, "fa3")


def _flashinfer_prefill(inputs: Paged, backend: str) -> Call:
    import flashinfer

    p, pools = inputs.problem, _pools(inputs)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(inputs.q.device), "NHD", backend=backend)
    rows = torch.tensor([0, *itertools.accumulate(inputs.queries)], dtype=torch.int32)
    dtypes = {"q_data_type": p.dtype, "kv_data_type": pools[0].dtype}
    wrapper.plan(rows, *_pages(inputs), p.heads, p.kv_heads, p.dim, p.page, causal=True, **dtypes)
    q = inputs.q.reshape(-1, p.heads, p.dim)
    return Call(lambda: wrapper.run(q, pools).view_as(inputs.q))


def flashinfer_cascade(inputs: Paged) -> Call:
    """The shared tokens by all queries at once, the others by each sequence's, and their merge."""
    import flashinfer

    p, shared = inputs.problem, inputs.shared
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(inputs.q.device), "NHD")
    first, device = shared // p.page, inputs.q.device
    rows = [torch.tensor([0, p.batch], dtype=torch.int32, device=device), torch.arange(p.batch + 1, dtype=torch.int32, device=device)]
    of_all = (torch.tensor([0, first], dtype=torch.int32), inputs.cache.page_table[0, :first].contiguous(), torch.tensor([p.page], dtype=torch.int32))
    levels = [[x.to(device) for x in level] for level in zip(of_all, _pages(inputs, shared), strict=True)]
    wrapper.plan(rows, *levels, p.heads, p.kv_heads, p.dim, p.page, q_data_type=p.dtype)
    q = inputs.q[:, 0]
    return Call(lambda: wrapper.run(q, inputs.source[:2])[:, None])


def flashinfer_latent(inputs: Paged) -> Call:
    """Its wrapper for multi-head latent attention, on Hopper by FlashAttention-3's template."""
    import flashinfer

    p, device = inputs.problem, inputs.q.device
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(device), backend="auto")
    rows = torch.arange(p.batch + 1, dtype=torch.int32, device=device)
    bounds, pages, _ = _pages(inputs)
    sizes = {"num_heads": p.heads, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": p.page, "causal": False, "sm_scale": p.dim**-0.5}
    sizes |= {"q_data_type": p.dtype, "kv_data_type": p.dtype}
    wrapper.plan(qo_indptr=rows, kv_indptr=bounds.to(device), kv_indices=pages, kv_len_arr=inputs.cache.lengths, **sizes)
    latent, rotated = (x.squeeze(2).contiguous() for x in inputs.source.k.split((512, 64), -1))
    q, q_rotated = (x[:, 0].contiguous() for x in inputs.q.split((512, 64), -1))
    return Call(lambda: wrapper.run(q_nope=q, q_pe=q_rotated, ckv_cache=latent, kpe_cache=rotated, return_lse=False)[:, None])


def flashinfer_append(inputs: Appended) -> Call:
    """Two kernels in 16 bits; in 8 bits one, which rounds the queries too."""
    import flashinfer

    i, p, device = inputs, inputs.problem, inputs.qkv.device
    dtype = EIGHT_BITS.get(p.kv, p.dtype)
    cache = tuple(torch.zeros(p.tokens // i.page, i.page, p.kv_heads, p.dim, dtype=dtype, device=device) for _ in range(2))
    pages = (i.slots[:: i.page] // i.page).int()
    bounds = torch.tensor([0, len(pages)], dtype=torch.int32, device=device)
    last = torch.tensor([i.page], dtype=torch.int32, device=device)
    of, within = torch.zeros(p.tokens, dtype=torch.int32, device=device), torch.arange(p.tokens, dtype=torch.int32, device=device)
    q, k, v = _heads(p, i.qkv.clone())
    positions = i.positions.int()
    if not p.kv:

        def run():
            flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q.flatten(1), k.flatten(1), p.dim, i.table)
            flashinfer.append_paged_kv_cache(k, v, of, within, cache, pages, bounds, last)

        return Call(run, result=lambda: (q.clone(), *(i.written(x) for x in cache)))
    rounded = torch.empty_like(q, dtype=dtype)
    where = {"kv_indices": pages, "kv_indptr": bounds, "batch_indices": of, "positions": within, "page_size": i.page}
    none = q[..., :0], k[..., :0]
    fused = functools.partial(flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache, q, k, *none, v, i.table, positions, cache, **where)
    return Call(functools.partial(fused, quantize_dtype=dtype, q_rope_out=rounded), result=lambda: (rounded.float(), *(i.written(x.float()) for x in cache)))
