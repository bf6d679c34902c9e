"""Load on a server with OpenAI's routes: many clients that stream, or arrivals at a given rate.

    onchip serve --port 8000 --cache-gib 0.25 &
    python benchmarks/load.py --clients 200 --seconds 60 --out benchmarks/results/cpu/load.json
    python benchmarks/load.py --rate 4 --seconds 60

With --clients each client sends its next request when it has its answer; with --rate requests arrive as a Poisson process whatever the server does, so that
the time to the first token includes the queue. Each client has a pool of its own: httpx looks through all connections of a pool for each request. Memory is
what the server says of itself at /metrics. This is one process on one core: `client_busy` is its share of that core, and near 1 the figures are the client's.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

TOPICS = ["memory", "clouds", "rivers", "bread", "chess", "glass", "winter", "trains", "music", "paper", "salt", "birds", "bridges", "clocks", "maps", "tea"]


@dataclass
class Answers:
    """What the clients saw. Seconds; `per_token` is an answer's time after its first token over its tokens after the first."""

    requests: int = 0
    tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB, one figure every five seconds
    client_busy: float = 0.0  # CPU time of the clients' process over wall time


async def ask(client: httpx.AsyncClient, how: argparse.Namespace, dice: random.Random, answers: Answers) -> None:
    """One streamed answer."""
    words = " ".join(dice.choices(TOPICS, k=how.prompt_words))
    body = {"model": how.model, "messages": [{"role": "user", "content": f"Write about {words}."}], "max_tokens": how.max_tokens, "seed": dice.getrandbits(30)}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    start, first, usage = time.perf_counter(), None, None
    answers.requests += 1
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                answers.errors.append(f"{reply.status_code}: {(await reply.aread()).decode()[:200]}")
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answers.errors.append(event["error"]["message"])
                    return
                if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                    first = time.perf_counter()
                usage = event.get("usage") or usage
    except httpx.HTTPError as error:
        answers.errors.append(repr(error))
        return
    if usage is None:
        answers.errors.append("the stream ended without its usage")
        return
    answers.tokens += usage["completion_tokens"]
    if first is not None:
        answers.first_token.append(first - start)
        if usage["completion_tokens"] > 1:
            answers.per_token.append((time.perf_counter() - first) / (usage["completion_tokens"] - 1))


async def watch(client: httpx.AsyncClient, answers: Answers) -> None:
    while True:
        try:
            text = (await client.get("/metrics")).text
        except httpx.HTTPError as error:
            answers.errors.append(f"/metrics: {error!r}")
            text = ""
        if found := re.search(r"^process_resident_memory_bytes (\S+)", text, re.MULTILINE):
            answers.memory.append(round(float(found[1]) / 2**20, 1))
        await asyncio.sleep(5)


async def ready(client: httpx.AsyncClient, patience: float = 120.0) -> None:
    """Wait for a server that is loading its model."""
    end = time.perf_counter() + patience
    while True:
        try:
            (await client.get("/health")).raise_for_status()
            return
        except httpx.HTTPError as error:
            if time.perf_counter() > end:
                raise SystemExit(f"no healthy server at {client.base_url} after {patience:.0f} s: {error}") from None
        await asyncio.sleep(0.5)


async def load(how: argparse.Namespace) -> tuple[Answers, float]:
    answers, dice = Answers(), random.Random(how.seed)

    async def client_of(seed: int) -> None:
        own = random.Random(seed)
        async with connect() as client:
            while time.perf_counter() < end:
                before = len(answers.errors)
                await ask(client, how, own, answers)
                if len(answers.errors) > before:  # a server that refuses is not asked in a busy loop
                    await asyncio.sleep(1)

    async def visit(seed: int) -> None:
        async with connect() as client:
            await ask(client, how, random.Random(seed), answers)

    async def arrivals() -> None:
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() < end:
                group.create_task(visit(dice.getrandbits(30)))
                await asyncio.sleep(dice.expovariate(how.rate))

    headers = {"Authorization": f"Bearer {how.key}"} if how.key else {}
    trust = httpx.create_ssl_context()  # read once, not once a client

    def connect() -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=how.url, headers=headers, verify=trust, timeout=httpx.Timeout(600))

    async with connect() as client:
        await ready(client)
        watching = asyncio.create_task(watch(client, answers))
        start, busy = time.perf_counter(), time.process_time()
        end = start + how.seconds
        await (arrivals() if how.rate else asyncio.gather(*(client_of(how.seed + i) for i in range(how.clients))))
        seconds = time.perf_counter() - start
        answers.client_busy = (time.process_time() - busy) / seconds
        await asyncio.sleep(0.2)
        watching.cancel()
    return answers, seconds


def quantile(values: list[float], share: float) -> float | None:
    """In milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3, 1) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--key", default="")
    parser.add_argument("--clients", type=int, default=200, help="streams at a time")
    parser.add_argument("--rate", type=float, help="arrivals a second instead, as a Poisson process")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompt-words", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what the figures are of: machine, options of the server")
    parser.add_argument("--out", type=Path)
    how = parser.parse_args()
    for option in ("clients", "rate", "seconds", "max_tokens"):
        if (value := getattr(how, option)) is not None and not value > 0:
            parser.error(f"--{option.replace('_', '-')} is {value}; give more than 0")
    answers, seconds = asyncio.run(load(how))
    row = {name: value for name, value in vars(how).items() if name not in ("out", "key", "url")}
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    row |= {"commit": git.stdout.strip(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "wall_seconds": round(seconds, 1)}
    row |= {"requests": answers.requests, "errors": len(answers.errors), "first_errors": answers.errors[:3], "tokens": answers.tokens}
    row |= {"tokens_per_second": round(answers.tokens / seconds, 1), "client_busy": round(answers.client_busy, 2)}
    for name in ("first_token", "per_token"):
        row[f"{name}_ms"] = {"p50": quantile(asdict(answers)[name], 0.5), "p99": quantile(asdict(answers)[name], 0.99)}
    row["server_memory_mib"] = answers.memory
    text = json.dumps(row, indent=1)
    print(text)
    if how.out:
        how.out.parent.mkdir(parents=True, exist_ok=True)
        how.out.write_text(text + "\n")
    raise SystemExit(1 if answers.errors else 0)


if __name__ == "__main__":
    main()
