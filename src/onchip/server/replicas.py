"""`onchip serve --replicas N`: engines beside each other, each a process with the whole server of `app.py`, on this machine or all of a Ray cluster.

Ray Serve's proxy gives a request to the less busy of two replicas, or, where it names its session (`x-session-id`), always to the same one, whose prefix
cache knows how it begins. One that dies or is stuck is started anew. What a route tells of the server (`/health`, `/metrics`, `/stats`) is asked of all.
Needs the extra `ray`.
"""

import signal
import sys
import threading
import time
from functools import partial
from typing import NamedTuple

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from onchip.core import settings
from onchip.server.app import Front
from onchip.server.metrics import joined, merged
from onchip.server.run import Recipe, room_for_connections
from onchip.server.sessions import BySession

APP, ENGINE = "onchip", "engine"  # Ray's names of the application and of its one deployment
PATIENCE = 5.0  # seconds that a replica may take to tell of itself
PERIOD, SILENCE = 2.0, 10.0  # seconds between Ray's own questions to each replica, and that it waits for an answer; after three it starts another

QUIET = {"log_level": "WARNING", "enable_access_log": False}  # a line a request would cost more than a decode step of a small model


class Told(NamedTuple):
    """What a replica says of itself."""

    replica: str
    trouble: str | None
    metrics: str
    stats: dict


class Together(Front):
    """The front of one of `replicas` servers, which tells of all of them."""

    each = 4e-3  # an event takes 1 ms of a replica by Ray, of a server alone 0.04

    def __init__(self, *given, replicas: int):
        super().__init__(*given)
        self.replicas = replicas

    def tell(self) -> Told:
        metrics = self.serving.metrics
        return Told(serve.get_replica_context().replica_id.unique_id, self.serving.trouble(), metrics.text().decode(), metrics.stats())

    async def _all(self) -> list[Told]:
        """Of those that answer; where one keeps silent, of this one alone."""
        asked = serve.get_deployment_handle(ENGINE, APP).broadcast("tell")
        try:
            found = await asked.results_async(timeout_s=PATIENCE, return_exceptions=True)
        except TimeoutError:
            found = []
        return [told for told in found if isinstance(told, Told)] or [self.tell()]

    async def health(self) -> dict:
        """ "degraded" is healthy: somebody serves."""
        told = await self._all()
        troubles = [one.trouble for one in told if one.trouble]
        well = len(told) - len(troubles)
        found = {"status": "ok" if well == self.replicas else "degraded" if well else "down", "replicas": self.replicas, "serving": well}
        if well == self.replicas:
            return found
        return found | {"reason": troubles[0] if troubles else f"{well} of {self.replicas} replicas answer; those that have ended are started again"}

    async def metrics(self) -> bytes:
        return joined({one.replica: one.metrics for one in await self._all()})

    async def stats(self) -> dict:
        return merged([one.stats for one in await self._all()]) | self.about()


def run(recipe: Recipe, replicas: int, host: str, port: int, drain: int) -> None:
    """Serve until SIGTERM or Ctrl-C; then no request is taken, and answers on their way have `drain` seconds to end.

    On the cluster that `ray start` or RAY_ADDRESS names, else on this machine. Raises ValueError for more replicas than it has room for, and for replicas
    that do not start.
    """
    room_for_connections()
    settings.unless_set("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers
    ray.init(logging_level="warning")
    stop = threading.Event()
    try:
        share = share_of(recipe.engine["device"], replicas, ray.cluster_resources())
        if serve.status().proxies:
            raise ValueError("serve: this Ray cluster runs Serve already, under an address of its own; end that by `serve shutdown`, or use another cluster")
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=QUIET)
        except ray.exceptions.RayError as error:
            raise ValueError(f"serve: nothing can listen at {host}:{port}: {_last_line(str(error))}") from None
        try:
            serve.run(_application(recipe, replicas, share, drain), name=APP, logging_config=QUIET)
        except RuntimeError:
            said = serve.status().applications[APP].deployments[ENGINE].message
            raise ValueError(f"serve: the replicas did not start: {_last_line(said)}") from None
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        print(f"running on http://{host}:{port}", file=sys.stderr, flush=True)
        stop.wait()
        for number, handler in before.items():  # a second one does not wait
            signal.signal(number, handler)
        _drain(drain)
        serve.delete(APP, _blocking=False)
        while APP in serve.status().applications:  # answers are on their way, for `drain` seconds at most
            time.sleep(0.2)
        serve.shutdown()
    finally:
        ray.shutdown()


def _drain(patience: float) -> None:
    """Let all replicas refuse what comes, by a 503 that says why, and wait for the answers on their way: of an application that Ray ends its proxy says 404."""
    engines, end = serve.get_deployment_handle(ENGINE, APP), time.monotonic() + patience
    while time.monotonic() < end:
        try:
            left = engines.broadcast("drain").results(timeout_s=PATIENCE, return_exceptions=True)
        except TimeoutError:
            continue  # one that is stuck, or is started anew; the others have heard
        if not any(count for count in left if isinstance(count, int)):
            return
        time.sleep(0.2)


def _last_line(trace: str) -> str:
    return trace.strip().splitlines()[-1]


def share_of(device: str | None, replicas: int, there: dict[str, float]) -> dict[str, float]:
    """What each replica gets of a cluster's CPUs and GPUs."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device is {device} and each of the replicas has its own GPU; give --device cuda, or cpu")
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    kind, count = ("GPUs", gpus) if device == "cuda" or (device is None and gpus) else ("CPUs", cpus)
    if replicas > count:
        raise ValueError(f"--replicas is {replicas} and the {kind} are {count}; give at most as many, or add machines to the Ray cluster")
    return {"num_gpus": 1, "num_cpus": 1} if kind == "GPUs" else {"num_cpus": cpus // replicas}


def _application(recipe: Recipe, replicas: int, share: dict[str, float], drain: int) -> serve.Application:
    def app():  # where it runs
        return recipe.build(partial(Together, replicas=replicas))

    @serve.deployment(
        name=ENGINE,
        num_replicas=replicas,
        max_ongoing_requests=recipe.limits.max_queued + 100,  # those beyond `max_queued` get the server's own 503
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=PERIOD,
        health_check_timeout_s=SILENCE,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(request_router_class=BySession),
        ray_actor_options=share,
    )
    @serve.ingress(app)
    class Engine:
        async def tell(self) -> Told:
            return self.app.app.state.front.tell()

        async def drain(self) -> int:
            return self.app.app.state.front.serving.drain()

        async def check_health(self) -> None:
            """For Ray."""
            serving = self.app.app.state.front.serving
            if not serving.draining and (why := serving.trouble()):
                raise RuntimeError(why)

    return Engine.bind()
