"""Gradients by the CuTe DSL kernel on a GPU, judged by float64. Needs the extra onchip[cutlass]; on a CPU it is compiled alone (test_cutlass_compile.py)."""

import pytest
import torch

pytest.importorskip("cutlass", reason="the extra onchip[cutlass] is not installed; `make cutlass` compiles its kernels")

import onchip
from judge import assert_as_good_as_torch
from onchip.core.masks import Causal, Full, Window
from onchip.core.scores import Bias
from onchip.dispatch import forget
from onchip.kernels import attention
from onchip.kernels.attention import statistics

UNEVEN = ((300, 300), (0, 5), (128, 128), (517, 400), (1, 70))
CASES = [  # queries and keys of each sequence, heads, head dimension, mask
    (((128, 128),), (1, 1), 128, Full()),
    (((80, 128), (80, 128)), (2, 2), 128, Full()),
    (((301, 517), (301, 517)), (3, 3), 128, Causal()),
    (((301, 517),), (2, 2), 64, Causal("top_left")),
    (((517, 301),), (2, 2), 128, Causal()),
    (((384, 512),), (8, 2), 128, Causal()),
    (((300, 333),), (4, 2), 128, Full()),
    (((2100, 2100),), (4, 1), 128, Causal()),  # tiles of 80 queries
    (((700, 900),), (2, 2), 128, Window(130, 70)),
    (((1024, 1024),), (8, 1), 64, Window(200)),
    (((512, 512),), (2, 2), 96, Causal()),
    (UNEVEN, (4, 2), 128, Causal()),
    (UNEVEN, (4, 2), 64, Full()),
]


@pytest.fixture(autouse=True)
def any_order(nan_in_fresh_memory, monkeypatch):
    """Small problems too; no deterministic algorithms, which this kernel is none of, so fresh memory is made NaN here."""
    forget()
    monkeypatch.setattr(attention, "FEW", 0)
    torch.use_deterministic_algorithms(False)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _of_nan(getattr(torch, name)))
    yield
    forget()


def _of_nan(empty):
    def made(*size, **options):
        t = empty(*size, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    return made


class Case:
    """Dense, with sinks, where all sequences are equally long, else packed; with a gradient of LSE. `unused`: tokens (queries, keys) at each sequence's end."""

    def __init__(self, lengths, heads, dim, mask, dtype, device, unused=(0, 0), softcap=None, score=None):
        self.lengths, self.mask, self.dtype, self.softcap, self.score = lengths, mask, dtype, softcap, score
        self.dense = len(set(lengths)) == 1 and unused == (0, 0)
        counts = [torch.tensor(n, device=device) for n in zip(*lengths, strict=True)]
        self.longest = tuple(int(n.max()) for n in counts)
        self.offsets = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in counts]
        self.used = tuple((n - less).clamp(min=0).int() for n, less in zip(counts, unused, strict=True)) if any(unused) else None
        tokens = [int(n.sum()) for n in counts]
        shapes = (tokens[0], heads[0]), (tokens[1], heads[1]), (tokens[1], heads[1])
        self.inputs = [torch.randn(*shape, dim, device=device).to(dtype) for shape in shapes]
        self.sinks = torch.randn(heads[0], device=device)
        self.d_out, self.d_lse = torch.randn_like(self.inputs[0]), torch.randn(heads[0], tokens[0], device=device)

    def leaves(self, kind):
        """What has a gradient."""
        sinks = self.sinks.to(torch.promote_types(kind, torch.float32))
        return [x.detach().to(kind).requires_grad_() for x in (*self.inputs, *([sinks] if self.dense else []))]

    def gradients(self, kernel, leaves):
        q, k, v = leaves[:3]
        how = {"mask": self.mask, "softcap": self.softcap, "score": self.score, "return_lse": True, "kernel": kernel}
        if self.dense:
            q, k, v = (x.unflatten(0, (len(self.lengths), -1)) for x in (q, k, v))
            out, lse = onchip.attention(q, k, v, sinks=leaves[3].to(torch.promote_types(q.dtype, torch.float32)), **how)
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        else:
            out, lse = onchip.attention_packed(q, k, v, *self.offsets, longest=self.longest, used=self.used, **how)
        return torch.autograd.grad([out, lse.where(lse.isfinite(), 0.0)], leaves, [self.d_out.to(out.dtype), self.d_lse.to(lse.dtype)])

    def judge(self):
        with onchip.record() as decisions:
            ours = self.gradients("auto", self.leaves(self.dtype))
        assert "cutlass_backward" in [d.kernel.name for d in decisions]
        truths, lows = (self.gradients("reference", self.leaves(kind)) for kind in (torch.float64, self.dtype))
        for mine, low, truth in zip(ours[:3], lows, truths, strict=False):
            assert_as_good_as_torch(mine, low, truth, slack=3.0)
        for of_sinks in truths[3:]:  # of an output in half precision
            torch.testing.assert_close(ours[3].double(), of_sinks, rtol=0.0, atol=2e-2 * of_sinks.abs().max().item() + 1e-3)
        return ours


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "dim", "mask"), CASES, ids=str)
def test_gradients(lengths, heads, dim, mask, dtype, device):
    Case(lengths, heads, dim, mask, dtype, device).judge()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "dim", "mask"), [CASES[i] for i in (2, 5, 7, 8, 10, 11)], ids=str)
