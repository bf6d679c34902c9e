"""The public functions of the fused operators: what a Problem says of a call, and offsets through a compiled graph."""

import pytest
import torch

from onchip import dispatch
from onchip.core.problem import Rows
from onchip.ops.fused import QKNorm, rope_append
from onchip.ops.norm import rms_norm

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


COMPILED = {
    "rms_norm": (lambda x, w: rms_norm(x, w, offset=1.0), (T, 64), 64),
    "add_rms_norm": (lambda x, w: rms_norm(x, w, offset=1.0, residual=x), (T, 64), 64),
    "rope_append": (rotate, (T, 8 * DIM), DIM),
}


@pytest.mark.parametrize("name", COMPILED)
def test_an_offset_in_a_compiled_graph(name):
    function, shape, width = COMPILED[name]
    inputs = torch.randn(shape), torch.randn(width) * 0.1
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, function(*inputs))
