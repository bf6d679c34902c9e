"""`flashinfer.mla`: latent attention over pages (DeepSeek-V2, 2024): one key for all heads, of which the latent part is the value too."""

import math

import torch
from torch import Tensor

from onchip.core.arguments import kind_of
from onchip.integrations.flashinfer.call import (
    BACKENDS,
    Call,
    Result,
    Way,
    as_planned,
    checked,
    dtype_of,
    finished,
    fixed_batch,
    keep,
    mask_of,
    on_host,
    one_of,
    planned,
    refuse,
)
from onchip.integrations.flashinfer.pages import Pages, Queries, Table, attend, lists_of, taken


class BatchMLAPagedAttentionWrapper:
    """Packed queries in two parts over a latent cache in two parts: `softmax(scale (q_nope ckv^T + q_pe kpe^T)) ckv`.

    The two parts of the cache are read in place where they lie side by side in one tensor (`cache[..., :512]`, `cache[..., 512:]`); two tensors
    are copied side by side, for the pages in use. `float_workspace_buffer` says which device; `backend` changes nothing.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        name = type(self).__name__
        one_of(name, "backend", backend, BACKENDS)
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        self._use_cuda_graph, self._backend = use_cuda_graph, backend
        self._buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        batch = fixed_batch(name, use_cuda_graph, self._buffers, qo_indptr, kv_len_arr)
        self._table = Table(self.device, (batch, len(kv_indices)) if use_cuda_graph else None)
        self._way, self._most_rows = None, None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """The page table of the batch. `kv_len_arr` int32 [batch]: keys of each sequence."""
        name = f"{type(self).__name__}.plan"
        refuse(name, use_profiler=use_profiler)
        self._way = None  # what a plan that fails leaves behind is none
        way = checked(name, Way(causal, sm_scale=sm_scale))
        if sm_scale is None:
            raise ValueError(f"{name}: sm_scale is None; give a number: of which dimensions the model makes it, the latent ones do not tell")
        lists = lists_of(name, kv_indptr, None, page_size, kv_len_arr)
        host = on_host(name, "qo_indptr", qo_indptr)
        if len(host) != len(lists.lengths) + 1 or (host.diff() < 0).any():
            raise ValueError(f"{name}: qo_indptr is {host.tolist()} for {len(lists.lengths)} sequences; give [batch + 1], never falling")
        counts = host.diff().tolist() or [1]  # of no sequences one each
        self._rows, longest = int(host[-1]), max(counts)
        self._even = longest if longest and min(counts) == longest and not int(host[0]) else None
        if self._use_cuda_graph:
            most = self._most_rows or self._rows
            if self._rows > most:
                raise ValueError(f"{name}: {self._rows} queries in a wrapper for CUDA graphs first planned for {most}; that many are the most")
            longest, self._even = most, None  # a graph keeps what it was captured with, and other plans may share rows out otherwise
            for buffer, given in ((self._buffers["qo_indptr"], host), (self._buffers["kv_indptr"], kv_indptr), (self._buffers["kv_len_arr"], kv_len_arr)):
                keep(buffer, given)
            keep(self._buffers["kv_indices"], kv_indices, "indices")
            self._offsets = self._buffers["qo_indptr"]
        else:
            self._offsets = host.to(self.device, non_blocking=True)
        self._longest, self._pages = longest, self._table.fill(name, lists, kv_indices, page_size)
        self._q_dtype, self._kv_dtype = dtype_of(q_data_type), dtype_of(kv_data_type)
        self._heads, self._dims = num_heads, (head_dim_ckv, head_dim_kpe)
        self._way, self._most_rows = way, longest if self._use_cuda_graph else None

    def run(
        self,
        q_nope: Tensor,  # [tokens, heads, dim_ckv]
        q_pe: Tensor,  # [tokens, heads, dim_kpe]
        ckv_cache: Tensor,  # [pages, page, dim_ckv]
        kpe_cache: Tensor,  # [pages, page, dim_kpe]
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,  # float32 [pages, page, dim_ckv / 128]
        kpe_scale: float | None = None,
    ):
        """`[tokens, heads, dim_ckv]`; with `return_lse` also LSE `[tokens, heads]`, in base 2 unless `return_lse_base_on_e`.

        A cache in float8 is `ckv_scale ckv` (or by a scale for each 128 columns) and `kpe_scale kpe`.
        Backend "cutlass", which is not planned, is given `kv_len` and `page_table` here; others take their plan's.
        """
        name = f"{type(self).__name__}.run"
        refuse(name, profiler_buffer=profiler_buffer)
        if o_scale is not None and o_scale != 1:
            raise ValueError(f"{name}: o_scale {o_scale} is not supported; outputs are in q's dtype, scale them after")
        for argument, given in (("q_nope", q_nope), ("ckv_cache", ckv_cache)):
            as_planned(name, argument, given, None)
        if self._backend == "cutlass":
            refuse_scales(name, ckv_cache.dtype, ckv_scale, ckv_scale_arr, kpe_scale)
            want = Result(q_nope.dtype, return_lse, out, lse, return_lse_base_on_e)
            return self._run_table(name, q_nope, q_pe, ckv_cache, kpe_cache, kv_len, page_table, scaling_of(ckv_scale, ckv_scale_arr, kpe_scale), want)
        planned(name, self._way)
        for argument, given, dtype in (("q_nope", q_nope, self._q_dtype), ("q_pe", q_pe, self._q_dtype), ("ckv_cache", ckv_cache, self._kv_dtype)):
            as_planned(name, argument, given, dtype)
        as_planned(name, "kpe_cache", kpe_cache, self._kv_dtype)
        refuse_scales(name, ckv_cache.dtype, ckv_scale, ckv_scale_arr, kpe_scale)
        for argument, given, dim in (("q_nope", q_nope, self._dims[0]), ("q_pe", q_pe, self._dims[1])):
            if given.shape != (self._rows, self._heads, dim):
                raise ValueError(f"{name}: {argument} is {list(given.shape)}; plan() was told [{self._rows}, {self._heads}, {dim}], give both the same")
        k, v, pages = latent(ckv_cache, kpe_cache, self._pages, q_nope.dtype, scaling_of(ckv_scale, ckv_scale_arr, kpe_scale))
        queries = Queries(torch.cat((q_nope, q_pe), -1), self._offsets, self._longest, self._even)
        lengths = (None, None) if self._use_cuda_graph else (self._longest, self._pages.most)
        call = Call(mask_of(self._way, None, lengths), float(self._way.sm_scale))
        want = Result(q_nope.dtype, return_lse, out, lse, return_lse_base_on_e)
        return finished(call, want, lambda **keywords: attend(queries, k, v, pages, self._way, q_nope.dtype, **keywords))

    def _run_table(self, name: str, q_nope, q_pe, ckv_cache, kpe_cache, kv_len: Tensor | None, page_table: Tensor | None, scaling, want: Result):
        """One query a sequence, over a page table; the scale is that of DeepSeek-V2's heads of 128 + 64."""
        if kv_len is None or page_table is None or len(q_nope) != len(kv_len):
            raise ValueError(f"{name}: kv_len, page_table and one query a sequence go together; give kv_len [batch] and page_table [batch, most pages]")
        pages = Pages(page_table.int(), kv_len.int(), ckv_cache.shape[1], page_table.shape[1] * ckv_cache.shape[1])
        k, v, pages = latent(ckv_cache, kpe_cache, pages, q_nope.dtype, scaling)
        queries = Queries(torch.cat((q_nope, q_pe), -1), torch.arange(len(q_nope) + 1, dtype=torch.int32, device=q_nope.device), 1, 1)
        way = Way(True)
        call = Call(mask_of(way, None, (1, None)), (128 + q_pe.shape[-1]) ** -0.5)
        return finished(call, want, lambda **keywords: attend(queries, k, v, pages, way, q_nope.dtype, **keywords))


