"""flash-attn's names: what `install` puts where, arguments in flash-attn's order, what is refused, and the helpers beside attention."""

import importlib
import importlib.util
import inspect
import sys
import types

import pytest
import torch
from test_flash_attn import close, each, formula, offsets, tensors

import onchip
from onchip.integrations import flash_attn
from onchip.integrations.flash_attn import bert_padding, fa2, fa2_private, fa3, fa3_private, fa4, fa4_private, rotary

# ---- names

TAIL = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
THIRD = "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SCALES = "q_descale=None, k_descale=None, v_descale=None"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    fa2.flash_attn_func: f"q, k, v, {TAIL}",
    fa2.flash_attn_kvpacked_func: f"q, kv, {TAIL}",
    fa2.flash_attn_qkvpacked_func: f"qkv, {TAIL}",
    fa2.flash_attn_varlen_func: f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    fa2.flash_attn_varlen_kvpacked_func: f"q, kv, {LENGTHS}, {TAIL}",
    fa2.flash_attn_varlen_qkvpacked_func: f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    fa2.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
    "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, "
    "alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    fa3.flash_attn_func: f"q, k, v, softmax_scale=None, causal=False, qv=None, {SCALES}, {THIRD}",
    fa3.flash_attn_varlen_func: f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, {SCALES}, {THIRD}",
    fa3.flash_attn_qkvpacked_func: f"qkv, softmax_scale=None, causal=False, {SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    fa3.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    f"{SCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    fa3.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    fa4.flash_attn_func: "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, "
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, "
    "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False",
    fa4.flash_attn_varlen_func: "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, "
    "seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_arguments_and_defaults_are_flash_attns(function):
    """flash-attn 2.8.4, FlashAttention-3 and 4 as of August 2026."""
    parameters = inspect.signature(function).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == SIGNATURES[function]


@pytest.fixture
def clean():
    """Nobody's flash_attn in sys.modules, before and after."""
    names = lambda: [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface", "flash_attn_3")]  # noqa: E731
    before = {name: sys.modules.pop(name) for name in names()}
    yield
    flash_attn.uninstall()
    for name in names():
        del sys.modules[name]
    sys.modules.update(before)


def test_install_and_its_undo(clean):
    modules = dict(sys.modules)
    flash_attn.install()
    flash_attn.install()  # changes nothing
    for name, function in (
        ("flash_attn", fa2.flash_attn_func),
        ("flash_attn.flash_attn_interface", fa2.flash_attn_varlen_func),
        ("flash_attn.bert_padding", bert_padding.unpad_input),
        ("flash_attn.layers.rotary", rotary.apply_rotary_emb),
        ("flash_attn.ops.triton.rotary", rotary.apply_rotary),
        ("flash_attn_interface", fa3.flash_attn_func),
        ("flash_attn_3.flash_attn_interface", fa3.flash_attn_with_kvcache),
        ("flash_attn.cute", fa4.flash_attn_func),
        ("flash_attn.cute.interface", fa4_private._flash_attn_fwd),
    ):
        module = importlib.import_module(name)
        assert getattr(module, function.__name__) is function
        assert importlib.util.find_spec(name).name == name and int(module.__version__[0]) >= 2
    from flash_attn.cute import flash_attn_varlen_func  # as others write it
    from flash_attn.layers import rotary as layer

    assert flash_attn_varlen_func is fa4.flash_attn_varlen_func and layer.apply_rotary_emb is rotary.apply_rotary_emb
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")
    flash_attn.uninstall()
    flash_attn.uninstall()  # changes nothing
    assert {n: m for n, m in sys.modules.items() if "flash_attn" in n} == {n: m for n, m in modules.items() if "flash_attn" in n}
    assert importlib.util.find_spec("flash_attn_interface") is None
    assert not hasattr(torch.ops.flash_attn_3, "fwd")


def test_an_installed_flash_attn_comes_back(clean):
    theirs = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.losses", "flash_attn_interface")}
    sys.modules.update(theirs)
    with flash_attn.installed():
        assert sys.modules["flash_attn"] is not theirs["flash_attn"] and "flash_attn.losses" not in sys.modules
        with flash_attn.installed():
            pass
        assert sys.modules["flash_attn"].flash_attn_func is fa2.flash_attn_func
        ours = sys.modules["flash_attn"]
        sys.modules["flash_attn"] = types.ModuleType("flash_attn")
        with pytest.raises(RuntimeError, match=r"flash_attn in sys\.modules is no longer"):
            flash_attn.uninstall()
        sys.modules["flash_attn"] = ours
    assert all(sys.modules[name] is module for name, module in theirs.items())


def test_libraries_that_look_for_flash_attn_do_not_stumble(clean):
    checks = pytest.importorskip("transformers.utils.import_utils")
    with flash_attn.installed():
        for check in (checks.is_flash_attn_2_available, checks.is_flash_attn_3_available, checks.is_flash_attn_4_available):
            assert getattr(check, "__wrapped__", check)() in (True, False)  # past the cache


def test_operators_run_and_leave(clean, device):
    q, k, v = tensors(device, (2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    with flash_attn.installed():
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True)
        dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(torch.ones_like(out), q, k, v, out, lse, is_causal=True)
        cached = torch.ops.flash_attn_3.fwd(q, k, v, seqused_k=torch.tensor([9, 4], dtype=torch.int32, device=device))[0]
        assert torch.ops.flash_attn_3.get_scheduler_metadata(2, 5, 9, 4, 2, 8, 8, q.dtype, torch.tensor([9], device=device)).numel() == 0
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    truth, truth_lse = each(formula, *theirs, causal=True)
    close(out, truth)
    close(lse, truth_lse)
    for ours, want in zip((dq, dk, dv), torch.autograd.grad(truth.sum(), theirs), strict=True):
        close(ours, want)
    close(cached[1], formula(q[1], k[1, :4], v[1, :4])[0])


# ---- refusals


def kv(device="cpu"):
    return tensors(device, (1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))


REFUSED = {
    "window_size (1, 2, 3) is not two integers": lambda q, k, v: fa2.flash_attn_func(q, k, v, window_size=(1, 2, 3)),
    "window_size (None, None) is not two integers": lambda q, k, v: fa3.flash_attn_func(q, k, v, window_size=(None, None)),
    "softcap -1.0 is negative": lambda q, k, v: fa2.flash_attn_func(q, k, v, softcap=-1.0),
    "attention_chunk -2 is negative": lambda q, k, v: fa3.flash_attn_func(q, k, v, attention_chunk=-2),
    "dropout 1.5 is not a probability": lambda q, k, v: fa2.flash_attn_func(q, k, v, 1.5),
    "v is None": lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, k=k, cache_seqlens=0),
    "cache_seqlens is None": lambda q, k, v: fa3.flash_attn_with_kvcache(q, k, v, k=k, v=v),
    "rotary_sin is None": lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, k, v, q, cache_seqlens=0),
    "rotary_cos without k": lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, rotary_cos=q, rotary_sin=q),
    "cache_batch_idx with block_table": lambda q, k, v: fa2.flash_attn_with_kvcache(q, k, v, block_table=q, cache_batch_idx=q),
    "num_heads_q is None": lambda q, k, v: fa3.flash_attn_qkvpacked_func(q),
    "qv with descale": lambda q, k, v: fa3.flash_attn_func(*(t.to(torch.float8_e4m3fn) for t in (q, k, v)), qv=q, q_descale=q[:, 0, :, 0]),
    "score_mod is of FlashAttention-4's CuTe interface": lambda q, k, v: fa4.flash_attn_func(q, k, v, score_mod=lambda s, *_: s),
    "mask_mod, aux_tensors is of": lambda q, k, v: fa4.flash_attn_func(q, k, v, mask_mod=lambda *_: True, aux_tensors=[q]),
    "gather_kv_indices is of": lambda q, k, v: fa4.flash_attn_varlen_func(q, k, v, gather_kv_indices=q),
    "onchip.attention(q, k, v, score=": lambda q, k, v: fa4.flash_attn_func(q, k, v, block_sparse_tensors=(q,)),
    "cu_seqlens_k with page_table": lambda q, k, v: fa4.flash_attn_varlen_func(q, k, v, page_table=q, cu_seqlens_k=q),
    "q is torch.float8_e4m3fn": lambda q, k, v: fa4.flash_attn_func(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))),
    "take float8_e4m3fn, these bfloat16": lambda q, k, v: fa2.flash_attn_with_kvcache(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))),
    "float8 is in flash_attn_interface": lambda q, k, v: fa4_private._flash_attn_fwd(q, k, v, k_descale=q),
    "gather_kv_indices is not in onchip": lambda q, k, v: fa4_private._flash_attn_bwd_sparse_mla(q, k, v),
    "rng_state is None": lambda q, k, v: fa2_private._flash_attn_backward(q, q, k, v, q, q, q, k, v, 0.1, 1.0, False, -1, -1, 0.0, None, False),
    "one is None; pack both": lambda q, k, v: fa3_private._flash_attn_forward(q, k, v, cu_seqlens_q=q),
    "S_dmask is of packed keys only": lambda q, k, v: fa2.flash_attn_varlen_func(q, k, v, q, q, 1, 1, 0.1, block_table=q, return_attn_probs=True),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_done_is_said(sentence):
    with pytest.raises((ValueError, onchip.Unsupported)) as error:
        REFUSED[sentence](*kv())
    assert sentence in str(error.value)


