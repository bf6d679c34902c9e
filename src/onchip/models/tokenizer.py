"""Text to token ids and back, and conversations to prompts: tokenizer.json of a folder, or the vocabulary inside a GGUF file."""

import codecs
import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from onchip.models import gguf
from onchip.models.kinds import INDEX, OBJECT, SWITCH, TEXT, Kind, check_keys, mapping_of, records
from onchip.models.weights import ModelError, read_json

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_ENDS = 16  # tokens that end a text: what a request may forbid has room for so many beside its own
TOKEN = Kind(
    "text, or an object whose content is text", lambda value: isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))
)
NAMED, LISTED = mapping_of("an object of names and texts", TEXT.fits), records("name", "template")
TEMPLATES = Kind(f"text, {NAMED.accepted}, or {LISTED.accepted}", lambda value: any(kind.fits(value) for kind in (TEXT, NAMED, LISTED))).or_none()
OWN = dict.fromkeys(SPECIAL, TOKEN.or_none()) | {"add_bos_token": SWITCH.or_none(), "chat_template": TEMPLATES}  # of tokenizer_config.json
ENDS = Kind("a token id, a list of them", lambda value: all(map(INDEX.fits, value if isinstance(value, list) else [value]))).or_none()
SAID = {"eos_token_id": ENDS, "text_config": OBJECT.or_none()}  # of config.json and generation_config.json
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer of one model; `Tokenizer.load(path)` makes it.

    eos       ids that end a turn: generation stops at any of them.
    size      entries of the vocabulary, added tokens included; a model's logits may be wider.
    special   ids that are no text (`decode` leaves them out).
    has_chat  whether the model came with a chat template.
    """

    def __init__(self, backend: tokenizers.Tokenizer, named: dict[str, str], eos: Iterable[int], add_bos: bool, template: str | None):
        """`named`: the text of "bos_token", "eos_token", "unk_token", "pad_token", where the model has them."""
        backend.no_truncation()  # a tokenizer.json may carry the settings of its training run
        backend.no_padding()
        # BOS and EOS are no text, marked so or not; a padding token is left alone, since files name ordinary words ("!") as theirs
        ends = {token: backend.token_to_id(token) for token in (named.get("bos_token"), named.get("eos_token")) if token}
        backend.add_special_tokens([token for token, known in ends.items() if known is not None])
        self._backend, self._named, self._template = backend, named, template
        self._bos = ends.get(named.get("bos_token")) if add_bos else None
        self._spelling: tokenizers.Tokenizer | None = None  # of `literal`
        kind = backend.decoder.__getstate__() if backend.decoder else b""
        self.byte_level, self._byte_fallback = b'"ByteLevel"' in kind, b'"ByteFallback"' in kind
        self.eos = frozenset(eos)
        self.special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special) | set(ends.values()) - {None}
        self.size = backend.get_vocab_size()
        self.whole: dict[int, str] = {}  # the text of tokens that `Stream` has met and that are whole characters wherever they stand
        self.has_chat = template is not None

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """The tokenizer of the model that `weights.locate` found: a folder with tokenizer.json, or a GGUF file.

        Raises ModelError when there is none or it cannot be read. A GGUF file whose pre-tokeniser is unknown gives a warning.
        """
        return _from_gguf(gguf.read(path)) if path.is_file() else _from_folder(path)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; with `special`, after the model's BOS if it is trained to start with one.

        The text of a special token ("<|im_end|>") becomes that token, as in transformers: keep untrusted text from holding it.
        """
        ids = self._read(text)
        return [self._bos, *ids] if special and self._bos is not None else ids

    def literal(self, text: str) -> list[int]:
        """Token ids of `text` as what it is: a marker's text (`<|im_end|>`) becomes letters, where `encode` makes it the marker."""
        if self._spelling is None:
            self._spelling = tokenizers.Tokenizer.from_str(self._backend.to_str())
            self._spelling.encode_special_tokens = True
        return self._spelling.encode(text, add_special_tokens=False).ids

    def frame(self, text: str, longest: int) -> list[int]:
        """Token ids of `text` with all that an encoder is trained to have around it ([CLS] text [SEP]), at most `longest`: the end of the text is cut off."""
        ids = self._read(text, around=True)
        if len(ids) <= longest:
            return ids
        inner = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        inner.truncate(max(0, longest - self._backend.num_special_tokens_to_add(False)))
        return self._backend.post_process(inner).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, settings: Mapping | None = None) -> list[int]:
        """Token ids of a conversation, rendered by the model's own template, BOS included if the template writes one.

        messages   dicts with "role" ("system", "user", "assistant") and "content".
        add_generation_prompt   end with the header of the assistant's next turn.
        settings   what the template takes beside these (Qwen3's: {"enable_thinking": False}).
        Raises ModelError when the model has no template, or the template is broken, knows no such setting or refuses the conversation.
        """
        return self._read(self.render(messages, add_generation_prompt, settings))

    def _read(self, text: str, around: bool = False) -> list[int]:
        """Token ids; `around`: with what the tokenizer puts around a text. Raises ValueError for what is no text."""
        given = f"a {type(text).__name__}"
        if isinstance(text, str):
            try:  # as a batch, for which Python's lock is let go: others would wait 0.7 s for a text of 100,000 tokens
                return self._backend.encode_batch_fast([text], add_special_tokens=around)[0].ids
            except TypeError:  # of what Rust does not take: bytes of a command line that are no UTF-8 arrive as halves of surrogate pairs
                odd = next(at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff")
                given = f"no Unicode at character {odd}, half of a surrogate pair"
        raise ValueError(f"the text is {given}; give a str of whole characters (in a file or on a command line: UTF-8)")

    def render(self, messages: list[dict], add_generation_prompt: bool = True, settings: Mapping | None = None) -> str:
        """The prompt that `chat` tokenises, as text."""
        if self._template is None:
            raise ModelError("this model has no chat template; encode a prompt of your own, or use an instruction-tuned model")
        if not messages:
            raise ModelError("messages is empty; give at least one, a dict with 'role' and 'content'")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ModelError(f"messages[{i}] is {message!r:.60}; each message is a dict with 'role' and 'content'")
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **self._named}
        try:
            template, known = _compile(self._template)
            if odd := [name for name in settings or () if name not in known or name in given]:
                takes = ", ".join(sorted(known - given.keys())) or "nothing else"
                raise ModelError(f"the model's chat template has no setting {odd[0]!r:.60}; beside messages it takes: {takes}")
            return template.render(given | dict(settings or {}))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is broken at line {error.lineno}: {error.message}; encode a prompt of your own") from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # a template may do anything
            raise ModelError(f"the model's chat template refused the conversation: {error}; check the roles, their order and that content is text") from None

    def difference(self, other: "Tokenizer") -> str | None:
        """A text that is one token to this one and another to the other; None where there is none."""
        theirs = other._backend.get_vocab()
        return next((text for text, token in self._backend.get_vocab().items() if theirs.get(text, token) != token), None)

    def name(self, token: int) -> str | None:
        """A token as the vocabulary has it, "<|im_end|>"; None for one that it has not."""
        return self._backend.id_to_token(token)

    def piece(self, token: int, before: int | None) -> bytes:
        """UTF-8 of one token that follows `before` (None: at the start); part of a character when the token is one."""
        text = self._backend.id_to_token(token)
        if text is None:  # logits are often wider than the vocabulary
            return b""
        if self.byte_level:
            table = _bytes_of_letters()
            return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        context = [] if before is None else [before]
        return self.decode([*context, token])[len(self.decode(context)) :].encode()


