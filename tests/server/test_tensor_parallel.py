"""`onchip serve --tensor-parallel`: two ranks (gloo; on GPUs NCCL, four where there are as many) say what one says, end together, and a lost one is said."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
import torch
from live import PATIENCE, until

import onchip
import tiny
from onchip.core import settings
from onchip.server.ranks import start
from onchip.server.run import Recipe

GPUS = torch.cuda.device_count()
DEVICE, RANKS = ("cuda", 4 if GPUS >= 4 else 2) if GPUS > 1 else ("cpu", 2)
ASK = {"model": "tiny", "prompt": "why wait", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Beside the model a file that nobody is to import, for where they are started."""
    folder = tiny.save(tmp_path_factory.mktemp("ranks") / "tiny", max_position_embeddings=512, num_key_value_heads=4)
    (folder / "tokenizers.py").write_text("raise SystemExit('not this one')")
    return folder


@contextmanager
def serve(folder, *options):
    command = [sys.executable, "-P", "-m", "onchip.cli", "serve", "--model", str(folder), "--device", DEVICE, "--dtype", "fp32"]
    command += ["--cache-gib", "0.5", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=settings.of_child(OMP_NUM_THREADS="1")) as server:
        try:
            yield server
        finally:
            server.kill()


def address_of(server) -> str:
    return next(line for line in server.stderr if "running on" in line).split(" on ")[1].split()[0]


def ranks_of(server) -> list[int]:
    """Process ids of the ranks that a server has started."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(server.pid)], capture_output=True, text=True, check=False).stdout
    ranks = [int(line.split()[0]) for line in found.splitlines() if "onchip.server.ranks" in line]
    assert len(ranks) == RANKS - 1
    return ranks


def alive(pid: int) -> bool:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()[:1] not in ("", "Z")


def test_ranks_answer_as_one_and_end_with_the_server(folder):
    alone = onchip.LLM(folder, device=DEVICE, dtype="fp32", cache_gib=0.5)
    expected = alone.generate(ASK["prompt"], onchip.SamplingParams(max_tokens=24, ignore_eos=True))[0]
    with serve(folder, "--tensor-parallel", str(RANKS)) as server:
        address = address_of(server)
        ranks = ranks_of(server)
        answers = [httpx.post(f"{address}/v1/completions", json=ASK, timeout=PATIENCE).json() for _ in range(2)]
        assert [answer["choices"][0]["text"] for answer in answers] == [expected.text] * 2
        form = ASK | {"structured_outputs": {"choice": ["red", "green"]}, "ignore_eos": False}
        assert httpx.post(f"{address}/v1/completions", json=form, timeout=PATIENCE).json()["choices"][0]["text"] in ("red", "green")
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 < len(expected.tokens)  # less than a page
        with httpx.stream("POST", f"{address}/v1/completions", json=ASK | {"stream": True, "max_tokens": 100}, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(PATIENCE) in (0, -signal.SIGTERM)
        until(lambda: not any(map(alive, ranks)))
        assert "Fatal" not in server.stderr.read()


def test_a_lost_rank_ends_the_server_and_says_so(folder):
    with serve(folder, "--tensor-parallel", str(RANKS)) as server:
        address_of(server)
        ranks = ranks_of(server)
        subprocess.run(["kill", "-9", str(ranks[-1])], check=True)
        assert server.wait(PATIENCE) == 1
        assert f"rank {len(ranks)} has ended (-9), and with it the engine: the server ends" in server.stderr.read()


@pytest.mark.wide
def test_ranks_end_where_the_server_is_killed(folder):
    with serve(folder, "--tensor-parallel", str(RANKS)) as server:
        address_of(server)
        ranks = ranks_of(server)
        server.kill()
        until(lambda: not any(map(alive, ranks)))


@pytest.mark.wide
def test_a_mistake_that_all_ranks_find_is_one_sentence(folder):
    with serve(folder, "--tensor-parallel", str(RANKS), "--kv-format", "int3") as server:
        said = server.communicate(timeout=PATIENCE)[1]
    assert server.returncode == 2 and re.fullmatch("error: 'int3' is not a format of keys and values; .*", said.strip())


def test_what_no_rank_could_do_is_said_before_one_is_started(folder):
    with pytest.raises(ValueError, match="cannot be cut in 3 equal parts"):
        start(Recipe(None, {"model": folder, "device": "cpu"}, ranks=3))
    with pytest.raises(ValueError, match="--device is cuda:1 and each rank"):
        start(Recipe(None, {"model": folder, "device": "cuda:1"}, ranks=2))
