"""The public functions of the fused operators: what a Problem says of a call, and offsets through a compiled graph."""

import pytest
import torch

from onchip import dispatch
from onchip.core.formats import Codes, Format
from onchip.core.once import one_pass
from onchip.core.problem import Rows
from onchip.ops.fused import Append, QKNorm, rope_append
from onchip.ops.norm import rms_norm
from onchip.ops.rotary import rotary

T, DIM = 24, 16


@pytest.mark.parametrize(
    ("changes", "variant"),
    [({}, ""), ({"residual": True}, "residual"), ({"offset": 1.0}, "offset"), ({"residual": True, "offset": 1.0}, "residual offset")],
)
def test_the_problem_of_a_norm(changes, variant):
    x = torch.randn(T, 64)
    changes = {name: x if name == "residual" else value for name, value in changes.items()}
    with dispatch.record() as decisions:
        rms_norm(x, torch.ones(64), **changes)
    assert [d.problem for d in decisions] == [Rows("rms_norm", T, 64, torch.float32, variant)]


def rotate(x, weight):
    """Queries and keys, normalised with weights stored around 0, and rotated."""
    x = x.clone()
    table = torch.linspace(-1, 1, 40 * DIM).view(40, DIM)
    out = rope_append(x, table, torch.arange(T), (4, 2), norm=QKNorm(weight, weight, 1e-6, 1.0))
    return [*out, x]


@pytest.mark.parametrize("form", [None, "int8"])
def test_places_that_there_are_not(form):
    """Whatever is not on a CPU nobody looks at; here nothing is written, qkv neither."""
    x, table, places = torch.randn(T, 8 * DIM), torch.randn(T, DIM), torch.arange(T)
    page = torch.zeros(2, 16, 2, DIM)
    if form is not None:
        page = Codes.over(torch.zeros(2, Format.of(form).page_bytes(16, 2, DIM), dtype=torch.uint8), Format.of(form), (16, 2, DIM))
    before = x.clone()
    for words, positions, slots in (
        (f"positions are 1 to {T}; give 0 to {T - 1}: rows of the table", places + 1, places),
        ("positions are -1 to ", places - 1, places),
        (f"append.slots are 9 to {T + 8}; give 0 to 31: slots of the pages, and -1 for a token that is not written", places, places + 9),
        ("append.slots are -2 to ", places, places - 2),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^rope_append: {words}"), one_pass():
                rope_append(x, table, positions, (4, 2), append=Append(page, page, slots))
    assert torch.equal(x, before) and not (page.codes if form else page).any()
    rope_append(x, table, places, (4, 2), append=Append(page, page, places - 1))
    with pytest.raises(ValueError, match=f"^rotary: positions are 0 to {T}; give 0 to {T - 1}, rows of the table, or a longer rope_table"):
        rotary(x[:, None, :DIM], x[:, None, :DIM], table, places.index_fill(0, places[:1] + 3, T))


def test_what_a_kernel_would_read_past_its_end_is_refused():
    """One position and one slot a token, weights of a head: nothing on a GPU says that there are fewer."""
    x, table, places = torch.randn(T, 8 * DIM), torch.randn(40, DIM), torch.arange(T)
    page = torch.zeros(2, 16, 2, DIM)
    norm = QKNorm(torch.ones(DIM - 1), torch.ones(DIM), 1e-6)
    for words, given, how in (
        (r"positions are torch.int64 \[23\] on cpu; give int64 \[24\], one a token", places[1:], {}),
        (r"positions are torch.float32 \[24\]", places.float(), {}),
        (r"append.slots are torch.int32 \[24\]", places, {"append": Append(page, page, places.int())}),
        (r"append.slots are torch.int64 \[25\]", places, {"append": Append(page, page, torch.arange(T + 1))}),
        (r"norm has weights \[15\] and \[16\]; give \[16\] both", places, {"norm": norm}),
    ):
        with pytest.raises(ValueError, match=f"^rope_append: {words}"):
            rope_append(x, table, given, (4, 2), **how)
    for odd in (page, (page, page, places), Append(page, page, [0])):
        with pytest.raises(TypeError, match=r"^rope_append: append.* a (Tensor|tuple|list); give Append\(k, v, slots\)"):
            rope_append(x, table, places, (4, 2), append=odd)
    for name, pools in (("k", (None, page)), ("v", (page, None))):
        with pytest.raises(TypeError, match=rf"^rope_append: append.{name} is a NoneType; give a tensor \[pages, page, 2, 16\] or Codes"):
            rope_append(x, table, places, (4, 2), append=Append(*pools, places))
    for odd in (table.int(), table[0], table[:, 1:]):
        with pytest.raises(ValueError, match=r"^rope_append: table is .*; give float32 \[positions, an even number of columns, at most 16\]"):
            rope_append(x, odd, places, (4, 2))
    form, channel = Format.of("int8"), torch.ones(2, DIM)
    k = v = Codes.over(torch.zeros(2, form.page_bytes(16, 2, DIM), dtype=torch.uint8), form, (16, 2, DIM))
    for words, pools in (
        ("append.v has a channel scale, which only keys have", (k, v._replace(channel=channel))),
        (r"append.k.channel is torch.float32 \[16\] on cpu; give float32 \[2, 16\]", (k._replace(channel=channel[0]), v)),
    ):
        with pytest.raises(ValueError, match=f"^rope_append: {words}"):
            rope_append(x.bfloat16(), table, places, (4, 2), append=Append(*pools, places))


@pytest.mark.parametrize("heads", [(4.0, 2.0), (4, 2.0), 4, None, (4,), (True, True), "42"], ids=str)
def test_heads_that_are_none(heads):
    """What was kept of 4.0 heads would be the answer to 4 of them."""
    x, table, places = torch.randn(T, 8 * DIM), torch.randn(40, DIM), torch.arange(T)
    with pytest.raises(TypeError, match=r"^rope_append: heads is .*; give \(heads, kv_heads\), two whole numbers"):
        rope_append(x, table, places, heads)
    rope_append(x, table, places, [4, 2])


COMPILED = {
    "rms_norm": (lambda x, w: rms_norm(x, w, offset=1.0), (T, 64), 64),
    "add_rms_norm": (lambda x, w: rms_norm(x, w, offset=1.0, residual=x), (T, 64), 64),
    "rope_append": (rotate, (T, 8 * DIM), DIM),
}


def test_half_of_an_append_in_a_compiled_graph():
    """Keys that are None are a mistake there too, no call without a cache."""
    x, table, places, page = torch.randn(T, 8 * DIM), torch.randn(40, DIM), torch.arange(T), torch.zeros(2, 16, 2, DIM)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rope_append(x, table, places, (4, 2), append=Append(None, page, places)), fullgraph=True, backend="aot_eager")
    with pytest.raises(TypeError, match=r"rope_append: append\.k is a NoneType; give a tensor"):
        compiled(x)


@pytest.mark.parametrize("name", COMPILED)
def test_an_offset_in_a_compiled_graph(name):
    function, shape, width = COMPILED[name]
    inputs = torch.randn(shape), torch.randn(width) * 0.1
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, function(*inputs))
