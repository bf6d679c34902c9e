"""Rotary embedding in place, with QK-norm and the cache write, against float64; and what must not be touched, to the bit."""

import pytest
import torch
import torch.nn.functional as F

from judge import assert_as_good_as_torch, poisoned
from onchip.core.device import gpu
from onchip.core.formats import FORMATS, Codes, Format, encode, fit
from onchip.core.problem import Rope
from onchip.kernels.fused import ROPE_APPEND
from onchip.ops.fused import Append, QKNorm, rope_append

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [pytest.param(kernel.name, marks=pytest.mark.gpu if kernel.needs_triton else ()) for kernel in ROPE_APPEND.kernels]
TRITON = pytest.param("triton_rope", marks=[pytest.mark.gpu, pytest.mark.large])
EPS = 1e-6
POSITIONS = 61
PAGE = 4
LAST = 8192  # tokens that are compared with float64, in which all would fill a GPU

SHAPES = (  # tokens, heads, kv_heads, dim, rotary_dim, dtype
    (1, 9, 3, 64, 64, BF16),
    (5, 9, 3, 64, 64, FP32),
    (2, 32, 8, 128, 128, BF16),  # three programs a token
    (3, 3, 1, 96, 32, FP32),  # the rest is twice the rotated part, and no power of two
    (2, 2, 2, 80, 80, FP16),
    (3, 2, 1, 63, 20, FP32),
    (2, 1, 1, 2, 2, FP32),
    (1, 5, 1, 256, 64, FP16),
    (1, 2, 1, 512, 512, FP32),
)
PROBLEMS = [
    Rope("rope_append", *shape, layout, norm, append)
    for shape in SHAPES
    for layout in ("neox", "interleaved")
    for norm, append in ((False, False), (True, True), (False, True), (True, False))
]
WHOLE = Rope("rope_append", 17, 20, 3, 128, 128, BF16, "neox", False, True)  # tokens enough, in the interpreter, for a whole one a program: two tiles
PROBLEMS += [WHOLE, WHOLE._replace(append=False)]
LARGE = [
    Rope("rope_append", tokens, 32, 8, 128, rotary, dtype, layout, True, True)
    for tokens, rotary in ((4097, 128), (4097, 64), (400000, 128))
    for dtype, layout in ((BF16, "neox"), (FP32, "interleaved"))
    if tokens * dtype.itemsize < 1 << 20
]
LARGE.append(WHOLE._replace(tokens=4097, heads=32, kv_heads=8))


def inputs(p, device):
    """The arguments of rope_append. qkv is columns of a wider matrix, the pages one layer of a pool; all around is NaN."""
    packed = (p.heads + 2 * p.kv_heads) * p.dim
    qkv = poisoned((p.tokens, packed + 16), p.dtype, device)[:, 16:].copy_(torch.randn(p.tokens, packed, device=device))
    table = torch.rand(POSITIONS, p.rotary_dim // 2, device=device) * 6.28
    table = torch.cat((table.cos(), table.sin()), -1)
    positions = torch.randint(POSITIONS, (p.tokens,), device=device)
    offset = 1.0 if p.layout == "neox" else 0.0  # Gemma's layout
    norm = QKNorm(*(torch.randn(2, p.dim, device=device).to(p.dtype)), EPS, offset) if p.norm else None
    append = None
    if p.append:
        pages = (p.tokens + 7) // PAGE + 1
        slots = torch.randperm(pages * PAGE, device=device)[: p.tokens]
        slots[1::3] = -1
        append = Append(*(poisoned((3, pages, PAGE, p.kv_heads, p.dim), p.dtype, device)[1] for _ in range(2)), slots)
    return qkv, table, positions, norm, append


def textbook(p, qkv, table, positions, norm):
    """Queries and keys [tokens, heads + kv_heads, dim], every step in qkv's dtype."""
    x = qkv.unflatten(-1, (-1, p.dim))[:, : p.heads + p.kv_heads]
    if norm is not None:
        q, k = x.split((p.heads, p.kv_heads), 1)
        x = torch.cat((head_norm(q, norm.q, norm), head_norm(k, norm.k, norm)), 1)
    turned, rest = x.split((p.rotary_dim, p.dim - p.rotary_dim), -1)
    cos, sin = table[positions].to(qkv.dtype).unsqueeze(1).chunk(2, -1)
    if p.layout == "neox":
        a, b = turned.chunk(2, -1)
        turned = turned * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)
    else:
        swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        turned = turned * cos.repeat_interleave(2, -1) + swapped * sin.repeat_interleave(2, -1)
    return torch.cat((turned, rest), -1)


