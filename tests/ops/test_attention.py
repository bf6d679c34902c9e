"""The public functions of attention: what they say to arguments that disagree, what merges, what is empty, and which gradients there are."""

import gc
import itertools
import types
import weakref

import numpy as np
import pytest
import torch

import onchip
import onchip.ops.graph
from onchip import dispatch
from onchip.core.masks import Causal, Dense, Document, Full, KeyPadding, Window
from onchip.core.problem import Operands
from onchip.core.scores import ALiBi, Bias, Softcap
from onchip.ops.attend import How, dense_sizes, problem_of
from onchip.ops.attention import PagedKV

FP32, INT32 = torch.float32, torch.int32
KERNELS = ["auto", "reference"]


def zeros(*shape, dtype=FP32):
    return torch.zeros(*shape, dtype=dtype)


def qkv(*lead, heads=4, kv_heads=2, dim=16, grad=False):
    return [torch.randn(*lead, n, dim, requires_grad=grad) for n in (heads, kv_heads, kv_heads)]


# ---- arguments that disagree

GOOD = zeros(1, 5, 2, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        (zeros(5, 2, 16), GOOD, GOOD, "q, k, v have 3, 4, 4 dimensions; each needs 4"),
        (GOOD, zeros(1, 6, 2, 16), GOOD, r"k is \[1, 6, 2, 16\] and v \[1, 5, 2, 16\]; all but the last dimension must be equal"),
        (GOOD, zeros(1, 5, 2, 32), zeros(1, 5, 2, 32), "q has head dimension 16, k has 32; they must be equal"),
        (zeros(1, 5, 3, 16), GOOD, GOOD, "3 query heads over 2 key heads; give 1 key head or more, and a multiple of them of q"),
        (GOOD, zeros(1, 5, 0, 16), zeros(1, 5, 0, 16), "2 query heads over 0 key heads; give 1 key head or more, and a multiple of them of q"),
        (zeros(1, 5, 2, 0), zeros(1, 5, 2, 0), GOOD, "heads of q and k have 0 columns, those of v 16; give 1 or more"),
        (GOOD, GOOD, zeros(1, 5, 2, 0), "heads of q and k have 16 columns, those of v 0; give 1 or more"),
        (GOOD, GOOD.half(), GOOD.half(), "q is torch.float32, k torch.float16, v torch.float16; cast them to one dtype"),
        (GOOD.int(), GOOD.int(), GOOD.int(), "q, k, v are torch.int32; give floats"),
        (GOOD, GOOD.to("meta"), GOOD, "q is on cpu, k on meta, v on cpu; move them to one device"),
        (zeros(2, 5, 2, 16), GOOD, GOOD, "k has batch 1, q has 2; they must be equal"),
    ],
)
def test_dense_inputs_that_disagree(q, k, v, words):
    with pytest.raises(ValueError, match=f"^attention: {words}$"):
        onchip.attention(q, k, v)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize(
    ("words", "error", "keywords"),
    [
        (r"mask is a str; give a Mask \(Full\(\), .*\), a bool tensor or a function mask_mod\(b, h, i, j\)", TypeError, {"mask": "causal"}),
        (r"mask is the class Causal; give a Mask", TypeError, {"mask": Causal}),
        (r"Dense: the mask is torch.float32; give bool, .* \(a float tensor goes to bias=\)", ValueError, {"mask": zeros(5, 5)}),
        (r"Dense: the mask is \[5, 4\]; this call needs \[len_q 5, len_k 5\], or 1 for all alike", ValueError, {"mask": zeros(5, 4) == 0}),
        (r"Dense: the mask is \[7, 5\]; this call needs \[len_q 5, len_k 5\]", ValueError, {"mask": Dense(zeros(7, 5) == 0) & Causal()}),  # of more than these
        (r"Bias: bias is \[5, 7\]; this call needs \[len_q 5, len_k 5\]", ValueError, {"bias": zeros(5, 7)}),
        (r"Document: ids is \[2, 5\]; this call needs \[batch 1, len_k 5\]", ValueError, {"mask": Document(zeros(2, 5).int())}),
        (r"KeyPadding: valid is \[3\]; this call needs \[batch 1\]", ValueError, {"mask": Causal() & KeyPadding(zeros(3).int())}),
        (r"bias is torch.bool \[5, 5\]; give floats .* \(a bool tensor goes to mask=\)", ValueError, {"bias": zeros(5, 5) == 0}),
        (r"Bias: bias is \[3, 5, 5\]; this call needs \[heads 2, len_q 5, len_k 5\], or 1 for all alike", ValueError, {"bias": zeros(3, 5, 5)}),
        (r"ALiBi: slopes is \[3\]; this call needs \[heads 2\]", ValueError, {"score": ALiBi(zeros(3))}),
        (r"score is a float; give a function score_mod\(s, b, h, i, j\), a Score .* or a list of them", TypeError, {"score": 3.0}),
        (r"softcap -1.0 is not a number from 1e-30 to 1e30; give the bound of the scores, or None for no cap", ValueError, {"softcap": -1.0}),
        (r"softcap '30' is not a number", ValueError, {"softcap": "30"}),
        (r"attention: scale is 'small'; give a number, or None for dim \*\* -0.5", TypeError, {"scale": "small"}),
        (r"attention: scale is '2.0'; give a number, or None for dim \*\* -0.5", TypeError, {"scale": "2.0"}),
        (r"attention: scale is nan; give a finite number, or None for dim \*\* -0.5", ValueError, {"scale": float("nan")}),
        (r"prefill: kernel is .'blocked',?.; give the name of one, or 'auto'", TypeError, {"kernel": ["blocked"]}),
        (r"attention: scale is -inf; give a finite number", ValueError, {"scale": zeros(()) - torch.inf}),
        (r"attention: scale requires a gradient, which a number has not; give scale=1.0 and score=", TypeError, {"scale": zeros(()).requires_grad_()}),
        (r"attention: sinks are torch.float32 \[3\] on cpu; give floats, one logit a query head, \[2\] on cpu", ValueError, {"sinks": zeros(3)}),
        (r"attention: sinks are torch.int32 \[2\] on cpu", ValueError, {"sinks": zeros(2).int()}),
        (r"attention: sinks are torch.float8_e4m3fn \[2\] on cpu; give floats", ValueError, {"sinks": zeros(2).to(torch.float8_e4m3fn)}),
        (r"attention: sinks are torch.float32 \[2\] on cpu, sparse; give floats", ValueError, {"sinks": zeros(2).to_sparse()}),
        (r"attention: scale is 1e\+39, more than float32 holds; give a finite number", ValueError, {"scale": 1e39}),
        (r"attention: scale is 1000.*; give a number", TypeError, {"scale": 10**400}),
        (r"softcap is a tensor \[2\]; give a number, or a function score=", TypeError, {"softcap": zeros(2)}),
        (r"attention: dropout is torch.float32 \[2\] on cpu; give a probability below 1", TypeError, {"dropout": zeros(2)}),
        (r"attention: the seed is 1, the offset None; give a seed of 63 bits", ValueError, {"dropout": onchip.Dropout(0.5, 1, None)}),
        (r"Document: ids is \[7\]; this call needs \[len_k 5\]", ValueError, {"mask": Document(zeros(7).int())}),
        (r"attention: sinks are a list; give a tensor of one logit a query head, \[2\] on cpu", TypeError, {"sinks": [1.0, 2.0]}),
        (r"attention: dropout 1 is not a probability below 1; give 0 <= p < 1", ValueError, {"dropout": 1}),
        (r"attention: dropout -0.5 is not a probability", ValueError, {"dropout": onchip.Dropout(-0.5)}),
        (r"attention: dropout 'some' is not a probability", ValueError, {"dropout": "some"}),
        (r"attention: the seed is 1.5, the offset 0; give a seed of 63 bits", ValueError, {"dropout": onchip.Dropout(0.5, 1.5)}),
        (
            r"attention: the seed is a tensor, torch.int64 \[2\]; give int64 \[\], an integer or None",
            ValueError,
            {"dropout": onchip.Dropout(0.5, torch.arange(2))},
        ),
        (r"attention: the seed is True, the offset 0; give a seed of 63 bits or None", ValueError, {"dropout": onchip.Dropout(0.5, True)}),
        (r"attention: the seed is -1, the offset 0; give a seed of 63 bits or None", ValueError, {"dropout": onchip.Dropout(0.5, -1)}),
        (
            r"prefill: no kernel is named 'flash'; it has hopper_prefill, hopper_fp8, bf16_of_e4m3, triton_prefill, blocked, reference, or leave kernel='auto'",
            onchip.Unsupported,
            {"kernel": "flash"},
        ),
    ],
)
def test_arguments_that_mean_nothing(words, error, keywords, graph, monkeypatch):
    """The same sentence through the registered operator."""
    if graph:
        monkeypatch.setattr(onchip.ops.graph, "in_graph", lambda *_: True)
    with pytest.raises(error, match=f"^{words}"):
        onchip.attention(GOOD, GOOD, GOOD, **keywords)


