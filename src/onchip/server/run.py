"""From an app to a running process: uvicorn, file descriptors, a graceful end."""

import resource

import uvicorn
from starlette.types import ASGIApp


def run(app: ASGIApp, host: str, port: int, drain: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then no connection is taken, and answers on their way have `drain` seconds to end."""
    _room_for_connections()
    # one access line a request would cost more than a decode step of a small model
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=drain, access_log=False, backlog=4096)


def _room_for_connections() -> None:
    """As many open sockets as the system allows: 1,024 is a common default, and each queued request holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
