"""Every public function in a compiled graph: no break, the eager result, the eager gradients. And in an exported program."""

import io
import math
import shutil
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import and_masks, or_masks

import onchip
import onchip.ops.activation
import onchip.ops.lookup
import onchip.ops.norm
import onchip.ops.rotary
from onchip import Blocks, Causal, Chunked, Document, Dropout, Full, KeyPadding, MaskMod, Prefix, ScoreMod, Softcap, Tree, Window
from onchip.core.bands import Mask
from onchip.core.scores import ALiBi, BucketBias, RelativeBias

BATCH, LEN, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 16
COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=COMPILER)]


def cases(all_of_them, *inductor):
    """Each with a backend that compiles nothing, some with the one that does, which takes seconds."""
    return [(name, "aot_eager") for name in all_of_them] + [pytest.param(name, "inductor", marks=COMPILER) for name in inductor]


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes))).requires_grad_()


def qkv(*lead):
    return [torch.randn(*lead, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def run(function, inputs, reads=()):
    """The results and the gradients of inputs and of what a score reads."""
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    loss = sum((o.masked_fill(o == -torch.inf, 0.0).float() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in out)
    return [*out, *torch.autograd.grad(loss, (*inputs, *reads))]


def check(function, inputs, reads=(), backend="aot_eager"):
    """Twice, so that what the first run left behind counts; of the eager Problem, so that a compiled call takes the kernel of an eager one."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        with onchip.record() as ours:
            found = run(compiled, inputs, reads)
        with onchip.record() as eager:
            expected = run(function, inputs, reads)
        torch.testing.assert_close(found, expected)
        assert eager and [d.problem for d in ours][: len(eager)] == [d.problem for d in eager]  # "reference" by name goes back by autograd
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


# ---- attention, with everything it has

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 3 + [2] * 6])
LENGTHS = torch.tensor([5, 12])
GRID = torch.rand(1, HEADS, 3, 3, generator=torch.Generator().manual_seed(0)) > 0.4
SIDES = torch.tensor([1, 2, 3, 4])
SLOPES, DISTANCES, BUCKETS = torch.rand(HEADS).requires_grad_(), leaf(HEADS, 11), leaf(8, HEADS)
BIAS, SINKS, TABLE = leaf(1, HEADS, LEN, LEN), leaf(HEADS), leaf(HEADS, LEN)
OUTSIDE = {"document": Document(IDS), "mod": MaskMod(lambda b, h, i, j: (i >= j) & (IDS[b, i] == IDS[b, j]))}
REACH = 3


def seen(b, h, i, j):
    return (i - j < REACH) & (IDS[b, i] == IDS[b, j])


def tilted(s, b, h, i, j):
    return s + TABLE[h, (i - j).abs()]


class Strided(Mask):
    """A mask from outside the library."""

    def __init__(self, step):
        self.step = step

    def sees(self, at):
        return (at.row - at.j) % self.step == 0


MASKS = {
    "full": lambda: Full(),
    "causal": lambda: Causal(),
    "window": lambda: Window(REACH, 1, "top_left"),
    "windows": lambda: Window(SIDES),
    "chunked or prefix": lambda: Chunked(4) | Prefix(2),
    "document of outside": lambda: OUTSIDE["document"],
    "document and causal": lambda: Causal() & Document(IDS),
    "document or padding": lambda: Document(IDS) | KeyPadding(LENGTHS),
    "blocks": lambda: Blocks(GRID, 4),
    "dense": lambda: GRID.repeat_interleave(4, 2).repeat_interleave(4, 3),
    "tree": lambda: Tree.of(torch.tensor([-1, 0, 0, 1])),
    "function": lambda: seen,
    "function made inside": lambda: lambda b, h, i, j: (i - j < REACH) & (IDS[b, i] == IDS[b, j]),
    "functions that torch puts together": lambda: and_masks(seen, or_masks(seen, lambda b, h, i, j: i - j < REACH)),
    "function of outside and band": lambda: Causal() & OUTSIDE["mod"],
    "class of one's own": lambda: Strided(2),
}
SCORES = {
    "alibi": (lambda: {"score": ALiBi(SLOPES)}, (SLOPES,)),
    "relative": (lambda: {"score": RelativeBias(DISTANCES)}, (DISTANCES,)),
    "buckets": (lambda: {"score": BucketBias(BUCKETS, 8)}, (BUCKETS,)),
    "bias": (lambda: {"bias": BIAS}, (BIAS,)),
    "part of a bias": (lambda: {"bias": BIAS[0, :, :1]}, (BIAS,)),
    "softcap": (lambda: {"softcap": 1.5, "scale": 0.3}, ()),
    "function": (lambda: {"score": tilted}, (TABLE,)),
    "function made inside": (lambda: {"score": lambda s, b, h, i, j: s * 2 + TABLE.exp()[h, (i - j).abs()] + BIAS[0, h, 0, j]}, (TABLE, BIAS)),
    "function with a buffer, and a constant": (lambda: {"score": lambda s, b, h, i, j: torch.nn.functional.logsigmoid(s) * s.new_full((), 2.0)}, ()),
    "function that branches": (lambda: {"score": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))}, ()),
    "several": (lambda: {"bias": BIAS, "score": [ScoreMod(tilted), Softcap(3.0), ALiBi(SLOPES)], "softcap": 2.0}, (BIAS, TABLE, SLOPES)),
    "sinks": (lambda: {"sinks": SINKS, "mask": Causal()}, (SINKS,)),
    "one tensor twice": (lambda: {"sinks": SLOPES, "score": [ALiBi(SLOPES), lambda s, b, h, i, j: s * SLOPES[h]]}, (SLOPES,)),
    "lse": (lambda: {"return_lse": True, "mask": Window(2)}, ()),
    "dropout": (lambda: {"dropout": Dropout(0.3, 7, 1)}, ()),
    "flags": (lambda: {"deterministic": True, "batch_invariant": True, "kernel": "reference"}, ()),
}


@pytest.mark.parametrize(("name", "backend"), cases(MASKS, "document and causal", "function made inside"))
@pytest.mark.sampled(2)
def test_attention_with_a_mask(name, backend):
    check(lambda q, k, v: onchip.attention(q, k, v, mask=MASKS[name]()), qkv(BATCH, LEN), (), backend)


@pytest.mark.parametrize(("name", "backend"), cases(SCORES, "part of a bias", "several", "sinks", "dropout"))
@pytest.mark.sampled(2)
def test_attention_with_a_score(name, backend):
    keywords, reads = SCORES[name]
    check(lambda q, k, v: onchip.attention(q, k, v, **keywords()), qkv(BATCH, LEN), reads, backend)


@pytest.mark.parametrize("mask", [Window, Prefix, Chunked, lambda n: Causal() & Prefix(n)], ids=["window", "prefix", "chunked", "prefix and causal"])
def test_a_number_of_a_mask_may_be_another_one_in_each_call(mask):
    """From the second call on it is a symbol of the graph."""
    q, k, v = (t.detach() for t in qkv(BATCH, LEN))
    compiled = torch.compile(lambda q, n: onchip.attention(q, k, v, mask=mask(n)), fullgraph=True, backend="aot_eager")
    for n in (3, 4, 7):
        torch.testing.assert_close(compiled(q, n), onchip.attention(q, k, v, mask=mask(n)))


@pytest.mark.parametrize("name", ["full", "windows", "document and causal", "tree", "function made inside"])
def test_the_problem_of_a_mask_and_a_score_is_the_eager_one(name):
    """That of either alone: in `check`."""
    inputs = qkv(BATCH, LEN)
    function = lambda q, k, v: onchip.attention(q, k, v, mask=MASKS[name](), score=tilted)  # noqa: E731
    with onchip.record() as eager:
        run(function, inputs)
    with onchip.record() as compiled:
        run(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
    assert [d.problem for d in eager] == [d.problem for d in compiled]


# ---- the others

OFFSETS, OFFSETS_K = torch.tensor([0, 5, LEN], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)
USED = torch.tensor([4, 7], dtype=torch.int32)
PAGES = leaf(2, 8, 4, KV_HEADS, DIM)
PAGE_TABLE, CACHED = torch.tensor([[3, 1, 0], [0, 5, 2]], dtype=torch.int32), torch.tensor([7, 10], dtype=torch.int32)


def packed_pair(q, k, v):
    mask, bias = Causal() & Document(IDS[:, :8]), BIAS[:, :, :7, :8]
    return onchip.attention_packed(q, k, v, OFFSETS, OFFSETS_K, longest=(7, 8), mask=mask, bias=bias, sinks=SINKS, used=(USED, None), return_lse=True)


def halves(q, k, v):
    return onchip.merge([onchip.attention(q, k[:, a : a + 6], v[:, a : a + 6], return_lse=True) for a in (0, 6)])


def paged(q):
    cache = onchip.PagedKV(*PAGES, PAGE_TABLE, CACHED)
    return onchip.paged_attention(q, cache, sinks=SINKS, score=lambda s, b, h, i, j: s + BIAS[0, h, 0, j], return_lse=True)


def ragged(q):
    return onchip.paged_attention(q, onchip.PagedKV(*PAGES, PAGE_TABLE, CACHED), q_offsets=OFFSETS, longest=7, sinks=SINKS, return_lse=True)


OTHERS = {
    "packed": (lambda q, k, v: onchip.attention_packed(q, k, v, OFFSETS, longest=7, mask=Causal()), lambda: qkv(LEN), ()),
    "packed, longest from the offsets": (lambda q, k, v: onchip.attention_packed(q, k, v, OFFSETS, mask=Document(IDS)), lambda: qkv(LEN), ()),
    "packed pair": (packed_pair, lambda: [qkv(LEN)[0], *qkv(16)[1:]], (SINKS, BIAS)),
    "paged": (paged, lambda: [leaf(BATCH, 2, HEADS, DIM)], (PAGES, SINKS, BIAS)),
    "paged, packed queries": (ragged, lambda: [leaf(LEN, HEADS, DIM)], (PAGES, SINKS)),
    "merge": (halves, lambda: qkv(BATCH, LEN), ()),
}


@pytest.mark.parametrize(("name", "backend"), cases(OTHERS, "packed pair", "paged"))
def test_packed_paged_merge(name, backend):
    function, inputs, reads = OTHERS[name]
    check(function, inputs(), reads, backend)


# ---- what a compiler must not bake in


def test_a_length_that_changes_compiles_once():
    counter = CompileCounterWithBackend("aot_eager")
    function = lambda q, k, v: onchip.attention(q, k, v, mask=Causal() & MaskMod(lambda b, h, i, j: i - j < 9))  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    frames = set()
    for length in (15, 20, 33, 64):
        inputs = qkv(BATCH, length)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 1)
        torch.testing.assert_close(run(compiled, inputs), run(function, inputs))
        frames.add(counter.frame_count)
    assert len(frames) == 1


def test_a_packed_length_that_changes_compiles_once():
    counter = CompileCounterWithBackend("aot_eager")
    function = lambda q, k, v, offsets: onchip.attention_packed(q, k, v, offsets, mask=Causal())  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    for tokens in (15, 20, 33):
        inputs, offsets = qkv(tokens), torch.tensor([0, 5, tokens], dtype=torch.int32)
        torch.testing.assert_close(run(lambda *x, o=offsets: compiled(*x, o), inputs), run(lambda *x, o=offsets: function(*x, o), inputs))
        frames.add(counter.frame_count)
    assert len(frames) == 1


def test_numbers_that_change():
    """A window, a cap and a probability given as arguments: torch.compile makes symbols of them at the second call."""
    function = lambda q, k, v, n, cap: onchip.attention(q, k, v, mask=Window(n), softcap=cap, dropout=Dropout(cap / 10, 3), scale=cap)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = qkv(BATCH, LEN)
    for n, cap in ((3, 1.5), (4, 2.5), (5, 3.5), (3, 1.5)):
        torch.testing.assert_close(compiled(*inputs, n, cap), function(*inputs, n, cap))


def test_numbers_that_a_graph_cannot_look_at():
    """The operator does."""
    q, offsets = torch.randn(5, HEADS, DIM), torch.tensor([0, 3, 5], dtype=torch.int32)
    run = torch.compile(lambda scale, longest: onchip.attention_packed(q, q, q, offsets, scale=scale, longest=longest), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(0.5, 3), onchip.attention_packed(q, q, q, offsets, scale=0.5))
    with pytest.raises(ValueError, match="attention: scale is nan; give a finite number"):
        run(math.nan, 3)
    with pytest.raises(ValueError, match="longest is 2, and a sequence has 3 tokens; give the most of any, or more"):
        run(0.5, 2)


def test_masks_that_change():
    """Another tensor in the same mask, another mask, another function: each gives its own result."""
    function = lambda q, k, v, mask: onchip.attention(q, k, v, mask=mask)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = qkv(BATCH, LEN)

    def narrow(n):  # no default argument: torch 2.11 does not notice when one changes
        return lambda b, h, i, j: i - j < n

    banded = [narrow(2), narrow(3)]
    for mask in (Document(IDS), Document(IDS + IDS.flip(0)), Causal(), Window(2), Window(3), *banded, *map(MaskMod, banded), Document(IDS)):
        torch.testing.assert_close(compiled(*inputs, mask), function(*inputs, mask))


def test_a_tensor_in_place():
    """A captured tensor is read at each call."""
    table = TABLE.detach().clone()
    function = lambda q, k, v: onchip.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h, j])  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = qkv(BATCH, LEN)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
        table.mul_(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_without_a_seed(backend):
    """Every run draws its own, and its gradients are of what it drew: those of v sum to what the output's weights sum to."""
    q, k, _ = qkv(BATCH, LEN)
    v = torch.ones(BATCH, LEN, KV_HEADS, DIM, requires_grad=True)
    compiled = torch.compile(lambda q, k, v: onchip.attention(q, k, v, dropout=0.5), fullgraph=True, backend=backend)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    (grad,) = torch.autograd.grad(second.sum(), v)
    torch.testing.assert_close(grad.sum(), second.sum())


def test_autocast_inside():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return onchip.attention(q, k, v, mask=Causal())

    check(function, qkv(BATCH, LEN))
    assert torch.compile(function, fullgraph=True, backend="aot_eager")(*qkv(1, 3)).dtype == torch.bfloat16


# ---- modules and exports


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.bias = torch.nn.Parameter(torch.randn(HEADS, 16, 16))
        self.table = torch.nn.Parameter(torch.randn(HEADS, 16))
        self.register_buffer("ids", torch.tensor([[0] * 4 + [1] * 12] * BATCH))

    def tilted(self, s, b, h, i, j):
        return s + self.table[h, (i - j).abs()]

    def forward(self, x):
        q, k, v = self.into(x).view(*x.shape[:2], 3, HEADS, DIM).unbind(2)
        n = x.shape[1]
        return onchip.attention(q, k, v, mask=Causal() & Document(self.ids), bias=self.bias[:, :n, :n], score=self.tilted).flatten(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module(backend):
    module = Block()
    check(module, [torch.randn(BATCH, 16, HEADS * DIM, requires_grad=True)], tuple(module.parameters()), backend)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_of_a_vmap(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.func.vmap(lambda q: onchip.attention(q, k, v, mask=onchip.Causal()))(q)

    given = torch.randn(3, 2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    program = torch.export.export(Module(), given, strict=strict)
    torch.testing.assert_close(program.module()(*given), Module()(*given))


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_and_its_file(strict):
    module, x = Block(), torch.randn(BATCH, 16, HEADS * DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (x,), strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file)
    assert [str(node.target) for node in program.graph.nodes if "onchip" in str(node.target)] == ["onchip.attention.default"]
    for each in (program, loaded):
        torch.testing.assert_close(each.module()(x), module(x))
    assert set(loaded.state_dict) == set(module.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["paged", "packed", "chosen pages", "cascade"])
def test_an_export_of_any_batch(name, strict):
    pages, table, lengths = torch.randn(9, 4, KV_HEADS, DIM), torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([5, 8, 1], dtype=torch.int32)
    shared = onchip.Level(torch.tensor([[6, 7]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32), None, 3)
    run, inputs = {
        "paged": (lambda q, t, n: onchip.paged_attention(q, onchip.PagedKV(pages, pages, t, n)), (table, lengths)),
        "packed": (lambda q, _: onchip.attention_packed(q[:, 0], q[:, 0], q[:, 0], shared.lengths.new_tensor([0, 2]), longest=9), (lengths,)),
        "chosen pages": (lambda q, t, n, at: onchip.attend_pages(q, onchip.PagedKV(pages, pages, t, n), at), (table, lengths, table % 2)),
        "cascade": (lambda q, t, n: onchip.cascade_attention(q, onchip.PagedKV(pages, pages, t, n), [shared]), (table, lengths)),
    }[name]

    class Module(torch.nn.Module):
        def forward(self, *given):
            return run(*given)

    given = (torch.randn(3, 1, HEADS, DIM), *inputs)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Module(), given, dynamic_shapes=(({0: batch},) * len(given),), strict=strict)
    fewer = [t[:2] for t in given]
    torch.testing.assert_close(program.module()(*fewer), run(*fewer))


def test_an_export_of_any_length():
    class Plain(torch.nn.Module):
        def forward(self, q, k, v):
            return onchip.attention(q, k, v, mask=Window(5), softcap=3.0)

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Plain(), tuple(qkv(BATCH, LEN)), dynamic_shapes=({1: length},) * 3)
    for n in (2, 7, 40):
        inputs = qkv(BATCH, n)
        torch.testing.assert_close(program.module()(*inputs), Plain()(*inputs))


def test_a_text_of_a_program_that_knew_no_sources():
    """Texts lie in exported files: what came later stands at the end."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 5))
    how = '[{"Causal": []}, null, null, null, null, null, null, null, null, false, false, "auto"]'
    truth = onchip.attention(q, k, v, mask=Causal(), scale=0.5)
    out, _ = torch.ops.onchip.attention(q, k, v, [], None, None, 0.0, 0.5, how)
    d_out = torch.randn_like(out)
    assert torch.equal(out, truth)
    assert all(map(torch.equal, torch.autograd.grad(out, [q, k, v], d_out), torch.autograd.grad(truth, [q, k, v], d_out)))


@pytest.mark.parametrize("call", ['["torch.load", ["a file"], {}]', '["Tensor.__class__", [3], {}]', '["torch.hub", [], {}]'])
def test_a_text_from_a_file_calls_functions_of_tensors_only(call):
    mask = f'{{"mask": "mod", "hull": "Full", "calls": [{call}], "gives": {{"value": "v0"}}}}'
    how = f'[{mask}, null, null, null, null, null, null, null, null, false, false, "auto"]'
    q, k, v = qkv(1, 5)
    with pytest.raises(ValueError, match="a mask or score function cannot be traced: it calls "):
        torch.ops.onchip.attention(q, k, v, [], None, None, 0.0, 0.25, how)


# ---- the operators themselves


def test_operators_are_as_they_are_registered():
    """torch.library's own checks: schema, fake, autograd, dynamic shapes."""
    q, k, v = qkv(BATCH, LEN)
    how = '[{"Causal": ["bottom_right"]}, {"Bias": [{"tensor": 0}]}, {"tensor": 1}, null, null, null, null, null, null, false, false, "auto"]'
    torch.library.opcheck(torch.ops.onchip.attention.default, (q, k, v, [BIAS, SINKS], None, None, 0.0, 0.25, how))
    with torch.no_grad():
        out, lse = torch.ops.onchip.attention(q, k, v, [BIAS, SINKS], None, None, 0.0, 0.25, how)
    given = (*(t.detach() for t in (q, k, v)), [BIAS.detach(), SINKS.detach()], None, None, 0.0, 0.25, how, out, lse, torch.randn_like(out), None, [True] * 5)
    torch.library.opcheck(torch.ops.onchip.attention_backward.default, given)
    how = '[{"Causal": ["bottom_right"]}, null, null, null, null, null, null, null, null, false, false, "auto"]'
    paged = (leaf(BATCH, 2, HEADS, DIM), *PAGES.detach().clone(), PAGE_TABLE, CACHED, [], 0.25, how)
    torch.library.opcheck(torch.ops.onchip.paged_attention.default, paged)
    how = '[{"Causal": ["bottom_right"]}, null, null, {"tensor": 0}, null, null, null, null, null, false, false, "auto"]'
    for longest in (7, None):
        ragged = (leaf(LEN, HEADS, DIM), *PAGES.detach().clone(), PAGE_TABLE, CACHED, [OFFSETS], 0.25, how, longest)
        torch.library.opcheck(torch.ops.onchip.paged_attention.default, ragged)


TURNED, OTHER = torch.randn(8, 6).T, torch.randn(8, 6).T
TURNED_HEADS = torch.randn(2, 3, 5, 8).transpose(1, 2)
STATS = torch.zeros(6), torch.ones(6)
ROWS = {
    "rms_norm": (TURNED, torch.ones(8), 1e-6, 0.0, "auto"),
    "add_rms_norm": (TURNED, torch.ones(8), 1e-6, 0.0, OTHER, "auto"),
    "norm": (TURNED, [OTHER], "residual", "rms", "", True, False, 1e-6, 0.0, 0.0, 1, 1, "auto"),
    "norm of layers": (TURNED, [], "", "layer", "int8", True, False, 1e-6, 0.0, 0.0, 1, 1, "auto"),
    "norm_backward": (TURNED, None, OTHER, None, *STATS, [OTHER], "silu", "layer", False, 1e-6, 0.0, 0.0, 1, 1, "x silu", "auto"),
    "rotary": (TURNED_HEADS, TURNED_HEADS, torch.ones(5, 4), torch.arange(5).expand(2, 5), "neox", "auto"),
    "rotary_backward": (TURNED_HEADS, TURNED_HEADS, torch.ones(5, 4), torch.arange(5).expand(2, 5), "neox", "auto"),
    "activation": ("activate", TURNED, None, "silu", 0.0, 0.0, "auto"),
    "activation gated": ("gated_act", TURNED, None, "silu", 0.0, 0.0, "auto"),
    "activation clipped": ("gated_act", TURNED, None, "clipped", 1.0, 1.0, "auto"),
    "dropout_add": (TURNED, OTHER, 0.5, torch.tensor([1, 0]), "auto"),
    "hadamard": (TURNED, "auto"),
    "activation_backward": ("activate", TURNED, None, "silu", 0.0, 0.0, "auto", OTHER),
}


@pytest.mark.parametrize("name", ROWS)
def test_results_lie_as_the_fakes_say(name):
    """Whatever lies across."""
    torch.library.opcheck(getattr(torch.ops.onchip, name.split()[0]).default, ROWS[name], test_utils="test_faketensor")


# ---- fused operators

T = 24


def sampling(rows):
    floats = [torch.full((rows,), x) for x in (0.8, 0.9, 0.05)]
    ints = [torch.full((rows,), x, dtype=torch.int64) for x in (7, 3)]
    return onchip.Sampling(floats[0], torch.full((rows,), 20, dtype=torch.int32), *floats[1:], *ints)


def rope(x, append):
    x = x.clone()
    pool = torch.zeros(2, 3, 16, 2, 16) if append else (None, None)
    where = onchip.Append(pool[0], pool[1], torch.arange(T)) if append else None
    table = torch.linspace(-1, 1, 40 * 16).view(40, 16)
    out = onchip.rope_append(x, table, torch.arange(T), (4, 2), append=where)
    return [*out, x, *((pool[0].clone(), pool[1].clone()) if append else ())]


def flat(results):
    return (results[0], *results[1])


def adjusted(x):
    seen = onchip.TokenIds(torch.tensor([[1, 1, -1]] * 3))
    bias = onchip.Bias(torch.tensor([[4]] * 3), torch.ones(3, 1))
    return onchip.adjust_logits(x, penalties=onchip.Penalties(*torch.full((3, 3), 1.1), seen), bias=bias, mask=torch.full((3, 4), -2, dtype=torch.int32))


FUSED = {
    "rms_norm": lambda: (lambda x: onchip.rms_norm(x, torch.ones(64)), [torch.randn(T, 64)]),
    "add_rms_norm": lambda: (lambda x, r: onchip.rms_norm(x, torch.ones(64), residual=r), [torch.randn(T, 64), torch.randn(T, 64)]),
    "gated_act": lambda: (lambda x: onchip.gated_act(x, "gelu"), [torch.randn(T, 64)]),
    "rope_append": lambda: (lambda x: rope(x, True), [torch.randn(T, 8 * 16)]),
    "rope": lambda: (lambda x: rope(x, False), [torch.randn(T, 8 * 16)]),
    "sample": lambda: (lambda x: onchip.sample(x, sampling(3)), [torch.randn(3, 100)]),
    "sample_log_probs": lambda: (lambda x: flat(onchip.sample(x, sampling(3)._replace(typical=torch.full((3,), 0.9)), logprobs=2)), [torch.randn(3, 100)]),
    "adjust_logits": lambda: (adjusted, [torch.randn(3, 100)]),
    "verify": lambda: (lambda x: tuple(onchip.verify(x, onchip.Draft(torch.ones(3, 2, dtype=torch.int64)), sampling(3))), [torch.randn(3, 3, 100)]),
    "verify_drawn": lambda: (
        lambda x, q: tuple(onchip.verify(x, onchip.Draft(torch.ones(3, 2, dtype=torch.int64), q), sampling(3))),
        [torch.randn(3, 3, 100), torch.full((3, 2, 100), 0.01)],
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operators(name):
    function, inputs = FUSED[name]()
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs))
