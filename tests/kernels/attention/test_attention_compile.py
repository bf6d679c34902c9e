"""The attention kernels compiled for GPUs that are not here: spills, and the instructions that make them fast."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from offline import NEWEST, compiled
from onchip.core import device as devices
from onchip.core import masks, scores
from onchip.core.formats import Codes, Format
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scales import Scales
from onchip.kernels.attention import (
    DECODE,
    PREFILL,
    hopper_backward,
    hopper_backward_ordered,
    hopper_decode,
    hopper_fp8,
    hopper_fp8_backward,
    hopper_prefill,
    register_decode,
    tile,
    triton_backward,
    triton_decode,
    triton_prefill,
    triton_shares,
)
from onchip.kernels.attention.texts import distance_axes, is_tanh, key_tile, line_of, pair_tile
from onchip.ops.attention import PagedKV

BF16, FP32 = torch.bfloat16, torch.float32
GPU = {"sm_80": devices.gpu("A100"), "sm_90": devices.gpu("H200"), "gfx942": devices.gpu("MI300X")}


# ---- what a launch compiles


def meta(*shape, dtype=BF16):
    """A tensor without memory: a launch looks at its kind alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(module, arch: str, p: Attention, *inputs, returns=(True,), entry="launch"):
    """The first configuration of `p` on `arch`, and what each kernel that a launch starts becomes there, {name: Facts}; with LSE, and TMA if `arch` has it."""
    if not isinstance(triton_decode._partial, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    calls, how = [], module.configs(p, GPU[arch])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **rest: calls.append((kernel, args, rest)))
        for one in (tile, module):
            patch.setattr(one, "fast", lambda q: arch != "gfx942" and q.dtype != FP32, raising=False)
        patch.setattr(module, "has_tma", lambda device: arch == "sm_90", raising=False)
        getattr(module, entry)(p, how, *inputs, *returns)
    found = {}
    for kernel, args, rest in calls:  # one that is started again counts its starts
        again = sum(name.partition(" ")[0] == kernel.__name__ for name in found)
        facts = found[f"{kernel.__name__} {again + 1}" if again else kernel.__name__] = compiled(kernel, args, rest, arch)
        dead = [at for at in facts.barriers if at < facts.shared - 1024]
        assert not dead or "mbarrier.inval" in facts.ptx, f"{kernel.__name__}: mbarriers that nobody uses, at {dead}, where buffers lie later"
    return how, found


def static(p: Attention, x: Operands, mask=None, score=None):
    """A Problem and its operands with a mask and a score."""
    if mask is not None:
        p, x = p._replace(mask=mask.static()), x._replace(mask=mask.tensors)
    if score is not None:
        p, x = p._replace(score=score.static()), x._replace(score=score.tensors)
    return p, x


def prefill(arch, dim, band, packed=False, module=triton_prefill, len_q=4096, **mod):
    """Four sequences of 4096 tokens in bf16, 4 heads a group."""
    rest = ("packed", 0, 4 * len_q) if packed else ()
    p = Attention("prefill", 4, len_q, len_q, 32, 8, dim, BF16, band, *rest)
    tokens = (4 * len_q,) if packed else (4, len_q)
    offsets = meta(5, dtype=torch.int32) if packed else None
    p, x = static(p, Operands(dim**-0.5, offsets, offsets), **mod)
    tiles, facts = launched(module, arch, p, *(meta(*tokens, heads, dim) for heads in (32, 8, 8)), x)
    return tiles, facts["_prefill"]


