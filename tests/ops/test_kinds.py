"""Calls of a kind that has come before: the same results, errors and records as the first of its kind."""

from dataclasses import dataclass

import pytest
import torch

import onchip
from onchip import Causal, Window, dispatch
from onchip.core.masks import Band
from onchip.ops import attend, kinds

CALLS = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Window(5, 3)},
    "softcap": {"softcap": 2.0, "mask": Causal()},
    "scale": {"scale": 0.3},
    "bools": {"mask": torch.rand(9, 9) < 0.6},
    "bools of heads": {"mask": torch.rand(4, 1, 9) < 0.6},
    "bias": {"bias": torch.randn(9, 9)},
    "bias of keys": {"bias": torch.randn(2, 1, 1, 9, requires_grad=True)},
    "bias, bools, softcap": {"bias": torch.randn(4, 9, 1), "mask": torch.rand(9, 9) < 0.6, "softcap": 3.0},
    "deterministic": {"deterministic": True, "batch_invariant": True},
    "named": {"kernel": "blocked"},
}


@pytest.fixture(autouse=True)
def nothing_known():
    dispatch.forget()


def qkv(dtype=torch.float32, grad=False):
    return [torch.randn(2, 9, heads, 8).to(dtype).requires_grad_(grad) for heads in (4, 2, 2)]


@pytest.fixture
def described(monkeypatch):
    """How many Problems were made."""
    made, problem_of = [], attend.problem_of
    monkeypatch.setattr(attend, "problem_of", lambda *given: made.append(1) or problem_of(*given))
    return made


def like(call: dict) -> dict:
    """A call of the same kind: other tensors."""
    change = {name: t if not isinstance(t, torch.Tensor) else (~t if t.dtype == torch.bool else -t.detach()) for name, t in call.items()}
    return change | {"bias": change["bias"].requires_grad_(call["bias"].requires_grad)} if "bias" in change else change


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_the_second_call_of_a_kind(name, grad, described):
    call = CALLS[name]
    onchip.attention(*qkv(grad=grad), **call)
    assert len(described) == 1
    other, inputs = like(call), qkv(grad=grad)
    found = onchip.attention(*inputs, **other, return_lse=True)
    assert len(described) == 1
    dispatch.forget()
    expected = onchip.attention(*inputs, **other, return_lse=True)
    assert len(described) == 2
    for ours, fresh in zip(found, expected, strict=True):
        assert torch.equal(ours, fresh)
    wanted = [t for t in (*inputs, other.get("bias")) if t is not None and t.requires_grad]
    if wanted:
        for ours, fresh in zip(torch.autograd.grad(found[0].sum(), wanted), torch.autograd.grad(expected[0].sum(), wanted), strict=True):
            assert torch.equal(ours, fresh)


def test_what_a_tensor_holds_is_looked_at_anew():
    (q, k, v), seen = qkv(), torch.ones(9, 9, dtype=torch.bool)
    onchip.attention(q, k, v, mask=seen)
    seen.copy_(torch.ones(9, 9).tril())
    torch.testing.assert_close(onchip.attention(q, k, v, mask=seen), onchip.attention(q, k, v, mask=Causal()))
    seen[3] = False
    assert not onchip.attention(q, k, v, mask=seen)[:, 3].any()


def test_what_is_another_kind(described):
    """A change of one thing that a Problem or a check depends on."""
    q, k, v = qkv()
    calls = [
        ((q, k, v), {}),
        ((q[:1], k[:1], v[:1]), {}),
        ((q[:, :5], k, v), {}),
        ((q, k[:, :5], v[:, :5]), {}),
        ((q, k, v[..., :4]), {}),
        ((q.double(), k.double(), v.double()), {}),
        ((q, k, v), {"mask": Causal()}),
        ((q, k, v), {"mask": Window(4)}),
        ((q, k, v), {"mask": torch.ones(9, 9, dtype=torch.bool)}),
        ((q, k, v), {"mask": torch.ones(1, 9, dtype=torch.bool)}),
        ((q, k, v), {"bias": torch.ones(9, 9)}),
        ((q, k, v), {"bias": torch.ones(4, 9, 9)}),
        ((q, k, v), {"bias": torch.ones(9, 9).double()}),
        ((q, k, v), {"scale": 1.0}),
        ((q, k, v), {"softcap": 5.0}),
        ((q, k, v), {"deterministic": True}),
        ((q, k, v), {"batch_invariant": True}),
        ((q, k, v), {"kernel": "blocked"}),
    ]
    for _ in range(2):
        for tensors, how in calls:
            onchip.attention(*tensors, **how)
        assert len(described) == len(calls)


def test_a_band_of_ones_own_is_of_no_kind():
    """It may see less than its ends say."""

    class Near(Band):
        def __init__(self, left):
            self.left = self.right = left

    @dataclass(frozen=True)
    class Steps(Band):
        step: int = 1

        def sees(self, at):
            return at.j % self.step == 0

    inputs, (q, cache) = qkv(), pages()
    for n in (1, 3, 1):
        torch.testing.assert_close(onchip.attention(*inputs, mask=Near(n)), onchip.attention(*inputs, mask=Window(n, n)))
        steps = torch.arange(9) % n == 0
        torch.testing.assert_close(onchip.attention(*inputs, mask=Steps(n)), onchip.attention(*inputs, mask=steps.expand(9, 9)))
        torch.testing.assert_close(onchip.paged_attention(q, cache, mask=Steps(n)), onchip.paged_attention(q, cache, mask=(torch.arange(12) % n == 0)[None]))


