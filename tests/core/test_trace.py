"""A text says what its function says, over all places at once; and what cannot be a text is told in one sentence."""

import math

import numpy
import pytest
import torch
from torch.nn import functional

from onchip.core.trace import Place, Traced, TraceError, trace, untouched

TABLE = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
SCALE = torch.tensor(1.5)
EIGHT = torch.tensor(2.0).to(torch.float8_e4m3fn)


def everywhere() -> Place:
    sizes = (2, 3, 4, 5)
    at = (torch.arange(n).view([-1 if k == d else 1 for k in range(4)]) for d, n in enumerate(sizes))
    return Place(*at, torch.full((1, 1, 1, 1), 4), torch.full((1, 1, 1, 1), 5))


SCORES = {
    "arithmetic": lambda s, at: 2 * s - s / 3 + (1 - s) * 0.5 + (-s) + s**2 + abs(s) + 2 / (s * s + 1),
    "whole numbers": lambda s, at: s + at.i // 2 + at.j % 3 + 7 // (at.i + 1) + (at.i - at.j) ** 2 + 2**at.j + (5 - at.i),
    "branches": lambda s, at: torch.where(at.i >= at.j, s, -math.inf) + torch.where(at.h == 1, 0.5, s),
    "conditions": lambda s, at: s.masked_fill((at.i > 1) & ~(at.j < 3) | (at.h == 2) ^ (at.b != 0), -1e9),
    "table": lambda s, at: s + TABLE[at.h, (at.i - at.j).abs() + at.b],
    "table of another": lambda s, at: s * TABLE[at.h, torch.clamp(at.j - at.row, -4, 4) + 4].tanh(),
    "number": lambda s, at: s * SCALE + torch.tensor(3.0) * torch.full((), 2.0),
    "functions": lambda s, at: functional.softplus(s) + torch.sigmoid(s).exp().log() + functional.gelu(s) + functional.leaky_relu(s) + torch.special.expit(s),
    "casts": lambda s, at: s + at.i.float() + at.j.to(torch.float16).float() + at.h.type_as(s) + (at.i > at.j).to(s.dtype),
    "likes": lambda s, at: s + torch.zeros_like(s) + torch.ones_like(at.i) + torch.full_like(s, 0.25),
    "extremes": lambda s, at: torch.minimum(s, at.i.float()) + torch.maximum(at.i, at.j) + s.clamp(min=-0.5, max=0.5) + s.sign(),
    "new": lambda s, at: s * s.new_ones(()) + s.new_full((1,), 3.0) + s.new_zeros((), dtype=torch.int64) + torch.zeros((), device=s.device),
    "hardswish": lambda s, at: functional.hardswish(4 * s),
    "new ones of a captured tensor": lambda s, at: s + torch.cat([TABLE[0].new_zeros(1), TABLE[0]])[at.j] + (TABLE * TABLE.new_ones(()))[at.h, at.i],
    "eight bits": lambda s, at: s + TABLE.to(torch.float8_e4m3fn).float()[at.h, at.j] + TABLE.to(torch.float8_e4m3fn)[at.h, at.j].float(),
    "one of eight bits": lambda s, at: s * EIGHT.float(),
    "moved": lambda s, at: s + TABLE.to(s.device)[at.h, at.j] * TABLE.to(s)[at.h, at.i],
    "lengths": lambda s, at: s + at.len_k - at.len_q + at.row,
    "no score": lambda s, at: TABLE[at.h, at.j],
    "constant": lambda s, at: 2.5,
    "infinite": lambda s, at: -math.inf,
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode, untouched], ids=lambda c: c.__name__)
def test_a_text_is_its_function(name, context):
    at, s = everywhere(), torch.randn(2, 3, 4, 5)
    with context():
        text, tensors = trace(SCORES[name], name, (), score=True)
    expected = torch.as_tensor(SCORES[name](s, at), dtype=torch.float32)
    found = Traced(name, text).run(s, *at, *tensors)
    torch.testing.assert_close(found.broadcast_to(s.shape), expected.broadcast_to(s.shape), rtol=0, atol=0)


