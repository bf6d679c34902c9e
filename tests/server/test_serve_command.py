"""`onchip serve`: its mistakes in one sentence, and its end."""

import gc
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from live import PATIENCE, until

import tiny
from onchip import cli
from onchip.core import settings
from onchip.server.run import Recipe, served_name


@pytest.mark.parametrize(
    ("model", "name"), [(None, "smollm2"), ("models/Qwen3-0.6B", "Qwen3-0.6B"), ("models/small.gguf", "small"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
)
def test_a_model_is_called_by_its_name_not_its_place(model, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "models" / "small.gguf").touch()
    assert served_name(model) == name


def test_adapters_have_the_room_of_the_largest(tmp_path):
    for name, rank in (("small", 2), ("large", 5)):
        tiny.save_adapter(tmp_path / name, rank, rank=rank)
    recipe = Recipe(None, {"model": tiny.save(tmp_path / "tiny"), "device": "cpu"}, adapters={name: str(tmp_path / name) for name in ("small", "large")})
    assert list(recipe.build().app.state.front.generators) == ["tiny", "small", "large"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-keys", "none.txt"], "none.txt"),
        (["--api-keys", "empty.txt"], "holds no key"),
        (["--model", "no/such"], "no/such"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--draft", "nowhere"], "model 'nowhere' is not found"),
        (["--adapter", "x"], "is not NAME=FOLDER"),
        (["--adapter", "a=x", "--adapter", "a=y"], "a NAME is given twice"),
        (["--max-queued", "0"], "--max-queued is 0; give 1 or more"),
        (["--replicas", "0"], "--replicas is 0; give 1 or more"),
        (["--replicas", "2"], "--replicas is 2 and --port is 0; give the port"),
        (["--tensor-parallel", "0"], "--tensor-parallel is 0; give 1 or more"),
        (["--tensor-parallel", "2", "--batch-invariant"], "--batch-invariant with --tensor-parallel 2"),
        (["--name", ""], "--name is empty"),
        (["--replicas", "2", "--tensor-parallel", "2"], "a replica has one GPU"),
        (["--api-keys", "."], "--api-keys . cannot be read (Is a directory)"),
        (["--api-keys", "latin.txt"], "--api-keys latin.txt is not UTF-8 text"),
        (["--host", ".."], "--host .. --port 0: "),
        (["--port", "70000"], "--port is 70000; give 1 to 65535, or 0"),
    ],
)
def test_a_mistake_is_one_sentence(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    assert words in _refused(monkeypatch, capsys, "--port", "0", *options) and gc.isenabled()


def test_a_port_in_use_is_said_before_a_model_is_read(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port}: " in _refused(monkeypatch, capsys, "--port", port, "--model", "no/such")


def _refused(monkeypatch, capsys, *options: str) -> str:
    """What `onchip serve` says as it refuses to start."""
    monkeypatch.setattr(sys, "argv", ["onchip", "serve", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    return capsys.readouterr().err


def test_sigterm_lets_answers_end(tmp_path):
    """`onchip serve` as a process: after SIGTERM the stream on its way is completed, new connections are refused, and the process ends."""
    folder = tiny.save(tmp_path / "tiny", max_position_embeddings=512)
    command = [sys.executable, "-m", "onchip.cli", "serve", "--model", folder, "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings.of_child(OMP_NUM_THREADS="1")) as server:
        address = next(line for line in server.stderr if "running on" in line).split(" on ")[1].split()[0]
        body = {"model": "tiny", "prompt": "why wait", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGTERM)
            until(lambda: not _connects(address))
            rest = [line for line in lines if line]
        assert first.startswith("data: ") and rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert server.wait(PATIENCE) in (0, -signal.SIGTERM)


def test_answers_that_outlast_the_drain_are_told(tmp_path):
    """One sentence in the log, and the stream ends with an error that its client can read."""
    folder = tiny.save(tmp_path / "tiny", max_position_embeddings=1 << 15)
    command = [sys.executable, "-m", "onchip.cli", "serve", "--model", folder, "--device", "cpu", "--port", "0", "--drain", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings.of_child(OMP_NUM_THREADS="1")) as server:
        address = next(line for line in server.stderr if "running on" in line).split(" on ")[1].split()[0]
        body = {"model": "tiny", "prompt": ["why wait", "the fox"], "max_tokens": 30_000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        told = "the server was shut down before the answer was complete", "overloaded_error"
        assert rest[-1] == "data: [DONE]" and all(words in line for line in rest[-3:-1] for words in told)
        log = server.stderr.read()
        assert server.wait(PATIENCE) in (0, -signal.SIGTERM)
    assert "--drain 0: 2 answers were on their way after so many seconds and end here" in log and "Traceback" not in log and "ERROR" not in log


def _connects(address: str) -> bool:
    try:
        httpx.get(f"{address}/health", timeout=PATIENCE)
    except (httpx.NetworkError, httpx.RemoteProtocolError):  # the latter two where it was still waiting to be accepted
        return False
    return True