def test_what_kinds_say_nothing_of(described):
    """Functions, sinks, dropout, the reference: a Problem for each call."""
    q, k, v = qkv()
    others = [
        {"mask": lambda b, h, i, j: i >= j},
        {"mask": onchip.KeyPadding(torch.ones(2, 9, dtype=torch.bool))},
        {"score": lambda s, b, h, i, j: s + 1},
        {"sinks": torch.zeros(4)},
        {"dropout": 0.5},
        {"kernel": "reference"},
        {"scale": torch.tensor(0.5)},
    ]
    for how in others:
        before = len(described)
        for _ in range(2):
            onchip.attention(q, k, v, **how)
        assert len(described) == before + 2, how


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": torch.ones(9, 8, dtype=torch.bool)},
        {"mask": torch.ones(9, 9)},
        {"bias": torch.ones(9, 9, dtype=torch.int32)},
        {"bias": torch.ones(3, 9, 9)},
        {"scale": float("nan")},
        {"softcap": -1.0},
        {"kernel": ["blocked"]},
        {"mask": torch.eye(9, dtype=torch.bool).to_sparse()},
    ],
    ids=str,
)
def test_a_mistake_is_said_each_time(wrong):
    q, k, v = qkv()
    onchip.attention(q, k, v)
    said = set()
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)) as error:
            onchip.attention(q, k, v, **wrong)
        said.add(str(error.value))
    assert len(said) == 1


def test_a_scale_is_looked_at_while_another_call_is_compiled():
    """`torch.compiler.is_compiling` is true then, in backends and in other threads too."""
    q, k, v = qkv()
    said = []

    def backend(graph, _examples):
        for scale in (float("inf"), 0.5):
            try:
                said.append(onchip.attention(q, k, v, scale=scale).isfinite().all().item())
            except ValueError as error:
                said.append(str(error))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert len(said) == 2 and "scale is inf" in said[0] and said[1] is True
    with pytest.raises(ValueError, match="scale is inf"):
        onchip.attention(q, k, v, scale=float("inf"))


def test_tangents_are_refused_while_another_call_is_compiled():
    q, k, v = qkv()
    said = []

    def backend(graph, _examples):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(lambda q: onchip.attention(q, k, v), (q,), (q,))
        said.append(torch.func.grad(lambda q: onchip.attention(q, k, v).sum())(q))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    torch.testing.assert_close(said[0], torch.func.grad(lambda q: onchip.attention(q, k, v).sum())(q))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_leave_no_kinds():
    q, k, v = qkv()
    onchip.attention(q, k, v)
    torch.jit.trace(lambda q, k, v: onchip.attention(q, k, v), (q, k, v), check_trace=False)
    assert len(dispatch.kept) == 1


def test_records_margins_and_autocast():
    q, k, v = qkv()
    onchip.attention(q, k, v)
    with dispatch.record() as decisions:
        onchip.attention(q, k, v)
    assert [d.kernel.name for d in decisions] == ["blocked"]
    with dispatch.sm_margin(8), dispatch.record() as decisions:
        onchip.attention(q, k, v)
    assert decisions[0].device.margin == 8
    with torch.autocast("cpu", torch.bfloat16):
        assert onchip.attention(q, k, v).dtype == torch.bfloat16


def test_kinds_that_are_kept_have_an_end(monkeypatch):
    monkeypatch.setattr(kinds, "MOST", 3)
    q, k, v = qkv()
    for n in range(1, 9):
        onchip.attention(q, k[:, :n], v[:, :n])
        assert len(dispatch.kept) <= 3


def test_two_devices_are_no_kind():
    q, k, v = qkv()
    bias = torch.zeros(9, 9, device="meta")
    assert kinds.known(q, k, v, Causal(), None, bias, None, (False, False, "auto"))[0] is None


# ---- over pages


def pages(dtype=torch.float32, dim_v=8, lengths=(9, 4)):
    """A query, and a cache of pages of 4 tokens."""
    k, v = torch.randn(8, 4, 2, 8).to(dtype), torch.randn(8, 4, 2, dim_v).to(dtype)
    table = torch.tensor([[1, 3, 5], [2, 4, 6]], dtype=torch.int32)
    return torch.randn(2, 1, 4, 8).to(dtype), onchip.PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32))


