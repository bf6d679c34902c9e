"""`onchip serve --replicas 2`, a real run: both answer, one is killed in the middle of an answer, and SIGTERM lets answers end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import PATIENCE, until
from prometheus_client.parser import text_string_to_metric_families

import tiny
from onchip import cli
from onchip.core import settings
from onchip.server.metrics import Metrics, joined, merged

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, 400 MB: pip install '.[ray]'")
# 25 ms a step: an answer of 200 tokens has a middle
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "max_position_embeddings": 512}
ASK = {"model": "tiny", "prompt": "why wait", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


class Server:
    """`onchip serve --replicas 2` as a process."""

    def __init__(self, folder, port: int):
        options = ["--replicas", "2", "--port", str(port), "--device", "cpu", "--dtype", "fp32", "--dummy-weights"]
        command = [sys.executable, "-m", "onchip.cli", "serve", "--model", folder, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings.of_child(OMP_NUM_THREADS="1"))
        log = []
        for line in self.process.stderr:
            log.append(line)
            if line.startswith("running on"):
                break
        else:
            raise AssertionError("".join(log))
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()  # a full pipe would stop it
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=PATIENCE)

    def stream(self, session: str) -> list[str]:
        """The lines of an answer, as far as it came."""
        lines = []
        try:
            with httpx.stream("POST", f"{self.address}/v1/completions", json=ASK, headers={"x-session-id": session}, timeout=PATIENCE) as answer:
                lines += [line for line in answer.iter_lines() if line]
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            pass
        return lines

    def of_each(self, name: str) -> dict[str, float]:
        """A figure of each replica that answers."""
        found = {family.name: family for family in text_string_to_metric_families(self.get("/metrics").text)}[name].samples
        return {sample.labels["replica"]: sample.value for sample in found if not sample.name.endswith("_created")}

    def of_session(self, some: int) -> dict[str, str]:
        """{session: replica}, half of them each's."""
        from onchip.server.sessions import rank

        found, replicas = {}, sorted(self.of_each("onchip_requests_running"))
        for n in range(1000):
            replica = min(replicas, key=lambda one, n=n: rank(f"{n}", one))
            if list(found.values()).count(replica) < some // 2:
                found[f"{n}"] = replica
        return found

    def replicas(self) -> list[int]:
        """The processes of the replicas, which are this server's and no other's."""
        rows = [line.split(None, 2) for line in subprocess.check_output(["ps", "-eo", "pid,ppid,args"], text=True).splitlines()[1:]]
        ours = {self.process.pid}
        for _ in range(4):  # server, Ray's daemon, worker
            ours |= {int(pid) for pid, parent, _ in rows if int(parent) in ours}
        return [int(pid) for pid, _, args in rows if int(pid) in ours and "ServeReplica:onchip:engine" in args]


