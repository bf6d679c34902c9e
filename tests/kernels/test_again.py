"""A launch that comes again, beside the launch as it is: on a CPU with a stand-in for Triton's launches, and the operators themselves on a GPU."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import onchip
from onchip import dispatch
from onchip.kernels import again, compiling

triton = pytest.importorskip("triton")
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from onchip.core.problem import Attention, Operands  # noqa: E402
from onchip.kernels.attention import hopper_prefill, tile  # noqa: E402


class Launches:
    """Runs a Python function where Triton would run a kernel, on the memory that it is given."""

    def __init__(self, compute):
        self.compute, self.grids = compute, []
        params = [SimpleNamespace(name=name, default=3, is_constexpr=name.isupper()) for name in compute.__code__.co_varnames[: compute.__code__.co_argcount]]
        self.kernel = SimpleNamespace(__name__="kernel", params=params)

    def __getitem__(self, grid):  # the compiled kernel's: all arguments by position
        return lambda *args: (self.grids.append(grid), self.compute(*args))[0]

    def run(self, kernel, *args, grid, warmup, **options):
        given = [args[n] if n < len(args) else options.get(p.name, p.default) for n, p in enumerate(kernel.params)]
        with torch.utils._python_dispatch._disable_current_modes():  # a kernel's work is no operation of torch's
            self[(*grid, 1, 1)[:3]](*given)
        return self


@pytest.fixture
def launched(monkeypatch):
    """A function that launches `compute(...)` as a kernel of Triton is launched."""
    monkeypatch.setattr(again, "_stream", lambda: 0)

    def by(compute):
        stand_in = Launches(compute)
        monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: stand_in.run(self, *args, **options))

        def launch(*args, **options):
            return JITFunction.run(stand_in.kernel, *args, grid=(2,), warmup=False, num_warps=4, **options)

        launch.grids = stand_in.grids
        return launch

    return by


@pytest.fixture
def counted(monkeypatch):
    """How many calls went by what was written."""
    calls, call = [], again.Again.__call__
    monkeypatch.setattr(again.Again, "__call__", lambda self, tensors: calls.append(self) or call(self, tensors))
    return calls


def repeated(run, make, counted, times: int = 4):
    """The calls that were repeated; each must give what `run` gives."""
    launch = again.repeated(run)
    for n in range(times):
        inputs = make(n)
        copies = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
        found, expected = launch(*inputs), run(*copies)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return len(counted)


def test_operations_and_launches_are_repeated(launched, counted):
    def compute(x, sums, described, several, factor, BLOCK):
        described.base.copy_(x.as_strided((2, 4), (4, 1)) * factor + BLOCK)
        sums += several[0].sum() + several[1][0]

    kernel = launched(compute)

    def run(x, y, factor):
        out, sums = torch.empty(2, 4), torch.zeros(1)
        kernel(x.transpose(0, 1), sums, TensorDescriptor(out, [2, 4], [4, 1], [2, 4]), (y[1], (5, y)), factor, BLOCK=7)
        return out, sums + 1, None

    assert repeated(run, lambda n: (torch.randn(4, 4), torch.arange(4.0) + n, 2.0), counted) == 2
    assert kernel.grids == [(2, 1, 1)] * 8


def test_steps_that_nothing_needs_are_left_out(launched):
    kernel = launched(lambda x, y: y.copy_(x))

    def run(x):
        x.transpose(0, 1), torch.empty(100)
        y = torch.empty_like(x)
        kernel(x.view(-1).view(x.shape), y)
        return y

    launch, x = again.repeated(run), torch.randn(3, 5)
    recorder = again.Recorder([x])
    with again._launches_told(recorder), recorder:
        result = run(x)
    made = recorder.again(result)
    assert len(made.steps) == 2, "an allocation and a launch"
    assert torch.equal(made([x + 1]), x + 1)
    assert launch is not run


def test_views_of_what_has_a_gradient_are_known_again(launched, counted):
    launch = launched(lambda x, out: out.copy_(x))

    def run(x):
        turned, out = x.transpose(0, 1), torch.empty(x.shape)
        launch(turned[None].transpose(1, 2)[0], out)
        return out + turned.T

    with torch.no_grad():
        assert repeated(run, lambda n: [torch.full((2, 3), float(n)).requires_grad_()], counted) == 2


@pytest.mark.parametrize("gradient", [False, True])
def test_a_result_that_is_an_input_under_another_name_goes_its_whole_way(launched, counted, gradient):
    launched(lambda: None)
    launch = again.repeated(lambda x: x.detach())
    with torch.no_grad():
        for _ in range(4):
            x = torch.ones(2).requires_grad_(gradient)
            assert launch(x) is not x
    assert len(counted) == 0


def test_inputs_that_are_written_to(launched, counted):
    def run(x, y):
        x[:2].add_(y)
        return x

    launched(lambda: None)
    launch = again.repeated(run)
    for n in range(4):
        x, y = torch.full((4,), float(n)), torch.ones(2)
        assert launch(x, y) is x
        assert x.tolist() == [n + 1, n + 1, n, n]
    assert len(counted) == 2


@pytest.mark.parametrize(
    "differ",
    [
        lambda x: x.repeat(2)[:4].clone().view(2, 2),
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x[:1], x])[1:],
        lambda x: x.double(),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["shape", "stride", "alignment", "dtype", "gradient"],
)
def test_what_differs_is_another_call(launched, counted, differ):
    launched(lambda: None)
    facts = lambda x: (tuple(x.shape), x.stride(), str(x.dtype), x.data_ptr() % 16, x.requires_grad)  # noqa: E731
    launch, x = again.repeated(lambda x: (x.detach() * 2, facts(x))), torch.randn(4)
    for _ in range(3):
        launch(x)
    assert len(counted) == 1
    other = differ(x)
    assert launch(other)[1] == facts(other)
    assert len(counted) == 1


@pytest.mark.parametrize("view", [lambda x: x[1:3], lambda x: x[1:]], ids=["exactly", "its beginning"])
def test_of_inputs_that_overlap_a_view_is_no_other_input(launched, counted, view):
    """The call that is written down has a second input where the first one's view is."""
    kernel = launched(lambda x, y, out: out.copy_(10 * x[:2] + y))

    def run(x, y):
        out = torch.empty_like(y)
        kernel(view(x), y, out)
        return out, view(x) * 2

    launch, buffer = again.repeated(run), torch.arange(8.0)
    for _ in range(3):
        inputs = buffer[0:4], buffer[1:3]
        torch.testing.assert_close(launch(*inputs), run(*inputs))
    inputs = torch.arange(4.0), torch.full((3,), 100.0)[1:]  # aligned as those
    assert again._key(inputs, []) == again._key((buffer[0:4], buffer[1:3]), [])
    torch.testing.assert_close(launch(*inputs), run(*inputs))


