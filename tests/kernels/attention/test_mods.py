"""Mask and score functions translated for Triton, beside torch running the same text: values, gradients, both orientations, ragged edges."""

import functools
import linecache
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, compute_cache_key

import onchip
from judge import assert_as_good_as_torch
from onchip.core import masks, scores
from onchip.core.kernel import Unsupported
from onchip.core.masks import Causal, MaskMod
from onchip.core.scores import ScoreMod
from onchip.core.trace import Place
from onchip.kernels.attention import mods
from onchip.kernels.attention.mods import _erf_fast, _real
from onchip.kernels.attention.texts import is_tanh, key_tile, line_of, only_adds, pair_tile

M, N = 16, 32
BATCH, HEADS = 2, 3
SIZES = ((16, 32), (11, 29), (5, 19), (1, 1))  # (len_q, len_k): whole tiles, ragged ones

# ---- the smallest kernel that calls them


@triton.jit
def _hand(x, j):
    return x[None, :]


@triton.jit
def _split_tile(s_ptr, out_ptr, b, h, len_q, len_k, captured, ROWS: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    i, j = tl.arange(0, M), tl.arange(0, N)
    r, k = (), ()
    if ROWS is not None:
        r = ROWS(b, h, i, len_q, len_k, captured)
    if KEYS is not None:
        k = KEYS(b, h, j, len_q, len_k, captured)
    i, j = i[:, None], j[None, :]
    if MASK is not None:
        out = MASK(b, h, i, j, len_q, len_k, captured[0], (r, k), _hand).to(tl.float32)
    else:
        out = SCORE(tl.load(s_ptr + i * N + j), b, h, i, j, len_q, len_k, captured[1], (r, k), _hand)
    tl.store(out_ptr + i * N + j, out)


@triton.jit
def _tile(s_ptr, ds_ptr, out_ptr, b, h, len_q, len_k, c, g, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
          M: tl.constexpr, N: tl.constexpr, I_AXIS: tl.constexpr):  # fmt: skip
    i, j = tl.arange(0, M), tl.arange(0, N)
    if I_AXIS == 0:
        i, j = i[:, None], j[None, :]
    else:
        i, j = i[None, :], j[:, None]
    at = i * N + j
    s = tl.load(s_ptr + at)
    if MASK is not None:
        out = MASK(b, h, i, j, len_q, len_k, c).to(tl.float32)
    elif SCORE_GRAD is not None:
        out = SCORE_GRAD(s, tl.load(ds_ptr + at), b, h, i, j, len_q, len_k, c, g, I_AXIS)
    else:
        out = SCORE(s, b, h, i, j, len_q, len_k, c)
    tl.store(out_ptr + at, out)


def guarded(t):
    """The same tensor, of the same strides, in the midst of values that must not be read."""
    bad = torch.nan if t.is_floating_point() else True if t.dtype == torch.bool else torch.iinfo(t.dtype).max // 2
    size = 1 + sum((n - 1) * abs(stride) for n, stride in zip(t.shape, t.stride(), strict=True))
    memory = torch.full((size + 128,), bad, dtype=t.dtype, device=t.device)
    view = memory.as_strided(t.shape, t.stride(), 64)
    memory[64 : 64 + size] = t.as_strided((size,), (1,), t.storage_offset())
    return view


def place(len_q, len_k, b=1, h=2, device=None):
    b, h = torch.tensor(b, device=device), torch.tensor(h, device=device)
    return Place(b, h, torch.arange(len_q, device=device)[:, None], torch.arange(len_k, device=device), torch.tensor(len_q), torch.tensor(len_k))


def tile(function, tensors, sizes, axis, s=None, ds=None, g=(), **which):
    device = tensors[0].device if tensors else "cuda" if torch.cuda.is_available() else "cpu"
    full = [torch.full((M, N), torch.nan, device=device), torch.zeros(M, N, device=device)]  # a score that no place has may be anything
    for whole, part in zip(full, (s, ds), strict=True):
        if part is not None:
            whole[: sizes[0], : sizes[1]] = part
    out = torch.full((M, N), torch.nan, device=device)
    if which["kind"] == "split":
        _split_tile[(1,)](full[0], out, 1, 2, *sizes, (mods.captured(tensors),) * 2, *function, M=M, N=N)
        return out[: sizes[0], : sizes[1]]
    arguments = {"MASK": None, "SCORE": None, "SCORE_GRAD": None} | {which["kind"]: function}
    _tile[(1,)](*full, out, 1, 2, *sizes, mods.captured(tensors), g, **arguments, M=M, N=N, I_AXIS=axis)
    return out[: sizes[0], : sizes[1]]


# ---- what is run


def _ids(*shape, high=4):
    return torch.randint(0, high, shape).sort(-1).values


def mask_cases():
    blocks, ids, offsets = torch.rand(HEADS, 4, 8) < 0.5, _ids(32), torch.tensor([0, 9, 17, 30], dtype=torch.int32)
    flags, table, small = torch.rand(BATCH, 32) < 0.7, torch.rand(32, 16).T < 0.5, offsets.to(torch.uint8)
    return {
        "chunked": masks.Chunked(4),
        "chunked of 5": masks.Chunked(5),
        "document": masks.Document(_ids(BATCH, 32)) & Causal(),
        "document of all": masks.Document(_ids(32).int()) | masks.Window(2),
        "windows": masks.Windows(torch.tensor([1, 3, 8]), torch.randint(0, 4, (BATCH, HEADS))),
        "windows of sequences": masks.Windows(torch.tensor([[3], [6]], dtype=torch.int32), None, "top_left"),
        "prefix": masks.Prefix(3),
        "prefixes": masks.Prefix(torch.tensor([2, 7])),
        "tree": masks.Tree.of(torch.tensor([-1, 0, 0, 1, 2])),
        "trees": masks.Tree.of(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])),
        "padding": masks.KeyPadding(torch.tensor([9, 14])),
        "padding flags": masks.KeyPadding(flags),
        "blocks": masks.Blocks(blocks, 4),
        "blocks of 5x4": masks.Blocks(blocks, (5, 4)),
        "dense": masks.Dense(torch.rand(BATCH, HEADS, 16, 32) < 0.5),
        "dense of heads": masks.Dense(torch.rand(HEADS, 1, 32) < 0.5),
        "causal": MaskMod(lambda b, h, i, j: i >= j),
        "sliding": MaskMod(lambda b, h, i, j: (i >= j) & (i - j <= 5)),
        "neighbourhood": MaskMod(lambda b, h, i, j: ((i // 6 - j // 6).abs() <= 1) & ((i % 6 - j % 6).abs() <= 2)),
        "floor of negatives": MaskMod(lambda b, h, i, j: ((i - j) // 5 + (i - j) % 5 + (i - j) // 4 + (j - i) % 8 + (j - i) // -3) % 3 == 0),
        "jagged": MaskMod(lambda b, h, i, j: (ids[i] == ids[j]) & (i - offsets[ids[i]] >= j - offsets[ids[j]])),
        "checkerboard": MaskMod(lambda b, h, i, j: torch.logical_xor((i + j) % 2 == 0, h % 2 == 1)),
        "where": MaskMod(lambda b, h, i, j: torch.where(h % 2 == 0, i - j < 5, True) & ~(j == 3)),
        "transposed": MaskMod(lambda b, h, i, j: table[i, j]),
        "backwards": MaskMod(lambda b, h, i, j: flags[b, i - j]),
        "of heads alone": MaskMod(lambda b, h, i, j: (h == 2) | (b > 3)),
        "everything": MaskMod(lambda b, h, i, j: torch.ones_like(i) > 0),
        "large products": MaskMod(lambda b, h, i, j: (i * 100_000 * 100_000 + j) % 7 > 2),
        "bits": MaskMod(lambda b, h, i, j: (((i ^ j) & 5) | (i << 1)) >> 1 != ~j + 9),
        "bytes": MaskMod(lambda b, h, i, j: small[ids[i]] - small[ids[j]] < 128),
        "of an int": MaskMod(lambda b, h, i, j: torch.logical_not(i % 3)),
        "narrow differences": MaskMod(lambda b, h, i, j: (small[ids[i]] - small[ids[j]]).float() < 128.0),
        "fmod": MaskMod(lambda b, h, i, j: (torch.fmod(i - j, 3) == -1) | (torch.div(i - j, 4, rounding_mode="trunc") == 0)),
    }


def score_cases():
    slopes, bias, half = torch.rand(HEADS), torch.randn(HEADS, 32, 16).transpose(1, 2), torch.randn(BATCH, HEADS, dtype=torch.float16)
    gate, table, wide = torch.randn(()), torch.randn(64), torch.randn(1, 32).expand(16, 32)
    ids, positive, single = _ids(32), torch.rand(32) + 0.5, torch.randn(1)
    holes = torch.randn(16, 32).where(torch.rand(16, 32) < 0.7, torch.tensor(-torch.inf))
    sides = torch.randn(32, HEADS)
    of_math = (torch.exp, torch.exp2, torch.sigmoid, torch.erf, torch.sin, torch.cos, torch.relu, F.silu, F.softplus)
    of_positive = (torch.log, torch.log2, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log1p)
    return {
        "softcap": scores.Softcap(2.0),
        "alibi": scores.ALiBi(scores.ALiBi.slopes_of(HEADS)),
        "alibi of sequences": scores.ALiBi(torch.rand(BATCH, HEADS), "linear"),
        "relative": scores.RelativeBias(torch.randn(HEADS, 9)),
        "buckets": scores.BucketBias(torch.randn(8, HEADS)),
        "buckets back": scores.BucketBias(torch.randn(6, HEADS), 30, both=False),
        "bias": scores.Bias(torch.randn(BATCH, HEADS, 16, 32)),
        "bias of heads": scores.Bias(torch.randn(1, HEADS, 1, 32)),
        "bias with holes": scores.Bias(holes),
        "one bias": scores.Bias(torch.randn(1, 1, 1, 1)),
        "chain": scores.chain(torch.randn(16, 1), [scores.ALiBi(torch.rand(HEADS)), lambda s, b, h, i, j: s * gate], 3.0),
        "tanh": ScoreMod(lambda s, b, h, i, j: 3 * torch.tanh(s / 3) + slopes[h] * (i - j)),
        "causal": ScoreMod(lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))),
        "causal then": ScoreMod(lambda s, b, h, i, j: torch.where(i >= j, s * slopes[h], -float("inf")) * torch.exp(gate) + s * s),
        "one element": ScoreMod(lambda s, b, h, i, j: s * single + gate * single[0] * 2),
        "half": ScoreMod(lambda s, b, h, i, j: s * half[b, h] + half[b % 2, h].float() * s),
        "transposed": ScoreMod(lambda s, b, h, i, j: s + bias[h, i, j]),
        "expanded": ScoreMod(lambda s, b, h, i, j: s + wide[i, j] * gate),
        "of rows": ScoreMod(lambda s, b, h, i, j: s * table[i] + table[j] * table[i] + table[i - j + 31] - table[i - 5]),
        "without s": ScoreMod(lambda s, b, h, i, j: table[i] * slopes[h]),
        "nothing": ScoreMod(lambda s, b, h, i, j: torch.full_like(s, 2.5)),
        "documents": ScoreMod(lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, s - positive[i].log() * positive[j])),
        "clamped": ScoreMod(lambda s, b, h, i, j: torch.clamp(s, -0.5, 0.7) + torch.clamp(s, max=sides[j, h]) + torch.maximum(s, sides[i, h - 1])),
        "ties": ScoreMod(lambda s, b, h, i, j: torch.maximum(s, s * 1) + torch.minimum(s, s.abs()) + (s * 0).abs()),
        "powers": ScoreMod(lambda s, b, h, i, j: s**2 + s**3 + 2.0**h + (s * s + 1) ** -0.5 + (s * s + 1) ** 1.5 + 3.0 ** (s / 9) + 1 / (s**2 + 1)),
        "math": ScoreMod(lambda s, b, h, i, j: sum(f(s) for f in of_math)),
        "positive": ScoreMod(lambda s, b, h, i, j: sum(f(s * s + positive[j]) for f in of_positive)),
        "gelu": ScoreMod(lambda s, b, h, i, j: F.gelu(s) + F.gelu(s, approximate="tanh")),
        "bent": ScoreMod(
            lambda s, b, h, i, j: (
                F.hardtanh(s) + F.leaky_relu(s, 0.1) + torch.fmax(s, positive[i]) + torch.sgn(s) * torch.expm1(s) + torch.lerp(s, positive[j], 0.3)
            )
        ),
        "bent at both ends": ScoreMod(lambda s, b, h, i, j: F.logsigmoid(s * 9) + F.hardswish(s * 3) + F.logsigmoid(input=s)),
        "rounded": ScoreMod(lambda s, b, h, i, j: s.floor() + s.ceil() + (s * 4).round() + s.trunc() + s.sign() + torch.floor(i / 4) + (i / 2).round()),
        "quotients": ScoreMod(lambda s, b, h, i, j: s / positive[j] + torch.div(s, 0.3, rounding_mode="floor") + s % 0.7 + torch.fmod(s, 0.9) + s / -4),
        "cast": ScoreMod(lambda s, b, h, i, j: s + (s * 3).to(torch.int32) + (i > j) * s + (s > 0).float() + (j / 3).int() // 2),
        "powers of places": ScoreMod(lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (j - i) + 2 ** (i % 3) + (i - j) ** 2),
        "alpha": ScoreMod(lambda s, b, h, i, j: torch.add(s, table[j], alpha=0.5) + torch.rsub(s, 1, alpha=3) - torch.sub(s, j, alpha=2)),
        "masked fill": ScoreMod(lambda s, b, h, i, j: s.masked_fill(i < j, -3.0) + torch.where(torch.isinf(s) | torch.isnan(s), 0.0, s)),
        "detached": ScoreMod(lambda s, b, h, i, j: s * s.detach() + s.square()),
    }


CASES = {"mask": list(mask_cases()), "score": list(score_cases())}


@functools.cache
def cases(kind):
    torch.manual_seed(1)
    return {"mask": mask_cases, "score": score_cases}[kind]()


def traced(kind, name, device):
    mod = cases(kind)[name]
    static, tensors = mod.static(), [t.to(device) for t in mod.tensors]
    return static, tensors, [guarded(t) for t in tensors]


# ---- beside torch


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES["mask"])
def test_mask(name, axis, device):
    static, tensors, inside = traced("mask", name, device)
    for sizes in SIZES:
        if sizes[1] < 5 and "tree" in name:
            continue  # a tree of more nodes than there are keys
        truth = static.seen(place(*sizes, device=device), tensors).expand(sizes)
        ours = tile(mods.mask_function(static.text), inside, sizes, axis, kind="MASK")
        assert torch.equal(ours, truth.float()), f"{static}, {sizes}"
        if axis == 0:
            assert torch.equal(tile(mods.split_functions(static.text, None), inside, sizes, axis, kind="split"), truth.float()), f"{static}, {sizes}"


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES["score"])
def test_score_and_gradients(name, axis, device):
    """Gradients of every tensor and of none; a place whose score does not count (`ds` 0) adds nothing, be its score infinite."""
    static, tensors, inside = traced("score", name, device)
    wanted = tuple(t.is_floating_point() for t in tensors)
    forward, backward = mods.score_functions(static.text, wanted)
    _, alone = mods.score_functions(static.text)
    for sizes in SIZES:
        s, ds, at = torch.randn(sizes, device=device), torch.randn(sizes, device=device), place(*sizes, device=device)
        low, truth = (reference(static, tensors, wanted, at, s, ds, dtype) for dtype in (torch.float32, torch.float64))
        ds = ds.where(truth[0].isfinite(), 0)
        g, buffers = mods.gradients(tensors, wanted)
        ours = tile(forward, inside, sizes, axis, s, kind="SCORE")
        if axis == 0:
            split = tile(mods.split_functions(None, static.text), inside, sizes, axis, s, kind="split")
            torch.testing.assert_close(split, ours, rtol=1e-6, atol=1e-6, equal_nan=True)  # a GPU's compiler rounds a product once where a sum takes it in
        ours_ds = tile(backward, inside, sizes, axis, s, ds, g, kind="SCORE_GRAD")
        assert torch.equal(ours_ds, tile(alone, inside, sizes, axis, s, ds, kind="SCORE_GRAD"))
        assert_as_good_as_torch(ours, low[0], truth[0], slack=4.0)
        assert_as_good_as_torch(ours_ds, low[1], truth[1], slack=4.0)
        for buffer, exact in zip((x for x in buffers if x is not None), truth[2:], strict=True):
            torch.testing.assert_close(buffer.double(), exact, rtol=1e-5, atol=4e-7 * s.numel())


