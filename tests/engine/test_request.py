"""Stop strings, however tokens cut them; the end of a text; and parameters that cannot be."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.engine.grammar import Grammar
from onchip.engine.request import Request, SamplingParams
from onchip.engine.text import StopText


class Letters:
    """A tokenizer's stream whose token `i` is the text of `pieces[i]`; `tail` comes at the end."""

    def __init__(self, pieces, tail=""):
        self.pieces, self.tail = list(pieces), tail

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return self.tail


def run(pieces, stop, tail=""):
    """The pieces that come out, one a token (and one for the end, if nothing stopped the text), and the text in all."""
    text = StopText(Letters(pieces, tail), stop)
    out = []
    for i in range(len(pieces)):
        out.append(text.push(i))
        if text.stopped:
            break
    else:
        out.append(text.finish())
    assert "".join(out) == text.text
    return out, text


# ---- stop strings


def test_no_stop_string_holds_nothing_back():
    assert run(["He", "llo", ""], ())[0] == ["He", "llo", "", ""]


def test_a_stop_string_is_not_part_of_the_text():
    out, text = run(["one ", "two END three"], ["END"])
    assert out == ["one ", "two "] and text.stopped


@pytest.mark.parametrize("pieces", [["a\n", "\nb"], ["a", "\n", "\n", "b"], ["a\n\nb"], ["a", "\n\nb"], ["a\n\n", "b"]])
def test_split_over_tokens(pieces):
    out, text = run(pieces, ["\n\n"])
    assert text.text == "a" and text.stopped
    assert "\n" not in "".join(out)


def test_what_may_begin_a_stop_string_waits():
    out, text = run(["see <", "|e", "nd", " no", "t"], ["<|end|>"])
    assert out == ["see ", "", "", "<|end no", "t", ""] and not text.stopped


def test_a_beginning_inside_a_beginning():
    """ "aab" in "aaab": the first "a" is let go, the other two still wait."""
    out, text = run(["a", "a", "a", "b", "c"], ["aab"])
    assert out == ["", "", "a", ""] and text.stopped and text.text == "a"


def test_the_first_of_several_wins():
    assert run(["one two ", "three"], ["three", "two"])[1].text == "one "
    assert run(["xabcd"], ["bc", "abcd"])[1].text == "x"


def test_one_stop_string_begins_another():
    out, text = run(["sto", "p"], ["stop!", "stop"])
    assert text.text == "" and text.stopped and out == ["", ""]


def test_what_waits_at_the_end_comes_out():
    out, text = run(["yes <|", "en"], ["<|end|>"])
    assert out == ["yes ", "", "<|en"] and text.text == "yes <|en" and not text.stopped


def test_the_streams_own_tail_can_complete_a_stop_string():
    text = run(["a b"], ["b!"], tail="!")[1]
    assert text.text == "a " and text.stopped


def test_the_first_tokens_are_free():
    text = StopText(Letters(["aE", "ND", "b", "END", "c"]), ["END", "NDb"], free=2)
    assert "".join(text.push(i) for i in range(5)) == text.text == "aENDb" and text.stopped


def test_nothing_comes_after_the_stop():
    text = StopText(Letters(["ab", "cd"]), ["b"])
    assert (text.push(0), text.push(1), text.finish()) == ("a", "", "") and text.text == "a"


TEXT = st.text("ab<", max_size=12)


