"""The CuTe DSL kernels compiled for a Hopper GPU that is not here: products, copies, what ptxas spills. Needs the extra onchip[cutlass]."""

import re

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="the extra onchip[cutlass] is not installed (a large download, which `make test` leaves out)")

from offline import _ptxas
from onchip.core import device as devices
from onchip.core.masks import Causal, Full, Window
from onchip.core.problem import Attention
from onchip.kernels.attention import cutlass_backward
from onchip.kernels.attention.tile import ends
from onchip.kernels.cutlass import DTYPES, Compiled

H200 = devices.gpu("H200")
CASES = {  # head dimension, mask, whether packed, dtype, and bytes that ptxas may spill, stores and loads together, all of them between two tiles of keys
    "d64 full": (64, Full(), False, torch.bfloat16, 0),
    "d64 causal": (64, Causal(), False, torch.bfloat16, 72),
    "d64 packed": (64, Causal(), True, torch.bfloat16, 72),
    "d128 full": (128, Full(), False, torch.bfloat16, 60),
    "d128 causal": (128, Causal(), False, torch.bfloat16, 72),
    "d128 window": (128, Window(1024), False, torch.bfloat16, 0),
    "d128 packed": (128, Causal(), True, torch.float16, 72),
    "d96 top left": (96, Causal("top_left"), False, torch.float16, 72),
}


@pytest.mark.parametrize(("dim", "band", "packed", "dtype", "most"), CASES.values(), ids=CASES)
def test_cutlass_backward(dim, band, packed, dtype, most, tmp_path, monkeypatch):
    """Five products a tile on wgmma that ptxas does not wait for; Q, K, V, dO, dK and dV by TMA; dQ added in bulk; nothing spilt in a loop."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    p = Attention("backward", 4, 16384, 16384, 16, 4, dim, dtype, band, *(("packed", 0, 65536) if packed else ()))
    (tiles,) = cutlass_backward.configs(p, H200)
    shape = cutlass_backward.Shape(DTYPES[dtype], *tiles[:3], dim, *ends(band), packed)
    Compiled(cutlass_backward.Backward(shape), shape.dtype, cutlass_backward.ARGUMENTS, options=f"--gpu-arch=sm_90a --keep-ptx --dump-dir={tmp_path}")
    (file,) = tmp_path.glob("*.ptx")
    ptx = file.read_text()
    products = 2 * (shape.width // 16) + 2 * (tiles.m // 16) + tiles.n // 16  # of S and dP, dV and dK, and dQ
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * products + tiles.n // 16  # with and without the mask, and a tile's last dQ
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)) == 4 * shape.width // 64
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)) == 2 * shape.width // 64
    assert len(re.findall(r"cp\.reduce\.async\.bulk\.global", ptx)) == 1
    log = _ptxas(ptx, "sm_100")
    assert "serializ" not in log
    assert sum(int(size) for size in re.findall(r"(\d+) bytes spill", log)) <= most, log
    assert re.search(r"Used 168 registers", log)
