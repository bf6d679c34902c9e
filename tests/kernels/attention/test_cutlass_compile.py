"""The CuTe DSL kernels compiled for a Hopper GPU that is not here: products, copies, what ptxas spills. Needs the extra onchip[cutlass]."""

import ctypes
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="the extra onchip[cutlass] is not installed; `make cutlass` runs this")

from cutlass import Float32, Int32, Int64

from offline import _ptxas
from onchip.core import device as devices
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention, Operands
from onchip.core.scores import Bias, ScoreMod
from onchip.kernels.attention import cutlass_backward, statistics
from onchip.kernels.attention.pairs import BESIDE, pair_view
from onchip.kernels.attention.tile import ends
from onchip.kernels.cutlass import DTYPES, Compiled

H200 = devices.gpu("H200")
CASES = {  # head dimension, mask, whether packed, dtype, heads of q that share one of k, and bytes that ptxas may spill, stores and loads together: all of
    # them between two tiles of keys, but for one word of a step by distance (three of some that need the mask)
    "d64 full": (64, Full(), False, torch.bfloat16, 1, 0),
    "d64 causal": (64, Causal(), False, torch.bfloat16, 4, 72),
    "d64 packed": (64, Causal(), True, torch.bfloat16, 1, 72),
    "d128 full": (128, Full(), False, torch.bfloat16, 1, 60),
    "d128 causal": (128, Causal(), False, torch.bfloat16, 1, 72),
    "d128 causal, groups": (128, Causal(), False, torch.bfloat16, 8, 72),
    "d128 window": (128, Window(1024), False, torch.bfloat16, 1, 0),
    "d128 packed": (128, Causal(), True, torch.float16, 4, 72),
    "d96 top left": (96, Causal("top_left"), False, torch.float16, 1, 72),
    "d128 softcap": (128, Causal(), False, torch.bfloat16, 4, 240),
    "d96 packed softcap": (96, Causal(), True, torch.float16, 1, 240),
    "d64 distances": (64, Full(), False, torch.bfloat16, 1, 72),
    "d128 distances": (128, Full(), False, torch.bfloat16, 1, 72),
    "d128 causal distances": (128, Causal(), False, torch.bfloat16, 4, 80),
    "d64 bias": (64, Full(), False, torch.bfloat16, 1, 72),
    "d128 bias": (128, Full(), False, torch.bfloat16, 1, 72),
    "d128 causal bias": (128, Causal(), False, torch.bfloat16, 4, 80),
}


STAND_FOR_ALL = ("d64 causal", "d128 full", "d128 packed", "d128 softcap", "d64 bias", "d128 causal distances")  # each branch; the others are more forms


