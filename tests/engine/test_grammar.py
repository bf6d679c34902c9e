"""Grammars as masks: whatever is drawn from what they allow has the asked form, and nothing else is read."""

import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict

import pytest
import torch

import tiny
from onchip.engine.grammar import Budget, Grammar, GrammarError, Matcher, Vocabulary, speller
from onchip.engine.llm import LLM
from onchip.engine.request import SamplingParams
from onchip.models.tokenizer import Tokenizer

VOCAB = 331  # wider than the tokenizer's 320, and no multiple of 32
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny.save(tmp_path_factory.mktemp("tiny"), weights=False))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, VOCAB)


def allowed(matcher) -> list[int]:
    row = torch.full((-(-VOCAB // 32),), -7, dtype=torch.int32)  # what was there must not matter
    matcher.fill(row)
    bits = (row[:, None] >> torch.arange(32)) & 1
    assert not bits.flatten()[VOCAB:].any()
    return bits.flatten().nonzero().flatten().tolist()


def draw(tokenizer, matcher, seed: int, most: int = 300) -> str:
    """A random walk through what is allowed, until it ends."""
    dice, tokens = random.Random(seed), []
    for _ in range(most):
        token = dice.choice(allowed(matcher))
        matcher.accept(token)
        if token in tokenizer.eos:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {tokenizer.decode(tokens)!r}")


@pytest.mark.parametrize("seed", range(5))
def test_what_is_drawn_has_the_form(tokenizer, vocabulary, seed):
    text = draw(tokenizer, vocabulary.matcher(Grammar("json", json.dumps(PERSON))), seed)
    assert text.startswith('{"name": "') and ', "age": ' in text  # on one line, with fixed separators
    person = json.loads(text)
    assert {"name", "age"} <= set(person) <= {"name", "age", "tags"} and len(person["name"]) <= 5 and 0 <= person["age"] <= 150
    code = draw(tokenizer, vocabulary.matcher(Grammar("regex", "[0-9]{3}-(x|y)")), seed)
    assert code[:3].isdigit() and code[3:] in ("-x", "-y")
    sum_ = draw(tokenizer, vocabulary.matcher(Grammar("lark", 'start: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]?/')), seed)
    assert eval(sum_) >= 2 and " " not in sum_
    choices = ['say "no"', "yes", "ça va"]
    assert draw(tokenizer, vocabulary.matcher(Grammar.of_choices(choices)), seed) in choices


def test_what_is_not_allowed_is_refused(tokenizer, vocabulary):
    matcher = vocabulary.matcher(Grammar("regex", "ab"))
    (b,) = tokenizer.encode("b")
    assert b not in allowed(matcher) and not set(tokenizer.eos) & set(allowed(matcher))
    with pytest.raises(GrammarError, match="left"):
        matcher.accept(b)
    with pytest.raises(GrammarError, match="left"):
        allowed(matcher)


def test_two_matchers_of_one_grammar_do_not_know_each_other(tokenizer, vocabulary):
    one, other = (vocabulary.matcher(Grammar("regex", "a+b")) for _ in range(2))
    before = allowed(other)
    one.accept(tokenizer.encode("a")[0])
    assert allowed(one) != before == allowed(other)


def test_a_grammar_is_read_once_while_it_is_among_the_last(tokenizer, vocabulary, monkeypatch):
    """What its lexer has learnt serves the next answers; their tokens and budgets are their own. What fails is read anew."""
    read, init = [], Matcher.__init__
    monkeypatch.setattr(Matcher, "__init__", lambda self, *given: (read.append(given[1]), init(self, *given))[1])
    monkeypatch.setattr("onchip.engine.grammar.KEPT", 2)
    monkeypatch.setattr(vocabulary, "_read", OrderedDict())
    forms = [Grammar("regex", f"x{i}y") for i in range(3)]
    one, other = vocabulary.matcher(forms[0], Budget()), vocabulary.matcher(forms[0], Budget())
    one.accept(tokenizer.encode("x")[0])
    assert allowed(one) != allowed(other) and one.budget is not other.budget and one.copy().budget is one.budget
    for form in (forms[1], forms[0], forms[2], forms[0], forms[1]):  # 1 has left when 2 came
        vocabulary.matcher(form)
    assert read == [forms[0], forms[1], forms[2], forms[1]]
    with pytest.raises(GrammarError, match="left"):
        one.accept(tokenizer.encode("b")[0])
    vocabulary.matcher(forms[0])
    assert read[4:] == [forms[0]]


def test_a_budget_is_for_all_answers_of_a_call(vocabulary):
    budget = Budget()
    budget.spend(0.09)
    budget.spend(0.0)  # a token that took less
    assert budget.over == pytest.approx(0.086)
    with pytest.raises(GrammarError, match=r"0\.1 s more than 0\.002 s a token"):
        budget.spend(0.05)


def test_after_its_end_an_answer_is_free(tokenizer, vocabulary):
    matcher = vocabulary.matcher(Grammar("regex", "a"))
    matcher.accept(tokenizer.encode("a")[0])
    (eos,) = tokenizer.eos
    assert allowed(matcher) == [eos]
    matcher.accept(eos)
    matcher.accept(tokenizer.encode("b")[0])  # as with ignore_eos


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (("json", "{"), "cannot be used"),
        (("json", '{"type": "objct"}'), "Invalid type"),
        (("json", '{"$ref": "file:///etc/passwd"}'), "does not fetch"),
        (("json", '{"$ref": "http://127.0.0.1:1/x"}'), "does not fetch"),
        (("regex", "(["), "unclosed"),
        (("lark", "start: foo"), "unknown name"),
        (("lark", 'start: x\n%import "/etc/passwd"'), "cannot be used"),
        (("gbnf", "x"), "kind is 'gbnf'"),
    ],
)
def test_a_grammar_that_cannot_be_read_says_why(vocabulary, grammar, words):
    with pytest.raises(GrammarError, match=words) as error:
        vocabulary.matcher(Grammar(*grammar))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (("json", json.dumps({"properties": {"a": {"multipleOf": 4000037}}})), "least common multiple of more than 100000"),
        (("json", '{"allOf": [{"multipleOf": 997}, {"multipleOf": 0.0101}]}'), "least common multiple"),  # 101 ten-thousandths
        (("json", '{"\\u006dultipleOf": 4000037}'), "least common multiple"),
        (("lark", 'start: %json {"multipleOf": 4000037}'), "least common multiple"),
        (("json", '{"multipleOf": 4000037, "$defs": {"a": {"multipleOf": 1e-2000000}}}'), "least common multiple"),
        (("json", '{"multipleOf": 1e1000000}'), "out of range"),
        (("json", '{"maximum": 1e9999999999999999999}'), "out of range"),
        (("regex", "a?" * 10_000), "too big"),
        (("lark", "start: A\nA: " + "/a/+ " * 1_001), "has 1002 terminals and signs"),
        (("lark", "start: A\nA: /a/" + " & /a/" * 1_001), "has 1002 terminals and signs"),
        (("lark", "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(1_001))), "has 1001 terminals"),
        (("lark", "start: " + "a" * 65_536), "has 65543 characters; give one of at most 65536"),
    ],
)
def test_a_grammar_that_would_take_seconds_is_refused(vocabulary, grammar, words):
    begin = time.process_time()
    with pytest.raises(GrammarError, match=words) as error:
        vocabulary.matcher(Grammar(*grammar))
    assert "\n" not in str(error.value) and time.process_time() - begin < 2


def test_a_grammar_of_some_size_is_taken(vocabulary):
    prices = {f"price {i}": {"type": "number", "multipleOf": 0.01 if i % 2 else 5} for i in range(40)}
    for schema in ({"enum": [f"value number {i}" for i in range(1000)]}, {"type": "object", "properties": prices}):
        assert allowed(vocabulary.matcher(Grammar("json", json.dumps(schema))))
    for multiple in (86400, 10**9):
        assert allowed(vocabulary.matcher(Grammar("json", json.dumps({"type": "integer", "multipleOf": multiple}))))
    fields = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(1001)}}
    assert allowed(vocabulary.matcher(Grammar("lark", f"start: %json {json.dumps(fields)}")))
    assert allowed(vocabulary.matcher(Grammar.of_choices(["*+?~{" * 300, "//"])))  # nothing of these is repeated