def test_numbers_of_two_kinds_are_two_calls(launched, counted):
    launched(lambda: None)
    launch, x = again.repeated(lambda x, factor: x * factor), torch.tensor([3])
    for factor, dtype in ((2, torch.int64), (2.0, torch.float32), (True, torch.int64)):
        for _ in range(3):
            assert launch(x, factor).dtype == dtype
    assert len(counted) == 3


def test_a_conjugate_is_another_tensor(launched, counted):
    """Its memory is that of the numbers that it is the conjugate of."""
    kernel = launched(lambda x, y: torch.view_as_real(y).copy_(torch.view_as_real(x)))

    def run(x):
        y = torch.empty_like(x)
        kernel(x.resolve_conj(), y)
        return y, x.conj() * 1j

    launch, x = again.repeated(run), torch.tensor([1 + 2j])
    for given in (x, x.conj()):
        for _ in range(3):
            assert torch.equal(torch.cat(launch(given)), torch.cat(run(given)))
    assert len(counted) == 1


def test_what_lasts_may_be_made_by_the_call_that_is_written_down(launched, counted):
    kept = []
    kernel = launched(lambda x, counter, y: (y.copy_(x + counter), counter.add_(1)))

    def run(x):
        if len(kept) < 2:  # the second call makes what it keeps
            kept.append(torch.zeros(1))
        y = torch.empty_like(x)
        kernel(x, again.lasting(kept[-1]), y)
        return y

    launch = again.repeated(run)
    assert [launch(torch.zeros(1)).item() for _ in range(5)] == [0, 0, 1, 2, 3]
    assert len(counted) == 3


