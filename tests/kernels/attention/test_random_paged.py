"""Masks, scores, sinks and layouts over pages, combined at random: output and LSE of every kernel that reads pages against float64."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from test_decode import case, paged
from test_random import BF16, FP64, INTERPRETED, MASKS, QUIET, SCORES, Case, cases, move

import onchip
from judge import assert_as_good_as_torch, hardware
from onchip.core import masks

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:All-NaN slice", "ignore:invalid value")  # numpy's, of the interpreter

TRITON = ("triton_decode", "triton_shares", "triton_paged")
HOPPER = (*TRITON, "hopper_decode", "hopper_paged", "register_decode")


class Paged(NamedTuple):
    """`what` is seen and scored over pages of `page` tokens: `counts` queries of each sequence, over `lengths` keys."""

    what: Case
    page: int
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    packed: bool
    invariant: bool


@st.composite
def over_pages(draw, longest, dims):
    of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    packed, sequences, same = draw(st.booleans()), of(1, 2, 3, 4), of(1, 1, 2, 3, 7, 16, 20)
    counts = tuple(of(0, 1, 1, 3, 7, 20) if packed else same for _ in range(sequences))
    lengths = tuple(of(*(n for n in (0, 1, 2, 5, 17, 40, 63, 130) if n <= longest)) for _ in range(sequences))
    what = draw(cases(longest, dims))._replace(packed=False, drop=0.0)
    if draw(st.booleans()):  # what most calls are, and kernels have shorter ways for
        what = what._replace(mask=(of("Causal", "Full", "Window"),), score=(), bias=None, softcap=None)
    return Paged(what, of(1, 3, 8, 16, 64), counts, lengths, packed, draw(st.booleans()))


def check(given: Paged, kernel: str, device) -> None:
    c, page, counts, lengths, *_ = given
    torch.manual_seed(c.seed)
    p, _ = case(lengths, page, max(counts), dim=c.dims[0], dim_v=c.dims[1], dtype=c.dtype, heads=(c.query_heads, c.heads[0]))
    cache, width, offsets = paged(p, lengths, device), p.len_k, None
    q = torch.randn(sum(counts), c.query_heads, c.dims[0], device=device).to(c.dtype)
    if given.packed:
        offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    else:
        q = q.unflatten(0, (len(counts), -1))
    c = c._replace(lengths=((max(counts), width),) * len(counts))  # as large as what a mask or score reads has to be
    each = [move(masks.as_mask(MASKS[name](c)), device) for name in c.mask[::2]]
    mask = each[0] if len(each) == 1 else each[0] & each[1] if c.mask[1] == "&" else each[0] | each[1]
    sizes = (len(counts), c.query_heads, max(counts), width)
    made = {name: torch.randn(SCORES[name][0](c), device=device) for name in c.score if SCORES[name][0]}
    if c.bias is not None:
        made["bias"] = torch.randn([size if letter in c.bias else 1 for letter, size in zip("bhij", sizes, strict=True)], device=device)
    if c.sinks:
        made["sinks"] = torch.randn(c.query_heads, device=device)

    def run(kernel, dtype, **more):
        wide = dtype == FP64
        reads = {name: t.double() if wide else t for name, t in made.items()}
        keys = cache._replace(k=cache.k.to(dtype), v=cache.v.to(dtype)) if wide else cache
        score = [SCORES[name][1](reads.get(name)) for name in c.score] or None
        how = {"mask": mask, "scale": c.scale, "softcap": c.softcap, "bias": reads.get("bias"), "sinks": reads.get("sinks"), "score": score}
        longest = max(counts) if given.packed else None
        return onchip.paged_attention(q.to(dtype), keys, q_offsets=offsets, longest=longest, return_lse=True, kernel=kernel, **how, **more)

    try:
        ours = run(kernel, c.dtype, batch_invariant=given.invariant)
    except onchip.Unsupported:
        reject()
    for name, mine, low, truth in zip(("out", "lse"), ours, run("reference", c.dtype), run("reference", FP64), strict=True):
        beside = (low, *hardware(truth, c.dtype, device))
        if name == "lse" and c.dtype == BF16:
            beside += (truth + 2**-14,)  # what torch's CPU kernel errs, and scores in base 2
        elif name == "lse" and device.type == "cuda":
            beside += (truth + 2**-21,)  # of one key it is the score, a sum of terms that may be larger: 7e-7 on an H200, beside 0.6
        if c.softcap and device.type == "cuda" and mine.numel():  # the hardware's tanh, see test_random.py
            beside += (truth + c.softcap * 2**-11 * max(1.0, truth.nan_to_num(0, 0, 0).abs().max().item()),)
        assert mine.dtype == low.dtype and mine.shape == low.shape, name
        assert_as_good_as_torch(mine, beside, truth)


NO_QUERIES = Paged(  # of one sequence, and no keys of another
    Case(
        lengths=(), packed=False, unused=(0, 0), heads=(1, 2), dims=(16, 16), dtype=BF16, mask=("Causal",), score=("ALiBi",), bias=None, softcap=3.0,
        sinks=True, drop=0.0, scale=None, storage="plain", gradients=False, small=False, seed=0,
    ), 16, (0, 3), (40, 0), True, False,
)  # fmt: skip


@settings(max_examples=100, **QUIET)
@example(given=NO_QUERIES)
@given(given=over_pages(130, (8, 16, 40, 64)))
def test_blocked(given):
    check(given, "blocked", torch.device("cpu"))


@pytest.mark.gpu
@settings(max_examples=6 if INTERPRETED else 60, **QUIET)
@example(given=NO_QUERIES, kernel="triton_shares")
@given(given=over_pages(40 if INTERPRETED else 130, (8, 16) if INTERPRETED else (16, 64, 128)), kernel=st.sampled_from(TRITON))
def test_triton(given, kernel, device):
    check(given, kernel, device)


@pytest.mark.gpu
@pytest.mark.hopper
@settings(max_examples=200, **QUIET)
@given(given=over_pages(130, (16, 64, 128)), kernel=st.sampled_from(HOPPER))
def test_hopper(given, kernel, device):
    check(given, kernel, device)