@pytest.mark.parametrize("asked", ["deterministic", "batch_invariant"])
def test_what_is_neither_true_nor_false(asked):
    """By every function that takes it, also of a call whose like has come before; numpy's are Python's, of one kind with them."""
    offsets, one = torch.tensor([0, 5], dtype=INT32), torch.ones(1, dtype=INT32)
    packed, cache = zeros(5, 2, 16), PagedKV(zeros(1, 8, 2, 16), zeros(1, 8, 2, 16), 0 * one[None], 5 * one)
    calls = {"attention": lambda **how: onchip.attention(GOOD, GOOD, GOOD, **how),
             "attention_packed": lambda **how: onchip.attention_packed(packed, packed, packed, offsets, **how)}  # fmt: skip
    if asked == "batch_invariant":
        calls["paged_attention"] = lambda **how: onchip.paged_attention(GOOD, cache, **how)
    for name, call in calls.items():
        for given in (True, False):
            with onchip.record() as decisions:
                call(**{asked: given}), call(**{asked: np.bool_(given)}), call(**{asked: given})
            assert [asked in d.problem.extras for d in decisions] == [given] * 3 and len({*map(id, decisions)}) == 1
        for given, said in (("no", "'no'"), (1, "1"), (0, "0"), (None, "None"), (torch.ones(2), r"torch.float32 \[2\] on cpu"), (zeros(()) == 0, "torch.bool")):
            with pytest.raises(TypeError, match=f"^{name}: {asked} is {said}.*; give True or False$"):
                call(**{asked: given})


