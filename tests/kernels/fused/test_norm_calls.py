"""Norms with all that stands around them, forward and backward, against float64 and beside torch's autograd in the same dtype."""

import pytest
import torch
import torch.nn.functional as F

import onchip
from judge import assert_as_good_as_torch, poisoned
from onchip.core import philox
from onchip.core.device import gpu
from onchip.core.norms import Modulate, Residual, RowCodes, SiluGate
from onchip.core.problem import Dropout, Rows
from onchip.kernels.fused import NORM
from onchip.ops.norm import invertible_layer_norm, layer_norm, modulated_norm, rms_norm

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in NORM.kernels]
TRITON = pytest.param("triton_norm", marks=[pytest.mark.gpu, pytest.mark.large])
EPS = 1e-5
DROP = Dropout(0.3, 11, 5)
NORMED = {"rms": rms_norm, "layer": layer_norm}

FORMS = {  # name: (kind, shape of x, {tensor: its shape, or its own dtype and shape})
    "rms": ("rms", (5, 63), {"weight": (63,)}),
    "rms bias": ("rms", (7, 100), {"weight": (100,), "bias": (100,)}),
    "layer": ("layer", (5, 63), {"weight": (63,), "bias": (63,)}),
    "layer alone": ("layer", (1, 1000), {}),
    "heads": ("rms", (3, 2, 4, 24), {"weight": (4, 24)}),
    "heads bias": ("layer", (5, 3, 16), {"weight": (3, 16), "bias": (3, 16)}),
    "stream": ("layer", (6, 40), {"weight": (40,), "bias": (40,), "stream": (6, 40)}),
    "stream fp32": ("rms", (6, 40), {"weight": (40,), "stream": (FP32, 6, 40)}),
    "branch": ("rms", (3, 7, 40), {"weight": (40,), "stream": (3, 7, 40), "gate": (3, 40), "row_scale": (3, 7)}),
    "dropout": ("layer", (9, 40), {"weight": (40,), "stream": (FP32, 9, 40), "row_scale": (9,), "drop": None}),
    "sample": ("layer", (3, 11, 72), {"scale": (3, 72), "shift": (3, 72)}),
    "sample weight": ("rms", (2, 3, 5, 40), {"weight": (40,), "scale": (2, 40), "shift": (2, 40)}),
    "parts": ("layer", (2, 3, 640), {"weight": (640,), "scale": (2, 640), "shift": (2, 640)}),
    "token": ("layer", (2, 5, 40), {"scale": (2, 5, 40), "shift": (2, 5, 40)}),
    "zero": ("layer", (3, 5, 40), {"stream": (3, 5, 40), "gate": (3, 1, 40), "scale": (3, 1, 40), "shift": (3, 1, 40)}),
    "token gate": ("rms", (2, 3, 40), {"weight": (40,), "stream": (2, 3, 40), "gate": (2, 3, 40), "shift": (40,)}),
    "silu": ("rms", (5, 63), {"weight": (63,), "silu": (5, 63)}),
}
LARGE = {
    f"{kind} {rows}x{width}": (kind, (rows, width), {"weight": (width,)} | ({"bias": (width,), "stream": (rows, width)} if kind == "layer" else {}))
    for kind in ("rms", "layer")
    for rows, width in (
        (1, 7),
        (4096, 64),
        (3, 4096),
        (4096, 4096),
        (1001, 8192),
        (3, 65536),
        (5, 99991),
        (129, 131072),
        (1, 262144),
        (67, 262144),
        (3, 300007),
    )
} | {
    "DiT": ("layer", (4, 1024, 1152), {"stream": (4, 1024, 1152), "gate": (4, 1152), "scale": (4, 1152), "shift": (4, 1152)}),
    "Flux": ("layer", (2, 4608, 3072), {"scale": (2, 3072), "shift": (2, 3072)}),
    "heads": ("rms", (4096, 32, 128), {"weight": (32, 128)}),
}


def inputs(form, dtype, device):
    """x and the tensors of a form, which all want gradients; rows of x and of the stream are columns of wider ones that hold NaN."""
    _, shape, tensors = form
    made = {"x": shape, **tensors}
    out = {}
    for name, size in made.items():
        if size is None:
            continue
        own = size[0] if isinstance(size[0], torch.dtype) and dtype != FP64 else dtype
        size = size[1:] if isinstance(size[0], torch.dtype) else size
        t = torch.randn(size, device=device) * (0.3 if name in ("scale", "shift") else 1.0) + (name in ("weight", "x"))
        if name in ("x", "stream") and len(size) == 2:
            t = poisoned((size[0], size[1] + 16), own, device)[:, 16:].copy_(t)
        out[name] = t.to(own).requires_grad_()
    return out


