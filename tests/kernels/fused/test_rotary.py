"""Rotation of queries and keys into new memory, and its gradient, against float64 and transformers' own formula."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core.problem import Rope
from onchip.dispatch import record
from onchip.kernels.fused import ROTARY
from onchip.models.rope import grid_positions, rope_rows, rope_table
from onchip.ops.rotary import QKNorm, rotary

rope = pytest.importorskip("onchip.kernels.fused.rope")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in ROTARY.kernels]

CASES = [  # (batch, len, heads, kv_heads, dim, rotary_dim), dtype, layout
    ((2, 5, 9, 3, 64, 64), BF16, "neox"),
    ((1, 3, 32, 8, 128, 128), FP16, "interleaved"),
    ((2, 3, 3, 1, 96, 32), FP32, "neox"),
    ((1, 7, 2, 2, 80, 80), FP32, "interleaved"),
    ((1, 2, 2, 1, 63, 20), FP32, "neox"),
    ((1, 2, 2, 1, 63, 20), BF16, "interleaved"),
    ((1, 1, 1, 2, 2, 2), FP32, "neox"),
]


def textbook(x, table, positions, layout):
    """[batch, len, heads, dim], every step in the dtype of x, as transformers writes it."""
    size = table.shape[1]
    cos, sin = (t.repeat_interleave(2, -1) if layout == "interleaved" else t.repeat(1, 1, 1, 2) for t in table[positions].unsqueeze(2).to(x.dtype).chunk(2, -1))
    turned, rest = x.split((size, x.shape[-1] - size), -1)
    a, b = turned.chunk(2, -1)
    swapped = torch.cat((-b, a), -1) if layout == "neox" else torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    return torch.cat((turned * cos + swapped * sin, rest), -1)


def check(sizes, dtype, layout, kernel, device):
    batch, length, heads, kv_heads, dim, rotary_dim = sizes
    packed = poisoned((batch, length, heads + 2 * kv_heads, dim), dtype, device)  # q and k are views of it
    values = packed[:, :, : heads + kv_heads].copy_(torch.randn(batch, length, heads + kv_heads, dim, device=device))
    table = rope_table(61, rotary_dim, 1e4, device=device)
    positions = torch.randint(61, (batch, length), device=device)
    grad = torch.randn(batch, heads + kv_heads, length, dim, device=device).to(dtype).transpose(1, 2)
    results = []
    for of in (None, dtype, torch.float64):
        x = (values if of is None else values.detach().to(of)).detach().requires_grad_()
        parts, angles = x.split((heads, kv_heads), 2), table.to(of or dtype)
        with record() as decisions:
            if of is None:
                out = rotary(*parts, table, positions, layout=layout, kernel=kernel)
            else:
                out = [textbook(part, angles, positions, layout) for part in parts]
            dx = torch.autograd.grad(torch.cat(out, 2), x, grad.to(out[0].dtype))
        if of is None:
            assert [d.problem.op for d in decisions] == ["rotary", "rotary_backward"] and {d.kernel.name for d in decisions} == {kernel}
            assert all(o.is_contiguous() for o in out)
        results.append((torch.cat(out, 2).detach(), *dx))
    for n, (ours, low, truth) in enumerate(zip(*results, strict=True)):
        assert_as_good_as_torch(ours, low, truth, slack=3.0 if n else 2.0)
    rest = slice(rotary_dim, None)
    assert torch.equal(results[0][0][..., rest], values[..., rest])  # to the bit


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, kernel, device):
    check(*case, kernel, device)


@pytest.mark.parametrize("kernel", [pytest.param("triton_rope", marks=[pytest.mark.gpu, pytest.mark.large])])
@pytest.mark.parametrize("case", [((2, 4097, 32, 8, 128, 128), BF16, "neox"), ((1, 140_000, 32, 8, 128, 64), BF16, "interleaved")], ids=str)
def test_large(case, kernel, device):
    check(*case, kernel, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "tiles"), [((11, 3), (4, 1)), ((3, 2), (4, 1))])
def test_tiles_of_a_program(heads, tiles, device):
    """Tiles that hold queries, keys, and heads of neither: the bits of plain torch in float32, and positions of any strides."""
    q, k = (torch.randn(2, 5, n, 16, device=device) for n in heads)
    table, positions = rope_table(7, 16, 1e4, device=device), torch.randint(7, (5, 2), device=device).t()
    problem = Rope("rotary", 10, *heads, 16, 16, FP32, "neox", False, False)
    found = rope.launch_rotary(problem, rope.Tiles(*tiles), q, k, table, positions)
    for ours, x in zip(found, (q, k), strict=True):
        torch.testing.assert_close(ours, textbook(x, table, positions, "neox"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_tokens_default_positions_and_nothing(kernel, device):
    q, k, table = torch.randn(6, 4, 32, device=device), torch.randn(6, 2, 32, device=device), rope_table(8, 16, 1e4, device=device)
    found = rotary(q, k, table, kernel=kernel)
    dense = rotary(q[None], k[None], table, torch.arange(6, device=device, dtype=torch.int32), kernel=kernel)
    assert all(torch.equal(a, b[0]) for a, b in zip(found, dense, strict=True))
    assert [t.shape for t in rotary(q[:0], k[:0], table, kernel=kernel)] == [(0, 4, 32), (0, 2, 32)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_sections_of_pictures(kernel, device):
    """Qwen2-VL: time, height and width turn the first 2, the next 3 and the last 3 of 8 frequencies; as `apply_multimodal_rotary_pos_emb` has it."""
    positions = grid_positions(2, 3, 2)
    assert positions.shape == (3, 12) and positions[:, 5].tolist() == [0, 2, 1] and positions[:, 6].tolist() == [1, 0, 0]
    q, k, table = torch.randn(12, 3, 16, device=device), torch.randn(12, 1, 16, device=device), rope_table(4, 16, 100.0)
    own = rope_rows(table, positions, [0, 0, 1, 1, 1, 2, 2, 2]).to(device)
    found = rotary(q, k, own, kernel=kernel)
    cos, sin = (part[positions].repeat(1, 1, 2).to(device) for part in table.chunk(2, 1))  # [3, 12, 16]
    cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(t.split([2, 3, 3] * 2, -1))], -1).unsqueeze(1) for t in (cos, sin))
    for x, ours in zip((q, k), found, strict=True):
        a, b = x.chunk(2, -1)
        torch.testing.assert_close(ours, x * cos + torch.cat((-b, a), -1) * sin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_norm_before_it(kernel, device):
    """The norm of each head in the same call, its weights' gradients too."""
    table, made = rope_table(8, 16, 1e4), [torch.randn(*shape) for shape in ((2, 6, 4, 32), (2, 6, 2, 32), (32,), (32,))]

    def own(q, k, norm_q, norm_k):
        return rotary(q, k, table.to(device), norm=QKNorm(norm_q, norm_k, 1e-6, 1.0), layout="interleaved", kernel=kernel)

    def plain(q, k, norm_q, norm_k):
        normed = (F.rms_norm(x, (32,), weight + 1, 1e-6) for x, weight in ((q, norm_q), (k, norm_k)))
        return [textbook(x, table.to(x), torch.arange(6).expand(2, 6), "interleaved") for x in normed]

    results = []
    for function, at, dtype in ((own, device, torch.float32), (plain, "cpu", torch.float32), (plain, "cpu", torch.float64)):
        given = [t.to(at, dtype).requires_grad_() for t in made]
        out = function(*given)
        grads = torch.autograd.grad([o.square().sum() for o in out], given)
        results.append([t.detach().cpu() for t in (*out, *grads)])
    for n, (ours, low, truth) in enumerate(zip(*results, strict=True)):
        assert_as_good_as_torch(ours, low, truth, slack=3.0 if n > 1 else 2.0)