PAGED_CALLS = {
    "plain": {},
    "window": {"mask": Window(5)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "invariant": {"batch_invariant": True},
    "named": {"kernel": "blocked"},
}


@pytest.mark.parametrize("call", PAGED_CALLS.values(), ids=PAGED_CALLS)
def test_the_second_call_over_pages(call, described):
    onchip.paged_attention(*pages(), **call)
    assert len(described) == 1
    q, cache = pages(lengths=(3, 12))  # what tensors hold decides nothing
    with dispatch.record() as decisions:
        found = onchip.paged_attention(q, cache, **call, return_lse=True)
    assert len(described) == 1 and [d.kernel.name for d in decisions] == ["blocked"]
    dispatch.forget()
    expected = onchip.paged_attention(q, cache, **call, return_lse=True)
    assert len(described) == 2 and all(map(torch.equal, found, expected))


def test_what_is_another_kind_over_pages(described):
    q, cache = pages()
    latent = torch.randn(8, 4, 1, 8)
    shared = cache._replace(k=latent, v=latent[..., :4])
    calls = [
        (pages(), {}),
        (pages(torch.float64), {}),
        (pages(dim_v=4), {}),
        ((q[:1], cache._replace(page_table=cache.page_table[:1], lengths=cache.lengths[:1])), {}),
        ((torch.cat((q, q), 1), cache), {}),
        ((q, cache._replace(page_table=cache.page_table[:, :2].contiguous(), lengths=cache.lengths.clamp(max=8))), {}),
        ((q, shared), {}),
        ((q, shared._replace(v=shared.v.clone())), {}),
        (pages(), {"mask": Window(3)}),
        (pages(), {"scale": 1.0}),
        (pages(), {"softcap": 5.0}),
        (pages(), {"batch_invariant": True}),
        (pages(), {"kernel": "blocked"}),
    ]
    for _ in range(2):
        for given, how in calls:
            out = onchip.paged_attention(*given, **how)
            torch.testing.assert_close(out, onchip.paged_attention(*given, **{**how, "kernel": "reference"}))
    assert len(described) == len(calls) + 2 * len(calls)  # the reference is of no kind


def test_what_kinds_over_pages_say_nothing_of(described):
    q, cache = pages()
    offsets, learnt = torch.tensor([0, 1, 2], dtype=torch.int32), cache._replace(k=cache.k.clone().requires_grad_())
    others = [
        ((q[:, 0], cache), {"q_offsets": offsets, "longest": 1}),
        ((q, cache), {"bias": torch.zeros(12)}),
        ((q, cache), {"sinks": torch.zeros(4)}),
        ((q, cache), {"score": lambda s, b, h, i, j: s + 1}),
        ((q, cache), {"mask": lambda b, h, i, j: i >= j}),
        ((q, cache), {"scale": torch.tensor(0.5)}),
    ]
    for given, how in others:
        before = len(described)
        for _ in range(2):
            onchip.paged_attention(*given, **how)
        assert len(described) == before + 2, how
    onchip.paged_attention(q, cache)
    (grad,) = torch.autograd.grad(onchip.paged_attention(q, learnt).sum(), learnt.k)
    assert grad.abs().max() > 0
    assert torch.compile(lambda: onchip.paged_attention(q, cache), fullgraph=True, backend="eager")().shape == q.shape


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_table": torch.tensor(3, dtype=torch.int32)}, r"page_table is torch.int32 \[\]"),
        ({"v": torch.tensor(3.0)}, "have 4, 4, 0 dimensions"),
        ({"longest": [1]}, r"longest is \[1\] without q_offsets"),
        ({"lengths": torch.tensor([9.0, 4.0])}, "lengths are torch.float32"),
    ],
    ids=["table", "values", "longest", "lengths"],
)
def test_a_mistake_over_pages_is_said_each_time(change, said):
    q, cache = pages()
    onchip.paged_attention(q, cache)
    rest = {name: change.pop(name) for name in [*change] if name == "longest"}
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            onchip.paged_attention(q, cache._replace(**change), **rest)


def test_margins_and_tables_that_lie_otherwise():
    q, cache = pages()
    settings = Causal(), None, None, False, "auto"
    onchip.paged_attention(q, cache)
    with dispatch.sm_margin(8), dispatch.record() as decisions:
        onchip.paged_attention(q, cache)
    assert decisions[0].device.margin == 8
    assert kinds.known_paged(q, cache, None, None, settings)[1] is not None
    turned = cache._replace(page_table=cache.page_table.t().contiguous().t())
    apart = cache._replace(lengths=torch.stack((cache.lengths, cache.lengths), 1)[:, 0])
    for other in (turned, apart):  # a kernel reads them as they lie
        assert kinds.known_paged(q, other, None, None, settings)[0] is None
        assert torch.equal(onchip.paged_attention(q, other), onchip.paged_attention(q, cache))


@pytest.mark.parametrize("wrong", [{"lengths": (9, 13)}, {"lengths": (-1, 4)}], ids=str)
def test_lengths_are_looked_at_each_time(wrong):
    onchip.paged_attention(*pages())
    for _ in range(2):
        with pytest.raises(ValueError, match="paged_attention: lengths are"):
            onchip.paged_attention(*pages(**wrong))
    q, cache = pages()
    with pytest.raises(ValueError, match="paged_attention: page_table has pages"):
        onchip.paged_attention(q, cache._replace(page_table=cache.page_table + 5))
    with pytest.raises(TypeError, match="cache is a tuple"):
        onchip.paged_attention(q, tuple(cache))