def test_what_is_made_lives_until_the_last_step_has_run(launched, counted):
    """A kernel that begins early may write to what it is given before the one in front has read."""
    alive = []
    kernel = launched(lambda x, y: (y.copy_(x + 1), alive.append(weakref.ref(y))))

    def run(x):
        for _ in range(5):
            y = torch.empty_like(x)
            kernel(x, y)
            x = y
        return x

    launch = again.repeated(run)
    for _ in range(3):
        launch(torch.zeros(3))
    alive.clear()
    counted[0].steps.append(lambda slots: alive.append([t() is not None for t in alive]))
    assert launch(torch.zeros(3)).tolist() == [5] * 3
    assert alive[-1] == [True] * 5


def test_the_same_memory_twice_is_another_call(launched, counted):
    launched(lambda: None)
    launch, x, y = again.repeated(lambda x, y: x - y), torch.ones(4), torch.zeros(4)
    for _ in range(3):
        assert launch(x, x).tolist() == [0] * 4
    assert len(counted) == 1
    assert [launch(x, y).tolist() for _ in range(3)] == [[1] * 4] * 3


def test_numbers_and_tuples_are_part_of_a_call(launched, counted):
    launched(lambda: None)

    def run(pair, factor, name):
        return pair[0] * factor + (len(pair) if name == "a" else 0)

    launch, x = again.repeated(run), torch.ones(2)
    for _ in range(3):
        assert launch((x, x + 1), 2.0, "a").tolist() == [4, 4]
    assert launch((x, x + 1), 3.0, "a").tolist() == [5, 5]
    assert launch((x, x + 1), 2.0, "b").tolist() == [2, 2]
    assert launch((x, None), 2.0, "a").tolist() == [4, 4]
    assert len(counted) == 1


KEPT = torch.ones(4)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, kernel: x * x.sum().item(),
        lambda x, kernel: x[x > 0].sum(),
        lambda x, kernel: x * KEPT,
        lambda x, kernel: x.as_strided((2,), (2,), x.storage_offset()) + 1,
        lambda x, kernel: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
        lambda x, kernel: kernel(x, object(), torch.empty_like(x)) and x + 1,
        lambda x, kernel: kernel(x, 1, KEPT.clone()[1:]) and x + 1,
        lambda x, kernel: (again.refuse("it keeps something"), x + 1)[1],
        lambda x, kernel: [x + 1],
        lambda x, kernel: x.detach(),
        lambda x, kernel: torch.rand(4, generator=torch.Generator().manual_seed(1)) * x,
        lambda x, kernel: x.to_sparse().to_dense(),
    ],
    ids=[
        *("a number", "sizes", "kept", "a place", "a constant", "an object", "a kept copy", "said"),
        *("a list", "an input's view of itself", "a generator", "sparse"),
    ],
)
def test_what_cannot_be_repeated_goes_its_whole_way(launched, counted, run):
    kernel = launched(lambda x, something, y: y.copy_(x[: len(y)]))
    assert repeated(lambda x: run(x, kernel), lambda n: (torch.randn(4) + n,), counted) == 0


def test_what_lasts_is_used_on_its_stream_by_eager_calls(launched, counted, monkeypatch):
    counters = {0: torch.zeros(4), 1: torch.ones(4)}
    now, capturing = [0], [False]
    kernel = launched(lambda x, counter, y: y.copy_(x + counter))
    monkeypatch.setattr(again, "_stream", lambda: now[0])
    monkeypatch.setattr(again, "_capturing", lambda: capturing[0])

    def run(x):
        y = torch.empty_like(x)
        kernel(x, again.lasting(counters[now[0]]), y)
        return y, again.lasting(counters[now[0]]).sum()

    launch, x = again.repeated(run), torch.randn(4)
    for n in range(4):
        now[0] = 0
        counters[0].fill_(n)
        assert torch.equal(launch(x)[0], x + n)
        now[0] = 1
        assert torch.equal(launch(x)[0], x + 1)
    assert len(counted) == 3, "the second call was written down, on stream 1"
    now[0], capturing[0] = 1, True
    launch(x)
    assert len(counted) == 3