def reference(static, tensors, wanted, at, s, ds, dtype):
    """The score, and the gradients of `(score * ds).sum()` over the places where it is finite, by torch in `dtype`."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() if want else t for t, want in zip(tensors, wanted, strict=True)]
    inputs = [s.to(dtype).requires_grad_(), *(x for x, want in zip(leaves, wanted, strict=True) if want)]
    out = static.run(inputs[0].detach(), *at, *leaves).detach().expand(s.shape)
    finite = out.isfinite()
    at = at._replace(**{name: getattr(at, name).expand(s.shape)[finite] for name in "ij"})
    total = (static.run(inputs[0][finite], *at, *leaves) * ds[finite]).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True) if total.requires_grad else map(torch.zeros_like, inputs)
    return [out, *grads]


STEEP = {  # what is infinite, or not a number, where a causal mask hides; t [heads] is learnt
    "quotient": lambda t: lambda s, b, h, i, j: s * t[h] / (i - j + 1),
    "root": lambda t: lambda s, b, h, i, j: s * torch.sqrt((i - j).float()) + t[h],
    "logarithm": lambda t: lambda s, b, h, i, j: s - t[h] * torch.log1p((i - j).float()),
    "branch": lambda t: lambda s, b, h, i, j: torch.where(i >= j, s - t[h] * torch.log1p((i - j).float()), -torch.inf),
    "table": lambda t: lambda s, b, h, i, j: s + t[h] / (i - j + 1).clamp(min=0),
}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("name", STEEP)
@pytest.mark.parametrize("kernel", ["reference", "blocked", pytest.param("triton_prefill", marks=pytest.mark.gpu)])
def test_nothing_flows_from_where_nothing_counts(kernel, name, device):
    """0 times an infinite derivative would be NaN: gradients are those of the score with places moved to where it is finite."""
    torch.use_deterministic_algorithms(False)  # Triton's gradients of what scores read are in any order
    inputs = [torch.randn(1, 40, 2, 16, device=device) for _ in range(3)] + [torch.rand(2, device=device)]
    found = []
    for near in (False, True):
        q, k, v, t = (x.detach().double() if near else x.detach() for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v, t)]
        score = STEEP[name](t)
        close = (lambda s, b, h, i, j, score=score: score(s, b, h, torch.maximum(i, j), j)) if near else score
        mask = masks.Full() if name == "branch" and not near else masks.Causal()  # a branch hides by itself
        out = onchip.attention(q, k, v, mask=mask, score=close, kernel="reference" if near else kernel)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=2e-4, rtol=2e-4)


@pytest.mark.gpu
def test_a_mask_and_a_score_side_by_side(device):
    """Each finds its own tensors, and its own part of what rows and keys decide alone."""
    ids, bias = _ids(32).int().to(device), torch.randn(32, device=device)
    mask, score = masks.Document(ids).static(), ScoreMod(lambda s, b, h, i, j: s + bias[j]).static()
    s, out = torch.randn(M, N, device=device), torch.full((2, M, N), torch.nan, device=device)
    rows, keys, sees, adds = mods.split_functions(mask.text, score.text)
    captured = mods.captured((ids,)), mods.captured((bias,))
    for n, function in enumerate(((rows, keys, sees, None), (rows, keys, None, adds))):
        _split_tile[(1,)](s, out[n], 1, 2, M, N, captured, *function, M=M, N=N)
    assert torch.equal(out[0].bool(), mask.seen(place(M, N, device=device), (ids,)).expand(M, N))
    assert torch.equal(out[1], s + bias)


def test_what_rows_and_keys_decide_alone():
    """Ids of documents are looked up once a row and once a key; a distance, which takes both, is not worth handing round."""
    if not isinstance(_tile, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: an interpreted function has no source to look at")
    rows, keys, sees, _ = mods.split_functions(cases("mask")["document of all"].static().text, None)
    assert all("tl.load" in part.src for part in (rows, keys)) and "tl.load" not in sees.src
    rows, keys, _, score = mods.split_functions(None, cases("score")["alibi"].static().text)
    assert rows is None and keys is None and "_real(j)" in score.src


@pytest.mark.gpu
def test_what_is_made_of_simpler_instructions(device):
    """Whole numbers become floats by putting bits together, up to the most tokens that a sequence may have; the fast erf is a polynomial."""
    x = torch.tensor([0, 1, 2, 1023, 1 << 20, mods.MOST - 1, mods.MOST, 12345], dtype=torch.int32, device=device)
    y = torch.linspace(-6, 6, 4096, device=device)
    real, erf = torch.empty(8, device=device), torch.empty_like(y)
    _instructions[(1,)](x, y, real, erf)
    assert torch.equal(real, x.float())
    torch.testing.assert_close(erf.double(), torch.erf(y.double()), rtol=0, atol=5e-5)
    assert erf.abs().max() <= 1 and torch.equal(erf[y.abs() >= 3], y[y.abs() >= 3].sign())  # so that gelu of what is very negative is 0
    y[:3] = torch.tensor([-torch.inf, torch.nan, torch.inf])
    _instructions[(1,)](x, y, real, erf)
    assert erf[:3].tolist()[::2] == [-1, 1] and erf[1].isnan()


@triton.jit
def _instructions(x_ptr, y_ptr, real_ptr, erf_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 4096)
    tl.store(real_ptr + i, _real(tl.load(x_ptr + i)))
    tl.store(erf_ptr + j, _erf_fast(tl.load(y_ptr + j)))


# ---- compiled


def source(kind, function, tensors, g=(), size=64, axis=0):
    """`_tile` as it would be specialised for a launch."""
    if not isinstance(_tile, JITFunction):
        pytest.skip("TRITON_INTERPRET is set: @triton.jit made an interpreted function, which cannot be compiled")
    pointers = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}
    types = dict.fromkeys(_tile.arg_names[:3], "*fp32") | dict.fromkeys(("b", "h", "len_q", "len_k"), "i32")
    constexprs = {"M": size, "N": size, "I_AXIS": axis, "MASK": None, "SCORE": None, "SCORE_GRAD": None} | {kind: function}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(3)}
    for name, values in (("c", mods.captured(tensors)), ("g", g)):
        number = _tile.arg_names.index(name)
        types[name] = tuple(pointers[x.dtype] if isinstance(x, torch.Tensor) else "constexpr" if x == 1 else "i32" for x in values)
        constexprs |= {(number, n): 1 for n, x in enumerate(values) if isinstance(x, int) and x == 1}
        aligned |= {(number, n): [["tt.divisibility", 16]] for n, x in enumerate(values) if isinstance(x, torch.Tensor) or x % 16 == 0}
    types = {name: types.get(name, "constexpr") for name in _tile.arg_names}
    return ASTSource(_tile, types, constexprs, aligned)


def ptx(kind, function, tensors, g=(), arch=90, **how):
    return triton.compile(source(kind, function, tensors, g, **how), target=GPUTarget("cuda", arch, 32)).asm["ptx"]


@pytest.mark.parametrize(
    ("kind", "name"), [("mask", "document"), ("mask", "trees"), ("mask", "where"), ("score", "chain"), ("score", "buckets"), ("score", "math")]
)
def test_compiles(kind, name):
    """As constexpr arguments, with a tuple of pointers and ints, both ways round."""
    mod = cases(kind)[name]
    if kind == "mask":
        ptx("MASK", mods.mask_function(mod.static().text), mod.tensors, axis=1)
        return
    wanted = (True,) * len(mod.tensors)
    forward, backward = mods.score_functions(mod.static().text, wanted)
    ptx("SCORE", forward, mod.tensors)
    ptx("SCORE_GRAD", backward, mod.tensors, mods.gradients(mod.tensors, wanted)[0], axis=1)


def test_a_bias_is_read_and_its_gradient_added_in_vectors():
    """A whole tile of a tensor whose sizes are multiples of 16: the guards leave 16 bytes a load."""
    bias = scores.Bias(torch.randn(BATCH, HEADS, 64, 64, dtype=torch.float16))
    forward, backward = mods.score_functions(bias.static().text, (True,))
    base = ptx("SCORE", mods.score_functions(ScoreMod(lambda s, b, h, i, j: s + 1).static().text)[0], []).count("ld.global.v4.b32")
    code = ptx("SCORE", forward, bias.tensors)
    assert code.count("ld.global.v4.b32") == base + 64 * 64 * 2 // 16 // 128  # 128 threads
    assert code.count("ld.global") == code.count("ld.global.v4.b32")
    assert "atom.global.gpu.relaxed.add.v4.f32" in ptx("SCORE_GRAD", backward, bias.tensors, mods.gradients(bias.tensors, (True,))[0])


def test_what_depends_on_a_head_is_one_load():
    """ALiBi: one slope, and of each score a subtraction and a multiply-add, no cast."""
    code = ptx("SCORE", mods.score_functions(scores.ALiBi(torch.rand(HEADS)).static().text)[0], [torch.rand(HEADS)])
    assert code.count("ld.global.b32") == 1
    assert code.count("fma.rn.f32") == 64 * 64 // 128
    assert code.count("cvt.rn.f32") < 64 * 64 // 128


def test_fast_is_for_scores_not_for_places():
    """tanh by one instruction and quotients as products, but a bucket's number to the last bit."""
    cap, buckets = (score.static().text for score in (scores.Softcap(30.0), scores.BucketBias(torch.randn(8, HEADS))))
    assert "tanh.approx" in ptx("SCORE", mods.score_functions(cap, (), True)[0], [])
    assert "tanh.approx" not in ptx("SCORE", mods.score_functions(cap)[0], [])
    code = ptx("SCORE", mods.score_functions(buckets, (), True)[0], [torch.randn(8, HEADS)])
    assert "div.rn.f32" in code and "div.full.f32" not in code