def refuse_scales(name: str, dtype: torch.dtype, ckv_scale, ckv_scale_arr, kpe_scale) -> None:
    """Scales come with a cache in float8, and only with one."""
    given = [x for x in (ckv_scale, ckv_scale_arr, kpe_scale) if x is not None]
    if dtype.itemsize > 1 and given:
        raise ValueError(f"{name}: ckv_scale / ckv_scale_arr / kpe_scale are only valid when kv_data_type is FP8; this cache is {dtype}, so leave them out")
    if dtype.itemsize > 1:
        return
    if (ckv_scale is None) == (ckv_scale_arr is None):
        raise ValueError(f"{name}: Exactly one of ckv_scale or ckv_scale_arr is required when kv_data_type is FP8")
    if kpe_scale is None:
        raise ValueError(f"{name}: kpe_scale is required when kv_data_type is FP8")
    for argument, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if scale is not None and not 0 < float(scale) < math.inf:
            raise ValueError(f"{name}: {argument} must be a finite positive value, got {scale}")


def scaling_of(ckv_scale, ckv_scale_arr, kpe_scale) -> tuple | None:
    """The scales of the two parts of a cache in float8; None without."""
    return None if ckv_scale is ckv_scale_arr is None else (ckv_scale if ckv_scale_arr is None else ckv_scale_arr, kpe_scale)


