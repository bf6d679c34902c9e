"""Formats of quantised keys and values: what codes stand for, how much rounding costs, and where they lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core.formats import FORMATS, TINY, Codes, Format, encode, fit, read, small_floats

each = pytest.mark.parametrize("form", FORMATS, ids=str)


def error_bound(form, scale, x):
    """Of each number: half a step. e4m3 has 4 significant digits and steps of 2^-9, e5m2 3 digits and steps of 2^-16."""
    if form.has_zero:
        return scale * 0.5
    digits, step = (4, 2.0**-9) if form.name == "e4m3" else (3, 2.0**-16)
    return torch.maximum(x.abs() * 2.0**-digits, scale * step * 0.5)


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e4, 1e30]),
    mean=st.sampled_from([0.0, 0.0, 1.0, -30.0]),
    dim=st.sampled_from([64, 128, 192]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    channel=st.booleans(),
)
def test_round_trip(form, seed, size, mean, dim, dtype, channel):
    """Whatever the numbers, one errs by at most half a step of its group's scale."""
    generator = torch.Generator().manual_seed(seed)
    x = ((torch.randn(3, 2, 2, dim, generator=generator) + mean) * size).to(dtype)
    divisor = torch.rand(2, dim, generator=generator) + 0.5 if channel else None
    codes = Codes(*encode(x, form, divisor), form)
    got, want = codes.dequantised(torch.float64), x.float() if divisor is None else x.float() / divisor
    assert codes.shape == x.shape and codes.scale.shape[-1] == form.groups(dim)
    scale = codes.scale.double().repeat_interleave(dim // form.groups(dim), -1)
    assert ((scale == 0) | (scale >= TINY)).all()
    bound = error_bound(form, scale, want) * (1 + 1e-5) + want.abs().amax() * 2e-7 + form.largest * TINY
    assert ((got - want).abs() <= bound).all()
    if divisor is not None:
        assert torch.equal(codes._replace(channel=divisor).dequantised(), (codes.dequantised() * divisor))


@each
def test_a_scale_of_more_groups_is_no_larger(form):
    x = torch.randn(50, 1, 1, 128)
    whole = encode(x, Format(form.name))[1]
    assert (encode(x, form)[1] <= whole).all()


@each
def test_zeros_and_constants(form):
    codes = Codes(*encode(torch.zeros(2, 1, 2, 64), form), form)
    assert (codes.scale == 0).all() and (codes.codes.view(torch.uint8) == 0).all() and (codes.dequantised() == 0).all()
    constant = Codes(*encode(torch.full((1, 1, 1, 64), -0.3), form), form).dequantised()
    torch.testing.assert_close(constant, torch.full_like(constant, -0.3), rtol=2.0**-8, atol=0)


@each
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_group(form, odd):
    x = torch.randn(1, 1, 2, 64)
    x[0, 0, 1, 40] = odd
    got, group = Codes(*encode(x, form), form).dequantised(), 32 if form.group == 32 else 64
    assert got[0, 0, 1, 64 - group :].isnan().all() and got.isnan().sum() == group


@each
@pytest.mark.parametrize("most", [1.6e38, 2e38])
def test_ends_farther_apart_than_float32_reaches(form, most):
    """NaN in their group, not infinities in a part of it."""
    x = torch.ones(1, 1, 1, 64)
    x[..., 40], x[..., 60] = most, -most
    got, group = Codes(*encode(x, form), form).dequantised(), 32 if form.group == 32 else 64
    if form.has_zero and most == 2e38:
        assert got[..., 64 - group :].isnan().all() and got.isnan().sum() == group
    else:
        assert ((got[..., [40, 60]] - x[..., [40, 60]]).abs() < most / 7).all()


def test_int4_by_hand():
    """0 to 15 in 16 columns: byte c holds number c and number c + 8."""
    x = torch.arange(16.0).view(1, 1, 1, 16)
    codes, scale, zero = encode(x, Format("int4"))
    assert (scale.item(), zero.item()) == (1.0, 0.0)
    assert codes.flatten().tolist() == [c | (c + 8) << 4 for c in range(8)]
    assert torch.equal(Codes(codes, scale, zero, Format("int4")).dequantised(), x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_small_floats(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(small_floats(x), x.float(), rtol=0, atol=0, equal_nan=True)


@each
@pytest.mark.parametrize(("page", "kv_heads", "dim"), [(16, 2, 64), (1, 1, 64), (3, 3, 128), (5, 1, 192)])
def test_pages(form, page, kv_heads, dim):
    """Codes, scales and zeros fill their own bytes of a page, from multiples of 16 on, and nothing else; what is put is read."""
    size = form.page_bytes(page, kv_heads, dim)
    storage = torch.full((4, size), 0xFF, dtype=torch.uint8)
    codes, x = Codes.over(storage, form, (page, kv_heads, dim)), torch.randn(4, page, kv_heads, dim)
    assert codes.shape == x.shape and size % 64 == 0 and page * kv_heads * form.bytes(dim) <= size < page * kv_heads * form.bytes(dim) + 48 + 64
    assert all(t.storage_offset() * t.dtype.itemsize % 16 == 0 and t.stride(-1) == 1 for t in codes.tensors)
    slots = torch.randperm(4 * page)[: 2 * page]
    codes.put(slots, x.flatten(0, 1)[slots])
    expected = Codes(*encode(x, form), form).dequantised().flatten(0, 1)
    got = codes.dequantised().flatten(0, 1)
    assert torch.equal(got[slots], expected[slots])
    rest = torch.ones(4 * page, dtype=torch.bool).index_fill(0, slots, False)
    for t in codes.tensors:
        assert (t.contiguous().view(torch.uint8).flatten(0, 1)[rest] == 0xFF).all()
    codes.fill(x)
    assert torch.equal(codes.dequantised(), expected.view_as(x))
    assert torch.equal(read(codes, torch.tensor([2, 0]), torch.float32), codes.dequantised()[[2, 0]])
    assert torch.equal(read(codes, slice(1, 3), torch.bfloat16), codes.dequantised()[1:3].bfloat16())


def test_slots_that_there_are_not():
    form, x = Format.of("int8"), torch.ones(2, 1, 64)
    storage = torch.zeros(2, form.page_bytes(4, 1, 64), dtype=torch.uint8)
    codes = Codes.over(storage, form, (4, 1, 64))
    for slots, words in (([-1, 0], "slots are -1 to 0; give 0 to 7"), ([0, 8], "slots are 0 to 8; give 0 to 7"), ([0], r"x is \[2, 1, 64\], slots \[1\]")):
        with pytest.raises(ValueError, match=f"^put: {words}"):
            codes.put(torch.tensor(slots), x)
    with pytest.raises(ValueError, match=r"^put: x is \[2, 64\], .* give \[tokens, 1, 64\], and a slot for each token"):
        codes.put(torch.tensor([0, 1]), x[:, 0])
    for slots in ([0, 1], torch.tensor([0.0, 1.0]), torch.tensor([True, False])):
        with pytest.raises(TypeError, match=r"^put: x is torch.float32 .*, slots are .*; give a tensor .*, and int64 \[tokens\]"):
            codes.put(slots, x)
    with pytest.raises(ValueError, match=r"^fill: x is \[1, 1, 1, 64\]; give \[2, 4, 1, 64\]"):
        codes.fill(x[:1, None])
    assert not storage.any()


def test_texts():
    assert [str(f) for f in FORMATS[:4]] == ["e4m3", "e4m3/32", "e4m3/64", "e5m2"]
    for form in FORMATS:
        assert Format.of(str(form)) == form == Format.of(form)
    for text in ("int3", "int4/", "int4/33", "int4/-32", "fp8", "", "e4m3/128", "int8/all"):
        with pytest.raises(ValueError, match="is not a format of keys and values; give one of e4m3, "):
            Format.of(text)
    with pytest.raises(ValueError, match="'int9' is not"):
        Format.of(Format("int9"))


def test_heads_that_do_not_fit():
    assert fit(63) == ["e4m3", "e5m2", "int8"] and fit(96) == [str(f) for f in FORMATS if f.group != 64]
    for text, dim in (("int4", 63), ("int8/64", 96)):
        with pytest.raises(ValueError, match=f"format {text} of heads of {dim}: .*; give one of e4m3, "):
            Format.of(text).groups(dim)
    assert [Format.of(text).bytes(128) for text in ("e4m3", "e4m3/32", "int8", "int8/64", "int4", "int4/32")] == [130, 136, 132, 136, 68, 80]