def head_norm(x, weight, norm):
    if norm.offset:  # as Gemma has it
        wide = torch.promote_types(x.dtype, FP32)
        return (F.rms_norm(x.to(wide), weight.shape, None, norm.eps) * (norm.offset + weight.to(wide))).type_as(x)
    return F.rms_norm(x, weight.shape, weight, norm.eps)


def page_strides(pool, order):
    """A pool [pages, page, kv_heads, columns], whose memory has the heads of a page before its tokens where `order` is "HND"."""
    return pool if order == "NHD" else torch.empty_like(pool.transpose(1, 2), memory_format=torch.contiguous_format).copy_(pool.transpose(1, 2)).transpose(1, 2)


def quantised(p, order, channel, device):
    """Codes of NaN for keys and values, with pages of PAGE + 1 tokens: no power of two. "NHD": as `PagePool` has them; "HND": three tensors."""
    form, page, pages = Format.of(p.kv), PAGE + 1, (p.tokens + 7) // PAGE + 1
    sizes = (page, p.kv_heads, p.dim)
    storage = [torch.full((pages, form.page_bytes(*sizes)), 0xFF, dtype=torch.uint8, device=device) for _ in range(2)]
    channel = torch.rand(p.kv_heads, p.dim, device=device) + 0.5 if channel else None
    k, v = Codes.over(storage[0], form, sizes, channel), Codes.over(storage[1], form, sizes)
    if order == "HND":
        k, v = (t._replace(**{f: page_strides(getattr(t, f), order) for f in ("codes", "scale", "zero") if getattr(t, f) is not None}) for t in (k, v))
    slots = torch.randperm(pages * page, device=device)[: p.tokens]
    slots[1::3] = -1
    return Append(k, v, slots)


def double(norm):
    return None if norm is None else norm._replace(q=norm.q.double(), k=norm.k.double())


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def base(x):
    return x if x._base is None else x._base


def check(p, kernel, device):
    qkv, table, positions, norm, append = inputs(p, device)
    before, exact = base(qkv).clone(), qkv[-LAST:].double()
    low = textbook(p, qkv[-LAST:], table, positions[-LAST:], norm)
    q, k, v = rope_append(qkv, table, positions, (p.heads, p.kv_heads), layout=p.layout, norm=norm, append=append, kernel=kernel)
    truth = rope_append(exact, table, positions[-LAST:], (p.heads, p.kv_heads), layout=p.layout, norm=double(norm), kernel="reference")

    assert q.data_ptr() == qkv.data_ptr() and q.shape == (p.tokens, p.heads, p.dim) and k.shape == v.shape == (p.tokens, p.kv_heads, p.dim)
    for ours, torchs, right in zip((q, k), low.split((p.heads, p.kv_heads), 1), truth, strict=False):
        assert_as_good_as_torch(ours[-LAST:], torchs, right)
    turned = (p.heads + p.kv_heads) * p.dim
    assert torch.equal(bits(base(qkv)[:, :16]), bits(before[:, :16])), "wrote before the rows of qkv"
    assert torch.equal(bits(v.flatten(1)), bits(before[:, 16 + turned :])), "the values changed"
    if not p.norm:
        heads = before[:, 16 : 16 + turned].unflatten(-1, (-1, p.dim))
        assert torch.equal(bits(torch.cat((q, k), 1)[..., p.rotary_dim :]), bits(heads[..., p.rotary_dim :])), "changed what lies past rotary_dim"
    if append is not None:
        check_cache(append, k, v)


def check_cache(append, k, v):
    """Every slot given holds its key and value, and the rest of the pool the NaN it held before."""
    kept = append.slots >= 0
    for pages, new in ((append.k, k), (append.v, v)):
        pool = torch.full_like(base(pages), torch.nan)
        pool[1].flatten(0, 1)[append.slots[kept]] = new[kept]
        assert torch.equal(bits(base(pages)), bits(pool))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(problem, kernel, device):
    check(problem, kernel, device)


@pytest.mark.parametrize("kernel", [TRITON])
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem, kernel, device):
    check(problem, kernel, device)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.dtype == FP32 and not p.append], ids=str)
def test_oracle_is_the_formula(problem, device):
    qkv, table, positions, norm, _ = inputs(problem, device)
    qkv, norm = qkv.double(), double(norm)
    expected = textbook(problem, qkv, table, positions, norm)
    q, k, _ = rope_append(qkv, table, positions, (problem.heads, problem.kv_heads), layout=problem.layout, norm=norm, kernel="reference")
    torch.testing.assert_close(torch.cat((q, k), 1), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("first", "more"), [(0, 0), (1, 0), (0, 1)])