def test_a_function_that_cannot_be_traced():
    with pytest.raises(ValueError, match=r"^mask lambda: the function cannot be traced: it branches on, or takes the Python value of, a tensor"):
        onchip.attention(GOOD, GOOD, GOOD, mask=lambda b, h, i, j: i if i > j else j)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_function_that_reads_past_the_end_of_a_tensor(kernel):
    short = zeros(4)
    words = r"reads past the end of a tensor: (\[4\] is read at j = 4|index 4 is out of bounds .* with size 4); make it longer, or clamp the index$"
    for index in (lambda i, j: j, lambda i, j: (i - j).abs(), lambda i, j: i.clamp(min=3) + j):
        with pytest.raises(ValueError, match=f"^score lambda {words.replace('index 4', 'index .')}"):
            onchip.attention(GOOD, GOOD, GOOD, score=lambda s, b, h, i, j, at=index: s + short[at(i, j)], kernel=kernel)
        with pytest.raises(ValueError, match=f"^mask lambda {words.replace('index 4', 'index .')}"):
            onchip.attention(GOOD, GOOD, GOOD, mask=lambda b, h, i, j, at=index: short[at(i, j)] == 0, kernel=kernel)
    near = lambda s, b, h, i, j: s + short[j]  # noqa: E731
    if kernel == "auto":  # a tile of as many keys as the tensor has, which begins behind its first one
        with pytest.raises(ValueError, match=f"^score lambda {words}"):
            onchip.attention(GOOD[:, :4], GOOD, GOOD, mask=Window(0, 0), score=near)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("made", ["jagged", "strided", "sparse"])
def test_tensors_that_are_not_dense(made):
    x = zeros(2, 3, 2, 16).to_sparse() if made == "sparse" else torch.nested.nested_tensor([zeros(3, 2, 16), zeros(5, 2, 16)], layout=getattr(torch, made))
    with pytest.raises(TypeError, match=r"^attention: a nested or sparse tensor; give dense ones, sequences of different lengths as values"):
        onchip.attention(x, x, x)