def run(form, given, kernel):
    """(y, total) by onchip."""
    t = dict(given)
    x, weight, bias = t.pop("x"), t.pop("weight", None), t.pop("bias", None)
    residual = Residual(t["stream"], t.get("gate"), t.get("row_scale"), DROP if "drop" in form[2] else None) if "stream" in t else None
    after = SiluGate(t["silu"]) if "silu" in t else Modulate(t.get("scale"), t.get("shift")) if "scale" in t or "shift" in t else None
    if form[0] == "rms":
        out = rms_norm(x, weight, eps=EPS, bias=bias, residual=residual, after=after, kernel=kernel)
    else:
        out = layer_norm(x, weight, bias, eps=EPS, residual=residual, after=after, kernel=kernel)
    return out if isinstance(out, tuple) else (out,)


def per_row(t, x):
    """A parameter of samples beside x."""
    return t.view(t.shape[0], *(1,) * (x.ndim - 2), t.shape[-1]) if t.ndim > 1 and t.shape != x.shape else t


def textbook(form, given):
    """(y, total) as torch's users write it, in the tensors' dtype."""
    kind, shape, tensors = form
    z, t = given["x"], given
    if "stream" in t:
        if "drop" in tensors:
            kept = philox.kept_rows(DROP.p, philox.draw(z.device, DROP.seed, DROP.offset), z.numel() // shape[-1], shape[-1]).view(shape)
            z = torch.where(kept, z / (1 - DROP.p), 0)
        z = z * per_row(t["gate"], z) if "gate" in t else z
        z = z * t["row_scale"].unsqueeze(-1) if "row_scale" in t else z
        z = (t["stream"] + z).to(t["stream"].dtype)
    total, dtype = z, given["x"].dtype
    y = F.rms_norm(z, shape[-1:], None, EPS) if kind == "rms" else F.layer_norm(z, shape[-1:], None, None, EPS)
    y = y * t["weight"] if "weight" in t else y
    y = y + t["bias"] if "bias" in t else y
    y = y * (1 + per_row(t["scale"], y)) if "scale" in t else y
    y = y + per_row(t["shift"], y) if "shift" in t else y
    y = y * F.silu(t["silu"]) if "silu" in t else y
    return (y.to(dtype), total) if "stream" in t else (y.to(dtype),)


def gradients(results, given, outer):
    return torch.autograd.grad(results, list(given.values()), outer)


def check(form, dtype, kernel, device):
    given = inputs(form, dtype, device)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    with onchip.record() as decisions:
        ours = run(form, given, kernel)
    low, truth = textbook(form, given), textbook(form, exact)
    outer = [torch.randn(t.shape, device=device).to(t.dtype) for t in ours]
    with onchip.record() as backwards:
        found = gradients(ours, given, outer)
    assert [d.problem.op for d in (*decisions, *backwards)] == ["norm", "norm_backward"]
    for result, beside, right in zip(ours, low, truth, strict=True):
        assert result.shape == right.shape and result.dtype == beside.dtype
        assert_as_good_as_torch(result.detach(), beside.detach(), right.detach())
    beside = gradients(low, given, outer)
    right = gradients(truth, exact, [t.double() for t in outer])
    for name, a, b, c in zip(given, found, beside, right, strict=True):
        assert a.shape == given[name].shape and a.dtype == given[name].dtype, name
        assert_as_good_as_torch(a, b, c, 3.0)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("form", "dtype"), [(form, dtype) for n, form in enumerate(FORMS) for dtype in ((BF16, FP16, FP32)[n % 3], *([BF16] * (form == "layer")))], ids=str
)
def test_against_float64(form, dtype, kernel, device):
    check(FORMS[form], dtype, kernel, device)


@pytest.fixture
def narrow(monkeypatch):
    """Rows of more than 256 columns are several programs'."""
    norm, norm_backward = pytest.importorskip("onchip.kernels.fused.norm"), pytest.importorskip("onchip.kernels.fused.norm_backward")
    for module in (norm, norm_backward):
        monkeypatch.setattr(module, "WIDEST", 256)
        monkeypatch.setattr(module, "PIECE", 256)