@pytest.mark.parametrize(
    ("name", "dim", "band", "packed", "dtype", "group", "most"),
    [pytest.param(name, *case, id=name, marks=[pytest.mark.wide] * (name not in STAND_FOR_ALL)) for name, case in CASES.items()],
)
def test_cutlass_backward(name, dim, band, packed, dtype, group, most, tmp_path, monkeypatch):
    """Five products a tile on wgmma that ptxas does not wait for; Q, K, V, dO, dK and dV by TMA; dQ added in bulk; nothing spilt in a loop."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    p = Attention("backward", 4, 16384, 16384, 16, 16 // group, dim, dtype, band, *(("packed", 0, 65536) if packed else ()))
    (tiles,) = cutlass_backward.configs(p, H200)
    scores = {"capped": "softcap" in name, "far": "distances" in name, "biased": "bias" in name}
    shape = cutlass_backward.Shape(DTYPES[dtype], *tiles[:3], dim, *ends(band), packed, grouped=group > 1, **scores)
    Compiled(cutlass_backward.Backward(shape), shape.dtype, cutlass_backward.ARGUMENTS, options=f"--gpu-arch=sm_90a --keep-ptx --dump-dir={tmp_path}")
    (file,) = tmp_path.glob("*.ptx")
    ptx = file.read_text()
    products = 2 * (shape.width // 16) + 2 * (tiles.m // 16) + tiles.n // 16  # of S and dP, dV and dK, and dQ
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * products + 2 * (tiles.n // 16)  # with and without the mask; without any key, and a tile's last dQ
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)) == 4 * shape.width // 64 + 2 * shape.biased
    assert len(re.findall(r"cp\.async\.bulk\.prefetch\.tensor", ptx)) == 2 * shape.biased
    alone = re.findall(r"elect\.sync[^$]*\$L\w+;[^$]*?cp\.async\.bulk\.prefetch\.tensor", ptx)  # in a branch of one lane's
    assert len(alone) == shape.biased
    assert len(re.findall(r"ldmatrix\S*\.x4\.trans", ptx)) == 2 * (tiles.m // 16) * shape.biased, "with and without the mask"
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)) == 2 * shape.width // 64
    (main,) = (entry for entry in ptx.split(".entry") if "wgmma" in entry)
    rows = len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.\w*32", main))
    assert rows == (2 * (tiles.m // 8) if shape.far else 0), "with and without the mask, 16 bytes for two queries of two keys"
    assert len(re.findall(r"cp\.reduce\.async\.bulk\.global", ptx)) == 1
    log = _ptxas(ptx, "sm_100")
    assert "serializ" not in log
    assert sum(int(size) for size in re.findall(r"(\d+) bytes spill", log)) <= most, log
    assert re.search(r"Used 168 registers", log)


class Recorder:
    """A compiled function that runs nothing: the values of each launch, named."""

    NAMES = (
        *("q", "k", "v", "out", "do", "dq", "dk", "dv", "lse", "d_lse", "lse2", "delta", "sums", "given", "counter"),
        *("listed", "q_offsets", "k_offsets", "q_used", "k_used"),
        *(f"{name}_{axis}" for name in ("q", "k", "v", "out", "do", "dq", "dk", "dv") for axis in ("sequence", "head", "row")),
        *("tiles", "places", "together", "batch", "kv_heads", "group", "len_q", "len_k", "pitch", "rows", "programs", "scale", "cap"),
        *("far", "far_sequence", "far_head"),
        *("bias", "bias_sequence", "bias_head", "bias_row", "bias_sequences", "bias_heads", "bias_rows"),
    )  # fmt: skip

    def __init__(self, *_arguments):
        self.calls = []

    def __call__(self, *values):
        self.calls.append(SimpleNamespace(**dict(zip(self.NAMES, values, strict=True))))


@pytest.mark.parametrize("much", [1, 1 << 18, 1 << 28])
@pytest.mark.parametrize("packed", [False, True])
def test_shares(much, packed, monkeypatch):
    """The launches of a problem: every head of every tensor once, sums of no more than may be held, no grid beyond what a GPU takes."""
    monkeypatch.setattr(statistics, "MUCH", much)
    monkeypatch.setattr(cutlass_backward, "Compiled", Recorder)
    monkeypatch.setattr(cutlass_backward, "_made", {})
    monkeypatch.setattr(cutlass_backward, "sequence_tiles", lambda p, x, n, of_keys: torch.zeros(9, 2, dtype=torch.int32))
    batch, n, kv_heads, group, dim = 6, 128, 4, 2, 64
    p = Attention("backward", batch, n, n, kv_heads * group, kv_heads, dim, torch.bfloat16, Causal(), *(("packed", 0, batch * n) if packed else ()))
    (tiles,) = cutlass_backward.configs(p, H200)
    lead = (batch * n,) if packed else (batch, n)
    of_q, of_k = (torch.zeros(*lead, heads, dim, dtype=torch.bfloat16) for heads in (p.heads, kv_heads))
    odd = torch.zeros(of_q.numel() + 1, dtype=torch.bfloat16)[1:].view(of_q.shape)  # no place for TMA
    lse = torch.zeros((p.heads, batch * n) if packed else (batch, p.heads, n))
    offsets = torch.arange(0, batch * n + 1, n, dtype=torch.int32)
    x = Operands(0.1, offsets, offsets) if packed else Operands(0.1)
    grads = cutlass_backward.launch(p, tiles, odd, of_k, of_k, of_q, lse, of_q, lse, x)
    assert [g.shape for g in grads[:3]] == [t.shape for t in (of_q, of_k, of_k)]
    ((shape, recorder),) = cutlass_backward._made.values()
    seen, kv_seen = [], []
    for call in recorder.calls:
        sequences = 1 if packed else call.batch
        assert call.batch == batch if packed else True
        assert call.tiles == call.places * sequences * call.kv_heads and call.programs == min(call.tiles, tiles.programs)
        held = 4 * sequences * call.kv_heads * call.group * call.pitch * shape.width
        assert held <= much or sequences * call.kv_heads == 1
        assert max(sequences, call.kv_heads * call.group) <= 65_535
        assert all(address % 16 == 0 for address in (call.q, call.out, call.do, call.lse2, call.delta, call.sums, call.given, call.counter))
        first = (call.lse - lse.data_ptr()) // (4 * call.rows)  # counted in heads through the batch
        assert call.delta - recorder.calls[0].delta == 4 * first * call.pitch and call.d_lse == call.lse
        for name, start, heads, step in (("out", of_q, p.heads, 1), ("do", of_q, p.heads, 1), ("dq", grads[0], p.heads, 1), ("k", of_k, kv_heads, group),
                                         ("v", of_k, kv_heads, group), ("dk", grads[1], kv_heads, group), ("dv", grads[2], kv_heads, group)):  # fmt: skip
            away = (getattr(call, name) - start.data_ptr()) // 2
            b, h = divmod(first // step, heads)
            assert away == b * getattr(call, f"{name}_sequence") + h * getattr(call, f"{name}_head")
            assert getattr(call, f"{name}_row") == heads * dim and getattr(call, f"{name}_head") == dim
        assert call.q - recorder.calls[0].q == call.out - of_q.data_ptr()
        seen += range(first, first + sequences * call.kv_heads * group)
        kv_seen += range(first // group, first // group + sequences * call.kv_heads)
    assert seen == list(range((1 if packed else batch) * p.heads)) and kv_seen == list(range((1 if packed else batch) * kv_heads))
    assert len(recorder.calls) == {1: 4 if packed else 24, 1 << 18: 4 if packed else 6, 1 << 28: 1}[much]


@pytest.mark.parametrize(("mask", "packed", "expected"), [(Causal(), False, 1), (Causal(), True, 2), (Window(1024), False, 4), (Full(), False, 1)], ids=str)
def test_heads_side_by_side(mask, packed, expected, monkeypatch):
    """One of 16k tokens fills L2; of a packed batch two, so that no long tile is begun last; of a window, whose tiles see few queries, as many as there are."""
    monkeypatch.setattr(cutlass_backward, "Compiled", Recorder)
    monkeypatch.setattr(cutlass_backward, "_made", {})
    monkeypatch.setattr(cutlass_backward, "sequence_tiles", lambda p, x, n, of_keys: torch.zeros(9, 2, dtype=torch.int32))
    n, heads, dim = 16384, 4, 128
    p = Attention("backward", 1, n, n, heads, heads, dim, torch.bfloat16, mask, *(("packed", 0, n) if packed else ()))
    q = torch.zeros(*((n,) if packed else (1, n)), heads, dim, dtype=torch.bfloat16)
    lse, offsets = torch.zeros((heads, n) if packed else (1, heads, n)), torch.tensor([0, n], dtype=torch.int32)
    cutlass_backward.launch(p, *cutlass_backward.configs(p, H200), q, q, q, q, lse, q, None, Operands(0.1, offsets, offsets) if packed else Operands(0.1))
    ((_, recorder),) = cutlass_backward._made.values()
    assert [call.together for call in recorder.calls] == [expected]


def test_values_are_written_where_the_function_looks(monkeypatch):
    """Each at an address of its own kind's size, in order, the stream last; a place for each thread."""
    ran = []
    monkeypatch.setattr("onchip.kernels.cutlass.cute.compile", lambda *_values, **_options: SimpleNamespace(run_compiled_program=ran.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    run = Compiled(None, DTYPES[torch.bfloat16], (("pointer", None, 16), (Int32, ("pointer", Int32, 4), Int64), Float32, Int64))
    kinds = ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p
    for values in ((1 << 40, -5, 16, 1 << 33, 0.5, -(1 << 35)), (32, 6, 1 << 41, 7, -2.0, 8)):
        run(*values)
        assert [kind.from_address(at.value).value for kind, at in zip(kinds, ran[-1], strict=True)] == [*values, 77]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, *values).result()
    assert {at.value for at in ran[0]} == {at.value for at in ran[1]} and not {at.value for at in ran[0]} & {at.value for at in ran[2]}
    with pytest.raises(struct.error):
        run(0, 1 << 31, 0, 0, 0.0, 0)


@pytest.mark.parametrize(("of", "axes"), [("b, h", (2, 4)), ("h", (4,)), ("", ())], ids=str)
def test_scores_begin_with_what_lies_by_distance(of, axes, monkeypatch):
    """Where a thread looks for two queries of two keys, in every launch of a few heads, lies what the score adds there; of a scale below 0 too."""
    monkeypatch.setattr(statistics, "MUCH", 1 << 18)
    monkeypatch.setattr(cutlass_backward, "Compiled", Recorder)
    monkeypatch.setattr(cutlass_backward, "_made", {})
    len_q, len_k, heads, group, dim, scale = 200, 333, 4, 2, 128, -0.25
    table = torch.randn(*axes, 64, dtype=torch.float64).float()
    index = {"b, h": lambda b, h: (b, h), "h": lambda b, h: (h,), "": lambda b, h: ()}[of]
    (text, reads) = ScoreMod(lambda s, b, h, i, j: s + table[(*index(b, h), (j - i + 16).clamp(0, 63))]).parts()
    p = Attention("backward", 2, len_q, len_k, heads, heads // group, dim, torch.bfloat16, Full(), score=text)
    q = torch.zeros(2, len_q, heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(2, len_k, heads // group, dim, dtype=torch.bfloat16)
    (tiles,) = cutlass_backward.configs(p, H200)
    lse = torch.zeros(2, heads, len_q)
    cutlass_backward.launch(p, tiles, q, k, k, q, lse, q, None, Operands(scale, score=reads))
    ((shape, recorder),) = cutlass_backward._made.values()
    assert shape.far and not shape.capped and len(recorder.calls) == 4
    for call, (b, kv_head) in zip(recorder.calls, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        assert call.scale == -scale
        for member, tile, m, thread in ((0, 0, 0, 0), (1, 1, 2, 77), (0, 2, 1, 255), (1, 2, 2, 128)):
            side, lane = thread // 128, thread % 32
            own_key, own_query = side * 64 + thread % 128 // 32 * 16 + lane // 4, lane % 4 * 2
            at = call.far + 4 * (member * call.far_head + 4 * (len_k + BESIDE + m * shape.m + own_query - tile * shape.n - own_key))
            for eight in range(shape.m // 8):
                found = (ctypes.c_float * 4).from_address(at + 128 * eight)
                for n, number in enumerate(found):
                    i, j = m * shape.m + own_query + 8 * eight + n % 2, tile * shape.n + own_key + n // 2 * 8
                    if i < len_q and j < len_k:
                        expected = table[(*index(b, kv_head * group + member), min(max(j - i + 16, 0), 63))] / -scale
                        assert number == pytest.approx(expected.item(), rel=1e-6), (i, j)


def test_distances_that_are_computed_of_numbers_alone(monkeypatch):
    """A score that reads no tensor: what it adds lies on the device of q."""
    monkeypatch.setattr(cutlass_backward, "Compiled", Recorder)
    monkeypatch.setattr(cutlass_backward, "_made", {})
    text, reads = ScoreMod(lambda s, b, h, i, j: s - 0.5 * (i - j)).parts()
    assert reads == ()
    p = Attention("backward", 1, 200, 200, 2, 2, 128, torch.bfloat16, Full(), score=text)
    q = torch.zeros(1, 200, 2, 128, dtype=torch.bfloat16)
    (tiles,) = cutlass_backward.configs(p, H200)
    cutlass_backward.launch(p, tiles, q, q, q, q, torch.zeros(1, 2, 200), q, None, Operands(0.25))
    ((shape, recorder),) = cutlass_backward._made.values()
    assert shape.far
    (call,) = recorder.calls
    for i, j in ((0, 0), (199, 3), (7, 150)):
        (number,) = (ctypes.c_float * 1).from_address(call.far + 16 * (200 + BESIDE + i - j))
        assert number == pytest.approx(-0.5 * (i - j) / 0.25)


@pytest.mark.parametrize("shape", [(2, 4, 200, 336), (1, 4, 200, 336), (2, 1, 200, 336), (200, 336), (2, 4, 200, 333)], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_biases_lie_where_tiles_are_copied_from(shape, expanded, monkeypatch):
    """In every launch of a few heads, what its strides and sizes say of a sequence, head, query and key; a query that repeats another's is that of a tile."""
    monkeypatch.setattr(statistics, "MUCH", 1 << 18)
    monkeypatch.setattr(cutlass_backward, "Compiled", Recorder)
    monkeypatch.setattr(cutlass_backward, "_made", {})
    len_q, len_k, heads, group, dim = 200, shape[-1], 4, 2, 128
    held = torch.randn(*shape[:-2], 1 if expanded else len_q, len_k).to(torch.bfloat16)
    bias = held.expand(*shape)
    (text, reads) = Bias(bias).parts()
    p = Attention("backward", 2, len_q, len_k, heads, heads // group, dim, torch.bfloat16, Full(), score=text)
    q = torch.zeros(2, len_q, heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(2, len_k, heads // group, dim, dtype=torch.bfloat16)
    (tiles,) = cutlass_backward.configs(p, H200)
    made = []
    monkeypatch.setattr(cutlass_backward, "pair_view", lambda *given: made.append(pair_view(*given)) or made[-1])  # and so kept
    cutlass_backward.launch(p, tiles, q, k, k, q, torch.zeros(2, heads, len_q), q, None, Operands(0.25, score=reads))
    ((of, recorder),) = cutlass_backward._made.values()
    assert of.biased and not of.capped and not of.far and len(recorder.calls) == 4
    for call, (b, kv_head) in zip(recorder.calls, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        assert call.bias % 16 == 0 and all(by > 0 and by % 8 == 0 for by in (call.bias_sequence, call.bias_head, call.bias_row))
        assert call.bias_rows == (tiles.m if expanded else len_q) and call.scale == 0.25
        for member, i, j in ((0, 0, 0), (1, 199, 330), (1, 81, 77)):
            row = min(i // tiles.m, (call.bias_rows - 1) // tiles.m) * tiles.m + i % tiles.m
            at = call.bias + 2 * (min(member, call.bias_heads - 1) * call.bias_head + row * call.bias_row + j)
            word = torch.tensor(ctypes.c_int16.from_address(at).value, dtype=torch.int16).view(torch.bfloat16)
            assert word == bias.expand(2, heads, len_q, len_k)[b, kv_head * group + member, i, j], (b, kv_head, member, i, j)