def test_packed_inputs_that_disagree():
    x, offsets = zeros(5, 2, 16), torch.tensor([0, 2, 5], dtype=INT32)
    for words, args, keywords in (
        (r"q_offsets are torch.int64 \[3\] on cpu; give int32 \[batch \+ 1\], of one sequence or more, on cpu", (x, offsets.long()), {}),
        (r"q_offsets are torch.int32 \[1\] on cpu", (x, offsets[:1]), {}),
        (r"q_offsets are a list; give int32 \[batch \+ 1\], of one sequence or more, on cpu", (x, [0, 2, 5]), {}),
        (r"k_offsets are torch.int32 \[3\] on meta; give int32 \[batch \+ 1\], of one sequence or more, on cpu", (x, offsets, offsets.to("meta")), {}),
        (r"k has 4 tokens, q has 5; they must be equal, or give k_offsets", (x[:4], offsets), {}),
        (r"k_offsets are of 1 sequences, q_offsets of 2; they must be as many", (x, offsets, offsets[:2]), {}),
        (r"used is torch.int64 \[2\] on cpu; give int32 \[2\] on cpu", (x, offsets), {"used": offsets[:2].long()}),
        (r"used is torch.int32 \[3\] on cpu; give int32 \[2\]", (x, offsets), {"used": (None, offsets)}),
        (r"used is a list; give int32 \[2\] on cpu", (x, offsets), {"used": [2, 3]}),
        (r"used is a tuple of 3; give one for queries and keys alike, or \(queries, keys\)", (x, offsets), {"used": (None,) * 3}),
        (r"longest is 2, and a sequence has 3 tokens; give the most of any, or more", (x, offsets), {"longest": (5, 2)}),
        (r"longest is 'a'; give a whole number of tokens, or None to have it read from the offsets", (x, offsets), {"longest": "a"}),
        (r"longest is '4'; give a whole number", (x, offsets), {"longest": (5, "4")}),
        (r"longest is 7.9; give a whole number", (x, offsets), {"longest": 7.9}),
        (r"longest is torch.float32 \[\] on cpu; give a whole number", (x, offsets), {"longest": zeros(())}),
    ):
        with pytest.raises(ValueError, match=f"^attention_packed: {words}"):
            onchip.attention_packed(x, args[0], args[0], *args[1:], **{"longest": 5} | keywords)
    for kernel, bounds in itertools.product(("auto", "reference"), ([0, 4, 2], [0, 2, 6], [-1, 2, 5])):  # torch's kernel would end the process
        with pytest.raises(ValueError, match=r"^attention: sequence [01] of a packed batch has tokens .* of 5; give offsets that rise and lie in them"):
            onchip.attention_packed(x, x, x, torch.tensor(bounds, dtype=INT32), kernel=kernel)
    shared = r"^attention: two sequences of a packed batch use token 2; give used lengths that end where the next one begins"
    used = torch.tensor([3, 1], dtype=INT32)
    for kernel in ("auto", "reference"):
        with pytest.raises(ValueError, match=shared):
            onchip.attention_packed(x, x, x, offsets, used=(used, None), kernel=kernel)
    out = onchip.attention_packed(x, x, x.clone().requires_grad_(), offsets, used=(None, used))  # keys may be read twice, their gradients not be put twice
    with pytest.raises(ValueError, match=shared):
        out.sum().backward()
    values = x.clone().requires_grad_()
    onchip.attention_packed(x, x, values, offsets, used=(None, used), kernel="reference").sum().backward()
    torch.testing.assert_close(values.grad[:, 0, 0], torch.tensor([2 / 3, 2 / 3, 2 / 3 + 3, 0, 0]))
    with pytest.raises(ValueError, match=r"^Bias: bias is \[2, 5\]; this call needs \[len_q 3, len_k 3\]"):
        onchip.attention_packed(x, x, x, offsets, bias=zeros(2, 5))


@pytest.mark.parametrize("shape", [(2, 0, 4, 16), (2, 3, 0, 16), (0, 3, 4, 16)], ids=str)
def test_no_rows_over_pages(shape):
    pages, (batch, len_q, heads, _) = torch.randn(4, 8, 2, 16), shape
    cache = PagedKV(pages, pages, zeros(batch, 1, dtype=INT32), zeros(batch, dtype=INT32) + 5)
    out, lse = onchip.paged_attention(zeros(*shape), cache, return_lse=True)
    assert out.shape == shape and lse.shape == (batch, heads, len_q)


def test_paged_inputs_that_disagree():
    q, pages = zeros(2, 1, 2, 16), zeros(4, 8, 2, 16)
    good = PagedKV(pages, pages, zeros(2, 3, dtype=INT32), zeros(2, dtype=INT32))
    assert onchip.paged_attention(q, good).shape == q.shape
    for bad, words in (
        (good._replace(page_table=good.page_table.long()), r"page_table is torch.int64 \[2, 3\] on cpu; give int32 \[2, most pages\] on cpu"),
        (good._replace(page_table=good.page_table[:1]), r"page_table is torch.int32 \[1, 3\]"),
        (good._replace(lengths=good.lengths.long()), r"lengths are torch.int64 \[2\] on cpu; give int32 \[2\] on cpu"),
        (good._replace(lengths=good.lengths[:1]), r"lengths are torch.int32 \[1\]"),
        (good._replace(lengths=good.lengths.to("meta")), r"lengths are torch.int32 \[2\] on meta"),
        (good._replace(k=pages.half(), v=pages.half()), "q is torch.float32, k torch.float16"),
        (good._replace(page_table=[[0, 1]] * 2), "page_table is a list; give int32"),
        (good._replace(lengths=[1, 2]), "lengths are a list; give int32"),
        (good._replace(lengths=good.lengths + 25), r"lengths are 25 to 25; give 0 to 24: 3 pages of 8 tokens each"),
        (good._replace(lengths=good.lengths - 1), r"lengths are -1 to -1; give 0 to 24"),
        (
            good._replace(page_table=good.page_table - 1, lengths=good.lengths + 9),
            "page_table has pages -1 to -1 among those of a sequence; the cache has 0 to 3",
        ),
        (good._replace(k=pages[:, :0], v=pages[:, :0]), r"k is \[4, 0, 2, 16\], pages of no tokens; give 1 token a page or more"),
    ):
        with pytest.raises(ValueError, match=f"^paged_attention: {words}"):
            onchip.paged_attention(q, bad, softcap=9.0)
    for bad, words in (
        (tuple(good), r"cache is a tuple; give PagedKV\(k, v, page_table, lengths\)"),
        (good._replace(v=None), "k is a Tensor, v a NoneType; give tensors"),
    ):
        with pytest.raises(TypeError, match=f"^paged_attention: {words}"):
            onchip.paged_attention(q, bad)
    for odd in (zeros(()), zeros(0), zeros(2, 1, 2, 0)):
        with pytest.raises(ValueError, match=r"^paged_attention: (q is .* without q_offsets; give|q has head dimension 0)"):
            onchip.paged_attention(odd, good)
    with pytest.raises(TypeError, match="attention: sinks are a list; give a tensor"):
        onchip.paged_attention(q, good, sinks=[1.0, 2.0])
    for part, how in (("bias", {"bias": zeros(1, 23)}), ("the mask", {"mask": zeros(1, 23).bool()})):
        with pytest.raises(ValueError, match=rf": {part} is \[1, 23\]; this call needs \[len_q 1, len_k 24\], or 1 for all alike$"):
            onchip.paged_attention(q, good._replace(lengths=good.lengths + 24), **how)
    with pytest.raises(ValueError, match=r"^Window: left is \[3\]; this call needs \[heads 2\]"):
        onchip.paged_attention(q, good, mask=Window(zeros(3).int()))


