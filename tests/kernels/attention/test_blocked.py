"""What is `blocked`'s own: which keys a tile touches, what goes to torch's kernel, what may hold NaN, and the same bits again."""

import threading

import pytest
import torch

import onchip
from judge import assert_as_good_as_torch
from onchip import dispatch
from onchip.core import masks
from onchip.core.masks import Causal, Full, Window, as_mask
from onchip.core.problem import Attention, Dropout, Operands
from onchip.core.scores import ALiBi, Bias, BucketBias, RelativeBias, ScoreMod, Softcap, chain
from onchip.kernels.attention import blocked, blocked_fused, blocked_tiles
from onchip.kernels.attention.blocked_tiles import BESIDE, Part, cutting, groups, is_sum, reads, tiles
from onchip.kernels.attention.reference import place
from onchip.ops.attention import PagedKV

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")


def qkv(len_q, len_k=None, heads=(4, 2), dim=16, dim_v=None, dtype=FP32, batch=2):
    len_k = len_q if len_k is None else len_k
    shapes = ((len_q, heads[0], dim), (len_k, heads[1], dim), (len_k, heads[1], dim_v or dim))
    return [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(inputs, d_out=None, **how):
    """Output, LSE and gradients."""
    out, lse = onchip.attention(*inputs[:3], return_lse=True, kernel=how.pop("kernel", "blocked"), **how)
    return out, lse, *torch.autograd.grad(out, inputs, torch.ones_like(out) if d_out is None else d_out)


def problem(mask, len_q, len_k, heads=(4, 2), **more):
    return Attention("prefill", 1, len_q, len_k, *heads, 16, FP32, mask, **more)


# ---- tiles


def holes(len_q, len_k):
    """A mask of which whole stretches of keys are hidden from everybody, and some from the rows of a tile."""
    blocks = torch.rand(-(-len_q // 16), -(-len_k // 16)) < 0.3
    blocks[:, 1] = blocks[0] = False
    return masks.Blocks(blocks, 16)


SHAPES = ((200, 200), (37, 200), (200, 37), (1, 50))
MASKS = {
    "Full": lambda m, n: Full(),
    "Causal": lambda m, n: Causal(),
    "Causal top left": lambda m, n: Causal("top_left"),
    "Window": lambda m, n: Window(20, 7),
    "Window ahead": lambda m, n: Window(None, 3),
    "Blocks": holes,
    "Blocks of heads": lambda m, n: masks.Blocks(torch.rand(4, -(-m // 16), -(-n // 16)) < 0.2, 16),
    "Document": lambda m, n: masks.Document(torch.arange(n) // 40),
    "Chunked": lambda m, n: masks.Chunked(30),
    "Dense": lambda m, n: masks.Dense(torch.rand(m, n) < 0.05),
    "nothing": lambda m, n: masks.Dense(torch.zeros(m, n, dtype=torch.bool)),
}


@pytest.mark.parametrize(("len_q", "len_k"), SHAPES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("most", [16, 50, 1000])
def test_tiles_hold_what_is_seen_and_no_more_keys(name, len_q, len_k, most, monkeypatch):
    """Together they are the mask; in each, every key is seen by some row, and no row comes twice."""
    monkeypatch.setattr(blocked_tiles, "BLOCK", 32)
    mask = MASKS[name](len_q, len_k)
    p = problem(mask.static(), len_q, len_k)
    whole = mask.static().seen(place(0, 4, len_q, len_k, torch.device("cpu")), mask.tensors).broadcast_to(1, 4, len_q, len_k)
    found = torch.zeros_like(whole)
    rows_done = []
    for tile in tiles(p, Operands(1.0, mask=mask.tensors), Part(slice(0, 1), None, None, len_q, len_k), most, torch.device("cpu")):
        rows = torch.arange(len_q)[tile.rows]
        keys = torch.arange(len_k)[tile.keys]
        assert torch.equal(tile.at.i.flatten(), rows) and torch.equal(tile.at.j.flatten(), keys) and len(rows) <= most
        seen = torch.ones((), dtype=torch.bool) if tile.seen is None else tile.seen
        seen = seen.broadcast_to(1, 4, len(rows), len(keys))
        assert seen.any(2).any(1).all(), "a key that no row sees"
        assert tile.seen is None or not tile.seen.all()
        found[:, :, tile.rows, keys] = seen
        rows_done += rows.tolist()
    assert torch.equal(found, whole)
    assert len(rows_done) == len(set(rows_done))


def test_sparse_masks_go_in_blocks(monkeypatch):
    """A block-diagonal mask costs what its area costs, a dense one a call a tile."""
    calls = []
    monkeypatch.setattr(blocked, "fused_forward", lambda q, k, v, *rest, **more: calls.append(q.shape[2] * k.shape[2]) or forward(q, k, v, *rest, **more))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    inputs = qkv(1024, batch=1)
    onchip.attention(*inputs, mask=masks.Document(torch.arange(1024) // 128), kernel="blocked")
    assert sum(calls) == 8 * 128 * 128
    calls.clear()
    onchip.attention(*inputs, mask=torch.rand(1024, 1024) < 0.5, kernel="blocked")
    assert sum(calls) == 1024 * 1024 and len(calls) == 1
    calls.clear()
    onchip.attention(*inputs, mask=torch.arange(1024) // 128 == torch.arange(1024)[:, None] // 128, kernel="blocked")
    assert sum(calls) == 8 * 128 * 128, "whether it is a function or a tensor"
    calls.clear()
    onchip.attention(*inputs, mask=Window(63), kernel="blocked")
    assert sum(calls) <= 1024 * (64 + 64)


@pytest.mark.parametrize("blocks", [torch.rand(5, 9) < 0.5, torch.rand(2, 3, 5, 9) < 0.5, torch.rand(3, 5, 9) < 0.5], ids=lambda t: str(t.ndim))
@pytest.mark.parametrize(("rows", "keys"), [((0, 100), (0, 99)), ((7, 8), (13, 14)), ((19, 61), (11, 90)), ((20, 40), (22, 44))], ids=str)
def test_a_mask_of_blocks_is_asked_once_a_block(blocks, rows, keys, monkeypatch):
    """Within a tile that begins and ends anywhere; beside another mask that is not of blocks, at each place."""
    asked, run = [], blocked_tiles.run
    monkeypatch.setattr(blocked_tiles, "run", lambda traced, tensors, at: asked.append(at) or run(traced, tensors, at))
    mask = masks.Blocks(blocks, (20, 11))
    at = place(1, 3, 100, 99, torch.device("cpu"))
    near = at._replace(i=at.i[:, :, slice(*rows)], j=at.j[..., slice(*keys)])
    for given in (mask, mask & masks.Prefix(torch.tensor([30, 50]))):
        traced, tensors = as_mask(given).parts()
        expected = traced.run(None, *near, *tensors).expand(1, 3, -1, -1)
        assert torch.equal(blocked_tiles.value(traced, tensors, near).expand(1, 3, -1, -1), expected)
    assert len(asked) == 2 and asked[0].i.numel() == -(-rows[1] // 20) - rows[0] // 20 and asked[1].i.numel() == rows[1] - rows[0]


def test_hidden_tiles_of_our_own_products_are_skipped(monkeypatch):
    """Of 64 tiles of a checkerboard that many rows share, the hidden half costs nothing, forward and backward."""
    seen = []
    hide = blocked._hide
    monkeypatch.setattr(blocked, "_hide", lambda scores, tile: seen.append(scores.shape[2:]) or hide(scores, tile))
    monkeypatch.setitem(blocked.TILE, "cpu", (64, 64))
    blocks = (torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0
    gradients(qkv(512), mask=masks.Blocks(blocks, 64), softcap=5.0)
    assert sum(rows * keys for rows, keys in seen) == 2 * 512 * 512 // 2


def test_tensors_read_at_the_place_are_views_of_it():
    at = place(0, 4, 10, 12, torch.device("cpu"))
    at = at._replace(i=at.i[:, :, 3:6], j=at.j[..., 2:9])
    dense, bias = masks.Dense(torch.rand(4, 10, 12) < 0.5), Bias(torch.randn(2, 1, 10, 12))
    for part in (dense, bias, chain(torch.randn(10, 12), lambda s, b, h, i, j: s * 2, None)):
        (tensor,), static = part.tensors, part.static()
        (cut,) = reads(static, part.tensors, at)
        assert cut.shape[2:] == (3, 7) and cut.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    table = torch.randn(4, 30)
    for mod in (
        RelativeBias(torch.randn(4, 9)),
        ScoreMod(lambda s, b, h, i, j: s + table[h, i + j]),
        ScoreMod(lambda s, b, h, i, j: s * table[h, i] + table[h, j]),
    ):
        assert not cutting(mod.static())[1], "a look-up elsewhere, or twice, stays one"


def test_sums_are_found():
    table = torch.randn(4, 30)
    sums = (Bias(torch.randn(10, 12)), ALiBi(torch.rand(4)), ALiBi(torch.rand(4), "linear"), RelativeBias(torch.randn(4, 9)), BucketBias(torch.randn(8, 4)))
    sums += (chain(torch.randn(10, 12), [lambda s, b, h, i, j: s - (i - j).abs()], None), ScoreMod(lambda s, b, h, i, j: table[h, j] + s + 3))
    others = (Softcap(3.0), ScoreMod(lambda s, b, h, i, j: s * 2), ScoreMod(lambda s, b, h, i, j: s + s * 0), ScoreMod(lambda s, b, h, i, j: table[h, i] - s))
    others += (
        chain(torch.randn(10, 12), None, 3.0),
        ScoreMod(lambda s, b, h, i, j: torch.where(i > j, s, 0.0)),
        ScoreMod(lambda s, b, h, i, j: table[h, i] + 0 * j),
    )
    assert all(is_sum(part.static()) for part in sums) and not any(is_sum(part.static()) for part in others)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_masks_of_torchs_kernel(dtype):
    seen = torch.rand(1, 1, 30, 70) < 0.5
    tile = blocked_tiles.Tile(slice(0, 30), slice(0, 70), place(0, 4, 30, 70, torch.device("cpu")), seen)
    found = blocked._fused_mask(problem(Full(), 30, 70), Operands(1.0), tile, dtype)
    assert found.dtype == dtype and torch.equal(found, torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf))


def test_what_goes_to_torchs_kernel(monkeypatch):
    """Everything but dropout and scores that are no sum; of the gradients also not those of LSE and of what scores read."""
    forward, backward = [], []
    monkeypatch.setattr(blocked, "_online", lambda *args, run=blocked._online: forward.append(1) or run(*args))
    monkeypatch.setattr(blocked, "_backward", lambda *args, run=blocked._backward: backward.append(1) or run(*args))
    inputs = qkv(40, dim_v=24)
    bias = torch.randn(40, 40)
    for how in ({}, {"mask": Causal()}, {"mask": torch.rand(40, 40) < 0.5}, {"bias": bias}, {"sinks": torch.randn(4)}, {"score": ALiBi(torch.rand(4))}):
        gradients(inputs, **how)
        assert not forward and not backward, how
    for how in ({"softcap": 3.0}, {"dropout": 0.1}):
        gradients(inputs, **how)
        assert forward and backward, how
        forward.clear(), backward.clear()
    gradients([*inputs, bias.requires_grad_()], bias=bias)
    assert not forward and backward
    backward.clear()
    lse = onchip.attention(*inputs, kernel="blocked", return_lse=True)[1]
    torch.autograd.grad(lse.sum(), inputs)
    assert not forward and backward


DICE = torch.Generator().manual_seed(0)
OWN = {  # a call -> whether its gradient is torch's own
    "full": ((300, FP32), {}, True),
    "causal": ((300, FP32), {"mask": Causal()}, True),
    "laid out first": ((300, BF16), {}, True),
    "few rows": ((100, BF16), {}, False),
    "cast": ((70, FP16), {}, True),
    "bias": ((90, FP32), {"bias": torch.randn(4, 90, 90, generator=DICE)}, True),
    "a tensor of bools": ((90, FP32), {"mask": torch.rand(2, 1, 90, 90, generator=DICE) < 0.5}, True),
    "with an LSE": ((90, FP32), {"return_lse": True}, False),
}


@pytest.fixture(params=[False, True], ids=["units of bfloat16", "none"])
def slow(request, monkeypatch):
    """Whether products of bfloat16 are slow here."""
    monkeypatch.setattr(blocked_fused, "_slow_in_bfloat16", lambda: request.param)
    for forget in (blocked_fused.whole.cache_clear, dispatch.forget):
        forget()
    yield request.param
    for forget in (blocked_fused.whole.cache_clear, dispatch.forget):
        forget()


READS = {
    "a bias": ((30, 40), lambda t: {"score": lambda s, b, h, i, j: s + t[i, j]}),
    "of heads": ((4, 30, 40), lambda t: {"score": lambda s, b, h, i, j: s + t[h, i, j]}),
    "bools": ((30, 40), lambda t: {"mask": lambda b, h, i, j: t[i, j] > 0}),
    "of sequences": ((2, 30, 40), lambda t: {"mask": lambda b, h, i, j: t[b, i, j] > 0}),
}


@pytest.mark.parametrize("longer", [False, True], ids=["as long", "longer"])
@pytest.mark.parametrize("name", READS)
def test_what_a_function_reads_may_be_longer_than_a_whole_call(name, longer):
    shape, how = READS[name]
    if longer:
        shape = (*shape[:-2], shape[-2] + 3, shape[-1] + 5)
    table, inputs = torch.randn(shape), qkv(30, 40)
    torch.testing.assert_close(onchip.attention(*inputs, **how(table)), onchip.attention(*inputs, kernel="reference", **how(table)), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", OWN)
def test_calls_that_are_torchs_own(name, slow):
    """Their node is torch's; output, gradients and what is recorded are as of any other call. In bfloat16 no gradient is torch's where that is slow."""
    (n, dtype), how, own = OWN[name]
    own = own and not (slow and dtype == BF16)
    inputs = qkv(n, dtype=dtype, dim_v=24 if name == "cast" else None)
    with onchip.record() as decisions:
        out = onchip.attention(*inputs, **how)
        out = out[0] if isinstance(out, tuple) else out
        d_out = torch.randn_like(out)
        found = (out, *torch.autograd.grad(out, inputs, d_out))
    assert [(d.problem.op, d.kernel.name) for d in decisions] == [("prefill", "blocked"), ("backward", "blocked")]
    node, names = out.grad_fn, []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert any("FlashAttentionForCpu" in name for name in names) == own, names
    wide = [t.detach().double().requires_grad_() for t in inputs]
    results = []
    for tensors, d in ((inputs, d_out), (wide, d_out.double())):
        other = {key: t.to(tensors[0].dtype) if isinstance(t, torch.Tensor) and t.dtype != torch.bool else t for key, t in how.items() if key != "return_lse"}
        plain = onchip.attention(*tensors, **other, kernel="reference")
        results.append((plain, *torch.autograd.grad(plain, tensors, d)))
    for ours, low, truth, slack in zip(found, *results, (2.0, 3.0, 3.0, 3.0), strict=True):
        assert_as_good_as_torch(ours, low, truth, slack)


@pytest.mark.parametrize("where", ["a row that sees no key", "a key that no row sees"])
def test_bool_tensors_hide_nan_with_and_without_gradients(where):
    """Tensors of bools small enough for one call: what they hide may hold anything, as in tiles."""
    seen, inputs = torch.rand(1, 4, 40, 40) < 0.7, qkv(40, heads=(4, 4))
    seen[..., 0] = True
    with torch.no_grad():
        if where.startswith("a row"):
            seen[:, :, 3], inputs[0][:, 3] = False, NAN
        else:
            seen[..., 5] = False
            inputs[1][:, 5] = inputs[2][:, 5] = NAN
    out = onchip.attention(*inputs, mask=seen)
    assert out.isfinite().all() and (not where.startswith("a row") or not out[:, 3].any())
    with torch.no_grad():
        assert torch.equal(onchip.attention(*inputs, mask=seen), out)
    assert all(d.isfinite().all() for d in torch.autograd.grad(out, inputs, torch.randn_like(out)))


# ---- what may hold NaN

HIDING = {
    "KeyPadding": lambda n: masks.KeyPadding(torch.tensor([n - 9, n // 2])),
    "KeyPadding flags": lambda n: masks.KeyPadding(torch.rand(2, n) < 0.7),
    "Document": lambda n: Causal() & masks.KeyPadding(torch.arange(n) % 7 != torch.tensor([[3], [5]])),
    "Dense": lambda n: (torch.rand(n, n) < 0.5) & (torch.rand(n) < 0.5),
    "Dense of heads": lambda n: (torch.rand(4, n, n) < 0.5) & (torch.rand(2, 1, n) < 0.5).repeat_interleave(2, 0),
    "Blocks": lambda n: holes(n, n),
    "function": lambda n: lambda b, h, i, j: (j // 3) % 2 == b,
}


@pytest.mark.parametrize("how", [{}, {"softcap": 4.0}, {"sinks": torch.ones(4)}, {"bias": torch.ones(1, 300)}], ids=["torch's", "ours", "sinks", "bias"])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("n", [40, 300])
def test_keys_that_no_query_sees_may_hold_anything(name, n, how):
    mask = as_mask(HIDING[name](n))
    seen = mask.static().seen(place(0, 4, n, n, torch.device("cpu"))._replace(b=torch.arange(2)[:, None, None, None]), mask.tensors)
    hidden = ~seen.expand(2, 4, n, n).unflatten(1, (2, 2)).any(2).any(2).transpose(1, 2)  # [batch, keys, kv_heads]
    assert hidden.any() and not hidden.all()
    how = {name: t[..., :n] if name == "bias" else t for name, t in how.items()}
    q, k, v = qkv(n)
    clean = gradients([q, k, v], mask=mask, **how)
    k, v = (t.detach().masked_fill(hidden[..., None], NAN).requires_grad_() for t in (k, v))
    for ours, expected in zip(gradients([q, k, v], mask=mask, **how), clean, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("how", [{}, {"sinks": torch.ones(4)}, {"bias": torch.randn(2, 4, 1, 70)}, {"mask": masks.KeyPadding(torch.tensor([70, 0]))}], ids=str)
@pytest.mark.parametrize(("len_k", "dim"), [(70, 16), (70, 64)], ids=["once", "twice"])
def test_a_row_that_goes_alone(len_k, dim, how, monkeypatch):
    """Of bfloat16 and many numbers torch's kernel gets it twice."""
    rows, run = [], blocked.fused_forward
    monkeypatch.setattr(blocked, "fused_forward", lambda q, *args, **named: (rows.append(q.shape[2]), run(q, *args, **named))[1])
    q, k, v = (t.detach() for t in qkv(1, len_k, (4, 4), dim, dtype=BF16))
    found = onchip.attention(q, k, v, return_lse=True, kernel="blocked", **how)
    (low, _), (truth, lse) = (onchip.attention(q.to(d), k.to(d), v.to(d), return_lse=True, kernel="reference", **how) for d in (BF16, FP64))
    assert_as_good_as_torch(found[0], low, truth)
    torch.testing.assert_close(found[1], lse.float(), atol=1e-4, rtol=1e-4)  # torch's own exponentials, of bfloat16
    assert set(rows) == {1 + (len_k * dim >= blocked.LONE)}


@pytest.mark.parametrize("how", [{}, {"softcap": 4.0}], ids=["torch's", "ours"])
def test_rows_that_see_nothing(how):
    """They give 0 and -inf, get no gradient, and what they hold (and their gradient) is of no consequence."""
    seen = torch.rand(60, 60) < 0.5
    seen[[3, 40]] = False
    q, k, v = qkv(60)
    d_out = torch.randn_like(q)
    clean = gradients([q, k, v], d_out, mask=seen, **how)
    q = q.detach().clone()
    q[:, [3, 40]] = d_out[:, [3, 40]] = NAN
    out, lse, dq, dk, dv = gradients([q.requires_grad_(), k, v], d_out, mask=seen, **how)
    assert not out[:, [3, 40]].any() and (lse[..., [3, 40]] == -torch.inf).all() and not dq[:, [3, 40]].any()
    for ours, expected in zip((out, lse, dq, dk, dv), clean, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kernel", ["blocked", "reference"])
@pytest.mark.parametrize("wanted", [False, True], ids=["bias", "bias with a gradient"])
@pytest.mark.parametrize("how", [{}, {"mask": Causal()}, {"score": lambda s, b, h, i, j: 0.5 * s}], ids=["torch's", "torch's in tiles", "ours"])
def test_rows_that_a_bias_hides(how, wanted, kernel):
    """-inf of a whole row: as of a mask, and no NaN in any gradient."""
    bias = torch.randn(60, 60)
    bias[[3, 40]] = bias[:, 7] = -torch.inf
    q, k, v = qkv(60)
    out, lse, *grads = gradients([q, k, v], bias=bias.clone().requires_grad_(wanted), kernel=kernel, **how)
    whole = bias.masked_fill(bias == -torch.inf, 0.0)
    seen = (bias > -torch.inf) & (torch.ones(60, 60).tril().bool() if "mask" in how else True)
    for ours, expected in zip((out, lse, *grads), gradients([q, k, v], bias=whole, mask=seen, kernel="reference", score=how.get("score")), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert not out[:, [3, 40]].any() and (lse[..., [3, 40]] == -torch.inf).all() and not grads[0][:, [3, 40]].any()
    if wanted:
        learnt = bias.clone().requires_grad_()
        (d_bias,) = torch.autograd.grad(onchip.attention(q, k, v, bias=learnt, kernel=kernel, **how).square().sum(), learnt)
        assert not d_bias[[3, 40]].any() and d_bias.isfinite().all()


# ---- dtypes and layouts


@pytest.mark.parametrize("mask", [Full(), Window(30), masks.Dense(torch.rand(200, 200) < 0.3)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dim_v", [8, 16, 40])
def test_gradients(mask, dtype, dim_v):
    """Beside torch's own attention in the same dtype."""
    inputs = qkv(200, dim_v=dim_v, dtype=dtype)
    d_out = torch.randn(2, 200, 4, dim_v).to(dtype)
    truth = gradients([t.detach().double().requires_grad_() for t in inputs], d_out.double(), mask=mask, kernel="reference")
    seen = mask.static().seen(place(0, 4, 200, 200, torch.device("cpu")), mask.tensors)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), attn_mask=seen.expand(1, 1, 200, 200), enable_gqa=True)
    low = (theirs.transpose(1, 2), *torch.autograd.grad(theirs.transpose(1, 2), inputs, d_out))
    out, _, *grads = gradients(inputs, d_out, mask=mask)
    for ours, torchs, exact, slack in zip((out, *grads), low, (truth[0], *truth[2:]), (2, 3, 3, 3), strict=True):
        assert ours.dtype == dtype
        assert_as_good_as_torch(ours, torchs, exact, slack)


@pytest.mark.parametrize("how", [{}, {"mask": Causal()}, {"mask": Window(9)}, {"softcap": 4.0}], ids=str)
def test_gradients_of_any_layout(how):
    """An output's gradient may be expanded or transposed; q, k and v may have any strides."""
    inputs = qkv(50)
    expected = gradients(inputs, torch.ones(2, 50, 4, 16), **how)
    for d_out in (torch.ones(()).expand(2, 50, 4, 16), torch.ones(16, 4, 50, 2).permute(3, 2, 1, 0)):
        for ours, plain in zip(gradients(inputs, d_out, **how), expected, strict=True):
            torch.testing.assert_close(ours, plain)
    turned = [t.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for t in inputs]
    for ours, plain in zip(gradients(turned, **how), expected, strict=True):
        torch.testing.assert_close(ours, plain)


# ---- run after run

EVERYTHING = {
    "torch's": {},
    "window": {"mask": Window(40)},
    "dense": {"mask": torch.rand(300, 300) < 0.3},
    "blocks": {"mask": masks.Blocks(torch.rand(10, 10) < 0.4, 32), "sinks": torch.randn(4)},
    "softcap": {"softcap": 3.0, "mask": Causal()},
    "dropout": {"dropout": Dropout(0.2, 5)},
}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.sampled(2)
def test_the_same_bits_again(name, dtype):
    """Gradients too, of two threads, with a table that every score reads."""
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    inputs = [*qkv(300, dtype=dtype, batch=1), torch.randn(4, 5, requires_grad=True)]
    table = inputs[3]
    how = EVERYTHING[name] | {"score": lambda s, b, h, i, j: s + table[h, (i - j) % 5], "deterministic": True}
    first, again = gradients(inputs, **how), gradients(inputs, **how)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    plain, more = (gradients(inputs[:3], **EVERYTHING[name], deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(plain, more, strict=True))


def test_look_ups_add_up_in_one_order(monkeypatch):
    """Which shows in the bits only now and then, so the switch is looked at."""
    torch.use_deterministic_algorithms(False)
    modes, grad = [], torch.autograd.grad
    inputs = [*qkv(20), torch.randn(4, 5, requires_grad=True)]
    out = onchip.attention(*inputs[:3], score=lambda s, b, h, i, j: s + inputs[3][h, (i - j) % 5], kernel="blocked")
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: modes.append(torch.are_deterministic_algorithms_enabled()) or grad(*args, **more))
    torch.autograd.grad(out.sum(), inputs)
    assert modes == [False, True] and not torch.are_deterministic_algorithms_enabled()


def test_threads_that_add_up_at_once_leave_torch_as_it_was(monkeypatch):
    torch.use_deterministic_algorithms(False)
    entered, both, grad = threading.Event(), threading.Event(), torch.autograd.grad

    def meet(*args, **more):  # the one that came in first leaves first
        if threading.current_thread() is first:
            entered.set()
            assert both.wait(60)
        else:
            both.set()
            first.join(60)
        return grad(*args, **more)

    def train():
        inputs = [*qkv(20), torch.randn(4, 5, requires_grad=True)]
        onchip.attention(*inputs[:3], score=lambda s, b, h, i, j: s + inputs[3][h, (i - j) % 5], kernel="blocked").sum().backward()

    first, second = threading.Thread(target=train), threading.Thread(target=train)
    monkeypatch.setattr(torch.autograd, "grad", meet)
    first.start()
    assert entered.wait(60)
    second.start()
    second.join(60)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["torch's", "window", "dense", "softcap"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    inputs = qkv(300, batch=5)
    together = gradients(inputs, batch_invariant=True, **EVERYTHING[name])
    alone = gradients([t[2:3] for t in inputs], batch_invariant=True, **EVERYTHING[name])
    assert all(torch.equal(a[2:3], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("rows", [1, 2])
def test_nor_on_the_thread_that_takes_it(rows):
    """Of one and two queries torch's kernel gives other bits to the heads that a second thread takes."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for keys in range(20, 80, 4):
            inputs = qkv(rows, keys, (8, 8), 64, batch=5)
            together = gradients(inputs, batch_invariant=True)
            for b in range(5):
                alone = gradients([t[b : b + 1].detach().requires_grad_() for t in inputs], batch_invariant=True)
                assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone, strict=True)), (keys, b)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", [{}, {"mask": Causal()}, {"mask": masks.KeyPadding(torch.tensor([3, 2]))}, {"sinks": torch.zeros(4)}], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("keys", [1, 3, 7])
def test_nan_of_a_query_over_few_keys(keys, dtype, how):
    """torch's own kernel gives 0, and LSE 0, where there are fewer than 8."""
    if "mask" in how and keys < 3:
        how = {"mask": Causal()}
    q, k, v = qkv(4, keys, dtype=dtype)
    q.data[:, 3] = NAN
    out, lse, dq, *_ = gradients([q, k, v], **how)
    assert out[:, 3].isnan().all() and lse[:, :, 3].isnan().all() and out[:, :3].isfinite().all() and (keys == 1 or dq[:, 3].isnan().all())
    single = onchip.attention(q[:, 3:], k, v, return_lse=True, kernel="blocked", **how)
    assert all(t.isnan().all() for t in single)


BANDS = [Full(), Causal(), Causal("top_left"), *(Window(a, b, align) for a in (0, 1, 3, None) for b in (0, 2, None) for align in ("bottom_right", "top_left"))]


@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("how", [{}, {"softcap": 3.0}], ids=["torch's", "ours"])
def test_every_small_size(mask, how):
    """Where a band holds all keys, some, or none: one off shows."""
    for len_q in range(1, 5):
        for len_k in range(1, 5):
            inputs = qkv(len_q, len_k, batch=1)
            for ours, expected in zip(gradients(inputs, mask=mask, **how), gradients(inputs, mask=mask, kernel="reference", **how), strict=True):
                torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("lengths", [(), ([300, 0, 7], [1, 1, 1])], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("how", [{}, {"mask": Causal()}, {"softcap": 3.0}], ids=str)
def test_over_one_key(lengths, dtype, how):
    """Its weight is 1 whatever the score is: gradients of q and k are 0 in all bits, that of v is a sum rounded once."""
    if lengths:
        q, k, v = (torch.randn(sum(n), heads, 16).to(dtype).requires_grad_() for n, heads in zip((*lengths, lengths[1]), (4, 2, 2), strict=True))
        offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in lengths]
        out, rows = onchip.attention_packed(q, k, v, *offsets, **how), lengths[0]
    else:
        q, k, v = qkv(300, 1, dtype=dtype)
        out, rows = onchip.attention(q, k, v, **how), [300, 300]
    d_out = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    assert not dq.any() and not dk.any()
    seen = (torch.arange(n) >= (n - 1 if how.get("mask") else 0) for n in rows)  # the last query alone sees the key of a causal mask
    each = zip(d_out.double().flatten(0, -3).split(rows), seen, strict=True)
    expected = torch.stack([(d * rows[:, None, None]).unflatten(1, (2, 2)).sum((0, 2)) for d, rows in each])
    torch.testing.assert_close(dv.double().view_as(expected), expected, rtol=torch.finfo(dtype).eps, atol=5e-5)


def test_a_sinks_gradient_does_not_see_how_the_output_is_rounded():
    """Over as many keys as one tile holds: delta is made of weights."""
    inputs = (*(t.bfloat16().detach().requires_grad_() for t in qkv(40)), torch.randn(4, requires_grad=True))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out, lse = onchip.attention(*inputs[:3], sinks=inputs[3], return_lse=True)
    exact = onchip.attention(*wide[:3], sinks=wide[3], return_lse=True, kernel="reference")
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    (found,) = torch.autograd.grad((out, lse), inputs[3:], (d_out, d_lse))
    (expected,) = torch.autograd.grad(exact, wide[3:], (d_out.double(), d_lse.double()))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive(scale):
    """torch's kernel hides by -inf before it scales."""
    inputs = qkv(17)
    found = torch.autograd.grad(onchip.attention(*inputs, mask=Causal(), scale=scale).sum(), inputs)  # where torch has its own gradient
    expected = gradients(inputs, mask=Causal(), scale=scale, kernel="reference")
    for ours, theirs in zip((*gradients(inputs, mask=Causal(), scale=scale), *found), (*expected, *expected[2:]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", [Window(3), Causal("top_left"), Window(2, 0, "top_left")], ids=str)
def test_one_query_of_a_sequence_sees_some_of_its_keys(mask):
    q, k, v = torch.randn(2, 4, 16), torch.randn(21, 2, 16), torch.randn(21, 2, 16)
    offsets = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 1, 2], [0, 12, 21])]
    found = onchip.attention_packed(q, k, v, *offsets, longest=(1, 12), mask=mask, return_lse=True)
    expected = onchip.attention_packed(q, k, v, *offsets, longest=(1, 12), mask=mask, return_lse=True, kernel="reference")
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


def test_gradients_only_where_they_are_wanted():
    q, k, v = qkv(20)
    wanted, other = torch.randn(20, 20, requires_grad=True), torch.randn(4)
    p = Attention("backward", 2, 20, 20, 4, 2, 16, FP32, score=chain(wanted, lambda s, b, h, i, j: s * other[h], None).static())
    x = Operands(0.25, score=chain(wanted, lambda s, b, h, i, j: s * other[h], None).tensors)
    out, lse = blocked.prefill(p, None, q, k, v, x, True)
    *grads, d_sinks, d_score = blocked.backward(p, None, q, k, v, out, lse, torch.ones_like(out), None, x)
    assert d_sinks is None and d_score[0].shape == (20, 20) and d_score[1] is None
    assert not any(t.requires_grad for t in (out, lse, *grads, d_score[0]))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("how", [{}, {"mask": Causal()}, {"softcap": 3.0}, {"sinks": torch.ones(4)}, {"mask": Window(2), "dropout": 0.5}], ids=str)
def test_nothing_to_see(sizes, how):
    batch, len_q, len_k = sizes
    inputs = qkv(len_q, len_k, batch=batch)
    if not batch:
        found = gradients(inputs, **how)
        assert [t.shape for t in found] == [inputs[0].shape, (0, 4, 5), *(t.shape for t in inputs)]
        return
    for ours, expected in zip(gradients(inputs, **how), gradients(inputs, kernel="reference", **how), strict=True):
        assert torch.equal(ours, expected)


# ---- decodes of several sequences


def test_sequences_of_about_equally_many_keys_go_together():
    lengths = (100, 20, 24, 3000, 0, 95, 2999, 23, BESIDE + 1, BESIDE + 1, 22)
    found = groups(Causal(), 16, FP32, 0, tuple(range(11)), (1,) * 10 + (2,), lengths)
    assert sorted(sorted(group.members) for group in found) == [[0, 5], [1, 2, 7]]  # the last has two queries; long ones gain nothing, 0 keys go nowhere
    for group in found:
        keys = [lengths[b] for b in group.members]
        assert group.columns.shape == (len(keys), max(keys)) and group.columns.numel() <= 1.25 * sum(keys)
        assert group.numbers.tolist() == list(group.members)
    (one,) = groups(Causal(), 16, FP32, 400, tuple(range(4)), (1,) * 4, (100, 20, 95, 23))
    assert one.members == (0, 1, 2, 3) and one.in_order, "as many spare keys cost no more than another call"
    table, other = (torch.randperm(40).view(4, 10).int() for _ in range(2))
    for pages in (table, table.clone(), other, table):
        assert torch.equal(one.slots(pages, 16)[0], (pages.long().gather(1, one.columns) * 16 + one.offsets).flatten())
    (window,) = groups(Window(15), 16, FP32, 0, (0, 1), (1, 1), (100, 3000))
    assert window.columns.shape == (2, 16) and window.mask is None, "of a window only its keys count"


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 3, 0, 3, 40), (1, 1, 1, 0, 3)], ids=str)
@pytest.mark.parametrize("how", [{}, {"sinks": torch.ones(4)}, {"mask": Window(6)}], ids=["plain", "sinks", "window"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_paged_sequences_together(counts, how, dtype, monkeypatch):
    """As exact as one by one, which is how they go where bits must not depend on others; slots behind a sequence's end and spare pages hold NaN.
    Queries lie beside keys and values, as a model has them: three rows of twice the numbers are as long as six rows of queries."""
    sizes = []
    monkeypatch.setattr(blocked, "fused_forward", lambda q, *rest, **more: sizes.append(len(q)) or forward(q, *rest, **more))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    lengths, page = (40, 43, 47, 38, 45), 8
    order = torch.randperm(32)
    table = torch.cat((order[:30].view(5, 6), order[30:].expand(5, 2)), 1).int()
    pools = [torch.full((32, page, 2, dim), NAN, dtype=dtype) for dim in (16, 8)]
    for row, n in zip(table.long(), lengths, strict=True):
        for pool in pools:
            pool[row[torch.arange(n) // page], torch.arange(n) % page] = torch.randn(n, 2, pool.shape[-1]).to(dtype)
    q, offsets = torch.randn(sum(counts), 8, 16).to(dtype)[:, :4], torch.tensor([0, *counts]).cumsum(0).int()
    cache = PagedKV(*pools, table, torch.tensor(lengths, dtype=torch.int32))
    how = {"q_offsets": offsets, "return_lse": True} | how
    truth = onchip.paged_attention(q.double(), cache._replace(k=pools[0].double(), v=pools[1].double()), **how, kernel="reference")
    low = onchip.paged_attention(q, cache, **how, kernel="reference")
    found = onchip.paged_attention(q, cache, **how, kernel="blocked")
    assert max(sizes) > 1
    sizes.clear()
    alone = onchip.paged_attention(q, cache, **how, kernel="blocked", batch_invariant=True)
    assert max(sizes) == 1
    for ours, *torchs, exact in zip(found, low, alone, truth, strict=True):
        assert_as_good_as_torch(ours, tuple(torchs), exact)
    if len(set(counts)) == 1:  # dense, the same bits
        how["q_offsets"] = None
        dense = onchip.paged_attention(q.unflatten(0, (5, -1)), cache, **how, kernel="blocked")
        assert torch.equal(dense[0].flatten(0, 1), found[0]) and torch.equal(dense[1].transpose(0, 1).flatten(1), found[1])


@pytest.mark.parametrize("seen", ["all keys", "keys from each tile's own on", "few at first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_of_several_tiles_get_the_sum(seen, dtype, monkeypatch):
    """Of calls of torch's kernel, whichever of them has all keys; forward and backward."""
    monkeypatch.setattr(blocked, "FUSED_TRACED", 32)
    monkeypatch.setattr(blocked_fused, "WHOLE_MASK", 0)
    n, rows = 96, torch.arange(96)[:, None]
    mask = torch.rand(n, n) < 0.6
    mask[:, :2] |= rows == 40  # each tile has a row that sees something
    if seen == "keys from each tile's own on":
        mask &= torch.arange(n) >= rows // 32 * 32
    elif seen == "few at first":
        mask &= (torch.arange(n) < 20) | (rows >= 32)
    q, k, v = (torch.randn(2, n, h, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    wide, own = ([t.detach().to(kind).requires_grad_() for t in (q, k, v)] for kind in (torch.float64, dtype))
    calls = []
    kernel = blocked.fused_backward
    monkeypatch.setattr(blocked, "fused_backward", lambda *given, **how: calls.append(given[1].shape[2]) or kernel(*given, **how))
    out, truth = onchip.attention(q, k, v, mask=mask), onchip.attention(*wide, mask=mask, kernel="reference")
    torchs = onchip.attention(*own, mask=mask, kernel="reference")
    d_out = torch.randn(out.shape).to(dtype)
    for t in (out, torchs, truth):
        t.backward(d_out.to(t.dtype))
    assert calls == [32] * 3
    assert_as_good_as_torch(out, torchs, truth, slack=4.0)  # a tile that is left out errs by a third
    for ours, theirs, true in zip((q, k, v), own, wide, strict=True):
        assert_as_good_as_torch(ours.grad, theirs.grad, true.grad, slack=6.0)


@pytest.mark.parametrize(("n", "batch", "heads"), [(300, 1, 2), (512, 1, 1), (600, 2, 2), (1000, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal_is_one_call_of_torchs_kernel(n, batch, heads, dtype, monkeypatch):
    """Of any length: parts of what its mask shows were faster on some processors and half as fast on others."""
    calls, kernel = [], blocked.fused_forward

    def counted(q, k, *args, **how):
        calls.append((q.shape[2], k.shape[2]))
        return kernel(q, k, *args, **how)

    monkeypatch.setattr(blocked, "fused_forward", counted)
    q, k, v = (torch.randn(batch, n, h, 16).to(dtype).requires_grad_() for h in (2 * heads, heads, heads))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    d_out = torch.randn(batch, n, 2 * heads, 16).to(dtype)
    out, lse = onchip.attention(q, k, v, mask=Causal(), return_lse=True)
    truth, true_lse = onchip.attention(*wide, mask=Causal(), return_lse=True, kernel="reference")
    own = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    torchs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in own), is_causal=True, enable_gqa=True).transpose(1, 2)
    assert_as_good_as_torch(out, torchs, truth)
    assert (lse - true_lse).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)
    for t, g in ((out, d_out), (torchs, d_out), (truth, d_out.double())):
        t.backward(g)
    assert set(calls) == {(n, n)}
    for ours, theirs, true in zip((q, k, v), own, wide, strict=True):
        assert_as_good_as_torch(ours.grad, theirs.grad, true.grad, slack=3.0)
