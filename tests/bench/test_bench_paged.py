"""The rows over a paged cache: their inputs, their truth, and the calls they make to FlashInfer, with stand-ins that have its signatures."""

import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import tiny
from onchip.bench import data, paged, paged_peers, peers, run, suite
from onchip.bench.suite import Row, Shared
from onchip.cache import sharing
from onchip.core import settings
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal
from onchip.core.problem import Attention, Operands, Rope
from onchip.dispatch import record
from onchip.kernels.attention import reference

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
PAGED = Attention("decode", 3, 1, 32, 4, 2, 16, FP32, Causal(), "paged", 8)
LATENT = PAGED._replace(kv_heads=1, dim=576, dim_v=512, extras=("latent",))
ROPE = Rope("rope_append", 48, 4, 2, 32, 32, BF16, "neox", False, True)
ROWS = {
    "even": Row(PAGED, "", ""),
    "uneven": Row(PAGED._replace(len_k=40), "", "", (40, 7, 9)),
    "four queries": Row(PAGED._replace(len_q=4), "", ""),
    "shared": Row(Shared("cascade", PAGED, 16), "", ""),
    "latent": Row(LATENT, "", ""),
    "latent in e4m3": Row(LATENT._replace(op="latent", dtype=BF16), "", ""),
    "mixed": Row(PAGED._replace(len_q=5, len_k=40, tokens=9), "", "", (40, 7, 9), (5, 1, 3)),
}

plain_torch = pytest.mark.skipif(settings.INTERPRET.read(), reason="times kernels, and the interpreter's time means nothing")


def made(name: str, **changed) -> paged.Paged:
    row = ROWS[name]
    return data.inputs(Row(row.problem._replace(**changed), "", "", row.lengths, row.queries), CPU)


# ---- rows


def test_rows_of_a_gpu():
    rows = {(row.group, row.x): row for row in suite.rows("decode", GPU)}
    base = _bytes(rows["decode in bf16", "32x4k"])
    for (group, x), row in rows.items():
        if group == "other heads":
            assert 0.5 <= _bytes(row) / base <= 2, x
    uneven, even = (rows["uneven lengths", x] for x in ("128k and 63 of 512", "even"))
    assert sum(uneven.lengths) == pytest.approx(64 * even.problem.len_k, rel=1e-3)
    mixed = rows["chunks of a prefill", "60 decodes and 4 chunks"]
    assert mixed.problem.tokens == sum(mixed.queries) == 60 + 4 * 512 and max(mixed.lengths) == mixed.problem.len_k
    assert {row.problem.kv for row in rows.values() if row.group == "append"} == {"", "e4m3", "int8", "int4"}
    assert not any(row.problem.op == "decode" for row in suite.rows("attention", GPU))


def _bytes(row: Row) -> int:
    p = row.problem
    return p.batch * p.len_k * p.kv_heads * (p.dim + p.value_dim) * 2


@pytest.mark.parametrize("page", [1, 8])
def test_a_table_has_each_page_once_and_the_shared_ones_in_each_row(page):
    table, pages = paged._table((40, 24, 33), 16, page, CPU)
    first, own = 16 // page, [-(-n // page) for n in (24, 8, 17)]
    assert pages == first + sum(own) and (table[:, :first] == table[0, :first]).all()
    used = [*table[0, :first].tolist(), *(x for row, n in zip(table[:, first:].tolist(), own, strict=True) for x in row[:n])]
    assert sorted(used) == list(range(pages))


# ---- cost and truth


def test_bytes_are_those_of_keys_and_values():
    assert made("even").cost.bytes == 3 * 32 * 2 * 2 * 16 * 4
    assert made("uneven").cost.bytes == (40 + 7 + 9) * 2 * 2 * 16 * 4
    assert data.inputs(ROWS["shared"], CPU).cost.bytes == (16 + 3 * 16) * 2 * 2 * 16 * 4
    assert made("latent").cost.bytes == 3 * 32 * 576 * 4
    assert made("latent in e4m3").cost.bytes == 3 * 32 * 656
    assert made("even", dim=64, kv="int4").cost.bytes == 3 * 32 * 2 * 2 * (32 + 4)
    assert made("even", dim=64, kv="int8/32").cost.bytes == 3 * 32 * 2 * 2 * (64 + 8)
    assert made("four queries").cost.flops == 3 * (29 + 30 + 31 + 32) * 4 * 2 * 32


@plain_torch
@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("shared", "mixed")])
def test_truth_is_the_reference_and_errors_show(name):
    inputs = made(name)
    right = paged_peers.onchip(inputs).run()
    assert inputs.error(right, None) <= inputs.tolerance and inputs.error(right, right) <= inputs.tolerance
    assert not inputs.error(right * 1.1, None) <= inputs.tolerance
    assert not inputs.error(right, right * 1.1) <= inputs.tolerance
    longest = max(range(3), key=inputs.lengths.__getitem__)
    for b in {longest, 2}:
        assert not inputs.error(right.index_fill(0, torch.tensor([b]), torch.nan), None) <= inputs.tolerance


