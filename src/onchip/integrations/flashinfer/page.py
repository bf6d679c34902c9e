"""`flashinfer.page`: appending to paged caches, and the index arithmetic beside it; in plain torch, without a wait for the device."""

import torch
from torch import Tensor

from onchip.core.arguments import check_count, kind_of
from onchip.integrations.flash_attn.rotary import sequence_of
from onchip.integrations.flashinfer.call import check_integers
from onchip.integrations.flashinfer.pages import unpacked


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Keys of each sequence, `[batch]`."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,  # [batch + 1]
    seq_lens: Tensor,  # [batch]: keys, the appended ones included
    nnz: int,
    batch_indices: Tensor | None = None,  # [nnz] int32, written to where given
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequence and the position in it of each appended token, int32 `[nnz]`; -1 and 0 past the last one."""
    if isinstance(nnz, Tensor) and not nnz.ndim and not nnz.is_floating_point():
        nnz = int(nnz)  # callers give append_indptr[-1]: FlashInfer waits for it too
    check_count("get_batch_indices_positions", 0, nnz=nnz)
    check_integers("get_batch_indices_positions", "append_indptr", append_indptr)
    if not isinstance(seq_lens, Tensor) or seq_lens.shape != (len(append_indptr) - 1,):
        raise ValueError(f"get_batch_indices_positions: seq_lens is {kind_of(seq_lens)}; give [{len(append_indptr) - 1}], the keys of each sequence")
    device, found = append_indptr.device, []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is not None and (given.shape != (nnz,) or given.dtype != torch.int32 or given.device != device):
            raise ValueError(f"get_batch_indices_positions: {name} is {given.dtype} {list(given.shape)}; give int32 [{nnz}] on {device}, or None")
    sequence, index = sequence_of(append_indptr, nnz)
    inside = torch.arange(nnz, device=device) < append_indptr[-1]
    first = seq_lens.to(device) - append_indptr.diff()
    for given, values, outside in ((batch_indices, sequence, -1), (positions, first[sequence] + index, 0)):
        values = torch.where(inside, values, outside).int()
        found.append(values if given is None else given.copy_(values))
    return tuple(found)


def append_paged_kv_cache(
    append_key: Tensor,  # [tokens, kv_heads, dim]
    append_value: Tensor,
    batch_indices: Tensor,  # [tokens]; a token of sequence -1 is not written
    positions: Tensor,  # [tokens]
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,  # not needed: the positions say where tokens go
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values to their pages in place, in the cache's dtype."""
    pools = unpacked("append_paged_kv_cache", paged_kv_cache, kv_layout)
    _append(list(zip(pools, (append_key, append_value), strict=True)), batch_indices, positions, kv_indices, kv_indptr)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,  # [tokens, dim_ckv]
    append_kpe: Tensor,  # [tokens, dim_kpe]
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,  # [pages, page, dim_ckv]
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """`append_paged_kv_cache` for latent keys and their rotated parts."""
    pairs = [(pool, new) for pool, new in ((ckv_cache, append_ckv), (kpe_cache, append_kpe)) if pool is not None]
    _append(pairs, batch_indices, positions, kv_indices, kv_indptr)


def check_append(pairs, batch_indices: Tensor, positions: Tensor, indices: Tensor, indptr: Tensor) -> None:
    """Whether shapes and kinds go together; raises ValueError."""
    tokens = len(batch_indices)
    for name, given in (("batch_indices", batch_indices), ("positions", positions), ("kv_indices", indices), ("kv_indptr", indptr)):
        if given.ndim != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"append: {name} is {given.dtype} {list(given.shape)}; give whole numbers of one dimension")
    if len(positions) != tokens or len(indptr) < 2:
        raise ValueError(f"append: {tokens} batch_indices, {len(positions)} positions, kv_indptr of {len(indptr)}; give one of each a token, and [batch + 1]")
    for pool, new in pairs:
        if pool.shape[:2] != pairs[0][0].shape[:2] or new.shape != (tokens, *pool.shape[2:]):
            given = f"a cache {list(pool.shape)} beside one {list(pairs[0][0].shape)}, and new rows {list(new.shape)} for {tokens} tokens"
            raise ValueError(f"append: {given}; give caches of the same pages and rows {[tokens, *pool.shape[2:]]}")


def _append(pairs: list[tuple[Tensor, Tensor]], batch_indices: Tensor, positions: Tensor, indices: Tensor, indptr: Tensor) -> None:
    """Write `new` `[tokens, ...]` to `pool` `[pages, page, ...]` for each pair.

    A token that is not written takes another one's place and value, so that all writes agree; where no token is, the old value stays.
    """
    if not len(batch_indices) or not pairs:
        return
    check_append(pairs, batch_indices, positions, indices, indptr)
    device = pairs[0][0].device
    batch_indices, positions, indices, indptr = (t.to(device) for t in (batch_indices, positions, indices, indptr))
    written = batch_indices >= 0
    token = torch.arange(len(written), device=device)
    token = torch.where(written, token, torch.where(written, token, 0).amax())
    if device.type == "cpu":
        pages, batch = len(pairs[0][0]), len(indptr) - 1
        if int(indptr[0]) < 0 or (indptr.diff() < 0).any():  # a sequence would be given pages of another, or the last ones of kv_indices
            raise ValueError(f"append: kv_indptr is {indptr.tolist()}; give [batch + 1], of 0 or more and never falling")
        if int(batch_indices.max()) >= batch or int(indptr[-1]) > len(indices):
            given = f"batch_indices up to {int(batch_indices.max())} beside {batch} page lists, which end at {int(indptr[-1])} of {len(indices)} kv_indices"
            raise ValueError(f"append: {given}; give kv_indptr [batch + 1] and the pages that it names")
        named = indices[int(indptr[0]) : int(indptr[-1])]
        if len(named) and not 0 <= int(named.min()) <= int(named.max()) < pages:
            raise ValueError(f"append: kv_indices are {int(named.min())} to {int(named.max())}; the cache has pages 0 to {pages - 1}")
        full = indptr.diff()[batch_indices.long().clamp(min=0)] * pairs[0][0].shape[1]
        if (written & ((positions < 0) | (positions >= full))).any():
            raise ValueError(
                f"append: positions up to {int(positions[written].max())} are past the pages of their sequences; give kv_indptr and kv_indices with room"
            )
    sequence, position, some = batch_indices[token].long().clamp(min=0), positions[token].long().clamp(min=0), written.any()
    for pool, new in pairs:
        page = pool.shape[1]
        row = indices[(indptr[sequence] + position // page).clamp(max=len(indices) - 1)].long()
        new = new.to(pool.dtype)
        if pool.dtype.itemsize == 1:  # torch does not index float8 everywhere
            pool, new = pool.view(torch.uint8), new.view(torch.uint8)
        place = (row, position % page)
        pool[place] = torch.where(some, new[token], pool[place])