def test_neighbours_that_are_no_complex_numbers(first, more):
    """Rows that begin at odd places are turned by copies: the same bits."""
    table, positions = torch.rand(POSITIONS, 64), torch.tensor([3, 60, 7])
    alike, odd = (torch.zeros(first + 3 * (320 + more))[first:].view(3, 320 + more)[:, :320] for first, more in ((0, 0), (first, more)))
    alike.copy_(torch.randn(3, 320))
    odd.copy_(alike)
    found, expected = (rope_append(x, table, positions, (3, 1), layout="interleaved", kernel="reference")[:2] for x in (odd, alike))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_written_when_every_slot_is_skipped(kernel, device):
    p = Rope("rope_append", 4, 2, 1, 32, 32, FP32, "neox", False, True)
    qkv, table, positions, norm, append = inputs(p, device)
    append.slots.fill_(-1)
    rope_append(qkv, table, positions, (2, 1), norm=norm, append=append, kernel=kernel)
    assert base(append.k).isnan().all() and base(append.v).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["", "int8"])
def test_slots_that_the_pages_do_not_have(kv, device):
    """Of a GPU, where nobody looks: nothing is written, and nothing beside the pages, which are the middle of a pool."""
    rope = pytest.importorskip("onchip.kernels.fused.rope")
    p = Rope("rope_append", 6, 2, 1, 32, 32, BF16, "neox", False, True, kv)
    qkv, table, positions, _, append = inputs(p._replace(kv=""), device)
    append = quantised(p, "NHD", False, device) if kv else append
    last = append.k.shape[0] * append.k.shape[1]
    append = append._replace(slots=torch.tensor([last - 1, last, last + 7, 1 << 32, -2, -(1 << 32)], device=device))
    rope.launch(p, rope.Tiles(4, 1), qkv, table, positions, None, append)
    _, k, v = qkv.view(6, 4, 32).split((2, 1, 1), 1)
    (check_codes if kv else check_cache)(append._replace(slots=append.slots.where(append.slots < last, -1)), k, v)


def test_more_slots_than_the_kernel_counts():
    rope = pytest.importorskip("onchip.kernels.fused.rope")
    append = Append(*(torch.zeros(1, 16, 1, 32).expand(1 << 27, -1, -1, -1),) * 2, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"append.k has 134217728 pages of 16 slots; give fewer than 2\^31"):
        rope.Target.of(append)
    assert rope.Target.of(append._replace(k=append.k[1:], v=append.v[1:])).num_slots == (1 << 31) - 16


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_table_positions_and_slots(kernel, device):
    p = Rope("rope_append", 5, 2, 1, 32, 16, FP32, "neox", False, True)
    qkv, table, positions, norm, append = inputs(p, device)
    again = qkv.clone()
    pages = Append(*(torch.full_like(pages, torch.nan) for pages in append[:2]), append.slots.repeat_interleave(2)[::2])
    rope_append(qkv, table, positions, (2, 1), norm=norm, append=append, kernel=kernel)
    rope_append(again, table.T.contiguous().T, positions.repeat_interleave(2)[::2], (2, 1), norm=norm, append=pages, kernel=kernel)
    assert torch.equal(qkv, again) and torch.equal(bits(append.k), bits(pages.k)) and torch.equal(bits(append.v), bits(pages.v))


@pytest.mark.gpu
def test_positions_that_are_no_rows(device):
    """Of a GPU, where nobody looks: NaN, and what is not rotated stays."""
    qkv, table, positions = torch.ones(3, 32, device=device), torch.ones(9, 4, device=device), torch.tensor([-1, 9, 2], device=device)
    rope = pytest.importorskip("onchip.kernels.fused.rope")
    rope.launch(Rope("rope_append", 3, 2, 1, 8, 4, FP32, "neox", False, False), rope.Tiles(4, 1), qkv, table, positions, None, None)
    heads = qkv.view(3, 4, 8)  # two of queries, one of keys, one of values
    assert heads[:2, :3, :4].isnan().all() and heads[2].isfinite().all() and heads[:, :3, 4:].eq(1).all() and heads[:, 3].eq(1).all()