def test_a_text_is_the_same_in_every_context():
    texts = set()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode, untouched):
        with context():
            texts.add(trace(lambda s, at: torch.where((at.i > 1) & (at.j < 3), s, -1.0) + at.i.to(torch.float32) ** 2, "f", (), score=True)[0])
    assert len(texts) == 1


def test_a_function_with_a_buffer_beside_its_value():
    """torch's logsigmoid: written down as the softplus that it is, which torch takes for its argument from 20 on."""
    s = torch.linspace(-60, 60, 999).view(1, 1, 27, 37)
    for function in (lambda s, at: functional.logsigmoid(s), lambda s, at: functional.logsigmoid(input=s)):
        text, _ = trace(function, "logsigmoid", (), score=True)
        torch.testing.assert_close(Traced("logsigmoid", text).run(s, *everywhere()), functional.logsigmoid(s), rtol=1e-6, atol=1e-30)


def test_a_text_by_hand():
    text, (table,) = trace(lambda s, at: s + TABLE[at.h, at.i - at.j], "f", (), score=True)
    assert table is TABLE
    assert text.split("\n") == [
        "def run(s, b, h, i, j, len_q, len_k, c0: 'float32[2]'):",
        "    v0: 'int64' = aten.sub.Tensor(i, j)",
        "    v1: 'float32' = aten.index.Tensor(c0, [h, v0])",
        "    v2: 'float32' = aten.add.Tensor(s, v1)",
        "    return v2",
    ]
    (ghost,) = Traced("f", text).stand_ins()
    assert ghost.is_meta and ghost.dtype == torch.float32 and ghost.ndim == 2


def test_tensors_that_are_listed_come_first():
    other = TABLE.clone()
    _, tensors = trace(lambda s, at: s + TABLE[at.h, at.j] + other[at.h, at.j], "f", (other,), score=True)
    assert tensors[0] is other and tensors[1] is TABLE and len(tensors) == 2


def test_a_tensor_is_read_once_however_often():
    _, tensors = trace(lambda s, at: s + TABLE[at.h, at.j] * TABLE[at.h, at.i] + TABLE[at.h, at.j], "f", (), score=True)
    assert len(tensors) == 1


def test_what_is_made_of_captured_tensors_alone_is_one_more_of_them():
    table = TABLE.clone().requires_grad_()
    text, (made,) = trace(lambda s, at: s + (table.exp() * 2)[at.h, at.j], "f", (), score=True)
    assert "exp" not in text and torch.equal(made, table.exp() * 2)
    (grad,) = torch.autograd.grad(made.sum(), table)
    torch.testing.assert_close(grad, 2 * table.detach().exp())


def test_a_captured_number_may_be_computed_with():
    scale = torch.tensor(2.0, requires_grad=True)
    text, (read,) = trace(lambda s, at: s * (scale * 3).exp(), "f", (), score=True)
    assert read is scale and "aten.exp.default" in text
    s, at = torch.ones(2, 3, 4, 5), everywhere()
    (grad,) = torch.autograd.grad(Traced("f", text).run(s, *at, read).sum(), scale)
    torch.testing.assert_close(grad, 3 * s.sum() * math.exp(6.0))