@plain_torch
def test_a_shared_prefix_is_read_once_or_for_each(monkeypatch):
    monkeypatch.setattr(sharing, "CPU", tiny.SHARED)
    inputs = data.inputs(ROWS["shared"], CPU)
    for kind in (paged_peers.onchip, paged_peers.onchip_cascade):
        with record() as decisions:
            assert inputs.error(kind(inputs).run(), None) <= inputs.tolerance
        assert [d.problem.batch for d in decisions if d.problem.op == "decode"] == ([3] if kind is paged_peers.onchip else [1, 3])
    longer = torch.full((1,), 24, dtype=torch.int32)
    wrong = inputs.cache._replace(lengths=inputs.cache.lengths - longer)
    assert not inputs.error(paged_peers._attend(inputs, wrong)(), None) <= inputs.tolerance


@plain_torch
def test_packed_queries_are_judged_by_those_of_their_sequence():
    inputs = made("mixed")
    right = paged_peers.onchip(inputs).run()
    assert inputs.error(right, None) <= inputs.tolerance
    assert not inputs.error(right.roll(1, 0), None) <= inputs.tolerance
    assert inputs.cost.flops == (36 + 37 + 38 + 39 + 40 + 7 + 7 + 8 + 9) * 4 * 2 * 32


@plain_torch
@pytest.mark.parametrize("kv", ["e4m3", "e5m2", "int8", "int4", "int4/32"])
def test_quantised_caches_are_judged_by_what_they_stand_for(kv):
    inputs = made("even", dim=64, dtype=BF16, kv=kv)
    assert paged_peers.onchip(inputs).run() is not None
    error = inputs.error(paged_peers.onchip(inputs).run(), None)
    assert inputs.error(paged_peers.onchip_bf16(inputs).run(), None) < 1e-2 < inputs.tolerance
    assert 1e-3 < error <= inputs.tolerance  # it read codes, not what they stand for
    zeros = inputs.cache._replace(k=inputs.cache.k._replace(scale=inputs.cache.k.scale * 0), v=inputs.cache.v._replace(scale=inputs.cache.v.scale * 0))
    assert not inputs.error(paged_peers._attend(inputs, zeros)(), None) <= inputs.tolerance