@pytest.mark.gpu
def test_positions_that_are_no_rows(device):
    """Of a GPU, where nobody looks: NaN, and what is not rotated stays."""
    x, table, positions = torch.ones(1, 3, 2, 8, device=device), torch.ones(9, 4, device=device), torch.tensor([[-1, 9, 2]], device=device)
    for y in rope.launch_rotary(Rope("rotary", 3, 2, 2, 8, 4, FP32, "neox", False, False), rope.Tiles(2, 1), x, x, table, positions):
        assert y[0, :2, :, :4].isnan().all() and y[..., 4:].eq(1).all() and y[0, 2].isfinite().all()


def test_wrong_arguments(device):
    q, k, table = torch.zeros(1, 6, 4, 32, device=device), torch.zeros(1, 6, 2, 32, device=device), torch.zeros(8, 16, device=device)
    for call, message in (
        (lambda: rotary(q, k, table, layout="gptj"), "layout='gptj'"),
        (lambda: rotary(q, k, table, norm=QKNorm(q[0, 0, 0], k[0, 0, 0, :31], 1e-6)), r"norm has weights \[32\] and \[31\]; give \[32\] both"),
        (lambda: rotary(q, k[:, :5], table), "may differ in heads alone"),
        (lambda: rotary(q, k, table[:5]), "table has 5 positions, q has 6 tokens; give a longer rope_table or positions"),
        (lambda: rotary(q, k, torch.zeros(8, 34, device=device)), "at most 32"),
        (lambda: rotary(q, k, table, torch.zeros(1, 6, device=device)), "positions are torch.float32"),
        (lambda: rotary(q, k, table, torch.zeros(5, dtype=torch.int64, device=device)), r"give int64 \[1, 6\] or \[6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"^rotary: norm is a tuple; give QKNorm"):
        rotary(q, k, table, norm=(q[0, 0, 0], k[0, 0, 0]))
    with pytest.raises(TypeError, match=r"^rotary: norm.q is a Tensor, norm.k a NoneType; give tensors \[32\] both"):
        rotary(q, k, table, norm=QKNorm(q[0, 0, 0], None, 1e-6))
    with pytest.raises(ValueError, match=r"^rotary: norm.eps is -1.0; give 0 or more"):
        rotary(q, k, table, norm=QKNorm(q[0, 0, 0], k[0, 0, 0], -1.0))
    with pytest.raises(TypeError, match=r"^rotary: norm.offset is None; give a number"):
        rotary(q, k, table, norm=QKNorm(q[0, 0, 0], k[0, 0, 0], 1e-6, None))
