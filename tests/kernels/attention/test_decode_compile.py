"""Attention over pages, compiled for GPUs that are not here: decodes, and prefills."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")


from offline_attention import BF16, FP32, GPU, allowed, launched, meta, named, products, static, wide

from onchip.core import device as devices
from onchip.core import masks, scores
from onchip.core.formats import Codes, Format
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.kernels.attention import DECODE, hopper_decode, hopper_prefill, register_decode, triton_decode, triton_prefill, triton_shares
from onchip.ops.attention import PagedKV


def codes(form: Format, *slots) -> Codes:
    """Without memory, laid out as pages are."""
    pages, *sizes = slots
    return Codes.over(meta(pages, form.page_bytes(*sizes), dtype=torch.uint8), form, tuple(sizes))


def decode(arch, dim, page=16, heads=(32, 8), len_q=1, dtype=BF16, dim_v=0, extras=(), kv="", module=triton_decode, **mod):
    """32 sequences of 4096 keys."""
    p = Attention("decode", 32, len_q, 4096, *heads, dim, dtype, Causal(), "paged", page, dim_v=dim_v, extras=extras, kv=kv)
    p, x = static(p, Operands(dim**-0.5), **mod)
    ints = {"dtype": torch.int32}
    pools = (codes(Format.of(kv), 8192, page, p.kv_heads, d) if kv else meta(8192, page, p.kv_heads, d, dtype=dtype) for d in (dim, p.value_dim))
    cache = PagedKV(*pools, meta(32, 4096 // page, **ints), meta(32, **ints))
    how, facts = launched(module, arch, p, meta(32, len_q, p.heads, dim, dtype=dtype), cache, x)
    return how, facts["_partial"], facts["_merge" if module is triton_decode else "merge"]


# ---- on Hopper, and of codes on any


PAGED = {  # dim, page, mask or score, bytes that a thread may spill; with 24 registers the copying warp spilt 188 bytes at d128, page 16
    "d64, pages of 8": (64, 8, {}, 0),
    "d128": (128, 16, {}, 0),
    "d128, pages of 24": (128, 24, {}, 0),
    "d128 packed, pages of 1": (128, 1, {"tokens": 8192}, 92),  # outside of what computes
    "d128, pages of 1024": (128, 1024, {}, 0),
    "d128 window": (128, 16, {"band": Window(1024)}, 0),
    "d128 document": (128, 16, {"mask": masks.Document(meta(4, 8192, dtype=torch.int32))}, 20),
    "d128 packed, four heads in a tile's rows": (128, 16, {"tokens": 160}, 0),
    "d128 packed, pages of 64, full": (128, 64, {"tokens": 160, "band": Full()}, 0),
    "d256 packed": (256, 16, {"tokens": 8192}, 0),
}

MORE = ("d64, pages of 8", "d128", "d128, pages of 24", "d128, pages of 1024", "d128 window", "d128 document", "d128 packed, pages of 64, full", "d256 packed")


@pytest.mark.parametrize(("dim", "page", "how", "most"), named(PAGED, "d128 packed, four heads in a tile's rows", rest=MORE))
def test_hopper_paged(dim, page, how, most):
    """A box a page, or a piece of one, and 64 columns, its number by one instruction from the lane that holds it; or 16 bytes a thread. Little spills."""
    how = dict(how)
    tokens, band = how.pop("tokens", 0), how.pop("band", Causal())
    p = Attention("decode", 4, 2048, 8192, 32, 8, dim, BF16, band, "paged", page, tokens=tokens)
    p, x = static(p, Operands(dim**-0.5, meta(5, dtype=torch.int32) if tokens else None), **how)
    cache = PagedKV(meta(4096, page, 8, dim), meta(4096, page, 8, dim), meta(4, 8192 // page, dtype=torch.int32), meta(4, dtype=torch.int32))
    tiles, facts = launched(hopper_prefill, "sm_90", p, meta(*((tokens,) if tokens else (4, p.len_q)), 32, dim), cache, x, entry="launch_paged")
    assert ("_join_units" in facts) == (tiles.parts == 0) == (0 < tokens < 200) and all(f.spills == 0 for name, f in facts.items() if name != "_prefill")
    facts = facts["_prefill"]
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    assert products(tiles, facts, dim, None if "mask" in how else band) >= 2 * tiles.groups
    pages = tiles.n // min(tiles.n, page & -page) if page % 8 == 0 else 0  # of a tile, in pieces that TMA copies
    assert facts.tma_loads == dim // 64 * (tiles.groups + 4 * pages) and facts.ptx.count("redux.sync.add.s32") == 4 * pages
    rows = tiles.n * dim // 8 // (128 if dim <= 128 else 64)  # that a thread copies
    assert facts.ptx.count("cp.async.cg.shared.global") == (0 if pages else 4 * rows)
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx and "mma.sync" not in facts.ptx


HOPPER_DECODE = {  # dim, page, heads, len_q, what else
    "d64": (64, 16, (32, 8), 1, {}),
    "d128": (128, 16, (32, 8), 1, {}),
    "d128, pages of 256": (128, 256, (32, 8), 1, {}),
    "d128, 64 rows": (128, 16, (32, 8), 16, {}),
    "d128 window": (128, 16, (32, 8), 4, {"band": Window(1024)}),
    "d128 softcap, sinks": (128, 16, (32, 8), 1, {"score": scores.Softcap(30.0), "extras": ("sinks",)}),
    "d128 alibi": (128, 16, (32, 8), 1, {"score": scores.ALiBi(meta(32, dtype=FP32))}),
    "d128 batch_invariant": (128, 16, (32, 8), 1, {"extras": ("batch_invariant",)}),
    "d128, 300 sequences": (128, 16, (32, 8), 1, {"batch": 300}),
    "d256": (256, 16, (32, 8), 1, {}),
}


MORE_DECODE = ("d64", "d128", "d128, pages of 256", "d128, 64 rows", "d128 alibi", "d128 batch_invariant", "d128, 300 sequences")


@pytest.mark.parametrize(("dim", "page", "heads", "len_q", "how"), named(HOPPER_DECODE, "d128 softcap, sinks", rest=MORE_DECODE))
def test_hopper_decode(dim, page, heads, len_q, how):
    """Nothing spills and nothing waits for each product; a batch_invariant problem's merge has room beside it up to d128."""
    how = dict(how)
    batch, extras = how.pop("batch", 32), how.pop("extras", ())
    p = Attention("decode", batch, len_q, 8192, *heads, dim, BF16, how.pop("band", Causal()), "paged", page, extras=extras)
    p, x = static(p, Operands(dim**-0.5, sinks=meta(heads[0]) if "sinks" in extras else None), **how)
    ints = {"dtype": torch.int32}
    cache = PagedKV(meta(4096, page, heads[1], dim), meta(4096, page, heads[1], dim), meta(batch, 8192 // page, **ints), meta(batch, **ints))
    tiles, found = launched(hopper_decode, "sm_90", p, meta(batch, len_q, heads[0], dim), cache, x)
    facts, merge = found.pop("_decode"), found.pop("merge", None)
    assert facts.spills <= allowed(0) and not found, f"{tiles}: {facts.spills} bytes"
    assert (merge is None) == ("batch_invariant" not in extras) and (merge is None or merge.spills == 0)
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    each = 2 if dim <= 128 else 1  # programs a multiprocessor
    assert each * tiles.stages * tiles.n * dim * 4 >= 128 << 10  # bytes on their way
    assert each * (facts.shared + (1 << 10)) + (merge.shared + (1 << 10) if merge and dim == 128 else 0) <= 228 << 10
    assert facts.wgmma == 2 * (dim // 16 + tiles.n // 16)
    copies = 2 * max(1, tiles.n // page)  # of a tile
    assert facts.tma_loads in (dim // 64 * (1 + copies), dim // 64 * (1 + 2 * copies))  # where it is one page LLVM unrolls the loop
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx and "griddepcontrol.launch_dependents" in facts.ptx


REGISTERS = [  # 16 bits, and rows of 16; codes without a zero and with one, scores of two steps side by side and not; pages of 1; programs of fewer warps
    ("", 128, 16, (32, 8), 1, 32),
    ("e5m2", 256, 16, (32, 8), 1, 32),
    ("e4m3", 128, 1, (32, 8), 1, 32),
    ("int8", 128, 16, (64, 4), 1, 32),
    ("int4", 128, 16, (32, 8), 1, 128),
]
MORE_REGISTERS = [("", 128, 1, (32, 8), 1, 32), ("", 256, 16, (32, 8), 1, 32), ("int4", 128, 16, (32, 8), 1, 32), ("int4", 128, 256, (32, 8), 1, 32)]
MORE_REGISTERS += [("e4m3", 128, 16, (32, 1), 1, 32), ("", 64, 16, (32, 8), 4, 32), ("int8", 128, 16, (32, 8), 1, 32)]
MORE_REGISTERS += [(kv, 128, 16, (32, 8), 1, batch) for kv, batch in (("e4m3", 32), ("e4m3", 64), ("e4m3", 128), ("int8", 128))]


@pytest.mark.parametrize(("kv", "dim", "page", "heads", "len_q", "batch"), [*REGISTERS, *(pytest.param(*row, marks=wide) for row in MORE_REGISTERS)], ids=str)
def test_register_decode(kv, dim, page, heads, len_q, batch):
    """Keys and values come 16 bytes a thread and go to products as they lie: what is left of shuffles and shared memory is maxima, and a unit's end."""
    p = Attention("decode", batch, len_q, 4096, *heads, dim, BF16, Causal(), "paged", page, kv=kv)
    ints = {"dtype": torch.int32}
    pool = codes(Format.of(kv), 4096, page, heads[1], dim) if kv else meta(4096, page, heads[1], dim)
    cache = PagedKV(pool, pool, meta(batch, 4096 // page, **ints), meta(batch, **ints))
    tiles, found = launched(register_decode, "sm_90", p, meta(batch, len_q, heads[0], dim), cache, Operands(dim**-0.5))
    facts = found["_decode"]
    assert facts.spills <= allowed(80) and list(found) == ["_decode"], f"{tiles}: {facts.spills} bytes"  # all behind the loop
    bits = 4 if kv == "int4" else 8 if kv else 16
    assert facts.vector_loads >= 2 * tiles.n * dim * bits // 8 // 512  # of a warp's keys and values
    assert len(re.findall("shfl", facts.ptx)) <= 90 and facts.shared <= 16 << 10


# ---- on any GPU


@pytest.mark.parametrize(("arch", "dim", "page"), [pytest.param("sm_80", 128, 16, marks=wide), ("sm_90", 128, 12), ("sm_80", 256, 64), ("gfx942", 64, 16)])
def test_prefill_over_pages(arch, dim, page):
    """Keys come through cp.async, 16 bytes a thread, whatever the page; their pages are looked up beside them."""
    p = Attention("decode", 8, 512, 8192 // page * page, 32, 8, dim, BF16, Causal(), "paged", page, tokens=4096)
    cache = PagedKV(meta(4096, page, 8, dim), meta(4096, page, 8, dim), meta(8, 8192 // page, dtype=torch.int32), meta(8, dtype=torch.int32))
    x = Operands(dim**-0.5, meta(9, dtype=torch.int32))
    tiles, facts = launched(triton_prefill, arch, p, meta(4096, 32, dim), cache, x, entry="launch_paged")
    facts = facts["_prefill"]
    assert facts.shared <= GPU[arch].shared_memory, str(tiles)
    if arch == "gfx942":
        assert re.search(r"vgpr_spill_count:\s+0\b", facts.ptx) and "mfma" in facts.ptx and facts.vector_loads
    else:
        assert facts.spills <= 64, f"{tiles}: {facts.spills} bytes"
        assert "cp.async.cg" in facts.ptx and facts.vector_loads and bool(facts.wgmma) == (arch == "sm_90")


@pytest.mark.parametrize(("arch", "dim"), [("sm_80", 64), ("sm_80", 128), ("sm_90", 128)])
def test_decode_nvidia(arch, dim):
    """Pages come through cp.async, 16 bytes a thread, so that tiles in flight cost no registers."""
    how, facts, _ = decode(arch, dim)
    assert facts.spills == 0, str(how)
    assert "cp.async.cg" in facts.ptx and "mma.sync" in facts.ptx
    assert 2 * facts.shared <= GPU[arch].shared_memory  # two programs a multiprocessor


@pytest.mark.parametrize(("arch", "dim", "registers"), [("sm_80", 64, 80), ("sm_80", 128, 80), ("sm_90", 64, 105), ("sm_90", 128, 154)])
def test_what_decode_can_do_costs_a_plain_problem_nothing(arch, dim, registers):
    """As many registers as before the kernel knew of masks, scores and sinks."""
    _, facts, merge = decode(arch, dim)
    assert facts.registers <= registers and merge.registers <= 22


@pytest.mark.parametrize("form", ["", "e4m3", *(pytest.param(form, marks=wide) for form in ("int8", "int4")), "int4/32"])
def test_shares_wait_for_keys_alone(form):
    """Each warp has keys of its own: what one has computed goes through shared memory once a unit, not once a tile; codes become numbers in registers."""
    _, facts, _ = decode("sm_90", 128, kv=form, module=triton_shares)
    blocks = [block for block in re.split(r"\n(?=\$L__BB)", facts.ptx) if "mma.sync" in block]
    assert len(blocks) == 1 and facts.spills <= 48
    assert blocks[0].count("bar.sync") <= (2 if not form else 8 * (4 if "/" in form else 1) + 8)
    most = 32 * (2 if form else 1)  # of 4 numbers a thread: scales travel, codes and weights do not
    assert blocks[0].count("st.shared") <= (0 if not form else most) and blocks[0].count("ldmatrix") > 0
    assert {"": "mma.sync", "e4m3": "cvt.rn.f16x2.e4m3x2", "int8": "prmt", "int4": "0x000F000F", "int4/32": "0x000F000F"}[form] in blocks[0]
    assert facts.registers * 128 * 2 <= 1 << 16 and 2 * (facts.shared + 1024) <= 228 << 10  # two programs a multiprocessor


@pytest.mark.parametrize(
    ("arch", "mask"),
    named(
        {"sm_80": ("sm_80", None), "sm_80 window": ("sm_80", Window(4095)), "sm_90": ("sm_90", None), "sm_90 window": ("sm_90", Window(4095))},
        rest=("sm_80 window", "sm_90"),
    ),
)
def test_decode_softcap_d256(arch, mask):
    """Gemma 2: the cap is one instruction a score, and nothing spills."""
    how, facts, _ = decode(arch, 256, heads=(8, 4), score=scores.Softcap(50.0), mask=mask)
    assert facts.spills == 0, str(how)
    assert "tanh.approx" in facts.ptx and "cp.async.cg" in facts.ptx
    assert facts.registers * 32 * how.warps * 2 <= 1 << 16  # two programs a multiprocessor
    assert 2 * facts.shared <= GPU[arch].shared_memory


MODS = {
    "alibi": {"score": scores.ALiBi(meta(32, dtype=FP32))},
    "bias": {"score": scores.Bias(meta(32, 32, 1, 4096))},
    "padding": {"mask": masks.KeyPadding(meta(32, dtype=torch.int32))},
    "document": {"mask": masks.Document(meta(32, 4096, dtype=torch.int32))},
    "tree": {"mask": masks.Tree(meta(8, 8, dtype=torch.bool)), "len_q": 8},
}


@pytest.mark.parametrize("mod", named({name: (mod,) for name, mod in MODS.items()}, rest=("document",)))
def test_decode_mods(mod):
    how, facts, _ = decode("sm_90", 128, **mod)
    assert facts.spills <= 256, f"{how}: {facts.spills} bytes"
    assert "cp.async.cg" in facts.ptx and "mma.sync" in facts.ptx


@pytest.mark.parametrize("mod", [
    {"mask": masks.as_mask(lambda b, h, i, j: i > h)}, {"score": scores.chain(None, lambda s, b, h, i, j: (i + h).float(), None)},
    {"mask": masks.as_mask(lambda b, h, i, j: b < 3)}, {"mask": masks.as_mask(lambda b, h, i, j: j > 5)},
], ids=["mask of rows", "score of rows", "mask of sequences", "mask of keys"])  # fmt: skip
def test_shares_of_less_than_a_tile(mod):
    """Scores of a warp's own keys have an axis more than the rows that a function may look at alone."""
    how, facts, _ = decode("sm_90", 128, module=triton_shares, **mod)
    assert how.warps > 1 and facts.spills <= 64


@pytest.mark.parametrize(("arch", "dim", "dim_v", "heads", "dtype"), [
    ("sm_80", 576, 512, 16, BF16), ("sm_90", 576, 512, 64, BF16), ("sm_90", 256, 0, 16, FP32), ("gfx942", 576, 512, 16, BF16),
    pytest.param("sm_90", 64, 256, 32, BF16, marks=wide), pytest.param("sm_90", 192, 128, 64, BF16, marks=wide),
])  # fmt: skip
def test_decode_wide(arch, dim, dim_v, heads, dtype):
    """Values of another width than keys, and the latent keys of DeepSeek."""
    how, facts, _ = decode(arch, dim, heads=(heads, 1), dim_v=dim_v, dtype=dtype)
    assert facts.spills <= 256, f"{how}: {facts.spills} bytes"
    assert facts.shared <= GPU[arch].shared_memory


@pytest.mark.parametrize("name", devices.GPUS)
def test_every_gpu_has_a_split_that_fits(name):
    """Queries and weights once, and the keys and values in flight; on AMD queries are in registers by the time that keys come."""
    gpu = devices.gpu(name)
    for (dim, dim_v), dtype, len_q, batch in itertools.product(((8, 0), (256, 0), (192, 128), (512, 0), (576, 512)), (BF16, FP32), (1, 4), (1, 32, 1024)):
        p = Attention("decode", batch, len_q, 8192, 16, 1, dim, dtype, Causal(), "paged", 16, dim_v=dim_v)
        if DECODE.kernel("triton_decode").refuses(p, gpu):
            assert dim > 512 and dtype == FP32
            continue
        for extras in ((), ("batch_invariant",)):
            (how,) = triton_decode.configs(p._replace(extras=extras), gpu)
            rows, _ = triton_decode.row_tiles(p)
            width, width_v = triton_decode.block(p.dim), triton_decode.block(p.value_dim)
            once = rows * (width + how.n)
            tiles = how.n * (how.stages - 1) * (width + width_v) if how.stages > 1 else how.n * max(width, width_v)
            assert (max(once, tiles) if gpu.kind == "hip" else once + tiles) * dtype.itemsize <= gpu.shared_memory


@pytest.mark.parametrize("name", devices.GPUS)
def test_every_gpu_has_shares_that_fit(name):
    """Queries and weights once, and the keys and values in flight; on AMD queries are in registers by the time that keys come."""
    gpu = devices.gpu(name)
    for (dim, dim_v), dtype, len_q, batch in itertools.product(((8, 0), (256, 0), (192, 128), (512, 0), (576, 512)), (BF16, FP32), (1, 4), (1, 32, 1024)):
        p = Attention("decode", batch, len_q, 8192, 16, 1, dim, dtype, Causal(), "paged", 16, dim_v=dim_v)
        if DECODE.kernel("triton_shares").refuses(p, gpu):
            assert dim > 512 and dtype == FP32
            continue
        for extras in ((), ("batch_invariant",)):
            (how,) = triton_shares.configs(p._replace(extras=extras), gpu)
            rows, _ = triton_shares.row_tiles(p)
            width, width_v = triton_shares.block(p.dim), triton_shares.block(p.value_dim)
            once = 0 if how.apart else rows * (width + how.n)
            tiles = how.n * how.tiles * (width + width_v)
            assert (max(once, tiles) if gpu.kind == "hip" else once + tiles) * dtype.itemsize <= gpu.shared_memory


def test_decode_tf32():
    _, facts, _ = decode("sm_90", 128, dtype=FP32, extras=("tf32",))
    assert "tf32" in facts.ptx and facts.spills == 0
    assert "tf32" not in decode("sm_90", 64, dtype=FP32)[1].ptx


def test_decode_gfx942():
    how, facts, _ = decode("gfx942", 128)
    assert re.search(r"vgpr_spill_count:\s+0\b", facts.ptx) and "mfma" in facts.ptx and facts.vector_loads, str(how)
    assert facts.shared <= GPU["gfx942"].shared_memory


def test_merge_reads_shares_in_vectors():
    _, _, facts = decode("sm_90", 128, heads=(4, 4))
    assert facts.spills == 0 and facts.vector_loads
