"""Answers in a given form: a JSON schema, a regular expression or a Lark grammar as a mask over the vocabulary, by llguidance (Moskal et al., 2025).

llguidance walks a trie of the vocabulary's bytes beside the parser, so that a mask of most grammars takes tens of microseconds and nothing is compiled
ahead. Ambiguous ones take longer, and end where they would keep a batch waiting: see LIMITS and BEYOND.
It is an extra (`pip install '.[serve]'`) and is imported by the first grammar.
"""

import contextlib
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from onchip.models.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark")
# JSON on one line with fixed separators: with free white space a small model may fill its context with line breaks
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

LONGEST = 1 << 16  # characters; one of 400,000 keeps a thread for 0.8 s
# llguidance goes down a chain of rules by recursion: of the longest that LONGEST can say 16 to 32 MiB, with parentheses around each up to 114
STACK = 256 << 20
# What no limit of llguidance bounds: of 5,000 terminals, or of as many repetitions, one in another, it reads for half a minute, of 1,000 for 0.2 s; and for a
# multipleOf of 4,000,037 it made 1.9 GB of states in 44 s
MOST_REPEATS, MOST_MULTIPLE = 1_000, 100_000

# Of llguidance's 1,000,000, 50,000, 200,000 and 250,000: with these the worst of ten hostile grammars takes 13 ms for its first masks (AMD Zen 5, 49,152
# tokens), before 1.2 s, and `a?` ten thousand times is refused; a choice of 1,500 words, an enum of 3,000 and a schema of 200 fields go through.
LIMITS = {"initial_lexer_fuel": 50_000, "step_max_items": 5_000, "step_lexer_fuel": 100_000, "max_lexer_states": 50_000}
# An ambiguous grammar stays below them for 60 tokens, and comes to 0.4 s a mask. So a server has a `Budget` too
EACH, BEYOND = 0.002, 0.1
KEPT = 8  # grammars, the last ones: what their lexers have learnt makes a mask of 64 answers 2.4 ms instead of 11


class GrammarError(ValueError):
    """A grammar that cannot be read, or a token that it does not allow."""