def decode(arch, dim, page=16, heads=(32, 8), len_q=1, dtype=BF16, dim_v=0, extras=(), kv="", module=triton_decode, **mod):
    """32 sequences of 4096 keys."""
    p = Attention("decode", 32, len_q, 4096, *heads, dim, dtype, Causal(), "paged", page, dim_v=dim_v, extras=extras, kv=kv)
    p, x = static(p, Operands(dim**-0.5), **mod)
    ints = {"dtype": torch.int32}
    pools = (codes(Format.of(kv), 8192, page, p.kv_heads, d) if kv else meta(8192, page, p.kv_heads, d, dtype=dtype) for d in (dim, p.value_dim))
    cache = PagedKV(*pools, meta(32, 4096 // page, **ints), meta(32, **ints))
    how, facts = launched(module, arch, p, meta(32, len_q, p.heads, dim, dtype=dtype), cache, x)
    return how, facts["_partial"], facts["_merge" if module is triton_decode else "merge"]


def codes(form: Format, *slots) -> Codes:
    """Without memory, laid out as pages are."""
    pages, *sizes = slots
    return Codes.over(meta(pages, form.page_bytes(*sizes), dtype=torch.uint8), form, tuple(sizes))


# ---- prefill


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("mask", [Causal(), Window(1024)], ids=str)
def test_prefill_sm_90_d64(mask, packed):
    """Everything in registers, products on wgmma, K and V through TMA."""
    _, facts = prefill("sm_90", 64, mask, packed)
    assert facts.spills == 0
    assert facts.wgmma and facts.tma_loads
    assert facts.ptx.count("cp.async.cg") == 0


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_prefill_sm_90_d128(mask):
    """128x64 of 4 warps spills a little, outside of the loop, and was measured faster than tiles that do not."""
    tiles, facts = prefill("sm_90", 128, mask)
    assert facts.spills <= 256, f"{tiles}: {facts.spills} bytes"
    assert facts.wgmma and facts.tma_loads


def test_prefill_sm_80():
    """No TMA: keys and values come through cp.async, 16 bytes a thread, and the products are mma.sync."""
    _, facts = prefill("sm_80", 64, Causal())
    assert facts.spills == 0
    assert facts.tma_loads == facts.wgmma == 0
    assert "mma.sync" in facts.ptx and "cp.async.cg" in facts.ptx and facts.vector_loads


def test_prefill_gfx942():
    tiles, facts = prefill("gfx942", 64, Causal())
    assert facts.shared <= GPU["gfx942"].shared_memory, str(tiles)
    assert re.search(r"vgpr_spill_count:\s+0\b", facts.ptx) and "mfma" in facts.ptx and facts.vector_loads


def test_what_a_score_reads_a_pair_has_room():
    """Tables by query and key travel through shared memory beside K and V: with four of them the tiles are smaller."""
    tables = [meta(4, 4096, 4096, dtype=torch.int32) for _ in range(4)]
    edges = scores.chain(None, lambda s, b, h, i, j: s + sum(t[b, i, j] for t in tables), None)
    tiles, facts = prefill("sm_90", 128, Full(), score=edges)
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)


@pytest.mark.parametrize(("arch", "dim", "page"), [("sm_80", 128, 16), ("sm_90", 128, 12), ("sm_80", 256, 64), ("gfx942", 64, 16)])
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


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", devices.GPUS)
def test_every_gpu_has_tiles_that_fit(name, dtype, dim):
    """In shared memory: queries once, keys and values once a stage; a grid of few programs gets small tiles first."""
    gpu = devices.gpu(name)
    for len_q in (1, 64, 8192):
        found = triton_prefill.configs(Attention("prefill", 1, len_q, 8192, 8, 8, dim, dtype, Causal()), gpu)
        assert found
        for tiles in found:
            assert (tiles.m + 2 * tiles.stages * tiles.n) * dim * dtype.itemsize <= gpu.shared_memory
        assert found[0].m <= max(16, 2 * len_q)


# ---- prefill on Hopper


def allowed(most: int) -> int:
    """Bytes of spills; by the newest Triton's ptxas several times as many, most of them the backward kernel's and those of three warpgroups at 64."""
    return max(most, 2600) if NEWEST else most


newest = pytest.mark.newest


def named(cases: dict, *also: str) -> list:
    """Cases by their names; those in `also` are compiled by the newest Triton too."""
    assert {*also} <= {*cases}
    return [pytest.param(*case, id=name, marks=[newest] * (name in also)) for name, case in cases.items()]


HOPPER = {  # dim, packed, mask or score: bytes that a thread may spill, all of them outside of the loops that matter; the newest ptxas spills more
    "d64 causal": (64, False, {"band": Causal(), "len_q": 16384}, 0),
    "d64 short causal": (64, False, {"band": Causal(), "len_q": 1024}, 0),
    "d128": (128, False, {}, 0),
    "d128 window": (128, False, {"band": Window(1024)}, 0),
    "d128 packed": (128, True, {"band": Causal()}, 0),
    "d128 softcap": (128, False, {"band": Causal(), "score": scores.Softcap(30.0)}, 0),
    "d64 softcap": (64, False, {"score": scores.Softcap(30.0)}, 0),
    "d128 ALiBi": (128, False, {"score": scores.ALiBi(meta(32, dtype=FP32))}, 64),
    "d128 document": (128, False, {"mask": masks.Document(meta(4, 4096, dtype=torch.int32))}, 0),
    "d256 causal": (256, False, {"band": Causal()}, 0),
    "d128 heads alone": (128, False, {"mask": masks.MaskMod(lambda b, h, i, j: h == 2), "score": scores.ScoreMod(lambda s, b, h, i, j: h.float())}, 0),
    "d128 activation": (128, False, {"score": scores.ScoreMod(lambda s, b, h, i, j: torch.log(torch.nn.functional.gelu(s) + 1.0))}, 0),
    "d128 bias": (128, False, {"score": scores.Bias(meta(4, 32, 4096, 4096))}, 0),
    "d128 bias in fp32": (128, False, {"score": scores.Bias(meta(4096, 4096, dtype=FP32))}, 0),
    "d256 bias": (256, False, {"score": scores.Bias(meta(4096, 4096))}, 0),
    "d128 bias of keys": (128, False, {"score": scores.Bias(meta(32, 1, 4096))}, 0),
    "d128 distances": (128, False, {"score": scores.RelativeBias(meta(32, 257, dtype=FP32))}, 0),
    "d64 distances": (64, False, {"band": Causal(), "len_q": 16384, "score": scores.BucketBias(meta(32, 32, dtype=FP32))}, 0),
    "d64 bias of keys": (64, False, {"band": Causal(), "len_q": 16384, "score": scores.Bias(meta(1, 4096, dtype=torch.float16))}, 0),
}


@pytest.mark.parametrize(("dim", "packed", "how", "most"), named(HOPPER, "d64 causal", "d128 packed", "d128 document", "d256 bias"))
def test_hopper_prefill(dim, packed, how, most):
    """Every product on wgmma, every tile through TMA, no wait for a product that ptxas adds, and the copying warp gives its registers away."""
    tiles, facts = prefill("sm_90", dim, packed=packed, module=hopper_prefill, **{"band": Full(), **how})
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    text = how["score"].static().text if "score" in how else ""
    of_scores = dim // 16 + (key_tile(text) is not None)  # and a bias of keys
    steps = of_scores + (tiles.n // 16)  # of one tile of scores, and of one of the output
    sides = 2 * bool(text and line_of(text))  # loops for tiles before where ALiBi's lines bend, and behind it: one product more for a tile's scores
    far = bool(text) and distance_axes(text) is not None
    bold = dim <= 128 and (not text or far or hopper_prefill.only_adds(text))
    again = sides * (of_scores + 1) if sides else of_scores * bold  # the scores of a tile that is done over another maximum
    halves = tiles.n == 128 and isinstance(how.get("band"), Causal | Window) and (not text or is_tanh(text))
    once = facts.wgmma - tiles.groups * (again + sides) - (tiles.groups - 1) * of_scores * halves  # of a first tile's left half, of all but the last rows
    assert once % steps == 0 and once >= 2 * steps * tiles.groups and "mma.sync" not in facts.ptx
    loads = len(re.findall(r"ld\.global\S*\.v4", facts.ptx))  # each is 4 of a thread's n / 2 scores
    assert not far or loads == (once // steps + tiles.groups) * tiles.n // 8
    tile, row = (pair_tile(text), key_tile(text)) if text else (None, None)
    boxes = 0 if tile is None else tiles.groups * tiles.n * tile.dtype.itemsize // 128  # 128 bytes wide: of a tile that a score reads, and of a bias of keys
    boxes += 0 if row is None else tiles.n // 64
    assert facts.tma_loads == dim // 64 * (tiles.groups + 4) + 2 * boxes  # queries, and of keys and values a tile's first and the others
    assert "cp.async.cg" not in facts.ptx and facts.ptx.count("cp.async.bulk.tensor.4d.global") == (0 if packed else tiles.groups)
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert max(int(number) for number in re.findall(r"bar(?:rier)?\.sync\s+(\d+)(?:, 128)?;", facts.ptx)) < 6  # hardware barriers: the rest is ours


FOLDED = {  # dim, packed, queries, mask or score, and bytes that a thread may spill: of few queries, whose heads share a tile's rows
    "d64 full": (64, False, 200, {"band": Full()}, 0),
    "d128, one warpgroup": (128, False, 16, {}, 0),
    "d128 window": (128, False, 130, {"band": Window(1024)}, 0),
    "d128 ALiBi": (128, False, 130, {"score": scores.ALiBi(meta(32, dtype=FP32))}, 0),
    "d256 packed": (256, True, 130, {}, 0),
}


@pytest.mark.parametrize(("dim", "packed", "len_q", "how", "most"), named(FOLDED, "d256 packed"))
def test_hopper_folds_heads(dim, packed, len_q, how, most):
    """Queries come through TMA in five dimensions, by 64 columns, and so does the output of a dense batch leave; the rest is as with one head a tile."""
    tiles, facts = prefill("sm_90", dim, packed=packed, module=hopper_prefill, len_q=len_q, **{"band": Causal(), **how})
    assert tiles.pack == 4 and facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.ptx.count("cp.async.bulk.tensor.5d.shared") == dim // 64 * tiles.groups
    assert facts.ptx.count("cp.async.bulk.tensor.5d.global") == (0 if packed else tiles.groups)
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx and "mma.sync" not in facts.ptx


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


@pytest.mark.parametrize(("dim", "page", "how", "most"), named(PAGED, "d128", "d128 packed, four heads in a tile's rows"))
def test_hopper_paged(dim, page, how, most):
    """A box a page, or a piece of one, and 64 columns, its number by one instruction from the lane that holds it; or 16 bytes a thread. Little spills."""
    how = dict(how)
    tokens = how.pop("tokens", 0)
    p = Attention("decode", 4, how.pop("len_q", 2048), 8192, 32, 8, dim, BF16, how.pop("band", Causal()), "paged", page, tokens=tokens)
    p, x = static(p, Operands(dim**-0.5, meta(5, dtype=torch.int32) if tokens else None), **how)
    cache = PagedKV(meta(4096, page, 8, dim), meta(4096, page, 8, dim), meta(4, 8192 // page, dtype=torch.int32), meta(4, dtype=torch.int32))
    tiles, facts = launched(hopper_prefill, "sm_90", p, meta(*((tokens,) if tokens else (4, p.len_q)), 32, dim), cache, x, entry="launch_paged")
    facts = facts["_prefill"]
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
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


@pytest.mark.parametrize(("dim", "page", "heads", "len_q", "how"), named(HOPPER_DECODE, "d64", "d128 softcap, sinks", "d256"))
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


REGISTERS = [("", 128, 16, (32, 8), 1), ("", 128, 1, (32, 8), 1), ("", 64, 16, (32, 8), 4), ("", 256, 16, (32, 8), 1), ("e4m3", 128, 16, (32, 8), 1)]
REGISTERS += [
    ("int8", 128, 16, (32, 8), 1),
    ("int8", 128, 16, (64, 4), 1),
    ("int4", 128, 16, (32, 8), 1),
    ("int4", 128, 256, (32, 8), 1),
    ("e5m2", 256, 16, (32, 8), 1),
    ("e4m3", 128, 1, (32, 8), 1),
    ("e4m3", 128, 16, (32, 1), 1),
]
REGISTERS = [(*row, 32) for row in REGISTERS] + [(kv, 128, 16, (32, 8), 1, batch) for kv, batch in (("e4m3", 64), ("e4m3", 128), ("int8", 128), ("int4", 128))]


@pytest.mark.parametrize(("kv", "dim", "page", "heads", "len_q", "batch"), REGISTERS, ids=str)
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


@pytest.mark.parametrize(("dim", "dim_v"), itertools.product((64, 128, 256), repeat=2))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_hopper_has_room_for_a_bias(dim, dim_v, dtype):
    """Beside queries, output, keys and values, with 3 KiB left for barriers; what has not been measured the menu leaves to Triton."""
    p, _ = static(Attention("prefill", 4, 4096, 4096, 32, 8, dim, BF16, dim_v=dim_v), Operands(1.0), score=scores.Bias(meta(4096, 4096, dtype=dtype)))
    refusals = PREFILL.kernel("hopper_prefill").refuses(p, GPU["sm_90"])
    assert len(refusals) == (dtype == FP32 and max(dim, dim_v) == 256)
    (tiles,) = hopper_prefill.configs(p, GPU["sm_90"])
    output = 0 if dim == dim_v >= 128 else dim_v
    shared = 2 * 64 * tiles.groups * (dim + output) + 2 * tiles.stages * tiles.n * (dim + dim_v) + tiles.stages * 64 * tiles.groups * tiles.n * dtype.itemsize
    assert shared + (3 << 10) <= GPU["sm_90"].shared_memory


@pytest.mark.parametrize(("dtype", "widening"), [(BF16, "and.b32 %r\\d+, %r\\d+, 0xffff0000;"), (torch.float16, "cvt.f32.f16")], ids=["bf16", "fp16"])
def test_hopper_takes_a_bias_by_matrices(dtype, widening):
    """Of a tile of 64 x 128 in 128 threads 8 loads of four matrices, and of each value an instruction that widens it and a product.

    Two warpgroups have it in three places: the first tile, the others, and those done again over another maximum.
    """
    _, plain = prefill("sm_90", 128, module=hopper_prefill, band=Full())
    _, facts = prefill("sm_90", 128, module=hopper_prefill, band=Full(), score=scores.Bias(meta(4, 32, 4096, 4096, dtype=dtype)))
    count = [f.ptx.count("ldmatrix.sync.aligned.m8n8.x4") for f in (plain, facts)]
    assert count[1] - count[0] == 8 * 2 * 3
    assert len(re.findall(widening, facts.ptx)) == 64 * 2 * 3 // (2 if dtype == BF16 else 1)  # beside a shift of bf16's other half
    assert facts.ptx.count("ld.global") == plain.ptx.count("ld.global")
    assert facts.ptx.count("fma.rn.f32") == plain.ptx.count("fma.rn.f32")  # the product of queries and keys adds it
    products = [len(re.findall(r"mul(\.rn)?\.f32", f.ptx)) for f in (plain, facts)]
    assert products[1] - products[0] == 64 * 2 * 3 + 2, products  # and each warpgroup's factor
    assert facts.tma_loads - plain.tma_loads == 2 * 2 * 2  # a box of 64 columns for each half of a tile


BACKWARD = {  # head dimension, packed, mask, copies by TMA and its additions, and bytes that ptxas may spill, stores and loads together
    "d64 causal": (64, False, Causal(), (12, 6), 284),
    "d128 full": (128, False, Full(), (20, 6), 120),
    "d128 packed": (128, True, Causal(), (14, 7), 352),
    "d128 window": (128, False, Window(1024), (14, 8), 304),
}


def backward(dim, packed, band, dim_v=0, extras=(), module=hopper_backward, **mod):
    """Four sequences of 4096 tokens in bf16, 4 heads a group."""
    tokens = (4 * 4096,) if packed else (4, 4096)
    p = Attention("backward", 4, 4096, 4096, 32, 8, dim, BF16, band, *(("packed", 0, 4 * 4096) if packed else ()), dim_v=dim_v, extras=extras)
    offsets = meta(5, dtype=torch.int32) if packed else None
    p, x = static(p, Operands(dim**-0.5, offsets, offsets), **mod)
    q, k, v, out = (meta(*tokens, heads, d) for heads, d in ((32, dim), (8, dim), (8, p.value_dim), (32, p.value_dim)))
    lse = meta(32, 4 * 4096, dtype=FP32) if packed else meta(4, 32, 4096, dtype=FP32)
    return launched(module, "sm_90", p, q, k, v, out, lse, out, None, x, returns=())


@pytest.mark.parametrize(("packed", "most"), [(False, 0), (True, 128)], ids=["dense", "packed"])
def test_triton_backward(packed, most):
    """LSE and delta come by TMA as queries do: as single reads of each thread they took a third of a packed batch's loop over queries, and spilled in it."""
    _, found = backward(128, packed, Causal(), module=triton_backward)
    facts = found["_backward"]
    assert facts.spills <= allowed(most) and not facts.serialized
    assert facts.tma_loads and "cp.async.ca" not in facts.ptx and "mma.sync" not in facts.ptx


@pytest.mark.parametrize(("dim", "packed", "band", "copies", "most"), named(BACKWARD, "d64 causal", "d128 packed"))
def test_hopper_backward(dim, packed, band, copies, most):
    """Five products a tile on wgmma, everything through TMA, dQ by its reductions, and no product that ptxas waits for on its own."""
    tiles, found = backward(dim, packed, band)
    facts = found["_backward"]
    assert facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    steps = dim // 16 + dim // 16 + 2 * (tiles.m // 16) + tiles.n // 16  # of the scores, dP, dV and dK, and dQ
    blind = (band.right is not None) + (band.left is not None) if tiles.m == 64 else 0  # loops of dQ alone
    in_loops = facts.wgmma - (2 + blind) * (tiles.n // 16)  # each warpgroup adds a tile's last dQ behind them
    assert in_loops % (2 * steps) == 0 and in_loops >= 2 * 2 * steps and "mma.sync" not in facts.ptx
    assert (facts.tma_loads, facts.ptx.count("cp.reduce.async.bulk.tensor.3d")) == copies and "cp.async.cg" not in facts.ptx
    assert not facts.serialized and "setmaxnreg.dec" in facts.ptx


@pytest.mark.parametrize(("dim", "most"), [(128, 204)])
def test_hopper_backward_of_a_bias(dim, most):
    """Each warpgroup's part of a tile comes through TMA, and turned round by `ldmatrix`; it has room beside all else."""
    tiles, found = backward(dim, False, Full(), score=scores.Bias(meta(4, 32, 4096, 4096)))
    facts = found["_backward"]
    assert tiles.m == 64 and facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    assert len(re.findall(r"ldmatrix\S*\.trans", facts.ptx)) == 2 * 2 * 4, "each loop of each warpgroup, 64 x 64 in tiles of 16 x 16 and a quarter a warp"


@pytest.mark.parametrize(("dim", "learnt", "most"), [(128, False, 332), (128, True, 512), (64, True, 132)])
def test_hopper_backward_by_distance(dim, learnt, most):
    """16 bytes a load of what scores begin with, and 16 an addition to the sums; no room in shared memory."""
    tiles, found = backward(dim, False, Full(), score=scores.RelativeBias(meta(32, 257, dtype=FP32).requires_grad_(learnt)))
    facts = found["_backward"]
    assert tiles.m == 64 and facts.spills <= allowed(most), f"{tiles}: {facts.spills} bytes"
    assert len(re.findall(r"ld\.global\S*\.v4", facts.ptx)) == 2 * 2 * 8, "each loop of each warpgroup, 64 x 64 a quarter a warp"
    assert facts.ptx.count("red.relaxed.gpu.global.add.v4.f32") == 2 * 2 * 2 * learnt


ORDERED = {  # head dimension, that of values, packed, mask, of each pass copies by TMA, and bytes that it may spill, all of them outside of the loops
    "d64 full": (64, 0, False, Full(), (16, 12), (0, 0)),
    "d128 packed": (128, 0, True, Causal(), (22, 20), (0, 0)),
    "d256 window": (256, 0, False, Window(1024), (26, 42, 40), (0, 0, 0)),
    "d192 and 128": (192, 128, False, Causal(), (24, 32, 30), (0, 0, 0)),
    "d192 and 64": (192, 64, False, Causal(), (27, 25), (0, 0)),
}


@pytest.mark.parametrize(("dim", "dim_v", "packed", "band", "copies", "most"), named(ORDERED, "d128 packed", "d192 and 128"))
def test_hopper_backward_in_order(dim, dim_v, packed, band, copies, most):
    """Seven or eight products of a tile in passes; everything through TMA, nothing summed in memory, no product that ptxas waits for on its own."""
    tiles, found = backward(dim, packed, band, dim_v, ("deterministic",))
    facts_of = [facts for name, facts in found.items() if name.startswith("_backward_pass")]
    cuts, cuts_v = (hopper_backward_ordered.WIDTHS[hopper_backward_ordered.columns(d)] for d in (dim, dim_v or dim))
    for one, facts, spills in zip(tiles.passes, facts_of, most, strict=True):
        assert facts.spills <= allowed(spills), f"{one}: {facts.spills} bytes"
        assert facts.shared <= GPU["sm_90"].shared_memory
        steps = sum(cuts) // 16 + len(cuts_v) * one.stream // 16 * ("dV" in one.makes)  # of the scores, and dV
        if one.makes != "dV":
            steps += sum(cuts_v) // 16 + len(cuts) * one.stream // 16  # of dP, and dK or dQ
        assert facts.wgmma == 2 * 2 * steps  # of two warpgroups, in loops with and without a mask
        assert "mma.sync" not in facts.ptx and "cp.async.cg" not in facts.ptx and "cp.reduce" not in facts.ptx
        assert packed or "cp.async.bulk.tensor.4d.global" in facts.ptx
        assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert tuple(facts.tma_loads for facts in facts_of) == copies


@newest
def test_hopper_backward_in_order_under_a_mask():
    _, found = backward(128, False, Full(), extras=("deterministic",), mask=masks.Document(meta(4, 4096, dtype=torch.int32)))
    spills = [facts.spills for name, facts in found.items() if name.startswith("_backward_pass")]
    assert all(ours <= allowed(limit) for ours, limit in zip(spills, (8, 112), strict=True)), spills


def prefill_fp8(dim, mask, share=0, tokens=4096):
    """Four sequences in e4m3; `share`: keys and values that share a scale."""
    n = tokens // share if share else 1
    scales = Scales(*(meta(4, heads, n, dtype=FP32) for heads in (32, 8, 8)))
    p = Attention("prefill", 4, tokens, tokens, 32, 8, dim, torch.float8_e4m3fn, mask)
    inputs = (meta(4, tokens, heads, dim, dtype=p.dtype) for heads in (32, 8, 8))
    tiles, facts = launched(hopper_fp8, "sm_90", p, *inputs, Operands(dim**-0.5, scales=scales))
    return tiles, facts["_prefill_fp8"]


@pytest.mark.parametrize(
    ("dim", "mask", "share", "tokens", "spills"),
    [
        (64, Full(), 0, 4096, 0),
        (64, Window(1024), 128, 4096, 0),
        pytest.param(128, Causal(), 128, 4096, 0, marks=newest),
        (128, Window(1024), 0, 4096, 0),
        pytest.param(128, Full(), 0, 8192, 0, marks=newest),
        (128, Causal(), 0, 8192, 0),
        (128, Causal(), 1, 4096, 0),
        pytest.param(256, Causal(), 0, 4096, 0, marks=newest),
        (256, Full(), 128, 4096, 0),
    ],
    ids=str,
)
def test_hopper_fp8(dim, mask, share, tokens, spills):
    """Both products in e4m3, weights packed by the conversion alone; no byte is moved from one place of a register to another."""
    tiles, facts = prefill_fp8(dim, mask, share, tokens)
    assert facts.spills <= allowed(spills), f"{tiles}: {facts.spills} bytes"
    assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
    steps = dim // 32 + (128 if share else tiles.n) // 32  # of one tile of scores, and of one of the output
    assert facts.wgmma % steps == 0 and facts.wgmma >= 2 * steps * tiles.groups and facts.ptx.count(".f32.e4m3.e4m3 ") == facts.wgmma
    assert facts.tma_loads == -(-dim // 128) * (tiles.groups + 2) + 2  # boxes of 128 bytes: of queries, and of a first tile and others
    assert "prmt.b32" not in facts.ptx and not facts.serialized and "setmaxnreg.dec" in facts.ptx


FP8_BACKWARD = {  # head dimension, mask, scales for 128 tokens, and bytes that the passes of dQ and of dK and dV may spill
    "d64 causal": (64, Causal(), True, (0, 84)),
    "d128": (128, Full(), False, (0, 0)),
    "d128 window": (128, Window(1024), True, (48, 28)),
}


@pytest.mark.parametrize(("dim", "mask", "blocks", "most"), named(FP8_BACKWARD, "d64 causal"))
def test_hopper_fp8_backward(dim, mask, blocks, most):
    """Three products of each tile and four, with P and dS in e5m2 beside e4m3; the first operand of each sum comes from registers without a shuffle."""
    p = Attention("backward", 4, 4096, 4096, 32, 8, dim, torch.float8_e4m3fn, mask)
    scales = Scales(*(meta(4, heads, 32 if blocks else 1, dtype=FP32) for heads in (32, 8, 8)))
    inputs = [meta(4, 4096, heads, dim, dtype=p.dtype) for heads in (32, 8, 8)]
    out, lse = meta(4, 4096, 32, dim), meta(4, 32, 4096, dtype=FP32)
    tiles, found = launched(hopper_fp8_backward, "sm_90", p, *inputs, out, lse, out, None, Operands(dim**-0.5, scales=scales), returns=())
    passes = [facts for name, facts in found.items() if name.startswith("_backward_fp8")]
    kinds = ((tiles.groups, 1, tiles.keys), (2, 2, tiles.queries))  # warpgroups, and products with P or dS
    for facts, spills, (groups, mixed, stream) in zip(passes, most, kinds, strict=True):
        assert facts.spills <= allowed(spills), f"{tiles}: {facts.spills} bytes"
        assert facts.shared <= GPU["sm_90"].shared_memory, str(tiles)
        loops = 2 * groups  # with and without a mask
        assert facts.ptx.count(".f32.e4m3.e4m3 ") == loops * 2 * dim // 32  # S and dP
        assert facts.ptx.count(".f32.e5m2.e4m3 ") == loops * mixed * stream // 32
        assert facts.wgmma == loops * (2 * dim + mixed * stream) // 32
        assert "prmt" not in facts.ptx and "cp.reduce" not in facts.ptx
        assert not facts.serialized and "setmaxnreg.dec" in facts.ptx
    assert [facts.tma_loads for facts in passes] == [18, 20]
    assert found["_of_output"].spills == found["_turn"].spills == 0


# ---- decode


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


@pytest.mark.parametrize("form", ["", "e4m3", "int8", "int4", "int4/32"])
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


@pytest.mark.parametrize("mask", [None, Window(4095)], ids=["all", "window"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
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


@pytest.mark.parametrize("name", MODS)
def test_decode_mods(name):
    how, facts, _ = decode("sm_90", 128, **MODS[name])
    assert facts.spills <= 256, f"{how}: {facts.spills} bytes"
    assert "cp.async.cg" in facts.ptx and "mma.sync" in facts.ptx


@pytest.mark.parametrize(("arch", "dim", "dim_v", "heads", "dtype"), [
    ("sm_90", 64, 256, 32, BF16), ("sm_90", 192, 128, 64, BF16), ("sm_80", 576, 512, 16, BF16), ("sm_90", 576, 512, 64, BF16),
    ("sm_90", 256, 0, 16, FP32), ("gfx942", 576, 512, 16, BF16),
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