class Stream:
    """The text of tokens that come one at a time: `push` each, then `finish`.

    What comes back is final: the bytes of a character that is not complete wait for the rest of it. A token costs the same
    however many came before. The pieces together are `decode` of all the tokens, but for invalid byte-fallback tokens, where
    `decode` spoils the whole run of bytes and a stream only the invalid ones.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: int | None = None
        self._held = False  # whether the bytes of a character wait

    def push(self, token: int) -> str:
        """The text that `token` completes, "" for none."""
        if not self._held and (text := self._tokenizer.whole.get(token)) is not None:  # 0.2 us instead of 2
            return text
        if token in self._tokenizer.special:
            return ""
        piece = self._tokenizer.piece(token, self._before)
        self._before = token
        alone, text = not self._held, self._utf8.decode(piece)
        self._held = bool(self._utf8.getstate()[0])
        if alone and not self._held and self._tokenizer.byte_level:
            self._tokenizer.whole[token] = text
        return text

    def finish(self) -> str:
        """What was held back: "", or U+FFFD for a character that never got complete."""
        return self._utf8.decode(b"", final=True)


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte (GPT-2, Radford et al., 2019): itself if printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# ---- chat templates


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks the assistant's words for training; here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 asks for a set

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(16)
def _compile(template: str) -> tuple[jinja2.Template, set[str]]:
    """A template with what transformers gives it (the sandbox, whitespace rules, loop controls, tojson, raise_exception,
    strftime_now), and the names that it takes."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson  # jinja2's own escapes HTML
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return env.from_string(template), jinja2.meta.find_undeclared_variables(env.parse(template)) - env.globals.keys()


# ---- a folder


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing; download it, or save it with transformers' AutoTokenizer.from_pretrained(model).save_pretrained(folder)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"{path} is not a tokenizer that the package tokenizers reads ({error}); download it again") from None
    own = read_json(folder / "tokenizer_config.json", keys=OWN) or {}
    config, generation = (read_json(folder / name, keys=SAID) or {} for name in ("config.json", "generation_config.json"))
    texts = {name: own[name]["content"] if isinstance(own[name], dict) else own[name] for name in SPECIAL if own.get(name)}
    eos = {backend.token_to_id(texts["eos_token"])} if "eos_token" in texts else set()
    inner = config.get("text_config") or {}
    check_keys(f"{folder / 'config.json'}: text_config", inner, {"eos_token_id": ENDS})
    for ids in (said.get("eos_token_id") for said in (generation, config, inner)):
        eos |= set(ids if isinstance(ids, list) else [ids])
    eos -= {None}
    if len(eos) > MOST_ENDS:
        raise ModelError(f"{folder}: {len(eos)} tokens end a text by eos_token_id; at most {MOST_ENDS} may")
    bos = backend.token_to_id(texts.get("bos_token", ""))
    begins = bos is not None and backend.encode("").ids[:1] == [bos]  # tokenizer.json's post-processor says so
    return Tokenizer(backend, texts, eos, bool(own.get("add_bos_token", begins)), _template_of(folder, own))