WIDE = {
    "sample": ("rms", (2, 1, 701), {"stream": (2, 1, 701), "gate": (2, 1, 701), "row_scale": (2, 1), "scale": (2, 701)}),
    "layer": ("layer", (5, 1000), {"weight": (1000,), "bias": (1000,), "stream": (FP32, 5, 1000)}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", WIDE)
def test_rows_of_several_programs(form, narrow, device):
    check(WIDE[form], FP32, "triton_norm", device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", LARGE)
def test_large(form, dtype, kernel, device):
    check(LARGE[form], dtype, kernel, device)


@pytest.mark.parametrize("form", ["rms", "branch", "zero", "silu", "dropout"])
def test_the_reference_has_the_right_derivatives(form, device):
    """In float64, against differences."""
    given = inputs(FORMS[form], FP64, device)
    given = {name: t.detach().double()[..., :9].contiguous() if name != "row_scale" else t.detach().double() for name, t in given.items()}
    names, form = list(given), (FORMS[form][0], (*FORMS[form][1][:-1], 9), FORMS[form][2])
    torch.autograd.gradcheck(
        lambda *ts: run(form, dict(zip(names, ts, strict=True)), "reference"), [t.requires_grad_() for t in given.values()], fast_mode=True
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [40, 600])
def test_invertible(width, kernel, narrow, device):
    """The input is not kept; gradients are as good as those of a norm whose input was."""
    form = ("layer", (2, width), {"weight": (width,), "bias": (width,)})
    given = inputs(form, FP32, device)
    with torch.no_grad():
        given["weight"].clamp_(min=0.5)  # y / weight gives back the digits that it has
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    y = invertible_layer_norm(*given.values(), eps=EPS, kernel=kernel)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert any(t.data_ptr() == y.data_ptr() for t in saved) and not any(t.data_ptr() == given["x"].data_ptr() for t in saved)
    outer = torch.randn(y.shape, device=device)
    right = gradients(textbook(form, exact), exact, [outer.double()])
    for ours, low, truth in zip(gradients((y,), given, [outer]), gradients(textbook(form, given), given, [outer]), right, strict=True):
        assert_as_good_as_torch(ours, low, truth, 8.0)  # one more rounding, of y, at a weight of 0.5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("bias", [False, True], ids=["rms", "layer"])
def test_codes(bias, dtype, format, kernel, device):
    """Of a norm that is linear the factor of the codes is found beside the sum of squares, of LayerNorm behind it."""
    x = torch.randn(6, 300, device=device).to(dtype)
    x[2] = 0
    weight = torch.randn(300, device=device).to(dtype)
    call = (lambda x, w, **more: layer_norm(x, w, 0 * w, **more)) if bias else rms_norm
    (codes, scale), total = call(x, weight, residual=x, after=RowCodes(format), kernel=kernel)
    truth = call(2 * x.double(), weight.double(), kernel="reference")
    largest = truth.abs().amax(-1, keepdim=True)
    assert torch.equal(total, x + x) and scale.shape == (6,) and scale.dtype == FP32 and scale[2] == 0
    assert codes.dtype == {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}[format]
    step = {"int8": 0.5 / 127 * largest, "e4m3": torch.maximum(truth.abs() / 16, largest / 448 * 2**-10)}[format]
    assert ((codes.double() * scale.double().unsqueeze(1) - truth).abs() <= step * 1.001 + (1e-6 if bias else 1e-7) * largest).all()
    assert (codes.double().abs().amax(-1)[[0, 1, 3]] == {"int8": 127, "e4m3": 448}[format]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_place(kernel, device):
    x, stream, weight = torch.randn(5, 40, device=device), torch.randn(5, 40, device=device), torch.randn(40, device=device)
    expected = rms_norm(x, weight, residual=stream, kernel=kernel)
    y, total = rms_norm(x, weight, residual=Residual(stream, in_place=True), kernel=kernel)
    assert total.data_ptr() == stream.data_ptr() and torch.equal(total, expected[1]) and torch.equal(stream, total)
    torch.testing.assert_close(y, expected[0], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="in_place=True would overwrite"):
        rms_norm(x.requires_grad_(), weight, residual=Residual(stream, in_place=True), kernel=kernel)


def test_in_place_of_part_of_a_stream(device):
    """Whose rows lie apart; a compiled graph refuses the same."""
    x, whole = torch.randn(2, 3, 40, device=device), torch.randn(2, 3, 80, device=device)
    expected = whole[..., :40] + x
    rms_norm(x, None, residual=Residual(whole[..., :40], in_place=True))
    assert torch.equal(whole[..., :40], expected)
    turned = torch.randn(3, 2, 40, device=device).transpose(0, 1)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="whose rows are contiguous"):
        torch.compile(lambda x, turned: rms_norm(x, None, residual=Residual(turned, in_place=True)), fullgraph=True, backend="eager")(x, turned)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_over_no_rows(kernel, device):
    """Of samples."""
    x, scale = (torch.randn(size, device=device, requires_grad=True) for size in ((2, 0, 8), (2, 8)))
    for residual in (None, Residual(x.detach(), dropout=DROP)):
        y = modulated_norm(x, scale, None, residual=residual, kernel=kernel)
        d_x, d_scale = torch.autograd.grad(y if residual is None else y[0], (x, scale), torch.ones_like(x))
        assert d_x.shape == x.shape and torch.equal(d_scale, torch.zeros_like(scale))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["layer"])
def test_the_same_bits_again(form, kernel, device):
    first, second = ((torch.manual_seed(3), check(FORMS[form], BF16, kernel, device))[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_what_is_wanted(kernel, device):
    """Gradients of one tensor alone, of no rows, and through the sum alone."""
    weight = torch.randn(40, device=device, requires_grad=True)
    x, stream = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device, requires_grad=True)
    (alone,) = torch.autograd.grad(rms_norm(x, weight, kernel=kernel).sum(), weight)
    torch.testing.assert_close(alone, F.rms_norm(x, (40,), None, 1e-6).sum(0))
    (none,) = torch.autograd.grad(rms_norm(x[:0], weight, kernel=kernel).sum(), weight)
    assert none.eq(0).all()
    (through,) = torch.autograd.grad(rms_norm(x, weight.detach(), residual=stream, kernel=kernel)[1].sum(), stream)
    torch.testing.assert_close(through, torch.ones_like(through))


def test_dropout_without_a_seed_is_torchs_generator(device):
    x, weight = torch.ones(64, 64, device=device), torch.ones(64, device=device)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(rms_norm(x, weight, residual=Residual(torch.zeros_like(x), dropout=Dropout(0.25)), kernel="reference")[1])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert 0.2 < draws[0].eq(0).float().mean() < 0.3 and draws[0][draws[0] != 0].eq(4 / 3).all()


def compiled_call(x, stream, weight, scale, gate):
    y, total = modulated_norm(x, scale, scale, weight=weight, residual=Residual(stream, gate, dropout=DROP), kernel="reference")
    return y, total, rms_norm(x, weight), layer_norm(x, weight, after=SiluGate(x)), invertible_layer_norm(x, weight, weight)


def test_in_a_compiled_graph():
    """One graph, forward and backward, with the results and gradients of the eager call; and without gradients, with codes."""
    torch._dynamo.reset()
    make = {"x": (2, 5, 16), "stream": (2, 5, 16), "weight": (16,), "scale": (2, 16), "gate": (2, 16)}
    given = {name: (torch.randn(shape) + 1.5).requires_grad_() for name, shape in make.items()}
    compiled = torch.compile(compiled_call, fullgraph=True, backend="aot_eager")
    ours, eager = compiled(*given.values()), compiled_call(*given.values())
    outer = [torch.randn(t.shape) for t in eager]
    for a, b in zip((*ours, *gradients(ours, given, outer)), (*eager, *gradients(eager, given, outer)), strict=True):
        torch.testing.assert_close(a, b)

    def infer(x, stream, weight):
        half = rms_norm(x.bfloat16(), weight, residual=stream)
        (codes, scale), total = rms_norm(x, weight, residual=Residual(stream, in_place=True), after=RowCodes("int8"))
        return codes, scale, total, stream + 0, *half

    with torch.no_grad():
        x, stream, weight = (given[name].detach() for name in ("x", "stream", "weight"))
        for a, b in zip(torch.compile(infer, fullgraph=True, backend="aot_eager")(x, stream.clone(), weight), infer(x, stream.clone(), weight), strict=True):
            torch.testing.assert_close(a, b)


X = torch.zeros(2, 3, 8)
TURNED = torch.zeros(3, 2, 8).transpose(0, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer_norm(X, torch.ones(4)), r"weight is \[4\], x has width 8; give \[8\], or \[3, 8\] for weights of each head"),
        (lambda: layer_norm(X[..., :0]), "give \\[..., width\\] with a width of 1 or more"),
        (lambda: layer_norm(X, torch.ones(8), torch.ones(3, 8)), "they must be equal"),
        (lambda: layer_norm(X, residual=Residual(TURNED, in_place=True)), "in_place=True needs a residual whose rows are contiguous"),
        (lambda: layer_norm(X, residual=Residual(X[:1].expand(2, 3, 8), in_place=True)), "each in a place of its own"),
        (lambda: layer_norm(X, residual=X[:1]), "they must be equal \\(a residual may be float32\\)"),
        (lambda: layer_norm(X, residual=Residual(X, row_scale=torch.ones(2))), r"row_scale is \[2\]; x is \[2, 3, 8\]: give \[2, 3\]"),
        (lambda: layer_norm(X, residual=Residual(X, dropout=Dropout(1.0))), "dropout 1.0 is not a probability below 1; give 0 <= p < 1"),
        (lambda: layer_norm(X, residual=Residual(X, dropout=Dropout(0.5, -1))), "the seed is -1, the offset 0; give a seed of 63 bits or None"),
        (lambda: modulated_norm(X, None, None), "neither scale nor shift"),
        (lambda: modulated_norm(X, torch.ones(3, 8), None), r"scale is \[3, 8\], x is \[2, 3, 8\]; give \[8\], \[2, 8\] for each sample"),
        (lambda: modulated_norm(X, torch.ones(2, 8), X), "give both a row for each sample, or for each row"),
        (lambda: modulated_norm(X, X, X, norm="batch"), "norm='batch' is not one of layer, rms"),
        (lambda: layer_norm(X, torch.ones(3, 8), after=Modulate(torch.ones(2, 8))), "give heads or samples"),
        (lambda: layer_norm(X, after=RowCodes("int3")), r"RowCodes\('int3'\) is not one of e4m3, int8"),
        (lambda: layer_norm(X, after="silu"), "is not one of Modulate, SiluGate, RowCodes"),
        (
            lambda: invertible_layer_norm(X, torch.ones(8), None),
            r"weight and bias are \[8\] and None, x is \[2, 3, 8\]; give \[..., width\], and \[width\] both",
        ),
    ],
)
def test_what_does_not_fit_is_said(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_codes_have_no_gradient():
    with pytest.raises(NotImplementedError, match="codes have no gradient"):
        layer_norm(torch.zeros(2, 8, requires_grad=True), after=RowCodes("int8"))


def test_sums_of_more_items_than_a_grid_is_high(monkeypatch):
    pytest.importorskip("triton")
    from onchip.kernels.fused import norm_backward

    grids = []
    monkeypatch.setattr(norm_backward, "sum_partials", type("Grids", (), {"__getitem__": lambda _, grid: grids.append(grid) or (lambda *_, **__: None)})())
    norm_backward.add_up(torch.zeros(1 << 16, 1, 65), torch.zeros(1 << 16, 65))
    assert grids == [(5 << 16,)]


def near(found, expected, size=1):
    """As close as float32 sums in another order, and one rounding; of terms that are about as large as `size`."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=16 * eps, atol=16 * eps * size)


@pytest.mark.gpu
def test_modulated_rows_of_one_program(device):
    """Several rows of a set, with columns in parts and a last program that the set does not fill: as by one row a program."""
    from onchip.kernels.fused.norm import Norm, Tiles, configs, launch_norm

    problem = Rows("norm", 14, 700, FP32, "layer scale shift")
    rows = [configs(problem._replace(rows=1 << 14, width=width, dtype=BF16), gpu("H200"))[0].rows for width in (1152, 1536, 3072, 5120)]
    assert rows == [4, 2, 2, 1]
    x, scale, shift = torch.randn(14, 700, device=device), torch.randn(2, 700, device=device), torch.randn(2, 700, device=device)
    norm = Norm("layer", EPS, scale=scale, shift=shift, sets=2, span=7, keep=True)
    one, several = (launch_norm(problem, Tiles(*tiles), x, norm) for tiles in ((1, 3, 256, 1), (4, 3, 256, 4)))
    for found, expected in ((several.y, one.y), (several.mean, one.mean), (several.rstd, one.rstd)):
        near(found, expected, 4)
    near(one.y, F.layer_norm(x, (700,), eps=EPS) * (1 + scale.repeat_interleave(7, 0)) + shift.repeat_interleave(7, 0), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_of_several_programs(kind, dtype, device):
    """A cluster's, and pieces of two launches, the second of which reads what the first has written over the stream: as of one program. So are gradients, by
    clusters that stay for further rows.
    """
    from onchip.kernels.fused import norm_backward
    from onchip.kernels.fused.norm import Norm, Tiles, configs, launch_norm

    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need sm_90")
    problem = Rows("norm", 3, 1008, FP32, kind)
    wide = [configs(problem._replace(width=1 << n, dtype=BF16), gpu("H200"))[0].ctas for n in (13, 14, 15, 16, 18, 19)]
    assert wide == [1, 1, 4, 8, 16, 1]
    assert configs(problem._replace(width=1 << 16), gpu("A100"))[0].ctas == 1
    x, stream, dy, d_total = (torch.randn(7, 1008, device=device).to(dtype) for _ in range(4))
    problem = Rows("norm", 7, 1008, dtype, kind)
    words = {"weight": torch.linspace(-1, 1, 1008, device=device)[None].to(dtype), "row_scale": torch.randn(7, device=device), "keep": True, "in_place": True}
    found = []
    for tiles in (
        Tiles(1, 1, 1024, 4),
        Tiles(1, 1, 256, 4, 4),
        Tiles(1, 2, 128, 4, 4, registers=64),
        Tiles(1, 2, 512, 4, registers=64),
        Tiles(1, 1, 256, 4),
    ):
        found.append(launch_norm(problem, tiles, x + 9, Norm(kind, EPS, residual=stream.clone(), **words)))
    for whole, *others in zip(*found, strict=True):
        for other in others if whole is not None else ():
            near(other, whole)
    wanted, normed, found = ("x", "residual", "row_scale", "weight"), found[0], []
    problem = Rows("norm_backward", 7, 1008, dtype, f"{kind} -> {' '.join(wanted)}")
    parts = [(1, 2, 128, 4, 3, 2, 0, 4, 128)] if dtype == BF16 else []  # float32 gets a second layout, which Triton 3.6 cannot lower; no menu has it
    for tiles in ((1, 1, 1024, 4, 3, 3), (1, 1, 256, 4, 2, 3, 0, 4), *parts):
        found.append(
            norm_backward.launch(
                problem, norm_backward.Tiles(*tiles), wanted, dy, d_total, normed.total, x + 9, normed, Norm(kind, EPS, residual=stream, **words)
            )
        )
    for name in wanted:
        whole, *others = (getattr(grads, name) for grads in found)
        for other in others:
            near(other, whole, 200 if name == "row_scale" else 4)  # a sum of 1,008 products of up to 50


@pytest.mark.gpu
def test_codes_by_arithmetic(device, monkeypatch):
    """As a GPU has them that does not convert to e4m3, and of numbers near float32's ends: the same codes."""
    from dataclasses import replace

    from onchip.kernels.fused import norm

    x, weight = torch.randn(4, 300, device=device), torch.randn(300, device=device)
    x[1, :9] = 2.0 ** -torch.arange(1, 10, device=device)
    codes, scale = rms_norm(x, weight, after=RowCodes("e4m3"), kernel="triton_norm")
    for power in (2.0**-100, 2.0**100):
        again, step = rms_norm(x, weight * power, after=RowCodes("e4m3"), kernel="triton_norm")
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(step, scale * power)
    facts = replace(norm.of(device), arch=80)
    monkeypatch.setattr(norm, "of", lambda _: facts)
    again, _ = rms_norm(x, weight, after=RowCodes("e4m3"), kernel="triton_norm")
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 33])  # 33: a program for each fourth multiprocessor of an H200, the most that start early
@pytest.mark.parametrize("form", ["rms", "stream"])
def test_few_rows_start_early(rows, form, device, monkeypatch):
    """Norms of few rows, each of what the one before and an addition between them wrote, captured or not: the bits of norms that start in turn."""
    from onchip.kernels.fused import norm

    x, weights = torch.randn(rows, 4096, dtype=BF16, device=device), torch.rand(40, 4096, dtype=BF16, device=device) + 0.5
    stream = torch.empty_like(x)

    def chain():
        y = x + 0
        stream.copy_(x)
        for n, weight in enumerate(weights):
            y = rms_norm(y, weight, kernel="triton_norm") if form == "rms" else rms_norm(y, weight, residual=stream, kernel="triton_norm")[0]
            if n % 3 == 0:
                stream.add_(y)
        return y, stream.clone()

    found = []
    for early in (norm.starts_early, lambda x: False):
        monkeypatch.setattr(norm, "starts_early", early)
        found += [chain()]
        if x.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = chain()
            for _ in range(20):
                graph.replay()
                found += [tuple(t.clone() for t in captured)]
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[-1], strict=True))