def test_calls_under_autocast_are_others(launched, counted):
    launched(lambda: None)
    launch, x = again.repeated(lambda x: x @ x), torch.randn(4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                found = launch(x)
                assert found.dtype == dtype and torch.equal(found, x @ x)
    for _ in range(3):
        assert launch(x).dtype == torch.float32 and torch.equal(launch(x), x @ x)
    assert len(counted) == 6


def test_what_is_asked_for_is_asked_again(launched, counted):
    """A list that is kept while what it is of is the same, and made anew of another; in it anything may happen."""
    kernel = launched(lambda x, y: y.copy_(x * 2))
    kept, made = {}, []

    def find(lengths, nothing):
        assert nothing is None
        if id(lengths) not in kept:
            again.refuse("it keeps something")
            made.append(lengths.tolist())
            found = torch.empty_like(lengths)
            kernel(lengths, found)
            kept[id(lengths)] = lengths, found
        return kept[id(lengths)][1]

    launch = again.repeated(lambda x, lengths: x + again.asked(find, lengths, None))
    first, second = torch.arange(3.0), torch.full((3,), 5.0)
    for n in range(4):
        assert launch(torch.full((3,), float(n)), first).tolist() == [n, n + 2, n + 4]
    assert launch(torch.zeros(3), second).tolist() == [10] * 3
    assert made == [[0, 1, 2], [5, 5, 5]] and len(counted) == 3


def test_a_masks_map_is_asked_for_again(launched, counted, monkeypatch):
    """It is made anew of a mask that was written to, by whatever torch counts, and of another one in its place; and let go with its mask."""
    made = []
    monkeypatch.setattr(tile, "_mask_map", lambda p, sees, captured, *_: made.append(1) or captured[0].int().cumsum(-1))
    launched(lambda: None)
    valid = torch.ones(1, 8, dtype=torch.bool)
    p = onchip.core.problem.Attention("prefill", 1, 8, 8, 1, 1, 16, torch.float32, onchip.KeyPadding(valid).static())

    def run(x, mask):
        return x + tile.mask_map(p, None, onchip.core.problem.Operands(1.0, mask=mask), 32, 32, False, x.device, True)[0]

    launch, x = again.repeated(run), torch.zeros(1, 8)

    def is_right(mask):
        assert torch.equal(launch(x, (mask,)), mask.cumsum(-1).float())

    for _ in range(4):
        is_right(valid)
    assert len(made) == 1 and len(counted) == 2
    valid[0, 3] = False
    is_right(valid)
    with torch.no_grad():
        valid.detach()[0, 4] = False
    is_right(valid)
    valid.data = torch.zeros(1, 8, dtype=torch.bool)
    is_right(valid)
    for n in range(8):  # each where the one before lay
        is_right(torch.arange(8)[None] >= n)
    assert len(made) == 12
    known = len(tile._made)
    del valid
    assert len(tile._made) == known - 4


def test_a_dense_batch_that_goes_as_a_packed_one_is_repeated(counted, monkeypatch):
    """Its offsets are asked for each time, its results are those of each call's lengths."""

    def launch(p, tiles, q, k, v, x, return_lse, table):
        assert (p.tokens, q.shape, x.q_offsets.tolist()) == (6, (6, 2, 8), [0, 3, 6])
        return q * 2 + x.q_offsets.sum() + x.k_used.sum(), q.sum(-1).T.contiguous()

    monkeypatch.setattr(again, "_stream", lambda: 0)
    monkeypatch.setattr(hopper_prefill, "launch", launch)
    p = Attention("decode", 2, 3, 9000, 2, 1, 8, torch.bfloat16, onchip.Causal(), "paged", 16)
    tiles = hopper_prefill.Tiles(1, 64, 2, 132, parts=0)

    def run(q, k, table, lengths):
        return hopper_prefill.launch_paged(p, tiles, q, onchip.PagedKV(k, k, table, lengths), Operands(1.0), True)

    k, table = torch.zeros(4, 16, 1, 8), torch.zeros(2, 2, dtype=torch.int32)
    assert repeated(run, lambda n: (torch.randn(2, 3, 2, 8), k, table, torch.tensor([n, 9], dtype=torch.int32)), counted, 5) == 3
    out, lse = run(torch.ones(2, 3, 2, 8), k, table, torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out, torch.full((2, 3, 2, 8), 11.0)) and torch.equal(lse, torch.full((2, 2, 3), 8.0)) and lse.is_contiguous()


def test_a_second_stream_is_not_written_down(launched, counted, monkeypatch):
    launched(lambda: None)
    now = [0]
    monkeypatch.setattr(again, "_stream", lambda: now[0])

    def run(x):
        now[0] = 1
        y = x + 1
        now[0] = 0
        return y

    assert repeated(run, lambda n: (torch.randn(4),), counted) == 0


def test_nothing_is_written_down_or_repeated_where_launches_are_withheld(launched, counted):
    launched(lambda: None)
    ran = []
    launch, x = again.repeated(lambda x: ran.append(1) or x + 1), torch.ones(2)
    with compiling.PATCHING:
        for _ in range(3):
            launch(x)
    launch(x), launch(x)
    assert len(counted) == 0
    with compiling.PATCHING:
        launch(x)
    assert len(ran) == 6


def test_what_never_comes_again_is_let_go(launched, monkeypatch):
    launched(lambda: None)
    monkeypatch.setattr(again, "MOST", 4)
    launch = again.repeated(lambda x, factor: x * factor)
    for n in range(20):
        assert launch(torch.ones(1), float(n)).item() == n
    assert len(again._known) <= 4
    again.forget()
    assert not again._known


def test_lists_and_tensors_of_another_kind_go_their_whole_way(launched, counted):
    class Kind(Tensor):
        pass

    launched(lambda: None)
    launch = again.repeated(lambda x: x * 2)
    assert [launch(torch.ones(2).as_subclass(Kind)).tolist() for _ in range(3)] == [[2, 2]] * 3
    assert [again.repeated(sum)([1, 2, 3]) for _ in range(3)] == [6] * 3
    assert torch.func.vmap(launch)(torch.ones(3, 2)).tolist() == [[2, 2]] * 3
    assert len(counted) == 0


# ---- on a GPU


def _attention(**options):
    def call(q, k, v):
        return onchip.attention(q, k, v, return_lse=True, **options)

    return call, lambda: (torch.randn(2, 300, 8, 64), torch.randn(2, 300, 2, 64), torch.randn(2, 300, 2, 64))


def _packed(q, k, v):
    offsets = torch.tensor([0, 100, 101, 600], dtype=torch.int32, device=q.device)
    return onchip.attention_packed(q, k, v, offsets, longest=499, mask=onchip.Causal(), return_lse=True)


def _padded(q, k, v):
    valid = torch.arange(q.shape[1], device=q.device) >= 40 * (q[:, :1, 0, 0] > 0)  # another one in each call
    return onchip.attention(q, k, v, mask=onchip.KeyPadding(valid) & onchip.Causal(), return_lse=True)


CALLS = {
    "padded": (_padded, _attention()[1]),
    "packed": (_packed, lambda: (torch.randn(600, 8, 64), torch.randn(600, 2, 64), torch.randn(600, 2, 64))),
    "plain": _attention(),
    "causal": _attention(mask=onchip.Causal()),
    "triton": _attention(mask=onchip.Causal(), kernel="triton_prefill"),
    "softcap": _attention(mask=onchip.Window(64, 0), softcap=20.0),
    "rms_norm": (onchip.rms_norm, lambda: (torch.randn(70, 512), torch.randn(512))),
    "swiglu": (lambda x: onchip.gated_act(x, "silu"), lambda: (torch.randn(70, 512),)),
    "softmax": (lambda x: onchip.softmax(x), lambda: (torch.randn(70, 1000),)),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches are written down on a GPU")
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", CALLS)
def test_operators_give_the_same_on_a_gpu(name, gradients, counted):
    call, make = CALLS[name]
    dispatch.forget()
    torch.manual_seed(0)
    every = [[t.to("cuda", torch.bfloat16).requires_grad_(gradients) for t in make()] for _ in range(4)]

    def results(inputs):
        out = call(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        return [*out, *(torch.autograd.grad(out[0].float().square().sum(), inputs) if gradients else ())]

    found = [results(inputs) for inputs in every]
    assert len(counted) >= (4 if gradients else 2)
    for inputs, given in zip(every, found, strict=True):
        dispatch.forget()  # the whole way
        for one, other in zip(given, results(inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2) if gradients else torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches are written down on a GPU")
def test_a_graph_captures_what_is_repeated(counted):
    q, k, v = (torch.randn(1, 256, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for _ in range(3):
        expected = onchip.attention(q, k, v)
    before = len(counted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = onchip.attention(q, k, v)
    assert len(counted) == before + 1
    found.fill_(torch.nan)
    graph.replay()
    assert torch.equal(found, expected)