def test_pages_that_are_not_there_are_named():
    """Also of sequences whose keys are laid side by side, and where a page before was fine."""
    pages, good = zeros(4, 8, 2, 16), torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    for table, words in ((good, None), (good + 1, "1 to 4"), (good - 1, "-1 to 2"), (good * 0 + (1 << 30), "1073741824 to 1073741824")):
        for len_q, mask in ((1, onchip.Causal()), (2, Window(9)), (2, onchip.Full())):
            call = lambda: onchip.paged_attention(zeros(2, len_q, 4, 16), PagedKV(pages, pages, table, zeros(2, dtype=INT32) + 16), mask=mask)  # noqa: B023, E731
            if words is None:
                assert call().shape == (2, len_q, 4, 16)
                continue
            with pytest.raises(ValueError, match=f"^paged_attention: page_table has pages {words} among those of some sequences; the cache has 0 to 3"):
                call()


@pytest.mark.parametrize("made", [lambda at: torch.arange(5, device=at.device)[at], lambda at: torch.tensor(2.0, device=at.device)], ids=["row", "number"])
def test_a_tensor_made_on_the_device_of_a_place(made):
    with pytest.raises(
        ValueError, match=r"^attention: a tensor \[5?\] of the score is on meta, q on cpu; make it outside of the function, whose places are on meta$"
    ):
        onchip.attention(GOOD, GOOD, GOOD, score=lambda s, b, h, i, j: s + made(j))


def test_merge_of_what_does_not_belong_together():
    out, lse = zeros(1, 5, 2, 16), zeros(1, 2, 5)
    with pytest.raises(TypeError, match=r"^merge: states is None; give a sequence of \(output, LSE\) pairs$"):
        onchip.merge(None)
    with pytest.raises(ValueError, match=r"merge: states is empty; give at least one \(output, LSE\) pair"):
        onchip.merge([])
    for pair in ((out, lse.transpose(1, 2)), (out[:, :3], lse[..., :3]), (out, lse[..., :3])):
        with pytest.raises(ValueError, match=r"merge: part 1 has an output \[.*\] and LSE \[.*\]; give \[..., len, heads, dim\] and \[..., heads, len\]"):
            onchip.merge([(out, lse), pair])
    with pytest.raises(ValueError, match=r"merge: part 0 has an output \[2, 16\] and LSE \[2\]; give"):
        onchip.merge([(out[0, 0], lse[0, :, 0])])
    with pytest.raises(TypeError, match=r"merge: part 1 has an output of torch.int64 and LSE of torch.float32; give floats, as attention"):
        onchip.merge([(out, lse), (out.long(), lse)])
    with pytest.raises(TypeError, match=r"merge: part 1 has an output of torch.float8_e4m3fn and LSE of torch.float32; give floats, as attention"):
        onchip.merge([(out, lse), (out.to(torch.float8_e4m3fn), lse)])
    with pytest.raises(ValueError, match=r"merge: part 1 has its output on meta, its LSE on cpu; move all parts to cpu"):
        onchip.merge([(out, lse), (out.to("meta"), lse)])
    with pytest.raises(TypeError, match=r"merge: part 1 is a list; give an \(output, LSE\) pair of tensors"):
        onchip.merge([(out, lse), [out, None]])
    with pytest.raises(TypeError, match=r"merge: part 0 is torch.float32 \[1, 5, 2, 16\] on cpu; give an \(output, LSE\) pair"):
        onchip.merge(part for part in (out, lse))