def test_nothing_is_computed():
    """Not on the tensor's device, and not outside of it: a place may be past its end."""
    table = torch.empty(2, 3, device="meta")
    text, (read,) = trace(lambda s, at: s + table[at.h + 100, at.j - 7], "f", (), score=True)
    assert read is table and "index" in text


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, at: s if at.i > at.j else -s, r"it branches on, or takes the Python value of, a tensor \(use torch.where\)"),
        (lambda s, at: s * at.i.item(), "it branches on, or takes the Python value of, a tensor"),
        (lambda s, at: s * TABLE[0, 0].item(), "it branches on, or takes the Python value of, a tensor"),
        (lambda s, at: s if TABLE.sum() > 0 else -s, "it branches on, or takes the Python value of, a tensor"),
        (lambda s, at: s + at.i.tolist()[0], "the Python value of, a tensor"),
        (lambda s, at: s + at.i.numpy(), "the Python value of, a tensor"),
        (lambda s, at: s * TABLE.tolist()[0][0], "the Python value of, a tensor"),
        (lambda s, at: s * float(TABLE.numpy()[0, 0]), "the Python value of, a tensor"),
        (lambda s, at: s * float(numpy.asarray(TABLE)[0, 0]), "the Python value of, a tensor"),
        (lambda s, at: s * len(f"{TABLE}{TABLE!r}"), "the Python value of, a tensor"),
        (lambda s, at: s if torch.equal(TABLE, TABLE) else -s, "the Python value of, a tensor"),
        (lambda s, at: s.add_(1), "add_ changes a tensor in place"),
        (lambda s, at: s + torch.rand_like(s), r"rand_like draws random numbers \(for dropout, give dropout=\)"),
        (lambda s, at: s + torch.rand(()), "rand draws random numbers"),
        (lambda s, at: functional.dropout(s), r"empty_like holds what nothing decides \(for dropout, give dropout=\)"),
        (lambda s, at: s + torch.zeros(()).expand_as(s), "expand mixes places"),
        (lambda s, at: s + TABLE[at.h / 2, at.j], r"a tensor is indexed by a float \(make it whole by // or .long\(\)\)"),
        (lambda s, at: s + TABLE.to(torch.float8_e4m3fn)[at.h, at.j], r"add of a tensor of 8 bits \(cast it first\)"),
        (lambda s, at: s - s.max(), "max mixes places or changes the shape; the function is of one place at a time"),
        (lambda s, at: s.softmax(-1), "softmax mixes places"),
        (lambda s, at: s.cumsum(-1), "cumsum mixes places"),
        (lambda s, at: s.view(-1), "view mixes places"),
        (lambda s, at: s + torch.max(at.i, 0)[0], "max mixes places"),
        (lambda s, at: s + torch.stack([at.i, at.j]).sum(), "stack mixes places"),
        (lambda s, at: s + TABLE, r"add gives \[1, 1, 3, 9\]; a tensor of more than one element must be indexed by the place"),
        (lambda s, at: s + TABLE[at.h], "a tensor of 2 dimensions is indexed by 1; index all of them at once"),
        (lambda s, at: s + TABLE[at.h, 1:3], "a tensor of 2 dimensions is indexed by 1"),
        (lambda s, at: TABLE[at.h, at.i].long(), "it gives int64 instead of a float"),
        (lambda s, at: at.i >= at.j, "it gives bool instead of a float"),
        (lambda s, at: TABLE, r"it gives \[3, 9\] instead of one value for one place"),
        (lambda s, at: (s, s), "it gives a tuple instead of one value for one place"),
        (lambda s, at: None, "it gives a NoneType instead of one value for one place"),
        (lambda s: s, "positional argument"),
    ],
)
def test_what_cannot_be_written_down(function, words):
    way_out = r"(write it with torch operators on its arguments|it is called as score_mod\(s, b, h, i, j\))"
    with pytest.raises(TraceError, match=f"^score mod: the function cannot be traced: .*{words}.*; {way_out}$"):
        trace(function, "mod", (), score=True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda at: at.i - at.j, "it gives int64 instead of a bool"),
        (lambda at: 1, "it gives a int instead of one value"),
        (lambda at: at.i > 1 and at.j > 1, "branches on"),
        (lambda at: 1 < at.i < 3, "branches on"),
        (lambda at: TABLE[at.i > 1, at.j > 1], "too many indices|indexed by a condition"),
    ],
)
def test_what_is_no_mask(function, words):
    with pytest.raises(TraceError, match=words):
        trace(function, "mod")


def test_a_users_own_mistake_stays_what_it_is():
    with pytest.raises(AttributeError, match="no attribute 'absolutely'"):
        trace(lambda at: at.i.absolutely(), "mod")