def test_a_table_too_narrow_is_a_runtime_error(device):
    q, pool = tensors(device, (1, 1, 2, 8), (4, 16, 2, 8))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    full = torch.tensor([16], dtype=torch.int32, device=device)
    fa2.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=full, block_table=table)
    for new, seqlens in ((q, full), (None, full + 1)):
        with pytest.raises(RuntimeError, match="block_table has 1 columns of 16 tokens"):
            fa2.flash_attn_with_kvcache(q, pool, pool, new, new, cache_seqlens=seqlens, block_table=table)


INT = torch.int32
NEW, WIDE = torch.zeros(3, 5, 2, 8), torch.zeros(64, 8)
OF_A_CACHE = {  # of 3 sequences, 16 slots, 2 heads of 8; the arguments beside q, k_cache and v_cache, and the sentence
    "heads": ({"k": NEW[:, :, :1], "v": NEW[:, :, :1]}, r"k is \[3, 5, 1, 8\], v \[3, 5, 1, 8\]; give both as \[3, new, 2, 8\]"),
    "more heads": ({"k": torch.zeros(3, 5, 3, 8), "v": torch.zeros(3, 5, 3, 8)}, r"k is \[3, 5, 3, 8\], v \[3, 5, 3, 8\]; give both as"),
    "one sequence": ({"k": NEW[:1], "v": NEW[:1]}, r"k is \[1, 5, 2, 8\], v \[1, 5, 2, 8\]; give both as \[3, new"),
    "one value": ({"k": NEW, "v": NEW[:, :1]}, r"k is \[3, 5, 2, 8\], v \[3, 1, 2, 8\]; give both as"),
    "one column": ({"k": NEW[..., :1], "v": NEW[..., :1]}, r"k is \[3, 5, 2, 1\], v \[3, 5, 2, 1\]; give both as"),
    "no batch": ({"k": NEW[0], "v": NEW[0]}, r"k is \[5, 2, 8\], v \[5, 2, 8\]; give both as"),
    "full": ({"k": NEW, "v": NEW, "cache_seqlens": torch.tensor([1, 2, 12], dtype=INT)}, "cache_seqlens is 1 to 12, 17 with the new tokens; give 0 to 16"),
    "full, a number": ({"k": NEW, "v": NEW, "cache_seqlens": 12}, "cache_seqlens is 12, 17 with the new tokens; give 0 to 16, the tokens of a sequence in k_c"),
    "too long": ({"cache_seqlens": torch.tensor([0, 2, 17], dtype=INT)}, "cache_seqlens is 0 to 17; give 0 to 16, the tokens of a sequence in k_cache"),
    "negative": ({"k": NEW, "v": NEW, "cache_seqlens": torch.tensor([0, -9, 7], dtype=INT)}, "cache_seqlens is -9 to 7, 12 with the new tokens; give"),
    "lengths": ({"cache_seqlens": torch.zeros(2, dtype=INT)}, r"cache_seqlens is torch.int32 \[2\] on cpu; give int32 \[3\], one a sequence of q"),
    "long rows": ({"cache_batch_idx": torch.arange(3)}, r"cache_batch_idx is torch.int64 \[3\] on cpu; give int32 \[3\], one a sequence of q, on cpu"),
    "rows": ({"cache_batch_idx": torch.arange(2, 5).int()}, "cache_batch_idx is 2 to 4; give 0 to 2, the rows of k_cache"),
    "rows, written": ({"k": NEW, "v": NEW, "cache_batch_idx": torch.arange(3).int() - 1}, "cache_batch_idx is -1 to 1; give 0 to 2, the rows of k_cache"),
    "padding": ({"cache_leftpad": torch.tensor([4, 5, 6], dtype=INT)}, "cache_leftpad is 4 to 6, negative or more than a sequence has; give 0 to"),
    "sequences": ({"q": torch.zeros(4, 1, 4, 8), "cache_seqlens": 3}, "q has 4 sequences, k_cache 3; give as many, or cache_batch_idx"),
    "queries": ({"q": torch.zeros(1, 4, 8)}, r"q is \[1, 4, 8\]; give \[batch, len_q, heads, dim\]"),
    "heads of q": ({"q": torch.zeros(3, 1, 3, 8)}, "q has 3 heads of 8, k_cache 2 of 8; give"),
    "rotary": ({"k": NEW, "v": NEW, "rotary_cos": WIDE, "rotary_sin": WIDE}, r"rotary_cos is \[64, 8\], rotary_sin \[64, 8\]; give both as \[positions"),
    "pools": ({"v_cache": torch.zeros(3, 15, 2, 8)}, r"k_cache is \[3, 16, 2, 8\], v_cache \[3, 15, 2, 8\]; give both as \[caches, capacity"),
}  # fmt: skip
OF_PAGES = {  # 6 pages of 4 tokens, 2 columns a sequence
    "overrun": ({"k": NEW, "v": NEW, "cache_seqlens": torch.tensor([1, 2, 4], dtype=INT)}, "9 .*columns of {}|{} has 2 columns of 4 tokens"),
    "pages": ({"table": torch.tensor([[0, 1], [2, 3], [4, 6]], dtype=INT), "cache_seqlens": 8}, "{} has pages 0 to 6 among those of a sequence; give 0 to 5"),
    "written": ({"k": NEW, "v": NEW, "table": torch.tensor([[0, 1], [2, 3], [-1, 4]], dtype=INT)}, "{} has pages -1 to 4 among those"),
    "long table": ({"table": torch.zeros(3, 2).long()}, r"{} is torch.int64 \[3, 2\] on cpu; give int32 \[3, most pages\], a row a sequence of q"),
    "rows": ({"table": torch.zeros(2, 2, dtype=INT)}, r"{} is torch.int32 \[2, 2\] on cpu; give int32 \[3, most pages\]"),
}  # fmt: skip


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("case", [*OF_A_CACHE, *(f"paged: {name}" for name in OF_PAGES)])
def test_what_a_cache_refuses_is_said_before_it_is_written(module, case):
    pages, table = case.startswith("paged: "), "block_table" if module is fa2 else "page_table"
    change, words = OF_PAGES[case.removeprefix("paged: ")] if pages else OF_A_CACHE[case]
    given = {"q": torch.zeros(3, 1, 4, 8), "cache_seqlens": torch.tensor([1, 2, 3], dtype=INT)}
    given |= {name: torch.full((6, 4, 2, 8) if pages else (3, 16, 2, 8), 7.0) for name in ("k_cache", "v_cache")}
    given |= {"table": torch.arange(6, dtype=INT).view(3, 2)} if pages else {}
    given |= change
    if pages:
        given[table] = given.pop("table")
    with pytest.raises((ValueError, RuntimeError), match=f"^flash_attn_with_kvcache: .*{words.replace('{}', table)}"):
        module.flash_attn_with_kvcache(**given)
    assert "v_cache" in change or all((given[name] == 7).all() for name in ("k_cache", "v_cache"))