def test_a_part_at_a_time_is_quantised_alike(monkeypatch):
    x = torch.randn(5, 8, 2, 64)
    for kv in ("e4m3", "int4/32"):
        whole = paged.quantised(x, kv)
        monkeypatch.setattr(paged, "PART", 2 * x[0].numel())
        for a, b in zip(whole.tensors, paged.quantised(x, kv).tensors, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        monkeypatch.undo()


@plain_torch
@pytest.mark.parametrize("kv", ["", "e4m3", "int8", "int4"])
def test_append_is_judged_by_what_lies_in_the_slots(kv):
    inputs = data.inputs(Row(ROPE._replace(kv=kv), "", ""), CPU)
    assert all(x.isnan().all() for x in (inputs.written(inputs.k), inputs.written(inputs.v)))
    call = paged_peers.onchip_append(inputs)
    call.run()
    q, k, v = call.result()
    assert inputs.error((q, k, v), None) <= inputs.tolerance
    for wrong in ((v, k, v), (q, q[:, :2], v), (q, k, k)):
        assert not inputs.error(tuple(x if x.shape == y.shape else y * 0 for x, y in zip(wrong, (q, k, v), strict=True)), None) <= inputs.tolerance


@plain_torch
def test_rows_are_measured(monkeypatch, tmp_path):
    rows = [*ROWS.values(), Row(PAGED._replace(dim=64, dtype=BF16, kv="int8"), "", "int8"), Row(ROPE, "append", "bf16")]
    monkeypatch.setitem(suite.SUITES, "decode", lambda _device, _quick: rows)
    monkeypatch.setattr(run, "QUICK", run.Effort(2, 0.002))
    result = json.loads(run.bench("decode", CPU, tmp_path, quick=True).read_text())
    for row in result["rows"]:
        assert not set(row["error"]) & {"row", "onchip, bf16"} and row["waits"] is None
    assert set(result["rows"][0]["seconds"]) == {"onchip", "torch SDPA, dense keys"}
    assert "of one length" in result["rows"][1]["error"]["torch SDPA, dense keys"]
    assert result["goals"] == [] and "Asked and measured" not in (tmp_path / "cpu" / "decode.html").read_text()


# ---- FlashInfer


def attend(q, pages, last, pools, page, scale, causal=True):
    """One sequence: q [queries, heads, dim] over its pages."""
    k, v = (pool[pages.long()].flatten(0, 1)[: (len(pages) - 1) * page + last] for pool in pools)
    p = PAGED if causal else PAGED._replace(mask=suite.Full())
    return reference.one(p, 0, q, k.float(), v.float(), Operands(scale))[0]


@pytest.fixture
def stand_ins(monkeypatch):
    """FlashInfer's wrappers, computed by the reference."""

    class Planned:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", **how):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
            self.how = how

        def note(self, rows, bounds, pages, last, page, dtypes):
            assert {x.dtype for x in (rows, bounds, pages, last)} == {torch.int32}
            self.page, self.dtypes = page, dtypes
            parts = zip(pairwise(rows.tolist()), pairwise(bounds.tolist()), last.tolist(), strict=True)
            self.sequences = [(slice(*of_q), pages[slice(*of_pages)], n) for of_q, of_pages, n in parts]

        def attend(self, q, pools, causal=True):
            assert (q.dtype, pools[0].dtype) == self.dtypes
            return torch.cat([attend(q[rows], pages, n, pools, self.page, q.shape[-1] ** -0.5, causal) for rows, pages, n in self.sequences])

    class Decode(Planned):
        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type, kv_data_type):
            rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
            self.note(rows, indptr, indices, last_page_len, page_size, (q_data_type, kv_data_type))

        def run(self, q, paged_kv_cache):
            assert q.ndim == 3 and "use_tensor_cores" in self.how
            return self.attend(q, paged_kv_cache)

    class Prefill(Planned):
        def plan(self, qo_indptr, indptr, indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal, q_data_type, kv_data_type):
            assert causal and self.how["backend"] in ("fa2", "fa3")
            self.note(qo_indptr, indptr, indices, last, page_size, (q_data_type, kv_data_type))

        def run(self, q, paged_kv_cache):
            return self.attend(q, paged_kv_cache)

    class Cascade:
        def __init__(self, num_levels, float_workspace_buffer, kv_layout):
            self.levels = [Planned(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

        def plan(self, rows, bounds, pages, last, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type):
            for level, *parts in zip(self.levels, rows, bounds, pages, last, strict=True):
                level.note(*parts, page_size, (q_data_type, q_data_type))

        def run(self, q, pools):
            (rows, shared, full), own = self.levels[0].sequences[0], self.levels[1].sequences
            assert rows == slice(0, len(q)) and full == self.levels[0].page
            return torch.cat([attend(q[at], torch.cat((shared, pages)), n, pools, full, q.shape[-1] ** -0.5) for at, pages, n in own])

    class Latent:
        def __init__(self, float_workspace_buffer, backend):
            assert backend == "auto"

        def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, **dtypes):
            assert (num_heads, head_dim_ckv, head_dim_kpe, causal) == (4, 512, 64, False) and set(dtypes) == {"q_data_type", "kv_data_type"}
            self.page, self.scale, self.rows = page_size, sm_scale, qo_indptr
            self.parts = [(kv_indices[a:b], n) for (a, b), n in zip(pairwise(kv_indptr.tolist()), kv_len_arr.tolist(), strict=True)]

        def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, return_lse):
            assert ckv_cache.ndim == kpe_cache.ndim == 3 and ckv_cache.is_contiguous() and kpe_cache.is_contiguous() and not return_lse
            pools, q = (torch.cat((ckv_cache, kpe_cache), -1)[:, :, None], ckv_cache[:, :, None]), torch.cat((q_nope, q_pe), -1)
            each = [(n - 1) % self.page + 1 for _, n in self.parts]
            parts = zip(q.split(1), self.parts, each, strict=True)
            return torch.cat([attend(row, pages, n, pools, self.page, self.scale) for row, (pages, _), n in parts])

    def turned(x, positions, table):
        cos, sin = table[positions.long()][:, None].chunk(2, -1)
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def rope(positions, query, key, head_size, cos_sin_cache):
        for x in (query, key):
            x.copy_(turned(x.unflatten(1, (-1, head_size)), positions, cos_sin_cache).flatten(1))

    def place(new, batch_indices, positions, cache, indices, indptr):
        at = indices[(indptr[batch_indices] + positions // cache.shape[1]).long()] * cache.shape[1] + positions % cache.shape[1]
        cache.view(-1, *cache.shape[2:])[at.long()] = new.to(cache.dtype)

    def append(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len):
        for new, cache in zip((append_key, append_value), paged_kv_cache, strict=True):
            place(new, batch_indices, positions, cache, kv_indices, kv_indptr)

    def rope_quantise(q, k, q_nope, k_nope, v, table, pos_ids, paged_kv_cache, *, kv_indices, kv_indptr, batch_indices, positions, page_size, **out):
        assert q_nope.shape[-1] == k_nope.shape[-1] == 0 and out["quantize_dtype"] == paged_kv_cache[0].dtype and page_size == paged_kv_cache[0].shape[1]
        out["q_rope_out"].copy_(turned(q, pos_ids, table))
        for new, cache in zip((turned(k, pos_ids, table), v), paged_kv_cache, strict=True):
            wide = cache.float()
            place(new, batch_indices, positions, wide, kv_indices, kv_indptr)
            cache.copy_(wide)

    names = {"BatchDecodeWithPagedKVCacheWrapper": Decode, "BatchPrefillWithPagedKVCacheWrapper": Prefill, "MultiLevelCascadeAttentionWrapper": Cascade}
    names |= {"mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent), "rope": SimpleNamespace(rope_quantize_fp8_append_paged_kv_cache=rope_quantise)}
    names |= {"apply_rope_with_cos_sin_cache_inplace": rope, "append_paged_kv_cache": append}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**names))
    monkeypatch.setattr(paged_peers, "workspace", lambda device: torch.zeros(8, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("name", ["even", "uneven", "four queries"])
@pytest.mark.parametrize("kind", [paged_peers.flashinfer(True), paged_peers.flashinfer(False), paged_peers.flashinfer_fa3], ids=["tc", "cores", "fa3"])
def test_flashinfer_is_asked_for_the_same(stand_ins, name, kind):
    inputs = made(name)
    assert inputs.error(kind(inputs).run(), None) <= inputs.tolerance


def test_flashinfer_gets_packed_queries(stand_ins):
    inputs = made("mixed")
    assert inputs.error(paged_peers.flashinfer(True)(inputs).run(), None) <= inputs.tolerance


def test_flashinfer_reads_8_bits(stand_ins):
    inputs = made("even", dim=64, dtype=BF16, kv="e4m3")
    assert 1e-2 < inputs.error(paged_peers.flashinfer(True)(inputs).run(), None) <= inputs.tolerance


def test_flashinfer_shares_a_prefix(stand_ins):
    inputs = data.inputs(ROWS["shared"], CPU)
    assert inputs.error(paged_peers.flashinfer_cascade(inputs).run(), None) <= inputs.tolerance


def test_flashinfer_reads_latent_keys(stand_ins):
    inputs = made("latent")
    assert inputs.error(paged_peers.flashinfer_latent(inputs).run(), None) <= inputs.tolerance


@pytest.mark.parametrize("kv", ["", "e4m3"])
def test_flashinfer_appends(stand_ins, kv):
    """The same rows as ours, after ours has rotated them in place."""
    inputs = data.inputs(Row(ROPE._replace(kv=kv), "", ""), CPU)
    paged_peers.onchip_append(inputs).run()
    call = paged_peers.flashinfer_append(inputs)
    call.run()
    assert inputs.error(call.result(), None) <= inputs.tolerance


def test_dense_keys_are_of_one_length():
    with pytest.raises(Unsupported, match="lengths from 7 to 40"):
        paged_peers.sdpa(made("uneven"))


def test_rows_of_one_kind_have_peers_that_can_answer():
    for row in suite.rows("decode", GPU):
        able = [peer for peer in peers.PEERS if isinstance(row.problem, peer.kind) and peer.why_not(row.problem, GPU) is None]
        names = [peer.name for peer in able]
        assert names[0] == "onchip" and len(set(names)) == len(names)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("name", [*ROWS, "e4m3", "int4", "append", "append int8"])
def test_rows_go_into_graphs_on_a_gpu(name):
    """Small rows of each kind: captured, right, and nothing waits for the device."""
    sizes = {"batch": 3, "heads": 8, "kv_heads": 2, "dim": 64, "dtype": BF16}
    rows = {key: Row(_wide(row.problem, sizes), "", "", row.lengths) for key, row in ROWS.items()}
    rows |= {kv: Row(PAGED._replace(**sizes, kv=kv), "", "") for kv in ("e4m3", "int4")}
    rows |= {"append": Row(ROPE._replace(dim=64, rotary_dim=64), "", ""), "append int8": Row(ROPE._replace(dim=64, rotary_dim=64, kv="int8"), "", "")}
    entry = run.measure(rows[name], GPU, run._measured(GPU), run.Effort(2, 0.002))
    assert "onchip" in entry["seconds"] and not set(entry["error"]) & {"row", "onchip"}, entry["error"]
    assert entry["timed_by"].startswith("CUDA graph over") and entry["waits"] is False


def _wide(problem, sizes: dict):
    if isinstance(problem, Shared):
        return problem._replace(inner=_wide(problem.inner, sizes))
    return problem._replace(**sizes) if not problem.dim_v else problem._replace(heads=16, page=16, dtype=BF16)