def test_no_gradient_wanted_costs_nothing():
    """The gradient by `s` of an added bias is `ds`; the bias is not even read."""
    bias = scores.Bias(torch.randn(64, 64))
    code = ptx("SCORE_GRAD", mods.score_functions(bias.static().text)[1], bias.tensors)
    assert "atom" not in code and "add.f32" not in code


# ---- caches, refusals


def texts():
    return [MaskMod(f).static().text for f in (lambda b, h, i, j: i >= j, lambda b, h, i, j: i > j)]


def test_each_text_has_its_own_compiled_kernel():
    """Triton's caches, of the process and on disk, tell two functions apart, and know one again in another process."""
    sees = [mods.mask_function(text) for text in texts()]
    assert mods.mask_function(texts()[0]) is sees[0]
    keys = [source("MASK", function, []).hash() for function in sees]
    assert keys[0] != keys[1]
    assert len({compute_cache_key({}, [("constexpr", function)], {}) for function in sees}) == 2
    script = "import sys; from onchip.kernels.attention import mods; print(mods.mask_function(sys.argv[1]).cache_key)"
    again = subprocess.run([sys.executable, "-c", script, texts()[0]], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == sees[0].cache_key


def test_refuses_in_words():
    good, bad = texts()[0], ScoreMod(lambda s, b, h, i, j: s + torch.special.i0(s)).static().text
    assert mods.refuses(good) is None
    assert mods.refuses(bad) == "aten.i0 of float32 has no Triton form (`aten.i0.default(s)`)"
    with pytest.raises(Unsupported, match="i0"):
        mods.score_functions(bad)


def test_what_can_be_copied_by_tiles():
    """One float tensor at [.., i, j], b and h before them in any order; nothing else is read by query and key."""
    table, half, flags = torch.randn(2, 3, 8, 8), torch.randn(8, 8, dtype=torch.float16), torch.ones(8, 8, dtype=torch.int32)
    for function, found in (
        (lambda s, b, h, i, j: s + table[b, h, i, j], (0, "bh", torch.float32)),
        (lambda s, b, h, i, j: s * table[h, b, i, j] + table[h, b, i, j], (0, "hb", torch.float32)),
        (lambda s, b, h, i, j: s * table[0, 0, 0, 0] + half[i, j], (1, "", torch.float16)),
        (lambda s, b, h, i, j: s + table[b, h, i, j] + half[i, j], None),
        (lambda s, b, h, i, j: s + table[b, h, i, j] + table[b, h, i, i], None),
        (lambda s, b, h, i, j: s + table[b, h, j, i], None),
        (lambda s, b, h, i, j: s + table[b, h // 2, i, j], None),
        (lambda s, b, h, i, j: s + table[b, h, i, j - 1], None),
        (lambda s, b, h, i, j: s + flags[i, j], None),
    ):
        assert pair_tile(ScoreMod(function).static().text) == found
    assert pair_tile(scores.Bias(table[:1]).static().text) == (0, "h", torch.float32)
    keys, wide = torch.randn(2, 3, 8).bfloat16(), torch.randn(8)
    for function, axes in (
        (lambda s, b, h, i, j: s + keys[b, h, j], "bh"),
        (lambda s, b, h, i, j: keys[h, b, j] + s, "hb"),
        (lambda s, b, h, i, j: s + half[h, j], "h"),
        (lambda s, b, h, i, j: s * 2.0 + half[h, j], None),
        (lambda s, b, h, i, j: s + half[i, j], None),
        (lambda s, b, h, i, j: s + half[h, j] + half[b, j], None),
        (lambda s, b, h, i, j: s + wide[j], None),
        (lambda s, b, h, i, j: s - half[h, j], None),
    ):
        found = key_tile(ScoreMod(function).static().text)
        assert found == (axes if axes is None else (0, axes, keys.dtype if "b" in axes else half.dtype))
    *_, forward = mods.split_functions(None, scores.Bias(half).static().text, tiled=True)
    source = "".join(linecache.getlines(forward.fn.__code__.co_filename))
    assert "tl.load" not in source and "t = known[2]\n    v0 = s + t" in source


def test_captured_and_gradients():
    table, flags = torch.randn(3, 5, dtype=torch.float16).T, torch.rand(4) < 0.5
    c = mods.captured([table, flags])
    assert c[0] is table and c[1:5] == (5, 3, 1, 5) and c[5].dtype == torch.uint8 and c[6:] == (4, 1)
    g, buffers = mods.gradients([flags, table, table], (True, False, True))
    assert buffers[:2] == [None, None] and buffers[2].shape == (5, 3) and buffers[2].dtype == torch.float32
    assert g[0] is buffers[2] and g[1:] == buffers[2].stride() and not buffers[2].any()


SLOPES, TURNS, EACH = torch.ones(4), torch.ones(64), torch.ones(4, 64)
LINES = [  # a score, and where its lines bend; "": it adds none
    (scores.ALiBi(SLOPES), "row"),
    (scores.ALiBi(torch.ones(2, 4), "linear"), "straight"),
    (ScoreMod(lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs()), "i"),
    (ScoreMod(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / 16))), "straight"),
    (ScoreMod(lambda s, b, h, i, j: (j - 2 * i) * TURNS[i] + s), "straight"),
    (scores.Scores((scores.ALiBi(SLOPES), ScoreMod(lambda s, b, h, i, j: s + 0.5 * (j - i).abs()))), "i row"),
    *((ScoreMod(function), "") for function in (
        lambda s, b, h, i, j: s + (j - (i + 3)).abs(), lambda s, b, h, i, j: s + (j - 2 * i).abs(), lambda s, b, h, i, j: s + (j - i) // 4,
        lambda s, b, h, i, j: s + (j - i) * j, lambda s, b, h, i, j: s + EACH[h, j], lambda s, b, h, i, j: s * 2 + j, lambda s, b, h, i, j: j * 0.5 - s,
        lambda s, b, h, i, j: s + s, lambda s, b, h, i, j: s + TURNS[i], lambda s, b, h, i, j: s + torch.where(j > i, j, 0),
    )),
    (scores.Scores((scores.ALiBi(SLOPES), scores.Softcap(3.0))), ""),
]  # fmt: skip


@pytest.mark.parametrize(("score", "bends"), LINES, ids=str)
def test_lines(score, bends):
    assert line_of(score.static().text) == bends
    assert not is_tanh(score.static().text) and is_tanh(scores.Softcap(3.0).static().text)


def test_only_adds():
    """A score that is there once, and nothing of it in what is added."""
    adds = (lambda s, b, h, i, j: EACH[h, j] + s, lambda s, b, h, i, j: (s + TURNS[i]) + (EACH[h, j] + EACH[b, j]))
    others = (
        lambda s, b, h, i, j: s + s + TURNS[i], lambda s, b, h, i, j: torch.add(TURNS[i], s, alpha=2), lambda s, b, h, i, j: (s + TURNS[i]) + (s + TURNS[j]),
        lambda s, b, h, i, j: TURNS[i] + TURNS[j], lambda s, b, h, i, j: (x := s + TURNS[i]) + x, lambda s, b, h, i, j: s - TURNS[i],
    )  # fmt: skip
    assert all(only_adds(ScoreMod(f).static().text) for f in adds) and not any(only_adds(ScoreMod(f).static().text) for f in others)
