"""AdamW and the norm of gradients against torch's own in float64."""

import copy

import pytest
import torch

from judge import assert_as_good_as_torch
from onchip.dispatch import record
from onchip.kernels.fused import ADAMW
from onchip.ops import optim
from onchip.ops.optim import AdamW

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in ADAMW.kernels]
SHAPES = ((1,), (63,), (33, 127), (5000,), (0,), (4096,))
HOW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtypes, device, shapes=SHAPES):
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtypes[n % len(dtypes)])) for n, shape in enumerate(shapes)]


def train(params, optimiser, gradients, max_norm=None):
    for of_step in gradients:
        for p, g in zip(params, of_step, strict=True):
            p.grad = None if g is None else g.to(p.dtype)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimiser.step()
    return [p.detach() for p in params]


def check(dtypes, moments, max_norm, kernel, device, shapes=SHAPES):
    start = parameters(dtypes, device, shapes)
    gradients = [[torch.randn(p.shape, device=device).mul(scale).to(p.dtype) for p in start] for scale in (3.0, 0.01, 1.0)]
    gradients[0][1] = None  # joins a step later
    ours, low, true = (copy.deepcopy(start) for _ in range(3))
    true = [torch.nn.Parameter(p.detach().double()) for p in true]
    with record() as decisions:
        found = train(ours, AdamW(ours, **HOW, max_norm=max_norm, moments=moments, kernel=kernel), gradients)
    assert {d.kernel.name for d in decisions} == {kernel}
    truth = train(true, torch.optim.AdamW(true, **HOW), gradients, max_norm)
    torchs = train(low, torch.optim.AdamW(low, **HOW, foreach=False), gradients, max_norm)
    for p, t, right in zip(found, torchs, truth, strict=True):
        if p.numel():
            assert_as_good_as_torch(p, t, right)
    return decisions


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtypes", "moments", "max_norm"), [((FP32,), FP32, None), ((BF16,), FP32, 1.5), ((BF16, FP32), BF16, 1e9)], ids=str)
def test_three_steps(dtypes, moments, max_norm, kernel, device):
    if moments == BF16:  # torch keeps moments in the parameter's dtype
        dtypes = (BF16,)
    check(dtypes, moments, max_norm, kernel, device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_launch_for_a_list(kernel, device):
    """And one for each dtype and count of steps."""
    params = parameters((FP32,), device)
    optimiser = AdamW(params, max_norm=1.0, kernel=kernel)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        with record() as decisions:
            optimiser.step()
    assert [str(d.problem) for d in decisions] == ["grad_norm 6x13351 fp32", "adamw 6x13351 fp32 fp32 moments"]


@pytest.mark.parametrize("kernel", [pytest.param("triton_adamw", marks=[pytest.mark.gpu, pytest.mark.large])])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_large(dtype, kernel, device):
    check((dtype,), FP32, 1.0, kernel, device, (*SHAPES, (4096, 4096), (3, 1 << 24)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_norm(kernel, device):
    params = parameters((FP32,), device)
    for p in params:
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in params]
    optimiser = AdamW(params, max_norm=0.5, kernel=kernel)
    optimiser.step()
    right = torch.cat([g.double().flatten() for g in before]).norm()
    torch.testing.assert_close(optimiser.norm, right, rtol=1e-6, atol=0)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))  # not scaled in memory
    first = optimiser.norm.clone()
    optimiser.step()
    assert torch.equal(optimiser.norm, first)  # the same bits


@pytest.mark.gpu
def test_tensors_that_are_not_aligned(device):
    memory = torch.randn(4, 1001, device=device)
    p = torch.nn.Parameter(memory[0, 1:])
    other = torch.nn.Parameter(p.detach().clone())
    p.grad, other.grad = memory[1, 1:], memory[1, 1:].clone()
    for each in (p, other):
        AdamW([each], **HOW, kernel="triton_adamw").step()
    assert torch.equal(p, other)