@needs_ray
def test_two_replicas(tmp_path):
    server = Server(tiny.save(tmp_path / "tiny", weights=False, **SIZES), 20_000 + os.getpid() % 10_000)
    try:
        assert server.get("/health").json() == {"status": "ok", "replicas": 2, "serving": 2}
        of = server.of_session(8)
        with ThreadPoolExecutor(8) as pool:
            several = {session: pool.submit(server.stream, session) for session in of}
            until(lambda: server.of_each("onchip_requests_running") == Counter(of.values()))
            one, other = server.replicas()
            os.kill(one, signal.SIGKILL)
            told = until(lambda: (answer := server.get("/health")).json()["serving"] == 1 and answer)
            assert told.status_code == 200 and told.json()["status"] == "degraded" and "1 of 2 replicas answer" in told.json()["reason"]
            answers = {session: answer.result() for session, answer in several.items()}
        whole = {session for session, lines in answers.items() if lines and lines[-1] == "data: [DONE]"}
        lost, left = sorted(set(of.values()), key=[of[session] for session in whole].count)
        assert whole == {session for session in of if of[session] == left}, "the answers of one replica break off, and no others"
        assert all('"finish_reason":"length"' in answers[session][-2] for session in whole)
        until(lambda: server.get("/health").json() == {"status": "ok", "replicas": 2, "serving": 2})  # another in its place
        assert len(server.replicas()) == 2 and other in server.replicas()
        there = server.of_each("onchip_requests_running")
        assert left in there and lost not in there

        # a client that leaves, and one session on one replica
        before = server.of_each("onchip_generated_tokens")
        with httpx.stream(
            "POST", f"{server.address}/v1/completions", json=ASK | {"max_tokens": 400}, headers={"x-session-id": "a"}, timeout=PATIENCE
        ) as answer:
            next(answer.iter_lines())
        until(lambda: (stats := server.get("/stats").json())["ended"]["cancelled"] == 1 and stats["running"] == 0)
        for _ in range(4):
            httpx.post(f"{server.address}/v1/completions", json=ASK | {"max_tokens": 2}, headers={"x-session-id": "a"}, timeout=PATIENCE).raise_for_status()
        grown = {replica: value - before[replica] for replica, value in server.of_each("onchip_generated_tokens").items()}
        assert sorted(grown.values())[0] == 0 and 8 < max(grown.values()) < 400
        refused = httpx.post(f"{server.address}/v1/completions", json=ASK | {"n": 0}, timeout=PATIENCE)
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("n is 0")

        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(server.stream, "a")
            until(lambda: server.get("/stats").json()["running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            late = {"json": ASK | {"max_tokens": 1, "stream": False}, "timeout": PATIENCE}
            refused = until(lambda: (answer := httpx.post(f"{server.address}/v1/completions", **late)).status_code != 200 and answer)
            assert refused.status_code == 503 and "the server is shutting down" in refused.json()["error"]["message"]
            assert last.result()[-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        assert not server.replicas()
    finally:
        server.process.kill()


def test_figures_of_several_servers():
    """Counts are summed, times are the slowest's, and each sample says which replica it is of."""
    one, other = Metrics(8), Metrics(8)
    one.new_tokens, one.kernels, other.new_tokens = 5, {"sample": "reference"}, 2
    other.token_took(0.25)
    found = merged([one.stats(), other.stats()])
    assert (found["new_tokens"], found["pages"], found["kernels"], found["token_ms"]) == (7, 16, {"sample": "reference"}, {"p50": 250.0, "p99": 250.0})
    assert found["first_token_ms"] == {"p50": None, "p99": None} and found["ended"]["stop"] == 0
    whole = joined({"a": one.text().decode(), "b": other.text().decode()}).decode()
    assert 'onchip_generated_tokens_total{replica="a"} 5.0\nonchip_generated_tokens_total{replica="b"} 2.0\n' in whole
    assert 'onchip_time_per_token_seconds_bucket{le="0.25",replica="b"} 1.0' in whole and whole.count("# TYPE onchip_steps_total counter") == 1
    assert json.dumps(found)


@pytest.mark.parametrize(
    ("device", "there", "words"),
    [
        ("cuda:1", {"CPU": 8, "GPU": 2}, "--device is cuda:1"),
        (None, {"CPU": 8, "GPU": 1}, "the GPUs are 1"),
        ("cuda", {"CPU": 8}, "the GPUs are 0"),
        ("cpu", {"CPU": 1, "GPU": 8}, "the CPUs are 1"),
    ],
)
@needs_ray
def test_more_replicas_than_there_is_room_for(device, there, words):
    from onchip.server.replicas import share_of

    with pytest.raises(ValueError, match=words):
        share_of(device, 2, there)
    assert share_of(None, 2, {"CPU": 9.0}) == {"num_cpus": 4} and share_of(None, 2, {"CPU": 8.0, "GPU": 2.0}) == {"num_gpus": 1, "num_cpus": 1}


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else there(name, *rest))
    monkeypatch.setattr(sys, "argv", ["onchip", "serve", "--replicas", "2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--replicas is 2 and ray is not installed; pip install '.[ray]'" in capsys.readouterr().err