def _template_of(folder: Path, config: dict) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json: a string, or named ones of which "default" or the first."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{jinja} is not UTF-8 text ({error.reason} at byte {error.start}); download it again") from None
    found = (read_json(folder / "chat_template.json", keys={"chat_template": TEMPLATES}) or config).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in reversed(found)}
    if isinstance(found, dict):
        return found.get("default", next(reversed(found.values()), None))
    return found


# ---- a GGUF file


class Pre(NamedTuple):
    """How a byte-level vocabulary cuts text into words, within which its merges apply: each pattern in turn, its matches set apart."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    bos: bool = False  # text starts with BOS unless the file says otherwise
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

GPT2 = Pre((_GPT2,))
DIGITS = Pre((r"\p{N}", _GPT2))
LLAMA3 = Pre((_WORDS + r"|\p{N}{1,3}" + _TAIL,), whole_words=True, bos=True)
QWEN2 = Pre((_WORDS + r"|\p{N}" + _TAIL,), nfc=True)
PRE = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "phi-2"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3._replace(whole_words=False, bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": Pre((_CASED % ("", "") + r"|\p{N}" + _CASED_TAIL,), whole_words=True, bos=True),
    "gpt-4o": Pre((_CASED % (_CONTRACTION, _CONTRACTION) + r"|\p{N}{1,3}" + _CASED_TAIL,)),
    "deepseek-coder": Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")  # for files without eot_token_id, as llama.cpp does


def _from_gguf(file: gguf.File) -> Tokenizer:
    tokens = file.need("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    model = file.need("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: tokenizer.ggml.model is {model!r}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are read")
    backend, bos = _byte_level(file, tokens) if model == "gpt2" else (_sentence_piece(file, tokens, kinds), True)
    marked = [(text, kind) for text, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind != USER_DEFINED])
    backend.add_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind == USER_DEFINED])
    ids = {name: _id(file, key, len(tokens)) for name, key in zip(SPECIAL, ("bos", "eos", "unknown", "padding"), strict=True)}
    eot = _id(file, "eot", len(tokens))
    ends = {ids["eos_token"], eot} - {None}
    if eot is None:
        ends |= {backend.token_to_id(text) for text, kind in marked if text in END_OF_TURN and kind == CONTROL}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", bos)
    return Tokenizer(backend, named, ends, add_bos, file.metadata.get("tokenizer.chat_template"))


def _id(file: gguf.File, name: str, size: int) -> int | None:
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and found >= size:
        raise ModelError(f"{file.path}: tokenizer.ggml.{name}_token_id is {found}, outside of the vocabulary of {size}; convert it again")
    return found


def _byte_level(file: gguf.File, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's kind: BPE over bytes, each byte written as a letter. Also: whether text starts with BOS by default."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE:
        warnings.warn(f"{file.path}: tokenizer.ggml.pre {name!r} is unknown; text is cut into words as for gpt-2, which may cost quality", stacklevel=4)
    pre = PRE.get(name, GPT2)
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    backend = _bpe(file, tokens, merges, ignore_merges=pre.whole_words)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, pre.bos


def _sentence_piece(file: gguf.File, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Llama 2's kind: BPE over characters with spaces written as U+2581; a character that is not in the vocabulary is spelled in bytes."""
    if "tokenizer.ggml.merges" in file.metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in file.metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges(tokens, file.need("tokenizer.ggml.scores"))
    unknown = next((text for text, kind in zip(tokens, kinds, strict=False) if kind == UNKNOWN), None)
    backend = _bpe(file, tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    # as llama.cpp and SentencePiece do, a space before each stretch between special tokens, even one that starts with a space
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: each way to split a token in two that are tokens, the best score first."""
    known = frozenset(tokens)
    pairs = []
    for text, score in zip(tokens, scores, strict=True):
        halves = ((text[:i], text[i:]) for i in range(1, len(text)))
        pairs += [(score, len(left), left, right) for left, right in halves if left in known and right in known]
    pairs.sort(key=lambda pair: pair[:2], reverse=True)
    return [(left, right) for _, _, left, right in pairs]


def _bpe(file: gguf.File, tokens: list[str], merges: list[tuple[str, str]], **options) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges, **options))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"{file.path}: its vocabulary and merges do not fit together ({error}); convert it again with a current llama.cpp") from None