@pytest.mark.gpu
def test_tables_are_kept(device, monkeypatch):
    """Of more groups than one list may have tables; of a list the last ones that were used, and one that a CUDA graph reads."""
    from onchip.kernels.fused import adamw

    made, make = [], adamw._plan
    monkeypatch.setattr(adamw, "_plan", lambda lists: made.append(1) or make(lists))
    params = parameters((FP32,), device, ((2,),) * (adamw.KEPT + 3))
    optimiser = AdamW([{"params": [p]} for p in params], kernel="triton_adamw")
    train(params, optimiser, [[torch.ones_like(p) for p in params]] * 3)
    assert len(made) == len(params)
    known, lists = {}, [([t], [t], [t], [t]) for t in (torch.ones(2, device=device) for _ in range(2 * adamw.KEPT + 6))]
    adamw.plan(lists[0], known)
    (key,) = known
    known[key] = known[key]._replace(held=True)
    adamw.plan(lists[1], known)
    for each in lists[2:]:
        adamw.plan(each, known)
        adamw.plan(lists[1], known)
    assert key in known and len(made) == len(params) + len(lists)


def test_a_rate_on_the_device(device):
    params, same = parameters((FP32,), device), None
    same = copy.deepcopy(params)
    for p, q in zip(params, same, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    AdamW(params, lr=torch.tensor(0.25, device=device)).step()
    AdamW(same, lr=0.25).step()
    assert all(torch.equal(p, q) for p, q in zip(params, same, strict=True))


def test_state_comes_back(device):
    """Moments keep their dtype beside parameters in bfloat16, parameters share their count again, and torch's own state is read."""
    params = parameters((BF16,), device)
    gradients = [[torch.randn(p.shape, device=device) for p in params] for _ in range(4)]
    optimiser = AdamW(params, **HOW)
    train(params, optimiser, gradients[:2])
    twin = copy.deepcopy(params)
    other = AdamW(twin, **HOW)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert all(other.state[p]["exp_avg"].dtype == FP32 for p in twin) and len({id(other.state[p]["step"]) for p in twin}) == 1
    assert all(torch.equal(a, b) for a, b in zip(train(params, optimiser, gradients[2:]), train(twin, other, gradients[2:]), strict=True))
    plain = parameters((FP32,), device)
    theirs = torch.optim.AdamW(plain, **HOW)
    train(plain, theirs, gradients[:1])
    ours = AdamW(twin := copy.deepcopy(plain), **HOW)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for a, b in zip(train(plain, theirs, gradients[1:]), train(twin, ours, gradients[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torchs_own_goes_on_from_a_state(device):
    """A count that several parameters share would be counted up once for each of them."""
    params = parameters((FP32,), device)
    gradients = [[torch.randn(p.shape, device=device) for p in params] for _ in range(4)]
    ours = AdamW(params, **HOW)
    train(params, ours, gradients[:2])
    theirs = torch.optim.AdamW(twin := copy.deepcopy(params), **HOW)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for a, b in zip(train(params, ours, gradients[2:]), train(twin, theirs, gradients[2:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_copy_is_an_optimiser(device):
    ours = AdamW(params := parameters((FP32,), device), **HOW, max_norm=1.0, moments=BF16)
    gradients = [[torch.randn(p.shape, device=device) for p in params] for _ in range(2)]
    train(params, ours, gradients[:1])
    twin, other = copy.deepcopy((params, ours))
    assert all(torch.equal(a, b) for a, b in zip(train(params, ours, gradients[1:]), train(twin, other, gradients[1:]), strict=True))
    assert torch.equal(other.norm, ours.norm)


@pytest.mark.parametrize("kernel", KERNELS)
def test_channels_last(kernel, device):
    """A gradient that lies as the parameter does is read where it is, another one is laid out so."""
    start = torch.randn(5, 4, 3, 3, device=device)
    flat, turned = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(memory_format=torch.channels_last))
    optimisers = [AdamW([p], **HOW, max_norm=1.0, kernel=kernel) for p in (flat, turned)]
    for n in range(4):
        flat.grad = torch.randn_like(start)
        turned.grad = flat.grad.to(memory_format=torch.channels_last) if n % 2 else flat.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
        if n == 1:
            optimisers[1].load_state_dict(copy.deepcopy(optimisers[1].state_dict()))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(turned, flat, rtol=1e-5, atol=1e-6)  # the norm is added up in another order


def test_counts_of_steps(device):
    """Groups of one count, after a state was loaded, count once a step each; who has no gradient does not count."""
    start = parameters((FP32, FP64), device, ((7,), (9,), (5,)))
    found = []
    for make in (AdamW, torch.optim.AdamW):
        params = copy.deepcopy(start)
        torch.manual_seed(5)
        optimiser = None
        for without in ((), None, (), (1,), (0, 1), ()):
            if optimiser is None or without is None:
                state = optimiser and optimiser.state_dict()
                optimiser = make([{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}], **HOW)
                if state:
                    optimiser.load_state_dict(state)
            gradients = [torch.randn(p.shape, device=device) for p in params]
            train(params, optimiser, [[None if n in (without or ()) else g for n, g in enumerate(gradients)]])
        found.append((params, [float(optimiser.state[p]["step"]) for p in params]))
    assert found[0][1] == found[1][1] == [5.0, 4.0, 6.0]
    for p, t in zip(*(params for params, _ in found), strict=True):
        torch.testing.assert_close(p, t, rtol=1e-5, atol=1e-6)


def test_wrong_arguments(device):
    p = torch.nn.Parameter(torch.zeros(3, 4, device=device)[:, ::2])
    for keywords, message in (
        ({"betas": (1.0, 0.9)}, "betas lie in"),
        ({"max_norm": 0.0}, "max_norm=0.0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "AdamW: lr is nan; give a number"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"lr": torch.ones(2)}, r"or lr a tensor \[\]"),
        ({"moments": torch.float16}, "moments=torch.float16; give torch.float32 or torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW([p], **keywords)
    for keywords in ({"lr": "a"}, {"betas": 0.9}, {"betas": "ab"}, {"eps": None}, {"weight_decay": "a"}, {"max_norm": "a"}):
        (name,) = keywords
        with pytest.raises(TypeError, match=rf"^AdamW: {name}(\[0\])? is .*; give (a number|two numbers)"):
            AdamW([p], **keywords)
    with pytest.raises(ValueError, match="betas lie in"):
        AdamW([{"params": [p], "betas": (0.9, 1.5)}])
    with pytest.raises(ValueError, match="a group has amsgrad, maximize or"):
        AdamW([{"params": [p], "maximize": True}])
    for theirs in (torch.optim.AdamW([p], amsgrad=True), torch.optim.Adam([p], weight_decay=0.1)):
        with pytest.raises(ValueError, match="a group has amsgrad, maximize or"):
            AdamW([p]).load_state_dict(theirs.state_dict())
    p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="give contiguous ones"):
        AdamW([p]).step()
    p = torch.nn.Parameter(torch.zeros(3, device=device))
    p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="lr is a tensor on meta"):
        AdamW([p], lr=torch.tensor(0.1, device="meta")).step()
    p.grad.fill_(1.0)
    for name, value in (("lr", -1.0), ("betas", (0.9, 2.0)), ("eps", -1.0), ("weight_decay", float("nan")), ("maximize", True)):  # since it was made
        optimiser = AdamW([p])
        optimiser.param_groups[0][name] = value
        with pytest.raises(ValueError, match=r"^AdamW: "):
            optimiser.step()
        assert p.eq(0).all() and not optimiser.state
    optimiser = AdamW([p])
    optimiser.param_groups[0]["betas"] = [0.9, 0.99]
    optimiser.step()


def test_floats_in_range_are_not_asked_twice(monkeypatch):
    """Of 100 groups that was a tenth of a step's time on the host."""
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimiser = AdamW([p], weight_decay=0.0)
    monkeypatch.setattr(optim, "_check_numbers", lambda *given: pytest.fail(f"{given}"))
    optimiser.step()


def test_a_compiled_step_is_one_graph_break():
    """As torch's own: what it looks at is no graph's."""
    both = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    ours, plain = (AdamW([p], max_norm=1.0) for p in both)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(ours.step, backend="aot_eager")
    for n in range(3):
        for p in both:
            p.grad = torch.arange(4.0) + n
        step(), plain.step()
        assert torch.equal(*both) and torch.equal(ours.norm, plain.norm)
    assert len(torch._dynamo.utils.counters["graph_break"]) == 1


def test_the_norm_of_no_gradients():
    """Not that of the step before."""
    p = torch.nn.Parameter(torch.ones(4))
    optimiser, p.grad = AdamW([p], max_norm=1.0), torch.ones(4)
    optimiser.step()
    assert optimiser.norm == 2
    optimiser.zero_grad()
    optimiser.step()
    assert optimiser.norm is None