@dataclass(frozen=True)
class Grammar:
    """The form of an answer: `kind` is "json" (a JSON schema), "regex" or "lark" (llguidance's EBNF, first rule `start`); `text` is its source. JSON comes
    on one line. While an answer has one, each step waits for the last token of the whole batch.

    References of a schema to files or addresses are errors: nothing outside of the text is read.
    """

    kind: str
    text: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise GrammarError(f"Grammar: kind is {self.kind!r}; give one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise GrammarError(f"Grammar: text is {self.text!r:.60}; give a str, of a schema json.dumps(schema)")
        if len(self.text) > LONGEST:
            raise GrammarError(f"the {self.kind} grammar has {len(self.text)} characters; give one of at most {LONGEST}")

    @staticmethod
    def of_choices(choices: Sequence[str]) -> "Grammar":
        """One of these texts and nothing else."""
        if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise GrammarError(f"Grammar: choices are {choices!r:.80}; give a list of at least one text, none of them empty")
        return Grammar("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The UTF-8 that a token adds to a text, b"" for one that is no text. It is that of a token after another: at the start SentencePiece drops a space."""
    letter, silent = tokenizer.encode("a", special=False)[-1], tokenizer.special | tokenizer.eos
    return lambda token: b"" if token in silent else tokenizer.piece(token, letter)


class Budget:
    """What the masks of one call may take: seconds of the processor, EACH a token and BEYOND that for all its answers together."""

    def __init__(self):
        self.over = 0.0

    def spend(self, seconds: float) -> None:
        """Account for one token. Raises GrammarError when there is no more."""
        self.over = max(0.0, self.over + seconds - EACH)
        if self.over > BEYOND:
            raise GrammarError(f"the grammar takes {BEYOND} s more than {EACH} s a token; give one that reads its text in fewer ways")


class Vocabulary:
    """What llguidance needs to know of a tokenizer, made once a model (0.2 s for 49,152 tokens): the bytes of each token; and the last grammars read.

    vocab   the logits' width, which may exceed the tokenizer's: what has no text is never allowed.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int):
        try:
            import llguidance
        except ImportError:
            raise GrammarError("a grammar needs llguidance, which is not installed; pip install '.[serve]' in a checkout") from None
        if tokenizer is None:
            raise GrammarError("this model has no tokenizer.json, and a grammar is about text; leave it out")
        if not tokenizer.eos:
            raise GrammarError("a grammar needs a token that ends the answer, and this model's tokenizer names none; set eos_token in tokenizer_config.json")
        self.words = -(-vocab // 32)
        self._read: OrderedDict[Grammar, Matcher] = OrderedDict()  # in order of use
        spell = speller(tokenizer)
        self.tokenizer = llguidance.LLTokenizer(_Wrapped(tokenizer, [spell(i) for i in range(vocab)]), n_vocab=vocab, eos_token=sorted(tokenizer.eos))

    def matcher(self, grammar: Grammar, budget: Budget | None = None) -> "Matcher":
        """For one answer, or to be copied for several of one call, which share the budget; None: there is no end to it.

        Raises GrammarError for a grammar that cannot be read, or is too complex. Takes up to a second for a very large one, without the GIL.
        """
        first = self._read.pop(grammar, None) or Matcher(self, grammar)
        self._read[grammar] = first
        if len(self._read) > KEPT:
            self._read.popitem(last=False)  # one call, as another thread may forget one meanwhile
        return first.copy(budget)

    def forget(self, grammar: Grammar) -> None:
        """Have it read anew by the next call: what its lexer has learnt may be what is too much."""
        self._read.pop(grammar, None)


class _Wrapped:
    """The interface by which llguidance reads a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]):
        self._tokenizer, self.tokens = tokenizer, pieces
        tokenizer.literal("")  # which copies the tokenizer once: not in the time of the first grammar's budget
        self.eos_token_id = min(tokenizer.eos)
        self.special_token_ids = sorted(tokenizer.special | tokenizer.eos)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.literal(text)


class Matcher:
    """One answer on its way through a grammar: the engine calls `fill` before each token and `accept` after it. Not to be shared by two requests.

    Pickled it is its grammar and its tokens, and its `Vocabulary`, for which the pickler has to have a way.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, tokens: Sequence[int] = ()):
        self.vocabulary, self.grammar, self.budget, self._tokens = vocabulary, grammar, None, []
        _check_size(grammar)
        self._matcher = _deep(_read, vocabulary.tokenizer, grammar)
        if self._matcher.is_error():
            raise GrammarError(f"the {grammar.kind} grammar {grammar.text!r:.60} cannot be used: {_line(self._matcher.get_error())}")
        for token in tokens:
            self.accept(token)

    def copy(self, budget: Budget | None = None) -> "Matcher":
        """For another answer of the same form, and of the same call unless it has a budget of its own: the grammar is not read again."""
        twin = object.__new__(Matcher)
        twin.vocabulary, twin.grammar, twin.budget = self.vocabulary, self.grammar, budget or self.budget
        twin._tokens, twin._matcher = list(self._tokens), self._matcher.deep_copy()
        return twin

    def __reduce__(self):
        if self.budget is not None:
            raise TypeError("a grammar's budget is seconds of one processor")
        return Matcher, (self.vocabulary, self.grammar, self._tokens)

    def fill(self, row: Tensor) -> None:
        """Set bit i % 32 of word i // 32 of `row` (int32 [ceil(vocab / 32)], contiguous, on the CPU) where token i may come next, and no other."""
        words = self.vocabulary.words
        if row.numel() != words or not row.is_contiguous() or row.device.type != "cpu":
            raise GrammarError(f"fill: row is {list(row.shape)} on {row.device}; give contiguous int32 [{words}] on the CPU")
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * words)
        self._check(begin)

    def first(self) -> None:
        """Raises GrammarError for a grammar that leaves no first token."""
        self.fill(torch.empty(self.vocabulary.words, dtype=torch.int32))

    def accept(self, token: int) -> None:
        """Take the token that was chosen. Raises GrammarError for one that the last mask did not allow."""
        if not self._matcher.is_stopped():  # past its end an answer has no grammar, as with ignore_eos
            begin = time.thread_time()
            self._matcher.consume_token(token)
            self._check(begin)
            self._tokens.append(token)

    def _check(self, begin: float) -> None:
        if self._matcher.is_error():
            self.vocabulary.forget(self.grammar)
            raise GrammarError(f"the grammar was left: {_line(self._matcher.get_error())}")
        if self.budget is not None:
            self.budget.spend(time.thread_time() - begin)


