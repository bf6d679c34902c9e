"""Gradients by the CuTe DSL kernel on a GPU, judged by float64. Needs the extra onchip[cutlass]; on a CPU it is compiled alone (test_cutlass_compile.py)."""

import functools

import pytest
import torch

pytest.importorskip("cutlass", reason="the extra onchip[cutlass] is not installed (a large download, which `make test` leaves out)")

import onchip
from judge import assert_as_good_as_torch
from onchip.core.masks import Causal, Full, Window
from onchip.dispatch import forget
from onchip.kernels import attention

CASES = [  # queries and keys of each sequence, heads, head dimension, mask
    (((128, 128),), (1, 1), 128, Full()),
    (((80, 128), (80, 128)), (2, 2), 128, Full()),
    (((301, 517), (301, 517)), (3, 3), 128, Causal()),
    (((301, 517),), (2, 2), 64, Causal("top_left")),
    (((517, 301),), (2, 2), 128, Causal()),
    (((384, 512),), (8, 2), 128, Causal()),
    (((700, 900),), (2, 2), 128, Window(130, 70)),
    (((1024, 1024),), (8, 1), 64, Window(200)),
    (((512, 512),), (2, 2), 96, Causal()),
    (((300, 300), (0, 5), (128, 128), (517, 400), (1, 70)), (4, 2), 128, Causal()),
    (((300, 300), (0, 5), (128, 128), (517, 400), (1, 70)), (4, 2), 64, Full()),
]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch):
    """Without torch's deterministic mode, which asks for gradients in order and so for another kernel."""
    for make in (torch.empty, torch.empty_like):
        monkeypatch.setattr(torch, make.__name__, functools.partial(_poisoned, make))


def _poisoned(make, *args, **keywords):
    made = make(*args, **keywords)
    return made.fill_(torch.nan) if made.is_floating_point() else made


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "dim", "mask"), CASES, ids=str)
def test_gradients(lengths, heads, dim, mask, dtype, device, monkeypatch):
    """Dense, with sinks, where all sequences are equally long, else packed; with a gradient of LSE."""
    monkeypatch.setattr(attention, "FEW", 0)  # small problems too
    dense = len(set(lengths)) == 1
    queries, keys = (torch.tensor(n, device=device) for n in zip(*lengths, strict=True))
    q, k, v = (torch.randn(int(n.sum()), h, dim, device=device).to(dtype) for n, h in ((queries, heads[0]), (keys, heads[1]), (keys, heads[1])))
    sinks = torch.randn(heads[0], device=device)

    def attend(q, k, v, sinks, kernel):
        how = {"mask": mask, "sinks": sinks if dense else None, "return_lse": True, "kernel": kernel}
        if dense:
            out, lse = onchip.attention(*(x.unflatten(0, (len(lengths), -1)) for x in (q, k, v)), **how)
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        offsets = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (queries, keys))
        return onchip.attention_packed(q, k, v, *offsets, longest=(int(queries.max()), int(keys.max())), **how)

    d_out, d_lse = torch.randn_like(q), torch.randn(heads[0], len(q), device=device)

    def gradients(kernel, kind):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)] + [sinks.to(torch.promote_types(kind, torch.float32)).requires_grad_()]
        out, lse = attend(*leaves, kernel)
        return torch.autograd.grad([out, lse.where(lse.isfinite(), 0.0)], leaves[: 3 + dense], [d_out.to(out.dtype), d_lse.to(lse.dtype)])

    forget()  # what was decided before FEW changed
    with onchip.record() as decisions:
        ours = gradients("auto", dtype)
    forget()
    assert "cutlass_backward" in [d.kernel.name for d in decisions]
    truths = gradients("reference", torch.float64)
    for mine, low, truth in zip(ours[:3], gradients("reference", dtype), truths, strict=False):
        assert_as_good_as_torch(mine, low, truth, slack=3.0)
    for of_sinks in truths[3:]:
        torch.testing.assert_close(ours[3].double(), of_sinks, rtol=0.0, atol=2e-2 * of_sinks.abs().max().item() + 1e-3)  # of an output in half precision