def test_what_packed_new_keys_refuse():
    q, pool, cu = torch.zeros(5, 4, 8), torch.zeros(2, 8, 2, 8), torch.tensor([0, 2, 5], dtype=INT)
    new, used = torch.zeros(5, 2, 8), torch.tensor([1, 6], dtype=INT)
    call = lambda q=q, new=new, **rest: fa3.flash_attn_with_kvcache(q, pool, pool, new, new, **{"cache_seqlens": used - 1, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu} | rest)  # noqa: E501, E731  # fmt: skip
    assert call(max_seqlen_q=3).shape == q.shape
    for change, words in (
        ({"cache_seqlens": used}, "cache_seqlens is 1 to 6, 9 with the new tokens; give 0 to 8"),
        ({"cache_seqlens": 7}, "cache_seqlens is 7, 10 with the new tokens; give 0 to 8"),
        ({"new": new[:, :1]}, r"k is \[5, 1, 8\], v \[5, 1, 8\]; give both as \[new tokens, 2, 8\]"),
        ({"cu_seqlens_k_new": cu.long()}, r"cu_seqlens_k_new is torch.int64 \[3\] on cpu; give int32 \[3\]"),
        ({"q": q[None]}, r"q is \[1, 5, 4, 8\]; give \[tokens, heads, dim\], packed as cu_seqlens_q says"),
        ({"rotary_seqlens": used[:1], "rotary_cos": WIDE[:, :2], "rotary_sin": WIDE[:, :2]}, r"rotary_seqlens is torch.int32 \[1\] on cpu; give int32 \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"^flash_attn_with_kvcache: {words}"):
            call(**change)


@pytest.mark.parametrize("argument", ["q_descale", "k_descale", "v_descale"])
def test_scales_of_another_shape_are_refused(argument):
    q, k, v = (torch.zeros(3, 2, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    cu = torch.tensor([0, 2, 4, 6], dtype=INT)
    for shape in ((1,), (3, 4)):
        words, factors = rf"{argument} is \[{', '.join(map(str, shape))}\]; give \[3, 2\], one a sequence and head of k", {argument: torch.ones(shape)}
        with pytest.raises(ValueError, match=f"^flash_attn_with_kvcache: {words}"):
            fa3.flash_attn_with_kvcache(q, k, v, **factors)
        with pytest.raises(ValueError, match=f"^flash_attn: {words}"):
            fa3.flash_attn_func(q, k, v, **factors)
        with pytest.raises(ValueError, match=f"^flash_attn: {words}"):
            fa3.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 2, 2, **factors)


# ---- the passes on their own


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_a_softmax_over_more_keys(device, packed):
    """Ring attention: each block's backward pass takes the output and LSE of all of them."""
    q, k, v = tensors(device, (1, 6, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8))
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    truth = formula(*(t[0] for t in ours), softcap=5.0)[0][None]
    g = torch.randn_like(q)
    want = torch.autograd.grad(truth, ours, g.double())
    tail = (0.0, 8**-0.5, False, -1, -1, 5.0, None)
    parts, cuts = [], (slice(0, 4), slice(4, 10))
    flat = (lambda t: t[0]) if packed else (lambda t: t)
    for cut in cuts:
        given = [flat(t) for t in (q, k[:, cut], v[:, cut])]
        n = cut.stop - cut.start
        lengths = (offsets([6], device), offsets([n], device), 6, n) if packed else ()
        forward = fa2_private._flash_attn_varlen_forward if packed else fa2_private._flash_attn_forward
        out, lse, _, state = forward(*given, *lengths, *tail, False)
        parts.append((out, lse, given, lengths))
    out, lse = onchip.merge([(o, e) for o, e, *_ in parts])
    close(out, flat(truth))
    sums = torch.zeros_like(q)
    for cut, (*_, given, lengths) in zip(cuts, parts, strict=True):
        into = [torch.empty_like(t) for t in given]
        backward = fa2_private._flash_attn_varlen_backward if packed else fa2_private._flash_attn_backward
        rows = backward(flat(g), *given, out, lse, *into, *lengths, *tail, False, state)
        assert rows.shape == lse.shape
        sums += into[0] if not packed else into[0][None]
        for found, wanted in zip(into[1:], want[1:], strict=True):
            close(found, flat(wanted[:, cut]))
    close(sums, want[0])


def test_a_backward_pass_drops_what_the_forward_pass_dropped(device):
    q, k, v = tensors(device, (1, 6, 2, 8), (1, 10, 2, 8), (1, 10, 2, 8))
    tail = (0.5, 8**-0.5, True, -1, -1, 0.0, None)
    out, lse, weights, state = fa2_private._flash_attn_forward(q, k, v, *tail, True)
    dv = torch.empty_like(v)
    fa2_private._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, None, None, dv, *tail, True, state)
    kept = weights[0, :, :6, :10].clamp(min=0)
    share = kept / weights[0, :, :6, :10].abs().sum(-1, keepdim=True)
    close(dv[0, :, :, 0], 2 * share.sum(1).T)


def test_version_4s_passes(device):
    q, k, v = tensors(device, (2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    sink = torch.randn(4, device=device)
    into = torch.empty_like(q)
    out, lse, *_ = fa4_private._flash_attn_fwd(q, k, v, causal=True, learnable_sink=sink, out=into, return_lse=True)
    assert out is into
    theirs = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    truth, truth_lse = each(formula, *theirs[:3], causal=True, sink=theirs[3])
    g, g_lse = torch.randn_like(out), torch.randn_like(lse)
    dk = torch.empty_like(k)
    found = fa4_private._flash_attn_bwd(q, k, v, out, g, lse, causal=True, learnable_sink=sink, dlse=g_lse, dk=dk)
    assert found[1] is dk
    for ours, want in zip(found, torch.autograd.grad((truth, truth_lse), theirs, (g.double(), g_lse.double())), strict=True):
        close(ours, want)


# ---- in compiled graphs


def test_compiled_without_a_break(device):
    q, k, v = tensors(device, (2, 3, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    new, used = k[:, :1] * 2, torch.tensor([5, 3], dtype=torch.int32, device=device)
    cu_q, cu_k = offsets([3, 3], device), offsets([8, 8], device)

    def step(q, k, v, new, used):
        k, v = k.clone(), v.clone()
        return fa2.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=used, causal=True)

    calls = [
        (lambda q, k, v: fa2.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), softcap=3.0, alibi_slopes=q[0, 0, :, 0]), q, k, v),
        (lambda q, k, v: fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 8, causal=True), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)),
        (lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=4), q, k, v),
        (lambda q, k, v: fa4.flash_attn_func(q, k, v, window_size=(None, -2), return_lse=True)[0], q, k, v),
        (step, q, k, v, new, used),
    ]
    for function, *arguments in calls:
        close(torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments), function(*arguments))