_STARTING = threading.Lock()  # the size of a stack is the process's until the thread has started


def _deep(call: Callable, *given: object) -> Any:
    """`call(*given)` on a stack of its own, deep enough for all that `LONGEST` characters can say: past a stack's end the process dies."""
    with ThreadPoolExecutor(1, "onchip-deep") as thread:
        with _STARTING:
            before = threading.stack_size(STACK)
            try:
                done = thread.submit(call, *given)
            finally:
                threading.stack_size(before)
        return done.result()


def _read(tokenizer: Any, grammar: Grammar) -> Any:
    import llguidance

    return llguidance.LLMatcher(tokenizer, _source(grammar), log_level=0, limits=llguidance.LLParserLimits(**LIMITS))


# what stands between quotes or slashes of a Lark text, or behind // or #, in which nothing is repeated
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')


def _check_size(grammar: Grammar) -> None:
    """Raises GrammarError for what would take seconds, or gigabytes, to be read."""
    multiples, rest = _schemas(grammar)
    if grammar.kind == "lark" and (count := len(re.findall(r"[*+?~{[&]|[A-Z][A-Z0-9_]*(?:\.\d+)?\s*:", _QUOTED.sub("", rest)))) > MOST_REPEATS:
        raise GrammarError(f"the lark grammar has {count} terminals and signs *, +, ?, ~, {{}}, [] and &; {MOST_REPEATS} are the most: give a smaller one")
    if math.lcm(*multiples) > MOST_MULTIPLE:
        raise GrammarError(
            f"all multipleOf of the {grammar.kind} grammar, without zeros at the end, have a least common multiple of more than {MOST_MULTIPLE}; "
            "give smaller or fewer ones"
        )


def _schemas(grammar: Grammar) -> tuple[list[int], str]:
    """The digits of each `multipleOf` of a schema, or of those in a Lark text: remainders of 0.25 and 2500 are those of 25; and the text around schemas."""
    found: list[int] = []

    def collect(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name == "multipleOf" and isinstance(value, Decimal) and value > 0:
                found.append(int("".join(map(str, value.as_tuple().digits)).strip("0")))

    read = json.JSONDecoder(object_pairs_hook=collect, parse_float=Decimal, parse_int=Decimal).raw_decode
    text, rest, end = grammar.text.lstrip(), [], 0
    starts = [0] if grammar.kind == "json" else [match.end() for match in re.finditer(r"%json\s*", text)] if grammar.kind == "lark" else []
    for start in starts:
        with contextlib.suppress(ValueError, RecursionError, ArithmeticError):  # llguidance says what is wrong; it takes 128 levels, fewer than Python
            rest.append(text[end:start])
            end = start
            _, end = read(text, start)
    return found, "".join([*rest, text[end:]])


def _source(grammar: Grammar) -> str:
    """llguidance's own form of a grammar."""
    import llguidance

    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:  # it would take the slash that ends it in llguidance's form
            raise GrammarError(f"the regex {grammar.text!r:.60} ends with a backslash; write two for one")
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    text = "{}" if grammar.text.strip() == "true" else grammar.text
    if text.strip() == "false":
        raise GrammarError("the JSON schema 'false' cannot be used: it allows no answer; give an object, or true for any JSON")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
    except ValueError as error:
        raise GrammarError(f"the JSON schema {grammar.text!r:.60} cannot be used: {_line(str(error))}") from None


def _line(text: str) -> str:
    """The part of llguidance's message that says what is wrong, as one line; the state of its parser follows it."""
    return " ".join(text.partition("\n<state>")[0].split())[:300]