# ---- merge


@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 1, 6, 6, 12)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_merge_is_attention_at_once(cuts, mask):
    """With gradients through both results; under a causal mask the last parts are hidden from the first queries."""
    q, k, v = qkv(2, 12, grad=True)
    cotangents = torch.randn(2, 12, 4, 16), torch.randn(2, 4, 12)

    def seen(a, b):
        return Dense(torch.arange(a, b) <= torch.arange(12)[:, None]) if mask == Causal() else Full()

    def parts(kernel="auto"):
        return [onchip.attention(q, k[:, a:b], v[:, a:b], mask=seen(a, b), return_lse=True, kernel=kernel) for a, b in itertools.pairwise(cuts)]

    whole = onchip.attention(q, k, v, mask=mask, return_lse=True)
    merged = onchip.merge(parts())
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(torch.autograd.grad(merged, (q, k, v), cotangents), torch.autograd.grad(whole, (q, k, v), cotangents))


def test_merge_where_nobody_sees_anything():
    """No NaN forward or backward, in any part."""
    out, lse = torch.randn(1, 3, 2, 4, requires_grad=True), torch.tensor([[[0.0, -torch.inf, 1.0], [-torch.inf] * 3]], requires_grad=True)
    empty = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf)
    merged, total = onchip.merge([empty, (out, lse), empty])
    assert torch.equal(total, lse.detach()) and not merged[0, 1, 0].any() and not merged[0, :, 1].any()
    torch.testing.assert_close(merged[0, 0, 0], out[0, 0, 0])
    d_out, d_lse = torch.autograd.grad((merged, total), (out, lse), (torch.ones_like(merged), torch.ones_like(total)))
    assert d_out.isfinite().all() and d_lse.isfinite().all() and d_lse[0, 0, 0] == 1


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_merge_loses_no_nan(odd):
    out, lse = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1)
    first = onchip.merge([(out * torch.nan, lse + odd), (out, lse)])
    assert all(t.isnan().all() for t in (*first, *onchip.merge([first, (out, lse)])))


def test_merge_of_packed_and_half():
    q, k, v = (t.bfloat16() for t in qkv(12))
    offsets = torch.tensor([0, 5, 12], dtype=INT32)
    state = onchip.attention_packed(q, k, v, offsets, return_lse=True)
    merged, lse = onchip.merge([state])
    assert merged.dtype == torch.bfloat16 and lse.dtype == FP32
    torch.testing.assert_close((merged, lse), state)


# ---- nothing to do


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mask", [Full(), Causal(), "document"], ids=str)
def test_empty_calls(batch, len_q, len_k, mask, kernel):
    """Zeros and LSE -inf, and gradients of zero."""
    mask = Document(torch.zeros(batch, len_k, dtype=torch.int64)) if mask == "document" else mask
    q, (_, k, v) = qkv(batch, len_q, grad=True)[0], qkv(batch, len_k, grad=True)
    out, lse = onchip.attention(q, k, v, mask=mask, return_lse=True, kernel=kernel)
    assert out.shape == q.shape and lse.shape == (batch, 4, len_q) and not out.any() and (lse == -torch.inf).all()
    if batch or kernel == "auto":
        for grad, of in zip(torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True), (q, k, v), strict=True):
            assert grad is None or (grad.shape == of.shape and not grad.any())


def test_sinks_alone():
    """Where no key is seen, LSE is the sink."""
    q, k, v = qkv(2, 3)
    sinks = torch.randn(4)
    out, lse = onchip.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)
    assert not out.any() and torch.equal(lse, sinks[:, None].expand(2, 4, 3))


# ---- gradients


def test_gradients_come_from_the_family_of_the_kernel():
    q, k, v = qkv(1, 5, grad=True)
    for kernel in ("blocked", "auto"):
        with onchip.record() as decisions:
            onchip.attention(q, k, v, mask=Causal(), kernel=kernel).sum().backward()
        assert [d.problem.op for d in decisions] == ["prefill", "backward"] and decisions[0].problem._replace(op="backward") == decisions[1].problem
        assert kernel == "auto" or [d.kernel.name for d in decisions] == ["blocked", "blocked"]
    with onchip.record() as decisions, torch.no_grad():
        onchip.attention(q, k, v)
    assert [d.problem.op for d in decisions] == ["prefill"]


def test_the_problem_of_gradients_says_what_the_score_needs():
    q, k, v = qkv(1, 5, grad=True)
    bias = torch.randn(5, 5, requires_grad=True)
    for given, extras in ((bias, ("score_grad",)), (bias.detach(), ())):
        with onchip.record() as decisions:
            onchip.attention(q, k, v, bias=given).sum().backward()
        assert decisions[1].problem.extras == extras