@settings(deadline=None)
@given(TEXT, st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 12), max_size=6))
def test_any_cut_of_any_text(text, stop, cuts):
    """However the text is cut into tokens, it ends before the earliest stop string, and never shows a part of one."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    _, found = run(pieces, stop)
    if not any(s in text for s in stop):
        assert found.text == text and not found.stopped
        return
    assert found.stopped and text.startswith(found.text)
    assert not any(s in found.text for s in stop)
    assert any(text.startswith(s, len(found.text)) for s in stop)


# ---- a request


def request(pieces, stop=(), limit=5, ends=(), tail=""):
    return Request([1], SamplingParams(stop=stop), 0, limit, StopText(Letters(pieces, tail), stop), ends=frozenset(ends))


def test_length():
    r = request("abcdefg", limit=3, tail="~")
    assert [r.accept([i]) for i in range(3)] == ["a", "b", "c~"]
    assert (r.reason, r.completion().text, r.completion().tokens, r.completion().prompt) == ("length", "abc~", [0, 1, 2], [1])


def test_eos_ends_and_is_no_text():
    r = request(["a", "<", "EOS"], stop=["<|"], ends=[2])
    assert [r.accept([0]), r.accept([1])] == ["a", ""]
    assert r.reason is None
    assert r.accept([2]) == "<"  # what waited comes out
    assert (r.reason, r.completion().text, r.tokens) == ("stop", "a<", [0, 1, 2])


def test_eos_ignored():
    r = request(["a", "EOS", "b"], limit=3)
    for i in range(3):
        r.accept([i])
    assert (r.reason, r.completion().text) == ("length", "aEOSb")


def test_stop_string_ends():
    r = request(["a", "b", "c"], stop=["b"])
    r.accept([0])
    assert r.accept([1]) == "" and r.reason == "stop" and r.completion().text == "a"


def test_stop_string_in_the_last_token_counts_as_stop():
    r = request(["ab"], stop=["b"], limit=1)
    assert r.accept([0]) == "a" and r.reason == "stop"


def test_the_time_of_the_first_token_stays():
    r = request("abc")
    r.accept([0])
    first = r.first_token_at
    r.accept([1])
    assert first is not None and r.first_token_at == first


def test_several_tokens_at_once():
    """What comes after the end is no part of it."""
    r, new = request("abcdefg", limit=3, tail="~"), [0, 1, 2, 3, 4]
    assert r.accept(new) == "abc~" and new == r.tokens == [0, 1, 2] and r.reason == "length"
    r, new = request("abcdefg", ends=[2]), [1, 2, 3]
    assert r.accept(new) == "b" and new == r.tokens == [1, 2] and r.reason == "stop"


# ---- parameters


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": -1}, r"max_tokens is -1; give 0 \(the prompt alone\) or more"),
        ({"max_tokens": 2**31, "min_tokens": 2**31}, "min_tokens is 2147483648; give 0 to max_tokens, 2147483647"),
        ({"temperature": -0.1}, r"temperature is -0.1; give 0 \(always the likeliest token\) to 1e5"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 2**31}, r"top_k is 2147483648; give 0 \(all\) to 2147483647"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; give more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 1.0}, "min_p is 1.0; give at least 0"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"seed": 2**63}, "seed is 9223372036854775808; give a 64-bit integer"),
        ({"stop": "end"}, "stop is 'end'; give a list of strings"),
        ({"stop": [""]}, r"stop is \[''\]"),
        ({"stop": [3]}, r"stop is \[3\]"),
        ({"typical_p": 0.0}, "typical_p is 0.0; give more than 0 and at most 1"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids is \[-1\]; give a list of token ids"),
        ({"min_tokens": 257}, "min_tokens is 257; give 0 to max_tokens, 256"),
        ({"n": 0}, "n is 0; give 1 to 65536"),
        ({"n": 10**30}, "n is 1000"),
        ({"stop_token_ids": [True]}, r"stop_token_ids is \[True\]; give a list of token ids"),
        ({"stop_token_ids": b"x"}, "stop_token_ids is b'x'; give a list of token ids"),
        ({"stop_token_ids": torch.tensor(3)}, "stop_token_ids is tensor"),
        ({"stop": torch.tensor(3)}, "stop is tensor"),
        ({"logit_bias": {True: 1.0}}, "logit_bias is {True: 1.0}"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give 0.001 to 1000"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty is 1e-46"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias is {3: nan}; give {token id: -1e30 to 1e30, or an infinity}"),
        ({"logit_bias": {3: 10**400}}, "logit_bias is {3: 1000"),
        ({"logit_bias": dict.fromkeys(range(500), 1.0)}, "logit_bias is .*; give at most 496 tokens"),
        ({"logprobs": 21}, "logprobs is 21; give 0 to 20, or None"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; give 0 to 20, or None"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; give a whole number"),
        ({"max_tokens": None}, "max_tokens is None; give a whole number"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number, or None"),
        ({"logprobs": True}, "logprobs is True; give a whole number, or None"),
        ({"temperature": "1"}, "temperature is '1'; give a number"),
        ({"stop": 5}, "stop is 5; give a list of strings, which may be empty"),
        ({"stop_token_ids": None}, "stop_token_ids is None; give a list"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; give {token id: number}"),
        ({"logit_bias": {5: "x"}}, "logit_bias is {5: 'x'}; give {token id: -1e30"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; give True or False"),
        ({"adapter": 3}, "adapter is 3; give a name, or None"),
        ({"grammar": "a+"}, r"grammar is 'a\+'; give Grammar\('json', schema\), or None"),
        ({"grammar": Grammar("regex", "a"), "min_tokens": 1}, "min_tokens is 1; give 0 beside a grammar"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_parameters_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=f"^SamplingParams: {words}"):
        SamplingParams(**given)


def test_a_tiny_temperature_is_none_and_many_tokens_are_cut_later():
    assert [SamplingParams(temperature=t).temperature for t in (1e-40, 9e-6, 1e-5)] == [0, 0, 1e-5]
    assert SamplingParams(max_tokens=10**12, min_tokens=3).max_tokens == 10**12


def test_stops_that_can_be_read_only_once():
    """The check would read them, and nothing would stop."""
    with pytest.raises(ValueError, match=r"^SamplingParams: stop is .*; give a list"):
        SamplingParams(stop=iter(["end"]))