def latent(ckv: Tensor, kpe: Tensor, pages: Pages, dtype: torch.dtype, scaling: tuple | None) -> tuple[Tensor, Tensor, Pages]:
    """Keys `[pages, page, 1, dim_ckv + dim_kpe]`, the values in them, and the table: in place where the parts lie side by side, else copied."""
    for name, part in (("ckv_cache", ckv), ("kpe_cache", kpe)):
        if not isinstance(part, Tensor) or part.ndim != 3 or part.shape[:2] != ckv.shape[:2]:
            given = f"{name} is {kind_of(part)}" + f" beside ckv_cache {list(ckv.shape)}" * (name == "kpe_cache")
            raise ValueError(f"BatchMLAPagedAttentionWrapper.run: {given}; give [pages, page, columns], both of the same pages")
    pages.check(len(ckv))
    width, whole = ckv.shape[-1], ckv.shape[-1] + kpe.shape[-1]
    beside = kpe.data_ptr() == ckv.data_ptr() + width * ckv.element_size() and kpe.stride() == ckv.stride() and ckv.stride(1) >= whole
    if ckv.dtype == dtype and ckv.stride(-1) == 1 and (whole == width or beside):
        k = ckv.as_strided((*ckv.shape[:2], 1, whole), (*ckv.stride()[:2], whole, 1))
        return k, k[..., :width], pages
    table = pages.table if pages.table.numel() < len(ckv) else None  # None: all pages are no more than those that the table may name
    take = lambda pool: pool if table is None else taken(pool, table).flatten(0, 1)  # noqa: E731
    parts = [take(part).to(dtype) for part in (ckv, kpe)]
    if scaling is not None:
        ckv_scale, kpe_scale = scaling
        if isinstance(ckv_scale, Tensor) and ckv_scale.ndim > 1:
            if ckv_scale.shape != (*ckv.shape[:2], width // 128):
                raise ValueError(f"Invalid shape of ckv_scale_arr: {list(ckv_scale.shape)}; give float32 {[*ckv.shape[:2], width // 128]}")
            ckv_scale = take(ckv_scale).repeat_interleave(128, -1)
        parts = [(part.float() * scale).to(dtype) for part, scale in zip(parts, (ckv_scale, kpe_scale), strict=True)]
    k = torch.cat(parts, -1).unsqueeze(2)
    if table is not None:
        pages = pages._replace(table=torch.arange(len(k), dtype=torch.int32, device=k.device).view(table.shape), last=-1)
    return k, k[..., :width], pages