@pytest.mark.parametrize("how", [{}, {"softcap": 3.0}], ids=["torch's node", "ours"])
def test_torchs_switch_asks_for_deterministic_gradients(how):
    q, k, v = (t.requires_grad_() for t in qkv(2, 12))
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)
        try:
            with onchip.record() as decisions:
                onchip.attention(q, k, v, **how).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert ["deterministic" in d.problem.extras for d in decisions if d.problem.op == "backward"] == [asked]


@pytest.mark.parametrize("given", [None, "tf32", "ieee"])
def test_tf32_where_torchs_switch_says_so(given):
    """torch's newer one, too, beside which the older cannot be read."""
    q = types.SimpleNamespace(dtype=torch.float32, is_cuda=True)
    sizes = dense_sizes(*(torch.empty(1, 5, 2, 16, device="meta") for _ in range(3)))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if given:
            torch.backends.cuda.matmul.fp32_precision = given
        else:
            torch.set_float32_matmul_precision("high")
        problem, _ = problem_of("prefill", How(Full(), None, None, None, False, False, "auto"), sizes, Operands(1.0), q)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert problem.extras == (() if given == "ieee" else ("tf32",))


def test_only_a_bias_or_sinks_need_gradients():
    q, k, v = qkv(2, 5)
    bias, sinks = torch.randn(4, 5, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    cotangent = torch.randn(2, 5, 4, 16)
    found = torch.autograd.grad(onchip.attention(q, k, v, bias=bias, sinks=sinks), (bias, sinks), cotangent)
    expected = torch.autograd.grad(onchip.attention(q, k, v, bias=bias, sinks=sinks, kernel="reference"), (bias, sinks), cotangent)
    torch.testing.assert_close(found, expected)


def test_a_bias_keeps_its_gradient_after_a_call_without():
    q, k, v = qkv(2, 5)
    bias = Bias(torch.randn(1, 4, 5, 5, requires_grad=True))
    with torch.inference_mode():
        onchip.attention(q, k, v, score=bias)
    onchip.attention(q, k, v, score=bias).sum().backward()
    assert bias.bias.grad is not None and bias.bias.grad.any()


def test_lse_has_a_gradient():
    q, k, v = qkv(2, 5, grad=True)
    found = torch.autograd.grad(onchip.attention(q, k, v, return_lse=True)[1].sum(), (q, k, v), allow_unused=True)
    expected = torch.autograd.grad(onchip.attention(q, k, v, return_lse=True, kernel="reference")[1].sum(), (q, k))
    torch.testing.assert_close(found[:2], expected)
    assert found[2] is None or not found[2].any()


@pytest.mark.parametrize("how", ["mask", "function", "offsets", "used"])
def test_what_is_written_to_before_the_backward_pass(how):
    """Gradients of another mask than the output's would be wrong in silence."""
    q, k, v = (t.requires_grad_() for t in qkv(12))
    offsets, used = torch.tensor([0, 5, 12], dtype=INT32), torch.tensor([5, 6], dtype=INT32)
    reach = torch.tensor([1, 2, 3, 4])
    mask = {"mask": KeyPadding(reach[:2]), "function": lambda b, h, i, j: (i - j).abs() < reach[h]}.get(how, Causal())
    out = onchip.attention_packed(q, k, v, offsets, used=used, mask=mask, softcap=3.0)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    {"offsets": offsets[1:2], "used": used}.get(how, reach).fill_(4)
    with pytest.raises(RuntimeError, match=r"^attention: offsets, used lengths or a tensor of the mask were written to before the backward pass"):
        out.sum().backward()


def test_a_call_keeps_nothing_alive():
    q, k, v = qkv(2, 5, grad=True)
    bias, table = (torch.randn(4, 5, 5, requires_grad=True) for _ in range(2))
    gone = [weakref.ref(t) for t in (q, bias, table)]
    score = [Softcap(3.0), lambda s, b, h, i, j, table=table: s + table[h, i, j]]
    onchip.attention(q, k, v, bias=bias, score=score, mask=Document(torch.zeros(2, 5).int())).sum().backward()
    del q, bias, table, score
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_gradients_through_a_cache():
    """By the plain formula, whatever kernel ran forward."""
    q = torch.randn(2, 2, 4, 16, requires_grad=True)
    pages = torch.randn(2, 8, 4, 2, 16, requires_grad=True)
    cache = PagedKV(*pages, torch.tensor([[3, 1, 0], [0, 5, 2]], dtype=INT32), torch.tensor([7, 10], dtype=INT32))
    sinks, bias = torch.randn(4, requires_grad=True), torch.randn(4, 1, 12, requires_grad=True)
    results = [onchip.paged_attention(q, cache, sinks=sinks, bias=bias, return_lse=True, kernel=kernel) for kernel in ("auto", "blocked", "reference")]
    grads = [torch.autograd.grad([o.sum() for o in each], (q, pages, sinks, bias)) for each in results]
    for each, grad in zip(results[:2], grads[:2], strict=True):
        torch.testing.assert_close(each, results[2])
        torch.testing.assert_close(grad, grads[2])


@pytest.mark.parametrize(
    "how", [{"score": ALiBi(torch.rand(4))}, {"mask": Document(torch.arange(9) // 4)}, {"softcap": 2.0}, {"dropout": onchip.Dropout(0.5, 1)}], ids=list
)
def test_a_default_device_of_the_users(how):
    """What a kernel makes lies where its inputs lie."""
    q, k, v = qkv(2, 9)
    pages = torch.randn(4, 8, 2, 16)
    cache = PagedKV(pages, pages, torch.tensor([[0, 1], [2, 3]], dtype=INT32), torch.tensor([9, 12], dtype=INT32))
    decoded = onchip.paged_attention(q[:, :3], cache)
    out = onchip.attention(q, k, v, **how)
    with torch.device("meta"):
        assert torch.equal(onchip.attention(q, k, v, **how), out)
        assert torch.equal(onchip.paged_attention(q[:, :3], cache), decoded)


# ---- dropout, autocast


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_draws_from_torchs_generator(kernel):
    q, k, v = qkv(2, 9, grad=True)

    def call(dropout=0.4):
        out = onchip.attention(q, k, v, dropout=dropout, kernel=kernel)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    torch.testing.assert_close(call(), first, rtol=0, atol=0)
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(call(onchip.Dropout(0.4, 5)), call(onchip.Dropout(0.4, 5)), rtol=0, atol=0)
    assert not torch.equal(call(onchip.Dropout(0.4, 5))[0], call(onchip.Dropout(0.4, 5, 1))[0])
    torch.testing.assert_close(call(onchip.Dropout(0.4, torch.tensor(5), 1)), call(onchip.Dropout(0.4, 5, 1)), rtol=0, atol=0)
    torch.testing.assert_close(call(0.0), call(None), rtol=0, atol=0)


def test_dropout_is_right_on_average():
    q, k, v = qkv(1, 6)
    mean = sum(onchip.attention(q, k, v, dropout=onchip.Dropout(0.3, seed)) for seed in range(400)) / 400
    assert (mean - onchip.attention(q, k, v)).abs().max() < 0.15


@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, how):
    """q, k and v are cast, and nothing else: what a kernel sums in float32 stays there. Gradients come back in the inputs' dtype."""
    q, k, v = qkv(2, 9, grad=True)
    with torch.autocast("cpu", dtype):
        out = onchip.attention(q, k, v, mask=Causal(), **how)
        found = torch.autograd.grad(out.float().sum(), (q, k, v))
        with torch.no_grad():
            plain = onchip.attention(q, k, v, mask=Causal(), return_lse=True, **how)
    low = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    expected = onchip.attention(*low, mask=Causal(), **how)
    assert out.dtype == dtype and torch.equal(out, expected)
    with torch.no_grad():
        assert all(map(torch.equal, plain, onchip.attention(*low, mask=Causal(), return_lse=True, **how)))
    for grad, exact in zip(found, torch.autograd.grad(expected.float().sum(), low), strict=True):
        assert grad.dtype == FP32 and torch.equal(grad, exact.float())


def test_autocast_leaves_doubles_and_takes_the_cache_as_it_is():
    q, k, v = (t.double() for t in qkv(2, 9))
    pages = torch.randn(4, 8, 2, 16).bfloat16()
    cache = PagedKV(pages, pages, torch.tensor([[0, 1], [2, 3]], dtype=INT32), torch.tensor([9, 12], dtype=INT32))
    with torch.autocast("cpu", torch.bfloat16):
        assert onchip.attention(q, k, v).dtype == torch.float64
        for _ in range(2):
            assert onchip.paged_attention(torch.randn(2, 1, 4, 16), cache).dtype == torch.bfloat16


# ---- overhead


def test_an_eager_call_steps_round_the_operators(monkeypatch):
    """The boundary of torch.library costs more than many kernels."""
    monkeypatch.setattr(torch.ops.onchip, "attention", None)
    q, k, v = qkv(1, 5, grad=True)
    onchip.attention(q, k, v, mask=Causal() & Document(torch.zeros(1, 5).int()), score=lambda s, b, h, i, j: s * 2).sum().backward()
    before = dispatch._select.cache_info()
    onchip.attention(q, k, v, mask=Causal() & Document(torch.ones(1, 5).int()), score=lambda s, b, h, i, j: s * 2).sum().backward()
    after = dispatch._select.cache_info()
    assert after.misses == before.misses