DEEP = """
import sys, tempfile, threading
from pathlib import Path
import tiny
from onchip.engine.grammar import Grammar, Matcher, Vocabulary
from onchip.models.tokenizer import Tokenizer
vocabulary = Vocabulary(Tokenizer.load(tiny.save(Path(tempfile.mkdtemp()), weights=False)), 331)
for body, count in (("{}", 4_600), ("(" * 27 + "{}" + ")" * 27, 950)):
    for name, count in ("r", count), ("R", min(count, 999)):
        rules = [f"{name}{i}: {body.format(f'{name}{i + 1}')}" for i in range(count)]
        matcher = vocabulary.matcher(Grammar("lark", "\\n".join([f"start: {name}0", *rules, f'{name}{count}: "x"'])))
        matcher.first()
"""


def test_a_long_chain_of_rules_does_not_end_the_process():
    """llguidance goes down it by recursion; what it has read is used on any thread."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])


def test_the_size_of_stacks_is_as_it_was(vocabulary):
    before = threading.stack_size()
    vocabulary.matcher(Grammar("regex", "stack"))
    assert threading.stack_size() == before


def test_the_tokenizer_is_copied_before_a_budget_begins(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_spelling", None)
    Vocabulary(tokenizer, VOCAB)
    assert tokenizer._spelling is not None


def test_an_end_that_a_bias_forbids_is_no_end(tmp_path):
    """Of a row of -inf alone token 0 is drawn, which is the end here."""
    llm = LLM(tiny.save(tmp_path / "tiny"), dtype="fp32", device="cpu")
    (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=30, grammar=Grammar("regex", "[ab]{3}"), logit_bias={0: -math.inf}))
    assert done.reason == "error: no token is left that both the mask of its tokens and its logit_bias allow"


@pytest.mark.parametrize("ahead", [False, True])
def test_no_step_runs_ahead_of_the_mask_of_its_token(tmp_path, ahead):
    """Of rows beside others that want none, and come and go."""
    llm = LLM(tiny.save(tmp_path), device="cpu", dtype="fp32", max_batch=3)
    llm.ahead = ahead
    asked = [SamplingParams(24, seed=i, temperature=1.0, ignore_eos=not i % 2, grammar=Grammar("regex", "(ab|cd){5}") if i % 2 else None) for i in range(6)]
    done = llm.generate([[1, 2, 3 + i] for i in range(6)], asked)
    for one, params in zip(done, asked, strict=True):
        assert len(one.tokens) == 24 if params.grammar is None else re.fullmatch("(ab|cd){5}", one.text), one


def test_a_markers_text_is_spelled(tokenizer, vocabulary):
    """The answer is the text, by tokens of letters: the marker itself would end it, or mean something else."""
    for marker in map(tokenizer._backend.id_to_token, sorted(tokenizer.special)):
        assert len(tokenizer.encode(marker, special=False)) == 1
        assert draw(tokenizer, vocabulary.matcher(Grammar.of_choices([f"a{marker}b"])), 0) == f"a{marker}b"


def test_rows_and_choices_are_checked(vocabulary):
    with pytest.raises(GrammarError, match="give contiguous int32"):
        vocabulary.matcher(Grammar("regex", "a")).fill(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(GrammarError, match="at least one text"):
        Grammar.of_choices([])
    with pytest.raises(GrammarError, match="choices are 'abc'; give a list"):
        Grammar.of_choices("abc")
    with pytest.raises(GrammarError, match=r"text is {'type': 'object'}; give a str, of a schema json\.dumps\(schema\)"):
        Grammar("json", {"type": "object"})


def test_the_bytes_of_tokens_make_the_text(tokenizer):
    text, spell = "the fox — waits 空 for memory", speller(tokenizer)
    assert b"".join(map(spell, tokenizer.encode(text))).decode() == text
    assert {spell(token) for token in tokenizer.eos} == {b""}