def test_softcap(lengths, heads, dim, mask, dtype, device):
    """Scores near the cap, and far beyond it."""
    case = Case(lengths, heads, dim, mask, dtype, device, softcap=2.0)
    case.inputs[0][::7] *= 30.0
    case.judge()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("axes", ["bh", "h", "", "ALiBi"])
@pytest.mark.parametrize(("lengths", "heads", "dim", "mask"), CASES[:-2], ids=str)
def test_scores_by_distance(lengths, heads, dim, mask, axes, device):
    """What a score looks up by the distance between query and key, and by sequence and head; or computes."""
    sizes = [n for axis, n in (("b", len(lengths)), ("h", heads[0])) if axis in axes]
    table = torch.randn(*sizes, 100, device=device)

    def score(s, b, h, i, j):
        return s + table[(*(x for axis, x in (("b", b), ("h", h)) if axis in axes), (j - i + 40).clamp(0, 99))]

    score = onchip.ALiBi(torch.rand(heads[0], device=device)) if axes == "ALiBi" else score
    Case(lengths, heads, dim, mask, torch.bfloat16, device, score=score).judge()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axes", ["bh", "h", "b", "", "of keys, for each query"])
@pytest.mark.parametrize(
    ("n", "heads", "dim", "mask"),
    [
        ((80, 128), (1, 1), 128, Full()),
        ((304, 520), (4, 2), 128, Full()),
        ((2104, 2104), (4, 1), 128, Causal()),  # tiles of 80 queries
        ((520, 304), (2, 2), 128, Causal()),
        ((704, 904), (2, 2), 128, Window(130, 70)),
        ((300, 512), (2, 2), 96, Causal()),
        ((1024, 1024), (8, 1), 64, Window(200)),
        ((301, 520), (2, 2), 64, Full()),
        ((1100, 2048), (16, 16), 128, Causal()),  # several tiles of keys for a program
        ((1100, 2048), (16, 4), 128, Full()),
    ],
    ids=str,
)
def test_biases(n, heads, dim, mask, axes, dtype, device):
    """A number for each query and key, some of them -inf; of every sequence and head, or of all."""
    expanded = axes.startswith("of keys")
    lead = [2 if "b" in axes else 1, heads[0] if "h" in axes else 1] if not expanded else [1, heads[0]]
    bias = torch.randn(*lead, 1 if expanded else n[0], n[1], device=device).to(dtype)
    bias[torch.rand(bias.shape, device=device) < 0.1] = -torch.inf
    Case((n, n), heads, dim, mask, dtype, device, score=Bias(bias.expand(-1, -1, n[0], -1))).judge()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("unused", [(3, 0), (0, 40), (2, 70)], ids=str)
def test_used_lengths(unused, device):
    """What is not used may hold NaN, reaches nothing and gets no gradient."""
    case = Case(UNEVEN, (4, 2), 128, Causal(), torch.bfloat16, device, unused)
    rest = []
    for side, tensors in ((0, [case.inputs[0]]), (1, case.inputs[1:])):
        places = torch.cat([torch.arange(n, device=device) >= used for n, used in zip((x[side] for x in UNEVEN), case.used[side].tolist(), strict=True)])
        for tensor in tensors:
            tensor[places] = torch.nan
            rest.append(places)
    case.d_out[rest[0]] = 0.0
    ours = case.judge()
    for gradient, places in zip(ours, rest, strict=True):
        assert not gradient[places].any()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("much", [1, 1 << 20], ids=["a head each", "some"])
@pytest.mark.parametrize(("lengths", "heads", "dim"), [(((301, 517),) * 3, (8, 4), 128), (((640, 640),) * 5, (6, 3), 64), (UNEVEN, (6, 3), 128)], ids=str)
def test_shares(lengths, heads, dim, much, device, monkeypatch):
    """As right in several launches as in one."""
    monkeypatch.setattr(statistics, "MUCH", much)
    Case(lengths, heads, dim, Causal(), torch.bfloat16, device).judge()


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("lengths", [((256, 256),) * 2, UNEVEN], ids=["dense", "packed"])
def test_in_a_cuda_graph(lengths, device):
    """Captured after a call that compiles; replayed with other numbers in the same tensors."""
    case = Case(lengths, (4, 2), 128, Causal(), torch.bfloat16, device)
    leaves = case.leaves(torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.gradients("auto", leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.gradients("auto", leaves)
    case.inputs, case.sinks = [x.flip(0) for x in case.inputs], case.sinks.flip(0)
    with torch.no_grad():
        for leaf, x in zip(leaves, (*case.inputs, case.sinks), strict=False):
            leaf.copy_(x)
    graph.replay()
    for mine, truth, low in zip(found[:3], *(case.gradients("reference", case.leaves(kind)) for kind in (torch.float64, torch.bfloat16)), strict=False):
        assert_as_good_as_torch(mine, low, truth, slack=3.0)