@pytest.mark.gpu
def test_triton_refuses_what_it_cannot_rotate_in_place(device):
    p = Rope("rope_append", 2, 2, 1, 32, 32, FP32, "neox", False, True)
    qkv, table, positions, _, append = inputs(p, device)
    apart = torch.zeros(2, 256, device=device)[:, ::2]
    with pytest.raises(ValueError, match="rotated in place"):
        rope_append(apart, table, positions, (2, 1), kernel="triton_rope")
    wider = torch.zeros(*append.v.shape[:-1], 64, device=device)[..., :32]
    with pytest.raises(ValueError, match="must be equal"):
        rope_append(qkv, table, positions, (2, 1), append=append._replace(v=wider), kernel="triton_rope")


def test_wrong_arguments(device):
    qkv, table, positions = torch.zeros(2, 128, device=device), torch.zeros(4, 32, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for arguments, message in (
        ((qkv, table, positions, (3, 1)), "not a multiple"),
        ((qkv, table[:, :31], positions, (2, 1)), "even number"),
        ((qkv, torch.zeros(4, 64, device=device), positions, (2, 1)), "at most 32"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_append(*arguments)
    with pytest.raises(ValueError, match="gptj"):
        rope_append(qkv, table, positions, (2, 1), layout="gptj")
    for norm, message in ((QKNorm(table[0], None, 1e-6), "norm.q is a Tensor, norm.k a NoneType"), (5, "norm is a int")):
        with pytest.raises(TypeError, match=message):
            rope_append(qkv, table, positions, (2, 1), norm=norm)


# ---- quantised caches

SIZES = (  # tokens, heads, kv_heads, dim, rotary_dim, dtype
    (5, 3, 2, 64, 64, BF16),
    (4, 2, 1, 128, 128, FP32),
    (3, 2, 2, 128, 64, FP16),  # the rest is not rotated: halves are not pairs
    (3, 3, 1, 192, 192, BF16),  # no power of two
    (2, 1, 1, 80, 80, FP32),
    (3, 2, 1, 63, 20, FP32),
)
QUANTISED = [
    Rope("rope_append", *size, layout, norm, True, kv)
    for size in SIZES
    for kv in fit(size[3])
    for layout, norm in (("neox", True), ("interleaved", False))
    if not ("/64" in kv and size[3] == 192) and (size[3] == 64 or layout == "neox" or "/32" in kv)
]  # fmt: skip
QUANTISED += [WHOLE._replace(kv=kv) for kv in ("int4", "e4m3")]


def distance(form, codes, scale, zero, x):
    """Of what codes [tokens, heads, columns], as bytes, stand for from x, in float64."""
    return (Codes(codes if form.has_zero else codes.view(form.dtype), scale, zero, form).dequantised(torch.float64) - x).abs()


def check_codes(append, k, v):
    """Every slot given holds the codes of its key and value as they came back, and the rest of the pages the bytes it held before."""
    kept = append.slots >= 0
    for cache, new in ((append.k, k), (append.v, v)):
        page = cache.shape[1]
        at = append.slots[kept] // page, append.slots[kept] % page
        ours = [t[at] if t.dtype.itemsize > 1 else t.view(torch.uint8)[at] for t in cache.tensors]
        codes, *scales = encode(new[kept], cache.format, cache.channel)
        for scale, oracle in zip(ours[1:], scales, strict=False):
            assert torch.equal(bits(scale), bits(oracle))
        x = new[kept].double() if cache.channel is None else new[kept].double() / cache.channel.double()
        far, allowed = (distance(cache.format, t, *scales, x) for t in (ours[0], codes))
        # (x - zero) * inverse + 2^23 is rounded once on a GPU, twice in the oracle: near a tie either code will do, if it is as near to x as float32 can say
        assert (far <= allowed + 2.0**-21 * (x.abs() + x.abs().amax(-1, keepdim=True) * cache.format.has_zero)).all()
        assert (ours[0] != codes.view(torch.uint8)).float().mean() <= 0.01, "ties are rare"
        for t in cache.tensors:
            rest = t.view(torch.uint8).clone()
            rest[at] = 0xFF
            assert (rest == 0xFF).all(), "wrote to slots that were not given"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", QUANTISED, ids=str)
def test_quantised(problem, kernel, device):
    p, order, channel = problem, *(("NHD", False) if problem.layout == "interleaved" else ("HND", True) if problem.heads == 3 else ("NHD", True))
    qkv, table, positions, norm, _ = inputs(p._replace(append=False), device)
    append = quantised(p, order, channel, device)
    again = qkv.clone()
    q, k, v = rope_append(qkv, table, positions, (p.heads, p.kv_heads), layout=p.layout, norm=norm, append=append, kernel=kernel)
    check_codes(append, k, v)
    plain = rope_append(again, table, positions, (p.heads, p.kv_heads), layout=p.layout, norm=norm, kernel=kernel)
    assert torch.equal(bits(v), bits(plain[2]))
    for ours, right in zip((q, k), plain, strict=False):  # what is multiplied and added at once may be another sum in another kernel: an ulp of the norm, or
        # of one of the two products of a rotation, whose difference may be small
        torch.testing.assert_close(ours, right, rtol=0, atol=2 * torch.finfo(p.dtype).eps * right.abs().max().item())


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv", ["e4m3/32", "e5m2", "int8", "int4/32"])
def test_quantised_zeros_constants_and_what_is_not_finite(kernel, kv, device):
    p = Rope("rope_append", 8, 1, 1, 64, 64, FP32, "neox", False, True, kv)
    qkv, table, _, _, _ = inputs(p._replace(append=False), device)
    table[0] = torch.cat((torch.ones(32), torch.zeros(32)))  # no rotation
    append = quantised(p, "NHD", False, device)._replace(slots=torch.arange(8, device=device))
    new = qkv.unflatten(1, (3, 64))[:, 1:]
    new[0] = 0.0
    new[1] = 0.1234
    new[2, :, 3], new[3, :, 3], new[4, :, 3] = torch.nan, torch.inf, -torch.inf
    new[5] *= 1e-42
    new[6] *= 1e30
    rope_append(qkv, table, torch.zeros(8, dtype=torch.int64, device=device), (1, 1), append=append, kernel=kernel)
    for n, cache in enumerate((append.k, append.v)):
        got, group = cache.of(slice(0, 2)).dequantised().flatten(0, 1)[:8, 0], 32 if "/" in kv and n else 64  # a key's pairs have spread it
        assert (got[0] == 0).all()
        assert got[2:5, :group].isnan().all() and got[2:5, group:].isfinite().all() and got[[0, 1, 5, 6, 7]].isfinite().all()
        rest = torch.tensor([1, 5, 6, 7], device=device)
        assert ((got - new[:, n])[rest].abs().amax(-1) <= new[rest, n].abs().amax(-1) * 2 / 15 + 1e-36).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_with_heads_before_tokens(kernel, device):
    p = Rope("rope_append", 5, 2, 2, 32, 32, FP32, "neox", False, True)
    qkv, table, positions, _, append = inputs(p, device)
    append = append._replace(**{name: page_strides(pool, "HND") for name, pool in (("k", append.k), ("v", append.v))})
    _, k, v = rope_append(qkv, table, positions, (2, 2), append=append, kernel=kernel)
    for pages, new in ((append.k, k), (append.v, v)):
        right, kept = torch.full_like(pages, torch.nan, memory_format=torch.contiguous_format), append.slots >= 0
        right.flatten(0, 1)[append.slots[kept]] = new[kept]
        assert not pages.is_contiguous() and torch.equal(bits(pages), bits(right))


def test_wrong_caches(device):
    p = Rope("rope_append", 2, 2, 1, 32, 32, FP32, "neox", False, True, "int8")
    qkv, table, positions, _, _ = inputs(p._replace(append=False), device)
    append = quantised(p, "NHD", False, device)
    other = quantised(p._replace(kv="e4m3"), "NHD", False, device)
    for wrong, message in (
        (append._replace(v=other.v), "k is int8, v e4m3; give both as Codes of one format"),
        (append._replace(v=torch.zeros(append.v.shape)), "k is int8, v torch.float32; give both"),
        (Append(*(torch.zeros(3, 4, 1, 32, dtype=BF16),) * 2, append.slots), "append.k is torch.bfloat16.*of one dtype"),
        (Append(*(torch.zeros(3, 4, 2, 32),) * 2, append.slots), r"append.k is \[3, 4, 2, 32\].*give \[pages, page, 1, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_append(qkv, table, positions, (2, 1), append=wrong)


def test_a_format_for_every_group_that_a_half_holds():
    """192 columns in int4/64 are three groups, one of which lies in both halves: refused in words, and plain torch takes it."""
    triton = ROPE_APPEND.kernels[0]
    p = Rope("rope_append", 2, 2, 1, 192, 192, FP32, "neox", False, True, "int4/64")
    assert "3 groups of a head of 192 in format int4/64" in " ".join(triton.refuses(p, gpu("H200")))
    assert not triton.refuses(p._replace(kv="int4/32"), gpu("H200"))
    assert {str(form) for form in FORMATS} == set(fit(192))
