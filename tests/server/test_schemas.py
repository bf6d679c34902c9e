"""What a request's body asks the engine for."""

import pytest
from pydantic import ValidationError

from onchip.engine.request import SamplingParams
from onchip.server.schemas import ChatRequest, CompletionRequest

SAME = {  # fields that the engine has by the same name
    "n": 3, "seed": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "top_k": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
    "stop": ["a", "b"], "min_tokens": 2, "stop_token_ids": [1, 2], "ignore_eos": True, "temperature": 0.7, "max_tokens": 9,
}  # fmt: skip


def chat(**body) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]} | body)


def plain(**body) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x"} | body)


@pytest.mark.parametrize("make", [chat, plain])
def test_every_field_reaches_the_engine(make):
    assert make(**SAME, logit_bias={"4": -1.5}).params(50, "lora") == SamplingParams(**SAME, logit_bias={4: -1.5}, adapter="lora")
    assert make(stop="end").params(50, None).stop == ["end"]
    assert make(top_k=-1).params(50, None).top_k == 0  # vLLM's "all"
    assert make(temperature=None, n=None).params(50, None).temperature == 1.0
    dropped = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "i", "prompt_cache_key": "k"}
    assert make(**dropped).params(50, None) == make().params(50, None)


def test_lengths():
    """A chat's answer is as long as the context allows, a completion's 16 tokens, as OpenAI has it."""
    assert (chat().params(50, None).max_tokens, plain().params(50, None).max_tokens) == (50, 16)
    assert chat(max_tokens=3, max_completion_tokens=4).params(50, None).max_tokens == 4


def test_log_probabilities():
    assert [chat(logprobs=a, top_logprobs=b).params(50, None).logprobs for a, b in ((None, None), (False, 0), (True, None), (True, 4))] == [None, None, 0, 4]
    assert [(p.logprobs, p.prompt_logprobs) for p in (plain(logprobs=2, echo=echo).params(50, None) for echo in (True, False))] == [(2, 2), (2, None)]


def test_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]).messages
    assert [message.plain() for message in found] == [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]


def test_samples_that_would_be_drawn_and_not_returned():
    assert plain(n=2, best_of=2).samples == 2
    with pytest.raises(ValidationError, match="best_of is 3 and n is 2; this server returns every sample"):
        plain(n=2, best_of=3)