# ---- padding and rotation


def test_padding_there_and_back(device):
    x = torch.randn(3, 5, 2, 4, device=device, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], device=device)
    unused = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5], device=device)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 4, 5, 10] and cu.dtype == torch.int32 and longest == 5 and used.tolist() == [3, 0, 5]
    back = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * (mask + unused)[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, (mask + unused)[..., None, None].expand_as(x).float())
    rows = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [1, 1, 1, 1, 0]], device=device)
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, rows)
    assert cu.tolist() == [0, 2, 3, 8, 9, 10, 11, 12] and longest == 5 and torch.equal(tokens, x.flatten(0, 1)[indices])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(device, interleaved):
    x = torch.randn(2, 6, 3, 24, device=device, requires_grad=True)
    angles = torch.rand(20, 8, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    shift = torch.tensor([3, 9], device=device)
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=shift)
    at = shift[:, None] + torch.arange(6, device=device)
    want = rotary.apply_rotary_emb_torch(x, cos[at], sin[at], interleaved)
    close(out, want)
    g = torch.randn_like(out)
    close(torch.autograd.grad(out, x, g)[0], torch.autograd.grad(want, x, g)[0])
    flat, cu = x.detach().flatten(0, 1), offsets([6, 6], device)
    close(rotary.apply_rotary_emb(flat, cos, sin, interleaved, cu_seqlens=cu, max_seqlen=6, seqlen_offsets=shift).unflatten(0, (2, 6)), want)
    qkv = torch.randn(2, 6, 3, 2, 24, device=device)
    _, k, v = qkv.clone().unbind(2)
    turned = rotary.apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=interleaved, seqlen_offsets=shift)
    assert turned.data_ptr() == qkv.data_ptr()
    close(turned[:, :, 1], rotary.apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=shift))
    assert torch.equal(turned[:, :, 2], v)


def test_rotary_module(device):
    """Tables grow; XPos scales queries up by what it scales keys down."""
    qkv = torch.randn(2, 6, 3, 2, 16, device=device)
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    plain = rotary.RotaryEmbedding(16, device=device)
    angles = torch.outer(torch.arange(9.0, device=device), plain.inv_freq)
    want = rotary.apply_rotary_emb_torch(q, angles.cos()[3:], angles.sin()[3:])
    turned_q, turned_kv = plain(q.clone(), kv.clone(), seqlen_offset=3)
    close(turned_q, want)
    close(plain(qkv.clone(), seqlen_offset=3)[:, :, 1:], turned_kv)
    scaled = rotary.RotaryEmbedding(16, scale_base=512, device=device)
    q2, kv2 = scaled(q.clone(), kv.clone())
    q1, kv1 = plain(q.clone(), kv.clone())
    close((q2 * kv2[:, :, 0]).sum(-1), (q1 * kv1[:, :, 0]).sum(-1))
    with pytest.raises(ValueError, match="give max_seqlen"):
        rotary.RotaryEmbedding(16)(q, kv, torch.tensor([1, 2]))
