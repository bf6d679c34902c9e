"""Scores of pages, compiled; their results are in tests/ops/test_sparse.py."""

import re

import pytest
import torch
from offline_attention import meta
from triton.runtime.jit import JITFunction

from offline import compiled
from onchip.core.problem import Rows
from onchip.kernels.attention import page_scores


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (128, 1, 576)])
def test_compiled(heads, kv_heads, dim, monkeypatch):
    """In registers, 16 bytes a load or copy."""
    if not isinstance(page_scores._scores, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    calls, bf16 = [], torch.bfloat16
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **rest: calls.append((kernel, args, rest)))
    bounds, ints = [meta(512, kv_heads, dim) for _ in range(2)], {"dtype": torch.int32}
    page_scores.launch(Rows("page_scores", 4 * kv_heads * 100, dim, bf16), None, meta(4, heads, dim), *bounds, meta(4, 100, **ints), meta(4, **ints), 16)
    ((kernel, args, rest),) = calls
    facts = compiled(kernel, args, rest, "sm_90")
    assert facts.spills == 0 and (facts.vector_loads or re.search(r"cp\.async[^\n]*0x10", facts.ptx))
